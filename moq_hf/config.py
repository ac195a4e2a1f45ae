"""What moq.json says, checked: DeepSpeed's words, one field for each key, every error of a file in one message.

A field holds all there is to a key: its name in the file, what is legal, the default and the meaning. Reading, writing,
the table in the documentation and the JSON Schema are made from the fields.
"""

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    GetPydanticSchema,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from .config_budget import BitBudget, Measure, SensitivityConfig, Target
from .config_document import block_of, flat, read_json, schema_of
from .config_errors import LARGEST as LARGEST
from .config_errors import config_error, conflicts, legal, value_faults
from .config_fields import (
    Bits,
    ByteBits,
    Count,
    Flag,
    Part,
    Positive,
    Ratio,
    Share,
    Text,
    Tolerance,
    Weight,
    Words,
    checked,
    key,
    read,
)
from .errors import MoQConfigError, listed
from .grid import Grid, Grouping, InputGrid, InputScale, PerChannel, PerGroup, RowBlocks, ScaleDtype, Search

logger = logging.getLogger(__name__)


# What FSDP2 gathers of a quantized weight.
Gather = Literal["values", "packed"]
# Who is to run what is delivered.
ServerName = Literal["transformers", "vllm", "sglang", "llama.cpp", "onnxruntime"]

# Of the period "auto": a late last drop costs accuracy at low bits.
AUTO_DEADLINE = 0.25


@checked
class ScheduleConfig:
    """When bits drop, in optimizer steps. The period None is "auto", which has a deadline of 0.25 if none is given."""

    period: Annotated[
        Positive | None,
        Words(auto=None),
        key('optimizer steps from the offset to the first drop, or `"auto"`', "quantize_period"),
    ] = 100
    offset: Annotated[
        Count | Part,
        key("optimizer steps before anything is quantized; below 1: that share of the run", "schedule_offset"),
    ] = 100
    deadline: Annotated[
        Share | None,
        key('share of the run by which every block is at its target; 0.25 with the period `"auto"`'),
    ] = None

    def __post_init__(self) -> None:
        """Give "auto" its deadline."""
        if self.period is None and self.deadline is None:
            object.__setattr__(self, "deadline", AUTO_DEADLINE)

    @property
    def depends_on_length(self) -> bool:
        """Whether the length of the run decides on a step: by a deadline, or an offset that is a share."""
        return self.deadline is not None or isinstance(self.offset, float)


@checked
class BlendConfig:
    """Forward sees r w + (1 - r) Q(w); r falls from 1 by `change_ratio` each step and starts again at a switch."""

    enabled: Annotated[Flag, key("blend the float weight into the quantized one after each switch")] = False
    change_ratio: Annotated[Ratio, key("what the float share loses per optimizer step", "quantize_change_ratio")] = (
        0.001
    )


@checked
class EigenvalueConfig:
    """How the sensitivity of each block is measured. A `layer_num` of 0 becomes None, which is all."""

    enabled: Annotated[Flag, key("sensitive blocks drop later")] = False
    verbose: Annotated[Flag, key("log every measurement")] = False
    max_iter: Annotated[Positive, key("Hessian-vector products per block, at most")] = 100
    tol: Annotated[Tolerance, key("relative error of an eigenvalue")] = 1e-2
    stability: Annotated[Weight, key("added to norms before dividing (power iteration)")] = 1e-6
    gas_boundary_resolution: Annotated[Positive, key("measure at multiples of that many optimizer steps")] = 1
    layer_name: Annotated[Text | None, key("path of the layer list; null finds it")] = None
    layer_num: Annotated[
        Count | None,
        AfterValidator(lambda number: number or None),
        key("entries of that list; null or 0 is all"),
    ] = None
    method: Annotated[Literal["lanczos", "power"], key("`power` is the published method")] = "lanczos"
    max_overhead: Annotated[Share, key("share of the run's time that measuring may take")] = 0.05
    num_samples: Annotated[Positive, key("training examples a measurement uses")] = 64
    finite_difference: Annotated[
        Flag, key("differences of gradients, where the loss has no second derivative or its graph does not fit")
    ] = False


