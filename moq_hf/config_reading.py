"""Reads a document, and keywords that override it, into the fields of a config, with all errors in one message."""

import difflib
import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from . import dialect
from .config_fields import (
    LARGEST,
    ConfigFields,
    Speller,
    activation_section,
    given_in,
)
from .dialect import Place, by_section
from .errors import MOST_FAULTS, MoQConfigError, show, show_key
from .grid import FLOATS

logger = logging.getLogger(__name__)

# The keyword to use here, or what to do instead, for words of other libraries: bitsandbytes, GPTQ, AWQ, HQQ, torchao,
# quanto, llm-compressor, the Trainer.
_WORDS = {
    "bits": "num_bits n_bits nbits wbits w_bit w_bits weight_bits bit bit_width bitwidth weights "
    "weight_dtype wdtype precision",
    "group_size": "group groupsize q_group_size block_size blocksize",
    "scale": "observer",
    "format": "quant_type bnb_4bit_quant_type",
    "modules_to_not_convert": "ignore ignored_layers ignore_modules exclude exclude_modules skip skip_modules "
    "skip_layers llm_int8_skip_modules modules_to_not_quantize",
    "activations": "activation activation_bits activation_dtype act_bits abits a_bit a_bits input_bits "
    "input_activations",
    "embeddings": "embedding_bits embed_bits quantize_embedding",
    "heads": "lm_head quantize_lm_head quant_lm_head",
    "offset": "delay quant_delay quantization_delay float_steps",
    "write bits=4": "load_in_4bit",
    "write bits=8": "load_in_8bit",
    'write bits={"mean": 3.0}, or bits={"file_mb": 12}': "mean mean_bits bits_per_weight file_mb size_mb target_mb",
    'write groups="per_channel", which is the default, or group_size=32': "per_channel channel_wise per_tensor "
    "granularity strategy axis",
    "period, offset and deadline say it": "schedule",
    'write q_type="asymmetric", or "symmetric"': "sym symmetric asym asymmetric zero_point zero_points use_zp",
    "to round by GPTQ write gptq=128, the number of training examples to use": "method algorithm desc_act act_order "
    "actorder damp_percent dampening_frac percdamp true_sequential static_groups dataset nsamples calibration_samples "
    "num_calibration_samples",
    "every linear layer but the heads is quantized; modules_to_not_convert names others, overrides give some their own "
    "bits": "targets target_modules modules modules_to_convert layers include",
    'a preset comes first, without a keyword: "w4"': "preset scheme recipe quant_scheme",
    "it belongs to the config of another library; say bits=4, group_size=32 and so on": "quant_method "
    "quantization_config config_groups backend version",
    "the model says it: from_pretrained(..., dtype=torch.bfloat16)": "dtype torch_dtype compute_dtype "
    "bnb_4bit_compute_dtype",
    "it is an argument of from_pretrained": "device_map attn_implementation trust_remote_code",
    "the server decides it, as vLLM does by --kv-cache-dtype": "kv_cache kv_cache_scheme kv_cache_dtype kv_bits",
    "the learning rate's warmup is an argument of TrainingArguments, and offset is the number of steps in float before "
    "anything is quantized": "warmup warmup_steps warmup_ratio num_warmup_steps",
    "it is an argument of TrainingArguments": "learning_rate num_train_epochs max_steps "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing "
    "weight_decay max_grad_norm lr_scheduler_type optim fp16 bf16 output_dir logging_steps eval_steps eval_strategy "
    "save_steps save_strategy report_to",
    "it is learning_rate of TrainingArguments": "lr",
    "it is num_train_epochs of TrainingArguments": "epochs num_epochs",
    "it is per_device_train_batch_size of TrainingArguments": "batch_size",
    "it is max_steps of TrainingArguments": "steps total_steps num_train_steps",
    "it is optim of TrainingArguments": "optimizer",
    "it is lr_scheduler_type of TrainingArguments": "scheduler lr_scheduler",
    "it is an argument of the Trainer": "model args train_dataset eval_dataset data_collator compute_metrics "
    "processing_class optimizers",
    "it is processing_class of the Trainer": "tokenizer",
    "it is an argument of PEFT's LoraConfig": "lora_r lora_alpha lora_dropout",
    "it is an argument of MoQTrainer or MoQMixin: a callback cannot change the loss": "float_first teacher "
    "teacher_init_kwargs",
    f'it is a section of a document, which comes first: MoQConfig({{"{dialect.SECTION}": ...}})': dialect.SECTION,
}
# Two ways to say which weights share a scale.
_GROUPS = ("groups", "group_size")


