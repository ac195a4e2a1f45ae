"""moq_hf and other libraries' quantization-aware training: the same model, data, batches, optimizer and seeds.

    pip install -r benchmarks/peers-requirements.txt
    python benchmarks/peers.py --model_name_or_path FOLDER --data FOLDER

The data is a folder with train.jsonl and validation.jsonl whose lines have `sentence` and `label`. Parts:

- train: a run in a process of its own for each arm and seed: accuracy with the quantizer that training used, and peak
  resident memory of training. The first run of an arm is saved too: bytes, seconds to load and accuracy of the loaded
  model, in a fresh process.
- time: seconds of a training step of all arms in one process, one step of each in turn. --time_dtype bfloat16 is
  under autocast, --micro_batches so many forward and backward passes a step.

Each result is a line of `--out`; what is there is not measured again. An arm that fails leaves its error as its line.
"""

import argparse
import gc
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peer_arms import Arm, DeepSpeedForward, DeepSpeedStep, MoQ, Quanto, TorchAO, TorchAOEager, moq, variant
from short_runs import Batch, Lines, Task, digest, fixed_batch, new_model, new_optimizer, table, train
from torch import nn

PACKAGES = ("torchao", "optimum-quanto", "deepspeed")


@dataclass(frozen=True)
class Entry:
    """An arm and what to say of it."""

    make: type[Arm]
    package: str = "moq_hf"
    note: str = ""


MAIN: dict[str, Entry] = {
    "float": Entry(Arm, "torch"),
    "moq_hf, 8 bits": Entry(moq(12, 8), note="12 to 8 bits, auto, 8 row blocks"),
    "torch.ao eager, 8 bits": Entry(TorchAOEager, "torch", "activations at 8 bits too, per-channel weights"),
    "torchao, 8 bits": Entry(TorchAO, "torchao", "per channel"),
    "optimum-quanto, 8 bits": Entry(Quanto, "optimum-quanto", "per channel"),
    "DeepSpeed forward, 8 bits": Entry(DeepSpeedForward, "deepspeed", "8 row blocks, each forward pass"),
    "DeepSpeed step, 8 bits": Entry(DeepSpeedStep, "deepspeed", "8 row blocks, once a step"),
    "moq_hf, 4 bits": Entry(moq(8, 4), note="8 to 4 bits, auto, 8 row blocks"),
    "torchao, 4 bits": Entry(variant(TorchAO, bits=4, group_size=32), "torchao", "groups of 32"),
    "optimum-quanto, 4 bits": Entry(variant(Quanto, bits=4), "optimum-quanto", "asymmetric, groups of 128"),
    "DeepSpeed forward, 4 bits": Entry(variant(DeepSpeedForward, bits=4), "deepspeed", "8 row blocks"),
    "moq_hf, 4 bits, groups of 32": Entry(moq(4, 4, quantize_group_size=32), note="4 bits from the first step"),
}
OPTIONS: dict[str, Entry] = {
    "moq_hf, 4 bits at once": Entry(moq(4, 4), note="from the first step"),
    "moq_hf, 4 bits, per channel": Entry(moq(8, 4, quantize_groups="per_channel")),
    "moq_hf, 4 bits, asymmetric, groups of 128": Entry(
        moq(4, 4, quantize_type="asymmetric", quantize_group_size=128), note="the grid of optimum-quanto"
    ),
    "moq_hf, 4 bits, asymmetric, groups of 128, absmax": Entry(
        moq(4, 4, quantize_type="asymmetric", quantize_group_size=128, algo={"scale": "absmax"}),
        note="the grid of optimum-quanto, no search for clipping ratios",
    ),
    "moq_hf, 4 bits, groups of 32, absmax": Entry(
        moq(4, 4, quantize_group_size=32, algo={"scale": "absmax"}), note="no search for clipping ratios"
    ),
    "moq_hf, 4 bits, full, groups of 32": Entry(moq(4, 4, quantize_group_size=32, algo={"range": "full"})),
    "moq_hf, 4 bits, full, per channel": Entry(moq(4, 4, quantize_groups="per_channel", algo={"range": "full"})),
    "moq_hf, 4 bits, absmax": Entry(moq(8, 4, algo={"scale": "absmax"})),
    "moq_hf, 4 bits, asymmetric": Entry(moq(8, 4, quantize_type="asymmetric")),
    "moq_hf, 4 bits, stochastic": Entry(moq(8, 4, algo={"rounding": "stochastic"})),
    "moq_hf, 4 bits, blend": Entry(moq(8, 4, fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.05})),
    "moq_hf, 4 bits, tables at 8": Entry(moq(8, 4, quantize_embeddings=8)),
    "moq_hf, 8 bits at once": Entry(moq(8, 8), note="from the first step"),
    "moq_hf, 8 bits, per channel": Entry(moq(12, 8, quantize_groups="per_channel")),
    "moq_hf, 8 bits, stochastic": Entry(moq(12, 8, algo={"rounding": "stochastic"})),
    "moq_hf, 8 bits, asymmetric": Entry(moq(12, 8, quantize_type="asymmetric")),
    "moq_hf, 8 bits, tables at 8": Entry(moq(12, 8, quantize_embeddings=8)),
}
ARMS = MAIN | OPTIONS
SCORED = ["", "version", "accuracy", "seeds", "against float", "loaded again"]


