"""Selects the layers that a config quantizes; refuses adapters, shared weights and groups that do not allow it."""

import difflib
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import nn
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
from ..grid import PerChannel
from ..inputs import inputs_out_of_reach
from ..names import adapted_layers, is_below, pretrained
from ..processes import check_supported, is_gathered_per_pass, is_partitioned
from ..quant_experts import experts_parameters, matrix_of
from ..quant_linear import QuantModule
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
from ..trained_scales import SCALES_APART
from ..weight_spec import MAX_PACKED_BITS
from .delivery import check_served
from .inventory import (
    CONVOLUTIONS,
    LINEARS,
    Inventory,
    is_convolution,
    is_packed,
    output_heads,
    unfit,
    why_not_quantizable,
)
from .sizes import is_unpacked

Value = TypeVar("Value")

# Bits of embedding tables for "auto", unless 8 would widen all codes of the file.
AUTO_TABLE_BITS = 8


def take_inventory(model: Any, config: MoQConfig) -> Inventory:
    """The inventory of a model, with the layers that a config quantizes; no layers if it is not enabled.

    Args:
        model: A module, or a Trainer's wrapper of it.
        config: The config to follow.

    Raises:
        MoQError: What `quantize_model` raises, except for NaN and Inf; or a server in
            `serve` cannot take the choice.
    """
    inventory = Inventory.of(model, config.enabled and config.lora == "merged")
    if not config.enabled:
        return inventory
    _check_ready(inventory)
    classes = LINEARS + (CONVOLUTIONS if config.convolutions else ())
    every = replace(
        inventory,
        layers=inventory.instances(*classes),
        experts=_experts(inventory),
        tables=inventory.instances(nn.Embedding),
    )
    _check_names(every, config)
    kept, cannot = _kept(every, config), _cannot(every)
    _check_weights(every, kept, cannot)
    stay = {**cannot, **kept}
    layers, experts = _without(every.layers, stay), _without(every.experts, stay)
    if not (layers or experts):
        raise MoQError(_nothing_left(every, config, stay))
    _check_inputs(inventory, config, layers, experts)
    _check_groups(config, layers, experts)
    tables = _without(every.tables, stay)
    unfit_tables = {name: cannot[name] for name in every.tables if name in cannot}
    inventory = replace(inventory, layers=layers, experts=experts, tables=tables)
    inventory = replace(inventory, **_tables(inventory, config, unfit_tables))
    tied = _tied(inventory, config, cannot)
    left = {name: cannot.get(name) for name in every.layers if name in stay}
    if isinstance(config.embeddings, int):
        left |= unfit_tables
    inventory = replace(
        inventory,
        layers=_without(layers, tied),
        embeddings=_without(inventory.embeddings, tied),
        left_out=_without(left, tied),
        tied=tied,
    )
    _check_overrides(inventory, config)
    if config.train == "scales":
        _check_scales(inventory)
    _check_adapters(inventory)
    check_served(inventory, config)
    return inventory


def _without(those: Mapping[str, Value], names: Container[str]) -> dict[str, Value]:
    return {name: value for name, value in those.items() if name not in names}


