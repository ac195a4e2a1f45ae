"""What a run will hold in memory, ahead of time: from a model's shapes, before any weight is loaded."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .config import MoQConfig
from .packed.pack import empty_model, read_config
from .processes import shape_of
from .text import table
from .training.controller import MoQController


@dataclass(frozen=True)
class Memory:
    """Bytes that a run on one device holds beside activations, which are those of the same run in float.

    Attributes:
        weights: The float weights that are trained, buffers included.
        gradients: Of all parameters that require one.
        optimizer: Its state: two numbers a trained parameter, as AdamW has.
        quantized: The quantized weights of a training pass, which the backward pass
            needs again. Tables are looked up and not kept: the largest one counts.
        evaluation: The quantized copy that evaluation keeps.
        teacher: The float model to learn from, where there is one.
        proof: The delivered model, loaded once more at the end of the run.
    """

    weights: int
    gradients: int
    optimizer: int
    quantized: int
    evaluation: int
    teacher: int
    proof: int

    @property
    def training(self) -> int:
        """Bytes at the beginning of a backward pass, when the most is held."""
        step = self.gradients + self.quantized
        return self.weights + self.optimizer + self.teacher + step

    @property
    def afterwards(self) -> int:
        """Bytes while the delivered folder is compared with the model, which is in evaluation then."""
        compared = self.evaluation + self.proof
        return self.weights + self.optimizer + self.teacher + compared

    def table(self) -> str:
        """Each part and the sums, in megabytes of 10^6 bytes."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer (two numbers a weight, as AdamW)": self.optimizer,
            "quantized weights of a training pass": self.quantized,
            "quantized copy for evaluation": self.evaluation,
            "teacher": self.teacher,
            "delivered model, loaded for the proof": self.proof,
            "training, without activations": self.training,
            "proof at the end": self.afterwards,
        }
        rows = [("memory", "MB")]
        rows += [(name, f"{size / 1e6:,.1f}") for name, size in parts.items() if size]
        return table(rows)


def plan_of_model(
    model: str, config: MoQConfig, total_steps: int, half: bool, teacher: bool
) -> str:
    """What a run does to a model, how large the result is, and what memory the run takes, without its weights.

    Args:
        model: Folder or Hub id with the model's `config.json`.
        config: Of the run.
        total_steps: Its optimizer steps.
        half: As for `memory_of`.
        teacher: As for `memory_of`.

    Raises:
        MoQError: There is no such model, or the config does not fit it.
    """
    described = read_config(model)
    shell = empty_model(described, model)
    if isinstance(described.dtype, torch.dtype):
        cast(nn.Module, shell).to(described.dtype)
    controller = MoQController(shell, config, total_steps)
    lines = [controller.summary()]
    targets = controller.schedule.targets
    if targets is not None:
        for block, names in controller.blocks.items():
            for name in names:
                controller.layers[name].set_bits(targets[block])
        sizes = controller.sizes
        lines.append(f"delivered: {sizes.mb:,.1f} MB, {sizes.float_mb:,.1f} in float")
    lines += ["", memory_of(controller, half, teacher).table()]
    return "\n".join(lines)


def memory_of(
    controller: MoQController, half: bool = False, teacher: bool = False
) -> Memory:
    """What a run with AdamW on one device holds, by the shapes of its model.

    Args:
        controller: Of the run; its model may lie on the meta device.
        half: Whether passes compute in half precision (`bf16` or `fp16` of the
            Trainer); the weights that are trained keep their dtype.
        teacher: Whether a float model of the same size is beside it, as it is where
            the config names a `distillation.teacher`.
    """
    model = controller.model
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights = sum(map(_bytes, parameters))
    gradients = sum(map(_bytes, trained))
    shared = set(controller.inventory.tied.values())
    multiplied: list[int] = []
    tables = [0]
    for name, layer in controller.all_layers.items():
        is_table = name in controller.embeddings
        size = _bytes(layer.float_weight)
        if half and not is_table:
            size = 2 * shape_of(layer.float_weight).numel()
        # The head that shares a table multiplies with it.
        (tables if is_table and name not in shared else multiplied).append(size)
    has_teacher = teacher or controller.config.distillation.teacher is not None
    return Memory(
        weights=weights + sum(map(_bytes, model.buffers())),
        gradients=gradients,
        optimizer=2 * gradients,
        quantized=sum(multiplied) + max(tables),
        evaluation=sum(multiplied) + sum(tables),
        teacher=weights if has_teacher else 0,
        proof=weights if controller.config.prove else 0,
    )


def _bytes(tensor: Tensor | nn.Parameter) -> int:
    return shape_of(tensor).numel() * tensor.element_size()
