"""Sections of `gpu.py` for the kernel alone, which need neither transformers nor a config.

Times are the device's, medians, one run of each in turn, each of all weights of a model. Before each run other memory
is read, until the cache is full of it, and the device is kept busy for so long that the host has launched all of the
run: what the host needs is measured apart.
"""

import importlib.util
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from timing import encoder_weights, interleaved, seconds
from torch import Tensor

from moq_hf import quantizer, triton_launch, triton_quant
from moq_hf.grid import Grid, PerChannel, PerGroup, RowBlocks
from moq_hf.triton_quant import Job, Launcher

if TYPE_CHECKING:
    from gpu import Report

Run = Callable[[], Any]
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
GRIDS = [Grid(), Grid(symmetric=False), Grid(full=True), Grid(stochastic=True)]


def device_of(report: "Report") -> torch.device:
    """Where a section runs."""
    return torch.device("cpu") if report.small else torch.device("cuda", 0)


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
        # Read and not written: what is written would be on its way to memory during the run.
        self.buffer.view(torch.int32).max()
        # About ten milliseconds: eager PyTorch launches over a thousand kernels.
        torch.cuda._sleep(20_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def host(self, run: Run) -> float:
        """With the launch: from an idle device to an idle device."""
        self.wait()
        begin = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until the device is through."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def graphed(run: Run, device: torch.device) -> Run:
    """A run as a CUDA graph; as it is on a CPU, or where it cannot be captured."""
    if device.type == "cpu":
        return run
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        # What is compiled, or asks for memory, does so before.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0]}", flush=True)
        return run
    return graph.replay


def of_torchao(weights: list[Tensor]) -> Run:
    """Torchao's fake quantization of weights, 8 bits per channel, to bfloat16."""
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer

    quantize = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_channel"))
    return lambda: [quantize(weight).to(torch.bfloat16) for weight in weights]


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
    """Whether the kernel is used at all, by its own trial at first use."""
    heard = Heard()
    begin = time.perf_counter()
    weight = torch.randn(64, 768, device=device_of(report))
    same = torch.equal(triton_quant.fake_quantize(weight, 8), quantizer.fake_quantize(weight, 8))
    report.figure("the kernel is used", triton_launch.available(weight.device) and not heard.lines, equal=True)
    report.figure("it gives the numbers of plain PyTorch", same, equal=True)
    report.figure("first use, with the compiler", time.perf_counter() - begin, "s", timed=True)
    report.detail("warnings", heard.lines)


def differs(found: Tensor, expected: Tensor) -> bool:
    """Whether any number is another one; bits count, but of NaN and zero."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    same &= (found != 0) | (found.signbit() == expected.signbit())
    return not bool(same.all())


def cases_of(source: torch.dtype, small: bool) -> list[tuple[int, Grid]]:
    """Bit widths and grids that are compared; of other dtypes than float32 fewer kernels are compiled."""
    grids = GRIDS if source == torch.float32 else GRIDS[:2]
    cases = list(itertools.product((4,) if small else (3, 4, 8, 16), grids))
    return [*cases, (1, Grid()), (2, Grid())] if source == torch.float32 else cases


def bit_equality(report: "Report") -> None:
    """The kernel against the definition on the same device, and its results against those of the CPU."""
    device, heard = device_of(report), Heard()
    generator = torch.Generator().manual_seed(1)
    # A third of the larger one is taken in parts.
    shape = (6, 33) if report.small else (48, 3300)
    for source, result in DTYPES[:1] if report.small else DTYPES:
        jobs = []
        for bits, grid in cases_of(source, report.small):
            for grouping in (RowBlocks(3), PerChannel(), PerGroup(11)):
                precision = replace(grid, grouping=grouping).at(bits)
                weight = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()
                weight[0], weight[1, :3] = 0.0, torch.tensor([0.0, -0.0, 1e-42])
                blend = 0.3 if grid.stochastic else 0.0
                jobs.append(Job(weight.to(device, source), precision, blend=blend, dtype=result))
        filled = Launcher()(jobs)
        found, others, alone = [], [], []
        for job, values in zip(jobs, filled.values, strict=True):
            name = f"{job.precision.bits} bits, {job.precision.grid}"
            expected = quantizer.rounded(*job)[0]
            if values is None or differs(values, expected):
                found.append(name)
            elif differs(values.cpu(), quantizer.rounded(*job._replace(weight=job.weight.cpu()))[0]):
                others.append(name)
            # One weight has a kernel of its own.
            if job.precision.bits == 4 and differs(triton_quant.rounded(*job)[0], expected):
                alone.append(name)
        names = " to ".join(str(dtype)[6:] for dtype in (source, result))
        report.detail(f"wrong, {names}", found)
        report.detail(f"wrong alone, {names}", alone)
        report.detail(f"other than on a CPU, {names}", others)
        wrong = len({*found, *alone})
        report.figure(f"{names}: weights with other bits than the definition, of {len(jobs)}", wrong, equal=0)
        # Random numbers of stochastic rounding are those of a device.
        report.figure(f"{names}: weights with other bits than on a CPU, of {len(jobs)}", len(others))
    report.figure("launches that failed", len(heard.lines), equal=0)
    weight = torch.randn(24, 330, generator=generator)
    ratios = [quantizer.least_squares_ratio(w, 4, Grid(PerChannel())).cpu() for w in (weight, weight.to(device))]
    report.figure("clipping ratios are those of the CPU", torch.equal(*ratios), equal=True)


def decoder_weights(small: bool, device: torch.device) -> list[Tensor]:
    """Random weights shaped as the linear layers of Llama 3.2 1B."""
    width, layers = (32, 1) if small else (2048, 16)
    shapes = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(4 * width, width)] * 2 + [(width, 4 * width)]
    return [torch.randn(shape, device=device) * 0.02 for shape in shapes * layers]


# Name, bits, grid, and the time of a copy of as many bytes that is aimed at.
ENCODER = [
    ("8 bits per channel", 8, Grid(PerChannel()), 1.25),
    ("4 bits, groups of 32", 4, Grid(PerGroup(32)), None),
    ("8 bits, 8 row blocks", 8, Grid(RowBlocks(8)), None),
    ("8 bits asymmetric per channel", 8, Grid(PerChannel(), symmetric=False), None),
    ("8 bits stochastic per channel", 8, Grid(PerChannel(), stochastic=True), None),
    ("2 bits ternary per channel", 2, Grid(PerChannel()), 3.0),
]
DECODER = [("4 bits per channel", 4, Grid(PerChannel(), full=True), 1.1)]


def bandwidth(report: "Report") -> None:
    """A whole model's weights against the bytes that they take, at the bandwidth of a copy.

    Raises:
        RuntimeError: A run fails.
    """
    device = device_of(report)
    torch.manual_seed(0)
    weights = encoder_weights(*((32, 1) if report.small else (768, 12)), device)
    measure(report, weights, ENCODER, 3 if report.small else 50)
    del weights
    measure(report, decoder_weights(report.small, device), DECODER, 3 if report.small else 15)


def measure(
    report: "Report", weights: list[Tensor], cases: list[tuple[str, int, Grid, float | None]], repeats: int
) -> None:
    """Of one model's weights; those of the first case also by others.

    Raises:
        RuntimeError: A run fails.
    """
    device = weights[0].device
    count, timer = sum(weight.numel() for weight in weights), Timer(device)
    millions = f"{count / 1e6:.0f} M weights"
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    plain = torch.compile(quantizer.fake_quantize, backend="aot_eager" if report.small else "inductor")
    for name, bits, grid, goal in cases:
        launcher, precision = Launcher(), grid.at(bits)
        jobs = [Job(weight, precision, dtype=torch.bfloat16) for weight in weights]
        filled = launcher(jobs)
        if any(values is None for values in filled.values):
            raise RuntimeError(f"the kernel does not take {name}")

        def kernel(launcher: Launcher = launcher, jobs: list[Job] = jobs) -> None:
            launcher(jobs)

        def formula(fake_quantize: Any, bits: int = bits, grid: Grid = grid) -> None:
            for weight in weights:
                fake_quantize(weight, bits, grid, dtype=torch.bfloat16)

        runs: dict[str, Run] = {"copy": lambda: target.copy_(source)}
        if name == ENCODER[0][0]:
            runs["eager PyTorch"] = lambda formula=formula: formula(quantizer.fake_quantize)
            runs["torch.compile of the same"] = lambda formula=formula: formula(plain)
            if importlib.util.find_spec("torchao") is not None:
                runs["torchao"] = of_torchao(weights)
        # Those launch so much that the host would be too slow; the kernel's host is not.
        captured = {what: graphed(run, device) for what, run in runs.items()}
        medians = interleaved({**captured, "moq_hf": kernel}, repeats, timer)
        failed = [f"{run}: {value}" for run, value in medians.items() if isinstance(value, str)]
        report.detail(f"{name}, {millions}: not run", failed)
        if isinstance(medians["copy"], str) or isinstance(medians["moq_hf"], str):
            raise RuntimeError("; ".join(failed))
        host = interleaved({"one": kernel}, repeats, timer.host)["one"]
        report.detail(f"{name}, {millions}", {**medians, "moq_hf, from an idle device to an idle device": host})
        # A copy reads and writes 4 bytes each, a weight is 4 read and 2 written.
        floor = medians["copy"] * 6 / 8
        if name == ENCODER[0][0]:
            report.figure("bandwidth of a copy", 8 * count / medians["copy"] / 1e9, "GB/s", timed=True)
        for rival in [what for what in runs if what != "copy" and isinstance(medians[what], float)]:
            report.figure(f"{rival}: time over the floor", medians[rival] / floor, timed=True)
        what = f"{name}, {millions}, float32 to bfloat16: time over the floor"
        report.figure(what, medians["moq_hf"] / floor, at_most=goal, timed=True)
        report.figure(f"{name}, {millions}: microseconds from idle to idle", 1e6 * host, "us", timed=True)
