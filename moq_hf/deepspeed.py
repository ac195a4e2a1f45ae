"""What the other sections of a DeepSpeed config are called in `TrainingArguments`: moq_hf leaves them alone."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Keys, and keys of sections, by their `TrainingArguments`.
_ARGUMENTS = {
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "steps_per_print": "logging_steps",
}


def in_training_arguments(sections: Mapping[Any, Any]) -> str:
    """Say which `TrainingArguments` stand for sections of a DeepSpeed config.

    >>> in_training_arguments({"fp16": {"enabled": True}, "gradient_clipping": 1.0})
    'fp16 (fp16=True), gradient_clipping (max_grad_norm=1.0)'
    """
    told = []
    for name, section in sections.items():
        found = ", ".join(_arguments_of(name, section))
        told.append(f"{name} ({found})" if found else str(name))
    return ", ".join(told)


def _arguments_of(path: str, value: Any) -> Iterator[str]:
    argument = _ARGUMENTS.get(path)
    if argument is not None:
        shown = value if isinstance(value, bool) else json.dumps(value)
        yield f"{argument}={shown}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _arguments_of(f"{path}.{key}", inner)
