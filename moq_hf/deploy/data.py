"""What exported models are compared on."""

import contextlib
import inspect
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor

from ..errors import MoQError
from ..model.convert import dequantize_model
from ..model.inventory import is_packed

logger = logging.getLogger(__name__)
_KINDS = ("ForSequenceClassification", "ForTokenClassification", "Model")
# Answered where the caller brings none: of several lengths, so that the padding is tested too.
SENTENCES = (
    "A quiet film that stays with you.",
    "The plot makes no sense and the actors seem to know it.",
    "He said that the meeting had been moved to Thursday because two of the speakers were late.",
    "Prices rose by three percent in March.",
    "Who wrote this?",
    "The committee, which had met twice since the spring, could not agree on a date, a place or an agenda.",
    "I would not call it good, but I would watch it again.",
    "No.",
    "Rain fell on the hills all night, and in the morning the river was over its banks.",
    "The company said that its new engine uses a third less fuel than the one it replaces.",
    "It was the best and the worst of their ideas.",
    "Please send the report by noon.",
)


@dataclass(frozen=True)
class Data:
    """What the models are compared on.

    Attributes:
        texts: One or two texts per example.
        labels: Class ids or scores; None if there are none.
        task: GLUE's name, for the metric.
    """

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[float] | None = None
    task: str | None = None


def load(directory: Path) -> tuple[Any, Any]:
    """The model of a packed checkpoint with float weights on their grid, in eval mode, and its tokenizer.

    Raises:
        MoQError: It is of a kind that is not exported, or has no tokenizer.
    """
    config = transformers.AutoConfig.from_pretrained(directory)
    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None or not name.endswith(_KINDS) or "Head" in name or config.is_encoder_decoder:
        raise MoQError(
            f"{directory}: {name} is not exported; classifiers of sequences and tokens and base models are "
            "(ForSequenceClassification, ForTokenClassification, Model), without a decoder beside the encoder"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    # transformers makes one without words of a folder without a vocabulary.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise MoQError(
            f"{directory} has no tokenizer, which the comparison on sentences needs: save it there with "
            "tokenizer.save_pretrained"
        )
    model = architecture.from_pretrained(directory, attn_implementation="eager", dtype="auto")
    if is_packed(model):
        dequantize_model(model)
    model.config.use_cache = False
    return model.float().eval(), tokenizer


def read_data(path: str | os.PathLike[str], task: str | None = None) -> Data:
    """Rows of JSON lines: one or two texts under any names, in their order, and `label`, a class id or a score.

    Args:
        path: The file.
        task: GLUE's name, which chooses the metric.

    Raises:
        MoQError: No such file, or a row that is no such row; names the line.
    """
    if task is not None and task not in _TASKS:
        raise MoQError(f"task {task!r} is none of GLUE's: {', '.join(_TASKS)}")
    texts, labels = [], []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MoQError(f"cannot read {os.fspath(path)}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = tuple(value for name, value in row.items() if isinstance(value, str) and name != "label")
            label = row.get("label")
            if isinstance(label, float) and not math.isfinite(label):
                raise ValueError
        except (ValueError, AttributeError):
            text, label = (), None
        if not 1 <= len(text) <= 2 or (label is not None and not isinstance(label, (int, float))):
            raise MoQError(
                f'{os.fspath(path)}, line {number}: must be a JSON object with one or two texts and a number "label"'
            )
        texts.append(text)
        labels.append(label)
    if not texts:
        raise MoQError(f"{os.fspath(path)} holds no rows")
    if len({len(text) for text in texts}) > 1 or len({label is None for label in labels}) > 1:
        raise MoQError(f"{os.fspath(path)}: all rows must have as many texts, and all a label or none")
    return Data(texts, None if labels[0] is None else cast(list[float], labels), task)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter warns of what it decides by itself, and reports its progress."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# The proof.


def batches_of(
    model: Any, tokenizer: Any, data: Data | None, max_length: int
) -> tuple[list[dict[str, Tensor]], Sequence[float] | None]:
    """The data as batches of the model's inputs, with its labels; the sentences where there is none."""
    texts = [(text,) for text in SENTENCES] if data is None else data.texts
    if data is not None and data.labels is not None and len(data.labels) != len(texts):
        raise MoQError(f"{len(texts)} texts need as many labels, not {len(data.labels)}")
    if len(texts) < 2:
        raise MoQError("the comparison needs at least two sentences")
    accepted = inspect.signature(type(model).forward).parameters
    positions = getattr(model.config, "max_position_embeddings", max_length)
    limit = min(max_length, positions, tokenizer.model_max_length)
    batches = []
    for start in range(0, len(texts), 16):
        columns = [list(column) for column in zip(*texts[start : start + 16], strict=True)]
        encoded = tokenizer(*columns, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        batches.append({name: encoded[name] for name in tokenizer.model_input_names if name in accepted})
    first = batches[0]["input_ids"]
    if first.shape[1] < 2:
        raise MoQError("the comparison needs sentences of two tokens or more")
    return batches, None if data is None else data.labels


_TASKS = {
    "cola": ("matthews_correlation",),
    "mnli": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
    "stsb": ("pearson", "spearmanr"),
    "wnli": ("accuracy",),
}


def metrics_of(outputs: Sequence[Tensor], labels: Sequence[float] | None, data: Data | None) -> dict[str, float]:
    """GLUE's metrics of the outputs, where the data has labels."""
    if labels is None or outputs[0].dim() != 2:
        return {}
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    logits = torch.cat(list(outputs)).numpy()
    single = logits.shape[1] == 1
    task = data.task if data is not None else None
    wanted = _TASKS[task] if task is not None else _TASKS["stsb" if single else "sst2"]
    if not single and any(label != int(label) for label in labels):
        raise MoQError(f"labels must be class ids for a model with {logits.shape[1]} outputs")
    if single != (wanted[0] == "pearson") or (
        logits.shape[1] > 2 and {"f1", "matthews_correlation"}.intersection(wanted)
    ):
        raise MoQError(f"the task {task} does not fit a model with {logits.shape[1]} outputs")
    if not single and not all(0 <= label < logits.shape[1] for label in labels):
        raise MoQError(f"labels must be 0 to {logits.shape[1] - 1} for a model with {logits.shape[1]} outputs")
    predicted = logits[:, 0] if single else logits.argmax(1)
    functions: dict[str, Any] = {
        "accuracy": lambda: accuracy_score(labels, predicted),
        "f1": lambda: f1_score(labels, predicted),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predicted),
        "pearson": lambda: pearsonr(labels, predicted)[0],
        "spearmanr": lambda: spearmanr(labels, predicted)[0],
    }
    return {name: float(functions[name]()) for name in wanted}


def name_of(model: str) -> str:
    """The file beside a model that holds its weights, if they are large."""
    return f"{model}.data"
