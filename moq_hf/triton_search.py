"""`quantizer.least_squares_ratio` as one launch of a Triton kernel, with the same ratios.

It can be imported without Triton and without a GPU: if the kernel does not run,
`quantizer` computes.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, PerChannel, Precision
from .triton_launch import DTYPES, attempt, available, hard_rows, kernels, launch

_DEFAULT = Grid()
_WARPS = 4
# Threads of a program, the weights that each holds, and the number that it reads at once.
_THREADS = 32 * _WARPS
_HELD = 32
_VECTOR = 4
# Weights of longer groups are held by several programs.
LONGEST = _THREADS * _HELD


def least_squares_ratio(weight: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """Compute `quantizer.least_squares_ratio`, with the same arguments and results.

    Raises:
        ValueError: Bits or groups do not fit, or the grid is ternary or binary.
        torch.OutOfMemoryError: The device has no room.
    """
    precision = grid.at(bits)
    if (
        weight.dtype in DTYPES
        and weight.dim() == 2
        and precision.is_uniform
        and precision.format != "fp8"
        and available(weight.device)
    ):
        shape = quantizer.check(weight, bits, replace(grid, stochastic=False))
        x = weight.detach().contiguous().view(shape[0] * shape[1], -1)
        variant = (
            x.device,
            "search",
            x.shape[1],
            x.dtype,
            grid,
            precision.is_full,
            precision.is_float,
        )
        found = attempt(variant, _is_right, _launch, x, precision)
        if found is not None:
            return found.view(shape)
    return quantizer.least_squares_ratio(weight, bits, grid)


def _is_right(x: Tensor, precision: Precision) -> bool:
    """True if the kernel chooses the same ratios as `quantizer`, for groups of the same length."""
    length = x.shape[1]
    if length > LONGEST:
        # Two whole parts, and a last one of the same length.
        length = 2 * LONGEST + length % LONGEST
    # Most of the weights are small, so that it pays to clip the others.
    place = torch.arange(4 * length, dtype=torch.float32, device=x.device)
    hard = hard_rows(place.mul_(2.4).sin_().pow_(5).view(4, length), x.dtype)
    grid = replace(precision.grid, grouping=PerChannel(), stochastic=False)
    expected = quantizer.least_squares_ratio(hard, precision.bits, grid)
    return torch.equal(_launch(hard, grid.at(precision.bits)), expected)


def _launch(x: Tensor, precision: Precision) -> Tensor:
    """Search the ratios `[groups, 1]` of groups `[groups, length]`."""
    groups, length = x.shape
    ratios = _ratios_on(x.device, quantizer.ratios_of(precision.format))
    # A row is read by as few threads as can hold it.
    columns = min(1 << (length - 1).bit_length(), LONGEST)
    chunk = max(_VECTOR, columns // _HELD * _VECTOR)
    rows = _THREADS * _VECTOR // chunk
    parts = -(-length // LONGEST)
    best = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    sums = ends = None
    if parts > 1:
        ends = torch.stack(x.aminmax(dim=1), 1).float()
        size = groups, len(ratios)
        sums = torch.zeros(size, dtype=torch.int64, device=x.device)
    launch(
        kernels("search").least_squares_kernel,
        -(-groups // rows) * parts,
        x.device,
        x,
        best,
        sums,
        ends,
        ratios,
        groups,
        length,
        parts,
        quantizer.error_exponent(length),
        float(precision.low),
        float(precision.high),
        float(precision.top),
        N_RATIOS=len(ratios),
        SYMMETRIC=precision.grid.symmetric,
        SCALE_DTYPE=precision.grid.scale_dtype,
        FORMAT=precision.format,
        BLOCK_ROWS=rows,
        BLOCK_COLS=chunk,
        CHUNKS=max(1, columns // chunk),
        num_warps=_WARPS,
    )
    return best if sums is None else _least(sums, ratios)


def _least(sums: Tensor, ratios: Tensor) -> Tensor:
    """The ratio with the least sum `[groups, ratios]` for each group, the first of several."""
    return ratios[sums.argmin(1, keepdim=True)]


@cache
def _ratios_on(device: torch.device, ratios: tuple[float, ...]) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float32, device=device)
