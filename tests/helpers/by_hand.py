"""Documents changed by hand: every place in one, and values that belong nowhere."""

import math
from collections.abc import Iterator
from typing import Any


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    if path:
        yield path
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield from places(value, (*path, key))


WRONG: list[Any] = [None, -1, 0, 1.5, 10**400, math.inf, math.nan, "x", True, [], [[]], {}, {"x": None}]
