"""What FSDP2 gathers for a forward pass of a quantized layer: quantized weights, made where they lie.

FSDP2 asks the part of a parameter that a process holds what to gather of it, and what to make of what was gathered
(`fsdp_pre_all_gather` and `fsdp_post_all_gather`). Each process quantizes its part, once per optimizer step. Gathered
are the values in the dtype of the forward pass, or the codes packed and their scales, from which each process makes the
values. The gradient of the values is that of the float weight, whose shards get it reduced as ever.

Not all of FSDP2 takes part: parts that are kept on the CPU, a forward pass that leaves parts of another size behind,
and a weight that two layers quantize in two ways. There the float weight is gathered, and quantized in the forward
pass.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from .engine_seams import FsdpParameter, fsdp_parameters
from .grid import Grid
from .kernels.packing import pack, unpack
from .processes import is_sharded, local_part
from .quantizer import Quantized, dequantize
from .rows import Kind
from .shards import Shard

# The most bits that codes are packed at; more are gathered as values.
PACKED = 8
# Codes that are packed or unpacked at once: beside them a byte for each of their bits is needed.
_AT_ONCE = 1 << 20


class Gathered(Protocol):
    """A quantized layer, as this module knows it."""

    kind: Kind
    moq: Any

    def is_stale(self) -> bool:
        """Whether the weight has changed since `refresh`."""

    def refresh(self) -> None:
        """Note how the weight is now."""

    def own_part(self, dtype: torch.dtype) -> Tensor:
        """What this process holds of the quantized weight."""


class _Codes(NamedTuple):
    """How the codes of a weight are packed: a number s of `pack` stands for the code step * s + first.

    Attributes:
        bits: Of a code.
        step: 2 for the two codes of 1 bit, which are -1 and +1; else 1.
        first: The code of 0.
        columns: Of the matrix.
    """

    bits: int
    step: int
    first: int
    columns: int

    @classmethod
    def of(cls, bits: int, grid: Grid, columns: int) -> "_Codes":
        """Those of a grid."""
        if bits == 1:
            return cls(bits, 2, 1, columns)
        return cls(bits, 1, 0 if grid.symmetric else 2 ** (bits - 1), columns)


class Gathering:
    """What is gathered of one weight.

    Args:
        layer: That has it.
        engine: FSDP2's own of the parameter.
    """

    def __init__(self, layer: Gathered, engine: FsdpParameter) -> None:
        # The parameter has this object, the layer the parameter.
        self._layer = weakref.ref(layer)
        self._engine = engine
        self._inputs: tuple[tuple[Tensor, ...], _Codes | None] | None = None
        self._values: Tensor | None = None
        self._sizes: list[tuple[torch.Size, torch.dtype]] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded float weight, which FSDP2 takes out of the layer for a forward pass."""
        return self._engine.parameter

    @property
    def dtype(self) -> torch.dtype:
        """Of the values in a forward pass."""
        return self._engine.dtype or self.parameter.dtype

    def holds(self, weight: Tensor) -> bool:
        """Whether a parameter in the layer is what was made of gathered parts, and so is quantized.

        It is not where the parameter has lost its link with this object: with `load_state_dict(assign=True)`.
        """
        return self._values is not None and (
            weight.untyped_storage().data_ptr() == self._values.untyped_storage().data_ptr()
        )

    def attach(self) -> None:
        """Have FSDP2 ask this object; again where the parts of the parameter are in other memory now."""
        part = self._engine.part
        if getattr(part, "fsdp_pre_all_gather", None) != self.fsdp_pre_all_gather:
            part.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
            part.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
            self._engine.begin_again()

    def detach(self) -> None:
        """Have FSDP2 gather the float weight again."""
        part: Any = self._engine.part
        if hasattr(part, "fsdp_pre_all_gather"):
            del part.fsdp_pre_all_gather, part.fsdp_post_all_gather
            self._engine.begin_again()

    def forget(self) -> None:
        """Quantize afresh before the next gathering."""
        self._inputs = None

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], _Codes | None]:
        """What this process gives, and how to read it."""
        layer = cast(Gathered, self._layer())
        if layer.is_stale():
            layer.refresh()
        if self._inputs is None:
            self._inputs = self._made(layer, -(-outer_size[0] // mesh.size()))
            sizes = [(each.shape, each.dtype) for each in self._inputs[0]]
            if self._sizes not in (None, sizes):
                self._engine.begin_again()
            self._sizes = sizes
        return self._inputs

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], codes: _Codes | None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight of what all processes gave, and what memory FSDP2 may free with it."""
        if codes is None:
            # FSDP2 takes as many rows of it as there are.
            self._values = outputs[0]
        else:
            if out is None:
                self._values = torch.empty(self.parameter.shape, dtype=dtype, device=outputs[0].device)
            # Not for autograd to see, as where FSDP2 writes: in a backward pass it is the same again.
            _unpack(outputs, codes, cast(Tensor, self._values).data)
        return (self._values, (self._values,)) if out is None and self._values is not None else None

    def _made(self, layer: Gathered, height: int) -> tuple[tuple[Tensor, ...], _Codes | None]:
        shard, state = Shard.of(self.parameter, layer.kind), layer.moq
        if not self._is_packed(shard, state):
            return (_padded(layer.own_part(self.dtype), height),), None
        codes = _Codes.of(state.bits, state.grid, shard.columns)
        part = shard.quantize(local_part(self.parameter), state.bits, state.grid, state.ratio, state.draw)
        return _pack(part, codes), codes

    def _is_packed(self, shard: Shard, state: Any) -> bool:
        wanted = state.config is not None and state.config.gather == "packed"
        fits = state.bits <= PACKED and not state.blend and shard.kind in ("linear", "embedding", "experts")
        # FSDP2 wants of an uneven part what has its size, and of one process a single tensor.
        return wanted and fits and shard.is_even and shard.processes > 1 and not shard.is_split(state.grid)


def gather_quantized(model: nn.Module, layers: Iterable[Any]) -> None:
    """Have FSDP2 gather these layers quantized, where it can; does nothing for layers that are gathered so already.

    Args:
        model: That may have been given to `fully_shard`, or parts of it.
        layers: Its quantized layers.
    """
    sharded = [layer for layer in layers if is_sharded(layer.float_weight)]
    # A weight that was tied after its layers were quantized may have two states, and is gathered once.
    states: dict[int, set[int]] = {}
    for layer in sharded:
        states.setdefault(id(layer.moq.sharded), set()).add(id(layer.moq))
    sharded = [layer for layer in sharded if len(states[id(layer.moq.sharded)]) == 1]
    if all(layer.moq.gathering is not None for layer in sharded):
        for layer in sharded:
            layer.moq.gathering.attach()
        return
    engines = {id(engine.parameter): engine for engine in fsdp_parameters(model)}
    for layer in sharded:
        engine = engines.get(id(layer.moq.sharded))
        if engine is not None and engine.takes_extensions:
            layer.moq.gathering = Gathering(layer, engine)
            layer.moq.gathering.attach()


def _padded(part: Tensor, height: int) -> Tensor:
    missing = height - len(part)
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def _pack(part: Quantized, codes: _Codes) -> tuple[Tensor, ...]:
    """Words, scales and perhaps zero points."""
    rows = max(1, _AT_ONCE // codes.columns)
    words = [pack((some - codes.first) // codes.step, codes.bits) for some in torch.split(part.codes, rows)]
    zeros = () if part.zero_point is None else (part.zero_point.to(torch.uint8),)
    return (torch.cat(words), part.scale, *zeros)


def _unpack(outputs: tuple[Tensor, ...], codes: _Codes, out: Tensor) -> None:
    """Write the values of gathered words, scales and zero points into a weight."""
    words, scale, *zeros = outputs
    matrix = out.view(-1, codes.columns)
    # A scale for several rows is there for each of them.
    each = len(matrix) // len(scale)
    scales, *zero_points = (part.repeat_interleave(each, 0) for part in (scale, *zeros))
    rows = max(1, _AT_ONCE // codes.columns)
    for first in range(0, len(matrix), rows):
        some = slice(first, first + rows)
        found = unpack(words[some], codes.bits, codes.columns).mul_(codes.step).add_(codes.first)
        zero = zero_points[0][some] if zero_points else None
        matrix[some] = dequantize(found, scales[some], zero, dtype=out.dtype)
