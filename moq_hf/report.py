"""What a run did, as one page, from the Trainer's own log; matplotlib draws.

Nothing is measured here. A run is read from its folder: `trainer_state.json`, there or
in its newest checkpoint, and `eval_results.json`.
"""

import html
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, NonNegativeInt, with_config
from typing_extensions import TypedDict

from .config import MoQConfig
from .errors import MoQError, read_as, read_json, require
from .model.sizes import percent
from .packed.state import STATE_NAME, export_command
from .packed.verify import Verification, recorded
from .schedule import FLOAT_BITS, begins_in_float
from .text import float_after, megabytes, metric_rows, metrics_in, table
from .training.budget import Choice
from .training.checkpoints import STATE_FILE, checkpoints, entry_of_moq, last_metrics
from .training.float_first import FOLDER, METRICS
from .training.resume import saved_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "moq_report.html"
# Of the axis of a metric from 0 to 1.
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
class Run:
    """A finished run.

    Attributes:
        directory: Where it was read from.
        config: What it followed.
        steps: Optimizer steps taken.
        log: The Trainer's log, line by line.
        float_size_mb: Size of the parameters before anything was quantized, in
            megabytes.
        quantized: Name to value of the last evaluation's metrics, without `eval_`.
        in_float: The same of the float run beside it; empty if there is none.
        float_step: The last step of the float phase, where `in_float` is of its model;
            None if it is of a run of its own.
        choice: The bits that a budget gave the blocks; None without one.
        delivered: The folder of the model that it delivered; None if there is none.
    """

    directory: Path
    config: MoQConfig
    steps: int
    log: Sequence[Mapping[str, Any]]
    float_size_mb: float
    quantized: Mapping[str, float]
    in_float: Mapping[str, float]
    float_step: int | None
    choice: Choice | None
    delivered: Path | None

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        with drawing():
            return _page(self)

    @property
    def before(self) -> str:
        """What the model that `in_float` is of is called."""
        return float_after(self.float_step, self.steps)

    def series(self, name: str) -> Series:
        """The steps at which a number was logged, and its values; what is not finite is left out."""
        steps, values = [], []
        for line in self.log:
            for value in metrics_in({"value": line.get(name)}).values():
                steps.append(line["step"])
                values.append(value)
        return steps, values

    def by_block(self, kind: str) -> dict[str, Series]:
        """Block name to the series of `moq/<kind>/<block>`, layer.2 before layer.10."""
        start = f"moq/{kind}/"
        names = {key for line in self.log for key in line if key.startswith(start)}
        return {
            name.removeprefix(start): self.series(name)
            for name in sorted(names, key=_natural)
        }


