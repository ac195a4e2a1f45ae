"""Layers that stand for quantized ones while torch.onnx.export traces a model: they emit integer weights.

| flavor | linear layer | embedding table |
| --- | --- | --- |
| weight-only | x times Cast(codes) * scale, which a runtime folds into a float weight when it loads | Gather, Cast, Mul |
| dequantize-linear | x times DequantizeLinear(codes), in blocks where the scales are | the same |
| int8, qdq | see `onnx_integers` | Gather, Cast, Mul |

A convolution is Conv with a weight of Cast(codes) * scale, or of DequantizeLinear(codes) along its output channels; in
the int8 and qdq flavors it is as in the weight-only one.

ONNX Runtime turns DequantizeLinear before MatMul into MatMulNBits with accuracy level 4, which rounds activations to 8
bits: for the same answers as PyTorch the weight-only flavor spells the same formula as Cast and Mul.
"""  # noqa: E501 - a table row cannot be broken

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import quantizer
from ..transformers_seams import convolve

Flavor = Literal["float", "weight-only", "dequantize-linear", "int8", "qdq"]
FLAVORS: tuple[Flavor, ...] = ("float", "weight-only", "dequantize-linear", "int8", "qdq")

OPSET = 21
_Attributes = dict[str, int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]]


class OnnxLinear(nn.Module):
    """A linear layer with float activations.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero points.
        bias: `[out_features]`, or None.
        folded: Cast and Mul in the place of DequantizeLinear.
    """

    def __init__(self, weight: quantizer.Quantized, bias: Tensor | None, folded: bool) -> None:
        super().__init__()
        codes, scale, zero = per_row(weight)
        codes, scale, zero = codes.T.contiguous(), scale.T.contiguous(), None if zero is None else zero.T.contiguous()
        if not folded and len(scale) == 1:
            scale, zero = scale[0], None if zero is None else zero[0]
        self.folded = folded
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor | None
        self.bias: Tensor | None
        self.register_buffer("codes", codes.to(torch.int8))
        self.register_buffer("scale", scale)
        set_buffer(self, "zero_point", None if zero is None else zero.to(torch.int8))
        set_buffer(self, "bias", None if bias is None else bias.detach())

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]` times the weight, plus the bias."""
        product = torch.matmul(input, self._folded() if self.folded else self._dequantized())
        return product if self.bias is None else product + self.bias

    def _folded(self) -> Tensor:
        codes, scale, zero = self.codes.to(torch.float32), self.scale, self.zero_point
        groups, columns = scale.shape
        if groups > 1:
            codes, scale, zero = (
                codes.view(groups, -1, columns),
                scale[:, None],
                None if zero is None else zero[:, None],
            )
        if zero is not None:
            codes = codes - zero.to(torch.float32)
        return (codes * scale).view(self.codes.shape)

    def _dequantized(self) -> Tensor:
        rows, columns = self.codes.shape
        blocks: _Attributes = {"axis": 1}
        if self.scale.dim() == 2:
            blocks = {"axis": 0, "block_size": rows // len(self.scale)}
        parts = [self.codes, self.scale] if self.zero_point is None else [self.codes, self.scale, self.zero_point]
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", parts, blocks, dtype=torch.float32, shape=(rows, columns), version=OPSET
        )


class OnnxConvolution(nn.Module):
    """A convolution with float activations.

    Args:
        weight: Signed codes `[out_channels, in_channels / groups * kernel]`, their scales and zero points, one per row
            or row block.
        layer: The convolution: its own weight is not used.
        folded: Cast and Mul in the place of DequantizeLinear.
    """

    def __init__(self, weight: quantizer.Quantized, layer: nn.Module, folded: bool) -> None:
        super().__init__()
        codes, scale, zero = per_row(weight)
        assert isinstance(layer, nn.Conv1d | nn.Conv2d)
        self.layer = layer
        self.folded = folded
        shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
        # A scale for each output channel, in the shape that Mul or DequantizeLinear wants.
        each = [-1, *[1] * (len(shape) - 1)] if folded else [-1]
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor | None
        self.register_buffer("codes", codes.view(shape).to(torch.int8))
        self.register_buffer("scale", scale.view(each))
        set_buffer(self, "zero_point", None if zero is None else zero.view(each).to(torch.int8))

    @property
    def weight(self) -> Tensor:
        """The weight, float32, for the model's code that asks for its dtype too."""
        codes, scale, zero = self.codes, self.scale, self.zero_point
        if self.folded:
            numbers = codes.to(torch.float32)
            return (numbers if zero is None else numbers - zero.to(torch.float32)) * scale
        parts = [codes, scale] if zero is None else [codes, scale, zero]
        along: _Attributes = {"axis": 0}
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", parts, along, dtype=torch.float32, shape=codes.shape, version=OPSET
        )

    def forward(self, input: Tensor) -> Tensor:
        """`input` convolved with the weight, plus the bias."""
        return convolve(self.layer, input, self.weight)


class OnnxEmbedding(nn.Module):
    """An embedding table of integers: rows are dequantized after they are looked up.

    Codes of up to 4 bits lie in the two halves of a byte, the first half of a row in the lower ones.

    Args:
        weight: Signed codes `[rows, columns]`, and a scale per row.
        bits: Of the codes.
    """

    def __init__(self, weight: quantizer.Quantized, bits: int) -> None:
        super().__init__()
        codes = weight.codes
        self.halved = bits <= 4 and codes.shape[1] % 2 == 0
        if self.halved:
            low, high = (codes + 8).chunk(2, 1)
            codes = low + 16 * high
        self.codes: Tensor
        self.scale: Tensor
        self.register_buffer("codes", codes.to(torch.uint8 if self.halved else torch.int8))
        self.register_buffer("scale", weight.scale)

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., columns]` for the indices `input` `[...]`."""
        return self._floats(F.embedding(input, self.codes), F.embedding(input, self.scale))

    @property
    def weight(self) -> Tensor:
        """The whole table, float32, for a model's code that reads it."""
        return self._floats(self.codes, self.scale)

    def _floats(self, codes: Tensor, scale: Tensor) -> Tensor:
        codes = codes.to(torch.float32)
        if self.halved:
            # OpenVINO computes something else with BitShift.
            high = (codes / 16).floor()
            codes = torch.cat((codes - 16 * high, high), -1) - 8
        return codes * scale


def set_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Give a module a buffer, or None in its place."""
    # torch.export counts buffers that are None and then finds too few (2.13).
    if value is None:
        setattr(module, name, None)
    else:
        module.register_buffer(name, value)


def per_row(weight: quantizer.Quantized) -> quantizer.Quantized:
    """The same with the scales and zero points of row blocks repeated for each row."""
    codes, scale, zero = weight
    repeats = codes.shape[0] // scale.shape[0]
    repeated = None if zero is None else zero.repeat_interleave(repeats, 0)
    return quantizer.Quantized(codes, scale.repeat_interleave(repeats, 0), repeated)
