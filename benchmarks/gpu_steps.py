"""Sections of `gpu.py` for training steps: what moq_hf adds to a step in float, and torchao's QAT if it is installed.

Arms take turns, a step of each, under bfloat16 autocast with fused AdamW, and a ratio is that of medians.
"""

import gc
import importlib.metadata
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gpu_kernels import device_of
from gpu_training import Batch, bert, config, fits, llama, pairs, seconds_of, texts
from step_time import Arm, in_turn, installed, searched, torchao
from torch import Tensor

from moq_hf import MoQConfig
from moq_hf.grid import PerChannel, RowBlocks

if TYPE_CHECKING:
    from gpu import Report

Arms = dict[str, Arm]
Makers = dict[str, Callable[[], Arm]]
# Seconds that compiling an arm may take, with the steps that follow.
COMPILING = 30.0
FLOAT = "plain"
EIGHT, BLOCKS, TERNARY = "8 bits per channel", "8 bits, 8 row blocks", "2 bits, narrow"
STATIC, PER_TOKEN = "8 bits, int8 inputs static", "8 bits, int8 inputs per_token"


def rounded_inputs(scale: str) -> dict[str, Any]:
    """A config with inputs of 8 bits."""
    return {**config(8), "activation_quantization": {"enabled": True, "scale": scale}}


WAYS = {
    FLOAT: None,
    EIGHT: config(8),
    BLOCKS: config(8, groups=8),
    TERNARY: {**config(2), "quantize_algo": {"range": "narrow"}},
    STATIC: rounded_inputs("static"),
    PER_TOKEN: rounded_inputs("per_token"),
}
# A step over a plain one.
GOALS = {EIGHT: 1.0, BLOCKS: 1.0, TERNARY: 1.0, STATIC: 1.1, PER_TOKEN: 1.1}
COMPILED_GOALS = dict.fromkeys(GOALS, 1.05)


def makers(model: Any, ways: Mapping[str, dict[str, Any] | None], backend: str | None = None) -> Makers:
    """What makes the arm of each config."""
    configs = {label: None if way is None else MoQConfig.from_dict(way) for label, way in ways.items()}
    return {label: partial(Arm, model, each, torch.bfloat16, backend) for label, each in configs.items()}


def peers(model: Any, grids: Mapping[str, dict[str, Any]], backend: str | None = None) -> Makers:
    """What makes an arm of torchao's QAT with each grid, where it is installed."""
    if not installed("torchao"):
        return {}
    return {
        f"torchao, {label}": partial(Arm, model, None, torch.bfloat16, backend, partial(torchao, **grid))
        for label, grid in grids.items()
    }


def ready(report: "Report", name: str, made_by: Makers, batches: list[Batch], spare: float = 0.0) -> Arms:
    """Arms that have made a step, in which they are compiled; those that there is no time for are left out.

    Args:
        report: Where it is noted what was left out.
        name: Of the model.
        made_by: What makes them.
        batches: Of a step.
        spare: Seconds that must be left to begin with one.

    Raises:
        Exception: A step of moq_hf fails.
    """
    arms: Arms = {}
    for label, make in made_by.items():
        if report.left < spare:
            report.detail(f"{name}, {label}", "not run: time")
            continue
        try:
            arm = make()
            arm.step(batches)
        except Exception as error:
            # Others' packages fail in their own ways where they do not fit the machine.
            if not label.startswith("torchao"):
                raise
            report.detail(f"{name}, {label}", f"not run: {type(error).__name__}: {error}"[:500])
        else:
            arms[label] = arm
    return arms


