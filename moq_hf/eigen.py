"""The eigenvalue of largest magnitude of each block of a loss's Hessian: how sensitive the loss is to each layer.

Only products of a block with vectors are needed: a second differentiation gives them, or
a difference of two gradients. `lanczos` finds an eigenvalue from such products;
`power_iteration` is DeepSpeed's method (`runtime/eigenvalue.py` up to 0.16). A vector
is flat, in float32, with one entry for each element of a block's parameters.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .errors import MoQError, check_choice
from .processes import is_gathered_per_pass

# Computes the loss of one batch, a scalar with its graph.
Loss = Callable[[], Tensor]

# The largest change of a weight in a difference of gradients. Among 1e-5 to 1e-1 this
# step had the smallest error over blocks and directions, at most 1e-3 of the product:
# the truncation error grows with the square of the step, float32's rounding with its
# inverse.
DIFFERENCE = 2e-4

# With fewer Lanczos steps the Ritz values may look converged before the largest
# eigenvalue shows.
MIN_STEPS = 6
# Up to this size a matrix is searched completely, which costs little.
SMALL = 64

# The error that stops a run under FSDP2 or ZeRO-3 before its first step.
NOT_UNDER_ENGINES = (
    "eigenvalues cannot be measured where FSDP2 or ZeRO-3 shards the weights: set "
    '"sensitivity": {"measure": "divergence"}, which needs forward passes alone'
)


@dataclass(frozen=True)
class Eigenvalue:
    """The result for one block.

    Attributes:
        value: The eigenvalue of largest magnitude, with its sign; NaN if a product was
            not finite.
        reason: Why the iteration ended: "tolerance", "exact" (the whole space that the
            start vector reaches was searched), "zero" (the block's Hessian has no
            curvature along the start vector), "max_iter" or "not finite".
        num_products: Products of the block's Hessian with a vector.
    """

    value: float
    reason: str
    num_products: int


# A coroutine that searches for an eigenvalue of a symmetric matrix: it yields vectors
# `[n]`, and each time is sent the matrix's product with that vector.
EigenSearch = Generator[Tensor, Tensor, Eigenvalue]


def block_eigenvalues(
    loss: Loss | Sequence[Loss],
    blocks: Mapping[str, Iterable[Tensor]],
    *,
    method: Literal["lanczos", "power"] = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-2,
    stability: float = 1e-6,
    seed: int = 0,
) -> dict[str, Eigenvalue]:
    """The eigenvalue of largest magnitude of each block on the diagonal of the Hessian of a loss.

    The caller sets the model's mode, data and precision. No gradient is written, and the
    global random generators are not used.

    Args:
        loss: Gives the loss, a scalar, each time the same for the same parameters.
            Several of them (one per batch) stand for their mean, and only one batch's
            graph is in memory at a time.
        blocks: Block name to the parameters of the block, of any shape, all of which
            require a gradient.
        method: "lanczos" (see `lanczos`) or "power" (see `power_iteration`), which is
            DeepSpeed's and may end on a wrong value if the ends of the spectrum are
            nearly equal in magnitude.
        max_iter: Products per block, at most.
        tol: Relative error of an eigenvalue; for "power" the relative change at which
            to end.
        stability: Added to norms before dividing by them ("power").
        seed: Seed of the start vectors.

    Returns:
        The blocks' results, in the order of `blocks`.

    Raises:
        MoQError: There are no blocks or losses, a block has no parameters, a parameter
            requires no gradient or is sharded by FSDP2 or ZeRO-3, a loss is not a
            scalar or depends on no parameter, an argument is out of its range, or a
            loss cannot be differentiated twice.

    >>> x = torch.ones(2, requires_grad=True)
    >>> found = block_eigenvalues(lambda: (torch.tensor([1.0, -3.0]) * x**2).sum() / 2, {"x": [x]})["x"]
    >>> round(found.value, 3), found.reason
    (-3.0, 'exact')
    """
    losses = [loss] if callable(loss) else list(loss)
    parameters = {name: list(tensors) for name, tensors in blocks.items()}
    check_choice("method", method, ("lanczos", "power"))
    if max_iter < 1 or not 0 < tol < math.inf or not 0 <= stability < math.inf:
        raise MoQError(
            f"max_iter must be at least 1, tol above 0 and stability at least 0; got {max_iter}, {tol}, {stability}"
        )
    _check_blocks(losses, parameters)
    searches: dict[str, EigenSearch] = {}
    for name, tensors in parameters.items():
        start = _random_vector(tensors, seed)
        if method == "lanczos":
            searches[name] = lanczos(start, tol, max_iter)
        else:
            searches[name] = power_iteration(start, tol, max_iter, stability)
    # The graph of a single loss is kept for all products; with several losses only one
    # graph is in memory at a time.
    kept = gradients_of(losses[0], parameters) if len(losses) == 1 else None

    def mean_products(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(vector) for name, vector in vectors.items()}
        for loss_of_batch in losses:
            remaining = {name: parameters[name] for name in vectors}
            gradients = kept or gradients_of(loss_of_batch, remaining)
            for name, vector in vectors.items():
                product = hessian_product(gradients, parameters[name], vector)
                sums[name] += product.div_(len(losses))
            # Free this graph before the next one is made.
            del gradients
        return sums

    return solve(searches, mean_products)


def solve(
    searches: Mapping[str, EigenSearch],
    products: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Eigenvalue]:
    """Find an eigenvalue of each of several matrices, of which only products with vectors are known.

    Args:
        searches: Name of a matrix to its search.
        products: Takes vectors v `[n]` by the names of their matrices, and returns the
            products H v, which are overwritten.

    >>> matrix = torch.diag(torch.tensor([1.0, -3.0, 2.0]))
    >>> search = lanczos(torch.ones(3), tol=1e-2, max_iter=10)
    >>> round(solve({"H": search}, lambda v: {"H": matrix @ v["H"]})["H"].value, 3)
    -3.0
    """
    vectors = {name: next(search) for name, search in searches.items()}
    results: dict[str, Eigenvalue] = {}
    while vectors:
        for name, product in products(vectors).items():
            try:
                vectors[name] = searches[name].send(product)
            except StopIteration as end:
                results[name] = end.value
                del vectors[name]
    return {name: results[name] for name in searches}


def lanczos(start: Tensor, tol: float, max_iter: int) -> EigenSearch:
    """Lanczos iteration on a symmetric matrix, for the eigenvalue of largest magnitude.

    With T the tridiagonal matrix of j steps and (t, s) an eigenpair of it (t a Ritz
    value), some eigenvalue lies within r = beta_j |s_j| of t (Parlett, The Symmetric
    Eigenvalue Problem, 13.2), and within r^2 / gap of an end of the spectrum that is
    `gap` away from the rest (4.5 there). It ends after at least `MIN_STEPS` products as
    soon as the Ritz value of larger magnitude is within `tol` by that estimate and the
    other end can no longer exceed it by more than `tol`. Lost orthogonality
    repeats eigenvalues that were found before, but changes no extreme one (13.6).

    That is an estimate, not a bound: it misses an eigenvalue whose eigenvector is nearly
    orthogonal to the start vector, and cannot tell apart ends of nearly equal magnitude.
    Small matrices are searched completely.

    Args:
        start: `[n]`, float32; not zero.
        tol: Relative error.
        max_iter: Products, at most.
    """
    size = start.numel()
    min_steps = size if size <= SMALL else MIN_STEPS
    before = None
    vector = start / start.norm()
    diagonal: list[float] = []
    off: list[float] = []
    while True:
        product = yield vector
        alpha = float(vector @ product)
        product.sub_(vector, alpha=alpha)
        if before is not None:
            product.sub_(before, alpha=off[-1])
        beta = float(product.norm())
        diagonal.append(alpha)
        steps = len(diagonal)
        if not math.isfinite(alpha + beta):
            return Eigenvalue(math.nan, "not finite", steps)
        (other, other_error), (value, error) = sorted(
            _extremes(diagonal, off, beta), key=lambda end: abs(end[0])
        )
        scale = max(abs(value), *map(abs, diagonal), *map(abs, off))
        # A vector that is zero in exact arithmetic has about this norm after rounding.
        if beta <= 1e-6 * scale or steps == size:
            return Eigenvalue(value, "exact" if scale else "zero", steps)
        is_largest = abs(other) + other_error <= (1 + tol) * abs(value)
        if steps >= min_steps and error <= tol * abs(value) and is_largest:
            return Eigenvalue(value, "tolerance", steps)
        if steps == max_iter:
            return Eigenvalue(value, "max_iter", steps)
        off.append(beta)
        before = vector
        vector = product.div_(beta)


def _extremes(
    diagonal: Sequence[float], off: Sequence[float], beta: float
) -> list[tuple[float, float]]:
    """Find the lowest and the highest Ritz value of a tridiagonal matrix, each with the estimate of its error."""
    middle = torch.tensor(diagonal, dtype=torch.float64, device="cpu")
    below = torch.tensor(off, dtype=torch.float64, device="cpu")
    # The lower triangle is enough.
    matrix = torch.diag(middle) + torch.diag(below, -1)
    values, vectors = torch.linalg.eigh(matrix)
    ritz: list[float] = values.tolist()
    residuals: list[float] = (beta * vectors[-1].abs()).tolist()
    extremes = []
    for end, neighbor in ((0, 1), (-1, -2)):
        # A single value is both ends, and its own neighbor.
        neighbor %= len(ritz)
        # The neighbor is itself uncertain by its residual.
        gap = abs(ritz[end] - ritz[neighbor]) - residuals[neighbor]
        error = residuals[end] ** 2 / gap if gap > residuals[end] else residuals[end]
        extremes.append((ritz[end], error))
    return extremes


def power_iteration(
    start: Tensor, tol: float, max_iter: int, stability: float
) -> EigenSearch:
    """Power iteration as DeepSpeed published it: ends when the Rayleigh quotient changed by less than `tol`.

    Args:
        start: `[n]`, float32; not zero.
        tol: Relative change of the value at which to end.
        max_iter: Products, at most.
        stability: Added to the norm before dividing by it.
    """
    product = start
    # As published: the first comparison is with 0, and the change is 1.
    value = 0.0
    for steps in range(1, max_iter + 1):
        vector = product / (product.norm() + stability)
        product = yield vector
        before = value
        value = float(vector @ product)
        if not math.isfinite(value):
            return Eigenvalue(math.nan, "not finite", steps)
        if value == 0.0:
            return Eigenvalue(0.0, "zero", steps)
        if abs(value - before) < tol * abs(value):
            return Eigenvalue(value, "tolerance", steps)
    return Eigenvalue(value, "max_iter", max_iter)


def gradients_of(
    loss: Loss, blocks: Mapping[str, Sequence[Tensor]]
) -> dict[int, Tensor]:
    """The gradients of a loss with their own graph, by the ids of the blocks' parameters."""
    unique: dict[int, Tensor] = {}
    for parameters in blocks.values():
        unique |= {id(parameter): parameter for parameter in parameters}
    with _explained():
        gradients = torch.autograd.grad(
            _evaluate(loss),
            [*unique.values()],
            create_graph=True,
            materialize_grads=True,
        )
    return dict(zip(unique, gradients, strict=True))


