"""The messages of a run: what it quantizes, what to know beforehand, each switch, how it resumes and how it ends."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import triton_launch
from ..config import MoQConfig
from ..config_fields import DistillationConfig, Speller
from ..errors import MOST_FAULTS, shortened
from ..model import delivery
from ..model.inventory import Inventory, is_convolution
from ..model.selection import has_decoder, widest_codes
from ..model.sizes import TABLE, ModelSizes, percent
from ..processes import shape_of
from ..schedule import FLOAT_BITS, PrecisionSchedule, Switch
from ..servers import NAMED
from ..text import counted
from .distillation import PARTS, TASK
from .resume import describe


def summary(
    inventory: Inventory, config: MoQConfig, sizes: ModelSizes, blocks: int = 0
) -> str:
    """Say in one line what is quantized and what is left in float, with the reasons that the config does not show.

    Args:
        inventory: The layers that the config quantizes, and those that it leaves out.
        config: The config of the run.
        sizes: The sizes of the model.
        blocks: The number of blocks whose bits a run may lower; 0 without a run.
    """
    parts = [_layers_in_words(inventory, config, blocks)]
    if config.has_row_groups and any(map(is_convolution, inventory.layers.values())):
        parts.append("convolutions have one scale per channel")
    if inventory.embeddings:
        tables = counted(len(inventory.embeddings), "embedding table")
        parts.append(f"{tables} to {inventory.table_bits} bits")
    if config.train == "scales":
        count = sum(scale.numel() for scale in inventory.trained_scales())
        parts.append(
            f"only the scales of layers train, {percent(count / sizes.total)} of the parameters, and what is unfrozen "
            "after they were added"
        )
    for name, owner in inventory.tied.items():
        parts.append(f"{name} shares the weight of {owner}")
    if config.rounds_inputs:
        begin = config.activations.start_step
        after = f" after {begin} steps" if begin else ""
        parts.append(f"the inputs of linear layers to {config.inputs_in_words}{after}")
        if blocks:
            computes = delivery.inputs_in_words(inventory, config)
            parts.append(f"the delivered folder computes with {computes}")
    if not blocks and _has_coarse_scales(inventory, config):
        parts.append(
            "one scale per channel loses much in language models at so few bits: group_size=32, as in lm-w4, loses less"
        )
    parts.append(f"quantized: {sizes.coverage}")
    parts += _left_in_float(inventory, config, sizes) or ["no layer is left out"]
    return "; ".join(parts)


def _has_coarse_scales(inventory: Inventory, config: MoQConfig) -> bool:
    """True for a decoder whose integers of 4 bits and fewer have one scale per channel."""
    has_groups = config.group_size is not None or config.grid is not None
    few = min(config.targets, default=FLOAT_BITS) <= 4
    return few and config.format == "int" and not has_groups and has_decoder(inventory)


def _layers_in_words(inventory: Inventory, config: MoQConfig, blocks: int) -> str:
    """Count the layers that are quantized, and say to how many bits."""
    convolutions = sum(map(is_convolution, inventory.layers.values()))
    counts = {
        "linear layer": len(inventory.layers) - convolutions,
        "convolution": convolutions,
        "expert parameter": len(inventory.experts),
    }
    what = " and ".join(counted(n, kind) for kind, n in counts.items() if n)
    go = "goes" if sum(counts.values()) == 1 else "go"
    if not blocks:
        return f"{what} {go} to {config.target_in_words}"
    way = "from" if config.falls else "to"
    return f"{what} in {counted(blocks, 'block')} {go} {way} {config.span_in_words}"


def _left_in_float(
    inventory: Inventory, config: MoQConfig, sizes: ModelSizes
) -> list[str]:
    """Say what stays in float, in one sentence for each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in inventory.left_out.items():
        why = f", {reason.removeprefix('has ')}" if reason else ""
        names.setdefault(why, []).append(name)
    told: dict[str, list[str]] = {}
    for why, alike in names.items():
        share = _numbers_of(alike, inventory) / sizes.total
        size = f" ({percent(share)} of the parameters)" if share >= 0.01 else ""
        told[why] = [f"{shortened(alike, MOST_FAULTS)}{size}"]
    if inventory.adapters and not inventory.merged:
        told.setdefault("", []).append("PEFT's adapters")
    for text in _left_of_kinds(inventory, config, sizes):
        told.setdefault("", []).append(text)
    return [f"left in float{why}: {', and '.join(what)}" for why, what in told.items()]


def _numbers_of(names: Iterable[str], inventory: Inventory) -> int:
    """Count the parameters of modules, each once, without those that are tables too."""
    tables = [
        m.weight for m in inventory.modules.values() if isinstance(m, nn.Embedding)
    ]
    seen = {id(table) for table in tables}
    count = 0
    for name in names:
        for parameter in inventory.modules[name].parameters(recurse=False):
            count += shape_of(parameter).numel() * (id(parameter) not in seen)
            seen.add(id(parameter))
    return count


