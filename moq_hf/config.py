"""What moq.json says, checked: DeepSpeed's words, one field for each key, every error of a file in one message.

A field holds all there is to a key: its name in the file, what is legal, the default
and the meaning. Reading, writing, and by `scripts/config_reference.py` the table in the
documentation and the JSON Schema are made from the fields.
"""

import copy
import difflib
import fnmatch
import functools
import html
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    dataclass_transform,
)

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    ConfigDict,
    FailFast,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from .deepspeed import in_training_arguments
from .errors import MOST_FAULTS, MoQConfigError, listed, show, show_key
from .grid import (
    Grid,
    Grouping,
    InputGrid,
    InputScale,
    PerChannel,
    PerGroup,
    RowBlocks,
    ScaleDtype,
    Search,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Whole numbers end here: beyond it counting steps would be slow, and printing them
# fail.
LARGEST = 2**63 - 1
# Other numbers end here: beyond it sums overflow.
UNBOUNDED = 1e300
# The share of the run by which every block is at its target: a late last drop costs
# accuracy at low bits.
AUTO_DEADLINE = 0.25
# Configs that come with the package, in its folder `presets`, by their names.
PRESETS = ("w8", "w4", "w3", "w2", "lm-w4", "moq", "auto", "eigen")
# Bits that a block may have under a budget, where the config does not name them.
DEFAULT_CHOICES = (2, 3, 4, 8)

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

# Types of values; the title is how an error says what is legal.
Flag = Annotated[bool, Field(strict=True, title="true or false")]
Text = Annotated[str, Field(strict=True, min_length=1, title="text")]
Positive = Annotated[
    int, Field(strict=True, ge=1, le=LARGEST, title="a whole number from 1")
]
Count = Annotated[
    int, Field(strict=True, ge=0, le=LARGEST, title="a whole number from 0")
]
Bits = Annotated[
    int, Field(strict=True, ge=1, le=16, title="a whole number from 1 to 16")
]
PackedBits = Annotated[
    int, Field(strict=True, ge=1, le=8, title="a whole number from 1 to 8")
]
ByteBits = Annotated[
    int, Field(strict=True, ge=2, le=8, title="a whole number from 2 to 8")
]
Share = Annotated[
    float, Field(strict=True, gt=0, le=1, title="a number above 0 up to 1")
]
Size = Annotated[
    float, Field(strict=True, gt=0, lt=UNBOUNDED, title="a number above 0")
]
Weight = Annotated[
    float, Field(strict=True, ge=0, lt=UNBOUNDED, title="a number from 0")
]
# Absent it is the target: the attribute always has a number.
if TYPE_CHECKING:
    StartBits = int
else:
    StartBits = Bits | None
# How the sensitivity of a block is measured.
Measure = Literal["eigenvalue", "divergence"]


def key(meaning: str, *names: str, **more: Any) -> Any:
    """Describe a field's key: its meaning, its name in the file if it is not the field's, and other names for it."""
    if names:
        paths = [AliasPath(*name.split(".")) for name in names]
        more |= {
            "validation_alias": AliasChoices(*paths),
            "serialization_alias": names[0],
        }
    return Field(description=meaning, **more)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def checked(cls: type[T]) -> type[T]:
    """Make a frozen pydantic dataclass, whose constructor takes the fields by their names, not by those of a file."""
    rules = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=False,
    )
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=rules)(cls))


def given_in(section: object) -> dict[str, Any]:
    """The fields of a section that are not None."""
    return {name: value for name, value in vars(section).items() if value is not None}


@checked
class BlendConfig:
    """Forward sees r w + (1 - r) Q(w); r falls from 1 by the ratio each step and starts again at a switch."""

    enabled: Annotated[
        Flag, key("blend the float weight into the quantized one after each switch")
    ] = False
    quantize_change_ratio: Annotated[
        Annotated[
            float, Field(strict=True, ge=1e-9, le=1, title="a number from 1e-9 up to 1")
        ],
        key("what the float share loses per optimizer step"),
    ] = 0.001


