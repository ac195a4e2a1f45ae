"""`MoQMixin` wires MoQ into a Trainer class and adds what only a subclass can do; `MoQTrainer` has it built in."""

import contextlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer

from .callback import MoQCallback, metrics_of, write_result
from .config import MoQConfig
from .config_fields import DistillationConfig
from .config_reading import nearest, places, words_of_others
from .errors import MoQConfigError, MoQError
from .loaded import config_of
from .model.convert import is_quantized, quant_layers
from .model.inventory import is_packed
from .packed.card import write_run_card
from .packed.files import save_beside
from .packed.state import STATE_NAME, hub_id, record_metrics
from .processes import has_gathered_weights
from .seams.transformers import (
    KNOWS_SCALE,
    average_loss,
    callback_states,
    callbacks_of,
    checkpoint_folder,
    metrics_apart,
    prepared_inputs,
    save_training_args,
    saves_checkpoint,
)
from .training.checkpoints import (
    STATE_FILE,
    check_whole,
    entry_of_moq,
    last_checkpoint,
)
from .training.distillation import (
    TASK,
    Pass,
    check_hidden,
    fingerprint,
    labels_at_logits,
    load_teacher,
    loss_parts,
    passes_of,
    running_alone,
    switch_off_dropout,
    weighted,
    with_logits,
)
from .training.embeddings import queries_keys_values
from .training.float_first import FloatPhase, after_float, share_of
from .training.measuring import evaluating, repeatable
from .training.messages import loss_in_words
from .training.resume import saved_state
from .training.run import Run

logger = logging.getLogger(__name__)


# The base of the mixin: its `super()` is the Trainer beside it.
if TYPE_CHECKING:
    from transformers import Trainer as _Beside
else:
    _Beside = object


