"""Whether the sensitivity of a model can be measured that an engine takes apart: known before training."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..engine_seams import fsdp_parameters
from ..errors import MoQError
from ..processes import is_partitioned, is_sharded
from ..quant_experts import experts_parameters


def check_measurable(model: nn.Module, blocks: Mapping[str, Sequence[Tensor]], measure: str, derived: bool) -> None:
    """Refuse what could not be measured, or would be measured wrong, in parts.

    Args:
        model: In training, unwrapped.
        blocks: Block name to its parameters.
        measure: What the error calls it.
        derived: Whether it is made of gradients, not of losses alone.

    Raises:
        MoQError: Says what stands in the way, and what would work.
    """
    parameters = [p for own in blocks.values() for p in own]
    instead = 'set sensitivity.measure to "divergence" or "loss"'
    if any(map(is_partitioned, parameters)) and derived:
        raise MoQError(
            f"{measure}: ZeRO-3 keeps gradients to itself, of which they are made: {instead}, or train with FSDP2"
        )
    sharded = [p for p in parameters if is_sharded(p)]
    if not sharded:
        return
    if not {id(p) for p in sharded} <= {id(own.parameter) for own in fsdp_parameters(model)}:
        raise MoQError(
            f"{measure}: FSDP2 gathers the weights for a wrapper of the model, that of torch_compile: "
            "leave torch_compile out, or call model.compile() yourself"
        )
    if not derived:
        return
    why = "of parameters that FSDP2 shards differences of gradients are taken"
    if any(experts_parameters(module) for module in model.modules()):
        raise MoQError(f"{measure}: {why}, which mean nothing where tokens are routed to experts: {instead}")
    whole = len(parameters) - len(sharded)
    frozen, half = (sum(map(is_so, sharded)) for is_so in (_is_frozen, _is_half))
    if whole or frozen or half:
        wrong = [(whole, "are whole in each process"), (frozen, "are not trained"), (half, "have fewer bits")]
        counts = ", ".join(f"{count} {what}" for count, what in wrong if count)
        raise MoQError(
            f"{measure}: {why}: all must be sharded, trained and float32; of {len(parameters)} {counts}: {instead}"
        )


def _is_frozen(parameter: Tensor) -> bool:
    return not parameter.requires_grad


def _is_half(parameter: Tensor) -> bool:
    return parameter.dtype.itemsize < 4