def _told(reasons: Mapping[str, str]) -> str:
    """Reasons, each with the names that have it.

    >>> _told({"0": "a weight of int8", "1": "a weight of int8"})
    'a weight of int8 (0, 1)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{reason} ({shortened(names[reason])})" for reason in names)


def _check_ready(inventory: Inventory) -> None:
    """Check that a model can be quantized as it is now.

    Raises:
        MoQError: It is packed, it is wrapped by an unsupported engine, or it has no
            shapes yet.
    """
    if is_packed(inventory.model):
        raise MoQError(
            "the model comes from a packed checkpoint: call moq_hf.dequantize_model(model) before training it"
        )
    check_supported(inventory.model)
    lazy = [name for name, parameter in inventory.parameters() if is_lazy(parameter)]
    if lazy:
        raise MoQError(
            f"{shortened(lazy)}: no shape before the first call: call the model once before quantizing it"
        )


def _experts(inventory: Inventory) -> dict[str, nn.Module]:
    """Every parameter of experts by name, with its module.

    Parameters that PEFT adapts are left out, since PEFT adds the adapter to them in each
    forward pass.
    """
    return {
        f"{name}.{attribute}".lstrip("."): module
        for name, module in inventory.modules.items()
        if not inventory.is_added(name) and name.rpartition(".")[2] != ADAPTED
        for attribute in experts_parameters(module)
    }


def _kept(every: Inventory, config: MoQConfig) -> dict[str, str]:
    """Why the config leaves layers, experts and tables in float, by name."""
    kept = {}
    if not config.heads:
        reason = f"is an output head ({config.spell('heads')})"
        kept = dict.fromkeys(output_heads(every.model, [*every.layers]), reason)
    for name in (*every.scheduled, *every.tables):
        if _is_named(name, config):
            kept[name] = "is in modules_to_not_convert"
    return kept


def _cannot(every: Inventory) -> dict[str, str]:
    """Why layers and tables cannot be quantized, by name."""
    cannot = {}
    for name, module in {**every.layers, **every.tables}.items():
        reason = why_not_quantizable(module)
        if reason is not None:
            cannot[name] = reason
    return cannot | dict.fromkeys(_routers(every), "routes to experts")


def _is_named(name: str, config: MoQConfig) -> bool:
    return any(
        matches(name, pattern) for pattern in config.modules_to_not_convert or ()
    )


def _check_names(every: Inventory, config: MoQConfig) -> None:
    """Check that each name and glob of `modules_to_not_convert` matches a module, and that `convolutions` has effect.

    Raises:
        MoQError: One does not.
    """
    if config.convolutions and not any(map(is_convolution, every.layers.values())):
        raise MoQError(
            f"{config.spell('convolutions')}: the model has no convolution; leave the key out"
        )
    known = [*filter(None, every.modules), *every.experts]
    for pattern in config.modules_to_not_convert or ():
        if not any(matches(name, pattern) for name in known):
            parts = {part for name in known for part in name.split(".")}
            near = difflib.get_close_matches(pattern, sorted(parts), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            what = "linear layers" + " and convolutions" * config.convolutions
            raise MoQError(
                f"modules_to_not_convert: {pattern!r} matches no module{hint}; the {what} are "
                f"{', '.join(every.layers) or 'none'}"
            )


def _check_weights(
    every: Inventory, kept: Container[str], cannot: Container[str]
) -> None:
    """Check that weights are plain dense floats, and were not parametrized after they were quantized.

    Raises:
        MoQError: Some are not; names them, and says what to do.
    """
    asked = _without({**every.experts, **every.layers}, kept)
    faults: dict[str, str] = {}
    for name, module in asked.items():
        attribute = name.rpartition(".")[2] if name in every.experts else "weight"
        weight = module._parameters.get(attribute)
        fault = None if weight is None else unfit(weight)
        if fault is not None:
            faults[name] = fault
    if faults:
        raise MoQError(
            f"these layers cannot be quantized: {_told(faults)}: start from a model in float32, bfloat16 or float16, "
            "or name the layers in modules_to_not_convert"
        )
    late = [
        name
        for name, module in asked.items()
        if name in cannot and isinstance(module, QuantModule)
    ]
    if late:
        raise MoQError(
            f"{', '.join(late)}: the weight has been parametrized since the layer was quantized; remove the "
            "parametrization and call dequantize_model before registering it"
        )


def _nothing_left(every: Inventory, config: MoQConfig, stay: Mapping[str, str]) -> str:
    """Say why no layer is quantized."""
    what = "linear layer or convolution" if config.convolutions else "linear layer"
    listed = shortened((f"{name} {stay[name]}" for name in every.layers), MOST_FAULTS)
    hint = ""
    if not config.convolutions and every.instances(*CONVOLUTIONS):
        hint = f"; {config.spell('convolutions')}: true would quantize convolutions"
    return f"no {what} is left to quantize: {listed or 'the model has none'}{hint}"


def _check_inputs(
    inventory: Inventory,
    config: MoQConfig,
    layers: Iterable[str],
    experts: Collection[str],
) -> None:
    """Refuse to round inputs of experts, of layers in a fused call of PyTorch's, and at `wide_bits` of no layer.

    Raises:
        MoQError: There are such layers; the text names them.
    """
    key = config.spell("activations")

    def rounded(names: Iterable[str]) -> list[str]:
        return [name for name in names if config.of(name).activations.enabled]

    experts = rounded(experts)
    if experts:
        raise MoQError(
            f"{key}: the inputs of experts cannot be quantized ({', '.join(experts)}); leave it out, or add "
            '"experts" to modules_to_not_convert'
        )
    section = config.activations
    if section.enabled and section.wide_bits is not None:
        wide = [name for name in layers if name in inventory.wide]
        if not any(config.of(name).activations.wide_bits for name in wide):
            raise MoQError(
                f"{key}: wide_bits {section.wide_bits} changes no layer: those that it means are in float, or have "
                "bits of their own by overrides, or no block has a layer with more inputs than outputs that is wider "
                "than the others; leave it out, or set it to null beside a preset"
            )
    # Some are fused only in evaluation.
    fused = inventory.instances(nn.TransformerEncoderLayer, nn.MultiheadAttention)
    wrong = [name for name in rounded(layers) if is_below(name, *fused)]
    if wrong:
        raise MoQError(inputs_out_of_reach(wrong, key))


def _check_overrides(inventory: Inventory, config: MoQConfig) -> None:
    """Check that each glob of `overrides` decides something for a layer.

    Raises:
        MoQError: One matches no layer, and the text lists similar names; or rounds the
            inputs of convolutions only; or later globs overrule it.
    """
    names = list(inventory.scheduled)
    # A layer and a key to the glob that decides it, the last one.
    decides: dict[tuple[str, str], str] = {}
    for glob, own in config.overrides.items():
        means = [name for name in names if matches(name, glob)]
        if not means:
            near = difflib.get_close_matches(glob, names, 3, 0.0)
            raise MoQError(
                f"overrides: {glob!r} matches no layer that is quantized; similar are {', '.join(near)}; output heads "
                f"need {config.spell('heads')}: true, and tables have the bits of {config.spell('embeddings')}"
            )
        is_rounded = own.activations is not None and own.activations.enabled
        if is_rounded and all(is_convolution(inventory.modules[n]) for n in means):
            raise MoQError(
                f"overrides: {glob!r} means convolutions, whose inputs stay in float: leave activations out"
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
    """Split off the layers to which `overrides` give other bits than their block has, into blocks of their own.

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


