"""Going on with a run: which checkpoint is whole, and which changes of the config a run can go on with."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .config import MoQConfig, MoQError
from .schedule import FLOAT_BITS, PrecisionSchedule, Switch

logger = logging.getLogger(__name__)

# Put into a checkpoint's folder by the Trainer's `enable_jit_checkpoint` while it saves.
_SENTINEL = "checkpoint-is-incomplete.txt"
_STATE = "trainer_state.json"

# They change no number.
_HARMLESS = frozenset({"quantize_verbose", "quantizer_kernel", "eigenvalue.verbose", "prove"})
# They count from the next search for ratios, random number, measurement or loss on.
_FROM_NOW_ON = frozenset(
    {"quantize_algo.scale_refresh", "seed"}
    | {f"eigenvalue.{name}" for name in ("max_iter", "tol", "stability", "gas_boundary_resolution", "method")}
    | {f"eigenvalue.{name}" for name in ("max_overhead", "num_samples", "finite_difference")}
    | {f"distillation.{name}" for name in ("teacher", "logits", "hidden", "labels")}
)
# They may change where the steps that are taken would have been the same.
SCHEDULE_KEYS = frozenset(
    {"quantize_bits.start_bits", "quantize_bits.target_bits"}
    | {f"quantize_schedule.{name}" for name in ("quantize_period", "schedule_offset", "deadline")}
)


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The last whole checkpoint in a Trainer's output folder, for `train(resume_from_checkpoint=...)`.

    A checkpoint that is cut off, as a run leaves it that is killed while it saves, is left out with a warning.
    `resume_from_checkpoint=True` does this in a `MoQTrainer`; in a stock `Trainer` it stops at such a folder.

    Args:
        folder: The output folder; it need not exist.

    Returns:
        The path of the checkpoint, or None if there is no whole one.
    """
    for path in checkpoints(folder):
        fault = fault_of(path)
        if fault is None:
            return str(path)
        logger.warning("moq_hf: %s is not whole (%s): it is left out", path, fault)
    return None


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The folders in a Trainer's output folder that it would take for checkpoints, the last one first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: -int(path.name.rpartition("-")[2]))


def fault_of(checkpoint: str | os.PathLike[str]) -> str | None:
    """What shows that a checkpoint was not written to its end; None if nothing does."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    if (folder / _SENTINEL).exists():
        return f"it holds {_SENTINEL}"
    # The Trainer writes it last.
    if not (folder / _STATE).is_file():
        return f"{_STATE} is missing"
    try:
        document = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if not isinstance(document["global_step"], int):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{_STATE} is damaged"
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".safetensors":
                # Opening compares the size of the file with its table of contents.
                with safe_open(path, "np"):
                    pass
            elif path.suffix in (".pt", ".pth") and path.is_file() and not zipfile.is_zipfile(path):
                return f"{path.name} is damaged"
        except (OSError, SafetensorError):
            return f"{path.name} is damaged"
    return None


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Check a checkpoint before it is loaded.

    Raises:
        MoQError: It was not written to its end; the text names the last one beside it that was.
    """
    fault = fault_of(checkpoint)
    if fault is None:
        return
    folder = Path(checkpoint)
    whole = next((path for path in checkpoints(folder.parent) if path != folder and fault_of(path) is None), None)
    advice = "there is no whole one beside it" if whole is None else f"the last whole one beside it is {whole}"
    raise MoQError(f"cannot resume from {folder}: it is not whole ({fault}); {advice}")


def what_counts(config: MoQConfig) -> dict[str, Any]:
    """Dotted keys that decide on a number, with their values."""
    flat = _flat(config)
    ignored = _HARMLESS | _unused(flat)
    return {key: value for key, value in flat.items() if key not in ignored}