def _natural(name: str) -> str:
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Read the folder of a finished run, and of the float run in its folder `float`, if there is one.

    Args:
        directory: The run's `output_dir`, or one of its checkpoints.

    Raises:
        MoQError: There is no trainer_state.json, it is not a run with MoQ, or a file is
            not as it was written; names the file and the key.
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
    # A run that is float first logs the evaluation of its float model.
    phases = (
        line["step"]
        for line in log
        if any(name.startswith("float_eval_") for name in line)
    )
    places = (directory / "quantized", directory)
    delivered = next((path for path in places if (path / STATE_NAME).is_file()), None)
    float_folder = directory / FOLDER
    return Run(
        directory,
        saved["config"],
        state.global_step,
        log,
        saved["float_size_mb"],
        _metrics(directory, state, delivered),
        _metrics(float_folder, _read_state(float_folder)),
        next(phases, None),
        saved["choice"],
        delivered,
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
    return metrics_in(evaluated)


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
            matplotlib is not installed.
    """
    run = read_run(directory)
    folder = run.directory if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    page.write_text(run._repr_html_(), encoding="utf-8")
    return page


def _figures(run: Run) -> dict[str, "Figure"]:
    """Draw what was logged: the title of each figure that there is, and the figure."""
    metrics = [name for name in run.quantized if name != "loss"]
    curves = {
        "Sensitivity": ("eigenvalue over the largest", run.by_block("eigenvalue")),
        "Loss": (
            "loss",
            {"training": run.series("loss"), "evaluation": run.series("eval_loss")},
        ),
        "Metrics": ("metric", {name: run.series(f"eval_{name}") for name in metrics}),
    }
    figures: dict[str, Figure] = {}
    bits = run.by_block("bits")
    if bits:
        figures["Bits"] = _draw_bits(bits, run.config, run.steps)
    for title, (ylabel, series) in curves.items():
        if any(steps for steps, _ in series.values()):
            figures[title] = _curves(ylabel, series, bits)
    if "Metrics" in figures:
        _widen(figures["Metrics"].axes[0])
    return figures


def _svg(figure: "Figure") -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    drawn = stream.getvalue()
    return drawn[drawn.index("<svg") :]


def _page(run: Run) -> str:
    title = html.escape(run.directory.resolve().name)
    files = [path for path in run.directory.iterdir() if path.name != PAGE]
    written = max(path.stat().st_mtime for path in files)
    date = datetime.fromtimestamp(written).strftime("%Y-%m-%d")
    found = None if run.delivered is None else recorded(run.delivered)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f"<title>moq_hf: {title}</title><style>{_STYLE}</style></head><body><article><h1>{title}</h1>",
        f"<p>{date}</p><p><strong>{html.escape(_headline(run, found))}</strong></p>{_table(_facts(run))}",
    ]
    for heading, figure in _figures(run).items():
        caption = f"<figcaption>{_CAPTIONS[heading]}</figcaption>"
        parts.append(f"<h2>{heading}</h2><figure>{_svg(figure)}{caption}</figure>")
    if run.quantized:
        rows = metric_rows(run.quantized, run.in_float, run.before)
        parts.append(f"<h2>Last evaluation</h2>{_table(rows)}")
    if run.choice is not None:
        outcome = html.escape(run.choice.outcome())
        parts.append(f"<h2>Bits under a budget</h2><p>{outcome}</p>")
        parts.append(_table(run.choice.rows()))
    if found is not None and run.delivered is not None:
        inspect = f"moq-hf inspect {run.delivered}    # layers, sizes, who serves it"
        steps = "\n".join(filter(None, [inspect, export_command(run.delivered)]))
        parts += [
            f"<h2>Proof</h2><p>{html.escape(_proof(found))}</p>",
            f"<h2>Next steps</h2><pre>{html.escape(steps)}</pre>",
        ]
    config = html.escape(json.dumps(run.config.to_dict(), indent=2))
    parts.append(
        f"<details><summary>Configuration</summary><pre>{config}</pre></details></article></body></html>\n"
    )
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return f"<pre>{html.escape(table(rows))}</pre>"


def _headline(run: Run, found: Verification | None) -> str:
    """The run in a line: its first metric, its bits, its size, and whether the result was proven."""
    bits = [values[-1] for _, values in run.by_block("bits").values()]
    parts = [f"{sum(bits) / len(bits):.3g} bits" if bits else "no bits yet"]
    metric = next((name for name in run.quantized if name != "loss"), None)
    if metric is not None:
        score = _score(metric, run.quantized[metric])
        before = run.in_float.get(metric)
        beside = "" if before is None else f" ({run.before} {_score(metric, before)})"
        parts = [f"{metric.replace('_', ' ')} {score} at {parts[0]}{beside}"]
    if found is not None:
        parts.append(f"{megabytes(found.float_bytes)} to {megabytes(found.file_bytes)}")
        verdict = _proof(found).partition(":")[0]
        parts.append(verdict[0].lower() + verdict[1:])
    else:
        for size in run.series("moq/size_mb")[1][-1:]:
            parts.append(f"{run.float_size_mb:,.2f} to {size:,.2f} MB")
    return ", ".join(parts)


def _score(metric: str, value: float) -> str:
    """A metric as people say it: shares in percent."""
    is_share = metric in ("accuracy", "f1", "precision", "recall")
    return percent(value) if is_share else f"{value:.4g}"


def _proof(found: Verification) -> str:
    """Whether the delivered folder was compared with the model, and what came of it."""
    return str(found.proof or "Not verified: the run was not to prove it")


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = [
        ("mean bits, whole model", f"{run.series('moq/mean_bits')[1][-1]:.2f}"),
        ("precision", run.config.span_in_words),
        ("optimizer steps", f"{run.steps:,}"),
    ]
    for share in run.series("moq/quantized_share")[1][-1:]:
        facts.append(("quantized", f"{percent(share)} of the parameters"))
    return facts


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib to the report's look while figures are made and saved.

    Raises:
        MoQError: matplotlib is not installed.
    """
    require("report", "matplotlib")
    import matplotlib

    settings: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        # Names of blocks are not formulas.
        "text.parse_math": False,
        # Text stays text, and the same figure gives the same file.
        "svg.fonttype": "none",
        "svg.hashsalt": "moq_hf",
    }
    with matplotlib.rc_context(settings):
        yield


