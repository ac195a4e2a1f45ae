"""Bits under a budget: what they cost and take, which are chosen, and how the choice is shown, saved and read back.

The choice of least cost is a multiple-choice knapsack: of each block one option, costs
summed, sizes summed up to a capacity. It is exact. Partial choices are kept, block by
block, that no other one beats in cost and size, and that can still become the best one:
their cost and the least that the remaining blocks cost is not above that of a known
choice, where each unit of size below the capacity is paid for by one price (the
Lagrangian relaxation).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..config import Count, Flag, MoQConfig, PackedBits, Positive, Weight
from ..errors import MoQError
from ..model.sizes import FileSize
from ..text import table
from .measures import Costs

# Relative cost difference below which the larger choice wins.
_TIE = 1e-9
# Sums in another order differ by rounding, which must not lose the best choice.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Chosen:
    """One block of a choice.

    Attributes:
        bits: What it ends with.
        weights: How many it has.
        cost: What these bits cost by the measure.
        saved: Megabytes (10^6 bytes) of codes that they save against the most bits that
            it could have.
    """

    bits: PackedBits
    weights: Count
    cost: Weight
    saved: Weight


@dataclass(frozen=True)
class Choice:
    """Bits of all blocks.

    Attributes:
        measure: By what the blocks were compared.
        step: Optimizer steps taken when it was made.
        blocks: Block name to what was chosen.
        limit: The budget: bits per weight, or megabytes of the file.
        reached: The same of the choice.
        in_file: Whether these are megabytes.
    """

    measure: str
    step: Positive
    blocks: dict[str, Chosen]
    limit: Weight
    reached: Weight
    in_file: Flag

    @property
    def targets(self) -> dict[str, int]:
        """Block name to bits."""
        return {name: chosen.bits for name, chosen in self.blocks.items()}

    def rows(self) -> list[tuple[str, ...]]:
        """The words of a table: a head, and a row for each block."""
        return [
            ("block", "weights", "bits", "costs", "saves MB"),
            *(
                (
                    name,
                    f"{own.weights:,}",
                    str(own.bits),
                    f"{own.cost:.3g}",
                    f"{own.saved:,.3f}",
                )
                for name, own in self.blocks.items()
            ),
        ]

    def outcome(self) -> str:
        """A line on the budget."""
        cost, saved = (
            sum(getattr(own, key) for own in self.blocks.values())
            for key in ("cost", "saved")
        )
        what = "MB in the file" if self.in_file else "bits per quantized weight"
        return f"{self.reached:,.4g} of {self.limit:,.4g} {what}; rise of the loss {cost:.3g}, saved {saved:,.3f} MB"

    def table(self) -> str:
        """The rows, and what they are of."""
        head = f"bits of {len(self.blocks)} blocks, chosen after step {self.step:,} by the measure {self.measure!r}:"
        return "\n".join([head, table(self.rows()), self.outcome()])


class Chooser:
    """Knows what the blocks of a model take at their bits, and chooses.

    Args:
        config: With a budget.
        weights: Block name to the number of its weights.
        blocks: Block name to its layers.
        file: Of the model, for a budget of megabytes.

    Raises:
        MoQError: No choice is within the budget, or all are; the text has the possible
            range.
    """

    def __init__(
        self,
        config: MoQConfig,
        weights: Mapping[str, int],
        blocks: Mapping[str, Sequence[str]],
        file: FileSize | None = None,
    ) -> None:
        budget = config.budget
        assert budget is not None
        self.choices = budget.choices
        self.measure = config.measure
        self.in_file = file is not None
        self._weights = weights
        # What a choice takes is the sum of its blocks' sizes and the rest, in units of
        # 1 / unit.
        if file is None:
            self._sizes = {
                block: {bits: bits * count for bits in self.choices}
                for block, count in weights.items()
            }
            self._rest = 0
            self._unit = sum(weights.values())
            limit = budget.mean
        else:
            self._sizes = {
                block: {
                    bits: sum(file.of_layer(layer, bits) for layer in own)
                    for bits in self.choices
                }
                for block, own in blocks.items()
            }
            self._rest = file.of_rest()
            self._unit = 10**6
            limit = budget.file_mb
        assert limit is not None
        self._limit = limit
        if file is not None:
            self._check_file(file)

    def choose(self, costs: Costs, step: int) -> Choice:
        """The bits of each block that cost the least within the budget.

        Args:
            costs: By block and bits; a cost that rises with the bits is taken for that
                of fewer ones.
            step: Optimizer steps taken.
        """
        costs = {block: _falling(own) for block, own in costs.items()}
        options = [
            [Option(sizes[bits], costs[block][bits]) for bits in self.choices]
            for block, sizes in self._sizes.items()
        ]
        # As the decimal fraction that it was written as: 2.3 * 50 is
        # 114.99999999999999.
        capacity = int(Fraction(str(self._limit)) * self._unit) - self._rest
        # The sizes at the fewest bits were found to fit.
        picked = cheapest(options, capacity) or [0] * len(options)
        chosen = {}
        for block, index in zip(self._sizes, picked, strict=True):
            bits = self.choices[index]
            count = self._weights[block]
            chosen[block] = Chosen(
                bits, count, costs[block][bits], count * (self.choices[-1] - bits) / 8e6
            )
        reached = self._reached(
            [self._sizes[block][own.bits] for block, own in chosen.items()]
        )
        return Choice(self.measure, step, chosen, self._limit, reached, self.in_file)

    def _reached(self, sizes: Sequence[int]) -> float:
        return (sum(sizes) + self._rest) / self._unit

    def _check_file(self, file: FileSize) -> None:
        where = "quantize_bits.target_bits.file_mb"
        alike = file.why_alike()
        if alike is not None:
            raise MoQError(
                f"{where}: {alike}, so that no choice of bits meets it; give mean instead"
            )
        least, most = (
            self._reached([end(own.values()) for own in self._sizes.values()])
            for end in (min, max)
        )
        if not least <= self._limit <= most:
            stays = (
                "the rest of the file stays"
                if self._limit < least
                else "more choices allow more"
            )
            raise MoQError(
                f"{where}: {self._limit:g} MB is impossible: with {self.choices[0]} to {self.choices[-1]} bits the "
                f"file of this model has {least:,.3f} to {most:,.3f} MB ({stays}: {self._rest / 1e6:,.3f} MB are no "
                "layers of the schedule; quantize_embeddings makes tables smaller)"
            )


def _falling(costs: Mapping[int, float]) -> dict[int, float]:
    """Give more bits no higher cost than fewer have: only noise would.

    >>> _falling({2: 3.0, 3: 0.5, 4: 1.0, 8: 0.0})
    {2: 3.0, 3: 1.0, 4: 1.0, 8: 0.0}
    """
    found = {}
    most = 0.0
    for bits in sorted(costs, reverse=True):
        most = found[bits] = max(most, costs[bits])
    return {bits: found[bits] for bits in sorted(found)}


class Option(NamedTuple):
    """What a block may be.

    Attributes:
        size: What it takes of the capacity, a whole number.
        cost: What it loses, from 0.
    """

    size: int
    cost: float


def cheapest(blocks: Sequence[Sequence[Option]], capacity: int) -> list[int] | None:
    """The option of each block with the least sum of costs among those that fit; of equal ones (to 1e-9) the largest.

    Args:
        blocks: Options of each block.
        capacity: The most that the sizes may sum up to.

    Returns:
        The index of the option of each block; None if even the smallest do not fit.

    >>> blocks = [[Option(2, 5.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 2.5)]]
    >>> cheapest(blocks, 6), cheapest(blocks, 8), cheapest(blocks, 3)
    ([1, 0], [1, 1], None)
    """
    if sum(min(option.size for option in options) for options in blocks) > capacity:
        return None
    scale = sum(max(option.cost for option in options) for options in blocks) or 1.0
    worth = _TIE * scale / max(capacity, 1)
    blocks = [
        [Option(size, cost - worth * size) for size, cost in options]
        for options in blocks
    ]
    price, relaxed = _priced(blocks, capacity, 2 * scale)
    # What the cheapest choice at that price costs is known to fit.
    known = sum(option.cost for option in relaxed) + _ROUNDING * scale
    least = (
        sum(option.cost + price * option.size for option in relaxed) - price * capacity
    )
    smallest = sum(min(option.size for option in options) for options in blocks)
    cost = np.zeros(1)
    size = np.zeros(1, np.int64)
    kept: list[np.ndarray] = []
    for options, best in zip(blocks, relaxed, strict=True):
        sizes, costs = (np.array(column) for column in zip(*options, strict=True))
        cost = (cost[:, None] + costs).ravel()
        size = (size[:, None] + sizes).ravel()
        # What the remaining blocks take and cost at the least.
        smallest -= sizes.min()
        least -= best.cost + price * best.size
        hopeful = (size + smallest <= capacity) & (cost + price * size + least <= known)
        some = np.flatnonzero(hopeful)
        some = some[np.lexsort((size[some], cost[some]))]
        unbeaten = (
            np.diff(np.minimum.accumulate(size[some]), prepend=np.iinfo(np.int64).max)
            < 0
        )
        kept.append(some[unbeaten])
        cost = cost[kept[-1]]
        size = size[kept[-1]]
    chosen = []
    place = 0
    for options, some in zip(reversed(blocks), reversed(kept), strict=True):
        place, index = divmod(int(some[place]), len(options))
        chosen.append(index)
    return chosen[::-1]


def _priced(
    blocks: Sequence[Sequence[Option]], capacity: int, high: float
) -> tuple[float, list[Option]]:
    """Find about the least price of a unit of size at which the options that are cheapest with it fit, and these.

    At the price `high` they do.
    """
    low = 0.0
    found = [min(options) for options in blocks]
    for _ in range(100):
        price = (low + high) / 2
        tried = [
            min(options, key=lambda option: option.cost + price * option.size)
            for options in blocks
        ]
        if sum(option.size for option in tried) > capacity:
            low = price
        else:
            high = price
            found = tried
    return high, found
