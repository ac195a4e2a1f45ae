"""The layers of one model on their way into the files: how each is stored, and the config groups they share."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..model.inventory import Inventory, is_linear
from ..names import plain_name
from ..quant_linear import QuantLayer
from ..reading import Entry
from ..rows import from_rows, is_experts, parameter_of, to_rows
from ..schedule import FLOAT_BITS
from ..transformers_seams import original_format
from .files import CONFIG
from .layout import FORMATS, Encoded, Layout, Terms
from .matrices import encode_matrices, names_of, target_of
from .state import MAX_PACKED_BITS, STATE_NAME, StoredLayer
from .targets import Patterns

_Value = TypeVar("_Value")
# The config group of packed experts.
_EXPERTS = "experts"


class Encoder:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up."""

    def __init__(self, inventory: Inventory, layers: Mapping[str, QuantLayer], layout: Layout) -> None:
        self.layout = layout
        self.groups: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, StoredLayer] = {}
        model, modules = inventory.model, plain(inventory.modules, inventory.adapters)
        self.names: dict[str, str] | None = None
        self.linears = [name for name, module in modules.items() if is_linear(module)]
        matched = [name for name, module in modules.items() if is_linear(module) or isinstance(module, nn.Embedding)]
        lists = {name: len(entries) for name, entries in inventory.lists.items()}
        self.patterns = Patterns(matched, lists, str(getattr(model, "base_model_prefix", "")))
        self.has_conv1d = any(layer.kind == "conv1d" for layer in layers.values())
        self.matrices = {
            name: names
            for name, layer in layers.items()
            if layer.kind == "experts" and (names := names_of(model, name, layer.float_weight.shape)) is not None
        }
        every = [name for name, layer in layers.items() if self.format_of(name, layer) == "packed"]
        self.packed = [name for name in every if name not in self.matrices]
        self.is_asymmetric = any(not layers[name].moq.grid.symmetric for name in self.packed)
        self.at_load = layout == "unpacked"
        # Binary codes, -1 and 1, do not fit into one symmetric bit.
        container = [2, *(layers[name].moq.bits for name in every if self.at_load or name in self.matrices)]
        self.container = max(container)
        self.dtypes = {str(layers[name].weight.dtype) for name in every}

    def format_of(self, name: str, layer: QuantLayer) -> str:
        """The format that the layer is stored in: "packed", "int8", "dense" or "float"."""
        if layer.moq.bits == FLOAT_BITS or layer.moq.blend:
            return "float"
        if is_experts(layer.kind):
            fits = name in self.matrices and layer.moq.grid.symmetric and layer.moq.bits <= MAX_PACKED_BITS
            return "packed" if fits and self.layout != "floats" else "dense"
        if layer.kind == "embedding":
            return "int8" if self.layout == "packed" else "dense"
        # Beside a Conv1D, whose scales are those of columns, the blocks of a linear layer lie across.
        across = self.has_conv1d and layer.kind != "conv1d" and layer.moq.grid.grouping.row_size is not None
        dense = self.layout == "floats" or layer.moq.bits > MAX_PACKED_BITS or across
        return "dense" if dense or (self.layout == "unpacked" and _is_too_small(layer)) else "packed"

    def store(self, name: str, layer: QuantLayer, tensors: dict[str, Tensor]) -> None:
        """Put what stands for the layer's weight in the files into the place of its float weight in `tensors`.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        state, kind, stored = layer.moq, layer.kind, self.format_of(name, layer)
        own, matrices = parameter_of(name, kind), self.matrices.get(name) if stored == "packed" else None
        parameter = tensors.pop(own).detach()
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
                raise MoQError(f"{own} cannot be quantized: {error}") from error
            values = quantizer.Quantized(codes.cpu(), scale.cpu(), None if zero is None else zero.cpu())
            scales, max_error = (scale.shape[0], scale.shape[1]), _max_error(weight.cpu(), values)
            # What is unpacked while loading has one scheme.
            width = self.container if stored == "packed" and (self.at_load or matrices) else state.bits
            size = layer.moq.grid.grouping.row_size
            terms = Terms(kind, parameter.shape, weight.dtype, width, size, self.at_load, self.has_conv1d)
            encoded = encode_matrices(values, matrices, terms) if matrices else FORMATS[stored].encode(values, terms)
        tensors |= encoded.parts if matrices else {_tensor_name(name, own, p): t for p, t in encoded.parts.items()}
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
            matrices=matrices,
        )

    def _group(self, name: str, scheme: dict[str, Any], compressor: str) -> str:
        if name in self.matrices:
            # A group of their own, which stands first: loaders take the first one that names experts.
            self.groups = {_EXPERTS: {"targets": [], "weights": scheme, "format": compressor}, **self.groups}
            return _EXPERTS
        others = {g: c for g, c in self.groups.items() if g != _EXPERTS}
        same = [g for g, c in others.items() if c["weights"] == scheme and c["format"] == compressor]
        group = same[0] if same else f"group_{len(others)}"
        self.groups.setdefault(group, {"targets": [], "weights": scheme, "format": compressor})
        self.groups[group]["targets"].append(name)
        return group

    def rename(self, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors under the names that the model's files have; notes in `names` what layers are called there.

        If transformers merges or splits weights of these layers, all tensors keep the names of the modules. Other
        weights that it splits keep theirs beside packed ones: loading puts only packed pieces together then.
        """
        handed_on = {id(tensor) for tensor in original_format(model, tensors).values()}
        kept = {n: t for n, t in tensors.items() if id(t) not in handed_on and (self.groups or n in self.stored)}
        renamed = original_format(model, {n: t for n, t in tensors.items() if n not in kept}) | kept
        called = {id(tensor): name for name, tensor in renamed.items()}
        names: dict[str, str] = {}
        for layer in self.stored:
            parts = [name for name in tensors if name.rpartition(".")[0] == layer]
            for name in parts:
                owner, _, part = called.get(id(tensors[name]), "").rpartition(".")
                if part != name.rpartition(".")[2] or names.setdefault(layer, owner) != owner:
                    return tensors
        self.names = {layer: owner for layer, owner in names.items() if layer != owner}
        return renamed

    def config(self) -> dict[str, Any] | None:
        """The quantization config for `config.json`; None if every layer is dense."""
        if not self.groups:
            return None
        formats = {group["format"] for group in self.groups.values()}
        members = {name: group["targets"] for name, group in self.groups.items() if name != _EXPERTS}
        packed = {name for names in members.values() for name in names}
        targets, ignore = self.patterns.of(members, [name for name in self.linears if name not in packed])
        if _EXPERTS in self.groups:
            targets[_EXPERTS] = [target_of([name for names in self.matrices.values() for name in names])]
        return {
            "config_groups": {name: {**group, "targets": targets[name]} for name, group in self.groups.items()},
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
    # Unpacked while loading, all layers have the container of the largest; experts always are.
    at_load = quantization.get("dequantize").value is True
    for name, layer in packed.items():
        weights = groups[cast(str, layer.group)]["weights"]
        weights["symmetric"].flag()
        width = weights["num_bits"].whole(1, MAX_PACKED_BITS)
        shared = layer.stored == "packed" and (at_load or is_experts(layer.kind))
        if layer.bits > width or (layer.bits < width and not shared):
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


def _tensor_name(layer: str, parameter: str, part: str) -> str:
    return parameter if part == "weight" else f"{layer}.{part}"


def _is_too_small(layer: QuantLayer) -> bool:
    """Whether zero points fill one word, of which compressed-tensors 0.20 cannot unpack several side by side."""
    rows, columns = layer.matrix.shape
    return not layer.moq.grid.symmetric and rows <= 8 and layer.moq.grid.shape(rows, columns)[1] > 1


def _max_error(weight: Tensor, values: quantizer.Quantized) -> float:
    """The largest distance of a weight from its stored value, in steps of its scale."""
    rows, columns = values.scale.shape
    error = (weight.float() - quantizer.dequantize(*values)).abs()
    tiles = error.view(rows, weight.shape[0] // rows, columns, -1).amax((1, 3))
    return float((tiles / values.scale).nan_to_num(0.0).max())
