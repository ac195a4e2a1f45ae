"""The kernel against `quantizer`: on a CUDA device, or in Triton's interpreter.

The interpreter needs a process of its own, which `test_in_triton_s_interpreter` starts.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import programs
import pytest
import torch
from numerics import GROUPINGS, HALF_MODES, MODES, same_bits
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
from repo import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from moq_hf import MoQConfig, quantize_model, quantizer, triton_launch, triton_quant
from moq_hf.grid import FP4, Format, Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import RoundingSeed
from moq_hf.training.controller import MoQController
from moq_hf.triton_quant import Job, Launcher

__all__ = ["compiles", "members_are_known", "silent_numpy", "untried"]

ALL_MODES = [*MODES, *HALF_MODES]
SEED = RoundingSeed(2**35 + 7, 3, 9)


@contextlib.contextmanager
def noting_launches() -> Iterator[list[Any]]:
    """The forms of what is launched."""
    launched: list[Any] = []
    launch = triton_quant._launch
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton_quant, "_launch", lambda form, *a: (launched.append(form), launch(form, *a)))
        yield launched


def is_same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    """Whether values and scales are equal to the bit; a group that holds NaN or Inf comes out as either."""
    pairs = [[torch.where(x.isfinite(), x, torch.nan) for x in pair] for pair in zip(found, expected, strict=True)]
    return all(same_bits(*pair) for pair in pairs)


def agrees(weight: torch.Tensor, bits: int, grid: Grid, **how: Any) -> bool:
    """Whether the kernel was launched, and gives the values and scales of `quantizer`."""
    with noting_launches() as launched:
        found = triton_quant.rounded(weight, grid.at(bits), **how)
    expected = quantizer.rounded(weight, grid.at(bits), **how)
    return bool(launched) and all_work() and is_same(found, expected)


def all_work() -> bool:
    """Whether no variant of this kernel was given up; that of the search may not be compiled as this one is."""
    return all(works for variant, works in triton_launch.works.items() if "search" not in variant)


def all_agree(jobs: list[Job], launcher: Launcher | None = None) -> bool:
    """Whether all jobs of one call come to what `quantizer` makes of each, in memory of their own."""
    filled = (launcher or Launcher())(jobs)
    assert len({values.data_ptr() for values in filled.values}) == len(jobs)
    right = []
    for job, values, place in zip(jobs, filled.values, filled.places, strict=True):
        expected, scale = quantizer.rounded(*job)
        right.append(is_same((values, filled.scales[place]), (expected, scale.flatten())) and values.is_contiguous())
    return all(right) and all_work()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is a process of its own")
def test_in_triton_s_interpreter() -> None:
    run_interpreted(__file__, 100)


@on_device
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("mode", ALL_MODES, ids=str)
def test_the_kernel_is_the_definition(mode: tuple[int, Grid], half: int) -> None:
    # The kernel sees a grouping as the length of its groups: two of them for each mode.
    place = (ALL_MODES.index(mode) // 2 + half) % 4
    bits, grid = mode[0], replace(mode[1], grouping=GROUPINGS[place])
    # Each combination of dtypes and options comes up over the cases.
    case = ALL_MODES.index(mode) + place
    weight = torch.randn(6, 33) * torch.randn(6, 1).exp()
    weight[0, :3] = torch.tensor([0.0, -0.0, 1e-42 if case % 3 != 1 else 0.0])
    weight[-1] = 0.0
    weight = weight.to(DEVICE, FLOATS[case % 3])
    how: dict[str, Any] = {"seed": SEED, "blend": 0.3 if case % 2 else 0.0, "dtype": FLOATS[case // 3 % 3]}
    if case % 4 and grid.at(bits).is_uniform:
        how["ratio"] = torch.tensor(quantizer.RATIOS, device=DEVICE)[torch.randint(17, grid.shape(6, 33))]
    assert agrees(weight, bits, grid, **how)
    # With NaN in one group the others stay as they are, and its scale tells of it.
    weight[3, 5] = [torch.nan, torch.inf, -torch.inf][case % 3]
    assert agrees(weight, bits, grid, **how)
    scale = triton_quant.rounded(weight, grid.at(bits), **how)[1]
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
        assert all(agrees(weight, bits, replace(grid, stochastic=False)) for bits, grid in ALL_MODES[case % 3 :: 3])


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
@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_that_are_floats_of_eight_bits(stochastic: bool) -> None:
    weight = torch.randn(64, 52) * torch.logspace(-8, 3, 64)[:, None]
    numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    weight[:20] = ((numbers[75:] + numbers[74:-1]) / 2) * torch.logspace(-20, 2, 20, 2)[:, None]
    weight[20:24] *= torch.tensor([[0.0], [1e-30], [1e30], [1e4]])
    for dtype, name in zip(FLOATS, ("float32", "bfloat16", "float16"), strict=True):
        grid = Grid(PerChannel(), stochastic=stochastic, scale_dtype=name, format="fp8")  # type: ignore[arg-type]
        given = weight.clamp(-6e4, 6e4).to(DEVICE, dtype)
        assert agrees(given, 8, grid, seed=SEED)
        assert agrees(given, 8, grid, seed=SEED, blend=0.3, dtype=torch.float32)
        # Before the last drop codes are integers.
        assert agrees(given, 9, grid, seed=SEED)
    weight[24] = torch.finfo(torch.float32).max
    weight[3, 5] = torch.nan
    weight[9, 5] = -torch.inf
    assert agrees(weight.to(DEVICE), 8, grid, seed=SEED)


@on_device
def test_what_the_kernel_does_not_take_is_for_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quant, "_launch", None)
    weight = torch.randn(8, 16, device=DEVICE)
    for dtypes in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        job = Job(weight.to(dtypes[0]), Grid().at(8), dtype=dtypes[1])
        assert same_bits(triton_quant.rounded(*job)[0], quantizer.rounded(*job)[0])
        filled = Launcher()([job])
        assert (filled.values, filled.places, len(filled.scales)) == ([None], [slice(0, 0)], 0)


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
    monkeypatch.setattr(triton_quant, "_launch", lambda form, *a: {}["no kernel"] if form.blends else launch(form, *a))
    for blend in (0.5, 0.5, 0.0):
        expected = quantizer.fake_quantize(weight, 8, blend=blend)
        assert same_bits(triton_quant.fake_quantize(weight, 8, blend=blend), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and sorted(triton_launch.works.values()) == [False, True]
    assert "the Triton kernel is not used on" in record.message and "KeyError" in record.message
    assert "plain PyTorch computes in its place" in record.message
    # The variant that did work.
    monkeypatch.setattr(triton_quant, "_launch", lambda *arguments: {}["no kernel"])
    for _ in range(2):
        assert same_bits(triton_quant.fake_quantize(weight, 8), quantizer.fake_quantize(weight, 8))
    _, record = caplog.records
    assert "KeyError" in record.message and list(triton_launch.works.values()) == [False, False]


@on_device
def test_many_weights_of_every_grid_in_one_call() -> None:
    jobs = []
    for case, (bits, grid) in enumerate(ALL_MODES):
        precision = replace(grid, grouping=GROUPINGS[case % 4]).at(bits)
        weight = (torch.randn(6, 33) * torch.randn(6, 1).exp()).to(DEVICE, FLOATS[case % 3])
        weight[0] = torch.tensor([0.0, -0.0, 0.5])[torch.arange(33) % 3]
        weight[-1] = 0.0
        if case % 5 == 0:
            weight[3, 5] = [torch.nan, torch.inf, -torch.inf][case % 3]
        if case % 7 == 0:
            weight = weight.t().contiguous().t()
        ratio = None
        if case % 2 and precision.is_uniform:
            ratio = torch.tensor(quantizer.RATIOS, device=DEVICE)[torch.randint(17, precision.grid.shape(6, 33))]
        seed = RoundingSeed(case, 3, 1)
        jobs.append(Job(weight, precision, ratio, seed, 0.3 if case % 3 == 1 else 0.0, FLOATS[case // 3 % 3]))
    for name in ("mxfp4", "nvfp4"):
        size = FP4[name].group_size
        precision = Grid(PerGroup(size), stochastic=name == "nvfp4", format=name).at(4)
        jobs.append(Job(torch.randn(5, 2 * size, device=DEVICE), precision, dtype=torch.bfloat16))
    assert all_agree(jobs)


@on_device
def test_what_has_one_form_is_one_launch_and_what_changes_is_seen(untried: None) -> None:
    launcher = Launcher()
    shapes = [(6, 48), (3, 64), (200, 34), (5, 40)]
    jobs = [
        Job(torch.randn(shape, device=DEVICE), Grid(PerChannel()).at(bits))
        for shape, bits in zip(shapes, (3, 4, 8, 16), strict=True)
    ]
    assert all_agree(jobs, launcher)
    # Each pass has other memory; ratios, seeds and shares change on the way, bits now and then.
    ratio = torch.full((3, 1), 0.7, device=DEVICE)
    changed = [jobs[0], jobs[1]._replace(ratio=ratio), jobs[2]._replace(weight=jobs[2].weight * 2), jobs[3]]
    blended = [job._replace(blend=share) for job, share in zip(jobs, (0.0, 1e-3, 0.5, 1.0), strict=True)]
    fallen = [job._replace(precision=Grid(PerChannel()).at(5)) for job in jobs]
    # Not where 16 bytes can be read at once.
    odd = [jobs[1]._replace(weight=torch.randn(193, device=DEVICE)[1:].view(3, 64))]
    for case in (odd, changed, blended, [job._replace(blend=job.blend / 2) for job in blended], fallen, jobs[:2]):
        assert all_agree(case, launcher)
    with noting_launches() as launched:
        launcher(jobs[:2])
        assert len(launched) == 1
        # Lengths of 34 and 40 cannot be read 16 bytes at a time.
        Launcher()(jobs)
    assert len(launched) == 3


@on_device
def test_random_numbers_of_a_launch_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quant, "NOISE", 150)
    grid = Grid(PerChannel(), stochastic=True)
    jobs = [Job(torch.randn(3, 32, device=DEVICE), grid.at(4), None, RoundingSeed(1, layer)) for layer in range(5)]
    assert all_agree(jobs)
    with noting_launches() as launched:
        Launcher()(jobs)
    assert len(launched) == 3


@on_device
@pytest.mark.parametrize("length", [triton_quant.TILE + 5, triton_quant.WIDEST + 5])
def test_long_groups(length: int) -> None:
    grids = [
        (8, Grid(PerChannel(), full=True)),
        (4, Grid(PerChannel(), symmetric=False, stochastic=True, scale_dtype="float16")),
        (2, Grid(PerChannel())),
        (1, Grid(PerChannel(), scale_dtype="bfloat16")),
    ]
    jobs = []
    for bits, grid in grids:
        weight = torch.randn(3, length, device=DEVICE) * torch.tensor([[1.0], [1e-37], [1e37]], device=DEVICE)
        # The ends, and a number that is none, lie in the last part.
        weight[0, -2:] = torch.tensor([-7.0, 7.0])
        weight[2, -1] = torch.nan if bits > 2 else -torch.inf
        ratio = torch.tensor([[0.9], [1.0], [0.3]], device=DEVICE) if bits == 8 else None
        jobs.append(Job(weight, grid.at(bits), ratio, SEED, 0.25 if bits < 3 else 0.0, torch.float32))
    assert all_agree(jobs)
    bits, grid = grids[length % 4]
    assert agrees(jobs[length % 4].weight, bits, grid, seed=SEED)


@on_device
def test_sums_of_weights_of_any_size_in_any_order() -> None:
    weight = torch.randn(1, 1000, device=DEVICE) * torch.logspace(-30, 0, 1000, device=DEVICE)
    rows = torch.stack([weight[0, torch.randperm(1000)] for _ in range(6)])
    assert all(agrees(rows, bits, Grid(PerChannel())) for bits in (1, 2))


@on_device
def test_a_launch_of_many_that_fails_leaves_its_jobs_and_no_others(
    untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [Job(torch.randn(4, 24, device=DEVICE), Grid(PerChannel()).at(bits)) for bits in (8, 2, 4)]
    launcher, launch = Launcher(), triton_quant._launch
    assert all_agree(jobs, launcher)

    def fails(form: Any, *arguments: Any) -> None:
        if form.codes == "int":
            raise KeyError("no kernel")
        launch(form, *arguments)

    monkeypatch.setattr(triton_quant, "_launch", fails)
    for _ in range(2):
        filled = launcher(jobs)
        assert [values is None for values in filled.values] == [True, False, True]
        assert filled.scales.isfinite().all()
        assert is_same([filled.values[1]], quantizer.rounded(*jobs[1])[:1])  # type: ignore[list-item]
    (record,) = caplog.records
    assert "KeyError" in record.message and "plain PyTorch computes in its place" in record.message


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


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel has its functions in it")
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("as_stored", lambda right, scale, stored: right(scale * 1.01, stored)),
        ("round_even", lambda right, x: right(x + 1e-3)),
        ("divide", lambda right, x, *divisor: right(x * 1.0000002, *divisor)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_part_of_the_kernel_is_found_at_first_use(
    function: str, wrong: Any, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_part("triton", function, wrong, monkeypatch)
    weight = torch.randn(6, 96)
    assert same_bits(triton_quant.fake_quantize(weight, 4), quantizer.fake_quantize(weight, 4))
    (record,) = caplog.records
    assert "it gives other numbers than plain PyTorch" in record.message


def test_a_device_without_room_is_no_reason_to_give_the_kernel_up(
    untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(triton_launch, "_triton", lambda: ("cpu", ""))
    monkeypatch.setattr(triton_quant, "_launch", launch)
    job = Job(torch.randn(6, 8), Grid().at(8))
    for run in (lambda: triton_quant.rounded(*job), lambda: Launcher()([job])):
        with pytest.raises(torch.OutOfMemoryError):
            run()
    assert not triton_launch.works


@pytest.mark.parametrize("target", [*TARGETS, ("hip", "gfx1100", 32)])
@pytest.mark.parametrize(("many", "codes", "step"), [(False, "int", "all"), (True, "ternary", "round")])
def test_it_compiles_for_the_oldest_and_the_newest_gpus(
    compiles: Callable[..., bool], target: Any, many: bool, codes: str, step: str
) -> None:
    kernel, dtypes = (
        triton_launch.kernels("triton").fake_quantize_kernel,
        list(triton_launch.kernels("triton").DTYPES.values()),
    )
    types = {"X_ptr": "*fp32", "Y_ptr": "*bf16", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("n_rows", "n_cols", "low", "high", "farthest", "length_bits", "blend"), "i32")
    if many:
        types = {"table": "*i64", "items": "*i32", "scale_ptr": "*fp32", "marks_ptr": "*i64"}
    constants = {"X_DTYPE": dtypes[0], "Y_DTYPE": dtypes[1], "CODES": codes, "SYMMETRIC": True, "BLENDS": False}
    constants |= {"STORED": "float32", "BLOCK_ROWS": 1, "BLOCK_COLS": 4096, "ALIGN": 16, "STEP": step}
    assert compiles(kernel, target, types, constants)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="it chooses for itself")
def test_the_interpreter_may_be_chosen_after_the_import(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, torch, triton\n"
        "from moq_hf import triton_launch, triton_quant\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "triton_quant.fake_quantize(torch.randn(4, 300), 4)\n"
        "assert list(triton_launch.works.values()) == [True], triton_launch.works\n"
    )
    done = programs.run(str(tmp_path / "program.py"), cwd=ROOT, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("triton", [None, ModuleType("triton")], ids=["missing", "old"])
def test_without_a_triton_that_works_one_warning_says_so_for_a_gpu(
    triton: ModuleType | None, untried: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    assert not triton_launch.available(torch.device("cpu")) and not caplog.records
    for _ in range(2):
        assert not triton_launch.available(torch.device("cuda", 0))
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
    (weight,) = layer.quantized_weights()
    compiled: Any = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(5, 8)
    for bits in (8, 4, 3, 2, 1, 32):
        weight.set_bits(bits)
        layer.weight.grad = None
        for run in (layer, lambda x: checkpoint(compiled, x, use_reentrant=False)):
            run(x).sum().backward()
        # Twice that of a float layer: the rounding has no gradient of its own.
        torch.testing.assert_close(layer.weight.grad, 2 * x.sum(0).expand(6, 8))
        assert same_bits(compiled(x), layer(x))
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in names if "moq_hf" in name] == ["moq_hf.quantized.default"]
    # Nor does inductor capture it in a CUDA graph, where a drop would go unnoticed.
    assert torch.Tag.cudagraph_unsafe in torch.ops.moq_hf.quantized.default.tags
