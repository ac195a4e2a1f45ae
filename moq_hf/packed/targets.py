"""Which modules a config group is for: patterns that hold in transformers and in servers, which rename and fuse layers.

A server puts other prefixes before a name, other modules between a block and its layer, and several layers into one:
vLLM looks for `model.layers.0.self_attn.q_proj` in a model that has `qkv_proj`, and for BERT's `query` in the module
`output`. So a pattern has the list of blocks, the numbers of the blocks, and the last part of the layer's name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from ..names import is_below

# Whatever stands before, and between two parts of a name.
_ANY = r"(?:.*\.)?"
# SGLang asks for the layer that it makes of these in BERT; vLLM and SGLang look others up by their parts.
_FUSED = ("query", "key", "value")


class Patterns:
    r"""Patterns for the layers of one model.

    Args:
        names: Every module that a pattern could match, by the name that it has in the files.
        lists: Names of the lists of blocks.
        prefix: Name of the base model, which a model with another head may have or not.

    >>> names = ["model.layers.0.q_proj", "model.layers.1.q_proj", "lm_head"]
    >>> Patterns(names, {"model.layers": 2}, "model").of({"group_0": names[:2]}, names[2:])
    ({'group_0': ['re:(?:.*\\.)?layers\\.\\d+\\.q_proj$']}, ['re:(?:.*\\.)?lm_head$'])
    """

    def __init__(self, names: Iterable[str], lists: Mapping[str, int], prefix: str) -> None:
        self.names = list(names)
        self.prefix = f"{prefix}." if prefix else ""
        paths = [path.split(".") for path in lists]
        self.lists = {path: (_own_end(path.split("."), paths), count) for path, count in lists.items()}

    def of(self, groups: Mapping[str, Sequence[str]], left: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
        """The targets of each group, and what is to be ignored.

        Args:
            groups: Names of the modules of each group.
            left: Names of linear layers that are in no group.

        Returns:
            Patterns after "re:", which match the names as `re.match` does. Where they would not tell the groups apart,
            the names.
        """
        owners = {name: group for group, members in groups.items() for name in members}
        tails = self._tails({name: owners.get(name) for name in (*owners, *left)})
        targets = {group: self._patterns(members, tails) for group, members in groups.items()}
        ignore = self._patterns(left, tails)
        if self._holds(targets, ignore, owners):
            return targets, ignore
        return {group: list(members) for group, members in groups.items()}, list(left)

    def _place(self, name: str) -> tuple[str, str, list[str]] | None:
        """List, number and the rest of the name of a layer in a block."""
        path = next((path for path in self.lists if is_below(name, path) and name != path), None)
        if path is None:
            return None
        index, *rest = name[len(path) + 1 :].split(".")
        return path, index, rest

    def _tails(self, owners: Mapping[str, str | None]) -> dict[str, str]:
        """As few of the last parts of each name as show its group among the layers of its block."""
        found: dict[tuple[str, str, str], set[str | None]] = {}
        places = {name: place for name in owners if (place := self._place(name)) is not None}
        for name, (path, index, rest) in places.items():
            for k in range(1, len(rest) + 1):
                found.setdefault((path, index, ".".join(rest[-k:])), set()).add(owners[name])
        tails = {}
        for name, (path, index, rest) in places.items():
            ends = (".".join(rest[-k:]) for k in range(1, len(rest)))
            short = next((end for end in ends if len(found[path, index, end]) == 1), None)
            # A whole rest has nothing between it and its block.
            tails[name] = ".".join(rest) if short is None else f"*{short}"
        return tails

    def _patterns(self, members: Sequence[str], tails: Mapping[str, str]) -> list[str]:
        places: dict[tuple[str, str], dict[str, None]] = {}
        patterns = []
        for name in members:
            place = self._place(name)
            if place is None:
                patterns.append(f"re:{_ANY}{re.escape(name.removeprefix(self.prefix))}$")
            else:
                places.setdefault((place[0], tails[name]), {})[place[1]] = None
        # Layers of the same blocks have one pattern.
        shared: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
        for (path, tail), numbers in places.items():
            key = (path, tuple(numbers), tail.startswith("*"))
            shared.setdefault(key, []).append(re.escape(tail.removeprefix("*")))
        for (path, indices, is_short), ends in shared.items():
            if set(_FUSED) <= set(ends):
                ends.append("qkv_proj")
            end, count = self.lists[path]
            number = r"\d+" if len(indices) == count else _either(indices)
            patterns.append(f"re:{_ANY}{end}\\.{number}\\.{_ANY if is_short else ''}{_either(ends)}$")
        return _needed(patterns, members)

    def _holds(self, targets: Mapping[str, Sequence[str]], ignore: Sequence[str], owners: Mapping[str, str]) -> bool:
        """Whether each name has the group that it belongs to and no other."""
        for name in self.names:
            matching = {group for group, patterns in targets.items() if _matches(name, patterns)}
            ignored = _matches(name, ignore)
            if (matching != {owners[name]} or ignored) if name in owners else (matching and not ignored):
                return False
        return True


def _needed(patterns: Sequence[str], members: Sequence[str]) -> list[str]:
    """Without those that match no layer which another one does not: loading warns of them."""
    kept = list(patterns)
    for pattern in patterns:
        others = [other for other in kept if other != pattern]
        if all(_matches(name, others) for name in members if _matches(name, [pattern])):
            kept = others
    return kept


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"(?:{'|'.join(words)})"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.match(pattern.removeprefix("re:"), name) for pattern in patterns)


def _own_end(path: list[str], paths: Sequence[list[str]]) -> str:
    """As few of the last parts of a list's name as no other list has."""
    for k in range(1, len(path) + 1):
        if sum(other[-k:] == path[-k:] for other in paths) == 1:
            return rf"\.{_ANY}".join(re.escape(part) for part in path[-k:])
    return re.escape(".".join(path))
