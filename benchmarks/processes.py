"""How far two or four processes end from one process on the same global batch, per launcher and feature.

    python benchmarks/processes.py

Tiny BERTs from `tests/helpers/launched.py` with group borders inside of shards, 14 SGD steps. Compared are the weights,
the bits of every layer and the step, block and bits of every switch. Offload is FSDP2 with shards that are kept on the
CPU, hsdp a mesh with replicas, reshard a forward pass that leaves parts of another size. FSDP2's jobs make Accelerate
take gloo's processes for GPUs, since it obeys `fsdp` on GPUs only. ZeRO needs DeepSpeed and is left out without it.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from elsewhere import ROOT
from environment import environment, write

FEATURES = ["nearest", "stochastic", "asymmetric", "one_group", "per_channel", "ternary", "blend", "embeddings"]
TRAINER = [*FEATURES, "accumulate", "checkpointing", "adamw", "compile", "float", "float_bf16", "bf16"]
RESUME = "resume/adamw_stochastic"
EIGENVALUES = ["eigenvalues", "eigenvalues_stochastic"]
TORCHRUN, FOUR = (f"torchrun --standalone --nproc-per-node {count}" for count in (2, 4))
ACCELERATE = (
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "
    "--main_process_port 29561"
)
# Launcher, kind and cases.
LAUNCHES = [
    (TORCHRUN, "ddp", [*TRAINER, RESUME, *EIGENVALUES, "error/config", "error/bits", "error/skipped"]),
    (ACCELERATE, "ddp", ["nearest", "stochastic", "accumulate", *EIGENVALUES, RESUME]),
    (TORCHRUN, "fsdp2", [*TRAINER, RESUME, "budget"]),
    (TORCHRUN, "stock", ["nearest", "stochastic", RESUME]),
    (TORCHRUN, "hand", [*FEATURES]),
    (TORCHRUN, "offload", FEATURES),
    (FOUR, "fsdp2", [*FEATURES, RESUME, "budget"]),
    (FOUR, "hsdp", [*FEATURES]),
    (FOUR, "reshard", FEATURES),
]
ZERO = ["nearest", "stochastic", "ternary", "accumulate", *EIGENVALUES, RESUME]
if importlib.util.find_spec("deepspeed") is not None:
    LAUNCHES += [(TORCHRUN, "zero1", ZERO), (TORCHRUN, "zero2", ZERO)]
    LAUNCHES += [(TORCHRUN, "zero3", [*FEATURES, "accumulate", "budget", RESUME, "error/eigenvalues"])]
    LAUNCHES += [(FOUR, "zero3", [*FEATURES, RESUME])]


def table(results: list[dict[str, Any]]) -> str:
    """The largest difference of a float weight, in Markdown: a row per case, a column per launcher and kind."""
    columns = list(dict.fromkeys((row["kind"], row["launcher"], row["processes"]) for row in results))
    cells: dict[str, dict[tuple[str, str, int], str]] = {}
    for row in results:
        if "weights" in row:
            agree = row["bits_equal"] and row["switches_equal"] and row.get("factors_equal", True)
            cell = f"{row['weights']:.1e}" + ("" if agree else ", bits differ")
        elif "resumed_equal" in row:
            cell = "equal" if row["resumed_equal"] else "DIFFERS"
        else:
            continue
        cells.setdefault(row["case"], {})[row["kind"], row["launcher"], row["processes"]] = cell
    lines = ["| | " + " | ".join(f"{kind}, {count}, {launcher}" for kind, launcher, count in columns) + " |"]
    lines += ["| --- |" + " --- |" * len(columns)]
    lines += [f"| {case} | " + " | ".join(found.get(c, "") for c in columns) + " |" for case, found in cells.items()]
    return "\n".join(lines)


def count_of(launcher: str) -> int:
    """How many processes a launcher starts."""
    return 4 if launcher == FOUR else 2


def compared(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """The largest differences of two outcomes."""
    found: dict[str, Any] = {}
    for kind in ("weights", "quantized"):
        found[kind] = max((float((two[kind][n] - v).abs().max()) for n, v in one[kind].items()), default=None)
    found["loss"] = max(abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True))
    found["bits_equal"] = one["bits"] == two["bits"]
    found["switches_equal"] = [s[:4] for s in one["history"] or []] == [s[:4] for s in two["history"] or []]
    if one["eigenvalues"]:
        found["factors_equal"] = [s[5] for s in one["history"]] == [s[5] for s in two["history"]]
    return found


def launch(launcher: str, kind: str, cases: list[str], references: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the cases in two processes, and in this one where they are not yet known."""
    import launched

    program, *options = shlex.split(launcher)
    module = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}[program]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *options, launched.__file__, folder]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        began = time.perf_counter()
        jobs = [f"{kind}/{case}" for case in cases]
        done = subprocess.run([*command, *jobs], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        print(f"{program} {kind}: {len(cases)} cases, {time.perf_counter() - began:.0f} s", flush=True)
        for case in cases:
            row: dict[str, Any] = {"launcher": program, "processes": count_of(launcher), "kind": kind, "case": case}
            two = torch.load(Path(folder, f"{kind}-{case.replace('/', '-')}.pt"), weights_only=False)
            if case.startswith("resume/"):
                row["resumed_equal"] = two
            elif case.startswith("error/"):
                row["raised"] = two
            else:
                way = "hand" if kind in launched.BY_HAND else "ddp"
                if (way, case) not in references:
                    with contextlib.redirect_stdout(io.StringIO()):
                        references[way, case] = launched.run(Path(folder, "one"), way, case)
                row |= compared(references[way, case], two)
            results.append(row)
            print("  " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("launcher", "kind")), flush=True)
    return results


def main() -> None:
    """Run all launches and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", help="run these alone, and keep what OUT has of the others", default=None)
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4], help="run these alone, as --kinds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/processes.json"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    references: dict[str, Any] = {}
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    partly = args.kinds is not None or args.processes != [2, 4]
    for row in json.loads(args.out.read_text())["results"] if partly and args.out.exists() else []:
        found.setdefault((row["launcher"], row["kind"], row["processes"]), []).append(row)
    for launcher, kind, cases in LAUNCHES:
        count = count_of(launcher)
        if (args.kinds is None or kind in args.kinds) and count in args.processes:
            found[launcher.split()[0], kind, count] = launch(launcher, kind, cases, references)
    results = [row for rows in found.values() for row in rows]
    modules = ["accelerate", *["deepspeed"] * (importlib.util.find_spec("deepspeed") is not None)]
    write({**environment(*modules), "results": results}, args.out)
    print(table(results))


if __name__ == "__main__":
    main()