def timed(report: "Report", name: str, arms: Arms, batches: list[Batch], goals: Mapping[str, float]) -> None:
    """Steps of all arms, one of each in turn, over the plain one; a goal includes the search for clipping ratios."""
    for arm in [*arms.values()] * (1 if report.small else 3):
        arm.step(batches)
    repeats = 2 if report.small else 30 if len(batches) == 1 else 12
    times = dict(zip(arms, in_turn([*arms.values()], batches, repeats), strict=True))
    medians = {label: statistics.median(each) for label, each in times.items()}
    base = medians[FLOAT]
    report.detail(f"{name}: {FLOAT}", times[FLOAT])
    report.figure(f"{name}: a plain step", 1000 * base, "ms", timed=True)
    for label, arm in arms.items():
        if label == FLOAT:
            continue
        report.detail(f"{name}, {label}", times[label])
        goal, controller = goals.get(label), arm.controller
        what = f"{name}, {label}: step over plain"
        if controller is None or all(layer.moq.ratio is None for layer in controller.layers.values()):
            report.figure(what, medians[label] / base, at_most=goal, timed=True)
            continue
        report.figure(what, medians[label] / base, timed=True)
        search = seconds_of(report, partial(searched, controller))
        report.detail(f"{name}, {label}: seconds of a search", search)
        what = f"{name}, {label}: the same with its share of the search for clipping ratios"
        share = search / controller.config.scale_refresh
        report.figure(what, (medians[label] + share) / base, at_most=goal, timed=True)


def steps(report: "Report") -> None:
    """BERT-base, as it is run by PyTorch."""
    model, batch = bert(report).to(device_of(report)), pairs(report, 32, 128)
    report.detail("torchao", importlib.metadata.version("torchao") if installed("torchao") else None)
    others = peers(model, {EIGHT: {}, PER_TOKEN: {"inputs": True}})
    name = "BERT-base, 32 x 128"
    arms = ready(report, name, makers(model, WAYS) | others, [batch])
    timed(report, name, arms, [batch], GOALS)
    few = {label: arms[label] for label in (FLOAT, EIGHT, f"torchao, {EIGHT}") if label in arms}
    timed(report, "BERT-base, 4 micro-batches", few, [batch] * 4, GOALS)
    both = {label: arms[label] for label in (FLOAT, EIGHT)}
    for rows in (8, 64):
        timed(report, f"BERT-base, {rows} x 128", both, [pairs(report, rows, 128)], GOALS)


def language_model(report: "Report") -> None:
    """A Llama of 1.24 billion weights."""
    name, groups = "Llama-1B, 4 x 1024", "4 bits, groups of 32"
    # Weights and AdamW's moments of three models in float32; gradients and activations of one.
    if not fits(report, name, 72):
        return
    ways = {FLOAT: None, "4 bits per channel": config(4), groups: config(4, group_size=32)}
    batches = [texts(report)]
    arms = ready(report, name, makers(llama(report), ways), batches)
    timed(report, name, arms, batches, dict.fromkeys(ways, 1.02))
    # Torchao's needs the room of both.
    plain = arms[FLOAT]
    del arms
    gc.collect()
    if not report.small:
        torch.cuda.empty_cache()
    others = ready(report, name, peers(plain.model, {groups: {"bits": 4, "group_size": 32}}), batches)
    if others:
        timed(report, f"{name}, once more", {FLOAT: plain, **others}, batches, {})


def compiled(report: "Report") -> None:
    """Four layers of BERT-base, compiled: the whole takes minutes to compile; see `whole`."""
    from torch._dynamo.utils import counters

    model, batches = bert(report, 4).to(device_of(report)), [pairs(report, 32, 128)]
    name, backend = "4 layers of BERT-base, compiled", backend_of(report)
    ways = {label: WAYS[label] for label in (FLOAT, EIGHT, STATIC, PER_TOKEN)}
    others = peers(model, {EIGHT: {}}, backend)
    arms = ready(report, name, makers(model, ways, backend) | others, batches, COMPILING)
    if EIGHT not in arms:
        report.figure("not measured, seconds left", report.left, "s")
        return
    timed(report, name, arms, batches, COMPILED_GOALS)
    graphs = counters["stats"]["unique_graphs"]
    for what, label, bits, grouping in (("codes", TERNARY, 2, PerChannel()), ("groups", BLOCKS, 8, RowBlocks(8))):
        requantize(arms[EIGHT], bits, grouping)
        both = {FLOAT: arms[FLOAT], label: arms[EIGHT]}
        timed(report, f"{name}, other {what} in the same graph", both, batches, COMPILED_GOALS)
    report.figure("graphs compiled for other grids", counters["stats"]["unique_graphs"] - graphs, equal=0)


