"""`quantizer.fake_quantize` as one launch of a Triton kernel, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: where the kernel does not run,
`quantizer` computes. The kernel takes uniform grids in groups of up to `LONGEST`
weights; ternary and binary grids, longer groups and float64 are left to `quantizer`.
"""

import functools
import importlib
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, PerChannel
from .quantizer import RoundingSeed

logger = logging.getLogger(__name__)

# One program reads a whole group; longer groups would leave most of a GPU idle.
LONGEST = 65_536
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_DEFAULT = Grid()
_FIRST = RoundingSeed()
# Whether variants of the kernel, each on a device, work there: once they were tried out.
_works: dict[tuple[Any, ...], bool] = {}


def fake_quantize(weight: Tensor, bits: int, *grid: Grid, **how: Any) -> Tensor:
    """Compute `quantizer.fake_quantize`, with the same arguments and results."""
    return fake_quantize_with_scale(weight, bits, *grid, **how)[0]


def fake_quantize_with_scale(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantizer.fake_quantize_with_scale`, with the same arguments and results.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    dtype = dtype or weight.dtype
    how: Any = {"ratio": ratio, "seed": seed, "blend": blend, "dtype": dtype}
    if (
        {dtype, weight.dtype} <= _DTYPES
        and grid.is_uniform(bits)
        and available(weight.device)
    ):
        rows, columns = quantizer.check(weight, bits, grid, ratio)
        length = weight.numel() // (rows * columns)
        # What one compiled kernel is for, and how long groups are.
        variant = (
            weight.device,
            length,
            weight.dtype,
            dtype,
            grid,
            grid.is_full(bits),
            ratio is None,
            blend > 0,
        )
        if length <= LONGEST and _works.get(variant, True):
            try:
                if variant not in _works:
                    _try_out(weight, bits, grid, length, how)
                    _works[variant] = True
                return _launch(weight, bits, grid, length, **how)
            except Exception as error:
                # Triton raises what its compiler, the C compiler that it calls, or the
                # driver raise.
                _give_up(variant, f"{type(error).__name__}: {error}")
    return quantizer.fake_quantize_with_scale(weight, bits, grid, **how)


def available(device: torch.device) -> bool:
    """Whether the kernel can run on a device.

    True for CUDA devices with a Triton that is new enough, and for the CPU in Triton's
    interpreter (TRITON_INTERPRET=1 in the environment). Each variant of the kernel is
    tried out at its first use; where it cannot be launched, or gives other numbers than
    `quantizer`, one warning says so, and plain PyTorch computes from then on. It is
    False while torch.compile traces: plain PyTorch can be compiled.
    """
    if torch.compiler.is_compiling():
        return False
    try:
        from triton import knobs
    except ImportError as error:
        # Triton is missing, broken, or too old to have the knobs.
        if device.type == "cuda":
            _give_up((device,), f"it needs Triton 3.4 or later ({error})")
        return False
    return device.type == ("cpu" if knobs.runtime.interpret else "cuda")


def _give_up(variant: tuple[Any, ...], reason: str) -> None:
    if _works.get(variant, True):
        _works[variant] = False
        logger.warning(
            "moq_hf: the Triton kernel is not used on %s %s, plain PyTorch computes in its place: %s",
            variant[0],
            variant[1:],
            reason,
        )


def _try_out(weight: Tensor, bits: int, grid: Grid, length: int, how: Any) -> None:
    """Compare the kernel with `quantizer` on rows that are hard to round, as long as those at hand.

    So nothing is compiled for it alone. Quotients are codes and the halves between
    them, which show an error of one bit.

    Raises:
        ArithmeticError: They differ.
    """
    low, high = grid.limits(bits)
    place = torch.arange(length, device=weight.device)
    steps = torch.tensor([[1.0], [-0.3], [7e-3], [-(2.0**-120)]], device=weight.device)
    hard = (steps * (low + place % (2 * (high - low) + 1) / 2)).to(weight.dtype)
    if how["ratio"] is not None:
        how = {**how, "ratio": steps.abs().clamp(0.2, 1.0)}
    grid = replace(grid, grouping=PerChannel())
    found, _ = _launch(hard, bits, grid, length, **how)
    if not torch.equal(found, quantizer.fake_quantize(hard, bits, grid, **how)):
        raise ArithmeticError("at first use, it gives other numbers than plain PyTorch")


@functools.cache
def _levels(limits: tuple[int, int], device: torch.device) -> Tensor:
    """The least and the greatest code as the kernel reads them: float32 `[2]` in the device's memory."""
    return torch.tensor(limits, dtype=torch.float32, device=device)


def _launch(
    weight: Tensor,
    bits: int,
    grid: Grid,
    length: int,
    ratio: Tensor | None,
    seed: RoundingSeed,
    blend: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    import triton

    from .kernels import triton as kernels

    interpreted = triton.knobs.runtime.interpret
    if kernels.INTERPRETED.value != interpreted:
        # Which of the two a kernel is for is settled when it is read.
        importlib.reload(kernels)
    x = weight.detach().contiguous()
    # The interpreter does not round to bfloat16.
    y = torch.empty_like(x, dtype=torch.float32 if interpreted else dtype)
    groups = x.numel() // length
    scale = torch.empty(groups, 1, device=x.device)
    # A row is read by one warp, and a thread holds 16 weights, or 8 where a row is
    # longer than a tile: chosen by counting instructions and registers.
    columns = min(triton.next_power_of_2(length), 256)
    rows = 4096 // columns if length <= columns else 8
    # Without a limit ptxas spills for sm_100, so that more threads fit.
    options = {} if torch.version.hip else {"maxnreg": 64}
    # Triton launches on the current device.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.fake_quantize_kernel[(triton.cdiv(groups, rows),)](
            x,
            y,
            scale,
            _levels(grid.limits(bits), x.device),
            None if ratio is None else ratio.contiguous(),
            quantizer.uniform(x, seed) if grid.stochastic else None,
            groups,
            length,
            blend,
            1.0 - blend,
            SYMMETRIC=grid.symmetric,
            FULL=grid.is_full(bits),
            BLENDS=blend > 0,
            SCALE_DTYPE=grid.scale_dtype,
            BLOCK_ROWS=rows,
            BLOCK_COLS=columns,
            ONE_TILE=length <= columns,
            num_warps=8,
            enable_fp_fusion=False,
            **options,
        )
    return y.to(dtype), scale
