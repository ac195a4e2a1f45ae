import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_zoo import new_model as zoo_model
from model_zoo import rows_of
from tiny_runs import (
    ARRIVAL,
    BLEND,
    CONFIG,
    CONFIGS,
    STOCHASTIC,
    Spy,
    arguments,
    assert_same,
    moq,
    new_model,
    no_dropout,
    rows,
    stock,
    trained,
    trainer_state,
    undisturbed,
    weights,
)
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from moq_hf import MoQCallback, MoQError, MoQTrainer, QuantLinear, verify_quantized
from moq_hf import quantizer as q
from moq_hf.grid import Grid, RowBlocks
from moq_hf.model.convert import quant_layers
from moq_hf.training.measures import model_loss


@pytest.mark.parametrize("config", ["nearest", "blend"])
def test_a_stock_trainer_with_the_callback_is_a_moq_trainer(config: str, tmp_path: Path) -> None:
    assert_same(undisturbed(config), weights(trained(moq(tmp_path, CONFIGS[config]))))


def test_the_forward_pass_sees_the_schedule(tmp_path: Path) -> None:
    spy = Spy()
    trainer = stock(tmp_path, callbacks=[spy])
    trainer.train()
    # Offset 2, then drops at s = 2, 4, 8: forward passes after steps 4, 6 and 10 have one bit less.
    assert spy.bits == [32] * 2 + [6] * 2 + [5] * 2 + [4] * 4 + [3] * 6
    assert isinstance(trainer.model.bert.pooler.dense, QuantLinear)
    assert not isinstance(trainer.model.classifier, QuantLinear)
    layer = trainer.model.bert.encoder.layer[1].output.dense
    # The last search for ratios was at step 15, the weights have moved since.
    now = q.fake_quantize(layer.weight.detach(), 3, Grid(RowBlocks(4)), ratio=layer.moq.ratio)
    assert torch.equal(layer.quantized_weight(), now) and not torch.equal(now, layer.weight)


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adafactor"])
def test_one_quantization_per_layer_and_forward_pass(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = q.rounded
    trainer = moq(tmp_path, {**CONFIG, "quantize_schedule": {"quantize_period": 2, "allow_unreached": True}},
                  optim=optimizer, gradient_accumulation_steps=2, max_steps=6, eval_strategy="no")  # fmt: skip
    trainer.eval_dataset = rows(8)
    monkeypatch.setattr(q, "rounded", lambda *a, **k: calls.append(1) or real(*a, **k))
    trainer.train()
    layers = len(quant_layers(trainer.model))
    # One for each of two micro-batches in 6 steps.
    assert len(calls) >= layers * 12
    calls.clear()
    trainer.evaluate()
    # Evaluation keeps a copy from one batch to the next.
    assert len(calls) == layers


@pytest.mark.parametrize(("make", "config"), [(stock, CONFIG), (moq, BLEND)])
def test_a_resumed_run_is_an_uninterrupted_one(make: Any, config: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = weights(trained(make(tmp_path / "whole", config, **settings)))
    for step, restore in ((1, False), (5, True), (13, False)):
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        resumed = make(folder, config, restore_callback_states_from_checkpoint=restore, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert_same(whole, weights(resumed))
        assert {layer.moq.bits for layer in quant_layers(resumed.model).values()} == {3}


def test_accumulation_counts_once_and_equals_a_larger_batch(tmp_path: Path) -> None:
    settings = {"max_steps": 12, "optim": "sgd", "learning_rate": 0.05, "logging_steps": 1}
    one = no_dropout(moq(tmp_path, per_device_train_batch_size=8, **settings))
    many = no_dropout(moq(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings))
    hf.set_seed(3)
    one.train()
    hf.set_seed(3)
    many.train()
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    norms = [[log["grad_norm"] for log in t.state.log_history if "loss" in log] for t in (one, many)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert {layer.moq.bits for layer in quant_layers(many.model).values()} == {3}


def test_a_loss_that_counts_its_items_is_left_to_the_trainer(tmp_path: Path) -> None:
    trainer = moq(tmp_path, gradient_accumulation_steps=2, label_smoothing_factor=0.1, max_steps=3)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs


class OnTwoDevices(hf.BertForSequenceClassification):
    """Gives a loss for each device, as DataParallel gathers them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = torch.stack([output.loss, output.loss])
        return output


@pytest.mark.parametrize("is_taught", [False, True])
def test_a_loss_for_each_device_is_averaged(is_taught: bool, tmp_path: Path) -> None:
    settings = arguments(tmp_path, remove_unused_columns=False)
    settings._n_gpu = 2
    plain = new_model()
    model = OnTwoDevices(plain.config)
    trainer = MoQTrainer(model, settings, train_dataset=rows(), moq_config=CONFIG, teacher=plain if is_taught else None)
    trainer.train()
    assert type(trainer.model_wrapped) is nn.DataParallel and trainer.state.global_step == 16


def test_evaluation_advances_nothing(tmp_path: Path) -> None:
    # An evaluation draws random numbers of its own, in a stock Trainer too; without dropout nothing else does.
    often, never = (trained(no_dropout(stock(tmp_path, eval_strategy=s, eval_steps=1))) for s in ("steps", "no"))
    assert_same(weights(often), weights(never))


def test_only_checkpoints_at_the_target_can_be_the_best(tmp_path: Path) -> None:
    seen: dict[int, float | None] = {}

    class Watch(hf.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = state.best_metric

    scores = iter([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 3.5])
    trainer = stock(
        tmp_path,
        callbacks=[Watch(), hf.EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    trainer.compute_metrics = lambda p: {"score": next(scores)}
    trainer.train()
    # Scores fall at every evaluation, but early stopping counts from the arrival at step 10 only: 12 and 14 are worse.
    assert trainer.state.global_step == 14
    assert trainer.state.best_metric == 5.0 and trainer.state.best_model_checkpoint.endswith(f"checkpoint-{ARRIVAL}")
    assert all(seen[step] is None for step in range(ARRIVAL))
    # The weights are those of step 10, and so is what they are quantized with.
    best = json.loads((tmp_path / f"checkpoint-{ARRIVAL}" / "trainer_state.json").read_text())
    saved = best["stateful_callbacks"]["MoQCallback"]["attributes"]["saved"]
    assert trainer_state(trainer) == saved


def test_a_run_that_ends_early_has_no_best_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = stock(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                    load_best_model_at_end=True)  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint is None
    text = "\n".join(record.message for record in caplog.records)
    assert "the run has 8 optimizer steps but reaches 3 bits only at step 10" in text
    assert "a quantize_schedule.quantize_period of at most 1, or start_bits 5 fits" in text
    assert (
        "before every block was at 3 bits: 3 blocks at 4 bits; no" in text and "no checkpoint was a candidate" in text
    )


def test_model_init_and_a_second_training_start_afresh(tmp_path: Path) -> None:
    trainer = hf.Trainer(
        model_init=new_model, args=arguments(tmp_path), train_dataset=rows(), callbacks=[MoQCallback(CONFIG)]
    )
    trainer.train()
    first = weights(trainer)
    assert {layer.moq.bits for layer in quant_layers(trainer.model).values()} == {3}
    trainer.train()
    assert_same(first, weights(trainer))
    plain = stock(tmp_path)
    # Leaves the random numbers where `model_init` left them.
    new_model()
    plain.train()
    assert_same(first, weights(plain))


def test_mixed_precision_quantizes_into_the_matmul_s_dtype(tmp_path: Path) -> None:
    trainer = moq(tmp_path, bf16=True)
    trainer.train()
    layers = quant_layers(trainer.model)
    assert {layer.float_weight.dtype for layer in layers.values()} == {torch.float32}
    layer = layers["bert.pooler.dense"]
    exact = q.fake_quantize(layer.float_weight.detach(), 3, Grid(RowBlocks(4)), ratio=layer.moq.ratio)
    seen: list[torch.Tensor] = []
    layer.module.register_forward_pre_hook(lambda *_: seen.append(layer.quantized_weight()))
    trainer.evaluate(rows(8))
    assert torch.equal(seen[0], exact.to(torch.bfloat16))


# Dynamo itself instantiates the autograd function that it traces (torch 2.13); drop this when it no longer does.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_torch_compile_trains_the_same_and_the_model_is_proven_on_the_data(tmp_path: Path) -> None:
    compiled = trained(stock(tmp_path, torch_compile=True, torch_compile_backend="eager"))
    a, b = weights(compiled), undisturbed("nearest")
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in b)
    found = verify_quantized(tmp_path / "quantized", torch.compile(compiled.model, backend="eager"))
    assert found.proof is not None and found.proof.agrees is True
    torch._dynamo.reset()


def test_gradient_checkpointing_trains_the_same(tmp_path: Path) -> None:
    """Of the other kind of recomputing, test_reading.py and test_copies.py have the passes."""
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    assert_same(weights(trained(moq(tmp_path, STOCHASTIC, **settings))), undisturbed("stochastic"))


def test_off_means_off(tmp_path: Path) -> None:
    off, plain = trained(moq(tmp_path, {**CONFIG, "enabled": False})), trained(moq(tmp_path, None))
    assert_same(weights(off), weights(plain))
    assert not quant_layers(off.model)


@pytest.mark.parametrize(
    "act, text",
    [
        (lambda d: stock(d, callbacks=[MoQCallback(CONFIG)]), "two MoQCallbacks"),
        (lambda d: moq(d, callbacks=[MoQCallback(CONFIG)]), "two MoQCallbacks in one Trainer: pass one"),
        (lambda d: stock(d, max_steps=2).train(), "schedule_offset 2 is not before the end of training at 2"),
        (lambda d: moq(d, {**CONFIG, "quantize_groups": 3}), "quantize_groups 3 does not divide"),
        (
            lambda d: moq(d, {**CONFIG, "modules_to_not_convert": ["clasifier"]}),
            "matches no module .did you mean .classifier",
        ),
        (
            lambda d: moq(d, {**CONFIG, "quantize_schedule": {"schedule_offset": 100}}).train(),
            "0.25 of 16 .* is step 4, too early .*quantize_schedule.schedule_offset 100, .* a run of 412 steps",
        ),
        (lambda d: moq(d, str(d / "none.json")), "none.json"),
        (lambda d: moq(d, learning_rate=1e30, max_grad_norm=0.0).train(), r"NaN or Inf in bert\.encoder"),
        (lambda d: MoQCallback(5), r"a path, a mapping or a MoQConfig, such as MoQConfig\(bits=5\); got int"),
    ],
)
def test_wrong_use_is_told(act: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match=text):
        act(tmp_path)


class Gives(nn.Module):
    """Its output is what was given."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self) -> Any:
        return self.output


def test_the_loss_is_found_in_any_output_that_has_one() -> None:
    loss, logits = torch.tensor(2.0), torch.ones(3, 2)
    for output in (SequenceClassifierOutput(loss=loss, logits=logits), {"loss": loss}, (loss, logits), [loss]):
        assert model_loss(Gives(output), {}) is loss
    without: list[Any] = [SequenceClassifierOutput(logits=logits), {}, {"logits": logits}, (), (logits,), logits, None]
    for output in without:
        with pytest.raises(MoQError, match="the model's output has no loss"):
            model_loss(Gives(output), {})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_run_tells_full_size_once_and_unpacks_for_lora_without_a_word(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    is_gpt = family == "GPT-2"
    targets = ["c_attn"] if is_gpt else ["q_proj"]
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, fan_in_fan_out=is_gpt)
    callback = MoQCallback("w4")
    hf.Trainer(
        peft.get_peft_model(zoo_model(family, "causal LM"), lora),
        arguments(tmp_path, max_steps=1),
        train_dataset=rows_of("causal LM"),
        callbacks=[callback],
    ).train()
    warned = [text for text in caplog.messages if text.startswith("moq_hf: ")]
    assert ["at full size" in text for text in warned] == [True] * is_gpt, warned
    assert callback.delivered is not None and callback.delivered.proof.agrees
    state = json.loads((tmp_path / "quantized" / "moq_state.json").read_text())
    assert state["layout"] == ("floats" if is_gpt else "unpacked")
