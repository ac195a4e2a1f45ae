"""A packed checkpoint as an export needs it: verified, with its model, its tokenizer and its integers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from .. import quantizer
from ..errors import MoQError
from ..model.convert import dequantize_model
from ..model.inventory import is_packed
from ..packed.verification import Verification
from ..packed.verify import stored_weights, verify_quantized
from ..rows import is_experts

_KINDS = ("ForSequenceClassification", "ForTokenClassification", "Model")


@dataclass(frozen=True)
class Checkpoint:
    """A packed checkpoint that is exported.

    Attributes:
        model: With float weights on their grid, in eval mode.
        tokenizer: The one beside it.
        verified: What `verify_quantized` found.
        weights: The integers of each quantized layer, by its name.
    """

    model: Any
    tokenizer: Any
    verified: Verification
    weights: Mapping[str, quantizer.Quantized]


def load_checkpoint(directory: Path) -> Checkpoint:
    """Verify and load a packed checkpoint.

    Raises:
        MoQError: It is damaged, is of a kind that is not exported, or has no tokenizer.
    """
    verified = verify_quantized(directory)
    model, tokenizer = load_model(directory)
    odd = [
        name
        for name, layer in verified.layers.items()
        if is_experts(layer.kind) or not isinstance(model.get_submodule(name), nn.Linear | nn.Embedding)
    ]
    if odd:
        raise MoQError(f"{directory}: only nn.Linear and nn.Embedding are exported, not {', '.join(odd)}")
    return Checkpoint(model, tokenizer, verified, stored_weights(directory))


def load_model(directory: Path) -> tuple[Any, Any]:
    """The model of a packed checkpoint with float weights on their grid, in eval mode, and its tokenizer.

    Raises:
        MoQError: It is of a kind that is not exported, or has no tokenizer.
    """
    config = transformers.AutoConfig.from_pretrained(directory)
    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None or not name.endswith(_KINDS) or "Head" in name or config.is_encoder_decoder:
        raise MoQError(
            f"{directory}: {name} is not exported; classifiers of sequences and tokens and base models are "
            "(ForSequenceClassification, ForTokenClassification, Model), without a decoder beside the encoder"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    # transformers makes one without words of a folder without a vocabulary.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise MoQError(
            f"{directory} has no tokenizer, which the comparison on sentences needs: save it there with "
            "tokenizer.save_pretrained"
        )
    model = architecture.from_pretrained(directory, attn_implementation="eager", dtype="auto")
    if is_packed(model):
        dequantize_model(model)
    model.config.use_cache = False
    return model.float().eval(), tokenizer
