"""Sizes of delivered files: `model.safetensors` of encoders with random weights, as float and at 8, 4, 3 and 2 bits.

    python benchmarks/sizes.py

Bytes follow from shapes alone, so no pretrained model is needed, nor a search for scales.
"""

import argparse
import gc
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environment import environment, write
from glue_plans import GROUPS
from transformers import AutoModelForSequenceClassification, BertConfig, MPNetConfig, PreTrainedConfig

from moq_hf import quantize_model, save_quantized

MODELS = {
    "all-MiniLM-L6-v2": BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "BERT-base": BertConfig(),
    "all-mpnet-base-v2": MPNetConfig(),
}
BITS = (8, 4, 3, 2)
PER_CHANNEL = {"quantize_groups": "per_channel"}
# Forms of the plan "base", with tables at 8 bits.
FORMS = {"static asymmetric": 8, "w4a8": 4, "w4a4, both products at 8": 4, "groups of 32, full": 2}


def file_bytes(folder: Path) -> int:
    """Of the weights."""
    return (folder / "model.safetensors").stat().st_size


def delivered(config: PreTrainedConfig, bits: int, tables: int | None, form: Mapping[str, Any] = PER_CHANNEL) -> int:
    """Bytes at these bits, with embedding tables in float or at `tables` bits."""
    model = AutoModelForSequenceClassification.from_config(config)
    recipe = {
        **form,
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_algo": {**form.get("quantize_algo", {}), "scale": "absmax"},
        "quantize_embeddings": tables,
    }
    with tempfile.TemporaryDirectory() as folder:
        found = file_bytes(Path(save_quantized(quantize_model(model, recipe), folder + "/packed")))
    # A model refers to itself, so that it would stay.
    del model
    gc.collect()
    return found


def measure(config: PreTrainedConfig, every: Sequence[int]) -> dict[str, Any]:
    """Bytes of one model, at each of these bits with a scale per channel, and in each of the forms."""
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        found: dict[str, Any] = {"float": file_bytes(Path(folder))}
    for name, tables in (("tables in float", None), ("tables at 8 bits", 8), ("tables at 4 bits", 4)):
        found[name] = {str(bits): delivered(config, bits, tables) for bits in every}
    found["forms"] = {name: delivered(config, bits, 8, GROUPS[name]) for name, bits in FORMS.items() if bits in every}
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
