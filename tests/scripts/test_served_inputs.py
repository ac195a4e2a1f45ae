"""`benchmarks/served_inputs.py` measures each file beside float, and goes on where an engine takes none."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import served_inputs
from packed_bert import SHAPE, TOKENIZER
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from moq_hf.export.onnx import onnx_runtime


def test_files_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sentences, out = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "found.json"
    BertForSequenceClassification(BertConfig(**SHAPE, num_labels=1)).save_pretrained(model)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(model)
    rows = [{"sentence1": f"A cat sat on {count} mats."} for count in range(8)]
    sentences.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    config, _ = served_inputs.FORMS["w8a8"]
    monkeypatch.setattr(served_inputs, "FORMS", {"w8a8": (config, ("float", "int8"))})

    def of_floats(path: Path, threads: int) -> Any:
        if path.name != "model_float.onnx":
            raise ValueError("no integers\nhere")
        return onnx_runtime(path, threads)

    monkeypatch.setattr(served_inputs, "loaders", lambda: {"ONNX Runtime": onnx_runtime, "other": of_floats})
    words = ["--model", str(model), "--train_file", str(sentences), "--seconds", "0", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["served_inputs.py", *words, "--out", str(out)])
    served_inputs.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["bytes"]["w8a8, int8"] < found["bytes"]["float"]
    own = found["times"]["ONNX Runtime"]["threads: 1"]
    assert own.keys() == {"1 x 32", "8 x 32"}
    for times in own.values():
        assert times["float"]["speed"] == 1 and times["w8a8, int8"]["turns"] == 3
    # The folder rounds inputs in plain transformers too.
    assert found["differences"]["ONNX Runtime"]["float"] < 1e-5
    assert found["differences"]["ONNX Runtime"]["w8a8, int8"] < 1e-4
    assert found["failed"] == {"other, w8a8, int8": "ValueError: no integers here"}
