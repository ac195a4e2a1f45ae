r"""Quantize a ready embedding model to few bits on plain texts, without labels.

    python scripts/quantize_embeddings.py --model sentence-transformers/all-MiniLM-L6-v2 --texts texts.txt --bits 4 \
        --output_dir out

The model learns from itself in float, in one pass over the texts. `SentenceTransformer("out/quantized")` loads it;
`out/onnx` has the files of its other backends, of transformers.js and of fastembed; `out/embeddings.json` has the
report: how its vectors compare with those of the float model on texts that were held out.

Needs `pip install "moq_hf[embeddings]"`. Wrong input ends the run with one `error:` line and exit status 2.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glue_hub import UserError, one_line

# torch and the libraries above it take seconds to import: only after the arguments were found good.
if TYPE_CHECKING:
    import numpy as np
    from sentence_transformers import SentenceTransformer

    from moq_hf import MoQCallback

NEIGHBORS = 10
PAIRS = 2000


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized to some bits, as tried in docs/guide/embeddings.md."""

    learning_rate: float
    group_size: int


# Embedding tables have as many bits: folders that Sentence Transformers load have one width.
RECIPES = {8: Recipe(5e-6, 64), 4: Recipe(6e-5, 16), 3: Recipe(4e-5, 24), 2: Recipe(1e-4, 24)}
WEIGHTS = {"similarity": 1.0, "embedding": 1.0, "relations": 1.0, "hidden": 3.0}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder or Hub id of a model of Sentence Transformers")
    add("--texts", required=True, type=Path, help="a text in each line, or JSON lines with `text`")
    add("--bits", type=int, choices=sorted(RECIPES), default=4, help="of the weights, embedding tables too")
    add("--output_dir", required=True, type=Path)
    add("--sts", type=Path, help="JSON lines with sentence1, sentence2 and score, to compare similarities with")
    add("--max_texts", type=int, default=20_000, help="texts to learn from, at most; drawn at random")
    add("--held_out", type=int, default=5000, help="texts to compare on; at most a fifth of the file")
    add("--max_seq_length", type=int, default=128, help="tokens of a text in training, at most")
    add("--batch_size", type=int, default=32)
    add("--learning_rate", type=float, help="default: by the bits")
    add("--group_size", type=int, help="weights that share a scale; default: by the bits")
    add("--seed", type=int, default=0)
    add("--bf16", action="store_true", help="compute in bfloat16 while training")
    add("--no_onnx", action="store_true", help="leave the ONNX files out")
    return parser.parse_args(arguments)


def read_texts(path: Path) -> list[str]:
    """The different texts of a file, in their order.

    Raises:
        UserError: It cannot be read, or holds fewer than 100.
    """
    try:
        # Not `splitlines`: JSON may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
        if path.suffix in (".json", ".jsonl"):
            lines = [json.loads(line)["text"] for line in lines if line.strip()]
        texts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--texts {path}: {one_line(error)}") from None
    if len(texts) < 100:
        raise UserError(f"--texts {path} has {len(texts)} different texts: give at least 100")
    return texts


def read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """The pairs of a file with their scores.

    Raises:
        UserError: It cannot be read, a line lacks a key, or all scores are the same.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        pairs = [(row["sentence1"], row["sentence2"], float(row["score"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--sts {path}: {one_line(error)}: each line needs sentence1, sentence2 and score") from None
    if len({score for *_, score in pairs}) < 2:
        raise UserError(f"--sts {path}: a correlation needs two different scores, or more")
    return pairs


def split(texts: Sequence[str], held_out: int, max_texts: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts to learn from and texts to compare on, which are the same for all seeds."""
    shuffled = random.Random(0).sample(texts, len(texts))
    held_out = min(held_out, len(texts) // 5)
    rest = random.Random(seed).sample(shuffled[held_out:], len(texts) - held_out)
    return rest[:max_texts], shuffled[:held_out]


def load(name: str) -> "SentenceTransformer":
    """Load the float model, on the CPU or the accelerator that there is.

    Raises:
        UserError: There is none.
    """
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load --model {name}: {one_line(error)}") from None


def by_length(dataset: Any, batch_size: int, drop_last: bool, seed: int = 0, **_: Any) -> Any:
    """Batches of texts about as long as each other, in a random order: less padding."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    class ByLength(DefaultBatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            draw = random.Random(self.seed + self.epoch)
            order = draw.sample(range(len(dataset)), len(dataset))
            lengths = [len(text) for text in dataset["text"]]
            batches = []
            for start in range(0, len(order), 32 * batch_size):
                part = sorted(order[start : start + 32 * batch_size], key=lengths.__getitem__)
                batches += [part[first : first + batch_size] for first in range(0, len(part), batch_size)]
            return iter(draw.sample(batches, len(batches)))

    return ByLength(dataset, batch_size=batch_size, drop_last=drop_last, seed=seed)


def quantize(model: "SentenceTransformer", texts: Sequence[str], options: argparse.Namespace) -> "MoQCallback":
    """Train a model on texts, with itself in float as teacher, and deliver it into `output_dir/quantized`."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    from moq_hf import MoQCallback, MoQDistillation

    recipe = RECIPES[options.bits]
    loss = MoQDistillation(model, **WEIGHTS)
    length = model.max_seq_length
    model.max_seq_length = min(length or options.max_seq_length, options.max_seq_length)
    callback = MoQCallback(
        bits=options.bits,
        embeddings=options.bits,
        group_size=options.group_size or recipe.group_size,
        gptq=1024,
    )
    arguments = SentenceTransformerTrainingArguments(
        str(options.output_dir),
        num_train_epochs=1,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate or recipe.learning_rate,
        warmup_steps=0.1,
        bf16=options.bf16,
        use_cpu=model.device.type == "cpu",
        seed=options.seed,
        batch_sampler=by_length,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
    )
    SentenceTransformerTrainer(
        model,
        arguments,
        Dataset.from_dict({"text": list(texts)}),
        loss=loss,
        callbacks=[callback],
    ).train()
    model.max_seq_length = length
    return callback


def compare(ours: "np.ndarray", theirs: "np.ndarray", seed: int = 0) -> dict[str, float]:
    """How vectors `[texts, size]` compare with those of another model for the same texts.

    Returns:
        `cosine`: the mean. `recall`: which of the nearest `NEIGHBORS` texts of each text are
        among those of the other model. `spearman`: of the similarities of `PAIRS` random
        pairs.
    """
    import numpy as np
    from scipy.stats import spearmanr

    both = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (ours, theirs)]
    count = len(ours)
    hits = 0
    for start in range(0, count, 1000):
        rows = np.arange(start, min(start + 1000, count))
        nearest = []
        for vectors in both:
            similarities = vectors[rows] @ vectors.T
            similarities[np.arange(len(rows)), rows] = -np.inf
            nearest.append(np.argpartition(-similarities, NEIGHBORS, axis=1)[:, :NEIGHBORS])
        hits += sum(len(set(one) & set(other)) for one, other in zip(*nearest, strict=True))
    draw = np.random.default_rng(seed)
    first = draw.integers(0, count, PAIRS)
    second = (first + draw.integers(1, count, PAIRS)) % count
    similarities = [(vectors[first] * vectors[second]).sum(1) for vectors in both]
    return {
        "cosine": float((both[0] * both[1]).sum(1).mean()),
        "recall": hits / (count * NEIGHBORS),
        "spearman": float(spearmanr(*similarities).statistic),
    }


