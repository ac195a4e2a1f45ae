"""The figures of a report, and of a plan."""

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MoQError
from ..plan import Plan
from ..schedule import FLOAT_BITS
from .run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
INK, FAINT, ACCENT, GRAY = "#22262b", "#c9ced4", "#2563c9", "#8a929b"
# The same on a dark ground.
DARK = {INK: "#e4e7eb", FAINT: "#454b53", ACCENT: "#7aa7f5", GRAY: "#9aa3ad"}
_DOTTED = "dotted: the precision falls, with the mean bits after it"


def draw_plan(planned: Plan, path: str | os.PathLike[str]) -> None:
    """Draw the bits of each block of a plan over the steps of the run, to a PNG or whatever the ending says.

    Raises:
        MoQError: matplotlib is not installed, or does not know the ending.
    """
    with drawing():
        figure, axes = _new_figure(3.4)
        start = FLOAT_BITS if planned.config.schedule.offset else planned.config.start_bits
        series = {
            block.name: ([s.step for s in block.switches], [float(s.bits) for s in block.switches])
            for block in planned.blocks
        }
        _draw_bits(axes, series, start, planned.config.start_bits, planned.total_steps, planned.deadline_step or 0)
        config = planned.config
        title = f"{config.start_bits} to {config.target_bits} bits in {planned.total_steps:,} optimizer steps"
        axes.set_title(title, fontsize="medium", pad=14)
        if planned.deadline_step is not None:
            axes.axvline(planned.deadline_step, color=GRAY, linestyle="--", linewidth=1)
            top = axes.get_xaxis_transform()
            axes.text(planned.deadline_step, 1.01, "deadline", transform=top, color=GRAY, fontsize="small", ha="center")
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except ValueError as error:
            raise MoQError(f"cannot draw to {os.fspath(path)}: {error}") from error


@contextmanager
def drawing() -> Iterator[None]:
    """Where figures are made and saved: matplotlib with the report's look."""
    try:
        import matplotlib
    except ImportError as error:
        raise MoQError("drawing needs matplotlib: pip install matplotlib") from error
    settings: dict[Any, Any] = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        # Names of blocks are no formulas.
        "text.parse_math": False,
        "font.size": 9.5,
        # Text stays text, and the same figure gives the same file.
        "svg.fonttype": "none",
        "svg.hashsalt": "moq_hf",
    }
    with matplotlib.rc_context(settings):
        yield


def _new_figure(height: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def figures_of(run: Run) -> dict[str, tuple["Figure", str]]:
    """Name to figure and caption, of what the run has data for."""
    figures = {}
    bits = run.by_block("bits")
    start = FLOAT_BITS if run.config.schedule.offset else run.config.start_bits
    if bits:
        figure, axes = _new_figure(_height(bits))
        end = _draw_bits(axes, bits, start, run.config.start_bits, run.steps)
        shown = f"; shown to step {end:,} of {run.steps:,}, nothing changes after it" if end < run.steps else ""
        figures["bits"] = figure, f"Bits of each block over optimizer steps{shown}. Lines are drawn side by side."

    eigenvalues = run.by_block("eigenvalue")
    if eigenvalues:
        figure, axes = _new_figure(_height(eigenvalues))
        for (name, (steps, values)), color in zip(eigenvalues.items(), _colors(len(bits)), strict=False):
            axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.4, label=name)
        axes.set_ylim(-0.03, 1.05)
        _finish(axes, eigenvalues, "eigenvalue over the largest")
        figures["eigenvalues"] = (
            figure,
            (
                "Eigenvalue of each block over the largest of all, where any block drops; where it stays as it is, the "
                "last measurement served again."
                if run.has_log
                else "Eigenvalue of each block over the largest of all, at the steps at which it dropped itself."
            ),
        )

    if run.has_log:
        figure, axes = _new_figure(3.0)
        for name, label, color in (("loss", "training", GRAY), ("eval_loss", "evaluation", ACCENT)):
            steps, values = run.series(name)
            if steps:
                marker = "o" if len(steps) < 3 else None
                axes.plot(steps, values, color=color, label=label, linewidth=1.6, marker=marker)
        _mark_switches(axes, run)
        _finish(axes, {}, "loss")
        figures["loss"] = figure, f"Loss over optimizer steps; {_DOTTED}."

    # Those of the page's table that were evaluated on the way too; the loss has its own figure.
    metrics = [name for name in run.quantized if name != "loss" and len(run.series(f"eval_{name}")[0]) > 1]
    if metrics:
        figure, axes = _new_figure(3.0)
        for name, color in zip(metrics, [ACCENT] if len(metrics) == 1 else _colors(len(metrics)), strict=True):
            axes.plot(*run.series(f"eval_{name}"), color=color, label=name, linewidth=1.6)
            steps, values = run.series(f"eval_{name}", in_float=True)
            if steps:
                axes.plot(steps, values, color=color, label=f"{name}, float", linewidth=1.2, linestyle="--")
        _mark_switches(axes, run)
        _finish(axes, {}, metrics[0] if len(metrics) == 1 else "metric")
        figures["metrics"] = (
            figure,
            f"Metrics of the evaluations on the way; {_DOTTED}.",
        )

    sizes = run.series("moq/size_mb")[1]
    if run.float_size_mb and sizes:
        figures["size"] = (
            _bars({"float": run.float_size_mb, "quantized": sizes[-1]}, "{:,.2f} MB"),
            "Size of the parameters before and after, quantized weights packed at their bits with a scale for each "
            "group, and all others as they are.",
        )
    both = {name: value for name, value in run.quantized.items() if name in run.in_float and name != "loss"}
    if both:
        pairs = {
            f"{name}, {kind}": of[name] for name in both for kind, of in (("float", run.in_float), ("quantized", both))
        }
        figures["comparison"] = _bars(pairs, "{:.4f}"), "The last evaluation in float and quantized."
    return figures


