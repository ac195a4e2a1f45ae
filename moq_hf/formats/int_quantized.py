"""A byte for each weight: compressed-tensors' `int-quantized`, of embedding tables and of layers with int8 inputs.

transformers initializes tables, and ties weights, by the name `weight`, which the codes
keep. Modules that are tied to the table have the same codes, which are stored once, and
scales of their own.
"""

from ..quantizer import Quantized
from . import compressed
from .stored import MAX_PACKED_BITS, EncodedWeight, EncodeSpec

FORMAT = "int-quantized"
WIDTH = 8


def fits(spec: EncodeSpec) -> bool:
    """Whether a layer is a table of 2 to 8 bits, or one whose inputs are rounded to 8 bits as its weight is."""
    return (
        (spec.is_table or spec.multiplies_bytes)
        and 2 <= spec.bits <= MAX_PACKED_BITS
        and spec.kind in ("linear", "embedding")
    )


def write(values: Quantized, spec: EncodeSpec) -> EncodedWeight:
    """Codes in int8, scales and zero points."""
    return compressed.write(values, spec, FORMAT)


read = compressed.read
