"""Layers that stand for quantized ones while torch.onnx.export traces a model: they emit integer weights.

| flavor | linear layer | embedding table |
| --- | --- | --- |
| weight-only | x times Cast(codes) * scale, which a runtime folds into a float weight when it loads | Gather, Cast, Mul |
| int8, static inputs | QuantizeLinear, MatMulIntegerToFloat | the same |
| int8, per_tensor | DynamicQuantizeLinear, MatMulIntegerToFloat | the same |
| int8, per_token | x / s, QuantizeLinear, MatMulIntegerToFloat, Mul | the same |
| nbits | MatMulNBits, which rounds its input in blocks | the same |
| qdq, static | QuantizeLinear, DequantizeLinear, MatMul with DequantizeLinear(codes), Add | the same |

A convolution is Conv with a weight of Cast(codes) * scale in every flavor.

ONNX Runtime turns DequantizeLinear before MatMul into MatMulNBits with accuracy level 4, which rounds activations to 8
bits: for the same answers as PyTorch the weight-only flavor spells the same formula as Cast and Mul.

MatMulNBits keeps weights of 2, 4 or 8 bits packed in memory, and with accuracy level 4 multiplies them with activations
that it rounds to 8 bits, with a scale for each block of a row. Its kernel for 2 bits has blocks of 32, 64 and 128.

MatMulIntegerToFloat is ONNX Runtime's own operator: the integer product, both scales and the bias in one pass. The
inputs of int8 are unsigned, since its fast kernels take unsigned activations and signed weights. Those of qdq are
signed, as OpenVINO wants them, and all its operators are ONNX's.

Instructions of x86 CPUs without VNNI add two products of unsigned activations and signed weights in 16 bits,
saturating. A file for them has unsigned weights wherever two such products do not fit, which is exact, and slower. A
file for CPUs with VNNI has signed weights, and `GUARD` at its output, which refuses to run where products saturate.
"""  # noqa: E501 - a table row cannot be broken

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..grid import InputGrid, InputScale
from ..inputs import static_scale, tensor_scale, token_scale
from ..quantizer import Quantized, dequantize, per_weight
from ..seams.transformers import convolve

Flavor = Literal["float", "weight-only", "int8", "nbits", "qdq"]
# What inputs of the int8 flavor may share a scale.
INT8_SCALES: tuple[InputScale, ...] = ("per_token", "per_tensor", "static")
# The CPUs that a file is made for.
Target = Literal["vnni", "avx2"]
TARGETS: tuple[Target, ...] = ("vnni", "avx2")
OPSET = 21
# The name of the operator that fails where products saturate.
GUARD = "made for CPUs with VNNI; export again with --cpu avx2"
_INT16_MAX = 2**15 - 1


@dataclass(frozen=True)
class Rounding:
    """How the inputs of linear layers are rounded.

    Attributes:
        grid: Their grid.
        ranges: For a static scale, the range of each layer's inputs by the layer's
            name.
        source: Where the ranges come from: "trained", "measured", "partly trained", or
            "" where there are none.
        target: The CPUs that the file is made for.
    """

    grid: InputGrid
    ranges: Mapping[str, float]
    source: str
    target: Target

    def __str__(self) -> str:
        ranges = f", ranges {self.source}" if self.source else ""
        # MatMulNBits chooses its products by itself.
        cpus = "" if self.grid.scale == "per_block" else f", for {self.target}"
        return f"{self.grid.scale}, {self.grid.bits} bits{ranges}{cpus}"


def target_of(cpu: str, architecture: str) -> Target:
    """The target that suits a machine: "vnni" where products of 8 bits are exact, as they are on ARM too.

    Args:
        cpu: The content of Linux' /proc/cpuinfo, which lists the processor's
            instructions.
        architecture: As `platform.machine` gives it.
    """
    exact = {"avx_vnni", "avx512_vnni", "amx_int8"}.intersection(cpu.split())
    return "vnni" if exact or architecture in ("aarch64", "arm64") else "avx2"


def target_here() -> Target:
    """The target that suits this machine."""
    path = Path("/proc/cpuinfo")
    cpu = path.read_text(encoding="utf-8") if path.exists() else ""
    return target_of(cpu, platform.machine())


def is_exact_signed(codes: Tensor, bits: int) -> bool:
    """Whether two products of these codes with unsigned activations of `bits` fit into 16 bits."""
    return 2 * ((1 << bits) - 1) * int(codes.abs().max()) <= _INT16_MAX


