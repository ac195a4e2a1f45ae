from moq_hf.grid import Grid


def test_auto_searches_at_five_bits_and_below() -> None:
    assert [bits for bits in range(1, 17) if Grid().searches(bits)] == [3, 4, 5]
    assert [bits for bits in range(1, 17) if Grid(full=True).searches(bits)] == [2, 3, 4, 5]
    assert Grid(symmetric=False).searches(2) and not Grid(search="absmax").searches(3)
    assert Grid(search="mse").searches(8) and not Grid(search="mse").searches(1)
