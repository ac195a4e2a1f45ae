"""What the host needs to quantize a layer's weight for a pass, without a GPU.

    python benchmarks/host_time.py

Triton's launcher is given a driver whose launches do nothing (tests/ptx/driver.py), and weights are so small that
PyTorch's own operators take no longer than their dispatch on a CPU. A GPU's driver comes on top, once for the kernel,
and once for each operator of the others. Times are the process's own, for weights that need a gradient, without its
backward pass. benchmarks/results/host_time.json is written; torchao must be installed.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step_time import moq
from timing import interleaved
from torch import nn

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "host_time.json"
CALLS, ROUNDS = 200, 15


def seconds_a_call(run: Callable[[], Any]) -> float:
    """Of the process's time."""
    begin = time.process_time()
    for _ in range(CALLS):
        run()
    return (time.process_time() - begin) / CALLS


def layer() -> nn.Sequential:
    """A small linear layer, in a model."""
    return nn.Sequential(nn.Linear(64, 16))


def of_torchao(bits: torch.dtype, **groups: Any) -> Callable[[], Any]:
    """Torchao's fake quantization of a layer's weight."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model: Any = layer()
    quantize_(model, QATConfig(weight_config=IntxFakeQuantizeConfig(bits, **groups), step="prepare"))
    return lambda: model[0].weight_fake_quantizer(model[0].weight)


def main() -> None:
    """Measure, and write the document."""
    sys.path += [str(ROOT), str(ROOT / "tests" / "ptx")]
    pretending = importlib.import_module("driver").pretending
    from moq_hf import quantize_model

    runs: dict[str, Callable[[], Any]] = {}
    configs = {"8 bits": moq(8), "4 bits": moq(4, range="full"), "4 bits, groups of 32": moq(4, 32, range="full")}
    with pretending(90) as device:
        for name, config in configs.items():
            model: Any = layer()
            quantize_model(model, config)
            state, weight = model[0].moq, model[0].float_weight
            # The first use compiles, and compares the kernel with plain PyTorch.
            state.quantized_weight(weight, None, True)
            runs[f"moq_hf, {name}"] = lambda s=state, w=weight: s.quantized_weight(w, None, True)
        operator = torch.ops.moq_hf.fake_quantize
        runs["moq_hf, the operator of a compiled graph"] = lambda: operator(weight, state.number, torch.float32)
        runs["torchao, 8 bits"] = of_torchao(torch.int8, granularity="per_channel")
        runs["torchao, 4 bits, groups of 32"] = of_torchao(torch.int4, group_size=32)
        device.runs, before = False, device.launches
        medians = interleaved(runs, ROUNDS, seconds_a_call)
        assert device.launches > before
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "torchao")}
    microseconds = {name: round(1e6 * seconds, 1) for name, seconds in medians.items()}
    document = {"versions": versions, "calls": CALLS, "rounds": ROUNDS, "microseconds": microseconds}
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(microseconds, indent=1))


if __name__ == "__main__":
    main()