def hessian_product(
    gradients: Mapping[int, Tensor], parameters: Sequence[Tensor], vector: Tensor
) -> Tensor:
    """H v `[n]` of a block with a vector `[n]`, float32, from the result of `gradients_of`."""
    outputs = []
    weights = []
    for parameter, part in zip(parameters, _split(vector, parameters), strict=True):
        gradient = gradients[id(parameter)]
        # A constant gradient adds nothing to the Hessian.
        if gradient.requires_grad:
            outputs.append(gradient)
            weights.append(part)
    if not outputs:
        return torch.zeros_like(vector)
    with _explained():
        products = torch.autograd.grad(
            outputs, parameters, weights, retain_graph=True, materialize_grads=True
        )
    return _flat(products)


def check_second_derivative(loss: Loss, parameters: Sequence[Tensor]) -> None:
    """Compare a product along a random direction with differences of gradients, taken over two steps.

    A kernel whose gradient autograd does not record (Liger's, some attention kernels)
    silently makes products wrong. At the kinks of a loss (ReLU, top-k routing) the
    differences are wrong instead, and depend on their step.

    Args:
        loss: Gives the loss, a scalar, each time the same for the same parameters.
        parameters: The parameters of one block, in float32.

    Raises:
        MoQError: The differences agree with each other but not with the product.
    """
    vector = _random_vector(parameters, 0)
    vector /= vector.norm()
    step = DIFFERENCE / float(vector.abs().max())
    wide = _difference(loss, parameters, vector, step)
    narrow = _difference(loss, parameters, vector, step / 2)
    exact = hessian_product(gradients_of(loss, {"": parameters}), parameters, vector)
    error = float((wide - exact).norm())
    length = float(exact.norm())
    # Gradients below 1e-6 are rounding. Where the derivative is right, the differences
    # agree with each other to 1 %, and with the product to 2 %.
    if error > 0.05 * length + 1e-6 and float((wide - narrow).norm()) < 0.1 * error:
        raise MoQError(
            f"the loss has a wrong second derivative: a product with its Hessian is off by {error:.3g} where its norm "
            f"is {length:.3g}, so some kernel in the model cannot be differentiated twice; set sensitivity.measure to "
            '"divergence", which needs no derivative'
        )


