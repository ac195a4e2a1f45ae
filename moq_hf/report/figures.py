"""The figures of a report, and of a plan."""

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import MoQConfig
from ..errors import MoQError
from ..plan import Plan
from ..schedule import FLOAT_BITS, begins_in_float
from .look import ACCENT, GRAY, bars, colors_of, drawing, finish, new_figure
from .run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_DOTTED = "dotted: the precision falls, with the mean bits after it"
# A figure and its caption.
_Captioned = tuple["Figure", str]


def draw_plan(planned: Plan, path: str | os.PathLike[str]) -> None:
    """Draw the bits of each block of a plan over the steps of the run, to a PNG or whatever the ending says.

    Raises:
        MoQError: matplotlib is not installed, or does not know the ending.
    """
    with drawing():
        figure, axes = new_figure(3.4)
        start = FLOAT_BITS if begins_in_float(planned.config) else planned.config.start_bits
        series = {
            block.name: ([s.step for s in block.switches], [float(s.bits) for s in block.switches])
            for block in planned.blocks
        }
        _draw_bits(axes, series, start, _highest(planned.config), planned.total_steps, planned.deadline_step or 0)
        config = planned.config
        title = f"{config.span_in_words} in {planned.total_steps:,} optimizer steps"
        axes.set_title(title, fontsize="medium", pad=14)
        if planned.deadline_step is not None:
            axes.axvline(planned.deadline_step, color=GRAY, linestyle="--", linewidth=1)
            top = axes.get_xaxis_transform()
            axes.text(planned.deadline_step, 1.01, "deadline", transform=top, color=GRAY, fontsize="small", ha="center")
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except ValueError as error:
            raise MoQError(f"cannot draw to {os.fspath(path)}: {error}") from error


def figures_of(run: Run) -> dict[str, _Captioned]:
    """Name to figure and caption, of what the run has data for; inside `drawing`."""
    drawn = {
        "bits": _bits(run),
        "eigenvalues": _eigenvalues(run),
        "loss": _loss(run),
        "metrics": _metrics(run),
        "size": _size(run),
        "comparison": _comparison(run),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _bits(run: Run) -> _Captioned | None:
    bits = run.by_block("bits")
    if not bits:
        return None
    figure, axes = new_figure(_height(bits))
    start = FLOAT_BITS if begins_in_float(run.config) else run.config.start_bits
    end = _draw_bits(axes, bits, start, _highest(run.config), run.steps)
    shown = f"; shown to step {end:,} of {run.steps:,}, nothing changes after it" if end < run.steps else ""
    return figure, f"Bits of each block over optimizer steps{shown}. Lines are drawn side by side."


def _highest(config: MoQConfig) -> int:
    """The most bits that a block has once it is quantized."""
    return max(config.start_bits, config.targets[-1])


def _eigenvalues(run: Run) -> _Captioned | None:
    eigenvalues = run.by_block("eigenvalue")
    if not eigenvalues:
        return None
    figure, axes = new_figure(_height(eigenvalues))
    # The colors that the blocks have in the figure of the bits.
    colors = colors_of(len(run.by_block("bits")))
    for (name, (steps, values)), color in zip(eigenvalues.items(), colors, strict=False):
        axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.4, label=name)
    axes.set_ylim(-0.03, 1.05)
    finish(axes, "eigenvalue over the largest", legend=True)
    if not run.has_log:
        return figure, "Eigenvalue of each block over the largest of all, at the steps at which it dropped itself."
    return figure, (
        "Eigenvalue of each block over the largest of all, where any block drops; where it stays as it is, the last "
        "measurement served again."
    )


def _loss(run: Run) -> _Captioned | None:
    if not run.has_log:
        return None
    figure, axes = new_figure(3.0)
    for name, label, color in (("loss", "training", GRAY), ("eval_loss", "evaluation", ACCENT)):
        steps, values = run.series(name)
        if steps:
            marker = "o" if len(steps) < 3 else None
            axes.plot(steps, values, color=color, label=label, linewidth=1.6, marker=marker)
    _mark_switches(axes, run)
    finish(axes, "loss")
    taught = any(name.startswith("float_eval_") for entry in run.log for name in entry)
    more = " After the float phase the training loss has the teacher's parts too." if taught else ""
    return figure, f"Loss over optimizer steps; {_DOTTED}.{more}"


