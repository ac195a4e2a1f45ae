"""Decoders of text: a graph with a key-value cache, by the names that transformers.js and onnxruntime-genai look for.

| input | shape |
| --- | --- |
| `input_ids`, `position_ids` | `[batch, sequence]` |
| `attention_mask` | `[batch, past + sequence]` |
| `past_key_values.N.key`, `.value` | `[batch, heads, past, head size]`, of layer N; nothing is past in the first call |

Outputs are `logits` and, for every layer, `present.N.key` and `.value`, which are past in the next call.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

_PAST = "past_key_values"


def _cache_name(forward: Callable[..., Any]) -> str:
    """The name of the cache among a forward pass's arguments and outputs: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(forward).parameters else _PAST


def has_cache(model: Any) -> bool:
    """True if a model generates text from text alone, and so is exported with its cache."""
    return bool(
        model.main_input_name == "input_ids"
        and model.can_generate()
        and not model.config.is_encoder_decoder
    )


class _WithCache:
    """The forward pass that is traced: the cache comes in and goes out as tensors."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        pairs = zip(past_key_values[::2], past_key_values[1::2], strict=True)
        forward = super().forward  # type: ignore[misc]
        name = _cache_name(forward)
        outputs = forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{name: DynamicCache(list(pairs))},
        )
        present = _tensors_of(outputs[name])
        return {"logits": outputs.logits} | {
            f"present.{name}": tensor for name, tensor in present.items()
        }


@contextlib.contextmanager
def with_cache(model: Any) -> Iterator[None]:
    """Make the model's forward pass take and return the cache as tensors."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (_WithCache, cls), {})
    try:
        yield
    finally:
        model.__class__ = cls


def example_of(
    model: Any, input_ids: Tensor
) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The example that a decoder is traced with: half of these tokens `[batch, sequence]`, the first half in the cache.

    Returns:
        The inputs, their names in the graph, and the dimensions that may change.
    """
    batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    tensors = inputs_after(model, batch, input_ids.shape[1] // 2)
    names = list(tensors)
    past = [tensor for name, tensor in tensors.items() if _PAST in name]
    inputs: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if _PAST not in name
    }
    inputs[_PAST] = past
    dynamic = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "total"},
        "position_ids": {0: "batch", 1: "sequence"},
        _PAST: [{0: "batch", 2: "past"} for _ in past],
    }
    return inputs, names, dynamic


@torch.no_grad()
def inputs_after(
    model: Any, batch: Mapping[str, Tensor], past: int
) -> dict[str, Tensor]:
    """The inputs of a model's graph; a decoder's cache holds this many of the batch's tokens."""
    if not has_cache(model):
        return dict(batch)
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    seen = max(past, 1)
    name = _cache_name(model.forward)
    before = model(
        ids[:, :seen],
        attention_mask=mask[:, :seen],
        position_ids=positions[:, :seen],
        use_cache=True,
        # A cache that the model makes drops what lies before a sliding window.
        **{name: DynamicCache()},
    )
    inputs = {
        "input_ids": ids[:, past:].contiguous(),
        "attention_mask": mask,
        "position_ids": positions[:, past:].contiguous(),
    }
    for part, tensor in _tensors_of(before[name]).items():
        inputs[f"{_PAST}.{part}"] = tensor[:, :, :past].contiguous()
    return inputs


def _tensors_of(cache: Any) -> dict[str, Tensor]:
    tensors = {}
    for index, layer in enumerate(cache.layers):
        tensors[f"{index}.key"] = layer.keys
        tensors[f"{index}.value"] = layer.values
    return tensors


def arrays(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Inputs as ONNX Runtime takes them."""
    return {name: tensor.numpy() for name, tensor in inputs.items()}


def last_with_cache(model: Any, session: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The answers at the last token `[batch, vocabulary]`, with all earlier tokens in the cache of the graph."""
    earlier = {name: tensor[:, :-1] for name, tensor in batch.items()}
    _, *present = session.run(None, arrays(inputs_after(model, earlier, 0)))
    last = arrays(inputs_after(model, batch, batch["input_ids"].shape[1] - 1))
    past = [name for name in last if name.startswith(_PAST)]
    last |= dict(zip(past, present, strict=True))
    return torch.from_numpy(session.run(None, last)[0][:, -1])
