"""Bits under a budget in whole runs: what is chosen, when, what is delivered, and a run that resumes."""

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tiny_runs import Stop, arguments, assert_same, callback_of, moq, new_model, rows, stock, trained, weights

from moq_hf import MoQConfig, MoQError, MoQTrainer, PrecisionSchedule, last_checkpoint, verify_quantized
from moq_hf.config_fields import BitBudget
from moq_hf.report import read_run, write_report
from moq_hf.schedule import FLOAT_BITS
from moq_hf.servers import fused_units
from moq_hf.training.controller import MoQController
from moq_hf.training.sensitivity import Sensitivity


def config(
    target: Any, start: int = 2, offset: int = 3, measure: str | None = "divergence", **more: Any
) -> dict[str, Any]:
    return {
        "quantize_bits": {"start_bits": start, "target_bits": target},
        "quantize_groups": "per_channel",
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": offset},
        "sensitivity": {"measure": measure},
        "eigenvalue": {"max_overhead": 1.0, "num_samples": 8},
        **more,
    }


def mean_of(found: Any) -> float:
    """Bits per weight of the quantized linear layers, counted from what lies in the folder."""
    layers = [layer for layer in found.layers.values() if layer.kind != "embedding"]
    sizes = [layer.shape[0] * layer.shape[1] for layer in layers]
    return sum(size * layer.bits for size, layer in zip(sizes, layers, strict=True)) / sum(sizes)


@pytest.mark.parametrize("measure", ["eigenvalue", "divergence"])
def test_a_mean_is_met_and_delivered(
    measure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(moq(tmp_path, config({"mean": 3.3}, measure=measure)))
    controller = callback_of(trainer).controller
    assert controller.has_arrived
    # Every block has its own target, from the offset on.
    assert controller.schedule.bits == controller.choice.targets == controller.schedule.targets
    assert {(s.step, s.before) for s in controller.history} == {(3, FLOAT_BITS)}
    trainer.save_model(str(tmp_path / "out"))
    found = verify_quantized(tmp_path / "out", trainer.model)
    assert 0.99 * 3.3 <= mean_of(found) <= 3.3
    assert mean_of(found) == pytest.approx(controller.choice.reached)
    table = capsys.readouterr().out
    assert f"bits of 9 blocks, chosen after step 3 by the measure '{measure}'" in table
    assert "bert.encoder.layer.1.attention.self.query-key-value" in table
    assert "of 3.3 bits per quantized weight" in table
    assert not [r for r in caplog.records if "within it" in r.message]
    state = json.loads((tmp_path / "out" / "moq_state.json").read_text())
    assert state["choice"] == asdict(controller.choice)
    trainer.save_state()
    run = read_run(tmp_path)
    assert run.config.target_in_words == "2, 3, 4 or 8 bits, 3.3 in the mean"
    assert {step for steps, _ in run.by_block("bits").values() for step in steps} == {3}
    assert run.choice is not None and run.choice == controller.choice
    assert "Bits under a budget" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_file_is_met_by_a_stock_trainer_and_plain_transformers_loads_it(tmp_path: Path) -> None:
    budget = config({"file_mb": 0.0145, "choices": [2, 3, 4, 5, 6, 7, 8]}, measure=None, quantize_embeddings=8)
    trainer = trained(stock(tmp_path, budget))
    folder = tmp_path / "quantized"
    size = (folder / "model.safetensors").stat().st_size
    assert 0.99 * 14_500 <= size <= 14_500
    choice = callback_of(trainer).controller.choice
    assert choice is not None and choice.in_file and abs(choice.reached * 1e6 - size) < 200
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows(4)])}
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, trainer.model.eval()(**batch).logits)


def test_the_best_checkpoint_is_delivered_under_a_budget(tmp_path: Path) -> None:
    worse = itertools.count(0, -1)
    often: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    trainer = stock(
        tmp_path, config({"mean": 3.3}), metric_for_best_model="score", load_best_model_at_end=True, **often
    )
    trainer.compute_metrics = lambda _: {"score": float(next(worse))}
    trainer.train()
    # The first one at the target.
    assert trainer.state.best_global_step == 4
    controller = callback_of(trainer).controller
    assert controller.schedule.bits == controller.choice.targets
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert torch.equal(trainer.model.state_dict()["classifier.weight"], saved["classifier.weight"])


