"""When a quantized weight is made afresh: the rows of the table of `stale`, one by one."""

import copy
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import arguments
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import BertForSequenceClassification, Trainer, TrainerCallback

from moq_hf import MoQCallback, dequantize_model, quantize_model
from moq_hf import quantizer as q
from moq_hf.grid import Grid, PerChannel
from moq_hf.model import staleness
from moq_hf.model.convert import quant_layers
from moq_hf.model.staleness import lead_copies
from moq_hf.quant_linear import FLOAT_BITS, QuantLayer

CONFIG: dict[str, Any] = {"quantize_bits": {"start_bits": 3, "target_bits": 3}, "quantize_groups": "per_channel"}
STEPWISE: dict[str, Any] = {
    "quantize_bits": {"start_bits": 5, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 2},
    "quantize_groups": "per_channel",
}
ABSMAX = {**CONFIG, "quantize_algo": {"scale": "absmax"}}


def net(config: dict[str, Any] = ABSMAX) -> Any:
    return quantize_model(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)), config)


def weight_of(layer: nn.Module) -> nn.Parameter:
    return dict(layer.named_parameters(recurse=False))["weight"]


def expected(layer: Any, **more: Any) -> Tensor:
    """By the definition, of the weight as it is now."""
    state = layer.moq
    options = {"ratio": state.ratio, "seed": state.draw, **more}
    return q.fake_quantize(weight_of(layer).detach(), state.bits, state.grid, **options)


def is_fresh(model: Any) -> bool:
    """Whether a forward pass computes with what the weight of the first layer gives now."""
    layer = model[0]
    x = torch.randn(3, 16)
    return torch.equal(layer(x), nn.functional.linear(x, expected(layer), layer.bias))


def in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(1.5)


def in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.weight.mul_(1.5)


def swapped(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(16, 16)))


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn(16, 16))


def replaced_by_the_same_id(layer: Any) -> None:
    # Memory and id of the old one are free for the new one.
    del layer.weight
    layer.weight = nn.Parameter(torch.randn(16, 16))


def other_data(layer: Any) -> None:
    layer.weight.data = torch.randn(16, 16)


def stepped(layer: Any) -> None:
    layer.weight.grad = torch.randn(16, 16)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def stepped_fused(layer: Any) -> None:
    # It leaves the tensor's version as it was.
    layer.weight.grad = torch.randn(16, 16)
    torch.optim.AdamW([layer.weight], lr=0.5, fused=True).step()


def loaded(layer: Any) -> None:
    layer.load_state_dict({"weight": torch.randn(16, 16), "bias": layer.bias.detach()})


def assigned(layer: Any) -> None:
    layer.load_state_dict({"weight": torch.randn(16, 16), "bias": layer.bias.detach()}, assign=True)


def converted(layer: Any) -> None:
    layer.weight.data.mul_(1.5)
    # There and back: neither dtype nor memory tells of it.
    layer.double()
    layer.float()


