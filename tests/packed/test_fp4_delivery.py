"""What was trained in MXFP4 or NVFP4 is what plain transformers computes, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moq_hf import MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.export.floats import export_floats
from moq_hf.model.convert import quant_layers
from moq_hf.packed.files import SINGLE

TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TEXT, "num_key_value_heads": 2}
IDS = torch.arange(1, 25).view(2, 12)
MODELS: dict[str, Any] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
    "T5": lambda: hf.T5EncoderModel(
        hf.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    ),
    "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4)),
    "Qwen3-MoE": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**DECODER, head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
    ),
    "GPT-OSS": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **DECODER, head_dim=16, num_local_experts=4, layer_types=["sliding_attention", "full_attention"]
        )
    ),
}


def saved(
    folder: Path, family: str, name: str, dtype: torch.dtype = torch.bfloat16, at_8_bits: str = "nothing", **config: Any
) -> Any:
    """The model, whose files were loaded and gave its outputs; some layers, by what their names contain, at 8 bits."""
    hf.set_seed(0)
    model = quantize_model(MODELS[family]().to(dtype), {"quantize_format": name, **config})
    for layer_name, layer in quant_layers(model).items():
        if at_8_bits in layer_name:
            layer.set_bits(8)
    save_quantized(model, folder, inputs={"input_ids": IDS})
    return model


CASES = [
    ("Llama", "mxfp4", torch.bfloat16, "packed"),
    ("Llama", "nvfp4", torch.bfloat16, "packed"),
    # Packed codes would be unpacked in bfloat16, in a float32 model.
    ("Llama", "nvfp4", torch.float32, "unpacked"),
    ("Llama", "mxfp4", torch.float16, "unpacked"),
    ("BERT", "mxfp4", torch.bfloat16, "packed"),
    ("BERT", "nvfp4", torch.float32, "unpacked"),
    ("T5", "nvfp4", torch.bfloat16, "unpacked"),
    ("Mixtral", "mxfp4", torch.bfloat16, "packed"),
    ("Qwen3-MoE", "mxfp4", torch.bfloat16, "packed"),
    ("GPT-OSS", "mxfp4", torch.float32, "mxfp4"),
]


@pytest.mark.parametrize(("family", "name", "dtype", "layout"), CASES)
def test_plain_transformers_computes_what_the_model_does(
    tmp_path: Path, family: str, name: str, dtype: torch.dtype, layout: str
) -> None:
    model = saved(tmp_path, family, name, dtype)
    found = verify_quantized(tmp_path, model)
    assert found.state["layout"] == layout and found.state["reason"] is None
    assert found.proof is not None and found.proof.agrees and found.proof.largest_difference == 0.0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert {layer.format for layer in found.layers.values()} == {name}
    quantized = config["quantization_config"]
    assert quantized.get("format", quantized["quant_method"]) in (f"{name}-pack-quantized", "mxfp4")
    needs = {"transformers": "5.23.0"} | ({} if layout == "mxfp4" else {"compressed-tensors": "0.20.0"})
    assert found.state["needs"] == needs
    # Attention of GPT-OSS has no place in its layout.
    packed = {layer.stored for layer in found.layers.values()}
    method = "mxfp4" if layout == "mxfp4" else "compressed-tensors"
    assert f"packed {name.upper()} in the format `{method}`" in " ".join((tmp_path / "README.md").read_text().split())
    assert packed == ({"mxfp4", "dense"} if layout == "mxfp4" else {"packed"})
    if packed == {"packed"}:
        weights = sum(layer.shape[0] * layer.shape[1] for layer in found.layers.values())
        assert 8 * found.quantized_bytes[0] / weights == pytest.approx(4.25 if name == "mxfp4" else 4.5, abs=0.02)


def test_the_experts_of_gpt_oss_lie_as_in_its_own_checkpoints(tmp_path: Path) -> None:
    model = saved(tmp_path, "GPT-OSS", "mxfp4", modules_to_not_convert=["self_attn"])
    proof = verify_quantized(tmp_path, model).proof
    assert proof is not None and (proof.agrees, proof.largest_difference) == (True, 0.0)
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    assert (blocks.shape, blocks.dtype) == ((4, 256, 2, 16), torch.uint8)
    assert (scales.shape, scales.dtype) == ((4, 256, 2), torch.uint8)
    weight = quant_layers(model)[name].quantized_weight()
    assert torch.equal(convert_moe_packed_tensors(blocks, scales), weight)
    assert {layer.stored for layer in verify_quantized(tmp_path, model).layers.values()} == {"mxfp4"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    blocks[0, 0, 0, 0] += 1
    with pytest.raises(MoQError, match="differs from the model's"):
        model.model.layers[1].mlp.experts.gate_up_proj.data[0, 0, 0] = 1.0
        verify_quantized(tmp_path, model)


def test_what_transformers_does_not_load_packed_is_floats_on_the_grid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not look for the scale of a whole tensor of experts, nor does it cast what it unpacks of them."""
    model = saved(tmp_path / "nvfp4", "Mixtral", "nvfp4")
    stored = {name: layer.stored for name, layer in verify_quantized(tmp_path / "nvfp4", model).layers.items()}
    assert {stored[name] for name in stored if "experts" in name} == {"dense"}
    assert "experts are not packed in nvfp4 (model.layers." in caplog.text
    found = verify_quantized(tmp_path / "nvfp4", model, inputs={"input_ids": IDS})
    assert found.proof is not None and found.proof.agrees
    for dtype in (torch.float32, torch.float16):
        caplog.clear()
        model = saved(tmp_path / str(dtype), "Mixtral", "mxfp4", dtype)
        assert "experts in mxfp4 are packed only in bfloat16 (model.layers." in caplog.text
        found = verify_quantized(tmp_path / str(dtype), model)
        assert found.state["layout"] == "unpacked" and found.proof is not None and found.proof.agrees
        assert {layer.stored for name, layer in found.layers.items() if "experts" in name} == {"dense"}
        with pytest.raises(MoQError, match="in the layout packed: leave layout out"):
            save_quantized(model, tmp_path / "packed", layout="packed")


