"""Experts of transformers: the parameters of a module that hold their weights, and the shapes of these."""

from typing import cast

from torch import Tensor, nn

from .processes import shape_of
from .seams.transformers import experts_transposed


def experts_parameters(module: nn.Module) -> list[str]:
    """The names of a module's parameters that hold the weights of experts; empty for any other module.

    They have three dimensions, in a module whose class says how they are laid out. Others
    (the shared experts of some families, those of Llama 4) are not known to be matrices
    of experts.
    """
    if experts_transposed(module) is None:
        return []
    return [
        name
        for name, value in module._parameters.items()
        if value is not None and value.dim() == 3
    ]


def matrix_of(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The number of experts in a parameter, and the rows and columns of each one's matrix."""
    experts, first, second = shape_of(cast(Tensor, module._parameters[name]))
    if experts_transposed(module):
        return experts, second, first
    return experts, first, second
