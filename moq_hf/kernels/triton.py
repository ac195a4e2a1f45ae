"""The Triton kernels behind `triton_quant`, which launches them; importing this module needs Triton.

The numerics are those of `quantizer.py`, bit for bit: division rounds to nearest (`tl.div_rn`), products are not fused
with sums (`enable_fp_fusion=False` at each launch), and sums are of terms rounded so that their order does not matter.
Rounding half to even is by adding and subtracting a large number, since Triton's interpreter has no libdevice; it
holds for |y| <= 2^22, more than 16 bits and the least clipping ratio make of a weight. Absolute values are compared by
their bits as integers, where NaN is above everything, so that a maximum keeps it on any GPU.

A weight's row of the table (int64) is: pointers to the weight, the result and the clipping ratios (0: none), length and
number of its groups, bits, layer, seed, its first group's number among all weights, step, and the float32 bits of
1 - blend and blend.

`KIND` of a launch is one of NARROW, FULL and ASYMMETRIC. NARROW has the binary and ternary grids too; FULL begins at 2
bits. `SCALE` is the dtype that scales are rounded to.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(12)
NARROW, FULL, ASYMMETRIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# int32 per group in `marks`: the bits of the largest positive and negative magnitude, magnitudes above the ternary
# threshold.
MARKS = tl.constexpr(3)
# Passes over groups of many tiles.
RANGE, SUM, ABOVE, VALUES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_MAGIC = tl.constexpr(12582912.0)
_TINY = tl.constexpr(1.1754943508222875e-38)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
_ABS = tl.constexpr(0x7FFFFFFF)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _round(y):
    bits = ((y + _MAGIC) - _MAGIC).to(tl.int32, bitcast=True) & _ABS
    return (bits | (y.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _positive(x, KIND: tl.constexpr):
    """Bits of the magnitudes that the upper end of the range is the largest of."""
    bits = x.to(tl.int32, bitcast=True) & _ABS
    return bits if KIND == NARROW else tl.where(x <= 0, 0, bits)


@triton.jit
def _negative(x):
    return tl.where(x >= 0, 0, x.to(tl.int32, bitcast=True) & _ABS)


@triton.jit
def _as_stored(scale, SCALE: tl.constexpr):
    """`quantizer._as_stored`."""
    size = tl.abs(scale)
    is_kept = (scale == 0.0) | ((size <= _LARGEST) == 0)
    if SCALE == tl.bfloat16:
        size = _cast(tl.minimum(size, _LARGEST_BFLOAT16), SCALE).to(tl.float32)
    elif SCALE == tl.float16:
        size = tl.minimum(tl.maximum(size, 5.9604644775390625e-08), 65504.0).to(SCALE).to(tl.float32)
    return tl.where(is_kept, scale, tl.where(scale < 0.0, -size, size))


@triton.jit
def _uniform_scale(hi, lo, bits, ratio, KIND: tl.constexpr, SCALE: tl.constexpr):
    most = ((1 << bits) - 1 if KIND == ASYMMETRIC else (1 << (bits - 1)) - 1).to(tl.float32)
    steps = most
    if KIND == FULL:
        hi = tl.where(hi >= -lo, hi, lo)
        steps = -most - 1.0
    hi = hi * ratio
    lo = lo * ratio
    scale = tl.div_rn(hi - lo if KIND == ASYMMETRIC else hi, steps)
    scale = _as_stored(tl.where(tl.abs(scale) < _TINY, 1.0, scale), SCALE)
    zero = tl.zeros_like(scale)
    if KIND == ASYMMETRIC:
        zero = tl.minimum(tl.maximum(_round(tl.div_rn(-lo, scale)), 0.0), most)
    return scale, zero


@triton.jit
def _uniform_values(x, scale, zero, bits, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    code = tl.div_rn(x, scale)
    if STOCHASTIC:
        code = tl.floor(code + noise)
    else:
        code = _round(code)
    if KIND == ASYMMETRIC:
        top = ((1 << bits) - 1).to(tl.float32)
        return (tl.minimum(tl.maximum(code + zero, 0.0), top) - zero) * scale
    top = ((1 << (bits - 1)) - 1).to(tl.float32)
    return tl.minimum(tl.maximum(code, -top - 1.0 if KIND == FULL else -top), top) * scale


@triton.jit
def _exact(terms, bound, length):
    """`quantizer._exact`: float64 terms whose sum is the same in any order."""
    large = bound.to(tl.float64) * (2.0 * length.to(tl.float64))
    return (terms.to(tl.float64) + large) - large


@triton.jit
def _mean(total, count):
    return (total / count.to(tl.float64)).to(tl.float32)


@triton.jit
def _threshold(mean):
    """Of ternary magnitudes; infinite for a group too small to matter."""
    return tl.where(mean < _TINY, float("inf"), mean * 0.7)


@triton.jit
def _values(x, scale, zero, cut, bits, noise, KIND: tl.constexpr, STOCHASTIC: tl.constexpr):
    if KIND == NARROW:
        if bits == 1:
            values = tl.where(x >= 0, 1.0, -1.0) * scale
        elif bits == 2:
            sign = tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)
            values = sign * tl.where(tl.abs(x) > cut, 1.0, 0.0) * scale
        else:
            values = _uniform_values(x, scale, zero, bits, noise, KIND, STOCHASTIC)
    else:
        values = _uniform_values(x, scale, zero, bits, noise, KIND, STOCHASTIC)
    return values


@triton.jit
def _blended(values, x, keep, blend):
    # Not with a share of 0: adding it would turn -0 into 0.
    return tl.where(blend != 0.0, values * keep + x * blend, values)


@triton.jit
def _cast(values, OUT: tl.constexpr):
    if _INTERPRETED and OUT == tl.bfloat16:
        # Triton's interpreter cuts off where the hardware rounds to nearest.
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -65536).to(tl.float32, bitcast=True)
        values = tl.where(values == values, rounded, values)
    return values.to(OUT)


@triton.jit
def _to_uniform(word):
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _words(block, seed, step, layer):
    zero = tl.zeros_like(block)
    return tl.philox(
        seed,
        (block & 0xFFFFFFFF).to(tl.uint32),
        (block >> 32).to(tl.uint32),
        (zero + step).to(tl.uint32),
        (zero + layer).to(tl.uint32),
    )


@triton.jit
def _noise(first, seed, step, layer, R: tl.constexpr, S: tl.constexpr, QUADS: tl.constexpr):
    """`quantizer.uniform` for the elements from `first` `[R, 1]` on, `[R, S]`."""
    if QUADS:
        # Each Philox block serves four neighbors: `first` is a multiple of 4.
        block = (first >> 2) + tl.arange(0, S // 4)[None, :]
        a, b, c, d = _words(block, seed, step, layer)
        word = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, S))
    else:
        i = first + tl.arange(0, S)[None, :]
        a, b, c, d = _words(i >> 2, seed, step, layer)
        k = i & 3
        word = tl.where(k == 0, a, tl.where(k == 1, b, tl.where(k == 2, c, d)))
    return _to_uniform(word)


@triton.jit
def _as_float(number):
    return number.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _part_of_groups(weight, start, c, inside, length, S: tl.constexpr):
    """S columns of each group from column `c` on, float32 `[R, S]`."""
    columns = c + tl.arange(0, S)[None, :]
    return tl.load(weight + (start + columns), inside & (columns < length), 0.0).to(tl.float32)


@triton.jit
def _range_of_groups(
    weight, start, inside, length, R: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr
):
    """The largest and the least value of each group, `[R]`, with 0 among them."""
    high = tl.zeros([R], tl.int32)
    low = tl.zeros([R], tl.int32)
    for c in range(0, length, S):
        x = _part_of_groups(weight, start, tl.multiple_of(c, ALIGN), inside, length, S)
        high = tl.maximum(high, tl.max(_positive(x, KIND), 1))
        if KIND != NARROW:
            low = tl.maximum(low, tl.max(_negative(x), 1))
    return high.to(tl.float32, bitcast=True), -low.to(tl.float32, bitcast=True)


@triton.jit
def _few_levels(
    weight,
    start,
    inside,
    length,
    hi,
    bits,
    R: tl.constexpr,
    S: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Scale of binary and ternary groups, and the threshold of ternary ones, `[R]`."""
    cut = tl.zeros([R], tl.float32)
    total = tl.zeros([R], tl.float64)
    for c in range(0, length, S):
        x = _part_of_groups(weight, start, tl.multiple_of(c, ALIGN), inside, length, S)
        total += tl.sum(_exact(tl.abs(x), hi[:, None], length), 1)
    mean = _mean(total, length)
    scale = tl.where(mean < _TINY, 0.0, mean)
    if bits == 2:
        cut = _threshold(mean)
        total = tl.zeros([R], tl.float64)
        count = tl.zeros([R], tl.int32)
        for c in range(0, length, S):
            x = _part_of_groups(weight, start, tl.multiple_of(c, ALIGN), inside, length, S)
            above = tl.abs(x) > cut[:, None]
            total += tl.sum(tl.where(above, _exact(tl.abs(x), hi[:, None], length), 0.0), 1)
            count += tl.sum(above.to(tl.int32), 1)
        # Not the mean of nothing: NaN means that the weight holds one.
        scale = tl.where(mean < _TINY, 1.0, _mean(total, count))
    return _as_stored(scale, SCALE), cut


