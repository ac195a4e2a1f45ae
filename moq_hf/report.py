"""One HTML page about a finished run: curves from the Trainer's log, and the model card of what was delivered.

Nothing is measured here. A run is read from its folder: `trainer_state.json`, there or
in its newest checkpoint, and `eval_results.json`.
"""

import io
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import BaseModel, NonNegativeInt, with_config
from typing_extensions import TypedDict

from .errors import MoQError, explained, read_as, read_json, require
from .packed.card import RunFacts, began_at, facts_of_folder
from .packed.state import STATE_NAME, deploy_command
from .packed.verify import recorded
from .rendering import TEMPLATES, rendered
from .schedule import FLOAT_BITS, begins_in_float
from .text import evaluation_in, metrics_in
from .training.checkpoints import STATE_FILE, checkpoints, entry_of_moq, last_metrics
from .training.float_first import FOLDER, METRICS
from .training.resume import has_begun, saved_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "moq_report.html"
# The least range of the axis of a metric between 0 and 1.
_LEAST_HEIGHT = 0.05
# Steps and values.
Series = tuple[list[int], list[float]]


@with_config(extra="allow")
class _Line(TypedDict):
    step: NonNegativeInt


class _State(BaseModel):
    global_step: NonNegativeInt
    log_history: list[_Line] = []
    stateful_callbacks: dict[str, Any] = {}


@dataclass(frozen=True)
class Run(RunFacts):
    """A finished run; `quantized` has the metrics of its last evaluation.

    Attributes:
        directory: The folder that it was read from.
        steps: Optimizer steps taken.
        log: The Trainer's log, line by line.
        float_size_mb: Size of the parameters before anything was quantized, in
            megabytes.
        delivered: The folder of the delivered model; None if there is none.
    """

    directory: Path
    steps: int
    log: Sequence[Mapping[str, Any]]
    float_size_mb: float
    delivered: Path | None

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        with drawing():
            return _page(self)

    def series(self, name: str) -> Series:
        """The steps at which a number was logged, and its values, leaving out those that are not finite."""
        steps, values = [], []
        for line in self.log:
            for value in metrics_in({"value": line.get(name)}).values():
                steps.append(line["step"])
                values.append(value)
        return steps, values

    def last(self, name: str) -> float | None:
        """The last value of a number that was logged; None if there is none."""
        values = self.series(name)[1]
        return values[-1] if values else None

    @property
    def scores(self) -> list[str]:
        """The names of the metrics, without the loss."""
        return [name for name in self.quantized if name != "loss"]

    def by_block(self, kind: str) -> dict[str, Series]:
        """Block name to the series of `moq/<kind>/<block>` that has values, layer.2 before layer.10."""
        start = f"moq/{kind}/"
        names = {key for line in self.log for key in line if key.startswith(start)}
        series = {name: self.series(name) for name in sorted(names, key=_natural)}
        return {n.removeprefix(start): line for n, line in series.items() if line[0]}


def _natural(name: str) -> str:
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Read the folder of a finished run, and of the float run in its folder `float`, if there is one.

    Args:
        directory: The run's `output_dir`, or one of its checkpoints.

    Raises:
        MoQError: There is no trainer_state.json, the run is not one with MoQ, or a file
            was changed; names the file and the key.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise MoQError(
            f"{directory} is not a folder; give the output_dir of a finished run"
        )
    state = _read_state(directory)
    if state is None:
        way_out = "call trainer.save_state() after training, or let the Trainer save checkpoints"
        if (directory / STATE_NAME).is_file():
            way_out += (
                "; if this is what a run delivered, give the output_dir of the run"
            )
        raise MoQError(
            f"{directory} has no trainer_state.json, nor has a checkpoint in it: {way_out}"
        )
    log = state.log_history
    entry = entry_of_moq(state.stateful_callbacks)
    saved = saved_state(entry, f"{directory} is not as the Trainer wrote it")
    if saved is None or not any("moq/mean_bits" in line for line in log):
        raise MoQError(
            f"{directory} is not a run with MoQ: its trainer_state.json has no bits"
        )
    # Runs of 0.2 tell of a float phase by its evaluation alone, which is logged.
    phases = (
        line["step"]
        for line in log
        if any(name.startswith("float_eval_") for name in line)
    )
    told = {"float_steps": next(phases, None), "teacher_name": None}
    teaching = entry["attributes"].get("teaching", told)
    places = (directory / "quantized", directory)
    delivered = next((path for path in places if (path / STATE_NAME).is_file()), None)
    float_folder = directory / FOLDER
    return Run(
        directory=directory,
        config=saved["config"],
        steps=state.global_step,
        log=log,
        float_size_mb=saved["float_size_mb"],
        quantized=_metrics(directory, state, delivered),
        in_float=_metrics(float_folder, _read_state(float_folder)),
        float_step=teaching["float_steps"] if has_begun(saved) else None,
        choice=saved["choice"],
        teacher_given=teaching["teacher_name"],
        began=began_at(saved["config"], [step for step, *_ in saved["history"]]),
        delivered=delivered,
    )


