"""When a run measures the sensitivity of its blocks, on which training examples, and at what share of its time."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# In units of the forward and backward pass of one training example; docs/evidence/eigenvalues.md. They decide what
# the budget allows: the clock would let two runs of the same seed differ.
GRAPH_COST, PRODUCT_COST, DIFFERENCE_COST, FORWARD_COST = 1.0, 0.6, 1.1, 0.4
# Differences that try out whether they mean something.
TRIED = 2
# Products a block takes early in training, where it takes most.
FIRST_PRODUCTS = {"lanczos": 11, "power": 23}
# However small the budget is, fewer examples would say nothing.
MIN_ROWS = 8
# A half-precision training step is that much faster than the same in float32, in which sensitivity is measured.
HALF_PRECISION = 4.0

_NOT_FINITE = "is not finite: the largest finite one is used, 1 for all if there is none"


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
        values: Block name to the eigenvalue, or the divergence at the block's next bits, over the largest, 0 to 1;
            empty before the first measurement.
        eigenvalues: Block name to the magnitude itself.
        seconds: Time that measuring took, in this process.
        loss: Gives the scalar mean loss of the model over a batch of `samples`; by default that in the model's output.
    """

    def __init__(
        self, inventory: Inventory, config: MoQConfig, units: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.model, self.config, self.seed, self.measure = (
            inventory.model,
            config.eigenvalue,
            config.seed,
            config.measure,
        )
        self.loss: Loss = model_loss
        self.blocks, self.layers = _blocks_of(inventory, config, units)
        self.values: dict[str, float] = {}
        self.eigenvalues: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(self.config.num_samples, across_steps=not is_distributed())
        # In units of one training example; without `plan` there is no limit.
        self._per_step, self._total = math.inf, math.inf
        self._spent = 0.0
        self._products = float(min(self.config.max_iter, FIRST_PRODUCTS[self.config.method]))
        # The examples that a measurement of this run asks for.
        self._rows, self._measured_at = 0, 0
        self._checked = False
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return device_of(next(self.model.parameters()))

    @property
    def is_apart(self) -> bool:
        """Whether FSDP2 or ZeRO-3 takes apart what is measured."""
        return any(is_apart(p) for own in self.blocks.values() for p in own)

    @property
    def _named(self) -> str:
        """What is measured, in words."""
        return f"{self.measure}s"

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
                f"{self._named}: FSDP2 gathers the weights for a wrapper of the model, that of torch_compile: "
                "leave torch_compile out, or call model.compile() yourself"
            )
        self._per_step = rows_per_step / (HALF_PRECISION if half_precision else 1.0)
        self._total = total_steps * self._per_step * self.config.max_overhead

    def summary(self, choices: int | None = None) -> str:
        """One line: what is measured first and what the budget of time allows.

        Args:
            choices: How many numbers of bits a block may have, where they are chosen first.
        """
        levels = 1 if choices is None else choices
        rows = self._first_rows(levels)
        share = self._cost(rows, rows <= CHUNK, levels) / self._total * self.config.max_overhead
        when = "when a drop is due" if choices is None else "when the bits are chosen"
        return (
            f"{self._named} of {len(self.blocks)} blocks ({next(iter(self.blocks))}, ...) over up to "
            f"{rows} examples {when}: about {share:.3f} of the run's time for the first measurement, "
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
        """Try on two examples whether the model can be measured; once, as soon as there are examples.

        Raises:
            MoQError: It cannot; see `check_second_derivative` and `logits_of`.
        """
        few = [] if self._checked else [part_of(batch, 0, 2) for batch in self._batches(1)]
        if not few:
            return
        self._checked = True
        if self.measure == "divergence":
            with measuring(self.model):
                logits_of(self.model, few[0])
            return
        with measuring(self.model, self.blocks) as blocks:
            first = next(iter(blocks.values()))
            check_second_derivative(self._losses(few[:1]), first, finite_difference=self.config.finite_difference)

    def update(self, schedule: PrecisionSchedule) -> None:
        """Measure, or keep the values of before where the budget is spent, and say which.

        Args:
            schedule: Before its coming step.

        Raises:
            MoQError: There are no samples, or the model cannot be measured.
        """
        step = schedule.steps + 1
        self._rows = self._rows or self._first_rows()
        batches = self._batches(self._rows)
        rows = sum(map(rows_of, batches))
        allowed = step * self._per_step * self.config.max_overhead
        # Ranks, which may hold unequal batches, must agree on whether to measure, on what it cost, and on the values.
        (cost,) = mean_over_ranks([self._cost(rows, len(batches) == 1)], self.device)
        if self.values and self._spent + cost > allowed:
            logger.info(
                "step %d: %s of step %d used again, measuring would exceed max_overhead %.3g",
                step,
                self._named,
                self._measured_at,
                self.config.max_overhead,
            )
            return
        if not batches:
            raise MoQError(f"{self._named}: no training example was seen before the first drop")
        self._warn_of_few(rows, self._rows, step)
        before, products = self.seconds, 0
        with self._counted(batches):
            if self.measure == "eigenvalue":
                self.eigenvalues, products = self._eigenvalues(batches)
            else:
                levels = {name: [bits] for name, bits in schedule.next_bits.items() if name in self.blocks}
                found = self._divergences(batches, levels)
                self.eigenvalues = {name: cost for name, own in found.items() for cost in own.values()}
        self.values = normalize(self.eigenvalues)
        self._measured_at = step
        log = logger.info if self.config.verbose else logger.debug
        log(
            "step %d: %s over %d examples, %d products, %.1f s: %s",
            step,
            self._named,
            rows,
            products,
            self.seconds - before,
            ", ".join(f"{name} {value:.2f} ({self.eigenvalues[name]:.3g})" for name, value in self.values.items()),
        )

    def costs(self, step: int, choices: Sequence[int]) -> Costs:
        """What each block costs at each of some bits, with all others as they are now.

        By `divergence` that is measured. By `eigenvalue` it is predicted to second order, for the worst change of the
        block's weights: its eigenvalue times the squared length of their change by rounding, halved.

        It counts for the budget of time, with fewer examples where that is small.

        Args:
            step: Optimizer steps taken, for messages.
            choices: Bits.

        Raises:
            MoQError: There are no samples, the model cannot be measured, or no cost is finite.
        """
        wanted = self._first_rows(len(choices))
        batches = self._batches(wanted)
        rows = sum(map(rows_of, batches))
        if not batches:
            raise MoQError("quantize_bits.target_bits: no training example was seen before the bits are chosen")
        self._warn_of_few(rows, wanted, step)
        with self._counted(batches, len(choices)):
            if self.measure == "eigenvalue":
                values = self._eigenvalues(batches)[0]
                largest = max(filter(math.isfinite, values.values()), default=math.nan)
                finite = {name: value if math.isfinite(value) else largest for name, value in values.items()}
                changes = self._squared_changes(choices)
                found = {name: {b: finite[name] * own[b] / 2 for b in choices} for name, own in changes.items()}
            else:
                found = self._divergences(batches, dict.fromkeys(self.blocks, choices))
        if not any(math.isfinite(cost) for own in found.values() for cost in own.values()):
            raise MoQError(
                f"quantize_bits.target_bits: the {self.measure} of no block is finite (NaN or Inf) over {rows} "
                "training examples, so the bits cannot be chosen by it; look at the model's loss in evaluation mode, "
                "or set sensitivity.measure to another one"
            )
        return finite_costs(found)

    def report(self, elapsed: float) -> None:
        """Log what share of `elapsed` seconds measuring took."""
        share = self.seconds / elapsed
        over = share > self.config.max_overhead
        logger.log(
            logging.WARNING if over else logging.INFO,
            "%s%s took %.1f of %.1f s, %.3f of the run's time%s",
            "moq_hf: " if over else "",
            self._named,
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

    def _first_rows(self, levels: int = 1) -> int:
        wanted, left = self.config.num_samples, self._total - self._spent
        while wanted > MIN_ROWS and self._cost(wanted, wanted <= CHUNK, levels) > left:
            wanted -= 1
        return wanted

    def _cost(self, rows: int, one_batch: bool, levels: int = 1) -> float:
        """What one measurement takes, in training examples.

        Args:
            rows: Training examples that it looks at.
            one_batch: Whether they are one batch, whose graph serves all products.
            levels: Numbers of bits that are tried for each block.
        """
        blocks, products = len(self.blocks), self._products
        if self.measure == "divergence":
            return rows * FORWARD_COST * (1 + levels * blocks)
        if self.config.finite_difference:
            return rows * DIFFERENCE_COST * (products + TRIED) * blocks
        # Graphs of several batches are made again for each round of products.
        graphs = 1.0 if one_batch else products
        return rows * (GRAPH_COST * graphs + PRODUCT_COST * products * blocks)

    @contextlib.contextmanager
    def _counted(self, batches: Sequence[Batch], levels: int = 1) -> Iterator[None]:
        """Count what is measured inside for the budget, and its time."""
        start = time.perf_counter()
        yield
        cost = self._cost(sum(map(rows_of, batches)), len(batches) == 1, levels)
        self._spent += mean_over_ranks([cost], self.device)[0]
        self.seconds += time.perf_counter() - start

    def _batches(self, rows: int) -> list[Batch]:
        """The latest `rows` examples on the model's device, in float32 unless an engine has its own precision.

        There are as many batches in each process where an engine gathers weights for each.
        """
        found = [_moved(batch, self.device, not self.is_apart) for batch in self.samples.batches(rows)]
        if not self.is_apart:
            return found
        least = -largest_over_ranks(torch.tensor([-len(found)], device=self.device))
        return found[: int(least)]

    def _losses(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """The loss over each batch, weighted so that their mean is that over examples."""
        total = sum(map(rows_of, batches))

        def closure(batch: Batch) -> Callable[[], Tensor]:
            weight = rows_of(batch) * len(batches) / total

            def evaluate() -> Tensor:
                with repeatable(self.model):
                    return self.loss(self.model, batch) * weight

            return evaluate

        return [closure(batch) for batch in batches]

    def _eigenvalues(self, batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
        """The magnitude of each block's eigenvalue, the same in all ranks, and the products that they took."""
        config, losses = self.config, self._losses(batches)
        with measuring(self.model, self.blocks) as blocks:
            for parameters in blocks.values() if config.finite_difference else ():
                check_second_derivative(losses, parameters, finite_difference=True)
            found = block_eigenvalues(
                losses,
                blocks,
                method=config.method,
                max_iter=config.max_iter,
                tol=config.tol,
                stability=config.stability,
                finite_difference=config.finite_difference,
                seed=self.seed,
            )
        unfinished = {name for name, one in found.items() if one.reason == "max_iter"}
        self._warn(f"is not within tol after max_iter {config.max_iter} products", unfinished)
        products = sum(one.num_products for one in found.values())
        numbers = [products / len(found), *(abs(one.value) for one in found.values())]
        self._products, *values = mean_over_ranks(numbers, self.device)
        self._warn(_NOT_FINITE, {name for name, value in zip(found, values, strict=True) if not math.isfinite(value)})
        return dict(zip(found, values, strict=True)), products

    def _divergences(self, batches: Sequence[Batch], levels: Mapping[str, Sequence[int]]) -> Costs:
        """The divergence of each block at each of its levels of bits, the same in all ranks."""
        layers = self._quantized_layers()
        with measuring(self.model):
            found = divergences(self.model, batches, layers, levels)
        values = iter(mean_over_ranks([cost for own in found.values() for cost in own.values()], self.device))
        agreed = {name: {bits: next(values) for bits in own} for name, own in found.items()}
        odd = {name for name, own in agreed.items() if not all(map(math.isfinite, own.values()))}
        if odd != set(agreed):
            self._warn(_NOT_FINITE, odd)
        return agreed

    def _squared_changes(self, choices: Iterable[int]) -> Costs:
        """The squared length of the change of each block's weights at each of some bits."""
        found: Costs = {}
        for name, layers in self._quantized_layers().items():
            found[name] = {}
            for bits in choices:
                with at_bits(layers, bits), torch.no_grad():
                    found[name][bits] = sum(map(_squared_change, layers))
        return found

    def _quantized_layers(self) -> dict[str, list[QuantLayer]]:
        layers = quant_layers(self.model)
        return {name: [layers[layer] for layer in own] for name, own in self.layers.items()}

    def _warn_of_few(self, rows: int, wanted: int, step: int) -> None:
        if 2 * rows < wanted and "few" not in self._warned:
            self._warned.add("few")
            logger.warning(
                "moq_hf: step %d: %s over %d examples, where %d were wanted: there were no more yet, or those "
                "of earlier steps could not be kept (several processes, more than 1 MiB, batches that cannot be cut)",
                step,
                self._named,
                rows,
                wanted,
            )

    def _warn(self, what: str, blocks: set[str]) -> None:
        new = [name for name in self.blocks if name in blocks and f"{what} {name}" not in self._warned]
        self._warned |= {f"{what} {name}" for name in new}
        if new:
            logger.warning("moq_hf: the %s of %s %s", self.measure, ", ".join(new), what)


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
