"""Which layers of a model a config quantizes, and what stands in the way: output heads, adapters, shared weights."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..config import MoQConfig
from ..errors import MoQError
from ..names import is_below, plain_name, unwrapped
from ..processes import check_supported
from ..quant_experts import experts_parameters, matrix_of
from ..transformers_seams import ADAPTED, has_dora
from .inventory import Inventory, is_linear, is_packed, misfit


def take_inventory(model: Any, config: MoQConfig, known: Inventory | None = None) -> Inventory:
    """What is in a model, with the layers that a config quantizes: none where it is not enabled.

    Args:
        model: A module, or what a Trainer shows around it.
        config: What to look for.
        known: One that was taken before with this config: given back if it would be the same now.

    Raises:
        MoQError: What `quantize_model` raises, but for NaN and Inf.
    """
    model = unwrapped(model)
    found = known if known is not None and known.describes(model) else Inventory.of(model)
    if not config.enabled:
        return found
    if is_packed(found.model):
        raise MoQError(
            "the model comes from a packed checkpoint: call moq_hf.dequantize_model(model) before training it"
        )
    check_supported([module for _, module in found.named], [parameter for _, parameter in found.parameters()])
    # Afresh for a known one too: the same modules may have other weights, sizes or settings by now.
    layers, embeddings = select_layers(found, config), select_embeddings(found, config)
    experts = select_experts(found, config)
    left_out = _left_out(found, layers, config)
    if (layers, experts, embeddings, left_out) == (found.layers, found.experts, found.embeddings, found.left_out):
        return found
    return replace(found, layers=layers, experts=experts, embeddings=embeddings, left_out=left_out)


def select_layers(inventory: Inventory, config: MoQConfig) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers that the config quantizes, by name; without those of which `_reason` says why not.

    Raises:
        MoQError: There is none and no experts either, a pattern in `modules_to_not_convert` matches nothing, a weight
            is not floating point, groups do not divide it, or DoRA adapts it.
    """
    every = inventory.linears
    # Then nothing must be left.
    has_others = bool(select_experts(inventory, config))
    if not every and not has_others:
        leaves = {type(module).__name__ for module in inventory.modules.values() if not list(module.children())}
        raise MoQError(
            f"the model has no linear layer to quantize; its layers are {', '.join(sorted(leaves)) or 'none'}"
        )
    left_out = _kept_by(inventory, config)
    chosen = {name: layer for name, layer in every.items() if name not in left_out}
    if not chosen and not has_others:
        reason = "modules_to_not_convert names" if config.modules_to_not_convert is not None else "output heads are"
        raise MoQError(f"no linear layer is left to quantize: {reason} all of them ({', '.join(every)})")
    _check_weights(chosen)
    routers = _routers(inventory)
    misfits = {name: _reason(name, layer, routers) for name, layer in chosen.items()}
    chosen = {name: layer for name, layer in chosen.items() if misfits[name] is None}
    if not chosen and not has_others:
        listed = ", ".join(f"{name} has {why}" for name, why in misfits.items())
        raise MoQError(f"no linear layer is left to quantize: {listed}")
    _check_groups({name: _features(layer) for name, layer in chosen.items()}, config)
    _check_adapters(inventory, chosen)
    return chosen


def select_experts(inventory: Inventory, config: MoQConfig) -> dict[str, nn.Module]:
    """The parameters of experts that the config quantizes, by their names, each with its module.

    Those of a module that PEFT adapts are left alone: it computes their sum with the adapter anew.

    Raises:
        MoQError: Groups do not divide the matrices, or the config quantizes the inputs of layers, which experts have
            inside.
    """
    patterns = config.modules_to_not_convert or ()
    chosen = {
        name: module
        for name, module in _experts(inventory).items()
        if not any(_matches(name, pattern) for pattern in patterns)
    }
    if chosen and config.activation.enabled:
        raise MoQError(
            f"activation_quantization: the inputs of experts cannot be quantized ({', '.join(chosen)}); leave it out, "
            'or add "experts" to modules_to_not_convert'
        )
    sizes = {}
    for name, module in chosen.items():
        _, rows, columns = matrix_of(module, name.rpartition(".")[2])
        sizes[name] = {"out_features": rows, "in_features": columns}
    _check_groups(sizes, config)
    return chosen


def select_embeddings(inventory: Inventory, config: MoQConfig) -> dict[str, nn.Embedding]:
    """The embedding tables that the config quantizes, by name: none without `quantize_embeddings`.

    Tables of which `misfit` says why, sparse ones and ones with a `max_norm` are left alone.

    Raises:
        MoQError: There is none, or one shares its weight with another layer.
    """
    if config.quantize_embeddings is None:
        return {}
    chosen = embeddings_to_quantize(inventory, config)
    if not chosen:
        raise MoQError("quantize_embeddings: the model has no embedding table that can be quantized; set it to null")
    sharing = inventory.shared(chosen)
    if sharing:
        raise MoQError(
            f"quantize_embeddings: {'; '.join(sharing)}; a shared table is not supported: set quantize_embeddings to "
            "null, or name it in modules_to_not_convert"
        )
    return chosen


def _experts(inventory: Inventory) -> dict[str, nn.Module]:
    """Every parameter of experts that could be quantized, by its name, with its module; none that PEFT adapts."""
    return {
        f"{name}.{attribute}": module
        for name, module in inventory.modules.items()
        if not inventory.is_added(name) and name.rpartition(".")[2] != ADAPTED
        for attribute in experts_parameters(module)
    }


