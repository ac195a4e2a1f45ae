"""`moq-hf bench` measures every engine at every shape and writes a table, JSON and a plot."""

import json
from pathlib import Path

import pytest
from packed_bert import SHAPE, checkpoint, config_of
from transformers import BertConfig, BertForSequenceClassification

from moq_hf import MoQError
from moq_hf.cli import main
from moq_hf.deploy.bench import benchmark

ENGINES = ["PyTorch float", "PyTorch packed", "ONNX float", "ONNX weight-only", "ONNX int8"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = BertForSequenceClassification(BertConfig(**SHAPE))
    return checkpoint(tmp_path_factory.mktemp("bench") / "packed", model, config_of())


def test_table_json_and_plot(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(packed), "--batch", "1", "2", "--sequence", "8", "--threads", "1", "--repeats", "2"]
    assert main([*words, "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert [t["engine"] for t in found["timings"]] == ENGINES * 2
    assert all(0 < t["p50"] <= t["p90"] for t in found["timings"])
    assert [t["speed"] for t in found["timings"] if t["engine"] == "PyTorch float"] == [1.0, 1.0]
    assert found["bytes"].keys() == found["memory"].keys() == set(ENGINES)
    # Without PyTorch in the process.
    assert found["memory"]["ONNX int8"] < found["memory"]["PyTorch float"] / 2
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "| 1 x 8 |" in table and "| 2 x 8 |" in table and "threads: 1" in table


def test_too_long_a_sequence(packed: Path) -> None:
    with pytest.raises(MoQError, match="longer than the 64 positions"):
        benchmark(packed, sequences=[65])
