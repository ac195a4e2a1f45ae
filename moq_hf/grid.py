"""The grid of a weight: which weights share a scale, whether codes are symmetric, how they round, how a scale is found.

A `Grid` says everything about a quantization except the bit width, which falls while
training. `quantizer` defines its arithmetic. An `InputGrid` says how the inputs of a
layer are rounded, as defined in `inputs`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

MAX_BITS = 16
# "auto" searches clipping ratios at these bits and below, where clipping pays.
SEARCHED_BITS = 5
# At these bits and below, an extra code is worth a signed scale: the range "auto" is full.
MOST_FULL_BITS = 4


# How a scale is found: "absmax", "mse", or "auto", which is mse if codes are few.
Search = Literal["auto", "absmax", "mse"]
# The dtype that a scale is rounded to; it is still held as float32.
ScaleDtype = Literal["float32", "bfloat16", "float16"]
# The kind of codes: integers, or floats of 4 or 8 bits in formats that servers know.
Format = Literal["int", "mxfp4", "nvfp4", "fp8"]
# Which inputs of a layer share a scale: those of a token, of a call, of a block of features, or all of them forever.
InputScale = Literal["per_token", "per_tensor", "per_block", "static"]
# The most inputs that share a scale per block, and the fewest in ONNX Runtime's kernels.
INPUT_BLOCK = 128
LEAST_INPUT_BLOCK = 32
# The largest number of E4M3, to which inputs of FP8 are scaled.
LARGEST_E4M3 = 448
# A size of a linear layer.
Axis = Literal["out_features", "in_features"]


class FloatFormat(NamedTuple):
    """A format whose codes are floats, here multiplied to integers, see `quantizer`.

    Attributes:
        bits: The bits of a code.
        group_size: Consecutive weights of a row that share a scale; None: a row does.
        parts: Codes between a power of two and the next one; those below it are 1 apart.
        high: The largest code.
        top: The code by which a group's largest weight is divided for its scale.
        unit: The factor of a scale in the files, in which the whole tensor of NVFP4 has
            a scale of 2^-7.
        strategy: The name in compressed-tensors for the weights that share a scale.
        scale_dtype: The dtype of scales in the files; None leaves it to the grid.
        largest: The largest weight.
    """

    bits: int
    group_size: int | None
    parts: int
    high: int
    top: int
    unit: float
    strategy: str
    scale_dtype: str | None
    largest: float = math.inf

    @property
    def grouping(self) -> dict[str, Any]:
        """The config's key for the weights that share a scale, with its value."""
        if self.group_size is None:
            return {"groups": "per_channel"}
        return {"group_size": self.group_size}

    @property
    def in_words(self) -> str:
        """The grid that goes with it.

        >>> [own.in_words for own in FLOATS.values()][1:]
        ['symmetric, of 4 bits in groups of 16', 'symmetric, of 8 bits per channel']
        """
        groups = f"in groups of {self.group_size}" if self.group_size else "per channel"
        return f"symmetric, of {self.bits} bits {groups}"


# Codes are twice the numbers of E2M1. The largest weight of NVFP4 is 6 times the largest
# scale.
FP4: dict[str, FloatFormat] = {
    "mxfp4": FloatFormat(4, 32, 2, 12, 8, 2.0, "group", "torch.uint8"),
    "nvfp4": FloatFormat(
        4, 16, 2, 12, 12, 2.0**8, "tensor_group", "torch.float8_e4m3fn", 21.0
    ),
}
# Codes are 512 times the numbers of E4M3.
_LAST = LARGEST_E4M3 * 512
FP8 = FloatFormat(8, None, 8, _LAST, _LAST, 512.0, "channel", None)
FLOATS: dict[str, FloatFormat] = {**FP4, "fp8": FP8}


@dataclass(frozen=True)
class RowBlocks:
    """`count` scales per weight, each for a block of consecutive rows.

    >>> RowBlocks(3).shape(12, 8)
    (3, 1)
    """

    count: int = 1
    # The config's key, and what else an error proposes.
    key: ClassVar[str] = "groups"
    instead: ClassVar[str] = ', or "per_channel"'
    # Weights of a row that share a scale; None: whole rows do.
    row_size: ClassVar[int | None] = None

    @property
    def divides(self) -> tuple[Axis, int]:
        """The size of a layer that must be a multiple of a number, and the number."""
        return "out_features", self.count

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scale for a weight `[rows, columns]`.

        Raises:
            ValueError: The rows cannot be divided like that.
        """
        if self.count < 1 or rows % self.count:
            raise ValueError(
                f"{self.count} groups do not divide the {rows} rows of the weight"
            )
        return self.count, 1


@dataclass(frozen=True)
class PerChannel:
    """One scale per channel, which is a row of the weight.

    >>> PerChannel().shape(12, 8)
    (12, 1)
    """

    row_size: ClassVar[int | None] = None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scale for a weight `[rows, columns]`."""
        return rows, 1


