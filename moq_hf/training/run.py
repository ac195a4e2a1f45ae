"""A run, which a call of `Trainer.train` begins: what it resumes, how long it is, and where its offset is."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerState

from ..config import MoQConfig
from ..errors import MoQError
from ..schedule import offset_step_of
from ..seams.transformers import callback_states
from .checkpoints import entry_of_moq
from .resume import changes, has_begun, is_replayed, saved_state

# What `MoQMixin.teaching` says of a run without a teacher.
NOT_TAUGHT: Mapping[str, Any] = {"float_steps": None, "teacher_name": None}


class Run:
    """The constants of a run, read once when it begins.

    Args:
        config: The config to follow.
        state: The Trainer's state, once it knows how many steps there are; in a resumed
            run it comes from the checkpoint.

    Raises:
        MoQError: The checkpoint's entry of MoQ is damaged, or of another version.

    Attributes:
        saved: The controller's state in the checkpoint that is resumed; None at a start,
            or if the checkpoint was made without MoQ.
        beside: Other attributes that the callback saved: `saved_at`, `teacher`, ...;
            empty without a checkpoint of MoQ.
        changed: Dotted keys that can change a result and differ from the saved config,
            each with the saved value and the current one.
        first: Optimizer steps before the run, 0 at a start.
        last: Optimizer steps at its end, or at the checkpoint if that is later.
        length: Optimizer steps that the schedule counts; in a resumed run, those that it
            was planned for.
    """

    def __init__(self, config: MoQConfig, state: TrainerState) -> None:
        self.config = config
        self.state = state
        self.first = state.global_step
        self.last = max(state.max_steps, state.global_step)
        entry = entry_of_moq(callback_states(state)) if self.first else None
        self.saved = saved_state(entry)
        self.beside: Mapping[str, Any] = entry["attributes"] if entry else {}
        self.changed: Mapping[str, tuple[Any, Any]] = {}
        self.length = state.max_steps - self.first
        if self.saved is not None:
            self.changed = changes(self.saved["config"], config)
            is_new = is_replayed(self.saved, self.changed)
            planned = config.depends_on_length and not is_new
            total = self.saved["schedule"]["total_steps"] if planned else None
            self.length = total or self.last

    @property
    def is_over(self) -> bool:
        """True if the last step was taken before the run was resumed."""
        return self.first >= self.state.max_steps

    @property
    def is_without_moq(self) -> bool:
        """True if the run resumes a checkpoint that was made without MoQ."""
        return self.first > 0 and self.saved is None

    @property
    def has_begun(self) -> bool:
        """True if the checkpoint was at its offset or later."""
        return self.saved is not None and has_begun(self.saved)

    @property
    def offset(self) -> int:
        """Optimizer steps before anything is quantized.

        Raises:
            MoQError: It is a share of a run whose length is not known.
        """
        return offset_step_of(self.config, self.length)

    @property
    def _float_steps(self) -> int | None:
        """The last step of the float phase of the run that is resumed; None without one."""
        teaching: Mapping[str, Any] = self.beside.get("teaching", NOT_TAUGHT)
        steps: int | None = teaching["float_steps"]
        return steps

    def check_without_float_phase(self) -> None:
        """Check that the checkpoint is not that of a run with `float_first`, whose learning rate starts again.

        Raises:
            MoQError: It is.
        """
        steps = self._float_steps
        if steps is not None:
            raise MoQError(
                f"cannot resume: the checkpoint at step {self.first} is of a run with float_first, in float up to step "
                f"{steps}: give float_first again, or start a new run from the checkpoint's model"
            )

    def check_float_first(self) -> None:
        """Check that a float phase may begin, or was begun by the checkpoint.

        Raises:
            MoQError: It goes on from a checkpoint that was made without MoQ, or without a
                float phase.
        """
        if self.is_without_moq:
            raise MoQError(
                f"float_first: the checkpoint at step {self.first} was made without MoQ; give its model as the start "
                "and the teacher instead, or start a new run"
            )
        # Checkpoints of 0.2 do not say it.
        if "teaching" in self.beside and self._float_steps is None:
            raise MoQError(
                f"cannot resume: the checkpoint at step {self.first} is of a run without float_first: leave it out, "
                "or start a new run from the checkpoint's model"
            )
