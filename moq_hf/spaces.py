"""Vectors over the parameters of a block, and derivatives of a loss along them, wherever the parameters are.

A vector has a number for each element of the parameters, flat and in float32. Where an engine takes the parameters
apart, each process has the numbers of its own part, and what is summed over a vector is summed over the processes. A
derivative along a vector is a difference of two gradients, which the engine's own backward pass gives.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import MoQError
from .processes import device_of, is_sharded, memory_of

Loss = Callable[[], Tensor]

# The largest change of a weight in a difference of gradients. Of 1e-5 to 1e-1 this one had the least error over blocks
# and directions, at most 1e-3 of the product: truncation grows with its square, float32's rounding with its inverse.
# See benchmarks/eigen.py.
DIFFERENCE = 2e-4


class Space:
    """Vectors over parameters that are whole in this process.

    Args:
        parameters: Of any shape.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.parameters = list(parameters)

    @property
    def size(self) -> int:
        """Numbers of a vector."""
        return sum(p.numel() for p in self.parameters)

    def own(self, vector: Tensor) -> Tensor:
        """What this process holds of a whole vector `[size]` on the CPU, where its parameters are."""
        return vector.to(self.parameters[0].device)

    def dot(self, one: Tensor, other: Tensor) -> float:
        """The inner product of two vectors."""
        return float(one @ other)

    def norm(self, vector: Tensor) -> Tensor:
        """The length of a vector, a scalar."""
        return cast(Tensor, vector.norm())

    def largest(self, vector: Tensor) -> float:
        """The largest magnitude in a vector."""
        return float(vector.abs().max())

    def length(self, vector: Tensor) -> int:
        """Numbers of a whole vector."""
        return vector.numel()

    def sums(self, vector: Tensor, parts: Sequence["Space"]) -> Tensor:
        """The sum of each part of a vector over several blocks.

        Args:
            vector: Over the parameters of all `parts` in turn.
            parts: Of the blocks.

        Returns:
            float64 on the CPU.
        """
        # float32 sums of millions of terms would lose digits.
        pieces = torch.split(vector, [sum(map(torch.Tensor.numel, part.held())) for part in parts])
        return torch.stack([piece.sum(dtype=torch.float64) for piece in pieces]).cpu()

    def held(self) -> list[Tensor]:
        """What this process holds of each parameter."""
        return self.parameters

    def gradient(self, loss: Loss) -> Tensor:
        """Of a loss, a vector."""
        with explained():
            found = torch.autograd.grad(evaluate(loss), self.parameters, allow_unused=True)
        return flat(found, self.parameters)

    def kept(self) -> list[Tensor]:
        """The parameters' values as they are now, for `move`."""
        return [p.data for p in self.parameters]

    def move(self, kept: Sequence[Tensor], vector: Tensor | None = None, step: float = 0.0) -> None:
        """Give the parameters the values of `kept` plus the step times a vector; without one, those of `kept` again."""
        parts = [None] * len(kept) if vector is None else self.split(vector)
        for p, data, part in zip(self.parameters, kept, parts, strict=True):
            p.data = data if part is None else data.add(part, alpha=step)

    def split(self, vector: Tensor) -> list[Tensor]:
        """A vector cut into the shapes of what this process holds, in the parameters' dtypes."""
        held = self.held()
        pieces = torch.split(vector, [p.numel() for p in held])
        return [piece.view(p.shape).to(p.dtype) for piece, p in zip(pieces, held, strict=True)]

    def product(self, losses: Sequence[Loss], vector: Tensor, step: float | None = None) -> Tensor:
        """The product of the mean loss's Hessian with a vector, by central differences of gradients.

        Args:
            losses: Their mean counts.
            vector: In this space.
            step: (g(x + step v) - g(x - step v)) / 2 step; by default no parameter moves by more than `DIFFERENCE`.
        """
        step = DIFFERENCE / self.largest(vector) if step is None else step
        total = torch.zeros_like(vector)
        kept = self.kept()
        try:
            for sign in (1.0, -1.0):
                self.move(kept, vector, sign * step)
                for loss in losses:
                    total.add_(self.gradient(loss), alpha=sign / (2 * step * len(losses)))
        finally:
            self.move(kept)
        return total


