"""`WeightSpec`: describes a quantized weight all the way from the inventory of a model to `moq_state.json`."""

import math
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from .grid import (
    Format,
    Grid,
    InputGrid,
    PerChannel,
    Precision,
)
from .processes import shape_of
from .quantized_weight import QuantizedWeight
from .schedule import FLOAT_BITS
from .weight_matrix import Kind

# The widest code that the packed format stores; wider layers are saved as floats.
MAX_PACKED_BITS = 8
# Forms without codes: rounded floats, and a weight that was not quantized yet.
DENSE, FLOAT = "dense", "float"
_PER_CHANNEL = Grid(PerChannel())


@dataclass(frozen=True)
class SharedScheme:
    """The one scheme of all layers in a folder that is unpacked while loading.

    Attributes:
        row_size: Weights of a row that share a scale; None if whole rows share one.
        symmetric: Whether there are no zero points.
        takes_tables: Whether embedding tables are packed too, at the widest bits of
            all.
        format: Kind of codes; "int" if not all are the same.
    """

    row_size: int | None
    symmetric: bool
    takes_tables: bool
    format: Format = "int"


@dataclass(frozen=True)
class WeightSpec:
    """A quantized weight: what it is, how it is quantized, and how a folder holds it.

    Attributes:
        kind: How it is laid out; see `weight_matrix.Kind`.
        shape: Rows and columns of the weight as it is quantized; a conv1d has its
            transpose in the file.
        bits: 1 to 16, or 32 for a weight that is not quantized yet.
        grid: Which weights share a scale, and how codes are rounded.
        stored: The form that it has in a folder; see `formats.table`.
        name: The layer's name.
        dtype: Dtype of the float weight.
        full_shape: Shape of the parameter in the model; empty for a weight that was
            read from a folder.
        is_table: Whether it is an embedding table, or is tied to another module.
        tied: Modules that loading ties to its layer; a folder has at most their scales
            and zero points.
        matrices: Names in the files of the matrices of experts, in the order of the
            rows, empty while they are not known; None for any other layer, and if the
            files have no place for them.
        inputs: How the layer's inputs are rounded; None leaves them alone.
        input_scale: Their scale, `[1]`, if it is static.
        input_zero_point: Its zero point, int8 `[1]`, if codes are asymmetric.
        pack_bits: The fewest bits that a packed code of integers takes.
        shared: The scheme that all layers of the folder must have; None if each has its
            own.
        left_alone: Whether transformers leaves the module as it is while it replaces
            others, whatever the files say.
        blended: Whether the forward pass still blends the float weight in.
        bytes: Bytes of the weight in the file: codes, scales and zero points.
        bytes_before: Bytes of the float weight.
        group: Name in the config groups of compressed-tensors, or in `groups` of the
            state; None without codes.
        grid_text: Scales and zero points of rounded floats, base64 of float32 and
            int32, else None.
    """

    kind: Kind
    shape: tuple[int, int]
    bits: int
    grid: Grid = _PER_CHANNEL
    stored: str = FLOAT
    name: str = field(default="", compare=False)
    dtype: torch.dtype = torch.float32
    full_shape: tuple[int, ...] = ()
    is_table: bool = False
    tied: tuple[str, ...] = ()
    matrices: tuple[str, ...] | None = None
    inputs: InputGrid | None = None
    input_scale: Tensor | None = field(default=None, compare=False)
    input_zero_point: Tensor | None = field(default=None, compare=False)
    pack_bits: int = 0
    shared: SharedScheme | None = None
    left_alone: bool = False
    blended: bool = False
    bytes: int = 0
    bytes_before: int = 0
    group: str | None = None
    grid_text: tuple[str, str | None] | None = None

    @classmethod
    def of(cls, layer: QuantizedWeight) -> Self:
        """The spec of a layer at its current bits, as far as the layer itself knows it."""
        state = layer.moq
        return cls(
            kind=layer.kind,
            shape=layer.matrix_shape,
            bits=state.bits,
            grid=state.grid,
            name=state.name,
            dtype=layer.float_weight.dtype,
            full_shape=tuple(shape_of(layer.float_weight)),
            matrices=() if layer.kind == "experts" else None,
            pack_bits=state.config.pack_bits or 0,
            blended=bool(state.blend),
        )

    @property
    def numbers(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def precision(self) -> Precision:
        """The grid at the bits."""
        return self.grid.at(self.bits)

    @property
    def format(self) -> Format:
        """Kind of codes."""
        return self.precision.format

    @property
    def symmetric(self) -> bool:
        """True if there are no zero points."""
        return self.grid.symmetric

    @property
    def full(self) -> bool:
        """True if codes reach -2^(bits-1) and scales have a sign."""
        return self.precision.is_full

    @property
    def scales(self) -> tuple[int, int]:
        """Rows and columns of the scale; zeros if nothing was quantized yet."""
        return (0, 0) if self.stored == FLOAT else self.grid.shape(*self.shape)

    @property
    def has_codes(self) -> bool:
        """True if the files hold codes; otherwise they hold floats."""
        return self.stored not in (DENSE, FLOAT)

    @property
    def width(self) -> int:
        """Bits that a packed code takes in the file.

        >>> specs = [WeightSpec("linear", (8, 8), bits, pack_bits=4) for bits in (2, 3, 8)]
        >>> [spec.width for spec in specs]
        [4, 4, 8]
        """
        return max(self.bits, self.pack_bits) if self.format == "int" else self.bits

    @property
    def row_size(self) -> int | None:
        """Weights of a row that share a scale in the files; None if whole rows share one."""
        scheme = self.shared or self.grid.grouping
        return scheme.row_size

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales in the file; float32 for experts, which are unpacked to it, unless it is the model's."""
        own: torch.dtype = getattr(torch, self.grid.scale_dtype)
        is_other = self.matrices is not None and own != self.dtype
        return torch.float32 if is_other or self.shared is not None else own

    @property
    def multiplies_bytes(self) -> bool:
        """True if weights and inputs have 8 bits, and rows one scale: servers multiply int8 with int8."""
        if self.inputs is None or self.row_size is not None:
            return False
        return self.bits == self.inputs.bits == 8

    @property
    def input_fault(self) -> str | None:
        """Why a folder cannot store `inputs`, or no server has a kernel for them; None if neither is so.

        Codes of 8 bits in both, per channel, are multiplied as integers. Weights of
        fewer bits, or in groups, need a scale for each token.
        """
        assert self.inputs is not None
        scale = self.inputs.scale
        legal = (4, 8) if scale == "per_token" else (8,)
        needs_bytes = scale == "static" and not self.multiplies_bytes
        faults = {
            "an embedding table shares their weight": self.is_table,
            "they are Conv1D layers": self.kind != "linear",
            "their grid is asymmetric": not self.symmetric,
            f"they are {self.format}": self.format not in ("int", "fp8"),
            "only fp8 weights have inputs in E4M3": self.inputs.format != self.format,
            f"they have {self.bits} bits": not 2 <= self.bits <= MAX_PACKED_BITS,
            f"inputs have {self.inputs.bits} bits": self.inputs.bits not in legal,
            f"scales are {scale}": scale not in ("static", "per_token"),
            "static scales need 8 bits per channel": needs_bytes,
        }
        return next((why for why, is_so in faults.items() if is_so), None)

    @property
    def as_served(self) -> str:
        """The grid as a server sees it, and that of the inputs, in words.

        >>> from moq_hf.grid import PerGroup
        >>> grid = Grid(PerGroup(32), symmetric=False)
        >>> WeightSpec("linear", (8, 64), 4, grid, "packed").as_served
        '4 bits asymmetric in groups of 32'
        """
        if not self.is_served_as_codes:
            return "floats"
        kind = "" if self.symmetric else " asymmetric"
        groups = f"in groups of {self.row_size}" if self.row_size else "per channel"
        grid = f"{self.bits} bits{kind} {groups}"
        if self.format != "int":
            grid = self.format
        if self.inputs is None:
            return grid
        return f"{grid}, inputs of {self.inputs.bits} bits {self.inputs.in_words}"

    @property
    def is_served_as_codes(self) -> bool:
        """True if a server sees codes, or a table on its grid."""
        is_quantized = self.bits != FLOAT_BITS
        return is_quantized and (self.has_codes or self.kind == "embedding")

    def at(self, bits: int) -> Self:
        """The same weight at a number of bits."""
        return replace(self, bits=bits)