@checked
class DistillationConfig:
    """A float model to follow, and the weights of what is compared."""

    teacher: Annotated[
        Text | None,
        key("folder or Hub id of a float model to learn from, trained on the same task (`MoQTrainer` only)"),
    ] = None
    logits: Annotated[Weight, key("weight of the teacher's logits in the loss")] = 1.0
    hidden: Annotated[Weight, key("weight of the teacher's hidden states")] = 1.0
    # The default is from docs/evidence/results.md, "Low bits".
    labels: Annotated[Weight, key("weight of the task's own loss")] = 1.0


@checked
class ActivationConfig:
    """Inputs of the quantized linear layers, rounded while training as the `int8` export rounds them."""

    enabled: Annotated[
        Flag, key("round the inputs of quantized linear layers too: training for the `int8` and `qdq` exports")
    ] = False
    bits: Annotated[ByteBits, key("of those inputs; 7 for CPUs without VNNI")] = 8
    scale: Annotated[
        InputScale,
        key("what shares a scale: all inputs of a layer (a running range), those of a call, or those of a token"),
    ] = "static"
    start_step: Annotated[Count, key("optimizer steps before that begins; it never does before the offset")] = 0

    @property
    def grid(self) -> InputGrid | None:
        """The grid of those inputs; None if they stay as they are."""
        return InputGrid(self.bits, self.scale) if self.enabled else None


@checked
class _Groups:
    """The two keys that make a grouping; a count of None is per channel."""

    count: Annotated[
        Positive | None,
        Words(per_channel=None),
        key('scales per weight: blocks of consecutive rows, or `"per_channel"`', "quantize_groups"),
    ] = 1
    size: Annotated[
        Positive | None, key("instead: that many consecutive weights of a row share a scale", "quantize_group_size")
    ] = None

    def grouping(self) -> Grouping:
        if self.size is not None:
            return PerGroup(self.size)
        return PerChannel() if self.count is None else RowBlocks(self.count)


def _arguments_of(grouping: Any) -> Any:
    """Arguments of `_Groups`; anything but a grouping as it is."""
    match grouping:
        case RowBlocks(count):
            return {"count": count}
        case PerChannel():
            return {"count": None}
        case PerGroup(size):
            return {"size": size}
    return grouping


_FROM_GROUPS = GetPydanticSchema(
    lambda _, handler: handler.generate_schema(
        Annotated[
            _Groups,
            BeforeValidator(_arguments_of),
            AfterValidator(_Groups.grouping),
            PlainSerializer(lambda grouping: _Groups(**_arguments_of(grouping)), return_type=_Groups),
        ]
    )
)


