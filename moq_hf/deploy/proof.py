"""The proof that an exported model answers as the checkpoint does."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import quantizer
from ..errors import MoQError
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
        answers: The first output for each batch: `[examples, classes]`, or `[examples, tokens, classes]`.
        metrics: GLUE metrics, where the data has labels.

    Raises:
        MoQError: The data does not fit the model.
    """

    def __init__(self, checkpoint: Checkpoint, data: Data, max_length: int) -> None:
        self._model, self._data = checkpoint.model, data
        if takes_pictures(checkpoint.model):
            if data is not SENTENCES:
                raise MoQError("a model of pictures is compared on random ones: leave the texts out")
            self.batches = pictures_of(checkpoint.model, checkpoint.processor)
        else:
            self.batches = batches_of(checkpoint.model, checkpoint.tokenizer, data, max_length)
        self.answers = self._run()
        self.metrics = self._metrics(self.answers)

    def rounded(self, layers: Sequence[str], bits: int) -> list[Tensor]:
        """The answers with the inputs of these layers rounded to `bits`, one scale per token."""
        hooks = [
            self._model.get_submodule(name).register_forward_pre_hook(
                lambda module, args: (quantizer.fake_quantize_tokens(args[0], bits), *args[1:])
            )
            for name in layers
        ]
        try:
            return self._run()
        finally:
            for hook in hooks:
                hook.remove()

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
