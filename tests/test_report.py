"""What the report says of a run is what its log says."""

import json
import math
import os
import random
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import made_run
import pytest
import tiny_runs
from by_hand import WRONG, places
from made_run import BLOCKS, CONFIG, make_run

from moq_hf import cli
from moq_hf.config import MoQConfig
from moq_hf.errors import MoQError
from moq_hf.report import _figures, drawing, read_run, write_report
from moq_hf.schedule import PrecisionSchedule
from moq_hf.text import megabytes

# The sections of the card that tell of a run which has delivered nothing.
CARD = ["Evaluation", "How it was made"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with eigenvalues and evaluations, and a float run beside it."""
    make_run(tmp_path / "out")
    (tmp_path / "out" / "float").mkdir()
    metrics = {"eval_f1": 0.91, "eval_accuracy": 0.8, "eval_loss": 0.4, "eval_runtime": 3.0, "epoch": 3.0}
    (tmp_path / "out" / "float" / "eval_results.json").write_text(json.dumps(metrics))
    return tmp_path / "out"


def write(folder: Path, state: Any) -> None:
    (folder / "trainer_state.json").write_text(json.dumps(state))


def titles(page: Path) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", page.read_text())


def test_a_run_is_read_as_it_was(run: Path) -> None:
    read = read_run(run)
    schedule = PrecisionSchedule(MoQConfig.from_dict(CONFIG), BLOCKS, 345)
    bits = read.by_block("bits")
    assert list(bits) == BLOCKS
    assert all(values[-1] == 4 for _, values in bits.values()) and read.steps == 345
    steps = [step for steps, _ in bits.values() for step in steps]
    assert min(steps) == 10 and max(steps) <= schedule.deadline_step
    assert list(read.by_block("eigenvalue")) == BLOCKS[:12]
    assert read.quantized == {"loss": 0.6, "f1": pytest.approx(0.869), "accuracy": pytest.approx(0.769)}
    assert read.in_float == {"loss": 0.4, "f1": 0.91, "accuracy": 0.8}


def test_the_page_stands_alone_and_shows_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'moq_report.html'}\n"
    page = (run / "moq_report.html").read_text()
    assert titles(run / "moq_report.html") == ["Bits", "Sensitivity", "Loss", "Metrics", *CARD]
    # Names of XML namespaces are no addresses that a browser would ask for.
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", page.replace('xlink:href="#', ""))
    for text in ("105.20 to ", "0.8690", "0.9100", "-0.0410", "layer.11", "layer.0 and 3 more"):
        assert text in page, text


def test_its_day_is_that_of_the_run_and_not_of_an_earlier_report(tmp_path: Path) -> None:
    make_run(tmp_path, steps=40)
    noon = datetime(2026, 3, 4, 12).timestamp()
    for path in tmp_path.iterdir():
        os.utime(path, (noon, noon))
    for _ in range(2):
        assert "<p>2026-03-04</p>" in write_report(tmp_path).read_text()


def test_the_model_of_a_float_phase_is_called_so(run: Path) -> None:
    assert "(float 91.0 %)" in write_report(run).read_text()
    state = json.loads((run / "trainer_state.json").read_text())
    state["log_history"].insert(5, {"step": 100, "float_eval_f1": 0.91})
    write(run, state)
    page = write_report(run).read_text()
    assert "(float after 100 of 345 steps 91.0 %)" in page and "<th>float after 100 of 345 steps</th>" in page


def test_strange_names_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_run, "BLOCKS", ["a<b>&$x$.1", "a<b>&$x$.2"])
    make_run(tmp_path / "<i>", CONFIG)
    page = write_report(tmp_path / "<i>").read_text()
    assert "<i>" not in page and "&lt;i&gt;" in page
    figures = re.findall("<svg.*?</svg>", page, re.DOTALL)
    texts = {node.text for svg in figures for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")}
    assert "a<b>&$x$.1" in texts


def test_what_trl_tells_of_the_text_is_no_score(tmp_path: Path) -> None:
    state = make_run(tmp_path)
    for line in state["log_history"]:
        if "eval_f1" in line:
            line |= {"eval_entropy": 1.25, "eval_num_tokens": 81_234.0, "eval_mean_token_accuracy": line.pop("eval_f1")}
    write(tmp_path, state)
    assert [name for name in read_run(tmp_path).scores if name != "accuracy"] == ["mean_token_accuracy"]
    assert "81234" not in write_report(tmp_path).read_text()


def test_a_run_without_eigenvalues_and_evaluations_has_no_such_figures(tmp_path: Path) -> None:
    make_run(tmp_path, CONFIG | {"eigenvalue": {"enabled": False}}, evaluations=False)
    assert titles(write_report(tmp_path)) == ["Bits", "Loss", CARD[-1]]
    before_the_offset = CONFIG | {"quantize_schedule": {"quantize_period": 2, "schedule_offset": 10}}
    make_run(tmp_path, before_the_offset, steps=9, evaluations=False)
    assert titles(write_report(tmp_path, tmp_path / "short")) == ["Loss", CARD[-1]]


def test_the_newest_checkpoint_serves_too(tmp_path: Path) -> None:
    make_run(tmp_path / "checkpoint-90", steps=90)
    make_run(tmp_path / "checkpoint-200", steps=200)
    assert read_run(tmp_path).steps == 200
    assert write_report(tmp_path, tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / "moq_report.html"
    make_run(tmp_path / "float", steps=345)
    assert read_run(tmp_path).in_float["f1"] == pytest.approx(0.869)


@pytest.mark.parametrize(
    "files, text",
    [
        (None, "is not a folder"),
        ({}, "has no trainer_state.json, nor has a checkpoint in it: call trainer.save_state()"),
        ({"moq_state.json": "{}"}, "if this is what a run delivered, give the output_dir of the run"),
        ({"trainer_state.json": "{"}, "trainer_state.json cannot be read: Expecting"),
        ({"trainer_state.json": "[" * 100_000}, "trainer_state.json cannot be read: maximum"),
        ({"trainer_state.json": "[]"}, "trainer_state.json is damaged: it must hold an object"),
        ({"trainer_state.json": '{"global_step": 1}'}, "is not a run with MoQ"),
    ],
)
def test_a_folder_of_something_else_is_told(files: Any, text: str, tmp_path: Path) -> None:
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    with pytest.raises(MoQError, match=text):
        write_report(tmp_path if files is not None else tmp_path / "none")


BEGIN = "stateful_callbacks.MoQCallback"
SAVED = ("stateful_callbacks", "MoQCallback", "attributes", "saved")


@pytest.mark.parametrize(
    "path, value, text",
    [
        (("global_step",), "x", "global_step must be a valid integer"),
        (("stateful_callbacks", "MoQCallback"), {}, f"{BEGIN}.attributes is missing"),
        ((*SAVED, "config"), [], f"{BEGIN}.attributes.saved.config must be"),
        ((*SAVED, "config", "seed"), -1, "seed: -1"),
        ((*SAVED, "float_size_mb"), math.nan, "finite number"),
        (("log_history", 1), {"loss": 1}, "log_history.1.step is missing"),
    ],
)
def test_a_state_changed_by_hand_is_one_error_that_names_the_key(
    path: tuple[Any, ...], value: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = make_run(tmp_path, steps=40)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write(tmp_path, state)
    assert cli.main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert re.search(text, told) and str(tmp_path) in told and told.count("\n") == 1


def test_any_value_changed_by_hand_gives_a_run_or_one_error(tmp_path: Path) -> None:
    state = make_run(tmp_path, steps=20, config=CONFIG | {"quantize_schedule": {"quantize_period": 5}})
    generator, told = random.Random(0), 0
    for path in places(state):
        changed = json.loads(json.dumps(state))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = generator.choice(WRONG)
        write(tmp_path, changed)
        try:
            run = read_run(tmp_path)
            # A page takes a tenth of a second.
            if generator.random() < 0.05:
                run._repr_html_()
        except MoQError as error:
            assert len(str(error)) < 1000
            told += 1
    assert told > 100


def test_a_diverged_run_is_drawn(tmp_path: Path) -> None:
    state = make_run(tmp_path)
    for line in state["log_history"][-9:]:
        line |= {"loss": math.nan, "eval_loss": math.inf, "eval_f1": math.nan} if "eval_f1" in line else {}
    for line in state["log_history"]:
        line |= {"moq/bits/bert.pooler.dense": None} if "moq/bits/bert.pooler.dense" in line else {}
    write(tmp_path, state)
    page = write_report(tmp_path)
    assert titles(page) == ["Bits", "Sensitivity", "Loss", "Metrics", *CARD]
    # What is not a number is left out.
    assert not re.search(r"\b(nan|inf|infinity)\b", page.read_text(), re.IGNORECASE)
    assert read_run(tmp_path).quantized == {"accuracy": pytest.approx(0.769)}
    assert "bert.pooler.dense" not in page.read_text().partition("Configuration")[0]


def test_without_matplotlib_it_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(run)]) == 2
    needed = "'markdown-it-py>=3' 'matplotlib>=3.9'"
    assert capsys.readouterr().err == f"error: matplotlib is not installed: pip install {needed}\n"
    assert cli.main(["plan", "w4", "--max_steps", "345"]) == 0


def test_a_delivered_run_has_its_headline_its_proof_and_what_comes_next(tmp_path: Path) -> None:
    config = {"start_bits": 6, "target_bits": 4}
    trainer = tiny_runs.moq(tmp_path, config={**tiny_runs.CONFIG, "quantize_bits": config}, max_steps=30)
    trainer.train()
    trainer.save_state()
    trainer.save_model(str(tmp_path / "quantized"))
    page = write_report(tmp_path).read_text()
    sizes = r"<strong>4 bits, ([0-9.]+ MB) to ([0-9.]+ MB), verified</strong>"
    written = sum(path.stat().st_size for path in (tmp_path / "quantized").glob("*.safetensors"))
    assert re.search(sizes, page).groups()[1] == megabytes(written)  # type: ignore[union-attr]
    assert f"<h1>{tmp_path.name}</h1>" in page
    assert "Verified: loaded with plain transformers, the saved model gives identical outputs" in page
    assert f"from_pretrained(&quot;{tmp_path / 'quantized'}&quot;)" in page and "<td>bert.pooler.dense</td>" in page
    # It has no tokenizer, which an export needs.
    assert f"moq-hf inspect {tmp_path / 'quantized'}    # layers" in page and "moq-hf export" not in page
    assert re.search(r">all \d+ blocks<", page)
    assert "<svg" in read_run(tmp_path)._repr_html_()
    (tmp_path / "quantized" / "config.json").write_text("{}")
    with pytest.raises(MoQError, match="quantized is not as it was delivered: KeyError: 'architectures'"):
        write_report(tmp_path)


def test_noise_of_a_score_looks_like_noise(tmp_path: Path) -> None:
    state = make_run(tmp_path)
    for index, line in enumerate(line for line in state["log_history"] if "eval_f1" in line):
        line |= {"eval_f1": 0.97 + 0.001 * (index % 2), "eval_accuracy": 0.97}
    write(tmp_path, state)
    with drawing():
        figures = _figures(read_run(tmp_path))
    low, high = figures["Metrics"].axes[0].get_ylim()
    assert high - low == pytest.approx(0.05) and high <= 1.0 + 1e-9
