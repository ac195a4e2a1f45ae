"""The kernel as it is compiled for GPUs, run by the interpreter of tests/ptx: it needs Triton's wheel, and no GPU.

`make ptx` runs more of it: the tests of test_triton_quant.py, and random cases, for each architecture.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numerics import same_bits
from torch import nn

import moq_hf.kernels
from moq_hf import quantize_model, quantizer, triton_quant
from moq_hf.grid import Grid, PerChannel

pytest.importorskip("triton", reason="Triton is not installed")

import cases
import machine
import paper
from driver import Device, pretending
from machine import Fault
from triton.backends.compiler import GPUTarget

# The oldest and the newest; `make ptx` has those between.
ARCHITECTURES = (80, 120)
LAUNCH = {"ratio": None, "seed": quantizer.RoundingSeed(), "blend": 0.0, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # Where a GPU computes NaN in silence, numpy warns.
    with np.errstate(all="ignore"):
        yield


# The interpreter itself


def test_a_fused_product_is_rounded_once() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, (3, 3000), dtype="u4")
    # Numbers whose sums nearly vanish, or whose parts lie far apart.
    bits[:, 1000:] = bits[:, 1000:] & np.uint32(0x80FFFFFF) | np.uint32(0x3F000000)
    a, b, c = bits.view("f4")
    c[2000:] = -(a[2000:] * b[2000:])
    found = machine.fused(a, b, c)
    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = [float(each) for each in (x, y, z)]
        if not all(map(np.isfinite, exact)) or not np.isfinite(result):
            continue
        total = Fraction(exact[0]) * Fraction(exact[1]) + Fraction(exact[2])
        near = [np.nextafter(result, side, dtype="f4") for side in (np.float32(-np.inf), np.float32(np.inf))]
        error = abs(Fraction(float(result)) - total)
        assert all(not np.isfinite(other) or error <= abs(Fraction(float(other)) - total) for other in near)


def test_rounding_and_signs_are_those_of_a_gpu() -> None:
    numbers = np.random.default_rng(1).integers(0, 2**32, 4000, dtype="u4").view("f4")
    numbers = numbers[~np.isnan(numbers)]
    for dtype, function in ((torch.bfloat16, machine.to_bfloat16), (torch.float16, machine.to_float16)):
        expected = torch.from_numpy(numbers.copy()).to(dtype).view(torch.int16).numpy().view("u2")
        assert (function(numbers) == expected).all()
    zeros = np.array([0.0, -0.0], "f4")
    assert np.signbit(machine.extreme(zeros, zeros[::-1], largest=False)).all()
    assert not np.signbit(machine.extreme(zeros, zeros[::-1], largest=True)).any()
    assert machine.extreme(np.float32(np.nan), np.float32(1), largest=True) == 1
    assert (machine.shifted(np.array([-8, 8], "i4"), np.uint32(40), left=False) == [-1, 0]).all()
    assert machine.field(np.uint32(0b1011000), np.uint32(3), np.uint32(3)) == 0b011


PTX = """
.visible .entry kernel(.param .u64 kernel_param_0) .reqntid 64
{{
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    setp.lt.s32 %p1, %r1, 10;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    {}
    ret;
}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@%p1 st.global.b32 [%rd3], %r1;", ""),
        ("st.global.b32 [%rd3], %r1;", "out of bounds, the first at byte 160 of the 160 of weight"),
        ("@%p1 st.global.b32 [%rd3 + 2], %r1;", "not a multiple of 4"),
        ("@%p1 st.global.b32 [%rd1], %r1;", "two threads store different numbers"),
        # What some threads leave unwritten others may compute with, and not use.
        ("@%p1 mov.u32 %r2, %r1; add.s32 %r3, %r2, 0; @%p1 st.global.b32 [%rd3], %r3;", ""),
        (
            "@%p1 mov.u32 %r2, %r1; shfl.sync.bfly.b32 %r3, %r2, 16, 31, -1; @%p1 st.global.b32 [%rd3], %r3;",
            "threads use what they have not written: @%p1 st.global",
        ),
        # A half that was written stays so beside one that was not.
        ("mov.b64 %rd4, {%r1, %r9}; mov.b64 {%r3, _}, %rd4; @%p1 st.global.b32 [%rd3], %r3;", ""),
        ("mov.b64 %rd4, {%r1, %r9}; mov.b64 {_, %r3}, %rd4; @%p1 st.global.b32 [%rd3], %r3;", "use .*st.global"),
        ("@%p1 mov.u32 %r2, 1; add.s32 %r3, %r2, 0; setp.lt.s32 %p2, %r3, 0; @%p2 bra $L1;\n$L1:", "use .*bra"),
        ("@%p1 mov.u32 %r2, 1; shl.b32 %r2, %r2, 2; ld.shared.b32 %r3, [%r2];", "use .*ld.shared"),
        ("mov.u32 %r3, %r2;", "%r2 is read before it is written"),
        ("@%p1 bra $L1;\n$L1:", "threads part here"),
        ("ld.shared.b32 %r2, [%r1];", "not a multiple of 4"),
        ("shl.b32 %r2, %r1, 2; ld.shared.b32 %r3, [%r2];", "read before it is written"),
        (
            "shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], %r1; xor.b32 %r2, %r2, 128; ld.shared.b32 %r3, [%r2];",
            "two warps",
        ),
        ("shl.b32 %r2, %r1, 3; st.shared.b32 [%r2], %r1;", "beyond the 256 bytes"),
        ("@%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", "a part of a warp"),
        ("rcp.approx.f32 %r2, %r1;", "not known: rcp.approx.f32"),
        ("add.ftz.f32 %r2, %r1, %r1;", "not known: add.ftz.f32"),
        ("mul.hi.u32 %r2, %r1, %r1;", "not known: mul.hi.u32"),
    ],
)
def test_a_fault_is_found(text: str, message: str) -> None:
    memory = np.full(40, 7, "u4")
    # Of 64 threads 40 have a place.
    region = machine.Region("weight", memory.ctypes.data, memory.nbytes)
    program = machine.Program(PTX.format(text))

    def run() -> None:
        machine.launch(program, [0], [memory.ctypes.data], [region], shared=256)

    if message:
        with pytest.raises(Fault, match=message):
            run()
    else:
        run()
        assert (memory[:10] == np.arange(10)).all() and (memory[10:] == 7).all()