def _height(series: Mapping[str, Any]) -> float:
    return max(3.4, 0.6 + 0.19 * min(len(series), 30))


def _colors(count: int) -> list[str]:
    return [pair[0] for pair in palette(count)]


def palette(count: int) -> list[tuple[str, str]]:
    """Colors in an order that shows depth, each for a light and for a dark ground."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shares = [index / max(1, count - 1) for index in range(count)]
    scale = colormaps["viridis"]
    return [(to_hex(scale(0.05 + 0.72 * share)), to_hex(scale(0.38 + 0.6 * share))) for share in shares]


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
    for index, ((name, (steps, bits)), color) in enumerate(zip(series.items(), _colors(len(series)), strict=True)):
        shift = 0.4 * (index + 0.5) / len(series) - 0.2
        heights = [min(value, top) - shift for value in (start, *bits, bits[-1])]
        axes.step([0, *steps, max(total, steps[-1])], heights, where="post", color=color, label=name, linewidth=1.5)
    axes.set_xlim(0, end)
    labels = {bits: str(bits) for bits in range(low, start_bits + 1)} | ({top: "float"} if top > start_bits else {})
    axes.set_ylim(low - 0.6, top + 0.6)
    axes.set_yticks(list(labels), list(labels.values()))
    _finish(axes, series, "bits")
    return end


def _finish(axes: "Axes", series: Mapping[str, Any], ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.set_xlabel("optimizer steps")
    handles, names = axes.get_legend_handles_labels()
    if len(names) < 2 and not series:
        return
    # A model without a list of layers has a block for each linear layer.
    every = math.ceil(len(names) / 30)
    shared = 0
    while len({tuple(name.split(".")[: shared + 1]) for name in names}) == 1 and names[0].count(".") > shared + 1:
        shared += 1
    labels = [".".join(name.split(".")[shared:]) for name in names]
    axes.legend(
        handles[::every],
        labels[::every],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        fontsize="small",
    )


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


def _bars(values: Mapping[str, float], form: str) -> "Figure":
    figure, axes = _new_figure(0.5 + 0.36 * len(values))
    colors = [GRAY if "float" in name else ACCENT for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors, height=0.62)
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    return figure


def svg_of(figure: "Figure", blocks: int) -> str:
    """The figure as inline SVG whose colors follow the page's."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans', ", "system-ui, ")
    for index, color in enumerate([*DARK, *_colors(blocks)]):
        svg = svg.replace(color, f"var(--c{index})")
    return svg
