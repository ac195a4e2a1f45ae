"""Codes packed into words of 32 bits: compressed-tensors' `pack-quantized`, which servers take."""

import torch

from ..quantizer import Quantized
from ..weight_matrix import is_experts
from ..weight_spec import MAX_PACKED_BITS, WeightSpec
from . import compressed
from .stored import EncodedWeight, Form

# Bits of a word.
_WORD = 32


def fits(spec: WeightSpec) -> bool:
    """True if a layer can be packed."""
    return misfit(spec) is None


def misfit(spec: WeightSpec) -> str | None:
    """Why a layer cannot be packed, in words; None if it can.

    >>> misfit(WeightSpec("linear", (8, 8), 1)), misfit(WeightSpec("linear", (8, 8), 2))
    ('2 bits are the fewest that are packed', None)
    """
    rows, columns = spec.shape
    shared = spec.shared
    in_matrices = is_experts(spec.kind)
    is_bfloat16 = spec.dtype == torch.bfloat16
    faults = {
        "2 bits are the fewest that are packed": spec.bits < 2,
        f"{MAX_PACKED_BITS} bits are the most that are packed": spec.bits
        > MAX_PACKED_BITS,
        "convolutions are integers only in the ONNX export": spec.kind == "conv",
        "Conv1D layers, as GPT-2 has them, are not packed": spec.kind == "conv1d",
        "transposed experts are not packed": spec.kind == "experts_t",
        "experts are packed only if all have one format, and the files a matrix for each": in_matrices
        and spec.matrices is None,
        # transformers 5.23 does not load the scale of a whole matrix, and would unpack
        # MXFP4 to another dtype.
        "experts are not packed in nvfp4": in_matrices and spec.format == "nvfp4",
        "experts in mxfp4 are packed only in bfloat16": in_matrices
        and spec.format == "mxfp4"
        and not is_bfloat16,
        "experts are packed only with symmetric grids": in_matrices
        and not spec.grid.symmetric,
        "their rows are not whole groups": bool(
            spec.row_size is not None and columns % spec.row_size
        ),
        "they are multiplied as bytes": spec.multiplies_bytes,
        # transformers initializes and ties tables by the name `weight`.
        "tables are packed only if all layers have one scheme": spec.is_table
        and shared is None,
        "packed, they would take all other layers to their bits": spec.is_table
        and shared is not None
        and not shared.takes_tables,
        "layers that are unpacked while loading must have one format": shared
        is not None
        and shared.format != spec.format,
        # compressed-tensors 0.20 cannot read back zero points that are packed into one
        # word.
        "their zero points are too few to be packed": shared is not None
        and not shared.symmetric
        and rows * spec.bits <= _WORD,
    }
    return next((why for why, holds in faults.items() if holds), None)


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode words, scales and packed or plain zero points."""
    return compressed.write(values, spec, compressed.PACKED)


FORM = Form("packed", fits, write, compressed.read, stays_packed=True)
