"""What is in a model: its blocks."""

from typing import cast

from torch import nn

from ..errors import MoQError


def block_of(model: nn.Module, name: str) -> str:
    """The block of a layer: its place in the outermost `ModuleList` on its path, or itself outside of any."""
    parts = name.split(".")
    module: nn.Module = model
    for depth, part in enumerate(parts):
        if isinstance(module, nn.ModuleList):
            return ".".join(parts[: depth + 1])
        module = cast(nn.Module, getattr(module, part))
    return name


# The list that DeepSpeed's default names: taken alone where it exists.
BERT_LAYERS = "bert.encoder.layer"


def layer_blocks(
    model: nn.Module, layer_name: str | None = None, layer_num: int | None = None
) -> dict[str, list[nn.Parameter]]:
    """The blocks of a model: each entry of its list of layers, with all the parameters of floating point in it.

    Args:
        model: Any module.
        layer_name: Path of a `ModuleList`. None takes `bert.encoder.layer` where there is one, otherwise every
            outermost `ModuleList` all of whose entries are of one class and have parameters (both stacks of a T5), and
            failing that those of several classes.
        layer_num: Entries of each list, from the first; None is all.

    Returns:
        Module name of the entry to its parameters, in model order.

    Raises:
        MoQError: No such list, with those that there are; or `layer_num` is more than a list has.
    """
    lists = _layer_lists(model) or _layer_lists(model, mixed=True)
    there = ", ".join(f"{name} ({len(entries)})" for name, entries in lists.items()) or "none"
    if layer_name is not None:
        try:
            entries = model.get_submodule(layer_name)
        except AttributeError:
            entries = None
        if not isinstance(entries, nn.ModuleList) or not any(True for _ in entries.parameters()):
            what = "no module" if entries is None else f"a {type(entries).__name__}"
            raise MoQError(
                f"eigenvalue.layer_name: {layer_name!r} is {what}, not a list of layers; the model has: {there}"
            )
        lists = {layer_name: entries}
    elif BERT_LAYERS in lists:
        lists = {BERT_LAYERS: lists[BERT_LAYERS]}
    if not lists:
        raise MoQError("the model has no list of layers (a ModuleList of modules with parameters) to measure")
    short = [f"{name} has {len(entries)}" for name, entries in lists.items() if len(entries) < (layer_num or 0)]
    if short:
        raise MoQError(f"eigenvalue.layer_num: {layer_num} is more than there are: {', '.join(short)}")
    return {
        f"{name}.{index}": [p for p in entry.parameters() if p.is_floating_point()]
        for name, entries in lists.items()
        for index, entry in enumerate(list(entries)[:layer_num])
    }


def _layer_lists(model: nn.Module, prefix: str = "", mixed: bool = False) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if not isinstance(child, nn.ModuleList):
            found |= _layer_lists(child, path + ".", mixed)
        elif all(any(True for _ in entry.parameters()) for entry in child):
            classes = len({type(entry) for entry in child})
            if classes == 1 or (mixed and classes):
                found[path] = child
    return found
