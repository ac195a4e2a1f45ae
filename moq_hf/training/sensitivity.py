"""When a run measures the sensitivity of its blocks, on which training examples, and at what share of its time."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..config import EigenvalueConfig, Measure
from ..eigen import Eigenvalue, block_eigenvalues, check_second_derivative
from ..errors import MoQError
from ..model.convert import quant_layers
from ..model.inventory import Inventory
from ..names import is_below
from ..processes import device_of, is_distributed, is_partitioned, is_sharded, largest_over_ranks, mean_over_ranks
from ..schedule import PrecisionSchedule
from ..trace import Trace, block_traces
from .distillation import labels_at_logits, logits_in, logits_loss, takes
from .measurable import check_measurable
from .measures import (
    FIRST_PRODUCTS,
    MEASURED,
    VECTORS,
    Costs,
    Weight,
    at_bits,
    loss_rises,
    predicted,
    settled,
    squared_changes,
    switched,
    work,
)
from .measuring import gather_again, measuring, repeatable
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


_NOT_FINITE = "is not finite: the largest finite one is used, 1 for all if there is none"
# What the measures are called where they were taken.
_PLURAL = {"eigenvalue": "eigenvalues", "trace": "traces", "loss": "losses", "divergence": "divergences"}
# However small the budget is, fewer examples would say nothing.
MIN_ROWS = 8
# A half-precision training step is that much faster than the same in float32, in which eigenvalues are measured.
HALF_PRECISION = 4.0
# Numbers of all the answers that the divergence compares with, half a gigabyte; of a large vocabulary not every token.
KEPT_LOGITS = 1 << 26


# The scalar mean loss of a model over a batch, given as the keyword arguments of its forward pass.
Loss = Callable[[nn.Module, Inputs], Tensor]


def model_loss(model: nn.Module, inputs: Inputs) -> Tensor:
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


class Found(NamedTuple):
    """What a block's sensitivity is, and what it took; an `Eigenvalue` says as much."""

    value: float
    reason: str
    num_products: int


