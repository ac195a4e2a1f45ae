"""What goes through a model in training, seen by a forward hook."""

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is shown the batches."""

    def take(self, inputs: Mapping[str, Any]) -> None:
        """Take what went through the model, by the names of its forward pass's arguments."""


def listen(model: nn.Module, listener: Listener) -> RemovableHandle:
    """Show a listener what goes through the model in training, until the handle is removed.

    The listener is not kept alive. A copy of the model, or a saved one, shows nothing to anybody.
    """
    return model.register_forward_hook(_Tap(model, listener), with_kwargs=True)


def first_batch(dataloader: Any) -> Mapping[str, Any] | None:
    """A training batch, for the proof, where the model's own could not be listened to; None if there is none."""
    try:
        batch = next(iter(dataloader))
    # Training is done: data that cannot be read twice, or at all, must not lose its result.
    except Exception as error:
        logger.warning("moq_hf: what is delivered will not be proven, for want of a batch (%s)", type(error).__name__)
        return None
    return batch if isinstance(batch, Mapping) else None


class _Tap:
    """The forward hook."""

    def __init__(self, model: nn.Module, listener: Listener) -> None:
        self._listener: Callable[[], Listener | None] = weakref.ref(listener)
        kinds = inspect.signature(model.forward).parameters.values()
        self._names = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        listener = self._listener()
        if listener is None or not module.training or not torch.is_grad_enabled():
            return
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        # The mean over what is measured is meant, not over the optimizer step's batch.
        inputs.pop("num_items_in_batch", None)
        listener.take(inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._listener, self._names = _nothing, []


def _nothing() -> None:
    return None
