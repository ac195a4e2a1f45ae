"""The grids that every path is held to the definition on."""

import itertools
from typing import Any

import torch

from moq_hf import quantizer

LAYOUTS: list[dict[str, Any]] = [{"groups": 1}, {"groups": 3}, {"groups": "per_channel"}, {"group_size": 11}]
MODES = [
    (bits, symmetric, rounding)
    for bits, symmetric, rounding in itertools.product((1, 2, 3, 8, 16), (True, False), ("nearest", "stochastic"))
    if quantizer.is_uniform(bits, symmetric) or (symmetric and rounding == "nearest")
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, the sign of zeros too; any NaN equals any other."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool(equal.all())
