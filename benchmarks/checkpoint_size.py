"""Bytes on disk of packed checkpoints against float ones, and that they load with the same logits.

    python benchmarks/checkpoint_size.py --model_name_or_path FOLDER

The model (without a folder: random weights of a 6-layer BERT with hidden size 384) and a BERT-base with random weights,
at 8, 4, 3 and 2 bits with 8 row blocks per weight, and with other bits from layer to layer; embedding tables in float
and at 8 bits. Sizes do not depend on the values. Each file is verified, loaded by plain `from_pretrained` and compared.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from classifiers import classifier, config_of
from environment import environment, write
from transformers import BertConfig

from moq_hf import MoQConfig, quantize_model, save_quantized, verify_quantized
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import Inventory

MIXED = (8, 6, 5, 4, 3, 2)


def quantized(model: Any, bits: int | str, embeddings: int | None) -> Any:
    """The model at `bits`; "mixed" gives the blocks those of `MIXED` in turn."""
    start = 8 if bits == "mixed" else bits
    config = MoQConfig.from_dict(
        {
            "quantize_bits": {"start_bits": start, "target_bits": start},
            "quantize_groups": 8,
            "quantize_embeddings": embeddings,
        }
    )
    quantize_model(model, config)
    if bits == "mixed":
        layers = quant_layers(model)
        for index, names in enumerate(Inventory.of(model).blocks(layers).values()):
            for name in names:
                layers[name].set_bits(MIXED[index % len(MIXED)])
                layers[name].refresh()
    return model


def measure(model: Any, bits: int | str, embeddings: int | None, float_bytes: int, folder: Path) -> dict[str, Any]:
    """Save, verify, load and compare; give the sizes."""
    quantized(model, bits, embeddings)
    save_quantized(model, folder)
    found = verify_quantized(folder, model)
    loaded = type(model).from_pretrained(folder).eval()
    ids = torch.arange(1000, 1032)[None] % model.config.vocab_size
    with torch.no_grad():
        equal = torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    linears = [layer for layer in found.layers.values() if layer.kind == "linear"]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in linears)
    declared = sum(layer.shape[0] * layer.shape[1] * layer.bits for layer in linears) / weights
    return {
        "bits": bits,
        "embeddings": embeddings,
        "file_bytes": found.file_bytes,
        "float_file_bytes": float_bytes,
        "ratio": found.file_bytes / float_bytes,
        "declared_bits_per_weight": declared,
        "stored_bits_per_weight": 8 * sum(layer.bytes for layer in linears) / weights,
        "logits_equal": equal,
    }


def main() -> None:
    """Measure, print a line per case and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--base_layers", type=int, default=12, help="layers of the BERT-base")
    parser.add_argument("--base_vocabulary", type=int, default=30522, help="tokens of the BERT-base")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checkpoint_size.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    name = args.model_name_or_path
    models = {
        name or "random MiniLM": config_of(name),
        "random BERT-base": BertConfig(num_hidden_layers=args.base_layers, vocab_size=args.base_vocabulary),
    }
    results = []
    for title, config in models.items():
        for bits in (8, 4, 3, 2, "mixed"):
            for embeddings in (None, 8):
                with tempfile.TemporaryDirectory() as folder:
                    # Loaded from files where there are some: a result must not depend on the case before.
                    model = classifier(name if title == name else None, config)
                    model.save_pretrained(Path(folder, "float"))
                    before = Path(folder, "float", "model.safetensors").stat().st_size
                    result = measure(model, bits, embeddings, before, Path(folder, "packed"))
                results.append({"model": Path(title).name, **result})
                print(
                    f"{results[-1]['model']:20} {bits!s:>5} bits, embeddings {embeddings or 'float'!s:>5}: "
                    f"{result['file_bytes'] / 1e6:8.2f} of {before / 1e6:8.2f} MB = {result['ratio']:.3f}, "
                    f"{result['stored_bits_per_weight']:.3f} bits a weight "
                    f"(+{result['stored_bits_per_weight'] / result['declared_bits_per_weight'] - 1:.2%}), "
                    f"logits {'equal' if result['logits_equal'] else 'DIFFER'}",
                    flush=True,
                )
    write({**environment("compressed_tensors"), "results": results}, args.out)


if __name__ == "__main__":
    main()
