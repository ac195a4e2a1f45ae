"""A weight encoded for the files, and one that was read from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import PerChannel, RowBlocks
from ..quantizer import Quantized, per_weight
from ..weight_matrix import is_experts, parameter_of
from ..weight_spec import WeightSpec


class EncodedWeight(NamedTuple):
    """A weight encoded for the files.

    Attributes:
        parts: Tensors by the last part of their name; those of experts by the whole
            name.
        scheme: The config group of compressed-tensors without its targets; None for
            floats.
        grid: Scales and zero points for `moq_state.json`, if no tensor holds them.
    """

    parts: dict[str, Tensor]
    scheme: dict[str, Any] | None = None
    grid: tuple[str, str | None] | None = None

    def named(self, spec: WeightSpec) -> dict[str, Tensor]:
        """The tensors by their names in the files.

        Modules that are tied to a table share its weight, but have their own scales and
        zero points.
        """
        if spec.matrices:
            return self.parts
        parts = dict(self.parts)
        weight = parts.pop("weight", None)
        owners = (spec.name,) if weight is None else (spec.name, *spec.tied)
        # Experts are a parameter; any other layer is a module.
        joint = "_" if is_experts(spec.kind) else "."
        tensors = {
            f"{owner}{joint}{part}": tensor if owner == spec.name else tensor.clone()
            for owner in owners
            for part, tensor in parts.items()
        }
        if weight is not None:
            tensors[parameter_of(spec.name, spec.kind)] = weight
        return tensors


class StoredWeight(NamedTuple):
    """A weight that was read from the files.

    Attributes:
        where: The place that errors name.
        layer: How the state describes it.
        scheme: Its config group; None for floats.
        parts: Its tensors by the last part of their name.
    """

    where: str
    layer: WeightSpec
    scheme: Mapping[str, Any] | None
    parts: Mapping[str, Tensor]

    def check(self, values: Quantized) -> None:
        """Check that codes, scales and zero points are on the grid that the layer declares, and need its bits.

        The code of a group's largest weight needs them, though stochastic rounding may
        leave it one short, and an asymmetric grid two. Ternary and binary grids have other
        codes.

        Raises:
            MoQError: They are not, or do not; names the layer.
        """
        codes, scale, zero = values
        precision = self.layer.precision
        bits = precision.bits
        is_legal = scale != 0 if precision.is_full else scale > 0
        if bits == 1:
            # A row of zeros has the scale 0.
            is_legal = scale >= 0
        if not bool(torch.isfinite(scale).all() and is_legal.all()):
            legal = "finite nonzero number" if precision.is_full else "positive number"
            raise MoQError(f"{self.where}: a scale is not a {legal}")
        if bits == 1:
            if bool((codes.abs() != 1).any()):
                raise MoQError(f"{self.where}: binary codes must be -1 and 1")
            return
        lowest = highest = 0
        for what, integers in (("codes", codes), ("zero points", zero)):
            if integers is not None:
                lowest = min(lowest, int(integers.min()))
                highest = max(highest, int(integers.max()))
                if lowest < precision.low or highest > precision.high:
                    raise MoQError(
                        f"{self.where}: {what} beyond {precision.high} at {bits} bits"
                    )
        # Codes tell nothing in groups of zeros, whose scale is 1, and in groups too small
        # for float16, whose scale is its least value.
        shows_bits = bool(((scale != 1) & (scale.abs() > 2.0**-24)).any())
        fewer = precision.grid.at(bits - 1)
        needs_fewer_bits = fewer.low <= lowest < highest <= fewer.high
        # Codes that are floats may be small because their scales cannot be smaller.
        is_told = bits > 2 and not precision.is_float
        if is_told and shows_bits and needs_fewer_bits:
            raise MoQError(
                f"{self.where}: no code is beyond {fewer.high}, so they are of fewer than {bits} bits"
            )


@dataclass(frozen=True)
class Form:
    """The way in which files hold one weight.

    Attributes:
        name: Its name in `moq_state.json`.
        fits: Says whether a weight can be stored in it.
        write: Encodes codes, scales and zero points into tensors of the files.
        read: Decodes those tensors again. Raises `MoQError` if they have another shape
            or are off their grid.
        stays_packed: Whether the module holds codes after loading.
        endings: Unusual endings of its tensors' names in the files, each with the part
            that it stands for; usually a name ends with a dot and the part.
    """

    name: str
    fits: Callable[[WeightSpec], bool]
    write: Callable[[Quantized, WeightSpec], EncodedWeight]
    read: Callable[[StoredWeight], Quantized]
    stays_packed: bool = False
    endings: Mapping[str, str] = field(default_factory=dict)


def by_matrix(layers: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
    """The layers as the files have them, with each matrix of packed experts as a layer."""
    split_layers: dict[str, WeightSpec] = {}
    for name, layer in layers.items():
        if not layer.matrices:
            split_layers[name] = layer
            continue
        grouping = layer.grid.grouping
        if isinstance(grouping, RowBlocks):
            # The files repeat the scale of a block for each of its rows.
            grouping = PerChannel()
        matrix = replace(
            layer,
            kind="linear",
            matrices=None,
            shape=(layer.shape[0] // len(layer.matrices), layer.shape[1]),
            grid=replace(layer.grid, grouping=grouping),
        )
        split_layers |= dict.fromkeys(layer.matrices, matrix)
    return split_layers


def per_row(values: Quantized) -> Quantized:
    """Repeat the scales and zero points that blocks of rows share for each row."""
    shape = (len(values.codes), values.scale.shape[1])
    zero = values.zero_point
    return values._replace(
        scale=per_weight(values.scale, shape),
        zero_point=None if zero is None else per_weight(zero, shape),
    )
