"""Is a quantized copy stale? The one answer, and the watch that has copies made anew after an optimizer's step.

The watch is a hook of torch that runs after every step of every optimizer in the process. It is installed with the
first quantized layer, and removed with the last one that is made plain again. A layer that is merely collected leaves
the hook, which then finds nothing. Inside an optimizer's step both wait until the next use of a quantized layer.
"""

import os
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..processes import is_sharded

Key = tuple[int, int, torch.device, torch.dtype]


class Copy(Protocol):
    """What is known of a quantized copy.

    Attributes:
        source: The float weight that it was made of; None makes it stale.
        key: What `key_of` gave for the source then.
    """

    source: Tensor | None
    key: Key | None


def stale(copy: Copy, weight: Tensor) -> bool:
    """Whether a quantized copy is not that of the float weight as it is now: the one place that decides it.

    | what changes the float weight | how it is seen |
    | --- | --- |
    | an optimizer's step | the controller refreshes; without one, the hook after every step of an optimizer |
    | `load_state_dict`, also with `assign` | `_load_from_state_dict` refreshes, with ratios searched afresh |
    | `.to()`, `.half()`, `.cuda()` | `_apply` refreshes |
    | in place under `no_grad`, `swap_tensors` | the tensor's version |
    | another parameter in its place, `torch.func` | the tensor itself, to which a reference is held |
    | `weight.data = other` | the address of its memory |
    | `weight.data.copy_()` and the like (an EMA's) | `eval()`, and `train()` after it, quantize afresh whatever |
    | any of these under `torch.compile` | `train()` and `eval()`, which run outside of the graph, look |
    | any of these to a sharded weight (FSDP2) | in the same ways, at the next gathering |

    Not seen is what is written through `.data` between an optimizer's step and a training pass after it, and in a
    compiled model what is changed in place without a call of `train()` or `eval()`: call `refresh()` then.

    Args:
        copy: What is known of the quantized copy.
        weight: The float weight, or what stands in its place now.
    """
    if _unsettled:
        with _lock:
            _settle()
    return copy.source is not weight or copy.key != key_of(weight)


def key_of(weight: Tensor) -> Key:
    """What distinguishes a changed weight from an unchanged one: version, address of the memory, device and dtype."""
    try:
        pointer = 0 if is_sharded(weight) else weight.data_ptr()
    except RuntimeError:
        # Tensors of torch.func and of tracing have no memory of their own.
        pointer = 0
    return 0 if weight.is_inference() else weight._version, pointer, weight.device, weight.dtype


class Watched(Protocol):
    """A layer with a quantized copy."""

    def parameter(self) -> Tensor | None:
        """The float weight that an optimizer may own."""

    def forget(self) -> None:
        """Take the copy for stale."""

    def take_step(self) -> None:
        """Count an optimizer's step, and make the copy anew."""

    def follow(self) -> None:
        """Take over the precision of the layer that this one was copied from."""


# Every quantized layer alive. Other threads may be adding some: the sets are changed and looked through under the lock.
_layers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_controlled: "weakref.WeakSet[Any]" = weakref.WeakSet()
_lock = threading.RLock()
_hook: RemovableHandle | None = None
# Whether the hook could not be brought in line with the layers yet.
_unsettled = False
_OPTIMIZER = register_optimizer_step_post_hook.__code__.co_filename


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread that the child of a fork does not have may have held it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def watch(layers: Iterable[Watched]) -> None:
    """Refresh these layers after each step of an optimizer that owns their weights."""
    with _lock:
        _layers.update(layers)
        _controlled.difference_update(layers)
        _settle()


def unwatch(layer: Watched) -> None:
    """Forget a layer that is made plain again."""
    with _lock:
        _layers.discard(layer)
        _controlled.discard(layer)
        _settle()


def _settle() -> None:
    """Install or remove the hook, as there are layers or none; while torch goes through its hooks, at the next call."""
    global _hook, _unsettled
    wanted = bool(_layers)
    _unsettled = wanted != (_hook is not None) and _in_optimizer_step()
    if _unsettled:
        return
    if wanted and _hook is None:
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)
    elif not wanted and _hook is not None:
        _hook.remove()
        _hook = None


def _in_optimizer_step() -> bool:
    """Whether this thread is inside an optimizer's step, whose hooks torch may be going through."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _OPTIMIZER:
            return True
        frame = frame.f_back
    return False


def watched() -> list[Watched]:
    """Every quantized layer alive."""
    with _lock:
        return list(_layers)


def take_over(layers: Iterable[Watched]) -> None:
    """Leave the refreshing of these layers after each optimizer step to the caller."""
    with _lock:
        _controlled.update(layers)


def lead_copies() -> None:
    """Let the copies of quantized layers, those of an EMA for instance, have the precision that the layers have now."""
    for layer in watched():
        layer.follow()


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    layers: dict[int, list[Watched]] = {}
    for layer in watched():
        layers.setdefault(id(layer.parameter()), []).append(layer)
    if not layers:
        return
    with _lock:
        controlled = set(_controlled)
    # In the optimizer's order: processes that gather shards must do so in the same one.
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for layer in layers.get(id(parameter), ()):
            if layer in controlled:
                layer.forget()
            else:
                layer.take_step()
