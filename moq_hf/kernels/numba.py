"""The loops behind `cpu_quant`, compiled by numba; importing this module needs numba.

The numerics are those of `quantizer.py`, bit for bit: numba neither fuses nor reorders floating-point arithmetic. A
group is read twice, the second time in pieces that stay in the first-level cache; short groups are taken many at once,
since a call for each costs more than its arithmetic. All numbers are float32 unless they are named otherwise: a Python
float would make the loops float64.
"""

import numpy as np
from numba import njit

PIECE = 2048
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
_EXPONENT = np.int64(0x7FF0000000000000)
# Of a search: elements between two looks at the sum; a sum that no finite terms have, in units of `_base`.
_STRETCH, _INFINITE, _NEVER = 512, np.int64(5 << 50), np.int64(-1 << 62)


@njit(nogil=True, cache=True)
def _float_of(bits):
    return np.int32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def _ranges(x, mirrored, low, high):
    """Lower and upper end of each group of `x` `[groups, elements]`; NaN, whose bits are above every other, stays."""
    bits = x.view(np.int32)
    for group in range(x.shape[0]):
        most, least = np.int32(0), np.int32(0)
        if mirrored:
            for i in range(x.shape[1]):
                # Numba would go on in int64.
                magnitude = np.int32(bits[group, i] & _ABS)
                most = magnitude if magnitude > most else most
            least = most
        else:
            for i in range(x.shape[1]):
                magnitude = np.int32(bits[group, i] & _ABS)
                above = np.int32(0) if x[group, i] <= _ZERO else magnitude
                below = np.int32(0) if x[group, i] >= _ZERO else magnitude
                most = above if above > most else most
                least = below if below > least else least
        low[group], high[group] = -_float_of(least), _float_of(most)


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
def _limits(bits, symmetric, full):
    """The least and the largest code."""
    if not symmetric:
        return _ZERO, np.float32((1 << bits) - 1)
    most = np.float32((1 << (bits - 1)) - 1)
    return -most - _ONE if full else -most, most


@njit(nogil=True, cache=True)
def _before(zero, symmetric):
    """What is added to a code before it is clipped; -0 leaves a code of -0 alone, as taking away 0 does afterwards."""
    return -_ZERO if symmetric else zero


@njit(nogil=True, cache=True)
def _base(large):
    """The power of two at or below `large`: what is exact there counts in units of 2^-52 of it."""
    return np.int64(np.float64(large).view(np.int64) & _EXPONENT).view(np.float64)


@njit(nogil=True, cache=True)
def _units(term, large, base):
    """A term, rounded as `quantizer._exact` rounds it, plus `base`, as bits: integers, whose sums numba may reorder."""
    return np.float64(((np.float64(term) + large) - large) + base).view(np.int64)


@njit(nogil=True, cache=True)
def _sum_of_magnitudes(x, above, large):
    """The sum of those magnitudes that exceed `above`, and their number."""
    base = _base(large)
    none = np.float64(base).view(np.int64)
    total, count = np.int64(0), np.int64(0)
    for i in range(x.size):
        magnitude = abs(x[i])
        total += _units(magnitude if magnitude > above else _ZERO, large, base) - none
        count += np.int64(magnitude > above)
    return np.float64(total) * (base * 2.0**-52), count


@njit(nogil=True, cache=True)
def _few_scale(x, high, bits):
    """Scale and threshold of a binary or ternary group."""
    if not high < np.inf:
        return np.float32(np.nan), high
    large = np.float64(high) * (2.0 * x.size)
    total, _ = _sum_of_magnitudes(x, -_ONE, large)
    mean = np.float32(total / x.size)
    if bits == 1:
        return (_ZERO if mean < _TINY else mean), _ZERO
    if mean < _TINY:
        return _ONE, np.float32(np.inf)
    threshold = np.float32(mean * _FACTOR)
    total, count = _sum_of_magnitudes(x, threshold, large)
    return np.float32(np.nan) if count == 0 else np.float32(total / count), threshold


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
def _put(out, group, i, value, x, keep, blend):
    """Write `keep * value + blend * x`, in float32 or as the bits of a bfloat16, half to even.

    Not for NaN as bfloat16, whose bits might overflow.
    """
    if blend != _ZERO:
        value = np.float32(value * keep) + np.float32(x * blend)
    if out.itemsize == 2:
        bits = np.float32(value).view(np.uint32)
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        out[group, i] = np.uint16(rounded >> np.uint32(16))
    else:
        out[group, i] = value


@njit(nogil=True, cache=True)
def _uniform_values(x, out, noise, scales, zeros, bits, symmetric, full, keep, blend):
    bottom, top = _limits(bits, symmetric, full)
    for group in range(x.shape[0]):
        scale, zero = scales[group], zeros[group]
        before = _before(zero, symmetric)
        if noise.size == 0:
            for i in range(x.shape[1]):
                code = max(min(np.rint(x[group, i] / scale) + before, top), bottom)
                _put(out, group, i, (code - zero) * scale, x[group, i], keep, blend)
        else:
            for i in range(x.shape[1]):
                code = max(min(np.floor(x[group, i] / scale + noise[group, i]) + before, top), bottom)
                _put(out, group, i, (code - zero) * scale, x[group, i], keep, blend)


@njit(nogil=True, cache=True)
def _few_values(x, out, scales, thresholds, bits, keep, blend):
    for group in range(x.shape[0]):
        scale, threshold = scales[group], thresholds[group]
        if bits == 1:
            for i in range(x.shape[1]):
                _put(out, group, i, scale if x[group, i] >= _ZERO else -scale, x[group, i], keep, blend)
        else:
            for i in range(x.shape[1]):
                value = x[group, i]
                sign = np.float32(value > _ZERO) - np.float32(value < _ZERO)
                sign = sign * np.float32(abs(value) > threshold)
                _put(out, group, i, sign * scale, value, keep, blend)


