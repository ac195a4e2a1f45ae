import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from repo import GOLDEN

from moq_hf.config import MoQConfig
from moq_hf.config_fields import LARGEST, ActivationConfig, BlendConfig, EigenvalueConfig
from moq_hf.errors import MoQError
from moq_hf.forecast import Plan, plan
from moq_hf.schedule import FLOAT_BITS, PrecisionSchedule, Switch

NAMES = [path.stem for path in sorted(GOLDEN.glob("schedule_*.json")) if "engine" not in path.stem]


def make(
    start: int, target: int, period: int | str, offset: float = 0, deadline: float | None = None, **more: Any
) -> MoQConfig:
    return MoQConfig(
        bits=target, start_bits=start, period=period, offset=offset, deadline=deadline, allow_unreached=True, **more
    )


@pytest.mark.parametrize("name", NAMES)
def test_reproduces_the_recorded_trajectory(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    config = golden["config"]
    columns = {k: p for k, p in enumerate(golden["traj_params"]) if not p.endswith(".bias")}
    layers = {p["name"]: p["layer"] for p in golden["params"]}
    schedule = PrecisionSchedule(make(config["start_bits"], config["target_bits"], config["period"]), columns.values())
    compared = 0
    for step, expected in enumerate(golden["trajectory"], start=1):
        if step not in golden["overflow_steps"]:
            given_values = golden["ev"][step - 1] if golden["ev"] else None
            eigenvalues = {
                name: given_values[layers[name]]
                for name in columns.values()
                if given_values is not None and layers[name] is not None
            }
            due = schedule.due()
            assert tuple(switch.block for switch in schedule.advance(eigenvalues)) == due
        for k, parameter in columns.items():
            assert [schedule.bits[parameter], schedule.period[parameter]] == expected[k], (step, parameter)
            compared += 1
    assert compared == len(columns) * golden["n_steps"]


def test_reproduces_the_whole_engine_with_an_offset() -> None:
    golden = json.loads((GOLDEN / "schedule_engine_off5_p4_gas1.json").read_text())
    schedule = PrecisionSchedule(make(12, 8, 4, offset=5), golden["managed"])
    steps = [entry for entry in golden["log"] if entry["event"].startswith("step ")]
    assert len(steps) > 30
    for entry in steps:
        schedule.advance()
        for name, (bits, period) in entry["bits"].items():
            # The engine shows its start bits already before the offset, while it quantizes nothing.
            assert schedule.bits[name] == (bits if entry["wq_enabled"] else 32)
            assert schedule.period[name] == period


configs = st.tuples(st.integers(1, 15), st.integers(0, 6), st.integers(1, 9), st.integers(0, 7)).map(
    lambda t: make(min(16, t[0] + t[1]), t[0], t[2], t[3])
)


def blend(ratio: float | None) -> BlendConfig:
    return BlendConfig(enabled=ratio is not None, quantize_change_ratio=ratio or 1.0)


def test_blend_falls_to_zero_and_starts_again_for_a_block_that_switched() -> None:
    schedule = PrecisionSchedule(make(4, 3, 6, offset=2, blend=blend(0.25)), "ab")
    seen = []
    for step in range(16):
        schedule.advance({"a": 0.0, "b": 0.0})
        seen.append(round(schedule.blend["a"], 6))
        assert schedule.at_target == (schedule.bits["a"] == 3 and seen[-1] == 0), step
    # The offset is step 2, the drop step 8.
    assert seen[1:] == [1, 0.75, 0.5, 0.25, 0, 0, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "act, text",
    [
        (lambda: PrecisionSchedule(make(8, 4, 1), []), "at least one block"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"b": 0.1}), "unknown block 'b'"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"a": 1.5}), r"must be in \[0, 1\], got 1.5"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"a": float("nan")}), "got nan"),
        (
            lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).load_state_dict({"steps": 1, "blocks": {"b": [8, 1, 0]}}),
            "it lacks a, and alone has b",
        ),
        (lambda: PrecisionSchedule(make(5, 3, 4, 0.5), "a"), "offset: below 1 it needs total_steps"),
        (lambda: PrecisionSchedule(make(8, 4, "auto"), "a"), '"auto".*need total_steps'),
        (lambda: PrecisionSchedule(make(8, 4, 1, deadline=0.5), "a"), "deadline need total_steps"),
        (lambda: plan(make(8, 4, 1, offset=5), 5), "offset 5 is not before the end"),
        (lambda: plan(make(8, 4, 1), 0), "total_steps must be a whole number from 1 .*, got 0"),
        (lambda: plan(make(8, 4, 1), "345"), 'total_steps must be a whole number from 1 .*, got "345"'),
        (lambda: plan(make(8, 4, 1), 10**5000), r"total_steps must be .* below 2\*\*63"),
        (lambda: plan(MoQConfig(enabled=False), 5), "enabled is false"),
        (lambda: plan(make(8, 4, 1), 50, {"b": 1.5}), "eigenvalue of 'b' must be in \\[0, 1\\], got 1.5"),
        (lambda: plan({"quantize_bits": {"target_bits": 20}}, 5), "target_bits: 20"),
    ],
)
def test_wrong_use_is_told(act: Any, text: str) -> None:
    with pytest.raises(MoQError, match=text):
        act()


