"""`benchmark`: the exported files of a packed checkpoint in ONNX Runtime and OpenVINO, beside PyTorch, on this CPU."""

import math
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
# Runs a model on a batch and gives its first output.
Model = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Measured:
    """One engine.

    Attributes:
        bytes: Of the weights in PyTorch, of the file in a runtime.
        milliseconds: Median time of a forward pass, by shape ("8 x 128": examples and
            tokens; "8 x 1 after 128": of a decoder, with so many tokens in its cache).
        speed: Geometric mean over the shapes of PyTorch's time divided by this one's.
        proof: How its answers compare with the checkpoint's in PyTorch.
        command: How to make the file and what loads it; "" for PyTorch.
    """

    bytes: int
    milliseconds: Mapping[str, float]
    speed: float
    proof: Comparison
    command: str


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` measured.

    Attributes:
        engines: Figures of each engine by its name, PyTorch first.
        missing: Why an engine has no figures, by its name.
        threads: Threads of each engine.
        max_loss: The most that a recommended file may lose of each metric.
    """

    engines: Mapping[str, Measured]
    missing: Mapping[str, str]
    threads: int
    max_loss: float

    def recommended(self) -> str | None:
        """The fastest engine whose file loses at most `max_loss` of each metric; None if there is none.

        Without metrics it is the fastest one with the checkpoint's outputs.
        """
        legal = [
            name
            for name, measured in self.engines.items()
            if measured.command and self._is_accurate(measured)
        ]
        return max(legal, key=lambda name: self.engines[name].speed, default=None)

    def _is_accurate(self, measured: Measured) -> bool:
        before = self.engines["PyTorch"].proof.metrics
        if not before:
            return measured.proof.largest_difference <= TOLERANCE
        # Rounded, because 0.80 - 0.79 is a little more than 0.01 in floats. A loss that
        # is NaN is not accurate.
        return all(
            round(value - measured.proof.metrics[name], 9) <= self.max_loss
            for name, value in before.items()
        )

    def table(self) -> str:
        """A line per engine, and what to deploy."""
        torch_engine = self.engines["PyTorch"]
        shapes = [f"{shape}, ms" for shape in torch_engine.milliseconds]
        proofs = ["difference", "agreement", *torch_engine.proof.metrics]
        rows = [["", "MB", *shapes, "speed", *proofs]]
        for name, measured in self.engines.items():
            size = f"{measured.bytes / 1e6:.2f}"
            times = [f"{time:.1f}" for time in measured.milliseconds.values()]
            speed = f"{measured.speed:.2f}"
            rows.append([name, size, *times, speed, *measured.proof.cells()])
        missing = [f"{name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(
            [table(rows), *missing, f"threads: {self.threads}", "", self._sentence()]
        )

    def _sentence(self) -> str:
        best = self.recommended()
        metrics = self.engines["PyTorch"].proof.metrics
        hint = (
            ""
            if metrics
            else " Files with other outputs are judged by their accuracy: give sentences with labels "
            "(--validation_file); of a language model agreement says it."
        )
        wanted = f"lost at most {self.max_loss:g}" if metrics else "had its outputs"
        if best is None:
            return f"Deploy the checkpoint in PyTorch: no exported file ran and {wanted}.{hint}"
        one = self.engines[best]
        answers = [
            f"{name} {one.proof.metrics[name]:.4f} (PyTorch {value:.4f})"
            for name, value in metrics.items()
        ]
        accuracy = ", ".join(answers) or "its outputs are the checkpoint's"
        return f"Deploy {one.command}: {one.speed:.2f} times as fast as PyTorch; {accuracy}.{hint}"


def benchmark(
    directory: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (1, 8),
    sequences: Sequence[int] = (16, 128),
    threads: int | None = None,
    activation_bits: int | None = None,
    repeats: int = 20,
    data: Data = SENTENCES,
    max_length: int = 128,
    max_loss: float = MAX_LOSS,
) -> Benchmark:
    """Measure the exported files of a packed checkpoint, and say which one to deploy on this CPU.

    An engine that fails is noted, and the others go on.

    Args:
        directory: What `save_quantized` wrote.
        batches: Batch sizes.
        sequences: Tokens per example, without padding; of a decoder those in its cache,
            before the one that is computed. Cut where the model has fewer positions.
        threads: Of each engine; None is PyTorch's number.
        activation_bits: Of the int8 file, 2 to 8; None is what the model was trained
            for, else 8.
        repeats: Forward passes per shape, after one that does not count.
        data: What all engines answer, for their accuracy.
        max_length: Tokens of an example of the data, at most.
        max_loss: What a recommended file may lose of each metric, against the
            checkpoint in PyTorch.

    Raises:
        MoQError: The checkpoint cannot be exported, or an argument does not fit it.
    """
    folder = Path(directory)
    threads = threads or torch.get_num_threads()
    checkpoint = load_checkpoint(folder)
    model = checkpoint.model
    if takes_pictures(model):
        raise MoQError(
            f"{folder}: models of texts are measured, not {type(model).__name__}"
        )
    # The table shows the lengths that were run.
    decodes = decoder.has_cache(model)
    limit = most_tokens(checkpoint) - decodes
    sequences = sorted({min(tokens, limit) for tokens in sequences})
    reference = Reference(checkpoint, data, max_length)
    shapes: dict[str, Mapping[str, Tensor]] = {}
    asked = [decoder.inputs_after(model, batch, 0) for batch in reference.batches]
    engines: dict[str, Measured] = {}
    missing: dict[str, str] = {}

    def measure(name: str, size: int, command: str, load: Callable[[], Model]) -> None:
        try:
            run = load()
            times = {
                shape: _milliseconds(run, batch, repeats)
                for shape, batch in shapes.items()
            }
            answers = [run(batch) for batch in asked]
            if not all(answer.isfinite().all() for answer in answers):
                raise MoQError("some of its answers are not finite")
            proof = reference.prove(answers)
        # Whatever a runtime raises is a line of the table.
        except Exception as error:
            missing[name] = f"failed: {one_line(error, named=True)}"
            return
        base = engines["PyTorch"].milliseconds if engines else times
        speed = statistics.geometric_mean(base[shape] / times[shape] for shape in times)
        engines[name] = Measured(size, times, speed, proof, command)

    before = torch.get_num_threads()
    try:
        with explained("these batches, sequences or threads do not fit"):
            torch.set_num_threads(threads)
            for batch, tokens in product(batches, sequences):
                example = _batch(reference, batch, tokens + decodes)
                shape = f"{batch} x 1 after" if decodes else f"{batch} x"
                shapes[f"{shape} {tokens}"] = decoder.inputs_after(
                    model, example, tokens
                )
        run = torch.inference_mode()(partial(decoder.answer, model))
        measure("PyTorch", checkpoint.verified.float_bytes, "", lambda: run)
    finally:
        torch.set_num_threads(before)
    flavors: list[Flavor] = ["weight-only", "int8", "nbits"]
    loaders: dict[str, Callable[[Path, int], Model]] = {"ONNX Runtime": onnx_runtime}
    try:
        require("openvino", "openvino")
        # OpenVINO (2026.4) gives a decoder's first call, with an empty cache, no answers.
        if decodes:
            raise MoQError("left out: decoders are measured in ONNX Runtime")
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
            activation_bits=activation_bits,
            data=data,
            max_length=max_length,
            tolerance=math.inf,
        )
        candidates = list(product(loaders.items(), found.files.items()))
        for (runtime, load), (flavor, file) in progress(candidates, "bench"):
            # qdq is slow in ONNX Runtime, which has int8.
            if (runtime, flavor) != ("ONNX Runtime", "qdq"):
                bits = (
                    f" --activation_bits {found.activation_bits}"
                    if flavor == "int8"
                    else ""
                )
                command = f"{file} with {runtime} (moq-hf export {folder} --to onnx OUT --flavors {flavor}{bits})"
                measure(
                    f"{runtime} {flavor}",
                    found.bytes[flavor],
                    command,
                    partial(load, out / file, threads),
                )
    return Benchmark(engines, missing, threads, max_loss)


def _batch(reference: Reference, examples: int, tokens: int) -> dict[str, Tensor]:
    """Inputs `[examples, tokens]` without padding."""
    batch = {
        name: torch.full((examples, tokens), int(name == "attention_mask"))
        for name in reference.batches[0]
    }
    batch["input_ids"] = torch.arange(examples * tokens).view(examples, tokens) % 10
    return batch


def _milliseconds(run: Model, batch: Mapping[str, Tensor], repeats: int) -> float:
    run(batch)
    return 1e3 * statistics.median(
        timeit.repeat(lambda: run(batch), number=1, repeat=repeats)
    )
