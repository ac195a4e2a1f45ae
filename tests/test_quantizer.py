import itertools
import math
import sys
from dataclasses import replace
from fractions import Fraction
from types import FrameType
from typing import Any

import numerics
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moq_hf import quantizer
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import RoundingSeed

GROUPINGS: list[Grouping] = [RowBlocks(), RowBlocks(3), PerChannel(), PerGroup(4)]
SEED, NOISY = RoundingSeed(7, 2, 5), Grid(stochastic=True)
MODES = numerics.modes(range(1, 17), numerics.SCALE_DTYPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
small = st.floats(-(2.0**-10), 2.0**-10, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 1e-38])
floats = st.floats(-1e4, 1e4, width=32) | small
weights = hnp.arrays(np.float32, (6, 8), elements=floats).map(torch.from_numpy)
# A bit width, and the grid at it.
modes = st.sampled_from([(bits, replace(grid, grouping=grouping)) for bits, grid in MODES for grouping in GROUPINGS])
# Those that have clipping ratios at any bits from 3 on.
grids = st.builds(
    lambda mode, grouping: replace(mode, grouping=grouping),
    st.sampled_from([grid for bits, grid in MODES if bits == 3 and not grid.stochastic]),
    st.sampled_from(GROUPINGS),
)


def as_loaded(scale: np.float32, dtype: str) -> np.float32:
    """A scale as a server holds it: half to even, bfloat16 by the words of integers, clamped to finite positive."""
    if dtype == "float32" or scale == 0:
        return scale
    if dtype == "float16":
        half = np.float16(min(abs(scale), np.float32(65504)))
        size = np.float32(max(half, np.float16(2.0**-24)))
    else:
        word, rest = divmod(int(abs(scale).view(np.uint32)), 2**16)
        word += rest > 2**15 or (rest == 2**15 and word % 2 == 1)
        size = np.uint32(min(word, 0x7F7F) << 16).view(np.float32)
    return np.float32(np.copysign(size, scale))


def by_hand(w: torch.Tensor, bits: int, grid: Grid, ratio: float) -> np.ndarray:
    """The contract's formulas, group by group in numpy float32, nearest rounding."""
    x = w.to(torch.float32).numpy()
    match grid.grouping:
        case RowBlocks(count):
            flat = x.reshape(count, -1)
        case PerChannel():
            flat = x
        case PerGroup(size):
            flat = x.reshape(-1, size)
    is_uniform = bits > 2 or (bits == 2 and (grid.full or not grid.symmetric))
    group_by_hand = uniform_by_hand if is_uniform else few_by_hand
    return np.stack([group_by_hand(group, bits, grid, np.float32(ratio)) for group in flat]).reshape(x.shape)


def uniform_by_hand(g: np.ndarray, bits: int, grid: Grid, ratio: np.float32) -> np.ndarray:
    """A group on a grid of equal steps."""
    f = np.float32
    half = 2 ** (bits - 1)
    low, top, zero = -half, half - 1, f(0)
    if grid.full:
        m = g.max() if g.max() >= -g.min() else g.min()
        scale = f(m * ratio) / f(-half)
    elif grid.symmetric:
        low = -top
        scale = f(np.abs(g).max() * ratio) / f(top)
    else:
        low, top = 0, 2**bits - 1
        lo, hi = f(min(f(0), g.min()) * ratio), f(max(f(0), g.max()) * ratio)
        scale = f(hi - lo) / f(top)
    if abs(scale) < np.finfo(f).tiny:
        return np.zeros_like(g)
    scale = as_loaded(scale, grid.scale_dtype)
    if not grid.symmetric:
        zero = np.clip(np.round(-lo / scale), low, top)
    return (np.clip(np.round(g / scale) + zero, low, top) - zero) * scale


