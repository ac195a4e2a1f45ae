"""Linear layers that multiply integers, while torch.onnx.export traces a model: the int8 and the qdq flavor.

| flavor | scale of the inputs | what is emitted |
| --- | --- | --- |
| int8 | static | QuantizeLinear, MatMulIntegerToFloat |
| int8 | per_tensor | DynamicQuantizeLinear, MatMulIntegerToFloat |
| int8 | per_token | x / s, QuantizeLinear, MatMulIntegerToFloat, Mul |
| qdq | static | QuantizeLinear, DequantizeLinear, MatMul with DequantizeLinear(codes), Add |

MatMulIntegerToFloat is ONNX Runtime's own operator: the integer product, both scales and the bias in one pass. The
inputs of int8 are unsigned, since its fast kernels take unsigned activations and signed weights. Those of qdq are
signed, as OpenVINO wants them, and all its operators are ONNX's.

Instructions of x86 CPUs without VNNI add two products of unsigned activations and signed weights in 16 bits,
saturating. A file for them has unsigned weights wherever two such products do not fit, which is exact, and slower. A
file for CPUs with VNNI has signed weights, and `GUARD` at its output, which refuses to run where products saturate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .. import quantizer
from ..grid import InputGrid
from ..inputs import static_scale, tensor_scale, token_scale
from .environment import machine
from .onnx_layers import OPSET, per_row, set_buffer

# The CPUs that a file is made for.
Target = Literal["vnni", "avx2"]
TARGETS: tuple[Target, ...] = ("vnni", "avx2")
# The operator that fails where products saturate.
GUARD = "made for CPUs with VNNI; export again with --cpu avx2"

_INT16_MAX = 2**15 - 1


@dataclass(frozen=True)
class Rounding:
    """How the inputs of linear layers are rounded.

    Attributes:
        grid: Their grid.
        ranges: Of a static scale: the range of each layer's inputs, by the layer's name.
        source: Where the ranges are from: "trained", "measured", "partly trained", or "" where there are none.
        target: The CPUs that the file is made for.
    """

    grid: InputGrid
    ranges: Mapping[str, float]
    source: str
    target: Target

    def range_of(self, name: str) -> Tensor | None:
        """The range of a layer's inputs, a float32 scalar; None where the inputs themselves say it."""
        return torch.tensor(self.ranges[name], dtype=torch.float32) if self.grid.scale == "static" else None

    def signed(self, codes: Tensor) -> bool:
        """Whether weights of these codes are stored signed."""
        return self.target == "vnni" or is_exact_signed(codes, self.grid.bits)


def target_here() -> Target:
    """What suits this machine: "vnni" where products of 8 bits are exact, which they are on ARM too."""
    known = machine()
    instructions = known["instructions"].split()
    exact = any("vnni" in name or name == "amx_int8" for name in instructions)
    return "vnni" if exact or known["architecture"] in ("aarch64", "arm64") else "avx2"


def is_exact_signed(codes: Tensor, bits: int) -> bool:
    """Whether two products of these codes with unsigned activations of `bits` fit into 16 bits."""
    largest = int(codes.abs().max())
    return 2 * ((1 << bits) - 1) * largest <= _INT16_MAX


