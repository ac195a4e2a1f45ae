"""What the docs say was measured is what the committed lines say; what moves no line is left to the reader."""

import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import glue_plans
import perplexity
import programs
import pytest
import report_study
import results_page
import tiny_glue
from glue_plans import FLOAT, OWN, Plan, qat, ramp
from lines import Lines
from repo import ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification

from moq_hf import MoQConfig
from moq_hf.grid import MOST_FULL_BITS

RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_committed_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert results_page.renewed(text) == text, "renew them with: python benchmarks/results_page.py"


def test_every_table_is_on_a_page_and_every_mark_has_a_table() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in results_page.PAGES)
    assert sorted(re.findall(r"^<!-- end of (.+) -->$", pages, re.MULTILINE)) == sorted(results_page.TABLES)


def test_a_stale_table_is_noticed() -> None:
    text = page("docs/results.md")
    stale = text.replace("| 2 | all three |", "| 2 | all of them |")
    assert stale != text and results_page.renewed(stale) == text


def test_the_figures_of_language_models_are_those_of_the_run() -> None:
    text, found = page("examples/sft/README.md"), result("sft")
    assert [size for size in found["bytes"].values() if f"| {size:,} |" not in text] == []
    for server, right in found["right"].items():
        assert f"| {right} of {found['questions']}, {server} |" in text


def test_what_the_results_say_outside_of_their_tables() -> None:
    text = " ".join(page("docs/results.md").split())
    proof = result("proof")
    share = f"took {100 * proof['median_share']:.1f} % of a run of {proof['steps_of_the_run']} steps"
    assert f"{share}, the median of {len(proof['runs'])} runs" in text
    steps = [glue_plans.STEPS[task] * glue_plans.EPOCHS[task] for task in ("sst2", "cola", "mrpc")]
    assert "half of the steps of basic QAT and moq_hf: {}, {} and {}.".format(*steps) in text
    parameters = {line["parameters"] for line in Lines(RESULTS / "perplexity.jsonl").lines}
    assert [f"A Llama of {count / 1e6:.2f} million weights" in text for count in parameters] == [True]
    assert f"a Llama of {result('pack_memory')['parameters'] / 1e9:.2f} billion weights" in text
    exact = [model["transformers.js"]["fp32"] for model in result("hub_names")["models"].values() if "wasm" in model]
    largest = max(said.get("difference", 0.0) for said in exact)
    deployed = " ".join(page("docs/results/deployed.md").split())
    assert f"`fp32` its answers to {math.ceil(largest * 1e6)}e-06" in deployed
    assert {said.get("equal tokens", "64 of 64") for said in exact} == {"64 of 64"}
    for plan in ("recipes", "main"):
        assert len(glue_plans.PLANS[plan].seeds) == 5
    assert len(glue_plans.PLANS["phases"].seeds) == len(perplexity.SEEDS) == 3


@pytest.mark.parametrize(("preset", "bits"), [("w4", 4), ("w3", 3), ("w2", 2)])
def test_the_presets_for_low_bits_are_what_was_measured(preset: str, bits: int) -> None:
    """But for the embedding tables, which were float: the README says so."""
    measured = results_page.arm("recipes", "mean", bits, "basic QAT, float first").arm.config() or {}
    wanted = MoQConfig.from_dict({key: value for key, value in measured.items() if key != "distillation"})
    # Full is what "auto" is at these bits, no period counts where bits do not fall, and tables were in float.
    assert wanted.range == "full" and bits <= MOST_FULL_BITS
    assert MoQConfig.load(preset) == replace(wanted, range="auto", period="auto", embeddings="auto")
    assert "scores were measured with tables in float" in readme()


def readme() -> str:
    return " ".join(page("README.md").split())


def test_what_the_guides_promise_is_what_was_measured() -> None:
    """The differences to float, on average over all tasks, of rounding, float first and basic QAT."""
    guide = " ".join(page("docs/start/which-preset.md").split())

    def difference(bits: int, name: str) -> str:
        row = results_page.arm("recipes", "mean", bits, *results_page.RECIPES[name])
        return report_study.paired(row.scores, row.reference)

    for bits in (4, 3, 2):
        ways = ("rounding", "rounding, groups of 32", "moq_hf", "basic QAT")
        assert f"| {bits} | {' | '.join(difference(bits, way) for way in ways)} |" in guide
    leads = {row[0]: row for row in results_page.leads()[1:]}
    assert f"it is worth {leads[2][1].removeprefix('+')} points over basic QAT of as many steps" in guide
    assert f"they lead basic QAT at 3 bits by {leads[3][4].removeprefix('+')} points" in guide


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
