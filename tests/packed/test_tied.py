"""One table that is embedding and output head: quantized once, stored once, loaded by plain transformers."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from long_tests import long_but_for
from model_zoo import Stranger
from safetensors.torch import load_file
from stranger import outputs_of, tied_weights
from tables import quant_embeddings
from torch import nn
from transformers import Trainer, set_seed

from moq_hf import MoQCallback, dequantize_model, quantize_model, save_quantized, verify_quantized
from moq_hf.config import MoQConfig
from moq_hf.errors import MoQError
from moq_hf.export.floats import export_floats
from moq_hf.model.convert import quant_layers
from moq_hf.packed.pack import pack_checkpoint
from moq_hf.packed.reading import stored_weights
from moq_hf.packed.save import SaveOptions, _Saving
from moq_hf.training.controller import MoQController

WORDS = 96
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
BOTH = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
}  # fmt: skip

FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "Llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **HEADS, **ENDS)), "model.embed_tokens"),
    "Gemma3": (
        lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, **HEADS, **ENDS, head_dim=8)), "model.embed_tokens",
    ),
    "GPT-2": (
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, n_positions=32, **ENDS)
        ),
        "transformer.wte",
    ),
    "BERT": (
        lambda: t.BertForMaskedLM(t.BertConfig(**SIZES, num_attention_heads=4, max_position_embeddings=32)),
        "bert.embeddings.word_embeddings",
    ),
    "T5": (
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
            )
        ),
        "shared",
    ),
    "BART": (lambda: t.BartForConditionalGeneration(t.BartConfig(**BOTH, **ENDS)), "model.shared"),
}  # fmt: skip


def made(family: str) -> Any:
    set_seed(0)
    return FAMILIES[family][0]().eval()


def config_of(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": bits, "target_bits": bits}, **more}


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, "decoder_input_ids": ids[:, :4]} if model.config.is_encoder_decoder else batch


def loads(model: Any, folder: Path, stranger: Stranger) -> dict[str, Any]:
    """What another process makes of the folder, with the words that it says."""
    return stranger.load(folder, model, batch_of(model), generate=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_is_quantized_once_and_stored_once_at_its_bits(family: str, tmp_path: Path, stranger: Stranger) -> None:
    model, name = made(family), FAMILIES[family][1]
    before = tied_weights(model)
    quantize_model(model, config_of(quantize_embeddings=4))
    table = model.get_submodule(name)
    sharing = [m for m in model.modules() if m._parameters.get("weight") is table.float_weight]
    assert len(sharing) == (4 if family in ("T5", "BART") else 2)
    assert {id(module.moq) for module in sharing} == {id(table.moq)} and tied_weights(model) == before
    save_quantized(model, tmp_path)
    found = verify_quantized(tmp_path, model)
    layer = found.layers[name]
    assert found.state["layout"] == "unpacked" and layer.stored == "packed" and layer.bits == 4
    assert {model.get_submodule(other) for other in layer.tied} == {*sharing} - {table}
    assert layer.bytes == WORDS * (32 // 2 + 4) + 16
    assert not any(tensor.startswith(layer.tied) for tensor in load_file(tmp_path / "model.safetensors"))
    assert loads(model, tmp_path, stranger) == {"equal": True, "tied": before}
    base = t.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base.get_input_embeddings().weight, table.quantized_weight())
    # The first row may be that of padding, all zeros.
    scale = table.float_weight[1:].abs().amax(1, keepdim=True) / 7
    assert torch.equal(stored_weights(tmp_path)[name].scale[1:], scale)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "BERT"])
def test_a_table_of_more_bits_than_the_layers_is_stored_once_in_bytes(
    family: str, tmp_path: Path, stranger: Stranger
) -> None:
    model, name = made(family), FAMILIES[family][1]
    before = tied_weights(model)
    quantize_model(model, config_of(quantize_embeddings=8))
    save_quantized(model, tmp_path, inputs=batch_of(model))
    found = verify_quantized(tmp_path, model)
    [head] = found.layers[name].tied
    tensors = load_file(tmp_path / "model.safetensors")
    assert found.state["layout"] == "packed" and found.proof.agrees
    assert tensors[f"{name}.weight"].dtype == torch.int8 and f"{head}.weight" not in tensors
    assert torch.equal(tensors[f"{head}.weight_scale"], tensors[f"{name}.weight_scale"])
    assert found.layers[name].bytes == WORDS * (32 + 4 + 4)
    # Each is unpacked by itself; what goes on from there is tied again.
    assert loads(model, tmp_path, stranger)["equal"] is True
    inputs = batch_of(model)
    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    # The scale of Gemma's table is a buffer, which compressed-tensors makes a parameter of.
    assert not any(told.values())
    verify_quantized(tmp_path, loaded)
    again = dequantize_model(loaded)
    assert [names for names in tied_weights(again) if not names[0].endswith("scale")] == before
    assert all(map(torch.equal, outputs_of(again, inputs), outputs_of(model, inputs)))


GRIDS = {
    "rows": {},
    "row blocks": {"quantize_groups": 4},
    "groups": {"quantize_group_size": 16},
    "asymmetric": {"quantize_group_size": 16, "quantize_type": "asymmetric"},
    "in another place": {"quantize_groups": 4, "quantize_type": "asymmetric"},
}


@pytest.mark.parametrize(
    ("layout", "grid"),
    [
        *(("packed", grid) for grid in GRIDS),
        *(("unpacked", grid) for grid in ("groups", "asymmetric", "in another place")),
        ("floats", "rows"),
        ("floats", "asymmetric"),
    ],
)
def test_a_head_that_is_quantized_with_the_layers_takes_the_table_along(grid: str, layout: Any, tmp_path: Path) -> None:
    model = quantize_model(made("Llama"), config_of(quantize_heads=True, **GRIDS[grid]))
    assert list(quant_embeddings(model)) == ["model.embed_tokens"] and "lm_head" in quant_layers(model)
    assert model.model.embed_tokens.moq is model.lm_head.moq and model.lm_head.moq.grid.symmetric == (
        "quantize_type" not in GRIDS[grid]
    )
    save_quantized(model, tmp_path, layout=layout)
    found = verify_quantized(tmp_path, model).layers["model.embed_tokens"]
    assert (
        found.tied == ("lm_head",)
        and found.stored == {"packed": "int8", "unpacked": "packed", "floats": "dense"}[layout]
    )
    loaded = t.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, outputs_of(loaded, batch_of(model)), outputs_of(model, batch_of(model))))


@pytest.mark.parametrize("grid", ["groups", "asymmetric"])
def test_a_table_takes_the_scheme_of_the_layers_in_the_files(grid: str, tmp_path: Path) -> None:
    model = quantize_model(made("BERT"), config_of(quantize_embeddings=3, **GRIDS[grid]))
    save_quantized(model, tmp_path, inputs=batch_of(model))
    found = verify_quantized(tmp_path, model)
    layers = {name.rpartition(".")[2]: layer for name, layer in found.layers.items()}
    assert found.proof.agrees and found.state["layout"] == "unpacked"
    assert layers["word_embeddings"].stored == layers["position_embeddings"].stored == "packed"
    # Groups as in linear layers, all codes, symmetric.
    table = layers["word_embeddings"]
    assert table.scales == (WORDS, 2) and table.bits == 3 and table.full and table.symmetric
    # Two rows of zero points are one word, which compressed-tensors cannot read back.
    assert layers["token_type_embeddings"].stored == ("packed" if grid == "groups" else "dense")
    assert stored_weights(tmp_path)["bert.embeddings.word_embeddings"].zero_point is None
    # At 8 bits a row has one scale, which the files repeat for each group.
    model = quantize_model(made("BERT"), config_of(quantize_embeddings=8, **GRIDS[grid]))
    save_quantized(model, tmp_path / "rows", layout="unpacked")
    table = verify_quantized(tmp_path / "rows", model).layers["bert.embeddings.word_embeddings"]
    assert table.scales == (WORDS, 1) and table.stored == "packed"


def test_tables_stay_floats_where_they_would_widen_the_layers(tmp_path: Path) -> None:
    model = t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=8, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )
    save_quantized(quantize_model(model, config_of(2, quantize_embeddings=8)), tmp_path)
    assert {layer.stored for layer in verify_quantized(tmp_path).layers.values() if layer.kind == "embedding"} == {
        "dense"
    }


@pytest.mark.parametrize("bits", [4, 8])
def test_sizes_in_training_are_those_of_the_files(bits: int, tmp_path: Path) -> None:
    controller = MoQController(
        made("Llama"), MoQConfig.from_dict(config_of(quantize_embeddings=bits, quantize_groups="per_channel")), 9
    )
    for _ in range(101):
        controller.step()
    assert list(controller.embeddings) == ["model.embed_tokens"] and "lm_head" not in controller.layers
    assert "lm_head shares the weight of model.embed_tokens" in controller.summary()
    assert "lm_head" not in controller.inventory.left_out
    save_quantized(controller.model, tmp_path, controller=controller)
    tensors = load_file(tmp_path / "model.safetensors")
    # Shapes of packed weights, and the head's copy of the scales, are not counted.
    size = sum(v.nbytes for name, v in tensors.items() if "shape" not in name and name != "lm_head.weight_scale")
    assert controller.sizes.mb == pytest.approx(size / 1e6, rel=1e-6)


def test_training_quantizes_the_table_once_a_step_and_resumes(tmp_path: Path) -> None:
    config = {
        **config_of(6), "quantize_bits": {"start_bits": 6, "target_bits": 4}, "quantize_heads": True,
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
        "quantize_algo": {"rounding": "stochastic"},
    }  # fmt: skip
    ids = torch.randint(3, WORDS, (16, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def run(resume: str | None = None) -> Any:
        arguments = t.TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=6, per_device_train_batch_size=4, save_steps=3,
            learning_rate=1e-2, use_cpu=True, disable_tqdm=True, report_to=[],
        )  # fmt: skip
        trainer = Trainer(made("Llama"), arguments, train_dataset=data, callbacks=[MoQCallback(config)])
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    model = run()
    table, head = model.model.embed_tokens, model.lm_head
    assert table.moq is head.moq and table.moq.seed.step == 6 and table.float_weight is head.float_weight
    assert torch.equal(table.quantized_weight(), head.quantized_weight()) and table.moq.bits == 4
    assert not torch.equal(table.float_weight, made("Llama").lm_head.weight)
    found = verify_quantized(tmp_path / "run" / "quantized", model)
    assert found.proof.agrees
    card = (tmp_path / "run" / "quantized" / "README.md").read_text()
    assert "- `lm_head`: the weight of `model.embed_tokens`, which is stored once." in card
    again = run(str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(again.lm_head.float_weight, head.float_weight)


@pytest.mark.parametrize(("family", "table"), [("BERT", None), ("Llama", 4), ("GPT-2", None)])
def test_under_bf16_table_and_head_are_delivered_as_evaluated(family: str, table: int | None, tmp_path: Path) -> None:
    config = config_of(quantize_heads=True, quantize_embeddings=table)
    arguments = t.TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=1e-2, bf16=True, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    ids = torch.randint(3, WORDS, (16, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    callback = MoQCallback(config)
    Trainer(made(family), arguments, train_dataset=data, callbacks=[callback]).train()
    proof = callback.delivered.proof
    assert (proof.agrees, proof.largest_difference, proof.dtype) == (True, 0.0, None)
    assert verify_quantized(tmp_path / "quantized").state["layout"] == "unpacked"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quantize_embeddings": 8, "modules_to_not_convert": ["lm_head"]}, "lm_head.weight, which modules_to_not_con"),
        (
            {"modules_to_not_convert": ["embed_tokens"], "quantize_heads": True},
            "embed_tokens.weight, which modules_to_not_convert names",
        ),
    ],
)
def test_what_cannot_be_shared_is_told_before_training(config: dict[str, Any], match: str) -> None:
    with pytest.raises(MoQError, match=f"is also .*{match}.*a shared weight is quantized for all that use it"):
        quantize_model(made("Llama"), config_of(**config))
    both = config_of(quantize_embeddings=8, modules_to_not_convert=["lm_head", "embed_tokens"])
    with pytest.raises(MoQError, match="no embedding table that can be quantized"):
        quantize_model(made("Llama"), both)


def test_a_weight_that_something_else_holds_is_told() -> None:
    model = made("Llama")
    model.model.norm.table = model.lm_head.weight
    with pytest.raises(MoQError, match=r"is also model.norm.table, of a LlamaRMSNorm: a shared weight"):
        quantize_model(model, config_of(quantize_embeddings=8))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_beside_a_tied_table(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made("Llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    quantize_model(model, config_of(quantize_embeddings=4))
    base = model.get_base_model()
    assert base.lm_head.moq is base.model.embed_tokens.moq
    save_quantized(model, tmp_path)
    assert verify_quantized(tmp_path, model).layers["model.embed_tokens"].tied == ("lm_head",)
    loaded = peft.PeftModel.from_pretrained(t.LlamaForCausalLM.from_pretrained(tmp_path), str(tmp_path / "adapter"))
    assert torch.equal(loaded(**batch_of(base)).logits, model(**batch_of(base)).logits)


def test_a_model_whose_table_alone_is_quantized_is_saved(tmp_path: Path, stranger: Stranger) -> None:
    """Falcon's linear layers have a forward pass of their own; its head is an `nn.Linear`, and its table."""
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = t.FalconForCausalLM(t.FalconConfig(**sizes, **ENDS)).eval()
    quantize_model(model, config_of(quantize_heads=True))
    save_quantized(model, tmp_path)
    assert loads(model, tmp_path, stranger)["equal"]
    card = (tmp_path / "README.md").read_text()
    assert "(moq_hf): the weights of its embedding tables were quantized to 4 bits" in card
    assert "quantization-aware-training" not in card


