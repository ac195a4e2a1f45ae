"""Packed codes on a device, and products with them."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import quantizer, triton_quant
from ..triton_quant import Unusable, launching, load_kernels, passes, power_of_two

PACKED_BITS = (2, 4, 8)
_WORD = 32


def available(device: torch.device) -> bool:
    """Whether the kernels of this module run on `device`, with the right numbers; as `triton_quant.available`."""
    return triton_quant.available(device) and _is_right(triton_quant.with_index(device))


@functools.cache
def _is_right(device: torch.device) -> bool:
    return passes(device, _differences)


def _differences(device: torch.device) -> Iterator[str]:
    """Where packing is not that of plain PyTorch, and a product too far from the right one, over odd shapes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (33, 45), generator=generator, dtype=torch.int32, device="cpu").to(device)
    for bits, some in ((4, codes), (3, codes.clamp(-4, 3))):
        words = _pack_in_torch(some, bits)
        yield from triton_quant.same_bits(_pack(some, bits), words, f"packing at {bits} bits")
        yield from triton_quant.same_bits(_unpack(words, bits, 45), some, f"unpacking at {bits} bits")
    # One group; words of one group; words of two.
    codes = codes[:, :40].contiguous()
    words = _pack_in_torch(codes, 4)
    for rows, groups in ((1, 1), (17, 5), (3, 8)):
        x = torch.randn(rows, 40, generator=generator, dtype=torch.float32, device="cpu").to(device, torch.bfloat16)
        scale = torch.rand(33, groups, generator=generator, dtype=torch.float32, device="cpu").to(device)
        zero, bias = (None, None) if groups == 1 else (codes[:, :groups] // 2, x.flatten()[:33])
        weight = quantizer.dequantize(codes, scale, zero)
        weight = (weight if groups == 1 else weight.to(x.dtype)).cpu().double()
        exact, size = (y.cpu().double() @ w.T for y, w in ((x, weight), (x.abs(), weight.abs())))
        exact += 0.0 if bias is None else bias.cpu().double()
        # One rounding to bfloat16, and float32's of each of the 40 sums.
        allowed = exact.abs() * 2.0**-8 + 40 * size * 2.0**-23
        error = (packed_linear(x, words, 4, scale, zero, bias).cpu().double() - exact).abs()
        if bool((error > allowed).any()):
            yield f"products of {rows} rows: off by up to {float((error - allowed).max()):.3g} more than rounding"


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes as a dense stream of bits, lowest first, each row filled up to whole words: compressed-tensors' layout.

    Args:
        codes: int32 `[rows, columns]` in -2^(bits-1) ... 2^(bits-1) - 1.
        bits: 1 to 8.

    Returns:
        int32 `[rows, ceil(columns * bits / 32)]`; code c is stored as c + 2^(bits-1).

    Raises:
        ValueError: Other bits, or codes that are not an int32 matrix.
    """
    _check_packing(codes, bits)
    if available(codes.device):
        with contextlib.suppress(Unusable):
            return _pack(codes, bits)
    return _pack_in_torch(codes, bits)


def _pack(codes: Tensor, bits: int) -> Tensor:
    rows, columns = codes.shape
    width = packed_width(columns, bits)
    words = torch.empty(rows, width, dtype=torch.int32, device=codes.device)
    total = words.numel()
    with launching(codes.device):
        load_kernels().pack_codes[(math.ceil(total / 256),)](
            codes.contiguous(), words, columns, width, total, BITS=bits, S=256, enable_fp_fusion=False
        )
    return words


def _pack_in_torch(codes: Tensor, bits: int) -> Tensor:
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
    """The inverse of `pack`.

    Args:
        words: int32 `[rows, ceil(columns * bits / 32)]`.
        bits: 1 to 8.
        columns: Codes of a row.

    Returns:
        int32 `[rows, columns]`.

    Raises:
        ValueError: Other bits, or words that do not hold that many columns.
    """
    _check_packing(words, bits)
    width = words.shape[1]
    if width != packed_width(columns, bits):
        raise ValueError(
            f"{columns} columns of {bits} bits take {packed_width(columns, bits)} words a row, there are {width}"
        )
    if available(words.device):
        with contextlib.suppress(Unusable):
            return _unpack(words, bits, columns)
    return _unpack_in_torch(words, bits, columns)


def _unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    codes = torch.empty(len(words), columns, dtype=torch.int32, device=words.device)
    total = codes.numel()
    with launching(words.device):
        load_kernels().unpack_codes[(math.ceil(total / 1024),)](
            words.contiguous(), codes, columns, words.shape[1], total, BITS=bits, S=1024, enable_fp_fusion=False
        )
    return codes


def _unpack_in_torch(words: Tensor, bits: int, columns: int) -> Tensor:
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


def packed_linear(
    x: Tensor,
    words: Tensor,
    bits: int,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply x by the transposed packed weight and add the bias; the weight is unpacked in the kernel, tile by tile.

    Sums are float32. With one scale a row the integers are multiplied, else the weight rounded to the dtype of x.

    Args:
        x: float16 or bfloat16 `[..., in_features]`, on a device where the kernels are `available`.
        words: int32 `[out_features, words]` from `pack`.
        bits: 2, 4 or 8.
        scale: float32 `[out_features, groups]`; groups divides in_features.
        zero_point: int32 of the scale's shape, subtracted from the codes.
        bias: `[out_features]`.

    Returns:
        `[..., out_features]` in the dtype of x.

    Raises:
        ValueError: Other bits or dtypes, or shapes that do not fit each other.
        Unusable: The kernel could not be launched.
    """
    _check_product(x, words, bits, scale, zero_point, bias)
    columns, rows = x.shape[-1], words.shape[0]
    flat = x.reshape(-1, columns).contiguous()
    y = torch.empty(len(flat), rows, dtype=x.dtype, device=x.device)
    if y.numel():
        options = _launch_of(len(flat), bits, scale.shape[1], columns)
        scale = scale.to(torch.float32).contiguous()
        zeros = None if zero_point is None else zero_point.to(torch.int32).contiguous()
        with launching(x.device):
            load_kernels().packed_matmul[(math.ceil(len(flat) / options["BM"]), math.ceil(rows / options["BN"]))](
                flat,
                words.contiguous(),
                scale,
                scale if zeros is None else zeros,
                scale if bias is None else bias.contiguous(),
                y,
                len(flat),
                rows,
                columns,
                words.shape[1],
                columns // scale.shape[1],
                HAS_ZERO=zeros is not None,
                HAS_BIAS=bias is not None,
                **options,
            )
    return y.view(*x.shape[:-1], rows)


def _launch_of(batch: int, bits: int, groups: int, columns: int) -> dict[str, Any]:
    """Tiles and the compiler's options of a product with so many rows, and so many groups in a weight's row."""
    # tl.dot takes no less than 16 rows.
    tile = min(64, max(16, power_of_two(batch)))
    splits = groups > 1 and columns // groups % (_WORD // bits) > 0
    return {
        "BITS": bits,
        "PER_ROW": groups == 1,
        "SPLIT": splits,
        "BM": tile,
        "BN": 64 if tile > 16 and groups == 1 else 32,
        "BW": 32,
        "num_warps": 4 if tile == 16 else 8,
        # With loads for each code, pipelining takes more shared memory than a GPU has.
        "num_stages": 1 if splits else 3,
        "enable_fp_fusion": False,
    }


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Where the codes of a word begin."""
    return torch.arange(0, _WORD, bits, dtype=torch.int32, device=device)


def _check_product(
    x: Tensor, words: Tensor, bits: int, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None
) -> None:
    columns, rows = x.shape[-1], words.shape[0]
    if bits not in PACKED_BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, PACKED_BITS))}, got {bits}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"activations must be float16 or bfloat16, got {x.dtype}")
    if words.dtype != torch.int32 or tuple(words.shape) != (rows, packed_width(columns, bits)):
        raise ValueError(f"words {list(words.shape)} of {words.dtype} do not hold {columns} columns of {bits} bits")
    if scale.dim() != 2 or scale.shape[0] != rows or columns % scale.shape[1]:
        raise ValueError(f"scale {list(scale.shape)} does not tile a weight [{rows}, {columns}]")
    if zero_point is not None and zero_point.shape != scale.shape:
        raise ValueError(f"zero_point has shape {list(zero_point.shape)}, the scale has {list(scale.shape)}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ValueError(f"bias has shape {list(bias.shape)}, the weight {rows} rows")


def _check_packing(values: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, got {bits}")
    if values.dim() != 2 or values.dtype != torch.int32:
        raise ValueError(f"expected an int32 matrix, got {values.dtype} of shape {list(values.shape)}")
