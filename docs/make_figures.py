"""Draws the figures of the documentation from moq_hf's own schedule.

    python docs/make_figures.py [--out DIR]

`--out` is where the figures go; by default `img` beside this file.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from moq_hf import MoQConfig, PrecisionSchedule

PERIOD, START_BITS, TARGET_BITS = 10, 12, 8
# Share of the largest eigenvalue, and the factor that comes of it: 1 + floor(4 * share).
SHARES = {0.0: 1, 0.25: 2, 1.0: 5}
STEPS = 20_000


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


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img", help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_schedule(out / "schedule.png")


if __name__ == "__main__":
    main()