class Sensitivity:
    """What the schedule knows of its blocks: measured when a drop is due and the budget of time allows it.

    Args:
        inventory: Of the model in training; only blocks that hold a layer to quantize are measured.
        config: How to measure.
        seed: Of the random vectors.
        measure: What to measure.
        units: Block name to its layers, to compare these blocks by the weights of their layers alone. None: entries of
            the layer list, for `eigenvalue` with all their parameters.

    Raises:
        MoQError: There is nothing to measure; see `Inventory.layer_blocks`.

    Attributes:
        blocks: Block name to its parameters.
        layers: Block name to the names of its layers.
        values: Block name to the eigenvalue, or what the measure gives at the block's next bits, over the largest, 0 to
            1; empty before the first measurement.
        eigenvalues: Block name to the magnitude itself.
        seconds: Time that measuring took, in this process.
        loss: Gives the scalar mean loss of the model over a batch of `samples`; by default that in the model's output.
    """

    def __init__(
        self,
        inventory: Inventory,
        config: EigenvalueConfig,
        seed: int = 0,
        measure: Measure = "eigenvalue",
        units: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.model, self.config, self.seed, self.measure = inventory.model, config, seed, measure
        self.loss: Loss = model_loss
        self.blocks, self.layers = _blocks_of(inventory, config, units, measure == "eigenvalue")
        self.values: dict[str, float] = {}
        self.eigenvalues: dict[str, float] = {}
        self.seconds = 0.0
        self.samples = Samples(config.num_samples, across_steps=not is_distributed())
        # In units of one training example; without `plan` there is no limit.
        self._per_step, self._total = math.inf, math.inf
        self._spent = 0.0
        most = VECTORS if measure == "trace" else FIRST_PRODUCTS[config.method]
        self._products = float(min(config.max_iter, most))
        # The examples that a measurement of this run asks for.
        self._rows, self._measured_at = 0, 0
        self._checked = False
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return device_of(next(self.model.parameters()))

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards what is measured."""
        return any(is_sharded(p) for own in self.blocks.values() for p in own)

    @property
    def is_partitioned(self) -> bool:
        """Whether ZeRO-3 takes apart what is measured."""
        return any(is_partitioned(p) for own in self.blocks.values() for p in own)

    @property
    def differences(self) -> bool:
        """Whether products are differences of gradients: if the config says so, and of what is sharded."""
        return self.config.finite_difference or self.is_sharded

    def plan(self, total_steps: int, rows_per_step: float, half_precision: bool = False) -> None:
        """Set how long the run is, so that the budget can be kept.

        Args:
            total_steps: Optimizer steps of the whole run.
            rows_per_step: Training examples per optimizer step and process.
            half_precision: Whether training computes in bf16 or fp16; measuring is in float32.

        Raises:
            MoQError: An engine takes the parameters apart in a way that cannot be measured; see `check_measurable`.
        """
        check_measurable(self.model, self.blocks, _PLURAL[self.measure], self.measure not in MEASURED)
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
            f"{_PLURAL[self.measure]} of {len(self.blocks)} blocks ({next(iter(self.blocks))}, ...) over up to "
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
        """Try on two examples whether the loss can be measured; once, as soon as there are examples.

        Raises:
            MoQError: It cannot; see `check_second_derivative`. Or its answers are not to be had.
        """
        few = [] if self._checked else [part_of(batch, 0, 2) for batch in self._batches(1)]
        if not few:
            return
        self._checked = True
        with measuring(self.model, self.blocks) as blocks:
            if self.measure == "divergence":
                self._answers(few[0])
                return
            if self.measure == "loss":
                with torch.no_grad():
                    self._closure(few[0], 1.0)()
                return
            first = next(iter(blocks.values()))
            check_second_derivative([self._closure(few[0], 1.0)], first, finite_difference=self.differences)

    def update(self, schedule: PrecisionSchedule) -> None:
        """Measure, or keep the values of before where the budget is spent, and say which.

        Args:
            schedule: Before its coming step.

        Raises:
            MoQError: There are no samples, or the loss is not a scalar that depends on the blocks.
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
                _PLURAL[self.measure],
                self._measured_at,
                self.config.max_overhead,
            )
            return
        if not batches:
            raise MoQError(f"{_PLURAL[self.measure]}: no training example was seen before the first drop")
        self._warn_of_few(rows, self._rows, step)
        start = time.perf_counter()
        results = self._measure(batches, schedule.next_bits)
        self._take(results, rows, len(batches) == 1)
        self._measured_at = step
        self._warn_about(results)
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        log = logger.info if self.config.verbose else logger.debug
        log(
            "step %d: %s over %d examples, %d products, %.1f s: %s",
            step,
            _PLURAL[self.measure],
            rows,
            sum(found.num_products for found in results.values()),
            elapsed,
            ", ".join(f"{name} {value:.2f} ({self.eigenvalues[name]:.3g})" for name, value in self.values.items()),
        )

    def costs(self, step: int, choices: Sequence[int]) -> Costs:
        """What each block costs at each of some bits, with all others as they are now; see `measures`.

        It counts for the budget of time, with fewer examples where that is small.

        Args:
            step: Optimizer steps taken, for messages.
            choices: Bits.

        Raises:
            MoQError: There are no samples, or the loss is not a scalar that depends on the blocks.
        """
        levels = dict.fromkeys(self.blocks, tuple(choices))
        wanted = self._first_rows(len(choices))
        batches = self._batches(wanted)
        rows = sum(map(rows_of, batches))
        if not batches:
            raise MoQError("quantize_bits.target_bits: no training example was seen before the bits are chosen")
        self._warn_of_few(rows, wanted, step)
        start = time.perf_counter()
        found, products, odd = self._costs(batches, levels)
        numbers = [found[name][bits] for name in self.blocks for bits in choices]
        (self._products, lost, *numbers) = mean_over_ranks([products, odd is None, *numbers], self.device)
        if lost:
            raise MoQError(
                f"quantize_bits.target_bits: the {self.measure} of no block is finite (NaN or Inf) over {rows} "
                "training examples, so the bits cannot be chosen by it; look at the model's loss in evaluation mode, "
                "or set sensitivity.measure to another one"
            )
        self._warn(_NOT_FINITE, odd or set())
        self._spent += mean_over_ranks([self._cost(rows, len(batches) == 1, len(choices))], self.device)[0]
        self.seconds += time.perf_counter() - start
        rest = iter(numbers)
        return {name: {bits: next(rest) for bits in choices} for name in self.blocks}

    def _take(self, results: Mapping[str, Eigenvalue] | Mapping[str, Found], rows: int, one_batch: bool) -> None:
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
            "%s%s took %.1f of %.1f s, %.3f of the run's time%s",
            "moq_hf: " if over else "",
            _PLURAL[self.measure],
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
        """Of one measurement, at so many numbers of bits, in training examples."""
        return work(
            self.measure,
            rows=rows,
            one_batch=one_batch,
            products=self._products,
            blocks=len(self.blocks),
            levels=levels * len(self.blocks),
            finite_difference=self.differences,
        )

    def _batches(self, rows: int) -> list[Inputs]:
        """The latest `rows` examples, in as many batches in each process where an engine gathers weights for each."""
        batches = self.samples.batches(rows)
        if not (self.is_sharded or self.is_partitioned):
            return batches
        least = -largest_over_ranks(torch.tensor([-len(batches)], device=self.device))
        return batches[: int(least)]

    def _weights(self, batches: list[Inputs]) -> list[float]:
        """Of batches, so that their mean is that over examples, of all processes if FSDP2 sums them up."""
        rows = [rows_of(batch) for batch in batches]
        (total,) = mean_over_ranks([sum(rows)], self.device) if self.is_sharded else [sum(rows)]
        return [size * len(rows) / total for size in rows]

    def _closure(self, batch: Inputs, weight: float) -> Callable[[], Tensor]:
        def evaluate() -> Tensor:
            gather_again(self.model)
            with repeatable(self.model):
                return self.loss(self.model, _to_float32(batch, self.device)) * weight

        return evaluate

    def _losses(self, batches: list[Inputs]) -> list[Callable[[], Tensor]]:
        return [self._closure(batch, weight) for batch, weight in zip(batches, self._weights(batches), strict=True)]

    def _answers(self, batch: Inputs) -> dict[str, Tensor]:
        """The model's logits for a batch, by name.

        Raises:
            MoQError: It has none.
        """
        inputs = _to_float32(batch, self.device)
        gather_again(self.model)
        with repeatable(self.model), torch.no_grad():
            output = self.model(**{name: value for name, value in inputs.items() if takes(self.model, name)})
        found = logits_in(output) if isinstance(output, Mapping) else {}
        if not found:
            raise MoQError(
                "sensitivity.measure: divergence compares logits, and the model's output has none; set it to trace"
            )
        return found

    def _divergences(self, batches: list[Inputs]) -> list[Callable[[], Tensor]]:
        """The cross entropy of the answers with those that the model gives now, in float64."""

        def closure(batch: Inputs, weight: float) -> Callable[[], Tensor]:
            before, labels = self._answers(batch), _to_float32(batch, self.device).get("labels")
            labels = labels_at_logits(self.model, labels)
            # The forward pass has found out what it was, if the config did not say it.
            problem = getattr(getattr(self.model, "config", None), "problem_type", None)
            size = KEPT_LOGITS // len(batches)
            places = {name: _places(logits, labels, size) for name, logits in before.items()}

            def at_places(answers: Mapping[str, Tensor]) -> dict[str, Tensor]:
                rows = {name: answers[name].flatten(0, -2)[where] for name, where in places.items()}
                # Little differences of large numbers; not every device has float64.
                return {name: logits.cpu().double() for name, logits in rows.items()}

            now = at_places(before)
            return lambda: logits_loss(at_places(self._answers(batch)), now, None, problem) * weight

        return [closure(batch, weight) for batch, weight in zip(batches, self._weights(batches), strict=True)]

    def _measure(
        self, batches: list[Inputs], next_bits: Mapping[str, int]
    ) -> Mapping[str, Eigenvalue] | Mapping[str, Found]:
        """Of the blocks, for the pace: as published, or what the next bits cost those that have a drop ahead."""
        if self.measure == "eigenvalue":
            with measuring(self.model, self.blocks) as blocks:
                return self._eigenvalues(batches, blocks)
        levels = {name: [next_bits[name]] for name in self.blocks if name in next_bits}
        costs, products, odd = self._costs(batches, levels)
        self._warn(_NOT_FINITE, set(levels) if odd is None else odd)
        return {name: Found(own[next_bits[name]], "", products) for name, own in costs.items()}

    def _costs(self, batches: list[Inputs], levels: Mapping[str, Sequence[int]]) -> tuple[Costs, int, set[str] | None]:
        """What blocks cost at each of their levels of bits, in this process.

        Returns:
            The costs; the products that a block took; the blocks of which something is not finite, None if all is.
        """
        layers = quant_layers(self.model)
        if self.is_partitioned:
            with measuring(self.model, {}):
                return self._rises(
                    batches, lambda names, bits: switched([layers[name] for name in names], bits), levels
                )
        weights = {layer: Weight.of(layers[layer]) for block in levels for layer in self.layers[block]}
        with measuring(
            self.model, {layer: [cast(nn.Parameter, layers[layer].float_weight)] for layer in weights}
        ) as stand_ins:
            if self.measure in MEASURED:
                return self._rises(
                    batches,
                    lambda names, bits: at_bits(bits, {name: stand_ins[name] for name in names}, weights),
                    levels,
                )
            blocks = {block: [p for layer in self.layers[block] for p in stand_ins[layer]] for block in levels}
            if self.measure == "eigenvalue":
                results = self._eigenvalues(batches, blocks)
                curvature = {name: abs(found.value) for name, found in results.items()}
                products = sum(found.num_products for found in results.values()) // len(results)
            else:
                traces = self._traces(batches, blocks)
                sizes = {name: sum(weights[layer].size for layer in self.layers[name]) for name in levels}
                curvature = {name: found.magnitude / sizes[name] for name, found in traces.items()}
                products = max(found.num_products for found in traces.values())
        odd = {name for name, value in curvature.items() if not math.isfinite(value)}
        costs = predicted(curvature, squared_changes(weights, self.layers, levels))
        return costs, products, None if odd == set(levels) else odd

    def _rises(
        self,
        batches: list[Inputs],
        at: Callable[[Sequence[str], int], contextlib.AbstractContextManager[None]],
        levels: Mapping[str, Sequence[int]],
    ) -> tuple[Costs, int, set[str] | None]:
        """As `_costs`, by forward passes."""
        losses = self._losses(batches) if self.measure == "loss" else self._divergences(batches)
        rises = loss_rises(losses, at, self.layers, levels)
        costs, odd = settled(rises)
        is_lost = not any(math.isfinite(rise) for own in rises.values() for rise in own.values())
        return costs, 0, None if is_lost else odd

    def _check_smooth(self, batches: list[Inputs], blocks: Iterable[Sequence[Tensor]]) -> None:
        """Where products are differences of gradients, see that they mean something, for each block."""
        for parameters in blocks if self.differences else ():
            check_second_derivative(self._losses(batches), parameters, finite_difference=True)

    def _eigenvalues(self, batches: list[Inputs], blocks: Mapping[str, Sequence[Tensor]]) -> dict[str, Eigenvalue]:
        config = self.config
        self._check_smooth(batches, blocks.values())
        return block_eigenvalues(
            self._losses(batches),
            blocks,
            method=config.method,
            max_iter=config.max_iter,
            tol=config.tol,
            stability=config.stability,
            finite_difference=self.differences,
            seed=self.seed,
        )

    def _traces(self, batches: list[Inputs], blocks: Mapping[str, Sequence[Tensor]]) -> dict[str, Trace]:
        self._check_smooth(batches, [[p for own in blocks.values() for p in own]])
        return block_traces(
            self._losses(batches),
            blocks,
            max_iter=min(self.config.max_iter, VECTORS),
            finite_difference=self.differences,
            seed=self.seed,
        )

    def _warn_of_few(self, rows: int, wanted: int, step: int) -> None:
        if 2 * rows < wanted and "few" not in self._warned:
            self._warned.add("few")
            logger.warning(
                "moq_hf: step %d: %s over %d examples, where %d were wanted: there were no more yet, or those "
                "of earlier steps could not be kept (several processes, more than 1 MiB, batches that cannot be cut)",
                step,
                _PLURAL[self.measure],
                rows,
                wanted,
            )

    def _warn_about(self, results: Mapping[str, Eigenvalue] | Mapping[str, Found]) -> None:
        self._warn(_NOT_FINITE, {name for name, value in self.eigenvalues.items() if not math.isfinite(value)})
        odd = {name for name, found in results.items() if found.reason == "max_iter"}
        self._warn(f"is not within tol after max_iter {self.config.max_iter} products", odd)

    def _warn(self, what: str, blocks: set[str]) -> None:
        new = [name for name in self.blocks if name in blocks and f"{what} {name}" not in self._warned]
        self._warned |= {f"{what} {name}" for name in new}
        if new:
            logger.warning("moq_hf: the %s of %s %s", self.measure, ", ".join(new), what)


