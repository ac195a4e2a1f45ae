"""The layout "gemma": what plain transformers computes with packed weights is what was evaluated."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, apply_srq

from moq_hf import MoQError, dequantize_model, quantize_model, save_quantized, verify_quantized
from moq_hf.export.floats import export_floats
from moq_hf.grid import InputGrid
from moq_hf.inputs import fake_quantize_input
from moq_hf.packed.save import SaveOptions, deliver
from moq_hf.packed.state import served_by, write_state

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(1, 25).view(3, 8)


def bert() -> Any:
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=64, max_position_embeddings=16, **SIZES))


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, **SIZES))


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def bart() -> Any:
    sizes: dict[str, Any] = {}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 64}
    return hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=32, **sizes)
    )


def mixtral() -> Any:
    return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=64, num_key_value_heads=4, num_local_experts=2, **SIZES))


def config_of(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, **more}


def made(make: Any, config: dict[str, Any]) -> Any:
    hf.set_seed(0)
    return quantize_model(make().eval(), config)


def inputs_of(model: Any) -> dict[str, Any]:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return {"input_ids": IDS, **more}


BITS = {"*q_proj": 3, "*mlp*": 8, "*o_proj": 2}
MIXED = config_of(overrides={glob: {"bits": bits, "start_bits": bits} for glob, bits in BITS.items()})
HALF = config_of(quantize_algo={"scale_dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("make", "config", "in_float"),
    [
        (bert, config_of(1), None),
        (bert, config_of(quantize_embeddings=4, quantize_groups=2), None),
        (bert, config_of(2, quantize_embeddings=8), None),
        (llama, MIXED, None),
        (lambda: llama().bfloat16(), HALF, None),
        # transformers keeps these layers in float32.
        (t5, config_of(), r"\.wo$"),
        # The library cannot tie tables, and drops the constant that a row is multiplied with.
        (bart, config_of(quantize_embeddings=8), r"\.shared$"),
        (mixtral, config_of(8), r"\.experts\."),
    ],
)
def test_it_computes_what_was_evaluated(make: Any, config: Any, in_float: str | None, tmp_path: Path) -> None:
    model = made(make, config)
    save_quantized(model, tmp_path, layout="gemma", inputs=inputs_of(model))
    found = verify_quantized(tmp_path, model, inputs=inputs_of(model))
    assert found.proof is not None and (found.proof.agrees, found.proof.largest_difference) == (True, 0.0)
    assert found.state["layout"] == "gemma" and found.state["needs"] == {"transformers": "5.23.0"}
    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    for name, layer in found.layers.items():
        if in_float and re.search(in_float, name):
            assert layer.stored == "dense", name
            continue
        module = loaded.get_submodule(name)
        width = next(width for width in (2, 4, 8) if layer.bits <= width)
        assert isinstance(module, QuantizedLinear | QuantizedEmbedding) and module.num_bits == width, name
        assert layer.stored == "gemma" and layer.bytes <= (width / 8 * layer.shape[1] + 4) * layer.shape[0] + 8


def test_parts_can_be_called_first(tmp_path: Path) -> None:
    model = made(t5, config_of())
    save_quantized(model, tmp_path, layout="gemma")
    encoder = hf.T5ForConditionalGeneration.from_pretrained(tmp_path).get_encoder()
    assert torch.equal(encoder(IDS).last_hidden_state, model.get_encoder()(IDS).last_hidden_state)


def test_the_config_names_no_more_than_it_must(tmp_path: Path) -> None:
    save_quantized(made(llama, MIXED), tmp_path, layout="gemma")
    config = hf.AutoConfig.from_pretrained(tmp_path).quantization_config
    assert config["num_bits"] == 4 and not config["quantize_embeddings"]
    assert config["modules_to_not_convert"] == [r"^(?:.*\.)?lm_head$"]
    patterns = {pattern: group["num_bits"] for pattern, group in config["module_quant_configs"].items()}
    assert sorted(patterns.values()) == [2, 8] and max(map(len, patterns)) < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_inputs_are_rounded_as_transformers_does(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(4, 5, 8)).to(dtype)
    scale = torch.tensor([0.0123]).to(dtype)
    assert torch.equal(fake_quantize_input(x, InputGrid(8, "static"), scale), apply_srq(x, scale[0].float()))


def test_static_ranges_are_delivered(tmp_path: Path) -> None:
    model = made(bert, config_of(activation_quantization={"enabled": True, "scale": "static"}))
    # What the first pass saw becomes the range.
    for _ in range(2):
        model.train()(IDS)
    model.train().eval()
    save_quantized(model, tmp_path, layout="gemma", inputs=inputs_of(model))
    found = verify_quantized(tmp_path, model)
    assert found.state["rounds_inputs"] and found.proof is not None
    assert (found.proof.inputs, found.proof.largest_difference) == ("rounded", 0.0)
    layer = hf.BertForSequenceClassification.from_pretrained(tmp_path).bert.pooler.dense
    assert float(layer.input_activation_scale.detach()) == float(model.bert.pooler.dense.moq.inputs.scale) > 0
    model.bert.pooler.dense.moq.inputs.range *= 2
    with pytest.raises(MoQError, match=r"bert\.pooler\.dense\.input_scale differs from the model's"):
        verify_quantized(tmp_path, model)


@pytest.mark.parametrize("inputs", [{"scale": "per_token"}, {"scale": "static", "bits": 4}])
def test_other_inputs_stay_floats(inputs: Any, tmp_path: Path) -> None:
    model = made(bert, config_of(activation_quantization={"enabled": True, **inputs}))
    for _ in range(2):
        model.train()(IDS)
    model.train().eval()
    save_quantized(model, tmp_path, layout="gemma", inputs=inputs_of(model))
    proof = verify_quantized(tmp_path, model).proof
    assert proof is not None and (proof.inputs, proof.agrees) == ("float", True)


@pytest.mark.parametrize(
    ("make", "config", "named"),
    [
        (bert, config_of(quantize_group_size=16), "query (2)"),
        (bert, config_of(quantize_algo={"q_type": "asymmetric"}), "query (2)"),
        (bert, config_of(overrides={"*query": {"bits": 9, "start_bits": 9}}), "query (2):"),
        (gpt2, config_of(), "attn.c_attn"),
        (lambda: llama().bfloat16(), config_of(), "q_proj (2)"),
    ],
)
def test_what_does_not_fit_is_one_error(make: Any, config: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match=rf"^layout gemma has no place for .*{re.escape(named)}.* it is for nn\.Linear"):
        save_quantized(made(make, config), tmp_path / "out", layout="gemma")
    with pytest.raises(MoQError, match=r"^layout gemma"):
        deliver(made(make, config), tmp_path / "out", SaveOptions(), None, "gemma")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_quantized(made(bert, config_of(3, quantize_embeddings=4)), tmp_path / "out", layout="gemma")


def test_damage_is_noticed_and_codes_are_of_the_bits_that_the_state_declares(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in (
        "bert.pooler.dense.weight",
        "bert.pooler.dense.weight_scale",
        "bert.pooler.dense.input_activation_scale",
        "bert.embeddings.word_embeddings.embedding_quantized",
    ):
        save_file({**tensors, name: tensors[name] + 1}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(MoQError, match=f"tensor {re.escape(name)} is damaged"):
            verify_quantized(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "moq_state.json").read_text())
    document["layers"]["bert.pooler.dense"]["bits"] = 2
    write_state(folder, document)
    with pytest.raises(MoQError, match=r"bert\.pooler\.dense: codes beyond 1 at 2 bits"):
        verify_quantized(folder)


def test_no_server_takes_it_and_nothing_is_exported(folder: Path, tmp_path: Path) -> None:
    first, *others = served_by(folder)
    assert first.answer == "yes" and "from 5.23 on" in first.notes[0]
    assert {verdict.answer for verdict in others} == {"no"}
    told = {verdict.server.key: " ".join(verdict.reasons) for verdict in others}
    # No layout helps a class that they do not have.
    assert "drops the pooler" in told.pop("llama.cpp") and "is not exported" in told.pop("mlx")
    assert all("quant_method gemma" in reasons for reasons in told.values())
    card = (folder / "README.md").read_text()
    assert "format `gemma`" in card and "compressed-tensors" not in card
    loaded = hf.BertForSequenceClassification.from_pretrained(folder)
    for refused in (lambda: export_floats(folder, tmp_path / "floats"), lambda: dequantize_model(loaded)):
        with pytest.raises(MoQError, match="a model in the layout gemma can only answer"):
            refused()
    with pytest.raises(MoQError, match="comes from a packed checkpoint"):
        quantize_model(loaded, config_of())
