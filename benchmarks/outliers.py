"""A classifier whose activations break when they are rounded after training: rounded, and trained with rounding.

    python benchmarks/outliers.py --tokenizer FOLDER --data GLUE

GLUE is a folder with `sst2`, which has train.jsonl and validation.jsonl. A small DeBERTa is trained from scratch. Then
one channel of each value projection is multiplied by a factor, and what reads it is divided by the same: the answers
stay, and the channel stands out as some do in large pretrained models. Scored are ONNX files: float, ONNX Runtime's
`quantize_dynamic` of it, and `moq-hf export --flavors int8` of a model that was trained for one more epoch at 8 bits,
with static scales of activations and the float model as its teacher. Each line is one seed and factor.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import elsewhere  # noqa: F401 - scripts/
import torch
from deploy import RESULTS, quantize_dynamic
from lines import Lines
from run_glue_moq import load_metric
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    TrainingArguments,
    set_seed,
)

from moq_hf import MoQTrainer, quantize_model, save_quantized
from moq_hf.export.onnx import export_onnx, onnx_runtime

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
    "position_biased_input": False,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 32,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
CHANNEL = 3
EIGHT_BITS = {"quantize_bits": {"target_bits": 8}}


def train(args: argparse.Namespace, model: Any, rows: list[dict[str, Any]], seed: int, out: Path, **more: Any) -> Any:
    """The trained model."""
    is_float = "moq_config" not in more
    trainer = MoQTrainer(
        model,
        TrainingArguments(
            str(out),
            seed=seed,
            learning_rate=5e-4 if is_float else 2e-4,
            num_train_epochs=2 if is_float else 1,
            warmup_steps=50,
            per_device_train_batch_size=32,
            train_sampling_strategy="group_by_length",
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        DataCollatorWithPadding(args.tokenizer),
        rows,
        processing_class=args.tokenizer,
        **more,
    )
    trainer.train()
    return trainer.model


def scale_channel(model: Any, factor: float) -> None:
    """Make a channel of each value projection so many times as large, and change no answer."""
    with torch.no_grad():
        for layer in model.deberta.encoder.layer:
            values, reader = layer.attention.self.value_proj, layer.attention.output.dense
            values.weight[CHANNEL] *= factor
            values.bias[CHANNEL] *= factor
            reader.weight[:, CHANNEL] /= factor


def accuracy(args: argparse.Namespace, file: Path, rows: list[dict[str, Any]]) -> float:
    """Of an ONNX file, in percent."""
    run = onnx_runtime(file, 1)
    collate = DataCollatorWithPadding(args.tokenizer)
    said: list[int] = []
    for start in range(0, len(rows), 64):
        batch = dict(collate(rows[start : start + 64]))
        del batch["labels"]
        said += run(batch).argmax(-1).tolist()
    labels = [row["labels"] for row in rows]
    return 100 * float(load_metric("sst2").compute(predictions=said, references=labels)["accuracy"])


def measure(args: argparse.Namespace, seed: int, factor: float, place: Path) -> dict[str, float]:
    """The scores of all files of a seed and a factor."""
    rows = {}
    for split in ("train", "validation"):
        lines = (args.data / "sst2" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        examples = [json.loads(line) for line in lines]
        encoded = args.tokenizer([example["sentence"] for example in examples], truncation=True)
        rows[split] = [
            {**{name: encoded[name][row] for name in encoded}, "labels": example["label"]}
            for row, example in enumerate(examples)
        ]
    source = place / f"float-{seed}"
    if not source.exists():
        set_seed(seed)
        config = DebertaV2Config(vocab_size=args.tokenizer.vocab_size, num_labels=2, **SIZES)
        trained = train(args, DebertaV2ForSequenceClassification(config), rows["train"], seed, place / "run")
        trained.save_pretrained(source)
    model = DebertaV2ForSequenceClassification.from_pretrained(source)
    scale_channel(model, factor)
    model.save_pretrained(place / "scaled")

    # The float file has weights of 8 bits, which cost nothing here: what breaks are activations.
    quantize_model(model, EIGHT_BITS)
    save_quantized(model, place / "rounded", processing_class=args.tokenizer)
    files = {name: place / name for name in ("float", "int8")}
    for folder in files.values():
        shutil.rmtree(folder, ignore_errors=True)
    export_onnx(place / "rounded", files["float"], flavors=["float"])
    exported = files["float"] / "model_float.onnx"
    quantize_dynamic(exported, place / "dynamic.onnx")

    model = DebertaV2ForSequenceClassification.from_pretrained(place / "scaled")
    config = {
        **EIGHT_BITS,
        "activation_quantization": {"enabled": True, "scale": "static"},
        "distillation": {"teacher": str(place / "scaled")},
    }
    train(args, model, rows["train"], seed, place / "run", moq_config=config)
    export_onnx(place / "run" / "quantized", files["int8"], flavors=["int8"])
    scored = {
        "float": exported,
        "quantize_dynamic": place / "dynamic.onnx",
        "moq_hf": files["int8"] / "model_int8.onnx",
    }
    return {name: accuracy(args, file, rows["validation"]) for name, file in scored.items()}


def main() -> None:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 300, 3000])
    parser.add_argument("--out", type=Path, default=RESULTS / "outliers.jsonl")
    args = parser.parse_args()
    args.tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, model_max_length=64)
    torch.set_num_threads(1)
    lines = Lines(args.out)
    with tempfile.TemporaryDirectory() as place:
        for seed in args.seeds:
            for factor in args.factors:
                key = {"seed": seed, "factor": factor}
                if not lines.has(**key):
                    lines.add(key | measure(args, seed, factor, Path(place)))


if __name__ == "__main__":
    main()
