"""The Triton kernel behind `triton_quant`, which launches it; importing this module needs Triton.

The numbers are those of `quantizer`, bit for bit; see `arithmetic`.
"""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, float32, float64, int32, int64, uint32

from .arithmetic import (
    EXPONENT,
    TINY,
    as_stored,
    bits_as,
    divide,
    ends_of,
    fp4_step,
    fp8_step,
    load,
    nearest_code,
    range_of,
    round_even,
    store,
    sum_of,
    uniform_scale,
    with_sign_of,
)

# The columns of the table for a weight, and of `marks_ptr` for a long group: the bits of
# its largest and of its least weight, its sum, and sum and count above its threshold.
COLUMNS = constexpr(12)
MARKS = constexpr(5)
DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(
    do_not_specialize=[
        "n_rows",
        "n_cols",
        "low",
        "high",
        "farthest",
        "length_bits",
        "blend",
    ]
)
def fake_quantize_kernel(
    table,
    items,
    X_ptr,
    Y_ptr,
    ratio_ptr,
    noise_ptr,
    scale_ptr,
    marks_ptr,
    n_rows,
    n_cols,
    low,
    high,
    farthest,
    length_bits,
    blend,
    X_DTYPE: constexpr,
    Y_DTYPE: constexpr,
    CODES: constexpr,
    SYMMETRIC: constexpr,
    BLENDS: constexpr,
    STORED: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_COLS: constexpr,
    ALIGN: constexpr,
    STEP: constexpr,
):
    """`quantizer.rounded` for many weights, or for one: a row is a group, and a program takes a tile of one weight.

    A tile is read once and stays in registers. It holds whole rows, or a part of a row
    that is too long for that: then there is a launch for each STEP, and facts about the
    whole row are gathered in `marks_ptr`.

    Args:
        table: int64 `[weights, COLUMNS]`: the addresses of X, Y and clipping ratios (0:
            none), the offsets of the weight in `scale_ptr` and `noise_ptr`, and the
            arguments from `n_rows` on, which are then not read. None for a single
            weight.
        items: int32 `[programs, 2]`: a weight's row in the table, and the number of the
            tile in the weight. None for a single weight: program i takes tile i.
        X_ptr: Weights `[n_rows, n_cols]`.
        Y_ptr: Where fake-quantized weights go, in any float dtype.
        ratio_ptr: float32 clipping ratios `[n_rows]`, or None.
        noise_ptr: float32 random numbers of stochastic rounding `[n_rows, n_cols]`, with
            a table of all weights, or None.
        scale_ptr: Where float32 scales go, `[n_rows]`, with a table of all weights.
        marks_ptr: int64 `[scales, MARKS]`, zeros before the first step, or None.
        n_rows: Number of groups.
        n_cols: Weights of a group.
        low: The least code.
        high: The greatest code.
        farthest: The code that a group's largest weight gets, see `Precision.top`;
            negative for a full range.
        length_bits: The bit length of `n_cols`.
        blend: The bits of a float64, the share of the float weight in the result.
        X_DTYPE: Dtype of the weights.
        Y_DTYPE: Dtype of the results.
        CODES: Kind of codes: "int", "mxfp4", "nvfp4", "fp8", "ternary" or "binary".
        SYMMETRIC: Whether codes are around zero.
        BLENDS: Whether the float weight has a share in the result.
        STORED: How scales are stored, see `arithmetic.as_stored`.
        BLOCK_ROWS: Rows of a tile, a power of two; 1 if it is a part of a row.
        BLOCK_COLS: Columns of a tile, a power of two.
        ALIGN: Divides `n_cols`, and the addresses in the table, which count bytes.
        STEP: "all" if rows are whole; otherwise "ends", "sum" (for ternary and binary
            codes), "above" (for ternary ones), and "round".
    """
    IS_FEW: constexpr = CODES == "ternary" or CODES == "binary"
    tile = tl.program_id(0)
    scale_row = 0
    ratios = 1
    if table is not None:
        job = table + tl.load(items + 2 * tile) * COLUMNS
        tile = tl.load(items + 2 * tile + 1)
        X_ptr = tl.multiple_of(_address(job, X_DTYPE), ALIGN)
        Y_ptr = tl.multiple_of(_address(job + 1, Y_DTYPE), ALIGN)
        ratio_ptr = _address(job + 2, float32)
        ratios = tl.load(job + 2)
        if noise_ptr is not None:
            noise_ptr += tl.multiple_of(tl.load(job + 4), ALIGN)
        scale_row = tl.load(job + 3)
        n_rows = tl.load(job + 5)
        n_cols = tl.load(job + 6)
        low = tl.load(job + 7)
        high = tl.load(job + 8)
        farthest = tl.load(job + 9)
        length_bits = tl.load(job + 10)
        blend = tl.load(job + 11)
    n_cols = tl.multiple_of(n_cols.to(int64), ALIGN)
    low = low.to(float32)
    high = high.to(float32)
    farthest = farthest.to(float32)
    length_bits = length_bits.to(int32)

    # The tile's first weight may be beyond 2^31; within it 32 bits suffice. Rows past
    # the end repeat the last row, and store the same.
    tile = tile.to(int64)
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    if STEP == "all":
        row = tile * BLOCK_ROWS
        begin = 0
        rows = tl.minimum(rows, tl.minimum(n_rows - 1 - row, BLOCK_ROWS).to(int32))
    else:
        parts = (n_cols + BLOCK_COLS - 1) // BLOCK_COLS
        row = tile // parts
        begin = (tile % parts) * BLOCK_COLS
    start = row * n_cols + begin
    # A part of a row has only row 0; the first one stores the scale.
    is_first = rows + begin == rows
    places = rows * n_cols.to(int32) + cols
    inside = cols < n_cols - begin
    rows = row + rows
    x = load(X_ptr + start + places, inside)
    mark = None
    if STEP != "all":
        mark = marks_ptr + (scale_row + rows) * MARKS

    if STEP != "all" and STEP != "round":
        _find(x, mark, n_cols, length_bits, IS_FEW, STEP)
    else:
        if IS_FEW:
            y, scale = _few(x, mark, n_cols, length_bits, CODES, STORED)
        else:
            ratio = 1.0
            if ratio_ptr is not None:
                has_ratio = rows + ratios != rows
                ratio = tl.load(ratio_ptr + rows, mask=has_ratio, other=1.0)
            if mark is None:
                top, bottom = ends_of(x)
            else:
                top, bottom = tl.load(mark).to(int32), tl.load(mark + 1).to(int32)
            bottom, top = range_of(top, bottom, farthest, SYMMETRIC)
            scale, bottom = uniform_scale(
                bottom, top, ratio, farthest, SYMMETRIC, STORED
            )
            noise = None
            if noise_ptr is not None:
                noise = load(noise_ptr + start + places, inside)
            y = _rounded(x, noise, scale, bottom, low, high, CODES, SYMMETRIC)
        if BLENDS:
            share = bits_as(blend.to(int64), float64)
            y = y * (1.0 - share).to(float32) + x * share.to(float32)
        store(Y_ptr + start + places, y, inside)
        tl.store(scale_ptr + scale_row + rows, scale, mask=is_first)


