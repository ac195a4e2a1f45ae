"""Errors for users, the way they show values, and reading JSON files that may have been edited by hand."""

import contextlib
import importlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError


class MoQError(ValueError):
    """Something that the user can put right; the message says what is wrong, where, and how to fix it.

    >>> import moq_hf
    >>> moq_hf.verify_quantized("nowhere")
    Traceback (most recent call last):
    moq_hf.errors.MoQError: nowhere is not a directory
    """


class MoQConfigError(MoQError):
    """A config that cannot be used; the message has a line for each thing that is wrong with it.

    >>> import moq_hf
    >>> moq_hf.MoQConfig.from_dict({"bits": 4, "strat_bits": 12, "seed": -1})
    Traceback (most recent call last):
    moq_hf.errors.MoQConfigError: MoQ config: 2 things are wrong
    ...
    """


# The number of names that an error lists before "and N more".
MOST_FAULTS = 20


def show(value: Any) -> str:
    """Show a value as JSON, shortened for an error."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return _cut(text)


def show_key(path: str) -> str:
    """Show a key, shortened for an error."""
    return _cut(path) if path.isprintable() else show(path)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def check_choice(option: str, value: object, legal: Collection[object]) -> None:
    """Check that an argument is one of its legal values.

    Raises:
        MoQError: It is not; lists them.
    """
    if value not in legal:
        raise MoQError(
            f"{option} must be one of {', '.join(map(str, legal))}, got {value!r}"
        )


def listed(keys: Sequence[str], most: int = MOST_FAULTS) -> str:
    """List at most `most` keys, each shortened, for an error.

    >>> listed(["query", "key", "value"], 2)
    'query, key and 1 more'
    """
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(map(show_key, keys[:most])) + more


def either(values: Iterable[Any]) -> str:
    """List values, sorted and without repetition, with "or" before the last.

    >>> either([8, 4, 2, 4])
    '2, 4 or 8'
    """
    words = list(map(str, sorted(set(values))))
    if len(words) > 1:
        words = [", ".join(words[:-1]), words[-1]]
    return " or ".join(words)


def shortened(names: Iterable[str], most: int = 3) -> str:
    """List at most `most` names of layers; names that differ only in the numbers of their blocks are shown as one.

    >>> shortened(["layers.0.q", "layers.1.q", "layers.2.q", "head"])
    'layers.*.q (3), head'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    shown = [
        alike_names[0] if len(alike_names) == 1 else f"{alike} ({len(alike_names)})"
        for alike, alike_names in groups.items()
    ]
    return listed(shown, most)


def one_line(error: BaseException, *, named: bool = False) -> str:
    r"""Put the message of an exception in one line, or the name of its class if it has none.

    >>> one_line(ValueError("no such\n  file")), one_line(KeyError())
    ('no such file', 'KeyError')
    >>> one_line(ValueError("no such file"), named=True)
    'ValueError: no such file'
    """
    text = " ".join(str(error).split())
    name = type(error).__name__
    if not text:
        return name
    return f"{name}: {text}" if named else text


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an exception of other code into a `MoQError` that says what failed.

    Args:
        what: The beginning of the message.

    Raises:
        MoQError: An exception was raised inside.

    >>> with explained("model.onnx cannot be run"):
    ...     raise KeyError("bits")
    Traceback (most recent call last):
    moq_hf.errors.MoQError: model.onnx cannot be run: KeyError: 'bits'
    """
    try:
        yield
    except MoQError:
        raise
    except Exception as error:
        raise MoQError(f"{what}: {one_line(error, named=True)[:300]}") from error


def require(extra: str, *libraries: str) -> None:
    """Check that the libraries of an extra can be imported.

    Args:
        extra: The name of an extra of moq_hf that has them.
        libraries: The names of the modules.

    Raises:
        MoQError: One is not installed; has the command that installs it.
    """
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError:
            raise MoQError(
                f"{library} is not installed: pip install {_libraries_of(extra, libraries)}"
            ) from None


def _libraries_of(extra: str, modules: Iterable[str]) -> str:
    """What pip installs for an extra, which has other names in a clone, a wheel and an index."""
    mark = re.compile(rf"""extra == ["']{extra}["']$""")
    with contextlib.suppress(PackageNotFoundError):
        needed = [
            f"'{requirement.partition(';')[0].strip()}'"
            for requirement in requires("moq_hf") or ()
            if mark.search(requirement) and not requirement.startswith("moq_hf[")
        ]
        if needed:
            return " ".join(needed)
    return " ".join(modules)


def read_as(kind: Any, value: Any, where: str, key: str = "") -> Any:
    """Validate a value of a JSON document.

    Args:
        kind: A type that pydantic can validate.
        value: The value, as JSON gave it.
        where: The name of the document, for an error.
        key: The dotted path of the value in the document.

    Raises:
        MoQError: The value is not of the type; says what it must be.

    >>> read_as(dict[str, int], {"a": {"b": 1}}, "moq.json", "bits")
    Traceback (most recent call last):
    moq_hf.errors.MoQError: moq.json: bits.a must be a valid integer, not {"b": 1}
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    parts = [show_key(str(part)) for part in (key, *fault["loc"]) if part != ""]
    place = ".".join(parts) or "it"
    if fault["type"] == "missing":
        raise MoQError(f"{where}: {place} is missing")
    legal = fault["msg"].removeprefix("Input should be ")
    if legal == fault["msg"]:
        raise MoQError(f"{where}: {place}: {legal}")
    raise MoQError(f"{where}: {place} must be {legal}, not {show(fault['input'])}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        MoQError: It cannot be read, or does not hold an object.
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


def write_json(path: Path, document: Mapping[str, Any], indent: int = 2) -> None:
    """Write an object into a JSON file."""
    path.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")
