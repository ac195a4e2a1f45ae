"""`benchmarks/deployed_files.py` measures every engine, and goes on where one fails."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deployed_files
import pytest
from packed_bert import SHAPE, VALIDATION, checkpoint, config_of
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from moq_hf import MoQError
from moq_hf.export import onnx
from moq_hf.export.compare import read_data


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    return checkpoint(tmp_path_factory.mktemp("files") / "packed", model, config_of())


@pytest.fixture(scope="module", autouse=True)
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each file of the checkpoint is written once, for all tests."""
    folder = tmp_path_factory.mktemp("written")
    write_model = onnx._write_model

    def write(model: Any, path: Path) -> int:
        kept = folder / path.name
        if not kept.exists():
            write_model(model, kept)
        shutil.copy(kept, path)
        return path.stat().st_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "_write_model", write)
        yield


def test_every_engine_and_its_answers(
    packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--batch", "2", "--sequence", "65", "--validation_file", str(VALIDATION), "--task_name", "sst2"]
    monkeypatch.setattr(sys, "argv", ["deployed_files.py", str(packed), *words])
    deployed_files.main()
    lines = capsys.readouterr().out.splitlines()
    (head,) = [number for number, line in enumerate(lines) if "MB" in line]
    # The model has 64 positions.
    assert "MB  2 x 64, ms  speed" in lines[head] and lines[head].split()[-1] == "accuracy"
    rows = {line[:24].strip(): line[24:].split() for line in lines[head + 1 :] if line.startswith(("PyTorch", "ONNX"))}
    flavors = ("float", "weight-only", "int8", "nbits")
    assert rows.keys() == {"PyTorch", *(f"ONNX Runtime {flavor}" for flavor in flavors)}
    assert rows["PyTorch"][2:4] == ["1.00", "0.00e+00"]
    assert float(rows["ONNX Runtime weight-only"][3]) < 1e-5 < float(rows["ONNX Runtime int8"][3])
    assert rows["ONNX Runtime weight-only"][5] == rows["PyTorch"][5]
    assert float(rows["ONNX Runtime int8"][0]) < float(rows["PyTorch"][0])
    # It gives figures, and no advice.
    assert not any(line.startswith("Deploy") for line in lines)


def test_engines_that_fail_are_told(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = onnx.onnx_runtime

    def broken(path: Path, threads: int) -> Any:
        if path.name == "model.onnx":
            raise ValueError("no such\nmodel")
        run = load(path, threads)

        def fails(batch: Any) -> Any:
            raise KeyError("tokens")

        return run if path.name == "model_float.onnx" else fails

    monkeypatch.setattr(deployed_files, "loaders", lambda: {"ONNX Runtime": broken})
    rows, failed = deployed_files.measure(packed, 1, 8)
    assert [row[0] for row in rows] == ["", "PyTorch", "ONNX Runtime float"]
    assert failed["ONNX Runtime weight-only"] == "ValueError: no such model"
    for flavor in ("int8", "nbits"):
        assert "KeyError" in failed[f"ONNX Runtime {flavor}"]


def test_other_models_and_other_data_are_refused(packed: Path, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "packed", LlamaForCausalLM(LlamaConfig(**SHAPE)), config_of())
    with pytest.raises(MoQError, match="encoders of texts are measured, not LlamaForCausalLM"):
        deployed_files.measure(source)
    with pytest.raises(MoQError, match="does not fit a model with 2 outputs"):
        deployed_files.measure(packed, data=read_data(VALIDATION, "stsb"))
