"""Turns the layers of a model into quantized ones, and back into plain ones."""

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import MoQConfig
from ..errors import MoQError, check_choice
from ..forward_pass import PassWeights, makes_state
from ..grid import FP4
from ..inputs import inputs_out_of_reach, new_inputs
from ..layer_state import LayerState
from ..lora import merge_adapters
from ..names import (
    adapted_layers,
    named_modules,
    pretrained,
    unwrapped,
    without_peft,
)
from ..processes import (
    device_of,
    is_gathered_per_pass,
    largest_over_ranks,
    local_part,
    shape_of,
    sharded_as,
)
from ..quant_linear import make_quantized, quantized_in
from ..quantized_weight import QuantizedWeight
from ..quantizer import RoundingSeed
from ..schedule import FLOAT_BITS
from ..seams.transformers import (
    at_state_dict,
    callers,
    has_adapter,
    mixed_precision,
    remove_forward_hooks,
    saves_checkpoint,
    unpack,
)
from ..text import dtype_name
from ..trained_scales import TrainedScales, freeze_all, unfreeze
from ..weight_matrix import matrix_shape, parameter_of
from .inventory import Inventory, grid_of, is_packed

logger = logging.getLogger(__name__)


@makes_state
def dequantize_model(
    model: nn.Module, *, weights: Literal["quantized", "float"] = "quantized"
) -> nn.Module:
    """Turn every quantized layer of `model` back into a plain one, in place.

    This also works for a model that `from_pretrained` loaded from a delivered folder, so
    that it can be trained further, or PEFT can put adapters on it. A model whose weights
    are floats, as in the layouts "unpacked" and "floats", stays as it is.

    Args:
        model: Any module.
        weights: "quantized" writes into the weights what the forward pass used, so that
            the model computes the same, except that nothing rounds inputs any more;
            "float" leaves the float weights that were trained, or that were frozen while
            scales were.

    Returns:
        The model.

    Raises:
        MoQError: `weights` is neither of these, the model has the layout "gemma", or
            NaN or Inf would be written.

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> before = model[0].weight.detach().clone()
    >>> model = quantize_model(model, bits=4)  # doctest: +ELLIPSIS
    moq_hf: 1 linear layer goes to 4 bits; quantized: ...
    >>> torch.equal(dequantize_model(model, weights="float")[0].weight, before)
    True
    """
    check_choice("weights", weights, ("quantized", "float"))
    given = model
    model = unwrapped(model)
    if is_packed(model):
        unpack(pretrained(model), trains=not adapted_layers(model))
        return given
    _tell_of_saves_around(model, False)
    layers = quantized_layers(model)
    if weights == "quantized":
        check_finite(layers, gather=True)
    written: set[int] = set()
    for layer in layers.values():
        weight = layer.float_weight
        # Layers may share it, and quantizing it twice may give something else.
        if weights == "quantized" and not weight.is_meta and id(weight) not in written:
            written.add(id(weight))
            with torch.no_grad():
                weight.copy_(sharded_as(weight, layer.quantized_copy(weight.dtype)))
        layer.release()
    merge_adapters(model, False, adopts=weights == "quantized")
    unfreeze(model)
    _attach(model, None)
    return given


def quantized_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The quantized layers, tables and experts, by the names of their parameters, each once, in the model's order."""
    layers: dict[str, QuantizedWeight] = {}
    for name, module in named_modules(model):
        layers |= quantized_in(name, module)
    return layers


def quant_layers(model: nn.Module) -> dict[str, QuantizedWeight]:
    """As `quantized_layers`, without the embedding tables."""
    layers = quantized_layers(model).items()
    return {name: x for name, x in layers if not isinstance(x.module, nn.Embedding)}


def is_quantized(model: nn.Module) -> bool:
    """True if any module of a model computes with a quantized weight now."""
    layers = quantized_layers(model).values()
    return any(layer.moq.bits != FLOAT_BITS for layer in layers)


