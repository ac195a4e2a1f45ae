import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moq_hf.config import BlendConfig, MoQConfig, MoQError, ScheduleConfig
from moq_hf.schedule import PrecisionSchedule

GOLDEN = Path(__file__).parent / "golden"
NAMES = [path.stem for path in sorted(GOLDEN.glob("schedule_*.json")) if "engine" not in path.stem]


def make(start: int, target: int, period: int, offset: int = 0, **more: Any) -> MoQConfig:
    return MoQConfig(start_bits=start, target_bits=target, schedule=ScheduleConfig(period, offset), **more)


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
values = st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)), min_size=1, max_size=80)


@given(configs, values)
def test_bits_never_rise_and_change_only_when_due(config: MoQConfig, eigenvalues: list[dict[str, float]]) -> None:
    schedule = PrecisionSchedule(config, "abc")
    for step in eigenvalues:
        before, due = dict(schedule.bits), schedule.due()
        switches = schedule.advance(step)
        assert tuple(s.block for s in switches) == due
        for name, bits in schedule.bits.items():
            assert (bits < before[name]) == (name in due)
            assert config.target_bits <= bits <= (32 if schedule.steps < config.schedule.offset else config.start_bits)
            assert before[name] - bits <= 1 or before[name] == 32
        for switch in switches:
            assert switch.bits == schedule.bits[switch.block] and switch.period == schedule.period[switch.block]
            assert 1 <= switch.factor <= 5


@given(configs, values, st.integers(1, 20))
def test_drops_are_foreseen(config: MoQConfig, eigenvalues: list[dict[str, float]], window: int) -> None:
    schedule, foreseen = PrecisionSchedule(config, "abc"), []
    drops = []
    for step in eigenvalues:
        foreseen.append(set(schedule.drops_ahead(window)))
        drops.append({s.block for s in schedule.advance(step) if s.before != 32})
    for index in range(len(drops) - window + 1):
        assert foreseen[index] == set().union(*drops[index : index + window])


@given(configs, values, st.integers(0, 80))
def test_a_saved_state_goes_on_as_if_never_saved(
    config: MoQConfig, eigenvalues: list[dict[str, float]], at: int
) -> None:
    straight, resumed = PrecisionSchedule(config, "abc"), PrecisionSchedule(config, "abc")
    for index, step in enumerate(eigenvalues):
        if index == at:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = PrecisionSchedule(config, "abc")
            resumed.load_state_dict(state)
        assert straight.advance(step) == resumed.advance(step)
        assert straight.state_dict() == resumed.state_dict()


@given(configs, st.integers(1, 5))
def test_the_last_drop_comes_where_it_is_said_to(config: MoQConfig, factor: int) -> None:
    schedule = PrecisionSchedule(config, ["a"])
    last = schedule.steps_to_target(factor)
    if last > 3000:
        return
    for _ in range(last):
        assert not schedule.at_target or config.start_bits == config.target_bits
        schedule.advance({"a": (factor - 1) / 4})
    assert schedule.at_target


def test_blend_falls_to_zero_and_starts_again_for_a_block_that_switched() -> None:
    schedule = PrecisionSchedule(make(4, 3, 6, offset=2, blend=BlendConfig(True, 0.25)), "ab")
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
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a", "a"]), "twice: a"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"b": 0.1}), "unknown block 'b'"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"a": 1.5}), r"must be in \[0, 1\], got 1.5"),
        (lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).advance({"a": float("nan")}), "got nan"),
        (
            lambda: PrecisionSchedule(make(8, 4, 1), ["a"]).load_state_dict({"steps": 1, "blocks": {"b": [8, 1, 0]}}),
            "not in it a; only in it b",
        ),
        (lambda: PrecisionSchedule(MoQConfig(target_bits=4, schedule=ScheduleConfig(None, 0, 0.25)), "a"), '"auto"'),
    ],
)
def test_wrong_use_is_told(act: Any, text: str) -> None:
    with pytest.raises(MoQError, match=text):
        act()
