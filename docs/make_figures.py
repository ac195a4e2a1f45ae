"""Draws the figures of the documentation, from the committed measurements.

    python docs/make_figures.py [--out DIR]

`--out` is where the figures go; by default `img` beside this file. Page one's is drawn twice, for light and dark pages.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from moq_hf import MoQConfig, PrecisionSchedule

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import results_page  # noqa: E402

PERIOD, START_BITS, TARGET_BITS = 10, 12, 8
# Share of the largest eigenvalue, and the factor that comes of it: 1 + floor(4 * share).
SHARES = {0.0: 1, 0.25: 2, 1.0: 5}
STEPS = 20_000
# Page one's arms, by what the page of recipes calls them.
ARMS = {
    "rounded after training, groups of 32": "rounding, groups of 32",
    "basic QAT": "basic QAT",
    "moq_hf, float first": "moq_hf",
}
BITS = (4, 3, 2)
# Colors of text and of lines, by what the background adds to a file's name.
INK = {"": "#1f2328", "-dark": "#e6edf3"}
LINES = {"": ("#1f6feb", "#bc4c00", "#1a7f37"), "-dark": ("#58a6ff", "#f0883e", "#3fb950")}
FAINT = "#848d97"
# Rows of page one that are drawn, and what stands beside them.
FORMS = {
    "weights and inputs (activations) of 8 bits, static, symmetric": "8-bit weights, 8-bit inputs,\nsymmetric: rounded",
    "the same with a zero point: `w8a8`": "trained; with a zero point: rounded",
    "weights of 2 bits, groups of 32": "2-bit weights: rounded",
}
BASE_MODEL = "all-mpnet-base-v2"


def trajectory(share: float) -> tuple[list[int], list[int]]:
    """Give the steps at which a block changes, the first and the last step included, and its bits from each on."""
    config = MoQConfig(bits=TARGET_BITS, start_bits=START_BITS, period=PERIOD)
    schedule = PrecisionSchedule(config, ["block"])
    steps, bits = [1], [START_BITS]
    for _ in range(STEPS):
        for switch in schedule.advance({"block": share}):
            steps.append(switch.step)
            bits.append(switch.bits)
    return [*steps, STEPS], [*bits, schedule.bits["block"]]


def draw_schedule(axes: Axes) -> None:
    """Draw bits over optimizer steps for three factors."""
    for (share, factor), style in zip(SHARES.items(), ("-", "--", ":"), strict=True):
        axes.step(*trajectory(share), where="post", linestyle=style, linewidth=2, label=f"factor {factor}")
    axes.set_xscale("log")
    axes.set_xlim(1, STEPS)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks(range(TARGET_BITS, START_BITS + 1))
    axes.set_xlabel("optimizer steps since the offset")
    axes.set_ylabel("bits")
    axes.set_title(f"{START_BITS} to {TARGET_BITS} bits, period {PERIOD}")
    axes.legend()


def draw_scores(axes: Axes) -> None:
    """Draw page one's plot: points against float over bits, a line for each way, the spread of seeds."""
    axes.axhline(0, linewidth=1, linestyle="--", color=FAINT)
    axes.annotate("float of as many steps", (2.52, 0), ha="center", va="bottom", fontsize="small", color=FAINT)
    for index, (name, marker) in enumerate(zip(ARMS, "svo", strict=True)):
        own = [results_page.points(ARMS[name], bits).values() for bits in BITS]
        means = [statistics.fmean(values) for values in own]
        below = [m - min(values) for m, values in zip(means, own, strict=True)]
        above = [max(values) - m for m, values in zip(means, own, strict=True)]
        places = [bits + 0.04 * (index - 1) for bits in BITS]
        width = 2 if index == 2 else 1
        axes.errorbar(places, means, [below, above], marker=marker, capsize=3, label=name, linewidth=width)
    axes.set_xticks(BITS, [f"{bits} bits" for bits in BITS])
    axes.set_xlim(4.3, 1.7)
    axes.set_ylabel("points, mean of three tasks")
    axes.set_title("MiniLM on SST-2, CoLA and MRPC; bars from the worst seed to the best")
    axes.legend(loc="lower left")


Way = dict[int, float]


