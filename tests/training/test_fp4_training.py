"""Training in MXFP4 and NVFP4: integers first, the format at the last drop, a resumed run, and what is delivered."""

from typing import Any

import pytest
import torch
import transformers as hf

from moq_hf import MoQConfig, MoQError, quantize_model, quantizer
from moq_hf.grid import Grid, PerGroup
from moq_hf.training.controller import MoQController

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.arange(1, 33).view(4, 8)


def llama() -> Any:
    hf.set_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES))


def steps(model: Any, controller: MoQController, count: int) -> None:
    """Plain gradient steps, so that nothing but the weights and the controller is a state."""
    for _ in range(count):
        model(input_ids=IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        model.zero_grad()
        controller.step()


@pytest.mark.parametrize(("name", "rounding"), [("mxfp4", "stochastic"), ("nvfp4", "nearest")])
def test_integers_first_then_the_format_and_a_resumed_run_is_the_same(name: Any, rounding: Any) -> None:
    config = MoQConfig(format=name, start_bits=6, period=1, rounding=rounding, scale_refresh=2)
    model = llama().train()
    controller = MoQController(model, config, 12)
    layer = controller.layers["model.layers.0.mlp.down_proj"]
    seen = []
    for _ in range(5):
        steps(model, controller, 1)
        seen.append(layer.moq.bits)
        grid = Grid(
            PerGroup(config.group_size or 0), stochastic=rounding == "stochastic", full=None, scale_dtype="bfloat16"
        )
        integers = quantizer.fake_quantize(
            layer.float_weight, layer.moq.bits, grid, ratio=layer.moq.ratio, seed=layer.moq.seed
        )
        assert torch.equal(layer.quantized_weight(), integers) == (layer.moq.bits > 4)
    assert seen[0] > 4 and seen[-1] == 4
    saved, weights = controller.state_dict(), {n: t.clone() for n, t in model.state_dict().items()}
    steps(model, controller, 3)
    resumed = llama().train()
    other = MoQController(resumed, config, 12)
    resumed.load_state_dict(weights)
    assert other.load_state_dict(saved) == {}
    steps(resumed, other, 3)
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_training_lowers_the_loss() -> None:
    model = llama().train()
    controller = MoQController(model, MoQConfig(format="nvfp4"), 20)
    losses = []
    for _ in range(20):
        losses.append(float(model(input_ids=IDS, labels=IDS).loss.detach()))
        steps(model, controller, 1)
    assert losses[-1] < losses[0] - 0.5
    assert controller.sizes.layer_bits == 4


def test_sizes_have_a_byte_for_a_scale() -> None:
    model = llama()
    controller = MoQController(model, MoQConfig(format="mxfp4"), 4)
    numbers = sum(weight.float_weight.numel() for weight in controller.layers.values())
    others = 4 * (sum(parameter.numel() for parameter in model.parameters()) - numbers)
    assert controller.sizes.mb == pytest.approx((others + numbers * 17 / 32) / 1e6)


def test_gptq_rounds_to_the_format() -> None:
    torch.manual_seed(0)
    weight, inputs = 0.1 * torch.randn(16, 64), torch.randn(256, 64) @ torch.randn(64, 64)
    grid = Grid(PerGroup(32), format="mxfp4")
    rounded = quantizer.gptq(weight, inputs.T @ inputs, 4, grid)
    nearest = quantizer.fake_quantize(weight, 4, grid)
    assert torch.equal(rounded.bfloat16().float(), rounded)

    def error(other: torch.Tensor) -> float:
        return float((inputs @ (other - weight).T).square().sum())

    assert error(rounded) < 0.7 * error(nearest)


def test_tables_are_integers() -> None:
    model = quantize_model(llama(), {"quantize_format": "mxfp4", "quantize_embeddings": 4})
    grid = model.model.embed_tokens.moq.grid
    assert (grid.format, grid.grouping) == ("int", PerGroup(32))
    assert model.lm_head.weight.dtype == torch.float32


def test_a_weight_that_nvfp4_cannot_hold_is_an_error_before_the_first_step() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = 21.5
    with pytest.raises(MoQError, match=r"layers\.0\.mlp\.up_proj\.weight: .* beyond 21, the most that nvfp4 holds"):
        quantize_model(model, {"quantize_format": "nvfp4"})
    quantize_model(model, {"quantize_format": "mxfp4"})
