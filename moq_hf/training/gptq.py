"""Starts from GPTQ: rounds the weights of layers that fall to fewer bits so that their outputs change least."""

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer

from .. import quantizer
from ..errors import MoQError
from ..inputs import input_of
from ..model.convert import hold_quantized
from ..processes import is_distributed, is_first_process, is_gathered_per_pass
from ..quantized_weight import QuantizedWeight
from ..seams.transformers import prepared_inputs
from ..text import counted
from ..weight_matrix import from_rows, to_rows
from .measuring import eager, evaluating
from .replay import NoAnswer, Replay
from .samples import by_name, first_batches, names_of_inputs, parts_of, rows_of

logger = logging.getLogger(__name__)


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
    if any(map(_is_trained, can_round(layers))):
        return
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise MoQError(
            f"{key}: with PEFT's adapters the quantized weights are frozen, or an adapter is merged into them, and "
            "GPTQ rounds neither; set it to 0, or train without adapters"
        )
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
        count = sum(rows_of(batch) for batch in batches)
        if count < share and trainer.is_world_process_zero():
            logger.warning(
                "moq_hf: GPTQ reads %d training examples: the data has no more",
                count * trainer.args.world_size,
            )
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


def is_settled(layer: QuantizedWeight) -> bool:
    """True if the layer's codes are frozen, and were made by GPTQ or have scales that were trained for them."""
    return layer.moq.trained is not None and layer.moq.trained.has_trained


def _is_trained(layer: QuantizedWeight) -> bool:
    return layer.float_weight.requires_grad or layer.moq.trained is not None


def round_weights(
    model: nn.Module,
    layers: Iterable[QuantizedWeight],
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], object],
) -> None:
    """Round weights with `quantizer.gptq`, layer by layer: each sees its inputs after the earlier ones were rounded.

    A layer that is never called keeps its weight, as does a settled one. All processes that share the model
    must call this.

    Args:
        model: The model in evaluation mode, without gradients.
        layers: Layers from `can_round`, already at the bits to which they will be rounded.
        batches: Large ones are read in parts where the model takes these. If one calls a
            layer more than once, the first call counts.
        run: Runs the model on a batch.

    Raises:
        MoQError: The inputs of a layer are not finite.
    """
    layers = list(layers)
    waiting = [layer for layer in layers if not is_settled(layer)]
    if len(waiting) < len(layers) and is_first_process():
        logger.warning(
            "moq_hf: GPTQ leaves %s as they are, whose scales were trained already",
            counted(len(layers) - len(waiting), "layer"),
        )
    # Each new block is checked on the first of them, by whole passes. Processes must agree on what they pass over.
    parts = [part for batch in batches for part in parts_of(batch)]
    if is_distributed():
        parts = list(batches)
    replay, checked = Replay(model), 0
    bar = tqdm(desc="GPTQ", total=len(waiting), leave=False, disable=None)
    # From pass to pass only what was rounded in between is quantized again.
    with hold_quantized(model), bar:
        while waiting:
            try:
                if replay.known > checked:
                    _check_replay(model, parts[0], run, replay)
                    checked = replay.known
                moment, shared = _moment(model, waiting, parts, run, replay)
            except Exception:
                if replay.known:
                    replay.give_up()
                elif len(parts) > len(batches):
                    # What a batch holds need not be row by row, such as pictures of some texts.
                    parts, replay, checked = list(batches), Replay(model), 0
                else:
                    raise
                continue
            for layer in waiting[:shared]:
                _round(layer, moment)
            del waiting[:shared]
            bar.update(shared)


