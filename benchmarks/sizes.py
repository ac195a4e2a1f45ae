"""Sizes of delivered files: `model.safetensors` of three encoders and a language model, in float and quantized.

    python benchmarks/sizes.py

Bytes follow from shapes alone, so weights are random. `forms` are those of docs/results/rounded-inputs.md: tables of
encoders have 8 bits as in presets, 4, or are in float as those whose scores were measured; that of the language model
is in float. Models that are not named keep what the file says of them.
"""

import argparse
import gc
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import environment, write
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, LlamaConfig, MPNetConfig

from moq_hf import quantize_model, save_quantized

MODELS = {
    "all-MiniLM-L6-v2": BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "BERT-base": BertConfig(),
    "all-mpnet-base-v2": MPNetConfig(vocab_size=30527, max_position_embeddings=514, num_labels=1),
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}
BITS = (8, 4, 3, 2)
# Those with one scale per channel at all of these bits.
PER_CHANNEL = ("all-MiniLM-L6-v2", "BERT-base")
# More forms of some models, by name: keywords of `quantize_model`.
FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "all-MiniLM-L6-v2": {f"{bits} bits, tables at 4 bits": {"bits": bits, "embeddings": 4} for bits in (4, 2)},
    "all-mpnet-base-v2": {
        "w8a8": {"config": "w8a8"},
        "w8a8, symmetric": {"config": "w8a8", "activations": {"symmetric": True}},
        "w4a8": {"config": "w4a8"},
        "w4a4": {"config": "w4a4"},
        **{f"{bits} bits, groups of 32": {"bits": bits, "group_size": 32} for bits in (4, 3, 2)},
        "w8a8, tables in float": {"config": "w8a8", "embeddings": None},
        "w8a8, symmetric, tables in float": {
            "config": "w8a8",
            "activations": {"symmetric": True},
            "embeddings": None,
        },
        "2 bits, groups of 32, tables in float": {"bits": 2, "group_size": 32, "embeddings": None},
    },
    "SmolLM2-135M": {
        f"{bits} bits, groups of 32": {"bits": bits, "group_size": 32, "embeddings": None} for bits in (4, 3, 2)
    },
}


def file_bytes(folder: Path) -> int:
    """Of the weights."""
    return (folder / "model.safetensors").stat().st_size


def new_model(config: Any) -> Any:
    """A model of random weights, with the head that the tables' figures are of."""
    kind = AutoModelForCausalLM if isinstance(config, LlamaConfig) else AutoModelForSequenceClassification
    return kind.from_config(config).eval()


def delivered(config: Any, keywords: Mapping[str, Any]) -> int:
    """Bytes of a model in the form that these keywords of `quantize_model` give it."""
    # A quantized model refers to itself.
    gc.collect()
    model = quantize_model(new_model(config), **keywords)
    with tempfile.TemporaryDirectory() as folder:
        return file_bytes(Path(save_quantized(model, folder + "/packed")))


def per_channel(bits: int, tables: int | None) -> dict[str, Any]:
    """One scale per channel at these bits, with embedding tables in float or at 8 bits."""
    return {
        "config": {
            "quantize_bits": {"start_bits": bits, "target_bits": bits},
            "quantize_groups": "per_channel",
            "quantize_embeddings": tables,
        }
    }


def measure(name: str, every: Sequence[int]) -> dict[str, Any]:
    """Bytes of one model, at each of these bits and in its other forms."""
    config = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        new_model(config).save_pretrained(folder)
        found: dict[str, Any] = {"float": file_bytes(Path(folder))}
    if name in PER_CHANNEL:
        for tables, bits_of_tables in (("tables in float", None), ("tables at 8 bits", 8)):
            found[tables] = {str(bits): delivered(config, per_channel(bits, bits_of_tables)) for bits in every}
    for form, keywords in FORMS.get(name, {}).items():
        # Static ranges are learned from these.
        is_static = keywords.get("config") == "w8a8"
        batches = [{"input_ids": torch.randint(5, config.vocab_size, (2, 16))} for _ in range(2)] if is_static else None
        found.setdefault("forms", {})[form] = delivered(config, {**keywords, "inputs": batches})
        print(f"{name}, {form}: {found['forms'][form]}", flush=True)
    return found


def main() -> None:
    """Measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sizes.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=list(BITS))
    args = parser.parse_args()
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    models = json.loads(args.out.read_text(encoding="utf-8"))["models"] if args.out.exists() else {}
    for name in args.models:
        models[name] = measure(name, args.bits)
    write({**environment(), "models": models}, args.out)
    print(json.dumps(models, indent=1))


if __name__ == "__main__":
    main()
