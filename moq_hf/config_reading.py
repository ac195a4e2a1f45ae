"""Read a document, and keywords that go before it, into the fields of a config: every error in one message."""

import difflib
import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .config_fields import LARGEST, ConfigFields, given_in
from .errors import MOST_FAULTS, MoQConfigError, show, show_key
from .grid import FP4, FP4_BITS

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=ConfigFields)

# What other libraries call a key.
_SYNONYMS = {
    "num_bits": "quantize_bits.target_bits",
    "weight_bits": "quantize_bits.target_bits",
    "ignore": "modules_to_not_convert",
    "exclude": "modules_to_not_convert",
    "sym": "quantize_algo.q_type",
    "symmetric": "quantize_algo.q_type",
}
# Keywords that are no config's, and are given to a callback all the same.
_OF_TRAINER = ("float_first", "teacher", "teacher_init_kwargs")
# Two ways to say which weights share a scale.
_GROUPS = {"quantize_groups", "quantize_group_size"}
# They tell a DeepSpeed config from a misspelled one of moq_hf.
DEEPSPEED_KEYS = {
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
# What it assumes of keys that its section leaves out.
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "quantize_bits.start_bits": 16,
    "quantize_schedule.quantize_period": 100,
    "quantize_schedule.schedule_offset": 100,
    "quantize_groups": 1,
    "quantize_algo.scale": "absmax",
    "quantize_algo.range": "narrow",
}


def parse(
    kind: type[C],
    document: Any,
    where: str,
    keywords: Mapping[str, Any] | None = None,
) -> C:
    """Make a config of a document, and of keywords that go before it.

    Raises:
        MoQConfigError: Lists everything that is wrong with them.
    """
    faults: list[str] = []
    block, ignored = _block_of(document, where, faults)
    of_keywords: list[str] = []
    given = _keyword_values(keywords or {}, of_keywords)
    values = flatten(block, faults)
    # A keyword of the two goes before either of the document's.
    if any(given.get(name) is not None for name in _GROUPS):
        values = {name: value for name, value in values.items() if name not in _GROUPS}
    values |= given
    faults += map(_in_keywords, of_keywords)
    # What is not a format at all is found below.
    fp4 = FP4.get(str(values.get("quantize_format")))
    if fp4 is not None:
        values.setdefault("quantize_bits.target_bits", FP4_BITS)
        values.setdefault("quantize_group_size", fp4.group_size)
    is_deepspeed = block is not document
    if is_deepspeed:
        if values.get("quantize_group_size") is not None:
            values.setdefault("quantize_groups", "per_channel")
        values = DEEPSPEED_DEFAULTS | values
    wrong: dict[str, str] = {}
    try:
        config = _read(kind, values, is_deepspeed)
    except ValidationError as error:
        wrong = _value_faults(error, values)
        others = {path: value for path, value in values.items() if path not in wrong}
        config = _read(kind, others, is_deepspeed)
    # A value that is not legal by itself is in no conflict, nor is the target that was
    # probably meant by a key that is none.
    settled = set(wrong)
    if faults or "quantize_format" in wrong:
        settled |= {"quantize_bits.target_bits"} - values.keys()
    told = [*wrong.values()]
    for text in config.conflicts():
        if not any(path in text for path in settled):
            told.append(text)
    for text in told:
        is_keyword = not document or any(path in text for path in given)
        faults.append(_in_keywords(text) if is_keyword else text)
    if faults:
        raise MoQConfigError(_in_one_text(where, faults))
    if ignored:
        logger.warning(
            "moq_hf: not of quantization, left to TrainingArguments: %s",
            ", ".join(map(str, ignored)),
        )
    return config


def _read(kind: type[C], values: Mapping[str, Any], is_deepspeed: bool) -> C:
    """Make a config of values by their paths.

    Raises:
        ValidationError: One of them is not legal.
    """
    arranged = by_section(values) | {"from_deepspeed": is_deepspeed}
    adapter = TypeAdapter(kind)
    return adapter.validate_python(arranged, by_alias=True, by_name=False)


def _block_of(
    document: Any, where: str, faults: list[str]
) -> tuple[Mapping[str, Any], list[Any]]:
    """Find moq_hf's keys in a document, and the sections around them; `faults` takes what is wrong.

    Raises:
        MoQConfigError: There are none.
    """
    if not isinstance(document, Mapping):
        raise MoQConfigError(
            f"{where}: must be an object of keys, got {show(document)}"
        )
    if "quantize_training" in document:
        block = document["quantize_training"]
        if not isinstance(block, Mapping):
            raise MoQConfigError(
                f"{where}: quantize_training must be an object of keys, got {show(block)}"
            )
        ours = [*_places(), "quantize_training", "$schema"]
        faults += [
            f"{name}: belongs in quantize_training"
            for name in document
            if name in _places()
        ]
        return block, [name for name in document if name not in ours]
    if any(name in DEEPSPEED_KEYS for name in document):
        raise MoQConfigError(
            f"{where}: a DeepSpeed config without the section quantize_training, so there is nothing to quantize"
            + (
                " (compression_training is another method)"
                if "compression_training" in document
                else ""
            )
            + '; add "quantize_training": {"quantize_bits": {"start_bits": 12, "target_bits": 8}, ...}'
        )
    return document, []


