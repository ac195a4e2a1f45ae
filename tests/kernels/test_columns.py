"""Weights that lie transposed: the same numbers as the definition gives of the transpose."""

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics import GROUPINGS, HALF_MODES, MODES, same_bits

from moq_hf import quantizer
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.kernels import backend, columns, cpu
from moq_hf.rows import matrices

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

# Those that the loops take.
TAKEN = [(bits, grid) for bits, grid in MODES + HALF_MODES if grid.is_uniform(bits) and not grid.stochastic]


def rows_of(weight: torch.Tensor) -> torch.Tensor:
    """The matrix of a transposed weight, or of several."""
    return weight.transpose(-2, -1).reshape(-1, weight.shape[-2])


def weight_of(*shape: int) -> torch.Tensor:
    w = torch.randn(*shape) * torch.randn(shape[-1]).exp()
    w[..., :3, 0] = torch.tensor([0.0, -0.0, 1e-42])
    w[..., -1] = 0.0
    return w


def same(w: torch.Tensor, bits: int, grid: Grid, **how: Any) -> bool:
    """Whether a transposed weight is quantized as the definition quantizes its rows."""
    out = torch.full(w.shape, torch.nan, dtype=how.pop("dtype", torch.float32))
    assert backend.takes_columns(w, bits, grid, out.dtype)
    assert columns.fake_quantize(w, bits, grid, out=out, **how) is out
    return same_bits(rows_of(out), quantizer.fake_quantize(rows_of(w), bits, grid, dtype=out.dtype, **how))


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("mode", TAKEN, ids=str)
def test_it_is_the_definition_of_the_transpose(mode: tuple[int, Grid], grouping: Grouping) -> None:
    bits, grid = mode[0], replace(mode[1], grouping=grouping)
    w = weight_of(33, 6)
    ratio = torch.tensor(quantizer.RATIOS)[torch.randint(17, grid.shape(6, 33))]
    for dtype, blend, r in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.3), (None, ratio)):
        assert same(w, bits, grid, dtype=dtype, blend=blend, ratio=r)


@pytest.mark.parametrize("grouping", [RowBlocks(4), RowBlocks(8), PerChannel(), PerGroup(5)], ids=str)
def test_several_matrices_stand_one_below_the_other(grouping: Grouping) -> None:
    for bits, mode in TAKEN:
        grid = replace(mode, grouping=grouping)
        ratio = torch.tensor(quantizer.RATIOS)[torch.randint(17, grid.shape(24, 10))]
        assert same(weight_of(4, 10, 6), bits, grid, ratio=ratio)


def test_extreme_values_and_wide_matrices() -> None:
    for scale in (0.02, 3e38, 1e6, 1e-6, 1e-37, 1e-45):
        w = torch.randn(40, 600).clamp(-1, 1) * scale
        for bits, mode in TAKEN:
            assert same(w, bits, replace(mode, grouping=RowBlocks(2)), dtype=torch.bfloat16)


@pytest.mark.parametrize("bits_of_value", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000], ids=hex)
@pytest.mark.parametrize("place", [(0, 0), (7, 1)])
def test_nonfinite_weights_come_out_so(bits_of_value: int, place: tuple[int, int]) -> None:
    for (bits, mode), grouping, dtype in itertools.product(TAKEN, GROUPINGS, (torch.float32, torch.bfloat16)):
        w, grid = weight_of(33, 6), replace(mode, grouping=grouping)
        assert not quantizer.nonfinite(columns.fake_quantize(w, bits, grid, dtype=dtype).t(), grid)
        w.view(torch.int32)[place] = bits_of_value
        assert not w[place].isfinite()
        assert quantizer.nonfinite(columns.fake_quantize(w, bits, grid, dtype=dtype).t(), grid)


@pytest.mark.parametrize("grouping", [RowBlocks(1), RowBlocks(4), RowBlocks(8), PerChannel(), PerGroup(5)], ids=str)
def test_nonfinite_groups_of_several_matrices_are_noticed(grouping: Grouping) -> None:
    grid = Grid(grouping)
    for matrix, column, row in itertools.product(range(4), range(10), range(6)):
        w = torch.randn(4, 10, 6)
        w[matrix, column, row] = torch.nan
        values = quantizer.fake_quantize(rows_of(w), 8, grid).view(4, 6, 10).transpose(1, 2)
        assert quantizer.nonfinite(matrices(values, "experts_t"), grid)
        assert not quantizer.nonfinite(matrices(torch.ones_like(values), "experts_t"), grid)


def test_what_is_left_to_a_transposed_copy() -> None:
    w = weight_of(33, 6)
    assert backend.takes_columns(w, 8, Grid(), torch.float32)
    assert not backend.takes_columns(w, 8, Grid(), torch.float32, False)
    assert not backend.takes_columns(w, 8, Grid(), torch.float16)
    assert not backend.takes_columns(w.half(), 8, Grid(), torch.float32)
    assert not backend.takes_columns(w.t(), 8, Grid(), torch.float32)
    assert not backend.takes_columns(w, 8, Grid(stochastic=True), torch.float32)
    assert not backend.takes_columns(w, 2, Grid(), torch.float32)
    assert not backend.takes_columns(w, 1, Grid(), torch.float32)
    # A scale of two matrices.
    assert not backend.takes_columns(weight_of(4, 10, 6), 8, Grid(RowBlocks(2)), torch.float32)


def test_a_backward_pass_through_older_weights_fails() -> None:
    w = weight_of(33, 6)
    out = columns.fake_quantize(w, 8, Grid())
    stale = (w.clone().requires_grad_() * out).sum()
    columns.fake_quantize(w, 4, Grid(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ValueError, match="ratio has shape"):
        columns.fake_quantize(weight_of(33, 6), 8, Grid(), ratio=torch.ones(2, 1))


def test_without_numba_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert not backend.takes_columns(weight_of(33, 6), 8, Grid(), torch.float32)
