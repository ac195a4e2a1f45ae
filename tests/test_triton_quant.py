"""The kernel against `quantizer`: on a CUDA device, or in Triton's interpreter.

The interpreter needs a process of its own, which `test_in_triton_s_interpreter` starts.
"""

import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import programs
import pytest
import torch
from numerics import GROUPINGS, HALF_MODES, MODES, same_bits
from repo import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from moq_hf import MoQConfig, quantize_model, quantizer, triton_quant
from moq_hf.grid import FP4, Format, Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.layer_state import LayerState
from moq_hf.quantizer import RoundingSeed
from moq_hf.training.controller import MoQController

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
on_device = pytest.mark.skipif(False, reason="it runs here") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIFORM = [(bits, grid) for bits, grid in [*MODES, *HALF_MODES] if grid.at(bits).is_uniform]
SEED = RoundingSeed(2**35 + 7, 3, 9)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # Where a GPU computes NaN in silence, numpy in the interpreter warns.
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module", autouse=INTERPRETED)
def members_are_known() -> Iterator[None]:
    """At each call of a function the interpreter sorts all members of Triton's modules to find what it replaces.

    Half of the time would go into that. What it may replace is found once, while nothing is replaced.
    """
    from triton import language
    from triton.language import core, math
    from triton.runtime import interpreter

    packages = (language, core, math, core.tensor, core.tensor_descriptor_base)
    known = {pkg: [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)] for pkg in packages}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        for name in known[pkg]:
            if core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant of the kernel was tried out yet, and no word of what a test comes to afterwards."""
    monkeypatch.setattr(triton_quant, "_works", {})


def agrees(weight: torch.Tensor, bits: int, grid: Grid, **how: Any) -> bool:
    """Whether the kernel was launched, and gives the values and scales of `quantizer`."""
    launched: list[int] = []
    launch = triton_quant._launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_quant, "_launch", lambda *a, **how: (launched.append(1), launch(*a, **how))[1])
        found = triton_quant.fake_quantize_with_scale(weight, bits, grid, **how)
    expected = quantizer.fake_quantize_with_scale(weight, bits, grid, **how)
    # A group that holds NaN or Inf comes out as either.
    pairs = [[torch.where(x.isfinite(), x, torch.nan) for x in pair] for pair in zip(found, expected, strict=True)]
    return bool(launched) and all(triton_quant._works.values()) and all(same_bits(*pair) for pair in pairs)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is a process of its own")
def test_in_triton_s_interpreter() -> None:
    done = programs.run("-m", "pytest", "-q", *programs.NESTED, __file__, cwd=ROOT, timeout=600, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, done.stdout


@on_device
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("mode", UNIFORM, ids=str)
def test_the_kernel_is_the_definition(mode: tuple[int, Grid], half: int) -> None:
    # The kernel sees a grouping as the length of its groups: two of them for each mode.
    place = (UNIFORM.index(mode) // 2 + half) % 4
    bits, grid = mode[0], replace(mode[1], grouping=GROUPINGS[place])
    # Each combination of dtypes and options comes up over the cases.
    case = UNIFORM.index(mode) + place
    weight = torch.randn(6, 33) * torch.randn(6, 1).exp()
    weight[0, :3] = torch.tensor([0.0, -0.0, 1e-42 if case % 3 != 1 else 0.0])
    weight[-1] = 0.0
    weight = weight.to(DEVICE, FLOATS[case % 3])
    how: dict[str, Any] = {"seed": SEED, "blend": 0.3 if case % 2 else 0.0, "dtype": FLOATS[case // 3 % 3]}
    if case % 4:
        how["ratio"] = torch.tensor(quantizer.RATIOS, device=DEVICE)[torch.randint(17, grid.shape(6, 33))]
    assert agrees(weight, bits, grid, **how)
    # With NaN in one group the others stay as they are, and its scale tells of it.
    weight[3, 5] = [torch.nan, torch.inf, -torch.inf][case % 3]
    assert agrees(weight, bits, grid, **how)
    scale = triton_quant.fake_quantize_with_scale(weight, bits, grid, **how)[1]
    assert int((~scale.isfinite()).sum()) == 1


@on_device
@pytest.mark.parametrize(
    ("shape", "grouping"),
    [
        ((1, 1), RowBlocks()),
        ((5, 1), PerChannel()),
        ((2, 64), RowBlocks(2)),
        ((300, 32), PerGroup(4)),
        ((7, 9), PerGroup(1)),
        ((3, 1025), PerChannel()),
        ((16, 768), RowBlocks(2)),
        ((9, 3072), PerChannel()),
    ],
    ids=str,
)
def test_shapes(shape: tuple[int, int], grouping: Grouping) -> None:
    weight = torch.randn(shape, device=DEVICE) * 0.02
    for grid in (Grid(grouping), Grid(grouping, stochastic=True), Grid(grouping, symmetric=False)):
        assert agrees(weight, 4, grid, seed=SEED, dtype=torch.bfloat16)
        assert agrees(weight.t().contiguous().t(), 4, grid, seed=SEED)


@pytest.mark.gpu
def test_a_weight_may_have_more_than_2_31_elements() -> None:
    weight = torch.empty(2**16 + 9, 2**15, dtype=torch.bfloat16, device="cuda")
    assert weight.numel() > 2**31
    weight[-9:] = torch.randn(9, 2**15)
    found = triton_quant.fake_quantize(weight, 8, Grid(PerChannel()))
    assert same_bits(found[-9:], quantizer.fake_quantize(weight[-9:], 8, Grid(PerChannel())))


@on_device
def test_halves_round_to_even_and_extreme_values_stay() -> None:
    halves = torch.arange(-127, 128).float() / 2
    weight = torch.cat([halves, torch.tensor([127.0])])[None].repeat(2, 1).to(DEVICE)
    weight[1] *= 2.0**90
    assert agrees(weight, 8, Grid(PerChannel()))
    for case, magnitude in enumerate((3e38, 1e6, 1e-6, 1e-37, 1e-45)):
        weight = torch.randn(2, 20, device=DEVICE).clamp(-1, 1) * magnitude
        assert all(agrees(weight, bits, replace(grid, stochastic=False)) for bits, grid in UNIFORM[case % 3 :: 3])


@on_device
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_that_are_floats(name: Format, stochastic: bool) -> None:
    size = FP4[name].group_size
    grid = Grid(PerGroup(size), stochastic=stochastic, scale_dtype="bfloat16", format=name)
    weight = torch.randn(64, 2 * size) * torch.logspace(-8, 3, 64)[:, None]
    ties = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, -6.0])
    weight[:20] = ties.repeat(size // 8) * torch.logspace(-17, 2, 20, 2)[:, None]
    weight[20:24] *= torch.tensor([[0.0], [1e-30], [1e30], [1.0]])
    weight[23, size:] = 1.75 * ties.repeat(size // 16) / 6
    ratio = torch.tensor([1.8, 1.0, 0.5], device=DEVICE)[torch.randint(3, (64, 2))]
    for dtype in FLOATS:
        given = weight.clamp(-6e4, 6e4).to(DEVICE, dtype)
        assert agrees(given, 4, grid, seed=SEED)
        assert agrees(given, 4, grid, seed=SEED, ratio=ratio, blend=0.3, dtype=torch.float32)
        # Before the last drop codes are integers.
        assert agrees(given, 5, grid, seed=SEED, ratio=ratio.clamp(max=1.0))
    weight[24] = torch.finfo(torch.float32).max
    weight[25] = torch.finfo(torch.float32).min
    assert agrees(weight.to(DEVICE), 4, grid, seed=SEED)
    weight[3, 5] = torch.nan
    weight[9, 5] = -torch.inf
    assert agrees(weight.to(DEVICE), 4, grid, seed=SEED)


@on_device
def test_what_the_kernel_does_not_take_is_for_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quant, "_launch", None)
    monkeypatch.setattr(triton_quant, "LONGEST", 63)
    weight = torch.randn(8, 16, device=DEVICE)
    for bits, odd in ((2, weight), (1, weight), (8, weight.double()), (8, weight)):
        assert same_bits(triton_quant.fake_quantize(odd, bits), quantizer.fake_quantize(odd, bits))


@on_device
@pytest.mark.parametrize("more", [{}, {"quantize_algo": {"range": "full", "scale_dtype": "float16"}}], ids=str)
def test_training_is_the_same_with_and_without_the_kernel(more: dict[str, Any]) -> None:
    x = torch.randn(32, 8, device=DEVICE)
    config = {
        "quantize_bits": {"start_bits": 5, "target_bits": 2},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
        "quantize_groups": 4,
        **more,
    }
    ends = []
    for kernel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2)).to(DEVICE)
        controller = MoQController(model, MoQConfig.from_dict({**config, "quantizer_kernel": kernel}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(6):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


@on_device
def test_what_cannot_be_launched_is_left_to_pytorch_at_first_use_and_within_a_run(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(6, 8, device=DEVICE)
    launch = triton_quant._launch
    # One variant fails, and takes no other with it.
    monkeypatch.setattr(
        triton_quant, "_launch", lambda *a, **how: {}["no kernel"] if how["blend"] else launch(*a, **how)
    )
    for blend in (0.5, 0.5, 0.0):
        expected = quantizer.fake_quantize(weight, 8, blend=blend)
        assert same_bits(triton_quant.fake_quantize(weight, 8, blend=blend), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and sorted(triton_quant._works.values()) == [False, True]
    assert "the Triton kernel is not used on" in record.message and "KeyError" in record.message
    assert "plain PyTorch computes in its place" in record.message
    # The variant that did work.
    monkeypatch.setattr(triton_quant, "_launch", lambda *arguments, **how: {}["no kernel"])
    for _ in range(2):
        assert same_bits(triton_quant.fake_quantize(weight, 8), quantizer.fake_quantize(weight, 8))
    _, record = caplog.records
    assert "KeyError" in record.message and list(triton_quant._works.values()) == [False, False]


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(dtype: torch.dtype, untried: None) -> None:
    weight = torch.randn(6, 96, device=DEVICE)
    ratio = torch.full((6, 1), 0.85, device=DEVICE)
    torch.set_default_dtype(dtype)
    try:
        assert agrees(weight, 8, Grid(PerChannel()), ratio=ratio, blend=0.3)
    finally:
        torch.set_default_dtype(torch.float32)


@on_device
def test_a_weight_of_another_shape_has_levels_of_its_own(untried: None) -> None:
    layer: Any = nn.Sequential(nn.Linear(96, 40), nn.Linear(40, 2)).to(DEVICE)
    quantize_model(layer, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    layer = layer[0]
    for rows in (40, 30, 50):
        layer.weight = nn.Parameter(torch.randn(rows, 96, device=DEVICE))
        layer.set_bits(4)
        expected = quantizer.fake_quantize(layer.float_weight, 4, layer.moq.grid, ratio=layer.moq.ratio)
        assert len(layer.moq.ratio) == rows and same_bits(layer.quantized_weight(), expected)
    assert list(triton_quant._works.values()) == [True]


@pytest.mark.skipif(INTERPRETED, reason="it is of any path")
def test_replicas_on_two_devices_do_not_share_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[torch.device, Any] = {}

    def fake_quantize(weight: torch.Tensor, *arguments: Any, levels: Any, **how: Any) -> tuple[torch.Tensor, None]:
        used[weight.device] = levels
        return weight, None

    monkeypatch.setattr(triton_quant, "rounded", fake_quantize)
    state = LayerState(Grid(), MoQConfig(bits=4), bits=4)
    for place in ("cpu", "meta", "cpu"):
        state.fake_quantize(torch.empty(4, 8, device=place), torch.float32)
    first, second = used.values()
    assert first is not second and set(state.levels) == set(used)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its functions in it")
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("_as_stored", lambda right, scale, dtype: right(scale * 1.01, dtype)),
        ("_round", lambda right, y: right(y + 1e-3)),
        ("_divide", lambda right, x, *divisor: right(x * 1.0000002, *divisor)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_part_of_the_kernel_is_found_at_first_use(
    function: str, wrong: Any, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moq_hf.kernels import triton as kernels

    right = getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *arguments: wrong(right, *arguments))
    weight = torch.randn(6, 96)
    assert same_bits(triton_quant.fake_quantize(weight, 4), quantizer.fake_quantize(weight, 4))
    (record,) = caplog.records
    assert "it gives other numbers than plain PyTorch" in record.message


def test_a_device_without_room_is_no_reason_to_give_the_kernel_up(
    untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(triton_quant, "available", lambda device: True)
    monkeypatch.setattr(triton_quant, "_try_out", lambda *arguments: None)
    monkeypatch.setattr(triton_quant, "_launch", launch)
    with pytest.raises(torch.OutOfMemoryError):
        triton_quant.fake_quantize(torch.randn(6, 8), 8)
    assert list(triton_quant._works.values()) == [True]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 120, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_compiles_for_the_oldest_and_the_newest_gpus(
    target: tuple[str, Any, int], symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from moq_hf.kernels.triton import fake_quantize_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"X_ptr": "*fp32", "Y_ptr": "*bf16", "scale_ptr": "*fp32", "levels_ptr": "*fp32"}
    types |= {"n_rows": "i32", "n_cols": "i32"}
    constants = {"noise_ptr": None, "SYMMETRIC": symmetric, "BLENDS": False, "SCALE_DTYPE": "float32", "FORMAT": "int"}
    constants |= {"BLOCK_ROWS": 8, "BLOCK_COLS": 256, "ONE_TILE": False}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    assert triton.compile(source, target=GPUTarget(*target), options=options).kernel


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="it chooses for itself")
def test_the_interpreter_may_be_chosen_after_the_import(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, torch, moq_hf.kernels.triton\n"
        "from moq_hf import triton_quant\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "triton_quant.fake_quantize(torch.randn(4, 300), 4)\n"
        "assert list(triton_quant._works.values()) == [True], triton_quant._works\n"
    )
    done = programs.run(str(tmp_path / "program.py"), cwd=ROOT, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("triton", [None, ModuleType("triton")], ids=["missing", "old"])
def test_without_a_triton_that_works_one_warning_says_so_for_a_gpu(
    triton: ModuleType | None, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    assert not triton_quant.available(torch.device("cpu")) and not caplog.records
    for _ in range(2):
        assert not triton_quant.available(torch.device("cuda", 0))
    (record,) = caplog.records
    assert "not used on cuda:0" in record.message and "it needs Triton 3.4 or later" in record.message


@pytest.mark.skipif(INTERPRETED, reason="the kernel can run here")
def test_a_file_that_asks_for_kernels_trains_without_them() -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
    for kernel, count in ((True, 1), (None, 0), (False, 0)):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        more = {} if kernel is None else {"quantizer_kernel": kernel}
        notes = MoQController(model, MoQConfig.from_dict({**config, **more})).warnings()
        notes = [note for note in notes if "quantizer_kernel" in note]
        assert len(notes) == count and all("plain PyTorch gives the same numbers" in note for note in notes)


@pytest.mark.skipif(INTERPRETED, reason="it is of any path")
def test_a_compiled_model_sees_one_operator_with_a_straight_through_gradient() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    layer: Any = model[0]
    compiled: Any = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(5, 8)
    for bits in (8, 4, 3, 2, 1, 32):
        layer.set_bits(bits)
        layer.weight.grad = None
        for run in (layer, lambda x: checkpoint(compiled, x, use_reentrant=False)):
            run(x).sum().backward()
        # Twice that of a float layer: the rounding has no gradient of its own.
        torch.testing.assert_close(layer.weight.grad, 2 * x.sum(0).expand(6, 8))
        assert same_bits(compiled(x), layer(x))
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in names if "linear" not in name] == ["moq_hf.quantized.default"]
    # Nor does inductor capture it in a CUDA graph, where a drop would go unnoticed.
    assert torch.Tag.cudagraph_unsafe in torch.ops.moq_hf.quantized.default.tags