@functools.cache
def _places() -> dict[str, list[str]]:
    """What may stand at the top of a file: sections with the names of their keys, and keys without any."""
    places: dict[str, list[str]] = {"quantize_type": []}
    for path in key_schemas():
        head, _, name = path.partition(".")
        places.setdefault(head, []).extend(filter(None, [name]))
    places["quantize-algo"] = places["quantize_algo"]
    return dict(sorted(places.items()))


def flatten(
    block: Mapping[str, Any], faults: list[str], known: Sequence[str] = ()
) -> dict[str, Any]:
    """Give the value of each legal key by its path; `faults` takes what is not a legal key.

    Args:
        block: Keys, and sections of keys.
        faults: What is wrong so far.
        known: Names to propose for a misspelt one; by default those of a file.
    """
    known = known or [*_places(), "quantize_training"]
    values: dict[str, Any] = {}
    for name, value in block.items():
        section = "quantize_algo" if name == "quantize-algo" else name
        if not isinstance(name, str):
            faults.append(f"{show(name)}: keys must be text")
        elif section != name and section in block:
            faults.append(
                "quantize_algo and quantize-algo: two spellings of one key, give one"
            )
        elif name not in _places():
            if name != "$schema":
                faults.append(_unknown_key(name, "", known, len(faults)))
        elif not (names := _places()[name]):
            values[name] = value
        elif not isinstance(value, Mapping):
            faults.append(f"{section}: {show(value)} is not an object of keys")
        else:
            for inner, inner_value in value.items():
                if inner in names:
                    values[f"{section}.{inner}"] = inner_value
                else:
                    faults.append(
                        _unknown_key(str(inner), f"{section}.", names, len(faults))
                    )
    if "quantize_type" in values and "quantize_algo.q_type" in values:
        one, other = values.pop("quantize_type"), values["quantize_algo.q_type"]
        if one != other:
            both = f"quantize_type is {show(one)} but quantize_algo.q_type is {show(other)}"
            faults.append(f"{both}: they mean the same, give one")
    return values


@functools.cache
def schema_of_fields() -> dict[str, Any]:
    """The JSON Schema of `ConfigFields` as pydantic makes it; keys with a dot are not in sections yet."""
    return TypeAdapter(ConfigFields).json_schema(mode="serialization")


@functools.cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every key by its path, in the order of a file."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in schema_of_fields()["properties"].items():
        kind = value.get("$ref", "").rpartition("/")[2]
        if kind:
            section = schema_of_fields()["$defs"][kind]["properties"]
            found |= {f"{name}.{inner}": part for inner, part in section.items()}
        else:
            found[name] = value
    return found


