"""Token classification and extractive answers: float, rounded, basic QAT and MoQ at 2 and 3 bits, over seeds.

    python benchmarks/tasks_study.py --model_name_or_path FOLDER
    python benchmarks/tasks_study.py --report

The tasks are made from the sources of Python's standard library (`stdlib_tasks.py`). All arms of a seed begin with the
same pretrained model and have twice the steps of a float run, but for the first two:

- float: an epoch, "1x".
- rounded: that model at its bits, no further step.
- basic QAT: at its bits from the first step.
- float first, basic QAT: the float model of the seed is the start of the second epoch and its teacher.
- float first, MoQ: the same, with bits that fall within 0.3 of the second epoch.

The grid is that of `configs/moq_w2.json` and `configs/moq_w3.json`.

Each run appends one line to `--output` and is skipped where its line is there. Runs go seed by seed, so that lines
written so far compare the same seeds. `--model_dir` keeps the float models.

All runs: AdamW, linear decay without warmup, gradients clipped to norm 1, bfloat16, one thread.
"""

import argparse
import copy
import hashlib
import logging
import re
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import stdlib_tasks
from glue_plans import GROUPS, ramp
from report_study import paired, spread
from short_runs import Lines, table
from stdlib_tasks import ROLES, Part

LOOKUP, FLOAT, ROUNDED = "lookup", "float", "rounded"
BASIC, TAUGHT, TAUGHT_MOQ = "basic QAT", "float first, basic QAT", "float first, MoQ"
SEEDS, BITS = (1, 2, 3), (2, 3)
GRID = GROUPS["per channel, full"]
# Where the bits of "float first, MoQ" begin to fall.
START = {2: 4, 3: 8}
DEADLINE = 0.3
ARMS = [LOOKUP, FLOAT, ROUNDED, BASIC, TAUGHT, TAUGHT_MOQ]
NAMES = {"exact": "exact match", "accuracy": "accuracy"}


@dataclass(frozen=True)
class Settings:
    """What all runs of a task have in common: rows, tokens in a row at most, and rows in a batch."""

    train: int
    validation: int
    length: int
    batch: int


SETTINGS = {"roles": Settings(6400, 800, 64, 16), "spans": Settings(4000, 800, 128, 16)}
# The better of 1e-4 and 2e-4 for the float model, with seed 1.
RATES = {"roles": 2e-4, "spans": 2e-4}


@dataclass(frozen=True)
class Run:
    """One line of the study."""

    task: str
    arm: str
    bits: int
    seed: int
    rate: float

    def config(self) -> dict[str, Any] | None:
        """What the weights are quantized with, or None for float."""
        if self.bits == 32:
            return None
        start = START[self.bits] if self.arm == TAUGHT_MOQ else self.bits
        return {**(ramp(start, self.bits, DEADLINE).moq or {}), **GRID}

    @property
    def epochs(self) -> int:
        """Of its own; what is taught has the epoch of its start before it."""
        return {LOOKUP: 0, ROUNDED: 0, FLOAT: 1, TAUGHT: 1, TAUGHT_MOQ: 1}.get(self.arm, 2)

    @property
    def from_float(self) -> bool:
        """Whether it begins with the float model of the seed."""
        return self.arm in (ROUNDED, TAUGHT, TAUGHT_MOQ)


class Task(ABC):
    """Rows of token ids; the base of both tasks.

    Args:
        model: Folder or Hub name, for the tokenizer and the weights.
        parts: For training and for validation.
        settings: How many rows, and of which length.
    """

    def __init__(self, model: str, parts: tuple[Part, Part], settings: Settings) -> None:
        from transformers import AutoTokenizer

        self.settings, self.pretrained = settings, model
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        counts = (settings.train, settings.validation)
        self.train, self.validation = (self.first(part, count) for part, count in zip(parts, counts, strict=True))

    def first(self, part: Part, count: int) -> list[dict[str, Any]]:
        """So many rows of a part, in an order that hashes decide."""
        rows: list[dict[str, Any]] = []
        for row in self.rows(part):
            rows.append(row)
            if len(rows) == count:
                return rows
        raise ValueError(f"{type(self).__name__}: there are only {len(rows)} rows, not {count}")

    @cached_property
    def digest(self) -> str:
        """12 characters that tell two sets of rows apart."""
        return hashlib.sha256(repr((self.train, self.validation)).encode()).hexdigest()[:12]

    @abstractmethod
    def rows(self, part: Part) -> Iterator[dict[str, Any]]:
        """All rows of a part."""

    @abstractmethod
    def new_model(self, source: str) -> Any:
        """The model of a folder or Hub name."""

    @abstractmethod
    def collator(self) -> Any:
        """What makes batches."""

    @abstractmethod
    def score(self, prediction: Any) -> dict[str, float]:
        """The metrics of logits on all rows for validation, 0 to 1."""

    @abstractmethod
    def lookup(self, parts: tuple[Part, Part]) -> dict[str, float]:
        """The metrics of the most frequent answer that training has."""