@makes_state
def prepare_model(
    inventory: Inventory, config: MoQConfig
) -> tuple[dict[str, QuantizedWeight], dict[str, QuantizedWeight]]:
    """Turn the chosen layers into quantized ones, at 32 bits for now, and all others into plain ones.

    Nothing remains of what an earlier run set on a layer, except scales that are trained
    again. When scales are trained, everything else is frozen as they are added.

    Returns:
        The layers of the schedule, experts among them, and the embedding tables, by
        name.
    """
    weights = list(inventory.weights())
    kept = {*inventory.tied, *(name for name, *_ in weights)}
    trained = _scales_to_train(inventory.model, config)
    for name, layer in quantized_layers(inventory.model).items():
        # If a quantized model contains this one, it must look for its layers again.
        layer.moq.passes.changes += 1
        if name not in kept:
            layer.release()
    states: dict[nn.Module, dict[str, LayerState]] = {}
    passes = PassWeights()
    for index, (name, module, parameter, kind) in enumerate(weights):
        own = config.of(name)
        grid = grid_of(module, own, parameter, inventory.table_bits)
        weight = cast(Tensor, module._parameters[parameter])
        state = LayerState(
            grid,
            config,
            kind,
            seed=RoundingSeed(config.seed, index),
            name=name,
            passes=passes,
            read_dtype=mixed_precision() or weight.dtype,
            found=inventory.found.get(name),
        )
        rounded = config.input_grid_of(name, inventory.wide)
        if rounded is not None and kind in ("linear", "conv1d"):
            rows, columns = matrix_shape(shape_of(weight), kind)
            scales = grid.shape(rows, columns)[1]
            state.inputs = new_inputs(rounded.beside(columns, scales), weight)
        if config.train == "scales" and kind != "embedding":
            before = trained.get((module, parameter))
            state.trained = before or TrainedScales(module, parameter)
            state.trained.add(grid.shape(*matrix_shape(shape_of(weight), kind)))
        states.setdefault(module, {})[parameter] = state
    for module, made in states.items():
        make_quantized(module, made)
    for name, owner in inventory.tied.items():
        # Layers that share a weight share its state.
        made = states[inventory.modules[owner]]
        made["weight"].is_tied = True
        make_quantized(inventory.modules[name], made, follows=True)
    merge_adapters(inventory.model, inventory.merged)
    quantized: Any = quantized_layers(inventory.model)
    _tell_of_saves_around(inventory.model, bool(quantized))
    for layer in quantized.values():
        layer.invalidate()
    _attach(inventory.model, passes if quantized else None)
    layers = {name: quantized[name] for name in inventory.scheduled}
    return layers, {name: quantized[name] for name in inventory.embeddings}


def _scales_to_train(
    model: nn.Module, config: MoQConfig
) -> dict[tuple[nn.Module, str], TrainedScales]:
    """Find the scales that an earlier preparation trains, to go on with them, or remove them; freeze all else at first.

    Returns:
        Those that go on, by the modules and names of their weights.
    """
    states = [layer.moq for layer in quantized_layers(model).values()]
    every = [state.trained for state in states if state.trained is not None]
    found = {(scales.module, scales.attribute): scales for scales in every}
    if config.train == "scales" and config.enabled:
        if not found:
            freeze_all(model)
        return found
    for scales in found.values():
        scales.remove()
    unfreeze(model)
    return {}


class WatchedPasses:
    """Tells `PassWeights` when a forward pass of a module begins and when it ends, by the module's hooks.

    Args:
        module: A prepared model, or a model of transformers inside it, which may be
            called alone.
        passes: Those that the model's layers share.
    """

    def __init__(self, module: nn.Module, passes: PassWeights) -> None:
        self.module = module
        self.passes = passes
        self._find_blocks()
        # After a pickle is loaded, the handles keep other hooks from taking their ids.
        self.handles = (
            module.register_forward_pre_hook(self.begin, prepend=True),
            module.register_forward_hook(self.end, always_call=True),
        )

    def _find_blocks(self) -> None:
        layers = quant_layers(self.module).items()
        # A part may have been quantized separately.
        own = {name: x for name, x in layers if x.moq.passes is self.passes}
        names = Inventory.of(self.module).blocks(own).values()
        self._blocks = [[own[name] for name in block] for block in names]
        self._changes = self.passes.changes

    def __getstate__(self) -> dict[str, Any]:
        # A part of a model is copied without the layers around it.
        return {**vars(self), "_blocks": [], "_changes": -1}

    def begin(self, module: nn.Module, args: Any) -> None:
        """As a forward pre-hook."""
        if module is not self.module:
            # A replica under DataParallel has its own weights.
            return
        is_stale = self._changes != self.passes.changes
        if is_stale and not torch.compiler.is_compiling():
            self._find_blocks()
        self.passes.begin(module, self._blocks)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """As a forward hook."""
        self.passes.end(module, has_failed=output is None)


