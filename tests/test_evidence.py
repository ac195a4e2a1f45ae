"""What the docs say was measured is what the committed lines say; what moves no line is left to the reader."""

import copy
import importlib
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import glue_plans
import peers
import programs
import pytest
import report_study
import same_numbers
import tiny_glue
import trl_variants
from glue_plans import FLOAT, OWN, Plan, qat, ramp
from repo import ROOT
from short_runs import Lines
from transformers import AutoConfig, AutoModelForSequenceClassification

from moq_hf.config import MoQConfig
from moq_hf.grid import MOST_FULL_BITS

RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# Each makes the tables of its pages anew.
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("results", "report_study --plan {plans}"),
        ("study", "report_study --plan {plans}"),
        ("recipes", "report_study --plan {plans}"),
        ("tasks", "tasks_study --report"),
        ("perplexity", "perplexity --report"),
        ("../guide/language-models", "perplexity --report"),
    ],
)
def test_the_tables_are_those_of_the_committed_lines(name: str, command: str, tmp_path: Path) -> None:
    text, again = page(f"docs/evidence/{name}.md"), tmp_path / "page.md"
    again.write_text(text, encoding="utf-8")
    script, *words = shlex.split(command.format(plans=" ".join(re.findall(r"<!-- study (\w+) -->", text))))
    importlib.import_module(script).main([*words, "--page", str(again)])
    command = f"python benchmarks/{script}.py {shlex.join(words)} --page docs/evidence/{name}.md"
    assert again.read_text(encoding="utf-8") == text, f"renew them with: {command}"


def test_the_tables_against_other_libraries_are_those_of_the_committed_lines() -> None:
    text, lines = page("docs/evidence/peers.md"), Lines(RESULTS / "peers.jsonl").lines
    assert peers.markdown([line for line in lines if line.get("rows") in (None, 62 * 32)]) in text
    assert peers.scores([line for line in lines if line.get("rows") == "all"]) in text


def test_the_figures_of_language_models_are_those_of_the_run() -> None:
    table = trl_variants.table(result("trl"))
    assert f"<!-- trl -->\n{table}\n<!-- end of trl -->" in page("docs/guide/language-models.md")
    text, found = page("examples/sft/README.md"), result("sft")
    assert [size for size in found["bytes"].values() if f"| {size:,} |" not in text] == []
    for server, right in found["right"].items():
        assert f"| {right} of {found['questions']}, {server} |" in text


def test_what_the_docs_say_of_the_proof_was_measured() -> None:
    measured = result("proof")
    text = page("docs/evidence/speed.md")
    assert f"took {100 * measured['median_share']:.1f} % of a run of {measured['steps_of_the_run']} steps" in text
    assert f"median of {len(measured['runs'])} runs" in text


def test_the_table_of_a_step_is_that_of_the_lines() -> None:
    cases = result("step_time")["results"]
    steps = {case: arms for case, arms in cases.items() if "evaluation" not in case}
    text = page("docs/evidence/speed.md")
    for arm in steps["float32, 1 x 16 x 64"]:
        ratios = [f"{arms[arm]['ratio']:.3f}" if arm in arms else "" for arms in steps.values()]
        assert "| " + " | ".join([arm, *ratios]) + " |\n" in text
    evaluation = cases["float32, evaluation, 1 x 16"]["moq_hf, 8 bits"]
    assert f"in evaluation took {evaluation['ratio']:.3f} of" in text


def test_the_table_of_llama_cpp_is_that_of_the_lines() -> None:
    measured, text = result("llamacpp"), page("docs/evidence/llama-cpp.md")

    def cells(way: dict[str, Any]) -> str:
        return f"{way['kl']:.1e} | {way['top1']:.2f} | {way['same_tokens']}"

    for case in measured["cases"]:
        ways = case["ways"]
        (theirs,) = (name for name in ways if name.startswith("llama-quantize"))
        own = cells(ways["moq-hf export"]) if "moq-hf export" in ways else " | | "
        names = f"| {case['family']} | {case['grid']} | {own} | {theirs.removeprefix('llama-quantize ')}"
        assert f"{names} | {cells(ways[theirs])} | {ways['float32']['kl']:.1e} |\n" in text
    assert text.count("\n| ") == len(measured["cases"]) + 2


