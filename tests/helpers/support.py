"""The tables of docs/reference/support.md: who serves what a model is delivered as, asked of `moq_hf.serving`.

Layers and deliveries come from runs: `python tests/helpers/model_zoo.py` and `python tests/helpers/families.py`,
at the root of the repository, train every model and renew them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from repo import ROOT
from torch import nn

from moq_hf import MoQConfig
from moq_hf.model.delivery import describe
from moq_hf.model.selection import take_inventory
from moq_hf.servers import GGUF, ONNX, VLLM, Server
from moq_hf.serving import verdict
from moq_hf.text import markdown_table

PAGE = ROOT / "docs" / "reference" / "support.md"
COLUMNS = {"vLLM": VLLM, "llama.cpp": GGUF, "ONNX Runtime": ONNX}
NOT_TRIED = "-"
# Both are multiples of what the servers ask for, so that a tiny model stands for its family.
ROWS = FEATURES = 256


def config_of(convolutions: bool = False, kept: str | None = None) -> MoQConfig:
    """4 bits, one scale per channel: what every server takes of a linear layer."""
    return MoQConfig.from_dict(
        {
            "quantize_bits": {"start_bits": 4, "target_bits": 4},
            "quantize_groups": "per_channel",
            "quantize_convolutions": convolutions,
            "modules_to_not_convert": None if kept is None else [kept],
        }
    )


def answer(model: nn.Module, server: Server, convolutions: bool = False, kept: str | None = None) -> str:
    """What a server says of the family: "yes", "no" or `NOT_TRIED`.

    Layers that it takes as floats alone count as floats: a user names them in `modules_to_not_convert`.
    """
    config = config_of(convolutions, kept)
    found = describe(take_inventory(model, config), config, 4)
    architecture = found.architecture
    weights = {
        name: replace(weight, shape=(ROWS, FEATURES))
        for name, weight in found.weights.items()
        if not re.search(server.in_float, f"{architecture} {name}")
    }
    floats = {*found.floats, *found.weights} - weights.keys()
    said = verdict(replace(found, weights=weights, floats=floats), server).answer
    return NOT_TRIED if said == "not tried" else said


def summary(answers: Mapping[str, str]) -> str:
    """Answers by task as one cell: a word for all of them, or the tasks with which it was tried."""
    said = set(answers.values())
    if len(said) == 1:
        return said.pop()
    return ", ".join(task for task, said in answers.items() if said == "yes") or NOT_TRIED


def rows_of(name: str) -> dict[str, list[str]]:
    """The rows of a table of the page, by their first cell."""
    between = PAGE.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in between.splitlines()]
    return {row[0]: row for row in rows}


def renew(name: str, rows: Sequence[Sequence[Any]]) -> None:
    """Write a table into the page."""
    pattern = f"(?s)(?<=<!-- {name} -->\n).*(?=<!-- end of {name} -->)"
    text, count = re.subn(pattern, lambda _: markdown_table(rows) + "\n", PAGE.read_text(encoding="utf-8"))
    assert count == 1, f"{PAGE} must have one place for the table {name}"
    PAGE.write_text(text, encoding="utf-8")
