"""What a run did, as one page: bits, eigenvalues, loss, metrics and sizes, from the Trainer's own log.

Nothing is measured here. Everything is read from the folder of a finished run: `trainer_state.json`, there or in its
newest checkpoint, and `eval_results.json`; where the Trainer saved no state, the `moq_state.json` of the packed model.
matplotlib, the extra `report`, draws.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import STATE_NAME, recorded
from .config import LARGEST, MoQConfig, MoQConfigError, MoQError
from .reading import Entry, read_json
from .schedule import FLOAT_BITS, Plan
from .sizes import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = "moq_report.html"
_INK, _FAINT, _ACCENT, _GREY = "#22262b", "#c9ced4", "#2563c9", "#8a929b"
# The same on a dark ground.
_DARK = {_INK: "#e4e7eb", _FAINT: "#454b53", _ACCENT: "#7aa7f5", _GREY: "#9aa3ad"}
_DOTTED = "dotted: the precision falls, with the mean bits after it"
_NO_METRIC = re.compile(r"^(epoch|step|total_flos)$|_(runtime|per_second|samples|model_preparation_time)(_mm)?$")
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

    def series(self, name: str, in_float: bool = False) -> tuple[list[int], list[float]]:
        """The steps at which a scalar was logged, here or in the float run, and its values."""
        log = self.float_log if in_float else self.log
        found = [(entry["step"], entry[name]) for entry in log if isinstance(entry.get(name), (int, float))]
        return [step for step, _ in found], [value for _, value in found]

    def by_block(self, kind: str) -> dict[str, tuple[list[int], list[float]]]:
        """Block name to the series of `moq/<kind>/<block>`, in model order as far as the log tells it."""
        start = f"moq/{kind}/"
        names = dict.fromkeys(key for entry in self.log for key in entry if key.startswith(start))
        return {name.removeprefix(start): self.series(name) for name in sorted(names, key=_natural)}

    @property
    def quantized_share(self) -> float | None:
        """The part of the model's parameters that is quantized, 0 to 1; None if the log is of an earlier version."""
        shares = self.series("moq/quantized_share")[1]
        return shares[-1] if shares else None

    def mean_bits(self) -> tuple[list[int], list[float]]:
        """The steps at which bits per parameter of the whole model were logged, and those bits.

        A log of an earlier version has bits per quantized weight under that name: they are given if it has no others.
        """
        told = self.quantized_share is not None
        logged = [entry for entry in self.log if "moq/mean_bits" in entry and ("moq/quantized_share" in entry) == told]
        return [entry["step"] for entry in logged], [entry["moq/mean_bits"] for entry in logged]

    def switches(self) -> list[int]:
        """The steps at which any block changed its bits."""
        start = FLOAT_BITS if self.config.schedule.offset else self.config.start_bits
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
        MoQError: There is neither a trainer_state.json nor a packed model, it is no run with MoQ, `float_directory` has
            no metrics, or a file is not as it was written; names the file and the key.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise MoQError(f"{directory} is no folder; give the output_dir of a finished run")
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
    callbacks = state.get("stateful_callbacks")
    entry = callbacks if callbacks.is_null else callbacks.get("MoQCallback")
    log = [] if entry.is_null else _log(state)
    if not any("moq/mean_bits" in line for line in log):
        raise MoQError(f"{directory} is no run with MoQ: its trainer_state.json has no bits")
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
    )


def _packed_run(
    packed: Path, directory: Path, in_float: Mapping[str, float], float_log: Sequence[Mapping[str, Any]]
) -> Run:
    """What the packed model's state tells of a run whose Trainer saved none."""
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
    logged = {name: _named(state.get(name)) for name in ("metrics", "float_metrics")}
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
    )


def _config(entry: Entry) -> MoQConfig:
    try:
        return MoQConfig.from_dict({name: value.value for name, value in entry.mapping().items()})
    except MoQConfigError as error:
        raise MoQError(f"{entry.where}: {entry.key}: {error}") from error


def write_report(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    float_directory: str | os.PathLike[str] | None = None,
) -> Path:
    """Write `moq_report.html`, which needs no other file, and its figures as PNG.

    Args:
        directory: As for `read_run`.
        out: Folder to write to; by default `directory`.
        float_directory: As for `read_run`.

    Returns:
        The path of the page.

    Raises:
        MoQError: As `read_run`, or matplotlib is not installed.
    """
    run = read_run(directory, float_directory)
    out = Path(out) if out is not None else run.directory
    out.mkdir(parents=True, exist_ok=True)
    page = out / PAGE
    with _drawing():
        figures = _figures(run)
        for name, (figure, _) in figures.items():
            figure.savefig(out / f"moq_{name}.png", dpi=150, facecolor="white", metadata={"Software": None})
        page.write_text(_page(run, figures), encoding="utf-8")
    return page


