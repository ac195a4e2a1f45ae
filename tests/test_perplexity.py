"""The perplexity study: its corpus, its runs on a tiny model, and that the docs have the tables of its lines."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import perplexity
import pytest
import stdlib_text
import tiny_glue
from perplexity import BASIC, BITS, MOQ, ON, ROUNDED, TAUGHT, Found, Settings
from repo import ROOT
from stdlib_text import Corpus
from tiny_glue import quiet_logging

__all__ = ["quiet_logging"]
LINES = ROOT / "benchmarks" / "results" / "perplexity.jsonl"
SMALL = {"vocabulary": 300, "hidden": 32, "intermediate": 32, "layers": 1, "heads": 2, "context": 16, "batch": 4}
MODULE = '''# First, a comment.
"""Docstring of the module."""

def function(value):
    """Docstring.

    Its second paragraph.
    """
    text = "no docstring"  # a comment behind code
    return value
'''


def test_the_corpus_is_docstrings_and_comments_in_their_order(tmp_path: Path) -> None:
    for place in ("module", "test/module", "package/tests/module", "encodings/module"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{place}.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "empty.py").write_text("x = 1\n", encoding="utf-8")
    corpus = stdlib_text.read(tmp_path)
    text = "First, a comment.\nDocstring of the module.\nDocstring.\n\nIts second paragraph.\na comment behind code"
    assert {**corpus.train, **corpus.validation} == {"module": text}
    assert corpus.digest() == Corpus(dict(corpus.train), dict(corpus.validation)).digest()
    assert corpus.digest() != Corpus({"module": text + "."}, {}).digest()


def test_whole_modules_are_held_out_by_their_names() -> None:
    names = [f"package.module{number}" for number in range(1000)]
    held_out = [name for name in names if stdlib_text.is_held_out(name)]
    assert 60 < len(held_out) < 140
    # The split is part of the study.
    assert stdlib_text.is_held_out("asyncio.tasks") and not stdlib_text.is_held_out("argparse")


@pytest.mark.usefixtures("quiet_logging")
def test_the_study_runs_goes_on_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row["sentence"] for row in tiny_glue.make_rows("sst2", 60)]
    corpus = Corpus({"a": "\n".join(rows[:50])}, {"b": "\n".join(rows[50:])})
    monkeypatch.setattr(stdlib_text, "read", lambda: corpus)
    monkeypatch.setattr(perplexity, "Settings", functools.partial(Settings, **SMALL, steps=4, further_steps=20))
    words = [f"--{name}={tmp_path / place}" for name, place in (("output", "lines.jsonl"), ("model_dir", "models"))]
    words += ["--seeds", "1", "--bits", "2"]
    perplexity.main(words)
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    by_arm = {line["arm"]: line for line in lines}
    assert list(by_arm) == ["float", ON, ROUNDED, BASIC, MOQ, TAUGHT]
    assert [line["steps"] for line in lines] == [0, 20, 0, 20, 20, 20]
    assert [line["bits"] for line in lines] == [32, 32, 2, 2, 2, 2]
    assert all(by_arm[arm]["layer_bits"] == [2] for arm in (BASIC, MOQ, TAUGHT))
    assert by_arm[MOQ]["last_drop"] == 6 and by_arm[BASIC]["last_drop"] is None
    assert len({line["perplexity"] for line in lines}) == 6
    tokens, size = by_arm["float"]["tokens"]["validation"], by_arm["float"]["validation_bytes"]
    assert size == len(corpus.validation["b"]) and tokens < size
    assert all(1 < line["perplexity"] < 600 and 0 < line["bits_per_byte"] < math.log2(300) for line in lines)

    # What is there is not run again; what is lost comes out the same.
    kept = [line for line in lines if line["arm"] != BASIC]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    perplexity.main(words)
    again = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    assert again[:-1] == kept and again[-1]["perplexity"] == by_arm[BASIC]["perplexity"]

    page = tmp_path / "page.md"
    page.write_text("<!-- perplexity -->\nold\n<!-- end of perplexity -->\n", encoding="utf-8")
    perplexity.main([*words, "--report", "--page", str(page)])
    assert "old" not in page.read_text(encoding="utf-8")
    capsys.readouterr()
    perplexity.main([*words, "--report"])
    assert capsys.readouterr().out.count(BASIC) == 2


def line(arm: str, bits: int, seed: int, value: float, rate: float = 1e-3) -> dict[str, Any]:
    rate = 0.0 if arm in ("float", ROUNDED) else rate
    common = {"settings": Settings().__dict__, "bits_per_byte": value / 100, "perplexity": value}
    return {"arm": arm, "bits": bits, "seed": seed, "rate": rate, **common}


def test_differences_are_paired_by_seed() -> None:
    floats = {1: 50.0, 2: 100.0, 3: 200.0}
    lines = [line("float", 32, seed, value) for seed, value in floats.items()]
    lines += [line(ROUNDED, 2, seed, value * (1.1 + seed / 100)) for seed, value in floats.items()]
    lines += [line(ON, 32, seed, floats[seed] * 0.9) for seed in (1, 2)]
    lines += [line(TAUGHT, 2, seed, floats[seed] * 1.08) for seed in (1, 2)]
    # Another seed, learning rate and size do not count.
    lines += [line("float", 32, 9, 1.0), line(TAUGHT, 2, 3, 1.0, rate=1.0)]
    lines.append({**line(TAUGHT, 2, 3, 1.0), "settings": {**Settings().__dict__, "steps": 1}})
    found = Found(lines, 1e-3)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in found.table().splitlines()[2:]]
    assert rows == [
        ["", "float", "3", "116.67", "1.167", "", "", ""],
        ["", ON, "2", "67.50", "0.675", "-10.0 ± 0.0", "", ""],
        # 11, 12 and 13 %: the mean 12, standard error 1 / sqrt 3, and Student's t is 4.303.
        ["2", ROUNDED, "3", "131.17", "1.312", "+12.0 ± 2.5", "", ""],
        # 1.08 / 1.11 and 1.08 / 1.12.
        ["2", TAUGHT, "2", "81.00", "0.810", "+8.0 ± 0.0", "+20.0 ± 0.0", "-3.1 ± 5.5"],
    ]
    # What had no further steps, against what had none; what had them, against what had them.
    assert found.summary().splitlines()[-1] == "| 2 | +12.0 ± 2.5 |  |  | +20.0 ± 0.0 |"


@pytest.mark.parametrize("name", ["evidence/perplexity", "guide/language-models"])
def test_the_tables_are_those_of_the_committed_lines(name: str, tmp_path: Path) -> None:
    text, copy = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    perplexity.main(["--report", "--page", str(copy)])
    command = f"python benchmarks/perplexity.py --report --page docs/{name}.md"
    assert copy.read_text(encoding="utf-8") == text, f"renew them with: {command}"
    assert "| bits | rounded |" in text


def test_the_committed_lines_are_of_one_study() -> None:
    lines = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    for name in ("corpus", "settings", "parameters", "tokens", "validation_bytes", "tokenizers"):
        assert len({json.dumps(line[name]) for line in lines}) == 1, name
    assert {line["bits"] for line in lines} <= {32, *BITS}
    assert {line["layer_bits"][0] == line["bits"] for line in lines if "layer_bits" in line} == {True}