def by_section(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Put values whose keys have a dot into sections."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        head, _, name = path.rpartition(".")
        place = found.setdefault(head, {}) if head else found
        place[name] = value
    return found


# ---- keywords


@functools.cache
def keyword_paths() -> dict[str, str]:
    """The path of each keyword's key, or section, in a file."""
    fields = cast(Any, ConfigFields).__pydantic_fields__
    return {
        name: own.serialization_alias or name
        for name, own in fields.items()
        if not own.exclude
    }


def _keyword_values(keywords: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Give the value of each keyword by its path in a file; `faults` takes what is not legal."""
    paths = keyword_paths()
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in _OF_TRAINER:
            faults.append(
                f"{name} is an argument of MoQTrainer: a callback cannot change the loss"
            )
            continue
        path = paths.get(name, name)
        if is_dataclass(value):
            value = given_in(value)
        elif name == "activations":
            value = _activations(value)
        found = {path: value}
        if "." not in path:
            found = flatten(found, faults, list(paths))
        faults += [f"{path}: given twice" for path in found if path in values]
        values |= found
    return values


def _activations(value: Any) -> Any:
    """Give the section of a file: the keyword may be its bits, its switch, or the section without its switch."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, int):
        return {"enabled": True, "bits": value}
    return {"enabled": True, **value} if isinstance(value, Mapping) else value


def _in_keywords(text: str) -> str:
    """Put keywords for the paths of keys in an error.

    >>> _in_keywords("quantize_bits.target_bits: 17 is not legal")
    'bits: 17 is not legal'
    """
    for name, path in keyword_paths().items():
        if "." in path or path.startswith("quantize_"):
            text = text.replace(path, name)
    return text


# ---- what is wrong, in words


def _in_one_text(where: str, faults: Sequence[str]) -> str:
    """Say in one text what is wrong with a file, a mapping or the arguments of a class."""
    if len(faults) == 1:
        return f"{where}: {faults[0]}"
    lines = [
        f"{where}: {len(faults)} things are wrong",
        *(f"  - {fault}" for fault in faults[:MOST_FAULTS]),
    ]
    if len(faults) > MOST_FAULTS:
        lines.append(f"  and {len(faults) - MOST_FAULTS} more")
    return "\n".join(lines)


def _value_faults(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Give a line on each wrong value by its path.

    Args:
        error: What pydantic found; a value that no kind of a key takes is found wrong
            by each.
        values: The values by their paths.
    """
    schemas = key_schemas() | {"quantize_type": key_schemas()["quantize_algo.q_type"]}
    faults: dict[str, str] = {}
    for found in error.errors(include_url=False, include_input=False):
        head, *inner = found["loc"]
        if head == "overrides" and inner:
            text = _override_fault(values[head], *inner[:2])
            faults[head] = "; ".join(filter(None, [faults.get(head), text]))
            continue
        path = ".".join(map(str, found["loc"][:2]))
        path = path if path in schemas else str(head)
        faults[path] = _value_fault(path, values[path], schemas[path])
    return faults


def _override_fault(
    overrides: Mapping[Any, Any], glob: Any, key: str | int | None = None
) -> str:
    """Say what is wrong with what one glob says."""
    where = f"overrides.{show_key(str(glob))}"
    schemas = schema_of_fields()["$defs"]["OverrideConfig"]["properties"]
    override = overrides.get(glob)
    if key is None or not isinstance(override, Mapping):
        return f"{where}: {show(override)} is not an object of {', '.join(schemas)}"
    if key not in schemas:
        return _unknown_key(str(key), f"{where}.", [*schemas], 0)
    return _value_fault(f"{where}.{key}", override[key], schemas[key])


def _value_fault(path: str, value: Any, schema: Mapping[str, Any]) -> str:
    hint = _hint(value, schema)
    if path == "sensitivity.measure" and value in ("trace", "loss"):
        hint = '; that measure is gone, use "divergence"'
    return f"{path}: {show(value)} is not legal; it must be {legal(schema)}{hint}"


def _hint(value: Any, schema: Mapping[str, Any]) -> str:
    """Say what to write instead of a value; "" where nothing legal is near it."""
    kinds = schema.get("anyOf", [schema])
    types = [kind.get("type") for kind in kinds]
    items = [kind.get("items", kind) for kind in kinds]
    words = [w for item in items for w in item.get("enum", [item.get("const")]) if w]
    if "integer" in types and isinstance(value, (str, float)):
        text = str(value).removesuffix(".0")
        if text.isdecimal() and len(text) < 5:
            return f" (write {text})"
    if "integer" in types and type(value) is int and value > LARGEST:
        return " and below 2**63"
    # Of a list, its first item that is no word was misspelt.
    word = value
    if isinstance(value, (list, tuple)):
        word = next((item for item in value if item not in words), None)
    near = nearest(word, words)
    if isinstance(value, str) and "array" in types:
        return f" (write {show([near or value])})" if near or not words else ""
    return f" (did you mean {json.dumps(near)}?)" if near else ""


def nearest(word: Any, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that a value may have been meant for; None if none is near."""
    # Text that long is not a misspelt word, and comparing it takes time.
    if not isinstance(word, str) or len(word) > 80:
        return None
    return next(iter(difflib.get_close_matches(word, words, 1, cutoff)), None)


def legal(schema: Mapping[str, Any]) -> str:
    """Say what a JSON Schema of one key allows.

    >>> legal({"anyOf": [{"type": "integer", "title": "a whole number from 1"}, {"type": "null"}]})
    'a whole number from 1, or null'
    """
    if "anyOf" in schema:
        return ", or ".join(map(legal, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "items" in schema:
        return f"a list of {legal(schema['items'])}"
    return str(schema.get("title", schema.get("type")))


def _unknown_key(name: str, section: str, here: Sequence[str], earlier: int) -> str:
    """Say what was probably meant by a key that does not exist.

    Args:
        name: The key.
        section: Where it stands, with a dot; "" is the top.
        here: What is legal there.
        earlier: How many faults are listed already.
    """
    path = show_key(section + name)
    # Which key was meant takes time to find, and is not shown after so many others, nor
    # for a text that is no name.
    if earlier >= MOST_FAULTS or len(name) > 80:
        return f"{path}: unknown key"
    inner = {key.split(".")[1]: key for key in key_schemas() if "." in key}
    meant = _SYNONYMS | inner | keyword_paths()
    # They stand in several places and point nowhere.
    for common in ("enabled", "verbose"):
        del meant[common]
    near = nearest(name, here)
    # A letter too many is a slip, even where another section has the word as it is.
    if near and (name not in meant or nearest(name, here, 0.9)):
        return f"{path}: unknown key, did you mean {section}{near}?"
    elsewhere = nearest(name, meant, 0.8)
    if elsewhere:
        path_meant = meant[elsewhere]
        names = {own: word for word, own in keyword_paths().items()}
        # Keywords and overrides have a key by its short name.
        short = names.get(path_meant)
        found = f"{section}{short}" if short in here else path_meant
        return f"{path}: unknown key, did you mean {found}?"
    return f"{path}: unknown key; legal here are {', '.join(here)}"
