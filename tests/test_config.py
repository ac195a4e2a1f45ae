import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moq_hf import MoQConfig, MoQConfigError, PrecisionSchedule
from moq_hf.config import PerChannel, PerGroup, RowBlocks, key_table

ROOT = Path(__file__).parents[1]
DEEPSPEED: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
    "fp16": {"enabled": True},
    "quantize_training": {
        "enabled": True,
        "quantize_verbose": True,
        "quantizer_kernel": True,
        "quantize-algo": {"q_type": "asymmetric", "rounding": "stochastic"},
        "quantize_bits": {"start_bits": 12, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 10, "schedule_offset": 0},
        "quantize_groups": 8,
        "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
        "eigenvalue": {
            "enabled": False,
            "verbose": True,
            "max_iter": 50,
            "tol": 1e-2,
            "stability": 0,
            "gas_boundary_resolution": 1,
            "layer_name": "bert.encoder.layer",
            "layer_num": 12,
        },
    },
}


def test_a_deepspeed_config_works_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    whole = MoQConfig.from_dict(DEEPSPEED)
    assert [record.message for record in caplog.records] == ["not moq_hf's, left alone: optimizer, fp16"]
    assert whole == MoQConfig.from_dict(DEEPSPEED["quantize_training"])
    assert whole.ignored_sections == ("optimizer", "fp16")
    assert not whole.symmetric and whole.stochastic and whole.kernel and whole.verbose
    assert (whole.start_bits, whole.target_bits, whole.grouping) == (12, 8, RowBlocks(8))
    assert (whole.schedule.period, whole.schedule.offset, whole.schedule.deadline) == (10, 0, None)
    assert (whole.eigenvalue.layer_name, whole.eigenvalue.layer_num) == ("bert.encoder.layer", 12)
    assert whole.eigenvalue.stability == 0 and whole.eigenvalue.max_iter == 50


def test_defaults_are_those_of_the_reference() -> None:
    config = MoQConfig.from_dict({"quantize_bits": {"target_bits": 8}})
    assert config == MoQConfig(target_bits=8)
    assert config.enabled and config.start_bits == 16 and config.kernel is None and config.scale == "auto"
    assert config.symmetric and not config.stochastic and config.scale_refresh == 50 and config.seed == 0
    assert config.grouping == RowBlocks(1) and config.modules_to_not_convert is None
    assert (config.schedule.period, config.schedule.offset, config.schedule.deadline) == (100, 100, None)
    assert not config.blend.enabled and config.blend.change_ratio == 0.001 and config.quantize_embeddings is None
    assert (
        not config.eigenvalue.enabled and config.eigenvalue.method == "lanczos" and config.eigenvalue.layer_num is None
    )


def test_auto_has_a_deadline_and_zero_layers_means_all() -> None:
    schedule = {"quantize_period": "auto"}
    config = MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, "quantize_schedule": schedule})
    assert config.schedule.period is None and config.schedule.deadline == 0.25
    config = MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, "eigenvalue": {"layer_num": 0}})
    assert config.eigenvalue.layer_num is None


def test_groupings() -> None:
    def grouping(**keys: Any) -> Any:
        return MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}, **keys}).grouping

    assert grouping(quantize_groups="per_channel") == PerChannel()
    assert grouping(quantize_group_size=64) == PerGroup(64) == grouping(quantize_group_size=64, quantize_groups=1)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "moq.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(DEEPSPEED).encode())
    assert MoQConfig.load(str(path)) == MoQConfig.load(path) == MoQConfig.load(MoQConfig.from_dict(DEEPSPEED))


