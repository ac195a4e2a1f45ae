"""Names of modules and parameters as the state dict has them, and the model without its wrappers."""

from collections.abc import Iterable, Iterator
from typing import cast

from torch import nn

from .transformers_seams import ADAPTED, CHECKPOINTED, COMPILED, FSDP2, ORIGINAL, TRAINED_COPIES, is_peft


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` wrapped; any other one as it is."""
    return cast(nn.Module, getattr(model, COMPILED, model))


def without_fsdp(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a model had before FSDP2 made another one of it."""
    if cls.__bases__[0].__name__ == FSDP2:
        return cast(type[nn.Module], cls.__bases__[1])
    return cls


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, by the names in the state dict: without those of activation checkpointing's wrappers.

    FSDP's `activation_checkpointing` puts one around each block, which hands attributes through; it has the same name.
    """
    for name, module in model.named_modules():
        yield f"{name}.".replace(f"{CHECKPOINTED}.", "")[:-1], module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `model.named_parameters(remove_duplicate=False)`, with the names of `named_modules`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(f"{CHECKPOINTED}.", ""), parameter


def without_peft(model: nn.Module) -> nn.Module:
    """The model that a `PeftModel` wraps, with the adapters in it; any other model as it is."""
    get = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    return cast(nn.Module, get()) if callable(get) else model


def adapters(model: nn.Module) -> list[str]:
    """The names of the modules that PEFT has put into the model, none of which is quantized.

    They lie beside the `base_layer` that they adapt, or are copies to be trained of an `original_module`.
    """
    found = []
    for name, module in named_modules(model):
        parts = dict(module.named_children())
        if ADAPTED in parts and is_peft(module):
            found += [f"{name}.{part}" for part in parts if part != ADAPTED]
        elif {ORIGINAL, TRAINED_COPIES} <= parts.keys() and is_peft(module):
            found.append(f"{name}.{TRAINED_COPIES}")
    return found


def plain_name(name: str, added: Iterable[str]) -> str | None:
    """What a module or tensor is called in the model before PEFT came; None for what belongs to one of its adapters."""
    if any(is_below(name, adapter) for adapter in added):
        return None
    return ".".join(part for part in name.split(".") if part not in (ADAPTED, ORIGINAL))


def is_below(name: str, module: str) -> bool:
    """Whether a name is that of a module or of something in it."""
    return name == module or name.startswith(module + ".")