def parse(
    document: Any, where: str, keywords: Mapping[str, Any] = MappingProxyType({})
) -> ConfigFields:
    """Make a config from a document, and from keywords that override it.

    Raises:
        MoQConfigError: Lists everything that is wrong with them.
    """
    faults: list[str] = []
    both = places(), places_in_dialect()
    block, ignored = dialect.block_of(document, *both, where, faults)
    language = dialect.SECTION
    if block is document:
        language = dialect.language_of(block or keywords, *both)
    said = _Said(block, language, faults)
    given = _Said(keywords, dialect.language_of(keywords, *both), faults)
    values = _with_defaults(said.values, given.values, language)
    named: set[str] = set()

    def spell(path: str) -> str:
        named.add(path)
        return given.words.get(path) or said.spell(path)

    wrong: dict[str, str] = {}
    try:
        config = _read(values, language)
    except ValidationError as error:
        wrong = _value_faults(error, values, spell)
        others = {path: value for path, value in values.items() if path not in wrong}
        config = _read(others, language)
    # An illegal value is left out of conflicts, and so are bits that an unknown key was
    # probably meant to give.
    settled = set(wrong)
    if faults or "format" in wrong:
        settled |= {"bits"} - values.keys()
    faults += wrong.values()
    named.clear()
    for text in config.conflicts(spell):
        if named.isdisjoint(settled):
            faults.append(text)
        named.clear()
    if faults:
        raise MoQConfigError(_in_one_text(where, faults))
    if ignored:
        logger.warning(
            "moq_hf: not of quantization, left to TrainingArguments: %s",
            ", ".join(map(str, ignored)),
        )
    return config


def _with_defaults(
    said: Mapping[str, Any], given: Mapping[str, Any], language: str
) -> dict[str, Any]:
    """Override a document's values with keywords, and add what a format or a language implies.

    Args:
        said: Values of the document's keys.
        given: Values of the keywords.
        language: The document's language.
    """
    values = {**said, **given}
    # Either of the two keywords overrides both keys of the document.
    if any(given.get(name) is not None for name in _GROUPS):
        values = {n: v for n, v in values.items() if n not in _GROUPS or n in given}
    # An unknown format is reported later.
    own = FLOATS.get(str(values.get("format")))
    if own is not None:
        values = {"bits": own.bits, **own.grouping} | values
    if language != "keywords":
        values = dialect.DEFAULTS | values
    if language == dialect.SECTION:
        if values.get("group_size") is not None:
            values.setdefault("groups", "per_channel")
        values = dialect.DEEPSPEED_DEFAULTS | values
    return values


def _read(values: Mapping[str, Any], language: str) -> ConfigFields:
    """Make a config from values by path.

    Raises:
        ValidationError: One of them is not legal.
    """
    arranged = by_section(values) | {"dialect": language}
    return TypeAdapter(ConfigFields).validate_python(arranged)


