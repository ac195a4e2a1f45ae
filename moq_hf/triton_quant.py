"""`quantizer.rounded` in a Triton kernel, for many weights at once, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: where the kernel does not run,
`quantizer` computes. The kernel takes every grid, and weights in float32, bfloat16 and
float16.
"""

import functools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, PerChannel, Precision
from .quantizer import RoundingSeed
from .triton_launch import attempt, available, give_up, kernels, works_at

# A thread holds 16 weights in registers, or 8 where it adds them up, chosen by counting
# registers. A program of 256 threads holds whole groups of up to TILE weights, or a half of
# it; one of up to 1,024 threads holds one group of up to WIDEST, or a half of it. Longer
# groups are taken in parts.
TILE = 4096
WIDEST = 16_384
# Random numbers of a launch, 256 MB, after which a launch of the same form begins.
NOISE = 2**26
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_DEFAULT = Grid()
_FIRST = RoundingSeed()


class Job(NamedTuple):
    """A weight that is to be fake-quantized.

    Attributes:
        weight: Floating-point `[rows, columns]`, any strides.
        precision: The grid at its bit width, which fit the weight.
        ratio: Clipping ratios, contiguous float32 of the scale's shape; None is 1
            everywhere.
        seed: The random numbers of stochastic rounding.
        blend: Share of the float weight in the result.
        dtype: Dtype of the result.
    """

    weight: Tensor
    precision: Precision
    ratio: Tensor | None = None
    seed: RoundingSeed = _FIRST
    blend: float = 0.0
    dtype: torch.dtype = torch.float32


class Filled(NamedTuple):
    """What became of jobs, in their order.

    Attributes:
        values: Fake-quantized weights, contiguous, each in memory of its own, without a
            graph. None where the kernel does not take the job.
        scales: float32, those of all jobs.
        places: Where in `scales` those of a job are.
    """

    values: list[Tensor | None]
    scales: Tensor
    places: list[slice | None]