# The kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_cases(arch: int) -> None:
    random = np.random.default_rng(arch)
    with pretending(arch) as device:
        for _ in range(3):
            for case in cases.draw(random):
                assert cases.wrong(case) == "", str(case)
        assert device.launches >= 24 and all(triton_quant._works.values())


def test_first_use_compiles_nothing_for_itself() -> None:
    with pretending(90) as device:
        for bits in (8, 7, 6):
            for rows in (48, 5):
                case = torch.randn(rows, 768), bits, Grid(PerChannel())
                assert same_bits(triton_quant.fake_quantize(*case), quantizer.fake_quantize(*case))
    # Neither bits nor the number of rows are part of a kernel, which was tried out once.
    assert len(device.kernels) == 1 and device.launches == 7


def test_a_captured_launch_follows_drops_ratios_and_blends(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    execute = Device.execute
    monkeypatch.setattr(Device, "execute", lambda device, *launch: (launches.append(launch), execute(device, *launch)))
    model = nn.Sequential(nn.Linear(96, 40), nn.Linear(40, 2))
    quantize_model(model, {"quantize_bits": {"start_bits": 8, "target_bits": 8}})
    layer: Any = model[0]
    state = layer.moq
    for blend in (0.0, 0.5):
        with pretending(90) as device:
            for bits in (8, 5, 4, 3):
                layer.set_bits(bits)
                state.blend = blend * bits / 8
                layer.invalidate()
                if bits == 8:
                    layer(torch.randn(2, 96))
                    launch = launches[-1]
                # As a CUDA graph is replayed: nothing of the launcher is run.
                execute(device, *launch)
                how = {"ratio": state.ratio, "blend": state.blend}
                expected = quantizer.fake_quantize(layer.float_weight, bits, state.grid, **how)
                assert same_bits(launch[-1]["Y_ptr"], expected) and (state.ratio is None) == (bits == 8)
            assert len(device.kernels) == 1


def last_rows() -> bool:
    """Whether the last rows of a weight of more than 2^31 elements, of which little is touched, come out right."""
    length, rows = 32_768, 2**16 + 9
    weight = torch.empty(rows, length, dtype=torch.bfloat16)
    assert weight.numel() > 2**31
    weight[-9:] = torch.randn(9, length)
    with pretending(90, blocks=lambda count: [count - 2, count - 1]):
        found, scale = triton_quant._launch(weight, 8, Grid(PerChannel()), length, **LAUNCH)
    expected, right = quantizer.fake_quantize_with_scale(weight[-9:], 8, Grid(PerChannel()))
    return same_bits(found[-9:], expected) and same_bits(scale[-9:], right)


def test_a_weight_may_have_more_than_2_31_elements() -> None:
    assert last_rows()


# Changes of the kernel that must not go unnoticed: what is replaced by what, and the case that shows it.
MUTANTS = {
    "division that is not rounded": (
        "tl.div_rn(span, farthest)",
        "span / farthest",
        "halves",
    ),
    "a quotient that is not corrected": ("tl.fma(excess * -1.0, inverse, quotient)", "quotient", "halves"),
    "halves away from zero": ("libdevice.rint(y)", "libdevice.round(y)", "halves"),
    "zeros without a sign": ("libdevice.rint(y)", "libdevice.rint(y) + 0.0", "zeros"),
    "a store without its mask": (", y, mask=cols < n_cols - first)", ", y)", "odd"),
    "a load without its mask": ("mask=cols < n_cols, other=0.0", "mask=cols < 9999", "odd"),
    "rows past the last": ("(n_rows - 1 - first_row)", "(n_rows + 1 - first_row)", "odd"),
    "negative numbers left out": ("bottom = tl.maximum(bottom, _bits(x, uint32))", "bottom = bottom", "halves"),
    "a code too many": ("_round(tl.clamp(y, low, high))", "_round(tl.clamp(y, low, high + 1))", "clipped"),
    "a scale that is not as stored": ("    scale = _as_stored(scale, SCALE_DTYPE)\n", "", "stored"),
    "NaN that is not named": ("span = _bits(top, float32)", "span = tl.minimum(_bits(top, float32), 9.0)", "nan"),
    "offsets of 32 bits": (".to(tl.int64) * BLOCK_ROWS", " * BLOCK_ROWS", "large"),
}


def shows(case: str) -> bool:
    """Whether the kernel is wrong in a case, or faults."""
    grid, how = Grid(PerChannel()), dict(LAUNCH)
    halves = torch.arange(-127, 128).float() / 2
    weight = torch.cat([halves, torch.tensor([127.0])])[None] * torch.tensor([[1.0], [-0.3], [7e-3], [-1.1]])
    if case == "zeros":
        weight = weight * 0.001 * torch.tensor([1.0] + [0.0] * 254 + [1e3])[:256]
    elif case == "odd":
        weight = weight[:, :35].contiguous()[:3]
    elif case == "clipped":
        how["ratio"] = torch.full((4, 1), 0.5)
    elif case == "stored":
        grid = replace(grid, scale_dtype="bfloat16")
    elif case == "nan":
        weight[1, 3] = torch.nan
    try:
        if case == "large":
            return not last_rows()
        found, scale = triton_quant._launch(weight, 8, grid, weight.shape[1], **how)
    except Fault:
        return True
    expected, right = quantizer.fake_quantize_with_scale(weight, 8, grid, **how)
    return not same_bits(found, expected) or not same_bits(scale, right)


@pytest.mark.parametrize("case", sorted({case for *_, case in MUTANTS.values()} - {"large"}))
def test_the_kernel_passes_what_its_mutants_are_tried_on(case: str) -> None:
    with pretending(90):
        assert not shows(case)


@pytest.fixture
def altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put the kernel with a piece of its text replaced in the place of the kernel."""

    def alter(old: str, new: str) -> None:
        from moq_hf.kernels import triton as kernels

        text = Path(kernels.__file__).read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "altered.py"
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("altered", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "altered", module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(moq_hf.kernels, "triton", module)

    return alter


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_kernel_is_found(name: str, altered: Callable[[str, str], None]) -> None:
    old, new, case = MUTANTS[name]
    altered(old, new)
    with pretending(90):
        assert shows(case)


def test_fused_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from moq_hf.kernels import triton as kernels

    class Fusing:
        """The kernel, launched with fusion."""

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *a, **how: kernel[grid](*a, **{**how, "enable_fp_fusion": True})

    kernel = kernels.fake_quantize_kernel
    weight = torch.randn(16, 64)
    how = {**LAUNCH, "blend": 0.3, "dtype": torch.float32}
    expected = quantizer.fake_quantize(weight, 8, Grid(PerChannel()), **how)
    with pretending(90):
        assert same_bits(triton_quant._launch(weight, 8, Grid(PerChannel()), 64, **how)[0], expected)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "fake_quantize_kernel", Fusing())
            assert not same_bits(triton_quant._launch(weight, 8, Grid(PerChannel()), 64, **how)[0], expected)


def test_an_address_that_is_not_aligned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4 * 256 + 1)
    execute = Device.execute

    def displaced(self: Device, metadata: Any, count: int, arguments: dict[str, Any]) -> None:
        execute(self, metadata, count, {**arguments, "X_ptr": weight[1:]})

    # As if a kernel for addresses that are multiples of 16 were launched on any.
    monkeypatch.setattr(Device, "execute", displaced)
    with pretending(90), pytest.raises(Fault, match=r"not a multiple of 16: .* ld.global.v4.b32"):
        triton_quant._launch(weight[:-1].view(4, 256), 8, Grid(PerChannel()), 256, **LAUNCH)


def test_the_division_is_rounded_to_nearest_where_it_is_hardest() -> None:
    """Quotients beside the middle of two numbers: the remainder of a product of 25 with 24 bits is 1 or -1."""
    random = np.random.default_rng(0)
    middles = random.integers(2**23, 2**24, 200_000, dtype="i8") * 2 + 1
    for offset in (-3, -1, 1, 3):
        # The divisor whose product with the middle ends with this offset.
        inverse = np.array([pow(int(m), -1, 1 << 25) for m in middles[:20_000]], "i8")
        divisor = offset * inverse % (1 << 25)
        chosen = (divisor >= 2**23) & (divisor < 2**24)
        s, m = divisor[chosen], middles[:20_000][chosen]
        x = (m * s - offset) >> 25
        fits = (x >= 2**22) & (x < 2**24)
        x, s = x[fits].astype("f4"), s[fits].astype("f4") * np.float32(2.0**-22)
        assert len(x) > 1000
        inverse32 = np.float32(1) / s
        quotient = x * inverse32
        excess = machine.fused(quotient, s, -x)
        assert (machine.fused(-excess, inverse32, quotient) == x / s).all()


# On paper


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_is_bound_by_memory_on_paper(arch: int) -> None:
    for length, grid in ((768, "symmetric"), (32, "asymmetric"), (128, "asymmetric")):
        found = paper.cost(arch, length, **paper.GRIDS[grid])
        assert found.instructions <= 0.8 and found.spills == 0
        assert found.resident >= paper.MOST_THREADS[arch] / 2


@pytest.mark.parametrize(("arch", "warp"), [("gfx942", 64), ("gfx1100", 32)])
def test_it_compiles_for_amd_s_gpus(arch: str, warp: int) -> None:
    for grid in paper.GRIDS.values():
        assert paper.compiled(GPUTarget("hip", arch, warp), 768, **grid).asm["amdgcn"]
