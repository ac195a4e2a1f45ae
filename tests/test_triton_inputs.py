"""Inputs rounded by kernels against `InputObserver`."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

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

from moq_hf import quantize_model, triton_inputs, triton_launch
from moq_hf.grid import InputGrid
from moq_hf.inputs import InputObserver
from moq_hf.model.convert import quant_layers

__all__ = ["compiles", "members_are_known", "silent_numpy", "untried"]

# A static scale with a zero point is one more.
SCALES = ["static", "asymmetric", "per_tensor", "per_token", "per_block"]


def grid_of(scale: str, bits: int = 8, block: int = 32) -> InputGrid:
    if scale == "asymmetric":
        return InputGrid(bits, "static", symmetric=False)
    return InputGrid(bits, scale, block)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_constants(untried: None) -> Iterator[None]:
    triton_inputs._constants.cache_clear()
    yield
    triton_inputs._constants.cache_clear()


def observer(grid: InputGrid, dtype: torch.dtype = torch.float32) -> InputObserver:
    observed, running = torch.tensor([0.5, 2.3], device=DEVICE).unbind()
    if not grid.symmetric:
        observed, running = torch.tensor([[0.5, 0.6], [1.1, 2.3]], device=DEVICE).unbind()
    return InputObserver(grid, observed.clone(), dtype, running)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all numbers are the same, with the signs of zeros; and NaN is NaN."""
    numbers = ~expected.isnan()
    signs = torch.equal(found.signbit()[numbers], expected.signbit()[numbers])
    return found.dtype == expected.dtype and signs and torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def agrees(x: Tensor, grid: InputGrid, dtype: torch.dtype = torch.float32, training: bool = True) -> bool:
    """Whether a kernel is launched, and rounds and observes as an observer does."""
    ours, theirs = observer(grid, dtype), observer(grid, dtype)
    found, expected = triton_inputs.quantize(ours, x, training), theirs.quantize(x, training)
    assert found is not None and expected is not None
    works = list(triton_launch.works.values())
    is_observed = ours.pending is None or not ours.pending.any()
    return works == [True] and same(found, expected) and is_observed and torch.equal(ours.observed, theirs.observed)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is a process of its own")
def test_in_triton_s_interpreter() -> None:
    run_interpreted(__file__, 30)


