"""The formula of moq_hf in plain PyTorch: the definition, against which the Triton kernels are tested.

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
| MXFP4 (b = 4, groups of 32) | p(r max abs(x)) / 8 | clip(e(x / scale), -12, 12) |
| NVFP4 (b = 4, groups of 16) | E4M3(2^8 r max abs(x) / 12) / 2^8 | clip(e(x / scale), -12, 12) |
| FP8 (b = 8, rows) | r max abs(x) / 448 / 512 | 512 E4M3(x / (512 scale)) |

MXFP4 and NVFP4 have the numbers of E2M1 for codes, here twice their values: 0, 1, 2, 3, 4, 6, 8 and 12 with a sign,
where zero has none. So a scale is half of that in the files. e rounds to the nearest of them, a tie to the even one
(0, 2, 4, 8): 1 apart below 4, 2 apart below 8, then 4. p(y) is the power of two at or below y, or above it from 1.75 of
that on, where less would clip more; it is 2^127 at most, so that no weight is Inf. E4M3 rounds half to even, from 2^-9 to 448. The
scale of the whole tensor, 2^-7 in the files, is the same for every layer, so that fused layers can share it: group scales
are exact to four bits from 2^-14 to 7 / 4, and weights beyond 21 are clipped. Since scales are powers of two times a
number of four bits, each weight is exact in bfloat16.

FP8 has the numbers of E4M3 for codes, here 512 times their values, so that the least one is 1 and the last 448 * 512, and
a scale is a 512th of that in the files. That scale, max abs(x) / 448, and E4M3 are compressed-tensors' own; its cast is
torch.float8_e4m3fn's, after clipping to 448.

r is the clipping ratio of the group, 1 unless given; NVFP4's may be above 1, so that the largest weight is not at 6.
Stochastic rounding replaces round(y) by floor(y + u), u uniform in [0, 1). Sums are sums of integers, so that their
order makes no difference: of magnitudes (ternary, binary), see `exact_sum`, whose means are rounded to float32, and of
squared errors, see `least_squares_ratio`. A group whose scale would be below the smallest normal float32 in magnitude
(all zeros, or too small to matter) becomes zeros.

A full range puts its extra code where the largest weight is: m > 0 makes a negative scale. If a group has both +m and
-m, +m counts. It is ggml's rule for Q4_0, except that there the first of the two counts, and a half rounds to the larger
code.

A `scale_dtype` of less than 32 bits rounds each scale, half to even, before zero points and codes are computed with it.
So codes fit the scale that a server loads in that dtype. A scale beyond the largest finite value of the dtype becomes
that value, and one below the smallest positive value (float16: 2^-24, which is subnormal) becomes that, each with its
sign. So float16 clips weights beyond 65504 (2^(b-1) - 1), and makes zeros of a group whose weights are all below 2^-25.
A scale that is zero, NaN or Inf stays.

Sources: uniform grids as in DeepSpeed's MoQ; ternary from Li et al. 2016, "Ternary Weight Networks" (0.7 is their
threshold factor); binary from Rastegari et al. 2016, "XNOR-Net"; E2M1 and MXFP4 from the OCP Microscaling
specification 1.0, its exponent and NVFP4 as compressed-tensors 0.20 has them.
"""  # noqa: E501 - a table row cannot be broken

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .grid import FLOATS, FP4, FP8, Format, Grid, PerChannel, Precision

# The clipping ratios that a search tries, and those above 1 that it tries for NVFP4,
# in which a group's least error may be with its largest weight at 4. Saved states hold
# their indices.
RATIOS = tuple((100 - 5 * k) / 100 for k in range(17))
HIGHER_RATIOS = tuple((18 - k) / 10 for k in range(8))
# MXFP4's ratio 1.0 clips nothing; a larger exponent cannot help.
_RATIOS_OF: dict[Format, tuple[float, ...]] = {
    "int": RATIOS,
    "mxfp4": (1.0, 0.5),
    "nvfp4": HIGHER_RATIOS + RATIOS[:9],
    "fp8": RATIOS,
}
_TINY = torch.finfo(torch.float32).tiny
_BELOW_TINY = _TINY - 2.0**-149
# Weights that a CPU takes at once, since all of them would not fit its caches: 1 MB of
# float32, which PyTorch divides among up to eight threads. With fewer, the overhead of
# calls would exceed what the caches save.
_BLOCK = 262_144
_DEFAULT = Grid()