@checked
class EigenvalueConfig:
    """How the sensitivity of each block is measured. A `layer_num` of 0 becomes None, which is all."""

    enabled: Annotated[Flag, key("sensitive blocks drop later")] = False
    verbose: Annotated[Flag, key("log every measurement")] = False
    max_iter: Annotated[Positive, key("Hessian-vector products per block, at most")] = (
        100
    )
    tol: Annotated[Size, key("relative error of an eigenvalue")] = 1e-2
    stability: Annotated[
        Weight, key("added to norms before dividing (power iteration)")
    ] = 1e-6
    gas_boundary_resolution: Annotated[
        Positive, key("measure at multiples of that many optimizer steps")
    ] = 1
    layer_name: Annotated[Text | None, key("path of the layer list; null finds it")] = (
        None
    )
    layer_num: Annotated[
        Count | None,
        AfterValidator(lambda number: number or None),
        key("entries of that list; null or 0 is all"),
    ] = None
    method: Annotated[
        Literal["lanczos", "power"], key("`power` is the published method")
    ] = "lanczos"
    max_overhead: Annotated[
        Share, key("share of the run's time that measuring may take")
    ] = 0.05
    num_samples: Annotated[Positive, key("training examples a measurement uses")] = 64


@checked
class SensitivityConfig:
    """What of a block says how much the loss minds its rounding; limits on measuring it are in `eigenvalue`."""

    measure: Annotated[
        Measure | None,
        key(
            "`eigenvalue`: the top one of a block's Hessian, as published; `divergence`: how far the predictions move "
            "with the block at its next bits; null: `divergence` with a budget, else `eigenvalue`"
        ),
    ] = None


@checked
class DistillationConfig:
    """A float model to follow, and the weights of what is compared."""

    teacher: Annotated[
        Text | None,
        key(
            "folder or Hub id of a float model to learn from, trained on the same task (`MoQTrainer` only)"
        ),
    ] = None
    logits: Annotated[Weight, key("weight of the teacher's logits in the loss")] = 1.0
    hidden: Annotated[Weight, key("weight of the teacher's hidden states")] = 1.0
    # All three as in the runs of docs/results.md, "Scores at equal steps".
    labels: Annotated[Weight, key("weight of the task's own loss")] = 1.0


@checked
class ActivationConfig:
    """Inputs of the quantized linear layers, rounded while training as the `int8` export rounds them."""

    enabled: Annotated[
        Flag,
        key(
            "round the inputs of quantized linear layers too, as engines that multiply integers do; layers that the "
            "model does not call (WavLM's attention, `nn.TransformerEncoder`) are an error before the first step"
        ),
    ] = False
    bits: Annotated[
        ByteBits,
        key("of those inputs; beside weights of 8 bits, 7 for CPUs without VNNI"),
    ] = 8
    scale: Annotated[
        InputScale,
        key(
            "what shares a scale: the inputs of a token, those of a call (`per_tensor`), a block of a token's, or all "
            "inputs of a layer (`static`: a running range)"
        ),
    ] = "static"
    start_step: Annotated[
        Count,
        key("optimizer steps before that begins; it never does before the offset"),
    ] = 0

    @property
    def grid(self) -> InputGrid | None:
        """The grid of those inputs; None if they stay as they are."""
        return InputGrid(self.bits, self.scale) if self.enabled else None


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
    file_mb: Annotated[
        Size | None, key("of the delivered model.safetensors, in 10^6 bytes")
    ] = None
    choices: Annotated[
        tuple[PackedBits, ...],
        FailFast(),
        key(
            "bits that a block may have",
            json_schema_extra={"minItems": 2, "uniqueItems": True},
        ),
    ] = DEFAULT_CHOICES

    def in_words(self) -> str:
        """The choices and the budget, for messages."""
        words = [str(bits) for bits in self.choices]
        limit = (
            f"{self.file_mb:g} MB in the file"
            if self.mean is None
            else f"{self.mean:g} in the mean"
        )
        return f"{', '.join(words[:-1])} or {words[-1]} bits, {limit}"


