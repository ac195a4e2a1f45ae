"""`QuantLinear`: a linear layer that computes with a quantized copy of its weight and trains the float one.

`QuantConv1D` does the same for GPT-2's transposed linear layers, `QuantEmbedding` for an embedding table, one scale per
row. Convolutions are in `quant_conv`.

A model gets its quantized layers by a change of class, so that parameter objects, state-dict keys, hooks and wrappers
(DDP, FSDP, PEFT, torch.compile) stay as they are. The quantized weight is kept from one optimizer step to the next and
written in place, outside any compiled graph; the gradient passes straight through to the float weight.
"""

import contextlib
import sys
import weakref
from types import FrameType
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer
from transformers.pytorch_utils import Conv1D

from . import quantizer
from .errors import MoQError
from .inputs import take_step
from .layer_state import LayerState
from .model.staleness import key_of, stale, watch
from .processes import is_apart, is_sharded, local_part, shape_of, sharded_like, whole
from .rows import Kind, from_rows, matrices, matrix_shape, parameter_of, to_rows
from .schedule import FLOAT_BITS
from .shards import Shard
from .transformers_seams import is_scaled_table, is_transformed
from .triton_quant import backend

# Every call of a module runs this code, whatever the module's class is.
_MODULE_CALL = nn.Module._call_impl.__code__
_FORWARD = ("forward", "compute_loss", "prediction_step")


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


# What Function.apply does where no transform of torch.func is active, without binding arguments to a signature, which
# takes as long as all the rest.
_apply = super(torch.autograd.Function, _StraightThrough).apply


def _straight_through(weight: Tensor, quantized: Tensor) -> Tensor:
    plain = not torch.compiler.is_compiling() and not is_transformed()
    return cast(Tensor, (_apply if plain else _StraightThrough.apply)(weight, quantized))  # type: ignore[no-untyped-call]


def in_forward() -> bool:
    """Whether this thread is inside a module's forward pass, or recomputes one for checkpointing.

    Read off the stack: a flag would have to be kept right through exceptions, threads, copies and wrappers.
    """
    if torch.compiler.is_compiling():
        return True
    # Autograd runs hooks with gradients off, and what checkpointing recomputes with gradients on.
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _MODULE_CALL or (code.co_name in _FORWARD and _is_of_module(frame)):
            return True
        frame = frame.f_back
    return False


def _is_of_module(frame: FrameType) -> bool:
    """Whether a function of such a name is a module's, called without its `__call__`, or a Trainer's, with its loss."""
    names = frame.f_code.co_varnames
    return bool(names) and isinstance(frame.f_locals.get(names[0]), (nn.Module, Trainer))


