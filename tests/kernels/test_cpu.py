import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import GROUPINGS, HALF_MODES, MODES, SEARCHED, same_bits

from moq_hf import eigen, quantize_model, quantizer
from moq_hf.grid import Grid, Grouping, PerGroup, RowBlocks
from moq_hf.kernels import cpu as cpu_quant
from moq_hf.kernels.backend import choose
from moq_hf.quantizer import Draw


def weight(rows: int = 6, columns: int = 33) -> torch.Tensor:
    w = torch.randn(rows, columns) * torch.randn(rows, 1).exp()
    w[0, :3] = torch.tensor([0.0, -0.0, 1e-42])
    w[-1] = 0.0
    return w


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fake_quantize_is_the_definition(mode: tuple[int, Grid], grouping: Grouping) -> None:
    assert cpu_quant.available()
    bits, grid = mode[0], replace(mode[1], grouping=grouping)
    w, draw = weight(), Draw(2**35 + 7, 3, 9)
    ratio = torch.tensor(quantizer.RATIOS)[torch.randint(17, grid.shape(6, 33))] if grid.is_uniform(bits) else None
    for dtype, blend, r in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.3), (None, ratio)):
        out = torch.full((6, 33), torch.nan, dtype=dtype)
        assert cpu_quant.fake_quantize(w, bits, grid, ratio=r, draw=draw, blend=blend, out=out) is out
        exact = quantizer.fake_quantize(w, bits, grid, ratio=r, draw=draw, blend=blend, dtype=dtype)
        assert same_bits(out, exact)


def test_groups_of_many_pieces_and_extreme_values() -> None:
    for scale in (0.02, 3e38, 1e6, 1e-6, 1e-37, 1e-45):
        w = torch.randn(6, 1500).clamp(-1, 1) * scale
        for bits, mode in MODES + HALF_MODES:
            grid = replace(mode, grouping=RowBlocks(2))
            ours = cpu_quant.fake_quantize(w, bits, grid, dtype=torch.bfloat16)
            assert same_bits(ours, quantizer.fake_quantize(w, bits, grid, dtype=torch.bfloat16))


@pytest.mark.parametrize("bits_of_value", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000], ids=hex)
@pytest.mark.parametrize("place", [(0, 0), (1, 7)])
def test_nonfinite_weights_come_out_so(bits_of_value: int, place: tuple[int, int]) -> None:
    for bits, mode in MODES + HALF_MODES:
        w = weight()
        w.view(torch.int32)[place] = bits_of_value
        assert not w[place].isfinite()
        grid = replace(mode, grouping=RowBlocks(3))
        for dtype in (torch.float32, torch.bfloat16):
            assert quantizer.nonfinite(cpu_quant.fake_quantize(w, bits, grid, dtype=dtype), grid)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_least_squares_ratio_is_the_definition(grouping: Grouping) -> None:
    for bits, mode in SEARCHED:
        for w in (weight(), weight().index_fill(0, torch.tensor([1]), torch.nan)):
            grid = replace(mode, grouping=grouping)
            ours = cpu_quant.least_squares_ratio(w, bits, grid)
            assert same_bits(ours, quantizer.least_squares_ratio(w, bits, grid))


def test_least_squares_ratio_of_groups_of_many_pieces() -> None:
    # The search leaves a ratio as soon as it is worse than the best one.
    for heavy in (1, 3):
        w = torch.randn(4, 5000) ** heavy
        for bits, mode in SEARCHED:
            grid = replace(mode, grouping=RowBlocks(2))
            ours = cpu_quant.least_squares_ratio(w, bits, grid)
            assert same_bits(ours, quantizer.least_squares_ratio(w, bits, grid))


def test_ties_go_to_the_larger_ratio_whatever_is_tried_first() -> None:
    # All ratios are equally good for zeros; the group before makes a smaller one the first.
    w = torch.randn(4, 5000).index_fill(0, torch.tensor([1, 3]), 0.0)
    ratio = cpu_quant.least_squares_ratio(w, 4, Grid(RowBlocks(4)))
    assert ratio[0] < 1 and ratio[1] == 1
    assert same_bits(ratio, quantizer.least_squares_ratio(w, 4, Grid(RowBlocks(4))))


@given(
    mode=st.sampled_from(SEARCHED),
    # Short groups, of which the last tile has fewer than the others; groups of a few stretches.
    shape=st.sampled_from([(30, 100, 25), (30, 100, 50), (9, 700, 700), (3, 1500, 1500), (2, 2500, 2500)]),
    heavy=st.sampled_from([1, 3, 9]),
    # Sums of squares underflow and overflow float32 in between.
    exponent=st.integers(-149, 127),
    steps=st.sampled_from([0, 1, 8]),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**20),
)
def test_least_squares_ratio_of_any_weights(
    mode: Any, shape: tuple[int, int, int], heavy: int, exponent: int, steps: int, threads: int, seed: int
) -> None:
    torch.set_num_threads(threads)
    w = torch.randn(shape[:2], generator=torch.Generator().manual_seed(seed)) ** heavy
    # Weights of few levels make ratios equally good.
    w = (w * steps).round() / steps if steps else w
    w = w.div(w.abs().max().clamp(min=1)).double().mul(1.99 * 2.0**exponent).float()
    bits, grid = mode[0], replace(mode[1], grouping=PerGroup(shape[2]))
    assert same_bits(cpu_quant.least_squares_ratio(w, bits, grid), quantizer.least_squares_ratio(w, bits, grid))


