"""Who computes: every row and column of the table of `backend.choose`."""

from typing import Any

import numerics
import pytest
import torch

from moq_hf import quantizer, triton_quant
from moq_hf.grid import Grid, RowBlocks
from moq_hf.kernels import backend, cpu, packing

TASKS: tuple[Any, ...] = ("weight", "model", "search")
without_triton = pytest.mark.skipif(
    triton_quant.available(torch.device("cpu")), reason="the interpreter runs the kernels"
)


@pytest.mark.parametrize("task", TASKS)
def test_false_in_the_config_lets_the_definition_compute(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quant, "available", lambda device: True)
    assert backend.choose(task, torch.randn(4, 8), torch.float32, False) is quantizer


@pytest.mark.parametrize("kernel", [True, None])
def test_triton_takes_models_and_searches(kernel: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quant, "available", lambda device: True)
    monkeypatch.setattr(cpu, "available", lambda: False)
    w = torch.randn(4, 8)
    chosen = {task: backend.choose(task, w, torch.bfloat16, kernel) for task in TASKS}
    assert chosen == {"weight": quantizer, "model": triton_quant, "search": triton_quant}
    for odd in (w.t(), w.to(torch.float8_e4m3fn), w.to("meta")):
        assert backend.choose("model", odd, torch.float32, kernel) is quantizer


@without_triton
@pytest.mark.parametrize("task", TASKS)
def test_numba_takes_float32_weights_of_a_cpu(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(4, 8)
    for dtype in (torch.float32, torch.bfloat16):
        assert backend.choose(task, w, dtype) is cpu
    for odd, dtype in ((w, torch.float16), (w.half(), torch.float16), (w.t(), torch.float32)):
        assert backend.choose(task, odd, dtype) is quantizer
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert backend.choose(task, w, torch.float32) is quantizer


def test_tensors_without_memory_take_the_definition() -> None:
    w, grid = torch.randn(6, 33), Grid(RowBlocks(3))
    inside: list[Any] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        inside.append(backend.choose("weight", x, torch.float32))
        return (x * inside[-1].fake_quantize(x.detach(), 8, grid)).sum()

    gradient = torch.func.grad(loss)(w)
    assert inside == [quantizer] and numerics.same_bits(gradient, quantizer.fake_quantize(w, 8, grid))


def test_packed_weights_stay_packed_where_a_kernel_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in (triton_quant, packing):
        monkeypatch.setattr(kernels, "available", lambda device: True)
    device = torch.device("cpu")
    assert [bits for bits in range(1, 9) if backend.keeps_packed(bits, device)] == [2, 4, 8]
    assert backend.multiplies_packed(torch.ones(2, dtype=torch.float16))
    assert not backend.multiplies_packed(torch.ones(2))
    assert backend.triton_wanted(device, None) and not backend.triton_wanted(device, False)
    for kernels in (triton_quant, packing):
        monkeypatch.setattr(kernels, "available", lambda device: False)
    assert not backend.keeps_packed(4, device) and not backend.triton_wanted(device, True)
