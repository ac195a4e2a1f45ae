"""The fields of a config: one for each key, with its legal values, its default and its meaning.

Reading and writing use them, and `scripts/config_reference.py` makes the table in the
documentation and the JSON Schema from them.
"""

import copy
import fnmatch
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetPydanticSchema,
    PlainSerializer,
)
from pydantic.dataclasses import dataclass
from pydantic_core.core_schema import literal_schema

from .dialect import word
from .errors import either, show, show_key
from .grid import (
    FLOATS,
    Format,
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
from .servers import NAMED

T = TypeVar("T")

# The largest integer that a key may have: counting more steps would be slow, and
# printing them would fail.
LARGEST = 2**63 - 1
# The bound of other numbers, beyond which sums overflow.
UNBOUNDED = 1e300
# The share of the run by which every block is at its target: a late last drop costs
# accuracy at low bits.
AUTO_DEADLINE = 0.25
# Bits that a block may have under a budget, if the config does not name them.
DEFAULT_CHOICES = (2, 3, 4, 8)
# Types of values; an error says what is legal by the title.
Flag = Annotated[bool, Field(strict=True, title="true or false")]
Text = Annotated[str, Field(strict=True, min_length=1, title="text")]


def one_of(names: Iterable[str]) -> GetPydanticSchema:
    """An annotation for text that must be one of these names."""
    return GetPydanticSchema(lambda *_: literal_schema([*names]))


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
Percentile = Annotated[
    float, Field(strict=True, gt=0, le=100, title="a number above 0 up to 100")
]
Size = Annotated[
    float, Field(strict=True, gt=0, lt=UNBOUNDED, title="a number above 0")
]
Weight = Annotated[
    float, Field(strict=True, ge=0, lt=UNBOUNDED, title="a number from 0")
]
# If absent it becomes the target, so the attribute is always a number.
if TYPE_CHECKING:
    StartBits = int
else:
    StartBits = Bits | None
# How the sensitivity of a block is measured.
Measure = Literal["eigenvalue", "divergence"]
# Gives the name of a key by its path.
Speller = Callable[[str], str]


def key(meaning: str, **more: Any) -> Any:
    """Describe a field's key."""
    return Field(description=meaning, **more)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def checked(cls: type[T]) -> type[T]:
    """Make a frozen pydantic dataclass."""
    rules = ConfigDict(extra="forbid", allow_inf_nan=False)
    return cast(type[T], dataclass(frozen=True, kw_only=True, config=rules)(cls))


def given_in(section: object) -> dict[str, Any]:
    """The fields of a section that are not None."""
    return {name: value for name, value in vars(section).items() if value is not None}


@checked
class BlendConfig:
    """The forward pass uses r w + (1 - r) Q(w); r falls from 1 by the ratio each step, and starts again at a switch."""

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
    """The measurement of each block's sensitivity. A `layer_num` of 0 becomes None, which means all."""

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
        Share, key("share of the run's work that measuring may take")
    ] = 0.05
    num_samples: Annotated[
        Positive, key("examples of a step that a measurement uses")
    ] = 64


@checked
class SensitivityConfig:
    """The measure that ranks blocks by how much rounding hurts; limits on measuring are in `eigenvalue`."""

    measure: Annotated[
        Measure | None,
        key(
            "`eigenvalue`: the top one of a block's Hessian, as published; `divergence`: how far the predictions move "
            "with the block at its next bits; null: `divergence` with a budget, else `eigenvalue`"
        ),
    ] = None


