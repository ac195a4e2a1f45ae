"""`MoQConfig`: a config from a preset, a file, a mapping or keywords."""

import html
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pydantic_core import to_jsonable_python

from . import dialect
from .config_fields import ActivationConfig, ConfigFields
from .config_reading import nearest, parse, places, width_in
from .dialect import by_section
from .errors import MoQConfigError, listed

# Configs that come with the package, in its folder `presets`, by their names.
PRESETS = (
    "w8",
    "w4",
    "w3",
    "w2",
    "w8a8",
    "w4a8",
    "w4a4",
    "executorch",
    "fp8",
    "lm-w4",
    "moq",
    "auto",
    "eigen",
)
# Schemes of other libraries, and their equivalents here.
_SCHEMES = {
    "w4a16": "w4",
    "w8a16": "w8",
    "mxfp4": 'format="mxfp4"',
    "nvfp4": 'format="nvfp4"',
    "fp8_dynamic": "fp8",
    "fp8-dynamic": "fp8",
    "float8": "fp8",
    "w8a8-fp8": "fp8",
    "w8a8_fp8": "fp8",
}


class MoQConfig(ConfigFields):
    """A checked configuration: an attribute for each key, and an object for each section that can be switched on.

    The attributes' names are the keys of a mapping or file; documents in DeepSpeed's
    words are read too.

    Args:
        source: A preset by its name, the path of a JSON file, a mapping, or nothing.
        **keywords: Keys with their values, and sections as mappings; they override the
            source.

    Attributes:
        kernel: Triton kernels: wanted, not wanted, or None for wherever they run.
        scale_dtype: The dtype that scales are rounded to; None leaves it to `serve`.
        dialect: The language of the source: keywords, DeepSpeed's words, or its section
            `quantize_training`, in which keys that are left out have DeepSpeed's
            defaults.

    Raises:
        MoQConfigError: Lists everything that is wrong.

    >>> config = MoQConfig(bits=4, start_bits=12, groups=8)
    >>> config.start_bits, config.bits, config.grouping
    (12, 4, RowBlocks(count=8))
    >>> config == MoQConfig.from_dict({"quantize_training": config.to_deepspeed()})
    True
    >>> MoQConfig("w4", start_bits=8) == MoQConfig(bits=4, start_bits=8)
    True
    >>> MoQConfig(bits=3, eigenvalue={"enabled": True}).eigenvalue.enabled
    True
    >>> MoQConfig.from_dict({"bits": 4, "grop_size": 32})
    Traceback (most recent call last):
    moq_hf.errors.MoQConfigError: MoQ config: grop_size: unknown key, did you mean group_size?
    """

    # The name by which transformers finds the quantizer for it; see `hf_quantizer`.
    quant_method: ClassVar[str] = "moq"

    def __init__(self, source: Any = None, /, **keywords: Any) -> None:
        # Not a key, but `dataclasses.replace` passes it.
        copied = {}
        if keywords.get("dialect") in dialect.LANGUAGES:
            copied["dialect"] = keywords.pop("dialect")
        made: Any = source
        if not isinstance(source, MoQConfig):
            made = parse(*_document_of(source), keywords)
        elif keywords:
            raise MoQConfigError(
                f"a MoQConfig, and {listed(list(keywords))} beside it: give the keywords to the MoQConfig"
            )
        self.__dict__.update(vars(made) | copied)

    @classmethod
    def load(
        cls,
        source: "MoQConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
        **keywords: Any,
    ) -> "MoQConfig":
        """Make a config from a preset's name, the path of a JSON file or a mapping; a `MoQConfig` stays as it is.

        Args:
            source: One of the four; None takes the keywords alone.
            **keywords: As for the constructor: they override the source.

        Raises:
            MoQConfigError: No such preset or file, a wrong config, or keywords beside a
                `MoQConfig`, which has its own.

        >>> MoQConfig.load("w4") == MoQConfig(bits=4)
        True
        """
        if isinstance(source, MoQConfig) and not keywords:
            return source
        if source is None and not keywords:
            _refuse(source)
        return cls(source, **keywords)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "MoQConfig":
        """Read a JSON file: keywords, DeepSpeed's words for them, or a DeepSpeed config that holds `quantize_training`.

        Raises:
            MoQConfigError: No such file, not JSON (line and column), or a wrong config.
        """
        return cls.load(Path(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MoQConfig":
        """Read a config from a mapping, as `from_file` does from a file.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        made = cls.__new__(cls)
        made.__dict__.update(vars(parse(mapping, "MoQ config")))
        return made

    def changed(self, *also: str) -> dict[str, Any]:
        """The bits, and the keys whose values differ from the defaults, as `from_dict` takes them.

        Args:
            *also: Paths of more keys.

        >>> MoQConfig(bits=4, start_bits=8, eigenvalue={"enabled": True, "tol": 0.1}).changed()
        {'bits': 4, 'start_bits': 8, 'eigenvalue': {'enabled': True, 'tol': 0.1}}
        """
        written = self.flat()
        # The defaults of other keys depend on these.
        given = {name: written[name] for name in ("bits", "start_bits", "period")}
        # A config that is switched off may have bits that would quantize nothing.
        defaults = MoQConfig(**given, enabled=False).flat()
        own = {"enabled": True, "start_bits": max(self.targets), "period": "auto"}
        defaults |= own
        also += ("bits",)
        # The section without its switch would be on.
        if self.activations != ActivationConfig():
            also += ("activations.enabled",)
        return by_section(
            {
                path: value
                for path, value in written.items()
                if path in also or value != defaults[path]
            }
        )

    def _repr_html_(self) -> str:
        """Show a notebook the keys that were changed, and all of them when unfolded."""
        changed = html.escape(json.dumps(self.changed(), indent=2))
        every = html.escape(json.dumps(self.to_dict(), indent=2))
        return f"<pre>{changed}</pre><details><summary>All keys</summary><pre>{every}</pre></details>"

    def to_dict(self) -> dict[str, Any]:
        """The config in keywords, except `train` and `grid` at their defaults; `from_dict` makes an equal config."""
        written: dict[str, Any] = to_jsonable_python(self)
        # So that versions without the keys read what runs without them write.
        if self.train == "weights":
            del written["train"]
        if self.grid is None:
            del written["grid"]
        return written

    def to_deepspeed(self) -> dict[str, Any]:
        """The config in DeepSpeed's words, as in its section `quantize_training`."""
        return by_section({dialect.word(path): v for path, v in self.flat().items()})

    def flat(self) -> dict[str, Any]:
        """The value of each key by its path: `bits`, `eigenvalue.tol`."""
        found: dict[str, Any] = {"train": self.train, "grid": self.grid}
        for name, value in self.to_dict().items():
            if isinstance(places()[name], str):
                found[name] = value
            else:
                found |= {f"{name}.{inner}": part for inner, part in value.items()}
        return found


def _document_of(source: Any) -> tuple[Any, str]:
    """The document that a config is made from, and its name in errors.

    Raises:
        MoQConfigError: No config can be made from the source, or it cannot be read.
    """
    if source is None:
        return {}, "MoQConfig"
    if isinstance(source, Mapping):
        return source, "MoQ config"
    if isinstance(source, str) and source in PRESETS:
        path = Path(__file__).with_name("presets") / f"{source}.json"
        return read_document(path), f"preset {source}"
    if isinstance(source, (str, os.PathLike)):
        return read_document(source), os.fspath(source)
    _refuse(source)


def _refuse(source: Any) -> NoReturn:
    """Say what to give for a config instead.

    Raises:
        MoQConfigError: Always.
    """
    got = "nothing" if source is None else type(source).__name__
    bits = source if got == "int" else 4
    raise MoQConfigError(
        f"a MoQ config is a preset ({listed(PRESETS)}), a path, a mapping or a MoQConfig, such as "
        f"MoQConfig(bits={bits}); got {got}"
    )


def read_document(path: str | os.PathLike[str]) -> Any:
    """The JSON document in a file, whose keys must differ.

    Raises:
        MoQConfigError: It cannot be read, or is not JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    # ValueError: not UTF-8, or a path with a null character.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        presets = ""
        if isinstance(error, FileNotFoundError):
            presets = f"; the presets are {listed(PRESETS)}{_meant(path)}"
        raise MoQConfigError(
            f"cannot read the MoQ config {os.fspath(path)}: {reason}{presets}"
        ) from error
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MoQConfigError(
            f"{os.fspath(path)} is not JSON: {error.msg} at {place}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise MoQConfigError(f"{os.fspath(path)}: {error}") from error


def _meant(path: str | os.PathLike[str]) -> str:
    """Ask for the preset, or the number of bits, that a name was probably meant for; "" if none is near."""
    name = Path(path).name.lower().removesuffix(".json").removeprefix("moq_")
    width = width_in(name)
    near = nearest(f"w{width}" if width else name.replace("_", "-"), PRESETS, 0.8)
    if not near and width in range(1, 9):
        near = f"bits={width}"
    near = near or _SCHEMES.get(name)
    return f" (did you mean {near}?)" if near else ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"key given twice: {listed(twice)}")
    return dict(pairs)
