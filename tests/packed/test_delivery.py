"""What a run delivers is what was evaluated, and a run always delivers something."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from model_zoo import CONFIG, arguments, inputs_of, new_model, rows_of
from repo import ROOT
from safetensors.torch import load_file, save_file
from stranger import outputs_of
from torch import nn
from torch.nn.utils import prune
from transformers.modeling_outputs import SequenceClassifierOutput

from moq_hf import MoQCallback, MoQError, MoQTrainer, quantize_model, save_quantized, verify_quantized
from moq_hf.config import MoQConfig
from moq_hf.model.convert import quant_layers
from moq_hf.packed import save as checkpoint
from moq_hf.packed import state
from moq_hf.packed.load_check import ReferenceOutputs
from moq_hf.packed.save import SaveOptions, _Saving

TASK = "sequence classification"
LOAD = "moq_hf.packed.load_check.ReferenceOutputs._load"
FIXED = {**CONFIG, "quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_schedule": {"schedule_offset": 0}}


def bert(kind: type[hf.PreTrainedModel] = hf.BertForSequenceClassification, *more: Any) -> Any:
    hf.set_seed(0)
    return kind(new_model("BERT", TASK).config, *more)


def train(model: nn.Module, folder: Path, kind: type[hf.Trainer] = hf.Trainer, **more: Any) -> hf.Trainer:
    moq = {"moq_config": CONFIG} if kind is MoQTrainer else {"callbacks": [MoQCallback(CONFIG)]}
    trainer = kind(model, arguments(folder, **more), train_dataset=rows_of(TASK), **moq)
    trainer.train()
    return trainer


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))
    return state


def test_the_proof_is_on_the_screen_in_the_state_and_in_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a MoQTrainer prints is in test_plan_in_training.py."""
    train(bert(), tmp_path)
    folder = tmp_path / "quantized"
    told = "Verified: loaded with plain transformers, the saved model gives identical outputs (4 examples)"
    out = capsys.readouterr()
    assert out.out.count(told) == 1
    # No progress bars of the libraries.
    assert not any(bar in out.err for bar in ("Compressing", "Loading weights", "Writing", "Decompressing"))
    proof = state_of(folder)["proof"]
    assert (proof["agrees"], proof["examples"], proof["largest_difference"]) == (True, 4, 0.0)
    assert told in (folder / "README.md").read_text(encoding="utf-8")
    assert str(verify_quantized(folder).proof) == told


def test_half_precision_is_proven_too(tmp_path: Path) -> None:
    """Of the whole model; autocast is in test_tied.py."""
    train(bert().to(torch.bfloat16), tmp_path)
    proof = state_of(tmp_path / "quantized")["proof"]
    assert (proof["agrees"], proof["largest_difference"], proof["dtype"]) == (True, 0.0, None)


@pytest.mark.parametrize("made_in_it", [True, False])
def test_what_it_takes_to_get_the_proven_answers_in_bfloat16(made_in_it: bool, tmp_path: Path) -> None:
    """`.to` also casts the angles of rotary embeddings, which a model that is loaded has in float32."""
    config = new_model("Llama", "causal LM").config
    half = torch.bfloat16
    make = hf.AutoModelForCausalLM.from_config
    model = make(config, dtype=half) if made_in_it else make(config).to(half)
    quantize_model(model, {**FIXED, "quantize_algo": {"scale_dtype": "bfloat16"}})
    batch = inputs_of("causal LM", model)
    save_quantized(model, tmp_path, inputs=batch)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == half
    if not made_in_it:
        assert "loaded with plain transformers and cast to bfloat16, " in str(verify_quantized(tmp_path).proof)
        loaded = loaded.to(half)
    assert all(map(torch.equal, outputs_of(loaded, batch), outputs_of(model, batch)))
    assert state_of(tmp_path)["proof"]["dtype"] == (None if made_in_it else "bfloat16")


def test_parts_of_a_model_may_have_attention_of_their_own(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    reader = hf.TrOCRConfig(vocab_size=40, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(image_size=16, patch_size=8, **shape), reader, decoder_start_token_id=1, pad_token_id=0
    )
    model = quantize_model(hf.VisionEncoderDecoderModel(config), {**FIXED, "quantize_groups": "per_channel"})
    assert model.config._attn_implementation != model.config.decoder._attn_implementation
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "decoder_input_ids": torch.randint(2, 40, (2, 5))}
    save_quantized(model, tmp_path, inputs=batch)
    assert state_of(tmp_path)["proof"]["agrees"] is True and state_of(tmp_path)["layout"] == "unpacked"