@checked
class DistillationConfig:
    """The float model to learn from, and the weights of the parts of the loss."""

    teacher: Annotated[
        Text | None,
        key(
            "folder or Hub id of a float model to learn from, trained on the same task (`MoQTrainer`, `MoQMixin`)"
        ),
    ] = None
    logits: Annotated[Weight, key("weight of the teacher's logits in the loss")] = 1.0
    hidden: Annotated[Weight, key("weight of the teacher's hidden states")] = 1.0
    similarity: Annotated[
        Weight,
        key("weight of how the texts of a batch compare: of their embeddings' cosines"),
    ] = 0.0
    embedding: Annotated[
        Weight, key("weight of the cosine of embeddings with the teacher's")
    ] = 0.0
    relations: Annotated[
        Weight,
        key(
            "weight of the relations between tokens in the last layer: of queries, of keys, of values (MiniLMv2)"
        ),
    ] = 0.0
    # Logits, hidden, labels and dropout as docs/results/recipes.md has them.
    labels: Annotated[Weight, key("weight of the task's own loss")] = 1.0
    dropout: Annotated[
        Flag, key("train with dropout in a float phase and beside a teacher")
    ] = False


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
    symmetric: Annotated[
        Flag,
        key(
            "whether zero is in the middle of the range, `static` or `per_token`; false: it has two ends and a zero "
            "point, for inputs that are mostly on one side, as after GELU"
        ),
    ] = True
    percentile: Annotated[
        Percentile,
        key(
            "of the inputs of a call, how many a `static` range holds; below 100 a few outliers do not decide it, and "
            "are clipped"
        ),
    ] = 100.0
    window: Annotated[
        Positive | None,
        key(
            "optimizer steps that a `static` range is the mean of, then a moving one; null: the first step's range, "
            "into which each later one goes with a share of 0.01"
        ),
    ] = None
    wide_bits: Annotated[
        ByteBits | None,
        key(
            "of the inputs of the widest layer of each block that has fewer outputs, the second product of a "
            "feed-forward part, whose inputs have the outliers; null: `bits`"
        ),
    ] = None

    @property
    def grid(self) -> InputGrid | None:
        """The grid of those inputs; None if they stay as they are."""
        if not self.enabled:
            return None
        if self.scale == "per_token":
            return InputGrid(self.bits, self.scale, symmetric=self.symmetric)
        if self.scale != "static":
            return InputGrid(self.bits, self.scale)
        return InputGrid(
            self.bits,
            self.scale,
            symmetric=self.symmetric,
            percentile=self.percentile,
            window=self.window,
        )

    @property
    def in_words(self) -> str:
        """The same for messages.

        >>> ActivationConfig(enabled=True, symmetric=False).in_words, ActivationConfig().in_words
        ('8 bits (static, asymmetric)', 'float')
        """
        if self.grid is None:
            return "float"
        wide = (
            f", {self.wide_bits} in each block's widest layer" if self.wide_bits else ""
        )
        return f"{self.bits} bits{wide} ({self.grid.in_words})"

    @property
    def of_ranges(self) -> dict[str, Any]:
        """The keys of static ranges that are not as they are by default."""
        default = ActivationConfig()
        names = ("symmetric", "percentile", "window")
        values = {name: getattr(self, name) for name in names}
        return {n: v for n, v in values.items() if v != getattr(default, n)}


