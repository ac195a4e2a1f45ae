"""The Triton kernel on GPUs that are not there: the tests, random cases, and the cost on paper of each architecture.

    PYTHONPATH=.:tests/helpers python tests/ptx/measure.py 80 90 100 120

It renews the named architectures in benchmarks/results/kernel.json, of which benchmarks/results_page.py makes tables of
tests/ptx/README.md. One takes five minutes and more.
"""

import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cases
import paper

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "results" / "kernel.json"


def costs(arch: int) -> list[dict[str, Any]]:
    """Of each length of groups and each grid."""
    count, clock, bandwidth = paper.MACHINES[arch]
    found = []
    for groups, length in paper.GROUPS.items():
        for name, grid in paper.GRIDS.items():
            cost = paper.cost(arch, length, **grid)
            # Seconds to begin the instructions of a weight, over those to move its 6 bytes.
            share = cost.instructions / (count * paper.ISSUED * clock * 1e9) * bandwidth / 6
            most = paper.MOST_THREADS[arch]
            found.append({"groups": groups, "grid": name, **cost._asdict(), "most": most, "share": share})
    return found


def tests(arch: int) -> dict[str, int]:
    """What the kernel's tests come to, in a process of their own.

    Raises:
        SystemExit: They fail.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "tests/test_triton_quant.py"],
        cwd=ROOT,
        env={**os.environ, "MOQ_PTX": str(arch)},
        capture_output=True,
        text=True,
    )
    said = re.search(r"(?s)(\d+) launches, (\d+) kinds of instructions.*?(\d+) passed", done.stdout)
    if done.returncode or said is None:
        raise SystemExit(done.stdout + done.stderr)
    launches, instructions, passed = map(int, said.groups())
    seconds = round(time.monotonic() - begin)
    return {"passed": passed, "seconds": seconds, "launches": launches, "instructions": instructions}


def main() -> int:
    """Renew the document; 1 if a random case is wrong, or the kernel was given up."""
    logging.basicConfig(format="%(message)s")
    document = json.loads(OUT.read_text(encoding="utf-8"))
    failed = 0
    for arch in map(int, sys.argv[1:]):
        found: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        found |= {"costs": costs(arch), "tests": tests(arch), "cases": cases.tried(arch, seconds=60)}
        print(f"sm_{arch}: {found['tests']}, random cases: {found['cases']}", flush=True)
        failed += found["cases"]["wrong"] + found["cases"]["given_up"]
        document[str(arch)] = found
        OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
