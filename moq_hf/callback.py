"""`MoQCallback`: the Trainer's events translated into calls on the `MoQController`."""

import inspect
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .config import MoQConfig
from .errors import MoQError, one_line
from .model.convert import is_quantized
from .model.selection import select_layers
from .names import uncompiled
from .packed.delivery import deliver
from .packed.proof import Answers
from .packed.question import kept_batch
from .packed.save import Companions
from .packed.state import shareable
from .plan import Plan, outcome, plan
from .processes import is_sharded, whole_state_dict
from .training.checkpoints import checkpoints, fault_of
from .training.controller import MoQController
from .training.resume import check_room, describe, planned_steps, saved_state
from .training.samples import Inputs
from .transformers_seams import (
    CALLBACKS_KEY,
    ExportableState,
    callback_states,
    ignores_loss_count,
    is_compiled_in_place,
    loss_scale,
)

logger = logging.getLogger(__name__)


class MoQCallback(TrainerCallback, ExportableState):
    """Mixture-of-Quantization for any `Trainer`: `Trainer(..., callbacks=[MoQCallback("moq.json")])`.

    The model is made ready when the Trainer is built, and again (a `model_init` makes a new one) when training
    begins. After each optimizer step that was not skipped the schedule advances and every weight is quantized once.
    A run that resumes from a checkpoint goes on where the checkpoint was. At the end of training the packed model is
    written to the folder `quantized` in the output folder; `MoQTrainer` leaves that to `save_model`.

    With `eigenvalue.enabled` it takes the batches that go through the model in training, and the loss that the model
    gives for them.

    Args:
        config: A `MoQConfig`, a mapping or the path of a JSON file.
        loss: For `eigenvalue.enabled`: gives the scalar mean loss of a model on a batch, where that is not the loss in
            the model's output (label smoothing, `compute_loss_func`). It takes the model and the keyword arguments of
            its forward pass as a dict.

    Raises:
        MoQConfigError: The config is wrong.

    Attributes:
        controller: The `MoQController` of the model in training; None before that and if the config is not enabled.
    """

    def __init__(
        self,
        config: MoQConfig | Mapping[str, Any] | str | os.PathLike[str],
        loss: Callable[[nn.Module, Inputs], Tensor] | None = None,
    ) -> None:
        self.config = MoQConfig.load(config)
        self.controller: MoQController | None = None
        self.loss = loss
        # MoQTrainer's own, which is that of the Trainer in training now.
        self.trainer_loss: Callable[[nn.Module, Inputs], Tensor] | None = None
        # The Trainer can make a new callback from the saved state, which holds no functions.
        self.loss_was_given = loss is not None
        self._tap: RemovableHandle | None = None
        self._began = 0.0
        # A MoQTrainer repairs the stock Trainer's loss scale, hands over its batches and saves packed models itself.
        self.in_moq_trainer = self._joins_moq_trainer = False
        # The fingerprint of the teacher, which itself is MoQTrainer's.
        self.teacher: int | None = None
        self._state: TrainerState | None = None
        self._switched = self._arrived = False
        self._scale = 0.0
        self._plan: Plan | None = None
        # A batch of this run, to prove on what it delivers.
        self._kept: dict[str, Any] | None = None
        self._readers_checked = False

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into `trainer_state.json`, in JSON types."""
        saved = None if self.controller is None else self.controller.state_dict()
        step = None if self._state is None else self._state.global_step
        attributes = {"saved": saved, "saved_at": step, "loss_was_given": self.loss_was_given, "teacher": self.teacher}
        return {"args": {"config": self.config.to_dict()}, "attributes": attributes}

    def join_moq_trainer(self) -> None:
        """Tell the callback that the Trainer which is being built is a MoQTrainer."""
        self._joins_moq_trainer = True

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the layers quantized ones, before anything wraps the model."""
        # The same callback may be given to another Trainer later.
        self.in_moq_trainer, self._joins_moq_trainer = self._joins_moq_trainer, False
        self.trainer_loss = self.teacher = None
        if not self.config.enabled:
            logger.info("moq_hf is off: the config says enabled: false")
            return
        model = uncompiled(kwargs["model"])
        if is_quantized(model):
            # By an earlier run: evaluating it must give what that run delivered.
            select_layers(model, self.config)
            if self.controller is not None and self.controller.model is not model:
                self.controller = None
            logger.info("the model is quantized already, and stays as it is until training begins")
            return
        # How long the run is will be known when it begins, with a new controller; none of its steps is taken before.
        self._build(args, state, kwargs["model"], sys.maxsize)
        if not self.in_moq_trainer and state.is_world_process_zero:
            _warn_of_half_checkpoint(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the schedule, or go on with the checkpoint's.

        Raises:
            MoQError: The run is too short for anything to be quantized or for the deadline, there are two MoQCallbacks,
                the checkpoint is of another config, the `loss` that was given is lost, or the processes disagree.
        """
        self._state = state
        resumed = self._saved_state(state) if state.global_step > 0 else None
        if not self.config.enabled:
            if resumed is not None:
                logger.warning(
                    "moq_hf: the checkpoint at step %d was made with MoQ, and the config says enabled: false: the run "
                    "goes on in float",
                    state.global_step,
                )
            return
        if self.config.distillation.teacher is not None and not self.in_moq_trainer:
            raise MoQError("distillation.teacher: a callback cannot change the loss; use MoQTrainer")
        own = self.controller is not None and self.controller.schedule.steps == 0
        if resumed is None and not own and is_quantized(kwargs["model"]):
            logger.warning(
                "moq_hf: the model was quantized before this run, which begins its schedule anew, from float"
            )
        if resumed is None:
            self._check_length(state)
            length = state.max_steps - state.global_step
        else:
            length = planned_steps(self.config, resumed, state.max_steps)
        controller = self._build(args, state, kwargs["model"], length)
        self._began = time.perf_counter()
        self._scale = loss_scale(kwargs.get("optimizer"))
        if controller.sensitivity is not None:
            if self.loss_was_given and self.loss is None:
                raise MoQError(
                    "restore_callback_states_from_checkpoint makes a new MoQCallback, which lacks the loss that was "
                    "given to the first one; MoQCallback restores its state without that flag: leave it out"
                )
            rows = (state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps
            controller.sensitivity.plan(state.max_steps, rows, args.bf16 or args.fp16)
        # A compiled model's hooks are compiled too; what it is proven on is taken from the data in the end.
        compiled = _is_compiled(kwargs["model"], args)
        self._kept, self._readers_checked = None, compiled
        # MoQTrainer hands over what eigenvalues are measured on.
        measured = controller.sensitivity is not None and not self.in_moq_trainer
        if measured or (self.config.prove and not compiled):
            self._listen(controller.model)
        if resumed is not None:
            changed = controller.load_state_dict(resumed)
            logger.info(
                "resumed at step %d, mean %.2f bits over the whole model", state.global_step, controller.mean_bits
            )
            if changed:
                logger.warning("moq_hf: the run goes on with another MoQ config: %s", describe(changed))
            before = callback_states(state)[type(self).__name__]["attributes"]
            taught_by = before.get("teacher")
            if taught_by != self.teacher and "distillation.teacher" not in changed:
                had = "a" if self.teacher is None else "no" if taught_by is None else "another"
                goes_on = "without one" if self.teacher is None else "with the one given"
                logger.warning(
                    "moq_hf: the checkpoint at step %d had %s teacher: the run goes on %s",
                    state.global_step,
                    had,
                    goes_on,
                )
            saved_at = before.get("saved_at", state.global_step)
            if saved_at != state.global_step:
                logger.warning(
                    "moq_hf: the checkpoint at step %d was trained without MoQ after step %s: its schedule goes on as "
                    "after that step",
                    state.global_step,
                    saved_at,
                )
        elif state.global_step > 0:
            logger.warning(
                "moq_hf: the checkpoint at step %d was made without MoQ: its schedule starts now, with quantization "
                "after step %d",
                state.global_step,
                state.global_step + self.config.schedule.offset,
            )
            # What was evaluated in float is no candidate for the best quantized model.
            _reset_best(state)
        controller.check_ranks()
        schedule = controller.schedule
        # Steps that the schedule never counted: those before it began, and skipped ones.
        steps = state.max_steps - (state.global_step - schedule.steps)
        # With a deadline, a resumed schedule is that of the run that it began in.
        planned_for = schedule.total_steps if schedule.deadline_step is not None else None
        check_room(schedule, steps)
        self._plan = plan(self.config, planned_for or steps)
        if state.is_world_process_zero:
            logger.info("%s", controller.summary())
            if controller.sensitivity is not None:
                logger.info("%s", controller.sensitivity.summary())
            tqdm.write(f"moq_hf plan: {self._plan.table()}\nin quantized layers: {controller.coverage()}")
            self._warn(controller, args)
            if planned_for not in (None, steps, state.max_steps):
                logger.warning(
                    "moq_hf: the checkpoint's schedule was planned for a run of %d optimizer steps, this one has %d; "
                    "its deadline stays at step %d",
                    planned_for,
                    steps,
                    schedule.deadline_step,
                )
        # A checkpoint that was made without this callback has no entry, and the next save would fail on that.
        callback_states(state)[type(self).__name__] = self.state()
        self._forget_best(state)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance by one step, with eigenvalues if a drop is due; a step that the gradient scaler skipped is none.

        Raises:
            MoQError: A weight holds NaN or Inf, the loss cannot be measured, or the processes disagree.
        """
        if self.controller is None:
            return
        skipped = self._was_skipped(kwargs.get("optimizer"))
        self.controller.check_ranks(skipped)
        if not self._readers_checked:
            self._readers_checked = True
            self.controller.check_readers()
        if skipped:
            return
        was_at_target = self.controller.at_target
        switches = self.controller.step(self.controller.measure(self._measured_loss))
        if switches:
            self._switched = True
        self._arrived = self.controller.at_target and not was_at_target

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log a step at which bits changed; let the best metric start afresh when the last block arrives."""
        if self.controller is None:
            return
        if self._switched:
            control.should_log = True
        if self._arrived:
            logger.info(
                "step %d: every quantized layer is at %d bits, %s; mean %.2f bits over the whole model",
                state.global_step,
                self.config.target_bits,
                self.controller.coverage(),
                self.controller.mean_bits,
            )
        if self._arrived or not self.controller.at_target:
            _reset_best(state)
        self._switched = self._arrived = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the bits to a training log: all of them to `trainer_state.json`, their mean to the progress bar."""
        if self.controller is None or logs is None or "loss" not in logs:
            return
        metrics = self.controller.metrics()
        if state.log_history:
            state.log_history[-1].update(metrics)
        # MoQTrainer logs the blocks for the reporters, which have them by now; on the screen they would be a wall.
        for name in metrics:
            logs.pop(name, None)
        logs["moq/mean_bits"] = metrics["moq/mean_bits"]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint from before the target precision is no candidate for the best one."""
        self._forget_best(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Bring the quantized weights in line with the weights that training ends with, those of the best checkpoint.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        controller = self.controller
        if self._tap is not None:
            self._tap.remove()
        if controller is None:
            return
        if state.is_world_process_zero and self._plan is not None:
            tqdm.write(f"moq_hf: {outcome(self._plan, controller.history, controller.schedule.steps)}")
        if controller.sensitivity is not None:
            controller.sensitivity.report(time.perf_counter() - self._began)
        best = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint) / "trainer_state.json"
            entries = json.loads(path.read_text(encoding="utf-8"))[CALLBACKS_KEY]
            best = saved_state(entries[type(self).__name__]) if type(self).__name__ in entries else None
            if best is None:
                logger.warning(
                    "moq_hf: %s, the best checkpoint, was made without MoQ: its weights get the bits of now",
                    state.best_model_checkpoint,
                )
        if best is not None:
            controller.load_state_dict(best)
        else:
            controller.refresh()
        controller.check_ranks()
        # For trainer.save_state(), which is called after this: its file goes to the Hub with the rest.
        entry = self.state()
        for part in (entry["args"], entry["attributes"]["saved"]):
            part["config"] = shareable(part["config"])
        callback_states(state)[type(self).__name__] = entry
        if state.is_world_process_zero and not controller.at_target:
            logger.warning(
                "moq_hf: training ended at a mean of %.2f bits over the whole model, before every quantized layer was "
                "at %d bits%s",
                controller.mean_bits,
                self.config.target_bits,
                "; no checkpoint was a candidate for load_best_model_at_end" if args.load_best_model_at_end else "",
            )
        if self._kept is None and self.config.prove and state.global_step > 0:
            self._kept = _first_batch(kwargs.get("train_dataloader"))
        if not self.in_moq_trainer and controller.has_begun:
            answers, gathered = self.answers(args), whole_state_dict(controller.model)
            if args.should_save:
                tokenizer, folder = kwargs.get("processing_class"), Path(cast(str, args.output_dir), "quantized")
                companions = Companions(tokenizer, controller, last_metrics(state), state_dict=gathered)
                self._deliver(controller.model, folder, companions, answers)

    def _deliver(self, model: nn.Module, folder: Path, companions: Companions, answers: Answers | None) -> None:
        try:
            tqdm.write(f"moq_hf: {deliver(model, folder, companions, answers)}")
        # Training is done: what cannot be written here is still the Trainer's to save.
        except Exception as error:
            logger.warning("moq_hf: nothing is delivered to %s: %s", folder, one_line(error, named=True))

    def answers(self, args: TrainingArguments) -> Answers | None:
        """What the model answers to a batch of its run, to be held against what is delivered; in every process.

        Args:
            args: The Trainer's.

        Returns:
            The answers, in processes that save; None without a batch, before training or with `prove: false`.
        """
        if self.controller is None or self._kept is None:
            return None
        model = self.controller.model
        # Shards answer in all processes, or in none.
        if not args.should_save and not any(map(is_sharded, model.parameters())):
            return None
        return Answers(model, self._kept, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Take a training micro-batch, as `loss` takes it, for measuring eigenvalues; without them it does nothing."""
        controller = self.controller
        if controller is not None and controller.sensitivity is not None and not controller.at_target:
            controller.sensitivity.samples.add(inputs)

    def _listen(self, model: nn.Module) -> None:
        """Observe what goes through the model in training."""
        if self._tap is not None:
            self._tap.remove()
        self._tap = model.register_forward_hook(_Tap(self, model), with_kwargs=True)

    def take(self, inputs: Mapping[str, Any]) -> None:
        """Take what went through the model in training: keep the first batch, measure eigenvalues on some."""
        if self._kept is None and self.config.prove:
            self._kept = kept_batch(inputs)
        if self.in_moq_trainer or self.controller is None or self.controller.sensitivity is None:
            cast(RemovableHandle, self._tap).remove()
        else:
            self.observe(inputs)

    def _measured_loss(self, inputs: Inputs) -> Tensor:
        model = cast(MoQController, self.controller).model
        loss = self.loss or self.trainer_loss
        return _loss_of(model(**inputs)) if loss is None else loss(model, dict(inputs))

    def _build(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, total_steps: int | None
    ) -> MoQController:
        if isinstance(callback_states(state).get(type(self).__name__), list):
            raise MoQError("two MoQCallbacks in one Trainer: pass one (MoQTrainer(moq_config=) brings its own)")
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._switched = self._arrived = False
        # With FSDP the Trainer shows what torch.compile made.
        self.controller = MoQController(uncompiled(model), self.config, total_steps, dtype)
        return self.controller

    def _was_skipped(self, optimizer: Any) -> bool:
        """Whether the gradient scaler skipped the step just taken."""
        before, self._scale = self._scale, loss_scale(optimizer)
        # A fused optimizer is called whatever the gradients are and skips by itself, which Accelerate does not see; the
        # scale falls then too.
        return bool(getattr(optimizer, "step_was_skipped", False)) or self._scale < before

    def _saved_state(self, state: TrainerState) -> Mapping[str, Any] | None:
        entry = callback_states(state).get(type(self).__name__)
        return None if entry is None else saved_state(entry)

    def _check_length(self, state: TrainerState) -> None:
        """Before a schedule that starts in the middle of a run: whether quantization begins before its end."""
        first = state.global_step + self.config.schedule.offset
        if state.global_step > 0 and first >= state.max_steps:
            place = "its last step," if state.global_step >= state.max_steps else "step"
            raise MoQError(
                f"the checkpoint is at {place} {state.global_step} of {state.max_steps}, and was made without MoQ, "
                f"whose schedule starts there: with schedule_offset {self.config.schedule.offset} nothing would be "
                f"quantized before the end. Train for more than {first} steps (max_steps, num_train_epochs)"
            )

    def _forget_best(self, state: TrainerState) -> None:
        if self.controller is not None and not self.controller.at_target:
            _reset_best(state)

    def _warn(self, controller: MoQController, args: TrainingArguments) -> None:
        notes = [*controller.warnings(), *(self._plan.notes if self._plan is not None else ())]
        if not self.in_moq_trainer and _scales_loss_wrongly(controller.model, args):
            notes.append(
                "this model's loss ignores num_items_in_batch, so the stock Trainer multiplies loss and gradients by "
                f"{args.gradient_accumulation_steps} accumulation steps times {args.world_size} processes; set "
                "model.accepts_loss_kwargs = False before making the Trainer, or use MoQTrainer"
            )
        for note in notes:
            logger.warning("moq_hf: %s", note)


class _Tap:
    """A forward hook that shows a callback the batches in training. A copy of the model or a saved one has it inert."""

    def __init__(self, callback: MoQCallback, model: nn.Module) -> None:
        self._callback: Callable[[], MoQCallback | None] = weakref.ref(callback)
        kinds = inspect.signature(model.forward).parameters.values()
        self._names = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        callback = self._callback()
        if callback is None or not module.training or not torch.is_grad_enabled():
            return
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        # The mean over what is measured is meant, not over the optimizer step's batch.
        inputs.pop("num_items_in_batch", None)
        callback.take(inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._callback, self._names = _nothing, []


def _nothing() -> None:
    return None


def last_metrics(state: TrainerState) -> dict[str, Any]:
    """The last evaluation in the log; that of the best checkpoint, if one was chosen."""
    logs = [log for log in state.log_history if any(name.startswith("eval_") for name in log)]
    best = [log for log in logs if log["step"] == state.best_global_step]
    return dict((best or logs or [{}])[-1])


def _is_compiled(model: Any, args: TrainingArguments) -> bool:
    """Whether torch.compile traces the model or a part of it."""
    if args.torch_compile or uncompiled(model) is not model:
        return True
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(is_compiled_in_place(part) for part in parts)


def _first_batch(dataloader: Any) -> dict[str, Any] | None:
    """A training batch, for the proof, where the model's own could not be listened to."""
    try:
        batch = next(iter(dataloader))
    # Training is done: data that cannot be read twice, or at all, must not lose its result.
    except Exception as error:
        logger.warning("moq_hf: what is delivered will not be proven, for want of a batch (%s)", type(error).__name__)
        return None
    return kept_batch(batch) if isinstance(batch, Mapping) else None


def _loss_of(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple | list) and output else None
    loss = output.get("loss") if isinstance(output, Mapping) else first
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise MoQError(
        "eigenvalue: the model's output has no loss, since the Trainer computes it (label smoothing, "
        "compute_loss_func, an own compute_loss): use MoQTrainer, or give MoQCallback the function loss(model, inputs)"
    )


def _warn_of_half_checkpoint(args: TrainingArguments) -> None:
    """Before a stock Trainer stops at it: it would say what failed to open, not why."""
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


def _reset_best(state: TrainerState) -> None:
    state.best_metric = None
    state.best_global_step = None
    state.best_model_checkpoint = None


def _scales_loss_wrongly(model: nn.Module, args: TrainingArguments) -> bool:
    """Whether the stock Trainer would multiply this model's loss."""
    return args.gradient_accumulation_steps * args.world_size > 1 and ignores_loss_count(model)
