"""A float of 8 bits for each weight: compressed-tensors' `float-quantized`, with E4M3 codes and a scale for each row.

As in `int_quantized`, codes keep the name `weight`.
"""

from ..quantizer import Quantized
from ..weight_matrix import is_experts
from ..weight_spec import WeightSpec
from . import compressed
from .stored import EncodedWeight, Form


def fits(spec: WeightSpec) -> bool:
    """True for FP8 weights if the files have a place for experts, and layers unpacked while loading are all FP8."""
    has_place = spec.kind in ("linear", "embedding")
    if is_experts(spec.kind):
        has_place = spec.matrices is not None
    is_shared = spec.shared is None or spec.shared.format == spec.format
    return spec.format == "fp8" and has_place and is_shared


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode codes in float8_e4m3fn, and scales."""
    return compressed.write(values, spec, compressed.FLOATS)


# Its codes never fit the other forms, so it comes before them.
FORM = Form("float8", fits, write, compressed.read)
