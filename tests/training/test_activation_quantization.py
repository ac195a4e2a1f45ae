"""Inputs of quantized layers on a grid: the numbers, the gradient, when it begins, what a resumed run does."""

import re
from typing import Any

import families
import model_zoo
import pytest
import torch
from torch import nn

from moq_hf import MoQConfig, MoQError, dequantize_model, quantize_model
from moq_hf.forecast import plan
from moq_hf.grid import InputGrid
from moq_hf.inputs import fake_quantize_input
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory
from moq_hf.model.selection import take_inventory
from moq_hf.training.controller import MoQController


def config_of(**activation: Any) -> dict[str, Any]:
    return {
        "quantize_bits": {"start_bits": 8, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "activation_quantization": {"enabled": True, **activation},
    }


def active(controller: MoQController) -> set[bool]:
    return {layer.moq.inputs is not None and layer.moq.inputs.active for layer in controller.layers.values()}


def test_layer_multiplies_rounded_inputs_and_passes_the_gradient_through() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    quantize_model(model, config_of(bits=4, scale="per_token") | {"quantize_heads": True})
    x = torch.randn(3, 16, requires_grad=True)
    layer: Any = model[0]
    layer(x).sum().backward()
    rounded = fake_quantize_input(x, InputGrid(4, "per_token"))
    weight = layer.quantized_weight().detach()
    assert torch.equal(layer(x), nn.functional.linear(rounded, weight, layer.bias))
    assert not torch.equal(rounded, x)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 16))
    torch.testing.assert_close(layer.weight.grad, rounded.sum(0).expand(8, 16))
    dequantize_model(model)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, layer.bias))


def test_begins_at_its_step_and_a_resumed_run_knows(tiny_bert: nn.Module, tiny_batch: dict[str, torch.Tensor]) -> None:
    controller = MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=7, start_step=3)), total_steps=9)
    found = []
    for _ in range(5):
        found.append(active(controller))
        assert controller.has_arrived == (found[-1] == {True})
        controller.step()
    assert found == [{False}, {False}, {False}, {True}, {True}]
    state = controller.state_dict()
    before = tiny_bert.eval()(**tiny_batch).logits
    other = MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=7, start_step=3)), total_steps=9)
    assert active(other) == {False}
    other.load_state_dict(state)
    assert torch.equal(tiny_bert(**tiny_batch).logits, before)
    with pytest.raises(MoQError, match=r"activation_quantization\.bits: 7 -> 8"):
        MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=8, start_step=3)), 9).load_state_dict(state)


def test_overrides_say_how_the_inputs_of_layers_are_rounded(tiny_bert: Any) -> None:
    overrides = {
        "*.attention.*": {"activations": {"scale": "static", "symmetric": False}},
        "*.intermediate.dense": {"activations": 4},
        "*.layer.0.output.dense": {"activations": False},
    }
    config = MoQConfig(bits=8, activations={"scale": "per_token"}, overrides=overrides, embeddings=None)  # type: ignore[arg-type]
    layers = quant_layers(quantize_model(tiny_bert, config))
    grids = {name: layer.moq.inputs and layer.moq.inputs.grid for name, layer in layers.items()}
    assert grids["bert.encoder.layer.0.attention.self.key"] == InputGrid(8, "static", symmetric=False)
    assert grids["bert.encoder.layer.0.intermediate.dense"] == InputGrid(4, "per_token")
    assert grids["bert.encoder.layer.0.output.dense"] is None
    assert grids["bert.encoder.layer.1.output.dense"] == InputGrid(8, "per_token")
    # They may also be what switches it on, and a start is for all.
    config = MoQConfig(
        bits=8, activations={"enabled": False, "start_step": 1}, overrides={"pooler": {"activations": 8}}
    )  # type: ignore[arg-type]
    controller = MoQController(tiny_bert, config, total_steps=4)
    inputs: Any = quant_layers(tiny_bert)["bert.pooler.dense"].moq.inputs
    assert [name for name, layer in controller.layers.items() if layer.moq.inputs is not None] == ["bert.pooler.dense"]
    assert not inputs.active and not controller.has_arrived
    controller.step()
    assert inputs.active and controller.has_arrived
    assert "the inputs of linear layers to float; pooler: 8 bits (static) after 1 steps" in controller.summary()
    with pytest.raises(MoQError, match="start_step: 5 is not reached"):
        plan({"bits": 8, "activations": {"enabled": False, "start_step": 5}, "overrides": overrides}, 5)


