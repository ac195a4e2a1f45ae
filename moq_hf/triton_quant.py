"""`quantizer.rounded` in a Triton kernel, for many weights at once, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: if the kernel does not run,
`quantizer` computes. The kernel takes every grid, and weights in float32, bfloat16 and
float16.
"""

import functools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, PerChannel, Precision
from .quantizer import RoundingSeed
from .triton_launch import (
    DTYPES,
    attempt,
    available,
    give_up,
    hard_rows,
    kernels,
    launch,
    works_at,
)

# A thread has registers for 16 weights, or for 8 if it adds them up. A program of 256
# threads holds whole groups of TILE weights in all, one of up to 1,024 threads a group of
# up to WIDEST; half of that if weights are added up. Longer groups are taken in parts.
TILE = 4096
WIDEST = 16_384
# The most random numbers of a launch, 256 MB; for more there is another launch.
NOISE = 2**26
_DEFAULT = Grid()
_FIRST = RoundingSeed()


class Job(NamedTuple):
    """A weight to be fake-quantized.

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


class Results(NamedTuple):
    """Results of jobs, in their order.

    Attributes:
        values: Fake-quantized weights, contiguous, each in its own memory, without a
            graph. None if the kernel does not take the job.
        scales: The scales of all jobs together, float32.
        places: The place of each job's scales in `scales`.
    """

    values: list[Tensor | None]
    scales: Tensor
    places: list[slice]


class _Form(NamedTuple):
    """The properties for which a kernel is compiled; `align` divides the length of groups."""

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
        """The steps of the kernel, each a launch."""
        if not self.is_long:
            return ("all",)
        sums = {"ternary": ("sum", "above"), "binary": ("sum",)}
        return ("ends", *sums.get(self.codes, ()), "round")

    def tiles(self, groups: int, length: int) -> int:
        """The number of tiles in a number of groups of one length."""
        if self.is_long:
            return groups * -(-length // self.columns)
        return -(-groups // self.rows)


class _Memory(NamedTuple):
    """The tensors to which a row of the kernel's table points."""

    weight: Tensor
    out: Tensor
    ratio: Tensor | None


@dataclass(eq=False)
class _Batch:
    """Jobs of one form, by their numbers, with their tiles and the number of random numbers that they need."""

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
    """The launches for jobs of certain shapes and precisions.

    Attributes:
        batches: Jobs that are launched together.
        rows: For each row of the table, the number of the job and its first scale.
        table: int64 `[rows, 12]`, without addresses and blends.
        places: As in `Results`.
        scales: The number of scales.
        marked: The number of scales, at the beginning, of groups that are taken in
            parts.
    """

    batches: list[_Batch]
    rows: list[tuple[int, int]]
    table: Any
    places: list[slice]
    scales: int
    marked: int


class Launcher:
    """Quantizes many weights of a device, in one launch for all that have the same form.

    The plan, which depends only on shapes and precisions, is kept from call to call.
    """

    def __init__(self) -> None:
        # The key of the plan, and the plan: set together, since threads may share them.
        self._planned: tuple[list[Any], _Plan] | None = None
        # Memory that captured CUDA graphs read at each replay.
        self._captured: list[Tensor] = []

    def __call__(self, jobs: Sequence[Job]) -> Results:
        """Quantize weights that are all on one device, for which kernels are available.

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
        return self.run(jobs, planned[1])

    def run(self, jobs: Sequence[Job], plan: _Plan) -> Results:
        """Launch the kernels that are planned for jobs of these shapes and precisions.

        Raises:
            torch.OutOfMemoryError: The device has no room for the results.
        """
        device = jobs[0].weight.device
        results = Results(
            [None] * len(jobs),
            torch.empty(plan.scales, dtype=torch.float32, device=device),
            plan.places,
        )
        if not plan.rows:
            return results
        # Copies live until the kernels that read them are launched.
        memory = []
        for number, _ in plan.rows:
            weight = jobs[number].weight
            # The kernel may read 16 bytes at once.
            if not weight.is_contiguous() or weight.data_ptr() % 16:
                weight = weight.detach().clone(memory_format=torch.contiguous_format)
            values = torch.empty_like(weight, dtype=jobs[number].dtype)
            results.values[number] = values
            memory.append(_Memory(weight, values, jobs[number].ratio))
        table = self._table(jobs, plan, memory)
        marks = _marks(plan.marked, device) if plan.marked else None
        for batch in plan.batches:
            try:
                noise = batch.noise(jobs)
                pointers = (None, None, None, noise, results.scales, marks)
                arguments = table, batch.items, *pointers, *[0] * 7
                _launch(batch.form, len(batch.items), *arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._planned = None
                for number in batch.jobs:
                    _, length = _groups(jobs[number])
                    variant = _variant(jobs[number], batch.form, length, True)
                    give_up(variant, error)
                    # Uninitialized memory might look like a scale that is not finite.
                    results.scales[results.places[number]] = 1.0
                    results.values[number] = None
        return results

    def _table(
        self, jobs: Sequence[Job], plan: _Plan, memory: Sequence[_Memory]
    ) -> Tensor:
        """The kernel's table on the device. The host does not wait for the copy."""
        device = jobs[0].weight.device
        is_cuda = device.type == "cuda"
        host = torch.empty(plan.table.shape, dtype=torch.int64, pin_memory=is_cuda)
        table = host.numpy()
        table[:] = plan.table
        blends = [jobs[number].blend for number, _ in plan.rows]
        firsts = [first for _, first in plan.rows]
        table[:, :4] = list(map(_row, memory, firsts))
        table[:, -1] = np.array(blends, np.float64).view(np.int64)
        if is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.append(host)
        return host.to(device, non_blocking=True)


