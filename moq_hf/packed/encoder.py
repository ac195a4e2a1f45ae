"""The layers of one model on their way into the files: how each is stored, and the config groups they share."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from .. import quantizer
from ..errors import MoQError
from ..model.inventory import Inventory, is_linear
from ..names import plain_name
from ..quant_linear import QuantLayer
from ..reading import Entry
from ..rows import from_rows, to_rows
from ..schedule import FLOAT_BITS
from .files import CONFIG
from .layout import FORMATS, Encoded, Layout, Terms
from .state import MAX_PACKED_BITS, STATE_NAME, StoredLayer

_Value = TypeVar("_Value")


class Encoder:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up."""

    def __init__(self, inventory: Inventory, layers: Mapping[str, QuantLayer], layout: Layout) -> None:
        self.layout = layout
        self.groups: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, StoredLayer] = {}
        model, modules = inventory.model, plain(inventory.modules, inventory.adapters)
        self.modules = modules.keys()
        self.linears = [name for name, module in modules.items() if is_linear(module)]
        self.prefix = str(getattr(model, "base_model_prefix", ""))
        self.is_base = bool(self.prefix) and not hasattr(model, self.prefix)
        self.has_conv1d = any(layer.kind == "conv1d" for layer in layers.values())
        self.packed = [name for name, layer in layers.items() if self.format_of(layer) == "packed"]
        self.at_load = layout == "unpacked"
        # Binary codes, -1 and 1, do not fit into one symmetric bit.
        self.container = max([2, *(layers[name].moq.bits for name in self.packed)])
        self.dtypes = {str(layers[name].weight.dtype) for name in self.packed}

    def format_of(self, layer: QuantLayer) -> str:
        """The format that the layer is stored in: "packed", "int8", "dense" or "float"."""
        if layer.moq.bits == FLOAT_BITS or layer.moq.blend:
            return "float"
        if layer.kind == "embedding":
            return "int8" if self.layout == "packed" else "dense"
        if layer.kind == "conv":
            return "dense"
        # Beside a Conv1D, whose scales are those of columns, the blocks of a linear layer lie across.
        across = self.has_conv1d and layer.kind != "conv1d" and layer.moq.grid.grouping.row_size is not None
        return "dense" if self.layout == "floats" or layer.moq.bits > MAX_PACKED_BITS or across else "packed"

    def store(self, name: str, layer: QuantLayer, tensors: dict[str, Tensor]) -> None:
        """Put what stands for the layer's weight in the files into the place of its float weight in `tensors`.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        state, kind, stored = layer.moq, layer.kind, self.format_of(layer)
        parameter = tensors.pop(f"{name}.weight").detach()
        weight = to_rows(parameter, kind).contiguous()
        settings: dict[str, Any] = {"ratio": state.ratio, "draw": state.draw}
        scales, max_error = (0, 0), 0.0
        if stored == "float":
            if state.bits != FLOAT_BITS:
                weight = quantizer.fake_quantize(weight, state.bits, state.grid, blend=state.blend, **settings)
            encoded = Encoded({"weight": from_rows(weight, kind, parameter.shape).contiguous()})
        else:
            try:
                codes, scale, zero = quantizer.quantize(weight, state.bits, state.grid, **settings)
            except ValueError as error:
                raise MoQError(f"{name}.weight cannot be quantized: {error}") from error
            values = quantizer.Quantized(codes.cpu(), scale.cpu(), None if zero is None else zero.cpu())
            scales, max_error = (scale.shape[0], scale.shape[1]), _max_error(weight.cpu(), values)
            width = self.container if self.at_load and stored == "packed" else state.bits
            size = layer.moq.grid.grouping.row_size
            terms = Terms(kind, parameter.shape, weight.dtype, width, size, self.at_load, self.has_conv1d)
            encoded = FORMATS[stored].encode(values, terms)
        tensors |= {f"{name}.{part}": tensor for part, tensor in encoded.parts.items()}
        self.stored[name] = StoredLayer(
            kind=kind,
            bits=state.bits,
            stored=stored,
            shape=(weight.shape[0], weight.shape[1]),
            scales=scales,
            symmetric=state.grid.symmetric,
            bytes=sum(tensor.nbytes for tensor in encoded.parts.values()),
            bytes_before=weight.nbytes,
            max_error=max_error,
            group=None if encoded.scheme is None else self._group(name, encoded.scheme, FORMATS[stored].compressor),
            grid=encoded.grid,
        )

    def _group(self, name: str, scheme: dict[str, Any], compressor: str) -> str:
        same = [g for g, c in self.groups.items() if c["weights"] == scheme and c["format"] == compressor]
        group = same[0] if same else f"group_{len(self.groups)}"
        self.groups.setdefault(group, {"targets": [], "weights": scheme, "format": compressor})
        self.groups[group]["targets"].append(self._target(name))
        return group

    def _target(self, name: str) -> str:
        """Matches the module in the model that was saved, and in its base model or one with another head."""
        prefix = f"{self.prefix}."
        bare = name.removeprefix(prefix)
        other = prefix + name if self.is_base else bare
        if not self.prefix or other == name or other in self.modules:
            return name
        return f"re:^(?:{re.escape(prefix)})?{re.escape(bare)}$"

    def config(self, ignore: list[str]) -> dict[str, Any] | None:
        """The quantization config for `config.json`; None if every layer is dense."""
        if not self.groups:
            return None
        formats = {group["format"] for group in self.groups.values()}
        return {
            "config_groups": self.groups,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "ignore": ignore,
        }


def groups_of(config: Entry, layers: Mapping[str, StoredLayer]) -> dict[str, Any]:
    """The config groups, after each layer was found to have the bits that its group declares.

    Raises:
        MoQError: One has not, or a group is missing or not as it was written.
    """
    packed = {name: layer for name, layer in layers.items() if layer.group is not None}
    if not packed:
        return {}
    quantization = config["quantization_config"]
    groups = quantization["config_groups"]
    # Unpacked while loading, all layers have the container of the largest.
    at_load = quantization.get("dequantize").value is True
    for name, layer in packed.items():
        weights = groups[cast(str, layer.group)]["weights"]
        weights["symmetric"].flag()
        width = weights["num_bits"].whole(1, MAX_PACKED_BITS)
        if layer.bits > width or (layer.bits < width and not (at_load and layer.stored == "packed")):
            raise MoQError(
                f"{Path(config.where).with_name(STATE_NAME)}: layers.{name}.bits is {layer.bits}, but its codes have "
                f"{width} bits ({weights.key}.num_bits in {CONFIG})"
            )
    found: dict[str, Any] = groups.value
    return found


def plain(named: Mapping[str, _Value], added: Iterable[str]) -> dict[str, _Value]:
    """By the names that modules and tensors had before PEFT came, without its adapters."""
    renamed = {plain_name(name, added): value for name, value in named.items()} if added else named
    return {name: value for name, value in renamed.items() if name is not None}


def _max_error(weight: Tensor, values: quantizer.Quantized) -> float:
    """The largest distance of a weight from its stored value, in steps of its scale."""
    rows, columns = values.scale.shape
    error = (weight.float() - quantizer.dequantize(*values)).abs()
    tiles = error.view(rows, weight.shape[0] // rows, columns, -1).amax((1, 3))
    return float((tiles / values.scale).nan_to_num(0.0).max())
