"""What a training step asks of the processor beside a GPU, counted without one: the launch of the kernel does nothing.

    python benchmarks/host_operations.py

A BERT with as many layers as BERT-base and tiny widths, so that next to nothing is computed: forward and backward pass
under bfloat16 autocast, in float, with all weights made in one launch for each form, and with a launch for each layer.
Counts are of the third step. Times are CPU time, medians, one step of each in turn. Nothing is written to the memory of
the quantized weights.
"""

import argparse
import copy
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from environment import environment, write
from step_time import Arm, moq
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

from moq_hf import triton_launch, triton_quant
from moq_hf.model.convert import quant_layers

Batch = dict[str, torch.Tensor]


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators, those of autocast and of the backward pass too, and which of them launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.count += 1
        # What makes views or memory launches none.
        self.kernels += not (func.is_view or str(func).startswith(("aten.empty", "aten._unsafe_view")))
        return func(*args, **(kwargs or {}))


def step(model: Any, batch: Batch) -> None:
    """A forward and a backward pass."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()


def operators(model: Any, batch: Batch) -> tuple[int, int]:
    """PyTorch's operators of a step, and how many of them launch a kernel."""
    with Operators() as counted:
        step(model, batch)
    return counted.count, counted.kernels


def python_calls(model: Any, batch: Batch) -> int:
    """Calls of functions that are written in Python."""
    count = 0

    def heard(frame: Any, event: str, value: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(heard)
    try:
        step(model, batch)
    finally:
        sys.setprofile(None)
    return count


def cpu_seconds(model: Any, batch: Batch) -> float:
    """CPU time of a step."""
    begin = time.process_time()
    step(model, batch)
    return time.process_time() - begin


def main() -> None:
    """Count, time, print a line for each arm, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host_operations.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=args.layers, **sizes))
    batch = {"input_ids": torch.randint(0, 100, (1, 8)), "labels": torch.tensor([0])}
    models = {name: Arm(model, config).model for name, config in (("float", None), ("weights made ahead", moq(8)))}
    models["weights made layer by layer"] = copy.deepcopy(models["weights made ahead"])
    layers = [*quant_layers(models["weights made layer by layer"]).values()]
    # Nothing is made ahead.
    layers[0].moq.passes._fill = mock.Mock(return_value=None)
    launch = mock.Mock()
    with (
        mock.patch.object(triton_launch, "_triton", lambda: ("cpu", "")),
        mock.patch.object(triton_quant, "_is_right", lambda *variant: True),
        mock.patch.object(triton_quant, "_launch", lambda *arguments: launch()),
    ):
        results: dict[str, dict[str, float]] = {}
        for name, each in models.items():
            for _ in range(2):
                step(each, batch)
            launch.reset_mock()
            count, kernels = operators(each, batch)
            results[name] = {"operators": count, "launches": kernels + launch.call_count}
            results[name]["python_calls"] = python_calls(each, batch)
        times: dict[str, list[float]] = {name: [] for name in models}
        gc.disable()
        for _ in range(args.repeats):
            for name, each in models.items():
                times[name].append(cpu_seconds(each, batch))
    for name, found in results.items():
        found["microseconds"] = 1e6 * statistics.median(times[name])
        print(name, ", ".join(f"{what} {value / len(layers):.1f}" for what, value in found.items()), "a layer")
    write({**environment(), "quantized_layers": len(layers), "repeats": args.repeats, "step": results}, args.out)


if __name__ == "__main__":
    main()