def converted_by_swapping(layer: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
        layer.float()
        layer.load_state_dict({"weight": torch.randn(16, 16), "bias": layer.bias.detach()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


SEEN: list[Callable[[Any], None]] = [
    in_place, in_inference_mode, swapped, replaced, replaced_by_the_same_id, other_data, stepped, stepped_fused,
    loaded, assigned, converted, converted_by_swapping,
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", SEEN)
def test_what_changes_the_weight_is_seen_at_once(change: Callable[[Any], None], training: bool) -> None:
    # Whether an id or an address is used again is a matter of luck.
    for _ in range(20):
        model = net().train(training)
        assert is_fresh(model) and not model[0].is_stale()
        before = model[0].quantized_weight().detach().clone()
        change(model[0])
        assert not torch.equal(expected(model[0]), before)
        assert is_fresh(model)


def test_nothing_is_quantized_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net().eval()
    monkeypatch.setattr(QuantLayer, "_compute", lambda *_, **__: pytest.fail("quantized for nothing"))
    for _ in range(3):
        model(torch.randn(3, 16))
        assert not model[0].is_stale()


def test_another_weight_of_torch_func_is_seen() -> None:
    model = net()
    x = torch.randn(3, 16)
    for factor in (1.5, 2.5):
        given = {name: (tensor * factor).detach() for name, tensor in model.named_parameters()}
        out = torch.func.functional_call(model[0], {key[2:]: given[key] for key in ("0.weight", "0.bias")}, (x,))
        wanted = q.fake_quantize(given["0.weight"], 3, model[0].moq.grid)
        assert torch.equal(out, nn.functional.linear(x, wanted, given["0.bias"]))
        assert is_fresh(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_and_training_after_it_start_afresh(compiled: bool) -> None:
    model = net().train()
    run = torch.compile(model, backend="eager") if compiled else model
    x = torch.randn(3, 16)

    def is_right() -> bool:
        return torch.allclose(run(x), dequantize_model(copy.deepcopy(model))(x), atol=1e-6)

    assert is_right()
    shadow = weight_of(model[0]).detach() * 1.5
    kept = weight_of(model[0]).detach().clone()
    weight_of(model[0]).data.copy_(shadow)
    model.eval()
    assert is_right()
    # Every evaluation, also one that follows another.
    weight_of(model[0]).data.mul_(1.5)
    model.eval()
    assert is_right()
    weight_of(model[0]).data.copy_(kept)
    model.train()
    assert is_right()
    if compiled:
        with torch.no_grad():
            weight_of(model[0]).mul_(1.5)
        model.train()
        assert is_right()
        torch._dynamo.reset()


def test_a_backward_pass_after_evaluation_uses_what_its_forward_pass_used() -> None:
    model = net().train()
    x = torch.randn(3, 16, requires_grad=True)
    out = model(x)
    wanted = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    weight_of(model[0]).data.mul_(1.5)
    model.eval()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


class Ema:
    """Averages that are written into the model through `.data`, as torch_ema and diffusers do it."""

    def __init__(self, model: nn.Module) -> None:
        self.averages = [p.detach().clone() for p in model.parameters()]
        self.kept: list[Tensor] = []

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.3)

    def copy_to(self, model: nn.Module) -> None:
        self.kept = [p.data.clone() for p in model.parameters()]
        for average, parameter in zip(self.averages, model.parameters(), strict=True):
            parameter.data.copy_(average)

    def restore(self, model: nn.Module) -> None:
        for kept, parameter in zip(self.kept, model.parameters(), strict=True):
            parameter.data.copy_(kept)


class EmaCallback(TrainerCallback):
    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.ema = Ema(model)
        self.copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        # A teacher, and what somebody may want to go back to.
        self.untouched = copy.deepcopy(model)
        self.snapshots: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.ema.update(model)
        self.copy.update_parameters(model)
        if state.global_step == 2:
            self.snapshots.append(copy.deepcopy(model))


def rows(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[index] for key, value in batch.items()} for index in range(8)]


def trained(
    model: nn.Module, batch: dict[str, Tensor], folder: Path, **more: Any
) -> tuple[Trainer, EmaCallback, dict[str, QuantLayer]]:
    ema, data = EmaCallback(), rows(batch)
    settings = arguments(folder, **{"max_steps": 5, "per_device_train_batch_size": 8, **more})
    callbacks = [MoQCallback(STEPWISE), ema]
    trainer = Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    return trainer, ema, quant_layers(model)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(dequantize_model(copy.deepcopy(model)).eval()(**batch).loss)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_ema_is_evaluated_quantized(
    optim: str, tiny_bert: BertForSequenceClassification, tiny_batch: dict[str, Tensor], tmp_path: Path
) -> None:
    trainer, callback, layers = trained(tiny_bert, tiny_batch, tmp_path, optim=optim, learning_rate=1e-2)
    raw = trainer.evaluate()["eval_loss"]
    assert raw == pytest.approx(loss_of(tiny_bert, tiny_batch), rel=1e-5)
    callback.ema.copy_to(tiny_bert)
    averaged = trainer.evaluate()["eval_loss"]
    assert averaged == pytest.approx(loss_of(tiny_bert, tiny_batch), rel=1e-5) and averaged != raw
    assert all(torch.equal(layer.quantized_weight(), expected(layer)) for layer in layers.values())
    callback.ema.restore(tiny_bert)
    tiny_bert.train()
    assert all(torch.equal(layer.quantized_weight(), expected(layer)) for layer in layers.values())
    assert trainer.evaluate()["eval_loss"] == raw


def test_copies_that_follow_and_copies_that_do_not(
    tiny_bert: BertForSequenceClassification, tiny_batch: dict[str, Tensor], tmp_path: Path
) -> None:
    _, callback, layers = trained(tiny_bert, tiny_batch, tmp_path, learning_rate=1e-2)
    assert {layer.moq.bits for layer in layers.values()} == {3}
    copied = quant_layers(callback.copy.module)
    assert len(copied) == len(layers)
    for name, layer in copied.items():
        assert layer.moq.bits == 3 and not torch.equal(weight_of(layer), weight_of(layers[name]))
    # It is quantized in fact, weight by weight.
    outputs = callback.copy.eval()(**tiny_batch).logits
    assert torch.equal(outputs, dequantize_model(copy.deepcopy(callback.copy.module)).eval()(**tiny_batch).logits)
    assert {layer.moq.bits for layer in quant_layers(callback.untouched).values()} == {FLOAT_BITS}
    snapshot = {layer.moq.bits for layer in quant_layers(callback.snapshots[0]).values()}
    assert snapshot == {5} and snapshot != {3}


def test_copies_follow_only_once_their_weights_have_changed() -> None:
    model = net()
    model[0].moq.bits = FLOAT_BITS
    model[0].refresh()
    teacher, average = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        average[0].weight.mul_(0.9)
    model[0].moq.bits = 4
    model[0].refresh()
    lead_copies()
    assert (teacher[0].moq.bits, average[0].moq.bits) == (FLOAT_BITS, 4)
    assert is_fresh(average)
    # Its weights stay as they are now; the precision alone changes.
    model[0].moq.bits = 3
    lead_copies()
    assert average[0].moq.bits == 3 and is_fresh(average)
    # The copy of a copy follows the copy, and nothing follows what is gone.
    second = copy.deepcopy(average)
    del model
    lead_copies()
    with torch.no_grad():
        second[0].weight.mul_(0.9)
    average[0].moq.bits = 2
    lead_copies()
    assert (average[0].moq.bits, second[0].moq.bits) == (2, 2)


def heavy_tails(*shape: int) -> Tensor:
    return torch.distributions.StudentT(3.0).sample(torch.Size(shape))


def error(layer: Any) -> float:
    return float((layer.quantized_weight().detach() - weight_of(layer).detach()).square().mean())


def least_error(layer: Any) -> float:
    weight = weight_of(layer).detach()
    bits, grid = layer.moq.bits, Grid(PerChannel())
    ratio = q.least_squares_ratio(weight, bits, grid)
    return float((q.fake_quantize(weight, bits, grid, ratio=ratio) - weight).square().mean())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 5])
def test_loaded_weights_get_clipping_ratios_of_their_own(bits: int, assign: bool) -> None:
    config = {**CONFIG, "quantize_bits": {"start_bits": bits, "target_bits": bits}}
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    with torch.no_grad():
        model[0].weight.copy_(heavy_tails(64, 64))
    quantize_model(model, config)
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    with torch.no_grad():
        other[0].weight.uniform_(-1, 1)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert error(model[0]) == least_error(model[0])


def test_a_loop_without_a_trainer_searches_ratios_when_they_are_due() -> None:
    config = {**CONFIG, "quantize_algo": {"scale_refresh": 3}}
    model = net(config)
    layer = model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for step in range(1, 7):
        layer.weight.grad = weight_of(layer).detach() - heavy_tails(16, 16)
        optimizer.step()
        assert layer.moq.draw.step == step and is_fresh(model)
        found.append(error(layer) == least_error(layer))
    assert found == [False, False, True] * 2


def test_a_loop_without_a_trainer_counts_steps_for_stochastic_rounding() -> None:
    config = {**CONFIG, "quantize_algo": {"rounding": "stochastic", "scale": "absmax"}}
    model = net(config)
    layer = model[0]
    # A frozen value: only the draw changes.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    drawn = [layer.quantized_weight().detach().clone()]
    for step in range(1, 4):
        model(torch.randn(3, 16)).sum().backward()
        optimizer.step()
        assert layer.moq.draw.step == step
        for _ in range(2):
            assert torch.equal(layer.quantized_weight(), expected(layer))
        drawn.append(layer.quantized_weight().detach().clone())
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(drawn))


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_quantizing_in_one_thread_does_not_disturb_optimizers_of_others() -> None:
    many = quantize_model(nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)]), CONFIG)
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    stop, errors, steps = threading.Event(), list[str](), 0

    def train() -> None:
        nonlocal steps
        while not stop.is_set():
            plain(torch.ones(1, 4)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                errors.append(str(error))
            steps += 1

    thread = threading.Thread(target=train)
    thread.start()
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            quantize_model(nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]), CONFIG)
    finally:
        stop.set()
        thread.join(30)
    assert steps and not errors and len(many) == 100