def few_by_hand(g: np.ndarray, bits: int, grid: Grid, ratio: np.float32) -> np.ndarray:
    """A binary or ternary group."""
    f = np.float32
    mean = f(np.abs(g).sum(dtype=np.float64) / g.size)
    if mean < np.finfo(f).tiny:
        return np.zeros_like(g)
    if bits == 1:
        return np.where(g < 0, f(-1), f(1)) * as_loaded(mean, grid.scale_dtype)
    above = np.abs(g) > f(0.7) * mean
    scale = f(np.abs(g)[above].sum(dtype=np.float64) / above.sum())
    return np.sign(g) * above * as_loaded(scale, grid.scale_dtype)


@given(weights, modes, st.sampled_from([1.0, 0.85, 0.2]))
def test_is_the_contract_s_formulas(w: torch.Tensor, mode: tuple[int, Grid], ratio: float) -> None:
    bits, grid = mode
    assume(not grid.stochastic)
    ratio = ratio if grid.at(bits).is_uniform else 1.0
    given_ratio = None if ratio == 1.0 else torch.full(grid.shape(6, 8), ratio)
    result = quantizer.fake_quantize(w, bits, grid, ratio=given_ratio)
    np.testing.assert_array_equal(result.numpy(), by_hand(w, bits, grid, ratio))


@given(weights, modes, st.sampled_from(DTYPES))
def test_fake_quantize_is_dequantize_of_quantize(w: torch.Tensor, mode: tuple[int, Grid], dtype: torch.dtype) -> None:
    w = w.to(dtype)
    codes, scale, zero = quantizer.quantize(w, *mode, seed=SEED)
    exact = quantizer.dequantize(codes, scale, zero)
    assert torch.equal(quantizer.fake_quantize(w, *mode, seed=SEED), exact.to(dtype))
    for wanted in (torch.float32, torch.bfloat16):
        values, found = quantizer.fake_quantize_with_scale(w, *mode, seed=SEED, dtype=wanted)
        assert torch.equal(values, exact.to(wanted)) and torch.equal(found.view(scale.shape), scale)


