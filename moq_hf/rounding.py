"""`quantize_model`: quantizes a finished model at its target bits, to nearest or by examples."""

import functools
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import recursively_apply
from torch import nn
from tqdm.auto import tqdm

from .config import MoQConfig
from .errors import MoQError, explained, shortened
from .forward_pass import makes_state
from .inputs import InputObserver, input_of, update_ranges
from .model.convert import check_finite, dequantize_model, prepare_model
from .model.found import take_found
from .model.inventory import Inventory
from .model.sizes import ModelSizes
from .processes import is_first_process, is_gathered_per_pass
from .quantized_weight import QuantizedWeight, inputs_of
from .schedule import FLOAT_BITS
from .training.gptq import can_round, round_weights
from .training.measuring import eager, evaluating
from .training.messages import summary
from .training.samples import Batch, Examples, batches_for, kind_of_examples, rows_of

logger = logging.getLogger(__name__)


def quantize_model(
    model: nn.Module,
    config: MoQConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    inputs: Examples | None = None,
    **keywords: Any,
) -> nn.Module:
    """Quantize the linear layers of `model`, and whatever else the config names, at their target bits.

    Changes the model in place, and prints what is quantized and what stays in float.
    `start_bits` is for a Trainer, which lowers the bits as it trains. Layers that the
    config leaves out are plain float layers afterwards, even if an earlier call quantized
    them. With `enabled: false` that is all of them.

    With `gptq`, linear layers, including frozen ones, are rounded by GPTQ for their
    inputs in as many examples of `inputs`, and the float weights become the rounded ones.
    With static `activations`, the range of a layer's inputs is the widest of the batches
    in `inputs`, and with a `window` their mean; without `inputs` it is that of each call,
    until training sets it.

    With `train="scales"` the codes stay from then on, and all parameters are frozen except
    the scales, which are added to the model; see `trained_scales`.

    In a loop without a callback, each call of `model.train()` counts as an optimizer
    step, as before each step of a Trainer: stochastic rounding draws new numbers, ranges
    of inputs are updated, and every `scale_refresh` steps the clipping ratios are
    searched again. `load_state_dict` searches them too, and so does calling this again.

    Args:
        model: Any module.
        config: A preset's name, a `MoQConfig`, a mapping or the path of a JSON file;
            None takes the keywords alone.
        inputs: Examples for `gptq` and for static `activations`: a batch as
            the model's forward pass takes it, or an iterable of batches, a `DataLoader`
            for instance, of which `gptq` reads no more than it needs. A model of
            Sentence Transformers takes texts too, a `CrossEncoder` pairs of texts, or
            what its `preprocess` makes of them.
        **keywords: Those of `MoQConfig`, which override what `config` says.

    Returns:
        The model.

    Raises:
        MoQError: There is nothing to quantize, a budget (under which only training can
            choose bits), a teacher, a name in `modules_to_not_convert` that matches
            nothing, groups that do not divide a layer's weight, weights sharded by FSDP1
            or tensor parallelism, NaN or Inf in a weight, `gptq` without enough examples
            or without a linear layer to round, or `inputs` that the config does not need
            or the model cannot answer. The model is then a float one.
        MoQConfigError: The config is wrong.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> layer = quantize_model(model, bits=2, modules_to_not_convert=["1"])[0]  # doctest: +ELLIPSIS
    moq_hf: 1 linear layer goes to 2 bits; quantized: ...
    >>> len(layer.quantized_weight()[0].unique()) <= 4
    True
    """
    config = MoQConfig.load(config, **keywords)
    if config.budget is not None:
        raise MoQError(
            f"{config.spell('bits')}: bits under a budget are chosen while a Trainer trains; give a number"
        )
    if config.distillation.teacher is not None:
        raise MoQError(
            "distillation.teacher: quantize_model trains nothing that could follow it: leave it out, or train with "
            "MoQTrainer"
        )
    batches = _batches(model, inputs, config) if config.enabled else []
    inventory, config = take_found(model, config)
    layers, embeddings = prepare_model(inventory, config)
    try:
        for name, layer in layers.items():
            layer.set_bits(config.of(name).targets[0])
        for table in embeddings.values():
            table.moq.bits = inventory.table_bits or FLOAT_BITS
        check_finite({**layers, **embeddings})
        if batches:
            _learn_from(batches, inventory, layers, config)
    except Exception:
        dequantize_model(model, weights="float")
        raise
    sizes = ModelSizes(inventory, {**layers, **embeddings})
    if layers and is_first_process():
        text = summary(inventory, config, sizes)
        if _has_ranges(config) and not batches:
            text += "; the ranges of inputs are not known yet: give inputs=, or train"
        tqdm.write(f"moq_hf: {text}")
    for note in (sizes.at_full_size(config), sizes.lacks(config)):
        if note is not None:
            logger.warning("moq_hf: %s", note)
    return model


