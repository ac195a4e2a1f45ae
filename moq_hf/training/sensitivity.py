"""When a run measures the sensitivity of its blocks, on which training examples, and at what share of its time."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..errors import MoQError
from ..model.inventory import Inventory
from ..names import is_below
from ..processes import is_apart, is_distributed, largest_over_ranks, mean_over_ranks
from ..schedule import PrecisionSchedule
from .measures import MEASURES, Costs, finite_costs
from .samples import Batch, Samples, part_of, rows_of

logger = logging.getLogger(__name__)

# However small the budget is, fewer examples would say nothing.
MIN_ROWS = 8
# A half-precision training step is that much faster than the same in float32, in which
# sensitivity is measured.
HALF_PRECISION = 4.0


def normalize(eigenvalues: Mapping[str, float]) -> dict[str, float]:
    """Magnitudes over the largest, 0 to 1: one that is not finite gets the largest finite one, all 1 if none is.

    >>> normalize({"a": -4.0, "b": 1.0, "c": math.nan})
    {'a': 1.0, 'b': 0.25, 'c': 1.0}
    """
    sizes = {name: abs(value) for name, value in eigenvalues.items()}
    largest = max(filter(math.isfinite, sizes.values()), default=0.0)
    return {
        name: size / largest if largest and math.isfinite(size) else 1.0
        for name, size in sizes.items()
    }


class Sensitivity:
    """What the schedule knows of its blocks: measured when a drop is due and the budget of time allows it.

    Args:
        inventory: Of the model in training; only blocks that hold a layer to quantize
            are measured.
        config: What to measure, and how.
        units: Block name to its layers, to compare these blocks by the weights of their
            layers alone. None: entries of the layer list, with all their parameters.

    Raises:
        MoQError: There is nothing to measure; see `Inventory.layer_blocks`.

    Attributes:
        blocks: Block name to its parameters.
        measure: The `Measure` that compares them.
        scores: Block name to the magnitude of its eigenvalue, or to its divergence at
            its next bits; empty before the first measurement.
        seconds: Time that measuring took, in this process.
    """

    def __init__(
        self,
        inventory: Inventory,
        config: MoQConfig,
        units: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.config = config.eigenvalue
        self.blocks, layers = _blocks_of(inventory, config, units)
        self.measure = MEASURES[config.measure](
            inventory.model, self.blocks, layers, config
        )
        self.is_apart = any(is_apart(p) for own in self.blocks.values() for p in own)
        self.device = self.measure.device
        self.scores: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(
            self.config.num_samples, across_steps=not is_distributed()
        )
        # In units of one training example; without `plan` there is no limit.
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

    def plan(
        self, total_steps: int, rows_per_step: float, half_precision: bool = False
    ) -> None:
        """Set how long the run is, so that the budget can be kept.

        Args:
            total_steps: Optimizer steps of the whole run.
            rows_per_step: Training examples per optimizer step and process.
            half_precision: Whether training computes in bf16 or fp16; measuring is in
                float32.

        Raises:
            MoQError: An engine takes the parameters apart in a way that cannot be
                measured.
        """
        self.measure.check_model()
        self._per_step = rows_per_step / (HALF_PRECISION if half_precision else 1.0)
        self._total = total_steps * self._per_step * self.config.max_overhead

    def summary(self, choices: int | None = None) -> str:
        """One line: what is measured first and what the budget of time allows.

        Args:
            choices: How many numbers of bits a block may have, where they are chosen
                first.
        """
        rows = self._first_rows(choices or 1)
        when = "when a drop is due" if choices is None else "when the bits are chosen"
        return (
            f"{self.measure.name}s of {len(self.blocks)} blocks over up to {rows} examples {when}, in at most "
            f"{self.config.max_overhead:.3g} of the run's time"
        )

    def is_due(self, schedule: PrecisionSchedule) -> bool:
        """Whether the coming step of the schedule wants values measured now.

        The last multiple of `gas_boundary_resolution` steps before a drop; the drop
        itself if there is no value yet.
        """
        resolution = self.config.gas_boundary_resolution
        on_grid = (schedule.steps + 1) % resolution == 0
        ahead = (
            schedule.drops_ahead(resolution if on_grid else 1)
            if on_grid or not self.scores
            else ()
        )
        return any(name in self.blocks for name in ahead)

    def check(self) -> None:
        """Try on two examples whether the model can be measured; once, as soon as there are examples.

        Raises:
            MoQError: It cannot; see `Measure.check`.
        """
        if self._checked or not self.samples.batches(1):
            return
        self._checked = True
        self.measure.check(part_of(self._batches(1)[0][0], 0, 2))

    def update(self, schedule: PrecisionSchedule) -> None:
        """Measure, or keep the values of before where the budget is spent, and say which.

        Args:
            schedule: Before its coming step.

        Raises:
            MoQError: There are no samples, or the model cannot be measured.
        """
        step = schedule.steps + 1
        self._rows = self._rows or self._first_rows()
        batches, rows = self._batches(self._rows)
        if (
            self.scores
            and self._spent + self.measure.cost(rows)
            > step * self._per_step * self.config.max_overhead
        ):
            again = f"step {step}: the last {self.measure.name}s are used again"
            logger.info(
                "%s, measuring would exceed max_overhead %.3g",
                again,
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
            level, "step %d: %ss over %d examples: %s", step, self.measure, rows, words
        )

    def costs(self, choices: Sequence[int]) -> Costs:
        """What each block costs at each of some bits, with all others as they are now.

        It counts for the budget of time, with fewer examples where that is small.

        Raises:
            MoQError: There are no samples, the model cannot be measured, or no cost is
                finite.
        """
        start = time.perf_counter()
        batches, rows = self._batches(self._first_rows(len(choices)))
        found = self.measure.costs(batches, dict.fromkeys(self.blocks, choices))
        self._count(rows, start, len(choices))
        if not any(
            math.isfinite(cost) for own in found.values() for cost in own.values()
        ):
            raise MoQError(
                f"quantize_bits.target_bits: the {self.measure.name} of no block is finite (NaN or Inf), so the bits "
                "cannot be chosen by it; look at the model's loss in evaluation mode, or set another "
                "sensitivity.measure"
            )
        return finite_costs(found)

    def report(self, elapsed: float) -> None:
        """Log what share of `elapsed` seconds measuring took."""
        share = self.seconds / elapsed
        limit = self.config.max_overhead
        level = logging.WARNING if share > limit else logging.INFO
        what = f"{self.measure.name}s took {share:.3f} of the run's time, {self.seconds:.1f} s"
        logger.log(level, "moq_hf: %s; max_overhead is %.3g", what, limit)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON types."""
        return {
            "eigenvalues": {
                k: None if math.isnan(v) else v for k, v in self.scores.items()
            },
            "spent": self._spent,
            "products": self.measure.products,
            "rows": self._rows,
            "samples": self.samples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            MoQError: Its samples are damaged.
        """
        self.scores = {
            k: math.nan if v is None else v for k, v in state["eigenvalues"].items()
        }
        self._spent = state["spent"]
        self.measure.products = state["products"]
        self._rows = state["rows"]
        self.samples.load_state_dict(state["samples"], self.device)

    def _first_rows(self, levels: int = 1) -> int:
        """Find how many examples the budget of time allows a measurement."""
        rows = self.config.num_samples
        while (
            rows > MIN_ROWS
            and self.measure.cost(rows, levels) > self._total - self._spent
        ):
            rows -= 1
        return rows

    def _count(self, rows: float, start: float, levels: int = 1) -> None:
        self._spent += self.measure.cost(rows, levels)
        self.seconds += time.perf_counter() - start

    def _batches(self, rows: int) -> tuple[list[Batch], float]:
        """Take the latest `rows` examples, on the model's device, and count them, in the mean over the ranks.

        They are in float32 unless an engine has its own precision; it gathers weights
        for each batch, so that all ranks must have as many of them.

        Raises:
            MoQError: There are none.
        """
        batches = [
            _moved(batch, self.device, not self.is_apart)
            for batch in self.samples.batches(rows)
        ]
        if self.is_apart:
            least = -largest_over_ranks(
                torch.tensor([-len(batches)], device=self.device)
            )
            batches = batches[: int(least)]
        if not batches:
            raise MoQError(
                f"{self.measure.name}s: no training example was seen before they are measured"
            )
        # Ranks must agree on whether to measure, and on what it cost.
        return batches, mean_over_ranks(
            [float(sum(map(rows_of, batches)))], self.device
        )[0]


def _blocks_of(
    inventory: Inventory, config: MoQConfig, units: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[nn.Parameter]], Mapping[str, Sequence[str]]]:
    """Find the parameters and the layers of the blocks to measure; see `Sensitivity`.

    Raises:
        MoQError: There is nothing to measure.
    """
    if units is not None:
        parameters = dict(inventory.parameters())
        # Experts are called as their parameter.
        weights = {
            block: [
                parameters[layer if layer in inventory.experts else f"{layer}.weight"]
                for layer in unit
            ]
            for block, unit in units.items()
        }
        return weights, units
    blocks = inventory.layer_blocks(
        config.eigenvalue.layer_name, config.eigenvalue.layer_num
    )
    layers = {
        block: [layer for layer in inventory.scheduled if is_below(layer, block)]
        for block in blocks
    }
    layers = {block: below for block, below in layers.items() if below}
    if not layers:
        raise MoQError(
            f"eigenvalue: no block has a quantized layer; the blocks are {', '.join(blocks)}"
        )
    return {block: blocks[block] for block in layers}, layers


def _moved(batch: Batch, device: torch.device, in_float32: bool) -> Batch:
    moved = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor):
            dtype = torch.float32 if in_float32 and value.is_floating_point() else None
            moved[name] = value.to(device, dtype)
    return moved