def draw_plan(planned: Plan, path: str | os.PathLike[str]) -> None:
    """Draw the bits of each block of a plan over the steps of the run, to a PNG or whatever the ending says.

    Raises:
        MoQError: matplotlib is not installed, or does not know the ending.
    """
    with _drawing():
        figure, axes = _new_figure(3.4)
        start = FLOAT_BITS if planned.config.schedule.offset else planned.config.start_bits
        series = {
            block.name: ([s.step for s in block.switches], [float(s.bits) for s in block.switches])
            for block in planned.blocks
        }
        _draw_bits(axes, series, start, planned.config.start_bits, planned.total_steps, planned.deadline_step or 0)
        config = planned.config
        title = f"{config.start_bits} to {config.target_bits} bits in {planned.total_steps:,} optimizer steps"
        axes.set_title(title, fontsize="medium", pad=14)
        if planned.deadline_step is not None:
            axes.axvline(planned.deadline_step, color=_GREY, linestyle="--", linewidth=1)
            top = axes.get_xaxis_transform()
            axes.text(
                planned.deadline_step, 1.01, "deadline", transform=top, color=_GREY, fontsize="small", ha="center"
            )
        try:
            figure.savefig(path, dpi=150, facecolor="white")
        except ValueError as error:
            raise MoQError(f"cannot draw to {os.fspath(path)}: {error}") from error


def _states(directory: Path) -> list[Path]:
    """The trainer_state.json of a run and of its checkpoints, the newest first."""
    checkpoints = sorted(directory.glob("checkpoint-*/trainer_state.json"), key=lambda path: _natural(str(path)))
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
    if path.is_file():
        values = read_json(path)
    else:
        evaluations = (line for line in reversed(_log_of(directory)) if any(key.startswith("eval_") for key in line))
        values = Entry(next(evaluations, {}), str(directory))
    return _named(Entry({k: v.value for k, v in values.mapping().items() if k.startswith("eval_")}, values.where))


