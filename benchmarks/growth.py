"""How time and memory grow with a model: from 11 million weights to 7 billion, and from a thousand layers to four.

    python benchmarks/growth.py

Models have Llama's shapes and random weights. Each is measured in a process of its own; one that does not fit into
memory is measured in parts of whole blocks, whose seconds are added up. Each line of `--out` is saved as it is done;
what is there is not measured again. What is measured:

- first: `MoQController(model)` to the first quantized weights, 4 bits per channel, with the search for clipping ratios
- refresh: all weights quantized again, as after each optimizer step, with the check for NaN
- search: the clipping ratios of all layers
- nan: the check alone
- packing: `save_quantized`, which reads the files back and checks them
- loading: `from_pretrained` and the first answer, which unpacks the weights
- report: `moq-hf report` on the packed folder

Memory is the largest resident memory during each of these, above what there was of it with the float model alone, the
libraries loaded and the loops compiled. For loading the loaded weights are taken off, as float32.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from short_runs import Lines, table
from transformers import LlamaConfig, LlamaForCausalLM

from moq_hf import MoQConfig, save_quantized
from moq_hf.model.refresh import check_finite
from moq_hf.report.page import write_report
from moq_hf.training.controller import MoQController

# Hidden size, intermediate size, blocks.
SIZES = {
    "11M": (384, 1024, 6),
    "110M": (768, 2048, 16),
    "340M": (1024, 2816, 26),
    "1.3B": (2048, 5504, 26),
    "7B": (4096, 11008, 32),
    "1050 layers": (32, 64, 150),
    "4200 layers": (32, 64, 600),
}
OPERATIONS = ("first", "refresh", "search", "nan", "packing", "loading", "report")
CONFIG = {
    "quantize_bits": {"start_bits": 4, "target_bits": 4},
    "quantize_groups": "per_channel",
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
}
# What a process has of memory before any weight is quantized; in one that has imported nothing yet.
LIBRARIES = """
import json, torch
from transformers import BertConfig, Trainer

def resident():
    status = open("/proc/self/status").read()
    return [int(status.split(f"{field}:")[1].split()[0]) * 1024 for field in ("VmRSS", "RssFile")]

