"""Training on from a delivered folder, in each form, and models whose code lies in their folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_runs import CONFIG, arguments, assert_same, callback_of, new_model, rows, trained, weights
from torch import Tensor

from moq_hf import MoQCallback, MoQError, MoQTrainer, dequantize_model, quantize_model, save_quantized
from moq_hf.model.inventory import is_packed
from moq_hf.packed.pack import pack_checkpoint

W4 = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
IDS = torch.arange(5, 25).view(2, 10)
SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def resnet() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes))


def experts() -> Any:
    own = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(intermediate_size=32, num_key_value_heads=2, **SIZES, **own))


FORMS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "unpacked": (new_model, {}, "unpacked"),
    "tables": (new_model, {"quantize_embeddings": 8}, None),
    # All of it rounded floats.
    "convolutions": (resnet, {"quantize_convolutions": True}, None),
    "experts": (experts, {}, None),
}


def batch(model: Any) -> dict[str, Tensor]:
    if isinstance(model, hf.ResNetForImageClassification):
        pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pictures, "labels": torch.tensor([0, 1])}
    is_classifier = isinstance(model, hf.BertForSequenceClassification)
    return {"input_ids": IDS, "labels": torch.tensor([0, 1]) if is_classifier else IDS}


def further(model: Any, folder: Path, config: Any = None) -> hf.Trainer:
    """Trains a model on, in float or by a config."""
    data = [{name: tensor[row] for name, tensor in batch(model).items()} for row in (0, 1) * 4]
    callbacks = [] if config is None else [MoQCallback(config)]
    return trained(hf.Trainer(model, arguments(folder, max_steps=3), train_dataset=data, callbacks=callbacks))


def test_before_a_whole_pass_tables_answer_with_their_codes(tmp_path: Path) -> None:
    """What the guide's limits say of compressed-tensors, which unpacks in the first pass of the whole model."""
    model = quantize_model(experts(), {**W4, "quantize_embeddings": 8, "modules_to_not_convert": ["experts"]})
    save_quantized(model, tmp_path)
    for unpack in (lambda packed: packed(IDS), dequantize_model):
        packed = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert packed.get_input_embeddings()(IDS).dtype == torch.int8
        unpack(packed)
        vectors = packed.get_input_embeddings()(IDS)
        assert torch.equal(vectors, model.get_input_embeddings()(IDS))


def test_what_a_pass_in_inference_mode_unpacked_trains_on(tmp_path: Path) -> None:
    save_quantized(quantize_model(new_model(), W4), tmp_path, layout="packed")
    packed = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = packed(IDS).logits
        dequantize_model(packed)
    assert torch.equal(packed(IDS).logits, expected)
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    after = weights(further(packed, tmp_path / "on"))
    assert [name for name in after if torch.equal(after[name], before[name])] == []


