"""The blocks hold the integers: gguf's own reader of blocks gives code * scale, for every kind of grid."""

import re

import numpy as np
import pytest
import torch

from moq_hf import MoQError, quantizer
from moq_hf.export.gguf import Blocks, blocks_of
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import Quantized
from moq_hf.weight_spec import WeightSpec

gguf = pytest.importorskip("gguf")


def values_of(blocks: Blocks) -> np.ndarray:
    """What gguf reads in the blocks."""
    return gguf.quants.dequantize(blocks.raw, gguf.GGMLQuantizationType[blocks.kind])


def quantized(bits: int, grouping: Grouping, symmetric: bool = True) -> tuple[Quantized, WeightSpec]:
    grid = Grid(grouping, symmetric=symmetric)
    values = quantizer.quantize(torch.randn(8, 128) * 0.02, bits, grid)
    if values.zero_point is not None:
        # As `stored_weights` has them.
        half = 2 ** (bits - 1)
        values = Quantized(values.codes - half, values.scale, values.zero_point - half)
    return values, WeightSpec("linear", (8, 128), bits, grid, "packed")


LAYER = WeightSpec("linear", (8, 128), 4, stored="packed")
ASYMMETRIC = WeightSpec("linear", (8, 128), 4, Grid(symmetric=False), "packed")
CASES = [
    *[(bits, grouping, True) for bits in range(1, 9) for grouping in (PerGroup(32), PerGroup(64), RowBlocks(2))],
    *[(bits, grouping, False) for bits in (2, 3, 4) for grouping in (PerGroup(32), PerChannel())],
]


@pytest.mark.parametrize(("bits", "grouping", "symmetric"), CASES)
def test_every_grid_reads_back_as_codes_times_half_scales(bits: int, grouping: Grouping, symmetric: bool) -> None:
    stored, layer = quantized(bits, grouping, symmetric)
    blocks = blocks_of(stored, layer, "x")
    assert blocks.kind == ("Q4_1" if not symmetric else "Q4_0" if bits <= 4 else "Q8_0")
    found = values_of(blocks)
    halves = stored.scale.half().float()
    if symmetric:
        assert np.array_equal(found, quantizer.dequantize(stored.codes, halves).numpy())
    steps = blocks.error
    assert 0 < steps <= 2**-11 * 2**bits
    exact = quantizer.dequantize(*stored).numpy()
    step = stored.scale.numpy().repeat(8 // layer.scales[0], 0).repeat(128 // layer.scales[1], 1)
    assert np.abs(found - exact).max() <= (steps * step).max()


def test_scales_that_float16_cannot_hold() -> None:
    codes = torch.ones(2, 32, dtype=torch.int32)
    for scale in (1e5, 1e-9):
        stored = Quantized(codes, torch.tensor([[1.0], [scale]]), None)
        with pytest.raises(MoQError, match=re.escape(f"blk: a scale of {scale:.3g} does not fit")):
            blocks_of(stored, LAYER, "blk")
    # The scale of zeros does not matter.
    stored = Quantized(codes * torch.tensor([[1], [0]]), torch.tensor([[1.0], [1e-9]]), None)
    blocks = blocks_of(stored, LAYER, "blk")
    assert np.array_equal(values_of(blocks)[1], np.zeros(32)) and blocks.error == 0
    zero = torch.full((2, 1), -8, dtype=torch.int32)
    stored = Quantized(codes, torch.tensor([[1.0], [6e4]]), zero)
    assert np.isfinite(values_of(blocks_of(stored, ASYMMETRIC, "blk"))).all()
    stored = stored._replace(zero_point=zero + 15)
    with pytest.raises(MoQError, match=r"a scale of 6e\+04 does not fit"):
        blocks_of(stored, ASYMMETRIC, "blk")
