"""Experts of GPT-OSS in MXFP4 as OpenAI's own checkpoints have them, by `quant_method: "mxfp4"` of transformers.

The bytes are those of compressed-tensors' format, under other names: of a parameter
`[experts, columns, rows]` the codes `_blocks` `[experts, rows, columns / 32, 16]` and the
exponents `_scales` `[experts, rows, columns / 32]`. transformers unpacks them while
loading, to the dtype of the model.
"""

from typing import Any

from ..quantizer import Quantized
from . import compressed, pack_quantized
from .stored import EncodedWeight, EncodeSpec, StoredWeight

FORMAT = "mxfp4"
# What the files call a parameter's tensors: its name, and this.
ENDINGS = {"weight_packed": "_blocks", "weight_scale": "_scales"}
# Nothing but experts has a place; vLLM looks for these names, which are OpenAI's.
CONFIG: dict[str, Any] = {
    "quant_method": FORMAT,
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def fits(spec: EncodeSpec) -> bool:
    """Whether a layer is a parameter of transposed experts in MXFP4."""
    return spec.kind == "experts_t" and spec.format == FORMAT


def write(values: Quantized, spec: EncodeSpec) -> EncodedWeight:
    """Codes and exponents."""
    words, scheme, _ = compressed.write(values, spec, pack_quantized.FORMAT)
    experts, _, rows = spec.shape
    scales = words["weight_scale"].view(experts, rows, -1)
    blocks = words["weight_packed"].view(*scales.shape, -1)
    return EncodedWeight({"weight_packed": blocks, "weight_scale": scales}, scheme)


def read(stored: StoredWeight) -> Quantized:
    """Codes and scales.

    Raises:
        MoQError: The tensors are of another shape.
    """
    rows = {part: tensor.flatten(0, 1) for part, tensor in stored.parts.items()}
    rows["weight_packed"] = rows["weight_packed"].flatten(1)
    return compressed.read(stored._replace(parts=rows))
