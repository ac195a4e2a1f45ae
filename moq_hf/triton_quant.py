"""`quantizer.fake_quantize` as one launch of a Triton kernel, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: where the kernel does not run,
`quantizer` computes. The kernel takes uniform grids in groups of up to `LONGEST`
weights; ternary and binary grids, longer groups and float64 are left to `quantizer`.
"""

import importlib
import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import quantizer
from .grid import Grid, PerChannel, Precision
from .quantizer import RoundingSeed

logger = logging.getLogger(__name__)

# One program reads a whole group; longer groups would leave most of a GPU idle.
LONGEST = 65_536
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_DEFAULT = Grid()
_FIRST = RoundingSeed()
# Whether variants of the kernel, each on a device, work there: once they were tried out.
_works: dict[tuple[Any, ...], bool] = {}


class Job(NamedTuple):
    weight: Tensor
    precision: Precision
    ratio: Tensor | None
    seed: RoundingSeed
    blend: float
    dtype: torch.dtype
    out: Tensor | None = None


class Filled(NamedTuple):
    values: list[Tensor | None]
    scales: Tensor
    places: list[slice | None]


class Launches:
    def __call__(self, jobs):
        values, scales, places, n = [], [], [], 0
        for job in jobs:
            v, s = rounded(*job[:6])
            if job.out is not None:
                job.out.view(v.shape).copy_(v)
                v = job.out
            values.append(v)
            scales.append(s.flatten())
            places.append(slice(n, n + s.numel()))
            n += s.numel()
        return Filled(values, torch.cat(scales), places)


class Levels:
    """A precision in a device's memory, where the kernel reads it: a captured CUDA graph follows what is written there.

    Attributes:
        memory: float32 `[8 + groups]`: the least and the greatest code, the code of a
            group's largest weight, the shares of the float and of the quantized weight,
            whether codes are floats, two that are not used, and a clipping ratio of each group. It is empty
            before the first launch.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self._held: tuple[Any, ...] = ()
        self._ratio: Tensor | None = None

    def on(self, device: torch.device, groups: int) -> None:
        """Have memory for so many groups."""
        size = 8 + groups
        if self.memory.device != device or len(self.memory) != size:
            # It may be first needed in a mode whose tensors cannot be written in others.
            with torch.inference_mode(False):
                self.memory = torch.zeros(size, dtype=torch.float32, device=device)
            self._held = ()

    def write(self, precision: Precision, ratio: Tensor | None, blend: float) -> None:
        """Write a precision, where another one is held, and its ratios are as many as there is memory for."""
        wanted = precision, blend
        size = len(self.memory)
        fits = size > 0 if ratio is None else size == 8 + ratio.numel()
        if fits and (self._held != wanted or self._ratio is not ratio):
            codes = (precision.low, precision.high, precision.top)
            values = [*codes, blend, 1.0 - blend, precision.is_fp4]
            head = torch.tensor(values, dtype=torch.float32, device="cpu")
            # The host does not wait for the device, and `head` is read before it goes on.
            self.memory[:6].copy_(head, non_blocking=True)
            self.memory[8:] = 1.0 if ratio is None else ratio.flatten()
            self._held, self._ratio = wanted, ratio


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
    levels: Levels | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantizer.fake_quantize_with_scale`, with the same arguments and results.

    Of `levels` the kernel reads the precision, once it is written there.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
        torch.OutOfMemoryError: The device has no room for the result.
    """
    quantizer.check(weight, bits, grid, ratio)
    return rounded(weight, grid.at(bits), ratio, seed, blend, dtype, levels)


