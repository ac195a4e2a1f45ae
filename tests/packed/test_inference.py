"""`load_packed` on folders written with compressed-tensors' own functions.

Where there is no CUDA device, `test_in_triton_s_interpreter` of test_triton_quant.py runs those that need one.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from moq_hf import MoQError, load_packed, quantize_model, quantizer, save_quantized, triton_quant
from moq_hf.grid import Grid, PerChannel, PerGroup, RowBlocks
from moq_hf.kernels import packing
from moq_hf.packed.inference import PackedLinear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
on_device = pytest.mark.skipif(False, reason="the interpreter runs it") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Bits and grouping by a part of the layer's name.
SCHEMES = {
    "query": (4, Grid(PerChannel())),
    "key": (8, Grid(PerGroup(8))),
    "value": (2, Grid(RowBlocks(4), symmetric=False)),
    "attention.output.dense": (8, Grid(RowBlocks(4))),
    "intermediate": (3, Grid(PerChannel())),
}


@pytest.fixture
def packed(tiny_bert: BertForSequenceClassification, tmp_path: Path) -> Path:
    """A packed tiny BERT: 4, 8, 2 and 3 bits, scales per row, group and block of rows, with and without zero points."""
    tensors, groups = {k: v.clone() for k, v in tiny_bert.state_dict().items()}, {}
    for part, (bits, grid) in SCHEMES.items():
        names = [n for n, m in tiny_bert.named_modules() if isinstance(m, nn.Linear) and part in n]
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": grid.symmetric,
            "dynamic": False,
            "strategy": "channel",
        }
        for name in names:
            weight = tensors.pop(f"{name}.weight")
            codes, scale, zero = quantizer.quantize(weight, bits, grid)
            if isinstance(grid.grouping, RowBlocks):
                weights |= {"strategy": "block", "block_structure": [len(weight) // 4, weight.shape[1]]}
            elif isinstance(grid.grouping, PerGroup):
                weights |= {"strategy": "group", "group_size": grid.grouping.size}
            if zero is not None:
                codes, zero = codes - 2 ** (bits - 1), zero - 2 ** (bits - 1)
                tensors[f"{name}.weight_zero_point"] = zero.to(torch.int8)
            tensors[f"{name}.weight_packed"] = pack_to_int32(codes.to(torch.int8), bits)
            tensors[f"{name}.weight_scale"] = scale
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        groups[part.replace(".", "_")] = {"targets": names, "weights": weights, "format": "pack-quantized"}
    others = {n for n, m in tiny_bert.named_modules() if isinstance(m, nn.Linear)}
    tiny_bert.config.architectures = ["BertForSequenceClassification"]
    tiny_bert.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(others - {name for group in groups.values() for name in group["targets"]}),
        "config_groups": groups,
    }
    tiny_bert.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_without_kernels_the_model_is_that_of_from_pretrained(
    packed: Path, tiny_batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_quant, "available", lambda _: False)
    model = load_packed(packed, device="cpu", dtype=torch.float32)
    plain = AutoModelForSequenceClassification.from_pretrained(packed).eval()
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**tiny_batch).logits, plain(**tiny_batch).logits)


@pytest.mark.parametrize(
    "grouping", [{"quantize_groups": 4}, {"quantize_group_size": 16}, {"quantize_algo": {"range": "full"}}], ids=str
)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_what_save_quantized_wrote_is_loaded(
    tiny_bert: BertForSequenceClassification,
    tiny_batch: dict[str, torch.Tensor],
    tmp_path: Path,
    bits: int,
    grouping: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_quant, "available", lambda _: False)
    config = {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_embeddings": 8, **grouping}
    quantize_model(tiny_bert.eval(), config)
    save_quantized(tiny_bert, tmp_path / "packed")
    model = load_packed(tmp_path / "packed", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(**tiny_batch).logits, tiny_bert(**tiny_batch).logits)


@on_device
def test_packed_layers_hold_the_weights_of_from_pretrained(packed: Path, tiny_batch: dict[str, torch.Tensor]) -> None:
    model = load_packed(packed, device=DEVICE)
    plain = AutoModelForSequenceClassification.from_pretrained(packed).eval()
    with torch.no_grad():
        expected = plain(**tiny_batch).logits
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 8
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize().cpu(), plain.get_submodule(name).weight), name
        assert layer.scale.dtype == torch.float32 and layer.words.dtype == torch.int32
    assert "bits=4" in repr(model)
    assert model.classifier.weight.dtype == torch.float16 and not model.training
    batch = {key: value.to(DEVICE) for key, value in tiny_batch.items()}
    with torch.no_grad():
        half = model(**batch).logits
        single = load_packed(packed, device=DEVICE, dtype=torch.float32)(**batch).logits
    assert half.dtype == torch.float16
    # In float32 the same products in another order; in float16 five of its steps at the size of the logits.
    torch.testing.assert_close(single.cpu(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(half.float().cpu(), expected, rtol=0, atol=5 * 2.0**-11)
    with pytest.raises(MoQError, match="cannot be saved"):
        model.save_pretrained(packed / "again")


def product(grouping: PerChannel | PerGroup) -> tuple[PackedLinear, torch.Tensor, torch.Tensor]:
    """A layer with a bias, inputs and a gradient of its outputs."""
    weight, bias = torch.randn(24, 32), torch.randn(24).to(torch.bfloat16)
    codes, scale, _ = quantizer.quantize(weight, 4, Grid(grouping))
    layer = PackedLinear(packing.pack(codes, 4), 4, 32, scale, None, bias).to(DEVICE)
    x, gradient = (torch.randn(3, 5, size, dtype=torch.bfloat16, device=DEVICE) for size in (32, 24))
    return layer, x, gradient


@on_device
@pytest.mark.parametrize("grouping", [PerChannel(), PerGroup(8)], ids=str)
def test_gradients_pass_through_packed_weights(
    grouping: PerChannel | PerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, gradient = product(grouping)
    layer.requires_grad_()
    found = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr(triton_quant, "available", lambda _: False)
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        layer(inputs).backward(gradient)
        assert inputs.grad is not None and layer.bias is not None and layer.bias.grad is not None
        found.append((inputs.grad, layer.bias.grad.clone()))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


@on_device
def test_packed_layers_are_compiled_as_plain_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    layer, x, _ = product(PerChannel())
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(found, layer(x), rtol=0.02, atol=0.02)
    assert triton_quant.available(DEVICE)
    assert not [record for record in caplog.records if "Triton" in record.message]


def test_a_folder_without_packed_weights_is_told(tiny_bert: BertForSequenceClassification, tmp_path: Path) -> None:
    tiny_bert.save_pretrained(tmp_path)
    with pytest.raises(MoQError, match="holds no packed weights: load it with from_pretrained"):
        load_packed(tmp_path, device="cpu")
    with pytest.raises(OSError):
        load_packed(tmp_path / "nothing", device="cpu")


def test_a_class_that_transformers_lacks_is_told(packed: Path, tmp_path: Path) -> None:
    config = (packed / "config.json").read_text().replace("BertForSequenceClassification", "MyBert")
    (packed / "config.json").write_text(config)
    with pytest.raises(MoQError, match="class MyBert"):
        load_packed(packed, device="cpu")
