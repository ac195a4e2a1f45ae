"""`InputObserver.quantize` as one launch of a Triton kernel, with the same numbers, bit for bit.

It can be imported without Triton and without a GPU: where the kernels do not run, the
observer computes. A scale for a whole call takes a reduction by PyTorch before.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .grid import InputGrid
from .inputs import InputObserver
from .seams.transformers import is_transformed
from .triton_launch import attempt, available, kernels

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Inputs of a block, and how many programs share all blocks.
_BLOCK = 4096
_PROGRAMS = 1024
# Inputs of a program that holds whole rows, or more where one row is longer.
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
        and input.dtype in _DTYPES
        and input.numel()
        and available(input.device)
        and not is_transformed()
        and (observer.range is not None or not is_static)
        and observer.observed.device == input.device
    ):
        features = _features(observer, input)
        if features <= LONGEST:
            observes = is_static and training
            variant = (
                input.device,
                "inputs",
                observer.grid,
                input.dtype,
                observer.dtype,
                features,
                observes,
            )
            rounded = attempt(
                variant,
                partial(_is_right, observer, input, observes),
                partial(_launch, observer, input, observes),
            )
            if rounded is not None:
                observer.called = True
                return rounded
    return observer.quantize(input, training)


def _features(observer: InputObserver, input: Tensor) -> int:
    """Inputs of a token, or 0 where all of a call share a scale."""
    scale = observer.grid.scale
    if scale == "per_block":
        return input.shape[-1]
    if scale == "per_token" and input.dim() > 2:
        return input.shape[2:].numel()
    return 0


def _is_right(observer: InputObserver, input: Tensor, observes: bool) -> bool:
    """Whether the kernel gives the numbers of an observer for inputs that are hard to round."""
    features = _features(observer, input)
    shape = (1, 4, features) if features else (4, 511)
    place = torch.arange(shape[-1], device=input.device)
    steps = torch.tensor(
        [[1.0], [-0.3], [7e-3], [-(2.0**-20)]],
        dtype=torch.float32,
        device=input.device,
    )
    # Codes and the halves between them.
    hard = (steps * (place % 511 / 2 - 127)).to(input.dtype).view(shape)
    running = torch.full_like(observer.observed, 127.0)
    found, expected = (
        InputObserver(
            observer.grid, torch.ones_like(running), observer.dtype, running.clone()
        )
        for _ in range(2)
    )
    same = torch.equal(
        _launch(found, hard, observes),
        expected.quantize(hard, observes),  # type: ignore[arg-type]
    )
    return same and torch.equal(found.observed, expected.observed)


def _launch(observer: InputObserver, input: Tensor, observes: bool) -> Tensor:
    module = kernels("inputs")
    x = input.detach().contiguous()
    y = torch.empty_like(x)
    grid = observer.grid
    features = _features(observer, x)
    how = _constants(grid, x.dtype, observer.dtype, features)
    # Triton launches on the current device.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        if features:
            columns = grid.block if grid.scale == "per_block" else features
            rows = x.numel() // features * -(-features // columns)
            programs = -(-rows // how["BLOCK_ROWS"])
            module.round_rows_kernel[(programs,)](x, y, rows, columns, features, **how)
            return y
        observed = pending = last = None
        if grid.scale == "static":
            first = observer.range
            if observes:
                if observer.pending is None or observer.pending.device != x.device:
                    observer.pending = torch.zeros(
                        2, dtype=torch.int32, device=x.device
                    )
                observed, pending = observer.observed, observer.pending
        else:
            first, last = torch.aminmax(x)
        count = x.numel()
        blocks = -(-count // _BLOCK)
        programs = min(_PROGRAMS, blocks)
        turns = -(-blocks // programs)
        module.round_all_kernel[(programs,)](
            x, y, first, last, observed, pending, count, turns, **how
        )
        return y


@cache
def _constants(
    grid: InputGrid, dtype: torch.dtype, scale_dtype: torch.dtype, features: int
) -> dict[str, Any]:
    """What a kernel is compiled for."""
    codes = dtype
    if grid.scale == "static":
        codes = torch.promote_types(dtype, scale_dtype)
    elif grid.scale != "per_token":
        codes = torch.float32
    constants = {
        "SCALE": grid.scale,
        "BITS": grid.bits,
        "LEAST": torch.finfo(dtype).eps,
        "DTYPE": _name(codes),
        "enable_fp_fusion": False,
    }
    if not features:
        more = {"SCALE_DTYPE": _name(scale_dtype), "BLOCK": _BLOCK, "num_warps": 8}
        return constants | more
    row = grid.block if grid.scale == "per_block" else features
    columns = 1 << (row - 1).bit_length()
    rows = max(1, _TILE // columns)
    return constants | {
        "EVEN": features % row == 0,
        "BLOCK_ROWS": rows,
        "BLOCK_COLS": columns,
        # A thread holds 32 inputs, or 64.
        "num_warps": min(16, rows * columns // 1024),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
