import itertools
from dataclasses import replace
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
from moq_hf.quantizer import Draw

GROUPINGS: list[Grouping] = [RowBlocks(), RowBlocks(3), PerChannel(), PerGroup(4)]
DRAW, NOISY = Draw(7, 2, 5), Grid(stochastic=True)
MODES = numerics.modes(range(1, 17))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
small = st.floats(-(2.0**-10), 2.0**-10, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 1e-38])
floats = st.floats(-1e4, 1e4, width=32) | small
weights = hnp.arrays(np.float32, (6, 8), elements=floats).map(torch.from_numpy)
# A bit width, and the grid at it.
modes = st.sampled_from([(bits, replace(grid, grouping=grouping)) for bits, grid in MODES for grouping in GROUPINGS])
grids = st.builds(Grid, st.sampled_from(GROUPINGS), st.booleans())


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
    out = np.zeros_like(flat)
    f = np.float32
    for i, g in enumerate(flat):
        if bits > 2 or (bits == 2 and not grid.symmetric):
            if grid.symmetric:
                top = f(2 ** (bits - 1) - 1)
                scale = f(np.abs(g).max() * f(ratio)) / top
                if scale < np.finfo(f).tiny:
                    continue
                out[i] = np.clip(np.round(g / scale), -top, top) * scale
            else:
                top = f(2**bits - 1)
                lo, hi = f(min(f(0), g.min()) * f(ratio)), f(max(f(0), g.max()) * f(ratio))
                scale = f(hi - lo) / top
                if scale < np.finfo(f).tiny:
                    continue
                zero = np.round(-lo / scale)
                out[i] = (np.clip(np.round(g / scale) + zero, 0, top) - zero) * scale
        else:
            mean = f(np.abs(g).sum(dtype=np.float64) / g.size)
            if mean < np.finfo(f).tiny:
                continue
            if bits == 1:
                out[i] = np.where(g < 0, -mean, mean)
            else:
                above = np.abs(g) > f(0.7) * mean
                out[i] = np.sign(g) * above * f(np.abs(g)[above].sum(dtype=np.float64) / above.sum())
    return out.reshape(x.shape)


@given(weights, modes, st.sampled_from([1.0, 0.85, 0.2]))
def test_is_the_contract_s_formulas(w: torch.Tensor, mode: tuple[int, Grid], ratio: float) -> None:
    bits, grid = mode
    assume(not grid.stochastic)
    ratio = ratio if grid.is_uniform(bits) else 1.0
    given_ratio = None if ratio == 1.0 else torch.full(grid.shape(6, 8), ratio)
    result = quantizer.fake_quantize(w, bits, grid, ratio=given_ratio)
    np.testing.assert_array_equal(result.numpy(), by_hand(w, bits, grid, ratio))


@given(weights, modes, st.sampled_from(DTYPES))
def test_fake_quantize_is_dequantize_of_quantize(w: torch.Tensor, mode: tuple[int, Grid], dtype: torch.dtype) -> None:
    w = w.to(dtype)
    codes, scale, zero = quantizer.quantize(w, *mode, draw=DRAW)
    exact = quantizer.dequantize(codes, scale, zero)
    assert torch.equal(quantizer.fake_quantize(w, *mode, draw=DRAW), exact.to(dtype))
    for out in (torch.full(w.shape, torch.nan), torch.full(w.shape, torch.nan, dtype=torch.bfloat16)):
        assert quantizer.fake_quantize(w, *mode, draw=DRAW, out=out) is out
        assert torch.equal(out, exact.to(out.dtype))


