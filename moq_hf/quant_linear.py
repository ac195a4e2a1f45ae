"""`QuantLinear`: a linear layer that computes with a quantized copy of its weight and trains the float one.

`QuantConv1D` does the same for GPT-2's transposed linear layers, `QuantEmbedding` for
an embedding table, one scale per row, and `QuantConv1d` and `QuantConv2d` for
convolutions, whose weight is a matrix with a row for each output channel,
`[out_channels, in_channels / groups * kernel]`. `activations` rounds the
inputs of linear layers alone.

A model gets its quantized layers by a change of class, so that parameter objects,
state-dict keys, hooks and wrappers (DDP, FSDP, PEFT, torch.compile) stay as they are.
A forward pass multiplies with the quantized weight, and the gradient passes straight
through to the float one. `forward_pass` says how long a quantized weight lives.
"""

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from . import quantizer, triton_inputs, triton_search
from .errors import MoQError
from .forward_pass import makes_state
from .grid import RowBlocks
from .inputs import InputObserver, inputs_out_of_reach
from .layer_state import LayerState
from .processes import is_apart, shape_of, whole
from .schedule import FLOAT_BITS
from .seams.transformers import (
    convolve,
    is_exporting,
    is_scaled_table,
    is_transformed,
    only_scales,
    scaled_rows,
)
from .straight_through import straight_through
from .weight_matrix import Kind, matrix_shape, to_rows


class QuantModule(nn.Module):
    """A module with quantized weights, which follow its float ones when these are moved or loaded."""

    def parameter(self, name: str) -> Tensor | None:
        """A float parameter, or what replaces it: of a replica, of `torch.func`, of FSDP2; None where there is none."""
        value = self._parameters.get(name)
        return self.__dict__.get(name) if value is None else value

    @abstractmethod
    def state_of(self, name: str) -> LayerState | None:
        """How a parameter is quantized; None for one that stays in float."""

    def quantized_weights(self) -> "list[QuantLayer]":
        """The module itself, or the parameters in it that are quantized each by itself."""
        return [cast(QuantLayer, self)]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for layer in self.quantized_weights():
            layer.weight_changed()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for layer in self.quantized_weights():
            layer.weight_loaded()


