"""Prepare a model for measuring sensitivity, and restore it afterwards."""

import contextlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model.convert import quantized_layers
from ..processes import has_gathered_weights
from ..quant_linear import quantized_in
from ..quantized_weight import QuantizedWeight
from ..schedule import FLOAT_BITS
from ..seams.engines import FSDP2
from ..seams.transformers import attention_of, set_attention, undo_mixed_precision

# Held while settings of the whole process are changed: two threads that restored them
# in the wrong order would leave them changed.
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def measuring(
    model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]] | None = None
) -> Iterator[dict[str, list[Tensor]]]:
    """Take `model` out of training and compute in float32 inside; afterwards it is as it was.

    Inside there is no autocast, no dropout and no compiled code, and attention can be
    differentiated twice. All parameters are stand-ins and all buffers copies: the
    model's own get no gradient, no new version and no hook called. Random numbers drawn
    inside leave the generators as they were. A model that FSDP2 or ZeRO-3 shards keeps
    its parameters and its training precision.

    Args:
        model: The model, unwrapped (no DDP).
        blocks: Block name to parameters of the model, for eigenvalues: their stand-ins
            require a gradient, including those of frozen ones, and layers multiply by
            stand-ins that hold their current quantized weights. None: layers quantize in
            each forward pass, at bits that `at_bits` can change.

    Yields:
        Block name to the stand-ins, for `block_eigenvalues`.
    """
    layers = quantized_layers(model).values()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ONE_AT_A_TIME)
        stack.enter_context(repeatable())
        stack.enter_context(_restored(layer.moq for layer in layers))
        stack.enter_context(eager())
        stand_ins: dict[int, list[Tensor]] = {}
        if has_gathered_weights(model):
            stack.callback(reshard, model)
            stack.enter_context(evaluating(model))
        else:
            stack.enter_context(_restored(model.modules()))
            stand_ins = _exchange(model, blocks)
            _use_plain_attention(model, stack)
            devices = {p.device.type for p in model.parameters()} - {"meta"} | {"cpu"}
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
        for layer in layers:
            layer.moq.inputs = None
            if blocks is not None:
                # The stand-ins are on the grid already, with the adapters in them.
                layer.moq.bits = FLOAT_BITS
                layer.moq.lora = None
        yield {
            name: [each for p in parameters for each in stand_ins[id(p)]]
            for name, parameters in (blocks or {}).items()
        }


@contextlib.contextmanager
def at_bits(layers: Sequence[QuantizedWeight], bits: int) -> Iterator[None]:
    """Give these layers `bits` for the duration, with no share of the float weight."""
    with _restored(layer.moq for layer in layers):
        for layer in layers:
            layer.moq.blend = 0.0
            layer.set_bits(bits)
        yield


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Restore the random generators, of PyTorch on the current device, NumPy and Python, on exit."""
    # A PyTorch built for CUDA names it even where there is no driver.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # The generator of MPS cannot be forked.
    can_fork = accelerator is not None and accelerator.type != "mps"
    devices = [torch.accelerator.current_device_index()] if can_fork else []
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    with torch.random.fork_rng(
        devices, device_type=accelerator.type if accelerator is not None else "cuda"
    ):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def eager() -> contextlib.AbstractContextManager[Any]:
    """Run no compiled code within this context."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, without gradients; on exit restore its mode and the random generators."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with repeatable(), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def reshard(model: nn.Module) -> None:
    """Make FSDP2 free the weights that it keeps after a forward pass without a backward pass.

    While it keeps them, `model.zero_grad()` does not reach their gradients.
    """
    for module in model.modules():
        if is_fsdp2(module):
            cast(Any, module).reshard()


def is_fsdp2(module: nn.Module) -> bool:
    """True if `fully_shard` has wrapped a module."""
    return FSDP2 in (cls.__name__ for cls in type(module).__mro__)


@contextlib.contextmanager
def _restored(objects: Iterable[object]) -> Iterator[None]:
    saved = [(item, dict(vars(item))) for item in objects]
    try:
        yield
    finally:
        for item, attributes in saved:
            vars(item).clear()
            vars(item).update(attributes)


def _exchange(
    model: nn.Module, blocks: Mapping[str, Iterable[nn.Parameter]] | None
) -> dict[int, list[Tensor]]:
    """Take the modules out of training, and replace their parameters and buffers with float32 ones.

    Returns:
        The stand-ins of each parameter, by its id; two for a weight that a quantized
        layer shares with another module.
    """
    measured = {
        id(p)
        for parameters_of_block in (blocks or {}).values()
        for p in parameters_of_block
    }
    made: dict[tuple[int, bool], Tensor] = {}
    stand_ins: dict[int, list[Tensor]] = {}
    undo_mixed_precision(model)
    for module in model.modules():
        quantized = {} if blocks is None else quantized_in("", module)
        values = {
            id(layer.float_weight): layer.quantized_copy(torch.float32)
            for layer in quantized.values()
        }
        parameters: dict[str, Any] = dict(module._parameters)
        for name, parameter in parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            key = id(parameter), id(parameter) in values
            if key not in made:
                # Nothing writes to it, so it may share the parameter's memory.
                value = values.get(id(parameter), parameter.detach()).float()
                made[key] = nn.Parameter(value, requires_grad=id(parameter) in measured)
                stand_ins.setdefault(id(parameter), []).append(made[key])
            parameters[name] = made[key]
        buffers: dict[str, Any] = dict(module._buffers)
        for name, buffer in buffers.items():
            if buffer is not None:
                key = id(buffer), False
                copy = made.setdefault(key, buffer.detach().clone())
                buffers[name] = copy.float() if copy.is_floating_point() else copy
        vars(module).update(training=False, _parameters=parameters, _buffers=buffers)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name) for name in module._flat_weights_names
            ]
    return stand_ins


def _use_plain_attention(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """Use attention with a second derivative: PyTorch's own in its mathematical form, eager instead of any other."""
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    for module in model.modules():
        config = getattr(module, "config", None)
        name = attention_of(config)
        if name and name not in ("eager", "sdpa"):
            stack.callback(set_attention, config, name)
            set_attention(config, "eager")
