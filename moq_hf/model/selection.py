"""Which layers of a model a config quantizes, and what stands in the way: output heads, adapters, shared weights."""

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeGuard

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..config import MoQConfig
from ..errors import MoQError
from ..grid import PerGroup, RowBlocks
from ..names import adapters, is_below, named_modules, named_parameters, without_peft
from ..transformers_seams import ADAPTED, has_dora


def select_layers(model: nn.Module, config: MoQConfig) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers that the config quantizes, by name; without those of which `misfit` says why not.

    Raises:
        MoQError: As `quantize_model`.
    """
    every = dict(linears(model))
    if not every:
        found = sorted({type(module).__name__ for module in model.modules() if not list(module.children())})
        raise MoQError(f"the model has no linear layer to quantize; its layers are {', '.join(found) or 'none'}")
    if config.modules_to_not_convert is None:
        left_out = set(output_heads(model, every))
    else:
        left_out = set()
        modules = [name for name, _ in named_modules(model) if name]
        for pattern in config.modules_to_not_convert:
            matches = {name for name in every if _matches(name, pattern)}
            if not matches and not any(_matches(name, pattern) for name in modules):
                raise MoQError(
                    f"modules_to_not_convert: {pattern!r} matches no module; the linear layers are {', '.join(every)}"
                )
            left_out |= matches
    chosen = {name: layer for name, layer in every.items() if name not in left_out}
    if not chosen:
        reason = "modules_to_not_convert names" if config.modules_to_not_convert is not None else "output heads are"
        raise MoQError(f"no linear layer is left to quantize: {reason} all of them ({', '.join(every)})")
    _check_weights(chosen)
    misfits = {name: misfit(layer) for name, layer in chosen.items()}
    chosen = {name: layer for name, layer in chosen.items() if misfits[name] is None}
    if not chosen:
        told = ", ".join(f"{name} has {why}" for name, why in misfits.items())
        raise MoQError(f"no linear layer is left to quantize: {told}")
    _check_groups(chosen, config)
    _check_adapters(model, chosen)
    return chosen


def select_embeddings(model: nn.Module, config: MoQConfig) -> dict[str, nn.Embedding]:
    """The embedding tables that the config quantizes, by name: none without `quantize_embeddings`.

    Tables of which `misfit` says why, sparse ones and ones with a `max_norm` are left alone.

    Raises:
        MoQError: There is none, or one shares its weight with another layer.
    """
    if config.quantize_embeddings is None:
        return {}
    chosen = embeddings_to_quantize(model, config)
    if not chosen:
        raise MoQError("quantize_embeddings: the model has no embedding table that can be quantized; set it to null")
    sharing = shared_weights(model, chosen)
    if sharing:
        raise MoQError(
            f"quantize_embeddings: {'; '.join(sharing)}; a shared table is not supported: set quantize_embeddings to "
            "null, or name it in modules_to_not_convert"
        )
    return chosen


def embeddings_to_quantize(model: nn.Module, config: MoQConfig) -> dict[str, nn.Embedding]:
    """The embedding tables that `quantize_embeddings` takes, or would take, by name; shared ones too."""
    left_out, added = config.modules_to_not_convert or (), adapters(model)
    return {
        name: module
        for name, module in named_modules(model)
        if isinstance(module, nn.Embedding)
        and misfit(module) is None
        and module.max_norm is None
        and not module.sparse
        and not any(_matches(name, pattern) for pattern in left_out)
        and not any(is_below(name, adapter) for adapter in added)
    }


def misfit(module: nn.Module) -> str | None:
    """Why a linear layer or an embedding table cannot be quantized and stays as it is; None if it can be."""
    plain = (nn.Linear.forward, Conv1D.forward, nn.Embedding.forward)
    # One that is quantized already has a forward pass of ours, and a state. What accelerate hangs on the instance is
    # around the class's own.
    if type(module).forward not in plain and not hasattr(module, "moq"):
        return "a forward of its own"
    # Parametrizations and the old weight_norm compute it anew at each access: there is nothing to train, nor to keep.
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "a computed weight"
    return None


def shared_weights(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """One line for each of the layers whose weight is also another layer's."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for layer in layers:
        weight = model.get_submodule(layer).weight
        others = [name for name in names[id(weight)] if name != f"{layer}.weight"]
        if others:
            found.append(f"{layer}.weight is also {', '.join(others)}")
    return found


