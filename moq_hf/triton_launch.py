"""Launches Triton kernels: tries each at its first use, and replaces it with plain PyTorch if it does not work."""

import importlib
import logging
from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# The dtypes that kernels read and write.
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
# Whether variants of kernels work, once they were tried out.
works: dict[tuple[Any, ...], bool] = {}


def available(device: torch.device) -> bool:
    """True if kernels can run on a device.

    True for CUDA devices with a Triton that is new enough, and for the CPU in Triton's
    interpreter (TRITON_INTERPRET=1 in the environment at the first call). Each variant
    of a kernel is tried out at its first use; if it cannot be launched, or gives other
    numbers than plain PyTorch, one warning says so, and plain PyTorch computes from then
    on. False while torch.compile traces, since plain PyTorch can be compiled.
    """
    if torch.compiler.is_compiling():
        return False
    kind, reason = _triton()
    if reason and device.type == "cuda":
        give_up((device,), reason)
    return device.type == kind


@cache
def _triton() -> tuple[str, str]:
    """The type of devices that Triton serves here, or what is wrong with it."""
    try:
        from triton import knobs
    except ImportError as error:
        # Triton is missing, broken, or too old to have the knobs.
        return "", f"it needs Triton 3.4 or later ({error})"
    return "cpu" if knobs.runtime.interpret else "cuda", ""


def give_up(variant: tuple[Any, ...], reason: str | Exception) -> None:
    """Replace a variant with plain PyTorch from now on, and say so once."""
    if works.get(variant, True):
        works[variant] = False
        if isinstance(reason, Exception):
            # It may come from Triton's compiler, from the C compiler that it calls, or
            # from the driver.
            reason = f"{type(reason).__name__}: {reason}"
        logger.warning(
            "moq_hf: the Triton kernel is not used on %s %s, plain PyTorch computes in its place: %s",
            variant[0],
            variant[1:],
            reason,
        )


@cache
def kernels(name: str) -> ModuleType:
    """Import a module of `kernels`; it needs Triton. The first import decides whether kernels are interpreted."""
    return importlib.import_module(f"{__package__}.kernels.{name}")


def works_at(
    variant: tuple[Hashable, ...], is_right: Callable[..., bool], *arguments: Any
) -> bool:
    """True if a variant of a kernel works, which is tried at its first use.

    Args:
        variant: A key of one compiled kernel, which begins with a device.
        is_right: Says whether it gives the same numbers as plain PyTorch.
        arguments: Arguments for `is_right`.

    Raises:
        torch.OutOfMemoryError: The device has no room.
    """
    if variant not in works:
        found = _call(variant, is_right, *arguments)
        if found:
            works[variant] = True
        elif found is not None:
            give_up(variant, "at first use, it gives other numbers than plain PyTorch")
    return works[variant]


def attempt(
    variant: tuple[Hashable, ...],
    is_right: Callable[..., bool],
    run: Callable[..., _Result],
    *arguments: Any,
) -> _Result | None:
    """Run a variant of a kernel if it works; see `works_at`. Both functions take the same arguments.

    Returns:
        The result; None if it does not work, of which one warning tells.

    Raises:
        torch.OutOfMemoryError: The device has no room.
    """
    if works_at(variant, is_right, *arguments):
        return _call(variant, run, *arguments)
    return None


def _call(
    variant: tuple[Hashable, ...], function: Callable[..., _Result], *arguments: Any
) -> _Result | None:
    try:
        return function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        give_up(variant, error)
        return None


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Launch a number of programs of a kernel, without fusing products and sums, which would change numbers."""
    # Triton launches on the current device.
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[(programs,)](*arguments, enable_fp_fusion=False, **constants)


def hard_rows(quotients: Tensor, dtype: torch.dtype) -> Tensor:
    """Make four rows of very different magnitudes, to try a kernel on.

    Args:
        quotients: `[length]` or `[4, length]`: the numbers of a row, up to a factor.
        dtype: Dtype of the result.
    """
    sizes = torch.tensor(
        [[1.0], [-0.3], [7e-3], [-(2.0**-120)]],
        dtype=torch.float32,
        device=quotients.device,
    )
    return (sizes * quotients).to(dtype)
