"""What was trained in FP8 is what plain transformers computes, bit for bit: weights, and inputs of layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from moq_hf import MoQError, quantize_model, save_quantized, verify_quantized
from moq_hf.export.floats import export_floats
from moq_hf.export.gguf import export_gguf
from moq_hf.export.onnx import export_onnx
from moq_hf.packed.files import SINGLE
from moq_hf.packed.state import served_by

TEXT = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TEXT, "num_key_value_heads": 2}
IDS = torch.arange(1, 25).view(2, 12)
MODELS: dict[str, Any] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "tied": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True)),
    "BERT": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
    "T5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=4)),
    "GPT-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "ViT": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
    ),
}
WEIGHTS_ALONE = {"format": "fp8"}
STATIC = {"source": "fp8", "activations": {"scale": "static"}}
INPUTS = {"source": "fp8"}


def inputs_of(family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if family == "ViT":
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16).to(dtype)}
    more = {"decoder_input_ids": IDS[:, :6]} if family == "T5" else {}
    return {"input_ids": IDS, **more}


def saved(folder: Path, family: str, dtype: torch.dtype, **config: Any) -> Any:
    """The model, as `from_pretrained` gives it in a dtype, quantized and saved."""
    hf.set_seed(0)
    MODELS[family]().save_pretrained(folder / "float")
    made = type(MODELS[family]()).from_pretrained(folder / "float", dtype=dtype).eval()
    inputs = inputs_of(family, dtype)
    source = config.pop("source", None)
    ranges = {"inputs": [inputs]} if "activations" in config else {}
    model = quantize_model(made, *([source] if source else []), **config, **ranges)
    save_quantized(model, folder / "saved", inputs=inputs)
    return model


CASES = [
    ("Llama", torch.float32, INPUTS, "packed"),
    ("Llama", torch.bfloat16, STATIC, "packed"),
    ("Llama", torch.float16, {**INPUTS, "heads": True}, "packed"),
    ("tied", torch.bfloat16, {**WEIGHTS_ALONE, "heads": True}, "packed"),
    ("BERT", torch.float32, STATIC, "packed"),
    ("BERT", torch.bfloat16, INPUTS, "packed"),
    ("Mixtral", torch.float32, WEIGHTS_ALONE, "packed"),
    ("Mixtral", torch.float16, {**INPUTS, "overrides": {"*.experts.*": {"activations": False}}}, "packed"),
    ("ViT", torch.float16, INPUTS, "packed"),
    # It is unpacked while loading, for which inputs have no place.
    ("T5", torch.bfloat16, WEIGHTS_ALONE, "unpacked"),
]


@pytest.mark.parametrize(("family", "dtype", "config", "layout"), CASES)
def test_plain_transformers_computes_what_the_model_does(
    tmp_path: Path, family: str, dtype: torch.dtype, config: dict[str, Any], layout: str
) -> None:
    model = saved(tmp_path, family, dtype, **config)
    found = verify_quantized(tmp_path / "saved", model)
    assert found.state["layout"] == layout and found.state["reason"] is None
    assert found.proof is not None and found.proof.agrees and found.proof.largest_difference == 0.0
    assert found.state["rounds_inputs"] == ("source" in config)
    loaded = type(MODELS[family]()).from_pretrained(tmp_path / "saved").eval()
    assert loaded.dtype == dtype
    with torch.no_grad():
        outputs = [each(**inputs_of(family, dtype)).logits for each in (model, loaded)]
    assert torch.equal(*outputs)
    document = json.loads((tmp_path / "saved" / "config.json").read_text())
    groups = document["quantization_config"]["config_groups"].values()
    (group,) = [group for group in groups if group["format"] == "float-quantized" and "experts" not in str(group)]
    assert group["weights"]["type"] == "float" and group["weights"]["strategy"] == "channel"
    if "source" in config:
        strategy = "tensor" if "activations" in config else "token"
        assert {**group["input_activations"], "strategy": strategy, "type": "float"} == group["input_activations"]
    formats = {layer.kind: layer.format for layer in found.layers.values()}
    # Tables are integers, but for one that a quantized head shares.
    assert formats.pop("embedding", "int") == ("fp8" if family == "tied" else "int")
    assert set(formats.values()) == {"fp8"}
    words = " ".join((tmp_path / "saved" / "README.md").read_text().split())
    assert "packed FP8" in words and "`compressed-tensors`" in words


def test_the_tensors_are_compressed_tensors_float_quantized(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama", torch.bfloat16, **INPUTS)
    tensors = load_file(tmp_path / "saved" / SINGLE)
    layer = model.model.layers[1].mlp.down_proj
    codes, scale = (tensors[f"model.layers.1.mlp.down_proj.{part}"] for part in ("weight", "weight_scale"))
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.bfloat16, (64, 1))
    assert torch.equal(codes.bfloat16() * scale, layer.quantized_weight())
    assert torch.equal(scale, (layer.float_weight.abs().amax(1, keepdim=True).float() / 448).bfloat16())
    found = verify_quantized(tmp_path / "saved", model)
    assert found.state["needs"] == {"transformers": "5.17.0", "compressed-tensors": "0.17.0"}
    # Saved once more from its floats, it is the same.
    export_floats(tmp_path / "saved", tmp_path / "floats")
    again = hf.LlamaForCausalLM.from_pretrained(tmp_path / "floats")
    assert torch.equal(again.model.layers[1].mlp.down_proj.weight, layer.quantized_weight())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_has_no_place_in_the_files_is_floats_on_the_grid(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(tmp_path, "GPT-2", dtype, **WEIGHTS_ALONE)
    assert "Conv1D layers, as GPT-2 has them, are not packed" in caplog.text
    found = verify_quantized(tmp_path / "saved", model)
    assert found.proof is not None and found.proof.largest_difference == 0.0
    assert {(layer.stored, layer.format) for layer in found.layers.values()} == {("dense", "fp8")}


def test_experts_have_no_rounded_inputs_without_which_servers_do_not_take_them() -> None:
    with pytest.raises(MoQError, match="the inputs of experts cannot be quantized"):
        quantize_model(MODELS["Mixtral"](), "fp8")
    with pytest.raises(MoQError, match=r'it takes experts in fp8 only with rounded inputs.*; format "int" is served'):
        quantize_model(MODELS["Mixtral"](), format="fp8", serve=["vllm"])


def test_servers_take_it_and_exports_say_that_they_do_not(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", torch.float32, **INPUTS)
    answers = {found.server.key: found for found in served_by(tmp_path / "saved")}
    assert {key for key, found in answers.items() if not found.reasons} >= {"transformers", "vllm", "sglang"}
    for export, key in ((export_gguf, "llama.cpp"), (export_onnx, "onnxruntime")):
        assert "it does not take fp8" in answers[key].reasons[0]
        more = {"converter": tmp_path / "convert_hf_to_gguf.py"} if key == "llama.cpp" else {}
        with pytest.raises(MoQError, match=r'it does not take fp8 .*; format "int" is served'):
            export(tmp_path / "saved", tmp_path / "out", **more)  # type: ignore[operator]
    with pytest.raises(MoQError, match=r"llama.cpp by moq-hf export gguf .*: it does not take fp8"):
        quantize_model(MODELS["Llama"](), "fp8", serve=["llama.cpp"])
