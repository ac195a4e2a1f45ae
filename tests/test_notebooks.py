"""The notebooks of `examples/notebooks` run without a network, and what moq_hf says in them is what they show."""

import re
from pathlib import Path
from typing import Any

import pytest
from repo import ROOT

pytest.importorskip("nbclient", reason="the extra dev has it")
pytest.importorskip("ipykernel", reason="the extra dev has it")
import nbformat
from nbclient import NotebookClient

FOLDER = ROOT / "examples" / "notebooks"
# How the lines begin that moq_hf prints, and those that a notebook prints of a result.
OURS = ("moq_hf", "block ", "every block", "Load it", "Deploy", "Report", "Verified", "accuracy", "4 bits on", "cosine")

# What is cut short here, and to what: the steps of the encoder and of the language model, and the texts.
SHORTER = {
    "max_steps=steps,": "max_steps=steps // 8,",
    "max_steps=160,": "max_steps=20,",
    "--max_texts 1000": "--max_texts 200",
    "model.encode(texts)": "model.encode(texts[:200])",
}


def told(notebook: Any) -> list[str]:
    """What moq_hf says in a notebook, with its numbers made alike, and the blanks between them."""
    texts = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stdout"
    ]
    lines = re.sub("\x1b\\[A|\r", "", "\n".join(texts)).splitlines()
    # A file for VNNI is written where the CPU has it.
    own = [line for line in lines if line.startswith(OURS) and "vnni" not in line]
    return [re.sub(" +", " ", re.sub(r"[\d,.]*\d", "#", line.rstrip())) for line in own]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("trl", "sentence_transformers"):
        if library in path.read_text(encoding="utf-8"):
            pytest.importorskip(library)
    # It runs beside the data, as where it lies; what it writes must not lie there.
    folder = tmp_path / "examples" / "notebooks"
    folder.mkdir(parents=True)
    for data in ("demo", "sft"):
        (folder.parent / data).symlink_to(ROOT / "examples" / data)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for variable, value in {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(variable, value)
    shown = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    for cell in again.cells:
        for words, fewer in SHORTER.items():
            cell.source = cell.source.replace(words, fewer)
    assert again.cells != shown.cells
    NotebookClient(again, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert told(again) == told(shown)
    assert any(re.match("moq_hf: All # blocks (reached|were at) # bits", line) for line in told(again))
