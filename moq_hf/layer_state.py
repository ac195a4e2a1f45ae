"""How a layer is quantized now, as the layer keeps it."""

import copy
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .config import MoQConfig
from .gathering import Gathering
from .grid import Grid, InputGrid, PerChannel, PerGroup, RowBlocks
from .inputs import Inputs, new_inputs
from .model.staleness import Key
from .quantizer import RoundingSeed
from .schedule import FLOAT_BITS

# What a copy of a layer does not take along.
_OF_THE_LAYER = ("weight", "read", "source", "key", "searched", "origin", "sharded", "gathering")


@dataclass
class LayerState:
    """How a layer is quantized now.

    Attributes:
        grid: How the weight is quantized, whatever its bits are.
        bits: Bit width, 1 to 16; 32 is unquantized.
        ratio: Clipping ratio per group, or None for absmax.
        blend: Share of the float weight in the forward pass.
        draw: The random numbers of stochastic rounding. Its step counts optimizer steps, for the search of ratios.
        dtype: Of the quantized weight: what the matmul wants under autocast. None is the weight's own.
        kernel: `quantizer_kernel` of the config: false lets only `quantizer` compute.
        sharded: The float weight, if an engine takes it apart: FSDP2 puts a parameter of its own in its place for a
            forward pass, under ZeRO-3 it is whole there, and empty else.
        gathering: What FSDP2 gathers of such a weight, where it can be quantized before.
        weight: The quantized weight; None exactly if `bits` is 32 (or nothing can be computed: meta device), or if the
            weight is sharded.
        version: Which tensor `weight` was when it was made, and its tensor version; None while it is.
        read: The same in the float weight's dtype, for those who read the weight under autocast; made when asked for.
        read_version: As `version`, of `read`.
        source: The float weight that `weight` was made of; None makes it stale.
        key: What `source` was like then: its version, its memory, device and dtype.
        searched: What a frozen weight was like when its ratios were searched.
        used: Whether a forward pass has used the weight since the layer was made ready.
        origin: For a deep copy the layer that it was copied from, and some of the weights that it then had.
        config: What the model was made ready with.
        inputs: Of a linear layer: how its inputs are quantized; None leaves them alone.
        name: The layer's in the model that was made ready, for messages.
    """

    grid: Grid
    bits: int = FLOAT_BITS
    ratio: Tensor | None = None
    blend: float = 0.0
    draw: RoundingSeed = field(default_factory=RoundingSeed)
    dtype: torch.dtype | None = None
    kernel: bool | None = None
    sharded: Tensor | None = field(default=None, repr=False)
    gathering: Gathering | None = field(default=None, repr=False)
    weight: Tensor | None = None
    version: tuple[int, int] | None = None
    read: Tensor | None = field(default=None, repr=False)
    read_version: int = 0
    source: Tensor | None = field(default=None, repr=False)
    key: Key | None = field(default=None, repr=False)
    searched: Key | None = field(default=None, repr=False)
    used: bool = False
    origin: tuple[weakref.ref[nn.Module], Tensor] | None = field(default=None, repr=False)
    config: MoQConfig | None = field(default=None, repr=False)
    inputs: Inputs | None = None
    name: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **dict.fromkeys(_OF_THE_LAYER)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "options" in state:
            state = _of_0_1_0(state)
        if "activation_bits" in state:
            # Of earlier versions, which had one scale per token.
            state = dict(state)
            bits = state.pop("activation_bits")
            state["inputs"] = None if bits is None else new_inputs(InputGrid(bits, "per_token"), torch.device("cpu"))
        state = {name: value for name, value in state.items() if name != "gathered"}
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerState":
        return LayerState(**{**copy.deepcopy(self.__getstate__(), memo), "origin": self.origin})


def _of_0_1_0(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a layer in a model that moq_hf 0.1.0 pickled, as it is now."""
    old = dict(state)
    options, step, plain = old.pop("options"), old.pop("step"), old.pop("plain")
    groups, size = options.get("groups", 1), options.get("group_size")
    grouping = PerGroup(size) if size else PerChannel() if groups == "per_channel" else RowBlocks(groups)
    config: MoQConfig | None = old.get("config")
    grid = Grid(grouping, options.get("symmetric", True), options.get("rounding") == "stochastic")
    if config is not None:
        grid = replace(grid, search=config.scale)
    draw = RoundingSeed(options.get("seed", 0), options.get("layer", 0), step)
    return {**old, "grid": grid, "draw": draw, "kernel": False if plain else None}
