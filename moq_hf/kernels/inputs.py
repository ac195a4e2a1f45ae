"""The Triton kernels behind `triton_inputs`, which launches them; importing this module needs Triton."""

import triton
import triton.language as tl
from triton.language import constexpr, float32, int32, int64

from .arithmetic import (
    MAGNITUDE,
    TINY,
    as_dtype,
    bits_as,
    largest_of,
    load,
    nearest_code,
    round_even,
    store,
)


@triton.jit(do_not_specialize=["turns"])
def round_all_kernel(
    X_ptr,
    Y_ptr,
    first_ptr,
    last_ptr,
    observed_ptr,
    pending_ptr,
    n_inputs,
    turns,
    SCALE: constexpr,
    SYMMETRIC: constexpr,
    BITS: constexpr,
    LEAST: constexpr,
    SCALE_DTYPE: constexpr,
    DTYPE: constexpr,
    BLOCK: constexpr,
):
    """`inputs.fake_quantize_input` if all inputs share a scale; programs take blocks in turn.

    Args:
        X_ptr: Inputs `[n_inputs]`.
        Y_ptr: Where rounded inputs go, in the same dtype.
        first_ptr: The running range, of one number or two, or the least input.
        last_ptr: The greatest input; None for a static scale.
        observed_ptr: The largest magnitude since the last step, float32, which is
            updated; None if nothing is observed.
        pending_ptr: int32 `[2]` for use during the launch, zeros before and after it: the
            bits of the largest magnitude so far, and the number of finished programs.
        n_inputs: Number of inputs.
        turns: Blocks of a program.
        SCALE: "static", "per_tensor" or "per_token".
        SYMMETRIC: Whether static codes have no zero point.
        BITS: Bit width.
        LEAST: The scale of a token whose inputs are all zeros.
        SCALE_DTYPE: Name of the dtype that a static scale is rounded to.
        DTYPE: Name of the dtype in which codes and products are computed.
        BLOCK: Inputs of a block, a power of two.
    """
    low, high = _limits(SCALE, BITS)
    zero = 0.0
    added = None
    if SCALE == "static":
        least = 2.0**-24 if SCALE_DTYPE == "float16" else TINY
        first = tl.load(first_ptr)
        if SYMMETRIC:
            scale = tl.div_rn(first, high)
        else:
            width = tl.minimum(first + tl.load(first_ptr + 1), 3.4028234663852886e38)
            scale = tl.div_rn(width, high - low)
        scale = as_dtype(tl.maximum(scale, least), SCALE_DTYPE)
        if not SYMMETRIC:
            added = nearest_code(tl.div_rn(first, scale), 0.0, high - low) + low
    else:
        first, last = tl.load(first_ptr).to(float32), tl.load(last_ptr).to(float32)
        if SCALE == "per_token":
            # If one is NaN, both are.
            scale = _token_scale(tl.maximum(first * -1.0, last), BITS, LEAST, DTYPE)
        else:
            first = tl.where(first > 0, 0.0, first)
            span = tl.where(last < 0, 0.0, last) - first
            scale = tl.div_rn(span, high)
            scale = tl.where(scale < TINY, TINY, scale)
            zero = nearest_code(tl.div_rn(first * -1.0, scale), low, high)

    biggest = tl.full([BLOCK], 0, int32)
    for turn in range(turns):
        block = (turn * tl.num_programs(0) + tl.program_id(0)).to(int64)
        place = block * BLOCK + tl.arange(0, BLOCK)
        x = load(X_ptr + place, place < n_inputs)
        biggest = tl.maximum(biggest, bits_as(x, int32) & MAGNITUDE)
        # A zero point is an integer, so adding it commutes with the limits, before as
        # after rounding.
        y = _on_grid(x, scale, low - zero, high - zero, added, DTYPE)
        if SCALE == "per_tensor":
            # Adding and subtracting a zero point turns -0 into 0.
            y = y + 0.0
        store(Y_ptr + place, y, place < n_inputs)

    if observed_ptr is not None:
        # The last program knows the largest magnitude of all, and whether it counts.
        biggest = tl.reduce(biggest, 0, tl.standard._elementwise_max)
        tl.atomic_max(pending_ptr, biggest)
        if tl.atomic_add(pending_ptr + 1, 1) == tl.num_programs(0) - 1:
            whole = tl.atomic_xchg(pending_ptr, 0)
            tl.atomic_xchg(pending_ptr + 1, 0)
            newest = bits_as(tl.where(whole < 0x7F800000, whole, 0), float32)
            tl.store(observed_ptr, tl.maximum(tl.load(observed_ptr), newest))


