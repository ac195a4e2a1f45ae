"""Inputs of quantized linear layers on a grid of integers: the numerics, and the range that training learns.

All arithmetic is float32 whatever the dtype of the input, rounding is half to even, and the result is cast once. With b
bits and an input x `[..., features]`:

| scale | of | codes |
| --- | --- | --- |
| per_token | s = max abs(x) / (2^(b-1) - 1) over the features of each token | round(x / s) |
| per_tensor | s = (hi - lo) / (2^b - 1), lo = min(0, min x), hi = max(0, max x), of each call | clip(round(x / s) + z, 0, 2^b - 1), z = clip(round(-lo / s), 0, 2^b - 1) |
| static | s = m / (2^(b-1) - 1), m the running range | clip(round(x / s), -2^(b-1), 2^(b-1) - 1) |

per_tensor at 8 bits is ONNX's DynamicQuantizeLinear. The running range is a moving average of the largest magnitude
that training saw in each optimizer step, with a share of 0.01 for the newest: the rule and the constant of PyTorch's
MovingAverageMinMaxObserver. It changes with optimizer steps alone, so that a pass that is computed again, by activation
checkpointing for instance, gives the same. Until the first step there is none, and the largest magnitude of the call
counts instead. A scale is never below the smallest normal float32, so zeros stay zeros. NaN comes out as NaN.
"""  # noqa: E501 - a table row cannot be broken

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .grid import InputGrid
from .processes import largest_over_ranks
from .seams.transformers import is_transformed

_TINY = torch.finfo(torch.float32).tiny
# The share of the newest step in the running range.
_NEWEST = 0.01
# The largest that a range can be.
LARGEST_RANGE = torch.finfo(torch.float32).max


def fake_quantize_input(
    input: Tensor, grid: InputGrid, largest: Tensor | None = None
) -> Tensor:
    """An input on its grid: scale * (code - zero point).

    Args:
        input: Floating-point `[..., features]`.
        grid: How it is quantized.
        largest: The range of a static scale, a float32 scalar; None is the largest
            magnitude of `input`.

    Returns:
        The input's shape and dtype.

    >>> fake_quantize_input(torch.tensor([[127.0, 1.4, -1.6]]), InputGrid(8, "per_token"))
    tensor([[127.,   1.,  -2.]])
    """
    x = input.detach().to(torch.float32)
    low, high = grid.limits()
    if grid.scale == "per_token":
        scale = token_scale(x, grid.bits)
        return (x / scale).round_().mul_(scale).to(input.dtype)
    if grid.scale == "per_tensor":
        scale, zero = tensor_scale(x, grid.bits)
        return (
            (x / scale)
            .round_()
            .add_(zero)
            .clamp_(low, high)
            .sub_(zero)
            .mul_(scale)
            .to(input.dtype)
        )
    scale = static_scale(x.abs().amax() if largest is None else largest, grid.bits)
    return (x / scale).round_().clamp_(low, high).mul_(scale).to(input.dtype)


def token_scale(input: Tensor, bits: int) -> Tensor:
    """The scale of each token, `[..., 1]` for float32 `[..., features]`."""
    return static_scale(input.abs().amax(-1, keepdim=True), bits)


def tensor_scale(input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale of a float32 input and its zero point, both float32 scalars."""
    most = (1 << bits) - 1
    low = input.min().clamp(max=0.0)
    high = input.max().clamp(min=0.0)
    scale = ((high - low) / most).clamp(min=_TINY)
    return scale, (-low / scale).round().clamp(0, most)


def static_scale(largest: Tensor, bits: int) -> Tensor:
    """The scale of symmetric codes that reach `largest`, in its shape."""
    return (largest / ((1 << bits - 1) - 1)).clamp(min=_TINY)


@dataclass
class InputObserver:
    """The inputs of one layer: their grid, and what is known of their range.

    Attributes:
        grid: How they are quantized.
        observed: Of a static scale: the largest magnitude since the last optimizer
            step, a float32 scalar.
        range: Of a static scale: the running range, a float32 scalar; None before the
            first step.
        active: Whether they are quantized, or only observed.
    """

    grid: InputGrid
    observed: Tensor
    range: Tensor | None = None
    active: bool = True

    def quantize(self, input: Tensor, training: bool) -> Tensor | None:
        """The input on its grid, without a graph; None where it stays as it is.

        Args:
            input: Floating-point `[..., features]`.
            training: Whether its magnitude counts for the range; not inside
                torch.func's transforms, which allow no writing.
        """
        if input.numel() == 0 or input.is_meta:
            # No values, and no largest one.
            return None
        if self.grid.scale == "static" and training and not is_transformed():
            # In place, so that a compiled graph keeps its tensor; replicas of
            # DataParallel have inputs elsewhere.
            newest = (
                input.detach()
                .abs()
                .amax()
                .nan_to_num(nan=0.0, posinf=0.0)
                .to(self.observed.device)
            )
            self.observed.copy_(torch.maximum(self.observed, newest))
        if not self.active:
            return None
        return fake_quantize_input(
            input,
            self.grid,
            None if self.range is None else self.range.to(input.device),
        )

    def move_to(self, device: torch.device) -> None:
        """Move what is known of the range to a device; not the meta device, where it would be lost."""
        self.observed = self.observed.to(device)
        if self.range is not None:
            self.range = self.range.to(device)

    def step(self, newest: Tensor) -> None:
        """Bring the running range up to date after an optimizer step.

        A pass whose inputs hold NaN or Inf does not count, nor does a step without a
        forward pass.

        Args:
            newest: The largest magnitude that the step saw, a float32 scalar.
        """
        counts = newest > 0
        if self.range is not None:
            self.range.copy_(
                torch.where(
                    counts, self.range + _NEWEST * (newest - self.range), self.range
                )
            )
        elif bool(counts):
            self.range = newest.clone()
        self.observed.zero_()


def new_inputs(grid: InputGrid, device: torch.device) -> InputObserver:
    """The inputs of a layer on a device, of which nothing is known yet; on the CPU for the meta device."""
    device = torch.device("cpu") if device.type == "meta" else device
    return InputObserver(grid, torch.zeros((), dtype=torch.float32, device=device))


def update_ranges(inputs: Iterable[InputObserver]) -> None:
    """Bring the running ranges up to date after an optimizer step: in all processes, with the same layers.

    A range follows the largest magnitude over all ranks.
    """
    static = [observer for observer in inputs if observer.grid.scale == "static"]
    if static:
        largest = largest_over_ranks(
            torch.stack([observer.observed for observer in static])
        )
        for observer, newest in zip(static, largest, strict=True):
            observer.step(newest)


def ranges_of(inputs: Mapping[str, InputObserver]) -> dict[str, float]:
    """The running ranges that there are, as a saved state holds them: exact, since float32 fits into JSON's numbers."""
    return {
        name: float(observer.range)
        for name, observer in inputs.items()
        if observer.range is not None
    }


def load_ranges(
    inputs: Mapping[str, InputObserver], saved: Mapping[str, float]
) -> None:
    """Take over what `ranges_of` gave; a layer that is not in it starts without a range."""
    for name, observer in inputs.items():
        observer.observed.zero_()
        known = name in saved and observer.grid.scale == "static"
        observer.range = (
            torch.full_like(observer.observed, saved[name]) if known else None
        )
