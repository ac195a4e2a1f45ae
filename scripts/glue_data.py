"""The data of run_glue_moq.py: GLUE's tasks, data files and data sets of the Hub, and what their labels mean."""

import csv
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from glue_hub import UserError, one_line, unreachable

# datasets takes seconds to import: only after the arguments were found good.
if TYPE_CHECKING:
    from datasets import Dataset
    from glue_arguments import DataTrainingArguments, ModelArguments
    from transformers import PreTrainedConfig, TrainingArguments

logger = logging.getLogger("run_glue_moq")


class Task(NamedTuple):
    """A GLUE task: its text columns, its label names by id (none: scores), its metrics."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]


# Columns, label names and their ids are those of the Hub's nyu-mll/glue.
TASKS = {
    "cola": Task(("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
    "sst2": Task(("sentence",), ("negative", "positive"), ("accuracy",)),
    "mrpc": Task(("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")),
    "stsb": Task(("sentence1", "sentence2"), (), ("pearson", "spearmanr")),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
    "mnli": Task(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",)),
    "qnli": Task(("question", "sentence"), ("entailment", "not_entailment"), ("accuracy",)),
    "rte": Task(("sentence1", "sentence2"), ("entailment", "not_entailment"), ("accuracy",)),
    "wnli": Task(("sentence1", "sentence2"), ("not_entailment", "entailment"), ("accuracy",)),
}
STSB_RANGE = (0.0, 5.0)


class Split(NamedTuple):
    """One set of examples: where it comes from, its text columns and perhaps `label`, the file's line of each row."""

    source: str
    data: "Dataset"
    lines: list[int] | None = None

    def place(self, row: int) -> str:
        """Give the place of a row (counted from 0) in words."""
        return f"{self.source}, row {row}" if self.lines is None else f"{self.source}, line {self.lines[row]}"


class Labels(NamedTuple):
    """What the labels mean: names by id (None: scores), and the id of each value found in the data."""

    names: list[str] | None
    ids: dict[Any, int]


def read_text(path: str) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises:
        UserError: it is not UTF-8 or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as err:
        raise UserError(f"{path} is not UTF-8 text (byte {err.start})") from None
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}") from None


def no_json(path: str, err: json.JSONDecodeError, line: int) -> UserError:
    """Make the error for a file that is no JSON from this line on."""
    return UserError(f"{path} is no JSON: line {line}, column {err.colno}: {err.msg}")


def read_file(path: str, wanted: Sequence[str] | None, labeled: bool) -> Split:
    """Read a csv, json (a list of objects) or jsonl file (an object a line).

    Args:
        path: the file.
        wanted: the columns of text to take; None: sentence1 and sentence2, else the first two that hold text.
        labeled: whether the column `label` is needed; otherwise it is left out.

    Raises:
        UserError: the file cannot be read, holds no rows, lacks a column, or a row lacks a value.
    """
    from datasets import Dataset

    rows, lines = _read_csv(path) if path.lower().endswith(".csv") else _read_json(path)
    if not rows:
        raise UserError(f"{path} holds no examples")
    columns = list(rows[0])
    text = [name for name in columns if isinstance(rows[0][name], str)]
    texts = _choose_columns(path, columns, text, wanted, labeled)
    data: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in texts}
    split = Split(path, None, lines)
    for name in texts:
        for row, value in enumerate(data[name]):
            if not isinstance(value, str):
                found = "is missing" if value is None else f"holds {value!r}, not text"
                raise UserError(f"{split.place(row)}: column {name} {found}")
    if labeled:
        values = [row.get("label") for row in rows]
        data["label"] = _csv_labels(values) if path.lower().endswith(".csv") else _json_labels(values, split)
        for row, value in enumerate(data["label"]):
            if value is None or value == "":
                raise UserError(f"{split.place(row)}: the label is missing")
    return split._replace(data=Dataset.from_dict(data))


def _read_csv(path: str) -> tuple[list[dict[str, Any]], list[int]]:
    rows, lines = [], []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise UserError(f"{path} has two columns of the same name: {', '.join(header)}")
            start = reader.line_num + 1
            for fields in reader:
                if len(fields) not in (0, len(header)):
                    raise UserError(f"{path}, line {start}: {len(fields)} fields, but the header has {len(header)}")
                if fields:
                    rows.append(dict(zip(header, fields, strict=True)))
                    lines.append(start)
                start = reader.line_num + 1
    except csv.Error as err:
        raise UserError(f"{path}, line {reader.line_num}: {err}") from None
    except UnicodeDecodeError as err:
        raise UserError(f"{path} is not UTF-8 text (byte {err.start})") from None
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}") from None
    return rows, lines


