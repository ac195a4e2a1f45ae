"""How long a quantized weight lives: a pass, or while somebody holds it and nothing changes that it was made of."""

import contextlib
import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moq_hf import MoQError, dequantize_model, hold_quantized, quantize_model
from moq_hf import quantizer as q
from moq_hf.grid import Grid, PerChannel
from moq_hf.inputs import InputObserver
from moq_hf.layer_state import LayerState
from moq_hf.model.convert import quant_layers
from moq_hf.schedule import FLOAT_BITS

CONFIG: dict[str, Any] = {"quantize_bits": {"start_bits": 3, "target_bits": 3}, "quantize_groups": "per_channel"}
ABSMAX = {**CONFIG, "quantize_algo": {"scale": "absmax"}}


def net(config: dict[str, Any] = ABSMAX) -> Any:
    return quantize_model(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)), config)


def weight_of(layer: nn.Module) -> nn.Parameter:
    return dict(layer.named_parameters(recurse=False))["weight"]


def expected(layer: Any, **more: Any) -> Tensor:
    """By the definition, of the weight as it is now."""
    state = layer.moq
    options = {"ratio": state.ratio, "seed": state.seed, **more}
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


MADE_ANEW = (swapped, replaced, replaced_by_the_same_id, other_data, assigned)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each weight that is quantized."""
    calls: list[int] = []
    real = LayerState.fake_quantize

    def counting(self: LayerState, *args: Any) -> Tensor:
        calls.append(1)
        return real(self, *args)

    monkeypatch.setattr(LayerState, "fake_quantize", counting)
    return calls


def is_fresh_in_a_pass(model: Any) -> bool:
    seen: list[Tensor] = []
    hook = model[0].register_forward_hook(lambda layer, args, output: seen.append(output))
    x = torch.randn(3, 16)
    model(x)
    hook.remove()
    return torch.equal(seen[0], nn.functional.linear(x, expected(model[0]), model[0].bias))


@pytest.mark.parametrize("change", SEEN)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("holds", [True, False])
def test_what_changes_the_weight_is_seen_at_once(change: Callable[[Any], None], gradients: bool, holds: bool) -> None:
    if holds and change is stepped_fused:
        # The one change that neither version nor address tells of, which nobody makes who holds weights.
        return
    # Whether an id or an address is used again is a matter of luck.
    for _ in range(20 if change in MADE_ANEW else 1):
        model = net().train()
        with hold_quantized(model) if holds else contextlib.nullcontext():
            with torch.set_grad_enabled(gradients):
                assert is_fresh(model) and is_fresh_in_a_pass(model)
                before = model[0].quantized_weight().detach().clone()
            change(model[0])
            assert not torch.equal(expected(model[0]), before)
            with torch.set_grad_enabled(gradients):
                assert is_fresh(model) and is_fresh_in_a_pass(model)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_each_pass_makes_its_weights_unless_they_are_held(
    mode: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net().train(training), torch.randn(3, 16)
    calls = counted(monkeypatch)
    with mode():
        for _ in range(3):
            model(x)
    # The head stays in float.
    assert len(calls) == 3
    with mode(), hold_quantized(model):
        for _ in range(3):
            model(x)
            with torch.inference_mode():
                model(x)
    # A pass that has gradients makes its own, and ends what was held: a step may follow.
    assert len(calls) == 3 + (6 if mode is torch.enable_grad else 1)
    before = len(calls)
    model(x).sum().backward()
    assert len(calls) == before + 1


def test_what_is_held_goes_with_train_and_eval_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net().eval(), torch.randn(3, 16)
    calls = counted(monkeypatch)
    with torch.no_grad():
        with hold_quantized(model), hold_quantized(model):
            model(x)
            weight_of(model[0]).data.mul_(1.5)
            model.eval()
            assert is_fresh(model) and len(calls) == 2
            copied = copy.deepcopy(model)
            assert torch.equal(copied(x), model(x)) and len(calls) == 3
        with pytest.raises(ZeroDivisionError), hold_quantized(model):
            1 / 0  # noqa: B018
        model(x)
        model(x)
    assert len(calls) == 5
    with pytest.raises(MoQError, match="no layer of the model is quantized"), hold_quantized(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("change", ["bits", "ratio", "blend", "seed"])
def test_another_precision_makes_another_copy(change: str) -> None:
    model = net({**CONFIG, "quantize_algo": {"rounding": "stochastic"}}).eval()
    state = model[0].moq
    values = {"bits": 5, "ratio": None, "blend": 0.5, "seed": state.seed._replace(step=7)}
    with torch.no_grad(), hold_quantized(model):
        before = model[0].quantized_weight()
        assert torch.equal(model[0].quantized_weight(), before)
        setattr(state, change, values[change])
        assert not torch.equal(model[0].quantized_weight(), before)


def test_a_backward_pass_after_evaluation_uses_what_its_forward_pass_used() -> None:
    model = net().train()
    x = torch.randn(3, 16, requires_grad=True)
    out = model(x)
    wanted = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    weight_of(model[0]).data.mul_(1.5)
    model.eval()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


def test_a_copy_of_a_model_has_the_precision_of_its_making() -> None:
    model = net(CONFIG)
    quant_layers(model)["0"].set_bits(FLOAT_BITS)
    teacher = copy.deepcopy(model)
    quant_layers(model)["0"].set_bits(5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    quant_layers(model)["0"].set_bits(3)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    average.update_parameters(model)
    assert [each[0].moq.bits for each in (teacher, average.module, model)] == [FLOAT_BITS, 5, 3]
    assert is_fresh(average.module) and torch.equal(teacher[0].quantized_weight(), weight_of(teacher[0]))
    # So its averages are evaluated in the model.
    model.load_state_dict(average.module.state_dict())
    assert torch.equal(weight_of(model[0]), weight_of(average.module[0])) and is_fresh(model)


def heavy_tails(*shape: int) -> Tensor:
    return torch.distributions.StudentT(3.0).sample(torch.Size(shape))


def error(layer: Any) -> float:
    return float((layer.quantized_weight().detach() - weight_of(layer).detach()).square().mean())


def least_error(layer: Any) -> float:
    weight = weight_of(layer).detach()
    bits, grid = layer.moq.bits, Grid(PerChannel(), full=None)
    ratio = q.least_squares_ratio(weight, bits, grid)
    return float((q.fake_quantize(weight, bits, grid, ratio=ratio) - weight).square().mean())


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("bits", [3, 5])
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


def test_in_a_loop_without_a_trainer_train_counts_steps() -> None:
    model = net({**CONFIG, "quantize_algo": {"scale_refresh": 3}})
    layer = model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for step in range(1, 7):
        layer.weight.grad = weight_of(layer).detach() - heavy_tails(16, 16)
        optimizer.step()
        model.train()
        assert layer.moq.seed.step == step and is_fresh(model)
        found.append(error(layer) == least_error(layer))
    assert found == [False, False, True] * 2


def test_layers_that_share_a_weight_count_each_step_once() -> None:
    layers = {"first": nn.Linear(16, 16), "second": nn.Linear(16, 16), "head": nn.Linear(16, 2)}
    layers["second"].weight = layers["first"].weight
    model: Any = quantize_model(nn.ModuleDict(layers), CONFIG)
    assert model.first.moq is model.second.moq
    model.train()
    assert model.first.moq.seed.step == 1


def test_in_a_loop_without_a_trainer_stochastic_rounding_draws_with_each_train() -> None:
    model = net({**CONFIG, "quantize_algo": {"rounding": "stochastic", "scale": "absmax"}})
    drawn = []
    for _ in range(3):
        model.train()
        # Accumulation and checkpointing see one draw.
        for _ in range(2):
            assert torch.equal(model[0].quantized_weight(), expected(model[0]))
        drawn.append(model[0].quantized_weight().detach())
        model.eval()
        assert torch.equal(model[0].quantized_weight(), drawn[-1])
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(drawn))


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_may_evaluate_one_model() -> None:
    model, x = net().eval(), torch.randn(3, 16)
    wanted, wrong = model(x).detach(), list[str]()

    def evaluate() -> None:
        for _ in range(1000):
            try:
                with torch.no_grad():
                    if not torch.equal(model(x), wanted):
                        wrong.append("another result")
                model.eval()
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def evaluated(model: Any) -> None:
    model.eval()(torch.ones(3, 16))
    model.train()


def called_in_training(model: Any) -> None:
    model.train()(torch.ones(3, 16))


def its_state_loaded(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def quantized_anew(model: Any) -> None:
    quantize_model(dequantize_model(model), {**CONFIG, **ROUNDS})


ROUNDS: dict[str, Any] = {
    "activation_quantization": {"enabled": True},
    "quantize_algo": {"scale": "mse", "scale_refresh": 1, "rounding": "stochastic"},
}


def tensors_in(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, LayerState | InputObserver):
        for value in vars(part).values():
            yield from tensors_in(value)
    elif isinstance(part, dict | tuple | list):
        for value in part.values() if isinstance(part, dict) else part:
            yield from tensors_in(value)


@pytest.mark.parametrize("act", [evaluated, called_in_training, its_state_loaded, quantized_anew])
def test_a_model_that_was_in_inference_mode_trains_on(act: Callable[[Any], None]) -> None:
    trained = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        with mode():
            quantize_model(model, {**CONFIG, **ROUNDS})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.train()(torch.randn(3, 16)).square().sum().backward()
            optimizer.step()
            with mode():
                act(model)
            assert not any(tensor.is_inference() for tensor in tensors_in(model[0].moq))
        trained.append(model.state_dict())
    assert all(torch.equal(*pair) for pair in zip(*(state.values() for state in trained), strict=True))
