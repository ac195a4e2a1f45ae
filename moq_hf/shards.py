"""Weights of which each process holds a part: quantized where they lie, with the numbers of the whole, bit for bit.

FSDP2 shards a weight over its first dimension. What a process holds of the matrix `[rows, columns]` that is quantized
is then some of its rows, and of a transposed one (`Conv1D`) some of its columns. Where no group lies across a border,
the part is quantized as a matrix of its own, by any path. Elsewhere the processes tell each other what a group comes
to: its range, and of ternary and binary grids and in the search for ratios its sums, which are exact and so do not
depend on who sums what.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from . import shard_numerics as quantizer
from .grid import Grid, RowBlocks
from .quantizer import Quantized
from .quantizer import RoundingSeed as Draw
from .rows import Kind, from_rows, matrix_shape, to_rows
from .shard_numerics import Groups
from .triton_quant import backend


@dataclass(frozen=True)
class Shard:
    """What this process holds of a sharded weight.

    Attributes:
        kind: How the weight is laid out as a matrix.
        shape: Of the whole weight.
        first: The first of its entries along the weight's first dimension.
        last: The entry after its last one.
        group: The processes that hold the rest.
    """

    kind: Kind
    shape: tuple[int, ...]
    first: int
    last: int
    group: Any

    @classmethod
    def of(cls, weight: Tensor, kind: Kind) -> "Shard":
        """The one of a sharded parameter.

        Args:
            weight: A DTensor that is sharded over its first dimension, on one dimension of its mesh.
            kind: How it is laid out as a matrix.
        """
        shards = cast(Any, weight)
        mesh, placements = shards.device_mesh, shards.placements
        dimension = next(index for index, placement in enumerate(placements) if placement.is_shard())
        size, world, rank = weight.shape[0], mesh.size(dimension), mesh.get_local_rank(dimension)
        # As torch.chunk has it.
        height = -(-size // world)
        first, last = (min(size, place * height) for place in (rank, rank + 1))
        return cls(kind, tuple(weight.shape), first, last, mesh.get_group(dimension))

    @property
    def processes(self) -> int:
        """How many have a part."""
        return dist.get_world_size(self.group)

    @property
    def is_even(self) -> bool:
        """Whether all processes hold as much."""
        return self.shape[0] % self.processes == 0

    @cached_property
    def rows(self) -> int:
        """Of the whole matrix."""
        return matrix_shape(self.shape, self.kind)[0]

    @cached_property
    def columns(self) -> int:
        """Of the whole matrix."""
        return matrix_shape(self.shape, self.kind)[1]

    def own_grid(self, grid: Grid) -> Grid | None:
        """The grid of the part as a matrix of its own; None where in any process a group lies across a border.

        Args:
            grid: Of the whole.
        """
        if self.is_split(grid):
            return None
        if self._in_columns or not isinstance(grid.grouping, RowBlocks):
            return grid
        first, last = self._range
        return replace(grid, grouping=RowBlocks(max(1, (last - first) * grid.grouping.count // self.rows)))

    def is_split(self, grid: Grid) -> bool:
        """Whether in any process a group lies across a border; the same in all of them."""
        size = grid.grouping.row_size
        border = -(-self.shape[0] // self.processes)
        if self.processes == 1 or border >= self.shape[0]:
            return False
        if self._in_columns:
            # Which random numbers an element gets depends on its row.
            return size is None or bool(border % size) or grid.stochastic
        if not isinstance(grid.grouping, RowBlocks):
            return False
        return bool(border * (self.rows // self.shape[0]) % (self.rows // grid.grouping.count))

    def fake_quantize(
        self,
        weight: Tensor,
        bits: int,
        grid: Grid,
        *,
        ratio: Tensor | None,
        draw: Draw,
        blend: float,
        dtype: torch.dtype,
        kernel: bool | None = None,
    ) -> Tensor:
        """The part of what `quantizer.fake_quantize` makes of the whole; all processes must ask.

        Args:
            weight: The part, in the layout of the weight.
            bits: Bit width, 1 to 16.
            grid: Of the whole.
            ratio: Clipping ratios of the whole, of its scale's shape.
            draw: The random numbers of stochastic rounding.
            blend: Share of the float weight.
            dtype: Dtype of the result.
            kernel: `quantizer_kernel` of the config.

        Returns:
            The part, in the layout of the weight.
        """
        matrix, own = self._matrix(weight), self.own_grid(grid)
        part = None if ratio is None else self.part_of(ratio, grid)
        how: dict[str, Any] = {"ratio": part, "blend": blend, "dtype": dtype}
        if own is None:
            values = self._quantize_split(matrix, bits, grid, ratio, draw, blend).to(dtype)
        elif not matrix.numel():
            values = matrix.to(dtype)
        elif grid.stochastic:
            # Which numbers an element gets depends on its place in the whole, which the kernels are not told.
            values = quantizer.fake_quantize(matrix, bits, own, draw=draw, first=self._first_element, **how)
        else:
            values = backend(matrix, kernel).fake_quantize(matrix, bits, own, **how)
        return from_rows(values, self.kind, weight.shape).contiguous()

    def quantize(self, weight: Tensor, bits: int, grid: Grid, ratio: Tensor | None, draw: Draw) -> Quantized:
        """The part of what `quantizer.quantize` makes of the whole, where no group lies across a border.

        A part that holds NaN or Inf has scales that are not finite: an error in one process would leave the others
        waiting.

        Args:
            weight: The part, in the layout of the weight.
            bits: Bit width, 1 to 16.
            grid: Of the whole.
            ratio: Clipping ratios of the whole.
            draw: The random numbers of stochastic rounding.
        """
        own = cast(Grid, self.own_grid(grid))
        ratio = None if ratio is None else self.part_of(ratio, grid)
        how: dict[str, Any] = {"ratio": ratio, "draw": draw, "first": self._first_element}
        return quantizer.quantize_unchecked(self._matrix(weight), bits, own, **how)

    def least_squares_ratio(self, weight: Tensor, bits: int, grid: Grid, kernel: bool | None = None) -> Tensor:
        """`quantizer.least_squares_ratio` of the whole; all processes must ask.

        Args:
            weight: The part, in the layout of the weight.
            bits: Bit width, 2 to 16.
            grid: Of the whole.
            kernel: `quantizer_kernel` of the config.

        Returns:
            float32 ratios in the shape of the whole scale, in every process.
        """
        matrix, own, shape = self._matrix(weight), self.own_grid(grid), grid.shape(self.rows, self.columns)
        found = torch.zeros(shape, dtype=torch.float32, device=matrix.device)
        if own is None:
            pieces, groups = self._pieces(matrix, grid)
            best = quantizer.best_ratio((pieces,), bits, grid, groups)
            found.view(-1).index_copy_(0, groups.ids, best.view(-1))
        elif matrix.numel():
            path = backend(matrix, kernel)
            self.part_of(found, grid).copy_(path.least_squares_ratio(matrix, bits, own))
        # Ratios are above zero: where a process has none of a group, another one has its ratio.
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def part_of(self, scales: Tensor, grid: Grid) -> Tensor:
        """What of the whole scale, or of anything of its shape, is of groups in the part: a view."""
        if self._in_columns:
            size = grid.grouping.row_size or self.columns
            return scales[:, self.first // size : -(-self.last // size)]
        first, last = (place * len(scales) // self.rows for place in self._range)
        return scales[first:last]

    @property
    def _in_columns(self) -> bool:
        return self.kind == "conv1d"

    @property
    def _range(self) -> tuple[int, int]:
        """The first row of the matrix in the part, and the one after the last."""
        each = self.rows // self.shape[0]
        return self.first * each, self.last * each

    @property
    def _first_element(self) -> int:
        return self._range[0] * self.columns

    def _matrix(self, weight: Tensor) -> Tensor:
        return to_rows(weight.detach(), self.kind).contiguous()

    def _quantize_split(
        self, matrix: Tensor, bits: int, grid: Grid, ratio: Tensor | None, draw: Draw, blend: float
    ) -> Tensor:
        """With groups across borders, float32."""
        pieces, groups = self._pieces(matrix, grid)
        own = None if ratio is None else ratio.reshape(-1)[groups.ids]
        noise = self._to_pieces(self._noise(matrix, draw), grid) if grid.stochastic else None
        found = quantizer.codes_of(pieces, bits, grid, own, noise, torch.empty_like(pieces), groups)
        values = quantizer.blended(pieces, quantizer.values_of(*found), blend)
        if self._in_columns and grid.grouping.row_size is not None:
            left = self.first % grid.grouping.row_size
            values = values.reshape(len(matrix), -1)[:, left : left + matrix.shape[1]]
        return values.reshape(matrix.shape)

    def _noise(self, matrix: Tensor, draw: Draw) -> Tensor:
        if not self._in_columns:
            return quantizer.uniform(matrix.numel(), draw, first=self._first_element, device=matrix.device).view(
                matrix.shape
            )
        first, count = self.first, self.last - self.first
        rows = [
            quantizer.uniform(count, draw, first=row * self.columns + first, device=matrix.device)
            for row in range(self.rows)
        ]
        return torch.stack(rows)

    def _to_pieces(self, matrix: Tensor, grid: Grid) -> Tensor:
        """Rows that are each of one group, float32; groups that are cut off are filled up with zeros."""
        size = grid.grouping.row_size
        if self._in_columns and size is not None:
            matrix = torch.nn.functional.pad(matrix, (self.first % size, -self.last % size)).reshape(-1, size)
        return matrix.float()

    def _pieces(self, matrix: Tensor, grid: Grid) -> tuple[Tensor, "_Split"]:
        shape = grid.shape(self.rows, self.columns)
        total = shape[0] * shape[1]
        first, last = (0, self.rows) if self._in_columns else self._range
        rows = torch.arange(first, last, device=matrix.device) * shape[0] // self.rows
        size = grid.grouping.row_size
        if self._in_columns and size is not None:
            across = torch.arange(self.first // size, -(-self.last // size), device=matrix.device)
            rows = (rows[:, None] * shape[1] + across).view(-1)
        pieces = self._to_pieces(matrix, grid)
        return pieces, _Split(rows, total, self.rows * self.columns // total, self.group)


class _Split(Groups):
    """Groups whose rows lie in several processes.

    Args:
        ids: The number of the group of each row.
        total: How many groups there are.
        size: Elements of a group.
        group: The processes.
    """

    def __init__(self, ids: Tensor, total: int, size: int, group: Any) -> None:
        self.ids, self._total, self._size, self._group = ids, total, size, group

    def count(self, x: Tensor) -> int:
        """How many elements a group has."""
        return self._size

    def range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest element, or zero; infinite ones where an element is not finite."""
        wide = x.shape[1] > 0
        ends = torch.stack([-x.amin(1), x.amax(1)]) if wide else x.new_zeros(2, len(x))
        # What becomes of NaN in a reduction is not the same everywhere.
        ends = torch.where(ends.isfinite(), ends, torch.inf)
        found = ends.new_zeros(2, self._total)
        found.scatter_reduce_(1, self.ids.expand(2, -1), ends, "amax")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        low, high = found[:, self.ids, None]
        return -low, high

    def total(self, x: Tensor) -> Tensor:
        """The exact sum."""
        sums = x.sum(1, dtype=torch.float64)
        found = sums.new_zeros(self._total).index_add_(0, self.ids, sums)
        dist.all_reduce(found, group=self._group)
        return found[self.ids, None]
