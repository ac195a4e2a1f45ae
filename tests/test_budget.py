"""The choice under a budget, compared with trying all of them."""

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from moq_hf.training.budget import Option, cheapest

costs = st.floats(0, 100) | st.sampled_from([0.0, 1.0, 1e-12])
options = st.lists(st.builds(Option, st.integers(0, 40), costs), min_size=1, max_size=4)


def brute_force(blocks: list[list[Option]], capacity: int) -> tuple[float, int] | None:
    """The least cost, and the largest size that has it."""
    found = [
        (sum(option.cost for option in chosen), -sum(option.size for option in chosen))
        for chosen in itertools.product(*blocks)
        if sum(option.size for option in chosen) <= capacity
    ]
    return min(found, default=None)


@given(st.lists(options, min_size=1, max_size=5), st.integers(0, 200), st.booleans())
def test_no_choice_that_fits_costs_less_or_as_little_and_is_larger(
    blocks: list[list[Option]], capacity: int, free: bool
) -> None:
    if free:
        blocks = [[option._replace(cost=0.0) for option in block] for block in blocks]
    best, chosen = brute_force(blocks, capacity), cheapest(blocks, capacity)
    if best is None:
        assert chosen is None
        return
    taken = [block[index] for block, index in zip(blocks, chosen, strict=True)]
    size = sum(option.size for option in taken)
    assert size == -best[1] if free else size <= capacity
    scale = sum(max(option.cost for option in block) for block in blocks) or 1.0
    assert sum(option.cost for option in taken) <= best[0] + 2e-9 * scale


def test_many_blocks_of_odd_sizes_take_no_time() -> None:
    # 4^400 choices, and sizes without a common divisor.
    blocks = [
        [Option(bits * (100_003 + 7919 * k % 50_021), (1 + k * 37 % 101) * 4.0**-bits) for bits in (2, 3, 4, 8)]
        for k in range(400)
    ]
    capacity = int(3.3 * sum(block[0].size // 2 for block in blocks))
    began = time.process_time()
    chosen = cheapest(blocks, capacity)
    assert time.process_time() - began < 5
    taken = sum(block[index].size for block, index in zip(blocks, chosen, strict=True))
    assert 0.999 * capacity < taken <= capacity
