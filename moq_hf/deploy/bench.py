"""`benchmark`: latency, throughput and memory of a packed checkpoint in PyTorch and in onnxruntime, on the CPU."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from ..errors import MoQError
from ..packed.verify import verify_quantized
from .environment import machine, versions
from .loading import load_model
from .onnx import FILE_NAMES, export_onnx
from .onnx_layers import Flavor

_WORKER = Path(__file__).with_name("bench_worker.py")
_FLAVORS: tuple[Flavor, ...] = ("float", "weight-only", "int8")


@dataclass(frozen=True)
class Timing:
    """One engine at one shape, in milliseconds.

    Attributes:
        engine: Its name in the table.
        batch: Examples.
        sequence: Tokens of each.
        p50: Median.
        p90: 90th percentile.
        examples_per_second: batch / p50.
        speed: Median over the rounds of the time of float PyTorch, which ran just before, divided by this one's.
    """

    engine: str
    batch: int
    sequence: int
    p50: float
    p90: float
    examples_per_second: float
    speed: float


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` measured.

    Attributes:
        threads: Of each engine.
        activation_bits: Of the int8 flavor.
        bytes: Of the model's files, by engine.
        memory: Resident bytes of the process after all shapes ran, by engine.
        timings: One for each engine and shape.
        machine: Processor and versions.
    """

    threads: int
    activation_bits: int
    bytes: dict[str, int]
    memory: dict[str, int]
    timings: tuple[Timing, ...]
    machine: dict[str, str]

    def table(self) -> str:
        """Markdown: sizes, then a line per shape with the milliseconds of each engine and its speed."""
        engines = list(self.bytes)
        lines = ["| engine | model, MB | resident, MB |", "| --- | --- | --- |"]
        lines += [f"| {e} | {self.bytes[e] / 1e6:.1f} | {self.memory[e] / 1e6:.0f} |" for e in engines]
        lines += ["", f"p50 / p90 in ms (speed against float PyTorch), threads: {self.threads}", ""]
        lines += [f"| batch x sequence | {' | '.join(engines)} |", f"|{' --- |' * (len(engines) + 1)}"]
        for shape in dict.fromkeys((t.batch, t.sequence) for t in self.timings):
            found = {t.engine: t for t in self.timings if (t.batch, t.sequence) == shape}
            cells = [f"{found[e].p50:.1f} / {found[e].p90:.1f} ({found[e].speed:.2f})" for e in engines]
            lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def benchmark(
    directory: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (1, 8, 32),
    sequences: Sequence[int] = (16, 64, 128),
    threads: int | None = None,
    activation_bits: int | None = None,
    repeats: int = 20,
) -> Benchmark:
    """Measure a packed checkpoint: float and packed PyTorch, ONNX float, weight-only and int8.

    Each engine has a process of its own. They run in turn, one forward pass each, so that what else the machine does
    falls upon all of them alike.

    Args:
        directory: What `save_quantized` wrote.
        batches: Batch sizes.
        sequences: Tokens per example, without padding.
        threads: Of each engine; None is PyTorch's number.
        activation_bits: Of the int8 model, 2 to 8; None is what the model was trained for, else 8.
        repeats: Rounds per shape, after one that does not count.

    Raises:
        MoQError: The checkpoint cannot be exported, a sequence is longer than the model takes, or an engine failed.
    """
    folder, threads = Path(directory), threads or torch.get_num_threads()
    packed_bytes = verify_quantized(folder).file_bytes
    model, tokenizer = load_model(folder)
    if tokenizer is None:
        raise MoQError(f"{folder}: models of texts are measured, not {type(model).__name__}")
    limit = getattr(model.config, "max_position_embeddings", math.inf)
    if max(sequences) > limit:
        raise MoQError(f"sequence {max(sequences)} is longer than the {limit} positions of the model")
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(Path(temporary, "float"))
        del model
        onnx = Path(temporary, "onnx")
        written = export_onnx(folder, onnx, flavors=_FLAVORS, activation_bits=activation_bits, tolerance=math.inf)
        engines = {"PyTorch float": ("torch", Path(temporary, "float")), "PyTorch packed": ("packed", folder)}
        engines |= {f"ONNX {flavor}": ("onnx", onnx / FILE_NAMES[flavor]) for flavor in _FLAVORS}
        sizes = {
            "PyTorch float": Path(temporary, "float", "model.safetensors").stat().st_size,
            "PyTorch packed": packed_bytes,
            **{f"ONNX {flavor}": written.bytes[flavor] for flavor in _FLAVORS},
        }
        with _running(engines, threads) as workers:
            shapes = [(batch, sequence) for batch in batches for sequence in sequences]
            timings = [timing for shape in shapes for timing in _measure(workers, *shape, repeats)]
            memory = {name: int(worker.ask("memory")) for name, worker in workers.items()}
    made_on = {**machine(), **versions("python", "torch", "transformers", "onnxruntime")}
    return Benchmark(threads, written.activation_bits, sizes, memory, tuple(timings), made_on)


