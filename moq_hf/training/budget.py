"""Choose the bits of each block under a budget, and describe the choice.

Finding the cheapest choice is a multiple-choice knapsack problem: pick one option for
each block so that the sum of costs is least and the sum of sizes fits a capacity. The
solution is exact. Going block by block, a partial choice is kept if no other one beats
it in both cost and size, and if it can still become the best: its cost plus a lower
bound for the remaining blocks must not exceed the cost of a known choice. The bound
comes from the Lagrangian relaxation, in which each unit of size has a price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..config import MoQConfig
from ..config_fields import Count, Flag, PackedBits, Positive, Weight
from ..errors import MoQError
from ..model.sizes import FileSize
from ..text import table
from .measures import Costs

# Relative cost difference below which the larger choice wins.
_TIE = 1e-9
# Sums taken in another order differ by rounding; the best choice must survive that.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Chosen:
    """The bits that were chosen for one block.

    Attributes:
        bits: Bits that the block ends with.
        weights: Number of its weights.
        cost: The cost of these bits by the measure.
        saved: Megabytes (10^6 bytes) of codes saved, compared with the largest choice
            of bits.
    """

    bits: PackedBits
    weights: Count
    cost: Weight
    saved: Weight


@dataclass(frozen=True)
class Choice:
    """The bits that were chosen for all blocks.

    Attributes:
        measure: Name of the measure that compared the blocks.
        step: Optimizer steps taken when the choice was made.
        blocks: Block name to the choice for it.
        limit: The budget: bits per weight, or megabytes of the file.
        reached: How much of it the choice takes, in the same unit.
        in_file: Whether the unit is megabytes.
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
        """The cells of a table: a header, and a row for each block."""
        return [
            ("block", "weights", "bits", "costs", "saves MB"),
            *(
                (
                    name,
                    f"{chosen.weights:,}",
                    str(chosen.bits),
                    f"{chosen.cost:.3g}",
                    f"{chosen.saved:,.3f}",
                )
                for name, chosen in self.blocks.items()
            ),
        ]

    def outcome(self) -> str:
        """One line that compares the choice with the budget."""
        cost = sum(chosen.cost for chosen in self.blocks.values())
        saved = sum(chosen.saved for chosen in self.blocks.values())
        unit = "MB in the file" if self.in_file else "bits per quantized weight"
        return f"{self.reached:,.4g} of {self.limit:,.4g} {unit}; total cost {cost:.3g}, saved {saved:,.3f} MB"

    def table(self) -> str:
        """A heading, the table of blocks, and the line on the budget."""
        heading = f"bits of {len(self.blocks)} blocks, chosen after step {self.step:,} by the measure {self.measure!r}:"
        return "\n".join([heading, table(self.rows()), self.outcome()])


class Chooser:
    """Knows the size of each block at each number of bits, and chooses the bits within the budget.

    Args:
        config: A config with a budget.
        blocks: Block name to its layers.
        weights: Layer name to the number of its weights.
        file: The size of the model's file, for a budget in megabytes.

    Raises:
        MoQError: No choice is within the budget, or every choice is; the text gives the
            possible range.
    """

    def __init__(
        self,
        config: MoQConfig,
        blocks: Mapping[str, Sequence[str]],
        weights: Mapping[str, int],
        file: FileSize | None = None,
    ) -> None:
        budget = config.budget
        assert budget is not None
        self.choices = budget.choices
        self.measure = config.measure
        self.in_file = file is not None
        limit = budget.mean if file is None else budget.file_mb
        assert limit is not None
        self._limit = limit
        self._weights = {
            block: sum(weights[layer] for layer in layers)
            for block, layers in blocks.items()
        }
        # A choice takes the sum of its blocks' sizes plus the rest, divided by the unit.
        self._rest = 0 if file is None else file.of_rest()
        self._unit = sum(self._weights.values()) if file is None else 10**6

        def size_of(layer: str, bits: int) -> int:
            return bits * weights[layer] if file is None else file.of_layer(layer, bits)

        self._sizes = {
            block: {
                bits: sum(size_of(layer, bits) for layer in layers)
                for bits in self.choices
            }
            for block, layers in blocks.items()
        }
        if file is not None:
            self._check_file(file, config)

    def cheapest_choice(self, costs: Costs, step: int) -> Choice:
        """The bits of each block that cost the least within the budget.

        Args:
            costs: By block and bits. Where fewer bits cost less than more bits, the
                larger cost counts for both.
            step: Optimizer steps taken.
        """
        falling = {name: _falling(costs[name]) for name in self._sizes}
        options = []
        for name, sizes in self._sizes.items():
            options.append([Option(sizes[b], falling[name][b]) for b in self.choices])
        # The limit counts as the decimal fraction that was written: in floats 2.3 * 50
        # is 114.99999999999999.
        capacity = int(Fraction(str(self._limit)) * self._unit) - self._rest
        # The fewest bits fit, as `_check_file` and the config have made sure.
        picked = cheapest(options, capacity) or [0] * len(options)
        blocks = {}
        sizes_of_choice = []
        for name, index in zip(self._sizes, picked, strict=True):
            bits = self.choices[index]
            count = self._weights[name]
            saved = count * (self.choices[-1] - bits) / 8e6
            blocks[name] = Chosen(bits, count, falling[name][bits], saved)
            sizes_of_choice.append(self._sizes[name][bits])
        reached = self._reached(sizes_of_choice)
        return Choice(self.measure, step, blocks, self._limit, reached, self.in_file)

    def _reached(self, sizes: Sequence[int]) -> float:
        return (sum(sizes) + self._rest) / self._unit

    def _check_file(self, file: FileSize, config: MoQConfig) -> None:
        where = f"{config.spell('bits')}.file_mb"
        alike = file.why_alike()
        if alike is not None:
            raise MoQError(
                f"{where}: {alike}, so that no choice of bits meets it; give mean instead"
            )
        sizes = [sizes_of_block.values() for sizes_of_block in self._sizes.values()]
        least = self._reached([*map(min, sizes)])
        most = self._reached([*map(max, sizes)])
        if not least <= self._limit <= most:
            verdict, stays = (
                ("is impossible", "the rest of the file stays")
                if self._limit < least
                else ("leaves nothing to choose", "more choices allow more")
            )
            raise MoQError(
                f"{where}: {self._limit:g} MB {verdict}: with {self.choices[0]} to {self.choices[-1]} bits the "
                f"file of this model has {least:,.3f} to {most:,.3f} MB ({stays}: {self._rest / 1e6:,.3f} MB are not "
                f"layers of the schedule; {config.spell('embeddings')} makes tables smaller)"
            )


