"""Mixed precision, memory: skipped steps advance nothing, a retry after running out of memory starts anew."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import CONFIG, STOCHASTIC, Spy, arguments, callback_of, new_model, rows, trained, weights
from torch import nn
from transformers import Trainer, TrainerCallback

from moq_hf import MoQCallback, MoQTrainer, QuantLinear
from moq_hf.model.convert import quant_layers

EIGEN = {**CONFIG, "eigenvalue": {"enabled": True, "num_samples": 4, "max_overhead": 1.0}}


class Scaled(MoQTrainer):
    """fp16 with a gradient scaler; on a CPU too, where Accelerate gives neither autocast nor a scaler."""

    overflow_at: tuple[int, ...] = ()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.scaler is None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            self.accelerator.native_amp = True

    def compute_loss(self, model: nn.Module, inputs: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * torch.inf if model.training and self.state.global_step in self.overflow_at else loss


class Watch(TrainerCallback):
    """Whether each optimizer step changed the weights."""

    def __init__(self) -> None:
        self.changed: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = [p.detach().clone() for p in model.parameters()]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        now = zip(self.before, model.parameters(), strict=True)
        self.changed.append(any(not torch.equal(a, b) for a, b in now))


# Fused optimizers are called for a skipped step too: Accelerate takes it for one that was made.
@pytest.mark.parametrize(
    "optimizer, config", [("adamw_torch", STOCHASTIC), ("adamw_torch_fused", EIGEN), ("sgd", STOCHASTIC)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_that_overflows_advances_nothing(device: str, optimizer: str, config: Any, tmp_path: Path) -> None:
    skipped = (0, 3, 4, 9)
    watch, spy = Watch(), Spy()
    settings = {"fp16": True, "optim": optimizer, "learning_rate": 1e-3, "use_cpu": device == "cpu", "logging_steps": 1}
    trainer = Scaled(
        new_model(), arguments(tmp_path, **settings), train_dataset=rows(), callbacks=[watch, spy], moq_config=config
    )
    trainer.overflow_at = skipped
    trainer.train()
    assert watch.changed == [step not in skipped for step in range(16)]
    assert trainer.accelerator.scaler.get_scale() < 65536 / 8
    controller = callback_of(trainer).controller
    assert controller.schedule.steps == 16 - len(skipped)
    # In a run without skips the drops come after steps 2, 4, 6 and 10; each waits for the steps that were none.
    steps = [switch.step for switch in controller.history if switch.block == "bert.pooler.dense"]
    assert steps == [2, 4, 6, 10]
    assert spy.bits[:3] == [32] * 3 and spy.bits[3:7] == [6] * 4
    logged = [log["moq/bits"] for log in trainer.state.log_history if "loss" in log]
    assert logged[:5] == [32, 32, 32, 6, 6]
    if config is STOCHASTIC:
        # As without skips, with the forward passes of the skipped steps repeated.
        assert spy.bits == [32] * 3 + [6] * 4 + [5] * 2 + [4] * 5 + [3] * 2


class Greedy(Trainer):
    """Has memory for no more than 4 rows from its sixth step on."""

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        if len(inputs["input_ids"]) > 4 and self.state.global_step == 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().compute_loss(model, inputs, **kwargs)


def test_a_smaller_batch_after_running_out_of_memory_is_a_new_run(tmp_path: Path) -> None:
    schedule = {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.9}
    config = {**CONFIG, "quantize_schedule": schedule}
    settings = {"auto_find_batch_size": True, "max_steps": -1, "num_train_epochs": 2}
    runs = []
    for batch in (5, 4):
        made = arguments(tmp_path, per_device_train_batch_size=batch, **settings)
        trainer = Greedy(new_model(), made, train_dataset=rows(40), callbacks=[MoQCallback(config)])
        trainer.train()
        # 16 steps with 5 rows each, 20 with 4: the plan is made anew.
        assert trainer.state.max_steps == 20
        runs.append(callback_of(trainer).controller)
        layers = quant_layers(trainer.model)
        assert len(layers) == 13 and {type(layer.module) for layer in layers.values()} == {QuantLinear}
    retried, small = runs
    assert retried.has_arrived
    assert retried.schedule.state_dict() == small.schedule.state_dict() and retried.history == small.history


def test_resuming_with_a_scaler_takes_its_scale_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = {"fp16": True, "save_strategy": "steps", "save_steps": 6}

    def make(folder: str, overflow_at: tuple[int, ...]) -> Scaled:
        trainer = Scaled(
            new_model(), arguments(tmp_path / folder, **settings), train_dataset=rows(), moq_config=STOCHASTIC
        )
        trainer.overflow_at = overflow_at
        return trainer

    whole = trained(make("run", (3, 7)))
    resumed = make("run", (7,))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True))
    assert callback_of(resumed).controller.history == callback_of(whole).controller.history
