"""What makes quantization-aware training slow, and what each lever brings: the simulator, mixed precision, clipping.

    python benchmarks/levers.py --model_name_or_path FOLDER --data FOLDER --parts simulator,precision,clipping

Each measurement is a line of `--out`; what is there is not measured again. Only `clipping` needs the data, a folder
with train.jsonl and validation.jsonl whose lines have `sentence` and `label`.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from short_runs import Batch, Lines, Task, fixed_batch, new_model, new_optimizer, table, train
from step_time import moq
from torch import nn

from moq_hf import MoQConfig, quantizer
from moq_hf.grid import Grid, RowBlocks
from moq_hf.kernels import cpu as cpu_quant
from moq_hf.model.convert import quant_layers
from moq_hf.training.controller import MoQController

CHANCE = math.log(2)
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "8 bits": (8, {}),
    "8 bits, stochastic": (8, {"stochastic": True}),
    "4 bits": (4, {}),
    "2 bits": (2, {}),
}


class Trained:
    """A model in training on micro-batches, for its time.

    Args:
        model: Folder or Hub name; None is random weights.
        config: None trains in float.
        dtype: Of autocast; float16 with loss scaling.
        every_forward: Quantize in each forward pass, not once per optimizer step.
    """

    def __init__(
        self,
        model: str | None,
        config: MoQConfig | None,
        dtype: torch.dtype | None = None,
        every_forward: bool = False,
    ) -> None:
        self.model = new_model(model, 0)
        self.controller = None if config is None else MoQController(self.model, config, dtype=dtype)
        self.optimizer = new_optimizer(self.model, 1e-5)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        self.dtype = dtype
        self.every_forward = every_forward

    def step(self, micro_batches: list[Batch]) -> float:
        """CPU seconds of one optimizer step."""
        torch.manual_seed(0)
        begin = time.process_time()
        for batch in micro_batches:
            if self.every_forward:
                for layer in quant_layers(self.model).values():
                    layer.moq.source = None
            with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss = self.model(**batch).loss
            self.scaler.scale(loss / len(micro_batches)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.controller is not None and not self.every_forward:
            self.controller.step()
        self.optimizer.zero_grad()
        return time.process_time() - begin


def interleaved(arms: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of what each gives, one call of each in turn, after one that does not count."""
    for call in arms.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, call in arms.items():
            found[name].append(call())
    return {name: statistics.median(values) for name, values in found.items()}


def simulator(args: argparse.Namespace, lines: Lines) -> None:
    """CPU time of quantizing all weights by each path, and of a step that does so per forward pass or once.

    The step is that of a very small batch: what quantization adds does not depend on it, and shows in less noise.
    """
    part = "simulator"
    batch = fixed_batch(args.model_name_or_path, 1, 8)
    weights = [layer.weight.detach() for layer in quant_layers(Trained(args.model_name_or_path, moq(8)).model).values()]
    # Compiled anew for each shape and grid otherwise allowed; the limit counts the grids too.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(quantizer.fake_quantize, dynamic=False)
    for name, (bits, algo) in GRIDS.items():
        if lines.has(part=part, what="all weights", grid=name):
            continue
        outs = [torch.empty_like(weight) for weight in weights]
        grid = Grid(RowBlocks(8), **algo)
        ratios: list[Any] = [None] * len(weights)
        if grid.searches(bits):
            ratios = [cpu_quant.least_squares_ratio(weight, bits, grid) for weight in weights]

        def quantize(
            function: Callable[..., Any],
            bits: int = bits,
            grid: Grid = grid,
            outs: list[torch.Tensor] = outs,
            ratios: list[Any] = ratios,
        ) -> float:
            begin = time.process_time()
            with torch.no_grad():
                for weight, out, ratio in zip(weights, outs, ratios, strict=True):
                    function(weight, bits, grid, out=out, ratio=ratio)
            return time.process_time() - begin

        def copy(outs: list[torch.Tensor] = outs) -> float:
            begin = time.process_time()
            for weight, out in zip(weights, outs, strict=True):
                out.copy_(weight)
            return time.process_time() - begin

        paths: dict[str, Callable[[], float]] = {
            "copy": copy,
            "plain PyTorch": functools.partial(quantize, quantizer.fake_quantize),
            "numba": functools.partial(quantize, cpu_quant.fake_quantize),
        }
        if not args.no_compile and not algo:
            paths["torch.compile"] = functools.partial(quantize, compiled)
        found = interleaved(paths, args.repeats)
        print(name, {key: f"{1000 * value:.1f} ms" for key, value in found.items()}, flush=True)
        lines.add({"part": part, "what": "all weights", "grid": name, "cpu_seconds": rounded(found)})
    for batches in ([batch], [batch] * 4):
        key = {"part": part, "what": "step", "micro_batches": len(batches), "tokens": batch["input_ids"].numel()}
        if lines.has(**key):
            continue
        plain = MoQConfig.from_dict({**moq(8).to_dict(), "quantizer_kernel": False})
        trained = {
            "float": Trained(args.model_name_or_path, None),
            "numba, once per step": Trained(args.model_name_or_path, moq(8)),
            "numba, per forward": Trained(args.model_name_or_path, moq(8), every_forward=True),
            "plain PyTorch, once per step": Trained(args.model_name_or_path, plain),
            "plain PyTorch, per forward": Trained(args.model_name_or_path, plain, every_forward=True),
        }
        found = interleaved(
            {name: functools.partial(arm.step, batches) for name, arm in trained.items()}, 2 * args.repeats
        )
        print(
            len(batches), {arm: f"{1000 * (value - found['float']):.1f} ms" for arm, value in found.items()}, flush=True
        )
        lines.add({**key, "cpu_seconds": rounded(found)})


