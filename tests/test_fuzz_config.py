"""Config files that nobody would write: a config or one `MoQConfigError`, and nothing else."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moq_hf.config import _keys

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fuzz_config  # noqa: E402

LONG = pytest.mark.skipif("MOQ_HF_LONG_TESTS" not in os.environ, reason="minutes; set MOQ_HF_LONG_TESTS to run it")
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


WORDS = sorted({word for path in _keys() for word in path.split(".")} | {"quantize_training", "quantize-algo"})
SCALARS: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["auto", "mse", "symmetric"])
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=6),
    max_leaves=12,
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.binary() | DOCUMENTS.map(lambda document: json.dumps(document).encode("utf-8", "surrogatepass")))
@example(b"")
@example(b"\xef\xbb\xbf\xef\xbb\xbf{}")
@example(b'{"a":' * 100_000)
@example(b"[" * 990 + b"]" * 990)
@example(b'{"quantize_bits": {"start_bits": ' + b"9" * 5000 + b"}}")
def test_invented_files_give_a_config_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "invented.json"
    path.write_bytes(content)
    with fuzz_config.limited():
        assert fuzz_config.read(path) in ("config", "refused", "error")
