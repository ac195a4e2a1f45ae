"""The numerics of moq_hf in plain PyTorch: the definition that every faster path is tested against.

A weight `[rows, columns]` is cut into groups that share one scale, as its `Grid` says: consecutive blocks of whole rows,
one per channel, or runs of consecutive weights within a row. All arithmetic is float32 whatever the weight's dtype,
rounding is half to even, and the result is cast once. With b bits:

| grid | scale | codes |
| --- | --- | --- |
| symmetric, b >= 3 | r max abs(x) / (2^(b-1) - 1) | clip(round(x / scale), -(2^(b-1) - 1), 2^(b-1) - 1) |
| symmetric, full range, b >= 2 | r m / -2^(b-1), m the x of largest magnitude, with its sign | clip(round(x / scale), -2^(b-1), 2^(b-1) - 1) |
| asymmetric, b >= 2 | r (hi - lo) / (2^b - 1), lo = min(0, min x), hi = max(0, max x) | clip(round(x / scale) + zero, 0, 2^b - 1), zero = clip(round(-r lo / scale), 0, 2^b - 1) |
| ternary (symmetric, b = 2) | mean of abs(x) above t = 0.7 mean abs(x) | sign(x) where abs(x) > t, else 0 |
| binary (b = 1) | mean abs(x) | sign(x), sign(0) = +1 |

r is the clipping ratio of the group, 1 unless given. Sums (ternary, binary, squared errors) are exact and so do not depend
on the order of summation: each of the n terms, of which none exceeds m, is first rounded to a multiple of the float64
spacing at 2 n m, which is relative to m about n / 2^52. A group whose scale would be below the smallest normal float32
in magnitude (all zeros, or too small to matter) becomes zeros.

A full range puts its extra code where the largest weight is: m > 0 makes a negative scale. Of +m and -m in one group
+m counts. It is ggml's rule for Q4_0; there the first of the two counts, and a half rounds to the larger code.

A `scale_dtype` of less than 32 bits rounds each scale, half to even, before zero points and codes are computed with it.
So codes fit the scale that a server loads in that dtype. A scale beyond the largest finite value of the dtype becomes
that value, and one below the smallest positive value (float16: 2^-24, which is subnormal) becomes that, each with its
sign. So float16 clips weights beyond 65504 (2^(b-1) - 1), and makes zeros of a group whose weights are all below 2^-25.
A scale that is zero, NaN or Inf stays.

Sources: uniform grids as in DeepSpeed's MoQ; ternary from Li et al. 2016, "Ternary Weight Networks" (0.7 is their
threshold factor); binary from Rastegari et al. 2016, "XNOR-Net"; Philox4x32-10 from Salmon et al. 2011, "Parallel
Random Numbers: As Easy as 1, 2, 3".
"""  # noqa: E501 - a table row cannot be broken

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .grid import Grid, ScaleDtype

# The clipping ratios that a search tries. Saved states hold their indices.
RATIOS = tuple((100 - 5 * k) / 100 for k in range(17))
_TINY = torch.finfo(torch.float32).tiny
_MASK32 = 0xFFFFFFFF
# Weights that a search on a CPU takes at once.
_PART = 2**16
_DEFAULT = Grid()
_SCALE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Draw(NamedTuple):
    """Which random numbers stochastic rounding takes: the same in every process, and after a resume.

    Attributes:
        seed: Key of the generator, 0 to 2^63 - 1.
        layer: Number of the layer in its model, 0 to 2^32 - 1.
        step: Optimizer steps taken, 0 to 2^32 - 1.
    """

    seed: int = 0
    layer: int = 0
    step: int = 0


_FIRST = Draw()


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


_ROWS = Groups()


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: int32 `[rows, columns]`. Symmetric codes are signed, asymmetric ones unsigned.
        scale: float32 `[groups, 1]`, or `[rows, columns / group_size]`, values of the grid's `scale_dtype`. Those of a
            full range have a sign.
        zero_point: int32, the shape of `scale`; None for symmetric grids.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


def quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    draw: Draw = _FIRST,
    first: int = 0,
) -> Quantized:
    """Quantize a weight to integer codes.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype and device.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale, and how codes are rounded.
        ratio: Clipping ratios, float32 of the scale's shape, in (0, 1]. None is 1 everywhere (absmax).
        draw: The random numbers of stochastic rounding.
        first: Of a part of a weight: which of the weight's random numbers its first element gets.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight, or the weight holds NaN or Inf.

    >>> quantize(torch.tensor([[0.5, -1.0, 0.25]]), 3).codes
    tensor([[ 2, -3,  1]], dtype=torch.int32)
    """
    found = quantize_unchecked(weight, bits, grid, ratio=ratio, draw=draw, first=first)
    if not bool(torch.isfinite(found.scale).all()):
        raise ValueError("weight holds NaN or Inf (or spans more than float32 can hold)")
    return found


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


