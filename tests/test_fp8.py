"""FP8: weights and inputs against compressed-tensors' own arithmetic, and what a config says."""

import re
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize, quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, compute_dynamic_scales_and_zp
from torch import Tensor, nn

from moq_hf import MoQConfig, MoQConfigError, quantize_model, quantizer
from moq_hf.grid import Grid, InputGrid, InputScale, PerChannel, ScaleDtype
from moq_hf.inputs import InputObserver, fake_quantize_input, static_scale
from moq_hf.model.inventory import grid_of
from moq_hf.quantizer import RoundingSeed

WEIGHTS = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False)
GRID = Grid(PerChannel(), format="fp8")
DTYPES: list[ScaleDtype] = ["float32", "bfloat16", "float16"]


def hard() -> Tensor:
    """Rows of every size, of zeros, with one weight alone, and of all numbers between which E4M3 is a tie."""
    torch.manual_seed(0)
    weight = torch.randn(300, 253) * torch.logspace(-6, 4, 300)[:, None]
    weight[0] = 0
    weight[1:9, 1:] = 0
    numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    weight[9:40] = ties * 2.0 ** torch.arange(-20, 11)[:, None]
    return weight


def test_codes_and_scales_are_those_of_compressed_tensors() -> None:
    weight = hard()
    found = quantizer.quantize(weight, 8, GRID)
    scale, zero = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), WEIGHTS)
    # The scale of a row of zeros does not matter.
    assert torch.equal(512 * found.scale[1:], scale[1:])
    codes = quantize(weight, scale, zero, WEIGHTS, dtype=torch.float8_e4m3fn)
    assert torch.equal(found.codes / 512, codes.float())
    assert torch.equal(quantizer.fake_quantize(weight, 8, GRID), fake_quantize(weight, scale, zero, WEIGHTS))
    # Every number of E4M3 is a code.
    assert len(found.codes.abs().unique()) == 127


@pytest.mark.parametrize("name", DTYPES)
def test_a_weight_is_what_compressed_tensors_unpacks_in_its_dtype(name: ScaleDtype) -> None:
    dtype = getattr(torch, name)
    weight = hard().clamp(-6e4, 6e4).to(dtype)
    grid = Grid(PerChannel(), format="fp8", scale_dtype=name)
    found = quantizer.quantize(weight, 8, grid)
    scale = (512 * found.scale).to(dtype)
    assert torch.equal(scale.float(), 512 * found.scale)
    unpacked = dequantize((found.codes / 512).to(torch.float8_e4m3fn), scale, None, WEIGHTS)
    assert torch.equal(quantizer.fake_quantize(weight, 8, grid), unpacked)


def test_stochastic_rounding_goes_to_neighbors_without_bias() -> None:
    weight = torch.linspace(-448, 448, 2001)[None]
    grid = Grid(PerChannel(), format="fp8", stochastic=True)
    rounded = torch.stack([quantizer.fake_quantize(weight, 8, grid, seed=RoundingSeed(0, 0, k)) for k in range(300)])
    assert torch.equal(rounded.to(torch.float8_e4m3fn).float(), rounded)
    step = 2.0 ** (weight.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((rounded - weight).abs() <= step).all()
    assert abs(float(((rounded.mean(0) - weight) / step).mean())) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["per_token", "static"])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(kind: InputScale, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 64) * torch.logspace(-4, 2, 5)[:, None]).to(dtype)
    x[0, 0] = 0
    grid = InputGrid(8, kind, format="fp8")
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="token" if kind == "per_token" else "tensor", dynamic=kind == "per_token"
    )
    if kind == "per_token":
        scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Linear(1, 1))
        assert torch.equal(fake_quantize_input(x, grid), fake_quantize(x, scale, zero, args))
        return
    # Inputs beyond the range are clipped.
    scale = static_scale(torch.tensor(20.0), grid, dtype)[None]
    found = fake_quantize_input(x, grid, scale)
    assert torch.equal(found, fake_quantize(x, scale, None, args))
    assert found.abs().max() == (448 * scale).item()
    # The first call's own range counts before the first step.
    observer = InputObserver(grid, torch.tensor(0.0), dtype)
    own = static_scale(x.abs().amax().float(), grid)
    assert torch.equal(observer.quantize(x, True), fake_quantize_input(x, grid, own))  # type: ignore[arg-type]


def test_nan_stays_and_is_found() -> None:
    weight = torch.ones(2, 8)
    weight[1, 3] = torch.nan
    with pytest.raises(ValueError, match="weight holds NaN or Inf"):
        quantizer.quantize(weight, 8, GRID)
    assert fake_quantize_input(weight[:, None], InputGrid(8, "per_token", format="fp8"))[1].isnan().all()


