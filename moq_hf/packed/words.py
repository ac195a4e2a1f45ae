"""Codes in words of 32 bits and back: compressed-tensors' bytes, piece by piece and so within the processor's cache."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from ..transformers_seams import pack_to_int32, unpack_from_int32

# Numbers at a time.
PIECE = 1 << 18
# Codes of these bits fill bytes: the integers that hold a byte's codes, one to a byte, lowest first.
_HOLDERS = {2: torch.int32, 4: torch.int16, 8: torch.uint8}


def pieces(rows: int, columns: int, block: int = 1) -> Iterator[slice]:
    """Cuts the rows of a matrix into pieces of about `PIECE` numbers, at multiples of `block` rows.

    >>> list(pieces(5, PIECE // 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, PIECE // (columns * block)) * block
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def pack(codes: Tensor, bits: int) -> Tensor:
    """What `pack_to_int32` gives, along rows.

    Args:
        codes: Integers `[rows, columns]` in -2^(bits-1) ... 2^(bits-1) - 1, on the CPU.
        bits: 1 to 8.

    Returns:
        int32 `[rows, ceil(columns * bits / 32)]`.

    >>> pack(torch.tensor([[-2, -1, 0, 1]]), 2)
    tensor([[228]], dtype=torch.int32)
    """
    holder = _HOLDERS.get(bits) if sys.byteorder == "little" else None
    words = torch.empty(codes.shape[0], -(-codes.shape[1] * bits // 32), dtype=torch.int32, device="cpu")
    for piece in pieces(*codes.shape):
        own = codes[piece].to(torch.int8)
        words[piece] = pack_to_int32(own, bits) if holder is None else _bytes_of(own, bits, holder)
    return words


def unpack(words: Tensor, bits: int, shape: torch.Size) -> Tensor:
    """The codes that `pack` packed, int8 of `shape`."""
    codes = torch.empty(shape, dtype=torch.int8, device="cpu")
    for piece in pieces(*shape):
        codes[piece] = unpack_from_int32(words[piece], bits, codes[piece].shape)
    return codes


def _bytes_of(codes: Tensor, bits: int, holder: torch.dtype) -> Tensor:
    """Words of int8 codes, each of whose bytes holds as many as fit."""
    rows, columns = codes.shape
    full = -(-columns * bits // 32) * 32 // bits
    stored = torch.nn.functional.pad(codes.view(torch.uint8) + 2 ** (bits - 1), (0, full - columns))
    held = stored.view(holder)
    # A code is 8 bits above the one before, and comes to lie `bits` above it.
    for step in range(1, 8 // bits):
        held = held | (stored.view(holder) >> (8 - bits) * step)
    return held.to(torch.uint8).view(torch.int32).view(rows, -1)
