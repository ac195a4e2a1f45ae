"""The integers of a packed checkpoint as blocks of ggml: 32 weights of a row that share a scale in float16.

| type | bits of the grid | codes | value | bytes of a block |
| --- | --- | --- | --- | --- |
| Q4_0 | 1 to 4, symmetric | -8 to 7 | d * code | 18 |
| Q4_1 | 2 to 4, asymmetric | 0 to 15 | d * code + m | 20 |
| Q8_0 | 5 to 8, symmetric | -128 to 127 | d * code | 34 |

A scale that more than 32 weights share is repeated. ggml's own quantizer never gives a code of -128, but its kernels
compute with it: they multiply the code's magnitude as an unsigned byte, or the code itself (ggml of llama.cpp 0.3.36).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import MoQError
from ..packed.state import MAX_PACKED_BITS, StoredLayer
from ..quantizer import Quantized, dequantize

SIZE = 32
Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Blocks(NamedTuple):
    """A weight in blocks.

    Attributes:
        kind: "Q4_0", "Q4_1" or "Q8_0".
        codes: int16 `[rows, columns]`; those of Q4_1 from 0.
        scale: float16 `[rows, columns / 32]`.
        minimum: float16 of the scale's shape, the value of code 0 in Q4_1; None for the others.
    """

    kind: str
    codes: NDArray[np.int16]
    scale: Halves
    minimum: Halves | None

    def reordered(self, order: NDArray[np.int64]) -> "Blocks":
        """With the rows in another order."""
        minimum = None if self.minimum is None else self.minimum[order]
        return Blocks(self.kind, self.codes[order], self.scale[order], minimum)

    @staticmethod
    def joined(parts: "Sequence[Blocks]") -> "Blocks":
        """The rows of all of them, one after the other; they are of one kind."""
        minima = [part.minimum for part in parts if part.minimum is not None]
        return Blocks(
            parts[0].kind,
            np.concatenate([part.codes for part in parts]),
            np.concatenate([part.scale for part in parts]),
            np.concatenate(minima) if minima else None,
        )

    def raw(self) -> NDArray[np.uint8]:
        """The bytes of the blocks, `[rows, bytes]`."""
        rows, columns = self.codes.shape
        tiles = self.codes.reshape(rows, columns // SIZE, SIZE)
        halves = [half[..., None].view(np.uint8) for half in (self.scale, self.minimum) if half is not None]
        if self.kind == "Q8_0":
            return np.concatenate([*halves, tiles.astype(np.int8).view(np.uint8)], -1).reshape(rows, -1)
        nibbles = (tiles + 8 if self.kind == "Q4_0" else tiles).astype(np.uint8)
        # The first half of the block lies in the lower nibbles.
        packed = nibbles[..., : SIZE // 2] | nibbles[..., SIZE // 2 :] << np.uint8(4)
        return np.concatenate([*halves, packed], -1).reshape(rows, -1)

    def values(self) -> Floats:
        """The weight that these blocks hold, float32 `[rows, columns]`."""
        values = self.codes * _wide(self.scale)
        return values if self.minimum is None else values + _wide(self.minimum)


class Rounding(NamedTuple):
    """What the rounding to float16 costs a weight, or several at most.

    Attributes:
        scale: Largest relative error of a scale.
        weight: Largest error of a weight, in quantization steps.
    """

    scale: float
    weight: float


def kind_of(layer: StoredLayer) -> str:
    """The type of block that holds a layer.

    Raises:
        MoQError: None does; says what of the grid does not fit.

    >>> kind_of(StoredLayer("linear", 3, "packed", (8, 64), (8, 2), True, 0, 0, 0.0))
    'Q4_0'
    """
    columns, size = layer.shape[1], layer.shape[1] // layer.scales[1]
    if layer.bits > MAX_PACKED_BITS:
        raise MoQError(f"{layer.bits} bits")
    if size % SIZE:
        raise MoQError(f"{columns} columns" if size == columns else f"groups of {size} columns")
    if layer.bits <= 4:
        return "Q4_0" if layer.symmetric else "Q4_1"
    if not layer.symmetric:
        raise MoQError(f"asymmetric at {layer.bits} bits")
    return "Q8_0"


def blocks_of(stored: Quantized, layer: StoredLayer, where: str) -> Blocks:
    """A layer's integers in blocks.

    Args:
        stored: As `stored_weights` gives them.
        layer: Of a kind that fits.
        where: What an error names.

    Raises:
        MoQError: A scale is too large or too small for float16.
    """
    codes, scale = stored.codes.numpy().astype(np.int16), _per_block(stored.scale.numpy(), layer)
    minimum = None
    if stored.zero_point is not None:
        # `stored_weights` gives codes and zero points that are less by half of the range.
        half = 2 ** (layer.bits - 1)
        zero = _per_block(stored.zero_point.numpy().astype(np.float32), layer)
        codes, minimum = codes + np.int16(half), _half(-(zero + np.float32(half)) * scale)
    blocks = Blocks(kind_of(layer), codes, _half(scale), minimum)
    used = _used(stored, layer)
    if not (np.isfinite(blocks.scale).all() and (minimum is None or np.isfinite(minimum).all())):
        raise MoQError(f"{where}: a scale of {np.abs(scale).max():.3g} is too large for GGUF's float16")
    if (blocks.scale[used] == 0).any():
        least = np.abs(scale[used]).min()
        raise MoQError(f"{where}: a scale of {least:.3g} is too small for GGUF's float16")
    return blocks


def rounding(stored: Quantized, layer: StoredLayer, blocks: Blocks) -> Rounding:
    """What float16 costs.

    Args:
        stored: As `stored_weights` gives them.
        layer: The same.
        blocks: Made of them, with the rows in the same order.

    >>> import torch
    >>> layer = StoredLayer("linear", 4, "packed", (1, 32), (1, 1), True, 0, 0, 0.0)
    >>> stored = Quantized(torch.ones(1, 32, dtype=torch.int32), torch.tensor([[0.5]]), None)
    >>> rounding(stored, layer, blocks_of(stored, layer, "example"))
    Rounding(scale=0.0, weight=0.0)
    """
    scale, used = _per_block(stored.scale.numpy(), layer), _used(stored, layer)
    if not used.any():
        return Rounding(0.0, 0.0)
    relative = np.abs(blocks.scale.astype(np.float32) - scale)[used] / np.abs(scale)[used]
    step = np.abs(_wide(np.where(used, scale, np.float32(np.inf))))
    steps = np.abs(blocks.values() - dequantize(*stored).numpy()) / step
    return Rounding(float(relative.max()), float(steps.max()))


def _used(stored: Quantized, layer: StoredLayer) -> NDArray[np.bool_]:
    """Which blocks hold anything but zeros: the scale of the others does not matter."""
    rows, columns = layer.shape
    # A binary group of zeros has codes and the scale 0.
    return cast(NDArray[np.bool_], dequantize(*stored).numpy().reshape(rows, columns // SIZE, SIZE).any(-1))


def _per_block(values: NDArray[Any], layer: StoredLayer) -> NDArray[Any]:
    (rows, columns), (above, across) = layer.shape, layer.scales
    return np.repeat(np.repeat(values, rows // above, 0), columns // SIZE // across, 1)


def _wide(per_block: NDArray[Any]) -> Floats:
    return np.repeat(per_block.astype(np.float32), SIZE, 1)


def _half(values: Floats) -> Halves:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
