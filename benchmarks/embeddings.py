"""all-MiniLM-L6-v2 at few bits: rounded, and taught by itself in float; a JSON line for each run.

    python benchmarks/embeddings.py --model MINILM --glue GLUE [--bits 4 2] [--seeds 11 12 13]

    ONNX/bin/python benchmarks/embeddings.py --model MINILM --glue GLUE --theirs    # sentence-transformers[onnx]<6

Texts are the paragraphs of docstrings of the standard library and sentences of GLUE (MRPC, CoLA, SST-2). Held out
are those of GLUE's validation sets and of a tenth of the modules, filled up to 5,000 with others. Each run takes one
pass, with `scripts/quantize_embeddings.py`; runs that the file has are not made again.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import stdlib_text
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import quantize_embeddings as command  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "embeddings.jsonl"
TASKS = {"mrpc": ("sentence1", "sentence2"), "cola": ("sentence",), "sst2": ("sentence",)}
HELD_OUT = 5000
# Texts of a run: 8 bits have little to learn.
TEXTS = {8: 1500, 4: 20_000, 3: 20_000, 2: 20_000}
# Tokens of a text in training.
LENGTH = 64


def paragraphs(source: str) -> Iterator[str]:
    """The paragraphs of a module's docstrings, without examples."""
    for _, text in stdlib_text.docstrings(source):
        for part in re.split(r"\n\s*\n", text):
            line = " ".join(part.split())
            if len(line) >= 20 and not line.startswith((">>>", "...")):
                yield line


def corpus(glue: Path) -> tuple[list[str], list[str]]:
    """Texts to learn from, and those held out."""
    train: list[str] = []
    held_out: list[str] = []
    for name, source in stdlib_text.sources():
        (held_out if stdlib_text.is_held_out(name) else train).extend(paragraphs(source))
    for task, keys in TASKS.items():
        for path in sorted((glue / task).iterdir()):
            part = {"train": train, "validation": held_out}.get(path.stem)
            if part is not None:
                rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                part.extend(row[key].strip() for row in rows for key in keys)
    train = list(dict.fromkeys(train))
    known = set(train)
    held_out = [text for text in dict.fromkeys(held_out) if text not in known]
    random.Random(0).shuffle(train)
    random.Random(1).shuffle(held_out)
    lacking = max(0, HELD_OUT - len(held_out))
    return train[lacking:], [*held_out, *train[:lacking]][:HELD_OUT]


def encode(model: Any, texts: list[str]) -> np.ndarray:
    """The vectors of texts, `[texts, size]`."""
    return model.encode(texts, batch_size=128, show_progress_bar=False)


def rounded(bits: int, args: argparse.Namespace) -> Any:
    """The model at some bits, as it is without training."""
    from moq_hf import MoQConfig, quantize_model

    recipe = command.RECIPES[bits]
    model = command.load(args.model)
    quantize_model(model, MoQConfig(bits=bits, embeddings=bits, group_size=recipe.group_size))
    return model.eval()


def taught(
    bits: int, seed: int, texts: list[str], args: argparse.Namespace, folder: Path
) -> tuple[Any, dict[str, Any]]:
    """The delivered model as Sentence Transformers load it, and what the run was."""
    from sentence_transformers import SentenceTransformer

    texts = random.Random(seed).sample(texts, args.texts or TEXTS[bits])
    options = command.parse(
        f"--model={args.model} --texts=- --bits={bits} --output_dir={folder} --bf16 --seed={seed} "
        f"--max_seq_length={LENGTH} --batch_size={args.batch_size}".split()
    )
    began = time.perf_counter()
    cpu = time.process_time()
    delivered = command.quantize(command.load(args.model), texts, options).delivered
    assert delivered is not None and delivered.proof is not None
    made = {
        "texts": len(texts),
        "batch": args.batch_size,
        "learning_rate": command.RECIPES[bits].learning_rate,
        "group_size": command.RECIPES[bits].group_size,
        "seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(time.process_time() - cpu),
        "proof": delivered.proof.agrees,
        "bytes": command.folder_bytes(delivered.path),
        "weights": delivered.bytes,
    }
    return SentenceTransformer(str(delivered.path)), made


def theirs_at_int8(name: str, folder: Path) -> Iterator[tuple[str, Any, int]]:
    """What others make of the model at 8 bits without training: how, the model, and the bytes of its ONNX file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

    model = SentenceTransformer(name, backend="onnx", model_kwargs={"export": True}, device="cpu")
    model.save_pretrained(str(folder))
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))
    onnx = folder / "onnx"
    quantize_dynamic(onnx / "model.onnx", onnx / "model_ort.onnx", weight_type=QuantType.QInt8)
    files = {"Sentence Transformers int8": "model_qint8_avx512_vnni.onnx", "ONNX Runtime int8": "model_ort.onnx"}
    for how, file in files.items():
        keywords = {"file_name": f"onnx/{file}"}
        made = SentenceTransformer(str(folder), backend="onnx", model_kwargs=keywords, device="cpu")
        yield how, made, (onnx / file).stat().st_size


def main() -> None:
    """Make the runs that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 4, 3, 8])
    parser.add_argument("--seeds", type=int, nargs="*", default=[11, 12, 13])
    parser.add_argument("--texts", type=int, help="of a run; default: by the bits")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--theirs", action="store_true", help="what other libraries make of it instead")
    parser.add_argument("--keep", type=Path, help="a folder for their files")
    args = parser.parse_args()
    train, held_out = corpus(args.glue)
    kept = Path(tempfile.gettempdir()) / "embeddings_float.npy"
    if not kept.exists():
        np.save(kept, encode(command.load(args.model), held_out))
    theirs = np.load(kept)
    with tempfile.TemporaryDirectory() as folder:
        command.load(args.model).save_pretrained(folder, create_model_card=False)
        float_bytes = command.folder_bytes(Path(folder))
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {(row["bits"], row["how"], row["seed"]) for row in map(json.loads, lines)}

    def note(bits: int, how: str, seed: int | None, model: Any, **more: Any) -> None:
        vectors = encode(model, held_out)
        row = {"bits": bits, "how": how, "seed": seed, **command.compare(vectors, theirs), **more}
        if "bytes" in more:
            row["ratio"] = round(more["bytes"] / float_bytes, 4)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    if args.theirs:
        with tempfile.TemporaryDirectory() as folder:
            for how, model, size in theirs_at_int8(args.model, Path(folder)):
                note(8, how, None, model, weights=size)
            if args.keep is not None:
                shutil.copytree(Path(folder, "onnx"), args.keep)
        return
    # All bits with the first seed come first.
    for seed in args.seeds:
        for bits in args.bits:
            if (bits, "rounded", None) not in done:
                done.add((bits, "rounded", None))
                note(bits, "rounded", None, rounded(bits, args))
            if (bits, "taught", seed) not in done:
                with tempfile.TemporaryDirectory() as folder:
                    model, made = taught(bits, seed, train, args, Path(folder))
                    note(bits, "taught", seed, model, **made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
