"""A model as eigenvalues want it, for as long as they are measured."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layer_state import LayerState
from ..quant_experts import QuantExperts, quantized_in
from ..quant_linear import QuantLayer
from ..transformers_seams import attention_of, set_attention, undo_mixed_precision


@contextlib.contextmanager
def measuring(model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]]) -> Iterator[dict[str, list[Tensor]]]:
    """For the duration, `model` as eigenvalues want it; afterwards as it was, whatever happens in between.

    Inside, the model computes in float32 without autocast and without dropout, with attention that can be
    differentiated twice, uncompiled; quantized layers multiply with their quantized weights as they are now. All
    parameters are stand-ins of which only those of `blocks` require a gradient, frozen ones included, and all buffers
    are copies: the model's own get no gradient, no new version and no hook called. Random numbers drawn inside leave
    the generators as they were.

    Args:
        model: Unwrapped (no DDP).
        blocks: Block name to parameters of the model.

    Yields:
        Block name to the stand-ins, for `block_eigenvalues`.
    """
    with contextlib.ExitStack() as stack:
        stand_ins = stack.enter_context(_stand_ins(model, {id(p) for ps in blocks.values() for p in ps}))
        for module in model.modules():
            module.training = False
        undo_mixed_precision(model)
        stack.enter_context(_plain_attention(model))
        devices = {p.device.type for p in model.parameters()} - {"meta"}
        stack.enter_context(repeatable(model))
        for device in devices | {"cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
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
def _stand_ins(model: nn.Module, measured: set[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Exchanges the parameter and buffer objects; gives those that stand for a parameter, by its id.

    There are two for a weight that a quantized layer shares with another module.
    """
    before = [(m, dict(vars(m)), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    made: dict[tuple[int, int], nn.Parameter] = {}
    found: dict[int, list[Tensor]] = {}
    buffers: dict[int, Tensor] = {}
    try:
        for module, _, parameters, own in before:
            quantized = {id(layer.parameter()): layer for layer in quantized_in("", module).values()}
            for name, parameter in parameters.items():
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
            for name, buffer in own.items():
                if buffer is not None:
                    copy = buffer.detach().clone()
                    copy = copy.float() if copy.is_floating_point() else copy
                    module._buffers[name] = buffers.setdefault(id(buffer), copy)
            if isinstance(module, QuantLayer):
                module.moq = LayerState(module.moq.grid)
            elif isinstance(module, QuantExperts):
                module.moq_weights = {}
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        yield found
    finally:
        # Modules may keep what they saw in a forward pass (the longest sequence, say) in plain attributes.
        for module, attributes, parameters, own in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(own)


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
