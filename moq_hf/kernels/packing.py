"""Packed codes for `gathering`."""

import math

import torch
from torch import Tensor

_WORD = 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes as a dense stream of bits, int32 `[rows, words]`."""
    rows, columns = codes.shape
    width = packed_width(columns, bits)
    stored = codes + 2 ** (bits - 1)
    if _WORD % bits == 0:
        # No code lies in two words.
        each = _WORD // bits
        parts = torch.nn.functional.pad(stored, (0, width * each - columns)).view(rows, width, each)
        return (parts << _shifts(bits, codes.device)).sum(2, dtype=torch.int32)
    shifts = torch.arange(bits, device=codes.device)
    stream = ((stored.unsqueeze(2) >> shifts) & 1).view(rows, -1)
    stream = torch.nn.functional.pad(stream, (0, width * 32 - columns * bits)).view(rows, width, 32)
    # int64 sums up to 2^32 - 1 wrap to the int32 with the same bits.
    return (stream.long() << torch.arange(32, device=codes.device)).sum(2).to(torch.int32)


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`."""
    rows = len(words)
    if _WORD % bits == 0:
        found = (words.unsqueeze(2) >> _shifts(bits, words.device)).bitwise_and_(2**bits - 1)
        return found.view(rows, -1)[:, :columns].sub(2 ** (bits - 1))
    stream = ((words.unsqueeze(2) >> torch.arange(32, device=words.device)) & 1).view(rows, -1)
    stream = stream[:, : columns * bits].reshape(rows, columns, bits)
    stored = (stream << torch.arange(bits, device=words.device)).sum(2).to(torch.int32)
    return stored.sub_(2 ** (bits - 1))


def packed_width(columns: int, bits: int) -> int:
    """int32 words that a row of `columns` codes of `bits` bits takes."""
    return math.ceil(columns * bits / 32)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Where the codes of a word begin."""
    return torch.arange(0, _WORD, bits, dtype=torch.int32, device=device)
