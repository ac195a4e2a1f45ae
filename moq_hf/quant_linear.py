"""`QuantModule`: a module that computes with quantized copies of its weights and trains the float ones.

`QuantLinear` is one for linear layers, `QuantConv1D` for GPT-2's transposed ones,
`QuantEmbedding` for embedding tables, with one scale per row, and `QuantConv1d` and
`QuantConv2d` for convolutions, whose weight is a matrix with a row for each output
channel, `[out_channels, in_channels / groups * kernel]`. Experts get a class that is
made for them: transformers 5 keeps those of a layer in one module, with parameters of
three dimensions, `gate_up_proj` and `down_proj`. `activations` rounds the inputs of
linear layers only.

Modules become quantized by a change of their class, so that parameter objects,
state-dict keys, hooks and wrappers (DDP, FSDP, PEFT, torch.compile) stay as they are;
only `"train": "scales"` adds parameters, see `trained_scales`.
Inside a forward pass, reading a quantized parameter gives the quantized weight, with the
gradient straight through to the float one, whether the module reads it, a model that
multiplies by `layer.weight`, or a fused path of PyTorch. Elsewhere it is the float
parameter, as in the state dict. Anything that a forward pass writes into the weight that
it reads is lost; a forward pre-hook that writes to it is an error. `forward_pass` says
how long a quantized weight lives.
"""

import functools
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from . import triton_inputs
from .errors import MoQError
from .grid import RowBlocks
from .layer_state import LayerState
from .quantized_weight import QuantizedWeight, recomputing_in_backward
from .schedule import FLOAT_BITS
from .seams.transformers import (
    convolve,
    experts_transposed,
    is_exporting,
    is_scaled_table,
    is_transformed,
    loads_checkpoint,
    only_scales,
    scaled_rows,
)
from .straight_through import straight_through
from .trained_scales import scales_of
from .weight_matrix import Kind


class QuantModule(nn.Module):
    """A module with quantized weights, which follow its float ones when these are moved or loaded.

    Attributes:
        moq_states: Name of a parameter to the state of its quantization; a parameter
            without an entry stays in float.
        moq_follows: Whether the states belong to another module with the same weight,
            which counts their steps.
        moq_kind: How the weight of a layer is laid out as the matrix that is quantized;
            see `to_rows`.
    """

    moq_states: dict[str, LayerState]
    moq_follows: bool
    moq_kind: Kind | None = None

    def quantized_weights(self) -> "list[QuantizedWeight]":
        """The weights that are quantized."""
        return [
            QuantizedWeight(self, attribute, state)
            for attribute, state in self.moq_states.items()
        ]

    def parameter(self, name: str) -> Tensor | None:
        """A float parameter, or what replaces it in a replica, `torch.func` or FSDP2; None if there is neither."""
        value = self._parameters.get(name)
        return self.__dict__.get(name) if value is None else value

    def float_parameter(self, name: str) -> Tensor:
        """As `parameter`, for one that must exist.

        Raises:
            MoQError: There is no such parameter any more.
        """
        value = self.parameter(name)
        if value is None:
            raise MoQError(
                f"a quantized {type(self).__name__} has no {name} any more: parametrize layers before they are "
                "quantized (they stay in float then), or not at all"
            )
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the plain class does, with the quantized weights."""
        for state in self.moq_states.values():
            if state.handed_over and not torch.compiler.is_compiling():
                with recomputing_in_backward(self.quantized_weights()):
                    return self._quantized_forward(*args, **kwargs)
        return self._quantized_forward(*args, **kwargs)

    def _quantized_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; in either mode it also forgets the quantized weights that are held."""
        super().train(mode)
        for weight in self.quantized_weights():
            weight.invalidate()
            if not (self.moq_follows or weight.moq.has_controller):
                weight.count_step(mode)
        return self

    def release_weight(self, name: str) -> None:
        """Leave a parameter in float; with the last one the module gets back the class that it had before."""
        del self.moq_states[name]
        if not self.moq_states:
            cast(nn.Module, self).__class__ = base_class(type(self))
            del self.moq_states, self.moq_follows

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self.quantized_weights():
            weight.after_change()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        state_dict, prefix, *_ = args
        for weight in self.quantized_weights():
            has_scales = prefix + scales_of(weight.attribute) in state_dict
            trains_scales = weight.moq.trained is not None
            if has_scales != trains_scales and loads_checkpoint():
                raise MoQError(
                    f'the checkpoint is of a run with train: "{"scales" if has_scales else "weights"}", and a run goes '
                    "on as it began: set train to that, or start a new run"
                )
            weight.after_load(has_scales)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Most of these classes are made on demand and have no importable name, so the
        # base class is pickled in their place.
        made_of = base_class(type(self)), tuple(self._parameters)
        return _new_module, made_of, self.__getstate__()  # type: ignore[no-untyped-call]