class _Said:
    """The keys and values of a document or of keywords, including those in sections.

    Attributes:
        values: The value of each key by its path.
        words: The name of each key there, by its path.
    """

    def __init__(
        self, block: Mapping[str, Any], language: str, faults: list[str]
    ) -> None:
        self._in_keywords = language == "keywords"
        both = places(), places_in_dialect()
        self._places, self._others = both if self._in_keywords else both[::-1]
        self._faults = faults
        self.values: dict[str, Any] = {}
        self.words: dict[str, str] = {}
        names: dict[str, str] = {}
        for name, value in block.items():
            place = self._places.get(name)
            if not isinstance(name, str):
                faults.append(f"{show(name)}: keys must be text")
            elif place is None and name in self._others:
                faults.append(f"{name}: {self._instead_of(self._others[name])}")
            elif place is None:
                if name != "$schema":
                    self._is_unknown(name, "", [*self._places, dialect.SECTION])
            elif isinstance(place, str):
                self._take(place, name, value)
            else:
                first = names.setdefault(next(iter(place.values())), name)
                if first == name:
                    self._read_section(name, place, value)
                else:
                    self._are_twins(first, name)

    def spell(self, path: str) -> str:
        """The name of a key in this document, or the one that it would have."""
        other = path if self._in_keywords else dialect.word(path)
        return self.words.get(path, other)

    def _instead_of(self, place: Place) -> str:
        """Say what to write instead of a word of the other language, which has other defaults."""
        what = "a keyword among DeepSpeed's words"
        if self._in_keywords:
            what = "a word of DeepSpeed's among keywords"
        if isinstance(place, str):
            return f"{what}; write {self.spell(place)}"
        heads = [self.spell(path).partition(".")[0] for path in place.values()]
        return f"{what}; write {', '.join(dict.fromkeys(heads))}"

    def _read_section(self, name: str, keys: Mapping[str, str], value: Any) -> None:
        if is_dataclass(value):
            value = given_in(value)
        elif name == "activations":
            value = activation_section(value)
        if not isinstance(value, Mapping):
            also = ", a number of bits, true or false" * (name == "activations")
            self._faults.append(f"{name}: {show(value)} is not an object of keys{also}")
            return
        for inner, inner_value in value.items():
            if inner in keys:
                self._take(keys[inner], f"{name}.{inner}", inner_value)
            else:
                self._is_unknown(str(inner), f"{name}.", [*keys])

    def _take(self, path: str, name: str, value: Any) -> None:
        first = self.words.setdefault(path, name)
        # The dialect has two words for some keys.
        if first != name and value != self.values[path]:
            self._are_twins(first, name)
        self.values[path] = given_in(value) if is_dataclass(value) else value

    def _are_twins(self, first: str, second: str) -> None:
        self._faults.append(f"{first} and {second} mean the same, give one")

    def _is_unknown(self, name: str, section: str, here: Sequence[str]) -> None:
        # Finding the key that was meant takes time, and so many faults are not all shown.
        is_told = len(self._faults) >= MOST_FAULTS
        self._faults.append(
            f"{show_key(section + name)}: unknown key"
            + ("" if is_told else _meant(name, section, here, self.spell))
        )


@functools.cache
def schema_of_fields() -> dict[str, Any]:
    """The JSON Schema of `ConfigFields` as pydantic makes it."""
    return TypeAdapter(ConfigFields).json_schema(mode="serialization")


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


@functools.cache
def places() -> dict[str, Place]:
    """The keywords: each with its path, and sections with the paths of their keys."""
    return by_section({path: path for path in key_schemas()})


@functools.cache
def places_in_dialect() -> dict[str, Place]:
    """The same of DeepSpeed's words."""
    return dialect.places(key_schemas())


def _in_one_text(where: str, faults: Sequence[str]) -> str:
    """Join all faults of a file, a mapping or the arguments of a class in one text."""
    if len(faults) == 1:
        return f"{where}: {faults[0]}"
    lines = [
        f"{where}: {len(faults)} things are wrong",
        *(f"  - {fault}" for fault in faults[:MOST_FAULTS]),
    ]
    if len(faults) > MOST_FAULTS:
        lines.append(f"  and {len(faults) - MOST_FAULTS} more")
    return "\n".join(lines)


def _value_faults(
    error: ValidationError, values: Mapping[str, Any], spell: Speller
) -> dict[str, str]:
    """Describe each wrong value in a line, by its path.

    Args:
        error: The error of pydantic, which has an entry for each kind of value that a
            key takes.
        values: The values by their paths.
        spell: Gives the name of a key by its path.
    """
    schemas = key_schemas()
    faults: dict[str, str] = {}
    for found in error.errors(include_url=False, include_input=False):
        head, *inner = found["loc"]
        if head == "overrides" and inner:
            text = _override_fault(values[head], *map(str, inner[:3]))
            faults[head] = "; ".join(filter(None, [faults.get(head), text]))
            continue
        path = ".".join(map(str, found["loc"][:2]))
        path = path if path in schemas else str(head)
        faults[path] = _value_fault(spell(path), values[path], schemas[path])
    return faults


def _override_fault(
    overrides: Mapping[Any, Any], glob: Any, key: str | None = None, *inner: str
) -> str:
    """Describe what is wrong with the settings of one glob."""
    where = f"overrides.{show_key(str(glob))}"
    override = overrides.get(glob)
    if key == "activations" and isinstance(override, Mapping):
        section = activation_section(override[key])
        fault = _fault_in(f"{where}.{key}", section, "ActivationOverride", *inner)
        return fault + ", a number of bits, true or false" * (not inner)
    return _fault_in(where, override, "OverrideConfig", key)


