"""What a result was measured with, and the file it is written to."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from moq_hf.export.environment import machine, versions


def environment(*modules: str, **more: Any) -> dict[str, Any]:
    """The command, the machine and the versions.

    Args:
        modules: Those whose versions count too, beside Python, torch, transformers and moq_hf.
        more: More of the machine.
    """
    # The folders of a machine say nothing to others.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    return {
        "command": " ".join(["python", f"benchmarks/{Path(words[0]).name}", *words[1:]]),
        "machine": {**machine(), "threads": torch.get_num_threads(), **more},
        "versions": versions("python", "torch", "transformers", *modules, "moq_hf"),
    }


def write(document: dict[str, Any], path: Path) -> None:
    """Write JSON, and make its folder if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