BLENDS = st.none() | st.floats(0.01, 1)
SHARES = st.floats(0.001, 1)


def deadlines(periods: Any, shares: Any = SHARES, offset: int = 100, blends: Any = BLENDS) -> Any:
    """Configs with a deadline."""
    return st.builds(
        lambda target, drops, period, offset, deadline, ratio, measured: make(
            min(16, target + drops),
            target,
            period,
            offset,
            deadline,
            blend=blend(ratio),
            eigenvalue=EigenvalueConfig(enabled=measured),
        ),
        st.integers(1, 15),
        st.integers(0, 14),
        periods,
        st.integers(0, offset),
        shares,
        blends,
        st.booleans(),
    )


periods = st.just("auto") | st.integers(1, 1000)
any_deadline = deadlines(periods)
lengths = st.integers(3, 200) | st.integers(3, 1_000_000)
# Where each step is taken: 14 drops, the offset and the blend fit into 0.3 of 100 steps.
near_deadline = deadlines(st.just("auto") | st.integers(1, 60), st.floats(0.3, 1), 5, st.none() | st.floats(0.1, 1))
short = st.integers(100, 250)
# Without a deadline.
blended = st.tuples(configs, BLENDS).map(lambda pair: replace(pair[0], blend=blend(pair[1])))
FACTORS = st.lists(st.integers(1, 5), min_size=15, max_size=15)
shares = st.floats(0, 1)


def make_schedule(config: MoQConfig, blocks: Any, steps: int) -> PrecisionSchedule:
    """For the shortest run that the config fits, if `steps` is less; `test_too_few_steps` is about those."""
    try:
        return PrecisionSchedule(config, blocks, steps)
    except MoQError as error:
        return PrecisionSchedule(config, blocks, int(re.search(r"a run of (\d+) steps", str(error))[1]))


def jump(schedule: PrecisionSchedule) -> None:
    """Go to just before the next step that changes anything, as the many advances before it would."""
    waiting = [name for name, bits in schedule.bits.items() if bits > schedule.config.bits]
    coming = min(0 if schedule.bits[name] == FLOAT_BITS else schedule.period[name] for name in waiting)
    schedule.steps = max(schedule.steps, schedule.config.offset + coming - 1)


def drops_for(config: MoQConfig, steps: int, factors: list[int]) -> list[Switch]:
    """The drops of one block whose factor at its k-th drop is `factors[k]`."""
    schedule, made = make_schedule(config, ["a"], steps), []
    while schedule.bits["a"] > config.bits:
        jump(schedule)
        factor = factors[len(made)] if schedule.bits["a"] <= config.start_bits else 1
        made += [s for s in schedule.advance({"a": (factor - 1) / 4}) if s.before != FLOAT_BITS]
    return made


@given(any_deadline, lengths, st.lists(st.dictionaries(st.sampled_from("abc"), shares), min_size=60, max_size=60))
def test_every_block_meets_the_deadline(config: MoQConfig, steps: int, eigenvalues: list[dict[str, float]]) -> None:
    assume(config.falls)
    schedule = make_schedule(config, "abc", steps)
    last = schedule.deadline_step
    assert last <= config.deadline * schedule.total_steps * (1 + 1e-9)
    values, dropped = iter(eigenvalues), 0
    while any(bits > config.bits for bits in schedule.bits.values()):
        jump(schedule)
        dropped += sum(s.before != FLOAT_BITS for s in schedule.advance(next(values)))
        assert schedule.steps <= last
    # What is left of the blend.
    schedule.steps = last
    assert schedule.at_target
    assert dropped == 3 * (config.start_bits - config.bits)


