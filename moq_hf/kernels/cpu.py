"""The functions of `quantizer` for a CPU in one pass over memory, by way of numba where it is installed.

Results are those of `quantizer`, bit for bit. Numba compiles at the first call, which takes seconds once per
installation; without it, and for dtypes other than float32 weights with float32 or bfloat16 results, `quantizer` itself
computes. The loops are in `kernels.numba`.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import quantizer
from ..quantizer import Groups, Rounding

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_NO_FLOATS, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)


@functools.cache
def available() -> bool:
    """Whether numba is installed and works; tried out once."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        weight = torch.ones(1, 4, dtype=torch.float32, device="cpu")
        _fake_quantize(weight, torch.empty_like(weight), 8, (1, 1))
    except Exception as error:
        # What numba raises where it cannot compile, or finds no folder for its cache, is of many kinds.
        logger.info("numba cannot be used: %s: %s", type(error).__name__, error)
        return False
    return True


def applies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `fake_quantize` to `dtype` is the fast one for this weight."""
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
    """Call `function`, which spends its time in these loops, on every item, in as many threads as torch uses."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        for item in items:
            function(item)
    else:
        # Consuming the results raises what the function raised.
        list(_pool(threads).map(function, items))


def fake_quantize(
    weight: Tensor,
    bits: int,
    *,
    groups: Groups = 1,
    group_size: int | None = None,
    symmetric: bool = True,
    rounding: Rounding = "nearest",
    ratio: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    step: int = 0,
    blend: float = 0.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`quantizer.fake_quantize`, in one pass where it `applies`.

    Args:
        weight: As for `quantizer.fake_quantize`, and so are the other arguments.
        bits: As for `quantizer.fake_quantize`.
        groups: As for `quantizer.fake_quantize`.
        group_size: As for `quantizer.fake_quantize`.
        symmetric: As for `quantizer.fake_quantize`.
        rounding: As for `quantizer.fake_quantize`.
        ratio: As for `quantizer.fake_quantize`.
        seed: As for `quantizer.fake_quantize`.
        layer: As for `quantizer.fake_quantize`.
        step: As for `quantizer.fake_quantize`.
        blend: As for `quantizer.fake_quantize`.
        dtype: As for `quantizer.fake_quantize`.
        out: As for `quantizer.fake_quantize`.

    Raises:
        ValueError: As `quantizer.fake_quantize`.
    """
    arguments: dict[str, Any] = {"symmetric": symmetric, "rounding": rounding, "ratio": ratio}
    random: dict[str, Any] = {"seed": seed, "layer": layer, "step": step}
    wanted = dtype or (weight.dtype if out is None else out.dtype)
    shape = quantizer.check(weight, bits, groups, group_size, symmetric, rounding, ratio)
    if not applies(weight, wanted) or (out is not None and out.dtype != wanted):
        layout: dict[str, Any] = {"groups": groups, "group_size": group_size}
        return quantizer.fake_quantize(weight, bits, **layout, **arguments, **random, blend=blend, dtype=dtype, out=out)
    out = torch.empty_like(weight, dtype=wanted) if out is None else out
    _fake_quantize(weight.detach(), out, bits, shape, **arguments, **random, blend=blend)
    return out


def least_squares_ratio(
    weight: Tensor,
    bits: int,
    *,
    groups: Groups = 1,
    group_size: int | None = None,
    symmetric: bool = True,
) -> Tensor:
    """`quantizer.least_squares_ratio`, in one pass for each ratio where it `applies`.

    Args:
        weight: As for `quantizer.quantize`, and so are the other arguments.
        bits: As for `quantizer.quantize`.
        groups: As for `quantizer.quantize`.
        group_size: As for `quantizer.quantize`.
        symmetric: As for `quantizer.quantize`.

    Returns:
        float32 ratios in the scale's shape.

    Raises:
        ValueError: Bits or groups do not fit, or the grid is ternary or binary.
    """
    if not applies(weight, torch.float32) or not quantizer.is_uniform(bits, symmetric):
        layout: dict[str, Any] = {"groups": groups, "group_size": group_size}
        return quantizer.least_squares_ratio(weight, bits, **layout, symmetric=symmetric)
    shape = quantizer.check(weight, bits, groups, group_size, symmetric)
    best = torch.empty(shape, dtype=torch.float32, device=weight.device)
    ratios = np.array(quantizer.RATIOS, dtype=np.float32)
    length = weight.numel() // best.numel()
    _kernels().least_squares_ratio(_flat(weight.detach()), _flat(best), length, bits, symmetric, ratios)
    return best


def _fake_quantize(
    weight: Tensor,
    out: Tensor,
    bits: int,
    shape: tuple[int, int],
    *,
    symmetric: bool = True,
    rounding: str = "nearest",
    ratio: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    step: int = 0,
    blend: float = 0.0,
) -> None:
    halves = out.dtype == torch.bfloat16
    _kernels().fake_quantize(
        _flat(weight),
        _NO_FLOATS if halves else _flat(out),
        _flat(out.view(torch.uint16)) if halves else _NO_HALVES,
        weight.numel() // (shape[0] * shape[1]),
        bits,
        symmetric,
        rounding == "stochastic",
        _NO_FLOATS if ratio is None else _flat(ratio.to(torch.float32).contiguous()),
        seed,
        layer,
        step,
        np.float32(1.0 - blend),
        np.float32(blend),
    )
    # Autograd cannot see what the loops write: a backward pass through an older result must fail as ever.
    torch.autograd.graph.increment_version(out)


@functools.cache
def _kernels() -> Any:
    from . import numba

    return numba


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="moq_hf")


# A child process has a copy of the pool and none of its threads: what is given to it would wait for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _flat(tensor: Tensor) -> "np.ndarray[Any, Any]":
    return tensor.view(-1).numpy()
