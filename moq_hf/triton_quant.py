"""The functions of `quantizer` as Triton kernels, a whole model at once, and products with packed weights.

Importable without Triton and without a GPU; `available` says whether the kernels can run on a device, and each other
function needs that. Results are those of `quantizer` on the same device, bit for bit. The kernels are in
`kernels.triton`.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, Grouping, PerChannel, RowBlocks
from .quantizer import Draw

logger = logging.getLogger(__name__)

_DEFAULT, _FIRST = Grid(), Draw()
# Random numbers of the trial at first use.
_TRIED = Draw(2**35 + 7, 3, 9)
# Elements of a tile. Chosen so that a thread of _WARPS warps holds 16 of them: not measured on a GPU.
TILE = 4096
# Groups of more elements than this are shared out among programs.
WHOLE = 4 * TILE
_WARPS = 8
# Columns of the table that `kernels.triton` describes.
_LENGTH, _GROUPS, _STEP, _KEEP, _BLEND = 3, 4, 9, 10, 11
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


class Unusable(RuntimeError):
    """A kernel could not be launched. The reason is logged, and plain PyTorch computes from then on."""


# Devices on which something went wrong.
_given_up: set[torch.device] = set()


def available(device: torch.device) -> bool:
    """Whether the kernels run on `device`, with the numbers of `quantizer`: tried out once in each process.

    True for CUDA devices with a working Triton, and for the CPU in Triton's interpreter (TRITON_INTERPRET=1 in the
    environment before Triton is imported). Where a kernel cannot be launched, or gives another number, one warning says
    so, and this is False from then on. While torch.compile traces, it is False: plain PyTorch is what can be compiled.
    """
    if torch.compiler.is_compiling():
        return False
    device = with_index(device)
    return device not in _given_up and _is_right(device)


def with_index(device: torch.device) -> torch.device:
    """The device with its number, of which "cuda" alone means the current one: it is tried out and given up once."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def _is_right(device: torch.device) -> bool:
    if device.type not in ("cpu", "cuda"):
        return False
    try:
        import triton

        interpreted = triton.knobs.runtime.interpret
    except (ImportError, AttributeError) as error:
        # There is none, or a broken one, or one without the knobs.
        if device.type == "cuda":
            _give_up(device, f"they need Triton 3.4 or later ({error})")
        return False
    return interpreted == (device.type == "cpu") and passes(device, _differences)


def passes(device: torch.device, differences: Callable[[torch.device], Iterable[str]]) -> bool:
    """Whether a test of kernels finds nothing; if it does, they are given up on the device.

    Args:
        device: Where to run it.
        differences: The test: says where a kernel is not what defines its numbers.
    """
    try:
        # Where a GPU computes NaN in silence, NumPy in the interpreter warns.
        with np.errstate(all="ignore"):
            found = list(differences(device))
    except Unusable:
        return False
    if found:
        _give_up(device, f"they give other numbers than plain PyTorch: {'; '.join(found)}")
    return not found


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Where kernels are launched on a device.

    Raises:
        Unusable: One could not be. The kernels are given up on the device.
    """
    try:
        # Triton launches on the current device.
        with torch.cuda.device(device if device.type == "cuda" else -1):
            yield
    except Exception as error:
        # Triton raises what its compiler, the C compiler that it calls, or the driver raise.
        _give_up(device, f"{type(error).__name__}: {error}")
        raise Unusable(str(error)) from error


def _give_up(device: torch.device, reason: str) -> None:
    if device not in _given_up:
        _given_up.add(device)
        logger.warning(
            "moq_hf: the Triton kernels are not used on %s, plain PyTorch computes in their place: %s", device, reason
        )


def same_bits(found: Tensor, expected: Tensor, name: str) -> Iterator[str]:
    """Says how a kernel's numbers differ from those that define them, if they do: bits count, but of NaN and zero."""
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    if found.is_floating_point():
        wrong |= (found == 0) & (expected == 0) & (found.signbit() != expected.signbit())
    if bool(wrong.any()):
        largest = (found.double() - expected.double()).abs()[wrong].max()
        yield f"{name}: {int(wrong.sum())} of {found.numel()}, the largest by {float(largest):.3g}"


