"""Draws the figures of the documentation, from the committed measurements.

    python docs/make_figures.py [--out DIR]

`--out` is where the figures go; by default `img` beside this file.
"""

import argparse
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

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


def draw_schedule(path: Path) -> None:
    """Draw bits over optimizer steps for three factors."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for (share, factor), style in zip(SHARES.items(), ("-", "--", ":"), strict=True):
        axes.step(*trajectory(share), where="post", linestyle=style, linewidth=2, label=f"factor {factor}")
    axes.set_xscale("log")
    axes.set_xlim(1, STEPS)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks(range(TARGET_BITS, START_BITS + 1))
    axes.set_xlabel("optimizer steps since the offset")
    axes.set_ylabel("bits")
    axes.set_title(f"{START_BITS} to {TARGET_BITS} bits, period {PERIOD}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    # Without the name of the library that wrote it, the file depends on what is drawn alone.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def draw_scores(path: Path) -> None:
    """Draw page one's plot: points against float over bits, a line for each way, the spread of seeds."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    axes.axhline(0, linewidth=1, linestyle="--", color="gray")
    axes.annotate("float of as many steps", (2.52, 0), ha="center", va="bottom", fontsize="small", color="gray")
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
    axes.set_title("MiniLM on SST-2, CoLA and MRPC; bars from the worst seed to the best", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img", help="folder to write to")
    args = parser.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    draw_schedule(out / "schedule.png")
    draw_scores(out / "score-over-bits.png")


if __name__ == "__main__":
    main()
