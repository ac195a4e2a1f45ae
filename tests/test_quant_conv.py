"""Convolutions are quantized as matrices `[out_channels, in_channels / groups * kernel]`, in training and in files."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_runs import arguments
from torch import nn
from torch.nn.utils import parametrizations

from moq_hf import MoQCallback, MoQConfig, quantize_model, save_quantized, verify_quantized
from moq_hf import quantizer as q
from moq_hf.export.compare import load_floats
from moq_hf.grid import Grid, PerChannel
from moq_hf.model.convert import quant_layers
from moq_hf.packed.reading import stored_weights
from moq_hf.training.controller import MoQController

CONFIG: dict[str, Any] = {
    "quantize_bits": {"start_bits": 4, "target_bits": 4},
    "quantize_groups": "per_channel",
    "quantize_convolutions": True,
    "quantize_heads": True,
}
RUN: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 4,
    "quantize_algo": {"scale_refresh": 3, "rounding": "stochastic"},
    "quantize_convolutions": True,
}
GRID = Grid(PerChannel(), full=None)


def resnet() -> hf.ResNetForImageClassification:
    hf.set_seed(0)
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2)
    return hf.ResNetForImageClassification(config)


def vit() -> hf.ViTForImageClassification:
    hf.set_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=8))


def rows(count: int = 8) -> list[dict[str, Any]]:
    pictures = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return [{"pixel_values": picture, "labels": index % 2} for index, picture in enumerate(pictures)]


def test_a_weight_in_another_memory_format_is_the_same() -> None:
    model = quantize_model(nn.Sequential(nn.Conv2d(4, 8, 3)), CONFIG)
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert not other[0].float_weight.is_contiguous()
    for _ in range(2):
        assert torch.equal(other[0].quantized_weight(), model[0].quantized_weight())
        with torch.no_grad():
            model[0].weight.mul_(2)
            other[0].weight.mul_(2)


def test_inputs_stay_in_float_and_a_run_says_so() -> None:
    config = MoQConfig.from_dict(
        {**RUN, "activation_quantization": {"enabled": True}, "quantize_schedule": {"quantize_period": 1}}
    )
    model = vit()
    controller = MoQController(model, config)
    assert "6 linear layers and 1 convolution in 2 blocks" in controller.summary()
    assert "the inputs of linear layers to 8 bits" in controller.summary()
    assert "activation_quantization is for linear layers: the inputs of convolutions stay in float" in "\n".join(
        controller.warnings()
    )
    projection = model.vit.embeddings.patch_embeddings.projection
    pictures = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        weight = projection.quantized_weight()
        wanted = nn.functional.conv2d(pictures, weight, projection.bias, stride=8)
        assert torch.equal(projection(pictures), wanted)


@pytest.mark.parametrize("make", [resnet, vit])
def test_a_run_is_delivered_as_it_was_evaluated(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = hf.Trainer(model, arguments(tmp_path, max_steps=6), train_dataset=rows(), callbacks=[MoQCallback(RUN)])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    layers = quant_layers(model)
    convolutions = [name for name, layer in layers.items() if layer.kind == "conv"]
    assert convolutions and {layer.moq.bits for layer in layers.values()} == {3}
    assert not any(torch.equal(before[f"{name}.weight"], layer.float_weight) for name, layer in layers.items())
    folder = tmp_path / "quantized"
    found = verify_quantized(folder, model)
    assert found.proof is not None and found.proof.agrees is True and found.proof.largest_difference == 0.0
    assert found.state["layout"] == ("floats" if make is resnet else "packed") and found.state["reason"] is None
    assert [name for name, layer in found.layers.items() if layer.kind == "conv"] == convolutions
    for name in convolutions:
        stored = found.layers[name]
        assert (stored.stored, stored.bits, stored.bytes) == ("dense", 3, stored.bytes_before)
        assert stored.shape == layers[name].matrix_shape and stored.scales == (4, 1)
    # Before the first step, and not again after the last one.
    why = "saved as rounded floats, at full size: convolutions are integers only in the ONNX export"
    said = [record.message for record in caplog.records if "at full size" in record.message]
    which = "every quantized layer is" if make is resnet else "these layers are"
    assert len(said) == 1 and f"{which} {why}" in said[0]
    card = (folder / "README.md").read_text()
    what = "convolutions" if make is resnet else "linear layers and convolutions"
    assert f"the weights of its {what} were quantized" in card and "could not load them packed" not in card
    plain = type(model).from_pretrained(folder).eval()
    pictures = torch.stack([row["pixel_values"] for row in rows()])
    with torch.no_grad():
        assert torch.equal(plain(pictures).logits, model.eval()(pictures).logits)


def test_the_integers_are_found_again_in_floats_on_the_grid(tmp_path: Path) -> None:
    model = quantize_model(vit(), {**CONFIG, "quantize_type": "asymmetric", "quantize_heads": False})
    save_quantized(model, tmp_path)
    found = stored_weights(tmp_path)
    assert found.keys() == quant_layers(model).keys()
    name = "vit.embeddings.patch_embeddings.projection"
    codes, scale, zero = found[name]
    weight = quant_layers(model)[name].quantized_weight().detach()
    assert torch.equal(q.dequantize(codes, scale, zero).view(weight.shape), weight)
    assert int(codes.min()) >= -8 and int(codes.max()) <= 7
    loaded = load_floats(tmp_path)
    assert torch.equal(loaded.get_submodule(name).weight, weight)


def test_a_computed_weight_and_other_convolutions_stay_in_float() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 4, 3),
        parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        nn.ConvTranspose1d(4, 4, 3),
        nn.Linear(4, 2),
    )
    controller = MoQController(model, MoQConfig.from_dict({**CONFIG, "quantize_heads": False}))
    assert list(controller.layers) == ["0"]
    assert controller.inventory.left_out == {
        "1": "has a computed weight",
        "2": "has the class ConvTranspose1d",
        "3": None,
    }
    assert "left in float, the class ConvTranspose1d: 2" in controller.summary()


def test_groups_of_linear_layers_behind_a_convolution_are_unpacked_while_loading(tmp_path: Path) -> None:
    """A convolution that comes first has a scale per channel, which is not the grid of the others."""
    config = {**CONFIG, "quantize_type": "asymmetric", "quantize_heads": False}
    model = quantize_model(vit(), {**config, "quantize_group_size": 16}).eval()
    save_quantized(model, tmp_path)
    assert verify_quantized(tmp_path, model).state["layout"] == "unpacked"
    pictures = torch.stack([row["pixel_values"] for row in rows()])
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(tmp_path).eval()(pictures).logits, model(pictures).logits)
