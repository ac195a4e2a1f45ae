import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.func import functional_call, grad, hessian, stack_module_state, vmap
from torch.nn.utils import parametrizations
from transformers import BertForSequenceClassification
from transformers.pytorch_utils import Conv1D

from moq_hf import MoQError, QuantLinear, dequantize_model, quantize_model
from moq_hf import quantizer as q
from moq_hf.config import MoQConfig
from moq_hf.grid import Grid, PerChannel, RowBlocks
from moq_hf.model.convert import quant_layers
from moq_hf.model.selection import take_inventory
from moq_hf.training.controller import MoQController
from moq_hf.weight_matrix import from_rows, to_rows

CONFIG = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_groups": 4}
STOCHASTIC = {**CONFIG, "quantize_algo": {"rounding": "stochastic"}}


class Named(nn.Linear):
    """A subclass without a forward of its own, as libraries make them to tell layers apart."""


class Scaled(nn.Linear):
    """A subclass with a forward of its own, as a cosine layer or loralib's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 16 * super().forward(x)


class ScaledConv1D(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 16 * super().forward(x)


GRID = Grid(RowBlocks(4), full=None)


def net(*, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(kind(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def layer_of(model: nn.Module, index: int = 0) -> QuantLinear:
    layer = model.get_submodule(str(index))
    assert isinstance(layer, QuantLinear)
    return layer


def test_keeps_parameters_keys_and_hooks() -> None:
    model = net(kind=Named)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    assert quantize_model(model, CONFIG) is model
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert isinstance(model[0], QuantLinear) and isinstance(model[0], Named)
    assert type(model[0]).__name__ == "QuantNamed"
    # The last layer of a model that has no heads by name is its head.
    assert type(model[4]) is nn.Linear
    model(torch.randn(2, 8))
    assert seen == [1]
    assert "bits=4" in repr(model[0])


FORMS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 16), (5, 8)),
    "Conv1D": (lambda: Conv1D(16, 8), (5, 8)),
    "plain": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 9, 9)),
    "grouped": (lambda: nn.Conv2d(4, 8, (3, 2), stride=2, groups=2, bias=False), (2, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6, padding_mode="reflect"), (2, 6, 5, 5)),
    "dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"), (2, 2, 7, 7)),
    "one dimension": (lambda: nn.Conv1d(4, 6, 5, stride=2, padding=2, padding_mode="circular"), (2, 4, 12)),
    "one example": (lambda: nn.Conv1d(4, 6, 3), (4, 12)),
}


@pytest.mark.parametrize("name", FORMS)
def test_forward_is_the_definition_and_the_gradient_passes_straight_through(name: str) -> None:
    make, shape = FORMS[name]
    layer = make()
    plain = copy.deepcopy(layer)
    is_convolution = not isinstance(layer, nn.Linear | Conv1D)
    config = {**CONFIG, "quantize_groups": "per_channel", "quantize_convolutions": is_convolution}
    quantize_model(nn.Sequential(layer), {**config, "quantize_heads": True})
    matrix = to_rows(plain.weight.detach(), layer.moq.kind)
    grid = Grid(PerChannel(), full=None)
    matrix = q.fake_quantize(matrix, 4, grid, ratio=q.least_squares_ratio(matrix, 4, grid))
    plain.weight = nn.Parameter(from_rows(matrix, layer.moq.kind, plain.weight.shape).contiguous())
    inputs = torch.randn(shape)
    found, wanted = layer(inputs), plain(inputs)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, plain.weight.grad)


def test_is_differentiable_twice_and_by_torch_func() -> None:
    layer = layer_of(quantize_model(net().double(), {**CONFIG, "quantize_algo": {"scale": "absmax"}}))
    x = torch.randn(5, 8, dtype=torch.float64)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight.T).pow(2).sum()

    def quantized_loss(weight: torch.Tensor) -> torch.Tensor:
        parameters = {"weight": weight, "bias": torch.zeros(16).double()}
        return torch.tanh(torch.func.functional_call(layer, parameters, x)).pow(2).sum()

    vector = torch.randn(16, 8, dtype=torch.float64)
    at = q.fake_quantize(layer.weight, 4, GRID)
    exact = torch.autograd.functional.hvp(loss, at, vector)[1]
    assert torch.allclose(torch.autograd.functional.hvp(quantized_loss, layer.weight.detach(), vector)[1], exact)
    by_func = torch.func.vjp(torch.func.grad(quantized_loss), layer.weight.detach())[1](vector)[0]
    assert torch.allclose(by_func, exact)


def test_weights_that_a_model_adds_have_gradients_of_their_own() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)), CONFIG)
    first, second = layer_of(model), model[1]
    (torch.randn(5, 8) @ (first.quantized_weight() + second.quantized_weight())).sum().backward()
    assert first.weight.grad.data_ptr() != second.weight.grad.data_ptr()


# Dynamo itself instantiates the autograd function that it traces (torch 2.13); drop this when it no longer does.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_bits_change_without_recompiling() -> None:
    """At 1 and 2 bits, which are not rounded at random, the graph is looked at in test_triton_quant.py."""
    model = quantize_model(net(), STOCHASTIC)
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=frames, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    x = torch.randn(5, 8)
    for bits in (32, *range(16, 2, -1)):
        for layer in quant_layers(model).values():
            layer.set_bits(bits)
            layer.moq.blend = bits / 100
            layer.moq.seed = layer.moq.seed._replace(step=bits)
        out = compiled(x)
        assert torch.equal(out, model(x))
        out.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert frames.frame_count == 1
    torch._dynamo.reset()


ROWS = torch.randn(3, 8, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, str]] = {
    "linear": (lambda: nn.Linear(8, 8), ROWS, "QuantLinear(in_features=8, out_features=8, bias=True, bits=4)"),
    "a subclass": (lambda: Named(8, 8), ROWS, "QuantNamed(in_features=8, out_features=8, bias=True, bits=4)"),
    "Conv1D": (lambda: Conv1D(8, 8), ROWS, "QuantConv1D(nf=8, nx=8, bits=4)"),
    "convolution": (lambda: nn.Conv1d(8, 8, 1), ROWS, "QuantConv1d(8, 8, kernel_size=(1,), stride=(1,), bits=4)"),
    "table": (lambda: nn.Embedding(9, 8), torch.arange(9), "QuantEmbedding(9, 8, bits=4)"),
}

MORE: dict[str, dict[str, Any]] = {
    "convolution": {"quantize_convolutions": True},
    "table": {"quantize_embeddings": 4},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_are_independent_and_layers_become_what_they_were(kind: str) -> None:
    make, x, told = LAYERS[kind]
    model = nn.Sequential(make(), nn.Linear(8, 8), nn.Linear(8, 2))
    before, plain = model(x), type(model[0])
    quantize_model(model, {**STOCHASTIC, **MORE.get(kind, {})})
    out = model(x)
    assert repr(model[0]) == told and not torch.equal(out, before)
    for clone in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copied = clone(model)
        assert torch.equal(copied(x), out) and type(copied[0]) is type(model[0])
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.5, fused=True)
        copied(x).sum().backward()
        optimizer.step()
        assert torch.equal(model(x), out) and not torch.equal(copied(x), out)
    back = dequantize_model(copy.deepcopy(model), weights="float")
    assert type(back[0]) is plain and torch.equal(back(x), before)
    # Of a folder that is unpacked while loading, transformers makes a plain model, too.
    for _ in range(2):
        assert torch.equal(dequantize_model(model)(x), out) and type(model[0]) is plain
    with pytest.raises(MoQError, match="weights must be one of quantized, float, got 'int8'"):
        dequantize_model(model, weights="int8")  # type: ignore[arg-type]


def test_quantizing_again_follows_the_new_config() -> None:
    model = quantize_model(net(), {**CONFIG, "quantize_heads": True})
    assert list(quant_layers(model)) == ["0", "2", "4"]
    quantize_model(model, {**CONFIG, "modules_to_not_convert": ["2"]})
    assert list(quant_layers(model)) == ["0"]
    quantize_model(model, {**CONFIG, "enabled": False})
    assert list(quant_layers(model)) == []


def chosen(model: nn.Module, *names: str) -> set[str]:
    config: dict[str, Any] = {**CONFIG, "quantize_groups": "per_channel"}
    if names:
        config["modules_to_not_convert"] = list(names)
    return set(take_inventory(model, MoQConfig.from_dict(config)).layers)


def test_names_and_globs_leave_layers_out(tiny_bert: BertForSequenceClassification) -> None:
    every = chosen(tiny_bert)
    assert len(every) == 13 and "classifier" not in every
    first = {name for name in every if ".layer.1." in name}
    assert chosen(tiny_bert, "bert.encoder.layer.1") == every - first == chosen(tiny_bert, "layer.1")
    assert chosen(tiny_bert, "*.layer.1.*") == every - first
    assert chosen(tiny_bert, "query", "classifier") == {n for n in every if "query" not in n}
    # Naming a module without linear layers is no mistake.
    assert chosen(tiny_bert, "bert.embeddings") == every


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_weights_stay_in_float_and_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    controller = MoQController(model, MoQConfig.from_dict(CONFIG))
    assert list(controller.layers) == ["2"] and "left in float, an empty weight: 0, 1" in controller.summary()
    assert model(torch.randn(3, 8)).shape == (3, 2)


OLD_WEIGHT_NORM = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


@pytest.mark.parametrize(
    "first, reason",
    [
        (lambda: Scaled(8, 16), "its own forward"),
        (lambda: ScaledConv1D(16, 8), "its own forward"),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 16)), "a computed weight"),
        (lambda: parametrizations.spectral_norm(nn.Linear(8, 16)), "a computed weight"),
        pytest.param(
            lambda: nn.utils.weight_norm(nn.Linear(8, 16)), "a computed weight", marks=OLD_WEIGHT_NORM, id="old"
        ),
    ],
)
def test_what_a_change_of_class_would_break_stays_in_float_and_is_named(first: Any, reason: str) -> None:
    model = net().eval()
    model[0] = first().eval()
    x = torch.randn(3, 8)
    kind, before = type(model[0]), model[0](x)
    controller = MoQController(model, MoQConfig.from_dict(CONFIG))
    quantize_model(model, CONFIG)
    assert list(controller.layers) == list(quant_layers(model)) == ["2"]
    assert type(model[0]) is kind and torch.equal(model[0](x), before)
    told = rf"; left in float, {reason}: 0( \([\d.]+ % of the parameters\))?; left in float: 4"
    assert re.search(told, controller.summary())
    after = model(x)
    assert torch.equal(dequantize_model(model)(x), after)
    named = {**CONFIG, "modules_to_not_convert": ["0", "4"]}
    assert list(quant_layers(quantize_model(model, named))) == ["2"]
    with pytest.raises(MoQError, match=f"no linear layer is left to quantize: 0 has {reason}"):
        quantize_model(nn.Sequential(first()), CONFIG)


class Dispatching(torch.Tensor):
    """As torchao's: a dtype of floats, and operators of its own."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Dispatching":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, values: torch.Tensor) -> None:
        self.values_inside = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_inside)
        raise RuntimeError(f"{func} is not implemented")


