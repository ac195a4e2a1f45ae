"""Quantizes parts of random weights in some processes, and compares them with parts of the whole: `sharded.py OUT`."""

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moq_hf import quantizer
from moq_hf.grid import Grid, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import RoundingSeed
from moq_hf.rows import KINDS, Kind, from_rows, to_rows
from moq_hf.shards import Shard

CASES = 400


def a_grid(choose: random.Random, rows: int, columns: int, bits: int) -> Grid:
    """Any grid that such a matrix may have at these bits."""
    sizes = [size for size in range(1, columns + 1) if columns % size == 0]
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    grouping = choose.choice([RowBlocks(choose.choice(counts)), PerChannel(), PerGroup(choose.choice(sizes))])
    symmetric = bits == 1 or choose.random() < 0.7
    full = symmetric and choose.random() < 0.4
    grid = Grid(grouping, symmetric, full=full, scale_dtype=choose.choice(["float32", "bfloat16", "float16"]))
    stochastic = grid.is_uniform(bits) and choose.random() < 0.4
    return Grid(grouping, symmetric, stochastic, full=full, scale_dtype=grid.scale_dtype)


def shape_of(choose: random.Random, kind: Kind) -> tuple[int, ...]:
    first, second = choose.choice([1, 2, 3, 6, 8, 9, 12, 24]), choose.choice([1, 4, 6, 8, 12])
    if kind in ("experts", "experts_t"):
        return choose.choice([1, 2, 3, 5, 6]), first, second
    return (first, second, 3) if kind == "conv" else (first, second)


def case(number: int) -> tuple[list[str], bool]:
    """What of one random case is not as it is in the whole, and whether a group lies across a border."""
    choose = random.Random(number)
    kind = choose.choice(KINDS)
    shape, bits = shape_of(choose, kind), choose.randint(1, 9)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10 ** choose.uniform(-3, 3)
    whole = whole.to(choose.choice([torch.float32, torch.bfloat16]))
    if choose.random() < 0.15:
        whole.flatten()[choose.randrange(whole.numel())] = choose.choice([torch.inf, torch.nan])
    matrix = to_rows(whole, kind)
    grid = a_grid(choose, *matrix.shape, bits)
    world, rank = dist.get_world_size(), dist.get_rank()
    height = -(-shape[0] // world)
    first, last = (min(shape[0], place * height) for place in (rank, rank + 1))
    shard, part = Shard(kind, shape, first, last, dist.group.WORLD), whole[first:last].contiguous()
    draw, blend = RoundingSeed(number, 3, 5), choose.choice([0.0, 0.0, 0.25])
    dtype = choose.choice([torch.float32, torch.bfloat16])
    finite = bool(whole.isfinite().all())
    wrong: list[str] = []
    ratio = None
    if grid.is_uniform(bits) and bits > 1 and finite:
        ratio = quantizer.least_squares_ratio(matrix, bits, grid)
        found = shard.least_squares_ratio(part, bits, grid)
        wrong += ["ratio"] * (not torch.equal(found, ratio))
    how: dict[str, Any] = {"ratio": ratio, "blend": blend, "dtype": dtype}
    expected = from_rows(quantizer.fake_quantize(matrix, bits, grid, seed=draw, **how), kind, shape)[first:last]
    values = shard.fake_quantize(part, bits, grid, draw=draw, **how)
    if finite:
        wrong += ["values"] * (not torch.equal(values, expected))
    else:
        # Some process sees it, and what is of other groups is what it is.
        seen = torch.tensor(float(not values.isfinite().all()))
        dist.all_reduce(seen)
        wrong += ["unseen"] * (not seen)
        fine = expected.isfinite() & values.isfinite()
        wrong += ["values"] * (not torch.equal(values[fine], expected[fine]))
    if finite and not blend and shard.own_grid(grid) is not None and part.numel():
        codes = shard.quantize(part, bits, grid, ratio, draw)
        again = from_rows(quantizer.dequantize(*codes, dtype=dtype), kind, part.shape)
        wrong += ["codes"] * (not torch.equal(again, expected))
    split = torch.tensor([float(shard.is_split(grid)), -float(shard.is_split(grid))])
    dist.all_reduce(split, dist.ReduceOp.MAX)
    wrong += ["split"] * bool(split.sum())
    return [f"{number}: {what}: {kind} {shape} {bits} {grid}" for what in wrong], shard.is_split(grid)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = [case(number) for number in range(CASES)]
    wrong, split = [line for lines, _ in cases for line in lines], sum(is_split for _, is_split in cases)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    if dist.get_rank() == 0:
        lines = [line for lines in found for line in lines]
        Path(sys.argv[1]).write_text("\n".join([*lines, f"{CASES} {split}"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
