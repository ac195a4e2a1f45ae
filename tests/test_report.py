"""report.py and the command line: what they say of a run is what its log says."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib import image
from transformers import Trainer, TrainingArguments

from moq_hf import cli, report
from moq_hf.config import MoQConfig, MoQError
from moq_hf.schedule import PrecisionSchedule, plan

ROOT = Path(__file__).parents[1]
BLOCKS = [f"bert.encoder.layer.{index}" for index in range(12)] + ["bert.pooler.dense"]
CONFIG = {
    "quantize_bits": {"start_bits": 12, "target_bits": 4},
    "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 10, "deadline": 0.5},
    "eigenvalue": {"enabled": True},
}


def make_run(folder: Path, config: Any = CONFIG, steps: int = 345, evaluations: bool = True) -> dict[str, Any]:
    """Write the files of a finished run whose losses and eigenvalues are made up; give its state."""
    config = MoQConfig.from_dict(config)
    rng = random.Random(0)
    schedule = PrecisionSchedule(config, BLOCKS, steps)
    log: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        measured = {name: min(1.0, 0.08 * k * rng.uniform(0.7, 1.3)) for k, name in enumerate(BLOCKS[:12])}
        switches = schedule.advance(measured if config.eigenvalue.enabled else {})
        bits = sum(schedule.bits.values()) / len(BLOCKS)
        entry = {"step": step, "loss": 0.7 / (1 + step / 60), "moq/mean_bits": bits, "moq/size_mb": 22.0 + 2.6 * bits}
        if switches:
            entry |= {f"moq/bits/{name}": value for name, value in schedule.bits.items()}
            entry |= {f"moq/eigenvalue/{s.block}": s.eigenvalue for s in switches if s.eigenvalue is not None}
        if switches or step % 5 == 0:
            log.append(entry)
        if evaluations and step % 69 == 0:
            log.append(
                {"step": step, "eval_loss": 0.6, "eval_f1": 0.8 + step / 5000, "eval_accuracy": 0.7 + step / 5000}
            )
    state = {
        "global_step": steps,
        "log_history": log,
        "stateful_callbacks": {
            "MoQCallback": {"args": {"config": config.to_dict()}, "attributes": {"saved": {"float_size_mb": 105.2}}}
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with eigenvalues and evaluations, and a float run beside it."""
    make_run(tmp_path / "out")
    (tmp_path / "out" / "float").mkdir()
    metrics = {"eval_f1": 0.91, "eval_accuracy": 0.8, "eval_loss": 0.4, "eval_runtime": 3.0, "epoch": 3.0}
    (tmp_path / "out" / "float" / "eval_results.json").write_text(json.dumps(metrics))
    return tmp_path / "out"


def test_a_run_is_read_as_it_was(run: Path) -> None:
    read = report.read_run(run)
    schedule = PrecisionSchedule(MoQConfig.from_dict(CONFIG), BLOCKS, 345)
    bits = read.by_block("bits")
    assert list(bits) == BLOCKS
    assert all(values[-1] == 4 for _, values in bits.values()) and read.steps == 345
    assert read.switches()[0] == 10 and read.switches()[-1] <= schedule.deadline_step
    assert list(read.by_block("eigenvalue")) == BLOCKS[:12]
    assert read.quantized == {"loss": 0.6, "f1": pytest.approx(0.869), "accuracy": pytest.approx(0.769)}
    assert read.in_float == {"loss": 0.4, "f1": 0.91, "accuracy": 0.8}


def test_the_page_stands_alone_and_shows_everything(run: Path) -> None:
    assert report.write_report(run) == run / "moq_report.html"
    page = (run / "moq_report.html").read_text()
    titles = ["Bits", "Sensitivity", "Loss", "Metrics", "Size", "Float and quantized"]
    assert re.findall("<h2>(.*?)</h2>", page) == titles
    # Names of XML namespaces are no addresses that a browser would ask for.
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", page.replace('xlink:href="#', ""))
    for text in ("105.20 MB", "0.8690", "0.9100", "-0.0410", "layer.11", "pooler.dense"):
        assert text in page, text
    for name in ("bits", "eigenvalues", "loss", "metrics", "size", "comparison"):
        assert image.imread(run / f"moq_{name}.png").shape[1] == 1200


