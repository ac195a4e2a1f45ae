"""A model as eigenvalues want it, for as long as they are measured."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engine_seams import FSDP2, fsdp_in_own_dtype
from ..errors import MoQError
from ..layer_state import LayerState
from ..names import named_modules
from ..processes import is_partitioned, is_sharded, memory_of
from ..quant_experts import QuantExperts, quantized_in
from ..quant_linear import QuantLayer
from ..transformers_seams import attention_of, set_attention, undo_mixed_precision


@contextlib.contextmanager
def measuring(model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]]) -> Iterator[dict[str, list[Tensor]]]:
    """For the duration, `model` as eigenvalues want it; afterwards as it was, whatever happens in between.

    Inside, the model computes in float32 without autocast and without dropout, with attention that can be
    differentiated twice, uncompiled; quantized layers multiply with their quantized weights as they are now. All
    parameters are stand-ins of which only those of `blocks` require a gradient, frozen ones included, and all buffers
    are copies: the model's own get no gradient, no new version and no hook called. Parameters that FSDP2 shards stand
    for themselves, and get their values and gradients back. A model under ZeRO-3 stays as it is, out of training.
    Random numbers drawn inside leave the generators as they were.

    Args:
        model: Unwrapped (no DDP).
        blocks: Block name to parameters of the model.

    Yields:
        Block name to the stand-ins, for `block_eigenvalues`.

    Raises:
        MoQError: A sharded weight has two layers that quantize it differently, or a parameter of `blocks` is no longer
            one of the model.
    """
    with contextlib.ExitStack() as stack:
        parameters = list(model.parameters())
        if any(map(is_partitioned, parameters)):
            stand_ins = stack.enter_context(_out_of_training(model))
        elif any(map(is_sharded, parameters)):
            stand_ins = stack.enter_context(_in_shards(model))
        else:
            stand_ins = stack.enter_context(_stand_ins(model, {id(p) for ps in blocks.values() for p in ps}))
        stack.enter_context(_plain_attention(model))
        devices = {p.device.type for p in model.parameters()} - {"meta"}
        stack.enter_context(repeatable(model))
        for device in devices | {"cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(id(p) not in stand_ins for ps in blocks.values() for p in ps):
            raise MoQError(
                "the model has other parameters than when MoQ was prepared: make the controller after fully_shard"
            )
        yield {name: [p for one in ps for p in stand_ins[id(one)]] for name, ps in blocks.items()}


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


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules have what they had, in plain attributes too, where they may note the longest sequence.

    Inside, no module is in training or under autocast, and buffers are copies in float32.
    """
    before = [(m, dict(vars(m)), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    buffers: dict[int, Tensor] = {}
    try:
        undo_mixed_precision(model)
        for module, _, _, own in before:
            module.training = False
            for name, buffer in own.items():
                if buffer is not None:
                    copy = buffer.detach().clone()
                    copy = copy.float() if copy.is_floating_point() else copy
                    module._buffers[name] = buffers.setdefault(id(buffer), copy)
        yield
    finally:
        for module, attributes, parameters, own in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(own)


@contextlib.contextmanager
def _stand_ins(model: nn.Module, measured: set[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Exchanges the parameter objects; gives those that stand for a parameter, by its id.

    There are two for a weight that a quantized layer shares with another module.
    """
    made: dict[tuple[int, int], nn.Parameter] = {}
    found: dict[int, list[Tensor]] = {}
    with _kept(model):
        for module in model.modules():
            quantized = {id(layer.parameter()): layer for layer in quantized_in("", module).values()}
            for name, parameter in dict(module._parameters).items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                layer = quantized.get(id(parameter))
                key = (id(parameter), 0 if layer is None else id(module))
                if key not in made:
                    data = parameter.detach()
                    if layer is not None:
                        data = layer.quantized_weight(torch.float32).detach()
                    # Nothing writes into it: memory may be the parameter's own.
                    made[key] = nn.Parameter(data.float(), requires_grad=id(parameter) in measured)
                    found.setdefault(id(parameter), []).append(made[key])
                module._parameters[name] = made[key]
            _leave_in_float(module)
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        yield found


@contextlib.contextmanager
def _out_of_training(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """The same under ZeRO-3, which has hooks on every parameter: none is exchanged, layers quantize as they do."""
    training = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in training:
            module.training = False
        yield {id(parameter): [parameter] for parameter in model.parameters()}
    finally:
        for module, before in training:
            module.training = before


def _leave_in_float(module: nn.Module) -> None:
    """Have a module compute with what is in the place of its parameters."""
    if isinstance(module, QuantLayer):
        module.moq = LayerState(module.moq.grid)
    elif isinstance(module, QuantExperts):
        module.moq_weights = {}


@contextlib.contextmanager
def _in_shards(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """The same where FSDP2 shards the parameters, which stand for themselves.

    Inside, the shards of quantized layers hold what the layers multiply with, and FSDP2 gathers them as they are.

    Raises:
        MoQError: A weight has two layers that quantize it differently.
    """
    gather_again(model)
    layers = [layer for name, module in named_modules(model) for layer in quantized_in(name, module).values()]
    layers = list({id(layer.moq): layer for layer in layers}.values())
    weights = [layer.float_weight for layer in layers]
    if len(set(map(id, weights))) < len(weights):
        raise MoQError("a weight that two layers quantize differently cannot be measured while FSDP2 shards it")
    gatherings = [layer.moq.gathering for layer in layers if layer.moq.gathering is not None]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Beside sharded weights there may be whole ones: `ignored_params`, or modules that are not wrapped.
    values = [memory_of(layer.quantized_copy(torch.float32)) for layer in layers]
    floats = [memory_of(weight).clone() for weight in weights]
    with contextlib.ExitStack() as stack:
        for gathering in gatherings:
            stack.callback(gathering.attach)
        stack.enter_context(fsdp_in_own_dtype(model))
        for gathering in gatherings:
            gathering.detach()
        stack.enter_context(_kept(model))
        for parameter, gradient in gradients:
            stack.callback(setattr, parameter, "grad", gradient)
            parameter.grad = None
        for weight, value, own in zip(weights, values, floats, strict=True):
            stack.callback(memory_of(weight).copy_, own)
            memory_of(weight).copy_(value)
        values.clear()
        for module in model.modules():
            _leave_in_float(module)
        yield {id(parameter): [parameter] for parameter in model.parameters()}


def gather_again(model: nn.Module) -> None:
    """Have FSDP2 gather all weights in the next forward pass: it keeps some after one that has no backward pass.

    As long as it does, `model.zero_grad()` does not reach the gradients of those.
    """
    for module in model.modules():
        if FSDP2 in (cls.__name__ for cls in type(module).__mro__):
            cast(Any, module).reshard()


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
