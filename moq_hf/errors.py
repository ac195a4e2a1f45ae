"""The errors that users see, and how a value is shown in one."""

import json
from collections.abc import Sequence
from typing import Any


class MoQError(ValueError):
    """Something that the user can put right; the text says what, where and how.

    >>> import moq_hf
    >>> moq_hf.verify_quantized("nowhere")
    Traceback (most recent call last):
    moq_hf.errors.MoQError: nowhere is not a directory
    """


class MoQConfigError(MoQError):
    """A config that cannot be used: one line for each thing that is wrong with it.

    >>> import moq_hf
    >>> moq_hf.MoQConfig.from_dict({"quantize_bits": {"start_bits": 12, "target_bit": 4}, "seed": -1})
    Traceback (most recent call last):
    moq_hf.errors.MoQConfigError: MoQ config: 3 things are wrong
    ...
    """


# Of the things that are wrong with a file, that many are listed one by one.
MOST_FAULTS = 20


def show(value: Any) -> str:
    """A value as JSON has it, cut short, for an error."""
    # Of what is long only the beginning is shown, and need not be written.
    if isinstance(value, (str, list, tuple)):
        value = value[:80]
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def show_key(path: str) -> str:
    """A key, cut short, for an error."""
    if not path.isprintable():
        return show(path)
    return path if len(path) <= 80 else path[:77] + "..."


def listed(keys: Sequence[str]) -> str:
    """Keys in a row, cut short, for an error."""
    more = f" and {len(keys) - MOST_FAULTS} more" if len(keys) > MOST_FAULTS else ""
    return ", ".join(map(show_key, keys[:MOST_FAULTS])) + more


def one_line(error: BaseException, *, named: bool = False) -> str:
    r"""The text of an exception in one line; the name of its class if it has no text.

    >>> one_line(ValueError("no such\n  file")), one_line(KeyError())
    ('no such file', 'KeyError')
    >>> one_line(ValueError("no such file"), named=True)
    'ValueError: no such file'
    """
    text, name = " ".join(str(error).split()), type(error).__name__
    return ": ".join(filter(None, [name if named or not text else "", text]))
