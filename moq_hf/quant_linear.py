"""`QuantLinear`: a linear layer that computes with a quantized copy of its weight and trains the float one.

`QuantConv1D` does the same for GPT-2's transposed linear layers, `QuantEmbedding` for an embedding table, one scale per
row.

A model gets its quantized layers by a change of class, so that parameter objects, state-dict keys, hooks and wrappers
(DDP, FSDP, PEFT, torch.compile) stay as they are. The quantized weight is kept from one optimizer step to the next and
written in place, outside any compiled graph; the gradient passes straight through to the float weight.
"""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.pytorch_utils import Conv1D

from . import cpu_quant, quantizer, triton_quant
from .config import MoQConfig, MoQError, PerChannel, PerGroup, RowBlocks
from .processes import check_supported, copy_whole, is_sharded, named_modules, whole
from .schedule import FLOAT_BITS
from .selection import is_peft, select_embeddings, select_layers

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
        gathered: `weight` was quantized from all shards of a parameter. FSDP2 puts a parameter of its own in the
            place of the sharded one for a forward pass; that is never looked at.
        weight: The quantized weight; None exactly if `bits` is 32 (or nothing can be computed: meta device).
        config: What the model was made ready with.
        activation_bits: Of the layer's input, one scale per token; None leaves it alone.
    """

    options: dict[str, Any]
    bits: int = FLOAT_BITS
    ratio: Tensor | None = None
    blend: float = 0.0
    step: int = 0
    dtype: torch.dtype | None = None
    plain: bool = False
    gathered: bool = False
    weight: Tensor | None = None
    key: _Key | None = field(default=None, repr=False)
    config: MoQConfig | None = field(default=None, repr=False)
    activation_bits: int | None = None


class QuantLayer(nn.Module):
    """What quantized layers share: a float `weight` that is trained and its quantized copy.

    Attributes:
        moq: The layer's `LayerState`.
        is_transposed: Whether `weight` is `[in_features, out_features]`. It is quantized as its transpose then.
    """

    moq: LayerState
    weight: Tensor
    is_transposed = False

    @property
    def matrix(self) -> Tensor:
        """`weight` with a row for each output, `[rows, columns]`: a view, of which groups and grids are told."""
        return self.weight.t() if self.is_transposed else self.weight

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """What the forward pass multiplies with: of the shape of `weight`, gradient straight through to it.

        Args:
            dtype: Of the activations. Outside autocast a weight kept in another dtype is quantized afresh in its own.
        """
        state = self.moq
        if not torch.compiler.is_compiling():
            if self.__dict__.get("_is_replica", False):
                # Replicas share the state of the module they were copied from.
                return _straight_through(self.weight, self._compute(state.dtype))
            if state.key != self._key() and (is_sharded(self.weight) or not state.gathered):
                self.refresh(in_place=False)
        quantized = state.weight
        if quantized is None:
            return self.weight
        autocast = torch.is_autocast_enabled(quantized.device.type)
        if state.gathered:
            # FSDP2's MixedPrecisionPolicy gathers its parameters in a dtype of its own.
            if not autocast and quantized.dtype != self.weight.dtype:
                quantized = quantized.to(self.weight.dtype)
            return _straight_through(self.weight, quantized)
        kept_for_autocast = state.dtype is not None and dtype is not None and quantized.dtype != dtype
        if kept_for_autocast and not autocast:
            quantized = self._compute(self.weight.dtype)
        return _straight_through(self.weight, quantized)

    def quantized_input(self, input: Tensor) -> Tensor:
        """`input` `[..., features]` as the layer multiplies with it, gradient straight through."""
        bits = self.moq.activation_bits
        return input if bits is None else _straight_through(input, quantizer.fake_quantize_tokens(input, bits))

    def refresh(self, *, in_place: bool = True) -> None:
        """Quantize the weight again; called after each optimizer step, for a sharded weight in every process.

        Args:
            in_place: Write into the tensor that holds the last result, so that compiled graphs see the new one.
        """
        state = self.moq
        state.key = self._key()
        state.gathered = is_sharded(self.weight) and state.bits != FLOAT_BITS
        if state.bits == FLOAT_BITS or self.weight.is_meta:
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
            self.moq.ratio = search.least_squares_ratio(self._whole_matrix(), bits, **options)

    def nonfinite(self) -> Tensor:
        """Whether the weight held NaN or Inf when it was quantized: a bool scalar on its device."""
        if self.moq.weight is None:
            return torch.zeros((), dtype=torch.bool, device=self.weight.device)
        options = self.moq.options
        values = self.moq.weight.t() if self.is_transposed else self.moq.weight
        return quantizer.nonfinite(values, options["groups"], options["group_size"])

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
            values: Tensor = faster.fake_quantize(
                self._whole_matrix(),
                state.bits,
                ratio=state.ratio,
                blend=state.blend,
                step=state.step,
                dtype=dtype,
                out=None if self.is_transposed else out,
                **state.options,
            )
            if not self.is_transposed:
                return values
            return values.t().contiguous() if out is None else out.copy_(values.t())

    def _whole_matrix(self) -> Tensor:
        weight = whole(self.weight)
        return weight.t().contiguous() if self.is_transposed else weight

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
        return F.linear(self.quantized_input(input), self.quantized_weight(input.dtype), self.bias)


class QuantConv1D(QuantLayer, Conv1D):
    """`Conv1D` of transformers, the linear layer of GPT-2, with a quantized weight; not constructed, as `QuantLinear`.

    Its weight is `[in_features, out_features]`. Rows, groups and channels are those of the transpose, as if it were the
    `nn.Linear` that computes the same.

    Attributes:
        moq: The layer's `LayerState`.
    """

    is_transposed = True
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in_features]` times the quantized weight, plus the bias."""
        rows = self.quantized_input(x).view(-1, x.size(-1))
        return torch.addmm(self.bias, rows, self.quantized_weight(x.dtype)).view(*x.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}{self.extra_repr()})"