class _Stored(nn.Module):
    """A layer whose buffers become the initializers of the file."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, value in buffers.items():
            # torch.export counts buffers that are None and then finds too few (2.13).
            if value is None:
                setattr(self, name, None)
            else:
                self.register_buffer(name, value.detach().contiguous())

    def _floats(self) -> Tensor:
        numbers = self.codes.to(torch.float32)
        if self.zero_point is not None:
            numbers = numbers - self.zero_point.to(torch.float32)
        return numbers * self.scale

    def _plus_bias(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product + self.bias


class _StoredLinear(_Stored):
    """A linear layer: codes `[in_features, out_features]`."""

    @property
    def weight(self) -> Tensor:
        """The weight `[out_features, in_features]`, float32, for a model's code that reads it, as T5's does."""
        return self._floats().T


class OnnxLinear(_StoredLinear):
    """A linear layer with float activations.

    Where rows have several groups, codes are `[groups, in_features / groups,
    out_features]`.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero points
            for each row.
        bias: `[out_features]`, or None.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        codes, scale, zero = weight
        rows, groups = scale.shape
        zero = None if zero is None else zero.to(torch.int8).T[:, None].squeeze(0)
        super().__init__(
            codes=codes.to(torch.int8).T.reshape(groups, -1, rows).squeeze(0),
            scale=scale.T[:, None].squeeze(0),
            zero_point=zero,
            bias=bias,
        )

    def _floats(self) -> Tensor:
        return super()._floats().flatten(0, -2)

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]` times the weight, plus the bias."""
        return self._plus_bias(torch.matmul(input, self._floats()))


class OnnxConvolution(_Stored):
    """A convolution with float activations.

    Args:
        weight: Signed codes `[out_channels, in_channels / groups * kernel]`, their
            scales and zero points, one per row.
        layer: The convolution: its own weight is not used.
    """

    def __init__(self, weight: Quantized, layer: nn.Module) -> None:
        codes, scale, zero = weight
        assert isinstance(layer, nn.Conv1d | nn.Conv2d)
        codes = codes.view(len(codes), -1, *layer.kernel_size)
        # A scale for each output channel, in the shape that Mul wants.
        each = [-1, *[1] * (codes.dim() - 1)]
        zero = None if zero is None else zero.view(each).to(torch.int8)
        super().__init__(
            codes=codes.to(torch.int8), scale=scale.view(each), zero_point=zero
        )
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """The weight, float32, for the model's code that asks for its dtype too."""
        return self._floats()

    def forward(self, input: Tensor) -> Tensor:
        """`input` convolved with the weight, plus the bias."""
        return convolve(self.layer, input, self.weight)


class OnnxEmbedding(_Stored):
    """An embedding table of integers: rows are dequantized after they are looked up.

    Codes of up to 4 bits lie in the two halves of a byte, as MatMulNBits has them.

    Args:
        weight: Signed codes `[rows, columns]`, and scales and zero points per row or group in
            a row.
        bits: Bits of the codes.
        factor: What rows are multiplied with.
    """

    def __init__(self, weight: Quantized, bits: int, factor: float = 1.0) -> None:
        codes = weight.codes
        halved = bits <= 4 and codes.shape[1] % 2 == 0
        codes = _packed(codes + 8, 4) if halved else codes.to(torch.int8)
        super().__init__(codes=codes, scale=weight.scale, zero_point=weight.zero_point)
        self.halved = halved
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:
        """The rows `[..., columns]` for the indices `input` `[...]`."""
        codes, scale = (F.embedding(input, part) for part in (self.codes, self.scale))
        zero = self.zero_point
        zero = None if zero is None else F.embedding(input, zero)
        rows = self._dequantized(codes, scale, zero)
        return rows if self.factor == 1 else rows * self.factor

    @property
    def weight(self) -> Tensor:
        """The whole table, float32, for a model's code that reads it."""
        return self._dequantized(self.codes, self.scale, self.zero_point)

    def _dequantized(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None
    ) -> Tensor:
        codes = codes.to(torch.float32)
        if self.halved:
            # OpenVINO computes something else with BitShift.
            high = (codes / 16).floor()
            codes = torch.stack((codes - 16 * high, high), -1).flatten(-2) - 8
        groups = codes.reshape(*scale.shape, -1)
        if zero_point is not None:
            groups = groups - zero_point.unsqueeze(-1)
        return (groups * scale.unsqueeze(-1)).flatten(-2)


class OnnxTiedLinear(_Stored):
    """An output head that shares its weight with an embedding table, in whose integers it lies.

    Its input is a float, as in training. MatMulNBits multiplies floats with codes of 4
    bits two to three times as fast as MatMul does for one token, and with those of 8 bits
    ten times as slowly (onnxruntime 1.31), which therefore become floats at loading.

    Args:
        table: The table.
        bias: `[rows]`, or None.
        packed: Whether codes of 4 bits stay packed in memory.
    """

    def __init__(self, table: OnnxEmbedding, bias: Tensor | None, packed: bool) -> None:
        super().__init__(bias=bias)
        self.table = table
        self.columns = 2 * table.codes.shape[1]
        group = self.columns // table.scale.shape[1]
        fitting = [size for size in _BLOCKS if group % size == 0]
        takes_codes = packed and table.halved and table.zero_point is None
        self.block = max(fitting) if takes_codes and fitting else None

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., columns]` times the table, plus the bias."""
        if self.block is None:
            return self._plus_bias(input @ self.table.weight.T)
        blocks = self.columns // self.block
        codes = self.table.codes.view(-1, blocks, self.block // 2)
        scales = self.table.scale.unsqueeze(-1)
        scale = scales.expand(-1, -1, blocks // scales.shape[1]).flatten()
        product = _matmul_nbits(input, codes, (scale,), self.columns, 4, 0)
        return self._plus_bias(product)


class OnnxInt8Linear(_StoredLinear):
    """A linear layer that rounds its input, and multiplies unsigned activations with integer weights.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero
            points, one per row.
        bias: `[out_features]`, or None.
        grid: The grid of the input.
        largest: The range of a static scale.
        signed: Whether the weights are stored signed.
    """

    step: Tensor
    middle: Tensor
    least: Tensor
    most: Tensor

    def __init__(
        self,
        weight: Quantized,
        bias: Tensor | None,
        grid: InputGrid,
        largest: float | None,
        signed: bool,
    ) -> None:
        codes, scale, zero = weight
        shift = 0 if signed else 128
        dtype = torch.int8 if signed else torch.uint8
        zero = torch.zeros((), dtype=torch.int32) if zero is None else zero.flatten()
        bits = grid.bits
        # The value of one code of the input; that of a token's scale is multiplied in
        # later.
        step = torch.ones(())
        if largest is not None:
            step = static_scale(torch.tensor(largest), bits)
        super().__init__(
            codes=(codes.T + shift).to(dtype),
            scale=scale[:, 0],
            zero_point=(zero + shift).to(dtype),
            bias=bias,
            step=step,
            middle=torch.tensor(1 << bits - 1, dtype=torch.uint8),
            least=torch.tensor(0, dtype=torch.uint8),
            most=torch.tensor((1 << bits) - 1, dtype=torch.uint8),
        )
        self.grid = grid

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        bits = self.grid.bits
        step = self.step
        zero = self.middle
        if self.grid.scale == "per_token":
            scale = token_scale(input, bits)
            codes = self._codes(input / scale, step, zero)
            product = self._product(codes, step, zero) * scale
            return self._plus_bias(product)
        if self.grid.scale == "per_tensor" and bits == 8:
            codes, step, zero = torch.onnx.ops.symbolic_multi_out(
                "DynamicQuantizeLinear",
                (input,),
                dtypes=(torch.uint8, torch.float32, torch.uint8),
                shapes=(input.shape, (), ()),
                version=OPSET,
            )
            return self._product(codes, step, zero, self.bias)
        if self.grid.scale == "per_tensor":
            step, middle = tensor_scale(input, bits)
            zero = middle.to(torch.uint8)
        codes = self._codes(input, step, zero)
        return self._product(codes, step, zero, self.bias)

    def _codes(self, input: Tensor, step: Tensor, zero: Tensor) -> Tensor:
        codes = _quantize_linear(input, step, zero)
        if self.grid.bits == 8:
            # The operator clips where a byte ends.
            return codes
        limits = (codes, self.least, self.most)
        return _emit("Clip", limits, torch.uint8, codes.shape)

    def _product(
        self, codes: Tensor, step: Tensor, zero: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        inputs = [codes, self.codes, step, self.scale, zero, self.zero_point]
        if bias is not None:
            inputs.append(bias)
        shape = (*codes.shape[:-1], self.codes.shape[1])
        return _emit(
            "com.microsoft::MatMulIntegerToFloat",
            inputs,
            torch.float32,
            shape,
            version=1,
        )


# Accuracy level of MatMulNBits that multiplies with activations of 8 bits.
_INT8_ACTIVATIONS = 4
# Sizes of its blocks.
_BLOCKS = (16, 32, 64, 128, 256)


class OnnxNBitsLinear(_Stored):
    """A linear layer whose codes of 2, 4 or 8 bits stay packed in memory, and whose input is rounded in blocks.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero
            points.
        bias: `[out_features]`, or None.
        bits: Of the codes, up to 8.
        block: Columns that share a scale in the file; whole blocks share the scales of
            `weight`.
    """

    def __init__(
        self, weight: Quantized, bias: Tensor | None, bits: int, block: int
    ) -> None:
        codes, scale, zero = weight
        rows, self.columns = codes.shape
        self.bits = 2 if bits <= 2 else 4 if bits <= 4 else 8
        self.block = block
        blocks = -(-self.columns // block)
        middle = 1 << self.bits - 1
        unsigned = F.pad(codes, (0, blocks * block - self.columns)) + middle
        if zero is not None:
            zero = per_weight(zero, (rows, blocks)) + middle
            zero = _packed(zero, self.bits).flatten()
        super().__init__(
            codes=_packed(unsigned, self.bits).view(rows, blocks, -1),
            scale=per_weight(scale, (rows, blocks)).flatten(),
            zero_point=zero,
            bias=bias,
        )
        self.weights = weight

    @property
    def weight(self) -> Tensor:
        """The weight `[out_features, in_features]`, float32, for a model's code that reads it, as T5's does."""
        return dequantize(*self.weights)

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        product = _matmul_nbits(
            input,
            self.codes,
            (self.scale, self.zero_point),
            self.columns,
            self.bits,
            _INT8_ACTIVATIONS,
        )
        return self._plus_bias(product)


def _matmul_nbits(
    input: Tensor,
    codes: Tensor,
    grid: Sequence[Tensor | None],
    columns: int,
    bits: int,
    level: int,
) -> Tensor:
    """Multiply `input` `[..., columns]` with codes `[rows, blocks, bytes]`; `grid` is their scales and zero points."""
    return _emit(
        "com.microsoft::MatMulNBits",
        (input, codes, *grid),
        torch.float32,
        (*input.shape[:-1], len(codes)),
        version=1,
        K=columns,
        N=len(codes),
        bits=bits,
        block_size=codes.shape[-1] * 8 // bits,
        accuracy_level=level,
    )


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Put unsigned codes `[rows, columns]` into bytes, the first ones into the lowest bits."""
    count = 8 // bits
    padded = F.pad(codes, (0, -codes.shape[1] % count)).int()
    shifts = torch.arange(count, dtype=torch.int32) * bits
    parts = padded.reshape(len(padded), -1, count) << shifts
    return parts.sum(-1).to(torch.uint8)