@on_device
@pytest.mark.parametrize("case", range(9))
@pytest.mark.parametrize("scale", SCALES)
def test_a_kernel_is_the_definition(scale: str, case: int) -> None:
    dtype, weights = FLOATS[case % 3], FLOATS[case // 3]
    # A pooler's, with one scale per token; of odd sizes; of four dimensions.
    shape = [(5, 33), (2, 3, 48), (1, 2, 3, 16)][(case + case // 3) % 3]
    grid = grid_of(scale, [8, 4, 2][case // 3])
    x = torch.randn(shape, device=DEVICE).to(dtype)
    x[0, 0] = -0.0
    # Of bfloat16 the interpreter knows no subnormal numbers.
    x[-1, -1] *= 1e-30 if dtype == torch.bfloat16 else torch.finfo(dtype).tiny
    assert agrees(x, grid, weights)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x.view(-1)[5] = bad
        triton_launch.works.clear()
        assert agrees(x, grid, weights)


@on_device
@pytest.mark.parametrize("scale", SCALES)
def test_halves_round_to_even(scale: str) -> None:
    grid = grid_of(scale, block=256)
    halves = torch.arange(-255, 256, device=DEVICE) / 2
    assert agrees(halves.expand(2, 3, 511), grid)
    triton_launch.works.clear()
    assert agrees(torch.zeros(2, 3, 511, device=DEVICE, dtype=torch.float16), grid, torch.float16)


@on_device
def test_the_range_is_observed_over_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_inputs, "_BLOCK", 64)
    monkeypatch.setattr(triton_inputs, "_PROGRAMS", 5)
    grid = InputGrid(8, "static")
    for place in (0, 65, 999):
        x = torch.randn(1, 10, 100, device=DEVICE).clamp(-2, 2)
        x.view(-1)[place] = -3.0
        for training in (True, False):
            triton_launch.works.clear()
            assert agrees(x, grid, training=training)
    ours, kept = observer(grid), []
    for value in (2.0, torch.inf, 1.0, torch.nan, 4.0):
        x.view(-1)[500] = value
        # Where one program finds an input that is not finite, none counts.
        x.view(-1)[0] = 0.5 if math.isfinite(value) else 9.0
        triton_inputs.quantize(ours, x * (value != 1.0), training=True)
        kept.append(float(ours.observed))
    assert kept == [3.0, 3.0, 3.0, 3.0, 4.0]


@on_device
def test_strides_do_not_count() -> None:
    x = torch.randn(40, 3, 2, device=DEVICE)
    for scale in SCALES:
        triton_launch.works.clear()
        assert agrees(x.permute(2, 1, 0), grid_of(scale))
        triton_launch.works.clear()
        assert agrees(x[:1, :1, :1].expand(2, 3, 40), grid_of(scale))


@on_device
def test_what_kernels_do_not_take_is_for_the_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_inputs, "_launch", None)
    monkeypatch.setattr(triton_inputs, "LONGEST", 15)
    x = torch.randn(2, 3, 16, device=DEVICE)
    for scale, given in (("per_token", x), ("per_tensor", x.double()), ("per_tensor", x[:0])):
        ours = observer(InputGrid(8, scale))  # type: ignore[arg-type]
        found, expected = triton_inputs.quantize(ours, given, True), ours.quantize(given, True)
        assert found is expected is None or same(found, expected)  # type: ignore[arg-type]
    ours = observer(InputGrid(8, "per_token", symmetric=False))
    assert same(triton_inputs.quantize(ours, x[..., :9], True), ours.quantize(x[..., :9], True))  # type: ignore[arg-type]
    ours = observer(InputGrid(8, "static"))
    ours.range = None
    # The range of the call, as long as there is no other.
    assert same(triton_inputs.quantize(ours, x, True), ours.quantize(x, True))  # type: ignore[arg-type]
    ours.active = False
    assert triton_inputs.quantize(ours, x, True) is None and ours.called


@on_device
@pytest.mark.parametrize("scale", SCALES)
def test_training_is_the_same_with_and_without_kernels(scale: str) -> None:
    section = {"scale": scale} if scale != "asymmetric" else {"symmetric": False, "percentile": 90, "window": 2}
    config = {
        "quantize_bits": {"start_bits": 8, "target_bits": 8},
        "quantize_heads": True,
        "activation_quantization": {"enabled": True, **section},
    }
    ends: list[list[Tensor]] = []
    for more in ({}, {"quantizer_kernel": False}):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 2))
        model = quantize_model(model, {**config, **more}).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.train()(torch.randn(2, 3, 32).to(DEVICE)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        # A range begins with the second step.
        ranges = [layer.moq.inputs.range for layer in quant_layers(model).values() if layer.moq.inputs is not None]
        ends.append([*(p.detach() for p in model.parameters()), *(r for r in ranges if r is not None)])
        if more == {}:
            assert any(key[1] == "inputs" for key in triton_launch.works) and all(triton_launch.works.values())
            triton_launch.works.clear()
        else:
            assert not triton_launch.works
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its functions in it")
@pytest.mark.parametrize("scale", SCALES)
def test_a_wrong_part_of_a_kernel_is_found_at_first_use(
    scale: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_part("inputs", "round_even", lambda right, code: right(code + 1e-3), monkeypatch)
    x = torch.randn(2, 3, 32)
    ours = observer(grid_of(scale))
    for _ in range(2):
        assert same(triton_inputs.quantize(ours, x, True), ours.quantize(x, True))  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "it gives other numbers than plain PyTorch" in record.message


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["round_all_kernel", "round_rows_kernel"])
def test_they_compile_for_the_oldest_and_the_newest_gpus(compiles: Callable[..., bool], name: str, target: Any) -> None:
    types = dict.fromkeys(("n_inputs", "turns", "n_rows", "n_cols", "features"), "i32")
    types |= {"X_ptr": "*bf16", "Y_ptr": "*bf16", "first_ptr": "*fp32", "observed_ptr": "*fp32", "pending_ptr": "*i32"}
    constants: dict[str, Any] = {
        "SCALE": "static",
        "SYMMETRIC": False,
        "BITS": 8,
        "LEAST": 0.0078125,
        "SCALE_DTYPE": "float32",
    }
    constants |= {"DTYPE": "float32", "BLOCK": 4096, "EVEN": False, "BLOCK_ROWS": 4, "BLOCK_COLS": 1024}
    if name == "round_rows_kernel":
        constants |= {"SCALE": "per_token", "DTYPE": "bfloat16"}
    assert compiles(getattr(triton_launch.kernels("inputs"), name), target, types, constants)