class OwnMethod:
    """A method that a model with quantized layers has in place of its class's.

    It is set on the instance, so that the model keeps its class, and it is an object
    rather than a function, so that copies and pickles of the model get their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class HeldGenerate(OwnMethod):
    """The `generate` of a model with quantized layers: quantizes each weight once for all tokens."""

    @property
    def __func__(self) -> Any:
        return type(self.model).generate  # type: ignore[attr-defined]

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the `generate` of the model's class."""
        with _holding(self.model):
            return self.__func__(self.model, *args, **kwargs)


class FloatSaves(OwnMethod):
    """The `save_pretrained` of a model with quantized layers: says that what it writes are float weights."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the `save_pretrained` of the model's class."""
        model: Any = self.model
        result = type(model).save_pretrained(model, *args, **kwargs)
        is_main_process = kwargs.get("is_main_process", True)
        if is_main_process and is_quantized(model) and not saves_checkpoint():
            is_adapted = without_peft(model) is not model or has_adapter(model)
            logger.warning(
                "moq_hf: save_pretrained wrote the %s, which do not answer as the quantized model in memory does; "
                "save_quantized(model, folder) writes that one, as a run with MoQ does at its end",
                "adapters alone" if is_adapted else "float weights",
            )
        return result


def tells_of_saves(model: nn.Module) -> bool:
    """True if a model's `save_pretrained` warns of float weights; models of other classes are saved by the Trainer."""
    return "save_pretrained" in vars(pretrained(model))


def _attach(model: nn.Module, passes: PassWeights | None) -> None:
    """Give a model, and each model inside it, the hooks and methods that quantized layers need.

    Args:
        model: A model that was prepared, or that is a float one again.
        passes: Is told of its passes, in place of the one of an earlier run; None only
            removes hooks and methods.
    """
    for module in model.modules():
        remove_forward_hooks(module, WatchedPasses)
        attributes = vars(module)
        if isinstance(attributes.get("generate"), HeldGenerate):
            del attributes["generate"]
        saves = FloatSaves
        if isinstance(attributes.get("save_pretrained"), FloatSaves):
            # A model that was loaded with a config has a subclass of it, and keeps that.
            saves = type(attributes.pop("save_pretrained"))
        if passes is None:
            continue
        is_model = isinstance(module, PreTrainedModel)
        if is_model or module is model:
            WatchedPasses(module, passes)
        if is_model and cast(Any, module).can_generate():
            attributes.setdefault("generate", HeldGenerate(module))
        if is_model or without_peft(module) is not module:
            attributes.setdefault("save_pretrained", saves(module))


@contextlib.contextmanager
def hold_quantized(model: nn.Module) -> Iterator[None]:
    """Keep quantized weights from one pass without gradients to the next, in a loop that changes no weight.

    Otherwise each pass quantizes its weights again, since not every change of a weight
    can be seen: neither a fused optimizer nor a collective operation leaves a trace. A
    Trainer's evaluation and `generate` keep them without this.

    Args:
        model: A model with quantized layers.

    Raises:
        MoQError: It has none.

    >>> from moq_hf import hold_quantized, quantize_model
    >>> model = quantize_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), bits=4)  # doctest: +ELLIPSIS
    moq_hf: 1 linear layer goes to 4 bits; quantized: ...
    >>> with torch.no_grad(), hold_quantized(model):
    ...     answers = [model(torch.ones(1, 8)) for _ in range(3)]
    """
    model = unwrapped(model)
    if not quantized_layers(model):
        raise MoQError(
            "hold_quantized: no layer of the model is quantized, so there is nothing to hold"
        )
    with _holding(model):
        yield


