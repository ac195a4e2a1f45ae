"""A cross-encoder on MRPC at 4 and 2 bits: in float, rounded, and trained; a JSON line for each.

    python benchmarks/reranker.py --model MINILM --data GLUE

MINILM is all-MiniLM-L6-v2, of which the head is new; GLUE is a folder with `mrpc`, which has train.jsonl and
validation.jsonl. The float model has as many steps as the others: half of theirs are in float, and the rest has a
`MoQCallback` in the `CrossEncoderTrainer`, which starts from GPTQ; the target is the mean of the label and of what the
float half says. Scored on the validation pairs is the folder that was delivered: average precision and the best F1 of
the pairs, and how high a paraphrase ranks among ten sentences, of which nine are those of other pairs, of both splits,
that share the most words with the query.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import elsewhere  # noqa: F401 - scripts/
import numpy as np
import torch
from datasets import Dataset
from lines import Lines
from quantize_embeddings import folder_bytes
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import (
    CrossEncoderClassificationEvaluator,
    CrossEncoderRerankingEvaluator,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed

from moq_hf import MoQCallback, quantize_model

RESULT = Path(__file__).parent / "results" / "reranker.jsonl"
# As many bits in tables as in layers: folders that Sentence Transformers load have one width.
CONFIGS = {bits: {"bits": bits, "embeddings": bits, "group_size": size} for bits, size in ((4, 16), (2, 24))}
LENGTH = 64
CANDIDATES = 10
QUERIES = 100
SCORES = {"average_precision": "average_precision", "f1": "f1"}
SCORES |= {name: f"{name}@{CANDIDATES}" for name in ("mrr", "ndcg")}

Rows = list[dict[str, Any]]


def samples(rows: Rows, pool: Rows) -> Rows:
    """For the first sentence of paraphrases: the second, and the sentences of `pool` nearest to it in words."""
    words = {row[name]: set(row[name].lower().split()) for row in pool for name in ("sentence1", "sentence2")}

    def shared(one: str, other: str) -> float:
        return len(words[one] & words[other]) / len(words[one] | words[other])

    found = []
    for row in [row for row in rows if row["label"]][:QUERIES]:
        query = row["sentence1"]
        own = {name for other in pool if query in other.values() for name in other.values()}
        others = sorted((text for text in words if text not in own), key=lambda text: -shared(query, text))
        found.append({"query": query, "positive": [row["sentence2"]], "negative": others[: CANDIDATES - 1]})
    return found


def pairs(rows: Rows) -> list[list[str]]:
    """The sentences of rows, two of each."""
    return [[row["sentence1"], row["sentence2"]] for row in rows]


def load(name: str | Path) -> CrossEncoder:
    """A cross-encoder with one score."""
    return CrossEncoder(str(name), num_labels=1, max_length=LENGTH, device="cpu")


def train(
    model: CrossEncoder, rows: Rows, targets: Any, epochs: float, seed: int, args: argparse.Namespace, *callbacks: Any
) -> None:
    """Train on pairs with targets from 0 to 1; afterwards the model computes in float32."""
    columns = {name: [row[name] for row in rows] for name in ("sentence1", "sentence2")}
    arguments = CrossEncoderTrainingArguments(
        str(args.place),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        learning_rate=args.learning_rate,
        warmup_steps=0.1,
        bf16=True,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = CrossEncoderTrainer(
        model,
        arguments,
        Dataset.from_dict({**columns, "score": [float(target) for target in targets]}),
        loss=BinaryCrossEntropyLoss(model),
        callbacks=list(callbacks),
    )
    trainer.train()
    # It leaves its autocast around the model.
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    model.eval()


def scored(model: CrossEncoder, data: dict[str, Rows]) -> dict[str, float]:
    """The scores of a model, in percent."""
    rows = data["validation"]
    labels = [row["label"] for row in rows]
    found = CrossEncoderClassificationEvaluator(pairs(rows), labels, write_csv=False)(model)
    ranked = samples(rows, [*data["train"], *rows])
    found |= CrossEncoderRerankingEvaluator(ranked, CANDIDATES, write_csv=False)(model)
    return {name: round(100 * float(found[key]), 3) for name, key in SCORES.items()}


def measure(seed: int, data: dict[str, Rows], args: argparse.Namespace) -> Rows:
    """The lines of a seed."""
    lines: Rows = []

    def note(how: str, bits: int, model: CrossEncoder, **more: Any) -> None:
        lines.append({"how": how, "bits": bits, "seed": seed, **scored(model, data), **more})

    labels = np.array([row["label"] for row in data["train"]])
    set_seed(seed)
    model = load(args.model)
    train(model, data["train"], labels, args.epochs, seed, args)
    whole = args.place / "whole"
    model.save_pretrained(str(whole))
    note("float", 32, model, bytes=folder_bytes(whole))
    for bits, config in CONFIGS.items():
        rounded = load(whole)
        quantize_model(rounded, MoQCallback(**config).config)
        note("rounded", bits, rounded)

    set_seed(seed)
    half = load(args.model)
    train(half, data["train"], labels, args.epochs / 2, seed, args)
    half.save_pretrained(str(args.place / "half"))
    # The sum of the cross entropies with two targets is that with their mean, times two.
    targets = (labels + half.predict(pairs(data["train"]))) / 2
    for bits, config in CONFIGS.items():
        model = load(args.place / "half")
        callback = MoQCallback(**config, gptq=1024)
        train(model, data["train"], targets, args.epochs / 2, seed, args, callback)
        done = callback.delivered
        assert done is not None and done.proof is not None and done.proof.agrees
        loaded = load(done.path)
        checked = pairs(data["validation"])
        equal = bool(np.array_equal(loaded.predict(checked), model.predict(checked)))
        note("moq_hf", bits, loaded, bytes=folder_bytes(done.path), equal=equal)
    return lines


def main() -> None:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = {}
    for split in ("train", "validation"):
        lines = (args.data / "mrpc" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        data[split] = [json.loads(line) for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        args.place = Path(folder)
        # The body of the model: as a folder of Sentence Transformers it is no cross-encoder.
        body = args.place / "body"
        body.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.model / name, body)
        args.model = body
        found = Lines(args.out)
        for seed in args.seeds:
            if not found.has(seed=seed):
                for line in measure(seed, data, args):
                    found.add(line)


if __name__ == "__main__":
    main()
