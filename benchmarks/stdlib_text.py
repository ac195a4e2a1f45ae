"""The text of Python's standard library: docstrings and comments of its modules, for `perplexity.py`; their sources.

It is on every machine that has Python and is free to use. Tests are left out, and so is `encodings`, whose comments are
tables of characters. A module is held out for validation by a hash of its name alone.
"""

import ast
import hashlib
import io
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings"}
SHARE = 10  # One module in so many is held out.


@dataclass(frozen=True)
class Corpus:
    """The text of each module by its name, in two parts."""

    train: dict[str, str]
    validation: dict[str, str]

    def digest(self) -> str:
        """12 characters that tell two corpora apart."""
        total = hashlib.sha256()
        for part in (self.train, self.validation):
            for name, text in sorted(part.items()):
                total.update(f"{name}\0{text}\0".encode())
        return total.hexdigest()[:12]


def read(root: Path | None = None) -> Corpus:
    """The modules under a folder; None is this Python's standard library."""
    corpus = Corpus({}, {})
    for name, source in sources(root):
        text = "\n".join(line for _, line in sorted((*docstrings(source), *_comments(source))))
        if text:
            part = corpus.validation if is_held_out(name) else corpus.train
            part[name] = text
    return corpus


def is_held_out(name: str) -> bool:
    """Whether a module is for validation, for instance "asyncio.tasks"."""
    return hashlib.sha256(name.encode()).digest()[0] % SHARE == 0


def sources(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Name and source of each module under a folder; None is this Python's standard library."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if not LEFT_OUT & set(place.parts):
            yield ".".join(place.with_suffix("").parts), path.read_text(encoding="utf-8")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.strip("#").strip()
        if token.type == tokenize.COMMENT and text:
            yield token.start[0], text
