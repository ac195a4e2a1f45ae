"""Make the layers of a model quantized ones, and plain ones again."""

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..errors import MoQError, check_choice
from ..grid import FP4
from ..inputs import inputs_out_of_reach, new_inputs
from ..layer_state import LayerState
from ..lora import merge_adapters
from ..names import named_modules, unwrapped
from ..processes import device_of, largest_over_ranks, local_part, sharded_as
from ..quant_experts import make_quantized, quantized_in
from ..quant_linear import QuantEmbedding, QuantLayer, quant_class
from ..quantizer import RoundingSeed
from ..schedule import FLOAT_BITS
from ..seams.transformers import unpack
from ..weight_matrix import parameter_of
from .inventory import Inventory, grid_of, is_packed
from .selection import take_inventory


def quantize_model(
    model: nn.Module, config: MoQConfig | Mapping[str, Any] | str
) -> nn.Module:
    """Make the linear layers of `model`, and what else the config names, quantized ones, at their target bits.

    Changes the model in place. `start_bits` is for a Trainer, which lowers the bits as
    it trains. Layers that the config leaves out are plain float layers afterwards, also
    if an earlier call quantized them. With `enabled: false` that is all of them.

    In a loop without a callback each call of `model.train()` counts as an optimizer
    step, as before each step of a Trainer: stochastic rounding draws anew, ranges of
    inputs take over what they saw, and every `scale_refresh` steps the clipping ratios
    are searched again. `load_state_dict` searches them too, and so does calling this
    once more.

    Args:
        model: Any module.
        config: A preset's name, a `MoQConfig`, a mapping or the path of a JSON file.

    Returns:
        The model.

    Raises:
        MoQError: Nothing to quantize, a budget (which only training can choose bits
            for), a name in `modules_to_not_convert` that matches nothing, groups that
            do not divide a layer's weight, weights that FSDP1 or tensor parallelism
            took apart, or NaN or Inf in a weight. The model is a float one then.
        MoQConfigError: The config is wrong.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> config = {"quantize_bits": {"target_bits": 2}, "modules_to_not_convert": ["1"]}
    >>> layer = quantize_model(model, config)[0]
    >>> len(layer.quantized_weight()[0].unique()) <= 4
    True
    """
    config = MoQConfig.load(config)
    if config.budget is not None:
        raise MoQError(
            "quantize_bits.target_bits: bits under a budget are chosen while a Trainer trains; give a number"
        )
    inventory = take_inventory(model, config)
    layers, embeddings = prepare_model(inventory, config)
    for name, layer in layers.items():
        layer.set_bits(config.of(name).targets[0])
    for table in embeddings.values():
        table.moq.bits = inventory.table_bits or FLOAT_BITS
    try:
        check_finite({**layers, **embeddings})
    except MoQError:
        dequantize_model(model, weights="float")
        raise
    return model


def dequantize_model(
    model: nn.Module, *, weights: Literal["quantized", "float"] = "quantized"
) -> nn.Module:
    """Make every quantized layer of `model` a plain one again, in place.

    Does it too for a model that `from_pretrained` loaded from a packed checkpoint, so
    that it can be trained on.

    Args:
        model: Any module.
        weights: "quantized" writes what the forward pass used into the weights, so that
            the model computes the same but for inputs, which nothing rounds any more;
            "float" leaves the float weights that were trained.

    Returns:
        The model.

    Raises:
        MoQError: `weights` is neither, or the model has no quantized layer.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> before = model[0].weight.detach().clone()
    >>> model = quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    >>> torch.equal(dequantize_model(model, weights="float")[0].weight, before)
    True
    """
    check_choice("weights", weights, ("quantized", "float"))
    given = model
    model = unwrapped(model)
    if is_packed(model):
        unpack(model)
        return given
    layers = quantized_layers(model)
    if not layers:
        raise MoQError(
            "the model has no quantized layer: its weights are floats, which can be trained on as they are"
        )
    written: set[int] = set()
    for layer in layers.values():
        weight = layer.float_weight
        # Layers may share it, and what is quantized twice may be something else.
        if weights == "quantized" and not weight.is_meta and id(weight) not in written:
            written.add(id(weight))
            with torch.no_grad():
                weight.copy_(sharded_as(weight, layer.quantized_copy(weight.dtype)))
        layer.release()
    merge_adapters(model, False, adopts=weights == "quantized")
    return given


def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """The quantized layers, tables, and experts by the names of their parameters, each once, in model order."""
    layers: dict[str, QuantLayer] = {}
    for name, module in named_modules(model):
        layers |= quantized_in(name, module)
    return layers


def quant_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """As `quantized_layers`, without the embedding tables."""
    layers = quantized_layers(model).items()
    return {name: x for name, x in layers if not isinstance(x, QuantEmbedding)}


def is_quantized(model: nn.Module) -> bool:
    """Whether any of a model's modules computes with a quantized weight now."""
    layers = quantized_layers(model).values()
    return any(layer.moq.bits != FLOAT_BITS for layer in layers)


