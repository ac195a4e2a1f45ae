"""The command line as such: what it prints without torch, and a reader that has seen enough."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repo import ROOT

import moq_hf
from moq_hf import __version__, cli

HELP = """
import contextlib, sys
from moq_hf import cli
for words in ("--help", "--version", "plan --help", "export --help"):
    with contextlib.suppress(SystemExit):
        cli.main(words.split())
sys.exit(", ".join({"torch", "transformers"} & set(sys.modules)) or 0)
"""


def test_a_plan_takes_the_keywords_of_a_callback(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "lm-w4", "--max_steps", "200", "--set"]
    assert cli.main([*given, "start_bits=4", "offset=0.9", "--set", 'serve=["vllm"]', "format=int"]) == 0
    assert capsys.readouterr().out.startswith("180 optimizer steps in float, then 20 at 4 bits")
    assert cli.main([*given, "start_bit=4"]) == 2
    assert "did you mean start_bits?" in capsys.readouterr().err
    assert cli.main([*given, "source=w4"]) == 2
    with pytest.raises(SystemExit):
        cli.main([*given, "start_bits"])
    assert "must be KEY=VALUE, such as start_bits=4, got" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"moq_hf {__version__}\n"


def test_a_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m moq_hf plan configs/moq.json --max_steps 345"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"], cwd=ROOT, capture_output=True, text=True, timeout=60
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


PLAN = ["plan", "configs/moq_eigen.json", "--max_steps"]


def test_found_grids_have_no_plan_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "moq.json"
    path.write_text('{"grid": "found"}', encoding="utf-8")
    assert cli.main(["plan", str(path), "--max_steps", "100"]) == 2
    assert "moq-hf inspect MODEL shows them" in capsys.readouterr().err


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main([*PLAN, "345"]) == 0
    assert capsys.readouterr().out == f"{moq_hf.plan(PLAN[1], 345)}\n"


@pytest.mark.parametrize(
    "words, text",
    [
        (PLAN[:-1], "^error: the following arguments are required: --max_steps"),
        (
            [*PLAN, "0"],
            r'^error: argument --max_steps: must be a whole number from 1 .*, got "0"; moq-hf plan --help shows',
        ),
        ([*PLAN, "40000000000000000000"], r'must be a whole number from 1 and below 2\*\*63, got "4000'),
        ([*PLAN, "9" * 5000], r'must be a whole number from 1 and below 2\*\*63, got "9+\.\.\.'),
        (["export", "DIR", "--to", "onnx", "OUT", "--tolerance", "nan"], 'must be a number above 0, got "nan"'),
        ([], "COMMAND"),
        (["plan", "none.json", "--max_steps", "9"], "^error: cannot read the MoQ config none.json"),
        (["plan", "w9", "--max_steps", "9"], "^error: .*the presets are"),
        (["migrate", "nowhere.json", "--max_steps", "9"], "^error: nowhere.json does not exist"),
        (["migrate", "LIST", "--max_steps", "9"], r'must be an object of keys, got \[{"a": 1}\]'),
        (["export", "DIR", "--to", "float", "OUT", "MORE"], "^error: unrecognized arguments: OUT MORE; moq-hf --help"),
        (["export", "DIR", "OUT", "--to", "float"], "^error: DIR is not a directory"),
        (["export", "DIR", "--to", "float", "OUT"], "^error: DIR is not a directory"),
        (["verify", "nowhere"], "^error: nowhere is not a directory"),
        (["inspect", "nowhere"], "^error: nowhere is not a directory"),
        (["report", "none"], "^error: none is not a folder"),
    ],
)
def test_errors_name_what_to_type(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text('[{"a": 1}]')
    words = [str(tmp_path / "list.json") if word == "LIST" else word for word in words]
    try:
        code: Any = cli.main(words)
    except SystemExit as exit:
        code = exit.code
    told = capsys.readouterr()
    assert code == 2 and re.search(text, told.err) and told.out == ""