def _metrics(run: Run) -> _Captioned | None:
    # Those of the page's table that were evaluated on the way too; the loss has its own figure.
    metrics = [name for name in run.quantized if name != "loss" and len(run.series(f"eval_{name}")[0]) > 1]
    if not metrics:
        return None
    figure, axes = new_figure(3.0)
    for name, color in zip(metrics, [ACCENT] if len(metrics) == 1 else colors_of(len(metrics)), strict=True):
        axes.plot(*run.series(f"eval_{name}"), color=color, label=name, linewidth=1.6)
        steps, values = run.series(f"eval_{name}", in_float=True)
        if steps:
            axes.plot(steps, values, color=color, label=f"{name}, float", linewidth=1.2, linestyle="--")
    _mark_switches(axes, run)
    finish(axes, metrics[0] if len(metrics) == 1 else "metric")
    return figure, f"Metrics of the evaluations on the way; {_DOTTED}."


def _size(run: Run) -> _Captioned | None:
    sizes = run.series("moq/size_mb")[1]
    if not run.float_size_mb or not sizes:
        return None
    return bars({"float": run.float_size_mb, "quantized": sizes[-1]}, "{:,.2f} MB"), (
        "Size of the parameters before and after, quantized weights packed at their bits with a scale for each group, "
        "and all others as they are."
    )


def _comparison(run: Run) -> _Captioned | None:
    both = {name: value for name, value in run.quantized.items() if name in run.in_float and name != "loss"}
    if not both:
        return None
    kinds = {"float": run.in_float, "quantized": both}
    pairs = {f"{name}, {kind}": values[name] for name in both for kind, values in kinds.items()}
    return bars(pairs, "{:.4f}"), "The last evaluation in float and quantized."


def _height(series: Mapping[str, Any]) -> float:
    return max(3.4, 0.6 + 0.19 * min(len(series), 30))


def _draw_bits(
    axes: "Axes",
    series: Mapping[str, tuple[list[int], list[float]]],
    start: int,
    start_bits: int,
    total: int,
    least: int = 0,
) -> int:
    """One line a block, side by side where they would cover each other; gives the last step that is shown."""
    changes = [
        step
        for steps, bits in series.values()
        for step, before, now in zip(steps, [float(start), *bits], bits, strict=False)
        if before != now and step <= total
    ]
    last = max([least, *changes])
    end = total if 3 * last > total else max(1, math.ceil(1.25 * last))
    low, top = int(min(b for _, bits in series.values() for b in bits)), start_bits + (start == FLOAT_BITS)
    for index, ((name, (steps, bits)), color) in enumerate(zip(series.items(), colors_of(len(series)), strict=True)):
        shift = 0.4 * (index + 0.5) / len(series) - 0.2
        heights = [min(value, top) - shift for value in (start, *bits, bits[-1])]
        axes.step([0, *steps, max(total, steps[-1])], heights, where="post", color=color, label=name, linewidth=1.5)
    axes.set_xlim(0, end)
    labels = {bits: str(bits) for bits in range(low, start_bits + 1)} | ({top: "float"} if top > start_bits else {})
    axes.set_ylim(low - 0.6, top + 0.6)
    axes.set_yticks(list(labels), list(labels.values()))
    finish(axes, "bits", legend=True)
    return end


def _mark_switches(axes: "Axes", run: Run) -> None:
    """A dotted line at each drop, with the mean bits after it where there is room for them."""
    mean = dict(zip(*run.mean_bits(), strict=True))
    written = math.inf
    steps = run.switches()
    if len(steps) > 12:
        # Blocks that drop one by one would be a hatching: the first step at or below each whole number of mean bits.
        steps = sorted({math.ceil(mean[step]): step for step in reversed(steps) if step in mean}.values())
    # From the last one: it is the target that matters where they stand close.
    for step in reversed(steps):
        axes.axvline(step, color=GRAY, linestyle=":", linewidth=0.9)
        if step in mean and written - step > 0.035 * run.steps:
            written = step
            top = axes.get_xaxis_transform()
            axes.text(
                step, 1.01, f"{round(mean[step], 1):g}", transform=top, color=GRAY, fontsize="x-small", ha="center"
            )
    axes.set_xlim(0, run.steps)
