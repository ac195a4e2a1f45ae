"""Watch the training batches of a model, and keep examples of a step to measure on."""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import MoQError, explained
from ..names import uncompiled
from ..seams.sentence_transformers import (
    batch_of_features,
    batch_of_texts,
    body_of,
    is_text,
    takes_pairs,
)
from ..seams.transformers import FUSED_HEAD
from .measuring import repeatable

logger = logging.getLogger(__name__)

Batch = dict[str, Any]

# Rows whose graph is in memory at one time.
CHUNK = 16
# Texts in a batch, as `encode` of Sentence Transformers has it.
TEXTS = 32

# What a user gives as examples; see `batches_for`.
Examples = Mapping[str, Any] | Iterable[Any]


class Samples:
    """The examples of an optimizer step, in the form that the loss takes.

    Args:
        num_samples: Examples wanted.

    >>> samples = Samples(3)
    >>> samples.add({"x": torch.arange(4)})
    >>> [batch["x"].tolist() for batch in samples.batches(3)]
    [[0, 1, 2]]
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._batches: list[Batch] = []

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Take a micro-batch. Its tensors are kept, not copied."""
        self._batches.append(recursively_apply(Tensor.detach, dict(inputs)))
        while sum(map(rows_of, self._batches[1:])) >= self.num_samples:
            del self._batches[0]

    def clear(self) -> None:
        """Forget everything."""
        self._batches = []

    def batches(self, rows: int) -> list[Batch]:
        """The latest `rows` examples, as far as there are that many, in batches of at most `CHUNK`."""
        batches: list[Batch] = []
        for batch in reversed(self._batches):
            if rows <= 0:
                break
            size = min(rows, rows_of(batch))
            parts = parts_of(batch, size)
            batches.extend(parts)
            rows -= sum(map(rows_of, parts))
        return batches


def rows_of(inputs: Mapping[str, Any]) -> int:
    """The number of examples in a batch.

    >>> rows_of({"input_ids": torch.zeros(4, 7), "return_dict": True})
    4
    >>> rows_of({"text": ["one", "two"]})
    2
    >>> rows_of({"input": {"input_ids": torch.zeros(4, 7)}})
    4
    """
    for value in inputs.values():
        if isinstance(value, Mapping):
            return rows_of(value)
        if isinstance(value, list) or (isinstance(value, Tensor) and value.dim()):
            return len(value)
    return 1


def parts_of(batch: Batch, rows: int | None = None) -> list[Batch]:
    """All examples of a batch, or the first `rows`, `CHUNK` at a time; the batch itself if it cannot be split.

    >>> [rows_of(part) for part in parts_of({"x": torch.zeros(20, 3)})]
    [16, 4]
    """
    if not can_split(batch):
        return [batch]
    end = rows_of(batch) if rows is None else rows
    slices = (slice(start, min(end, start + CHUNK)) for start in range(0, end, CHUNK))
    return [recursively_apply(itemgetter(part), dict(batch)) for part in slices]


def can_split(inputs: Batch) -> bool:
    """True if every entry is a tensor with the examples along its first dimension, or a plain value."""
    rows = rows_of(inputs)
    return all(
        value.dim() > 0 and len(value) == rows
        if isinstance(value, Tensor)
        else value is None or isinstance(value, bool | int | float | str)
        for value in inputs.values()
    )


def on_training_batch(
    model: nn.Module, take: Callable[[Mapping[str, Any]], None]
) -> RemovableHandle:
    """Call a bound method with each training batch, by the names of the forward pass's arguments.

    This does not keep the method's object alive.
    """
    return model.register_forward_hook(
        _Hook(model, weakref.WeakMethod(take)), with_kwargs=True
    )


