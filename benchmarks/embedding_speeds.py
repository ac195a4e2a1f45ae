"""Sentences a second of a MiniLM on one thread: PyTorch, ONNX files of moq_hf, and the int8 file of others; JSON.

    ONNX/bin/python benchmarks/embeddings.py --model MINILM --glue GLUE --theirs --keep THEIRS
    python benchmarks/embedding_speeds.py --model MINILM --glue GLUE --theirs THEIRS

Texts are those that embeddings.py holds out, in batches of 32 about as long as each other. Each engine tokenizes and
takes the mean over tokens too. Weights are only rounded, which changes no speed. Engines take turns; medians are of
processor time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import embeddings
import torch
from environment import environment, write
from sentence_transformers import SentenceTransformer

from moq_hf import quantize_model, save_quantized
from moq_hf.export.onnx import export_onnx, onnx_runtime
from moq_hf.export.onnx_rewrite import Flavor

RESULT = Path(__file__).parent / "results" / "embedding_speeds.json"
BATCH = 32
# Columns of a group: those that kernels for few bits take.
FILES: dict[int, tuple[int | None, list[Flavor]]] = {
    8: (None, ["float", "int8"]),
    4: (32, ["nbits"]),
    2: (32, ["nbits"]),
}


def vectors(tokenizer: Any, run: Callable[[dict[str, Any]], torch.Tensor], texts: list[str]) -> torch.Tensor:
    """The mean of the last states over tokens, `[texts, size]`."""
    inputs = dict(tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt"))
    states = run(inputs)
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (states * mask).sum(1) / mask.sum(1)


def in_turns(engines: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The median processor time of each engine, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run()
    began = time.process_time()
    while time.process_time() - began < seconds:
        for name, run in engines.items():
            start = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--theirs", type=Path, required=True, help="the folder of their ONNX files")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = sorted(embeddings.corpus(args.glue)[1][: args.texts], key=len)
    batches = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
    whole = SentenceTransformer(args.model, device="cpu")
    engines: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"Sentence Transformers, {path.stem}": path for path in sorted(args.theirs.glob("*.onnx"))}
        for bits, (group, flavors) in FILES.items():
            model = SentenceTransformer(args.model, device="cpu")
            quantize_model(
                model,
                {"quantize_bits": {"target_bits": bits}, "quantize_embeddings": bits}
                | ({} if group is None else {"quantize_group_size": group}),
            )
            packed = save_quantized(model, Path(folder, str(bits)))
            out = Path(folder, f"onnx{bits}")
            written = export_onnx(packed, out, flavors=flavors, tolerance=1.0)
            paths |= {
                "moq_hf, ONNX float" if flavor == "float" else f"moq_hf, {bits} bits, {flavor}": out / file
                for flavor, file in written.files.items()
            }
        for name, path in paths.items():
            engines[name] = partial(vectors, whole.tokenizer, onnx_runtime(path, 1))
            sizes[name] = path.stat().st_size
    engines["Sentence Transformers, PyTorch"] = partial(whole.encode, batch_size=BATCH, show_progress_bar=False)
    expected = torch.as_tensor(whole.encode(batches[0]))
    near = {
        name: torch.cosine_similarity(torch.as_tensor(run(batches[0])), expected).mean().item()
        for name, run in engines.items()
    }

    def encode(run: Callable[[list[str]], Any]) -> None:
        for batch in batches:
            run(batch)

    with torch.inference_mode():
        times = in_turns({name: partial(encode, run) for name, run in engines.items()}, args.seconds)
    found = {
        "sentences a second": {name: round(1e3 * len(texts) / time, 1) for name, time in times.items()},
        "cosine": {name: round(value, 4) for name, value in near.items()},
        "bytes": sizes,
        "texts": len(texts),
        "clock": "processor time",
    }
    print(json.dumps(found, indent=2))
    write(found | environment("onnxruntime", "sentence_transformers"), args.out)


if __name__ == "__main__":
    main()
