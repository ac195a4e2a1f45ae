"""Codes packed into words of 32 bits: compressed-tensors' `pack-quantized`, what servers take."""

import torch

from ..quantizer import Quantized
from ..weight_matrix import is_experts
from . import compressed
from .stored import MAX_PACKED_BITS, EncodedWeight, EncodeSpec

FORMAT = "pack-quantized"
# Bits of a word of packed codes.
_WORD = 32


def fits(spec: EncodeSpec) -> bool:
    """Whether a layer can be packed: an `nn.Linear` or experts of 2 to 8 bits; a table where all have one scheme.

    Tables by themselves cannot: transformers initializes and ties them by the name
    `weight`. Nor can experts in NVFP4, of which transformers 5.23 does not load the
    scale of a whole matrix, nor those in MXFP4 that it would unpack to another dtype
    than bfloat16.
    """
    if not 2 <= spec.bits <= MAX_PACKED_BITS or spec.multiplies_bytes:
        return False
    rows, columns = spec.matrix_shape
    if spec.row_size is not None and columns % spec.row_size:
        return False
    if spec.shared is not None and spec.shared.format != spec.format:
        return False
    if is_experts(spec.kind):
        is_mxfp4 = spec.format == "mxfp4" and spec.dtype == torch.bfloat16
        is_loaded = is_mxfp4 or (spec.format == "int" and spec.grid.symmetric)
        return spec.matrices is not None and is_loaded
    if spec.kind not in ("linear", "embedding"):
        return False
    if spec.shared is None:
        return not spec.is_table
    if spec.is_table and not spec.shared.takes_tables:
        return False
    # compressed-tensors 0.20 cannot read zero points back that are packed into one
    # word.
    return spec.shared.symmetric or rows * spec.bits > _WORD


def write(values: Quantized, spec: EncodeSpec) -> EncodedWeight:
    """Words, scales and packed or plain zero points."""
    return compressed.write(values, spec, FORMAT)


read = compressed.read
