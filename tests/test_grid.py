from moq_hf.grid import Grid


def test_auto_searches_at_five_bits_and_below() -> None:
    assert [bits for bits in range(1, 17) if Grid().searches(bits)] == [3, 4, 5]
    assert Grid(symmetric=False).searches(2) and not Grid(search="absmax").searches(3)
    assert Grid(search="mse").searches(8) and not Grid(search="mse").searches(1)


def test_equal_steps_are_those_of_more_than_two_codes_on_a_side() -> None:
    uniform = {
        symmetric: [b for b in range(1, 17) if Grid(symmetric=symmetric).is_uniform(b)] for symmetric in (True, False)
    }
    assert uniform == {True: list(range(3, 17)), False: list(range(2, 17))}
