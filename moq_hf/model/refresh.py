"""When weights are quantized anew: all layers after each optimizer step, and the checks that go with it."""

from collections.abc import Iterable, Mapping

import torch

from ..errors import MoQError
from ..processes import any_over_ranks, device_of, local_part
from ..quant_linear import QuantLayer
from ..rows import parameter_of


def check_readers(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a model used a float weight past its quantized layer: call it where gradients are, in all processes.

    Whoever takes `layer.weight` in a forward pass gets the quantized one. A weight that was taken otherwise (from
    `named_parameters()`, from `_parameters`) has a gradient while its layer was never used.

    Raises:
        MoQError: Names the layers.
    """
    weights = [layer.float_weight for layer in layers.values()]
    used = {id(weight) for weight, layer in zip(weights, layers.values(), strict=True) if layer.moq.used}
    # Elsewhere in the batch, in another process, the layer may have been used.
    was_used = any_over_ranks([id(weight) in used for weight in weights], weights[0])
    has_gradient = [
        not fine and weight.grad is not None and bool((local_part(weight.grad) != 0).any())
        for weight, fine in zip(weights, was_used, strict=True)
    ]
    if any(layer.moq.sharded is not None for layer in layers.values()):
        has_gradient = any_over_ranks(has_gradient, weights[0])
    wrong = [name for name, found in zip(layers, has_gradient, strict=True) if found]
    if wrong:
        named = ", ".join(f'"{name}"' for name in wrong)
        raise MoQError(
            f"the weights of these layers are used without the layers, past their quantization: {', '.join(wrong)}; "
            f"leave them in full precision: add {named} to modules_to_not_convert"
        )


def set_bits(layers: Iterable[tuple[QuantLayer, int]]) -> None:
    """Give layers their bits."""
    for layer, bits in layers:
        layer.set_bits(bits)


def check_finite(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a weight held NaN or Inf when it was last quantized; one wait for the device, not one per layer.

    Raises:
        MoQError: Names the parameters.
    """
    if not layers:
        return
    weight = next(iter(layers.values())).float_weight
    flags_of = [layer.nonfinite() for layer in layers.values()]
    # On the CPU for the meta device, which keeps none.
    found = torch.stack([flag.to(flags_of[0].device if weight.is_meta else device_of(weight)) for flag in flags_of])
    apart = any(layer.moq.sharded is not None for layer in layers.values())
    if not apart and not bool(found.any()):
        return
    flags = found.tolist()
    if apart:
        # What one process holds stops all of them.
        flags = any_over_ranks(flags, weight)
    bad = {name: layer for (name, layer), flag in zip(layers.items(), flags, strict=True) if flag}
    if bad:
        _refuse_nonfinite(bad)


def _refuse_nonfinite(layers: Mapping[str, QuantLayer]) -> None:
    names = ", ".join(parameter_of(name, layer.kind) for name, layer in layers.items())
    raise MoQError(f"NaN or Inf in {names}: training has diverged or the checkpoint is damaged")


class Refresher:
    """Quantizes many layers after each optimizer step.

    Args:
        layers: Quantized layers by name.
    """

    def __init__(self, layers: Mapping[str, QuantLayer]) -> None:
        self._layers = dict(layers)

    def refresh(self) -> None:
        """Quantize every layer's weight once, from what it is now."""
        for layer in self._layers.values():
            layer.refresh()

    def check_finite(self, *, wait: bool = True, shards: bool = True) -> None:
        """Stop if a weight held NaN or Inf.

        Args:
            wait: Without effect.
            shards: Sharded weights too, which all processes must ask for.

        Raises:
            MoQError: Names the parameters.
        """
        check_finite({n: layer for n, layer in self._layers.items() if shards or layer.moq.sharded is None})