def _falling(costs: Mapping[int, float]) -> dict[int, float]:
    """Raise costs so that they never rise with the bits: where they do, it is measurement noise.

    >>> _falling({2: 3.0, 3: 0.5, 4: 1.0, 8: 0.0})
    {8: 0.0, 4: 1.0, 3: 1.0, 2: 3.0}
    """
    falling = {}
    most = 0.0
    for bits in sorted(costs, reverse=True):
        most = falling[bits] = max(most, costs[bits])
    return falling


class Option(NamedTuple):
    """One choice for a block.

    Attributes:
        size: The part of the capacity that it takes, an integer.
        cost: Its cost, at least 0.
    """

    size: int
    cost: float


def cheapest(blocks: Sequence[Sequence[Option]], capacity: int) -> list[int] | None:
    """Pick one option for each block, so that the costs sum to the least and the sizes fit.

    Between choices whose costs differ by less than 1e-9 of all costs, the larger wins.

    Args:
        blocks: The options of each block.
        capacity: The largest allowed sum of sizes.

    Returns:
        The index of the option of each block; None if even the smallest do not fit.

    >>> blocks = [[Option(2, 5.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 2.5)]]
    >>> cheapest(blocks, 6), cheapest(blocks, 8), cheapest(blocks, 3)
    ([1, 0], [1, 1], None)
    """
    smallest = sum(min(option.size for option in options) for options in blocks)
    if smallest > capacity:
        return None
    scale = sum(max(option.cost for option in options) for options in blocks) or 1.0
    worth = _TIE * scale / max(capacity, 1)
    blocks = [
        [Option(size, cost - worth * size) for size, cost in options]
        for options in blocks
    ]
    price, relaxed = _priced(blocks, capacity, 2 * scale)
    # The choice that is cheapest at this price fits, so the best one costs no more.
    known = sum(option.cost for option in relaxed) + _ROUNDING * scale
    least = (
        sum(option.cost + price * option.size for option in relaxed) - price * capacity
    )
    cost = np.zeros(1)
    size = np.zeros(1, np.int64)
    kept: list[np.ndarray] = []
    for options, best in zip(blocks, relaxed, strict=True):
        sizes, costs = (np.array(column) for column in zip(*options, strict=True))
        cost = (cost[:, None] + costs).ravel()
        size = (size[:, None] + sizes).ravel()
        # From here on the least size and the least cost of the remaining blocks.
        smallest -= sizes.min()
        least -= best.cost + price * best.size
        hopeful = (size + smallest <= capacity) & (cost + price * size + least <= known)
        order = np.flatnonzero(hopeful)
        order = order[np.lexsort((size[order], cost[order]))]
        # In the order of cost, a choice is unbeaten if it is smaller than all before.
        smallest_so_far = np.minimum.accumulate(size[order])
        drops = np.diff(smallest_so_far, prepend=np.iinfo(np.int64).max)
        kept.append(order[drops < 0])
        cost = cost[kept[-1]]
        size = size[kept[-1]]
    chosen = []
    place = 0
    for options, order in zip(reversed(blocks), reversed(kept), strict=True):
        place, index = divmod(int(order[place]), len(options))
        chosen.append(index)
    return chosen[::-1]


def _priced(
    blocks: Sequence[Sequence[Option]], capacity: int, high: float
) -> tuple[float, list[Option]]:
    """Find the least price of a unit of size at which the cheapest options fit, and those options, by bisection.

    At the price `high` they are known to fit.
    """
    low = 0.0
    cheapest_that_fit = [min(options) for options in blocks]
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
            cheapest_that_fit = tried
    return high, cheapest_that_fit
