"""What the servers that a config names cannot take of a model, said before the first step."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ..config import MoQConfig
from ..errors import MoQError
from ..model.inventory import Inventory, is_convolution
from ..names import plain_name, without_fsdp, without_peft
from ..processes import shape_of
from ..quant_experts import experts_parameters, matrix_of
from ..rows import matrix_shape
from ..schedule import FLOAT_BITS
from ..transformers_seams import experts_transposed
from .description import Description, Reason, Weight
from .rules import verdict
from .servers import REQUIRED, WARNED


def check_served(inventory: Inventory, config: MoQConfig) -> None:
    """Check that the servers in `serve` will take what a run delivers at its target precision.

    Args:
        inventory: With the layers that the config quantizes.
        config: What will be done to them.

    Raises:
        MoQError: One will not: each reason with its layers, and what would be served.
    """
    cases = _cases(inventory, config)
    layers: dict[tuple[str, str, str], list[str]] = {}
    for name in dict.fromkeys(config.serve):
        for one in (verdict(model, REQUIRED[name]) for model in cases):
            for reason in one.reasons:
                layers.setdefault((one.server.name, reason.text, reason.instead), []).extend(reason.layers)
    lines = [
        f"  - {server}: {Reason(text, instead, tuple(dict.fromkeys(names)))}"
        for (server, text, instead), names in layers.items()
    ]
    if lines:
        raise MoQError("\n".join(["serve: what these servers cannot take", *lines]))


def notes(inventory: Inventory, config: MoQConfig) -> list[str]:
    """What a user of these servers should know before the first step."""
    model, found = _cases(inventory, config)[0], []
    names = dict.fromkeys(config.serve)
    for name in names:
        one = verdict(model, REQUIRED[name])
        found += [f"serve: {one.server.name}: {note}" for note in one.notes]
        if name in WARNED:
            other = verdict(model, WARNED[name])
            found += [f"serve: {other.server.name} does not take it: {reason}" for reason in other.reasons]
    if config.activation.enabled and {"vllm", "sglang", "llama.cpp"} & names.keys():
        found.append("serve: vllm, sglang and llama.cpp do not round inputs as activation_quantization trains for")
    return found


def _cases(inventory: Inventory, config: MoQConfig) -> list[Description]:
    """The model as it will be delivered; under a budget each unit at each of its bits, with others beside them."""
    units, targets = inventory.units(inventory.scheduled), config.targets
    return [
        describe(
            inventory,
            config,
            {
                layer: targets[(index + turn) % len(targets)]
                for index, layers in enumerate(units.values())
                for layer in layers
            },
        )
        for turn in range(len(targets))
    ]


def describe(inventory: Inventory, config: MoQConfig, targets: Mapping[str, int] | None = None) -> Description:
    """The model as it will be delivered, in the layout that is written now.

    Args:
        inventory: With the layers that the config quantizes.
        config: What will be done to them.
        targets: Layer name to the bits that it ends with; by default the most that a layer may end with.
    """
    targets = dict.fromkeys(inventory.scheduled, config.targets[-1]) if targets is None else targets
    grouping = config.grouping
    model = without_peft(inventory.model)
    path = next(name for name, module in inventory.named if module is model)

    def saved(name: str) -> str:
        plain = plain_name(name, inventory.adapters)
        return "" if plain is None else plain.removeprefix(f"{path}.")

    weights = {}
    for name, layer in inventory.layers.items():
        kind = "linear" if isinstance(layer, nn.Linear) else "conv" if is_convolution(layer) else "conv1d"
        rows, columns = matrix_shape(shape_of(layer.weight), kind)
        # The packed format has no place for convolutions, and they have no groups.
        bits = targets[name]
        packed, size = bits <= 8 and kind != "conv", None if kind == "conv" else grouping.row_size
        weights[saved(name)] = Weight(kind, rows, columns, bits, size, config.symmetric, packed)
    whole = []
    for name, module in inventory.modules.items():
        for own in experts_parameters(module):
            experts, rows, columns = matrix_of(module, own)
            bits = targets.get(f"{name}.{own}", FLOAT_BITS)
            packed = bits <= 8 and config.symmetric and not experts_transposed(module)
            if not packed:
                whole.append(saved(f"{name}.{own}"))
                continue
            matrix = Weight("linear", rows, columns, bits, grouping.row_size)
            weights |= {f"{saved(name)}.{index}.{own}": matrix for index in range(experts)}
    for name, table in inventory.embeddings.items():
        rows, columns = shape_of(table.weight)
        weights[saved(name)] = Weight("embedding", rows, columns, config.quantize_embeddings or 0)
    for name, owner in inventory.tied.items():
        # What a head shares with tables is in the files as a table.
        if owner in inventory.layers and isinstance(inventory.modules[name], nn.Embedding):
            head = weights.pop(saved(owner), None)
            if head is not None:
                weights[saved(name)] = replace(head, kind="embedding")
    others = {saved(name) for name, module in inventory.modules.items() if hasattr(module, "weight")}
    return Description(
        architecture=without_fsdp(type(model)).__name__,
        weights=weights,
        floats=others - weights.keys(),
        # Beside packed layers, what is not taken apart keeps its name.
        tensors=whole if weights else (),
        is_encoder_decoder=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
        scales=config.grid.scale_dtype,
    )
