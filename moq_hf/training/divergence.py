"""The measure `divergence`: how far a model's predictions move when one block is rounded to other bits.

With p the class probabilities as they are and q those with the block at other bits, it is KL(p, q), averaged over the
predictions that count: what the cross entropy of q with p has more than the entropy of p.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MoQError
from ..quant_linear import QuantLayer
from .distillation import labels_at_logits, logits_in, logits_loss, takes
from .measuring import at_bits, repeatable
from .samples import Batch, rows_of

# What a block costs, by block and by bits.
Costs = dict[str, dict[int, float]]

# Numbers of all the logits that are compared, half a gigabyte; of a large vocabulary not every token.
KEPT_LOGITS = 1 << 26


def divergences(
    model: nn.Module,
    batches: Sequence[Batch],
    layers: Mapping[str, Sequence[QuantLayer]],
    levels: Mapping[str, Sequence[int]],
) -> Costs:
    """The divergence of each block at each of some bits, not below 0; NaN or Inf where the logits are that.

    Args:
        model: As `measuring` gives it.
        batches: Training examples, on the model's device.
        layers: Block name to its layers.
        levels: Block name to the bits to try.

    Raises:
        MoQError: The model's output has no logits.
    """
    counts = [rows_of(batch) for batch in batches]
    found: Costs = {}
    with torch.no_grad():
        references = [_reference(model, batch, KEPT_LOGITS // len(batches)) for batch in batches]
        for block, levels_of_block in levels.items():
            found[block] = {}
            for bits in levels_of_block:
                with at_bits(layers[block], bits):
                    sums = [rows * reference() for rows, reference in zip(counts, references, strict=True)]
                moved = sum(sums) / sum(counts)
                # Below 0 it is rounding.
                found[block][bits] = max(0.0, moved) if math.isfinite(moved) else moved
    return found


def logits_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The model's logits for a batch, by name.

    Raises:
        MoQError: It has none.
    """
    with repeatable(), torch.no_grad():
        output = model(**{name: value for name, value in batch.items() if takes(model, name)})
    found = logits_in(output) if isinstance(output, Mapping) else {}
    if not found:
        raise MoQError(
            "sensitivity.measure: divergence compares logits, and the model's output has none; set it to eigenvalue"
        )
    return found


def finite_costs(costs: Costs) -> Costs:
    """Costs of which one that is not finite counts as the largest finite one.

    >>> finite_costs({"a": {2: math.inf, 4: 0.5}, "b": {2: 2.0, 4: 0.0}})
    {'a': {2: 2.0, 4: 0.5}, 'b': {2: 2.0, 4: 0.0}}
    """
    largest = max((cost for own in costs.values() for cost in own.values() if math.isfinite(cost)), default=1.0)
    return {
        block: {bits: cost if math.isfinite(cost) else largest for bits, cost in own.items()}
        for block, own in costs.items()
    }


def _reference(model: nn.Module, batch: Batch, size: int) -> Callable[[], float]:
    """What tells how far the model's logits for a batch have moved from those that it gives now."""
    now = logits_of(model, batch)
    labels = labels_at_logits(model, batch.get("labels"))
    rows = {name: compared_rows(logits, labels, size) for name, logits in now.items()}
    # The forward pass has found out what it was, if the config did not say it.
    problem = getattr(getattr(model, "config", None), "problem_type", None)

    def compared(logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Little differences of large numbers; not every device has float64.
        return {name: logits[name].flatten(0, -2)[own].cpu().double() for name, own in rows.items()}

    reference = compared(now)
    entropy = float(logits_loss(reference, reference, None, problem))
    return lambda: float(logits_loss(compared(logits_of(model, batch)), reference, None, problem)) - entropy


def compared_rows(logits: Tensor, labels: Any, size: int) -> Tensor:
    """The rows of `logits`, a matrix to its last dimension, that count: with a label, if each has one of its own.

    Args:
        logits: Of a batch.
        labels: Of it, as `labels_at_logits` gives them; see `logits_loss`.
        size: Numbers of all rows together; of more rows some at equal distances.
    """
    count = logits.shape[:-1].numel()
    rows = torch.arange(count, device=logits.device)
    if isinstance(labels, Tensor) and labels.shape == logits.shape[:-1] and bool(labels.ne(-100).any()):
        rows = rows[labels.flatten().ne(-100)]
    wanted = max(1, size // logits.shape[-1])
    return rows[:: -(-len(rows) // wanted)]
