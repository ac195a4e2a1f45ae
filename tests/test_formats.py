"""Each form of delivery reads back what it wrote, whatever the grid is."""

import pytest
import torch
from transformers.integrations import gemma_quant

from moq_hf.formats import gemma
from moq_hf.formats.stored import EncodedWeight, EncodeSpec, SharedScheme, StoredLayer, StoredWeight
from moq_hf.formats.table import FORMS
from moq_hf.grid import Grid, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import Quantized, dequantize, quantize

GROUPINGS = (PerChannel(), PerGroup(16), RowBlocks(4))
KINDS = ({}, {"full": True}, {"symmetric": False})


def as_stored(spec: EncodeSpec, values: Quantized, encoded: EncodedWeight) -> StoredWeight:
    """A weight as it is read, of one as it was written."""
    full = spec.grid.is_full(spec.bits)
    size = (values.scale.shape[0], values.scale.shape[1])
    symmetric = spec.grid.symmetric
    layer = StoredLayer(
        "linear", spec.bits, "dense", spec.matrix_shape, size, symmetric, 0, 0, None, encoded.grid, full
    )
    return StoredWeight("w", layer, encoded.scheme, encoded.parts)


# Tables are packed with the layers where all have one scheme, and "gemma" has none.
@pytest.mark.parametrize(
    ("form", "at_load"),
    [("packed", False), ("packed", True), ("int8", False), ("gemma", False), ("dense", False), ("dense", True)],
)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_was_written_is_read(form: str, at_load: bool, grouping: object, kind: dict[str, bool]) -> None:
    grid = Grid(grouping, search="absmax", **kind)  # type: ignore[arg-type]
    if form == "gemma" and not FORMS[form].fits(EncodeSpec("linear", (40, 48), 4, grid)):
        assert isinstance(grouping, PerGroup) or not grid.symmetric
        return
    for bits in (2, 3, 4, 8):
        check_round_trip(form, at_load, grid, bits)


def check_round_trip(form: str, at_load: bool, grid: Grid, bits: int) -> None:
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(bits))
    values = quantize(weight, bits, grid)
    shared = SharedScheme(grid.grouping.row_size, grid.symmetric, takes_tables=True) if at_load else None
    # While loading, codes are as wide as the widest of the model.
    width = 8 if at_load else bits
    spec = EncodeSpec("linear", (40, 48), bits, grid, shared=shared, width=width, shape=(40, 48))
    encoded = FORMS[form].write(values, spec)
    stored = as_stored(spec, values, encoded)
    found = FORMS[form].read(stored)
    stored.check(found)
    assert found.codes.equal(values.codes)
    assert dequantize(*found).equal(dequantize(*values))


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
    stored = as_stored(linear, values, encoded)
    found = gemma.read(stored)
    stored.check(found)
    assert found.codes.equal(values.codes)
    layer = gemma_quant.QuantizedLinear(columns, 40, num_bits=width)
    assert not layer.load_state_dict(encoded.parts).missing_keys
    assert layer.weight.dtype == (torch.int8 if width == 8 else torch.uint8)
    assert layer._dequantize_weights().equal(dequantize(*values))
    rows = gemma_quant.QuantizedEmbedding(40, columns, torch.float32, num_bits=width)
    rows.load_state_dict(gemma.write(values, table).parts)
    assert rows.weight.equal(dequantize(*values))