@triton.jit
def fake_quantize_groups(
    table,
    items,
    flags,
    R: tl.constexpr,
    S: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGN: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
):
    """R whole groups of one weight, S columns at a time. A program's second look at them finds them in L1 or L2.

    `items` `[programs, 2]` int32: row of the table, first group.
    """
    item = items + 2 * tl.program_id(0)
    index = tl.load(item)
    row = table + COLUMNS * index.to(tl.int64)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(IN)), ALIGN)
    out = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(OUT)), ALIGN)
    ratios = tl.load(row + 2)
    length = tl.multiple_of(tl.load(row + 3), ALIGN)
    groups = tl.load(row + 4)
    bits = tl.load(row + 5)
    group = tl.load(item + 1).to(tl.int64) + tl.arange(0, R)
    inside = (group < groups)[:, None]
    start = (group * length)[:, None]
    columns = tl.arange(0, S)[None, :]

    hi, lo = _range_of_groups(weight, start, inside, length, R, S, KIND, ALIGN)
    cut = tl.zeros([R], tl.float32)
    ratio = tl.full([R], 1.0, tl.float32)
    if ratios != 0:
        ratio = tl.load(ratios.to(tl.pointer_type(tl.float32)) + group, group < groups, 1.0)
    scale, zero = _uniform_scale(hi, lo, tl.maximum(bits, 2), ratio, KIND, SCALE)
    if KIND == NARROW:
        if bits <= 2:
            scale, cut = _few_levels(weight, start, inside, length, hi, bits, R, S, SCALE, ALIGN)
    bad = tl.sum(((group < groups) & ((tl.abs(scale) <= _LARGEST) == 0)).to(tl.int32), 0)
    tl.store(flags + index, 1, mask=bad > 0)

    layer = tl.load(row + 6)
    seed = tl.load(row + 7)
    step = tl.load(row + 9)
    keep = _as_float(tl.load(row + 10))
    blend = _as_float(tl.load(row + 11))
    for c in range(0, length, S):
        c = tl.multiple_of(c, ALIGN)
        i = start + (c + columns)
        mask = inside & (c + columns < length)
        x = tl.load(weight + i, mask, 0.0).to(tl.float32)
        noise = _noise(start + c, seed, step, layer, R, S, QUADS) if STOCHASTIC else 0.0
        values = _values(x, scale[:, None], zero[:, None], cut[:, None], bits, noise, KIND, STOCHASTIC)
        tl.store(out + i, _cast(_blended(values, x, keep, blend), OUT), mask)