def _differences(device: torch.device) -> Iterator[str]:
    """Where a kernel is not `quantizer`: odd and even shapes, groups of zeros, with NaN, of many tiles; searches."""
    generator = torch.Generator().manual_seed(0)
    every = [(8, Grid()), (3, Grid()), (2, Grid()), (1, Grid()), (4, Grid(symmetric=False)), (8, Grid(stochastic=True))]
    others = [(4, Grid(full=True)), (4, Grid(scale_dtype="bfloat16"))]
    # With and without wide loads, and random numbers that are drawn four at a time.
    shapes: list[tuple[tuple[int, int], Grouping, torch.dtype]] = [
        ((6, 33), PerChannel(), torch.float32),
        ((6, 64), RowBlocks(3), torch.bfloat16),
        ((3, WHOLE // 2 - 1), RowBlocks(), torch.bfloat16),
    ]
    for shape, grouping, dtype in shapes:
        weight = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
        weight[0] = 0.0
        jobs = []
        for bits, mode in every if weight.numel() > WHOLE else every + others:
            grid = replace(mode, grouping=grouping)
            cells = grid.shape(*shape)
            ratio = _ratios(device)[1 : 1 + math.prod(cells)].view(cells) if 2 < bits < 8 else None
            blend = 0.25 if bits == 8 else 0.0
            jobs.append(Job(weight, torch.empty_like(weight, dtype=dtype), bits, grid, ratio, _TRIED, blend))
        batch = Batch(jobs)
        batch.run()
        for job in jobs:
            how: dict[str, Any] = {"ratio": job.ratio, "draw": job.draw, "blend": job.blend, "dtype": dtype}
            expected = quantizer.fake_quantize(weight, job.bits, job.grid, **how)
            yield from same_bits(job.out, expected, f"{job.bits} bits, {list(shape)}")
        told = [batch.nonfinite()]
        weight[-1, -1] = torch.nan
        batch.run()
        told.append(batch.nonfinite())
        if told != [[], list(range(len(jobs)))]:
            yield f"{len(jobs)} weights without NaN and with it, {list(shape)}: {told} hold some"
    weight = weight[:, :99].contiguous()
    for grid in (Grid(), Grid(PerChannel(), symmetric=False)):
        found, expected = (search(weight, 4, grid) for search in (_searched, quantizer.least_squares_ratio))
        yield from same_bits(found, expected, "clipping ratios")


class Job(NamedTuple):
    """A weight to quantize and where the result goes; the other fields are the arguments of `fake_quantize`."""

    weight: Tensor
    out: Tensor
    bits: int
    grid: Grid = Grid()
    ratio: Tensor | None = None
    draw: Draw = Draw()
    blend: float = 0.0


class Batch:
    """Weights that are quantized together, again and again: all of one dtype and rounding.

    Where a program sees a group as a whole, that is one launch. Longer groups take two, for ranges and for values, and
    binary and ternary ones a third and a fourth, for their sums.

    Tables of pointers and shapes are on the device; `run` launches and does not wait. A CUDA graph may capture it.

    Args:
        jobs: On one device. The tensors must stay where they are; a batch holds on to them.

    Raises:
        ValueError: As `quantizer.fake_quantize` does, or tensors that are not contiguous or on different devices.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.device = self.jobs[0].weight.device
        if any(tensor.device != self.device for job in jobs for tensor in (job.weight, job.out)):
            raise ValueError("weights and results must be on one device")
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, job in enumerate(jobs):
            grid = (kind_of(job.grid, job.bits), job.grid.scale_dtype, job.grid.stochastic)
            key = (job.weight.dtype, job.out.dtype, *grid)
            alike.setdefault(key, []).append(index)
        # Of the weights in the order of the launches.
        self._order = [index for indices in alike.values() for index in indices]
        self._flags = torch.zeros(len(self.jobs), dtype=torch.int32, device=self.device)
        self._parts: list[tuple[list[int], _Part]] = []
        for indices in alike.values():
            first = sum(len(others) for others, _ in self._parts)
            flags = self._flags[first : first + len(indices)]
            self._parts.append((indices, _Part([self.jobs[index] for index in indices], flags)))
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def run(self) -> None:
        """Quantize every weight from what it is now.

        Raises:
            Unusable: A kernel could not be launched. The results are not complete then.
        """
        with launching(self.device):
            for _, part in self._parts:
                part.run()
        # Autograd cannot see what a kernel writes: a backward pass through an older result must fail as ever.
        torch.autograd.graph.increment_version([job.out for job in self.jobs])

    def update(self, steps: Sequence[int], blends: Sequence[float]) -> None:
        """Set each job's step and blend; what changed is copied to the device, outside of a captured graph."""
        for indices, part in self._parts:
            part.update([steps[index] for index in indices], [blends[index] for index in indices])

    def nonfinite(self, *, wait: bool = True) -> list[int]:
        """Indices of the jobs whose weight held NaN or Inf in a run since this was last asked.

        Args:
            wait: For the device. Otherwise of the runs before the call before this one, if the device is through.
        """
        if wait or self.device.type != "cuda":
            found = self._flags.tolist()
        else:
            if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
                return []
            if self._copy is None:
                self._copy = torch.zeros(len(self.jobs), dtype=torch.int32, device="cpu", pin_memory=True)
            found = self._copy.tolist()
            self._copy.copy_(self._flags, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))
        if any(found):
            self._flags.zero_()
        return sorted(index for index, flag in zip(self._order, found, strict=True) if flag)


class _Part:
    """The jobs of a batch that are launched together."""

    def __init__(self, jobs: list[Job], flags: Tensor) -> None:
        self.flags = flags
        device = flags.device
        rows: list[list[int]] = []
        sizes: list[tuple[int, int]] = []
        for job in jobs:
            rows.append(_row(job, sum(groups for _, groups in sizes)))
            sizes.append((rows[-1][_LENGTH], rows[-1][_GROUPS]))
        self.rows = np.array(rows, dtype=np.int64)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        lengths = [length for length, _ in sizes]
        pointers = [pointer for row in rows for pointer in row[:2]]
        self.options: dict[str, Any] = {
            "KIND": kind_of(jobs[0].grid, jobs[0].bits),
            "SCALE": _triton_type(jobs[0].grid.scale_dtype),
            "STOCHASTIC": jobs[0].grid.stochastic,
            "QUADS": all(length % 4 == 0 for length in lengths),
            # What pointers, in bytes, and lengths are multiples of lets the compiler use wide loads.
            "ALIGN": 16 if all(number % 16 == 0 for number in pointers + lengths) else 1,
            "IN": _triton_type(DTYPES[jobs[0].weight.dtype]),
            "OUT": _triton_type(DTYPES[jobs[0].out.dtype]),
            "num_warps": _WARPS,
            "enable_fp_fusion": False,
        }
        self.scratch: Tensor | None = None
        if max(lengths) <= WHOLE:
            columns = max(4, power_of_two(min(max(lengths), TILE // 4)))
            at_once = TILE // columns
            self.options |= {"R": at_once, "S": columns}
            self._launches = [torch.from_numpy(_group_items(sizes, at_once)).to(device)]
        else:
            self.options["S"] = TILE
            count = sum(groups for _, groups in sizes)
            self._groups = count
            self.scratch = torch.zeros(2 * count + _halves(count), dtype=torch.float64, device=device)
            self._launches = [torch.from_numpy(items).to(device) for items in _tile_items(jobs, sizes)]

    def run(self) -> None:
        kernels = load_kernels()
        if self.scratch is None:
            (items,) = self._launches
            kernels.fake_quantize_groups[(len(items),)](self.table, items, self.flags, **self.options)
            return
        sums, marks = self.scratch[: 2 * self._groups], self.scratch[2 * self._groups :].view(torch.int32)
        self.scratch.zero_()
        for phase, items in enumerate(self._launches):
            if len(items):
                kernels.fake_quantize_tiles[(len(items),)](
                    self.table, items, marks, sums, self.flags, PHASE=phase, **self.options
                )

    def update(self, steps: Sequence[int], blends: Sequence[float]) -> None:
        rows = self.rows.copy()
        if self.options["STOCHASTIC"]:
            rows[:, _STEP] = steps
        rows[:, _KEEP] = _float_bits([1.0 - share for share in blends])
        rows[:, _BLEND] = _float_bits(blends)
        if not np.array_equal(rows, self.rows):
            self.rows = rows
            # The driver takes a copy of this unpinned memory before it returns, and waits for nothing.
            self.table.copy_(torch.from_numpy(rows), non_blocking=True)


def fake_quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    draw: Draw = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`quantizer.fake_quantize` on a device where the kernels are `available`; same arguments and results.

    A `Batch` saves the preparation. Where a kernel cannot be launched, `quantizer` computes.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    weight = weight.detach().contiguous()
    if out is None:
        out = torch.empty_like(weight, dtype=dtype or weight.dtype)
    try:
        Batch([Job(weight, out, bits, grid, ratio, draw, blend)]).run()
    except Unusable:
        return quantizer.fake_quantize(weight, bits, grid, ratio=ratio, draw=draw, blend=blend, dtype=dtype, out=out)
    return out


def least_squares_ratio(weight: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """`quantizer.least_squares_ratio` on a device where the kernels are `available`: two launches.

    Where a kernel cannot be launched, `quantizer` computes.

    Raises:
        ValueError: Bits or groups do not fit, or the grid is ternary or binary.
    """
    try:
        return _searched(weight, bits, grid)
    except Unusable:
        return quantizer.least_squares_ratio(weight, bits, grid)


def _searched(weight: Tensor, bits: int, grid: Grid) -> Tensor:
    shape = quantizer.check_search(weight, bits, grid)
    kernels = load_kernels()
    weight = weight.detach().contiguous()
    count = shape[0] * shape[1]
    length = weight.numel() // count
    columns = power_of_two(min(length, TILE // 4))
    rows = TILE // 4 // columns
    programs = (math.ceil(count / rows) * math.ceil(length / columns),)
    cells = torch.zeros(count, 2, dtype=torch.int32, device=weight.device)
    sums = torch.zeros(count, len(quantizer.RATIOS), dtype=torch.float64, device=weight.device)
    ratios = _ratios(weight.device)
    tile = {"KIND": kind_of(grid, bits), "R": rows, "S": columns, "enable_fp_fusion": False}
    scale = _triton_type(grid.scale_dtype)
    with launching(weight.device):
        kernels.group_ranges[programs](weight, cells, length, count, **tile)
        kernels.ratio_errors[programs](
            weight, cells, ratios, sums, length, count, bits, COUNT=len(ratios), SCALE=scale, **tile
        )
    # The first of equal sums, and 1 for a group with NaN.
    best = sums.nan_to_num(nan=math.inf, posinf=math.inf).argmin(1)
    return ratios[best].view(shape)


def load_kernels() -> Any:
    """The kernels' module, which needs Triton."""
    from .kernels import triton

    return triton


def _triton_type(name: str) -> Any:
    import triton.language as tl

    return getattr(tl, name)


def kind_of(grid: Grid, bits: int) -> int:
    """`KIND` of a launch, one of the numbers in `kernels.triton`."""
    return 2 if not grid.symmetric else int(grid.is_full(bits))


def power_of_two(number: int) -> int:
    """The least power of two from a number on."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _ratios(device: torch.device) -> Tensor:
    return torch.tensor(quantizer.RATIOS, dtype=torch.float32, device=device)


def _halves(groups: int) -> int:
    """How many float64 take as many bytes as the marks of so many groups."""
    return -(-int(load_kernels().MARKS.value) * groups // 2)


def _float_bits(values: Sequence[float]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(values, dtype=np.float32).view(np.int32)


def _row(job: Job, first: int) -> list[int]:
    """The job's row of the table that `kernels.triton` describes.

    Raises:
        ValueError: There is no kernel for the tensors.
    """
    shape = quantizer.check(job.weight, job.bits, job.grid, job.ratio)
    if job.weight.dtype not in DTYPES or job.out.dtype not in DTYPES:
        raise ValueError(f"no kernel for {job.weight.dtype} to {job.out.dtype}")
    if job.out.shape != job.weight.shape or not (job.out.is_contiguous() and job.weight.is_contiguous()):
        raise ValueError("weight and result must be contiguous and of one shape")
    ratio = 0
    if job.ratio is not None:
        if job.ratio.dtype != torch.float32 or not job.ratio.is_contiguous() or job.ratio.device != job.weight.device:
            raise ValueError("ratio must be contiguous float32 on the weight's device")
        ratio = job.ratio.data_ptr()
    groups = shape[0] * shape[1]
    keep, blend = _float_bits([1.0 - job.blend, job.blend]).tolist()
    length = job.weight.numel() // groups
    pointers = [job.weight.data_ptr(), job.out.data_ptr(), ratio]
    seed, layer, step = job.draw
    return [*pointers, length, groups, job.bits, layer, seed, first, step, keep, blend]


def _group_items(sizes: list[tuple[int, int]], at_once: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """A program for each `at_once` groups of a weight: row of the table, first group."""
    parts = []
    for row, (_, groups) in enumerate(sizes):
        first = np.arange(0, groups, at_once, dtype=np.int32)
        parts.append(np.stack([np.full_like(first, row), first], 1))
    return np.concatenate(parts)


def _tile_items(jobs: list[Job], sizes: list[tuple[int, int]]) -> list["np.ndarray[Any, np.dtype[np.int32]]"]:
    """For each pass of `fake_quantize_tiles` its programs, of weights that need it: row of the table, group, tile."""

    def tiles(row: int, length: int, groups: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        group, tile = np.divmod(np.arange(groups * math.ceil(length / TILE)), math.ceil(length / TILE))
        return np.stack([np.full_like(group, row), group, tile], 1).astype(np.int32)

    def programs(wanted: Callable[[Job], bool]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        rows = [tiles(row, *size) for row, (job, size) in enumerate(zip(jobs, sizes, strict=True)) if wanted(job)]
        return np.concatenate([np.empty((0, 3), np.int32), *rows])

    every = programs(lambda job: True)
    few = programs(lambda job: not job.grid.is_uniform(job.bits))
    return [every, few, programs(lambda job: job.bits == 2 and not job.grid.is_uniform(2)), every]
