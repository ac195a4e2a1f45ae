"""Runs of several processes of which one is killed at a random moment: do resumed ones end as if nothing had happened?

    python benchmarks/kills_sharded.py --kills 6 --out benchmarks/results/kills_sharded.jsonl

A tiny BERT of `tests/helpers/launched.py` trains for 14 steps with stochastic rounding and AdamW, and saves after each
fifth. A process, a step and a moment in it are drawn, at which the process gets SIGKILL; torchrun then ends the others.
Another launch goes on from the last checkpoint that was written to its end, and trains a run that nobody killed beside
it. Float weights, bits and switches of both must be equal, bit for bit. Lines that are there are not made again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from elsewhere import ROOT
from environment import environment

CASE = "adamw_stochastic"
COUNTS = (2, 4)


def launch(folder: Path, count: int, job: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a job of `launched` in several processes."""
    import launched

    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([*words, launched.__file__, str(folder), job], env=settings, capture_output=True, text=True)


def kill(seed: int, kind: str) -> dict[str, Any]:
    """One run that is killed and resumed."""
    draw = random.Random(seed)
    count = draw.choice(COUNTS)
    rank, step, seconds = draw.randrange(count), draw.randrange(1, 15), round(draw.uniform(0, 0.3), 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        died = launch(folder, count, f"{kind}/killed/{CASE}", MOQ_DIE=f"{rank} {step} {seconds}")
        part = folder / f"{kind}-part-{CASE}"
        left = sorted(int(path.name.rpartition("-")[2]) for path in part.glob("checkpoint-*"))
        done = launch(folder, count, f"{kind}/again/{CASE}")
        if done.returncode:
            raise SystemExit(done.stderr)
        equal = torch.load(folder / f"{kind}-again-{CASE}.pt", weights_only=False)
    drawn = {"seed": seed, "kind": kind, "processes": count, "rank": rank, "step": step, "seconds": seconds}
    return {**drawn, "died": died.returncode != 0, "checkpoints": left, "equal": equal}


def main() -> None:
    """Kill what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=["fsdp2"], help="of launched.py: fsdp2, zero3 (with DeepSpeed)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kills_sharded.jsonl"))
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    made = {(line["kind"], line["seed"]) for line in lines}
    modules = ["accelerate", *["deepspeed"] * ("zero3" in args.kinds)]
    for kind in args.kinds:
        for seed in range(args.kills):
            if (kind, seed) not in made:
                line = {**kill(seed, kind), **environment(*modules)}
                print({name: value for name, value in line.items() if name not in environment(*modules)}, flush=True)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
