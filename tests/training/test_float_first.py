"""Float first: one run that is a float run and a quantized run from its model, taught by it."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from tiny_runs import Stop, assert_same, new_model, rows, weights
from transformers import (
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import HPSearchBackend

from moq_hf import MoQCallback, MoQConfig, MoQError, MoQTrainer, verify_quantized
from moq_hf.packed.pack import pack_checkpoint
from moq_hf.report import read_run, write_report

CONFIG: dict[str, Any] = {
    "quantize_bits": {"start_bits": 5, "target_bits": 3},
    "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 0, "deadline": 0.5},
    "quantize_groups": "per_channel",
}
WITH_DROPOUT = {**CONFIG, "distillation": {"dropout": True}}
# Half of the steps are one pass over the data.
STEPS = 16


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings = {"max_steps": STEPS, "train_sampling_strategy": "sequential", "logging_steps": 1, **more}
    return tiny_runs.arguments(folder, **settings)


def calm_model() -> BertForSequenceClassification:
    """Without dropout, so that two runs need no common random numbers."""
    model = new_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    return model


def score(prediction: Any) -> dict[str, float]:
    return {"sum": float(prediction.predictions.sum())}


def float_first(
    folder: Path,
    config: Any = CONFIG,
    share: Any = True,
    kind: type[MoQTrainer] = MoQTrainer,
    trainer: Any = None,
    **more: Any,
) -> MoQTrainer:
    """A run of `kind`, with what `trainer` gives to its class and `more` to its arguments."""
    given = {"model": calm_model(), "eval_dataset": rows(8), "compute_metrics": score, "moq_config": config}
    given |= trainer or {}
    return kind(args=arguments(folder, **more), train_dataset=rows(32), float_first=share, **given)


@pytest.mark.parametrize(
    "more",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
)
def test_one_run_is_a_float_run_and_a_taught_run_from_its_model(more: dict[str, Any], tmp_path: Path) -> None:
    one = float_first(tmp_path / "one", **more)
    one.train()

    # A MoQTrainer, since a stock one scales the loss of accumulated steps.
    first = MoQTrainer(calm_model(), arguments(tmp_path / "float", max_steps=8, **more), train_dataset=rows(32))
    first.train()
    start = copy.deepcopy(first.model)
    second_args = arguments(tmp_path / "moq", max_steps=8, **more)
    second = MoQTrainer(
        first.model, second_args, train_dataset=rows(32), moq_config=CONFIG, teacher=copy.deepcopy(start)
    )
    second.train()

    saved = BertForSequenceClassification.from_pretrained(tmp_path / "one" / "float")
    assert_same(dict(saved.named_parameters()), dict(start.named_parameters()))
    assert_same(weights(one), weights(second))
    rates = [log["learning_rate"] for log in one.state.log_history if "learning_rate" in log]
    both = [log["learning_rate"] for run in (first, second) for log in run.state.log_history if "learning_rate" in log]
    assert rates == both and len(rates) == STEPS


class Own(MoQTrainer):
    """Evaluates in a way of its own."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {**super().evaluate(*args, **kwargs), "eval_own": 7.0}


