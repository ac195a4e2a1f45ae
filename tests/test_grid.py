import pytest

from moq_hf.grid import Grid


def test_auto_searches_at_five_bits_and_below() -> None:
    assert [bits for bits in range(1, 17) if Grid().searches(bits)] == [3, 4, 5]
    assert Grid(symmetric=False).searches(2) and not Grid(search="absmax").searches(3)
    assert Grid(search="mse").searches(8) and not Grid(search="mse").searches(1)


def test_equal_steps_are_those_of_more_than_two_codes_on_a_side() -> None:
    grids = {"narrow": Grid(), "full": Grid(full=True), "asymmetric": Grid(symmetric=False)}
    uniform = {name: [b for b in range(1, 17) if grid.is_uniform(b)] for name, grid in grids.items()}
    assert uniform == {"narrow": list(range(3, 17)), "full": list(range(2, 17)), "asymmetric": list(range(2, 17))}


def test_a_full_range_has_every_code_and_one_bit_is_binary() -> None:
    full = Grid(full=True)
    assert [full.limits(bits) for bits in (2, 3, 8)] == [(-2, 1), (-4, 3), (-128, 127)]
    assert [bits for bits in range(1, 17) if full.is_full(bits)] == list(range(2, 17))
    assert [bits for bits in range(1, 17) if full.searches(bits)] == [2, 3, 4, 5]
    full.check(1)
    with pytest.raises(ValueError, match="a full range is of symmetric grids"):
        Grid(symmetric=False, full=True).check(4)
