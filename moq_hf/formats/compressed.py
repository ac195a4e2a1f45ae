"""Writes and reads the forms of compressed-tensors, with that library's own compressors."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import FP4, FP8, InputGrid
from ..quantizer import Quantized, dequantize, per_weight
from ..seams.transformers import compress, decompress
from ..weight_spec import WeightSpec
from .stored import EncodedWeight, StoredWeight

# Codes are packed into words of 32 bits, or two floats into a byte.
PACKED = "pack-quantized"
# A float of 8 bits for each weight.
FLOATS = "float-quantized"


def write(values: Quantized, spec: WeightSpec, format: str) -> EncodedWeight:
    """Encode a weight in a format of compressed-tensors: its tensors, and the config group that describes them.

    The library's grid is (code - zero) * scale with codes from -2^(bits-1), so zero
    points are shifted accordingly.

    | grid | strategy | zero point |
    | --- | --- | --- |
    | symmetric, per channel or row blocks | channel, with the scale of a block repeated for its rows | none |
    | symmetric, a scale per group in a row | group | none |
    | asymmetric | block of a row's weights, the scale of a block of rows repeated | int8, one per scale |
    | asymmetric, unpacked while loading | channel or group | packed |
    | MXFP4, packed | group, its exponent in a byte | none |
    | NVFP4, packed | tensor_group, scales in E4M3, to be divided by that of the whole tensor | none |
    | FP8 | channel | none |

    Servers take channel and group.
    """
    rows, columns = values.codes.shape
    groups = values.scale.shape[1]
    fp4 = FP4.get(spec.format) if format == PACKED else None
    size = spec.row_size
    symmetric = values.zero_point is None
    if spec.shared is not None:
        symmetric = spec.shared.symmetric
    args: dict[str, Any] = {
        # The codes of floats are integers, which fit a byte.
        "num_bits": 8 if spec.format != "int" and fp4 is None else spec.width,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "strategy": "channel",
    }
    if not symmetric and spec.shared is None:
        args |= {"strategy": "block", "block_structure": [1, columns // groups]}
    elif size is not None:
        args |= {"strategy": "group", "group_size": size}
        # The shared scheme may have more groups than the layer has scales.
        groups = columns // size
    # Neither servers nor, with zero points, compressed-tensors 0.18 know scales for
    # blocks of rows.
    scale = per_weight(values.scale, (rows, groups))
    # The library's compressors take floats, and divide them by the scales.
    parts = {
        "weight": dequantize(*values),
        "weight_scale": scale.to(spec.scale_dtype),
    }
    if not symmetric:
        zero = torch.zeros_like(scale)
        if values.zero_point is not None:
            half = 2 ** (spec.width - 1)
            zero = per_weight(values.zero_point, (rows, groups)) - half
        parts["weight_zero_point"] = zero.to(torch.int8)
    own = FP8 if format == FLOATS else fp4
    if own is not None:
        args |= {"type": "float", "strategy": own.strategy}
        parts |= _float_scales(scale * own.unit, spec)
    if fp4 is not None:
        format = f"{spec.format}-{format}"
        args["scale_dtype"] = fp4.scale_dtype
    scheme = {"weights": args, "format": format}
    if spec.matrices is not None:
        return EncodedWeight(_compress_matrices(parts, scheme, spec.matrices), scheme)
    parts = compress(parts, scheme)
    if spec.inputs is not None:
        scheme["input_activations"] = _input_args(spec.inputs)
        if spec.input_scale is not None:
            parts["input_scale"] = spec.input_scale
        if spec.input_zero_point is not None:
            parts["input_zero_point"] = spec.input_zero_point
    return EncodedWeight(parts, scheme)


def _float_scales(scale: Tensor, spec: WeightSpec) -> dict[str, Tensor]:
    if spec.format == "fp8":
        return {"weight_scale": scale.to(spec.scale_dtype)}
    parts = {"weight_scale": scale}
    if spec.format == "nvfp4":
        whole = FP4["nvfp4"].unit / 2
        parts["weight_global_scale"] = torch.tensor([whole], device="cpu")
    return parts


def _input_args(inputs: InputGrid) -> dict[str, Any]:
    is_static = inputs.scale == "static"
    return {
        "num_bits": inputs.bits,
        "type": "int" if inputs.format == "int" else "float",
        "symmetric": inputs.symmetric,
        "strategy": "tensor" if is_static else "token",
        "dynamic": not is_static,
    }


def _compress_matrices(
    parts: dict[str, Tensor], scheme: dict[str, Any], names: tuple[str, ...]
) -> dict[str, Tensor]:
    matrices: dict[str, Tensor] = {}
    chunks = {part: tensor.chunk(len(names)) for part, tensor in parts.items()}
    for index, name in enumerate(names):
        piece = {part: chunk[index].clone() for part, chunk in chunks.items()}
        for part, tensor in compress(piece, scheme).items():
            matrices[f"{name}.{part}"] = tensor
    return matrices


def read(stored: StoredWeight) -> Quantized:
    """Decode codes, scale and zero point, as from `quantizer.quantize`.

    Raises:
        MoQError: The tensors have another shape.
    """
    assert stored.scheme is not None
    parts = stored.parts
    shape = stored.layer.shape
    width = stored.scheme["weights"]["num_bits"]
    is_float = stored.scheme["weights"]["type"] == "float"
    fp4 = FP4.get(stored.layer.format) if is_float else None
    if "weight_packed" in parts:
        # Words have 32 bits; codes that are floats are packed in bytes.
        packed = parts["weight_packed"]
        words = [shape[0], math.ceil(shape[1] * width / (8 * packed.itemsize))]
        declared = [*shape] if fp4 else parts["weight_shape"].tolist()
        if [*packed.shape] != words or declared != [*shape]:
            raise MoQError(
                f"{stored.where}: the packed codes do not belong to a weight {[*shape]} at {width} bits"
            )
    if fp4 is None:
        parts = {**parts, "weight_scale": parts["weight_scale"].float()}
    tensors = decompress(parts, stored.scheme)
    unit = (fp4 or FP8).unit if is_float else 1.0
    scale = tensors["weight_scale"].float() / unit
    zero = tensors.get("weight_zero_point")
    codes = (tensors["weight"] / per_weight(scale, shape)).round().int()
    # A table that took the groups of the linear layers repeats its scales.
    once = slice(None, None, scale.shape[1] // stored.layer.scales[1])
    if stored.layer.symmetric or zero is None:
        return Quantized(codes, scale[:, once], None)
    zero = zero.int() + 2 ** (width - 1)
    codes += per_weight(zero, shape)
    return Quantized(codes, scale[:, once], zero[:, once])