@pytest.mark.parametrize(
    ("recipe", "plan", "bits", "name"),
    [
        ("w4", "recipes", 4, "basic QAT, float first"),
        ("w3", "recipes", 3, "basic QAT, float first"),
        ("w2", "recipes", 2, "basic QAT, float first"),
    ],
)
def test_the_recipes_for_low_bits_are_what_was_measured(recipe: str, plan: str, bits: int, name: str) -> None:
    # Of the grids that were tried the first one listed.
    arm = next(arm for arm in glue_plans.PLANS[plan].arms if (arm.bits, arm.name) == (bits, name))
    measured = {key: value for key, value in (arm.config() or {}).items() if key != "distillation"}
    # Full is what "auto" is at these bits, no period counts where bits do not fall, and tables were in float.
    same = {"range": "auto", "period": "auto", "embeddings": "auto"}
    assert MoQConfig.load(recipe) == replace(MoQConfig.from_dict(measured), **same)
    assert measured["quantize_algo"]["range"] == "full" and bits <= MOST_FULL_BITS


def test_what_the_guides_promise_is_what_was_measured() -> None:
    """The differences on average over all tasks, of each recipe, of basic QAT and of rounding."""
    guide, configs, readme = (page(f"{name}.md") for name in ("docs/guide/which-recipe", "configs/README", "README"))
    text = page("docs/evidence/recipes.md").split("<!-- study recipes -->")[1].split("| all three |")[1]
    lines = [line for line in text.split("<!--")[0].splitlines() if ", full |" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    in_groups = {int(row[0]): row[5] for row in rows if row[1] == "groups of 32, full"}
    found = {(int(row[0]), row[2]): row[5] for row in rows if row[1] == "per channel, full"}
    for bits in (4, 3, 2):
        rounded, ours = found[bits, "after training"], found[bits, "basic QAT, float first"]
        plain = found[bits, "basic QAT, all steps"]
        cells = f"| {bits} | {rounded} | {in_groups[bits]} | {ours} | {plain} |"
        assert " ".join(cells.split()) in guide
        cells = f"| {bits} | {ours} | {plain} | {rounded} | {in_groups[bits]} |"
        assert " ".join(cells.split()) in configs
    below = found[2, "basic QAT, float first"].removeprefix("-")
    assert f"{below} points below float on average over three tasks and five seeds" in readme
    assert f"is {found[2, 'basic QAT, all steps'].removeprefix('-').split()[0]} below" in readme


def test_differences_are_paired_by_seed() -> None:
    ours, theirs = {1: 80.0, 2: 70.0, 3: 60.0, 4: 1.0}, {1: 79.0, 2: 68.0, 3: 57.0}
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, and Student's t of 2 degrees of freedom is 4.303.
    assert report_study.paired(ours, theirs) == "+2.0 ± 2.5 (3 of 4)"
    assert report_study.paired({1: 80.0}, theirs) == "+1.0"
    assert report_study.paired({9: 80.0}, theirs) == ""


def test_a_study_runs_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = importlib.import_module("glue_study")
    taught = {"distillation": {"teacher": OWN}}
    plan = Plan((FLOAT, qat(2), ramp(3, 2, 0.8, "taught", taught)), ("sst2",), (1,))
    monkeypatch.setattr(study, "PLANS", {"small": plan})
    model = tiny_glue.make_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(model, hidden_size=64, intermediate_size=64)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    (tmp_path / "glue" / "sst2").mkdir(parents=True)
    for split, count in (("train", 160), ("validation", 24)):
        tiny_glue.write_rows(tmp_path / "glue" / "sst2" / f"{split}.jsonl", tiny_glue.make_rows("sst2", count))
    places = {"data_dir": "glue", "model_dir": "models", "output": "lines.jsonl", "model_name_or_path": "model"}
    words = ["--plan", "small", "--tasks", "sst2", *(f"--{name}={tmp_path / place}" for name, place in places.items())]
    programs.warm()
    study.main([*words, "--seeds", "1"])
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = {line["arm"]: line for line in lines if line["arm"] != "after training"}
    assert [line["mean_bits"] for line in trained.values()] == [32.0, 2.0, 2.0]
    assert trained["taught"]["last_drop"] == 4
    kept = [line for line in lines if line["arm"] != "taught"]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    capsys.readouterr()
    study.main([*words, "--seeds", "1", "--list"])
    assert capsys.readouterr().out.splitlines() == ["sst2 1 taught 2 8 blocks 0.0002"]


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
