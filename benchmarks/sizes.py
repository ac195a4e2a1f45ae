"""Sizes of delivered files: `model.safetensors` of two BERTs with random weights, as float and at 8, 4, 3 and 2 bits.

    python benchmarks/sizes.py

Bytes follow from shapes alone, so no pretrained model is needed.
"""

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environment import environment, write
from transformers import BertConfig, BertForSequenceClassification

from moq_hf import quantize_model, save_quantized

MODELS = {
    "all-MiniLM-L6-v2": BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "BERT-base": BertConfig(),
}
BITS = (8, 4, 3, 2)


def file_bytes(folder: Path) -> int:
    """Of the weights."""
    return (folder / "model.safetensors").stat().st_size


def delivered(config: BertConfig, bits: int, tables: int | None) -> int:
    """Bytes at these bits, one scale per channel, with embedding tables in float or at 8 bits."""
    model = BertForSequenceClassification(config)
    recipe = {
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_groups": "per_channel",
        "quantize_embeddings": tables,
    }
    with tempfile.TemporaryDirectory() as folder:
        return file_bytes(Path(save_quantized(quantize_model(model, recipe), folder + "/packed")))


def measure(config: BertConfig, every: Sequence[int]) -> dict[str, Any]:
    """Bytes of one model, at each of these bits."""
    with tempfile.TemporaryDirectory() as folder:
        BertForSequenceClassification(config).save_pretrained(folder)
        found: dict[str, Any] = {"float": file_bytes(Path(folder))}
    for name, tables in (("tables in float", None), ("tables at 8 bits", 8)):
        found[name] = {str(bits): delivered(config, bits, tables) for bits in every}
    return found


def main() -> None:
    """Measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sizes.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=list(BITS))
    args = parser.parse_args()
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    document = {**environment(), "models": {name: measure(MODELS[name], args.bits) for name in args.models}}
    write(document, args.out)
    print(json.dumps(document["models"], indent=1))


if __name__ == "__main__":
    main()