class MoQMixin(_Beside):
    """Gives a Trainer class a MoQ config, a teacher and a float phase: `class MoQSFT(MoQMixin, SFTTrainer): ...`.

    Beyond what `MoQCallback` does for any Trainer:

    - A loss that ignores `num_items_in_batch` is not multiplied by accumulation steps and processes, as the stock
      Trainer of transformers 5 does with BERT's and other classifiers'. Measured on the first batch, not guessed.
    - Eigenvalues are measured with `compute_loss`, whatever it is; in TRL's Trainers with the model's own loss.
    - A teacher (`distillation` in the config) is part of the loss in training, and the parts of that loss are logged;
      evaluation has the task's own loss, which is the Trainer's, DPO's for instance. The teacher answers each forward
      pass that `compute_loss` makes with gradients.
    - `save_model` and `push_to_hub` deliver the packed model too (see `save_quantized`), with the weights as evaluated;
      the checkpoints of a run keep the float ones.

    Args:
        *args: What the Trainer takes.
        moq_config: A preset's name, the path of a JSON file, a mapping or a
            `MoQConfig`. Without it, and without keywords of a `MoQConfig`, the config
            with which the model was loaded is used, if there is one; else the model
            stays as it is.
        teacher: A float model for distillation, instead of `distillation.teacher` in
            the config, which may name a quantized one: its weights are read as floats.
        teacher_init_kwargs: For the `from_pretrained` of `distillation.teacher`:
            `token`, `cache_dir`, `revision`, ...
        float_first: Train in float for that share of the steps, above 0 and below 1;
            True is half of them. The float model is then evaluated, saved in the folder
            `float` of the output folder, and serves as the start and the teacher of
            what follows: the schedule of `moq_config` in the remaining steps, with a
            new learning rate schedule and a new optimizer state. Neither phase has
            dropout, unless `distillation.dropout` is true. The config's
            `offset` is not read.
        **kwargs: What the Trainer takes, and keywords of `MoQConfig`, which override
            what `moq_config` says.

    Raises:
        MoQConfigError: The config is wrong, or there is a keyword that neither knows.
        MoQError: The config does not fit the model, `callbacks` holds a MoQCallback
            too, `float_first` is given with a teacher, without a config, with a custom
            scheduler or with PEFT's adapters, or the mixin comes after its Trainer.

    Attributes:
        moq: The `MoQCallback`, or None.
        final_metrics: Metrics for `moq_state.json` and the model card; None takes the
            last evaluation in the log.
        float_metrics: The same of a model trained in float; with `float_first` those of
            its float phase. Set both before saving or pushing.
        teacher_fingerprint: A checksum of the teacher in use; None without one.
        float_phase: With `float_first`, the `FloatPhase` of its runs; else None.

    >>> from transformers import Seq2SeqTrainer
    >>> class MoQSeq2SeqTrainer(MoQMixin, Seq2SeqTrainer): ...
    """

    # How messages name the class that wires MoQ in.
    _wired_by = "MoQMixin"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(MoQMixin):
            raise MoQError(
                f"{cls.__name__}: MoQMixin comes after the Trainer, which would never call it: write "
                f"class {cls.__name__}(MoQMixin, {cls.__bases__[0].__name__})"
            )

    def __init__(
        self,
        *args: Any,
        moq_config: MoQConfig
        | Mapping[str, Any]
        | str
        | os.PathLike[str]
        | None = None,
        teacher: PreTrainedModel | None = None,
        teacher_init_kwargs: Mapping[str, Any] | None = None,
        float_first: bool | float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(self, Trainer):
            raise MoQError(
                f"{type(self).__name__}: MoQMixin needs a Trainer beside it: class Mine(MoQMixin, SFTTrainer)"
            )
        callbacks = list(kwargs.get("callbacks") or [])
        share = share_of(float_first)
        # Keywords that no Trainer takes go to the config, whose error says what a wrong one was meant to be.
        taken = inspect.signature(super().__init__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        own = places().keys() if takes_any else kwargs.keys()
        keywords = {
            name: kwargs.pop(name)
            for name in [*own]
            if name in kwargs and name not in taken
        }
        config = None
        words = (*inspect.signature(MoQMixin.__init__).parameters, *taken)
        known = [word for word in words if word not in ("self", "args", "kwargs")]
        for name in keywords:
            is_ours = name in places() or name in words_of_others()
            meant = None if is_ours else nearest(name, known, 0.8)
            if meant is not None:
                raise MoQConfigError(
                    f"{type(self).__name__} has no argument {name}, did you mean {meant}?"
                )
        if moq_config is not None or keywords:
            config = MoQConfig.load(moq_config, **keywords)
        if share is not None:
            given = kwargs.get("model", next(iter(args), None))
            if config is None and isinstance(given, nn.Module) and config_of(given):
                raise MoQError(
                    "float_first: the model was loaded with a MoQConfig, so it is quantized from the first step on: "
                    "load it without quantization_config, and give that to the trainer as moq_config"
                )
            if config is None or not config.enabled or teacher is not None:
                raise MoQError(
                    "float_first needs a moq_config that is enabled, no MoQCallback beside it, and no other teacher: "
                    "the model trained in float is the teacher"
                )
            config = after_float(config, share)
        if config is not None:
            callbacks.append(MoQCallback(config))
        # With two callbacks, on_init_end raises.
        self.moq = next((c for c in callbacks if isinstance(c, MoQCallback)), None)
        self.final_metrics: Mapping[str, Any] | None = None
        self.float_metrics: Mapping[str, Any] | None = None
        self.teacher_fingerprint: int | None = None
        self._loss_checked = self._loss_called = self._rates_restart = False
        self._teacher_ignored = False
        self._teacher_given = teacher is not None
        # Dropout that is switched off in the student: module, attribute, share.
        self._dropped: list[tuple[nn.Module, str, float]] = []
        # Sums over micro-batches since the last log, and how many there were.
        self._parts: dict[str, Any] = Counter()
        self._teacher: PreTrainedModel | None = None
        self.float_phase: FloatPhase | None = None
        super().__init__(*args, **{**kwargs, "callbacks": callbacks})
        loaded = None if self.moq is not None else config_of(self._student)
        if loaded is not None:
            self.moq = MoQCallback(loaded)
            self.add_callback(self.moq)
        # The Trainer's own setting, for a phase without a teacher.
        self._scaled_for_ga = getattr(self, "loss_is_scaled_for_ga", None)
        if share is not None and config is not None:
            self.float_phase = FloatPhase(self, share, self._student)
            check_hidden(self._student, config.distillation)
        self._follow(self._find_teacher(teacher, teacher_init_kwargs))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train, as `Trainer.train`; `resume_from_checkpoint=True` takes the last checkpoint that is whole.

        Raises:
            MoQError: There is no whole checkpoint, the one named is not, or what
                `MoQCallback.on_train_begin` raises.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(str(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise MoQError(
                    f"cannot resume: there is no whole checkpoint in {self.args.output_dir}"
                )
        elif resume_from_checkpoint:
            check_whole(resume_from_checkpoint)
        if self._live_moq() is None and self.moq is not None:
            raise MoQError(
                f"the MoQCallback of this {self._wired_by} was removed: its model would train on at the bits it has "
                "now, and nothing would be delivered; leave the callback in, or train a float model in another Trainer"
            )
        if self.moq is None:
            first = "call moq_hf.dequantize_model(model) first to train in float"
            found = f"this {self._wired_by} quantizes nothing"
            if is_packed(self._student):
                found = f"the quantized weights of a packed checkpoint do not train: {first}"
            elif is_quantized(self._student):
                found = f"the model trains at the bits that it has: {first}"
            logger.warning("moq_hf: without moq_config %s", found)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._restore_dropout()

    def teaching(self) -> dict[str, Any]:
        """What checkpoints and the delivered folder keep of how the model was taught, in JSON types.

        `float_steps` is the last step of the float phase, `teacher_name` the Hub id or the
        class of a teacher that the config does not name; each is None without one. Called
        by the `MoQCallback`.
        """
        steps = name = None
        teacher = self._teacher
        if self.float_phase is not None and self.moq is not None:
            steps = self.moq.run_of(self.state).offset
        elif teacher is not None and not self._teacher_ignored:
            is_named = hub_id(self._distillation.teacher) is not None
            if self._teacher_given or not is_named:
                name = hub_id(teacher.name_or_path) or type(teacher).__name__
        return {"float_steps": steps, "teacher_name": name}

    def loss_parts(self) -> dict[str, float]:
        """The parts of the loss with a teacher, before their weights; means since this was last called.

        Called by the `MoQCallback` for each log of the loss. Empty without a teacher.
        """
        count = self._parts.pop("count", 0)
        found = {f"moq/loss_{k}": float(v / count) for k, v in self._parts.items()}
        self._parts.clear()
        return found

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-batch; before the first one without a teacher, find out how the loss is scaled."""
        # With a teacher the loss is a mean, which tells nothing about the one without.
        if not self._loss_checked and self._teacher is None:
            self._loss_checked = True
            self._check_loss_scale(model, inputs, num_items_in_batch)
        moq = self._live_moq()
        if moq is not None and moq.is_handed_batches:
            moq.observe(prepared_inputs(self, inputs))
        if self._teacher is not None and not KNOWS_SCALE:
            num_items_in_batch = None
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._loss_called and (
            self._teacher is not None or self.float_phase is not None
        ):
            self._loss_called = self._teacher_ignored = True
            logger.warning(
                "moq_hf: compute_loss of %s does not call that of %s, which follows the teacher: it is not "
                "followed; call super().compute_loss",
                type(self).__name__,
                self._wired_by,
            )
        return loss

    def _find_teacher(
        self, given: PreTrainedModel | None, init_kwargs: Mapping[str, Any] | None
    ) -> PreTrainedModel | None:
        config = self._distillation
        source = given or config.teacher
        if given is not None and (self.moq is None or not self.moq.config.enabled):
            raise MoQError(
                "a teacher is for quantized training: give a moq_config that is enabled"
            )
        if init_kwargs and not isinstance(source, str):
            raise MoQError(
                "teacher_init_kwargs are for the teacher that distillation.teacher names; there is none"
            )
        if source is None:
            return None
        check_hidden(self._student, config)
        return load_teacher(
            source, self._student, config, self.args.device, init_kwargs
        )

    @property
    def _distillation(self) -> DistillationConfig:
        """The distillation section of the config; the default if nothing is quantized."""
        if self.moq is None or not self.moq.config.enabled:
            return DistillationConfig()
        return self.moq.config.distillation

    @property
    def _student(self) -> Any:
        """The model in training, without what Accelerate puts around it."""
        return self.accelerator.unwrap_model(self.model)

    def _follow(self, teacher: PreTrainedModel | None) -> None:
        """Learn from a teacher from here on; None: from the task alone."""
        self._teacher = teacher
        self._runs_alone = False
        self.teacher_fingerprint = None if teacher is None else fingerprint(teacher)
        # The loss with a teacher is a mean over the micro-batch, whatever the model's
        # own would be.
        self.loss_is_scaled_for_ga = self._scaled_for_ga if teacher is None else False

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Make the learning rate's schedule, as `Trainer.create_scheduler`; with `float_first` one for each phase.

        Raises:
            MoQError: A phase would have no step, or the schedule cannot start again.
        """
        moq = self._live_moq()
        if self.float_phase is None:
            if moq is not None:
                moq.run_of(self.state).check_without_float_phase()
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise MoQError(
                "float_first restarts the learning rate's schedule: leave the scheduler to the Trainer, and out of "
                "a DeepSpeed config"
            )
        run = cast(MoQCallback, moq).run_of(self.state)
        run.check_float_first()
        step = run.offset
        # A checkpoint may be beyond the end that the run has now.
        num_training_steps = max(num_training_steps, run.first)
        if not 0 < step < num_training_steps:
            raise MoQError(
                f"float_first {self.float_phase.share:g} of {num_training_steps} optimizer steps is step {step}: it "
                "leaves a phase without a step; train for more steps (max_steps, num_train_epochs)"
            )
        phases = []
        for steps in (step, num_training_steps - step):
            phases.append(super().create_scheduler(steps, optimizer))
            self.lr_scheduler = None
        try:
            scheduler = SequentialLR(phases[0].optimizer, phases, [step])
        except ValueError as error:
            raise MoQError(
                f"float_first: lr_scheduler_type makes a {type(phases[0]).__name__}, which cannot start again after "
                "the float phase; take one that depends on the step alone, linear for instance"
            ) from error
        self.lr_scheduler = cast(Any, scheduler)
        self._rates_restart = True
        return scheduler

    def begin_phase(self, run: Run) -> None:
        """Begin or go on with a run. Called by the `MoQCallback`.

        Raises:
            MoQError: The optimizer or the learning rate cannot start afresh; the float
                model is missing, or belongs to another run.
        """
        phase = self.float_phase
        self._parts.clear()
        # auto_find_batch_size may restart a run in its second phase.
        self._restore_dropout()
        if phase is None:
            self._begin_following("with a teacher,")
            return
        if not self._rates_restart:
            raise MoQError(
                f"float_first restarts the learning rate's schedule, but {type(self).__name__}.create_scheduler "
                f"does not call that of {self._wired_by}: call super().create_scheduler, or leave it out"
            )
        if not run.has_begun:
            phase.begin()
            self._take_from_phase(None)
            self._tell(
                f"float first: the model trains in float up to step {run.offset:,}"
                f"{self._switch_off_dropout()}; it is then kept in {phase.folder}, as start and teacher of the "
                "quantized rest"
            )
            return
        phase.go_on()
        self._take_from_phase(phase)
        if run.beside.get("teacher") != self.teacher_fingerprint:
            raise MoQError(
                f"cannot resume: the model in {phase.folder} is not the float model of this run: it was written "
                "by another one. Put the right one there, or start a new run"
            )
        self._begin_following("the float phase is over:")

    def end_float_phase(self) -> None:
        """Keep the float model and follow it. Called by the `MoQCallback` before the first weight is quantized."""
        phase = self.float_phase
        if phase is not None:
            phase.end()
            self._take_from_phase(phase)
            step = self.state.global_step + 1
            self._begin_following(
                f"step {step:,}: the float phase is over; its model is in {phase.folder}. From here on training is "
                "quantized, the learning rate starts again, and"
            )

    def _begin_following(self, text: str) -> None:
        """If there is a teacher by now, say what the loss is made of, and switch off dropout."""
        if self._teacher is None:
            return
        loss = loss_in_words(self._distillation)
        if self._teacher_ignored:
            loss = "that of compute_loss alone"
        self._tell(f"{text} the loss is {loss}{self._switch_off_dropout()}")

    def _switch_off_dropout(self) -> str:
        """Switch off dropout unless the config keeps it; returns the words about it for a message."""
        if not self._distillation.dropout:
            self._dropped += switch_off_dropout(self._student)
        return "; dropout is off" if self._dropped else ""

    def _tell(self, text: str) -> None:
        if self.is_world_process_zero():
            tqdm.write(f"moq_hf: {text}")

    def _restore_dropout(self) -> None:
        for module, name, share in self._dropped:
            setattr(module, name, share)
        self._dropped.clear()

    def _take_from_phase(self, phase: FloatPhase | None) -> None:
        """Take the metrics and the teacher from a float phase that is over; None while it is still to come."""
        self.float_metrics = None if phase is None else phase.metrics
        self._follow(None if phase is None else phase.teacher(self._distillation))

    def mean_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The scalar mean loss of `compute_loss` over a single batch; sensitivity is measured on it."""
        prepared = dict(inputs)
        count = self._count_of(prepared)
        with metrics_apart(self):
            return cast(
                Tensor, self.compute_loss(model, prepared, num_items_in_batch=count)
            )

    def _count_of(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """The number that a `compute_loss_func` divides by for the mean over a batch; None without such a function."""
        labels = inputs.get("labels")
        if self.compute_loss_func is None or not isinstance(labels, Tensor):
            return None
        count: Tensor = labels.ne(-100).sum()
        if not self.args.average_tokens_across_devices:
            return count
        # The Trainer multiplies the loss by this, as if all processes had been counted.
        processes: int = self.accelerator.num_processes // self.get_tp_size()
        return count * (processes if self.args.n_gpu <= 1 else self.args.n_gpu)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As `Trainer.compute_loss`; in training with a teacher, the distillation loss.

        Raises:
            MoQError: The model's output lacks something to compare, or the model is not called.
        """
        self._loss_called = True
        phase = self.float_phase
        # At its first step a float phase finds out whether the model can be its own
        # teacher.
        is_trial = phase is not None and self.state.global_step == 0
        teacher = self._teacher
        is_followed = teacher is not None or is_trial
        if not model.training or not is_followed:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
        config = self._distillation
        student = self._student
        count = num_items_in_batch if teacher is None else self._count_of(inputs)
        compute = super().compute_loss
        is_stock = getattr(compute, "__func__", None) is Trainer.compute_loss
        found: Any = None
        with passes_of(model, student, config) as passes:
            if is_stock and teacher is not None and not config.labels:
                # The batch may have no labels, and the output no loss.
                model(**inputs)
            else:
                # The Trainer takes the labels out if it computes the loss itself.
                found = compute(model, dict(inputs), return_outputs, count)
        if not passes:
            raise MoQError(
                f"distillation: compute_loss of {type(self).__name__} does not call the model that it is given in "
                "training, so there is nothing for the teacher to answer"
            )
        # A trial must not consume random numbers of the float phase.
        with contextlib.nullcontext() if teacher is not None else repeatable():
            passes = with_logits(passes, model, student, config)
        loss = found[0] if return_outputs and found else found
        parts: dict[str, Any] = Counter()
        if loss is not None and config.labels:
            parts[TASK] = loss.float()
        for each in passes:
            for name, part in self._compared(each, inputs, is_stock).items():
                parts[name] += part / len(passes)
        if teacher is not None:
            loss = sum(weighted(parts, config).values())
            if self.compute_loss_func is not None and not KNOWS_SCALE:
                loss = loss / self.current_gradient_accumulation_steps
            # Under DataParallel the task's loss has a value for each device.
            values = torch.stack([part.detach().mean() for part in parts.values()])
            # Not in the log, which a Trainer may leave to one process.
            means = self.accelerator.reduce(values, reduction="mean")
            self._parts.update({**dict(zip(parts, means, strict=True)), "count": 1})
        if not return_outputs:
            return loss
        return loss, found[1] if found else passes[-1].output

    def _compared(
        self, student: Pass, batch: Mapping[str, Any], is_stock: bool
    ) -> dict[str, Tensor]:
        """The parts of the loss that compare student and teacher; before there is a teacher, a trial of them."""
        config = self._distillation
        teacher = self._teacher
        # A Trainer that computes the loss itself does not hand the model the labels.
        kept = {name: batch[name] for name in ("labels",) if name in batch}
        given = {**kept, **student.inputs}
        theirs, relations = student.output, student.relations
        if teacher is not None:
            check: Any = contextlib.nullcontext()
            if not self._runs_alone:
                check = running_alone(teacher, self._student)
            # As Accelerate wraps the student's forward pass.
            with (
                torch.no_grad(),
                check,
                self.accelerator.autocast(),
                queries_keys_values(teacher, config.relations) as relations,
            ):
                theirs = teacher(**(given if is_stock else student.inputs))
            self._runs_alone = True
        # A forward pass with labels sets it if the config leaves it out.
        problem = getattr((teacher or self._student).config, "problem_type", None)
        given["labels"] = labels_at_logits(self._student, given.get("labels"))
        both = (student.relations, relations)
        with torch.set_grad_enabled(teacher is not None):
            return loss_parts(student.output, theirs, given, config, problem, both)

    def _check_loss_scale(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> None:
        factor = (
            self.args.gradient_accumulation_steps
            * self.args.world_size
            * max(1, self.args.n_gpu)
        )
        if (
            count is None
            or factor == 1
            or self._scaled_for_ga is not None
            or self.compute_loss_func is not None
        ):
            return
        with (
            evaluating(model),
            metrics_apart(self),
            self.compute_loss_context_manager(),
        ):
            prepared = prepared_inputs(self, inputs)
            once, twice = (
                float(
                    self.compute_loss(
                        model, dict(prepared), num_items_in_batch=times * count
                    ).mean()
                )
                for times in (1, 2)
            )
        if once == twice != 0.0:
            average_loss(self)
            logger.info(
                "the loss of %s ignores num_items_in_batch: it is averaged over micro-batches and processes instead",
                type(self.accelerator.unwrap_model(model)).__name__,
            )

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        entry = entry_of_moq(callback_states(self.state))
        if self._live_moq() is None and saved_state(entry) is not None:
            logger.warning(
                "moq_hf: the checkpoint was made with MoQ; without moq_config the run goes on in float"
            )

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        # This file is written last and marks a checkpoint as whole, which an earlier
        # run's must not do for this one's.
        if self.args.should_save:
            (checkpoint_folder(self) / STATE_FILE).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Deliver the model, packed if that can be loaded, and prove it; in every process.

        Raises:
            MoQError: The files cannot be written, or a weight holds NaN or Inf.
        """
        model = cast(nn.Module, self.model)
        if not self._delivers() or not has_gathered_weights(model):
            super().save_model(output_dir, _internal_call)
            return
        # The stock method gathers the whole model first or, by its settings, saves
        # nothing that loads.
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )

    def _delivers(self) -> bool:
        return is_quantized(cast(nn.Module, self.model)) and not saves_checkpoint()

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if not self._delivers():
            super()._save(output_dir, state_dict)
            return
        folder = Path(
            str(output_dir if output_dir is not None else self.args.output_dir)
        )
        done = write_result(
            self,
            self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
            folder,
            self._live_moq(),
            state_dict=state_dict,
        )
        if done is not None:
            tqdm.write(f"moq_hf: saved in {folder}. {done.summary}")
        if self.args.should_save:
            fault = save_beside(folder, partial(save_training_args, self.args))
            if fault is not None:
                logger.warning("moq_hf: %s has no training_args.bin: %s", folder, fault)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the cards of the packed model with the last metrics, or the Trainer's own card if none was saved."""
        saved = Path(str(self.args.output_dir))
        moq = self._live_moq()
        folders = []
        if quant_layers(self._student):
            folders.append(saved)
            if moq is not None and moq.delivered is not None:
                folders.append(moq.delivered.path)
        folders = [f for f in folders if (f / STATE_NAME).is_file()]
        if saved not in folders:
            super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        for folder in folders:
            record_metrics(folder, metrics_of(self), self.float_metrics)
            write_run_card(folder, self, *args, **kwargs)

    def _live_moq(self) -> MoQCallback | None:
        """The callback of this Trainer, which it may share with others; None if it was removed."""
        if self.moq is None:
            return None
        # restore_callback_states_from_checkpoint replaces the object that was passed.
        for callback in callbacks_of(self):
            if isinstance(callback, MoQCallback):
                self.moq = callback
                return callback
        return None


class MoQTrainer(MoQMixin, Trainer):
    """A `Trainer` that takes a MoQ config: the stock one with `MoQMixin`, where its behavior and errors are described.

    Args:
        *args: What `Trainer` takes.
        moq_config: See `MoQMixin`, for `teacher`, `teacher_init_kwargs` and
            `float_first` too.
        **kwargs: What `Trainer` takes, and keywords of `MoQConfig`.

    >>> import tempfile
    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    >>> data = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4, 5, 6], "labels": 1}]
    >>> config = {"bits": 4, "start_bits": 6, "period": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     args = TrainingArguments(folder, max_steps=3, use_cpu=True, report_to=[])
    ...     trainer = MoQTrainer(model, args, train_dataset=data, moq_config=config)
    >>> trainer.moq.controller.layers["bert.pooler.dense"].module
    QuantLinear(in_features=16, out_features=16, bias=True, bits=6)
    """

    _wired_by = "MoQTrainer"
