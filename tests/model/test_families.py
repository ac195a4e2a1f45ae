"""What a stock Trainer delivers loads and generates in plain transformers, bit for bit, for more kinds of models."""

from pathlib import Path

import pytest
from families import FAMILIES, outcome
from model_zoo import PAGE, Stranger
from stranger import ROUNDED


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_evaluated_is_what_loads(name: str, tmp_path: Path, stranger: Stranger) -> None:
    found = outcome(name, tmp_path, stranger)
    # The weights are those of the model to the bit: `outcome` has them verified.
    rounded = name in ROUNDED and found.reply.get("near") is True
    assert found.reply.get("equal") is True or rounded, found.reply
    assert found.proof.agrees is True and found.proof.examples == 4
    assert found.proof.largest_difference == 0.0 or name in ROUNDED
    assert found.losses[-1] < found.losses[0]
    row = found.row(name)
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"docs/reference/families.md lacks {row}"
