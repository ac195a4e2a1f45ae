"""How a kernel of Triton is used: tried out at first, and given up for plain PyTorch where it does not work."""

import importlib
from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import TypeVar

import torch

from . import triton_quant

_Result = TypeVar("_Result")


@cache
def kernels(name: str) -> ModuleType:
    """A module of `kernels`; it needs Triton, which is for a GPU or for its interpreter from then on."""
    return importlib.import_module(f"{__package__}.kernels.{name}")


def attempt(
    variant: tuple[Hashable, ...],
    is_right: Callable[[], bool],
    launch: Callable[[], _Result],
) -> _Result | None:
    """Launch a kernel.

    Args:
        variant: What one compiled kernel is for; a device first.
        is_right: Asked before its first launch: whether the kernel gives the numbers of
            plain PyTorch.
        launch: Launches it.

    Returns:
        What the launch gives; None where the variant does not work, which one warning
        says.

    Raises:
        torch.OutOfMemoryError: The device has no room.
    """
    works = triton_quant._works
    if not works.get(variant, True):
        return None
    try:
        if variant in works or is_right():
            works[variant] = True
            return launch()
        reason = "at first use, it gives other numbers than plain PyTorch"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Triton raises what its compiler, the C compiler that it calls, or the driver
        # raise.
        reason = f"{type(error).__name__}: {error}"
    triton_quant._give_up(variant, reason)
    return None