@given(weights, modes)
def test_codes_are_in_range_and_errors_within_a_step(w: torch.Tensor, mode: tuple[int, Grid]) -> None:
    bits, grid = mode
    precision = grid.at(bits)
    codes, scale, zero = quantizer.quantize(w, bits, grid, seed=SEED)
    assert codes.dtype == torch.int32 and scale.dtype == torch.float32
    low, top = (precision.low, precision.high) if precision.is_uniform else (-1, 1)
    assert codes.min() >= low and codes.max() <= top
    assert scale.min() >= 0 or precision.is_full
    if zero is not None:
        assert zero.min() >= 0 and zero.max() <= top
    if precision.is_uniform and grid.scale_dtype == "float32":
        steps = scale.abs().repeat_interleave(6 // scale.shape[0], 0).repeat_interleave(8 // scale.shape[1], 1).double()
        error = (quantizer.dequantize(codes, scale, zero).double() - w.double()).abs() / steps
        # At 16 bits float32 itself has about 1/256 of a step.
        # A full range lacks the last code on the side that is not the largest weight's.
        step = 1.0 if grid.stochastic or grid.full else 0.5
        assert error.max() <= step * (1 + 2**-6) + (0.5 if zero is not None else 0)


@given(weights, modes)
def test_zeros_stay_zeros_and_signs_mirror(w: torch.Tensor, mode: tuple[int, Grid]) -> None:
    zeros = torch.zeros(6, 8)
    assert not quantizer.fake_quantize(zeros, *mode, seed=SEED).any()
    if mode[1].symmetric and not mode[1].stochastic and not mode[1].full:
        w = torch.where(w == 0, 0.5, w)
        assert torch.equal(quantizer.fake_quantize(-w, *mode), -quantizer.fake_quantize(w, *mode))


@given(weights, grids, st.sampled_from([3, 4, 8]))
def test_least_squares_ratio_is_the_best_of_its_list(w: torch.Tensor, grid: Grid, bits: int) -> None:
    shape = grid.shape(6, 8)
    found = quantizer.least_squares_ratio(w, bits, grid)
    assert found.shape == shape

    def error(ratio: torch.Tensor) -> torch.Tensor:
        values = quantizer.fake_quantize(w, bits, grid, ratio=ratio)
        squares = (values - w).square().double()
        return squares.view(shape[0], -1, shape[1], 8 // shape[1]).sum((1, 3))

    best = error(found)
    for value in quantizer.RATIOS:
        other = error(torch.full(shape, value))
        assert (best <= other).all()
        assert ((other > best) | (value <= found)).all()


@pytest.mark.parametrize("grouping", [PerGroup(32), PerChannel(), RowBlocks(2)], ids=str)
@pytest.mark.parametrize("bits", [3, 4, 8, 16])
def test_the_search_chooses_as_sums_in_float64_do(bits: int, grouping: Grouping) -> None:
    weight = 0.02 * torch.randn(64, 512) * torch.randn(64, 1).exp()
    shape = grouping.shape(64, 512)
    for grid in (Grid(grouping), Grid(grouping, symmetric=False), Grid(grouping, full=True, scale_dtype="float16")):
        errors = []
        for value in quantizer.RATIOS:
            values = quantizer.fake_quantize(weight, bits, grid, ratio=torch.full(shape, value))
            squares = (values.double() - weight.double()).square()
            errors.append(squares.view(shape[0] * shape[1], -1).sum(1))
        expected = torch.tensor(quantizer.RATIOS)[torch.stack(errors).argmin(0)].view(shape)
        found = quantizer.least_squares_ratio(weight, bits, grid)
        assert torch.equal(found, expected)
        # The order of weights makes no difference, nor does a power of two.
        if grid.scale_dtype == "float32":
            turned = 2.0**-100 * weight.flip(0).flip(1)
            assert torch.equal(quantizer.least_squares_ratio(turned, bits, grid), found.flip(0).flip(1))


def test_groups_that_cannot_be_searched_have_ratio_1() -> None:
    weight = torch.randn(7, 32)
    expected = quantizer.least_squares_ratio(weight, 4, Grid(PerChannel()))
    weight[1, 3], weight[2, 3], weight[3] = torch.nan, -torch.inf, 0.0
    expected[1:4] = 1.0
    assert torch.equal(quantizer.least_squares_ratio(weight, 4, Grid(PerChannel())), expected)


def test_errors_neither_overflow_nor_vanish() -> None:
    weight = torch.tensor([[0.1, 0.2, 0.1, 1.0]])
    for scale in (2.0**-120, 2.0**-60, 2.0**60, 2.0**127):
        assert quantizer.least_squares_ratio(scale * weight, 3).tolist() == [[pytest.approx(0.95)]]


FULL = Grid(full=True)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.floats(0, width=32)),
    st.randoms(use_true_random=False),
)
def test_sums_are_those_of_fractions_cut_off_in_any_order(array: np.ndarray, random: Any) -> None:
    terms = torch.from_numpy(array)
    largest = terms.amax(1, keepdim=True)
    found = quantizer.exact_sum(terms, largest)
    order = random.sample(range(terms.shape[1]), terms.shape[1])
    assert numerics.same_bits(quantizer.exact_sum(terms[:, order], largest), found)
    for row, most, total in zip(terms.tolist(), largest.flatten().tolist(), found.flatten().tolist(), strict=True):
        if not math.isfinite(most):
            assert not math.isfinite(total)
            continue
        # Each of fewer than 2^n terms loses less than 2^(n - 61) of the largest, and a float64 has 53 bits.
        exact = sum(map(Fraction, row))
        lost = Fraction(most) * Fraction(2) ** (2 * len(row).bit_length() - 61)
        assert abs(exact - Fraction(total)) <= lost + exact / 2**53 + Fraction(2) ** -150