@triton.jit
def _few_levels_of_tiles(total, mark, length, bits, SCALE: tl.constexpr):
    """Scale of a binary or ternary group whose tiles are summed, and the threshold of a ternary one."""
    cut = 0.0
    mean = _mean(tl.load(total), length)
    scale = tl.where(mean < _TINY, 0.0, mean)
    if bits == 2:
        cut = _threshold(mean)
        scale = tl.where(mean < _TINY, 1.0, _mean(tl.load(total + 1), tl.load(mark + 2)))
    return _as_stored(scale, SCALE), cut


@triton.jit
def fake_quantize_tiles(
    table,
    items,
    marks,
    sums,
    flags,
    PHASE: tl.constexpr,
    S: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    QUADS: tl.constexpr,
    ALIGN: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
):
    """Groups of many tiles, a tile for each program: one pass over them.

    The passes are launches in turn, of which each needs what those before have found: RANGE, then SUM for binary and
    ternary weights, then ABOVE for ternary ones, then VALUES.

    `items` `[programs, 3]` int32: row of the table, group, tile. `marks` int32 `[groups, MARKS]` and `sums` float64
    `[groups, 2]` are zeros before the first launch.
    """
    item = items + 3 * tl.program_id(0).to(tl.int64)
    index = tl.load(item)
    row = table + COLUMNS * index.to(tl.int64)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(IN)), ALIGN)
    out = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(OUT)), ALIGN)
    ratios = tl.load(row + 2)
    length = tl.multiple_of(tl.load(row + 3), ALIGN)
    bits = tl.load(row + 5)
    group = tl.load(item + 1).to(tl.int64)
    tile = tl.load(item + 2)
    mark = marks + MARKS * (group + tl.load(row + 8))
    total = sums + 2 * (group + tl.load(row + 8))
    c = tile.to(tl.int64) * S + tl.arange(0, S)
    i = group * length + c
    mask = c < length
    x = tl.load(weight + i, mask, 0.0).to(tl.float32)
    if PHASE == RANGE:
        tl.atomic_max(mark, tl.max(_positive(x, KIND), 0))
        if KIND != NARROW:
            tl.atomic_max(mark + 1, tl.max(_negative(x), 0))
    else:
        hi = tl.load(mark).to(tl.float32, bitcast=True)
        if PHASE == SUM:
            tl.atomic_add(total, tl.sum(_exact(tl.abs(x), hi, length), 0))
        elif PHASE == ABOVE:
            above = tl.abs(x) > _threshold(_mean(tl.load(total), length))
            tl.atomic_add(total + 1, tl.sum(tl.where(above, _exact(tl.abs(x), hi, length), 0.0), 0))
            tl.atomic_add(mark + 2, tl.sum(above.to(tl.int32), 0))
        else:
            lo = -tl.load(mark + 1).to(tl.float32, bitcast=True)
            ratio = 1.0
            if ratios != 0:
                ratio = tl.load(ratios.to(tl.pointer_type(tl.float32)) + group)
            scale, zero = _uniform_scale(hi, lo, tl.maximum(bits, 2), ratio, KIND, SCALE)
            cut = 0.0
            if KIND == NARROW:
                if bits <= 2:
                    scale, cut = _few_levels_of_tiles(total, mark, length, bits, SCALE)
            tl.store(flags + index, 1, mask=(tl.abs(scale) <= _LARGEST) == 0)
            layer = tl.load(row + 6)
            seed = tl.load(row + 7)
            step = tl.load(row + 9)
            keep = _as_float(tl.load(row + 10))
            blend = _as_float(tl.load(row + 11))
            first = group * length + tile.to(tl.int64) * S
            noise = 0.0
            if STOCHASTIC:
                noise = tl.reshape(_noise(tl.full([1, 1], 0, tl.int64) + first, seed, step, layer, 1, S, QUADS), (S,))
            values = _values(x, scale, zero, cut, bits, noise, KIND, STOCHASTIC)
            tl.store(out + i, _cast(_blended(values, x, keep, blend), OUT), mask)


