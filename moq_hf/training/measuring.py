"""A model as sensitivity is measured on it, for as long as that takes."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engine_seams import FSDP2
from ..errors import MoQError
from ..names import named_modules
from ..processes import is_apart
from ..quant_experts import quantized_in
from ..quant_linear import QuantLayer
from ..schedule import FLOAT_BITS
from ..transformers_seams import attention_of, set_attention, undo_mixed_precision


@contextlib.contextmanager
def measuring(
    model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]] | None = None
) -> Iterator[dict[str, list[Tensor]]]:
    """For the duration `model` is out of training and computes in float32; afterwards it is as it was.

    Inside there is no autocast, no dropout and no compiled code, and attention can be differentiated twice. All
    parameters are stand-ins and all buffers copies: the model's own get no gradient, no new version and no hook called.
    Random numbers drawn inside leave the generators as they were. What FSDP2 or ZeRO-3 takes apart keeps its
    parameters, and the precision that it trains in.

    Args:
        model: Unwrapped (no DDP).
        blocks: Block name to parameters of the model, for eigenvalues: their stand-ins require a gradient, frozen ones
            included, and layers multiply with stand-ins that hold their quantized weights as they are now. None: layers
            quantize in each forward pass, at bits that `at_bits` can change.

    Yields:
        Block name to the stand-ins, for `block_eigenvalues`.

    Raises:
        MoQError: A parameter of `blocks` is no longer one of the model.
    """
    layers = [layer for name, module in named_modules(model) for layer in quantized_in(name, module).values()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(repeatable(model))
        stack.enter_context(_restored(layers))
        stand_ins: dict[int, list[Tensor]] = {}
        if any(map(is_apart, model.parameters())):
            stack.enter_context(_out_of_training(model))
        else:
            stand_ins = stack.enter_context(_stand_ins(model, blocks))
            stack.enter_context(_plain_attention(model))
            for device in {p.device.type for p in model.parameters()} - {"meta"} | {"cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
            for layer in layers:
                layer.moq.dtype = None
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            layer.moq.inputs = None
            if blocks is not None:
                # The stand-ins are on the grid already.
                layer.moq.bits = FLOAT_BITS
            layer.forget()
        named = blocks or {}
        if any(id(p) not in stand_ins for own in named.values() for p in own):
            raise MoQError("the model has other parameters than when MoQ was prepared")
        yield {name: [p for one in own for p in stand_ins[id(one)]] for name, own in named.items()}


@contextlib.contextmanager
def at_bits(layers: Sequence[QuantLayer], bits: int) -> Iterator[None]:
    """For the duration, these layers have so many bits, and no share of the float weight."""
    with _restored(layers):
        for layer in layers:
            layer.moq.blend = 0.0
            layer.set_bits(bits)
            layer.forget()
        yield


@contextlib.contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """Afterwards the random generators, of PyTorch on all the model's devices, NumPy and Python, are as they were."""
    kinds: dict[str, set[int]] = {}
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            kinds.setdefault(parameter.device.type, set()).add(parameter.device.index or 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        if "mps" in kinds:
            # One device, which fork_rng would call by number.
            del kinds["mps"]
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        for kind, indices in kinds.items():
            stack.enter_context(torch.random.fork_rng(devices=sorted(indices), device_type=kind))
        yield


def reshard(model: nn.Module) -> None:
    """Have FSDP2 free the weights that it keeps after a forward pass which has no backward pass.

    As long as it does, `model.zero_grad()` does not reach their gradients.
    """
    for module in model.modules():
        if is_fsdp2(module):
            cast(Any, module).reshard()


def is_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` has wrapped a module."""
    return FSDP2 in (cls.__name__ for cls in type(module).__mro__)


@contextlib.contextmanager
def _restored(layers: Iterable[QuantLayer]) -> Iterator[None]:
    """Afterwards the layers' states are what they were."""
    # Layers that share a weight share its state.
    states = {id(layer.moq): layer.moq for layer in layers}
    before = [(state, dict(vars(state))) for state in states.values()]
    try:
        yield
    finally:
        for state, attributes in before:
            vars(state).clear()
            vars(state).update(attributes)


@contextlib.contextmanager
def _out_of_training(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in training if it was, and FSDP2 has no weight gathered."""
    training = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in training:
            module.training = False
        yield
    finally:
        for module, before in training:
            module.training = before
        reshard(model)


@contextlib.contextmanager
def _stand_ins(
    model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]] | None
) -> Iterator[dict[int, list[Tensor]]]:
    """Exchange the parameters for float32 stand-ins, as `measuring` says; gives those of a parameter by its id."""
    measured = {id(p) for own in (blocks or {}).values() for p in own}
    made: dict[tuple[int, int], nn.Parameter] = {}
    found: dict[int, list[Tensor]] = {}
    with _restored_modules(model):
        for module in model.modules():
            quantized = {id(layer.parameter()): layer for layer in quantized_in("", module).values()}
            for name, parameter in dict(module._parameters).items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                layer = None if blocks is None else quantized.get(id(parameter))
                # There are two for a weight that a quantized layer shares with another module.
                key = (id(parameter), 0 if layer is None else id(module))
                if key not in made:
                    data = parameter.detach()
                    if layer is not None:
                        data = layer.quantized_weight(torch.float32).detach()
                    # Nothing writes into it: memory may be the parameter's own.
                    made[key] = nn.Parameter(data.float(), requires_grad=id(parameter) in measured)
                    found.setdefault(id(parameter), []).append(made[key])
                module._parameters[name] = made[key]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        yield found


@contextlib.contextmanager
def _restored_modules(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules have what they had, in plain attributes too, where they may note the longest sequence.

    Inside, no module is in training or under autocast, and buffers are copies in float32.
    """
    before = [(m, dict(vars(m)), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    copies: dict[int, Tensor] = {}
    try:
        undo_mixed_precision(model)
        for module, _, _, buffers in before:
            module.training = False
            for name, buffer in buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in copies:
                    copy = buffer.detach().clone()
                    copies[id(buffer)] = copy.float() if copy.is_floating_point() else copy
                module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


@contextlib.contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Attention with a second derivative: PyTorch's own in its mathematical form, any other implementation as eager."""
    configs = {id(c): c for c in (getattr(module, "config", None) for module in model.modules()) if c is not None}
    chosen = [(c, name) for c in configs.values() if (name := attention_of(c))]
    others = [(config, name) for config, name in chosen if name not in ("eager", "sdpa")]
    try:
        for config, _ in others:
            set_attention(config, "eager")
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for config, name in others:
            set_attention(config, name)