def test_sums_hold_as_many_numbers_as_a_weight_has() -> None:
    # The largest sum that there can be: all terms as large as the largest, just below a power of two.
    largest = torch.tensor([[torch.finfo(torch.float32).max]])
    for count in (1, 2**20 - 1, 2**20):
        terms = largest.expand(1, count)
        assert float(quantizer.exact_sum(terms, largest)) == float(largest) * count


def test_ternary_and_binary_scales_are_those_of_sums_in_float64() -> None:
    torch.manual_seed(0)
    for length in (32, 768, 5000):
        x = torch.randn(200, length) * 0.02
        size = x.abs()
        mean = size.mean(1, keepdim=True, dtype=torch.float64).float()
        above = size > mean * 0.7
        mean_above = ((size * above).sum(1, keepdim=True, dtype=torch.float64) / above.sum(1, keepdim=True)).float()
        for bits, expected in ((1, mean), (2, mean_above)):
            assert torch.equal(quantizer.fake_quantize_with_scale(x, bits, Grid(PerChannel()))[1], expected)


def test_a_full_range_has_its_extra_code_at_the_largest_weight() -> None:
    for sign in (1.0, -1.0):
        codes, scale, _ = quantizer.quantize(sign * torch.tensor([[1.0, 0.5, -0.6, 0.1]]), 2, FULL)
        assert codes.tolist() == [[-2, -1, 1, 0]] and scale.tolist() == [[-0.5 * sign]]
    # Of +m and -m the positive one counts, wherever it stands.
    for order in ([1.0, 0.2, -1.0], [-1.0, 1.0, 0.2]):
        codes, scale, _ = quantizer.quantize(torch.tensor([order]), 4, FULL)
        assert scale.tolist() == [[-0.125]] and codes.tolist() == [[{1.0: -8, 0.2: -2, -1.0: 7}[x] for x in order]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(w=weights, bits=st.sampled_from([1, 2, 3, 4, 8]))
def test_scales_are_values_of_their_dtype(dtype: Any, w: torch.Tensor, bits: int) -> None:
    for symmetric, full in ((True, False), (True, True), (False, False)):
        if bits == 1 and not symmetric:
            continue
        codes, scale, zero = quantizer.quantize(w, bits, Grid(symmetric=symmetric, full=full, scale_dtype=dtype))
        assert torch.equal(scale.to(getattr(torch, dtype)).float(), scale)
        # What a server computes that loads them so.
        loaded = quantizer.dequantize(codes, scale.to(getattr(torch, dtype)).float(), zero)
        assert torch.equal(loaded, quantizer.dequantize(codes, scale, zero))


def test_scales_beyond_their_dtype_are_its_last_and_first_values() -> None:
    def scales(values: list[float], dtype: Any, grid: Grid = FULL) -> list[float]:
        w = torch.tensor(values)[:, None]
        return list(quantizer.quantize(w, 2, replace(grid, grouping=PerChannel(), scale_dtype=dtype)).scale.flatten())

    most, least = torch.finfo(torch.float16).max, 2.0**-24
    assert scales([-3e5, 3e5, -1e-9, 1e-9, 0.0, 1e-40], "float16") == [most, -most, least, -least, 1.0, 1.0]
    assert scales([-131_040, -(2.0**-14), -3 * 2.0**-24], "float16") == [most, 2.0**-15, 2 * least]
    largest = torch.finfo(torch.bfloat16).max
    assert scales([3.4e38], "bfloat16", Grid()) == [largest]
    # Binary groups of zeros keep their scale of 0, and all their values.
    binary = Grid(PerChannel(), scale_dtype="float16")
    assert quantizer.quantize(torch.tensor([[0.0], [1e-9]]), 1, binary).scale.tolist() == [[0.0], [least]]
    # What is below half a step of the first value is zero, what is above the last code is clipped.
    w = torch.tensor([[2.0**-25, -(2.0**-26)], [1e6, -1e6]])
    values = quantizer.fake_quantize(w, 4, Grid(PerChannel(), full=True, scale_dtype="float16"))
    assert values.tolist() == [[0.0, 0.0], [8 * most, -7 * most]]
    # Many codes with few bits in a scale: zero stays a code.
    w = torch.tensor([[-1.0, -0.3, -0.001]])
    grid = Grid(symmetric=False, scale_dtype="bfloat16")
    for bits in range(9, 17):
        zero = quantizer.quantize(w, bits, grid).zero_point
        assert zero is not None and int(zero) <= 2**bits - 1


def ggml_q4_0(x: np.ndarray, d: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes of blocks `[blocks, 32]`, 0 to 15, and float16 scales, as ggml's quantize_row_q4_0_ref finds them."""
    if d is None:
        largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
        d = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    codes = np.minimum(15, np.trunc(x * inverse + np.float32(8.5)))
    return codes.astype(np.int32), d.astype(np.float16)


blocks = hnp.arrays(np.float32, (4, 32), elements=st.floats(-8, 8, width=16).filter(lambda x: x == 0 or abs(x) > 1e-3))
Q4_0 = Grid(PerGroup(32), search="absmax", full=True, scale_dtype="float16")


@given(blocks)
def test_a_full_range_with_float16_scales_is_ggml_s_q4_0(x: np.ndarray) -> None:
    codes, scale, _ = quantizer.quantize(torch.from_numpy(x), 4, Q4_0)
    theirs, d = ggml_q4_0(x)
    ours, d32 = codes.numpy() + 8, scale.numpy()
    some = np.abs(x).max(1, keepdims=True) > 0
    # Of +m and -m, ggml takes the first: then both scales are right.
    assert np.array_equal(np.abs(d32)[some], np.abs(d.astype(np.float32))[some])
    same = some & (d32 == d.astype(np.float32))
    assert same.all() or (x.max(1, keepdims=True) == -x.min(1, keepdims=True))[~same].all()
    # With the scale that is stored, codes differ on halves alone: ggml's go up, ours to the even code.
    stored, _ = ggml_q4_0(x, np.where(some, d32, np.float32(1)))
    steps = np.float64(x) / d32 + 8
    halves = np.abs(steps - np.floor(steps) - 0.5) < 1e-5
    assert np.array_equal(ours[~halves], stored[~halves])
    exact = steps == np.floor(steps) + 0.5
    assert np.array_equal(ours[exact], np.minimum(15, np.round(steps[exact])))
    assert (np.abs(ours - stored) <= 1).all()
    # Ggml's are computed with the scale before it is rounded, which may move a code by one.
    assert (np.abs(ours - theirs) * same <= 1).all()


@given(blocks)
def test_ggml_s_q4_0_finds_the_codes_of_a_weight_on_that_grid(x: np.ndarray) -> None:
    codes, scale, _ = quantizer.quantize(torch.from_numpy(x), 4, Q4_0)
    theirs, d = ggml_q4_0(quantizer.dequantize(codes, scale).numpy())
    some = np.abs(x).max(1) > 0
    assert np.array_equal(theirs[some], codes.numpy()[some] + 8)
    assert np.array_equal(d[some].astype(np.float32), scale.numpy()[some])
    assert (theirs[~some] == 8).all() and not codes.numpy()[~some].any()


@pytest.mark.parametrize(("full", "largest"), [(False, 7.0), (True, -8.0)])
def test_stochastic_rounding_is_unbiased_and_keyed(full: bool, largest: float) -> None:
    grid = replace(NOISY, full=full)
    w = torch.full((1, 200_000), 0.3)
    w[0, 0] = largest
    draws = [
        quantizer.quantize(w, 4, grid, seed=RoundingSeed(*words)).codes[0, 1:].float()
        for words in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0)]
    ]
    for codes in draws:
        assert set(codes.unique().tolist()) == {0.0, 1.0}
        # Five standard errors of a mean of 200,000 draws.
        assert abs(float(codes.mean()) - 0.3) < 5 * (0.21 / 200_000) ** 0.5
    for a, b in itertools.combinations(draws, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    assert torch.equal(quantizer.quantize(w, 4, grid).codes[0, 1:].float(), draws[0])


def test_uniform_numbers() -> None:
    u = quantizer.uniform(torch.empty(1_000_001), RoundingSeed(3))
    assert u.shape == (1_000_001,) and float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / 1e6) ** 0.5


