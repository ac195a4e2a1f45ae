"""As `kernels.numba`, for weights that lie transposed: the rows of the matrix stand side by side in memory.

Loops run along the memory, with a scale for each of its columns. Of the numerics only uniform grids rounded to nearest
are here; a row's scale comes from the same function as there.
"""

import numpy as np
from numba import njit

from .numba import _ABS, _ONE, _before, _float_of, _limits, _put, _uniform_scale

_ZERO = np.float32(0.0)


@njit(nogil=True, cache=True)
def _ranges(x, first, stride, count, mirrored, low, high):
    """Into `low` and `high` the magnitudes of both ends of `count` weights below each other, as integers."""
    bits = x.view(np.int32)
    low[:] = 0
    high[:] = 0
    for begin in range(first, first + count * stride, stride):
        row, piece = bits[begin : begin + high.size], x[begin : begin + high.size]
        if mirrored:
            for j in range(high.size):
                magnitude = np.int32(row[j] & _ABS)
                high[j] = magnitude if magnitude > high[j] else high[j]
        else:
            for j in range(high.size):
                magnitude = np.int32(row[j] & _ABS)
                # NaN is on both sides.
                above = np.int32(0) if piece[j] <= _ZERO else magnitude
                below = np.int32(0) if piece[j] >= _ZERO else magnitude
                high[j] = above if above > high[j] else high[j]
                low[j] = below if below > low[j] else low[j]
    if mirrored:
        low[:] = high


@njit(nogil=True, cache=True)
def _scales(low, high, width, ratios, at, per_row, bits, symmetric, full, cut, scales, zeros):
    """Scale and zero point of each column; `width` of them share both. True if a scale is NaN."""
    damaged = False
    for begin in range(0, high.size, width):
        lowest, highest = low[begin], high[begin]
        for j in range(begin + 1, begin + width):
            lowest, highest = max(lowest, low[j]), max(highest, high[j])
        ratio = ratios[at + begin // width * per_row] if ratios.size else _ONE
        scale, zero = _uniform_scale(-_float_of(lowest), _float_of(highest), bits, symmetric, full, ratio, cut)
        damaged |= np.isnan(scale)
        for j in range(begin, begin + width):
            scales[j], zeros[j] = scale, zero
    return damaged


# Else each division would look for a scale of 0, one by one.
@njit(nogil=True, cache=True, error_model="numpy")
def _values(x, out, first, count, scales, zeros, damaged, bits, symmetric, full, keep, blend):
    """The quantized values of `count` rows of memory from `first` on."""
    bottom, top = _limits(bits, symmetric, full)
    for row in range(first, first + count):
        for j in range(scales.size):
            scale, zero = scales[j], zeros[j]
            code = max(min(np.rint(x[row, j] / scale) + _before(zero, symmetric), top), bottom)
            _put(out, row, j, (code - zero) * scale, x[row, j], keep, blend)
        if damaged and out.itemsize == 2:
            for j in range(scales.size):
                if np.isnan(scales[j]):
                    out[row, j] = np.uint16(0x7FC0)


@njit(nogil=True, cache=True)
def fake_quantize(x, out, shape, width, length, bits, symmetric, full, cut, ratios, keep, blend):
    """Quantize the matrices in `x`, which are `shape`: matrices, weights below each other, weights side by side.

    `width` weights side by side and `length` below each other share a scale. `out` is float32, or uint16 for the bits
    of bfloat16. `ratios` may be empty; else they are of the scale's shape.
    """
    matrices, depth, stride = shape
    rows, values = x.reshape(matrices * depth, stride), out.reshape(matrices * depth, stride)
    low, high = np.empty(stride, np.int32), np.empty(stride, np.int32)
    scales, zeros = np.empty(stride, np.float32), np.empty(stride, np.float32)
    per_row = depth // length
    # Whole rows of memory at a time: pieces of them, twice from the cache, take two to three times as long.
    for matrix in range(matrices):
        for top in range(0, depth, length):
            first = matrix * depth + top
            _ranges(x, first * stride, stride, length, symmetric and not full, low, high)
            at = matrix * stride // width * per_row + top // length
            damaged = _scales(low, high, width, ratios, at, per_row, bits, symmetric, full, cut, scales, zeros)
            _values(rows, values, first, length, scales, zeros, damaged, bits, symmetric, full, keep, blend)