class _Form(NamedTuple):
    """What a compiled kernel is for; `align` divides the length of groups."""

    device: torch.device
    source: torch.dtype
    dtype: torch.dtype
    codes: str
    symmetric: bool
    stochastic: bool
    blends: bool
    stored: str
    rows: int
    columns: int
    warps: int
    is_long: bool
    align: int

    @property
    def steps(self) -> tuple[str, ...]:
        """The launches that it takes."""
        if not self.is_long:
            return ("all",)
        sums = {"ternary": ("sum", "above"), "binary": ("sum",)}
        return ("ends", *sums.get(self.codes, ()), "round")

    def tiles(self, groups: int, length: int) -> int:
        """How many programs so many groups of a length take."""
        if self.is_long:
            return groups * -(-length // self.columns)
        return -(-groups // self.rows)

    @property
    def written(self) -> torch.dtype:
        """What the kernel writes: Triton's interpreter does not round to bfloat16."""
        return torch.float32 if kernels("triton").INTERPRETED.value else self.dtype


class _Memory(NamedTuple):
    """What a row of the kernel's table points to."""

    weight: Tensor
    out: Tensor
    ratio: Tensor | None


@dataclass(eq=False)
class _Launch:
    """Jobs of one form, by their numbers; the kernel's `items`; and how many random numbers they take."""

    form: _Form
    jobs: list[int] = field(default_factory=list)
    tiles: list[Any] = field(default_factory=list)
    drawn: int = 0

    @functools.cached_property
    def items(self) -> Tensor:
        items = np.concatenate(self.tiles).astype(np.int32)
        return torch.from_numpy(items).to(self.form.device)

    def noise(self, jobs: Sequence[Job]) -> Tensor | None:
        """Draw the random numbers of stochastic rounding."""
        if not self.drawn:
            return None
        noise = torch.empty(self.drawn, dtype=torch.float32, device=self.form.device)
        first = 0
        for number in self.jobs:
            weight, seed = jobs[number].weight, jobs[number].seed
            part = noise[first : first + weight.numel()]
            first += weight.numel()
            quantizer.uniform(weight, seed, out=part)
        return noise


class _Plan(NamedTuple):
    """What jobs of the same shapes and precisions have in common.

    Attributes:
        launches: What is to be launched.
        rows: Of each row of the table, the number of the job, what is written for it,
            and its first scale.
        table: int64 `[rows, 12]`, without addresses and blends.
        places: Those of `Filled`.
        scales: How many scales there are.
        marked: How many of them, at the beginning, are of groups that are taken in
            parts.
        blends: Whether any float weight has a share in the result.
    """

    launches: list[_Launch]
    rows: list[tuple[int, torch.dtype, int]]
    table: Any
    places: list[slice | None]
    scales: int
    marked: int
    blends: bool


class Launches:
    """Quantizes many weights of a device, in one launch for all that have the same form.

    What depends on shapes and precisions alone is kept from call to call.
    """

    def __init__(self) -> None:
        # For which jobs, and how they are launched: set at once, since threads may share it.
        self._planned: tuple[list[Any], _Plan] | None = None
        # What captured CUDA graphs read at each replay.
        self._captured: list[Tensor] = []

    def __call__(
        self, jobs: Sequence[Job], memory: Sequence[Tensor | None] = ()
    ) -> Filled:
        """Quantize weights that are on one device, where kernels are available.

        Args:
            jobs: The weights.
            memory: Contiguous memory of each result's dtype, which is written past
                autograd; None, or no memory at all, has it made.

        Raises:
            torch.OutOfMemoryError: The device has no room for the results.
        """
        key: list[Any] = [
            (weight.shape, weight.dtype, precision, dtype, blend > 0)
            for weight, precision, _, _, blend, dtype in jobs
        ]
        key.append(jobs[0].weight.device)
        planned = self._planned
        if planned is None or key != planned[0]:
            planned = self._planned = (
                key,
                _plan(jobs, [_form_that_works(job) for job in jobs]),
            )
        return self._fill(jobs, memory or [None] * len(jobs), planned[1])

    def _fill(
        self, jobs: Sequence[Job], memory: Sequence[Tensor | None], plan: _Plan
    ) -> Filled:
        device = jobs[0].weight.device
        values: list[Tensor | None] = [None] * len(jobs)
        scales = torch.empty(plan.scales, dtype=torch.float32, device=device)
        if not plan.rows:
            return Filled(values, scales, plan.places)
        # Copies live until the kernels that read them are launched.
        weights = []
        rows = []
        for number, dtype, first in plan.rows:
            job = jobs[number]
            weight = job.weight
            # The kernel may read 16 bytes at once.
            if not weight.is_contiguous() or weight.data_ptr() % 16:
                weight = weight.detach().clone(memory_format=torch.contiguous_format)
                weights.append(weight)
            out = memory[number]
            # The interpreter writes another dtype.
            if out is None or out.dtype != dtype:
                out = torch.empty_like(weight, dtype=dtype)
            values[number] = out
            rows.append(_row(_Memory(weight, out, job.ratio), first))
        table = self._table(jobs, plan, rows)
        marks = _marks(plan.marked, device)
        places: list[Any] = list(plan.places)
        for launch in plan.launches:
            form, items = launch.form, launch.items
            try:
                noise = launch.noise(jobs)
                pointers = (None, None, None, noise, scales, marks)
                _launch(form, len(items), table, items, *pointers, *[0] * 7)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._planned = None
                for number in launch.jobs:
                    give_up(_variant(jobs[number], form, True), error)
                    # Nobody is to take what is there for a scale that is not finite.
                    scales[places[number]] = 1.0
                    values[number] = places[number] = None
        if kernels("triton").INTERPRETED.value:
            for number, (job, made) in enumerate(zip(jobs, values, strict=True)):
                if made is not None and made.dtype != job.dtype:
                    out = memory[number]
                    made = made.to(job.dtype)
                    values[number] = made if out is None else out.data.copy_(made)
        return Filled(values, scales, places)

    def _table(self, jobs: Sequence[Job], plan: _Plan, rows: list[Any]) -> Tensor:
        """The kernel's table on the device. The host does not wait for the copy."""
        device = jobs[0].weight.device
        is_cuda = device.type == "cuda"
        host = torch.empty(plan.table.shape, dtype=torch.int64, pin_memory=is_cuda)
        table = host.numpy()
        table[:] = plan.table
        table[:, :4] = rows
        if plan.blends:
            blends = [jobs[number].blend for number, _, _ in plan.rows]
            table[:, -1] = np.array(blends).view(np.int64)
        if is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.append(host)
        return host.to(device, non_blocking=True)


def _row(memory: _Memory, first: int) -> tuple[int, int, int, int]:
    """What is new in a row of the table at each call: addresses, and where the scales begin."""
    weight, out, ratio = memory
    ratio_at = 0 if ratio is None else ratio.data_ptr()
    return weight.data_ptr(), out.data_ptr(), ratio_at, first


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
        torch.OutOfMemoryError: The device has no room for the result.
    """
    quantizer.check(weight, bits, grid, ratio)
    return rounded(weight, grid.at(bits), ratio, seed, blend, dtype)


def rounded(
    weight: Tensor,
    precision: Precision,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantizer.rounded`, with the same arguments and results.

    Raises:
        torch.OutOfMemoryError: The device has no room for the result.
    """
    if available(weight.device):
        job = Job(weight, precision, ratio, seed, blend, dtype or weight.dtype)
        form = _form(job)
        if form is not None:
            found = attempt(
                _variant(job, form, False),
                functools.partial(_is_right, job, form, False),
                functools.partial(_alone, job, form),
            )
            if found is not None:
                return found
    return quantizer.rounded(weight, precision, ratio, seed, blend, dtype)


def _form(job: Job) -> _Form | None:
    """What compiled kernel a job takes; None if the kernel is not for it."""
    weight, precision, _, _, blend, dtype = job
    if weight.dtype not in _DTYPES or dtype not in _DTYPES:
        return None
    grid = precision.grid
    codes: str = precision.format
    share = 1
    if not precision.is_uniform:
        codes = "binary" if precision.bits == 1 else "ternary"
        share = 2
    _, length = _groups(weight, grid)
    tile = TILE // share
    is_long = length > WIDEST // share
    columns = tile if is_long else 1 << (length - 1).bit_length()
    return _Form(
        device=weight.device,
        source=weight.dtype,
        dtype=dtype,
        codes=codes,
        symmetric=grid.symmetric,
        stochastic=grid.stochastic,
        blends=blend > 0,
        stored=codes if precision.is_fp4 else grid.scale_dtype,
        rows=max(1, tile // columns),
        columns=columns,
        warps=max(8, 8 * columns // tile),
        is_long=is_long,
        align=1 if length % 16 else 16,
    )


def _groups(weight: Tensor, grid: Grid) -> tuple[int, int]:
    """How many groups a weight has, and their length."""
    rows, columns = grid.shape(*weight.shape)
    groups = rows * columns
    return groups, weight.numel() // groups


def _levels(precision: Precision, groups: int, length: int) -> tuple[int, ...]:
    """Arguments of the kernel, `n_rows` to `length_bits`."""
    levels = precision.low, precision.high, precision.top
    return groups, length, *levels, length.bit_length()


def _variant(job: Job, form: _Form, many: bool) -> tuple[Any, ...]:
    """What is tried out: a form, how long groups are, and how it is launched."""
    _, length = _groups(job.weight, job.precision.grid)
    return *form, _tried_length(length), job.precision.is_full, many


def _tried_length(length: int) -> int:
    """How long groups are that are tried out: of those that are taken in parts a few parts."""
    return min(length, WIDEST + TILE + length % TILE)


def _is_right(job: Job, form: _Form, many: bool) -> bool:
    """Whether a variant gives the numbers of `quantizer`.

    It is tried on rows that are hard to round, as long as those at hand, so that nothing
    is compiled for it alone. Quotients are codes and the halves between them, which show
    an error of one bit.
    """
    grid = replace(job.precision.grid, grouping=PerChannel())
    precision = grid.at(job.precision.bits)
    _, length = _groups(job.weight, job.precision.grid)
    place = torch.arange(_tried_length(length), device=form.device)
    steps = torch.tensor(
        [[1.0], [-0.3], [7e-3], [-(2.0**-120)]],
        dtype=torch.float32,
        device=form.device,
    )
    low, high = min(precision.low, -1), max(precision.high, 1)
    hard = (steps * (low + place % (2 * (high - low) + 1) / 2)).to(form.source)
    ratio = None if job.ratio is None else steps.abs().clamp(0.2, 1.0)
    hard_job = job._replace(weight=hard, precision=precision, ratio=ratio)
    expected, _ = quantizer.rounded(*hard_job)
    hard_form = cast(_Form, _form(hard_job))
    if not many:
        return torch.equal(_alone(hard_job, hard_form)[0], expected)
    plan = _plan([hard_job], [hard_form])
    (found,) = Launches()._fill([hard_job], [None], plan).values
    return found is not None and torch.equal(found, expected)


def _form_that_works(job: Job) -> _Form | None:
    form = _form(job)
    if form is None:
        return None
    is_right = functools.partial(_is_right, job, form, True)
    return form if works_at(_variant(job, form, True), is_right) else None


def _plan(jobs: Sequence[Job], forms: Sequence[_Form | None]) -> _Plan:
    usable: list[tuple[int, Job, _Form]] = []
    for number, (job, form) in enumerate(zip(jobs, forms, strict=True)):
        if form is not None:
            usable.append((number, job, form))
    # The scales of groups that are taken in parts come first, as their marks do.
    usable.sort(key=lambda each: not each[2].is_long)
    places: list[slice | None] = [None] * len(jobs)
    table = np.zeros((len(usable), 12), np.int64)
    rows = []
    scales = marked = 0
    drawn: Counter[_Form] = Counter()
    launches: dict[Any, _Launch] = {}
    for row, (number, job, form) in enumerate(usable):
        groups, length = _groups(job.weight, job.precision.grid)
        launch = launches.setdefault((form, drawn[form] // NOISE), _Launch(form))
        launch.jobs.append(number)
        tiles = np.arange(form.tiles(groups, length))
        launch.tiles.append(np.stack([np.full_like(tiles, row), tiles], 1))
        table[row, 4] = launch.drawn
        table[row, 5:11] = _levels(job.precision, groups, length)
        if form.stochastic:
            launch.drawn += job.weight.numel()
            drawn[form] += job.weight.numel()
        rows.append((number, form.written, scales))
        places[number] = slice(scales, scales + groups)
        scales += groups
        if form.is_long:
            marked = scales
    blends = any(form.blends for _, _, form in usable)
    return _Plan(list(launches.values()), rows, table, places, scales, marked, blends)


def _alone(job: Job, form: _Form) -> tuple[Tensor, Tensor]:
    """Quantize one weight, whose addresses are arguments of the kernel."""
    weight, precision, ratio, seed, blend, dtype = job
    groups, length = _groups(weight, precision.grid)
    x = weight.detach().contiguous()
    y = torch.empty_like(x, dtype=form.written)
    scale = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    noise = quantizer.uniform(x, seed) if form.stochastic else None
    marks = _marks(groups if form.is_long else 0, x.device)
    (share,) = struct.unpack("q", struct.pack("d", blend))
    if ratio is not None:
        ratio = ratio.contiguous()
    pointers = (None, None, x, y, ratio, noise, scale, marks)
    levels = _levels(precision, groups, length)
    _launch(form, form.tiles(groups, length), *pointers, *levels, share)
    return y.to(dtype), scale


def _marks(groups: int, device: torch.device) -> Tensor | None:
    """Memory for what is found of groups that are taken in parts, of which there may be none."""
    if not groups:
        return None
    return torch.zeros(groups, 5, dtype=torch.int64, device=device)


def _launch(form: _Form, programs: int, *arguments: Any) -> None:
    module = kernels("triton")
    dtypes = module.DTYPES[form.source], module.DTYPES[form.written]
    # Without a limit ptxas spills for sm_100, so that more threads fit.
    options = {} if torch.version.hip else {"maxnreg": 64}
    # Triton launches on the current device.
    with torch.cuda.device(form.device if form.device.type == "cuda" else -1):
        for step in form.steps:
            module.fake_quantize_kernel[(programs,)](
                *arguments,
                *dtypes,
                CODES=form.codes,
                SYMMETRIC=form.symmetric,
                BLENDS=form.blends,
                STORED=form.stored,
                BLOCK_ROWS=form.rows,
                BLOCK_COLS=form.columns,
                ALIGN=form.align,
                STEP=step,
                num_warps=form.warps,
                enable_fp_fusion=False,
                **options,
            )
