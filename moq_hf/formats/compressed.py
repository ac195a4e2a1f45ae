"""What the forms of compressed-tensors share: its own compressor writes them and reads them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import InputGrid
from ..quantizer import Quantized, dequantize
from ..seams.transformers import compress, decompress
from .stored import EncodedWeight, EncodeSpec, StoredWeight, per_weight


def write(values: Quantized, spec: EncodeSpec, format: str) -> EncodedWeight:
    """The tensors of a weight in a format of compressed-tensors, and the config group that describes them.

    The library's grid is (code - zero) * scale with codes from -2^(bits-1), so zero
    points are shifted by that.

    | grid | strategy | zero point |
    | --- | --- | --- |
    | symmetric, per channel or row blocks | channel, the scale of a block repeated for each of its rows | none |
    | symmetric, a scale per group in a row | group | none |
    | asymmetric | block of a row's weights, the scale of a block of rows repeated | int8, one per scale |
    | asymmetric, unpacked while loading | channel or group | packed |

    Channel and group are what servers take.
    """
    rows, columns = values.codes.shape
    scale = values.scale
    zero = values.zero_point
    size = spec.row_size
    half = 2 ** (spec.width - 1)
    symmetric = zero is None if spec.shared is None else spec.shared.symmetric
    args: dict[str, Any] = {
        "num_bits": spec.width,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
    }
    # Servers know a scale for each channel or group, none for a block of rows; nor does
    # compressed-tensors 0.18 where there are zero points.
    repeats = rows // len(scale)
    scale = scale.repeat_interleave(repeats, 0)
    zero = None if zero is None else zero.repeat_interleave(repeats, 0)
    if symmetric or spec.shared is not None:
        args["strategy"] = "channel"
        if size is not None:
            args |= {"strategy": "group", "group_size": size}
            # A layer may have fewer scales than the scheme that it takes has groups.
            repeats = columns // size // scale.shape[1]
            scale = scale.repeat_interleave(repeats, 1)
            zero = None if zero is None else zero.repeat_interleave(repeats, 1)
    else:
        args["strategy"] = "block"
        args["block_structure"] = [1, columns // scale.shape[1]]
    # The library's compressors take floats on the grid, and divide them by the scales
    # again.
    parts = {
        "weight": dequantize(*values),
        "weight_scale": scale.to(spec.scale_dtype).contiguous(),
    }
    if not symmetric:
        shifted = torch.zeros_like(scale) if zero is None else zero - half
        parts["weight_zero_point"] = shifted.to(torch.int8).contiguous()
    scheme = {"weights": args, "format": format}
    if spec.inputs is not None:
        scheme["input_activations"] = _inputs_in_words(spec.inputs)
        parts = compress(parts, {"weights": args, "format": format})
        if spec.input_scale is not None:
            parts["input_scale"] = spec.input_scale
        return EncodedWeight(parts, scheme)
    if spec.matrices is None:
        return EncodedWeight(compress(parts, scheme), scheme)
    matrices: dict[str, Tensor] = {}
    count = rows // len(spec.matrices)
    for index, name in enumerate(spec.matrices):
        matrix = slice(index * count, (index + 1) * count)
        piece = {part: tensor[matrix].clone() for part, tensor in parts.items()}
        for part, tensor in compress(piece, scheme).items():
            matrices[f"{name}.{part}"] = tensor
    return EncodedWeight(matrices, scheme)


def _inputs_in_words(inputs: InputGrid) -> dict[str, Any]:
    is_static = inputs.scale == "static"
    return {
        "num_bits": inputs.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor" if is_static else "token",
        "dynamic": not is_static,
    }


def read(stored: StoredWeight) -> Quantized:
    """Codes, scale and zero point, as `quantizer.quantize` gives them.

    Raises:
        MoQError: The tensors are of another shape.
    """
    pieces = [_read_piece(stored, parts) for parts in stored.pieces.values()]
    codes, scales, zeros = zip(*pieces, strict=True)
    zero = None if zeros[0] is None else torch.cat(zeros)
    return Quantized(torch.cat(codes), torch.cat(scales), zero)


def _read_piece(stored: StoredWeight, parts: Mapping[str, Tensor]) -> Quantized:
    assert stored.scheme is not None
    rows, columns = stored.layer.shape
    shape = (rows // len(stored.pieces), columns)
    width = stored.scheme["weights"]["num_bits"]
    if "weight_packed" in parts:
        words = [shape[0], math.ceil(shape[1] * width / 32)]
        packed_shape = list(parts["weight_packed"].shape)
        if packed_shape != words or parts["weight_shape"].tolist() != [*shape]:
            raise MoQError(
                f"{stored.where}: the packed codes are not those of a weight {[*shape]} at {width} bits"
            )
    float_scale = parts["weight_scale"].float()
    tensors = decompress({**parts, "weight_scale": float_scale}, stored.scheme)
    scale = tensors["weight_scale"]
    zero = tensors.get("weight_zero_point")
    codes = (tensors["weight"] / per_weight(scale, shape)).round().int()
    # A table that was given the groups of the linear layers has each scale several
    # times.
    once = slice(None, None, scale.shape[1] // stored.layer.scales[1])
    if stored.layer.symmetric or zero is None:
        return Quantized(codes, scale[:, once], None)
    zero = zero.int() + 2 ** (width - 1)
    codes += per_weight(zero, shape)
    return Quantized(codes, scale[:, once], zero[:, once])
