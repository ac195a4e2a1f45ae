"""`QuantExperts`: experts of transformers, whose parameters of three dimensions a forward pass reads quantized.

transformers 5 keeps the experts of a layer in one module with two parameters,
`gate_up_proj` and `down_proj`. The module gets another class, as a linear layer does,
and a `LayerState` for each of the parameters. Every implementation of experts reads
`self.gate_up_proj`: inside a forward pass that is the quantized one. An `ExpertsWeight`
shows one parameter as a quantized layer, which is called by the parameter's full name.
"""

import functools
from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from .layer_state import LayerState
from .processes import shape_of
from .quant_linear import (
    QuantizedParameter,
    QuantLayer,
    QuantModule,
    base_class,
    recompute_in_backward,
)
from .seams.transformers import experts_transposed


class QuantExperts(QuantModule):
    """What quantized experts share: not constructed, `make_quantized` changes the class of existing modules.

    Attributes:
        moq_states: Parameter's name to how it is quantized; a parameter without an
            entry stays in float.
    """

    moq_states: dict[str, LayerState]

    def quantized_weights(self) -> list[QuantLayer]:
        """The parameters that are quantized."""
        return [ExpertsWeight(self, name) for name in self.moq_states]

    def state_of(self, name: str) -> LayerState | None:
        """How a parameter is quantized; None for one that stays in float."""
        return self.moq_states.get(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the experts do, which read the quantized weights."""
        with recompute_in_backward(self.quantized_weights()):
            return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; the quantized weights follow."""
        super().train(mode)
        for weight in self.quantized_weights():
            weight.train(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As with layers, the base class stands for one that has no importable name.
        base = base_class(type(self))
        return _new_experts, (base, tuple(self._parameters)), self.__getstate__()  # type: ignore[no-untyped-call]


class ExpertsWeight(QuantLayer):
    """One parameter of an experts module as a quantized layer; it holds none itself and is no part of the model's tree.

    Rows and groups are those of each expert's matrix; see `to_rows`. So no two experts
    share a scale.

    Args:
        experts: The module that has the parameter.
        attribute: The parameter's name there.
    """

    experts: QuantExperts

    def __init__(self, experts: QuantExperts, attribute: str) -> None:
        super().__init__()
        # Set in this way, the experts do not become a submodule of this one.
        self.__dict__["experts"] = experts
        self.attribute = attribute
        self.moq = experts.moq_states[attribute]
        self.kind = self.moq.kind

    def parameter(self, name: str) -> Tensor | None:
        """The float parameter of the experts, or what replaces it, whatever it is called here."""
        return self.experts.parameter(self.attribute)

    def quantized_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Quantize the weight as the experts read it, in any dtype."""
        return self.moq.quantized_weight(self.float_weight, dtype)

    def release(self) -> None:
        """Leave the parameter in float; the last one of a module gives it the class back that it had before."""
        experts = self.experts
        self.moq.passes.changes += 1
        del experts.moq_states[self.attribute]
        if not experts.moq_states:
            cast(nn.Module, experts).__class__ = base_class(type(experts))
            del experts.moq_states


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


def make_quantized(module: nn.Module, states: Mapping[str, LayerState]) -> None:
    """Make an experts module a quantized one.

    Args:
        module: Any module, plain or quantized before: what it had then is gone.
        states: Parameter's name to how it is quantized.
    """
    cast(QuantExperts, module).moq_states = dict(states)
    if not isinstance(module, QuantExperts):
        module.__class__ = _class_of(type(module), tuple(module._parameters))  # type: ignore[arg-type]


def quantized_in(name: str, module: nn.Module) -> dict[str, QuantLayer]:
    """The quantized layers in a module, by name: the module itself, or the parameters of its experts.

    Args:
        name: The module's name.
        module: Any module.
    """
    if isinstance(module, QuantExperts):
        return {
            f"{name}.{weight.attribute}".lstrip("."): weight
            for weight in module.quantized_weights()
        }
    return {name: module} if isinstance(module, QuantLayer) else {}


@functools.cache
def _class_of(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return type(
        f"Quant{base.__name__}",
        (QuantExperts, base),
        {name: QuantizedParameter(name) for name in names},
    )


def _new_experts(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _class_of(base, names)  # type: ignore[arg-type]
    return cls.__new__(cls)