def _new_figure(ylabel: str, lines: int) -> tuple["Figure", "Axes"]:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel=ylabel)
    axes.grid(axis="y", linewidth=0.6)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    shades = [0.05 + 0.75 * index / max(1, lines - 1) for index in range(lines)]
    axes.set_prop_cycle(color=colormaps["viridis"](shades))
    return figure, axes


def _legend(axes: "Axes") -> None:
    handles, _ = axes.get_legend_handles_labels()
    # A model without a list of layers has a block for each linear layer.
    every = math.ceil(len(handles) / 20)
    axes.legend(
        handles=handles[::every],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        fontsize="small",
    )


def _alike(series: Mapping[str, Series]) -> dict[str, Series]:
    """One line for blocks that have the same bits at all steps."""
    groups: dict[str, list[str]] = {}
    for name, line in series.items():
        groups.setdefault(repr(line), []).append(name)
    labels = {}
    for names in groups.values():
        every = "all " if len(groups) == 1 else ""
        label = ", ".join(names) if len(names) < 3 else f"{every}{len(names)} blocks"
        labels[label] = series[names[0]]
    # Two groups of as many blocks are told apart by their names.
    return labels if len(labels) == len(groups) else dict(series)


def _drops(series: Mapping[str, Series]) -> dict[int, int]:
    """The steps at which some block got fewer bits than any had before, and these bits."""
    switches = sorted(
        (step, int(bits))
        for steps, values in series.values()
        for step, bits in zip(steps, values, strict=True)
    )
    drops: dict[int, int] = {}
    lowest = FLOAT_BITS
    for step, bits in switches:
        if bits < lowest:
            lowest = bits
            drops[step] = bits
    return drops


def _draw_bits(series: Mapping[str, Series], config: MoQConfig, total: int) -> "Figure":
    """Draw a line for each block, side by side where they would cover each other."""
    series = _alike(series)
    figure, axes = _new_figure("bits", len(series))
    in_float = begins_in_float(config)
    highest = max(own.start_bits for own in config.variants().values()) + in_float
    lowest = min(min(bits) for _, bits in series.values())
    start = FLOAT_BITS if in_float else config.start_bits
    for index, (name, (steps, bits)) in enumerate(series.items()):
        shift = 0.4 * (index + 0.5) / len(series) - 0.2
        heights = [min(value, highest) - shift for value in (start, *bits, bits[-1])]
        axes.step([0, *steps, total], heights, where="post", label=name, linewidth=1.5)
    ticks = range(int(lowest), highest + 1)
    axes.set_yticks(
        ticks,
        ["float" if in_float and tick == highest else str(tick) for tick in ticks],
    )
    _legend(axes)
    return figure


def _curves(
    ylabel: str, series: Mapping[str, Series], bits: Mapping[str, Series]
) -> "Figure":
    drawn = {name: line for name, line in series.items() if line[0]}
    figure, axes = _new_figure(ylabel, len(drawn))
    for name, (steps, values) in drawn.items():
        axes.plot(steps, values, marker=".", label=name)
    _legend(axes)
    drops = _drops(bits)
    low, high = axes.get_xlim()
    for step, reached in drops.items():
        axes.axvline(step, color="gray", linestyle=":", linewidth=0.8)
        # Of drops close to each other the last one has the label.
        if any(0 < later - step < 0.02 * (high - low) for later in drops):
            continue
        axes.annotate(
            str(reached),
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize="x-small",
            color="gray",
        )
    return figure


def _widen(axes: "Axes") -> None:
    """Give scores from 0 to 1 an axis of at least 5 points, so that noise looks like noise."""
    low, high = axes.get_ylim()
    if low >= 0 and high <= 1.05 and high - low < _LEAST_HEIGHT:
        middle = min((low + high) / 2, 1 - _LEAST_HEIGHT / 2)
        axes.set_ylim(middle - _LEAST_HEIGHT / 2, middle + _LEAST_HEIGHT / 2)


_CAPTIONS = {
    "Bits": "Bits of each block over optimizer steps. Lines are drawn side by side.",
    "Sensitivity": "Eigenvalue of each block over the largest, at the steps at which bits fell; a block that was "
    "not measured again keeps its last one. Dotted: where bits fell.",
    "Loss": "Loss over optimizer steps; after a float phase the training loss has the teacher's parts too. Dotted: "
    "where bits fell, with the bits from there on.",
    "Metrics": "Metrics of the evaluations on the way. Dotted: where bits fell, with the bits from there on.",
}
# A notebook applies the style of an output to its whole page.
_STYLE = """
article { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
article figcaption { color: #666; font-size: 0.85rem; }
article figure { margin: 0; }
article svg { width: 100%; height: auto; }
"""
