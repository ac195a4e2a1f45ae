"""What is wrong with a config, in words: the key, its value, what is legal and what was probably meant.

What is legal is read from the JSON Schema of a key.
"""

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from .errors import MOST_FAULTS, MoQConfigError, show, show_key
from .grid import Grid

# Of whole numbers: beyond it counting steps would be slow, and printing them fail. Of others: beyond it sums overflow.
LARGEST = 2**63 - 1
UNBOUNDED = 1e300
# Bits that a block may have under a budget, where the config does not name them.
DEFAULT_CHOICES = (2, 3, 4, 8)

Schema = Mapping[str, Any]


def config_error(where: str, faults: Sequence[str]) -> MoQConfigError:
    """One error that lists what is wrong with a file, a mapping or the arguments of a class."""
    if len(faults) == 1:
        return MoQConfigError(f"{where}: {faults[0]}")
    lines = [f"{where}: {len(faults)} things are wrong", *(f"  - {fault}" for fault in faults[:MOST_FAULTS])]
    if len(faults) > MOST_FAULTS:
        lines.append(f"  and {len(faults) - MOST_FAULTS} more")
    return MoQConfigError("\n".join(lines))


def legal(schema: Schema) -> str:
    """What a JSON Schema of one key allows, in words.

    >>> legal({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'a whole number from 1, or null'
    """
    if "anyOf" in schema:
        return ", or ".join(map(legal, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if "$ref" in schema:
        return str(schema.get("title", f"a {schema['$ref'].rpartition('/')[2]}"))
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "object":
            return str(schema["title"])
        case "array":
            words = schema["items"].get("enum")
            return f"a list of {' or '.join(map(json.dumps, words))}" if words else "a list of names or globs"
        case "integer" | "number":
            return _legal_number(schema)
        case other:
            return str(other)


def _legal_number(schema: Schema) -> str:
    noun = "a whole number" if schema["type"] == "integer" else "a number"
    # As JSON is written by hand: 1e-9.
    low = f"{schema.get('minimum', schema.get('exclusiveMinimum')):g}".replace("e-0", "e-")
    above = f"from {low}" if "minimum" in schema else f"above {low}"
    high = schema.get("maximum", LARGEST)
    if schema.get("exclusiveMaximum", UNBOUNDED) != UNBOUNDED:
        return f"{noun} {above} and below {schema['exclusiveMaximum']:g}"
    if high == LARGEST:
        return f"{noun} {above}"
    return f"{noun} {above} {'to' if schema['type'] == 'integer' else 'up to'} {high:g}"


def value_fault(path: str, value: Any, schema: Schema) -> str:
    """One line on a value that a key's schema does not allow."""
    kinds = schema.get("anyOf", [schema])
    words = [word for kind in kinds for word in (kind.get("enum") or kind.get("items", {}).get("enum", ()))]
    near = _nearest(value, words)
    hint = f" (did you mean {json.dumps(near)}?)" if near else ""
    if any(kind.get("type") == "integer" for kind in kinds):
        if type(value) is float and value.is_integer():
            hint = f" (write {int(value)})"
        elif type(value) is int and value > LARGEST:
            hint = " and below 2**63"
    return f"{path}: {show(value)} is not legal; it must be {legal(schema)}{hint}"


def _nearest(value: Any, words: Sequence[str]) -> str | None:
    """The word that was probably meant; of a list, for its first item that is none."""
    if isinstance(value, (list, tuple)):
        value = next((item for item in value if item not in words), None)
    # Text that long is not a misspelt word, and comparing it takes time.
    near = difflib.get_close_matches(value, words, 1) if isinstance(value, str) and len(value) <= 80 else []
    return near[0] if near else None


def value_faults(error: ValidationError, schema: Schema, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The path of each wrong value and a line on it; without a path, what is wrong with the whole.

    Args:
        error: What pydantic found.
        schema: JSON Schema of what was validated.
        given: What was validated.
    """
    for found in error.errors(include_url=False, include_input=False):
        node: Schema = schema
        value: Any = given
        names = []
        for name in map(str, found["loc"]):
            properties = _resolved(node, schema).get("properties", {})
            # The rest of the way leads into a list, which is shown whole.
            if name not in properties:
                break
            node, value = properties[name], value[name] if isinstance(value, Mapping) else getattr(value, name)
            names.append(name)
        path = ".".join(filter(None, names))
        if found["type"] == "conflicts":
            yield from (("", fault) for fault in found["ctx"]["faults"])
        else:
            yield path, value_fault(path, value, node)


def _resolved(node: Schema, whole: Schema) -> Schema:
    reference = node.get("$ref", "").rpartition("/")[2]
    return whole["$defs"][reference] if reference else node


def unknown_key(name: str, section: str, paths: Collection[str], earlier: int) -> str:
    """One line on a key that does not exist, with the one that was probably meant.

    Args:
        name: The key.
        section: Where it stands; "" is the top.
        paths: Every legal key, those of a section with its name and a dot before them.
        earlier: How many faults are listed already.
    """
    start = f"{section}." if section else ""
    path = show_key(start + name)
    # Which key was meant takes time to find, and is not shown after so many others, nor for a text that is no name.
    if earlier >= MOST_FAULTS or len(name) > 80:
        return f"{path}: unknown key"
    here = [key.partition(".")[2] for key in paths if key.startswith(start)] if section else sorted(heads(paths))
    # "enabled" and "verbose" stand in several places and point nowhere.
    inner = {key.split(".")[1]: key for key in paths if "." in key and not key.endswith(("enabled", "verbose"))}
    near = difflib.get_close_matches(name, here, 1, 0.6)
    if near and name not in inner:
        return f"{path}: unknown key, did you mean {start}{near[0]}?"
    elsewhere = difflib.get_close_matches(name, inner, 1, 0.8)
    if elsewhere:
        return f"{path}: unknown key, did you mean {inner[elsewhere[0]]}?"
    return f"{path}: unknown key; legal here are {', '.join(here)}"


def heads(paths: Iterable[str]) -> set[str]:
    """What stands at the top of a file: sections, and keys without one."""
    return {path.partition(".")[0] for path in paths}


def conflicts(given: Mapping[str, Any], wrong: Collection[str], defaults: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with values together.

    Args:
        given: Values by the paths of their keys.
        wrong: Paths of those that are not legal by themselves.
        defaults: Of every key.
    """
    values = {**defaults, **given}
    kinds = [path for path in ("quantize_type", "quantize_algo.q_type") if path in given]
    if len(kinds) == 2 and given[kinds[0]] != given[kinds[1]]:
        yield (
            f"{kinds[0]} is {show(given[kinds[0]])} but {kinds[1]} is {show(given[kinds[1]])}: "
            "they mean the same, give one"
        )
    if values["quantize_group_size"] is not None and values["quantize_groups"] != 1:
        yield (
            f"quantize_groups {show(values['quantize_groups'])} and quantize_group_size "
            f"{show(values['quantize_group_size'])} exclude each other: give one"
        )
    kind = given[kinds[-1]] if kinds else "symmetric"
    if values["quantize_algo.range"] == "full" and kind == "asymmetric":
        yield (
            "quantize_algo.range: full is of symmetric grids, an asymmetric one has all its codes; "
            "set it to narrow, or quantize_algo.q_type to symmetric"
        )
    weights = ("distillation.logits", "distillation.hidden")
    if not any(path in wrong or values[path] for path in weights):
        yield "distillation: logits and hidden are both 0, so a teacher would teach nothing; give one a weight"
    if (
        values["sensitivity.measure"] is not None
        and "sensitivity.measure" not in wrong
        and not (values["eigenvalue.enabled"] is True or isinstance(values["quantize_bits.target_bits"], Mapping))
    ):
        yield (
            f"sensitivity.measure: nothing asks for {show(values['sensitivity.measure'])}: set eigenvalue.enabled to "
            "true for the pace of the blocks, or quantize_bits.target_bits to a budget"
        )
    if not {"quantize_bits.start_bits", "quantize_bits.target_bits"}.intersection(wrong):
        yield from _bit_conflicts(values, kind, "quantize_bits.target_bits" in given)


def _bit_conflicts(values: Mapping[str, Any], kind: str, target_given: bool) -> Iterator[str]:
    start, target = values["quantize_bits.start_bits"], values["quantize_bits.target_bits"]
    default = "" if target_given else " (it is the default)"
    if isinstance(target, Mapping):
        found = list(_budget_faults(target))
        yield from found
        if found:
            return
        targets = target.get("choices", DEFAULT_CHOICES)
    else:
        targets = [target]
        if target > start:
            advice = (
                f"bits only fall, so start_bits must be {target} or more" if target_given else "set it to 8, 4, 3 or 2"
            )
            yield f"quantize_bits: target_bits {target} is above start_bits {start}{default}; {advice}"
        elif values["enabled"] is True and target == 16:
            yield f"quantize_bits.target_bits: 16 would quantize nothing{default}; set it to 8, 4, 3 or 2"
    least = min(targets)
    if least == 1 and kind == "asymmetric":
        yield "quantize_bits.target_bits: 1 bit is symmetric only; set quantize_algo.q_type to symmetric, or 2 bits"
    grid = Grid(symmetric=kind == "symmetric", full=values["quantize_algo.range"] == "full")
    if values["quantize_algo.rounding"] == "stochastic" and not grid.is_uniform(least):
        yield (
            f"quantize_algo.rounding: stochastic needs equal steps, {least} bits {kind} has none; "
            "set it to nearest, or target_bits to 3 or more"
        )


def _budget_faults(budget: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a budget whose values are legal by themselves."""
    where, mean = "quantize_bits.target_bits", budget.get("mean")
    choices = list(budget.get("choices", DEFAULT_CHOICES))
    if (mean is None) == (budget.get("file_mb") is None):
        yield f"{where}: {show(dict(budget))} must have mean or file_mb, one of them"
    if len(choices) < 2 or choices != sorted(set(choices)):
        yield f"{where}.choices: {show(choices)} must be two numbers of bits or more, ascending, each once"
    elif mean is not None and not choices[0] < mean < choices[-1]:
        yield f"{where}.mean: {show(mean)} must be between the choices {choices[0]} and {choices[-1]}, neither of them"
