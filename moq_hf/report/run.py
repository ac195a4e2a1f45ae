"""A finished run, read from its folder."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import LARGEST, MoQConfig
from ..errors import MoQConfigError, MoQError
from ..metrics import metrics_in
from ..packed.state import STATE_NAME
from ..packed.verify import recorded
from ..reading import Entry, read_json
from ..schedule import FLOAT_BITS, begins_in_float
from ..training.choice import Choice
from ..transformers_seams import CALLBACKS_KEY

# What a run logs of MoQ, with the range of its values.
_RANGES = {
    "mean_bits": (0.0, FLOAT_BITS),
    "bits": (1.0, FLOAT_BITS),
    "eigenvalue": (0.0, 1.0),
    "size_mb": (0.0, math.inf),
}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        directory: Where it was read from.
        config: What it followed.
        steps: Optimizer steps taken.
        log: The Trainer's log, entry by entry; without it, the switches of the packed model's history.
        float_size_mb: Size of the parameters before anything was quantized, in megabytes; None if it is not recorded.
        quantized: Name to value of the last evaluation's metrics, without `eval_`.
        in_float: The same of the float run beside it; empty if there is none.
        float_log: The log of that run.
        has_log: Whether `log` is the Trainer's.
        choice: The bits that a budget gave the blocks; None without one.
    """

    directory: Path
    config: MoQConfig
    steps: int
    log: Sequence[Mapping[str, Any]]
    float_size_mb: float | None
    quantized: Mapping[str, float]
    in_float: Mapping[str, float]
    float_log: Sequence[Mapping[str, Any]]
    has_log: bool = True
    choice: Choice | None = None

    def series(self, name: str, in_float: bool = False) -> tuple[list[int], list[float]]:
        """The steps at which a scalar was logged, here or in the float run, and its values."""
        log = self.float_log if in_float else self.log
        found = [(entry["step"], entry[name]) for entry in log if isinstance(entry.get(name), (int, float))]
        return [step for step, _ in found], [value for _, value in found]

    def by_block(self, kind: str) -> dict[str, tuple[list[int], list[float]]]:
        """Block name to the series of `moq/<kind>/<block>`, in model order as far as the log shows it."""
        start = f"moq/{kind}/"
        found: dict[str, tuple[list[int], list[float]]] = {}
        # One walk for all blocks: a log may have as many lines as there are blocks, or more.
        for entry in self.log:
            for key, value in entry.items():
                if key.startswith(start):
                    steps, values = found.setdefault(key.removeprefix(start), ([], []))
                    if isinstance(value, (int, float)):
                        steps.append(entry["step"])
                        values.append(value)
        return {name: found[name] for name in sorted(found, key=natural)}

    @property
    def quantized_share(self) -> float | None:
        """The part of the model's parameters that is quantized, 0 to 1; None if the log is of an earlier version."""
        shares = self.series("moq/quantized_share")[1]
        return shares[-1] if shares else None

    def mean_bits(self) -> tuple[list[int], list[float]]:
        """The steps at which bits per parameter of the whole model were logged, and those bits.

        A log of an earlier version has bits per quantized weight under that name: they are given if it has no others.
        """
        whole = self.quantized_share is not None
        logged = [e for e in self.log if "moq/mean_bits" in e and ("moq/quantized_share" in e) == whole]
        return [entry["step"] for entry in logged], [entry["moq/mean_bits"] for entry in logged]

    def switches(self) -> list[int]:
        """The steps at which any block changed its bits."""
        start = FLOAT_BITS if begins_in_float(self.config) else self.config.start_bits
        steps = {
            step
            for at, bits in self.by_block("bits").values()
            for step, before, now in zip(at, [start, *bits], bits, strict=False)
            if now != before
        }
        return sorted(steps)


