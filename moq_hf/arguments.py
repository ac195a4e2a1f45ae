"""`MoQArguments`: the keywords of a config as arguments on a command line, or in a YAML file for TRL."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Any

from .config import MoQConfig
from .config_reading import key_schemas, legal, places
from .errors import MoQConfigError

# TrainingArguments and TRL's classes use these names.
_TAKEN = ("enabled", "verbose", "seed")


class Unsaid(StrEnum):
    """The value of a keyword that was not given, if None can be given; JSON can hold it."""

    UNSAID = "not said"


def _option(text: str, default: Any = None, **more: Any) -> Any:
    # argparse formats help texts with %.
    return field(default=default, metadata={"help": text.replace("%", "%%"), **more})


def _options() -> list[tuple[str, Any, Any]]:
    """Name, type and field of each keyword, as `HfArgumentParser` takes them."""
    options: list[tuple[str, Any, Any]] = []
    for name, place in places().items():
        if name in _TAKEN:
            continue
        if isinstance(place, dict):
            kinds = {"object"}
            text = f"section as JSON, with {', '.join(place)}"
        else:
            schema = key_schemas()[name]
            text = f"{schema['description']} ({legal(schema)})"
            kinds = {k.get("type", "object") for k in schema.get("anyOf", [schema])}
        kind: Any = str | None
        if "boolean" in kinds:
            kind = bool | None
        elif "array" in kinds:
            kind = list[str] | None
        elif "object" in kinds:
            kind = dict[str, Any] | str | None
        if name == "activations":
            text = f"{text}; or its bits"
        # argparse would read any other text than None as a list, or as true or false.
        unsaid = Unsaid.UNSAID if "null" in kinds and kind == str | None else None
        # Without a value it is on.
        is_switch = kind == bool | None or name == "activations"
        more = {"nargs": "?", "const": True} if is_switch else {}
        options.append((name, kind, _option(text, unsaid, **more)))
    return options


_Keywords: Any = make_dataclass(
    "_Keywords", _options(), namespace={"__module__": __name__}
)


@dataclass
class MoQArguments(_Keywords):  # type: ignore[misc]
    """Arguments for `HfArgumentParser` and `TrlParser`: the keywords of `MoQConfig`, and what `MoQTrainer` takes.

    Numbers and sections are JSON on a command line: `--bits 4`, `--eigenvalue
    '{"enabled": true}'`, `--embeddings null`. Keywords that are not given are None, or
    `Unsaid` if null is one of their values. `enabled`, `verbose` and `seed` can only be
    set in the config that `moq_config` names.

    Attributes:
        moq_config: A preset, or the path of a JSON file; the keywords override it.
        float_first: The argument of `MoQTrainer`.
        teacher: Folder or Hub id, `distillation.teacher` in the config.

    >>> MoQArguments(bits="4", group_size="32").config() == MoQConfig(bits=4, group_size=32)
    True
    >>> MoQArguments().config() is None
    True
    """

    moq_config: str | None = _option(
        "preset (w4, ...) or JSON file of the quantization, which the other arguments override"
    )
    float_first: float | None = _option(
        "train in float for that share of the steps (alone: half); that model is the start and teacher of the rest",
        nargs="?",
        const=0.5,
    )
    teacher: str | None = _option(
        "folder or Hub id of a float model to learn from, trained on the same task"
    )

    def keywords(self) -> dict[str, Any]:
        """The keywords that were given, as `MoQConfig` takes them.

        Raises:
            MoQConfigError: The teacher is given twice.
        """
        given = {
            option.name: _value(getattr(self, option.name))
            for option in fields(_Keywords)
            if getattr(self, option.name) != option.default
        }
        section = given.get("distillation", {})
        # The config reports a value that is not a section.
        if self.teacher is not None and isinstance(section, Mapping):
            if "teacher" in section:
                raise MoQConfigError(
                    "teacher and distillation.teacher mean the same, give one"
                )
            given["distillation"] = {**section, "teacher": self.teacher}
        return given

    def config(self) -> MoQConfig | None:
        """The config; None if no argument asks for one.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        keywords = self.keywords()
        if self.moq_config is None and not keywords:
            return None
        return MoQConfig.load(self.moq_config, **keywords)

    def for_trainer(self) -> dict[str, Any]:
        """Keywords for `MoQTrainer`, or for a Trainer with `MoQMixin`.

        Raises:
            MoQConfigError: Lists everything that is wrong with the config.
        """
        return {"moq_config": self.config(), "float_first": self.float_first}


def _value(said: Any) -> Any:
    """Read a word of a command line as JSON; any other word is text."""
    if not isinstance(said, str):
        return said
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
