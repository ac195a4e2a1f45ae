"""`QuantLinear`: a linear layer that computes with a quantized copy of its weight and trains the float one.

`QuantEmbedding` does the same for an embedding table, one scale per row.

A model gets its quantized layers by a change of class, so that parameter objects, state-dict keys, hooks and wrappers
(DDP, FSDP, PEFT, torch.compile) stay as they are. The quantized weight is kept from one optimizer step to the next and
written in place, outside any compiled graph; the gradient passes straight through to the float weight.
"""

import fnmatch
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import cpu_quant, quantizer, triton_quant
from .config import MoQConfig, MoQError, PerChannel, PerGroup, RowBlocks
from .schedule import FLOAT_BITS

_Key = tuple[int, int, torch.device, torch.dtype]


class _StraightThrough(torch.autograd.Function):
    """The quantized weight, with the float weight's gradient.

    Differentiable twice, and by torch.func's grad and vjp. A forward-mode rule would keep Dynamo from tracing it.
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


# Function.apply binds its arguments to it at each call; making it anew takes as long as all the rest.
cast(Any, _StraightThrough.forward).__signature__ = inspect.signature(_StraightThrough.forward)


def _straight_through(weight: Tensor, quantized: Tensor) -> Tensor:
    return cast(Tensor, _StraightThrough.apply(weight, quantized))  # type: ignore[no-untyped-call]


@dataclass
class LayerState:
    """How a layer is quantized now.

    Attributes:
        options: Keyword arguments of `quantizer.fake_quantize` that never change: groups, rounding, seed and so on.
        bits: 1 to 16; 32 is unquantized.
        ratio: Clipping ratio per group, or None for absmax.
        blend: Share of the float weight in the forward pass.
        step: Optimizer steps taken, for stochastic rounding.
        dtype: Of the quantized weight: what the matmul wants under autocast. None is the weight's own.
        plain: Only `quantizer` may compute, no faster path.
        weight: The quantized weight; None exactly if `bits` is 32 (or nothing can be computed: meta device).
        config: What the model was made ready with.
    """

    options: dict[str, Any]
    bits: int = FLOAT_BITS
    ratio: Tensor | None = None
    blend: float = 0.0
    step: int = 0
    dtype: torch.dtype | None = None
    plain: bool = False
    weight: Tensor | None = None
    key: _Key | None = field(default=None, repr=False)
    config: MoQConfig | None = field(default=None, repr=False)


class QuantLayer(nn.Module):
    """What quantized layers share: a float `weight` `[rows, columns]` that is trained and its quantized copy.

    Attributes:
        moq: The layer's `LayerState`.
    """

    moq: LayerState
    weight: Tensor

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """What the forward pass multiplies with: `[out_features, in_features]`, gradient straight through to `weight`.

        Args:
            dtype: Of the activations. Outside autocast a weight kept in another dtype is quantized afresh in its own.
        """
        state = self.moq
        if not torch.compiler.is_compiling():
            if self.__dict__.get("_is_replica", False) or _is_sharded(self.weight):
                # Replicas share the state of the module they were copied from; gathered shards must not be kept.
                return _straight_through(self.weight, self._compute(state.dtype))
            if state.key != self._key():
                self.refresh(in_place=False)
        quantized = state.weight
        if quantized is None:
            return self.weight
        kept_for_autocast = state.dtype is not None and dtype is not None and quantized.dtype != dtype
        if kept_for_autocast and not torch.is_autocast_enabled(quantized.device.type):
            quantized = self._compute(self.weight.dtype)
        return _straight_through(self.weight, quantized)

    def refresh(self, *, in_place: bool = True) -> None:
        """Quantize the weight again; called after each optimizer step.

        Args:
            in_place: Write into the tensor that holds the last result, so that compiled graphs see the new one.
        """
        state = self.moq
        state.key = self._key()
        if state.bits == FLOAT_BITS or self.weight.is_meta or _is_sharded(self.weight):
            state.weight = None
            return
        old = state.weight
        keep = in_place and old is not None and old.device == self.weight.device
        keep = keep and old is not None and old.dtype == (state.dtype or self.weight.dtype)
        state.weight = self._compute(state.dtype, out=old if keep else None)

    def set_bits(self, bits: int, config: MoQConfig) -> None:
        """Change the precision, with the clipping ratios that the config wants there; takes effect with `refresh`."""
        self.moq.bits = bits
        self.moq.ratio = None
        if bits != FLOAT_BITS and quantizer.wants_least_squares(config.scale, bits, config.symmetric):
            options = {key: self.moq.options[key] for key in ("groups", "group_size", "symmetric")}
            search: Any = quantizer if self.moq.plain else cpu_quant
            if kernels_wanted(config, self.weight.device):
                search = triton_quant
            self.moq.ratio = search.least_squares_ratio(self.weight, bits, **options)

    def nonfinite(self) -> Tensor:
        """Whether the weight held NaN or Inf when it was quantized: a bool scalar on its device."""
        if self.moq.weight is None:
            return torch.zeros((), dtype=torch.bool, device=self.weight.device)
        options = self.moq.options
        return quantizer.nonfinite(self.moq.weight, options["groups"], options["group_size"])

    def extra_repr(self) -> str:
        """The linear layer's own line and the bits."""
        bits = "float" if self.moq.bits == FLOAT_BITS else f"bits={self.moq.bits}"
        return f"{super().extra_repr()}, {bits}"

    def _compute(self, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        state = self.moq
        if state.bits == FLOAT_BITS:
            return self.weight.detach()
        # Leaving inference mode makes a result that training can use later.
        with torch.inference_mode(False), torch.no_grad():
            faster: Any = quantizer if state.plain else cpu_quant
            return cast(
                Tensor,
                faster.fake_quantize(
                    self.weight.detach(),
                    state.bits,
                    ratio=state.ratio,
                    blend=state.blend,
                    step=state.step,
                    dtype=dtype,
                    out=out,
                    **state.options,
                ),
            )

    def _key(self) -> _Key:
        # Catches what no hook tells: a changed or replaced weight. Fused optimizers do not bump the version.
        weight = self.weight
        return id(weight), 0 if weight.is_inference() else weight._version, weight.device, weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLayer":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.moq.ratio is not None:
            self.moq.ratio = self.moq.ratio.to(self.weight.device)
        self.refresh(in_place=False)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["moq"] = LayerState(**{**vars(self.moq), "weight": None, "key": None})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _LAYERS.add(self)
        self.refresh()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made for subclasses of nn.Linear have no importable name: the base class stands for them.
        return _new_layer, (base_class(type(self)),), self.__getstate__()


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` with a quantized weight in its forward pass.

    Not constructed: `quantize_model` changes the class of existing layers. `weight` and `bias` remain the float
    parameters that the optimizer trains.

    Attributes:
        moq: The layer's `LayerState`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]` times the quantized weight, plus the bias."""
        return F.linear(input, self.quantized_weight(input.dtype), self.bias)


class QuantEmbedding(QuantLayer, nn.Embedding):
    """`nn.Embedding` with a quantized table in its forward pass, one scale per row; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., embedding_dim]` of the quantized table for the indices `input` `[...]`."""
        return F.embedding(input, self.quantized_weight(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "device_mesh")


_CLASSES: dict[type[nn.Module], type[QuantLayer]] = {nn.Linear: QuantLinear, nn.Embedding: QuantEmbedding}


def quant_class(base: type[nn.Module]) -> type[QuantLayer]:
    """The quantized class for layers of class `base`, made once."""
    if base not in _CLASSES:
        quantized = QuantLinear if issubclass(base, nn.Linear) else QuantEmbedding
        _CLASSES[base] = type(f"Quant{base.__name__}", (quantized, base), {})
    return _CLASSES[base]


def base_class(cls: type[QuantLayer]) -> type[nn.Module]:
    """The class that a layer of class `cls` had before."""
    return cast(type[nn.Module], cls.__bases__[1])


def _new_layer(base: type[nn.Module]) -> QuantLayer:
    cls = quant_class(base)
    return cls.__new__(cls)


# Every quantized layer alive: an optimizer outside a Trainer refreshes those that it owns.
_LAYERS: "weakref.WeakSet[QuantLayer]" = weakref.WeakSet()
_CONTROLLED: "weakref.WeakSet[QuantLayer]" = weakref.WeakSet()


def take_over(layers: Iterable[QuantLayer]) -> None:
    """Leave the refreshing of these layers after each optimizer step to the caller."""
    _CONTROLLED.update(layers)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _LAYERS:
        return
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in list(_LAYERS):
        if id(layer.weight) in owned:
            if layer in _CONTROLLED:
                layer.moq.key = None
            else:
                layer.refresh()


register_optimizer_step_post_hook(_after_optimizer_step)


def quantize_model(model: nn.Module, config: MoQConfig | Mapping[str, Any] | str) -> nn.Module:
    """Make the linear layers of `model` quantized ones, at the config's `start_bits` at once.

    Changes the model in place. Layers that the config leaves out, and those of an earlier call that it does not name
    any more, are plain float layers afterwards. With `enabled: false` that is all of them.

    Args:
        model: Any module.
        config: A `MoQConfig`, a mapping or the path of a JSON file.

    Returns:
        The model.

    Raises:
        MoQError: Nothing to quantize, a name in `modules_to_not_convert` that matches nothing, groups that do not
            divide a layer's weight, or NaN or Inf in a weight. The model is a float one then.
        MoQConfigError: The config is wrong.
    """
    config = MoQConfig.load(config)
    layers = prepare_model(model, config)
    embeddings = quant_embeddings(model)
    for linear in layers.values():
        linear.set_bits(config.start_bits, config)
        linear.refresh()
    for table in embeddings.values():
        table.moq.bits = config.quantize_embeddings or FLOAT_BITS
        table.refresh()
    try:
        check_finite({**layers, **embeddings})
    except MoQError:
        for layer in [*layers.values(), *embeddings.values()]:
            _restore(layer)
        raise
    return model


def dequantize_model(model: nn.Module, *, weights: Literal["quantized", "float"] = "quantized") -> nn.Module:
    """Make every quantized layer of `model` a plain one again, in place.

    Does it too for a model that `from_pretrained` loaded from a packed checkpoint, so that it can be trained on.

    Args:
        model: Any module.
        weights: "quantized" writes what the forward pass used into the weights, so that the model computes the same;
            "float" leaves the float weights that were trained.

    Returns:
        The model.

    Raises:
        MoQError: `weights` is neither, or the model has no quantized layer.
    """
    if weights not in ("quantized", "float"):
        raise MoQError(f'weights must be "quantized" or "float", got {weights!r}')
    if is_packed(model):
        _unpack(model)
        return model
    layers = {**quant_layers(model), **quant_embeddings(model)}
    if not layers:
        raise MoQError("the model has no quantized layer")
    for layer in layers.values():
        if weights == "quantized":
            with torch.no_grad():
                layer.weight.copy_(layer.quantized_weight())
        _restore(layer)
    return model


def quant_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """The quantized layers by their names, each once, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def quant_embeddings(model: nn.Module) -> dict[str, QuantEmbedding]:
    """The quantized embedding tables by their names, each once, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantEmbedding)}


def is_packed(model: nn.Module) -> bool:
    """Whether `from_pretrained` made this model of a packed checkpoint: its layers may have no weights yet."""
    quantizer_of_transformers = getattr(model, "hf_quantizer", None)
    return quantizer_of_transformers is not None and hasattr(quantizer_of_transformers, "compressor")


def _unpack(model: nn.Module) -> None:
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationMetadata, QuantizationStatus

    loader = cast(Any, model).hf_quantizer
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        if module.quantization_status == QuantizationStatus.COMPRESSED:
            decompress_module(module)
        QuantizationMetadata.clear_quantization(module)
        del module.quantization_status
        # What is left of the wrapped forward would hide that of a quantized class.
        module.__dict__.pop("forward", None)
        module.weight = nn.Parameter(cast(Tensor, module.weight).detach())
        module.requires_grad_(True)
    loader.compressor.remove_decompression_hook(model)
    loader.remove_quantization_config(model)


def prepare_model(model: nn.Module, config: MoQConfig) -> dict[str, QuantLinear]:
    """What `quantize_model` does, with every layer still unquantized (32 bits); gives the linear layers by name."""
    if config.enabled and is_packed(model):
        raise MoQError(
            "the model comes from a packed checkpoint: call moq_hf.dequantize_model(model) before training it"
        )
    chosen: dict[str, nn.Module] = {}
    if config.enabled:
        chosen = {**select_layers(model, config), **select_embeddings(model, config)}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        if name not in chosen:
            _restore(layer)
    for index, module in enumerate(chosen.values()):
        if not isinstance(module, QuantLayer):
            module.__class__ = quant_class(type(module))
        layer = cast(QuantLayer, module)
        options = _options(config, index) if isinstance(layer, QuantLinear) else dict(_ROW_OPTIONS)
        layer.moq = LayerState(options=options, config=config, plain=config.kernel is False)
        _CONTROLLED.discard(layer)
        _LAYERS.add(layer)
    return quant_layers(model)


def check_finite(layers: Mapping[str, QuantLayer]) -> None:
    """Stop if a weight held NaN or Inf when it was last quantized; one wait for the device, not one per layer.

    Raises:
        MoQError: Names the parameters.
    """
    if not layers:
        return
    device = next(iter(layers.values())).weight.device
    flags = torch.stack([layer.nonfinite().to(device) for layer in layers.values()])
    if bool(flags.any()):
        _refuse_nonfinite(name for name, flag in zip(layers, flags.tolist(), strict=True) if flag)


def _refuse_nonfinite(layers: Iterable[str]) -> None:
    names = ", ".join(f"{name}.weight" for name in layers)
    raise MoQError(f"NaN or Inf in {names}: training has diverged or the checkpoint is damaged")


def kernels_wanted(config: MoQConfig, device: torch.device) -> bool:
    """Whether the Triton kernels quantize weights on `device`: unless the config forbids it, where they can run."""
    return config.kernel is not False and triton_quant.available(device)


class Refresher:
    """Quantizes many layers after each optimizer step: all in one launch where the kernels run, else one by one.

    Args:
        layers: By name.
        config: Says whether kernels may be used.
    """

    def __init__(self, layers: Mapping[str, QuantLayer], config: MoQConfig) -> None:
        self._layers = dict(layers)
        self._config = config
        self._batches: list[tuple[triton_quant.Batch, list[str]]] = []
        self._single = self._layers
        self._made_for: list[tuple[Any, ...]] = []

    def refresh(self) -> None:
        """Quantize every layer's weight once, from what it is now."""
        if self._identities() != self._made_for:
            self._make_batches()
        for batch, names in self._batches:
            layers = [self._layers[name] for name in names]
            batch.update([layer.moq.step for layer in layers], [layer.moq.blend for layer in layers])
            batch.run()
            for layer in layers:
                layer.moq.key = layer._key()
        fast = []
        for layer in self._single.values():
            if layer.moq.plain or not cpu_quant.applies(layer.weight, layer.moq.dtype or layer.weight.dtype):
                layer.refresh()
            else:
                fast.append(layer)
        cpu_quant.each(QuantLayer.refresh, fast)

    def check_finite(self, *, wait: bool = True) -> None:
        """Stop if a weight held NaN or Inf.

        Args:
            wait: For the device. Otherwise weights that a kernel quantized are judged as they were a step or more ago.

        Raises:
            MoQError: Names the parameters.
        """
        bad = [names[index] for batch, names in self._batches for index in batch.nonfinite(wait=wait)]
        if bad:
            _refuse_nonfinite(bad)
        check_finite(self._single)

    def _identities(self) -> list[tuple[Any, ...]]:
        """What the batches depend on: they hold pointers."""
        found: list[tuple[Any, ...]] = []
        for layer in self._layers.values():
            state, weight = layer.moq, layer.weight
            pointer = 0 if weight.is_meta or _is_sharded(weight) else weight.data_ptr()
            tensors = (pointer, id(state.weight), id(state.ratio))
            found.append((*tensors, weight.device, weight.dtype, state.bits, state.dtype))
        return found

    def _make_batches(self) -> None:
        self._single = {}
        jobs: dict[torch.device, dict[str, triton_quant.Job]] = {}
        for name, layer in self._layers.items():
            job = self._job(layer)
            if job is None:
                self._single[name] = layer
            else:
                jobs.setdefault(layer.weight.device, {})[name] = job
        self._batches = [(triton_quant.Batch(list(named.values())), list(named)) for named in jobs.values()]
        self._made_for = self._identities()

    def _job(self, layer: QuantLayer) -> "triton_quant.Job | None":
        state, weight = layer.moq, layer.weight.detach()
        dtype = state.dtype or weight.dtype
        if state.bits == FLOAT_BITS or weight.is_meta or _is_sharded(weight) or not weight.is_contiguous():
            return None
        if not {dtype, weight.dtype} <= triton_quant.DTYPES.keys() or not kernels_wanted(self._config, weight.device):
            return None
        kept = state.weight
        if kept is None or kept.device != weight.device or kept.dtype != dtype or kept.shape != weight.shape:
            with torch.inference_mode(False), torch.no_grad():
                state.weight = torch.empty_like(weight, dtype=dtype)
        out = cast(Tensor, state.weight)
        return triton_quant.Job(
            weight, out, state.bits, ratio=state.ratio, step=state.step, blend=state.blend, **state.options
        )


def select_layers(model: nn.Module, config: MoQConfig) -> dict[str, nn.Linear]:
    """The linear layers that the config quantizes, by name.

    Raises:
        MoQError: As `quantize_model`.
    """
    linears = dict(_linears(model))
    if not linears:
        found = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
        raise MoQError(f"the model has no linear layer to quantize; its layers are {', '.join(found) or 'none'}")
    if config.modules_to_not_convert is None:
        left_out = set(output_heads(model, linears))
    else:
        left_out = set()
        every = [name for name, _ in model.named_modules() if name]
        for pattern in config.modules_to_not_convert:
            matches = {name for name in linears if _matches(name, pattern)}
            if not matches and not any(_matches(name, pattern) for name in every):
                raise MoQError(
                    f"modules_to_not_convert: {pattern!r} matches no module; the linear layers are {', '.join(linears)}"
                )
            left_out |= matches
    chosen = {name: layer for name, layer in linears.items() if name not in left_out}
    if not chosen:
        reason = "modules_to_not_convert names" if config.modules_to_not_convert is not None else "output heads are"
        conv1d = sum(type(module).__name__ == "Conv1D" for module in model.modules())
        raise MoQError(
            f"no linear layer is left to quantize: {reason} all of them ({', '.join(linears)})"
            + (f"; the {conv1d} Conv1D layers of this model are not supported" if conv1d else "")
        )
    _check_weights(chosen)
    _check_groups(chosen, config)
    return chosen


def select_embeddings(model: nn.Module, config: MoQConfig) -> dict[str, nn.Embedding]:
    """The embedding tables that the config quantizes, by name: none without `quantize_embeddings`.

    Tables of a class with a forward pass of its own, sparse ones and ones with a `max_norm` are left alone.

    Raises:
        MoQError: There is none, or one shares its weight with another layer.
    """
    if config.quantize_embeddings is None:
        return {}
    left_out = config.modules_to_not_convert or ()
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and type(module).forward in (nn.Embedding.forward, QuantEmbedding.forward)
        and module.max_norm is None
        and not module.sparse
        and not any(_matches(name, pattern) for pattern in left_out)
    }
    if not chosen:
        raise MoQError("quantize_embeddings: the model has no embedding table that can be quantized; set it to null")
    sharing = shared_weights(model, chosen)
    if sharing:
        raise MoQError(
            f"quantize_embeddings: {'; '.join(sharing)}; a shared table is not supported: set quantize_embeddings to "
            "null, or name it in modules_to_not_convert"
        )
    return chosen


def shared_weights(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """One line for each of the layers whose weight is also another layer's."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for layer in layers:
        weight = model.get_submodule(layer).weight
        others = [name for name in names[id(weight)] if name != f"{layer}.weight"]
        if others:
            found.append(f"{layer}.weight is also {', '.join(others)}")
    return found


def output_heads(model: nn.Module, linears: Iterable[str]) -> list[str]:
    """Names of the linear layers that are output heads: by default they stay in full precision.

    For a transformers model with a base model: whatever lies outside of it. Otherwise the output embeddings, and
    failing those the last linear layer.
    """
    names = list(linears)
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return [name for name in names if not name.startswith(prefix + ".")]
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    if output is not None:
        return [name for name in names if model.get_submodule(name) is output]
    is_base_model = hasattr(model, "base_model_prefix")
    return [] if is_base_model or len(names) == 1 else names[-1:]


def block_of(model: nn.Module, name: str) -> str:
    """The block of a layer: its place in the outermost `ModuleList` on its path, or itself outside of any."""
    parts = name.split(".")
    module: nn.Module = model
    for depth, part in enumerate(parts):
        if isinstance(module, nn.ModuleList):
            return ".".join(parts[: depth + 1])
        module = cast(nn.Module, getattr(module, part))
    return name


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        # MultiheadAttention reads the weight of its output projection without calling the layer.
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear):
            yield name, module


def _matches(name: str, pattern: str) -> bool:
    """A glob over the whole name, or a run of whole components of it: its beginning, its end, or in between."""
    return fnmatch.fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def _restore(layer: QuantLayer) -> None:
    _LAYERS.discard(layer)
    _CONTROLLED.discard(layer)
    del layer.moq
    cast(nn.Module, layer).__class__ = base_class(type(layer))


# How embedding tables are quantized, whatever the config says of the linear layers.
_ROW_OPTIONS = {"groups": "per_channel", "group_size": None, "symmetric": True, "rounding": "nearest"}


def _options(config: MoQConfig, index: int) -> dict[str, Any]:
    groups: quantizer.Groups = 1
    group_size = None
    match config.grouping:
        case RowBlocks(count):
            groups = count
        case PerChannel():
            groups = "per_channel"
        case PerGroup(size):
            group_size = size
    return {
        "groups": groups,
        "group_size": group_size,
        "symmetric": config.symmetric,
        "rounding": "stochastic" if config.stochastic else "nearest",
        "seed": config.seed,
        "layer": index,
    }


def _check_weights(layers: Mapping[str, nn.Linear]) -> None:
    odd = [f"{name} ({layer.weight.dtype})" for name, layer in layers.items() if not layer.weight.is_floating_point()]
    if odd:
        raise MoQError(
            f"these layers are quantized already, their weights are not floating point: {', '.join(odd)}; "
            "load the model in float, or name them in modules_to_not_convert"
        )


def _check_groups(layers: Mapping[str, nn.Linear], config: MoQConfig) -> None:
    match config.grouping:
        case RowBlocks(count):
            key, axis, instead = "quantize_groups", "out_features", ', or "per_channel"'
        case PerGroup(count):
            key, axis, instead = "quantize_group_size", "in_features", ""
        case _:
            return
    sizes = {name: cast(int, getattr(layer, axis)) for name, layer in layers.items()}
    wrong = [f"{name} ({axis} {size})" for name, size in sizes.items() if size % count]
    if wrong:
        fits = [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
        near = sorted(fits, key=lambda n: abs(n - count))[:3]
        raise MoQError(
            f"{key} {count} does not divide the weights of {', '.join(wrong)}; "
            f"nearest values that fit every layer: {', '.join(map(str, sorted(near)))}{instead}"
        )
