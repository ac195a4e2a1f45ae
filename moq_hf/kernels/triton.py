"""The Triton kernel behind `triton_quant`, which launches it; importing this module needs Triton.

The numbers are those of `quantizer`, bit for bit: division rounds to nearest
(`tl.div_rn`), and a launch must not fuse products with sums (`enable_fp_fusion=False`).
"""

import triton
import triton.language as tl

_SIGN = tl.constexpr(-2147483648)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_TINY = tl.constexpr(1.1754943508222875e-38)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
_LARGEST_FLOAT16 = tl.constexpr(65504.0)
_LEAST_FLOAT16 = tl.constexpr(5.9604644775390625e-08)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def fake_quantize_kernel(
    X_ptr,
    Y_ptr,
    scale_ptr,
    ratio_ptr,
    noise_ptr,
    n_rows,
    n_cols,
    low,
    high,
    blend,
    keep,
    SYMMETRIC: tl.constexpr,
    FULL: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """`quantizer.fake_quantize_with_scale` for equal steps: a row is a group, and a program takes BLOCK_ROWS of them.

    Args:
        X_ptr: Weights `[n_rows, n_cols]`.
        Y_ptr: Where fake-quantized weights go, in any float dtype.
        scale_ptr: Where float32 scales go, `[n_rows]`.
        ratio_ptr: float32 clipping ratios `[n_rows]`, or None.
        noise_ptr: float32 random numbers of stochastic rounding `[n_rows, n_cols]`, or
            None.
        n_rows: Number of groups.
        n_cols: Weights of a group.
        low: The least code, a float.
        high: The greatest code, a float.
        blend: Share of the float weight, or None.
        keep: 1 - blend.
        SYMMETRIC: Whether codes lie around zero.
        FULL: Whether the least code is used, and scales have a sign.
        SCALE_DTYPE: What scales are rounded to.
        BLOCK_ROWS: Groups of a program, a power of two.
        BLOCK_SIZE: Columns of a tile, a power of two.
    """
    row_idx = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row_idx < n_rows
    row_start = (row_idx * n_cols)[:, None]

    # The first pass finds the range. Magnitudes are compared as integers, among which
    # NaN is above all others.
    top = tl.zeros([BLOCK_ROWS], tl.int32)
    bottom = tl.zeros([BLOCK_ROWS], tl.int32)
    for first_col in range(0, n_cols, BLOCK_SIZE):
        col_offsets = first_col + tl.arange(0, BLOCK_SIZE)[None, :]
        mask = row_mask[:, None] & (col_offsets < n_cols)
        x = tl.load(X_ptr + row_start + col_offsets, mask=mask, other=0.0).to(
            tl.float32
        )
        magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
        if SYMMETRIC and not FULL:
            top = tl.maximum(top, tl.max(magnitude, 1))
        else:
            top = tl.maximum(top, tl.max(tl.where(x <= 0, 0, magnitude), 1))
            bottom = tl.maximum(bottom, tl.max(tl.where(x >= 0, 0, magnitude), 1))
    top = top.to(tl.float32, bitcast=True)
    bottom = -bottom.to(tl.float32, bitcast=True)

    if FULL:
        top = tl.where(top >= -bottom, top, bottom)
    if ratio_ptr is not None:
        ratio = tl.load(ratio_ptr + row_idx, mask=row_mask, other=1.0)
        top = top * ratio
        bottom = bottom * ratio
    span = top if SYMMETRIC else top - bottom
    scale = tl.div_rn(span, tl.zeros_like(span) + (low if FULL else high))
    scale = _as_stored(tl.where(tl.abs(scale) < _TINY, 1.0, scale), SCALE_DTYPE)
    tl.store(scale_ptr + row_idx, scale, mask=row_mask)
    zero = tl.minimum(tl.maximum(_round(tl.div_rn(-bottom, scale)), low), high)[:, None]
    scale = scale[:, None]

    # The second pass finds the weights in the L2 cache.
    for first_col in range(0, n_cols, BLOCK_SIZE):
        col_offsets = first_col + tl.arange(0, BLOCK_SIZE)[None, :]
        mask = row_mask[:, None] & (col_offsets < n_cols)
        x = tl.load(X_ptr + row_start + col_offsets, mask=mask, other=0.0).to(
            tl.float32
        )
        code = tl.div_rn(x, tl.zeros_like(x) + scale)
        if noise_ptr is None:
            code = _round(code)
        else:
            code = tl.floor(
                code
                + tl.load(noise_ptr + row_start + col_offsets, mask=mask, other=0.0)
            )
        if SYMMETRIC:
            code = tl.minimum(tl.maximum(code, low), high)
        else:
            code = tl.minimum(tl.maximum(code + zero, low), high) - zero
        y = code * scale
        if blend is not None:
            y = y * keep + x * blend
        tl.store(
            Y_ptr + row_start + col_offsets, _cast(y, Y_ptr.dtype.element_ty), mask=mask
        )


@triton.jit
def _round(y):
    """Round half to even, with the sign of zero kept, for |y| <= 2^22: Triton's interpreter has no `rint`."""
    rounded = (y + 12582912.0) - 12582912.0
    magnitude = rounded.to(tl.int32, bitcast=True) & _MAGNITUDE
    return (magnitude | (y.to(tl.int32, bitcast=True) & _SIGN)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _as_stored(scale, SCALE_DTYPE: tl.constexpr):
    """Round scales to their dtype, as `quantizer._as_stored`."""
    size = tl.abs(scale)
    is_kept = (scale == 0.0) | ((size <= _LARGEST) == 0)
    if SCALE_DTYPE == tl.bfloat16:
        size = _cast(tl.minimum(size, _LARGEST_BFLOAT16), SCALE_DTYPE).to(tl.float32)
    elif SCALE_DTYPE == tl.float16:
        size = (
            tl.minimum(tl.maximum(size, _LEAST_FLOAT16), _LARGEST_FLOAT16)
            .to(SCALE_DTYPE)
            .to(tl.float32)
        )
    return tl.where(is_kept, scale, tl.where(scale < 0.0, -size, size))


@triton.jit
def _cast(values, DTYPE: tl.constexpr):
    """Cast to a dtype, half to even: Triton's interpreter cuts bfloat16 off, where the hardware rounds."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -65536).to(
            tl.float32, bitcast=True
        )
        values = tl.where(values == values, rounded, values)
    return values.to(DTYPE)
