"""The form "gemma" is what transformers computes with, and a layout is known by its line in the table alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.integrations import gemma_quant

from moq_hf import quantize_model, save_quantized, verify_quantized
from moq_hf.formats import floats, gemma, pack_quantized
from moq_hf.formats.layout import LayoutSpec
from moq_hf.formats.stored import StoredWeight
from moq_hf.formats.table import LAYOUTS
from moq_hf.grid import Grid, PerChannel, PerGroup
from moq_hf.packed.state import served_by
from moq_hf.quantizer import dequantize, quantize
from moq_hf.weight_spec import SharedScheme, WeightSpec


@pytest.mark.parametrize("columns", [47, 48])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_gemma_is_what_transformers_computes(bits: int, columns: int) -> None:
    width = 2 if bits < 3 else 4 if bits < 5 else 8
    grid = Grid(PerChannel(), full=None)
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0.0
    values = quantize(weight, bits, grid)
    linear, table = (WeightSpec(kind, (40, columns), bits, grid, gemma.FORM.name) for kind in ("linear", "embedding"))
    encoded = gemma.write(values, linear)
    stored = StoredWeight("w", linear, encoded.scheme, encoded.parts)
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


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"bits": 2}, None),
        ({"bits": 8}, None),
        ({"bits": 1}, "2 bits are the fewest"),
        ({"bits": 9}, "8 bits are the most"),
        ({"bits": 1, "kind": "conv"}, "2 bits are the fewest"),
        ({"kind": "conv"}, "convolutions"),
        ({"kind": "conv1d"}, "Conv1D"),
        ({"kind": "experts_t"}, "transposed experts"),
        ({"kind": "experts", "matrices": ("a", "b")}, None),
        ({"kind": "experts"}, "a matrix for each"),
        ({"kind": "experts", "matrices": ("a",), "grid": Grid(symmetric=False)}, "only with symmetric grids"),
        ({"kind": "experts", "matrices": ("a",), "grid": Grid(PerGroup(16), format="nvfp4")}, "in nvfp4"),
        ({"kind": "experts", "matrices": ("a",), "grid": Grid(PerGroup(32), format="mxfp4")}, "only in bfloat16"),
        ({"kind": "embedding", "is_table": True}, "tables"),
        (
            {"kind": "embedding", "is_table": True, "shared": SharedScheme(None, True, False)},
            "all other layers",
        ),
        ({"kind": "embedding", "is_table": True, "shared": SharedScheme(None, True, True)}, None),
        ({"grid": Grid(symmetric=False), "shared": SharedScheme(None, False, True)}, None),
        (
            {"grid": Grid(symmetric=False), "shared": SharedScheme(None, False, True), "shape": (2, 64)},
            "zero points are too few",
        ),
        ({"shared": SharedScheme(48, True, True)}, "whole groups"),
        ({"shared": SharedScheme(None, True, True, "mxfp4")}, "one format"),
    ],
)
def test_what_cannot_be_packed_has_one_reason(spec: Any, why: str | None) -> None:
    made = WeightSpec(**{"kind": "linear", "shape": (64, 64), "bits": 4, "grid": Grid(), **spec})
    found = pack_quantized.misfit(made)
    assert pack_quantized.fits(made) is (found is None)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_layout_is_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        LAYOUTS, "toy", LayoutSpec("toy", (pack_quantized.FORM, floats.FORM), {"transformers": "5.1.0"})
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, **shape)).eval()
    quantize_model(model, bits=4)
    batch = {"input_ids": torch.arange(8).view(2, 4)}
    found = verify_quantized(save_quantized(model, tmp_path, inputs=batch, layout="toy"), model)
    assert found.proof is not None and found.proof.agrees
    assert (found.state["layout"], found.state["needs"]) == ("toy", {"transformers": "5.1.0"})
    assert {layer.stored for layer in found.layers.values()} == {"packed"}
    first, *_ = served_by(tmp_path)
    assert first.answer == "yes"
