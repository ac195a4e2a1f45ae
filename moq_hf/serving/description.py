"""What a server has to know of a model: made before training from its inventory, and of a folder from its files."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedule import FLOAT_BITS


@dataclass(frozen=True)
class Weight:
    """A quantized weight as a server meets it.

    Attributes:
        kind: "linear", "conv1d" or "embedding".
        rows: Of the weight as it is quantized: `out_features`.
        columns: `in_features`.
        bits: 1 to 16, or 32 for one that is not quantized.
        group_size: Weights of a row that share a scale; None if whole rows share one.
        symmetric: Whether the grid is.
        packed: Whether codes are in the file; otherwise floats are, or bytes.

    >>> Weight("linear", 8, 64, 4, 32).is_float
    False
    """

    kind: str
    rows: int
    columns: int
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    packed: bool = True

    @property
    def is_float(self) -> bool:
        """Whether a server meets floats."""
        return self.bits == FLOAT_BITS or (not self.packed and self.kind != "embedding")

    def grid(self) -> str:
        """The grid in words.

        >>> Weight("linear", 8, 64, 4, 32, symmetric=False).grid()
        '4 bits asymmetric in groups of 32'
        """
        if self.is_float:
            return "floats"
        kind = "" if self.symmetric else " asymmetric"
        return f"{self.bits} bits{kind} " + (f"in groups of {self.group_size}" if self.group_size else "per channel")


@dataclass(frozen=True)
class Description:
    """A model as a server meets it.

    Attributes:
        architecture: The name of the model's class.
        weights: Quantized weights by the name of their module.
        floats: Names of other modules with weights.
        is_encoder_decoder: Whether there is an encoder beside the decoder.
        quantization: `quantization_config` of a folder's `config.json`; None before training, and for floats.
        tensors: Names of a folder's tensors.
        unserved: Why plain transformers does not compute what was evaluated; None if it does, or nobody tried.
        scales: Dtype of the scales in the file.
    """

    architecture: str
    weights: Mapping[str, Weight]
    floats: Collection[str] = ()
    is_encoder_decoder: bool = False
    quantization: Mapping[str, Any] | None = None
    tensors: Collection[str] = ()
    unserved: str | None = None
    scales: str = "float32"

    @property
    def integers(self) -> dict[str, Weight]:
        """The weights that are not floats in the file."""
        return {name: weight for name, weight in self.weights.items() if not weight.is_float}

    def packed(self) -> dict[str, Weight]:
        """Linear layers with packed codes."""
        return {name: weight for name, weight in self.integers.items() if weight.kind != "embedding"}

    def siblings(self, names: Sequence[str]) -> Iterator[dict[str, Weight | None]]:
        """Layers of one parent that have these names, where two or more are there; None for a float one."""
        known: dict[str, Weight | None] = {**dict.fromkeys(self.floats), **self.weights}
        for name in known:
            if f".{name}".endswith(f".{names[0]}"):
                paths = [name.removesuffix(names[0]) + other for other in names]
                found = {path: known[path] for path in paths if path in known}
                if len(found) > 1:
                    yield {n: None if weight is None or weight.is_float else weight for n, weight in found.items()}


@dataclass(frozen=True)
class Reason:
    """Why a server does not take a model.

    Attributes:
        text: A sentence without its full stop.
        instead: What would be served.
        layers: Whom it is about; empty for the whole model.
    """

    text: str
    instead: str
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = f" ({shortened(self.layers)})" if self.layers else ""
        return f"{self.text}{about}; {self.instead}"


def shortened(layers: Sequence[str], most: int = 3) -> str:
    """Names of layers, with numbers of blocks left out where they differ in nothing else.

    >>> shortened(["layers.0.q", "layers.1.q", "layers.2.q", "head"])
    'layers.*.q (3), head'
    """
    groups: dict[str, list[str]] = {}
    for name in layers:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    shown = [names[0] if len(names) == 1 else f"{alike} ({len(names)})" for alike, names in groups.items()]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


Rule = Callable[[Description, "Server"], Iterator[Reason]]


@dataclass(frozen=True)
class Server:
    """What a server takes, as it was read in its sources.

    Attributes:
        key: Its name in results.
        title: Its name for people.
        version: That of the sources.
        source: Where in them.
        symmetric: Bits of a symmetric grid.
        asymmetric: Bits of a grid with zero points.
        groups: Sizes of groups; empty for all.
        multiple: What a size of groups must be a multiple of.
        by_rows: Whether whole rows may share a scale.
        columns: What the columns of a weight must be a multiple of.
        rows: What the rows of a layer must be a multiple of, those of a fused layer together.
        rules: What else it asks for.
        architectures: Classes that it has a model of its own for; empty if that says nothing.
        half_scales: Whether scales are rounded to half precision there.
        note: What to know of what it serves.
    """

    key: str
    title: str
    version: str
    source: str
    symmetric: frozenset[int]
    asymmetric: frozenset[int] = frozenset()
    groups: tuple[int, ...] = ()
    multiple: int = 1
    by_rows: bool = True
    columns: int = 1
    rows: int = 1
    rules: tuple[Rule, ...] = ()
    architectures: frozenset[str] = field(default=frozenset(), repr=False)
    half_scales: bool = False
    note: str | None = None

    @property
    def name(self) -> str:
        """Title and version."""
        return f"{self.title} {self.version}"


@dataclass(frozen=True)
class Verdict:
    """What a server makes of a model.

    Attributes:
        server: Which one.
        reasons: Why it does not take it.
        notes: What to know if it does.
        known: Whether its rules say anything about models of this class.
    """

    server: Server
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    known: bool = True

    @property
    def answer(self) -> str:
        """Yes, no or unknown."""
        return "no" if self.reasons else "yes" if self.known else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """The same in JSON types."""
        return {"answer": self.answer, "reasons": list(map(str, self.reasons)), "notes": list(self.notes)}