def _batches(
    model: nn.Module, inputs: Examples | None, config: MoQConfig
) -> list[Batch]:
    """The batches that the config needs.

    Raises:
        MoQError: It needs more, or none at all; or they are not batches.
    """
    wanted = config.gptq
    if inputs is None:
        if wanted:
            raise MoQError(
                f"{config.spell('gptq')}: GPTQ needs examples: give {wanted} of them to quantize_model as inputs=, "
                f"{kind_of_examples(model)}, or leave gptq out"
            )
        return []
    if not wanted and not _has_ranges(config):
        raise MoQError(
            f"inputs: nothing uses them: they are for gptq and for static {config.spell('activations')}, and "
            "the config has neither"
        )
    batches = batches_for(model, inputs, wanted or math.inf)
    count = sum(map(rows_of, batches))
    if count < max(wanted, 1):
        less = f", or set gptq to {count}" if count else ""
        raise MoQError(
            f"inputs hold {count} examples, and {config.spell('gptq')} asks for {wanted}: give as many{less}"
            if wanted
            else "inputs hold no example"
        )
    return batches


def _has_ranges(config: MoQConfig) -> bool:
    grids = [section.grid for section in config.activation_sections]
    return any(grid is not None and grid.scale == "static" for grid in grids)


@makes_state
def _learn_from(
    batches: list[Batch],
    inventory: Inventory,
    layers: Mapping[str, QuantizedWeight],
    config: MoQConfig,
) -> None:
    """Round weights, and set the ranges of inputs, by the inputs of the layers in these batches.

    Raises:
        MoQError: The model cannot answer them, or GPTQ can round no weight.
    """
    model = inventory.model
    device = next(model.parameters()).device

    def run(model: nn.Module, batch: Batch) -> None:
        model(**recursively_apply(lambda tensor: tensor.to(device), dict(batch)))

    def run_all() -> None:
        with explained(
            f"inputs: the model cannot answer them; give {kind_of_examples(model)}"
        ):
            for batch in batches:
                run(model, batch)
                # With a window each batch is a step.
                update_ranges(windowed)

    observers = {
        name: own
        for name, own in inputs_of(layers).items()
        if own.grid.scale == "static"
    }
    windowed = [own for own in observers.values() if own.grid.window is not None]
    with evaluating(model), eager():
        if config.gptq:
            rounded = can_round(layers.values())
            if not rounded or any(
                is_gathered_per_pass(layer.float_weight) for layer in rounded
            ):
                raise MoQError(
                    f"{config.spell('gptq')}: it rounds linear layers whose weights are in this process, and there are "
                    "none; leave gptq out"
                )
            # Any fault of a batch is found before a weight is changed.
            run_all()
            round_weights(model, rounded, batches, run)
        if observers:
            handles = [
                module.register_forward_pre_hook(
                    functools.partial(_observe, own), with_kwargs=True
                )
                for name, own in observers.items()
                for module in [layers[name].module, *_sharing(inventory, name)]
            ]
            try:
                run_all()
            finally:
                for handle in handles:
                    handle.remove()
            update_ranges(observers.values())
            unseen = [name for name, own in observers.items() if own.range is None]
            if unseen:
                within = any(observers[name].grid.percentile < 100 for name in unseen)
                rare = " that the percentile does not leave out" if within else ""
                raise MoQError(
                    f"inputs: {shortened(unseen)} got no number other than 0, NaN and Inf from them{rare}, so their "
                    "ranges are not known: give other examples, or if the model uses their weights without calling "
                    "these layers, add them to modules_to_not_convert"
                )


def _sharing(inventory: Inventory, name: str) -> list[nn.Module]:
    """The other linear layers that have the weight of one, and with it the range of its inputs."""
    tied = [other for other, owner in inventory.tied.items() if owner == name]
    modules = [inventory.modules[other] for other in tied]
    return [module for module in modules if not isinstance(module, nn.Embedding)]


def _observe(
    observer: InputObserver,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    observer.observe(input_of(args, kwargs))
