"""Starts from GPTQ: rounds the weights of layers that fall to fewer bits so that their outputs change least."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from .. import quantizer
from ..errors import MoQError
from ..names import pretrained
from ..processes import is_distributed, is_gathered_per_pass
from ..quantized_weight import QuantizedWeight
from ..seams.transformers import prepared_inputs
from ..weight_matrix import from_rows, to_rows
from .measuring import eager, evaluating
from .samples import first_batches


class _StopForward(Exception):
    """Ends a forward pass at the layer that is calibrated."""


def check_possible(trainer: Trainer, layers: Collection[QuantizedWeight]) -> None:
    """Check, before the first step, that layers can be rounded from training examples.

    Raises:
        MoQError: FSDP2 or DeepSpeed keeps the weights elsewhere, or no layer is to be
            rounded.
    """
    key = next(iter(layers)).moq.config.spell("gptq")
    if trainer.is_deepspeed_enabled or any(
        is_gathered_per_pass(x.float_weight) for x in layers
    ):
        raise MoQError(
            f"{key}: FSDP2 and DeepSpeed keep the weights that they train elsewhere; set it to 0"
        )
    if not any(map(_is_trained, can_round(layers))):
        raise MoQError(
            f"{key}: no linear layer is both quantized and trained, and it rounds no others; set it to 0"
        )


def start_from_gptq(
    trainer: Trainer,
    model: nn.Module,
    layers: Iterable[QuantizedWeight],
    examples: int,
) -> None:
    """Round the trained linear layers by `round_weights`, with training examples; frozen ones stay as they are.

    Args:
        trainer: Computes the loss of a batch, and with it the inputs.
        model: The model, unwrapped (no DDP).
        layers: The layers, already at the bits to which they will be rounded.
        examples: The number of examples over all processes; each reads whole batches.

    Raises:
        MoQError: The inputs of a layer are not finite.
    """
    with evaluating(model), eager():
        # Another pass over the Trainer's own loader would disturb the one under way.
        loader = trainer.get_train_dataloader()
        share = examples // trainer.args.world_size
        batches = [
            prepared_inputs(trainer, batch) for batch in first_batches(loader, share)
        ]
        rounded = filter(_is_trained, can_round(layers))
        round_weights(model, rounded, batches, trainer.compute_loss)


def can_round(layers: Iterable[QuantizedWeight]) -> list[QuantizedWeight]:
    """The layers that GPTQ can round: linear ones that are not tied to a table and have no merged adapter."""
    return [
        layer
        for layer in layers
        # A tied head is a table too.
        if layer.kind in ("linear", "conv1d")
        and layer.kind == layer.moq.kind
        and not layer.moq.lora
    ]


def _is_trained(layer: QuantizedWeight) -> bool:
    return layer.float_weight.requires_grad or layer.moq.trained is not None


def round_weights(
    model: nn.Module,
    layers: Iterable[QuantizedWeight],
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], object],
) -> None:
    """Round weights with `quantizer.gptq`, layer by layer: each sees its inputs after the earlier ones were rounded.

    A layer that is never called keeps its weight. All processes that share the model
    must call this.

    Args:
        model: The model in evaluation mode, without gradients.
        layers: Layers from `can_round`, already at the bits to which they will be rounded.
        batches: If a batch calls a layer more than once, the first call counts.
        run: Runs the model on a batch.

    Raises:
        MoQError: The inputs of a layer are not finite.
    """
    for layer in layers:
        _round(model, layer, batches, run)


def _round(
    model: nn.Module,
    layer: QuantizedWeight,
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], object],
) -> None:
    weight = layer.float_weight
    matrix = to_rows(weight.detach(), layer.kind)
    moment = matrix.new_zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float32)
    mask: Any = None

    def note_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal mask
        mask = kwargs.get("attention_mask")

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs = args[0]
        if isinstance(mask, Tensor) and mask.shape == inputs.shape[:-1]:
            # Padding does not count.
            inputs = inputs[mask.bool()]
        inputs = inputs.flatten(0, -2).float()
        moment.addmm_(inputs.t(), inputs)
        raise _StopForward

    def stop(*_: Any) -> None:
        raise _StopForward

    with (
        pretrained(model).register_forward_pre_hook(note_mask, with_kwargs=True),
        layer.module.register_forward_pre_hook(add),
        # If the layer is not called, the pass ends before the loss.
        model.register_forward_hook(stop),
    ):
        for batch in batches:
            with contextlib.suppress(_StopForward):
                # Some losses pop the labels from their batch.
                run(model, copy.copy(batch))
    if is_distributed():
        dist.all_reduce(moment)
    if not moment.any():
        return
    if not moment.isfinite().all():
        raise MoQError(
            f"{layer.moq.config.spell('gptq')}: the inputs of {layer.moq.name} hold NaN or Inf"
        )
    rounded = quantizer.gptq(matrix, moment, layer.moq.bits, layer.moq.grid)
    weight.copy_(from_rows(rounded, layer.kind, weight.shape))
    layer.set_bits(layer.moq.bits)
    layer.invalidate()