class Roles(Task):
    """Token classification: F1 is the mean over the roles but "other", each with the same weight."""

    def rows(self, part: Part) -> Iterator[dict[str, Any]]:
        """Windows of a module's names; of a name the first token has the label."""
        room = self.settings.length - 2
        windows = []
        for module, names in part.roles.items():
            ids: list[int] = []
            labels: list[int] = []
            for word, pieces in zip(names, self._pieces([word for word, _ in names]), strict=True):
                if len(ids) + len(pieces) > room:
                    windows.append((module, ids, labels))
                    ids, labels = [], []
                ids = (ids + pieces)[:room]
                labels = (labels + [ROLES.index(word[1])] + [-100] * (len(pieces) - 1))[:room]
        begin, end = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        for _, ids, labels in sorted(windows, key=by_hash):
            yield {
                "input_ids": [begin, *ids, end],
                "attention_mask": [1] * (len(ids) + 2),
                "labels": [-100, *labels, -100],
            }

    def _pieces(self, words: list[str]) -> list[list[int]]:
        return self.tokenizer(words, add_special_tokens=False)["input_ids"] if words else []

    def new_model(self, source: str) -> Any:
        """As `Task`."""
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(source, num_labels=len(ROLES))

    def collator(self) -> Any:
        """As `Task`."""
        from transformers import DataCollatorForTokenClassification

        return DataCollatorForTokenClassification(self.tokenizer)

    def score(self, prediction: Any) -> dict[str, float]:
        """As `Task`."""
        labels = prediction.label_ids
        return self._metrics(labels[labels != -100], prediction.predictions.argmax(-1)[labels != -100])

    def lookup(self, parts: tuple[Part, Part]) -> dict[str, float]:
        """Of the most frequent role of each name, over all names of the held-out modules."""
        train, validation = ([pair for names in part.roles.values() for pair in names] for part in parts)
        best = most_frequent(train)
        pairs = [(ROLES.index(role), ROLES.index(best.get(word, ROLES[0]))) for word, role in validation]
        return self._metrics(*np.array(pairs).T)

    @staticmethod
    def _metrics(labels: Any, predictions: Any) -> dict[str, float]:
        from sklearn.metrics import f1_score

        named = list(range(1, len(ROLES)))
        f1 = f1_score(labels, predictions, labels=named, average="macro", zero_division=0.0)
        return {"f1": float(f1), "accuracy": float((labels == predictions).mean())}


class Spans(Task):
    """Extractive answers: exact match, and F1 of the tokens that an answer shares with the right one."""

    longest = 30  # Tokens of an answer.

    def rows(self, part: Part) -> Iterator[dict[str, Any]]:
        """The questions whose answer is left when their context is cut."""
        questions = [(module, question) for module, found in part.spans.items() for question in found]
        for _, question in sorted(questions, key=by_hash):
            encoded = self.tokenizer(
                question.question,
                question.context,
                truncation="only_second",
                max_length=self.settings.length,
                return_offsets_mapping=True,
            )
            offsets = encoded.pop("offset_mapping")
            start, end = (encoded.char_to_token(at, sequence_index=1) for at in (question.start, question.end - 1))
            if start is not None and end is not None:
                context = [index for index, part in enumerate(encoded.sequence_ids()) if part == 1]
                yield {
                    **encoded,
                    "start_positions": start,
                    "end_positions": end,
                    "question": question,
                    "offsets": {index: offsets[index] for index in context},
                }

    def new_model(self, source: str) -> Any:
        """As `Task`."""
        from transformers import AutoModelForQuestionAnswering

        return AutoModelForQuestionAnswering.from_pretrained(source)

    def collator(self) -> Any:
        """As `Task`."""
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer)

    def score(self, prediction: Any) -> dict[str, float]:
        """As `Task`."""
        if [row["start_positions"] for row in self.validation] != prediction.label_ids[0].tolist():
            raise ValueError("the predictions are not in the order of the rows")
        answers = []
        for row, starts, ends in zip(self.validation, *prediction.predictions, strict=True):
            places = list(row["offsets"])
            first, last = best_span(starts[places], ends[places], self.longest)
            begin, end = row["offsets"][places[first]][0], row["offsets"][places[last]][1]
            answers.append(row["question"].context[begin:end])
        return self._metrics(answers)

    def lookup(self, parts: tuple[Part, Part]) -> dict[str, float]:
        """Of the most frequent answer to each kind of question."""
        best = most_frequent((row["question"].kind, row["question"].answer) for row in self.train)
        return self._metrics([best.get(row["question"].kind, "") for row in self.validation])

    def _metrics(self, answers: Sequence[str]) -> dict[str, float]:
        pairs = [(row["question"].answer, answer) for row, answer in zip(self.validation, answers, strict=True)]
        return {
            "f1": statistics.fmean(token_f1(*pair) for pair in pairs),
            "exact": statistics.fmean(words(right) == words(answer) for right, answer in pairs),
        }


