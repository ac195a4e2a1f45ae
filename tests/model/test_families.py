"""What a stock Trainer delivers loads and generates in plain transformers, bit for bit, for more kinds of models."""

from pathlib import Path

import pytest
from families import FAMILIES, outcome
from model_zoo import PAGE, Stranger


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of so small a run would go into the picture in its model card."""
    monkeypatch.setattr("moq_hf.packed.card._draw", lambda path, layers: False)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_evaluated_is_what_loads(name: str, tmp_path: Path, stranger: Stranger) -> None:
    found = outcome(name, tmp_path, stranger)
    assert found.reply.get("equal") is True, found.reply
    assert found.proof.agrees is True and found.proof.examples == 4 and found.proof.largest_difference == 0.0
    assert found.losses[-1] < found.losses[0]
    row = found.row(name)
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"docs/reference/families.md lacks {row}"