def changes(saved: MoQConfig, now: MoQConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that count and differ, each with the saved value and that of now."""
    one, other = _flat(saved), _flat(now)
    ignored = _HARMLESS | _unused(one, other)
    return {key: (one[key], other[key]) for key in one if key not in ignored and one[key] != other[key]}


def load_schedule(
    schedule: PrecisionSchedule, state: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]]
) -> None:
    """Bring a new schedule to where a saved run was, if the run can go on with the config of now.

    Before the offset anything may change but what would have begun quantization by now. After it, what decides on the
    grids may not, and the schedule may in so far as its passed steps stay what they were.

    Args:
        schedule: By the config of now.
        state: As from `MoQController.state_dict`.
        changed: As from `changes`.

    Raises:
        MoQError: It cannot; the text has each key with both values. Or the state is of other blocks.
    """
    bits = {name: block[0] for name, block in state["schedule"]["blocks"].items()}
    steps: int = state["schedule"]["steps"]
    begun = any(block != FLOAT_BITS for block in bits.values())
    fixed = changed.keys() - SCHEDULE_KEYS - _FROM_NOW_ON if begun else set()
    faults = [f"{_told(key, changed[key])}, fixed from the offset on" for key in changed if key in fixed]
    if not faults and (SCHEDULE_KEYS.intersection(changed) if begun else changed):
        otherwise = _replay(schedule, [Switch(*switch) for switch in state["history"]], steps, bits)
        if otherwise:
            told = describe({key: pair for key, pair in changed.items() if key in SCHEDULE_KEYS})
            faults.append(f"{told}: {otherwise}")
    elif not faults:
        schedule.load_state_dict(state["schedule"])
    if faults:
        raise MoQError(
            f"the checkpoint was made with another MoQ config, and after its {steps} steps a run cannot go on with "
            f"this one: {'; '.join(faults)}. Resume with the checkpoint's config, or start a new run"
        )


def describe(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Each key with the value that it had and the one that it has."""
    return "; ".join(_told(key, pair) for key, pair in changed.items())


def _told(key: str, pair: tuple[Any, Any]) -> str:
    return f"{key}: {json.dumps(pair[0])} -> {json.dumps(pair[1])}"


def _flat(config: MoQConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        flat |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def _unused(*configs: Mapping[str, Any]) -> set[str]:
    """Keys of sections that are off in all of these flat configs."""
    off = {key.partition(".")[0] for key in configs[0] if key.endswith(".enabled") and not any(c[key] for c in configs)}
    return {key for key in configs[0] if key.partition(".")[0] in off and not key.endswith(".enabled")}


def _replay(schedule: PrecisionSchedule, history: Sequence[Switch], steps: int, bits: Mapping[str, int]) -> str | None:
    """Take `schedule` to `steps` with the eigenvalues that were measured; tell what came otherwise, if anything."""
    config = schedule.config
    was: dict[int, dict[str, Switch]] = {}
    for switch in history:
        was.setdefault(switch.step, {})[switch.block] = switch
    while True:
        # Nothing happens until one of these steps.
        coming = [
            0 if now == FLOAT_BITS else schedule.period[name]
            for name, now in schedule.bits.items()
            if now > config.target_bits
        ]
        step = config.schedule.offset + min(coming, default=steps + 1)
        if step > steps:
            break
        schedule.steps = step - 1
        then = was.pop(step, {})
        made = schedule.advance({n: s.eigenvalue for n, s in then.items() if s.eigenvalue is not None})
        for switch in made:
            if switch.block not in then or then.pop(switch.block).bits != switch.bits:
                return f"{switch.block} would have gone to {switch.bits} bits after step {step}"
        if then:
            was[step] = then
            break
    schedule.steps = steps
    if was:
        step = min(was)
        name, switch = next(iter(was[step].items()))
        return f"{name} would not have gone to {switch.bits} bits after step {step}"
    # With an offset of 0 there is no switch to the first bits.
    if {*bits.values(), *schedule.bits.values()} != {FLOAT_BITS}:
        for name, now in schedule.bits.items():
            if bits.get(name) != now:
                return f"{name} would have {now} bits by now"
    return None
