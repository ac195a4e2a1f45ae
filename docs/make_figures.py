"""Draws the figures of the documentation from moq_hf's own schedule and the committed measurements.

    python docs/make_figures.py [--out DIR]

`--out` is where the figures go; by default `img` beside this file.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from moq_hf import MoQConfig, PrecisionSchedule

PERIOD, START_BITS, TARGET_BITS = 10, 12, 8
# Share of the largest eigenvalue, and the factor that comes of it: 1 + floor(4 * share).
SHARES = {0.0: 1, 0.25: 2, 1.0: 5}
STEPS = 20_000
EIGEN = Path(__file__).parents[1] / "benchmarks" / "results" / "eigen.json"


def trajectory(share: float) -> tuple[list[int], list[int]]:
    """Give the steps at which a block changes, the first and the last step included, and its bits from each on."""
    config = MoQConfig.from_dict(
        {
            "quantize_bits": {"start_bits": START_BITS, "target_bits": TARGET_BITS},
            "quantize_schedule": {"quantize_period": PERIOD, "schedule_offset": 0},
        }
    )
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
    axes.set_title(f"{START_BITS} to {TARGET_BITS} bits, quantize_period {PERIOD}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    # Without the name of the library that wrote it, the file depends on what is drawn alone.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def draw_eigenvalues(path: Path) -> None:
    """Draw the normalised eigenvalues of each block and their spread over draws of data, as they were measured."""
    table = json.loads(EIGEN.read_text(encoding="utf-8"))["stability"]["results"]
    steps = sorted({row["step"] for row in table})
    figure, panels = plt.subplots(1, len(steps), figsize=(9, 3), sharey=True, layout="constrained")
    for axes, step in zip(panels, steps, strict=True):
        rows = [row for row in table if row["step"] == step]
        ours = max((row for row in rows if row["method"] == "lanczos"), key=lambda row: row["num_samples"])
        published = next(row for row in rows if row["method"] == "power")
        for row, shift, label in ((published, -0.15, "power iteration"), (ours, 0.15, "moq_hf")):
            places = [block + shift for block in range(len(row["mean_values"]))]
            label = f"{label}, {row['num_samples']} examples"
            axes.errorbar(places, row["mean_values"], row["standard_deviation"], fmt="o", capsize=3, label=label)
        for threshold in (0.25, 0.5, 0.75):
            axes.axhline(threshold, linewidth=0.6, linestyle=":", color="gray")
        axes.set_title(f"training step {step}", fontsize="medium")
        axes.set_xlabel("block")
    panels[0].set_ylim(0, 1.1)
    panels[0].set_ylabel("eigenvalue over the largest")
    panels[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img", help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_schedule(out / "schedule.png")
    draw_eigenvalues(out / "eigenvalues.png")


if __name__ == "__main__":
    main()
