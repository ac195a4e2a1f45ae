"""The search of clipping ratios by the kernel against `quantizer`'s."""

import logging
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from on_triton import (
    DEVICE,
    FLOATS,
    INTERPRETED,
    TARGETS,
    break_part,
    compiles,
    members_are_known,
    needs_triton,
    on_device,
    run_interpreted,
    silent_numpy,
    untried,
)
from torch import Tensor, nn

from moq_hf import quantize_model, quantizer, triton_launch, triton_search
from moq_hf.grid import Format, Grid, PerChannel, PerGroup, RowBlocks, ScaleDtype
from moq_hf.model.convert import quant_layers

__all__ = ["compiles", "members_are_known", "silent_numpy", "untried"]

GRIDS = [
    Grid(PerChannel(), symmetric=symmetric, full=full, scale_dtype=dtype)
    for symmetric, full in ((True, False), (True, True), (False, False))
    for dtype in get_args(ScaleDtype)
]


pytestmark = pytest.mark.usefixtures("untried")


def agrees(weight: Tensor, bits: int, grid: Grid) -> bool:
    """Whether the kernel is launched, and chooses what `quantizer` does."""
    found = triton_search.least_squares_ratio(weight, bits, grid)
    expected = quantizer.least_squares_ratio(weight, bits, grid)
    return list(triton_launch.works.values()) == [True] and torch.equal(found, expected)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is a process of its own")
def test_in_triton_s_interpreter() -> None:
    run_interpreted(__file__, 30)