@pytest.mark.usefixtures("restless")
def test_a_thread_may_evaluate_while_another_trains() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop, errors = threading.Event(), list[str]()

    def evaluate() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    model(torch.ones(3, 16))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            # The optimizer's own writing would break a graph of the other thread; there is none.
            model[0].weight.grad = torch.ones(16, 16)
            optimizer.step()
    finally:
        stop.set()
        thread.join(30)
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
# Threads beside a fork are what this is about; Python 3.12 warns of them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_fork_can_quantize_although_a_thread_held_the_lock() -> None:
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with staleness._lock:
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:
        # Whatever happens, this copy of the test run ends here.
        try:
            os._exit(0 if is_fresh(net()) else 3)
        finally:
            os._exit(4)
    leave.set()
    thread.join(10)
    end, found, status = time.monotonic() + 20, 0, 0
    while not found and time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not found:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert found and os.waitstatus_to_exitcode(status) == 0


def test_the_optimizer_hook_comes_with_the_first_layer_and_goes_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.optim.optimizer as optimizer

    # Layers of other tests may be alive: this one has a watch of its own.
    monkeypatch.setattr(staleness, "_layers", weakref.WeakSet())
    monkeypatch.setattr(staleness, "_controlled", weakref.WeakSet())
    monkeypatch.setattr(staleness, "_hook", None)
    others = len(optimizer._global_optimizer_post_hooks)

    def installed() -> int:
        return len(optimizer._global_optimizer_post_hooks) - others

    first, second = net(), net()
    assert installed() == 1
    dequantize_model(first)
    assert installed() == 1
    dequantize_model(second)
    assert installed() == 0
    third = net()
    assert installed() == 1 and is_fresh(third)
    dequantize_model(third)
    assert installed() == 0


def test_a_model_may_be_quantized_and_made_plain_in_an_optimizer_s_own_hook() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model, steps = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)), 0

    def change(*args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            quantize_model(model, ABSMAX)
        elif steps == 3:
            dequantize_model(model)

    # The second one is what torch goes on to after the first.
    handles = [register_optimizer_step_post_hook(hook) for hook in (change, lambda *args: None)]
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            assert step not in (0, 1) or is_fresh(model)
    finally:
        for handle in handles:
            handle.remove()
    assert steps == 4 and type(model[0]) is nn.Linear
