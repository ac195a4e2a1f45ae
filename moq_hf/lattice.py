"""Finds the grid that a weight already lies on, as when a model was quantized and then written as floats.

A group lies on a grid if its weights are integer multiples of one scale. For that scale
the search tries the group's largest weight divided by 1, 2, 3 and so on, and takes the
first that fits. A scale fits a weight w with the multiple k if k times the scale, rounded
to the weight's dtype, is w. So each weight allows an interval of scales, and a scale in
all intervals of a group reproduces every weight exactly, in bfloat16 too. The multiples
tell the bits that the tensor needs, and are then spread over all codes of those bits, as
quantizing does: a group's largest weight has the last code. Of the grids that hold all
groups, the one with the fewest bits is taken, then the one with the longest groups.

Groups of zeros lie on every grid.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .grid import (
    FP4,
    Format,
    Grid,
    Grouping,
    PerChannel,
    PerGroup,
    ScaleDtype,
)
from .quantizer import Scales, as_stored, float_steps
from .text import dtype_name

MOST_BITS = 8
# The lengths of groups within a row, besides whole rows.
_SIZES = (128, 64, 32, 16)
# Groups that are tried first.
_SAMPLE = 64
# Weights of a group that are tried first.
_FEW = 8
# The divisors that are tried together begin with these.
_UP_TO = (1, 16, 64, 1 << MOST_BITS)
_WITH_MINIMUM_UP_TO = (1, 32)
# Numbers in memory at once.
_BLOCK = 1 << 20
_SCALE_DTYPES: tuple[ScaleDtype, ...] = ("float16", "bfloat16", "float32")
# More than the errors of interval arithmetic in float64.
_ABOUT_ONE = 1 + 2.0**-48
_FP4: tuple[Format, ...] = ("mxfp4", "nvfp4")
# Types of llama.cpp in groups of 32 with scales in float16, named by bits and minimum.
_GGML_TYPES = ("Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1")


@dataclass(frozen=True)
class FoundGrid:
    """The grid on which a weight `[rows, columns]`, or most of it, lies.

    Attributes:
        bits: The bit width; 0 if no group lies on a grid.
        row_size: Weights of a row that share a scale; None if whole rows do.
        symmetric: Whether there are no zero points.
        full: Whether some code is -2^(bits-1).
        scale_dtype: The narrowest dtype that holds all scales.
        format: Kind of codes.
        has_minimum: Whether each group has a float as its least value, as Q4_1 has: then
            zero need not be on the grid, and no integer says where it is.
        groups: The number of groups.
        on_grid: How many lie on the grid.
        zeros: How many of these are zeros alone.
        scales: The scales and zero points that give every weight; None if some group is
            not on the grid, or groups have a minimum.
    """

    bits: int
    row_size: int | None = None
    symmetric: bool = True
    full: bool = False
    scale_dtype: ScaleDtype = "float32"
    format: Format = "int"
    has_minimum: bool = False
    groups: int = 0
    on_grid: int = 0
    zeros: int = 0
    scales: Scales | None = None

    def on(self, device: torch.device) -> Self:
        """This grid with its scales on a device."""
        if self.scales is None or self.scales.scale.device == device:
            return self
        parts = (None if x is None else x.to(device) for x in self.scales)
        return replace(self, scales=Scales(*parts))  # type: ignore[arg-type]

    def with_zero_points(self) -> Self:
        """The grid, if of integers with zero points: those of a symmetric one are in the middle of its codes."""
        if self.scales is None or not self.symmetric or self.format != "int":
            return self
        scale = self.scales.scale
        # A negative scale turns the codes around.
        zero = 2 ** (self.bits - 1) - (scale < 0).int()
        scales = Scales(scale.abs(), zero)
        return replace(self, symmetric=False, full=False, scales=scales)

    @property
    def share(self) -> float:
        """The share of the groups that lie on the grid."""
        return self.on_grid / max(self.groups, 1)

    @property
    def is_whole(self) -> bool:
        """True if every group lies on the grid."""
        return self.bits > 0 and self.on_grid == self.groups

    @property
    def grouping(self) -> Grouping:
        """The weights that share a scale."""
        return PerChannel() if self.row_size is None else PerGroup(self.row_size)

    @property
    def grid(self) -> Grid:
        """The grid as a weight is quantized to it."""
        return Grid(
            self.grouping,
            self.symmetric,
            search="absmax",
            full=self.full,
            scale_dtype=self.scale_dtype,
            format=self.format,
        )

    @property
    def in_words(self) -> str:
        """The grid, for messages.

        >>> FoundGrid(4, 32, full=True, scale_dtype="float16").in_words
        '4 bits in groups of 32, scales in float16 (Q4_0)'
        >>> FoundGrid(8, symmetric=False).in_words, FoundGrid(0).in_words
        ('8 bits asymmetric per channel, scales in float32', 'none')
        """
        if not self.bits:
            return "none"
        if self.format != "int":
            return f"{self.format} in groups of {self.row_size}"
        kind = "" if self.symmetric else " asymmetric"
        if self.has_minimum:
            kind = " with a minimum"
        groups = f"in groups of {self.row_size}" if self.row_size else "per channel"
        name = f"Q{self.bits}_{int(not self.symmetric)}"
        is_known = name in _GGML_TYPES and self.symmetric != self.has_minimum
        is_known &= (self.row_size, self.scale_dtype) == (32, "float16")
        called = f" ({name})" if is_known else ""
        return f"{self.bits} bits{kind} {groups}, scales in {self.scale_dtype}{called}"


class _Multiples(NamedTuple):
    """Groups as multiples of a scale, as small as possible.

    Attributes:
        x: The weights `[groups, size]`, in their dtype.
        codes: int16 of the same shape; zeros where there is no such scale.
        is_found: bool `[groups]`; True for groups of zeros.
    """

    x: Tensor
    codes: Tensor
    is_found: Tensor


def find_grid(weight: Tensor) -> FoundGrid:
    """Find the grid of at most 8 bits on which a weight lies.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype; float64 counts as float32.

    Returns:
        The grid that holds all groups; if there is none, the one that holds the most, with
        its share. A grid that holds none of a sample of the groups is not counted.

    >>> codes = torch.tensor([[-8.0, 7.0, 0.0, 3.0]]).repeat(2, 8)
    >>> found = find_grid(codes * torch.tensor([[0.5], [0.3]]))
    >>> found.in_words, found.share
    ('4 bits per channel, scales in float32', 1.0)
    """
    weight = weight.detach()
    if weight.dtype == torch.float64:
        weight = weight.float()
    if not weight.numel() or not weight.isfinite().all():
        return FoundGrid(0, groups=len(weight))
    candidates = [
        _described(_multiples(_sample(x), kind.has_minimum), kind)
        for kind, x in _kinds(weight)
    ]
    likely = [each for each in candidates if each.on_grid]
    likely.sort(key=_preference)
    best = FoundGrid(0, groups=len(weight))
    for each in likely:
        if best.is_whole or (best.bits and not each.is_whole):
            break
        x = weight.reshape(-1, each.row_size or weight.shape[1])
        found = _described(_multiples(x, each.has_minimum), each, len(weight))
        if not best.bits or _tenths(found) > _tenths(best):
            best = found
    return best


def _preference(found: FoundGrid) -> tuple[float, ...]:
    size = found.row_size or 1 << 30
    is_fp4 = found.format != "int"
    return -_tenths(found), found.has_minimum, found.bits, -size, is_fp4


def _tenths(found: FoundGrid) -> int:
    """The share in tenths, 10 only for a whole; a weight off the grid spoils less of short groups."""
    return math.floor(10 * found.share)


def _kinds(weight: Tensor) -> Iterator[tuple[FoundGrid, Tensor]]:
    """The kinds of grids to look for, each with the weight's groups; integers may have other bits than the kind."""
    columns = weight.shape[1]
    yield FoundGrid(MOST_BITS), weight
    for size in _SIZES:
        if columns % size:
            continue
        x = weight.reshape(-1, size)
        if size < columns:
            yield FoundGrid(MOST_BITS, size), x
        for name in _FP4:
            if FP4[name].group_size == size:
                yield FoundGrid(FP4[name].bits, size, format=name), x
        if size > 16:
            yield FoundGrid(MOST_BITS, size, symmetric=False, has_minimum=True), x