class QuantizedParameter:
    """Replaces a parameter in the class: reading it in a forward pass gives the quantized weight."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: QuantModule | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        value = module.parameter(self.name)
        if value is None:
            # Python asks nn.Module next, whose error says what is missing.
            raise AttributeError
        state = module.state_of(self.name)
        return value if state is None else state.read(value)

    def __set__(self, module: QuantModule, value: Any) -> None:
        # nn.Module registers parameters itself, so only the tensors of replicas are
        # set here.
        module.__dict__[self.name] = value

    def __delete__(self, module: QuantModule) -> None:
        # As torch.nn.utils.prune does with what it computed.
        if module.__dict__.pop(self.name, None) is None:
            raise AttributeError(self.name)


class QuantLayer(QuantModule):
    """What quantized layers share: a float `weight` that is trained, and quantized in the forward pass.

    Whoever reads `weight` inside a forward pass gets the quantized one, with the
    gradient straight through to the float one: the layer itself, a model that
    multiplies with `layer.weight`, a fused path of PyTorch. Anywhere else `weight` is
    the float parameter, as in the state dict. What a forward pass writes into the
    weight that it reads is lost; a forward pre-hook that writes to it is an error.

    Attributes:
        moq: The layer's `LayerState`.
        kind: How `weight` is laid out as the matrix that is quantized; see `to_rows`.
    """

    moq: LayerState
    kind: Kind = "linear"

    weight = QuantizedParameter("weight")

    def state_of(self, name: str) -> LayerState | None:
        """How a parameter is quantized."""
        return self.moq

    @property
    def float_weight(self) -> Tensor:
        """The parameter that is trained, or what replaces it: of a replica, of `torch.func`, of FSDP2.

        Raises:
            MoQError: There is no weight any more.
        """
        weight = self.parameter("weight")
        if weight is None:
            raise MoQError(
                f"a quantized {type(self).__name__} has no weight any more: parametrize layers before they are "
                "quantized (they stay in float then), or not at all"
            )
        return weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole weight as groups and grids count it; see `to_rows`."""
        return matrix_shape(shape_of(self.float_weight), self.kind)

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """What a forward pass multiplies with: of the shape of `weight`, gradient straight through to it.

        Args:
            dtype: Of the result; None is what a matrix product takes: autocast's dtype,
                or the weight's own.
        """
        return self.moq.quantized_weight(self.float_weight, dtype)

    def quantized_copy(self, dtype: torch.dtype) -> Tensor:
        """The quantized weight, whole and without a graph; all processes that share a weight must ask for it.

        Args:
            dtype: Of the result.
        """
        weight = self.whole_weight()
        return (
            weight.to(dtype)
            if self.moq.bits == FLOAT_BITS
            else self.moq.fake_quantize(weight, dtype)
        )

    def whole_weight(self) -> Tensor:
        """The float weight that is quantized, whole and without a graph, in the dtype in which an engine hands it over.

        All processes that share it must ask for it.
        """

        def read(parameter: Tensor) -> Tensor:
            values = whole(parameter)
            return values.to(self.moq.handed_dtype or values.dtype)

        return self.moq.merged(read(self.float_weight), read).detach()

    def quantized_input(self, input: Tensor) -> Tensor:
        """`input` `[..., features]` as the layer multiplies with it, gradient straight through."""
        inputs = self.moq.inputs
        if inputs is None:
            return input
        if self.moq.config.kernel is False:
            rounded = inputs.quantize(input, self.training)
        else:
            rounded = triton_inputs.quantize(inputs, input, self.training)
        return input if rounded is None else straight_through(input, rounded)

    def forward(self, input: Tensor) -> Tensor:
        """What the layer computes of `input`, as its class without quantization does, with the quantized weight."""
        if self.moq.handed_over:
            with recompute_in_backward([self]):
                return self._product(input)
        return self._product(input)

    def _product(self, input: Tensor) -> Tensor:
        # What a class has of its own reads the quantized weight.
        return cast(Tensor, super().forward(input))

    def set_bits(self, bits: int) -> None:
        """Change the precision, and search the clipping ratios that the grid wants there.

        All processes that share a weight must do so: it is gathered.
        """
        self.moq.bits = bits
        self.search_ratios()

    @makes_state
    def search_ratios(self) -> None:
        """Search the clipping ratios for the weight as it is now, where the grid wants any."""
        state = self.moq
        state.ratio = None
        if (
            state.bits != FLOAT_BITS
            and not self.float_weight.is_meta
            and state.precision.searches
        ):
            matrix = to_rows(self.whole_weight(), self.kind)
            search = quantizer if state.config.kernel is False else triton_search
            state.ratio = search.least_squares_ratio(matrix, state.bits, state.grid)
        state.passes.drop(state)

    def invalidate(self) -> None:
        """Forget the quantized weight that is held, and see whether an engine has taken the weight over."""
        self.moq.passes.drop(self.moq)
        self.moq.lent = None
        # FSDP2 leaves some weights gathered after a pass without gradients.
        self.moq.handed_over |= is_apart(self.float_weight)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; forgets the quantized weight that is held, in either mode."""
        super().train(mode)
        self.invalidate()
        # A head that shares the state of an embedding table leaves the counting to the
        # table.
        if not self.moq.has_controller and self.kind == self.moq.kind:
            self._count_step(mode)
        return self

    @makes_state
    def _count_step(self, mode: bool) -> None:
        """Take a call of `train()` for an optimizer step; input ranges are brought up to date by `eval()` too.

        Raises:
            MoQError: The inputs of the layer are to be rounded, and it is not called.
        """
        state = self.moq
        if state.inputs is not None:
            if state.used and not state.inputs.called:
                raise MoQError(
                    inputs_out_of_reach([state.name], state.config.spell("activations"))
                )
            state.inputs.step(state.inputs.observed)
        if not mode:
            return
        state.seed = state.seed._replace(step=state.seed.step + 1)
        if state.seed.step % state.config.scale_refresh == 0:
            self.search_ratios()

    def extra_repr(self) -> str:
        """Add the bits to the layer's own line."""
        bits = "float" if self.moq.bits == FLOAT_BITS else f"bits={self.moq.bits}"
        return f"{super().extra_repr()}, {bits}"

    def weight_loaded(self) -> None:
        """After other values have come into the weight: search the clipping ratios for them."""
        # `assign` may have put the weight on another device.
        self.weight_changed()
        if self.moq.ratio is not None:
            self.search_ratios()

    @makes_state
    def weight_changed(self) -> None:
        """After a change of the weight: bring what belongs to it to its device, and forget what was made of it."""
        state, device = self.moq, self.float_weight.device
        state.scale = None
        self.invalidate()
        if device.type == "meta":
            return
        if state.ratio is not None:
            state.ratio = state.ratio.to(device)
        if state.inputs is not None:
            state.inputs.move_to(device)

    def release(self) -> None:
        """Give the layer back the class that it had before."""
        self.moq.passes.changes += 1
        cast(nn.Module, self).__class__ = base_class(type(self))
        del self.moq

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made for subclasses of nn.Linear have no importable name: the base
        # class stands for them.
        return _new_layer, (base_class(type(self)),), self.__getstate__()  # type: ignore[no-untyped-call]


def inputs_of(layers: Mapping[str, QuantLayer]) -> dict[str, InputObserver]:
    """What rounds the inputs of layers, by the names of those that have any."""
    return {
        name: layer.moq.inputs
        for name, layer in layers.items()
        if layer.moq.inputs is not None
    }


