"""What `moq-hf bench` found: its tables, and which file to deploy."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .bench_engines import NAMED
from .proof import Proof


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
        speed: Median over the rounds of the time of float PyTorch, divided by this one's in the same round; None if
            float PyTorch failed.
        speed_over_onnx: The same against the float model in ONNX Runtime.
    """

    engine: str
    batch: int
    sequence: int
    p50: float
    p90: float
    examples_per_second: float
    speed: float | None
    speed_over_onnx: float | None

    @property
    def shape(self) -> str:
        """Examples and tokens, as the tables have them."""
        return f"{self.batch} x {self.sequence}"


@dataclass(frozen=True)
class Recommendation:
    """Which engine to deploy.

    Attributes:
        overall: The fastest over all shapes, by the geometric mean of its medians; None if none is accurate enough.
        by_shape: The fastest at each shape.
        refused: By engine, how much of a metric it loses, where that is more than `max_loss`.
        faster: Engines without the checkpoint's integers that are faster than `overall`.
    """

    overall: str | None
    by_shape: dict[str, str]
    refused: dict[str, float]
    faster: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` measured.

    Attributes:
        threads: Of each engine.
        activation_bits: Of the int8 flavor.
        bytes: Of the files that each engine loads.
        memory: Resident bytes of each engine's process after all shapes ran.
        timings: One for each engine and shape.
        machine: Processor, its instructions, the load before the measurement (processes, over a minute) and versions.
        missing: Why an engine has no figures: it failed, or was left out.
        compared: Number of sentences that all engines answered.
        checkpoint_metrics: GLUE metrics of the checkpoint in PyTorch; empty where the data has no labels.
        proofs: How each engine's answers compare with those.
        max_loss: Of a metric, for a recommendation.
        clock: "wall", or "cpu".
    """

    threads: int
    activation_bits: int
    bytes: dict[str, int]
    memory: dict[str, int]
    timings: tuple[Timing, ...]
    machine: dict[str, str]
    missing: dict[str, str]
    compared: int
    checkpoint_metrics: dict[str, float]
    proofs: dict[str, Proof]
    max_loss: float
    clock: str

    def recommendation(self) -> Recommendation:
        """The fastest engines with the checkpoint's integers that are accurate enough."""
        speeds = self._speeds()
        losses = {name: self._loss(name) for name in speeds if NAMED[name].ours}
        # A loss that is not a number proves nothing.
        refused = {name: loss for name, loss in losses.items() if not loss <= self.max_loss}
        legal = [name for name in losses if name not in refused]
        if not legal:
            return Recommendation(None, {}, refused, ())
        means = {name: statistics.geometric_mean(found.values()) for name, found in speeds.items()}
        best = max(legal, key=means.__getitem__)
        return Recommendation(
            overall=best,
            by_shape={shape: max(legal, key=lambda name: speeds[name][shape]) for shape in speeds[best]},
            refused=refused,
            faster=tuple(name for name in means if not NAMED[name].ours and means[name] > means[best]),
        )

    def table(self) -> str:
        """Markdown: sizes and answers, times, and the recommendation."""
        return "\n".join([*self._machine(), "", *self._answers(), "", *self._times(), "", *self._recommended()])

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {**asdict(self), "recommendation": asdict(self.recommendation())}

    def _speeds(self) -> dict[str, dict[str, float]]:
        """What engines are compared by, by engine and shape: the larger the faster."""
        found: dict[str, dict[str, float]] = {}
        for timing in self.timings:
            # At one shape either all have a speed or none has.
            speed = 1 / timing.p50 if timing.speed is None else timing.speed
            found.setdefault(timing.engine, {})[timing.shape] = speed
        return found

    def _loss(self, engine: str) -> float:
        """The largest loss of a metric against the checkpoint in PyTorch; 0 where none was measured."""
        found = self.proofs[engine].metrics
        # 0.80 - 0.79 is 0.01, not the float above it.
        losses = [round(value - found[name], 9) for name, value in self.checkpoint_metrics.items()]
        return max(losses, key=lambda loss: math.inf if math.isnan(loss) else loss, default=0.0)

    def _mean(self, engine: str, field: str) -> str:
        """A speed's geometric mean over the shapes."""
        speeds = [getattr(timing, field) for timing in self.timings if timing.engine == engine]
        return "-" if None in speeds else f"{statistics.geometric_mean(speeds):.2f}"

    def _machine(self) -> list[str]:
        names = ("processor", "instructions", "cores", "load")
        processor, known, cores, load = (self.machine[name] for name in names)
        made_by = [f"{name} {value}" for name, value in self.machine.items() if name not in names]
        return [
            f"{processor}, cores: {cores}, load before: {load}, threads: {self.threads}, clock: {self.clock}",
            f"instructions: {known or 'unknown'}",
            ", ".join(made_by),
        ]

    def _answers(self) -> list[str]:
        """A line per engine: sizes, speeds over all shapes, and its answers."""
        names = list(self.checkpoint_metrics)
        head = ["engine", "model, MB", "resident, MB", "speed over PyTorch", "over ONNX", "largest difference"]
        rows = [[*head, "agreement", *names]]
        if names:
            rows.append(["checkpoint", *[""] * 6, *(f"{self.checkpoint_metrics[name]:.4f}" for name in names)])
        for engine, proof in self.proofs.items():
            sizes = [f"{self.bytes[engine] / 1e6:.1f}", f"{self.memory[engine] / 1e6:.0f}"]
            speeds = [self._mean(engine, field) for field in ("speed", "speed_over_onnx")]
            agreement = "-" if proof.agreement is None else f"{proof.agreement:.4f}"
            answers = [f"{proof.largest_difference:.2e}", agreement, *(f"{proof.metrics[name]:.4f}" for name in names)]
            rows.append([engine, *sizes, *speeds, *answers])
        return [*_markdown(rows), *(f"| {name} | {reason} |" for name, reason in self.missing.items())]

    def _times(self) -> list[str]:
        """A line per engine: its times at each shape."""
        rows = [["batch x sequence", *dict.fromkeys(timing.shape for timing in self.timings)]]
        for engine in self.proofs:
            rows.append([engine, *(_cell(timing) for timing in self.timings if timing.engine == engine)])
        return ["p50 / p90 in ms (speed over float PyTorch, over float ONNX Runtime)", "", *_markdown(rows)]

    def _recommended(self) -> list[str]:
        """What to deploy, what is faster where, and what is not accurate enough."""
        found, speeds = self.recommendation(), self._speeds()
        if found.overall is None:
            lines = ["Deploy here: none of the files, since no engine with the checkpoint's integers is left"]
        else:
            lines = [f"Deploy here: {self._described(found.overall)}"]
            for shape, name in found.by_shape.items():
                if name != found.overall:
                    what, ratio = self._deployed(name), speeds[name][shape] / speeds[found.overall][shape]
                    lines.append(f"Faster at {shape}, {ratio:.2f} times: {what}")
        lines += [f"Faster, without the checkpoint's integers: {self._described(name)}" for name in found.faster]
        lines += [f"Loses more than {self.max_loss:g}: {self._described(name)}" for name in found.refused]
        if self.clock == "wall" and float(self.machine["load"]) + self.threads > int(self.machine["cores"]) + 0.5:
            lines.append("Other programs ran: that favors engines with short passes. Measure on an idle machine")
        if self.checkpoint_metrics:
            return [*lines, f"The checkpoint in PyTorch: {_listed(self.checkpoint_metrics)}"]
        return [*lines, "No accuracy was measured: give sentences with labels (--validation_file)"]

    def _described(self, name: str) -> str:
        """An engine, its speed and its accuracy."""
        proof, mean = self.proofs[name], self._mean(name, "speed")
        speed = "" if mean == "-" else f", {mean} times as fast as float PyTorch"
        difference = f"largest difference {proof.largest_difference:.2e} over {self.compared} sentences"
        return f"{self._deployed(name)}{speed}; {_listed(proof.metrics) or difference}"

    def _deployed(self, name: str) -> str:
        """What it is that would be deployed."""
        return NAMED[name].to_deploy(self.activation_bits) if NAMED[name].ours else name


def _cell(timing: Timing) -> str:
    speeds = ", ".join("-" if speed is None else f"{speed:.2f}" for speed in (timing.speed, timing.speed_over_onnx))
    return f"{timing.p50:.1f} / {timing.p90:.1f} ({speeds})"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first row is its head, padded so that a terminal shows columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return [lines[0], f"|{'|'.join(' --- ' for _ in widths)}|", *lines[1:]]


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