def _left_of_kinds(
    inventory: Inventory, config: MoQConfig, sizes: ModelSizes
) -> Iterator[str]:
    """Say which modules that are not linear layers stay in float, how large they are, and how to quantize them."""
    known = {*inventory.embeddings, *inventory.tied}
    could = inventory.tables.keys() - known
    if any("embedding" in NAMED[n].without for n in config.serve):
        could = set()
    for kind, counts in sizes.left.items():
        what, which = (f"{kind}s", "are") if len(counts) > 1 else (kind, "is")
        share = percent(sum(counts) / sizes.total)
        ways = []
        if kind == TABLE and inventory.tables_stay is not None:
            ways.append(inventory.tables_stay)
        if kind == TABLE and could:
            width = min(8, max(2, *config.targets)) if sizes.is_unpacked else 8
            those = "them" if len(counts) > 1 else "it"
            ways.append(f"embeddings={width} quantizes {those}")
        way = f" ({'; '.join(ways)})" if ways else ""
        yield f"the {what}, which {which} {share} of the parameters{way}"


def warnings(inventory: Inventory, config: MoQConfig, sizes: ModelSizes) -> list[str]:
    """Collect what a user should know before the first step.

    Args:
        inventory: The layers that the config quantizes.
        config: The config of the run.
        sizes: The sizes of the model.
    """
    notes = []
    if sizes.share < 0.5:
        notes.append(f"only {sizes.coverage} are in quantized layers")
    devices: set[torch.device] = {
        layer.weight.device for layer in inventory.layers.values()
    }
    # On a CUDA device the kernels themselves report why they cannot run.
    if config.kernel and not all(
        device.type == "cuda" or triton_launch.available(device) for device in devices
    ):
        notes.append(
            f"{config.spell('kernel')}: the Triton kernels need a CUDA device; plain PyTorch gives the same numbers"
        )
    width = widest_codes(inventory, config)
    if (inventory.table_bits or 0) > width and sizes.is_unpacked:
        notes.append(
            f"embedding tables of {inventory.table_bits} bits make this file larger: transformers unpacks the model "
            "while loading, so its layers are stored at as many bits (or the tables as floats, if that is smaller); "
            f"{config.spell('embeddings')}: {width} keeps the layers at theirs"
        )
    at_full_size = sizes.at_full_size(config)
    if at_full_size is not None:
        notes.append(at_full_size)
    convolutions = any(map(is_convolution, inventory.layers.values()))
    if convolutions and config.rounds_inputs:
        notes.append(
            f"{config.spell('activations')} is for linear layers: the inputs of convolutions stay in float"
        )
    if (
        config.rounds_inputs
        and config.has_row_groups
        and "executorch" not in config.serve
    ):
        notes.append(
            f"{config.spell('activations')}: integer products need one scale per channel, so the int8 export keeps "
            f"layers with a {config.spell('group_size')} weight-only; set {config.spell('groups')} instead, for "
            "instance per_channel"
        )
    return [*notes, *delivery.notes(inventory, config)]


def switch_in_words(switch: Switch, target_bits: int, offset: int) -> str:
    """Say how the precision of a block changed, and when it changes next.

    >>> switch_in_words(Switch(6, "layer.1", 5, 4, 8, 1, None), target_bits=3, offset=2)
    'step 6: layer.1 goes from 5 to 4 bits, and drops next after step 10'
    """
    start = (
        "starts at" if switch.before == FLOAT_BITS else f"goes from {switch.before} to"
    )
    due = offset + switch.period
    then = (
        "its target"
        if switch.bits == target_bits
        else f"and drops next after step {due}"
    )
    reason = (
        ""
        if switch.eigenvalue is None
        else f" (eigenvalue {switch.eigenvalue:.2f}, factor {switch.factor})"
    )
    return (
        f"step {switch.step}: {switch.block} {start} {switch.bits} bits, {then}{reason}"
    )


def notes_on_resuming(
    step: int,
    saved_at: int,
    changed: Mapping[str, tuple[Any, Any]],
    teacher_before: int | None,
    teacher: int | None,
    spell: Speller,
) -> Iterable[str]:
    """Say what has changed since the checkpoint from which a run resumes.

    Args:
        step: The step of the checkpoint.
        saved_at: The last step that was trained with MoQ.
        changed: Key of the config to its values before and now.
        teacher_before: The fingerprint of the teacher of the checkpoint; None without
            one.
        teacher: The fingerprint of the teacher now.
        spell: Gives the name of a key by its path.
    """
    if changed:
        yield f"the run goes on with another MoQ config: {describe(changed, spell)}"
    if teacher_before != teacher and "distillation.teacher" not in changed:
        had = "a" if teacher is None else "no" if teacher_before is None else "another"
        goes_on = "without one" if teacher is None else "with the one given"
        yield f"the checkpoint at step {step} had {had} teacher: the run goes on {goes_on}"
    if saved_at != step:
        yield (
            f"the checkpoint at step {step} was trained without MoQ after step {saved_at}: its schedule goes on from "
            "that step"
        )


