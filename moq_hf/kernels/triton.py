"""The Triton kernel behind `triton_quant`, which launches it; importing this module needs Triton.

The numbers are those of `quantizer`, bit for bit. A launch must not fuse products with
sums (`enable_fp_fusion=False`): what is fused is written as `tl.fma`.
"""

import triton
import triton.language as tl
from triton.language import constexpr, float32, int32, uint32
from triton.language.extra import libdevice

_MAGNITUDE = constexpr(0x7FFFFFFF)
_EXPONENT = constexpr(0x7F800000)
INTERPRETED = constexpr(triton.knobs.runtime.interpret)


@triton.jit(do_not_specialize=["n_rows"])
def fake_quantize_kernel(
    X_ptr,
    Y_ptr,
    scale_ptr,
    levels_ptr,
    noise_ptr,
    n_rows,
    n_cols,
    SYMMETRIC: constexpr,
    BLENDS: constexpr,
    SCALE_DTYPE: constexpr,
    FORMAT: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_COLS: constexpr,
    ONE_TILE: constexpr,
):
    """`quantizer.fake_quantize_with_scale` for equal steps: a row is a group, and a program takes BLOCK_ROWS of them.

    Args:
        X_ptr: Weights `[n_rows, n_cols]`.
        Y_ptr: Where fake-quantized weights go, in any float dtype.
        scale_ptr: Where float32 scales go, `[n_rows]`.
        levels_ptr: float32 `[8 + n_rows]` of `triton_quant.Levels`: all that a precision
            is, read from memory, so that one compiled kernel, and one captured CUDA
            graph, serve all bit widths.
        noise_ptr: float32 random numbers of stochastic rounding `[n_rows, n_cols]`, or
            None.
        n_rows: Number of groups.
        n_cols: Weights of a group, at most 2^23.
        SYMMETRIC: Whether codes lie around zero.
        BLENDS: Whether the float weight has a share in the result.
        SCALE_DTYPE: What scales are rounded to, by its name.
        FORMAT: What codes are at 4 bits; see `Grid`.
        BLOCK_ROWS: Groups of a program, a power of two.
        BLOCK_COLS: Columns of a tile, a power of two.
        ONE_TILE: Whether a row is one tile, which then stays in registers.
    """
    # The program's first weight may lie beyond 2^31; within its rows 32 bits suffice.
    # Rows past the last are the last one again, and store what it stores.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    rows = tl.minimum(rows, (n_rows - 1 - first_row).to(int32))
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    starts = first_row * n_cols + rows * n_cols
    end = BLOCK_COLS if ONE_TILE else n_cols
    low = tl.load(levels_ptr)
    high = tl.load(levels_ptr + 1)
    # Negative where the least code is used: then scales have a sign.
    farthest = tl.load(levels_ptr + 2)
    blend = tl.load(levels_ptr + 3)
    keep = tl.load(levels_ptr + 4)

    # The first pass finds the range. Each thread keeps that of what it reads, and they
    # are compared at the end. The bits of positive numbers are in order as integers,
    # those of negative ones are, by magnitude, above all of them as integers without a
    # sign, and NaN is beyond both.
    x = tl.full([BLOCK_ROWS, BLOCK_COLS], 0.0, float32)
    top = _bits(x, int32)
    bottom = _bits(x, uint32)
    for first in range(0, end, BLOCK_COLS):
        x = _load(X_ptr + starts + first, cols, n_cols - first)
        top = tl.maximum(top, _bits(x, int32))
        bottom = tl.maximum(bottom, _bits(x, uint32))
    top = _largest(top)
    bottom = _bits(_largest(bottom), int32)
    # Zero, where no number is negative.
    bottom = bottom & (bottom >> 31)
    if SYMMETRIC:
        size = bottom & _MAGNITUDE
        top = tl.where(top >= size, top, tl.where(farthest < 0, bottom, size))
    span = _bits(top, float32)
    bottom = _bits(bottom, float32)

    ratio = tl.load(levels_ptr + 8 + first_row + rows)
    span = span * ratio
    if not SYMMETRIC:
        bottom = bottom * ratio
        span = span - bottom
    scale = tl.div_rn(span, farthest)
    # Below the smallest normal number a group becomes zeros.
    scale = tl.where(tl.abs(scale) < 2.0**-126, 1.0, scale)
    is_fp4 = tl.load(levels_ptr + 5) > 0
    found = scale
    scale = _as_stored(scale, SCALE_DTYPE)
    scale = tl.where(is_fp4, _as_stored(found, FORMAT), scale)
    tl.store(scale_ptr + first_row + rows, scale)

    # What is divided by: a power of two brings the scale's magnitude to between 2 and
    # 4, so that no step of a division leaves the normal numbers, but for quotients that
    # round to zero.
    shift = _bits((_bits(scale, int32) & _EXPONENT) ^ _EXPONENT, float32)
    divisor = tl.abs(scale) * shift
    inverse = tl.div_rn(1.0, divisor)
    if not SYMMETRIC:
        # A code to which the zero point is not added has lower limits.
        zero = _divide(-bottom, divisor, shift, inverse)
        zero = _round(tl.clamp(zero, low, high))
        low, high = low - zero, high - zero
    elif noise_ptr is None:
        # Codes of a negative scale's magnitude have the other sign.
        low, high = tl.where(scale < 0, -high, low), tl.where(scale < 0, -low, high)
        scale = tl.abs(scale)

    # The second pass finds the tiles in a cache, or the only one still in registers.
    for first in range(0, end, BLOCK_COLS):
        if not ONE_TILE:
            x = _load(X_ptr + starts + first, cols, n_cols - first)
        noise = None
        if noise_ptr is not None:
            noise = _load(noise_ptr + starts + first, cols, n_cols - first)
        if noise_ptr is None and FORMAT == "int":
            code = _divide(x, divisor, shift, inverse)
        else:
            # A weight that a scale of E4M3 clips can be too large for the shift.
            code = tl.div_rn(x, scale)
        if FORMAT == "int":
            code = _code(code, noise, low, high)
        else:
            # Codes are 1, 2 or 4 apart.
            far = tl.where(is_fp4, tl.abs(code), 0.0)
            step = tl.where(far < 4, 1.0, tl.where(far < 8, 2.0, 4.0))
            code = _code(tl.div_rn(code, step), noise, low, high)
            code = tl.clamp(code * step, low, high)
        # What a zero point was added to and taken from has no -0.
        y = code * scale if SYMMETRIC else tl.fma(code, scale, 0.0)
        if BLENDS:
            y = y * keep + x * blend
        tl.store(Y_ptr + starts + first + cols, y, mask=cols < n_cols - first)