@dataclass(frozen=True)
class PerGroup:
    """One scale per `size` consecutive weights of a row.

    >>> PerGroup(4).shape(12, 8)
    (12, 2)
    """

    size: int
    key: ClassVar[str] = "group_size"
    instead: ClassVar[str] = ""

    @property
    def row_size(self) -> int | None:
        """Weights of a row that share a scale."""
        return self.size

    @property
    def divides(self) -> tuple[Axis, int]:
        """The size of a layer that must be a multiple of a number, and the number."""
        return "in_features", self.size

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scale for a weight `[rows, columns]`.

        Raises:
            ValueError: The columns cannot be divided like that.
        """
        if self.size < 1 or columns % self.size:
            raise ValueError(
                f"group_size {self.size} does not divide the {columns} columns of the weight"
            )
        return rows, columns // self.size


Grouping = RowBlocks | PerChannel | PerGroup


class Precision(NamedTuple):
    """A grid at a bit width, and what follows from both; `Grid.at` makes it.

    Attributes:
        grid: How a weight is quantized, whatever its bit width is.
        bits: The bit width.
        format: Kind of codes.
        is_float: Whether codes are floats.
        is_full: Whether scales have a sign: those of a full grid have, except at one bit,
            which is binary.
        is_uniform: Whether a code is a rounded quotient, so that clipping and
            stochastic rounding make sense.
        low: The least code; those of floats are multiplied to integers.
        high: The largest code.
        top: The code by which the largest weight of a group is divided for its scale:
            MXFP4's is a power of two.
        reach: Magnitude of the farthest code, at least 1.
        searches: Whether clipping ratios are searched; ternary and binary grids set
            their own scale.
        clips: Whether a quotient may round beyond the last code even though the scale
            comes from the largest weight of its group.

    >>> narrow, full, unsigned = Grid().at(4), Grid(full=True).at(4), Grid(symmetric=False).at(4)
    >>> [(own.low, own.high, own.top, own.reach) for own in (narrow, full, unsigned)]
    [(-7, 7, 7, 7), (-8, 7, -8, 8), (0, 15, 15, 15)]
    >>> fp4 = Grid(PerGroup(32), format="mxfp4")
    >>> fp4.at(4).high, fp4.at(4).top, fp4.at(4).is_float, fp4.at(8).is_float
    (12, 8, True, False)
    >>> [Grid(full=None).at(bits).is_full for bits in (1, 2, 4, 5)]
    [False, True, True, False]
    >>> [grid.at(2).is_uniform for grid in (Grid(), Grid(symmetric=False), Grid(full=True))]
    [False, True, True]
    >>> Grid().at(4).searches, Grid().at(8).searches, Grid(search="mse").at(8).searches
    (True, False, True)
    """

    grid: "Grid"
    bits: int
    format: Format
    is_float: bool
    is_full: bool
    is_uniform: bool
    low: int
    high: int
    top: int
    reach: int
    searches: bool
    clips: bool

    @property
    def stored(self) -> str:
        """How the kernels round scales: to the grid's dtype, or as the format has it.

        >>> [Grid(PerChannel(), scale_dtype="float16", format=own).at(8).stored for own in ("int", "fp8")]
        ['float16', 'fp8-float16']
        """
        if self.format in FP4:
            return self.format
        dtype = self.grid.scale_dtype
        # In any other dtype, a power of two before rounding makes no difference.
        is_shifted = self.format == "fp8" and dtype == "float16"
        return f"fp8-{dtype}" if is_shifted else dtype

    def check(self) -> None:
        """Check that the grid exists at the bit width.

        Raises:
            ValueError: It does not: bits are not 1 to 16, 1 bit or a full range is
                asymmetric, or stochastic rounding has no steps.
        """
        bits, grid = self.bits, self.grid
        if not 1 <= bits <= MAX_BITS:
            raise ValueError(f"bits must be 1 to {MAX_BITS}, got {bits}")
        if bits == 1 and not grid.symmetric:
            raise ValueError("1 bit is binary, which is symmetric only")
        if grid.full and not grid.symmetric:
            raise ValueError(
                "a full range is for symmetric grids: an asymmetric one uses all codes"
            )
        if grid.stochastic and not self.is_uniform:
            raise ValueError(f"{bits} bits symmetric rounds to nearest only")


@dataclass(frozen=True)
class Grid:
    """The way in which a weight `[rows, columns]` is quantized, whatever its bit width.

    Attributes:
        grouping: Which weights share a scale. Groups fall on row boundaries.
        symmetric: Codes around zero; otherwise codes from 0 with a zero point.
        stochastic: Round x / scale to floor(x / scale + u); otherwise to the nearest,
            half to even.
        search: How a scale is found: "absmax", "mse" (the clipping ratio of each group
            with the least squared error), or "auto" (mse at 5 bits and below, absmax
            above).
        full: Whether a symmetric grid has codes down to -2^(b-1), one more than
            "narrow" has, and a scale with a sign, so that this code is on the side of
            the largest weight. This holds from 2 bits on; 1 bit is binary. None means
            only at 2 to 4 bits.
        scale_dtype: The dtype to which each scale is rounded before codes are computed.
        format: Kind of codes at the bits of the format; at others they are integers.
            "mxfp4" needs symmetric groups of 32, "nvfp4" of 16, and both have their own
            scales; "fp8" needs symmetric rows.

    >>> Grid(PerGroup(4)).shape(12, 8)
    (12, 2)
    """

    grouping: Grouping = RowBlocks()
    symmetric: bool = True
    stochastic: bool = False
    search: Search = "auto"
    full: bool | None = False
    scale_dtype: ScaleDtype = "float32"
    format: Format = "int"
    _made: dict[int, Precision] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scale for a weight `[rows, columns]`.

        Raises:
            ValueError: The groups do not fit the weight.
        """
        return self.grouping.shape(rows, columns)

    def at(self, bits: int) -> Precision:
        """The grid at a bit width, made once; `Precision.check` says whether it exists there."""
        made = self._made.get(bits)
        if made is None:
            made = self._made[bits] = self._resolved(bits)
        return made

    def _resolved(self, bits: int) -> Precision:
        own = FLOATS.get(self.format)
        if own is not None and own.bits != bits:
            own = None
        is_int = own is None
        is_full = bits <= MOST_FULL_BITS if self.full is None else self.full
        is_full = is_full and self.symmetric and bits > 1 and is_int
        high = 2 ** (bits - 1) - 1
        low = -high - is_full
        top = low if is_full else high
        if own is not None:
            low, high, top = -own.high, own.high, own.top
        elif not self.symmetric:
            low, high = 0, 2**bits - 1
            top = high
        is_uniform = bits > 2 or (bits == 2 and (is_full or not self.symmetric))
        is_searched = self.search == "mse" or (
            self.search == "auto" and bits <= SEARCHED_BITS
        )
        # With an exact scale and no noise, the largest quotient rounds to the last code.
        is_plain = is_int and self.symmetric and not is_full and not self.stochastic
        return Precision(
            grid=self,
            bits=bits,
            format="int" if is_int else self.format,
            is_float=not is_int,
            is_full=is_full,
            is_uniform=is_uniform,
            low=low,
            high=high,
            top=top,
            reach=max(1, high, -low),
            searches=is_searched and is_uniform,
            clips=not is_plain or self.scale_dtype != "float32",
        )


