"""`benchmark`: latency, throughput, memory and accuracy of a packed checkpoint in the runtimes for a CPU."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import IO, cast

import numpy as np
import psutil
import torch

from ..errors import MoQError
from .bench_engines import FLOAT, NAMED, ONNX_FLOAT, bytes_of, prepare, version_of
from .bench_result import Benchmark, Timing
from .bench_worker import CLOCKS
from .data import SENTENCES, Data
from .environment import machine, versions
from .loading import Checkpoint, load_checkpoint, takes_pictures
from .proof import Proof, Reference

_WORKER = Path(__file__).with_name("bench_worker.py")
MAX_LOSS = 0.01


def benchmark(
    directory: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (1, 8, 32),
    sequences: Sequence[int] = (16, 64, 128),
    threads: int | None = None,
    activation_bits: int | None = None,
    repeats: int = 20,
    data: Data = SENTENCES,
    max_length: int = 128,
    max_loss: float = MAX_LOSS,
    clock: str = "wall",
) -> Benchmark:
    """Measure a packed checkpoint in PyTorch, ONNX Runtime and OpenVINO, and say which file to deploy on this CPU.

    Each engine has a process of its own. They run in turn, one forward pass each, so that what else the machine does
    falls upon all of them alike. An engine that fails is noted, and the others go on.

    Args:
        directory: What `save_quantized` wrote.
        batches: Batch sizes.
        sequences: Tokens per example, without padding.
        threads: Of each engine; None is PyTorch's number.
        activation_bits: Of the int8 model, 2 to 8; None is what the model was trained for, else 8.
        repeats: Rounds per shape, after one that does not count.
        data: What all engines answer, for their accuracy.
        max_length: Tokens of an example of the data, at most.
        max_loss: What a recommended file may lose of each metric, against the checkpoint in PyTorch.
        clock: "wall", or "cpu", the process's own time, for one thread on a machine that does other things too.

    Raises:
        MoQError: The checkpoint cannot be exported, an argument does not fit it, or every engine failed.
    """
    folder, threads, made_on = Path(directory), threads or torch.get_num_threads(), _made_on()
    _check_clock(clock, threads)
    checkpoint = _load(folder, max(sequences))
    reference = Reference(checkpoint, data, max_length)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        prepared = prepare(folder, checkpoint.model, out, made_on["instructions"], activation_bits)
        sizes = {name: bytes_of(path) for name, path in prepared.paths.items()}
        _write_questions(reference, out / "questions.npz")
        with _running(prepared.paths, threads, clock, out) as workers:
            timings = [timing for shape in product(batches, sequences) for timing in _measure(workers, *shape, repeats)]
            memory = workers.ask("memory")
            proofs = _prove(workers, reference)
    return Benchmark(
        threads=threads,
        activation_bits=prepared.activation_bits,
        bytes={name: sizes[name] for name in proofs},
        memory={name: int(memory[name]) for name in proofs},
        timings=tuple(timing for timing in timings if timing.engine in proofs),
        machine=made_on,
        missing=prepared.missing | workers.failed,
        compared=sum(len(answer) for answer in reference.answers),
        checkpoint_metrics=reference.metrics,
        proofs=proofs,
        max_loss=max_loss,
        clock=clock,
    )


def _made_on() -> dict[str, str]:
    """The machine, what it does beside this, and the versions."""
    packages = {name: version_of(name) for name in ("onnxruntime", "openvino")}
    return {
        **machine(),
        "load": f"{psutil.getloadavg()[0]:.1f}",
        **versions("python", "torch", "transformers", "moq_hf"),
        **{name: version for name, version in packages.items() if version is not None},
    }


def _check_clock(clock: str, threads: int) -> None:
    if clock not in CLOCKS or (clock == "cpu" and threads > 1):
        raise MoQError(f"clock {clock!r} with {threads} threads: legal are wall, and cpu with one thread")


def _load(folder: Path, sequence: int) -> Checkpoint:
    """A checkpoint of texts that takes so many tokens.

    Raises:
        MoQError: It is of another kind, or takes fewer.
    """
    checkpoint = load_checkpoint(folder)
    if takes_pictures(checkpoint.model):
        raise MoQError(f"{folder}: models of texts are measured, not {type(checkpoint.model).__name__}")
    limit = getattr(checkpoint.model.config, "max_position_embeddings", math.inf)
    if sequence > limit:
        raise MoQError(f"sequence {sequence} is longer than the {limit} positions of the model")
    return checkpoint


def draw(result: Benchmark, path: str | os.PathLike[str]) -> None:
    """A PNG: the speed of each engine against float PyTorch, a group of bars per shape.

    Raises:
        MoQError: matplotlib is not installed, or float PyTorch failed.
    """
    if FLOAT not in result.bytes:
        raise MoQError(f"no speeds to draw: {FLOAT} {result.missing[FLOAT]}")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise MoQError("matplotlib is not installed: pip install 'moq_hf[report]'") from None
    shapes, engines = list(dict.fromkeys(t.shape for t in result.timings)), list(result.bytes)
    figure = Figure(figsize=(2 + 0.24 * len(shapes) * len(engines), 4), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=[colormaps["tab20"](index) for index in range(20)])
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        speeds = [t.speed or 0.0 for t in result.timings if t.engine == engine]
        axes.bar([place + index * width for place in range(len(shapes))], speeds, width, label=engine)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(shapes))], shapes)
    axes.set_xlabel("batch x sequence")
    axes.set_ylabel("speed, float PyTorch is 1")
    axes.set_title(f"threads: {result.threads}")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=100, format="png")


class _Worker:
    """A process of `bench_worker.py`."""

    def __init__(self, kind: str, path: Path, threads: int, clock: str, questions: Path, answers: Path) -> None:
        # A fresh process must find the package that this one runs.
        search = os.pathsep.join(filter(None, (str(_WORKER.parents[2]), os.environ.get("PYTHONPATH"))))
        self.answers = answers
        # A file takes any number of warnings; a pipe that nobody reads would stop the process.
        self._said = answers.with_suffix(".log")
        words = map(str, (_WORKER, kind, path, threads, clock, questions, answers))
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": str(threads)},
            )

    def ask(self, question: str) -> float:
        """The number in its answer.

        Raises:
            MoQError: The process ended; the text is the last line of what it said.
        """
        try:
            stdin = cast(IO[str], self._process.stdin)
            stdin.write(question + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._error() from None
        return float(self.answer())

    def answer(self) -> str:
        """The next line that it writes.

        Raises:
            MoQError: The process ended; the text is the last line of what it said.
        """
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise self._error()
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _error(self) -> MoQError:
        status, said = self._process.wait(), self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        # What it said before it was killed is not why.
        lines = [line.strip() for line in said if line.strip() and status > 0]
        return MoQError(lines[-1] if lines else f"ended with status {status}")


class _Workers:
    """Those that run; one that fails is ended, and the others go on.

    Attributes:
        running: By the engine's name.
        failed: Why the others do not.
    """

    def __init__(self) -> None:
        self.running: dict[str, _Worker] = {}
        self.failed: dict[str, str] = {}

    def start(self, name: str, worker: _Worker) -> None:
        """Wait until it has loaded its model."""
        self.running[name] = worker
        try:
            worker.answer()
        except MoQError as error:
            self.fail(name, str(error))

    def ask(self, question: str) -> dict[str, float]:
        """The answer of each that runs, in turn."""
        found = {}
        for name, worker in list(self.running.items()):
            try:
                found[name] = worker.ask(question)
            except MoQError as error:
                self.fail(name, str(error))
        return found

    def fail(self, name: str, reason: str) -> None:
        """End one."""
        self.failed[name] = f"failed: {reason}"
        self.running.pop(name).close()


@contextmanager
def _running(paths: Mapping[str, Path], threads: int, clock: str, out: Path) -> Iterator[_Workers]:
    """A worker for each engine and what it loads."""
    workers = _Workers()
    try:
        for index, (name, path) in enumerate(paths.items()):
            files = (out / "questions.npz", out / f"answers-{index}.npz")
            workers.start(name, _Worker(NAMED[name].kind, path, threads, clock, *files))
        yield workers
    finally:
        for worker in workers.running.values():
            worker.close()


def _measure(workers: _Workers, batch: int, sequence: int, repeats: int) -> list[Timing]:
    question = f"{batch} {sequence}"
    workers.ask(question)
    rounds = [workers.ask(question) for _ in range(repeats)]
    found = []
    for name in workers.running:
        seconds = sorted(times[name] for times in rounds)
        p50, p90 = statistics.median(seconds), seconds[math.ceil(0.9 * len(seconds)) - 1]
        speeds = (
            statistics.median(times[base] / times[name] for times in rounds) if base in workers.running else None
            for base in (FLOAT, ONNX_FLOAT)
        )
        found.append(Timing(name, batch, sequence, 1e3 * p50, 1e3 * p90, batch / p50, *speeds))
    return found


def _write_questions(reference: Reference, path: Path) -> None:
    """The batches, as `bench_worker.py` reads them."""
    arrays = {
        f"{index}.{name}": tensor.numpy()
        for index, batch in enumerate(reference.batches)
        for name, tensor in batch.items()
    }
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _prove(workers: _Workers, reference: Reference) -> dict[str, Proof]:
    """How the answers of each engine compare with the checkpoint's.

    Raises:
        MoQError: Every engine failed.
    """
    proofs = {}
    for name in workers.ask("answer"):
        with np.load(workers.running[name].answers) as stored:
            found = [torch.from_numpy(stored[str(index)]) for index in range(len(reference.batches))]
        if all(bool(answer.isfinite().all()) for answer in found):
            proofs[name] = reference.prove(found)
        else:
            workers.fail(name, "some of its answers are not finite")
    if not proofs:
        raise MoQError(f"every engine failed: {', '.join(' '.join(item) for item in workers.failed.items())}")
    return proofs


def write_json(result: Benchmark, path: str | os.PathLike[str]) -> None:
    """Write the result as JSON."""
    Path(path).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
