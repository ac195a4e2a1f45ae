"""The state of a layer's quantization, from which a forward pass makes the layer's quantized weight."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from . import quantizer, triton_quant
from .config import MoQConfig
from .errors import MoQError, one_line
from .forward_pass import (
    MODULE_CALL,
    PassWeights,
    called_module,
    makes_state,
    numbered,
    quantized_in_graph,
    version_of,
)
from .grid import Grid, Precision
from .inputs import InputObserver
from .lattice import FoundGrid
from .processes import is_sharded
from .quantizer import RoundingSeed, Scales
from .schedule import FLOAT_BITS
from .seams.transformers import frames, is_exporting, is_transformed, pre_hooks
from .straight_through import straight_through
from .trained_scales import TrainedScales
from .weight_matrix import (
    Kind,
    from_rows,
    is_experts,
    is_in_rows,
    parameter_of,
    to_rows,
)

_FORWARD = ("forward", "compute_loss", "prediction_step")


def in_forward() -> bool:
    """True if this thread is inside a module's forward pass, or recomputes one for checkpointing.

    It looks at the stack: a flag would have to be kept right through exceptions, threads,
    copies and wrappers.
    """
    if torch.compiler.is_compiling():
        return True
    # Autograd runs hooks with gradients off, and checkpointing recomputes with gradients
    # on.
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        return True
    for frame in frames():
        code = frame.f_code
        if code is MODULE_CALL:
            return True
        # A module's method, called without `__call__`, or a Trainer's, which computes its loss.
        if code.co_name in _FORWARD and code.co_varnames:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, (nn.Module, Trainer)):
                return True
    return False


def in_pre_hook() -> bool:
    """True if the caller is a forward pre-hook of a module, or was called by one."""
    called: Any = None
    for frame in frames():
        if frame.f_code is MODULE_CALL:
            return called in map(_code_of, pre_hooks(called_module(frame)))
        # A call of a module with hooks has an inner function.
        if frame.f_code not in MODULE_CALL.co_consts:
            called = frame.f_code
    return False


def _code_of(hook: Any) -> Any:
    function = getattr(hook, "func", hook)
    call = function if hasattr(function, "__code__") else type(function).__call__
    return getattr(call, "__code__", None)


@dataclass(eq=False)
class LayerState:
    """The state of a weight's quantization.

    Attributes:
        grid: The weight's grid, whatever its bits.
        config: The config with which the model was quantized.
        kind: How the weight is laid out as a matrix to quantize; see `to_rows`.
        bits: Bit width, 1 to 16; 32 is unquantized.
        ratio: Clipping ratio per group, or None for absmax.
        blend: Share of the float weight in the forward pass.
        seed: The random numbers of stochastic rounding. Its step counts optimizer
            steps.
        inputs: Observes and quantizes a linear layer's inputs; None leaves them alone.
        name: The layer's name in the quantized model, for messages.
        has_controller: Whether a controller counts the optimizer steps; otherwise each
            call of `train()` counts as one.
        used: Whether a forward pass has used the weight since the layer was prepared.
        handed_over: Whether an engine, FSDP2 or ZeRO-3, hands the weight over for each
            pass and frees it afterwards.
        handed_dtype: The dtype in which it was last handed over; None before the first
            pass.
        scale: The weight's scale when the layer itself last quantized it; not finite
            where a group held NaN or Inf.
        dtype: The dtype of the last quantized weight.
        lora: Adds PEFT's adapters to the weight, if `"lora": "merged"` asks for that;
            see `MergedLora`.
        trained: The scales that are trained in place of the weight, and its codes, if
            `"train": "scales"` asks for that.
        found: The grid that the weight lay on, whose scales stay, if `"grid": "found"` asks
            for that; else None.
        passes: The quantized weights of the model's passes, shared with its other layers.
        read_dtype: The dtype in which a forward pass last multiplied by the weight.
        is_tied: Whether another layer has the same weight.
        was_left_out: Whether a pass with gradients that made the weight ahead did not call
            the layer.
        was_taken: Whether the layer took the weight that was last made ahead.
        awaits_call: Whether the last pass that made the weight ahead has not called the
            layer; it is not made ahead again until the layer is called.
        made: Quantized weights of the pass under way, if the backward pass is to compute
            them again.
        lent: The quantized weight that a hook read, and may have written to, and what it
            was made from.
        ahead: The result of the operator at the head of a compiled graph.
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
    trained: TrainedScales | None = field(default=None, repr=False)
    found: FoundGrid | None = field(default=None, repr=False)
    passes: PassWeights = field(default_factory=PassWeights, repr=False)
    read_dtype: torch.dtype = torch.float32
    is_tied: bool = False
    was_left_out: bool = False
    was_taken: bool = False
    awaits_call: bool = False
    made: list[Tensor] | None = field(default=None, repr=False)
    lent: tuple[Tensor, Any] | None = field(default=None, repr=False)
    ahead: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.number = numbered(self)
        self.numbers = torch.tensor([self.number], device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        # Copies are not part of the pass that is under way.
        return {**vars(self), "made": None, "lent": None, "ahead": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def precision(self) -> Precision:
        """The grid at the bits that the layer has now."""
        return self.grid.at(self.bits)

    @property
    def scales(self) -> Scales | None:
        """The scales that stay whatever the weight becomes; None if they follow from it."""
        return None if self.found is None else self.found.scales

    def read(self, weight: Tensor) -> Tensor:
        """Read a parameter: in a forward pass the quantized weight, in the parameter's dtype, elsewhere the parameter.

        Each reader gets its own memory, except the forward pass of experts, which reads
        their parameters once and gets the weight that the pass holds.

        Args:
            weight: The parameter, or the tensor that replaces it.

        Raises:
            RuntimeError: It cannot be quantized.
        """
        # Only FSDP2 itself reads shards, which it replaces with the whole weight before
        # anything is computed.
        if is_sharded(weight) or not in_forward():
            return weight
        try:
            if torch.compiler.is_compiling() and not is_exporting():
                return self.quantized_weight(weight, weight.dtype)
            is_hook = not is_exporting() and in_pre_hook()
            if is_experts(self.kind) and not is_hook:
                return self.quantized_weight(weight, weight.dtype)
            self.used = True
            if self.bits == FLOAT_BITS or weight.is_meta:
                return self.merged(weight)
            quantized = self._computed(weight, weight.dtype)
            if self.lent is not None:
                self._check_lent(weight)
            if is_hook:
                self.lent = quantized, self.sources(weight)[0]
                self.passes.lend(self)
            return quantized
        except AttributeError as error:
            # nn.Module would search on, and return the float weight.
            raise RuntimeError(
                f"{parameter_of(self.name, self.kind)} cannot be quantized: {error}"
            ) from error

    def merged(
        self, weight: Tensor, read: Callable[[Tensor], Tensor] = lambda values: values
    ) -> Tensor:
        """The float weight to quantize, including what adapters add to it; see `MergedLora.merged`."""
        return self.lora.merged(weight, read) if self.lora else weight

    def quantized_weight(
        self, weight: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The weight by which a forward pass multiplies: in the shape of `weight`, with the gradient straight through.

        Args:
            weight: The float weight as the pass has it.
            dtype: Dtype of the result; None is that of matrix products: autocast's, or
                the weight's own.

        Raises:
            MoQError: A transform of torch.func has stacked the weight, or is in forward
                mode; or a hook has written to the quantized weight.
            RuntimeError: The device has no memory for it.
        """
        if dtype is None:
            dtype = _matmul_dtype(weight)
        if torch.compiler.is_compiling() and not is_exporting():
            return self._traced(weight, dtype)
        self.used = True
        if self.bits == FLOAT_BITS or weight.is_meta:
            return self.merged(weight)
        self.read_dtype = dtype
        self.awaits_call = False
        if self.lent is not None:
            self._check_lent(weight)
        quantized = self.passes.take(self, weight, dtype)
        if quantized is None:
            quantized = self._computed(weight, dtype)
            # Recomputation by checkpointing, outside of the pass, merges again.
            is_alone = self.handed_over or (self.lora and quantized.requires_grad)
            # A tensor traced by torch.func or torch.export has no memory of its own.
            if not (is_alone or is_transformed() or is_exporting()):
                self.passes.keep(self, weight, dtype, quantized)
        if self.made is not None:
            self.made.append(quantized)
        return quantized

    def _computed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the quantized weight, with its gradient; arguments as in `quantized_weight`.

        Raises:
            MoQError: A transform of torch.func has stacked the weight, or is in forward
                mode.
            RuntimeError: The device has no memory for it.
        """
        try:
            weight = self.merged(weight)
            return self._with_gradient(weight, self._made_of(weight, dtype))
        except RuntimeError as error:
            if not is_transformed():
                raise
            raise MoQError(
                f"{parameter_of(self.name, self.kind)} cannot be quantized inside this transform of torch.func "
                f"({one_line(error)[:200]}): neither vmap over stacked weights nor forward mode (jvp, hessian) works. "
                "Map over inputs alone, call the models one by one, or turn them into float ones with "
                "moq_hf.dequantize_model"
            ) from error

    def quantized_rows(self, rows: Tensor) -> Tensor:
        """Rows of an embedding table that were looked up, quantized as the table would be.

        Args:
            rows: `[..., embedding_dim]`, with a graph if the table is trained.
        """
        matrix = rows.reshape(-1, rows.shape[-1])
        if torch.compiler.is_compiling():
            (made,) = quantized_in_graph([matrix.detach()], ~self.numbers, rows.dtype)
            return straight_through(rows, made.view_as(rows))
        self.used = True
        return straight_through(rows, self._made_of(matrix, rows.dtype).view_as(rows))

    def _made_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if torch.is_inference_mode_enabled():
            # The result may be used outside of inference mode.
            return makes_state(self.fake_quantize)(weight, dtype)
        return self.fake_quantize(weight, dtype)

    def _traced(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight by which a compiled graph multiplies, from the operator at its head or from a separate one."""
        merged = self.merged(weight)
        quantized = self.ahead
        if quantized is None or quantized.dtype != dtype or self.lora:
            (quantized,) = quantized_in_graph([merged.detach()], self.numbers, dtype)
        return self._with_gradient(merged, quantized)

    def _with_gradient(self, weight: Tensor, quantized: Tensor) -> Tensor:
        """Pass the gradient of a quantized weight to what is trained: the float weight, or its scales."""
        if self.trained is not None:
            return self.trained.with_gradient(quantized, self.kind)
        return straight_through(weight, quantized)

    def _check_lent(self, weight: Tensor) -> None:
        """Check that no forward pre-hook has written to the quantized weight that it read.

        Raises:
            MoQError: One has.
        """
        lent, self.lent = self.lent, None
        if lent is None or lent[1] != self.sources(weight)[0]:
            # Another thread has checked it, or the weight has changed.
            return
        anew = self._made_of(self.merged(weight.detach()), lent[0].dtype)
        if torch.equal(lent[0].detach(), anew) or not anew.isfinite().all():
            return
        name = parameter_of(self.name, self.kind)
        raise MoQError(
            f"a forward pre-hook has written to {name}, which is the quantized weight inside a forward pass, so that "
            "the change would be lost: register what it does with torch.nn.utils.parametrize before the model is "
            "quantized (the layer stays in float then), or write to the weight after each optimizer step"
        )

    def next_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype in which a pass that begins now will probably multiply by the weight."""
        if torch.is_autocast_enabled(weight.device.type):
            return _matmul_dtype(weight)
        # Accelerate turns on autocast only inside the forward pass.
        return self.read_dtype

    def may_be_made_ahead(self, weight: Tensor) -> bool:
        """True if a pass may make the quantized weight when it begins."""
        if self.bits == FLOAT_BITS or self.config.kernel is False or self.trained:
            return False
        # The kernel computes scales from weights.
        if self.found is not None:
            return False
        # Gradients of a tied weight are added in the order of its uses, and a hook may
        # recompute a weight that has a graph.
        if self.is_tied or weight.grad_fn is not None:
            return False
        return self.may_be_traced_ahead(weight)

    def may_be_traced_ahead(self, weight: Tensor) -> bool:
        """True if a compiled graph may make the quantized weight at its head, whatever the bits are."""
        # Shards have another class.
        if type(weight) not in (nn.Parameter, Tensor):
            return False
        return not (self.lora or self.handed_over or weight.is_meta)

    def job(self, weight: Tensor, dtype: torch.dtype) -> triton_quant.Job:
        """Make a job for the kernel, and note its dtype; `shaped` gives the result the weight's shape."""
        self.dtype = dtype
        is_matrix = weight.dim() == 2 and is_in_rows(self.kind)
        matrix = weight if is_matrix else to_rows(weight.detach(), self.kind)
        return triton_quant.Job(
            matrix, self.precision, self.ratio, self.seed, self.blend, dtype
        )

    def shaped(self, values: Tensor, weight: Tensor) -> Tensor:
        """Give the matrix that a kernel made the weight's shape."""
        if is_in_rows(self.kind) and values.shape == weight.shape:
            return values
        return from_rows(values, self.kind, weight.shape).contiguous()

    def fake_quantize(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Quantize a weight into new memory, without a graph, and note its scale.

        Args:
            weight: The whole float weight, merged, in the layer's own layout.
            dtype: Dtype of the result.
        """
        self.handed_dtype = weight.dtype if self.handed_over else None
        if self.trained is not None:
            own = self.trained.quantized(self.precision)
            values, scale = quantizer.dequantize(*own, dtype=dtype), own.scale
        else:
            has_kernel = self.config.kernel is not False
            rounded = triton_quant.rounded if has_kernel else quantizer.rounded
            if self.found is not None:
                rounded = functools.partial(quantizer.rounded, scales=self.scales)
            values, scale = rounded(
                to_rows(weight.detach(), self.kind),
                self.precision,
                self.ratio,
                self.seed,
                self.blend,
                dtype,
            )
        # A traced scale has no values to check later.
        self.scale = None if is_exporting() else scale
        self.dtype = dtype
        return self.shaped(values, weight)

    def sources(self, weight: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The sources of the quantized weight, in a form to compare, and the values whose addresses these name."""
        others = self.lora.parts() if self.lora else ()
        if self.trained is not None:
            others = (self.trained.parameter.detach(),)
        own = weight.detach()
        identity = (
            *_identity(own),
            id(self.ratio),
            self.blend,
            self.seed,
            *(part for each in others for part in _identity(each)),
        )
        return identity, (own, self.ratio, *others)


def _identity(part: Any) -> tuple[Any, ...]:
    """The address and version of a tensor; any other value itself."""
    return (part.data_ptr(), version_of(part)) if isinstance(part, Tensor) else (part,)


def _matmul_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which matrix products use a weight: autocast's, which leaves float64 alone, or the weight's own."""
    device = weight.device.type
    if (
        weight.dtype == torch.float64
        or device == "meta"
        or not torch.is_autocast_enabled(device)
    ):
        return weight.dtype
    return torch.get_autocast_dtype(device)