class RoundingSeed(NamedTuple):
    """The key of the random numbers for stochastic rounding: the same in every process, and after a resume.

    Attributes:
        seed: Key of the generator, 0 to 2^63 - 1.
        layer: Number of the layer in its model.
        step: Optimizer steps taken.
    """

    seed: int = 0
    layer: int = 0
    step: int = 0


_FIRST = RoundingSeed()


class Quantized(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: int32 `[rows, columns]`. Symmetric codes are signed, asymmetric ones
            unsigned.
        scale: float32 `[groups, 1]`, or `[rows, columns / group_size]`, values of the
            grid's `scale_dtype`. Those of a full range have a sign.
        zero_point: int32, the shape of `scale`; None for symmetric grids.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


class Scales(NamedTuple):
    """The scales and zero points of a weight's groups, which do not follow from its values.

    Attributes:
        scale: As of `Quantized`.
        zero_point: As of `Quantized`.
    """

    scale: Tensor
    zero_point: Tensor | None = None


def quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    scales: Scales | None = None,
) -> Quantized:
    """Quantize a weight to integer codes.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype and device.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale, and how codes are rounded.
        ratio: Clipping ratios, float32 of the scale's shape, above 0. None is 1
            everywhere (absmax).
        seed: The random numbers of stochastic rounding.
        scales: Scales and zero points to take; None computes them.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight, or the weight holds NaN
            or Inf.

    >>> quantize(torch.tensor([[0.5, -1.0, 0.25]]), 3).codes
    tensor([[ 2, -3,  1]], dtype=torch.int32)
    """
    shape = check(weight, bits, grid, ratio)
    precision = grid.at(bits)
    x = _groups(weight, shape)
    noise = uniform(x, seed) if grid.stochastic else None
    scale, offset = _scales(x, precision, ratio, scales)
    buffer = torch.empty_like(x, dtype=torch.float32)
    codes = _codes(x, precision, scale, offset, noise, buffer)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError(
            "weight holds NaN or Inf (or spans more than float32 can hold)"
        )
    codes = codes.to(torch.int32).reshape(weight.shape)
    zero = None
    if offset is not None and not grid.symmetric:
        zero = offset.to(torch.int32).reshape(shape)
    return Quantized(codes, scale.reshape(shape), zero)


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(codes - zero_point) * scale in float32, cast to `dtype`.

    Args:
        codes: Integer `[rows, columns]`.
        scale: float32 `[r, c]`, where r divides the rows and c the columns: a group is
            a tile.
        zero_point: Integer of the scale's shape, or None.
        dtype: Dtype of the result.

    Raises:
        ValueError: The scale's shape does not tile the codes.

    >>> dequantize(torch.tensor([[2, -3, 1]]), torch.tensor([[0.25]]))
    tensor([[ 0.5000, -0.7500,  0.2500]])
    """
    rows, columns = codes.shape
    if scale.dim() != 2 or rows % scale.shape[0] or columns % scale.shape[1]:
        raise ValueError(
            f"scale {list(scale.shape)} does not tile codes {list(codes.shape)}"
        )
    values = codes.to(torch.float32)
    if zero_point is not None:
        values = values - per_weight(zero_point, codes.shape)
    return (values * per_weight(scale, codes.shape)).to(dtype)


def per_weight(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat the values that groups or blocks share, for each weight of a matrix or for parts of its rows.

    Args:
        values: `[r, c]`, where r divides the rows and c the columns.
        shape: Rows and columns of the result.
    """
    rows = values.repeat_interleave(shape[0] // values.shape[0], 0)
    return rows.repeat_interleave(shape[1] // values.shape[1], 1)


def fake_quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Exactly `dequantize(*quantize(weight, ...))`, in fewer passes over memory and without the codes.

    It takes the arguments of `fake_quantize_with_scale`, and raises the same errors.

    >>> fake_quantize(torch.tensor([[0.5, -1.0, 0.25]]), 2)
    tensor([[ 0.7500, -0.7500,  0.0000]])
    """
    return fake_quantize_with_scale(
        weight, bits, grid, ratio=ratio, seed=seed, blend=blend, dtype=dtype
    )[0]


def fake_quantize_with_scale(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Fake-quantize a weight, and return its scale too.

    Nothing is raised for NaN or Inf, so that a GPU need not wait for the host. The scale
    of a group is not finite exactly if the group holds NaN or Inf, or spans more than
    float32 can hold, so checking the scales checks the weight without a second pass over
    it.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype, device and strides.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale, and how codes are rounded.
        ratio: Clipping ratios, float32 of the scale's shape, above 0. None is 1
            everywhere (absmax).
        seed: The random numbers of stochastic rounding.
        blend: Share b of the float weight in the result b * w + (1 - b) * Q(w), 0 to 1.
        dtype: Dtype of the result; None is the weight's.

    Returns:
        A contiguous tensor of the weight's shape, without a graph, and the scale,
        float32 `[groups, 1]`.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    check(weight, bits, grid, ratio)
    return rounded(weight, grid.at(bits), ratio, seed, blend, dtype)


def rounded(
    weight: Tensor,
    precision: Precision,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """As `fake_quantize_with_scale`, without checks: `check` has accepted the arguments; `scales` as for `quantize`."""
    grid = precision.grid
    x = _groups(weight, grid.grouping.shape(*weight.shape))
    scale, offset = _scales(x, precision, ratio, scales)
    noise = uniform(x, seed) if grid.stochastic else None
    out = torch.empty_like(x, dtype=dtype or weight.dtype)
    whole = x, scale, offset, noise, out
    is_buffered = out.dtype != torch.float32
    blocks: Iterable[tuple[Any, ...]] = [whole]
    # A float32 result with equal steps is computed in place, without a buffer to keep in the caches.
    if is_buffered or precision.is_float or not precision.is_uniform:
        blocks = _blocks(*whole)
    clips = ratio is not None or scales is not None or precision.clips
    for part, factors, offsets, noises, result in blocks:
        values = torch.empty_like(part, dtype=torch.float32) if is_buffered else result
        _on_grid(part, precision, factors, offsets, noises, values, clips)
        if blend:
            values.mul_(1.0 - blend).add_(part.to(torch.float32) * blend)
        if is_buffered:
            result.copy_(values)
    return out.view(weight.shape), scale


def least_squares_ratio(weight: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """The clipping ratio of each group, out of 1.00, 0.95, ... 0.20, with the least sum of squared errors.

    MXFP4 has the ratios 1.0 and 0.5, NVFP4 1.8, 1.7, ... 1.0, 0.95, ... 0.60.

    Errors are those of nearest rounding, and their sum is the same in every order: weights
    and scales of n weights are multiplied by 2^(h - e), where 2^e is at or below the
    largest magnitude of the group and h is half of 51 less the bit length of n, rounded
    down, so that no sum of squares reaches 2^53. Of each error's square, in float32, the
    whole part counts. Ties go to the larger ratio.

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
    shape = check(weight, bits, replace(grid, stochastic=False))
    precision = grid.at(bits)
    if not precision.is_uniform:
        raise ValueError(
            f"{bits} bits symmetric sets its own scale: there is no clipping ratio to search"
        )
    x = _groups(weight, shape)
    best = [_best_ratio(part, precision) for (part,) in _blocks(x)]
    return torch.cat(best).view(shape)


def gptq(weight: Tensor, moment: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """Round a weight so that its products with inputs change less than by rounding to nearest.

    Columns are rounded one after the other, and the remaining ones make up for the error
    as far as the inputs let them (Frantar et al., 2022, arXiv 2210.17323; as there, 0.01
    of the mean square of an input is added to each). A scale of groups within a row is
    found when its first column is due.

    Args:
        weight: Floating-point `[rows, columns]`, any dtype and device.
        moment: The sum over inputs `[..., columns]` of their products with each other,
            `[columns, columns]`, up to a factor.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale. Rounding is to nearest in any case.

    Returns:
        float32 `[rows, columns]`, on the grid: quantizing it again changes a group only
        if none of its weights reaches the last code. Of symmetric grids that is one
        group in 100 or fewer, of asymmetric ones up to one in 10.

    Raises:
        ValueError: Bits or groups do not fit the weight.
        torch.linalg.LinAlgError: The moment does not come from finite inputs.

    >>> moment = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> gptq(torch.tensor([[0.45, 0.45, 1.0]]), moment, 3)
    tensor([[0.3333, 0.6667, 1.0000]])
    """
    check(weight, bits, replace(grid, stochastic=False))
    rows, columns = weight.shape
    damping = 0.01 * moment.diagonal().mean()
    damped = moment.double() + damping * torch.eye(columns, device=moment.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    left = weight.detach().to(torch.float32, copy=True)
    rounded = torch.empty_like(left)
    size = columns
    if grid.grouping.row_size is not None:
        size = grid.grouping.row_size
        grid = replace(grid, grouping=PerChannel())
    precision = grid.at(bits)
    for first in range(0, columns, size):
        group = left[:, first : first + size]
        ratio = least_squares_ratio(group, bits, grid) if precision.searches else None
        x = _groups(group, grid.shape(*group.shape))
        scale, offset = _scales(x, precision, ratio)
        scale = per_weight(scale, (rows, 1))
        if offset is not None:
            offset = per_weight(offset, (rows, 1))
        for column in range(first, first + size):
            part = slice(column, column + 1)
            _on_grid(left[:, part], precision, scale, offset, None, rounded[:, part])
            error = (left[:, part] - rounded[:, part]) / factor[column, column]
            left[:, column + 1 :] -= error @ factor[part, column + 1 :]
    return rounded


def uniform(
    like: Tensor, seed: RoundingSeed = _FIRST, out: Tensor | None = None
) -> Tensor:
    """Uniform float32 numbers in [0, 1) of the shape and on the device of a tensor, by `Tensor.uniform_`.

    The generator is seeded with 63 bits of the SHA-256 of seed, layer and step. So
    numbers are the same on one kind of device.

    Args:
        like: Gives shape and device.
        seed: The three numbers.
        out: Tensor to fill; None makes a new one.
    """
    digest = hashlib.sha256(repr(tuple(seed)).encode()).digest()
    generator = torch.Generator(like.device).manual_seed(
        int.from_bytes(digest[:8]) >> 1
    )
    if out is None:
        out = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return out.uniform_(generator=generator)


def check(
    weight: Tensor, bits: int, grid: Grid = _DEFAULT, ratio: Tensor | None = None
) -> tuple[int, int]:
    """Check arguments, except for the weight's values, and return the shape of the scale.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a non-empty floating-point matrix, got {weight.dtype} of shape {list(weight.shape)}"
        )
    shape = grid.shape(*weight.shape)
    precision = grid.at(bits)
    precision.check()
    if ratio is not None and not precision.is_uniform:
        raise ValueError(
            f"{bits} bits symmetric sets its own scale: it takes no clipping ratio"
        )
    if ratio is not None and tuple(ratio.shape) != shape:
        raise ValueError(
            f"ratio has shape {list(ratio.shape)}, the scale has {list(shape)}"
        )
    return shape


def _groups(weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """Lay groups out as rows, a view if the weight is contiguous; float64 becomes float32."""
    x = weight.detach().contiguous().view(shape[0] * shape[1], -1)
    return x.to(torch.float32) if x.dtype == torch.float64 else x


def _blocks(
    x: Tensor, *others: Tensor | None, copies: int = 1
) -> Iterator[tuple[Any, ...]]:
    """Yield the groups to take at once, with their part of the others: on a CPU as many as fit its caches.

    `copies` is how many times their memory in float32 is needed meanwhile.
    """
    groups = x.shape[0]
    size = groups
    if x.device.type == "cpu":
        size = max(1, _BLOCK // (copies * x.shape[1]))
    if size >= groups:
        yield x, *others
        return
    for first in range(0, groups, size):
        rows = slice(first, first + size)
        yield tuple(None if tensor is None else tensor[rows] for tensor in (x, *others))


def _scales(
    x: Tensor,
    precision: Precision,
    ratio: Tensor | None,
    given: Scales | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Find the scale of groups, and their offset: the zero point, or the threshold of ternary groups.

    Both are float32 `[groups, 1]`; the offset is None for symmetric grids with equal
    steps.
    """
    if given is not None:
        # A scale is not finite where a weight is not.
        scale = given.scale.reshape(-1, 1) + 0.0 * x.abs().amax(1, keepdim=True)
        zero = given.zero_point
        return scale, None if zero is None else zero.reshape(-1, 1).float()
    if precision.is_uniform:
        ratio = None if ratio is None else ratio.reshape(-1, 1)
        return _uniform_scale(*_range(x, precision), precision, ratio)
    parts = [_few_scales(part, precision.bits) for (part,) in _blocks(x, copies=3)]
    scales, thresholds = zip(*parts, strict=True)
    return as_stored(torch.cat(scales), precision), torch.cat(thresholds)


def _few_scales(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Find the scale of binary or ternary groups, and the threshold of ternary ones."""
    magnitude = x.to(torch.float32).abs()
    largest = magnitude.amax(1, keepdim=True)
    mean = _mean(magnitude, largest, x.shape[1])
    # A group that is too small to matter has nothing above its threshold.
    threshold = torch.threshold(mean, _BELOW_TINY, torch.inf).mul_(0.7)
    if bits == 1:
        return torch.threshold(mean, _BELOW_TINY, 0.0), threshold
    # A comparison is quicker when it writes floats.
    above = torch.gt(magnitude, threshold, out=torch.empty_like(magnitude))
    scale = _mean(magnitude.mul_(above), largest, above.sum(1, keepdim=True))
    return torch.where(mean < _TINY, 1.0, scale), threshold


def exact_sum(terms: Tensor, largest: Tensor) -> Tensor:
    """Add numbers up as integers, so that the sum is the same in every order, and in parts.

    Each is multiplied by 2^k and truncated to an int64, where k is the largest number with
    which 2^62 cannot be reached: 62 - e - n, with 2^e above all of them and n the bit
    length of their count. So the largest number becomes an integer of at most 62 - n bits.

    Args:
        terms: float32 `[groups, count]`, not negative, of fewer than 2^31 numbers each.
        largest: float32 `[groups, 1]`: at least the largest number of each group, or NaN
            or Inf like that.

    Returns:
        float64 `[groups, 1]`; not finite where `largest` is not.
    """
    # Subnormal numbers count as the least normal one.
    power = _power_below(largest).clamp_(min=_TINY)
    shift = 2.0 ** (61 - terms.shape[1].bit_length())
    whole = (terms / power).mul_(shift).to(torch.int64)
    # Positive, except for NaN and Inf, whose power is infinite.
    total = whole.sum(1, keepdim=True).to(torch.float64).abs_()
    return total.mul_(power).div_(shift)


def _codes(
    x: Tensor,
    precision: Precision,
    scale: Tensor,
    offset: Tensor | None,
    noise: Tensor | None,
    out: Tensor,
    clips: bool = True,
) -> Tensor:
    """Write the codes of groups, integers, to the float32 memory of `out`; `scale` and `offset` are from `_scales`.

    `clips` says that a code may be beyond the last one; see `Precision`.
    """
    if precision.bits == 1:
        return torch.ge(x, 0.0, out=out).mul_(2.0).sub_(1.0)
    if offset is not None and not precision.is_uniform:
        return out.copy_(x).abs_().gt_(offset).copysign_(x)
    torch.div(x, scale, out=out)
    steps = None
    if precision.is_float:
        # Multiplying and dividing by it is exact.
        steps = float_steps(out, precision)
        out.div_(steps)
    if noise is None:
        out.round_()
    else:
        out.add_(noise).floor_()
    if steps is not None:
        out.mul_(steps)
    if offset is not None:
        out.add_(offset)
    return out.clamp_(precision.low, precision.high) if clips else out


def float_steps(codes: Tensor, precision: Precision) -> Tensor:
    """The distance between neighboring float codes at each number: 1 near zero, then a part of the power of two below.

    Numbers beyond the last code have a step that keeps them there, to be clipped.

    Args:
        codes: float32, not rounded.
        precision: A grid of a float format, at its bits.
    """
    parts = FLOATS[precision.format].parts
    return _power_below(codes).clamp_(parts, precision.high).mul_(1 / parts)


def _on_grid(
    x: Tensor,
    precision: Precision,
    scale: Tensor,
    offset: Tensor | None,
    noise: Tensor | None,
    out: Tensor,
    clips: bool = True,
) -> Tensor:
    """Write the values of groups on their grid to `out`; the arguments are those of `_codes`."""
    _codes(x, precision, scale, offset, noise, out, clips)
    if offset is not None and not precision.grid.symmetric:
        out.sub_(offset)
    return out.mul_(scale)


def _mean(magnitude: Tensor, largest: Tensor, count: int | Tensor) -> Tensor:
    return exact_sum(magnitude, largest).div_(count).to(torch.float32)


def _range(x: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Find both ends of groups, float32 `[groups, 1]`, with 0 in between.

    For a symmetric grid the second is the number that gives the scale: the largest magnitude,
    with its sign for a full range.
    """
    low = x.amin(1, keepdim=True).float()
    high = x.amax(1, keepdim=True).float()
    if not precision.grid.symmetric:
        return low.clamp_(max=0.0), high.clamp_(min=0.0)
    mirrored = -low
    if precision.is_full:
        return low, torch.where(high >= mirrored, high, low)
    return low, torch.maximum(high, mirrored)


def _uniform_scale(
    low: Tensor, high: Tensor, precision: Precision, ratio: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the scale and the zero point of groups from their ends, each `[groups, 1]`."""
    symmetric = precision.grid.symmetric
    if ratio is not None:
        low = low * ratio
        high = high * ratio
    span = high if symmetric else high - low
    # On CUDA, dividing by a Python number would multiply by its reciprocal.
    scale = span / torch.full_like(span, precision.top)
    scale.masked_fill_(scale.abs() < _TINY, 1.0)
    scale = as_stored(scale, precision)
    if symmetric:
        return scale, None
    return scale, (-low / scale).round_().clamp_(precision.low, precision.high)


def as_stored(scale: Tensor, precision: Precision) -> Tensor:
    """Round scales to their dtype, but keep them as float32; beyond its range they become its largest value."""
    dtype = getattr(torch, precision.grid.scale_dtype)
    unit = 1.0
    if precision.format == "mxfp4":
        # From 1.75 of a power of two on, the sum has the next exponent.
        raised = (scale.view(torch.int32) + (1 << 21)).view(torch.float32)
        power = _power_below(raised).clamp_(max=2.0**124)
        return torch.where(scale.isfinite(), power, scale)
    if precision.format == "nvfp4":
        dtype, unit = torch.float8_e4m3fn, FP4["nvfp4"].unit
    if precision.format == "fp8":
        unit = FP8.unit
    if dtype == torch.float32:
        return scale
    limits = torch.finfo(dtype)
    # No scale is below the smallest normal float32, which is also bfloat16's; the other
    # dtypes need their subnormal values.
    least = limits.smallest_normal
    if dtype != torch.bfloat16:
        least *= limits.eps
    size = (scale.abs() * unit).clamp_(least, limits.max).to(dtype).to(torch.float32)
    stored = (size / unit).copysign_(scale)
    return torch.where((scale == 0) | scale.isinf(), scale, stored)


def _power_below(x: Tensor) -> Tensor:
    """The power of two at or below the magnitude of each float32 number; 0 for subnormal ones, Inf for Inf and NaN."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def ratios_of(format: Format) -> tuple[float, ...]:
    """The clipping ratios that a search tries, from the largest down."""
    return _RATIOS_OF[format]


def error_exponent(length: int) -> int:
    """The h of `least_squares_ratio`, for groups of the given length."""
    return (51 - length.bit_length()) // 2


def _error_unit(largest: Tensor, length: int) -> Tensor:
    """The power of two by which weights and scales of a group are multiplied: 2^(h - e), within float32's range.

    Args:
        largest: The largest magnitude of each group, float32.
        length: The number of weights in a group.
    """
    h = error_exponent(length)
    exponent = (largest.view(torch.int32) & 0x7F800000).clamp_(min=h << 23)
    # In this order no number is beyond int32.
    return ((127 + h << 23) - (exponent - (127 << 23))).view(torch.float32)


def _best_ratio(x: Tensor, precision: Precision) -> Tensor:
    """Search the ratios `[groups, 1]` of groups `[groups, elements]`; see `least_squares_ratio`."""
    x = x.to(torch.float32)
    low, high = _range(x, precision)
    unit = _error_unit(torch.maximum(low.abs(), high.abs()), x.shape[1])
    x = x * unit
    buffer = torch.empty_like(x)
    squares = torch.empty_like(x, dtype=torch.float64)
    best = torch.ones_like(high)
    best_error = torch.full_like(high, torch.inf, dtype=torch.float64)
    for value in ratios_of(precision.format):
        # The ratio is a tensor, because on some devices PyTorch multiplies by a Python
        # number in another precision.
        ratio = torch.full_like(high, value)
        scale, zero = _uniform_scale(low, high, precision, ratio)
        _on_grid(x, precision, scale.mul_(unit), zero, None, buffer)
        squares.copy_(buffer.sub_(x).square_().floor_())
        error = squares.sum(1, keepdim=True)
        best = torch.where(error < best_error, value, best)
        best_error = torch.fmin(best_error, error)
    return best
