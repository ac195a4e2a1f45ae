"""Experts of GPT-OSS in MXFP4, as in OpenAI's own checkpoints, with `quant_method: "mxfp4"` of transformers.

The bytes are those of compressed-tensors' format under other names: a parameter
`[experts, columns, rows]` has its codes in `_blocks` `[experts, rows, columns / 32, 16]`
and its exponents in `_scales` `[experts, rows, columns / 32]`. transformers unpacks them while
loading, to the dtype of the model.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..quantizer import Quantized
from ..weight_spec import WeightSpec
from . import compressed, floats
from .layout import LayoutSpec
from .stored import EncodedWeight, Form, StoredWeight

_NAME = "mxfp4"


def fits(spec: WeightSpec) -> bool:
    """True for parameters of transposed experts in MXFP4."""
    return spec.kind == "experts_t" and spec.format == _NAME


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode codes and exponents."""
    words, scheme, _ = compressed.write(values, spec, compressed.PACKED)
    experts, _, rows = spec.full_shape
    scales = words["weight_scale"].view(experts, rows, -1)
    blocks = words["weight_packed"].view(*scales.shape, -1)
    return EncodedWeight({"blocks": blocks, "scales": scales}, scheme)


def read(stored: StoredWeight) -> Quantized:
    """Decode codes and scales.

    Raises:
        MoQError: The tensors have another shape.
    """
    rows = {part: tensor.flatten(0, 1) for part, tensor in stored.parts.items()}
    rows["weight_packed"] = rows["weight_packed"].flatten(1)
    return compressed.read(stored._replace(parts=rows))


class _Mxfp4(LayoutSpec):
    def comes_first(self, model_type: str, specs: Collection[WeightSpec]) -> bool:
        """True for GPT-OSS with experts in MXFP4."""
        return model_type == "gpt_oss" and any(map(fits, specs))

    def misfit(self, placed: Collection[WeightSpec]) -> str | None:
        """Say why a model does not fit; None if it does."""
        if any(spec.stored == _NAME for spec in placed):
            return None
        return "is that of GPT-OSS, whose experts must be in MXFP4 (format); without it a layout is found for any model"

    def config(
        self,
        groups: Mapping[str, dict[str, Any]],
        targets: Mapping[str, Sequence[str]],
        ignore: Sequence[str],
        has_tables: bool,
    ) -> dict[str, Any]:
        """Exclude everything but experts, by OpenAI's names, for which vLLM looks."""
        return {
            "quant_method": self.method,
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }


FORM = Form(
    _NAME,
    fits,
    write,
    read,
    endings={"_blocks": "weight_packed", "_scales": "weight_scale"},
)
LAYOUT = _Mxfp4(
    _NAME,
    forms=(FORM, floats.FORM),
    needs={"transformers": "5.23.0"},
    method=_NAME,
    stays="the layout mxfp4 has codes for experts alone",
    delivered="as OpenAI's own checkpoints are",
)
