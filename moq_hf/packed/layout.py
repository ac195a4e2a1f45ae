"""How a quantized weight lies in a packed checkpoint: each way of storing it is encoded, checked and decoded here.

A packed checkpoint is an ordinary transformers folder. Layers of 1 to 8 bits are packed integers in the format of
compressed-tensors, written with that library, so that a process which never heard of moq_hf computes the same, bit for
bit. Layers above 8 bits are dense floats on their grid. `moq_state.json` beside them holds the config, the bits of each
layer, the history of switches, and a digest of every tensor.

Convolutions are dense at all bits: compressed-tensors packs matrices, and its servers know no packed convolution.

What compressed-tensors calls the grids of `quantizer`, (code - zero) * scale with codes from -2^(b-1):

| grid | strategy | zero point |
| --- | --- | --- |
| symmetric (ternary and full range too), per channel | channel | none |
| symmetric, row blocks | channel, the scale of a block repeated for each of its rows | none |
| symmetric, a scale per group in a row | group | none |
| asymmetric | block, whatever the groups | int8, one per scale |
| binary | block; codes -1 and 0, twice the scale | -1/2 |

Channel and group are what servers take. That is the layout "packed": the modules hold packed weights after loading,
and the model's first forward pass unpacks them. It does not fit models whose `_init_weights` reaches into other weights
(T5), and those whose parts are called by themselves (the encoder by `generate` of BART, the towers of CLIP). Nor can
transformers load packed zero points so, which is how servers take asymmetric grids. These models' layout is "unpacked":
unpacked while loading (`dequantize`), which knows one scheme for all layers: strategy channel or group, with packed
zero points, and as many bits as the largest layer has. Where neither computes what the model did, the layout is
"floats": ordinary weights, on their grid.

Compressed-tensors does not know `Conv1D` layers (GPT-2) as modules. Their weights lie in the file as in the model,
`[in_features, out_features]`, so that each scale is one of columns:

| grid | strategy | scales, and zero points in int8 |
| --- | --- | --- |
| per channel, or row blocks | tensor: loading multiplies with whatever can be broadcast | [1, out_features] |
| a scale per group in a row | block, a column wide | [in_features / size, out_features] |

An `nn.Linear` in such a model is packed in the first case and dense in the second, since its blocks lie across.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import Grid
from ..quantizer import Quantized, dequantize
from ..rows import from_rows, to_rows
from ..transformers_seams import pack_to_int32, unpack_from_int32, unpacked_weight
from .state import StoredLayer
from .words import pack, unpack

Layout = Literal["packed", "unpacked", "floats"]


@dataclass(frozen=True)
class Terms:
    """What the encoding of one layer depends on, beside its codes.

    Attributes:
        kind: What the layer is; see `rows`.
        shape: Of the weight in the model.
        dtype: Of the float weight.
        width: Bits of a packed code: the layer's own, or those of the largest layer where all have one scheme.
        group_size: Weights of a row that share a scale; None if whole rows share one.
        at_load: Whether weights are unpacked while loading, with one scheme for all layers.
        has_conv1d: Whether the model has `Conv1D` layers.
        scale_dtype: Of the scales in the file.
    """

    kind: str
    shape: Sequence[int]
    dtype: torch.dtype
    width: int
    group_size: int | None
    at_load: bool
    has_conv1d: bool
    scale_dtype: torch.dtype = torch.float32


class Encoded(NamedTuple):
    """A weight as it goes into the files.

    Attributes:
        parts: Tensors by the last part of their name.
        scheme: The quantization arguments of compressed-tensors; None for floats.
        grid: Scales and zero points for `moq_state.json`, where no tensor holds them.
    """

    parts: dict[str, Tensor]
    scheme: dict[str, Any] | None = None
    grid: tuple[str, str | None] | None = None


@dataclass(frozen=True)
class InFiles:
    """A weight that is read from the files, tensor by tensor.

    Attributes:
        where: What an error names.
        layer: What `moq_state.json` declares.
        group: Its config group, with the scheme under "weights"; empty for floats.
        dtype: In which transformers computes the weight, that of the model.
        parts: Its tensors so far, by the last part of their name.
    """

    where: str
    layer: StoredLayer
    group: Mapping[str, Any]
    dtype: torch.dtype
    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the tensors are all there."""
        wanted = {"weight"} if self.layer.stored == "float" else FORMATS[self.layer.stored].parts(self)
        return wanted <= self.parts.keys()

    @property
    def shape(self) -> torch.Size:
        """The weight's shape as it lies in the files."""
        return torch.Size(reversed(self.layer.shape) if self.layer.kind == "conv1d" else self.layer.shape)

    @property
    def width(self) -> int:
        """Bits of a packed code."""
        return cast(int, self.group["weights"]["num_bits"])

    @cached_property
    def codes(self) -> Tensor:
        """The packed codes as they lie in the files, int8."""
        return unpack(self.parts["weight_packed"], self.width, self.shape)

    def decode(self) -> Quantized:
        """The codes as `quantizer` gives them, with their scales and zero points."""
        return FORMATS[self.layer.stored].decode(self)

    def check(self) -> None:
        """Whether every code, scale and zero point is of the grid that the layer declares.

        Raises:
            MoQError: One is not.
        """
        if self.layer.stored != "float":
            FORMATS[self.layer.stored].check(self)

    def weight(self) -> Tensor:
        """The float weight, as transformers computes it."""
        return self.parts["weight"] if self.layer.stored == "float" else FORMATS[self.layer.stored].weight(self)