@pytest.mark.parametrize(
    ("family", "task", "wide"),
    [
        ("BERT", "masked LM", r"layer\.\d\.output\.dense"),
        ("DistilBERT", "masked LM", r"ffn\.lin2"),
        ("ALBERT", "masked LM", r"ffn_output"),
        ("MPNet", "masked LM", r"layer\.\d\.output\.dense"),
        ("GPT-2", "causal LM", r"mlp\.c_proj"),
        ("Llama", "causal LM", r"mlp\.down_proj"),
        ("T5", "sequence to sequence", r"DenseReluDense\.wo"),
        ("ViT", "image classification", r"mlp\.fc2"),
        ("ModernBERT", "masked LM", r"mlp\.Wo"),
    ],
)
def test_the_widest_layers_of_blocks_are_second_products(family: str, task: str, wide: str) -> None:
    inventory = take_inventory(model_zoo.new_model(family, task), MoQConfig(bits=4, embeddings=None))
    expected = {name for name in inventory.layers if re.search(rf"{wide}$", name)}
    assert expected and inventory.wide & inventory.layers.keys() == expected


@pytest.mark.parametrize(
    ("family", "wide"),
    [
        # Its experts are no linear layers, and keys and values of fewer heads are no second products.
        ("Mixtral", set()),
        ("Whisper", {"fc2"}),
        ("Qwen2-VL", {"fc2", "down_proj"}),
        ("Swin", {"fc2", "reduction"}),
    ],
)
def test_more_second_products(family: str, wide: set[str]) -> None:
    made = families.FAMILIES[family]
    inventory = Inventory.of(made.kind(made.config()))
    assert {name.rpartition(".")[2] for name in inventory.wide} == wide


def test_wide_bits_are_of_second_products_unless_an_override_says_otherwise(tiny_bert: Any) -> None:
    overrides = {"*.layer.0.output.dense": {"activations": 6}}
    section = {"bits": 4, "scale": "per_token", "wide_bits": 8}
    layers = quant_layers(quantize_model(tiny_bert, bits=4, activations=section, overrides=overrides, embeddings=None))
    bits = {name: layer.moq.inputs.grid.bits for name, layer in layers.items() if layer.moq.inputs is not None}
    assert bits.pop("bert.encoder.layer.0.output.dense") == 6 and bits.pop("bert.encoder.layer.1.output.dense") == 8
    assert {*bits.values()} == {4}


def test_wide_bits_of_no_layer_are_an_error(tiny_bert: Any) -> None:
    with pytest.raises(MoQError, match=r"activations: wide_bits 8 changes no layer: .* set it to null beside a preset"):
        quantize_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "w4a4", heads=True)
    with pytest.raises(MoQError, match="wide_bits 8 changes no layer"):
        quantize_model(tiny_bert, "w4a4", overrides={"*.output.dense": {"activations": 4}})
    quantize_model(tiny_bert, "w4a4", activations={"wide_bits": None}, modules_to_not_convert=["*.output.dense"])


def test_overrides_of_inputs_that_stay_float_are_an_error() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(8, 8))
    config = {"bits": 8, "convolutions": True, "heads": True, "overrides": {"0": {"activations": 8}}}
    with pytest.raises(MoQError, match="overrides: '0' means convolutions, whose inputs stay in float"):
        quantize_model(model, config)


def test_a_start_that_is_never_reached_is_an_error(tiny_bert: nn.Module) -> None:
    with pytest.raises(MoQError, match=r"activation_quantization\.start_step: 5 is not reached in 5 optimizer steps"):
        MoQController(tiny_bert, MoQConfig.from_dict(config_of(start_step=5)), total_steps=5)
    with pytest.raises(MoQError, match=r"start_step: 5 is not reached in 5 optimizer steps"):
        plan(config_of(start_step=5), 5)


def test_groups_in_a_row_keep_the_export_from_multiplying_integers(tiny_bert: Any) -> None:
    grouped = MoQConfig.from_dict({**config_of(), "quantize_group_size": 8})
    (note,) = MoQController(tiny_bert, grouped).warnings()
    assert "quantize_group_size weight-only" in note
    assert MoQController(tiny_bert, MoQConfig.from_dict(config_of())).warnings() == []
