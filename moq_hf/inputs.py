"""Fake-quantize the inputs of linear layers: the numerics, and the range that training learns.

Rounding is half to even. With b bits and an input x `[..., features]`:

| scale | of | codes |
| --- | --- | --- |
| per_token | s = max abs(x) / ((2^b - 1) / 2) of each token | clip(round(x / s), -2^(b-1), 2^(b-1) - 1) |
| per_token, asymmetric | s = (hi - lo) / (2^b - 1), lo = min(0, min x), hi = max(0, max x), of each token | clip(round(x / s + z), -2^(b-1), 2^(b-1) - 1), z = clip(round(-2^(b-1) - lo / s), -2^(b-1), 2^(b-1) - 1) |
| per_tensor | s = (hi - lo) / (2^b - 1), lo = min(0, min x), hi = max(0, max x), of each call | clip(round(x / s) + z, 0, 2^b - 1), z = clip(round(-lo / s), 0, 2^b - 1) |
| per_block | s = max abs(x) / (2^(b-1) - 1) of each block of features of a token | round(x (1 / s)), 1 / s = (2^(b-1) - 1) / max abs(x) |
| static | s = m / (2^(b-1) - 1), m the running range | clip(round(x / s), -2^(b-1), 2^(b-1) - 1) |
| static, asymmetric | s = (hi - lo) / (2^b - 1), lo <= 0 <= hi the running range | clip(round(x / s + z), -2^(b-1), 2^(b-1) - 1), z = round(-lo / s) - 2^(b-1) |

With format "fp8" per_token and static have s = max abs(x) / 448 and s = m / 448, and their codes are E4M3(clip(x / s,
-448, 448)), by PyTorch's cast to torch.float8_e4m3fn from the dtype of x / s.

compressed-tensors computes per_token and static in the same way for a delivered model, in its dtypes: per_token in that
of the input, static in the wider one of the input and the weight. It takes the first two dimensions for batch and
tokens, so that an input of two dimensions, such as a pooler's, has one scale. XNNPACK computes the same scale and zero
point for each row, but multiplies by 1 / s, and rounds before it adds z: a tie may have another code. per_tensor is float32 whatever the dtype
of the input; at 8 bits it is ONNX's DynamicQuantizeLinear. per_block is float32 too, as ONNX Runtime's MatMulNBits
computes it on x86 CPUs with accuracy level 4.

The range of a call is the largest magnitude of its inputs, or, if codes are asymmetric, the least and the greatest of
them and 0. A percentile p leaves out the share 1 - p / 100 that is farthest out, on each side if codes are asymmetric,
of up to 65,536 inputs at equal distances. The range of a step is the widest of its calls. The running range is a moving
average over the steps of training, with a share of 0.01 for the newest: the rule and the constant of PyTorch's
MovingAverageMinMaxObserver. With a window of w steps the n-th step has a share of 1 / min(n, w), so that the range is
the mean of the first w. It changes only with optimizer steps, so that repeating a pass, as activation checkpointing
does, gives the same numbers. Before the first step the range of the call counts instead. Layers with the same input
have the same range. A scale is never below the smallest normal float32, nor 0 in its dtype, so zeros stay zeros. NaN
stays NaN.
"""  # noqa: E501 - a table row cannot be broken

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import InputGrid
from .processes import largest_over_ranks
from .seams.transformers import is_transformed
from .text import dtype_name

_TINY = torch.finfo(torch.float32).tiny
# The least positive number of a dtype, if that is larger.
_LEAST = {torch.float16: 2.0**-24}
# The share of the newest step in the running range, without a window.
_NEWEST = 0.01
# Inputs of a call that a percentile is taken of, at most.
_SAMPLE = 65_536
# The largest that a range can be.
LARGEST_RANGE = torch.finfo(torch.float32).max


