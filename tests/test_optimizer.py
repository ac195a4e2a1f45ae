"""The optimizer's averages start afresh when the precision drops."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import CONFIG, Stop, assert_same, moq, new_model, stock, trained, weights
from torch import nn
from transformers import Adafactor

from moq_hf import MoQConfig, MoQError
from moq_hf.controller import MoQController
from moq_hf.optimizer import reset

RESET = {**CONFIG, "quantize_schedule": {**CONFIG["quantize_schedule"], "reset_optimizer": True}}
OPTIMIZERS = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: Adafactor(p, lr=0.1, relative_step=False),
    # Their states are not at zero before the first step, or not known.
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_after_a_reset_is_that_of_a_new_optimizer(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(6, 5)
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(5)]

    def step(model: nn.Module, optimizer: Any, index: int) -> list[torch.Tensor]:
        for parameter, gradient in zip(model.parameters(), gradients[index], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    optimizer = OPTIMIZERS[name](model.parameters())
    # Before the first step there is nothing to forget.
    reset(optimizer)
    for index in range(3):
        step(model, optimizer, index)
    other = copy.deepcopy(model)
    fresh = OPTIMIZERS[name](other.parameters())
    kept = copy.deepcopy((model, optimizer.state_dict()))
    reset(optimizer)
    torch.testing.assert_close(step(model, optimizer, 3), step(other, fresh, 3), rtol=0, atol=0)
    torch.testing.assert_close(step(model, optimizer, 4), step(other, fresh, 4), rtol=0, atol=0)
    if name != "SGD":
        optimizer = OPTIMIZERS[name](kept[0].parameters())
        optimizer.load_state_dict(kept[1])
        step(kept[0], optimizer, 3)
        assert not torch.equal(step(kept[0], optimizer, 4)[0], next(model.parameters()))


@pytest.mark.parametrize("make", [stock, moq])
def test_a_run_resets_it_at_each_drop(make: Any, tmp_path: Path) -> None:
    # Of 16 steps the drops come after the 2nd, 4th, 6th and 10th.
    for config, count in ((CONFIG, 16), (RESET, 6)):
        trainer = trained(make(tmp_path / str(count), config))
        steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
        assert steps == {count}


@pytest.mark.parametrize("step", [6, 7])
def test_a_run_resumed_at_a_drop_is_the_same(step: int, tmp_path: Path) -> None:
    straight = trained(moq(tmp_path / "straight", RESET))
    settings = {"save_strategy": "steps", "save_steps": step}
    trained(moq(tmp_path / "resumed", RESET, callbacks=[Stop(step)], **settings))
    resumed = moq(tmp_path / "resumed", RESET, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(straight), weights(resumed))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(weights(straight).values(), weights(trained(moq(tmp_path / "kept"))).values(), strict=True)
    )


def test_a_run_may_go_on_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    trained(moq(tmp_path, callbacks=[Stop(5)], **settings))
    resumed = moq(tmp_path, RESET, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert "quantize_schedule.reset_optimizer: false -> true" in caplog.text
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {6}


def test_a_loop_of_ones_own_gives_the_optimizer() -> None:
    model = new_model()
    controller = MoQController(model, MoQConfig.from_dict(RESET), 16)
    with pytest.raises(MoQError, match=r"reset_optimizer.*controller\.step\(optimizer="):
        controller.step()
    assert controller.schedule.steps == 0
