"""Fine-tunes an embedding model to 4 bits on scored pairs, with the Trainer of Sentence Transformers.

    pip install '.[embeddings]'
    python examples/sentence_transformers_w4.py --model sentence-transformers/all-MiniLM-L6-v2
    python examples/sentence_transformers_w4.py --small

The last line downloads nothing: it trains a tiny BERT on the sentences of examples/demo, in under a minute on a CPU.
Texts without scores are enough for scripts/quantize_embeddings.py.
"""

import argparse
from pathlib import Path

from datasets import DatasetDict, load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed

from moq_hf import MoQCallback

DEMO = Path(__file__).parent / "demo"


def small(folder: Path) -> tuple[SentenceTransformer, DatasetDict]:
    """A tiny BERT with random weights, and pairs of neighboring sentences: 1.0 if both praise or both complain."""
    AutoModel.from_config(AutoConfig.from_pretrained(DEMO / "model")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(64, "mean")])
    data = load_dataset("json", data_files={name: str(DEMO / f"{name}.jsonl") for name in ("train", "validation")})
    pairs = data.map(
        lambda rows: {
            "sentence1": rows["sentence"][::2],
            "sentence2": rows["sentence"][1::2],
            "score": [float(one == two) for one, two in zip(rows["label"][::2], rows["label"][1::2], strict=True)],
        },
        batched=True,
        remove_columns=["sentence", "label"],
    )
    return model, pairs


def main() -> None:
    """Train, and compare the delivered folder with the model that was there before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--dataset", default="sentence-transformers/stsb", help="has sentence1, sentence2 and score")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sentence-transformers"))
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--learning_rate", type=float, default=6e-5)
    parser.add_argument("--small", action="store_true", help="a tiny model, without a download")
    args = parser.parse_args()
    set_seed(1)
    if args.small:
        args.learning_rate = 1e-3
        model, data = small(args.output_dir / "body")
    else:
        model, data = SentenceTransformer(args.model), load_dataset(args.dataset)
    held_out = data["validation"]
    evaluate = EmbeddingSimilarityEvaluator(held_out["sentence1"], held_out["sentence2"], held_out["score"])
    before = evaluate(model)

    # 4 bits, embedding tables too; ONNX Runtime multiplies packed weights that have a scale for each 32.
    callback = MoQCallback("w4", group_size=32)
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(
            str(args.output_dir),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=args.learning_rate,
            warmup_steps=0.1,
            logging_steps=25,
            save_strategy="no",
            report_to=[],
        ),
        data["train"],
        loss=CoSENTLoss(model),
        callbacks=[callback],
    )
    trainer.train()

    # From here on nothing of moq_hf is needed.
    after = evaluate(SentenceTransformer(str(callback.delivered.path)))
    for name, found in (("before, in float", before), ("trained at 4 bits", after)):
        print(f"Spearman {found['spearman_cosine']:.3f} {name}")


if __name__ == "__main__":
    main()
