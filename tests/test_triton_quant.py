"""The kernels against `quantizer`: natively on a CUDA device, elsewhere in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so those tests run in a process of their own, which
`test_in_triton_s_interpreter` starts.
"""

import copy
import importlib.util
import inspect
import itertools
import logging
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numerics import GROUPINGS, HALF_MODES, MODES, SEARCHED, same_bits
from repo import ROOT
from torch import nn
from transformers import BertForSequenceClassification

from moq_hf import MoQConfig, MoQError, quantizer, triton_quant
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.kernels import packing
from moq_hf.quantizer import Draw
from moq_hf.training.controller import MoQController
from moq_hf.triton_quant import Batch, Job

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
natively = pytest.mark.gpu
on_device = pytest.mark.skipif(False, reason="the interpreter runs it") if INTERPRETED else natively
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


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


def set_tiling(monkeypatch: pytest.MonkeyPatch, tiles: bool) -> None:
    """Either kernel on small weights: for groups of several tiles, or for groups that one program sees as a whole."""
    monkeypatch.setattr(triton_quant, "TILE", 32)
    monkeypatch.setattr(triton_quant, "WHOLE", 8 if tiles else 1024)


@pytest.fixture(params=["whole groups", "tiles"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    set_tiling(monkeypatch, request.param == "tiles")
    return str(request.param)


def guarded(shape: tuple[int, int], dtype: torch.dtype, fill: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix of NaN, or of `fill`, in the middle of a longer stretch of NaN."""
    count = shape[0] * shape[1]
    matrix = torch.full((count + 128,), torch.nan, dtype=dtype, device=DEVICE)[64:-64].view(shape)
    return matrix if fill is None else matrix.copy_(fill)


def guard_is_whole(matrix: torch.Tensor) -> bool:
    base = matrix._base
    assert base is not None
    return bool(base[:64].isnan().all() and base[-64:].isnan().all())


def make_weight(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    w = torch.randn(rows, columns) * torch.randn(rows, 1).exp()
    w[0, :3] = torch.tensor([0.0, -0.0, 1e-42])
    w[-1] = 0.0
    return guarded((rows, columns), dtype, w)


def make_ratio(w: torch.Tensor, grid: Grid) -> torch.Tensor:
    shape = grid.shape(*w.shape)
    return torch.tensor(quantizer.RATIOS, device=DEVICE)[torch.randint(17, shape, device=DEVICE)]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_in_triton_s_interpreter() -> None:
    files = [str(ROOT / "tests" / name) for name in ("test_triton_quant.py", "packed/test_inference.py")]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = Counter(re.findall(r"(\w+\.py)::.* PASSED", done.stdout))
    assert passed["test_triton_quant.py"] > 150 and passed["test_inference.py"] == 19, done.stdout


@on_device
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fake_quantize_is_the_definition(
    mode: tuple[int, Grid], grouping: Grouping, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits, grid = mode[0], replace(mode[1], grouping=grouping)
    # Each mode meets both kernels, and each combination of dtypes and options comes up over the cases.
    case = MODES.index(mode) + GROUPINGS.index(grouping)
    set_tiling(monkeypatch, GROUPINGS.index(grouping) % 2 == 0)
    w = make_weight(6, 33, FLOATS[case % 3])
    options: dict[str, Any] = {"draw": Draw(2**35 + 7, 3, 9), "blend": 0.3 if case % 2 else 0.0}
    if case % 3 and grid.is_uniform(bits):
        options["ratio"] = make_ratio(w, grid)
    dtype = FLOATS[case // 3 % 3]
    out = guarded((6, 33), dtype)
    assert triton_quant.fake_quantize(w, bits, grid, out=out, **options) is out
    assert same_bits(out, quantizer.fake_quantize(w, bits, grid, dtype=dtype, **options))
    assert guard_is_whole(out) and guard_is_whole(w)


@on_device
@pytest.mark.parametrize(
    ("shape", "grouping"),
    [
        ((1, 1), RowBlocks()),
        ((5, 1), PerChannel()),
        ((2, 64), RowBlocks(2)),
        ((4, 32), PerGroup(4)),
        ((7, 9), PerGroup(1)),
        ((3, 130), RowBlocks()),
    ],
    ids=str,
)
def test_shapes(shape: tuple[int, int], grouping: Grouping, tiling: str) -> None:
    for bits, grid in [(1, Grid(grouping)), (2, Grid(grouping)), (4, Grid(grouping, stochastic=True))]:
        w = guarded(shape, torch.float32, torch.randn(shape))
        out = guarded(shape, torch.float32)
        triton_quant.fake_quantize(w, bits, grid, out=out)
        assert same_bits(out, quantizer.fake_quantize(w, bits, grid))
        assert guard_is_whole(out)


@on_device
def test_large_weights_with_the_tiles_of_a_gpu() -> None:
    layouts: list[tuple[tuple[int, int], Grouping]] = [
        ((96, 768), RowBlocks(2)),
        ((24, 3072), PerChannel()),
        ((64, 512), RowBlocks()),
    ]
    for shape, grouping in layouts:
        w = torch.randn(shape, device=DEVICE) * 0.02
        for bits, stochastic in [(8, False), (8, True), (2, False), (1, False)]:
            grid, draw = Grid(grouping, stochastic=stochastic), Draw(seed=1, step=4)
            out = triton_quant.fake_quantize(w, bits, grid, draw=draw, dtype=torch.bfloat16)
            assert same_bits(out, quantizer.fake_quantize(w, bits, grid, draw=draw, dtype=torch.bfloat16))


@on_device
def test_halves_round_to_even_and_extreme_values_stay(tiling: str) -> None:
    halves = torch.arange(-127, 128).float() / 2
    w = torch.cat([halves, torch.tensor([127.0])])[None].repeat(2, 1).to(DEVICE)
    w[1] *= 2.0**90
    two = Grid(RowBlocks(2))
    assert same_bits(triton_quant.fake_quantize(w, 8, two), quantizer.fake_quantize(w, 8, two))
    extreme = [(bits, grid) for bits, grid in HALF_MODES if not grid.stochastic]
    extreme += [(1, Grid()), (2, Grid()), (2, Grid(symmetric=False)), (4, Grid()), (16, Grid(symmetric=False))]
    for magnitude in (3e38, 1e6, 1e-6, 1e-37, 1e-45):
        w = torch.randn(2, 20, device=DEVICE).clamp(-1, 1) * magnitude
        for bits, grid in extreme:
            assert same_bits(triton_quant.fake_quantize(w, bits, grid), quantizer.fake_quantize(w, bits, grid))


@on_device
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -float("nan")])
def test_nonfinite_weights_are_told(value: float, tiling: str) -> None:
    weights = [torch.randn(4, 10, device=DEVICE) for _ in range(8)]
    grids = (Grid(), Grid(symmetric=False), Grid(full=True), Grid(full=True, scale_dtype="float16"))
    modes = list(zip((1, 8, 2, 4), grids, strict=True)) * 2
    for w in weights[4:]:
        w[1, 7] = value
    jobs = [
        Job(w, torch.empty_like(w), bits, replace(grid, grouping=RowBlocks(2)))
        for w, (bits, grid) in zip(weights, modes, strict=True)
    ]
    batch = Batch(jobs)
    batch.run()
    assert batch.nonfinite() == [4, 5, 6, 7]
    assert batch.nonfinite() == []
    assert [bool(quantizer.nonfinite(job.out, job.grid)) for job in jobs] == [False] * 4 + [True] * 4


def mixed_jobs() -> list[Job]:
    """Weights of many shapes, bits and dtypes, as in the middle of a schedule."""
    jobs = []
    shapes = itertools.cycle([(6, 8), (3, 40), (12, 12), (6, 33), (3, 4)])
    for index, (shape, (bits, mode)) in enumerate(zip(shapes, [*MODES[::-1], *HALF_MODES[::4]], strict=False)):
        w = guarded(shape, FLOATS[index % 2], torch.randn(shape))
        out = guarded(shape, torch.bfloat16 if index % 3 else torch.float32)
        grid = replace(mode, grouping=RowBlocks(3))
        ratio = make_ratio(w, grid) if bits == 3 else None
        jobs.append(Job(w, out, bits, grid, ratio, Draw(5, index)))
    return jobs


def reference(job: Job) -> torch.Tensor:
    options = {"ratio": job.ratio, "draw": job.draw, "blend": job.blend}
    return quantizer.fake_quantize(job.weight, job.bits, job.grid, dtype=job.out.dtype, **options)


@on_device
def test_a_batch_follows_its_weights_steps_and_blends(tiling: str) -> None:
    jobs = mixed_jobs()
    batch = Batch(jobs)
    for step in range(3):
        for job in jobs:
            job.weight.mul_(0.9).add_(0.01)
        blends = [0.1 * step * (index % 2) for index in range(len(jobs))]
        batch.update([step] * len(jobs), blends)
        batch.run()
        for job, blend in zip(jobs, blends, strict=True):
            now = job._replace(draw=job.draw._replace(step=step), blend=blend)
            assert same_bits(job.out, reference(now)), job
            assert guard_is_whole(job.out)


@on_device
@pytest.mark.parametrize(
    ("grouping", "mode", "dtype"),
    list(zip(itertools.cycle(GROUPINGS), SEARCHED, itertools.cycle([*FLOATS, torch.float32]), strict=False)),
    ids=str,
)
def test_least_squares_ratio_is_the_definition(
    grouping: Grouping, mode: tuple[int, Grid], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_quant, "TILE", 256)
    w = make_weight(6, 33, dtype)
    bits, grid = mode[0], replace(mode[1], grouping=grouping)
    for _ in range(2):
        assert same_bits(triton_quant.least_squares_ratio(w, bits, grid), quantizer.least_squares_ratio(w, bits, grid))
        w[1, 1] = torch.nan


@needs_triton
@pytest.mark.parametrize("grouping", [RowBlocks(), PerChannel()], ids=str)
def test_a_search_of_many_programs_can_be_launched(grouping: Grouping, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, ...]] = []

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return self

        def __getitem__(self, programs: tuple[int, ...]) -> Any:
            launches.append(programs)
            return lambda *arguments, **options: None

    monkeypatch.setattr(triton_quant, "load_kernels", Kernels)
    monkeypatch.setattr(triton_quant, "TILE", 16)
    triton_quant.least_squares_ratio(torch.empty(2**17, 4), 4, Grid(grouping))
    # CUDA takes 2^31 - 1 programs along the first axis, and 65,535 along the others.
    assert launches == [(2**17,)] * 2


def bit_stream(codes: torch.Tensor, bits: int) -> list[int]:
    """The words of one row, by way of a big integer."""
    number = sum((int(code) + 2 ** (bits - 1)) << (bits * place) for place, code in enumerate(codes))
    words = [number >> 32 * place & 0xFFFFFFFF for place in range(packing.packed_width(len(codes), bits))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 31, 32, 45])
@pytest.mark.parametrize("device", ["plain PyTorch", pytest.param("kernel", marks=on_device)])
def test_packing(bits: int, columns: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "plain PyTorch":
        monkeypatch.setattr(packing, "available", lambda _: False)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, columns), dtype=torch.int32)
    codes = codes.to(DEVICE) if device == "kernel" else codes
    words = packing.pack(codes, bits)
    assert words.dtype == torch.int32 and words.tolist() == [bit_stream(row, bits) for row in codes]
    assert torch.equal(packing.unpack(words, bits, columns), codes)


@on_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 15])
@pytest.mark.parametrize("rows", [1, 70])
def test_packed_linear(dtype: torch.dtype, bits: int, groups: int, rows: int) -> None:
    outputs, columns = 33, 45
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (outputs, columns), dtype=torch.int32, device=DEVICE)
    # A full range has scales of both signs.
    scale = (torch.rand(outputs, groups, device=DEVICE) + 0.1) * torch.randn(outputs, groups, device=DEVICE).sign()
    x = torch.randn(rows, columns, device=DEVICE).to(dtype)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    zero = torch.randint(low, high, (outputs, groups), dtype=torch.int32, device=DEVICE) if rows == 70 else None
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if rows == 1 else None
    y = packing.packed_linear(x.view(rows, 1, columns), packing.pack(codes, bits), bits, scale, zero, bias)
    weight = quantizer.dequantize(codes, scale, zero)
    # With scales within a row, the product is with the weight in the dtype of the activations.
    weight = weight.double() if groups == 1 else weight.to(dtype).double()
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T
    # One rounding of the result, and float32's of each of the 45 sums.
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 45 * size * torch.finfo(torch.float32).eps
    assert y.shape == (rows, 1, outputs) and y.dtype == dtype
    assert ((y.view(rows, outputs).double() - exact).abs() <= allowed + torch.finfo(dtype).tiny).all()


@on_device
def test_packed_linear_of_nothing() -> None:
    words, scale = torch.zeros(4, 1, dtype=torch.int32, device=DEVICE), torch.ones(4, 1, device=DEVICE)
    assert packing.packed_linear(torch.empty(0, 8).half().to(DEVICE), words, 4, scale).shape == (0, 4)


def moq(**more: Any) -> MoQConfig:
    schedule = {"quantize_period": 1, "schedule_offset": 1}
    bits = {"start_bits": 5, "target_bits": 2}
    return MoQConfig.from_dict({"quantize_bits": bits, "quantize_schedule": schedule, "quantize_groups": 4, **more})


@on_device
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"quantize_type": "asymmetric", "quantize_algo": {"rounding": "stochastic"}},
        {"quantize_algo": {"range": "full", "scale_dtype": "float16"}},
        {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}},
    ],
    ids=str,
)
def test_training_is_the_same_with_and_without_kernels(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(32, 8, device=DEVICE)
    launches: list[int] = []
    run = Batch.run
    monkeypatch.setattr(Batch, "run", lambda self: launches.append(len(self.jobs)) or run(self))
    ends, used = [], []
    for kernel in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 2)).to(DEVICE)
        controller = MoQController(model, moq(quantizer_kernel=kernel, **more), dtype=torch.bfloat16 if more else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        launches.clear()
        for _ in range(10):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bool(more)):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.step()
        assert controller.has_arrived or more
        ends.append([p.detach().clone() for p in model.parameters()])
        ends[-1] += [layer.quantized_weight().detach() for layer in controller.layers.values()]
        used.append(sorted(set(launches)))
    assert used == [[len(controller.layers)], []]
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


@on_device
def test_batches_follow_moved_weights_and_tell_of_nan(tiny_bert: BertForSequenceClassification) -> None:
    model = tiny_bert.to(DEVICE)
    controller = MoQController(model, moq(quantizer_kernel=True))
    assert controller.warnings() == []
    for _ in range(2):
        controller.step()
    name, layer = next(iter(controller.layers.items()))
    for change in (
        lambda: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
        lambda: model.double(),
        lambda: model.float(),
    ):
        change()
        controller.refresh()
        assert layer.moq.weight is not None
        exact = quantizer.fake_quantize(
            layer.weight.detach(), layer.moq.bits, layer.moq.grid, ratio=layer.moq.ratio, draw=layer.moq.draw
        )
        assert same_bits(layer.moq.weight, exact)
    with torch.no_grad():
        layer.weight[3, 3] = torch.inf
    with pytest.raises(MoQError, match=re.escape(f"NaN or Inf in {name}.weight")):
        controller.refresh()


@on_device
@pytest.mark.parametrize("kernel", [True, False])
def test_a_backward_pass_through_older_weights_fails(kernel: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).to(DEVICE)
    controller = MoQController(model, moq(quantizer_kernel=kernel))
    controller.step()
    stale = model(torch.randn(2, 8, device=DEVICE)).sum()
    controller.refresh()
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        stale.backward()


@natively
def test_a_graph_captures_it() -> None:
    jobs = [Job(torch.randn(64, 768, device=DEVICE), torch.empty(64, 768, device=DEVICE), 8, Grid(RowBlocks(2)))]
    batch = Batch(jobs)
    batch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run()
    for _ in range(3):
        jobs[0].weight.normal_()
        graph.replay()
        assert same_bits(jobs[0].out, reference(jobs[0]))


@natively
def test_nonfinite_without_waiting_is_told_later() -> None:
    job = Job(torch.full((4, 4), torch.nan, device=DEVICE), torch.empty(4, 4, device=DEVICE), 8)
    batch = Batch([job])
    told = []
    for _ in range(3):
        batch.run()
        told.append(batch.nonfinite(wait=False))
        torch.cuda.synchronize()
    assert told[0] == [] and [0] in told[1:]


@natively
def test_a_model_of_many_large_groups() -> None:
    # More tiles than the device holds programs.
    jobs = []
    for layer in range(24):
        for shape in ((768, 768), (3072, 768)):
            w = torch.randn(shape, device=DEVICE)
            out = torch.empty_like(w, dtype=torch.bfloat16)
            jobs.append(Job(w, out, layer % 8 + 1, Grid(RowBlocks(8)), draw=Draw(layer=layer)))
    batch = Batch(jobs)
    for _ in range(20):
        batch.run()
    assert all(same_bits(job.out, reference(job)) for job in jobs)


@needs_triton
def test_each_pass_goes_over_the_tiles_that_need_it() -> None:
    jobs = [Job(torch.empty(6, 5000), torch.empty(6, 5000), bits, Grid(RowBlocks(3))) for bits in (8, 2, 1, 3)]
    passes = triton_quant._tile_items(jobs, [(10_000, 3)] * 4)
    # Ranges and values of all weights, sums of binary and ternary ones, and of ternary ones those above the threshold.
    for items, rows in zip(passes, ([0, 1, 2, 3], [1, 2], [1], [0, 1, 2, 3]), strict=True):
        assert items.tolist() == [[row, group, tile] for row in rows for group in range(3) for tile in range(3)]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(
    ("capability", "kind", "scale", "phase"),
    [
        (80, 0, "float32", 3),
        (90, 0, "float32", 0),
        (90, 0, "float32", 1),
        (90, 0, "float32", 2),
        (90, 1, "float16", 3),
        (80, 2, "bfloat16", 3),
    ],
)
def test_compiles_for_a_gpu(
    capability: int, kind: int, scale: str, phase: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moq_hf.kernels import triton as triton_kernels

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = triton_kernels.fake_quantize_tiles
    types = {"table": "*i64", "items": "*i32", "marks": "*i32", "sums": "*fp64", "flags": "*i32"}
    constants = {"S": triton_quant.TILE, "KIND": kind, "STOCHASTIC": False, "QUADS": True, "ALIGN": 16}
    constants |= {"SCALE": getattr(triton.language, scale), "PHASE": phase}
    constants |= {"IN": triton.language.float32, "OUT": triton.language.bfloat16}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(types))},
    )
    options = {"num_warps": 8, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    # Rounded as IEEE has it, nothing fused, and 16 bytes at a time.
    assert ("div.rn.f32" in ptx) == (phase == 3) and "div.full" not in ptx and "fma" not in ptx
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == triton_quant.TILE // (8 * 32 * 4)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(("bits", "groups"), [(2, 1), (2, 8), (4, 8), (8, 8), (2, 64)])
@pytest.mark.parametrize("rows", [1, 64])
def test_products_fit_into_the_shared_memory_of_any_gpu(
    bits: int, groups: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """With what `packed_linear` launches, zero points and bias included."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moq_hf.kernels import triton as triton_kernels

    launched: dict[str, Any] = {}
    launch = SimpleNamespace(packed_matmul=defaultdict(lambda: lambda *_, **options: launched.update(options)))
    monkeypatch.setattr(packing, "load_kernels", lambda: launch)
    scale, zero = torch.ones(64, groups), torch.zeros(64, groups, dtype=torch.int32)
    words = torch.zeros(64, 512 * bits // 32, dtype=torch.int32)
    packing.packed_linear(torch.zeros(rows, 512).bfloat16(), words, bits, scale, zero, torch.zeros(64).bfloat16())
    assert launched["SPLIT"] == (512 // groups < 32 // bits)

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = triton_kernels.packed_matmul
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"x": "*bf16", "words": "*i32", "scales": "*fp32", "zeros": "*i32", "bias": "*bf16", "y": "*bf16"}
    options = {name: launched.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(launched, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in launched.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(types) - len(launched))},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # Bytes; of a data center's GPU, 163 KiB or more.
    assert compiled.metadata.shared <= 99 * 1024


def test_wrong_arguments_are_told() -> None:
    w = torch.randn(6, 8)
    for arguments, text in [
        ({"bits": 17}, "1 to 16"),
        ({"bits": 8, "grid": Grid(RowBlocks(4))}, "do not divide"),
        ({"bits": 2, "grid": Grid(stochastic=True)}, "nearest only"),
        ({"bits": 8, "out": torch.empty(8, 6)}, "one shape"),
        ({"bits": 8, "out": torch.empty(8, 6).T}, "contiguous"),
        ({"bits": 8, "out": torch.empty(6, 8, dtype=torch.int8)}, "no kernel for"),
        ({"bits": 8, "out": torch.empty(6, 8, device="meta")}, "one device"),
        ({"bits": 8, "ratio": torch.ones(1, 1).double()}, "float32"),
    ]:
        with pytest.raises(ValueError, match=text):
            triton_quant.fake_quantize(w, **arguments)
    with pytest.raises(ValueError, match="sets its own scale"):
        triton_quant.least_squares_ratio(w, 2)
    codes, scale = torch.zeros(6, 1, dtype=torch.int32), torch.ones(6, 1)
    for function, text in [
        (lambda: packing.pack(codes, 9), "1 to 8"),
        (lambda: packing.pack(codes.long(), 8), "int32 matrix"),
        (lambda: packing.unpack(codes, 8, 5), "take 2 words a row, there are 1"),
        (lambda: packing.packed_linear(torch.ones(2, 8).half(), codes, 3, scale), "one of 2, 4, 8"),
        (lambda: packing.packed_linear(torch.ones(2, 8), codes, 4, scale), "float16 or bfloat16"),
        (lambda: packing.packed_linear(torch.ones(2, 9).half(), codes, 4, scale), "9 columns"),
        (lambda: packing.packed_linear(torch.ones(2, 8).half(), codes, 4, scale[:3]), "does not tile"),
        (lambda: packing.packed_linear(torch.ones(2, 8).half(), codes, 4, scale, codes[:3]), "zero_point"),
        (lambda: packing.packed_linear(torch.ones(2, 8).half(), codes, 4, scale, None, scale), "bias"),
    ]:
        with pytest.raises(ValueError, match=text):
            function()


@pytest.mark.skipif(INTERPRETED, reason="kernels can run here")
def test_a_file_that_asks_for_kernels_trains_without_them(tiny_bert: BertForSequenceClassification) -> None:
    assert not triton_quant.available(torch.device("cpu")) and not triton_quant.available(torch.device("meta"))
    for kernel, count in ((True, 1), (None, 0), (False, 0)):
        controller = MoQController(tiny_bert, moq(quantizer_kernel=kernel))
        notes = [note for note in controller.warnings() if "quantizer_kernel" in note]
        assert len(notes) == count and all("plain PyTorch gives the same numbers" in note for note in notes)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that were not tried out yet, and no word of what a test comes to afterwards."""
    monkeypatch.setattr(triton_quant, "_given_up", set())
    tried = (triton_quant._is_right, packing._is_right)
    for each in tried:
        each.cache_clear()
    yield
    for each in tried:
        each.cache_clear()


class Broken:
    """Kernels of which some cannot be launched."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __getattr__(self, name: str) -> Any:
        from moq_hf.kernels import triton as kernels

        return {} if name in self.names else getattr(kernels, name)


@on_device
@pytest.mark.parametrize("name", ["fake_quantize_groups", "fake_quantize_tiles", "group_ranges", "ratio_errors"])
def test_a_kernel_that_cannot_be_launched_is_found_at_first_use(
    name: str, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_quant, "load_kernels", lambda: Broken(name))
    for _ in range(2):
        assert not triton_quant.available(DEVICE) and not packing.available(DEVICE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the Triton kernels are not used on" in record.message and "KeyError" in record.message


@on_device
def test_wrong_products_are_found_too(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert triton_quant.available(DEVICE)
    product = packing.packed_linear
    monkeypatch.setattr(packing, "packed_linear", lambda *arguments: product(*arguments[:4]))
    assert not packing.available(DEVICE)
    (record,) = caplog.records
    assert "products of 17 rows" in record.message and "products of 1 rows" not in record.message


@on_device
@pytest.mark.parametrize("name", ["pack_codes", "unpack_codes", "packed_matmul"])
def test_of_packing_too(
    name: str, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert triton_quant.available(DEVICE)
    monkeypatch.setattr(packing, "load_kernels", lambda: Broken(name))
    assert not packing.available(DEVICE) and len(caplog.records) == 1
    codes = torch.randint(-8, 8, (3, 45), dtype=torch.int32, device=DEVICE)
    assert torch.equal(packing.unpack(packing.pack(codes, 4), 4, 45), codes)


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels have their constants in them")
@pytest.mark.parametrize(
    ("constant", "value", "text"),
    [
        ("_MAGIC", 0.0, "8 bits, [6, 33]"),
        ("_TINY", 1.0, "2 bits, [6, 33]"),
        ("_ABS", 0x7F0FFFFF, "[3, 8191]"),
    ],
)
def test_a_wrong_constant_is_found_at_first_use(
    constant: str,
    value: float,
    text: str,
    untried: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from triton import language

    from moq_hf.kernels import triton as kernels

    monkeypatch.setattr(kernels, constant, language.constexpr(value))
    assert not triton_quant.available(DEVICE)
    (record,) = caplog.records
    assert "they give other numbers than plain PyTorch" in record.message and text in record.message


@pytest.mark.skipif(not INTERPRETED, reason="compiled kernels have their functions in them")
@pytest.mark.parametrize(
    ("function", "wrong", "text"),
    [
        ("_as_stored", lambda right, scale, dtype: scale, "4 bits, [6, 33]"),
        ("_blended", lambda right, values, x, keep, blend: values, "8 bits, [6, 33]"),
        ("_words", lambda right, block, seed, step, layer: right(block, seed, layer, step), "8 bits, [6, 64]"),
        ("_negative", lambda right, x: right(x * 2), "4 bits, [3, 8191]"),
        ("_uniform_scale", lambda right, hi, lo, bits, _, *rest: right(hi, lo, bits, 1, *rest), "3 bits, [3, 8191]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_part_of_a_kernel_is_found_at_first_use(
    function: str,
    wrong: Any,
    text: str,
    untried: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from moq_hf.kernels import triton as kernels

    right = getattr(kernels, function)
    monkeypatch.setattr(kernels, function, lambda *arguments: wrong(right, *arguments))
    assert not triton_quant.available(DEVICE)
    (record,) = caplog.records
    assert "they give other numbers than plain PyTorch" in record.message and text in record.message


@on_device
def test_a_launch_that_fails_within_a_run_leaves_it_to_pytorch(
    untried: None,
    tiny_bert: BertForSequenceClassification,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, run = (copy.deepcopy(tiny_bert.to(DEVICE)) for _ in range(2))
    controllers = [MoQController(plain, moq(quantizer_kernel=False)), MoQController(run, moq(quantizer_kernel=True))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, run)]
    for step in range(4):
        if step == 2:
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
            monkeypatch.setattr(triton_quant, "load_kernels", lambda: Broken("fake_quantize_groups", "group_ranges"))
        for model, controller, optimizer in zip((plain, run), controllers, optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * 1e-3
            optimizer.step()
            controller.step()
    ends = [[layer.quantized_weight() for layer in controller.layers.values()] for controller in controllers]
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))
    (record,) = [record for record in caplog.records if "Triton" in record.message]
    assert record.levelno == logging.WARNING and "plain PyTorch computes in their place" in record.message
    assert not triton_quant.available(DEVICE)


@pytest.mark.parametrize("triton", [None, ModuleType("triton")], ids=["missing", "old"])
def test_without_a_triton_that_works_one_warning_says_so_for_a_gpu(
    triton: ModuleType | None, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert not triton_quant.available(torch.device("cpu")) and not caplog.records
    for _ in range(2):
        assert not triton_quant.available(torch.device("cuda", 0))
    (record,) = caplog.records
    assert "not used on cuda:0" in record.message and "they need Triton 3.4 or later" in record.message


def test_a_device_without_a_number_is_the_current_one(untried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for module in (triton_quant, packing):
        monkeypatch.setattr(module, "_is_right", lambda device: tried.append(device) or True)
    assert packing.available(torch.device("cuda")) and set(tried) == {torch.device("cuda", 1)}
    triton_quant._give_up(torch.device("cuda", 1), "a test")
    assert not triton_quant.available(torch.device("cuda")) and triton_quant.available(torch.device("cuda", 0))


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
