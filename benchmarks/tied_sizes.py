"""Bytes on disk of language models whose embedding table is the output head too.

    python benchmarks/tied_sizes.py

Models of the shapes of SmolLM2-135M and Qwen2.5-0.5B with random weights, since sizes do not depend on the values, at 4
bits in groups: tables in float, at 8 and at 4 bits. Each folder is verified as it is saved, loaded by plain
`from_pretrained` and compared. The larger model takes 6 GB of memory. Models of an earlier call stay in the results.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import environment, write

from moq_hf import quantize_model, save_quantized
from moq_hf.packed.verify import recorded

SHAPES: dict[str, tuple[Any, Any, dict[str, int], int]] = {
    "SmolLM2-135M": (
        transformers.LlamaForCausalLM, transformers.LlamaConfig,
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        },
        64,
    ),
    "Qwen2.5-0.5B": (
        transformers.Qwen2ForCausalLM, transformers.Qwen2Config,
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        },
        128,
    ),
}  # fmt: skip


def measure(model: Any, size: int, table: int | None, before: int) -> dict[str, Any]:
    """Save, load and compare; give the sizes."""
    began = time.perf_counter()
    config = {
        "quantize_bits": {"start_bits": 4, "target_bits": 4},
        "quantize_algo": {"scale": "absmax"},
        "quantize_group_size": size,
        "quantize_embeddings": table,
    }
    quantize_model(model, config)
    ids = torch.arange(16)[None]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_quantized(model, folder)
        found = recorded(folder)
        expected = model.eval()(ids).logits
        loaded = type(model).from_pretrained(folder).eval()
        equal = torch.equal(loaded(ids).logits, expected)
    return {
        "bits": 4,
        "group_size": size,
        "table": table,
        "layout": found.state["layout"],
        "file_bytes": found.file_bytes,
        "of_bfloat16": found.file_bytes / before,
        "equal_logits": equal,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Measure each shape and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="which models")
    parser.add_argument("--layers", type=int, help="fewer layers, to try it out")
    parser.add_argument("--vocabulary", type=int, help="fewer words, to try it out")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "tied_sizes.json")
    args = parser.parse_args()
    before = json.loads(args.out.read_text(encoding="utf-8"))["models"] if args.out.exists() else {}
    document: dict[str, Any] = {**environment("compressed_tensors"), "models": before}
    for name in args.shapes:
        cls, config, sizes, size = SHAPES[name]
        sizes = {**sizes, "num_hidden_layers": args.layers or sizes["num_hidden_layers"]}
        sizes["vocab_size"] = args.vocabulary or sizes["vocab_size"]
        torch.manual_seed(0)
        model = cls(config(**sizes, tie_word_embeddings=True))
        count = sum(parameter.numel() for parameter in model.parameters())
        table = model.get_input_embeddings().weight.numel()
        lines = []
        document["models"][name] = {"parameters": count, "table": table, "bfloat16_bytes": 2 * count, "files": lines}
        for bits in (4, 8, None):
            lines.append(measure(model, size, bits, 2 * count))
            print(name, lines[-1], flush=True)
            write(document, args.out)
            gc.collect()


if __name__ == "__main__":
    main()