def output_heads(model: nn.Module, linears: Iterable[str]) -> list[str]:
    """Names of the linear layers that are output heads: by default they stay in full precision.

    For a transformers model with a base model: whatever lies outside of it. Otherwise the output embeddings; failing
    those, of a module made of transformers models (T5's two stacks, a body in a module of one's own) their heads and
    whatever lies outside of them; of any other module the last linear layer.
    """
    names = list(linears)
    inner = without_peft(model)
    if inner is not model:
        path = next(name for name, module in named_modules(model) if module is inner) + "."
        return [path + head for head in output_heads(inner, [name.removeprefix(path) for name in names])]
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and isinstance(getattr(model, prefix, None), nn.Module):
        return [name for name in names if not name.startswith(prefix + ".")]
    get = getattr(model, "get_output_embeddings", None)
    output = get() if callable(get) else None
    if output is not None:
        heads = [name for name, module in named_modules(model) if module is output]
        return [name for name in names if any(is_below(name, head) for head in heads)]
    parts: dict[str, nn.Module] = {}
    for path, module in named_modules(model):
        if path and hasattr(module, "base_model_prefix") and not any(is_below(path, part) for part in parts):
            parts[path] = module
    if parts:
        body = set[str]()
        for path, part in parts.items():
            inside = [name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")]
            body |= {f"{path}.{name}" for name in set(inside) - set(output_heads(part, inside))}
        return [name for name in names if name not in body]
    is_base_model = hasattr(model, "base_model_prefix")
    return [] if is_base_model or len(names) == 1 else names[-1:]


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear | Conv1D]]:
    """Every linear layer by its name, but for those of PEFT's adapters."""
    added = adapters(model)
    for name, module in named_modules(model):
        if not is_linear(module):
            continue
        if not any(is_below(name, adapter) for adapter in added):
            yield name, module


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer: `nn.Linear`, or `Conv1D` of transformers, quantized or not."""
    return isinstance(module, nn.Linear | Conv1D)


def _matches(name: str, pattern: str) -> bool:
    """A glob over the whole name, or a run of whole components of it: its beginning, its end, or in between."""
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


def _check_adapters(model: nn.Module, layers: Iterable[str]) -> None:
    """DoRA takes the norm of the float weight in training, and that of the quantized one once it is loaded."""
    parents = {name: model.get_submodule(name.removesuffix(f".{ADAPTED}")) for name in layers if ADAPTED in name}
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


def _check_groups(layers: Mapping[str, nn.Linear | Conv1D], config: MoQConfig) -> None:
    match config.grouping:
        case RowBlocks(count):
            key, axis, instead = "quantize_groups", "out_features", ', or "per_channel"'
        case PerGroup(count):
            key, axis, instead = "quantize_group_size", "in_features", ""
        case _:
            return
    sizes = {name: _features(layer)[axis] for name, layer in layers.items()}
    wrong = [f"{name} ({axis} {size})" for name, size in sizes.items() if size % count]
    if wrong:
        fits = [n for n in range(1, min(sizes.values()) + 1) if all(size % n == 0 for size in sizes.values())]
        near = sorted(fits, key=lambda n: abs(n - count))[:3]
        raise MoQError(
            f"{key} {count} does not divide the weights of {', '.join(wrong)}; "
            f"nearest values that fit every layer: {', '.join(map(str, sorted(near)))}{instead}"
        )
