"""The functions of `quantizer` as Triton kernels, a whole model at once, and products with packed weights.

Importable without Triton and without a GPU; `available` says whether the kernels can run on a device, and each other
function needs that. Results are those of `quantizer` on the same device, bit for bit. The kernels are in
`kernels.triton`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import quantizer

logger = logging.getLogger(__name__)


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


def backend(weight: Tensor, kernel: bool | None = None) -> ModuleType:
    """Who quantizes a weight: this module where its kernels run, else `quantizer`, with the same functions.

    Args:
        weight: The float weight.
        kernel: `quantizer_kernel` of the config; false keeps to plain PyTorch.
    """
    return quantizer


def _differences(device: torch.device) -> Iterator[str]:
    """Where a kernel is not `quantizer`."""
    return iter(())


def load_kernels() -> Any:
    """The kernels' module, which needs Triton."""
    from .kernels import triton

    return triton


def power_of_two(number: int) -> int:
    """The least power of two from a number on."""
    return 1 << (number - 1).bit_length()