def _tables(
    inventory: Inventory, config: MoQConfig, unfit_tables: Mapping[str, str]
) -> dict[str, Any]:
    """Find the embedding tables that the config quantizes, their bits, and why "auto" leaves some in float.

    Raises:
        MoQError: The config names bits, and no table can be quantized.
    """
    tables = inventory.tables
    if config.embeddings is None:
        return {}
    if config.embeddings != "auto":
        if tables:
            return {"embeddings": tables, "table_bits": config.embeddings}
        told = "; ".join(f"{name} {why}" for name, why in unfit_tables.items())
        raise MoQError(
            f"{config.spell('embeddings')}: the model has no embedding table that can be quantized"
            f"{told and f' ({told})'}; set it to null"
        )
    refuses = [name for name in config.serve if "embedding" in NAMED[name].without]
    if refuses and tables:
        take = "takes" if len(refuses) == 1 else "take"
        return {"tables_stay": f"{' and '.join(refuses)} {take} them as floats"}
    if tables and not is_encoder(inventory):
        return {"tables_stay": "by default only those of encoders are quantized"}
    # A table shared with an output head stays in float unless the config says otherwise.
    # `_parameters` has no weight for a pruned or normalized layer, which computes it.
    of_layers = {id(x._parameters.get("weight")) for x in inventory.linears.values()}
    shared = [n for n, table in tables.items() if id(table.weight) in of_layers]
    unpacked = is_unpacked(inventory)
    return {
        "embeddings": _without(tables, shared),
        "table_bits": widest_codes(inventory, config) if unpacked else AUTO_TABLE_BITS,
        "tables_stay": f"a layer shares {', '.join(shared)}" if shared else None,
    }


