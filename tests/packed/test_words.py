"""Packed words are those of compressed-tensors, byte for byte."""

import pytest
import torch
from numerics import GROUPINGS, MODES, same_bits

from moq_hf import quantizer
from moq_hf.grid import Grid, Grouping, RowBlocks
from moq_hf.packed import encoder, words
from moq_hf.quantizer import RoundingSeed
from moq_hf.transformers_seams import pack_to_int32


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 7, 16, 32, 33, 96, 130])
def test_words_are_those_of_the_library(bits: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (9, columns))
    own = codes.to(torch.int8)
    expected = pack_to_int32(own, bits)
    for size in (1, 2 * columns, words.PIECE):
        monkeypatch.setattr(words, "PIECE", size)
        assert torch.equal(words.pack(codes, bits), expected)
        assert torch.equal(words.unpack(expected, bits, own.shape), own)


def test_every_code_at_every_place() -> None:
    for bits in (2, 4, 8):
        row = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
        codes = torch.stack([row.roll(shift) for shift in range(len(row))])
        assert torch.equal(words.pack(codes, bits), pack_to_int32(codes.to(torch.int8), bits))


def test_a_big_endian_machine_has_the_library_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    monkeypatch.setattr(words, "_bytes_of", None)
    codes = torch.randint(-8, 8, (3, 40))
    assert torch.equal(words.pack(codes, 4), pack_to_int32(codes.to(torch.int8), 4))


@pytest.mark.parametrize("grouping", [*GROUPINGS, RowBlocks(6)], ids=str)
def test_a_weight_is_quantized_by_pieces_as_a_whole(grouping: Grouping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "PIECE", 70)
    w, draw = torch.randn(12, 33), RoundingSeed(5, 2, 7)
    for bits, mode in MODES:
        grid = Grid(grouping, mode.symmetric, mode.stochastic, full=mode.full)
        ratio = torch.tensor(quantizer.RATIOS)[torch.randint(17, grid.shape(12, 33))] if grid.is_uniform(bits) else None
        values, error = encoder._quantize(w, bits, grid, ratio, draw)
        exact = quantizer.quantize(w, bits, grid, ratio=ratio, seed=draw)
        assert torch.equal(values.codes, exact.codes) and same_bits(values.scale, exact.scale)
        assert values.zero_point is exact.zero_point or torch.equal(values.zero_point, exact.zero_point)
        assert error == encoder._max_error(w, exact)


def test_nonfinite_weights_are_refused_in_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "PIECE", 70)
    for row in range(6):
        w = torch.randn(6, 33)
        w[row, 5] = torch.inf
        with pytest.raises(ValueError, match="NaN or Inf"):
            encoder._quantize(w, 4, Grid(), None, RoundingSeed())
