"""The eigenvalue of largest magnitude of each block of a loss's Hessian: how sensitive the loss is to each layer.

A product of a block with a vector is that of a second differentiation, or a difference of two gradients. `Lanczos`
turns products into an eigenvalue; `PowerIteration` is the way of DeepSpeed (`runtime/eigenvalue.py` up to 0.16). A
vector has a number for each element of a block's parameters, flat and in float32.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from .errors import MoQError
from .processes import is_apart

Loss = Callable[[], Tensor]

# The largest change of a weight in a difference of gradients. Of 1e-5 to 1e-1 this one had the least error over blocks
# and directions, at most 1e-3 of the product: truncation grows with its square, float32's rounding with its inverse.
# See docs/evidence/eigenvalues.md.
DIFFERENCE = 2e-4

# Why a run stops before its first step.
NOT_UNDER_ENGINES = (
    "eigenvalues cannot be measured where FSDP2 or ZeRO-3 takes the weights apart: set "
    '"sensitivity": {"measure": "divergence"}, which needs forward passes alone'
)


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
        finite_difference: Take differences of gradients, for a loss that cannot be differentiated twice, or whose graph
            does not fit into memory. Parameters must be float32 or float64.
        seed: Of the start vectors.

    Returns:
        The blocks' results, in the order of `blocks`.

    Raises:
        MoQError: No blocks or losses, a block without parameters, a parameter that requires no gradient or that FSDP2
            or ZeRO-3 takes apart, a loss that is not a scalar or depends on no parameter, an argument out of its range,
            or a loss that cannot be differentiated twice.

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
    _check_blocks(losses, parameters, finite_difference)

    def solver(name: str) -> Solver:
        start = _random_vector(parameters[name], seed)
        if method == "lanczos":
            return Lanczos(start, tol, max_iter)
        return PowerIteration(start, tol, max_iter, stability)

    found: dict[str, Eigenvalue] = {}
    if finite_difference:
        for name, own in parameters.items():
            found |= solve({name: solver(name)}, lambda v: {n: difference_product(losses, own, v[n]) for n in v})  # noqa: B023
        return found
    if len(losses) == 1:
        # One block after the other: the graph is kept, and only one block's vectors are in memory.
        with Graph(losses[0], parameters) as graph:
            for name in parameters:
                found |= solve({name: solver(name)}, lambda v: {n: graph.product(n, v[n]) for n in v})
        return found

    def products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
        for one in losses:
            with Graph(one, {name: parameters[name] for name in vectors}) as graph:
                for name, vector in vectors.items():
                    sums[name] += graph.product(name, vector).div_(len(losses))
        return sums

    return solve({name: solver(name) for name in parameters}, products)


def solve(
    solvers: "Mapping[str, Solver]", products: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Eigenvalue]:
    """Find an eigenvalue of each of several matrices, of which only products with vectors are known.

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
    """

    # Ritz values of fewer steps may look settled before the largest eigenvalue shows: docs/evidence/eigenvalues.md.
    MIN_STEPS = 6
    # Searching all of so many dimensions costs less than thinking about them.
    SMALL = 64

    def __init__(self, start: Tensor, tol: float, max_iter: int) -> None:
        self.vector = start / start.norm()
        self.result: Eigenvalue | None = None
        self._tol, self._max_iter = tol, max_iter
        self._size = start.numel()
        self._min_steps = self._size if self._size <= self.SMALL else self.MIN_STEPS
        self._before: Tensor | None = None
        self._diagonal: list[float] = []
        self._off: list[float] = []

    def update(self, product: Tensor) -> None:
        """Take the product `[n]` of the matrix with `vector`, whose memory is used."""
        alpha = float(self.vector @ product)
        product.sub_(self.vector, alpha=alpha)
        if self._before is not None:
            product.sub_(self._before, alpha=self._off[-1])
        beta = float(product.norm())
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
    """

    def __init__(self, start: Tensor, tol: float, max_iter: int, stability: float) -> None:
        self._stability, self._tol, self._max_iter = stability, tol, max_iter
        self.vector = self._normalized(start)
        self.result: Eigenvalue | None = None
        # As published: the first comparison is with 0, the change then is 1.
        self._value, self._steps = 0.0, 0

    def update(self, product: Tensor) -> None:
        """Take the product `[n]` of the matrix with `vector`, whose memory is used."""
        before, self._value = self._value, float(self.vector @ product)
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
        size: Tensor = vector.norm() + self._stability
        return vector / size


# Asks for the product of its matrix with `vector`, gets it through `update`, until `result` is set.
Solver = Lanczos | PowerIteration