@dataclass(frozen=True)
class InputGrid:
    """How the inputs of a linear layer are quantized; the formulas are in `inputs`.

    Attributes:
        bits: Bit width of a code, 2 to 8.
        scale: "per_token": a scale for each token. "per_tensor":
            asymmetric codes, a scale for each call. "per_block": symmetric codes, a
            scale for each `block` features of a token. "static": one scale, learned in
            training.
        block: Features that share a scale per block.
        symmetric: Whether codes that are static or per token lie around zero; otherwise
            they have a zero point.
        percentile: Of the inputs of a call, how many a static range holds, above 0 to
            100.
        window: Optimizer steps that a static range is the mean of; None gives the newest
            step a share of 0.01.
        format: Kind of codes: "int", or "fp8" for symmetric ones of 8 bits.

    >>> InputGrid(8, "per_token").limits(), InputGrid(8, "per_tensor").limits(), InputGrid(7, "static").limits()
    ((-128, 127), (0, 255), (-64, 63))
    """

    bits: int
    scale: InputScale
    block: int = INPUT_BLOCK
    symmetric: bool = True
    percentile: float = 100.0
    window: int | None = None
    format: Format = "int"

    @property
    def in_words(self) -> str:
        """What shares a scale, and what codes are, for messages.

        >>> InputGrid(8, "static", symmetric=False).in_words
        'static, asymmetric'
        """
        kind = ", E4M3" * (self.format == "fp8")
        return self.scale + ", asymmetric" * (not self.symmetric) + kind

    @property
    def top(self) -> float:
        """The code of the largest input where codes are symmetric.

        >>> InputGrid(8, "per_token").top, InputGrid(8, "static").top, InputGrid(8, "static", format="fp8").top
        (127.5, 127, 448)
        """
        if self.format == "fp8":
            return LARGEST_E4M3
        if self.scale == "per_token":
            return ((1 << self.bits) - 1) / 2
        return (1 << self.bits - 1) - 1

    def beside(self, columns: int, scales: int) -> "InputGrid":
        """The grid for the inputs of a layer whose weight has this many columns, and scales in a row.

        Only the width of blocks depends on these: a block is as wide as a group of the
        weight, or as a part of one. If a row is one group, its last block may be
        narrower.

        >>> [InputGrid(8, "per_block").beside(384, scales).block for scales in (1, 2, 12)]
        [128, 64, 32]
        >>> InputGrid(8, "per_block").beside(100, 1).block
        128
        """
        if self.scale != "per_block":
            return self
        block = math.gcd(columns // scales, INPUT_BLOCK)
        if scales == 1 and block < LEAST_INPUT_BLOCK:
            block = INPUT_BLOCK
        return replace(self, block=block)

    def limits(self) -> tuple[int, int]:
        """The least and the largest code."""
        if self.format == "fp8":
            return -LARGEST_E4M3, LARGEST_E4M3
        most = (1 << self.bits - 1) - 1
        if self.scale == "per_tensor":
            return 0, 2 * most + 1
        return -most - 1, most
