"""Sections of `gpu.py` for the kernels alone, which need neither transformers nor a config.

Times are the device's, medians, one run of each in turn. Before each run the cache is written over, and the device is
kept busy for so long that the host has launched all of the run: what the host needs is measured apart.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timing import encoder_weights, interleaved, seconds
from torch import Tensor

from moq_hf import quantizer, triton_quant
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.kernels import packing
from moq_hf.triton_quant import Batch, Job

if TYPE_CHECKING:
    from gpu import Report

Run = Callable[[], Any]
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


def device_of(report: "Report") -> torch.device:
    """Where a section runs."""
    return torch.device("cpu" if report.small else "cuda")


class Timer:
    """Seconds of a run: of a device without the time that its launch takes the host, or on a CPU of all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Larger than any cache: what a run reads comes from memory.
        self.buffer = torch.empty(2**28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def __call__(self, run: Run) -> float:
        """Of one run."""
        if self.device.type == "cpu":
            return seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.buffer.zero_()
        # About ten milliseconds: eager PyTorch launches over a thousand kernels.
        torch.cuda._sleep(20_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def host(self, run: Run) -> float:
        """With the launch: from an idle device to an idle device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


class Heard(logging.Handler):
    """Keeps what moq_hf warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("moq_hf").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning's text."""
        self.lines.append(record.getMessage()[:2000])


def self_test(report: "Report") -> None:
    """Whether the kernels are used at all, by their own trial at first use."""
    device, heard = device_of(report), Heard()
    begin = time.perf_counter()
    report.figure("the kernels are used", triton_quant.available(device), equal=True)
    report.figure("the packed product is used", packing.available(device), equal=True)
    report.figure("first use, with the compiler", time.perf_counter() - begin, "s", timed=True)
    report.detail("warnings", heard.lines)
    report.detail("interpreter", report.small)


def grids(small: bool) -> list[tuple[int, Grid]]:
    """Bit widths with their grids."""
    uniform = [Grid(), Grid(symmetric=False), Grid(full=True)]
    found = [(bits, grid) for bits in ((4,) if small else (3, 4, 8, 16)) for grid in uniform]
    few = [(2, Grid()), (1, Grid()), (2, Grid(symmetric=False)), (2, Grid(full=True))]
    return found + few + [(8, Grid(stochastic=True)), (4, Grid(symmetric=False, stochastic=True))]


def jobs_of(shape: tuple[int, int], groupings: list[Grouping], report: "Report", types: Any) -> list[Job]:
    """A weight with each grid and each grouping; a row is zeros, and another one has tiny weights."""
    generator, found = torch.Generator().manual_seed(1), []
    source, result = types
    for (bits, grid), grouping in itertools.product(grids(report.small), groupings):
        weight = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()
        weight[0], weight[1, :3] = 0.0, torch.tensor([0.0, -0.0, 1e-42])
        weight = weight.to(device_of(report), source)
        out = torch.full_like(weight, torch.nan, dtype=result)
        blend = 0.3 if grid.stochastic else 0.0
        draw = quantizer.Draw(2**35 + 7, 3, 9)
        found.append(Job(weight, out, bits, replace(grid, grouping=grouping), None, draw, blend))
    return found


def wrong(jobs: list[Job], device: torch.device) -> Iterator[str]:
    """Those of which the definition, computed on a device, gives other bits."""
    for job in jobs:
        how: dict[str, Any] = {"draw": job.draw, "blend": job.blend, "dtype": job.out.dtype}
        expected = quantizer.fake_quantize(job.weight.to(device), job.bits, job.grid, **how)
        name = f"{job.bits} bits, {job.grid}, {list(job.weight.shape)}"
        yield from triton_quant.same_bits(job.out.to(device), expected, name)


def bit_equality(report: "Report") -> None:
    """All kernels against the definition on the same device, and the results against those of the CPU."""
    device, cpu = device_of(report), torch.device("cpu")
    search_and_packing(report, device)
    whole: list[Grouping] = [RowBlocks(3), PerChannel(), PerGroup(11)]
    length = triton_quant.WHOLE // 3 + 7
    for types in DTYPES[:1] if report.small else DTYPES:
        cases = jobs_of((6, 33) if report.small else (48, 330), whole, report, types)
        Batch(cases).run()
        # Groups of several tiles; other dtypes have the same passes.
        if types == DTYPES[0]:
            long = jobs_of((3, length), [RowBlocks()], report, types)
            Batch(long).run()
            cases += long
        names = " to ".join(str(dtype)[6:] for dtype in types)
        found, others = list(wrong(cases, device)), list(wrong(cases, cpu))
        report.detail(f"wrong, {names}", found)
        report.detail(f"other than on a CPU, {names}", others)
        report.figure(f"{names}: weights with other bits than the definition, of {len(cases)}", len(found), equal=0)
        report.figure(f"{names}: weights with other bits than on a CPU, of {len(cases)}", len(others))


def search_and_packing(report: "Report", device: torch.device) -> None:
    """Clipping ratios, and codes packed and unpacked."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(24, 330, generator=generator).to(device)
    found: list[str] = []
    for bits, grid in itertools.product((4,) if report.small else (3, 4, 8), (Grid(), Grid(symmetric=False))):
        for grouping in (RowBlocks(3), PerChannel(), PerGroup(33)):
            case = replace(grid, grouping=grouping)
            ratios = (search(weight, bits, case) for search in (triton_quant._searched, quantizer.least_squares_ratio))
            found += triton_quant.same_bits(*ratios, f"clipping ratios, {bits} bits, {case}")
    report.detail("wrong, search", found)
    report.figure("searches with other clipping ratios than the definition", len(found), equal=0)
    found = []
    for bits in range(1, 9):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 45), generator=generator, dtype=torch.int32)
        codes = codes.to(device)
        words = packing._pack_in_torch(codes, bits)
        found += triton_quant.same_bits(packing._pack(codes, bits), words, f"packing {bits} bits")
        found += triton_quant.same_bits(packing._unpack(words, bits, 45), codes, f"unpacking {bits} bits")
    report.detail("wrong, packing", found)
    report.figure("bit widths packed or unpacked otherwise than by PyTorch, of 8", len(found), equal=0)


def medians_of(runs: dict[str, Run], repeats: int, timer: Timer) -> dict[str, float]:
    """Seconds of each, all of which must run.

    Raises:
        RuntimeError: One does not.
    """
    found = interleaved(runs, repeats, timer)
    failed = [f"{name}: {value}" for name, value in found.items() if isinstance(value, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def bandwidth(report: "Report") -> None:
    """A whole model in one batch against the bytes that it reads and writes, at the bandwidth of a copy."""
    device = device_of(report)
    torch.manual_seed(0)
    weights = encoder_weights(*((32, 1) if report.small else (768, 12)), device)
    outs = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
    count, timer, repeats = sum(weight.numel() for weight in weights), Timer(device), 3 if report.small else 50
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    cases: list[tuple[str, int, Grid, float | None]] = [
        ("8 bits per channel", 8, Grid(PerChannel()), 1.5),
        ("8 bits, 8 row blocks", 8, Grid(RowBlocks(8)), 2.0),
        ("4 bits, groups of 32", 4, Grid(PerGroup(32)), None),
        ("8 bits asymmetric per channel", 8, Grid(PerChannel(), symmetric=False), None),
        ("8 bits stochastic per channel", 8, Grid(PerChannel(), stochastic=True), None),
        ("2 bits ternary per channel", 2, Grid(PerChannel()), None),
    ]
    report.detail("weights", count)
    for index, (name, bits, grid, goal) in enumerate(cases):
        batch = Batch([Job(weight, out, bits, grid) for weight, out in zip(weights, outs, strict=True)])
        runs: dict[str, Run] = {"copy": lambda: target.copy_(source), "moq_hf": batch.run}
        if index == 0:

            def eager(bits: int = bits, grid: Grid = grid) -> None:
                for weight, out in zip(weights, outs, strict=True):
                    quantizer.fake_quantize(weight, bits, grid, out=out)

            runs["eager PyTorch"] = eager
        medians = medians_of(runs, repeats, timer)
        medians["moq_hf, with its launch"] = interleaved({"one": batch.run}, repeats, timer.host)["one"]
        report.detail(name, medians)
        # A copy reads and writes 4 bytes each, a weight is 4 read and 2 written.
        floor = medians["copy"] * 6 / 8
        if index == 0:
            report.figure("bandwidth of a copy", 8 * count / medians["copy"] / 1e9, "GB/s", timed=True)
            report.figure("eager PyTorch over the floor", medians["eager PyTorch"] / floor, timed=True)
        what = f"{name}, {count / 1e6:.0f} M weights, float32 to bfloat16: time over the floor"
        report.figure(what, medians["moq_hf"] / floor, at_most=goal, timed=True)
        report.figure(f"{name}: the same with its launch", medians["moq_hf, with its launch"] / floor, timed=True)


def products(report: "Report") -> None:
    """Products with packed weights against bf16 of cuBLAS, and against unpacking before multiplying."""
    device = device_of(report)
    timer, repeats = Timer(device), 3 if report.small else 30
    shapes = [(32, 64)] if report.small else [(4096, 4096), (14336, 4096), (4096, 14336), (3072, 768)]
    slowest, differences = 1e9, []
    for (rows, columns), size, m in itertools.product(shapes, (None, 32 if report.small else 128), (1, 16, 256)):
        if size and rows != shapes[0][0]:
            continue
        torch.manual_seed(0)
        x = torch.randn(16 if report.small and m > 16 else m, columns, device=device, dtype=torch.bfloat16)
        weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02
        codes, scale, _ = quantizer.quantize(weight, 4, Grid(PerGroup(size) if size else PerChannel()))
        words = packing.pack(codes, 4)
        runs = product_runs(x, weight, words, scale)
        apart = (runs["packed"]().float() - runs["dequantized"]().float()).norm() / runs["dequantized"]().float().norm()
        differences.append(float(apart))
        medians = medians_of(runs, repeats, timer)
        medians["packed, with its launch"] = interleaved({"one": runs["packed"]}, repeats, timer.host)["one"]
        medians["bf16, with its launch"] = interleaved({"one": runs["bf16"]}, repeats, timer.host)["one"]
        grid = f"groups of {size}" if size else "per channel"
        name = f"{rows} x {columns}, {grid}, batch {m}"
        report.detail(name, {**medians, "relative_difference": float(apart)})
        # That of BERT fits into the cache many times over, and takes no longer than a launch.
        goal = 2.5 if m == 1 and rows * columns >= 2**24 else None
        report.figure(
            f"4 bits, {name}: times as fast as bf16",
            medians["bf16"] / medians["packed"],
            "x",
            at_least=goal,
            timed=True,
        )
        slowest = min(slowest, medians["dequantized"] / medians["packed"])
    # Of rounding to bfloat16. A maximum of tensors keeps NaN.
    farthest = float(torch.tensor(differences).max())
    report.figure("4 bits: relative difference from dequantizing first, the largest", farthest, at_most=0.01)
    report.figure("4 bits: times as fast as dequantizing first, the least", slowest, "x", at_least=1.0, timed=True)


def product_runs(x: Tensor, weight: Tensor, words: Tensor, scale: Tensor) -> dict[str, Run]:
    """The ways to multiply."""

    def dequantized() -> Tensor:
        codes = packing.unpack(words, 4, x.shape[-1])
        return F.linear(x, quantizer.dequantize(codes, scale, None, dtype=x.dtype))

    return {
        "bf16": lambda: F.linear(x, weight),
        "packed": lambda: packing.packed_linear(x, words, 4, scale),
        "dequantized": dequantized,
    }
