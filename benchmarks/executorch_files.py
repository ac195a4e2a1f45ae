"""The files of `examples/executorch/export.py` against plain transformers, for tiny models and for one that is given.

    python benchmarks/executorch_files.py --python executorch/bin/python --model SmolLM2-135M-Instruct

`--python` is that of the environment which the example describes. Tiny models have random weights, and train for 8
steps; the one of `--model` is rounded without training, which is enough to compare two ways to compute it.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import environment, write

from moq_hf import MoQCallback, quantize_model, save_quantized

ROOT = Path(__file__).parents[1]
TEXT = "Gravity is the force that"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY = {
    "BertForSequenceClassification": {},
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 16},
}


def trained(name: str, folder: Path) -> Path:
    """Train a tiny model of a class with a stock Trainer; where it was delivered."""
    transformers.set_seed(0)
    family = getattr(transformers, name)
    model = family(family.config_class(**SIZES, **TINY[name]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Larger weights, so that answers differ.
            parameter.data *= 3
    texts = torch.randint(SIZES["vocab_size"], (32, 16)).tolist()
    rows = [{"input_ids": text, "labels": text if "CausalLM" in name else sum(text) % 2} for text in texts]
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )
    callbacks = [MoQCallback("executorch")]
    transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
    return folder / "quantized"


def rounded(source: str, folder: Path) -> Path:
    """Round a decoder of the Hub, or of a folder, and deliver it with its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    batch = tokenizer(TEXT, return_tensors="pt")
    save_quantized(quantize_model(model, "executorch").eval(), folder, inputs=dict(batch))
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Write `benchmarks/results/executorch.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "executorch.json")
    args = parser.parse_args()
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folders = {name: trained(name, work / name) for name in TINY}
        words: dict[str, list[str]] = {name: [] for name in folders}
        if args.model is not None:
            name = Path(args.model).name
            folders[name] = rounded(args.model, work / name)
            words[name] = ["--text", TEXT]
        for name, folder in folders.items():
            proof = json.loads((folder / "moq_state.json").read_text(encoding="utf-8"))["proof"]
            script = [args.python, str(ROOT / "examples" / "executorch" / "export.py")]
            found = work / "found.json"
            command = [*script, str(folder), str(work / "model.pte"), *words[name], "--json", str(found)]
            subprocess.run(command, check=True)
            kept = {key: proof[key] for key in ("agrees", "largest_difference", "inputs")}
            models[name] = {"proof": kept, **json.loads(found.read_text(encoding="utf-8"))}
    write({**environment("compressed_tensors"), "models": models}, args.out)


if __name__ == "__main__":
    main()
