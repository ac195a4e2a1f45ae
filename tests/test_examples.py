"""The programs of `examples` run without a network, each with its tiny model."""

import re
from pathlib import Path

import programs
import pytest
from repo import ROOT

from moq_hf import verify_quantized

FOLDER = ROOT / "examples"
VERIFIED = "Verified: loaded with plain transformers, the saved model gives identical outputs"


def run(name: str, *words: str, cwd: Path) -> str:
    """What a program prints; it ends well."""
    done = programs.run(str(FOLDER / name), *words, cwd=cwd, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What cuts a program short, the library that it needs, the packed folder, and what it says of it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "short", "library", "folder", "said"),
    [
        ("trl_sft.py", "--max_steps 20", "trl", "trl-sft/quantized", r"What color is the raven\? - \w"),
        (
            "sentence_transformers_w4.py",
            "--epochs 0.1",
            "sentence_transformers",
            "sentence-transformers/quantized",
            r"Spearman -?0\.\d{3} trained at 4 bits",
        ),
        ("w8a8_onnx.py", "--epochs 1 --rows 64", "onnxscript", "w8a8/quantized", r"model_int8\.onnx"),
        ("to_mlx.py", "", "mlx", "mlx/model", r"for mlx_lm\.load"),
    ],
)
def test_an_example_runs(name: str, short: str, library: str, folder: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("moq_hf.export.mlx" if library == "mlx" else library)
    told = run(name, "--small", *short.split(), cwd=tmp_path)
    assert VERIFIED in told
    assert re.search(said, told)
    verify_quantized(tmp_path / "runs" / folder)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_explains_itself(path: Path, tmp_path: Path) -> None:
    for library in ("trl", "sentence_transformers"):
        if f"from {library} import" in path.read_text(encoding="utf-8"):
            pytest.importorskip(library)
    told = run(path.name, "--help", cwd=tmp_path)
    assert f"python examples/{path.name} --small" in told and "--output_dir" in told
