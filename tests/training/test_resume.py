"""Accidents: checkpoints cut off, full disks, older and newer checkpoints, other configs, runs half with MoQ."""

import json
import logging
import random
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import WRONG, places
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_runs import CONFIG, Stop, arguments, assert_same, moq, new_model, rows, stock, trainer_state, weights
from transformers import Trainer, TrainerCallback

from moq_hf import (
    MoQCallback,
    MoQConfig,
    MoQError,
    MoQTrainer,
    PrecisionSchedule,
    last_checkpoint,
    save_quantized,
    verify_quantized,
)
from moq_hf.model.convert import quant_layers
from moq_hf.packed.pack import pack_checkpoint
from moq_hf.training.checkpoints import checkpoints, fault_of
from moq_hf.training.controller import MoQController
from moq_hf.training.resume import STATE_VERSION, changes, checked_state, load_schedule

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a MoQTrainer's whole run of 16 steps, with a checkpoint of each; not to be changed."""
    folder = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    moq(folder, **SAVING).train()
    return folder


def final(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "checkpoint-16" / "model.safetensors")
    return loaded


def part(run: Path, folder: Path, last: int) -> Path:
    """The run as it was after step `last`."""
    for step in (last - 1, last):
        if (run / f"checkpoint-{step}").exists():
            shutil.copytree(run / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder


def changed(**sections: Any) -> dict[str, Any]:
    """CONFIG with other values in its sections."""
    merged: dict[str, Any] = dict(CONFIG)
    for key, value in sections.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


# ---- checkpoints that were cut off

# In the order in which the Trainer writes them.
FILES = ["config.json", "model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
FILES += ["trainer_state.json"]


def cut_off(folder: Path, name: str, share: float) -> None:
    """As a kill leaves the folder: a share of the file's bytes, and nothing of those that come later."""
    for later in FILES[FILES.index(name) + 1 :]:
        (folder / later).unlink()
    path = folder / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def test_the_trainer_writes_what_is_cut_off_here(run: Path) -> None:
    assert {path.name for path in (run / "checkpoint-3").iterdir()} == set(FILES)
    times = [(run / "checkpoint-3" / name).stat().st_mtime_ns for name in FILES]
    assert times == sorted(times)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_checkpoint_is_noticed(name: str, run: Path, tmp_path: Path) -> None:
    for share in (0.0, 0.5, 0.99):
        folder = part(run, tmp_path / str(share), 8)
        assert last_checkpoint(folder) == str(folder / "checkpoint-8")
        cut_off(folder / "checkpoint-8", name, share)
        assert fault_of(folder / "checkpoint-8") is not None
        assert last_checkpoint(folder) == str(folder / "checkpoint-7")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
def test_a_damaged_file_in_a_finished_checkpoint_is_noticed(name: str, run: Path, tmp_path: Path) -> None:
    folder = part(run, tmp_path, 8)
    path = folder / "checkpoint-8" / name
    path.write_bytes(path.read_bytes()[:-100])
    assert fault_of(path.parent) == f"{name} is damaged"
    (path.parent / "checkpoint-is-incomplete.txt").touch()
    assert "checkpoint-is-incomplete.txt" in str(fault_of(path.parent))


def test_where_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None and fault_of(tmp_path / "none") == "there is no such folder"
    (tmp_path / "checkpoint-7").touch()
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) is None and checkpoints(tmp_path) == []
    with pytest.raises(MoQError, match="there is no whole checkpoint in"):
        moq(tmp_path).train(resume_from_checkpoint=True)


def test_a_moq_trainer_leaves_a_cut_off_checkpoint_out(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = part(run, tmp_path, 8)
    cut_off(folder / "checkpoint-8", "optimizer.pt", 0.5)
    with pytest.raises(
        MoQError, match=r"checkpoint-8: it is not whole \(trainer_state.json is missing\).*checkpoint-7"
    ):
        moq(folder).train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    assert "is left out" not in caplog.text
    moq(folder, **SAVING).train(resume_from_checkpoint=True)
    assert "checkpoint-8 is not whole (trainer_state.json is missing): it is left out" in caplog.text
    assert_same(final(run), final(folder))


@pytest.mark.parametrize(
    "name, error",
    [
        ("config.json", r"ValueError: Can't find a valid checkpoint"),
        ("model.safetensors", "SafetensorError"),
        ("rng_state.pth", r"FileNotFoundError: .*checkpoint-8.trainer_state\.json"),
        ("trainer_state.json", "JSONDecodeError"),
    ],
)
def test_a_stock_trainer_is_told_before_it_stops(
    name: str, error: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = part(run, tmp_path, 8)
    stock(folder)
    assert "is not whole" not in caplog.text
    cut_off(folder / "checkpoint-8", name, 0.5)
    fault = fault_of(folder / "checkpoint-8")
    with pytest.raises(Exception) as raised:
        stock(folder, **SAVING).train(resume_from_checkpoint=True)
    assert re.match(error, f"{raised.type.__name__}: {raised.value}")
    advice = f"resume_from_checkpoint=moq_hf.last_checkpoint({str(folder)!r})"
    assert f"checkpoint-8 is not whole ({fault}), so" in caplog.text and advice in caplog.text
    if name == "rng_state.pth":
        stock(folder, **SAVING).train(resume_from_checkpoint=last_checkpoint(folder))
        assert_same(final(run), final(folder))


# ---- full disks


def limit_files(size: int) -> None:
    """No file may grow beyond a number of bytes: the disk's own error, without a disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Full(TrainerCallback):
    """From a step on files are limited."""

    def __init__(self, step: int, limit: int) -> None:
        self.step, self.limit = step, limit

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            limit_files(self.limit)


@pytest.fixture
def unlimited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_while_saving_costs_one_checkpoint(name: str, run: Path, tmp_path: Path) -> None:
    size = (run / "checkpoint-8" / name).stat().st_size
    trainer = moq(tmp_path, callbacks=[Full(8, size - 100)], **SAVING)
    with pytest.raises((OSError, RuntimeError, SafetensorError)):
        trainer.train()
    limit_files(resource.RLIM_INFINITY)
    moq(tmp_path, **SAVING).train(resume_from_checkpoint=True)
    assert_same(final(run), final(tmp_path))


@pytest.mark.usefixtures("unlimited")
def test_a_full_disk_leaves_the_packed_model_of_before(tmp_path: Path) -> None:
    model = new_model()
    MoQController(model, MoQConfig.from_dict(CONFIG), 16)
    for name, layer in quant_layers(model).items():
        layer.set_bits(4 if "query" in name else 8)
    save_quantized(model, tmp_path / "packed")
    before = {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    sizes = sorted({size for data in before.values() for size in (1, len(data) // 2, len(data) - 1)})
    for folder in ("packed", "new"):
        for size in sizes:
            limit_files(size)
            try:
                with pytest.raises(MoQError, match=f"cannot write the packed model to .*{folder}"):
                    save_quantized(model, tmp_path / folder)
            finally:
                limit_files(resource.RLIM_INFINITY)
            assert [path.name for path in tmp_path.iterdir()] == ["packed"]
            assert {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()} == before
    verify_quantized(tmp_path / "packed", model)


# ---- killed after the last checkpoint

BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "score"}
INPUTS = {"quantize_bits": {"target_bits": 8}, "activation_quantization": {"enabled": True}}
ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "steps": ("w4", {"max_steps": 5}),
    "epochs": ("w4", {"max_steps": -1, "num_train_epochs": 1.25}),
    "whole epoch": ("w4", {"max_steps": -1, "num_train_epochs": 1}),
    "accumulated": ("w4", {"max_steps": 4, "gradient_accumulation_steps": 3}),
    "falling": (CONFIG, {}),
    "best": (CONFIG, BEST),
    "inputs": (INPUTS, {"max_steps": 5}),
    "float first": ("w4", {"max_steps": 6}),
}


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append(state.global_step)


def ended(name: str, cls: Any, folder: Path, **more: Any) -> Any:
    config, settings = ENDS[name]
    callbacks: list[Any] = [Steps()]
    options: dict[str, Any] = {"moq_config": config}
    if cls is Trainer:
        callbacks.append(MoQCallback(config))
        options = {}
    elif name == "float first":
        options["float_first"] = True
    return cls(
        new_model(),
        arguments(folder, **SAVING, **(settings | more)),
        train_dataset=rows(),
        eval_dataset=rows(8),
        compute_metrics=lambda p: {"score": -float(p.predictions.sum())},
        callbacks=callbacks,
        **options,
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name, cls",
    [
        ("steps", Trainer),
        ("steps", MoQTrainer),
        ("epochs", Trainer),
        ("whole epoch", MoQTrainer),
        ("accumulated", Trainer),
        ("falling", MoQTrainer),
        ("best", Trainer),
        ("best", MoQTrainer),
        ("inputs", Trainer),
        ("float first", MoQTrainer),
    ],
)
def test_a_run_killed_while_it_delivers_is_delivered_and_trains_nothing(name: str, cls: Any, tmp_path: Path) -> None:
    whole = ended(name, cls, tmp_path)
    whole.train()
    expected = files_in(tmp_path / "quantized")
    shutil.rmtree(tmp_path / "quantized")
    again = ended(name, cls, tmp_path)
    (steps,) = [c for c in again.callback_handler.callbacks if isinstance(c, Steps)]
    again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert steps.begun == [] and again.state.global_step == whole.state.global_step
    assert_same(weights(whole), weights(again))
    assert files_in(tmp_path / "quantized") == expected
    if name == "steps":
        # The same Trainer trains on where it is asked for more.
        again.args.max_steps = 7
        again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
        assert steps.begun == [5, 6]


@pytest.mark.parametrize("name", ["steps", "float first"])
def test_a_run_that_is_asked_for_fewer_steps_than_it_took_is_delivered(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ended(name, MoQTrainer, tmp_path)
    whole.train()
    expected = load_file(tmp_path / "quantized" / "model.safetensors")
    shutil.rmtree(tmp_path / "quantized")
    capsys.readouterr()
    again = ended(name, MoQTrainer, tmp_path, max_steps=3)
    again.train(resume_from_checkpoint=True)
    step = whole.state.global_step
    assert again.state.global_step == step
    assert (
        f"the run was over, and is delivered, at step {step} of {step}: 3 blocks at 4 bits" in capsys.readouterr().out
    )
    assert_same(load_file(tmp_path / "quantized" / "model.safetensors"), expected)


@pytest.mark.parametrize("epochs", [0.75, 1])
def test_a_run_killed_in_its_last_evaluation_is_evaluated(epochs: float, tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": epochs, "eval_strategy": "epoch"}
    whole = ended("steps", Trainer, tmp_path, **settings)
    whole.train()
    before = json.loads((tmp_path / "quantized" / "moq_state.json").read_text())["metrics"]
    card = (tmp_path / "quantized" / "README.md").read_text()
    # The last checkpoint is from before the evaluation.
    again = ended("steps", Trainer, tmp_path, **settings)
    again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    after = json.loads((tmp_path / "quantized" / "moq_state.json").read_text())["metrics"]
    assert before.keys() == after.keys() and before["eval_score"] == after["eval_score"]
    assert (tmp_path / "quantized" / "README.md").read_text() == card


# ---- older and newer checkpoints


def put(folder: Path, step: int, entry: dict[str, Any] | None) -> Path:
    """Put another MoQ entry into a checkpoint, or none."""
    path = folder / f"checkpoint-{step}" / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["stateful_callbacks"].pop("MoQCallback", None)
    if entry is not None:
        state["stateful_callbacks"]["MoQCallback"] = entry
    path.write_text(json.dumps(state), encoding="utf-8")
    return folder


def saved(run: Path, step: int) -> dict[str, Any]:
    state = json.loads((run / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
    entry: dict[str, Any] = state["stateful_callbacks"]["MoQCallback"]
    return entry


def spoiled(state: dict[str, Any], *path: Any, value: Any = None) -> dict[str, Any]:
    """A copy with one value changed, or without it."""
    copy = json.loads(json.dumps(state))
    place = copy
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copy  # type: ignore[no-any-return]


def test_a_state_of_a_newer_version_or_a_damaged_one_is_told(run: Path) -> None:
    state = saved(run, 7)["attributes"]["saved"]
    assert state["version"] == STATE_VERSION
    block = "bert.encoder.layer.0"
    for wrong, text in [
        (
            spoiled(state, "version", value=99),
            "has version 99, written by moq_hf .*: a run goes on with the moq_hf that began it",
        ),
        (spoiled(state, "version", value="x"), 'has version "x"'),
        (spoiled(state, "schedule"), "is damaged: schedule is missing"),
        (
            spoiled(state, "ratios", f"{block}.output.dense", value="Z!"),
            r"ratios.bert.encoder.layer.0.output.dense must be 4 clipping ratios, letters from A to Y, not \"Z!\"",
        ),
        (spoiled(state, "schedule", "blocks", block, value=[1]), f"schedule.blocks.{block}.1 is missing"),
        (spoiled(state, "schedule", "steps", value=-1), "schedule.steps must be greater than or equal to 0, not -1"),
        (
            spoiled(state, "schedule", "blocks", block, 0, value=33),
            f"schedule.blocks.{block}.0 must be less than or equal to 32, not 33",
        ),
        (spoiled(state, "config", "quantize_bits", value=3), "(?s)damaged: config: .*quantize_bits"),
        (spoiled(state, "schedule", "blocks", block), "another set of blocks"),
    ]:
        with pytest.raises(MoQError, match=text):
            MoQController(new_model(), MoQConfig.from_dict(CONFIG), 16).load_state_dict(checked_state(wrong))


def test_any_value_changed_by_hand_is_one_error_or_none() -> None:
    config = MoQConfig.from_dict(changed(eigenvalue=EIGENVALUES, quantize_schedule={"deadline": 0.75}))
    controller = MoQController(new_model(), config, 16)
    controller.sensitivity.samples.add({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    controller.sensitivity.scores = dict.fromkeys(controller.sensitivity.blocks, 1.0)
    for _ in range(5):
        controller.step()
    state = json.loads(json.dumps(controller.state_dict()))
    state["history"] = state["history"][-1:]
    generator = random.Random(0)
    told = 0
    for path in places(state):
        wrong = spoiled(state, *path, value=generator.choice(WRONG))
        try:
            controller.load_state_dict(checked_state(wrong))
            controller.step()
        except MoQError as error:
            assert len(str(error)) < 1000
            told += 1
    print(f"{told} told")
    assert told > 50
    controller.load_state_dict(state)


def test_an_entry_changed_by_hand_is_told(run: Path, tmp_path: Path) -> None:
    entry = saved(run, 7)
    for wrong, text in [
        (5, r"stateful_callbacks.MoQCallback must be a valid dictionary, not 5"),
        ({"args": {}}, r"stateful_callbacks.MoQCallback.attributes is missing"),
        (spoiled(entry, "attributes", "saved"), r"MoQCallback.attributes.saved is missing"),
        (spoiled(entry, "attributes", value=[1]), r"MoQCallback.attributes must be a valid dictionary, not \[1\]"),
        (
            spoiled(entry, "attributes", "saved", "schedule", "steps", value="x"),
            r"saved.schedule.steps must be a valid",
        ),
        (spoiled(entry, "attributes", "saved", "config", "seed", value=-1), r"saved.config: .*seed: -1 is not legal"),
    ]:
        folder = put(part(run, tmp_path / "run", 7), 7, wrong)
        for make in (stock, moq):
            with pytest.raises(MoQError, match=f"trainer_state.json is damaged: .*{text}"):
                make(tmp_path / "out").train(resume_from_checkpoint=str(folder / "checkpoint-7"))
        shutil.rmtree(folder)


# ---- other configs

BEFORE, AFTER = 1, 5
EIGENVALUES = {"enabled": True, "num_samples": 4, "max_overhead": 1.0}


# At step 5 the run is at 5 bits; the drops to 4 and 3 come after steps 6 and 10. At step 1 nothing is quantized.
@pytest.mark.parametrize(
    "step, config, texts",
    [
        (
            AFTER,
            changed(
                quantize_verbose=True,
                quantizer_kernel=False,
                eigenvalue={"tol": 0.5, "verbose": True},
                activation_quantization={"bits": 7},
                fp16_mixed_quantize={"quantize_change_ratio": 0.5},
            ),
            [],
        ),
        (AFTER, changed(seed=3, quantize_algo={"scale_refresh": 9}), ["scale_refresh: 3 -> 9", "seed: 0 -> 3"]),
        (AFTER, changed(quantize_bits={"target_bits": 4}), ["quantize_bits.target_bits: 3 -> 4"]),
        (AFTER, changed(quantize_bits={"target_bits": 2}), ["quantize_bits.target_bits: 3 -> 2"]),
        (AFTER, changed(quantize_schedule={"deadline": 1.0}), ["quantize_schedule.deadline: null -> 1.0"]),
        (
            BEFORE,
            changed(
                quantize_groups=8,
                modules_to_not_convert=["classifier", "bert.pooler.*"],
                quantize_algo={"q_type": "asymmetric"},
            ),
            ["quantize_groups: 4 -> 8", "modules_to_not_convert: null -> ", "q_type"],
        ),
        (
            BEFORE,
            changed(quantize_bits={"start_bits": 8}, quantize_schedule={"schedule_offset": 4}),
            ["quantize_bits.start_bits: 6 -> 8", "quantize_schedule.schedule_offset: 2 -> 4"],
        ),
        (BEFORE, changed(eigenvalue=EIGENVALUES), ["eigenvalue.enabled: false -> true"]),
    ],
    ids=str,
)
def test_a_change_that_a_run_can_go_on_with_is_told(
    step: int, config: Any, texts: list[str], run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = moq(tmp_path, config)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    told = [record.message for record in caplog.records if "goes on with another MoQ config" in record.message]
    assert [all(text in line for text in texts) for line in told] == [True] * bool(texts)
    schedule = trainer_state(trainer)["schedule"]
    expected = PrecisionSchedule(MoQConfig.from_dict(config), schedule["blocks"], 16)
    values = {switch[1]: switch[6] for switch in trainer_state(trainer)["history"] if switch[6] is not None}
    for _ in range(16):
        expected.advance(values)
    assert schedule["blocks"] == expected.state_dict()["blocks"] and schedule["steps"] == 16
    if not texts:
        assert_same(weights(trainer), final(run))


@pytest.mark.parametrize(
    "step, config, texts",
    [
        (
            AFTER,
            changed(
                quantize_groups=8,
                quantize_algo={"rounding": "stochastic", "scale": "absmax", "range": "full", "scale_dtype": "float16"},
                quantize_embeddings=8,
                modules_to_not_convert=["classifier"],
                fp16_mixed_quantize={"enabled": True},
                eigenvalue=EIGENVALUES,
            ),
            [
                "quantize_groups: 4 -> 8, fixed from the offset on",
                'rounding: "nearest" -> "stochastic", fixed',
                'scale: "auto" -> "absmax", fixed',
                'range: "narrow" -> "full", fixed',
                'scale_dtype: "float32" -> "float16", fixed',
                "quantize_embeddings: null -> 8, fixed",
                'modules_to_not_convert: null -> ["classifier"], fixed',
                "fp16_mixed_quantize.enabled: false -> true, fixed",
                "eigenvalue.enabled: false -> true, fixed",
            ],
        ),
        (AFTER, changed(quantize_algo={"q_type": "asymmetric"}), ['q_type: "symmetric" -> "asymmetric", fixed']),
        (AFTER, changed(quantize_bits={"start_bits": 7}), ["start_bits: 6 -> 7: other bits after step 2"]),
        (AFTER, changed(quantize_bits={"target_bits": 6}), ["target_bits: 3 -> 6: other bits after step 4"]),
        (AFTER, changed(quantize_schedule={"quantize_period": 1}), ["period: 2 -> 1: other bits after step 3"]),
        (AFTER, changed(quantize_schedule={"schedule_offset": 6}), ["offset: 2 -> 6: other bits after step 2"]),
        (BEFORE, changed(quantize_schedule={"schedule_offset": 0}), ["offset: 2 -> 0: other bits after step 1"]),
        (BEFORE, changed(quantize_schedule={"schedule_offset": 1}), ["offset: 2 -> 1: other bits after step 1"]),
    ],
    ids=str,
)
def test_a_change_that_would_corrupt_a_run_is_refused(
    step: int, config: Any, texts: list[str], run: Path, tmp_path: Path
) -> None:
    text = f"another MoQ config, and after its {step} steps .* start a new run"
    with pytest.raises(MoQError, match=text) as error:
        moq(tmp_path, config).train(resume_from_checkpoint=str(run / f"checkpoint-{step}"))
    assert [text for text in texts if text not in str(error.value)] == []


@pytest.mark.parametrize(
    "section, change",
    [
        (
            "eigenvalue",
            {
                "max_iter": 50,
                "tol": 0.5,
                "stability": 1e-5,
                "gas_boundary_resolution": 2,
                "method": "power",
                "max_overhead": 0.5,
                "num_samples": 8,
            },
        ),
        ("distillation", {"teacher": "org/other", "logits": 0.5, "hidden": 0.5, "labels": 0.5}),
    ],
)
def test_what_counts_for_later_steps_alone_may_change_after_the_offset(section: str, change: dict[str, Any]) -> None:
    sections: dict[str, Any] = {"eigenvalue": {"enabled": True}, "distillation": {"teacher": "org/name"}}
    saved_config = MoQConfig.from_dict(changed(**sections))
    now = MoQConfig.from_dict(changed(**{**sections, section: {**sections[section], **change}}))
    told = changes(saved_config, now)
    assert told.keys() == {f"{section}.{key}" for key in change}
    one, made = PrecisionSchedule(saved_config, ["a", "b"], 16), PrecisionSchedule(now, ["a", "b"], 16)
    for _ in range(AFTER):
        one.advance({})
    load_schedule(made, {"schedule": one.state_dict(), "history": []}, told)
    assert made.state_dict() == one.state_dict() and set(made.bits.values()) == {5}


def test_a_changed_schedule_goes_by_the_eigenvalues_that_were_measured(tmp_path: Path) -> None:
    config = MoQConfig.from_dict(changed(quantize_bits={"start_bits": 8}, eigenvalue={"enabled": True}))
    later = MoQConfig.from_dict(
        changed(quantize_bits={"start_bits": 8, "target_bits": 2}, eigenvalue={"enabled": True})
    )
    values = {"a": 1.0, "b": 0.6, "c": 0.0}
    for steps in (1, 2, 9, 30, 200):
        one, expected = (PrecisionSchedule(c, values, 10_000) for c in (config, later))
        history = [list(switch) for _ in range(steps) for switch in one.advance(values)]
        for _ in range(steps):
            expected.advance(values)
        state = {"schedule": one.state_dict(), "history": history}
        made = PrecisionSchedule(later, values, 10_000)
        if expected.bits != one.bits:
            with pytest.raises(MoQError, match="other bits after step "):
                load_schedule(made, state, changes(config, later))
            continue
        load_schedule(made, state, changes(config, later))
        assert made.state_dict() == expected.state_dict()
    assert steps == 200 and expected.bits != one.bits


# ---- with MoQ and without


def test_the_best_checkpoint_may_be_from_before_a_change(tmp_path: Path) -> None:
    sections = {"quantize_period": 2, "schedule_offset": 0}
    bits = {"start_bits": 5, "target_bits": 4}
    settings = {**SAVING, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    scores = iter((5.0, 4.0, 1.0, 2.0, 3.0, 4.0))

    def new(deadline: dict[str, Any], steps: int) -> Trainer:
        config = {**CONFIG, "quantize_bits": bits, "quantize_schedule": {**sections, **deadline}}
        trainer = stock(tmp_path, config, max_steps=steps, metric_for_best_model="eval_rank", **settings)
        trainer.args.greater_is_better = False
        trainer.compute_metrics = lambda prediction: {"rank": next(scores)}
        return trainer

    new({}, 4).train()
    resumed = new({"deadline": 1.0}, 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.best_global_step == 3
    assert verify_quantized(tmp_path / "quantized").state["step"] == 3


def test_a_run_that_goes_on_in_float_says_so(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = str(run / "checkpoint-7")
    stock(tmp_path / "off", {**CONFIG, "enabled": False}).train(resume_from_checkpoint=checkpoint)
    assert "the checkpoint at step 7 was made with MoQ, and the config says enabled: false" in caplog.text
    caplog.clear()
    moq(tmp_path / "none", None).train(resume_from_checkpoint=checkpoint)
    assert "made with MoQ; without moq_config the run goes on in float" in caplog.text


def test_a_run_in_float_hands_the_state_on(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def plain(folder: Path, **more: Any) -> Trainer:
        return Trainer(new_model(), arguments(folder, **more), train_dataset=rows(), callbacks=[Stop(9)])

    def off(folder: Path, **more: Any) -> Trainer:
        return stock(folder, {**CONFIG, "enabled": False}, [Stop(9)], **more)

    def without(folder: Path, **more: Any) -> Trainer:
        return moq(folder, None, [Stop(9)], **more)

    for make in (plain, off, without):
        folder = part(run, tmp_path / make.__name__, 7)
        make(folder, **SAVING).train(resume_from_checkpoint=str(folder / "checkpoint-7"))
        checkpoint = folder / "checkpoint-9"
        assert last_checkpoint(folder) == str(checkpoint) and fault_of(checkpoint) is None
        with pytest.raises(MoQError, match="of MoQ at step 7, after which the run went on in float: resume it with"):
            pack_checkpoint(checkpoint, folder / "packed")
        caplog.clear()
        back = moq(folder)
        back.train(resume_from_checkpoint=True)
        assert [r.message for r in caplog.records if "step 9" in r.message and "step 7" in r.message]
        # Seven steps with MoQ before, and seven now.
        assert trainer_state(back)["schedule"]["steps"] == 14


def test_a_checkpoint_made_without_moq_says_when_quantization_begins(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = part(run, tmp_path, 4)
    put(folder, 4, None)
    trainer = stock(folder)
    trainer.train(resume_from_checkpoint=True)
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING and "without MoQ" in r.message]
    assert lines == [
        "moq_hf: the checkpoint at step 4 was made without MoQ: its schedule starts now, with quantization after step 6"
    ]
    assert trainer_state(trainer)["schedule"]["steps"] == 12


def test_checkpoints_go_from_one_trainer_to_the_other(tmp_path: Path) -> None:
    """With eigenvalues, for which the stock Trainer's callback listens to the model and the MoQTrainer's does not."""
    config = changed(eigenvalue=EIGENVALUES)
    whole = moq(tmp_path / "whole", config)
    whole.train()
    settings = {**SAVING, "restore_callback_states_from_checkpoint": True}
    for one, other in ((moq, stock), (stock, moq)):
        folder = tmp_path / one.__name__
        one(folder, config, [Stop(5)], **settings).train()
        resumed = other(folder, config, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert_same(weights(whole), weights(resumed))
        (callback,) = (c for c in resumed.callback_handler.callbacks if isinstance(c, MoQCallback))
        assert callback.trainer is (resumed if other is moq else None)
        assert (folder / "quantized").exists()