def test_a_model_that_generates_must_generate_the_same(tmp_path: Path) -> None:
    model = quantize_model(new_model("GPT-2", "causal LM"), {**FIXED, "quantize_groups": "per_channel"})
    save_quantized(model, tmp_path, inputs=inputs_of("causal LM", model))
    # Two prompts, four new tokens each.
    assert state_of(tmp_path)["proof"]["tokens"] == 8
    assert isinstance(model, hf.GPT2LMHeadModel)


def test_a_forward_pass_that_a_trainer_put_in_place_is_not_asked_of_the_folder(tmp_path: Path) -> None:
    """TRL's trainers call the model so."""

    class Fused(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs, fused=True)["loss"]

    model = new_model("Llama", "causal LM")
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, fused: bool = False, **kwargs: Any) -> Any:
        return {"loss": own(*args, **kwargs).loss} if fused else own(*args, **kwargs)

    model.forward = forward
    trainer = Fused(model, arguments(tmp_path), train_dataset=rows_of("causal LM"), callbacks=[MoQCallback(CONFIG)])
    trainer.train()
    state = state_of(tmp_path / "quantized")
    assert state["layout"] == "packed" and state["proof"]["agrees"] is True
    assert state["proof"]["examples"] == 4 and state["proof"]["tokens"]


def broken(monkeypatch: pytest.MonkeyPatch, *layouts: str) -> None:
    """Make the writing of these layouts leave another weight in the files, with matching digests."""
    real = _Saving._write_packed

    def writing(self: Any, encoder: Any, tensors: Any, folder: Path) -> None:
        real(self, encoder, tensors, folder)
        if encoder.layout in layouts:
            path = folder / "model.safetensors"
            stored = load_file(path)
            name = next(n for n in stored if "layer.1.output.dense.weight" in n and stored[n].is_floating_point())
            stored[name] = stored[name] * 2
            save_file(stored, path, metadata={"format": "pt"})

    monkeypatch.setattr(_Saving, "_write_packed", writing)


def test_a_layout_that_does_not_agree_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(bert(), FIXED)
    batch = inputs_of(TASK, model)
    broken(monkeypatch, "packed")
    save_quantized(model, tmp_path / "one", inputs=batch)
    assert state_of(tmp_path / "one")["layout"] == "unpacked" and state_of(tmp_path / "one")["proof"]["agrees"] is True
    assert "packed: outputs differ by" in caplog.text and "first in bert.encoder.layer.1.output.dense" in caplog.text
    broken(monkeypatch, "packed", "unpacked")
    save_quantized(model, tmp_path / "two", inputs=batch)
    assert state_of(tmp_path / "two")["layout"] == "floats" and state_of(tmp_path / "two")["proof"]["agrees"] is True
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path / "two")
    assert torch.equal(outputs_of(loaded, batch)[0], outputs_of(model, batch)[0])
    assert {layer.stored for layer in verify_quantized(tmp_path / "two", model).layers.values()} == {"dense"}


def test_where_nothing_agrees_the_warning_is_loud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(bert(), FIXED)
    monkeypatch.setattr("moq_hf.packed.load_check.modules_with_other_weights", lambda model, loaded: ["some.layer"])
    monkeypatch.setattr("moq_hf.packed.differences.distance", lambda one, other: 0.5)
    save_quantized(model, tmp_path, inputs=inputs_of(TASK, model))
    assert (
        "what is written does not compute what was evaluated: outputs differ by 0.5, first in some.layer" in caplog.text
    )
    assert state_of(tmp_path)["proof"]["agrees"] is False


def test_verify_quantized_compares_answers(tmp_path: Path) -> None:
    model = quantize_model(bert(), FIXED)
    batch = inputs_of(TASK, model)
    save_quantized(model, tmp_path)
    found = verify_quantized(tmp_path, model, inputs=batch)
    assert found.proof is not None and found.proof.agrees and found.proof.examples == 4
    with pytest.raises(MoQError, match="give the model too"):
        verify_quantized(tmp_path, inputs=batch)
    # Nothing that the digests know: the file is as it was, but the model computes something else.
    handle = model.classifier.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(MoQError, match="NOT what was evaluated: outputs differ by 1, though all weights are equal"):
        verify_quantized(tmp_path, model, inputs=batch)
    handle.remove()


