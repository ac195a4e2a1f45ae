"""Measures of how sensitive a block is to rounding; each checks the model, estimates its own cost, and measures.

`divergence`: how far the model's predictions move when one block is rounded to other
bits. With p the current class probabilities and q those with the block at other bits,
it is KL(p, q), averaged over the predictions that count: the cross entropy of q with p
minus the entropy of p.

`eigenvalue`: the eigenvalue of largest magnitude of the block of the loss's Hessian;
see `moq_hf.eigen`.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..eigen import NOT_UNDER_ENGINES, block_eigenvalues, check_second_derivative
from ..errors import MoQError
from ..model.convert import quant_layers
from ..processes import device_of, is_gathered_per_pass, is_sharded, mean_over_ranks
from ..quantized_weight import QuantizedWeight
from .distillation import labels_at_logits, logits_in, logits_loss, takes
from .measuring import at_bits, is_fsdp2, measuring, repeatable
from .samples import CHUNK, Batch, rows_of

logger = logging.getLogger(__name__)

# The cost of each block at each number of bits: block name to bits to cost.
Costs = dict[str, dict[int, float]]
# The scalar mean loss of a model over a batch of keyword arguments for its forward
# pass.
ModelLoss = Callable[[nn.Module, Batch], Tensor]

# In units of the forward and backward pass of one training example, as measured in
# benchmarks/results/eigen.json. The budget of time is kept in these units and not by the
# clock, so that two runs of the same seed do the same.
GRAPH_COST = 1.0
PRODUCT_COST = 0.6
FORWARD_COST = 0.4
# Products that a block takes early in training, when it takes the most.
FIRST_PRODUCTS = {"lanczos": 11, "power": 23}
# The most logits kept for comparison, half a gigabyte in float64. With a large
# vocabulary not every token is compared.
KEPT_LOGITS = 1 << 26


def model_loss(model: nn.Module, inputs: Batch) -> Tensor:
    """The loss in the model's own output for a batch: the entry named loss, or the first of a tuple.

    Raises:
        MoQError: The output has no loss; the text says what to do.
    """
    output: Any = model(**inputs)
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = next(iter(output), None) if isinstance(output, tuple | list) else None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    raise MoQError(
        "eigenvalue: the model's output has no loss, since the Trainer computes it (label smoothing, "
        "compute_loss_func, its own compute_loss): use MoQTrainer, or give MoQCallback the function loss(model, inputs)"
    )


class _Measure:
    """The base of the measures.

    Args:
        model: The model in training.
        blocks: Block name to its parameters.
        layers: Block name to the names of its layers.
        config: Limits of the measurement, and the seed.

    Attributes:
        loss: Gives the scalar mean loss of the model over a batch; by default the loss
            in the model's output.
        device: Device of the model.
        is_gathered_per_pass: Whether FSDP2 or ZeRO-3 gathers the parameters for a pass.
        products: The average number of products with the Hessian that a block took in
            the last measurement.
    """

    name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, Sequence[nn.Parameter]],
        layers: Mapping[str, Sequence[str]],
        config: MoQConfig,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.layers = layers
        self.config = config.eigenvalue
        self.seed = config.seed
        self.loss: ModelLoss = model_loss
        self.products = float(
            min(self.config.max_iter, FIRST_PRODUCTS[self.config.method])
        )
        self.device = device_of(next(model.parameters()))
        self.is_gathered_per_pass = any(
            is_gathered_per_pass(p) for part in blocks.values() for p in part
        )
        self._warned: set[str] = set()

    def _quantized_layers(self) -> dict[str, list[QuantizedWeight]]:
        layers = quant_layers(self.model)
        return {
            name: [layers[layer] for layer in names]
            for name, names in self.layers.items()
        }

    def _warn_of_infinite(self, values: Mapping[str, float]) -> None:
        odd = [name for name, value in values.items() if not math.isfinite(value)]
        self._warn(
            "is not finite: the largest finite one is used, 1 for all if there is none",
            odd,
        )

    def _warn(self, what: str, blocks: Sequence[str]) -> None:
        warning = f"moq_hf: the {self.name} of {', '.join(blocks)} {what}"
        if blocks and warning not in self._warned:
            self._warned.add(warning)
            logger.warning("%s", warning)


class DivergenceMeasure(_Measure):
    """Compares the model's predictions; see the module's docstring."""

    name = "divergence"

    def check_model(self) -> None:
        """Check that FSDP2 gathers each weight for the module that uses it.

        Raises:
            MoQError: It gathers them for a wrapper of the model.
        """
        gathered = {
            id(p)
            for module in self.model.modules()
            if is_fsdp2(module)
            for p in module.parameters()
        }
        if any(
            is_sharded(p) and id(p) not in gathered
            for parameters in self.blocks.values()
            for p in parameters
        ):
            raise MoQError(
                f"{self.name}: FSDP2 gathers the weights for a wrapper of the model, that of torch_compile: "
                "leave torch_compile out, or call model.compile() yourself"
            )

    def check(self, batch: Batch) -> None:
        """Check that the model has logits.

        Raises:
            MoQError: It has none.
        """
        with measuring(self.model):
            logits_of(self.model, batch)

    def cost(self, rows: float, levels: int = 1) -> float:
        """The cost of a measurement in training examples: a reference pass, and a pass for each block and level."""
        return rows * FORWARD_COST * (1 + levels * len(self.blocks))

    def costs(
        self, batches: Sequence[Batch], levels: Mapping[str, Sequence[int]]
    ) -> Costs:
        """The divergence of each block at each of the given bits, with all others unchanged; the same in all ranks.

        Args:
            batches: Training examples, on the model's device.
            levels: Block name to the bits to try.

        Raises:
            MoQError: The model's output has no logits.
        """
        layers = self._quantized_layers()
        counts = [rows_of(batch) for batch in batches]
        kept = KEPT_LOGITS // len(batches)
        costs: Costs = {}
        with measuring(self.model), torch.no_grad():
            references = [_reference(self.model, batch, kept) for batch in batches]
            for block, levels_of_block in levels.items():
                costs[block] = {}
                for bits in levels_of_block:
                    with at_bits(layers[block], bits):
                        sums = [
                            rows * reference()
                            for rows, reference in zip(counts, references, strict=True)
                        ]
                    # Below 0 is rounding error. In this order NaN stays NaN.
                    costs[block][bits] = max(sum(sums) / sum(counts), 0.0)
        for name, own in costs.items():
            means = mean_over_ranks([*own.values()], self.device)
            costs[name] = dict(zip(own, means, strict=True))
        self._warn_of_infinite({name: sum(costs[name].values()) for name in costs})
        return costs

    def scores(
        self, batches: Sequence[Batch], next_bits: Mapping[str, int]
    ) -> dict[str, float]:
        """The divergence of each block at its next bits.

        Raises:
            MoQError: The model's output has no logits.
        """
        costs = self.costs(batches, {name: [bits] for name, bits in next_bits.items()})
        return {
            name: costs_of_block[next_bits[name]]
            for name, costs_of_block in costs.items()
        }


class EigenvalueMeasure(_Measure):
    """Finds the largest eigenvalues of the loss's Hessian; see `moq_hf.eigen`."""

    name = "eigenvalue"

    def check_model(self) -> None:
        """Check that every process holds the weights whole.

        Raises:
            MoQError: FSDP2 or ZeRO-3 shards them.
        """
        if self.is_gathered_per_pass:
            raise MoQError(NOT_UNDER_ENGINES)

    def check(self, batch: Batch) -> None:
        """Check that the loss can be differentiated twice.

        Raises:
            MoQError: It cannot; see `check_second_derivative`.
        """
        with measuring(self.model, self.blocks) as blocks:
            check_second_derivative(
                self._losses([batch])[0], next(iter(blocks.values()))
            )

    def cost(self, rows: float, levels: int = 1) -> float:
        """The cost of a measurement in training examples: products and a graph, or a graph for each product."""
        graphs = 1.0 if rows <= CHUNK else self.products
        return rows * (
            GRAPH_COST * graphs + PRODUCT_COST * self.products * len(self.blocks)
        )

    def costs(
        self, batches: Sequence[Batch], levels: Mapping[str, Sequence[int]]
    ) -> Costs:
        """Second-order estimates of the cost of rounding, as if it changed a block in the worst direction.

        A cost is half the block's eigenvalue times the squared length of that change.

        Raises:
            MoQError: The loss cannot be differentiated twice.
        """
        values = self.scores(batches)
        largest = max(filter(math.isfinite, values.values()), default=math.nan)
        layers = self._quantized_layers()
        costs: Costs = {}
        for name, choices in levels.items():
            value = values[name] if math.isfinite(values[name]) else largest
            costs[name] = {}
            for bits in choices:
                with at_bits(layers[name], bits), torch.no_grad():
                    squared_change = sum(map(_squared_change, layers[name]))
                costs[name][bits] = value * squared_change / 2
        return costs

    def scores(
        self, batches: Sequence[Batch], next_bits: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """The magnitude of each block's eigenvalue, whatever its next bits are.

        Raises:
            MoQError: The loss cannot be differentiated twice.
        """
        config = self.config
        losses = self._losses(batches)
        with measuring(self.model, self.blocks) as blocks:
            results = block_eigenvalues(
                losses,
                blocks,
                method=config.method,
                max_iter=config.max_iter,
                tol=config.tol,
                stability=config.stability,
                seed=self.seed,
            )
        unfinished = [
            name for name, result in results.items() if result.reason == "max_iter"
        ]
        self._warn(
            f"is not within tol after max_iter {config.max_iter} products", unfinished
        )
        products = fmean(result.num_products for result in results.values())
        magnitudes = [abs(result.value) for result in results.values()]
        self.products, *values = mean_over_ranks([products, *magnitudes], self.device)
        agreed = dict(zip(results, values, strict=True))
        self._warn_of_infinite(agreed)
        return agreed

    def _losses(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """Make the loss of each batch, weighted so that the mean over batches is the mean over examples."""
        weight = len(batches) / sum(map(rows_of, batches))
        return [
            functools.partial(self._loss, batch, weight * rows_of(batch))
            for batch in batches
        ]

    def _loss(self, batch: Batch, weight: float) -> Tensor:
        with repeatable():
            return self.loss(self.model, batch) * weight


Measure = DivergenceMeasure | EigenvalueMeasure
MEASURES: dict[str, type[Measure]] = {
    "divergence": DivergenceMeasure,
    "eigenvalue": EigenvalueMeasure,
}


def logits_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The model's logits for a batch, by name.

    Raises:
        MoQError: It has none.
    """
    with repeatable(), torch.no_grad():
        output = model(
            **{name: value for name, value in batch.items() if takes(model, name)}
        )
    logits = logits_in(output) if isinstance(output, Mapping) else {}
    if not logits:
        raise MoQError(
            "sensitivity.measure: divergence compares logits, and the model's output has none; set it to eigenvalue"
        )
    return logits


def finite_costs(costs: Costs) -> Costs:
    """Replace costs that are not finite by the largest finite one, 1 if there is none.

    >>> finite_costs({"a": {2: math.inf, 4: 0.5}, "b": {2: 2.0, 4: 0.0}})
    {'a': {2: 2.0, 4: 0.5}, 'b': {2: 2.0, 4: 0.0}}
    """
    every = [cost for block in costs.values() for cost in block.values()]
    largest = max(filter(math.isfinite, every), default=1.0)
    return {
        block: {
            bits: cost if math.isfinite(cost) else largest
            for bits, cost in costs_of_block.items()
        }
        for block, costs_of_block in costs.items()
    }


def _reference(model: nn.Module, batch: Batch, size: int) -> Callable[[], float]:
    """Make a function that measures how far the model's logits for a batch have moved from the current ones."""
    now = logits_of(model, batch)
    labels = labels_at_logits(model, batch.get("labels"))
    rows = {name: compared_rows(logits, labels, size) for name, logits in now.items()}
    # If the config did not name the problem, the forward pass has inferred it.
    problem = getattr(getattr(model, "config", None), "problem_type", None)

    def compared(logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Small differences of large numbers need float64, which not every device has.
        return {
            name: logits[name].flatten(0, -2)[own].cpu().double()
            for name, own in rows.items()
        }

    reference = compared(now)
    entropy = float(logits_loss(reference, reference, None, problem))
    return lambda: (
        float(logits_loss(compared(logits_of(model, batch)), reference, None, problem))
        - entropy
    )


def compared_rows(logits: Tensor, labels: Any, size: int) -> Tensor:
    """Indices of the rows of `logits`, flattened to a matrix, that are compared: those with a label, if rows have one.

    Args:
        logits: The logits of a batch.
        labels: The labels of the batch from `labels_at_logits`; see `logits_loss`.
        size: The most numbers in all compared rows together; if there are more, evenly
            spaced rows are taken.
    """
    count = logits.shape[:-1].numel()
    rows = torch.arange(count, device=logits.device)
    if (
        isinstance(labels, Tensor)
        and labels.shape == logits.shape[:-1]
        and bool(labels.ne(-100).any())
    ):
        rows = rows[labels.flatten().ne(-100)]
    wanted = max(1, size // logits.shape[-1])
    return rows[:: -(-len(rows) // wanted)]


def _squared_change(layer: QuantizedWeight) -> float:
    """Compute the squared length of the change of a layer's weight by rounding."""
    change = layer.quantized_copy(torch.float32) - layer.whole_weight().float()
    return float(change.square().sum(dtype=torch.float64))
