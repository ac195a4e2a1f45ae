"""`moq_state.json` read back: each value is of the type and in the range of what is written, or one error names it."""

import math
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..errors import MoQError
from ..inputs import LARGEST_RANGE
from ..reading import Entry
from ..rows import KINDS, is_experts
from ..schedule import FLOAT_BITS
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
