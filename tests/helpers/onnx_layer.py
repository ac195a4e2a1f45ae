"""One layer as an ONNX model."""

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

from moq_hf.export.onnx import quiet


def export_layer(layer: nn.Module, input: Tensor, path: Path) -> Tensor:
    """What onnxruntime makes of the exported layer's input."""
    with quiet():
        torch.onnx.export(
            layer.eval(),
            (input,),
            path,
            dynamo=True,
            verbose=False,
            opset_version=21,
            input_names=["x"],
            dynamic_shapes=({0: "batch"},),
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": input.numpy()})[0])
