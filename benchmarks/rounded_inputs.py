"""What rounding an encoder's inputs costs without training: the cosine of its embeddings to float's; JSON.

    python benchmarks/rounded_inputs.py --model all-mpnet-base-v2 --train_file stsb/train.jsonl \
      --validation_file stsb/validation.jsonl

Ranges are learned from sentences of the first file, in batches of 16, and embeddings are means over the tokens of
sentences of the second.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from environment import environment, write
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from moq_hf import quantize_model

RESULT = Path(__file__).parent / "results" / "rounded_inputs.json"
SENTENCES = 64
FOUR: dict[str, Any] = {"bits": 4, "group_size": 32}
NARROW = {"bits": 4, "scale": "per_token"}
# The first products of MPNet's feed-forward parts.
FIRST = {"overrides": {"*.intermediate.dense": {"activations": 8}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "8 bits, inputs in float": {"bits": 8},
    "8 bits, static": {"bits": 8, "activations": 8},
    **{
        f"8 bits, static, percentile {share}": {"bits": 8, "activations": {"percentile": share}}
        for share in (99.9, 99.99)
    },
    "8 bits, static, asymmetric": {"bits": 8, "activations": {"symmetric": False}},
    **{
        f"8 bits, static, asymmetric, percentile {share}, window": {
            "bits": 8,
            "activations": {"symmetric": False, "percentile": share, "window": 1000},
        }
        for share in (99.9, 99.98, 99.99, 99.995, 100)
    },
    "8 bits, per_token": {"bits": 8, "activations": {"scale": "per_token"}},
    "4 bits in groups of 32, inputs in float": FOUR,
    "4 bits in groups of 32, 8 bits per_token": {**FOUR, "activations": {"scale": "per_token"}},
    "4 bits in groups of 32, 4 bits per_token": {**FOUR, "activations": NARROW},
    "the same, second products at 8": {**FOUR, "activations": {**NARROW, "wide_bits": 8}},
    "the same, first products at 8": {**FOUR, "activations": NARROW, **FIRST},
    "the same, both products at 8": {**FOUR, "activations": {**NARROW, "wide_bits": 8}, **FIRST},
}


def batches_of(file: Path, tokenizer: Any) -> list[dict[str, Tensor]]:
    """The first sentences of a file of JSON lines with `sentence1`."""
    with file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["sentence1"] for line, _ in zip(lines, range(SENTENCES), strict=False)]
    starts = range(0, len(texts), 16)
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    return [dict(tokenizer(texts[start : start + 16], **options)) for start in starts]


def embeddings(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """Vectors of length 1, `[sentences, features]`."""
    found = []
    with torch.inference_mode():
        for batch in batches:
            states = model(**batch).last_hidden_state
            kept = batch["attention_mask"][..., None]
            found.append(torch.nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1))
    return torch.cat(found)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train_file", required=True, type=Path)
    parser.add_argument("--validation_file", required=True, type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    examples, others = batches_of(args.train_file, tokenizer), batches_of(args.validation_file, tokenizer)
    expected = embeddings(AutoModel.from_pretrained(args.model).eval(), others)
    cosines = {}
    for name, config in CONFIGS.items():
        model = AutoModel.from_pretrained(args.model).eval()
        is_static = "static" in name
        quantize_model(model, config, embeddings=None, inputs=examples if is_static else None)
        cosines[name] = round(float((embeddings(model, others) * expected).sum(-1).mean()), 4)
        print(f"{name}: {cosines[name]}", flush=True)
    write({"sentences": SENTENCES, "cosines": cosines, **environment()}, args.out)


if __name__ == "__main__":
    main()