@triton.jit
def _place(length, R: tl.constexpr, S: tl.constexpr):
    """Numbers of a program's groups `[R]` and columns `[S]`. Programs are on one axis: only that takes over 65,535."""
    across = tl.cdiv(length, S)
    group = (tl.program_id(0) // across).to(tl.int64) * R + tl.arange(0, R)
    return group, (tl.program_id(0) % across).to(tl.int64) * S + tl.arange(0, S)


@triton.jit
def group_ranges(weight, cells, length, groups, KIND: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """`cells` int32 `[groups, 2]`, zeros before: the bits of each group's largest positive and negative magnitude."""
    group, c = _place(length, R, S)
    mask = (group < groups)[:, None] & (c < length)[None, :]
    x = tl.load(weight + ((group * length)[:, None] + c[None, :]), mask, 0.0).to(tl.float32)
    tl.atomic_max(cells + 2 * group, tl.max(_positive(x, KIND), 1), group < groups)
    if KIND != NARROW:
        tl.atomic_max(cells + 2 * group + 1, tl.max(_negative(x), 1), group < groups)


@triton.jit
def ratio_errors(
    weight,
    cells,
    ratios,
    sums,
    length,
    groups,
    bits,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
):
    """Adds each group's squared errors at each of the `ratios` `[COUNT]` to `sums` float64 `[groups, COUNT]`."""
    group, c = _place(length, R, S)
    inside = group < groups
    mask = inside[:, None] & (c < length)[None, :]
    x = tl.load(weight + ((group * length)[:, None] + c[None, :]), mask, 0.0).to(tl.float32)
    hi = tl.load(cells + 2 * group, inside, 0).to(tl.float32, bitcast=True)
    lo = -hi
    if KIND != NARROW:
        lo = -tl.load(cells + 2 * group + 1, inside, 0).to(tl.float32, bitcast=True)
    span = (hi - lo).to(tl.float64)
    bound = (span * span)[:, None]
    # As tensors, so that they are not made constants of a kernel for each number of bits.
    bits = tl.full([1], 0, tl.int32) + bits
    size = tl.full([1, 1], 0, tl.int64) + length
    for k in range(COUNT):
        scale, zero = _uniform_scale(hi, lo, bits, tl.load(ratios + k), KIND, SCALE)
        values = _uniform_values(x, scale[:, None], zero[:, None], bits[:, None], 0.0, KIND, False)
        error = values - x
        terms = tl.where(mask, _exact(error * error, bound, size), 0.0)
        tl.atomic_add(sums + COUNT * group + k, tl.sum(terms, 1), inside)


@triton.jit
def pack_codes(codes, words, columns, width, total, BITS: tl.constexpr, S: tl.constexpr):
    """int32 words `[rows, width]` of the signed codes `[rows, columns]`, lowest bits first, S words a program."""
    i = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    inside = i < total
    row = i // width
    bit = (i % width) * 32
    first = bit // BITS
    word = tl.zeros([S], tl.uint32)
    # A word holds parts of at most this many codes.
    for j in tl.static_range(32 // BITS + 2):
        k = first + j
        at = k * BITS - bit
        code = tl.load(codes + row * columns + k, inside & (k < columns) & (at < 32), -(1 << (BITS - 1)))
        code = (code + (1 << (BITS - 1))).to(tl.uint32)
        left = code << tl.maximum(at, 0).to(tl.uint32)
        right = code >> tl.maximum(-at, 0).to(tl.uint32)
        word |= tl.where(at < 32, tl.where(at >= 0, left, right), 0)
    tl.store(words + i, word.to(tl.int32, bitcast=True), inside)


@triton.jit
def unpack_codes(words, codes, columns, width, total, BITS: tl.constexpr, S: tl.constexpr):
    """The inverse of `pack_codes`: `codes` `[rows, columns]` int32, S codes a program."""
    i = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    inside = i < total
    bit = (i % columns) * BITS
    word = words + (i // columns) * width + bit // 32
    low = tl.load(word, inside, 0).to(tl.uint32, bitcast=True).to(tl.uint64)
    straddles = bit % 32 + BITS > 32
    high = tl.load(word + 1, inside & straddles, 0).to(tl.uint32, bitcast=True).to(tl.uint64)
    code = ((low | (high << 32)) >> (bit % 32).to(tl.uint64)) & ((1 << BITS) - 1)
    tl.store(codes + i, code.to(tl.int32) - (1 << (BITS - 1)), inside)


@triton.jit
def _of_groups(scales, zeros, at, inside, HAS_ZERO: tl.constexpr):
    """Scale and zero point of the groups `at`."""
    zero = tl.load(zeros + at, inside, 0) if HAS_ZERO else 0
    return tl.load(scales + at, inside, 0.0), zero


@triton.jit
def _dot(a, b, total):
    if _INTERPRETED:
        # Its dot takes bfloat16 for integers.
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def packed_matmul(
    x,
    words,
    scales,
    zeros,
    bias,
    y,
    M,
    N,
    K,
    width,
    size,
    BITS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
):
    """Into y `[M, N]`: x `[M, K]` times the packed weight `[N, K]` transposed, plus bias; BITS must divide 32.

    `words` int32 `[N, width]`, `scales` float32 and `zeros` int32 `[N, K / size]`. A step takes BW words of each of BN
    rows, read once, and multiplies the codes at each of their positions with the columns of x that lie there. Codes
    less their zero point are exact in float16 and bfloat16; with one scale a row it is applied to the float32 sum.
    SPLIT says that a word may hold codes of two groups.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    in_m = (m < M)[:, None]
    in_n = (n < N)[:, None]
    groups = K // size
    acc = tl.zeros([BM, BN], tl.float32)
    zero = tl.load(zeros + n[:, None], in_n, 0) if HAS_ZERO and PER_ROW else 0
    for start in range(0, width, BW):
        w = start + tl.arange(0, BW)[None, :]
        word = tl.load(words + n.to(tl.int64)[:, None] * width + w, in_n & (w < width), 0).to(tl.uint32, bitcast=True)
        for j in tl.static_range(PER_WORD):
            k = w * PER_WORD + j
            code = ((word >> (j * BITS)) & ((1 << BITS) - 1)).to(tl.int32) - (1 << (BITS - 1))
            if PER_ROW:
                value = (code - zero).to(tl.float32)
            else:
                # A word of one group takes one load, which the compiler sees: j is known to it.
                if j == 0 or SPLIT:
                    at = n.to(tl.int64)[:, None] * groups + k // size
                    scale, less = _of_groups(scales, zeros, at, in_n & (k < K), HAS_ZERO)
                value = (code - less).to(tl.float32) * scale
            a = tl.load(x + m.to(tl.int64)[:, None] * K + k, in_m & (k < K), 0.0)
            acc = _dot(a, tl.trans(_cast(value, x.dtype.element_ty)), acc)
    if PER_ROW:
        acc = acc * tl.load(scales + n, n < N, 0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], _cast(acc, y.dtype.element_ty), in_m & (n < N)[None, :])