def _blocks_of(
    inventory: Inventory, config: EigenvalueConfig, units: Mapping[str, Sequence[str]] | None, whole: bool
) -> tuple[dict[str, list[nn.Parameter]], dict[str, list[str]]]:
    """The parameters and the layers of the blocks to measure: see `Sensitivity`; `whole` takes all parameters.

    Raises:
        MoQError: There is nothing to measure.
    """
    own = dict(inventory.parameters())
    weights = {name: own[name if name in inventory.experts else f"{name}.weight"] for name in inventory.scheduled}
    if units is not None:
        layers = {name: list(unit) for name, unit in units.items()}
        return {name: [weights[layer] for layer in unit] for name, unit in layers.items()}, layers
    found = inventory.layer_blocks(config.layer_name, config.layer_num)
    layers = {name: [layer for layer in weights if is_below(layer, name)] for name in found}
    layers = {name: below for name, below in layers.items() if below}
    if not layers:
        raise MoQError(f"eigenvalue: no block has a quantized layer; the blocks are {', '.join(found)}")
    return {
        name: found[name] if whole else [weights[layer] for layer in below] for name, below in layers.items()
    }, layers


def _places(logits: Tensor, labels: Any, size: int) -> Tensor:
    """The rows of `logits`, a matrix to its last dimension, that count: with a label, if each has one of its own.

    Args:
        logits: Of a batch.
        labels: Of it, as `labels_at_logits` gives them; see `logits_loss`.
        size: Numbers of all rows together; of more rows some at equal distances.
    """
    rows = logits.shape[:-1].numel()
    where = torch.arange(rows, device=logits.device)
    if isinstance(labels, Tensor) and labels.shape == logits.shape[:-1] and bool(labels.ne(-100).any()):
        where = where[labels.flatten().ne(-100)]
    wanted = max(1, size // logits.shape[-1])
    return where[:: -(-len(where) // wanted)]


def _to_float32(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    floating = {key for key, value in moved.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {key: value.float() if key in floating else value for key, value in moved.items()}
