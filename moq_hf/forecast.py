"""The plan of a run: the precision that each block will have at each step, as data and as a table."""

import html
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .config import MoQConfig
from .config_fields import LARGEST
from .errors import MoQError, show
from .schedule import (
    FLOAT_BITS,
    PrecisionSchedule,
    Switch,
    fade_steps,
    offset_step_of,
)
from .text import counted, table


@dataclass(frozen=True)
class BlockPlan:
    """The plan of one block.

    Attributes:
        name: Name of the block.
        eigenvalue: The eigenvalue assumed at each drop; None means factor 1.
        switches: Every change of precision up to the target, including those after the
            end of the run.
        target_step: Optimizer step after which the block computes only with its target
            precision.
        target_bits: That precision, in bits.
    """

    name: str
    eigenvalue: float | None
    switches: tuple[Switch, ...]
    target_step: int
    target_bits: int


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of `plan`; `str` gives its table and notes.

    Attributes:
        config: The planned config.
        total_steps: Optimizer steps of the run.
        offset: Optimizer steps before anything is quantized.
        deadline_step: The step by which every block is at its target, or None.
        blocks: One entry for each block.
        notes: Targets that will not be reached, with what would help, and keys of the
            config that have no effect.
    """

    config: MoQConfig
    total_steps: int
    offset: int
    deadline_step: int | None
    blocks: tuple[BlockPlan, ...]
    notes: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """True if every block is at its target when training ends."""
        return all(block.target_step <= self.total_steps for block in self.blocks)

    def __str__(self) -> str:
        return "\n".join([self.table(), *self.notes])

    def __repr__(self) -> str:
        return f"<Plan: {str(self).splitlines()[0]}; print it for its table>"

    def table(self) -> str:
        """A table of the steps at which each block drops and has its target precision; a line where none drops."""
        if self.config.budget is None and all(
            block.target_step == self.offset for block in self.blocks
        ):
            rest = self.total_steps - self.offset
            length = counted(rest, "optimizer step")
            if self.offset:
                first = counted(self.offset, "optimizer step")
                length = f"{first} in float, then {rest:,}"
            return f"{length} at {self.config.span_in_words}"
        head = f"{self.total_steps:,} optimizer steps, {self.config.span_in_words}, offset {self.offset:,}"
        if self.config.falls:
            head += f", period {self.config.period}, "
            head += (
                "no deadline"
                if self.deadline_step is None
                else f"deadline at step {self.deadline_step:,}"
            )
        bits = sorted(
            {s.bits for block in self.blocks for s in block.switches}, reverse=True
        )
        # With overrides, blocks may have different targets.
        targets = ["target"] if self.config.overrides else []
        rows = [["block", *(f"{b} bits" for b in bits), *targets, "at target"]]
        for block in self.blocks:
            steps = {s.bits: self._step(s.step) for s in block.switches}
            rows.append(
                [
                    block.name,
                    *(steps.get(b, "") for b in bits),
                    *(f"{block.target_bits} bits" for _ in targets),
                    self._step(block.target_step),
                ]
            )
        lines = [head]
        if self.config.budget is not None:
            lines.append(
                f"after step {self.offset:,}, on the float model, the measure {self.config.measure!r} "
                f"chooses the bits of each block: {self.config.target_in_words}"
            )
        lines.append(table(rows))
        if not self.reached:
            lines.append("in brackets: after the end of the run")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The plan for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _step(self, step: int) -> str:
        return f"{step:,}" if step <= self.total_steps else f"[{step:,}]"


def plan(
    config: MoQConfig | Mapping[str, Any] | str | os.PathLike[str],
    total_steps: int,
    eigenvalues: Mapping[str, float | None] | None = None,
    layers: Iterable[str] | None = None,
) -> Plan:
    """Foresee the precision of each block at each step, as `PrecisionSchedule` will set it.

    Args:
        config: A `MoQConfig`, a preset's name, a mapping or the path of a JSON file.
        total_steps: Optimizer steps of the run.
        eigenvalues: Names of imagined blocks, with the eigenvalue over the largest, 0
            to 1, that each has at every drop; None is factor 1. By default these are
            the least and the most sensitive block if the config measures eigenvalues,
            and otherwise one that stands for all. Each is planned with each number of
            bits that a budget may choose, and once more for each glob of `overrides`.
        layers: Names of the layers that the config quantizes. With them, each
            combination of `overrides` that occurs is planned, instead of each glob by
            itself.

    Raises:
        MoQConfigError: The config is wrong.
        MoQError: The run is too short for the config to quantize anything, to begin
            with activations, to have all drops before its deadline or, without
            `allow_unreached`, to reach its target; or the eigenvalues are wrong.

    >>> print(plan({"bits": 4, "start_bits": 6, "period": 10, "offset": 5}, 100))
    100 optimizer steps, 6 to 4 bits, offset 5, period 10, no deadline
    block        6 bits  5 bits  4 bits  at target
    every block       5      15      25         25
    """
    config = MoQConfig.load(config)
    _check_length(config, total_steps)
    cases = _cases(config, eigenvalues, layers)
    configs = {name: case.config for name, case in cases.items()}
    schedule = PrecisionSchedule(config, cases, total_steps, configs)
    if config.budget is not None:
        schedule.choose({name: case.bits for name, case in cases.items()})
    assumed = {n: c.eigenvalue for n, c in cases.items() if c.eigenvalue is not None}
    coming = list(schedule.forecast(assumed))
    planned = []
    for name, case in cases.items():
        switches = tuple(switch for switch in coming if switch.block == name)
        last = switches[-1].step if switches else schedule.offset
        end = last + fade_steps(config)
        planned.append(BlockPlan(name, case.eigenvalue, switches, end, case.bits))
    unreached = sorted(
        (block for block in planned if block.target_step > total_steps),
        key=lambda block: block.target_step,
        reverse=True,
    )
    # How late sensitive blocks are depends on eigenvalues not yet measured.
    sure = [block for block in unreached if not block.eigenvalue]
    if sure and not config.allow_unreached:
        raise MoQError(
            f"{_advice(config, total_steps, sure[0])}{_migrate(config, total_steps)}; with "
            f"{config.spell('allow_unreached')} true it trains all the same"
        )
    notes = _idle(config)
    for late in unreached[:1]:
        unsure = (
            "a sensitive block may end above its target: " if late.eigenvalue else ""
        )
        notes.append(f"{unsure}{_advice(config, total_steps, late)}")
    return Plan(
        config,
        total_steps,
        schedule.offset,
        schedule.deadline_step,
        tuple(planned),
        tuple(notes),
    )


def _check_length(config: MoQConfig, total_steps: Any) -> None:
    """Check that a config quantizes something in a run of this length.

    Raises:
        MoQError: It does not, or the length is illegal.
    """
    if not isinstance(total_steps, int) or not 1 <= total_steps <= LARGEST:
        raise MoQError(
            f"total_steps must be a whole number from 1 and below 2**63, got {show(total_steps)}"
        )
    if not config.enabled:
        raise MoQError("enabled is false: nothing would be quantized")
    offset = offset_step_of(config, total_steps)
    if offset >= total_steps:
        raise MoQError(
            f"{config.spell('offset')} {offset} is not before the end of training at "
            f"{total_steps} optimizer steps: nothing would be quantized; set it to less, 0 for instance"
            f"{_migrate(config, total_steps)}"
        )


def _idle(config: MoQConfig) -> list[str]:
    """Name the keys without effect: those of sections that are off, and those of the pace if no bits fall."""
    sections: dict[str, Any] = {
        "activations": config.activations,
        "blend": config.blend,
    }
    if config.rounds_inputs:
        del sections["activations"]
    # A budget measures even if the section is off.
    if config.budget is None:
        sections["eigenvalue"] = config.eigenvalue
    notes = [
        f"{config.spell(name)} without effect: its enabled is false"
        for name, section in sections.items()
        if not section.enabled and section != type(section)()
    ]
    # A deadline may be that of a preset whose bits fall.
    paced = config.period != "auto" or config.eigenvalue.enabled
    if paced and not config.falls:
        notes.append(
            f"{config.spell('period')}, deadline and eigenvalue without effect, since no bits fall: give a higher "
            "start_bits"
        )
    return notes


def _migrate(config: MoQConfig, total_steps: int) -> str:
    """Name the command that makes a DeepSpeed config fit the run."""
    if not config.from_deepspeed:
        return ""
    return f"; moq-hf migrate FILE --max_steps {total_steps} writes a config that fits"


class _Case(NamedTuple):
    """An imagined block: the config of its layers, its eigenvalue, and its final bits."""

    config: MoQConfig
    eigenvalue: float | None
    bits: int


def _cases(
    config: MoQConfig,
    eigenvalues: Mapping[str, float | None] | None,
    layers: Iterable[str] | None,
) -> dict[str, _Case]:
    """Imagine a block for each kind of layer, each eigenvalue and each number of bits that a budget may choose."""
    if eigenvalues is None and config.eigenvalue.enabled:
        eigenvalues = {"least sensitive": 0.0, "most sensitive": 1.0}
    kinds = config.variants()
    plain = kinds[""]
    if layers is not None:
        kinds = {}
        for layer in layers:
            own = config.of(layer)
            is_plain = (own.start_bits, own.bits) == (plain.start_bits, plain.bits)
            globs = [] if is_plain else config.globs_of(layer)
            kinds.setdefault(" and ".join(globs), own)
    anyone = "every other block" if len(kinds) > 1 else "every block"
    cases = {}
    for glob, own in sorted(kinds.items(), key=lambda kind: bool(kind[0])):
        for sensitivity, value in (eigenvalues or {"": None}).items():
            for bits in own.targets:
                who = [part for part in (glob, sensitivity) if part]
                if own.budget is not None:
                    who = [*(who or ["a block"]), f"{bits} bits"]
                name = ", ".join(who or [anyone])
                cases[name] = _Case(own, value, bits)
    return cases


def _advice(config: MoQConfig, total_steps: int, late: BlockPlan) -> str:
    """Say what would let the latest block reach its target before the run ends."""
    offset = offset_step_of(config, total_steps)
    room = total_steps - offset - fade_steps(config)
    since = [s.step - offset for s in late.switches if s.before != FLOAT_BITS]
    options = []
    # The rule only multiplies, so the step of each drop grows in proportion to the period.
    if since and (period := room // (since[-1] // since[0])) > 0:
        options.append(f"a {config.spell('period')} of at most {period}")
    if fitting := sum(step <= room for step in since):
        options.append(f"start_bits {late.target_bits + fitting}")
    fits = ", or ".join(options) or f"only a run of {late.target_step} steps"
    return (
        f"the run has {total_steps} optimizer steps but reaches {late.target_bits} bits only at step "
        f"{late.target_step} ({late.name}): {fits} fits"
    )
