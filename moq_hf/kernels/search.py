"""The Triton kernel behind `triton_search`, which launches it; importing this module needs Triton.

A launch must not fuse products with sums (`enable_fp_fusion=False`).
"""

import triton
import triton.language as tl
from triton.language import constexpr, float32, int32, int64, uint32

from .triton import (
    _EXPONENT,
    _MAGNITUDE,
    _as_stored,
    _bits,
    _divide,
    _largest,
    _load,
)

# More than any sum of errors.
_TOO_LARGE = constexpr(1 << 62)
# What is added to a number of up to 2^22 in magnitude leaves a whole one, half to even.
_WHOLE = constexpr(12582912.0)


@triton.jit(do_not_specialize=["n_groups", "parts", "h", "low", "high", "farthest"])
def least_squares_kernel(
    X_ptr,
    best_ptr,
    sums_ptr,
    ends_ptr,
    ratios_ptr,
    n_groups,
    n_cols,
    parts,
    h,
    low,
    high,
    farthest,
    N_RATIOS: constexpr,
    SYMMETRIC: constexpr,
    SCALE_DTYPE: constexpr,
    FORMAT: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_COLS: constexpr,
    CHUNKS: constexpr,
):
    """`quantizer.least_squares_ratio`: a row is a group, and a program holds BLOCK_ROWS of them, or a part of one.

    Weights stay in registers, in chunks that give a thread whole vectors of one row: so
    few threads share a row, each computes few scales, and sums hardly leave it.

    Args:
        X_ptr: Weights `[n_groups, n_cols]`.
        best_ptr: Where the ratios go, float32 `[n_groups]`; None where a group has parts.
        sums_ptr: Where the sums of parts are added, int64 `[n_groups, N_RATIOS]`, or
            None.
        ends_ptr: The least and the greatest weight of groups that have parts, float32
            `[n_groups, 2]`, or None.
        ratios_ptr: The ratios to try, float32, from the largest on.
        n_groups: Number of groups.
        n_cols: Weights of a group.
        parts: Parts of a group.
        h: `quantizer.error_exponent` of the group's length.
        low: The least code.
        high: The largest code.
        farthest: The code of a group's largest weight; negative where that is the least
            code, so that scales have a sign.
        N_RATIOS: Number of ratios.
        SYMMETRIC: Whether codes lie around zero.
        SCALE_DTYPE: What scales are rounded to, by its name.
        FORMAT: What codes are.
        BLOCK_ROWS: Groups of a program, a power of two.
        BLOCK_COLS: Columns of a chunk, a power of two.
        CHUNKS: Chunks of a part, or of a row.
    """
    # Rows past the last are the last one again, and store what it stores.
    program = tl.program_id(0)
    part = program % parts
    first_row = (program // parts).to(int64) * BLOCK_ROWS
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    rows = first_row + tl.minimum(rows, (n_groups - 1 - first_row).to(int32))
    cols = part * (CHUNKS * BLOCK_COLS) + tl.arange(0, BLOCK_COLS)[None, :]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        place = cols + chunk * BLOCK_COLS
        chunks += (_load(X_ptr + rows * n_cols + place, place < n_cols),)

    if ends_ptr is None:
        # The bits of numbers are in order as in `_ends`.
        top = _bits(chunks[0], int32)
        bottom = _bits(chunks[0], uint32)
        for chunk in tl.static_range(1, CHUNKS):
            top = tl.maximum(top, _bits(chunks[chunk], int32))
            bottom = tl.maximum(bottom, _bits(chunks[chunk], uint32))
        top = tl.maximum(_largest(top), 0)
        bottom = _bits(_largest(bottom), int32)
        bottom = bottom & (bottom >> 31)
    else:
        bottom = _bits(tl.load(ends_ptr + 2 * rows), int32)
        top = _bits(tl.load(ends_ptr + 2 * rows + 1), int32)
    size = bottom & _MAGNITUDE
    largest = tl.maximum(top, size)
    if SYMMETRIC:
        top = tl.where(top >= size, top, tl.where(farthest < 0, bottom, size))
    span = _bits(top, float32)
    bottom = _bits(bottom, float32)
    exponent = tl.maximum(largest & _EXPONENT, h << 23)
    unit = _bits(((127 + h) << 23) - (exponent - (127 << 23)), float32)
    scaled = ()
    for chunk in tl.static_range(CHUNKS):
        scaled += (chunks[chunk] * unit,)

    best = tl.full([BLOCK_ROWS, 1], 1.0, float32)
    least = tl.full([BLOCK_ROWS, 1], _TOO_LARGE, int64)
    for index in range(N_RATIOS):
        ratio = tl.load(ratios_ptr + index)
        scale = span * ratio
        if not SYMMETRIC:
            scale = scale - bottom * ratio
        scale = tl.div_rn(scale, farthest)
        # Below the smallest normal number a group becomes zeros.
        scale = tl.where(tl.abs(scale) < 2.0**-126, 1.0, scale)
        scale = _as_stored(scale, SCALE_DTYPE if FORMAT == "int" else FORMAT)
        is_finite = tl.abs(scale) < float("inf")
        # Weights are clipped to these ends, so no quotient is beyond the last code.
        first, last = low, high
        if not SYMMETRIC:
            zero = tl.div_rn(bottom * -ratio, scale)
            zero = tl.clamp(zero, low, high)
            zero = (zero + _WHOLE) - _WHOLE
            first, last = low - zero, high - zero
        scale = scale * unit
        ends = first * scale, last * scale
        first, last = tl.minimum(ends[0], ends[1]), tl.maximum(ends[0], ends[1])
        inverse = tl.div_rn(1.0, scale)
        total = tl.full([BLOCK_ROWS, BLOCK_COLS], 0, int64)
        for chunk in tl.static_range(CHUNKS):
            x = scaled[chunk]
            clipped = tl.minimum(tl.maximum(x, first), last)
            error = _nearest(clipped, scale, inverse, FORMAT) * scale - x
            total += (error * error).to(int64)
        total = tl.reduce(total, 1, tl.standard._sum_combine, keep_dims=True)
        if sums_ptr is None:
            total = tl.where(is_finite, total, _TOO_LARGE)
            best = tl.where(total < least, ratio, best)
            least = tl.minimum(total, least)
        else:
            total = tl.where(is_finite, total, tl.where(part == 0, _TOO_LARGE, 0))
            tl.atomic_add(sums_ptr + rows * N_RATIOS + index, total, sem="relaxed")
    if sums_ptr is None:
        tl.store(best_ptr + rows, best)


@triton.jit
def _nearest(x, scale, inverse, FORMAT: constexpr):
    """The code of clipped weights: whatever sign a zero has, its error is the same."""
    code = _divide(x, scale, 1.0, inverse)
    whole = _WHOLE
    if FORMAT != "int":
        # Codes are 1, 2 or 4 apart.
        far = tl.abs(code)
        whole = tl.where(far < 4, 1.0, tl.where(far < 8, 2.0, 4.0)) * _WHOLE
    return (code + whole) - whole
