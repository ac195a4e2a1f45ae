"""`quantizer.fake_quantize` for weights that lie transposed, without a transposed copy; see `kernels.numba_columns`."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import quantizer
from ..grid import Grid
from .cpu import _CUT, _NO_FLOATS, _flat


def fits(weight: Tensor, bits: int, grid: Grid) -> bool:
    """Whether `fake_quantize` takes a grid: equal steps, rounded to nearest, and each scale of one matrix alone.

    Args:
        weight: `[columns, rows]` or `[matrices, columns, rows]`.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale.
    """
    if grid.stochastic or not grid.is_uniform(bits):
        return False
    matrices, columns, rows = _sizes(weight)
    return rows % (matrices * rows // grid.shape(matrices * rows, columns)[0]) == 0


def fake_quantize(
    weight: Tensor,
    bits: int,
    grid: Grid,
    *,
    ratio: Tensor | None = None,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The transpose of what `quantizer.fake_quantize` gives of the transpose, in one pass.

    It is for a weight to which `kernels.cpu` applies, and a grid that `fits`.

    Args:
        weight: float32 `[columns, rows]`, or `[matrices, columns, rows]`: matrices whose rows stand one below the other
            in the grid.
        bits: Bit width, 2 to 16.
        grid: Which weights share a scale.
        ratio: Clipping ratios, float32 of the scale's shape. None is 1 everywhere (absmax).
        blend: Share of the float weight in the result, 0 to 1.
        dtype: Dtype of the result; None is the weight's.
        out: Where to write the result: `weight`'s shape, contiguous, of the dtype wanted.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    matrices, columns, rows = _sizes(weight)
    shape = quantizer.check(weight.new_empty(matrices * rows, columns, device="meta"), bits, grid, ratio)
    out = torch.empty_like(weight, dtype=dtype or weight.dtype) if out is None else out
    _kernels().fake_quantize(
        _flat(weight.detach()),
        _flat(out.view(torch.uint16) if out.dtype == torch.bfloat16 else out),
        (matrices, columns, rows),
        matrices * rows // shape[0],
        columns // shape[1],
        bits,
        grid.symmetric,
        grid.is_full(bits),
        _CUT[grid.scale_dtype],
        _NO_FLOATS if ratio is None else _flat(ratio.to(torch.float32).contiguous()),
        np.float32(1.0 - blend),
        np.float32(blend),
    )
    # Autograd cannot see what the loops write: a backward pass through an older result must fail as ever.
    torch.autograd.graph.increment_version(out)
    return out


def _sizes(weight: Tensor) -> tuple[int, int, int]:
    """Matrices, and the columns and rows of each."""
    columns, rows = weight.shape[-2:]
    return weight.numel() // (columns * rows), columns, rows


@functools.cache
def _kernels() -> Any:
    from . import numba_columns

    return numba_columns
