"""Arithmetic that the Triton kernels share, with the numbers of plain PyTorch, bit for bit.

A launch must not fuse products with sums (`enable_fp_fusion=False`): fused ones are
written as `tl.fma`. The numbers of a row share a scale.
"""

import triton
import triton.language as tl
from triton.language import constexpr, float32, int16, int32, uint32
from triton.language.extra import libdevice

INTERPRETED = constexpr(triton.knobs.runtime.interpret)
MAGNITUDE = constexpr(0x7FFFFFFF)
EXPONENT = constexpr(0x7F800000)
TINY = constexpr(2.0**-126)
# Adding this and subtracting it again rounds a number of up to 2^22 in magnitude to an
# integer, half to even.
WHOLE = constexpr(12582912.0)


@triton.jit
def bits_as(x, DTYPE: constexpr):
    """Reinterpret numbers as bits, or bits as numbers."""
    return x.to(DTYPE, bitcast=True)


@triton.jit
def load(pointer, inside):
    """Read a tile as float32, with zeros past the last column."""
    return tl.load(pointer, mask=inside, other=0.0).to(float32)


@triton.jit
def store(pointer, x, inside):
    """Write a float32 tile in the dtype of the pointer, rounded half to even."""
    if INTERPRETED:
        if pointer.dtype.scalar.element_ty == tl.bfloat16:
            # The interpreter truncates, and has no subnormal numbers.
            pointer = pointer.to(tl.pointer_type(int16), bitcast=True)
            x = (bits_as(as_dtype(x, "bfloat16"), int32) >> 16).to(int16)
    tl.store(pointer, x, mask=inside)


@triton.jit
def as_dtype(x, DTYPE: constexpr):
    """Round float32 numbers to a dtype, by its name."""
    if DTYPE == "float16":
        return x.to(tl.float16).to(float32)
    if DTYPE == "bfloat16":
        if not INTERPRETED:
            return x.to(tl.bfloat16).to(float32)
        # The interpreter truncates.
        bits = bits_as(x, int32)
        rounded = bits_as((bits + 0x7FFF + (bits >> 16 & 1)) & -65536, float32)
        return tl.where(x == x, rounded, x)
    return x


# `tl.max`, `tl.sum` and `tl.cdiv` would not follow TRITON_INTERPRET if it is set after the import.
@triton.jit
def largest_of(tile):
    """The largest number of each row."""
    return tl.reduce(tile, 1, tl.standard._elementwise_max, keep_dims=True)


@triton.jit
def sum_of(tile):
    """The sum of each row."""
    return tl.reduce(tile, 1, tl.standard._sum_combine, keep_dims=True)


@triton.jit
def ends_of(x):
    """The bits of the largest and of the least number of each row.

    As integers, the bits of positive numbers are in order; as integers without a sign,
    those of negative numbers are above them, ordered by magnitude; NaN is beyond both.
    """
    return largest_of(bits_as(x, int32)), bits_as(largest_of(bits_as(x, uint32)), int32)


@triton.jit
def range_of(top, bottom, farthest, SYMMETRIC: constexpr):
    """The ends of rows as in `quantizer._range`, from the bits of `ends_of`."""
    # Zero if no number is negative; and `top` is below zero if all numbers are.
    bottom = bottom & (bottom >> 31)
    if SYMMETRIC:
        size = bottom & MAGNITUDE
        top = tl.where(top >= size, top, tl.where(farthest < 0, bottom, size))
    top = bits_as(top, float32)
    if not SYMMETRIC:
        top = tl.where(top < 0, 0.0, top)
    return bits_as(bottom, float32), top


@triton.jit
def uniform_scale(
    bottom, top, ratio, farthest, SYMMETRIC: constexpr, STORED: constexpr
):
    """The scales of rows with these ends, as in `quantizer._uniform_scale`, and their clipped least numbers."""
    bottom = bottom * ratio
    span = top * ratio
    if not SYMMETRIC:
        span = span - bottom
    scale = tl.div_rn(span, farthest)
    # Below the smallest normal number a group becomes zeros.
    scale = tl.where(tl.abs(scale) < TINY, 1.0, scale)
    return as_stored(scale, STORED), bottom


@triton.jit
def nearest_code(quotient, low, high):
    """The integer within limits that is nearest to a quotient."""
    return round_even(tl.clamp(quotient, low, high))


@triton.jit
def fp4_step(code):
    """The distance between neighboring codes of FP4: 1, 2 or 4."""
    far = tl.abs(code)
    return tl.where(far < 4, 1.0, tl.where(far < 8, 2.0, 4.0))


@triton.jit
def fp8_step(code):
    """The distance between neighboring codes of FP8: 1, or an eighth of the power of two below."""
    power = bits_as(bits_as(code, int32) & EXPONENT, float32)
    return tl.clamp(power, 8.0, 131072.0) * 0.125


@triton.jit
def with_sign_of(size, x):
    """Give a magnitude the sign of another number."""
    return bits_as(bits_as(size, int32) | (bits_as(x, int32) & ~MAGNITUDE), float32)


@triton.jit
def divide(x, divisor, shift, inverse):
    """Compute x * shift / divisor, rounded to nearest, by Markstein's division.

    The product with the inverse is corrected once by its excess, which is exact. In this
    order of signs a zero keeps its own.
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
def round_even(x):
    """Round half to even, with the sign of zero kept."""
    if not INTERPRETED:
        return libdevice.rint(x)
    # The interpreter has no device functions; this works for |x| <= 2^22.
    return with_sign_of(tl.abs((x + WHOLE) - WHOLE), x)


@triton.jit
def as_stored(scale, STORED: constexpr):
    """Round scales as they are stored, see `quantizer.as_stored`; zeros, NaN and infinities stay."""
    size = tl.abs(scale)
    is_rounded = (size > 0) & (size <= 3.4028234663852886e38)
    if STORED == "bfloat16":
        size = as_dtype(tl.minimum(size, 3.3895313892515355e38), STORED)
    if STORED == "float16":
        size = as_dtype(tl.clamp(size, 2.0**-24, 65504.0), STORED)
    if STORED == "fp8-float16":
        size = tl.clamp(size * 512.0, 2.0**-24, 65504.0)
        size = as_dtype(size, "float16") * 2.0**-9
    if STORED == "nvfp4":
        size = tl.clamp(size * 256.0, 2.0**-9, 448.0)
        # Numbers of E4M3 are an eighth of a power of two apart, and at least 2^-9.
        step = tl.maximum(bits_as(bits_as(size, int32) & EXPONENT, float32), 2.0**-6)
        size = round_even(tl.div_rn(size, step) * 8) * step * 2.0**-11
    if STORED == "mxfp4":
        # From 1.75 of a power of two on, the sum has the next exponent.
        raised = (bits_as(size, int32) + (1 << 21)) & EXPONENT
        size = tl.minimum(bits_as(raised, float32), 2.0**124)
    return tl.where(is_rounded, tl.where(scale < 0, -size, size), scale)
