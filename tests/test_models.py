"""Every family of models, on every task that transformers has a class for, ends in a model that loads bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from model_zoo import CASES, FAMILIES, MARKS, PAGE, TASKS, Outcome, Stranger, outcome, renew, ties

RENEW = "python tests/model_zoo.py"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of so small a run would go into the picture in its model card."""
    monkeypatch.setattr("moq_hf.card._draw", lambda path, layers: False)


def rows_of_page(text: str) -> dict[str, list[list[str]]]:
    """By model, the cells of its rows in the tables."""
    between = text.split(MARKS[0])[1].split(MARKS[1])[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in between.splitlines()]
    return {family: [row for row in rows if row[0] == family] for family in FAMILIES}


@pytest.mark.parametrize(("family", "task"), CASES)
def test_trains_to_the_target_and_loads_bit_for_bit(family: str, task: str, tmp_path: Path, stranger: Stranger) -> None:
    found = outcome(family, task, tmp_path, stranger)
    assert found.faults() == []
    cells, details = rows_of_page(PAGE.read_text(encoding="utf-8"))[family]
    renewed = f"renew docs/models.md, at the root of the repository, with:\n{RENEW}"
    assert cells[1 + list(TASKS).index(task)] == found.cell(), renewed
    assert {f"`{head}`" for head in found.in_float} <= set(details[1].split(", ")), renewed
    assert set(ties(found)) <= set(details[2].split("; ")), renewed
    assert details[3].endswith("unpacked while loading") == found.unpacked_while_loading, renewed


def test_the_page_has_no_cell_without_a_test() -> None:
    rows = rows_of_page(PAGE.read_text(encoding="utf-8"))
    filled = [
        (family, task)
        for family in FAMILIES
        for task, cell in zip(TASKS, rows[family][0][1:], strict=True)
        if cell != "-"
    ]
    assert filled == CASES


def test_the_page_is_renewed_by_what_came_out(tmp_path: Path) -> None:
    found = Outcome(["a", "b"], ["head"], [["head.weight", "table.weight"]], [], {4}, [], [], set(), True, {})
    page = tmp_path / "models.md"
    page.write_text(f"before\n{MARKS[0]}| stale |\n{MARKS[1]}after\n", encoding="utf-8")
    renew({("GPT-2", "causal LM"): found}, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{MARKS[0]}| model") and text.endswith(f"|\n{MARKS[1]}after\n")
    assert rows_of_page(text)["GPT-2"] == [
        ["GPT-2", "-", "-", "-", "-", "-", "2 of 3", "-", "-"],
        ["GPT-2", "`head`", "`head` = `table`", "packed, unpacked while loading"],
    ]
    assert "stale" not in text


@pytest.mark.parametrize(
    "change", [{"losses": [1.0, 1.0]}, {"unmoved": ["a"]}, {"bits": {4, 5}}, {"tied_after": [["a"]]}]
)
def test_what_goes_wrong_is_noticed(change: dict[str, Any]) -> None:
    found = Outcome(["a"], [], [], [], {4}, [2.0, 1.0], [], {"packed"}, False, {"equal": True, "tied": []})
    assert found.faults() == []
    assert len(found._replace(**change).faults()) == 1
    assert len(found._replace(reply={"error": "no such file"}).faults()) == 1
