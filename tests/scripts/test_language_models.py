"""`benchmarks/language_models.py` compares all ways on one model, and does not run again what it has."""

import json
import math
from pathlib import Path

import pytest
from hub_folders import tiny_llama

pytest.importorskip("trl", reason="the extra dev has it")
import language_models
from language_models import FLOAT, GPTQ, ROUNDED, SCALES, TAUGHT_FROM_GPTQ


def test_each_way_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_models, "CALIBRATION", 8)
    model, problems, out = tmp_path / "model", tmp_path / "gsm8k", tmp_path / "found.jsonl"
    tiny_llama(model, problems)
    arms = [FLOAT, ROUNDED, GPTQ, TAUGHT_FROM_GPTQ, SCALES]
    words = ["--model", str(model), "--data_dir", str(problems), "--model_dir", str(tmp_path / "models")]
    words += ["--output", str(out), "--steps", "4", "--context", "16", "--held_out", "4", "--problems", "2"]
    language_models.main([*words, "--forms", "2", "--arms", *arms])
    lines = {line["arm"]: line for line in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert lines.keys() == set(arms)
    for line in lines.values():
        assert len(line["losses"]) == 4
        assert line["perplexity"] == pytest.approx(math.exp(sum(line["losses"]) / 4), rel=1e-3)
    assert 0 <= lines[FLOAT]["solved"] <= 2
    # As many steps in all: the float model has both halves.
    halves = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert halves == ["float-1-1", "float-1-2"]
    language_models.main([*words, "--forms", "2", "--arms", FLOAT])
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(arms)
    capsys.readouterr()
    language_models.main(["--report", "--output", str(out)])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| 2 bits |") and f"{lines[SCALES]['perplexity']:.0f}" in row


def test_answers_are_the_numbers_after_four_hashes() -> None:
    assert language_models.answer("2 * 600 = 1200\n#### 1,200") == "1200"
    assert language_models.answer("So it is #### 7\nAnother problem") == "7"
    assert language_models.answer("I do not know.") is None