class QuantizedParameter:
    """Replaces a parameter in the class: reading it in a forward pass gives the quantized weight."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: QuantModule | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        value = module.parameter(self.name)
        if value is None:
            # Python then asks nn.Module, whose error says what is missing.
            raise AttributeError
        state = module.moq_states.get(self.name)
        return value if state is None else state.read(value)

    def __set__(self, module: QuantModule, value: Any) -> None:
        # nn.Module registers parameters itself, so only the tensors of replicas are
        # set here.
        module.__dict__[self.name] = value

    def __delete__(self, module: QuantModule) -> None:
        # torch.nn.utils.prune deletes the weight that it computed.
        if module.__dict__.pop(self.name, None) is None:
            raise AttributeError(self.name)


class QuantLayer(QuantModule):
    """A layer with a float `weight` that is trained, and quantized in the forward pass."""

    moq_kind: Kind = "linear"

    weight = QuantizedParameter("weight")

    @property
    def moq(self) -> LayerState:
        """The state of the layer's quantization."""
        return self.moq_states["weight"]

    @property
    def float_weight(self) -> Tensor:
        """The parameter that is trained, or what replaces it; see `QuantModule.float_parameter`."""
        return self.float_parameter("weight")

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight by which a forward pass multiplies; see `LayerState.quantized_weight`."""
        return self.moq.quantized_weight(self.float_parameter("weight"), dtype)

    def quantized_input(self, input: Tensor) -> Tensor:
        """`input` `[..., features]` as the layer multiplies by it, with the gradient straight through."""
        inputs = self.moq.inputs
        if inputs is None:
            return input
        if self.moq.config.kernel is False:
            rounded = inputs.quantize(input, self.training)
        else:
            rounded = triton_inputs.quantize(inputs, input, self.training)
        return input if rounded is None else straight_through(input, rounded)

    def extra_repr(self) -> str:
        """Add the bits to the line that describes the layer."""
        bits = "float" if self.moq.bits == FLOAT_BITS else f"bits={self.moq.bits}"
        return f"{super().extra_repr()}, {bits}"


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` with a quantized weight in its forward pass.

    Not constructed: `quantize_model` changes the class of existing layers. `weight` and
    `bias` remain the float parameters that the optimizer trains.

    Attributes:
        moq: The layer's `LayerState`.

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> quantize_model(model, bits=3)  # doctest: +ELLIPSIS
    moq_hf: 1 linear layer goes to 3 bits; quantized: ...
    Sequential(
      (0): QuantLinear(in_features=4, out_features=4, bias=True, bits=3)
      (1): Linear(in_features=4, out_features=2, bias=True)
    )
    """

    def _quantized_forward(self, input: Tensor) -> Tensor:
        rounded = self.quantized_input(input)
        return F.linear(rounded, self.quantized_weight(), self.bias)


class QuantConv1D(QuantLayer, Conv1D):
    """`Conv1D` of transformers, GPT-2's linear layer, with a quantized weight; like `QuantLinear` not constructed.

    Its weight is `[in_features, out_features]`. Rows, groups and channels are those of
    the transpose, as if it were the `nn.Linear` that computes the same.

    Attributes:
        moq: The layer's `LayerState`.
    """

    moq_kind = "conv1d"

    def _quantized_forward(self, x: Tensor) -> Tensor:
        rows = self.quantized_input(x).view(-1, x.size(-1))
        product = torch.addmm(self.bias, rows, self.quantized_weight())
        return product.view(*x.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}{self.extra_repr()})"