@pytest.mark.parametrize("bits", [3, 4, 8, 16])
def test_codes_that_are_not_clipped_need_not_be(bits: int) -> None:
    # Scales of all mantissas, rounded up and down.
    w = torch.randn(100_000, 1).exp() * torch.tensor([[1.0, -1.0]])
    grid = Grid(PerChannel())
    assert not grid.at(bits).clips
    exact = quantizer.dequantize(*quantizer.quantize(w, bits, grid))
    assert numerics.same_bits(quantizer.rounded(w, grid.at(bits))[0], exact)
    for other in (Grid(full=True), Grid(symmetric=False), Grid(stochastic=True), Grid(scale_dtype="bfloat16")):
        assert other.at(bits).clips, other


def test_a_scale_below_the_smallest_normal_number_is_one() -> None:
    least = torch.finfo(torch.float32).tiny
    for full, top in ((False, 7), (True, -8)):
        w = torch.tensor([least, least - 2.0**-149, torch.nan])[:, None] * top
        scale = quantizer.rounded(w, Grid(PerChannel(), full=full).at(4))[1].flatten()
        assert scale[0] == least and scale[1] == 1.0 and scale[2].isnan()


def test_a_layer_s_weight_is_quantized_in_few_calls() -> None:
    called: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    precision = Grid(PerChannel()).at(8)
    quantizer.rounded(W, precision)
    sys.setprofile(profile)
    try:
        quantizer.rounded(W, precision)
    finally:
        sys.setprofile(None)
    # Nothing is checked, and no grid is hashed.
    assert len(called) <= 10 and not {"check", "__hash__", "__eq__"} & set(called)