def test_the_page_has_colors_for_light_and_dark(run: Path) -> None:
    page = report.write_report(run).read_text()
    light, dark = re.findall(r":root \{(.*?)\}", page)
    used = set(re.findall(r"var\((--c\d+)\)", page))
    for theme in (light, dark):
        assert used <= set(re.findall(r"(--c\d+):", theme))
    assert re.search("prefers-color-scheme: dark", page)
    # No color of the light ground is left in a figure.
    figures = "".join(re.findall("<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}", figures)) == set()


def test_strange_names_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BLOCKS", ["a<b>&$x$.1", "a<b>&$x$.2"])
    make_run(tmp_path / "<i>", CONFIG)
    page = report.write_report(tmp_path / "<i>").read_text()
    assert "<i>" not in page and "&lt;i&gt;" in page
    figures = re.findall("<svg.*?</svg>", page, re.DOTALL)
    texts = {node.text for svg in figures for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")}
    assert "a<b>&$x$.1" in texts


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    plain = CONFIG | {"eigenvalue": {"enabled": False}}
    make_run(tmp_path, plain, evaluations=False)
    page = report.write_report(tmp_path).read_text()
    assert "Not shown: no eigenvalues were measured; there was no evaluation." in page
    assert not (tmp_path / "moq_eigenvalues.png").exists()
    before_the_offset = plain | {"quantize_schedule": {"quantize_period": 2, "schedule_offset": 10}}
    make_run(tmp_path, before_the_offset, steps=9, evaluations=False)
    page = report.write_report(tmp_path, tmp_path / "short").read_text()
    assert "Not shown: no block changed its bits; no eigenvalues" in page
    make_run(tmp_path, plain)
    assert "there is no float run to compare with" in report.write_report(tmp_path).read_text()


def test_the_newest_checkpoint_serves_too(tmp_path: Path) -> None:
    make_run(tmp_path / "checkpoint-90", steps=90)
    make_run(tmp_path / "checkpoint-200", steps=200)
    assert report.read_run(tmp_path).steps == 200
    assert report.write_report(tmp_path, tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / "moq_report.html"
    float_run = tmp_path / "of-a-float-run"
    make_run(float_run, steps=345)
    assert report.read_run(tmp_path, float_run).in_float["f1"] == pytest.approx(0.869)


@pytest.mark.parametrize(
    "files, text",
    [
        (None, "is no folder"),
        ({}, "has no trainer_state.json, nor"),
        ({"trainer_state.json": "{"}, "cannot read .*trainer_state.json"),
        ({"trainer_state.json": "[]"}, "is no object of keys"),
        ({"trainer_state.json": '{"global_step": 1, "log_history": [{"loss": 1}]}'}, "is no run with MoQ"),
    ],
)
def test_a_folder_of_something_else_is_told(files: Any, text: str, tmp_path: Path) -> None:
    for name, content in (files or {}).items():
        (tmp_path / name).write_text(content)
    with pytest.raises(MoQError, match=text):
        report.write_report(tmp_path if files is not None else tmp_path / "none")


def test_a_float_run_without_metrics_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match="has neither eval_results"):
        report.write_report(run, float_directory=tmp_path)


def test_without_matplotlib_it_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(run)]) == 2
    assert capsys.readouterr().err == "error: drawing needs matplotlib: pip install matplotlib\n"
    assert cli.main(["plan", *PLAN, "--max_steps", "345"]) == 0


PLAN = ["--moq_config", str(ROOT / "configs" / "moq_eigen.json")]