def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(codes - zero_point) * scale in float32, cast to `dtype`.

    Args:
        codes: Integer `[rows, columns]`.
        scale: float32 `[r, c]`, where r divides the rows and c the columns: a group is a tile.
        zero_point: Integer of the scale's shape, or None.
        dtype: Dtype of the result.

    Raises:
        ValueError: The scale's shape does not tile the codes.

    >>> dequantize(torch.tensor([[2, -3, 1]]), torch.tensor([[0.25]]))
    tensor([[ 0.5000, -0.7500,  0.2500]])
    """
    rows, columns = codes.shape
    if scale.dim() != 2 or rows % scale.shape[0] or columns % scale.shape[1]:
        raise ValueError(f"scale {list(scale.shape)} does not tile codes {list(codes.shape)}")
    tiles = codes.to(torch.float32).view(scale.shape[0], -1, scale.shape[1], columns // scale.shape[1])
    if zero_point is not None:
        tiles = tiles - zero_point.to(torch.float32)[:, None, :, None]
    return (tiles * scale[:, None, :, None]).reshape(codes.shape).to(dtype)


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


def nonfinite(values: Tensor, grid: Grid = _DEFAULT) -> Tensor:
    """Whether a result of `fake_quantize` came from a weight with NaN or Inf: a bool scalar on the values' device.

    Args:
        values: The result, or several, one below the other in the grid: `[..., rows, columns]`, with any strides.
        grid: Which weights share a scale.
    """
    columns = values.shape[-1]
    height = values.numel() // columns
    shape = grid.shape(height, columns)
    # A group of rows begins at one of these, in whichever result.
    step = math.gcd(height // shape[0], values.shape[-2])
    first = values.detach()[..., ::step, :: columns // shape[1]]
    # NaN where one of them is not finite, else zero.
    return (first * 0).sum().isnan()


def least_squares_ratio(weight: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """The clipping ratio of each group, out of 1.00, 0.95, ... 0.20, with the least sum of squared errors.

    Errors are those of nearest rounding, squared in float32; ties go to the larger ratio.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype and device.
        bits: Bit width, 2 to 16.
        grid: Which weights share a scale.

    Returns:
        float32 ratios in the scale's shape.

    Raises:
        ValueError: Bits or groups do not fit, or the grid is ternary or binary.

    >>> least_squares_ratio(torch.tensor([[0.1, 0.2, 0.1, 1.0]]), 3)
    tensor([[0.9500]])
    """
    shape = check_search(weight, bits, grid)
    x = _grouped(weight, shape)
    # What fits the caches of a CPU; any other device is given all at once.
    size = _PART if x.device.type == "cpu" else x.numel()
    best = [
        best_ratio(torch.split(groups, size, 1), bits, grid) for groups in torch.split(x, max(size // x.shape[1], 1))
    ]
    return torch.cat(best).reshape(shape)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four streams of 32 random bits.

    Args:
        counter: Four int64 tensors of one shape holding 32-bit words.
        key: Two 32-bit words.

    Returns:
        Four int64 tensors holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two 32-bit words wraps in int64 without losing a bit of its low 64.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (p1 >> 32).bitwise_and_(_MASK32).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(_MASK32).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_MASK32), p0.bitwise_and_(_MASK32)
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(count: int, draw: Draw = _FIRST, *, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """`count` float32 numbers in (0, 1): element i is (w + 1/2) / 2^23, w the top 23 bits of a Philox word.

    The word is number i % 4 of block i // 4. The key is the seed's two halves, the counter (low half of i // 4, high
    half, step, layer). Neither 0 nor 1 occurs, so that stochastic rounding leaves zeros alone. The first of them is
    element `first`.
    """
    block = torch.arange(first // 4, (first + count + 3) // 4, dtype=torch.int64, device=device)
    words = philox(
        (block & _MASK32, block >> 32, torch.full_like(block, draw.step), torch.full_like(block, draw.layer)),
        (draw.seed & _MASK32, draw.seed >> 32),
    )
    words_in_order = torch.stack(words, 1).view(-1)[first % 4 : first % 4 + count]
    return ((words_in_order >> 9).to(torch.float32) + 0.5) * 2.0**-23


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


def check_search(weight: Tensor, bits: int, grid: Grid) -> tuple[int, int]:
    """The shape of the scale, once a search for clipping ratios is found possible.

    Raises:
        ValueError: It is not; see `least_squares_ratio`.
    """
    shape = check(weight, bits, replace(grid, stochastic=False))
    if not grid.is_uniform(bits):
        raise ValueError(f"{bits} bits symmetric sets its own scale: there is no clipping ratio to search")
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