@triton.jit
def _find(x, mark, n_cols, length_bits, IS_FEW: constexpr, STEP: constexpr):
    """Add a part of a row to the marks of the row."""
    if STEP == "ends":
        top, bottom = ends_of(tl.abs(x) if IS_FEW else x)
        tl.atomic_max(mark, top.to(int64), sem="relaxed")
        if not IS_FEW:
            bottom = bits_as(bottom, uint32).to(int64)
            tl.atomic_max(mark + 1, bottom, sem="relaxed")
    else:
        top = tl.load(mark).to(int32)
        whole = _whole(x, top, length_bits)
        if STEP == "sum":
            tl.atomic_add(mark + 2, sum_of(whole), sem="relaxed")
        else:
            mean = _mean(tl.load(mark + 2), n_cols, top, length_bits)
            total, count = _above(whole, tl.abs(x) > _threshold(mean))
            tl.atomic_add(mark + 3, total, sem="relaxed")
            tl.atomic_add(mark + 4, count.to(int64), sem="relaxed")


@triton.jit
def _address(place, DTYPE: constexpr):
    """Read the address of numbers from the table."""
    return tl.load(place).to(tl.pointer_type(DTYPE))


@triton.jit
def _few(x, mark, n_cols, length_bits, CODES: constexpr, STORED: constexpr):
    """Quantize ternary or binary rows, and find their scales."""
    if mark is None:
        top, _ = ends_of(tl.abs(x))
        whole = _whole(x, top, length_bits)
        total = sum_of(whole)
    else:
        top = tl.load(mark).to(int32)
        total = tl.load(mark + 2)
    mean = _mean(total, n_cols, top, length_bits)
    scale = tl.where(mean < TINY, 0.0, mean)
    code = tl.where(x >= 0, 1.0, -1.0)
    if CODES == "ternary":
        is_above = tl.abs(x) > _threshold(mean)
        if mark is None:
            total, count = _above(whole, is_above)
        else:
            total, count = tl.load(mark + 3), tl.load(mark + 4)
        scale = _mean(total, count, top, length_bits)
        scale = tl.where(mean < TINY, 1.0, scale)
        code = with_sign_of(tl.where(is_above, 1.0, 0.0), x)
    scale = as_stored(scale, STORED)
    return code * scale, scale


