"""Which precision each block has after each optimizer step: pure Python, no tensor and no Trainer.

s counts the optimizer steps taken since the offset. Before the offset nothing is quantized (32 bits). After step s, a
block above its target whose period has come (s >= period) loses one bit and its period is multiplied by 2 * factor,
factor = 1 + floor(4 * e) with e its eigenvalue over the largest one, 0 to 1: sensitive blocks wait up to five times
longer before the next drop. Without eigenvalues the drops come at P, 2P, 4P, ... This is the rule of DeepSpeed's MoQ
(`runtime/quantize.py` up to 0.16), counted in optimizer steps.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .config import MoQConfig, MoQError

FLOAT_BITS = 32


class Switch(NamedTuple):
    """One block's change of precision.

    Attributes:
        step: Optimizer steps taken when it happened, this one included, from the start of training.
        block: Name of the block.
        before: Bits of the forward passes up to this step; 32 is unquantized.
        bits: Bits from the next forward pass on.
        period: Steps since the offset at which the next drop is due.
        factor: 1 to 5, what lengthened the period beyond doubling; 1 where the offset was reached.
        eigenvalue: The normalised eigenvalue behind the factor, or None.
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
        config: What to follow.
        blocks: Names, each once, in model order.
        total_steps: Optimizer steps of the whole run; not needed for an explicit period without a deadline.

    Raises:
        MoQError: No blocks, a name given twice, or a period "auto" or a deadline, which this version cannot plan.

    Attributes:
        steps: Optimizer steps taken, those before the offset included.
        bits: Block name to the bits of the next forward pass.
        period: Block name to the steps since the offset at which its next drop is due.
    """

    def __init__(self, config: MoQConfig, blocks: Iterable[str], total_steps: int | None = None) -> None:
        names = list(blocks)
        if not names:
            raise MoQError("a schedule needs at least one block")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise MoQError(f"blocks named twice: {', '.join(twice)}")
        if config.schedule.period is None or config.schedule.deadline is not None:
            raise MoQError(
                'quantize_schedule: quantize_period "auto" and deadline are not supported by this version of moq_hf; '
                "give quantize_period a number of optimizer steps and leave deadline out"
            )
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        start = config.start_bits if config.schedule.offset == 0 else FLOAT_BITS
        self.bits = dict.fromkeys(names, start)
        self.period = dict.fromkeys(names, config.schedule.period)
        # Steps taken when the block last changed: its blend is counted from there.
        self._changed = dict.fromkeys(names, 0)

    @property
    def at_target(self) -> bool:
        """Whether every block has its target bits and no float weight is blended in any more."""
        arrived = all(bits == self.config.target_bits for bits in self.bits.values())
        return arrived and not any(self.blend.values())

    @property
    def blend(self) -> dict[str, float]:
        """Block name to the share of the float weight in the next forward pass: all 0 unless the config blends."""
        if not self.config.blend.enabled:
            return dict.fromkeys(self.bits, 0.0)
        ratio = self.config.blend.change_ratio
        return {name: max(0.0, 1.0 - ratio * (self.steps - changed)) for name, changed in self._changed.items()}

    def due(self) -> tuple[str, ...]:
        """The blocks that will change in the coming `advance`."""
        return tuple(name for name in self.bits if self._is_due(name, self.steps + 1))

    def drops_ahead(self, steps: int = 1) -> tuple[str, ...]:
        """The blocks that will lose a bit in one of the coming `steps` calls of `advance`; the offset is no loss."""
        since = self.steps + steps - self.config.schedule.offset
        target = self.config.target_bits
        return tuple(
            name
            for name, bits in self.bits.items()
            if since >= self.period[name] and min(bits, self.config.start_bits) > target
        )

    def advance(self, eigenvalues: Mapping[str, float] | None = None) -> tuple[Switch, ...]:
        """Take one optimizer step and tell what changed.

        Args:
            eigenvalues: Block name to eigenvalue over the largest, 0 to 1. A block that is missing has factor 1.

        Raises:
            MoQError: An eigenvalue is not in [0, 1], or belongs to no block.
        """
        eigenvalues = eigenvalues or {}
        for name, value in eigenvalues.items():
            if name not in self.bits:
                raise MoQError(f"eigenvalue of an unknown block {name!r}; the blocks are {', '.join(self.bits)}")
            if not 0.0 <= value <= 1.0:
                raise MoQError(f"eigenvalue of {name!r} must be in [0, 1], got {value}")
        due = self.due()
        self.steps += 1
        return tuple(self._change(name, eigenvalues.get(name)) for name in due)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON types."""
        return {
            "steps": self.steps,
            "blocks": {name: [self.bits[name], self.period[name], self._changed[name]] for name in self.bits},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            MoQError: The state is of other blocks.
        """
        blocks = state["blocks"]
        if set(blocks) != set(self.bits):
            missing, extra = sorted(set(self.bits) - set(blocks)), sorted(set(blocks) - set(self.bits))
            raise MoQError(
                "the saved schedule is of another set of blocks: "
                f"not in it {', '.join(missing) or 'none'}; only in it {', '.join(extra) or 'none'}"
            )
        self.steps = state["steps"]
        for name in self.bits:
            self.bits[name], self.period[name], self._changed[name] = blocks[name]

    def steps_to_target(self, factor: int = 1) -> int:
        """Optimizer steps from the start of training to the last drop of a block with this factor at every drop."""
        period = self.config.schedule.period or 0
        drops = self.config.start_bits - self.config.target_bits
        last = period * (2 * factor) ** (drops - 1) if drops else 0
        return self.config.schedule.offset + last

    def _is_due(self, name: str, step: int) -> bool:
        since = step - self.config.schedule.offset
        if self.bits[name] == FLOAT_BITS:
            return since >= 0
        return self.bits[name] > self.config.target_bits and since >= self.period[name]

    def _change(self, name: str, eigenvalue: float | None) -> Switch:
        before, factor = self.bits[name], 1
        if before == FLOAT_BITS:
            self.bits[name] = self.config.start_bits
            eigenvalue = None
        else:
            if eigenvalue is not None:
                factor = 1 + math.floor(4 * eigenvalue)
            self.bits[name] -= 1
            self.period[name] *= 2 * factor
        self._changed[name] = self.steps
        return Switch(self.steps, name, before, self.bits[name], self.period[name], factor, eigenvalue)
