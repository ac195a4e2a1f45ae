"""`"train": "scales"`: the codes of a weight are frozen, and its scales are trained.

A forward pass multiplies with (code - zero point) * scale, where the scale is the trained one as the grid stores it:
rounded to `scale_dtype`, with the sign that rounding gave it, and at least the smallest normal float32 in magnitude.
The gradient passes straight through both: that of a scale is the sum over its group of each weight's gradient times
(code - zero point), so a scale that ran into the limit comes back. Zero points stay, because files hold them as
integers. EfficientQAT's last phase trains scales alone in the same way (Chen et al., 2024, arXiv 2407.11062).

Scales are parameters of the module whose weight they scale, `weight_scale` beside `weight`, float32 when they are made.
Checkpoints hold them beside the float weights, which stay as they were, so that the codes can be computed again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .grid import Precision
from .quantizer import Quantized, as_stored, dequantize, per_weight
from .seams.transformers import is_exporting
from .weight_matrix import from_rows, to_rows

# The error for engines that shard or replicate the model.
SCALES_APART = (
    'train: "scales" trains parameters beside frozen codes, which FSDP, DeepSpeed and DataParallel would take apart: '
    "train on one device or with DDP; frozen weights need no memory for gradients and an optimizer"
)
_TINY = torch.finfo(torch.float32).tiny
# The names of a module's own parameters that were trainable before `freeze_all`. Copies of a parameter lose what is
# noted on the parameter itself.
_WERE_TRAINED = "moq_were_trained"


def scales_of(weight: str) -> str:
    """The name of a weight's scales, made from the weight's name.

    >>> scales_of("dense.weight")
    'dense.weight_scale'
    """
    return "_".join((weight, "scale"))


@dataclass(eq=False)
class TrainedScales:
    """The scales of a weight, which are trained, and the codes that they scale.

    Attributes:
        module: The module of the weight.
        attribute: The weight's name there.
        start: The codes, int8 or int16 `[rows, columns]`, and what rounding gave beside
            them; None until the weight has values and bits.
        is_settled: Whether GPTQ made the codes, or a checkpoint had scales for them; GPTQ
            would make others, for which the scales were not trained.
    """

    module: nn.Module
    attribute: str
    start: Quantized | None = None
    is_settled: bool = False

    @property
    def name(self) -> str:
        """The name of the parameter in its module."""
        return scales_of(self.attribute)

    @property
    def parameter(self) -> Tensor:
        """The trained parameter, in the shape of the grid's scale."""
        parameter: Tensor = self.module._parameters[self.name]  # type: ignore[assignment]
        return parameter

    @property
    def has_trained(self) -> bool:
        """Whether GPTQ would undo something: the codes are settled, or the scales are others than rounding gave."""
        if self.start is None:
            return False
        scale = self.parameter.detach()
        return self.is_settled or not torch.equal(scale, self.start.scale.to(scale))

    def add(self, shape: tuple[int, int]) -> None:
        """Give the module the parameter, unless it has one of this shape; on the weight's device."""
        found = self.module._parameters.get(self.name)
        if found is None or tuple(found.shape) != shape:
            device = self.module._parameters[self.attribute].device  # type: ignore[union-attr]
            scale = torch.ones(shape, dtype=torch.float32, device=device)
            self.module.register_parameter(self.name, nn.Parameter(scale))

    def remove(self) -> None:
        """Take the parameter away from the module."""
        self.module._parameters.pop(self.name, None)

    def freeze(self, values: Quantized, keeps: bool) -> None:
        """Keep the codes of a weight, and reset its scales unless they are to stay or nothing has changed.

        Args:
            values: What rounding the weight gives.
            keeps: Whether the scales were already trained for these codes.
        """
        low, high = values.codes.aminmax()
        is_short = low < -128 or high > 127
        codes = values.codes.to(torch.int16 if is_short else torch.int8)
        made = values._replace(codes=codes)
        before, self.start = self.start, made
        self.is_settled |= keeps
        if keeps or (before is not None and _are_equal(before, made)):
            return
        self.is_settled = False
        self.parameter.detach().copy_(values.scale)

    def move_to(self, device: torch.device) -> None:
        """Move the codes and zero points to a device."""
        if self.start is not None:
            parts = (None if x is None else x.to(device) for x in self.start)
            self.start = Quantized(*parts)  # type: ignore[arg-type]

    def quantized(self, precision: Precision) -> Quantized:
        """The codes with the trained scales, as they are stored."""
        assert self.start is not None
        return with_scale(self.start, self.parameter, precision)

    def with_gradient(self, weight: Tensor, kind: str) -> Tensor:
        """Pass the gradient of a weight that was made from these scales on to them.

        Args:
            weight: Without a graph, held by nobody else.
            kind: How the weight is laid out; see `to_rows`.
        """
        assert self.start is not None
        codes, _, zero = self.start
        scale = self.parameter
        if is_exporting() and torch.is_grad_enabled():
            # torch.export drops a Function's backward.
            change = dequantize(codes, (scale - scale.detach()).float(), zero)
            return weight + from_rows(change, kind, weight.shape).to(weight.dtype)
        made: Tensor = _OfScales.apply(scale, weight, codes, zero, kind)  # type: ignore[no-untyped-call]
        return made


def _are_equal(first: Quantized, second: Quantized) -> bool:
    return all(
        a is b if a is None or b is None else a.device == b.device and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def with_scale(values: Quantized, trained: Tensor, precision: Precision) -> Quantized:
    """A quantized weight with trained scales, as they are used and stored.

    Args:
        values: What rounding the weight gave.
        trained: The parameter's values.
        precision: The weight's grid at its bits.
    """
    sign = values.scale.sign()
    size = (trained.detach().to(torch.float32) * sign).clamp_(min=_TINY)
    return values._replace(scale=as_stored(size * sign, precision))


class _OfScales(torch.autograd.Function):
    """A weight with the gradient of its scales."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        scale: Tensor, weight: Tensor, codes: Tensor, zero: Tensor | None, kind: str
    ) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scale, _, codes, zero, kind = inputs
        ctx.save_for_backward(codes, zero)
        ctx.shape, ctx.dtype, ctx.kind = scale.shape, scale.dtype, kind

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, zero = ctx.saved_tensors
        steps = codes.to(torch.float32)
        if zero is not None:
            steps = steps - per_weight(zero, codes.shape)
        products = to_rows(grad[0], ctx.kind).to(torch.float32) * steps
        rows, columns = ctx.shape
        tiles = products.reshape(
            rows, codes.shape[0] // rows, columns, codes.shape[1] // columns
        )
        return tiles.sum((1, 3)).to(ctx.dtype), None, None, None, None


def freeze_all(model: nn.Module) -> None:
    """Freeze all parameters of a model, and note those that were trainable."""
    for module in model.modules():
        trainable = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        for name in trainable:
            module.get_parameter(name).requires_grad_(False)
        if trainable:
            vars(module)[_WERE_TRAINED] = trainable


def unfreeze(model: nn.Module) -> None:
    """Make trainable again what `freeze_all` froze, in this model or in the one that it is a copy of."""
    for module in model.modules():
        for name in vars(module).pop(_WERE_TRAINED, ()):
            # It may have been removed since.
            parameter = module._parameters.get(name)
            if parameter is not None:
                parameter.requires_grad_(True)