def train_arm(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train, evaluate, save; then load and evaluate what was saved in a fresh process."""
    task = Task(args.model_name_or_path, args.data)
    steps = args.steps or -(-len(task.train) // args.batch)
    arm = ARMS[name].make(new_model(args.model_name_or_path, seed), steps)
    run = train(
        arm.model,
        task,
        seed=seed,
        lr=args.lr,
        steps=steps,
        after_step=arm.after_step,
        before_optimizer=lambda _: arm.before_optimizer(),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    arm.model.eval()
    accuracy = task.accuracy(arm.model)
    line = {
        "accuracy": round(accuracy, 5),
        "steps": steps,
        "train_seconds": run["train_seconds"],
        "peak_mb": round(peak, 1),
        "last_losses": run["losses"][-5:],
        "batches": digest(task.batches(seed, args.batch)),
    }
    if args.no_save:
        return line
    with tempfile.TemporaryDirectory() as folder:
        try:
            arm.save(Path(folder))
            line["bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            line |= subprocess_line(args, ["--one", "load", "--arm", name, "--folder", folder])
        except Exception as error:
            # Others' packages fail in their own ways; training counts all the same.
            line["save_error"] = described(error)
    return line


def load_arm(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Seconds from nothing but imports to the first logits: the first time and the median of five more; accuracy."""
    task = Task(args.model_name_or_path, args.data)
    example = {"input_ids": torch.tensor([task.validation[0][0]])}
    seconds = []
    for _ in range(6):
        gc.collect()
        begin = time.perf_counter()
        model = ARMS[name].make.load(args.folder, args.model_name_or_path).eval()
        with torch.no_grad():
            model(**example)
        seconds.append(time.perf_counter() - begin)
    return {
        "load_first_seconds": round(seconds[0], 3),
        "load_seconds": round(statistics.median(seconds[1:]), 3),
        "saved_accuracy": round(task.accuracy(model), 5),
    }


def stepper(args: argparse.Namespace, name: str) -> Callable[[Batch], tuple[float, float]]:
    """A function that takes one optimizer step and gives its seconds and those of its CPU time."""
    # So long a run that schedules do not move after the first steps, which are not timed.
    arm = ARMS[name].make(new_model(args.model_name_or_path, 0), 1000)
    dtype = torch.bfloat16 if args.time_dtype == "bfloat16" else None
    if isinstance(arm, MoQ):
        arm.controller.begin(arm.controller.inventory, 1000, dtype)
        while not arm.controller.has_arrived:
            arm.after_step()
    optimizer = new_optimizer(arm.model, 1e-5)

    def step(batch: Batch) -> tuple[float, float]:
        torch.manual_seed(0)
        begin = time.perf_counter(), time.process_time()
        for _ in range(args.micro_batches):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = arm.model(**batch).loss
            (loss / args.micro_batches).backward()
        nn.utils.clip_grad_norm_(arm.model.parameters(), 1.0)
        arm.before_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        arm.after_step()
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    return step


def time_arms(args: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """Interleaved steps of all arms in this process; the order changes from round to round."""
    batch = fixed_batch(args.model_name_or_path, args.time_batch, args.time_sequence)
    steps: dict[str, Callable[[Batch], tuple[float, float]]] = {}
    lines: list[dict[str, Any]] = []
    for name in names:
        try:
            steps[name] = stepper(args, name)
            for _ in range(2):
                steps[name](batch)
        except Exception as error:
            # Others' packages fail in their own ways where they do not fit.
            steps.pop(name, None)
            lines.append({"arm": name, "error": described(error)})
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(args.repeats):
        for name in order:
            times[name].append(steps[name](batch))
        order = order[1:] + order[:1]
    for name, measured in times.items():
        line: dict[str, Any] = {"arm": name, "repeats": args.repeats}
        for kind, index in (("wall", 0), ("cpu", 1)):
            mine, plain = ([pair[index] for pair in pairs] for pairs in (measured, times["float"]))
            ratios = statistics.quantiles((a / b for a, b in zip(mine, plain, strict=True)), n=4)
            line[kind] = {
                "median_seconds": round(statistics.median(mine), 5),
                "ratio_of_medians": round(statistics.median(mine) / statistics.median(plain), 4),
                "ratio_of_least": round(min(mine) / min(plain), 4),
                "quartiles_of_ratios": [round(quartile, 4) for quartile in ratios],
            }
        lines.append(line)
    return lines


def described(error: Exception) -> str:
    """One line, without the folders of this machine."""
    text = str(error).strip().splitlines()
    line = text[-1] if isinstance(error, subprocess.CalledProcessError) and text else (text[0] if text else "")
    return f"{type(error).__name__}: " + " ".join(Path(w).name if w.startswith("/") else w for w in line.split())[:300]


def subprocess_line(args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """What this program prints as its last line in a process of its own."""
    passed = ["--model_name_or_path", args.model_name_or_path] if args.model_name_or_path else []
    passed += ["--data", str(args.data)] if args.data else []
    passed += ["--threads", str(args.threads), "--lr", str(args.lr), "--batch", str(args.batch)]
    passed += ["--time_batch", str(args.time_batch), "--time_sequence", str(args.time_sequence)]
    passed += ["--steps", str(args.steps)]
    done = subprocess.run([sys.executable, __file__, *passed, *more], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = done.stderr.strip().splitlines()
        raise RuntimeError(tail[-1] if tail else f"exit status {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    """Measure what the file of lines lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="without: random weights, and no training")
    parser.add_argument("--data", type=Path, help="folder; needed for training")
    parser.add_argument("--parts", help="of time, train, table, scores, steps; without: time, train and table")
    parser.add_argument("--arms", nargs="+", default=list(MAIN), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--options", action="store_true", help="moq_hf's other options instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=0, help="of a run; 0 is one epoch")
    parser.add_argument("--time_batch", type=int, default=16)
    parser.add_argument("--time_sequence", type=int, default=64)
    parser.add_argument("--time_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers.jsonl"))
    parser.add_argument("--one", choices=["train", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no_save", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.one:
        one = {
            "train": lambda: train_arm(args, args.arm, args.seed),
            "load": lambda: load_arm(args, args.arm),
        }[args.one]()
        print(json.dumps(one))
        return
    can_train = args.model_name_or_path is not None and args.data is not None
    parts = args.parts.split(",") if args.parts else ["time", *["train"] * can_train, "table"]
    if "train" in parts and not can_train:
        parser.error("training needs --model_name_or_path and --data")
    lines = Lines(args.out)
    names = list(OPTIONS) if args.options else args.arms
    for part in parts:
        if part == "time":
            time_what_is_missing(args, lines, names)
        elif part == "steps":
            print(steps(lines.lines))
        elif part in ("table", "scores"):
            rows = args.steps * args.batch or "all"
            kept = [line for line in lines.lines if line.get("rows", rows if part == "table" else "") == rows]
            print(markdown(kept) if part == "table" else scores(kept))
        else:
            for seed in args.seeds:
                for name in names:
                    key = {"part": part, "arm": name, "seed": seed, "rows": args.steps * args.batch or "all"}
                    if not lines.has(**key):
                        more = ["--one", part, "--arm", name, "--seed", str(seed)]
                        saved = lines.has(part=part, arm=name, rows=key["rows"])
                        report(lines, key | attempt(args, more + ["--no_save"] * saved))


def time_what_is_missing(args: argparse.Namespace, lines: Lines, names: list[str]) -> None:
    """Time the arms that have no line with these shapes yet, beside float."""
    shape = {"batch": args.time_batch, "sequence": args.time_sequence}
    if (args.time_dtype, args.micro_batches) != ("float32", 1):
        shape |= {"dtype": args.time_dtype, "micro_batches": args.micro_batches}
    same = [line for line in lines.lines if line["part"] == "time" and shape.items() <= line.items()]
    done = {line["arm"] for line in same if "dtype" in shape or "dtype" not in line}
    wanted = [name for name in names if name != "float" and name not in done]
    if wanted:
        for found in time_arms(args, ["float", *wanted]):
            report(lines, {"part": "time"} | shape | found)


def steps(lines: list[dict[str, Any]]) -> str:
    """The table of a step's CPU time over the float one, by dtype and micro-batches."""
    kinds = [("float32", 1), ("float32", 4), ("bfloat16", 1), ("bfloat16", 4)]
    timed = {
        (line["arm"], line.get("dtype", "float32"), line.get("micro_batches", 1)): line["cpu"]["ratio_of_medians"]
        for line in lines
        if line["part"] == "time" and "cpu" in line
    }
    rows = [
        [name, *(f"{timed[(name, *kind)]:.3f}" if (name, *kind) in timed else "" for kind in kinds)]
        for name in ARMS
        if any(arm == name for arm, *_ in timed)
    ]
    return table(["", *(f"{dtype}, {count} micro-batch{'es' * (count > 1)}" for dtype, count in kinds)], rows)


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table of the lines, whose runs are of one length.

    Accuracies are means over seeds, differences those to float with the same seeds; of two timings the later counts.
    "added" is the CPU time that a step of a very small batch takes more than in float, as a share of the float step of
    the large batch: what does not depend on the batch, which is all but torch.ao's activations. Memory, size and time
    to load are those of the run that was saved.
    """
    head = [*SCORED, "step", "added", "peak memory", "file", "load"]
    plain = [line for line in lines if line["part"] == "time" and "cpu" in line and "dtype" not in line]
    timed = {(line["arm"], line["batch"]): line["cpu"] for line in plain}
    small, large = min((b for _, b in timed), default=0), max((b for _, b in timed), default=0)
    rows = []
    for name in ARMS:
        mine = [line for line in lines if line["arm"] == name]
        if not mine:
            continue
        row = scored(lines, name)
        row.append(f"{timed[name, large]['ratio_of_medians']:.3f}" if (name, large) in timed else "")
        if small != large and (name, small) in timed:
            more = timed[name, small]["median_seconds"] - timed["float", small]["median_seconds"]
            row.append(f"{more / timed['float', large]['median_seconds']:.1%}")
        else:
            row.append("")
        saved = saved_line(mine)
        row.append(f"{saved['peak_mb']:.0f} MB" if saved else "")
        row.append(f"{saved['bytes'] / 1e6:.1f} MB" if saved else "")
        row.append(f"{saved['load_seconds']:.2f} s" if saved else "")
        rows.append(row)
    return table(head, rows)


def scores(lines: list[dict[str, Any]]) -> str:
    """The first columns of `markdown`: what does not hang on the machine's load."""
    return table(SCORED, [scored(lines, name) for name in ARMS if any(line["arm"] == name for line in lines)])


def scored(lines: list[dict[str, Any]], name: str) -> list[str]:
    """An arm's cells under `SCORED`, with its errors."""
    entry, mine = ARMS[name], [line for line in lines if line["arm"] == name]
    trained, in_float = accuracies(lines, name), accuracies(lines, "float")
    row = [f"{name} ({entry.note})" if entry.note else name]
    row.append(mine[-1]["peers"].get(entry.package) or mine[-1]["versions"].get(entry.package, ""))
    row += [f"{statistics.mean(trained.values()):.4f}", str(len(trained))] if trained else ["", "0"]
    gaps = [value - in_float[seed] for seed, value in trained.items() if seed in in_float and name != "float"]
    spread = f" ± {statistics.stdev(gaps):.4f}" if len(gaps) > 1 else ""
    row.append(f"{statistics.mean(gaps):+.4f}{spread}" if gaps else "")
    saved = saved_line(mine)
    row.append(f"{saved['saved_accuracy']:.4f}" if saved else "")
    errors = [line.get("error") or line.get("save_error") for line in mine]
    row[0] += "".join(f"; {error}" for error in dict.fromkeys(errors) if error)
    return row


def saved_line(mine: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of the run that was saved; empty without one."""
    return next((line for line in mine if "saved_accuracy" in line), {})


def accuracies(lines: list[dict[str, Any]], name: str) -> dict[int, float]:
    """An arm's by seed."""
    return {line["seed"]: line["accuracy"] for line in lines if line["arm"] == name and "accuracy" in line}


def attempt(args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """The line of a process of its own, or its error."""
    try:
        return subprocess_line(args, more)
    except RuntimeError as error:
        return {"error": described(error)}


def report(lines: Lines, line: dict[str, Any]) -> None:
    """Print a line and keep it, with what the arm is."""
    entry = ARMS[line["arm"]]
    print(json.dumps(line), flush=True)
    config = {"config": entry.make.config} if issubclass(entry.make, MoQ) else {}
    lines.add({**line, "note": entry.note, **config, "peers": versions()})


if __name__ == "__main__":
    main()
