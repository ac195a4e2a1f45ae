"""How a layer is quantized now, as the layer keeps it, and what a forward pass makes of its weight."""

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from . import quantizer, triton_quant
from .config import MoQConfig
from .errors import MoQError, one_line
from .grid import Grid
from .inputs import InputObserver
from .processes import is_sharded
from .quantizer import RoundingSeed
from .schedule import FLOAT_BITS
from .seams.transformers import is_exporting, is_transformed
from .weight_matrix import Kind, from_rows, parameter_of, to_rows

# Every call of a module runs this code, whatever the module's class is.
_MODULE_CALL = nn.Module._call_impl.__code__
_FORWARD = ("forward", "compute_loss", "prediction_step")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def makes_state(function: _Function) -> _Function:
    """Decorate what makes tensors that outlive a pass, so that they can be trained with after one in inference mode."""
    without_graph = torch.no_grad()(function)
    return torch.inference_mode(False)(without_graph)


class _StraightThrough(torch.autograd.Function):
    """The quantized weight, with the float weight's gradient.

    Differentiable twice, and by torch.func's grad and vjp. A forward-mode rule would
    keep Dynamo from tracing it.
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


# What Function.apply does where no transform of torch.func is active, without binding
# arguments to a signature, which takes as long as all the rest.
_apply = super(torch.autograd.Function, _StraightThrough).apply


def straight_through(weight: Tensor, quantized: Tensor) -> Tensor:
    """The quantized weight, whose gradient is that of the float weight."""
    if is_exporting() and torch.is_grad_enabled():
        # Of a Function torch.export keeps what it computes, and not its gradient.
        return quantized + (weight - weight.detach()).to(quantized.dtype)
    plain = not torch.compiler.is_compiling() and not is_transformed()
    apply = _apply if plain else _StraightThrough.apply
    return cast(Tensor, apply(weight, quantized))  # type: ignore[no-untyped-call]


def in_forward() -> bool:
    """Whether this thread is inside a module's forward pass, or recomputes one for checkpointing.

    Read off the stack: a flag would have to be kept right through exceptions, threads,
    copies and wrappers.
    """
    if torch.compiler.is_compiling():
        return True
    # Autograd runs hooks with gradients off, and what checkpointing recomputes with
    # gradients on.
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _MODULE_CALL:
            return True
        # A module's function, called without its `__call__`, or a Trainer's, with its loss.
        if code.co_name in _FORWARD and code.co_varnames:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, (nn.Module, Trainer)):
                return True
        frame = frame.f_back
    return False


@dataclass(eq=False)
class LayerState:
    """How a layer is quantized now.

    Attributes:
        grid: How the weight is quantized, whatever its bits are.
        config: The config with which the model was quantized.
        kind: How the weight is laid out as the matrix that is quantized; see `to_rows`.
        bits: Bit width, 1 to 16; 32 is unquantized.
        ratio: Clipping ratio per group, or None for absmax.
        blend: Share of the float weight in the forward pass.
        seed: The random numbers of stochastic rounding. Its step counts optimizer
            steps.
        inputs: How a linear layer's inputs are quantized; None leaves them alone.
        name: The layer's name in the quantized model, for messages.
        has_controller: Whether a controller counts the optimizer steps; otherwise each
            call of `train()` counts as one.
        used: Whether a forward pass has used the weight since the layer was made ready.
        handed_over: Whether an engine, FSDP2 or ZeRO-3, hands the weight over for each
            pass and frees it after that.
        handed_dtype: The dtype in which it was handed over last; None before the first
            pass.
        scale: The weight's scale when it was last quantized; not finite where a group
            held NaN or Inf.
        dtype: What it was quantized to then.
        lora: Gives the weight with PEFT's adapters in it, where `"lora": "merged"` asks
            for that; see `MergedLora`.
    """

    grid: Grid
    config: MoQConfig = field(repr=False)
    kind: Kind = "linear"
    bits: int = FLOAT_BITS
    ratio: Tensor | None = None
    blend: float = 0.0
    seed: RoundingSeed = field(default_factory=RoundingSeed)
    inputs: InputObserver | None = None
    name: str = ""
    has_controller: bool = False
    used: bool = False
    handed_over: bool = False
    handed_dtype: torch.dtype | None = None
    scale: Tensor | None = field(default=None, repr=False)
    dtype: torch.dtype = torch.float32
    lora: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        # The quantized weights that evaluation keeps, each with what it was made of, by
        # dtype: what reads a weight under autocast wants another one than what
        # multiplies with it.
        self.copies: dict[torch.dtype, tuple[Tensor, list[Any], list[Any]]] = {}
        # Quantized weights of the pass that is under way, where the backward pass is to
        # compute them again.
        self.made: list[Tensor] | None = None
        # Compiled graphs know the state by its number: a tensor, on which they do not
        # depend.
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        _states[number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("copies", "made", "number")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def read(self, weight: Tensor, training: bool) -> Tensor:
        """What reading a parameter gives: in a forward pass the quantized weight, in the parameter's dtype.

        Args:
            weight: The parameter, or the tensor that replaces it.
            training: Whether its module is in training.

        Raises:
            RuntimeError: It cannot be quantized.
        """
        # Shards are for FSDP2 itself to see, which replaces them by the whole weight
        # before anything is computed.
        if is_sharded(weight) or not in_forward():
            return weight
        try:
            return self.quantized_weight(weight, weight.dtype, training)
        except AttributeError as error:
            # nn.Module would look on, and give the float weight.
            raise RuntimeError(
                f"{parameter_of(self.name, self.kind)} cannot be quantized: {error}"
            ) from error

    def merged(
        self, weight: Tensor, read: Callable[[Tensor], Tensor] = lambda values: values
    ) -> Tensor:
        """The float weight that is quantized, with what adapters add to it; see `MergedLora.merged`."""
        return self.lora.merged(weight, read) if self.lora else weight

    def quantized_weight(
        self, weight: Tensor, dtype: torch.dtype | None, training: bool
    ) -> Tensor:
        """What a forward pass multiplies with: of the shape of `weight`, gradient straight through to it.

        Args:
            weight: The float weight as the pass has it.
            dtype: Of the result; None is what a matrix product takes: autocast's dtype,
                or the weight's own.
            training: Whether the layer is in training.

        Raises:
            MoQError: A transform of torch.func has stacked the weight, or goes forward.
            RuntimeError: The device has no memory for it.
        """
        if dtype is None:
            dtype = _matmul_dtype(weight)
        if torch.compiler.is_compiling() and not is_exporting():
            merged = self.merged(weight)
            return cast(Tensor, fake_quantize_in_graph(merged, self.number, dtype))
        self.used = True
        if self.bits == FLOAT_BITS or weight.is_meta:
            return self.merged(weight)
        changes = training or torch.is_grad_enabled() or self.handed_over
        try:
            # What torch.func and torch.export trace has no memory of its own, by which
            # a copy would be known.
            if changes or is_transformed() or is_exporting():
                self.copies.clear()
                weight = self.merged(weight)
                quantized = self.fake_quantize(weight, dtype)
            else:
                quantized = self.copy_of(weight, dtype)
            if self.made is not None:
                self.made.append(quantized)
            return straight_through(weight, quantized)
        except RuntimeError as error:
            if not is_transformed():
                raise
            raise MoQError(
                f"{parameter_of(self.name, self.kind)} cannot be quantized inside this transform of torch.func "
                f"({one_line(error)[:200]}): neither vmap over stacked weights nor forward mode (jvp, hessian) works. "
                "Map over inputs alone, call the models one by one, or make float ones of them by "
                "moq_hf.dequantize_model"
            ) from error

    def fake_quantize(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The quantized weight in memory of its own, without a graph; also notes its scale.

        Args:
            weight: The whole float weight, merged, in the layer's own layout.
            dtype: Of the result.
        """
        self.handed_dtype = weight.dtype if self.handed_over else None
        fake_quantize = quantizer.fake_quantize_with_scale
        if self.config.kernel is not False:
            fake_quantize = triton_quant.fake_quantize_with_scale
        values, scale = fake_quantize(
            to_rows(weight.detach(), self.kind),
            self.bits,
            self.grid,
            ratio=self.ratio,
            seed=self.seed,
            blend=self.blend,
            dtype=dtype,
        )
        # What is traced has no values that could be looked at afterwards, and no step
        # follows on what inference mode makes.
        is_read = not is_exporting() and not torch.is_inference_mode_enabled()
        self.scale, self.dtype = scale if is_read else None, dtype
        return from_rows(values, self.kind, weight.shape).contiguous()

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Give the quantized weight, kept from one pass to the next while nothing has changed that it was made of.

        Two threads may both make it; they come to the same.

        Args:
            weight: The whole float weight.
            dtype: Of the result.
        """
        # As long as these live, no other tensors can have their addresses.
        sources = [weight.detach(), self.ratio, self.bits, self.blend, self.seed]
        if self.lora:
            sources += self.lora.parts()
        made_of = list(map(_identity, sources))
        # Looked up once: another thread may drop the copies meanwhile.
        kept = self.copies.get(dtype)
        if kept is None or kept[1] != made_of:
            make = makes_state(self.fake_quantize)
            kept = make(self.merged(weight), dtype), made_of, sources
            self.copies[dtype] = kept
        return kept[0]


def _identity(part: Any) -> Any:
    """The address and version of a tensor; any other value itself."""
    if not isinstance(part, Tensor):
        return part
    return part.data_ptr(), 0 if part.is_inference() else part._version


def _matmul_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a weight is multiplied: that of autocast, which leaves float64 alone, or its own."""
    device = weight.device.type
    if (
        weight.dtype == torch.float64
        or device == "meta"
        or not torch.is_autocast_enabled(device)
    ):
        return weight.dtype
    return torch.get_autocast_dtype(device)


_numbers = itertools.count()
_states: "weakref.WeakValueDictionary[int, LayerState]" = weakref.WeakValueDictionary()


# What a graph captured for good would be wrong after a drop: inductor is to leave it
# out of those of mode "reduce-overhead".
@torch.library.custom_op(
    "moq_hf::fake_quantize", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def fake_quantize_in_graph(
    weight: Tensor, number: Tensor, dtype: torch.dtype
) -> Tensor:
    """What a compiled graph calls to quantize a weight: it holds for all bits, and the numbers are those of eager code.

    Args:
        weight: The whole float weight.
        number: That of the `LayerState`.
        dtype: Of the result.
    """
    state = _states[int(number)]
    state.used = True
    if state.bits == FLOAT_BITS:
        return weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return state.fake_quantize(weight, dtype)


@fake_quantize_in_graph.register_fake
def _(weight: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


# Graphs, checkpointing and autograd see one operator with the gradient of
# `straight_through`.
fake_quantize_in_graph.register_autograd(
    lambda ctx, grad: (grad.to(ctx.dtype), None, None),
    setup_context=_StraightThrough.setup_context,
)