PICTURES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
OTHERS: dict[str, Callable[[], Any]] = {
    # It scales what its head takes where the config ties it, so that no other config is its own.
    "Switch": lambda: t.SwitchTransformersForConditionalGeneration(
        t.SwitchTransformersConfig(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_heads=4, num_experts=2,
            decoder_start_token_id=0,
        )
    ),
    "Llava": lambda: t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=t.LlamaConfig(**SIZES, **HEADS, **ENDS),
            vision_config=t.CLIPVisionConfig(**PICTURES, intermediate_size=64),
            image_token_index=2, tie_word_embeddings=True,
        )
    ),
}  # fmt: skip


def untied(family: str) -> Any:
    """A model whose config ties the head, which has a weight of its own by now."""
    set_seed(0)
    model = (OTHERS[family] if family in OTHERS else FAMILIES[family][0])().eval()
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(1.5 * head.weight.detach())
    return model


def says_tied(folder: Path) -> list[bool]:
    """What `config.json` says of the model and of its parts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = [config, config.get("text_config", {})]
    return [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]


CODES = {"quantize_heads": True, "quantize_embeddings": 4}


@pytest.mark.parametrize(
    ("family", "is_quantized"),
    long_but_for(
        {("Llama", True), ("T5", False), ("Switch", True), ("Llava", False)},
        itertools.product([*FAMILIES, *OTHERS], [False, True]),
    ),
)
def test_a_config_does_not_tie_what_the_files_hold_twice(
    family: str, is_quantized: bool, tmp_path: Path, stranger: Stranger
) -> None:
    model = quantize_model(untied(family), config_of(**(CODES if is_quantized else {})))
    before = model.config.tie_word_embeddings
    save_quantized(model, tmp_path / "saved", inputs=batch_of(model))
    proof = verify_quantized(tmp_path / "saved", model).proof
    assert proof.agrees and before and model.config.tie_word_embeddings
    assert set(says_tied(tmp_path / "saved")) == {family == "Switch"}
    assert loads(model, tmp_path / "saved", stranger)["equal"] is True
    out = export_floats(tmp_path / "saved", tmp_path / "floats")
    assert set(says_tied(out)) == {family == "Switch"}
    exported = type(model).from_pretrained(out)
    expected = outputs_of(model, batch_of(model))
    torch.testing.assert_close(outputs_of(exported, batch_of(model)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["packed", "unpacked", "floats", "gemma"])
def test_every_layout_says_that_nothing_is_tied(layout: Any, tmp_path: Path) -> None:
    model = quantize_model(untied("Llama"), config_of(quantize_heads=True, quantize_embeddings=8))
    save_quantized(model, tmp_path, inputs=batch_of(model), layout=layout)
    proof = verify_quantized(tmp_path, model).proof
    assert proof.agrees and says_tied(tmp_path) == [False]


@pytest.mark.parametrize("family", ["Llama", "BERT", "BART"])
def test_what_is_one_in_memory_and_not_tied_by_the_config_is_stored_twice(
    family: str, tmp_path: Path, stranger: Stranger
) -> None:
    set_seed(0)
    cls = type(made(family))
    model = cls(cls.config_class.from_dict({**made(family).config.to_dict(), "tie_word_embeddings": False})).eval()
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    quantize_model(model, config_of())
    save_quantized(model, tmp_path, inputs=batch_of(model))
    proof = verify_quantized(tmp_path, model).proof
    assert proof.agrees and says_tied(tmp_path) == [False]
    assert loads(model, tmp_path, stranger)["equal"] is True


@pytest.mark.parametrize("family", ["Llama", "T5"])
def test_a_checkpoint_of_two_tables_is_packed_and_saved_by_hand_as_two(family: str, tmp_path: Path) -> None:
    ids = torch.randint(3, WORDS, (16, 8), generator=torch.Generator().manual_seed(1))
    arguments = t.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, learning_rate=1e-2, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    data = [{"input_ids": row, "labels": row} for row in ids]
    model = untied(family)
    Trainer(model, arguments, train_dataset=data, callbacks=[MoQCallback(config_of())]).train()
    pack_checkpoint(tmp_path / "checkpoint-2", tmp_path / "packed")
    _Saving(model, tmp_path / "hand", SaveOptions()).save_by_hand("for the test")
    expected = outputs_of(model, batch_of(model))
    for folder in ("quantized", "packed", "hand"):
        assert says_tied(tmp_path / folder) == [False]
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert all(map(torch.equal, outputs_of(loaded, batch_of(model)), expected))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("family", "adapted", "own"), [("Llama", "q_proj", "lm_head"), ("BERT", "query", "decoder")])
def test_a_head_that_merged_lora_has_trained_as_a_whole(family: str, adapted: str, own: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[adapted], modules_to_save=[own])
    model = quantize_model(peft.get_peft_model(made(family), config), {**config_of(), "lora": "merged"})
    with torch.no_grad():
        model.get_base_model().get_output_embeddings().modules_to_save["default"].weight.mul_(1.5)
    base = model.get_base_model()
    save_quantized(model, tmp_path, inputs=batch_of(base))
    found = verify_quantized(tmp_path)
    assert found.proof.agrees and found.state["layout"] == "packed"
    assert says_tied(tmp_path) == [False] and base.config.tie_word_embeddings
