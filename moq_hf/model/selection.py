"""Select the layers of a model that a config quantizes, and refuse what cannot be: adapters, shared weights, groups."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from ..config import MoQConfig
from ..config_fields import given_in, matches
from ..errors import MOST_FAULTS, MoQError, shortened
from ..grid import Grouping, PerChannel
from ..inputs import inputs_out_of_reach
from ..names import adapted_layers, is_below, pretrained
from ..processes import check_supported, is_partitioned
from ..quant_experts import experts_parameters, matrix_of
from ..seams.transformers import (
    ADAPTED,
    active_lora,
    factors_base,
    has_adapter,
    has_dora,
    lora_fault,
    trains_tokens,
)
from ..servers import NAMED
from ..weight_spec import MAX_PACKED_BITS
from .delivery import check_served
from .inventory import (
    CONVOLUTIONS,
    LINEARS,
    Inventory,
    Layer,
    is_packed,
    misfit,
    output_heads,
    unfit,
)
from .sizes import is_unpacked

# Bits of tables where the config says "auto", unless those would widen all codes of the
# file.
AUTO_TABLE_BITS = 8


def take_inventory(model: Any, config: MoQConfig) -> Inventory:
    """The inventory of a model, with the layers that a config quantizes; no layers if it is not enabled.

    Args:
        model: A module, or a Trainer's wrapper of it.
        config: The config to follow.

    Raises:
        MoQError: What `quantize_model` raises, except for NaN and Inf; or a server in
            `serve` cannot take what is chosen.
    """
    inventory = Inventory.of(model, config.enabled and config.lora == "merged")
    if not config.enabled:
        return inventory
    if is_packed(inventory.model):
        raise MoQError(
            "the model comes from a packed checkpoint: call moq_hf.dequantize_model(model) before training it"
        )
    check_supported(inventory.model)
    lazy = [name for name, parameter in inventory.parameters() if is_lazy(parameter)]
    if lazy:
        raise MoQError(
            f"{shortened(lazy)}: no shape before the first call: call the model once before it is quantized"
        )
    experts = select_experts(inventory, config)
    layers, left_out = select_layers(inventory, config, bool(experts))
    inventory = replace(inventory, layers=layers)
    inventory = replace(inventory, **_tables(inventory, config))
    embeddings = inventory.embeddings
    tied = select_tied(inventory, {**embeddings, **layers}, config)
    inventory = replace(
        inventory,
        layers={name: layer for name, layer in layers.items() if name not in tied},
        experts=experts,
        embeddings={
            name: table for name, table in embeddings.items() if name not in tied
        },
        tied=tied,
        left_out={
            name: reason for name, reason in left_out.items() if name not in tied
        },
    )
    _check_overrides(inventory.scheduled, config)
    _check_adapters(inventory)
    check_served(inventory, config)
    return inventory


def _check_overrides(scheduled: Iterable[str], config: MoQConfig) -> None:
    """Check that each glob of `overrides` decides something of a layer.

    Raises:
        MoQError: One means none, and the text lists those of similar names; or later
            globs overrule it.
    """
    names = list(scheduled)
    # A layer and a key to the glob that decides it, the last one.
    decides: dict[tuple[str, str], str] = {}
    for glob, own in config.overrides.items():
        means = [name for name in names if matches(name, glob)]
        if not means:
            near = difflib.get_close_matches(glob, names, 3, 0.0)
            raise MoQError(
                f"overrides: {glob!r} matches no layer that is quantized; near are {', '.join(near)}; output heads "
                f"need {config.spell('heads')}: true, and tables have the bits of {config.spell('embeddings')}"
            )
        decides |= {(name, key): glob for name in means for key in given_in(own)}
    globs = list(config.overrides)
    for index, glob in enumerate(globs):
        if glob not in decides.values():
            raise MoQError(
                f"overrides: {glob!r} decides nothing, since of several globs the last one counts: put it after "
                f"{', '.join(globs[index + 1 :])}, or leave it out"
            )


def split_blocks(
    blocks: Mapping[str, Sequence[str]], config: MoQConfig
) -> dict[str, list[str]]:
    """Make blocks of their own of what `overrides` give other bits than the rest of a block has.

    Args:
        blocks: Block name to its layers.
        config: The config to follow.

    >>> config = MoQConfig(bits=4, overrides={"query": {"bits": 8}})
    >>> split_blocks({"layer.0": ["layer.0.query", "layer.0.key"]}, config)
    {'layer.0 (8 bits)': ['layer.0.query'], 'layer.0': ['layer.0.key']}
    """
    usual = config.variants()[""].span_in_words
    found = {}
    for block, layers in blocks.items():
        parts: dict[str, list[str]] = {}
        for layer in layers:
            parts.setdefault(config.of(layer).span_in_words, []).append(layer)
        for span, part in parts.items():
            is_usual = span == usual or len(parts) == 1
            found[block if is_usual else f"{block} ({span})"] = part
    return found


def select_layers(
    inventory: Inventory, config: MoQConfig, has_experts: bool = False
) -> tuple[dict[str, Layer], dict[str, str | None]]:
    """The linear layers and convolutions that the config quantizes, and those that it leaves in float, by name.

    Args:
        inventory: The inventory of the model.
        config: The config to follow.
        has_experts: Whether there are experts to quantize besides these layers.

    Returns:
        Name to layer; and for those left in float, name to the reason, None where the
        config or the place in the model is the reason. The second includes embedding
        tables that cannot be quantized, if the config names their bits.

    Raises:
        MoQError: There is nothing to quantize, a pattern in
            `modules_to_not_convert` matches nothing, a weight is none of floats,
            groups do not divide it, or DoRA adapts it.
    """
    classes = LINEARS + (CONVOLUTIONS if config.convolutions else ())
    every = inventory.instances(*classes)
    what = "linear layer or convolution" if config.convolutions else "linear layer"
    convolutions = inventory.instances(*CONVOLUTIONS)
    if config.convolutions and not convolutions:
        raise MoQError(
            f"{config.spell('convolutions')}: the model has no convolution; leave the key out"
        )
    kept = _kept_by(inventory, config, every)
    asked = {name: layer for name, layer in every.items() if name not in kept}
    _check_weights(asked)
    routers = _routers(inventory)
    reasons = {
        name: "routes to experts" if name in routers else misfit(layer)
        for name, layer in every.items()
    }
    chosen = {name: layer for name, layer in asked.items() if reasons[name] is None}
    if not chosen and not has_experts:
        hint = ""
        if convolutions and not config.convolutions:
            hint = f"; {config.spell('convolutions')}: true would quantize convolutions"
        why = {name: f"has {reason}" for name, reason in reasons.items()}
        why |= {
            name: "is in modules_to_not_convert"
            if _is_named(name, config)
            else f"is an output head ({config.spell('heads')})"
            for name in kept
        }
        listed = shortened((f"{name} {why[name]}" for name in every), MOST_FAULTS)
        raise MoQError(
            f"no {what} is left to quantize: {listed or 'the model has none'}{hint}"
        )
    _check_groups({name: _features(layer) for name, layer in chosen.items()}, config)
    _check_fused(inventory, chosen, config)
    left_out = {name: reasons[name] for name in every if name not in chosen}
    if isinstance(config.embeddings, int):
        for name, table in inventory.instances(nn.Embedding).items():
            reason = _why_no_table(table)
            if reason is not None:
                left_out[name] = reason
    return chosen, left_out


def _tables(inventory: Inventory, config: MoQConfig) -> dict[str, Any]:
    """Find the embedding tables that the config quantizes, their bits, and why those of "auto" stay in float.

    Raises:
        MoQError: The config names bits, and no table can be quantized.
    """
    if config.embeddings is None:
        return {}
    tables = embeddings_to_quantize(inventory, config)
    if config.embeddings != "auto":
        if not tables:
            every = inventory.instances(nn.Embedding).items()
            why = {name: _why_no_table(table) for name, table in every}
            told = "; ".join(f"{name} has {why[name]}" for name in why if why[name])
            raise MoQError(
                f"{config.spell('embeddings')}: the model has no embedding table that can be quantized"
                f"{told and f' ({told})'}; set it to null"
            )
        return {"embeddings": tables, "table_bits": config.embeddings}
    refuses = [name for name in config.serve if "embedding" in NAMED[name].without]
    if refuses and tables:
        return {
            "tables_stay": f"{' and '.join(refuses)} take{'s' * (len(refuses) == 1)} them as floats"
        }
    if tables and not is_encoder(inventory):
        return {"tables_stay": "the model is no encoder of transformers"}
    # An output head that shares a table is in float unless the config says otherwise.
    # A pruned or normalized layer computes its weight.
    linear = {id(x._parameters.get("weight")) for x in inventory.linears.values()}
    shared = [n for n, table in tables.items() if id(table.weight) in linear]
    return {
        "embeddings": {n: t for n, t in tables.items() if n not in shared},
        "table_bits": widest_codes(inventory, config)
        if is_unpacked(inventory)
        else AUTO_TABLE_BITS,
        "tables_stay": f"a layer shares {', '.join(shared)}" if shared else None,
    }


def widest_codes(inventory: Inventory, config: MoQConfig) -> int:
    """The most bits that codes of the layers will have in the end, 2 to 8; 8 where all are saved as floats.

    Args:
        inventory: With the layers.
        config: That has chosen them.
    """
    targets = {bits for name in inventory.layers for bits in config.of(name).targets}
    coded = [bits for bits in targets if 2 <= bits <= MAX_PACKED_BITS]
    return max(coded, default=MAX_PACKED_BITS)


def is_encoder(inventory: Inventory) -> bool:
    """Whether there are models of transformers in a model, and none of them decodes."""
    models = [m for m in inventory.modules.values() if isinstance(m, PreTrainedModel)]
    return bool(models) and not any(map(_decodes, models))


def _decodes(model: PreTrainedModel) -> bool:
    config = model.config
    kind = type(config)
    if getattr(config, "is_decoder", False) or model.can_generate():
        return True
    # GPT-2 and Llama are decoders in all their classes, BERT is in one.
    only_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    only_causal = only_causal and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return only_causal or bool(getattr(config, "is_encoder_decoder", False))


def select_experts(inventory: Inventory, config: MoQConfig) -> dict[str, nn.Module]:
    """The parameters of experts that the config quantizes, by name, each with its module.

    Experts that PEFT adapts are left alone, since PEFT computes their sum with the
    adapter in each forward pass.

    Raises:
        MoQError: Groups do not divide the matrices, or are not alike in all experts; or
            the config quantizes the inputs of layers, which experts have inside.
    """
    every = _experts(inventory).items()
    chosen = {name: module for name, module in every if not _is_named(name, config)}
    if chosen and config.activations.enabled:
        raise MoQError(
            f"{config.spell('activations')}: the inputs of experts cannot be quantized ({', '.join(chosen)}); leave it "
            'out, or add "experts" to modules_to_not_convert'
        )
    _check_fit({n: m._parameters[n.rpartition(".")[2]] for n, m in chosen.items()})
    sizes = {}
    for name, module in chosen.items():
        _, rows, columns = matrix_of(module, name.rpartition(".")[2])
        sizes[name] = {"out_features": rows, "in_features": columns}
    _check_groups(sizes, config)
    # Loaders of packed files know one group size for all experts.
    if len({config.of(name).grouping for name in chosen}) > 1:
        raise MoQError(
            f"overrides: group_size must be the same for all experts ({', '.join(chosen)}); their bits may differ"
        )
    return chosen


def select_tied(
    inventory: Inventory, chosen: Mapping[str, nn.Module], config: MoQConfig
) -> dict[str, str]:
    """The modules that share the weight of a chosen one, and compute with its quantized copy.

    The first of `chosen` with a weight decides how it is quantized. So
    `embeddings` decides for a table that is also the output head; without it, a
    head that is quantized as a linear layer decides for the table.

    Args:
        inventory: The inventory of the model.
        chosen: What the config quantizes, by name, embedding tables first.
        config: The config to follow.

    Returns:
        Name of the module to the name of the chosen one.

    Raises:
        MoQError: One of them cannot be quantized, or the config leaves it in float by
            name.
    """
    owners: dict[int, str] = {}
    for name, module in chosen.items():
        owners.setdefault(id(module._parameters["weight"]), name)
    tied: dict[str, str] = {}
    wrong = []
    for name, module in inventory.modules.items():
        for attribute, parameter in module._parameters.items():
            owner = owners.get(id(parameter), name)
            if owner == name:
                continue
            tied[name] = owner
            reason = _why_not_tied(inventory, name, attribute, config)
            if reason is not None:
                wrong.append(f"{owner}.weight is also {name}.{attribute}, {reason}")
    if wrong:
        instead = (
            f"set {config.spell('embeddings')} to null"
            if inventory.table_bits
            else "leave the layers in float"
        )
        raise MoQError(
            f"{'; '.join(wrong)}: a shared weight is quantized for all that use it or for none: {instead}, or name all "
            "of them in modules_to_not_convert"
        )
    return tied


def _why_not_tied(
    inventory: Inventory, name: str, own: str, config: MoQConfig
) -> str | None:
    """Why a module cannot compute with the quantized copy of a weight that it shares; None if it can."""
    module = inventory.modules[name]
    if (
        own != "weight"
        or not isinstance(module, nn.Linear | nn.Embedding)
        or inventory.is_added(name)
    ):
        return f"of a {type(module).__name__}"
    if _is_named(name, config):
        return "which modules_to_not_convert names"
    why = misfit(module) if isinstance(module, nn.Linear) else _why_no_table(module)
    return None if why is None else f"which has {why}"


def _why_no_table(module: nn.Embedding) -> str | None:
    if module.max_norm is not None:
        return "a max_norm"
    return "sparse gradients" if module.sparse else misfit(module)


def _experts(inventory: Inventory) -> dict[str, nn.Module]:
    """Every parameter of experts that could be quantized, by name, with its module; PEFT's adapted ones excluded."""
    return {
        f"{name}.{attribute}": module
        for name, module in inventory.modules.items()
        if not inventory.is_added(name) and name.rpartition(".")[2] != ADAPTED
        for attribute in experts_parameters(module)
    }


