"""Speed of ONNX files with rounded inputs over float, in ONNX Runtime and OpenVINO, of an encoder with a score; JSON.

    python benchmarks/served_inputs.py --model all-mpnet-base-v2 --train_file stsb/train.jsonl

Weights and inputs are rounded without training; static ranges are learned from sentences of the file. The files of an
engine take turns, and a speed is the median of the ratios: of processor time on one thread, else of wall-clock time.
Differences are those of scores of a few rows from the packed folder's in plain transformers, which rounds inputs too,
but for 4 bits. OpenVINO is left out where it is not installed.
"""

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import rounded_inputs
import torch
from deployed_files import Model, loaders
from environment import environment, write
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from moq_hf import quantize_model, save_quantized
from moq_hf.errors import one_line
from moq_hf.export.compare import load_floats
from moq_hf.export.onnx import export_onnx
from moq_hf.export.onnx_rewrite import Flavor, Target, target_here

RESULT = Path(__file__).parent / "results" / "served_inputs.json"
# A config by name, and the files that are made of it.
FORMS: dict[str, tuple[dict[str, Any], tuple[Flavor, ...]]] = {
    "w8a8, symmetric": ({"config": "w8a8", "activations": {"symmetric": True}}, ("float", "int8", "qdq")),
    "w8a8": ({"config": "w8a8"}, ("int8", "qdq")),
    "8 bits, per token": ({"bits": 8, "activations": {"scale": "per_token"}}, ("int8",)),
    "4 bits, groups of 32": ({"bits": 4, "group_size": 32}, ("nbits",)),
}
SHAPES = {"1 x 32": (1, 32), "8 x 32": (8, 32)}
ROWS = 16


# A batch of a model's inputs.
Batch = dict[str, Tensor]


def export(form: str, model: str, examples: list[Batch], rows: Batch, folder: Path) -> dict[str, tuple[str, Tensor]]:
    """The files of a form by name, each with the scores of these rows that are expected of it."""
    config, flavors = FORMS[form]
    set_seed(0)
    quantized = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).eval()
    is_static = config.get("config") == "w8a8"
    quantize_model(quantized, **config, inputs=examples if is_static else None)
    packed = save_quantized(quantized, folder / form, processing_class=AutoTokenizer.from_pretrained(model))
    delivered = scores_of(AutoModelForSequenceClassification.from_pretrained(packed).eval(), rows)
    found = {}
    # A file of qdq is for CPUs with VNNI; how far it is off elsewhere is measured.
    for target, own in targets(flavors).items():
        out = folder / f"{form}, {target}"
        written = export_onnx(packed, out, flavors=own, cpu=target, tolerance=math.inf)
        for flavor, file in written.files.items():
            if flavor == "float":
                found["float"] = (str(out / file), scores_of(load_floats(packed).eval(), rows))
            else:
                found[f"{form}, {flavor}"] = (str(out / file), delivered)
    return found


def exported(args: argparse.Namespace, folder: Path) -> tuple[dict[str, tuple[Path, Tensor]], Batch]:
    """The files and expected scores of all forms, and the rows; what an earlier call wrote stays."""
    folder.mkdir(parents=True, exist_ok=True)
    examples = rounded_inputs.batches_of(args.train_file, AutoTokenizer.from_pretrained(args.model))
    rows = {name: tensor[:ROWS] for name, tensor in examples[0].items()}
    found = {}
    for form in FORMS:
        written = folder / f"{form}.pt"
        if not written.exists():
            # A quantized model refers to itself.
            gc.collect()
            torch.save(export(form, args.model, examples, rows, folder), written)
            print(f"{form}: written", flush=True)
        found |= {name: (Path(path), scores) for name, (path, scores) in torch.load(written).items()}
    return found, rows


def targets(flavors: tuple[Flavor, ...]) -> dict[Target, list[Flavor]]:
    """The flavors by the CPUs that they are made for."""
    found: dict[Target, list[Flavor]] = {}
    for flavor in flavors:
        found.setdefault("vnni" if flavor == "qdq" else target_here(), []).append(flavor)
    return found


def scores_of(model: Any, rows: Batch) -> Tensor:
    """In PyTorch."""
    with torch.inference_mode():
        scores: Tensor = model(**rows)[0]
    return scores


def in_turns(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and processor time of each run in milliseconds, one run of each in turn after one that is left out."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["float"]) < 3:
        for name, run in runs.items():
            before = time.perf_counter(), time.process_time()
            run()
            times[name].append((1e3 * (time.perf_counter() - before[0]), 1e3 * (time.process_time() - before[1])))
    return times


def measure(
    models: dict[str, Model], names: Iterable[str], threads: int, seconds: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds and speed over float of each model with inputs of these names, by shape."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape, (batch, sequence) in SHAPES.items():
        inputs = {name: torch.full((batch, sequence), int(name == "attention_mask")) for name in names}
        inputs["input_ids"] = torch.arange(batch * sequence).view(batch, sequence) % 10 + 5
        times = in_turns({name: partial(run, inputs) for name, run in models.items()}, seconds)
        clock = 1 if threads == 1 else 0
        found[shape] = {}
        for name, own in times.items():
            ratios = [float_[clock] / each[clock] for float_, each in zip(times["float"], own, strict=True)]
            wall = statistics.median(each[0] for each in own)
            found[shape][name] = {"ms": round(wall, 2), "speed": round(statistics.median(ratios), 3), "turns": len(own)}
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train_file", required=True, type=Path)
    parser.add_argument("--files", type=Path, help="a folder to keep the files in, or that has them")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each engine, number of threads and shape")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines = loaders()
    found: dict[str, Any] = {"times": {}, "differences": {}, "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        files, rows = exported(args, args.files or Path(folder))
        found["bytes"] = {name: path.stat().st_size for name, (path, _) in files.items()}
        found["deviation of scores"] = round(float(files["float"][1].std()), 4)
        print("measuring", flush=True)
        for engine, load in engines.items():
            found["differences"][engine], found["times"][engine] = {}, {}
            for threads in args.threads:
                models = {}
                for name, (path, expected) in files.items():
                    try:
                        model = load(path, threads)
                        difference = float((model(rows) - expected).abs().max())
                    except Exception as error:
                        found["failed"][f"{engine}, {name}"] = one_line(error, named=True)
                        continue
                    models[name] = model
                    found["differences"][engine][name] = round(difference, 5)
                found["times"][engine][f"threads: {threads}"] = measure(models, rows, threads, args.seconds)
    print(json.dumps(found, indent=1))
    versions = ["onnxruntime", *(["openvino"] if "OpenVINO" in engines else [])]
    write({**found, "rows": ROWS} | environment(*versions, threads=args.threads, files_for=target_here()), args.out)


if __name__ == "__main__":
    main()
