"""How near quantization comes to the time of copying the weights, what it adds to a step, and products with packed weights.

    python benchmarks/triton_quant.py --out benchmarks/results/triton_quant.json

On a CUDA device: the whole model in one launch against the floor, that is the bytes read and written over the bandwidth
of a copy measured between the runs; a bf16 training step with and without MoQ; the packed product against float16. On
a CPU: the first of these. Others' code is measured where it is installed; what was not run says why.
"""  # noqa: E501 - the first line is one

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import environment, write
from step_time import Arm, in_turn, moq
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig

from moq_hf import quantizer, triton_quant
from moq_hf.grid import Grid, PerChannel, RowBlocks
from moq_hf.kernels import cpu as cpu_quant
from moq_hf.kernels import packing
from moq_hf.triton_quant import Batch, Job

MODES = [
    ("8 bits nearest", 8, Grid()),
    ("8 bits asymmetric", 8, Grid(symmetric=False)),
    ("8 bits stochastic", 8, Grid(stochastic=True)),
    ("2 bits ternary", 2, Grid()),
]


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one run, the device's work included."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(runs: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, Any]:
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
            measured.append(seconds(runs[name], device))
    return {name: statistics.median(measured) for name, measured in times.items()} | failed


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


def quantization(args: argparse.Namespace, device: torch.device, out_dtype: torch.dtype) -> list[dict[str, Any]]:
    """The linear layers of BERT's encoder, row blocks, float32 to `out_dtype`."""
    torch.manual_seed(0)
    hidden, layers, groups = args.hidden, args.layers, 8
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    weights = [torch.randn(shape, device=device) * 0.02 for shape in shapes * layers]
    outs = [torch.empty_like(weight, dtype=out_dtype) for weight in weights]
    count = sum(weight.numel() for weight in weights)
    source = torch.randn(count, device=device)
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

        if device.type == "cuda":
            jobs = [Job(weight, out, bits, grid) for weight, out in zip(weights, outs, strict=True)]
            runs["moq_hf"] = Batch(jobs).run
        elif cpu_quant.available():
            pairs = list(zip(weights, outs, strict=True))
            runs["moq_hf"] = lambda one_pass=one_pass, pairs=pairs: cpu_quant.each(one_pass, pairs)
        runs["eager PyTorch"] = eager
        if name == MODES[0][0]:
            if args.compile:
                runs["torch.compile"] = torch.compile(eager)
            runs |= rival_quantizers(weights, groups)
        medians = interleaved(runs, device, args.repeats)
        size = torch.finfo(out_dtype).bits // 8
        floor = medians["copy"] * (4 + size) / 8
        ratios = {name: value / floor for name, value in medians.items() if isinstance(value, float)}
        label = f"{name}, {count / 1e6:.1f} M weights, {groups} groups, float32 to {str(out_dtype)[6:]}"
        results.append({"case": label, "floor_s": floor, "median_s": medians, "ratio_to_floor": ratios})
        print(label, {name: round(value, 2) for name, value in ratios.items() if name != "copy"}, flush=True)
    return results


def steps(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A bf16 step of BERT with fused AdamW, with MoQ at 8 bits and without."""
    config = BertConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        intermediate_size=4 * args.hidden,
    )
    results = []
    for name, count, compiled in [("step", 1, False), ("4 micro-batches", 4, False), ("torch.compile", 1, True)]:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).to(device)
        ids = torch.randint(1000, config.vocab_size, (args.batch, args.sequence), device=device)
        labels = torch.arange(args.batch, device=device) % 2
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        arms = [Arm(model, quantization, torch.bfloat16, compiled) for quantization in (None, moq(8))]
        for arm in arms * 3:
            arm.step([batch] * count)
        plain, quantized = (statistics.median(times) for times in in_turn(arms, [batch] * count, args.repeats))
        results.append({"case": name, "plain_s": plain, "moq_s": quantized, "ratio_of_medians": quantized / plain})
        print(f"{name}: {plain:.4f} s, with MoQ x{quantized / plain:.4f}", flush=True)
    return results


def rival_products(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Weight-only products of others; what cannot be built says so when it is called."""

    def build(name: str) -> Callable[[Tensor], Tensor]:
        made: list[torch.nn.Linear] = []

        def product(x: Tensor) -> Tensor:
            if not made:
                import torchao.quantization as ao

                linear = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device, dtype=x.dtype)
                ao.quantize_(linear, getattr(ao, name)())
                made.append(linear)
            return made[0](x)

        return product

    return {f"torchao {name}": build(name) for name in ("Int8WeightOnlyConfig", "Int4WeightOnlyConfig")}


def products(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Products x W^T with float16 activations, a scale per row."""
    results = []
    shapes = [(h, k) for s in (768, 1024) for h, k in ((s, s), (4 * s, s), (s, 4 * s))] + [(4096, 4096)]
    for (rows, columns), m in itertools.product(shapes, (1, 16, 128, 4096)):
        torch.manual_seed(0)
        x = torch.randn(m, columns, device=device, dtype=torch.float16)
        weight = torch.randn(rows, columns, device=device, dtype=torch.float16)
        runs: dict[str, Callable[[], Any]] = {"float16": lambda x=x, weight=weight: F.linear(x, weight)}
        sizes = {"float16": weight.nbytes}
        for bits in packing.PACKED_BITS:
            codes, scale, _ = quantizer.quantize(weight, bits, Grid(PerChannel()))
            words = packing.pack(codes, bits)
            sizes[f"{bits} bits"] = words.nbytes + scale.nbytes
            runs[f"{bits} bits"] = lambda x=x, w=words, b=bits, s=scale: packing.packed_linear(x, w, b, s)
        for name, product in rival_products(weight).items():
            runs[name] = lambda x=x, product=product: product(x)
        medians = interleaved(runs, device, args.repeats)
        results.append({"rows": rows, "columns": columns, "m": m, "median_s": medians, "weight_bytes": sizes})
        shown = {name: f"{value * 1e6:.0f}" for name, value in medians.items() if isinstance(value, float)}
        print(f"{rows}x{columns}, M {m}, microseconds: {shown}", flush=True)
    return results


def main() -> None:
    """Measure what the machine can, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/triton_quant.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.repeats = args.repeats or (50 if device.type == "cuda" else 7)
    no_gpu = "not run: no CUDA device with a working Triton"
    gpu = device.type == "cuda" and triton_quant.available(device)
    dtypes = [torch.bfloat16] if gpu else [torch.float32, torch.bfloat16]
    document: dict[str, Any] = {
        **environment(device=torch.cuda.get_device_name() if gpu else "cpu"),
        "repeats": args.repeats,
        "seed": 0,
        "quantization": [result for dtype in dtypes for result in quantization(args, device, dtype)],
        "training_step": steps(args, device) if gpu else no_gpu,
        "packed_product": products(args, device) if gpu else no_gpu,
    }
    if not gpu:
        print(f"training step and packed product {no_gpu}")
    write(document, args.out)


if __name__ == "__main__":
    main()
