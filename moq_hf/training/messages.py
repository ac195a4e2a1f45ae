"""What a run says: what is quantized, what a user should know, what switched, and how a checkpoint's run goes on."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import triton_launch
from ..config import MoQConfig
from ..config_fields import DistillationConfig, Speller
from ..errors import MOST_FAULTS, shortened
from ..model import delivery
from ..model.inventory import Inventory, is_convolution
from ..model.selection import widest_codes
from ..model.sizes import TABLE, ModelSizes, percent
from ..schedule import FLOAT_BITS, PrecisionSchedule, Switch
from ..servers import NAMED
from ..text import counted
from .distillation import PARTS, TASK
from .resume import describe


def summary(
    inventory: Inventory, config: MoQConfig, blocks: int, sizes: ModelSizes
) -> str:
    """One line: what is quantized and what is left alone, and why if neither the config nor its place says so.

    Args:
        inventory: With the layers that the config quantizes.
        config: What will be done to them.
        blocks: How many there are.
        sizes: Of the model.
    """
    left: dict[str, list[str]] = {}
    for name, reason in inventory.left_out.items():
        why = "left in float"
        if reason is not None:
            why += f", {reason.removeprefix('has ')}"
        left.setdefault(why, []).append(name)
    if inventory.adapters and not inventory.merged:
        left.setdefault("left in float", []).append("PEFT's adapters")
    told = {why: shortened(names, MOST_FAULTS) for why, names in left.items()}
    for text in _left_of_kinds(inventory, config, sizes):
        before = told.get("left in float")
        told["left in float"] = f"{before}, and {text}" if before else text
    convolutions = sum(map(is_convolution, inventory.layers.values()))
    counts = {
        "linear layer": len(inventory.layers) - convolutions,
        "convolution": convolutions,
        "expert parameter": len(inventory.experts),
    }
    what = " and ".join(counted(n, kind) for kind, n in counts.items() if n)
    go = "goes" if sum(counts.values()) == 1 else "go"
    parts = [
        f"{what} in {counted(blocks, 'block')} {go} {'from' if config.falls else 'to'} {config.span_in_words}"
    ]
    if convolutions and config.has_row_groups:
        parts.append("convolutions have one scale per channel")
    if inventory.embeddings:
        parts.append(
            f"{counted(len(inventory.embeddings), 'embedding table')} to {inventory.table_bits} bits"
        )
    parts += [
        f"{name} shares the weight of {owner}" for name, owner in inventory.tied.items()
    ]
    activation = config.activations
    if activation.enabled:
        parts.append(
            f"the inputs of linear layers to {activation.bits} bits ({activation.scale})"
            + (f" after {activation.start_step} steps" * (activation.start_step > 0))
        )
        computed = delivery.inputs_in_words(inventory, config)
        parts.append(f"the delivered folder computes with {computed}")
    parts.append(f"quantized: {sizes.coverage}")
    parts += [f"{why}: {what}" for why, what in told.items()] or [
        "no layer is left out"
    ]
    return "; ".join(parts)


def _left_of_kinds(
    inventory: Inventory, config: MoQConfig, sizes: ModelSizes
) -> Iterator[str]:
    """Which weights of other modules than linear layers are left in float, how much they are, and what can be done."""
    known = {*inventory.embeddings, *inventory.tied}
    could = inventory.tables.keys() - known
    if any("embedding" in NAMED[n].without for n in config.serve):
        could = set()
    for kind, counts in sizes.left.items():
        what, which = (f"{kind}s", "are") if len(counts) > 1 else (kind, "is")
        share = percent(sum(counts) / sizes.total)
        way = ""
        if kind == TABLE and inventory.tables_stay is not None:
            way = f" ({inventory.tables_stay})"
        elif kind == TABLE and could:
            width = min(8, max(2, *config.targets)) if sizes.is_unpacked else 8
            way = f" (embeddings={width} quantizes them)"
        yield f"the {what}, which {which} {share} of the parameters{way}"


def warnings(inventory: Inventory, config: MoQConfig, sizes: ModelSizes) -> list[str]:
    """What a user should know before the first step.

    Args:
        inventory: With the layers that the config quantizes.
        config: What will be done to them.
        sizes: Of the model.
    """
    notes = []
    if sizes.share < 0.5:
        notes.append(f"only {sizes.coverage} are in quantized layers")
    devices: set[torch.device] = {
        layer.weight.device for layer in inventory.layers.values()
    }
    # On a CUDA device the kernels say themselves what keeps them from running.
    if config.kernel and not all(
        device.type == "cuda" or triton_launch.available(device) for device in devices
    ):
        notes.append(
            f"{config.spell('kernel')}: the Triton kernels need a CUDA device; plain PyTorch gives the same numbers"
        )
    width = widest_codes(inventory, config)
    if (inventory.table_bits or 0) > width and sizes.is_unpacked:
        notes.append(
            f"all codes in the file of this model will be as wide as those of its embedding tables, "
            f"{inventory.table_bits} bits, or the tables stay floats if that is smaller, since transformers unpacks it "
            f"while loading; {config.spell('embeddings')}: {width} keeps the layers' own bits"
        )
    at_full_size = sizes.at_full_size(config)
    if at_full_size is not None:
        notes.append(at_full_size)
    convolutions = any(map(is_convolution, inventory.layers.values()))
    if convolutions and config.activations.enabled:
        notes.append(
            f"{config.spell('activations')} is of linear layers: the inputs of convolutions stay in float"
        )
    if config.activations.enabled and config.has_row_groups:
        notes.append(
            f"{config.spell('activations')}: integer products need one scale per channel, so the int8 export keeps "
            f"layers with a {config.spell('group_size')} weight-only; set {config.spell('groups')} instead, for "
            "instance per_channel"
        )
    return [*notes, *delivery.notes(inventory, config)]


def switch_in_words(switch: Switch, target_bits: int, offset: int) -> str:
    """A sentence on one block's change of precision.

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
    """What is other than before in a run that goes on from a checkpoint made with MoQ.

    Args:
        step: The checkpoint's.
        saved_at: The last step that it was trained with MoQ.
        changed: What changed in the config.
        teacher_before: The fingerprint of the teacher that it had.
        teacher: That of the one given now.
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
            f"the checkpoint at step {step} was trained without MoQ after step {saved_at}: its schedule goes on as "
            "after that step"
        )


def standing(
    schedule: PrecisionSchedule,
    steps: int,
    eigenvalues: Mapping[str, float] | None = None,
) -> str:
    """Where a run stands that goes on, and what is still to come.

    Args:
        schedule: As it goes on.
        steps: Optimizer steps of the run that it counts.
        eigenvalues: Those last measured.

    >>> config = MoQConfig(bits=4, start_bits=6, period=2)
    >>> schedule = PrecisionSchedule(config, ["layer.0", "layer.1"])
    >>> switches = [schedule.advance() for _ in range(3)]
    >>> standing(schedule, 10)
    'at step 3 of 10: 2 blocks at 5 bits; still to come: 4 bits at step 4'
    """
    now = f"at step {schedule.steps:,} of {steps:,}: {blocks_in_words(schedule.bits)}"
    if schedule.targets is None:
        return f"{now}; what each block ends with is chosen at step {schedule.offset:,}"
    # Of several blocks, the last one counts.
    coming = {switch.bits: switch.step for switch in schedule.forecast(eigenvalues)}
    parts = [f"{bits} bits at step {step:,}" for bits, step in coming.items()]
    return f"{now}; still to come: {', '.join(parts) or 'nothing'}"


def blocks_in_words(bits: Mapping[str, int]) -> str:
    """How many blocks are at how many bits.

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
    """That every block is at its target, since when, and whether that was planned.

    Args:
        bits: Block name to bits.
        history: Every switch of the run, those before it was resumed too.
        planned: The steps by which blocks were to be at their targets.

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
    """That training is over before the target was reached everywhere.

    Args:
        bits: Block name to bits.
        config: What was to be reached.
        steps: Optimizer steps that were taken.
        best: Whether the best checkpoint was to be loaded.
    """
    text = f"training ended at step {steps:,}, before every block was at {config.target_in_words}"
    if config.blend.enabled:
        text += " with no float weights blended in"
    if config.activations.enabled:
        text += f" with inputs rounded, after step {config.activations.start_step:,}"
    text = f"{text}: {blocks_in_words(bits)}"
    if set(bits.values()) == {FLOAT_BITS}:
        text += ", so nothing is delivered"
    if best:
        text += "; no checkpoint was a candidate for load_best_model_at_end"
    return text


def loss_in_words(config: DistillationConfig) -> str:
    """What the loss is made of with a teacher, and where its parts are logged.

    >>> print(loss_in_words(DistillationConfig(hidden=0.5)))
    1 x the task's own (moq/loss_task) + 1 x the teacher's logits (moq/loss_logits) + 0.5 x its hidden states \
(moq/loss_hidden)
    """
    return " + ".join(
        f"{weight:g} x {what} (moq/loss_{TASK if name == 'labels' else name})"
        for name, what in PARTS.items()
        if (weight := getattr(config, name))
    )
