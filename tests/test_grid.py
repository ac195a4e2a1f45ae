from moq_hf.grid import Grid


def test_auto_searches_at_five_bits_and_below() -> None:
    assert [bits for bits in range(1, 17) if Grid().at(bits).searches] == [3, 4, 5]
    assert [bits for bits in range(1, 17) if Grid(full=True).at(bits).searches] == [2, 3, 4, 5]
    assert Grid(symmetric=False).at(2).searches and not Grid(search="absmax").at(3).searches
    assert Grid(search="mse").at(8).searches and not Grid(search="mse").at(1).searches
