"""What a callback keeps in a Trainer's state, and finds in that of a checkpoint."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ..errors import MoQError
from ..transformers_seams import CALLBACKS_KEY, callback_states
from .checkpoints import STATE_FILE
from .resume import saved_state

logger = logging.getLogger(__name__)


def check_alone(state: TrainerState, name: str) -> None:
    """Check that there is one callback of that class.

    Raises:
        MoQError: There are two.
    """
    if isinstance(callback_states(state).get(name), list):
        raise MoQError("two MoQCallbacks in one Trainer: pass one (MoQTrainer(moq_config=) brings its own)")


def resumed_state(state: TrainerState, name: str) -> Mapping[str, Any] | None:
    """The controller's state in the checkpoint that a run goes on from; None at a start, or from one without MoQ."""
    entry = callback_states(state).get(name) if state.global_step > 0 else None
    return None if entry is None else saved_state(entry)


def state_of_best(state: TrainerState, name: str) -> Mapping[str, Any] | None:
    """The controller's state in the best checkpoint; None if there is none, or none with MoQ, which is a warning."""
    if state.best_model_checkpoint is None:
        return None
    document = json.loads(Path(state.best_model_checkpoint, STATE_FILE).read_text(encoding="utf-8"))
    found = document[CALLBACKS_KEY].get(name)
    best = None if found is None else saved_state(found)
    if best is None:
        logger.warning(
            "moq_hf: %s, the best checkpoint, was made without MoQ: its weights get the bits of now",
            state.best_model_checkpoint,
        )
    return best


def forget_best(state: TrainerState) -> None:
    """Let the best metric start afresh: what was evaluated so far is not a candidate."""
    state.best_metric = None
    state.best_global_step = None
    state.best_model_checkpoint = None


def last_metrics(state: TrainerState) -> dict[str, Any]:
    """The last evaluation in the log; that of the best checkpoint, if one was chosen."""
    logs = [log for log in state.log_history if any(name.startswith("eval_") for name in log)]
    best = [log for log in logs if log["step"] == state.best_global_step]
    return dict((best or logs or [{}])[-1])


def state_of_run(checkpoint: Path) -> Mapping[str, Any]:
    """The controller's state in a checkpoint.

    Raises:
        MoQError: There is none: the run was without MoQ; or it is not as it was written.
    """
    document = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    entries = document.get(CALLBACKS_KEY)
    # By the name of the callback's class, which may be one derived from ours.
    found = [
        entry
        for entry in (entries.values() if isinstance(entries, Mapping) else ())
        if isinstance(entry, Mapping) and {"saved", "saved_at"} <= dict(entry.get("attributes") or {}).keys()
    ]
    state = saved_state(found[0]) if found else None
    if state is None:
        raise MoQError(
            f"{checkpoint / STATE_FILE} holds no state of MoQ: it is not the checkpoint of a run with moq_hf"
        )
    return state