@given(
    mode=st.sampled_from(MODES + HALF_MODES),
    shape=st.sampled_from([(30, 100, 25), (30, 100, 50), (9, 700, 700), (3, 1500, 1500), (2, 2500, 2500)]),
    heavy=st.sampled_from([1, 9]),
    exponent=st.integers(-149, 127),
    blend=st.sampled_from([0.0, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
def test_fake_quantize_of_any_weights(
    mode: Any, shape: tuple[int, int, int], heavy: int, exponent: int, blend: float, dtype: Any, seed: int
) -> None:
    w = torch.randn(shape[:2], generator=torch.Generator().manual_seed(seed)) ** heavy
    w = w.div(w.abs().max()).double().mul(1.99 * 2.0**exponent).float()
    bits, grid = mode[0], replace(mode[1], grouping=PerGroup(shape[2]))
    ours = cpu_quant.fake_quantize(w, bits, grid, blend=blend, dtype=dtype)
    assert same_bits(ours, quantizer.fake_quantize(w, bits, grid, blend=blend, dtype=dtype))


def test_a_backward_pass_through_older_weights_fails() -> None:
    w = weight()
    out = cpu_quant.fake_quantize(w, 8)
    stale = (w.clone().requires_grad_() * out).sum()
    cpu_quant.fake_quantize(w, 4, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_wrong_arguments_are_told() -> None:
    w = weight()
    with pytest.raises(ValueError, match="sets its own scale"):
        cpu_quant.least_squares_ratio(w, 2)
    with pytest.raises(ValueError, match="do not divide"):
        cpu_quant.fake_quantize(w, 8, Grid(RowBlocks(4)))


def test_without_numba_the_log_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'numba'")

    monkeypatch.setattr(cpu_quant, "_kernels", missing)
    cpu_quant.available.cache_clear()
    try:
        w = weight()
        assert [choose("search", w, torch.float32) for _ in range(2)] == [quantizer] * 2
    finally:
        cpu_quant.available.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "No module named 'numba'" in record.getMessage()


def test_each_calls_all_and_raises() -> None:
    for threads in (1, 3):
        torch.set_num_threads(threads)
        seen: list[int] = []
        cpu_quant.each(seen.append, range(20))
        assert sorted(seen) == list(range(20))
        with pytest.raises(ZeroDivisionError):
            cpu_quant.each(lambda item: 1 // item, [1, 0, 1])


def test_each_within_each_needs_no_second_thread() -> None:
    torch.set_num_threads(2)
    seen: list[int] = []
    cpu_quant.each(lambda _: cpu_quant.each(seen.append, range(4)), range(8))
    assert sorted(seen) == sorted([*range(4)] * 8)


# With threads of torch, so that no thread of the test run is in the way.
FORK = """
import os, signal
from moq_hf.kernels import cpu as cpu_quant
import torch

torch.set_num_threads(2)
seen = []
cpu_quant.each(seen.append, range(4))
child = os.fork()
if not child:
    # What hangs ends here, with the parent.
    signal.alarm(20)
    cpu_quant.each(seen.append, range(4))
    os._exit(0 if len(seen) == 8 else 1)
assert os.waitpid(child, 0)[1] == 0, "the child hangs"
cpu_quant.each(seen.append, range(4))
assert len(seen) == 8
"""


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(FORK)
    done = programs.run("fork.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("around", [torch.bfloat16, torch.float16, torch.float64, torch.device("meta")], ids=str)
def test_default_dtypes_and_devices_change_nothing(around: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    parameters = {"0": list(model[0].parameters())}
    inputs = torch.randn(4, 8)

    def measured() -> Any:
        eigenvalues = eigen.block_eigenvalues(lambda: model(inputs).square().sum(), parameters)
        eigen.check_second_derivative([lambda: model(inputs).square().sum()], parameters["0"])
        cpu_quant.available.cache_clear()
        return eigenvalues["0"].value, cpu_quant.available(), ratio_of(model[0].weight)

    def ratio_of(weight: torch.Tensor) -> torch.Tensor:
        return choose("search", weight, torch.float32).least_squares_ratio(weight, 4)

    expected = measured()
    before = torch.get_default_dtype()
    try:
        if isinstance(around, torch.dtype):
            torch.set_default_dtype(around)
            found = measured()
            quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
        else:
            with around:
                found = measured()
                quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    finally:
        torch.set_default_dtype(before)
        cpu_quant.available.cache_clear()
    assert found[:2] == expected[:2] and same_bits(found[2], expected[2])
    layer: Any = model[0]
    assert same_bits(layer.quantized_weight(), quantizer.fake_quantize(layer.weight, 4, ratio=expected[2]))
