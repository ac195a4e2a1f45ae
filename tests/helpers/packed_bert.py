"""Packed checkpoints of a tiny BERT with the tokenizer of the demo."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repo import ROOT
from transformers import AutoTokenizer

from moq_hf import quantize_model, save_quantized
from moq_hf.model.convert import quant_layers

TOKENIZER = ROOT / "examples" / "demo" / "model"
VALIDATION = ROOT / "examples" / "demo" / "validation.jsonl"
SHAPE = {
    "vocab_size": 1100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def checkpoint(folder: Path, model: Any, config: Mapping[str, Any], bits: list[int] | None = None) -> Path:
    """A packed checkpoint with a tokenizer; `bits` in turn on its layers."""
    quantize_model(model.eval(), config)
    for index, layer in enumerate(quant_layers(model).values()):
        if bits is not None:
            layer.set_bits(bits[index % len(bits)])
    return save_quantized(model, folder, processing_class=AutoTokenizer.from_pretrained(TOKENIZER))


def config_of(**more: Any) -> dict[str, Any]:
    return {"quantize_bits": {"start_bits": 8, "target_bits": 8}, **more}
