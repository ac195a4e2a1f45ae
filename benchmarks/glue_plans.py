"""What `glue_study.py` trains: arms, the plans that list them, and a run's identity."""

import copy
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

EPOCHS = {"sst2": 1, "cola": 2, "mrpc": 2, "stsb": 2}
STEPS = {"sst2": 250, "cola": 268, "mrpc": 115, "stsb": 180}  # Of an epoch of all rows.
# On SST-2 and CoLA the best of 5e-5, 1e-4 and 2e-4 for the float model, with seed 1;
# MRPC had no other.
RATES = {"sst2": 2e-4, "cola": 1e-4, "mrpc": 2e-4, "stsb": 2e-4}
RESTART = "cosine_with_restarts"
# Keys of a run that its identity leaves out at these values.
LATER: dict[str, Any] = {
    "bf16": False, "warm_times": 1, "warm_decay": "linear", "dropout": True, "gpu": False,
    "warm_dropout": True, "warm_again": False,
}  # fmt: skip
# The same for float models of twice the epochs, on every task, by the plan "rates".
LONG_RATES = {"sst2": 2e-4, "cola": 1e-4, "mrpc": 1e-4, "stsb": 2e-4}
# And those of float first at 1 bit, at once and by way of 2, by the plan "one bit rates".
ONE_BIT_RATES = {"sst2": 2e-4, "cola": 4e-4, "mrpc": 2e-4}
FALLING_RATES = {"sst2": 4e-4, "cola": 4e-4, "mrpc": 4e-4}
MIDDLE = "basic QAT from the middle of a run, no teacher"
# Each stands for the task's of one of the tables above.
OWN, LONG_OWN, ONE_BIT_OWN, FALLING_OWN = -1.0, -2.0, -3.0, -4.0
TABLES_OF_RATES = {OWN: RATES, LONG_OWN: LONG_RATES, ONE_BIT_OWN: ONE_BIT_RATES, FALLING_OWN: FALLING_RATES}
FULL = "per channel, full"
TABLES = "per channel, full, tables at 8 bits"
SMALL_TABLES = "per channel, full, tables at 4 bits"
SEARCHED_MORE, SEARCHED_ONCE = (f"{FULL}, searched every {steps} steps" for steps in (10, 1000))
FROM_GPTQ = "per channel, full, from GPTQ's rounding"
GROUPS: dict[str, dict[str, Any]] = {
    "8 blocks": {"quantize_groups": 8, "quantize_algo": {"range": "narrow"}},
    "per channel": {"quantize_groups": "per_channel", "quantize_algo": {"range": "narrow"}},
    "groups of 64": {"quantize_group_size": 64, "quantize_algo": {"range": "narrow"}},
    "groups of 32": {"quantize_group_size": 32, "quantize_algo": {"range": "narrow"}},
    FULL: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full"}},
    FROM_GPTQ: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full", "gptq": 256}},
    TABLES: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full"}, "quantize_embeddings": "auto"},
    SMALL_TABLES: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full"}, "quantize_embeddings": 4},
    "groups of 64, full": {"quantize_group_size": 64, "quantize_algo": {"range": "full"}},
    SEARCHED_MORE: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full", "scale_refresh": 10}},
    SEARCHED_ONCE: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full", "scale_refresh": 1000}},
    "groups of 32, full": {"quantize_group_size": 32, "quantize_algo": {"range": "full"}},
    "groups of 128, full": {"quantize_group_size": 128, "quantize_algo": {"range": "full"}},
    "groups of 128, absmax": {"quantize_group_size": 128, "quantize_algo": {"range": "full", "scale": "absmax"}},
    "groups of 32, absmax": {"quantize_group_size": 32, "quantize_algo": {"range": "full", "scale": "absmax"}},
    "per channel, asymmetric": {"quantize_groups": "per_channel", "quantize_algo": {"q_type": "asymmetric"}},
    "groups of 32, asymmetric": {"quantize_group_size": 32, "quantize_algo": {"q_type": "asymmetric"}},
    "groups of 32, full, by GPTQ": {"quantize_group_size": 32, "quantize_algo": {"range": "full", "gptq": 256}},
}


