"""What a server of the config cannot take is one error before the first step."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_runs import arguments
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    ViTConfig,
    ViTForImageClassification,
)

from moq_hf import MoQCallback, MoQConfig, MoQConfigError, MoQError, quantize_model, quantizer
from moq_hf.config import served_scale_dtype
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory
from moq_hf.model.selection import take_inventory
from moq_hf.rows import to_rows
from moq_hf.serving import planned
from moq_hf.serving.servers import REQUIRED, SERVERS

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def moq(serve: list[str], bits: int = 4, **more: Any) -> dict[str, Any]:
    more.setdefault("quantize_group_size", 64)
    return {"quantize_bits": {"start_bits": 8, "target_bits": bits}, "serve": serve, **more}


@pytest.mark.parametrize("serve", [["transformers"], ["vllm", "sglang"], ["llama.cpp", "vllm"]])
def test_the_common_grid_passes(serve: list[str]) -> None:
    quantize_model(llama(), moq(serve))


def test_all_reasons_are_one_error() -> None:
    config = moq(["vllm", "sglang", "llama.cpp"], 3, modules_to_not_convert=["lm_head", "q_proj"])
    with pytest.raises(MoQError) as caught:
        quantize_model(llama(), config)
    lines = str(caught.value).splitlines()
    assert lines[0] == "serve: what these servers cannot take"
    assert [line.split(":")[0] for line in lines[1:]] == ["  - vLLM, CUDA 0.32.0"] + 2 * ["  - SGLang 0.5.23"]
    assert lines[1] == (
        "  - vLLM, CUDA 0.32.0: it makes one layer of q_proj, k_proj, v_proj (3 bits in groups of 64 and floats) "
        "(model.layers.*.self_attn.q_proj (2), model.layers.*.self_attn.k_proj (2), model.layers.*.self_attn.v_proj "
        "(2)); all of them on the same grid, or all of them in float, are served"
    )
    assert "its kernels take 4 or 8 bits, not 3" in lines[2]


def test_the_target_counts_and_not_the_start() -> None:
    quantize_model(llama(), {**moq(["sglang"]), "quantize_bits": {"start_bits": 7, "target_bits": 4}})
    with pytest.raises(MoQError, match="not 7"):
        quantize_model(llama(), moq(["sglang"], 7))


@pytest.mark.parametrize(
    ("serve", "more", "message"),
    [
        ("vllm", {"quantize_embeddings": 8}, "embedding tables must be floats .model.embed_tokens."),
        ("llama.cpp", {"quantize_group_size": 16}, "its groups are a multiple of 32, not 16"),
        ("sglang", {"quantize_group_size": 16}, "its groups are 32, 64 or 128, not 16"),
        ("onnxruntime", {}, "LlamaForCausalLM is not exported"),
    ],
)
def test_one_reason(serve: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(MoQError, match=message):
        take_inventory(llama(), MoQConfig.from_dict(moq([serve], **more)))


def test_conv1d_is_described_by_its_transpose() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
    config = MoQConfig.from_dict(moq(["transformers"], quantize_group_size=32))
    found = planned.describe(take_inventory(model, config), config).weights["transformer.h.0.attn.c_attn"]
    assert (found.kind, found.rows, found.columns) == ("conv1d", 96, 32)
    with pytest.raises(MoQError, match="cannot turn packed ones"):
        quantize_model(model, moq(["vllm"], quantize_group_size=32))


def test_convolutions_are_described_by_their_matrices_as_floats() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    config = MoQConfig.from_dict(moq(["transformers"], quantize_group_size=32, quantize_convolutions=True))
    inventory = take_inventory(model, config)
    name = next(name for name in inventory.layers if name.endswith("projection"))
    found = planned.describe(inventory, config).weights[name]
    assert (found.kind, found.rows, found.columns, found.group_size) == ("conv", 32, 192, None)
    assert found.is_float


def test_a_head_that_is_a_table_too_is_described_as_a_table() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    config = moq(["vllm"], modules_to_not_convert=[])
    with pytest.raises(MoQError, match=r"embedding tables must be floats \(model.embed_tokens\)"):
        quantize_model(model, config)
    quantize_model(model, {**config, "serve": ["llama.cpp"]})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_s_names_are_not_the_server_s() -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    config = MoQConfig.from_dict(moq(["vllm"]))
    found = planned.describe(take_inventory(model, config), config)
    assert found.architecture == "LlamaForCausalLM"
    assert "model.layers.0.self_attn.q_proj" in found.weights and "lm_head" in found.floats
    assert not any("base_model" in name or "lora" in name for name in (*found.weights, *found.floats))


def test_a_stock_trainer_stops_before_the_first_step(tmp_path: Path) -> None:
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    callback = MoQCallback(moq(["vllm"], modules_to_not_convert=["lm_head", "up_proj"]))
    with pytest.raises(MoQError, match="it makes one layer of gate_proj, up_proj"):
        Trainer(model=llama(), args=arguments(tmp_path), train_dataset=data, callbacks=[callback])


def test_what_vllm_lacks_on_the_cpu_is_a_warning() -> None:
    config = MoQConfig.from_dict(moq(["vllm"], 8, activation_quantization={"enabled": True}))
    notes = planned.notes(take_inventory(llama(), config), config)
    assert any(note.startswith("serve: vLLM, CPU 0.32.0 does not take it: its kernels take 4 bits") for note in notes)
    assert any("do not round inputs" in note for note in notes)
    # They are trained in half precision, unless the config says otherwise.
    assert not any("scales are rounded to half precision there" in note for note in notes)
    algo = {"quantize_algo": {"scale_dtype": "float32"}}
    config = MoQConfig.from_dict(moq(["vllm"], **algo))
    notes = planned.notes(take_inventory(llama(), config), config)
    assert any("scales are rounded to half precision there" in note for note in notes)
    assert planned.notes(take_inventory(llama(), config), MoQConfig.from_dict(moq(["transformers"]))) == []


def test_fused_layers_drop_together() -> None:
    # So whatever a run ends with, they have the same bits.
    inventory = Inventory.of(llama())
    blocks = inventory.blocks(inventory.linears)
    assert {block.count(".") for block in blocks if block != "lm_head"} == {2} and len(blocks) == 3


def test_words_of_the_config() -> None:
    assert MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}}).serve == ("transformers",)
    config = MoQConfig.from_dict(moq(["vllm", "llama.cpp"]))
    assert MoQConfig.from_dict(config.to_dict()) == config and config.to_dict()["serve"] == ["vllm", "llama.cpp"]
    with pytest.raises(MoQConfigError) as caught:
        MoQConfig.from_dict(moq(["vlm"]))
    assert str(caught.value) == (
        'MoQ config: serve: ["vlm"] is not legal; it must be a list of "transformers" or "vllm" or "sglang" or '
        '"llama.cpp" or "onnxruntime" (did you mean "vllm"?)'
    )
    assert set(REQUIRED) <= {server.key for server in SERVERS}


@pytest.mark.parametrize(
    ("serve", "dtype", "expected"),
    [
        (["transformers"], "bfloat16", "float32"),
        (["vllm"], "bfloat16", "bfloat16"),
        (["vllm"], "float16", "float16"),
        (["sglang", "llama.cpp"], "float32", "bfloat16"),
        (["llama.cpp"], "bfloat16", "float16"),
        (["onnxruntime", "transformers"], "float32", "float32"),
        ([], "float32", "float32"),
    ],
)
def test_dtypes_of_scales(serve: Any, dtype: str, expected: str) -> None:
    assert served_scale_dtype(serve, dtype) == expected


@pytest.mark.parametrize(
    ("serve", "dtype", "scales"),
    [
        ("vllm", "float32", "bfloat16"),
        ("vllm", "float16", "float16"),
        ("llama.cpp", "float32", "float16"),
        ("transformers", "bfloat16", "float32"),
    ],
)
def test_scales_are_trained_in_the_dtype_that_the_server_loads(serve: str, dtype: str, scales: str) -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_group_size": 32, "serve": [serve]}
    model = quantize_model(llama().to(getattr(torch, dtype)), config)
    layers = quant_layers(model).values()
    assert {layer.moq.grid.scale_dtype for layer in layers} == {scales}
    for layer in layers:
        stored = quantizer.quantize(
            to_rows(layer.float_weight, layer.kind), 4, layer.moq.grid, ratio=layer.moq.ratio
        ).scale
        assert torch.equal(stored.to(getattr(torch, scales)).float(), stored)


def test_experts_are_asked_about_one_by_one() -> None:
    def mixture() -> MixtralForCausalLM:
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False))

    config = MoQConfig.from_dict(moq(["vllm", "sglang", "llama.cpp"]))
    found = planned.describe(take_inventory(mixture(), config), config)
    weight = found.weights["model.layers.1.mlp.experts.3.gate_up_proj"]
    assert (weight.rows, weight.columns, weight.grid()) == (512, 128, "4 bits in groups of 64")
    assert not found.tensors and sum(".experts." in name for name in found.weights) == 16
    with pytest.raises(MoQError, match=r"looks for each expert by its own name .*gate_up_proj"):
        quantize_model(mixture(), moq(["vllm"], modules_to_not_convert=["experts", "lm_head"]))
    with pytest.raises(MoQError, match=r"looks for each expert by its own name .*down_proj"):
        quantize_model(mixture(), moq(["vllm"], quantize_type="asymmetric"))


def test_convolutions_are_floats_to_servers() -> None:
    config = MoQConfig.from_dict(moq([], quantize_convolutions=True, quantize_group_size=16))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 2))
    found = planned.describe(take_inventory(model, config), config).weights["0"]
    assert (found.rows, found.columns, found.grid()) == (8, 27, "floats")
