"""Training in several processes: whole tensors from their shards, and the check that all ranks agree."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import MoQError
from .seams.engines import (
    FSDP1,
    FSDP2,
    ZERO_3,
    ZERO_3_SHAPE,
    is_offloaded,
    whole_of_partitions,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed() -> bool:
    """True if this process trains with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_process() -> bool:
    """True in the one process that speaks for all."""
    return not is_distributed() or dist.get_rank() == 0


def is_partitioned(tensor: Tensor) -> bool:
    """True if ZeRO-3 partitions the parameter, which is whole only during a pass and empty otherwise."""
    return hasattr(tensor, ZERO_3)


def is_gathered_per_pass(tensor: Tensor) -> bool:
    """True if an engine gathers the parameter for a forward pass: FSDP2 or ZeRO-3."""
    return is_sharded(tensor) or is_partitioned(tensor)


def has_gathered_weights(model: nn.Module) -> bool:
    """True if an engine gathers parameters of the model for a forward pass."""
    return any(map(is_gathered_per_pass, model.parameters()))


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor, even where this process holds only a part of it or nothing."""
    return getattr(tensor, ZERO_3_SHAPE, tensor.shape)


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """True if the tensor is a DTensor: each process holds a part, as FSDP2 leaves parameters between passes."""
    return hasattr(tensor, "device_mesh")


def device_of(tensor: Tensor) -> torch.device:
    """The device that computes with the tensor; for shards, which may be offloaded to the CPU, that of their mesh."""
    return (
        torch.device(tensor.device_mesh.device_type)
        if is_sharded(tensor)
        else tensor.device
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached. A sharded one is gathered, so every process of its mesh must call this."""
    if is_partitioned(tensor):
        return whole_of_partitions(tensor)
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, cast(Any, tensor.to(device_of(tensor))).full_tensor())


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, detached: all of a plain one, nothing under ZeRO-3."""
    with torch.no_grad():
        return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def sharded_as(weight: Tensor, values: Tensor) -> Tensor:
    """Shard `values`, which every process holds whole, as `weight` is sharded; unchanged if `weight` is not."""
    if not is_sharded(weight):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        values.to(device_of(weight)), weight.device_mesh, weight.placements
    ).to(weight.device)


@contextmanager
def gathered_state_dict(
    model: nn.Module, everywhere: bool = False
) -> Iterator[dict[str, Tensor] | None]:
    """The state dict of a model whose weights engines have sharded, on the CPU of rank 0; every process must enter.

    The other processes hold one tensor at a time, and all leave together.

    Args:
        model: Any model.
        everywhere: Keep it in every process, if several of them save.

    Yields:
        The tensors by name. None in the other processes, and for a model with whole
        weights.
    """
    # This also makes FSDP2 reshard what it left gathered after a pass without gradients.
    names = model.state_dict(keep_vars=True)
    if not any(map(is_gathered_per_pass, names.values())):
        yield None
        return
    keeps = everywhere or dist.get_rank() == 0
    # Packing and checking may take longer than the default timeout of processes.
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    gathered: dict[int, Tensor] = {}
    for value in names.values():
        # Names that share a parameter share the gathered one too.
        if id(value) not in gathered:
            tensor = whole(value)
            gathered[id(value)] = tensor.cpu() if keeps else torch.empty(0)
    try:
        yield (
            {name: gathered[id(value)] for name, value in names.items()}
            if keeps
            else None
        )
    finally:
        dist.barrier(patient)
        dist.destroy_process_group(patient)


def check_supported(model: nn.Module) -> None:
    """Check that a model's weights are not spread over processes or devices in a way that leaves none to quantize.

    Raises:
        MoQError: They are, by FSDP1, tensor parallelism or offloading; says what works
            instead.
    """
    modules = list(model.modules())
    instead = "DDP, FSDP2 and DeepSpeed ZeRO work"
    if any(map(is_offloaded, modules)):
        raise MoQError(
            "device_map has left some weights on the CPU or on disk, where nothing can train them: load the model "
            "without device_map, or split over processes with FSDP2 or ZeRO-3 (see the guide on processes)"
        )
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    if FSDP1 in names:
        raise MoQError(
            f"FSDP1 flattens the weights that are to be quantized (fsdp_config: version 1); {instead}"
        )
    sharded = [each for each in model.parameters() if is_sharded(each)]
    twice = any(
        sum(p.is_shard() for p in parameter.placements) > 1 for parameter in sharded
    )
    if sharded and (twice or FSDP2 not in names):
        raise MoQError(f"tensor-parallel weights cannot be quantized; {instead}")


def agree(number: int, device: torch.device, state: Callable[[], str]) -> None:
    """Check that all processes have the same number, with one small message.

    Args:
        number: A checksum of the values that must be equal, 0 to 2^32 - 1.
        device: The model's device: the backend of a GPU sends no messages between CPUs.
        state: Describes those values, to show two ranks that differ.

    Raises:
        MoQError: The numbers differ.
    """
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    high, low = extremes.tolist()
    if high == -low:
        return
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state())
    first = states[0]
    other = next((s for s in enumerate(states) if s[1] != states[0]), (0, states[0]))
    raise MoQError(
        f"the processes disagree: rank 0 has {first}, rank {other[0]} has {other[1]}; all must have the same config, "
        "checkpoint, length of the data and version of moq_hf"
    )


def largest_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all processes, which must all call this; float32 of any shape, without NaN."""
    if is_distributed():
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The mean of each value over the ranks on which it is finite, the same on every rank; NaN if it is on none."""
    if not is_distributed():
        return values
    local = torch.tensor(values, dtype=torch.float32, device="cpu")
    finite = local.isfinite()
    sums = torch.stack([local.nan_to_num(0.0, 0.0, 0.0), finite.float()]).to(device)
    dist.all_reduce(sums)
    dist.broadcast(sums, 0)
    total, count = sums.cpu()
    means: list[float] = (total / count).tolist()
    return means