@given(near_deadline | configs, short, st.randoms(use_true_random=False), st.integers(1, 20))
def test_bits_fall_when_they_are_due_as_was_foreseen(config: MoQConfig, steps: int, random: Any, window: int) -> None:
    schedule = make_schedule(config, "abc", steps)
    foreseen, drops = [], []
    for _ in range(steps):
        foreseen.append(set(schedule.drops_ahead(window)))
        before, due = dict(schedule.bits), schedule.due()
        switches = schedule.advance({name: random.random() for name in "abc"})
        assert tuple(s.block for s in switches) == due
        drops.append({s.block for s in switches if s.before != FLOAT_BITS})
        for name, bits in schedule.bits.items():
            assert (bits < before[name]) == (name in due)
            assert config.bits <= bits <= (FLOAT_BITS if schedule.steps < schedule.offset else config.start_bits)
            assert before[name] - bits <= 1 or before[name] == FLOAT_BITS
        for switch in switches:
            assert switch.bits == schedule.bits[switch.block] and switch.period == schedule.period[switch.block]
            assert 1 <= switch.factor <= 5
        if config.deadline is not None:
            assert (schedule.steps < schedule.deadline_step) or schedule.at_target
    for index in range(steps - window + 1):
        assert foreseen[index] == set().union(*drops[index : index + window])


@given(any_deadline, lengths, FACTORS, st.data())
def test_a_more_sensitive_block_never_drops_earlier(
    config: MoQConfig, steps: int, factors: list[int], data: Any
) -> None:
    higher = [data.draw(st.integers(factor, 5)) for factor in factors]
    pairs = zip(drops_for(config, steps, factors), drops_for(config, steps, higher), strict=True)
    assert all(less.step <= more.step for less, more in pairs)


@given(deadlines(st.integers(1, 1000), blends=st.none()), lengths, FACTORS)
def test_the_plain_rule_is_kept_where_it_meets_the_deadline(config: MoQConfig, steps: int, factors: list[int]) -> None:
    capped = drops_for(config, steps, factors)
    plain = drops_for(make(config.start_bits, config.bits, config.period, config.offset), steps, factors)
    deadline = make_schedule(config, "a", steps).deadline_step
    if plain and plain[-1].step <= deadline:
        assert [s.step for s in capped] == [s.step for s in plain]
    # And one that misses it was never held up.
    assert all(a.step <= b.step for a, b in zip(capped, plain, strict=True))


@pytest.mark.parametrize("steps", [345, 10_000, 1_000_000])
@pytest.mark.parametrize("target", [8, 4, 2])
def test_auto_lets_sensitive_blocks_arrive_last(steps: int, target: int) -> None:
    config = make(16, target, "auto", eigenvalue=EigenvalueConfig(enabled=True))
    made = plan(config, steps, eigenvalues={str(factor): (factor - 1) / 4 for factor in range(1, 6)})
    arrivals = [block.target_step for block in made.blocks]
    assert arrivals == sorted(set(arrivals))
    # The most sensitive block uses most of the time that it has, the least sensitive one about a fifth of it.
    assert 0.65 * made.deadline_step <= arrivals[-1] <= made.deadline_step
    assert arrivals[0] <= 0.3 * made.deadline_step


def test_auto_without_eigenvalues_is_the_plain_rule_with_the_longest_period_that_fits() -> None:
    made = plan(make(12, 8, "auto"), 345)
    assert made.deadline_step == 86
    assert [s.step for s in made.blocks[0].switches] == [10, 20, 40, 80]


@given(any_deadline, st.data())
def test_too_few_steps(config: MoQConfig, data: Any) -> None:
    shortest = make_schedule(config, "a", 1).total_steps
    assume(shortest > 1)
    steps = data.draw(st.integers(1, shortest - 1))
    with pytest.raises(MoQError) as error:
        PrecisionSchedule(config, "a", steps)
    told = str(error.value)
    drops = config.start_bits - config.bits
    assert f"{drops} drop{'s' * (drops != 1)} after " in told
    fits = told.split("What would fit: ")[1]
    [longer] = re.findall(r"a run of (\d+) steps", fits)
    PrecisionSchedule(config, "a", int(longer))
    fewer = re.findall(r"start_bits (\d+)", fits)
    for value in fewer:
        PrecisionSchedule(replace(config, start_bits=int(value)), "a", steps)
    assert len(fewer) == fits.count(",")


@pytest.mark.parametrize(
    ("start", "offset", "fits"),
    [
        (8, 0.2999, "start_bits 5, or a smaller offset"),
        (8, 0.2999999999, "start_bits 5, or a smaller offset"),
        (9, 0.2999, "start_bits 5, or a smaller offset"),
    ],
)
def test_where_no_length_of_a_run_helps_a_smaller_offset_is_told(start: int, offset: float, fits: str) -> None:
    with pytest.raises(MoQError, match=f"What would fit: {fits}$"):
        PrecisionSchedule(make(start, 4, "auto", offset, 0.3), "a", 40)