SQUARE = torch.ones(16, 16)
NO_FLOATS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "float8": (lambda: SQUARE.to(torch.float8_e4m3fn), "a weight of float8_e4m3fn"),
    "float4": (
        lambda: SQUARE.to(torch.uint8).view(torch.float4_e2m1fn_x2),
        "a weight of float4_e2m1fn_x2",
    ),
    "int8": (lambda: SQUARE.to(torch.int8), "a weight of int8"),
    "uint4": (lambda: SQUARE.to(torch.uint8).view(torch.uint4), "a weight of uint4"),
    "complex": (lambda: SQUARE.to(torch.complex64), "a weight of complex64"),
    "sparse": (SQUARE.to_sparse, "a weight in the layout sparse_coo"),
    "nested": (
        lambda: torch.nested.nested_tensor([SQUARE, SQUARE], layout=torch.jagged),
        "a weight in the layout nested",
    ),
    "subclass": (lambda: Dispatching(SQUARE), "a weight of test_quant_linear's class Dispatching"),
}


@pytest.mark.parametrize("kind", NO_FLOATS)
def test_weights_that_are_no_floats_in_plain_memory_are_told(kind: str) -> None:
    make, reason = NO_FLOATS[kind]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    model[0].weight = nn.Parameter(make(), requires_grad=False)
    says = rf"these layers cannot be quantized: {re.escape(reason)} \(0\): start from a model in float32, .* or name"
    for prepare in (quantize_model, lambda *given: MoQController(given[0], MoQConfig.from_dict(given[1]))):
        with pytest.raises(MoQError, match=says):
            prepare(model, CONFIG)
    assert not quant_layers(model)
    # How many numbers a nested tensor has, PyTorch does not say.
    if kind != "nested":
        quantize_model(model, {**CONFIG, "modules_to_not_convert": ["0"]})
        assert list(quant_layers(model)) == ["1"]


