"""Who computes: the one place that picks a path. Every path gives the numbers of `quantizer`, bit for bit."""

from typing import Literal, Protocol

import torch
from torch import Tensor

from .. import quantizer, triton_quant
from ..grid import Grid
from ..quantizer import Draw
from . import columns, cpu, packing


class Backend(Protocol):
    """A path: `quantizer`, which defines the numbers, `kernels.cpu` or `triton_quant`."""

    def fake_quantize(
        self,
        weight: Tensor,
        bits: int,
        grid: Grid = ...,
        *,
        ratio: Tensor | None = ...,
        draw: Draw = ...,
        blend: float = ...,
        dtype: torch.dtype | None = ...,
        out: Tensor | None = ...,
    ) -> Tensor:
        """The weight on its grid; see `quantizer.fake_quantize`."""

    def least_squares_ratio(self, weight: Tensor, bits: int, grid: Grid = ...) -> Tensor:
        """The clipping ratio of each group; see `quantizer.least_squares_ratio`."""


def choose(
    task: Literal["weight", "model", "search"], weight: Tensor, dtype: torch.dtype, kernel: bool | None = None
) -> Backend:
    """The path for a weight.

    | where | one weight | one of a model's, all at once | search for clipping ratios |
    | --- | --- | --- | --- |
    | `quantizer_kernel` is false | `quantizer` | `quantizer` | `quantizer` |
    | the Triton kernels run on the device | `quantizer` | `triton_quant` | `triton_quant` |
    | a CPU with numba, float32 | `kernels.cpu` | `kernels.cpu` | `kernels.cpu` |
    | anywhere else | `quantizer` | `quantizer` | `quantizer` |

    Preparing a launch takes longer than one weight is worth.

    Args:
        task: What is computed.
        weight: The float weight `[rows, columns]`.
        dtype: Dtype of the result.
        kernel: `quantizer_kernel` of the config.
    """
    if kernel is False:
        return quantizer
    if task != "weight" and _fits_triton(weight, dtype):
        return triton_quant
    return cpu if cpu.applies(weight, dtype) else quantizer


def takes_columns(weight: Tensor, bits: int, grid: Grid, dtype: torch.dtype, kernel: bool | None = None) -> bool:
    """Whether `kernels.columns` quantizes a weight that lies transposed; else `choose` takes a transposed copy of it.

    Args:
        weight: The float weight, `[columns, rows]` or `[matrices, columns, rows]`.
        bits: Bit width, 1 to 16.
        grid: Which weights share a scale.
        dtype: Dtype of the result.
        kernel: `quantizer_kernel` of the config.
    """
    return kernel is not False and cpu.applies(weight, dtype) and columns.fits(weight, bits, grid)


def triton_wanted(device: torch.device, kernel: bool | None) -> bool:
    """Whether the Triton kernels compute on a device: where they can run, unless the config forbids it."""
    return kernel is not False and triton_quant.available(device)


def multiplies_packed(input: Tensor) -> bool:
    """Whether a kernel unpacks weights while it multiplies `input` with them."""
    return input.dtype in (torch.float16, torch.bfloat16) and packing.available(input.device)


def keeps_packed(bits: int, device: torch.device) -> bool:
    """Whether weights of `bits` stay packed in memory on a device."""
    return bits in packing.PACKED_BITS and packing.available(device)


def _fits_triton(weight: Tensor, dtype: torch.dtype) -> bool:
    if weight.is_meta or not weight.is_contiguous() or not {dtype, weight.dtype} <= triton_quant.DTYPES.keys():
        return False
    return triton_quant.available(weight.device)