@pytest.mark.parametrize(("offset", "at"), [(0.8, 32), (39, 39)])
def test_the_preset_of_a_language_model_may_begin_late(offset: float, at: int) -> None:
    """Its deadline counts where its bits fall."""
    schedule = PrecisionSchedule(MoQConfig("lm-w4", start_bits=4, offset=offset), ["a"], 40)
    taken = [schedule.bits["a"] for _ in range(40) if schedule.advance() is not None]
    assert taken == [FLOAT_BITS] * (at - 1) + [4] * (41 - at)


@given(
    st.fractions(0, 1, max_denominator=1000).filter(lambda share: 0 < share < 1),
    st.integers(1, 5000),
    st.none() | st.just(1.0),
)
def test_an_offset_below_1_is_a_share_of_the_run(share: Any, steps: int, deadline: float | None) -> None:
    written = round(float(share), 3)
    assume(0 < written < 1)
    offset = int(Fraction(str(written)) * steps)
    assume(deadline is None or steps - offset >= 2)
    shared, counted = (make(5, 3, 4, at, deadline) for at in (written, offset))
    made = [PrecisionSchedule(config, ["a"], steps) for config in (shared, counted)]
    assert [schedule.offset for schedule in made] == [offset, offset]
    for _ in range(min(steps, offset + 40)):
        assert made[0].advance() == made[1].advance()
        assert made[0].state_dict() == made[1].state_dict()
    # A resumed run of another length keeps the step of the run that it began in.
    longer = PrecisionSchedule(shared, ["a"], 3 * steps)
    longer.load_state_dict(made[0].state_dict())
    assert longer.offset == offset and longer.state_dict() == made[0].state_dict()


@given(near_deadline | blended, short, st.dictionaries(st.sampled_from("abc"), shares))
def test_replaying_the_schedule_gives_the_plan(config: MoQConfig, steps: int, eigenvalues: dict[str, float]) -> None:
    schedule = make_schedule(config, "abc", steps)
    made = plan(config, steps, {name: eigenvalues.get(name) for name in "abc"})
    assert replay(schedule, eigenvalues, steps) == seen_by(made)
    assert made.reached == all("without effect" in note for note in made.notes)


def replay(schedule: PrecisionSchedule, eigenvalues: dict[str, float], steps: int) -> Any:
    """The switches of a run of `steps`, and for each block the step from which it is at its target, None if never."""
    switches: dict[str, list[Switch]] = {name: [] for name in schedule.bits}
    arrived: dict[str, int | None] = dict.fromkeys(schedule.bits)
    for step in range(steps + 1):
        for switch in schedule.advance(eigenvalues) if step else ():
            switches[switch.block].append(switch)
        for name, bits in schedule.bits.items():
            if arrived[name] is None and bits == schedule.config.bits and schedule.blend[name] == 0:
                arrived[name] = step
    return switches, arrived


def seen_by(made: Plan) -> Any:
    """What of a plan a run of its length can see."""
    return (
        {block.name: [s for s in block.switches if s.step <= made.total_steps] for block in made.blocks},
        {b.name: b.target_step if b.target_step <= made.total_steps else None for b in made.blocks},
    )


@given(
    near_deadline | configs, short, st.randoms(use_true_random=False), st.integers(0, 120), st.integers(100, 1_000_000)
)
def test_a_saved_state_goes_on_as_if_never_saved(
    config: MoQConfig, steps: int, random: Any, at: int, other: int
) -> None:
    straight, resumed = make_schedule(config, "abc", steps), make_schedule(config, "abc", steps)
    for index in range(steps):
        if index == at:
            state = json.loads(json.dumps(resumed.state_dict()))
            has_deadline = config.deadline is not None
            resumed = make_schedule(config, "abc", other if has_deadline else steps)
            resumed.load_state_dict(state)
            assert resumed.total_steps == steps and resumed.deadline_step == straight.deadline_step
        eigenvalues = {name: random.random() for name in "abc"}
        assert straight.advance(eigenvalues) == resumed.advance(eigenvalues)
        assert straight.state_dict() == resumed.state_dict()


# Most plans are reached.
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(configs, st.integers(10, 400), shares, st.none() | st.floats(0.001, 1))
def test_what_a_plan_says_would_fit_fits(plain: MoQConfig, steps: int, share: float, ratio: float | None) -> None:
    config = replace(plain, blend=blend(ratio))
    made = plan(config, steps, eigenvalues={"a": share})
    assume(not made.reached)
    note = made.notes[-1]
    advice = note.split("): ")[1]
    changed = {
        r"period of at most (\d+)": lambda v: {"period": int(v)},
        r"start_bits (\d+)": lambda v: {"start_bits": int(v)},
    }
    longer = re.findall(r"only a run of (\d+) steps", advice)
    for value in longer:
        assert plan(config, int(value), eigenvalues={"a": share}).reached, note
    offered = len(longer)
    for pattern, change in changed.items():
        for value in re.findall(pattern, advice):
            offered += 1
            assert plan(replace(config, **change(value)), steps, eigenvalues={"a": share}).reached, note
    assert offered == advice.count(", or ") + 1