def read_run(directory: str | os.PathLike[str], float_directory: str | os.PathLike[str] | None = None) -> Run:
    """Read the folder of a finished run.

    Args:
        directory: The run's `output_dir`, or one of its checkpoints.
        float_directory: Of the float run to compare with; by default the folder `float` in `directory`, where
            `run_glue_moq.py --float_baseline` puts it, if it is there.

    Raises:
        MoQError: There is neither a trainer_state.json nor a packed model, it is not a run with MoQ, `float_directory`
            has no metrics, or a file is not as it was written; names the file and the key.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise MoQError(f"{directory} is not a folder; give the output_dir of a finished run")
    float_run = Path(float_directory) if float_directory is not None else directory / "float"
    in_float = _metrics(float_run)
    if float_directory is not None and not in_float:
        raise MoQError(f"{float_directory} has neither eval_results.json nor an evaluation in a trainer_state.json")
    states = _states(directory)
    if not states:
        packed = [folder for folder in (directory / "quantized", directory) if (folder / STATE_NAME).is_file()]
        if packed:
            return _packed_run(packed[0], directory, in_float, _log_of(float_run))
        raise MoQError(
            f"{directory} has no trainer_state.json, nor has a checkpoint in it, nor is a packed model there or in its "
            "folder quantized: call trainer.save_state() after training, or let the Trainer save checkpoints"
        )
    state = read_json(states[0])
    callbacks = state.get(CALLBACKS_KEY)
    entry = callbacks if callbacks.is_null else callbacks.get("MoQCallback")
    log = [] if entry.is_null else _log(state)
    if not any("moq/mean_bits" in line for line in log):
        raise MoQError(f"{directory} is not a run with MoQ: its trainer_state.json has no bits")
    saved = entry["attributes"]["saved"]
    size = saved if saved.is_null else saved.get("float_size_mb")
    return Run(
        directory,
        _config(entry["args"]["config"]),
        state["global_step"].whole(),
        log,
        None if size.is_null else size.number(0.0),
        _metrics(directory),
        in_float,
        _log_of(float_run),
        choice=None if saved.is_null else Choice.read(saved.get("choice")),
    )


def _packed_run(
    packed: Path, directory: Path, in_float: Mapping[str, float], float_log: Sequence[Mapping[str, Any]]
) -> Run:
    """What the packed model's state records of a run whose Trainer saved none.

    Raises:
        MoQError: The model was quantized without a run.
    """
    found = recorded(packed)
    state = Entry(found.state, str(packed / STATE_NAME))
    if state["config"].is_null or state["step"].is_null:
        raise MoQError(f"{state.where} is of a model that was quantized without a run, or without its controller")
    log: dict[int, dict[str, Any]] = {}
    for switch in found.state["history"]:
        line = log.setdefault(switch["step"], {"step": switch["step"]})
        line[f"moq/bits/{switch['block']}"] = switch["bits"]
        if switch["eigenvalue"] is not None:
            line[f"moq/eigenvalue/{switch['block']}"] = switch["eigenvalue"]
    steps = state["step"].whole()
    share = found.parameters[0] / found.parameters[1]
    end = {"step": steps, "moq/mean_bits": found.mean_bits, "moq/quantized_share": share}
    if found.file_bytes:
        end["moq/size_mb"] = found.file_bytes / 1e6
    logged = {name: metrics_in(found.state.get(name) or {}) for name in ("metrics", "float_metrics")}
    return Run(
        directory,
        _config(state["config"]),
        steps,
        [*(log[step] for step in sorted(log)), end],
        found.float_bytes / 1e6 if found.file_bytes else None,
        _metrics(directory) or logged["metrics"],
        in_float or logged["float_metrics"],
        float_log,
        has_log=False,
        choice=Choice.read(state.get("choice")),
    )


def _config(entry: Entry) -> MoQConfig:
    try:
        return MoQConfig.from_dict({name: value.value for name, value in entry.mapping().items()})
    except MoQConfigError as error:
        raise MoQError(f"{entry.where}: {entry.key}: {error}") from error


def _states(directory: Path) -> list[Path]:
    """The trainer_state.json of a run and of its checkpoints, the newest first."""
    checkpoints = sorted(directory.glob("checkpoint-*/trainer_state.json"), key=lambda path: natural(str(path)))
    return [path for path in (directory / "trainer_state.json", *reversed(checkpoints)) if path.is_file()]


def _log(state: Entry) -> list[dict[str, Any]]:
    """The log in a `trainer_state.json`, its lines checked where they will be drawn."""
    history = state.get("log_history")
    lines = [] if history.is_null else history.items()
    for line in lines:
        line["step"].whole()
        for name, entry in line.mapping().items():
            if name.startswith("moq/"):
                entry.number(*_RANGES.get(name.split("/")[1], ()))
            elif isinstance(entry.value, int) and not isinstance(entry.value, bool):
                entry.whole(-LARGEST)
    return [line.value for line in lines]


def _log_of(directory: Path) -> list[dict[str, Any]]:
    """The log of a run; empty where there is none."""
    found = _states(directory)
    return _log(read_json(found[0])) if found else []


def _metrics(directory: Path) -> dict[str, float]:
    """Those of eval_results.json, else of the last evaluation in the log."""
    path = directory / "eval_results.json"
    evaluations = (line for line in reversed(_log_of(directory)) if any(key.startswith("eval_") for key in line))
    logged = read_json(path).value if path.is_file() else next(evaluations, {})
    return metrics_in({name: value for name, value in logged.items() if name.startswith("eval_")})


def natural(name: str) -> list[tuple[int, str]]:
    """A key that puts layer.2 before layer.10.

    >>> sorted(["layer.10", "layer.2"], key=natural)
    ['layer.2', 'layer.10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
