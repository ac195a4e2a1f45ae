"""`make gpu`: nothing stops it, time is kept, what is missing is said, and the table shows what was found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import programs
import pytest
from gpu import Report, Run, Section
from repo import ROOT

THERE: dict[str, str | None] = {"python": "3.11.0", "torch": "2.11.0"}


def fine(report: Report) -> None:
    report.figure("ratio", 1.25, "x", at_most=1.5, timed=True)
    report.figure("equal", False, equal=True)


def broken(report: Report) -> None:
    report.figure("before", 1)
    raise RuntimeError(f"no kernel in {ROOT}/moq_hf/kernels/triton.py")


def killed(report: Report) -> None:
    report.figure("before", 2)
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(report: Report) -> None:
    report.figure("before", 3)
    subprocess.run(["sleep", "100"])


def run(path: Path, *sections: Section, **how: Any) -> dict[str, Any]:
    found = Run(sections, how.pop("found", THERE), path / "new" / "gpu.json", how.pop("seconds", 60.0), **how)()
    written: dict[str, Any] = json.loads((path / "new" / "gpu.json").read_text())
    assert written == json.loads(json.dumps(found))
    return written


def test_no_section_stops_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = {"a": broken, "b": killed, "c": hanging, "d": fine}
    began = time.monotonic()
    # The others need seconds on a busy machine.
    limits = {"c": 1.0}
    document = run(tmp_path, *(Section(name, (), limits.get(name, 20.0), each) for name, each in names.items()))
    assert time.monotonic() - began < 30
    sections = document["sections"]
    assert {name: each["status"] for name, each in sections.items()} == {
        "a": "failed",
        "b": "failed",
        "c": "not measured",
        "d": "ok",
    }
    # What was measured before counts; an error names no folder of the machine.
    assert [each["figures"][0]["value"] for each in sections.values()] == [1, 2, 3, 1.25]
    assert sections["a"]["error"].splitlines()[-1] == "RuntimeError: no kernel in triton.py"
    assert str(ROOT) not in json.dumps(sections) and "-9" in sections["b"]["error"]
    assert sections["c"]["error"] == "its 1 s were over" and 1 <= sections["c"]["seconds"] < 10
    assert "no kernel" in capfd.readouterr().out


def test_a_missing_library_is_told_with_what_needs_it() -> None:
    found = {**THERE, "pydantic": None, "scipy": None}
    sections = [Section("a", ("torch",), 20.0, fine), Section("b", ("torch", "pydantic"), 20.0, fine)]
    assert gpu.told(found, sections) == [
        "found: python 3.11.0, torch 2.11.0",
        "missing: pydantic; not run: b",
        "missing: scipy; no section needs it",
        "a folder that has what is missing may be given: PYTHONPATH=FOLDER make gpu",
    ]


def test_the_table(tmp_path: Path) -> None:
    sections = [Section("first", (), 20.0, fine), Section("second", ("none",), 20.0, fine)]
    document = run(tmp_path, *sections, Section("third", (), 20.0, broken), found={**THERE, "none": None})
    assert document["missing"] == ["none"]
    assert gpu.table(document).splitlines()[2:] == [
        "| first | ratio | 1.25 x | at most 1.5 | yes |",
        "| first | equal | no | yes | **no** |",
        "| second | not run: missing: none |  |  |  |",
        "| third | before | 1 |  |  |",
        "| third | failed: RuntimeError: no kernel in triton.py |  |  |  |",
    ]
    small = run(tmp_path, sections[0], small=True)
    assert small["sections"]["first"]["figures"][0]["reached"] is None and not small["times_mean_something"]
    assert gpu.table(small).splitlines()[2] == "| first | ratio | (ran) | at most 1.5 |  |"
    assert "times mean nothing" in gpu.heading(small) and "no CUDA device" in gpu.heading(small)


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return programs.run(str(ROOT / "benchmarks" / "gpu.py"), *words, cwd=ROOT)


def test_small_figures_do_not_pass_for_a_gpu_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "benchmarks" / "results" / "gpu.json"
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--out", str(path)])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "gpu.json is for what a GPU has run" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.slow
def test_some_sections_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them take minutes: benchmarks/results/gpu_small.json is such a run."""
    done = script("--small", "--only", "self-test", "memory", "--out", str(tmp_path / "small.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "small.json").read_text())
    assert {name: each["status"] for name, each in document["sections"].items()} == {"self-test": "ok", "memory": "ok"}
    assert "the kernel is used: yes" in done.stdout and "| memory | quantized weights |" in done.stdout
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--report", "--out", str(tmp_path / "small.json")])
    assert gpu.main() == 0 and gpu.table(document) in capsys.readouterr().out


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = script("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 1 and "there is no CUDA device" in done.stderr and "--small" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_a_run_of_everything_in_the_interpreter_was_fine() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "gpu_small.json").read_text(encoding="utf-8"))
    assert document["small"] and document["missing"] == []
    assert {name: each["status"] for name, each in document["sections"].items()} == {
        section.name: "ok" for section in gpu.SECTIONS
    }
    rows = [row for section in document["sections"].values() for row in section["figures"]]
    assert len(rows) > 50 and [row["what"] for row in rows if row["reached"] is False] == []