def fake_quantize_input(
    input: Tensor,
    grid: InputGrid,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    """Round an input to its grid: scale * (code - zero point).

    Args:
        input: Floating-point `[..., features]`.
        grid: How it is quantized.
        scale: A static scale, `[1]`; None takes the range of `input`.
        zero: Its zero point, `[1]`, where codes are asymmetric.

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
        scale, zero = token_parameters(x, grid)
    elif scale is None:
        scale, zero = static_parameters(range_of(x, grid), grid)
    codes = x / scale
    if grid.format == "fp8":
        rounded = codes.clamp_(low, high).to(torch.float8_e4m3fn)
        return rounded.to(codes.dtype).mul_(scale).to(input.dtype)
    if zero is None:
        return codes.round_().clamp_(low, high).mul_(scale).to(input.dtype)
    # compressed-tensors adds before it rounds.
    codes = codes.add_(zero).round_().clamp_(low, high)
    return codes.sub_(zero).mul_(scale).to(input.dtype)


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


def token_parameters(input: Tensor, grid: InputGrid) -> tuple[Tensor, Tensor | None]:
    """The scale of each token and, if codes are asymmetric, its zero point, in the dtype of the input.

    The formulas are those of compressed-tensors' `calculate_qparams`.

    Returns:
        Both `[batch, tokens, 1]` for `[batch, tokens, features]`; with fewer dimensions
        all inputs have one scale.
    """
    features = tuple(range(2, input.dim())) or tuple(range(input.dim()))
    if grid.symmetric:
        scale = _divided(input.abs().amax(features, keepdim=True), grid.top)
    else:
        below = input.amin(features, keepdim=True).clamp(max=0.0)
        above = input.amax(features, keepdim=True).clamp(min=0.0)
        scale = _divided(above - below, (1 << grid.bits) - 1)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    if grid.symmetric:
        return scale, None
    low, high = grid.limits()
    return scale, (low - below / scale).clamp(low, high).round()


def tensor_scale(input: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale of a float32 input and its zero point, both float32 scalars."""
    most = (1 << bits) - 1
    low = input.min().clamp(max=0.0)
    high = input.max().clamp(min=0.0)
    scale = _divided(high - low, most).clamp(min=_TINY)
    return scale, (-low / scale).round().clamp(0, most)


def static_scale(
    largest: Tensor, grid: InputGrid, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The scale of symmetric codes that reach `largest`, in its shape, and never 0 in the dtype."""
    scale = _divided(largest, grid.top)
    return scale.clamp(min=_LEAST.get(dtype, _TINY)).to(dtype)


def static_parameters(
    ends: Tensor, grid: InputGrid, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """The static scale of a range in a dtype, and its zero point.

    Args:
        ends: As `range_of` gives them, float32.
        grid: How the inputs are quantized.
        dtype: Of the scale.

    Returns:
        The scale, and for asymmetric codes the zero point in float32, both scalars.
    """
    if grid.symmetric:
        return static_scale(ends, grid, dtype), None
    low, _ = grid.limits()
    below, above = ends
    width = (below + above).clamp(max=LARGEST_RANGE)
    scale = _divided(width, (1 << grid.bits) - 1)
    scale = scale.clamp(min=_LEAST.get(dtype, _TINY)).to(dtype)
    # A rounded scale may be too small for the last code.
    codes = (below / scale.float()).round().clamp(max=(1 << grid.bits) - 1)
    return scale, codes + low


def range_of(input: Tensor, grid: InputGrid) -> Tensor:
    """The static range of one call, float32, which is not finite where the call is not.

    Returns:
        The largest magnitude, a scalar; where codes are asymmetric `[2]`, how far the
        inputs reach below 0 and above it, neither negative.
    """
    x = input.detach()
    if grid.percentile < 100:
        x = _sample(x)
    values = [x.abs()] if grid.symmetric else [-x, x]
    ends = [_farthest(each, grid.percentile) for each in values]
    found = ends[0] if grid.symmetric else torch.stack(ends).clamp(min=0.0)
    return found.float()


def _farthest(x: Tensor, percentile: float) -> Tensor:
    if percentile == 100:
        return x.amax()
    left_out = math.floor((1 - percentile / 100) * x.numel())
    return x.flatten().topk(left_out + 1).values[-1]


def _sample(x: Tensor) -> Tensor:
    # So many inputs apart, all features take their turn.
    distance = -(-x.numel() // _SAMPLE)
    while math.gcd(distance, x.shape[-1]) > 1:
        distance += 1
    return x.flatten()[::distance]


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer is called with, by position or by name."""
    found: Tensor = next(iter((*args, *kwargs.values())))
    return found


@dataclass
class InputObserver:
    """Quantizes the inputs of one layer, and observes their range.

    Attributes:
        grid: How the inputs are quantized.
        observed: For a static scale, the range since the last optimizer step, as
            `range_of` gives it.
        dtype: The weight's dtype, to which a static scale is rounded.
        range: For a static scale, the running range; None before the first step.
        active: Whether inputs are quantized, or only observed.
        called: Whether the layer has been called; a model may multiply by its weight
            without calling it.
        pending: Memory of a kernel that observes the range; see
            `kernels.inputs.round_all_kernel`.
        steps: How many steps a range with a window has counted, a float32 scalar.
    """

    grid: InputGrid
    observed: Tensor
    dtype: torch.dtype = torch.float32
    range: Tensor | None = None
    active: bool = True
    called: bool = False
    pending: Tensor | None = field(default=None, repr=False)
    steps: Tensor | None = None

    @property
    def scale(self) -> Tensor | None:
        """The static scale, `[1]`, in the dtype of the weight; None if there is none, or none yet."""
        return self.parameters[0]

    @property
    def parameters(self) -> tuple[Tensor | None, Tensor | None]:
        """The static scale, and if codes are asymmetric its zero point `[1]` in float32."""
        if self.range is None:
            return None, None
        scale, zero = static_parameters(self.range, self.grid, self.dtype)
        return scale[None], None if zero is None else zero[None]

    @property
    def stored(self) -> tuple[Tensor | None, Tensor | None]:
        """The same as files hold them, on the CPU: the scale in float32, the zero point in int8."""
        scale, zero = self.parameters
        return (
            None if scale is None else scale.float().cpu(),
            None if zero is None else zero.to("cpu", torch.int8),
        )

    def quantize(self, input: Tensor, training: bool) -> Tensor | None:
        """Round an input to the grid, without a graph; None means that it stays as it is.

        Args:
            input: Floating-point `[..., features]`.
            training: Whether it counts for the range. Inside torch.func's transforms,
                which forbid writes, it never does.
        """
        self.called = True
        if input.numel() == 0 or input.is_meta:
            # There is nothing to round or to observe.
            return None
        if self.grid.scale == "static" and training and not is_transformed():
            self.observe(input)
        if not self.active:
            return None
        scale, zero = self.parameters
        if scale is not None:
            scale = scale.to(input.device)
        if zero is not None:
            zero = zero.to(input.device)
        return fake_quantize_input(input, self.grid, scale, zero)

    def observe(self, input: Tensor) -> None:
        """Take the range of an input `[..., features]` into that of the step; an empty one has none."""
        if input.numel() == 0:
            return
        # Written in place, so that a compiled graph keeps its tensor. Replicas of
        # DataParallel have their inputs on other devices.
        newest = range_of(input, self.grid).to(self.observed.device)
        newest = torch.where(newest.isfinite().all(), newest, 0.0)
        self.observed.copy_(torch.maximum(self.observed, newest))

    def move_to(self, device: torch.device) -> None:
        """Move the range to a device; not to the meta device, which would lose it."""
        self.observed = self.observed.to(device)
        if self.range is not None:
            self.range = self.range.to(device)
        if self.steps is not None:
            self.steps = self.steps.to(device)

    def step(self, newest: Tensor) -> None:
        """Update the running range after an optimizer step.

        Passes whose inputs hold NaN or Inf do not count, nor do steps without a forward
        pass.

        Args:
            newest: The range of the step, as `range_of` gives it.
        """
        counts = newest.sum() > 0
        window = self.grid.window
        share: Tensor | float = _NEWEST
        if window is not None and self.steps is not None:
            share = 1 / (self.steps + 1).clamp(max=window)
            self.steps.add_(counts)
        if self.range is not None:
            moved = self.range + share * (newest - self.range)
            self.range.copy_(torch.where(counts, moved, self.range))
        elif bool(counts):
            self.range = newest.clone()
            if window is not None:
                self.steps = torch.ones_like(newest.sum())
        self.observed.zero_()


def new_inputs(grid: InputGrid, weight: Tensor) -> InputObserver:
    """Make an observer for the layer with a weight, with no range yet; on the CPU for the meta device."""
    device = torch.device("cpu") if weight.is_meta else weight.device
    ends = () if grid.symmetric else (2,)
    observed = torch.zeros(ends, dtype=torch.float32, device=device)
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

    A range follows the widest one of all ranks.
    """
    static = [observer for observer in inputs if observer.grid.scale == "static"]
    if static:
        ends = [observer.observed.flatten() for observer in static]
        widest = largest_over_ranks(torch.cat(ends))
        parts = torch.split(widest, [len(own) for own in ends])
        for observer, newest in zip(static, parts, strict=True):
            observer.step(newest.view_as(observer.observed))


def ranges_of(
    inputs: Mapping[str, InputObserver],
) -> dict[str, float | list[float]]:
    """The running ranges by layer, for a saved state. JSON's numbers hold float32 exactly.

    A number is the largest magnitude; a list holds what `range_of` gives, and with a
    window the count of steps.
    """
    found: dict[str, float | list[float]] = {}
    for name, observer in inputs.items():
        if observer.range is None:
            continue
        numbers = observer.range.flatten().tolist()
        if observer.steps is not None:
            numbers.append(float(observer.steps))
        found[name] = numbers if len(numbers) > 1 else numbers[0]
    return found


def dtypes_of(inputs: Mapping[str, InputObserver]) -> dict[str, str]:
    """The dtype to which a static scale is rounded, by layer, for a saved state; float32 is left out."""
    return {
        name: dtype_name(observer.dtype)
        for name, observer in inputs.items()
        if observer.dtype != torch.float32
    }


def range_in(entry: float | list[float], grid: InputGrid) -> Tensor:
    """The range in an entry that `ranges_of` gave, as `range_of` gives it, on the CPU."""
    numbers = torch.tensor(entry, dtype=torch.float32, device="cpu").flatten()
    return numbers[0] if grid.symmetric else numbers[:2]


def load_ranges(
    inputs: Mapping[str, InputObserver], saved: Mapping[str, float | list[float]]
) -> None:
    """Load the ranges that `ranges_of` gave; a layer whose own is missing there starts without a range."""
    for name, observer in inputs.items():
        observer.observed.zero_()
        observer.range = observer.steps = None
        entry = saved.get(name, [])
        numbers = observer.observed.new_tensor(entry).flatten()
        has_window = observer.grid.window is not None
        ends = observer.observed.numel()
        if observer.grid.scale == "static" and len(numbers) == ends + has_window:
            observer.range = numbers[:ends].view_as(observer.observed).clone()
            observer.steps = numbers[ends].clone() if has_window else None
