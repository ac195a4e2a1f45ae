"""Read a document, and keywords that go before it, into the fields of a config: every error in one message."""

import difflib
import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .config_fields import LARGEST, ConfigFields, given_in
from .errors import MOST_FAULTS, MoQConfigError, show, show_key
from .grid import FP4, FP4_BITS

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=ConfigFields)

# What a word of other libraries means here (bitsandbytes, GPTQ, AWQ, HQQ, torchao, quanto, llm-compressor, the
# Trainer): the path of a key, or else what to do.
_WORDS = {
    "quantize_bits.target_bits": "num_bits n_bits nbits wbits w_bit w_bits weight_bits bit bit_width bitwidth weights "
    "weight_dtype wdtype precision",
    "quantize_group_size": "group groupsize q_group_size block_size blocksize",
    "quantize_algo.scale": "observer",
    "quantize_format": "quant_type bnb_4bit_quant_type",
    "modules_to_not_convert": "ignore ignored_layers ignore_modules exclude exclude_modules skip skip_modules "
    "skip_layers llm_int8_skip_modules modules_to_not_quantize",
    "activation_quantization": "activation activation_bits activation_dtype act_bits abits a_bit a_bits input_bits "
    "input_activations",
    "quantize_embeddings": "embedding_bits embed_bits quantize_embedding",
    "quantize_heads": "lm_head quantize_lm_head quant_lm_head",
    "quantize_schedule.schedule_offset": "delay quant_delay quantization_delay float_steps",
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
}
# Keywords that are no config's, and are given to a callback all the same.
_OF_TRAINER = ("float_first", "teacher", "teacher_init_kwargs")
# Two ways to say which weights share a scale.
_GROUPS = {"quantize_groups", "quantize_group_size"}
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


def parse(
    kind: type[C],
    document: Any,
    where: str,
    keywords: Mapping[str, Any] | None = None,
) -> C:
    """Make a config of a document, and of keywords that go before it.

    Raises:
        MoQConfigError: Lists everything that is wrong with them.
    """
    faults: list[str] = []
    block, ignored = _block_of(document, where, faults)
    is_deepspeed = block is not document
    names = [*keyword_paths()]
    given = _values_of(keywords or {}, faults, names)
    # Errors have the words of who wrote the document.
    is_flat = not document or bool(not is_deepspeed and _only_keywords(block))
    read = flatten if is_deepspeed else _values_of
    values = read(block, faults, names if is_flat else ())
    # A keyword of the two goes before either of the document's.
    if any(given.get(name) is not None for name in _GROUPS):
        values = {name: value for name, value in values.items() if name not in _GROUPS}
    values |= given
    # What is not a format at all is found below.
    fp4 = FP4.get(str(values.get("quantize_format")))
    if fp4 is not None:
        values.setdefault("quantize_bits.target_bits", FP4_BITS)
        values.setdefault("quantize_group_size", fp4.group_size)
    if is_deepspeed:
        if values.get("quantize_group_size") is not None:
            values.setdefault("quantize_groups", "per_channel")
        values = DEEPSPEED_DEFAULTS | values
    wrong: dict[str, str] = {}
    try:
        config = _read(kind, values, is_deepspeed)
    except ValidationError as error:
        wrong = _value_faults(error, values)
        others = {path: value for path, value in values.items() if path not in wrong}
        config = _read(kind, others, is_deepspeed)
    # A value that is not legal by itself is in no conflict, nor is the target that was
    # probably meant by a key that is none.
    settled = set(wrong)
    if faults or "quantize_format" in wrong:
        settled |= {"quantize_bits.target_bits"} - values.keys()
    told = [*wrong.values()]
    for text in config.conflicts():
        if not any(path in text for path in settled):
            told.append(text)
    said = keyword_paths().values() if is_flat else given
    faults += [_in_keywords(text, said) for text in told]
    if faults:
        raise MoQConfigError(_in_one_text(where, faults))
    if ignored:
        logger.warning(
            "moq_hf: not of quantization, left to TrainingArguments: %s",
            ", ".join(map(str, ignored)),
        )
    return config


def _read(kind: type[C], values: Mapping[str, Any], is_deepspeed: bool) -> C:
    """Make a config of values by their paths.

    Raises:
        ValidationError: One of them is not legal.
    """
    arranged = by_section(values) | {"from_deepspeed": is_deepspeed}
    adapter = TypeAdapter(kind)
    return adapter.validate_python(arranged, by_alias=True, by_name=False)


def _block_of(
    document: Any, where: str, faults: list[str]
) -> tuple[Mapping[str, Any], list[Any]]:
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
        paths = keyword_paths()
        beside = _only_keywords(document)
        faults += [
            f"{name}: keywords do not go beside quantize_training; write {paths[name]} in it, or keywords alone"
            for name in document
            if name in beside
        ]
        ours += beside
        return block, [name for name in document if name not in ours]
    if not DEEPSPEED_KEYS.isdisjoint(document) and not _only_keywords(document):
        raise MoQConfigError(
            f"{where}: a DeepSpeed config without the section quantize_training, so there is nothing to quantize"
            + (
                " (compression_training is another method)"
                if "compression_training" in document
                else ""
            )
            + '; add "quantize_training": {"quantize_bits": {"start_bits": 12, "target_bits": 8}, ...}'
        )
    return document, []