def test_what_cannot_be_proven_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize_model(bert(), FIXED)
    batch = inputs_of(TASK, model)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for place, found in (("moq_hf.packed.load_check._fits", lambda size, device: False), (LOAD, full)):
        with monkeypatch.context() as patch:
            patch.setattr(place, found)
            save_quantized(model, tmp_path, inputs=batch)
        # Want of memory is no disagreement.
        assert "does not fit beside it" in str(verify_quantized(tmp_path).proof)
        assert state_of(tmp_path)["layout"] == "packed" and state_of(tmp_path)["proof"]["agrees"] is None
    proof = ReferenceOutputs(model, {"pixel_values": torch.zeros(1)}).prove(tmp_path)
    assert proof.agrees is None and "cannot evaluate a batch (" in str(proof)


class Weighted(hf.BertForSequenceClassification):
    """Takes more than a config."""

    def __init__(self, config: hf.BertConfig, class_weights: torch.Tensor) -> None:
        super().__init__(config)
        self.class_weights = class_weights


class Inside(hf.PreTrainedModel):
    """Loads another model in its constructor."""

    config_class = hf.BertConfig
    _supports_sdpa = True
    folder = ""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.bert = hf.AutoModel.from_pretrained(self.folder)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.classifier(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def weighted(folder: Path) -> Any:
    return bert(Weighted, torch.ones(2))


def inside(folder: Path) -> Any:
    bert().bert.save_pretrained(folder / "base")
    Inside.folder = str(folder / "base")
    return bert(Inside)


class Unsaved(hf.BertForSequenceClassification):
    """Cannot be saved as models of transformers are."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no folder is good enough")


def unsaved(folder: Path) -> Any:
    return bert(Unsaved)


@pytest.mark.parametrize(
    ("make", "reason", "kind"),
    [
        (weighted, "missing 1 required positional argument: 'class_weights'", hf.Trainer),
        (inside, "from_pretrained", MoQTrainer),
        (unsaved, "no folder is good enough", hf.Trainer),
    ],
)
def test_a_run_always_ends_with_a_result(
    make: Any, reason: str, kind: type[hf.Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(tmp_path)
    train(model, tmp_path / "run", kind)
    folder = tmp_path / "run" / "quantized"
    state = state_of(folder)
    assert state["layout"] == "floats" and reason in state["reason"]
    told = [record.getMessage() for record in caplog.records if "holds rounded floats" in record.getMessage()]
    assert len(told) == 1 and reason in told[0]
    verify_quantized(folder, model)
    # On the grid: what the model computes with.
    other = make(tmp_path)
    other.load_state_dict(load_file(folder / "model.safetensors"))
    batch = inputs_of(TASK, model)
    assert torch.equal(outputs_of(other, batch)[0], outputs_of(model, batch)[0])
    assert "load_state_dict" in (folder / "README.md").read_text(encoding="utf-8")


def test_one_tensor_of_two_names_is_stored_under_both(tmp_path: Path) -> None:
    model = bert()
    model.alias = model.classifier.weight
    train(model, tmp_path / "run", hf.Trainer)
    state = state_of(tmp_path / "run" / "quantized")
    assert state["layout"] == "packed" and state["proof"]["agrees"] is True
    tensors = load_file(tmp_path / "run" / "quantized" / "model.safetensors")
    assert torch.equal(tensors["alias"], tensors["classifier.weight"])


@pytest.mark.parametrize("again", ["stock", "same callback", "another callback", "moq"])
def test_a_second_trainer_evaluates_what_was_delivered(
    again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, callback = bert(), MoQCallback(CONFIG)
    data: Any = rows_of(TASK)
    first = hf.Trainer(model, arguments(tmp_path), train_dataset=data, eval_dataset=data, callbacks=[callback])
    first.train()
    loss = first.evaluate()["eval_loss"]
    more: dict[str, Any] = {
        "stock": {}, "same callback": {"callbacks": [callback]}, "moq": {"moq_config": CONFIG},
        "another callback": {"callbacks": [MoQCallback(CONFIG)]},
    }[again]  # fmt: skip
    kind = MoQTrainer if again == "moq" else hf.Trainer
    second = kind(model, arguments(tmp_path / "second"), train_dataset=data, eval_dataset=data, **more)
    assert second.evaluate()["eval_loss"] == loss == first.evaluate()["eval_loss"]
    assert {layer.moq.bits for layer in quant_layers(model).values()} == {4}
    if more:
        # A new run begins anew, from float.
        second.train()
        assert second.state.log_history[0]["moq/mean_bits"] > 4


def test_a_float_checkpoint_is_not_the_best_quantized_model(tmp_path: Path) -> None:
    often: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "learning_rate": 0.5,
    }  # fmt: skip
    data: Any = rows_of(TASK)
    hf.Trainer(bert(), arguments(tmp_path, **{**often, "max_steps": 4}), train_dataset=data, eval_dataset=data).train()
    model = bert()
    settings = arguments(tmp_path, **{**often, "max_steps": 8})
    trainer = hf.Trainer(model, settings, train_dataset=data, eval_dataset=data, callbacks=[MoQCallback(FIXED)])
    trainer.train(resume_from_checkpoint=True)
    best = trainer.state.best_model_checkpoint
    assert best is not None and int(best.rpartition("-")[2]) > 4
    verify_quantized(tmp_path / "quantized", model)


def test_the_path_of_a_teacher_stays_at_home(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "secret" / "teacher")
    config = {**CONFIG, "distillation": {"teacher": str(tmp_path / "secret" / "teacher")}}
    trainer = MoQTrainer(bert(), arguments(tmp_path / "run"), train_dataset=rows_of(TASK), moq_config=config)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    for name in ("README.md", "moq_state.json", "trainer_state.json"):
        assert "secret" not in (tmp_path / "run" / name).read_text(encoding="utf-8")
    assert state_of(tmp_path / "run")["config"]["distillation"]["teacher"] is None
    # A name on the Hub is everybody's.
    assert (
        state.shareable(MoQConfig.from_dict({**CONFIG, "distillation": {"teacher": "org/name"}}).to_dict())[
            "distillation"
        ]["teacher"]
        == "org/name"
    )


def test_save_quantized_writes_a_card_and_spares_another_one(tmp_path: Path) -> None:
    model = quantize_model(bert(), FIXED)
    save_quantized(model, tmp_path)
    assert "Quantized with Mixture-of-Quantization" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("Mixture-of-Quantization (moq_hf), of an earlier model", encoding="utf-8")
    save_quantized(model, tmp_path)
    # Its own card is written anew.
    assert "of an earlier model" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not (tmp_path / "moq_bits.png").exists()
    (tmp_path / "README.md").write_text("my own words", encoding="utf-8")
    save_quantized(model, tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "my own words"


class OwnHead(hf.BertForSequenceClassification):
    """A class that transformers does not know."""


@pytest.mark.parametrize(
    ("cls", "config", "module"),
    [
        (hf.T5EncoderModel, hf.T5Config(vocab_size=60, d_model=16, d_kv=8, num_layers=1, num_heads=2), "transformers"),
        (OwnHead, bert().config, "the_module_that_defines_it"),
    ],
)
def test_the_card_names_the_class_that_was_saved(cls: Any, config: Any, module: str, tmp_path: Path) -> None:
    save_quantized(quantize_model(cls(config), FIXED), tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"from {module} import {cls.__name__}\n" in card and f"\nmodel = {cls.__name__}.from_pretrained(" in card


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, r"inputs must hold tensors, as in tokenizer\(text, return_tensors=\"pt\"\): they are empty"),
        ({"input_ids": [[5, 6]]}, "inputs must hold tensors, .*: input_ids is a list"),
        ({"input_ids": np.ones((1, 4), int)}, "inputs must hold tensors, .*: input_ids is a ndarray"),
        ("hi there", r"inputs are texts, .*: tokenize them, as in inputs=\[tokenizer\(text, truncation=True, "),
        ([], "inputs hold no example"),
        (torch.ones(1, 4).long(), "inputs must be a batch .*; got Tensor"),
        ({"input_ids": torch.ones(1, 4).long(), "attention_mask": [[1] * 4]}, "cannot answer them .* with tensors"),
        (
            {"ids": torch.ones(1, 4).long()},
            r"inputs: the model cannot answer them \((TypeError|ValueError): .*\); give a",
        ),
    ],
)
def test_wrong_inputs_are_one_error_before_anything_is_written(inputs: Any, message: str, tmp_path: Path) -> None:
    model = quantize_model(bert(), FIXED)
    with pytest.raises(MoQError, match=message):
        save_quantized(model, tmp_path / "out", inputs=inputs)
    assert not (tmp_path / "out").exists()
    save_quantized(model, tmp_path / "out")
    with pytest.raises(MoQError, match=message):
        verify_quantized(tmp_path / "out", model, inputs=inputs)


def test_a_wrong_layout_is_one_error(tmp_path: Path) -> None:
    message = "layout must be one of None, packed, unpacked, floats, gemma, mxfp4, got 'dense'"
    with pytest.raises(MoQError, match=message):
        save_quantized(quantize_model(bert(), FIXED), tmp_path / "out", layout="dense")
    assert not (tmp_path / "out").exists()


def test_saving_ends_with_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = quantize_model(bert(), FIXED)
    capsys.readouterr()
    folder = tmp_path / "my model"
    assert save_quantized(model, folder, inputs=inputs_of(TASK, model)) == folder
    assert capsys.readouterr().out == (
        f"moq_hf: saved in {folder}. {verify_quantized(folder).summary()}\n"
        f'Load it: BertForSequenceClassification.from_pretrained("{folder}")\n'
    )
    assert "Verified: loaded with plain transformers" in verify_quantized(folder).summary()
    # The command needs its tokenizer.
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    save_quantized(model, folder, processing_class=tokenizer)
    assert capsys.readouterr().out == (
        f"moq_hf: saved in {folder}. Not verified: nothing was compared. {megabytes_of(folder)}\n"
        f'Load it: BertForSequenceClassification.from_pretrained("{folder}")\n'
        f"Deploy: moq-hf export '{folder}' --to onnx\n"
        "Prove it: save_quantized(..., inputs=batch) loads the files and compares their answers\n"
    )


def megabytes_of(folder: Path) -> str:
    return verify_quantized(folder).summary().partition("compared. ")[2]


@pytest.mark.parametrize(
    ("model", "config", "command"),
    [
        (
            ("Llama", "causal LM"),
            {"quantize_group_size": 32},
            "moq-hf export {} --to gguf --converter convert_hf_to_gguf.py",
        ),
        (("Llama", "causal LM"), {"quantize_group_size": 32, "serve": ["vllm"]}, "vllm serve {}"),
        # llama.cpp takes groups of 32, and no runtime GPT-2.
        (("Llama", "causal LM"), {"quantize_group_size": 16}, "vllm serve {}"),
        (("Llama", "causal LM"), {"serve": ["onnxruntime"]}, "moq-hf export {} --to onnx"),
        (("ViT", "image classification"), {}, "moq-hf export {} --to onnx"),
        (("GPT-2", "causal LM"), {}, None),
    ],
)
def test_the_command_to_deploy_is_one_that_takes_the_model(
    model: tuple[str, str], config: dict[str, Any], command: str | None, tmp_path: Path
) -> None:
    made = quantize_model(new_model(*model), {**FIXED, "quantize_groups": "per_channel", **config})
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    done = checkpoint.deliver(made, tmp_path, SaveOptions(tokenizer), None)
    assert done.deploy == (command and command.format(tmp_path))


def test_a_loss_reads_the_quantized_weight_and_differentiates_by_the_parameter(tmp_path: Path) -> None:
    name, grads = "bert.pooler.dense", []

    class Adaptive(hf.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            layer = quant_layers(model)[name]
            read = model.bert.pooler.dense.weight
            assert torch.equal(read, layer.quantized_weight()) and not torch.equal(read, layer.float_weight)
            outputs = super().compute_loss(model, inputs, *args, **kwargs)
            if model.training:
                weight = dict(model.named_parameters())[f"{name}.weight"]
                grads.append(torch.autograd.grad(outputs, weight, retain_graph=True)[0])
            return outputs

    class Spy(hf.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            assert torch.equal(dict(model.named_parameters())[f"{name}.weight"].grad, grads[-1])

    data: Any = rows_of(TASK)
    given = {"train_dataset": data, "eval_dataset": data, "callbacks": [MoQCallback(FIXED), Spy()]}
    trainer = Adaptive(bert(), arguments(tmp_path, max_steps=2, max_grad_norm=0), **given)
    trainer.train()
    trainer.evaluate()
    assert len(grads) == 2 and float(grads[0].abs().max()) > 0


def test_weights_that_another_callback_puts_in_at_the_end_are_delivered(tmp_path: Path) -> None:
    class Average(hf.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)

    callback = MoQCallback(FIXED)
    model = bert()
    given = {"train_dataset": rows_of(TASK), "callbacks": [callback, Average()]}
    trainer = hf.Trainer(model, arguments(tmp_path, max_steps=2), **given)
    for _ in range(2):
        trainer.train()
        assert callback.delivered is not None and callback.delivered.proof is not None
        assert callback.delivered.proof.agrees
        saved = hf.BertForSequenceClassification.from_pretrained(tmp_path / "quantized")
        assert torch.equal(saved.classifier.weight, model.classifier.weight)
    assert len(trainer.callback_handler.callbacks) == len({type(c) for c in trainer.callback_handler.callbacks})


def test_a_preset_takes_a_model_with_a_pruned_layer() -> None:
    model = bert()
    prune.l1_unstructured(model.bert.pooler.dense, "weight", 0.5)
    quantize_model(model, "w4")
    assert "bert.pooler.dense" not in quant_layers(model) and "bert.encoder.layer.0.output.dense" in quant_layers(model)


def test_a_pruned_layer_is_named_and_saved_once_pruning_is_permanent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Prune(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                prune.l1_unstructured(model.bert.pooler.dense, "weight", 0.5)

    settings = arguments(tmp_path, max_steps=2)
    trainer = MoQTrainer(bert(), settings, train_dataset=rows_of(TASK), moq_config=FIXED, callbacks=[Prune()])
    trainer.train()
    told = r"the weights of bert\.pooler\.dense are recomputed in each forward pass, .*prune\.remove"
    assert re.search(rf"nothing is delivered to .*: {told}", caplog.text)
    with pytest.raises(MoQError, match=told):
        trainer.save_model()
    with pytest.raises(MoQError, match=told):
        save_quantized(trainer.model, tmp_path / "by hand")
    prune.remove(trainer.model.bert.pooler.dense, "weight")
    trainer.save_model()
    saved = hf.BertForSequenceClassification.from_pretrained(tmp_path)
    batch = inputs_of(TASK, saved)
    assert all(map(torch.equal, outputs_of(saved, batch), outputs_of(trainer.model, batch)))
    assert float((saved.bert.pooler.dense.weight == 0).float().mean()) >= 0.5


def test_a_weight_that_is_used_past_its_layer_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Past(hf.BertForSequenceClassification):
        """Takes a weight from where nothing can see it."""

        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            weight = dict(self.named_parameters())["bert.pooler.dense.weight"]
            hidden = self.bert(*args, **kwargs).last_hidden_state[:, 0] @ weight.T
            logits = self.classifier(hidden)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits + 0 * out.logits)

    model = bert(Past)
    # Without the pooler's own call it is a weight whose layer nobody uses.
    model.bert.pooler.forward = lambda hidden: hidden[:, 0]
    with pytest.raises(MoQError, match=r'so not quantized: bert\.pooler\.dense; .* "bert\.pooler\.dense"'):
        train(model, tmp_path, remove_unused_columns=False)
    left = {**CONFIG, "modules_to_not_convert": ["bert.pooler.dense", "classifier"]}
    model = bert(Past)
    model.bert.pooler.forward = lambda hidden: hidden[:, 0]
    settings = arguments(tmp_path, remove_unused_columns=False)
    hf.Trainer(model, settings, train_dataset=rows_of(TASK), callbacks=[MoQCallback(left)]).train()


def test_quantizes_what_torch_compile_wraps(tmp_path: Path) -> None:
    model = bert()
    compiled: Any = torch.compile(model, backend="eager")
    assert quantize_model(compiled, FIXED) is compiled
    assert {layer.moq.bits for layer in quant_layers(model).values()} == {4}
    save_quantized(compiled, tmp_path)
    verify_quantized(tmp_path, model)
    torch._dynamo.reset()


class Odd(hf.BertForSequenceClassification):
    """Answers in evaluation with what a buffer, which no file has, makes of it."""

    answer = staticmethod(lambda logits: {"predictions": logits.argmax(-1)})

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("prior", torch.zeros(2), persistent=False)

    def _init_weights(self, module: torch.nn.Module) -> None:
        # Loading leaves a buffer that no file has as memory was.
        super()._init_weights(module)
        if module is self:
            self.prior.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out if self.training else self.answer(out.logits + self.prior)


def masked(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": torch.cat([logits, torch.full((len(logits), 1), torch.finfo(torch.float).min)], 1)}


@pytest.mark.parametrize("answer", [Odd.answer, masked])
def test_classes_and_masked_scores_are_compared_too(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "answer", staticmethod(answer))
    model = quantize_model(bert(Odd), FIXED)
    save_quantized(model, tmp_path, inputs=inputs_of(TASK, model))
    assert state_of(tmp_path)["proof"]["agrees"] is True
    with torch.no_grad():
        likely = int(hf.BertForSequenceClassification.forward(model, **inputs_of(TASK, model)).logits[0].argmax())
    model.prior[1 - likely] += 9.0
    with pytest.raises(MoQError, match="NOT what was evaluated: outputs differ by"):
        verify_quantized(tmp_path, model, inputs=inputs_of(TASK, model))


def test_nothing_to_compare_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "answer", staticmethod(lambda logits: {"text": "fine"}))
    model = quantize_model(bert(Odd), FIXED)
    save_quantized(model, tmp_path, inputs=inputs_of(TASK, model))
    assert str(verify_quantized(tmp_path).proof) == "Not verified: the model returns no tensor to compare"


def test_nothing_of_an_older_model_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize_model(bert(), FIXED)
    save_quantized(model, tmp_path)
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter/adapter_config.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))

    def failing(*args: Any, **kwargs: Any) -> None:
        raise MoQError("a reason with /home/somebody/a/path in it")

    monkeypatch.setattr(checkpoint._Saving, "save", failing)
    checkpoint.deliver(quantize_model(tower, FIXED), tmp_path, SaveOptions(), None)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"README.md", "model.safetensors", "moq_state.json", "notes.txt"}
    assert state_of(tmp_path)["reason"] == "a reason with ... in it"


class Broken:
    """A processor that stops in the middle of being saved."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates" / "one.jinja").write_text("one")
        (Path(folder) / "tokenizer.json").write_text('{"half')
        raise OSError("the other half is missing")


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (Broken(), "Broken (OSError: the other half is missing)"),
        (object(), "object (AttributeError: 'object' object has no attribute 'save_pretrained')"),
    ],
    ids=["half", "none"],
)
def test_a_processor_that_cannot_be_saved_is_a_warning(
    processor: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantize_model(bert(), FIXED)
    save_quantized(model, tmp_path / "one", inputs=inputs_of(TASK, model), processing_class=processor)
    assert state_of(tmp_path / "one")["layout"] == "packed" and state_of(tmp_path / "one")["proof"]["agrees"] is True
    _Saving(model, tmp_path / "two", SaveOptions(processor)).save_by_hand("for the test")
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert caplog.text.count(f"{folder}: not saved beside the weights: {why}") == 1
        names = {path.name for path in folder.iterdir()}
        assert names == {"README.md", "config.json", "model.safetensors", "moq_state.json"}


def test_a_generation_config_that_only_advice_is_given_of_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model("Llama", "causal LM")
    inputs = inputs_of("causal LM", model)
    quantize_model(model, FIXED)
    # Of no effect without sampling, so that `save_pretrained` refuses it.
    model.generation_config.temperature = 0.3
    save_quantized(model, tmp_path / "one", inputs=inputs)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert loaded.generation_config.temperature == 0.3 and "not saved" not in caplog.text
    # What loading would refuse too.
    model.generation_config.max_new_tokens = -1
    save_quantized(model, tmp_path / "two", inputs=inputs)
    assert "not saved beside the weights: GenerationConfig (ValueError: `max_new_tokens` must be" in caplog.text
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert state_of(folder)["layout"] == "packed" and state_of(folder)["proof"]["agrees"] is True
    assert not (tmp_path / "two" / "generation_config.json").exists() and model.can_generate()


def test_arguments_that_cannot_be_saved_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = train(bert(), tmp_path, MoQTrainer)
    trainer.args.own = lambda: None
    trainer.save_model(str(tmp_path / "saved"))
    assert state_of(tmp_path / "saved")["proof"]["agrees"] is True
    assert f"{tmp_path / 'saved'} has no training_args.bin: PicklingError" in caplog.text.replace(
        "AttributeError", "PicklingError"
    )
    assert not (tmp_path / "saved" / "training_args.bin").exists()
