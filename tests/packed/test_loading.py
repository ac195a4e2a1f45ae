"""The code in the card is what the proof has run: a reader who runs it gets the answers that were evaluated."""

import itertools
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from long_tests import long_but_for
from model_zoo import arguments, inputs_of, new_model, rows_of
from sentences import encoder
from stranger import outputs_of
from torch import nn

from moq_hf import MoQCallback, quantize_model, save_quantized, verify_quantized
from moq_hf.packed.load_check import Proof

CAUSAL = "causal LM"
LAYERS = {"quantize_bits": {"target_bits": 4}}
TABLES = {**LAYERS, "quantize_embeddings": 8}
HALF = torch.bfloat16
# Rotary embeddings and routers keep buffers in float32, T5 keeps a layer so in float16.
SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE = hf.Qwen3MoeConfig(
    **SIZES, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8
)
NEOX = hf.GPTNeoXConfig(**SIZES, intermediate_size=64)


def model_of(name: str, way: str, folder: Path, dtype: torch.dtype = HALF) -> Any:
    """A model in half precision: made by `from_pretrained(dtype=)`, or by `.to`."""
    hf.set_seed(0)
    made = {"mixture": lambda: hf.Qwen3MoeForCausalLM(MIXTURE), "NeoX": lambda: hf.GPTNeoXForCausalLM(NEOX)}
    task = "sequence to sequence" if name == "T5" else "sequence classification" if name == "BERT" else CAUSAL
    model = made[name]() if name in made else new_model(name, task)
    if way == "to":
        return model.to(dtype)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype)