def precision(args: argparse.Namespace, lines: Lines) -> None:
    """CPU time of a step in float32, under bf16 autocast and in fp16 with loss scaling, in float and with 8 bits."""
    batch = fixed_batch(args.model_name_or_path, 4, 64)
    dtypes = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if lines.has(part="precision"):
        return
    arms: dict[str, Callable[[], float]] = {}
    errors: dict[str, str] = {}
    for name, dtype in dtypes.items():
        for method, config in {"float": None, "8 bits": moq(8)}.items():
            key = f"{name}, {method}"
            try:
                arms[key] = functools.partial(Trained(args.model_name_or_path, config, dtype).step, [batch])
                arms[key]()
            except RuntimeError as error:
                arms.pop(key)
                errors[key] = str(error).splitlines()[0]
    found = interleaved(arms, args.repeats)
    print({key: f"{value / found['float32, float']:.3f}" for key, value in found.items()}, errors, flush=True)
    lines.add({"part": "precision", "cpu_seconds": rounded(found), "errors": errors})


def tables(args: argparse.Namespace, lines: Lines) -> None:
    """Print what the lines say, as Markdown."""
    weights = [line for line in lines.lines if line.get("what") == "all weights"]
    paths = list(dict.fromkeys(name for line in weights for name in line["cpu_seconds"]))
    print(table(["grid", *paths], [[line["grid"], *(shown(line, path) for path in paths)] for line in weights]))
    steps = [line for line in lines.lines if line.get("what") == "step"]
    arms = list(dict.fromkeys(name for line in steps for name in line["cpu_seconds"]))
    rows = [[str(line["micro_batches"]), *(added(line, arm) for arm in arms)] for line in steps]
    print("\n" + table(["micro-batches", *arms], rows))
    for line in lines.lines:
        if line["part"] == "precision":
            found = [[arm, over(line, arm, "float32, float")] for arm in line["cpu_seconds"]]
            print("\n" + table(["", "step"], found + [[arm, error] for arm, error in line["errors"].items()]))
    runs = [line for line in lines.lines if line["part"] == "clipping"]
    rows = []
    for key in sorted({(line["bits"], line["lr"], line["clip"]) for line in runs}):
        mine = [line for line in runs if (line["bits"], line["lr"], line["clip"]) == key]
        bits, lr, clip = key
        marks = list(mine[0]["accuracy"])
        rows.append(
            [
                "float" if bits == 32 else str(bits),
                f"{lr:g}",
                f"{clip:g}" if clip else "none",
                f"{sum(line['diverged'] for line in mine)} of {len(mine)}",
                *(f"{statistics.mean(line['accuracy'].get(mark, 0.0) for line in mine):.3f}" for mark in marks),
            ]
        )
    if runs:
        head = ["bits", "learning rate", "clip at", "diverged", *(f"step {mark}" for mark in runs[0]["accuracy"])]
        print("\n" + table(head, rows))


