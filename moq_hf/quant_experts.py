"""Experts of transformers: which parameters of a module hold their weights, and in what shape."""

from typing import cast

from torch import Tensor, nn

from .processes import shape_of
from .seams.transformers import experts_transposed


def experts_parameters(module: nn.Module) -> list[str]:
    """The names of a module's parameters that hold the weights of experts; none of any other module.

    They have three dimensions, in a module whose class says how they lie. Others (the
    shared experts of some families, those of Llama 4) are not known to be matrices of
    experts.
    """
    if experts_transposed(module) is None:
        return []
    return [
        name
        for name, value in module._parameters.items()
        if value is not None and value.dim() == 3
    ]


def matrix_of(module: nn.Module, name: str) -> tuple[int, int, int]:
    """How many experts a parameter holds, and the rows and columns of the matrix of each."""
    experts, first, second = shape_of(cast(Tensor, module._parameters[name]))
    if experts_transposed(module):
        return experts, second, first
    return experts, first, second
