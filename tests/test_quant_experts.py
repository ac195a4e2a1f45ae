"""Experts: whoever reads their parameters in a forward pass gets the quantized ones, of each expert by itself."""

import copy
import pickle
from typing import Any

import pytest
import torch
from experts import FAMILIES, IDS, PAIR, SHAPE, at_bits, mixture
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moq_hf import MoQError, dequantize_model, quantize_model, quantizer
from moq_hf.config import MoQConfig
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory
from moq_hf.model.selection import take_inventory
from moq_hf.quant_linear import QuantModule, quantized_in
from moq_hf.training.measuring import measuring
from moq_hf.weight_matrix import from_rows, parameter_of, to_rows

GROUPS = {"quantize_group_size": 16}
WEIGHT = "model.layers.0.mlp.experts.down_proj"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def quantized(name: str = "Mixtral", **more: Any) -> Any:
    return quantize_model(mixture(name), at_bits(4, **(more or GROUPS)))


def by_hand(model: nn.Module, plain: Any) -> Any:
    """The plain model with what `quantizer` makes of its weights."""
    parameters = dict(plain.named_parameters())
    for name, layer in quant_layers(model).items():
        own, state = parameters[parameter_of(name, layer.kind)], layer.moq
        matrix = to_rows(own.detach(), layer.kind)
        values = quantizer.fake_quantize(matrix, state.bits, state.grid, ratio=state.ratio, seed=state.seed)
        own.data.copy_(from_rows(values, layer.kind, own.shape))
    return plain


@pytest.mark.parametrize("name", FAMILIES)
def test_every_implementation_computes_with_the_quantized_experts(name: str) -> None:
    plain, model = mixture(name), mixture(name)
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    quantize_model(model, at_bits(4, **GROUPS))
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == parameters
    layers = quant_layers(model)
    experts = [name for name, layer in layers.items() if layer.kind.startswith("experts")]
    three = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    assert experts == three and all(f"{n}.weight" in names for n in layers.keys() - set(experts))
    assert not any("gate.weight" in name or "router" in name for name in layers)
    # Each parameter draws its own random numbers.
    assert len({layer.moq.seed.layer for layer in layers.values()}) == len(layers)
    by_hand(model, plain)
    for one in (model, plain):
        one.train()
        one.config.use_cache = False
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        found = []
        for one in (model, plain):
            one.config._experts_implementation = implementation
            one.zero_grad()
            output = one(IDS, labels=IDS)
            output.loss.backward()
            found.append([output.logits, *(p.grad for p in one.parameters() if p.grad is not None)])
        # The gradient of the quantized weight, straight through.
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), implementation


@pytest.mark.parametrize("grid", [GROUPS, {"quantize_groups": 1}, {"quantize_groups": "per_channel"}])
@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_no_two_experts_share_a_scale(name: str, grid: dict[str, Any]) -> None:
    model = quantized(name, **grid)
    layer = quant_layers(model)[WEIGHT]
    before = layer.quantized_weight().detach()
    layer.float_weight.data[1] *= 9
    after = layer.quantized_weight().detach()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]]) and not torch.equal(after[1], before[1])
    scales = layer.moq.grid.shape(*layer.matrix_shape)
    assert scales[0] % 4 == 0 and after.shape == layer.float_weight.shape
    if grid == {"quantize_groups": 1}:
        assert scales == (4, 1)


def test_copies_pickles_and_what_changes_the_weights() -> None:
    model = quantized()
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), expected)
        assert quant_layers(other)[WEIGHT].float_weight is other.get_parameter(WEIGHT)
        other.get_parameter(WEIGHT).data.zero_()
        other.train().eval()
        assert not torch.equal(logits(other), expected)
    assert torch.equal(logits(model), expected)
    handle = quant_layers(model)[WEIGHT]
    copied = copy.deepcopy(handle)
    assert handle == quant_layers(model)[WEIGHT] != copied
    assert torch.equal(copied.quantized_weight(), handle.quantized_weight())

    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    layer = quant_layers(model)[WEIGHT]
    assert torch.equal(logits(model), logits(by_hand(model, _doubled())))
    old = layer.quantized_weight().detach()
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(layer.quantized_weight(), old)
    model.to(torch.bfloat16)
    assert layer.quantized_weight().dtype == torch.bfloat16
    assert "is quantized" not in repr(model) and "QuantMixtralExperts" in repr(model)


def _doubled() -> nn.Module:
    plain = mixture()
    plain.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
    return plain


def test_dequantized_and_quantized_again() -> None:
    plain, model = mixture(), quantized()
    experts = model.model.layers[0].mlp.experts
    cls, floats = type(plain.model.layers[0].mlp.experts), logits(plain)
    expected = logits(model)
    assert isinstance(experts, QuantModule) and len(quantized_in("", experts)) == 2
    quantize_model(model, at_bits(4, modules_to_not_convert=["layers.0", "gate_up_proj", "lm_head"], **GROUPS))
    assert type(experts) is cls and "model.layers.1.mlp.experts.down_proj" in quant_layers(model)
    # The one that stays in float is read as it is.
    left = model.model.layers[1].mlp.experts
    assert left.gate_up_proj is left._parameters["gate_up_proj"] and len(left.moq_states) == 1
    logits(model)
    quantize_model(model, at_bits(4, **GROUPS))
    assert torch.equal(logits(model), expected)
    again = dequantize_model(copy.deepcopy(model), weights="float")
    assert torch.equal(logits(again), floats) and not quant_layers(again)
    assert torch.equal(logits(dequantize_model(model)), expected) and type(experts) is cls


