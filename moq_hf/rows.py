"""How the weight of a layer is laid out as the matrix that is quantized: a row for each output, `[rows, columns]`."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

# What a quantized layer is: "conv1d" is GPT-2's transposed linear layer, "conv" a convolution.
Kind = Literal["linear", "conv1d", "embedding", "conv"]
KINDS: tuple[Kind, ...] = ("linear", "conv1d", "embedding", "conv")


def to_rows(weight: Tensor, kind: str) -> Tensor:
    """The matrix `[rows, columns]` of a weight: a view, or a copy of a convolution's weight that is not contiguous.

    A convolution has a row for each output channel, `[out_channels, in_channels / groups * kernel]`.

    >>> import torch
    >>> to_rows(torch.ones(3, 2), "conv1d").shape
    torch.Size([2, 3])
    >>> to_rows(torch.ones(3, 2, 5, 5), "conv").shape
    torch.Size([3, 50])
    """
    if kind == "conv":
        return weight.flatten(1)
    return weight.t() if kind == "conv1d" else weight


def from_rows(matrix: Tensor, kind: str, shape: Sequence[int]) -> Tensor:
    """The weight of a shape whose matrix this is: a view.

    >>> import torch
    >>> from_rows(torch.ones(2, 3), "conv1d", [3, 2]).shape
    torch.Size([3, 2])
    """
    return matrix.t() if kind == "conv1d" else matrix.view(*shape)