def test_blend_is_a_weighted_sum() -> None:
    w = torch.randn(6, 8)
    q = quantizer.fake_quantize(w, 3)
    for share in (0.25, 0.7, 1.0):
        assert torch.equal(quantizer.fake_quantize(w, 3, blend=share), q * (1 - share) + w * share)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_nonfinite_weights_are_noticed_in_every_mode(value: float, grouping: Grouping) -> None:
    for bits, mode in MODES:
        w, grid = torch.randn(6, 8), replace(mode, grouping=grouping, stochastic=False)
        assert quantizer.fake_quantize_with_scale(w, bits, grid)[1].isfinite().all()
        w[4, 6] = value
        scale = quantizer.fake_quantize_with_scale(w, bits, grid)[1]
        assert int((~scale.isfinite()).sum()) == 1
        with pytest.raises(ValueError, match="NaN or Inf"):
            quantizer.quantize(w, bits, grid)


W = torch.randn(6, 8)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"weight": W, "bits": 0}, "1 to 16, got 0"),
        ({"weight": W, "bits": 17}, "1 to 16, got 17"),
        ({"weight": W, "bits": 4, "grid": Grid(RowBlocks(4))}, "4 groups do not divide the 6 rows"),
        ({"weight": W, "bits": 4, "grid": Grid(RowBlocks(0))}, "0 groups"),
        ({"weight": W, "bits": 4, "grid": Grid(PerGroup(3))}, "3 does not divide the 8 columns"),
        ({"weight": W, "bits": 1, "grid": Grid(symmetric=False)}, "symmetric only"),
        ({"weight": W, "bits": 4, "grid": Grid(symmetric=False, full=True)}, "full range is for symmetric"),
        ({"weight": W, "bits": 2, "grid": NOISY}, "nearest only"),
        ({"weight": W, "bits": 2, "ratio": torch.ones(1, 1)}, "no clipping ratio"),
        ({"weight": W, "bits": 4, "ratio": torch.ones(3, 1)}, r"\[3, 1\], the scale has \[1, 1\]"),
        ({"weight": W[0], "bits": 4}, "matrix"),
        ({"weight": W[:0], "bits": 4}, "non-empty"),
        ({"weight": W.int(), "bits": 4}, "floating-point"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], text: str) -> None:
    for function in (quantizer.quantize, quantizer.fake_quantize):
        with pytest.raises(ValueError, match=text):
            function(**arguments)


