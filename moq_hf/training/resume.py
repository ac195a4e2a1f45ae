"""Resuming a run: the form of its saved state, and which changes of the config it allows."""

import base64
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor
from typing_extensions import TypedDict

from ..config import MoQConfig
from ..config_fields import Count, DistillationConfig, Positive, Speller, Weight
from ..errors import MoQConfigError, MoQError, explained, read_as, show
from ..inputs import LARGEST_RANGE
from ..quantizer import HIGHER_RATIOS, RATIOS, Scales
from ..schedule import FLOAT_BITS, MAX_FACTOR, PrecisionSchedule, Switch
from ..version import __version__
from .budget import Choice

# Version of `MoQController.state_dict`. 0.1.0 wrote 1 and 2.
STATE_VERSION = 3
# The largest saved period, 15 drops after the largest in a config.
_LONGEST = 2**128

# Keys that change no result.
_HARMLESS = {
    "verbose",
    "kernel",
    "allow_unreached",
    "eigenvalue.verbose",
    "prove",
    "serve",
}
# Keys whose change takes effect from now on: at the next search for ratios, random
# number, measurement or loss, or in the files at the end.
_FROM_NOW_ON = {
    "pack_bits",
    "scale_refresh",
    "gptq",
    "seed",
    "eigenvalue.max_iter",
    "eigenvalue.tol",
    "eigenvalue.stability",
    "eigenvalue.gas_boundary_resolution",
    "eigenvalue.method",
    "eigenvalue.max_overhead",
    "eigenvalue.num_samples",
    "sensitivity.measure",
    *(f"distillation.{field.name}" for field in fields(DistillationConfig)),
}
# Keys that may change if the steps already taken would be the same.
TARGET = "bits"
SCHEDULE_KEYS = {
    "start_bits",
    TARGET,
    "period",
    "offset",
    "deadline",
}


# Types and ranges of the values in `MoQController.state_dict`.
SavedBits = Annotated[int, Field(strict=True, ge=1, le=FLOAT_BITS)]
Period = Annotated[int, Field(strict=True, ge=1, le=_LONGEST)]
Unit = Annotated[float, Field(strict=True, ge=0, le=1)]
Range = Annotated[float, Field(strict=True, ge=0, le=LARGEST_RANGE)]


class SavedSchedule(TypedDict):
    """A schedule's bits, period and step of the last change by block."""

    steps: Count
    total_steps: Positive | None
    blocks: dict[str, tuple[SavedBits, Period, Count]]
    targets: NotRequired[dict[str, SavedBits] | None]


class SavedSensitivity(TypedDict):
    """The measured values, and the cost of measuring."""

    # A value may be infinite; NaN is saved as null.
    eigenvalues: dict[str, Annotated[float, Field(strict=True, ge=0)] | None]
    spent: Weight
    products: Weight
    rows: Count


class SavedState(TypedDict):
    """The state of a run."""

    config: dict[str, Any]
    schedule: SavedSchedule
    ratios: dict[str, str]
    input_ranges: dict[str, Range | list[Range]]
    float_size_mb: FiniteFloat
    history: list[
        tuple[
            Count,
            str,
            SavedBits,
            SavedBits,
            Period,
            Annotated[int, Field(strict=True, ge=1, le=MAX_FACTOR)],
            Unit | None,
        ]
    ]
    sensitivity: SavedSensitivity | None
    choice: Choice | None
    handed_dtype: Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")] | None
    scales: NotRequired[dict[str, tuple[str, str | None]]]


class SavedAttributes(TypedDict):
    """The attributes of a saved callback."""

    saved: dict[str, Any] | None


class SavedCallback(TypedDict):
    """A callback in `trainer_state.json`."""

    attributes: SavedAttributes


# A saved state has one letter for the clipping ratio of each group: A is the first ratio
# of the search, 1.00, B is 0.95, and so on; R is 1.8, S is 1.7.
_LETTERS = dict(zip(string.ascii_uppercase, RATIOS + HIGHER_RATIOS, strict=False))


def ratios_in_letters(ratio: Tensor) -> str:
    """Encode clipping ratios, each one of those that `quantizer` tries, as text.

    >>> ratios_in_letters(torch.tensor([[1.0], [0.95], [0.2]]))
    'ABQ'
    """
    known = torch.tensor(list(_LETTERS.values()), device="cpu")
    order = known.argsort()
    # The first known ratio above a number just below one is that ratio.
    index = torch.bucketize(ratio.flatten().cpu() - 1e-3, known[order])
    return (order[index] + ord("A")).byte().numpy().tobytes().decode()