class _Dense:
    """Floats on the grid; the state holds the scales and zero points, which only the check needs."""

    compressor = ""

    def encode(self, values: Quantized, terms: Terms) -> Encoded:
        weight = from_rows(dequantize(*values, dtype=terms.dtype), terms.kind, terms.shape).contiguous()
        zero = values.zero_point
        return Encoded({"weight": weight}, grid=(_text64(values.scale), None if zero is None else _text64(zero)))

    def parts(self, stored: InFiles) -> set[str]:
        return {"weight"}

    def decode(self, stored: InFiles) -> Quantized:
        layer = stored.layer
        scale_text, zero_text = cast(tuple[str, str | None], layer.grid)
        scale = _tensor64(scale_text, torch.float32).view(layer.scales)
        zero = None if zero_text is None else _tensor64(zero_text, torch.int32).view(layer.scales)
        weight = to_rows(stored.parts["weight"], layer.kind)
        tiles = weight.float().reshape(layer.scales[0], layer.shape[0] // layer.scales[0], layer.scales[1], -1)
        codes = (tiles / scale[:, None, :, None]).round().nan_to_num(0.0)
        if zero is not None:
            codes = codes + zero[:, None, :, None]
        if layer.bits == 1:
            codes = torch.where(tiles < 0, -1.0, 1.0)
        else:
            codes = codes.clamp(*_grid_of(layer).limits(layer.bits))
        return Quantized(codes.reshape(weight.shape).int(), scale, zero)

    def check(self, stored: InFiles) -> None:
        weight, values = stored.parts["weight"], self.decode(stored)
        check_values(stored, values)
        rows, limits = to_rows(weight, stored.layer.kind), _grid_of(stored.layer).limits(stored.layer.bits)
        off = dequantize(*values, dtype=weight.dtype) != rows
        # A half dtype rounds by up to a step and more, so that the nearest code may be the next one's.
        for step in (-1, 1) if weight.dtype != torch.float32 and off.any() else ():
            others = values._replace(codes=(values.codes + step).clamp(*limits))
            off &= dequantize(*others, dtype=weight.dtype) != rows
        if bool(off.any()):
            raise MoQError(f"{stored.where}: a weight is not on the grid of {stored.layer.bits} bits")

    def weight(self, stored: InFiles) -> Tensor:
        return stored.parts["weight"]


class _Bytes:
    """An embedding table, a byte per weight: transformers initializes tables, and ties weights, by the name `weight`.

    The modules that are tied to it have the same codes, which are stored once, and scales of their own.
    """

    compressor = "int-quantized"

    def encode(self, values: Quantized, terms: Terms) -> Encoded:
        codes, scale, zero = values
        half = 2 ** (terms.width - 1)
        if zero is not None:
            codes, zero = codes - half, (zero - half).to(torch.int8)
        scheme: dict[str, Any] = {"num_bits": terms.width, "type": "int", "symmetric": zero is None, "dynamic": False}
        parts = {"weight": codes.to(torch.int8), "weight_scale": scale.to(terms.scale_dtype)}
        if zero is not None:
            parts["weight_zero_point"] = zero
        return Encoded(parts, scheme | _strategy(codes, scale, zero, terms))

    def parts(self, stored: InFiles) -> set[str]:
        return {"weight", "weight_scale", *_zero_point_of(stored)}

    def decode(self, stored: InFiles) -> Quantized:
        codes, scale, half = stored.parts["weight"].int(), stored.parts["weight_scale"].float(), 2 ** (stored.width - 1)
        zero = stored.parts.get("weight_zero_point")
        return Quantized(codes, scale, None) if zero is None else Quantized(codes + half, scale, zero.int() + half)

    def check(self, stored: InFiles) -> None:
        dtype = stored.parts["weight"].dtype
        if dtype != torch.int8:
            raise MoQError(f"{stored.where}: the codes are {dtype}, not torch.int8")
        check_values(stored, self.decode(stored))

    def weight(self, stored: InFiles) -> Tensor:
        return dequantize(*self.decode(stored), dtype=stored.dtype)


class _Packed:
    """Codes packed into words of 32 bits, with the strategies in the tables above."""

    compressor = "pack-quantized"

    def encode(self, values: Quantized, terms: Terms) -> Encoded:
        codes, scale, zero = values
        width, half = terms.width, 2 ** (terms.width - 1)
        scheme: dict[str, Any] = {"num_bits": width, "type": "int", "symmetric": zero is None, "dynamic": False}
        if zero is not None:
            codes, zero = codes - half, (zero - half).to(torch.int8)
        # Servers know a scale for each channel or group, none for a block of rows.
        if terms.group_size is None and (terms.at_load or (zero is None and width > 1 and not terms.has_conv1d)):
            repeats = codes.shape[0] // scale.shape[0]
            scale = scale.repeat_interleave(repeats, 0)
            zero = None if zero is None else zero.repeat_interleave(repeats, 0)
        if terms.at_load and not terms.has_conv1d and zero is not None:
            zero = pack_to_int32(zero, width, packed_dim=0)
        if width == 1:
            codes, scale, zero = (codes - 1) // 2, scale * 2, torch.full_like(scale, -0.5)
            scheme |= {"symmetric": False, "zp_dtype": "torch.float32"}
        scheme |= _strategy(codes, scale, zero, terms)
        codes = turned(codes, terms.kind)
        parts = {
            "weight_packed": pack(codes, width),
            "weight_scale": turned(scale, terms.kind).to(terms.scale_dtype),
            "weight_shape": torch.tensor(codes.shape, device="cpu"),
        }
        if zero is not None:
            parts["weight_zero_point"] = turned(zero, terms.kind)
        return Encoded(parts, scheme)

    def parts(self, stored: InFiles) -> set[str]:
        return {"weight_packed", "weight_scale", "weight_shape", *_zero_point_of(stored)}

    def decode(self, stored: InFiles) -> Quantized:
        kind, width, half = stored.layer.kind, stored.width, 2 ** (stored.width - 1)
        codes = turned(stored.codes, kind).int()
        scale, zero = turned(stored.parts["weight_scale"], kind).float(), stored.parts.get("weight_zero_point")
        # Of a table that was given the groups of the linear layers.
        own = slice(None, None, scale.shape[1] // stored.layer.scales[1])
        if zero is None:
            return Quantized(codes, scale[:, own], None)
        if zero.is_floating_point():
            return Quantized(2 * codes + 1, scale / 2, None)
        if zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, width, torch.Size((stored.shape[0], scale.shape[1])), packed_dim=0)
        return Quantized(codes + half, scale[:, own], (turned(zero.int(), kind) + half)[:, own])

    def check(self, stored: InFiles) -> None:
        parts = stored.parts
        check_words(stored)
        zero = parts.get("weight_zero_point")
        if zero is not None and zero.is_floating_point() and bool((zero != -0.5).any()):
            raise MoQError(f"{stored.where}: the zero points of binary codes must be -1/2")
        check_values(stored, self.decode(stored))

    def weight(self, stored: InFiles) -> Tensor:
        scale = stored.parts["weight_scale"].to(stored.dtype)
        return unpacked_weight({**stored.parts, "weight_scale": scale}, stored.group)


# Each encodes a weight, names its tensors, and decodes and checks them; `compressor` is its name in compressed-tensors.
FORMATS: dict[str, _Packed | _Bytes | _Dense] = {"packed": _Packed(), "int8": _Bytes(), "dense": _Dense()}


def _zero_point_of(stored: InFiles) -> set[str]:
    return set() if stored.group["weights"]["symmetric"] else {"weight_zero_point"}


def turned(tensor: Tensor, kind: str) -> Tensor:
    """A matrix of codes or scales in the orientation of the file, or back: one is the other's transpose, or itself."""
    return to_rows(tensor, kind).contiguous()


def _strategy(codes: Tensor, scale: Tensor, zero: Tensor | None, terms: Terms) -> dict[str, Any]:
    (rows, columns), size = codes.shape, terms.group_size
    if terms.has_conv1d:
        return {"strategy": "tensor"} if size is None else {"strategy": "block", "block_structure": [size, 1]}
    if size is not None and (zero is None or terms.at_load):
        return {"strategy": "group", "group_size": size}
    if scale.shape[0] == rows and (zero is None or terms.at_load):
        return {"strategy": "channel"}
    return {"strategy": "block", "block_structure": [rows // scale.shape[0], columns // scale.shape[1]]}


def _grid_of(layer: StoredLayer) -> Grid:
    return Grid(symmetric=layer.symmetric, full=layer.full)


def check_words(stored: InFiles) -> None:
    """Whether packed codes are words of a weight of the declared shape, with nothing in between.

    Raises:
        MoQError: They are not; names the layer.
    """
    width, shape, parts = stored.width, stored.shape, stored.parts
    is_same = torch.equal(pack(stored.codes, width), parts["weight_packed"])
    if not is_same or parts["weight_shape"].tolist() != list(shape):
        raise MoQError(f"{stored.where}: the packed codes are not those of a weight {list(shape)} at {width} bits")


def check_values(stored: InFiles, values: Quantized) -> None:
    """Whether codes, scales and zero points are of the grid that a layer declares, and need its bits.

    Some code needs them, as that of a group's largest weight does: stochastic rounding may leave it one short, an
    asymmetric grid two. Ternary and binary grids have other codes.

    Raises:
        MoQError: They are not, or do not; names the layer.
    """
    (codes, scale, zero), where, bits = values, stored.where, stored.layer.bits
    if stored.layer.symmetric != (zero is None):
        raise MoQError(f"{where}: an asymmetric grid has zero points, and a symmetric one has none")
    grid = _grid_of(stored.layer)
    is_legal = scale >= 0 if bits == 1 else scale != 0 if grid.full else scale > 0
    if not bool(torch.isfinite(scale).all() and is_legal.all()):
        raise MoQError(
            f"{where}: a scale is not a {'finite number but 0' if grid.is_full(bits) else 'positive number'}"
        )
    if bits == 1:
        if bool((codes.abs() != 1).any()):
            raise MoQError(f"{where}: binary codes must be -1 and 1")
        return
    low, high = grid.limits(bits)
    lowest, highest = 0, 0
    for what, integers in (("codes", codes), ("zero points", zero)):
        if integers is not None:
            least, most = (int(value) for value in torch.aminmax(integers))
            if least < low or most > high:
                raise MoQError(f"{where}: {what} beyond {high} at {bits} bits")
            lowest, highest = min(lowest, least), max(highest, most)
    low, high = grid.limits(bits - 1)
    # A group of zeros has the scale 1, and one that is too small for float16 has its least value.
    shows_bits = bool(((scale != 1) & (scale.abs() > 2.0**-24)).any())
    if bits > 2 and shows_bits and lowest < highest and low <= lowest and highest <= high:
        raise MoQError(f"{where}: no code is beyond {high}, so they are of fewer than {bits} bits")


def _text64(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _tensor64(text: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
