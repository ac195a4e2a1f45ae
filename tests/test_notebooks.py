"""The notebooks of `examples/notebooks` run without a network, and what moq_hf says in them is what they show.

Folders named as models and data on the Hub stand beside a notebook: tiny models and generated rows.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_folders import make_hub, tiny_llama
from repo import ROOT

pytest.importorskip("nbclient", reason="the extra dev has it")
pytest.importorskip("ipykernel", reason="the extra dev has it")
import nbformat
from nbclient import NotebookClient

FOLDER = ROOT / "examples" / "notebooks"
# How the lines begin that moq_hf prints.
OURS = ("moq_hf", "block ", "every block", "Load it", "Deploy", "Report", "Verified")
# What is cut short here, and to what: rows.
SHORTER = {
    "range(1500)": "range(64)",
    "range(3000)": "range(64)",
    "range(400)": "range(64)",
}
# A library that a notebook needs, of an extra.
NEEDED = {"int8_onnx": "onnxscript", "language_model": "trl"}


def told(notebook: Any) -> list[str]:
    """What moq_hf says in a notebook, with its numbers made alike, and the blanks between them."""
    texts = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stdout"
    ]
    own = [line for line in "\n".join(texts).splitlines() if line.startswith(OURS)]
    return [re.sub(" +", " ", re.sub(r"[\d,.]*\d", "#", line.rstrip())) for line in own]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a notebook runs, beside what stands in the place of the Hub."""
    folder = tmp_path / "examples" / "notebooks"
    make_hub(folder, ("sst2", "stsb"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for variable, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PATH": path,
    }.items():
        monkeypatch.setenv(variable, value)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_it_shows(path: Path, folder: Path) -> None:
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem])
    if path.stem == "language_model":
        tiny_llama(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct", folder / "openai" / "gsm8k")
    shown = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    for cell in again.cells:
        for words, fewer in SHORTER.items():
            cell.source = cell.source.replace(words, fewer)
    assert again.cells != shown.cells
    NotebookClient(again, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert told(again) == told(shown)
    assert any(re.match("moq_hf: All # blocks (reached|were at) # bits", line) for line in told(again))


def test_the_notebooks_begin_with_real_models_and_show_no_machine() -> None:
    for path in FOLDER.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert re.search(r'^MODEL = "[\w-]+/[\w.-]+"$', code[0].source, re.MULTILINE), path
        assert any(cell.outputs for cell in code), path
        assert "stderr" not in {output.get("name") for cell in code for output in cell.outputs}
        assert not re.search(r"/(?:home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), path