def widest_codes(inventory: Inventory, config: MoQConfig) -> int:
    """The most bits that codes of the layers will have in the end, 2 to 8; 8 if all are saved as floats.

    Args:
        inventory: The inventory, with its layers chosen.
        config: The config that chose them.
    """
    targets = {bits for name in inventory.layers for bits in config.of(name).targets}
    coded = [bits for bits in targets if 2 <= bits <= MAX_PACKED_BITS]
    return max(coded, default=MAX_PACKED_BITS)


def is_encoder(inventory: Inventory) -> bool:
    """True if a model is, or contains, models of transformers, none of which is a decoder."""
    models = [m for m in inventory.modules.values() if isinstance(m, PreTrainedModel)]
    return bool(models) and not any(map(_decodes, models))


def has_decoder(inventory: Inventory) -> bool:
    """True if a model is, or contains, a decoder of transformers, such as a language model."""
    models = [m for m in inventory.modules.values() if isinstance(m, PreTrainedModel)]
    return any(map(_decodes, models))


def _decodes(model: PreTrainedModel) -> bool:
    config = model.config
    kind = type(config)
    if getattr(config, "is_decoder", False) or model.can_generate():
        return True
    # All classes of GPT-2 and Llama are decoders; only one of BERT's is.
    only_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    only_causal = only_causal and kind not in MODEL_FOR_MASKED_LM_MAPPING
    return only_causal or bool(getattr(config, "is_encoder_decoder", False))


def _tied(
    inventory: Inventory, config: MoQConfig, cannot: Mapping[str, str]
) -> dict[str, str]:
    """The modules that share the weight of a chosen one and compute with its quantized copy: each name to that one's.

    The first one with a weight decides how it is quantized. So `embeddings` decides for
    a table that is also the output head; without it, a head that is quantized as a
    linear layer decides for the table.

    Raises:
        MoQError: One of them cannot be quantized, or the config leaves it in float by
            name.
    """
    owners: dict[int, str] = {}
    for name, chosen in {**inventory.embeddings, **inventory.layers}.items():
        owners.setdefault(id(chosen._parameters["weight"]), name)
    tied: dict[str, str] = {}
    wrong = []
    for name, module in inventory.modules.items():
        for attribute, parameter in module._parameters.items():
            owner = owners.get(id(parameter), name)
            if owner == name:
                continue
            tied[name] = owner
            is_layer = isinstance(module, nn.Linear | nn.Embedding)
            if attribute != "weight" or not is_layer or inventory.is_added(name):
                reason: str | None = f"of a {type(module).__name__}"
            elif _is_named(name, config):
                reason = "which modules_to_not_convert names"
            else:
                reason = cannot.get(name) and f"which {cannot[name]}"
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


def _routers(inventory: Inventory) -> set[str]:
    """The linear layers beside experts that route to them: one output per expert, or one for the shared expert."""
    routers = set[str]()
    for name, module in inventory.modules.items():
        last = name.rpartition(".")[2]
        parameters = experts_parameters(module)
        is_list = last == "experts" and isinstance(
            module, nn.ModuleList | nn.ModuleDict
        )
        if parameters:
            count = matrix_of(module, parameters[0])[0]
        elif is_list:
            count = len(cast(nn.ModuleList, module))
        else:
            continue
        around = name.removesuffix(last)
        for other, layer in inventory.linears.items():
            if not other.startswith(around) or is_below(other, name):
                continue
            # The list of experts may be next to the attention.
            own = other.removeprefix(around)
            is_beside = (
                not is_list or "." not in own or "router" in own or "gate" in own
            )
            if is_beside and _sizes(other, layer)["out_features"] in (1, count):
                routers.add(other)
    return routers


def _check_scales(inventory: Inventory) -> None:
    """Refuse a model whose scales cannot be trained alone.

    Raises:
        MoQError: It has adapters, or an engine has taken it apart.
    """
    if any(is_gathered_per_pass(weight) for _, weight in inventory.parameters()):
        raise MoQError(SCALES_APART)
    if inventory.adapters:
        raise MoQError(
            'train: "scales" trains nothing beside the scales, and the model has PEFT\'s adapters: merge them first '
            '(merge_and_unload), or set train to "weights"'
        )