@pytest.mark.parametrize("lazy", [nn.LazyLinear, nn.LazyConv1d, nn.LazyBatchNorm1d])
def test_a_model_that_does_not_know_its_sizes_yet_is_told(lazy: Any) -> None:
    sizes = {nn.LazyLinear: (8,), nn.LazyConv1d: (4, 1), nn.LazyBatchNorm1d: ()}[lazy]
    model = nn.Sequential(lazy(*sizes), nn.Linear(8, 8), nn.Linear(8, 2))
    for prepare in (quantize_model, lambda *given: MoQController(given[0], MoQConfig.from_dict(given[1]))):
        for config in (CONFIG, {**CONFIG, "modules_to_not_convert": ["0"]}):
            with pytest.raises(MoQError, match=r"^0\.weight, 0\.bias: no shape before the first call: call the"):
                prepare(model, config)
    model(torch.randn(4, 4, 8))
    assert len(quant_layers(quantize_model(model, CONFIG))) == 1 + (lazy is nn.LazyLinear)


# PyTorch's own, when it loads its rules for forward mode.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_weights_that_vmap_stacks_are_told() -> None:
    models = [quantize_model(net(), CONFIG) for _ in range(2)]
    stacked, _ = stack_module_state(models)
    x = torch.randn(3, 8)

    def answer(parameters: Any) -> torch.Tensor:
        return functional_call(models[0], parameters, (x,))  # type: ignore[no-any-return]

    says = r"^0\.weight cannot be quantized inside this transform of torch\.func .*call the models one by one"
    for act in (
        lambda: vmap(answer)(stacked),
        lambda: vmap(grad(lambda parameters: answer(parameters).sum()))(stacked),
        lambda: hessian(lambda parameters: answer(parameters).sum())(dict(models[0].named_parameters())),
    ):
        with pytest.raises(MoQError, match=says):
            act()
    # Inputs may be stacked.
    assert vmap(models[0])(x[None]).shape == (1, 3, 4)


