"""Short runs of a tiny BERT in a stock Trainer with the callback and in a MoQTrainer, and how to compare them."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from torch import nn

from moq_hf import MoQCallback, MoQTrainer
from moq_hf.model.convert import quant_layers

CONFIG = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_groups": 4,
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 2, "allow_unreached": True},
    "quantize_algo": {"scale_refresh": 3, "range": "narrow"},
}
STOCHASTIC = {**CONFIG, "quantize_algo": {"scale_refresh": 3, "range": "narrow", "rounding": "stochastic"}}
BLEND = {**STOCHASTIC, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}}
CONFIGS = {"nearest": CONFIG, "stochastic": STOCHASTIC, "blend": BLEND}
# Every layer is at its target from this step on.
ARRIVAL = 2 + 8


def new_model() -> hf.BertForSequenceClassification:
    hf.set_seed(7)
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
        )
    )


def over_the_model(bits: float, model: nn.Module) -> float:
    """Bits per parameter of the whole model, as they are logged, with all its quantized layers at `bits`."""
    quantized = sum(layer.float_weight.numel() for layer in quant_layers(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    return round(32 + (bits - 32) * quantized / total, 4)


def rows(count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (count, 10), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] > 30)} for row in ids]


def arguments(folder: Path, **more: Any) -> hf.TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 16,
        "learning_rate": 1e-2,
        "logging_steps": 100,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return hf.TrainingArguments(str(folder), **{**settings, **more})


def stock(folder: Path, config: Any = CONFIG, callbacks: Any = (), **more: Any) -> hf.Trainer:
    return hf.Trainer(
        new_model(),
        arguments(folder, **more),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[MoQCallback(config), *callbacks],
        compute_metrics=lambda p: {"score": float(p.predictions.sum())},
    )


def moq(folder: Path, config: Any = CONFIG, callbacks: Any = (), **more: Any) -> MoQTrainer:
    return MoQTrainer(
        new_model(), arguments(folder, **more), train_dataset=rows(), callbacks=list(callbacks), moq_config=config
    )


def trained(trainer: Any) -> Any:
    """Trains at once: making another Trainer before would change the random numbers of this one."""
    trainer.train()
    return trainer


def no_dropout(trainer: Any) -> Any:
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return trainer


def weights(trainer: hf.Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@functools.cache
def undisturbed(config: str) -> dict[str, torch.Tensor]:
    """The weights that a stock Trainer's run ends with, by the name of its config; not to be changed."""
    with TemporaryDirectory() as folder:
        return weights(trained(stock(Path(folder), CONFIGS[config])))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Spy(hf.TrainerCallback):
    """The bits of a layer at each optimizer step, seen in the forward pass itself."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        layer = model.bert.encoder.layer[0].attention.self.query
        layer.register_forward_hook(lambda layer, *_: self.bits.append(layer.moq.bits) if layer.training else None)


class Stop(hf.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def callback_of(trainer: Any) -> MoQCallback:
    (found,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, MoQCallback)]
    return found


def trainer_state(trainer: hf.Trainer) -> Any:
    controller = callback_of(trainer).controller
    assert controller is not None
    return json.loads(json.dumps(controller.state_dict()))
