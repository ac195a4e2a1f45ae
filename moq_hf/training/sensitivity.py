"""Measures the sensitivity of a run's blocks: when, on which examples, and within which share of the run's time."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ..config import MoQConfig
from ..errors import MoQError
from ..model.inventory import Inventory
from ..model.selection import split_blocks
from ..names import is_below
from ..processes import largest_over_ranks, mean_over_ranks
from ..schedule import PrecisionSchedule
from .measures import MEASURES, Costs, finite_costs
from .samples import Batch, Samples, rows_of

logger = logging.getLogger(__name__)

# A measurement takes at least this many examples, however small the budget of time.
MIN_ROWS = 8
# The factor by which a training step in half precision is faster than in float32, in
# which sensitivity is measured.
HALF_PRECISION = 4.0


def normalize(scores: Mapping[str, float]) -> dict[str, float]:
    """Divide scores by the largest finite one; those that are not finite become 1, and so do all if none is.

    >>> normalize({"a": 4.0, "b": 1.0, "c": math.nan})
    {'a': 1.0, 'b': 0.25, 'c': 1.0}
    """
    largest = max(filter(math.isfinite, scores.values()), default=0.0)
    return {
        name: score / largest if largest and math.isfinite(score) else 1.0
        for name, score in scores.items()
    }


class Sensitivity:
    """The sensitivity of each block, measured when a drop is due and the budget of time allows it.

    Args:
        inventory: Inventory of the model in training; only blocks that hold a layer to
            quantize are measured.
        config: What to measure, and how.
        units: Block name to its layers, to compare these blocks by the weights of their
            layers alone. None: entries of the layer list, with all their parameters.

    Raises:
        MoQError: There is nothing to measure; see `Inventory.layer_blocks`.

    Attributes:
        blocks: Block name to its parameters.
        entries: The entries of the model's layer lists that the blocks belong to.
        measure: The `Measure` that compares them.
        scores: Block name to the magnitude of its eigenvalue, or to its divergence at
            its next bits; empty before the first measurement.
        seconds: Seconds that measuring took in this process.
    """

    def __init__(
        self,
        inventory: Inventory,
        config: MoQConfig,
        units: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.config = config.eigenvalue
        self.blocks, layers, self.entries = _blocks_of(inventory, config, units)
        self.measure = MEASURES[config.measure](
            inventory.model, self.blocks, layers, config
        )
        self.scores: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(self.config.num_samples)
        # In units of one training example; without `set_run_length` there is no limit.
        self._per_step = math.inf
        self._total = math.inf
        self._spent = 0.0
        # The examples that a measurement of this run asks for.
        self._rows = 0
        self._checked = False

    @property
    def values(self) -> dict[str, float]:
        """Block name to its magnitude over the largest, 0 to 1."""
        return normalize(self.scores)

    def set_run_length(
        self, total_steps: int, rows_per_step: float, half_precision: bool = False
    ) -> None:
        """Set the length of the run, so that the budget of time can be kept.

        Args:
            total_steps: Optimizer steps of the whole run.
            rows_per_step: Training examples per optimizer step and process.
            half_precision: Whether training computes in bf16 or fp16; measuring is in
                float32.

        Raises:
            MoQError: An engine shards the parameters in a way that cannot be measured.
        """
        self.measure.check_model()
        self._per_step = rows_per_step / (HALF_PRECISION if half_precision else 1.0)
        self._total = total_steps * self._per_step * self.config.max_overhead

    def is_due(self, schedule: PrecisionSchedule) -> bool:
        """True if a measurement is due before the coming step of the schedule.

        It is at the last multiple of `gas_boundary_resolution` steps before a drop, and
        at the drop itself if nothing was measured yet.
        """
        resolution = self.config.gas_boundary_resolution
        on_grid = (schedule.steps + 1) % resolution == 0
        if self.scores and not on_grid:
            return False
        ahead = schedule.drops_ahead(resolution if on_grid else 1)
        return any(name in self.blocks for name in ahead)

    def check(self) -> None:
        """Try the measure on two examples, once, as soon as there are examples.

        Raises:
            MoQError: The model cannot be measured; see the measure's `check`.
        """
        if self._checked or not self.samples.batches(1):
            return
        self._checked = True
        self.measure.check(self._batches(1)[0][0])

    def update(self, schedule: PrecisionSchedule) -> None:
        """Measure, or keep the last values if the budget of time is spent, and log which.

        Args:
            schedule: The schedule before its coming step.

        Raises:
            MoQError: There are no samples, or the model cannot be measured.
        """
        step = schedule.steps + 1
        self._rows = self._rows or self._first_rows()
        batches, rows = self._batches(self._rows)
        allowed = step * self._per_step * self.config.max_overhead
        if self.scores and self._spent + self.measure.cost(rows) > allowed:
            logger.info(
                "step %d: the last %ss are used again, measuring would exceed max_overhead %.3g",
                step,
                self.measure.name,
                self.config.max_overhead,
            )
            return
        start = time.perf_counter()
        next_bits = {
            name: bits
            for name, bits in schedule.next_bits.items()
            if name in self.blocks
        }
        self.scores = self.measure.scores(batches, next_bits)
        self._count(rows, start)
        words = ", ".join(
            f"{name} {value:.2f} ({self.scores[name]:.3g})"
            for name, value in self.values.items()
        )
        level = logging.INFO if self.config.verbose else logging.DEBUG
        logger.log(
            level,
            "step %d: %ss over %d examples: %s",
            step,
            self.measure.name,
            rows,
            words,
        )

    def costs(self, choices: Sequence[int]) -> Costs:
        """The cost of each block at each of the given bits, with all others unchanged.

        It counts towards the budget of time, and takes fewer examples if that is small.

        Raises:
            MoQError: There are no samples, the model cannot be measured, or no cost is
                finite.
        """
        start = time.perf_counter()
        batches, rows = self._batches(self._first_rows(len(choices)))
        costs = self.measure.costs(batches, dict.fromkeys(self.blocks, choices))
        self._count(rows, start, len(choices))
        if not any(
            math.isfinite(cost)
            for costs_of_block in costs.values()
            for cost in costs_of_block.values()
        ):
            raise MoQError(
                f"bits: the {self.measure.name} of no block is finite (NaN or Inf), so bits cannot be chosen by it; "
                "look at the model's loss in evaluation mode, or set another sensitivity.measure"
            )
        return finite_costs(costs)

    def report(self, elapsed: float) -> None:
        """Log the share of `elapsed` seconds that measuring took."""
        share = self.seconds / elapsed
        limit = self.config.max_overhead
        level = logging.WARNING if share > limit else logging.INFO
        logger.log(
            level,
            "moq_hf: %ss took %.3f of the run's time, %.1f s; max_overhead is %.3g",
            self.measure.name,
            share,
            self.seconds,
            limit,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, in JSON types."""
        return {
            "eigenvalues": {
                k: None if math.isnan(v) else v for k, v in self.scores.items()
            },
            "spent": self._spent,
            "products": self.measure.products,
            "rows": self._rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.scores = {
            k: math.nan if v is None else v for k, v in state["eigenvalues"].items()
        }
        self._spent = state["spent"]
        self.measure.products = state["products"]
        self._rows = state["rows"]

    def _first_rows(self, levels: int = 1) -> int:
        """The number of examples that the budget of time allows for a measurement."""
        rows = self.config.num_samples
        left = self._total - self._spent
        while rows > MIN_ROWS and self.measure.cost(rows, levels) > left:
            rows -= 1
        return rows

    def _count(self, rows: float, start: float, levels: int = 1) -> None:
        self._spent += self.measure.cost(rows, levels)
        self.seconds += time.perf_counter() - start

    def _batches(self, rows: int) -> tuple[list[Batch], float]:
        """The latest `rows` examples, on the model's device, and their number, the mean over the ranks.

        They are in float32, unless FSDP2 or ZeRO-3 sets another precision. These gather
        the weights for each batch, so all ranks must have the same number of batches.

        Raises:
            MoQError: There are no examples.
        """
        device = self.measure.device

        def moved(value: Tensor) -> Tensor:
            in_float32 = (
                value.is_floating_point() and not self.measure.is_gathered_per_pass
            )
            return value.to(device, torch.float32 if in_float32 else None)

        latest = self.samples.batches(rows)
        batches: list[Batch] = [recursively_apply(moved, batch) for batch in latest]
        if self.measure.is_gathered_per_pass:
            least = -largest_over_ranks(torch.tensor([-len(batches)], device=device))
            batches = batches[: int(least)]
        if not batches:
            raise MoQError(
                f"{self.measure.name}s: no training example was seen before they are measured"
            )
        # Ranks must agree on whether to measure, and on the cost.
        count = float(sum(map(rows_of, batches)))
        return batches, mean_over_ranks([count], device)[0]


def _blocks_of(
    inventory: Inventory, config: MoQConfig, units: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[nn.Parameter]], Mapping[str, Sequence[str]], list[str]]:
    """Find parameters and layers of the blocks to measure, and the entries of layer lists that they belong to.

    Raises:
        MoQError: There is nothing to measure.
    """
    if units is not None:
        return _weights_of(inventory, units), units, []
    blocks = inventory.layer_blocks(
        config.eigenvalue.layer_name, config.eigenvalue.layer_num
    )
    layers = {
        block: below
        for block in blocks
        if (below := [name for name in inventory.scheduled if is_below(name, block)])
    }
    if not layers:
        raise MoQError(
            f"eigenvalue: no block has a quantized layer; the blocks are {', '.join(blocks)}"
        )
    parts = split_blocks(layers, config)
    weights = _weights_of(inventory, parts)
    # If a whole entry is one block, its biases and norms count too.
    entries = {
        block: blocks[block] for block in layers if parts.get(block) == layers[block]
    }
    return weights | entries, parts, list(layers)


def _weights_of(
    inventory: Inventory, blocks: Mapping[str, Sequence[str]]
) -> dict[str, list[nn.Parameter]]:
    parameters = dict(inventory.parameters())
    # Experts go by the name of their parameter.
    return {
        block: [
            parameters[layer if layer in inventory.experts else f"{layer}.weight"]
            for layer in layers
        ]
        for block, layers in blocks.items()
    }
