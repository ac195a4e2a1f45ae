"""The grids that every path is held to the definition on."""

import itertools

import torch

from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks, ScaleDtype

Mode = tuple[int, Grid]
GROUPINGS: list[Grouping] = [RowBlocks(), RowBlocks(3), PerChannel(), PerGroup(11)]


def modes(bit_widths: range | tuple[int, ...], scale_dtypes: tuple[ScaleDtype, ...] = ("float32",)) -> list[Mode]:
    """Each bit width with each grid that there is at it, but for the grouping."""
    grids = [
        Grid(symmetric=symmetric, stochastic=noisy, full=full, scale_dtype=dtype)
        for dtype in scale_dtypes
        for symmetric, full in ((True, False), (False, False), (True, True))
        for noisy in (False, True)
    ]
    return [
        (bits, grid)
        for bits, grid in itertools.product(bit_widths, grids)
        if grid.at(bits).is_uniform or (grid.symmetric and not grid.stochastic)
    ]


SCALE_DTYPES: tuple[ScaleDtype, ...] = ("float32", "bfloat16", "float16")
MODES = modes((1, 2, 3, 8, 16))
# Those with scales of fewer bits.
HALF_MODES = modes((1, 2, 4), SCALE_DTYPES[1:])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, the sign of zeros too; any NaN equals any other."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool(equal.all())
