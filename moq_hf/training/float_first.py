"""Float first: the first part of a run is in float; its model is then the start and the teacher of the rest."""

import copy
import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, Trainer

from ..config import MoQConfig
from ..config_fields import DistillationConfig
from ..errors import MoQError, explained, one_line, read_json
from ..seams.transformers import callbacks_of, checkpoint_folder, metrics_apart
from ..text import metrics_in
from .distillation import check_kind, load_teacher

logger = logging.getLogger(__name__)

# Half of the steps, as in docs/results/recipes.md.
DEFAULT_SHARE = 0.5
FOLDER = "float"
METRICS = "eval_results.json"


def share_of(float_first: bool | float | None) -> float | None:
    """The share of a run that is in float: the default for True, None for False and None.

    Raises:
        MoQError: It is not above 0 and below 1.

    >>> share_of(True), share_of(0.25), share_of(None)
    (0.5, 0.25, None)
    """
    if float_first is None or isinstance(float_first, bool):
        return DEFAULT_SHARE if float_first else None
    if not isinstance(float_first, (int, float)) or not 0 < float_first < 1:
        raise MoQError(
            f"float_first: {float_first!r} is not a share of the run; it must be true ({DEFAULT_SHARE:g}) or a number "
            "above 0 and below 1"
        )
    return float_first


def after_float(config: MoQConfig, share: float) -> MoQConfig:
    """The same schedule for the rest of a run: it begins after `share` of the run, its deadline rescaled.

    Raises:
        MoQError: The config names a teacher, trains scales alone, or keeps found grids.

    >>> after = after_float(MoQConfig(bits=2, start_bits=4, deadline=0.5), 0.5)
    >>> after.offset, after.deadline
    (0.5, 0.75)
    """
    if config.distillation.teacher is not None:
        raise MoQError(
            "float_first trains the teacher itself: leave distillation.teacher out, or float_first, to start from "
            f"{config.distillation.teacher}"
        )
    if config.train == "scales":
        raise MoQError(
            f'float_first trains the weights, which {config.spell("train")}: "scales" freezes: train in float in a run '
            "of its own, and give MoQTrainer(teacher=) a copy of that model"
        )
    if config.grid is not None:
        raise MoQError(
            f'float_first moves the weights off the grids that {config.spell("grid")}: "found" keeps: leave one of '
            "them out"
        )
    if config.offset != 0:
        logger.warning(
            "moq_hf: float_first: quantization begins after %g of the run; %s %g is not read",
            share,
            config.spell("offset"),
            config.offset,
        )
    # Rounded, because a config's number counts as the decimal fraction it is written as.
    deadline = (
        None
        if config.deadline is None
        else round(share + (1 - share) * config.deadline, 9)
    )
    return dataclasses.replace(config, offset=share, deadline=deadline)


def before_float(config: MoQConfig) -> MoQConfig:
    """The config from which `after_float` made this one, except for an offset that it did not read.

    >>> config = MoQConfig(bits=2, start_bits=4, deadline=0.5)
    >>> before_float(after_float(config, 0.5)) == config
    True
    """
    share = config.offset
    deadline = config.deadline
    if deadline is not None:
        deadline = round((deadline - share) / (1 - share), 9)
    return dataclasses.replace(config, offset=0, deadline=deadline)


