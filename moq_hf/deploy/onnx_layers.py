"""Layers that stand for quantized ones while torch.onnx.export traces a model: they emit integer weights.

| flavor | linear layer | embedding table |
| --- | --- | --- |
| weight-only | x times Cast(codes) * scale, which a runtime folds into a float weight when it loads | Gather, Cast, Mul |
| dequantize-linear | x times DequantizeLinear(codes), in blocks where the scales are | the same |
| int8 | QuantizeLinear with a scale per token, MatMulInteger, Cast, Mul | the same |

A convolution is Conv with a weight of Cast(codes) * scale, or of DequantizeLinear(codes) along its output channels; in
the int8 flavor it is as in the weight-only one.

ONNX Runtime turns DequantizeLinear before MatMul into MatMulNBits with accuracy level 4, which rounds activations to 8
bits: for the same answers as PyTorch the weight-only flavor spells the same formula as Cast and Mul.

Instructions of CPUs without VNNI add two products of unsigned activations and signed weights in 16 bits, saturating. So
weights are signed where two such products fit, that is with activations of 7 bits or weights of 7, and unsigned
otherwise, which is exact too, and slower there.
"""  # noqa: E501 - a table row cannot be broken

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import quantizer
from ..transformers_seams import convolve

Flavor = Literal["float", "weight-only", "dequantize-linear", "int8"]
FLAVORS: tuple[Flavor, ...] = ("float", "weight-only", "dequantize-linear", "int8")

OPSET = 21
_INT16_MAX = 2**15 - 1
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
        codes, scale, zero = _per_row(weight)
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
        _set(self, "zero_point", None if zero is None else zero.to(torch.int8))
        _set(self, "bias", None if bias is None else bias.detach())

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
        codes, scale, zero = _per_row(weight)
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
        _set(self, "zero_point", None if zero is None else zero.view(each).to(torch.int8))

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


class OnnxInt8Linear(nn.Module):
    """A linear layer that rounds its input to `bits`, one scale per token, and multiplies integers.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero points, one per row or row block.
        bias: `[out_features]`, or None.
        bits: Of the activations, 2 to 8.
    """

    def __init__(self, weight: quantizer.Quantized, bias: Tensor | None, bits: int) -> None:
        super().__init__()
        codes, scale, zero = _per_row(weight)
        self.bits = bits
        self.signed = is_exact_signed(codes, bits)
        shift = 0 if self.signed else 128
        dtype = torch.int8 if self.signed else torch.uint8
        if zero is None and shift:
            zero = torch.zeros(len(codes), dtype=torch.int32, device=codes.device)
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor | None
        self.bias: Tensor | None
        self.one: Tensor
        self.middle: Tensor
        self.register_buffer("codes", (codes.T + shift).to(dtype).contiguous())
        self.register_buffer("scale", scale[:, 0].contiguous())
        _set(self, "zero_point", None if zero is None else (zero.flatten() + shift).to(dtype))
        _set(self, "bias", None if bias is None else bias.detach())
        self.register_buffer("one", torch.ones((), dtype=torch.float32, device=codes.device))
        self.register_buffer("middle", torch.tensor(2 ** (bits - 1), dtype=torch.uint8, device=codes.device))

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        scale = quantizer.token_scale(input, self.bits)
        quantized = torch.onnx.ops.symbolic(
            "QuantizeLinear",
            (input / scale, self.one, self.middle),
            dtype=torch.uint8,
            shape=input.shape,
            version=OPSET,
        )
        parts = [quantized, self.codes, self.middle]
        if self.zero_point is not None:
            parts.append(self.zero_point)
        shape = (*input.shape[:-1], self.codes.shape[1])
        sums = torch.onnx.ops.symbolic("MatMulInteger", parts, dtype=torch.int32, shape=shape, version=10)
        product = sums.to(torch.float32) * self.scale * scale
        return product if self.bias is None else product + self.bias


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
        codes, scale = F.embedding(input, self.codes).to(torch.float32), F.embedding(input, self.scale)
        if self.halved:
            # OpenVINO computes something else with BitShift.
            high = (codes / 16).floor()
            codes = torch.cat((codes - 16 * high, high), -1) - 8
        return codes * scale


def is_exact_signed(codes: Tensor, bits: int) -> bool:
    """Whether two products of these codes with unsigned activations of `bits` fit into 16 bits."""
    largest = int(codes.abs().max())
    return 2 * ((1 << bits) - 1) * largest <= _INT16_MAX


def _set(module: nn.Module, name: str, value: Tensor | None) -> None:
    # torch.export counts buffers that are None and then finds too few (2.13).
    if value is None:
        setattr(module, name, None)
    else:
        module.register_buffer(name, value)


def _per_row(weight: quantizer.Quantized) -> quantizer.Quantized:
    """The same with the scales and zero points of row blocks repeated for each row."""
    codes, scale, zero = weight
    repeats = codes.shape[0] // scale.shape[0]
    repeated = None if zero is None else zero.repeat_interleave(repeats, 0)
    return quantizer.Quantized(codes, scale.repeat_interleave(repeats, 0), repeated)