def embeddings_to_quantize(
    inventory: Inventory, config: MoQConfig
) -> dict[str, nn.Embedding]:
    """The embedding tables that `embeddings` quantizes, or would, by name, including shared ones."""
    tables = inventory.instances(nn.Embedding).items()
    return {
        name: table
        for name, table in tables
        if _why_no_table(table) is None and not _is_named(name, config)
    }


def _kept_by(
    inventory: Inventory, config: MoQConfig, candidates: Collection[str]
) -> set[str]:
    """The candidates that `modules_to_not_convert` names, and the output heads unless `heads` is true.

    Raises:
        MoQError: A name or glob matches no module.
    """
    known = [*filter(None, inventory.modules), *_experts(inventory)]
    for pattern in config.modules_to_not_convert or ():
        if not any(matches(name, pattern) for name in known):
            what = (
                "linear layers and convolutions"
                if config.convolutions
                else "linear layers"
            )
            parts = {part for name in known for part in name.split(".")}
            near = difflib.get_close_matches(pattern, sorted(parts), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise MoQError(
                f"modules_to_not_convert: {pattern!r} matches no module{hint}; the {what} are "
                f"{', '.join(candidates) or 'none'}"
            )
    heads = () if config.heads else output_heads(inventory.model, list(candidates))
    return {name for name in candidates if name in heads or _is_named(name, config)}


def _routers(inventory: Inventory) -> set[str]:
    """The linear layers beside experts that route to them: one output per expert, or one for the shared expert."""
    routers = set[str]()
    for name, module in inventory.modules.items():
        parent, _, last = name.rpartition(".")
        is_list = last == "experts" and isinstance(
            module, (nn.ModuleList, nn.ModuleDict)
        )
        parts = [*module.children()] if is_list else []
        if parameters := experts_parameters(module):
            experts = matrix_of(module, parameters[0])[0]
        elif parts:
            experts = len(parts)
        else:
            continue
        for other, layer in inventory.linears.items():
            if not is_below(other, parent) or is_below(other, name):
                continue
            # Such a list can lie beside the attention.
            own = other[len(parent) :].strip(".")
            is_beside = not parts or "." not in own or "router" in own or "gate" in own
            if is_beside and _features(layer)["out_features"] in (1, experts):
                routers.add(other)
    return routers


def _is_named(name: str, config: MoQConfig) -> bool:
    return any(
        matches(name, pattern) for pattern in config.modules_to_not_convert or ()
    )


def _check_weights(layers: Mapping[str, Layer]) -> None:
    _check_fit({n: layer._parameters.get("weight") for n, layer in layers.items()})
    late = [
        name
        for name, layer in layers.items()
        if hasattr(layer, "moq") and misfit(layer) is not None
    ]
    if late:
        raise MoQError(
            f"{', '.join(late)}: the weight has been parametrized since the layer was quantized; remove the "
            "parametrization and call dequantize_model before registering it"
        )


def _check_fit(weights: Mapping[str, Tensor | None]) -> None:
    """Refuse weights that are no floats in memory of their own, by the names of what has them.

    Raises:
        MoQError: There are some; says which, and what to do.
    """
    wrong: dict[str, list[str]] = {}
    for name, weight in weights.items():
        reason = None if weight is None else unfit(weight)
        if reason is not None:
            wrong.setdefault(reason, []).append(name)
    if not wrong:
        return
    told = [f"{shortened(names)} ({reason})" for reason, names in wrong.items()]
    raise MoQError(
        f"these layers cannot be quantized: {'; '.join(told)}: start from a model in float32, bfloat16 or float16, or "
        "name the layers in modules_to_not_convert"
    )


def _check_adapters(inventory: Inventory) -> None:
    """Refuse adapters with which something else would be delivered than what was trained.

    DoRA that is not merged takes the norm of the float weight in training, and of the
    quantized one after loading; a few other tuners take its factors.

    Raises:
        MoQError: There are such adapters, or none where they are to be merged; names the
            layers.
    """
    tables = [
        name
        for name, module in inventory.model.named_modules()
        if trains_tokens(module)
    ]
    if tables:
        raise MoQError(
            f"PEFT: trainable_token_indices ({shortened(tables)}) is written as part of the base, which then lacks its "
            "table: name the table in modules_to_save"
        )
    wrappers = adapted_layers(inventory.model)
    if inventory.merged and (not wrappers or has_adapter(pretrained(inventory.model))):
        raise MoQError(
            'lora: "merged", and the model is none of peft.get_peft_model with LoRA: call that before, or leave the '
            "key out"
        )
    quantized = {*inventory.layers, *inventory.embeddings, *inventory.tied}
    # Where the adapters of each weight lie: PEFT can tie those of layers that share it.
    places: dict[str, set[int]] = {}
    wrong: dict[str, list[str]] = {}
    for wrapper_name, wrapper in wrappers.items():
        name = f"{wrapper_name}.{ADAPTED}"
        fault = None
        if not inventory.merged:
            fault = _why_not_beside(wrapper) if name in quantized else None
        elif not (fault := lora_fault(wrapper)):
            if name not in quantized:
                fault = "cannot be merged into what stays in float: quantize it, or take it out of target_modules"
            # Without their scalings.
            parts = [
                part
                for lora in active_lora(wrapper)
                for part in lora[1:]
                if part is not None
            ]
            place = {part.data_ptr() for part in parts}
            if places.setdefault(inventory.tied.get(name, name), place) != place:
                fault = (
                    "two adapters of one weight: set ensure_weight_tying, without DoRA"
                )
            if any(map(is_partitioned, parts)):
                fault = "ZeRO-3 does not gather adapters for other modules: use FSDP2 or ZeRO-2"
        if fault:
            wrong.setdefault(fault, []).append(name)
    if wrong:
        told = [f"{fault} ({shortened(names)})" for fault, names in wrong.items()]
        raise MoQError(f"PEFT: {'; '.join(told)}")


def _why_not_beside(wrapper: Any) -> str | None:
    """Why something else would be loaded than a float adapter that was trained beside a quantized weight."""
    if has_dora(wrapper):
        return 'DoRA on quantized layers would compute something else after loading: set "lora": "merged"'
    tuner = factors_base(wrapper)
    if tuner is None:
        return None
    return (
        f"the adapters of {tuner} are made of the weights again when they are loaded, and quantized weights make other "
        "ones: name these layers in modules_to_not_convert, or use LoRA"
    )


def _check_fused(
    inventory: Inventory, layers: Iterable[str], config: MoQConfig
) -> None:
    """Refuse to round the inputs of layers that PyTorch computes in one fused call, some in evaluation alone.

    Raises:
        MoQError: There are such layers; the text names them.
    """
    fused = inventory.instances(nn.TransformerEncoderLayer, nn.MultiheadAttention)
    wrong = [name for name in layers if is_below(name, *fused)]
    if wrong and config.activations.enabled:
        raise MoQError(inputs_out_of_reach(wrong, config.spell("activations")))


def _features(layer: Layer) -> dict[str, int]:
    if isinstance(layer, Conv1D):
        return {"out_features": layer.nf, "in_features": layer.nx}
    if isinstance(layer, nn.Linear):
        return {"out_features": layer.out_features, "in_features": layer.in_features}
    return {"out_channels": layer.out_channels}


def _check_groups(features: Mapping[str, Mapping[str, int]], config: MoQConfig) -> None:
    """Check that the config's groups divide all weights.

    Raises:
        MoQError: They do not; the text says which would.
    """
    by_grouping: dict[Grouping, dict[str, Mapping[str, int]]] = {}
    for layer, own in features.items():
        by_grouping.setdefault(config.of(layer).grouping, {})[layer] = own
    for grouping, features_of_layers in by_grouping.items():
        # Channels divide every weight.
        if isinstance(grouping, PerChannel):
            continue
        axis, count = grouping.divides
        sizes: list[int] = []
        wrong: list[str] = []
        for layer, own in features_of_layers.items():
            for name in {axis, axis.replace("features", "channels")} & own.keys():
                sizes.append(own[name])
                if own[name] % count:
                    wrong.append(f"{layer} ({name} {own[name]})")
        if wrong:
            common = math.gcd(*sizes)
            fits = [n for n in range(1, common + 1) if common % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - count))[:3])
            raise MoQError(
                f"{config.spell(grouping.key)} {count} does not divide the weights of {shortened(wrong, MOST_FAULTS)}; "
                f"nearest values that fit every layer: {', '.join(map(str, near))}{grouping.instead}"
            )
