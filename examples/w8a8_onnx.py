"""Fine-tunes a classifier for int8 arithmetic (W8A8), and exports it to ONNX.

    pip install '.[glue,onnx]'
    python examples/w8a8_onnx.py --model sentence-transformers/all-MiniLM-L6-v2
    python examples/w8a8_onnx.py --small

The last line downloads nothing: it trains a tiny BERT on the sentences of examples/demo, in under a minute on a CPU.
"""

import argparse
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from moq_hf import MoQCallback
from moq_hf.export.compare import Data
from moq_hf.export.onnx import export_onnx

DEMO = Path(__file__).parent / "demo"


def accuracy(answers: Any) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((answers.predictions.argmax(-1) == answers.label_ids).mean())}


def main() -> None:
    """Train, export, and compare the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/w8a8"))
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--rows", type=int, default=8000, help="of SST-2 to train on, at most")
    parser.add_argument("--small", action="store_true", help="a tiny model, without a download")
    args = parser.parse_args()
    set_seed(1)
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    if args.small:
        files = {name: str(DEMO / f"{name}.jsonl") for name in ("train", "validation")}
        data = load_dataset("json", data_files=files)
        tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
        config = AutoConfig.from_pretrained(DEMO / "model", **labels)
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        data = load_dataset("nyu-mll/glue", "sst2")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, **labels)
    data = data.map(lambda rows: tokenizer(rows["sentence"], truncation=True), batched=True)
    train = data["train"].shuffle(seed=1).select(range(min(args.rows, len(data["train"]))))
    held_out = data["validation"]

    # Weights and the inputs of each layer are rounded to 8 bits from the first step on.
    callback = MoQCallback("w8a8")
    trainer = Trainer(
        model,
        TrainingArguments(
            str(args.output_dir),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=1.5e-3 if args.small else 1e-4,
            warmup_steps=0.1,
            logging_steps=25,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[callback],
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}, with rounded weights and inputs")

    # `float` has the same weights and computes with floats, to compare with.
    texts = Data([(text,) for text in held_out["sentence"]], held_out["label"], "sst2")
    exported = export_onnx(callback.delivered.path, args.output_dir / "onnx", flavors=["float", "int8"], data=texts)
    print(exported.table())


if __name__ == "__main__":
    main()
