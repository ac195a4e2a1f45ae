"""When a run measures the sensitivity of its blocks, on which training examples, and at what share of its time."""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..eigen import NOT_UNDER_ENGINES, block_eigenvalues, check_second_derivative
from ..errors import MoQError
from ..model.convert import quant_layers
from ..model.inventory import Inventory
from ..names import is_below
from ..processes import device_of, is_apart, is_distributed, is_sharded, largest_over_ranks, mean_over_ranks
from ..quant_linear import QuantLayer
from ..schedule import PrecisionSchedule
from .divergence import Costs, divergences, finite_costs, logits_of
from .measuring import at_bits, is_fsdp2, measuring, repeatable
from .samples import CHUNK, Batch, Samples, part_of, rows_of

logger = logging.getLogger(__name__)

# The scalar mean loss of a model over a batch, given as the keyword arguments of its forward pass.
Loss = Callable[[nn.Module, Batch], Tensor]

# In units of the forward and backward pass of one training example; see docs/evidence/eigenvalues.md. They decide what
# the budget allows: the clock would let two runs of the same seed differ.
GRAPH_COST, PRODUCT_COST, FORWARD_COST = 1.0, 0.6, 0.4
# Products a block takes early in training, where it takes most.
FIRST_PRODUCTS = {"lanczos": 11, "power": 23}
# However small the budget is, fewer examples would say nothing.
MIN_ROWS = 8
# A half-precision training step is that much faster than the same in float32, in which sensitivity is measured.
HALF_PRECISION = 4.0


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


def model_loss(model: nn.Module, inputs: Batch) -> Tensor:
    """The loss that the model itself gives for a batch: under its name in the output, or the first of a tuple.

    Raises:
        MoQError: It gives none; says what to do.
    """
    output: Any = model(**inputs)
    first = output[0] if isinstance(output, tuple | list) and output else None
    loss = output.get("loss") if isinstance(output, Mapping) else first
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise MoQError(
        "eigenvalue: the model's output has no loss, since the Trainer computes it (label smoothing, "
        "compute_loss_func, an own compute_loss): use MoQTrainer, or give MoQCallback the function loss(model, inputs)"
    )


