"""Lays out the weight of a layer as the matrix to quantize, with a row for each output, `[rows, columns]`."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# "conv1d" is GPT-2's transposed linear layer, "conv" a convolution, "experts" a parameter
# `[experts, rows, columns]`, and "experts_t" one `[experts, columns, rows]`.
Kind = Literal["linear", "conv1d", "embedding", "conv", "experts", "experts_t"]


def to_rows(weight: Tensor, kind: str) -> Tensor:
    """The matrix `[rows, columns]` of a weight: a view, or a copy.

    It is a copy for "experts_t", and for convolutions that are not contiguous. A
    convolution has a row for each output channel, `[out_channels, in_channels / groups *
    kernel]`. The matrices of experts are stacked along rows.

    >>> import torch
    >>> to_rows(torch.ones(3, 2), "conv1d").shape, to_rows(torch.ones(3, 2, 5, 5), "conv").shape
    (torch.Size([2, 3]), torch.Size([3, 50]))
    >>> to_rows(torch.ones(4, 3, 2), "experts_t").shape
    torch.Size([8, 3])
    """
    if kind == "conv1d":
        return weight.t()
    if is_experts(kind):
        return (weight.transpose(1, 2) if kind == "experts_t" else weight).flatten(0, 1)
    return weight.flatten(1)


def matrix_shape(shape: Sequence[int], kind: str) -> tuple[int, int]:
    """Rows and columns of the matrix of a weight with the given shape.

    >>> matrix_shape([4, 3, 2], "experts_t"), matrix_shape([3, 2], "conv1d"), matrix_shape([3, 2, 5, 5], "conv")
    ((8, 3), (2, 3), (3, 50))
    """
    rows, columns = to_rows(torch.empty(tuple(shape), device="meta"), kind).shape
    return rows, columns


def from_rows(matrix: Tensor, kind: str, shape: Sequence[int]) -> Tensor:
    """The weight in the given shape whose matrix this is: a view, or the matrix itself.

    >>> import torch
    >>> from_rows(torch.ones(2, 3), "conv1d", [3, 2]).shape
    torch.Size([3, 2])
    """
    if kind == "experts_t":
        return matrix.view(shape[0], shape[2], shape[1]).transpose(1, 2)
    if kind == "conv1d":
        return matrix.t()
    return matrix if len(shape) == 2 else matrix.view(*shape)


def is_experts(kind: str) -> bool:
    """True if a weight holds the matrices of several experts.

    >>> is_experts("experts_t"), is_experts("linear")
    (True, False)
    """
    return kind.startswith("experts")


def is_in_rows(kind: str) -> bool:
    """True if the matrix of a weight has the memory layout of the weight.

    >>> is_in_rows("conv1d"), is_in_rows("experts")
    (False, True)
    """
    return kind not in ("conv1d", "experts_t")


def parameter_of(name: str, kind: str) -> str:
    """The name of a quantized layer's weight in the state dict; experts have the name of their parameter.

    >>> parameter_of("dense", "linear"), parameter_of("mlp.experts.down_proj", "experts")
    ('dense.weight', 'mlp.experts.down_proj')
    """
    return name if is_experts(kind) else f"{name}.weight"