class ShardedSpace(Space):
    """Vectors over parameters that FSDP2 shards: each process has the numbers of its shards.

    All processes must ask for everything but `own`, in the same order. Losses are those of the processes' own batches;
    FSDP2 gives the gradient of their mean.
    """

    def own(self, vector: Tensor) -> Tensor:
        """As `Space`; nothing is sent."""
        from torch.distributed.tensor import distribute_tensor

        pieces = torch.split(vector, [p.numel() for p in self.parameters])
        held = []
        for piece, p in zip(pieces, self.parameters, strict=True):
            mesh, placements = cast(Any, p).device_mesh, cast(Any, p).placements
            shards = distribute_tensor(piece.view(p.shape), mesh, placements, src_data_rank=None)
            held.append(shards.to_local().flatten().to(memory_of(p).device))
        return torch.cat(held)

    def dot(self, one: Tensor, other: Tensor) -> float:
        """As `Space`."""
        return float(self._sum(one @ other))

    def norm(self, vector: Tensor) -> Tensor:
        """As `Space`."""
        return self._sum(vector.square().sum(dtype=torch.float64)).sqrt().float()

    def largest(self, vector: Tensor) -> float:
        """As `Space`."""
        own = vector.abs().max() if vector.numel() else vector.new_zeros(())
        return float(self._reduced(own, dist.ReduceOp.MAX))

    def length(self, vector: Tensor) -> int:
        """As `Space`."""
        return self.size

    def sums(self, vector: Tensor, parts: Sequence[Space]) -> Tensor:
        """As `Space`."""
        return self._sum(super().sums(vector, parts))

    def held(self) -> list[Tensor]:
        """As `Space`."""
        return [memory_of(p) for p in self.parameters]

    def gradient(self, loss: Loss) -> Tensor:
        """As `Space`, by a backward pass of the engine; it adds to the gradients of all other parameters of the model.

        Raises:
            MoQError: The engine gave no parameter a gradient.
        """
        for p in self.parameters:
            p.grad = None
        with explained():
            evaluate(loss).backward()  # type: ignore[no-untyped-call]
        found = [None if p.grad is None else memory_of(p.grad) for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        if all(gradient is None for gradient in found):
            raise MoQError(
                "sharded parameters got no gradient from a backward pass: measure where FSDP2 reduces gradients "
                "(set_requires_gradient_sync), and parameters that the loss depends on"
            )
        return flat(found, self.held())

    def kept(self) -> list[Tensor]:
        """As `Space`, copied."""
        return [part.clone() for part in self.held()]

    def move(self, kept: Sequence[Tensor], vector: Tensor | None = None, step: float = 0.0) -> None:
        """As `Space`, in the memory that FSDP2 gathers from."""
        for part, data in zip(self.held(), kept, strict=True):
            part.copy_(data)
        if vector is not None:
            for part, change in zip(self.held(), self.split(vector), strict=True):
                part.add_(change, alpha=step)

    def _sum(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.SUM)

    def _reduced(self, value: Tensor, how: Any) -> Tensor:
        weight = cast(Any, self.parameters[0])
        dimension = next(index for index, placement in enumerate(weight.placements) if placement.is_shard())
        there = value.to(device_of(weight))
        dist.all_reduce(there, how, group=weight.device_mesh.get_group(dimension))
        return there.to(value.device)


def space_of(parameters: Sequence[Tensor]) -> Space:
    """The space of vectors over parameters that are all whole, or all sharded.

    Raises:
        MoQError: Some are sharded and some are not.
    """
    sharded = sum(map(is_sharded, parameters))
    if 0 < sharded < len(parameters):
        raise MoQError(
            f"{sharded} of {len(parameters)} parameters of a block are sharded: give them all to fully_shard, or none"
        )
    return ShardedSpace(parameters) if sharded else Space(parameters)


def evaluate(loss: Loss) -> Tensor:
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
def explained() -> Iterator[None]:
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


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """One float32 vector of tensors of the shapes of `like`, None being zeros."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t).detach().float().flatten() for t, p in pairs])
