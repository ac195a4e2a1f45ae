"""Finds the grid that weights lie on already, if a model was quantized and then written as floats.

The weights of a group lie on a grid if all are whole multiples of one scale. The least
multiples are searched, upwards from 1, by which the group's largest weight can be divided:
a scale belongs to a weight w and a multiple k if k times the scale, rounded to the weight's
dtype, is w, and to a group if it belongs to all of its weights. So each weight gives an
interval of scales, and what is found reproduces every weight exactly, in bfloat16 too. The
multiples then tell the bits of the tensor, and they are spread over all codes that those
bits have, as the rule of the grid does: its largest weight has the last code. Of the grids
that hold all groups, that of the fewest bits counts, then the one with the longest groups.

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
from .quantizer import Scales, as_stored
from .text import dtype_name

MOST_BITS = 8
# The lengths of groups within a row, besides whole rows.
_SIZES = (128, 64, 32, 16)
# Groups that are tried before all of them are.
_SAMPLE = 64
# Weights of a group that are tried before all of them are.
_FEW = 8
# The divisors that are tried together begin with these.
_UP_TO = (1, 16, 64, 1 << MOST_BITS)
_WITH_MINIMUM_UP_TO = (1, 32)
# Numbers that are taken at once.
_BLOCK = 1 << 20
_SCALE_DTYPES: tuple[ScaleDtype, ...] = ("float16", "bfloat16", "float32")
# More than the errors of interval arithmetic in float64.
_ABOUT_ONE = 1 + 2.0**-48
_FP4: tuple[Format, ...] = ("mxfp4", "nvfp4")
# The codes of E2M1, doubled.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
# What llama.cpp calls grids in groups of 32 with scales in float16, by their bits.
_SYMMETRIC = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
_WITH_MINIMUM = {4: "Q4_1", 5: "Q5_1"}


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
        """The same with its scales on a device."""
        if self.scales is None or self.scales.scale.device == device:
            return self
        parts = (None if x is None else x.to(device) for x in self.scales)
        return replace(self, scales=Scales(*parts))  # type: ignore[arg-type]

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
        names = _SYMMETRIC if self.symmetric else {}
        if self.has_minimum:
            kind, names = " with a minimum", _WITH_MINIMUM
        groups = f"in groups of {self.row_size}" if self.row_size else "per channel"
        name = names.get(self.bits)
        is_known = name and (self.row_size, self.scale_dtype) == (32, "float16")
        called = f" ({name})" if is_known else ""
        return f"{self.bits} bits{kind} {groups}, scales in {self.scale_dtype}{called}"


class _Multiples(NamedTuple):
    """Groups as multiples of a scale, as small as possible.

    Attributes:
        x: The weights `[groups, size]`, in their dtype.
        codes: int16 of the same shape; zeros where there is no such scale.
        is_found: bool `[groups]`; True for groups of zeros.
        low: The least weights, `[groups, 1]`, that were subtracted; None without.
    """

    x: Tensor
    codes: Tensor
    is_found: Tensor
    low: Tensor | None = None


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
        _described(_multiples(_sample(x), has_minimum), size, kind)
        for size, kind, has_minimum, x in _cut(weight)
    ]
    likely = [each for each in candidates if each.on_grid]
    likely.sort(key=_preference)
    best = FoundGrid(0, groups=len(weight))
    for each in likely:
        if best.is_whole or (best.bits and not each.is_whole):
            break
        x = weight.reshape(-1, each.row_size or weight.shape[1])
        found = _described(
            _multiples(x, each.has_minimum), each.row_size, each.format, len(weight)
        )
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


def _cut(weight: Tensor) -> Iterator[tuple[int | None, Format, bool, Tensor]]:
    """The groups of each length, with the kinds of codes to look for, and whether groups have a minimum."""
    columns = weight.shape[1]
    yield None, "int", False, weight
    for size in _SIZES:
        if columns % size:
            continue
        x = weight.reshape(-1, size)
        if size < columns:
            yield size, "int", False, x
        for name in _FP4:
            if FP4[name].group_size == size:
                yield size, name, False, x
        if size > 16:
            yield size, "int", True, x


def _sample(x: Tensor) -> Tensor:
    """Some of the groups, from all over the weight, without those that are zeros where others are there."""
    few = x[:: max(1, len(x) // (4 * _SAMPLE))]
    used = few[few.any(1)]
    return (used if len(used) else few)[:: max(1, len(used) // _SAMPLE)]


@dataclass(frozen=True)
class _Exact:
    """Weights `[groups, size]` in float64, and how much smaller and larger what was rounded to them may be."""

    values: Tensor
    below: Tensor
    above: Tensor

    def __getitem__(self, groups: Tensor) -> Self:
        parts = self.values, self.below, self.above
        return type(self)(*(part[groups] for part in parts))

    def interval(self, multiples: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest scale of groups, `[groups, 1]`, with these multiples; zeros give none."""
        unused = multiples == 0
        magnitude, size = self.values.abs(), multiples.abs()
        lower = ((magnitude - self.below) / size).masked_fill_(unused, 0.0)
        upper = ((magnitude + self.above) / size).masked_fill_(unused, torch.inf)
        return lower.amax(1, keepdim=True), upper.amin(1, keepdim=True)