def rounded(
    weight: Tensor,
    precision: Precision,
    ratio: Tensor | None = None,
    seed: RoundingSeed = _FIRST,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    levels: Levels | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `quantizer.rounded`, with the same arguments and results.

    Raises:
        torch.OutOfMemoryError: The device has no room for the result.
    """
    dtype = dtype or weight.dtype
    how: Any = {"ratio": ratio, "seed": seed, "blend": blend, "dtype": dtype}
    if (
        {dtype, weight.dtype} <= _DTYPES
        and precision.is_uniform
        and available(weight.device)
    ):
        rows, columns = precision.grid.shape(*weight.shape)
        length = weight.numel() // (rows * columns)
        # What one compiled kernel is for, and how long groups are.
        variant = (
            weight.device,
            length,
            weight.dtype,
            dtype,
            precision.grid,
            precision.is_full,
            precision.is_fp4,
            blend > 0,
        )
        if length <= LONGEST and _works.get(variant, True):
            try:
                if variant not in _works:
                    _try_out(weight, precision, length, how)
                    _works[variant] = True
                return _launch(weight, precision, length, **how, levels=levels)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # Triton raises what its compiler, the C compiler that it calls, or the
                # driver raise.
                _give_up(variant, f"{type(error).__name__}: {error}")
    return quantizer.rounded(weight, precision, **how)


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


def _try_out(weight: Tensor, precision: Precision, length: int, how: Any) -> None:
    """Compare the kernel with `quantizer` on rows that are hard to round, as long as those at hand.

    So nothing is compiled for it alone. Quotients are codes and the halves between
    them, which show an error of one bit.

    Raises:
        ArithmeticError: They differ.
    """
    low, high = precision.low, precision.high
    place = torch.arange(length, device=weight.device)
    steps = torch.tensor(
        [[1.0], [-0.3], [7e-3], [-(2.0**-120)]],
        dtype=torch.float32,
        device=weight.device,
    )
    hard = (steps * (low + place % (2 * (high - low) + 1) / 2)).to(weight.dtype)
    if how["ratio"] is not None:
        how = {**how, "ratio": steps.abs().clamp(0.2, 1.0)}
    precision = replace(precision.grid, grouping=PerChannel()).at(precision.bits)
    found, _ = _launch(hard, precision, length, **how)
    if not torch.equal(found, quantizer.rounded(hard, precision, **how)[0]):
        raise ArithmeticError("at first use, it gives other numbers than plain PyTorch")


def _launch(
    weight: Tensor,
    precision: Precision,
    length: int,
    ratio: Tensor | None,
    seed: RoundingSeed,
    blend: float,
    dtype: torch.dtype,
    levels: Levels | None = None,
) -> tuple[Tensor, Tensor]:
    import triton

    from .kernels import triton as kernels

    interpreted = triton.knobs.runtime.interpret
    if kernels.INTERPRETED.value != interpreted:
        # Which of the two a kernel is for is settled when it is read.
        importlib.reload(kernels)
    grid = precision.grid
    x = weight.detach().contiguous()
    # The interpreter does not round to bfloat16.
    y = torch.empty_like(x, dtype=torch.float32 if interpreted else dtype)
    groups = x.numel() // length
    scale = torch.empty(groups, 1, dtype=torch.float32, device=x.device)
    levels = levels or Levels()
    levels.on(x.device, groups)
    levels.write(precision, ratio, blend)
    # A row is read by one warp, and a thread holds 16 weights, or 8 where a row is
    # longer than a tile: chosen by counting instructions and registers.
    columns = min(1 << (length - 1).bit_length(), 256)
    rows = 4096 // columns if length <= columns else 8
    # Without a limit ptxas spills for sm_100, so that more threads fit.
    options = {} if torch.version.hip else {"maxnreg": 64}
    # Triton launches on the current device.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.fake_quantize_kernel[(-(-groups // rows),)](
            x,
            y,
            scale,
            levels.memory,
            quantizer.uniform(x, seed) if grid.stochastic else None,
            groups,
            length,
            SYMMETRIC=grid.symmetric,
            BLENDS=blend > 0,
            SCALE_DTYPE=grid.scale_dtype,
            FORMAT=grid.format,
            BLOCK_ROWS=rows,
            BLOCK_COLS=columns,
            ONE_TILE=length <= columns,
            num_warps=8,
            enable_fp_fusion=False,
            **options,
        )
    return y.to(dtype), scale