def recompute_in_backward(
    layers: Iterable[QuantLayer],
) -> contextlib.AbstractContextManager[Any]:
    """In it autograd keeps, of weights that engines hand over, only how to quantize them again.

    Else the quantized weights of a whole model would lie in memory from the forward to
    the backward pass, while the engine frees the float ones, which it hands over once
    more for the backward pass.

    Args:
        layers: Whose weights a forward pass inside multiplies with.
    """
    handed = (
        []
        if torch.compiler.is_compiling()
        else [layer for layer in layers if layer.moq.handed_over]
    )
    return _recomputing(handed) if handed else contextlib.nullcontext()


@contextlib.contextmanager
def _recomputing(layers: list[QuantLayer]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        address = tensor.untyped_storage().data_ptr()
        for layer in layers:
            for made in layer.moq.made or ():
                if made.untyped_storage().data_ptr() == address:
                    return functools.partial(
                        _again,
                        layer,
                        made.dtype,
                        tensor.size(),
                        tensor.stride(),
                        tensor.storage_offset(),
                    )
        return tensor

    for layer in layers:
        layer.moq.made = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            pack, lambda kept: kept if isinstance(kept, Tensor) else kept()
        ):
            yield
    finally:
        for layer in layers:
            layer.moq.made = None


def _again(layer: QuantLayer, dtype: torch.dtype, *place: Any) -> Tensor:
    """Quantize a weight again, and give the part at a place in its memory."""
    weight = layer.moq.merged(layer.float_weight)
    return layer.moq.fake_quantize(weight, dtype).as_strided(*place)


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` with a quantized weight in its forward pass.

    Not constructed: `quantize_model` changes the class of existing layers. `weight` and
    `bias` remain the float parameters that the optimizer trains.

    Attributes:
        moq: The layer's `LayerState`.

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> quantize_model(model, bits=3)
    Sequential(
      (0): QuantLinear(in_features=4, out_features=4, bias=True, bits=3)
      (1): Linear(in_features=4, out_features=2, bias=True)
    )
    """

    def _product(self, input: Tensor) -> Tensor:
        rounded = self.quantized_input(input)
        return F.linear(rounded, self.quantized_weight(), self.bias)


class QuantConv1D(QuantLayer, Conv1D):
    """`Conv1D` of transformers, the linear layer of GPT-2, with a quantized weight; not constructed, as `QuantLinear`.

    Its weight is `[in_features, out_features]`. Rows, groups and channels are those of
    the transpose, as if it were the `nn.Linear` that computes the same.

    Attributes:
        moq: The layer's `LayerState`.
    """

    kind = "conv1d"

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in_features]` times the quantized weight, plus the bias."""
        return super().forward(x)

    def _product(self, input: Tensor) -> Tensor:
        rows = self.quantized_input(input).view(-1, input.size(-1))
        product = torch.addmm(self.bias, rows, self.quantized_weight())
        return product.view(*input.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}{self.extra_repr()})"


class QuantEmbedding(QuantLayer, nn.Embedding):
    """`nn.Embedding` with a quantized table in its forward pass, one scale per row; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.
    """

    kind = "embedding"

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
        # One compiled graph holds for all bits.
        is_quantized = torch.compiler.is_compiling() or state.bits != FLOAT_BITS
        # Random numbers and ratios are those of the table's rows; merged adapters add to
        # the table; what vmap has stacked knows only operators of its own.
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
    """What quantized convolutions share."""

    kind = "conv"

    def _product(self, input: Tensor) -> Tensor:
        return convolve(self, input, self.quantized_weight())  # type: ignore[arg-type]


class QuantConv1d(QuantConv, nn.Conv1d):
    """`nn.Conv1d` with a quantized weight in its forward pass; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(6, 2))
    >>> quantize_model(model, bits=4, convolutions=True)
    Sequential(
      (0): QuantConv1d(4, 8, kernel_size=(3,), stride=(1,), bits=4)
      (1): Linear(in_features=6, out_features=2, bias=True)
    )
    """


class QuantConv2d(QuantConv, nn.Conv2d):
    """`nn.Conv2d` with a quantized weight in its forward pass; not constructed, as `QuantLinear`.

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


def quant_class(base: type[nn.Module]) -> type[QuantLayer]:
    """The quantized class for layers of class `base`, made once; one that is quantized already is its own."""
    if issubclass(base, QuantLayer):
        return base
    if base not in CLASSES:
        quantized = next(
            made for plain, made in CLASSES.items() if issubclass(base, plain)
        )
        own: dict[str, Any] = {}
        if is_scaled_table(base):
            # Its own forward pass reads the whole quantized table.
            own["forward"] = _scaled if only_scales(base) else base.forward
        CLASSES[base] = type(f"Quant{base.__name__}", (quantized, base), own)
    return CLASSES[base]


def base_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it got the quantized class `cls`."""
    first, second = cls.__bases__[:2]
    if issubclass(first, QuantModule):
        return second
    # The class that fully_shard made of a quantized one.
    return type(
        cls.__name__.replace("Quant", "", 1),
        (first, base_class(second)),
        dict(cls.__dict__),
    )


def _new_layer(base: type[nn.Module]) -> QuantLayer:
    cls = quant_class(base)
    return cls.__new__(cls)
