"""What the comparer of state dicts reports; its docstring has missing, unexpected and other values."""

import pytest
import torch

from moq_hf.packed.differences import Difference, differences


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float16)),
        (torch.tensor([float("inf"), float("nan")]), torch.tensor([float("inf"), float("nan")])),
        (torch.empty(0), torch.empty(0)),
    ],
    ids=["dtype", "no numbers", "empty"],
)
def test_what_is_equal_in_the_dtype_of_the_second(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert list(differences([("a", found)], {"a": expected})) == []


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        (torch.ones(2, 1), Difference("a", "shape")),
        (torch.tensor([1.0, float("nan")]), Difference("a", "value")),
        (torch.tensor([1.0, 3.0]), Difference("a", "value", 2.0)),
    ],
)
def test_what_differs(found: torch.Tensor, difference: Difference) -> None:
    assert list(differences([("a", found)], {"a": torch.ones(2)})) == [difference]


def test_each_tensor_is_asked_for_when_its_turn_comes() -> None:
    asked = []

    def found() -> object:
        for name in "abc":
            asked.append(name)
            yield name, torch.zeros(1)

    first = next(differences(found(), {"a": torch.zeros(1), "b": torch.ones(1)}))  # type: ignore[arg-type]
    assert first == ("b", "value", 1.0) and asked == ["a", "b"]
