"""The simulation of many ranks: it gives what was measured, and the docs have its tables."""

import json
import re
from pathlib import Path
from typing import Any

import at_scale
import programs
import pytest
from repo import ROOT

PAGE = (ROOT / "docs" / "evidence" / "at-scale.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT: dict[str, Any] = json.loads((RESULTS / "at_scale.json").read_text(encoding="utf-8"))
MEASURED: list[dict[str, Any]] = json.loads((RESULTS / "sharding.json").read_text(encoding="utf-8"))["results"]


def test_the_simulation_gives_what_four_processes_measured(tmp_path: Path) -> None:
    measured = {(line["dtype"], line["arm"], line["bits"]): line for line in MEASURED if not line["label"]}
    simulated = {(line["dtype"], line["arm"], line["bits"]): line for line in DOCUMENT["check"]}
    assert measured.keys() == simulated.keys()
    for name, line in simulated.items():
        assert line["gathered"] == measured[name]["gathered"]
        assert line["held"] == pytest.approx(measured[name]["held"], rel=1e-5)
    # As it is now, too: clipping ratios, scales and packed codes in one arm.
    out = tmp_path / "found.json"
    words = ["--check", "packed/4/bfloat16", "--models", "--out", str(out)]
    done = programs.run(str(ROOT / "benchmarks" / "at_scale.py"), *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["check"] == [simulated["bfloat16", "packed", 4]]


def test_what_is_counted_is_what_shapes_give() -> None:
    """Without a simulation: bf16 in two gatherings of each block and one of the rest, padded to equal parts."""
    for line in DOCUMENT["results"]:
        shape, ranks = at_scale.MODELS[line["model"]], line["shards"]
        hidden, inner, blocks = (shape[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        kv = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
        sizes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
        rest = [(shape["vocab_size"], hidden)] * 2 + [(hidden, 1)]

        def padded(size: tuple[int, int], ranks: int = ranks) -> int:
            return -(-size[0] // ranks) * ranks * size[1]

        # Two norms.
        codes, scales, floats = 0, 0, 2 * hidden
        for size in sizes:
            if line["arm"] == "packed" and size[0] % ranks == 0:
                codes += size[0] * size[1] * line["bits"] // 8
                scales += size[0] * (1 if line["groups"] == "per_channel" else size[1] // line["groups"])
            else:
                floats += padded(size)
        block = 2 * floats + codes + 4 * scales
        assert line["gathered"] == 2 * blocks * block + 2 * sum(map(padded, rest)), line
        assert line["message"] == block // ranks
        quantized = sum(rows * columns for rows, columns in sizes) * blocks
        assert line["quantized"] == (0 if line["arm"] == "float" else quantized)


def test_the_tables_in_the_docs_are_those_of_the_results() -> None:
    made = at_scale.tables(DOCUMENT, MEASURED)
    shown = dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end of \1 -->", PAGE, re.DOTALL))
    assert shown == made


def test_what_the_docs_say_of_the_results() -> None:
    results = at_scale.Results(DOCUMENT["results"])
    assert {cell[:3] for cell in results.cells} == {(m, *mesh) for m in at_scale.MODELS for mesh in at_scale.MESHES}
    cell = ("7B", 1, 8)
    values, ternary, packed = (results.line(cell, *arm) for arm in (("values", 4), ("values", 2), ("packed", 4)))
    every = values["quantized"]

    def each(line: dict[str, Any], place: str) -> float:
        return line["moved"][place] / every * 8

    assert f"they move {each(values, 'quantize'):.0f} bytes a weight" in PAGE
    assert f"at 2 bits {each(ternary, 'quantize'):.0f}. The check for NaN moves {each(values, 'check'):.0f}." in PAGE
    assert f"moves {packed['moved']['unpack'] / every / 2:.1f} bytes a weight" in PAGE
    assert f"**ZeRO-3** moves {values['zero'] / every / 2:.0f} bytes a weight in each pass" in PAGE
    layers = 7 * at_scale.MODELS["7B"]["num_hidden_layers"]
    assert f"{sum(values['launches'].values()) // layers}\noperations for each" in PAGE
    assert f"There are {values['reads']} in a step." in PAGE and packed["reads"] == values["reads"]
    assert f"{results.line(cell, 'values', 4, 1)['search']['all_reduces'] // layers} in a search" in PAGE
    for cell in results.whole:
        float_run, values, packed = (results.line(cell, *arm) for arm in (("float",), ("values", 4), ("packed", 4)))
        # Nothing is gathered beside what a float run gathers, and the host reads as often on any number of ranks.
        assert values["gathered"] == float_run["gathered"] and values["reads"] == 3
        assert values["all_reduces"] == 2
        for links in at_scale.LINKS:
            saved = values["gathered"] - packed["gathered"]
            seconds = at_scale.seconds_of_bytes(saved, cell[2], links)
            assert packed["launches"]["unpack"] * at_scale.LAUNCH > seconds
            assert (packed["moved"]["unpack"] / at_scale.MEMORY > seconds) == (cell[2] == 8 or links == 8)
