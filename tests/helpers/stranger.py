"""A process that has transformers and compressed-tensors, and no moq_hf: it loads what it is told to and computes.

Run as a program it reads a line of JSON for each model, with its folder and class and a file of inputs and expected
outputs, and answers with a line of JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn


def outputs_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor that the model gives for a batch.

    No weight requires a gradient meanwhile: even where none is computed, PyTorch folds the batch into the rows of a
    product or not by that (`should_fold` of its matmul), and on some processors the two round differently.
    """
    model.eval()
    torch.manual_seed(0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with torch.no_grad():
            for parameter in trained:
                parameter.requires_grad_(False)
            return [value for value in model(**inputs).to_tuple() if torch.is_tensor(value)]
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


# Their mixers multiply with tensors that are not contiguous. compressed-tensors hands such a one to PyTorch in another
# way than a layer of ours or a plain one does, so that another kernel computes; on some processors the two round
# differently, with the same weights to the bit.
ROUNDED = ("Mamba", "FalconMamba", "Jamba")


def near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether two answers differ by the rounding of products alone."""
    pairs = list(zip(found, expected, strict=True))
    return all(float((one - other).abs().max()) <= 1e-5 * float(other.abs().max()) for one, other in pairs)


def tied_weights(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def generated_by(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What the model says next, if it is one that generates."""
    if not getattr(model, "can_generate", lambda: False)():
        return None
    prompt = {name: inputs[name] for name in (model.main_input_name, "attention_mask") if name in inputs}
    made: torch.Tensor = model.eval().generate(**prompt, max_new_tokens=4, do_sample=False)
    return made


def answer(folder: str, model: str, tensors: str, generate: bool = False) -> dict[str, Any]:
    """What a user of transformers sees who loads the model with `from_pretrained`."""
    own_code = {}
    if model.startswith("Auto"):
        own_code = {"trust_remote_code": True}
        # Beside the folder, and not at home.
        transformers.dynamic_module_utils.HF_MODULES_CACHE = f"{folder}-modules"
    loaded = getattr(transformers, model).from_pretrained(folder, **own_code)
    inputs, expected, text = torch.load(tensors)
    if generate:
        # Before anything else is called, as most users do.
        tokens = generated_by(loaded, inputs)
        assert (tokens is None) == (text is None), "one of the two generates, the other does not"
        assert tokens is None or torch.equal(tokens, text), "other tokens are generated"
    found = outputs_of(loaded, inputs)
    equal = [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]
    reply = {"equal": bool(equal) and all(equal), "tied": tied_weights(loaded)}
    return reply if reply["equal"] else {**reply, "near": near(found, expected)}


if __name__ == "__main__":
    # None makes every import of it fail.
    sys.modules["moq_hf"] = None  # type: ignore[assignment]
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            reply = answer(**json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
