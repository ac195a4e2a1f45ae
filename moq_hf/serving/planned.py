"""What the servers that a config names cannot take of a model, said before the first step."""

from collections.abc import Iterable

from ..config import MoQConfig
from ..errors import MoQError
from ..model.inventory import Inventory
from ..names import plain_name, without_fsdp, without_peft
from .description import Description, Verdict, Weight
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
    model = describe(inventory, config)
    found = [verdict(model, REQUIRED[name]) for name in dict.fromkeys(config.serve)]
    lines = [f"  - {one.server.name}: {reason}" for one in found for reason in one.reasons]
    if lines:
        raise MoQError("\n".join(["serve: what these servers cannot take", *lines]))


def notes(inventory: Inventory, config: MoQConfig) -> list[str]:
    """What a user of these servers should know before the first step."""
    model = describe(inventory, config)
    names = dict.fromkeys(config.serve)
    found = [f"serve: {one.server.name}: {note}" for one in _verdicts(model, names) for note in one.notes]
    for name in names:
        if name in WARNED:
            one = verdict(model, WARNED[name])
            found += [f"serve: {one.server.name} does not take it: {reason}" for reason in one.reasons]
    if config.activation.enabled and {"vllm", "sglang", "llama.cpp"} & set(names):
        found.append("serve: vllm, sglang and llama.cpp do not round activations as this run is trained for")
    return found


def _verdicts(model: Description, names: Iterable[str]) -> list[Verdict]:
    return [verdict(model, server) for name, server in REQUIRED.items() if name in names]


def describe(inventory: Inventory, config: MoQConfig) -> Description:
    """The model as it will be delivered: at the target precision, in the layout that is written now."""
    bits, grouping = config.target_bits, config.grouping
    model = without_peft(inventory.model)
    path = next(name for name, module in inventory.named if module is model)

    def saved(name: str) -> str:
        plain = plain_name(name, inventory.adapters)
        return "" if plain is None else plain.removeprefix(f"{path}.")

    weights = {}
    for name, layer in inventory.layers.items():
        conv1d = not hasattr(layer, "out_features")
        rows, columns = reversed(layer.weight.shape) if conv1d else layer.weight.shape
        kind = "conv1d" if conv1d else "linear"
        weights[saved(name)] = Weight(kind, rows, columns, bits, grouping.row_size, config.symmetric, packed=bits <= 8)
    for name, table in inventory.embeddings.items():
        rows, columns = table.weight.shape
        weights[saved(name)] = Weight("embedding", rows, columns, config.quantize_embeddings or bits)
    others = {saved(name) for name, module in inventory.modules.items() if hasattr(module, "weight")}
    return Description(
        architecture=without_fsdp(type(model)).__name__,
        weights=weights,
        floats=others - weights.keys(),
        is_encoder_decoder=bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)),
    )
