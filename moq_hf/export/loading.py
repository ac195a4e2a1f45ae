"""A packed checkpoint as an export needs it: verified, with its model, its tokenizer and its integers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from .. import quantizer
from ..errors import MoQError
from ..model.convert import dequantize_model
from ..model.inventory import is_packed
from ..packed.verification import Verification
from ..packed.verify import stored_weights, verify_quantized
from ..rows import is_experts

_KINDS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification", "Model")
# How a folder says what its pictures are prepared by.
PROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A packed checkpoint that is exported.

    Attributes:
        model: With float weights on their grid, in eval mode.
        tokenizer: The one beside it; None of a model of pictures.
        processor: The file that says how its pictures are prepared, if there is one.
        verified: What `verify_quantized` found.
        weights: The integers of each quantized layer, by its name.
    """

    model: Any
    tokenizer: Any
    processor: Path | None
    verified: Verification
    weights: Mapping[str, quantizer.Quantized]


def load_checkpoint(directory: Path) -> Checkpoint:
    """Verify and load a packed checkpoint.

    Raises:
        MoQError: It is damaged, is of a kind that is not exported, or has no tokenizer.
    """
    verified = verify_quantized(directory)
    model, tokenizer = load_model(directory)
    kinds = nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d
    odd = [
        name
        for name, layer in verified.layers.items()
        if is_experts(layer.kind) or not isinstance(model.get_submodule(name), kinds)
    ]
    if odd:
        raise MoQError(f"{directory}: only nn.Linear, nn.Embedding and convolutions are exported, not {', '.join(odd)}")
    processor = directory / PROCESSOR
    return Checkpoint(model, tokenizer, processor if processor.is_file() else None, verified, stored_weights(directory))


def takes_pictures(model: Any) -> bool:
    """Whether a model's input is pictures."""
    return str(getattr(model, "main_input_name", "")) == "pixel_values"


def load_model(directory: Path) -> tuple[Any, Any]:
    """The model of a packed checkpoint with float weights on their grid, in eval mode, and its tokenizer.

    A model of pictures has none.

    Raises:
        MoQError: It is of a kind that is not exported, or one of texts without a tokenizer.
    """
    config = transformers.AutoConfig.from_pretrained(directory)
    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None or not name.endswith(_KINDS) or "Head" in name or config.is_encoder_decoder:
        raise MoQError(
            f"{directory}: {name} is not exported; classifiers of sequences, tokens and images and base models are "
            "(ForSequenceClassification, ForTokenClassification, ForImageClassification, Model), without a decoder "
            "beside the encoder"
        )
    tokenizer = None if takes_pictures(architecture) else _tokenizer(directory)
    model = architecture.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    if is_packed(model):
        dequantize_model(model)
    model.config.use_cache = False
    return model.float().eval(), tokenizer


def _tokenizer(directory: Path) -> Any:
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
    return tokenizer