def test_blocks_of_eight_bits_beside_a_format(tmp_path: Path) -> None:
    """As a schedule leaves them while it falls: where all have one scheme, those in the format are floats."""
    for dtype, floats in ((torch.bfloat16, set()), (torch.float32, {"0"})):
        model = saved(tmp_path / str(dtype), "Llama", "mxfp4", dtype, at_8_bits="layers.1")
        found = verify_quantized(tmp_path / str(dtype), model)
        assert found.proof is not None and found.proof.agrees
        assert {n.split(".")[2] for n, layer in found.layers.items() if layer.stored == "dense"} == floats


def test_experts_of_eight_bits_beside_experts_in_a_format(tmp_path: Path) -> None:
    """All packed experts have one scheme in the files, so that these are floats until the last drop."""
    model = saved(tmp_path, "Mixtral", "mxfp4", at_8_bits="layers.0.mlp.experts")
    found = verify_quantized(tmp_path, model)
    assert found.proof is not None and found.proof.agrees
    stored = {(layer.stored, layer.format) for n, layer in found.layers.items() if "experts" in n}
    assert stored == {("dense", "int"), ("dense", "mxfp4")}
    assert {layer.stored for n, layer in found.layers.items() if "experts" not in n} == {"packed"}


def test_experts_of_gpt_oss_that_are_not_all_in_mxfp4(tmp_path: Path) -> None:
    model = saved(tmp_path, "GPT-OSS", "mxfp4", at_8_bits="layers.0.")
    found = verify_quantized(tmp_path, model)
    assert found.state["layout"] == "mxfp4" and found.proof is not None and found.proof.agrees
    stored = {name: layer.stored for name, layer in found.layers.items() if "experts" in name}
    assert [stored[f"model.layers.{k}.mlp.experts.down_proj"] for k in (0, 1)] == ["dense", "mxfp4"]


def test_the_layout_of_gpt_oss_is_refused_for_other_models(tmp_path: Path) -> None:
    model = quantize_model(MODELS["Llama"](), {"quantize_format": "mxfp4"})
    with pytest.raises(MoQError, match="layout mxfp4 is that of GPT-OSS, whose experts must be in MXFP4"):
        save_quantized(model, tmp_path, layout="mxfp4")


def test_a_scale_dtype_is_for_integers(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama", "nvfp4", quantize_algo={"scale_dtype": "float32"})
    assert verify_quantized(tmp_path, model).state["layout"] == "packed"


@pytest.mark.parametrize(("layout", "stored"), [(None, "packed"), ("packed", "int8")])
def test_a_head_that_shares_the_table_of_conv1d_layers_has_codes(
    layout: str | None, stored: str, tmp_path: Path
) -> None:
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32))
    quantize_model(model, {"quantize_format": "mxfp4", "quantize_heads": True})
    found = verify_quantized(save_quantized(model, tmp_path, inputs={"input_ids": IDS}, layout=layout), model)
    assert found.proof is not None and found.proof.agrees
    assert found.layers["transformer.wte"].stored == stored


@pytest.mark.parametrize("family", ["GPT-OSS", "Mixtral"])
def test_experts_that_were_unpacked_while_loading_are_saved_again(tmp_path: Path, family: str) -> None:
    """As floats, which any program reads, and on their grid again."""
    hf.set_seed(0)
    model = quantize_model(MODELS[family]().bfloat16(), {"quantize_format": "mxfp4"})
    packed = save_quantized(model, tmp_path / "packed", layout="mxfp4" if family == "GPT-OSS" else "unpacked")
    loaded = hf.AutoModelForCausalLM.from_pretrained(packed)
    exported = export_floats(packed, tmp_path / "floats")
    floats, report = hf.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in floats.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    again = save_quantized(quantize_model(loaded, {"quantize_format": "mxfp4"}), tmp_path / "again")
    proof = verify_quantized(again, loaded, inputs={"input_ids": IDS}).proof
    assert proof is not None and proof.agrees