def embeddings_to_quantize(inventory: Inventory, config: MoQConfig) -> dict[str, nn.Embedding]:
    """The embedding tables that `quantize_embeddings` takes, or would take, by name; shared ones too."""
    patterns = config.modules_to_not_convert or ()
    return {
        name: module
        for name, module in inventory.modules.items()
        if isinstance(module, nn.Embedding)
        and misfit(module) is None
        and module.max_norm is None
        and not module.sparse
        and not any(_matches(name, pattern) for pattern in patterns)
        and not inventory.is_added(name)
    }


def _kept_by(inventory: Inventory, config: MoQConfig) -> set[str]:
    """The linear layers that `modules_to_not_convert` names, or the output heads where it is absent.

    Raises:
        MoQError: A name or glob matches no module.
    """
    if config.modules_to_not_convert is None:
        return set(inventory.heads)
    kept = set[str]()
    others = [*filter(None, inventory.modules), *_experts(inventory)]
    for pattern in config.modules_to_not_convert:
        matches = {name for name in inventory.linears if _matches(name, pattern)}
        if not matches and not any(_matches(name, pattern) for name in others):
            raise MoQError(
                f"modules_to_not_convert: {pattern!r} matches no module; "
                f"the linear layers are {', '.join(inventory.linears)}"
            )
        kept |= matches
    return kept


def _left_out(inventory: Inventory, layers: Iterable[str], config: MoQConfig) -> dict[str, str | None]:
    """See `Inventory.left_out`."""
    found: dict[str, str | None] = {}
    routers = _routers(inventory)
    for name, module in inventory.modules.items():
        table = isinstance(module, nn.Embedding) and config.quantize_embeddings is not None
        reason = _reason(name, module, routers) if is_linear(module) or table else None
        if (is_linear(module) or reason) and name not in layers and plain_name(name, inventory.adapters):
            found[name] = reason
    return found


def _routers(inventory: Inventory) -> set[str]:
    """The linear layers beside experts that weigh them: an output for each expert, or one for the shared expert."""
    found = set[str]()
    for name, module in inventory.modules.items():
        own = experts_parameters(module)
        beside = name.rpartition(".")[0]
        for other, layer in inventory.linears.items() if own else ():
            if is_below(other, beside) and _features(layer)["out_features"] in (1, matrix_of(module, own[0])[0]):
                found.add(other)
    return found


def _reason(name: str, module: nn.Module, routers: Collection[str]) -> str | None:
    """Why a linear layer or an embedding table stays as it is, whatever the config says; None if it need not."""
    return "routes to experts" if name in routers else misfit(module)


def _matches(name: str, pattern: str) -> bool:
    """A glob over the whole name, or a run of whole components of it: its beginning, its end, or in between.

    >>> [_matches("layer.1.query", pattern) for pattern in ("layer.*", "1.query", "1.que")]
    [True, True, False]
    """
    return fnmatch.fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def _check_weights(layers: Mapping[str, nn.Linear | Conv1D]) -> None:
    odd = [f"{name} ({layer.weight.dtype})" for name, layer in layers.items() if not layer.weight.is_floating_point()]
    if odd:
        raise MoQError(
            f"these layers are quantized already, their weights are not floating point: {', '.join(odd)}; "
            "load the model in float, or name them in modules_to_not_convert"
        )
    late = [name for name, layer in layers.items() if hasattr(layer, "moq") and misfit(layer) is not None]
    if late:
        raise MoQError(
            f"{', '.join(late)}: the weight has been parametrized since the layer was quantized; remove the "
            "parametrization and call dequantize_model before registering it"
        )


def _check_adapters(inventory: Inventory, layers: Iterable[str]) -> None:
    """DoRA takes the norm of the float weight in training, and that of the quantized one once it is loaded.

    Raises:
        MoQError: There are adapters of DoRA; names them.
    """
    parents = {name: inventory.modules[name.removesuffix(f".{ADAPTED}")] for name in layers if ADAPTED in name}
    wrong = [name for name, parent in parents.items() if has_dora(parent)]
    if wrong:
        raise MoQError(
            f"DoRA on quantized layers would compute something else after loading: {', '.join(wrong)}; use LoRA "
            "without use_dora, or name them in modules_to_not_convert"
        )


def _features(layer: nn.Linear | Conv1D) -> dict[str, int]:
    if isinstance(layer, Conv1D):
        return {"out_features": layer.nf, "in_features": layer.nx}
    return {"out_features": layer.out_features, "in_features": layer.in_features}


def _check_groups(features: Mapping[str, Mapping[str, int]], config: MoQConfig) -> None:
    grouping = config.grouping
    if grouping.divides is None:
        return
    axis, count = grouping.divides
    sizes = {name: own[axis] for name, own in features.items()}
    wrong = [f"{name} ({axis} {size})" for name, size in sizes.items() if size % count]
    if wrong:
        fits = [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
        near = sorted(fits, key=lambda n: abs(n - count))[:3]
        raise MoQError(
            f"{grouping.key} {count} does not divide the weights of {', '.join(wrong)}; "
            f"nearest values that fit every layer: {', '.join(map(str, sorted(near)))}{grouping.instead}"
        )
