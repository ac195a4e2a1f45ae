"""The precision of each block after each optimizer step, in pure Python: no tensors, no Trainer.

s counts the optimizer steps taken since the offset. Before the offset nothing is
quantized (32 bits). After step s, a block above its target whose period has come (s >=
period) loses one bit and its period is multiplied by 2 * factor, factor = 1 + floor(4 *
e) with e its eigenvalue over the largest one, 0 to 1: sensitive blocks wait up to five
times longer before the next drop. Without eigenvalues the drops come at P, 2P, 4P, ...
This is the rule of DeepSpeed's MoQ (`runtime/quantize.py` up to 0.16), counted in
optimizer steps.

With a deadline, room R is the number of steps from the offset to the last drop that
still meets it. A block that has k drops left after one at step s makes the next no
later than

    cap(s, k) = max(R / 2^(k-1), (s^(k-1) R)^(1/k), s + 1)

rounded down. The first term leaves room to keep doubling, so a block that meets the
deadline by the rule above is never capped. The second term, larger where doubling no
longer fits, divides what is left in equal ratios. With k = 1 the cap is R, and by
induction s + k <= R always holds, so every drop gets a separate step.

With the period "auto" and n drops, H is R, or R / 5 where eigenvalues are measured. The
first drop comes at max(1, H / 2^(n-1)), and one at step s with the factor f is followed
by one at s (f min(2^(n-1), H))^(1/(n-1)), after at least one step and no later than the
cap. So a block of factor 1 doubles as above, and one of factor f throughout ends f
times as late: with the factor 5, at R.

Under a budget each block has a separate target, given to `choose` at the offset, and
starts at start_bits or at its target, whichever is more. Until then every block is in
float, for at least one step.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from .config import MoQConfig
from .config_fields import BitBudget
from .errors import MoQError
from .text import counted

FLOAT_BITS = 32
# The factor of the block with the largest eigenvalue.
MAX_FACTOR = 5


class Switch(NamedTuple):
    """A change of precision of one block.

    Attributes:
        step: Optimizer steps taken when it happened, this one included, from the start
            of training.
        block: Name of the block.
        before: Bits of the forward passes up to this step; 32 is unquantized.
        bits: Bits from the next forward pass on.
        period: Steps since the offset at which the next drop is due.
        factor: 1 to 5, which lengthened the period beyond doubling; 1 at the offset.
        eigenvalue: The normalized eigenvalue behind the factor, or None.
    """

    step: int
    block: str
    before: int
    bits: int
    period: int
    factor: int
    eigenvalue: float | None


class PrecisionSchedule:
    """The precision of every block, advanced once per optimizer step that was not skipped.

    Args:
        config: The config to follow.
        blocks: Block names, each once, in model order.
        total_steps: Optimizer steps of the whole run; not needed for an explicit period
            without a deadline, if the offset is a number of steps.
        configs: Block name to the config of its layers, for blocks that `overrides`
            change.

    Raises:
        MoQError: There are no blocks, or `total_steps` is missing where it is needed, or
            is too small for `activations.start_step` or for the deadline; the text says
            what would fit.

    Attributes:
        total_steps: Length of the run, as given; after loading a state whose plan
            depends on the length, the length it was planned for.
        offset: Optimizer steps before anything is quantized.
        steps: Optimizer steps taken, including those before the offset.
        bits: Block name to the bits of the next forward pass.
        targets: Block name to the bits that it ends with; under a budget, None until
            `choose` is called.
        period: Block name to the steps since the offset at which its next drop is due.

    >>> config = MoQConfig(bits=4, start_bits=6, period=2)
    >>> schedule = PrecisionSchedule(config, ["layer.0", "layer.1"])
    >>> for step in range(1, 5):
    ...     switches = schedule.advance()
    ...     print(step, schedule.bits)
    1 {'layer.0': 6, 'layer.1': 6}
    2 {'layer.0': 5, 'layer.1': 5}
    3 {'layer.0': 5, 'layer.1': 5}
    4 {'layer.0': 4, 'layer.1': 4}
    """

    def __init__(
        self,
        config: MoQConfig,
        blocks: Iterable[str],
        total_steps: int | None = None,
        configs: Mapping[str, MoQConfig] | None = None,
    ) -> None:
        names = list(blocks)
        if not names:
            raise MoQError("a schedule needs at least one block")
        self.config = config
        # With `overrides`, the layers of a block may have their own config.
        self._configs = {name: (configs or {}).get(name, config) for name in names}
        # Under a budget, None until `choose` is called.
        self.targets: dict[str, int] | None = None
        start = config.activations.start_step
        if config.rounds_inputs and total_steps is not None and start >= total_steps:
            raise MoQError(
                f"{config.spell('activations.start_step')}: {start} is not reached in {total_steps} optimizer steps"
            )
        self._fit_into(total_steps)
        self.steps = 0
        self.bits = {
            name: self._start(name) if self.offset == 0 else FLOAT_BITS
            for name in names
        }
        if config.budget is None:
            self.targets = {name: self._target(name) for name in names}
        self.period = {name: self._first(name) for name in names}
        # The step of each block's last change, from which its blend counts.
        self._changed = dict.fromkeys(names, 0)

    @property
    def deadline_step(self) -> int | None:
        """The optimizer step by which bits have fallen to their targets; None without a deadline."""
        deadline = self.config.deadline
        if deadline is None or self.total_steps is None:
            return None
        return _share_of(deadline, self.total_steps)

    @property
    def at_target(self) -> bool:
        """True if every block has its target bits, and no float weight is blended in."""
        return self.bits == self.targets and not any(self.blend.values())

    @property
    def blend(self) -> dict[str, float]:
        """Block name to the share of the float weight in the next forward pass; 0 unless the config blends."""
        if not self.config.blend.enabled:
            return dict.fromkeys(self.bits, 0.0)
        ratio = self.config.blend.quantize_change_ratio
        return {
            name: max(0.0, 1.0 - ratio * (self.steps - changed))
            for name, changed in self._changed.items()
        }

    @property
    def is_choosing(self) -> bool:
        """True if `choose` must be called before the next `advance`."""
        return self.targets is None and bool(self.due())

    def choose(self, targets: Mapping[str, int]) -> None:
        """Set the bits that blocks end with under a budget, except for those that `overrides` fix."""
        fixed = {
            name: own.targets[0]
            for name, own in self._configs.items()
            if own.budget is None
        }
        self.targets = {**fixed, **targets}
        self.period = {name: self._first(name) for name in self.bits}

    @property
    def next_bits(self) -> dict[str, int]:
        """Block name to the bits after its next drop, for blocks above their targets."""
        return {
            name: self._target(name) + left - 1
            for name in self.bits
            if (left := self._drops_left(name)) > 0
        }

    def due(self) -> tuple[str, ...]:
        """The blocks that will change in the next `advance`."""
        since = self.steps + 1 - self.offset
        return tuple(
            name for name, change in self._changes().items() if change <= since
        )

    def next_step(self) -> int | None:
        """The step of the next change, as far as it is known now; None once all blocks are at their targets."""
        changes = self._changes().values()
        return self.offset + min(changes) if changes else None

    def drops_ahead(self, steps: int = 1) -> tuple[str, ...]:
        """The blocks that will lose a bit in the next `steps` calls of `advance`; going from float is not counted."""
        since = self.steps + steps - self.offset
        return tuple(name for name in self.next_bits if since >= self.period[name])

    def advance(
        self, eigenvalues: Mapping[str, float] | None = None
    ) -> tuple[Switch, ...]:
        """Count one optimizer step, and return the switches that it makes.

        Args:
            eigenvalues: Block name to eigenvalue over the largest, 0 to 1. Blocks
                without one have factor 1.

        Raises:
            MoQError: An eigenvalue is not in [0, 1] or belongs to no block, or the bits
                under a budget have not been chosen yet.
        """
        if self.is_choosing:
            raise MoQError(
                "the bits of the blocks have not been chosen yet: call `choose`"
            )
        eigenvalues = eigenvalues or {}
        for name, value in eigenvalues.items():
            if name not in self.bits:
                raise MoQError(
                    f"eigenvalue of an unknown block {name!r}; the blocks are {', '.join(self.bits)}"
                )
            if not 0.0 <= value <= 1.0:
                raise MoQError(f"eigenvalue of {name!r} must be in [0, 1], got {value}")
        due = self.due()
        self.steps += 1
        return tuple(self._change(name, eigenvalues.get(name)) for name in due)

    def forecast(
        self, eigenvalues: Mapping[str, float] | None = None
    ) -> Iterator[Switch]:
        """Yield the switches to come if every measurement gives these eigenvalues, without advancing the schedule.

        Raises:
            MoQError: See `advance`.
        """
        ahead = copy.deepcopy(self)
        while (step := ahead.next_step()) is not None:
            ahead.steps = max(ahead.steps, step - 1)
            yield from ahead.advance(eigenvalues)

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedule, in JSON types."""
        state: dict[str, Any] = {
            "steps": self.steps,
            "total_steps": self.total_steps,
            "blocks": {
                name: [self.bits[name], self.period[name], self._changed[name]]
                for name in self.bits
            },
        }
        if self.config.budget is not None:
            state["targets"] = self.targets
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. A deadline stays at its step, even if the run has another length now.

        Raises:
            MoQError: The state belongs to other blocks.
        """
        blocks = state["blocks"]
        if blocks.keys() != self.bits.keys():
            missing = sorted(self.bits.keys() - blocks)
            extra = sorted(blocks.keys() - self.bits)
            raise MoQError(
                "the saved schedule has another set of blocks: "
                f"it lacks {', '.join(missing) or 'none'}, and alone has {', '.join(extra) or 'none'}"
            )
        self.steps = state["steps"]
        if self.config.depends_on_length:
            self._fit_into(state["total_steps"])
        for name in self.bits:
            self.bits[name], self.period[name], self._changed[name] = blocks[name]
        if self.config.budget is not None:
            self.targets = state["targets"]

    def last_drop(self) -> int:
        """The latest optimizer step at which the last block can reach its target, including its blend."""
        ahead = copy.deepcopy(self)
        if ahead.targets is None:
            ahead.choose({name: self._target(name) for name in self.bits})
        latest = dict.fromkeys(self.bits, 1.0) if self.config.eigenvalue.enabled else {}
        changes = [switch.step for switch in ahead.forecast(latest)]
        return max([*self._changed.values(), *changes]) + fade_steps(self.config)

    def _target(self, name: str) -> int:
        """The bits that a block ends with; before they are chosen, the fewest that it may have."""
        if self.targets is not None:
            return self.targets[name]
        return self._configs[name].targets[0]

    def _start(self, name: str) -> int:
        return max(self._configs[name].start_bits, self._target(name))

    def _drops_left(self, name: str) -> int:
        return min(self.bits[name], self._start(name)) - self._target(name)

    def _drops(self, name: str) -> int:
        return self._start(name) - self._target(name)

    def _changes(self) -> dict[str, int]:
        """Block name to the steps from the offset to its next change, for blocks that are not at their targets."""
        falling = self.next_bits
        return {
            name: 0 if bits == FLOAT_BITS else self.period[name]
            for name, bits in self.bits.items()
            if bits == FLOAT_BITS or name in falling
        }

    def _first(self, name: str) -> int:
        """Steps from the offset to the first drop of a block."""
        drops = self._drops(name)
        period = self.config.period
        if self._room is None or drops == 0:
            return 1 if period == "auto" else period
        if period == "auto":
            return max(1, self._horizon(drops) >> (drops - 1))
        return min(period, _cap(self._room, 0, drops))

    def _following(self, name: str, period: int, left: int, factor: int) -> int:
        """Steps from the offset to the drop after the one at `period`, with `left` drops to go."""
        following = period * 2 * factor
        if self._room is None or left == 0:
            return following
        if self.config.period == "auto":
            ratios = self._drops(name) - 1
            growth = factor * min(2**ratios, self._horizon(ratios + 1))
            following = max(period + 1, _root(growth * period**ratios, ratios))
        return min(following, _cap(self._room, period, left))

    def _horizon(self, drops: int) -> int:
        """Steps from the offset to the last of `drops` drops of a block of factor 1, if the period is "auto"."""
        room = self._room or 0
        if drops == 1 or not self.config.eigenvalue.enabled:
            return room
        return max(1, room // MAX_FACTOR)

    def _fit_into(self, total_steps: int | None) -> None:
        """Set the length of the run, the offset, and the room before the deadline.

        Raises:
            MoQError: There is no room for the drops, or the length of the run is needed
                and not known.
        """
        config = self.config
        self.total_steps = total_steps
        self.offset = offset = offset_step_of(config, total_steps)
        # Steps from the offset to the last drop that still meets the deadline.
        self._room: int | None = None
        if config.deadline is None:
            return
        last = self.deadline_step
        if last is None:
            raise MoQError(
                f'{config.spell("period")} "auto" and {config.spell("deadline")} need total_steps, the run\'s length'
            )
        fade = fade_steps(config)
        longest = max(self._configs, key=self._drops)
        drops = self._drops(longest)
        self._room = last - offset - fade
        # Bits that do not fall have no last drop: a preset's deadline is no error then.
        if self._room >= drops or not drops:
            return
        needed = offset + drops + fade
        if isinstance(config.offset, float) and config.deadline - config.offset < 1e-3:
            # It grows with the run, so that no length helps.
            fits = "a smaller offset"
        else:
            longer = math.ceil(needed / Fraction(str(config.deadline)))
            while (
                _share_of(config.deadline, longer)
                - offset_step_of(config, longer)
                - fade
                < drops
            ):
                longer += 1
            fits = f"a run of {longer} steps"
        if self._room >= 0:
            fits = f"start_bits {self._target(longest) + self._room}, or {fits}"
        blend = f" and the {fade} steps of the last blend" if fade else ""
        raise MoQError(
            f"{config.spell('deadline')}: {config.deadline:g} of {total_steps} optimizer steps is step {last}, too "
            f"early for {counted(drops, 'drop')} after {config.spell('offset')} {offset}, one a step at most{blend}: "
            f"step {needed} is the first that would do. What would fit: {fits}"
        )

    def _change(self, name: str, eigenvalue: float | None) -> Switch:
        before = self.bits[name]
        factor = 1
        if before == FLOAT_BITS:
            self.bits[name] = self._start(name)
            eigenvalue = None
        else:
            if eigenvalue is not None:
                factor = 1 + math.floor((MAX_FACTOR - 1) * eigenvalue)
            self.bits[name] -= 1
            self.period[name] = self._following(
                name, self.period[name], self._drops_left(name), factor
            )
        self._changed[name] = self.steps
        return Switch(
            self.steps,
            name,
            before,
            self.bits[name],
            self.period[name],
            factor,
            eigenvalue,
        )


def _cap(room: int, since: int, left: int) -> int:
    """The latest step for the next of `left` drops after one at `since` that leaves room for all (see the module)."""
    return max(room >> (left - 1), _root(room * since ** (left - 1), left), since + 1)


def _root(value: int, degree: int) -> int:
    """The root of an integer, rounded down; exact, whereas floats could differ between machines."""
    low = 0
    high = 1 << -(-value.bit_length() // degree)
    # `bisect` cannot search ranges beyond the largest C integer.
    while high - low > 1:
        middle = (low + high) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle
    return low


def fade_steps(config: MoQConfig) -> int:
    """The number of steps in which the blend falls to 0."""
    if not config.blend.enabled:
        return 0
    ratio = config.blend.quantize_change_ratio
    steps = max(1, math.ceil(1.0 / ratio) - 1)
    # 1 / ratio may have been rounded down to an integer.
    while 1.0 - ratio * steps > 0.0:
        steps += 1
    return steps


def needs_run(config: MoQConfig) -> Iterator[str]:
    """Name the settings of a config that need the steps or the data of a run.

    >>> [*needs_run(MoQConfig(bits=4))], [*needs_run(MoQConfig(bits=4, offset=10, gptq=128))]
    ([], ['offset 10', 'gptq'])
    """
    if isinstance(config.bits, BitBudget):
        yield "bits under a budget"
    elif config.falls:
        constant = f"start_bits={config.bits}"
        hint = f"; none fall with {constant}" * (config.start_bits > config.bits)
        yield f"falling bits ({config.span_in_words}{hint})"
    if config.offset:
        yield f"offset {config.offset:g}"
    if config.rounds_inputs and config.activations.start_step:
        yield f"activations from step {config.activations.start_step}"
    if config.blend.enabled:
        yield "blend"
    if config.gptq:
        yield "gptq"
    if config.distillation.teacher is not None:
        yield "a teacher (MoQTrainer)"


def offset_step_of(config: MoQConfig, total_steps: int | None) -> int:
    """Optimizer steps before anything is quantized: at least one under a budget, which chooses bits in a step.

    Raises:
        MoQError: The offset is a share of a run whose length is not known.
    """
    offset = config.offset
    if isinstance(offset, float):
        if total_steps is None:
            raise MoQError(
                f"{config.spell('offset')}: below 1 it needs total_steps, the length of the run"
            )
        offset = _share_of(offset, total_steps)
    return offset if config.budget is None else max(1, offset)


def begins_in_float(config: MoQConfig) -> bool:
    """True if a run that is long enough has steps before anything is quantized."""
    return config.offset != 0 or config.budget is not None


def _share_of(share: float, total_steps: int) -> int:
    """The step at a share of a run; the share counts as it is written in decimals: 0.29 of 100 is 29."""
    return int(Fraction(str(share)) * total_steps)
