"""Forecasts how much memory a run will take, from a model's shapes, before any weight is loaded."""

import contextlib
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from .config import MoQConfig
from .packed.files import CONFIG
from .packed.pack import empty_model, read_config
from .processes import shape_of
from .seams.sentence_transformers import around, is_kept_at
from .text import table
from .training.controller import MoQController


def plan_of_model(model: str, config: MoQConfig, total_steps: int) -> str:
    """Describe what a run quantizes, how large the result is, and how much memory the run takes, without the weights.

    Args:
        model: Folder or Hub id with the model's `config.json`.
        config: The run's config.
        total_steps: The run's optimizer steps.

    Raises:
        MoQError: There is no such model, or the config does not fit it.
    """
    described = read_config(model)
    lines = _name_class(described)
    shell: nn.Module = empty_model(described, model)
    if isinstance(described.dtype, torch.dtype):
        shell.to(described.dtype)
    if is_kept_at(model):
        shell = around(shell)
    controller = MoQController(shell, config, total_steps)
    lines.append(controller.summary())
    targets = controller.schedule.targets
    if targets is not None:
        for block, names in controller.blocks.items():
            for name in names:
                controller.layers[name].set_bits(targets[block])
        sizes = controller.sizes
        lines.append(f"delivered: {sizes.mb:,.1f} MB, {sizes.float_mb:,.1f} in float")
    parts = memory_of(controller).items()
    rows = [(name, f"{size / 1e6:,.1f}") for name, size in parts if size]
    lines += ["", table([("memory", "MB"), *rows])]
    return "\n".join(lines)


def _name_class(config: PreTrainedConfig) -> list[str]:
    """Make a config without a class name the base model of its type, if there is one, and return a line about it."""
    if config.architectures:
        return []
    # For a type without one, making the model says what is missing.
    with contextlib.suppress(Exception), torch.device("meta"):
        name = type(cast(Any, AutoModel).from_config(config)).__name__
        config.architectures = [name]
        return [
            f"{CONFIG} names no architectures: planned as {name}, without the head of a task"
        ]
    return []


def memory_of(controller: MoQController) -> dict[str, int]:
    """The bytes that a run with AdamW on one device holds besides activations, from the shapes of its model.

    Activations are those of the same run in float. The peak is at the beginning of a
    backward pass, which needs the quantized weights of the forward pass again; in half
    precision (`bf16`, `fp16`) these are half as large. Usually only the rows of a table
    that are looked up are quantized; they count as activations. A teacher is assumed to
    be as large as the model. The delivered folder is compared with a model in evaluation.

    Args:
        controller: The run's controller, whose model may be on the meta device.
    """
    model = controller.model
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights = sum(map(_bytes, parameters))
    gradients = sum(map(_bytes, trained))
    shared = set(controller.inventory.tied.values())
    # A head that shares a table multiplies by it.
    quantized = sum(
        _bytes(layer.float_weight)
        for name, layer in controller.all_layers.items()
        if name not in controller.embeddings or name in shared
    )
    config = controller.config
    teacher = 0 if config.distillation.teacher is None else weights
    proof = weights if config.prove else 0
    optimizer = 2 * gradients
    held = weights + sum(map(_bytes, model.buffers()))
    for layer in controller.layers.values():
        if layer.moq.trained is not None:
            # Frozen codes have a byte each, but for more than 8 bits.
            held += shape_of(layer.float_weight).numel()
    at_end = held + optimizer + teacher
    return {
        # Buffers and frozen codes included.
        "weights": held,
        "gradients": gradients,
        "optimizer (two numbers a weight, as AdamW)": optimizer,
        "quantized weights of a pass": quantized,
        "teacher": teacher,
        "delivered model, loaded for the proof": proof,
        "training, without activations": at_end + gradients + quantized,
        "proof at the end": at_end + quantized + proof,
    }


def _bytes(tensor: Tensor | nn.Parameter) -> int:
    return shape_of(tensor).numel() * tensor.element_size()
