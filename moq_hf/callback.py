"""`MoQCallback`: the Trainer's events translated into calls on the `MoQController`."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import (
    DefaultFlowCallback,
    IntervalStrategy,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .config import MoQConfig
from .config_fields import DistillationConfig
from .errors import MoQError, one_line
from .forecast import Plan, plan
from .model.convert import check_bypassed_weights, is_quantized, tells_of_saves
from .model.found import take_found
from .names import pretrained, uncompiled
from .packed.load_check import ReferenceOutputs, kept_batch
from .packed.save import Delivered, SaveOptions, deliver
from .packed.state import shareable
from .processes import gathered_state_dict, has_gathered_weights
from .schedule import Switch
from .seams.sentence_transformers import body_of
from .seams.transformers import (
    ExportableState,
    add_notebook_column,
    call_first,
    callback_states,
    callbacks_of,
    calling_trainer,
    checkpoint_folder,
    checkpoints_as_modules,
    is_compiled_in_place,
    is_its_own_reference,
    is_reporter,
    is_trl,
    loss_scale,
    tell_of_saves,
    train_no_more_than_asked,
)
from .text import counted
from .trained_scales import SCALES_APART
from .training import messages
from .training.checkpoints import (
    STATE_FILE,
    best_step,
    checksums,
    complete_checkpoint,
    forget_best,
    last_metrics,
    state_of_best,
    warn_of_half_checkpoint,
)
from .training.controller import MoQController
from .training.gptq import check_possible, is_settled, start_from_gptq
from .training.measures import ModelLoss, model_loss
from .training.resume import check_room
from .training.run import NOT_TAUGHT, Run
from .training.samples import first_batch, on_training_batch

logger = logging.getLogger(__name__)

# The console shows these beside the loss; values of single blocks go to reporters.
_SHOWN = ("moq/bits", "moq/mean_bits", "moq/blend")


class _AfterAll(TrainerCallback):
    """Acts once, after all other callbacks, at the first of some events, which may be under way already."""

    def __init__(self, trainer: Trainer, act: Callable[..., Any], *events: str) -> None:
        self.trainer = trainer
        self.act = act
        for event in events:
            setattr(self, event, self._act)

    def _act(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.remove_callback(self)
        self.act(*args, **kwargs)


class MoQCallback(TrainerCallback, ExportableState):
    """Mixture-of-Quantization for any `Trainer`: `Trainer(..., callbacks=[MoQCallback("moq.json")])`.

    The model is made ready when the Trainer is built, and again (a `model_init` makes a
    new one) when training begins. After each optimizer step that was not skipped the
    schedule advances. A run that resumes from a checkpoint goes on from there. At the end
    of training, after all other callbacks, the packed model is written to the folder
    `quantized` in the output folder (each trial of a search has its own), and
    `trainer_state.json` beside it, for `moq-hf report`.

    What it changes in the Trainer: it puts itself first among the callbacks, so that
    TensorBoard, W&B and all others find `moq/bits` and `moq/mean_bits` in every log of
    a loss; a notebook's table gets a column `moq/bits`; and `save_model`, which writes
    float weights unless it is that of a `MoQTrainer`, says so.

    With `eigenvalue.enabled` it takes the batches that go through the model in
    training, and the loss that the model gives for them.

    Args:
        config: A preset's name, the path of a JSON file, a mapping or a `MoQConfig`.
        loss: For `eigenvalue.enabled`: gives the scalar mean loss of a model on a
            batch, if that is not the loss in the model's output (label smoothing,
            `compute_loss_func`). It takes the model and the keyword arguments of its
            forward pass as a dict.
        **keywords: Those of `MoQConfig`, which override what `config` says.

    Raises:
        MoQConfigError: The config is wrong.

    Attributes:
        controller: The `MoQController` of the model in training; None before a Trainer
            has the callback, and if the config is not enabled.
        plan: The `Plan` of the run; None before it begins.
        delivered: The folder written at the end of training: `path`, `bytes` of the
            weights and `proof`; None before, if nothing was written, and in processes
            that do not save.

    >>> callback = MoQCallback("w4", start_bits=8)
    >>> callback.config.bits, callback.controller is None
    (4, True)
    """

    def __init__(
        self,
        config: MoQConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        loss: ModelLoss | None = None,
        **keywords: Any,
    ) -> None:
        self.config = MoQConfig.load(config, **keywords)
        self.controller: MoQController | None = None
        self.loss = loss
        self._began = 0.0
        self._loss_scale = 0.0
        self.plan: Plan | None = None
        self.delivered: Delivered | None = None
        self._run: Run | None = None
        # The Trainer that runs the callback; None before one has it.
        self._host: Any = None
        # The Trainer with which the layers were made, before its first step.
        self._made_for: Any = None
        # Set by a step that changed a block's bits, and by the first one of a run that
        # begins quantized.
        self._has_switched = False
        # The scalars of the last step in float, until the next step.
        self._last_in_float: dict[str, float] | None = None
        self._hook: RemovableHandle | None = None
        # A batch of this run, to prove the delivered model on.
        self._kept: dict[str, Any] | None = None
        self._readers_checked = False

    @property
    def trainer(self) -> Any:
        """The `MoQTrainer` that runs the callback; None for a stock Trainer."""
        return self._host if getattr(self._host, "moq", None) is self else None

    @property
    def is_handed_batches(self) -> bool:
        """True if the Trainer itself hands its batches to `observe`, including what only its loss needs."""
        return self.trainer is not None and not is_trl(self.trainer)

    @property
    def bits(self) -> dict[str, int]:
        """Block name to the bits of its layers in the next forward pass, 32 in float, without embedding tables."""
        return {} if self.controller is None else dict(self.controller.schedule.bits)

    @property
    def mean_bits(self) -> float | None:
        """Bits per parameter of the whole model now, including what stays in float; None before training."""
        return None if self.controller is None else self.controller.sizes.mean_bits

    @property
    def history(self) -> tuple[Switch, ...]:
        """Every change of precision so far, including those before the run was resumed."""
        return () if self.controller is None else tuple(self.controller.history)

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into `trainer_state.json`, in JSON types."""
        attributes: dict[str, Any] = {"saved": None, "saved_at": None}
        if self.controller is not None:
            attributes = {
                "saved": self.controller.state_dict(),
                "saved_at": self._host.state.global_step,
                "teacher": self._teacher,
                # The Trainer writes the weights first.
                "weights": checksums(checkpoint_folder(self._host)),
            }
            if self.loss is not None:
                attributes["had_loss"] = True
            attributes["teaching"] = dict(NOT_TAUGHT)
            if self.trainer is not None:
                attributes["teaching"] = self.trainer.teaching()
        elif self._host is not None:
            # A run with `enabled: false` passes on the state that it resumed.
            before = callback_states(self._host.state).get(self._name, {})
            attributes = before.get("attributes", attributes)
        return {"args": {"config": self.config.to_dict()}, "attributes": attributes}

    def run_of(self, state: TrainerState) -> Run:
        """The run to which a Trainer's state belongs; its checkpoint is read once.

        Raises:
            MoQError: The checkpoint's entry of MoQ is damaged, or of another version.
        """
        if self._run is None or self._run.state is not state:
            self._run = Run(self.config, state)
        return self._run

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _teacher(self) -> int | None:
        """The fingerprint of the teacher that training follows; None without one."""
        return None if self.trainer is None else self.trainer.teacher_fingerprint

    def _find_trainer(self, state: TrainerState) -> None:
        """Find the Trainer that calls, which may be another one than before.

        Raises:
            MoQError: It has two MoQCallbacks.
        """
        self._host = calling_trainer(state)
        if isinstance(callback_states(state).get(self._name), list):
            raise MoQError(
                "two MoQCallbacks in one Trainer: pass one (MoQTrainer(moq_config=) brings its own)"
            )

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Make the layers quantized ones, before anything wraps the model.

        Raises:
            MoQError: The config does not fit the model, or there are two MoQCallbacks.
        """
        if not self.config.enabled:
            logger.info("moq_hf is off: the config says enabled: false")
            return
        self._find_trainer(state)
        self._check_surroundings(args, kwargs["model"])
        inventory, self.config = take_found(kwargs["model"], self.config)
        if is_quantized(inventory.model):
            # An earlier run quantized it: until training begins, evaluation must give
            # what that run delivered.
            if getattr(self.controller, "model", None) is not inventory.model:
                self.controller = None
            return
        # The length of the run is not known yet; `on_train_begin` makes a controller
        # for that length and the model as it is then.
        self.controller = MoQController(inventory, self.config, sys.maxsize)
        self._made_for = self._host
        if self.trainer is None and state.is_world_process_zero:
            warn_of_half_checkpoint(str(args.output_dir))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start the schedule, or go on with the checkpoint's.

        Raises:
            MoQError: The run has no step, or is too short for anything to be quantized or
                for the deadline, there are two MoQCallbacks, the checkpoint is of another
                config, or the processes disagree.
        """
        self._find_trainer(state)
        run = self.run_of(state)
        if not self.config.enabled:
            if run.saved is not None:
                logger.warning(
                    "moq_hf: the checkpoint at step %d was made with MoQ, and the config says enabled: false: the run "
                    "goes on in float",
                    run.first,
                )
            return
        if self.trainer is None and self.config.distillation.teacher is not None:
            raise MoQError(
                "distillation.teacher: a callback cannot change the loss; use MoQTrainer, or MoQMixin with your Trainer"
            )
        self.delivered = None
        call_first(self._host, self)
        # A run that failed may have left some.
        self._host.remove_callback(_AfterAll)
        model = kwargs["model"]
        self._check_surroundings(args, kwargs["model"])
        if run.saved is None and run.is_over:
            raise MoQError(
                f"the run has no optimizer step: set num_train_epochs or max_steps to more than {run.first}"
            )
        inventory, self.config = take_found(model, self.config)
        self.controller = controller = MoQController(inventory, self.config, run.length)
        self._check_host(controller, args)
        self._check_optimizer(controller, kwargs.get("optimizer"))
        # So that the Trainer can load what it saves.
        checkpoints_as_modules(self._host, pretrained(controller.model))
        self._began = time.perf_counter()
        self._loss_scale = loss_scale(kwargs.get("optimizer"))
        self._prepare_measuring(controller, args, state)
        self._listen(controller, _is_compiled(model, controller, args))
        if self.trainer is not None:
            self.trainer.begin_phase(run)
        if run.saved is not None:
            self._go_on(controller, run)
        elif run.is_without_moq:
            logger.warning(
                "moq_hf: the checkpoint at step %d was made without MoQ: its schedule starts now, with quantization "
                "after step %d",
                run.first,
                run.first + controller.schedule.offset,
            )
            # A float evaluation is not a candidate for the best quantized model.
            forget_best(state)
        controller.check_ranks()
        self._announce(controller, run)
        if self.config.gptq:
            check_possible(self._host, controller.layers.values())
        if run.saved is None and controller.has_begun:
            self._start_from_gptq(controller, controller.blocks)
        # A checkpoint that was made without this callback has no entry, and the next
        # save would fail on that.
        callback_states(state)[self._name] = self.state()
        if not controller.has_arrived:
            forget_best(state)
        if run.is_over:
            self._train_no_more(args, state)

    def _train_no_more(self, args: TrainingArguments, state: TrainerState) -> None:
        """Take no step in a run that was killed after its last one; evaluate it if that is still to be done."""
        train_no_more_than_asked(self._host)
        flow = DefaultFlowCallback()
        after_last_step = flow.on_step_end(args, state, TrainerControl())
        is_due = flow.on_epoch_end(args, state, after_last_step).should_evaluate
        if is_due and last_metrics(state.log_history).get("step") != state.global_step:
            self._after_all(lambda *_, **__: self._host.evaluate(), "on_train_begin")

    def _after_all(self, act: Callable[..., Any], *events: str) -> None:
        self._host.add_callback(_AfterAll(self._host, act, *events))

    def _check_host(self, controller: MoQController, args: TrainingArguments) -> None:
        """Check that the Trainer's result can be delivered, and that its reference was not quantized too soon.

        Raises:
            MoQError: It cannot, or it was.
        """
        lacks = controller.sizes.lacks(self.config)
        if lacks is not None:
            raise MoQError(lacks)
        if args.should_save and self._folder.is_file():
            raise MoQError(
                f"{self._folder} is a file, and the quantized model goes into a folder of that name: move it away, or "
                "take another output_dir"
            )
        is_made_before = self._made_for is self._host and controller.has_begun
        if is_made_before and is_its_own_reference(self._host):
            raise MoQError(
                "precompute_ref_log_probs: TRL asked the model for its reference when it was quantized already: give "
                "the trainer a ref_model, or set precompute_ref_log_probs=False"
            )

    def _check_surroundings(self, args: TrainingArguments, model: nn.Module) -> None:
        """Refuse to train scales where they would be taken apart from their codes, or lost.

        Raises:
            MoQError: They would be.
        """
        if self.config.train != "scales":
            return
        host = self._host
        if host.is_deepspeed_enabled or host.is_fsdp_enabled or args.n_gpu > 1:
            raise MoQError(SCALES_APART)
        saves = args.save_strategy != "no"
        if saves and body_of(model) is not None:
            raise MoQError(
                'train: "scales": Sentence Transformers loads checkpoints, also that of the best model, without the '
                'scales: set save_strategy="no"; the run delivers its model in the end'
            )

    def _check_optimizer(self, controller: MoQController, optimizer: Any) -> None:
        """Refuse an optimizer that was made before there were scales to train.

        Raises:
            MoQError: It was.
        """
        groups = getattr(optimizer, "param_groups", ())
        known = {id(each) for group in groups for each in group["params"]}
        scales = controller.inventory.trained_scales()
        if any(each.requires_grad and id(each) not in known for each in scales):
            raise MoQError(
                f"{self.config.spell('train')}: the optimizer does not have the scales, which were added to the model "
                "after it was made: call quantize_model(model, config) before that, in model_init too, or have the "
                "Trainer, with the callback from the start, make the optimizer"
            )

    def _prepare_measuring(
        self, controller: MoQController, args: TrainingArguments, state: TrainerState
    ) -> None:
        if controller.sensitivity is None:
            return
        # A resumed run has the checkpoint's state, and goes on with its own batch size.
        batch = args.train_batch_size
        if args.auto_find_batch_size and state.train_batch_size:
            batch = state.train_batch_size
        rows = batch * args.gradient_accumulation_steps
        controller.sensitivity.set_run_length(
            state.max_steps, rows, args.bf16 or args.fp16
        )
        own_loss = self.trainer.mean_loss if self.is_handed_batches else model_loss
        controller.sensitivity.measure.loss = self.loss or own_loss

    def _go_on(self, controller: MoQController, run: Run) -> None:
        """Continue the checkpoint's schedule, and say what has changed."""
        assert run.saved is not None
        controller.load_state_dict(run.saved)
        before = run.beside
        for note in messages.notes_on_resuming(
            run.first,
            before.get("saved_at", run.first),
            run.changed,
            before.get("teacher"),
            self._teacher,
            self.config.spell,
        ):
            logger.warning("moq_hf: %s", note)
        if before.get("had_loss") and self.loss is None and controller.sensitivity:
            logger.warning(
                "moq_hf: up to the checkpoint sensitivity was measured on MoQCallback(loss=), which is not there now: "
                "give it again, without restore_callback_states_from_checkpoint"
            )

    def _announce(self, controller: MoQController, run: Run) -> None:
        state = run.state
        schedule = controller.schedule
        # The schedule did not count steps before it began, nor skipped ones.
        steps = run.last - (run.first - schedule.steps)
        if run.saved is not None:
            check_room(schedule, steps)
        # A resumed schedule keeps the length that it was planned for.
        planned = schedule.total_steps if self.config.depends_on_length else None
        config = self.config
        # Steps that were skipped before a run was resumed are no reason to end it.
        if schedule.steps > 0:
            config = replace(config, allow_unreached=True)
        # Each trial of a search would say the same.
        is_told = state.is_hyper_param_search and self.plan is not None
        layers = controller.inventory.scheduled
        self.plan = plan(config, planned or steps, layers=layers)
        if is_told or not state.is_world_process_zero:
            return
        tqdm.write(f"moq_hf: {controller.summary()}")
        sensitivity = controller.sensitivity
        if schedule.steps:
            measured = None if sensitivity is None else sensitivity.values
            tqdm.write(
                f"moq_hf: the run {'was over' if run.is_over else 'goes on'} "
                f"{messages.standing(schedule, steps, measured)}"
            )
        else:
            tqdm.write(f"moq_hf plan: {self.plan.table()}")
        notes = [*controller.warnings(), *self.plan.notes]
        # Steps that were skipped are none of the schedule's.
        if schedule.steps and planned and not steps <= planned <= run.last:
            notes.append(
                f"shares of the run, such as {config.spell('offset')} and {config.spell('deadline')}, count the "
                f"{planned:,} steps that the checkpoint's run had, not the {steps:,} of this one"
            )
        is_taught = self.trainer is not None and (
            self._teacher is not None or self.trainer.float_phase is not None
        )
        if not is_taught and config.distillation != DistillationConfig():
            notes.append(
                "distillation without effect: it needs a MoQTrainer with a teacher, or float_first"
            )
        for note in notes:
            logger.warning("moq_hf: %s", note)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Before the first step, check that the model uses the quantized layers.

        Raises:
            MoQError: It uses their weights past them, or not in a way in which inputs
                can be rounded.
        """
        if self.controller is not None and not self._readers_checked:
            self._readers_checked = True
            check_bypassed_weights(self.controller.all_layers)

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Advance by one step, with eigenvalues if a drop is due, unless the gradient scaler skipped it.

        Raises:
            MoQError: A weight holds NaN or Inf, the loss cannot be measured, or the
                processes disagree.
        """
        controller = self.controller
        if controller is None:
            return
        self._last_in_float = None
        skipped = self._was_skipped(kwargs.get("optimizer"))
        self._has_switched = False
        controller.check_ranks(skipped)
        if skipped:
            controller.skip()
            return
        had_arrived = controller.has_arrived
        schedule = controller.schedule
        if not controller.has_begun and schedule.steps + 1 == schedule.offset:
            # The loss of this step is still that of the float model.
            self._last_in_float = controller.metrics()
            if self.trainer is not None:
                self.trainer.end_float_phase()
        is_choosing = schedule.is_choosing and state.is_world_process_zero
        eigenvalues = controller.measure()
        if is_choosing and controller.choice is not None:
            tqdm.write(f"moq_hf: {controller.choice.table()}")
        begins_quantized = schedule.steps == schedule.offset == 0
        switches = controller.step(eigenvalues)
        self._start_from_gptq(controller, [switch.block for switch in switches])
        self._has_switched = bool(switches) or begins_quantized
        if not had_arrived:
            # An evaluation up to here is not a candidate for the best quantized model.
            forget_best(state)

    def _start_from_gptq(
        self, controller: MoQController, blocks: Iterable[str]
    ) -> None:
        """Round the weights of blocks that are at fewer bits now, in model order, if the config says so."""
        layers = [
            controller.layers[name]
            for block in blocks
            for name in controller.blocks[block]
        ]
        if layers and self.config.gptq:
            count = sum(not is_settled(layer) for layer in layers)
            if count and self._host.is_world_process_zero():
                tqdm.write(
                    f"moq_hf: GPTQ rounds {counted(count, 'layer')} by {self.config.gptq} training examples; "
                    "a large model takes minutes"
                )
            start_from_gptq(self._host, controller.model, layers, self.config.gptq)

    def _was_skipped(self, optimizer: Any) -> bool:
        before = self._loss_scale
        self._loss_scale = loss_scale(optimizer)
        # A fused optimizer is called whatever the gradients are and skips a step itself,
        # which Accelerate does not see; but the scale falls.
        return (
            bool(getattr(optimizer, "step_was_skipped", False))
            or self._loss_scale < before
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Log a change of precision in a separate entry; let a MoQTrainer log the evaluation of its float phase."""
        phase = None if self.trainer is None else self.trainer.float_phase
        if phase is not None and self._last_in_float is not None:
            # Logging resets should_log, and the loss of the step is still to be logged.
            is_due = control.should_log
            phase.log()
            # The loss with the teacher is another one, and needs a separate mean.
            control.should_log = is_due or args.logging_strategy != IntervalStrategy.NO
        controller = self.controller
        if controller is None:
            return
        sizes = controller.sizes
        add_notebook_column(self._host, "moq/bits", lambda: f"{sizes.layer_bits:.4g}")
        if not self._has_switched:
            return
        if self._last_in_float is None:
            self._log_switch(args, state, control, **kwargs)
        else:
            self._after_all(self._log_switch_after_loss, "on_step_end")

    def _log_switch_after_loss(
        self, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the end of the float phase once its last loss has been logged, or at once if none is due."""
        if not control.should_log:
            self._log_switch(args, state, control, **kwargs)
            return
        # Some Trainers log it in their own way, without `on_log`.
        events = ("on_log", "on_step_begin", "on_train_end")
        self._after_all(self._log_switch, *events)

    def _log_switch(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        """Log the bits that all blocks have from here on."""
        self._last_in_float = None
        controller = self.controller
        assert controller is not None
        whole = controller.metrics()
        epoch = {"epoch": state.epoch}
        entry = {**whole, **controller.block_metrics(), **epoch}
        # Not through `Trainer.log`, at which some Trainers reset their running means.
        state.log_history.append({**entry, "step": state.global_step})
        shown = _shown(whole) | epoch
        for callback in callbacks_of(self._host):
            # The console shows the bits with the next loss.
            if isinstance(callback, PrinterCallback | ProgressCallback):
                continue
            logs = dict(entry if is_reporter(callback) else shown)
            callback.on_log(args, state, control, logs=logs, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the bits first in a log of the loss, for all callbacks; all other figures go to `trainer_state.json`."""
        if self.controller is None or logs is None or "loss" not in logs:
            return
        metrics = self._last_in_float or self.controller.metrics()
        parts = {} if self.trainer is None else self.trainer.loss_parts()
        if state.log_history:
            state.log_history[-1] = {**metrics, **parts, **state.log_history[-1]}
        rest = dict(logs)
        logs.clear()
        logs.update({**_shown(metrics), **parts, **rest})

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Let quantized weights outlive a batch from here on; no event comes before the first one."""
        if self.controller is not None:
            self.controller.set_evaluating(True)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Let quantized weights live no longer than their passes again."""
        if self.controller is not None:
            self.controller.set_evaluating(False)

    on_predict = on_evaluate

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Complete a sharded checkpoint; before the target precision none is a candidate for the best one."""
        if self.controller is None:
            return
        if state.is_world_process_zero:
            complete_checkpoint(
                checkpoint_folder(self._host),
                self.controller.model,
                kwargs.get("processing_class"),
            )
        if not self.controller.has_arrived:
            forget_best(state)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Take the bits of the weights that training ends with, perhaps the best checkpoint's, and deliver the model.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        controller = self.controller
        self._stop_listening()
        if controller is None:
            return
        if controller.sensitivity is not None:
            controller.sensitivity.report(time.perf_counter() - self._began)
        best = state_of_best(state) if args.load_best_model_at_end else None
        if best is not None:
            controller.load_state_dict(best)
        else:
            # A schedule-free optimizer trains other weights than it evaluates.
            optimizer: Any = kwargs.get("optimizer")
            if hasattr(optimizer, "eval"):
                optimizer.eval()
            controller.refresh()
        controller.check_ranks()
        # For trainer.save_state(), which is called after this: its file goes to the Hub
        # with the rest.
        entry = self.state()
        for part in (entry["args"], entry["attributes"]["saved"]):
            part["config"] = shareable(part["config"])
        callback_states(state)[self._name] = entry
        if state.is_world_process_zero and not controller.has_arrived:
            early = messages.ended_early(
                self.bits,
                self.config,
                controller.schedule.steps,
                args.load_best_model_at_end,
            )
            logger.warning("moq_hf: %s", early)
        if self._kept is None and self.config.prove and state.global_step > 0:
            batch = first_batch(kwargs.get("train_dataloader"))
            self._kept = None if batch is None else kept_batch(batch)
        if not controller.has_begun:
            return
        # Another callback may change the weights at the end, as that of an EMA does.
        self._after_all(self._deliver, "on_train_end")

    @property
    def _folder(self) -> Path:
        """The folder for the packed model; each trial of a search has a separate one."""
        return checkpoint_folder(self._host).parent / "quantized"

    def _deliver(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Write the packed model and the state of the run, and sum the run up for the user."""
        controller = self.controller
        assert controller is not None
        folder = self._folder
        try:
            self.delivered = write_result(
                self._host, controller.model, folder, self, run=self._host
            )
        # Training is done: what cannot be written here is still the Trainer's to save.
        except Exception as error:
            logger.warning(
                "moq_hf: nothing is delivered to %s: %s. The trained model is in memory, "
                "and save_quantized(trainer.model, FOLDER) writes it elsewhere, as moq-hf pack does from a checkpoint",
                folder,
                one_line(error, named=not isinstance(error, MoQError)),
            )
        if args.should_save:
            try:
                state.save_to_json(str(folder.parent / STATE_FILE))
            except OSError as error:
                logger.warning(
                    "moq_hf: moq-hf report will not find this run: %s", one_line(error)
                )
        if state.is_world_process_zero:
            self._close(controller, state, best_step(args, state))
        is_told = self.trainer is not None or tells_of_saves(controller.model)
        if args.should_save and not is_told:
            tell_of_saves(self._host, self._tell_of_floats)

    def _close(
        self, controller: MoQController, state: TrainerState, best: int | None
    ) -> None:
        """Print how the run ended, and where the result is."""
        text = "moq_hf:"
        if controller.has_arrived and self.plan is not None:
            planned = [
                switch.step
                for block in self.plan.blocks
                for switch in block.switches[-1:]
            ] or [0]
            text += f" {messages.arrival(self.bits, controller.history, planned)}"
        if best:
            text += f" Best checkpoint: step {best:,}."
        done = self.delivered
        if done is None:
            text += " Nothing is delivered."
        elif state.is_hyper_param_search:
            text += f" {done.summary} In {done.path}"
        else:
            text += f" {done.closing()}\nReport: moq-hf report {done.path.parent}"
        tqdm.write(text)

    def _tell_of_floats(self, folder: Path) -> None:
        """Say that a stock Trainer has saved float weights in a folder."""
        if self.delivered is not None:
            tqdm.write(
                f"moq_hf: {folder} has the float weights, which training can go on with; "
                f"the quantized model is in {self.delivered.path}"
            )

    def answers(self, args: TrainingArguments) -> ReferenceOutputs | None:
        """The model's answers to a batch of its run, to compare those of the files with; called in every process.

        Args:
            args: The Trainer's.

        Returns:
            The answers, in processes that save; None without a batch, before training
            or with `prove: false`.
        """
        if self.controller is None or self._kept is None:
            return None
        model = self.controller.model
        # A sharded model must answer in every process.
        if not args.should_save and not has_gathered_weights(model):
            return None
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        return ReferenceOutputs(model, self._kept, dtype)

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Keep a training micro-batch, as `loss` takes it, if sensitivity will be measured on it."""
        if self.controller is not None:
            self.controller.observe(inputs)

    def _listen(self, controller: MoQController, is_compiled: bool) -> None:
        """Watch what goes through the model in training, if anything is wanted of it."""
        self._stop_listening()
        # Hooks of a compiled model would be compiled too, so the batch of its proof is
        # taken from the data loader in the end.
        self._kept = None
        self._readers_checked = is_compiled
        is_measured = controller.sensitivity is not None and not self.is_handed_batches
        if is_measured or (self.config.prove and not is_compiled):
            self._hook = on_training_batch(controller.model, self._take)

    def _stop_listening(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _take(self, inputs: Mapping[str, Any]) -> None:
        """Take what went through the model in training: keep the first batch, measure sensitivity on some."""
        if self._kept is None and self.config.prove and self.controller is not None:
            self._kept = kept_batch(inputs, self.controller.model)
        if not self.is_handed_batches:
            self.observe(inputs)


def write_result(
    trainer: Trainer,
    model: nn.Module,
    folder: Path,
    callback: MoQCallback | None,
    **more: Any,
) -> Delivered | None:
    """Deliver the model of a run with its tokenizer and metrics; every process must call it.

    Args:
        trainer: Any Trainer, a stock one too.
        model: A model with quantized layers.
        folder: The folder to write.
        callback: The callback that trains the model, and has kept a batch to prove the
            files on; None without one.
        **more: More fields of `SaveOptions`.

    Returns:
        What was written; None in processes that do not save.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    args = trainer.args
    tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    taught = None if callback is None else callback.trainer
    teaching = NOT_TAUGHT if taught is None else taught.teaching()
    options = SaveOptions(
        processing_class=trainer.processing_class or tokenizer,
        controller=None if callback is None else callback.controller,
        metrics=metrics_of(trainer),
        float_metrics=getattr(trainer, "float_metrics", None),
        teaching=teaching,
        **more,
    )
    answers = None if callback is None else callback.answers(args)
    with gathered_state_dict(model, args.save_on_each_node) as gathered:
        if not args.should_save:
            return None
        if gathered is not None:
            options = replace(options, state_dict=gathered)
        return deliver(model, folder, options, answers)


def metrics_of(trainer: Any) -> Mapping[str, Any]:
    """The metrics to deliver: `final_metrics` of a `MoQTrainer`, else those of the last evaluation."""
    state = trainer.state
    given: Mapping[str, Any] | None = getattr(trainer, "final_metrics", None)
    return given or last_metrics(state.log_history, best_step(trainer.args, state))


def _shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in _SHOWN if name in metrics}


def _is_compiled(
    model: nn.Module, controller: MoQController, args: TrainingArguments
) -> bool:
    if args.torch_compile or uncompiled(model) is not model:
        return True
    return any(map(is_compiled_in_place, controller.model.modules()))
