"""What the lines of benchmarks/glue_study.py say: scores by seed, and differences that are paired by seed.

The score of a run is accuracy (SST-2), Matthews correlation (CoLA), the mean of accuracy and F1 (MRPC) or Spearman's
correlation (STS-B), times 100, after the last epoch. A difference is the mean over the seeds that both arms have, with
its 95 % confidence interval of Student's t.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from glue_plans import EPOCHS, LATER, LONG_RATES, RATES
from scipy.stats import t as student

TASKS = {"sst2": "SST-2", "cola": "CoLA", "mrpc": "MRPC"}
RESULTS = Path(__file__).parent / "results"


class Ways(NamedTuple):
    """The runs of one way to train, on whatever task and at whatever bits.

    Attributes:
        arm: As its lines have it.
        groups: A key of `glue_plans.GROUPS`.
        times: How many times the task's epochs the run has that wrote the line.
        rates: Learning rate by task.
        bf16: Computed in bfloat16.
        dropout: With dropout beside a teacher, or throughout a run without one.
        gpu: Trained on a GPU.
        model: As its lines have it.
    """

    arm: str
    groups: str = "per channel, full"
    times: float = 1
    rates: Mapping[str, float] = RATES
    bf16: bool = True
    dropout: bool = True
    gpu: bool = False
    model: str = "bert, 6 layers of 384"


FLOAT = Ways("float", "8 blocks")
LONG = Ways("float", "8 blocks", times=2, rates=LONG_RATES)


@cache
def lines() -> list[dict[str, Any]]:
    """All that are committed; those of arms whose code is gone, and of STS-B, are in files of their own."""
    paths = (RESULTS / f"{name}.jsonl" for name in ("glue_study_dropped", "glue_study", "glue_base"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def score(metrics: Mapping[str, float]) -> float:
    """The score of a run, in points."""
    correlations = [metrics[name] for name in ("matthews_correlation", "spearmanr") if name in metrics]
    return 100 * statistics.fmean(correlations or [metrics[name] for name in ("accuracy", "f1") if name in metrics])


def scores(task: str, ways: Ways, bits: int = 32) -> dict[int, float]:
    """By seed; where a float model was trained again because its folder was gone, its first run counts."""
    wanted = {
        "task": task,
        "arm": ways.arm,
        "bits": bits,
        "groups": ways.groups,
        "epochs": EPOCHS[task] * ways.times,
        "learning_rate": ways.rates[task],
        "decay": "linear",
        "rows": None,
        "bf16": ways.bf16,
        "dropout": ways.dropout,
        "gpu": ways.gpu,
        "model": ways.model,
        "held_out": None,  # As lines have it that were scored on rows held out of training.
    }
    own = [line for line in lines() if all(line.get(name, LATER.get(name)) == wanted[name] for name in wanted)]
    return {line["seed"]: score(line["metrics"]) for line in reversed(own)}


def average(tasks: Iterable[str], ways: Ways, bits: int = 32) -> dict[int, float]:
    """The mean over tasks, by seed, for the seeds that all of them have."""
    parts = [scores(task, ways, bits) for task in tasks]
    common = set(parts[0]).intersection(*parts)
    return {seed: statistics.fmean(part[seed] for part in parts) for seed in sorted(common)}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], digits: int = 1) -> str:
    """The mean difference over common seeds and half its 95 % interval; their number where that is not `ours`'."""
    both = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not both:
        return ""
    few = f" ({len(both)} of {len(ours)})" if len(both) < len(ours) else ""
    if len(both) == 1:
        return f"{both[0]:+.{digits}f}{few}"
    return f"{statistics.fmean(both):+.{digits}f} ± {half_interval(both):.{digits}f}{few}"


def interval(differences: Mapping[int, float]) -> str:
    """The mean of differences by seed, and half its 95 % interval."""
    return paired(differences, dict.fromkeys(differences, 0.0))


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean, by Student's t."""
    return float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, and half its 95 % interval where there are several."""
    half = f" ± {half_interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{half}"
