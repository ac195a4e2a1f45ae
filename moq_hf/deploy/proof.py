"""The proof that an exported model answers as the checkpoint does."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import quantizer
from .data import Data, metrics_of
from .onnx_layers import Flavour

if TYPE_CHECKING:
    import onnxruntime
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Proof:
    """How the answers of one ONNX model compare with those of the checkpoint in PyTorch.

    Attributes:
        largest_difference: Of the outputs, over all sentences and tokens that are no padding.
        from_same_arithmetic: The same against PyTorch with the activations rounded as the int8 flavour rounds them;
            None for other flavours.
        agreement: Share of equal predictions; None where the model predicts no class.
        metrics: GLUE metrics, where the data has labels.
    """

    largest_difference: float
    from_same_arithmetic: float | None
    agreement: float | None
    metrics: dict[str, float]


def torch_answers(
    model: Any, batches: Sequence[Mapping[str, Tensor]], rounded: Sequence[str] = (), bits: int = 8
) -> list[Tensor]:
    """The first output for each batch; with the inputs of the layers `rounded` as the int8 flavour has them."""
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (quantizer.fake_quantize_tokens(args[0], bits), *args[1:])
        )
        for name in rounded
    ]
    try:
        with torch.inference_mode():
            return [model(**batch)[0] for batch in batches]
    finally:
        for hook in hooks:
            hook.remove()


def open_session(path: Path, flavour: Flavour) -> "onnxruntime.InferenceSession":
    """ONNX Runtime on one exported model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if flavour == "dequantize-linear":
        # Otherwise onnxruntime rounds the activations to 8 bits.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])


def prove_model(
    session: "onnxruntime.InferenceSession",
    batches: Sequence[Mapping[str, Tensor]],
    answers: Sequence[Tensor],
    simulated: Sequence[Tensor] | None,
    labels: Sequence[float] | None,
    data: Data | None,
) -> Proof:
    """Compare the answers of one exported model with the checkpoint's."""
    found = [torch.from_numpy(session.run(None, {k: v.numpy() for k, v in batch.items()})[0]) for batch in batches]
    kept = [batch["attention_mask"].bool() for batch in batches]
    classes = answers[0].shape[-1]
    predicts = session.get_outputs()[0].name == "logits" and classes > 1

    def rows(outputs: Sequence[Tensor]) -> Tensor:
        flat = [o[mask] if o.dim() == 3 else o for o, mask in zip(outputs, kept, strict=True)]
        return torch.cat([o.reshape(-1, classes) for o in flat])

    one, other = rows(found), rows(answers)
    agreement = float((one.argmax(-1) == other.argmax(-1)).double().mean()) if predicts else None
    return Proof(
        largest_difference=largest(one, other),
        from_same_arithmetic=None if simulated is None else largest(one, rows(simulated)),
        agreement=agreement,
        metrics=metrics_of(found, labels, data),
    )


def largest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs."""
    return float((one - other).abs().max())
