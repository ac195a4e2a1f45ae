"""One layer as an ONNX model, and what a whole one should answer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from moq_hf.export.compare import SENTENCES, Data, Reference, load_checkpoint
from moq_hf.export.decoder import inputs_after
from moq_hf.export.onnx import Export, _grid_of_int8, _rounding, onnx_runtime, prepare, quiet
from moq_hf.export.onnx_layers import Flavor, OnnxInt8Linear, OnnxNBitsLinear, OnnxQdqLinear
from moq_hf.grid import InputGrid, InputScale
from moq_hf.inputs import fake_quantize_input, static_scale


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


def from_same_arithmetic(
    source: Path, export: Export, flavor: Flavor, data: Data = SENTENCES, scale: InputScale | None = None
) -> float:
    """How far an exported file's answers are from PyTorch's with the inputs rounded as the file rounds them."""
    checkpoint = load_checkpoint(source)
    reference = Reference(checkpoint, data, 128)
    grids = {"nbits": InputGrid(8, "per_block"), "qdq": InputGrid(8, "static")}
    grid = grids.get(flavor) or _grid_of_int8(checkpoint, export.activation_bits, scale)
    rounding = _rounding(checkpoint, reference, grid, "avx2")

    def round_input(own: InputGrid, name: str, module: nn.Module, args: Any) -> Any:
        static = None
        if name in rounding.ranges:
            static = static_scale(torch.tensor([rounding.ranges[name]]), own.bits)
        return fake_quantize_input(args[0], own, static), *args[1:]

    for name, layer in prepare(checkpoint, flavor, rounding).model.named_modules():
        if isinstance(layer, OnnxInt8Linear | OnnxNBitsLinear | OnnxQdqLinear):
            own = replace(grid, block=layer.block) if isinstance(layer, OnnxNBitsLinear) else grid
            checkpoint.model.get_submodule(name).register_forward_pre_hook(partial(round_input, own, name))
    expected = reference._run()
    run = onnx_runtime(export.directory / export.files[flavor])
    found = reference._rows([run(inputs_after(checkpoint.model, batch, 0)) for batch in reference.batches])
    return float((found - expected).abs().max())
