"""Clipping ratios in a saved state: the index of each group's ratio in `quantizer.RATIOS`, one letter each."""

import torch
from torch import Tensor

from ..errors import MoQError, show
from ..quantizer import RATIOS

# A is the first of them, 1.00, then B 0.95, ... Q 0.20.
_LETTERS = "ABCDEFGHIJKLMNOPQ"


def encode(ratio: Tensor) -> str:
    """Clipping ratios as text.

    Args:
        ratio: float32 of any shape, each one of `quantizer.RATIOS`.

    Raises:
        ValueError: A ratio is none of them.

    >>> encode(torch.tensor([[1.0], [0.95], [0.2]]))
    'ABQ'
    """
    letters = {value: letter for value, letter in zip(_values(), _LETTERS, strict=True)}
    strange = set(ratio.flatten().tolist()) - letters.keys()
    if strange:
        raise ValueError(f"no clipping ratios of a search: {sorted(strange)}")
    return "".join(letters[value] for value in ratio.flatten().tolist())


def decode(name: str, text: str, shape: tuple[int, int]) -> Tensor:
    """The inverse of `encode`: float32 of a shape, on the CPU.

    Args:
        name: The layer's, for the error.
        text: One letter for each group.
        shape: Shape of the layer's scale.

    Raises:
        MoQError: The text is not that of so many ratios.

    >>> decode("dense", "ABQ", (3, 1)).tolist()
    [[1.0], [0.949999988079071], [0.20000000298023224]]
    """
    if len(text) != shape[0] * shape[1] or set(text) - set(_LETTERS):
        raise MoQError(
            f"the checkpoint's MoQ state is damaged: ratios.{name} must be {shape[0] * shape[1]} clipping ratios, "
            f"letters from {_LETTERS[0]} to {_LETTERS[-1]}, not {show(text)}"
        )
    indices = torch.tensor([_LETTERS.index(letter) for letter in text], device="cpu")
    return torch.tensor(RATIOS, dtype=torch.float32, device="cpu")[indices].view(shape)


def _values() -> list[float]:
    """The ratios as float32 has them."""
    values: list[float] = torch.tensor(RATIOS, dtype=torch.float32, device="cpu").tolist()
    return values