def by_hash(row: Any) -> bytes:
    """What rows are sorted by before the first ones are taken."""
    return hashlib.sha256(repr(row).encode()).digest()


def most_frequent(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The value that each key has most often."""
    seen: dict[str, Counter[str]] = {}
    for key, value in pairs:
        seen.setdefault(key, Counter())[value] += 1
    return {key: count.most_common(1)[0][0] for key, count in seen.items()}


def words(answer: str) -> list[str]:
    """What answers are compared by: words and marks, without case and space."""
    return re.findall(r"\w+|[^\w\s]", answer.lower())


def token_f1(right: str, answer: str) -> float:
    """The harmonic mean of precision and recall of an answer's words and marks, as of SQuAD."""
    ours, theirs = Counter(words(answer)), Counter(words(right))
    both = (ours & theirs).total()
    return 2 * both / (ours.total() + theirs.total()) if both else 0.0


def best_span(starts: Any, ends: Any, longest: int) -> tuple[int, int]:
    """First and last index of the largest sum of both logits, float [n] each, with at most `longest` tokens."""
    sums = starts[:, None] + ends[None, :]
    allowed = np.triu(np.ones_like(sums, dtype=bool)) & ~np.triu(np.ones_like(sums, dtype=bool), longest)
    first, last = np.unravel_index(np.where(allowed, sums, -np.inf).argmax(), sums.shape)
    return int(first), int(last)


TASKS: dict[str, type[Task]] = {"roles": Roles, "spans": Spans}


class Study:
    """Data and folders, made once.

    Args:
        model: Folder or Hub name of the pretrained model.
        models: Where float models are kept.
        names: Of the tasks.
    """

    def __init__(self, model: str, models: Path, names: Sequence[str]) -> None:
        self.models = models
        self.parts = stdlib_tasks.read()
        self.tasks = {name: TASKS[name](model, self.parts, SETTINGS[name]) for name in names}

    def identity(self, run: Run) -> dict[str, Any]:
        """What tells a line from others."""
        task = self.tasks[run.task]
        return {**asdict(run), "moq": run.config(), "settings": asdict(task.settings), "data": task.digest}

    def float_model(self, run: Run) -> Path:
        """The folder of the float model of a run's seed."""
        task = self.tasks[run.task]
        return self.models / f"{run.task}-{run.seed}-{run.rate:g}-{task.settings.batch}-{task.digest}"

    def trainer(self, run: Run, folder: str) -> Any:
        """The trainer of a run."""
        from transformers import TrainingArguments, set_seed
        from transformers.trainer_callback import PrinterCallback

        from moq_hf import MoQTrainer

        task = self.tasks[run.task]
        arguments = TrainingArguments(
            folder,
            seed=run.seed,
            learning_rate=run.rate,
            num_train_epochs=run.epochs,
            per_device_train_batch_size=task.settings.batch,
            per_device_eval_batch_size=64,
            train_sampling_strategy="group_by_length",
            dataloader_pin_memory=False,
            bf16=True,
            use_cpu=True,
            save_strategy="no",
            logging_steps=0.1,
            report_to=[],
            disable_tqdm=True,
        )
        set_seed(run.seed)
        source = self.float_model(run) if run.from_float else task.pretrained
        trained = run.epochs > 0
        trainer = MoQTrainer(
            task.new_model(str(source)),
            arguments,
            task.collator(),
            task.train,
            task.validation,
            compute_metrics=task.score,
            moq_config=copy.deepcopy(run.config()) if trained else None,
            teacher=task.new_model(str(source)) if run.from_float and trained else None,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def execute(self, run: Run) -> dict[str, Any]:
        """Train and evaluate; the line to write."""
        from moq_hf import quantize_model

        began, cpu = time.perf_counter(), time.process_time()
        task = self.tasks[run.task]
        line: dict[str, Any] = {"steps": 0}
        if run.arm == LOOKUP:
            return {**self.identity(run), **line, "metrics": task.lookup(self.parts)}
        if run.from_float and not (self.float_model(run) / "model.safetensors").exists():
            self.execute(Run(run.task, FLOAT, 32, run.seed, run.rate))
        with tempfile.TemporaryDirectory(prefix="tasks-study-") as folder:
            trainer = self.trainer(run, folder)
            if run.arm == ROUNDED:
                quantize_model(trainer.model, run.config())
            else:
                trainer.train()
                line["steps"] = trainer.state.global_step
                line["train_loss"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            if trainer.moq is not None:
                controller = trainer.moq.controller
                line["last_drop"] = controller.history[-1].step if controller.history else None
                line["layer_bits"] = sorted({layer.moq.bits for layer in controller.layers.values()})
            # Grouping by length would shuffle the rows for validation too.
            trainer.args.train_sampling_strategy = "sequential"
            metrics = trainer.evaluate()
        if run.arm == FLOAT:
            trainer.model.save_pretrained(self.float_model(run))
        shape = trainer.model.config
        return {
            **self.identity(run),
            "metrics": {
                name: metrics[f"eval_{name}"] for name in ("f1", "exact", "accuracy") if f"eval_{name}" in metrics
            },
            **line,
            "model": f"{shape.model_type}, {shape.num_hidden_layers} layers of {shape.hidden_size}",
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
        }


def runs(tasks: Sequence[str], seeds: Sequence[int] = SEEDS, rate: float | None = None) -> Iterator[Run]:
    """Seed by seed, so that lines written so far compare the same seeds; `rate` None is the task's."""
    for task in tasks:
        yield Run(task, LOOKUP, 32, 0, 0.0)
    for seed in seeds:
        for bits in (32, *BITS):
            arms = (FLOAT,) if bits == 32 else (ROUNDED, TAUGHT, TAUGHT_MOQ, BASIC)
            for task in tasks:
                yield from (Run(task, arm, bits, seed, rate or RATES[task]) for arm in arms)


class Found:
    """The scores of the lines that count: F1 in points, by arm and bits, then seed.

    Args:
        lines: Those of the output file; only those of the task's `SETTINGS` and `RATES` count.
        task: Its name.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], task: str) -> None:
        counted = [line for line in lines if line["settings"] == asdict(SETTINGS[task])]
        self.task = task
        self.metrics: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
        for run in runs([task]):
            wanted = {**asdict(run), "moq": run.config()}
            found = [line for line in counted if {name: line[name] for name in wanted} == wanted]
            if found:
                self.metrics.setdefault((run.arm, run.bits), {})[run.seed] = found[-1]["metrics"]

    def scores(self, arm: str, bits: int, metric: str = "f1") -> dict[int, float]:
        """By seed, in points."""
        return {seed: 100 * metrics[metric] for seed, metrics in self.metrics.get((arm, bits), {}).items()}

    def table(self) -> str:
        """A Markdown table, an arm a line."""
        second = "exact" if self.task == "spans" else "accuracy"
        head = ["bits", "arm", "seeds", "F1", NAMES[second]]
        against = ["against float", f"against {BASIC}", "by the schedule"]
        rows = []
        for arm, bits in self.metrics:
            ours = self.scores(arm, bits)
            others = {FLOAT: (FLOAT, 32), BASIC: (BASIC, bits), TAUGHT: (TAUGHT, bits)}
            shown = {ROUNDED: (FLOAT,), BASIC: (FLOAT,), TAUGHT: (FLOAT, BASIC), TAUGHT_MOQ: others}.get(arm, ())
            rows.append(
                [
                    str(bits) if bits < 32 else "",
                    arm,
                    str(len(ours)) if arm != LOOKUP else "",
                    spread(ours),
                    f"{statistics.fmean(self.scores(arm, bits, second).values()):.1f}",
                    *(paired(ours, self.scores(*other)) if name in shown else "" for name, other in others.items()),
                ]
            )
        return table([*head, *against], rows)


def report(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    for task in SETTINGS:
        print(f"{task}\n\n{Found(lines, task).table()}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="the pretrained model; needed unless --report is given")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--bits", nargs="+", type=int, choices=(*BITS, 32), default=[*BITS, 32])
    parser.add_argument("--rate", type=float, help="learning rate; without it the task's own")
    parser.add_argument("--model_dir", type=Path, default=Path("runs/tasks_study"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "tasks.jsonl")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing, and stop")
    parser.add_argument("--report", action="store_true", help="print the tables of the lines that are there, and stop")
    args = parser.parse_args(argv)
    lines = Lines(args.output)
    if args.report:
        report(lines.lines)
        return
    if args.model_name_or_path is None:
        parser.error("--model_name_or_path is needed: the pretrained model that all runs begin with")
    import torch
    import transformers

    torch.set_num_threads(1)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    study = Study(args.model_name_or_path, args.model_dir, args.tasks)
    for run in runs(args.tasks, args.seeds, args.rate):
        if run.arm in args.arms and run.bits in args.bits and not lines.has(**study.identity(run)):
            if not args.list:
                line = study.execute(run)
                lines.add(line)
            print(run, *([] if args.list else [line["metrics"], line.get("seconds")]), flush=True)


if __name__ == "__main__":
    main()