def test_a_parametrization_that_comes_too_late_is_told() -> None:
    model = quantize_model(net(), CONFIG)
    parametrizations.weight_norm(model[0])
    with pytest.raises(MoQError, match="0: the weight has been parametrized since the layer was quantized"):
        quantize_model(model, CONFIG)


def test_a_head_with_a_forward_of_its_own_is_the_head_still() -> None:
    model = net()
    model[4] = Scaled(8, 4)
    assert list(quant_layers(quantize_model(model, CONFIG))) == ["0", "2"]
    # Nor is the last quantized layer taken for a head where the config names the real one.
    controller = MoQController(net(), MoQConfig.from_dict({**CONFIG, "modules_to_not_convert": ["4"]}))
    assert [note for note in controller.warnings() if "output heads" in note] == []


def test_a_table_with_a_computed_weight_stays_in_float() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), parametrizations.weight_norm(nn.Embedding(9, 8)), *net())
    config = MoQConfig.from_dict({**CONFIG, "quantize_embeddings": 8})
    controller = MoQController(model, config)
    assert list(controller.embeddings) == ["0"] and "left in float, a computed weight: 1" in controller.summary()


@pytest.mark.parametrize(
    "change, fragments",
    [
        ({"modules_to_not_convert": ["clasifier"]}, ["'clasifier' matches no module", "0, 2, 4"]),
        (
            {"modules_to_not_convert": ["*"]},
            ["no linear layer is left to quantize: 0 is in modules_to_not_convert, 2 is in", "4 is in"],
        ),
        ({"quantize_groups": 5}, ["quantize_groups 5", "0 (out_features 16), 2 (out_features 8)", "2, 4, 8"]),
        (
            {"quantize_groups": "per_channel", "quantize_group_size": 5},
            ["quantize_group_size 5", "0 (in_features 8)", "2, 4, 8"],
        ),
    ],
)
def test_what_does_not_fit_is_told_and_changes_nothing(change: dict[str, Any], fragments: list[str]) -> None:
    model = net()
    with pytest.raises(MoQError) as error:
        quantize_model(model, {**CONFIG, **change})
    assert all(fragment in str(error.value) for fragment in fragments), error.value
    assert not quant_layers(model)


def test_models_that_cannot_be_quantized_are_told() -> None:
    with pytest.raises(MoQError, match="no linear layer is left to quantize: the model has none"):
        quantize_model(nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU()), CONFIG)
    model = net()
    model[2].weight.data[1, 1] = float("nan")
    with pytest.raises(MoQError, match=r"NaN or Inf in 2\.weight"):
        quantize_model(model, CONFIG)
    assert not quant_layers(model)