def _exact(x: Tensor, low: Tensor | None) -> _Exact:
    """The weights, or how much larger than the least ones they are."""
    info = torch.finfo(x.dtype)
    values = x.double()
    mantissa, exponent = torch.frexp(values)
    spacing = torch.exp2(exponent.double() - 1) * info.eps
    least = info.smallest_normal * info.eps
    # A product in float32 is rounded before it is cast.
    twice = 0.0 if x.dtype == torch.float32 else 2.0**-24
    above = spacing.clamp_(min=least) / 2 + values.abs() * twice
    if low is not None:
        above += above.amax(1, keepdim=True)
        return _Exact(values - low.double(), above, above)
    # Below a power of two numbers are denser.
    is_power = (mantissa.abs() == 0.5) & (spacing > least)
    return _Exact(values, torch.where(is_power, above / 2, above), above)


def _multiples(x: Tensor, has_minimum: bool) -> _Multiples:
    """Write groups `[groups, size]` as multiples of a scale."""
    ranges = _WITH_MINIMUM_UP_TO if has_minimum else _UP_TO
    size = max(x.shape[1], _FEW * (ranges[-1]))
    parts = [
        _multiples_of(part, has_minimum, ranges)
        for part in torch.split(x, max(1, _BLOCK // size))
    ]
    codes, is_found, low = zip(*parts, strict=True)
    lows = torch.cat(low) if has_minimum else None
    return _Multiples(x, torch.cat(codes), torch.cat(is_found), lows)


def _multiples_of(
    x: Tensor, has_minimum: bool, ranges: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_multiples`, for groups to take at once; the multiples, whether there are any, and the least weights."""
    low = x.amin(1, keepdim=True)
    exact = _exact(x, low if has_minimum else None)
    largest, place = exact.values.abs().max(1, keepdim=True)
    error = exact.above.gather(1, place) / largest
    allowed = exact.above + (exact.values.abs() + exact.above) * error
    allowed *= _ABOUT_ONE + error
    codes = torch.zeros(x.shape, dtype=torch.int16)
    is_found = largest.squeeze(1) == 0
    for first, end in pairwise(ranges):
        left = (~is_found).nonzero().squeeze(1)
        # Every divisor with every group, of which most are out after a few weights.
        few = exact.values[left, :_FEW]
        step = largest[left] / torch.arange(first, end)[:, None, None]
        off = (few / step).round_().mul_(step).sub_(few).abs_()
        divisor, group = (off <= allowed[left, :_FEW]).all(2).nonzero().unbind(1)
        tried = left[group]
        multiples = _rounded(exact[tried], largest[tried] / (divisor + first)[:, None])
        lower, upper = exact[tried].interval(multiples)
        fits = (lower <= upper * _ABOUT_ONE).squeeze(1)
        is_zero = exact.values[tried].abs() <= exact.above[tried]
        fits &= ((multiples == 0) <= is_zero).all(1)
        tried, multiples = tried[fits], multiples[fits]
        # Divisors ascend, and the least one of a group counts.
        order = torch.arange(len(tried))
        firsts = torch.full((len(x),), len(tried))
        is_first = order == firsts.scatter_reduce(0, tried, order, "amin")[tried]
        codes[tried[is_first]] = multiples[is_first].short()
        is_found[tried] = True
    return codes, is_found, low


def _rounded(exact: _Exact, step: Tensor) -> Tensor:
    """The multiples of a scale that is nearly the step."""
    # The step is as inexact as the largest weight. Small multiples are right all the same, and tell it better.
    for part in (8, 2):
        multiples = (exact.values / step).round_()
        most = multiples.abs().amax(1, keepdim=True)
        small = multiples.masked_fill(multiples.abs() > most / part, 0.0)
        lower, upper = exact.interval(small)
        step = torch.where(upper.isfinite(), (lower + upper) / 2, step)
    return (exact.values / step).round_()


def _described(
    found: _Multiples,
    row_size: int | None,
    format: Format,
    rows: int = 0,
    usual: bool = False,
) -> FoundGrid:
    """The grid that the multiples need, and how many groups lie on it.

    Args:
        found: The multiples.
        row_size: Weights of a row in a group; None for whole rows.
        format: Kind of codes.
        rows: Rows of the weight, if scales are wanted.
        usual: Whether the bits are those of most groups, instead of all.
    """
    codes = found.codes
    high = codes.amax(1).clamp(min=0).int()
    low = -codes.amin(1).clamp(max=0).int()
    larger, smaller = torch.maximum(high, low), torch.minimum(high, low)
    if usual:
        # A group that is on the grid by chance may need more bits than the others.
        place = int(0.9 * (len(larger) - 1))
        is_usual = larger <= larger.sort().values[place]
        high, low = high * is_usual, low * is_usual
        larger, smaller = larger * is_usual, smaller * is_usual
    bits, full, symmetric = _bits_of(larger, smaller)
    if found.low is not None or format == "int":
        span = int((high + low).max())
        asymmetric = min(max(2, span.bit_length()), MOST_BITS)
        if asymmetric < bits or found.low is not None:
            bits, full, symmetric = asymmetric, False, False
    if format != "int":
        bits, full = FP4[format].bits, False
    grid = FoundGrid(
        min(bits, MOST_BITS),
        row_size,
        symmetric,
        full and bits <= MOST_BITS,
        format=format,
        has_minimum=found.low is not None,
        groups=len(codes),
        zeros=int((found.is_found & (codes == 0).all(1)).sum()),
    )
    best = replace(grid, bits=0)
    own = dtype_name(found.x.dtype)
    # Servers load scales in the dtype of the model.
    dtypes = sorted(_SCALE_DTYPES, key=lambda dtype: (dtype == "float32", dtype != own))
    for dtype in dtypes if format == "int" else dtypes[-1:]:
        tried = replace(grid, scale_dtype=dtype)
        scaled = _Scaled.of(found, tried)
        count = int(scaled.fits.sum())
        if count > best.on_grid:
            best = replace(tried, on_grid=count)
        if count == len(codes):
            if rows and found.low is None:
                best = replace(best, scales=scaled.scales(tried, rows))
            break
    if best.is_whole or usual:
        return best
    return _described(found, row_size, format, rows, usual=True)


def _bits_of(larger: Tensor, smaller: Tensor) -> tuple[int, bool, bool]:
    """The bits of symmetric codes that reach so far on either side, and whether the last one is needed."""
    bits = 2
    while bool((larger > 1 << bits - 1).any() or (smaller >= 1 << bits - 1).any()):
        bits += 1
    return bits, bool((larger == 1 << bits - 1).any()), True


@dataclass
class _Scaled:
    """Groups on a grid, whose codes reach as far as they can.

    Attributes:
        codes: int16 `[groups, size]`, around zero.
        scale: float32 `[groups]`, above zero.
        fits: bool `[groups]`: whether these give every weight.
    """

    codes: Tensor
    scale: Tensor
    fits: Tensor

    @classmethod
    def of(cls, found: _Multiples, grid: FoundGrid) -> "_Scaled":
        """Put groups on a grid."""
        codes = found.codes.clone()
        fits = found.is_found & (codes == 0).all(1)
        made = cls(codes, torch.ones(len(codes)), fits)
        room = _room(codes, grid)
        made._try(found, grid, room, lambda exact, part, own: found.codes[part] * own)
        if found.x.dtype != torch.float32 and grid.format == "int":
            # Large codes are ambiguous in half precision, and the least multiples may be others.
            top = 2**grid.bits - 1 if not grid.symmetric else 2 ** (grid.bits - 1)
            largest = found.x.double().abs().amax(1, keepdim=True)
            made._try(
                found,
                grid,
                torch.full_like(room, top),
                lambda exact, part, own: _rounded(exact, largest[part] / own),
            )
        return made

    def _try(
        self,
        found: _Multiples,
        grid: FoundGrid,
        numbers: Tensor,
        codes_of: Callable[[_Exact, Tensor, Tensor], Tensor],
    ) -> None:
        """Take the first number of each group, counted down to 1, with which its codes have a scale."""
        left = (found.is_found & ~self.fits & (numbers > 0)).nonzero().squeeze(1)
        while len(left):
            for part in torch.split(left, max(1, _BLOCK // self.codes.shape[1])):
                low = None if found.low is None else found.low[part]
                x, exact = found.x[part], _exact(found.x[part], low)
                codes = codes_of(exact, part, numbers[part, None]).short()
                lower, upper = exact.interval(codes)
                scale = ((lower + upper) / 2).float()
                if grid.format != "int" or grid.scale_dtype != "float32":
                    scale = as_stored(scale, grid.grid.at(grid.bits))
                values = codes * scale if low is None else codes * scale + low.float()
                fits = (values.to(x.dtype) == x).all(1) & (_room(codes, grid) > 0)
                if grid.format != "int":
                    fits &= torch.isin(codes.abs(), torch.tensor(_E2M1)).all(1)
                done = part[fits]
                self.codes[done], self.scale[done] = codes[fits], scale[fits, 0]
                self.fits[done] = True
            numbers[left] -= 1
            left = left[~self.fits[left] & (numbers[left] > 0)]

    def scales(self, grid: FoundGrid, rows: int) -> Scales:
        """Scales and zero points as `quantizer.quantize` gives them, for a weight of so many rows."""
        least, most = self.codes.int().aminmax(dim=1)
        shape = rows, len(self.codes) // rows
        if not grid.symmetric:
            return Scales(self.scale.view(shape), -least.clamp(max=0).view(shape))
        is_turned = (most >= -least) & (most > 0) & grid.full
        # The largest weight has the code on the longer side.
        return Scales(torch.where(is_turned, -self.scale, self.scale).view(shape))


def _room(codes: Tensor, grid: FoundGrid) -> Tensor:
    """The number by which the codes of each group can be multiplied and still be codes, int32 `[groups]`."""
    high = codes.amax(1).clamp(min=0).int()
    low = -codes.amin(1).clamp(max=0).int()
    larger, smaller = torch.maximum(high, low), torch.minimum(high, low)
    if grid.format != "int":
        return _times(larger, _E2M1[-1])
    if not grid.symmetric:
        return _times(high + low, 2**grid.bits - 1)
    top = 2 ** (grid.bits - 1)
    room = _times(larger, top - (not grid.full))
    return torch.minimum(room, _times(smaller, top - 1))


def _times(codes: Tensor, most: int) -> Tensor:
    """How many times codes go into the largest one."""
    times: Tensor = torch.full_like(codes, most).floor_divide_(codes.clamp(min=1))
    return times
