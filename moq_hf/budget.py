"""Which bits each block gets under a budget: the choice of least cost, exactly.

It is a multiple-choice knapsack: of each block one option, costs summed, sizes summed up to a capacity. Partial choices
are kept, block by block, that no other one beats in cost and size, and that can still become the best one: their cost
and the least that the remaining blocks cost where bits may be mixed (the linear relaxation: the lower convex hull of a
block's options, steepest piece first) is not above that of a choice which is known.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

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
    cost, size = np.zeros(1), np.zeros(1, np.int64)
    kept: list[np.ndarray] = []
    for options, rest in zip(blocks, bounds[1:], strict=True):
        sizes, costs = (np.array(column) for column in zip(*options, strict=True))
        cost, size = (cost[:, None] + costs).ravel(), (size[:, None] + sizes).ravel()
        some = np.flatnonzero(capacity - size >= rest.least)
        some = some[cost[some] + rest.cost(capacity - size[some]) <= known]
        some = some[np.lexsort((size[some], cost[some]))]
        unbeaten = np.diff(np.minimum.accumulate(size[some]), prepend=np.iinfo(np.int64).max) < 0
        kept.append(some[unbeaten])
        cost, size = cost[kept[-1]], size[kept[-1]]
    chosen, place = [], 0
    for options, some in zip(reversed(blocks), reversed(kept), strict=True):
        place, index = divmod(int(some[place]), len(options))
        chosen.append(index)
    return chosen[::-1]


class _Bound:
    """What some blocks cost at least, by the room that they have.

    Attributes:
        least: The room that they need.
    """

    def __init__(self, base: Option, pieces: Sequence[Option]) -> None:
        self.least = base.size
        steep = sorted(pieces, key=lambda piece: -piece.cost / piece.size)
        self._sizes = np.cumsum([0, *(piece.size for piece in steep)])
        self._costs = np.cumsum([base.cost, *(-piece.cost for piece in steep)])
        # Beyond the last piece room saves nothing.
        self._slopes = np.array([*(piece.cost / piece.size for piece in steep), 0.0])

    def cost(self, room: np.ndarray) -> np.ndarray:
        """At least that, for each `room` from `least` on."""
        whole = np.searchsorted(self._sizes, room - self.least, "right") - 1
        bound: np.ndarray = self._costs[whole] - self._slopes[whole] * (room - self.least - self._sizes[whole])
        return bound

    def reached(self, room: int) -> float:
        """The cost of a choice that fits: that of whole pieces."""
        return float(self._costs[np.searchsorted(self._sizes, room - self.least, "right") - 1])


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
