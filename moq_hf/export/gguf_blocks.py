"""The integers of a packed checkpoint as blocks of ggml: 32 weights of a row that share a scale in float16.

| type | bits of the grid | codes | value | bytes of a block |
| --- | --- | --- | --- | --- |
| Q4_0 | 1 to 4, symmetric | -8 to 7 | d * code | 18 |
| Q4_1 | 2 to 4, asymmetric | 0 to 15 | d * code + m | 20 |
| Q8_0 | 5 to 8, symmetric | -128 to 127 | d * code | 34 |

A scale that more than 32 weights share is repeated. ggml's own quantizer never gives a code of -128, but its kernels
compute with it: they multiply the code's magnitude as an unsigned byte, or the code itself (ggml of llama.cpp 0.3.36).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
        codes: int16 `[rows, blocks, 32]`; those of Q4_1 from 0.
        scale: float16 `[rows, blocks, 1]`.
        minimum: float16 of the scale's shape, the value of code 0 in Q4_1; None for the others.
        error: The largest error of a weight by the rounding to float16, in quantization steps.
    """

    kind: str
    codes: NDArray[np.int16]
    scale: Halves
    minimum: Halves | None
    error: float

    def reordered(self, order: NDArray[np.int64]) -> "Blocks":
        """Take the rows in another order."""
        minimum = None if self.minimum is None else self.minimum[order]
        return self._replace(codes=self.codes[order], scale=self.scale[order], minimum=minimum)

    def raw(self) -> NDArray[np.uint8]:
        """The bytes of the blocks, `[rows, bytes]`."""
        if self.kind == "Q8_0":
            parts = [self.scale.view(np.uint8), self.codes.astype(np.int8).view(np.uint8)]
        else:
            nibbles = (self.codes + 8 if self.minimum is None else self.codes).astype(np.uint8)
            # The first half of the block lies in the lower nibbles.
            packed = nibbles[..., : SIZE // 2] | nibbles[..., SIZE // 2 :] << np.uint8(4)
            halves = [self.scale] if self.minimum is None else [self.scale, self.minimum]
            parts = [*(half.view(np.uint8) for half in halves), packed]
        return np.concatenate(parts, -1).reshape(len(self.codes), -1)

    def values(self) -> Floats:
        """The weight that these blocks hold, float32 `[rows, columns]`."""
        values = self.codes.astype(np.float32) * self.scale.astype(np.float32)
        if self.minimum is not None:
            values += self.minimum.astype(np.float32)
        return values.reshape(len(self.codes), -1)


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

    >>> import torch
    >>> layer = StoredLayer("linear", 4, "packed", (1, 32), (1, 1), True, 0, 0, 0.0)
    >>> stored = Quantized(torch.ones(1, 32, dtype=torch.int32), torch.tensor([[0.5]]), None)
    >>> blocks_of(stored, layer, "example").error
    0.0
    """
    (rows, columns), (above, across) = layer.shape, layer.scales
    blocks = columns // SIZE

    def per_block(values: Tensor) -> Floats:
        repeated = values.float().repeat_interleave(rows // above, 0).repeat_interleave(blocks // across, 1)
        return repeated[..., None].numpy()

    codes = stored.codes.numpy().astype(np.int16).reshape(rows, blocks, SIZE)
    exact = dequantize(*stored).numpy().reshape(codes.shape)
    scale = per_block(stored.scale)
    # The scale of a block of zeros does not matter.
    used = exact.any(-1, keepdims=True)
    with np.errstate(over="ignore"):
        half, minimum = scale.astype(np.float16), None
        if stored.zero_point is not None:
            # `stored_weights` gives codes and zero points that are less by half of the range.
            shift = 2 ** (layer.bits - 1)
            codes = codes + np.int16(shift)
            minimum = (-(per_block(stored.zero_point) + shift) * scale).astype(np.float16)
    if not np.isfinite(half).all() or (minimum is not None and not np.isfinite(minimum).all()):
        raise MoQError(f"{where}: a scale of {np.abs(scale).max():.3g} is too large for GGUF's float16")
    if (half[used] == 0).any():
        raise MoQError(f"{where}: a scale of {np.abs(scale[used]).min():.3g} is too small for GGUF's float16")
    found = Blocks(kind_of(layer), codes, half, minimum, 0.0)
    steps = (found.values().reshape(codes.shape) - exact) / np.where(used, scale, np.float32(np.inf))
    return found._replace(error=float(np.abs(steps).max()))