def _named(values: Entry) -> dict[str, float]:
    """The metrics of an evaluation, without its times and counts, and without the Trainer's prefix."""
    entries = {} if values.is_null else values.mapping()
    return {
        name.removeprefix("eval_"): entry.number()
        for name, entry in entries.items()
        if not _NO_METRIC.search(name)
        and (type(entry.value) is int or (isinstance(entry.value, float) and math.isfinite(entry.value)))
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that puts layer.2 before layer.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@contextmanager
def _drawing() -> Iterator[None]:
    """Where figures are made and saved: matplotlib with the report's look."""
    try:
        import matplotlib
    except ImportError as error:
        raise MoQError("drawing needs matplotlib: pip install matplotlib") from error
    settings: dict[Any, Any] = {
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _FAINT,
        "grid.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        # Names of blocks are no formulas.
        "text.parse_math": False,
        "font.size": 9.5,
        # Text stays text, and the same figure gives the same file.
        "svg.fonttype": "none",
        "svg.hashsalt": "moq_hf",
    }
    with matplotlib.rc_context(settings):
        yield


def _new_figure(height: float) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _figures(run: Run) -> dict[str, tuple["Figure", str]]:
    """Name to figure and caption, of what the run has data for."""
    figures = {}
    bits = run.by_block("bits")
    start = FLOAT_BITS if run.config.schedule.offset else run.config.start_bits
    if bits:
        figure, axes = _new_figure(_height(bits))
        end = _draw_bits(axes, bits, start, run.config.start_bits, run.steps)
        shown = f"; shown to step {end:,} of {run.steps:,}, nothing changes after it" if end < run.steps else ""
        figures["bits"] = figure, f"Bits of each block over optimizer steps{shown}. Lines are drawn side by side."

    eigenvalues = run.by_block("eigenvalue")
    if eigenvalues:
        figure, axes = _new_figure(_height(eigenvalues))
        for (name, (steps, values)), color in zip(eigenvalues.items(), _colors(len(bits)), strict=False):
            axes.plot(steps, values, color=color, marker="o", markersize=4, linewidth=1.4, label=name)
        axes.set_ylim(-0.03, 1.05)
        _finish(axes, eigenvalues, "eigenvalue over the largest")
        figures["eigenvalues"] = (
            figure,
            (
                "Eigenvalue of each block over the largest of all, where any block drops; where it stays as it is, the "
                "last measurement served again."
                if run.has_log
                else "Eigenvalue of each block over the largest of all, at the steps at which it dropped itself."
            ),
        )

    if run.has_log:
        figure, axes = _new_figure(3.0)
        for name, label, color in (("loss", "training", _GREY), ("eval_loss", "evaluation", _ACCENT)):
            steps, values = run.series(name)
            if steps:
                marker = "o" if len(steps) < 3 else None
                axes.plot(steps, values, color=color, label=label, linewidth=1.6, marker=marker)
        _mark_switches(axes, run)
        _finish(axes, {}, "loss")
        figures["loss"] = figure, f"Loss over optimizer steps; {_DOTTED}."

    # Those of the page's table that were evaluated on the way too; the loss has its own figure.
    metrics = [name for name in run.quantized if name != "loss" and len(run.series(f"eval_{name}")[0]) > 1]
    if metrics:
        figure, axes = _new_figure(3.0)
        for name, color in zip(metrics, [_ACCENT] if len(metrics) == 1 else _colors(len(metrics)), strict=True):
            axes.plot(*run.series(f"eval_{name}"), color=color, label=name, linewidth=1.6)
            steps, values = run.series(f"eval_{name}", in_float=True)
            if steps:
                axes.plot(steps, values, color=color, label=f"{name}, float", linewidth=1.2, linestyle="--")
        _mark_switches(axes, run)
        _finish(axes, {}, metrics[0] if len(metrics) == 1 else "metric")
        figures["metrics"] = (
            figure,
            f"Metrics of the evaluations on the way; {_DOTTED}.",
        )

    sizes = run.series("moq/size_mb")[1]
    if run.float_size_mb and sizes:
        figures["size"] = (
            _bars({"float": run.float_size_mb, "quantized": sizes[-1]}, "{:,.2f} MB"),
            "Size of the parameters before and after, quantized weights packed at their bits with a scale for each "
            "group, and all others as they are.",
        )
    both = {name: value for name, value in run.quantized.items() if name in run.in_float and name != "loss"}
    if both:
        pairs = {
            f"{name}, {kind}": of[name] for name in both for kind, of in (("float", run.in_float), ("quantized", both))
        }
        figures["comparison"] = _bars(pairs, "{:.4f}"), "The last evaluation in float and quantized."
    return figures


def _height(series: Mapping[str, Any]) -> float:
    return max(3.4, 0.6 + 0.19 * min(len(series), 30))


def _colors(count: int) -> list[str]:
    return [pair[0] for pair in _palette(count)]


def _palette(count: int) -> list[tuple[str, str]]:
    """Colors in an order that shows depth, each for a light and for a dark ground."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shares = [index / max(1, count - 1) for index in range(count)]
    scale = colormaps["viridis"]
    return [(to_hex(scale(0.05 + 0.72 * share)), to_hex(scale(0.38 + 0.6 * share))) for share in shares]


def _draw_bits(
    axes: "Axes",
    series: Mapping[str, tuple[list[int], list[float]]],
    start: int,
    start_bits: int,
    total: int,
    least: int = 0,
) -> int:
    """One line a block, side by side where they would cover each other; gives the last step that is shown."""
    changes = [
        step
        for steps, bits in series.values()
        for step, before, now in zip(steps, [float(start), *bits], bits, strict=False)
        if before != now and step <= total
    ]
    last = max([least, *changes])
    end = total if 3 * last > total else max(1, math.ceil(1.25 * last))
    low, top = int(min(b for _, bits in series.values() for b in bits)), start_bits + (start == FLOAT_BITS)
    for index, ((name, (steps, bits)), color) in enumerate(zip(series.items(), _colors(len(series)), strict=True)):
        shift = 0.4 * (index + 0.5) / len(series) - 0.2
        heights = [min(value, top) - shift for value in (start, *bits, bits[-1])]
        axes.step([0, *steps, max(total, steps[-1])], heights, where="post", color=color, label=name, linewidth=1.5)
    axes.set_xlim(0, end)
    labels = {bits: str(bits) for bits in range(low, start_bits + 1)} | ({top: "float"} if top > start_bits else {})
    axes.set_ylim(low - 0.6, top + 0.6)
    axes.set_yticks(list(labels), list(labels.values()))
    _finish(axes, series, "bits")
    return end


def _finish(axes: "Axes", series: Mapping[str, Any], ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.set_xlabel("optimizer steps")
    handles, names = axes.get_legend_handles_labels()
    if len(names) < 2 and not series:
        return
    # A model without a list of layers has a block for each linear layer.
    every = math.ceil(len(names) / 30)
    shared = 0
    while len({tuple(name.split(".")[: shared + 1]) for name in names}) == 1 and names[0].count(".") > shared + 1:
        shared += 1
    labels = [".".join(name.split(".")[shared:]) for name in names]
    axes.legend(
        handles[::every],
        labels[::every],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.02),
        fontsize="small",
    )


def _mark_switches(axes: "Axes", run: Run) -> None:
    """A dotted line at each drop, with the mean bits after it where there is room for them."""
    mean = dict(zip(*run.mean_bits(), strict=True))
    written = math.inf
    steps = run.switches()
    if len(steps) > 12:
        # Blocks that drop one by one would be a hatching: the first step at or below each whole number of mean bits.
        steps = sorted({math.ceil(mean[step]): step for step in reversed(steps) if step in mean}.values())
    # From the last one: it is the target that matters where they stand close.
    for step in reversed(steps):
        axes.axvline(step, color=_GREY, linestyle=":", linewidth=0.9)
        if step in mean and written - step > 0.035 * run.steps:
            written = step
            top = axes.get_xaxis_transform()
            axes.text(
                step, 1.01, f"{round(mean[step], 1):g}", transform=top, color=_GREY, fontsize="x-small", ha="center"
            )
    axes.set_xlim(0, run.steps)


def _bars(values: Mapping[str, float], form: str) -> "Figure":
    figure, axes = _new_figure(0.5 + 0.36 * len(values))
    colors = [_GREY if "float" in name else _ACCENT for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors, height=0.62)
    axes.bar_label(bars, [form.format(value) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)
    return figure


def _svg(figure: "Figure", blocks: int) -> str:
    """The figure as inline SVG whose colors follow the page's."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans', ", "system-ui, ")
    for index, color in enumerate([*_DARK, *_colors(blocks)]):
        svg = svg.replace(color, f"var(--c{index})")
    return svg


def _page(run: Run, figures: Mapping[str, tuple["Figure", str]]) -> str:
    blocks = max(len(run.by_block("bits")), 3)
    pairs = [*_DARK.items(), *_palette(blocks)]
    light, dark = ("".join(f"--c{i}:{pair[k]};" for i, pair in enumerate(pairs)) for k in (0, 1))
    mean, sizes, share = run.mean_bits()[1], run.series("moq/size_mb")[1], run.quantized_share
    facts = [
        ("mean bits of the quantized layers" if share is None else "mean bits of the whole model", f"{mean[-1]:.2f}"),
        ("from, to", f"{run.config.start_bits} to {run.config.target_bits} bits"),
        ("optimizer steps", f"{run.steps:,}"),
    ]
    if share is not None:
        facts.insert(1, ("quantized", f"{percent(share)} of the parameters"))
    if run.float_size_mb and sizes:
        facts.append(("size", f"{run.float_size_mb:,.1f} to {sizes[-1]:,.1f} MB"))
    rows = [
        (name, f"{run.in_float[name]:.4f}" if name in run.in_float else "", f"{value:.4f}",
         f"{value - run.in_float[name]:+.4f}" if name in run.in_float else "")
        for name, value in run.quantized.items()
    ]  # fmt: skip
    titles = {
        "bits": "Bits", "eigenvalues": "Sensitivity", "loss": "Loss", "metrics": "Metrics", "size": "Size",
        "comparison": "Float and quantized",
    }  # fmt: skip
    missing = [] if "bits" in figures else ["no block changed its bits"]
    if "eigenvalues" not in figures:
        missing.append("no eigenvalues were measured")
    if not run.quantized:
        missing.append("there was no evaluation")
    elif not run.in_float:
        missing.append("there is no float run to compare with")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>moq_hf: {html.escape(run.directory.resolve().name)}</title>",
        f"<style>{_STYLE.replace('LIGHT', light).replace('DARK', dark)}</style></head><body>",
        f"<h1>{html.escape(run.directory.resolve().name)}</h1>",
        "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts) + "</dl>",
    ]
    for name, (figure, caption) in figures.items():
        parts.append(
            f"<h2>{titles[name]}</h2><figure>{_svg(figure, blocks)}<figcaption>{caption}</figcaption></figure>"
        )
        if name == "comparison":
            parts.append(_table(["metric", "float", "quantized", "difference"], rows))
    if rows and "comparison" not in figures:
        parts.append("<h2>Last evaluation</h2>" + _table(["metric", "value"], [(row[0], row[2]) for row in rows]))
    if not run.has_log:
        parts.append(
            "<p class=note>The run saved no trainer_state.json, so this is what its packed model records: the curve of "
            "the loss and evaluations on the way are not there, and sizes are those of the weight files.</p>"
        )
    if missing:
        parts.append(f"<p class=note>Not shown: {'; '.join(missing)}.</p>")
    config = json.dumps(run.config.to_dict(), indent=2)
    parts.append(f"<details><summary>Configuration</summary><pre>{html.escape(config)}</pre></details></body></html>")
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; DARK } }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; background: var(--ground); color: var(--c0);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.3rem; }
dl { display: flex; flex-wrap: wrap; gap: 0.6rem 2.4rem; margin: 0; }
dt, figcaption, .note, summary { color: var(--c3); font-size: 0.85rem; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin-top: 0.6rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.2rem 0.9rem; border-bottom: 1px solid var(--c1); font-weight: normal; }
th { color: var(--c3); font-size: 0.85rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
details { margin-top: 2rem; }
pre { overflow-x: auto; font-size: 0.8rem; }
"""
