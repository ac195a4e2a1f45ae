"""Packed checkpoints: how they are written, so that plain `from_pretrained` loads them, and how they are verified.

A packed checkpoint is an ordinary transformers folder. Layers of 1 to 8 bits are packed integers in the format of
compressed-tensors, written with that library, so that a process which never heard of moq_hf computes the same, bit for
bit. Layers above 8 bits are dense floats on their grid. `moq_state.json` beside them holds the config, the bits of each
layer, the history of switches, and a digest of every tensor.

How the grids of `quantizer` are told to compressed-tensors, (code - zero) * scale with codes from -2^(b-1):

| grid | strategy | zero point |
| --- | --- | --- |
| symmetric (ternary too), a scale per row | channel | none |
| symmetric, a scale per group in a row | group | none |
| symmetric, row blocks | block of whole rows: 4 bytes per block, not per row | none |
| asymmetric | block, whatever the groups: transformers cannot load packed zero points | int8, one per scale |
| binary | block; codes -1 and 0, twice the scale | -1/2 |

That is the layout "packed": the modules hold packed weights after loading, and the model's first forward pass unpacks
them. It does not fit models whose `_init_weights` reaches into other weights (T5), and those whose parts are called by
themselves (the encoder by `generate` of BART, the towers of CLIP). Theirs is "unpacked": unpacked while loading
(`dequantize`), which knows one scheme for all layers: strategy channel or group, and as many bits as the largest layer
has. Where neither computes what the model did, the layout is "floats": ordinary weights, on their grid.

Models with `Conv1D` layers (GPT-2), which compressed-tensors does not know as modules. Their weights lie in the
file as in the model, `[in_features, out_features]`, so that each scale is one of columns:

| grid | strategy | scales, and zero points in int8 |
| --- | --- | --- |
| a scale per row, or row blocks | tensor: loading multiplies with whatever can be broadcast | [1, out_features] |
| a scale per group in a row | block, a column wide | [in_features / size, out_features] |

An `nn.Linear` in such a model is packed in the first case and dense in the second, since its blocks lie across.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..grid import PerGroup
from ..names import adapters, named_modules, plain_name
from ..quant_linear import QuantConv1D, QuantEmbedding, QuantLayer
from ..reading import Entry
from ..schedule import FLOAT_BITS
from .files import CONFIG
from .state import MAX_PACKED_BITS, STATE_NAME, StoredLayer

_Value = TypeVar("_Value")
Layout = Literal["packed", "unpacked", "floats"]


class Encoder:
    """How the layers of one model are stored; collects the config groups of compressed-tensors as they come up."""

    def __init__(self, model: nn.Module, layers: Mapping[str, QuantLayer], layout: Layout) -> None:
        self.layout = layout
        self.groups: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, StoredLayer] = {}
        self.modules = set(plain(dict(named_modules(model)), adapters(model)))
        self.prefix = str(getattr(model, "base_model_prefix", ""))
        self.is_base = bool(self.prefix) and not hasattr(model, self.prefix)
        self.has_conv1d = any(isinstance(layer, QuantConv1D) for layer in layers.values())
        packed = {name: layer.moq.bits for name, layer in layers.items() if self.is_packed(layer)}
        self.at_load = layout == "unpacked"
        # Binary codes, -1 and 1, do not fit into one symmetric bit.
        self.container = max([2, *packed.values()])
        self.dtypes = {str(layer.weight.dtype) for name, layer in layers.items() if name in packed}

    def store(self, name: str, layer: QuantLayer, tensors: dict[str, Tensor]) -> StoredLayer:
        """Put what stands for the layer's weight in the file into the place of its float weight in `tensors`."""
        key, state = f"{name}.weight", layer.moq
        weight = turned(tensors.pop(key).detach(), layer)
        rows, columns = weight.shape
        common: dict[str, Any] = {
            "kind": _kind(layer),
            "bits": state.bits,
            "shape": (rows, columns),
            "symmetric": state.grid.symmetric,
            "bytes_before": weight.nbytes,
        }
        arguments: dict[str, Any] = {"ratio": state.ratio, "draw": state.draw}
        if state.bits == FLOAT_BITS or state.blend:
            if state.bits != FLOAT_BITS:
                weight = quantizer.fake_quantize(weight, state.bits, state.grid, blend=state.blend, **arguments)
            tensors[key] = turned(weight, layer)
            return StoredLayer(**common, stored="float", scales=(0, 0), bytes=weight.nbytes, max_error=0.0)
        try:
            codes, scale, zero = quantizer.quantize(weight, state.bits, state.grid, **arguments)
        except ValueError as error:
            raise MoQError(f"{key} cannot be quantized: {error}") from error
        values = quantizer.Quantized(codes.cpu(), scale.cpu(), None if zero is None else zero.cpu())
        common |= {"scales": tuple(values.scale.shape), "max_error": _max_error(weight.cpu(), values)}
        is_packed = self.is_packed(layer)
        if not is_packed and (self.layout != "packed" or not isinstance(layer, QuantEmbedding)):
            tensors[key] = turned(quantizer.dequantize(*values, dtype=weight.dtype), layer)
            grid = (_text64(values.scale), None if values.zero_point is None else _text64(values.zero_point))
            return StoredLayer(**common, stored="dense", bytes=weight.nbytes, grid=grid)
        if is_packed:
            scheme, parts = self._pack(values, layer)
        else:
            scheme, parts = _bytes_of(values, state.bits)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return StoredLayer(
            **common,
            stored="packed" if is_packed else "int8",
            bytes=sum(tensor.nbytes for tensor in parts.values()),
            group=self._group(name, scheme, "pack-quantized" if is_packed else "int-quantized"),
        )

    def is_packed(self, layer: QuantLayer) -> bool:
        """Whether the layer's codes are packed into words."""
        if self.layout == "floats" or isinstance(layer, QuantEmbedding):
            return False
        if layer.moq.bits > MAX_PACKED_BITS or layer.moq.blend:
            return False
        blocks_lie_across = self.has_conv1d and isinstance(layer.moq.grid.grouping, PerGroup)
        return isinstance(layer, QuantConv1D) or not blocks_lie_across

    def _pack(self, values: quantizer.Quantized, layer: QuantLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        codes, scale, zero = values
        rows, columns = codes.shape
        grouping = layer.moq.grid.grouping
        size = grouping.size if isinstance(grouping, PerGroup) else None
        width = self.container if self.at_load else layer.moq.bits
        scheme: dict[str, Any] = {"num_bits": width, "type": "int", "symmetric": zero is None, "dynamic": False}
        if zero is not None:
            codes, zero = codes - 2 ** (width - 1), (zero - 2 ** (width - 1)).to(torch.int8)
        if self.at_load and size is None:
            repeats = rows // scale.shape[0]
            scale = scale.repeat_interleave(repeats, 0)
            zero = None if zero is None else zero.repeat_interleave(repeats, 0)
        if self.at_load and not self.has_conv1d and zero is not None:
            zero = pack_to_int32(zero, width, packed_dim=0)
        if width == 1:
            codes, scale, zero = (codes - 1) // 2, scale * 2, torch.full_like(scale, -0.5)
            scheme |= {"symmetric": False, "zp_dtype": "torch.float32"}
        if self.has_conv1d:
            scheme |= {"strategy": "tensor"} if size is None else {"strategy": "block", "block_structure": [size, 1]}
        elif size is not None and (zero is None or self.at_load):
            scheme |= {"strategy": "group", "group_size": size}
        elif scale.shape[0] == rows and (zero is None or self.at_load):
            scheme |= {"strategy": "channel"}
        else:
            block = [rows // scale.shape[0], columns // scale.shape[1]]
            scheme |= {"strategy": "block", "block_structure": block}
        codes = turned(codes, layer)
        parts = {
            "weight_packed": pack_to_int32(codes.to(torch.int8), width),
            "weight_scale": turned(scale, layer),
            "weight_shape": torch.tensor(codes.shape, device="cpu"),
        }
        if zero is not None:
            parts["weight_zero_point"] = turned(zero, layer)
        return scheme, parts

    def _group(self, name: str, scheme: dict[str, Any], layout: str) -> str:
        same = [g for g, c in self.groups.items() if c["weights"] == scheme and c["format"] == layout]
        group = same[0] if same else f"group_{len(self.groups)}"
        self.groups.setdefault(group, {"targets": [], "weights": scheme, "format": layout})
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


def _kind(layer: QuantLayer) -> str:
    if isinstance(layer, QuantEmbedding):
        return "embedding"
    return "conv1d" if isinstance(layer, QuantConv1D) else "linear"


def turned(tensor: Tensor, layer: QuantLayer | StoredLayer) -> Tensor:
    """From the layout in the file to that in which a layer is quantized, or back."""
    kind = layer.kind if isinstance(layer, StoredLayer) else _kind(layer)
    return tensor.t().contiguous() if kind == "conv1d" else tensor.contiguous()


def _bytes_of(values: quantizer.Quantized, bits: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An embedding table, a byte a weight: transformers cannot load a packed one."""
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    return scheme, {"weight": values.codes.to(torch.int8), "weight_scale": values.scale}


def _max_error(weight: Tensor, values: quantizer.Quantized) -> float:
    rows, columns = values.scale.shape
    error = (weight.float() - quantizer.dequantize(*values)).abs()
    tiles = error.view(rows, weight.shape[0] // rows, columns, -1).amax((1, 3))
    return float((tiles / values.scale).nan_to_num(0.0).max())


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


def is_complete(layer: StoredLayer, parts: Mapping[str, Tensor], scheme: Mapping[str, Any]) -> bool:
    """Whether the tensors of a layer are all there."""
    wanted = {"weight"}
    if layer.stored == "int8":
        wanted |= {"weight_scale"}
    elif layer.stored == "packed":
        wanted = {"weight_packed", "weight_scale", "weight_shape"}
        wanted |= set() if scheme["symmetric"] else {"weight_zero_point"}
    return wanted <= set(parts)


def check_grid(where: str, layer: StoredLayer, parts: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """The layer's float weight, after every code, scale and zero point was found to be of the grid that it declares.

    Raises:
        MoQError: One is not.
    """
    if layer.stored == "float":
        return parts["weight"]
    if layer.stored == "dense":
        return _check_dense(where, layer, parts["weight"])
    scale, limit = parts["weight_scale"], 2 ** (layer.bits - 1) - 1
    if not bool(torch.isfinite(scale).all() and (scale >= 0 if layer.bits == 1 else scale > 0).all()):
        raise MoQError(f"{where}: a scale is not a positive number")
    if layer.stored == "int8":
        if parts["weight"].dtype != torch.int8 or bool((parts["weight"].int().abs() > limit).any()):
            raise MoQError(f"{where}: codes beyond {limit} at {layer.bits} bits")
        _check_reach(where, layer, parts["weight"].int())
        return quantizer.dequantize(parts["weight"], scale)

    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationScheme

    width, shape = group["weights"]["num_bits"], torch.Size(layer.shape)
    if layer.kind == "conv1d":
        shape = torch.Size(reversed(shape))
    packed = parts["weight_packed"]
    codes = unpack_from_int32(packed, width, shape)
    if not torch.equal(pack_to_int32(codes, width), packed) or parts["weight_shape"].tolist() != list(shape):
        raise MoQError(f"{where}: the packed codes are not those of a weight {list(shape)} at {width} bits")
    codes = reaching = codes.int()
    if not layer.symmetric:
        zero = parts["weight_zero_point"]
        if zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, width, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        for what, values in (("codes", codes), ("zero points", zero.int())):
            values = values + 2 ** (width - 1)
            if bool(((values < 0) | (values >= 2**layer.bits)).any()):
                raise MoQError(f"{where}: {what} beyond {2**layer.bits - 1} at {layer.bits} bits")
        reaching = torch.cat([codes.flatten(), zero.int().flatten()]) + 2 ** (width - 1)
    elif layer.bits == 1:
        if width == 1 and not bool((parts["weight_zero_point"] == -0.5).all()):
            raise MoQError(f"{where}: the zero points of binary codes must be -1/2")
        if width > 1 and bool((codes.abs() != 1).any()):
            raise MoQError(f"{where}: binary codes must be -1 and 1")
    elif bool((codes.abs() > limit).any()):
        raise MoQError(f"{where}: codes beyond {limit} at {layer.bits} bits")
    _check_reach(where, layer, reaching)
    scheme = QuantizationScheme.model_validate({**group, "targets": []})
    return cast(Tensor, PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"])


def _check_reach(where: str, layer: StoredLayer, codes: Tensor) -> None:
    """Whether some code needs the bits that the layer declares, as that of a group's largest weight does.

    Stochastic rounding may leave it one short, an asymmetric grid two. Ternary and binary grids have other codes.

    Args:
        where: For the error.
        layer: As it is declared.
        codes: Of a symmetric grid; codes and zero points from 0 of an asymmetric one.

    Raises:
        MoQError: All codes, some of which are not 0, are of a grid with fewer bits.
    """
    largest, fewer = int(codes.abs().max()), 2 ** (layer.bits - 1) // (2 if layer.symmetric else 1)
    if layer.bits > 2 and 0 < largest < fewer:
        raise MoQError(f"{where}: no code is beyond {fewer - 1}, so they are of fewer than {layer.bits} bits")


def _check_dense(where: str, layer: StoredLayer, weight: Tensor) -> Tensor:
    scale_text, zero_text = cast(tuple[str, str | None], layer.grid)
    scale = _tensor64(scale_text, torch.float32).view(layer.scales)
    zero = None if zero_text is None else _tensor64(zero_text, torch.int32).view(layer.scales)
    rows, columns = layer.scales
    weight = turned(weight, layer)
    tiles = weight.float().view(rows, layer.shape[0] // rows, columns, -1)
    codes = (tiles / scale[:, None, :, None]).round().nan_to_num(0.0).view(weight.shape)
    if layer.bits == 1:
        codes = weight.sign().where(weight != 0, torch.ones_like(weight))
    elif zero is None:
        limit = 2 ** (layer.bits - 1) - 1
        codes = codes.clamp(-limit, limit)
    else:
        tiles = codes.view(tiles.shape) + zero[:, None, :, None]
        codes = tiles.clamp(0, 2**layer.bits - 1).view(weight.shape)
    _check_reach(where, layer, codes if zero is None else torch.cat([codes.flatten(), zero.float().flatten()]))
    if not torch.equal(quantizer.dequantize(codes, scale, zero, dtype=weight.dtype), weight):
        raise MoQError(f"{where}: a weight is not on the grid of {layer.bits} bits")
    return turned(weight, layer)


def _text64(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _tensor64(text: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