def test_the_float_model_is_evaluated_as_the_trainer_evaluates_logged_and_kept(tmp_path: Path) -> None:
    trainer = float_first(tmp_path, kind=Own, eval_strategy="steps", eval_steps=4)
    trainer.train()
    assert trainer.float_metrics is not None and trainer.float_metrics["eval_own"] == 7.0
    assert not [name for name in trainer.float_metrics if "runtime" in name or name == "epoch"]
    assert [log for log in trainer.state.log_history if "eval_own" in log] == []
    model = BertForSequenceClassification.from_pretrained(tmp_path / "float")
    plain = Trainer(model, arguments(tmp_path / "plain"), eval_dataset=rows(8), compute_metrics=score)
    expected = plain.evaluate()

    recorded = json.loads((tmp_path / "float" / "eval_results.json").read_text(encoding="utf-8"))
    logged = [log for log in trainer.state.log_history if "float_eval_sum" in log]
    assert recorded["eval_sum"] == expected["eval_sum"] == trainer.float_metrics["eval_sum"]
    assert [(log["step"], log["float_eval_sum"]) for log in logged] == [(8, expected["eval_sum"])]
    # What was evaluated on the way is of the model on the way: at step 8 it is quantized already.
    assert [log["step"] for log in trainer.state.log_history if "eval_sum" in log] == [4, 8, 12, 16]

    trainer.save_model()
    trainer.save_state()
    assert verify_quantized(tmp_path, trainer.model)
    state = json.loads((tmp_path / "moq_state.json").read_text(encoding="utf-8"))
    assert state["float_metrics"]["eval_sum"] == expected["eval_sum"]
    run = read_run(tmp_path)
    assert run.in_float["sum"] == expected["eval_sum"] and run.series("moq/mean_bits")[0]
    page = write_report(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    card = (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    assert "float after 8 of 16 steps" in page and "| metric | float after 8 of 16 steps | quantized |" in card
    assert 'from_pretrained("path/to/this/folder")' in card and "- optimizer: adamw" in card
    assert 'MoQTrainer(..., moq_config="moq.json", float_first=0.5)' in card and '"offset"' not in card
    assert f"<td>sum</td>\n<td>{expected['eval_sum']:.4f}</td>" in page


PARTS = "1 x the task's own (moq/loss_task) + 1 x the teacher's logits (moq/loss_logits) + 1 x its hidden states"


@pytest.mark.parametrize("evaluates", [True, False])
def test_card_and_report_show_the_recipe(evaluates: bool, tmp_path: Path) -> None:
    trainer = float_first(tmp_path, trainer={} if evaluates else {"eval_dataset": None})
    trainer.train()
    trainer.save_state()
    card = (tmp_path / "quantized" / "README.md").read_text(encoding="utf-8")
    page = write_report(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    recipe = re.findall(r"```json\n(.*?)```", card, re.DOTALL)
    assert MoQConfig.load(json.loads(recipe[0])) == MoQConfig.load(CONFIG)
    scores = "whose scores are those of float above" if evaluates else "not scored here"
    for text in (card, page):
        assert "float_first=0.5" in text and f"the float model that the first 8 steps made, {scores}." in text
    # Nothing evaluated the quantized model.
    shown = "| metric | float after 8 of 16 steps |\n| --- | --- |\n| loss | " in card
    assert shown == evaluates == ("The quantized model was not evaluated." in card)


def test_card_and_report_name_a_teacher_that_was_given(tmp_path: Path) -> None:
    given = {"moq_config": CONFIG, "teacher": calm_model(), "train_dataset": rows(32)}
    trainer = MoQTrainer(calm_model(), arguments(tmp_path, save_strategy="steps", save_steps=STEPS), **given)
    trainer.train()
    pack_checkpoint(tmp_path / f"checkpoint-{STEPS}", tmp_path / "packed")
    page = write_report(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    cards = [(tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("quantized", "packed")]
    for text in (page, *cards):
        taught = re.search("It learned from the float model (.*), not scored here", text)
        assert taught is not None and "BertForSequenceClassification" in taught[1] and "teacher=teacher" in text


def test_with_and_without_a_float_phase_no_run_goes_on_from_the_other(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoint-13", tmp_path / "with" / "checkpoint-13")
    trainer = MoQTrainer(new_model(), arguments(tmp_path / "with"), train_dataset=rows(32), moq_config=WITH_DROPOUT)
    with pytest.raises(MoQError, match="of a run with float_first, in float up to step 8: give float_first again"):
        trainer.train(resume_from_checkpoint=True)
    more = {"save_strategy": "steps", "save_steps": STEPS}
    without = MoQTrainer(calm_model(), arguments(tmp_path, **more), train_dataset=rows(32), moq_config=CONFIG)
    without.train()
    with pytest.raises(MoQError, match="is of a run without float_first: leave it out"):
        float_first(tmp_path, max_steps=2 * STEPS).train(resume_from_checkpoint=True)


def test_both_phases_and_the_parts_of_the_loss_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    float_first(tmp_path, logging_steps=4, save_strategy="steps", save_steps=12).train()
    lines = capsys.readouterr().out.splitlines()
    where = {start: n for n, line in enumerate(lines) for start in TOLD if line.startswith(start)}
    assert list(where) == TOLD and list(where.values()) == sorted(where.values())
    assert PARTS in lines[where[TOLD[3]]] and str(tmp_path / "float") in lines[where[TOLD[0]]]
    # The float metrics follow the sentence on the phase, before the first log of the switch.
    assert where[TOLD[4]] == where[TOLD[3]] + 1
    logged = [line for line in lines if "'loss'" in line]
    assert [("moq/loss_task" in line) for line in logged] == [False, False, True, True]
    assert [("'moq/bits': '32'" in line) for line in logged] == [True, True, False, False]

    float_first(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    told = capsys.readouterr().out
    assert f"moq_hf: the float phase is over: the loss is {PARTS}" in told
    assert "moq_hf: the run goes on at step 12 of 16: " in told and "float first:" not in told


def test_no_mean_of_the_loss_is_of_both_phases(tmp_path: Path) -> None:
    trainer = float_first(tmp_path, logging_steps=5)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "loss" in log]
    assert [(log["step"], log["moq/bits"] == 32, "moq/loss_task" in log) for log in logged] == [
        (5, True, False),
        (8, True, False),
        (10, False, True),
        (15, False, True),
    ]


class Log(TrainerCallback):
    """What a callback is given to log, in its order."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append({**logs, "step": state.global_step})


@pytest.mark.parametrize("has_teacher", [True, False], ids=["float_first", "offset"])
@pytest.mark.parametrize(
    "more",
    [
        {"logging_steps": 1},
        {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4},
        {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 4},
        # A run of two epochs, the first of which is in float.
        {"logging_strategy": "epoch", "per_device_train_batch_size": 8},
        {"logging_strategy": "no"},
    ],
    ids=["each step", "with an evaluation", "seldom", "epochs", "none"],
)
def test_the_float_phase_is_logged_before_the_quantized_one(
    more: dict[str, Any], has_teacher: bool, tmp_path: Path
) -> None:
    """By every callback, and in the history, with the checkpoint of the step."""
    log = Log()
    more = {"max_steps": 8, **more}
    if has_teacher:
        trainer: Trainer = float_first(tmp_path, {"bits": 2}, trainer={"callbacks": [log]}, **more)
    else:
        callbacks = [MoQCallback(bits=2, offset=4), log]
        trainer = Trainer(
            new_model(), arguments(tmp_path, **more), train_dataset=rows(32), eval_dataset=rows(8), callbacks=callbacks
        )
    trainer.train()
    saved = tmp_path / "checkpoint-4" / "trainer_state.json"
    histories = [log.seen, trainer.state.log_history]
    if saved.is_file():
        histories.append(json.loads(saved.read_text(encoding="utf-8"))["log_history"])
    for history in histories:
        bits = [(entry["step"], entry["moq/bits"]) for entry in history if "moq/bits" in entry]
        assert bits == sorted(bits, key=lambda each: (each[0], -each[1])) and (4, 2.0) in bits
        # The first entry of the quantized phase is the switch, which has no loss.
        begins = next(i for i, entry in enumerate(history) if entry.get("moq/bits") == 2)
        assert history[begins]["step"] == 4 and "loss" not in history[begins]
        evaluated = [i for i, entry in enumerate(history) if "eval_loss" in entry]
        assert all(i > begins for i in evaluated)
    assert [callback for callback in trainer.callback_handler.callbacks if "After" in type(callback).__name__] == []


def test_a_switch_is_logged_where_the_loss_has_another_name(tmp_path: Path) -> None:
    """Some Trainers log in a way of their own."""

    class Renaming(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **more: Any) -> None:
            super().log({name.replace("loss", "cost"): value for name, value in logs.items()}, *args, **more)

    log = Log()
    callbacks = [MoQCallback(bits=2, offset=4), log]
    trainer = Renaming(new_model(), arguments(tmp_path, max_steps=8), train_dataset=rows(32), callbacks=callbacks)
    trainer.train()
    steps = [entry["step"] for entry in log.seen]
    assert steps == sorted(steps)
    assert [entry["step"] for entry in log.seen if "moq/bits" in entry] == [4]


# What the lines of a run with a float phase start with, in their order.
TOLD = [
    "moq_hf: float first: the model trains in float up to step 8; it is then kept in ",
    "moq_hf: 13 linear layers",
    "moq_hf plan: 16 optimizer steps, ",
    "moq_hf: step 8: the float phase is over; its model is in ",
    "{'float_eval_loss': ",
    "moq_hf: All 3 blocks reached ",
]


def test_the_parts_of_the_loss_are_means_that_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"logits": 2.0, "hidden": 0.5, "labels": 3.0}
    trainer = MoQTrainer(
        calm_model(),
        arguments(tmp_path, logging_steps=5, gradient_accumulation_steps=2, report_to="none"),
        train_dataset=rows(32),
        moq_config={**CONFIG, "distillation": weights},
        teacher=calm_model(),
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [5, 10, 15]
    for log in logs:
        parts = [log[f"moq/loss_{name}"] for name in ("logits", "hidden", "task")]
        total = sum(weight * part for weight, part in zip(weights.values(), parts, strict=True))
        assert log["loss"] == pytest.approx(total, rel=1e-4) and len(set(parts)) == 3
    told = capsys.readouterr().out
    assert "moq_hf: with a teacher, the loss is 3 x the task's own (moq/loss_task) + 2 x the teacher's logits" in told
    assert len(re.findall(r"{'moq/bits': '\d', 'moq/mean_bits': '[\d.]+', 'moq/loss_task': '", told)) == 3


def resumable(folder: Path, **more: Any) -> MoQTrainer:
    """With dropout and shuffled rows: random numbers count."""
    return float_first(folder, WITH_DROPOUT, trainer={"model": new_model()}, train_sampling_strategy="random", **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint of each step; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    resumable(folder, save_strategy="steps", save_steps=1).train()
    return folder


@pytest.mark.parametrize("step", [7, 8, 13])
def test_killed_anywhere_a_run_resumes_bit_for_bit(step: int, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    if step >= 8:
        shutil.copytree(whole / "float", tmp_path / "float")
    trainer = resumable(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    expected = load_file(whole / "checkpoint-16" / "model.safetensors")
    assert_same(weights(trainer), {name: expected[name] for name in weights(trainer)})
    results = [json.loads((folder / "float" / "eval_results.json").read_text("utf-8")) for folder in (whole, tmp_path)]
    assert results[0]["eval_sum"] == results[1]["eval_sum"] == trainer.float_metrics["eval_sum"]  # type: ignore[index]
    # Once, whether before the checkpoint or after it.
    assert sum("float_eval_sum" in log for log in trainer.state.log_history) == 1


def test_after_a_resumed_run_the_loss_of_a_new_one_is_no_sum(tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 8, "save_steps": 4}
    losses = []
    for resumes in (False, True):
        given = {"model": None, "model_init": calm_model, "callbacks": [Stop(5 if not losses else 1)]}
        trainer = float_first(tmp_path, trainer=given, save_strategy="steps", **more)
        trainer.train(resume_from_checkpoint=True) if resumes else None
        trainer.train()
        losses.append(next(log["loss"] for log in trainer.state.log_history if log["step"] == 1 and "loss" in log))
    assert losses[0] == losses[1] < 1


class Greedy(MoQTrainer):
    """Has memory for no more than 3 rows once it follows a teacher; notes what it drops out at each step."""

    dropped: list[tuple[bool, float]] | None = None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        shares = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        if model.training:
            self.dropped = [*(self.dropped or []), (self._teacher is not None, max(shares))]
        if self._teacher is not None and len(inputs["input_ids"]) > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_dropout_in_the_float_phase_and_beside_the_teacher(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = WITH_DROPOUT if share else CONFIG
    more: dict[str, Any] = {"auto_find_batch_size": True, "max_steps": 8}
    trainer = float_first(tmp_path, config, kind=Greedy, trainer={"model": new_model()}, **more)
    trainer.train()
    assert isinstance(trainer, Greedy)
    attempts = [*[False] * 4, True, *[False] * 4, *[True] * 4]
    assert trainer.dropped == [(is_followed, share) for is_followed in attempts]
    assert {module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)} == {0.1}
    told = capsys.readouterr().out
    assert ("float up to step 4; dropout is off; it is then kept in" in told) != bool(share)
    assert ("hidden states (moq/loss_hidden); dropout is off" in told) != bool(share)


def test_clip_follows_its_scores_of_pairs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 60, "max_position_embeddings": 16}
    image = {**sizes, "image_size": 16, "patch_size": 8}
    data = [{"input_ids": row["input_ids"], "pixel_values": torch.randn(3, 16, 16)} for row in rows(8)]

    def pairs(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: torch.stack([row[name] for row in batch]) for name in batch[0]} | {"return_loss": True}

    def run(config: dict[str, Any]) -> MoQTrainer:
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))
        given = {"data_collator": pairs, "train_dataset": data, "float_first": True, "moq_config": {**CONFIG, **config}}
        trainer = MoQTrainer(model, arguments(tmp_path, max_steps=8), **given)
        trainer.train()
        return trainer

    with pytest.raises(MoQError, match=r"no hidden states; set distillation\.hidden to 0"):
        run({})
    trainer = run({"distillation": {"hidden": 0, "labels": 0}})
    last = [log for log in trainer.state.log_history if "moq/loss_logits" in log][-1]
    assert last["loss"] == pytest.approx(last["moq/loss_logits"]) and last["loss"] > 0
    assert trainer.moq is not None and trainer.moq.delivered is not None and trainer.moq.delivered.proof is not None
    assert trainer.moq.delivered.proof.agrees


def test_a_resumed_run_needs_its_float_model(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoint-9", tmp_path / "checkpoint-9")
    with pytest.raises(MoQError, match=r"the float model of this run should be in .*float"):
        float_first(tmp_path).train(resume_from_checkpoint=True)
    shutil.copytree(whole / "float", tmp_path / "float")
    (tmp_path / "float" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(MoQError, match=r"cannot load .*float as BertForSequenceClassification"):
        float_first(tmp_path).train(resume_from_checkpoint=True)


def test_bits_under_a_budget_are_chosen_on_the_float_model(tmp_path: Path) -> None:
    budget = {"mean": 3.0, "choices": [2, 4]}
    config = {**CONFIG, "quantize_bits": {"start_bits": 2, "target_bits": budget}}
    config |= {"quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}, "eigenvalue": {"max_overhead": 1.0}}
    whole = float_first(tmp_path / "whole", config, save_strategy="steps", save_steps=4)
    whole.train()
    controller = whole.moq.controller  # type: ignore[union-attr]
    assert controller is not None and controller.has_arrived
    assert {switch.step for switch in controller.history} == {8}
    assert {switch.bits for switch in controller.history} == {2, 4}
    # A choice that was made before the checkpoint is kept in test_budget_in_training.py.
    again = float_first(tmp_path / "again", config)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(weights(again), weights(whole))
    assert again.moq.controller.schedule.targets == controller.schedule.targets  # type: ignore[union-attr]


def test_early_stopping_waits_for_the_target(tmp_path: Path) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=1)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "sum", "eval_steps": 1, "save_steps": 1}
    trainer = float_first(tmp_path, trainer={"callbacks": [stop]}, eval_strategy="steps", save_strategy="steps", **best)
    trainer.train()
    controller = trainer.moq.controller  # type: ignore[union-attr]
    assert controller is not None and controller.has_arrived
    assert int(trainer.state.best_model_checkpoint.rpartition("-")[2]) >= 12  # type: ignore[union-attr]


def test_inputs_stay_float_in_the_float_phase(tmp_path: Path) -> None:
    seen: dict[int, bool] = {}

    class Watch(Stop):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen[state.global_step] = model.bert.encoder.layer[0].output.dense.moq.inputs.active

    config = {**CONFIG, "activation_quantization": {"enabled": True}}
    float_first(tmp_path, config, trainer={"callbacks": [Watch(99)]}).train()
    assert [step for step, active in seen.items() if active] == list(range(8, STEPS))


@pytest.mark.parametrize(
    ("share", "more", "words"),
    [
        (1.5, {}, "float_first: 1.5 is not a share of the run; it must be true"),
        ("0.5", {}, "float_first: '0.5' is not a share"),
        (True, {"moq_config": None}, "float_first needs a moq_config that is enabled"),
        (True, {"moq_config": {**CONFIG, "enabled": False}}, "float_first needs a moq_config that is enabled"),
        (True, {"moq_config": None, "callbacks": [MoQCallback(CONFIG)]}, "no MoQCallback beside it"),
        (True, {"teacher": new_model()}, "no other teacher"),
        (True, {"moq_config": {**CONFIG, "distillation": {"teacher": "a/b"}}}, "leave distillation.teacher out"),
        (True, {"model": torch.nn.Sequential(torch.nn.Linear(2, 2))}, "needs a transformers model, got Sequential"),
    ],
)
def test_what_does_not_go_together(share: Any, more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(MoQError, match=words):
        float_first(tmp_path, share=share, trainer=more)


def test_a_model_that_was_loaded_quantized_has_no_float_phase(tmp_path: Path) -> None:
    calm_model().save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path, quantization_config=MoQConfig(bits=4))
    with pytest.raises(MoQError, match=r"float_first: the model was loaded with a MoQConfig, .* as moq_config"):
        float_first(tmp_path, trainer={"model": model, "moq_config": None})


def test_a_scheduler_must_be_one_that_can_start_again(tmp_path: Path) -> None:
    model = calm_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(MoQError, match="leave the scheduler to the Trainer"):
        float_first(tmp_path, trainer={"model": model, "optimizers": mine}).train()
    more = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    with pytest.raises(MoQError, match="makes a ReduceLROnPlateau, which cannot start again"):
        float_first(tmp_path, **more).train()


def test_an_offset_that_is_not_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "quantize_schedule": {"quantize_period": 1, "schedule_offset": 5}}
    float_first(tmp_path, config)
    assert "quantization begins after 0.5 of the run; quantize_schedule.schedule_offset 5 is not read" in caplog.text
    caplog.clear()
    float_first(tmp_path, CONFIG)
    assert "not read" not in caplog.text


def test_each_phase_needs_a_step(tmp_path: Path) -> None:
    config = {**CONFIG, "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}}
    with pytest.raises(MoQError, match=r"float_first 0.05 of 16 optimizer steps is step 0"):
        float_first(tmp_path, config, share=0.05).train()


def test_a_checkpoint_without_moq_is_not_gone_on_from(tmp_path: Path) -> None:
    Trainer(calm_model(), arguments(tmp_path, save_strategy="steps", save_steps=4), train_dataset=rows(32)).train()
    shutil.rmtree(tmp_path / "checkpoint-16")
    with pytest.raises(MoQError, match="the checkpoint at step 12 was made without MoQ; give its model as the start"):
        float_first(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(calm_model(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    with pytest.raises(MoQError, match="PEFT's adapters cannot be its own teacher in one run"):
        float_first(tmp_path, trainer={"model": model})


def test_an_evaluation_that_fails_does_not_lose_the_float_model(tmp_path: Path) -> None:
    trainer = float_first(tmp_path)
    trainer.compute_metrics = lambda prediction: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    first = Trainer(
        calm_model(), arguments(tmp_path / "plain", max_steps=8, lr_scheduler_type="linear"), None, rows(32)
    )
    first.train()
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "float")
    assert_same(dict(saved.named_parameters()), weights(first))


def test_what_would_fail_in_the_middle_fails_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "float").write_text("a file")
    trainer = float_first(tmp_path)
    with pytest.raises(MoQError, match=r"the float model cannot be saved in .*float"):
        trainer.train()
    assert trainer.state.global_step == 0 and not trainer.state.log_history


def test_a_part_that_was_put_in_by_hand_is_named(tmp_path: Path) -> None:
    model = calm_model()
    model.classifier = torch.nn.Linear(16, 5)
    with pytest.raises(MoQError, match=r"makes other weights \(classifier\.bias, classifier\.weight\)"):
        float_first(tmp_path, trainer={"model": model})


class Bare(BertForSequenceClassification):
    """Its forward pass takes nothing but inputs and labels."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return super().forward(input_ids, labels=labels)


class Unnamed(BertForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).to_tuple()


class Demanding(BertForSequenceClassification):
    def __init__(self, config: Any, weight: float) -> None:
        super().__init__(config)


class NoLogits(BertForSequenceClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return {"loss": found.loss, "hidden_states": found.hidden_states}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Bare, "takes no output_hidden_states; set distillation.hidden to 0"),
        (Unnamed, "the model's output has no names"),
        (
            NoLogits,
            "nothing in the model's output is named as logits are .* only loss, hidden_states; set distillation.log",
        ),
        (lambda config: Demanding(config, 1.0), r"cannot be made from its config alone \(.*missing 1 required"),
    ],
    ids=["no hidden states", "tuple", "no logits", "class"],
)
def test_a_model_that_cannot_be_its_own_teacher_is_refused_before_the_first_step(
    make: Any, words: str, tmp_path: Path
) -> None:
    trainer = None
    with pytest.raises(MoQError, match=words):
        given = {"model": make(calm_model().config)}
        trainer = float_first(tmp_path, trainer=given, remove_unused_columns=False)
        trainer.train()
    assert trainer is None or trainer.state.global_step == 0


def test_the_first_step_is_that_of_a_float_run(tmp_path: Path) -> None:
    """Whether the model can follow is found out on the way: with dropout too, and accumulated micro-batches."""
    more: dict[str, Any] = {"max_steps": 6, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    one = float_first(tmp_path / "one", WITH_DROPOUT, trainer={"model": new_model()}, **{**more, "max_steps": 12})
    one.train()
    plain = MoQTrainer(new_model(), arguments(tmp_path / "plain", **more), None, rows(32))
    plain.train()
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "one" / "float")
    assert_same(dict(saved.named_parameters()), weights(plain))


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def test_a_loss_function_gets_the_number_of_labels(tmp_path: Path) -> None:
    runs = []
    for name, function in (("own", summed), ("models", None)):
        trainer = float_first(tmp_path / name, trainer={"compute_loss_func": function})
        trainer.train()
        runs.append(weights(trainer))
    for name, weight in runs[0].items():
        torch.testing.assert_close(weight, runs[1][name], rtol=1e-4, atol=1e-5)


def test_with_several_processes_a_loss_function_gets_what_the_trainer_multiplies_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"compute_loss_func": summed, "moq_config": CONFIG, "teacher": calm_model()}
    trainer = MoQTrainer(calm_model(), arguments(tmp_path), train_dataset=rows(8), **given)
    batch = torch.utils.data.default_collate(rows(4))
    trainer.model.train()
    alone = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=4)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    assert trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=8) == alone


def test_a_float_model_of_another_run_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    other = calm_model()
    with torch.no_grad():
        other.classifier.weight.add_(1.0)
    other.save_pretrained(tmp_path / "run" / "float")
    trainer = resumable(tmp_path / "run")
    with pytest.raises(MoQError, match=r"the model in .*float is not the float model of this run"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{STEPS - 1}"))


def test_a_scheduler_of_ones_own_does_not_slip_through(tmp_path: Path) -> None:
    class Own(MoQTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return Trainer.create_scheduler(self, num_training_steps, optimizer)

    trainer = float_first(tmp_path, kind=Own)
    with pytest.raises(MoQError, match=r"Own\.create_scheduler does not call that of MoQTrainer"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_optimizer_that_averages_its_steps_is_refused(tmp_path: Path) -> None:
    class Free(torch.optim.SGD):
        def eval(self) -> None: ...

        def train(self) -> None: ...

    model = calm_model()
    trainer = float_first(tmp_path, trainer={"model": model, "optimizers": (Free(model.parameters(), lr=1e-3), None)})
    with pytest.raises(MoQError, match="Free averages its steps and cannot start afresh"):
        trainer.train()


def test_each_trial_of_a_search_keeps_its_float_model(tmp_path: Path) -> None:
    trainer = float_first(tmp_path)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    # As `Trainer._hp_search_setup` does.
    trainer._trial = SimpleNamespace(number=3)  # type: ignore[assignment]
    phase = trainer.float_phase
    assert phase is not None and phase.folder == tmp_path / "run-3" / "float"


def test_a_loss_that_leaves_the_teacher_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(MoQTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss

    class Around(MoQTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    for kind, count in ((Own, 1), (Around, 0)):
        caplog.clear()
        float_first(tmp_path, kind=kind, trainer={"eval_dataset": None}).train()
        told = [record.message for record in caplog.records if "does not call that of MoQTrainer" in record.message]
        assert len(told) == count
        # What is said of the loss afterwards agrees.
        assert ("the loss is that of compute_loss alone" in capsys.readouterr().out) == count


def test_found_grids_and_a_float_phase_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MoQError, match='float_first moves the weights off the grids that grid: "found" keeps'):
        MoQTrainer(new_model(), arguments(tmp_path), moq_config={"grid": "found"}, float_first=True)
