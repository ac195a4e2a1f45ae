"""Passes over the same batches in which blocks whose weights are settled answer from memory."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


class NoAnswer(Exception):
    """What was kept is not enough: a block that was freed is needed again."""


class Replay:
    """What blocks answered to each batch, for passes that begin where the one before has ended.

    A block is an entry of a `ModuleList`. Of a list the last block's answer alone is
    kept, since the blocks before it only hand theirs on; in the place of these stand
    tensors on the meta device. A model that needs one of them after all, or whose
    blocks do more than answer, ends otherwise than in a whole pass: compare the two
    where a block is new, and `give_up` where they differ.

    Args:
        model: In evaluation mode, so that a block gives the same answer again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lists = {
            block: entries
            for entries in _outermost_lists(model)
            for block in entries
            if block is not None
        }
        self._answers: dict[int, dict[tuple[nn.Module, int], Any]] = {}
        self._is_settled = True

    @property
    def known(self) -> int:
        """How many calls of blocks a pass over the first batch leaves out."""
        return len(self._answers.get(0, ()))

    def give_up(self) -> None:
        """Compute whole passes from now on."""
        self._lists, self._answers = {}, {}

    def note_change(self) -> None:
        """A layer whose weight will change has been called: what follows in this pass will be another time."""
        self._is_settled = False

    def check(self, inputs: Tensor) -> None:
        """Check that what a layer is given was computed.

        Raises:
            NoAnswer: It came of a block that was freed.
        """
        if inputs.is_meta:
            raise NoAnswer

    @contextlib.contextmanager
    def on_batch(self, index: int) -> Iterator[None]:
        """In one pass over a batch, answer for settled blocks, and keep what others answer before a change."""
        answers = self._answers.setdefault(index, {})
        calls: Counter[nn.Module] = Counter()
        self._is_settled = True
        with contextlib.ExitStack() as stack:
            for block in self._lists:
                own = block.forward
                stack.callback(_restore_forward, block, vars(block).get("forward"))
                block.forward = functools.partial(
                    self._answer, block, own, answers, calls
                )
            yield

    def _answer(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        answers: dict[tuple[nn.Module, int], Any],
        calls: Counter[nn.Module],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        key = block, calls[block]
        calls[block] += 1
        if key in answers:
            # A copy, as what follows may change it in place.
            return _on_tensors(Tensor.clone, answers[key])
        answer = forward(*args, **kwargs)
        if self._is_settled:
            for earlier in answers:
                if self._lists[earlier[0]] is self._lists[block]:
                    answers[earlier] = _on_tensors(_placeholder, answers[earlier])
            answers[key] = _on_tensors(Tensor.clone, answer)
        return answer


def _outermost_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of modules that are not within an entry of another one."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(
            name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return list(found.values())


def _restore_forward(module: nn.Module, own: Any) -> None:
    """Give a module the `forward` of its class again, or that of an instance, as Accelerate's hooks set it."""
    if own is None:
        del module.forward
    else:
        module.forward = own


def _placeholder(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _on_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with its tensors changed, in tuples and lists too; whatever else it holds is left as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_on_tensors(change, part) for part in value)
    return value
