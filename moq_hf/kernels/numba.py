"""The loops behind `cpu_quant`, compiled by numba; importing this module needs numba.

The numerics are those of `quantizer.py`, bit for bit: numba neither fuses nor reorders floating-point arithmetic. A
group is read twice, the second time in pieces that stay in the first-level cache from the first operation to the last.
All numbers are float32 unless they are named otherwise: a Python float would make the loops float64.
"""

import numpy as np
from numba import njit

PIECE = 2048
_LANES = 8
_TINY = np.finfo(np.float32).tiny
_ABS = np.int32(0x7FFFFFFF)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_FACTOR, _STEP = np.float32(0.7), np.float32(2.0**-23)
# Of float16: largest, least normal and least value.
_MOST, _NORMAL, _LEAST = np.float32(65504.0), np.float32(2.0**-14), np.float32(2.0**-24)
_MOST_BFLOAT16 = np.float32(3.3895313892515355e38)
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_A, _B = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_A, _KEY_B = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit(nogil=True, cache=True)
def _float_of(bits):
    return np.int32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def _range(x, mirrored):
    """Lower and upper end; NaN, whose bits are above every other, stays."""
    bits = x.view(np.int32)
    high, low = np.int32(0), np.int32(0)
    if mirrored:
        for i in range(x.size):
            # Numba would go on in int64.
            magnitude = np.int32(bits[i] & _ABS)
            high = magnitude if magnitude > high else high
        low = high
    else:
        for i in range(x.size):
            magnitude = np.int32(bits[i] & _ABS)
            above = np.int32(0) if x[i] <= _ZERO else magnitude
            below = np.int32(0) if x[i] >= _ZERO else magnitude
            high = above if above > high else high
            low = below if below > low else low
    return -_float_of(low), _float_of(high)


@njit(nogil=True, cache=True)
def _as_stored(scale, cut):
    """`quantizer._as_stored`: `cut` low bits of a float32 are not in the scale's dtype (bfloat16 16, float16 13)."""
    size = abs(scale)
    if cut == 0 or not _ZERO < size < np.inf:
        return scale
    if cut == 13 and size < _NORMAL:
        size = np.float32(np.rint(np.float32(max(size, _LEAST) / _LEAST)) * _LEAST)
    else:
        bits = np.float32(min(size, _MOST if cut == 13 else _MOST_BFLOAT16)).view(np.int32)
        half = np.int32((1 << (cut - 1)) - 1)
        size = _float_of(((bits + half + ((bits >> cut) & 1)) >> cut) << cut)
    return size if scale > _ZERO else -size


@njit(nogil=True, cache=True)
def _uniform_scale(low, high, bits, symmetric, full, ratio, cut):
    if full:
        high = high if high >= -low else low
    low, high = np.float32(low * ratio), np.float32(high * ratio)
    span = high if symmetric else np.float32(high - low)
    most = np.float32((1 << (bits - 1)) - 1 if symmetric else (1 << bits) - 1)
    scale = np.float32(span / (-most - _ONE if full else most))
    if abs(scale) < _TINY:
        scale = _ONE
    scale = _as_stored(scale, cut)
    if symmetric:
        return scale, _ZERO
    return scale, max(min(np.float32(np.rint(np.float32(-low / scale))), most), _ZERO)


@njit(nogil=True, cache=True)
def _exact_sum(terms, large):
    """The sum that `quantizer._exact` makes exact; in lanes, since numba may not reorder it by itself."""
    totals = np.zeros(_LANES)
    full = terms.size - terms.size % _LANES
    for begin in range(0, full, _LANES):
        for k in range(_LANES):
            totals[k] += (np.float64(terms[begin + k]) + large) - large
    for i in range(full, terms.size):
        totals[0] += (np.float64(terms[i]) + large) - large
    return totals.sum()


@njit(nogil=True, cache=True)
def _sum_of_magnitudes(x, above, large, buffer):
    """The sum of those magnitudes that exceed `above`, and their number."""
    total, count = 0.0, 0
    for begin in range(0, x.size, PIECE):
        piece = x[begin : begin + PIECE]
        for i in range(piece.size):
            magnitude = abs(piece[i])
            buffer[i] = magnitude if magnitude > above else _ZERO
            count += np.int32(magnitude > above)
        total += _exact_sum(buffer[: piece.size], large)
    return total, count


