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
# Forms of a model of BERT-base's size, by what the page of rounded inputs calls them: the name of the folder's size in
# `sizes.json`, and what stands beside the arrow.
FORMS = {
    "8 bits; 8, static symmetric": ("w8a8", "8-bit weights,\n8-bit symmetric inputs"),
    "2 bits, groups of 32": ("2 bits, groups of 32", "2-bit weights"),
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


def gains() -> tuple[dict[int, float], dict[str, tuple[dict[int, float], ...]]]:
    """Give the scores of float, and of each form those of the rounded model, of GPTQ's and of the trained one, by seed.

    As page one's table has them: of the seeds that all rows have.
    """
    found = {form: results_page.first_page_scores(form) for form in FORMS}
    floats = next(iter(found.values()))[0]
    return floats, {form: (rounded, gptq, trained) for form, (_, rounded, gptq, trained) in found.items()}


def draw_gains(axes: Axes) -> None:
    """Draw the score over the size of the delivered folder, an arrow from the rounded model to the trained one."""
    bytes_of = results_page.document("sizes")["models"][BASE_MODEL]
    floats, ways = gains()
    places = {"float": bytes_of["float"] / 1e6}
    best = results_page.mean(floats)
    axes.axhline(best, linewidth=1, linestyle="--", color=FAINT)
    axes.plot(places["float"], best, marker="s", markersize=8, color=FAINT)
    axes.annotate("float", (places["float"], best), (-10, -5), textcoords="offset points", ha="right", va="top")
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for (form, (rounded, gptq, trained)), color in zip(ways.items(), colors, strict=False):
        size, label = FORMS[form]
        place = places[size] = bytes_of["forms"][size] / 1e6
        low, high = (results_page.mean(own) for own in (rounded, trained))
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 6, "shrinkB": 6}
        axes.annotate("", (place, high), (place, low), arrowprops=arrow)
        if gptq:
            axes.plot(place, results_page.mean(gptq), marker="D", markersize=7, color=color, markerfacecolor="none")
        for height, own, face in ((low, rounded, "none"), (high, trained, color)):
            axes.plot(place, height, marker="o", markersize=9, markeredgewidth=2, color=color, markerfacecolor=face)
            if len(own) > 1:
                axes.plot([place] * len(own), [*own.values()], marker="_", markersize=14, linestyle="", color=color)
        axes.annotate(
            label,
            (place, low),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
            color=color,
        )
    for name, face in (("rounded", "none"), ("trained", FAINT)):
        axes.plot([], [], marker="o", markeredgewidth=2, linestyle="", color=FAINT, markerfacecolor=face, label=name)
    axes.plot([], [], marker="D", markersize=7, linestyle="", color=FAINT, markerfacecolor="none", label="GPTQ")
    axes.plot([], [], marker="_", markersize=14, linestyle="", color=FAINT, label="each seed")
    axes.set_xscale("log")
    axes.margins(y=0.1)
    axes.set_xticks([*places.values()], [f"{place:.0f} MB" for place in places.values()])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size of the delivered folder")
    axes.set_ylabel("Spearman x 100")
    seeds = "one seed" if len(floats) == 1 else f"means of {len(floats)} seeds"
    axes.set_title(f"A model of BERT-base's size on STS-B, {seeds}")
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