def _sample(x: Tensor) -> Tensor:
    """Some groups from all over the weight; those of zeros only if there are no others."""
    few = x[:: max(1, len(x) // (4 * _SAMPLE))]
    used = few[few.any(1)]
    return (used if len(used) else few)[:: max(1, len(used) // _SAMPLE)]


class _Exact(NamedTuple):
    """Weights in float64, minus the least one of their group if the grid has a minimum.

    Attributes:
        values: `[groups, size]`.
        below: How much smaller the number may be that was rounded to each.
        above: How much larger it may be.
        low: What was subtracted, `[groups, 1]`.
    """

    values: Tensor
    below: Tensor
    above: Tensor
    low: Tensor

    def of(self, groups: Tensor) -> "_Exact":
        """Some of the groups."""
        return _Exact(*(part[groups] for part in self))

    def interval(self, multiples: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest scale of groups, `[groups, 1]`, with these multiples; zeros give none."""
        unused = multiples == 0
        magnitude, size = self.values.abs(), multiples.abs()
        lower = ((magnitude - self.below) / size).masked_fill_(unused, 0.0)
        upper = ((magnitude + self.above) / size).masked_fill_(unused, torch.inf)
        return lower.amax(1, keepdim=True), upper.amin(1, keepdim=True)


def _exact(x: Tensor, has_minimum: bool) -> _Exact:
    """Weights of a dtype with the errors of their rounding."""
    info = torch.finfo(x.dtype)
    values = x.double()
    mantissa, exponent = torch.frexp(values)
    spacing = torch.exp2(exponent.double() - 1) * info.eps
    least = info.smallest_normal * info.eps
    # A product in float32 is rounded before it is cast.
    twice = 0.0 if x.dtype == torch.float32 else 2.0**-24
    above = spacing.clamp_(min=least) / 2 + values.abs() * twice
    if has_minimum:
        low = values.amin(1, keepdim=True)
        above += above.amax(1, keepdim=True)
        return _Exact(values - low, above, above, low)
    # Below a power of two numbers are denser.
    is_power = (mantissa.abs() == 0.5) & (spacing > least)
    below = torch.where(is_power, above / 2, above)
    return _Exact(values, below, above, torch.zeros(len(x), 1))


def _multiples(x: Tensor, has_minimum: bool) -> _Multiples:
    """Write groups `[groups, size]` as multiples of a scale."""
    ranges = _WITH_MINIMUM_UP_TO if has_minimum else _UP_TO
    size = max(x.shape[1], _FEW * ranges[-1])
    parts = [
        _multiples_of(_exact(part, has_minimum), ranges)
        for part in torch.split(x, max(1, _BLOCK // size))
    ]
    return _Multiples(x, *map(torch.cat, zip(*parts, strict=True)))


def _multiples_of(exact: _Exact, ranges: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The codes and `is_found` of `_Multiples`, for the groups of a block."""
    largest, place = exact.values.abs().max(1, keepdim=True)
    error = exact.above.gather(1, place) / largest
    allowed = exact.above + (exact.values.abs() + exact.above) * error
    allowed *= _ABOUT_ONE + error
    codes = torch.zeros(exact.values.shape, dtype=torch.int16)
    is_found = largest.squeeze(1) == 0
    for first, end in pairwise(ranges):
        left = (~is_found).nonzero().squeeze(1)
        # Every divisor with every group, of which most are out after a few weights.
        few = exact.values[left, :_FEW]
        step = largest[left] / torch.arange(first, end)[:, None, None]
        off = (few / step).round_().mul_(step).sub_(few).abs_()
        divisor, group = (off <= allowed[left, :_FEW]).all(2).nonzero().unbind(1)
        tried = left[group]
        own = exact.of(tried)
        multiples = _rounded(own, largest[tried] / (divisor + first)[:, None])
        lower, upper = own.interval(multiples)
        fits = (lower <= upper * _ABOUT_ONE).squeeze(1)
        fits &= ((multiples == 0) <= (own.values.abs() <= own.above)).all(1)
        tried, multiples = tried[fits], multiples[fits]
        # Divisors ascend, and the least one of a group counts.
        firsts = torch.full((len(codes),), len(tried))
        firsts.scatter_reduce_(0, tried, torch.arange(len(tried)), "amin")
        is_new = firsts < len(tried)
        codes[is_new] = multiples[firsts[is_new]].short()
        is_found |= is_new
    return codes, is_found


def _rounded(exact: _Exact, step: Tensor) -> Tensor:
    """The weights as multiples of a scale that is close to the step."""
    # The step is as inexact as the largest weight, but small multiples are right with it, and give a better step.
    for part in (8, 2):
        multiples = (exact.values / step).round_()
        most = multiples.abs().amax(1, keepdim=True)
        small = multiples.masked_fill(multiples.abs() > most / part, 0.0)
        lower, upper = exact.interval(small)
        step = torch.where(upper.isfinite(), (lower + upper) / 2, step)
    return (exact.values / step).round_()


def _described(found: _Multiples, kind: FoundGrid, rows: int = 1) -> FoundGrid:
    """The grid that the multiples need, and how many groups lie on it.

    Args:
        found: The multiples.
        kind: Its kind, whatever the bits of integers are.
        rows: Rows of the weight.
    """
    above, below = _reach(found.codes)
    larger = torch.maximum(above, below)
    # A group that is on the grid by chance may need more bits than the others.
    usual = larger <= larger.sort().values[int(0.9 * (len(larger) - 1))]
    for counted in (torch.ones_like(usual), usual):
        best = _with_scales(found, _fewest_bits(found.codes[counted], kind), rows)
        if best.is_whole:
            break
    return best


def _fewest_bits(codes: Tensor, kind: FoundGrid) -> FoundGrid:
    """The first grid of a kind that has all codes, or the last one tried."""
    if kind.format != "int":
        return kind
    reach = _reach(codes)
    sides = [(False, False)]
    if not kind.has_minimum:
        sides = [(True, False), (True, True), (False, False)]
    for bits in range(2, MOST_BITS + 1):
        for symmetric, full in sides:
            grid = replace(kind, bits=bits, symmetric=symmetric, full=full)
            if bool(_room(reach, grid).all()):
                return grid
    return grid


def _with_scales(found: _Multiples, grid: FoundGrid, rows: int) -> FoundGrid:
    """The grid with the narrowest scales that hold the most groups, and the number of these."""
    is_zero = found.is_found & (found.codes == 0).all(1)
    best = replace(
        grid,
        bits=0,
        scale_dtype="float32",
        groups=len(found.x),
        on_grid=0,
        zeros=int(is_zero.sum()),
        scales=None,
    )
    own = dtype_name(found.x.dtype)
    # Servers load scales in the dtype of the model.
    dtypes = sorted(_SCALE_DTYPES, key=lambda dtype: (dtype == "float32", dtype != own))
    for dtype in dtypes if grid.format == "int" else dtypes[-1:]:
        tried = replace(best, bits=grid.bits, scale_dtype=dtype)
        scaled = _Scaled(found, tried)
        count = int(scaled.fits.sum())
        if count > best.on_grid:
            best = replace(tried, on_grid=count)
        if best.is_whole:
            break
    if best.is_whole and not best.has_minimum:
        best = replace(best, scales=scaled.scales(rows))
    return best


class _Scaled:
    """Groups on a grid, whose codes reach as far as they can.

    Attributes:
        codes: int16 `[groups, size]`, around zero.
        scale: float32 `[groups]`, above zero.
        fits: bool `[groups]`: whether these give every weight.

    Args:
        found: The groups as multiples.
        grid: The grid.
    """

    def __init__(self, found: _Multiples, grid: FoundGrid) -> None:
        self._found = found
        self._grid = grid
        self._precision = grid.grid.at(grid.bits)
        self.codes = found.codes.clone()
        self.scale = torch.ones(len(self.codes))
        self.fits = found.is_found & (self.codes == 0).all(1)
        room = _room(_reach(found.codes), grid)
        self._try(room, lambda exact, part, own: found.codes[part] * own)
        if found.x.dtype != torch.float32 and grid.format == "int":
            # Large codes are ambiguous in half precision, and the least multiples may be others.
            top = torch.full_like(room, self._precision.reach)
            largest = found.x.double().abs().amax(1, keepdim=True)
            self._try(
                top, lambda exact, part, own: _rounded(exact, largest[part] / own)
            )

    def _try(
        self, numbers: Tensor, codes_of: Callable[[_Exact, Tensor, Tensor], Tensor]
    ) -> None:
        """Count each group's number down to 1 until a scale gives the weights with its codes."""
        left = (self._found.is_found & ~self.fits & (numbers > 0)).nonzero().squeeze(1)
        while len(left):
            for part in torch.split(left, max(1, _BLOCK // self.codes.shape[1])):
                x = self._found.x[part]
                exact = _exact(x, self._grid.has_minimum)
                codes = codes_of(exact, part, numbers[part, None]).short()
                lower, upper = exact.interval(codes)
                scale = as_stored(((lower + upper) / 2).float(), self._precision)
                values = (codes * scale + exact.low.float()).to(x.dtype)
                fits = (values == x).all(1) & (_room(_reach(codes), self._grid) > 0)
                if self._precision.is_float:
                    steps = float_steps(codes.float(), self._precision)
                    fits &= (codes % steps == 0).all(1)
                done = part[fits]
                self.codes[done], self.scale[done] = codes[fits], scale[fits, 0]
                self.fits[done] = True
            numbers[left] -= 1
            left = left[~self.fits[left] & (numbers[left] > 0)]

    def scales(self, rows: int) -> Scales:
        """Scales and zero points as `quantizer.quantize` gives them, for a weight of so many rows."""
        above, below = _reach(self.codes)
        shape = rows, len(self.codes) // rows
        if not self._grid.symmetric:
            return Scales(self.scale.view(shape), below.view(shape))
        # The largest weight has the code on the longer side.
        is_turned = (above >= below) & (above > 0) & self._grid.full
        return Scales(torch.where(is_turned, -self.scale, self.scale).view(shape))


def _reach(codes: Tensor) -> tuple[Tensor, Tensor]:
    """How far the codes of each group are above and below zero, int32 `[groups]`."""
    low, high = codes.int().aminmax(dim=1)
    return high.clamp(min=0), -low.clamp(max=0)


def _room(reach: tuple[Tensor, Tensor], grid: FoundGrid) -> Tensor:
    """The number by which the codes of each group can be multiplied and still be codes, int32 `[groups]`."""
    above, below = reach
    own = grid.grid.at(grid.bits)
    if not grid.symmetric:
        return _times(above + below, own.high)
    room = _times(torch.maximum(above, below), -own.low)
    return torch.minimum(room, _times(torch.minimum(above, below), own.high))


def _times(codes: Tensor, most: int) -> Tensor:
    """How many times codes go into the largest one."""
    times: Tensor = torch.full_like(codes, most).floor_divide_(codes.clamp(min=1))
    return times