@given(any_deadline | configs, lengths, FACTORS)
def test_the_last_drop_is_foreseen(config: MoQConfig, steps: int, factors: list[int]) -> None:
    schedule = make_schedule(config, ["a"], steps)
    most = 5 if config.eigenvalue.enabled else 1
    bounds = []
    while schedule.bits["a"] > config.bits:
        bounds.append(schedule.last_drop())
        jump(schedule)
        factor = min(most, factors[len(bounds) - 1])
        schedule.advance({"a": (factor - 1) / 4})
    # What is left of the blend.
    while not schedule.at_target:
        schedule.steps += 1
    assert all(schedule.steps <= bound for bound in bounds) and schedule.steps == schedule.last_drop()
    if most == 1:
        assert {schedule.steps} >= set(bounds)


def test_a_plan_reads_well() -> None:
    text = str(plan(make(12, 8, 1, 5, eigenvalue=EigenvalueConfig(enabled=True)), 345))
    assert text.splitlines() == [
        "345 optimizer steps, 12 to 8 bits, offset 5, period 1, no deadline",
        "block            12 bits  11 bits  10 bits  9 bits   8 bits  at target",
        "least sensitive        5        6        7       9       13         13",
        "most sensitive         5        6       15     105  [1,005]    [1,005]",
        "in brackets: after the end of the run",
        "a sensitive block may end above its target: "
        "the run has 345 optimizer steps but reaches 8 bits only at step 1005 (most sensitive): start_bits 11 fits",
    ]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, "1,200 optimizer steps at 4 bits"),
        ({"offset": 200}, "200 optimizer steps in float, then 1,000 at 4 bits"),
        ({"offset": 0.5}, "600 optimizer steps in float, then 600 at 4 bits"),
        ({"overrides": {"*.layer.0.*": {"bits": 8}}}, "1,200 optimizer steps at 4 bits (*.layer.0.*: 8 bits)"),
    ],
)
def test_a_plan_without_falling_bits_is_one_line(more: dict[str, Any], line: str) -> None:
    assert str(plan(MoQConfig(bits=4, **more), 1200)) == line


def test_a_plan_in_which_anything_comes_later_has_a_table() -> None:
    blend = {"enabled": True, "quantize_change_ratio": 0.25}
    for more in ({"blend": blend}, {"bits": {"mean": 3.0}}, {"overrides": {"*.layer.0.*": {"start_bits": 6}}}):
        assert "at target" in str(plan(MoQConfig(**{"bits": 4, **more}), 1200))


EXTREMES = st.sampled_from([1, 2, 3, 99, 2**31, 2**62, LARGEST - 1, LARGEST]) | st.integers(1, LARGEST)
TINY = st.sampled_from([5e-324, 1e-300, 1e-18, 1e-9, 0.25, 0.6, 0.9999999999999999, 1.0]) | st.floats(1e-9, 1)


@given(
    bits=st.tuples(st.integers(1, 16), st.integers(1, 16)).filter(lambda pair: pair[0] > pair[1]),
    period=st.just("auto") | EXTREMES,
    offset=st.just(0) | EXTREMES,
    deadline=st.none() | TINY,
    ratio=st.none() | st.floats(1e-9, 1),
    activation=st.none() | st.just(0) | EXTREMES,
    measured=st.booleans(),
    steps=EXTREMES,
)
@example((8, 7), 10, 0, 0.6, None, None, False, LARGEST)
def test_no_size_is_too_large(
    bits: Any, period: Any, offset: int, deadline: Any, ratio: Any, activation: Any, measured: bool, steps: int
) -> None:
    config = make(
        *bits,
        period,
        offset,
        deadline,
        blend=blend(ratio),
        activations=ActivationConfig(enabled=activation is not None, start_step=activation or 0),
        eigenvalue=EigenvalueConfig(enabled=measured),
    )
    try:
        made = plan(config, steps)
    except MoQError as error:
        assert str(error)
        return
    assert str(made)
    # As the callback makes it before the length of the run is known.
    schedule = PrecisionSchedule(config, "ab", LARGEST)
    jump(schedule)
    assert schedule.advance({"a": 1.0})
