"""The trace of each block of a loss's Hessian, by Hutchinson's estimator.

With random signs v the expectation of v . H v is the trace of H (Hutchinson 1989). Signs for all blocks at once give
the trace of each from one product with the whole Hessian: the part of v . H v that a block's own weights make. What the
other blocks add to it is zero in the mean. Averaged over a block's weights it is HAWQ-V2's sensitivity (Dong et al.
2019, arXiv 1911.03852).
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .eigen import Graph, check_blocks
from .errors import MoQError
from .spaces import Loss, Space, space_of

# Products on one graph: it is made anew for the next ones of its batch, which costs less than two of them.
ROUND = 4


@dataclass(frozen=True)
class Trace:
    """What was found for one block.

    Attributes:
        value: The estimate, with its sign; NaN if a product was not finite.
        error: Its standard error over the vectors; what the data leave open is not in it.
        size: Weights of the block.
        num_products: Products with a vector for each loss, of all blocks at once.
    """

    value: float
    error: float
    size: int
    num_products: int

    @property
    def magnitude(self) -> float:
        """The root of value^2 + error^2: what is hardly known is not taken for small.

        A choice of the least cost looks for traces that came out too low; see docs/evidence/sensitivity.md.

        >>> Trace(-3.0, 4.0, 10, 16).magnitude
        5.0
        """
        return math.hypot(self.value, self.error if math.isfinite(self.error) else 0.0)


def block_traces(
    loss: Loss | Sequence[Loss],
    blocks: Mapping[str, Iterable[Tensor]],
    *,
    max_iter: int = 100,
    tol: float = 0.05,
    finite_difference: bool = False,
    seed: int = 0,
) -> dict[str, Trace]:
    """The trace of each block on the diagonal of the Hessian of a loss.

    Measures as the model stands: mode, data and precision are the caller's. Writes no gradient, and draws nothing from
    the global random generators.

    Args:
        loss: Gives the loss, a scalar, each time the same for the same parameters. Several of them (one per batch)
            stand for their mean, and only one batch's graph is in memory at a time.
        blocks: Block name to the parameters of the block, of any shape, all of which require a gradient; each
            parameter in one block.
        max_iter: Vectors, at most.
        tol: End as soon as no block's standard error is above that share of the largest trace.
        finite_difference: Take differences of gradients; see `block_eigenvalues`.
        seed: Of the vectors.

    Returns:
        The blocks' results, in the order of `blocks`.

    Raises:
        MoQError: What `block_eigenvalues` raises.

    >>> x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> found = block_traces(lambda: (x**2).sum() - 2 * (y**2).sum(), {"x": [x], "y": [y]})
    >>> found["x"].value, found["y"].value, found["y"].num_products
    (6.0, -8.0, 4)
    """
    losses = [loss] if callable(loss) else list(loss)
    named = {name: list(tensors) for name, tensors in blocks.items()}
    if max_iter < 1 or not 0 <= tol < math.inf:
        raise MoQError(f"max_iter must be at least 1 and tol at least 0; got {max_iter}, {tol}")
    check_blocks(losses, named, finite_difference)
    spaces = [space_of(tensors) for tensors in named.values()]
    generator = torch.Generator().manual_seed(seed)
    samples: list[list[float]] = []
    while len(samples) < max_iter and not _is_settled(samples, tol):
        count = min(ROUND, max_iter - len(samples))
        sums = torch.zeros(count, len(spaces), dtype=torch.float64)
        for one in losses:
            sums += _products(one, spaces, count, finite_difference, generator)
        samples += (sums / len(losses)).tolist()
    return {
        name: Trace(statistics.fmean(own), _error(own), space.size, len(samples))
        for name, space, own in zip(named, spaces, zip(*samples, strict=True), strict=True)
    }


def _products(
    loss: Loss, spaces: Sequence[Space], count: int, finite_difference: bool, generator: torch.Generator
) -> Tensor:
    """Each block's part of v . H v, for `count` random v: `[count, blocks]`, float64."""
    every = space_of([p for space in spaces for p in space.parameters])

    def vector() -> Tensor:
        # Block by block, so that no process holds all of it on its CPU.
        draws = (torch.randint(0, 2, (s.size,), generator=generator, dtype=torch.int8, device="cpu") for s in spaces)
        signs = [space.own(draw) for space, draw in zip(spaces, draws, strict=True)]
        return torch.cat([own.to(torch.float32).mul_(2).sub_(1) for own in signs])

    def each(product: Callable[[Tensor], Tensor]) -> Tensor:
        vectors = (vector() for _ in range(count))
        return torch.stack([every.sums(product(v).mul_(v), spaces) for v in vectors])

    if finite_difference:
        return each(lambda v: every.product([loss], v))
    with Graph(loss, {"": every.parameters}) as graph:
        return each(lambda v: graph.product("", v))


def _is_settled(samples: Sequence[Sequence[float]], tol: float) -> bool:
    if not samples:
        return False
    columns = list(zip(*samples, strict=True))
    means = [statistics.fmean(own) for own in columns]
    # What is not finite stays so.
    if not all(map(math.isfinite, means)):
        return True
    largest = max(map(abs, means))
    return all(_error(own) <= tol * largest for own in columns)


def _error(samples: Sequence[float]) -> float:
    """The standard error of the mean; of one sample it is not known."""
    count, mean = len(samples), statistics.fmean(samples)
    squares = math.fsum((sample - mean) ** 2 for sample in samples) if math.isfinite(mean) else math.nan
    return math.sqrt(squares / (count - 1) / count) if count > 1 else math.inf
