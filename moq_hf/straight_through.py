"""The straight-through estimator: quantized weights and inputs whose gradient is that of the float ones.

Bengio et al., 2013, arXiv 1308.3432.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .seams.transformers import is_exporting, is_transformed, with_gradient_of


class _StraightThrough(torch.autograd.Function):
    """The quantized tensor, with the gradient of the float one.

    Differentiable twice, and by torch.func's grad and vjp. A forward-mode rule would
    keep Dynamo from tracing it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, quantized: Tensor) -> Tensor:
        return quantized.view_as(quantized)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return grad[0].to(ctx.dtype), None


# The part of Function.apply for when no transform of torch.func is active: it does not
# bind arguments to a signature, which takes as long as all the rest.
_apply: Any = super(torch.autograd.Function, _StraightThrough).apply


def straight_through(source: Tensor, quantized: Tensor) -> Tensor:
    """Pass the gradient of a quantized weight or input straight through to the float one.

    Args:
        source: The float weight or input.
        quantized: The quantized tensor, in the same shape, without a graph, to which
            there is no other reference.

    Returns:
        The quantized values, with a gradient.
    """
    if is_exporting() and torch.is_grad_enabled():
        # torch.export drops a Function's backward, so the estimator is arithmetic here.
        return quantized + (source - source.detach()).to(quantized.dtype)
    found = with_gradient_of(source, quantized)
    if found is not None:
        return found
    plain = not torch.compiler.is_compiling() and not is_transformed()
    apply = _apply if plain else _StraightThrough.apply
    return cast(Tensor, apply(source, quantized))


class _ManyStraightThrough(torch.autograd.Function):
    """As `_StraightThrough`, for all weights of a block: one call forward, and one cast of all gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, quantized: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        # A weight that is not used keeps `grad is None`.
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # A second derivative needs a graph.
            cast_grads = [
                None if grad is None else grad.to(dtype)
                for grad, dtype in zip(grads, ctx.dtypes, strict=True)
            ]
            return None, *cast_grads
        found = list(grads)
        sources: list[Tensor] = []
        results: list[Tensor] = []
        for index, (grad, dtype) in enumerate(zip(grads, ctx.dtypes, strict=True)):
            if grad is not None and grad.dtype != dtype:
                # New memory, since an optimizer may write into each gradient.
                found[index] = torch.empty_like(grad, dtype=dtype)
                sources.append(grad)
                results.append(found[index])  # type: ignore[arg-type]
        if sources:
            torch._foreach_copy_(results, sources)
        return None, *found


_apply_many: Any = super(torch.autograd.Function, _ManyStraightThrough).apply


def straight_through_block(
    weights: Sequence[Tensor], quantized: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """As `straight_through`, for all weights of a block, whose gradients arrive together.

    Args:
        weights: Float weights that require gradients.
        quantized: The quantized weights, without a graph and without other references.
    """
    return cast(tuple[Tensor, ...], _apply_many(list(quantized), *weights))