class _Hook:
    """The forward hook. In a copy of the model, or in a saved one, it does nothing."""

    def __init__(
        self,
        model: nn.Module,
        take: Callable[[], Callable[[Mapping[str, Any]], None] | None],
    ) -> None:
        self._take = take
        self._names = names_of_inputs(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        take = self._take()
        if take is None or not module.training or not torch.is_grad_enabled():
            return
        take(by_name(self._names, args, kwargs))

    def __reduce__(self) -> Any:
        return functools.partial, (_do_nothing,)


def names_of_inputs(model: nn.Module) -> list[str]:
    """The names of the arguments that a forward pass takes by position."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def by_name(
    names: Iterable[str], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Batch:
    """The batch that a forward pass was given, for which the model's own loss is the mean over its examples."""
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    # The number of labels in the step's batch would scale the loss; TRL's key changes the output.
    for name in ("num_items_in_batch", FUSED_HEAD):
        inputs.pop(name, None)
    return inputs


def _do_nothing(*args: Any) -> None:
    return None


def batches_for(model: nn.Module, inputs: Examples, rows: float) -> list[Batch]:
    """The batches, as the model's forward pass takes them, of the first examples that a user gave.

    Args:
        model: Any model.
        inputs: A batch or an iterable of batches; for a model of Sentence Transformers
            also what its `preprocess` makes, or texts, of which `TEXTS` are a batch.
        rows: How many examples are wanted; fewer are no error.

    Raises:
        MoQError: They are of another kind; says what they must be.

    >>> batches_for(nn.Linear(4, 2), {"input_ids": [[1, 2]]}, 1)
    Traceback (most recent call last):
    moq_hf.errors.MoQError: inputs must hold tensors, as in tokenizer(text, return_tensors="pt"): input_ids is a list
    """
    model = uncompiled(model)
    is_one = isinstance(inputs, Mapping | str | Tensor) or not isinstance(
        inputs, Iterable
    )
    with repeatable():
        found = first_batches([inputs] if is_one else inputs, rows)
    if body_of(model) is None:
        for batch in found:
            _check_batch(batch, 'tokenizer(text, return_tensors="pt")')
        return found
    if all(isinstance(batch, Mapping) for batch in found):
        for batch in found:
            _check_batch(batch, "encoder.preprocess(texts)")
        return [batch_of_features(batch) for batch in found]
    wrong = [example for example in found if not is_text(model, example)]
    if wrong:
        raise MoQError(
            f"inputs must be {kind_of_examples(model)}, or a batch that the model's preprocess made of them; got "
            f"{type(wrong[0]).__name__}"
        )
    with explained("inputs: the model's own preprocess cannot read these texts"):
        return [
            batch_of_texts(model, found[start : start + TEXTS])
            for start in range(0, len(found), TEXTS)
        ]


def kind_of_examples(model: nn.Module) -> str:
    """What a user gives as `inputs` for a model, for messages."""
    model = uncompiled(model)
    if body_of(model) is None:
        return (
            "a batch as the model's forward pass takes it, with tensors, as in "
            'tokenizer(text, return_tensors="pt")'
        )
    if takes_pairs(model):
        return 'pairs of texts, as in [("a question", "an answer")]'
    return 'texts, as in ["a text", "another"]'


def _check_batch(inputs: object, example: str) -> None:
    """Check that the inputs a user gave may be a batch: a mapping that contains tensors.

    Raises:
        MoQError: It is not; says what it must be, with an example.
    """
    if isinstance(inputs, str):
        raise MoQError(
            "inputs are texts, and this model takes tensors: tokenize them, as in "
            'inputs=[tokenizer(text, truncation=True, return_tensors="pt") for text in texts]'
        )
    if not isinstance(inputs, Mapping):
        raise MoQError(
            "inputs must be a batch as the model's forward pass takes it, a mapping of names to tensors, as in "
            f"{example}; got {type(inputs).__name__}"
        )
    found: list[Tensor] = []
    recursively_apply(found.append, dict(inputs))
    if not found:
        names = [f"{name} is a {type(inputs[name]).__name__}" for name in inputs]
        raise MoQError(
            f"inputs must hold tensors, as in {example}: {', '.join(names) or 'they are empty'}"
        )


def first_batches(dataloader: Iterable[Any], rows: float) -> list[Any]:
    """The first batches that have `rows` examples together, or all batches."""
    batches = []
    for batch in dataloader:
        batches.append(batch)
        rows -= rows_of(batch) if isinstance(batch, Mapping) else 1
        if rows <= 0:
            break
    # Accelerate would wait for the pass to end.
    getattr(dataloader, "end", _do_nothing)()
    return batches


def first_batch(dataloader: Any) -> Mapping[str, Any] | None:
    """A training batch for the proof, if the hook has seen none; None if none can be read."""
    try:
        batch = first_batches(dataloader, 1)[0]
    # Training is done, and its result must not be lost because the data cannot be read
    # again.
    except Exception as error:
        logger.warning(
            "moq_hf: the delivered model will not be proven, since there is no batch available (%s)",
            type(error).__name__,
        )
        return None
    return batch if isinstance(batch, Mapping) else None
