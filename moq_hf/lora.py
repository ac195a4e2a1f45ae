"""`"lora": "merged"`: what PEFT's LoRA trains is the weight that is delivered, quantize(W + s B A).

In each forward pass an adapted layer forms the merged weight and quantizes it as any
other weight; the gradient passes straight through to A and B, to DoRA's magnitude, and
to W where that is trained. PEFT's wrapper only calls the layer that it adapts. All
modules and parameters stay PEFT's, with their names, so that checkpoints and adapters
are saved and loaded as ever.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from .errors import MoQError
from .names import adapted_layers
from .quant_linear import QuantLayer
from .seams.transformers import ADAPTED, Lora, active_lora
from .weight_matrix import Kind, from_rows, to_rows


class MergedLora:
    """Replaces the forward pass of PEFT's wrapper of a layer, and gives the layer's merged weight.

    Args:
        wrapper: PEFT's.
        kind: How the layer's weight is laid out; see `to_rows`.
    """

    def __init__(self, wrapper: nn.Module, kind: Kind) -> None:
        self.wrapper = wrapper
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the adapted layer computes, which reads its merged weight."""
        return cast(Any, self.wrapper._modules[ADAPTED])(*args, **kwargs)

    @property
    def active(self) -> list[Lora]:
        """The adapters that are switched on."""
        return active_lora(self.wrapper)

    def key(self) -> tuple[Any, ...]:
        """What a merged weight was made with, beside the weight: scalings, addresses and versions."""
        parts = [part for lora in self.active for part in lora]
        return tuple(
            (part.data_ptr(), part._version) if isinstance(part, Tensor) else part
            for part in parts
        )

    # A compiled product may round otherwise than the one whose result is delivered.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def merged(
        self, weight: Tensor, read: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The weight with the active adapters in it, differentiable; the sum is formed in float32.

        DoRA scales the rows of the sum to lengths that it learns. As in PEFT, those that
        the rows have are constants for the gradient.

        Args:
            weight: The float weight of the adapted layer.
            read: Gives the values of a parameter as a forward pass has them, where the
                parameter is a shard or was saved elsewhere.
        """

        def values_of(parameter: Tensor) -> Tensor:
            values = parameter if read is None else read(parameter)
            return values.to(torch.promote_types(values.dtype, torch.float32))

        given = weight if read is None else read(weight)
        adapters = self.active
        if not adapters:
            return given
        is_table = self.kind == "embedding"
        with torch.autocast(given.device.type, enabled=False):
            rows = to_rows(values_of(weight), self.kind)
            total = rows
            for lora in adapters:
                a, b = values_of(lora.a).flatten(1), values_of(lora.b).flatten(1)
                left, right = (a.t(), b.t()) if is_table else (b, a)
                # Copies, since where its factors lie in memory may decide in which order
                # a product is summed.
                factors = left.clone(), lora.scaling * right
                if lora.magnitude is None:
                    total = torch.addmm(total, *factors)
                    continue
                own = torch.addmm(rows, *factors)
                axis = 0 if is_table else 1
                length = own.detach().norm(dim=axis, keepdim=True)
                wanted = values_of(lora.magnitude).flatten().unsqueeze(axis)
                total = total + (own * (wanted / length) - rows)
        return from_rows(total, self.kind, given.shape).to(given.dtype)


def merge_adapters(model: nn.Module, merged: bool, adopts: bool = False) -> None:
    """Have the layers that PEFT adapts compute with merged weights, or as PEFT does, which must not merge them then.

    Args:
        model: With its layers quantized, or made plain ones again.
        merged: Whether `"lora": "merged"` asks for it.
        adopts: The weights of layers that were merged have the adapters in them by now,
            and PEFT takes these for merged.
    """
    for wrapper in adapted_layers(model).values():
        own = vars(wrapper)
        if own.get("merge") is _refuse_merging:
            del wrapper.merge
        if isinstance(own.get("forward"), MergedLora):
            del wrapper.forward
            if adopts:
                wrapper.merged_adapters[:] = wrapper.active_adapters
        base = own["_modules"][ADAPTED]
        if not isinstance(base, QuantLayer):
            continue
        if not merged:
            wrapper.merge = _refuse_merging
            continue
        wrapper.forward = lora = MergedLora(wrapper, base.kind)
        # Layers that share a weight share its state, and the adapter of the first.
        base.moq.lora = base.moq.lora or lora


def _refuse_merging(*args: Any, **kwargs: Any) -> None:
    raise MoQError(
        "adapters cannot be merged into weights that were quantized without them: call moq_hf.dequantize_model(model) "
        'first, then the merged model computes the same in float; or train with "lora": "merged"'
    )


def is_merged(model: nn.Module) -> bool:
    """Whether the adapters of a model are merged into its weights in each forward pass."""
    wrappers = adapted_layers(model).values()
    return any(isinstance(vars(w).get("forward"), MergedLora) for w in wrappers)
