"""Write the schema of config files and the table of keys in `docs/reference/config.md`, from the fields of the config.

Run at the root of the repository: `python scripts/config_reference.py`.
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moq_hf import dialect
from moq_hf.config_reading import key_schemas, legal, places, places_in_dialect, schema_of_fields
from moq_hf.text import markdown_table

# Beside the files that name it, in the wheel and here.
SCHEMAS = (Path("moq_hf/presets/moq.schema.json"), Path("configs/moq.schema.json"))
PAGE = Path("docs/reference/config.md")


def key_table() -> str:
    """The keys as a Markdown table, for the documentation."""
    rows = [
        [
            f"`{path}`",
            legal(schema),
            f"`{json.dumps(schema['default'])}`",
            schema["description"],
            f"`{dialect.word(path)}`" if dialect.word(path) != path else "",
        ]
        for path, schema in key_schemas().items()
    ]
    return markdown_table([["key", "legal", "default", "meaning", "DeepSpeed"], *rows])


def _block(names: Mapping[str, dialect.Place]) -> dict[str, Any]:
    """The schema of an object of keys, and of sections of keys."""
    properties: dict[str, Any] = {"$schema": {"description": "path of the JSON Schema, for editors; ignored"}}
    for name, place in names.items():
        if isinstance(place, str):
            properties[name] = {"$ref": f"#/$defs/key.{place}"}
        else:
            keys = {inner: {"$ref": f"#/$defs/key.{path}"} for inner, path in place.items()}
            properties[name] = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file; `moq.schema.json` holds it for editors.

    >>> json_schema()["$defs"]["key.group_size"]["default"] is None
    True
    """
    theirs = places_in_dialect()
    section = _block(theirs) | {"not": {"required": ["quantize_algo", "quantize-algo"]}}
    flat = _block(places())
    kinds = copy.deepcopy(schema_of_fields()["$defs"])
    for properties in (flat["properties"], kinds["OverrideConfig"]["properties"]):
        properties["activations"] = {
            "anyOf": [properties["activations"], {"type": "boolean"}, {"$ref": "#/$defs/key.activations.bits"}],
            "description": "the section, its `bits`, or whether it is on",
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moq_hf",
        "description": "A config of moq_hf: keywords, or DeepSpeed's words, alone or in quantize_training.",
        "type": "object",
        "if": {"required": [dialect.SECTION]},
        "then": {
            "properties": {dialect.SECTION: {"$ref": "#/$defs/section"}},
            "propertyNames": {"not": {"enum": sorted({*places(), *theirs})}},
        },
        "else": {
            "if": {"propertyNames": {"enum": ["$schema", *theirs]}},
            "then": {"$ref": "#/$defs/section"},
            "else": {"$ref": "#/$defs/flat"},
        },
        "$defs": {
            **kinds,
            **{f"key.{path}": schema for path, schema in key_schemas().items()},
            "section": section,
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
