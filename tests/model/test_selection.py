"""Which layers a config quantizes where a model has convolutions, and on which grid."""

from typing import Any

import pytest
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ResNetModel
from transformers.pytorch_utils import Conv1D

from moq_hf import MoQConfig, MoQError, quantize_model
from moq_hf.grid import PerChannel, PerGroup, RowBlocks
from moq_hf.model.convert import quant_layers
from moq_hf.model.selection import take_inventory
from moq_hf.training.controller import MoQController

BITS: dict[str, Any] = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
CONVOLUTIONS = {**BITS, "quantize_convolutions": True}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 16), nn.Linear(16, 2))


def test_convolutions_are_left_alone_by_default() -> None:
    inventory = take_inventory(net(), MoQConfig.from_dict(BITS))
    assert list(inventory.layers) == ["2"] and inventory.left_out == {"3": None}
    summary = MoQController(inventory, MoQConfig.from_dict(BITS), 1000).summary()
    assert summary.startswith("1 linear layer in 1 block goes to 4 bits; quantized: ")
    assert summary.endswith(
        "; left in float: 3 (8.5 % of the parameters), and the convolution, which is 53.7 % of the parameters"
    )
    # Else they stand among the linear layers in model order.
    inventory = take_inventory(net(), MoQConfig.from_dict(CONVOLUTIONS))
    assert list(inventory.layers) == ["0", "2"] and inventory.blocks(inventory.layers) == {"0": ["0"], "2": ["2"]}


def test_the_last_layer_is_the_head_whatever_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1))
    assert list(take_inventory(model, MoQConfig.from_dict(BITS)).layers) == ["0"]
    assert list(quant_layers(quantize_model(model, CONVOLUTIONS))) == ["0", "1"]


def test_a_name_leaves_a_convolution_out() -> None:
    model = quantize_model(net(), {**CONVOLUTIONS, "modules_to_not_convert": ["0"]})
    assert list(quant_layers(model)) == ["2"]
    with pytest.raises(MoQError, match=r"matches no module; the linear layers and convolutions are 0, 2, 3"):
        quantize_model(net(), {**CONVOLUTIONS, "modules_to_not_convert": ["conv"]})


@pytest.mark.parametrize(
    ("groups", "linear", "convolution"),
    [
        ({"quantize_groups": 4}, RowBlocks(4), RowBlocks(4)),
        ({"quantize_groups": "per_channel"}, PerChannel(), PerChannel()),
        ({"quantize_group_size": 4}, PerGroup(4), PerChannel()),
    ],
)
def test_the_grid_of_a_convolution(groups: dict[str, Any], linear: Any, convolution: Any) -> None:
    controller = MoQController(net(), MoQConfig.from_dict({**CONVOLUTIONS, **groups}))
    assert controller.layers["0"].moq.grid.grouping == convolution
    assert controller.layers["2"].moq.grid.grouping == linear
    assert ("convolutions have one scale per channel" in controller.summary()) == ("quantize_group_size" in groups)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"quantize_groups": 4}, r"quantize_groups 4 .* 0 \(out_channels 10\), 2 \(out_features 6\); .* 1, 2, or"),
        ({"quantize_group_size": 5}, r"quantize_group_size 5 .* 1 \(in_features 8\), 2 \(in_features 16\); .* 2, 4, 8"),
    ],
)
def test_groups_that_do_not_divide_the_weights_are_refused(groups: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Linear(8, 16), Conv1D(6, 16), nn.Linear(6, 2))
    with pytest.raises(MoQError, match=says):
        quantize_model(model, {**CONVOLUTIONS, **groups})


def test_a_model_without_linear_layers_in_its_body_is_refused_with_a_proposal() -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    for model, says in (
        (ResNetForImageClassification(config), "no linear layer is left to quantize: classifier.1 is an output head"),
        (ResNetModel(config), "no linear layer is left to quantize: the model has none"),
    ):
        with pytest.raises(MoQError, match=f"{says}.*; quantize_convolutions: true would quantize convolutions"):
            quantize_model(model, BITS)
        assert quant_layers(quantize_model(model, CONVOLUTIONS))
    with pytest.raises(MoQError, match="quantize_convolutions: the model has no convolution"):
        quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), CONVOLUTIONS)
