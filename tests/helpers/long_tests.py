"""Tests that take minutes, which run where `MOQ_HF_LONG_TESTS` is set."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG = pytest.mark.skipif("MOQ_HF_LONG_TESTS" not in os.environ, reason="minutes; set MOQ_HF_LONG_TESTS to run it")


def long_but_for(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, of which only those in `short` run at any time."""
    return [case if case in short else pytest.param(*case, marks=LONG) for case in cases]
