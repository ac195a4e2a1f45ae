"""The kernel against `quantizer`: natively on a CUDA device, elsewhere in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so those tests run in a process of their own, which
`test_in_triton_s_interpreter` starts.
"""

import importlib.util
import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numerics import GROUPINGS, HALF_MODES, MODES, same_bits
from torch import nn

from moq_hf import MoQConfig, quantizer, triton_quant
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import RoundingSeed
from moq_hf.training.controller import MoQController

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
on_device = pytest.mark.skipif(False, reason="the interpreter runs it") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIFORM = [(bits, grid) for bits, grid in [*MODES, *HALF_MODES] if grid.is_uniform(bits)]
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
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that was not tried out yet, and no word of what a test comes to afterwards."""
    monkeypatch.setattr(triton_quant, "_given_up", set())
    triton_quant._is_right.cache_clear()
    yield
    triton_quant._is_right.cache_clear()


def agrees(weight: torch.Tensor, bits: int, grid: Grid, **how: Any) -> bool:
    """Whether the kernel was launched, and gives the values and scales of `quantizer`."""
    launched: list[int] = []
    launch = triton_quant._launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_quant, "_launch", lambda *a: (launched.append(1), launch(*a))[1])
        found = triton_quant.fake_quantize_with_scale(weight, bits, grid, **how)
    expected = quantizer.fake_quantize_with_scale(weight, bits, grid, **how)
    # A group that holds NaN or Inf comes out as either.
    pairs = [[torch.where(x.isfinite(), x, torch.nan) for x in pair] for pair in zip(found, expected, strict=True)]
    return bool(launched) and all(same_bits(*pair) for pair in pairs)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_in_triton_s_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, done.stdout


@on_device
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("mode", UNIFORM, ids=str)
def test_the_kernel_is_the_definition(mode: tuple[int, Grid], grouping: Grouping) -> None:
    bits, grid = mode[0], replace(mode[1], grouping=grouping)
    # Each combination of dtypes and options comes up over the cases.
    case = UNIFORM.index(mode) + GROUPINGS.index(grouping)
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
        ((96, 768), RowBlocks(2)),
        ((24, 3072), PerChannel()),
    ],
    ids=str,
)
def test_shapes(shape: tuple[int, int], grouping: Grouping) -> None:
    weight = torch.randn(shape, device=DEVICE) * 0.02
    for grid in (Grid(grouping), Grid(grouping, stochastic=True), Grid(grouping, symmetric=False)):
        assert agrees(weight, 4, grid, seed=SEED, dtype=torch.bfloat16)
        assert agrees(weight.t().contiguous().t(), 4, grid, seed=SEED)


@on_device
def test_halves_round_to_even_and_extreme_values_stay() -> None:
    halves = torch.arange(-127, 128).float() / 2
    weight = torch.cat([halves, torch.tensor([127.0])])[None].repeat(2, 1).to(DEVICE)
    weight[1] *= 2.0**90
    assert agrees(weight, 8, Grid(PerChannel()))
    for magnitude in (3e38, 1e6, 1e-6, 1e-37, 1e-45):
        weight = torch.randn(2, 20, device=DEVICE).clamp(-1, 1) * magnitude
        assert all(agrees(weight, bits, replace(grid, stochastic=False)) for bits, grid in UNIFORM)


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


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_compiles_for_a_gpu(capability: int, asymmetric: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moq_hf.kernels.triton import fake_quantize_kernel as kernel

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    types = {"X_ptr": "*fp32", "Y_ptr": "*bf16", "scale_ptr": "*fp32", "ratio_ptr": "*fp32", "n_rows": "i32"}
    types |= {"n_cols": "i32", "low": "fp32", "high": "fp32", "keep": "fp32"}
    constants = {"noise_ptr": None, "blend": None, "BLOCK_ROWS": 4, "BLOCK_SIZE": 1024}
    constants |= {"SYMMETRIC": not asymmetric, "FULL": False, "SCALE_DTYPE": triton.language.float32}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types if name[-3:] in ("ptr", "ols")},
    )
    options = {"num_warps": triton_quant._WARPS, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    # Rounded as IEEE has it, nothing fused, and 16 bytes at a time.
    assert "div.rn.f32" in ptx and "div.full" not in ptx and "fma" not in ptx
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)


@on_device
def test_a_kernel_that_cannot_be_launched_is_found_at_first_use(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_quant, "_launch", lambda *arguments: {}["no kernel"])
    assert not triton_quant.available(DEVICE) and not triton_quant.available(DEVICE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the Triton kernel is not used on" in record.message and "KeyError" in record.message


@on_device
def test_a_launch_that_fails_within_a_run_leaves_it_to_pytorch(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(6, 8, device=DEVICE)
    assert triton_quant.available(DEVICE)
    monkeypatch.setattr(triton_quant, "_launch", lambda *arguments: {}["no kernel"])
    for _ in range(2):
        assert same_bits(triton_quant.fake_quantize(weight, 8), quantizer.fake_quantize(weight, 8))
    (record,) = caplog.records
    assert "plain PyTorch computes in its place" in record.message and not triton_quant.available(DEVICE)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its functions in it")
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("_as_stored", lambda right, scale, dtype: scale),
        ("_round", lambda right, y: right(y + 1e-3)),
        ("_cast", lambda right, values, dtype: right(values * 1.01, dtype)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_part_of_the_kernel_is_found_at_first_use(
    function: str, wrong: Any, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from moq_hf.kernels import triton as kernels

    right = getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *arguments: wrong(right, *arguments))
    assert not triton_quant.available(DEVICE)
    (record,) = caplog.records
    assert "weights differ" in record.message


@pytest.mark.parametrize("triton", [None, ModuleType("triton")], ids=["missing", "old"])
def test_without_a_triton_that_works_one_warning_says_so_for_a_gpu(
    triton: ModuleType | None, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert not triton_quant.available(torch.device("cpu")) and not caplog.records
    for _ in range(2):
        assert not triton_quant.available(torch.device("cuda", 0))
    (record,) = caplog.records
    assert "not used on cuda:0" in record.message and "it needs Triton 3.4 or later" in record.message


@pytest.mark.skipif(INTERPRETED, reason="nothing of it is of the interpreter")
def test_needs_no_triton_to_be_imported() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from moq_hf import quantize_model, triton_quant\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "quantize_model(model, {'quantizer_kernel': True, 'quantize_bits': {'start_bits': 4, 'target_bits': 4}})\n"
        "assert 'bits=4' in repr(model) and not triton_quant.available(torch.device('cpu'))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.skipif(INTERPRETED, reason="the kernel can run here")
def test_a_file_that_asks_for_kernels_trains_without_them() -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
    for kernel, count in ((True, 1), (None, 0), (False, 0)):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        more = {} if kernel is None else {"quantizer_kernel": kernel}
        notes = MoQController(model, MoQConfig.from_dict({**config, **more})).warnings()
        notes = [note for note in notes if "quantizer_kernel" in note]
        assert len(notes) == count and all("plain PyTorch gives the same numbers" in note for note in notes)
