"""JSON files that a hand may have changed: what they hold is as its type says, or one error names file and key."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import MoQError, one_line, show, show_key


def checked(kind: Any, value: Any, where: str, key: str = "") -> Any:
    """Read a value of a document as a type of pydantic's.

    Args:
        kind: The type.
        value: As JSON gave it.
        where: What the document is, for an error.
        key: Where in it the value stands, dotted.

    Raises:
        MoQError: It is none; says what it must be.

    >>> checked(dict[str, int], {"a": {"b": 1}}, "moq.json", "bits")
    Traceback (most recent call last):
    moq_hf.errors.MoQError: moq.json: bits.a must be a valid integer, not {"b": 1}
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
    place = ".".join(show_key(str(part)) for part in (key, *found["loc"]) if part != "") or "it"
    if found["type"] == "missing":
        raise MoQError(f"{where}: {place} is missing")
    legal = found["msg"].removeprefix("Input should be ")
    if legal == found["msg"]:
        raise MoQError(f"{where}: {place}: {legal}")
    raise MoQError(f"{where}: {place} must be {legal}, not {show(found['input'])}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        MoQError: It cannot be read or holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise MoQError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise MoQError(f"{path} is damaged: it must hold an object of keys")
    return document