class QuantLayer(nn.Module):
    """What quantized layers share: a float `weight` that is trained and its quantized copy.

    Whoever reads `weight` inside a forward pass gets the quantized one, with the gradient straight through to the float
    one: the layer itself, a model that multiplies with `layer.weight`, a fused path of PyTorch. Anywhere else `weight`
    is the float parameter, as in the state dict. Writing the quantized weight in place is an error, raised at the next
    use; what a forward pass writes through `layer.weight.data` is not seen, and lost.

    Attributes:
        moq: The layer's `LayerState`.
        kind: How `weight` is laid out as the matrix that is quantized; see `to_rows`.
    """

    moq: LayerState
    kind: ClassVar[Kind] = "linear"

    @property
    def weight(self) -> Tensor:
        """The float parameter; in a forward pass the quantized weight, in the parameter's dtype.

        Raises:
            AttributeError: There is no weight any more.
            RuntimeError: It cannot be quantized.
        """
        weight = self.parameter()
        if weight is None:
            # nn.Module, which looks next, says so.
            raise AttributeError
        # Shards are for FSDP2 itself to see, which puts the whole weight in their place before anything is computed.
        if is_sharded(weight) or not in_forward():
            return weight
        try:
            return self.quantized_weight(weight.dtype, to_read=True)
        except AttributeError as error:
            # nn.Module would look on, and give the float weight.
            raise RuntimeError(f"{parameter_of(self.moq.name, self.kind)} cannot be quantized: {error}") from error

    @weight.setter
    def weight(self, value: Tensor) -> None:
        # Parameters never come here: nn.Module registers them. What comes is the tensor of a replica.
        self.__dict__["weight"] = value

    @weight.deleter
    def weight(self) -> None:
        if "weight" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'weight'")
        del self.__dict__["weight"]

    @property
    def float_weight(self) -> Tensor:
        """The parameter that is trained, or what stands in its place: of a replica, of `torch.func`, of FSDP2.

        Raises:
            MoQError: There is no weight any more.
        """
        weight = self.parameter()
        if self.moq.sharded is not None:
            return self.moq.sharded if weight is None or not is_sharded(weight) else weight
        if weight is None:
            raise MoQError(
                f"a quantized {type(self).__name__} has no weight any more: parametrize layers before they are "
                "quantized (they stay in float then), or not at all"
            )
        return weight

    def parameter(self) -> Tensor | None:
        """As `float_weight`; None where there is none any more."""
        weight = self._parameters.get("weight")
        return self.__dict__.get("weight") if weight is None else weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole weight as groups and grids count it; see `to_rows`."""
        return matrix_shape(shape_of(self.float_weight), self.kind)

    def is_stale(self) -> bool:
        """Whether the quantized weight is not that of the float weight as it is now; see `stale`."""
        return stale(self.moq, self.float_weight)

    def quantized_weight(self, dtype: torch.dtype | None = None, *, to_read: bool = False) -> Tensor:
        """What the forward pass multiplies with: of the shape of `weight`, gradient straight through to it.

        Args:
            dtype: Of the activations. Outside autocast a weight kept in another dtype is quantized afresh in its own.
            to_read: Give it in `dtype` under autocast too, which does not cast what is not multiplied.
        """
        state, weight = self.moq, self.parameter()
        if state.sharded is not None and weight is not None:
            is_whole = not is_sharded(weight) and weight.shape == shape_of(weight)
            return self._of_gathered(weight) if is_whole else self.quantized_copy(weight.dtype)
        weight = self.float_weight
        if not torch.compiler.is_compiling():
            state.used = True
            if self.__dict__.get("_is_replica", False):
                # Replicas share the state of the module they were copied from.
                return _straight_through(weight, self._compute(state.dtype))
            if self.is_stale():
                self.refresh(in_place=False)
            else:
                self.check_unwritten()
        quantized = state.weight
        if quantized is None:
            return weight
        autocast = torch.is_autocast_enabled(quantized.device.type)
        kept_for_autocast = state.dtype is not None and dtype is not None and quantized.dtype != dtype
        if kept_for_autocast and (to_read or not autocast):
            quantized = self._in_own_dtype(quantized)
        return _straight_through(weight, quantized)

    def _of_gathered(self, weight: Tensor) -> Tensor:
        """The quantized weight in a forward pass for which an engine has gathered `weight`."""
        state = self.moq
        if torch.compiler.is_compiling():
            quantized = state.gathering is not None
        else:
            state.used = True
            quantized = state.gathering is not None and state.gathering.holds(weight)
        if quantized or state.bits == FLOAT_BITS:
            return weight
        return _straight_through(weight, self._of_engine(weight))

    def _of_engine(self, weight: Tensor) -> Tensor:
        """The same of a weight whose memory an engine frees."""
        weight = weight.detach()
        # NumPy's view of it would forbid that.
        return self._quantized(weight.clone() if weight.device.type == "cpu" else weight, weight.dtype)

    def lean(self, quantized: Tensor) -> contextlib.AbstractContextManager[Any]:
        """In it autograd keeps of a weight that was quantized in this forward pass only how to quantize it again.

        Else the quantized weights of a whole model would lie in memory from the forward to the backward pass, while an
        engine frees the float ones.

        Args:
            quantized: From `quantized_weight`.
        """
        weight = self.moq.sharded is not None and self.parameter()
        if weight is False or weight is None or torch.compiler.is_compiling() or quantized is weight:
            return contextlib.nullcontext()
        pointer = quantized.untyped_storage().data_ptr()

        def keep(tensor: Tensor) -> Any:
            own = tensor.untyped_storage().data_ptr() == pointer
            return (tensor.size(), tensor.stride(), tensor.storage_offset()) if own else tensor

        def make(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            # The engine has gathered the weight again.
            return self._of_engine(cast(Tensor, self.parameter())).as_strided(*kept)

        return torch.autograd.graph.saved_tensors_hooks(keep, make)

    def own_part(self, dtype: torch.dtype) -> Tensor:
        """What this process holds of the quantized weight of a sharded layer; all processes must ask.

        Args:
            dtype: Of the result.
        """
        state, weight = self.moq, local_part(self.float_weight)
        if state.bits == FLOAT_BITS:
            return weight.to(dtype)
        how: dict[str, Any] = {"ratio": state.ratio, "draw": state.draw, "blend": state.blend}
        with torch.inference_mode(False), torch.no_grad():
            shard = Shard.of(self.float_weight, self.kind)
            return shard.fake_quantize(weight, state.bits, state.grid, **how, dtype=dtype, kernel=state.kernel)

    def quantized_copy(self, dtype: torch.dtype) -> Tensor:
        """The quantized weight, computed afresh, without a graph; of a sharded layer sharded as its float weight.

        All processes that share a weight must ask for it.

        Args:
            dtype: Of the result.
        """
        weight = self.float_weight
        if is_sharded(weight):
            return sharded_like(weight, self.own_part(dtype))
        return whole(weight).to(dtype) if self.moq.bits == FLOAT_BITS else self._quantized(whole(weight), dtype)

    def _in_own_dtype(self, quantized: Tensor) -> Tensor:
        """The quantized weight in the float weight's dtype, where it is kept in another."""
        if torch.compiler.is_compiling():
            return quantized.to(self.float_weight.dtype)
        read = self.moq.read
        if read is None:
            read = self._compute(self.float_weight.dtype)
            # Another thread may be looking: what it can see is complete.
            self.moq.read_version = read._version
            self.moq.read = read
        return read

    def quantized_input(self, input: Tensor) -> Tensor:
        """`input` `[..., features]` as the layer multiplies with it, gradient straight through."""
        inputs = self.moq.inputs
        rounded = None if inputs is None else inputs.quantize(input, self.training)
        return input if rounded is None else _straight_through(input, rounded)

    def refresh(self, *, in_place: bool = True) -> None:
        """Quantize the weight again; called after each optimizer step, for a sharded weight in every process.

        Args:
            in_place: Write into the tensor that holds the last result, so that compiled graphs see the new one.
        """
        state, weight = self.moq, self.float_weight
        self.check_unwritten()
        state.version = None
        self.mark_fresh()
        state.sharded = weight if is_apart(weight) else None
        if state.gathering is not None and state.gathering.parameter is weight:
            state.gathering.forget()
        else:
            # What was wrapped in another way since then is gathered in another.
            state.gathering = None
        if state.bits == FLOAT_BITS or weight.is_meta or state.sharded is not None:
            state.weight = None
            return
        old = state.weight
        keep = in_place and old is not None and old.device == weight.device
        keep = keep and old is not None and old.dtype == (state.dtype or weight.dtype)
        self.keep(self._compute(state.dtype, out=old if keep else None))

    def keep(self, quantized: Tensor) -> None:
        """Hold a quantized weight that is complete."""
        self.moq.weight, self.moq.version = quantized, _version_of(quantized)

    def check_unwritten(self) -> None:
        """Stop if code in a forward pass wrote into the quantized weight that it read: the float one never saw it.

        Raises:
            MoQError: Says what to do. The quantized weight is forgotten.
        """
        state = self.moq
        weight, read = state.weight, state.read
        known = state.version
        is_written = weight is not None and known is not None and known[0] == id(weight) and known[1] != weight._version
        # Another thread may just be quantizing: it takes the version away first, or has put another tensor here.
        is_written = is_written and state.version == known and state.weight is weight
        if not is_written and (read is None or read._version == state.read_version):
            return
        state.weight = state.read = state.source = None
        raise MoQError(
            f"{parameter_of(state.name, self.kind)} was written in place in a forward pass, where it is the quantized "
            "copy of the one that is trained: write it outside of the forward pass, or leave the layer in full "
            f'precision: add "{state.name}" to modules_to_not_convert'
        )

    def mark_fresh(self) -> None:
        """Note that the quantized weight is that of the float weight as it is now."""
        weight = self.float_weight
        self.moq.source, self.moq.key, self.moq.read = weight, key_of(weight), None

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; evaluation, and training after it, start from a weight that is quantized afresh."""
        changes = mode != self.training
        super().train(mode)
        state = self.moq
        if changes or not mode:
            state.source = None
        # Shards are quantized when they are gathered, which all processes take part in.
        if not is_sharded(self.float_weight) and self.is_stale():
            # A backward pass may still need the last result.
            self.refresh(in_place=False)
        return self

    def forget(self) -> None:
        """Take the quantized weight for stale, so that the next use quantizes afresh."""
        self.moq.source = None

    def set_bits(self, bits: int) -> None:
        """Change the precision, with the clipping ratios that the grid wants there; takes effect with `refresh`."""
        state, parameter = self.moq, self.float_weight
        # An optimizer need not count what it writes, so only a weight that none may own is known to be the same.
        frozen = None if parameter.requires_grad or is_apart(parameter) else key_of(parameter)
        if state.ratio is not None and bits == state.bits and frozen is not None and frozen == state.searched:
            return
        state.bits, state.ratio, state.searched = bits, None, frozen
        # On the meta device there is nothing to search.
        if bits == FLOAT_BITS or not state.grid.searches(bits) or parameter.is_meta:
            return
        if is_sharded(parameter):
            shard, part = Shard.of(parameter, self.kind), local_part(parameter)
            state.ratio = shard.least_squares_ratio(part, bits, state.grid, state.kernel)
            return
        weight = to_rows(whole(parameter), self.kind).contiguous()
        state.ratio = quantizer.least_squares_ratio(weight, bits, state.grid)

    def search_ratios(self) -> None:
        """Search the clipping ratios again, where the layer has some: for weights that are others now."""
        if self.moq.ratio is not None:
            self.set_bits(self.moq.bits)

    def take_step(self) -> None:
        """After an optimizer step that no controller follows: count it, search ratios if they are due, refresh."""
        self.count_steps(self.moq.draw.step + 1)
        if self.moq.inputs is not None:
            take_step([self.moq.inputs])
        if self.moq.config is not None and self.moq.draw.step % self.moq.config.scale_refresh == 0:
            self.search_ratios()
        self.refresh()

    def count_steps(self, steps: int) -> None:
        """Note how many optimizer steps were taken."""
        self.moq.draw = self.moq.draw._replace(step=steps)

    def follow(self) -> None:
        """Take over the precision of the layer that this one was copied from, once its own weights have changed.

        So an EMA's copy, made before the first switch, is quantized as the model is. A copy that is kept as it was, a
        float teacher for instance, stays as it was.
        """
        if self.moq.origin is None:
            return
        origin, kept = self.moq.origin[0](), self.moq.origin[1]
        if not isinstance(origin, QuantLayer) or torch.equal(_some(self.float_weight), kept):
            return
        for name in ("bits", "ratio", "blend", "draw", "dtype"):
            setattr(self.moq, name, getattr(origin.moq, name))
        self.moq.inputs = None if origin.moq.inputs is None else origin.moq.inputs.copy()
        self.moq.source = None

    def nonfinite(self) -> Tensor:
        """Whether the weight held NaN or Inf when it was quantized: a bool scalar on its device.

        Of a sharded weight whether what this process holds of it does.
        """
        if self.moq.sharded is not None and self.moq.bits != FLOAT_BITS:
            return local_part(self.moq.sharded).isfinite().all().logical_not()
        if self.moq.weight is None:
            device = "cpu" if self.float_weight.is_meta else self.float_weight.device
            return torch.zeros((), dtype=torch.bool, device=device)
        return quantizer.nonfinite(matrices(self.moq.weight, self.kind), self.moq.grid)

    def extra_repr(self) -> str:
        """The linear layer's own line and the bits."""
        bits = "float" if self.moq.bits == FLOAT_BITS else f"bits={self.moq.bits}"
        return f"{super().extra_repr()}, {bits}"

    def _compute(self, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        if self.moq.bits == FLOAT_BITS:
            return self.float_weight.detach()
        return self._quantized(self.float_weight.detach(), dtype, out)

    def _quantized(self, weight: Tensor, dtype: torch.dtype | None, out: Tensor | None = None) -> Tensor:
        """What the layer makes of a whole weight, in `out` if it is given."""
        state = self.moq
        # Leaving inference mode makes a result that training can use later.
        with torch.inference_mode(False), torch.no_grad():
            # A compiler traces PyTorch alone.
            kernel = False if torch.compiler.is_compiling() else state.kernel
            matrix = to_rows(weight, self.kind)
            how: dict[str, Any] = {"ratio": state.ratio, "seed": state.draw, "blend": state.blend, "dtype": dtype}
            values = backend(matrix, kernel).fake_quantize(matrix, state.bits, state.grid, **how)
            values = from_rows(values, self.kind, weight.shape)
            return values.contiguous() if out is None else out.copy_(values)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLayer":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.moq.ratio is not None:
            self.moq.ratio = self.moq.ratio.to(self.float_weight.device)
        self._move_inputs()
        self.refresh(in_place=False)
        return self

    def _move_inputs(self) -> None:
        if self.moq.inputs is not None and self.moq.inputs.observed.device != self.float_weight.device:
            self.moq.inputs = self.moq.inputs.to(self.float_weight.device)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # `assign` may have put the weight on another device.
        self._move_inputs()
        self.search_ratios()
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        weight = self.float_weight
        me: weakref.ref[nn.Module] = weakref.ref(self)
        kept = None if weight.is_meta or self.moq.sharded is not None else (me, _some(weight))
        copied = LayerState(**self.moq.__getstate__())
        copied.origin = kept
        return {**self.__dict__, "moq": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch([self])
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

    >>> from moq_hf import quantize_model
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> quantize_model(model, {"quantize_bits": {"start_bits": 3, "target_bits": 3}})
    Sequential(
      (0): QuantLinear(in_features=4, out_features=4, bias=True, bits=3)
      (1): Linear(in_features=4, out_features=2, bias=True)
    )
    """

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]` times the quantized weight, plus the bias."""
        weight = self.quantized_weight(input.dtype)
        with self.lean(weight):
            return F.linear(self.quantized_input(input), weight, self.bias)


class QuantConv1D(QuantLayer, Conv1D):
    """`Conv1D` of transformers, the linear layer of GPT-2, with a quantized weight; not constructed, as `QuantLinear`.

    Its weight is `[in_features, out_features]`. Rows, groups and channels are those of the transpose, as if it were the
    `nn.Linear` that computes the same.

    Attributes:
        moq: The layer's `LayerState`.
    """

    kind = "conv1d"
    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., in_features]` times the quantized weight, plus the bias."""
        rows = self.quantized_input(x).view(-1, x.size(-1))
        weight = self.quantized_weight(x.dtype)
        with self.lean(weight):
            return torch.addmm(self.bias, rows, weight).view(*x.size()[:-1], self.nf)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nf={self.nf}, nx={self.nx}{self.extra_repr()})"


class QuantEmbedding(QuantLayer, nn.Embedding):
    """`nn.Embedding` with a quantized table in its forward pass, one scale per row; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.
    """

    kind = "embedding"

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., embedding_dim]` of the quantized table for the indices `input` `[...]`."""
        return F.embedding(input, self.quantized_weight(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


# `quant_conv` adds the convolutions.
CLASSES: dict[type[nn.Module], type[QuantLayer]] = {
    nn.Linear: QuantLinear,
    Conv1D: QuantConv1D,
    nn.Embedding: QuantEmbedding,
}


def quant_class(base: type[nn.Module]) -> type[QuantLayer]:
    """The quantized class for layers of class `base`, made once."""
    if base not in CLASSES:
        quantized = next(made for plain, made in CLASSES.items() if issubclass(base, plain))
        # Its own forward pass reads the quantized table.
        own = {"forward": base.forward} if is_scaled_table(base) else {}
        CLASSES[base] = type(f"Quant{base.__name__}", (quantized, base), own)
    return CLASSES[base]


def base_class(cls: type[QuantLayer]) -> type[nn.Module]:
    """The class that a layer of class `cls` had before."""
    first, second = cls.__bases__[:2]
    if not issubclass(first, QuantLayer):
        # The class that fully_shard made of a quantized one.
        return type(cls.__name__.replace("Quant", "", 1), (first, base_class(second)), dict(cls.__dict__))
    return cast(type[nn.Module], second)


def _version_of(weight: Tensor) -> tuple[int, int]:
    """Which tensor it is, and how often it was written."""
    return id(weight), weight._version


def _some(weight: Tensor) -> Tensor:
    """64 elements from all over the weight, or a few more."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, len(flat) // 64)].clone()


def _new_layer(base: type[nn.Module]) -> QuantLayer:
    cls = quant_class(base)
    return cls.__new__(cls)
