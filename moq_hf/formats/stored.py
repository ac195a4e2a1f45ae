"""A weight on its way into the files, and one that is read from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from ..config_fields import Count, Flag, Positive
from ..errors import MoQError
from ..grid import Format, Grid, InputGrid, Precision
from ..quantized_weight import QuantizedWeight
from ..quantizer import Quantized, per_weight
from ..schedule import FLOAT_BITS
from ..weight_matrix import Kind, parameter_of

# Widest code that the packed format stores; wider layers are saved as floats.
MAX_PACKED_BITS = 8
# The names of forms in `moq_state.json`; "float" is a weight that was not quantized yet.
Form = Literal["packed", "int8", "gemma", "mxfp4", "dense", "float"]


@dataclass(frozen=True)
class SharedScheme:
    """The one scheme of all layers in a folder that is unpacked while loading.

    Attributes:
        row_size: Weights of a row that share a scale; None if whole rows share one.
        symmetric: Whether there are no zero points.
        takes_tables: Whether embedding tables are packed too, at the widest bits of
            all.
        format: What codes are; "int" if not all are the same.
    """

    row_size: int | None
    symmetric: bool
    takes_tables: bool
    format: Format = "int"


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
        pack_bits: The fewest bits that a packed code takes.
    """

    kind: Kind
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
    pack_bits: int = 0

    @classmethod
    def of(
        cls,
        layer: QuantizedWeight,
        is_table: bool,
        matrices: tuple[str, ...] | None = (),
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
            dtype=layer.float_weight.dtype,
            pack_bits=state.config.pack_bits or 0,
        ).at(state.bits)

    def at(self, bits: int) -> "EncodeSpec":
        """The spec of the same layer at a number of bits.

        >>> spec = EncodeSpec("linear", (8, 8), 4, Grid(), pack_bits=4)
        >>> [spec.at(bits).width for bits in (2, 3, 8)]
        [4, 4, 8]
        """
        is_int = self.grid.at(bits).format == "int"
        return replace(
            self, bits=bits, width=max(bits, self.pack_bits) if is_int else bits
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
            f"they are {self.format}": self.format != "int",
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
    def format(self) -> Format:
        """What codes are."""
        return self.grid.at(self.bits).format

    @property
    def row_size(self) -> int | None:
        """Weights of a row that share a scale in the files."""
        return (
            self.grid.grouping.row_size if self.shared is None else self.shared.row_size
        )

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales in the file, to which transformers unpacks experts: float32 unless it is that of the model."""
        own: torch.dtype = getattr(torch, self.grid.scale_dtype)
        is_other = self.matrices is not None and own != self.dtype
        return torch.float32 if is_other or self.shared is not None else own


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

    def named(self, name: str, kind: Kind, tied: Iterable[str]) -> dict[str, Tensor]:
        """The tensors by their names in the files.

        Modules that are tied to a table share its weight, and have scales and zero
        points of their own.

        Args:
            name: The layer's.
            kind: What it is.
            tied: The modules that loading ties to it.
        """
        parts = dict(self.parts)
        weight = parts.pop("weight", None)
        owners = (name,) if weight is None else (name, *tied)
        tensors = {
            f"{owner}.{part}": tensor if owner == name else tensor.clone()
            for owner in owners
            for part, tensor in parts.items()
        }
        if weight is not None:
            tensors[parameter_of(name, kind)] = weight
        return tensors


@dataclass(frozen=True)
class StoredLayer:
    """How one quantized layer lies in a packed checkpoint, as `moq_state.json` says it.

    Attributes:
        kind: What the layer is; see `weight_matrix.Kind`.
        bits: 1 to 16, or 32 for a layer that was not quantized yet.
        stored: "packed" (bits per weight), "int8" (one byte per weight), "gemma" (2, 4
            or 8 bits per weight), "mxfp4" (experts of GPT-OSS), "dense" (floats on the
            grid) or "float".
        shape: Rows and columns of the weight as it is quantized; a conv1d has its
            transpose in the file.
        scales: Rows and columns of the scale; [0, 0] for float.
        symmetric: Whether the grid is.
        bytes: What the weight takes in the file: codes, scales and zero points.
        bytes_before: What the float weight took.
        group: Name in the config groups of compressed-tensors, or in `groups` of
            the state; None if dense or float.
        grid: Scales and zero points of a dense layer, base64 of float32 and int32, else
            None.
        full: Whether codes reach -2^(bits-1) and scales have a sign.
        tied: Modules that loading ties to this one's weight; the file has at most their
            scales and zero points.
        matrices: Names in the files of packed experts' matrices, in the order of the
            rows of `shape`; None for any other layer.
        format: What the codes are; see `Grid`.
    """

    # A file with other keys is damaged.
    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Kind
    bits: Annotated[int, Field(strict=True, ge=1, le=FLOAT_BITS)]
    stored: Form
    shape: tuple[Positive, Positive]
    scales: tuple[Count, Count]
    symmetric: Flag
    bytes: Count
    bytes_before: Count
    group: str | None = None
    grid: tuple[str, str | None] | None = None
    full: Flag = False
    tied: tuple[str, ...] = ()
    matrices: tuple[str, ...] | None = None
    format: Format = "int"


class StoredWeight(NamedTuple):
    """A weight that is read from the files.

    Attributes:
        where: What an error names.
        layer: What the state says of it.
        scheme: Its config group; None for floats.
        parts: Its tensors by the last part of their name.
    """

    where: str
    layer: StoredLayer
    scheme: Mapping[str, Any] | None
    parts: Mapping[str, Tensor]

    @property
    def precision(self) -> Precision:
        """The grid of its codes, at its bits."""
        layer = self.layer
        grid = Grid(symmetric=layer.symmetric, full=layer.full, format=layer.format)
        return grid.at(layer.bits)

    def check(self, values: Quantized) -> None:
        """Check that codes, scales and zero points are of the grid that the layer declares, and need its bits.

        Some code needs them, as that of a group's largest weight does: stochastic
        rounding may leave it one short, an asymmetric grid two. Ternary and binary
        grids have other codes.

        Raises:
            MoQError: They are not, or do not; names the layer.
        """
        codes, scale, zero = values
        precision = self.precision
        bits = precision.bits
        is_legal = scale != 0 if precision.is_full else scale > 0
        if bits == 1:
            # A row of zeros has the scale 0.
            is_legal = scale >= 0
        if not bool(torch.isfinite(scale).all() and is_legal.all()):
            legal = "finite number but 0" if precision.is_full else "positive number"
            raise MoQError(f"{self.where}: a scale is not a {legal}")
        if bits == 1:
            if bool((codes.abs() != 1).any()):
                raise MoQError(f"{self.where}: binary codes must be -1 and 1")
            return
        lowest = highest = 0
        for what, integers in (("codes", codes), ("zero points", zero)):
            if integers is not None:
                lowest = min(lowest, int(integers.min()))
                highest = max(highest, int(integers.max()))
                if lowest < precision.low or highest > precision.high:
                    raise MoQError(
                        f"{self.where}: {what} beyond {precision.high} at {bits} bits"
                    )
        # A group of zeros has the scale 1, and one that is too small for float16 has
        # its least value.
        shows_bits = bool(((scale != 1) & (scale.abs() > 2.0**-24)).any())
        fewer = precision.grid.at(bits - 1)
        needs_fewer_bits = fewer.low <= lowest < highest <= fewer.high
        # Small codes that are floats may be those of scales that are as small as can be.
        is_told = bits > 2 and not precision.is_fp4
        if is_told and shows_bits and needs_fewer_bits:
            raise MoQError(
                f"{self.where}: no code is beyond {fewer.high}, so they are of fewer than {bits} bits"
            )


def by_matrix(layers: Mapping[str, StoredLayer]) -> dict[str, StoredLayer]:
    """The layers as the files have them: each matrix of packed experts is a layer of its own."""
    split_layers: dict[str, StoredLayer] = {}
    for name, layer in layers.items():
        if not layer.matrices:
            split_layers[name] = layer
            continue
        rows = layer.shape[0] // len(layer.matrices)
        matrix = replace(
            layer,
            kind="linear",
            matrices=None,
            shape=(rows, layer.shape[1]),
            scales=(rows, layer.scales[1]),
        )
        split_layers |= dict.fromkeys(layer.matrices, matrix)
    return split_layers


def per_row(values: Quantized) -> Quantized:
    """Repeat the scales and zero points that blocks of rows share for each row."""
    shape = (len(values.codes), values.scale.shape[1])
    zero = values.zero_point
    return values._replace(
        scale=per_weight(values.scale, shape),
        zero_point=None if zero is None else per_weight(zero, shape),
    )
