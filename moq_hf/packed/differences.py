"""Compares two state dicts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """A tensor that is not the same in two state dicts.

    Attributes:
        name: Its name.
        what: "missing" from the first one, "unexpected" in it, or another "shape" or
            "value".
        largest: The largest difference of values; infinite if one of them is infinite
            or NaN, or if there are not two values.
    """

    name: str
    what: Literal["missing", "unexpected", "shape", "value"]
    largest: float = float("inf")


def differences(
    found: Iterable[tuple[str, Tensor]], expected: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """Compare a state dict with another one, in the dtypes of the second.

    Args:
        found: Names and tensors of the first; each is needed only until the next one.
        expected: The second state dict.

    Yields:
        The differences in the order of `found`, and those that are missing last.

    >>> found = {"a": torch.tensor([1.0]), "b": torch.tensor([1.5]), "c": torch.tensor([2.0])}
    >>> expected = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0]), "d": torch.tensor([2.0])}
    >>> for difference in differences(found.items(), expected):
    ...     print(*difference)
    b value 0.5
    c unexpected inf
    d missing inf
    """
    missing = dict.fromkeys(expected)
    for name, tensor in found:
        if name not in expected:
            yield Difference(name, "unexpected")
            continue
        del missing[name]
        other = expected[name]
        if tensor.shape != other.shape:
            yield Difference(name, "shape")
            continue
        largest = distance(tensor.to(other.dtype), other)
        if largest:
            yield Difference(name, "value", largest)
    for name in missing:
        yield Difference(name, "missing")


def distance(first: Tensor, second: Tensor) -> float:
    """The largest difference between two tensors of one shape; infinities and NaN in both count as equal.

    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
    0.5
    """
    if torch.equal(first, second) or not first.numel():
        return 0.0
    # Masked scores are infinite in both; NaN in both is the same output.
    same = (first == second) | (first.isnan() & second.isnan())
    difference = (first.double() - second.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=float("inf")).max().item())
