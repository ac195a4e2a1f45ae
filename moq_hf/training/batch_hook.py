"""The batches that go through a model in training, seen by a forward hook."""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)


def on_training_batch(model: nn.Module, take: Callable[[Mapping[str, Any]], None]) -> RemovableHandle:
    """Call a bound method with each batch of training, by the names of the forward pass's arguments.

    The method's object is not kept alive by it.
    """
    return model.register_forward_hook(_Hook(model, weakref.WeakMethod(take)), with_kwargs=True)


class _Hook:
    """The forward hook. A copy of the model, or a saved one, calls nobody."""

    def __init__(self, model: nn.Module, take: Callable[[], Callable[[Mapping[str, Any]], None] | None]) -> None:
        self._take = take
        parameters = inspect.signature(model.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        take = self._take()
        if take is None or not module.training or not torch.is_grad_enabled():
            return
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        # The mean over what is measured is meant, not over the optimizer step's batch.
        inputs.pop("num_items_in_batch", None)
        take(inputs)

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


def _do_nothing(*args: Any) -> None:
    return None


def first_batch(dataloader: Any) -> Mapping[str, Any] | None:
    """A training batch, for the proof, where the hook has seen none; None if none can be read."""
    try:
        batch = next(iter(dataloader))
    # Training is done: data that cannot be read twice, or at all, must not lose its result.
    except Exception as error:
        logger.warning(
            "moq_hf: what is delivered will not be proven, there is no batch available (%s)", type(error).__name__
        )
        return None
    return batch if isinstance(batch, Mapping) else None
