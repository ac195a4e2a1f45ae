"""Layers as an ONNX model, and what a whole one should answer."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir
import onnxruntime
import torch
from torch import Tensor, nn

from moq_hf.export.compare import SENTENCES, Data, Reference, load_checkpoint
from moq_hf.export.decoder import inputs_after
from moq_hf.export.onnx import Export, onnx_runtime, quiet, rounding_of
from moq_hf.export.onnx_rewrite import Flavor, Rewritten, Rounding, Traced, rewrite, unused_weights
from moq_hf.formats.stored import per_row
from moq_hf.grid import LEAST_INPUT_BLOCK, Grid, InputGrid, InputScale
from moq_hf.inputs import fake_quantize_input, range_in, static_parameters
from moq_hf.quantizer import Quantized, dequantize, quantize


class Layers(nn.ModuleList):
    """Each layer with an input of its own, in one graph: most of an export's time is not for the layers.

    Attributes:
        weights: The integers of those that are quantized, by their names.
        inputs: Of all layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Quantized] = {}
        self.states: dict[str, Any] = {}
        self.inputs: list[Tensor] = []

    def add(
        self,
        layer: Any,
        input: Tensor,
        bits: int = 8,
        grid: Grid | None = None,
        kind: str = "linear",
        parts: Sequence[str] = ("",),
    ) -> Quantized:
        """A layer on its grid, with an input; gives its integers as a folder has them. `parts` share the weight."""
        weight = per_row(quantize(layer.weight.detach().flatten(1), bits, grid or Grid()))
        if weight.zero_point is not None:
            half = 2 ** (bits - 1)
            weight = weight._replace(codes=weight.codes - half, zero_point=weight.zero_point - half)
        parameter = nn.Parameter(dequantize(*weight).view(layer.weight.shape))
        for part in parts:
            layer.get_submodule(part).weight = parameter
        name, *tied = (f"{len(self)}.{part}".removesuffix(".") for part in parts)
        self.weights[name] = weight
        self.states[name] = SimpleNamespace(kind=kind, bits=bits, format="int", tied=tied)
        self.append(layer)
        self.inputs.append(input)
        return weight

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # Layers behind those with inputs are not called.
        return tuple(layer(x) for layer, x in zip(self, inputs, strict=False))

    def traced(self) -> Traced:
        """The graph of all."""
        names = [f"x{index}" for index in range(len(self.inputs))]
        with quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                self.eval(),
                tuple(self.inputs),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=21,
                input_names=names,
                dynamic_shapes=(({0: "batch"},) * len(names),),
            )
        return Traced(program.model, unused_weights(program.exported_program), self.weights)

    def rewritten(self, traced: Traced, flavor: Flavor, rounding: Rounding | None = None) -> Rewritten:
        """The graph with integers."""
        verified = SimpleNamespace(layers=self.states)
        checkpoint: Any = SimpleNamespace(weights=self.weights, verified=verified)
        with quiet():
            return rewrite(traced, checkpoint, flavor, rounding)

    def answers(self, rewritten: Rewritten) -> list[Tensor]:
        """What ONNX Runtime makes of the inputs."""
        content = onnx_ir.to_proto(rewritten.model).SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        found = session.run(None, {f"x{index}": x.numpy() for index, x in enumerate(self.inputs)})
        return [torch.from_numpy(each) for each in found]


def from_same_arithmetic(
    source: Path,
    export: Export,
    flavor: Flavor,
    data: Data = SENTENCES,
    scale: InputScale | None = None,
    bits: int | None = None,
) -> float:
    """How far an exported file's answers are from PyTorch's with the inputs rounded as the file rounds them.

    Args:
        source: What was exported.
        export: How.
        flavor: The file.
        data: What is answered.
        scale: That was asked for.
        bits: That were asked for.
    """
    checkpoint = load_checkpoint(source)
    reference = Reference(checkpoint, data, 128)
    rounding = rounding_of(checkpoint, reference, flavor, "avx2", bits, scale)

    def round_input(own: InputGrid, name: str, module: nn.Module, args: Any) -> Any:
        static: Any = (None, None)
        if name in rounding.ranges:
            dtype = rounding.dtypes.get(name, torch.float32)
            static = static_parameters(range_in(rounding.ranges[name], own), own, dtype)
        return fake_quantize_input(args[0], own, *static), *args[1:]

    for name, (codes, weight_scale, _) in checkpoint.weights.items():
        groups = weight_scale.shape[1]
        grid = rounding.own.get(name, rounding.grid)
        if grid is None:
            continue
        own = grid.beside(codes.shape[1], groups)
        fits = own.block >= LEAST_INPUT_BLOCK if flavor == "nbits" else groups == 1
        if fits and checkpoint.verified.layers[name].kind == "linear":
            checkpoint.model.get_submodule(name).register_forward_pre_hook(partial(round_input, own, name))
    expected = reference._run()
    run = onnx_runtime(export.directory / export.files[flavor])
    found = reference._rows([run(inputs_after(checkpoint.model, batch, 0)) for batch in reference.batches])
    return float((found - expected).abs().max())


def products(inputs: Sequence[Tensor], layers: Sequence[Any], weights: Sequence[Quantized]) -> list[Tensor]:
    """Linear layers' answers to rounded inputs, in double precision."""
    return [
        x.double() @ dequantize(*weight).double().T + (0 if layer.bias is None else layer.bias.detach())
        for x, layer, weight in zip(inputs, layers, weights, strict=True)
    ]