@contextlib.contextmanager
def _holding(model: nn.Module) -> Iterator[None]:
    layers = quantized_layers(model).values()
    with contextlib.ExitStack() as stack:
        for passes in {layer.moq.passes for layer in layers}:
            stack.enter_context(passes.hold())
        yield


def check_finite(
    layers: Mapping[str, QuantizedWeight], *, gather: bool = False
) -> None:
    """Check that no weight holds NaN, Inf or more than its format can, or becomes Inf on its grid.

    It waits for the device once.

    Args:
        layers: The layers, by name.
        gather: Check whole weights, so that all processes must call this; otherwise
            check the parts that this process holds.

    Raises:
        MoQError: Names the parameters.
    """
    found: list[tuple[QuantizedWeight, Tensor]] = []
    for layer in layers.values():
        seen = layer.whole_weight() if gather else local_part(layer.float_weight)
        if layer.moq.trained is not None:
            seen = layer.moq.trained.parameter.detach()
        if layer.moq.bits == FLOAT_BITS or seen.is_meta or not seen.numel():
            continue
        found.append((layer, torch.stack(seen.aminmax()).abs().amax().float()))
    if not found:
        return
    device = found[0][1].device
    sizes = torch.stack([size.to(device) for _, size in found]).tolist()
    wrong: list[QuantizedWeight] = []
    near: list[tuple[QuantizedWeight, torch.dtype]] = []
    for (layer, _), size in zip(found, sizes, strict=True):
        dtype = layer.moq.handed_dtype or layer.float_weight.dtype
        # No grid has codes beyond twice the largest weight.
        is_near = 2 * size > torch.finfo(dtype).max
        if not size <= _most(layer.moq):
            wrong.append(layer)
        elif is_near and (gather or not is_gathered_per_pass(layer.float_weight)):
            near.append((layer, dtype))
    _refuse(wrong)
    _check_results(near)


def _most(state: LayerState) -> float:
    fp4 = FP4.get(state.grid.format)
    return sys.float_info.max if fp4 is None else min(fp4.largest, sys.float_info.max)


def check_scales(layers: Mapping[str, QuantizedWeight]) -> None:
    """Check that the weights of the last forward pass were finite: as `check_finite`, a step later, at almost no cost.

    Raises:
        MoQError: Names the parameters.
    """
    by_state = {layer.moq: layer for layer in layers.values()}
    noted: list[tuple[Tensor, dict[LayerState, slice]]] = []
    for passes in {state.passes for state in by_state}:
        noted += passes.scales_of_launches()
    for state in by_state:
        if state.scale is not None and not state.scale.is_meta:
            noted.append((state.scale.flatten(), {state: slice(None)}))
        state.scale = None
    by_device: dict[torch.device, list[tuple[Tensor, dict[LayerState, slice]]]] = {}
    for scales, places in noted:
        by_device.setdefault(scales.device, []).append((scales, places))
    for those in by_device.values():
        # Together, so that a GPU launches few kernels.
        together = torch.cat([scales for scales, _ in those])
        limit = min(_limit(state) for _, places in those for state in places)
        if (together.abs() <= limit).all():
            continue
        found = [
            (by_state[state], scales[place])
            for scales, places in those
            for state, place in places.items()
            if state in by_state and state.bits != FLOAT_BITS and not state.awaits_call
        ]
        _refuse([layer for layer, scale in found if not scale.isfinite().all()])
        near = [x for x, scale in found if scale.abs().amax() > _limit(x.moq)]
        _check_results([(layer, layer.moq.dtype) for layer in near])


def _limit(state: LayerState) -> float:
    """The largest scale with which no weight on the grid becomes Inf."""
    return torch.finfo(state.dtype).max / state.precision.reach


