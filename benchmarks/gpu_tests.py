"""The section of `gpu.py` that runs the tests marked `gpu`."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from gpu import Report, without_folders

TESTS = Path(__file__).resolve().parents[1] / "tests"
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
# Seconds that are left for reading what was printed.
SPARE = 5.0


def files(there: bool) -> list[str]:
    """Those with a test that needs a CUDA device; the others may need more libraries.

    Args:
        there: Whether compressed-tensors is. Without it no file counts that imports it.
    """
    found = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("test_*.py"))}
    wanted = {path: text for path, text in found.items() if "mark.gpu" in text}
    return [str(path) for path, text in wanted.items() if there or "\nfrom compressed_tensors" not in text]


def command(small: bool) -> list[str]:
    """The call of pytest. Warnings of other versions of the libraries are no failures here."""
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default", "-o", "minversion=0"]
    words += ["--continue-on-collection-errors", "--color=no", "--tb=short"]
    if small:
        return [*words, "-p", "no:xdist", str(TESTS / "test_triton_quant.py"), "-k", "shapes"]
    if importlib.util.find_spec("xdist") is not None:
        words += ["--numprocesses", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    return [*words, "-m", "gpu", *files(importlib.util.find_spec("compressed_tensors") is not None)]


def outcomes(text: str) -> Counter[str]:
    """How many tests had which outcome, from what pytest prints while it runs."""
    lines = [line for line in text.splitlines() if "::" in line or line.startswith("ERROR ")]
    # What is repeated in the summary at the end does not count twice.
    body = [line for line in lines if not re.match(r"(?:FAILED|SKIPPED|XFAIL) ", line)]
    return Counter(found[0] for line in body if (found := re.search(rf"\b(?:{'|'.join(OUTCOMES)})\b", line)))


def run(report: Report) -> None:
    """All of them, or as many as there is time for."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command(report.small), stdout=output, stderr=subprocess.STDOUT, cwd=TESTS.parent)
        try:
            code: int | None = process.wait(timeout=max(1.0, report.left - SPARE))
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        output.seek(0)
        text = output.read()
    counts = outcomes(text)
    bad = counts["FAILED"] + counts["ERROR"]
    lines = [without_folders(line) for line in text.splitlines()]
    report.detail("exit_code", code)
    report.detail("left_out", sorted(Path(name).name for name in set(files(True)) - set(command(False))))
    report.detail("failed", [line[:300] for line in lines if re.match(r"(?:FAILED|ERROR) ", line)][:60])
    if code != 0:
        report.detail("last_lines", lines[-60:])
    report.figure("tests passed", counts["PASSED"], at_least=1)
    report.figure("tests failed", bad, equal=0)
    report.figure("tests skipped", counts["SKIPPED"])
    report.figure("all were run", code is not None, equal=True)
    report.figure("seconds", time.monotonic() - began, "s", timed=True)