def test_the_command_line_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan(ROOT / "configs" / "moq_eigen.json", 345)
    sizes = ["--num_examples", "3668", "--batch_size", "8", "--gradient_accumulation", "4", "--epochs", "3"]
    for given in (["--max_steps", "345"], sizes):
        assert cli.main(["plan", *PLAN, *given]) == 0
        assert capsys.readouterr().out == f"{planned}\n"
    assert cli.main(["plan", *PLAN, "--max_steps", "345", "--json", "--plot", str(tmp_path / "plan.png")]) == 0
    assert json.loads(capsys.readouterr().out) == planned.to_dict()
    assert image.imread(tmp_path / "plan.png").shape[1] == 1200


@pytest.mark.parametrize(
    "examples, batch, epochs, accumulation", [(22, 4, 1.5, 2), (21, 4, 1, 1), (9, 4, 2, 4), (3, 4, 1, 1)]
)
def test_steps_are_counted_as_the_trainer_counts(
    examples: int, batch: int, epochs: float, accumulation: int, tmp_path: Path, tiny_bert: Any, tiny_batch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=batch, num_train_epochs=epochs, report_to="none", use_cpu=True,
        gradient_accumulation_steps=accumulation, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: value[0] for name, value in tiny_batch.items()}] * examples
    trainer = Trainer(tiny_bert, args, train_dataset=rows)
    trainer.train()
    config = tmp_path / "moq.json"
    config.write_text(
        '{"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_schedule": {"schedule_offset": 0}}'
    )
    capsys.readouterr()
    words = f"plan --json --moq_config {config} --num_examples {examples} --batch_size {batch} --epochs {epochs}"
    assert cli.main([*words.split(), "--gradient_accumulation", str(accumulation)]) == 0
    assert json.loads(capsys.readouterr().out)["total_steps"] == trainer.state.max_steps


@pytest.mark.parametrize(
    "words, text",
    [
        (
            ["plan", *PLAN],
            "the length of the run is unknown: give --num_examples, --batch_size, --epochs, or --max_steps",
        ),
        (["plan", *PLAN, "--epochs", "3"], "give --num_examples, --batch_size, or --max_steps"),
        (["plan", *PLAN, "--max_steps", "3", "--epochs", "3"], "it goes without --epochs"),
        (
            ["plan", *PLAN, "--max_steps", "0"],
            r"argument --max_steps: invalid whole number from 1 and below 2\*\*63 value: '0'",
        ),
        (["plan", *PLAN, "--max_steps", "many"], "invalid whole number from 1 .* value: 'many'"),
        (["plan", *PLAN, "--max_steps", "40000000000000000000"], "value: '40000000000000000000'"),
        (["plan", *PLAN, "--max_steps", "9" * 5000], "argument --max_steps: invalid whole number from 1"),
        (
            ["plan", *PLAN, "--num_examples", str(2**62), "--batch_size", "1", "--epochs", "1e300"],
            r"error: total_steps must be below 2\*\*63",
        ),
        (["plan", *PLAN, "--epochs", "nan"], "invalid number above 0 value: 'nan'"),
        (["plan"], "--moq_config"),
        ([], "COMMAND"),
        (["plan", *PLAN, "--max_steps", "9", "--plot", "/nowhere/plan.png"], "error: .*nowhere"),
        (["plan", *PLAN, "--max_steps", "9", "--plot", "plan.docx"], "error: cannot draw to plan.docx"),
        (["plan", "--moq_config", "none.json", "--max_steps", "9"], "error: cannot read the MoQ config none.json"),
        (["report", "none"], "error: none is no folder"),
    ],
)
def test_wrong_command_lines_are_told(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = cli.main(words)
    except SystemExit as exit:
        code = exit.code
    told = capsys.readouterr()
    assert code == 2 and re.search(text, told.err) and told.out == ""


def test_the_module_is_a_program(tmp_path: Path) -> None:
    make_run(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "moq_hf.cli", "report", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out' / 'moq_report.html'}\n"