def shown(line: dict[str, Any], path: str) -> str:
    """Milliseconds, or nothing where the path was not run."""
    seconds = line["cpu_seconds"].get(path)
    return "" if seconds is None else f"{1000 * seconds:.1f} ms"


def added(line: dict[str, Any], arm: str) -> str:
    """Milliseconds more than in float."""
    return f"{1000 * (line['cpu_seconds'][arm] - line['cpu_seconds']['float']):.1f} ms"


def over(line: dict[str, Any], arm: str, base: str) -> str:
    """As a multiple of another's."""
    return f"{line['cpu_seconds'][arm] / line['cpu_seconds'][base]:.3f}"


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """To microseconds."""
    return {name: round(value, 6) for name, value in seconds.items()}


def clipping(args: argparse.Namespace, lines: Lines) -> None:
    """Short runs at rising learning rates, with and without gradient clipping."""
    task = Task(args.model_name_or_path, args.data)
    for bits in args.bits:
        for lr in args.lrs:
            for seed in args.seeds:
                for clip in (1.0, 0.0):
                    key = {"part": "clipping", "bits": bits, "lr": lr, "clip": clip, "seed": seed}
                    if lines.has(**key, steps=args.steps):
                        continue
                    lines.add({**key, **clipping_run(args, task, bits, lr, clip, seed)})


def clipping_run(args: argparse.Namespace, task: Task, bits: int, lr: float, clip: float, seed: int) -> dict[str, Any]:
    """One run; it has diverged if the loss of its last ten steps is that of guessing, or worse, or not a number."""
    model = new_model(args.model_name_or_path, seed)
    controller = None if bits == 32 else MoQController(model, moq(bits))
    marks = sorted({round(args.steps * quarter / 4) for quarter in (1, 2, 3, 4)})
    accuracy: dict[str, float] = {}

    def evaluate(step: int) -> None:
        if step in marks:
            model.eval()
            state = torch.get_rng_state()
            accuracy[str(step)] = round(task.accuracy(model, args.eval_rows), 4)
            torch.set_rng_state(state)
            model.train()

    run = train(
        model,
        task,
        seed=seed,
        lr=lr,
        steps=args.steps,
        max_grad_norm=clip,
        after_step=controller.step if controller is not None else None,
        each=evaluate,
    )
    last = run["losses"][-10:]
    final = None if None in last else round(statistics.mean(last), 4)
    diverged = final is None or final > CHANCE
    print(f"{bits} bits, lr {lr:g}, clip {clip:g}, seed {seed}: loss {final}, {accuracy}", flush=True)
    return {"steps": args.steps, "eval_rows": args.eval_rows, "final_loss": final, "diverged": diverged, **run} | {
        "accuracy": accuracy
    }


PARTS = {"simulator": simulator, "precision": precision, "clipping": clipping, "table": tables}


def main() -> None:
    """Measure what the file of lines lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="without: random weights, and no clipping")
    parser.add_argument("--data", type=Path, help="folder; needed for clipping")
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}; without: all that can be had")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 32], help="of clipping; 32 is float")
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-5, 2e-4, 5e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=62, help="of a run of clipping")
    parser.add_argument("--eval_rows", type=int, default=436)
    parser.add_argument("--repeats", type=int, default=7, help="of the timings")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/levers.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    can_train = args.model_name_or_path is not None and args.data is not None
    parts = args.parts.split(",") if args.parts else [part for part in PARTS if part != "clipping" or can_train]
    if "clipping" in parts and not can_train:
        parser.error("clipping needs --model_name_or_path and --data")
    lines = Lines(args.out)
    for part in parts:
        PARTS[part](args, lines)


if __name__ == "__main__":
    main()
