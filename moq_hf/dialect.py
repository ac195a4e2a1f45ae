"""DeepSpeed's words for the keys of a config: a dialect in which configs can be read and written.

Paths are dotted: a key, or a section and its key. The config's own words are the
keywords (`bits`, `eigenvalue.tol`); the dialect has other names for the same keys.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import MoQConfigError, show

# Keywords and sections that have another name in the dialect.
WORDS = {
    "verbose": "quantize_verbose",
    "kernel": "quantizer_kernel",
    "q_type": "quantize_algo.q_type",
    "rounding": "quantize_algo.rounding",
    "scale": "quantize_algo.scale",
    "scale_refresh": "quantize_algo.scale_refresh",
    "gptq": "quantize_algo.gptq",
    "range": "quantize_algo.range",
    "scale_dtype": "quantize_algo.scale_dtype",
    "groups": "quantize_groups",
    "group_size": "quantize_group_size",
    "format": "quantize_format",
    "start_bits": "quantize_bits.start_bits",
    "bits": "quantize_bits.target_bits",
    "period": "quantize_schedule.quantize_period",
    "offset": "quantize_schedule.schedule_offset",
    "deadline": "quantize_schedule.deadline",
    "allow_unreached": "quantize_schedule.allow_unreached",
    "blend": "fp16_mixed_quantize",
    "activations": "activation_quantization",
    "embeddings": "quantize_embeddings",
    "convolutions": "quantize_convolutions",
    "heads": "quantize_heads",
}
# The section of a DeepSpeed config that holds the keys.
SECTION = "quantize_training"
# The languages that a config may have been written in.
LANGUAGES = ("keywords", "deepspeed", SECTION)
# Keys that tell a DeepSpeed config from a misspelled one of moq_hf.
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
# Defaults for keys that a document in the dialect leaves out, and further ones in
# DeepSpeed's own section.
DEFAULTS: dict[str, Any] = {"embeddings": None}
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "start_bits": 16,
    "period": 100,
    "offset": 100,
    "groups": 1,
    "scale": "absmax",
    "range": "narrow",
}

# The path of a key, or the names of a section with the paths of their keys.
Place = str | dict[str, str]


def word(path: str) -> str:
    """A key in the words of the dialect.

    >>> word("bits"), word("blend.enabled"), word("eigenvalue.tol")
    ('quantize_bits.target_bits', 'fp16_mixed_quantize.enabled', 'eigenvalue.tol')
    """
    head, dot, inner = path.partition(".")
    return f"{WORDS.get(head, head)}{dot}{inner}"


def by_section(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Put values whose keys have a dot into sections."""
    found: dict[str, Any] = {}
    for path, value in flat.items():
        head, _, name = path.rpartition(".")
        place = found.setdefault(head, {}) if head else found
        place[name] = value
    return found


def places(paths: Iterable[str]) -> dict[str, Place]:
    """The places of the keys with these paths in a document of the dialect.

    >>> places(["bits", "seed"])
    {'quantize_bits': {'target_bits': 'bits'}, 'seed': 'seed'}
    """
    found = by_section({word(path): path for path in paths})
    # DeepSpeed's tutorial has other spellings too.
    if "quantize_algo" in found:
        found |= {"quantize-algo": found["quantize_algo"], "quantize_type": "q_type"}
    return found


def language_of(
    block: Mapping[str, Any], own: Mapping[str, Place], theirs: Mapping[str, Place]
) -> str:
    """The language of a block, "keywords" or "deepspeed": that of its first name which only one of them has.

    Args:
        block: Keys with their values.
        own: The places of keywords.
        theirs: The places of the dialect's words.

    >>> language_of({"seed": 1, "quantize_heads": True}, {"heads": "heads"}, {"quantize_heads": "heads"})
    'deepspeed'
    """
    telling = theirs.keys() ^ own.keys()
    first = next((name for name in block if name in telling), None)
    return "deepspeed" if first in theirs else "keywords"


def block_of(
    document: Any,
    own: Mapping[str, Place],
    theirs: Mapping[str, Place],
    where: str,
    faults: list[str],
) -> tuple[Mapping[str, Any], list[Any]]:
    """Find moq_hf's keys in a document, and the names of other sections; faults are added to `faults`.

    Raises:
        MoQConfigError: The document has no such keys.
    """
    if not isinstance(document, Mapping):
        raise MoQConfigError(
            f"{where}: must be an object of keys, got {show(document)}"
        )
    alone = own.keys() - theirs.keys()
    if SECTION in document:
        block = document[SECTION]
        if not isinstance(block, Mapping):
            raise MoQConfigError(
                f"{where}: {SECTION} must be an object of keys, got {show(block)}"
            )
        ignored = []
        for name in document:
            if name in theirs:
                faults.append(f"{name}: belongs in {SECTION}")
            elif name in alone:
                faults.append(
                    f"{name}: keywords do not go beside {SECTION}; write {word(name)} in it, or keywords alone"
                )
            elif name not in (SECTION, "$schema"):
                ignored.append(name)
        return block, ignored
    if not DEEPSPEED_KEYS.isdisjoint(document) and alone.isdisjoint(document):
        other = ""
        if "compression_training" in document:
            other = " (compression_training is another method)"
        raise MoQConfigError(
            f"{where}: a DeepSpeed config without the section {SECTION}, so there is nothing to quantize{other}; add "
            f'"{SECTION}": {{"quantize_bits": {{"start_bits": 12, "target_bits": 8}}, ...}}'
        )
    return document, []
