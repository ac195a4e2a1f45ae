"""Names of modules and parameters as the state dict has them, and the model without its wrappers."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from .errors import MoQError
from .seams.engines import FSDP2
from .seams.sentence_transformers import body_of
from .seams.transformers import (
    ADAPTED,
    CHECKPOINTED,
    COMPILED,
    ORIGINAL,
    PROMPTS,
    TRAINED_COPIES,
    called_part,
    is_peft,
)

# Parts that PEFT adds to the name of a layer that it adapts, or of which it trains a copy.
_OF_PEFT = re.compile(rf"(^|\.)({ADAPTED}|{ORIGINAL}|{TRAINED_COPIES}\.[^.]+)(?=\.|$)")


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside the wrapper of `torch.compile`; any other model as it is."""
    return getattr(model, COMPILED, model)


def unwrapped(model: Any) -> nn.Module:
    """The module that is trained, without the wrapper that a Trainer shows: torch.compile's, or a model of SetFit.

    PEFT's wrapper stays, since its names are those of the state dict; see
    `without_peft`.

    Raises:
        MoQError: It is not a module.
    """
    model = uncompiled(model)
    # SetFit's Trainer shows its callbacks the object around the module that it trains.
    body = model if isinstance(model, nn.Module) else getattr(model, "model_body", None)
    if isinstance(body, nn.Module):
        return body
    what = type(model).__name__
    if isinstance(model, type):
        what = f"the class {model.__name__}"
    raise MoQError(f"the model must be a torch.nn.Module, got {what}")


def without_fsdp(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a model had before FSDP2 derived another one."""
    if cls.__bases__[0].__name__ == FSDP2:
        return cls.__bases__[1]
    return cls


def named_modules(
    model: nn.Module, *, every: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The names of `model.named_modules()` as the state dict has them: without activation checkpointing's wrappers.

    FSDP's `activation_checkpointing` puts one around each block, which passes attributes
    through; both have the same name here.

    Args:
        model: Any module.
        every: Yield each name of a module that is in several places, not only the first.

    >>> list(dict(named_modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))))
    ['', '0', '1']
    """
    for name, module in model.named_modules(remove_duplicate=not every):
        yield f"{name}.".replace(f"{CHECKPOINTED}.", "")[:-1], module


def without_peft(model: nn.Module) -> nn.Module:
    """The model that a `PeftModel` wraps, including its adapters; any other model as it is."""
    get = getattr(model, "get_base_model", None)
    if callable(get) and hasattr(model, "peft_config"):
        return cast(nn.Module, get())
    return model


def pretrained(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's wrapper or a Sentence Transformers model; any other model as it is."""
    inner = without_peft(uncompiled(model))
    return body_of(inner) or inner


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT's wrappers of layers by name; the layer is called `base_layer` in each."""
    return {
        name: module
        for name, module in named_modules(model)
        if ADAPTED in module._modules and is_peft(module)
    }


def adapters(model: nn.Module, merged: bool = False) -> list[str]:
    """The names of PEFT's modules that are not part of the delivered model; none of them is quantized.

    They are next to the `base_layer` that they adapt, or are trained copies of an
    `original_module`; if adapters are merged, the original is the one not delivered.
    Prompts are next to the whole base.

    Args:
        model: The model, including PEFT's modules.
        merged: Whether adapters are merged into the layers.
    """
    names = []
    for name, module in named_modules(model):
        parts: dict[str, Any] = module._modules
        if {ORIGINAL, TRAINED_COPIES} <= parts.keys() and is_peft(module):
            kept = called_part(module) if merged else ORIGINAL
            copies = [f"{TRAINED_COPIES}.{copy}" for copy in parts[TRAINED_COPIES]]
            every = [ORIGINAL, *copies]
        elif ADAPTED in parts and is_peft(module):
            kept, every = ADAPTED, [*parts]
        elif PROMPTS in parts and hasattr(module, "peft_config"):
            kept, every = "", [PROMPTS]
        else:
            continue
        names += [f"{name}.{part}".lstrip(".") for part in every if part != kept]
    return names


def plain_name(name: str, added: Iterable[str]) -> str | None:
    """The name that a module or tensor had before PEFT; None for a part of one of its adapters.

    >>> plain_name("encoder.base_layer.weight", ["encoder.lora_A"])
    'encoder.weight'
    >>> plain_name("encoder.lora_A.weight", ["encoder.lora_A"]) is None
    True
    >>> plain_name("pooler.modules_to_save.default.dense", ["pooler.original_module"])
    'pooler.dense'
    """
    if is_below(name, *added):
        return None
    return _OF_PEFT.sub("", name).lstrip(".")


def is_below(name: str, *modules: str) -> bool:
    """True if a name is that of one of these modules, or of something inside it.

    >>> is_below("layer.1.query", "layer.1"), is_below("layer.11", "layer.1")
    (True, False)
    """
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