def _refuse(wrong: list[QuantizedWeight]) -> None:
    if not wrong:
        return
    names = ", ".join(parameter_of(layer.moq.name, layer.kind) for layer in wrong)
    hint = ""
    if any(layer.moq.grid.format == "nvfp4" for layer in wrong):
        hint = f", or a weight is beyond {FP4['nvfp4'].largest:g}, the most that nvfp4 holds; mxfp4 has no such limit"
    raise MoQError(
        f"NaN or Inf in {names}: training has diverged or the checkpoint is damaged{hint}"
    )


def _check_results(layers: Iterable[tuple[QuantizedWeight, torch.dtype]]) -> None:
    """Check that quantized weights, each in its dtype, are finite; all processes that share a weight must call this.

    Raises:
        MoQError: Names the parameter.
    """
    for layer, dtype in layers:
        if not layer.quantized_copy(dtype).isfinite().all():
            raise MoQError(beyond(parameter_of(layer.moq.name, layer.kind), dtype))


def beyond(parameter: str, dtype: torch.dtype) -> str:
    """The error for finite weights that become Inf when they are quantized to a dtype."""
    instead = "use bfloat16 or float32, or " if dtype == torch.float16 else ""
    return (
        f"{parameter} has weights so large that on the grid they are beyond {torch.finfo(dtype).max:g}, the "
        f"most that {dtype_name(dtype)} holds, and would be Inf: {instead}name the layer in "
        "modules_to_not_convert"
    )


def check_bypassed_weights(layers: Mapping[str, QuantizedWeight]) -> None:
    """Check that the model used no float weight, nor inputs that should be rounded, without the quantized layer.

    In a forward pass `layer.weight` is the quantized weight. A parameter that was used
    in another way (from `named_parameters()`, from `_parameters`) has a gradient although
    its layer was never used. Inputs are rounded when the layer is called, and a model
    that multiplies by `layer.weight` itself does not call it.

    Call it in all processes, with gradients.

    Raises:
        MoQError: Names the layers.
    """
    used = {id(layer.float_weight) for layer in layers.values() if layer.moq.used}
    flags = []
    for layer in layers.values():
        is_used = id(layer.float_weight) in used
        grad = layer.float_weight.grad
        has_grad = not is_used and grad is not None and (local_part(grad) != 0).any()
        inputs = layer.moq.inputs
        flags.append([is_used, bool(has_grad), inputs is None or inputs.called])
    first = next(iter(layers.values()))
    # Another process, with another part of the batch, may have used the layer.
    flags_of_all_ranks = largest_over_ranks(
        torch.tensor(flags, dtype=torch.float32, device=device_of(first.float_weight))
    ).tolist()
    found = list(zip(layers, flags_of_all_ranks, strict=True))
    wrong = [name for name, (is_used, has_grad, _) in found if has_grad and not is_used]
    not_called = [name for name, (is_used, _, called) in found if is_used > called]
    if wrong:
        named = ", ".join(f'"{name}"' for name in wrong)
        raise MoQError(
            f"the weights of these layers are used without the layers, so not quantized: {', '.join(wrong)}; "
            f"leave them in full precision: add {named} to modules_to_not_convert"
        )
    if not_called:
        key = first.moq.config.spell("activations")
        raise MoQError(inputs_out_of_reach(not_called, key))


def _tell_of_saves_around(model: nn.Module, tells: bool) -> None:
    """Have a model, and none of its parts, warn or no longer warn when a model around it saves its float weights."""
    for module in model.modules():
        at_state_dict(module, _tell_of_save_around, tells and module is model)


def _tell_of_save_around(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn that a model around this one, which was quantized separately, saves its float weights."""
    savers = [owner for name, owner in callers() if name == "save_pretrained"]
    # A quantized model warns itself, and PEFT saves only its adapters.
    is_told = any(
        "save_pretrained" in vars(owner) or without_peft(owner) is not owner
        for owner in savers
    )
    if not prefix or not savers or is_told or saves_checkpoint():
        return
    if is_quantized(module):
        logger.warning(
            "moq_hf: save_pretrained of %s wrote the float weights of %s, which answers differently in memory, where "
            "it is quantized: quantize the whole model, and save_quantized(model, folder) writes it",
            type(savers[0]).__name__,
            prefix.removesuffix("."),
        )