found = {"torch and transformers": resident()}
import moq_hf
found["moq_hf"] = resident()
import numba
found["numba, imported"] = resident()
from moq_hf.kernels import cpu
cpu.available()
found["numba, the loops loaded"] = resident()
print(json.dumps(found))
"""


def weights_of(size: str) -> int:
    """Quantized weights of one block."""
    hidden, intermediate, _ = SIZES[size]
    return 4 * hidden**2 + 3 * hidden * intermediate


def parts_of(size: str, most: float) -> list[int]:
    """The blocks of each part, so that a part has at most so many weights."""
    left, each = SIZES[size][2], max(1, int(most // weights_of(size)))
    count = math.ceil(left / each)
    return [left // count + (index < left % count) for index in range(count)]


def model_of(hidden: int, intermediate: int, blocks: int) -> Any:
    """Llama's shapes with random weights, a table and a head of almost no size."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=max(1, hidden // 128),
        num_key_value_heads=max(1, hidden // 128),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    rotary = type(model.model.rotary_emb)(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    return model


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process's resident memory, now or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


class Stopwatch:
    """Times operations, with the resident memory that they take.

    Args:
        base: Bytes of resident memory that do not count.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.found: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, operation: Callable[[], Any], repeats: int = 1) -> Any:
        """Do it so often; keep the least seconds and the most memory."""
        # Sets the high-water mark back.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        seconds, cpu = [], []
        for _ in range(repeats):
            begin, used = time.perf_counter(), time.process_time()
            result = operation()
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - used)
        self.found[name] = {"seconds": min(seconds), "cpu": min(cpu), "bytes": resident("VmHWM") - self.base}
        return result


def answer(folder: str) -> None:
    """Load a folder and have it answer one token."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))


def train_side(shape: tuple[int, int, int], folder: str, repeats: int = 3) -> dict[str, Any]:
    """All but loading and the report, on a model of a shape, which is left packed in a folder."""
    model = model_of(*shape)
    gc.collect()
    measure, config = Stopwatch(resident()), MoQConfig.from_dict(CONFIG)
    controller = measure("first", lambda: MoQController(model, config, total_steps=10))
    layers = controller.layers
    measure("refresh", lambda: controller.refresh(wait=False), repeats)
    measure("search", lambda: [layer.set_bits(4) for layer in layers.values()])
    measure("nan", lambda: check_finite(layers), repeats)
    measure("packing", lambda: save_quantized(model, folder, controller=controller))
    return measure.found


def load_side(weights: int, folder: str) -> dict[str, Any]:
    """Loading and the report."""
    measure = Stopwatch(resident() + 4 * weights)
    measure("loading", lambda: answer(folder))
    measure.base = resident()
    measure("report", lambda: write_report(folder, Path(folder) / "report"))
    return measure.found


def one(args: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own measures: one side of one part."""
    with tempfile.TemporaryDirectory() as folder:
        # Imports and compiles.
        train_side((32, 64, 2), folder, repeats=1)
        load_side(0, folder)
    hidden, intermediate, _ = SIZES[args.sizes[0]]
    if args.side == "load":
        return load_side(weights_of(args.sizes[0]) * args.blocks, args.folder)
    return train_side((hidden, intermediate, args.blocks), args.folder)


def part(args: argparse.Namespace, size: str, blocks: int) -> dict[str, Any]:
    """The operations on so many blocks of a size, each side in a process of its own."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        for side in ("train", "load"):
            words = ["--sizes", size, "--blocks", str(blocks), "--side", side, "--folder", folder]
            words += ["--threads", str(torch.get_num_threads())]
            done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
            found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found


def libraries() -> dict[str, Any]:
    """Bytes of resident memory after each import, and how many of them are pages of files."""
    for _ in range(2):
        # The first one may have to compile.
        done = subprocess.run([sys.executable, "-c", LIBRARIES], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def tables(lines: list[dict[str, Any]]) -> str:
    """Seconds and bytes for each weight, by operation and size, and milliseconds for each of many small layers."""
    texts = []
    for found in [line["libraries"] for line in lines if "libraries" in line]:
        steps = zip([[0, 0], *found.values()], found.items(), strict=False)
        rows = [[name, *(f"{(now - was) / 1e6:.0f}" for now, was in zip(b, a, strict=True))] for a, (name, b) in steps]
        texts.append(table(["resident memory", "MB", "of files"], rows))
    lines = [line for line in lines if "size" in line]
    for unit, value in (
        ("seconds per billion weights", lambda ls, op, n: sum(line[op]["seconds"] for line in ls) / n * 1e9),
        ("CPU seconds per billion weights", lambda ls, op, n: sum(line[op]["cpu"] for line in ls) / n * 1e9),
        ("bytes per weight above the model", lambda ls, op, n: max(x[op]["bytes"] / x["weights"] for x in ls)),
    ):
        sizes = [size for size in SIZES if "layers" not in size and any(line["size"] == size for line in lines)]
        texts.append(grid(unit, sizes, lines, value, lambda ls: sum(line["weights"] for line in ls)))
    sizes = [size for size in SIZES if "layers" in size and any(line["size"] == size for line in lines)]
    if sizes:
        per_layer = lambda ls, op, n: sum(line[op]["cpu"] for line in ls) / n * 1e3  # noqa: E731
        texts.append(grid("CPU ms per layer", sizes, lines, per_layer, lambda ls: sum(7 * x["blocks"] for x in ls)))
    return "\n\n".join(texts)


def grid(
    title: str, sizes: list[str], lines: list[dict[str, Any]], value: Callable[..., float], count: Callable[..., int]
) -> str:
    """A table of one figure, a column for each size."""
    own = {size: [line for line in lines if line["size"] == size] for size in sizes}
    rows = [[op, *(f"{value(ls, op, count(ls)):.2f}" for ls in own.values())] for op in OPERATIONS]
    return table([title, *sizes], rows)


def main() -> None:
    """Measure what is not there yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--most", type=float, default=1.4e9, help="weights of a part")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tmp", help="where packed models go for a while; needs 0.6 bytes per weight of a part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.jsonl"))
    parser.add_argument("--report", action="store_true", help="only print the tables of what is there")
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.side:
        print(json.dumps(one(args)))
        return
    lines = Lines(args.out)
    if not args.report and not any("libraries" in line for line in lines.lines):
        lines.add({"libraries": libraries()})
    for size in [] if args.report else args.sizes:
        parts = parts_of(size, args.most)
        for index, blocks in enumerate(parts):
            key = {"size": size, "part": index, "parts": len(parts)}
            if not lines.has(**key):
                found = {**key, "blocks": blocks, "weights": blocks * weights_of(size), **part(args, size, blocks)}
                print(json.dumps(found), flush=True)
                lines.add(found)
    print(tables(lines.lines))


if __name__ == "__main__":
    main()