documents = st.fixed_dictionaries(
    {"quantize_bits": st.integers(3, 15).flatmap(lambda t: st.fixed_dictionaries(
        {"target_bits": st.just(t), "start_bits": st.integers(t, 16)}))},
    optional={
        "enabled": st.booleans(),
        "quantize_verbose": st.booleans(),
        "quantizer_kernel": st.none() | st.booleans(),
        "quantize_algo": st.fixed_dictionaries({}, optional={
            "q_type": st.sampled_from(["symmetric", "asymmetric"]),
            "rounding": st.sampled_from(["nearest", "stochastic"]),
            "scale": st.sampled_from(["auto", "absmax", "mse"]),
            "scale_refresh": st.integers(1, 10**6)}),
        "quantize_groups": st.integers(1, 64) | st.just("per_channel"),
        "quantize_schedule": st.fixed_dictionaries({}, optional={
            "quantize_period": st.integers(1, 10**6) | st.just("auto"),
            "schedule_offset": st.integers(0, 10**6),
            "deadline": st.none() | st.floats(0.01, 1)}),
        "fp16_mixed_quantize": st.fixed_dictionaries(
            {}, optional={"enabled": st.booleans(), "quantize_change_ratio": st.floats(1e-9, 1)}),
        "eigenvalue": st.fixed_dictionaries({}, optional={
            "enabled": st.booleans(),
            "tol": st.floats(1e-9, 10),
            "stability": st.integers(0, 3),
            "layer_name": st.none() | st.just("bert.encoder.layer"),
            "layer_num": st.none() | st.integers(0, 48),
            "method": st.sampled_from(["lanczos", "power"])}),
        "modules_to_not_convert": st.none() | st.lists(st.text("ab.*é", min_size=1, max_size=5), max_size=3),
        "quantize_embeddings": st.none() | st.integers(2, 8),
        "seed": st.integers(0, 2**63 - 1),
    },
)  # fmt: skip


@given(documents)
def test_a_config_survives_its_own_words(document: dict[str, Any]) -> None:
    config = MoQConfig.from_dict(document)
    words = config.to_dict()
    assert json.loads(json.dumps(words)) == words
    assert MoQConfig.from_dict(words) == config and MoQConfig.from_dict(words).to_dict() == words


@pytest.mark.parametrize("seed", range(20))
def test_mutated_documents_are_valid_or_told(seed: int) -> None:
    draw = random.Random(seed)
    odd = [None, True, -1, 0, 3, 17, 1e400, 0.5, "x", "auto", "per_channel", "symmetric", [], {}, [1], {"a": 1}]

    def mutate(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: mutate(inner) for key, inner in value.items() if draw.random() > 0.05}
            if draw.random() < 0.1:
                value[draw.choice(["x", "seed", "quantize_groups", "tol", "enabled", 7])] = draw.choice(odd)
            return value
        return draw.choice(odd) if draw.random() < 0.1 else value

    outcomes = {True: 0, False: 0}
    for _ in range(25):
        try:
            MoQConfig.from_dict(mutate(DEEPSPEED))
            outcomes[True] += 1
        except MoQConfigError:
            outcomes[False] += 1
    assert sum(outcomes.values()) == 25 and outcomes[False]


def recipes() -> list[list[str]]:
    """The rows of configs/README.md's tables."""
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if ".json` |" in line
    ]


def test_every_recipe_is_told_of() -> None:
    told = {row[0].strip("`") for row in recipes()}
    assert told == {path.name for path in (ROOT / "configs").glob("*.json")} and len(told) == 12


@pytest.mark.parametrize("row", recipes(), ids=lambda row: row[0])
def test_the_arithmetic_of_the_recipes_is_right(row: list[str]) -> None:
    name = row[0].strip("`")
    config = MoQConfig.from_file(ROOT / "configs" / name)
    told = next(cell for cell in reversed(row) if re.match(r"[\d,]+(, [\d,]+)+", cell))
    steps = [int(step.replace(",", "")) for step in re.split(r", |;", told.split(" with")[0])]
    schedule = PrecisionSchedule(config, ["block"])
    seen = []
    while not schedule.at_target:
        seen += [switch.step for switch in schedule.advance() if switch.before != 32]
    assert seen == steps and schedule.steps_to_target() == steps[-1]
    if name.startswith("glue_"):
        assert steps[-1] <= int(row[1].replace(",", "")) and config.start_bits == int(row[2])
        assert config.schedule.period == int(row[5])
    else:
        assert steps[-1] <= 345 / 3
        assert row[1] == f"{config.start_bits} to {config.target_bits}"
        assert [config.schedule.offset, config.schedule.period] == [int(row[2]), int(row[3])]


def test_the_reference_has_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "config-reference.md").read_text(encoding="utf-8")
    table = page.split("<!-- keys -->\n")[1].split("\n<!-- end of keys -->")[0]
    assert table == key_table(), 'renew it with: python -c "from moq_hf.config import key_table; print(key_table())"'
