"""Write the schema of config files and the table of keys in `docs/reference/config.md`, from the fields of the config.

Run at the root of the repository: `python scripts/config_reference.py`.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moq_hf.config_reading import by_section, key_schemas, keyword_paths, legal, schema_of_fields
from moq_hf.text import markdown_table

# Beside the files that name it, in the wheel and here.
SCHEMAS = (Path("moq_hf/presets/moq.schema.json"), Path("configs/moq.schema.json"))
PAGE = Path("docs/reference/config.md")


def key_table() -> str:
    """The keys as a Markdown table, for the documentation."""
    rows = [
        [f"`{path}`", legal(schema), f"`{json.dumps(schema['default'])}`", schema["description"]]
        for path, schema in key_schemas().items()
    ]
    return markdown_table([["key", "legal", "default", "meaning"], *rows])


def with_keywords(properties: Iterable[str]) -> dict[str, Any]:
    """The schema of a block whose keys, `properties`, may be keywords too, without two words for one key."""
    found = {name: {"$ref": f"#/$defs/block/properties/{name}"} for name in properties}
    twice: list[dict[str, Any]] = [{"required": ["quantize_algo", "quantize-algo"]}]
    for name, path in keyword_paths().items():
        if name != path:
            head, _, inner = path.partition(".")
            place = path.replace(".", "/properties/")
            found[name] = {"$ref": f"#/$defs/block/properties/{place}"}
            both = {head: {"required": [inner]}} if inner else {}
            twice.append({"required": [name, head], "properties": both})
    found["activations"] = {
        "anyOf": [found["activations"], {"type": "boolean"}, key_schemas()["activation_quantization.bits"]],
        "description": "the section, its `bits`, or whether it is on",
    }
    return {"type": "object", "properties": found, "additionalProperties": False, "not": {"anyOf": twice}}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file; `moq.schema.json` holds it for editors.

    >>> json_schema()["$defs"]["block"]["properties"]["quantize_group_size"]["default"] is None
    True
    """
    properties = {"$schema": {"description": "path of the JSON Schema, for editors; ignored"}}
    for name, value in by_section(schema_of_fields()["properties"]).items():
        is_section = name not in schema_of_fields()["properties"]
        section = {"type": "object", "additionalProperties": False, "properties": value}
        properties[name] = section if is_section else value
    also = {"description": "another spelling of `quantize_algo.q_type`"}
    properties["quantize_type"] = key_schemas()["quantize_algo.q_type"] | also
    properties["quantize-algo"] = {"$ref": "#/$defs/block/properties/quantize_algo"}
    block = {"$ref": "#/$defs/block"}
    flat = with_keywords(properties)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moq_hf",
        "description": "A config of moq_hf: keywords, or DeepSpeed's words, alone or in quantize_training.",
        "type": "object",
        "if": {"required": ["quantize_training"]},
        "then": {
            "properties": {"quantize_training": block},
            "propertyNames": {"not": {"enum": sorted(flat["properties"].keys() - {"$schema"})}},
        },
        "else": {"$ref": "#/$defs/flat"},
        "$defs": {
            **schema_of_fields()["$defs"],
            "block": {
                "type": "object",
                "properties": properties,
                "additionalProperties": False,
                "not": {"required": ["quantize_algo", "quantize-algo"]},
            },
            "flat": flat,
        },
    }


def main() -> None:
    """Write both."""
    for path in SCHEMAS:
        path.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    table = key_table() + "\n"
    PAGE.write_text(re.sub(r"(?s)(?<=<!-- keys -->\n).*(?=<!-- end)", lambda _: table, text), encoding="utf-8")


if __name__ == "__main__":
    main()