class OnnxInt8Linear(nn.Module):
    """A linear layer that rounds its input, and multiplies unsigned activations with integer weights.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero points, one per row or row block.
        bias: `[out_features]`, or None.
        grid: Of the input.
        largest: The range of a static scale, a float32 scalar.
        signed: Whether the weights are stored signed.
    """

    def __init__(
        self, weight: quantizer.Quantized, bias: Tensor | None, grid: InputGrid, largest: Tensor | None, signed: bool
    ) -> None:
        super().__init__()
        codes, scale, zero = per_row(weight)
        self.grid = grid
        self.signed = signed
        shift, dtype = (0, torch.int8) if signed else (128, torch.uint8)
        zero = torch.zeros((), dtype=torch.int32) if zero is None else zero.flatten()
        bits = grid.bits
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor
        self.bias: Tensor | None
        self.step: Tensor
        self.middle: Tensor
        self.least: Tensor
        self.most: Tensor
        self.register_buffer("codes", (codes.T + shift).to(dtype).contiguous())
        self.register_buffer("scale", scale[:, 0].contiguous())
        self.register_buffer("zero_point", (zero + shift).to(dtype))
        set_buffer(self, "bias", None if bias is None else bias.detach())
        # What a code of the input is worth: of a token's it is multiplied with later.
        self.register_buffer("step", torch.ones(()) if largest is None else static_scale(largest, bits))
        self.register_buffer("middle", torch.tensor(1 << bits - 1, dtype=torch.uint8))
        self.register_buffer("least", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("most", torch.tensor((1 << bits) - 1, dtype=torch.uint8))

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        if self.grid.scale == "per_token":
            scale = token_scale(input, self.grid.bits)
            product = self._product(self._quantized(input / scale, self.step, self.middle), self.step, self.middle)
            return product * scale if self.bias is None else product * scale + self.bias
        if self.grid.scale == "static":
            codes, step, zero = self._quantized(input, self.step, self.middle), self.step, self.middle
        elif self.grid.bits == 8:
            codes, step, zero = torch.onnx.ops.symbolic_multi_out(
                "DynamicQuantizeLinear",
                (input,),
                dtypes=(torch.uint8, torch.float32, torch.uint8),
                shapes=(input.shape, (), ()),
                version=OPSET,
            )
        else:
            step, middle = tensor_scale(input, self.grid.bits)
            zero = middle.to(torch.uint8)
            codes = self._quantized(input, step, zero)
        return self._product(codes, step, zero, self.bias)

    def _quantized(self, input: Tensor, step: Tensor, zero: Tensor) -> Tensor:
        codes = torch.onnx.ops.symbolic(
            "QuantizeLinear", (input, step, zero), dtype=torch.uint8, shape=input.shape, version=OPSET
        )
        if self.grid.bits == 8 or self.grid.scale == "per_token":
            return codes
        limits = (codes, self.least, self.most)
        return torch.onnx.ops.symbolic("Clip", limits, dtype=torch.uint8, shape=input.shape, version=OPSET)

    def _product(self, codes: Tensor, step: Tensor, zero: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = [codes, self.codes, step, self.scale, zero, self.zero_point]
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulIntegerToFloat",
            parts if bias is None else [*parts, bias],
            dtype=torch.float32,
            shape=(*codes.shape[:-1], self.codes.shape[1]),
            version=1,
        )


class OnnxQdqLinear(nn.Module):
    """A linear layer whose input and weight go through pairs of QuantizeLinear and DequantizeLinear.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero points, one per row or row block.
        bias: `[out_features]`, or None.
        largest: The range of the input, a float32 scalar: codes have 8 bits.
    """

    def __init__(self, weight: quantizer.Quantized, bias: Tensor | None, largest: Tensor) -> None:
        super().__init__()
        codes, scale, zero = per_row(weight)
        zero = torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor
        self.bias: Tensor | None
        self.step: Tensor
        self.middle: Tensor
        self.register_buffer("codes", codes.T.to(torch.int8).contiguous())
        self.register_buffer("scale", scale[:, 0].contiguous())
        self.register_buffer("zero_point", zero.flatten().to(torch.int8))
        set_buffer(self, "bias", None if bias is None else bias.detach())
        self.register_buffer("step", static_scale(largest, 8))
        self.register_buffer("middle", torch.tensor(0, dtype=torch.int8))

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        pair = (self.step, self.middle)
        codes = torch.onnx.ops.symbolic(
            "QuantizeLinear", (input, *pair), dtype=torch.int8, shape=input.shape, version=OPSET
        )
        rounded = torch.onnx.ops.symbolic(
            "DequantizeLinear", (codes, *pair), dtype=torch.float32, shape=input.shape, version=OPSET
        )
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (self.codes, self.scale, self.zero_point),
            {"axis": 1},
            dtype=torch.float32,
            shape=self.codes.shape,
            version=OPSET,
        )
        product = torch.matmul(rounded, weight)
        return product if self.bias is None else product + self.bias
