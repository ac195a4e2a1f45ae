"""Loads a packed language model without moq_hf and compares its answers: for `trl_variants.py`.

    python benchmarks/stranger_lm.py FOLDER EXPECTED.pt

The last line is JSON: whether logits and generated tokens are equal to what is expected, and the largest difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def answers_of(model: Any, question: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and 12 greedy tokens."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=question).logits
        tokens = model.generate(input_ids=question, max_new_tokens=12, do_sample=False)
    return {"logits": logits, "tokens": tokens}


def main(folder: Path, expected: Path) -> None:
    """Load, compute, compare."""
    from transformers import AutoModelForCausalLM

    known = torch.load(expected)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        # The first call unpacks the weights, which PEFT needs.
        model(input_ids=known["question"])
        model = PeftModel.from_pretrained(model, folder / "adapter")
    found = answers_of(model, known["question"])
    difference = (found["logits"] - known["logits"]).abs().max()
    equal = {f"{name}_are_equal": torch.equal(found[name], known[name]) for name in ("logits", "tokens")}
    print(json.dumps({**equal, "largest_difference": float(difference)}))


if __name__ == "__main__":
    # None makes every import of it fail.
    sys.modules["moq_hf"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