def test_replicas_functional_calls_and_autocast() -> None:
    model = quantized()
    experts = model.model.layers[0].mlp.experts
    replica: Any = experts._replicate_for_data_parallel()
    for name, parameter in experts._parameters.items():
        setattr(replica, name, parameter.detach().clone())
    inputs = (torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
    assert torch.equal(replica(*inputs), experts(*inputs))
    del replica.__dict__["down_proj"]
    with pytest.raises(AttributeError, match="down_proj"):
        replica(*inputs)
    with torch.no_grad():
        called = functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (IDS,))
    assert torch.equal(called.logits, logits(by_hand(model, _doubled())))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), logits(by_hand(model, mixture())))


def test_a_compiled_model_computes_the_same() -> None:
    model = quantized()
    model.config._experts_implementation = "batched_mm"
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled), logits(model))
    with torch.no_grad():
        model.get_parameter(WEIGHT).mul_(2)
    model.train().eval()
    assert torch.equal(logits(compiled), logits(model))
    torch._dynamo.reset()


def test_measured_with_the_quantized_weights() -> None:
    model = quantized()
    expected = logits(model)
    weight, copied = model.get_parameter(WEIGHT), quant_layers(model)[WEIGHT].quantized_weight().detach()
    with measuring(model, {"block": [weight]}) as blocks:
        (stand_in,) = blocks["block"]
        assert stand_in is not weight and torch.equal(stand_in, copied)
        assert model.model.layers[0].mlp.experts.down_proj is stand_in
        torch.testing.assert_close(model(IDS).logits, expected)
    assert model.get_parameter(WEIGHT) is weight and torch.equal(logits(model), expected)


def test_what_is_wrong_is_named() -> None:
    model = quantized()
    model.get_parameter(WEIGHT).data[2, 1, 1] = float("nan")
    with pytest.raises(MoQError, match=f"NaN or Inf in {WEIGHT}:"):
        quantize_model(model, at_bits(4, **GROUPS))
    assert not quant_layers(model)
    with pytest.raises(MoQError, match=r"the inputs of experts cannot be quantized .*gate_up_proj"):
        quantize_model(mixture(), at_bits(4, activation_quantization={"enabled": True}))
    only = {"modules_to_not_convert": ["self_attn", "lm_head"]}
    with pytest.raises(MoQError, match=r"quantize_group_size 48 .*experts.gate_up_proj \(in_features 32\)"):
        quantize_model(mixture(), at_bits(4, quantize_group_size=48, **only))
    assert len(quant_layers(quantize_model(mixture(), at_bits(4, quantize_groups=8, **only)))) == 4


def inventory_of(model: nn.Module, **more: Any) -> Inventory:
    return take_inventory(model, MoQConfig.from_dict(at_bits(4, **more)))


def test_named_experts_stay_in_float() -> None:
    found = inventory_of(mixture(), modules_to_not_convert=["experts"], quantize_heads=True)
    assert found.experts == {} and "lm_head" in found.layers


def experts_in_one() -> nn.ModuleDict:
    experts = mixture().model.layers[0].mlp.experts
    return nn.ModuleDict({"router": nn.Linear(32, 4), "dense": nn.Linear(4, 5), "experts": experts})


def experts_in_a_list() -> nn.ModuleDict:
    """As Switch Transformers and much code on the Hub have them."""
    attention = nn.ModuleDict({"key": nn.Linear(32, 4)})
    experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(4))
    parts = {"gate": nn.Linear(32, 4), "dense": nn.Linear(32, 8), "attention": attention, "experts": experts}
    return nn.ModuleDict(parts)


def test_routers_stay_in_float() -> None:
    qwen = Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SHAPE, **PAIR, intermediate_size=32, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            num_experts=4,
        )
    )  # fmt: skip
    found = inventory_of(qwen)
    routing = [name for name, reason in found.left_out.items() if reason == "routes to experts"]
    assert routing == [f"model.layers.{i}.mlp.shared_expert_gate" for i in (0, 1)]
    assert len(found.experts) == 4 and "model.layers.0.mlp.shared_expert.up_proj" in found.layers
    for block, router, kept in (
        (experts_in_one(), "router", ["dense", "experts.gate_up_proj", "experts.down_proj"]),
        (experts_in_a_list(), "gate", ["dense", "attention.key", *(f"experts.{number}" for number in range(4))]),
    ):
        found = inventory_of(nn.ModuleList([block, nn.Linear(5, 4)]))
        assert list(found.scheduled) == [f"0.{name}" for name in kept]
        assert found.left_out == {f"0.{router}": "routes to experts", "1": None}
        # So does that of a block by itself.
        assert inventory_of(block, quantize_heads=True).left_out == {router: "routes to experts"}
    with pytest.raises(MoQError, match="left to quantize: router routes to experts, dense is in modules_to_not"):
        quantize_model(experts_in_one(), at_bits(4, modules_to_not_convert=["dense", "experts"]))
