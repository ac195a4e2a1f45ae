"""`moq-hf bench` measures every engine at every shape, goes on where one fails, and says which file to deploy."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packed_bert import SHAPE, VALIDATION, checkpoint, config_of
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from moq_hf import MoQError
from moq_hf.cli import main
from moq_hf.export import bench, onnx
from moq_hf.export.bench import Benchmark, Measured, benchmark
from moq_hf.export.compare import Comparison, read_data

SMALL: dict[str, Any] = {"batch": 1, "sequence": 8}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    return checkpoint(tmp_path_factory.mktemp("bench") / "packed", model, config_of())


@pytest.fixture(scope="module", autouse=True)
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each file of the checkpoint is exported once, for all tests."""
    folder = tmp_path_factory.mktemp("written")
    write_model = onnx.write_model

    def write(prepared: Any, example: Any, path: Path) -> int:
        kept = folder / path.name
        if not kept.exists():
            write_model(prepared, example, kept)
        shutil.copy(kept, path)
        return path.stat().st_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "write_model", write)
        yield


def test_every_engine_its_answers_and_the_file_to_deploy(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--validation_file", str(VALIDATION), "--task_name", "sst2", "--max_loss", "1"]
    assert main(["bench", str(packed), "--batch", "2", "--sequence", "65", *data]) == 0
    lines = capsys.readouterr().out.splitlines()
    # The model has 64 positions.
    assert "MB  2 x 64, ms  speed" in lines[0]
    assert lines[0].split("  ")[-1].strip() == "accuracy"
    rows = {line[:24].strip(): line[24:].split() for line in lines[1:] if line.startswith(("PyTorch", "ONNX"))}
    assert rows.keys() == {"PyTorch", *(f"ONNX Runtime {flavor}" for flavor in ("weight-only", "int8", "nbits"))}
    assert rows["PyTorch"][2:4] == ["1.00", "0.00e+00"]
    assert float(rows["ONNX Runtime weight-only"][3]) < 1e-5 < float(rows["ONNX Runtime int8"][3])
    assert rows["ONNX Runtime weight-only"][5] == rows["PyTorch"][5]
    assert float(rows["ONNX Runtime int8"][0]) < float(rows["PyTorch"][0])
    assert f"(moq-hf export {packed} --to onnx OUT --flavors " in lines[-1]
    assert lines[-1].startswith("Deploy model")
    assert lines[-1].endswith("times as fast as PyTorch, and it loses at most 1 of each metric.")


def test_engines_that_fail_are_lines_of_the_table(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    load = bench.onnx_runtime

    def broken(path: Path, threads: int) -> Any:
        if path.name == "model.onnx":
            raise ValueError("no such\nmodel")
        run = load(path, threads)
        return lambda batch: run(batch) * float("nan")

    monkeypatch.setattr(bench, "onnx_runtime", broken)
    found = benchmark(packed, **SMALL)
    assert found.engines.keys() == {"PyTorch"} and found.recommended() is None
    assert found.missing["ONNX Runtime weight-only"] == "failed: ValueError: no such model"
    for flavor in ("int8", "nbits"):
        assert "some of its answers are not finite" in found.missing[f"ONNX Runtime {flavor}"]
    assert "not installed: pip install 'moq_hf[openvino]'" in found.missing["OpenVINO"]
    lines = found.table().splitlines()
    assert "ONNX Runtime weight-only: failed: ValueError: no such model" in lines
    assert lines[-1].startswith("Deploy the checkpoint in PyTorch: none of the exported files has its outputs; ")


def test_decoders_are_not_measured(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "packed", LlamaForCausalLM(LlamaConfig(**SHAPE)), config_of())
    with pytest.raises(MoQError, match="encoders of texts are measured, not LlamaForCausalLM"):
        benchmark(source)


def test_wrong_arguments(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MoQError, match="does not fit a model with 2 outputs"):
        benchmark(packed, **SMALL, data=read_data(VALIDATION, "stsb"))
    assert main(["bench", str(packed), "--batch", "1000000000000"]) == 2
    assert "a batch of 1000000000000 x 64 does not fit: " in capsys.readouterr().err
    assert main(["bench", str(packed), "--task_name", "sst2"]) == 2
    assert "--task_name goes with --validation_file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", str(packed), "--max_loss", "-1"])
    assert 'must be a number from 0, got "-1"' in capsys.readouterr().err


NAN = float("nan")


@pytest.mark.parametrize(
    ("before", "int8", "weight_only", "max_loss", "best"),
    [
        # Without labels only the checkpoint's own outputs will do.
        ({}, {}, {}, 0.01, "weight-only"),
        # Just as much as it may lose, one more, and more than the checkpoint has.
        ({"accuracy": 0.8}, {"accuracy": 0.79}, {"accuracy": 0.8}, 0.01, "int8"),
        ({"accuracy": 0.8}, {"accuracy": 0.78}, {"accuracy": 0.8}, 0.01, "weight-only"),
        ({"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.8}, 0.0, "int8"),
        # The metric that loses most decides, and one that is not a number is no proof.
        ({"accuracy": 0.8, "f1": 0.9}, {"accuracy": 0.9, "f1": 0.8}, {"accuracy": 0.8, "f1": 0.9}, 0.01, "weight-only"),
        (
            {"pearson": 0.8, "spearmanr": 0.8},
            {"pearson": 0.8, "spearmanr": NAN},
            {"pearson": NAN, "spearmanr": 0.8},
            0.5,
            None,
        ),
    ],
)
def test_the_fastest_file_that_is_accurate_enough(
    before: dict[str, float], int8: dict[str, float], weight_only: dict[str, float], max_loss: float, best: str | None
) -> None:
    engines = {
        name: Measured(10**6, 100 / speed, Comparison(difference, 0.5, metrics), command)
        for name, speed, difference, metrics, command in (
            ("PyTorch", 1.0, 0.0, before, ""),
            ("int8", 6.0, 0.25, int8, "model_int8.onnx"),
            ("weight-only", 3.0, 1e-6, weight_only, "model.onnx"),
        )
    }
    found = Benchmark("1 x 16", engines, {}, max_loss)
    assert found.recommended() == best
    last = found.table().splitlines()[-1]
    if not before:
        assert "it has its outputs; what others lose, sentences with labels (--validation_file) would show" in last
    elif best == "int8":
        assert last.startswith("Deploy model_int8.onnx: 6.00 times as fast as PyTorch, and it loses at most 0")
