import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moq_hf import quantizer

LAYOUTS: list[dict[str, Any]] = [{"groups": 1}, {"groups": 3}, {"groups": "per_channel"}, {"group_size": 4}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
small = st.floats(-(2.0**-10), 2.0**-10, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 1e-38])
floats = st.floats(-1e4, 1e4, width=32) | small
weights = hnp.arrays(np.float32, (6, 8), elements=floats).map(torch.from_numpy)
layouts = st.sampled_from(LAYOUTS)
modes = st.sampled_from(
    [
        (bits, symmetric, rounding)
        for bits, symmetric, rounding in itertools.product(range(1, 17), (True, False), ("nearest", "stochastic"))
        if quantizer.is_uniform(bits, symmetric) or (symmetric and rounding == "nearest")
    ]
)


def options(mode: tuple[int, bool, str], layout: dict[str, Any]) -> dict[str, Any]:
    return {"bits": mode[0], "symmetric": mode[1], "rounding": mode[2], "seed": 7, "layer": 2, "step": 5, **layout}


def by_hand(w: torch.Tensor, mode: tuple[int, bool, str], layout: dict[str, Any], ratio: float) -> np.ndarray:
    """The contract's formulas, group by group in numpy float32, nearest rounding."""
    bits, symmetric, _ = mode
    x = w.to(torch.float32).numpy()
    rows = x.shape[0]
    count, size = layout.get("groups", 1), layout.get("group_size")
    count = rows if count == "per_channel" else count
    flat = x.reshape(-1, size) if size else x.reshape(count, -1)
    out = np.zeros_like(flat)
    f = np.float32
    for i, g in enumerate(flat):
        if quantizer.is_uniform(bits, symmetric):
            if symmetric:
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


@given(weights, modes, layouts, st.sampled_from([1.0, 0.85, 0.2]))
def test_is_the_contract_s_formulas(w: torch.Tensor, mode: Any, layout: Any, ratio: float) -> None:
    assume(mode[2] == "nearest")
    ratio = ratio if quantizer.is_uniform(mode[0], mode[1]) else 1.0
    given_ratio = None if ratio == 1.0 else torch.full(quantizer.group_shape(6, 8, **grouping(layout)), ratio)
    result = quantizer.fake_quantize(w, **options(mode, layout), ratio=given_ratio)
    np.testing.assert_array_equal(result.numpy(), by_hand(w, mode, layout, ratio))


def grouping(layout: dict[str, Any]) -> dict[str, Any]:
    return {"groups": 1, "group_size": None, **layout}


@given(weights, modes, layouts, st.sampled_from(DTYPES))
def test_fake_quantize_is_dequantize_of_quantize(w: torch.Tensor, mode: Any, layout: Any, dtype: torch.dtype) -> None:
    w = w.to(dtype)
    codes, scale, zero = quantizer.quantize(w, **options(mode, layout))
    exact = quantizer.dequantize(codes, scale, zero)
    assert torch.equal(quantizer.fake_quantize(w, **options(mode, layout)), exact.to(dtype))
    for out in (torch.full(w.shape, torch.nan), torch.full(w.shape, torch.nan, dtype=torch.bfloat16)):
        assert quantizer.fake_quantize(w, **options(mode, layout), out=out) is out
        assert torch.equal(out, exact.to(out.dtype))


