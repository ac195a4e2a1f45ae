"""What a stock Trainer delivers loads and generates in plain transformers, bit for bit, for more kinds of models."""

from pathlib import Path

import pytest
import support
from families import FAMILIES, HEAD, REPRESENTATIVE, cells, outcome, served
from long_tests import long_but_for
from model_zoo import Stranger
from stranger import ROUNDED


@pytest.mark.parametrize(("name",), long_but_for(REPRESENTATIVE, [(name,) for name in FAMILIES]))
def test_what_was_evaluated_is_what_loads(name: str, tmp_path: Path, stranger: Stranger) -> None:
    found = outcome(name, tmp_path, stranger)
    # The weights are those of the model to the bit: `outcome` has them verified.
    rounded = name in ROUNDED and found.reply.get("near") is True
    assert found.reply.get("equal") is True or rounded, found.reply
    assert found.proof.agrees is True and found.proof.examples == 4
    assert found.proof.largest_difference == 0.0 or name in ROUNDED
    assert found.losses[-1] < found.losses[0]
    renewed = "renew docs/reference/support.md, at the root of the repository, with: python tests/helpers/families.py"
    assert support.rows_of("families")[name][1:5] == cells(name, found), renewed


def test_the_page_has_who_serves_them() -> None:
    shown = {name: row[5:] for name, row in support.rows_of("families").items() if name in FAMILIES}
    assert support.rows_of("families")[HEAD[0]] == HEAD
    assert shown == {name: served(name) for name in FAMILIES}