class QuantEmbedding(QuantLayer, nn.Embedding):
    """`nn.Embedding` with a quantized table in its forward pass, one scale per row; like `QuantLinear` not constructed.

    Attributes:
        moq: The layer's `LayerState`.
    """

    moq_kind = "embedding"

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., embedding_dim]` of the quantized table for the indices `input` `[...]`.

        Only these rows are quantized, unless there are at least as many indices as rows, or
        clipping ratios, stochastic rounding, row blocks or merged adapters need the
        whole table.
        """
        table = self.float_weight
        rows_only = self._quantizes_rows(input)
        if not rows_only:
            table = self.quantized_weight(table.dtype)
        rows = F.embedding(
            input, table, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return self.moq.quantized_rows(rows) if rows_only else rows

    def _quantizes_rows(self, input: Tensor) -> bool:
        state = self.moq
        # One compiled graph serves all bits.
        is_quantized = torch.compiler.is_compiling() or state.bits != FLOAT_BITS
        # Random numbers and ratios belong to the table's rows; merged adapters add to
        # the table; what vmap has stacked works only with PyTorch's own operators.
        return (
            is_quantized
            and 0 < input.numel() < self.num_embeddings
            and state.ratio is None
            and not (state.lora or state.grid.stochastic)
            and not isinstance(state.grid.grouping, RowBlocks)
            and not (is_transformed() or is_exporting())
        )


def _scaled(table: QuantEmbedding, input: Tensor) -> Tensor:
    return scaled_rows(table, QuantEmbedding.forward(table, input))


class QuantConv(QuantLayer):
    """A convolution with a quantized weight."""

    moq_kind = "conv"

    def _quantized_forward(self, input: Tensor) -> Tensor:
        return convolve(self, input, self.quantized_weight())  # type: ignore[arg-type]


class QuantConv1d(QuantConv, nn.Conv1d):
    """`nn.Conv1d` with a quantized weight in its forward pass; like `QuantLinear` not constructed.

    Attributes:
        moq: The layer's `LayerState`.

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(6, 2))
    >>> quantize_model(model, bits=4, convolutions=True)  # doctest: +ELLIPSIS
    moq_hf: 1 convolution goes to 4 bits; quantized: ...
    Sequential(
      (0): QuantConv1d(4, 8, kernel_size=(3,), stride=(1,), bits=4)
      (1): Linear(in_features=6, out_features=2, bias=True)
    )
    """


class QuantConv2d(QuantConv, nn.Conv2d):
    """`nn.Conv2d` with a quantized weight in its forward pass; like `QuantLinear` not constructed.

    Attributes:
        moq: The layer's `LayerState`.
    """


CLASSES: dict[type[nn.Module], type[QuantLayer]] = {
    nn.Linear: QuantLinear,
    nn.Conv1d: QuantConv1d,
    nn.Conv2d: QuantConv2d,
    Conv1D: QuantConv1D,
    nn.Embedding: QuantEmbedding,
}


def kind_of(module: nn.Module) -> Kind:
    """The way in which a weight of a layer or of experts is laid out as a matrix to quantize; see `to_rows`."""
    layer = _layer_class(type(module))
    if layer is None:
        return "experts_t" if experts_transposed(module) else "experts"
    return layer.moq_kind


def make_quantized(
    module: nn.Module, states: Mapping[str, LayerState], follows: bool = False
) -> None:
    """Make a module compute with quantized weights.

    Args:
        module: A layer or experts, plain or already quantized: new states replace old.
        states: Name of a parameter to the state of its quantization.
        follows: Whether the states are those of another module, whose weight it shares.
    """
    # The states come first, since another thread may be evaluating the model.
    quantized: Any = module
    quantized.moq_states = dict(states)
    quantized.moq_follows = follows
    if not isinstance(module, QuantModule):
        quantized.__class__ = quant_class(type(module), tuple(module._parameters))  # type: ignore[arg-type]


@functools.cache
def quant_class(
    base: type[nn.Module], parameters: tuple[str, ...]
) -> type[QuantModule]:
    """The quantized class for modules of class `base`: layers, or experts with these parameters."""
    if base in CLASSES:
        return CLASSES[base]
    own: dict[str, Any] = {}
    quantized: type[QuantModule] | None = _layer_class(base)
    if quantized is None:
        quantized = QuantModule
        own = {name: QuantizedParameter(name) for name in parameters}
    elif is_scaled_table(base):
        # A forward pass that does more reads the whole quantized table.
        own["forward"] = _scaled if only_scales(base) else base.forward
    return type(f"Quant{base.__name__}", (quantized, base), own)


def _layer_class(base: type[nn.Module]) -> type[QuantLayer] | None:
    of_base = (made for plain, made in CLASSES.items() if issubclass(base, plain))
    return next(of_base, None)


def quantized_in(name: str, module: nn.Module) -> dict[str, QuantizedWeight]:
    """The quantized weights of a module by their names in the model; empty for a plain module.

    Args:
        name: The module's name.
        module: Any module.
    """
    if not isinstance(module, QuantModule):
        return {}
    return {weight.name_in(name): weight for weight in module.quantized_weights()}


def base_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it became one of the quantized class `cls`."""
    first, second = cls.__bases__[:2]
    if issubclass(first, QuantModule):
        return second
    # fully_shard has derived this class from a quantized one.
    return type(
        cls.__name__.replace("Quant", "", 1),
        (first, base_class(second)),
        dict(cls.__dict__),
    )


def _new_module(base: type[nn.Module], parameters: tuple[str, ...]) -> QuantModule:
    cls = quant_class(base, parameters)  # type: ignore[arg-type]
    return cls.__new__(cls)