def rounded_inputs(groups: str, inputs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The weights' grid of a key of `GROUPS`, with rounded inputs."""
    return {**GROUPS[groups], "activation_quantization": {"enabled": True, **inputs}, **more}


STATIC, RANGES, PER_TOKEN = (
    {"bits": 8},
    {"symmetric": False, "percentile": 99.99, "window": 1000},
    {"scale": "per_token"},
)
NARROW = {"bits": 4, "scale": "per_token"}
# The second products of MPNet's feed-forward parts, which have the outliers, and the first ones.
SECOND, FIRST = (
    {"overrides": {f"*.{part}.dense": {"activations": bits}}} for part, bits in (("output", False), ("intermediate", 8))
)
W8A8 = {
    "static symmetric": (STATIC, {}),
    "static symmetric, outlier layers in float": (STATIC, SECOND),
    "static asymmetric": ({"symmetric": False}, {}),
    "static asymmetric, percentile, window": (RANGES, {}),
    "per token": (PER_TOKEN, {}),
}
W4 = {
    "w4a8": (PER_TOKEN, {}),
    "w4, 4-bit inputs": (NARROW, {}),
    "w4a4": ({**NARROW, "wide_bits": 8}, {}),
    "w4a4, both products at 8": ({**NARROW, "wide_bits": 8}, FIRST),
}
GROUPS |= {name: rounded_inputs(FULL, inputs, **more) for name, (inputs, more) in W8A8.items()}
GROUPS |= {name: rounded_inputs("groups of 32, full", inputs, **more) for name, (inputs, more) in W4.items()}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: What the tables call it.
        moq: Its configuration, or None for float.
        bits: Of its target; the float arm has 32 and also writes a line for each of `after`.
        learning_rate: The largest one.
        times: How many times the task's epochs.
        groups: A key of `GROUPS`.
        after: Bits and keys of `GROUPS`, to which the float model is quantized after training.
        warm: Learning rate of the float run whose model it starts from; 0: from the pretrained one.
        warm_times: How many times the task's epochs that float run has.
        warm_decay: Of the learning rate of that float run.
        warm_dropout: Whether that float run had dropout.
        warm_again: Whether it starts from the float run of `BASE_FLOAT` instead, whose learning rate started twice.
        decay: Of the learning rate, as Trainer's `lr_scheduler_type`; the restart of `RESTART` is in the middle.
        dropout: Whether dropout stays on: beside a teacher, where moq_hf switches it off by default, or in a run
            without one.
    """

    name: str
    moq: dict[str, Any] | None = None
    bits: int = 32
    learning_rate: float = OWN
    times: float = 1
    groups: str = "8 blocks"
    after: tuple[tuple[int, str], ...] = ()
    warm: float = 0.0
    warm_times: float = 1
    warm_decay: str = "linear"
    decay: str = "linear"
    dropout: bool = True
    warm_dropout: bool = True
    warm_again: bool = False

    def on(self, task: str) -> "Arm":
        """Itself with the task's learning rates for those that stand for a table, and its step for a share of the run.

        A change ratio of quantization above 1 is of the whole run.
        """

        def settled(rate: float) -> float:
            return TABLES_OF_RATES[rate][task] if rate in TABLES_OF_RATES else rate

        moq = copy.deepcopy(self.moq)
        if moq is not None and "distillation" in moq:
            moq["distillation"]["teacher"] = settled(moq["distillation"]["teacher"])
        if moq is not None and 0 < moq["quantize_schedule"]["schedule_offset"] < 1:
            moq["quantize_schedule"]["schedule_offset"] = round(
                moq["quantize_schedule"]["schedule_offset"] * STEPS[task] * EPOCHS[task] * self.times
            )
        if moq is not None and moq.get("fp16_mixed_quantize", {}).get("quantize_change_ratio", 0) > 1:
            moq["fp16_mixed_quantize"]["quantize_change_ratio"] /= STEPS[task] * EPOCHS[task] * self.times
        return replace(self, moq=moq, learning_rate=settled(self.learning_rate), warm=settled(self.warm))

    def config(self) -> dict[str, Any] | None:
        """The whole configuration."""
        return None if self.moq is None else {**self.moq, **GROUPS[self.groups]}


def qat(
    bits: int, name: str = "basic QAT", moq: Mapping[str, Any] | None = None, offset: float = 0, **more: Any
) -> Arm:
    """Target bits from step `offset` on, or from that share of the run if it is below 1; float until then."""
    config = {
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": offset},
    }
    return Arm(name, {**config, **(moq or {})}, bits, **more)


def ramp(
    start: int, bits: int, deadline: float, name: str = "", moq: Mapping[str, Any] | None = None, **more: Any
) -> Arm:
    """From `start` bits to `bits` within the share `deadline` of the run; basic QAT if these are the same."""
    if start == bits:
        return qat(bits, name or "basic QAT", moq, **more)
    config = {
        "quantize_bits": {"start_bits": start, "target_bits": bits},
        "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 0, "deadline": deadline},
    }
    return Arm(name or f"MoQ {start} by {deadline:g}", {**config, **(moq or {})}, bits, **more)


def each(bits: Iterable[int], groups: Iterable[str]) -> tuple[tuple[int, str], ...]:
    """Every grid at all of the bits."""
    return tuple(itertools.product(bits, groups))


FLOAT = Arm("float", after=each((8, 4, 3, 2), ("8 blocks", "per channel", "groups of 64")))
LONG = Arm("float", learning_rate=LONG_OWN, times=2)


@dataclass(frozen=True)
class Plan:
    """Arms, the tasks and the seeds to run them on.

    Attributes:
        bf16: Computed in bfloat16.
        gpu: Trained on a GPU.
    """

    arms: tuple[Arm, ...]
    tasks: tuple[str, ...] = ("sst2", "cola", "mrpc")
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    bf16: bool = False
    gpu: bool = False

    def run(self, arm: Arm, task: str, seed: int, rows: int | None = None) -> "Run":
        """One of its runs."""
        return Run(arm, task, seed, rows, self.bf16, self.gpu)


CHANNELS: dict[str, Any] = {"groups": "per channel"}
# Taught: from the float model of the same seed, with it as the teacher; its learning rate stands in for its folder.
TAUGHT: dict[str, Any] = {"moq": {"distillation": {"teacher": OWN, "labels": 1.0}}, "warm": OWN, **CHANNELS}


# Of the plans in bfloat16: a float run also tells what its model is worth when quantized to these.
LOW_GRIDS = ("per channel", FULL, "groups of 32, full")
MORE_GRIDS = ("groups of 128, full", "groups of 64, full", "groups of 128, absmax", "groups of 32, absmax")
LOW_FLOAT = replace(FLOAT, after=each((4, 3, 2), LOW_GRIDS))


def taught(bits: int, groups: str = FULL, start: int = 0, deadline: float = 0.3, **more: Any) -> Arm:
    """Float first: the float model of the seed is start and teacher; `start` bits fall to `bits` by `deadline`."""
    options = {"moq": TAUGHT["moq"], "warm": OWN, "groups": groups, **more}
    name = options.pop("name", "basic QAT, float first")
    return ramp(start or bits, bits, deadline, name, options.pop("moq"), **options)


def all_steps(bits: int) -> Arm:
    """Basic QAT for as many steps as float first takes."""
    return qat(bits, "basic QAT, all steps", times=2, groups=FULL)


def finished(bits: int, groups: str = FULL) -> Arm:
    """From a float model of the learning rates of `LONG_RATES`, which is the teacher, at these."""
    moq = {"distillation": {"teacher": LONG_OWN, "labels": 1.0}}
    name = "basic QAT from a finished float model"
    return qat(bits, name, moq, groups=groups, learning_rate=LONG_OWN, warm=LONG_OWN, warm_times=2)


def shared(bits: int, share: float) -> Arm:
    """Float first with that share of the steps in float, whose model is the teacher of the others."""
    moq = {"distillation": {"teacher": LONG_OWN, "labels": 1.0}}
    name = f"basic QAT, float first, {share:g} of the steps in float"
    return qat(
        bits, name, moq, groups=FULL, warm=LONG_OWN, times=2 * (1 - share), warm_times=2 * share,
        dropout=False,
    )  # fmt: skip


# 3 bits on average from the first steps on, as a measure of sensitivity distributes them; taught.
BUDGET: dict[str, Any] = {
    **TAUGHT["moq"],
    "quantize_bits": {"start_bits": 2, "target_bits": {"mean": 3.0, "choices": [2, 3, 4, 8]}},
    "sensitivity": {"measure": "divergence"},
}


def without(part: str, name: str) -> Arm:
    """Float first without a part of the loss, nor dropout in the quantized half."""
    moq = {"distillation": {"teacher": OWN, "labels": 1.0, part: 0.0}}
    return taught(2, name=f"basic QAT, float first, {name}", dropout=False, moq=moq)


def no_dropout(bits: int, groups: str = FULL, name: str = "basic QAT, float first", start: int = 0) -> Arm:
    """Float first without dropout in the float phase either."""
    return replace(taught(bits, groups, start, name=f"{name}, no dropout at all", dropout=False), warm_dropout=False)


# Float of as many steps, also rounded, and float first with dropout in its float phase alone.
ROUNDED = replace(LONG, after=each((4, 3, 2), LOW_GRIDS[1:]))
HALF_DROPOUT = (ROUNDED, *(replace(taught(bits), dropout=False) for bits in (2, 4, 3)))

# A float model that is finished already, without dropout.
FINISHED_NO_DROPOUT = replace(
    finished(2), name=f"{finished(2).name}, no dropout at all", dropout=False, warm_dropout=False
)


def with_relations(arm: Arm) -> Arm:
    """The same, where the teacher's relations count too."""
    assert arm.moq is not None
    distillation = {**arm.moq["distillation"], "relations": 1.0}
    return replace(arm, name=f"{arm.name}, relations", moq={**arm.moq, "distillation": distillation})


def hardened(arm: Arm) -> Arm:
    """The same, blended in over the first half of the run."""
    blend = {"enabled": True, "quantize_change_ratio": 2.0}
    moq = {**(arm.moq or {}), "fp16_mixed_quantize": blend}
    return replace(arm, name=f"{arm.name}, hardened over the first half", moq=moq)


# Narrow ranges, at once and by way of 4 and 3 bits.
TERNARY = replace(FINISHED_NO_DROPOUT, groups="per channel")
FALLING_TERNARY = replace(
    TERNARY,
    name=f"{TERNARY.name}, by way of 4 and 3 bits",
    moq={**(TERNARY.moq or {}), **(ramp(4, 2, 0.5).moq or {})},
)

ONE_BIT = no_dropout(1)
FALLING_ONE_BIT = no_dropout(1, name="MoQ 2 by 0.3, float first", start=2)

# Float first at the learning rate of float in both halves.
SLOWER = replace(FINISHED_NO_DROPOUT, name=no_dropout(2).name, warm_times=1)

# Of the plans on STS-B. A model of BERT-base's size has an epoch in float and half of one with a new start of the
# learning rate, and then follows that model for another half.
SIMILAR_FLOAT = replace(LONG, dropout=False)
BASE_RATE = 5e-5
SCALES_RATE = 1e-3  # That of language_models.py; no other was tried.
BASE_FLOAT = replace(
    SIMILAR_FLOAT,
    name="float, and float again",
    learning_rate=BASE_RATE,
    times=0.25,
    after=(),
    warm=BASE_RATE,
    warm_times=0.5,
    warm_dropout=False,
)
BY_GPTQ = "groups of 32, full, by GPTQ"
SCALES_BY_GPTQ = f"{BY_GPTQ}, scales alone"
GROUPS[SCALES_BY_GPTQ] = {**GROUPS[BY_GPTQ], "train": "scales"}
BASE_ROUNDED = (
    *each((8,), ("static symmetric", "static asymmetric", "static asymmetric, percentile, window")),
    (4, "w4a4"),
    (2, "groups of 32, full"),
)
BASE_ROUNDED_TOO = (
    *each((8,), (FULL, *W8A8)),
    *each((4,), ("groups of 32, full", *W4)),
)


def base(bits: int, groups: str, rate: float = BASE_RATE) -> Arm:
    """From the finished float model of the seed, which is the teacher too."""
    arm = FINISHED_NO_DROPOUT
    moq = {**(qat(bits).moq or {}), "distillation": {"teacher": BASE_RATE, "labels": 1.0}}
    return replace(
        arm,
        bits=bits,
        groups=groups,
        moq=moq,
        learning_rate=rate,
        times=0.25,
        warm=BASE_RATE,
        warm_again=True,
    )


TRIED_ON_A_GPU = (1, 2)  # Seeds of the plan "gpu".
THREE_RATES = (1e-4, 2e-4, 4e-4)
PLANS = {
    # Float first, at equal total steps: grids, schedules, and what there is without a float phase.
    "recipes": Plan(
        (
            LOW_FLOAT,
            taught(2),
            taught(2, start=4, name="MoQ 4 by 0.3, float first"),
            taught(2, "per channel"),
            all_steps(2),
            *(
                arm
                for bits in (3, 4)
                for arm in (taught(bits), taught(bits, start=8, name="MoQ 8 by 0.3, float first"), all_steps(bits))
            ),
        ),
        bf16=True,
    ),
    # What the recipes are measured against: float of as many steps. First the best of three learning rates for each
    # task, with seed 1, the shorter tasks first; then the five seeds at it.
    "rates": Plan(
        tuple(replace(LONG, learning_rate=rate) for rate in (1e-4, 5e-5, 2e-4)),
        tasks=("mrpc", "cola", "sst2"),
        seeds=(1,),
        bf16=True,
    ),
    "fair": Plan((ROUNDED,), tasks=("mrpc", "cola", "sst2"), bf16=True),
    # What other grids make of the same models, without a step.
    "grids": Plan((replace(LONG, after=each((4, 3, 2), MORE_GRIDS)),), seeds=(2, 3, 4, 5), bf16=True),
    # What may close the gap to them: one of them, finished, as start and teacher, which takes half as many steps
    # again; and one run of as many steps that is quantized from its middle on, which needs no teacher.
    "gap": Plan(
        (
            finished(2),
            qat(2, MIDDLE, offset=0.5, times=2, learning_rate=LONG_OWN, groups=FULL),
            *(finished(bits, groups="groups of 32, full") for bits in (3, 2)),
        ),
        tasks=("mrpc", "cola", "sst2"),
        bf16=True,
    ),
    # With dropout beside the teacher and without, and what tables at 8 bits change.
    "dropout": Plan(
        (
            replace(LONG, after=each((8, 4, 3, 2), (FULL, TABLES))),
            *(replace(arm, dropout=kept) for arm in (finished(2), taught(2)) for kept in (False, True)),
            no_dropout(2),
            replace(LONG, dropout=False),
        ),
        seeds=(1, 2, 3, 4),
    ),
    # Float first with dropout in its float half and without, on CPUs.
    "float32": Plan(
        (*HALF_DROPOUT, replace(LONG, dropout=False), *(no_dropout(bits) for bits in (2, 4, 3))), seeds=(3, 4, 5)
    ),
    "searches": Plan((no_dropout(2, SEARCHED_MORE), no_dropout(2, SEARCHED_ONCE)), ("sst2", "cola"), (1, 2, 3)),
    "basic": Plan(tuple(replace(all_steps(bits), dropout=False) for bits in (2, 3, 4)), seeds=(3, 4, 5)),
    "finished": Plan((FINISHED_NO_DROPOUT,), seeds=(3, 4, 5)),
    "hardened": Plan((hardened(FINISHED_NO_DROPOUT),), seeds=(3, 4, 5)),
    "ternary": Plan((TERNARY, FALLING_TERNARY), ("sst2", "cola"), (3, 4, 5)),
    "relations": Plan((with_relations(FINISHED_NO_DROPOUT),), seeds=(3, 4, 5)),
    "relations, float first": Plan((with_relations(no_dropout(2)),), seeds=(1, 2)),
    # Rates that were ahead without dropout with seed 1.
    "float at 1e-4": Plan((replace(LONG, dropout=False, learning_rate=1e-4),), ("sst2",), (3, 4, 5)),
    "float at 5e-5": Plan((replace(LONG, dropout=False, learning_rate=5e-5),), ("cola", "mrpc"), (3, 4)),
    "mrpc rates": Plan((SLOWER, replace(no_dropout(2), learning_rate=1e-4)), ("mrpc",), (1,)),
    # Without dropout in the quantized half: where it starts, its groups, and what of the teacher counts.
    "variants": Plan(
        (
            replace(taught(2, FROM_GPTQ), dropout=False),
            no_dropout(2, "groups of 32, full"),
            taught(2, name="basic QAT, float first, no teacher", moq={}, dropout=False),
            without("hidden", "0 times the hidden states"),
        ),
        ("sst2", "cola"),
        (1, 2, 3, 4),
    ),
    "gpu rates": Plan(
        tuple(replace(LONG, learning_rate=rate, dropout=False) for rate in (1e-4, 5e-5, 2e-4)),
        seeds=(1,),
        bf16=True,
        gpu=True,
    ),
    # What else might help float first at 2 bits.
    "gpu": Plan(
        (
            *HALF_DROPOUT,
            *(shared(bits, 0.75) for bits in (2, 3, 4)),
            replace(LONG, dropout=False),
            replace(finished(2), dropout=False),
            no_dropout(2),
            without("labels", "no labels"),
            *(taught(2, dropout=False, learning_rate=rate) for rate in (4e-4, 2e-4, 1e-4)),
        ),
        seeds=TRIED_ON_A_GPU,
        bf16=True,
        gpu=True,
    ),
    # Page one's. Of the defaults these runs decided one: no dropout in the float half at 4 and 3 bits.
    "fresh": Plan(
        (
            *HALF_DROPOUT,
            replace(ROUNDED, dropout=False),
            *(no_dropout(bits) for bits in (2, 4, 3)),
            *(all_steps(bits) for bits in (2, 4, 3)),
            replace(all_steps(2), dropout=False),
        ),
        seeds=(6, 7, 8, 9, 10),
        bf16=True,
        gpu=True,
    ),
    # What a finished float model may be trained with.
    "gpu finished": Plan(
        (
            replace(LONG, dropout=False),
            *(FINISHED_NO_DROPOUT, hardened(FINISHED_NO_DROPOUT), with_relations(FINISHED_NO_DROPOUT)),
            *(TERNARY, FALLING_TERNARY),
        ),
        seeds=(11, 12, 13, 14, 15),
        bf16=True,
        gpu=True,
    ),
    "gpu rates at 2 bits": Plan(
        (
            *(replace(FINISHED_NO_DROPOUT, learning_rate=rate) for rate in (5e-5, *THREE_RATES)),
            *(replace(all_steps(2), dropout=False, learning_rate=rate) for rate in THREE_RATES),
            *(replace(no_dropout(2), learning_rate=rate) for rate in THREE_RATES),
        ),
        seeds=(16,),
        bf16=True,
        gpu=True,
    ),
    "one bit rates": Plan(
        tuple(replace(arm, learning_rate=rate) for arm in (ONE_BIT, FALLING_ONE_BIT) for rate in (5e-5, *THREE_RATES)),
        seeds=(16,),
        bf16=True,
        gpu=True,
    ),
    "one bit": Plan(
        (replace(ONE_BIT, learning_rate=ONE_BIT_OWN), replace(FALLING_ONE_BIT, learning_rate=FALLING_OWN)),
        seeds=(6, 7, 8, 9, 10),
        bf16=True,
        gpu=True,
    ),
    # What float first itself may be trained with, beside the plan "fresh".
    "gpu float first": Plan(
        (with_relations(no_dropout(2)), hardened(no_dropout(2))), seeds=(6, 7, 8, 9, 10), bf16=True, gpu=True
    ),
    # 3 bits on average, chosen on the float model, and 3 bits throughout.
    "budgets": Plan(
        (
            LOW_FLOAT,
            taught(3),
            taught(3, name="3 bits on average by divergence, float first", moq=BUDGET),
        ),
        bf16=True,
    ),
    # What the phases should look like at 2 bits: the way down, the float phase's end, the teacher, the length of both.
    "phases": Plan(
        (
            LOW_FLOAT,
            taught(2),
            taught(2, start=4, name="MoQ 4 by 0.3, float first"),
            taught(2, start=8, name="MoQ 8 by 0.3, float first"),
            taught(2, name="basic QAT, float first at a constant rate", warm_decay="constant"),
            taught(2, name="basic QAT, float first, no teacher", moq={}),
            *(
                taught(2, start=start, name=f"{name}, {share} the steps", times=times, warm_times=times)
                for times, share in ((0.5, "half"), (2, "twice"))
                for start, name in ((0, "basic QAT, float first"), (4, "MoQ 4 by 0.3, float first"))
            ),
        ),
        tasks=("sst2", "cola"),
        seeds=(1, 2, 3),
        bf16=True,
    ),
    # STS-B, with a MiniLM: what training gains over rounding at 3 and 2 bits, and what tables at 4 bits cost. Rates
    # are the best of a first look on two other seeds.
    "similarity": Plan(
        (
            replace(SIMILAR_FLOAT, after=(*each((4, 3, 2), LOW_GRIDS[1:]), (4, SMALL_TABLES), (2, SMALL_TABLES))),
            replace(no_dropout(3), learning_rate=1e-4),
            no_dropout(2),
            no_dropout(2, SMALL_TABLES),
        ),
        ("stsb",),
        (1, 2, 3, 4, 5),
        bf16=True,
    ),
    # The other seeds, on a processor that computes bfloat16 slower than float32; GPTQ beside them.
    "similarity in float32": Plan(
        (
            replace(SIMILAR_FLOAT, after=(*each((4, 3, 2), LOW_GRIDS[1:]), (3, BY_GPTQ), (2, BY_GPTQ))),
            replace(no_dropout(3), learning_rate=1e-4),
            no_dropout(2),
        ),
        ("stsb",),
        (2, 3, 4, 5),
    ),
    # STS-B, with an MPNet of BERT-base's size: what rounded inputs cost, and what training gives back.
    "base": Plan(
        (
            replace(BASE_FLOAT, after=(*BASE_ROUNDED, (2, BY_GPTQ))),
            base(8, "static symmetric"),
            base(4, "w4a4", 1e-4),
            base(2, "groups of 32, full", 1e-4),
            base(2, BY_GPTQ, 1e-4),
            base(8, "static asymmetric"),
        ),
        ("stsb",),
        (1, 2, 3, 4, 5),
        bf16=True,
    ),
    # Another seed, on a processor that computes bfloat16 slower than float32.
    "base in float32": Plan(
        (
            replace(BASE_FLOAT, after=(*BASE_ROUNDED, (8, "per token"), (4, "w4a4, both products at 8"), (2, BY_GPTQ))),
            base(8, "static symmetric"),
            base(2, "groups of 32, full", 1e-4),
            base(4, "w4a4", 1e-4),
            base(2, BY_GPTQ, 1e-4),
            base(8, "static asymmetric"),
            base(2, SCALES_BY_GPTQ, SCALES_RATE),
        ),
        ("stsb",),
        (2, 3),
    ),
    # What else was tried.
    "base, more": Plan(
        (
            replace(BASE_FLOAT, after=BASE_ROUNDED_TOO),
            base(8, "static asymmetric, percentile, window"),
            base(4, "w4a4, both products at 8", 1e-4),
            base(4, "w4, 4-bit inputs", 1e-4),
            base(3, "groups of 32, full", 1e-4),
        ),
        ("stsb",),
        (1, 2, 3),
        bf16=True,
    ),
    "base on a gpu": Plan(
        (
            replace(BASE_FLOAT, after=(*BASE_ROUNDED, (2, BY_GPTQ), *BASE_ROUNDED_TOO)),
            *(
                base(8, groups)
                for groups in ("static symmetric", "static asymmetric", "static asymmetric, percentile, window")
            ),
            *(base(4, groups, 1e-4) for groups in ("w4a4", "w4a4, both products at 8", "w4, 4-bit inputs")),
            *(base(bits, BY_GPTQ, 1e-4) for bits in (2, 3)),
            base(2, SCALES_BY_GPTQ, SCALES_RATE),
        ),
        ("stsb", "mrpc", "cola", "sst2"),
        bf16=True,
        gpu=True,
    ),
    # From the pretrained model and with float models of as many steps, 8 to 2 bits.
    "main": Plan(
        (
            FLOAT,
            qat(2, **CHANNELS),
            qat(2, "basic QAT, taught", **TAUGHT),
            ramp(8, 2, 0.3, "MoQ", **CHANNELS),
            ramp(8, 2, 0.3, "MoQ, taught", **TAUGHT),
            qat(3, **CHANNELS),
            qat(3, "basic QAT, taught", **TAUGHT),
            ramp(8, 3, 0.3, "MoQ", **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, taught", **TAUGHT),
            qat(4, **CHANNELS),
            qat(4, "basic QAT, taught", **TAUGHT),
            ramp(8, 4, 0.3, "MoQ", **CHANNELS),
            ramp(12, 8, 0.3, "MoQ", **CHANNELS),
            qat(8, **CHANNELS),
        )
    ),
}


@dataclass(frozen=True)
class Run:
    """An arm on a task with a seed, on all `rows` of each set or the first ones; see `Plan`."""

    arm: Arm
    task: str
    seed: int
    rows: int | None = None
    bf16: bool = False
    gpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "arm", self.arm.on(self.task))

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return EPOCHS[self.task] * self.arm.times

    def identity(self) -> dict[str, Any]:
        """What decides the outcome, in JSON types; `LATER` keys only where they are not as they were before."""
        later = {name: getattr(self if hasattr(self, name) else self.arm, name) for name in LATER}
        return {
            "task": self.task,
            "seed": self.seed,
            "learning_rate": self.arm.learning_rate,
            "epochs": self.epochs,
            "moq": self.arm.config(),
            "warm": self.arm.warm,
            "decay": self.arm.decay,
            "rows": self.rows,
            **{name: value for name, value in later.items() if value != LATER[name]},
        }

    def key(self) -> str:
        """The same as text."""
        return json.dumps(self.identity(), sort_keys=True)

    def teacher(self) -> "Run | None":
        """The float run whose model this one needs, if any."""
        if self.arm.warm_again:
            return replace(self, arm=BASE_FLOAT)
        rate = (self.arm.moq or {}).get("distillation", {}).get("teacher") or self.arm.warm
        if self.arm.warm and self.arm.warm != rate:
            raise ValueError(
                f"{self.arm.name}: the teacher is a float run at {rate:g}, the start one at {self.arm.warm:g}"
            )
        arm = replace(FLOAT, learning_rate=rate, after=(), times=self.arm.warm_times, decay=self.arm.warm_decay)
        arm = replace(arm, dropout=self.arm.warm_dropout)
        return replace(self, arm=arm) if rate else None