class FloatPhase:
    """The float part of a `MoQTrainer`'s run.

    At its end the model is saved in the folder `float` of the output folder, evaluated,
    and loaded from there as the teacher; a run that resumes later finds it there. The
    optimizer's state starts afresh, and so does the learning rate: the rest is like a
    second run from the saved model.

    Args:
        trainer: The trainer of the run.
        share: The share of the run that is in float.
        model: The model to train.

    Raises:
        MoQError: The model is not one of transformers, has adapters, or is not what its
            class makes of its config.

    Attributes:
        metrics: The evaluation at the end of the phase, if there is an evaluation set, and
            `step`, the last one of the phase; None before.
    """

    def __init__(self, trainer: Trainer, share: float, model: Any) -> None:
        if hasattr(model, "peft_config"):
            raise MoQError(
                "float_first: a model with PEFT's adapters cannot be its own teacher in one run; train it in float "
                "first, and give MoQTrainer(teacher=) a copy"
            )
        check_kind(model, "float_first")
        _check_class(model)
        self.trainer = trainer
        self.share = share
        self.metrics: Mapping[str, Any] | None = None

    def begin(self) -> None:
        """Check, before the first step, that the optimizer can start afresh, and make the folder of the float model.

        Raises:
            MoQError: The optimizer cannot, or the folder cannot be made.
        """
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        if callable(getattr(optimizer, "eval", None)):
            raise MoQError(
                f"float_first: {type(optimizer).__name__} averages its steps and cannot start afresh after the float "
                "phase; take another optimizer, or train in float first and give MoQTrainer(teacher=) that model"
            )
        if self.trainer.args.should_save:
            folder = self.folder
            with explained(f"float_first: the float model cannot be saved in {folder}"):
                folder.mkdir(parents=True, exist_ok=True)

    def end(self) -> None:
        """Save and evaluate the model, and clear the optimizer's state; in every process, after the last float step."""
        trainer = self.trainer
        # Save first, so that an error in the evaluation does not lose the model.
        trainer.save_model(str(self.folder), _internal_call=True)
        # By this step the card says how the model was made, and that the metrics are from
        # a part of the run. The Trainer has not counted it yet.
        metrics = {**_evaluated(trainer), "step": trainer.state.global_step + 1}
        if trainer.args.should_save:
            text = json.dumps(metrics, indent=4, default=str) + "\n"
            (self.folder / METRICS).write_text(text, encoding="utf-8")
        trainer.accelerator.wait_for_everyone()
        cast(Any, trainer.optimizer).state.clear()
        self.metrics = metrics

    def go_on(self) -> None:
        """Load the metrics that an earlier process saved.

        Raises:
            MoQError: The folder of the float model is not there.
        """
        folder = self.folder
        try:
            metrics = read_json(folder / METRICS)
        except (OSError, ValueError) as error:
            raise MoQError(
                f"cannot resume: the float model of this run should be in {folder}, with {METRICS}: {one_line(error)}"
            ) from error
        self.metrics = metrics or None

    def teacher(self, config: DistillationConfig) -> PreTrainedModel:
        """Load the saved float model as the teacher of the model in training.

        Raises:
            MoQError: It cannot be loaded.
        """
        student = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return load_teacher(str(self.folder), student, config, self.trainer.args.device)

    def log(self) -> None:
        """Log the evaluation at the end of the phase."""
        if self.metrics is not None:
            figures = {
                f"float_{name}": value
                for name, value in self.metrics.items()
                if isinstance(value, (int, float)) and name != "step"
            }
            # The Trainer's own means belong to the loss that is logged next.
            if figures:
                with metrics_apart(self.trainer):
                    self.trainer.log(figures)

    @property
    def folder(self) -> Path:
        """The folder of the float model, beside the checkpoints: each trial of a search has a separate one."""
        return checkpoint_folder(self.trainer).parent / FOLDER


def _check_class(model: PreTrainedModel) -> None:
    """Check that the model can be saved and loaded as its own teacher.

    Raises:
        MoQError: Its class needs more than a config, or makes other weights from it,
            since a part was put in by hand.
    """
    try:
        # As `from_pretrained` makes it.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            again = type(model)(copy.deepcopy(model.config))
    except Exception as error:
        raise MoQError(
            f"float_first: {type(model).__name__} cannot be made from its config alone ({error}), so it cannot be "
            "loaded as its own teacher: give MoQTrainer(teacher=) a copy of a float model"
        ) from error
    shapes, shapes_again = (
        {(name, tensor.shape) for name, tensor in module.state_dict().items()}
        for module in (model, again)
    )
    other = sorted({name for name, _ in shapes ^ shapes_again})
    if other:
        raise MoQError(
            f"float_first: the config of {type(model).__name__} makes other weights ({', '.join(other)}), so it cannot "
            "be loaded as its own teacher: give MoQTrainer(teacher=) a copy of a float model"
        )


def _evaluated(trainer: Trainer) -> dict[str, float]:
    """The metrics of `Trainer.evaluate`, under its names, without its events, which belong to the quantized model."""
    if trainer.eval_dataset is None:
        return {}
    callbacks, history = callbacks_of(trainer), trainer.state.log_history
    held, callbacks[:] = callbacks[:], []
    trainer.state.log_history = []
    try:
        metrics = trainer.evaluate()
    finally:
        callbacks[:] = held
        trainer.state.log_history = history
        # TRL tells a log of training by the model's mode.
        cast(Any, trainer.model).train()
    return {f"eval_{name}": value for name, value in metrics_in(metrics).items()}
