"""One layer as an ONNX model, and what a whole one should answer."""

from collections.abc import Sequence
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


class Layers(nn.ModuleList):
    """Each layer with an input of its own."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self, inputs, strict=True))


def export_layers(layers: Sequence[nn.Module], inputs: Sequence[Tensor], path: Path) -> list[Tensor]:
    """What onnxruntime makes of the layers' inputs, all in one file: most of an export's time is not for the layers."""
    names = [f"x{index}" for index in range(len(layers))]
    with quiet():
        torch.onnx.export(
            Layers(layers).eval(),
            tuple(inputs),
            path,
            dynamo=True,
            verbose=False,
            opset_version=21,
            input_names=names,
            dynamic_shapes=(({0: "batch"},) * len(layers),),
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(each) for each in found]


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