def _difference(
    loss: Loss, parameters: Sequence[Tensor], vector: Tensor, step: float
) -> Tensor:
    """Approximate the product of the loss's Hessian with v by gradients g: (g(x + step v) - g(x - step v)) / 2 step."""
    values = [parameter.data for parameter in parameters]
    gradients = []
    for signed in (step, -step):
        for parameter, value, move in zip(
            parameters, values, _split(vector, parameters), strict=True
        ):
            parameter.data = value.add(move, alpha=signed)
        gradients.append(
            torch.autograd.grad(_evaluate(loss), parameters, materialize_grads=True)
        )
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
    return (_flat(gradients[0]) - _flat(gradients[1])) / (2 * step)


def _check_blocks(
    losses: Sequence[Loss], blocks: Mapping[str, Sequence[Tensor]]
) -> None:
    """Check the losses and blocks before they are measured.

    Raises:
        MoQError: There are no losses or blocks, or a block has no parameters, or one
            that requires no gradient or that an engine shards.
    """
    if not losses or not blocks:
        raise MoQError("give a loss, or one per batch, and a block to measure")
    for name, parameters in blocks.items():
        if not parameters or not all(p.requires_grad for p in parameters):
            raise MoQError(
                f"block {name!r} must have parameters that all require a gradient; see `measuring`"
            )
        if any(map(is_gathered_per_pass, parameters)):
            raise MoQError(NOT_UNDER_ENGINES)