@given(weights, modes, layouts)
def test_codes_are_in_range_and_errors_within_a_step(w: torch.Tensor, mode: Any, layout: Any) -> None:
    bits, symmetric, rounding = mode
    codes, scale, zero = quantizer.quantize(w, **options(mode, layout))
    assert codes.dtype == torch.int32 and scale.dtype == torch.float32
    top = 1 if not quantizer.is_uniform(bits, symmetric) else 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    low = -top if symmetric else 0
    assert codes.min() >= low and codes.max() <= top
    if zero is not None:
        assert zero.min() >= 0 and zero.max() <= top
    if quantizer.is_uniform(bits, symmetric):
        steps = scale.repeat_interleave(6 // scale.shape[0], 0).repeat_interleave(8 // scale.shape[1], 1).double()
        error = (quantizer.dequantize(codes, scale, zero).double() - w.double()).abs() / steps
        # At 16 bits float32 itself has about 1/256 of a step.
        assert error.max() <= (0.5 if rounding == "nearest" else 1.0) * (1 + 2**-6) + (0.5 if zero is not None else 0)


@given(weights, modes, layouts)
def test_zeros_stay_zeros_and_signs_mirror(w: torch.Tensor, mode: Any, layout: Any) -> None:
    zeros = torch.zeros(6, 8)
    assert not quantizer.fake_quantize(zeros, **options(mode, layout)).any()
    if mode[1] and mode[2] == "nearest":
        w = torch.where(w == 0, 0.5, w)
        mirrored = quantizer.fake_quantize(-w, **options(mode, layout))
        assert torch.equal(mirrored, -quantizer.fake_quantize(w, **options(mode, layout)))


@given(weights, modes, layouts, st.integers(-6, 6))
def test_powers_of_two_scale_through(w: torch.Tensor, mode: Any, layout: Any, power: int) -> None:
    assume(float(w.abs().max()) > 1e-2)
    w = torch.where(w.abs() < 1e-20, 0.0, w)
    small = quantizer.quantize(w, **options(mode, layout)).scale.abs().min()
    assume(small > 1e-20)
    scaled = quantizer.fake_quantize(w * 2.0**power, **options(mode, layout))
    assert torch.equal(scaled, quantizer.fake_quantize(w, **options(mode, layout)) * 2.0**power)


@given(weights, layouts, st.sampled_from([3, 4, 8]), st.booleans())
def test_least_squares_ratio_is_the_best_of_its_list(w: torch.Tensor, layout: Any, bits: int, symmetric: bool) -> None:
    shape = quantizer.group_shape(6, 8, **grouping(layout))
    found = quantizer.least_squares_ratio(w, bits, symmetric=symmetric, **layout)
    assert found.shape == shape

    def error(ratio: torch.Tensor) -> torch.Tensor:
        values = quantizer.fake_quantize(w, bits, symmetric=symmetric, ratio=ratio, **layout)
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
        quantizer.quantize(w, 4, rounding="stochastic", seed=seed, layer=layer, step=step).codes[0, 1:].float()
        for seed, layer, step in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**40, 0, 0)]
    ]
    for codes in draws:
        assert set(codes.unique().tolist()) == {0.0, 1.0}
        # Five standard errors of a mean of 200,000 draws.
        assert abs(float(codes.mean()) - 0.3) < 5 * (0.21 / 200_000) ** 0.5
    for a, b in itertools.combinations(draws, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    again = quantizer.quantize(w, 4, rounding="stochastic").codes[0, 1:].float()
    assert torch.equal(again, draws[0])
    u = quantizer.uniform(1_000_001, seed=3, layer=0, step=0)
    assert u.shape == (1_000_001,) and float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 * (1 / 12 / 1e6) ** 0.5


def test_blend_is_a_weighted_sum() -> None:
    w = torch.randn(6, 8)
    q = quantizer.fake_quantize(w, 3)
    for share in (0.25, 0.7, 1.0):
        assert torch.equal(quantizer.fake_quantize(w, 3, blend=share), q * (1 - share) + w * share)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nonfinite_weights_are_noticed_in_every_mode(value: float, layout: dict[str, Any]) -> None:
    for bits, symmetric in itertools.product(range(1, 17), (True, False)):
        if bits == 1 and not symmetric:
            continue
        w = torch.randn(6, 8)
        assert not quantizer.nonfinite(quantizer.fake_quantize(w, bits, symmetric=symmetric, **layout), **layout)
        w[4, 6] = value
        assert quantizer.nonfinite(quantizer.fake_quantize(w, bits, symmetric=symmetric, **layout), **layout)
        with pytest.raises(ValueError, match="NaN or Inf"):
            quantizer.quantize(w, bits, symmetric=symmetric, **layout)


W = torch.randn(6, 8)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"weight": W, "bits": 0}, "1 to 16, got 0"),
        ({"weight": W, "bits": 17}, "1 to 16, got 17"),
        ({"weight": W, "bits": 4, "groups": 4}, "4 groups do not divide the 6 rows"),
        ({"weight": W, "bits": 4, "groups": 0}, "0 groups"),
        ({"weight": W, "bits": 4, "group_size": 3}, "3 does not divide the 8 columns"),
        ({"weight": W, "bits": 4, "groups": 2, "group_size": 4}, "not both"),
        ({"weight": W, "bits": 1, "symmetric": False}, "symmetric only"),
        ({"weight": W, "bits": 2, "rounding": "stochastic"}, "nearest only"),
        ({"weight": W, "bits": 4, "rounding": "up"}, "'up'"),
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


def test_auto_searches_at_five_bits_and_below() -> None:
    wanted = {bits: quantizer.wants_least_squares("auto", bits, True) for bits in range(1, 17)}
    assert [bits for bits, yes in wanted.items() if yes] == [3, 4, 5]
    assert quantizer.wants_least_squares("auto", 2, False) and not quantizer.wants_least_squares("absmax", 3, True)
    assert quantizer.wants_least_squares("mse", 8, True) and not quantizer.wants_least_squares("mse", 1, True)
