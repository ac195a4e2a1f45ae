"""The dialogues of examples/sft, and what the page on language models says of TRL's trainers."""

import json
import sys
from collections import Counter
from typing import Any

import pytest
import trl_variants
from repo import ROOT

PAGE = ROOT / "docs" / "guide" / "language-models.md"
RESULTS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "trl.json").read_text(encoding="utf-8"))


def pairs(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)
    return [tuple(message["content"] for message in row["messages"]) for row in rows]


def test_answers_of_questions_held_out_are_known_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "sft"))
    from dialogues import dialogues

    try:
        train, held_out = (pairs(part) for part in dialogues())
        assert (train, held_out) == tuple(pairs(part) for part in dialogues())
    finally:
        del sys.modules["dialogues"]
    questions = [question for question, _ in (*train, *held_out)]
    assert len(set(questions)) == len(questions) == 288 and len(held_out) == 48
    known = Counter(answer for _, answer in train)
    assert {known[answer] for _, answer in held_out} <= {1, 2, 3}
    # Nothing but a thing's own facts gives its answer.
    assert len({answer for _, answer in (*train, *held_out)}) == 72


def test_the_readme_has_the_figures_of_the_run() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "sft.json").read_text(encoding="utf-8"))
    text = (ROOT / "examples" / "sft" / "README.md").read_text(encoding="utf-8")
    assert [size for size in found["bytes"].values() if f"| {size:,} |" not in text] == []
    for server, right in found["right"].items():
        assert f"| {right} of {found['questions']}, {server} |" in text
    assert f"TRL {found['versions']['trl']}" in text
    assert f"llama-cpp-python {found['versions']['llama-cpp-python']}" in text
    assert f"took {found['train_seconds']:.0f} seconds" in text


def test_the_table_is_that_of_the_committed_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"<!-- trl -->\n{trl_variants.table(RESULTS)}\n<!-- end of trl -->" in text
    assert f"TRL {RESULTS['versions']['trl']}" in text and f"PEFT {RESULTS['versions']['peft']}" in text
    assert f"for {RESULTS['steps']} steps" in text


def test_what_was_delivered_is_what_was_trained() -> None:
    variants = RESULTS["variants"]
    assert list(variants) == list(trl_variants.VARIANTS)
    trained = {name: result for name, result in variants.items() if "error" not in result}
    for name, result in trained.items():
        assert result["losses_are_finite"] and result["losses"][-1] < result["losses"][0], name
        assert result["bits"] == [4] and result["layers"] == 14 and result["proof_agrees"], name
        with_lora = "lora" in trl_variants.VARIANTS[name]
        # PEFT needs the weights of the base when it puts the adapters in.
        assert (result["has_adapter"], result["layout"]) == (with_lora, "unpacked" if with_lora else "packed"), name
    for name in ("full", "LoRA", "DPO, LoRA"):
        assert trained[name]["digest"] == trained[f"{name}, resumed"]["digest"]


def test_a_table_has_errors_and_differences_too() -> None:
    right = {"losses": [3.0, 1.0], "bits": [4], "layout": "packed", "has_adapter": True}
    document = {
        "variants": {
            "one": {**right, "logits_are_equal": True},
            "two": {**right, "has_adapter": False, "logits_are_equal": False, "largest_difference": 3e-7},
            "three": {"error": "MoQError: not so"},
        }
    }
    assert trl_variants.table(document).splitlines()[2:] == [
        "| one | 3.00 to 1.00 | 4 | packed and adapter | equal bit for bit |",
        "| two | 3.00 to 1.00 | 4 | packed | up to 3e-07 apart |",
        "| three | | | | MoQError: not so |",
    ]


def test_an_error_is_a_result() -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("first line\nsecond line")

    assert trl_variants.attempt(fails) == {"error": "ValueError: first line"}
    assert trl_variants.attempt(dict) == {}


def test_preferences_have_two_answers() -> None:
    try:
        rows = trl_variants.rows_for("preference")
        assert len(rows) == 240 and all(row.keys() == {"prompt", "chosen", "rejected"} for row in rows)
        assert sum(row["chosen"] == row["rejected"] for row in rows) < 12
        assert trl_variants.rows_for("prompt")[0].keys() == {"prompt", "completion"}
    finally:
        sys.modules.pop("dialogues", None)