def _row(memory: _Memory, first: int) -> tuple[int, int, int, int]:
    """The part of a table's row that is new at each call: addresses, and the first scale."""
    weight, out, ratio = memory
    ratio_at = 0 if ratio is None else ratio.data_ptr()
    return weight.data_ptr(), out.data_ptr(), ratio_at, first


def fake_quantize(
    weight: Tensor,
    bits: int,
    grid: Grid = _DEFAULT,
    *,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `quantizer.fake_quantize`, with the same arguments and results.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
        torch.OutOfMemoryError: The device has no room for the result.
    """
    quantizer.check(weight, bits, grid, ratio)
    return rounded(weight, grid.at(bits), ratio, seed, blend, dtype)[0]


def rounded(
    weight: Tensor,
    precision: Precision,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `quantizer.rounded`, with the same arguments and results.

    Raises:
        torch.OutOfMemoryError: The device has no room for the result.
    """
    if available(weight.device):
        job = Job(weight, precision, ratio, seed, blend, dtype or weight.dtype)
        _, length = _groups(job)
        form = _form(job, length)
        if form is not None:
            variant = _variant(job, form, length, False)
            found = attempt(variant, _is_right, _alone, job, form)
            if found is not None:
                return found
    return quantizer.rounded(weight, precision, ratio, seed, blend, dtype)


def _form(job: Job, length: int) -> _Form | None:
    """The form of the kernel for a job whose groups have this length; None if there is none."""
    weight, precision, _, _, blend, dtype = job
    if weight.dtype not in DTYPES or dtype not in DTYPES:
        return None
    grid = precision.grid
    codes: str = precision.format
    tile, widest = TILE, WIDEST
    if not precision.is_uniform:
        codes = "binary" if precision.bits == 1 else "ternary"
        tile, widest = TILE // 2, WIDEST // 2
    is_long = length > widest
    columns = tile if is_long else 1 << (length - 1).bit_length()
    return _Form(
        device=weight.device,
        source=weight.dtype,
        dtype=dtype,
        codes=codes,
        symmetric=grid.symmetric,
        stochastic=grid.stochastic,
        blends=blend > 0,
        stored=precision.stored,
        rows=max(1, tile // columns),
        columns=columns,
        warps=max(8, 8 * columns // tile),
        is_long=is_long,
        align=1 if length % 16 else 16,
    )


def _groups(job: Job) -> tuple[int, int]:
    """The number of groups in a weight, and their length."""
    rows, columns = job.precision.grid.shape(*job.weight.shape)
    groups = rows * columns
    return groups, job.weight.numel() // groups


def _sizes(job: Job) -> tuple[int, ...]:
    """Arguments of the kernel, `n_rows` to `length_bits`."""
    groups, length = _groups(job)
    precision = job.precision
    ends = precision.low, precision.high, precision.top
    return groups, length, *ends, length.bit_length()


def _variant(job: Job, form: _Form, length: int, many: bool) -> tuple[Any, ...]:
    """The key of a variant that is tried separately: a form, a length of groups, and a way of launching."""
    return *form, _tried_length(length), job.precision.is_full, many


def _tried_length(length: int) -> int:
    """The length of groups when a kernel is tried out; those that are taken in parts have a few parts."""
    return min(length, WIDEST + TILE + length % TILE)


def _is_right(job: Job, form: _Form, many: bool = False) -> bool:
    """True if a variant gives the same numbers as `quantizer`.

    It is tried on rows that are hard to round, as long as those of the job, so that
    nothing is compiled only for this. Quotients are codes and the halves between them,
    which show an error of one bit.
    """
    precision, source = job.precision, job.weight
    grid = replace(precision.grid, grouping=PerChannel())
    _, length = _groups(job)
    place = torch.arange(_tried_length(length), device=source.device)
    weight = hard_rows(_quotients(precision, place), source.dtype)
    ratio = None
    if job.ratio is not None:
        ratio = torch.full((4, 1), 0.3, dtype=torch.float32, device=source.device)
        ratio[0] = 1.0
    hard = job._replace(weight=weight, precision=grid.at(precision.bits), ratio=ratio)
    expected, _ = quantizer.rounded(*hard)
    if not many:
        return torch.equal(_alone(hard, form)[0], expected)
    (found,) = Launcher().run([hard], _plan([hard], [form])).values
    return found is not None and torch.equal(found, expected)


def _quotients(precision: Precision, place: Tensor) -> Tensor:
    """The least code, the half between it and the next one, that code, and so on; of FP8, numbers of E4M3."""
    if precision.format != "fp8":
        low, high = min(precision.low, -1), max(precision.high, 1)
        return low + place % (2 * (high - low) + 1) / 2
    bytes = torch.arange(127, dtype=torch.uint8, device="cpu")
    numbers = bytes.view(torch.float8_e4m3fn).float().to(place.device)
    index = place % 505 - 252
    size = numbers[index.abs() // 2] + numbers[(index.abs() + 1) // 2]
    return (size / 2).copysign(index)


def _form_that_works(job: Job) -> _Form | None:
    _, length = _groups(job)
    form = _form(job, length)
    if form is None:
        return None
    variant = _variant(job, form, length, True)
    return form if works_at(variant, _is_right, job, form, True) else None


def _plan(jobs: Sequence[Job], forms: Sequence[_Form | None]) -> _Plan:
    usable = [(number, form) for number, form in enumerate(forms) if form is not None]
    # The scales of groups that are taken in parts come first, like their marks.
    usable.sort(key=lambda each: not each[1].is_long)
    places = [slice(0, 0)] * len(jobs)
    table = np.zeros((len(usable), 12), np.int64)
    rows = []
    scales = marked = 0
    drawn: Counter[_Form] = Counter()
    batches: dict[Any, _Batch] = {}
    for row, (number, form) in enumerate(usable):
        groups, length, *_ = sizes = _sizes(jobs[number])
        batch = batches.setdefault((form, drawn[form] // NOISE), _Batch(form))
        batch.jobs.append(number)
        tiles = np.arange(form.tiles(groups, length))
        batch.tiles.append(np.stack([np.full_like(tiles, row), tiles], 1))
        table[row, 4:11] = batch.drawn, *sizes
        if form.stochastic:
            batch.drawn += groups * length
            drawn[form] += groups * length
        rows.append((number, scales))
        places[number] = slice(scales, scales + groups)
        scales += groups
        if form.is_long:
            marked = scales
    return _Plan(list(batches.values()), rows, table, places, scales, marked)


def _alone(job: Job, form: _Form) -> tuple[Tensor, Tensor]:
    """Quantize one weight, whose addresses are arguments of the kernel."""
    weight, _, ratio, seed, blend, dtype = job
    groups, length, *_ = sizes = _sizes(job)
    x = weight.detach().contiguous()
    y = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    noise = quantizer.uniform(x, seed) if form.stochastic else None
    marks = _marks(groups, x.device) if form.is_long else None
    (share,) = struct.unpack("q", struct.pack("d", blend))
    if ratio is not None:
        ratio = ratio.contiguous()
    pointers = (None, None, x, y, ratio, noise, scale, marks)
    _launch(form, form.tiles(groups, length), *pointers, *sizes, share)
    return y, scale


def _marks(groups: int, device: torch.device) -> Tensor:
    """Memory for the facts about groups that are taken in parts."""
    return torch.zeros(groups, 5, dtype=torch.int64, device=device)


def _launch(form: _Form, programs: int, *arguments: Any) -> None:
    module = kernels("triton")
    dtypes = module.DTYPES[form.source], module.DTYPES[form.dtype]
    # Without a limit, ptxas spills registers for sm_100 to fit more threads.
    options = {} if torch.version.hip else {"maxnreg": 64}
    for step in form.steps:
        launch(
            module.fake_quantize_kernel,
            programs,
            form.device,
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
            **options,
        )
