"""Codes of 2, 4 or 8 bits and a scale for each row: transformers' own `quant_method: "gemma"`, for any `nn.Linear`.

Names and arithmetic are those of `transformers.integrations.gemma_quant`. Weights stay packed in memory and are
unpacked at each call, even if a model is called in parts. Codes of other bits take the next width. The bytes are
those of compressed-tensors' words, except that codes of 8 bits are signed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import shortened
from ..quantizer import Quantized
from ..seams.transformers import stays_float
from ..weight_spec import DENSE, MAX_PACKED_BITS, WeightSpec
from . import compressed, floats
from .layout import LayoutSpec
from .stored import EncodedWeight, Form, StoredWeight, per_row

_NAME = "gemma"
# What the layout is for, as the error says it.
_LEGAL = (
    'is for nn.Linear and tables of 1 to 8 bits, symmetric, with no more than one scale for a row ("groups", '
    'not "group_size"), and scale_dtype must be the dtype of weights that are not float32; '
    "without it a layout is found for any model"
)


def fits(spec: WeightSpec) -> bool:
    """True if the layer with which transformers would replace a module computes the same."""
    return (
        spec.kind in ("linear", "embedding")
        and not spec.left_alone
        and spec.bits <= MAX_PACKED_BITS
        and spec.grid.symmetric
        and spec.format == "int"
        and spec.grid.shape(*spec.shape)[1] == 1
        and spec.dtype in (torch.float32, spec.scale_dtype)
    )


def write(values: Quantized, spec: WeightSpec) -> EncodedWeight:
    """Encode codes, the lowest bits of a byte first, float32 scales, and scales of a linear layer's inputs and outputs.

    The last are 0 if nothing is rounded.
    """
    width = next(width for width in (2, 4, 8) if spec.width <= width)
    own = replace(spec, pack_bits=width, inputs=None)
    # Scales of 1 make the library pack the codes as they are, even those of a binary row
    # with the scale 0.
    ones = values._replace(scale=torch.ones_like(values.scale))
    words, scheme, _ = compressed.write(ones, own, compressed.PACKED)
    count = -(-spec.shape[1] * width // 8)
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
    """Decode the codes and the scale of each row.

    Raises:
        MoQError: The tensors have another shape.
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


class _Gemma(LayoutSpec):
    def leaves_alone(
        self, model: nn.Module, spec: WeightSpec, layer: nn.Module
    ) -> bool:
        """True for modules that transformers keeps in float32, shared weights, and all but linear layers and tables."""
        return (
            spec.kind not in ("linear", "conv1d", "embedding")
            or bool(spec.tied)
            or stays_float(model, spec.name, layer)
        )

    def takes_inputs(self, spec: WeightSpec) -> bool:
        """True if the inputs of a layer are rounded as `apply_srq` of transformers does."""
        inputs = spec.inputs
        if inputs is None or not inputs.symmetric:
            return False
        return (inputs.bits, inputs.scale) == (8, "static") and fits(spec)

    def misfit(self, placed: Collection[WeightSpec]) -> str | None:
        """Name the layers that would get other weights; None if there are none."""
        unfit = [
            spec.name for spec in placed if spec.stored == DENSE and not spec.left_alone
        ]
        return f"has no place for {shortened(unfit)}: it {_LEGAL}" if unfit else None

    def config(
        self,
        groups: Mapping[str, dict[str, Any]],
        targets: Mapping[str, Sequence[str]],
        ignore: Sequence[str],
        has_tables: bool,
    ) -> dict[str, Any]:
        """The width of most patterns, and the other widths by their patterns."""
        widths = {
            groups[name]["weights"]["num_bits"]: patterns
            for name, patterns in targets.items()
        }
        rest, *others = sorted(widths, key=lambda width: -len(widths[width]))
        return {
            "quant_method": self.method,
            "num_bits": rest,
            "quantize_embeddings": has_tables,
            "module_quant_configs": {
                _searched(pattern): {"num_bits": width}
                for width in others
                for pattern in widths[width]
            },
            "modules_to_not_convert": list(map(_searched, ignore)),
        }


def _searched(pattern: str) -> str:
    """Turn a pattern for `re.match`, or a name, into one for `re.search`."""
    return f"^{pattern.removeprefix('re:').removesuffix('$')}$"


FORM = Form(
    _NAME,
    fits,
    write,
    read,
    stays_packed=True,
    endings={
        ".embedding_quantized": "weight",
        ".embedding_scale": "weight_scale",
    },
)
LAYOUT = _Gemma(
    _NAME,
    forms=(FORM, floats.FORM),
    needs={"transformers": "5.23.0"},
    method=_NAME,
    has_inputs=True,
    is_for_transformers_alone=True,
    stays="the layout gemma has no codes for convolutions, experts, tied tables and modules that transformers keeps in "
    "float32",
)