class OnnxQdqLinear(_StoredLinear):
    """A linear layer whose input and weight go through pairs of QuantizeLinear and DequantizeLinear.

    Args:
        weight: Signed codes `[out_features, in_features]`, their scales and zero
            points, one per row.
        bias: `[out_features]`, or None.
        largest: The range of the input: codes have 8 bits.
    """

    zero_point: Tensor
    step: Tensor
    middle: Tensor

    def __init__(self, weight: Quantized, bias: Tensor | None, largest: float) -> None:
        codes, scale, zero = weight
        zero = torch.zeros_like(scale) if zero is None else zero
        super().__init__(
            codes=codes.T.to(torch.int8),
            scale=scale[:, 0],
            zero_point=zero[:, 0].to(torch.int8),
            bias=bias,
            step=static_scale(torch.tensor(largest), 8),
            middle=torch.tensor(0, dtype=torch.int8),
        )

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]`, rounded, times the weight, plus the bias."""
        codes = _quantize_linear(input, self.step, self.middle)
        weight = _dequantize_linear(self.codes, self.scale, self.zero_point, axis=1)
        product = torch.matmul(
            _dequantize_linear(codes, self.step, self.middle), weight
        )
        return self._plus_bias(product)


def _emit(
    op: str,
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
    shape: Sequence[int],
    version: int = OPSET,
    **more: Any,
) -> Tensor:
    """Add an operator of ONNX to the graph that is traced."""
    return torch.onnx.ops.symbolic(
        op, inputs, more, dtype=dtype, shape=shape, version=version
    )


def _quantize_linear(input: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    return _emit("QuantizeLinear", (input, step, zero), zero.dtype, input.shape)


def _dequantize_linear(
    codes: Tensor, scale: Tensor, zero: Tensor, **where: int
) -> Tensor:
    return _emit(
        "DequantizeLinear", (codes, scale, zero), torch.float32, codes.shape, **where
    )
