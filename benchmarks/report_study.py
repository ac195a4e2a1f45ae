"""What the lines of benchmarks/glue_study.py say: the scores of each arm by seed, and those that it is compared with.

The score of a run is accuracy (SST-2), Matthews correlation (CoLA) or the mean of accuracy and F1 (MRPC), times 100,
after the last epoch. A difference is paired: the mean over the seeds that both arms have, with its 95 % confidence
interval of Student's t. Plain basic QAT has the same bits, groups and learning rate, starts from the pretrained model
and has no teacher; in the plans of equal steps it has those of the float run too.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from glue_plans import PLANS, Arm
from glue_study import key_of
from scipy.stats import t as student

TASKS = {"sst2": "SST-2", "cola": "CoLA", "mrpc": "MRPC", "mean": "all three"}


class Row(NamedTuple):
    """One arm on one task: score by seed, and those of float, of plain basic QAT and of basic QAT like it."""

    task: str
    arm: Arm
    scores: Mapping[int, float]
    reference: Mapping[int, float]
    plain: Mapping[int, float]
    basic: Mapping[int, float]


def score(metrics: Mapping[str, float]) -> float:
    """The score of a run, in points."""
    names = ("matthews_correlation",) if "matthews_correlation" in metrics else ("accuracy", "f1")
    return 100 * statistics.fmean(metrics[name] for name in names if name in metrics)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float], digits: int = 1) -> str:
    """The mean difference over common seeds and half its 95 % interval; their number where that is not `ours`'."""
    both = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not both:
        return ""
    few = f" ({len(both)} of {len(ours)})" if len(both) < len(ours) else ""
    if len(both) == 1:
        return f"{both[0]:+.{digits}f}{few}"
    half = float(student.ppf(0.975, len(both) - 1)) * statistics.stdev(both) / math.sqrt(len(both))
    return f"{statistics.fmean(both):+.{digits}f} ± {half:.{digits}f}{few}"


def rows(plan: str, lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The arms of a plan that have lines, by task, bits falling."""
    by_run, quantized = {}, {}
    for line in lines:
        key = key_of(line)
        if line["arm"] == "after training":
            quantized[key, line["bits"], line["groups"]] = line
        else:
            by_run[key] = line

    run, equal = PLANS[plan].run, PLANS[plan].equal_steps

    def scores(arm: Arm | None, task: str) -> dict[int, float]:
        if arm is None:
            return {}
        runs = {seed: by_run.get(run(arm, task, seed).key()) for seed in PLANS[plan].seeds}
        return {seed: score(line["metrics"]) for seed, line in runs.items() if line is not None}

    result = []
    for task in PLANS[plan].tasks:
        reference = next(arm for arm in PLANS[plan].arms if arm.moq is None)
        for arm in PLANS[plan].arms:
            key = run(arm, task, 1).key()
            others = (reference, arm.plain(equal), arm.basic())
            own = [each if each is None or run(each, task, 1).key() != key else None for each in others]
            result.append(Row(task, arm, *(scores(each, task) for each in (arm, *own))))
        trained = [arm for arm in PLANS[plan].arms if arm.moq is not None and reference.after]
        wanted = {(groups, arm.bits) for arm in trained for groups in (arm.groups, *PLANS[plan].rounded)}
        for groups, bits in sorted(wanted):
            arm = Arm("after training", None, bits, reference.learning_rate, groups=groups)
            places = {seed: (run(reference, task, seed).key(), bits, groups) for seed in PLANS[plan].seeds}
            found = {seed: score(quantized[at]["metrics"]) for seed, at in places.items() if at in quantized}
            result.append(Row(task, arm, found, scores(reference, task), {}, {}))
    return sorted((row for row in result if row.scores), key=lambda row: -row.arm.bits)


def average(found: Iterable[Row], tasks: Sequence[str]) -> list[Row]:
    """The arms that every task has, each with its mean over the tasks for the seeds that all of them have."""
    arms: dict[tuple[int, str, str, float], list[Row]] = {}
    for row in found:
        name = row.arm.label(row.arm.learning_rate)
        arms.setdefault((row.arm.bits, row.arm.groups, name, row.arm.learning_rate), []).append(row)

    def mean(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
        common = set(parts[0]).intersection(*parts)
        return {seed: statistics.fmean(part[seed] for part in parts) for seed in sorted(common)}

    result = []
    for own in arms.values():
        columns = [[row[column] for row in own] for column in range(2, len(Row._fields))]
        if len(own) == len(tasks) and mean(columns[0]):
            result.append(Row("mean", own[0].arm, *map(mean, columns)))
    return result
