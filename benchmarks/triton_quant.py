"""How near quantization comes to the time of copying the weights.

    python benchmarks/triton_quant.py --out benchmarks/results/triton_quant.json

On a CPU; `gpu.py` measures a CUDA device. The floor is the bytes read and written over the bandwidth of a copy measured
between the runs. Others' code is measured where it is installed; what was not run says why.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment, write
from torch import Tensor

from moq_hf import quantizer
from moq_hf.grid import Grid, RowBlocks
from moq_hf.kernels import cpu as cpu_quant

MODES = [
    ("8 bits nearest", 8, Grid()),
    ("8 bits asymmetric", 8, Grid(symmetric=False)),
    ("8 bits stochastic", 8, Grid(stochastic=True)),
    ("2 bits ternary", 2, Grid()),
]


def seconds(run: Callable[[], Any]) -> float:
    """Of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(
    runs: dict[str, Callable[[], Any]], repeats: int, timed: Callable[[Callable[[], Any]], float] = seconds
) -> dict[str, Any]:
    """Median seconds of each, one run of each in turn; the reason instead for what cannot run."""
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            for _ in range(3):
                run()
        except Exception as error:
            # Others' packages fail in their own ways where they do not fit the machine.
            failed[name] = f"not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    times: dict[str, list[float]] = {name: [] for name in runs if name not in failed}
    for _ in range(repeats):
        for name, measured in times.items():
            measured.append(timed(runs[name]))
    return {name: statistics.median(measured) for name, measured in times.items()} | failed


def encoder_weights(hidden: int, layers: int, device: torch.device) -> list[Tensor]:
    """Random weights shaped as the linear layers of BERT's encoder."""
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    return [torch.randn(shape, device=device) * 0.02 for shape in shapes * layers]


def rival_quantizers(weights: list[Tensor], groups: int) -> dict[str, Callable[[], Any]]:
    """The same work by others: fake quantization of each weight, 8 bits symmetric."""

    def torchao() -> None:
        from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

        fake = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_channel"))
        for weight in weights:
            fake(weight)

    def deepspeed() -> None:
        from deepspeed.ops.quantizer import ds_quantizer

        for weight in weights:
            ds_quantizer(weight.clone(), groups=groups, bit_num=8)

    return {"torchao, per channel": torchao, "DeepSpeed, with a clone": deepspeed}


def quantization(args: argparse.Namespace, out_dtype: torch.dtype) -> list[dict[str, Any]]:
    """The linear layers of BERT's encoder, row blocks, float32 to `out_dtype`."""
    torch.manual_seed(0)
    groups = 8
    weights = encoder_weights(args.hidden, args.layers, torch.device("cpu"))
    outs = [torch.empty_like(weight, dtype=out_dtype) for weight in weights]
    count = sum(weight.numel() for weight in weights)
    source = torch.randn(count)
    target = torch.empty_like(source)
    results = []
    for name, bits, mode in MODES:
        grid = replace(mode, grouping=RowBlocks(groups))
        runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}

        def eager(bits: int = bits, grid: Grid = grid) -> None:
            for weight, out in zip(weights, outs, strict=True):
                quantizer.fake_quantize(weight, bits, grid, out=out)

        def one_pass(pair: tuple[Tensor, Tensor], bits: int = bits, grid: Grid = grid) -> None:
            cpu_quant.fake_quantize(pair[0], bits, grid, out=pair[1])

        if cpu_quant.available():
            pairs = list(zip(weights, outs, strict=True))
            runs["moq_hf"] = lambda one_pass=one_pass, pairs=pairs: cpu_quant.each(one_pass, pairs)
        runs["eager PyTorch"] = eager
        if name == MODES[0][0]:
            if args.compile:
                runs["torch.compile"] = torch.compile(eager)
            runs |= rival_quantizers(weights, groups)
        medians = interleaved(runs, args.repeats)
        size = torch.finfo(out_dtype).bits // 8
        floor = medians["copy"] * (4 + size) / 8
        ratios = {name: value / floor for name, value in medians.items() if isinstance(value, float)}
        label = f"{name}, {count / 1e6:.1f} M weights, {groups} groups, float32 to {str(out_dtype)[6:]}"
        results.append({"case": label, "floor_s": floor, "median_s": medians, "ratio_to_floor": ratios})
        print(label, {name: round(value, 2) for name, value in ratios.items() if name != "copy"}, flush=True)
    return results


def main() -> None:
    """Measure what the machine can, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/triton_quant.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    document: dict[str, Any] = {
        **environment(device="cpu"),
        "repeats": args.repeats,
        "seed": 0,
        "quantization": [result for dtype in (torch.float32, torch.bfloat16) for result in quantization(args, dtype)],
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
