"""When a run measures the sensitivity of its blocks, on which training examples, and at what share of its time."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import EigenvalueConfig
from ..eigen import Eigenvalue, block_eigenvalues, check_second_derivative
from ..errors import MoQError
from ..model.inventory import Inventory
from ..names import is_below
from ..processes import is_distributed, is_sharded, mean_over_ranks
from ..schedule import PrecisionSchedule
from .host import Loss, model_loss
from .measuring import measuring, repeatable
from .samples import CHUNK, Inputs, Samples, part_of, rows_of

logger = logging.getLogger(__name__)


def normalize(eigenvalues: Mapping[str, float]) -> dict[str, float]:
    """Magnitudes over the largest, 0 to 1: one that is not finite gets the largest finite one, all 1 if none is.

    >>> normalize({"a": -4.0, "b": 1.0, "c": math.nan})
    {'a': 1.0, 'b': 0.25, 'c': 1.0}
    """
    finite = [abs(value) for value in eigenvalues.values() if math.isfinite(value)]
    largest = max(finite, default=0.0)
    if largest == 0.0:
        return dict.fromkeys(eigenvalues, 1.0)
    return {name: abs(v) / largest if math.isfinite(v) else 1.0 for name, v in eigenvalues.items()}


# Costs in units of the forward and backward pass of one training example; benchmarks/eigen.py measures them. They
# decide what the budget allows: the clock would let two runs of the same seed differ.
GRAPH_COST, PRODUCT_COST, DIFFERENCE_COST = 1.0, 0.6, 1.1
# Products a block takes early in training, where it takes most.
FIRST_PRODUCTS = {"lanczos": 11, "power": 23}
# However small the budget is, fewer examples would say nothing.
MIN_ROWS = 8
# A half-precision training step is that much faster than the same in float32, in which eigenvalues are measured.
HALF_PRECISION = 4.0


class Sensitivity:
    """The eigenvalues that the schedule sees: measured when a drop is due and the budget allows it.

    Args:
        inventory: Of the model in training; only blocks that hold a layer to quantize are measured.
        config: What to measure.
        seed: Of the start vectors.

    Raises:
        MoQError: There is nothing to measure; see `Inventory.layer_blocks`.

    Attributes:
        blocks: Block name to its parameters.
        values: Block name to the eigenvalue over the largest, 0 to 1; empty before the first measurement.
        eigenvalues: Block name to the magnitude of the eigenvalue itself.
        seconds: Time that measuring took, in this process.
        loss: Gives the scalar mean loss of the model over a batch of `samples`; by default that in the model's output.
    """

    def __init__(self, inventory: Inventory, config: EigenvalueConfig, seed: int = 0) -> None:
        self.model, self.config, self.seed = inventory.model, config, seed
        self.loss: Loss = model_loss
        found = inventory.layer_blocks(config.layer_name, config.layer_num)
        holding = {name for name in found if any(is_below(layer, name) for layer in inventory.scheduled)}
        self.blocks = {name: parameters for name, parameters in found.items() if name in holding}
        if not self.blocks:
            raise MoQError(f"eigenvalue: no block has a quantized layer; the blocks are {', '.join(found)}")
        self.values: dict[str, float] = {}
        self.eigenvalues: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(config.num_samples, across_steps=not is_distributed())
        # In units of one training example; without `plan` there is no limit.
        self._per_step, self._total = math.inf, math.inf
        self._spent = 0.0
        self._products = float(min(config.max_iter, FIRST_PRODUCTS[config.method]))
        # The examples that a measurement of this run asks for.
        self._rows, self._measured_at = 0, 0
        self._checked = False
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def plan(self, total_steps: int, rows_per_step: float, half_precision: bool = False) -> None:
        """Set how long the run is, so that the budget can be kept.

        Args:
            total_steps: Optimizer steps of the whole run.
            rows_per_step: Training examples per optimizer step and process.
            half_precision: Whether training computes in bf16 or fp16; measuring is in float32.

        Raises:
            MoQError: The parameters are sharded.
        """
        if any(is_sharded(p) for parameters in self.blocks.values() for p in parameters):
            raise MoQError("eigenvalue: sharded parameters (FSDP) cannot be measured; leave eigenvalue.enabled out")
        self._per_step = rows_per_step / (HALF_PRECISION if half_precision else 1.0)
        self._total = total_steps * self._per_step * self.config.max_overhead

    def summary(self) -> str:
        """One line: what is measured and what the budget allows."""
        rows = self._first_rows()
        share = self._cost(rows, rows <= CHUNK) / self._total * self.config.max_overhead
        return (
            f"eigenvalues of {len(self.blocks)} blocks ({next(iter(self.blocks))}, ...) over up to {rows} examples "
            f"when a drop is due: about {share:.3f} of the run's time for the first measurement, "
            f"more of them while max_overhead {self.config.max_overhead:.3g} allows"
        )

    def is_due(self, schedule: PrecisionSchedule) -> bool:
        """Whether the coming step of the schedule wants values measured now.

        The last multiple of `gas_boundary_resolution` steps before a drop; the drop itself if there is no value yet.
        """
        resolution = self.config.gas_boundary_resolution
        on_grid = (schedule.steps + 1) % resolution == 0
        ahead = schedule.drops_ahead(resolution if on_grid else 1) if on_grid or not self.values else ()
        return any(name in self.blocks for name in ahead)

    def check(self) -> None:
        """Try on two examples whether the loss can be measured; once, as soon as there are examples.

        Raises:
            MoQError: It cannot; see `check_second_derivative`.
        """
        few = [part_of(batch, 0, 2) for batch in self.samples.batches(1)]
        if self._checked or not few:
            return
        self._checked = True
        with measuring(self.model, self.blocks) as blocks:
            first = next(iter(blocks.values()))
            check_second_derivative(self._closure(few[0], 1.0), first, finite_difference=self.config.finite_difference)

    def update(self, schedule: PrecisionSchedule) -> None:
        """Measure, or keep the values of before where the budget is spent, and say which.

        Args:
            schedule: Before its coming step.

        Raises:
            MoQError: There are no samples, or the loss is not a scalar that depends on the blocks.
        """
        step = schedule.steps + 1
        self._rows = self._rows or self._first_rows()
        batches = self.samples.batches(self._rows)
        rows = sum(map(rows_of, batches))
        allowed = step * self._per_step * self.config.max_overhead
        # Ranks, which may hold unequal batches, must agree on whether to measure, on what it cost, and on the values.
        (cost,) = mean_over_ranks([self._cost(rows, len(batches) == 1)], self.device)
        if self.values and self._spent + cost > allowed:
            logger.info(
                "step %d: eigenvalues of step %d used again, measuring would exceed max_overhead %.3g",
                step,
                self._measured_at,
                self.config.max_overhead,
            )
            return
        if not batches:
            raise MoQError("eigenvalues: no training example was seen before the first drop")
        self._warn_of_few(rows, step)
        start = time.perf_counter()
        results = self._measure(batches)
        self._take(results, rows, len(batches) == 1)
        self._measured_at = step
        self._warn_about(results)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        log = logger.info if self.config.verbose else logger.debug
        log(
            "step %d: eigenvalues over %d examples, %d products, %.1f s: %s",
            step,
            rows,
            sum(found.num_products for found in results.values()),
            elapsed,
            ", ".join(f"{name} {self.values[name]:.2f} ({self.eigenvalues[name]:.3g})" for name in self.blocks),
        )

    def _take(self, results: Mapping[str, Eigenvalue], rows: int, one_batch: bool) -> None:
        """Keep what all ranks found, and count what it cost."""
        means = mean_over_ranks([abs(found.value) for found in results.values()], self.device)
        if any(map(math.isfinite, means)):
            products = sum(found.num_products for found in results.values())
            (self._products,) = mean_over_ranks([products / len(results)], self.device)
            self._spent += mean_over_ranks([self._cost(rows, one_batch)], self.device)[0]
        self.eigenvalues = dict(zip(results, means, strict=True))
        self.values = normalize(self.eigenvalues)

    def report(self, elapsed: float) -> None:
        """Log what share of `elapsed` seconds measuring took."""
        share = self.seconds / elapsed
        over = share > self.config.max_overhead
        logger.log(
            logging.WARNING if over else logging.INFO,
            "%seigenvalues took %.1f of %.1f s, %.3f of the run's time%s",
            "moq_hf: " if over else "",
            self.seconds,
            elapsed,
            share,
            f", more than max_overhead {self.config.max_overhead:.3g}" if over else "",
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON types."""
        return {
            "eigenvalues": {k: None if math.isnan(v) else v for k, v in self.eigenvalues.items()},
            "spent": self._spent,
            "products": self._products,
            "rows": self._rows,
            "measured_at": self._measured_at,
            "samples": self.samples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            MoQError: Its samples are damaged.
        """
        self.eigenvalues = {k: math.nan if v is None else v for k, v in state["eigenvalues"].items()}
        self.values = normalize(self.eigenvalues) if self.eigenvalues else {}
        self._spent, self._products = state["spent"], state["products"]
        self._rows, self._measured_at = state["rows"], state["measured_at"]
        self.samples.load_state_dict(state["samples"], self.device)

    def _first_rows(self) -> int:
        wanted = self.config.num_samples
        while wanted > MIN_ROWS and self._cost(wanted, wanted <= CHUNK) > self._total:
            wanted -= 1
        return wanted

    def _cost(self, rows: int, one_batch: bool) -> float:
        """Of one measurement, in training examples."""
        products = self._products * len(self.blocks)
        if self.config.finite_difference:
            return rows * DIFFERENCE_COST * products
        # One batch's graph serves all products, those of several are made again for each round of products.
        graphs = 1.0 if one_batch else self._products
        return rows * (GRAPH_COST * graphs + PRODUCT_COST * products)

    def _closure(self, batch: Inputs, weight: float) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            with repeatable(self.model):
                return self.loss(self.model, _to_float32(batch, self.device)) * weight

        return evaluate

    def _measure(self, batches: list[Inputs]) -> dict[str, Eigenvalue]:
        rows = [rows_of(batch) for batch in batches]
        # The mean over examples, whatever the sizes of the batches.
        weights = [size * len(rows) / sum(rows) for size in rows]
        config = self.config
        with measuring(self.model, self.blocks) as blocks:
            return block_eigenvalues(
                [self._closure(batch, weight) for batch, weight in zip(batches, weights, strict=True)],
                blocks,
                method=config.method,
                max_iter=config.max_iter,
                tol=config.tol,
                stability=config.stability,
                finite_difference=config.finite_difference,
                seed=self.seed,
            )

    def _warn_of_few(self, rows: int, step: int) -> None:
        if 2 * rows < self._rows and "few" not in self._warned:
            self._warned.add("few")
            logger.warning(
                "moq_hf: step %d: eigenvalues over %d examples, where %d were wanted: there were no more yet, or those "
                "of earlier steps could not be kept (several processes, more than 1 MiB, batches that cannot be cut)",
                step,
                rows,
                self._rows,
            )

    def _warn_about(self, results: Mapping[str, Eigenvalue]) -> None:
        odd = {name for name, value in self.eigenvalues.items() if not math.isfinite(value)}
        self._warn("is not finite: the largest finite one is used, 1 for all if there is none", odd)
        odd = {name for name, found in results.items() if found.reason == "max_iter"}
        self._warn(f"is not within tol after max_iter {self.config.max_iter} products", odd)

    def _warn(self, what: str, blocks: set[str]) -> None:
        new = [name for name in self.blocks if name in blocks and f"{what} {name}" not in self._warned]
        self._warned |= {f"{what} {name}" for name in new}
        if new:
            logger.warning("moq_hf: the eigenvalue of %s %s", ", ".join(new), what)


def _to_float32(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    floating = {key for key, value in moved.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {key: value.float() if key in floating else value for key, value in moved.items()}
