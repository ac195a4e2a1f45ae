"""Packed experts: one parameter of the model is many matrices in the files, which servers know by their own names.

Their rows stand one below the other, `[experts * rows, columns]`; in the parameter of a gated layer those of the gate
and of the other half take turns. transformers unpacks each while loading and puts them together, with one scheme for
all experts of a model: strategy channel or group, without zero points.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..quantizer import Quantized
from ..transformers_seams import matrices_in_files
from .layout import FORMATS, Encoded, InFiles, Terms, check_values, check_words
from .state import StoredLayer

_NAME = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")


def names_of(model: nn.Module, parameter: str, shape: Sequence[int]) -> tuple[str, ...] | None:
    """The names of the matrices of a parameter of experts, as its rows come; None if the files have no such place.

    They are all of as many rows, each in one piece.

    Args:
        model: Of transformers.
        parameter: Its name.
        shape: Its shape `[experts, rows, columns]`.
    """
    found = matrices_in_files(model, parameter, shape[0], shape[1])
    pieces = sorted(found.items(), key=lambda item: int(item[1].flatten()[0]))
    rows = torch.cat([numbers.flatten() for _, numbers in pieces])
    in_order = torch.equal(rows, torch.arange(len(rows), device="cpu"))
    alike = len({tuple(numbers.shape) for _, numbers in pieces}) == 1
    if not (in_order and alike and all(_NAME.fullmatch(name) for name in found)):
        return None
    return tuple(name.removesuffix(".weight") for name, _ in pieces)


def target_of(names: Sequence[str]) -> str:
    r"""A pattern for matrices of experts, in any block and model around it.

    >>> target_of(["model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.experts.0.up_proj"])
    're:.*\\.experts\\.\\d+\\.(?:gate_proj|up_proj)$'
    """
    ends = sorted({name.rpartition(".")[2] for name in names})
    return rf"re:.*\.experts\.\d+\.(?:{'|'.join(ends)})$"


def encode_matrices(values: Quantized, names: Sequence[str], terms: Terms) -> Encoded:
    """The tensors of packed experts by their whole names, and their scheme."""
    rows, columns = len(values.codes) // len(names), values.codes.shape[1]
    # Servers know a scale for each channel or group, none for a block of rows.
    scale = values.scale.repeat_interleave(len(values.codes) // len(values.scale), 0)
    own = replace(terms, kind="linear", shape=(rows, columns))
    parts: dict[str, Tensor] = {}
    scheme = None
    for index, name in enumerate(names):
        piece = slice(index * rows, (index + 1) * rows)
        found = FORMATS["packed"].encode(Quantized(values.codes[piece], scale[piece].clone(), None), own)
        parts |= {f"{name}.{part}": tensor for part, tensor in found.parts.items()}
        scheme = found.scheme
    return Encoded(parts, scheme)


def by_matrix(layers: Mapping[str, StoredLayer]) -> dict[str, StoredLayer]:
    """The layers as the files have them: each matrix of packed experts is a layer of its own."""
    found: dict[str, StoredLayer] = {}
    for name, layer in layers.items():
        names = layer.matrices or ()
        rows = layer.shape[0] // max(1, len(names))
        own = replace(
            layer,
            kind="linear",
            shape=(rows, layer.shape[1]),
            scales=(rows, layer.scales[1]),
            matrices=None,
        )
        found |= dict.fromkeys(names, own) if names else {name: layer}
    return found


def split(weights: Mapping[str, Quantized], layers: Mapping[str, StoredLayer]) -> dict[str, Quantized]:
    """What `stored_weights` gives, by the names of `by_matrix`."""
    found: dict[str, Quantized] = {}
    for name, values in weights.items():
        names = layers[name].matrices
        if not names:
            found[name] = values
            continue
        pieces = zip(names, values.codes.chunk(len(names)), values.scale.chunk(len(names)), strict=True)
        found |= {matrix: Quantized(codes, scale, None) for matrix, codes, scale in pieces}
    return found


@dataclass(frozen=True)
class Stacked:
    """Packed experts that are read from the files, matrix by matrix.

    Attributes:
        whole: The layer as one weight `[experts * rows, columns]`; it has no tensors itself.
        matrices: What is read, by name, as the rows come.
    """

    whole: InFiles
    matrices: Mapping[str, InFiles]

    @classmethod
    def of(cls, whole: InFiles, names: Sequence[str]) -> "Stacked":
        """Nothing is read yet."""
        own = by_matrix({"": whole.layer})
        return cls(whole, {n: InFiles(f"{whole.where}: {n}", own[n], whole.group, whole.dtype) for n in names})

    @property
    def layer(self) -> StoredLayer:
        """What `moq_state.json` declares."""
        return self.whole.layer

    @property
    def is_complete(self) -> bool:
        """Whether the tensors of every matrix are there."""
        return all(matrix.is_complete for matrix in self.matrices.values())

    def decode(self) -> Quantized:
        """The codes as `quantizer` gives them, with a scale for each row or group."""
        found = [matrix.decode() for matrix in self.matrices.values()]
        return Quantized(torch.cat([one.codes for one in found]), torch.cat([one.scale for one in found]), None)

    def check(self) -> None:
        """Whether the matrices are of the grid that the layer declares.

        Raises:
            MoQError: They are not.
        """
        for matrix in self.matrices.values():
            check_words(matrix)
        # A block of rows, which has one scale, may have its largest weight in another matrix.
        check_values(self.whole, self.decode())

    def weight(self) -> Tensor:
        """The float weight `[experts * rows, columns]`."""
        return torch.cat([matrix.weight() for matrix in self.matrices.values()])
