"""Loads packed language models without moq_hf and compares their answers: for `trl_variants.py`.

    python benchmarks/stranger_lm.py RUN ...

A run's folder has `quantized` and, in `expected.pt`, a question and its answers. For each it prints a line of JSON:
whether logits and generated tokens are equal to those, and the largest difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def answers_of(model: Any, question: torch.Tensor, half: bool) -> dict[str, torch.Tensor]:
    """Logits and 12 greedy tokens; with `half` under autocast to bfloat16, as a run in `bf16` evaluates."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(input_ids=question).logits.float()
        tokens = model.generate(input_ids=question, max_new_tokens=12, do_sample=False)
    return {"logits": logits, "tokens": tokens}


def compare(run: Path) -> dict[str, Any]:
    """Load, compute, compare."""
    from transformers import AutoModelForCausalLM

    known, folder = torch.load(run / "expected.pt"), run / "quantized"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        if (folder / "adapter").is_dir():
            from peft import PeftModel

            # The first call unpacks the weights, which PEFT needs.
            model(input_ids=known["question"])
            model = PeftModel.from_pretrained(model, folder / "adapter")
        found = answers_of(model, known["question"], known["half"])
    except Exception as error:
        # Each of them is a result.
        return {"loading_error": f"{type(error).__name__}: {error}".splitlines()[0]}
    difference = (found["logits"] - known["logits"]).abs().max()
    equal = {f"{name}_are_equal": torch.equal(found[name], known[name]) for name in ("logits", "tokens")}
    return {**equal, "largest_difference": float(difference)}


if __name__ == "__main__":
    # None makes every import of it fail.
    sys.modules["moq_hf"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(json.dumps(compare(Path(name))), flush=True)