def test_what_searching_and_dequantizing_refuse() -> None:
    with pytest.raises(ValueError, match="sets its own scale"):
        quantizer.least_squares_ratio(W, 2)
    with pytest.raises(ValueError, match="does not tile"):
        quantizer.dequantize(torch.zeros(6, 8, dtype=torch.int32), torch.ones(4, 1))


@pytest.mark.parametrize("size", [1, 7, 40, 64])
def test_blocks_of_groups_are_quantized_as_the_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(12, 20) ** 3
    w[3, 5] = torch.nan
    for (bits, mode), grouping in itertools.product(numerics.MODES, GROUPINGS):
        grid = replace(mode, grouping=grouping)
        is_searched = grid.at(bits).is_uniform and not grid.stochastic

        def results(bits: int = bits, grid: Grid = grid, is_searched: bool = is_searched) -> list[torch.Tensor]:
            ratio = quantizer.least_squares_ratio(w, bits, grid) if is_searched else None
            how: dict[str, Any] = {"ratio": ratio, "seed": SEED, "blend": 0.25, "dtype": torch.bfloat16}
            found = [*quantizer.fake_quantize_with_scale(w, bits, grid, **how)]
            return found if ratio is None else [*found, ratio]

        whole = results()
        with monkeypatch.context() as patched:
            patched.setattr(quantizer, "_BLOCK", size)
            assert all(map(numerics.same_bits, results(), whole))


@given(weights, modes)
def test_a_transposed_view_is_quantized_as_its_copy(w: torch.Tensor, mode: tuple[int, Grid]) -> None:
    view = w.t().contiguous().t()
    found = quantizer.fake_quantize(view, *mode, seed=SEED)
    assert found.is_contiguous() and numerics.same_bits(found, quantizer.fake_quantize(w, *mode, seed=SEED))


@given(weights, modes, st.integers(-6, 6))
def test_powers_of_two_scale_through(w: torch.Tensor, mode: tuple[int, Grid], power: int) -> None:
    # Float16 has no smaller steps below 2^-14, and no larger numbers than 65504.
    assume(float(w.abs().max()) > 1e-2 and mode[1].scale_dtype != "float16")
    w = torch.where(w.abs() < 1e-20, 0.0, w)
    small = quantizer.quantize(w, *mode, seed=SEED).scale.abs().min()
    assume(small > 1e-20)
    scaled = quantizer.fake_quantize(w * 2.0**power, *mode, seed=SEED)
    assert torch.equal(scaled, quantizer.fake_quantize(w, *mode, seed=SEED) * 2.0**power)


@given(weights, st.sampled_from(range(2, 17)), st.sampled_from(GROUPINGS))
def test_a_full_range_mirrors_where_one_weight_is_the_largest(w: torch.Tensor, bits: int, grouping: Grouping) -> None:
    grid = Grid(grouping, full=True)
    groups = quantizer._groups(w, grid.shape(6, 8))
    assume(bool((groups.amax(1) != -groups.amin(1)).logical_or(groups.amax(1) == 0).all()))
    codes, scale, _ = quantizer.quantize(w, bits, grid)
    mirrored = quantizer.quantize(-w, bits, grid)
    assert torch.equal(codes, mirrored.codes)
    # Zeros have the scale 1 either way.
    zeros = quantizer._groups(codes.float(), grid.shape(6, 8)).abs().amax(1) == 0
    assert torch.equal(torch.where(zeros.view_as(scale), scale, -scale), mirrored.scale)
