"""The layers of one model on their way into the files: how each is stored, and the config groups they share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..grid import Grid, RowBlocks
from ..model.inventory import Inventory, is_linear
from ..names import plain_name
from ..processes import shape_of
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
from .words import pieces

# Bits of a word of packed codes.
_WORD = 32
_Value = TypeVar("_Value")
# The config group of packed experts.
_EXPERTS = "experts"


class Encoder:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up."""

    def __init__(
        self,
        inventory: Inventory,
        layers: Mapping[str, QuantLayer],
        layout: Layout,
        tied: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.layout = layout
        self.layers = layers
        self.tied = tied or {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, StoredLayer] = {}
        model, modules = inventory.model, plain(inventory.modules, inventory.adapters)
        self.names: dict[str, str] | None = None
        self.linears = [name for name, module in modules.items() if is_linear(module)]
        matched = [name for name, module in modules.items() if is_linear(module) or isinstance(module, nn.Embedding)]
        lists = {name: len(entries) for name, entries in inventory.lists.items()}
        self.patterns = Patterns(matched, lists, str(getattr(model, "base_model_prefix", "")))
        self.has_conv1d = any(layer.kind == "conv1d" for layer in layers.values())
        self.tables = {name for name, layer in layers.items() if layer.kind == "embedding" or self.tied.get(name)}
        self.matrices = {
            name: names
            for name, layer in layers.items()
            if layer.kind == "experts" and (names := names_of(model, name, shape_of(layer.float_weight))) is not None
        }
        self.at_load = layout == "unpacked"
        # Of the linear layers, to which what is unpacked while loading has to fit.
        others = [name for name, layer in layers.items() if layer.kind == "conv" or is_experts(layer.kind)]
        linears = [name for name in layers if name not in self.tables and name not in others]
        self.grid = layers[linears[0]].moq.grid if linears else None
        self._widened_by_tables = self.at_load and self._is_widened(layers)
        every = [name for name, layer in layers.items() if self.format_of(name, layer) == "packed"]
        self.packed = [name for name in every if name not in self.matrices]
        self.is_asymmetric = any(not layers[name].moq.grid.symmetric for name in self.packed)
        # Binary codes, -1 and 1, do not fit into one symmetric bit.
        self.container = max([2, *(layers[name].moq.bits for name in every if self.at_load or name in self.matrices)])
        self.dtypes = {str(layers[name].weight.dtype).removeprefix("torch.") for name in every}
        scales = {layer.moq.grid.scale_dtype for layer in layers.values()}
        # Scales are loaded in the model's dtype: a narrower one than theirs would round them.
        self.dtype = next(iter(scales)) if layout == "packed" and self.dtypes == scales else "float32"

    def format_of(self, name: str, layer: QuantLayer) -> str:
        """The format that the layer is stored in: "packed", "int8", "dense" or "float"."""
        bits = layer.moq.bits
        if bits == FLOAT_BITS or layer.moq.blend:
            return "float"
        # The format has no place for convolutions.
        if self.layout == "floats" or bits > MAX_PACKED_BITS or layer.kind == "conv":
            return "dense"
        if is_experts(layer.kind):
            return "packed" if name in self.matrices and layer.moq.grid.symmetric else "dense"
        if name in self.tables and not self.at_load:
            return "int8" if bits > 1 else "dense"
        if name in self.tables and self._widened_by_tables:
            return "dense"
        size = self._row_size(layer)
        # Beside a Conv1D, whose scales are those of columns, the blocks of a linear layer lie across.
        across = self.has_conv1d and layer.kind != "conv1d" and size is not None
        # compressed-tensors 0.20 cannot read zero points back that are packed into one word.
        asymmetric = self.grid is not None and not self.grid.symmetric
        one_word = self.at_load and asymmetric and not self.has_conv1d and layer.matrix_shape[0] * bits <= _WORD
        return "dense" if across or one_word or (size is not None and layer.matrix_shape[1] % size) else "packed"

    def _is_widened(self, layers: Mapping[str, QuantLayer]) -> bool:
        """Whether the files are smaller with tables as floats than with all codes as wide as those of the tables."""
        numbers, widths = {True: 0, False: 0}, {True: 0, False: 0}
        for name, layer in layers.items():
            if layer.moq.bits <= MAX_PACKED_BITS:
                numbers[name in self.tables] += shape_of(layer.float_weight).numel()
                widths[name in self.tables] = max(layer.moq.bits, widths[name in self.tables])
        more = max(0, widths[True] - widths[False]) * numbers[False]
        return more > (8 * torch.float32.itemsize - max(widths.values())) * numbers[True]

    def _row_size(self, layer: QuantLayer) -> int | None:
        """Weights of a row that share a scale in the files: while loading, all layers are of one scheme."""
        grid = self.grid if self.at_load and self.grid is not None else layer.moq.grid
        return grid.grouping.row_size

    def _as_linear(self, values: quantizer.Quantized, bits: int, size: int | None) -> quantizer.Quantized:
        """The same values in the scheme of the linear layers: their groups, and a zero point if they have one."""
        codes, scale, zero = values
        if size is not None and scale.shape[1] == 1:
            scale = scale.expand(codes.shape[0], codes.shape[1] // size).contiguous()
        if zero is None and self.grid is not None and not self.grid.symmetric:
            codes, zero = codes + 2 ** (bits - 1), torch.full_like(scale, 2 ** (bits - 1), dtype=torch.int32)
        return quantizer.Quantized(codes, scale, zero)

    def stands_in(self) -> set[str]:
        """The names of the float weights that something else in the files stands for."""
        own = {parameter_of(name, layer.kind) for name, layer in self.layers.items()}
        return own | {f"{other}.weight" for others in self.tied.values() for other in others}

    def store(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """What stands for a layer's weight in the files, by the names of tensors.

        Args:
            name: The layer's.
            parameter: Its float weight, on any device.

        Raises:
            MoQError: The weight holds NaN or Inf.
        """
        layer = self.layers[name]
        state, kind, stored = layer.moq, layer.kind, self.format_of(name, layer)
        own, tied = parameter_of(name, kind), self.tied.get(name, ())
        matrices = self.matrices.get(name) if stored == "packed" else None
        parameter = parameter.detach()
        weight = to_rows(parameter, kind).contiguous()
        ratio = None if state.ratio is None else state.ratio.to(weight.device)
        scales, max_error, symmetric = (0, 0), 0.0, state.grid.symmetric
        if stored == "float":
            if state.bits != FLOAT_BITS:
                how: dict[str, Any] = {"ratio": ratio, "seed": state.draw, "blend": state.blend}
                weight = quantizer.fake_quantize(weight, state.bits, state.grid, **how)
            encoded = Encoded({"weight": from_rows(weight, kind, parameter.shape).contiguous()})
        else:
            try:
                values, max_error = _quantize(weight, state.bits, state.grid, ratio, state.draw)
            except ValueError as error:
                raise MoQError(f"{own} cannot be quantized: {error}") from error
            width, size = state.bits, self._row_size(layer)
            scales = (values.scale.shape[0], values.scale.shape[1])
            if stored == "packed" and (self.at_load or matrices):
                width = self.container
            if stored == "packed" and self.at_load and not matrices:
                values = self._as_linear(values, state.bits, size)
            symmetric = values.zero_point is None
            dtype = torch.float32 if self.at_load else getattr(torch, state.grid.scale_dtype)
            terms = Terms(kind, parameter.shape, weight.dtype, width, size, self.at_load, self.has_conv1d, dtype)
            encoded = encode_matrices(values, matrices, terms) if matrices else FORMATS[stored].encode(values, terms)
        parts = encoded.parts if matrices else {_tensor_name(name, own, p): t for p, t in encoded.parts.items()}
        if stored == "int8":
            again = {part: tensor for part, tensor in encoded.parts.items() if part != "weight"}
            parts |= {f"{other}.{part}": tensor.clone() for other in tied for part, tensor in again.items()}
        self.stored[name] = StoredLayer(
            kind=kind,
            bits=state.bits,
            stored=stored,
            shape=(weight.shape[0], weight.shape[1]),
            scales=scales,
            symmetric=symmetric,
            full=state.grid.full,
            bytes=sum(tensor.nbytes for tensor in parts.values()),
            bytes_before=weight.nbytes,
            max_error=max_error,
            group=None if encoded.scheme is None else self._group(name, encoded.scheme, FORMATS[stored].compressor),
            grid=encoded.grid,
            tied=tuple(tied),
            matrices=matrices,
        )
        return parts

    def _group(self, name: str, scheme: dict[str, Any], compressor: str) -> str:
        if name in self.matrices:
            # A group of their own, which stands first: loaders take the first one that names experts.
            self.groups = {_EXPERTS: {"targets": [], "weights": scheme, "format": compressor}, **self.groups}
            return _EXPERTS
        others = {g: c for g, c in self.groups.items() if g != _EXPERTS}
        same = [g for g, c in others.items() if c["weights"] == scheme and c["format"] == compressor]
        group = same[0] if same else f"group_{len(others)}"
        self.groups.setdefault(group, {"targets": [], "weights": scheme, "format": compressor})
        self.groups[group]["targets"] += [name, *self.tied.get(name, ())]
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
        owners = {
            name.rpartition(".")[0]: called[id(tensor)].rpartition(".")[0]
            for name, tensor in tensors.items()
            if id(tensor) in called
        }
        layers = {*self.stored, *(module for modules in self.tied.values() for module in modules)}
        self.names = {layer: there for layer, there in owners.items() if layer in layers and there != layer}
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


def _quantize(
    weight: Tensor, bits: int, grid: Grid, ratio: Tensor | None, draw: quantizer.RoundingSeed
) -> tuple[quantizer.Quantized, float]:
    """What `quantizer.quantize` gives, on the CPU, and the largest distance of a weight from it, in steps of its scale.

    It goes piece by piece. Stochastic rounding draws for a whole weight.

    Raises:
        ValueError: As `quantizer.quantize`.
    """
    rows, columns = weight.shape
    groups = quantizer.check(weight, bits, grid, ratio)[0]
    block, max_error = rows // groups, 0.0
    codes = torch.empty(weight.shape, dtype=torch.int32, device="cpu")
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    for piece in [slice(None)] if grid.stochastic else pieces(rows, columns, block):
        own = weight[piece]
        scaled = slice(None) if grid.stochastic else slice(piece.start // block, piece.stop // block)
        blocks = isinstance(grid.grouping, RowBlocks)
        among = replace(grid, grouping=RowBlocks(len(own) // block)) if blocks else grid
        values = quantizer.quantize(own, bits, among, ratio=None if ratio is None else ratio[scaled], seed=draw)
        max_error = max(max_error, _max_error(own, values))
        codes[piece] = values.codes.cpu()
        scales.append(values.scale)
        if values.zero_point is not None:
            zeros.append(values.zero_point)
    zero = torch.cat(zeros).cpu() if zeros else None
    return quantizer.Quantized(codes, torch.cat(scales).cpu(), zero), max_error


def _max_error(weight: Tensor, values: quantizer.Quantized) -> float:
    """The largest distance of a weight from its stored value, in steps of its scale."""
    rows, columns = values.scale.shape
    error = (weight.float() - quantizer.dequantize(*values)).abs()
    tiles = error.view(rows, weight.shape[0] // rows, columns, -1).amax((1, 3))
    return float((tiles / values.scale.abs()).nan_to_num(0.0).max())
