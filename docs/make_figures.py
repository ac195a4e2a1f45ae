"""Draws the figures of the documentation, and writes page one's table, from the committed measurements.

    python docs/make_figures.py [--out DIR] [--table]

`--out` is where the figures go; by default `img` beside this file. `--table` prints the table instead.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from moq_hf import MoQConfig, PrecisionSchedule

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report_study  # noqa: E402

PERIOD, START_BITS, TARGET_BITS = 10, 12, 8
# Share of the largest eigenvalue, and the factor that comes of it: 1 + floor(4 * share).
SHARES = {0.0: 1, 0.25: 2, 1.0: 5}
STEPS = 20_000
RESULTS = ROOT / "benchmarks" / "results"
# Page one's arms, by what the study calls them: arm, scales.
ARMS = {
    "rounded after training": ("after training", "groups of 32, full"),
    "basic QAT": ("basic QAT, all steps", "per channel, full"),
    "moq_hf, float first": ("basic QAT, float first", "per channel, full"),
}
BITS = (4, 3, 2)


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


def scores() -> tuple[dict[int, float], dict[tuple[str, int], report_study.Row]]:
    """Give the mean of three tasks by seed, of float and of each arm of page one at each of its bits."""
    text = (RESULTS / "glue_study.jsonl").read_text(encoding="utf-8")
    found = report_study.rows("recipes", [json.loads(line) for line in text.splitlines()])
    means = report_study.average(found, ("sst2", "cola", "mrpc"))
    rows = {(row.arm.label(None), row.arm.groups, row.arm.bits): row for row in means}
    (in_float,) = (row.scores for row in means if row.arm.bits == 32)
    return dict(in_float), {(name, bits): rows[*ARMS[name], bits] for name in ARMS for bits in BITS}


def page_one_table() -> list[str]:
    """Give page one's table as lines of Markdown: points against float of half the steps, and sizes."""
    in_float, rows = scores()
    sizes = json.loads((RESULTS / "sizes.json").read_text(encoding="utf-8"))["models"]["all-MiniLM-L6-v2"]
    steps = json.loads((RESULTS / "step_time.json").read_text(encoding="utf-8"))["results"]["float32, 1 x 16 x 64"]
    head = ["bits", *ARMS, "size", "training step"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    mean = sum(in_float.values()) / len(in_float)
    lines.append(f"| float, half the steps | {mean:.1f} | | | {sizes['float'] / 1e6:.1f} MB | 1.00 |")
    for bits in BITS:
        versus = [report_study.paired(rows[name, bits].scores, in_float) for name in ARMS]
        arm = f"moq_hf, {bits} bits"
        ratio = f"{steps[arm]['ratio']:.2f}" if arm in steps else ""
        cells = [str(bits), *versus, f"{sizes['tables at 8 bits'][str(bits)] / 1e6:.1f} MB", ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw_scores(path: Path) -> None:
    """Draw page one's plot: the mean score of three tasks over bits, a line for each way, the spread of seeds."""
    in_float, rows = scores()
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    mean = sum(in_float.values()) / len(in_float)
    axes.axhline(mean, linewidth=1, linestyle="--", color="gray")
    axes.annotate("float of half the steps", (2.52, mean), ha="center", va="bottom", fontsize="small", color="gray")
    for index, (name, marker) in enumerate(zip(ARMS, "svo", strict=True)):
        places = [bits + 0.04 * (index - 1) for bits in BITS]
        own = [list(rows[name, bits].scores.values()) for bits in BITS]
        means = [sum(values) / len(values) for values in own]
        below = [m - min(values) for m, values in zip(means, own, strict=True)]
        above = [max(values) - m for m, values in zip(means, own, strict=True)]
        width = 2 if index == 2 else 1
        axes.errorbar(places, means, [below, above], marker=marker, capsize=3, label=name, linewidth=width)
    axes.set_xticks(BITS, [f"{bits} bits" for bits in BITS])
    axes.set_xlim(4.3, 1.7)
    axes.set_ylabel("mean score of three tasks")
    axes.set_title("MiniLM on SST-2, CoLA and MRPC, five seeds; bars from the worst to the best", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "img", help="folder to write to")
    parser.add_argument("--table", action="store_true", help="print page one's table, and draw nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(page_one_table()))
        return
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    draw_schedule(out / "schedule.png")
    draw_scores(out / "score-over-bits.png")


if __name__ == "__main__":
    main()
