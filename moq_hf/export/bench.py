"""`benchmark`: the exported files of a packed checkpoint in ONNX Runtime and OpenVINO, beside PyTorch, on this CPU."""

import math
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MoQError, explained, one_line, require
from ..text import progress, table
from . import decoder
from .compare import (
    SENTENCES,
    TOLERANCE,
    Comparison,
    Data,
    Reference,
    load_checkpoint,
    most_tokens,
    takes_pictures,
)
from .onnx import export_onnx, onnx_runtime, openvino_runtime
from .onnx_layers import Flavor, target_here

MAX_LOSS = 0.01
# Forward passes that are timed, after one that is not.
_REPEATS = 20
# Runs a model on a batch and gives its first output.
Model = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Measured:
    """One engine.

    Attributes:
        bytes: Of the weights in PyTorch, of the file in a runtime.
        milliseconds: Median time of a forward pass.
        proof: How its answers compare with the checkpoint's in PyTorch.
        command: How to make the file and what loads it; "" for PyTorch.
    """

    bytes: int
    milliseconds: float
    proof: Comparison
    command: str


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` measured.

    Attributes:
        shape: Of the batch that was timed: "8 x 128", examples and tokens.
        engines: Figures of each engine by its name, PyTorch first.
        missing: Why an engine has no figures, by its name.
        max_loss: The most that a recommended file may lose of each metric.
    """

    shape: str
    engines: Mapping[str, Measured]
    missing: Mapping[str, str]
    max_loss: float

    def recommended(self) -> str | None:
        """The fastest engine whose file loses at most `max_loss` of each metric; None if there is none.

        Without metrics it is the fastest one with the checkpoint's outputs.
        """
        files = list(self.engines)[1:]
        legal = [name for name in files if self._is_accurate(self.engines[name].proof)]
        return max(legal, key=self.speed, default=None)

    def speed(self, name: str) -> float:
        """How many times as fast as PyTorch an engine is."""
        ours = self.engines[name].milliseconds
        return self.engines["PyTorch"].milliseconds / ours

    def _is_accurate(self, proof: Comparison) -> bool:
        before = self.engines["PyTorch"].proof.metrics
        if not before:
            return proof.largest_difference <= TOLERANCE
        # Rounded, because 0.80 - 0.79 is a little more than 0.01 in floats. A loss that
        # is NaN is not accurate.
        return all(
            round(value - proof.metrics[name], 9) <= self.max_loss
            for name, value in before.items()
        )

    def table(self) -> str:
        """A line per engine, and what to deploy."""
        metrics = self.engines["PyTorch"].proof.metrics
        head = ["", "MB", f"{self.shape}, ms", "speed", "difference", "agreement"]
        rows = [[*head, *metrics]]
        for name, measured in self.engines.items():
            size = f"{measured.bytes / 1e6:.2f}"
            times = (f"{measured.milliseconds:.1f}", f"{self.speed(name):.2f}")
            rows.append([name, size, *times, *measured.proof.cells()])
        missing = [f"{name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join([table(rows), *missing, "", self._sentence()])

    def _sentence(self) -> str:
        best = self.recommended()
        condition = f"loses at most {self.max_loss:g} of each metric"
        if not self.engines["PyTorch"].proof.metrics:
            condition = "has its outputs; what others lose, sentences with labels (--validation_file) would show"
        if best is None:
            return f"Deploy the checkpoint in PyTorch: none of the exported files {condition}."
        command = self.engines[best].command
        return f"Deploy {command}: {self.speed(best):.2f} times as fast as PyTorch, and it {condition}."


def benchmark(
    directory: str | os.PathLike[str],
    *,
    batch: int = 8,
    sequence: int = 128,
    data: Data = SENTENCES,
    max_length: int = 128,
    max_loss: float = MAX_LOSS,
) -> Benchmark:
    """Measure the exported files of a packed encoder, and say which one to deploy on this CPU.

    All engines have as many threads as PyTorch. One that fails is noted, and the others
    go on.

    Args:
        directory: What `save_quantized` wrote.
        batch: Examples that are timed together.
        sequence: Their tokens, without padding; fewer where the model has fewer
            positions.
        data: What all engines answer, for their accuracy.
        max_length: Tokens of an example of the data, at most.
        max_loss: What a recommended file may lose of each metric, against the
            checkpoint in PyTorch.

    Raises:
        MoQError: The checkpoint cannot be exported or is none of an encoder of texts,
            or an argument does not fit it.
    """
    folder = Path(directory)
    checkpoint = load_checkpoint(folder)
    model = checkpoint.model
    if takes_pictures(model) or decoder.has_cache(model):
        raise MoQError(
            f"{folder}: encoders of texts are measured, not {type(model).__name__}"
        )
    reference = Reference(checkpoint, data, max_length)
    # The table shows the length that was run.
    sequence = min(sequence, most_tokens(checkpoint))
    with explained(f"a batch of {batch} x {sequence} does not fit"):
        inputs = {
            name: torch.full((batch, sequence), int(name == "attention_mask"))
            for name in reference.batches[0]
        }
        inputs["input_ids"] = torch.arange(batch * sequence).view(batch, sequence) % 10
    engines: dict[str, Measured] = {}

    def measure(name: str, size: int, command: str, run: Model) -> None:
        run(inputs)
        times = timeit.repeat(lambda: run(inputs), number=1, repeat=_REPEATS)
        answers = [run(batch) for batch in reference.batches]
        if not all(answer.isfinite().all() for answer in answers):
            raise MoQError("some of its answers are not finite")
        proof = reference.prove(answers)
        engines[name] = Measured(size, 1e3 * statistics.median(times), proof, command)

    with torch.inference_mode(), explained("the checkpoint cannot be run in PyTorch"):
        size = checkpoint.verified.float_bytes
        measure("PyTorch", size, "", lambda batch: model(**batch)[0])
    missing: dict[str, str] = {}
    flavors: list[Flavor] = ["weight-only", "int8", "nbits"]
    loaders: dict[str, Callable[[Path, int], Model]] = {"ONNX Runtime": onnx_runtime}
    try:
        require("openvino", "openvino")
        loaders["OpenVINO"] = openvino_runtime
        # qdq is OpenVINO's, and multiplies signed integers of 8 bits, which other
        # processors do not do exactly.
        if target_here() == "vnni":
            flavors.append("qdq")
    except MoQError as error:
        missing["OpenVINO"] = str(error)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "onnx"
        found = export_onnx(
            folder,
            out,
            flavors=flavors,
            data=data,
            max_length=max_length,
            tolerance=math.inf,
        )
        candidates = list(product(loaders.items(), found.files.items()))
        for (runtime, load), (flavor, file) in progress(candidates, "bench"):
            # qdq is slow in ONNX Runtime, which has int8.
            if (runtime, flavor) == ("ONNX Runtime", "qdq"):
                continue
            name = f"{runtime} {flavor}"
            command = f"{file} with {runtime} (moq-hf export {folder} --to onnx OUT --flavors {flavor})"
            try:
                run = load(out / file, torch.get_num_threads())
                measure(name, found.bytes[flavor], command, run)
            # Whatever a runtime raises is a line of the table.
            except Exception as error:
                missing[name] = f"failed: {one_line(error, named=True)}"
    return Benchmark(f"{batch} x {sequence}", engines, missing, max_loss)