def activation_section(value: Any) -> Any:
    """Give the section `activations`: it may be its bits, its switch, or the section without its switch."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, int):
        return {"enabled": True, "bits": value}
    return {"enabled": True, **value} if isinstance(value, Mapping) else value


@checked
class ActivationOverride:
    """The settings of `overrides` for the inputs of some layers; None leaves them as for all layers."""

    enabled: Annotated[Flag | None, key("whether they are rounded")] = None
    bits: Annotated[ByteBits | None, key("of those inputs")] = None
    scale: Annotated[InputScale | None, key("what shares a scale")] = None
    symmetric: Annotated[
        Flag | None, key("of a range that is `static` or `per_token`")
    ] = None
    percentile: Annotated[Percentile | None, key("of a `static` range")] = None
    window: Annotated[Positive | None, key("of a `static` range")] = None


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
        limit = (
            f"{self.file_mb:g} MB in the file"
            if self.mean is None
            else f"{self.mean:g} in the mean"
        )
        return f"{either(self.choices)} bits, {limit}"


@checked
class OverrideConfig:
    """Settings of the layers that a glob names; None leaves that of all layers."""

    bits: Annotated[Bits | None, key("precision at the end")] = None
    start_bits: Annotated[
        Bits | None, key("precision at the offset; null: as of all layers, or `bits`")
    ] = None
    group_size: Annotated[
        Positive | None, key("that many consecutive weights of a row share a scale")
    ] = None
    activations: Annotated[
        ActivationOverride | None,
        BeforeValidator(activation_section),
        key("how their inputs are rounded: bits, true or false, or keys that differ"),
    ] = None


def matches(name: str, pattern: str) -> bool:
    """True if a pattern of a config matches a layer: as a glob, or as a run of whole components of its name.

    >>> [matches("layer.1.query", pattern) for pattern in ("layer.*", "1.query", "1.que")]
    [True, True, False]
    >>> matches("layer.1.query.base_layer", "*.query")
    True
    """
    # A layer that PEFT adapts also goes by the name that it had before.
    return any(
        fnmatch.fnmatchcase(called, pattern) or f".{pattern}." in f".{called}."
        for called in (name, name.removesuffix(".base_layer"))
    )


@checked
class ConfigFields:
    """The fields of a config: an attribute for each key, and an object for each section that can be switched on."""

    enabled: Annotated[Flag, key("false: train as if moq_hf were not there")] = True
    train: Annotated[
        Literal["weights", "scales"],
        key(
            "`weights`: the float weights, quantized in each pass; `scales`: the codes are frozen once the weights are "
            "rounded, and the scales of layers are all that trains, as parameters of the model"
        ),
    ] = "weights"
    grid: Annotated[
        Literal["found"] | None,
        key(
            "`found`: each layer is quantized on the grid that its weights lie on already, with the scales that they "
            "have, which stay; what else says a grid, from `bits` to `format`, follows from the weights; null: these "
            "keys say it"
        ),
    ] = None
    bits: Annotated[
        Bits
        | Annotated[
            BitBudget,
            # With an annotated return type, that would be the schema.
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
            "10^6 bytes) chooses it for each block among `choices`. It must be given"
        ),
    ] = 16
    start_bits: Annotated[
        StartBits,
        key(
            "precision at the offset; null: the target, under a budget the most of its choices"
        ),
    ] = cast(int, None)
    verbose: Annotated[
        Flag,
        key("log every switch of every block, not only a summary"),
    ] = False
    kernel: Annotated[
        Flag | None,
        key(
            "true: Triton kernels, with a warning where they cannot run; false: plain PyTorch; "
            "null: as true, no warning"
        ),
    ] = None
    q_type: Annotated[
        Literal["symmetric", "asymmetric"],
        key("whether zero is in the middle of a grid"),
    ] = "symmetric"
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        key("rounding of a weight to its grid"),
    ] = "nearest"
    scale: Annotated[
        Search,
        key(
            "`absmax`; `mse`: the clipping ratio with the least squared error; `auto`: absmax above 5 bits, then mse"
        ),
    ] = "auto"
    scale_refresh: Annotated[
        Positive,
        key(
            "optimizer steps between searches for the `mse` ratio; it is also searched at each switch"
        ),
    ] = 50
    gptq: Annotated[
        Count,
        key(
            "training examples from which GPTQ rounds trained linear layers when they fall to fewer bits, so that "
            "training starts nearer to float; 0: none"
        ),
    ] = 0
    range: Annotated[
        Literal["auto", "narrow", "full"],
        key(
            "`narrow`: as many codes on either side of zero; `full`: one more, on the side of the largest weight of a "
            "group, so that 2 bits have four levels (symmetric grids); `auto`: full at 2 to 4 bits where symmetric and "
            "`serve` does not name executorch"
        ),
    ] = "auto"
    scale_dtype: Annotated[
        ScaleDtype | None,
        key(
            "what scales are rounded to, while training and in the file; null: `float32`, or what the servers in "
            "`serve` load scales in"
        ),
    ] = None
    group_size: Annotated[
        Positive | None,
        key("that many consecutive weights of a row share a scale"),
    ] = None
    groups: Annotated[
        Positive | Literal["per_channel"],
        key(
            'instead: scales per weight, of blocks of consecutive rows, or `"per_channel"`'
        ),
    ] = "per_channel"
    format: Annotated[
        Format,
        key(
            "what codes are; `mxfp4` has 4 bits in groups of 32, `nvfp4` in groups of 16, `fp8` 8 bits per channel "
            "(E4M3, rounded inputs too), and none of them another target"
        ),
    ] = "int"
    pack_bits: Annotated[
        Literal[4, 8] | None,
        key(
            "the fewest bits that a packed code takes in the files: codes of 3 bits are in containers of 4, exact and "
            "readable by compressed-tensors 0.17; null: their own"
        ),
    ] = None
    period: Annotated[
        Positive | Literal["auto"],
        key(
            "optimizer steps from the offset to the first drop; `auto`: such that the last one meets the deadline"
        ),
    ] = "auto"
    offset: Annotated[
        Count
        | Annotated[
            float, Field(strict=True, gt=0, lt=1, title="a number above 0 and below 1")
        ],
        key(
            "optimizer steps before anything is quantized; below 1: that share of the run"
        ),
    ] = 0
    deadline: Annotated[
        Share | None,
        key(
            "share of the run by which every block is at its target; null: 0.25 with the period `auto` where bits fall"
        ),
    ] = None
    allow_unreached: Annotated[
        Flag,
        key(
            "train all the same where the run ends before every block is at its target"
        ),
    ] = False
    overrides: Annotated[
        dict[str, OverrideConfig],
        Field(title="an object of globs"),
        key(
            "glob, or name, to `bits`, `start_bits`, `group_size` and `activations` (bits, false, or keys that differ) "
            "of the layers that it means; of several globs with a key the last one counts",
            json_schema_extra={"default": {}},
        ),
    ] = field(default_factory=dict, hash=False)
    blend: BlendConfig = BlendConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    sensitivity: SensitivityConfig = SensitivityConfig()
    distillation: DistillationConfig = DistillationConfig()
    activations: ActivationConfig = ActivationConfig()
    modules_to_not_convert: Annotated[
        tuple[
            Annotated[str, Field(strict=True, min_length=1, title="names or globs")],
            ...,
        ]
        | None,
        FailFast(),
        key("names or globs left in full precision, beside the model's output heads"),
    ] = None
    lora: Annotated[
        Literal["merged"] | None,
        key(
            '`"merged"`: PEFT\'s LoRA trains the weight that is delivered: each pass quantizes W + s B A, so that the '
            "folder needs no PEFT; null: adapters stay floats beside the quantized weights"
        ),
    ] = None
    embeddings: Annotated[
        ByteBits | Literal["auto"] | None,
        key(
            "bits of embedding tables, one scale per row unless they have fewer than 8 and `group_size`, and "
            "of output heads that share one; null leaves them alone; "
            "`auto`: 8, or the layers' bits where the file stores all weights at the same bits, if the model is an "
            "encoder and `serve` names neither vllm nor sglang"
        ),
    ] = "auto"
    convolutions: Annotated[
        Flag,
        key(
            "quantize 1- and 2-dimensional convolutions with the linear layers, one scale per channel with "
            "`group_size`; saved as rounded floats, at full size"
        ),
    ] = False
    heads: Annotated[
        Flag,
        key("quantize the model's output heads like other layers"),
    ] = False
    prove: Annotated[
        Flag,
        key(
            "load what a run delivers with plain transformers, "
            "and compare its answers with those of the model in memory"
        ),
    ] = True
    serve: Annotated[
        tuple[Annotated[str, one_of(NAMED)], ...],
        FailFast(),
        key(
            "who is to run what is delivered: what one of them cannot take is an error before the first step"
        ),
    ] = ("transformers",)
    seed: Annotated[
        Count, key("of stochastic rounding and of the eigenvalue start vectors")
    ] = 0
    # The language of the document that the config was read from.
    dialect: Annotated[
        Literal["keywords", "deepspeed", "quantize_training"], key("", exclude=True)
    ] = field(default="keywords", compare=False)

    def __post_init__(self) -> None:
        """Fill in the values that follow from others."""
        if self.start_bits is None:
            object.__setattr__(self, "start_bits", max(self.targets, default=16))
        if self.period == "auto" and self.deadline is None and self.falls:
            object.__setattr__(self, "deadline", AUTO_DEADLINE)

    @property
    def from_deepspeed(self) -> bool:
        """True if keys that are left out have DeepSpeed's defaults."""
        return self.dialect == "quantize_training"

    @property
    def symmetric(self) -> bool:
        """True if zero is in the middle of a grid."""
        return self.q_type == "symmetric"

    @property
    def grouping(self) -> Grouping:
        """The weights that share a scale."""
        if self.group_size is not None:
            return PerGroup(self.group_size)
        return PerChannel() if self.groups == "per_channel" else RowBlocks(self.groups)

    @property
    def has_row_groups(self) -> bool:
        """True if weights of a row have several scales, at least in some layers."""
        groups = [self.group_size, *(own.group_size for own in self.overrides.values())]
        return any(groups)

    @property
    def budget(self) -> BitBudget | None:
        """The budget under which bits are chosen for each block; None if all blocks have the same target."""
        return self.bits if isinstance(self.bits, BitBudget) else None

    @property
    def targets(self) -> tuple[int, ...]:
        """The bits that a block may end with, ascending: one number without a budget."""
        return (self.bits,) if isinstance(self.bits, int) else self.bits.choices

    @property
    def target_in_words(self) -> str:
        """The precision at the end, for messages.

        >>> ConfigFields(bits=BitBudget(mean=3.0)).target_in_words
        '2, 3, 4 or 8 bits, 3 in the mean'
        >>> ConfigFields(bits=1).target_in_words
        '1 bit'
        >>> ConfigFields(bits=4, overrides={"*.layer.0.*": {"bits": 8}}).target_in_words
        '4 bits (*.layer.0.*: 8 bits)'
        """
        words = "1 bit" if self.bits == 1 else f"{self.bits} bits"
        if isinstance(self.bits, BitBudget):
            words = self.bits.in_words()
        others = [
            f"{glob}: {own.span_in_words}"
            for glob, own in self.variants().items()
            if glob
        ]
        return f"{words} ({', '.join(others)})" if others else words

    @property
    def depends_on_length(self) -> bool:
        """True if a step depends on the length of the run: through a deadline, or an offset that is a share."""
        return self.deadline is not None or isinstance(self.offset, float)

    @property
    def falls(self) -> bool:
        """True if a block may have more bits at first than at the end, leaving aside float."""
        return any(
            own.start_bits > min(own.targets, default=16)
            for own in self.variants().values()
        )

    @property
    def span_in_words(self) -> str:
        """The precision from the offset to the end, for messages.

        >>> ConfigFields(start_bits=8, bits=4).span_in_words, ConfigFields(bits=2).span_in_words
        ('8 to 4 bits', '2 bits')
        """
        return (
            f"{self.start_bits} to {self.target_in_words}"
            if self.start_bits > self.targets[0]
            else self.target_in_words
        )

    def of(self, layer: str) -> Self:
        """The config of one layer, with what `overrides` say about it, and no overrides left.

        >>> config = ConfigFields(bits=4, overrides={"layer.0": {"bits": 8}})
        >>> config.of("layer.0.query").bits, config.of("layer.1.query").bits
        (8, 4)
        """
        return self._with(self.overrides[glob] for glob in self.globs_of(layer))

    def input_grid_of(self, layer: str, wide: Container[str]) -> InputGrid | None:
        """How the inputs of one layer are rounded; None if they stay as they are.

        Args:
            layer: Its name.
            wide: Names of the layers that `wide_bits` is for; see `Inventory.wide`.

        >>> section = ActivationConfig(enabled=True, bits=4, scale="per_token", wide_bits=8)
        >>> ConfigFields(bits=4, activations=section).input_grid_of("fc2", {"fc2"}).bits
        8
        """
        section = self.of(layer).activations
        grid = section.grid
        if grid is not None and self.format == "fp8":
            return replace(grid, format="fp8")
        if grid is None or section.wide_bits is None or layer not in wide:
            return grid
        return replace(grid, bits=section.wide_bits)

    def globs_of(self, layer: str) -> list[str]:
        """The globs of `overrides` that match a layer."""
        return [glob for glob in self.overrides if matches(layer, glob)]

    def variants(self) -> dict[str, Self]:
        """The config of layers that no glob matches, under "", and of those of each glob that gives other bits."""
        made = {"": self._with(())}
        for glob, override in self.overrides.items():
            own = self._with([override])
            if (own.start_bits, own.bits) != (self.start_bits, self.bits):
                made[glob] = own
        return made

    @property
    def activation_sections(self) -> list[ActivationConfig]:
        """The section for layers that no glob matches, then that of each glob."""
        globs = self.overrides.values()
        return [self.activations, *(self._with([own]).activations for own in globs)]

    @property
    def rounds_inputs(self) -> bool:
        """True if the inputs of some layers are rounded."""
        return any(section.enabled for section in self.activation_sections)

    @property
    def inputs_in_words(self) -> str:
        """How inputs are rounded, for messages.

        >>> inner = ActivationOverride(enabled=False)
        >>> own = {"*.dense": OverrideConfig(activations=inner)}
        >>> ConfigFields(bits=8, activations=ActivationConfig(enabled=True), overrides=own).inputs_in_words
        '8 bits (static); *.dense: float'
        """
        first, *others = self.activation_sections
        told = [first.in_words]
        for (glob, override), own in zip(self.overrides.items(), others, strict=True):
            if override.activations is not None:
                told.append(f"{glob}: {own.in_words}")
        return "; ".join(told)

    def _with(self, overrides: Iterable[OverrideConfig]) -> Self:
        given: dict[str, Any] = {}
        activations = self.activations
        for override in overrides:
            given |= given_in(override)
            if override.activations is not None:
                said = given_in(override.activations)
                if "bits" in said:
                    said["wide_bits"] = None
                if said.get("scale", activations.scale) != activations.scale:
                    said.setdefault("symmetric", True)
                activations = replace(activations, **said)
                given["activations"] = activations
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
        """The measure of sensitivity in this run: the one in `sensitivity`, or the default."""
        return self.sensitivity.measure or (
            "eigenvalue" if self.budget is None else "divergence"
        )

    @property
    def float32_grid(self) -> Grid:
        """The grid of a float32 model's linear layers, whatever their bits."""
        return self.grid_of("float32")

    def grid_of(self, dtype: str) -> Grid:
        """The grid of linear layers in a model whose weights have the given dtype, whatever their bits.

        Training uses what the servers in `serve` compute with. vLLM and SGLang
        load scales in the half precision in which they compute: the model's own, or else
        bfloat16. Values of bfloat16 in the normal range of float16 are exact there too,
        so they also fit a GGUF file. With scales in a half dtype MLX's arithmetic is exact.

        Args:
            dtype: The dtype of the model's weights: "float32", "bfloat16" or "float16".

        >>> config = ConfigFields(bits=4, serve=("vllm", "llama.cpp"))
        >>> config.grid_of("float32").scale_dtype, config.grid_of("float16").scale_dtype
        ('bfloat16', 'float16')
        """
        served: ScaleDtype = "float32"
        if {"llama.cpp", "mlx"} & {*self.serve}:
            served = "float16"
        halves = {"vllm", "sglang"}
        if dtype == "bfloat16":
            # MLX computes in one dtype.
            halves.add("mlx")
        # Plain transformers unpacks 4-bit floats only in a bfloat16 model.
        if halves & {*self.serve} or self.format != "int":
            served = "float16" if dtype == "float16" else "bfloat16"
        if self.format == "fp8":
            # Servers keep its scales in float32, and plain transformers in the model's dtype.
            served = cast(ScaleDtype, "float32" if dtype == "float64" else dtype)
        is_full = None if self.range == "auto" else self.range == "full"
        if "executorch" in self.serve:
            # XNNPACK's kernel takes no negative scales.
            served = "bfloat16"
            is_full = self.range == "full"
        is_stochastic = self.rounding == "stochastic"
        scales = self.scale_dtype or served
        return Grid(
            self.grouping,
            self.symmetric,
            is_stochastic,
            self.scale,
            is_full,
            scales,
            self.format,
        )

    def spell(self, path: str) -> str:
        """The name of a key in the document that the config was read from.

        >>> ConfigFields(bits=4).spell("bits"), ConfigFields(bits=4, dialect="deepspeed").spell("bits")
        ('bits', 'quantize_bits.target_bits')
        """
        return path if self.dialect == "keywords" else word(path)

    def conflicts(self, spell: Speller) -> Iterator[str]:
        """Yield a line on each conflict between values.

        Args:
            spell: Gives the name of a key by its path.
        """
        if self.group_size is not None and self.groups != "per_channel":
            yield (
                f"{spell('groups')} {show(self.groups)} and {spell('group_size')} {self.group_size} exclude each "
                "other: give one"
            )
        if self.range == "full" and not self.symmetric:
            yield (
                f"{spell('range')}: full is for symmetric grids, an asymmetric one uses all codes; set it to narrow, "
                f"or {spell('q_type')} to symmetric"
            )
        taught = ("logits", "hidden", "similarity", "embedding", "relations")
        if not any(getattr(self.distillation, name) for name in taught):
            yield f"distillation: {', '.join(taught)} are all 0, so a teacher would teach nothing; give one a weight"
        if (
            self.sensitivity.measure is not None
            and not self.eigenvalue.enabled
            and self.budget is None
        ):
            yield (
                f"{spell('sensitivity.measure')}: nothing asks for {show(self.sensitivity.measure)}: set "
                f"{spell('eigenvalue.enabled')} to true for the pace of the blocks, or {spell('bits')} to a budget"
            )
        if self.modules_to_not_convert == ():
            yield (
                f"{spell('modules_to_not_convert')}: [] names nothing; output heads stay in float unless "
                f"{spell('heads')} is true"
            )
        if (
            isinstance(self.offset, float)
            and self.deadline is not None
            and self.deadline <= self.offset
            and self.falls
        ):
            yield (
                f"{spell('deadline')}: {self.deadline:g} of the run is not after {spell('offset')} {self.offset:g}, "
                f"where bits begin to fall; make it later, or the offset earlier{self._without_falling(spell)}"
            )
        yield from self._bits_conflicts(spell)
        yield from self._format_conflicts(spell)
        yield from self._scales_conflicts(spell)
        yield from self._found_conflicts(spell)
        yield from self._input_conflicts(spell("activations"))
        yield from self._override_conflicts(spell)

    def _without_falling(self, spell: Speller) -> str:
        """How bits would not fall at all, for the end of an error; empty under a budget."""
        if not isinstance(self.bits, int):
            return ""
        return f"; with {spell('start_bits')} {self.bits} none fall"

    def _input_conflicts(self, where: str) -> Iterator[str]:
        yield from _range_conflicts(where, self.activations, self.activations.of_ranges)
        grids = [section.grid for section in self.activation_sections]
        if "llama.cpp" in self.serve and not all(
            g is None or g.symmetric for g in grids
        ):
            yield (
                f"{where}.symmetric: llama.cpp rounds inputs by itself, around zero, and its files have no place for a "
                'zero point; set it to true, or leave "llama.cpp" out of serve'
            )

    def _override_conflicts(self, spell: Speller) -> Iterator[str]:
        for glob, override in self.overrides.items():
            where = f"overrides.{show_key(glob)}"
            if not given_in(override):
                yield f"{where}: says nothing; give bits, start_bits, group_size or activations"
            elif override.bits == 16:
                yield (
                    f"{where}.bits: 16 would quantize nothing; name layers that stay in float in "
                    "modules_to_not_convert"
                )
                continue
            elif glob == "*":
                yield f"{where}: matches every layer; set these for all layers, outside of overrides"
                continue
            own = self._with([override])
            for text in own._bits_conflicts(spell):
                yield f"{where}: {text}"
            if override.activations is not None:
                section = replace(ActivationConfig(), **given_in(override.activations))
                yield from _range_conflicts(
                    f"{where}.activations", own.activations, section.of_ranges
                )

    def _bits_conflicts(self, spell: Speller) -> Iterator[str]:
        own = FLOATS.get(self.format)
        if own is not None and self.pack_bits is not None:
            yield (
                f"{spell('pack_bits')}: codes of {self.format} have their own containers; leave it out"
            )
            return
        given = self.targets, self.grouping.row_size, self.symmetric
        in_blocks = isinstance(self.grouping, RowBlocks)
        if own is not None and (
            in_blocks or given != ((own.bits,), own.group_size, True)
        ):
            groups = spell("groups" if in_blocks else "group_size")
            yield (
                f"{spell('format')}: {self.format} is {own.in_words}; "
                f"leave out {spell('bits')}, {groups} and {spell('q_type')}, or a preset with others"
            )
            return
        fault = (
            self._bits_fault(spell)
            if self.budget is None
            else _budget_fault(self.budget, spell("bits"))
        )
        if fault is not None:
            yield fault
            return
        least = min(self.targets)
        if least == 1 and not self.symmetric:
            yield f"{spell('bits')}: 1 bit is symmetric only; set {spell('q_type')} to symmetric, or 2 bits"
        if self.rounding == "stochastic" and not self.float32_grid.at(least).is_uniform:
            yield (
                f"{spell('rounding')}: stochastic needs equal steps, which {self.q_type} grids of {least} bits do not "
                f"have; set it to nearest, or {spell('bits')} to 3 or more"
            )

    def _format_conflicts(self, spell: Speller) -> Iterator[str]:
        if self.format != "int" and self.range == "full":
            yield f"{spell('range')}: full is for integers, and codes of {self.format} are floats; leave it out"
        if self.format != "fp8":
            return
        if self.scale == "mse":
            yield f"{spell('scale')}: mse would clip, which gains nothing with the steps of fp8; leave it out"
        has_ratios = isinstance(self.embeddings, int) and self.embeddings < 8
        if self.scale_refresh != ConfigFields.scale_refresh and not has_ratios:
            yield f"{spell('scale_refresh')}: no ratio is searched with the steps of fp8; leave it out"
        if self.train == "scales":
            yield f'{spell("train")}: "scales" is for integers and floats of 4 bits; leave it out'
        for section in self.activation_sections:
            widths = section.bits, section.wide_bits
            is_known = section.scale in ("per_token", "static") and section.symmetric
            if section.enabled and not (is_known and widths == (8, None)):
                yield (
                    f"{spell('activations')}: inputs beside fp8 weights are E4M3 too, 8 bits, symmetric, per_token or "
                    f"static, not {section.in_words}; leave out what differs"
                )
                return

    def _scales_conflicts(self, spell: Speller) -> Iterator[str]:
        if self.train == "weights":
            return
        falls = f"bits fall ({self.span_in_words})"
        at_end = f"set it to {spell('bits')}, in overrides too"
        has_ratios = self.scale_refresh != ConfigFields.scale_refresh
        out = "leave it out"
        faults = {
            "bits": (self.budget, "a budget is spent while training", "give a number"),
            "start_bits": (self.falls and not self.budget, falls, at_end),
            "offset": (self.offset, "weights train before it", "set it to 0"),
            "rounding": (self.rounding != "nearest", "each step draws codes", out),
            "scale_refresh": (has_ratios, "no ratio is searched again", out),
            "blend.enabled": (self.blend.enabled, "float weights take part", out),
            "lora": (self.lora, "adapters change weights", out),
        }
        for path, (is_so, why, instead) in faults.items():
            if is_so:
                yield (
                    f'{spell(path)}: {why}, and {spell("train")} "scales" freezes the codes before the first step; '
                    f"{instead}"
                )

    def _found_conflicts(self, spell: Speller) -> Iterator[str]:
        if self.grid is None:
            return
        faults = {
            "bits": (self.budget, "a budget would choose other bits"),
            "start_bits": (self.falls and not self.budget, "bits would fall"),
            "offset": (self.offset, "weights would leave their grids before it"),
            "rounding": (self.rounding != "nearest", "weights would be moved"),
            "scale": (self.scale == "mse", "scales are those of the weights"),
            "gptq": (self.gptq, "there is nothing left to round"),
            "groups": (isinstance(self.groups, int), "rows have their own scales"),
            "blend.enabled": (self.blend.enabled, "there is no float weight to blend"),
            "lora": (self.lora, "adapters would move the weights"),
        }
        for path, (is_so, why) in faults.items():
            if is_so:
                yield f'{spell(path)}: {why}, and {spell("grid")} "found" keeps the grids of the weights; leave it out'

    def _bits_fault(self, spell: Speller) -> str | None:
        start, target = self.start_bits, self.targets[0]
        default = " (it is the default); set it to 8, 4, 3 or 2"
        if target > start:
            advice = (
                default
                if target == 16
                else f"; bits only fall, so {spell('start_bits')} must be {target} or more"
            )
            return f"{spell('bits')} {target} is above {spell('start_bits')} {start}{advice}"
        if self.enabled and target == 16 and self.grid is None:
            return f"{spell('bits')}: 16 would quantize nothing{default}"
        return None


def _range_conflicts(
    where: str, section: ActivationConfig, given: Mapping[str, Any]
) -> Iterator[str]:
    ranges = {"per_token": ["symmetric"]}.get(section.scale, [])
    wrong = [name for name in given if name not in ranges]
    if wrong and section.scale != "static":
        yield (
            f"{where}: {', '.join(wrong)}: for static ranges alone, and {section.scale} scales follow each call; leave "
            'out what is for ranges, or the preset that has it, or set scale to "static"'
        )


def _budget_fault(budget: BitBudget, where: str) -> str | None:
    mean, choices = budget.mean, list(budget.choices)
    if (mean is None) == (budget.file_mb is None):
        return f"{where}: mean {show(mean)} and file_mb {show(budget.file_mb)}: give one of them"
    if len(choices) < 2 or choices != sorted(set(choices)):
        return f"{where}.choices: {show(choices)} must be two numbers of bits or more, ascending, each once"
    if mean is not None and not choices[0] < mean < choices[-1]:
        ends = f"{choices[0]} and {choices[-1]}"
        return f"{where}.mean: {show(mean)} must be between the choices {ends}, and equal to neither"
    return None
