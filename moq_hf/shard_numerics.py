"""The sharded weights' copy of the numerics, until `shards` goes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import Grid, ScaleDtype
from .quantizer import RATIOS, Quantized
from .quantizer import RoundingSeed as Draw
from .quantizer import uniform as whole

_TINY = torch.finfo(torch.float32).tiny
_DEFAULT = Grid()
_SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Groups:
    """How the numbers of a group come together, which may lie in several rows and in several processes.

    Here a group is a row. What takes numbers takes `[rows, elements]`, and gives a number for each row, `[rows, 1]`,
    the same in all rows of a group.
    """

    def count(self, x: Tensor) -> int:
        """How many elements a group has."""
        return x.shape[1]

    def range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest element; zero may count as one."""
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """The sum, of float64 numbers that any order of summation gives the same sum, or of booleans."""
        return x.sum(1, keepdim=True)


_FIRST = Draw()
_ROWS = Groups()


def quantize_unchecked(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    draw: Draw = _FIRST,
    first: int = 0,
) -> Quantized:
    """`quantize` without a look at the scales, for which it waits for the device: of NaN or Inf they are not finite.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    shape = check(weight, bits, grid, ratio)
    x = _grouped(weight, shape)
    codes, scale, zero = codes_of(x, bits, grid, ratio, _noise(x, grid, draw, first), torch.empty_like(x))
    return Quantized(
        codes.to(torch.int32).reshape(weight.shape),
        scale.reshape(shape),
        None if zero is None else zero.to(torch.int32).reshape(shape),
    )


def fake_quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    draw: Draw = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Exactly `dequantize(*quantize(weight, ...))`, in fewer passes over memory and without the codes.

    A group that holds NaN or Inf comes out as NaN or Inf in its first element at least (see `nonfinite`): nothing is
    raised here, so that a GPU need not wait for the host.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype and device.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale, and how codes are rounded.
        ratio: Clipping ratios, float32 of the scale's shape, in (0, 1]. None is 1 everywhere (absmax).
        draw: The random numbers of stochastic rounding.
        blend: Share b of the float weight in the result b * w + (1 - b) * Q(w), 0 to 1.
        dtype: Dtype of the result; None is the weight's.
        out: Where to write the result: `weight`'s shape, contiguous, of the dtype wanted.
        first: Of a part of a weight: which of the weight's random numbers its first element gets.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.

    >>> fake_quantize(torch.tensor([[0.5, -1.0, 0.25]]), 2)
    tensor([[ 0.7500, -0.7500,  0.0000]])
    """
    x = _grouped(weight, check(weight, bits, grid, ratio))
    dtype = dtype or (weight.dtype if out is None else out.dtype)
    in_place = out is not None and out.dtype == torch.float32
    buffer = out.view(x.shape) if out is not None and in_place else torch.empty_like(x)
    values = blended(x, values_of(*codes_of(x, bits, grid, ratio, _noise(x, grid, draw, first), buffer)), blend)
    if in_place and out is not None:
        return out
    values = values.view(weight.shape)
    return values.to(dtype) if out is None else out.copy_(values)