def batch_of(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    if name in ("T5", "BERT"):
        return inputs_of("sequence to sequence" if name == "T5" else "sequence classification", model)
    # Angles differ in half precision far from the beginning.
    ids = torch.randint(3, 60, (2, 300), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids % 60}


def as_the_card_says(folder: Path, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What running the card's code leaves, in a process that knows nothing else of the model."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", card, re.S)
    left: dict[str, Any] = {"inputs": inputs}
    exec(code[1].replace("path/to/this/folder", str(folder)), left)
    return left


def check_card(folder: Path, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """What the card's code loads gives the answers of the model in memory."""
    loaded = as_the_card_says(folder, batch)["model"]
    assert all(map(torch.equal, outputs_of(loaded, batch), outputs_of(model, batch)))
    return loaded


def check_autocast(folder: Path, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same under autocast, which the card's code says."""
    left = as_the_card_says(folder, batch)
    with torch.autocast("cpu", dtype=HALF):
        expected = model.eval()(**batch).logits
    assert torch.equal(left["outputs"].logits, expected)
    return left


def proof_of(folder: Path) -> Proof:
    return verify_quantized(folder).proof


@pytest.mark.parametrize(
    ("name", "way", "has_tables"),
    long_but_for(
        {
            ("Llama", "to", False),
            ("mixture", "to", True),
            ("NeoX", "dtype", True),
            ("T5", "dtype", False),
            ("BERT", "dtype", True),
            ("BERT", "to", False),
        },
        itertools.product(["Llama", "mixture", "NeoX", "T5", "BERT"], ["dtype", "to"], [False, True]),
    ),
)
def test_the_code_in_the_card_gives_what_was_evaluated(name: str, way: str, has_tables: bool, tmp_path: Path) -> None:
    config = TABLES if has_tables else LAYERS
    dtype = torch.float16 if name in ("T5", "NeoX") else HALF
    model = quantize_model(model_of(name, way, tmp_path / "float", dtype), config).eval()
    batch = batch_of(name, model)
    save_quantized(model, tmp_path / "packed", inputs=batch)
    assert proof_of(tmp_path / "packed").agrees
    check_card(tmp_path / "packed", model, batch)


def test_what_is_unpacked_while_loading_needs_no_cast(tmp_path: Path) -> None:
    model = quantize_model(model_of("Llama", "dtype", tmp_path / "float"), LAYERS)
    save_quantized(model, tmp_path / "packed", inputs=batch_of("Llama", model))
    found = verify_quantized(tmp_path / "packed")
    assert found.state["layout"] == "unpacked" and proof_of(tmp_path / "packed").dtype is None
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert loaded.dtype == HALF and loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_folder_that_nothing_proves_says_how_to_cast_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(quantize_model(model_of("BERT", "to", tmp_path), TABLES), tmp_path)
    assert "loads in float32, and the weights are bfloat16 in memory: cast the loaded model" in caplog.text


def test_parameters_of_several_dtypes_are_cast_in_part(tmp_path: Path) -> None:
    """`from_pretrained` gives a model one dtype; autocast lets this one compute."""
    task = "sequence classification"
    model = new_model("BERT", task).to(HALF)
    model.classifier.float()
    callbacks = [MoQCallback(LAYERS)]
    hf.Trainer(model, arguments(tmp_path, bf16=True), train_dataset=rows_of(task), callbacks=callbacks).train()
    folder = tmp_path / "quantized"
    assert "loaded with plain transformers and cast in part to bfloat16" in str(proof_of(folder))
    assert verify_quantized(folder).state["layout"] == "packed"
    batch = inputs_of(task, model)
    assert check_autocast(folder, model, batch)["kept"] == ["classifier.weight", "classifier.bias"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_experts_under_adapters_in_half_precision_are_packed(tmp_path: Path) -> None:
    """PEFT keeps its adapters in float32, and transformers unpacks experts to it."""
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of("mixture", "dtype", tmp_path / "float"), lora)
    quantize_model(model, LAYERS).eval()
    batch = batch_of("mixture", model)
    save_quantized(model, tmp_path / "packed", inputs=batch)
    found = verify_quantized(tmp_path / "packed")
    assert found.state["layout"] == "unpacked" and found.proof.agrees
    check_card(tmp_path / "packed", model, batch)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_loss_of_adalora_has_a_term_that_only_training_computes(tmp_path: Path) -> None:
    lora = peft.AdaLoraConfig(total_step=6, tinit=1, tfinal=1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(new_model("Llama", CAUSAL), lora)
    quantize_model(model, LAYERS).eval()
    ids = torch.arange(3, 19).view(2, 8)
    save_quantized(model, tmp_path, inputs={"input_ids": ids, "labels": ids})
    assert proof_of(tmp_path).agrees


def test_under_autocast_the_card_says_so(tmp_path: Path) -> None:
    model = new_model("Llama", CAUSAL)
    trainer = hf.Trainer(
        model, arguments(tmp_path, bf16=True), train_dataset=rows_of(CAUSAL), callbacks=[MoQCallback(LAYERS)]
    )
    trainer.train()
    assert "autocast to bfloat16)" in str(proof_of(tmp_path / "quantized"))
    check_autocast(tmp_path / "quantized", model, inputs_of(CAUSAL, model))


def test_attention_of_the_users_choice_is_in_the_line(tmp_path: Path) -> None:
    config = new_model("BERT", "sequence classification").config
    model = hf.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    batch = inputs_of("sequence classification", model)
    save_quantized(quantize_model(model, LAYERS), tmp_path, inputs=batch)
    assert check_card(tmp_path, model, batch).config._attn_implementation == "eager"


@pytest.mark.parametrize("way", ["dtype", "to"])
def test_sentence_transformers_in_half_precision(way: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    model = encoder(tmp_path / "float").to(HALF)
    quantize_model(model, LAYERS)
    batch = {"input_ids": torch.tensor([[2, 5, 7, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    save_quantized(model, tmp_path / "packed", inputs={"input": batch})
    assert proof_of(tmp_path / "packed").agrees
    loaded = as_the_card_says(tmp_path / "packed", batch)["model"]
    assert torch.equal(loaded.eval()(batch)["sentence_embedding"], model.eval()(batch)["sentence_embedding"])


# peft 0.21 asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["default", "second"])
def test_the_card_loads_the_adapter_that_answers(name: str, tmp_path: Path) -> None:
    base = model_of("Llama", "dtype", tmp_path / "float")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora, adapter_name=name)
    trainer = hf.Trainer(model, arguments(tmp_path), train_dataset=rows_of(CAUSAL), callbacks=[MoQCallback(LAYERS)])
    trainer.train()
    batch = inputs_of(CAUSAL, model)
    assert isinstance(check_card(tmp_path / "quantized", model, batch), peft.PeftModel)


@pytest.mark.parametrize("config", [LAYERS, "w4"])
def test_a_model_in_float64_loads_in_float64(config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("BERT", "to", tmp_path, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            # As training leaves them: no numbers of float32.
            parameter.mul_(1 + torch.rand_like(parameter) / 100)
    save_quantized(quantize_model(model, config), tmp_path)
    assert caplog.text == ""
    batch = batch_of("BERT", model)
    loaded = as_the_card_says(tmp_path, batch)["model"]
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)
