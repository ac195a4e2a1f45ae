"""JSON files that a hand may have changed: a value is of the kind that is asked for, or one error names its key."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import LARGEST
from .errors import MoQError, one_line, show, show_key


@dataclass(frozen=True)
class Entry:
    """A value in a document.

    Attributes:
        value: As JSON gave it.
        where: What the document is, for an error.
        key: Where in it, dotted.
    """

    value: Any
    where: str
    key: str = ""

    def __getitem__(self, name: str) -> "Entry":
        mapping = self.mapping()
        if name not in mapping:
            raise MoQError(f"{self.where}: {self._key(name)} is missing")
        return mapping[name]

    def get(self, name: str) -> "Entry":
        """The value of that name in an object of keys; one of None if there is none.

        Raises:
            MoQError: It is not an object.
        """
        return self.mapping().get(name, Entry(None, self.where, self._key(name)))

    @property
    def is_null(self) -> bool:
        """Whether there is no value."""
        return self.value is None

    def mapping(self) -> dict[str, "Entry"]:
        """The values of an object by their keys.

        Raises:
            MoQError: It is not an object.
        """
        if not isinstance(self.value, Mapping):
            raise self.fault("an object of keys")
        return {name: Entry(value, self.where, self._key(name)) for name, value in self.value.items()}

    def items(self, length: int | None = None) -> list["Entry"]:
        """The values of a list.

        Raises:
            MoQError: It is not a list, or not of this length.
        """
        if not isinstance(self.value, (list, tuple)) or length not in (None, len(self.value)):
            raise self.fault("a list" if length is None else f"a list of {length}")
        return [Entry(value, self.where, self._key(str(index))) for index, value in enumerate(self.value)]

    def whole(self, low: int = 0, high: int = LARGEST) -> int:
        """A whole number.

        Raises:
            MoQError: It is none from `low` to `high`.
        """
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not low <= self.value <= high:
            raise self.fault(f"a whole number from {low}" + ("" if high >= LARGEST else f" to {high}"))
        return self.value

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number.

        Raises:
            MoQError: It is none from `low` to `high`.
        """
        value = self.value
        # Compared exactly, where a whole number may be too large for a float.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise self.fault("a finite number")
        if not low <= value <= high:
            raise self.fault(f"a number from {low:g}" + ("" if high == math.inf else f" to {high:g}"))
        return value

    def text(self) -> str:
        """A text.

        Raises:
            MoQError: It is none.
        """
        if not isinstance(self.value, str):
            raise self.fault("text")
        return self.value

    def word(self, *words: str) -> str:
        """One of these words.

        Raises:
            MoQError: It is none.
        """
        if not isinstance(self.value, str) or self.value not in words:
            raise self.fault(" or ".join(words))
        return self.value

    def flag(self) -> bool:
        """True or false.

        Raises:
            MoQError: It is neither.
        """
        if not isinstance(self.value, bool):
            raise self.fault("true or false")
        return self.value

    def fault(self, legal: str) -> MoQError:
        """The error that says what it must be."""
        return MoQError(f"{self.where}: {self.key or 'it'} must be {legal}, not {show(self.value)}")

    def _key(self, name: str) -> str:
        return f"{self.key}.{show_key(name)}" if self.key else show_key(name)


def read_json(path: Path) -> Entry:
    """The object in a JSON file.

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
    return Entry(document, str(path))