def _read_json(path: str) -> tuple[list[dict[str, Any]], list[int]]:
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as err:
            raise no_json(path, err, err.lineno) from None
        lines = list(range(1, len(rows) + 1))
    else:
        rows, lines = [], []
        # Not splitlines(): JSON strings may hold the other line ends that it knows.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as err:
                    raise no_json(path, err, number) from None
                lines.append(number)
    for row, line in zip(rows, lines, strict=True):
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {line}: an example must be a JSON object, not {json.dumps(row)[:40]}")
    return rows, lines


def _choose_columns(
    source: str, columns: Sequence[str], text: Sequence[str], wanted: Sequence[str] | None, labeled: bool
) -> list[str]:
    """Give the names of the one or two text columns of data that has `columns`, of which `text` hold text."""
    there = f"{source} has the columns {', '.join(columns)}"
    if wanted is not None:
        chosen = list(wanted)
    elif "sentence1" in columns:
        chosen = [name for name in ("sentence1", "sentence2") if name in columns]
    else:
        chosen = [name for name in text if name != "label"][:2]
        if not chosen:
            raise UserError(f"{there}; none of them holds text")
    needed = [*chosen, *(["label"] if labeled else [])]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise UserError(f"{there}; needed: {', '.join(needed)}; missing: {', '.join(missing)}")
    for name in chosen:
        if name not in text:
            raise UserError(f"{source}: column {name} holds no text")
    return chosen


def _csv_labels(values: list[str]) -> list[Any]:
    for kind in (int, float):
        try:
            return [kind(value) for value in values]
        except ValueError:
            continue
    return values


def _json_labels(values: list[Any], split: Split) -> list[Any]:
    if {type(value) for value in values} == {int, float}:
        return [float(value) for value in values]
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, (str, int, float)):
            raise UserError(f"{split.place(row)}: the label is {json.dumps(value)[:40]}, not a number or a string")
        if value is not None and type(value) is not type(values[0]) and values[0] is not None:
            raise UserError(f"{split.place(row)}: the label is {value!r}, but that of the first row is {values[0]!r}")
    return [int(value) if isinstance(value, bool) else value for value in values]


def load_splits(
    model_args: "ModelArguments", data_args: "DataTrainingArguments", args: "TrainingArguments"
) -> dict[str, Split]:
    """Load what the run needs of train, validation, validation_mm (mnli only), test and test_mm.

    Raises:
        UserError: data that cannot be had, or lacks a split or a column.
    """
    task, files = TASKS.get(data_args.task_name or ""), data_args.files()
    if files:
        sources = {"train": ("train_file", args.do_train), "validation": ("validation_file", args.do_eval)}
        sources |= {"validation_mm": ("validation_mismatched_file", args.do_eval)}
        sources |= {"test": ("test_file", args.do_predict)}
        if data_args.task_name == "mnli" and args.do_eval and "validation_mismatched_file" not in files:
            logger.info("no --validation_mismatched_file: evaluating on the matched set only")
        splits: dict[str, Split] = {}
        columns = task.columns if task is not None else None
        for key, (name, wanted) in sources.items():
            if name in files and not wanted:
                logger.info("--%s is not used", name)
            elif name in files:
                splits[key] = read_file(files[name], columns, labeled=key != "test")
                # All of the files must have what was chosen from the first.
                columns = tuple(column for column in splits[key].data.column_names if column != "label")
        return splits
    kinds = ["train"] * args.do_train + ["validation"] * args.do_eval + ["test"] * args.do_predict
    names = {kind: kind for kind in kinds}
    if data_args.task_name == "mnli":
        for kind in kinds[args.do_train :]:
            names |= {kind: f"{kind}_matched", f"{kind}_mm": f"{kind}_mismatched"}
    name, config = data_args.dataset_name, data_args.dataset_config_name
    if task is not None:
        name, config = "nyu-mll/glue", data_args.task_name
    return _load_hub_splits(name, config, names, task, model_args)


