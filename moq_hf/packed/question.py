"""A batch that a model and its copies are asked, each with the same random numbers."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..names import without_peft
from ..processes import is_apart
from .quiet import quiet

_PROMPT, _GENERATED = 8, 4


class Question:
    """A batch that models answer: in evaluation mode, without gradients; they and the random state stay as they are.

    Args:
        inputs: As the model's forward pass takes it, with labels or without.
        device: Of the models.
        autocast: The dtype that they are evaluated with under autocast; None: without autocast.
    """

    def __init__(self, inputs: Mapping[str, Any], device: torch.device, autocast: torch.dtype | None) -> None:
        self.inputs = cast(dict[str, Any], _moved(dict(inputs), device))
        self.device = device
        self.autocast = autocast

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """All tensors that the model gives, on the CPU, floats as float32."""
        with self._asking(model):
            found = [tensor.detach().cpu() for tensor in tensors_of(model(**self.inputs))]
        return [tensor.float() if tensor.is_floating_point() else tensor for tensor in found]

    def tokens(self, model: nn.Module) -> Tensor | None:
        """What the model generates after two short prompts, `[examples, 4]`; None where it does not generate."""
        can = getattr(model, "can_generate", None)
        main = str(getattr(model, "main_input_name", None))
        if not callable(can) or not can() or not isinstance(self.inputs.get(main), Tensor):
            return None
        # Processes whose texts end at different tokens would wait for each other.
        if any(map(is_apart, model.parameters())):
            return None
        # Two short examples: prompts are to be continued, not understood.
        few = {name: self.inputs[name][:2] for name in (main, "attention_mask") if name in self.inputs}
        if main == "input_ids":
            few = {name: tensor[:, :_PROMPT] for name, tensor in few.items()}
        settings = {"min_new_tokens": _GENERATED, "max_new_tokens": _GENERATED, "do_sample": False}
        with self._asking(model):
            made = cast(Any, model).generate(**few, **settings, return_dict_in_generate=False)
        return cast(Tensor, made)[:, -_GENERATED:].cpu()

    def outputs_by_module(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """The tensors that each module gives at its first call."""
        found: dict[str, list[Tensor]] = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                found.setdefault(name, [tensor.detach().clone() for tensor in tensors_of(output)])

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
        try:
            self.outputs(model)
        finally:
            for handle in handles:
                handle.remove()
        return found

    @contextlib.contextmanager
    def _asking(self, model: nn.Module) -> Iterator[None]:
        kind, enabled = self.device.type, self.autocast is not None
        devices = [self.device] if kind == "cuda" else []
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with (
                quiet(),
                torch.random.fork_rng(devices),
                torch.no_grad(),
                torch.autocast(kind, self.autocast, enabled),
            ):
                torch.manual_seed(0)
                yield
        finally:
            for module in training:
                module.training = True


def kept_batch(inputs: Mapping[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """A copy of a batch on the CPU, to be used when training has ended.

    A Trainer may give the model a forward pass of its own, as TRL does, which takes more and answers otherwise. What is
    delivered has the forward pass of its class, so that both are asked with what the class names.

    Args:
        inputs: As the model's forward pass takes it.
        model: Whose batch it is; None keeps all of it.
    """
    base = None if model is None else without_peft(model)
    if base is not None and "forward" in vars(base):
        known = inspect.signature(type(base).forward).parameters
        inputs = {name: value for name, value in inputs.items() if name in known}
    return cast(dict[str, Any], _moved(dict(inputs), "cpu"))


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output, in their order.

    >>> tensors_of({"logits": torch.tensor([0.5]), "hidden": (torch.tensor([1]), None)})
    [tensor([0.5000]), tensor([1])]
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        output = vars(output).values()
    elif not isinstance(output, (tuple, list)):
        return []
    return [tensor for part in output for tensor in tensors_of(part)]


def _moved(value: Any, device: torch.device | str) -> Any:
    """A copy of a batch on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _moved(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(part, device) for part in value) if type(value) in (tuple, list) else value
    return value