def ratios_of_letters(name: str, text: str, shape: tuple[int, int]) -> Tensor:
    """Decode text from `ratios_in_letters`: float32 in the given shape, on the CPU.

    Args:
        name: The layer's name, for the error.
        text: One letter for each group.
        shape: Shape of the layer's scale.

    Raises:
        MoQError: The text does not hold that many ratios.

    >>> ratios_of_letters("dense", "ABQ", (3, 1)).tolist()
    [[1.0], [0.949999988079071], [0.20000000298023224]]
    """
    if len(text) != shape[0] * shape[1] or set(text) - set(_LETTERS):
        raise MoQError(
            f"the checkpoint's MoQ state is damaged: ratios.{name} must be {shape[0] * shape[1]} clipping ratios, "
            f"letters from A to Y, not {show(text)}"
        )
    return torch.tensor(
        [_LETTERS[letter] for letter in text], dtype=torch.float32, device="cpu"
    ).view(shape)


def scales_in_text(scales: Scales) -> tuple[str, str | None]:
    """Encode scales as base64 of float32, and zero points as that of int32."""
    scale, zero = (None if x is None else _to_text(x.cpu()) for x in scales)
    assert scale is not None
    return scale, zero


def _to_text(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()


def scales_of_text(
    name: str, texts: tuple[str, str | None], shape: tuple[int, int]
) -> Scales:
    """Decode texts from `scales_in_text`, on the CPU.

    Args:
        name: The layer's name, for the error.
        texts: The two texts.
        shape: Shape of the layer's scale.

    Raises:
        MoQError: A text does not hold as many numbers.

    >>> scales = Scales(torch.tensor([[0.5], [-0.25]]))
    >>> scales_of_text("dense", scales_in_text(scales), (2, 1)).scale.tolist()
    [[0.5], [-0.25]]
    """
    with explained(
        f"the checkpoint's MoQ state is damaged: scales.{name} must be {shape[0] * shape[1]} scales"
    ):
        dtypes = torch.float32, torch.int32
        parts = [
            None
            if text is None
            else torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).view(
                shape
            )
            for text, dtype in zip(texts, dtypes, strict=True)
        ]
    return Scales(*parts)  # type: ignore[arg-type]


def saved_state(
    entry: Any, where: str = "the checkpoint's trainer_state.json is damaged"
) -> Mapping[str, Any] | None:
    """The controller's state in a callback's entry in `trainer_state.json`; None if there is no entry or no state.

    Raises:
        MoQError: The entry or the state is damaged; the text begins with `where` and
            names the key.
    """
    if entry is None:
        return None
    key = "stateful_callbacks.MoQCallback"
    callback = read_as(SavedCallback, entry, where, key)
    state: Mapping[str, Any] | None = callback["attributes"]["saved"]
    if state is not None:
        state = checked_state(state, where, f"{key}.attributes.saved")
    return state


def checked_state(
    state: Mapping[str, Any],
    where: str = "the checkpoint's MoQ state is damaged",
    key: str = "",
) -> dict[str, Any]:
    """Check a state of `MoQController.state_dict` that was read from a file; in the result `config` is a `MoQConfig`.

    Raises:
        MoQError: A value is wrong, or another version of moq_hf wrote the state; the
            text names the key.
    """
    if state.get("version") != STATE_VERSION:
        raise MoQError(
            f"the checkpoint's MoQ state has version {show(state.get('version'))}, written by moq_hf "
            f"{show(state.get('moq_hf'))}; this is moq_hf {__version__}, which reads version {STATE_VERSION}: a run "
            "goes on with the moq_hf that began it"
        )
    checked = read_as(SavedState, state, where, key)
    where = f"{where}: {key}{'.' if key else ''}"
    try:
        config = MoQConfig.from_dict(state["config"])
    except MoQConfigError as error:
        raise MoQError(f"{where}config: {error}") from error
    return {**state, **checked, "config": config}


def what_counts(config: MoQConfig) -> dict[str, Any]:
    """Dotted keys that can change a result, with their values; only the switch of a section that is off."""
    # A null scale_dtype means the grid's default.
    flat = config.flat() | {"scale_dtype": config.float32_grid.scale_dtype}
    off = {
        key.partition(".")[0]
        for key, value in flat.items()
        if key.endswith(".enabled") and not value
    }
    # Layers that `overrides` name may round their inputs.
    if config.rounds_inputs:
        off.discard("activations")
    # These sections decide how a budget is spent, even if they are off.
    if config.budget is not None:
        off.discard("eigenvalue")
    elif "eigenvalue" in off:
        off.add("sensitivity")
    return {
        key: value
        for key, value in flat.items()
        if key.endswith(".enabled")
        or not {key, key.partition(".")[0]} & (_HARMLESS | off)
    }


