"""Bits under a budget, as a config says them: what is to be met, and by which measure blocks are compared."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, GetPydanticSchema, PlainSerializer

from .config_errors import DEFAULT_CHOICES
from .config_fields import Bits, PackedBits, Size, checked, key

# How the sensitivity of a block is measured.
Measure = Literal["eigenvalue", "trace", "loss", "divergence"]


@checked
class BitBudget:
    """Bits for each block, chosen to cost the least within a budget. One of `mean` and `file_mb` is given.

    Attributes:
        mean: Bits per weight of the layers that the schedule quantizes.
        file_mb: Size of the delivered `model.safetensors`, all of it, in 10^6 bytes.
        choices: Bits that a block may have, ascending.

    >>> BitBudget(file_mb=12).in_words()
    '2, 3, 4 or 8 bits, 12 MB in the file'
    """

    mean: Annotated[Size | None, key("bits per weight of the quantized layers")] = None
    file_mb: Annotated[Size | None, key("of the delivered model.safetensors, in 10^6 bytes")] = None
    choices: Annotated[tuple[PackedBits, ...], FailFast(), key("bits that a block may have")] = DEFAULT_CHOICES

    def to_dict(self) -> dict[str, Any]:
        """The budget as a file has it."""
        given = {name: value for name in ("mean", "file_mb") if (value := getattr(self, name)) is not None}
        return {**given, "choices": list(self.choices)}

    def in_words(self) -> str:
        """The choices and the budget, for messages."""
        words = [str(bits) for bits in self.choices]
        limit = f"{self.file_mb:g} MB in the file" if self.mean is None else f"{self.mean:g} in the mean"
        return f"{', '.join(words[:-1])} or {words[-1]} bits, {limit}"


def _schema(handler: Any, core: Any) -> dict[str, Any]:
    """In place: what refers to a definition of pydantic's would lead nowhere in the shipped schema."""
    amount = {"type": "number", "exclusiveMinimum": 0}
    bits = {"type": "integer", "minimum": 1, "maximum": 8}
    choices = {"type": "array", "items": bits, "minItems": 2, "uniqueItems": True, "default": list(DEFAULT_CHOICES)}
    budget = {
        "type": "object",
        "title": '{"mean": 3.0, "choices": [2, 3, 4, 8]}, or the same with "file_mb"',
        "properties": {"mean": amount, "file_mb": amount, "choices": choices},
        "additionalProperties": False,
        "oneOf": [{"required": ["mean"]}, {"required": ["file_mb"]}],
    }
    return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 16}, budget]}


# The precision at the end: a number, or what chooses one for each block.
Target = Annotated[
    Bits | BitBudget,
    PlainSerializer(lambda target: target if isinstance(target, int) else target.to_dict(), return_type=Any),
    GetPydanticSchema(get_pydantic_json_schema=lambda core, handler: _schema(handler, core)),
]


@checked
class SensitivityConfig:
    """What of a block says how much the loss minds its rounding; limits on measuring it are in `eigenvalue`."""

    measure: Annotated[
        Measure | None,
        key(
            "`eigenvalue`: the top one of a block's Hessian, as published; `trace`: the Hessian's mean diagonal, times "
            "the squared change of the weights at the next bits; `loss`: its rise with the block at those bits; "
            "`divergence`: that of the answers from those without; null: `divergence` with a budget, else `eigenvalue`"
        ),
    ] = None
