"""How a layer is quantized now, as the layer keeps it, and what it makes of a weight."""

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import quantizer, triton_quant
from .config import MoQConfig
from .grid import Grid
from .inputs import Inputs
from .quantizer import RoundingSeed
from .schedule import FLOAT_BITS
from .weight_matrix import Kind, from_rows, to_rows


class Copy(NamedTuple):
    """A quantized weight that is kept while a model is evaluated, and what it was made of and with.

    Attributes:
        values: The quantized weight.
        source: An alias of the float weight: as long as it lives, no other weight can have its address.
        version: The float weight's tensor version.
        precision: Bits, blend and random numbers.
        ratio: The clipping ratios.
    """

    values: Tensor
    source: Tensor
    version: int
    precision: tuple[Any, ...]
    ratio: Tensor | None


@dataclass(eq=False)
class LayerState:
    """How a layer is quantized now.

    Attributes:
        grid: How the weight is quantized, whatever its bits are.
        kind: How the weight is laid out as the matrix that is quantized; see `to_rows`.
        bits: Bit width, 1 to 16; 32 is unquantized.
        ratio: Clipping ratio per group, or None for absmax.
        blend: Share of the float weight in the forward pass.
        seed: The random numbers of stochastic rounding. Its step counts optimizer steps.
        kernel: `quantizer_kernel` of the config: false lets only `quantizer` compute.
        config: What the model was made ready with.
        inputs: Of a linear layer: how its inputs are quantized; None leaves them alone.
        name: The layer's in the model that was made ready, for messages.
        has_controller: Whether a controller counts the optimizer steps; otherwise each call of `train()` counts as one.
        used: Whether a forward pass has used the weight since the layer was made ready.
        handed_over: Whether an engine, FSDP2 or ZeRO-3, hands the weight over for each pass and frees it after that.
        handed_dtype: The dtype in which it was handed over last; None before the first pass.
        scale: That of the weight when it was last quantized: not finite where a group held NaN or Inf.
    """

    grid: Grid
    kind: Kind = "linear"
    bits: int = FLOAT_BITS
    ratio: Tensor | None = None
    blend: float = 0.0
    seed: RoundingSeed = field(default_factory=RoundingSeed)
    kernel: bool | None = None
    config: MoQConfig | None = field(default=None, repr=False)
    inputs: Inputs | None = None
    name: str = ""
    has_controller: bool = False
    used: bool = False
    handed_over: bool = False
    handed_dtype: torch.dtype | None = None
    scale: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        # Copies by dtype: what reads a weight under autocast wants another one than what multiplies with it.
        self.copies: dict[torch.dtype, Copy] = {}
        # Quantized weights of the pass that is under way, where the backward pass is to compute them again.
        self.made: list[Tensor] | None = None
        # Compiled graphs know the state by its number: a tensor, on which they do not depend.
        number = next(_numbers)
        self.number = torch.tensor(number, device="cpu")
        _states[number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("copies", "made", "number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def fake_quantize(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The quantized weight in memory of its own, without a graph; also notes its scale.

        Args:
            weight: The whole float weight, in the layer's own layout.
            dtype: Of the result.
        """
        with torch.no_grad():
            matrix = to_rows(weight.detach(), self.kind)
            numerics = quantizer if self.kernel is False else triton_quant
            values, self.scale = numerics.fake_quantize_with_scale(
                matrix, self.bits, self.grid, ratio=self.ratio, seed=self.seed, blend=self.blend, dtype=dtype
            )
            return from_rows(values, self.kind, weight.shape).contiguous()

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The quantized weight, kept from one pass to the next for as long as nothing has changed that it was made of.

        Two threads may both make it; they come to the same.

        Args:
            weight: The whole float weight.
            dtype: Of the result.
        """
        version = 0 if weight.is_inference() else weight._version
        precision = (self.bits, self.blend, self.seed)
        kept = self.copies.get(dtype)
        if (
            kept is not None
            and kept.source.data_ptr() == weight.data_ptr()
            and kept.version == version
            and kept.precision == precision
            and kept.ratio is self.ratio
        ):
            return kept.values
        quantized = self.fake_quantize(weight, dtype)
        self.copies[dtype] = Copy(quantized, weight.detach(), version, precision, self.ratio)
        return quantized

    def search(self, weight: Tensor) -> None:
        """Find the clipping ratios of a whole float weight, where the grid wants any at these bits."""
        self.ratio = None
        if self.bits == FLOAT_BITS or not self.grid.searches(self.bits) or weight.is_meta:
            return
        self.ratio = quantizer.least_squares_ratio(to_rows(weight.detach(), self.kind), self.bits, self.grid)


_numbers = itertools.count()
_states: "weakref.WeakValueDictionary[int, LayerState]" = weakref.WeakValueDictionary()


@torch.library.custom_op("moq_hf::fake_quantize", mutates_args=())
def fake_quantize_in_graph(weight: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
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