def _load_hub_splits(
    name: str, config: str | None, wanted: Mapping[str, str], task: Task | None, model_args: "ModelArguments"
) -> dict[str, Split]:
    import datasets

    full_name = f"{name}/{config}" if config else name
    try:
        loaded = datasets.load_dataset(name, config, cache_dir=model_args.cache_dir, token=model_args.token)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as err:
        columns = f" with the columns {', '.join((*task.columns, 'label'))}" if task else ""
        advice = f"give --train_file, --validation_file or --test_file (csv, json or jsonl{columns})"
        hint = "" if Path(name).exists() else unreachable(f"data set {full_name}", advice)
        raise UserError(hint or f"cannot load the data set {full_name}: {one_line(err)}") from None
    splits = {}
    for key, split_name in wanted.items():
        if split_name not in loaded:
            raise UserError(f"data set {full_name} has the splits {', '.join(loaded)}; needed: {split_name}")
        data, source, labeled = loaded[split_name], f"{full_name}, split {split_name}", not key.startswith("test")
        if not len(data):
            raise UserError(f"{source} holds no examples")
        kinds = {column: getattr(feature, "dtype", "") for column, feature in data.features.items()}
        text = [column for column, kind in kinds.items() if kind in ("string", "large_string")]
        texts = _choose_columns(source, data.column_names, text, task.columns if task else None, labeled)
        data = data.select_columns([*texts, *(["label"] if labeled else [])])
        for column in data.column_names:
            if data.data.column(column).null_count:
                raise UserError(f"{source}: column {column} has rows without a value")
        splits[key] = Split(source, data)
    return splits


def resolve_labels(splits: Mapping[str, Split], task: Task | None, config: "PreTrainedConfig") -> Labels:
    """Find out what the labels mean and check all of them.

    A task says it itself. Otherwise: labels that are floats are scores (regression); the label set is that of the
    training data or, without any, that of the model.

    Raises:
        UserError: a label out of range, unknown, or of another kind than in the training data.
    """
    labeled = {key: split for key, split in splits.items() if not key.startswith("test")}
    first = next(iter(labeled.values()), None)
    kinds = {key: split.data.features["label"].dtype for key, split in labeled.items()}
    names = getattr(first.data.features["label"], "names", None) if first else None
    if task is not None:
        names = list(task.labels)
        regression = not names
    else:
        regression = next(iter(kinds.values())).startswith("float") if first else config.num_labels == 1

    if regression:
        for split in labeled.values():
            _check_scores(split, task)
        return Labels(None, {})

    if names:
        ids = {name: index for index, name in enumerate(names)} | {index: index for index in range(len(names))}
        whose = "of the task" if task is not None else "of the data set"
        legal = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
    elif "train" in labeled:
        values = sorted(set(first.data["label"]))
        if len(values) < 2:
            raise UserError(f"{first.source}: every label is {values[0]!r}; a classifier needs at least two")
        names, ids = [str(value) for value in values], {value: index for index, value in enumerate(values)}
        whose, legal = f"in {first.source}", ", ".join(names)
    else:
        names, whose = [config.id2label[index] for index in range(config.num_labels)], "of the model"
        ids, legal = {name: index for index, name in enumerate(names)}, ", ".join(names)
        if _unnamed(names):
            ids |= {index: index for index in range(len(names))}
        elif all(re.fullmatch(r"-?\d+", name) for name in names):
            ids |= {int(name): index for index, name in enumerate(names)}
    for split in labeled.values():
        _check_labels(split, ids, f"{whose}: {legal}")
    return Labels(list(names), ids)


def _check_scores(split: Split, task: Task | None) -> None:
    low, high = STSB_RANGE if task is not None else (-math.inf, math.inf)
    legal = f"a number from {low:g} to {high:g}" if task is not None else "a finite number"
    for row, value in enumerate(split.data["label"]):
        if isinstance(value, str) or not math.isfinite(value) or not low <= value <= high:
            raise UserError(f"{split.place(row)}: label {value!r} is not {legal}")
    logger.info("%s: %d examples with scores", split.source, len(split.data))


def _check_labels(split: Split, ids: Mapping[Any, int], legal: str) -> None:
    values = split.data["label"]
    unknown = set(values) - set(ids)
    if unknown:
        row, value = next((row, value) for row, value in enumerate(values) if value in unknown)
        hidden = "; -1 stands for a label that is not published" if value == -1 else ""
        raise UserError(f"{split.place(row)}: label {value!r} is not one of the labels {legal}{hidden}")


def _unnamed(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{index}" for index, name in enumerate(names))


def in_model_order(labels: Labels, config: "PreTrainedConfig") -> Labels:
    """Give each label the id that a model which was trained on the same labels has for it."""
    own = [config.id2label.get(index, "") for index in range(config.num_labels)]
    if labels.names is None or _unnamed(own):
        return labels
    by_name = {name.lower(): index for index, name in enumerate(own)}
    if sorted(by_name) != sorted(name.lower() for name in labels.names):
        logger.warning("the model's labels (%s) give way to %s", ", ".join(own), ", ".join(labels.names))
        return labels
    ids = {value: by_name[labels.names[index].lower()] for value, index in labels.ids.items()}
    return Labels(sorted(labels.names, key=lambda name: by_name[name.lower()]), ids)
