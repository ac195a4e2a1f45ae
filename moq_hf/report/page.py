"""What a run did, as one page: bits, eigenvalues, loss, metrics and sizes, from the Trainer's own log.

Nothing is measured here. Everything is read from the folder of a finished run: `trainer_state.json`, there or in its
newest checkpoint, and `eval_results.json`; where the Trainer saved no state, the `moq_state.json` of the packed model.
matplotlib, the extra `report`, draws.
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model.sizes import percent
from .figures import figures_of
from .look import DARK, drawing, palette, svg_of
from .run import Run, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "moq_report.html"


def write_report(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    float_directory: str | os.PathLike[str] | None = None,
) -> Path:
    """Write `moq_report.html`, which needs no other file, and its figures as PNG.

    Args:
        directory: The run's `output_dir`, or one of its checkpoints.
        out: Folder to write to; by default `directory`.
        float_directory: A float run to compare with; by default the folder `float` in `directory`, if it is there.

    Returns:
        The path of the page.

    Raises:
        MoQError: There is no finished run with MoQ, a file of it is damaged, or matplotlib is not installed.
    """
    run = read_run(directory, float_directory)
    out = Path(out) if out is not None else run.directory
    out.mkdir(parents=True, exist_ok=True)
    page = out / PAGE
    with drawing():
        figures = figures_of(run)
        for name, (figure, _) in figures.items():
            figure.savefig(out / f"moq_{name}.png", dpi=150, facecolor="white", metadata={"Software": None})
        page.write_text(_page(run, figures), encoding="utf-8")
    return page


def _page(run: Run, figures: Mapping[str, tuple["Figure", str]]) -> str:
    blocks = max(len(run.by_block("bits")), 3)
    pairs = [*DARK.items(), *palette(blocks)]
    light, dark = ("".join(f"--c{i}:{pair[k]};" for i, pair in enumerate(pairs)) for k in (0, 1))
    title, rows = html.escape(run.directory.resolve().name), _rows(run)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>moq_hf: {title}</title>",
        f"<style>{_STYLE.replace('LIGHT', light).replace('DARK', dark)}</style></head><body>",
        f"<h1>{title}</h1>",
        "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(run)) + "</dl>",
    ]
    for name, (figure, caption) in figures.items():
        parts.append(
            f"<h2>{_TITLES[name]}</h2><figure>{svg_of(figure, blocks)}<figcaption>{caption}</figcaption></figure>"
        )
        if name == "comparison":
            parts.append(_table(["metric", "float", "quantized", "difference"], rows))
    if run.choice is not None:
        head, *lines = run.choice.rows()
        parts.append(f"<h2>Bits under a budget</h2><p>{html.escape(run.choice.outcome())}</p>{_table(head, lines)}")
    if rows and "comparison" not in figures:
        parts.append("<h2>Last evaluation</h2>" + _table(["metric", "value"], [(row[0], row[2]) for row in rows]))
    parts += [f"<p class=note>{note}</p>" for note in _notes(run, figures)]
    config = json.dumps(run.config.to_dict(), indent=2)
    parts.append(f"<details><summary>Configuration</summary><pre>{html.escape(config)}</pre></details></body></html>")
    return "\n".join(parts) + "\n"


_TITLES = {
    "bits": "Bits",
    "eigenvalues": "Sensitivity",
    "loss": "Loss",
    "metrics": "Metrics",
    "size": "Size",
    "comparison": "Float and quantized",
}


def _facts(run: Run) -> list[tuple[str, str]]:
    """Names and values below the title."""
    mean, sizes, share = run.mean_bits()[1], run.series("moq/size_mb")[1], run.quantized_share
    of = "quantized layers" if share is None else "whole model"
    facts = [(f"mean bits of the {of}", f"{mean[-1]:.2f}")]
    if share is not None:
        facts.append(("quantized", f"{percent(share)} of the parameters"))
    facts.append(("precision", run.config.span_in_words))
    facts.append(("optimizer steps", f"{run.steps:,}"))
    if isinstance(run.config.schedule.offset, float):
        facts.append(("of them in float first", percent(run.config.schedule.offset)))
    if run.float_size_mb and sizes:
        facts.append(("size", f"{run.float_size_mb:,.1f} to {sizes[-1]:,.1f} MB"))
    return facts


def _rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Metric, in float, quantized, difference."""
    rows = []
    for name, value in run.quantized.items():
        before = run.in_float.get(name)
        beside = ("", "") if before is None else (f"{before:.4f}", f"{value - before:+.4f}")
        rows.append((name, beside[0], f"{value:.4f}", beside[1]))
    return rows


def _notes(run: Run, figures: Mapping[str, Any]) -> list[str]:
    """What the page lacks, and why."""
    missing = [] if "bits" in figures else ["no block changed its bits"]
    if "eigenvalues" not in figures:
        missing.append("no eigenvalues were measured")
    if not run.quantized:
        missing.append("there was no evaluation")
    elif not run.in_float:
        missing.append("there is no float run to compare with")
    notes = []
    if not run.has_log:
        notes.append(
            "The run saved no trainer_state.json, so this is what its packed model records: the curve of the loss and "
            "evaluations on the way are not there, and sizes are those of the weight files."
        )
    if missing:
        notes.append(f"Not shown: {'; '.join(missing)}.")
    return notes


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