@functools.cache
def _places() -> dict[str, list[str]]:
    """What may stand at the top of a file: sections with the names of their keys, and keys without any."""
    places: dict[str, list[str]] = {"quantize_type": []}
    for path in key_schemas():
        head, _, name = path.partition(".")
        places.setdefault(head, []).extend(filter(None, [name]))
    places["quantize-algo"] = places["quantize_algo"]
    return dict(sorted(places.items()))


def flatten(
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
    if "quantize_type" in values:
        one = values.pop("quantize_type")
        other = values.setdefault("quantize_algo.q_type", one)
        if one != other:
            both = f"quantize_type is {show(one)} but quantize_algo.q_type is {show(other)}"
            faults.append(f"{both}: they mean the same, give one")
    return values


@functools.cache
def schema_of_fields() -> dict[str, Any]:
    """The JSON Schema of `ConfigFields` as pydantic makes it; keys with a dot are not in sections yet."""
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


def by_section(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Put values whose keys have a dot into sections."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        head, _, name = path.rpartition(".")
        place = found.setdefault(head, {}) if head else found
        place[name] = value
    return found


# ---- keywords


@functools.cache
def keyword_paths() -> dict[str, str]:
    """The path of each keyword's key, or section, in a file."""
    fields = cast(Any, ConfigFields).__pydantic_fields__
    return {
        name: own.serialization_alias or name
        for name, own in fields.items()
        if not own.exclude
    }


def _only_keywords(block: Mapping[str, Any]) -> set[str]:
    """The names in a block that are keywords, and called otherwise in DeepSpeed's words."""
    paths = keyword_paths()
    return {name for name in block if paths.get(name, name) != name}


def _values_of(
    block: Mapping[str, Any], faults: list[str], known: Sequence[str]
) -> dict[str, Any]:
    """Give the value of each key by its path; keys are keywords, or DeepSpeed's words. `faults`, `known`: `flatten`."""
    paths = keyword_paths()
    words = _only_keywords(block)
    own: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in block.items():
        if name in _OF_TRAINER:
            faults.append(
                f"{name} is an argument of MoQTrainer: a callback cannot change the loss"
            )
            continue
        if is_dataclass(value):
            value = given_in(value)
        elif name == "activations":
            value = _activations(value)
        (own if name in words else theirs)[name] = value
    values = flatten(theirs, faults, known)
    for name, value in own.items():
        path = paths[name]
        if path in values or path in theirs:
            faults.append(f"{name} and {path} mean the same, give one")
        found = {path: value}
        values |= found if "." in path else flatten(found, faults)
    return values


def _activations(value: Any) -> Any:
    """Give the section of a file: the keyword may be its bits, its switch, or the section without its switch."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, int):
        return {"enabled": True, "bits": value}
    return {"enabled": True, **value} if isinstance(value, Mapping) else value


def _in_keywords(text: str, said: Iterable[str]) -> str:
    """Put keywords for the paths of keys in an error that has a path which was said by its keyword.

    >>> _in_keywords("quantize_bits.target_bits: 17 is not legal", ["quantize_bits.target_bits"])
    'bits: 17 is not legal'
    """
    if not any(path in text for path in said):
        return text
    for name, path in keyword_paths().items():
        if "." in path or path.startswith("quantize_"):
            text = text.replace(path, name)
    return text


# ---- what is wrong, in words


def _in_one_text(where: str, faults: Sequence[str]) -> str:
    """Say in one text what is wrong with a file, a mapping or the arguments of a class."""
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
    schemas = key_schemas()
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
    # Of a list, its first item that is no word was misspelt.
    word = value
    if isinstance(value, (list, tuple)):
        word = next((item for item in value if item not in words), None)
    near = nearest(word, words)
    if isinstance(value, str) and "array" in types:
        return f" (write {show([near or value])})" if near or not words else ""
    return f" (did you mean {json.dumps(near)}?)" if near else ""


def width_in(text: str) -> int | None:
    """The whole number in a text, which may be a number of bits as people write it; None if there is none.

    >>> [width_in(text) for text in ("4", "8.0", "int4", "w4", "4-bit", "4 bits", "w8a8")]
    [4, 8, 4, 4, 4, 4, None]
    """
    found = re.fullmatch(r"(?:int|w)?(\d{1,4})(?:\.0)?(?:[ _-]?bits?)?", text.lower())
    return int(found[1]) if found else None


def nearest(word: Any, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that a value may have been meant for; None if none is near."""
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
    ours = inner | keyword_paths()
    # They stand in several places and point nowhere.
    for common in ("enabled", "verbose"):
        del ours[common]
    theirs = _words_of_others()
    word = name.lower().replace("-", "_")
    meant = None if section and word in ours else theirs.get(word)
    if meant is None:
        near = nearest(word, here, 0.75)
        # A letter too many is a slip, even where another section has the word as it is.
        if near and (word not in ours or nearest(word, here, 0.9)):
            return f"{path}: unknown key, did you mean {section}{near}?"
        meant = ours.get(nearest(word, ours, 0.8) or "")
    if meant is None:
        return f"{path}: unknown key; legal here are {', '.join(here)}"
    if " " in meant:
        return f"{path}: unknown key; {meant}"
    # Keywords and overrides have a key by its short name.
    short = {key: word for word, key in keyword_paths().items()}.get(meant)
    found = f"{section}{short}" if short in here else meant
    return f"{path}: unknown key, did you mean {found}?"


@functools.cache
def _words_of_others() -> dict[str, str]:
    return {word: meant for meant, words in _WORDS.items() for word in words.split()}
