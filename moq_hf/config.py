"""What moq.json says, checked: DeepSpeed's words, one declarative table, every error of a file in one message."""

import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import MOST_FAULTS, MoQConfigError, listed, show, show_key
from .grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks

logger = logging.getLogger(__name__)


# Of the period "auto": a late last drop costs accuracy at low bits.
AUTO_DEADLINE = 0.25


@dataclass(frozen=True)
class ScheduleConfig:
    """When bits drop, in optimizer steps.

    Attributes:
        period: Steps after the offset to the first drop; None is "auto".
        offset: Steps before anything is quantized.
        deadline: Share of the run by which every block is at its target; None: there is none, or 0.25 with "auto".
    """

    period: int | None = 100
    offset: int = 100
    deadline: float | None = None

    def __post_init__(self) -> None:
        """Give "auto" its deadline."""
        if self.period is None and self.deadline is None:
            object.__setattr__(self, "deadline", AUTO_DEADLINE)


@dataclass(frozen=True)
class BlendConfig:
    """Forward sees r w + (1 - r) Q(w); r falls from 1 by `change_ratio` each step and starts again at a switch."""

    enabled: bool = False
    change_ratio: float = 0.001


@dataclass(frozen=True)
class EigenvalueConfig:
    """How the sensitivity of each block is measured.

    Attributes:
        layer_name: Path of the layer list; None finds it.
        layer_num: How many of its entries, from the first; None is all.
        max_overhead: Share of the run's time that measuring may take.
        num_samples: Training examples that a measurement uses; fewer where the budget is smaller.
        finite_difference: Differences of gradients in place of second derivatives.
    """

    enabled: bool = False
    verbose: bool = False
    max_iter: int = 100
    tol: float = 1e-2
    stability: float = 1e-6
    gas_boundary_resolution: int = 1
    layer_name: str | None = None
    layer_num: int | None = None
    method: Literal["lanczos", "power"] = "lanczos"
    max_overhead: float = 0.05
    num_samples: int = 64
    finite_difference: bool = False


@dataclass(frozen=True)
class DistillationConfig:
    """A float model to follow, and the weights of what is compared.

    Attributes:
        teacher: Folder or Hub id of a model of the same class; None: no distillation.
        logits: Weight of the cross entropy with the teacher's class probabilities.
        hidden: Weight of the relative squared difference of the hidden states.
        labels: Weight of the task's own loss; the default from docs/results.md, "Low bits".
    """

    teacher: str | None = None
    logits: float = 1.0
    hidden: float = 1.0
    labels: float = 1.0


@dataclass(frozen=True)
class ActivationConfig:
    """Inputs of the quantized linear layers, rounded to symmetric codes with one scale per token while training.

    Attributes:
        bits: Of a code; 7 keeps products exact in the 8-bit instructions of CPUs without VNNI.
        start_step: Optimizer steps before it begins.
    """

    enabled: bool = False
    bits: int = 8
    start_step: int = 0


# Attributes of `MoQConfig` that have attributes of their own.
_PARTS: dict[str, Any] = {
    "schedule": ScheduleConfig,
    "blend": BlendConfig,
    "eigenvalue": EigenvalueConfig,
    "distillation": DistillationConfig,
    "activation": ActivationConfig,
}


class _Key(NamedTuple):
    """One key of the file: path, attribute of `MoQConfig`, kind of value, default as the file spells it, meaning."""

    path: str
    attribute: str
    kind: str
    default: Any
    meaning: str


# Of whole numbers: beyond it counting steps would be slow, and printing them fail.
LARGEST = 2**63 - 1


