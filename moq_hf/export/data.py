"""The texts, or pictures, on which exported models are compared with the checkpoint."""

import inspect
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import MoQError
from .metrics import TASKS

_BATCH = 16
# Pictures that are compared, and their side where neither the model nor its processor says it.
_PICTURES, _SIDE = 8, 224


@dataclass(frozen=True)
class Data:
    """What the models are compared on.

    Attributes:
        texts: One or two texts per example.
        labels: Class ids or scores; None if there are none.
        task: GLUE's name, for the metric.

    >>> Data([("A good film.",), ("A bad one.",)], [1, 0], "sst2").task
    'sst2'
    """

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[float] | None = None
    task: str | None = None


# Where the caller brings none: of several lengths, so that the padding is tested too.
SENTENCES = Data(
    [
        ("A quiet film that stays with you.",),
        ("The plot makes no sense and the actors seem to know it.",),
        ("He said that the meeting had been moved to Thursday because two of the speakers were late.",),
        ("Prices rose by three percent in March.",),
        ("Who wrote this?",),
        ("The committee, which had met twice since the spring, could not agree on a date, a place or an agenda.",),
        ("I would not call it good, but I would watch it again.",),
        ("No.",),
        ("Rain fell on the hills all night, and in the morning the river was over its banks.",),
        ("The company said that its new engine uses a third less fuel than the one it replaces.",),
        ("It was the best and the worst of their ideas.",),
        ("Please send the report by noon.",),
    ]
)


def read_data(path: str | os.PathLike[str], task: str | None = None) -> Data:
    """Rows of JSON lines: one or two texts under any names, in their order, and `label`, a class id or a score.

    Args:
        path: The file.
        task: GLUE's name, which chooses the metric.

    Raises:
        MoQError: There is no such file, or a line is no such row; names the line.
    """
    if task is not None and task not in TASKS:
        raise MoQError(f"task {task!r} is none of GLUE's: {', '.join(TASKS)}")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MoQError(f"cannot read {os.fspath(path)}: {error}") from error
    rows = [_row(f"{os.fspath(path)}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise MoQError(f"{os.fspath(path)} holds no rows")
    texts, labels = [text for text, _ in rows], [label for _, label in rows]
    if len({len(text) for text in texts}) > 1 or len({label is None for label in labels}) > 1:
        raise MoQError(f"{os.fspath(path)}: all rows must have as many texts, and all a label or none")
    return Data(texts, None if labels[0] is None else cast(list[float], labels), task)


def _row(where: str, line: str) -> tuple[tuple[str, ...], float | None]:
    try:
        row = json.loads(line)
        text = tuple(value for name, value in row.items() if isinstance(value, str) and name != "label")
        label = row.get("label")
        if isinstance(label, float) and not math.isfinite(label):
            raise ValueError
    except (ValueError, AttributeError):
        text, label = (), None
    if not 1 <= len(text) <= 2 or (label is not None and not isinstance(label, (int, float))):
        raise MoQError(f'{where}: must be a JSON object with one or two texts and a number "label"')
    return text, label


def pictures_of(model: Any, processor: Path | None) -> list[dict[str, Tensor]]:
    """Random pictures as a batch of the model's inputs, float32 `[8, channels, height, width]`, normally distributed.

    Args:
        model: Whose config may say how large a picture is.
        processor: The file that says how pictures are prepared, which may say it too; else they are of 224 pixels.
    """
    size = getattr(model.config, "image_size", None)
    if size is None and processor is not None:
        settings = json.loads(processor.read_text(encoding="utf-8"))
        sizes = settings.get("crop_size") or settings.get("size") or {}
        size = (
            sizes if isinstance(sizes, int) else [sizes.get(n, sizes.get("shortest_edge")) for n in ("height", "width")]
        )
    sides = [size, size] if isinstance(size, int) else list(size or [])
    height, width = sides if len(sides) == 2 and all(isinstance(side, int) for side in sides) else (_SIDE, _SIDE)
    shape = (_PICTURES, getattr(model.config, "num_channels", 3), height, width)
    return [{"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0))}]


def batches_of(model: Any, tokenizer: Any, data: Data, max_length: int) -> list[dict[str, Tensor]]:
    """The data as batches of the model's inputs, int64 `[examples, tokens]`.

    Raises:
        MoQError: There are too few examples or tokens, or not as many labels as texts.
    """
    texts = data.texts
    if data.labels is not None and len(data.labels) != len(texts):
        raise MoQError(f"{len(texts)} texts need as many labels, not {len(data.labels)}")
    if len(texts) < 2:
        raise MoQError("the comparison needs at least two sentences")
    accepted = inspect.signature(type(model).forward).parameters
    positions = getattr(model.config, "max_position_embeddings", max_length)
    limit = min(max_length, positions, tokenizer.model_max_length)
    batches = []
    for start in range(0, len(texts), _BATCH):
        columns = [list(column) for column in zip(*texts[start : start + _BATCH], strict=True)]
        encoded = tokenizer(*columns, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        batches.append({name: encoded[name] for name in tokenizer.model_input_names if name in accepted})
    if batches[0]["input_ids"].shape[1] < 2:
        raise MoQError("the comparison needs sentences of two tokens or more")
    return batches
