"""Hutchinson's estimate, compared with the exact trace of dense Hessians."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moq_hf.errors import MoQError
from moq_hf.trace import Trace, block_traces


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def made() -> tuple[Net, list[Tensor], list[Tensor]]:
    net = Net()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(7, 5, generator=generator) for _ in range(2)]
    return net, inputs, [torch.randint(0, 3, (7,), generator=generator) for _ in range(2)]


def exact(net: Net, inputs: list[Tensor], labels: list[Tensor]) -> dict[str, float]:
    """The traces of the dense float64 Hessian of the mean loss."""
    weights = (net.first.weight.detach().double(), net.second.weight.detach().double())
    biases = (net.first.bias.detach().double(), net.second.bias.detach().double())

    def loss(first: Tensor, second: Tensor) -> Tensor:
        found = [
            nn.functional.cross_entropy((x.double() @ first.T + biases[0]).tanh() @ second.T + biases[1], y)
            for x, y in zip(inputs, labels, strict=True)
        ]
        return torch.stack(found).mean()

    hessian = torch.autograd.functional.hessian(loss, weights)
    return {
        name: float(hessian[k][k].reshape(weights[k].numel(), -1).trace()) for k, name in enumerate(("first", "second"))
    }


@pytest.mark.parametrize("finite_difference", [False, True])
def test_it_is_the_trace_of_the_dense_hessian(finite_difference: bool) -> None:
    net, inputs, labels = made()
    truth = exact(net, inputs, labels)
    losses = [lambda x=x, y=y: nn.functional.cross_entropy(net(x), y) for x, y in zip(inputs, labels, strict=True)]
    blocks = {"first": [net.first.weight], "second": [net.second.weight]}
    found = block_traces(losses, blocks, max_iter=600, tol=0.0, finite_difference=finite_difference)
    for name, trace in found.items():
        assert trace.num_products == 600
        assert trace.size == blocks[name][0].numel()
        # The error that it reports is that of 600 vectors, and it is right to four of them.
        assert 0 < trace.error < 0.05 * abs(truth[name])
        assert abs(trace.value - truth[name]) < 4 * trace.error
    assert all(p.grad is None for p in net.parameters())


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_diagonal_hessians_are_exact_with_any_vector(first: list[float], second: list[float]) -> None:
    x, y = (torch.ones(len(d), requires_grad=True) for d in (first, second))
    a, b = torch.tensor(first), torch.tensor(second)
    found = block_traces(lambda: (a * x**2).sum() / 2 + (b * y**2).sum() / 2, {"x": [x], "y": [y]}, max_iter=2)
    assert math.isclose(found["x"].value, sum(first), abs_tol=1e-4)
    assert math.isclose(found["y"].value, sum(second), abs_tol=1e-4)


def test_it_ends_when_the_tolerance_is_reached() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(30, 30)
    matrix = matrix @ matrix.T
    x = torch.zeros(30, requires_grad=True)
    found = {tol: block_traces(lambda: x @ matrix @ x / 2, {"x": [x]}, tol=tol)["x"] for tol in (0.2, 0.05, 1e-9)}
    assert found[0.2].num_products < found[0.05].num_products < found[1e-9].num_products == 100
    assert all(trace.error <= tol * abs(trace.value) for tol, trace in found.items() if tol > 1e-3)


def test_the_same_seed_gives_the_same_and_leaves_the_generator() -> None:
    net, inputs, labels = made()
    blocks = {"all": list(net.parameters())}
    before = torch.random.get_rng_state()
    found = [
        block_traces(lambda: nn.functional.cross_entropy(net(inputs[0]), labels[0]), blocks, seed=seed, max_iter=3)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1] != found[2]


def test_what_is_not_finite_is_nan() -> None:
    x = torch.zeros(2, requires_grad=True)
    found = block_traces(lambda: (x.abs() ** 1.5).sum(), {"x": [x]})["x"]
    assert isinstance(found, Trace) and not math.isfinite(found.value) and found.num_products == 4


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(MoQError, match="max_iter must be at least 1"):
        block_traces(lambda: x.sum(), {"x": [x]}, max_iter=0)
    with pytest.raises(MoQError, match="no block to measure"):
        block_traces(lambda: x.sum(), {})
    with pytest.raises(MoQError, match="require no gradient"):
        block_traces(lambda: x.sum(), {"x": [torch.zeros(2)]})
