"""What rounded inputs give a user: score, size and time of int8 files in ONNX Runtime and OpenVINO beside float; JSON.

    python benchmarks/served_inputs.py --validation_file stsb/validation.jsonl --task_name stsb \
      --weights stsb-1-8-per-channel-full --trained static=stsb-1-8-static-symmetric w8a8=stsb-1-8-w8a8

Folders are delivered ones, of `glue_study.py --keep`: with `--weights` one of 8 bits whose inputs were in float in
training, and others that were trained with rounded inputs. Of the first there are also a float file and what ONNX
Runtime's `quantize_dynamic` makes of that. Scores are of all rows; times are medians of files that take turns.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from environment import environment, write
from onnxruntime.quantization import QuantType, quantize_dynamic
from timing import interleaved
from torch import Tensor

from moq_hf.export.compare import Reference, load_checkpoint, read_data
from moq_hf.export.onnx import export_onnx, onnx_runtime, openvino_runtime
from moq_hf.export.onnx_rewrite import Flavor

RESULT = Path(__file__).parent / "results" / "served_inputs.json"
SHAPES = {"1 x 32": (1, 32, 40), "8 x 128": (8, 128, 10)}
THREADS = (1, 2)
THEIRS = "quantize_dynamic"
Load = Callable[[Path, int], Callable[[Mapping[str, Tensor]], Tensor]]


def files_of(folders: Mapping[str, Path], weights: str, out: Path) -> dict[str, tuple[Load, Path]]:
    """What is compared, by name: what runs a file, and the file."""
    found: dict[str, tuple[Load, Path]] = {}
    for name, folder in folders.items():
        flavors: list[Flavor] = ["float", "int8"] if name == weights else ["int8", "qdq"]
        written = export_onnx(folder, out / name, flavors=flavors, cpu="vnni", tolerance=math.inf)
        for flavor, file in written.files.items():
            path = out / name / file
            label = "float" if flavor == "float" else f"{name}, {flavor}"
            found[f"ONNX Runtime, {label}"] = (onnx_runtime, path)
            if flavor in ("float", "qdq"):
                found[f"OpenVINO, {label}"] = (openvino_runtime, path)
    path = out / "theirs.onnx"
    quantize_dynamic(found["ONNX Runtime, float"][1], path, weight_type=QuantType.QInt8)
    found[f"ONNX Runtime, {THEIRS}"] = (onnx_runtime, path)
    return found


def times_of(files: Mapping[str, tuple[Load, Path]], names: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by name, shape and threads."""
    found: dict[str, dict[str, dict[str, float]]] = {name: {shape: {} for shape in SHAPES} for name in files}
    for threads in THREADS:
        models = {name: load(path, threads) for name, (load, path) in files.items()}
        for shape, (batch, sequence, repeats) in SHAPES.items():
            inputs = {name: torch.ones(batch, sequence, dtype=torch.int64) for name in names}
            inputs["input_ids"] = 1000 + torch.arange(batch * sequence).view(batch, sequence)
            medians = interleaved({name: partial(run, inputs) for name, run in models.items()}, repeats)
            for name, seconds in medians.items():
                found[name][shape][f"{threads} threads"] = round(1e3 * seconds, 2)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--trained", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--task_name", required=True)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(max(THREADS))
    weights = "8-bit weights"
    folders = {weights: args.weights} | {name: Path(path) for name, _, path in (x.partition("=") for x in args.trained)}
    data = read_data(args.validation_file, args.task_name)
    references = {name: Reference(load_checkpoint(folder), data, 128) for name, folder in folders.items()}
    with tempfile.TemporaryDirectory() as temporary:
        files = files_of(folders, weights, Path(temporary))
        times = times_of(files, list(references[weights].batches[0]))
        rows = {}
        for name, (load, path) in files.items():
            label = name.split(", ")[1]
            reference = references.get(label, references[weights])
            run = load(path, max(THREADS))
            proof = reference.prove([run(batch) for batch in reference.batches])
            rows[name] = {
                "metrics": proof.metrics,
                "largest difference from the delivered folder": proof.largest_difference,
                "bytes": path.stat().st_size,
                "milliseconds": times[name],
            }
            print(name, json.dumps(rows[name]), flush=True)
    delivered = {name: reference.metrics for name, reference in references.items()}
    document = {"delivered folders": delivered, "files": rows, "clock": "wall"}
    write(document | environment("onnxruntime", "openvino"), args.out)


if __name__ == "__main__":
    main()