@njit(nogil=True, cache=True)
def _noise(noise, first, seed, layer, step):
    """Uniform numbers for the elements from the multiple of 4 at or below `first` on."""
    for j in range(noise.size // 4):
        block = np.uint64(first // 4 + j)
        c0, c1, c2, c3 = block & _MASK, block >> _SHIFT, np.uint64(step), np.uint64(layer)
        k0, k1 = np.uint64(seed) & _MASK, np.uint64(seed) >> _SHIFT
        for _ in range(10):
            p0, p1 = c0 * _A, c2 * _B
            c0, c1 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK
            c2, c3 = (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
        for k, word in enumerate((c0, c1, c2, c3)):
            noise[4 * j + k] = (np.float32(word >> np.uint64(9)) + _HALF) * _STEP


@njit(nogil=True, cache=True)
def _uniform_values(x, out, noise, scale, zero, bits, symmetric, full):
    if symmetric:
        top = np.float32((1 << (bits - 1)) - 1)
        bottom = -top - _ONE if full else -top
        if noise.size == 0:
            for i in range(x.size):
                out[i] = max(min(np.rint(x[i] / scale), top), bottom) * scale
        else:
            for i in range(x.size):
                out[i] = max(min(np.floor(x[i] / scale + noise[i]), top), bottom) * scale
    else:
        top = np.float32((1 << bits) - 1)
        if noise.size == 0:
            for i in range(x.size):
                out[i] = (max(min(np.rint(x[i] / scale) + zero, top), _ZERO) - zero) * scale
        else:
            for i in range(x.size):
                out[i] = (max(min(np.floor(x[i] / scale + noise[i]) + zero, top), _ZERO) - zero) * scale


@njit(nogil=True, cache=True)
def _few_values(x, out, scale, threshold, bits):
    if bits == 1:
        for i in range(x.size):
            out[i] = scale if x[i] >= _ZERO else -scale
    else:
        for i in range(x.size):
            sign = np.float32(x[i] > _ZERO) - np.float32(x[i] < _ZERO)
            out[i] = sign * np.float32(abs(x[i]) > threshold) * scale


@njit(nogil=True, cache=True)
def _few_scale(x, high, bits, buffer):
    """Scale and threshold of a binary or ternary group."""
    large = np.float64(high) * (2.0 * x.size)
    total, _ = _sum_of_magnitudes(x, -_ONE, large, buffer)
    if np.isnan(high):
        return high, high
    mean = np.float32(total / x.size)
    if bits == 1:
        return (_ZERO if mean < _TINY else mean), _ZERO
    if mean < _TINY:
        return _ONE, np.float32(np.inf)
    threshold = np.float32(mean * _FACTOR)
    total, count = _sum_of_magnitudes(x, threshold, large, buffer)
    return np.float32(np.nan) if count == 0 else np.float32(total / count), threshold


@njit(nogil=True, cache=True)
def _to_bfloat16(values, out):
    """Rounds half to even; not for NaN, whose bits might overflow."""
    bits = values.view(np.uint32)
    for i in range(values.size):
        rounded = np.uint32(bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1)))
        out[i] = np.uint16(rounded >> np.uint32(16))


@njit(nogil=True, cache=True)
def fake_quantize(
    x, out, halves, length, bits, symmetric, full, cut, stochastic, ratios, seed, layer, step, keep, blend
):
    """Quantize groups of `length` float32 elements of `x` into `out`.

    The result is float32 in `out`, or bfloat16 in `halves` (uint16) where that is not empty; `ratios` may be empty.
    `full` is not for 1 bit; `cut` is that of `_as_stored`.
    """
    buffer = np.empty(PIECE, np.float32)
    noise = np.empty(PIECE + 8 if stochastic else 0, np.float32)
    for group in range(x.size // length):
        first = group * length
        whole = x[first : first + length]
        low, high = _range(whole, symmetric and not full)
        scale, zero, threshold = _ONE, _ZERO, _ZERO
        few = symmetric and not full and bits <= 2
        if few:
            scale, threshold = _few_scale(whole, high, bits, buffer)
            scale = _as_stored(scale, cut)
        else:
            ratio = ratios[group] if ratios.size else _ONE
            scale, zero = _uniform_scale(low, high, bits, symmetric, full, ratio, cut)
        if halves.size and np.isnan(scale):
            halves[first : first + length] = np.uint16(0x7FC0)
            continue
        for begin in range(first, first + length, PIECE):
            end = min(begin + PIECE, first + length)
            piece = x[begin:end]
            values = buffer[: end - begin] if halves.size else out[begin:end]
            if few:
                _few_values(piece, values, scale, threshold, bits)
            else:
                draws = noise
                if stochastic:
                    _noise(noise, begin, seed, layer, step)
                    draws = noise[begin % 4 :]
                _uniform_values(piece, values, draws, scale, zero, bits, symmetric, full)
            if blend != _ZERO:
                for i in range(piece.size):
                    values[i] = np.float32(values[i] * keep) + np.float32(piece[i] * blend)
            if halves.size:
                _to_bfloat16(values, halves[begin:end])


@njit(nogil=True, cache=True)
def least_squares_ratio(x, best, length, bits, symmetric, full, cut, ratios):
    """Into `best` `[groups]` the ratio with the least sum of squared errors of each group."""
    values = np.empty(PIECE, np.float32)
    nothing = np.empty(0, np.float32)
    for group in range(best.size):
        whole = x[group * length : (group + 1) * length]
        low, high = _range(whole, symmetric and not full)
        span = np.float64(np.float32(high - low))
        large = (span * span) * (2.0 * length)
        best[group] = _ONE
        least = np.inf
        for ratio in ratios:
            scale, zero = _uniform_scale(low, high, bits, symmetric, full, ratio, cut)
            total = 0.0
            for begin in range(0, length, PIECE):
                piece = whole[begin : begin + PIECE]
                _uniform_values(piece, values, nothing, scale, zero, bits, symmetric, full)
                for i in range(piece.size):
                    error = np.float32(values[i] - piece[i])
                    values[i] = error * error
                total += _exact_sum(values[: piece.size], large)
                # Squares only add.
                if total >= least:
                    break
            if total < least:
                least = total
                best[group] = ratio
