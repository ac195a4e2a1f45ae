"""What a right config means: defaults, DeepSpeed's documents, round trips, and the recipes in configs/."""

import copy
import dataclasses
import json
import logging
import math
import pickle
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_reference import json_schema
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from moq_hf.config import PRESETS, MoQConfig
from moq_hf.config_fields import (
    ActivationConfig,
    BitBudget,
    BlendConfig,
    DistillationConfig,
    EigenvalueConfig,
    SensitivityConfig,
)
from moq_hf.config_reading import key_schemas, places
from moq_hf.dialect import WORDS
from moq_hf.errors import MoQConfigError
from moq_hf.forecast import plan
from moq_hf.grid import Grid, PerChannel, PerGroup
from moq_hf.schedule import FLOAT_BITS, PrecisionSchedule

ROOT = Path(__file__).parents[1]
BITS: dict[str, Any] = {"quantize_bits": {"start_bits": 12, "target_bits": 8}}
VALIDATOR = Draft202012Validator(json_schema())


def sections(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


names = st.text(string.ascii_letters + string.digits + "._*[]?", min_size=1, max_size=12)
positive = st.integers(1, 10**6)
share = st.floats(0, 1, exclude_min=True) | st.just(1)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Legal `quantize_training` blocks, any subset of the keys."""
    target = draw(st.integers(1, 15))
    document = draw(
        sections(
            enabled=st.booleans(),
            quantize_verbose=st.booleans(),
            quantizer_kernel=st.none() | st.booleans(),
            quantize_schedule=sections(
                quantize_period=positive | st.just("auto"),
                schedule_offset=st.integers(0, 10**6),
                deadline=st.none() | share,
                allow_unreached=st.booleans(),
            ),
            fp16_mixed_quantize=sections(enabled=st.booleans(), quantize_change_ratio=st.floats(1e-9, 1) | st.just(1)),
            eigenvalue=sections(
                enabled=st.booleans(),
                verbose=st.booleans(),
                max_iter=positive,
                tol=st.floats(0, 1e9, exclude_min=True),
                stability=st.floats(0, 1e9) | st.just(0),
                gas_boundary_resolution=positive,
                layer_name=st.none() | names,
                layer_num=st.none() | st.integers(0, 100),
                method=st.sampled_from(["lanczos", "power"]),
                max_overhead=share,
            ),
            modules_to_not_convert=st.none() | st.lists(names, min_size=1, max_size=3),
            quantize_embeddings=st.none() | st.just("auto") | st.integers(2, 8),
            quantize_heads=st.booleans(),
            quantize_convolutions=st.booleans(),
            seed=st.integers(0, 2**63 - 1),
        )
    )
    document["quantize_bits"] = {"start_bits": draw(st.integers(target, 16)), "target_bits": target}
    document |= draw(
        st.just({})
        | st.fixed_dictionaries({"quantize_groups": positive | st.just("per_channel")})
        | st.fixed_dictionaries({"quantize_group_size": st.none() | positive})
    )
    q_type = "symmetric" if target == 1 else draw(st.sampled_from(["symmetric", "asymmetric"]))
    range_ = draw(st.sampled_from(["auto", "narrow", *["full"] * (q_type == "symmetric")]))
    equal_steps = target > 2 or q_type == "asymmetric" or (range_ != "narrow" and target == 2)
    algo = draw(
        sections(
            scale_dtype=st.sampled_from([None, "float32", "bfloat16", "float16"]),
            rounding=st.sampled_from(["nearest", "stochastic"] if equal_steps else ["nearest"]),
            scale=st.sampled_from(["auto", "absmax", "mse"]),
            scale_refresh=positive,
            gptq=st.integers(0, 2000),
        )
    )
    if range_ != "auto" or draw(st.booleans()):
        algo["range"] = range_
    where = draw(st.sampled_from(["inside", "outside", "both"]))
    if where != "outside":
        algo["q_type"] = q_type
    if where != "inside":
        document["quantize_type"] = q_type
    document[draw(st.sampled_from(["quantize_algo", "quantize-algo"]))] = algo
    return document


@given(documents())
def test_round_trip(document: dict[str, Any]) -> None:
    config = MoQConfig.from_dict(document)
    written = config.to_dict()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    again = MoQConfig.from_dict(written)
    assert again == config and hash(again) == hash(config)
    assert again.to_dict() == written
    assert MoQConfig.load(config) is config
    theirs = config.to_deepspeed()
    for block in (theirs, {"quantize_training": theirs}):
        assert MoQConfig.from_dict(json.loads(json.dumps(block))) == config
        assert VALIDATOR.is_valid(block)
    assert VALIDATOR.is_valid(document) and VALIDATOR.is_valid(written)
    assert MoQConfig.from_dict(config.changed()) == config or not config.enabled


@given(documents())
def test_what_the_document_says_is_what_the_config_has(document: dict[str, Any]) -> None:
    config = MoQConfig.from_dict(document)
    written = config.to_deepspeed()
    algo = document.get("quantize_algo", document.get("quantize-algo"))
    assert config.symmetric is ((algo.get("q_type") or document["quantize_type"]) == "symmetric")
    for key, value in document.items():
        if key in ("quantize_type", "quantize_algo", "quantize-algo"):
            continue
        if not isinstance(value, dict):
            assert written[key] == value
            continue
        for inner, inner_value in value.items():
            # Their documented other spellings: 0 is all layers, "auto" alone has a deadline.
            if (inner, inner_value) not in [("layer_num", 0), ("deadline", None)]:
                assert written[key][inner] == inner_value, (key, inner)


def test_defaults() -> None:
    """Each default is in the golden file, which `test_what_states_hold_does_not_change` compares."""
    assert MoQConfig.from_dict({"bits": 8, "start_bits": 12}) == STATED["defaults"]
    # Documents in DeepSpeed's words leave tables alone.
    assert MoQConfig.from_dict(BITS) == replace(STATED["defaults"], embeddings=None)
    off = MoQConfig.from_dict({"enabled": False})
    assert (off.start_bits, off.bits) == (16, 16)
    assert not off.enabled


@pytest.mark.parametrize(
    ("keys", "period", "deadline"),
    [
        ({}, "auto", 0.25),
        ({"quantize_period": "auto", "deadline": 0.5}, "auto", 0.5),
        ({"quantize_period": "auto", "deadline": 1}, "auto", 1),
        ({"quantize_period": 100}, 100, None),
        ({"quantize_period": 100, "deadline": 0.5}, 100, 0.5),
    ],
)
def test_the_period_auto_has_a_deadline_and_others_may(keys: dict[str, Any], period: Any, deadline: Any) -> None:
    config = MoQConfig.from_dict(BITS | {"quantize_schedule": keys})
    assert (config.period, config.deadline) == (period, deadline)
    # Where bits do not fall there is nothing to be in time for.
    assert MoQConfig(bits=8).deadline is None and MoQConfig(bits=8, deadline=0.5).deadline == 0.5


def test_whole_numbers_are_fine_where_fractions_are() -> None:
    config = MoQConfig.from_dict(BITS | {"eigenvalue": {"tol": 1, "stability": 0}})
    assert (config.eigenvalue.tol, config.eigenvalue.stability) == (1.0, 0.0)
    assert type(config.eigenvalue.tol) is type(config.eigenvalue.stability) is float


def test_configs_cannot_be_changed() -> None:
    config = MoQConfig.from_dict(BITS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bits = 4  # type: ignore[misc]
    assert replace(config, bits=4).bits == 4
    with pytest.raises(MoQConfigError, match="above start_bits 12"):
        replace(config, bits=13)


# Attributes that differ from their defaults.
OTHERS: dict[str, Any] = {
    "enabled": False,
    "verbose": True,
    "kernel": True,
    "q_type": "asymmetric",
    "rounding": "stochastic",
    "scale": "mse",
    "scale_refresh": 7,
    "gptq": 64,
    "scale_dtype": "bfloat16",
    "group_size": 64,
    "pack_bits": 4,
    "start_bits": 9,
    "bits": 3,
    "period": 7,
    "offset": 0.5,
    "deadline": 0.75,
    "allow_unreached": True,
    "overrides": {"*.layer.0.*": {"bits": 8, "group_size": 16}},
    "blend": BlendConfig(enabled=True, quantize_change_ratio=0.25),
    "eigenvalue": EigenvalueConfig(enabled=True, layer_name="a.b", layer_num=3, method="power"),
    "sensitivity": SensitivityConfig(measure="divergence"),
    "distillation": DistillationConfig(teacher="x", logits=2.0, hidden=0.5, labels=0.0, dropout=True),
    "activations": ActivationConfig(enabled=True, bits=7, scale="per_tensor", start_step=5),
    "modules_to_not_convert": ("a", "b.*"),
    "lora": "merged",
    "embeddings": 4,
    "convolutions": True,
    "heads": True,
    "prove": False,
    "serve": ("vllm", "llama.cpp"),
    "seed": 2**63 - 1,
}
# States hold these keys in this order: whoever changes them loses old runs.
WRITTEN = json.loads((ROOT / "tests" / "golden" / "config_states.json").read_text(encoding="utf-8"))
STATED = {"defaults": MoQConfig(start_bits=12, bits=8), "others": MoQConfig(**OTHERS)}


@pytest.mark.parametrize("case", STATED)
def test_what_states_hold_does_not_change(case: str) -> None:
    assert json.dumps(STATED[case].to_dict()) == json.dumps(WRITTEN[case])
    assert MoQConfig.from_dict(WRITTEN[case]) == STATED[case]


@pytest.mark.parametrize("case", STATED)
def test_what_states_of_0_2_hold_is_read_as_it_was_meant(case: str) -> None:
    written = json.loads((ROOT / "tests" / "golden" / "v0_2" / "config_states.json").read_text(encoding="utf-8"))[case]
    # Its default left tables alone.
    tables = {"defaults": None, "others": 4}[case]
    assert MoQConfig.from_dict(written) == replace(STATED[case], embeddings=tables, pack_bits=None)
    # Keys that came later.
    for override in written["overrides"].values():
        override["activations"] = None
    written["activation_quantization"] |= {"symmetric": True, "percentile": 100.0, "window": None, "wide_bits": None}
    assert MoQConfig.from_dict(written).to_deepspeed() == {
        **written,
        "pack_bits": None,
        "train": "weights",
        "grid": None,
    }


def test_the_dialect_has_words_for_keys_alone() -> None:
    assert WORDS.keys() <= places().keys()
    assert len({*WORDS.values()}) == len(WORDS)


def test_every_attribute_is_written() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(MoQConfig)}
    # An asymmetric grid has no full range, and is of no format; little goes with scales alone.
    assert fields.keys() - OTHERS.keys() == {"dialect", "range", "groups", "format", "train", "grid"}
    assert MoQConfig(format="nvfp4").to_dict()["format"] == "nvfp4"
    full = MoQConfig(bits=2, range="full", groups=1)
    assert full.to_dict()["range"] == "full" and full.float32_grid == Grid(full=True)
    assert all(OTHERS[name] != fields[name] for name in OTHERS)


def test_configs_are_values() -> None:
    config = MoQConfig.from_dict(AROUND | {"quantize_training": BITS})
    alone = MoQConfig.from_dict({"quantize_training": BITS})
    assert config.from_deepspeed and not MoQConfig(bits=8).from_deepspeed
    assert config == alone and hash(config) == hash(alone)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert other == config and other.from_deepspeed
    assert hash(MoQConfig(bits=8, modules_to_not_convert=["a"])) == hash(  # type: ignore[arg-type]
        MoQConfig(bits=8, modules_to_not_convert=("a",))
    )


def test_the_grid_of_a_config() -> None:
    grid = Grid(PerGroup(64), symmetric=False, stochastic=True, search="mse", full=None, scale_dtype="bfloat16")
    assert MoQConfig(**OTHERS).float32_grid == grid
    assert MoQConfig(bits=4, range="full", groups=1).float32_grid == Grid(full=True)
    assert MoQConfig(bits=4).float32_grid == Grid(PerChannel(), full=None)
    # Where nothing is said, the servers decide.
    for serve, dtype, scales in (("vllm", "float16", "float16"), ("sglang", "float32", "bfloat16")):
        assert MoQConfig(bits=4, serve=(serve,)).grid_of(dtype).scale_dtype == scales  # type: ignore[arg-type]


# The forms in which DeepSpeed's users have their settings: sections of its own around the block, and eigenvalues.
BLOCK = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize-algo": {"q_type": "symmetric"},
    "quantize_bits": {"start_bits": 16, "target_bits": 8},
    "quantize_schedule": {"quantize_period": 400, "schedule_offset": 0},
    "quantize_groups": 8,
}
AROUND = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.0, "bias_correction": True}},
    "gradient_clipping": 1.0,
    "fp16": {"initial_scale_power": 16, "enabled": True},
}
WITH_EIGENVALUES = {
    "enabled": True,
    "quantize_verbose": True,
    "quantizer_kernel": True,
    "quantize_type": "asymmetric",
    "quantize_bits": {"start_bits": 12, "target_bits": 8},
    "quantize_schedule": {"quantize_period": 10, "schedule_offset": 0},
    "quantize_groups": 8,
    "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
    "eigenvalue": {
        "enabled": True,
        "verbose": True,
        "max_iter": 50,
        "tol": 1e-2,
        "stability": 0,
        "gas_boundary_resolution": 1,
        "layer_name": "bert.encoder.layer",
        "layer_num": 12,
    },
}


@pytest.mark.parametrize("document", [BLOCK, {"quantize_training": BLOCK}, AROUND | {"quantize_training": BLOCK}])
def test_deepspeed_documents(document: dict[str, Any], tmp_path: Path) -> None:
    expected = MoQConfig(verbose=True, kernel=True, groups=8, start_bits=16, bits=8, period=400, offset=0)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(document))
    if "quantize_training" in document:
        expected = replace(expected, scale="absmax", range="narrow")
    expected = replace(expected, embeddings=None)
    for source in (document, path, str(path)):
        assert MoQConfig.load(source) == expected


def test_deepspeed_eigenvalues() -> None:
    config = MoQConfig.from_dict(AROUND | {"quantize_training": WITH_EIGENVALUES})
    assert not config.symmetric
    assert (config.period, config.offset, config.deadline) == (10, 0, None)
    assert config.blend == BlendConfig(enabled=False, quantize_change_ratio=0.001)
    assert config.eigenvalue == EigenvalueConfig(
        enabled=True, verbose=True, max_iter=50, stability=0.0, layer_name="bert.encoder.layer", layer_num=12
    )


def test_layer_num_0_is_all() -> None:
    assert MoQConfig.from_dict(BITS | {"eigenvalue": {"layer_num": 0}}).eigenvalue.layer_num is None


def test_other_sections_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moq_hf.config_reading"):
        # A mapping need not be of JSON.
        config = MoQConfig.from_dict({**AROUND, 7: "x", "quantize_training": BLOCK})
    assert caplog.messages == [
        "moq_hf: not of quantization, left to TrainingArguments: optimizer, gradient_clipping, fp16, 7"
    ]
    assert config.from_deepspeed
    caplog.clear()
    with caplog.at_level(logging.INFO, "moq_hf.config_reading"):
        MoQConfig.from_dict({"quantize_training": BLOCK})
        MoQConfig.from_dict(BLOCK)
    assert caplog.messages == []


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "moq.json"
    path.write_text(json.dumps(BITS | {"modules_to_not_convert": ["tête"]}, ensure_ascii=False), encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert MoQConfig.from_file(path).modules_to_not_convert == ("tête",)


# GLUE's numbers of training examples, and start bits, period and eigenvalues of DeepSpeed's MoQ tutorial.
GLUE = {
    "cola": (8551, 12, 8, True), "mnli": (392702, 14, 12, True), "mrpc": (3668, 12, 10, True),
    "qnli": (104743, 12, 64, False), "qqp": (363846, 12, 18, True), "rte": (2490, 12, 8, True),
    "sst2": (67349, 12, 400, False), "stsb": (5749, 12, 10, False), "wnli": (635, 12, 8, True),
}  # fmt: skip
SCHEMA = ROOT / "configs" / "moq.schema.json"
RECIPES = sorted({*SCHEMA.parent.glob("*.json")} - {SCHEMA})
README = ROOT / "configs" / "README.md"


def rows_of(page: Path) -> dict[str, list[str]]:
    """Rows of the tables whose first cell names a recipe."""
    rows = re.findall(r"^\| `([\w-]+\.json)` \|(.*)\|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip().replace(",", "") for cell in cells.split("|")] for name, cells in rows}


COPIES = {name: "moq" if name == "moq" else f"moq_{name}" for name in PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_and_their_copies_are_the_same(name: str) -> None:
    preset = ROOT / "moq_hf" / "presets" / f"{name}.json"
    assert preset.read_bytes() == (ROOT / "configs" / f"{COPIES[name]}.json").read_bytes()
    config = MoQConfig.load(name)
    assert config == MoQConfig.from_file(preset)
    assert config.embeddings == (None if name == "lm-w4" else "auto")
    assert config.falls == (name not in ("w8", "w4", "w3", "w2", "w8a8", "w4a8", "w4a4", "executorch", "fp8"))


def test_there_is_a_recipe_for_everything() -> None:
    assert {path.stem for path in RECIPES} == {*COPIES.values(), *(f"glue_{task}" for task in GLUE)}
    assert set(rows_of(README)) == {path.name for path in RECIPES}


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(json_schema())
    for path, schema in key_schemas().items():
        assert schema["description"], path
        Draft202012Validator(schema).validate(schema["default"])


FOUR = ("moq_auto", "moq_executorch")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_read_and_fit_the_schema_that_they_name(path: Path) -> None:
    config = MoQConfig.from_file(path)
    width = re.search(r"w(\d)(a\d)?$", path.stem)
    assert config.enabled and config.bits == (int(width[1]) if width else 4 if path.stem in FOUR else 8)
    recipe = json.loads(path.read_text(encoding="utf-8"))
    assert (path.parent / recipe["$schema"]).samefile(SCHEMA)
    VALIDATOR.validate(recipe)
    theirs = {"$schema": recipe["$schema"], "quantize_training": config.to_deepspeed(), **AROUND}
    VALIDATOR.validate(theirs)
    assert MoQConfig.from_dict(theirs) == config


def test_the_name_of_the_schema_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    named = {"$schema": "moq.schema.json"} | BITS
    for document in (named, {"$schema": "x", "quantize_training": named}):
        assert MoQConfig.from_dict(document).bits == 8
    assert caplog.messages == []


def test_arithmetic_of_the_auto_recipe() -> None:
    made = plan(ROOT / "configs" / "moq_auto.json", 345)
    told = [int(number) for number in re.findall(r"\d\d+", rows_of(README)["moq_auto.json"][3])]
    assert told == [*(block.target_step for block in made.blocks), made.deadline_step]


@pytest.mark.parametrize("task", GLUE)
def test_arithmetic_of_the_glue_recipes(task: str) -> None:
    config = MoQConfig.from_file(ROOT / "configs" / f"glue_{task}.json")
    examples, start, published, eigenvalues = GLUE[task]
    total, start_bits, period_text, slowest, period, drops = rows_of(README)[f"glue_{task}.json"]
    assert int(total) == 3 * math.ceil(examples / 32)
    assert int(start_bits) == config.start_bits == start
    assert period_text == f"{published} eigenvalues" if eigenvalues else period_text == str(published)
    assert int(period) == config.period
    n = start - 8
    last = published * (10 ** (n - 1) / 72 if eigenvalues else 2 ** (n - 1) / 6)
    assert int(slowest) == round(last)
    steps = [int(step) for step in drops.split()]
    schedule, switches = PrecisionSchedule(config, ["b"]), []
    while not schedule.at_target:
        switches += schedule.advance()
    assert steps == [switch.step for switch in switches if switch.before != FLOAT_BITS]
    assert steps[-1] <= int(total) / 2
    if last < int(total):
        assert round(last / 2 ** (n - 1)) == config.period
    else:
        assert steps[-1] == round(0.4 * int(total))


# ---- bits under a budget


@pytest.mark.parametrize(
    ("target", "budget", "words"),
    [
        ({"mean": 3.0}, BitBudget(mean=3.0), "2, 3, 4 or 8 bits, 3 in the mean"),
        ({"mean": 3, "choices": [2, 4]}, BitBudget(mean=3, choices=(2, 4)), "2 or 4 bits, 3 in the mean"),
        ({"file_mb": 12.5}, BitBudget(file_mb=12.5), "2, 3, 4 or 8 bits, 12.5 MB in the file"),
    ],
)
def test_a_budget_is_read_and_written(target: dict[str, Any], budget: BitBudget, words: str) -> None:
    document = {"start_bits": 2, "bits": target}
    config = MoQConfig.from_dict(document)
    assert config == MoQConfig(start_bits=2, bits=budget)
    assert (config.budget, config.targets, config.target_in_words) == (budget, budget.choices, words)
    written = config.to_dict()
    assert MoQConfig.from_dict(json.loads(json.dumps(written))) == config
    assert written["bits"] == {"choices": [2, 3, 4, 8], **target}
    assert VALIDATOR.is_valid(document) and VALIDATOR.is_valid(config.to_deepspeed())
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_number_is_no_budget_and_the_measure_has_its_default() -> None:
    number, budget = MoQConfig.from_dict(BITS), MoQConfig(bits=BitBudget(mean=3.0))
    assert (number.budget, number.targets, number.target_in_words) == (None, (8,), "8 bits")
    assert (number.measure, budget.measure) == ("eigenvalue", "divergence")
    assert replace(budget, sensitivity=SensitivityConfig(measure="eigenvalue")).measure == "eigenvalue"


def test_what_was_changed_is_all_that_is_needed() -> None:
    """A deadline that the period "auto" has by itself is none of the defaults beside another period."""
    config = MoQConfig(bits=4, start_bits=8, period=1, deadline=0.25)
    assert MoQConfig.from_dict(config.changed()) == config


def test_a_language_is_one_of_those_that_are_known() -> None:
    with pytest.raises(MoQConfigError, match="dialect: unknown key"):
        MoQConfig(bits=4, dialect="foo")
