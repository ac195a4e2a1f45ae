"""`QuantizedWeight`: a handle on a quantized weight, which holds its module, the attribute, and its `LayerState`.

The weight of a layer and each parameter of a mixture of experts are treated alike here;
see `quant_linear` for the modules.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import quantizer, triton_search
from .errors import MoQError
from .forward_pass import makes_state
from .inputs import InputObserver, inputs_out_of_reach
from .layer_state import LayerState
from .processes import is_gathered_per_pass, shape_of, whole
from .schedule import FLOAT_BITS
from .trained_scales import SCALES_APART
from .weight_matrix import Kind, is_experts, matrix_shape, parameter_of, to_rows


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight of a model; two handles on the same weight are equal.

    Args:
        module: The `QuantModule` that owns the float weight.
        attribute: The parameter's name there.
        moq: The state of its quantization.
    """

    # The module of `QuantModule` imports this one.
    module: Any
    attribute: str
    moq: LayerState = field(repr=False)

    @property
    def kind(self) -> Kind:
        """How the weight is laid out as a matrix to quantize; a tied layer has the kind of its own class."""
        kind: Kind = self.module.moq_kind or self.moq.kind
        return kind

    def name_in(self, module: str) -> str:
        """The weight's name in a model, given that of its module: the layer's name, or that of experts' parameter."""
        if is_experts(self.kind):
            return f"{module}.{self.attribute}".lstrip(".")
        return module

    @property
    def float_weight(self) -> Tensor:
        """The parameter that is trained, or what replaces it; see `QuantModule.float_parameter`."""
        weight: Tensor = self.module.float_parameter(self.attribute)
        return weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole weight as a matrix; see `to_rows`."""
        return matrix_shape(shape_of(self.float_weight), self.kind)

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight by which a forward pass multiplies; see `LayerState.quantized_weight`."""
        return self.moq.quantized_weight(self.float_weight, dtype)

    def quantized_copy(self, dtype: torch.dtype) -> Tensor:
        """The quantized weight, whole and without a graph; all processes that share a weight must call this.

        Args:
            dtype: Dtype of the result.
        """
        weight = self.whole_weight()
        return (
            weight.to(dtype)
            if self.moq.bits == FLOAT_BITS
            else self.moq.fake_quantize(weight, dtype)
        )

    def whole_weight(self) -> Tensor:
        """The float weight that is quantized, whole and without a graph, in the dtype in which an engine hands it over.

        All processes that share the weight must call this.
        """

        def read(parameter: Tensor) -> Tensor:
            values = whole(parameter)
            return values.to(self.moq.handed_dtype or values.dtype)

        return self.moq.merged(read(self.float_weight), read).detach()

    def set_bits(self, bits: int) -> None:
        """Change the precision, and search the clipping ratios that the grid wants at these bits.

        All processes that share a weight must call this, since the weight is gathered.
        """
        self.moq.bits = bits
        self.search_ratios()
        self.freeze_codes()

    @makes_state
    def freeze_codes(self, keeps_scales: bool = False) -> None:
        """Where scales are trained, take the codes of the weight as it is now.

        Args:
            keeps_scales: Whether the scales were trained for these codes already.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        state = self.moq
        weight = self.float_weight
        if state.trained is None or state.bits == FLOAT_BITS or weight.is_meta:
            return
        try:
            values = quantizer.quantize(
                to_rows(weight, self.kind),
                state.bits,
                state.grid,
                ratio=state.ratio,
                scales=state.scales,
            )
        except ValueError as error:
            name = parameter_of(state.name, state.kind)
            raise MoQError(f"{name} cannot be quantized: {error}") from error
        state.trained.freeze(values, keeps_scales)
        state.passes.drop(state)

    @makes_state
    def search_ratios(self) -> None:
        """Search the clipping ratios for the weight as it is now, if the grid wants any."""
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
        """Forget the quantized weight that is held, and check whether an engine has taken over the float one.

        Raises:
            MoQError: One has, and scales are trained.
        """
        self.moq.passes.drop(self.moq)
        self.moq.lent = None
        # FSDP2 leaves some weights gathered after a pass without gradients.
        self.moq.handed_over |= is_gathered_per_pass(self.float_weight)
        if self.moq.trained is not None and self.moq.handed_over:
            raise MoQError(SCALES_APART)

    @makes_state
    def count_step(self, mode: bool) -> None:
        """Count a call of `train()` as an optimizer step; a call of `eval()` only updates the ranges of inputs.

        Raises:
            MoQError: The inputs of the layer should be rounded, but it is never called.
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
        is_due = state.seed.step % state.config.scale_refresh == 0
        if is_due and state.trained is None:
            self.search_ratios()

    def after_load(self, has_scales: bool) -> None:
        """Search the clipping ratios again, after other values were loaded into the weight.

        Args:
            has_scales: True if trained scales were loaded, too.
        """
        # `assign` may have put the weight on another device.
        self.after_change()
        if self.moq.ratio is not None:
            self.search_ratios()
        self.freeze_codes(has_scales)

    @makes_state
    def after_change(self) -> None:
        """After a change of the weight, move its state to its device, and forget its quantized copy."""
        state, device = self.moq, self.float_weight.device
        state.scale = None
        self.invalidate()
        if device.type == "meta":
            return
        if state.ratio is not None:
            state.ratio = state.ratio.to(device)
        if state.inputs is not None:
            state.inputs.move_to(device)
        if state.trained is not None:
            state.trained.move_to(device)
        if state.found is not None:
            state.found = state.found.on(device)

    def release(self) -> None:
        """Leave the weight in float."""
        self.moq.passes.changes += 1
        self.module.release_weight(self.attribute)
        if self.moq.trained is not None:
            self.moq.trained.remove()


def inputs_of(layers: Mapping[str, QuantizedWeight]) -> dict[str, InputObserver]:
    """The observers of the layers whose inputs are rounded, by the layers' names."""
    return {
        name: layer.moq.inputs
        for name, layer in layers.items()
        if layer.moq.inputs is not None
    }


@contextlib.contextmanager
def recomputing_in_backward(weights: Sequence[QuantizedWeight]) -> Iterator[None]:
    """Have autograd keep, for weights that engines hand over, only how to quantize them again.

    Otherwise the quantized weights of a whole model would stay in memory from the forward
    to the backward pass, while the engine frees the float ones, which it hands over again
    for the backward pass.

    Args:
        weights: The weights by which the forward pass in the context multiplies.
    """
    handed = [weight for weight in weights if weight.moq.handed_over]

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        address = tensor.untyped_storage().data_ptr()
        for weight in handed:
            for made in weight.moq.made or ():
                if made.untyped_storage().data_ptr() == address:
                    return functools.partial(
                        _again,
                        weight,
                        made.dtype,
                        tensor.size(),
                        tensor.stride(),
                        tensor.storage_offset(),
                    )
        return tensor

    for weight in handed:
        weight.moq.made = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            pack, lambda kept: kept if isinstance(kept, Tensor) else kept()
        ):
            yield
    finally:
        for weight in handed:
            weight.moq.made = None


def _again(weight: QuantizedWeight, dtype: torch.dtype, *place: Any) -> Tensor:
    """Quantize a weight again, and return the part at a place in its memory."""
    merged = weight.moq.merged(weight.float_weight)
    return weight.moq.fake_quantize(merged, dtype).as_strided(*place)