def sts(model: "SentenceTransformer", pairs: Sequence[tuple[str, str, float]]) -> float:
    """Spearman's correlation of similarities with scores."""
    from scipy.stats import spearmanr

    one, two, scores = zip(*pairs, strict=True)
    vectors = [model.encode(list(texts), show_progress_bar=False, normalize_embeddings=True) for texts in (one, two)]
    return float(spearmanr((vectors[0] * vectors[1]).sum(1), scores).statistic)


def timed(model: "SentenceTransformer", texts: Sequence[str]) -> float:
    """Texts that a model encodes in a second, in batches of 32; the best of three."""
    texts = list(texts[:256])
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        model.encode(texts, show_progress_bar=False)
        rates.append(len(texts) / (time.perf_counter() - began))
    return max(rates)


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Quantize, deliver, export and compare; give the report.

    Raises:
        UserError: Something is wrong with the input.
        MoQError: The model cannot be quantized so, or not exported.
    """
    if options.held_out <= NEIGHBORS:
        raise UserError(f"--held_out {options.held_out}: recall@{NEIGHBORS} needs more than {NEIGHBORS} texts")
    texts = read_texts(options.texts)
    pairs = None if options.sts is None else read_pairs(options.sts)
    from sentence_transformers import SentenceTransformer

    from moq_hf.export.onnx import export_onnx

    model = load(options.model)
    train, held_out = split(texts, options.held_out, options.max_texts, options.seed)
    theirs = model.encode(held_out, show_progress_bar=True)
    before = {"sentences a second": timed(model, held_out)} | ({} if pairs is None else {"STS": sts(model, pairs)})
    float_folder = options.output_dir / "float"
    model.save_pretrained(str(float_folder), create_model_card=False)
    delivered = quantize(model, train, options).delivered
    if delivered is None:
        raise UserError("nothing was delivered: see the warning above")
    loaded = SentenceTransformer(str(delivered.path))
    after = {"sentences a second": timed(loaded, held_out)} | ({} if pairs is None else {"STS": sts(loaded, pairs)})
    report = {
        "model": options.model,
        "bits": options.bits,
        "texts": {"trained on": len(train), "held out": len(held_out)},
        "with float": compare(loaded.encode(held_out, show_progress_bar=True), theirs),
        "float": {"bytes": folder_bytes(float_folder), **before},
        "quantized": {"bytes": folder_bytes(delivered.path), **after},
        "proof": None if delivered.proof is None else delivered.proof.agrees,
    }
    if not options.no_onnx:
        exported = export_onnx(delivered.path, options.output_dir / "onnx", names="hub")
        report["onnx"] = {exported.files[flavor]: exported.bytes[flavor] for flavor in exported.files}
    (options.output_dir / "embeddings.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def summary(report: Mapping[str, Any]) -> str:
    """The report in a few lines."""
    found = report["with float"]
    before, after = report["float"], report["quantized"]
    lines = [
        f"{report['bits']} bits on {report['texts']['held out']:,} held-out texts, beside the float model: cosine "
        f"{found['cosine']:.4f}, recall@{NEIGHBORS} {found['recall']:.3f}, Spearman of similarities "
        f"{found['spearman']:.4f}",
        f"{before['bytes'] / 1e6:.1f} to {after['bytes'] / 1e6:.1f} MB, all files of the folder",
    ]
    lines += [f"{name}: {before[name]:.4g} in float, {after[name]:.4g} now" for name in before if name != "bytes"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit status."""
    options = parse(arguments)
    try:
        report = run(options)
    except (UserError, ImportError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        from moq_hf import MoQError

        if not isinstance(error, MoQError):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(summary(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
