"""Config files that nobody would write: a config or one `MoQConfigError`, and nothing else."""

import json
from pathlib import Path

import fuzz_config
import pytest
from long_tests import LONG
from repo import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "fuzz_config.json"


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(10_000), marks=[LONG, pytest.mark.slow])], ids=len)
def test_any_file_gives_a_config_or_one_error(seeds: range, tmp_path: Path) -> None:
    result = fuzz_config.fuzz(seeds, tmp_path)
    print(json.dumps(result))
    assert result["wrong"] == []
    # Each outcome is there: the cases reach what they are for.
    assert all(result[outcome] > len(seeds) / 100 for outcome in ("config", "refused", "error"))


def test_the_committed_count_is_of_the_same_cases() -> None:
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert result["wrong"] == [] and result["cases"] == 10_000
    assert sum(result[outcome] for outcome in ("config", "refused", "error")) == 10_000


def test_what_goes_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(path: Path) -> str:
        if b"quantize" not in path.read_bytes():
            raise OverflowError("too much")
        return "config"

    monkeypatch.setattr(fuzz_config, "read", wrong)
    (found,) = fuzz_config.fuzz(range(300), tmp_path)["wrong"][:1]
    assert (found["kind"], found["text"]) == ("OverflowError", "too much")
    assert b"quantize" not in fuzz_config.case(found["seed"])