def prepare_model(
    inventory: Inventory, config: MoQConfig
) -> tuple[dict[str, QuantLayer], dict[str, QuantEmbedding]]:
    """Make the chosen layers quantized ones, at 32 bits for now, and all others plain ones.

    Nothing that an earlier run set on a layer is left.

    Returns:
        The layers of the schedule, experts among them, and the embedding tables, by
        name.
    """
    weights = list(inventory.weights())
    kept = {*inventory.tied, *(name for name, *_ in weights)}
    for name, layer in quantized_layers(inventory.model).items():
        if name not in kept:
            layer.release()
    experts: dict[nn.Module, dict[str, LayerState]] = {}
    for index, (name, module, parameter, kind) in enumerate(weights):
        grid = grid_of(module, config.of(name), parameter, inventory.table_bits)
        seed = RoundingSeed(config.seed, index)
        state = LayerState(grid, config, kind, seed=seed, name=name)
        if name in inventory.experts:
            experts.setdefault(module, {})[parameter] = state
            continue
        layer = _quantized_layer(module, state)
        rounded = config.activations.grid
        if rounded is not None and kind in ("linear", "conv1d"):
            rows, columns = layer.matrix_shape
            scales = grid.shape(rows, columns)[1]
            state.inputs = new_inputs(
                rounded.beside(columns, scales), layer.float_weight
            )
    modules: Mapping[str, Any] = inventory.modules
    for name, owner in inventory.tied.items():
        # Layers that share a weight share its state.
        _quantized_layer(modules[name], modules[owner].moq)
    for module, states in experts.items():
        make_quantized(module, states)
    merge_adapters(inventory.model, inventory.merged)
    quantized: Any = quantized_layers(inventory.model)
    for layer in quantized.values():
        layer.invalidate()
    layers = {name: quantized[name] for name in inventory.scheduled}
    return layers, {name: quantized[name] for name in inventory.embeddings}


def _quantized_layer(module: nn.Module, state: LayerState) -> QuantLayer:
    # The state first: another thread may be evaluating the model.
    layer = cast(QuantLayer, module)
    layer.moq = state
    module.__class__ = quant_class(type(module))
    return layer


def check_finite(layers: Mapping[str, QuantLayer], *, gather: bool = False) -> None:
    """Stop if a quantized weight holds NaN, Inf or what its format cannot, with a single wait for the device.

    Args:
        layers: By name.
        gather: Check whole weights, so that all processes must call this; otherwise
            check the parts that this process holds.

    Raises:
        MoQError: Names the parameters.
    """
    flags: dict[str, Tensor] = {}
    for name, layer in layers.items():
        seen = layer.whole_weight() if gather else local_part(layer.float_weight)
        if layer.moq.bits == FLOAT_BITS or seen.is_meta:
            continue
        flags[name] = seen.isfinite().all()
        fp4 = FP4.get(layer.moq.grid.format)
        if fp4 is not None:
            flags[name] &= (seen.abs() <= fp4.largest).all()
    if not flags:
        return
    device = next(iter(flags.values())).device
    fine = torch.stack([flag.to(device) for flag in flags.values()]).tolist()
    _refuse([layers[name] for name, each in zip(flags, fine, strict=True) if not each])


def check_scales(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a scale of the last forward pass is not finite: `check_finite` a step later, and for almost nothing.

    Raises:
        MoQError: Names the parameters.
    """
    found: dict[torch.device, list[tuple[QuantLayer, Tensor]]] = {}
    for layer in layers.values():
        # Each is checked once, and is not kept for the next step.
        scale, layer.moq.scale = layer.moq.scale, None
        if scale is not None and not scale.is_meta and layer.moq.bits != FLOAT_BITS:
            found.setdefault(scale.device, []).append((layer, scale))
    for own in found.values():
        # A GPU launches a few kernels for all of them, and not some for each.
        if not torch.cat([scale.flatten() for _, scale in own]).isfinite().all():
            _refuse([layer for layer, scale in own if not scale.isfinite().all()])


def _refuse(wrong: list[QuantLayer]) -> None:
    if not wrong:
        return
    names = ", ".join(parameter_of(layer.moq.name, layer.kind) for layer in wrong)
    hint = ""
    if any(layer.moq.grid.format == "nvfp4" for layer in wrong):
        hint = f", or a weight is beyond {FP4['nvfp4'].largest:g}, the most that nvfp4 holds and mxfp4 does not mind"
    raise MoQError(
        f"NaN or Inf in {names}: training has diverged or the checkpoint is damaged{hint}"
    )


def check_bypassed_weights(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a model used a float weight, or inputs that are to be rounded, without the quantized layer.

    In a forward pass `layer.weight` is the quantized weight. A parameter that was used
    another way (from `named_parameters()`, from `_parameters`) has a gradient although
    its layer was never used. Inputs are rounded where the layer is called, which a
    model that multiplies with `layer.weight` does not do.

    Call it in all processes, with gradients.

    Raises:
        MoQError: Names the layers.
    """
    used = {id(layer.float_weight) for layer in layers.values() if layer.moq.used}
    flags = []
    for layer in layers.values():
        is_used = id(layer.float_weight) in used
        grad = layer.float_weight.grad
        inputs = layer.moq.inputs
        flags.append(
            [
                is_used,
                not is_used
                and grad is not None
                and bool((local_part(grad) != 0).any()),
                inputs is None or inputs.called,
            ]
        )
    first = next(iter(layers.values())).float_weight
    # Another process, with another part of the batch, may have used the layer.
    flags_of_all_ranks = largest_over_ranks(
        torch.tensor(flags, dtype=torch.float32, device=device_of(first))
    ).tolist()
    found = list(zip(layers, flags_of_all_ranks, strict=True))
    wrong = [name for name, (is_used, has_grad, _) in found if has_grad and not is_used]
    not_called = [name for name, (is_used, _, called) in found if is_used > called]
    if wrong:
        named = ", ".join(f'"{name}"' for name in wrong)
        raise MoQError(
            f"the weights of these layers are used without the layers, past their quantization: {', '.join(wrong)}; "
            f"leave them in full precision: add {named} to modules_to_not_convert"
        )
    if not_called:
        raise MoQError(inputs_out_of_reach(not_called))