def uniform(count: int, draw: Draw = _FIRST, *, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Numbers `first` to `first + count` of those of a weight."""
    return whole(torch.empty(first + count, device=device), draw)[first:]


def check(weight: Tensor, bits: int, grid: Grid = _DEFAULT, ratio: Tensor | None = None) -> tuple[int, int]:
    """The shape of the scale, once all arguments are found right.

    Raises:
        ValueError: They are not, short of what only the values of the weight would show.
    """
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a non-empty floating-point matrix, got {weight.dtype} of shape {list(weight.shape)}"
        )
    shape = grid.shape(*weight.shape)
    grid.check(bits)
    if ratio is not None and not grid.is_uniform(bits):
        raise ValueError(f"{bits} bits symmetric sets its own scale: it takes no clipping ratio")
    if ratio is not None and tuple(ratio.shape) != shape:
        raise ValueError(f"ratio has shape {list(ratio.shape)}, the scale has {list(shape)}")
    return shape


def _sizes(weight: Tensor, shape: tuple[int, int]) -> tuple[int, int]:
    """Groups and elements of each."""
    groups = shape[0] * shape[1]
    return groups, weight.numel() // groups


def _grouped(weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A row for each group, in float32."""
    return weight.detach().to(torch.float32).contiguous().view(*_sizes(weight, shape))


def _noise(x: Tensor, grid: Grid, draw: Draw, first: int) -> Tensor | None:
    return uniform(x.numel(), draw, first=first, device=x.device).view(x.shape) if grid.stochastic else None


def _exact(terms: Tensor, bound: Tensor, count: int) -> Tensor:
    """Some of the `count` terms of each group, in float64, so rounded that any order gives the same, exact sum."""
    large = bound.to(torch.float64) * (2.0 * count)
    return (terms + large).sub_(large)


def _range(x: Tensor, grid: Grid, groups: Groups) -> tuple[Tensor, Tensor]:
    """Lower and upper end: of narrow codes mirrored at zero, else with zero between them."""
    lo, hi = groups.range(x)
    if grid.symmetric and not grid.full:
        hi = torch.maximum(hi, -lo)
        return -hi, hi
    return lo.clamp_(max=0.0), hi.clamp_(min=0.0)


def _uniform_scale(lo: Tensor, hi: Tensor, bits: int, grid: Grid, ratio: Tensor | None) -> tuple[Tensor, Tensor | None]:
    least, most = grid.limits(bits)
    if grid.full:
        hi = torch.where(hi >= -lo, hi, lo)
    if ratio is not None:
        lo, hi = lo * ratio, hi * ratio
    span, steps = hi if grid.symmetric else hi - lo, least if grid.full else most
    # Division by a number would be a multiplication by its reciprocal on CUDA.
    scale = span / torch.full_like(span, steps)
    scale = _as_stored(torch.where(scale.abs() < _TINY, 1.0, scale), grid.scale_dtype)
    return scale, None if grid.symmetric else (-lo / scale).round_().clamp_(0, most)


def _as_stored(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Scales rounded to their dtype, in float32; what is too large or too small for it is its last or first value."""
    if dtype == "float32":
        return scale
    limits = torch.finfo(_SCALE_DTYPES[dtype])
    # What is given is not below the smallest normal float32, bfloat16's too; float16 has subnormal values.
    least = limits.smallest_normal * limits.eps if dtype == "float16" else limits.smallest_normal
    size = scale.abs().clamp_(least, limits.max).to(_SCALE_DTYPES[dtype]).to(torch.float32)
    return torch.where((scale == 0) | scale.isinf(), scale, size.copysign_(scale))


def best_ratio(parts: Sequence[Tensor], bits: int, grid: Grid, groups: Groups = _ROWS) -> Tensor:
    """`least_squares_ratio`, `[rows, 1]`, of rows that lie side by side in `parts`, float32 `[rows, elements]`."""
    ends = [_range(part, grid, groups) for part in parts]
    lo, hi = torch.stack([lo for lo, _ in ends]).amin(0), torch.stack([hi for _, hi in ends]).amax(0)
    best = torch.ones_like(hi)
    least = torch.full_like(hi, torch.inf, dtype=torch.float64)
    bound, count = (hi - lo).to(torch.float64).square(), sum(groups.count(part) for part in parts)
    for value in RATIOS:
        scale, zero = _uniform_scale(lo, hi, bits, grid, torch.full_like(hi, value))
        total = torch.zeros_like(least)
        for part in parts:
            codes = _uniform_codes(part, bits, grid, scale, zero, None, torch.empty_like(part))
            error = values_of(codes, scale, zero).sub_(part).square_()
            total += groups.total(_exact(error, bound, count))
        better = total < least
        best = torch.where(better, value, best)
        least = torch.where(better, total, least)
    return best


def _uniform_codes(
    x: Tensor, bits: int, grid: Grid, scale: Tensor, zero: Tensor | None, noise: Tensor | None, out: Tensor
) -> Tensor:
    torch.div(x, scale, out=out)
    if noise is None:
        out.round_()
    else:
        out.add_(noise).floor_()
    if zero is not None:
        out.add_(zero)
    return out.clamp_(*grid.limits(bits))


def codes_of(
    x: Tensor,
    bits: int,
    grid: Grid,
    ratio: Tensor | None,
    noise: Tensor | None,
    out: Tensor,
    groups: Groups = _ROWS,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `quantize` computes of rows of groups.

    Args:
        x: float32 `[rows, elements]`.
        bits: Bit width, which the grid has.
        grid: How codes are rounded; which weights share a scale is for `groups` to say.
        ratio: A clipping ratio for each row.
        noise: Numbers of stochastic rounding, of the shape of `x`; None rounds to nearest.
        out: Memory for the codes, of the shape of `x`.
        groups: How the numbers of a group come together.

    Returns:
        Codes in `out`, scale and zero point `[rows, 1]`: integers, all held in float32.
    """
    if grid.is_uniform(bits):
        ratio = None if ratio is None else ratio.reshape(-1, 1)
        scale, zero = _uniform_scale(*_range(x, grid, groups), bits, grid, ratio)
        return _uniform_codes(x, bits, grid, scale, zero, noise, out), scale, zero
    magnitude, count = torch.abs(x, out=out), groups.count(x)
    terms = _exact(magnitude, groups.range(magnitude)[1], count)
    total = groups.total(terms)
    mean = (total / torch.full_like(total, count)).to(torch.float32)
    if bits == 1:
        scale = _as_stored(torch.where(mean < _TINY, 0.0, mean), grid.scale_dtype)
        return torch.ge(x, 0.0, out=out).mul_(2.0).sub_(1.0), scale, None
    above = magnitude > mean * 0.7
    total = groups.total(terms.mul_(above))
    scale = torch.where(mean < _TINY, 1.0, (total / groups.total(above)).to(torch.float32))
    scale = _as_stored(scale, grid.scale_dtype)
    return torch.sign(x, out=out).mul_(above.logical_and_(mean >= _TINY)), scale, None


def blended(x: Tensor, values: Tensor, blend: float) -> Tensor:
    """The blend of floats and their quantized values, blend * x + (1 - blend) * values, in the memory of `values`."""
    return values.mul_(1.0 - blend).add_(x * blend) if blend else values


def values_of(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The weights that codes in float32 stand for, in their memory."""
    if zero is not None:
        codes.sub_(zero)
    return codes.mul_(scale)