def changes(saved: MoQConfig, now: MoQConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys that can change a result and differ, each with the saved value and the current one."""
    before = what_counts(saved)
    after = what_counts(now)
    return {
        key: (before[key], after[key])
        for key in before
        if key in after and before[key] != after[key]
    }


def check_room(schedule: PrecisionSchedule, total_steps: int) -> None:
    """Check that a schedule which depends on the length of its run still fits into the resumed run.

    Args:
        schedule: The schedule in its resumed state.
        total_steps: Optimizer steps of the run, as the schedule counts them.

    Raises:
        MoQError: It does not; the text says what would.
    """
    config = schedule.config
    if not config.depends_on_length:
        return
    last = config.activations.start_step if config.rounds_inputs else 0
    # Without a deadline the run may end while the bits still fall.
    ends_early = config.deadline is None
    last = max(last, schedule.offset + 1 if ends_early else schedule.last_drop())
    if last > max(total_steps, schedule.steps):
        raise MoQError(
            f"the checkpoint's schedule was planned for {schedule.total_steps} optimizer steps, and after "
            f"{schedule.steps} of them it is not over: its last change may come only after step {last}, but this run "
            f"ends after step {total_steps}. Resume with {last} steps or more (max_steps, num_train_epochs), or start "
            "a new run"
        )


def load_schedule(
    schedule: PrecisionSchedule,
    state: Mapping[str, Any],
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Bring a new schedule to the state of a saved run, if the run can go on with the current config.

    Before the offset everything may change, unless the new config would have begun to
    quantize by now. From the offset on the grids are fixed, and the schedule may change
    only if the steps already taken would have been the same.

    Args:
        schedule: A new schedule of the current config.
        state: The result of `MoQController.state_dict`.
        changed: The result of `changes`.

    Raises:
        MoQError: It cannot, or the state has other blocks; the text has each key with
            both values.
    """
    saved, spell = state["schedule"], schedule.config.spell
    bits = {name: block[0] for name, block in saved["blocks"].items()}
    free = SCHEDULE_KEYS | _FROM_NOW_ON
    if schedule.config.budget is not None:
        # The bits under a budget are chosen once.
        free -= {TARGET}
    faults = [
        f"{_in_words(spell(key), pair)}, fixed from the offset on"
        for key, pair in changed.items()
        if has_begun(state) and key not in free
    ]
    if not faults and is_replayed(state, changed):
        if schedule.targets is None and saved.get("targets"):
            schedule.choose(saved["targets"])
        history = [Switch(*switch) for switch in state["history"]]
        otherwise = _replay(schedule, history, saved["steps"], bits)
        if otherwise:
            reasons = {key: changed[key] for key in changed if key in SCHEDULE_KEYS}
            faults.append(f"{describe(reasons, spell)}: {otherwise}")
    elif not faults:
        schedule.load_state_dict(saved)
    if faults:
        raise MoQError(
            f"the checkpoint was made with another MoQ config, and after its {saved['steps']} steps a run cannot go on "
            f"with this one: {'; '.join(faults)}. Resume with the checkpoint's config, or start a new run"
        )


def has_begun(state: Mapping[str, Any]) -> bool:
    """True if the run with this saved state had reached its offset."""
    return any(block[0] != FLOAT_BITS for block in state["schedule"]["blocks"].values())


def is_replayed(
    state: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]]
) -> bool:
    """True if the config has changed so that the current schedule must repeat the steps already taken."""
    return bool(SCHEDULE_KEYS.intersection(changed) if has_begun(state) else changed)


def describe(changed: Mapping[str, tuple[Any, Any]], spell: Speller = str) -> str:
    """List each key with its old and new value.

    Args:
        changed: The result of `changes`.
        spell: Gives the name of a key by its path.

    >>> describe({"bits": (4, 3)})
    'bits: 4 -> 3'
    """
    return "; ".join(_in_words(spell(key), pair) for key, pair in changed.items())


def _in_words(key: str, pair: tuple[Any, Any]) -> str:
    return f"{key}: {json.dumps(pair[0])} -> {json.dumps(pair[1])}"


def _replay(
    schedule: PrecisionSchedule,
    history: Sequence[Switch],
    steps: int,
    bits: Mapping[str, int],
) -> str | None:
    """Advance `schedule` to `steps` with the measured eigenvalues; return a text on the first difference, if any."""
    made: list[Switch] = []
    while (step := schedule.next_step()) is not None and step <= steps:
        schedule.steps = step - 1
        if schedule.is_choosing:
            return f"the bits of the blocks would have been chosen after step {step}"
        eigenvalues = {
            s.block: s.eigenvalue
            for s in history
            if s.step == step and s.eigenvalue is not None
        }
        made += schedule.advance(eigenvalues)
    schedule.steps = steps
    # With an offset of 0 there is no switch to the first bits.
    passed = _passed(made, steps, schedule.bits) ^ _passed(history, steps, bits)
    return f"other bits after step {min(passed)[0]}" if passed else None


def _passed(
    history: Iterable[Switch], steps: int, bits: Mapping[str, int]
) -> set[tuple[int, str, int]]:
    """Each step with the bits that a block got after it, and the bits of blocks not in float after `steps`."""
    now = {(steps, name, own) for name, own in bits.items() if own != FLOAT_BITS}
    return now | {(s.step, s.block, s.bits) for s in history}