@triton.jit(do_not_specialize=["n_rows"])
def round_rows_kernel(
    X_ptr,
    Y_ptr,
    n_rows,
    n_cols,
    features,
    SCALE: constexpr,
    BITS: constexpr,
    LEAST: constexpr,
    DTYPE: constexpr,
    EVEN: constexpr,
    BLOCK_ROWS: constexpr,
    BLOCK_COLS: constexpr,
):
    """`inputs.fake_quantize_input` if rows share a scale: a row is a token, or a block of its features.

    Args:
        X_ptr: Inputs `[tokens, features]`.
        Y_ptr: Where rounded inputs go, in the same dtype.
        n_rows: Number of rows.
        n_cols: Inputs of a row; the last one of a token may have fewer.
        features: Inputs of a token.
        SCALE: "per_token" or "per_block".
        BITS: Bit width.
        LEAST: The scale of a token whose inputs are all zeros.
        DTYPE: Name of the dtype in which codes and products are computed.
        EVEN: Whether all rows have the same length.
        BLOCK_ROWS: Rows of a program, a power of two.
        BLOCK_COLS: A power of two, at least `n_cols`.
    """
    # Rows past the end repeat the last row, and store the same.
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    row = tl.minimum(row, n_rows - 1)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    if EVEN:
        start = row.to(int64) * n_cols
        end = n_cols
    else:
        blocks = (features + n_cols - 1) // n_cols
        first = row % blocks * n_cols
        start = (row // blocks).to(int64) * features + first
        end = tl.minimum(features - first, n_cols)
    x = load(X_ptr + start + cols, cols < end)
    largest = bits_as(largest_of(bits_as(x, int32) & MAGNITUDE), float32)
    low, high = _limits(SCALE, BITS)
    if SCALE == "per_token":
        scale = _token_scale(largest, BITS, LEAST, DTYPE)
        y = _on_grid(x, scale, low, high, None, DTYPE)
    else:
        # Its reciprocal must be finite.
        largest = tl.where(largest < high * TINY, high * TINY, largest)
        y = round_even(x * (tl.div_rn(1.0, largest) * high))
        y = y * tl.div_rn(largest, high)
    store(Y_ptr + start + cols, y, cols < end)


@triton.jit
def _limits(SCALE: constexpr, BITS: constexpr):
    """The least and the largest code, as `InputGrid.limits`."""
    most = ((1 << (BITS - 1)) - 1) * 1.0
    if SCALE == "per_tensor":
        return 0.0, 2.0 * most + 1.0
    return -most - 1.0, most


@triton.jit
def _token_scale(largest, BITS: constexpr, LEAST: constexpr, DTYPE: constexpr):
    """The scale of a token, as `inputs.token_parameters`."""
    scale = as_dtype(tl.div_rn(largest, ((1 << BITS) - 1) * 0.5), DTYPE)
    return tl.where(scale == 0, LEAST, scale)


@triton.jit
def _on_grid(x, scale, low, high, zero, DTYPE: constexpr):
    """Codes, without a zero point that is added before they are rounded, times their scale; NaN stays."""
    code = as_dtype(tl.div_rn(x, scale), DTYPE)
    if zero is not None:
        code = as_dtype(code + zero, DTYPE)
    code = tl.clamp(code, low, high, propagate_nan=tl.PropagateNan.ALL)
    code = round_even(code)
    if zero is not None:
        code = code - zero
    return as_dtype(code * scale, DTYPE)
