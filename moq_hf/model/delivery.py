"""Forecasts what a run will deliver, and whether the servers that the config names will take it."""

from dataclasses import replace
from typing import Any

from torch import nn

from ..config import MoQConfig
from ..errors import MoQError, shortened
from ..formats.stored import by_matrix
from ..formats.table import LAYOUTS
from ..names import plain_name, pretrained, without_fsdp, without_peft
from ..processes import shape_of
from ..quant_experts import experts_parameters
from ..servers import NAMED, VLLM, VLLM_CPU
from ..serving import Description, verdict
from ..weight_matrix import matrix_shape
from ..weight_spec import WeightSpec
from .inventory import Inventory, grid_of
from .sizes import has_lora_on, is_unpacked_while_loading

_PACKED = LAYOUTS["packed"]


def check_served(inventory: Inventory, config: MoQConfig) -> None:
    """Check that the servers in `serve` will take the model that a run delivers at its target precision.

    Args:
        inventory: The inventory, with the layers that the config quantizes.
        config: The run's config.

    Raises:
        MoQError: One will not; gives each reason with its layers, and what would be
            served.
    """
    lines = []
    for bits in config.targets:
        model = describe(inventory, config, bits)
        for name in config.serve:
            server = NAMED[name]
            fault = _float_inputs(inventory, config, bits)
            if server.input_grid and fault:
                lines.append(
                    f"  - {server.name}: the folder will have inputs in float, because {fault}, and its kernels round "
                    "them"
                )
                # The config asks for them already.
                server = replace(server, input_grid=None)
            reasons = verdict(model, server).reasons
            lines += [f"  - {server.name}: {reason}" for reason in reasons]
    if lines:
        raise MoQError(
            "\n".join(["serve: what these servers cannot take", *dict.fromkeys(lines)])
        )


def notes(inventory: Inventory, config: MoQConfig) -> list[str]:
    """Notes for users of these servers, for before the first step."""
    model = describe(inventory, config, config.targets[0])
    servers = [NAMED[name] for name in dict.fromkeys(config.serve)]
    lines = []
    for server in servers:
        for note in verdict(model, server).notes:
            lines.append(f"serve: {server.name}: {note}")
    if VLLM in servers:
        for reason in verdict(model, VLLM_CPU).reasons:
            lines.append(
                f"serve: {VLLM.name} takes it, but {VLLM_CPU.name} does not: {reason}"
            )
    return lines


def inputs_in_words(inventory: Inventory, config: MoQConfig) -> str:
    """Say whether the delivered folder rounds inputs of layers as training does, in words."""
    for bits in config.targets:
        fault = _float_inputs(inventory, config, bits)
        if fault is not None:
            return (
                f"float activations, because {fault}; rounded inputs go with symmetric weights of nn.Linear layers: of "
                "8 bits per channel (static; 2 to 8 with moq-hf pack --layout gemma), or of 2 to 8 bits (per_token)"
            )
    kinds: dict[str, None] = {}
    scales: dict[str, None] = {}
    for bits in config.targets:
        for spec in _specs(inventory, config, bits).values():
            if spec.inputs is not None:
                kinds[f"W{spec.bits}A{spec.inputs.bits}"] = None
                scales[spec.inputs.in_words] = None
    return f"rounded inputs ({' and '.join(kinds)}, {' and '.join(scales)})"


def _float_inputs(inventory: Inventory, config: MoQConfig, bits: int) -> str | None:
    """Why the folder of a run that rounds inputs cannot say how; None if it can."""
    if not config.rounds_inputs:
        return None
    model = without_peft(inventory.model)
    path = inventory.name_of(model)
    faults: dict[str, list[str]] = {}
    packed = []
    for name, spec in _specs(inventory, config, bits).items():
        saved = (plain_name(name, ()) or "").removeprefix(f"{path}.")
        if spec.inputs is not None and spec.input_fault is not None:
            faults.setdefault(spec.input_fault, []).append(saved)
        if spec.stored == "packed":
            packed.append(saved)
    for why, names in faults.items():
        return f"{why} ({shortened(names)})"
    try:
        is_unpacked = is_unpacked_while_loading(model, packed)
    except MoQError as error:
        return str(error)
    if is_unpacked:
        return "transformers unpacks a model of its kind while loading"
    if has_lora_on(inventory, model, packed):
        return "PEFT's LoRA needs the weights of packed layers, which are therefore unpacked while loading"
    if packed and inventory.table_bits and inventory.table_bits < 8:
        return "tables of fewer than 8 bits are unpacked while loading"
    return None


def _specs(inventory: Inventory, config: MoQConfig, bits: int) -> dict[str, WeightSpec]:
    """The specs of all quantized weights as they will be delivered, by name; where bits are chosen, at these."""
    specs = {}
    for name, module, parameter, kind in inventory.weights():
        own = config.of(name)
        weight: Any = module._parameters[parameter]
        shape = shape_of(weight)
        matrices = None
        if kind == "experts":
            experts = _saved(inventory, name).removesuffix(f".{parameter}")
            numbers = range(shape[0])
            matrices = tuple(f"{experts}.{number}.{parameter}" for number in numbers)
        is_table = kind == "embedding"
        width = own.bits if isinstance(own.bits, int) else bits
        inputs = config.input_grid_of(name, inventory.wide)
        spec = WeightSpec(
            kind,
            matrix_shape(shape, kind),
            inventory.table_bits or 0 if is_table else width,
            grid_of(module, own, parameter, inventory.table_bits),
            name=name,
            # A weight that a head shares with a table is stored as a table.
            is_table=is_table or name in inventory.tied.values(),
            matrices=matrices,
            inputs=inputs if kind in ("linear", "conv1d") else None,
            pack_bits=config.pack_bits or 0,
        )
        specs[name] = replace(spec, stored=_PACKED.form_of(spec).name)
    return specs


def _saved(inventory: Inventory, name: str) -> str:
    """The name of a module or parameter without PEFT."""
    return plain_name(name, inventory.adapters) or ""


def describe(inventory: Inventory, config: MoQConfig, bits: int) -> Description:
    """Describe the model as it will be delivered, with layers whose bits are chosen at these bits."""
    model = pretrained(inventory.model)

    floats = {
        name for name, module in inventory.modules.items() if hasattr(module, "weight")
    }
    for name, module in inventory.modules.items():
        floats |= {f"{name}.{parameter}" for parameter in experts_parameters(module)}
    rounds_inputs = _float_inputs(inventory, config, bits) is None
    weights: dict[str, WeightSpec] = {}
    for name, spec in _specs(inventory, config, bits).items():
        weights[_saved(inventory, name)] = replace(
            spec,
            inputs=spec.inputs if rounds_inputs else None,
            # Experts without codes stay one tensor.
            matrices=spec.matrices if spec.has_codes else None,
        )
    for name, owner in inventory.tied.items():
        # A weight that a head shares with a table is stored as a table.
        is_table = isinstance(inventory.modules[name], nn.Embedding)
        table = weights.get(_saved(inventory, owner))
        if is_table and table is not None:
            del weights[_saved(inventory, owner)]
            weights[_saved(inventory, name)] = replace(table, kind="embedding")
    others = {_saved(inventory, name) for name in floats}
    config_of_model = getattr(model, "config", None)
    return Description(
        architecture=without_fsdp(type(model)).__name__,
        weights=by_matrix(weights),
        floats=others - weights.keys(),
        is_encoder_decoder=bool(getattr(config_of_model, "is_encoder_decoder", False)),
        scales=config.float32_grid.scale_dtype,
        has_adapters=bool(inventory.adapters) and not inventory.merged,
    )
