"""What moq_hf uses of the private surface of the engines that take weights apart: FSDP and DeepSpeed.

As in `transformers_seams`, each name says what it relies on, and what would break; its test tells when that is gone.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

FSDP2: Final = "FSDPModule"
"""The class that `fully_shard` puts before a module's own among the bases of a new one.

Relies on: Its name and its place.
Breaks: A model trained with FSDP2 would be refused as tensor-parallel, or not be packed.
"""

FSDP1: Final = "FullyShardedDataParallel"
"""The class of FSDP's first version.

Relies on: Its name.
Breaks: Weights that it flattened would be quantized in pieces, instead of being refused.
"""

ZERO_3: Final = "ds_id"
"""The attribute that ZeRO-3 puts on a parameter that it has partitioned.

Relies on: `deepspeed.runtime.zero.partition_parameters`.
Breaks: A model without weights would be quantized.
"""

ZERO_3_SHAPE: Final = "ds_shape"
"""Where such a parameter has the shape of the whole.

Relies on: `deepspeed.runtime.zero.partition_parameters`.
Breaks: Training with ZeRO-3 fails before the first step.
"""


def own_partition(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter under ZeRO-3, flat, without a graph and what fills the last one up.

    Relies on: `ds_tensor` of a partitioned parameter, and its `ds_process_group`.
    Breaks: Whether weights hold NaN would not be known.
    """
    own = cast(Any, parameter)
    part = own.ds_tensor.detach().view(-1)
    first = part.numel() * dist.get_rank(own.ds_process_group)
    return cast(Tensor, part[: max(0, own.ds_numel - first)])


def whole_of_partitions(parameter: Tensor) -> Tensor:
    """A parameter under ZeRO-3, whole, without a graph; all processes must ask for it.

    Relies on: `deepspeed.zero.GatheredParameters`, which is documented, and that a parameter which is whole stays so.
    Breaks: Clipping ratios could not be searched, nor a model saved.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def is_offloaded(module: nn.Module) -> bool:
    """Whether Accelerate keeps a module's weights elsewhere between forward passes, as `device_map` may have it.

    Relies on: `_hf_hook` of a module, which is on the meta device then.
    Breaks: Training fails on the meta device, after the first step, with no word about what to do.
    """
    return hasattr(module, "_hf_hook") and any(p.is_meta for p in module.parameters(recurse=False))


class FsdpParameter:
    """FSDP2's own object of one parameter; see `fsdp_parameters`."""

    def __init__(self, own: Any, splits: bool) -> None:
        # A forward pass may leave parts of another size behind.
        self._own = own
        self.takes_extensions = not (splits or own.offload_to_cpu or own.fsdp_placement.dim)

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded one."""
        return cast(nn.Parameter, self._own.sharded_param)

    @property
    def part(self) -> Tensor:
        """What this process holds of it: the tensor that FSDP2 asks for `fsdp_pre_all_gather`."""
        return cast(Tensor, self._own.sharded_param._local_tensor)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of a forward pass; None: the parameter's own."""
        return cast("torch.dtype | None", self._own.mp_policy.param_dtype)

    def begin_again(self) -> None:
        """Let FSDP2 forget the memory of earlier forward passes, which was for other sizes."""
        self._own._init_extensions()
        self._own.all_gather_outputs = []
        self._own.__dict__.pop("_unsharded_param", None)


def fsdp_parameters(model: nn.Module) -> list[FsdpParameter]:
    """FSDP2's objects of all parameters that it shards.

    Relies on: `FSDPParam` of `torch.distributed.fsdp`, with what `FsdpParameter` reads and calls.
    Breaks: Training with FSDP2 fails at the first step.
    """
    groups = fsdp_states(model)[1]
    return [FsdpParameter(own, group._use_post_forward_mesh) for group in groups for own in group.fsdp_params]


def fsdp_states(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """FSDP2's objects of the modules that it knows, and of the groups of parameters that are gathered together.

    Relies on: `_get_fsdp_state` of a module, and `_fsdp_param_groups` of what it gives.
    Breaks: Training with FSDP2 fails at the first step.
    """
    states = {id(m): cast(Any, m)._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")}
    groups = {id(group): group for state in states.values() for group in state._fsdp_param_groups}
    return list(states.values()), list(groups.values())


@contextlib.contextmanager
def fsdp_in_own_dtype(model: nn.Module) -> Iterator[None]:
    """For the duration FSDP2 gathers, computes and reduces in the parameters' own dtype, whatever its policy says.

    Relies on: `_mp_policy` of a module's state, `mp_policy` of a group and of its parameters, and `_init_mp_dtypes`.
    Breaks: Sensitivities of sharded blocks would be noise where FSDP2 computes in half precision.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    states, groups = fsdp_states(model)
    holders = [(state, "_mp_policy") for state in states] + [(group, "mp_policy") for group in groups]
    holders += [(own, "mp_policy") for group in groups for own in group.fsdp_params]
    kept = [getattr(*holder) for holder in holders]

    def give(policies: list[Any]) -> None:
        for (holder, name), policy in zip(holders, policies, strict=True):
            setattr(holder, name, policy)
        for group in groups:
            group.reshard()
            group._init_mp_dtypes()
            for own in group.fsdp_params:
                FsdpParameter(own, False).begin_again()

    give([MixedPrecisionPolicy()] * len(kept))
    try:
        yield
    finally:
        give(kept)


FSDP_MODEL: Final = "pytorch_model_fsdp"
"""What Accelerate calls the folder of a model's shards in a checkpoint, before the number of the model.

Relies on: `accelerate.utils.constants.FSDP_MODEL_NAME`, and the key "model" in what it saves there.
Breaks: `moq-hf pack` would find no weights in a checkpoint of FSDP2.
"""


def checkpoint_chunks(metadata: Any) -> dict[str, int]:
    """The files of a distributed checkpoint, each with the number of bytes that it has at least.

    Args:
        metadata: As `torch.distributed.checkpoint.FileSystemReader.read_metadata` gives it.

    Relies on: `Metadata.storage_data`, and `relative_path`, `offset` and `length` of what it holds.
    Breaks: `moq-hf pack` would fail on FSDP2's checkpoints, or see a cut off one only where a tensor is missing.
    """
    ends: dict[str, int] = {}
    for chunk in metadata.storage_data.values():
        ends[chunk.relative_path] = max(ends.get(chunk.relative_path, 0), chunk.offset + chunk.length)
    return ends
