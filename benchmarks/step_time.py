"""What MoQ adds to a training step: the time of a step with it over that of the plain float step.

    python benchmarks/step_time.py --model_name_or_path FOLDER --out benchmarks/results/step_time.json

All models train in one process on the same batches, a step of each in turn; the ratio is that of the medians. Times are
CPU time, of all threads together. A step is forward and backward of each micro-batch, gradient clipping, the optimizer
and, with MoQ, the advance of the schedule and the quantization of every weight. The search for clipping ratios, due
every 50 steps, is measured alone; its share of a step is in `ratio_with_search`. Without a model folder: random weights
of a 6-layer BERT with hidden size 384.
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from classifiers import classifier
from environment import environment, write

from moq_hf import MoQConfig
from moq_hf.training.controller import MoQController


class Arm:
    """A model in training, with or without MoQ, under autocast if a dtype is given."""

    def __init__(
        self, model: Any, config: MoQConfig | None, dtype: torch.dtype | None = None, compiled: bool = False
    ) -> None:
        """Starts at the config's bits: with an offset of 0."""
        self.model = copy.deepcopy(model).train()
        self.device = next(self.model.parameters()).device
        self.dtype = dtype
        self.controller = None if config is None else MoQController(self.model, config, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.forward = torch.compile(self.model) if compiled else self.model

    def step(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        """Seconds of one optimizer step: of CPU time, or of a GPU's."""
        torch.manual_seed(0)
        self._wait()
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        start = clock()
        for batch in micro_batches:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                loss = self.forward(**batch).loss
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.controller is not None:
            self.controller.step()
        self.optimizer.zero_grad()
        self._wait()
        return clock() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def moq(bits: int, group_size: int | None = None, **algo: Any) -> MoQConfig:
    """A config that stays at `bits` from the first step on: 8 row blocks, or groups of a size in a row."""
    schedule = {"quantize_period": 1, "schedule_offset": 0}
    quantize_bits = {"start_bits": bits, "target_bits": bits}
    groups = {"quantize_group_size": group_size} if group_size else {"quantize_groups": 8}
    return MoQConfig.from_dict(
        {"quantize_bits": quantize_bits, "quantize_schedule": schedule, "quantize_algo": algo, **groups}
    )


def in_turn(arms: Sequence[Arm], batches: list[dict[str, torch.Tensor]], repeats: int) -> list[list[float]]:
    """Seconds of each arm's steps: one of each in turn, and the other way round every second time."""
    times: list[list[float]] = [[] for _ in arms]
    for repeat in range(repeats):
        for index in sorted(range(len(arms)), reverse=repeat % 2 == 0):
            times[index].append(arms[index].step(batches))
    return times


def cpu_seconds(function: Callable[[], Any], repeats: int) -> float:
    """The median of a function's CPU time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def searched(controller: MoQController) -> None:
    """Search all clipping ratios once, as is due every `scale_refresh` steps."""
    for layer in controller.layers.values():
        layer.search_ratios()


def measure(
    model: Any,
    configs: Mapping[str, MoQConfig],
    dtype: torch.dtype | None,
    batches: list[dict[str, torch.Tensor]],
    repeats: int,
) -> list[dict[str, Any]]:
    """Steps in float and with each config, and the quantization alone: a noisy machine does not hide a small share."""
    arms = [Arm(model, config, dtype) for config in (None, *configs.values())]
    for arm in arms:
        arm.step(batches)
    plain, *others = in_turn(arms, batches, repeats)
    found = []
    for (name, config), arm, times in zip(configs.items(), arms[1:], others, strict=True):
        controller = arm.controller
        assert controller is not None
        alone = cpu_seconds(controller.step, repeats)
        search = cpu_seconds(lambda controller=controller: searched(controller), 3)
        step, float_step = statistics.median(times), statistics.median(plain)
        found.append(
            {
                "case": name,
                "dtype": "float32" if dtype is None else str(dtype).removeprefix("torch."),
                "micro_batches": len(batches),
                "plain_s": float_step,
                "moq_s": step,
                "ratio_of_medians": step / float_step,
                "median_of_pair_ratios": statistics.median(q / p for p, q in zip(plain, times, strict=True)),
                "search_s": search,
                "ratio_with_search": (step + search / config.scale_refresh) / float_step,
                "quantization_s": alone,
                "quantization_share": alone / float_step,
                "times": [plain, times],
            }
        )
    return found


def cases(size: int) -> dict[str, MoQConfig]:
    """Those of every table; groups are of `size` weights in a row."""
    return {
        "8 bits": moq(8),
        "4 bits": moq(4),
        f"8 bits, groups of {size}": moq(8, size),
        f"4 bits, groups of {size}": moq(4, size),
    }


# With one micro-batch only.
MORE = {
    "2 bits (ternary)": moq(2),
    "8 bits, stochastic": moq(8, rounding="stochastic"),
}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def main() -> None:
    """Measure, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES), help="bfloat16: autocast")
    parser.add_argument("--group_size", type=int, default=32)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = classifier(args.model_name_or_path)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, model.config.vocab_size, (size, args.sequence))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(size) % 2}

    results = []
    for dtype, count in itertools.product(args.dtypes, args.micro_batches):
        # A micro-batch has the whole batch size: accumulation makes the step longer, not the quantization.
        batches = [batch(args.batch) for _ in range(count)]
        configs = cases(args.group_size) | (MORE if count == 1 else {})
        for found in measure(model, configs, DTYPES[dtype], batches, args.repeats):
            results.append(found)
            print(
                f"{dtype:8} x {count}  {found['case']:22} {found['plain_s']:7.3f} s {found['moq_s']:7.3f} s  "
                f"x{found['ratio_of_medians']:.4f}, with search x{found['ratio_with_search']:.4f}  "
                f"alone {found['quantization_share']:.2%}",
                flush=True,
            )
    shape = {"batch": args.batch, "sequence": args.sequence, "repeats": args.repeats, "seed": 0}
    write({**environment(), **shape, "results": results}, args.out)


if __name__ == "__main__":
    main()
