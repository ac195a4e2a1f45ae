"""`QuantExperts`: experts of transformers, whose parameters of three dimensions a forward pass reads quantized.

transformers 5 keeps the experts of a layer in one module with two parameters, `gate_up_proj` and `down_proj`. The
module gets another class, as a linear layer does. Each of its parameters then has an `ExpertsWeight`, which does what
a quantized layer does and is called by the parameter's full name. Every implementation of experts reads
`self.gate_up_proj`: inside a forward pass that is the quantized one.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from .layer_state import LayerState
from .processes import shape_of
from .quant_linear import QuantLayer, recompute_in_backward
from .seams.transformers import experts_transposed
from .weight_matrix import Kind


class ExpertsWeight(QuantLayer):
    """One parameter of an experts module as a quantized layer; it holds none itself and is no part of the model's tree.

    Rows and groups are those of each expert's matrix; see `to_rows`. So no two experts share a scale.

    Args:
        experts: The module that has the parameter.
        attribute: The parameter's name there.
        state: How it is quantized.
    """

    kind: ClassVar[Kind] = "experts"

    def __init__(self, experts: "QuantExperts", attribute: str, state: LayerState) -> None:
        super().__init__()
        # Each holding the other would keep a model's memory until the garbage collector comes.
        self._experts = weakref.ref(experts)
        self._attribute = attribute
        self.moq = state
        self.training = experts.training

    def parameter(self) -> Tensor | None:
        """The float parameter, or what stands in its place; None where there is none any more."""
        experts = self._experts()
        return None if experts is None else experts.own(self._attribute)

    def release(self) -> None:
        """Leave the parameter in float; the last one of a module gives it the class back that it had before."""
        experts = self._experts()
        if experts is None or experts.moq_weights.pop(self._attribute, None) is None or experts.moq_weights:
            return
        del experts.moq_weights
        cast(nn.Module, experts).__class__ = base_of(type(experts))


class _Transposed(ExpertsWeight):
    """The same for a parameter `[experts, columns, rows]`, as GPT-OSS has them."""

    kind = "experts_t"


class QuantExperts(nn.Module):
    """What quantized experts share: not constructed, `make_quantized` changes the class of existing modules.

    Attributes:
        moq_weights: Parameter's name to its `ExpertsWeight`; a parameter without one stays in float.
    """

    moq_weights: dict[str, ExpertsWeight]

    def own(self, name: str) -> Tensor | None:
        """The float parameter of a name, or what stands in its place: of a replica, of `torch.func`, of FSDP2."""
        value = self._parameters.get(name)
        return self.__dict__.get(name) if value is None else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the experts, which read the quantized weights."""
        with recompute_in_backward(self.moq_weights.values()):
            return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; the quantized weights follow."""
        super().train(mode)
        for weight in self.moq_weights.values():
            weight.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for weight in self.moq_weights.values():
            weight.weight_changed()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for weight in self.moq_weights.values():
            weight.weight_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "moq_weights": {name: weight.moq for name, weight in self.moq_weights.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "moq_weights": {}})  # type: ignore[no-untyped-call]
        _give(self, state["moq_weights"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As with layers, the base class stands for one that has no importable name.
        return _new_experts, (base_of(type(self)), tuple(_readers(type(self)))), self.__getstate__()


class _Reader:
    """What stands in the class in a parameter's place: reading it in a forward pass gives the quantized copy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, experts: QuantExperts | None, owner: type | None = None) -> Any:
        if experts is None:
            return self
        weight = experts.moq_weights.get(self.name)
        if weight is not None:
            if not experts.__dict__.get("_is_replica", False):
                return weight.weight
            # A replica has a tensor of its own, and shares the state of the module that it was copied from.
            weight = type(weight)(experts, self.name, weight.moq)
            weight.__dict__["_is_replica"] = True
            return weight.weight
        value = experts.own(self.name)
        if value is None:
            raise AttributeError(f"{type(experts).__name__!r} object has no attribute {self.name!r}")
        return value

    def __set__(self, experts: QuantExperts, value: Any) -> None:
        # Parameters never come here: nn.Module registers them. What comes is the tensor of a replica.
        experts.__dict__[self.name] = value

    def __delete__(self, experts: QuantExperts) -> None:
        if self.name not in experts.__dict__:
            raise AttributeError(f"{type(experts).__name__!r} object has no attribute {self.name!r}")
        del experts.__dict__[self.name]


def experts_parameters(module: nn.Module) -> list[str]:
    """The names of a module's parameters that hold the weights of experts; none of any other module.

    They have three dimensions, in a module whose class says how they lie. Others (the shared experts of some families,
    those of Llama 4) are not known to be matrices of experts.
    """
    if experts_transposed(module) is None:
        return []
    return [
        name
        for name, value in module._parameters.items()
        if value is not None and value.dim() == 3 and value.is_floating_point()
    ]


def matrix_of(module: nn.Module, name: str) -> tuple[int, int, int]:
    """How many experts a parameter holds, and the rows and columns of the matrix of each."""
    experts, first, second = shape_of(cast(Tensor, module._parameters[name]))
    return (experts, second, first) if experts_transposed(module) else (experts, first, second)


def make_quantized(module: nn.Module, states: Mapping[str, LayerState]) -> dict[str, ExpertsWeight]:
    """Make an experts module a quantized one.

    Args:
        module: Any module, plain or quantized before: what it had then is gone.
        states: Parameter's name to how it is quantized.

    Returns:
        Parameter's name to its quantized weight.
    """
    if not isinstance(module, QuantExperts):
        module.__class__ = _class_of(type(module), tuple(experts_parameters(module)))
    experts = cast(QuantExperts, module)
    experts.moq_weights = {}
    _give(experts, states)
    return dict(experts.moq_weights)


def quantized_in(name: str, module: nn.Module) -> dict[str, QuantLayer]:
    """What of a module is quantized, by the names of layers: itself, or parameters of experts in it.

    Args:
        name: The module's.
        module: Any module.
    """
    if isinstance(module, QuantExperts):
        return {f"{name}.{attribute}".lstrip("."): weight for attribute, weight in module.moq_weights.items()}
    return {name: module} if isinstance(module, QuantLayer) else {}


def base_of(cls: type[QuantExperts]) -> type[nn.Module]:
    """The class that an experts module had before."""
    first, second = cls.__bases__[:2]
    if first is not QuantExperts:
        # The class that fully_shard made of a quantized one.
        return type(cls.__name__.replace("Quant", "", 1), (first, base_of(second)), dict(cls.__dict__))
    return cast(type[nn.Module], second)


def _give(experts: QuantExperts, states: Mapping[str, LayerState]) -> None:
    made = _Transposed if experts_transposed(experts) else ExpertsWeight
    for name, state in states.items():
        experts.moq_weights[name] = made(experts, name, state)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[QuantExperts]] = {}


def _class_of(base: type[nn.Module], names: tuple[str, ...]) -> type[QuantExperts]:
    """The quantized class for experts of class `base` with these parameters, made once."""
    if (base, names) not in _CLASSES:
        readers = {name: _Reader(name) for name in names}
        _CLASSES[base, names] = type(f"Quant{base.__name__}", (QuantExperts, base), readers)
    return _CLASSES[base, names]


def _readers(cls: type[QuantExperts]) -> Iterable[str]:
    return dict.fromkeys(n for c in cls.__mro__ for n, value in vars(c).items() if isinstance(value, _Reader))


def _new_experts(base: type[nn.Module], names: tuple[str, ...]) -> QuantExperts:
    cls = _class_of(base, names)
    return cls.__new__(cls)
