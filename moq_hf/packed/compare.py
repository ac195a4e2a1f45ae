"""Two models and their answers, compared."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..quant_experts import quantized_in

# Of the modules that differ, that many are named.
_NAMED = 5


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs; infinite numbers and NaN in both are equal.

    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
    0.5
    """
    if torch.equal(one, other) or not one.numel():
        return 0.0
    # Masked scores are infinite in both; NaN in both is the same answer.
    same = (one == other) | (one.isnan() & other.isnan())
    difference = (one.double() - other.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=float("inf")).max())


def largest(output: Tensor) -> float:
    """The largest number of an output, without what stands for minus infinity where scores are masked.

    >>> largest(torch.tensor([1.0, -2.0, torch.finfo(torch.float32).min]))
    2.0
    """
    if not output.is_floating_point() or not output.numel():
        return 0.0
    numbers = output.abs()
    return float(numbers.where(numbers < 1e30, torch.zeros(())).max())


def modules_with_other_weights(model: nn.Module, loaded: nn.Module) -> list[str]:
    """The first modules of the loaded model with a parameter or buffer that is not the model's."""
    own = dict(model.named_modules())
    names = []
    for name, module in loaded.named_modules():
        kept = own.get(name)
        for key, tensor in _tensors(module).items():
            value = None if kept is None else _tensors(kept).get(key)
            layers = {} if kept is None else quantized_in("", kept)
            layer = layers.get("" if key == "weight" else key)
            if value is not None and layer is not None:
                value = layer.quantized_weight(value.dtype)
            if value is not None and not torch.equal(tensor.detach(), value.detach().to(tensor.dtype)):
                names.append(name)
    return list(dict.fromkeys(names))[:_NAMED]


def modules_with_other_outputs(one: Mapping[str, list[Tensor]], other: Mapping[str, list[Tensor]]) -> list[str]:
    """The first modules with outputs that differ, by the outputs of each module in two models."""
    different = [
        name
        for name, outputs in other.items()
        if name and name in one and any(not torch.equal(a, b) for a, b in zip(one[name], outputs, strict=False))
    ]
    return different[:_NAMED]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
