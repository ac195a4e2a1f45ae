import copy
import pickle

import pytest

from moq_hf.grid import Grid, PerChannel


def test_auto_searches_at_five_bits_and_below() -> None:
    assert [bits for bits in range(1, 17) if Grid().at(bits).searches] == [3, 4, 5]
    assert [bits for bits in range(1, 17) if Grid(full=True).at(bits).searches] == [2, 3, 4, 5]
    assert Grid(symmetric=False).at(2).searches and not Grid(search="absmax").at(3).searches
    assert Grid(search="mse").at(8).searches and not Grid(search="mse").at(1).searches


def test_a_precision_is_made_once_and_equals_that_of_an_equal_grid() -> None:
    grid = Grid(PerChannel())
    precision = grid.at(4)
    assert grid.at(4) is precision and grid.at(3) != precision
    assert precision == Grid(PerChannel()).at(4) != Grid().at(4)
    # A model is copied and pickled with its grids, and they stay keys.
    for other in (copy.deepcopy(grid), pickle.loads(pickle.dumps(grid))):
        assert other.at(4) == precision and hash(other) == hash(grid)
        assert other.at(4).grid is other


def test_a_precision_that_there_is_not_is_told_when_it_is_checked() -> None:
    # Layers that are not quantized yet have 32 bits.
    for precision in (Grid().at(0), Grid().at(32), Grid(symmetric=False).at(1), Grid(stochastic=True).at(2)):
        with pytest.raises(ValueError, match=r"bits must be|binary|nearest only"):
            precision.check()
