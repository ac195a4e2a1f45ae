"""The ONNX files of a packed encoder on this CPU, in ONNX Runtime and OpenVINO beside PyTorch: size, time, answers.

    python benchmarks/deployed_files.py runs/mrpc/quantized --task_name mrpc --validation_file data/mrpc.jsonl

Engines have as many threads as PyTorch and take turns. One that fails is a line with its reason. Differences are those
of outputs from the checkpoint's in PyTorch; a metric of few examples says little.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from timing import interleaved
from torch import Tensor

from moq_hf import MoQError
from moq_hf.errors import one_line, require
from moq_hf.export import decoder
from moq_hf.export.compare import SENTENCES, Data, Reference, load_checkpoint, most_tokens, read_data, takes_pictures
from moq_hf.export.onnx import export_onnx, onnx_runtime, openvino_runtime
from moq_hf.export.onnx_rewrite import Flavor, target_here
from moq_hf.text import table

REPEATS = 20
# Runs a model on a batch and gives its first output.
Model = Callable[[Mapping[str, Tensor]], Tensor]


def loaders() -> dict[str, Callable[[Path, int], Model]]:
    """What loads a file, by the name of the engine; without OpenVINO where it is not installed."""
    found: dict[str, Callable[[Path, int], Model]] = {"ONNX Runtime": onnx_runtime}
    try:
        require("openvino", "openvino")
    except MoQError as error:
        print(error)
    else:
        found["OpenVINO"] = openvino_runtime
    return found


def measure(
    directory: Path, batch: int = 8, sequence: int = 128, data: Data = SENTENCES, max_length: int = 128
) -> tuple[list[list[str]], dict[str, str]]:
    """A row for each engine after the head, and why others have none.

    Args:
        directory: A packed encoder of texts with its tokenizer.
        batch: Examples that are timed together.
        sequence: Their tokens; fewer where the model has fewer positions.
        data: What all engines answer, for differences and metrics.
        max_length: Tokens of an example of the data, at most.

    Raises:
        MoQError: It is no such checkpoint, or the data does not fit it.
    """
    checkpoint = load_checkpoint(directory)
    model = checkpoint.model
    if takes_pictures(model) or decoder.has_cache(model):
        raise MoQError(f"{directory}: encoders of texts are measured, not {type(model).__name__}")
    reference = Reference(checkpoint, data, max_length)
    sequence = min(sequence, most_tokens(checkpoint))
    names = reference.batches[0]
    inputs = {name: torch.full((batch, sequence), int(name == "attention_mask")) for name in names}
    inputs["input_ids"] = torch.arange(batch * sequence).view(batch, sequence) % 10
    engines: dict[str, Model] = {"PyTorch": lambda batch: model(**batch)[0]}
    sizes = {"PyTorch": checkpoint.verified.float_bytes}
    failed: dict[str, str] = {}
    flavors: list[Flavor] = ["float", "weight-only", "int8", "nbits"]
    runtimes = loaders()
    # OpenVINO's form of int8.
    if "OpenVINO" in runtimes and target_here() == "vnni":
        flavors.append("qdq")
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        out = Path(temporary, "onnx")
        written = export_onnx(directory, out, flavors=flavors, data=data, max_length=max_length, tolerance=math.inf)
        for runtime, load in runtimes.items():
            for flavor, file in written.files.items():
                name = f"{runtime} {flavor}"
                try:
                    engines[name] = load(out / file, torch.get_num_threads())
                except Exception as error:
                    failed[name] = one_line(error, named=True)
                sizes[name] = written.bytes[flavor]
        times = interleaved({name: partial(run, inputs) for name, run in engines.items()}, REPEATS)
        rows = [["", "MB", f"{batch} x {sequence}, ms", "speed", "difference", "agreement", *reference.metrics]]
        for name, time in times.items():
            if isinstance(time, str):
                failed[name] = time
                continue
            proof = reference.prove([engines[name](batch) for batch in reference.batches])
            figures = [f"{sizes[name] / 1e6:.2f}", f"{1e3 * time:.1f}", f"{times['PyTorch'] / time:.2f}"]
            rows.append([name, *figures, *proof.cells()])
    return rows, failed


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--validation_file", help='JSON lines with one or two texts and "label"')
    parser.add_argument("--task_name", help="GLUE's name of the task, for the metric")
    parser.add_argument("--max_seq_length", type=int, default=128)
    args = parser.parse_args()
    data = SENTENCES if args.validation_file is None else read_data(args.validation_file, args.task_name)
    rows, failed = measure(args.directory, args.batch, args.sequence, data, args.max_seq_length)
    print("\n".join([table(rows), *(f"{name}: {reason}" for name, reason in failed.items())]))


if __name__ == "__main__":
    main()