def _fault_in(where: str, section: Any, kind: str, key: str | None = None) -> str:
    """Say what is wrong with an object of keys, or with one of its values, by its path and the name of its class."""
    schemas = schema_of_fields()["$defs"][kind]["properties"]
    if key is None or not isinstance(section, Mapping):
        return f"{where}: {show(section)} is not an object of {', '.join(schemas)}"
    if key not in schemas:
        hint = _meant(str(key), f"{where}.", [*schemas], str)
        return f"{show_key(f'{where}.{key}')}: unknown key{hint}"
    return _value_fault(f"{where}.{key}", section[key], schemas[key])


def _value_fault(path: str, value: Any, schema: Mapping[str, Any]) -> str:
    hint = _hint(value, schema)
    if path == "sensitivity.measure" and value in ("trace", "loss"):
        hint = '; that measure is gone, use "divergence"'
    return f"{path}: {show(value)} is not legal; it must be {legal(schema)}{hint}"


def _hint(value: Any, schema: Mapping[str, Any]) -> str:
    """Say what to write instead of a value; "" if no legal one is near it."""
    kinds = schema.get("anyOf", [schema])
    types = [kind.get("type") for kind in kinds]
    items = [kind.get("items", kind) for kind in kinds]
    words = [w for item in items for w in item.get("enum", [item.get("const")]) if w]
    is_text = isinstance(value, str)
    width = width_in(str(value)) if is_text or isinstance(value, float) else None
    if "integer" in types and width:
        return f" (write {width})"
    found = re.fullmatch(r"(\d*\.?\d+) ?(%?)", value[:80]) if is_text else None
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if "number" in types and 0 < share <= 1:
        return f" (write {share:g})"
    if "integer" in types and type(value) is int and value > LARGEST:
        return " and below 2**63"
    # In a list, the first item that is not a legal word was misspelt.
    word = value
    if isinstance(value, (list, tuple)):
        word = next((item for item in value if item not in words), None)
    near = nearest(word, words)
    if isinstance(value, str) and "array" in types:
        return f" (write {show([near or value])})" if near or not words else ""
    return f" (did you mean {json.dumps(near)}?)" if near else ""


def width_in(text: str) -> int | None:
    """The integer in a text such as people write for a number of bits; None if there is none.

    >>> [width_in(text) for text in ("4", "8.0", "int4", "w4", "4-bit", "4 bits", "w8a8")]
    [4, 8, 4, 4, 4, 4, None]
    """
    found = re.fullmatch(r"(?:int|w)?(\d{1,4})(?:\.0)?(?:[ _-]?bits?)?", text.lower())
    return int(found[1]) if found else None


def nearest(word: Any, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that a value may have been meant for; None if none is near."""
    # Such a long text is not a misspelt word, and comparing it takes time.
    if not isinstance(word, str) or len(word) > 80:
        return None
    return next(iter(difflib.get_close_matches(word.lower(), words, 1, cutoff)), None)


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


def _meant(name: str, section: str, here: Sequence[str], spell: Speller) -> str:
    """Say what was probably meant by a key that does not exist; "" for a text too long to be a name.

    Args:
        name: The key.
        section: The section that contains it, with a dot; "" is the top level.
        here: The legal keys there.
        spell: Gives the name of a key by its path.
    """
    if len(name) > 80:
        return ""
    ours = _paths()
    word = name.lower().replace("-", "_")
    meant = None if section and word in ours else words_of_others().get(word)
    if meant is None:
        near = nearest(word, here, 0.75)
        # A close match here is a slip, even if another section has that very word.
        if near and (word not in ours or nearest(word, here, 0.9)):
            return f", did you mean {section}{near}?"
        meant = ours.get(nearest(word, ours, 0.8) or "")
    if meant is None:
        return f"; legal here are {', '.join(here)}"
    if " " in meant:
        return f"; {meant}"
    # In overrides a key goes by its short name.
    return f", did you mean {section + meant if meant in here else spell(meant)}?"


@functools.cache
def _paths() -> dict[str, str]:
    """The path of each key and section by its last name, in keywords and in DeepSpeed's words."""
    found: dict[str, str] = {}
    for spell in (dialect.word, str):
        for path in [*reversed(key_schemas()), *places()]:
            found[spell(path).rpartition(".")[2]] = path
    # These occur in several sections, and so point to none.
    for common in ("enabled", "verbose"):
        del found[common]
    return found


@functools.cache
def words_of_others() -> dict[str, str]:
    """The words of other libraries, each with what it is here."""
    return {word: meant for meant, words in _WORDS.items() for word in words.split()}
