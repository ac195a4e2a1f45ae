"""What the fields of a config are made of: constrained types, words of the file, and the dataclass that checks."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, core_schema

from .config_errors import LARGEST, UNBOUNDED, config_error, value_faults
from .errors import show

T = TypeVar("T")

Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]
Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Bits = Annotated[int, Field(strict=True, ge=1, le=16)]
PackedBits = Annotated[int, Field(strict=True, ge=1, le=8)]
ByteBits = Annotated[int, Field(strict=True, ge=2, le=8)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Part = Annotated[float, Field(strict=True, gt=0, lt=1)]
Ratio = Annotated[float, Field(strict=True, ge=1e-9, le=1)]
Tolerance = Annotated[float, Field(strict=True, gt=0, lt=UNBOUNDED)]
Size = Annotated[float, Field(strict=True, gt=0, lt=UNBOUNDED)]
Weight = Annotated[float, Field(strict=True, ge=0, lt=UNBOUNDED)]

# A key of a file names its field by the alias, a Python argument by the name: `read` asks for the one.
_RULES = ConfigDict(extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=False)
_FILE = "file"


def key(meaning: str, *names: str, **more: Any) -> Any:
    """What a field says of its key: meaning, name in the file if it is not the field's, and other names for it."""
    if names:
        more |= {"validation_alias": AliasChoices(*names), "serialization_alias": names[0]}
    return Field(description=meaning, **more)


class Words:
    """The words with which a file spells some values of a field, so `Words(auto=None)` for None.

    Only a file has the words, and only the words: `read` refuses null there, the constructor refuses "auto".
    """

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(self._write)
        return core_schema.with_info_wrap_validator_function(self._read, handler(source), serialization=written)

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        # A schema of what is written is the file's.
        if handler.mode == "validation":
            return schema
        spelled = {type(value) for value in self._values.values()}
        kinds = {"null": type(None), "boolean": bool}
        others = [kind for kind in schema.get("anyOf", [schema]) if kinds.get(kind["type"]) not in spelled]
        words = {"enum": list(self._values), "type": "string"}
        return {"anyOf": [*others, words]} if others else words

    def _read(self, value: Any, handler: Callable[[Any], Any], info: core_schema.ValidationInfo) -> Any:
        if info.context != _FILE:
            return handler(value)
        if isinstance(value, str) and value in self._values:
            return self._values[value]
        read = handler(value)
        if any(read is meant for meant in self._values.values()):
            raise ValueError("a file has a word for it")
        return read

    def _write(self, value: Any) -> Any:
        return next((word for word, meant in self._values.items() if meant is value), value)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[T]) -> type[T]:
    """A frozen pydantic dataclass whose constructor raises `MoQConfigError`."""
    made: Any = dataclass(frozen=True, config=_RULES)(cls)
    initialize = made.__init__
    signature = inspect.Signature(
        [
            inspect.Parameter(f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=f.default, annotation=f.type)
            for f in fields(made)
        ]
    )

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{made.__name__}() {error}") from None
        # A part is made by its own constructor, or by `from_dict` with the file's keys.
        mappings = [name for name, value in given.items() if isinstance(value, Mapping)]
        if mappings:
            kinds = {f.name: getattr((get_args(f.type) or (f.type,))[0], "__name__", "value") for f in fields(made)}
            raise config_error(made.__name__, [f"{n}: {show(given[n])} is not a {kinds[n]}" for n in mappings])
        try:
            initialize(self, **given)
        except ValidationError as error:
            faults = value_faults(error, TypeAdapter(made).json_schema(by_alias=False), given)
            # A value that no kind of a field takes is found wrong by each.
            raise config_error(made.__name__, list(dict.fromkeys(fault for _, fault in faults))) from None

    made.__init__, made.__signature__ = __init__, signature
    return cast(type[T], made)


def read(adapter: TypeAdapter[T], values: dict[str, Any]) -> T:
    """The object that a file's keys and words make.

    Raises:
        ValidationError: They are not legal.
    """
    return adapter.validate_python(values, by_alias=True, by_name=False, context=_FILE)
