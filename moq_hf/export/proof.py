"""The proof that an exported model answers as the checkpoint does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MoQError
from ..grid import InputGrid
from ..inputs import fake_quantize_input
from .data import SENTENCES, Data, batches_of, pictures_of
from .loading import Checkpoint, takes_pictures
from .metrics import metrics_of

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Proof:
    """How the answers of one exported model compare with those of the checkpoint in PyTorch.

    Attributes:
        largest_difference: Of the outputs, over all pictures, or sentences and their tokens that are not padding.
        from_same_arithmetic: The same against PyTorch with the activations rounded as the exported model rounds them;
            None where it rounds none.
        agreement: Share of equal predictions; None where the model predicts no class.
        metrics: GLUE metrics, where the data has labels.
    """

    largest_difference: float
    from_same_arithmetic: float | None
    agreement: float | None
    metrics: dict[str, float]


class Reference:
    """The checkpoint's own answers in PyTorch, which those of exported models are compared with.

    Args:
        checkpoint: The checkpoint.
        data: What it answers; a model of pictures answers random ones instead.
        max_length: Tokens of an example, at most.

    Attributes:
        batches: The inputs.
        compared: What they are: "sentences" or "pictures".
        answers: The first output for each batch: `[examples, classes]`, or `[examples, tokens, classes]`.
        metrics: GLUE metrics, where the data has labels.

    Raises:
        MoQError: The data does not fit the model.
    """

    def __init__(self, checkpoint: Checkpoint, data: Data, max_length: int) -> None:
        self._model, self._data = checkpoint.model, data
        self.compared = "pictures" if takes_pictures(checkpoint.model) else "sentences"
        if self.compared == "pictures":
            if data is not SENTENCES:
                raise MoQError("a model of pictures is compared on random ones: leave the texts out")
            self.batches = pictures_of(checkpoint.model, checkpoint.processor)
        else:
            self.batches = batches_of(checkpoint.model, checkpoint.tokenizer, data, max_length)
        self.answers = self._run()
        self.metrics = self._metrics(self.answers)

    def rounded(self, layers: Sequence[str], grid: InputGrid, ranges: Mapping[str, float]) -> list[Tensor]:
        """The answers with the inputs of these layers rounded; `ranges` are those of a static scale."""

        def hook(name: str) -> Callable[..., Any]:
            largest = torch.tensor(ranges[name], dtype=torch.float32) if name in ranges else None
            return lambda module, args: (fake_quantize_input(args[0], grid, largest), *args[1:])

        return self._hooked({name: hook(name) for name in layers})

    def largest_inputs(self, layers: Sequence[str]) -> dict[str, float]:
        """The largest magnitude of the inputs of each of these layers, padding included."""
        found = dict.fromkeys(layers, 0.0)

        def hook(name: str) -> Callable[..., Any]:
            def note(module: Any, args: Any) -> None:
                found[name] = max(found[name], float(args[0].abs().amax()))

            return note

        self._hooked({name: hook(name) for name in layers})
        return found

    def _hooked(self, hooks: Mapping[str, Callable[..., Any]]) -> list[Tensor]:
        handles = [self._model.get_submodule(name).register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            return self._run()
        finally:
            for handle in handles:
                handle.remove()

    def prove(self, found: Sequence[Tensor], simulated: Sequence[Tensor] | None = None) -> Proof:
        """Compare the answers of an exported model.

        Args:
            found: Its first output for each of `batches`.
            simulated: What PyTorch answers with the exported model's arithmetic, if that is another.
        """
        one, other = self._rows(found), self._rows(self.answers)
        predicts = self._predicts and one.shape[-1] > 1
        return Proof(
            largest_difference=largest(one, other),
            from_same_arithmetic=None if simulated is None else largest(one, self._rows(simulated)),
            agreement=float((one.argmax(-1) == other.argmax(-1)).double().mean()) if predicts else None,
            metrics=self._metrics(found),
        )

    def _run(self) -> list[Tensor]:
        with torch.inference_mode():
            outputs = [self._model(**batch) for batch in self.batches]
        self._predicts = "logits" in outputs[0]
        return [output[0] for output in outputs]

    def _metrics(self, outputs: Sequence[Tensor]) -> dict[str, float]:
        if self._data.labels is None or outputs[0].dim() != 2:
            return {}
        return metrics_of(outputs, self._data.labels, self._data.task)

    def _rows(self, outputs: Sequence[Tensor]) -> Tensor:
        """All answers `[rows, classes]`, without those for padding."""
        flat = []
        for output, batch in zip(outputs, self.batches, strict=True):
            mask = batch.get("attention_mask")
            flat.append(output if mask is None or output.dim() != 3 else output[mask.bool()])
        return torch.cat([output.reshape(-1, output.shape[-1]) for output in flat])


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs.

    >>> largest(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    0.5
    """
    return float((one - other).abs().max())
