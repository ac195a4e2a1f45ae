"""The command line as such: what it prints without torch, and a reader that has seen enough."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moq_hf import __version__, cli

HELP = """
import sys
from moq_hf import cli
try:
    cli.main({words!r})
except SystemExit:
    pass
sys.exit(", ".join({{"torch", "transformers"}} & set(sys.modules)) or 0)
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["export", "--help"]])
def test_help_imports_neither_torch_nor_transformers(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP.format(words=words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"moq_hf {__version__}\n"


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m moq_hf.cli plan configs/moq.json --max_steps 345"
    root = Path(__file__).parents[1]
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_migrate_writes_a_config_that_fits_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    schedule = {"quantize_period": 400, "schedule_offset": 0}
    block = {"quantize_bits": {"start_bits": 12, "target_bits": 8}, "quantize_schedule": schedule}
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}, "quantize_training": block}))
    out = tmp_path / "moq.json"
    words = ["migrate", str(tmp_path / "ds.json"), "--max_steps", "345", "--out", str(out)]
    assert cli.main(["plan", str(tmp_path / "ds.json"), "--max_steps", "345"]) == 2
    assert "moq-hf migrate FILE --max_steps 345 writes a config that fits" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "left to TrainingArguments: fp16" in caplog.text
    assert cli.main(["plan", str(out), "--max_steps", "345"]) == 0
    assert "12 to 8 bits" in capsys.readouterr().out
    assert cli.main(words) == 2
    assert "moq.json exists already: give a new name" in capsys.readouterr().err
    assert cli.main(words[:-2]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["plan", "w9", "--max_steps", "9"], "the presets are"),
        (["migrate", "nowhere.json", "--max_steps", "9"], "nowhere.json does not exist"),
        (["inspect", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_errors_name_what_to_type(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert what in captured.err and captured.err.startswith("error: ")
