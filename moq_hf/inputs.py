"""Fake-quantize the inputs of linear layers: the numerics, and the range that training learns.

Rounding is half to even. With b bits and an input x `[..., features]`:

| scale | of | codes |
| --- | --- | --- |
| per_token | s = max abs(x) / ((2^b - 1) / 2) of each token | clip(round(x / s), -2^(b-1), 2^(b-1) - 1) |
| per_tensor | s = (hi - lo) / (2^b - 1), lo = min(0, min x), hi = max(0, max x), of each call | clip(round(x / s) + z, 0, 2^b - 1), z = clip(round(-lo / s), 0, 2^b - 1) |
| per_block | s = max abs(x) / (2^(b-1) - 1) of each block of features of a token | round(x (1 / s)), 1 / s = (2^(b-1) - 1) / max abs(x) |
| static | s = m / (2^(b-1) - 1), m the running range | clip(round(x / s), -2^(b-1), 2^(b-1) - 1) |

compressed-tensors computes per_token and static in the same way for a delivered model, in its dtypes: per_token in that
of the input, static in the wider one of the input and the weight. It takes the first two dimensions for batch and
tokens, so that an input of two dimensions, such as a pooler's, has one scale. per_tensor is float32 whatever the dtype
of the input; at 8 bits it is ONNX's DynamicQuantizeLinear. per_block is float32 too, as ONNX Runtime's MatMulNBits
computes it on x86 CPUs with accuracy level 4. The running range is a moving average of the largest magnitude that
training saw in each optimizer step, with a share of 0.01 for the newest: the rule and the constant of PyTorch's
MovingAverageMinMaxObserver. It changes only with optimizer steps, so that repeating a pass, as activation checkpointing
does, gives the same numbers. Before the first step the largest magnitude of the call counts instead. A scale is never
below the smallest normal float32, nor 0 in its dtype, so zeros stay zeros. NaN stays NaN.
"""  # noqa: E501 - a table row cannot be broken

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import InputGrid
from .processes import largest_over_ranks
from .seams.transformers import is_transformed

_TINY = torch.finfo(torch.float32).tiny
# The least positive number of a dtype, if that is larger.
_LEAST = {torch.float16: 2.0**-24}
# The share of the newest step in the running range.
_NEWEST = 0.01
# The largest that a range can be.
LARGEST_RANGE = torch.finfo(torch.float32).max


def fake_quantize_input(
    input: Tensor, grid: InputGrid, scale: Tensor | None = None
) -> Tensor:
    """Round an input to its grid: scale * (code - zero point).

    Args:
        input: Floating-point `[..., features]`.
        grid: How it is quantized.
        scale: A static scale, `[1]`; None takes the largest magnitude in `input`.

    Returns:
        The input's shape and dtype.

    >>> fake_quantize_input(torch.tensor([[[127.5, 1.4, -1.6]]]), InputGrid(8, "per_token"))
    tensor([[[127.,   1.,  -2.]]])
    """
    x = input.detach()
    low, high = grid.limits()
    if grid.scale == "per_tensor":
        x = x.to(torch.float32)
        scale, zero = tensor_scale(x, grid.bits)
        codes = (x / scale).round_().add_(zero).clamp_(low, high)
        return codes.sub_(zero).mul_(scale).to(input.dtype)
    if grid.scale == "per_block":
        return _in_blocks(x.float(), grid).to(input.dtype)
    if grid.scale == "per_token":
        scale = token_scale(x, grid.bits)
    elif scale is None:
        scale = static_scale(x.float().abs().amax(), grid.bits)
    return (x / scale).round_().clamp_(low, high).mul_(scale).to(input.dtype)


def _in_blocks(x: Tensor, grid: InputGrid) -> Tensor:
    features = x.shape[-1]
    padded = F.pad(x, (0, -features % grid.block))
    blocks = padded.reshape(*x.shape[:-1], -1, grid.block)
    _, most = grid.limits()
    # Its reciprocal must be finite.
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=most * _TINY)
    codes = (blocks * (most / largest)).round_()
    return codes.mul_(_divided(largest, most)).flatten(-2)[..., :features]


def _divided(x: Tensor, by: float) -> Tensor:
    # By a tensor, because on some devices PyTorch multiplies by a number's reciprocal.
    return x / torch.full_like(x, by)