@checked
class OverrideConfig:
    """What is other than elsewhere in the layers that a glob names. None: as elsewhere."""

    bits: Annotated[Bits | None, key("precision at the end")] = None
    start_bits: Annotated[
        Bits | None, key("precision at the offset; null: as elsewhere, or `bits`")
    ] = None
    group_size: Annotated[
        Positive | None, key("that many consecutive weights of a row share a scale")
    ] = None


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a config means a layer: as a glob, or as a run of whole components of its name.

    >>> [matches("layer.1.query", pattern) for pattern in ("layer.*", "1.query", "1.que")]
    [True, True, False]
    """
    return fnmatch.fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


@checked
class MoQConfig:
    """A checked configuration: an attribute for each key, and an object for each section that can be switched on.

    Made by `load`, `from_dict` or `from_file`, or of keywords: the attributes' names,
    and sections of the file as mappings.

    Attributes:
        kernel: Triton kernels: wanted, not wanted, or None for wherever they run.
        scale_dtype: What scales are rounded to; None leaves it to `serve`.
        from_deepspeed: Whether it was read from a section `quantize_training`, where
            keys that are left out have DeepSpeed's defaults.

    Raises:
        MoQConfigError: Lists everything that is wrong.

    >>> config = MoQConfig.from_dict({"quantize_bits": {"start_bits": 12, "target_bits": 4}, "quantize_groups": 8})
    >>> config.start_bits, config.bits, config.grouping
    (12, 4, RowBlocks(count=8))
    >>> config == MoQConfig(bits=4, start_bits=12, groups=8)
    True
    >>> MoQConfig(bits=3, eigenvalue={"enabled": True}).eigenvalue.enabled
    True
    >>> MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, "quantise_groups": 8})
    Traceback (most recent call last):
    moq_hf.errors.MoQConfigError: MoQ config: quantise_groups: unknown key, did you mean quantize_groups?
    """

    enabled: Annotated[Flag, key("false: train as if moq_hf were not there")] = True
    verbose: Annotated[
        Flag,
        key("log every switch of every block, not only a summary", "quantize_verbose"),
    ] = False
    kernel: Annotated[
        Flag | None,
        key(
            "true: Triton kernels, with a warning where they cannot run; false: plain PyTorch; "
            "null: as true, no warning",
            "quantizer_kernel",
        ),
    ] = None
    q_type: Annotated[
        Literal["symmetric", "asymmetric"],
        key(
            "also spelled `quantize_type` at the top, and `quantize-algo`",
            "quantize_algo.q_type",
            "quantize_type",
        ),
    ] = "symmetric"
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        key("rounding of a weight to its grid", "quantize_algo.rounding"),
    ] = "nearest"
    scale: Annotated[
        Search,
        key(
            "`absmax`; `mse`: the clipping ratio with the least squared error; `auto`: absmax above 5 bits, then mse",
            "quantize_algo.scale",
        ),
    ] = "auto"
    scale_refresh: Annotated[
        Positive,
        key(
            "optimizer steps between searches for the `mse` ratio; it is also searched at each switch",
            "quantize_algo.scale_refresh",
        ),
    ] = 50
    range: Annotated[
        Literal["auto", "narrow", "full"],
        key(
            "`narrow`: as many codes on either side of zero; `full`: one more, on the side of the largest weight of a "
            "group, so that 2 bits have four levels (symmetric grids); `auto`: full at 2 to 4 bits where symmetric",
            "quantize_algo.range",
        ),
    ] = "auto"
    scale_dtype: Annotated[
        ScaleDtype | None,
        key(
            "what scales are rounded to, while training and in the file; null: `float32`, or what the servers in "
            "`serve` load scales in",
            "quantize_algo.scale_dtype",
        ),
    ] = None
    groups: Annotated[
        Positive | Literal["per_channel"],
        key(
            'scales per weight: blocks of consecutive rows, or `"per_channel"`',
            "quantize_groups",
        ),
    ] = "per_channel"
    group_size: Annotated[
        Positive | None,
        key(
            "instead: that many consecutive weights of a row share a scale",
            "quantize_group_size",
        ),
    ] = None
    start_bits: Annotated[
        StartBits,
        key(
            "precision at the offset; null: the target, under a budget the most of its choices",
            "quantize_bits.start_bits",
        ),
    ] = cast(int, None)
    bits: Annotated[
        Bits
        | Annotated[
            BitBudget,
            # Annotated, its result would be the schema.
            PlainSerializer(lambda budget: given_in(budget)),
            Field(
                title='{"mean": 3.0, "choices": [2, 3, 4, 8]}, or the same with "file_mb"',
                json_schema_extra={
                    "oneOf": [{"required": ["mean"]}, {"required": ["file_mb"]}]
                },
            ),
        ],
        key(
            "precision at the end; a budget (`mean` bits per quantized weight, or `file_mb` of the delivered file, in "
            "10^6 bytes) chooses it for each block among `choices`. It must be given",
            "quantize_bits.target_bits",
        ),
    ] = 16
    period: Annotated[
        Positive | Literal["auto"],
        key(
            "optimizer steps from the offset to the first drop; `auto`: such that the last one meets the deadline",
            "quantize_schedule.quantize_period",
        ),
    ] = "auto"
    offset: Annotated[
        Count
        | Annotated[
            float, Field(strict=True, gt=0, lt=1, title="a number above 0 and below 1")
        ],
        key(
            "optimizer steps before anything is quantized; below 1: that share of the run",
            "quantize_schedule.schedule_offset",
        ),
    ] = 0
    deadline: Annotated[
        Share | None,
        key(
            "share of the run by which every block is at its target; null: 0.25 with the period `auto` where bits fall",
            "quantize_schedule.deadline",
        ),
    ] = None
    allow_unreached: Annotated[
        Flag,
        key(
            "train all the same where the run ends before every block is at its target",
            "quantize_schedule.allow_unreached",
        ),
    ] = False
    overrides: Annotated[
        dict[str, OverrideConfig],
        Field(title="an object of globs"),
        key(
            "glob, or name, to `bits`, `start_bits` and `group_size` of the layers that it means; of several globs "
            "with a key the last one counts",
            json_schema_extra={"default": {}},
        ),
    ] = field(default_factory=dict, hash=False)
    blend: Annotated[BlendConfig, key("", "fp16_mixed_quantize")] = BlendConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    sensitivity: SensitivityConfig = SensitivityConfig()
    distillation: DistillationConfig = DistillationConfig()
    activations: Annotated[ActivationConfig, key("", "activation_quantization")] = (
        ActivationConfig()
    )
    modules_to_not_convert: Annotated[
        tuple[
            Annotated[str, Field(strict=True, min_length=1, title="names or globs")],
            ...,
        ]
        | None,
        FailFast(),
        key("names or globs left in full precision, beside the model's output heads"),
    ] = None
    embeddings: Annotated[
        ByteBits | Literal["auto"] | None,
        key(
            "bits of embedding tables, one scale per row, and of output heads that share one; null leaves them alone; "
            "`auto`: 8 where the model is an encoder and `serve` names neither vllm nor sglang",
            "quantize_embeddings",
        ),
    ] = None
    convolutions: Annotated[
        Flag,
        key(
            "quantize 1- and 2-dimensional convolutions with the linear layers, one scale per channel with "
            "`quantize_group_size`; saved as floats on the grid, at full size",
            "quantize_convolutions",
        ),
    ] = False
    heads: Annotated[
        Flag,
        key("quantize the model's output heads like other layers", "quantize_heads"),
    ] = False
    prove: Annotated[
        Flag,
        key(
            "load what a run delivers with plain transformers, "
            "and compare its answers with those of the model in memory"
        ),
    ] = True
    serve: Annotated[
        tuple[
            Literal["transformers", "vllm", "sglang", "llama.cpp", "onnxruntime"], ...
        ],
        FailFast(),
        key(
            "who is to run what is delivered: what one of them cannot take is an error before the first step"
        ),
    ] = ("transformers",)
    seed: Annotated[
        Count, key("of stochastic rounding and of the eigenvalue start vectors")
    ] = 0
    from_deepspeed: Annotated[bool, key("", exclude=True)] = field(
        default=False, compare=False
    )

    def __post_init__(self) -> None:
        """Give the values that follow from others."""
        if self.start_bits is None:
            object.__setattr__(self, "start_bits", max(self.targets, default=16))
        if self.period == "auto" and self.deadline is None and self.falls:
            object.__setattr__(self, "deadline", AUTO_DEADLINE)

    @property
    def symmetric(self) -> bool:
        """Whether zero is in the middle of a grid."""
        return self.q_type == "symmetric"

    @property
    def grouping(self) -> Grouping:
        """Which weights share a scale."""
        if self.group_size is not None:
            return PerGroup(self.group_size)
        return PerChannel() if self.groups == "per_channel" else RowBlocks(self.groups)

    @property
    def has_row_groups(self) -> bool:
        """Whether weights of a row have several scales, in some layers at least."""
        groups = [self.group_size, *(own.group_size for own in self.overrides.values())]
        return any(groups)

    @property
    def budget(self) -> BitBudget | None:
        """What chooses the bits of each block; None if all have the same target."""
        return self.bits if isinstance(self.bits, BitBudget) else None

    @property
    def targets(self) -> tuple[int, ...]:
        """The bits that a block may end with, ascending: one number without a budget."""
        return (self.bits,) if isinstance(self.bits, int) else self.bits.choices

    @property
    def target_in_words(self) -> str:
        """The precision at the end, for messages.

        >>> MoQConfig(bits=BitBudget(mean=3.0)).target_in_words
        '2, 3, 4 or 8 bits, 3 in the mean'
        >>> MoQConfig(bits=4, overrides={"*.layer.0.*": {"bits": 8}}).target_in_words
        '4 bits (*.layer.0.*: 8 bits)'
        """
        words = (
            f"{self.bits} bits" if isinstance(self.bits, int) else self.bits.in_words()
        )
        others = [
            f"{glob}: {own.span_in_words}"
            for glob, own in self.variants().items()
            if glob
        ]
        return f"{words} ({', '.join(others)})" if others else words

    @property
    def depends_on_length(self) -> bool:
        """Whether the length of the run decides on a step: by a deadline, or an offset that is a share."""
        return self.deadline is not None or isinstance(self.offset, float)

    @property
    def falls(self) -> bool:
        """Whether a block may have more bits at first than at the end, float apart."""
        return any(
            own.start_bits > min(own.targets, default=16)
            for own in self.variants().values()
        )

    @property
    def span_in_words(self) -> str:
        """The precision from the offset to the end, for messages.

        >>> MoQConfig(start_bits=8, bits=4).span_in_words, MoQConfig(bits=2).span_in_words
        ('8 to 4 bits', '2 bits')
        """
        return (
            f"{self.start_bits} to {self.target_in_words}"
            if self.start_bits > self.targets[0]
            else self.target_in_words
        )

    def of(self, layer: str) -> "MoQConfig":
        """The config of one layer: with what `overrides` say of it, and without them.

        >>> config = MoQConfig(bits=4, overrides={"layer.0": {"bits": 8}})
        >>> config.of("layer.0.query").bits, config.of("layer.1.query").bits
        (8, 4)
        """
        given: dict[str, Any] = {}
        for glob in self.globs_of(layer):
            given |= given_in(self.overrides[glob])
        return self._with(given)

    def globs_of(self, layer: str) -> list[str]:
        """The globs of `overrides` that mean a layer."""
        return [glob for glob in self.overrides if matches(layer, glob)]

    def variants(self) -> dict[str, "MoQConfig"]:
        """The config of layers that no glob means, by "", and by each glob that gives other bits that of its layers."""
        made = {"": self._with({})}
        for glob, override in self.overrides.items():
            own = self._with(given_in(override))
            if (own.start_bits, own.bits) != (self.start_bits, self.bits):
                made[glob] = own
        return made

    def _with(self, given: Mapping[str, Any]) -> "MoQConfig":
        if not (given or self.overrides):
            return self
        given = {"overrides": {}, **given}
        if "group_size" in given:
            given["groups"] = "per_channel"
        if "bits" in given:
            given.setdefault("start_bits", max(self.start_bits, given["bits"]))
        made = copy.copy(self)
        made.__dict__.update(given)
        return made

    @property
    def measure(self) -> Measure:
        """What the sensitivity of a block is in this run: that of `sensitivity`, or its default."""
        return self.sensitivity.measure or (
            "eigenvalue" if self.budget is None else "divergence"
        )

    @property
    def grid(self) -> Grid:
        """How the linear layers' weights are quantized, whatever their bits are; of a float32 model."""
        return self.grid_of("float32")

    def grid_of(self, dtype: str) -> Grid:
        """The same, of a model whose weights have a dtype.

        What was trained is what the servers in `serve` compute with. vLLM and SGLang
        load scales in the half precision that they compute in: the model's own, else
        bfloat16. Values of bfloat16 are exact in float16 too wherever that has them in
        its normal range, so they fit a GGUF file as well.

        Args:
            dtype: Of the model's weights: "float32", "bfloat16" or "float16".

        >>> config = MoQConfig(bits=4, serve=("vllm", "llama.cpp"))
        >>> config.grid_of("float32").scale_dtype, config.grid_of("float16").scale_dtype
        ('bfloat16', 'float16')
        """
        served: ScaleDtype = "float16" if "llama.cpp" in self.serve else "float32"
        if "vllm" in self.serve or "sglang" in self.serve:
            served = "float16" if dtype == "float16" else "bfloat16"
        is_stochastic = self.rounding == "stochastic"
        is_full = None if self.range == "auto" else self.range == "full"
        scales = self.scale_dtype or served
        return Grid(
            self.grouping, self.symmetric, is_stochastic, self.scale, is_full, scales
        )

    @classmethod
    def load(
        cls,
        source: "MoQConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
        **keywords: Any,
    ) -> "MoQConfig":
        """A preset by its name, the path of a JSON file, a mapping, or a `MoQConfig` as it is.

        Args:
            source: One of the four; None: the keywords say it all.
            **keywords: As of the constructor: they go before what the source says.

        Raises:
            MoQConfigError: No such preset or file, a wrong config, or keywords beside a
                `MoQConfig`, which has its own.

        >>> MoQConfig.load("w4", embeddings=None) == MoQConfig(bits=4)
        True
        """
        if isinstance(source, MoQConfig):
            if keywords:
                raise MoQConfigError(
                    f"a MoQConfig and {listed(list(keywords))} beside it: give the keywords to the MoQConfig"
                )
            return source
        if source is None and keywords:
            return cls(**keywords)
        if isinstance(source, Mapping):
            return _parse(source, "MoQ config", keywords)
        if isinstance(source, str) and source in PRESETS:
            path = Path(__file__).with_name("presets") / f"{source}.json"
            return _parse(read_document(path), f"preset {source}", keywords)
        if isinstance(source, (str, os.PathLike)):
            return _parse(read_document(source), os.fspath(source), keywords)
        got = "nothing" if source is None else type(source).__name__
        if isinstance(source, int) and not isinstance(source, bool):
            got += f": write bits={source}"
        raise MoQConfigError(
            f"a MoQ config is a preset ({listed(PRESETS)}), a path, a mapping, a MoQConfig, or keywords such as "
            f"bits=4; got {got}"
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "MoQConfig":
        """Read a JSON file: the `quantize_training` block alone or a DeepSpeed config that holds it.

        Raises:
            MoQConfigError: No such file, not JSON (line and column), or a wrong config.
        """
        return cls.load(Path(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MoQConfig":
        """Read the same from a mapping.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        return _parse(mapping, "MoQ config")

    def changed(self, *also: str) -> dict[str, Any]:
        """The bits, and the keys whose values are not the defaults, as `from_dict` takes them.

        Args:
            *also: Paths of more keys.
        """
        bits = self.to_dict()["quantize_bits"]
        defaults = MoQConfig.from_dict({"quantize_bits": bits}).flat()
        also += ("quantize_bits.start_bits", "quantize_bits.target_bits")
        return by_section(
            {
                path: value
                for path, value in self.flat().items()
                if path in also or value != defaults[path]
            }
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the keys that were changed, and folded up all of them."""
        changed = html.escape(json.dumps(self.changed(), indent=2))
        every = html.escape(json.dumps(self.to_dict(), indent=2))
        return f"<pre>{changed}</pre><details><summary>All keys</summary><pre>{every}</pre></details>"

    def to_dict(self) -> dict[str, Any]:
        """The config in the file's words, every key with its value; `from_dict` gives an equal config."""
        written = _adapter().dump_python(self, mode="json", by_alias=True)
        return by_section(written)

    def flat(self) -> dict[str, Any]:
        """The same, with the value of each key by its path."""
        return _flatten(self.to_dict(), [])

    def conflicts(self) -> Iterator[str]:
        """What is wrong with values together: a line on each, which names their keys by their paths."""
        if self.group_size is not None and self.groups != "per_channel":
            yield (
                f"quantize_groups {show(self.groups)} and quantize_group_size {self.group_size} exclude each other: "
                "give one"
            )
        if self.range == "full" and not self.symmetric:
            yield (
                "quantize_algo.range: full is of symmetric grids, an asymmetric one has all its codes; "
                "set it to narrow, or quantize_algo.q_type to symmetric"
            )
        if not self.distillation.logits and not self.distillation.hidden:
            yield "distillation: logits and hidden are both 0, so a teacher would teach nothing; give one a weight"
        if (
            self.sensitivity.measure is not None
            and not self.eigenvalue.enabled
            and self.budget is None
        ):
            yield (
                f"sensitivity.measure: nothing asks for {show(self.sensitivity.measure)}: set eigenvalue.enabled to "
                "true for the pace of the blocks, or quantize_bits.target_bits to a budget"
            )
        if self.modules_to_not_convert == ():
            yield (
                "modules_to_not_convert: [] names nothing; output heads stay in float unless quantize_heads is true"
            )
        if (
            isinstance(self.offset, float)
            and self.deadline is not None
            and self.deadline <= self.offset
            and self.falls
        ):
            yield (
                f"quantize_schedule.deadline: {self.deadline:g} of the run is not after "
                f"quantize_schedule.schedule_offset {self.offset:g}, from which on bits fall; make it later, or the "
                "offset earlier"
            )
        yield from self._bits_conflicts()
        for glob, override in self.overrides.items():
            where = f"overrides.{show_key(glob)}"
            if not given_in(override):
                yield f"{where}: says nothing; give bits, start_bits or group_size"
            elif override.bits == 16:
                yield (
                    f"{where}.bits: 16 would quantize nothing; name layers that stay in float in "
                    "modules_to_not_convert"
                )
                continue
            elif glob == "*":
                yield f"{where}: means every layer; say it of all without overrides"
                continue
            for text in self._with(given_in(override))._bits_conflicts():
                yield f"{where}: {text}"

    def _bits_conflicts(self) -> Iterator[str]:
        fault = (
            self._bits_fault() if self.budget is None else _budget_fault(self.budget)
        )
        if fault is not None:
            yield fault
            return
        least = min(self.targets)
        if least == 1 and not self.symmetric:
            yield (
                "quantize_bits.target_bits: 1 bit is symmetric only; set quantize_algo.q_type to symmetric, or 2 bits"
            )
        if self.rounding == "stochastic" and not self.grid.is_uniform(least):
            yield (
                f"quantize_algo.rounding: stochastic needs equal steps, {least} bits {self.q_type} has none; "
                "set it to nearest, or quantize_bits.target_bits to 3 or more"
            )

    def _bits_fault(self) -> str | None:
        start, target = self.start_bits, self.targets[0]
        default = " (it is the default); set it to 8, 4, 3 or 2"
        if target > start:
            advice = (
                default
                if target == 16
                else f"; bits only fall, so quantize_bits.start_bits must be {target} or more"
            )
            return (
                f"quantize_bits.target_bits {target} is above quantize_bits.start_bits "
                f"{start}{advice}"
            )
        if self.enabled and target == 16:
            return f"quantize_bits.target_bits: 16 would quantize nothing{default}"
        return None


def _budget_fault(budget: BitBudget) -> str | None:
    where, mean, choices = (
        "quantize_bits.target_bits",
        budget.mean,
        list(budget.choices),
    )
    if (mean is None) == (budget.file_mb is None):
        return f"{where}: mean {show(mean)} and file_mb {show(budget.file_mb)}: give one of them"
    if len(choices) < 2 or choices != sorted(set(choices)):
        return f"{where}.choices: {show(choices)} must be two numbers of bits or more, ascending, each once"
    if mean is not None and not choices[0] < mean < choices[-1]:
        ends = f"{choices[0]} and {choices[-1]}"
        return f"{where}.mean: {show(mean)} must be between the choices {ends}, neither of them"
    return None


@functools.cache
def _adapter() -> TypeAdapter[MoQConfig]:
    return TypeAdapter(MoQConfig)


@functools.cache
def schema_of_fields() -> dict[str, Any]:
    """The JSON Schema of `MoQConfig` as pydantic makes it; keys with a dot are not in sections yet."""
    return _adapter().json_schema(mode="serialization")


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


# Two ways to say which weights share a scale.
_GROUPS = {"quantize_groups", "quantize_group_size"}


def _parse(
    document: Any, where: str, keywords: Mapping[str, Any] | None = None
) -> MoQConfig:
    """Make a config of a document, and of keywords that go before it.

    Raises:
        MoQConfigError: Lists everything that is wrong with them.
    """
    faults: list[str] = []
    block, ignored = _block_of(document, where, faults)
    of_keywords: list[str] = []
    given = _keyword_values(keywords or {}, of_keywords)
    values = _flatten(block, faults)
    # A keyword of the two goes before either of the document's.
    if any(given.get(name) is not None for name in _GROUPS):
        values = {name: value for name, value in values.items() if name not in _GROUPS}
    values |= given
    faults += map(_in_keywords, of_keywords)
    is_deepspeed = block is not document
    if is_deepspeed:
        if values.get("quantize_group_size") is not None:
            values.setdefault("quantize_groups", "per_channel")
        values = DEEPSPEED_DEFAULTS | values
    wrong: dict[str, str] = {}
    try:
        config = _read(values, is_deepspeed)
    except ValidationError as error:
        wrong = _value_faults(error, values)
        config = _read(
            {path: value for path, value in values.items() if path not in wrong},
            is_deepspeed,
        )
    # A value that is not legal by itself is in no conflict, nor is the target that was
    # probably meant by a key that is none.
    settled = set(wrong)
    if faults:
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
            in_training_arguments(ignored),
        )
    return config


def _read(values: Mapping[str, Any], is_deepspeed: bool) -> MoQConfig:
    """Make a config of values by their paths.

    Raises:
        ValidationError: One of them is not legal.
    """
    arranged = by_section(values) | {"from_deepspeed": is_deepspeed}
    return _adapter().validate_python(arranged, by_alias=True, by_name=False)


# ---- keywords


@functools.cache
def keyword_paths() -> dict[str, str]:
    """The path of each keyword's key, or section, in a file."""
    fields = cast(Any, MoQConfig).__pydantic_fields__
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
            found = _flatten(found, faults, list(paths))
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


def _from_keywords(self: MoQConfig, *sources: Any, **keywords: Any) -> None:
    if sources:
        raise MoQConfigError(
            f"MoQConfig takes keywords alone: write MoQConfig.load({show(sources[0])}, ...)"
        )
    # No key, but a copy has it.
    from_deepspeed = keywords.pop("from_deepspeed", False)
    made = _parse({}, "MoQConfig", keywords)
    self.__dict__.update({**vars(made), "from_deepspeed": from_deepspeed})


# Pydantic's own would know neither the file's sections nor what is wrong together.
MoQConfig.__init__ = _from_keywords  # type: ignore[method-assign]


# ---- the file

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


def read_document(path: str | os.PathLike[str]) -> Any:
    """The JSON document in a file, whose keys must differ.

    Raises:
        MoQConfigError: It cannot be read, or is no JSON.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    # ValueError: not UTF-8, or a path with a null character.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        presets = ""
        if isinstance(error, FileNotFoundError):
            presets = f"; the presets are {listed(PRESETS)}"
            spelt = os.fspath(path).lower().replace("_", "-").replace("int", "w")
            near = _nearest(spelt, PRESETS, 0.8)
            presets += f" (did you mean {near}?)" if near else ""
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"key given twice: {listed(twice)}")
    return dict(pairs)


def _block_of(
    document: Any, where: str, faults: list[str]
) -> tuple[Mapping[str, Any], Mapping[Any, Any]]:
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
        others = {name: part for name, part in document.items() if name not in ours}
        return block, others
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
    return document, {}


@functools.cache
def _places() -> dict[str, list[str]]:
    """What may stand at the top of a file: sections with the names of their keys, and keys without any."""
    places: dict[str, list[str]] = {"quantize_type": []}
    for path in key_schemas():
        head, _, name = path.partition(".")
        places.setdefault(head, []).extend(filter(None, [name]))
    places["quantize-algo"] = places["quantize_algo"]
    return dict(sorted(places.items()))


def _flatten(
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


# ---- what is wrong, in words


def _in_one_text(where: str, wrong: Iterable[str]) -> str:
    """Say in one text what is wrong with a file, a mapping or the arguments of a class."""
    faults = list(wrong)
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
    near = _nearest(word, words)
    if isinstance(value, str) and "array" in types:
        return f" (write {show([near or value])})" if near or not words else ""
    return f" (did you mean {json.dumps(near)}?)" if near else ""


def _nearest(word: Any, words: Iterable[str], cutoff: float = 0.6) -> str | None:
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
    near = _nearest(name, here)
    if near and name not in meant:
        return f"{path}: unknown key, did you mean {section}{near}?"
    elsewhere = _nearest(name, meant, 0.8)
    if elsewhere:
        path_meant = meant[elsewhere]
        names = {own: word for word, own in keyword_paths().items()}
        # Keywords and overrides have a key by its short name.
        short = names.get(path_meant)
        found = f"{section}{short}" if short in here else path_meant
        return f"{path}: unknown key, did you mean {found}?"
    return f"{path}: unknown key; legal here are {', '.join(here)}"
