"""`quantizer.fake_quantize` as one launch of a Triton kernel, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: where the kernel does not run,
`quantizer` computes. The kernel takes uniform grids in groups of up to `LONGEST`
weights; ternary and binary grids, longer groups and float64 are left to `quantizer`.
"""

import functools
import logging
import math
from collections.abc import Iterator
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
# Elements of a tile and warps of a program, so that a thread holds 16 elements: not
# measured on a GPU.
_TILE = 4096
_WARPS = 8
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_DEFAULT = Grid()
_FIRST = RoundingSeed()
# Devices on which the kernel failed; they are not tried again.
_given_up: set[torch.device] = set()


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
    if (
        {dtype, weight.dtype} <= _DTYPES
        and grid.is_uniform(bits)
        and available(weight.device)
    ):
        rows, columns = quantizer.check(weight, bits, grid, ratio)
        if weight.numel() <= LONGEST * rows * columns:
            try:
                return _launch(
                    weight, bits, grid, rows * columns, ratio, seed, blend, dtype
                )
            except Exception as error:
                # Triton raises what its compiler, the C compiler that it calls, or the
                # driver raise.
                _give_up(weight.device, f"{type(error).__name__}: {error}")
    return quantizer.fake_quantize_with_scale(
        weight, bits, grid, ratio=ratio, seed=seed, blend=blend, dtype=dtype
    )


def available(device: torch.device) -> bool:
    """Whether the kernel runs on a device, with the numbers of `quantizer`: tried out once in each process.

    True for CUDA devices with a working Triton, and for the CPU in Triton's interpreter
    (TRITON_INTERPRET=1 in the environment before Triton is imported). Where the kernel
    cannot be launched, or gives another number, one warning says so, and this is False
    from then on. It is False while torch.compile traces: plain PyTorch can be compiled.
    """
    if device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return False
    return device not in _given_up and _is_right(device)


@functools.cache
def _is_right(device: torch.device) -> bool:
    try:
        import triton

        interpreted = triton.knobs.runtime.interpret
    except (ImportError, AttributeError) as error:
        # Triton is missing, broken, or too old to have the knobs.
        if device.type == "cuda":
            _give_up(device, f"it needs Triton 3.4 or later ({error})")
        return False
    if interpreted != (device.type == "cpu"):
        return False
    try:
        wrong = list(_differences(device))
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        _give_up(
            device,
            f"at first use, it does not compute what plain PyTorch does: {'; '.join(wrong)}",
        )
    return not wrong


def _give_up(device: torch.device, reason: str) -> None:
    _given_up.add(device)
    logger.warning(
        "moq_hf: the Triton kernel is not used on %s, plain PyTorch computes in its place: %s",
        device,
        reason,
    )


def _differences(device: torch.device) -> Iterator[str]:
    """Compare the kernel with `quantizer` on rows that are hard to round; yield a text for each difference."""
    halves = torch.arange(-63.5, 64.5, 1.0, device=device)
    weight = torch.stack([halves, halves.exp2() * 1e-3, halves * 0.0, halves / 3])
    ratio = torch.tensor([[1.0], [0.85], [1.0], [0.2]], device=device)
    for grid in (
        Grid(),
        Grid(full=True, scale_dtype="bfloat16"),
        Grid(symmetric=False),
        Grid(stochastic=True),
    ):
        grid = replace(grid, grouping=PerChannel())
        blend = 0.25 if grid.stochastic else 0.0
        actual, _ = _launch(
            weight, 7, grid, len(weight), ratio, _FIRST, blend, torch.bfloat16
        )
        expected = quantizer.fake_quantize(
            weight, 7, grid, ratio=ratio, blend=blend, dtype=torch.bfloat16
        )
        count = int((actual != expected).sum())
        if count:
            yield f"{count} of {actual.numel()} weights differ ({grid})"


def _launch(
    weight: Tensor,
    bits: int,
    grid: Grid,
    groups: int,
    ratio: Tensor | None,
    seed: RoundingSeed,
    blend: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    import triton

    from .kernels.triton import fake_quantize_kernel

    x = weight.detach().contiguous()
    y = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    n_cols = x.numel() // groups
    block_size = min(triton.next_power_of_2(n_cols), _TILE // 4)
    block_rows = _TILE // block_size
    low, high = grid.limits(bits)
    # Triton launches on the current device.
    with torch.cuda.device(x.device if x.is_cuda else -1):
        fake_quantize_kernel[(math.ceil(groups / block_rows),)](
            x,
            y,
            scale,
            None if ratio is None else ratio.contiguous(),
            quantizer.uniform(x, seed) if grid.stochastic else None,
            groups,
            n_cols,
            float(low),
            float(high),
            blend or None,
            1.0 - blend,
            SYMMETRIC=grid.symmetric,
            FULL=grid.is_full(bits),
            SCALE_DTYPE=getattr(triton.language, grid.scale_dtype),
            BLOCK_ROWS=block_rows,
            BLOCK_SIZE=block_size,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return y, scale
