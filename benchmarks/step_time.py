"""What MoQ adds to a training step: the time of a step with it over that of the plain float step.

    python benchmarks/step_time.py --model_name_or_path FOLDER --out benchmarks/results/step_time.json

Both models train in one process on the same batches, a step of the one after a step of the other; the ratio is that of
the medians. A step is forward and backward of each micro-batch, gradient clipping, the optimizer and, with MoQ, the
advance of the schedule and the quantization of every weight. Without a model folder: random weights of a 6-layer BERT
with hidden size 384.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
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
        """Seconds of one optimizer step."""
        torch.manual_seed(0)
        self._wait()
        start = time.perf_counter()
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
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def moq(bits: int, **algo: Any) -> MoQConfig:
    """A config that stays at `bits` from the first step on."""
    schedule = {"quantize_period": 1, "schedule_offset": 0}
    quantize_bits = {"start_bits": bits, "target_bits": bits}
    return MoQConfig.from_dict(
        {"quantize_bits": quantize_bits, "quantize_groups": 8, "quantize_schedule": schedule, "quantize_algo": algo}
    )


def in_turn(arms: Sequence[Arm], batches: list[dict[str, torch.Tensor]], repeats: int) -> list[list[float]]:
    """Seconds of each arm's steps: one of each in turn, and the other way round every second time."""
    times: list[list[float]] = [[] for _ in arms]
    for repeat in range(repeats):
        for index in sorted(range(len(arms)), reverse=repeat % 2 == 0):
            times[index].append(arms[index].step(batches))
    return times


def measure(model: Any, config: MoQConfig, batches: list[dict[str, torch.Tensor]], repeats: int) -> dict[str, Any]:
    """Steps in float and with MoQ, and the quantization alone, so that a noisy machine does not hide a small share."""
    arms = [Arm(model, None), Arm(model, config)]
    for arm in arms:
        arm.step(batches)
    times = in_turn(arms, batches, repeats)
    plain, quantized = (statistics.median(t) for t in times)
    controller = arms[1].controller
    assert controller is not None
    alone = []
    for _ in range(repeats):
        start = time.perf_counter()
        controller.step()
        alone.append(time.perf_counter() - start)
    return {
        "plain_s": plain,
        "moq_s": quantized,
        "ratio_of_medians": quantized / plain,
        "median_of_pair_ratios": statistics.median(q / p for p, q in zip(*times, strict=True)),
        "quantization_s": statistics.median(alone),
        "quantization_share": statistics.median(alone) / plain,
        "times": times,
    }


# Name, config and micro-batches.
CASES = [
    ("8 bits", moq(8), 1),
    ("8 bits, 4 micro-batches", moq(8), 4),
    ("4 bits (ratio search every 50 steps)", moq(4), 1),
    ("2 bits (ternary)", moq(2), 1),
    ("8 bits, stochastic", moq(8, rounding="stochastic"), 1),
]


def main() -> None:
    """Measure, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = classifier(args.model_name_or_path)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1000, model.config.vocab_size, (size, args.sequence))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(size) % 2}

    results = []
    for name, config, count in CASES:
        # A micro-batch has the whole batch size: accumulation makes the step longer, not the quantization.
        found = measure(model, config, [batch(args.batch) for _ in range(count)], args.repeats)
        results.append({"case": name, **found})
        print(
            f"{name:40} {found['plain_s']:7.3f} s {found['moq_s']:7.3f} s  x{found['ratio_of_medians']:.4f}  "
            f"alone {found['quantization_share']:.2%}",
            flush=True,
        )
    shape = {"batch": args.batch, "sequence": args.sequence, "repeats": args.repeats, "seed": 0}
    write({**environment(), **shape, "results": results}, args.out)


if __name__ == "__main__":
    main()
