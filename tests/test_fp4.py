"""MXFP4 and NVFP4: the definition against that of compressed-tensors, the search, rounding, and what a config says."""

from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from torch import Tensor

from moq_hf import MoQConfig, MoQConfigError, quantizer
from moq_hf.grid import FP4, Format, Grid, PerGroup
from moq_hf.quantizer import RoundingSeed
from moq_hf.training.resume import ratios_in_letters, ratios_of_letters

SCHEMES: dict[Format, Any] = {"mxfp4": MXFP4A16["weights"], "nvfp4": NVFP4A16["weights"]}
FORMATS = pytest.mark.parametrize("name", SCHEMES)
# Every number of E2M1, and what is halfway between two of them.
TIES = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -6.0]


def grid_of(name: Format, **more: Any) -> Grid:
    return Grid(PerGroup(FP4[name].group_size), format=name, **more)


def hard(name: Format) -> Tensor:
    """A group in a row: any size of weights, zeros, one weight alone, ties of every sign and many scales."""
    size = FP4[name].group_size
    torch.manual_seed(0)
    weight = torch.randn(3000, size) * torch.logspace(-6, 0.6, 3000)[:, None]
    weight[:3] = 0
    weight[3:40, 1:] = 0
    ties = torch.tensor(TIES).repeat(size // 16)
    weight[40:1040] = ties * torch.linspace(-3, 3, 1000)[:, None]
    weight[1040:1060] = ties * 2.0 ** torch.arange(-18, 2)[:, None]
    # Largest weights about 1.75 of a power of two.
    near = torch.tensor(1.75).nextafter(torch.tensor(0.0)), torch.tensor(1.75), torch.tensor(1.7500001)
    weight[1060:1063, 0] = torch.stack(near)
    weight[1060:1063, 1:] = 0.1
    return weight


@FORMATS
def test_codes_and_scales_are_those_of_compressed_tensors(name: Format) -> None:
    weight = hard(name)
    found = quantizer.quantize(weight, 4, grid_of(name))
    divisor = FP4[name].unit / 2
    whole = torch.tensor([divisor]) if name == "nvfp4" else None
    ends = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale, _ = calculate_qparams(*ends, SCHEMES[name], global_scale=whole)
    # Below half of E4M3's least number compressed-tensors takes an eighth, so that all codes are zeros; of a group of
    # zeros the scale does not matter.
    size = weight.abs().amax(1)
    counts = size > (6 * 2.0**-10 / divisor if name == "nvfp4" else 0.0)
    assert counts.sum() > 2000
    assert torch.equal(found.scale[counts] * 2 * divisor, scale[counts].float())
    if name == "nvfp4":
        assert (found.scale[(size > 0) & ~counts] * 2 * divisor == 2.0**-9).all()
        subnormal = found.scale * 2 * divisor < 2.0**-6
        assert (subnormal[:, 0] & counts).sum() > 50
    zero = torch.zeros_like(scale, dtype=torch.float32)
    codes = quantize(weight, scale.float(), zero, SCHEMES[name], global_scale=whole)
    assert torch.equal(found.codes[counts], (2 * codes[counts]).int())
    assert found.codes.abs().unique().tolist() == [0, 1, 2, 3, 4, 6, 8, 12]
    assert not found.codes[:3].any()


@FORMATS
def test_a_weight_is_exact_in_bfloat16_and_stays_where_it_is(name: Format) -> None:
    weight = hard(name)
    found = quantizer.fake_quantize(weight, 4, grid_of(name))
    assert torch.equal(found, quantizer.dequantize(*quantizer.quantize(weight, 4, grid_of(name))))
    assert torch.equal(found.bfloat16().float(), found)
    half = quantizer.fake_quantize(weight, 4, grid_of(name), dtype=torch.bfloat16)
    assert torch.equal(half.float(), found)
    again = quantizer.fake_quantize(found, 4, grid_of(name, search="absmax"))
    # A largest weight that was clipped to less than 1.75 of a power of two gives the same scale again.
    assert torch.equal(again, found)


@FORMATS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_found(name: Format, value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="weight holds NaN or Inf"):
        quantizer.quantize(weight, 4, grid_of(name))
    scale = quantizer.fake_quantize_with_scale(weight, 4, grid_of(name))[1]
    groups = 64 // FP4[name].group_size
    assert scale.isfinite().flatten().tolist() == [i != groups for i in range(2 * groups)]


@FORMATS
def test_weights_beyond_either_end(name: Format) -> None:
    weight = torch.ones(2, FP4[name].group_size) * torch.tensor([[1e4], [1e-30]])
    found = quantizer.fake_quantize(weight, 4, grid_of(name))
    if name == "nvfp4":
        assert found.unique().tolist() == [0.0, 21.0]
    else:
        assert ((found / weight - 1).abs() < 0.21).all()
    # Where a scale would be no normal float32, zeros.
    assert not quantizer.fake_quantize(weight * 2.0**-100 * 1e-10, 4, grid_of(name))[1].any()


def test_no_weight_becomes_infinite() -> None:
    """From 1.75 of 2^127 on the next exponent would have a code beyond the numbers of float32."""
    most = torch.finfo(torch.float32).max
    weight = torch.tensor([[most, -most, 1e38, -2e38] * 8, [2.0**127, -1.74 * 2.0**127, 0.0, 1e38] * 8])
    found, scale = quantizer.fake_quantize_with_scale(weight, 4, grid_of("mxfp4"))
    assert scale.flatten().tolist() == [2.0**124, 2.0**124]
    assert found[0, :4].tolist() == [1.5 * 2.0**127, -1.5 * 2.0**127, 0.5 * 2.0**127, -1.0 * 2.0**127]


@FORMATS
def test_the_search_finds_the_least_squares(name: Format) -> None:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(64, 64)
    grid = grid_of(name)
    found = quantizer.least_squares_ratio(weight, 4, grid)

    def error(ratio: Tensor) -> Tensor:
        squares = (quantizer.fake_quantize(weight, 4, grid, ratio=ratio) - weight).square().double()
        return squares.view(64, -1, FP4[name].group_size).sum(2)

    tried = {"mxfp4": [1.0, 0.5], "nvfp4": [k / 10 for k in range(18, 10, -1)] + [k / 20 for k in range(20, 11, -1)]}
    best = error(found)
    for value in tried[name]:
        assert (best <= error(torch.full_like(found, value))).all()
    assert best.sum() < (1.0 if name == "mxfp4" else 0.8) * error(torch.ones_like(found)).sum()
    letters = ratios_in_letters(found)
    assert torch.equal(ratios_of_letters("layer", letters, (64, 64 // FP4[name].group_size)), found)


@FORMATS
def test_stochastic_rounding_has_no_bias_and_goes_to_neighbors(name: Format) -> None:
    size = FP4[name].group_size
    weight = torch.linspace(-6, 6, 100 * size).view(100, size)
    weight[:, 0] = 6.0
    grid = grid_of(name, stochastic=True)
    rounded = torch.stack([quantizer.fake_quantize(weight, 4, grid, seed=RoundingSeed(0, 0, k)) for k in range(400)])
    levels = torch.tensor([*TIES, *(-x for x in TIES)])
    levels = levels[torch.isin(levels.abs(), torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]))].unique()
    assert torch.isin(rounded, levels).all()
    above = torch.bucketize(weight.contiguous(), levels).clamp(1, len(levels) - 1)
    step = levels[above] - levels[above - 1]
    assert ((rounded - weight).abs() <= step).all()
    assert (rounded.mean(0) - weight).abs().max() < 0.12 * step.max()
    assert abs(float(((rounded.mean(0) - weight) / step).mean())) < 2e-3


def test_at_other_bits_codes_are_integers() -> None:
    weight = torch.randn(4, 64)
    plain = Grid(PerGroup(32))
    for bits in (3, 5, 8):
        assert torch.equal(
            quantizer.fake_quantize(weight, bits, grid_of("mxfp4")), quantizer.fake_quantize(weight, bits, plain)
        )


def test_a_format_alone_is_four_bits_from_the_first_step() -> None:
    config = MoQConfig.load({"format": "mxfp4"})
    assert (config.start_bits, config.bits, config.group_size) == (4, 4, 32)
    assert config == MoQConfig(format="mxfp4") == MoQConfig.from_dict(config.to_dict())
    assert MoQConfig.load({"quantize_format": "mxfp4"}) == MoQConfig(format="mxfp4", embeddings=None)
    falling = MoQConfig(format="nvfp4", start_bits=8)
    assert (falling.start_bits, falling.bits, falling.group_size, falling.falls) == (8, 4, 16, True)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"quantize_bits": {"target_bits": 3}}, "mxfp4 is symmetric, of 4 bits in groups of 32; leave out"),
        ({"quantize_group_size": 64}, "leave out quantize_bits.target_bits, quantize_group_size"),
        ({"quantize_algo": {"q_type": "asymmetric"}}, "quantize_group_size and quantize_algo.q_type"),
        ({"overrides": {"layer.0": {"bits": 8}}}, "overrides.layer.0: quantize_format: mxfp4 is symmetric, of 4 bits"),
        ({"pack_bits": 8}, "pack_bits: codes of mxfp4 have their own containers; leave it out"),
        ({"quantize_format": ["mxfp4"]}, 'must be "int" or "mxfp4" or "nvfp4" or "fp8"'),
        ({"quantize_algo": {"range": "full"}}, "full is for integers, and codes of mxfp4 are floats"),
    ],
)
def test_what_goes_with_no_format_is_an_error(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(MoQConfigError, match=fault.replace(".", r"\.")) as error:
        MoQConfig.load({"quantize_format": "mxfp4", **config})
    assert "\n" not in str(error.value)
