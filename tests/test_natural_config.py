"""What a person writes first, row by row: it does what was meant, or one error says what to write."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
import transformers as hf
from experts import mixture
from tiny_runs import arguments, new_model, rows
from torch import nn

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQConfigError,
    MoQError,
    MoQTrainer,
    PrecisionSchedule,
    cli,
    plan,
    quantize_model,
)
from moq_hf.grid import PerChannel, PerGroup, RowBlocks
from moq_hf.migrate import migrate
from moq_hf.model.convert import quant_layers
from moq_hf.model.selection import take_inventory
from moq_hf.model.sizes import FileSize
from moq_hf.training.controller import MoQController

FIRST_AT_8 = {"*.layer.0.*": {"bits": 8}}


def trained(folder: Path, config: Any, **more: Any) -> hf.Trainer:
    """A stock Trainer after its run, of 8 steps unless `more` says otherwise."""
    callback = config if isinstance(config, MoQCallback) else MoQCallback(config)
    settings = arguments(folder, **{"max_steps": 8, **more})
    trainer = hf.Trainer(new_model(), settings, train_dataset=rows(), callbacks=[callback])
    trainer.train()
    return trainer


def bits_of(model: nn.Module) -> dict[str, int]:
    return {name: layer.moq.bits for name, layer in quant_layers(model).items()}


# ---- presets


@pytest.mark.parametrize("name", ["lm-w4", "moq", "auto"])
def test_a_model_that_is_rounded_has_the_bits_of_the_target(name: str, tiny_bert: Any) -> None:
    """Nothing would lower those at which training starts."""
    config = MoQConfig.load(name)
    layers = quant_layers(quantize_model(tiny_bert, name))
    assert {layer.moq.bits for layer in layers.values()} == {config.bits} != {config.start_bits}


def test_presets_with_keywords_on_top() -> None:
    config = MoQCallback("w4", embeddings=8, start_bits=8, prove=False).config
    assert (config.bits, config.start_bits, config.embeddings, config.prove) == (4, 8, 8, False)
    # What a preset does not say is as for any config.
    assert MoQConfig.load("w4", bits=3).start_bits == 3
    # The two keys for groups are one choice, which a keyword makes anew.
    assert [MoQConfig.load("lm-w4", groups=groups).grouping for groups in (8, "per_channel")] == [
        RowBlocks(8),
        PerChannel(),
    ]
    assert MoQConfig.load("moq", group_size=16).grouping == PerGroup(16)
    assert MoQConfig.load("moq", group_size=None).grouping == RowBlocks(8)
    with pytest.raises(MoQConfigError, match="preset w4: groups 8 and group_size 32 exclude"):
        MoQConfig.load("w4", groups=8, group_size=32)


def test_a_config_is_made_of_whatever_load_takes(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"quantize_training": {"quantize_bits": {"target_bits": 4}}}')
    for source in ("w4", {"bits": 3}, tmp_path / "own.json"):
        made: Any = MoQConfig(source, seed=5)  # type: ignore[call-arg]
        assert made == MoQConfig.load(source, seed=5) and made.seed == 5
        assert made.from_deepspeed == (source == tmp_path / "own.json")
        assert MoQConfig(made) == made == pickle.loads(pickle.dumps(made))  # type: ignore[call-arg]
    with pytest.raises(MoQConfigError, match="a MoQConfig, and bits beside it"):
        MoQConfig(MoQConfig(bits=4), bits=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["w5", "W4", "none.json", "moq_w4"])
def test_an_unknown_preset_lists_them(name: str) -> None:
    with pytest.raises(
        MoQConfigError,
        match=f"{name}: No such file .*; the presets are w8, w4, w3, w2, w8a8, w4a8, w4a4, executorch, fp8, lm-w4, moq",
    ):
        MoQCallback(name)


def test_a_preset_goes_before_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w4").write_text('{"quantize_bits": {"target_bits": 3}}')
    assert MoQConfig.load("w4").bits == 4 and MoQConfig.load("./w4").bits == MoQConfig.load(Path("w4")).bits == 3


# ---- keywords


def test_keywords_are_the_keys_of_a_file() -> None:
    """Sections too; each keyword has its key in the golden file that test_config.py compares."""
    sections = {"overrides": FIRST_AT_8, "eigenvalue": {"enabled": True}, "distillation": {"hidden": 0.5}}
    written = {"quantize_bits": {"target_bits": 4}, "activation_quantization": {"enabled": True, "bits": 7}, **sections}
    assert MoQConfig(bits=4, embeddings=None, activations=7, **sections) == MoQConfig.from_dict(written)  # type: ignore[arg-type]
    assert MoQConfig(bits=4, groups=8).grouping == RowBlocks(8)
    assert MoQCallback(bits=4, group_size=16).config.grouping == PerGroup(16)


@pytest.mark.parametrize(
    ("given", "enabled"), [(True, True), (8, True), ({"scale": "per_token"}, True), ({"enabled": False}, False)]
)
def test_activations_are_bits_a_switch_or_the_section(given: Any, enabled: bool) -> None:
    assert MoQConfig(bits=8, activations=given).activations.enabled is enabled


def test_a_mapping_and_a_file_have_keywords_too(tmp_path: Path) -> None:
    written = {"bits": 4, "group_size": 16, "activations": 8, "blend": {"enabled": True}, "seed": 3}
    config = MoQConfig(**written)  # type: ignore[arg-type]
    (tmp_path / "moq.json").write_text(json.dumps(written))
    assert (
        MoQConfig.from_dict(written)
        == MoQConfig.from_file(tmp_path / "moq.json")
        == MoQCallback(written).config
        == config
    )
    # Keywords beside a document go before what it says, in either language.
    theirs = {"quantize_bits": {"target_bits": 4}, "quantize_type": "symmetric", "quantize_embeddings": "auto"}
    for document in ({"bits": 4, "q_type": "symmetric"}, theirs):
        assert MoQConfig.load(document, bits=3, q_type="asymmetric") == MoQConfig(bits=3, q_type="asymmetric")
        assert MoQConfig.load(document, quantize_type="asymmetric") == MoQConfig(bits=4, q_type="asymmetric")
    assert MoQConfig.load({"bits": 4, "group_size": 16}, groups=8).grouping == RowBlocks(8)


def test_the_trainer_takes_keywords(tmp_path: Path) -> None:
    def made(**more: Any) -> MoQTrainer:
        return MoQTrainer(new_model(), arguments(tmp_path), train_dataset=rows(), **more)

    trainer = made(bits=4, group_size=16, data_collator=None)
    assert trainer.moq is not None and trainer.moq.config == MoQConfig(bits=4, group_size=16)
    trainer = made(moq_config="w4", bits=3)
    assert trainer.moq is not None and trainer.moq.config == MoQConfig.load("w4", bits=3)
    assert made(bits=2, float_first=True).float_phase is not None
    assert made().moq is None
    # The Trainer's own error would not say what was meant.
    with pytest.raises(MoQConfigError, match=r"MoQConfig: bit: unknown key, did you mean bits\?"):
        made(bit=4)


def test_a_trainer_below_keeps_its_own_arguments(tmp_path: Path) -> None:
    class Below(hf.Trainer):
        def __init__(self, *args: Any, seed: int = 0, **more: Any) -> None:
            self.own_seed, self.more = seed, more.pop("weather", None)
            super().__init__(*args, **more)

    class Mine(MoQTrainer, Below):  # type: ignore[misc]
        pass

    trainer = Mine(new_model(), arguments(tmp_path), train_dataset=rows(), bits=4, seed=7, weather="red")
    assert trainer.moq is not None and trainer.moq.config == MoQConfig(bits=4)
    assert (trainer.own_seed, trainer.more) == (7, "red")


# ---- defaults


def test_bits_are_all_that_a_config_needs(tmp_path: Path) -> None:
    config = MoQConfig(bits=4)
    assert config == MoQConfig.from_dict({"bits": 4}) == MoQConfig.load("w4")
    # DeepSpeed's words leave tables alone.
    assert MoQConfig.from_dict({"quantize_bits": {"target_bits": 4}}) == replace(config, embeddings=None)
    assert (config.start_bits, config.period, config.offset, config.grouping) == (4, "auto", 0, PerChannel())
    grid = config.float32_grid
    assert [grid.at(bits).is_full for bits in (1, 2, 3, 4, 5, 8)] == [False, True, True, True, False, False]
    assert not MoQConfig(bits=4, q_type="asymmetric").float32_grid.at(4).is_full
    trainer = trained(tmp_path, config, max_steps=2)
    assert set(bits_of(trainer.model).values()) == {4}
    # No length is needed where nothing depends on it.
    assert PrecisionSchedule(config, ["b"]).bits == {"b": 4}
    falling = MoQConfig(bits=4, start_bits=8)
    assert falling.deadline == 0.25 and plan(falling, 400).blocks[0].target_step <= 100
    assert MoQConfig(bits={"mean": 3.0, "choices": [2, 4, 6]}).start_bits == 6  # type: ignore[arg-type]


def test_deepspeed_s_defaults_hold_in_its_section_alone() -> None:
    inside = MoQConfig.from_dict({"quantize_training": {"quantize_bits": {"target_bits": 8}}})
    assert (inside.start_bits, inside.period, inside.offset, inside.grouping) == (16, 100, 100, RowBlocks(1))
    assert (inside.scale, inside.range, inside.deadline) == ("absmax", "narrow", None)
    # What DeepSpeed does not know is as everywhere.
    assert (inside.rounding, inside.scale_refresh, inside.heads) == ("nearest", 50, False)
    grouped = {"quantize_bits": {"target_bits": 8}, "quantize_group_size": 32}
    assert MoQConfig.from_dict({"quantize_training": grouped}).grouping == PerGroup(32)


# ---- a run that cannot reach its target

LATE = {"quantize_bits": {"start_bits": 8, "target_bits": 4}, "quantize_schedule": {"quantize_period": 100}}


def test_a_run_that_cannot_reach_its_target_does_not_begin(tmp_path: Path) -> None:
    text = "the run has 8 optimizer steps but reaches 4 bits only at step 800 .* a quantize_schedule.quantize_period "
    text += "of at most 1 fits; .*allow_unreached true"
    with pytest.raises(MoQError, match=text):
        trained(tmp_path / "stock", LATE)
    with pytest.raises(MoQError, match=text):
        tiny_runs.moq(tmp_path / "own", LATE, max_steps=8).train()
    with pytest.raises(MoQError, match=text):
        plan(LATE, 8)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_allow_unreached_trains_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**LATE, "quantize_schedule": {"quantize_period": 100, "allow_unreached": True}}
    trainer = trained(tmp_path, config)
    assert set(bits_of(trainer.model).values()) == {8}
    assert "reaches 4 bits only at step 800" in caplog.text
    assert not plan(config, 8).reached


def test_what_only_may_be_late_is_a_note() -> None:
    """How late a sensitive block drops is known when it is measured."""
    made = plan("eigen", 345)
    assert not made.reached and "(most sensitive)" in made.notes[0]
    with pytest.raises(MoQError, match="least sensitive"):
        plan("eigen", 7)


def test_auto_fits_any_run_of_32_steps_or_more() -> None:
    assert all(plan("auto", steps).reached for steps in (32, 33, 100, 10_000))
    with pytest.raises(MoQError, match="or a run of 32 steps"):
        plan("auto", 31)


def test_what_is_switched_off_is_shown_and_not_migrated() -> None:
    assert "enabled" in MoQConfig(enabled=False)._repr_html_()
    with pytest.raises(MoQError, match="enabled is false: such a run trains in float"):
        migrate({"quantize_training": {"enabled": False}}, 345)


@pytest.mark.parametrize("steps", [80, 345])
def test_deepspeed_s_tutorial_on_a_short_run_names_migrate(steps: int) -> None:
    schedule = {"quantize_period": 400, "schedule_offset": 100 if steps < 100 else 0}
    tutorial = {"quantize_bits": {"start_bits": 16, "target_bits": 8}, "quantize_schedule": schedule}
    with pytest.raises(MoQError, match=f"moq-hf migrate FILE --max_steps {steps}"):
        plan({"quantize_training": tutorial}, steps)


@pytest.mark.parametrize("steps", [20, 60, 345, 9822])
@pytest.mark.parametrize(
    "more",
    [{}, {"eigenvalue": {"enabled": True}}, {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.1}}],
    ids=["plain", "eigenvalues", "blend"],
)
def test_migrate_writes_a_config_that_reaches_its_target(
    more: dict[str, Any], steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = {
        "quantize_bits": {"start_bits": 16, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 10},
        "quantize_algo": {"q_type": "asymmetric"},
        **more,
    }
    written = migrate({"quantize_training": block, "fp16": {"enabled": True}}, steps)
    assert written == migrate(block, steps) == json.loads(json.dumps(written))
    assert ("quantize_period" in caplog.text) == (written["period"] == "auto")
    path = tmp_path / "moq.json"
    path.write_text(json.dumps(written))
    config = MoQConfig.from_file(path)
    assert plan(config, steps).reached and not config.from_deepspeed
    # What DeepSpeed assumed is written out.
    assert (config.groups, config.scale, config.range, config.symmetric) == (1, "absmax", "narrow", False)
    assert config.bits == 8 and written["start_bits"] == config.start_bits
    before = MoQConfig.from_dict({"quantize_training": block})
    if steps == 9822 and "eigenvalue" not in more:
        assert config == before
    assert replace(config, period=10, offset=100, deadline=None, start_bits=16) == before


def test_a_run_that_no_schedule_fits_is_told() -> None:
    blend = {"enabled": True, "quantize_change_ratio": 0.001}
    block = {"quantize_bits": {"start_bits": 9, "target_bits": 8}, "fp16_mixed_quantize": blend}
    with pytest.raises(MoQError, match="a run of 300 optimizer steps is too short for 8 bits, whatever the schedule"):
        migrate(block, 300)
    with pytest.raises(MoQConfigError, match="without the section quantize_training"):
        migrate({"fp16": {"enabled": True}}, 300)


# ---- layers that differ


def test_the_first_layer_at_8_bits_and_the_rest_at_4(tmp_path: Path) -> None:
    """Bits and groups of each layer are as the globs say, and plain transformers answers as the trained model did."""
    overrides = {
        "*.layer.0.*": {"bits": 8, "group_size": 8},
        "layer.1.output": {"start_bits": 6},
        "pooler": {"bits": 2},
    }
    callback = MoQCallback(bits=4, overrides=overrides, deadline=1.0, embeddings=None)
    trainer = trained(tmp_path, callback)
    controller = callback.controller
    assert controller is not None
    names = take_inventory(new_model(), callback.config).layers
    expected = {name: 8 if ".layer.0." in name else 2 if "pooler" in name else 4 for name in names}
    assert bits_of(trainer.model) == expected and len(set(expected.values())) == 3
    groupings = {layer.moq.grid.grouping for name, layer in controller.layers.items() if ".layer.0." in name}
    assert groupings == {PerGroup(8)} and controller.layers["bert.pooler.dense"].moq.grid.grouping == PerChannel()
    # A part of a block that has a way of its own is a block.
    assert controller.blocks["bert.encoder.layer.1 (6 to 4 bits)"] == ["bert.encoder.layer.1.output.dense"]
    seen = [s.bits for s in controller.history if s.block == "bert.encoder.layer.1 (6 to 4 bits)"]
    assert seen == [5, 4] and controller.schedule.bits["bert.encoder.layer.0"] == 8
    folder = tmp_path / "quantized"
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.stack([row["input_ids"] for row in rows(8)])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
    state = json.loads((folder / "moq_state.json").read_text())
    assert {name: layer["bits"] for name, layer in state["layers"].items()} == expected
    assert state["proof"]["agrees"] is True
    assert MoQConfig.from_dict(state["config"]) == callback.config


def test_the_plan_shows_overrides() -> None:
    made = plan(MoQConfig(bits=4, start_bits=6, overrides=FIRST_AT_8), 400)
    assert [(block.name, block.target_bits) for block in made.blocks] == [("every other block", 4), ("*.layer.0.*", 8)]
    assert "6 to 4 bits (*.layer.0.*: 8 bits)" in str(made)
    rows = [line.split() for line in str(made).splitlines()[2:]]
    assert [row[-3:] for row in rows] == [["4", "bits", "100"], ["8", "bits", "0"]]
    assert (
        str(plan(MoQConfig(bits=4, overrides=FIRST_AT_8), 400)) == "400 optimizer steps at 4 bits (*.layer.0.*: 8 bits)"
    )


def test_a_plan_says_what_has_no_effect() -> None:
    (note,) = plan(MoQConfig(bits=4, deadline=0.5, eigenvalue={"enabled": True}), 100).notes  # type: ignore[arg-type]
    assert "deadline and eigenvalue without effect" in note and "start_bits" in note
    assert "period 400, deadline" in str(plan(MoQConfig(bits=4, start_bits=8, period=400, deadline=1.0), 100))


def test_a_run_with_overrides_resumes(tmp_path: Path) -> None:
    config = {
        "quantize_bits": {"start_bits": 6, "target_bits": 4},
        "quantize_schedule": {"quantize_period": 2},
        "overrides": {"layer.0.attention": {"bits": 5}},
    }
    whole = trained(tmp_path / "whole", config, save_strategy="steps", save_steps=3)
    callback = MoQCallback(config)
    settings = arguments(tmp_path / "again", max_steps=8)
    again = hf.Trainer(new_model(), settings, train_dataset=rows(), callbacks=[callback])
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert bits_of(again.model) == bits_of(whole.model)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name
    # What the checkpoint alone delivers has the same bits at that step.
    assert cli.main(["pack", str(tmp_path / "whole" / "checkpoint-6"), str(tmp_path / "packed")]) == 0
    state = json.loads((tmp_path / "packed" / "moq_state.json").read_text())
    assert {layer["bits"] for name, layer in state["layers"].items() if "layer.0.attention" in name} == {5}
    assert {layer["bits"] for name, layer in state["layers"].items() if "layer.1" in name} == {4}
    other = MoQCallback({**config, "overrides": {"layer.0.attention": {"bits": 6}}})
    settings = arguments(tmp_path / "other", max_steps=8)
    changed = hf.Trainer(new_model(), settings, train_dataset=rows(), callbacks=[other])
    with pytest.raises(MoQError, match=r"overrides: .* fixed from the offset on"):
        changed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


@pytest.mark.parametrize("budget", [{"mean": 3.0, "choices": [2, 4]}, {"file_mb": 0.0181, "choices": [2, 4]}])
def test_overrides_are_fixed_outside_of_a_budget(budget: dict[str, Any], tmp_path: Path) -> None:
    callback = MoQCallback(bits=budget, overrides=FIRST_AT_8, eigenvalue={"max_overhead": 1.0}, embeddings=None)
    trainer = trained(tmp_path, callback, max_steps=12)
    controller = callback.controller
    assert controller is not None and controller.choice is not None
    first = {name: bits for name, bits in bits_of(trainer.model).items() if ".layer.0." in name}
    others = {name: bits for name, bits in bits_of(trainer.model).items() if name not in first}
    assert set(first.values()) == {8} and set(others.values()) == {2, 4}
    # The budget is of the others alone, or of the whole file.
    assert not any(".layer.0." in name for name in controller.choice.blocks)
    if "mean" in budget:
        weights = {name: layer.float_weight.numel() for name, layer in controller.layers.items() if name in others}
        mean = sum(others[name] * count for name, count in weights.items()) / sum(weights.values())
        assert controller.choice.reached == pytest.approx(mean) and mean <= 3.0
    else:
        size = (tmp_path / "quantized" / "model.safetensors").stat().st_size / 1e6
        assert size <= controller.choice.reached <= budget["file_mb"]
        assert controller.choice.reached - size < 250e-6


def test_sensitive_blocks_with_overrides_are_measured() -> None:
    config = MoQConfig(bits=4, start_bits=6, overrides={"layer.0.attention": {"bits": 5}}, eigenvalue={"enabled": True})
    controller = MoQController(new_model(), config, 100)
    assert controller.sensitivity is not None
    measured = list(controller.sensitivity.blocks)
    assert measured == ["bert.encoder.layer.0 (6 to 5 bits)", "bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert set(measured) < set(controller.schedule.bits)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"*.layre.0.*": {"bits": 8}},
            r"overrides: '\*.layre.0.\*' matches no layer .*similar are bert\.encoder\.layer\.0",
        ),
        (
            {"classifier": {"bits": 8}},
            "'classifier' matches no layer that is quantized; similar .* output heads need quantize_heads",
        ),
        ({"*word_embeddings*": {"bits": 8}}, "tables have the bits of quantize_embeddings"),
        (
            {"query": {"bits": 8}, "layer": {"bits": 3}},
            "'query' decides nothing, .* the last one counts: put it after layer",
        ),
        (
            {"*": {"bits": 16}},
            r"overrides.\*.bits: 16 would quantize nothing; name layers .* in modules_to_not_convert",
        ),
        ({"*": {"bits": 8}}, r"overrides.\*: matches every layer; set these for all layers, outside of overrides"),
        ({"query": {"group_size": 5}}, r"group_size 5 does not divide the weights of .*layer.\*.*features 16\) \(2\)"),
    ],
)
def test_wrong_overrides_are_told(overrides: Any, text: str) -> None:
    with pytest.raises(MoQError, match=text):
        quantize_model(new_model(), {"quantize_bits": {"target_bits": 4}, "overrides": overrides})


def test_layers_that_a_server_fuses_differ_nowhere_or_that_is_one_error() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=1))
    config: dict[str, Any] = {"quantize_bits": {"target_bits": 4}, "serve": ["vllm"]}
    with pytest.raises(
        MoQError, match=r"it makes one layer of q_proj, k_proj, v_proj .*4 bits.* and .*8 bits"
    ) as error:
        take_inventory(llama, MoQConfig.from_dict({**config, "overrides": {"q_proj": {"bits": 8}}}))
    assert str(error.value).count("  - ") == 1
    alike = {f"{name}_proj": {"bits": 8} for name in "qkv"}
    assert take_inventory(llama, MoQConfig.from_dict({**config, "overrides": alike})).layers
    unserved = {"quantize_bits": {"target_bits": 4}, "overrides": {"q_proj": {"bits": 8}}}
    assert take_inventory(llama, MoQConfig.from_dict(unserved)).layers


def test_of_several_globs_the_last_one_counts() -> None:
    config = MoQConfig(bits=4, overrides={"layer.0": {"bits": 8, "group_size": 16}, "query": {"bits": 6}})
    own = config.of("bert.encoder.layer.0.attention.self.query")
    assert (own.bits, own.start_bits, own.grouping) == (6, 6, PerGroup(16))
    made = bits_of(quantize_model(new_model(), config))
    assert {bits for name, bits in made.items() if name.endswith("query")} == {6}
    assert {bits for name, bits in made.items() if name.endswith("key")} == {8, 4}


def test_the_plan_of_a_run_is_that_of_its_layers(tmp_path: Path) -> None:
    # Together the two globs make four drops of the queries of layer 0, which neither makes alone.
    overrides = {"*.layer.0.*": {"start_bits": 6}, "query": {"bits": 2}}
    falling = MoQCallback(bits=4, period=2, overrides=overrides)
    with pytest.raises(MoQError, match=r"reaches 2 bits only at step 16 \(\*\.layer\.0\.\* and query\)"):
        trained(tmp_path / "short", falling, max_steps=8)
    trained(tmp_path / "long", falling, max_steps=16)
    assert falling.plan is not None
    assert max(block.target_step for block in falling.plan.blocks) == falling.history[-1].step == 16
    # Nothing is as elsewhere: that would be too late.
    trained(
        tmp_path / "all",
        MoQCallback(bits=2, start_bits=16, period=100, overrides={"bert.*": {"bits": 4, "start_bits": 4}}),
    )


def test_all_experts_have_one_group_size() -> None:
    config = {"quantize_bits": {"target_bits": 4}, "overrides": {"*.down_proj": {"group_size": 16}}}
    with pytest.raises(MoQError, match=r"overrides: group_size must be the same for all experts \(.*down_proj"):
        take_inventory(mixture(), MoQConfig.from_dict(config))
    config["overrides"] = {"*.down_proj": {"bits": 8}}
    assert take_inventory(mixture(), MoQConfig.from_dict(config)).experts


# ---- tables

MINILM = {
    "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
}  # fmt: skip


def test_w4_of_a_minilm_has_17_7_mb() -> None:
    with torch.device("meta"):
        model = hf.BertModel(hf.BertConfig(**MINILM))
    sizes = []
    for config in (MoQConfig(bits=4), MoQConfig(bits=4, embeddings=None)):
        made = MoQController(model, config)
        fixed = dict.fromkeys(made.layers, 4)
        file = FileSize(made.inventory, made.layers, made.embeddings, fixed)
        sizes.append(round(file.of_rest() / 1e6, 1))
    assert round(made.sizes.float_mb, 1) == 90.9 and sizes == [17.7, 53.3]


def llama() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes, num_hidden_layers=1, pad_token_id=0))


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    return hf.T5ForConditionalGeneration(config)


def masked() -> nn.Module:
    return hf.BertForMaskedLM(new_model().config)


@pytest.mark.parametrize(
    ("make", "serve", "why"),
    [
        (new_model, "transformers", None),
        (new_model, "onnxruntime", None),
        (new_model, "vllm", "vllm takes them as floats"),
        (llama, "transformers", "only those of encoders"),
        (t5, "transformers", "only those of encoders"),
        (
            lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)),
            "transformers",
            "only those of encoders",
        ),
    ],
    ids=["encoder", "ONNX", "vLLM", "decoder", "encoder-decoder", "no transformer"],
)
def test_auto_takes_the_tables_of_encoders_that_servers_take(make: Any, serve: Any, why: str | None) -> None:
    model = make()
    # vLLM takes a pooler in float, which is not the question here.
    kept = ("pooler",) if serve == "vllm" else None
    config = MoQConfig(bits=4, embeddings="auto", serve=(serve,), modules_to_not_convert=kept)
    found = take_inventory(model, config)
    if why is None:
        assert found.table_bits == 8 and len(found.embeddings) == 3
        assert found.tables_stay is None
    else:
        assert not found.embeddings and found.tables_stay is not None and why in found.tables_stay


def modern() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ends = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 1, "bos_token_id": 2, "eos_token_id": 1}
    return hf.ModernBertModel(hf.ModernBertConfig(vocab_size=60, **sizes, **ends))


def beside_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
    return peft.get_peft_model(new_model(), lora)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make", "config", "bits"),
    [
        (modern, MoQConfig.load("w4"), 4),
        (modern, MoQConfig.load("w2"), 2),
        (modern, MoQConfig.load("w8"), 8),
        (modern, MoQConfig(bits=1, embeddings="auto"), 8),
        (modern, MoQConfig.load("w4", overrides={"*.Wo": {"bits": 8}}), 8),
        (modern, MoQConfig.load("w4", overrides={"*.Wo": {"bits": 12}}), 4),
        (modern, MoQConfig.load("w4", bits={"mean": 3.0}), 8),
        (modern, MoQConfig.load("w4", embeddings=8), 8),
        (new_model, MoQConfig.load("w2"), 8),
        (beside_lora, MoQConfig.load("w4"), 4),
        (beside_lora, MoQConfig.load("w4", lora="merged"), 8),
    ],
)
def test_auto_widens_no_codes_of_a_file_that_has_one_width(make: Any, config: MoQConfig, bits: int) -> None:
    assert take_inventory(make(), config).table_bits == bits


def test_auto_leaves_a_head_that_shares_a_table_in_float() -> None:
    found = take_inventory(masked(), MoQConfig(bits=4, embeddings="auto"))
    assert "bert.embeddings.word_embeddings" not in found.embeddings and len(found.embeddings) == 2
    assert not found.tied and found.tables_stay == "a layer shares bert.embeddings.word_embeddings"
    # Not to be told of where there is none.
    assert take_inventory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), MoQConfig.load("w4")).tables_stay is None


def test_the_plan_of_a_run_says_what_becomes_of_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "auto", "w8", max_steps=1)
    assert "3 embedding tables to 8 bits" in capsys.readouterr().out
    trained(tmp_path / "vllm", MoQCallback("w8", serve=("vllm",), modules_to_not_convert=["pooler"]), max_steps=1)
    assert "of the parameters (vllm takes them as floats)\n" in capsys.readouterr().out