def standing(
    schedule: PrecisionSchedule,
    steps: int,
    eigenvalues: Mapping[str, float] | None = None,
) -> str:
    """Say how far a resumed run has come, and which drops are still to come.

    Args:
        schedule: The schedule, with its state loaded.
        steps: Optimizer steps of the whole run.
        eigenvalues: The last eigenvalue of each block that was measured.

    >>> config = MoQConfig(bits=4, start_bits=6, period=2)
    >>> schedule = PrecisionSchedule(config, ["layer.0", "layer.1"])
    >>> switches = [schedule.advance() for _ in range(3)]
    >>> standing(schedule, 10)
    'at step 3 of 10: 2 blocks at 5 bits; still to come: 4 bits at step 4'
    """
    now = f"at step {schedule.steps:,} of {steps:,}: {blocks_in_words(schedule.bits)}"
    if schedule.targets is None:
        return f"{now}; the bits of each block are chosen at step {schedule.offset:,}"
    # Bits are reached when the last block reaches them.
    coming = {switch.bits: switch.step for switch in schedule.forecast(eigenvalues)}
    parts = [f"{bits} bits at step {step:,}" for bits, step in coming.items()]
    return f"{now}; still to come: {', '.join(parts) or 'nothing'}"


def blocks_in_words(bits: Mapping[str, int]) -> str:
    """Count the blocks at each number of bits.

    >>> blocks_in_words({"a": 4, "b": 32, "c": 4})
    '1 block in float, 2 blocks at 4 bits'
    """
    parts = []
    for width, count in sorted(Counter(bits.values()).items(), reverse=True):
        at = "in float" if width == FLOAT_BITS else f"at {counted(width, 'bit')}"
        parts.append(f"{counted(count, 'block')} {at}")
    return ", ".join(parts)


def arrival(
    bits: Mapping[str, int], history: Iterable[Switch], planned: Sequence[int]
) -> str:
    """Say when the last block reached its target, and whether that was planned.

    Args:
        bits: Block name to bits.
        history: Every switch of the run, including those before it was resumed.
        planned: The steps by which the plan has blocks at their targets.

    >>> arrival({"a": 4, "b": 4}, [Switch(5, "a", 5, 4, 9, 1, None), Switch(7, "b", 5, 4, 9, 1, None)], [5, 7])
    'All 2 blocks reached 4 bits at step 7, as planned.'
    >>> arrival({"a": 4, "b": 8}, [], [0])
    'All 2 blocks were at their targets from the first step on, as planned.'
    """
    who = f"All {len(bits)} blocks" if len(bits) > 1 else "The one block"
    found = set(bits.values())
    target = "their targets" if len(found) > 1 else counted(found.pop(), "bit")
    last = max((switch.step for switch in history), default=0)
    plan = f"planned by step {max(planned):,}"
    if min(planned) <= last <= max(planned):
        plan = "as planned"
    if not last:
        were = "were" if len(bits) > 1 else "was"
        return f"{who} {were} at {target} from the first step on, {plan}."
    return f"{who} reached {target} at step {last:,}, {plan}."


def ended_early(
    bits: Mapping[str, int], config: MoQConfig, steps: int, best: bool
) -> str:
    """Say that training ended before every block was at its target, and what follows from that.

    Args:
        bits: Block name to bits.
        config: The config of the run.
        steps: Optimizer steps taken.
        best: Whether the run was to load its best checkpoint.
    """
    text = f"training ended at step {steps:,}, before every block was at {config.target_in_words}"
    if config.blend.enabled:
        text += " with no float weights blended in"
    if config.rounds_inputs:
        text += f" with inputs rounded, after step {config.activations.start_step:,}"
    text = f"{text}: {blocks_in_words(bits)}"
    if set(bits.values()) == {FLOAT_BITS}:
        text += ", so nothing is delivered"
    if best:
        text += "; no checkpoint was a candidate for load_best_model_at_end"
    return text


def loss_in_words(config: DistillationConfig) -> str:
    """Say which parts the loss has with a teacher, and under which names they are logged.

    >>> print(loss_in_words(DistillationConfig(hidden=0.5)))
    1 x the task's own (moq/loss_task) + 1 x the teacher's logits (moq/loss_logits) + 0.5 x its hidden states \
(moq/loss_hidden)
    """
    return " + ".join(
        f"{weight:g} x {what} (moq/loss_{TASK if name == 'labels' else name})"
        for name, what in PARTS.items()
        if (weight := getattr(config, name))
    )
