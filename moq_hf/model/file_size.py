"""The size that the delivered `model.safetensors` will have, by the bits of its layers: before anything is written.

The layout is the one called "packed" in `formats`; tests compare with files.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..names import without_peft
from ..processes import shape_of
from ..quant_linear import QuantEmbedding, QuantLayer
from ..rows import is_experts, parameter_of
from .inventory import Inventory

_WORD = 32
# What safetensors calls them.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class _Tensor(NamedTuple):
    """A tensor in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileSize:
    """The size of the file of a model in training, for any bits of its layers.

    Args:
        inventory: Of the model.
        layers: Its quantized layers by name.
        embeddings: Its quantized embedding tables by name.
        table_bits: Those of the tables.
    """

    def __init__(
        self,
        inventory: Inventory,
        layers: Mapping[str, QuantLayer],
        embeddings: Mapping[str, QuantEmbedding],
        table_bits: int | None,
    ) -> None:
        self._inventory, self._layers = inventory, layers
        owned = {id(layer.float_weight) for layer in layers.values()}
        self._fixed: list[_Tensor] = []
        for name, table in embeddings.items():
            owned.add(id(table.float_weight))
            self._fixed += self._bytes_of(name, table) if table_bits != 1 else [_of(f"{name}.weight", table.weight)]
        self._fixed += [_of(name, tensor) for name, tensor in _tensors(inventory) if id(tensor) not in owned]
        # No offset in the file has more digits.
        parts = [*self._fixed, *(part for name in layers for part in self._parts(name, 8))]
        self._end = sum(tensor.bytes for tensor in parts)

    def why_alike(self) -> str | None:
        """Why the bits of single layers make no difference to the file; None if they do."""
        model = without_peft(self._inventory.model)
        if not isinstance(model, PreTrainedModel):
            return "only models of transformers are packed"
        kinds = {layer.kind for layer in self._layers.values()}
        config = model.config
        if "conv1d" in kinds:
            return "Conv1D layers are saved as floats on the grid, at full size"
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "sub_configs", None):
            return "a model of its kind is unpacked while loading, with all codes as wide as the widest"
        if any(map(is_experts, kinds)):
            return "packed experts are all as wide as the widest"
        symmetric = all(layer.moq.grid.symmetric for layer in self._layers.values())
        if not symmetric and not any(isinstance(m, QuantEmbedding) for m in self._inventory.modules.values()):
            return "asymmetric codes are unpacked while loading, all as wide as the widest"
        return None

    def of_layer(self, name: str, bits: int) -> int:
        """Bytes that stand for the weight of a layer at `bits`, 1 to 8, with their entries in the file's header."""
        return sum(tensor.bytes + self._entry(tensor) for tensor in self._parts(name, bits))

    def of_rest(self) -> int:
        """Bytes of everything else: what stays in float, tables, the rest of the header; a few more than there are."""
        length = len('{"__metadata__":{"format":"pt"}}') + sum(map(self._entry, self._fixed))
        return 8 + 8 * math.ceil(length / 8) + 7 + sum(tensor.bytes for tensor in self._fixed)

    def _entry(self, tensor: _Tensor) -> int:
        """Bytes of a tensor's entry in the header, with offsets of the most digits, and the comma before it."""
        kind = _DTYPES.get(tensor.dtype, "F32")
        entry = {tensor.name: {"dtype": kind, "shape": tensor.shape, "data_offsets": [self._end, self._end]}}
        return len(json.dumps(entry, separators=(",", ":")).encode()) - 1

    def _parts(self, name: str, bits: int) -> list[_Tensor]:
        layer = self._layers[name]
        own = parameter_of(name, layer.kind)
        if layer.kind == "conv" or bits == 1:
            return [_of(own, layer.float_weight)]
        if name in self._inventory.tied.values():
            return self._bytes_of(name, layer)
        rows, columns = layer.matrix_shape
        grid = layer.moq.grid
        shape = grid.shape(rows, columns)
        if grid.grouping.row_size is None and grid.symmetric:
            shape = (rows, 1)

        def part(what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Tensor:
            return _Tensor("_".join((own, what)), dtype, shape)

        parts = [
            part("packed", torch.int32, (rows, math.ceil(columns * bits / _WORD))),
            part("scale", getattr(torch, grid.scale_dtype), shape),
            part("shape", torch.int64, (2,)),
        ]
        if not grid.symmetric:
            parts.append(part("zero_point", torch.int8, shape))
        return parts

    def _bytes_of(self, name: str, layer: QuantLayer) -> list[_Tensor]:
        """A table, or what shares the weight of one: a byte for each weight."""
        rows, columns = layer.matrix_shape
        grid = layer.moq.grid
        scales = getattr(torch, grid.scale_dtype), grid.shape(rows, columns)
        again = [other for other, owner in self._inventory.tied.items() if owner == name]
        return [
            _Tensor(f"{name}.weight", torch.int8, (rows, columns)),
            *(_Tensor(f"{one}.weight_scale", *scales) for one in (name, *again)),
        ]


def _tensors(inventory: Inventory) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a model as its file has them, each once; without what PEFT has added."""
    seen = set[int]()
    for name, tensor in inventory.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not inventory.is_added(name):
            seen.add(id(tensor))
            yield name, tensor


def _of(name: str, tensor: torch.Tensor) -> _Tensor:
    return _Tensor(name, tensor.dtype, tuple(shape_of(tensor)))