class Sensitivity:
    """What the schedule knows of its blocks: measured when a drop is due and the budget of time allows it.

    Args:
        inventory: Of the model in training; only blocks that hold a layer to quantize are measured.
        config: What to measure, and how.
        units: Block name to its layers, to compare these blocks by the weights of their layers alone. None: entries of
            the layer list, with all their parameters.

    Raises:
        MoQError: There is nothing to measure; see `Inventory.layer_blocks`.

    Attributes:
        blocks: Block name to its parameters.
        layers: Block name to the names of its layers.
        eigenvalues: Block name to the magnitude of its eigenvalue, or to its divergence at its next bits; empty before
            the first measurement.
        seconds: Time that measuring took, in this process.
        loss: Gives the scalar mean loss of the model over a batch of `samples`; by default that in the model's output.
    """

    def __init__(
        self, inventory: Inventory, config: MoQConfig, units: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.model, self.config = inventory.model, config.eigenvalue
        self.seed, self.measure = config.seed, config.measure
        self.loss: Loss = model_loss
        self.blocks, self.layers = _blocks_of(inventory, config, units)
        self.is_apart = any(is_apart(p) for own in self.blocks.values() for p in own)
        self.device = device_of(next(self.model.parameters()))
        self.eigenvalues: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(self.config.num_samples, across_steps=not is_distributed())
        # In units of one training example; without `plan` there is no limit.
        self._per_step, self._total = math.inf, math.inf
        self._spent = 0.0
        # Products that a block takes, as in the last measurement.
        self._products = float(min(self.config.max_iter, FIRST_PRODUCTS[self.config.method]))
        # The examples that a measurement of this run asks for.
        self._rows = 0
        self._checked = False
        self._warned: set[str] = set()

    @property
    def values(self) -> dict[str, float]:
        """Block name to its magnitude over the largest, 0 to 1."""
        return normalize(self.eigenvalues)

    def plan(self, total_steps: int, rows_per_step: float, half_precision: bool = False) -> None:
        """Set how long the run is, so that the budget can be kept.

        Args:
            total_steps: Optimizer steps of the whole run.
            rows_per_step: Training examples per optimizer step and process.
            half_precision: Whether training computes in bf16 or fp16; measuring is in float32.

        Raises:
            MoQError: An engine takes the parameters apart in a way that cannot be measured.
        """
        if self.measure == "eigenvalue" and self.is_apart:
            raise MoQError(NOT_UNDER_ENGINES)
        gathered = {id(p) for module in self.model.modules() if is_fsdp2(module) for p in module.parameters()}
        if any(is_sharded(p) and id(p) not in gathered for own in self.blocks.values() for p in own):
            raise MoQError(
                f"{self.measure}: FSDP2 gathers the weights for a wrapper of the model, that of torch_compile: "
                "leave torch_compile out, or call model.compile() yourself"
            )
        self._per_step = rows_per_step / (HALF_PRECISION if half_precision else 1.0)
        self._total = total_steps * self._per_step * self.config.max_overhead

    def summary(self, choices: int | None = None) -> str:
        """One line: what is measured first and what the budget of time allows.

        Args:
            choices: How many numbers of bits a block may have, where they are chosen first.
        """
        rows = self._first_rows(choices or 1)
        when = "when a drop is due" if choices is None else "when the bits are chosen"
        return (
            f"{self.measure}s of {len(self.blocks)} blocks over up to {rows} examples {when}, in at most "
            f"{self.config.max_overhead:.3g} of the run's time"
        )

    def is_due(self, schedule: PrecisionSchedule) -> bool:
        """Whether the coming step of the schedule wants values measured now.

        The last multiple of `gas_boundary_resolution` steps before a drop; the drop itself if there is no value yet.
        """
        resolution = self.config.gas_boundary_resolution
        on_grid = (schedule.steps + 1) % resolution == 0
        ahead = schedule.drops_ahead(resolution if on_grid else 1) if on_grid or not self.eigenvalues else ()
        return any(name in self.blocks for name in ahead)

    def check(self) -> None:
        """Try on two examples whether the model can be measured; once, as soon as there are examples.

        Raises:
            MoQError: It cannot; see `check_second_derivative` and `logits_of`.
        """
        if self._checked or not self.samples.batches(1):
            return
        self._checked = True
        few = part_of(self._batches(1)[0][0], 0, 2)
        if self.measure == "divergence":
            with measuring(self.model):
                logits_of(self.model, few)
            return
        with measuring(self.model, self.blocks) as blocks:
            first = next(iter(blocks.values()))
            check_second_derivative(self._losses([few])[0], first)

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
        if self.eigenvalues and self._spent + self._cost(rows) > step * self._per_step * self.config.max_overhead:
            again = f"step {step}: the last {self.measure}s are used again"
            logger.info("%s, measuring would exceed max_overhead %.3g", again, self.config.max_overhead)
            return
        start = time.perf_counter()
        if self.measure == "eigenvalue":
            self.eigenvalues = self._eigenvalues(batches)
        else:
            levels = {name: [bits] for name, bits in schedule.next_bits.items() if name in self.blocks}
            found = self._divergences(batches, levels)
            self.eigenvalues = {name: cost for name, own in found.items() for cost in own.values()}
        self._count(rows, start)
        words = ", ".join(f"{name} {value:.2f} ({self.eigenvalues[name]:.3g})" for name, value in self.values.items())
        level = logging.INFO if self.config.verbose else logging.DEBUG
        logger.log(level, "step %d: %ss over %d examples: %s", step, self.measure, rows, words)

    def costs(self, choices: Sequence[int]) -> Costs:
        """What each block costs at each of some bits, with all others as they are now.

        By `divergence` that is measured. By `eigenvalue` it is predicted to second order, for the worst change of the
        block's weights: its eigenvalue times the squared length of their change by rounding, halved.

        It counts for the budget of time, with fewer examples where that is small.

        Raises:
            MoQError: There are no samples, the model cannot be measured, or no cost is finite.
        """
        start = time.perf_counter()
        batches, rows = self._batches(self._first_rows(len(choices)))
        if self.measure == "eigenvalue":
            found = self._predicted(self._eigenvalues(batches), choices)
        else:
            found = self._divergences(batches, dict.fromkeys(self.blocks, choices))
        self._count(rows, start, len(choices))
        if not any(math.isfinite(cost) for own in found.values() for cost in own.values()):
            raise MoQError(
                f"quantize_bits.target_bits: the {self.measure} of no block is finite (NaN or Inf), so the bits cannot "
                "be chosen by it; look at the model's loss in evaluation mode, or set another sensitivity.measure"
            )
        return finite_costs(found)

    def report(self, elapsed: float) -> None:
        """Log what share of `elapsed` seconds measuring took."""
        share, limit = self.seconds / elapsed, self.config.max_overhead
        level = logging.WARNING if share > limit else logging.INFO
        what = f"{self.measure}s took {share:.3f} of the run's time, {self.seconds:.1f} s"
        logger.log(level, "moq_hf: %s; max_overhead is %.3g", what, limit)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in JSON types."""
        return {
            "eigenvalues": {k: None if math.isnan(v) else v for k, v in self.eigenvalues.items()},
            "spent": self._spent,
            "products": self._products,
            "rows": self._rows,
            "samples": self.samples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            MoQError: Its samples are damaged.
        """
        self.eigenvalues = {k: math.nan if v is None else v for k, v in state["eigenvalues"].items()}
        self._spent, self._products = state["spent"], state["products"]
        self._rows = state["rows"]
        self.samples.load_state_dict(state["samples"], self.device)

    def _first_rows(self, levels: int = 1) -> int:
        rows = self.config.num_samples
        while rows > MIN_ROWS and self._cost(rows, levels) > self._total - self._spent:
            rows -= 1
        return rows

    def _cost(self, rows: float, levels: int = 1) -> float:
        """What one measurement takes, in training examples, with so many numbers of bits tried for each block."""
        blocks, products = len(self.blocks), self._products
        if self.measure == "divergence":
            return rows * FORWARD_COST * (1 + levels * blocks)
        # The graph of one batch serves all products, those of several are made again for each round of them.
        graphs = 1.0 if rows <= CHUNK else products
        return rows * (GRAPH_COST * graphs + PRODUCT_COST * products * blocks)

    def _count(self, rows: float, start: float, levels: int = 1) -> None:
        """Count a measurement that began at `start`."""
        self._spent += self._cost(rows, levels)
        self.seconds += time.perf_counter() - start

    def _batches(self, rows: int) -> tuple[list[Batch], float]:
        """The latest `rows` examples on the model's device, and how many there are, in the mean over the ranks.

        They are in float32 unless an engine has its own precision; it gathers weights for each batch, so that all ranks
        must have as many of them.

        Raises:
            MoQError: There are none.
        """
        batches = [_moved(batch, self.device, not self.is_apart) for batch in self.samples.batches(rows)]
        if self.is_apart:
            least = -largest_over_ranks(torch.tensor([-len(batches)], device=self.device))
            batches = batches[: int(least)]
        if not batches:
            raise MoQError(f"{self.measure}s: no training example was seen before they are measured")
        # Ranks must agree on whether to measure, and on what it cost.
        return batches, mean_over_ranks([float(sum(map(rows_of, batches)))], self.device)[0]

    def _losses(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """The loss over each batch, weighted so that their mean is that over examples."""
        weight = len(batches) / sum(map(rows_of, batches))
        return [functools.partial(self._loss, batch, weight * rows_of(batch)) for batch in batches]

    def _loss(self, batch: Batch, weight: float) -> Tensor:
        with repeatable():
            return self.loss(self.model, batch) * weight

    def _eigenvalues(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The magnitude of each block's eigenvalue, the same in all ranks."""
        config, losses = self.config, self._losses(batches)
        with measuring(self.model, self.blocks) as blocks:
            options = {name: getattr(config, name) for name in ("method", "max_iter", "tol", "stability")}
            found = block_eigenvalues(losses, blocks, seed=self.seed, **options)
        unfinished = [name for name, one in found.items() if one.reason == "max_iter"]
        self._warn(f"is not within tol after max_iter {config.max_iter} products", unfinished)
        products = sum(one.num_products for one in found.values()) / len(found)
        magnitudes = [abs(one.value) for one in found.values()]
        self._products, *values = mean_over_ranks([products, *magnitudes], self.device)
        agreed = dict(zip(found, values, strict=True))
        self._warn_of_infinite(agreed)
        return agreed

    def _predicted(self, values: Mapping[str, float], choices: Sequence[int]) -> Costs:
        """Each block's eigenvalue times the squared change of its weights at each of some bits, halved."""
        largest = max(filter(math.isfinite, values.values()), default=math.nan)
        found: Costs = {}
        for name, layers in self._quantized_layers().items():
            value = values[name] if math.isfinite(values[name]) else largest
            found[name] = {}
            for bits in choices:
                with at_bits(layers, bits), torch.no_grad():
                    found[name][bits] = value * sum(map(_squared_change, layers)) / 2
        return found

    def _divergences(self, batches: Sequence[Batch], levels: Mapping[str, Sequence[int]]) -> Costs:
        """The divergence of each block at each of its levels of bits, the same in all ranks."""
        with measuring(self.model):
            found = divergences(self.model, batches, self._quantized_layers(), levels)
        values = iter(mean_over_ranks([cost for own in found.values() for cost in own.values()], self.device))
        agreed = {name: {bits: next(values) for bits in own} for name, own in found.items()}
        self._warn_of_infinite({name: sum(own.values()) for name, own in agreed.items()})
        return agreed

    def _quantized_layers(self) -> dict[str, list[QuantLayer]]:
        layers = quant_layers(self.model)
        return {name: [layers[layer] for layer in own] for name, own in self.layers.items()}

    def _warn_of_infinite(self, values: Mapping[str, float]) -> None:
        odd = [name for name, value in values.items() if not math.isfinite(value)]
        self._warn("is not finite: the largest finite one is used, 1 for all if there is none", odd)

    def _warn(self, what: str, blocks: Sequence[str]) -> None:
        warning = f"moq_hf: the {self.measure} of {', '.join(blocks)} {what}"
        if blocks and warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s", warning)


def _blocks_of(
    inventory: Inventory, config: MoQConfig, units: Mapping[str, Sequence[str]] | None
) -> tuple[dict[str, list[nn.Parameter]], dict[str, list[str]]]:
    """The parameters and the layers of the blocks to measure: see `Sensitivity`.

    Raises:
        MoQError: There is nothing to measure.
    """
    if units is not None:
        own = dict(inventory.parameters())
        names = {layer: layer if layer in inventory.experts else f"{layer}.weight" for layer in inventory.scheduled}
        weights = {block: [own[names[layer]] for layer in unit] for block, unit in units.items()}
        return weights, {block: list(unit) for block, unit in units.items()}
    blocks = inventory.layer_blocks(config.eigenvalue.layer_name, config.eigenvalue.layer_num)
    layers = {block: [layer for layer in inventory.scheduled if is_below(layer, block)] for block in blocks}
    layers = {block: below for block, below in layers.items() if below}
    if not layers:
        raise MoQError(f"eigenvalue: no block has a quantized layer; the blocks are {', '.join(blocks)}")
    return {block: blocks[block] for block in layers}, layers


def _squared_change(layer: QuantLayer) -> float:
    """The squared length of the change of a layer's weight by rounding."""
    change = layer.quantized_copy(torch.float32) - layer.float_weight.float()
    return float(change.square().sum(dtype=torch.float64))


def _moved(batch: Batch, device: torch.device, in_float32: bool) -> Batch:
    moved = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            value = value.to(device)
            value = value.float() if in_float32 and value.is_floating_point() else value
        moved[name] = value
    return moved
