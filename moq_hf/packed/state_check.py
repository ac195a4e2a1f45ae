"""`moq_state.json` read back: each value is of the type and in the range of what is written, or one error names it."""

import math
import os
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..config import MoQConfig
from ..errors import MoQError
from ..inputs import LARGEST_RANGE
from ..reading import Entry
from ..rows import KINDS, is_experts
from ..schedule import FLOAT_BITS
from ..serving import SERVERS, WHOLE_EXPERTS, Description, Verdict, Weight, verdict
from .files import CONFIG, read_document
from .load_check import Proof
from .state import MAX_PACKED_BITS, STATE_NAME, StoredLayer, read_state

# The bits that a layer can have which is stored so.
_BITS = {"packed": (1, MAX_PACKED_BITS), "int8": (2, MAX_PACKED_BITS), "dense": (1, 16)}


def read_layers(folder: Path) -> tuple[dict[str, Any], dict[str, StoredLayer]]:
    """The state of a packed checkpoint and its layers. The digest proves integrity against accident alone.

    Raises:
        MoQError: A value is not of the type or in the range of what is written; names the file and the key.
    """
    state = read_state(folder)
    entry = Entry(state, str(folder / STATE_NAME))
    if not entry["config_json"].is_null:
        entry["config_json"].text()
    for digest in entry["tensors"].mapping().values():
        digest.text()
    for name in ("versions", "config", "metrics", "float_metrics"):
        if not entry.get(name).is_null:
            entry[name].mapping()
    if not entry.get("names").is_null:
        for there in entry["names"].mapping().values():
            there.text()
    if not entry.get("input_ranges").is_null:
        for largest in entry["input_ranges"].mapping().values():
            largest.number(0.0, LARGEST_RANGE)
    if not entry["step"].is_null:
        entry["step"].whole()
    for switch in entry["history"].items():
        switch["step"].whole(1)
        switch["block"].text()
        for name in ("before", "bits"):
            switch[name].whole(1, FLOAT_BITS)
        if not switch["eigenvalue"].is_null:
            switch["eigenvalue"].number(0.0, 1.0)
    if not entry.get("proof").is_null:
        proof_of(entry["proof"])
    if not entry.get("parameters").is_null:
        entry["parameters"]["total"].whole(entry["parameters"]["quantized"].whole(1))
    layers = entry["layers"].mapping()
    if not layers:
        raise entry["layers"].fault("the layers by name")
    return state, {name: _layer_of_json(layer) for name, layer in layers.items()}


def proof_of(entry: Entry) -> Proof:
    """The proof in a state.

    Raises:
        MoQError: A value is not of the type or in the range of what is written.
    """
    agrees = None if entry["agrees"].is_null else entry["agrees"].flag()
    difference = None if entry["largest_difference"].is_null else entry["largest_difference"].number(0.0)
    tokens = None if entry["tokens"].is_null else entry["tokens"].whole()
    reason = None if entry["reason"].is_null else entry["reason"].text()
    return Proof(agrees, entry["examples"].whole(), difference, tokens, reason, entry["seconds"].number(0.0))


def _layer_of_json(entry: Entry) -> StoredLayer:
    values: dict[str, Any] = {}
    known = {field.name: field for field in fields(StoredLayer)}
    for name, value in entry.mapping().items():
        if name not in known:
            raise MoQError(f"{value.where}: {value.key} is unknown; legal are {', '.join(known)}")
        values[name] = tuple(value.value) if isinstance(value.value, list) else value.value
    for name, field in known.items():
        if field.default is MISSING:
            values[name] = values.get(name, entry[name].value)
    entry["kind"].word(*KINDS)
    stored = entry["stored"].word("float", *_BITS)
    # Older states have no such key.
    if "full" in entry.mapping() and entry["full"].flag() and not entry["symmetric"].flag():
        raise entry["full"].fault("false where symmetric is")
    entry["symmetric"].flag()
    entry["bytes"].whole()
    entry["bytes_before"].whole(1)
    entry["max_error"].number(0.0)
    shape = [size.whole(1, 2**31) for size in entry["shape"].items(2)]
    # Folders of earlier versions have no such key.
    for module in entry["tied"].items() if "tied" in values else ():
        module.text()
    scales = [count.whole(0, 2**31) for count in entry["scales"].items(2)]
    is_apart = stored == "packed" and is_experts(values["kind"])
    if not is_apart and values.get("matrices") is not None:
        raise entry["matrices"].fault("null but for packed experts")
    if stored == "float":
        if entry["bits"].value != FLOAT_BITS:
            entry["bits"].whole(1, 16)
        return StoredLayer(**values)
    entry["bits"].whole(*_BITS[stored])
    if any(count == 0 or size % count for size, count in zip(shape, scales, strict=True)):
        raise entry["scales"].fault(f"divisors of the shape {shape}")
    if stored != "dense":
        entry["group"].text()
        if is_apart:
            names = {name.text() for name in entry["matrices"].items()}
            if not names or len(names) != len(values["matrices"]) or shape[0] % len(names):
                raise entry["matrices"].fault(f"different names, so many that they divide {shape[0]} rows")
        return StoredLayer(**values)
    for part in entry["grid"].items(2)[: 1 if entry["symmetric"].flag() else 2]:
        # 4 bytes each, as text of 4 letters for 3 bytes.
        if (
            not re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", part.text())
            or len(part.text()) != -(-math.prod(scales) * 4 // 3) * 4
        ):
            raise part.fault(f"{math.prod(scales)} values of 4 bytes in base64")
    return StoredLayer(**values)


def served_by(directory: str | os.PathLike[str]) -> list[Verdict]:
    """What each server makes of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: The state or the config is missing or damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    config = Entry({}, "") if state["config_json"] is None else read_document(folder / CONFIG)
    classes = config.get("architectures")
    saved = Entry(state, str(folder / STATE_NAME)).get("proof")
    proof = None if saved.is_null else proof_of(saved)
    unserved = proof.reason if proof is not None and proof.agrees is False else None
    if state.get("by_hand") and (proof is None or not proof.agrees):
        unserved = "no save_pretrained wrote it; load_state_dict takes its weights"
    scales, row_size = "float32", None
    if state["config"] is not None:
        trained = MoQConfig.from_dict(state["config"])
        scales = trained.grid_of(str(config.get("dtype").value or "float32")).scale_dtype
        row_size = trained.grouping.row_size
    weights: dict[str, Weight] = {}
    for name, layer in layers.items():
        # Packed experts lie in the files matrix by matrix.
        names = layer.matrices or (name,)
        rows, columns = layer.shape[0] // len(names), layer.shape[1]
        # One group may fill a row.
        size = columns // layer.scales[1] if layer.scales[1] > 1 or row_size == columns else None
        kind = "linear" if layer.matrices else layer.kind
        packed = layer.stored in ("packed", "int8")
        weights |= dict.fromkeys(names, Weight(kind, rows, columns, layer.bits, size, layer.symmetric, packed))
    floats = [name for name in state["tensors"] if name.endswith(".weight") or WHOLE_EXPERTS.search(name)]
    model = Description(
        architecture="" if classes.is_null else classes.items()[0].text(),
        weights=weights,
        floats={name.removesuffix(".weight") for name in floats} - weights.keys(),
        is_encoder_decoder=config.get("is_encoder_decoder").value is True,
        unserved=unserved,
        scales=scales,
    )
    return [verdict(model, server) for server in SERVERS]
