"""Which bits each block gets under a budget: the choice of least cost, exactly.

It is a multiple-choice knapsack: of each block one option, costs summed, sizes summed up to a capacity. Partial choices
are kept, block by block, that no other one beats in cost and size, and that can still become the best one: their cost
and the least that the remaining blocks cost where bits may be mixed (the linear relaxation: the lower convex hull of a
block's options, steepest piece first) is not above that of a choice which is known.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

# Of choices whose costs differ by no more than that share of all costs, the larger one is taken.
_TIE = 1e-9
# Sums in another order differ by rounding, which must not lose the best choice.
_ROUNDING = 1e-12


class Option(NamedTuple):
    """What a block may be.

    Attributes:
        size: What it takes of the capacity, a whole number.
        cost: What it loses, from 0.
    """

    size: int
    cost: float


def choose(blocks: Sequence[Sequence[Option]], capacity: int) -> list[int] | None:
    """The option of each block with the least sum of costs among those that fit; of equal ones (to 1e-9) the largest.

    Args:
        blocks: Options of each block.
        capacity: The most that the sizes may sum up to.

    Returns:
        The index of the option of each block; None if even the smallest do not fit.

    >>> blocks = [[Option(2, 5.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 2.5)]]
    >>> choose(blocks, 6), choose(blocks, 8), choose(blocks, 3)
    ([1, 0], [1, 1], None)
    """
    if sum(min(option.size for option in options) for options in blocks) > capacity:
        return None
    scale = sum(max(option.cost for option in options) for options in blocks) or 1.0
    worth = _TIE * scale / max(capacity, 1)
    blocks = [[Option(size, cost - worth * size) for size, cost in options] for options in blocks]
    bounds = _bounds(blocks)
    known = bounds[0].reached(capacity) + _ROUNDING * scale
    found: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for options, rest in zip(blocks, bounds[1:], strict=True):
        grown = sorted(
            (cost + option.cost, size + option.size, (*chosen, index))
            for cost, size, chosen in found
            for index, option in enumerate(options)
        )
        found = []
        for cost, size, chosen in grown:
            room, beaten = capacity - size, bool(found) and size >= found[-1][1]
            if not beaten and room >= rest.least and cost + rest.cost(room) <= known:
                found.append((cost, size, chosen))
    return list(found[0][2])


class _Bound:
    """What some blocks cost at least, by the room that they have.

    Attributes:
        least: The room that they need.
    """

    def __init__(self, base: Option, pieces: Sequence[Option]) -> None:
        self.least = base.size
        steep = sorted(pieces, key=lambda piece: -piece.cost / piece.size)
        self._sizes = list(accumulate((piece.size for piece in steep), initial=0))
        self._costs = list(accumulate((-piece.cost for piece in steep), initial=base.cost))
        self._slopes = [piece.cost / piece.size for piece in steep]

    def cost(self, room: int) -> float:
        """At least that, for `room` from `least` on."""
        whole = bisect_right(self._sizes, room - self.least) - 1
        part = room - self.least - self._sizes[whole]
        return self._costs[whole] - (self._slopes[whole] * part if whole < len(self._slopes) else 0.0)

    def reached(self, room: int) -> float:
        """The cost of a choice that fits: that of whole pieces."""
        return self._costs[bisect_right(self._sizes, room - self.least) - 1]


def _bounds(blocks: Sequence[Sequence[Option]]) -> list[_Bound]:
    """Of the blocks from each one on, and of none."""
    found = [_Bound(Option(0, 0.0), ())]
    base, pieces = Option(0, 0.0), list[Option]()
    for options in reversed(blocks):
        first, more = _hull(options)
        base = Option(base.size + first.size, base.cost + first.cost)
        pieces = [*pieces, *more]
        found.append(_Bound(base, pieces))
    return found[::-1]


def _hull(options: Sequence[Option]) -> tuple[Option, list[Option]]:
    """The smallest option, and the pieces of the lower convex hull from it on: more size, less cost."""
    corners: list[Option] = []
    for option in sorted(options):
        if corners and option.cost >= corners[-1].cost:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], option):
            corners.pop()
        corners.append(option)
    pieces = [Option(b.size - a.size, a.cost - b.cost) for a, b in pairwise(corners)]
    return corners[0], pieces


def _slope(one: Option, other: Option) -> float:
    """What size saves; of equal sizes nothing can be saved by taking more."""
    return (one.cost - other.cost) / (other.size - one.size)