@given(weights, modes)
def test_codes_are_in_range_and_errors_within_a_step(w: torch.Tensor, mode: tuple[int, Grid]) -> None:
    bits, grid = mode
    codes, scale, zero = quantizer.quantize(w, bits, grid, draw=DRAW)
    assert codes.dtype == torch.int32 and scale.dtype == torch.float32
    top = 1 if not grid.is_uniform(bits) else 2 ** (bits - 1) - 1 if grid.symmetric else 2**bits - 1
    low = -top if grid.symmetric else 0
    assert codes.min() >= low and codes.max() <= top
    if zero is not None:
        assert zero.min() >= 0 and zero.max() <= top
    if grid.is_uniform(bits):
        steps = scale.repeat_interleave(6 // scale.shape[0], 0).repeat_interleave(8 // scale.shape[1], 1).double()
        error = (quantizer.dequantize(codes, scale, zero).double() - w.double()).abs() / steps
        # At 16 bits float32 itself has about 1/256 of a step.
        assert error.max() <= (1.0 if grid.stochastic else 0.5) * (1 + 2**-6) + (0.5 if zero is not None else 0)


@given(weights, modes)
def test_zeros_stay_zeros_and_signs_mirror(w: torch.Tensor, mode: tuple[int, Grid]) -> None:
    zeros = torch.zeros(6, 8)
    assert not quantizer.fake_quantize(zeros, *mode, draw=DRAW).any()
    if mode[1].symmetric and not mode[1].stochastic:
        w = torch.where(w == 0, 0.5, w)
        assert torch.equal(quantizer.fake_quantize(-w, *mode), -quantizer.fake_quantize(w, *mode))


@given(weights, modes, st.integers(-6, 6))
def test_powers_of_two_scale_through(w: torch.Tensor, mode: tuple[int, Grid], power: int) -> None:
    assume(float(w.abs().max()) > 1e-2)
    w = torch.where(w.abs() < 1e-20, 0.0, w)
    small = quantizer.quantize(w, *mode, draw=DRAW).scale.abs().min()
    assume(small > 1e-20)
    scaled = quantizer.fake_quantize(w * 2.0**power, *mode, draw=DRAW)
    assert torch.equal(scaled, quantizer.fake_quantize(w, *mode, draw=DRAW) * 2.0**power)


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


def test_philox_gives_the_published_vectors() -> None:
    def run(counter: list[int], key: tuple[int, int]) -> list[int]:
        words = quantizer.philox(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
        return [int(word) for word in words]

    ones = 0xFFFFFFFF
    assert run([0] * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run([ones] * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert run(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_stochastic_rounding_is_unbiased_and_keyed() -> None:
    w = torch.full((1, 200_000), 0.3)
    w[0, 0] = 7.0
    draws = [
        quantizer.quantize(w, 4, NOISY, draw=Draw(*words)).codes[0, 1:].float()
        for words in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0)]
    ]
    for codes in draws:
        assert set(codes.unique().tolist()) == {0.0, 1.0}
        # Five standard errors of a mean of 200,000 draws.
        assert abs(float(codes.mean()) - 0.3) < 5 * (0.21 / 200_000) ** 0.5
    for a, b in itertools.combinations(draws, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    again = quantizer.quantize(w, 4, NOISY).codes[0, 1:].float()
    assert torch.equal(again, draws[0])
    u = quantizer.uniform(1_000_001, Draw(3))
    assert u.shape == (1_000_001,) and float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / 1e6) ** 0.5


def test_blend_is_a_weighted_sum() -> None:
    w = torch.randn(6, 8)
    q = quantizer.fake_quantize(w, 3)
    for share in (0.25, 0.7, 1.0):
        assert torch.equal(quantizer.fake_quantize(w, 3, blend=share), q * (1 - share) + w * share)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_nonfinite_weights_are_noticed_in_every_mode(value: float, grouping: Grouping) -> None:
    for bits, symmetric in itertools.product(range(1, 17), (True, False)):
        if bits == 1 and not symmetric:
            continue
        w, grid = torch.randn(6, 8), Grid(grouping, symmetric)
        assert not quantizer.nonfinite(quantizer.fake_quantize(w, bits, grid), grid)
        w[4, 6] = value
        assert quantizer.nonfinite(quantizer.fake_quantize(w, bits, grid), grid)
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


def test_no_ratio_to_search_without_equal_steps() -> None:
    with pytest.raises(ValueError, match="sets its own scale"):
        quantizer.least_squares_ratio(W, 2)
    with pytest.raises(ValueError, match="does not tile"):
        quantizer.dequantize(torch.zeros(6, 8, dtype=torch.int32), torch.ones(4, 1))
