"""The form "gemma" is what transformers computes with; the others are read back where they are delivered."""

import pytest
import torch
from transformers.integrations import gemma_quant

from moq_hf.formats import gemma
from moq_hf.formats.stored import EncodeSpec, StoredLayer, StoredWeight
from moq_hf.grid import Grid, PerChannel
from moq_hf.quantizer import dequantize, quantize


@pytest.mark.parametrize("columns", [47, 48])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_gemma_is_what_transformers_computes(bits: int, columns: int) -> None:
    width = 2 if bits < 3 else 4 if bits < 5 else 8
    grid = Grid(PerChannel(), full=None)
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0.0
    values = quantize(weight, bits, grid)
    linear, table = (EncodeSpec(kind, (40, columns), bits, grid) for kind in ("linear", "embedding"))
    encoded = gemma.write(values, linear)
    layer = StoredLayer(
        "linear", bits, "dense", (40, columns), (40, 1), True, 0, 0, None, encoded.grid, grid.is_full(bits)
    )
    stored = StoredWeight("w", layer, encoded.scheme, encoded.parts)
    found = gemma.read(stored)
    stored.check(found)
    assert found.codes.equal(values.codes)
    module = gemma_quant.QuantizedLinear(columns, 40, num_bits=width)
    assert not module.load_state_dict(encoded.parts).missing_keys
    assert module.weight.dtype == (torch.int8 if width == 8 else torch.uint8)
    assert module._dequantize_weights().equal(dequantize(*values))
    rows = gemma_quant.QuantizedEmbedding(40, columns, torch.float32, num_bits=width)
    rows.load_state_dict(gemma.write(values, table).parts)
    assert rows.weight.equal(dequantize(*values))
