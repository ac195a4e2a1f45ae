"""The measure `divergence`: how far a model's predictions move when one block is rounded to other bits.

With p the class probabilities as they are and q those with the block at other bits, it is KL(p, q), averaged over the
predictions that count: what the cross entropy of q with p has more than the entropy of p.
"""

import math
from collections.abc import Mapping, Sequence
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
    total = sum(map(rows_of, batches))
    found: Costs = {}
    with torch.no_grad():
        references = [_Reference(model, batch, KEPT_LOGITS // len(batches)) for batch in batches]
        for block, levels_of_block in levels.items():
            found[block] = {}
            for bits in levels_of_block:
                with at_bits(layers[block], bits):
                    moved = sum(reference.divergence() * rows_of(reference.batch) for reference in references) / total
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


class _Reference:
    """The logits of one batch as the model gives them now."""

    def __init__(self, model: nn.Module, batch: Batch, size: int) -> None:
        self.model, self.batch = model, batch
        logits = logits_of(model, batch)
        labels = labels_at_logits(model, batch.get("labels"))
        self._rows = {name: compared_rows(own, labels, size) for name, own in logits.items()}
        self._logits = self._compared(logits)
        # The forward pass has found out what it was, if the config did not say it.
        self._problem = getattr(getattr(model, "config", None), "problem_type", None)
        self._entropy = self._cross_entropy(self._logits)

    def divergence(self) -> float:
        """How far the model's logits have moved since then."""
        return self._cross_entropy(self._compared(logits_of(self.model, self.batch))) - self._entropy

    def _compared(self, logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Little differences of large numbers; not every device has float64.
        return {name: logits[name].flatten(0, -2)[rows].cpu().double() for name, rows in self._rows.items()}

    def _cross_entropy(self, logits: Mapping[str, Tensor]) -> float:
        return float(logits_loss(logits, self._logits, None, self._problem))


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
