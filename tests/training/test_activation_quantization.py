"""Inputs of quantized layers on a grid: the numbers, the gradient, when it begins, what a resumed run does."""

from typing import Any

import pytest
import torch
from torch import nn

from moq_hf import MoQConfig, MoQError, dequantize_model, quantize_model, quantizer
from moq_hf.model.convert import quant_layers
from moq_hf.plan import plan
from moq_hf.training.controller import MoQController


def config_of(**activation: Any) -> dict[str, Any]:
    return {
        "quantize_bits": {"start_bits": 8, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "activation_quantization": {"enabled": True, **activation},
    }


def test_one_scale_per_token() -> None:
    x = torch.tensor([[127.0, 1.4, -1.6], [0.0, 0.0, 0.0], [-12.7, 0.06, 6.0]])
    expected = torch.tensor([[127.0, 1.0, -2.0], [0.0, 0.0, 0.0], [-12.7, 0.1, 6.0]])
    torch.testing.assert_close(quantizer.fake_quantize_tokens(x, 8), expected)
    codes = quantizer.fake_quantize_tokens(torch.randn(5, 7, 64), 7) * 1.0
    scale = quantizer.token_scale(codes, 7)
    assert torch.allclose(codes / scale, (codes / scale).round(), atol=1e-4)
    assert (codes / scale).abs().max() <= 63.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_nothing_overflows(dtype: torch.dtype) -> None:
    x = torch.tensor([[torch.finfo(dtype).max / 2, 1.0], [torch.finfo(dtype).tiny, 0.0]], dtype=dtype)
    found = quantizer.fake_quantize_tokens(x, 8)
    assert found.dtype == dtype and bool(torch.isfinite(found).all())


def test_nan_is_not_hidden() -> None:
    found = quantizer.fake_quantize_tokens(torch.tensor([[float("nan"), 1.0], [2.0, 1.0]]), 8)
    assert bool(found[0].isnan().all()) and not bool(found[1].isnan().any())


def test_layer_multiplies_rounded_inputs_and_passes_the_gradient_through() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    quantize_model(model, config_of(bits=4) | {"modules_to_not_convert": []})
    x = torch.randn(3, 16, requires_grad=True)
    layer: Any = model[0]
    layer(x).sum().backward()
    rounded = quantizer.fake_quantize_tokens(x, 4)
    weight = layer.quantized_weight().detach()
    assert torch.equal(layer(x), nn.functional.linear(rounded, weight, layer.bias))
    assert not torch.equal(rounded, x)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 16))
    torch.testing.assert_close(layer.weight.grad, rounded.sum(0).expand(8, 16))
    dequantize_model(model)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, layer.bias))


def test_off_by_default(tiny_bert: nn.Module) -> None:
    quantize_model(tiny_bert, {"quantize_bits": {"start_bits": 8, "target_bits": 8}})
    assert {layer.moq.activation_bits for layer in quant_layers(tiny_bert).values()} == {None}
    assert not MoQConfig.from_dict({"quantize_bits": {"start_bits": 8, "target_bits": 8}}).activation.enabled


def test_begins_at_its_step_and_a_resumed_run_knows(tiny_bert: nn.Module, tiny_batch: dict[str, torch.Tensor]) -> None:
    controller = MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=7, start_step=3)), total_steps=9)
    found = []
    for _ in range(5):
        found.append({layer.moq.activation_bits for layer in controller.layers.values()})
        assert controller.has_arrived == (found[-1] == {7})
        controller.step()
    assert found == [{None}, {None}, {None}, {7}, {7}]
    state = controller.state_dict()
    before = tiny_bert.eval()(**tiny_batch).logits
    other = MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=7, start_step=3)), total_steps=9)
    assert {layer.moq.activation_bits for layer in other.layers.values()} == {None}
    other.load_state_dict(state)
    assert torch.equal(tiny_bert(**tiny_batch).logits, before)
    with pytest.raises(MoQError, match=r"activation_quantization\.bits: 7 -> 8"):
        MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=8, start_step=3)), 9).load_state_dict(state)


def test_a_start_that_is_never_reached_is_an_error(tiny_bert: nn.Module) -> None:
    with pytest.raises(MoQError, match=r"activation_quantization\.start_step: 5 is not reached in 5 optimizer steps"):
        MoQController(tiny_bert, MoQConfig.from_dict(config_of(start_step=5)), total_steps=5)
    with pytest.raises(MoQError, match=r"start_step: 5 is not reached in 5 optimizer steps"):
        plan(config_of(start_step=5), 5)


def test_wrong_values_are_told() -> None:
    with pytest.raises(MoQError) as error:
        MoQConfig.from_dict(config_of(bits=9, start_steps=1))
    assert "did you mean activation_quantization.start_step?" in str(error.value)
    assert "activation_quantization.bits: 9 is not legal; it must be a whole number from 2 to 8" in str(error.value)


def test_summary_names_it(tiny_bert: nn.Module) -> None:
    controller = MoQController(tiny_bert, MoQConfig.from_dict(config_of(bits=7, start_step=3)), total_steps=9)
    assert "inputs to 7 bits after 3 steps" in controller.summary()


def test_groups_in_a_row_keep_the_export_from_multiplying_integers(tiny_bert: Any) -> None:
    grouped = MoQConfig.from_dict({**config_of(), "quantize_group_size": 8})
    (note,) = MoQController(tiny_bert, grouped).warnings()
    assert "quantize_group_size weight-only" in note
    assert MoQController(tiny_bert, MoQConfig.from_dict(config_of())).warnings() == []