def _random_vector(parameters: Sequence[Tensor], seed: int) -> Tensor:
    """Draw a random vector `[n]` over some parameters, the same on every device."""
    size = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(
        parameters[0].device
    )


def _split(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into the shapes of the parameters, in their dtypes."""
    pieces = torch.split(vector, [p.numel() for p in parameters])
    return [
        piece.view(p.shape).to(p.dtype)
        for piece, p in zip(pieces, parameters, strict=True)
    ]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors into one float32 vector."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def _evaluate(loss: Loss) -> Tensor:
    """Compute the loss with its graph.

    Raises:
        MoQError: It is not a scalar, or depends on no parameter.
    """
    with torch.enable_grad():
        value = loss()
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        raise MoQError(
            "the loss must be a scalar tensor that depends on parameters which require a gradient"
        )
    return value.reshape(())


_NOT_TWICE = ("derivative for", "double backward", "once_differentiable")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn PyTorch's error for a missing second derivative into one that says what to do.

    Raises:
        MoQError: The loss cannot be differentiated twice.
        RuntimeError: Any other error of PyTorch, unchanged.
    """
    try:
        yield
    except RuntimeError as err:
        if not any(sign in str(err) for sign in _NOT_TWICE):
            raise
        raise MoQError(
            f"the loss cannot be differentiated twice ({err}): load the model with "
            'attn_implementation="eager", or set sensitivity.measure to "divergence"'
        ) from err