def token_scale(input: Tensor, bits: int) -> Tensor:
    """The scale of each token, `[batch, tokens, 1]` for `[batch, tokens, features]`; with fewer dimensions one scale.

    The formula is that of compressed-tensors' `calculate_qparams`.
    """
    features = tuple(range(2, input.dim())) or tuple(range(input.dim()))
    largest = input.abs().amax(features, keepdim=True)
    scale = _divided(largest, ((1 << bits) - 1) / 2)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def tensor_scale(input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale of a float32 input and its zero point, both float32 scalars."""
    most = (1 << bits) - 1
    low = input.min().clamp(max=0.0)
    high = input.max().clamp(min=0.0)
    scale = _divided(high - low, most).clamp(min=_TINY)
    return scale, (-low / scale).round().clamp(0, most)


def static_scale(
    largest: Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The scale of symmetric codes that reach `largest`, in its shape, and never 0 in the dtype."""
    scale = _divided(largest, (1 << bits - 1) - 1)
    return scale.clamp(min=_LEAST.get(dtype, _TINY)).to(dtype)


@dataclass
class InputObserver:
    """Quantizes the inputs of one layer, and observes their range.

    Attributes:
        grid: How the inputs are quantized.
        observed: For a static scale, the largest magnitude since the last optimizer
            step, a float32 scalar.
        dtype: The weight's dtype, to which a static scale is rounded.
        range: For a static scale, the running range, a float32 scalar; None before the
            first step.
        active: Whether inputs are quantized, or only observed.
        called: Whether the layer has been called; a model may multiply by its weight
            without calling it.
        pending: Memory of a kernel that observes the range; see
            `kernels.inputs.round_all_kernel`.
    """

    grid: InputGrid
    observed: Tensor
    dtype: torch.dtype = torch.float32
    range: Tensor | None = None
    active: bool = True
    called: bool = False
    pending: Tensor | None = field(default=None, repr=False)

    @property
    def scale(self) -> Tensor | None:
        """The static scale, `[1]`, in the dtype of the weight; None if there is none, or none yet."""
        if self.range is None:
            return None
        return static_scale(self.range, self.grid.bits, self.dtype)[None]

    def quantize(self, input: Tensor, training: bool) -> Tensor | None:
        """Round an input to the grid, without a graph; None means that it stays as it is.

        Args:
            input: Floating-point `[..., features]`.
            training: Whether its magnitude counts for the range. Inside torch.func's
                transforms, which forbid writes, it never does.
        """
        self.called = True
        if input.numel() == 0 or input.is_meta:
            # There is nothing to round or to observe.
            return None
        if self.grid.scale == "static" and training and not is_transformed():
            # Written in place, so that a compiled graph keeps its tensor. Replicas of
            # DataParallel have their inputs on other devices.
            largest = input.detach().abs().amax().nan_to_num(nan=0.0, posinf=0.0)
            newest = largest.to(self.observed.device)
            self.observed.copy_(torch.maximum(self.observed, newest))
        if not self.active:
            return None
        scale = self.scale
        if scale is not None:
            scale = scale.to(input.device)
        return fake_quantize_input(input, self.grid, scale)

    def move_to(self, device: torch.device) -> None:
        """Move the range to a device; not to the meta device, which would lose it."""
        self.observed = self.observed.to(device)
        if self.range is not None:
            self.range = self.range.to(device)

    def step(self, newest: Tensor) -> None:
        """Update the running range after an optimizer step.

        Passes whose inputs hold NaN or Inf do not count, nor do steps without a forward
        pass.

        Args:
            newest: The largest magnitude in the step, a float32 scalar.
        """
        counts = newest > 0
        if self.range is not None:
            moved = self.range + _NEWEST * (newest - self.range)
            self.range.copy_(torch.where(counts, moved, self.range))
        elif bool(counts):
            self.range = newest.clone()
        self.observed.zero_()


def new_inputs(grid: InputGrid, weight: Tensor) -> InputObserver:
    """Make an observer for the layer with a weight, with no range yet; on the CPU for the meta device."""
    device = torch.device("cpu") if weight.is_meta else weight.device
    observed = torch.zeros((), dtype=torch.float32, device=device)
    return InputObserver(grid, observed, weight.dtype)


def inputs_out_of_reach(layers: Iterable[str], key: str) -> str:
    """The error for layers whose weights are used without calling them, so that their inputs are not rounded.

    Args:
        layers: Their names.
        key: The config's name of the key that asks for rounded inputs.
    """
    names = ", ".join(f'"{name}"' for name in layers)
    return (
        f"{key}: the weights of {names} are used without calling these layers, so that their inputs "
        f"cannot be rounded: add them to modules_to_not_convert, or leave {key} out"
    )


def update_ranges(inputs: Iterable[InputObserver]) -> None:
    """Update the running ranges after an optimizer step; all processes must call this, with the same layers.

    A range follows the largest magnitude of all ranks.
    """
    static = [observer for observer in inputs if observer.grid.scale == "static"]
    if static:
        largest = largest_over_ranks(
            torch.stack([observer.observed for observer in static])
        )
        for observer, newest in zip(static, largest, strict=True):
            observer.step(newest)


def ranges_of(inputs: Mapping[str, InputObserver]) -> dict[str, float]:
    """The running ranges by layer, for a saved state. JSON's numbers hold float32 exactly."""
    return {
        name: float(observer.range)
        for name, observer in inputs.items()
        if observer.range is not None
    }


def load_ranges(
    inputs: Mapping[str, InputObserver], saved: Mapping[str, float]
) -> None:
    """Load the ranges that `ranges_of` gave; a layer that is missing there starts without a range."""
    for name, observer in inputs.items():
        observer.observed.zero_()
        known = name in saved and observer.grid.scale == "static"
        observer.range = (
            torch.full_like(observer.observed, saved[name]) if known else None
        )