class Broken(hf.BertForSequenceClassification):
    """Its loss is NaN out of training."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if not self.training:
            found.logits = found.logits * math.nan
            found.loss = None if found.loss is None else found.loss * math.nan
        return found


@pytest.mark.parametrize("measure", ["eigenvalue", "divergence"])
def test_bits_are_not_chosen_by_what_is_not_finite(measure: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, remove_unused_columns=False)
    trainer = MoQTrainer(
        Broken(new_model().config), args, None, rows(), moq_config=config({"mean": 3.0}, measure=measure)
    )
    with pytest.raises(MoQError, match=rf"the {measure} of no block is finite \(NaN or Inf\)"):
        trainer.train()


def test_bits_fall_from_the_start_to_their_own_targets(tmp_path: Path) -> None:
    trainer = trained(moq(tmp_path, config({"mean": 3.3}, start=5, offset=0)))
    controller = callback_of(trainer).controller
    targets = controller.choice.targets
    assert controller.choice.step == 1
    for block, target in targets.items():
        made = [s for s in controller.history if s.block == block]
        assert [s.bits for s in made] == list(range(max(5, target), target - 1, -1))
        # The first step is in float; then the drops come at 1, 2, 4, ... after it.
        assert [s.step for s in made] == [1, *(1 + 2**k for k in range(len(made) - 1))]


def test_a_resumed_run_is_the_same_and_does_not_choose_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config({"mean": 3.3}, start=5)
    whole = trained(moq(tmp_path / "whole", settings, max_steps=10, save_strategy="steps", save_steps=1))
    for at in (2, 5):
        again = moq(tmp_path / "again", settings, max_steps=10)
        if at == 5:
            monkeypatch.setattr(Sensitivity, "costs", None)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{at}"))
        assert_same(weights(whole), weights(again))
        one, other = (callback_of(trainer).controller for trainer in (whole, again))
        assert one.choice == other.choice and one.history == other.history
        assert one.schedule.state_dict() == other.schedule.state_dict()


def test_another_budget_after_the_choice_is_refused(tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    trained(moq(tmp_path, config({"mean": 3.3}), [Stop(5)], **more))
    folder = last_checkpoint(tmp_path)
    with pytest.raises(MoQError, match=r"target_bits: .*3.3.* -> .*3.0.*, fixed from the offset on"):
        moq(tmp_path / "b", config({"mean": 3.0}), **more).train(resume_from_checkpoint=folder)
    other = {**config({"mean": 3.3}), "overrides": {"query": {"bits": 4}}}
    with pytest.raises(MoQError, match=r"overrides: {} -> {.*}, fixed from the offset on"):
        moq(tmp_path / "d", other, **more).train(resume_from_checkpoint=folder)
    # Limits on measuring, and what measures, are of no use any more.
    moq(tmp_path / "c", config({"mean": 3.3}, measure="eigenvalue"), **more).train(resume_from_checkpoint=folder)


def test_the_pace_goes_by_the_measure(tmp_path: Path) -> None:
    settings = {**config(4, start=6), "eigenvalue": {"enabled": True, "max_overhead": 1.0, "num_samples": 8}}
    controller = callback_of(trained(moq(tmp_path, settings))).controller
    assert controller.choice is None
    assert list(controller.blocks) == ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler.dense"]
    measured = [s for s in controller.history if s.eigenvalue is not None]
    assert {s.block for s in measured} == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
    assert max(s.eigenvalue for s in measured) == 1.0
    assert controller.sensitivity.scores.keys() <= controller.sensitivity.blocks.keys()


# ---- before the first step


def test_an_impossible_file_says_what_is_possible(tiny_bert: Any) -> None:
    for wanted, verdict in ((0.001, "is impossible"), (1.0, "leaves nothing to choose")):
        with pytest.raises(MoQError, match=rf"file_mb: .* MB {verdict}: with 2 to 8 bits .* 0\.0\d+ to 0\.\d+ MB"):
            MoQController(tiny_bert, MoQConfig(start_bits=8, bits=BitBudget(file_mb=wanted), embeddings=None), 200)


def test_a_file_whose_codes_are_all_alike_is_refused(tiny_bert: Any) -> None:
    settings = MoQConfig(start_bits=8, bits=BitBudget(file_mb=0.05), q_type="asymmetric", embeddings=None)
    with pytest.raises(
        MoQError, match=r"file_mb: asymmetric weights .* all stored at the same bits.*; give mean instead"
    ):
        MoQController(tiny_bert, settings, 200)


def test_servers_see_every_choice(tiny_bert: Any) -> None:
    with pytest.raises(MoQError, match=r"kernels take 4 or 8 bits, not 2 \(.* and 4 more\)") as caught:
        MoQController(tiny_bert, MoQConfig(start_bits=8, bits=BitBudget(mean=3.0), serve=("sglang",)), 200)
    assert str(caught.value).count("4 or 8 bits, not 3") == 1


def test_a_schedule_needs_its_choice() -> None:
    schedule = PrecisionSchedule(MoQConfig.from_dict(config({"mean": 3.0}, offset=2)), ["a", "b"])
    assert not schedule.is_choosing and schedule.advance() == ()
    assert schedule.is_choosing
    with pytest.raises(MoQError, match="not been chosen yet"):
        schedule.advance()
    schedule.choose({"a": 2, "b": 8})
    assert [(s.block, s.bits) for s in schedule.advance()] == [("a", 2), ("b", 8)]
    again = PrecisionSchedule(schedule.config, ["a", "b"])
    again.load_state_dict(schedule.state_dict())
    assert again.targets == {"a": 2, "b": 8} and again.at_target


def test_units_are_what_servers_fuse() -> None:
    names = list(fused_units([f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")]))
    assert names == ["model.layers.0.mlp.gate_proj-up_proj", "model.layers.0.mlp.down_proj"]
    experts = [f"model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]
    single = [f"model.layers.1.mlp.experts.{k}.w{n}" for k in range(2) for n in (1, 2)]
    units = fused_units([*experts, *single])
    assert units == {"model.layers.0.mlp.experts": experts, "model.layers.1.mlp.experts": single}


def test_a_loss_that_cannot_be_measured_is_told_at_once(tmp_path: Path) -> None:
    trainer = stock(tmp_path, config({"mean": 3.0}, offset=8, measure="eigenvalue"), label_smoothing_factor=0.1)
    with pytest.raises(MoQError, match="the model's output has no loss"):
        trainer.train()
    assert trainer.state.global_step == 0
