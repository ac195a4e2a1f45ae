"""The one holder of mutable MoQ state: asks the schedule, sets bits, quantizes, saves and restores itself as JSON."""

import json
import logging
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..grid import PerGroup
from ..kernels.backend import triton_wanted
from ..model.convert import prepare_model, quant_embeddings
from ..model.inventory import block_of
from ..model.refresh import Refresher, check_readers
from ..model.selection import embeddings_to_quantize, is_linear, linears, misfit, output_heads, shared_weights
from ..model.sizes import ModelSizes, covered, in_words, last_part
from ..model.staleness import lead_copies, take_over
from ..names import adapters, named_modules, plain_name
from ..processes import agree, device_of, is_distributed
from ..quant_linear import QuantLayer
from ..schedule import FLOAT_BITS, PrecisionSchedule, Switch
from ..version import __version__
from .ratios import decode, encode
from .resume import STATE_VERSION, changes, check_state, load_schedule, what_counts
from .samples import Inputs
from .sensitivity import Sensitivity

logger = logging.getLogger(__name__)


class MoQController:
    """Takes a model through its falling precision, one call of `step` per optimizer step.

    Args:
        model: Made ready for quantization in place; its layers are unquantized until the schedule says otherwise.
        config: What to follow; `enabled` must be true.
        total_steps: Optimizer steps of the run, where the schedule needs them.
        dtype: Of the quantized weights: the autocast dtype, or None for the weights' own.

    Raises:
        MoQError: The model and the config do not fit each other.

    Attributes:
        layers: Quantized linear layers by name.
        embeddings: Quantized embedding tables by name.
        blocks: Block name to the names of its layers. Layers outside of every block are blocks of their own.
        schedule: The `PrecisionSchedule`.
        sensitivity: The `Sensitivity` that gives the schedule its eigenvalues; None unless the config enables them.
        sizes: The `ModelSizes`.
        history: Every `Switch` so far.
    """

    def __init__(
        self, model: Any, config: MoQConfig, total_steps: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            # SetFit's Trainer shows its callbacks what lies around the module that it trains.
            model = model.model_body
        self.model: nn.Module = model
        self.config = config
        self.layers: dict[str, QuantLayer] = prepare_model(model, config)
        self.embeddings = quant_embeddings(model)
        self.blocks: dict[str, list[str]] = {}
        self.sensitivity: Sensitivity | None = None
        if config.eigenvalue.enabled:
            self.sensitivity = Sensitivity(model, config.eigenvalue, self.layers, config.seed)
        for name, layer in self.layers.items():
            self.blocks.setdefault(self._block_of(name), []).append(name)
            layer.moq.dtype = dtype
        take_over([*self.layers.values(), *self.embeddings.values()])
        self.sizes = ModelSizes(model, {**self.layers, **self.embeddings})
        self._refresher = Refresher({**self.layers, **self.embeddings})
        self.schedule = PrecisionSchedule(config, self.blocks, total_steps)
        self.history: list[Switch] = []
        self._apply_bits(self.blocks)
        self.refresh()

    @property
    def at_target(self) -> bool:
        """Whether every layer computes with its target precision and nothing else."""
        waits = self.config.activation.enabled and self.activation_bits is None
        return self.schedule.at_target and not waits

    @property
    def activation_bits(self) -> int | None:
        """Bits of the quantized layers' inputs in the next forward pass; None leaves them alone."""
        activation = self.config.activation
        return activation.bits if activation.enabled and self.schedule.steps >= activation.start_step else None

    @property
    def has_begun(self) -> bool:
        """Whether the offset was reached: before it nothing is quantized."""
        return any(bits != FLOAT_BITS for bits in self.schedule.bits.values())

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model now; a parameter that is not quantized has those of its dtype."""
        return self.sizes.mean_bits

    @property
    def quantized_share(self) -> float:
        """The part of the model's parameters, 0 to 1, that the schedule quantizes; the same before its offset."""
        return self.sizes.share

    @property
    def float_size_mb(self) -> float:
        """Megabytes (10^6 bytes) of the model's parameters in their own dtypes."""
        return self.sizes.float_mb

    @property
    def size_mb(self) -> float:
        """The same with each quantized weight packed at its bits of now and one scale, in its dtype, for each group.

        Embedding tables take a byte a weight, as they are saved.
        """
        return self.sizes.mb

    def coverage(self) -> str:
        """What share of the model's parameters is quantized from the offset on, in words."""
        return covered(self.sizes.quantized, self.sizes.total)

    def step(self, eigenvalues: Mapping[str, float] | None = None) -> tuple[Switch, ...]:
        """After an optimizer step that was not skipped: advance the schedule and quantize every weight once.

        Args:
            eigenvalues: As for `PrecisionSchedule.advance`.

        Returns:
            What changed.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        switches = self.schedule.advance(eigenvalues)
        self.history += switches
        switched = {switch.block for switch in switches}
        due = self.schedule.steps % self.config.scale_refresh == 0
        # In the same order in all processes, which gather shards for it.
        self._apply_bits(block for block in self.blocks if due or block in switched)
        self.refresh(wait=False)
        self._log(switches)
        return switches

    def check_ranks(self, skipped: bool = False) -> None:
        """Stop in all processes unless every one has the same config, plan and bits: before each step.

        A message of 16 bytes. Ranks that disagree would wait for each other for ever, or train different models.

        Args:
            skipped: Whether the gradient scaler skipped this rank's step.

        Raises:
            MoQError: They differ; says how.
        """
        if not is_distributed():
            return
        sums = [_checksum(what_counts(self.config)), _checksum(self.schedule.state_dict())]
        bits = [layer.moq.bits for layer in self.layers.values()]
        weight = next(iter(self.layers.values())).weight
        agree(_checksum([sums, bits, skipped]), device_of(weight), lambda: self._shown(sums) + ", skipped" * skipped)

    def check_readers(self) -> None:
        """Stop if the model uses a float weight past its layer: after a backward pass, in all processes.

        Raises:
            MoQError: Names the layers.
        """
        check_readers({**self.layers, **self.embeddings})

    def measure(self, loss: Callable[[Inputs], Tensor]) -> dict[str, float] | None:
        """The eigenvalues for the coming `step`, measured if one is due; None without `eigenvalue.enabled`.

        Args:
            loss: Gives the scalar mean loss of the model over a batch of `sensitivity.samples`.

        Raises:
            MoQError: As for `Sensitivity.update`.
        """
        if self.sensitivity is None:
            return None
        if self.at_target:
            self.sensitivity.samples.clear()
        self.sensitivity.check(loss)
        if self.sensitivity.is_due(self.schedule):
            # The optimizer has just changed the weights: measured is what the next forward pass would see.
            self.refresh()
            self.sensitivity.update(self.schedule, loss)
        self.sensitivity.samples.end_step()
        return self.sensitivity.values

    def refresh(self, *, wait: bool = True) -> None:
        """Quantize every weight, each once, from what it is now.

        Args:
            wait: For a GPU's word on NaN and Inf. Otherwise an error may come a step or more late.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        blend = self.schedule.blend
        for block, names in self.blocks.items():
            for name in names:
                layer = self.layers[name]
                layer.count_steps(self.schedule.steps)
                layer.moq.blend = blend[block]
                layer.moq.activation_bits = self.activation_bits
        for table in self.embeddings.values():
            table.moq.bits = (self.config.quantize_embeddings if self.has_begun else None) or FLOAT_BITS
        self._refresher.refresh()
        self._refresher.check_finite(wait=wait)
        lead_copies()

    def metrics(self) -> dict[str, float]:
        """Scalars for a Trainer's log.

        Always bits per parameter and the size of the whole model now, in megabytes, the share of it that is quantized,
        and where the config blends, each block's share of the float weights. At the step of a switch also each block's
        bits, period and eigenvalue.
        """
        bits, period = self.schedule.bits, self.schedule.period
        scalars = {
            "moq/mean_bits": round(self.mean_bits, 4),
            "moq/quantized_share": round(self.quantized_share, 4),
            "moq/size_mb": round(self.size_mb, 4),
        }
        if self.config.blend.enabled:
            scalars |= {f"moq/blend/{block}": round(share, 6) for block, share in self.schedule.blend.items()}
        if not self.history or self.history[-1].step != self.schedule.steps:
            return scalars
        scalars |= {f"moq/bits/{block}": bits[block] for block in self.blocks}
        scalars |= {f"moq/period/{block}": period[block] for block in self.blocks}
        if self.sensitivity is not None:
            scalars |= {f"moq/eigenvalue/{block}": value for block, value in self.sensitivity.values.items()}
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs beside the float weights, in JSON types.

        Raises:
            MoQError: A weight holds NaN or Inf.
        """
        self._refresher.check_finite()
        return {
            "version": STATE_VERSION,
            "moq_hf": __version__,
            "config": self.config.to_dict(),
            "schedule": self.schedule.state_dict(),
            "ratios": {
                name: encode(layer.moq.ratio) for name, layer in self.layers.items() if layer.moq.ratio is not None
            },
            "history": [list(switch) for switch in self.history],
            "float_size_mb": self.float_size_mb,
            "sensitivity": None if self.sensitivity is None else self.sensitivity.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Go on from a saved state; call it after the float weights are loaded.

        Returns:
            What changed in the config and counts: dotted key to the saved value and that of now.

        Raises:
            MoQError: The state is of other layers, of a config that this one cannot go on from (see `load_schedule`),
                of a newer moq_hf, or damaged.
        """
        check_state(state)
        # A checkpoint of an earlier version lacks the keys that came later: they had their defaults.
        changed = changes(MoQConfig.from_dict(state["config"]), self.config)
        load_schedule(self.schedule, state, changed)
        self.history = [Switch(*switch) for switch in state["history"]]
        for block, names in self.blocks.items():
            for name in names:
                layer = self.layers[name]
                layer.moq.bits = self.schedule.bits[block]
                layer.moq.ratio = None
                if name in state["ratios"]:
                    shape = layer.moq.grid.shape(*layer.matrix.shape)
                    layer.moq.ratio = decode(name, state["ratios"][name], shape).to(layer.weight.device)
        # Before the offset a changed config may have made other blocks of the layers.
        if self.sensitivity is not None and (self.has_begun or not changed):
            # Other limits, another number of examples.
            asked = {"rows": 0} if any(key.startswith("eigenvalue.") for key in changed) else {}
            self.sensitivity.load_state_dict({**state["sensitivity"], **asked})
        self.refresh()
        return changed

    def summary(self) -> str:
        """One line: what is quantized and what is left alone, and why if neither the config nor its place says so."""
        added = adapters(self.model)
        left: dict[str, list[str]] = {}
        for name, module in named_modules(self.model):
            table = isinstance(module, nn.Embedding) and self.config.quantize_embeddings is not None
            reason = misfit(module) if is_linear(module) or table else None
            if name in self.layers or not plain_name(name, added) or not (is_linear(module) or reason):
                continue
            left.setdefault(f"left in float, {reason}" if reason else "left in full precision", []).append(name)
        if added:
            left.setdefault("left in full precision", []).append("PEFT's adapters")
        weights = sum(layer.weight.numel() for layer in self.layers.values())
        parts = [
            f"{len(self.layers)} linear layers in {len(self.blocks)} blocks ({in_words(weights)} weights) go from "
            f"{self.config.start_bits} to {self.config.target_bits} bits"
        ]
        if self.embeddings:
            parts.append(f"{len(self.embeddings)} embedding tables to {self.config.quantize_embeddings}")
        activation = self.config.activation
        if activation.enabled:
            parts.append(f"their inputs to {activation.bits} bits after {activation.start_step} steps")
        parts.append(f"quantized: {self.coverage()}")
        parts += [f"{why}: {', '.join(names)}" for why, names in left.items()] or ["no linear layer is left out"]
        return "; ".join(parts)

    def warnings(self) -> list[str]:
        """What a user should know before the first step."""
        notes = []
        if self.quantized_share < 0.5:
            notes.append(self._what_stays_in_float())
        devices = {layer.weight.device for layer in self.layers.values()}
        if self.config.kernel and not all(triton_wanted(device, self.config.kernel) for device in devices):
            notes.append(
                "quantizer_kernel: the Triton kernels need a CUDA device and a working Triton; plain PyTorch gives the "
                "same numbers"
            )
        if self.sensitivity is not None and len(self.sensitivity.blocks) == 1:
            notes.append("eigenvalue: there is only one block, so nothing to compare it with: its factor is always 5")
        if self.config.modules_to_not_convert is not None:
            heads = [name for name in output_heads(self.model, dict(linears(self.model))) if name in self.layers]
            if heads:
                notes.append(
                    f"the output heads {', '.join(heads)} are quantized too, since modules_to_not_convert is given "
                    "without them; add them to it to leave them in full precision"
                )
        if self.config.activation.enabled and isinstance(self.config.grouping, PerGroup):
            notes.append(
                "activation_quantization: integer products need one scale per row, so the int8 export keeps layers "
                "with a quantize_group_size weight-only; set quantize_groups instead, for instance per_channel"
            )
        return notes

    def _what_stays_in_float(self) -> str:
        others = self.sizes.largest_others()
        shown = [group for group, count in others.items() if count >= 0.01 * sum(others.values())][:4]
        told = [f"{in_words(others[group])} in {group}" for group in shown]
        rest = sum(others.values()) - sum(others[group] for group in shown)
        if rest:
            told.append(f"{in_words(rest)} elsewhere")
        tables = [name for name in embeddings_to_quantize(self.model, self.config) if name not in self.embeddings]
        # A table that is shared is an error there.
        if tables and not shared_weights(self.model, tables):
            names = dict.fromkeys(last_part(f"{name}.weight") for name in tables)
            told[-1] += f"; quantize_embeddings would take {', '.join(names)}"
        return f"only {self.coverage()} are in quantized layers; the others: {', '.join(told)}"

    def _shown(self, sums: list[int]) -> str:
        return (
            f"{self.schedule.steps} steps of {self.schedule.total_steps}, mean {self.mean_bits:.4f} bits "
            f"(config {sums[0]:08x}, schedule {sums[1]:08x})"
        )

    def _block_of(self, layer: str) -> str:
        measured = self.sensitivity.blocks if self.sensitivity is not None else ()
        own = (block for block in measured if layer == block or layer.startswith(block + "."))
        return next(own, None) or block_of(self.model, layer)

    def _apply_bits(self, blocks: Any) -> None:
        for block in blocks:
            for name in self.blocks[block]:
                self.layers[name].set_bits(self.schedule.bits[block])

    def _log(self, switches: tuple[Switch, ...]) -> None:
        if not switches:
            return
        if self.config.verbose:
            for s in switches:
                logger.info("%s", self._sentence(s))
        changes = sorted({(s.before, s.bits) for s in switches}, reverse=True)
        for before, bits in changes:
            blocks = [s.block for s in switches if (s.before, s.bits) == (before, bits)]
            layers = sum(len(self.blocks[block]) for block in blocks)
            logger.info(
                "step %d: %s -> %d bits in %d of %d layers; mean %.2f bits over the whole model",
                switches[0].step,
                "float" if before == FLOAT_BITS else before,
                bits,
                layers,
                len(self.layers),
                self.mean_bits,
            )

    def _sentence(self, switch: Switch) -> str:
        start = "starts at" if switch.before == FLOAT_BITS else f"goes from {switch.before} to"
        due = self.config.schedule.offset + switch.period
        then = "its target" if switch.bits == self.config.target_bits else f"and drops next after step {due}"
        reason = "" if switch.eigenvalue is None else f" (eigenvalue {switch.eigenvalue:.2f}, factor {switch.factor})"
        return f"step {switch.step}: {switch.block} {start} {switch.bits} bits, {then}{reason}"


def _checksum(state: Any) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())