class Graph(contextlib.AbstractContextManager["Graph"]):
    """The gradients of a loss with their own graph, for exact products; freed at the end whatever happens."""

    def __init__(self, loss: Loss, blocks: Mapping[str, list[Tensor]]) -> None:
        self._blocks = blocks
        unique = list({id(p): p for parameters in blocks.values() for p in parameters}.values())
        with _explained():
            gradients = torch.autograd.grad(_evaluate(loss), unique, create_graph=True, allow_unused=True)
        self._gradients = dict(zip(map(id, unique), gradients, strict=True))

    def __exit__(self, *exception: object) -> None:
        self._gradients.clear()

    def product(self, name: str, vector: Tensor) -> Tensor:
        """H v `[n]` of a block and a vector `[n]` with a number for each of its parameters' elements, float32."""
        parameters = self._blocks[name]
        outputs, weights = [], []
        for parameter, part in zip(parameters, _split(vector, parameters), strict=True):
            gradient = self._gradients[id(parameter)]
            # A gradient that depends on nothing adds nothing to the Hessian.
            if gradient is not None and gradient.requires_grad:
                outputs.append(gradient)
                weights.append(part)
        if not outputs:
            return torch.zeros_like(vector)
        with _explained():
            found = torch.autograd.grad(outputs, parameters, weights, retain_graph=True, allow_unused=True)
        return _flat(found, parameters)


def difference_product(
    losses: Sequence[Loss], parameters: Sequence[Tensor], vector: Tensor, step: float | None = None
) -> Tensor:
    """The product of the mean loss's Hessian with a vector, by central differences of gradients.

    Args:
        losses: Their mean counts.
        parameters: Of one block.
        vector: `[n]`, over these parameters.
        step: (g(x + step v) - g(x - step v)) / 2 step; by default no parameter moves by more than `DIFFERENCE`.
    """
    step = DIFFERENCE / float(vector.abs().max()) if step is None else step
    total = torch.zeros_like(vector)
    values = [parameter.data for parameter in parameters]
    moves = _split(vector, parameters)
    try:
        for sign in (1.0, -1.0):
            for parameter, value, move in zip(parameters, values, moves, strict=True):
                parameter.data = value.add(move, alpha=sign * step)
            for loss in losses:
                with _explained():
                    gradient = torch.autograd.grad(_evaluate(loss), parameters, allow_unused=True)
                total.add_(_flat(gradient, parameters), alpha=sign / (2 * step * len(losses)))
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
    return total


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
    vector = _random_vector(parameters, 0)
    vector /= vector.norm()
    step = DIFFERENCE / float(vector.abs().max())
    wide, narrow = (difference_product(losses, parameters, vector, h) for h in (step, step / 2))
    # Gradients below 1e-6 are rounding; among themselves differences agree to 1 %, with the product to 2 %.
    apart, length = float((wide - narrow).norm()), float(narrow.norm())
    if finite_difference:
        if apart > 0.2 * length + 1e-6:
            raise MoQError(
                "eigenvalue.finite_difference: the loss is not smooth (ReLU, top-k routing), so that differences of "
                f"gradients mean nothing: two steps give products {apart:.3g} apart of length {length:.3g}; "
                'take second derivatives, or set sensitivity.measure to "divergence", which needs none'
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


def _check_blocks(losses: Sequence[Loss], blocks: Mapping[str, Sequence[Tensor]], finite_difference: bool) -> None:
    """Check what is to be measured.

    Raises:
        MoQError: No losses or blocks, a block without parameters, with one that requires no gradient or that an engine
            takes apart, or for differences of gradients one of fewer bits than float32.
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
        if any(map(is_apart, parameters)):
            raise MoQError(NOT_UNDER_ENGINES)
    half = [name for name, parameters in blocks.items() if any(p.dtype.itemsize < 4 for p in parameters)]
    if finite_difference and half:
        raise MoQError(
            f"differences of gradients need float32 parameters; these blocks have fewer bits: {', '.join(half)}"
        )


def _random_vector(parameters: Sequence[Tensor], seed: int) -> Tensor:
    """A random vector `[n]` over some parameters, the same wherever they are."""
    size = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(parameters[0].device)


def _split(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into the shapes of the parameters, in their dtypes."""
    pieces = torch.split(vector, [p.numel() for p in parameters])
    return [piece.view(p.shape).to(p.dtype) for piece, p in zip(pieces, parameters, strict=True)]


def _flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """One float32 vector of tensors of the shapes of `like`, None being zeros."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t).detach().float().flatten() for t, p in pairs])


def _evaluate(loss: Loss) -> Tensor:
    """The loss with its graph.

    Raises:
        MoQError: It is no scalar, or depends on no parameter.
    """
    with torch.enable_grad():
        value = loss()
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise MoQError(f"the loss must be a scalar tensor, got {shape}")
    if not value.requires_grad:
        raise MoQError("the loss depends on no parameter that requires a gradient")
    return value.reshape(())


_NOT_TWICE = ("derivative for", "double backward", "once_differentiable")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Explains what to do about a loss that cannot be differentiated twice.

    Raises:
        MoQError: It cannot, or memory ran out.
        RuntimeError: Whatever else PyTorch raised.
    """
    try:
        yield
    except torch.OutOfMemoryError as err:
        raise MoQError(
            "measuring eigenvalues ran out of memory: give fewer rows per loss, or take differences of gradients "
            "(eigenvalue.finite_difference), which need no graph of the gradient"
        ) from err
    except RuntimeError as err:
        if not any(sign in str(err) for sign in _NOT_TWICE):
            raise
        raise MoQError(
            f"the loss cannot be differentiated twice ({err}): load the model with "
            'attn_implementation="eager", or take differences of gradients (eigenvalue.finite_difference)'
        ) from err