def draw(result: Benchmark, path: str | os.PathLike[str]) -> None:
    """A PNG: the speed of each engine against float PyTorch, a group of bars per shape.

    Raises:
        MoQError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MoQError("matplotlib is not installed: pip install 'moq_hf[report]'") from None
    shapes = list(dict.fromkeys((t.batch, t.sequence) for t in result.timings))
    engines = list(result.bytes)
    figure = Figure(figsize=(2 + 1.2 * len(shapes), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        speeds = [
            t.speed for shape in shapes for t in result.timings if (t.engine, t.batch, t.sequence) == (engine, *shape)
        ]
        axes.bar([place + index * width for place in range(len(shapes))], speeds, width, label=engine)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(shapes))], [f"{batch} x {length}" for batch, length in shapes]
    )
    axes.set_xlabel("batch x sequence")
    axes.set_ylabel("speed, float PyTorch is 1")
    axes.set_title(f"threads: {result.threads}")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=100, format="png")


class _Worker:
    """A process of `bench_worker.py`."""

    def __init__(self, engine: str, path: Path, threads: int) -> None:
        # A fresh process must find the package that this one runs.
        search = os.pathsep.join(filter(None, (str(_WORKER.parents[2]), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), engine, str(path), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": str(threads)},
        )
        self._answer()

    def ask(self, question: str) -> float:
        """The number in its answer."""
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(question + "\n")
        stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            _, errors = self._process.communicate()
            raise MoQError(f"an engine of the benchmark failed: {errors.strip().splitlines()[-1:]}")
        return line


@contextmanager
def _running(engines: Mapping[str, tuple[str, Path]], threads: int) -> Iterator[dict[str, _Worker]]:
    """A worker for each engine and its path."""
    workers: dict[str, _Worker] = {}
    try:
        for name, (engine, path) in engines.items():
            workers[name] = _Worker(engine, path, threads)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _measure(workers: dict[str, _Worker], batch: int, sequence: int, repeats: int) -> list[Timing]:
    for worker in workers.values():
        worker.ask(f"{batch} {sequence}")
    rounds = [{name: worker.ask(f"{batch} {sequence}") for name, worker in workers.items()} for _ in range(repeats)]
    found = []
    for name in workers:
        seconds = sorted(times[name] for times in rounds)
        p50, p90 = statistics.median(seconds), seconds[math.ceil(0.9 * len(seconds)) - 1]
        speed = statistics.median(times["PyTorch float"] / times[name] for times in rounds)
        found.append(Timing(name, batch, sequence, 1e3 * p50, 1e3 * p90, batch / p50, speed))
    return found


def write_json(result: Benchmark, path: str | os.PathLike[str]) -> None:
    """Write the result as JSON."""
    Path(path).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