@njit(nogil=True, cache=True)
def fake_quantize(x, out, length, bits, symmetric, full, cut, stochastic, ratios, seed, layer, step, keep, blend):
    """Quantize groups of `length` float32 elements of `x` into `out`.

    `out` is float32, or uint16 for the bits of bfloat16; `ratios` may be empty. `full` is not for 1 bit; `cut` is that
    of `_as_stored`.
    """
    few = symmetric and not full and bits <= 2
    # A tile is one long group or several short ones.
    count = max(PIECE // length, 1)
    low, high = np.empty(count, np.float32), np.empty(count, np.float32)
    # The second is the threshold of few values.
    scales, zeros = np.empty(count, np.float32), np.empty(count, np.float32)
    noise = np.empty(PIECE + 8 if stochastic else 0, np.float32)
    for first in range(0, x.size, count * length):
        last = min(first + count * length, x.size)
        tile = x[first:last].reshape((last - first) // length, length)
        _ranges(tile, symmetric and not full, low, high)
        for group in range(tile.shape[0]):
            if few:
                scale, zeros[group] = _few_scale(tile[group], high[group], bits)
                scales[group] = _as_stored(scale, cut)
            else:
                ratio = ratios[first // length + group] if ratios.size else _ONE
                scales[group], zeros[group] = _uniform_scale(low[group], high[group], bits, symmetric, full, ratio, cut)
        for begin in range(first, last, PIECE):
            end = min(begin + PIECE, last)
            shape = tile.shape[0], (end - begin) // tile.shape[0]
            piece, values = x[begin:end].reshape(shape), out[begin:end].reshape(shape)
            if few:
                _few_values(piece, values, scales, zeros, bits, keep, blend)
                continue
            draws = noise[:0].reshape(0, 0)
            if stochastic:
                _noise(noise, begin, seed, layer, step)
                draws = noise[begin % 4 : begin % 4 + end - begin].reshape(shape)
            _uniform_values(piece, values, draws, scales, zeros, bits, symmetric, full, keep, blend)
        if out.itemsize == 2:
            for group in range(tile.shape[0]):
                if np.isnan(scales[group]):
                    out[first + group * length : first + (group + 1) * length] = np.uint16(0x7FC0)


@njit(nogil=True, cache=True)
def _add_errors(x, totals, scales, zeros, bits, symmetric, full, larges):
    """To `totals` the exact sums of squared errors of `x` `[groups, elements]`, in units of each group's `_base`."""
    bottom, top = _limits(bits, symmetric, full)
    for group in range(x.shape[0]):
        scale, zero, large = scales[group], zeros[group], larges[group]
        before, base = _before(zero, symmetric), _base(large)
        # What overflows float32 stays above `_INFINITE`.
        none, most = np.float64(base).view(np.int64), 2.0 * base
        total = np.int64(0)
        for i in range(x.shape[1]):
            code = max(min(np.rint(x[group, i] / scale) + before, top), bottom)
            error = np.float32((code - zero) * scale) - x[group, i]
            total += _units(min(np.float64(np.float32(error * error)), most), large, base) - none
        totals[group] += total


@njit(nogil=True, cache=True)
def least_squares_ratio(x, best, length, bits, symmetric, full, cut, ratios):
    """Into `best` `[groups]` the ratio with the least sum of squared errors of each group; `ratios` fall.

    The first one tried is that of the group before, the next are its neighbors: the sooner a good one is known, the
    sooner the others of a long group are left.
    """
    count = max(PIECE // length, 1)
    low, high = np.empty(count, np.float32), np.empty(count, np.float32)
    scales, zeros = np.empty(count, np.float32), np.empty(count, np.float32)
    larges, totals = np.empty(count, np.float64), np.empty(count, np.int64)
    found, least = np.zeros(count, np.int64), np.empty(count, np.int64)
    for first in range(0, x.size, count * length):
        last = min(first + count * length, x.size)
        groups = (last - first) // length
        _ranges(x[first:last].reshape(groups, length), symmetric and not full, low, high)
        likely = found[0]
        for group in range(groups):
            span = np.float64(np.float32(high[group] - low[group]))
            larges[group] = (span * span) * (2.0 * length)
            # Nothing is less where the range is no number.
            found[group], least[group] = 0, (_INFINITE if span < np.inf else _NEVER)
        for turn in range(2 * ratios.size):
            index = likely + (turn + 1) // 2 * (1 if turn % 2 else -1)
            if not 0 <= index < ratios.size:
                continue
            for group in range(groups):
                totals[group] = 0
                scales[group], zeros[group] = _uniform_scale(
                    low[group], high[group], bits, symmetric, full, ratios[index], cut
                )
            for begin in range(first, last, PIECE if count > 1 else _STRETCH):
                end = min(begin + (PIECE if count > 1 else _STRETCH), last)
                piece = x[begin:end].reshape(groups, (end - begin) // groups)
                _add_errors(piece, totals, scales, zeros, bits, symmetric, full, larges)
                # Squares only add.
                if count == 1 and totals[0] > least[0]:
                    break
            for group in range(groups):
                # Ties go to the larger ratio.
                if totals[group] < least[group] + np.int64(index < found[group]):
                    found[group], least[group] = index, totals[group]
        for group in range(groups):
            best[first // length + group] = ratios[found[group]]
