"""Tables of the lines that benchmarks/glue_study.py wrote: all of them, where docs/results.md has some.

    python benchmarks/report_study.py --plan main

The score of a run is accuracy (SST-2), Matthews correlation (CoLA) or the mean of accuracy and F1 (MRPC), times 100,
after the last epoch. A difference is paired: the mean over the seeds that both arms have, with its 95 % confidence
interval of Student's t. "Against basic QAT": the one of the same bits, groups and learning rate that starts from the
pretrained model and has no teacher; in the plans of equal steps it has those of the float run too. "By the schedule":
against the one that has start and teacher in common too.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glue_plans import EPOCHS, PLANS, RATES, Arm
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


def spread(scores: Mapping[int, float]) -> str:
    """Mean and standard deviation."""
    values = list(scores.values())
    return f"{statistics.fmean(values):.1f}" + (f" (sd {statistics.stdev(values):.1f})" if len(values) > 1 else "")


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


def table(found: Iterable[Row], task: str) -> list[str]:
    """A Markdown table of one task, an arm a line."""
    head = ["bits", "scales", "arm", TASKS[task], "seeds", "against float", "against basic QAT", "by the schedule"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in found:
        if row.task == task:
            versus = [paired(row.scores, others) for others in (row.reference, row.plain, row.basic)]
            what = [str(row.arm.bits), row.arm.groups if row.arm.bits < 32 else "", row.arm.label(RATES.get(task))]
            cells = [*what, spread(row.scores), str(len(row.scores)), *versus]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def others(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of the runs on all data that no plan has any more, a run a line."""
    planned = {
        run.key()
        for plan in PLANS.values()
        for task in plan.tasks
        for arm in plan.arms
        for seed in plan.seeds
        for run in (plan.run(arm, task, seed), plan.run(arm, task, seed).teacher())
        if run is not None
    }
    head = ["task", "bits", "scales", "arm", "start", "learning rate", "seed", "score"]
    result = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    trained = [line for line in lines if line["arm"] != "after training" and line["rows"] is None]
    for line in sorted(trained, key=lambda line: (line["task"], -line["bits"], line["arm"], line["groups"])):
        if key_of(line) not in planned:
            start = f"float at {line['warm']:g}" if line["warm"] else "pretrained"
            what = [TASKS[line["task"]], line["bits"], line["groups"] if line["bits"] < 32 else "", line["arm"]]
            cells = [*what, start, f"{line['learning_rate']:g}", line["seed"], f"{score(line['metrics']):.1f}"]
            result.append("| " + " | ".join(map(str, cells)) + " |")
    return result


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


def tables(found: Sequence[Row], tasks: Sequence[str]) -> list[str]:
    """The Markdown table of each task, and that of their mean where all three are there."""
    means = average(found, tasks) if len(tasks) == len(EPOCHS) else []
    return ["\n".join(table([*found, *means], task)) for task in (*tasks, *(["mean"] if means else []))]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results"
    parser.add_argument("--plan", nargs="+", choices=[*PLANS, "others"], default=[*PLANS, "others"])
    parser.add_argument("--input", type=Path, default=results / "glue_study.jsonl")
    args = parser.parse_args(argv)
    lines = [json.loads(line) for line in args.input.read_text(encoding="utf-8").splitlines()]
    for plan in args.plan:
        if plan == "others":
            text = "\n".join(others(lines))
        else:
            found = rows(plan, lines)
            tasks = [task for task in PLANS[plan].tasks if any(row.task == task for row in found)]
            text = "\n\n".join(tables(found, tasks))
        print(f"{plan}\n\n{text}\n")


if __name__ == "__main__":
    main()