def _check_replay(
    model: nn.Module,
    batch: Any,
    run: Callable[[nn.Module, Any], object],
    replay: Replay,
) -> None:
    """Compare a pass that leaves blocks out with a whole one, to the bit.

    It comes first, so that what blocks have left behind is that of another batch.

    Raises:
        NoAnswer: They differ, in this process or in another one.
    """
    with replay.on_batch(0):
        # So that nothing else is kept.
        replay.note_change()
        short = _outputs(model, batch, run)
    whole = _outputs(model, batch, run)
    is_same = len(short) == len(whole) > 0 and all(map(torch.equal, short, whole))
    if is_distributed():
        device = next(model.parameters()).device
        verdict = torch.tensor(float(is_same), device=device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        is_same = bool(verdict)
    if not is_same:
        raise NoAnswer


def _outputs(
    model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], object]
) -> list[Tensor]:
    """The tensors that a model answers a batch with."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(output)
        found.extend(leaf.clone() for leaf in leaves if isinstance(leaf, Tensor))
        # Before the loss.
        raise _StopForward

    handle = model.register_forward_hook(keep)
    try:
        with contextlib.suppress(_StopForward):
            run(model, copy.copy(batch))
    finally:
        handle.remove()
    return found


class _Padding:
    """Where padding is, by the masks that the models around a layer are given."""

    def __init__(self) -> None:
        self._mask: Any = None
        self._encoded: Any = None
        self._mask_of_encoded: Any = None

    def note(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """As a forward pre-hook: take the masks of a model that is called."""
        names = names_of_inputs(module)
        given = by_name(names, args, kwargs)
        self._encoded = given.get("encoder_hidden_states")
        self._mask_of_encoded = given.get("encoder_attention_mask")
        # Sentence Transformers has it among its features.
        mappings = (x for x in given.values() if isinstance(x, Mapping))
        features = next((x for x in mappings if "attention_mask" in x), given)
        mask = features.get("attention_mask")
        is_told = "attention_mask" in names or "attention_mask" in features
        # What a model makes of its mask for the one inside is no list of positions.
        if is_told and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)):
            self._mask = mask

    def left_out(self, inputs: Tensor) -> Tensor:
        """The inputs of a layer without those of padding, `[..., columns]`."""
        # A decoder hands on to cross attention what it was given.
        is_encoded = inputs is self._encoded
        mask = self._mask_of_encoded if is_encoded else self._mask
        if not isinstance(mask, Tensor):
            return inputs
        if inputs.shape[:-1] == (mask.numel(),):
            # Some models put all tokens of a batch in a row.
            mask = mask.flatten()
        return inputs[mask.bool()] if mask.shape == inputs.shape[:-1] else inputs


def _moment(
    model: nn.Module,
    layers: Sequence[QuantizedWeight],
    batches: Sequence[Any],
    run: Callable[[nn.Module, Any], object],
    replay: Replay,
) -> tuple[Tensor, int]:
    """The second moment of the first layer's inputs, and how many layers, with it and next to it, have these inputs.

    Query, key and value share theirs, so that one pass over the examples does for all
    three.
    """
    first = layers[0]
    columns = to_rows(first.float_weight.detach(), first.kind).shape[1]
    device = first.float_weight.device
    moment = torch.zeros(columns, columns, dtype=torch.float32, device=device)
    padding = _Padding()
    shared: Tensor | None = None
    sharing = {first.module}

    def add(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        nonlocal shared
        if shared is not None:
            raise _StopForward
        shared = inputs = input_of(args, kwargs)
        replay.check(inputs)
        replay.note_change()
        inputs = padding.left_out(inputs)
        inputs = inputs.flatten(0, -2).float()
        moment.addmm_(inputs.t(), inputs)

    def note(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if shared is None:
            replay.note_change()
            return
        if input_of(args, kwargs) is not shared:
            raise _StopForward
        sharing.add(module)

    def stop(*_: Any) -> None:
        raise _StopForward

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            # Sentence Transformers calls no hook of the model inside, an encoder and a decoder have masks of their own.
            if module is model or isinstance(module, PreTrainedModel):
                hooks.enter_context(
                    module.register_forward_pre_hook(padding.note, with_kwargs=True)
                )
        for layer, watch in zip(layers, (add, *[note] * len(layers[1:])), strict=True):
            hooks.enter_context(
                layer.module.register_forward_pre_hook(watch, with_kwargs=True)
            )
        # A pass that calls none of them ends before the loss.
        hooks.enter_context(model.register_forward_hook(stop))
        for index, batch in enumerate(batches):
            shared = None
            with contextlib.suppress(_StopForward), replay.on_batch(index):
                # Some losses pop the labels from their batch.
                run(model, copy.copy(batch))
    if is_distributed():
        dist.all_reduce(moment)
    own = [layer.module in sharing for layer in layers]
    return moment, own.index(False) if False in own else len(own)


def _round(layer: QuantizedWeight, moment: Tensor) -> None:
    """Round a weight by the second moment of its layer's inputs; a layer that was never called keeps it.

    Raises:
        MoQError: The inputs are not finite.
    """
    if not moment.any():
        return
    if not moment.isfinite().all():
        raise MoQError(
            f"{layer.moq.config.spell('gptq')}: the inputs of {layer.moq.name} hold NaN or Inf"
        )
    weight = layer.float_weight
    matrix = to_rows(weight.detach(), layer.kind)
    rounded = quantizer.gptq(matrix, moment, layer.moq.bits, layer.moq.grid)
    weight.copy_(from_rows(rounded, layer.kind, weight.shape))
    layer.set_bits(layer.moq.bits)
    if layer.moq.trained is not None:
        layer.moq.trained.is_settled = True
    layer.invalidate()
