"""The eigenvalue of largest magnitude of each block of a loss's Hessian: how sensitive the loss is to each layer.

A product of a block with a vector is that of a second differentiation, or a difference of two gradients. `Lanczos`
turns products into an eigenvalue; `PowerIteration` is the way of DeepSpeed (`runtime/eigenvalue.py` up to 0.16).
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from .errors import MoQError
from .spaces import DIFFERENCE, Loss, ShardedSpace, Space, evaluate, explained, flat, space_of


@dataclass(frozen=True)
class Eigenvalue:
    """What was found for one block.

    Attributes:
        value: The eigenvalue of largest magnitude, with its sign; NaN if a product was not finite.
        converged: Whether it is within the tolerance, by the method's own estimate.
        reason: Why the iteration ended: "tolerance", "exact" (the whole space that the start vector reaches was
            searched), "zero" (the block's Hessian has no curvature along the start vector), "max_iter" or "not finite".
        num_products: Products of the block's Hessian with a vector.
    """

    value: float
    converged: bool
    reason: str
    num_products: int


Products = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def block_eigenvalues(
    loss: Loss | Sequence[Loss],
    blocks: Mapping[str, Iterable[Tensor]],
    *,
    method: Literal["lanczos", "power"] = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-2,
    stability: float = 1e-6,
    finite_difference: bool = False,
    seed: int = 0,
) -> dict[str, Eigenvalue]:
    """The eigenvalue of largest magnitude of each block on the diagonal of the Hessian of a loss.

    Measures as the model stands: mode, data and precision are the caller's. Writes no gradient, and draws nothing from
    the global random generators.

    Args:
        loss: Gives the loss, a scalar, each time the same for the same parameters. Several of them (one per batch)
            stand for their mean, and only one batch's graph is in memory at a time.
        blocks: Block name to the parameters of the block, of any shape, all of which require a gradient.
        method: "lanczos" (see `Lanczos`) or "power" (see `PowerIteration`), which is DeepSpeed's and may end on a wrong
            value where the ends of the spectrum are nearly equal in magnitude.
        max_iter: Products per block, at most.
        tol: Relative error of an eigenvalue; for "power" the relative change at which to end.
        stability: Added to norms before dividing by them ("power").
        finite_difference: Take differences of gradients, for a loss that cannot be differentiated twice, whose graph
            does not fit into memory, or whose parameters FSDP2 shards (then all processes must call, and gradients are
            left behind). Parameters must be float32 or float64.
        seed: Of the start vectors.

    Returns:
        The blocks' results, in the order of `blocks`.

    Raises:
        MoQError: No blocks or losses, a block without parameters, a parameter that requires no gradient, a loss that
            is not a scalar or depends on no parameter, an argument out of its range, or a loss that cannot be
            differentiated twice.

    >>> x = torch.ones(2, requires_grad=True)
    >>> found = block_eigenvalues(lambda: (torch.tensor([1.0, -3.0]) * x**2).sum() / 2, {"x": [x]})["x"]
    >>> round(found.value, 3), found.reason
    (-3.0, 'exact')
    """
    losses = [loss] if callable(loss) else list(loss)
    parameters = {name: list(tensors) for name, tensors in blocks.items()}
    if method not in ("lanczos", "power"):
        raise MoQError(f'method must be "lanczos" or "power", got {method!r}')
    if max_iter < 1 or not 0 < tol < math.inf or not 0 <= stability < math.inf:
        raise MoQError(
            f"max_iter must be at least 1, tol above 0 and stability at least 0; got {max_iter}, {tol}, {stability}"
        )
    check_blocks(losses, parameters, finite_difference)

    def solver(name: str) -> Solver:
        start, space = _start(parameters[name], seed)
        if method == "lanczos":
            return Lanczos(start, tol, max_iter, space)
        return PowerIteration(start, tol, max_iter, stability, space)

    return _search(parameters, solver, losses, finite_difference)


def solve(solvers: Mapping[str, "Solver"], products: Products) -> dict[str, Eigenvalue]:
    """The core: find an eigenvalue of each of several matrices, of which only products with vectors are known.

    Args:
        solvers: Name of a matrix to what searches it.
        products: Takes vectors v `[n]` by the names of their matrices, and gives the products H v.

    >>> matrix = torch.diag(torch.tensor([1.0, -3.0, 2.0]))
    >>> solver = Lanczos(torch.ones(3), tol=1e-2, max_iter=10)
    >>> round(solve({"H": solver}, lambda v: {"H": matrix @ v["H"]})["H"].value, 3)
    -3.0
    """
    active = dict(solvers)
    while active:
        found = products({name: solver.vector for name, solver in active.items()})
        for name, solver in active.items():
            solver.update(found[name])
        active = {name: solver for name, solver in active.items() if solver.result is None}
    return {name: cast(Eigenvalue, solver.result) for name, solver in solvers.items()}


def _search(
    blocks: Mapping[str, list[Tensor]],
    solver: "Callable[[str], Solver]",
    losses: Sequence[Loss],
    finite_difference: bool,
) -> dict[str, Eigenvalue]:
    """Solve for all blocks with the products that the losses allow."""
    found: dict[str, Eigenvalue] = {}
    if finite_difference:
        for name in blocks:
            space = space_of(blocks[name])
            found |= solve({name: solver(name)}, lambda v: {n: space.product(losses, v[n]) for n in v})  # noqa: B023
        return found
    if len(losses) == 1:
        # One block after the other: the graph is kept, and only one block's vectors are in memory.
        with Graph(losses[0], blocks) as graph:
            for name in blocks:
                found |= solve({name: solver(name)}, lambda v: {n: graph.product(n, v[n]) for n in v})
        return found

    def products(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for one in losses:
            with Graph(one, {name: blocks[name] for name in vectors}) as graph:
                for name, vector in vectors.items():
                    product = graph.product(name, vector).div_(len(losses))
                    sums[name] = sums[name].add_(product) if name in sums else product
        return sums

    return solve({name: solver(name) for name in blocks}, products)


def _start(parameters: list[Tensor], seed: int) -> tuple[Tensor, Space]:
    """A random vector with a number for each of the parameters' elements, the same wherever they are; and its space."""
    space, generator = space_of(parameters), torch.Generator().manual_seed(seed)
    return space.own(torch.randn(space.size, generator=generator, dtype=torch.float32, device="cpu")), space


class Solver(Protocol):
    """Finds an eigenvalue from products: asks for that of `vector`, gets it through `update`, until `result` is set.

    Attributes:
        vector: `[n]`, float32: what to multiply with the matrix.
        result: What was found; None as long as more products are needed.
    """

    vector: Tensor
    result: Eigenvalue | None

    def update(self, product: Tensor) -> None:
        """Take the product of the matrix with `vector`."""


class Lanczos:
    """Lanczos iteration on a symmetric matrix, for the eigenvalue of largest magnitude.

    With T the tridiagonal matrix of j steps and (t, s) an eigenpair of it (t a Ritz value), some eigenvalue lies
    within r = beta_j |s_j| of t (Parlett, The Symmetric Eigenvalue Problem, 13.2), and within r^2 / gap of an end of
    the spectrum that is `gap` away from the rest (4.5 there). It ends after at least `MIN_STEPS` products as soon as
    the Ritz value of larger magnitude is within `tol` by that estimate and the other end can no longer exceed it by
    more than `tol`. Lost orthogonality repeats eigenvalues that are found already and changes no extreme one (13.6).

    That is an estimate, no bound: it cannot know of an eigenvalue whose vector the start hardly has a part of, and
    takes ends that are hardly apart for one. Small matrices are searched to the end.

    Args:
        start: `[n]`, float32; not zero.
        tol: Relative error.
        max_iter: Products, at most.
        space: In which `start` is, where a process has a part of a vector.
    """

    # Ritz values of fewer steps may look settled before the largest eigenvalue shows: benchmarks/eigen.py.
    MIN_STEPS = 6
    # Searching all of so many dimensions costs less than thinking about them.
    SMALL = 64

    def __init__(self, start: Tensor, tol: float, max_iter: int, space: Space | None = None) -> None:
        self._space = space or Space()
        self.vector = start / self._space.norm(start)
        self.result: Eigenvalue | None = None
        self._tol, self._max_iter = tol, max_iter
        self._size = self._space.length(start)
        self._min_steps = self._size if self._size <= self.SMALL else self.MIN_STEPS
        self._before: Tensor | None = None
        self._diagonal: list[float] = []
        self._off: list[float] = []

    def update(self, product: Tensor) -> None:
        """Take the product `[n]` of the matrix with `vector`, whose memory is used."""
        alpha = self._space.dot(self.vector, product)
        product.sub_(self.vector, alpha=alpha)
        if self._before is not None:
            product.sub_(self._before, alpha=self._off[-1])
        beta = float(self._space.norm(product))
        self._diagonal.append(alpha)
        steps = len(self._diagonal)
        if not math.isfinite(alpha + beta):
            self.result = Eigenvalue(math.nan, False, "not finite", steps)
            return
        low, high = self._ends(beta)
        first, second = (high, low) if abs(high[0]) >= abs(low[0]) else (low, high)
        size = abs(first[0])
        scale = max(size, max(map(abs, [*self._diagonal, *self._off])))
        # Rounding leaves that much of a vector that is zero in exact arithmetic.
        if beta <= 1e-6 * scale or steps == self._size:
            self.result = Eigenvalue(first[0], True, "exact" if scale else "zero", steps)
        elif steps >= self._min_steps and first[1] <= self._tol * size and self._is_smaller(second, size):
            self.result = Eigenvalue(first[0], True, "tolerance", steps)
        elif steps == self._max_iter:
            self.result = Eigenvalue(first[0], False, "max_iter", steps)
        else:
            self._off.append(beta)
            self._before, self.vector = self.vector, product.div_(beta)
            return
        self._before = None
        self.vector = self.vector[:0]

    def _is_smaller(self, end: tuple[float, float], size: float) -> bool:
        return abs(end[0]) + end[1] <= (1 + self._tol) * size

    def _ends(self, beta: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Lowest and highest Ritz value, each with the estimate of its error."""
        off = torch.tensor(self._off, dtype=torch.float64, device="cpu")
        matrix = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64, device="cpu"))
        if len(self._off):
            matrix += torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        residuals = (beta * vectors[-1].abs()).tolist()
        ritz = values.tolist()

        def error(index: int, neighbor: int) -> float:
            residual: float = residuals[index]
            # The neighbor is itself uncertain by its residual.
            gap = abs(ritz[index] - ritz[neighbor]) - residuals[neighbor] if len(ritz) > 1 else 0.0
            return residual**2 / gap if gap > residual else residual

        return (ritz[0], error(0, min(1, len(ritz) - 1))), (ritz[-1], error(-1, max(-2, -len(ritz))))


class PowerIteration:
    """Power iteration as DeepSpeed published it: ends when the Rayleigh quotient changed by less than `tol`.

    Args:
        start: `[n]`, float32; not zero.
        tol: Relative change of the value at which to end.
        max_iter: Products, at most.
        stability: Added to the norm before dividing by it.
        space: In which `start` is, where a process has a part of a vector.
    """

    def __init__(self, start: Tensor, tol: float, max_iter: int, stability: float, space: Space | None = None) -> None:
        self._space = space or Space()
        self._stability, self._tol, self._max_iter = stability, tol, max_iter
        self.vector = self._normalized(start)
        self.result: Eigenvalue | None = None
        # As published: the first comparison is with 0, the change then is 1.
        self._value, self._steps = 0.0, 0

    def update(self, product: Tensor) -> None:
        """Take the product `[n]` of the matrix with `vector`, whose memory is used."""
        before, self._value = self._value, self._space.dot(self.vector, product)
        self._steps += 1
        if not math.isfinite(self._value):
            self.result = Eigenvalue(math.nan, False, "not finite", self._steps)
        elif self._value == 0.0:
            self.result = Eigenvalue(0.0, True, "zero", self._steps)
        elif abs(self._value - before) < self._tol * abs(self._value):
            self.result = Eigenvalue(self._value, True, "tolerance", self._steps)
        elif self._steps == self._max_iter:
            self.result = Eigenvalue(self._value, False, "max_iter", self._steps)
        else:
            self.vector = self._normalized(product)
            return
        self.vector = self.vector[:0]

    def _normalized(self, vector: Tensor) -> Tensor:
        size = self._space.norm(vector) + self._stability
        return vector / size


class Graph(contextlib.AbstractContextManager["Graph"]):
    """The gradients of a loss with their own graph, for exact products; freed at the end whatever happens."""

    def __init__(self, loss: Loss, blocks: Mapping[str, list[Tensor]]) -> None:
        self._blocks = blocks
        unique = list({id(p): p for parameters in blocks.values() for p in parameters}.values())
        with explained():
            gradients = torch.autograd.grad(evaluate(loss), unique, create_graph=True, allow_unused=True)
        self._gradients = dict(zip(map(id, unique), gradients, strict=True))

    def __exit__(self, *exception: object) -> None:
        self._gradients.clear()

    def product(self, name: str, vector: Tensor) -> Tensor:
        """H v `[n]` of a block and a vector `[n]` with a number for each of its parameters' elements, float32."""
        parameters = self._blocks[name]
        outputs, weights = [], []
        for parameter, part in zip(parameters, Space(parameters).split(vector), strict=True):
            gradient = self._gradients[id(parameter)]
            # A gradient that depends on nothing adds nothing to the Hessian.
            if gradient is not None and gradient.requires_grad:
                outputs.append(gradient)
                weights.append(part)
        if not outputs:
            return torch.zeros_like(vector)
        with explained():
            found = torch.autograd.grad(outputs, parameters, weights, retain_graph=True, allow_unused=True)
        return flat(found, parameters)


def check_second_derivative(
    losses: Sequence[Loss], parameters: Iterable[Tensor], *, finite_difference: bool = False
) -> None:
    """Compare a product along a random direction with differences of gradients, taken over two steps.

    A kernel whose gradient autograd does not record (Liger's, some attention kernels) makes products wrong in silence.
    At the kinks of a loss (ReLU, top-k routing) it is the differences that are wrong, and depend on their step.

    Args:
        losses: Give the loss, a scalar, each time the same for the same parameters; their mean counts.
        parameters: Of one block.
        finite_difference: Check only that differences mean something.

    Raises:
        MoQError: The differences agree with each other but not with the product; or, with `finite_difference`, they
            do not agree with each other.
    """
    parameters = list(parameters)
    vector, space = _start(parameters, 0)
    vector /= space.norm(vector)
    step = DIFFERENCE / space.largest(vector)
    wide, narrow = (space.product(losses, vector, h) for h in (step, step / 2))
    # Gradients below 1e-6 are rounding; among themselves differences agree to 1 %, with the product to 2 %.
    apart, length = float(space.norm(wide - narrow)), float(space.norm(narrow))
    if finite_difference:
        if apart > 0.2 * length + 1e-6:
            raise MoQError(
                "eigenvalue.finite_difference: the loss is not smooth (ReLU, top-k routing), so that differences of "
                f"gradients mean nothing: two steps give products {apart:.3g} apart of length {length:.3g}; "
                'take second derivatives, or of sharded weights a sensitivity.measure without any: "loss", "divergence"'
            )
        return
    exact = torch.zeros_like(vector)
    for one in losses:
        with Graph(one, {"": parameters}) as graph:
            exact += graph.product("", vector) / len(losses)
    error, length = float((wide - exact).norm()), float(exact.norm())
    if error > 0.05 * length + 1e-6 and apart < 0.1 * error:
        raise MoQError(
            f"the loss has no right second derivative: a product with its Hessian is off by {error:.3g} where its norm "
            f"is {length:.3g}, so some kernel in the model cannot be differentiated twice; "
            "take differences of gradients (eigenvalue.finite_difference)"
        )


def check_blocks(losses: Sequence[Loss], blocks: Mapping[str, Sequence[Tensor]], finite_difference: bool) -> None:
    """Check what is to be measured.

    Raises:
        MoQError: No losses or blocks, a block without parameters, with one that requires no gradient or is sharded,
            whole blocks beside sharded ones, or for differences of gradients one of fewer bits than float32.
    """
    if not losses:
        raise MoQError("no loss: give one, or one per batch")
    if not blocks:
        raise MoQError("no block to measure")
    for name, parameters in blocks.items():
        if sum(p.numel() for p in parameters) == 0:
            raise MoQError(f"block {name!r} has no parameters")
        frozen = sum(not p.requires_grad for p in parameters)
        if frozen:
            raise MoQError(f"block {name!r} has {frozen} parameters that require no gradient; see `measuring`")
        if isinstance(space_of(parameters), ShardedSpace) and not finite_difference:
            raise MoQError(f"block {name!r} has sharded parameters (FSDP2): take differences of gradients")
    in_whole = [name for name, parameters in blocks.items() if not isinstance(space_of(parameters), ShardedSpace)]
    if 0 < len(in_whole) < len(blocks):
        raise MoQError(
            f"blocks {', '.join(in_whole)} are whole in each process, and others are sharded (FSDP2): their gradients "
            "are of one process alone; give all blocks to fully_shard, or none"
        )
    half = [name for name, parameters in blocks.items() if any(p.dtype.itemsize < 4 for p in parameters)]
    if finite_difference and half:
        raise MoQError(
            f"differences of gradients need float32 parameters; these blocks have fewer bits: {', '.join(half)}"
        )
