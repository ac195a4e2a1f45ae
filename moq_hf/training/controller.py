"""`MoQController`: holds all mutable state of a run, sets bits as the schedule says, saves and restores itself."""

import copy
import json
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ..config import MoQConfig
from ..errors import MoQError, explained
from ..forward_pass import makes_state
from ..inputs import load_ranges, ranges_of, update_ranges
from ..lattice import FoundGrid
from ..model.convert import check_finite, check_scales, prepare_model
from ..model.inventory import Inventory
from ..model.selection import split_blocks, take_inventory
from ..model.sizes import FileSize, ModelSizes
from ..names import pretrained
from ..processes import agree, device_of, is_distributed, shape_of
from ..quantized_weight import QuantizedWeight, inputs_of
from ..schedule import FLOAT_BITS, PrecisionSchedule, Switch
from ..servers import fused_units
from ..text import dtype_name
from ..version import __version__
from . import messages
from .budget import Choice, Chooser
from .resume import (
    STATE_VERSION,
    changes,
    load_schedule,
    ratios_in_letters,
    ratios_of_letters,
    scales_in_text,
    scales_of_text,
    what_counts,
)
from .sensitivity import Sensitivity

logger = logging.getLogger(__name__)


class MoQController:
    """Takes a model through its falling precision, one call of `step` per optimizer step.

    Args:
        model: The model, whose layers are prepared in place; they stay unquantized
            until the schedule says otherwise. Or the model's `Inventory`, as
            `take_inventory` gives it with `config`.
        config: The config to follow; `enabled` must be true.
        total_steps: Optimizer steps of the run, if the schedule needs them.

    Raises:
        MoQError: The model and the config do not fit each other, the run is too short
            for the config, there are no blocks to measure, a budget is impossible, or a
            weight holds NaN or Inf.

    Attributes:
        inventory: The `Inventory` of the model.
        layers: Quantized linear layers and convolutions by name, and experts by the
            names of their parameters.
        embeddings: Quantized embedding tables by name.
        blocks: Block name to the names of its layers; see `Inventory`.
        schedule: The `PrecisionSchedule`.
        sensitivity: The `Sensitivity` that gives the schedule its eigenvalues; None
            unless the config enables them.
        sizes: The `ModelSizes`.
        choice: The bits of each block under a budget; None without one, and until they
            are chosen.
        history: Every `Switch` so far.
    """

    def __init__(
        self,
        model: nn.Module | Inventory,
        config: MoQConfig,
        total_steps: int | None = None,
    ) -> None:
        inventory = (
            model if isinstance(model, Inventory) else take_inventory(model, config)
        )
        self.config = config
        self.inventory = inventory
        self.model = inventory.model
        # The wrapper's prefix of block names, which charts leave out.
        self._wrapper = f"{inventory.name_of(pretrained(self.model))}."
        configs = {name: config.of(name) for name in inventory.scheduled}
        free = [name for name, own in configs.items() if own.budget is not None]
        fixed = {n: own.targets[0] for n, own in configs.items() if n not in free}
        if config.budget is not None and not free:
            raise MoQError(
                f"{config.spell('bits')}: overrides name the bits of every layer, so there is nothing to choose; "
                "give a number"
            )
        units = fused_units(free)
        self.sensitivity: Sensitivity | None = None
        if config.eigenvalue.enabled or units:
            self.sensitivity = Sensitivity(inventory, config, units or None)
        entries = () if self.sensitivity is None else self.sensitivity.entries
        self.blocks = split_blocks(inventory.blocks(fixed, entries), config) | units
        configs = {name: configs[layers[0]] for name, layers in self.blocks.items()}
        self.schedule = PrecisionSchedule(config, self.blocks, total_steps, configs)
        self._begun = copy.deepcopy(self.schedule)
        self.history: list[Switch] = []
        self.choice: Choice | None = None
        self.layers, self.embeddings = prepare_model(self.inventory, self.config)
        for layer in self.all_layers.values():
            layer.moq.has_controller = True
            self._passes = layer.moq.passes
        self.sizes = ModelSizes(self.inventory, self.all_layers)
        self._chooser: Chooser | None = None
        if config.budget is not None:
            file = None
            if config.budget.file_mb is not None:
                file = FileSize(inventory, self.layers, self.embeddings, fixed)
            weights = {
                name: shape_of(layer.float_weight).numel()
                for name, layer in self.layers.items()
            }
            self._chooser = Chooser(config, units, weights, file)
        self._write_bits(self.blocks)
        self.refresh()

    @property
    def all_layers(self) -> dict[str, QuantizedWeight]:
        """The layers of the schedule and the embedding tables, by name."""
        return {**self.layers, **self.embeddings}

    @property
    def has_arrived(self) -> bool:
        """True if the weights and inputs of every layer are at their target precision, with no blend left."""
        return self.schedule.at_target and (
            self.rounds_inputs or not self.config.rounds_inputs
        )

    @property
    def rounds_inputs(self) -> bool:
        """True if the inputs of quantized linear layers are rounded in the next forward pass."""
        return (
            self.config.rounds_inputs
            and self.has_begun
            and self.schedule.steps >= self.config.activations.start_step
        )

    @property
    def has_begun(self) -> bool:
        """True if the offset was reached; before it nothing is quantized."""
        return any(bits != FLOAT_BITS for bits in self.schedule.bits.values())

    def step(
        self, eigenvalues: Mapping[str, float] | None = None
    ) -> tuple[Switch, ...]:
        """Advance the schedule, after an optimizer step that was not skipped.

        Args:
            eigenvalues: Block name to eigenvalue over the largest, 0 to 1; a block that
                is missing has factor 1.

        Returns:
            The changes of precision.

        Raises:
            MoQError: A weight held NaN or Inf in the last forward pass.
        """
        check_scales(self.all_layers)
        switches = self.schedule.advance(eigenvalues)
        self.history += switches
        switched = {switch.block for switch in switches}
        due = self.schedule.steps % self.config.scale_refresh == 0
        # All processes take the same order, since they gather sharded weights for it.
        self._write_bits(block for block in self.blocks if due or block in switched)
        update_ranges(inputs_of(self.layers).values())
        self._write_progress()
        if self.config.verbose:
            for switch in switches:
                target = (self.schedule.targets or {})[switch.block]
                logger.info(
                    "%s", messages.switch_in_words(switch, target, self.schedule.offset)
                )
        return switches

    def check_ranks(self, skipped: bool = False) -> None:
        """Check that all processes have the same config, plan and bits; called before each step.

        It takes one message of 16 bytes. Ranks that disagree would wait for each other
        forever, or train different models.

        Args:
            skipped: Whether the gradient scaler skipped this rank's step.

        Raises:
            MoQError: They differ; the text says how.
        """
        if not is_distributed():
            return
        sums = [
            _checksum(what_counts(self.config)),
            _checksum(self.schedule.state_dict()),
        ]
        bits = [layer.moq.bits for layer in self.layers.values()]
        weight = next(iter(self.layers.values())).float_weight
        agree(
            _checksum([sums, bits, skipped]),
            device_of(weight),
            lambda: self._shown(sums) + ", skipped" * skipped,
        )

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Keep a training micro-batch, as the loss takes it, if something is still to be measured."""
        is_due = self.schedule.targets is None or (
            self.config.eigenvalue.enabled and not self.has_arrived
        )
        if self.sensitivity is not None and is_due:
            self.sensitivity.samples.add(inputs)

    def measure(self) -> dict[str, float] | None:
        """Choose the bits under a budget and measure the sensitivity, each if it is due before the coming `step`.

        Returns:
            The normalized sensitivity of each block; None without `eigenvalue.enabled`.

        Raises:
            MoQError: They cannot be measured; see `Sensitivity.update`.
        """
        if self.sensitivity is None:
            return None
        self.sensitivity.check()
        if self.schedule.is_choosing and self._chooser is not None:
            # Measured on the float model, just after the optimizer's step.
            step = self.schedule.steps + 1
            self.choice = self._chooser.cheapest_choice(
                self.sensitivity.costs(self._chooser.choices), step
            )
            self.schedule.choose(self.choice.targets)
        if self.config.eigenvalue.enabled and self.sensitivity.is_due(self.schedule):
            self.sensitivity.update(self.schedule)
        self.sensitivity.samples.clear()
        return self.sensitivity.values if self.config.eigenvalue.enabled else None

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Begin or end an evaluation of the Trainer, in which nothing changes a weight."""
        self._passes.set_evaluating(is_evaluating)

    def skip(self) -> None:
        """Leave the schedule as it is, after a step that the gradient scaler skipped.

        Raises:
            MoQError: A weight held NaN or Inf in the last forward pass, which a smaller
                loss scale would not mend.
        """
        if self.sensitivity is not None:
            self.sensitivity.samples.clear()
        check_scales(self.all_layers)

    def refresh(self) -> None:
        """Set the layers up for the next forward pass and check their weights; in all processes.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        self._write_progress()
        check_finite(self.all_layers, gather=True)

    def _write_progress(self) -> None:
        """Set the layers' values that change at each step, and drop the copies that an evaluation made."""
        blend = self.schedule.blend
        rounds_inputs = self.rounds_inputs
        for block, names in self.blocks.items():
            for name in names:
                layer = self.layers[name]
                layer.moq.seed = layer.moq.seed._replace(step=self.schedule.steps)
                layer.moq.blend = blend[block]
                if layer.moq.inputs is not None:
                    layer.moq.inputs.active = rounds_inputs
        for layer in self.all_layers.values():
            layer.invalidate()

    def metrics(self) -> dict[str, float]:
        """Scalars of the whole model, for each log of a loss.

        Bits per weight of quantized layers, bits per parameter of the whole model, the
        share of it that is quantized, and its size now in megabytes; if the config
        blends, also the share of the float weights, for each block and on average.
        """
        sizes = {
            "moq/bits": self.sizes.layer_bits,
            "moq/mean_bits": self.sizes.mean_bits,
            "moq/quantized_share": self.sizes.share,
            "moq/size_mb": self.sizes.mb,
        }
        scalars = {name: round(value, 4) for name, value in sizes.items()}
        if self.config.blend.enabled:
            shares = self.schedule.blend
            scalars["moq/blend"] = round(sum(shares.values()) / len(shares), 6)
            for block, share in shares.items():
                scalars[f"moq/blend/{block.removeprefix(self._wrapper)}"] = round(
                    share, 6
                )
        return scalars

    def block_metrics(self) -> dict[str, float]:
        """Scalars of each block, for the log of a switch: bits, period, and eigenvalues if they are measured."""
        kinds: dict[str, Mapping[str, float]] = {
            "bits": self.schedule.bits,
            "period": self.schedule.period,
        }
        scalars: dict[str, float] = {}
        if self.config.eigenvalue.enabled and self.sensitivity is not None:
            kinds |= {"eigenvalue": self.sensitivity.values}
        for kind, values in kinds.items():
            for block, value in values.items():
                scalars[f"moq/{kind}/{block.removeprefix(self._wrapper)}"] = value
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the float weights, in JSON types.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        # Of several processes only the first saves, so this must not gather.
        check_finite(self.all_layers)
        return {
            "version": STATE_VERSION,
            "moq_hf": __version__,
            "config": self.config.to_dict(),
            "schedule": self.schedule.state_dict(),
            "ratios": {
                name: ratios_in_letters(layer.moq.ratio)
                for name, layer in self.layers.items()
                if layer.moq.ratio is not None
            },
            "input_ranges": ranges_of(inputs_of(self.layers)),
            "history": [list(switch) for switch in self.history],
            "float_size_mb": self.sizes.float_mb,
            "sensitivity": None
            if self.sensitivity is None
            else self.sensitivity.state_dict(),
            "choice": None if self.choice is None else asdict(self.choice),
            "handed_dtype": handed_dtype(self.all_layers),
        } | self._scales_in_text()

    def _scales_in_text(self) -> dict[str, Any]:
        scales = {name: layer.moq.scales for name, layer in self.layers.items()}
        found = {n: scales_in_text(own) for n, own in scales.items() if own is not None}
        return {"scales": found} if found else {}

    @makes_state
    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Continue from a state, as `checked_state` gives it; call it after the float weights are loaded.

        Returns:
            The changes of the config that matter: dotted key to the saved and the
                current value.

        Raises:
            MoQError: The state belongs to other layers, to a config from which this one
                cannot continue (see `load_schedule`), to a newer moq_hf, or is damaged.
        """
        with explained("the checkpoint's MoQ state is damaged"):
            # Keys that the saved config lacks had their defaults.
            changed = changes(MoQConfig.load(state["config"]), self.config)
            # Start from a new schedule, since the best checkpoint is loaded after all steps.
            self.schedule = copy.deepcopy(self._begun)
            load_schedule(self.schedule, state, changed)
            self.history = [Switch(*switch) for switch in state["history"]]
            self.choice = None if self.config.budget is None else state["choice"]
            for name, texts in state.get("scales", {}).items():
                layer = self.layers[name]
                shape = layer.moq.grid.shape(*layer.matrix_shape)
                scales = scales_of_text(name, texts, shape)
                known = layer.moq.found or FoundGrid(layer.moq.bits)
                layer.moq.found = replace(known, scales=scales)
                layer.after_change()
            self._write_bits(self.blocks, state["ratios"])
            load_ranges(inputs_of(self.layers), state["input_ranges"])
            # Before the offset a changed config may have grouped the layers into other blocks.
            if self.sensitivity is not None and (self.has_begun or not changed):
                # With other limits the number of examples is determined again.
                measured = dict(state["sensitivity"])
                if any(k.startswith(("eigenvalue.", "sensitivity.")) for k in changed):
                    measured["rows"] = 0
                self.sensitivity.load_state_dict(measured)
        # Outside, since a lack of memory does not mean that the state is damaged.
        self.refresh()
        return changed

    def summary(self) -> str:
        """One line on what is quantized and what is not, with the reasons that the config does not show."""
        return messages.summary(
            self.inventory, self.config, self.sizes, len(self.blocks)
        )

    def warnings(self) -> list[str]:
        """Notes for the user before the first step."""
        return messages.warnings(self.inventory, self.config, self.sizes)

    def _shown(self, sums: list[int]) -> str:
        return (
            f"{self.schedule.steps} steps of {self.schedule.total_steps}, mean {self.sizes.mean_bits:.4f} bits "
            f"(config {sums[0]:08x}, schedule {sums[1]:08x})"
        )

    def _write_bits(
        self, blocks: Iterable[str], saved: Mapping[str, str] | None = None
    ) -> None:
        """Set the bits of the layers as the schedule says; nothing else in a run does.

        Args:
            blocks: Blocks that changed, or whose clipping ratios are due.
            saved: Layer name to its saved clipping ratios; None searches for ratios.
        """
        bits = self.schedule.bits
        for block in blocks:
            for name in self.blocks[block]:
                layer = self.layers[name]
                if saved is None:
                    # The ratios of a frozen weight stay right.
                    if (
                        bits[block] != layer.moq.bits
                        or layer.float_weight.requires_grad
                        or layer.moq.lora
                    ):
                        layer.set_bits(bits[block])
                    continue
                layer.moq.bits = bits[block]
                layer.moq.ratio = None
                if name in saved:
                    ratio = ratios_of_letters(
                        name, saved[name], layer.moq.grid.shape(*layer.matrix_shape)
                    )
                    # A move to the meta device would lose the ratios.
                    weight = layer.float_weight
                    layer.moq.ratio = (
                        ratio if weight.is_meta else ratio.to(weight.device)
                    )
                layer.freeze_codes(keeps_scales=True)
        for table in self.embeddings.values():
            table.moq.bits = (
                self.inventory.table_bits if self.has_begun else None
            ) or FLOAT_BITS


def _checksum(state: Any) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def handed_dtype(layers: Mapping[str, QuantizedWeight]) -> str | None:
    """The dtype in which FSDP2 or ZeRO-3 handed over the weights, for instance "bfloat16"; None without them."""
    dtypes = {layer.moq.handed_dtype for layer in layers.values()} - {None}
    return dtype_name(next(iter(dtypes))) if dtypes else None
