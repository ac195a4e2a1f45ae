"""A weight on its way into the files, and one that is read from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import Grid, InputGrid
from ..quant_linear import QuantLayer
from ..quantizer import Quantized

# Widest code that the packed format stores; wider layers are saved as floats.
MAX_PACKED_BITS = 8


@dataclass(frozen=True)
class SharedScheme:
    """The one scheme of all layers in a folder that is unpacked while loading.

    Attributes:
        row_size: Weights of a row that share a scale; None if whole rows share one.
        symmetric: Whether there are no zero points.
        takes_tables: Whether embedding tables are packed too, at the widest bits of
            all.
    """

    row_size: int | None
    symmetric: bool
    takes_tables: bool


@dataclass(frozen=True)
class EncodeSpec:
    """What the encoding of one layer depends on, beside its codes.

    Attributes:
        kind: What the layer is; see `weight_matrix.Kind`.
        matrix_shape: Rows and columns of the weight as it is quantized.
        bits: Bits of a code.
        grid: Which weights share a scale, and how codes are rounded.
        is_table: Whether it is an embedding table, or is tied to another module.
        matrices: Names in the files of the matrices of experts, in the order of the
            rows; None where the files have no place for them.
        shared: The scheme that all layers must have; None where each has its own.
        width: Bits that a packed code takes in the file; `bits` or more.
        shape: Shape of the weight in the model.
        dtype: Dtype of the float weight.
        inputs: How the layer's inputs are rounded in training; None leaves them alone.
        input_scale: Their scale, `[1]`, where it is static.
        in_float: Whether transformers leaves the module alone, whatever the files say,
            where it replaces others.
    """

    kind: str
    matrix_shape: tuple[int, int]
    bits: int
    grid: Grid
    is_table: bool = False
    matrices: tuple[str, ...] | None = None
    shared: SharedScheme | None = None
    width: int = 0
    shape: Sequence[int] = ()
    dtype: torch.dtype = torch.float32
    inputs: InputGrid | None = None
    input_scale: Tensor | None = None
    in_float: bool = False

    @classmethod
    def of(
        cls, layer: QuantLayer, is_table: bool, matrices: tuple[str, ...] | None = ()
    ) -> "EncodeSpec":
        """The spec of a layer at its current bits; `matrices` is for experts in rows, and None for any other layer."""
        state = layer.moq
        return cls(
            kind=layer.kind,
            matrix_shape=layer.matrix_shape,
            bits=state.bits,
            grid=state.grid,
            is_table=is_table,
            matrices=matrices if layer.kind == "experts" else None,
            width=state.bits,
            dtype=layer.weight.dtype,
        )

    @property
    def input_fault(self) -> str | None:
        """Why a folder has no place for `inputs`, or no server a kernel that rounds them so; None if both have.

        Codes of 8 bits in both, per channel, are multiplied as integers. Weights of
        fewer bits, or in groups, go with a scale for each token.
        """
        assert self.inputs is not None
        scale = self.inputs.scale
        needs_bytes = scale == "static" and not self.multiplies_bytes
        faults = {
            "an embedding table shares their weight": self.is_table,
            "they are Conv1D layers": self.kind != "linear",
            "their grid is asymmetric": not self.grid.symmetric,
            f"they have {self.bits} bits": not 2 <= self.bits <= MAX_PACKED_BITS,
            f"inputs have {self.inputs.bits} bits": self.inputs.bits != 8,
            f"scales are {scale}": scale not in ("static", "per_token"),
            "static scales go with 8 bits per channel": needs_bytes,
        }
        return next((why for why, is_so in faults.items() if is_so), None)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether weights and inputs are both of 8 bits, with one scale for a row: servers multiply int8 with int8."""
        if self.inputs is None or self.row_size is not None:
            return False
        return self.bits == self.inputs.bits == 8

    @property
    def row_size(self) -> int | None:
        """Weights of a row that share a scale in the files."""
        return (
            self.grid.grouping.row_size if self.shared is None else self.shared.row_size
        )

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales in the file."""
        return (
            torch.float32
            if self.shared is not None
            else getattr(torch, self.grid.scale_dtype)
        )


class EncodedWeight(NamedTuple):
    """A weight as it goes into the files.

    Attributes:
        parts: Tensors by the last part of their name; those of experts by the whole
            name.
        scheme: The config group of compressed-tensors but for its targets; None for
            floats.
        grid: Scales and zero points for `moq_state.json`, where no tensor holds them.
    """

    parts: dict[str, Tensor]
    scheme: dict[str, Any] | None = None
    grid: tuple[str, str | None] | None = None


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is read from the files, tensor by tensor.

    Attributes:
        where: What an error names.
        kind: What the layer is; see `weight_matrix.Kind`.
        bits: The bits that its state declares.
        grid: The grid of its codes.
        shape: Rows and columns of the weight as it is quantized.
        scales: Rows and columns of the scale.
        scheme: Its config group; None for floats.
        saved_grid: Scales and zero points in `moq_state.json`, of floats on their grid.
        pieces: Its tensors so far, by the last part of their name. Experts have a piece
            for each matrix, in the order of the rows; any other layer has one.
    """

    where: str
    kind: str
    bits: int
    grid: Grid
    shape: tuple[int, int]
    scales: tuple[int, int]
    scheme: Mapping[str, Any] | None
    saved_grid: tuple[str, str | None] | None
    pieces: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def check(self, values: Quantized) -> None:
        """Check that codes, scales and zero points are of the grid that the layer declares, and need its bits.

        Some code needs them, as that of a group's largest weight does: stochastic
        rounding may leave it one short, an asymmetric grid two. Ternary and binary
        grids have other codes.

        Raises:
            MoQError: They are not, or do not; names the layer.
        """
        codes, scale, zero = values
        if self.grid.symmetric != (zero is None):
            raise MoQError(
                f"{self.where}: an asymmetric grid has zero points, and a symmetric one has none"
            )
        is_legal = scale > 0
        if self.bits == 1:
            is_legal = scale >= 0
        elif self.grid.is_full(self.bits):
            is_legal = scale != 0
        if not bool(torch.isfinite(scale).all() and is_legal.all()):
            legal = (
                "finite number but 0"
                if self.grid.is_full(self.bits)
                else "positive number"
            )
            raise MoQError(f"{self.where}: a scale is not a {legal}")
        if self.bits == 1:
            if bool((codes.abs() != 1).any()):
                raise MoQError(f"{self.where}: binary codes must be -1 and 1")
            return
        low, high = self.grid.limits(self.bits)
        lowest = 0
        highest = 0
        for what, integers in (("codes", codes), ("zero points", zero)):
            if integers is not None:
                least, most = (int(value) for value in torch.aminmax(integers))
                if least < low or most > high:
                    raise MoQError(
                        f"{self.where}: {what} beyond {high} at {self.bits} bits"
                    )
                lowest = min(lowest, least)
                highest = max(highest, most)
        low, high = self.grid.limits(self.bits - 1)
        # A group of zeros has the scale 1, and one that is too small for float16 has
        # its least value.
        shows_bits = bool(((scale != 1) & (scale.abs() > 2.0**-24)).any())
        needs_fewer_bits = low <= lowest < highest <= high
        if self.bits > 2 and shows_bits and needs_fewer_bits:
            raise MoQError(
                f"{self.where}: no code is beyond {high}, so they are of fewer than {self.bits} bits"
            )
