"""`InputObserver.quantize` as one launch of a Triton kernel, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: if the kernels do not run, the
observer computes. For a scale of a whole call PyTorch finds the range first, as it does
for static ranges with two ends or a percentile. Tokens with a zero point have no kernel.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .grid import InputGrid
from .inputs import InputObserver
from .seams.transformers import is_transformed
from .text import dtype_name
from .triton_launch import DTYPES, attempt, available, hard_rows, kernels, launch

# Inputs of a block, and the number of programs that share all blocks.
_BLOCK = 4096
_PROGRAMS = 1024
# Inputs of a program that holds whole rows, or more if one row is longer.
_TILE = 4096
LONGEST = 32_768


def quantize(observer: InputObserver, input: Tensor, training: bool) -> Tensor | None:
    """Compute `observer.quantize`, with the same arguments and results.

    Raises:
        torch.OutOfMemoryError: The device has no room.
    """
    scale = observer.grid.scale
    is_static = scale == "static"
    if (
        observer.active
        and observer.grid.format == "int"
        and input.dtype in DTYPES
        and input.numel()
        and available(input.device)
        and not is_transformed()
        and (observer.range is not None or not is_static)
        and observer.observed.device == input.device
        and (is_static or observer.grid.symmetric)
    ):
        features = _features(observer, input)
        if features <= LONGEST:
            grid = observer.grid
            ends_at_largest = grid.symmetric and grid.percentile == 100
            observes = is_static and training and ends_at_largest
            variant = (
                input.device,
                "inputs",
                grid,
                input.dtype,
                observer.dtype,
                features,
                observes,
            )
            rounded = attempt(variant, _is_right, _launch, observer, input, observes)
            if rounded is not None:
                observer.called = True
                if is_static and training and not observes:
                    observer.observe(input)
                return rounded
    return observer.quantize(input, training)


def _features(observer: InputObserver, input: Tensor) -> int:
    """The number of inputs of a token, or 0 if all inputs of a call share a scale."""
    scale = observer.grid.scale
    if scale == "per_block":
        return input.shape[-1]
    if scale == "per_token" and input.dim() > 2:
        return input.shape[2:].numel()
    return 0


def _is_right(observer: InputObserver, input: Tensor, observes: bool) -> bool:
    """True if the kernel gives the same numbers as an observer for inputs that are hard to round."""
    features = _features(observer, input)
    # Codes and the halves between them.
    place = torch.arange(features or 511, device=input.device)
    hard = hard_rows(place % 511 / 2 - 127, input.dtype)
    if features:
        hard = hard[None]
    running = torch.full_like(observer.observed, 127.0)
    if not observer.grid.symmetric:
        # At 8 bits the scale is 1, and the zero point another one than 0.
        running = running.new_tensor([100.0, 155.0])
    found, expected = (
        replace(observer, observed=running / 127, range=running, pending=None)
        for _ in range(2)
    )
    values = expected.quantize(hard, observes)
    same = torch.equal(_launch(found, hard, observes), values)  # type: ignore[arg-type]
    return same and torch.equal(found.observed, expected.observed)


def _launch(observer: InputObserver, input: Tensor, observes: bool) -> Tensor:
    module = kernels("inputs")
    x = input.detach().contiguous()
    y = torch.empty_like(x)
    grid = observer.grid
    features = _features(observer, x)
    how = _constants(grid, x.dtype, observer.dtype, features)
    if features:
        columns = grid.block if grid.scale == "per_block" else features
        rows = x.numel() // features * -(-features // columns)
        kernel, programs = module.round_rows_kernel, -(-rows // how["BLOCK_ROWS"])
        launch(kernel, programs, x.device, x, y, rows, columns, features, **how)
        return y
    observed = pending = last = None
    first = observer.range
    if grid.scale != "static":
        first, last = torch.aminmax(x)
    elif observes:
        if observer.pending is None or observer.pending.device != x.device:
            observer.pending = torch.zeros(2, dtype=torch.int32, device=x.device)
        observed, pending = observer.observed, observer.pending
    blocks = -(-x.numel() // _BLOCK)
    programs = min(_PROGRAMS, blocks)
    sizes = x.numel(), -(-blocks // programs)
    pointers = x, y, first, last, observed, pending
    launch(module.round_all_kernel, programs, x.device, *pointers, *sizes, **how)
    return y


@cache
def _constants(
    grid: InputGrid, dtype: torch.dtype, scale_dtype: torch.dtype, features: int
) -> dict[str, Any]:
    """The constants that a kernel is compiled for."""
    codes = dtype
    if grid.scale == "static":
        codes = torch.promote_types(dtype, scale_dtype)
    elif grid.scale != "per_token":
        codes = torch.float32
    constants = {
        "SCALE": grid.scale,
        "SYMMETRIC": grid.symmetric,
        "BITS": grid.bits,
        "LEAST": torch.finfo(dtype).eps,
        "DTYPE": dtype_name(codes),
    }
    if not features:
        more = {"SCALE_DTYPE": dtype_name(scale_dtype), "BLOCK": _BLOCK, "num_warps": 8}
        return constants | more
    row = grid.block if grid.scale == "per_block" else features
    columns = 1 << (row - 1).bit_length()
    rows = max(1, _TILE // columns)
    del constants["SYMMETRIC"]
    return constants | {
        "EVEN": features % row == 0,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": columns,
        # A thread holds 32 inputs, or 64.
        "num_warps": min(16, rows * columns // 1024),
    }
