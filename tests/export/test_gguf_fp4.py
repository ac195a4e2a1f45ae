"""GGUF's MXFP4 and NVFP4 hold the codes and scales of a checkpoint, and gguf reads its weights out of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from moq_hf import quantize_model, quantizer, save_quantized
from moq_hf.export.floats import export_floats
from moq_hf.export.gguf import blocks_of, export_gguf
from moq_hf.grid import Grid, PerGroup
from moq_hf.packed.reading import stored_weights
from moq_hf.weight_spec import WeightSpec

gguf = pytest.importorskip("gguf")

from gguf_base import permuted, write_base  # noqa: E402

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def delivered(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """A packed checkpoint, and the base that llama.cpp's converter would make of it."""
    hf.set_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    packed = save_quantized(quantize_model(model, config), folder / "packed")
    export_floats(packed, folder / "floats")
    return packed, write_base(hf.AutoModelForCausalLM.from_pretrained(folder / "floats"), folder / "base.gguf")


@pytest.mark.parametrize(("name", "unit"), [("mxfp4", 1.0), ("nvfp4", 128.0)])
def test_blocks_are_those_of_the_checkpoint(tmp_path: Path, name: str, unit: float) -> None:
    packed, base = delivered(tmp_path, {"quantize_format": name})
    found = export_gguf(packed, tmp_path / "out.gguf", base)
    assert found.weight_error == 0.0 and found.types[name.upper()] == 7
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(found.path).tensors}
    weights = stored_weights(packed)
    for layer, place in (("self_attn.k_proj", "attn_k"), ("mlp.down_proj", "ffn_down")):
        expected = quantizer.dequantize(*weights[f"model.layers.0.{layer}"]).numpy()
        expected = permuted(expected, 2) if place == "attn_k" else expected
        tensor = tensors[f"blk.0.{place}.weight"]
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(read / np.float32(unit), expected)
        # llama.cpp multiplies with it where it is there.
        scale = tensors.get(f"blk.0.{place}.scale")
        assert (scale is None) == (name == "mxfp4") and (scale is None or scale.data.tolist() == [1 / unit])


def test_ggufs_own_quantizer_makes_the_same_bytes_of_mxfp4() -> None:
    """Of weights whose groups reach from 1 to 1.75 of a power of two: from there on gguf's clips more than ours.

    gguf takes the first of two codes that are equally near, so ties are left out, and a zero's sign is its own.
    """
    torch.manual_seed(0)
    groups = 2 * torch.rand(64, 2, 32) - 1
    groups[..., 0] = torch.linspace(1.0, 1.74, 128).view(64, 2)
    weight = (groups * 2.0 ** torch.randint(-60, 60, (64, 2, 1))).view(64, 64)
    grid = Grid(PerGroup(32), format="mxfp4")
    values = quantizer.quantize(weight, 4, grid)
    blocks = blocks_of(values, WeightSpec("linear", (64, 64), 4, grid, "packed"), "it")
    kind = gguf.GGMLQuantizationType.MXFP4
    theirs = gguf.quants.quantize(weight.numpy(), kind)
    assert np.array_equal(gguf.quants.dequantize(theirs, kind), gguf.quants.dequantize(blocks.raw, kind))
    exponents = np.s_[:, ::17]
    assert np.array_equal(blocks.raw[exponents], theirs[exponents])
