"""The Triton kernel behind `triton_search`, which launches it; importing this module needs Triton."""

import triton
import triton.language as tl
from triton.language import constexpr, float32, int32, int64, uint32

from .arithmetic import (
    EXPONENT,
    WHOLE,
    bits_as,
    divide,
    fp4_step,
    largest_of,
    load,
    nearest_code,
    range_of,
    sum_of,
    uniform_scale,
)

# More than any sum of errors.
_TOO_LARGE = constexpr(1 << 62)


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

    Weights stay in registers, in chunks that give each thread whole vectors of one row.
    So a row is shared by few threads, each computes few scales, and sums need little
    exchange.

    Args:
        X_ptr: Weights `[n_groups, n_cols]`.
        best_ptr: Where the ratios go, float32 `[n_groups]`; None if groups have parts.
        sums_ptr: Where the sums of parts are added, int64 `[n_groups, N_RATIOS]`, or
            None.
        ends_ptr: The least and the greatest weight of groups that have parts, float32
            `[n_groups, 2]`, or None.
        ratios_ptr: The ratios to try, float32, from the largest down.
        n_groups: Number of groups.
        n_cols: Weights of a group.
        parts: Parts of a group.
        h: `quantizer.error_exponent` of the group's length.
        low: The least code.
        high: The largest code.
        farthest: The code that a group's largest weight gets, see `Precision.top`;
            negative for a full range, where scales have a sign.
        N_RATIOS: Number of ratios.
        SYMMETRIC: Whether codes are around zero.
        SCALE_DTYPE: Name of the dtype that scales are rounded to.
        FORMAT: Kind of codes: "int", "mxfp4" or "nvfp4".
        BLOCK_ROWS: Groups of a program, a power of two.
        BLOCK_COLS: Columns of a chunk, a power of two.
        CHUNKS: Chunks of a part, or of a row.
    """
    # Rows past the end repeat the last row, and store the same.
    program = tl.program_id(0)
    part = program % parts
    first_row = (program // parts).to(int64) * BLOCK_ROWS
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    rows = first_row + tl.minimum(rows, (n_groups - 1 - first_row).to(int32))
    cols = part * (CHUNKS * BLOCK_COLS) + tl.arange(0, BLOCK_COLS)[None, :]
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        place = cols + chunk * BLOCK_COLS
        chunks += (load(X_ptr + rows * n_cols + place, place < n_cols),)

    if ends_ptr is None:
        # The bits of numbers are in order as in `ends_of`.
        top = bits_as(chunks[0], int32)
        bottom = bits_as(chunks[0], uint32)
        for chunk in tl.static_range(1, CHUNKS):
            top = tl.maximum(top, bits_as(chunks[chunk], int32))
            bottom = tl.maximum(bottom, bits_as(chunks[chunk], uint32))
        top = largest_of(top)
        bottom = bits_as(largest_of(bottom), int32)
    else:
        bottom = bits_as(tl.load(ends_ptr + 2 * rows), int32)
        top = bits_as(tl.load(ends_ptr + 2 * rows + 1), int32)
    bottom, top = range_of(top, bottom, farthest, SYMMETRIC)
    largest = bits_as(tl.maximum(tl.abs(bottom), tl.abs(top)), int32)
    exponent = tl.maximum(largest & EXPONENT, h << 23)
    unit = bits_as(((127 + h) << 23) - (exponent - (127 << 23)), float32)
    scaled = ()
    for chunk in tl.static_range(CHUNKS):
        scaled += (chunks[chunk] * unit,)

    best = tl.full([BLOCK_ROWS, 1], 1.0, float32)
    best_total = tl.full([BLOCK_ROWS, 1], _TOO_LARGE, int64)
    for index in range(N_RATIOS):
        ratio = tl.load(ratios_ptr + index)
        scale, least = uniform_scale(
            bottom,
            top,
            ratio,
            farthest,
            SYMMETRIC,
            SCALE_DTYPE if FORMAT == "int" else FORMAT,
        )
        is_finite = tl.abs(scale) < float("inf")
        # Weights are clipped to these ends, so no quotient is beyond the last code.
        first, last = low, high
        if not SYMMETRIC:
            zero = nearest_code(tl.div_rn(-least, scale), low, high)
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
        total = sum_of(total)
        if sums_ptr is None:
            total = tl.where(is_finite, total, _TOO_LARGE)
            best = tl.where(total < best_total, ratio, best)
            best_total = tl.minimum(total, best_total)
        else:
            total = tl.where(is_finite, total, tl.where(part == 0, _TOO_LARGE, 0))
            tl.atomic_add(sums_ptr + rows * N_RATIOS + index, total, sem="relaxed")
    if sums_ptr is None:
        tl.store(best_ptr + rows, best)


@triton.jit
def _nearest(x, scale, inverse, FORMAT: constexpr):
    """The codes of clipped weights; zeros may have another sign, which changes no error."""
    code = divide(x, scale, 1.0, inverse)
    whole = WHOLE
    if FORMAT != "int":
        whole = fp4_step(code) * WHOLE
    return (code + whole) - whole
