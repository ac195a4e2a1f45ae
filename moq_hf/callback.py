"""`MoQCallback`: the Trainer's events translated into calls on the `MoQController`."""

import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .config import MoQConfig, MoQError
from .controller import MoQController
from .sensitivity import Inputs

logger = logging.getLogger(__name__)


class MoQCallback(TrainerCallback, ExportableState):
    """Mixture-of-Quantization for any `Trainer`: `Trainer(..., callbacks=[MoQCallback("moq.json")])`.

    The model is made ready when the Trainer is built, and again (a `model_init` makes a new one) when training
    begins. After each optimizer step that was not skipped the schedule advances and every weight is quantized once.
    A run that resumes from a checkpoint goes on where the checkpoint was.

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
        # The Trainer can make a new callback from the saved state, which holds no functions.
        self.loss_was_given = loss is not None
        self._tap: RemovableHandle | None = None
        self._began = 0.0
        # Set by MoQTrainer, which repairs the stock Trainer's loss scale.
        self.loss_is_repaired = False
        self._switched = self._arrived = False

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into `trainer_state.json`, in JSON types."""
        saved = None if self.controller is None else self.controller.state_dict()
        attributes = {
            "saved": saved,
            "loss_is_repaired": self.loss_is_repaired,
            "loss_was_given": self.loss_was_given,
        }
        return {"args": {"config": self.config.to_dict()}, "attributes": attributes}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Make the layers quantized ones, before anything wraps the model."""
        if not self.config.enabled:
            logger.info("moq_hf is off: the config says enabled: false")
            return
        self._build(args, state, kwargs["model"], None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the schedule, or go on with the checkpoint's.

        Raises:
            MoQError: The run is too short for anything to be quantized, there are two MoQCallbacks, the checkpoint
                is of another config, or the `loss` that was given is lost.
        """
        if not self.config.enabled:
            return
        controller = self._build(args, state, kwargs["model"], state.max_steps)
        self._began = time.perf_counter()
        if controller.sensitivity is not None:
            if self.loss_was_given and self.loss is None:
                raise MoQError(
                    "restore_callback_states_from_checkpoint makes a new MoQCallback, which lacks the loss that was "
                    "given to the first one; MoQCallback restores its state without that flag: leave it out"
                )
            rows = (state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps
            controller.sensitivity.plan(state.max_steps, rows, args.bf16 or args.fp16)
            # MoQTrainer hands its batches over itself.
            if not self.loss_is_repaired:
                self._listen(controller.model)
        resumed = self._saved_state(state) if state.global_step > 0 else None
        if resumed is not None:
            controller.load_state_dict(resumed)
            logger.info("resumed at step %d, mean %.2f bits", state.global_step, controller.mean_bits)
        elif state.global_step > 0:
            logger.warning(
                "moq_hf: the checkpoint at step %d was made without MoQ: its schedule starts now", state.global_step
            )
        if state.is_world_process_zero:
            logger.info("%s", controller.summary())
            if controller.sensitivity is not None:
                logger.info("%s", controller.sensitivity.summary())
            self._warn(controller, args, state)
        # A checkpoint that was made without this callback has no entry, and the next save would fail on that.
        _entries(state)[type(self).__name__] = self.state()
        self._forget_best(state)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance by one step, with eigenvalues if a drop is due; a step that the gradient scaler skipped is none.

        Raises:
            MoQError: A weight holds NaN or Inf, or the loss cannot be measured.
        """
        if self.controller is None:
            return
        if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
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
            logger.info("step %d: every layer is at %d bits", state.global_step, self.config.target_bits)
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
        if controller.sensitivity is not None:
            controller.sensitivity.report(time.perf_counter() - self._began)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint) / "trainer_state.json"
            best = json.loads(path.read_text(encoding="utf-8"))["stateful_callbacks"][type(self).__name__]
            controller.load_state_dict(best["attributes"]["saved"])
        else:
            controller.refresh()
        if state.is_world_process_zero and not controller.at_target:
            logger.warning(
                "moq_hf: training ended at a mean of %.2f bits, before every layer was at %d bits%s",
                controller.mean_bits,
                self.config.target_bits,
                "; no checkpoint was a candidate for load_best_model_at_end" if args.load_best_model_at_end else "",
            )

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Take a training micro-batch, as `loss` takes it, for measuring eigenvalues; without them it does nothing."""
        controller = self.controller
        if controller is not None and controller.sensitivity is not None and not controller.at_target:
            controller.sensitivity.samples.add(inputs)

    def _listen(self, model: nn.Module) -> None:
        """Observe what goes through the model in training."""
        if self._tap is not None:
            self._tap.remove()
        kinds = inspect.signature(model.forward).parameters.values()
        names = [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD]

        def tap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not module.training:
                return
            if len(args) > len(names):
                raise MoQError(
                    "eigenvalue: the model is called with positional arguments that its forward does not name"
                )
            if self.loss is None:
                _loss_of(output)
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            # The mean over what is measured is meant, not over the optimizer step's batch.
            inputs.pop("num_items_in_batch", None)
            self.observe(inputs)

        outside = torch.compiler.disable(tap)  # type: ignore[no-untyped-call]
        self._tap = model.register_forward_hook(outside, with_kwargs=True)

    def _measured_loss(self, inputs: Inputs) -> Tensor:
        model = cast(MoQController, self.controller).model
        return _loss_of(model(**inputs)) if self.loss is None else self.loss(model, dict(inputs))

    def _build(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, total_steps: int | None
    ) -> MoQController:
        if isinstance(_entries(state).get(type(self).__name__), list):
            raise MoQError("two MoQCallbacks in one Trainer: pass one (MoQTrainer(moq_config=) brings its own)")
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._switched = self._arrived = False
        self.controller = MoQController(model, self.config, total_steps, dtype)
        return self.controller

    def _saved_state(self, state: TrainerState) -> Mapping[str, Any] | None:
        entry = _entries(state).get(type(self).__name__)
        saved: Mapping[str, Any] | None = None if entry is None else entry["attributes"]["saved"]
        return saved

    def _forget_best(self, state: TrainerState) -> None:
        if self.controller is not None and not self.controller.at_target:
            _reset_best(state)

    def _warn(self, controller: MoQController, args: TrainingArguments, state: TrainerState) -> None:
        notes = controller.warnings()
        schedule, total = self.config.schedule, state.max_steps
        if schedule.offset >= total:
            raise MoQError(
                f"quantize_schedule.schedule_offset {schedule.offset} is not before the end of training at "
                f"{total} optimizer steps: nothing would be quantized; set it to less, 0 for instance"
            )
        needed = controller.schedule.steps_to_target()
        if needed > total:
            drops = self.config.start_bits - self.config.target_bits
            fits = (total - schedule.offset) // 2 ** (drops - 1)
            notes.append(
                f"the run has {total} optimizer steps but reaches {self.config.target_bits} bits only at step {needed} "
                f"(drops come at {schedule.offset} + {schedule.period} * 1, 2, 4, ...): "
                + (f"a quantize_period of at most {fits} fits, " if fits else "no quantize_period fits, ")
                + "or start_bits nearer to target_bits"
            )
        if not self.loss_is_repaired and _scales_loss_wrongly(controller.model, args):
            notes.append(
                "this model's loss ignores num_items_in_batch, so the stock Trainer multiplies loss and gradients by "
                f"{args.gradient_accumulation_steps} accumulation steps times {args.world_size} processes; set "
                "model.accepts_loss_kwargs = False before making the Trainer, or use MoQTrainer"
            )
        for note in notes:
            logger.warning("moq_hf: %s", note)


def _entries(state: TrainerState) -> dict[str, Any]:
    # Declared as a list of callbacks, a dict of their states by class name once the Trainer has it.
    return cast(dict[str, Any], state.stateful_callbacks)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise MoQError(
        "eigenvalue: the model's output has no loss, since the Trainer computes it (label smoothing, "
        "compute_loss_func, an own compute_loss): use MoQTrainer, or give MoQCallback the function loss(model, inputs)"
    )


def _reset_best(state: TrainerState) -> None:
    state.best_metric = None
    state.best_global_step = None
    state.best_model_checkpoint = None


def _scales_loss_wrongly(model: nn.Module, args: TrainingArguments) -> bool:
    """Whether the stock Trainer would multiply this model's loss: read off its source, since no batch is at hand."""
    if args.gradient_accumulation_steps * args.world_size == 1:
        return False
    if not getattr(model, "accepts_loss_kwargs", True):
        return False
    forward = type(model).forward
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values())
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    return takes_any and "Loss(" in source and "loss_function" not in source
