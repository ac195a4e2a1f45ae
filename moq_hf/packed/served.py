"""Who can serve a folder: what is in its files, put to the rules of each server."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import MoQConfig
from ..reading import Entry
from ..serving.description import Description, Verdict, Weight
from ..serving.rules import verdict
from ..serving.servers import SERVERS
from .files import CONFIG, read_document
from .matrices import by_matrix
from .state import STATE_NAME, StoredLayer
from .state_check import proof_of, read_layers


def served_by(directory: str | os.PathLike[str]) -> list[Verdict]:
    """What each server makes of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: The state or the config is missing or damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    return verdicts_of(folder, state, layers)


def verdicts_of(folder: Path, state: dict[str, Any], layers: dict[str, StoredLayer]) -> list[Verdict]:
    """The same, of a state that was read."""
    model = _describe(folder, state, layers)
    return [verdict(model, server) for server in SERVERS]


def _describe(folder: Path, state: dict[str, Any], layers: dict[str, StoredLayer]) -> Description:
    config = read_document(folder / CONFIG) if state["config_json"] is not None else Entry({}, str(folder / CONFIG))
    architectures = config.get("architectures")
    quantization = config.get("quantization_config")
    tensors, weights = list(state["tensors"]), by_matrix(layers)
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    saved = Entry(state, str(folder / STATE_NAME)).get("proof")
    proof = None if saved.is_null else proof_of(saved)
    unserved = str(proof.reason) if proof is not None and proof.agrees is False else None
    if state.get("by_hand") and (proof is None or not proof.agrees):
        unserved = "no save_pretrained wrote it; load_state_dict takes its weights"
    trained = None if state["config"] is None else MoQConfig.from_dict(state["config"])
    dtype = str(config.get("dtype").value or "float32")
    return Description(
        architecture="" if architectures.is_null else architectures.items()[0].text(),
        weights={name: _weight(name, layer, quantization) for name, layer in weights.items()},
        floats=modules - weights.keys(),
        is_encoder_decoder=config.get("is_encoder_decoder").value is True,
        quantization=None if quantization.is_null else _checked(quantization),
        tensors=tensors,
        unserved=unserved,
        scales="float32" if trained is None else trained.grid_of(dtype).scale_dtype,
    )


def _weight(name: str, layer: StoredLayer, quantization: Entry) -> Weight:
    """A layer as the config group says that it is: unpacked while loading, all have the bits of the largest."""
    rows, columns = layer.shape
    size = columns // layer.scales[1] if layer.scales[1] > 1 else None
    bits = layer.bits
    if layer.group is not None and layer.stored == "packed":
        scheme = quantization["config_groups"][layer.group]["weights"]
        bits = scheme["num_bits"].whole(1, 8)
        # One group may fill a row.
        size = scheme["group_size"].whole(1) if scheme["strategy"].value == "group" else size
    return Weight(layer.kind, rows, columns, bits, size, layer.symmetric, layer.stored in ("packed", "int8"))


def _checked(quantization: Entry) -> dict[str, Any]:
    """The part of `quantization_config` that servers go by."""
    groups = {}
    for name, group in quantization["config_groups"].mapping().items():
        groups[name] = {
            "targets": [target.text() for target in group["targets"].items()],
            "format": group.get("format").value,
            "weights": {"strategy": group["weights"]["strategy"].text()},
        }
    ignore = quantization.get("ignore")
    ignored = [] if ignore.is_null else [pattern.text() for pattern in ignore.items()]
    return {"config_groups": groups, "format": quantization.get("format").value, "ignore": ignored}


def table(verdicts: Sequence[Verdict]) -> str:
    """A line per server, and a line for each reason, for a terminal."""
    width = max(len(one.server.name) for one in verdicts)
    lines: list[str] = []
    before: dict[tuple[str, ...], str] = {}
    for one in verdicts:
        said = [*map(str, one.reasons)] or list(one.notes)
        same = before.setdefault(tuple(said), one.server.title)
        if one.reasons and same != one.server.title:
            said = [f"as {same}"]
        lines.append(f"{one.server.name.ljust(width)}  {one.answer.ljust(7)}  {said[0] if said else ''}".rstrip())
        lines += [f"{'':{width}}  {'':7}  {more}" for more in said[1:]]
    return "\n".join(["served by", *lines])
