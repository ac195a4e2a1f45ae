"""The checkpoints of a run: which of them are complete, and the state that the callback keeps in them."""

import contextlib
import logging
import operator
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainerState, TrainingArguments

from ..errors import MoQError, read_json
from ..names import without_fsdp, without_peft
from ..seams.transformers import CALLBACKS_KEY, INCOMPLETE
from .resume import saved_state

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# Files that hold weights: those of transformers, FSDP2's shards, DeepSpeed's.
_WEIGHTS = ("*.safetensors", "*/*.distcp", "*/*_states.pt")
# The checksum of a file covers this many pieces of it, each of this many bytes.
_PIECES = 256
_PIECE = 4096


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The last whole checkpoint in a Trainer's output folder, for `train(resume_from_checkpoint=...)`.

    An incomplete checkpoint, whose run was killed while it was being saved, is left out
    with a warning. `resume_from_checkpoint=True` does this in a `MoQTrainer`; in a stock
    `Trainer` it fails on such a folder.

    Args:
        folder: The output folder; it need not exist.

    Returns:
        The path of the checkpoint, or None if there is no whole one.

    >>> last_checkpoint("a folder without checkpoints") is None
    True
    """
    for path in checkpoints(folder):
        fault = fault_of(path)
        if fault is None:
            return str(path)
        logger.warning("moq_hf: %s is not whole (%s): it is left out", path, fault)
    return None


def warn_of_half_checkpoint(folder: str) -> None:
    """Warn of a half-written checkpoint before a stock Trainer fails on it without saying why."""
    folders = checkpoints(folder)
    fault = fault_of(folders[0]) if folders else None
    if fault is not None:
        logger.warning(
            "moq_hf: %s is not whole (%s), so train(resume_from_checkpoint=True) will fail: delete it, or give "
            "resume_from_checkpoint=moq_hf.last_checkpoint(%r)",
            folders[0],
            fault,
            folder,
        )


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders in a Trainer's output folder that it would take for checkpoints, the last one first."""
    folders = [
        path
        for path in Path(folder).glob("checkpoint-*")
        if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return sorted(
        folders, key=lambda path: int(path.name.partition("-")[2]), reverse=True
    )


def fault_of(checkpoint: str | os.PathLike[str]) -> str | None:
    """Why a checkpoint is not complete; None if no fault is found."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / INCOMPLETE).exists():
        return f"it holds {INCOMPLETE}"
    # The Trainer writes this file last.
    if not (folder / STATE_FILE).is_file():
        return f"{STATE_FILE} is missing"
    try:
        document = read_json(folder / STATE_FILE)
        # Raises TypeError unless the step is an integer.
        operator.index(document["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{STATE_FILE} is damaged"
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".safetensors":
                # Opening compares the size of the file with its table of contents.
                with safe_open(path, "np"):
                    pass
            elif (
                path.suffix in (".pt", ".pth")
                and path.is_file()
                and not zipfile.is_zipfile(path)
            ):
                return f"{path.name} is damaged"
        except (OSError, SafetensorError):
            return f"{path.name} is damaged"
    saved: Mapping[str, str] = {}
    # An entry that was changed by hand is reported when it is read; one that a run
    # without moq_hf passed on belongs to other weights.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        attributes = entry_of_moq(document.get(CALLBACKS_KEY))["attributes"]
        if attributes["saved_at"] == document["global_step"]:
            saved = dict(attributes["weights"])
    for name, checksum in checksums(folder).items() if saved else ():
        if saved.get(name, checksum) != checksum:
            return f"{name} is not the file that was saved with its {STATE_FILE}"
    return None


def checksums(folder: Path) -> dict[str, str]:
    """A checksum of each file with weights in a checkpoint, by its path there.

    For a large file it covers pieces spread over the file, since training changes weights
    everywhere.
    """
    found = {}
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            checksum = zlib.crc32(str(size).encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_PIECE, size // _PIECES)):
                    file.seek(start)
                    checksum = zlib.crc32(file.read(_PIECE), checksum)
            found[path.relative_to(folder).as_posix()] = f"{checksum:08x}"
    return found


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Check that a checkpoint is complete before it is loaded.

    Raises:
        MoQError: It is not; the text names the last complete one in the same folder.
    """
    fault = fault_of(checkpoint)
    if fault is None:
        return
    folder = Path(checkpoint)
    whole = next(
        (path for path in checkpoints(folder.parent) if fault_of(path) is None), None
    )
    advice = (
        "there is no whole one beside it"
        if whole is None
        else f"the last whole one beside it is {whole}"
    )
    raise MoQError(f"cannot resume from {folder}: it is not whole ({fault}); {advice}")


def complete_checkpoint(
    checkpoint: Path, model: nn.Module, processing_class: Any = None
) -> None:
    """Write the model's config and tokenizer into a checkpoint that lacks them, such as one of FSDP's shards.

    `moq-hf pack` needs them. A missing folder is not made, and a failure is logged as a
    warning.

    Args:
        checkpoint: The folder.
        model: The model in training.
        processing_class: The Trainer's tokenizer or processor.
    """
    config: Any = getattr(model, "config", None)
    is_described = (checkpoint / "config.json").exists() or without_peft(
        model
    ) is not model
    if (
        is_described
        or not checkpoint.is_dir()
        or not hasattr(config, "save_pretrained")
    ):
        return
    config = deepcopy(config)
    config.architectures = [without_fsdp(type(model)).__name__]
    try:
        for part in (
            config,
            getattr(model, "generation_config", None),
            processing_class,
        ):
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        logger.warning(
            "moq_hf: %s has no config.json, which moq-hf pack will need: %s",
            checkpoint,
            error,
        )


def state_of_best(state: TrainerState) -> Mapping[str, Any] | None:
    """The controller's state in the best checkpoint; None if there is no such checkpoint, or it was made without MoQ.

    Either is a warning, and so is a best checkpoint that was deleted or damaged, which no
    longer counts as the best.
    """
    if state.best_model_checkpoint is None:
        return None
    fault = fault_of(state.best_model_checkpoint)
    if fault is not None:
        logger.warning(
            "moq_hf: the best checkpoint, %s, is not whole (%s): the model of the last step is delivered",
            state.best_model_checkpoint,
            fault,
        )
        forget_best(state)
        return None
    document = read_json(Path(state.best_model_checkpoint) / STATE_FILE)
    best = saved_state(entry_of_moq(document.get(CALLBACKS_KEY)))
    if best is None:
        logger.warning(
            "moq_hf: %s, the best checkpoint, was made without MoQ: its weights get the current bits",
            state.best_model_checkpoint,
        )
    return best


def forget_best(state: TrainerState) -> None:
    """Reset the best metric: no evaluation so far is a candidate for the best model."""
    state.best_metric = None
    state.best_global_step = None
    state.best_model_checkpoint = None


def best_step(args: TrainingArguments, state: TrainerState) -> int | None:
    """The step of the checkpoint that the Trainer loads at the end; None if it keeps the last model."""
    return state.best_global_step if args.load_best_model_at_end else None


def last_metrics(
    log: Iterable[Mapping[str, Any]], best: int | None = None
) -> dict[str, Any]:
    """The metrics of the last evaluation in a log, or that at the step `best` if there is one, for all data sets."""
    logs = [line for line in log if any(name.startswith("eval_") for name in line)]
    steps = [line["step"] for line in logs]
    wanted = best if best in steps else max(steps, default=None)
    return {
        name: value
        for line in logs
        if line["step"] == wanted
        for name, value in line.items()
    }


def entry_of_moq(entries: Any) -> Any:
    """The entry of `MoQCallback`, or of a class derived from it, in a `trainer_state.json`; None if there is none."""
    if not isinstance(entries, Mapping):
        return None
    if "MoQCallback" in entries:
        return entries["MoQCallback"]
    for entry in entries.values():
        attributes = entry.get("attributes") if isinstance(entry, Mapping) else None
        if (
            isinstance(attributes, Mapping)
            and {"saved", "saved_at"} <= attributes.keys()
        ):
            return entry
    return None


def state_of_run(checkpoint: Path) -> Mapping[str, Any]:
    """The controller's state in a checkpoint.

    Raises:
        MoQError: There is none, it belongs to an earlier step after which the run went
            on without MoQ, or it is damaged.
    """
    document = read_json(checkpoint / STATE_FILE)
    entry = entry_of_moq(document.get(CALLBACKS_KEY))
    state = saved_state(entry)
    if state is None:
        raise MoQError(
            f"{checkpoint / STATE_FILE} holds no state of MoQ: it is not the checkpoint of a run with moq_hf"
        )
    saved_at = entry["attributes"].get("saved_at")
    if saved_at != document["global_step"]:
        raise MoQError(
            f"{checkpoint / STATE_FILE} holds the state of MoQ at step {saved_at}, after which the run went on in "
            "float: resume it with moq_hf, or pack the checkpoint of that step"
        )
    return state