class QuantEmbedding(QuantLayer, nn.Embedding):
    """`nn.Embedding` with a quantized table in its forward pass, one scale per row; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., embedding_dim]` of the quantized table for the indices `input` `[...]`."""
        return F.embedding(input, self.quantized_weight(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


_CLASSES: dict[type[nn.Module], type[QuantLayer]] = {
    nn.Linear: QuantLinear,
    Conv1D: QuantConv1D,
    nn.Embedding: QuantEmbedding,
}


def quant_class(base: type[nn.Module]) -> type[QuantLayer]:
    """The quantized class for layers of class `base`, made once."""
    if base not in _CLASSES:
        quantized = next(made for plain, made in _CLASSES.items() if issubclass(base, plain))
        _CLASSES[base] = type(f"Quant{base.__name__}", (quantized, base), {})
    return _CLASSES[base]


def base_class(cls: type[QuantLayer]) -> type[nn.Module]:
    """The class that a layer of class `cls` had before."""
    first, second = cls.__bases__[:2]
    if not issubclass(first, QuantLayer):
        # The class that fully_shard made of a quantized one.
        return type(cls.__name__.replace("Quant", "", 1), (first, base_class(second)), dict(cls.__dict__))
    return cast(type[nn.Module], second)


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
    layers: dict[int, list[QuantLayer]] = {}
    for layer in list(_LAYERS):
        layers.setdefault(id(layer.weight), []).append(layer)
    # In the optimizer's order: processes that gather shards must do so in the same one.
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for layer in layers.get(id(parameter), ()):
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
            divide a layer's weight, weights that ZeRO-3, FSDP1 or tensor parallelism took apart, or NaN or Inf in a
            weight. The model is a float one then.
        MoQConfigError: The config is wrong.
    """
    config = MoQConfig.load(config)
    layers = prepare_model(model, config)
    embeddings = quant_embeddings(model)
    for linear in layers.values():
        linear.set_bits(config.start_bits, config)
        linear.moq.activation_bits = config.activation.bits if config.activation.enabled else None
        linear.refresh()
    for table in embeddings.values():
        table.moq.bits = config.quantize_embeddings or FLOAT_BITS
        table.refresh()
    try:
        check_finite({**layers, **embeddings})
    except MoQError:
        for layer in [*layers.values(), *embeddings.values()]:
            _restore(layer)
        _guard_merging(model)
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
                copy_whole(layer.weight, layer.quantized_weight())
        _restore(layer)
    _guard_merging(model)
    return model


def quant_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """The quantized linear layers by their names, each once, in model order."""
    return {name: module for name, module in named_modules(model) if isinstance(module, QuantLinear | QuantConv1D)}


def quant_embeddings(model: nn.Module) -> dict[str, QuantEmbedding]:
    """The quantized embedding tables by their names, each once, in model order."""
    return {name: module for name, module in named_modules(model) if isinstance(module, QuantEmbedding)}


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


def prepare_model(model: nn.Module, config: MoQConfig) -> dict[str, QuantLayer]:
    """What `quantize_model` does, with every layer still unquantized (32 bits); gives the linear layers by name."""
    if config.enabled and is_packed(model):
        raise MoQError(
            "the model comes from a packed checkpoint: call moq_hf.dequantize_model(model) before training it"
        )
    chosen: dict[str, nn.Module] = {}
    if config.enabled:
        check_supported(model)
        chosen = {**select_layers(model, config), **select_embeddings(model, config)}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        if name not in chosen:
            _restore(layer)
    for index, module in enumerate(chosen.values()):
        if not isinstance(module, QuantLayer):
            module.__class__ = quant_class(type(module))
        layer = cast(QuantLayer, module)
        options = dict(_ROW_OPTIONS) if isinstance(layer, QuantEmbedding) else _options(config, index)
        layer.moq = LayerState(options=options, config=config, plain=config.kernel is False)
        _CONTROLLED.discard(layer)
        _LAYERS.add(layer)
    _guard_merging(model)
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
            pointer = 0 if weight.is_meta or is_sharded(weight) else weight.data_ptr()
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
        if state.bits == FLOAT_BITS or weight.is_meta or is_sharded(weight) or not weight.is_contiguous():
            return None
        if layer.is_transposed:
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


def _guard_merging(model: nn.Module) -> None:
    """Refuse to merge adapters into weights that are computed with quantized: the sum is on no grid."""
    for module in model.modules():
        if isinstance(module._modules.get("base_layer"), QuantLayer) and is_peft(module):
            module.merge = _refuse_merging  # type: ignore[assignment]
        elif module.__dict__.get("merge") is _refuse_merging:
            del module.merge


def _refuse_merging(*args: Any, **kwargs: Any) -> None:
    raise MoQError(
        "adapters cannot be merged into quantized layers: call moq_hf.dequantize_model(model) first, then the merged "
        "model computes the same in float"
    )


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