# Kinds: bool, bool?, int LO..HI, float (0..1] and so on; "?" admits null; anything else is one of the words.
_KEYS = (
    _Key("enabled", "enabled", "bool", True, "false: train as if moq_hf were not there"),
    _Key("quantize_verbose", "verbose", "bool", False, "log every switch of every block, not only a summary"),
    _Key(
        "quantizer_kernel",
        "kernel",
        "bool?",
        None,
        "true: Triton kernels, with a warning where they cannot run; false: plain PyTorch; null: as true, no warning",
    ),
    _Key(
        "quantize_algo.q_type",
        "symmetric",
        "symmetric|asymmetric",
        "symmetric",
        "also spelt `quantize_type` at the top, and `quantize-algo`",
    ),
    _Key("quantize_algo.rounding", "stochastic", "nearest|stochastic", "nearest", "rounding of a weight to its grid"),
    _Key(
        "quantize_algo.scale",
        "scale",
        "auto|absmax|mse",
        "auto",
        "`absmax`; `mse`: the clipping ratio with the least squared error; `auto`: absmax above 5 bits, then mse",
    ),
    _Key(
        "quantize_algo.scale_refresh",
        "scale_refresh",
        "int 1..",
        50,
        "optimizer steps between searches for the `mse` ratio; it is also searched at each switch",
    ),
    _Key(
        "quantize_groups", "grouping", "groups", 1, 'scales per weight: blocks of consecutive rows, or `"per_channel"`'
    ),
    _Key(
        "quantize_group_size",
        "grouping",
        "int? 1..",
        None,
        "instead: that many consecutive weights of a row share a scale",
    ),
    _Key("quantize_bits.start_bits", "start_bits", "int 1..16", 16, "precision at the offset"),
    _Key("quantize_bits.target_bits", "target_bits", "int 1..16", 16, "precision at the end"),
    _Key(
        "quantize_schedule.quantize_period",
        "schedule.period",
        "period",
        100,
        'optimizer steps from the offset to the first drop, or `"auto"`',
    ),
    _Key(
        "quantize_schedule.schedule_offset",
        "schedule.offset",
        "int 0..",
        100,
        "optimizer steps before anything is quantized",
    ),
    _Key(
        "quantize_schedule.deadline",
        "schedule.deadline",
        "float? 0..1",
        None,
        'share of the run by which every block is at its target; 0.25 with the period `"auto"`',
    ),
    _Key(
        "fp16_mixed_quantize.enabled",
        "blend.enabled",
        "bool",
        False,
        "blend the float weight into the quantized one after each switch",
    ),
    _Key(
        "fp16_mixed_quantize.quantize_change_ratio",
        "blend.change_ratio",
        "float [1e-9..1",
        0.001,
        "what the float share loses per optimizer step",
    ),
    _Key("eigenvalue.enabled", "eigenvalue.enabled", "bool", False, "sensitive blocks drop later"),
    _Key("eigenvalue.verbose", "eigenvalue.verbose", "bool", False, "log every measurement"),
    _Key("eigenvalue.max_iter", "eigenvalue.max_iter", "int 1..", 100, "Hessian-vector products per block, at most"),
    _Key("eigenvalue.tol", "eigenvalue.tol", "float 0..", 1e-2, "relative error of an eigenvalue"),
    _Key(
        "eigenvalue.stability",
        "eigenvalue.stability",
        "float [0..",
        1e-6,
        "added to norms before dividing (power iteration)",
    ),
    _Key(
        "eigenvalue.gas_boundary_resolution",
        "eigenvalue.gas_boundary_resolution",
        "int 1..",
        1,
        "measure at multiples of that many optimizer steps",
    ),
    _Key("eigenvalue.layer_name", "eigenvalue.layer_name", "str?", None, "path of the layer list; null finds it"),
    _Key("eigenvalue.layer_num", "eigenvalue.layer_num", "int? 0..", None, "entries of that list; null or 0 is all"),
    _Key("eigenvalue.method", "eigenvalue.method", "lanczos|power", "lanczos", "`power` is the published method"),
    _Key(
        "eigenvalue.max_overhead",
        "eigenvalue.max_overhead",
        "float 0..1",
        0.05,
        "share of the run's time that measuring may take",
    ),
    _Key("eigenvalue.num_samples", "eigenvalue.num_samples", "int 1..", 64, "training examples a measurement uses"),
    _Key(
        "eigenvalue.finite_difference",
        "eigenvalue.finite_difference",
        "bool",
        False,
        "differences of gradients, where the loss has no second derivative or its graph does not fit",
    ),
    _Key(
        "distillation.teacher",
        "distillation.teacher",
        "str?",
        None,
        "folder or Hub id of a float model to learn from, trained on the same task (`MoQTrainer` only)",
    ),
    _Key("distillation.logits", "distillation.logits", "float [0..", 1.0, "weight of the teacher's logits in the loss"),
    _Key("distillation.hidden", "distillation.hidden", "float [0..", 1.0, "weight of the teacher's hidden states"),
    _Key("distillation.labels", "distillation.labels", "float [0..", 1.0, "weight of the task's own loss"),
    _Key(
        "activation_quantization.enabled",
        "activation.enabled",
        "bool",
        False,
        "round the inputs of quantized linear layers too, one scale per token: training for the `int8` export",
    ),
    _Key(
        "activation_quantization.bits",
        "activation.bits",
        "int 2..8",
        8,
        "of those inputs; 7 for CPUs without VNNI",
    ),
    _Key(
        "activation_quantization.start_step",
        "activation.start_step",
        "int 0..",
        0,
        "optimizer steps before that begins",
    ),
    _Key(
        "modules_to_not_convert",
        "modules_to_not_convert",
        "names?",
        None,
        "names or globs left in full precision; null: the model's output heads",
    ),
    _Key(
        "quantize_embeddings",
        "quantize_embeddings",
        "int? 2..8",
        None,
        "bits of embedding tables, one scale per row, a byte per weight when saved; null leaves them alone",
    ),
    _Key(
        "prove",
        "prove",
        "bool",
        True,
        "load what a run delivers with plain transformers, and compare its answers with those of the model in memory",
    ),
    _Key("seed", "seed", "int 0..9223372036854775807", 0, "of stochastic rounding and of the eigenvalue start vectors"),
)
_BY_PATH = {key.path: key for key in _KEYS}
_SECTIONS = {path.split(".")[0] for path in _BY_PATH if "." in path}
_TOP = {path.split(".")[0] for path in _BY_PATH} | {"quantize_type", "quantize-algo"}
_DEEPSPEED = {
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


@dataclass(frozen=True)
class MoQConfig:
    """A checked configuration; the attributes are those of the file, its words turned into types.

    Made by `from_dict`, `from_file` or `load`. The constructor checks as they do.

    Attributes:
        kernel: Triton kernels: wanted, not wanted, or None for wherever they run.
        grouping: Which weights share a scale.
        modules_to_not_convert: Names and globs, or None for the model's output heads.
        ignored_sections: Other sections of a DeepSpeed config; not part of `to_dict`.

    Raises:
        MoQConfigError: Lists everything that is wrong.
    """

    enabled: bool = True
    verbose: bool = False
    kernel: bool | None = None
    symmetric: bool = True
    stochastic: bool = False
    scale: Literal["auto", "absmax", "mse"] = "auto"
    scale_refresh: int = 50
    # A frozen value, from a module that the linter does not look into.
    grouping: Grouping = RowBlocks()  # noqa: RUF009
    start_bits: int = 16
    target_bits: int = 16
    schedule: ScheduleConfig = ScheduleConfig()
    blend: BlendConfig = BlendConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    distillation: DistillationConfig = DistillationConfig()
    activation: ActivationConfig = ActivationConfig()
    modules_to_not_convert: tuple[str, ...] | None = None
    quantize_embeddings: int | None = None
    prove: bool = True
    seed: int = 0
    ignored_sections: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check what the constructor was given."""
        types: dict[str, Any] = {"symmetric": bool, "stochastic": bool, "grouping": Grouping, **_PARTS}
        strange = [
            f"{name}: {show(getattr(self, name))} is no {getattr(kind, '__name__', kind)}"
            for name, kind in types.items()
            if not isinstance(getattr(self, name), kind)
        ]
        if strange:
            raise _error("MoQConfig", strange)
        faults = list(_faults(_flatten(self.to_dict(), [])))
        if faults:
            raise _error("MoQConfig", faults)

    @property
    def grid(self) -> Grid:
        """How the linear layers' weights are quantized, whatever their bits are."""
        return Grid(self.grouping, self.symmetric, self.stochastic, self.scale)

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
            MoQConfigError: No such file, no JSON (line and column), or a wrong config.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        # ValueError: no UTF-8, or a path with a null character.
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MoQConfigError(f"cannot read the MoQ config {os.fspath(path)}: {reason}") from error
        try:
            document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise MoQConfigError(f"{os.fspath(path)} is no JSON: {error.msg} at {place}") from error
        except (RecursionError, ValueError) as error:
            raise MoQConfigError(f"{os.fspath(path)}: {str(error) or 'nested too deeply'}") from error
        return cls._parse(document, os.fspath(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MoQConfig":
        """Read the same from a mapping.

        Raises:
            MoQConfigError: Lists everything that is wrong with it.
        """
        return cls._parse(mapping, "MoQ config")

    @classmethod
    def _parse(cls, document: Any, where: str) -> "MoQConfig":
        if not isinstance(document, Mapping):
            raise MoQConfigError(f"{where}: must be an object of keys, got {show(document)}")
        ignored: tuple[str, ...] = ()
        faults: list[str] = []
        block = document
        if "quantize_training" in document:
            block = document["quantize_training"]
            ignored = tuple(str(key) for key in document if key != "quantize_training" and key not in _TOP)
            faults += [f"{key}: belongs into quantize_training" for key in document if key in _TOP]
            if not isinstance(block, Mapping):
                raise MoQConfigError(f"{where}: quantize_training must be an object of keys, got {show(block)}")
        elif _DEEPSPEED.intersection(key for key in document if isinstance(key, str)):
            raise MoQConfigError(
                f"{where}: a DeepSpeed config without the section quantize_training, so there is nothing to quantize"
                + (" (compression_training is another method)" if "compression_training" in document else "")
                + '; add "quantize_training": {"quantize_bits": {"start_bits": 12, "target_bits": 8}, ...}'
            )
        values = _flatten(block, faults)
        faults += _faults(values)
        if faults:
            raise _error(where, faults)
        if ignored:
            logger.info("not moq_hf's, left alone: %s", listed(ignored))
        return cls(**_attributes(values), ignored_sections=ignored)

    def to_dict(self) -> dict[str, Any]:
        """The config in the file's words, every key with its value; `from_dict` gives an equal config."""
        grouping = self.grouping
        special: dict[str, Any] = {
            "quantize_algo.q_type": "symmetric" if self.symmetric is True else "asymmetric",
            "quantize_algo.rounding": "stochastic" if self.stochastic else "nearest",
            "quantize_groups": "per_channel" if isinstance(grouping, PerChannel) else getattr(grouping, "count", 1),
            "quantize_group_size": grouping.size if isinstance(grouping, PerGroup) else None,
            "quantize_schedule.quantize_period": "auto" if self.schedule.period is None else self.schedule.period,
        }
        result: dict[str, Any] = {}
        for key in _KEYS:
            value: Any = self
            for part in key.attribute.split("."):
                value = getattr(value, part)
            value = special.get(key.path, value)
            head, _, tail = key.path.rpartition(".")
            (result.setdefault(head, {}) if head else result)[tail] = list(value) if type(value) is tuple else value
        return result


def key_table() -> str:
    """The keys as a Markdown table, for the documentation."""
    rows = [f"| `{key.path}` | {_legal(key.kind)} | `{json.dumps(key.default)}` | {key.meaning} |" for key in _KEYS]
    return "\n".join(["| key | legal | default | meaning |", "| --- | --- | --- | --- |", *rows])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key given twice: {listed(sorted(key for key, count in counts.items() if count > 1))}")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _error(where: str, faults: list[str]) -> MoQConfigError:
    if len(faults) == 1:
        return MoQConfigError(f"{where}: {faults[0]}")
    lines = [f"{where}: {len(faults)} things are wrong", *(f"  - {fault}" for fault in faults[:MOST_FAULTS])]
    if len(faults) > MOST_FAULTS:
        lines.append(f"  and {len(faults) - MOST_FAULTS} more")
    return MoQConfigError("\n".join(lines))


def _flatten(block: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """Dotted path to value of the legal keys; what is no legal key goes to `faults`."""
    values: dict[str, Any] = {}
    for key, value in block.items():
        if not isinstance(key, str):
            faults.append(f"{show(key)}: keys must be text")
        elif key == "quantize-algo" and "quantize_algo" in block:
            faults.append("quantize_algo and quantize-algo: two spellings of one key, give one")
        elif key == "quantize_type":
            values["quantize_type"] = value
        elif key.replace("quantize-algo", "quantize_algo") in _SECTIONS:
            section = key.replace("-", "_")
            if not isinstance(value, Mapping):
                faults.append(f"{section}: {show(value)} is not an object of keys")
                continue
            legal = [path.split(".")[1] for path in _BY_PATH if path.startswith(section + ".")]
            for inner, inner_value in value.items():
                if f"{section}.{inner}" in _BY_PATH:
                    values[f"{section}.{inner}"] = inner_value
                else:
                    faults.append(_unknown(str(inner), legal, section, len(faults)))
        elif key in _TOP:
            values[key] = value
        else:
            faults.append(_unknown(key, sorted(_TOP | {"quantize_training"}), "", len(faults)))
    return values


def _unknown(name: str, legal: list[str], section: str, earlier: int) -> str:
    start = f"{section}." if section else ""
    path = show_key(start + name)
    # Which key was meant takes time to find, and is not told after so many others, nor for a text that is no name.
    if earlier >= MOST_FAULTS or len(name) > 80:
        return f"{path}: unknown key"
    # "enabled" and "verbose" stand in several places and point nowhere.
    inner = {key.split(".")[1]: key for key in _BY_PATH if "." in key and not key.endswith(("enabled", "verbose"))}
    near = difflib.get_close_matches(name, legal, 1, 0.6)
    if near and name not in inner:
        return f"{path}: unknown key, did you mean {start}{near[0]}?"
    elsewhere = difflib.get_close_matches(name, inner, 1, 0.8)
    if elsewhere:
        return f"{path}: unknown key, did you mean {inner[elsewhere[0]]}?"
    return f"{path}: unknown key; legal here are {', '.join(legal)}"


def _legal(kind: str) -> str:
    if "|" in kind:
        return " or ".join(json.dumps(word) for word in kind.split("|"))
    optional = "?" in kind
    kind = kind.replace("?", "")
    text = {
        "bool": "true or false",
        "str": "text",
        "names": "a list of names or globs",
        "groups": 'a whole number from 1, or "per_channel"',
        "period": 'a whole number from 1, or "auto"',
    }.get(kind)
    if text is None:
        name, _, limits = kind.partition(" ")
        low, _, high = limits.partition("..")
        noun = "a whole number" if name == "int" else "a number"
        if name == "int":
            text = f"{noun} from {low}" + (f" to {high}" if high else "")
        else:
            above = f"from {low[1:]}" if low.startswith("[") else f"above {low}"
            text = f"{noun} {above}" + (f" up to {high}" if high else "")
    return text + (", or null" if optional else "")


def _is_legal(value: Any, kind: str) -> bool:
    if "|" in kind:
        return isinstance(value, str) and value in kind.split("|")
    if value is None:
        return "?" in kind
    kind = kind.replace("?", "")
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str) and bool(value)
    if kind == "names":
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)
    if kind in ("groups", "period"):
        return value == ("per_channel" if kind == "groups" else "auto") or _is_legal(value, "int 1..")
    name, _, limits = kind.partition(" ")
    low, _, high = limits.partition("..")
    if isinstance(value, bool) or not isinstance(value, int if name == "int" else (int, float)):
        return False
    if name == "float" and not -1e300 < value < 1e300:
        return False
    if name == "int" and value > LARGEST:
        return False
    floor = value >= float(low.lstrip("[")) if name == "int" or low.startswith("[") else value > float(low)
    return floor and (not high or value <= (int(high) if name == "int" else float(high)))


def _faults(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values, alone and together."""
    wrong = set()
    for path, value in values.items():
        key = _BY_PATH.get("quantize_algo.q_type" if path == "quantize_type" else path)
        if key is not None and not _is_legal(value, key.kind):
            wrong.add(path)
            whole = key.kind.startswith(("int", "groups", "period"))
            hint = f" (write {int(value)})" if type(value) is float and value.is_integer() and whole else ""
            is_word = isinstance(value, str) and len(value) <= 80
            words = difflib.get_close_matches(value, key.kind.split("|"), 1) if is_word else []
            hint = f" (did you mean {json.dumps(words[0])}?)" if words and "|" in key.kind else hint
            hint = " and below 2**63" if type(value) is int and value > LARGEST and whole else hint
            yield f"{path}: {show(value)} is not legal; it must be {_legal(key.kind)}{hint}"

    def get(path: str) -> Any:
        return values.get(path, _BY_PATH[path].default)

    bits_are_right = not wrong & {"quantize_bits.start_bits", "quantize_bits.target_bits"}
    start, target = get("quantize_bits.start_bits"), get("quantize_bits.target_bits")
    kinds = [path for path in ("quantize_type", "quantize_algo.q_type") if path in values]
    if len(kinds) == 2 and values[kinds[0]] != values[kinds[1]]:
        yield (
            f"{kinds[0]} is {show(values[kinds[0]])} but {kinds[1]} is {show(values[kinds[1]])}: "
            "they mean the same, give one"
        )
    if get("quantize_group_size") is not None and values.get("quantize_groups", 1) != 1:
        yield (
            f"quantize_groups {show(values['quantize_groups'])} and quantize_group_size "
            f"{show(values['quantize_group_size'])} exclude each other: give one"
        )
    weights = {f"distillation.{name}" for name in ("logits", "hidden")}
    if not wrong & weights and not any(map(get, weights)):
        yield "distillation: logits and hidden are both 0, so a teacher would teach nothing; give one a weight"
    if not bits_are_right:
        return
    if target > start:
        given = "quantize_bits.target_bits" in values
        yield f"quantize_bits: target_bits {target} is above start_bits {start}" + (
            f"; bits only fall, so start_bits must be {target} or more"
            if given
            else " (it is the default); set it to 8, 4, 3 or 2"
        )
    elif get("enabled") is True and target == 16:
        yield (
            "quantize_bits.target_bits: 16 would quantize nothing"
            + ("" if "quantize_bits.target_bits" in values else " (it is the default)")
            + "; set it to 8, 4, 3 or 2"
        )
    kind = values.get("quantize_algo.q_type", values.get("quantize_type", "symmetric"))
    stochastic = get("quantize_algo.rounding") == "stochastic"
    if target == 1 and kind == "asymmetric":
        yield "quantize_bits.target_bits: 1 bit is symmetric only; set quantize_algo.q_type to symmetric, or 2 bits"
    if stochastic and (target == 1 or (target == 2 and kind == "symmetric")):
        yield (
            f"quantize_algo.rounding: stochastic needs equal steps, {target} bits {kind} has none; "
            "set it to nearest, or target_bits to 3 or more"
        )


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Legal values as arguments of `MoQConfig`."""
    get: Callable[[str], Any] = lambda path: values.get(path, _BY_PATH[path].default)  # noqa: E731
    size, groups = get("quantize_group_size"), get("quantize_groups")
    period = get("quantize_schedule.quantize_period")
    names = get("modules_to_not_convert")
    converted = {
        "quantize_algo.q_type": values.get("quantize_algo.q_type", values.get("quantize_type")) != "asymmetric",
        "quantize_algo.rounding": get("quantize_algo.rounding") == "stochastic",
        "quantize_groups": PerGroup(size) if size else PerChannel() if groups == "per_channel" else RowBlocks(groups),
        "quantize_schedule.quantize_period": None if period == "auto" else period,
        "eigenvalue.layer_num": get("eigenvalue.layer_num") or None,
        "modules_to_not_convert": None if names is None else tuple(names),
    }
    result: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key in _KEYS:
        if key.path == "quantize_group_size":
            continue
        value = converted.get(key.path, get(key.path)) if key.path in converted else get(key.path)
        head, _, tail = key.attribute.rpartition(".")
        (parts.setdefault(head, {}) if head else result)[tail] = value
    for name, arguments in parts.items():
        kinds = {f.name: f.type for f in fields(_PARTS[name])}
        floats = {k: float(v) for k, v in arguments.items() if kinds[k] is float}
        result[name] = _PARTS[name](**{**arguments, **floats})
    return result