@triton.jit
def _rounded(
    x, noise, scale, bottom, low, high, CODES: constexpr, SYMMETRIC: constexpr
):
    """Round a tile to a grid of equal steps, or of floats."""
    # A power of two brings the scale's magnitude to between 2 and 4, so that no step of
    # a division leaves the normal numbers, except for quotients that round to zero.
    shift = bits_as((bits_as(scale, int32) & EXPONENT) ^ EXPONENT, float32)
    divisor = tl.abs(scale) * shift
    inverse = tl.div_rn(1.0, divisor)
    if not SYMMETRIC:
        # The limits are lowered by the zero point, since it is not added to the codes.
        zero = divide(-bottom, divisor, shift, inverse)
        zero = nearest_code(zero, low, high)
        low, high = low - zero, high - zero
    elif noise is None:
        # Dividing by a negative scale's magnitude flips the codes, so the limits swap.
        low, high = tl.where(scale < 0, -high, low), tl.where(scale < 0, -low, high)
        scale = tl.abs(scale)
    if noise is None and CODES == "int":
        code = divide(x, divisor, shift, inverse)
    else:
        # A weight that a scale of E4M3 clips can be too large for the shift.
        code = tl.div_rn(x, scale)
    if CODES == "int":
        code = _code(code, noise, low, high)
    else:
        step = fp8_step(code) if CODES == "fp8" else fp4_step(code)
        code = _code(tl.div_rn(code, step), noise, low, high)
        code = tl.clamp(code * step, low, high)
    # Adding and subtracting a zero point turns -0 into 0.
    return code * scale if SYMMETRIC else tl.fma(code, scale, 0.0)


@triton.jit
def _whole(x, top, length_bits):
    """Magnitudes as the integers of `quantizer.exact_sum`; `top` is the bits of a row's largest."""
    first, second = _factors(top, length_bits)
    return (tl.abs(x) * first * second).to(int64)


@triton.jit
def _factors(top, length_bits):
    power = 188 - (top >> 23) - length_bits
    half = power >> 1
    return _power_of_two(half), _power_of_two(power - half)


@triton.jit
def _power_of_two(exponent):
    return bits_as((exponent + 127) << 23, float32)


@triton.jit
def _mean(total, count, top, length_bits):
    """`quantizer._mean` of magnitudes whose integers add up to a total."""
    first, second = _factors(top, length_bits)
    total = total.to(float64) / first.to(float64) / second.to(float64)
    mean = (total / count.to(float64)).to(float32)
    return tl.where(top < EXPONENT, mean, bits_as(top, float32))


@triton.jit
def _threshold(mean):
    """The magnitude above which a ternary code is not 0."""
    return tl.where(mean < TINY, float("inf"), mean * 0.7)


@triton.jit
def _above(whole, is_above):
    """Sum and count the magnitudes above the threshold."""
    return sum_of(tl.where(is_above, whole, 0)), sum_of(is_above.to(int32))


@triton.jit
def _code(y, noise, low, high):
    """Round to an integer within limits: to nearest, or down after a random number is added."""
    if noise is None:
        rounded = nearest_code(y, low, high)
    else:
        y = tl.clamp(y + noise, low, high)
        # Triton's `floor` takes subnormal numbers for zeros.
        rounded = round_even(y)
        rounded = tl.where(rounded > y, rounded - 1, rounded)
    return rounded