@on_device
@pytest.mark.parametrize("case", range(18))
def test_the_kernel_chooses_as_the_definition_does(case: int) -> None:
    grid = GRIDS[case // 2]
    bits = [2, 3, 4, 5, 8, 16][(case + case // 6) % 6]
    if not grid.at(bits).is_uniform:
        bits += 1
    # Half of the groups are shorter than what a thread holds.
    length = [33, 200][case % 2]
    weight = torch.randn(6, length) * torch.randn(6, 1).exp() * 2.0 ** (40 * (case % 3 - 1))
    weight[0, :3] = torch.tensor([0.0, -0.0, 1e-42])
    weight[3, 1] = [torch.nan, torch.inf, -torch.inf][case % 3]
    weight[4] = [0.0, 1e-42, 3e38][case % 3]
    weight[4, 0] *= -1
    assert agrees(weight.to(DEVICE, FLOATS[(case % 3 * 2 + case // 3) % 3]), bits, grid)


@on_device
@pytest.mark.parametrize("length", [1, 3, 4, 17, 64, 128, 1024, 4096])
def test_lengths_of_groups(length: int) -> None:
    weight = 0.02 * torch.randn(3, length, device=DEVICE)
    assert agrees(weight, 4, Grid(PerChannel()))


@on_device
def test_groups_that_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        # Parts are as long as elsewhere groups can be.
        monkeypatch.setattr(triton_search, "LONGEST", 512)
        monkeypatch.setattr(triton_search, "_THREADS", 16)
        monkeypatch.setattr(triton_search, "_WARPS", 4)
    weight = 0.02 * torch.randn(3, 2 * triton_search.LONGEST + 9, device=DEVICE)
    weight[1, 5], weight[2] = torch.nan, 0.0
    assert agrees(weight, 4, Grid(PerChannel(), symmetric=False))


@on_device
@pytest.mark.parametrize("case", range(5))
def test_each_sum_of_errors_is_the_definition_s(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, bits = GRIDS[2 * case], [16, 8, 3][case % 3]
    sums: list[Tensor] = []
    monkeypatch.setattr(triton_search, "LONGEST", 64)
    monkeypatch.setattr(triton_search, "_THREADS", 2 if INTERPRETED else 128)
    monkeypatch.setattr(triton_search, "_least", lambda *found: sums.append(found[0]))
    weight = torch.randn(2, 77, device=DEVICE) * torch.randn(2, 1, device=DEVICE).exp()
    # With ratio 1 these are halves, which are hard to round.
    most = abs(grid.at(bits).top)
    weight[1] = 0.3 * (torch.randint(-most, most, (77,), device=DEVICE) + 0.5)
    weight[1, 0] = 0.3 * most
    triton_search._launch(weight, grid.at(bits))
    exponent = weight.abs().amax(1, keepdim=True).double().frexp().exponent - 1
    unit = 2.0 ** (quantizer.error_exponent(77) - exponent)
    for ratio, found in zip(quantizer.RATIOS, sums[0].unbind(1), strict=True):
        values = quantizer.fake_quantize(weight, bits, grid, ratio=torch.full((2, 1), ratio, device=DEVICE))
        error = ((values - weight) * unit).float()
        assert torch.equal(found, error.square().floor().to(torch.int64).sum(1))


@on_device
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_codes_that_are_floats(name: Format) -> None:
    size = 32 if name == "mxfp4" else 16
    grid = Grid(PerGroup(size), scale_dtype="bfloat16", format=name)
    weight = torch.randn(40, 2 * size) * torch.logspace(-8, 3, 40)[:, None]
    weight[7] = 0.0
    weight[8] *= 1e-30
    weight[9] *= 1e30
    weight[10, 3], weight[11, 3] = torch.nan, torch.inf
    weight[12, 0], weight[13] = torch.finfo(torch.float32).max, 2.0**-149
    assert agrees(weight.to(DEVICE), 4, grid)


@on_device
def test_weights_of_any_strides_and_groupings() -> None:
    weight = torch.randn(64, 6, device=DEVICE).t()
    assert agrees(weight, 3, Grid(RowBlocks(3)))
    with pytest.raises(ValueError, match="3 groups do not divide"):
        triton_search.least_squares_ratio(weight[:5], 3, Grid(RowBlocks(3)))
    with pytest.raises(ValueError, match="no clipping ratio to search"):
        triton_search.least_squares_ratio(weight, 2)


@on_device
def test_float64_is_for_plain_pytorch() -> None:
    weight = torch.randn(4, 16, device=DEVICE, dtype=torch.float64)
    found = triton_search.least_squares_ratio(weight, 4)
    assert torch.equal(found, quantizer.least_squares_ratio(weight, 4)) and not triton_launch.works


@on_device
def test_a_layer_searches_with_it_unless_told_not_to() -> None:
    for kernel, launched in ((None, [True]), (False, [])):
        triton_launch.works.clear()
        model: Any = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 2)).to(DEVICE)
        config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
        quantize_model(model, config | ({} if kernel is None else {"quantizer_kernel": kernel}))
        triton_launch.works.clear()
        quant_layers(model)["0"].search_ratios()
        assert list(triton_launch.works.values()) == launched
        expected = quantizer.least_squares_ratio(model[0].float_weight, 4, model[0].moq.grid)
        assert torch.equal(model[0].moq.ratio, expected)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its functions in it")
def test_a_wrong_part_of_the_kernel_is_found_at_first_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_part("search", "_nearest", lambda right, x, *scale: right(x * 1.1, *scale), monkeypatch)
    weight = torch.randn(6, 96)
    for _ in range(2):
        assert torch.equal(triton_search.least_squares_ratio(weight, 4), quantizer.least_squares_ratio(weight, 4))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "it gives other numbers than plain PyTorch" in record.message


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_for_the_oldest_and_the_newest_gpus(compiles: Callable[..., bool], target: Any) -> None:
    types = {"X_ptr": "*bf16", "best_ptr": "*fp32", "ratios_ptr": "*fp32"}
    types |= dict.fromkeys(("n_groups", "n_cols", "parts", "h"), "i32")
    types |= dict.fromkeys(("low", "high", "farthest"), "fp32")
    constants = {"N_RATIOS": 17, "SYMMETRIC": False, "SCALE_DTYPE": "bfloat16", "FORMAT": "int"}
    constants |= {"BLOCK_ROWS": 32, "BLOCK_COLS": 16, "CHUNKS": 8}
    assert compiles(triton_launch.kernels("search").least_squares_kernel, target, types, constants, warps=4)
