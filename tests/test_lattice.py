"""The grids that weights lie on are found again, in every dtype, with scales that give each weight."""

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moq_hf import quantizer
from moq_hf.grid import Grid, PerChannel, PerGroup
from moq_hf.lattice import FoundGrid, find_grid

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def is_given_by(found: FoundGrid, weight: torch.Tensor) -> bool:
    assert found.scales is not None
    values = quantizer.quantize(weight, found.bits, found.grid, scales=found.scales)
    return torch.equal(quantizer.dequantize(*values, dtype=weight.dtype), weight)


@given(
    bits=st.integers(2, 6),
    size=st.sampled_from([None, 128, 64, 32]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    search=st.sampled_from(["absmax", "mse"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_what_was_quantized_is_found(bits, size, symmetric, scale_dtype, search, dtype, seed) -> None:  # type: ignore[no-untyped-def]
    grouping = PerGroup(size) if size else PerChannel()
    grid = Grid(grouping, symmetric, full=symmetric, scale_dtype=scale_dtype, search=search)
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
    ratio = quantizer.least_squares_ratio(weight, bits, grid) if search == "mse" else None
    weight = quantizer.fake_quantize(weight, bits, grid, ratio=ratio, dtype=dtype)
    found = find_grid(weight)
    assert found.is_whole and found.bits <= bits and is_given_by(found, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grouping", [PerChannel(), PerGroup(32)])
def test_bytes_are_found_in_half_precision_too(grouping: PerChannel | PerGroup, dtype: torch.dtype) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    weight = quantizer.fake_quantize(weight, 8, Grid(grouping), dtype=dtype)
    found = find_grid(weight)
    assert (found.bits, found.grouping, found.full) == (8, grouping, False) and is_given_by(found, weight)


@pytest.mark.parametrize(("name", "size"), [("mxfp4", 32), ("nvfp4", 16)])
def test_floats_of_four_bits_are_found(name: str, size: int) -> None:
    grid = Grid(PerGroup(size), format=name)  # type: ignore[arg-type]
    weight = quantizer.fake_quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), 4, grid)
    found = find_grid(weight.bfloat16())
    assert (found.format, found.row_size) == (name, size) and is_given_by(found, weight)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_1"])
def test_what_ggml_writes_has_its_name(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).numpy()
    blocks = gguf.quants.quantize(weight, kind)
    floats = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    found = find_grid(floats)
    assert found.is_whole and f"({name})" in found.in_words
    assert (found.scales is None) == name.endswith("1")
    if found.scales is not None:
        halves = torch.from_numpy(blocks.reshape(16, -1)[:, :2].copy()).view(torch.float16).float()
        assert torch.equal(found.scales.scale.flatten(), halves.flatten())


def test_a_lattice_is_found_whichever_code_the_largest_weight_has() -> None:
    codes = torch.randint(-6, 7, (4, 32), generator=torch.Generator().manual_seed(1))
    codes[0, 0] = -8
    weight = (codes * torch.tensor([[0.5], [0.3], [0.2], [0.7]])).bfloat16()
    found = find_grid(weight)
    assert (found.bits, found.full) == (4, True) and is_given_by(found, weight)


def test_a_weight_off_its_grid_is_counted() -> None:
    grid = Grid(PerGroup(32), full=True, scale_dtype="float16")
    weight = quantizer.fake_quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), 4, grid)
    weight[3, 5] *= 1.01
    found = find_grid(weight)
    assert (found.bits, found.on_grid, found.groups, found.scales) == (4, 15, 16, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_weights_lie_on_no_grid(dtype: torch.dtype) -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert find_grid(weight).in_words == "none"


def test_zeros_and_what_is_not_finite() -> None:
    zeros = find_grid(torch.zeros(4, 32))
    assert zeros.is_whole and zeros.zeros == zeros.groups == 4
    assert find_grid(torch.full((4, 32), torch.nan)).bits == 0