def test_at_other_bits_codes_are_integers() -> None:
    weight = torch.randn(4, 64)
    for bits in (4, 7, 12):
        assert torch.equal(
            quantizer.fake_quantize(weight, bits, GRID), quantizer.fake_quantize(weight, bits, Grid(PerChannel()))
        )


def test_a_format_alone_is_eight_bits_per_channel_and_the_preset_rounds_inputs() -> None:
    config = MoQConfig(format="fp8")
    assert (config.start_bits, config.bits, config.grouping, config.rounds_inputs) == (8, 8, PerChannel(), False)
    assert config == MoQConfig.from_dict(config.to_dict())
    assert MoQConfig.load({"quantize_training": {"quantize_format": "fp8"}}).grouping == PerChannel()
    preset = MoQConfig("fp8")
    assert preset.input_grid_of("layer", ()) == InputGrid(8, "per_token", format="fp8")
    static = MoQConfig("fp8", activations={"scale": "static", "window": 10})
    assert static.input_grid_of("layer", ()) == InputGrid(8, "static", window=10, format="fp8")
    falling = MoQConfig("fp8", start_bits=12)
    assert (falling.falls, falling.float32_grid.at(9).format, falling.float32_grid.at(8).format) == (True, "int", "fp8")
    # Scales have the dtype in which plain transformers computes.
    assert [preset.grid_of(name).scale_dtype for name in (*DTYPES, "float64")] == [*DTYPES, "float32"]


def test_tables_and_convolutions_stay_integers() -> None:
    config = MoQConfig("fp8", convolutions=True)
    assert grid_of(nn.Linear(4, 4), config).format == "fp8"
    for layer in (nn.Embedding(4, 4), nn.Conv2d(3, 4, 3)):
        assert grid_of(layer, config, table_bits=8).format == "int"


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"bits": 4}, "format: fp8 is symmetric, of 8 bits per channel; leave out bits, group_size and q_type"),
        ({"bits": {"mean": 4.0}}, "fp8 is symmetric, of 8 bits per channel"),
        ({"group_size": 32}, "fp8 is symmetric, of 8 bits per channel"),
        ({"groups": 4}, "leave out bits, groups and q_type"),
        ({"q_type": "asymmetric"}, "fp8 is symmetric"),
        ({"overrides": {"layer.0": {"bits": 4}}}, "overrides.layer.0: format: fp8 is symmetric"),
        ({"overrides": {"layer.0": {"group_size": 32}}}, "overrides.layer.0: format: fp8 is symmetric"),
        ({"pack_bits": 8}, "pack_bits: codes of fp8 have their own containers"),
        ({"range": "full"}, "range: full is for integers, and codes of fp8 are floats"),
        ({"scale": "mse"}, "scale: mse would clip"),
        ({"train": "scales"}, 'train: "scales" is for integers and floats of 4 bits'),
        ({"activations": 4}, "activations: inputs beside fp8 weights are E4M3 too, 8 bits"),
        ({"activations": {"wide_bits": 4}}, "E4M3 too"),
        ({"activations": {"wide_bits": 8}}, "E4M3 too"),
        ({"scale_refresh": 10}, "scale_refresh: no ratio is searched with the steps of fp8"),
        ({"activations": {"scale": "per_tensor"}}, "per_token or static, not 8 bits"),
        ({"activations": {"scale": "per_block"}}, "per_token or static"),
        ({"activations": {"symmetric": False}}, "symmetric, per_token or static, not 8 bits (static, asymmetric)"),
        ({"overrides": {"layer.0": {"activations": 4}}}, "E4M3 too, 8 bits"),
    ],
)
def test_what_does_not_go_with_it_is_one_error(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(MoQConfigError, match=re.escape(fault)) as error:
        MoQConfig(format="fp8", **config)
    assert "\n" not in str(error.value)


def test_the_names_of_others_are_answered() -> None:
    for name in ("FP8_DYNAMIC", "float8", "fp-8"):
        with pytest.raises(MoQConfigError, match=r"did you mean fp8\?"):
            MoQConfig(name)


def test_gradients_pass_straight_through_the_cast() -> None:
    torch.manual_seed(0)
    model: Any = quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), "fp8")
    x = torch.randn(2, 3, 8, requires_grad=True)
    model(x).sum().backward()
    rounded = fake_quantize_input(x.detach(), InputGrid(8, "per_token", format="fp8"))
    weight = model[0].float_weight
    above = model[1].weight.sum(0)
    torch.testing.assert_close(weight.grad, above[:, None] * rounded.sum((0, 1)))
    torch.testing.assert_close(x.grad, (above @ quantizer.fake_quantize(weight, 8, GRID)).expand(2, 3, 8))
