"""`"lora": "merged"`: PEFT's LoRA trains the weight that is delivered, quantize(W + s B A).

In each forward pass an adapted layer forms the merged weight and quantizes it as any
other weight; the gradient passes straight through to A and B, to DoRA's magnitude, and
to W if it is trained. PEFT's wrapper only calls the layer that it adapts. All modules
and parameters stay PEFT's, with their names, so that checkpoints and adapters are saved
and loaded as usual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import MoQError
from .names import adapted_layers
from .quant_linear import QuantLayer
from .seams.transformers import ADAPTED, active_lora
from .weight_matrix import Kind, from_rows, to_rows


@dataclass(eq=False)
class MergedLora:
    """Replaces the forward pass of PEFT's wrapper of a layer, and gives the layer's merged weight.

    Args:
        wrapper: PEFT's wrapper.
        kind: How the layer's weight is laid out; see `to_rows`.
    """

    wrapper: Any
    kind: Kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the adapted layer does, which reads its merged weight."""
        return self.wrapper._modules[ADAPTED](*args, **kwargs)

    def unload(self, merge: bool, **options: Any) -> Any:
        """The adapted layer, which PEFT's `merge_and_unload` or `unload` puts in place of the wrapper.

        Args:
            merge: Whether the adapters stay in its weight.
            **options: Options of PEFT's `merge`.
        """
        if merge:
            self.wrapper.merge(**options)
        layer = self.wrapper._modules[ADAPTED]
        layer.moq.lora = None
        return layer

    def parts(self) -> list[Any]:
        """The parts of a merged weight beside the weight itself: scalings and tensors, without a graph."""
        return [
            part.detach() if isinstance(part, Tensor) else part
            for lora in active_lora(self.wrapper)
            for part in lora
        ]

    # A compiled product may round differently from the one whose result is delivered.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def merged(self, weight: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """The weight with the active adapters in it, differentiable; the sum is formed in float32.

        DoRA scales the rows of the sum by learned lengths, divided by those of W + s B A.
        As in PEFT, the latter are constants for the gradient.

        Args:
            weight: The float weight of the adapted layer, as a forward pass has it.
            read: Gives the values of an adapter's parameter as a pass has them, in case
                the parameter is a shard or was saved elsewhere.
        """
        dtype = torch.promote_types(weight.dtype, torch.float32)
        is_table = self.kind == "embedding"
        rows = total = to_rows(weight.to(dtype), self.kind)
        with torch.autocast(weight.device.type, enabled=False):
            for lora in active_lora(self.wrapper):
                a, b = (read(part).to(dtype).flatten(1) for part in (lora.a, lora.b))
                left, right = (a.t(), b.t()) if is_table else (b, a)
                # Copies, since the order in which a product is summed may depend on where
                # its factors are in memory.
                factors = left.clone(), lora.scaling * right
                total = torch.addmm(total, *factors)
                if lora.magnitude is not None:
                    with torch.no_grad():
                        length = torch.addmm(rows, *factors).norm(
                            dim=0 if is_table else 1, keepdim=True
                        )
                    wanted = read(lora.magnitude).to(dtype).view_as(length)
                    total = total * (wanted / length)
        return from_rows(total, self.kind, weight.shape).to(weight.dtype)


def merge_adapters(model: nn.Module, merged: bool, adopts: bool = False) -> None:
    """Make the layers that PEFT adapts compute with merged weights, or as PEFT does, which then must not merge them.

    Args:
        model: A model whose layers were quantized, or turned back into plain ones.
        merged: Whether `"lora": "merged"` asks for it.
        adopts: Whether the weights of layers that were merged include the adapters by
            now, so that PEFT must count these as merged.
    """
    for wrapper in adapted_layers(model).values():
        if wrapper.merge is _refuse_merging:
            del wrapper.merge
        if isinstance(wrapper.forward, MergedLora):
            del wrapper.forward, wrapper.unload_and_optionally_merge_module
            if adopts and not wrapper.disable_adapters:
                wrapper.merged_adapters[:] = wrapper.active_adapters
        base = getattr(wrapper, ADAPTED)
        if not isinstance(base, QuantLayer):
            continue
        if not merged:
            wrapper.merge = _refuse_merging
            continue
        wrapper.forward = lora = MergedLora(wrapper, base.moq_kind)
        wrapper.unload_and_optionally_merge_module = lora.unload
        # Layers that share a weight share its state, and the adapter of the first.
        base.moq.lora = base.moq.lora or lora


def _refuse_merging(*args: Any, **kwargs: Any) -> None:
    raise MoQError(
        "adapters cannot be merged into weights that were quantized without them: call moq_hf.dequantize_model(model) "
        'first, then the merged model computes the same in float; or train with "lora": "merged"'
    )


def is_merged(model: nn.Module) -> bool:
    """True if the adapters of a model are merged into its weights in each forward pass."""
    wrappers = adapted_layers(model).values()
    return any(isinstance(wrapper.forward, MergedLora) for wrapper in wrappers)
