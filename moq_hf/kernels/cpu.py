"""The functions of `quantizer` for a CPU in one pass over memory, by way of numba.

Results are those of `quantizer`, bit for bit. Numba compiles at the first call, which takes seconds once per
installation. The loops are in `kernels.numba`; `kernels.backend` says when they are taken.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import quantizer
from ..grid import Grid
from ..quantizer import Draw

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_DEFAULT, _FIRST = Grid(), Draw()
# Low bits of a float32 that a scale does not keep.
_CUT = {"float32": 0, "bfloat16": 16, "float16": 13}
# Of each thread: whether it is one of the pool's.
_worker = threading.local()
_NO_FLOATS = np.empty(0, np.float32)


@functools.cache
def available() -> bool:
    """Whether numba works, with which moq_hf is installed; tried out once. If not, the log says so."""
    try:
        weight = torch.ones(1, 4, dtype=torch.float32, device="cpu")
        fake_quantize(weight, 8)
    except Exception as error:
        # What numba raises where it cannot compile, or finds no folder for its cache, is of many kinds.
        reason = str(error).strip().partition("\n")[0]
        logger.warning(
            "numba cannot be used, so plain PyTorch quantizes on the CPU, which takes longer: %s: %s",
            type(error).__name__,
            reason,
        )
        return False
    return True


def applies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether these functions take this weight: a float32 one with memory of its own on a CPU, with numba.

    Args:
        weight: Any tensor.
        dtype: Dtype of the result: float32 or bfloat16.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
        return False
    if dtype not in (torch.float32, torch.bfloat16) or not available():
        return False
    try:
        weight.detach().numpy()
    except (RuntimeError, TypeError):
        # A tensor without memory of its own: of torch.func, DTensor, tracing.
        return False
    return True


def each(function: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Call `function`, which spends its time in these loops, on every item, in as many threads as torch uses.

    What `function` gives to `each` itself is done in its own thread.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2 or getattr(_worker, "busy", False):
        for item in items:
            function(item)
    else:
        # Consuming the results raises what the function raised.
        list(_pool(threads).map(function, items))


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
    """`quantizer.fake_quantize` in one pass, for a weight to which it `applies`; same arguments and results.

    Raises:
        ValueError: Bits, grid or ratio do not fit the weight.
    """
    shape = quantizer.check(weight, bits, grid, ratio)
    out = torch.empty_like(weight, dtype=dtype or weight.dtype) if out is None else out
    _kernels().fake_quantize(
        _flat(weight.detach()),
        _flat(out.view(torch.uint16) if out.dtype == torch.bfloat16 else out),
        weight.numel() // (shape[0] * shape[1]),
        bits,
        grid.symmetric,
        grid.is_full(bits),
        _CUT[grid.scale_dtype],
        grid.stochastic,
        _NO_FLOATS if ratio is None else _flat(ratio.to(torch.float32).contiguous()),
        draw.seed,
        draw.layer,
        draw.step,
        np.float32(1.0 - blend),
        np.float32(blend),
    )
    # Autograd cannot see what the loops write: a backward pass through an older result must fail as ever.
    torch.autograd.graph.increment_version(out)
    return out


def least_squares_ratio(weight: Tensor, bits: int, grid: Grid = _DEFAULT) -> Tensor:
    """`quantizer.least_squares_ratio` in one pass for each ratio, for a weight to which it `applies`.

    Groups are shared out to as many threads as torch uses.

    Raises:
        ValueError: Bits or groups do not fit, or the grid is ternary or binary.
    """
    shape = quantizer.check_search(weight, bits, grid)
    best = torch.empty(shape, dtype=torch.float32, device=weight.device)
    ratios = np.array(quantizer.RATIOS, dtype=np.float32)
    length = weight.numel() // best.numel()
    weights, found = _flat(weight.detach()), _flat(best)
    share = -(-best.numel() // torch.get_num_threads())

    def search(first: int) -> None:
        last = first + share
        _kernels().least_squares_ratio(
            weights[first * length : last * length],
            found[first:last],
            length,
            bits,
            grid.symmetric,
            grid.full,
            _CUT[grid.scale_dtype],
            ratios,
        )

    each(search, range(0, best.numel(), share))
    return best


@functools.cache
def _kernels() -> Any:
    from . import numba

    return numba


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "moq_hf", initializer=lambda: setattr(_worker, "busy", True))


# A child process has a copy of the pool and none of its threads: what is given to it would wait for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _flat(tensor: Tensor) -> "np.ndarray[Any, Any]":
    return tensor.view(-1).numpy()
