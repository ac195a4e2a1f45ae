"""Runs that are killed at a random moment end, resumed with default arguments, as if nothing had happened."""

import json
from collections.abc import Sequence
from pathlib import Path

import kills
import programs
import pytest
from long_tests import LONG
from repo import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "kills.jsonl"


# Two of the three have one config, so that one uninterrupted run is compared with both.
@pytest.mark.parametrize("seeds", [(1, 2, 8), pytest.param(range(50), marks=[LONG, pytest.mark.slow])], ids=len)
def test_a_killed_run_ends_as_if_nothing_had_happened(seeds: Sequence[int], tmp_path: Path) -> None:
    programs.warm()
    expected: dict[tuple[bool, str], dict[str, str]] = {}
    lines = [kills.kill_and_resume(kills.Case.draw(seed), tmp_path, expected) for seed in seeds]
    for line in lines:
        print(json.dumps(line))
    assert [line["seed"] for line in lines if not line["equal"]] == []
    assert {line["trainer"] for line in lines} == set(kills.TRAINERS)
    # The digests can tell configs apart.
    assert len({result["weights"] for result in expected.values()}) == len(expected) > 1


def test_the_committed_kills_are_those_of_the_seeds() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    drawn = [kills.Case.draw(seed)._asdict() for seed in range(50)]
    assert [{key: line[key] for key in kills.Case._fields} for line in lines] == drawn
    assert all(line["equal"] for line in lines) and any(line["half_written"] for line in lines)
