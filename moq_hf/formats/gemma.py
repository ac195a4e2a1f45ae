"""Codes of 2, 4 or 8 bits and a scale for each row: transformers' own `quant_method: "gemma"`, for any `nn.Linear`.

Names and arithmetic are those of `transformers.integrations.gemma_quant`. Weights stay packed in memory and are
unpacked at each call, also where a model is called in parts. Codes of other bits take the next width. The bytes are
those of compressed-tensors' words, but for 8 bits, which are signed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..grid import InputGrid
from ..quantizer import Quantized
from . import compressed, pack_quantized
from .stored import (
    MAX_PACKED_BITS,
    EncodedWeight,
    EncodeSpec,
    StoredWeight,
    per_row,
)

FORMAT = "gemma"

# What fits, for the error.
LEGAL = (
    'is for nn.Linear and tables of 1 to 8 bits, symmetric, with no more than one scale for a row ("quantize_groups", '
    'not "quantize_group_size"), and quantize_algo.scale_dtype must be the dtype of weights that are not float32; '
    "without it a layout is found for any model"
)


def fits(spec: EncodeSpec) -> bool:
    """Whether transformers makes a layer of a module that computes what the module did."""
    return (
        spec.kind in ("linear", "embedding")
        and not spec.in_float
        and spec.bits <= MAX_PACKED_BITS
        and spec.grid.symmetric
        and spec.grid.shape(*spec.matrix_shape)[1] == 1
        and spec.dtype in (torch.float32, spec.scale_dtype)
    )


def takes_inputs(spec: EncodeSpec, inputs: InputGrid) -> bool:
    """Whether the inputs of a layer are rounded as `apply_srq` does it."""
    return fits(spec) and inputs.bits == 8 and inputs.scale == "static"


def write(values: Quantized, spec: EncodeSpec) -> EncodedWeight:
    """Codes, the lowest bits of a byte first, float32 scales, and of a linear layer the scales of in- and outputs.

    Those are 0 where nothing is rounded.
    """
    width = next(width for width in (2, 4, 8) if max(spec.bits, spec.width) <= width)
    own = replace(spec, width=width, inputs=None)
    # The codes themselves: a scale of a binary row may be 0, which nothing divides by.
    ones = values._replace(scale=torch.ones_like(values.scale))
    words, scheme, _ = compressed.write(ones, own, pack_quantized.FORMAT)
    count = -(-spec.matrix_shape[1] * width // 8)
    codes = words["weight_packed"].view(torch.uint8)[:, :count].contiguous()
    if width == 8:
        codes = (codes ^ 128).view(torch.int8)
    scale = per_row(values).scale
    if spec.kind == "embedding":
        parts = {"embedding_quantized": codes, "embedding_scale": scale}
        return EncodedWeight(parts, scheme)
    off = torch.zeros(1, device="cpu")
    inputs = off if spec.input_scale is None else spec.input_scale
    parts = {
        "weight": codes,
        "weight_scale": scale,
        "input_activation_scale": inputs[0].clone(),
        "output_activation_scale": off[0].clone(),
    }
    return EncodedWeight(parts, scheme)


def read(stored: StoredWeight) -> Quantized:
    """The codes and the scale of each row.

    Raises:
        MoQError: The tensors are of another shape.
    """
    weight = stored.parts["weight"]
    codes = weight.view(torch.uint8)
    if weight.dtype == torch.int8:
        codes = codes ^ 128
    scale = stored.parts["weight_scale"]
    words = {
        "weight_packed": F.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32),
        "weight_shape": torch.tensor(stored.layer.shape, device="cpu"),
        "weight_scale": torch.ones_like(scale),
    }
    found = compressed.read(stored._replace(parts=words))
    return found._replace(scale=scale)


def config(
    targets: Mapping[int, Sequence[str]], ignore: Sequence[str], has_tables: bool
) -> dict[str, Any]:
    """The `quantization_config` for `config.json`.

    Args:
        targets: Patterns, or names, of the layers of each width.
        ignore: Those of the modules that stay as they are.
        has_tables: Whether tables have codes.
    """
    # What most patterns would name needs none.
    rest, *others = sorted(targets, key=lambda width: -len(targets[width]))
    return {
        "quant_method": FORMAT,
        "num_bits": rest,
        "quantize_embeddings": has_tables,
        "module_quant_configs": {
            _searched(pattern): {"num_bits": width}
            for width in others
            for pattern in targets[width]
        },
        "modules_to_not_convert": list(map(_searched, ignore)),
    }


def _searched(pattern: str) -> str:
    """Make a pattern for `re.search` of one for `re.match`, or of a name."""
    return f"^{pattern.removeprefix('re:').removesuffix('$')}$"