def _check_adapters(inventory: Inventory) -> None:
    """Refuse adapters with which the delivered model would not be the one that was trained.

    DoRA that is not merged uses the norm of the float weight in training, and that of the
    quantized one after loading; a few other tuners use factors of the weight.

    Raises:
        MoQError: There are such adapters, or there are none to be merged; names the
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
            'lora: "merged" needs a model with LoRA from peft.get_peft_model: call that first, or leave the key out'
        )
    quantized = {*inventory.layers, *inventory.embeddings, *inventory.tied}
    # Addresses of each weight's adapters: PEFT can tie those of layers that share it.
    places: dict[str, set[int]] = {}
    faults: dict[str, str] = {}
    for wrapper_name, wrapper in wrappers.items():
        name = f"{wrapper_name}.{ADAPTED}"
        fault = None
        if not inventory.merged:
            fault = _why_not_beside(wrapper) if name in quantized else None
        elif not (fault := lora_fault(wrapper)):
            if name not in quantized:
                fault = "cannot be merged into what stays in float: quantize it, or take it out of target_modules"
            # The first field is the scaling.
            parts = [
                part
                for lora in active_lora(wrapper)
                for part in lora[1:]
                if part is not None
            ]
            place = {part.data_ptr() for part in parts}
            if places.setdefault(inventory.tied.get(name, name), place) != place:
                fault = (
                    "two adapters for one weight: set ensure_weight_tying, without DoRA"
                )
            if any(map(is_partitioned, parts)):
                fault = "ZeRO-3 does not gather adapters for another module: use FSDP2 or ZeRO-2"
        if fault:
            faults[name] = fault
    if faults:
        raise MoQError(f"PEFT: {_told(faults)}")


def _why_not_beside(wrapper: Any) -> str | None:
    """Why a float adapter trained beside a quantized weight would change when it is loaded; None if it would not."""
    if has_dora(wrapper):
        return 'DoRA on quantized layers would compute something else after loading: set "lora": "merged"'
    tuner = factors_base(wrapper)
    if tuner is None:
        return None
    return (
        f"{tuner} recomputes its adapters from the weights when they are loaded, and quantized weights give other "
        "adapters: name these layers in modules_to_not_convert, or use LoRA"
    )


def _sizes(name: str, module: nn.Module) -> dict[str, int]:
    """The sizes of a weight that groups must divide, by the names that its module has for them."""
    if is_convolution(module):
        return {"out_channels": cast(nn.Conv2d, module).out_channels}
    if isinstance(module, nn.Linear):
        rows, columns = module.out_features, module.in_features
    elif isinstance(module, Conv1D):
        rows, columns = module.nf, module.nx
    else:
        _, rows, columns = matrix_of(module, name.rpartition(".")[2])
    return {"out_features": rows, "in_features": columns}


def _check_groups(
    config: MoQConfig, layers: Mapping[str, nn.Module], experts: Mapping[str, nn.Module]
) -> None:
    """Check that the config's groups divide all weights, and that all experts have the same.

    Raises:
        MoQError: They do not, and the text names sizes that would; or they differ.
    """
    weights = {**layers, **experts}
    groupings = {name: config.of(name).grouping for name in weights}
    for grouping in dict.fromkeys(groupings.values()):
        # Channels divide every weight.
        if isinstance(grouping, PerChannel):
            continue
        axis, count = grouping.divides
        sizes: dict[str, int] = {}
        for layer, module in weights.items():
            own = _sizes(layer, module)
            name = axis if axis in own else axis.replace("features", "channels")
            if groupings[layer] == grouping and name in own:
                sizes[f"{layer} ({name} {own[name]})"] = own[name]
        wrong = [weight for weight, size in sizes.items() if size % count]
        if wrong:
            common = math.gcd(*sizes.values())
            fits = [n for n in range(1, common + 1) if common % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - count))[:3])
            raise MoQError(
                f"{config.spell(grouping.key)} {count} does not divide the weights of {shortened(wrong, MOST_FAULTS)}; "
                f"nearest values that fit every layer: {', '.join(map(str, near))}{grouping.instead}"
            )
    # Loaders of packed files know one group size for all experts.
    if len({groupings[name] for name in experts}) > 1:
        raise MoQError(
            f"overrides: group_size must be the same for all experts ({', '.join(experts)}); their bits may differ"
        )