def gains() -> dict[str, tuple[Way, Way, Way]]:
    """Give each form's points against float by seed: rounded, by GPTQ and trained, as page one's table has them."""
    found = {}
    for name in FORMS:
        form, *_ = results_page.FIRST_PAGE[name]
        floats, *ways = results_page.first_page_scores(form)
        rounded, gptq, trained = ({seed: way[seed] - floats[seed] for seed in way} for way in ways)
        found[name] = rounded, gptq, trained
    return found


def draw_gains(axes: Axes) -> None:
    """Draw points against float over the size of the folder: rounded, by GPTQ, and an arrow to the trained model."""
    bytes_of = results_page.document("sizes")["models"][BASE_MODEL]
    places = [bytes_of["float"] / 1e6]
    axes.axhline(0, linewidth=1, linestyle="--", color=FAINT)
    axes.plot(places[0], 0, marker="s", markersize=8, color=FAINT)
    axes.annotate("float", (places[0], 0), (0, -8), textcoords="offset points", ha="center", va="top")
    first, second, *_ = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for (name, (rounded, gptq, trained)), color in zip(gains().items(), (first, first, second), strict=True):
        _, size, _ = results_page.FIRST_PAGE[name]
        place = bytes_of["forms"][size] / 1e6
        places.append(place)
        low = results_page.mean(rounded)
        shown = [(rounded, "o", "none"), (gptq, "D", "none"), (trained, "o", color)]
        for own, marker, face in shown:
            if own:
                height = results_page.mean(own)
                axes.plot(place, height, marker, markersize=9, markeredgewidth=2, color=color, markerfacecolor=face)
        for own in (rounded, trained):
            axes.plot([place] * len(own), [*own.values()], marker="_", markersize=14, linestyle="", color=color)
        if trained:
            start = results_page.mean(gptq or rounded)
            arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 6, "shrinkB": 6}
            axes.annotate("", (place, results_page.mean(trained)), (place, start), arrowprops=arrow)
        beside = {"textcoords": "offset points", "va": "center", "fontsize": "small", "color": color}
        label = FORMS[name] if trained else f"{FORMS[name]}, {low:+.1f}"
        axes.annotate(label, (place, low), (11, -9 if low > -1 else 0), **beside)
        if gptq:
            axes.annotate("GPTQ", (place, results_page.mean(gptq)), (11, -4), **beside)
    for name, face in (("rounded", "none"), ("trained", FAINT)):
        axes.plot([], [], marker="o", markeredgewidth=2, linestyle="", color=FAINT, markerfacecolor=face, label=name)
    axes.plot([], [], marker="D", markersize=7, linestyle="", color=FAINT, markerfacecolor="none", label="GPTQ")
    axes.plot([], [], marker="_", markersize=14, linestyle="", color=FAINT, label="each seed")
    axes.set_xscale("log")
    axes.margins(y=0.1)
    ticks = {f"{place:.0f} MB": place for place in places}
    axes.set_xticks([*ticks.values()], [*ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size of the delivered folder")
    axes.set_ylabel("points against float")
    axes.set_title("MPNet, a model of BERT-base's size, on STS-B: means of seeds")
    axes.legend(loc="lower right")


# The name of a figure: its size in inches, and what draws it.
FIGURES: dict[str, tuple[tuple[float, float], Callable[[Axes], None]]] = {
    "schedule": ((7, 3.2), draw_schedule),
    "score-over-bits": ((7, 3.4), draw_scores),
    "gains": ((7, 3.4), draw_gains),
}


PAGE_ONE = "gains"


def look(background: str) -> Any:
    """Give matplotlib's settings for a figure on a background that is the page's own."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, INK[background]),
        "axes.prop_cycle": cycler(color=LINES[background]),
        "axes.grid": True,
        "axes.titlesize": "medium",
        "font.size": 11,
        "grid.alpha": 0.3,
        "grid.color": FAINT,
        "legend.fontsize": "small",
        "legend.framealpha": 0,
        "savefig.transparent": background == "-dark",
    }


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img", help="folder to write to")
    args = parser.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    for name, (size, draw) in FIGURES.items():
        for background in INK if name == PAGE_ONE else ("",):
            with plt.rc_context(look(background)):
                figure, axes = plt.subplots(figsize=size, layout="constrained")
                draw(axes)
                # Without the name of the library that wrote it, the file depends on what is drawn alone.
                figure.savefig(out / f"{name}{background}.png", dpi=160, metadata={"Software": None})
                plt.close(figure)


if __name__ == "__main__":
    main()
