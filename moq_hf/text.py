"""Formats tables, numbers and metrics for the terminal, the model card and the report."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

# The Trainer logs these beside the metrics of an evaluation; `_mm` marks those of MNLI's
# mismatched part.
_NO_METRIC = re.compile(
    r"^(epoch|step|total_flos)(_mm)?$"
    r"|(^|_)(runtime|samples|per_second|model_preparation_time)(_mm)?$"
)


_NO_SCORES = ("entropy", "num_tokens")


def progress(items: Iterable[T], what: str) -> Iterable[T]:
    """Iterate with a progress bar, if stderr is a terminal."""
    found: Iterable[T] = tqdm(items, what, leave=False, disable=None)
    return found


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lay rows out in columns for a terminal.

    Args:
        rows: Rows of the same length.
        left: The columns to align left; the others, with numbers, are aligned right.

    >>> print(table([["layer", "bits"], ["query", "4"], ["dense", "16"]]))
    layer  bits
    query     4
    dense    16
    """
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        align = str.ljust if number in left else str.rjust
        columns.append([align(cell, width) for cell in cells])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[object]]) -> str:
    """Write rows as a Markdown table.

    >>> print(markdown_table([["layer", "bits"], ["query", 4]]))
    | layer | bits |
    | --- | --- |
    | query | 4 |
    """
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype without `torch.`.

    >>> import torch
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def quoted(path: object) -> str:
    """Write a path as a string literal.

    >>> print(quoted("runs/4-bits"))
    "runs/4-bits"
    """
    return json.dumps(str(path), ensure_ascii=False)


def counted(number: int, what: str) -> str:
    """Write a number with its noun, in the plural if need be.

    >>> counted(1, "block"), counted(3, "block")
    ('1 block', '3 blocks')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def megabytes(count: int) -> str:
    """Write a number of bytes in megabytes (10^6 bytes), with at least three digits.

    >>> megabytes(17_736_000), megabytes(119_000)
    ('17.7 MB', '0.119 MB')
    """
    return f"{count / 1e6:#.3g} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def metrics_in(logged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation: finite numbers, by their names without `eval_`.

    >>> metrics_in({"eval_f1": 0.91, "eval_runtime": 3.0, "eval_odd": float("nan"), "epoch": 3.0})
    {'f1': 0.91}
    """
    return {
        name.removeprefix("eval_"): value
        for name, value in logged.items()
        if not _NO_METRIC.search(name)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        # False for NaN; an integer may be too large for a float.
        and abs(value) <= sys.float_info.max
    }


def evaluation_in(logged: Mapping[str, Any]) -> dict[str, float]:
    """As `metrics_in`, without what TRL tells of the text.

    >>> evaluation_in({"eval_loss": 2.5, "eval_entropy": 1.25, "eval_num_tokens": 4096.0})
    {'loss': 2.5}
    """
    found = metrics_in(logged)
    return {name: found[name] for name in found if name not in _NO_SCORES}
