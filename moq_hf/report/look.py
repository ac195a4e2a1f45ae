"""The look of the figures: matplotlib's settings, colors for light and dark pages, axes, legends and SVG."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MoQError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
INK, FAINT, ACCENT, GRAY = "#22262b", "#c9ced4", "#2563c9", "#8a929b"
# The same on a dark ground.
DARK = {INK: "#e4e7eb", FAINT: "#454b53", ACCENT: "#7aa7f5", GRAY: "#9aa3ad"}


@contextmanager
def drawing() -> Iterator[None]:
    """Where figures are made and saved: matplotlib with the report's look.

    Raises:
        MoQError: matplotlib is not installed.
    """
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
        # Names of blocks are not formulas.
        "text.parse_math": False,
        "font.size": 9.5,
        # Text stays text, and the same figure gives the same file.
        "svg.fonttype": "none",
        "svg.hashsalt": "moq_hf",
    }
    with matplotlib.rc_context(settings):
        yield


def new_figure(height: float) -> tuple["Figure", "Axes"]:
    """A figure of 8 inches by `height`, and its axes over the steps of a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def colors_of(count: int) -> list[str]:
    """Colors in an order that shows depth, on a light ground."""
    return [pair[0] for pair in palette(count)]


def palette(count: int) -> list[tuple[str, str]]:
    """Colors in an order that shows depth, each for a light and for a dark ground."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shares = [index / max(1, count - 1) for index in range(count)]
    scale = colormaps["viridis"]
    return [(to_hex(scale(0.05 + 0.72 * share)), to_hex(scale(0.38 + 0.6 * share))) for share in shares]


def finish(axes: "Axes", ylabel: str, legend: bool = False) -> None:
    """Label the axes; a legend where there are several lines, or where `legend` is true."""
    axes.set_ylabel(ylabel)
    axes.set_xlabel("optimizer steps")
    handles, names = axes.get_legend_handles_labels()
    if len(names) < 2 and not legend:
        return
    # A model without a list of layers has a block for each linear layer.
    every = math.ceil(len(names) / 30)
    axes.legend(
        handles[::every],
        without_shared_start(names)[::every],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        fontsize="small",
    )


def without_shared_start(names: Sequence[str]) -> list[str]:
    """Dotted names without the parts in which all begin alike; two parts are kept at least.

    >>> without_shared_start(["bert.encoder.layer.0", "bert.encoder.layer.1"])
    ['layer.0', 'layer.1']
    """
    parts = [name.split(".") for name in names]
    shared = 0
    while len({tuple(each[: shared + 1]) for each in parts}) == 1 and len(parts[0]) > shared + 2:
        shared += 1
    return [".".join(each[shared:]) for each in parts]


def bars(values: Mapping[str, float], form: str) -> "Figure":
    """A horizontal bar for each value, with the value written as `form` has it."""
    figure, axes = new_figure(0.5 + 0.36 * len(values))
    colors = [GRAY if "float" in name else ACCENT for name in values]
    drawn = axes.barh(list(values), list(values.values()), color=colors, height=0.62)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=4)
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
    for index, color in enumerate([*DARK, *colors_of(blocks)]):
        svg = svg.replace(color, f"var(--c{index})")
    return svg