def test_without_a_config_it_is_told_what_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantize_model(new_model(), W4)
    save_quantized(model, tmp_path / "packed")
    packed = hf.BertForSequenceClassification.from_pretrained(tmp_path / "packed")
    words = {
        "the model trains at the bits that it has": model,
        "the quantized weights of a packed checkpoint do not train": packed,
        "this MoQTrainer quantizes nothing": new_model(),
    }
    for text, given in words.items():
        caplog.clear()
        trained(MoQTrainer(given, arguments(tmp_path, max_steps=1), train_dataset=rows()))
        told = [record.message for record in caplog.records if "without moq_config" in record.message]
        assert len(told) == 1 and text in told[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_delivered_folder_trains_on_as_the_model_in_memory(form: str, tmp_path: Path) -> None:
    make, more, layout = FORMS[form]
    config = {**W4, **more}
    model = quantize_model(make(), config)
    save_quantized(model, tmp_path / "delivered", layout=layout)

    def loaded() -> Any:
        return type(model).from_pretrained(tmp_path / "delivered")

    if is_packed(loaded()):
        with pytest.raises(MoQError, match=r"call moq_hf.dequantize_model\(model\) before training"):
            further(loaded(), tmp_path, config)
    dequantize_model(model)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for kind in (None, config):
        again = loaded()
        if is_packed(again) and kind is not None:
            # Its first forward pass unpacks it.
            again(**batch(again))
        # Floats stay as they are.
        dequantize_model(again)
        model.load_state_dict(start)
        one, other = further(again, tmp_path / "one", kind), further(model, tmp_path / "other", kind)
        if form == "experts":
            # Their products round by where the weights lie in memory.
            torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=1e-6)
        else:
            assert_same(weights(one), weights(other))
        if kind is None:
            again.save_pretrained(tmp_path / "saved")
            saved = type(model).from_pretrained(tmp_path / "saved")
            assert_same(dict(saved.named_parameters()), weights(one))
            dequantize_model(quantize_model(model, config), weights="float")
        else:
            assert callback_of(one).delivered.proof.agrees


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_that_came_too_soon_stay_on_the_unpacked_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_quantized(quantize_model(new_model(), W4), tmp_path, layout="packed")
    assert "call `moq_hf.dequantize_model(model)` after loading" in (tmp_path / "README.md").read_text()
    packed = hf.BertForSequenceClassification.from_pretrained(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
    # What the card and the guide warn of.
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'"):
        peft.get_peft_model(packed, config)
    packed = hf.BertForSequenceClassification.from_pretrained(tmp_path)
    packed(IDS)
    adapted = peft.get_peft_model(packed, config).eval()
    expected = adapted(IDS).logits
    trained_before = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    with pytest.raises(MoQError, match=r"call moq_hf\.dequantize_model\(model\) before training"):
        quantize_model(adapted, W4)
    assert torch.equal(dequantize_model(adapted)(IDS).logits, expected)
    assert [name for name, parameter in adapted.named_parameters() if parameter.requires_grad] == trained_before
    quantize_model(adapted, W4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_train_on_a_folder_that_was_unpacked(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = quantize_model(new_model(), W4)
    save_quantized(model, tmp_path / "delivered")

    def loaded() -> Any:
        return dequantize_model(hf.BertForSequenceClassification.from_pretrained(tmp_path / "delivered"))

    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(loaded(), config)
    data = rows(8)
    trained(hf.Trainer(adapted, arguments(tmp_path, max_steps=2), train_dataset=data))
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded(), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, adapted.eval()(IDS).logits)


CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from .parts import Block


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnForSequenceClassification(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 2)
        self.post_init()

    def forward(self, input_ids=None, labels=None):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
"""
PARTS = """
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.dense(x).relu()
"""
OWN = {
    "model_type": "own",
    "architectures": ["OwnForSequenceClassification"],
    "auto_map": {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnForSequenceClassification",
    },
}


def test_a_model_with_code_of_its_own_trains_resumes_and_is_loaded_with_its_code(
    stranger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, text in {"modeling_own.py": CODE, "parts.py": PARTS, "config.json": json.dumps(OWN)}.items():
        (source / name).write_text(text)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = hf.AutoConfig.from_pretrained(source, trust_remote_code=True)
    hf.AutoModelForSequenceClassification.from_config(config, trust_remote_code=True).save_pretrained(source)

    def run(name: str) -> hf.Trainer:
        model = hf.AutoModelForSequenceClassification.from_pretrained(source, trust_remote_code=True)
        args = arguments(tmp_path / name, save_strategy="steps", save_steps=5)
        own = {**CONFIG, "quantize_groups": 2}
        return hf.Trainer(model, args, train_dataset=rows(), callbacks=[MoQCallback(own)])

    trainer = trained(run("run"))
    resumed = run("resumed")
    resumed.train(str(tmp_path / "run" / "checkpoint-5"))
    assert_same(weights(resumed), weights(trainer))
    folder, checkpoint = tmp_path / "run" / "quantized", tmp_path / "run" / "checkpoint-16"
    load = f'AutoModelForSequenceClassification.from_pretrained("{folder}", trust_remote_code=True)'
    assert f"Load it: {load}\n" in capsys.readouterr().out
    assert load.replace(str(folder), "path/to/this/folder") in (folder / "README.md").read_text()
    reply = stranger.load(folder, trainer.model, {"input_ids": IDS}, auto="AutoModelForSequenceClassification")
    assert reply == {"equal": True, "tied": []}
    with pytest.raises(MoQError, match=r"its own code .* resume its run from there"):
        pack_checkpoint(checkpoint, tmp_path / "packed")
    # What the error says to do.
    packed = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    run("run").train(str(checkpoint))
    assert (folder / "model.safetensors").read_bytes() == packed
