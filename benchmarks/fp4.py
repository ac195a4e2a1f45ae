"""The perplexity of MXFP4 and NVFP4 beside integers of 4 bits: rounded after training, trained, and taught.

    python benchmarks/fp4.py
    python benchmarks/fp4.py --report

The study is that of `perplexity.py`, with its float models, which every arm of a seed begins with. Integers have
scales in bfloat16. Each run appends one line to `--output` and is skipped where its line is there.
"""

import argparse
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perplexity
from lines import Lines
from perplexity import BASIC, ROUNDED, SEEDS, TAUGHT, Run, Settings, Study
from report_study import paired

ARMS = (ROUNDED, BASIC, TAUGHT)
HALVES = {"quantize_algo": {"scale_dtype": "bfloat16"}}
# What each is quantized with, and bits for each weight with those of the scales.
GRIDS: dict[str, tuple[dict[str, Any], float]] = {
    "MXFP4, groups of 32": ({"quantize_format": "mxfp4"}, 4.25),
    "NVFP4, groups of 16": ({"quantize_format": "nvfp4"}, 4.5),
    "integers, groups of 32": ({"quantize_group_size": 32, **HALVES}, 4.5),
    "integers, groups of 16": ({"quantize_group_size": 16, **HALVES}, 5.0),
}


@dataclass(frozen=True)
class GridRun(Run):
    """A line of the study: also what its weights are quantized with."""

    grid: str = ""

    def config(self) -> dict[str, Any] | None:
        """What the weights are quantized with, or None for float."""
        if not self.grid:
            return None
        return {
            "quantize_bits": {"start_bits": 4, "target_bits": 4},
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
            **GRIDS[self.grid][0],
        }


def runs(rate: float, seeds: Sequence[int] = SEEDS) -> Iterator[GridRun]:
    """Arm by arm, so that lines written so far compare the same seeds."""
    for arm in ("float", *ARMS):
        for seed in seeds:
            if arm == "float":
                yield GridRun(arm, 32, seed, 0.0)
                continue
            for grid in GRIDS:
                yield GridRun(arm, 4, seed, 0.0 if arm == ROUNDED else rate, grid)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: a grid a line, with the difference to the float model of each arm, in percent."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        found.setdefault((line["arm"], line["grid"]), {})[line["seed"]] = line["perplexity"]
    float_values = found["float", ""]
    rows = [["codes of 4 bits", "bits a weight", *ARMS], ["---"] * (2 + len(ARMS))]
    for grid, (_, bits) in GRIDS.items():
        cells = []
        for arm in ARMS:
            own = found.get((arm, grid), {})
            share = {seed: 100 * value / float_values[seed] for seed, value in own.items()}
            cells.append(paired(share, dict.fromkeys(share, 100.0)))
        rows.append([grid, f"{bits:g}", *cells])
    mean = statistics.fmean(float_values.values())
    return perplexity.markdown(rows) + f"\n\nThe float models: {mean:.1f}, the mean of {len(float_values)} seeds."


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the further steps")
    parser.add_argument("--model_dir", type=Path, default=Path("runs/perplexity"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fp4.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of the lines that are there, and stop")
    args = parser.parse_args(argv)
    lines = Lines(args.output)
    if args.report:
        print(table(lines.lines))
        return
    import torch

    torch.set_num_threads(1)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    study = Study(Settings(), args.model_dir)
    for run in runs(args.rate):
        if not lines.has(**perplexity.identity(study, run)):
            line = perplexity.execute(study, run)
            lines.add(line)
            print(run, f"{line['perplexity']:.3f}", line["cpu_seconds"], flush=True)


if __name__ == "__main__":
    main()
