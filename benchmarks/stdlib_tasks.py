"""Two tasks that are made from the sources of Python's standard library, for `tasks_study.py`.

- roles: which role does each name of a piece of code have? Keywords, punctuation, literals, comments and docstrings are
  left out, and so are capitals and the underscores around a name. What is left is a row of names.
- spans: a question about a function, whose answer is a part of its source.

As in `stdlib_text.py`, a module is held out by a hash of its name. So every machine with the same Python has the same
rows.
"""

import ast
import hashlib
import io
import keyword
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stdlib_text import is_held_out, sources

# The first one is a name that is read, and what has no role of its own.
ROLES = ("other", "function", "class", "parameter", "argument", "call", "attribute", "assigned", "import")
LONGEST = 80  # Characters of an answer.

Place = tuple[int, int]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Question(NamedTuple):
    """A row of "spans"; the answer is `context[start:end]`."""

    kind: str
    question: str
    context: str
    start: int
    end: int

    @property
    def answer(self) -> str:
        """Its text."""
        return self.context[self.start : self.end]


@dataclass(frozen=True)
class Part:
    """What the modules for training, or those for validation, hold, by their names."""

    roles: dict[str, list[tuple[str, str]]]
    spans: dict[str, list[Question]]

    def digest(self) -> str:
        """12 characters that tell two of them apart."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


def read(root: Path | None = None) -> tuple[Part, Part]:
    """The modules under a folder, for training and for validation; None is this Python's standard library."""
    parts = Part({}, {}), Part({}, {})
    for name, source in sources(root):
        part = parts[is_held_out(name)]
        part.roles[name] = roles_of(source)
        part.spans[name] = list(questions_of(source))
    return parts


def roles_of(source: str) -> list[tuple[str, str]]:
    """Each name of a module in its order, with its role."""
    lines = Lines(source)
    places, imports = {}, []
    for node in _outside_strings(ast.parse(source)):
        match node:
            case ast.Import() | ast.ImportFrom():
                imports.append((lines.start(node), lines.end(node)))
            case ast.arg():
                places[lines.start(node)] = "parameter"
            case ast.keyword(arg=str()):
                places[lines.start(node)] = "argument"
            case ast.Name(ctx=ast.Store()):
                places[lines.start(node)] = "assigned"
            case ast.Attribute():
                places.setdefault(lines.last_name(node), "attribute")
            case ast.Call(func=ast.Name() | ast.Attribute() as called):
                places[lines.last_name(called)] = "call"
    result, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        word = token.string.strip("_").lower()
        if token.type == tokenize.NAME and word and not keyword.iskeyword(token.string):
            imported = any(start <= token.start < end for start, end in imports)
            role = {"def": "function", "class": "class"}.get(before, places.get(token.start, ROLES[0]))
            result.append((word, "import" if imported else role))
        before = token.string
    return result


def questions_of(source: str) -> Iterator[Question]:
    """What can be asked about the functions of a module, if its answer is unique and not long."""
    lines = Lines(source)
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, Function):
            begin, end = lines.offset(lines.start(function)), lines.offset(lines.end(function))
            cut_from, cut_to = begin, begin
            if ast.get_docstring(function) is not None:
                cut_from, cut_to = (lines.offset(place(function.body[0])) for place in (lines.start, lines.end))
            text = source[begin:cut_from] + source[cut_to:end]
            asked = list(_asked(function))
            unique = Counter(question for _, question, _ in asked)
            for kind, question, answer in asked:
                first, last = (lines.offset(place(answer)) - begin for place in (lines.start, lines.end))
                shift = cut_to - cut_from if first + begin >= cut_to else 0
                if unique[question] == 1 and last - first <= LONGEST:
                    yield Question(kind, question, text, first - shift, last - shift)


class Lines:
    """Places in a source, as `tokenize` counts them: a line from 1, a character from 0."""

    def __init__(self, source: str) -> None:
        # `ast` ends a line where `tokenize` does, and not at all the places where `splitlines` does.
        self._lines = source.split("\n")
        self._before = [0]
        for line in self._lines:
            self._before.append(self._before[-1] + len(line) + 1)

    def start(self, node: ast.expr | ast.stmt | ast.arg | ast.keyword) -> Place:
        """Where a node begins."""
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> Place:
        """Where it ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def last_name(self, node: ast.Name | ast.Attribute) -> Place:
        """Where its only or last name begins."""
        line, column = self.end(node)
        return line, column - len(node.id if isinstance(node, ast.Name) else node.attr)

    def offset(self, place: Place) -> int:
        """Characters from the beginning of the source."""
        return self._before[place[0] - 1] + place[1]

    def _place(self, line: int, column: int) -> Place:
        # The columns of `ast` are bytes.
        return line, len(self._lines[line - 1].encode()[:column].decode())


def _outside_strings(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one in their order; those in formatted strings have no place that can be relied on."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _outside_strings(child)


def _asked(function: Function) -> Iterator[tuple[str, str, ast.expr]]:
    """Questions about a function: the kind, the text and the node of an answer."""
    name, given = function.name, function.args
    positional = [*given.posonlyargs, *given.args]
    for parameter, value in (
        *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ):
        if value is not None:
            yield "default", f"what is the default of {parameter.arg} in {name}?", value
    for node in _of_its_own(function):
        match node:
            case ast.Return(value=ast.expr() as value):
                yield "result", f"what does {name} return?", value
            case ast.Raise(exc=ast.Call(func=value) | (ast.Name() as value)):
                yield "error", f"which error does {name} raise?", value
            case ast.For(iter=value):
                yield "loop", f"what does {name} loop over?", value
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                yield "value", f"what is {target} set to in {name}?", value
            case ast.If(test=value, body=[ast.Raise(), *_]):
                yield "condition", f"when does {name} raise an error?", value


def _of_its_own(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function's body that are not another function's."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop(0)
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            left[:0] = ast.iter_child_nodes(node)