@checked
class MoQConfig:
    """A checked configuration; the attributes are those of the file, its words turned into types.

    Made by `from_dict`, `from_file` or `load`. The constructor checks as they do.

    Attributes:
        kernel: Triton kernels: wanted, not wanted, or None for wherever they run.
        full: Codes of the full range, with scales that have a sign.
        scale_dtype: What scales are rounded to; None leaves it to `serve`.
        grouping: Which weights share a scale.
        modules_to_not_convert: Names and globs, or None for the model's output heads.
        ignored_sections: Other sections of a DeepSpeed config; not part of `to_dict`.

    Raises:
        MoQConfigError: Lists everything that is wrong.

    >>> config = MoQConfig.from_dict({"quantize_bits": {"start_bits": 12, "target_bits": 4}, "quantize_groups": 8})
    >>> config.start_bits, config.target_bits, config.grouping
    (12, 4, RowBlocks(count=8))
    >>> config == MoQConfig(start_bits=12, target_bits=4, grouping=RowBlocks(8))
    True
    >>> MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, "quantise_groups": 8})
    Traceback (most recent call last):
    moq_hf.errors.MoQConfigError: MoQ config: quantise_groups: unknown key, did you mean quantize_groups?
    """

    enabled: Annotated[Flag, key("false: train as if moq_hf were not there")] = True
    verbose: Annotated[Flag, key("log every switch of every block, not only a summary", "quantize_verbose")] = False
    kernel: Annotated[
        Flag | None,
        key(
            "true: Triton kernels, with a warning where they cannot run; false: plain PyTorch; "
            "null: as true, no warning",
            "quantizer_kernel",
        ),
    ] = None
    gather: Annotated[
        Gather,
        key(
            "what FSDP2 gathers for a forward pass: the quantized `values`, or their codes `packed`, which each "
            "process unpacks",
            "quantize_gather",
        ),
    ] = "values"
    symmetric: Annotated[
        Flag,
        Words(symmetric=True, asymmetric=False),
        key("also spelled `quantize_type` at the top, and `quantize-algo`", "quantize_algo.q_type", "quantize_type"),
    ] = True
    stochastic: Annotated[
        Flag,
        Words(nearest=False, stochastic=True),
        key("rounding of a weight to its grid", "quantize_algo.rounding"),
    ] = False
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
    full: Annotated[
        Flag,
        Words(narrow=False, full=True),
        key(
            "`narrow`: as many codes on either side of zero; `full`: one more, on the side of the largest weight of a "
            "group, so that 2 bits have four levels (symmetric grids)",
            "quantize_algo.range",
        ),
    ] = False
    scale_dtype: Annotated[
        ScaleDtype | None,
        key(
            "what scales are rounded to, while training and in the file; null: `float32`, or what the servers in "
            "`serve` load scales in",
            "quantize_algo.scale_dtype",
        ),
    ] = None
    # Two keys, which are not in a section.
    grouping: Annotated[Grouping, _FROM_GROUPS, key("", "", title="a RowBlocks, PerChannel or PerGroup")] = RowBlocks()
    start_bits: Annotated[Bits, key("precision at the offset", "quantize_bits.start_bits")] = 16
    target_bits: Annotated[
        Target,
        key(
            "precision at the end; a budget (`mean` bits per quantized weight, or `file_mb` of the delivered file, in "
            "10^6 bytes) chooses it for each block among `choices`",
            "quantize_bits.target_bits",
        ),
    ] = 16
    schedule: Annotated[ScheduleConfig, key("", "quantize_schedule")] = ScheduleConfig()
    blend: Annotated[BlendConfig, key("", "fp16_mixed_quantize")] = BlendConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    sensitivity: SensitivityConfig = SensitivityConfig()
    distillation: DistillationConfig = DistillationConfig()
    activation: Annotated[ActivationConfig, key("", "activation_quantization")] = ActivationConfig()
    modules_to_not_convert: Annotated[
        tuple[Text, ...] | None,
        FailFast(),
        key("names or globs left in full precision; null: the model's output heads"),
    ] = None
    quantize_embeddings: Annotated[
        ByteBits | None,
        key("bits of embedding tables, one scale per row, and of output heads that share one; null leaves them alone"),
    ] = None
    quantize_convolutions: Annotated[
        Flag,
        key(
            "quantize 1- and 2-dimensional convolutions with the linear layers, one scale per channel with "
            "`quantize_group_size`; saved as floats on the grid, at full size"
        ),
    ] = False
    prove: Annotated[
        Flag,
        key(
            "load what a run delivers with plain transformers, "
            "and compare its answers with those of the model in memory"
        ),
    ] = True
    serve: Annotated[
        tuple[ServerName, ...],
        FailFast(),
        key("who is to run what is delivered: what one of them cannot take is an error before the first step"),
    ] = ("transformers",)
    seed: Annotated[Count, key("of stochastic rounding and of the eigenvalue start vectors")] = 0
    ignored_sections: Annotated[tuple[str, ...], key("", exclude=True)] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check what is legal by itself together.

        Raises:
            PydanticCustomError: Two keys are in conflict; the caller makes a MoQConfigError of it.
        """
        found = list(conflicts(flat(self.to_dict(), _keys(), []), (), _defaults()))
        if found:
            raise PydanticCustomError("conflicts", "{faults}", {"faults": found})

    @property
    def budget(self) -> BitBudget | None:
        """What chooses the bits of each block; None if all have the same target."""
        return self.target_bits if isinstance(self.target_bits, BitBudget) else None

    @property
    def targets(self) -> tuple[int, ...]:
        """The bits that a block may end with, ascending: one number without a budget."""
        return (self.target_bits,) if isinstance(self.target_bits, int) else self.target_bits.choices

    @property
    def target_in_words(self) -> str:
        """The precision at the end, for messages.

        >>> MoQConfig(start_bits=8, target_bits=BitBudget(mean=3.0)).target_in_words
        '2, 3, 4 or 8 bits, 3 in the mean'
        """
        return f"{self.target_bits} bits" if isinstance(self.target_bits, int) else self.target_bits.in_words()

    @property
    def falls(self) -> bool:
        """Whether a block may have more bits at first than at the end, float apart."""
        return self.start_bits > self.targets[0]

    @property
    def span_in_words(self) -> str:
        """The precision from the offset to the end, for messages.

        >>> MoQConfig(start_bits=8, target_bits=4).span_in_words, MoQConfig(start_bits=2, target_bits=2).span_in_words
        ('8 to 4 bits', '2 bits')
        """
        return f"{self.start_bits} to {self.target_in_words}" if self.falls else self.target_in_words

    @property
    def measure(self) -> Measure:
        """What the sensitivity of a block is in this run: that of `sensitivity`, or its default."""
        return self.sensitivity.measure or ("eigenvalue" if self.budget is None else "divergence")

    @property
    def grid(self) -> Grid:
        """How the linear layers' weights are quantized, whatever their bits are; of a float32 model."""
        return self.grid_of("float32")

    def grid_of(self, dtype: str) -> Grid:
        """The same, of a model whose weights have a dtype: "float32", "bfloat16" or "float16"."""
        scales = self.scale_dtype or served_scale_dtype(self.serve, dtype)
        return Grid(self.grouping, self.symmetric, self.stochastic, self.scale, self.full, scales)

    @classmethod
    def load(cls, source: "MoQConfig | Mapping[str, Any] | str | os.PathLike[str]") -> "MoQConfig":
        """A `MoQConfig` as it is, a mapping or the path of a JSON file.

        Raises:
            MoQConfigError: As `from_dict` and `from_file`, or `source` is none of the three.
        """
        if isinstance(source, MoQConfig):
            return source
        if isinstance(source, Mapping):
            return cls.from_dict(source)
        if isinstance(source, (str, os.PathLike)):
            return cls.from_file(source)
        raise MoQConfigError(f"a MoQ config is a MoQConfig, a mapping or a path, got {type(source).__name__}")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "MoQConfig":
        """Read a JSON file: the `quantize_training` block alone or a DeepSpeed config that holds it.

        Raises:
            MoQConfigError: No such file, not JSON (line and column), or a wrong config.
        """
        return _parse(read_json(path), os.fspath(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MoQConfig":
        """Read the same from a mapping.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        return _parse(mapping, "MoQ config")

    @classmethod
    def from_saved(cls, mapping: Mapping[str, Any]) -> "MoQConfig":
        """Read the `to_dict` in a saved state, of an earlier version too: keys that came later say what it did then.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        part = mapping.get("activation_quantization")
        if isinstance(part, Mapping) and "scale" not in part:
            mapping = {**mapping, "activation_quantization": {**part, "scale": "per_token"}}
        return cls.from_dict(mapping)

    def to_dict(self) -> dict[str, Any]:
        """The config in the file's words, every key with its value; `from_dict` gives an equal config."""
        written = _adapter().dump_python(self, mode="json", by_alias=True)
        result: dict[str, Any] = {}
        for path, (place, _) in _keys().items():
            head, _, tail = path.rpartition(".")
            (result.setdefault(head, {}) if head else result)[tail] = functools.reduce(dict.get, place, written)
        return result


def served_scale_dtype(serve: Iterable[ServerName], model_dtype: str) -> ScaleDtype:
    """The dtype that scales must have while training, so that what was trained is what these servers compute with.

    vLLM and SGLang load scales in the half precision that they compute in: the model's own, else bfloat16. Values of
    bfloat16 are exact in float16 too wherever that has them in its normal range, so they fit a GGUF file as well.

    Args:
        serve: As the config key `serve`.
        model_dtype: Of the model's weights: "float32", "bfloat16" or "float16".

    >>> served_scale_dtype(["transformers", "vllm"], "float32"), served_scale_dtype(["llama.cpp"], "bfloat16")
    ('bfloat16', 'float16')
    >>> served_scale_dtype(["transformers", "onnxruntime"], "bfloat16")
    'float32'
    """
    names = set(serve)
    if names & {"vllm", "sglang"}:
        return "float16" if model_dtype == "float16" else "bfloat16"
    return "float16" if "llama.cpp" in names else "float32"


def key_table() -> str:
    """The keys as a Markdown table, for the documentation."""
    rows = [
        f"| `{path}` | {legal(schema)} | `{json.dumps(schema['default'])}` | {schema['description']} |"
        for path, (_, schema) in _keys().items()
    ]
    return "\n".join(["| key | legal | default | meaning |", "| --- | --- | --- | --- |", *rows])


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a file; `configs/moq.schema.json` holds it for editors.

    >>> json_schema()["$defs"]["block"]["properties"]["quantize_group_size"]["default"] is None
    True
    """
    return schema_of({path: schema for path, (_, schema) in _keys().items()})


class _Key(NamedTuple):
    """Where a key's value stands in what `MoQConfig` is read from and written to, and what is legal there."""

    place: tuple[str, ...]
    schema: dict[str, Any]


@functools.cache
def _adapter() -> TypeAdapter[MoQConfig]:
    return TypeAdapter(MoQConfig)


@functools.cache
def _schema() -> dict[str, Any]:
    return _adapter().json_schema(mode="serialization")


@functools.cache
def _keys() -> dict[str, _Key]:
    """Every key by its path, in the order of a file."""
    found = {}
    for name, schema in _schema()["properties"].items():
        part = _schema()["$defs"].get(schema.get("$ref", "").rpartition("/")[2])
        inner = {(name, key): value for key, value in part["properties"].items()} if part else {(name,): schema}
        for place, value in inner.items():
            # Titles only repeat names.
            value = {word: value[word] for word in ("description", *value) if word != "title"}
            found[".".join(filter(None, place))] = _Key(place, value)
    return found


@functools.cache
def _defaults() -> dict[str, Any]:
    return {path: schema["default"] for path, (_, schema) in _keys().items()}


def _parse(document: Any, where: str) -> MoQConfig:
    faults: list[str] = []
    block, ignored = block_of(document, where, _keys(), faults)
    values = flat(block, _keys(), faults)
    arranged: dict[str, Any] = {"ignored_sections": ignored}
    for path, value in values.items():
        *parts, name = _keys()[path].place if path in _keys() else [path]
        (arranged.setdefault(parts[0], {}) if parts else arranged)[name] = value
    if "quantize_algo.q_type" in arranged:
        arranged.pop("quantize_type", None)
    config, wrong = None, {}
    try:
        config = read(_adapter(), arranged)
    except ValidationError as error:
        properties = _schema()["properties"]
        properties = properties | {"quantize_type": properties["quantize_algo.q_type"]}
        wrong = dict(value_faults(error, _schema() | {"properties": properties}, arranged))
    # In the order of the file.
    faults += [wrong[path] for path in values if path in wrong]
    # Here it is known which values the file gives, and which are defaults.
    faults += conflicts(values, wrong, _defaults())
    if config is None or faults:
        raise config_error(where, faults)
    if ignored:
        logger.info("not moq_hf's, left alone: %s", listed(ignored))
    return config