@triton.jit
def _load(X_ptr, cols, n_cols):
    """Columns of a tile as float32, zeros past the last."""
    return tl.load(X_ptr + cols, mask=cols < n_cols, other=0.0).to(float32)


@triton.jit
def _largest(tile):
    # `tl.max` itself would not follow TRITON_INTERPRET where it is set after the import.
    return tl.reduce(tile, 1, tl.standard._elementwise_max, keep_dims=True)


@triton.jit
def _bits(x, DTYPE: constexpr):
    """The bits of numbers, or the numbers of bits."""
    return x.to(DTYPE, bitcast=True)


@triton.jit
def _divide(x, divisor, shift, inverse):
    """Compute x * shift / divisor, rounded to nearest, by Markstein's division.

    The product with the inverse is corrected once, by what it is too much, which is
    exact. In this order of signs a zero keeps its own.
    """
    x = x * shift
    if INTERPRETED:
        # Before Triton 3.9 the interpreter's `fma` rounds twice.
        return tl.div_rn(x, divisor)
    quotient = x * inverse
    # Before Triton 3.9 -x is 0 - x, which has no -0.
    excess = tl.fma(quotient, divisor, x * -1.0)
    return tl.fma(excess * -1.0, inverse, quotient)


@triton.jit
def _code(y, noise, low, high):
    """Round to a whole number within limits: to nearest, or down after a random number is added."""
    if noise is None:
        rounded = _round(tl.clamp(y, low, high))
    else:
        y = tl.clamp(y + noise, low, high)
        # Triton's `floor` takes subnormal numbers for zeros.
        rounded = _round(y)
        rounded = tl.where(rounded > y, rounded - 1, rounded)
    return rounded


@triton.jit
def _round(y):
    """Round half to even, with the sign of zero kept."""
    if not INTERPRETED:
        return libdevice.rint(y)
    # The interpreter has no functions of devices; this is for |y| <= 2^22.
    rounded = _bits((y + 12582912.0) - 12582912.0, int32) & _MAGNITUDE
    return _bits(rounded | (_bits(y, int32) & ~_MAGNITUDE), float32)


@triton.jit
def _as_stored(scale, DTYPE: constexpr):
    """Round scales other than zero to their dtype, as `quantizer._as_stored`; NaN and infinities stay."""
    size = tl.abs(scale)
    is_finite = size <= 3.4028234663852886e38
    if DTYPE == "bfloat16":
        # Half to even by hand: Triton's interpreter cuts off.
        bits = _bits(tl.minimum(size, 3.3895313892515355e38), int32)
        size = _bits((bits + 0x7FFF + (bits >> 16 & 1)) & -65536, float32)
    if DTYPE == "float16":
        size = tl.clamp(size, 2.0**-24, 65504.0).to(tl.float16).to(float32)
    if DTYPE == "nvfp4":
        size = tl.clamp(size * 256.0, 2.0**-9, 448.0)
        # Numbers of E4M3 are an eighth of a power of two apart, and 2^-9 at least.
        step = tl.maximum(_bits(_bits(size, int32) & _EXPONENT, float32), 2.0**-6)
        size = _round(tl.div_rn(size, step) * 8) * step * 2.0**-11
    if DTYPE == "mxfp4":
        # From 1.75 of a power of two on, the sum has the next exponent.
        raised = (_bits(size, int32) + (1 << 21)) & _EXPONENT
        size = tl.minimum(_bits(raised, float32), 2.0**124)
    return tl.where(is_finite, tl.where(scale < 0, -size, size), scale)
