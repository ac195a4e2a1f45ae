"""What a config file looks like: its JSON, the block of moq_hf in a DeepSpeed config, and its JSON Schema."""

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .config_errors import heads, unknown_key
from .errors import MoQConfigError, listed, show

# Other spellings of keys and sections.
_ALSO = ("quantize_type", "quantize-algo")
_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
    "zero_optimization",
    "steps_per_print",
    "gradient_clipping",
    "compression_training",
}


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds.

    Raises:
        MoQConfigError: No such file, not JSON (line and column), or a key given twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    # ValueError: not UTF-8, or a path with a null character.
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MoQConfigError(f"cannot read the MoQ config {os.fspath(path)}: {reason}") from error
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MoQConfigError(f"{os.fspath(path)} is not JSON: {error.msg} at {place}") from error
    except (RecursionError, ValueError) as error:
        raise MoQConfigError(f"{os.fspath(path)}: {str(error) or 'nested too deeply'}") from error
    return document


def block_of(
    document: Any, where: str, paths: Collection[str], faults: list[str]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The keys of moq_hf in a document, and the names of the sections around them.

    Args:
        document: What a file holds.
        where: What the file is called in an error.
        paths: Every legal key.
        faults: Takes what is wrong.

    Raises:
        MoQConfigError: There are no keys of moq_hf.
    """
    if not isinstance(document, Mapping):
        raise MoQConfigError(f"{where}: must be an object of keys, got {show(document)}")
    if "quantize_training" in document:
        block = document["quantize_training"]
        if not isinstance(block, Mapping):
            raise MoQConfigError(f"{where}: quantize_training must be an object of keys, got {show(block)}")
        ours = heads([*paths, *_ALSO])
        faults += [f"{key}: belongs in quantize_training" for key in document if key in ours]
        return block, tuple(str(key) for key in document if key not in ours | {"quantize_training", "$schema"})
    if _DEEPSPEED.intersection(key for key in document if isinstance(key, str)):
        raise MoQConfigError(
            f"{where}: a DeepSpeed config without the section quantize_training, so there is nothing to quantize"
            + (" (compression_training is another method)" if "compression_training" in document else "")
            + '; add "quantize_training": {"quantize_bits": {"start_bits": 12, "target_bits": 8}, ...}'
        )
    return document, ()


def flat(block: Mapping[str, Any], paths: Collection[str], faults: list[str]) -> dict[str, Any]:
    """The value of each legal key by its path.

    Args:
        block: The keys of moq_hf.
        paths: Every legal key.
        faults: Takes what is not a legal key.
    """
    values: dict[str, Any] = {}
    known = [*paths, *_ALSO]
    sections = heads(path for path in paths if "." in path)
    for key, value in block.items():
        if not isinstance(key, str):
            faults.append(f"{show(key)}: keys must be text")
        elif key == "$schema":
            continue
        elif key == "quantize-algo" and "quantize_algo" in block:
            faults.append("quantize_algo and quantize-algo: two spellings of one key, give one")
        elif (section := key.replace("quantize-algo", "quantize_algo")) in sections:
            if not isinstance(value, Mapping):
                faults.append(f"{section}: {show(value)} is not an object of keys")
                continue
            for inner, inner_value in value.items():
                path = f"{section}.{inner}"
                if path in paths:
                    values[path] = inner_value
                else:
                    faults.append(unknown_key(str(inner), section, known, len(faults)))
        elif key in known and "." not in key:
            values[key] = value
        else:
            faults.append(unknown_key(key, "", [*known, "quantize_training"], len(faults)))
    return values


def schema_of(keys: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a document, from those of the legal keys by their paths."""
    properties: dict[str, Any] = {"$schema": {"description": "path of the JSON Schema, for editors; ignored"}}
    for path, schema in keys.items():
        head, _, tail = path.rpartition(".")
        section = {"type": "object", "additionalProperties": False, "properties": {}}
        (properties.setdefault(head, section)["properties"] if head else properties)[tail] = schema
    also = {"description": "another spelling of `quantize_algo.q_type`"}
    properties["quantize_type"] = properties["quantize_algo"]["properties"]["q_type"] | also
    properties["quantize-algo"] = {"$ref": "#/$defs/block/properties/quantize_algo"}
    block = {"$ref": "#/$defs/block"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moq_hf",
        "description": "A config of moq_hf: its keys alone, or a DeepSpeed config with them in quantize_training.",
        "type": "object",
        "if": {"required": ["quantize_training"]},
        "then": {
            "properties": {"quantize_training": block},
            "propertyNames": {"not": {"enum": sorted(properties.keys() - {"$schema"})}},
        },
        "else": block,
        "$defs": {
            "block": {
                "type": "object",
                "properties": properties,
                "additionalProperties": False,
                "not": {"required": ["quantize_algo", "quantize-algo"]},
            }
        },
    }


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key given twice: {listed(sorted(key for key, count in counts.items() if count > 1))}")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
