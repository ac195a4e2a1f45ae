"""Bits under a budget: what they cost and take, which are chosen, and how the choice is told, saved and read back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from ..budget import Option, choose
from ..config import BitBudget, Count, Flag, MoQConfig, PackedBits, Positive, Weight
from ..errors import MoQError
from ..model.file_size import FileSize
from ..text import table
from .divergence import Costs

# What a choice may fall short of its budget without a warning.
SHORT = 0.01


@dataclass(frozen=True)
class Chosen:
    """One block of a choice.

    Attributes:
        bits: What it ends with.
        weights: How many it has.
        cost: What these bits cost by the measure: a rise of the loss.
        saved: Megabytes (10^6 bytes) that they save against the most bits that it could have.
    """

    bits: PackedBits
    weights: Count
    cost: Weight
    saved: Weight


@dataclass(frozen=True)
class Choice:
    """Bits of all blocks.

    Attributes:
        measure: By what the blocks were compared.
        step: Optimizer steps taken when it was made.
        blocks: Block name to what was chosen.
        limit: The budget: bits per weight, or megabytes of the file.
        reached: The same of the choice.
        in_file: Whether these are megabytes.
    """

    measure: str
    step: Positive
    blocks: dict[str, Chosen]
    limit: Weight
    reached: Weight
    in_file: Flag

    @property
    def targets(self) -> dict[str, int]:
        """Block name to bits."""
        return {name: chosen.bits for name, chosen in self.blocks.items()}

    def to_dict(self) -> dict[str, Any]:
        """The choice in JSON types."""
        return asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        """The words of a table: a head, and a row for each block."""
        return [
            ("block", "weights", "bits", "costs", "saves MB"),
            *(
                (name, f"{own.weights:,}", str(own.bits), f"{own.cost:.3g}", f"{own.saved:,.3f}")
                for name, own in self.blocks.items()
            ),
        ]

    def outcome(self) -> str:
        """A line on the budget."""
        cost, saved = (sum(getattr(own, key) for own in self.blocks.values()) for key in ("cost", "saved"))
        what = "MB in the file" if self.in_file else "bits per quantized weight"
        return f"{self.reached:,.4g} of {self.limit:,.4g} {what}; rise of the loss {cost:.3g}, saved {saved:,.3f} MB"

    def table(self) -> str:
        """The rows, and what they are of."""
        head = f"bits of {len(self.blocks)} blocks, chosen after step {self.step:,} by the measure {self.measure!r}:"
        return "\n".join([head, table(self.rows()), self.outcome()])

    def warning(self) -> str | None:
        """What to say if the budget is not used to 1 %."""
        if self.reached >= (1 - SHORT) * self.limit:
            return None
        return (
            f"the bits chosen reach {self.reached:,.4g} of a budget of {self.limit:,.4g}, "
            f"{1 - self.reached / self.limit:.1%} less: no block can have the next of its choices within it"
        )


class Chooser:
    """Knows what the blocks of a model take at their bits, and chooses.

    Args:
        config: With a budget.
        blocks: Block name to its layers.
        weights: Layer name to the number of its weights.
        file: Of the model.

    Raises:
        MoQError: No choice is within the budget, or all are; the text has the possible range.
    """

    def __init__(
        self, config: MoQConfig, blocks: Mapping[str, Sequence[str]], weights: Mapping[str, int], file: FileSize
    ) -> None:
        if config.budget is None:
            raise MoQError("the config has no budget")
        self.budget: BitBudget = config.budget
        self.measure = config.measure
        self._weights = {block: sum(weights[layer] for layer in layers) for block, layers in blocks.items()}
        self._bytes = {
            block: {bits: sum(file.of_layer(layer, bits) for layer in layers) for bits in self.budget.choices}
            for block, layers in blocks.items()
        }
        self._rest = file.of_rest()
        if self.budget.file_mb is not None:
            self._check_file(self.budget.file_mb, file)

    def choose(self, costs: Costs, step: int) -> Choice:
        """The bits of each block that cost the least within the budget.

        Args:
            costs: By block and bits; a cost that rises with the bits is taken for that of fewer ones.
            step: Optimizer steps taken.
        """
        choices = self.budget.choices
        costs = {block: _falling(own) for block, own in costs.items()}
        options = [[Option(self._size(block, b), costs[block][b]) for b in choices] for block in self._weights]
        # The sizes at the fewest bits were found to fit.
        picked = choose(options, self._capacity) or [0] * len(options)
        bits = {block: choices[index] for block, index in zip(self._weights, picked, strict=True)}
        chosen = {
            block: Chosen(
                b,
                self._weights[block],
                costs[block][b],
                (self._bytes[block][choices[-1]] - self._bytes[block][b]) / 1e6,
            )
            for block, b in bits.items()
        }
        limit = self.budget.mean if self.budget.file_mb is None else self.budget.file_mb
        return Choice(self.measure, step, chosen, limit or 0.0, self._reached(bits), self.budget.file_mb is not None)

    def _size(self, block: str, bits: int) -> int:
        return self._weights[block] * bits if self.budget.file_mb is None else self._bytes[block][bits]

    @property
    def _capacity(self) -> int:
        # As the decimal fractions that they were written as: 2.3 * 50 is 114.99999999999999.
        if self.budget.file_mb is not None:
            return int(Fraction(str(self.budget.file_mb)) * 10**6) - self._rest
        return int(Fraction(str(self.budget.mean)) * sum(self._weights.values()))

    def _reached(self, bits: Mapping[str, int]) -> float:
        size = sum(self._size(block, b) for block, b in bits.items())
        return (size + self._rest) / 1e6 if self.budget.file_mb is not None else size / sum(self._weights.values())

    def _check_file(self, wanted: float, file: FileSize) -> None:
        where, alike = "quantize_bits.target_bits.file_mb", file.why_alike()
        if alike is not None:
            raise MoQError(f"{where}: {alike}, so that no choice of bits meets it; give mean instead")
        # The zero points of 1 bit may take more than codes of 2 bits do.
        least, most = (
            self._reached({block: end(sizes, key=lambda bits: sizes[bits]) for block, sizes in self._bytes.items()})
            for end in (min, max)
        )
        if not least <= wanted <= most:
            stays = "the rest of the file stays" if wanted < least else "more choices allow more"
            raise MoQError(
                f"{where}: {wanted:g} MB is impossible: with {self.budget.choices[0]} to {self.budget.choices[-1]} "
                f"bits the file of this model has {least:,.3f} to {most:,.3f} MB ({stays}: {self._rest / 1e6:,.3f} MB "
                "are no layers of the schedule; quantize_embeddings makes tables smaller)"
            )


def _falling(costs: Mapping[int, float]) -> dict[int, float]:
    """Costs by bits, where more bits never cost more: noise would make them do so.

    >>> _falling({2: 3.0, 3: 0.5, 4: 1.0, 8: 0.0})
    {2: 3.0, 3: 1.0, 4: 1.0, 8: 0.0}
    """
    found, most = {}, 0.0
    for bits in sorted(costs, reverse=True):
        most = found[bits] = max(most, costs[bits])
    return {bits: found[bits] for bits in sorted(found)}
