"""The private names that moq_hf uses of the engines that shard weights: FSDP and DeepSpeed.

As in `seams.transformers`, each name says what it relies on, and what would break; its
test fails when that is gone.
"""

from typing import Final

from torch import Tensor, nn

FSDP2: Final = "FSDPModule"
"""The class that `fully_shard` adds in front of a module's own class.

Relies on: The name, and its place before the module's own class.
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
"""The attribute with the shape of the whole of such a parameter.

Relies on: `deepspeed.runtime.zero.partition_parameters`.
Breaks: Training with ZeRO-3 fails before the first step.
"""


def whole_of_partitions(parameter: Tensor) -> Tensor:
    """The whole of a parameter under ZeRO-3, without a graph; all processes must call this.

    Relies on: `deepspeed.zero.GatheredParameters`, which is documented, and that a
    parameter which is whole stays so.
    Breaks: Clipping ratios could not be searched, nor a model saved.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def is_offloaded(module: nn.Module) -> bool:
    """True if Accelerate keeps a module's weights elsewhere between forward passes, as with `device_map`.

    Relies on: `_hf_hook` of a module, whose weights are then on the meta device.
    Breaks: Training fails on the meta device, after the first step, without saying what
    to do.
    """
    return hasattr(module, "_hf_hook") and any(
        p.is_meta for p in module.parameters(recurse=False)
    )


FSDP_MODEL: Final = "pytorch_model_fsdp"
"""Accelerate's name for the folder of a model's shards in a checkpoint, before the number of the model.

Relies on: `accelerate.utils.constants.FSDP_MODEL_NAME`, and the key "model" in the saved state.
Breaks: `moq-hf pack` would find no weights in a checkpoint of FSDP2.
"""