def _read_state(directory: Path) -> _State | None:
    """Read the trainer_state.json of a run, or of its newest checkpoint; None if there is none.

    Raises:
        MoQError: It is damaged.
    """
    for folder in (directory, *checkpoints(directory)):
        path = folder / STATE_FILE
        if path.is_file():
            where = f"{path} is not as the Trainer wrote it"
            state: _State = read_as(_State, read_json(path), where)
            return state
    return None


def _metrics(
    directory: Path, state: _State | None, delivered: Path | None = None
) -> dict[str, float]:
    """Read the metrics of eval_results.json, or of the delivered model, or of the last evaluation in the log.

    Raises:
        MoQError: A file is damaged.
    """
    path = directory / METRICS
    found: Mapping[str, Any] = {}
    if path.is_file():
        found = read_json(path)
    elif delivered is not None:
        found = recorded(delivered).state["metrics"]
    if not found and state is not None:
        found = last_metrics(state.log_history)
    evaluated = {k: value for k, value in found.items() if k.startswith("eval_")}
    return evaluation_in(evaluated)


def write_report(
    directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Write `moq_report.html`, which needs no other file.

    Args:
        directory: The run's `output_dir`, or one of its checkpoints.
        out: Folder to write to; by default `directory`.

    Returns:
        The path of the page.

    Raises:
        MoQError: There is no finished run with MoQ, a file of it is damaged, or
            matplotlib or markdown-it-py is not installed.
    """
    run = read_run(directory)
    folder = run.directory if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(run._repr_html_(), encoding="utf-8")
    return page


def _page(run: Run) -> str:
    from markdown_it import MarkdownIt

    facts: dict[str, Any] = {
        "run": run,
        "found": None,
        "training": {},
        "deploy": None,
        "serve_with": None,
    }
    if run.delivered is not None:
        found = recorded(run.delivered)
        with explained(f"{run.delivered} is not as it was delivered"):
            facts |= facts_of_folder(found, run.delivered, str(run.delivered))
        facts["deploy"] = deploy_command(run.delivered)
    markdown = MarkdownIt("commonmark").enable("table")
    files = [path for path in run.directory.iterdir() if path.name != PAGE]
    written = max(path.stat().st_mtime for path in files)
    return rendered(
        "report.html",
        card=markdown.render(rendered("body.md", **facts)),
        date=datetime.fromtimestamp(written).strftime("%Y-%m-%d"),
        figures={title: _svg(figure) for title, figure in _figures(run).items()},
        **facts,
    )


def _svg(figure: "Figure") -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    drawn = stream.getvalue()
    return drawn[drawn.index("<svg") :]


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib to the report's look while figures are made and saved.

    Raises:
        MoQError: A library of the extra `report` is not installed.
    """
    require("report", "matplotlib", "markdown_it")
    import matplotlib

    with matplotlib.rc_context(fname=TEMPLATES / "report.mplstyle"):
        yield


def _figures(run: Run) -> dict[str, "Figure"]:
    """Draw the logged values; the keys are the titles of the figures."""
    bits = run.by_block("bits")
    loss = {"training": run.series("loss"), "evaluation": run.series("eval_loss")}
    curves = {
        "Sensitivity": ("eigenvalue over the largest", run.by_block("eigenvalue")),
        "Loss": ("loss", loss),
        "Metrics": (
            "metric",
            {name: run.series(f"eval_{name}") for name in run.scores},
        ),
    }
    figures: dict[str, Figure] = {}
    if bits:
        figures["Bits"] = _draw_bits(bits, run)
    for title, (ylabel, series) in curves.items():
        drawn = {name: line for name, line in series.items() if line[0]}
        if drawn:
            axes = _draw(ylabel, drawn, marker=".")
            _mark_drops(axes, bits)
            if title == "Metrics":
                _widen(axes)
            figures[title] = cast("Figure", axes.figure)
    return figures


def _draw(ylabel: str, series: Mapping[str, Series], **style: Any) -> "Axes":
    """Draw a line for each series."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    axes = Figure().add_subplot(xlabel="optimizer steps", ylabel=ylabel)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    shades = np.linspace(0.05, 0.8, len(series))
    axes.set_prop_cycle(color=colormaps["viridis"](shades))
    lines = []
    for name, (steps, values) in series.items():
        lines += axes.plot(steps, values, label=name, **style)
    # A model may have hundreds of blocks; the legend has room for 20.
    named = lines[:: math.ceil(len(lines) / 20)]
    axes.legend(handles=named, loc="upper left", bbox_to_anchor=(1.0, 1.02))
    return axes


def _draw_bits(series: Mapping[str, Series], run: Run) -> "Figure":
    """Draw the bits of each block, with one line for blocks that always have the same."""
    alike: dict[str, list[str]] = {}
    for name, line in series.items():
        alike.setdefault(repr(line), []).append(name)
    config = run.config
    in_float = begins_in_float(config)
    start = FLOAT_BITS if in_float else config.start_bits
    # Float is drawn one step above the largest number of bits.
    top = max(own.start_bits for own in config.variants().values()) + in_float
    shifts = 0.2 - 0.4 * (np.arange(len(alike)) + 0.5) / len(alike)
    drawn: dict[str, Series] = {}
    for shift, names in zip(shifts, alike.values(), strict=True):
        steps, bits = series[names[0]]
        heights = [min(value, top) + shift for value in (start, *bits, bits[-1])]
        drawn[_called(names, len(series))] = [0, *steps, run.steps], heights
    axes = _draw("bits", drawn, drawstyle="steps-post")
    lowest = int(min(min(bits) for _, bits in series.values()))
    labels = [*map(str, range(lowest, top)), "float" if in_float else str(top)]
    axes.set_yticks(range(lowest, top + 1), labels)
    return cast("Figure", axes.figure)


def _called(names: Sequence[str], count: int) -> str:
    """The label of a line that stands for several blocks."""
    if len(names) == 1:
        return names[0]
    if len(names) == count:
        return f"all {count} blocks"
    return f"{names[0]} and {len(names) - 1} more"


def _mark_drops(axes: "Axes", bits: Mapping[str, Series]) -> None:
    """Mark the steps at which bits fell, each with the bits from there on."""
    drops = _drops(bits)
    low, high = axes.get_xlim()
    for step, reached in drops.items():
        axes.axvline(step, color="gray", linestyle=":", linewidth=0.8)
        # If drops are close to each other, only the last one has a label.
        if any(0 < later - step < 0.02 * (high - low) for later in drops):
            continue
        axes.text(
            step,
            1.0,
            str(reached),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize="x-small",
            color="gray",
        )


def _drops(series: Mapping[str, Series]) -> dict[int, int]:
    """The steps at which some block got fewer bits than any had before, and these bits."""
    drops: dict[int, int] = {}
    pairs = [zip(steps, bits, strict=True) for steps, bits in series.values()]
    for step, bits in sorted(itertools.chain(*pairs)):
        if bits < min(drops.values(), default=FLOAT_BITS):
            drops[step] = int(bits)
    return drops


def _widen(axes: "Axes") -> None:
    """Give scores from 0 to 1 an axis of at least 5 points, so that noise looks like noise."""
    low, high = axes.get_ylim()
    if low >= 0 and high <= 1.05 and high - low < _LEAST_HEIGHT:
        middle = min((low + high) / 2, 1 - _LEAST_HEIGHT / 2)
        axes.set_ylim(middle - _LEAST_HEIGHT / 2, middle + _LEAST_HEIGHT / 2)
