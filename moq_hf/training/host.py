"""Who runs a `MoQCallback`: a stock Trainer or a MoQTrainer, and what the callback may leave to it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from ..config import MoQConfig
from ..errors import MoQError
from ..transformers_seams import ignores_loss_count, loss_scale, prepared_inputs
from .checkpoints import checkpoints, fault_of
from .samples import Inputs

logger = logging.getLogger(__name__)

# The scalar mean loss of a model over a batch, given as the keyword arguments of its forward pass.
Loss = Callable[[nn.Module, Inputs], Tensor]


class Host(Protocol):
    """What a `MoQCallback` needs to know of the Trainer that runs it.

    Attributes:
        hands_over: Whether it calls `MoQCallback.observe` with each training batch.
        saves: Whether it delivers the packed model when it saves.
        teacher: The fingerprint of the teacher that training follows; None without one.
    """

    hands_over: bool
    saves: bool
    teacher: int | None

    def is_of(self, state: TrainerState) -> bool:
        """Whether this is the Trainer that such a state belongs to."""

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The scalar mean loss over one batch, as training computes it."""

    def check(self, config: MoQConfig) -> None:
        """Check that the Trainer can do what the config asks for.

        Raises:
            MoQError: It cannot.
        """

    def check_folder(self, args: TrainingArguments) -> None:
        """Warn of what is in the output folder, if resuming from it would fail."""

    def notes(self, model: nn.Module, args: TrainingArguments) -> list[str]:
        """What a user should know of this Trainer before the first step."""

    def begin(self, has_begun: bool, taught_by: int | None) -> None:
        """Training begins, or goes on from a checkpoint.

        Args:
            has_begun: It goes on from one of after the offset.
            taught_by: The fingerprint of the teacher that the checkpoint had.
        """

    def before_quantization(self) -> None:
        """The next forward pass will be the first quantized one: the offset is reached, and it is not 0."""

    def begin_quantized_step(self) -> None:
        """The first optimizer step after the offset begins; once more if a gradient scaler skipped it."""


class StockHost:
    """A stock Trainer, of which the callback sees nothing but the events; see `Host`."""

    hands_over = saves = False
    teacher: int | None = None

    def is_of(self, state: TrainerState) -> bool:
        """True for any: it knows nothing of its Trainer."""
        return True

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The loss in the model's output."""
        return model_loss(model, inputs)

    def check(self, config: MoQConfig) -> None:
        """Refuse a teacher.

        Raises:
            MoQError: The config names one.
        """
        if config.distillation.teacher is not None:
            raise MoQError("distillation.teacher: a callback cannot change the loss; use MoQTrainer")

    def check_folder(self, args: TrainingArguments) -> None:
        """Warn of a half checkpoint before a stock Trainer stops at it: it would say what failed to open, not why."""
        found = checkpoints(cast(str, args.output_dir))
        fault = fault_of(found[0]) if found else None
        if fault is not None:
            logger.warning(
                "moq_hf: %s is not whole (%s), so train(resume_from_checkpoint=True) will fail: delete it, or give "
                "resume_from_checkpoint=moq_hf.last_checkpoint(%r)",
                found[0],
                fault,
                str(args.output_dir),
            )

    def notes(self, model: nn.Module, args: TrainingArguments) -> list[str]:
        """Whether the loss is scaled wrongly."""
        if args.gradient_accumulation_steps * args.world_size == 1 or not ignores_loss_count(model):
            return []
        return [
            "this model's loss ignores num_items_in_batch, so the stock Trainer multiplies loss and gradients by "
            f"{args.gradient_accumulation_steps} accumulation steps times {args.world_size} processes; set "
            "model.accepts_loss_kwargs = False before making the Trainer, or use MoQTrainer"
        ]

    def begin(self, has_begun: bool, taught_by: int | None) -> None:
        """Nothing to do."""

    def before_quantization(self) -> None:
        """Nothing to do."""

    def begin_quantized_step(self) -> None:
        """Nothing to do."""


class MoQHost:
    """A `MoQTrainer`, which has its own ways for all that a stock Trainer leaves to the callback; see `Host`.

    Args:
        trainer: The MoQTrainer; it need not be built yet.
    """

    hands_over = saves = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.teacher: int | None = None

    def is_of(self, state: TrainerState) -> bool:
        """Whether it is this trainer's, and not that of another one which got the callback later."""
        return getattr(self._trainer, "state", None) is state

    def loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """`compute_loss` over one batch by itself."""
        trainer = self._trainer
        prepared = prepared_inputs(trainer, inputs)
        return cast(Tensor, trainer.compute_loss(model, prepared, num_items_in_batch=own_count(trainer, prepared)))

    def check(self, config: MoQConfig) -> None:
        """It can do everything."""

    def check_folder(self, args: TrainingArguments) -> None:
        """It resumes from the last checkpoint that is whole."""

    def notes(self, model: nn.Module, args: TrainingArguments) -> list[str]:
        """None: it measures how the loss is scaled."""
        return []

    def begin(self, has_begun: bool, taught_by: int | None) -> None:
        """Without a teacher, or with that of a float phase which is over."""
        self._trainer.begin_phase(has_begun, taught_by)

    def before_quantization(self) -> None:
        """End the float phase, if there is one."""
        self._trainer.end_float_phase()

    def begin_quantized_step(self) -> None:
        """Begin what follows it."""
        self._trainer.begin_quantized_phase()


class LossScale:
    """The loss scale of fp16, by which one sees that the gradient scaler skipped a step.

    Args:
        optimizer: Accelerate's; one without a scaler skips nothing.
    """

    def __init__(self, optimizer: Any) -> None:
        self._value = loss_scale(optimizer)

    def has_skipped(self, optimizer: Any) -> bool:
        """Whether the optimizer step just taken was skipped."""
        before, self._value = self._value, loss_scale(optimizer)
        # A fused optimizer is called whatever the gradients are and skips by itself, which Accelerate does not see; the
        # scale falls then too.
        return bool(getattr(optimizer, "step_was_skipped", False)) or self._value < before


def own_count(trainer: Any, inputs: Inputs) -> Tensor | None:
    """What a `compute_loss_func` must divide by for the mean over one batch; None where the model has the loss."""
    labels = inputs.get("labels")
    if trainer.compute_loss_func is None or not isinstance(labels, Tensor):
        return None
    return labels.ne(-100).sum()


def model_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """The loss that the model itself gives for a batch.

    Raises:
        MoQError: It gives none.
    """
    return loss_in(model(**inputs))


def loss_in(output: Any) -> Tensor:
    """The loss in a model's output: under its name, or the first of a tuple.

    Raises:
        MoQError: There is none; says what to do.

    >>> import torch
    >>> loss_in({"loss": torch.tensor(0.5), "logits": torch.zeros(2)})
    tensor(0.5000)
    """
    first = output[0] if isinstance(output, tuple | list) and output else None
    loss = output.get("loss") if isinstance(output, Mapping) else first
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise MoQError(
        "eigenvalue: the model's output has no loss, since the Trainer computes it (label smoothing, "
        "compute_loss_func, an own compute_loss): use MoQTrainer, or give MoQCallback the function loss(model, inputs)"
    )
