"""The tables of the docs, and the differences on page one, are those of the committed results."""

import importlib
import itertools
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import glue_plans
import programs
import pytest
import report_study
import results_page
import tiny_glue
from glue_plans import FLOAT, OWN, Plan, qat, ramp
from repo import ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification

from moq_hf import MoQConfig
from moq_hf.grid import MOST_FULL_BITS

RESULTS = ROOT / "benchmarks" / "results"
RESULTS_OF_INPUTS = "results/rounded-inputs"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_committed_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = "|".join(map(re.escape, results_page.TABLES))
    stale = re.sub(rf"(?s)(?<=-->\n)\|(?:(?!<!-- ).)*(?=<!-- end of (?:{made}) -->)", "| stale |\n", text)
    assert stale != text and results_page.renewed(stale) == text, "renew them with: python benchmarks/results_page.py"


def test_every_table_is_on_a_page_and_every_mark_has_a_table() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in results_page.PAGES)
    # Those of docs/reference/support.md that tests make, of runs and of `moq_hf.serving`.
    others = ("families", "models", "servers")
    found = re.findall(r"^<!-- end of (.+) -->$", pages, re.MULTILINE)
    assert sorted(found) == sorted([*results_page.TABLES, *others])


def test_every_file_of_results_is_used() -> None:
    """By a table, or by name in a page, a test or the code that rests on it."""
    places = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "moq_hf").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in (*places, *(ROOT / "benchmarks").glob("*.py"))]
    names = [path.stem for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")]
    named = re.compile(r"""["(/`]({})(?:\.jsonl?|["'])""".format("|".join(names)))
    assert {*names} - {name for text in texts for name in named.findall(text)} == set()


def test_what_was_tried_beside_other_libraries_works() -> None:
    for beside, row in result("neighbors")["neighbors"].items():
        basics = row["uses"]["basics"]
        # What compressed-tensors packs from 0.18 on.
        is_old = row["versions"]["compressed-tensors"].startswith("0.17.")
        failed = {name for name, layout in basics.items() if layout != "packed"}
        assert failed == ({"BERT, 3 bits"} if is_old else set()), beside
        assert [said for name, said in row["uses"].items() if name != "basics" and said.startswith("error")] == []
        assert row["conflicts"] == [], beside
        for library in ("transformers", "compressed-tensors") if row["needs_cuda"] else ():
            assert row["versions"][library] == row["resolved"][library]


def test_the_speeds_of_int8_are_those_of_the_run() -> None:
    speeds = results_page.document("int8_speeds")["speed"]

    def told(kernels: str, bits: int) -> str:
        found = [shape[f"int8, activations of {bits} bits"] for shape in speeds[kernels].values()]
        return f"{min(found):.2f} to {max(found):.2f}"

    text = " ".join(page("docs/reference/formats.md").split())
    assert f"{told('VNNI', 8)} times its speed with VNNI, and {told('AVX2', 8)} times without" in text
    assert f"with activations of 7 bits {told('AVX2', 7)}" in text


def test_the_figures_of_language_models_are_those_of_the_run() -> None:
    text, found = page("examples/sft/README.md"), result("sft")
    assert [size for size in found["bytes"].values() if f"| {size:,} |" not in text] == []
    for server, right in found["right"].items():
        assert f"| {right} of {found['questions']}, {server} |" in text


def test_what_was_measured_to_be_exact_is_exact() -> None:
    gpu = {row["what"]: row["value"] for section in result("gpu")["sections"].values() for row in section["figures"]}
    from_definition = [value for what, value in gpu.items() if "the definition" in what]
    assert from_definition and not any(from_definition)
    assert gpu["tests failed"] == gpu["tests skipped"] == gpu["graphs compiled afterwards"] == 0
    assert gpu["delivered = evaluated"] and gpu["resumed: weights bit-equal to those of the whole run"]
    assert {line["difference"] for line in results_page.lines_of("lora") if "task" in line} == {0.0}
    tensors = result("gpt_oss_gguf")["tensors"].values()
    assert tensors and all(tensor == {"type": "MXFP4", "largest_difference": 0.0} for tensor in tensors)


@pytest.mark.parametrize(("preset", "bits"), [("w4", 4), ("w3", 3), ("w2", 2)])
def test_the_presets_for_low_bits_are_what_was_measured(preset: str, bits: int) -> None:
    """But for the embedding tables, which were float: the page says so."""
    (arm,) = (
        arm
        for arm in glue_plans.PLANS["recipes"].arms
        if (arm.name, arm.bits, arm.groups) == ("basic QAT, float first", bits, "per channel, full")
    )
    measured = arm.config() or {}
    wanted = MoQConfig.from_dict({key: value for key, value in measured.items() if key != "distillation"})
    # Full is what "auto" is at these bits, no period counts where bits do not fall, and tables were in float.
    assert wanted.range == "full" and bits <= MOST_FULL_BITS
    assert MoQConfig.load(preset) == replace(wanted, range="auto", period="auto", embeddings="auto")
    assert "embedding tables are in float" in recipes()


def recipes() -> str:
    return " ".join(page("docs/results/recipes.md").split())


def is_noise(difference: str) -> bool:
    points, half = map(float, difference.split(" ± "))
    return abs(points) <= half


def is_win(difference: str) -> bool:
    return float(difference.split(" ± ")[0]) > 0 and not is_noise(difference)


def test_the_recipes_page_says_what_was_measured() -> None:
    """Its differences, in words, and which of them are more than noise."""
    columns = tuple(name for name in results_page.RECIPES if name != "moq_hf")

    def leads(bits: int, tasks: tuple[str, ...] = results_page.ALL) -> dict[str, str]:
        ours = results_page.points("moq_hf", bits, tasks)
        return {name: report_study.paired(ours, results_page.points(name, bits, tasks)) for name in columns}

    at_2 = leads(2)
    assert all(map(is_win, at_2.values()))
    assert [name for name, lead in leads(2, ("sst2",)).items() if is_win(lead)] == ["rounding"]
    assert all(is_noise(lead) for bits in (4, 3) for name, lead in leads(bits).items() if name != "basic QAT")
    ways = (("rounding", 4), ("rounding", 3), ("rounding, groups of 32", 3), ("moq_hf", 2))
    against_float = [report_study.interval(results_page.points(*way)) for way in ways]
    assert is_noise(against_float[0])
    missing = [told for told in (*at_2.values(), *against_float) if told.lstrip("+-") not in recipes()]
    assert missing == []


def test_page_one_shows_what_its_example_printed() -> None:
    shown = re.search(r"start:example\] -->.*?```text\n(.*?)\n```", page("README.md"), re.DOTALL)
    found = result("first_example")
    assert shown is not None
    left_out, *lines = shown[1].splitlines()
    assert left_out == "..." and lines == found["printed"][-len(lines) :]
    # "About a minute", on a busy machine without AVX-512.
    assert found["seconds"] < 90


def test_what_is_said_of_a_small_model_on_stsb() -> None:
    leads: dict[tuple[int, str], list[float]] = {}
    for bits, name in itertools.product((3, 2), ("rounded, groups of 32", "GPTQ, groups of 32")):
        trained, other = (results_page.similar_points(way, bits) for way in ("trained", name))
        leads[bits, name] = [trained[seed] - other[seed] for seed in sorted(trained.keys() & other.keys())]
    text = " ".join(page("docs/results/recipes.md").split())
    at_3, at_2 = (leads[bits, "rounded, groups of 32"] for bits in (3, 2))
    told = f"by {statistics.fmean(at_3):.1f} ± {report_study.half_interval(at_3):.1f}, which shows nothing"
    assert len(at_3) == 5 and sum(lead > 0 for lead in at_3) == 4
    assert f"leads groups of 32 with four seeds of five, {told}" in text
    assert statistics.fmean(at_3) < report_study.half_interval(at_3)
    assert f"At 2 bits it leads with every seed, by {min(at_2):.1f} to {max(at_2):.1f}" in text
    assert min(*at_2, *leads[2, "GPTQ, groups of 32"]) > 0 and len(at_2) == 4


def test_page_one_compares_the_same_seeds_and_says_how_many() -> None:
    rows = [results_page.first_page_scores(form) for form, *_ in results_page.FIRST_PAGE.values()]
    counts = []
    for floats, *ways in rows:
        (seeds,) = {tuple(scores) for scores in (floats, *ways) if scores}
        counts.append(len(seeds))
    assert counts == [3, 2, 3] and "three seeds, of `w8a8` two;" in page("README.md")
    sizes = results_page.document("sizes")["models"]["all-mpnet-base-v2"]["forms"]
    small = {form: sizes[form] / 1e6 for form in ("w8a8", "2 bits, groups of 32")}
    for form, megabytes in small.items():
        assert f"{sizes[f'{form}, tables in float'] / 1e6 - megabytes:.0f} MB less" in " ".join(
            page("README.md").split()
        )
    of_language = results_page.document("sizes")["models"]["SmolLM2-135M"]["forms"]
    at_4, at_2 = (of_language[f"{bits} bits, groups of 32"] / 1e6 for bits in (4, 2))
    perplexities = (
        results_page.first_page_perplexities(form, arm)[-1]
        for form, _, arm, _ in results_page.FIRST_PAGE_LANGUAGE.values()
    )
    better, worse = perplexities
    told = (
        f"has {at_4 - at_2:.0f} MB less than at 4, and a perplexity that is {100 * (worse / better - 1):.0f} % higher"
    )
    assert told in " ".join(page("README.md").split())


def losses_of(form: str) -> tuple[list[float], ...]:
    """Points that an MPNet loses: rounded, by GPTQ, trained, trained from GPTQ; of each seed."""
    floats = results_page.base_floats()
    ways = results_page.base_ways(*results_page.BASE_FORMS[form])
    return tuple([floats[seed] - scores[seed] for seed in sorted(scores)] for scores in ways)


def from_to(losses: list[float], digits: int = 0) -> str:
    return f"{min(losses):.{digits}f} to {max(losses):.{digits}f}"


def test_what_rounding_or_training_cost_an_mpnet_is_said_as_measured() -> None:
    text = " ".join(page(f"docs/{RESULTS_OF_INPUTS}.md").split())
    rounded, _, trained, _ = losses_of("8 bits; 8, static symmetric")
    assert f"lose {from_to(rounded)} points by rounding" in text and "within 0.4 of float" in text
    assert max(map(abs, trained)) < 0.45 and len(trained) == 3
    rounded, _, trained, _ = losses_of("`w8a8`: 8 bits; 8, static asymmetric")
    assert f"It costs {max(rounded):.1f} points at most, and training gains nothing." in text
    assert statistics.fmean(trained) > -0.1
    (other,) = (line for line in results_page.lines_of("glue_base") if line["arm"].endswith("on another machine"))
    score = 100 * other["metrics"]["spearmanr"]
    assert f"which has {score:.1f}, so they lose {score - results_page.base_floats()[2]:.1f} more" in text
    rounded, _, trained, _ = losses_of("`w4a4`: 4 bits, groups of 32; 4, second products at 8")
    assert f"**4-bit inputs**: rounding loses {from_to(rounded)} points, training {from_to(trained)}." in text
    presets = page("docs/start/which-preset.md")
    assert f"[{statistics.fmean(trained):.1f} points, rounded {statistics.fmean(rounded):.1f}]" in presets
    rounded, *_ = losses_of("`w4a4`, both products at 8")
    assert f"at 8 bits rounding loses {from_to(rounded)}" in text
    rounded, gptq, trained, from_gptq = losses_of("2 bits, groups of 32")
    assert f"Rounding loses {from_to(rounded)} points" in text and f"from rounded weights {from_to(trained, 1)}" in text
    for name, losses in (("GPTQ", gptq), ("training from it", from_gptq)):
        assert f"{name} {from_to(losses, 1)}" in text
    rounded, *_ = losses_of("the same, percentile 99.99 and window")
    assert f"costs {from_to(rounded, 1)} points" in text


def test_the_figures_of_the_small_language_model_are_those_of_its_lines() -> None:
    lines: dict[tuple[str, str], dict[int, Any]] = {}
    for line in results_page.lines_of("language_models"):
        lines.setdefault((line["arm"], line["form"]), {})[line["seed"]] = line
    figures = {key: statistics.fmean(line["perplexity"] for line in own.values()) for key, own in lines.items()}
    one = {key for key, own in lines.items() if len(own) == 1}
    assert {("rounded", "4 per channel"), *(("trained from GPTQ", form) for form in ("4", "2")), ("taught", "2")} <= one
    guide, results = (
        " ".join(page(f"docs/{name}.md").split()) for name in ("guide/language-models", RESULTS_OF_INPUTS)
    )
    told = (("float", ""), ("rounded", "4"), ("rounded", "4 per channel"), *(("GPTQ", form) for form in ("4", "2")))
    ways = (("at the end, from GPTQ", "4"), *(("trained from GPTQ", form) for form in ("4", "2")), ("taught", "2"))
    for key in (*told, *ways, ("taught from GPTQ", "2"), ("scales", "2")):
        assert f" {figures[key]:.2f}" in guide, key
    assert all(f"{figures['GPTQ', form]:.2f}" in page("README.md") for form in ("4", "2"))
    losses = {arm: figures[arm, "4"] / figures["float", ""] - 1 for arm in ("GPTQ", "rounded")}
    assert f"which loses {losses['GPTQ']:.0%}, rounding {losses['rounded']:.0%};".replace("%", " %") in results
    assert f"{losses['GPTQ']:.0%}".replace("%", " %") in page("docs/start/which-preset.md")
    assert f"takes {figures['GPTQ', '2']:.2f} to {figures['scales', '2']:.2f}, in" in results
    assert f"training the weights takes it to {figures['taught from GPTQ', '2']:.2f}" in results
    at_3 = [f"{figures[arm, '3']:.2f}" for arm in ("GPTQ", "scales", "taught from GPTQ")]
    told_at_3 = f"At 3 bits (seed 1) it is {', '.join(at_3[:2])} and {at_3[2]}"
    assert told_at_3 in results and told_at_3.replace(" (seed 1)", "") in guide
    assert all(set(lines[arm, "3"]) == {1} for arm in ("GPTQ", "scales", "taught from GPTQ"))
    both = (lines[arm, "2"] for arm in ("GPTQ", "scales"))
    losses_of = [[loss for seed in (1, 2) for loss in own[seed]["losses"]] for own in both]
    gains = [gptq - trained for gptq, trained in zip(*losses_of, strict=True)]
    ahead = sum(gain > 0 for gain in gains)
    assert f"in {ahead} of {len(gains)} blocks (by {report_study.spread(gains, 2)} nats a token)" in results
    assert sum(gains) / len(gains) > report_study.half_interval(gains)
    # The run that ends as float and then GPTQ do.
    assert figures["at the end, from GPTQ", "4"] < figures["GPTQ", "4"]
    # What is said to have lost.
    assert all(figures["taught", form] > figures["GPTQ", form] for form in ("4", "2"))
    assert figures["trained from GPTQ", "4"] > figures["GPTQ", "4"]
    assert figures["taught", "w4a4"] > 10 * figures["float", ""]


def test_every_arm_says_its_range() -> None:
    """The default is another one today than when the first lines were written."""
    configs = [*glue_plans.GROUPS.values(), *(line["moq"] for line in report_study.lines() if line["moq"] is not None)]
    algos = [config["quantize_algo"] for config in configs]
    assert all(algo.get("range") in ("full", "narrow") or algo.get("q_type") == "asymmetric" for algo in algos)


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
