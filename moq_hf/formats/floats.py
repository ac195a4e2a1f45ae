"""Rounded floats: ordinary weights, with the scales and zero points for the checks in `moq_state.json`."""

import base64

import torch
from torch import Tensor

from ..errors import MoQError
from ..quantizer import Quantized, dequantize, float_steps, per_weight
from ..weight_matrix import from_rows, to_rows
from ..weight_spec import DENSE, WeightSpec
from .stored import EncodedWeight, Form, StoredWeight


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode the weight in its own dtype, with its grid as text."""
    weight = from_rows(
        dequantize(*values, dtype=spec.dtype), spec.kind, spec.full_shape
    ).contiguous()
    zero = values.zero_point
    zero_text = None if zero is None else _to_text(zero)
    return EncodedWeight({"weight": weight}, grid=(_to_text(values.scale), zero_text))


def read(stored: StoredWeight) -> Quantized:
    """Find the codes nearest to the floats.

    Raises:
        MoQError: A float is not on the grid.
    """
    layer = stored.layer
    assert layer.grid_text is not None
    scale_text, zero_text = layer.grid_text
    scale = _from_text(scale_text, torch.float32).view(layer.scales)
    zero = None
    if zero_text is not None:
        zero = _from_text(zero_text, torch.int32).view(layer.scales)
    weight = to_rows(stored.parts["weight"], layer.kind)
    low, high = layer.precision.low, layer.precision.high
    codes = weight.float() / per_weight(scale, layer.shape)
    steps: Tensor | float = 1.0
    if layer.precision.is_float:
        steps = float_steps(codes, layer.precision)
    codes = (codes / steps).round().nan_to_num(0.0) * steps
    if zero is not None:
        codes += per_weight(zero, layer.shape)
    codes = codes.clamp(low, high)
    if layer.bits == 1:
        codes = torch.where(weight < 0, -1.0, 1.0)
    values = Quantized(codes.int(), scale, zero)
    off = dequantize(*values, dtype=weight.dtype) != weight
    # Half precision may round a float past the middle between two codes.
    for step in (-1, 1) if weight.dtype != torch.float32 and off.any() else ():
        others = values._replace(codes=(values.codes + step).clamp(low, high))
        off &= dequantize(*others, dtype=weight.dtype) != weight
    if bool(off.any()):
        raise MoQError(
            f"{stored.where}: a weight is not on the grid of {layer.bits} bits"
        )
    return values


def _to_text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _from_text(text: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


# It fits every weight.
FORM = Form(DENSE, lambda spec: True, write, read)
