"""The notebooks of `examples/notebooks` run from the first cell to the last, without a network."""

import re
from pathlib import Path
from typing import Any

import pytest
from repo import ROOT

pytest.importorskip("nbclient", reason="the extra dev has it")
pytest.importorskip("ipykernel", reason="the extra dev has it")
import nbformat
from nbclient import NotebookClient

# What the last outputs must say, by notebook.
SAID = {
    "encoder": [
        r"accuracy 0\.[89]\d\d at a mean of",
        r"(bad|good) - The soup",
        r"accuracy 0\.[89]\d\d at 2 bits",
        r"moq_report\.html",
    ],
    "language_model": [r"runs/language-model/quantized", r"- The \w+ is "],
}


def texts_of(cell: Any) -> str:
    """What a cell shows, as text."""
    shown = ""
    for output in cell.get("outputs", []):
        shown += output.get("text", "") + output.get("data", {}).get("text/plain", "")
    return shown


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in ROOT.glob("examples/notebooks/*.ipynb")} == set(SAID)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "language_model":
        pytest.importorskip("trl")
    # It runs where it lies, beside the data; what it writes must not.
    folder = tmp_path / "examples" / "notebooks"
    folder.mkdir(parents=True)
    for data in ("demo", "sft"):
        (folder.parent / data).symlink_to(ROOT / "examples" / data)
    for variable, value in {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    said = "\n".join(map(texts_of, notebook.cells))
    assert [pattern for pattern in SAID[name] if not re.search(pattern, said)] == []