def requantize(arm: Arm, bits: int, grouping: Any) -> None:
    """Train with narrow codes on another grid from now on."""
    assert arm.controller is not None
    for layer in arm.controller.layers.values():
        layer.moq.grid = replace(layer.moq.grid, grouping=grouping, full=False)
        layer.set_bits(bits)


def whole(report: "Report") -> None:
    """All of BERT-base, compiled, where the time allows."""
    least = 0 if report.small else 4 * COMPILING
    if report.left < least:
        report.figure(f"not measured, compiling takes {least:.0f} s; left", report.left, "s")
        return
    model, batches = bert(report).to(device_of(report)), [pairs(report, 32, 128)]
    name, ways = "BERT-base, compiled", {label: WAYS[label] for label in (FLOAT, EIGHT)}
    timed(report, name, ready(report, name, makers(model, ways, backend_of(report)), batches), batches, COMPILED_GOALS)


def memory(report: "Report") -> None:
    """Of a step of a Llama of 1.24 billion weights: quantized copies are added at its peak, and gone between steps."""
    for dtype, gigabytes, goal in ((torch.bfloat16, 40, 2), (None, 60, 4)):
        name = "" if dtype else "float32: "
        if not fits(report, f"{name}memory", gigabytes):
            continue
        plain = used(report, dtype)
        moq = used(report, dtype, MoQConfig.from_dict(config(8)))
        report.detail(f"{name}bytes", {FLOAT: plain._asdict(), EIGHT: moq._asdict()})
        report.figure(f"{name}quantized weights", moq.weights)
        # What finds a layer in a launch and in a graph takes 16 bytes, which small weights feel.
        report.figure(
            f"{name}held beside it above plain, bytes a quantized weight (predicted: 0)",
            (moq.held - plain.held) / moq.weights,
            at_most=0.02 if report.small else 0.01,
        )
        if report.small:
            continue
        report.figure(f"{name}peak of a plain step", plain.peak / 1e9, "GB")
        above = (moq.peak - plain.peak) / moq.weights
        report.figure(f"{name}peak above plain, bytes a quantized weight", above, at_most=goal)
        if dtype and installed("torchao"):
            try:
                above = (used(report, dtype, prepare=torchao).peak - plain.peak) / moq.weights
            except Exception as error:
                report.detail("torchao", f"not run: {type(error).__name__}: {error}"[:500])
            else:
                report.figure("torchao: peak above plain, bytes a quantized weight", above)


class Used(NamedTuple):
    """Bytes between steps and at the peak of one, and how many weights are quantized."""

    held: int
    peak: int
    weights: int


def used(report: "Report", dtype: torch.dtype | None, moq: MoQConfig | None = None, prepare: Any = None) -> Used:
    """Memory of the second step."""
    gc.collect()
    before = 0 if report.small else torch.cuda.memory_allocated()
    arm = Arm(llama(report), moq, dtype, prepare=prepare)
    batch, peak = texts(report), 0
    arm.step([batch])
    gc.collect()
    if report.small:
        arm.step([batch])
        after = held()
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        arm.step([batch])
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    layers = {} if arm.controller is None else arm.controller.layers
    return Used(after - before, peak - before, sum(layer.float_weight.numel() for layer in layers.values()))


def held() -> int:
    """Bytes of the memory of all tensors alive."""
    with warnings.catch_warnings():
        # Names of PyTorch that are looked at here too.
        warnings.simplefilter("ignore", FutureWarning)
        storages = [found.untyped_storage() for found in gc.get_objects() if isinstance(found, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def backend_of(report: "Report") -> str:
    """Of torch.compile."""
    return "aot_eager" if report.small else "inductor"
