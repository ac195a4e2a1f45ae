"""What rounding a block costs, predicted or measured: what `sensitivity.measure` names, and how much work each is.

With dW the change of a block's n weights at some bits, its loss rises to second order, where the gradient is nearly 0,
by dW . H dW / 2. That is

| measure | taken for it |
| --- | --- |
| eigenvalue | the top eigenvalue of its Hessian in magnitude, times |dW|^2 / 2: the worst dW |
| trace | the mean of its Hessian's diagonal, times |dW|^2 / 2: dW knows nothing of H (HAWQ-V2, arXiv 1911.03852) |
| loss | nothing is predicted: the loss with the block at these bits and the others as they are, less the loss now |
| divergence | the same of the cross entropy of the answers with those now: KL(now, with the block at these bits) |

None is below 0: curvatures count by their magnitude, that of a trace with its standard error (`Trace.magnitude`), and a
loss that falls is noise, or no reason to round.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Measure
from ..grid import Grid
from ..kernels.backend import choose
from ..processes import device_of, is_sharded, memory_of
from ..quant_linear import QuantLayer
from ..quantizer import Draw
from ..rows import Kind, from_rows, to_rows
from ..shards import Shard
from ..spaces import space_of
from ..trace import ROUND

# Measured directly, by forward passes alone.
MEASURED: Final[frozenset[Measure]] = frozenset({"loss", "divergence"})

# By block, and by bits.
Costs = dict[str, dict[int, float]]

# In units of the forward and backward pass of one training example; benchmarks/eigen.py and sensitivity.py measure
# them. They decide what the budget allows: the clock would let two runs of the same seed differ.
GRAPH_COST, PRODUCT_COST, DIFFERENCE_COST = 1.0, 0.6, 1.1
# A product with the Hessian of all blocks at once, and a forward pass alone.
JOINT_COST, FORWARD_COST = 4.4, 0.4
# Differences that try out whether they mean something.
TRIED = 2
# Products a block takes early in training, where it takes most; vectors for all blocks at once.
FIRST_PRODUCTS = {"lanczos": 11, "power": 23}
VECTORS = 16


class Weight(NamedTuple):
    """A layer's float weight, and how it is quantized; of a sharded one what this process holds.

    Attributes:
        values: Of the weight.
        kind: How it is laid out as a matrix.
        grid: How it is quantized.
        draw: The random numbers of stochastic rounding.
        kernel: `quantizer_kernel` of the config.
        shard: Where the values are in the whole weight; None if they are all of it.
    """

    values: Tensor
    kind: Kind
    grid: Grid
    draw: Draw
    kernel: bool | None
    shard: Shard | None = None

    @property
    def size(self) -> int:
        """Elements of the whole weight."""
        return self.values.numel() if self.shard is None else math.prod(self.shard.shape)

    @classmethod
    def of(cls, layer: QuantLayer) -> "Weight":
        """The one of a layer as it is now."""
        state, weight = layer.moq, layer.float_weight
        shard = Shard.of(weight, layer.kind) if is_sharded(weight) else None
        # The memory of shards gets other values while something is measured.
        values = weight.detach() if shard is None else memory_of(weight).clone().to(device_of(weight))
        return cls(values, layer.kind, state.grid, state.draw, state.kernel, shard)

    def rounded(self, bits: int) -> Tensor:
        """The weight at `bits`, float32, in its own shape: what the layer would multiply with."""
        if self.shard is not None:
            ratio = None
            if self.grid.searches(bits):
                ratio = self.shard.least_squares_ratio(self.values, bits, self.grid, self.kernel)
            how: dict[str, Any] = {"ratio": ratio, "draw": self.draw, "blend": 0.0, "kernel": self.kernel}
            return self.shard.fake_quantize(self.values, bits, self.grid, dtype=torch.float32, **how)
        matrix = to_rows(self.values, self.kind).float().contiguous()
        ratio = None
        if self.grid.searches(bits):
            search = choose("search", matrix, torch.float32, self.kernel)
            ratio = search.least_squares_ratio(matrix, bits, self.grid)
        path = choose("weight", matrix, torch.float32, self.kernel)
        values = path.fake_quantize(matrix, bits, self.grid, ratio=ratio, draw=self.draw)
        return from_rows(values, self.kind, self.values.shape)


def work(
    measure: Measure,
    *,
    rows: int,
    one_batch: bool,
    products: float,
    blocks: int,
    levels: int,
    finite_difference: bool,
) -> float:
    """What a measurement takes, in training examples.

    Args:
        measure: Which one.
        rows: Training examples that it looks at.
        one_batch: Whether they are one batch, whose graph serves all products.
        products: Of each block; with `trace` of all blocks at once.
        blocks: How many there are.
        levels: Of `MEASURED`: forward passes, one for each number of bits of each block.
        finite_difference: Whether products are differences of gradients.
    """
    if measure in MEASURED:
        return rows * FORWARD_COST * (1 + levels)
    if measure == "trace":
        # A difference takes two gradients whatever it is of.
        each = 2.0 if finite_difference else JOINT_COST + GRAPH_COST / ROUND
        return rows * each * (products + TRIED * finite_difference)
    if finite_difference:
        return rows * DIFFERENCE_COST * (products + TRIED) * blocks
    # Graphs of several batches are made again for each round of products.
    return rows * (GRAPH_COST * (1.0 if one_batch else products) + PRODUCT_COST * products * blocks)


def squared_changes(
    weights: Mapping[str, Weight], blocks: Mapping[str, Sequence[str]], levels: Mapping[str, Sequence[int]]
) -> Costs:
    """|dW|^2 of each block at each of its `levels` of bits.

    Args:
        weights: Layer name to its weight.
        blocks: Block name to its layers.
        levels: Block name to bits.
    """

    def change(layer: str, bits: int) -> float:
        weight = weights[layer]
        own = (weight.rounded(bits) - weight.values.float()).square().sum(dtype=torch.float64)
        if weight.shard is not None:
            dist.all_reduce(own, group=weight.shard.group)
        return float(own)

    return {block: {b: sum(change(layer, b) for layer in blocks[block]) for b in own} for block, own in levels.items()}


def predicted(curvature: Mapping[str, float], changes: Costs) -> Costs:
    """Curvature times |dW|^2 / 2, not below 0.

    Args:
        curvature: Block name to an eigenvalue or a mean of the diagonal; one that is not finite counts as the largest.
        changes: |dW|^2.

    >>> predicted({"a": 2.0, "b": -1.0, "c": math.nan}, {"a": {3: 0.5}, "b": {3: 1.0}, "c": {3: 2.0}})
    {'a': {3: 0.5}, 'b': {3: 0.0}, 'c': {3: 2.0}}
    """
    most = max((value for value in curvature.values() if math.isfinite(value)), default=1.0)
    finite = {name: max(0.0, value if math.isfinite(value) else most) for name, value in curvature.items()}
    return {name: {bits: finite[name] * change / 2 for bits, change in own.items()} for name, own in changes.items()}


def loss_rises(
    losses: Sequence[Callable[[], Tensor]],
    at: Callable[[Sequence[str], int], contextlib.AbstractContextManager[None]],
    blocks: Mapping[str, Sequence[str]],
    levels: Mapping[str, Sequence[int]],
) -> Costs:
    """How much the loss rises with one block at other bits, not below 0; NaN or Inf where it is that.

    Args:
        losses: Give the loss, one per batch; their mean counts.
        at: For whose duration the layers of these names have so many bits; see `at_bits`.
        blocks: Block name to its layers.
        levels: Block name to bits.
    """

    def mean() -> float:
        return sum(float(loss()) for loss in losses) / len(losses)

    with torch.no_grad():
        before = mean()
        rises: Costs = {}
        for block, own in levels.items():
            rises[block] = {}
            for bits in own:
                with at(blocks[block], bits):
                    rise = mean() - before
                rises[block][bits] = max(0.0, rise) if math.isfinite(rise) else rise
    return rises


def settled(rises: Costs) -> tuple[Costs, set[str]]:
    """Rises of which one that is not finite counts as the largest, 1 if none is finite; and the blocks that had some.

    >>> settled({"a": {2: math.inf, 4: 0.5}, "b": {2: 2.0, 4: 0.0}})
    ({'a': {2: 2.0, 4: 0.5}, 'b': {2: 2.0, 4: 0.0}}, {'a'})
    """
    most = max((rise for own in rises.values() for rise in own.values() if math.isfinite(rise)), default=1.0)
    odd = {block for block, own in rises.items() if not all(map(math.isfinite, own.values()))}
    return {
        block: {bits: rise if math.isfinite(rise) else most for bits, rise in own.items()}
        for block, own in rises.items()
    }, odd


@contextlib.contextmanager
def at_bits(bits: int, stand_ins: Mapping[str, Sequence[Tensor]], weights: Mapping[str, Weight]) -> Iterator[None]:
    """For the duration, the stand-ins of these layers have the values of `bits`; see `measuring`."""
    space = space_of([tensor for tensors in stand_ins.values() for tensor in tensors])
    kept = space.kept()
    values = [own for layer, tensors in stand_ins.items() for own in [weights[layer].rounded(bits)] * len(tensors)]
    try:
        space.move(values)
        yield
    finally:
        space.move(kept)


@contextlib.contextmanager
def switched(layers: Sequence[QuantLayer], bits: int) -> Iterator[None]:
    """For the duration, these layers have so many bits: of weights that are quantized in the forward pass."""
    kept = [(layer.moq, layer.moq.bits, layer.moq.ratio, layer.moq.searched) for layer in layers]
    try:
        for layer in layers:
            layer.set_bits(bits)
        yield
    finally:
        for state, before, ratio, searched in kept:
            state.bits, state.ratio, state.searched = before, ratio, searched
