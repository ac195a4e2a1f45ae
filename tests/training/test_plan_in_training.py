"""What a run tells of its schedule: the plan before, bits, sizes and blends during, the outcome after."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import (
    CONFIG,
    Stop,
    assert_same,
    moq,
    over_the_model,
    stock,
    trained,
    weights,
)
from transformers import TrainerCallback

from moq_hf import MoQCallback, MoQError, plan
from moq_hf.forecast import outcome
from moq_hf.model.convert import quant_layers
from moq_hf.report import write_report
from moq_hf.schedule import Switch
from moq_hf.training.controller import MoQController

AUTO = {**CONFIG, "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.75}}
BLEND = {**CONFIG, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.25}}
PLAN = """\
moq_hf plan: 16 optimizer steps, 6 to 3 bits, offset 2, period 2, no deadline
block        6 bits  5 bits  4 bits  3 bits  at target
every block       2       4       6      10         10
in quantized layers: 72.1 % of the model's 6,034 parameters
"""
OUTCOME = """\
moq_hf: after 16 optimizer steps; planned: 3 bits after step 10
  3 bits, since step 10: 3 blocks
"""


@pytest.mark.parametrize("make", [stock, moq])
def test_the_plan_is_told_once_before_the_first_step_and_the_outcome_after_the_last(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(capsys.readouterr().out)

    trained(make(tmp_path, callbacks=[Watch()]))
    assert seen[0] == PLAN
    assert "plan" not in "".join(seen[1:]) and OUTCOME in capsys.readouterr().out


def test_auto_meets_its_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained(stock(tmp_path, AUTO))
    told = capsys.readouterr().out
    assert "offset 2, period auto, deadline at step 12" in told
    drops = {log["step"]: log["moq/mean_bits"] for log in trainer.state.log_history if "moq/mean_bits" in log}
    assert drops == {step: over_the_model(bits, trainer.model) for step, bits in {2: 6, 4: 5, 6: 4, 10: 3}.items()}


def test_a_resumed_run_keeps_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    straight = trained(moq(tmp_path / "straight", AUTO))
    settings = {"save_strategy": "steps", "save_steps": 5}
    trained(moq(tmp_path / "resumed", AUTO, callbacks=[Stop(5)], **settings))
    resumed = moq(tmp_path / "resumed", AUTO, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(straight), weights(resumed))
    assert "was planned for" not in caplog.text

    longer = moq(tmp_path / "resumed", AUTO, max_steps=40, **settings)
    longer.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-5"))
    assert "was planned for a run of 16 optimizer steps, this one has 40; its deadline stays at step 12" in caplog.text
    bits = {log["step"]: log["moq/mean_bits"] for log in longer.state.log_history if "moq/mean_bits" in log}
    assert [bits[6], bits[10]] == [over_the_model(now, longer.model) for now in (4, 3)]


def test_a_schedule_that_is_over_resumes_in_a_run_of_any_length(tmp_path: Path) -> None:
    trained(moq(tmp_path, AUTO, save_strategy="steps", save_steps=3))
    # Every block is at 3 bits after step 10. Of 13 steps the deadline would be step 9, of 4 too early for three drops.
    for step, steps in ((12, 13), (15, 40), (9, 10), (9, 12)):
        resumed = moq(tmp_path / "out", AUTO, max_steps=steps)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.moq.controller.has_arrived and resumed.state.global_step == steps
        assert resumed.moq.controller.history[-1].step == 10
    for step, steps in ((3, 4), (6, 9)):
        with pytest.raises(
            MoQError,
            match=rf"planned for 16 .* after {step} of them it is not over: .* after step 10, but "
            rf"this run ends after step {steps}. Resume with 10 steps or more",
        ):
            moq(tmp_path / "out", AUTO, max_steps=steps).train(
                resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}")
            )


class Reporter(TrainerCallback):
    """Stands where TensorBoard and W&B stand: before the callbacks that the user gave."""

    def __init__(self) -> None:
        self.logs: dict[int, dict[str, Any]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs[state.global_step] = dict(logs)


def test_every_scalar_reaches_the_reporters_and_the_history(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = moq(tmp_path, BLEND, logging_steps=5)
    trainer.callback_handler.callbacks.insert(1, reporter)
    trainer.train()
    blocks = ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler.dense"]
    always = {"moq/mean_bits", "moq/quantized_share", "moq/size_mb"} | {f"moq/blend/{block}" for block in blocks}
    at_switch = {f"moq/{kind}/{block}" for kind in ("bits", "period") for block in blocks}
    history = {log["step"]: log for log in trainer.state.log_history if "loss" in log}
    for logs in (reporter.logs, history):
        names = {step: {name for name in log if name.startswith("moq/")} for step, log in logs.items()}
        assert names == {s: always | at_switch if s in (2, 4, 6, 10) else always for s in (2, 4, 5, 6, 10, 15)}
        assert logs[5]["moq/blend/bert.pooler.dense"] == 0.75 and logs[15]["moq/blend/bert.pooler.dense"] == 0
        assert logs[6]["moq/period/bert.encoder.layer.1"] == 8


def test_tensorboard_has_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trained(moq(tmp_path, report_to="tensorboard", logging_steps=5))
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    series = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    bits = [(2, 6), (4, 5), (5, 5), (6, 4), (10, 3), (15, 3)]
    assert series["train/moq/mean_bits"] == [
        (step, pytest.approx(over_the_model(now, trainer.model))) for step, now in bits
    ]
    assert series["train/moq/bits/bert.pooler.dense"] == [(2, 6), (4, 5), (6, 4), (10, 3)]
    assert series["train/moq/period/bert.encoder.layer.0"] == [(2, 2), (4, 4), (6, 8), (10, 16)]
    assert len(series["train/moq/size_mb"]) == 6


@pytest.mark.parametrize(
    "keys, per_layer",
    [
        ({"quantize_groups": 4}, lambda rows, columns: 4),
        ({"quantize_groups": "per_channel"}, lambda rows, columns: rows),
        ({"quantize_group_size": 8}, lambda rows, columns: rows * columns // 8),
    ],
)
def test_the_size_counts_bits_and_scales(keys: Any, per_layer: Any, tiny_bert: Any) -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_schedule": {"schedule_offset": 1}} | keys
    everything = sum(p.numel() for p in tiny_bert.parameters())
    controller = MoQController(tiny_bert, MoQCallback(config).config)
    assert controller.sizes.mb == controller.sizes.float_mb == everything * 4 / 1e6
    controller.step()
    layers = quant_layers(tiny_bert).values()
    quantized = sum(layer.weight.numel() for layer in layers)
    scales = sum(per_layer(*layer.weight.shape) for layer in layers)
    exact = (everything - quantized) * 4 + quantized * 4 / 8 + scales * 4
    assert controller.sizes.mb == pytest.approx(exact / 1e6, rel=1e-12)


def test_the_outcome_names_the_blocks() -> None:
    config = {
        "quantize_bits": {"start_bits": 4, "target_bits": 3},
        "quantize_schedule": {"quantize_period": 5, "schedule_offset": 0},
    }
    history = [Switch(5, name, 4, 3, 10, 1, None) for name in "ab"] + [Switch(9, "c", 32, 4, 10, 1, None)]
    assert outcome(plan(config, 20), history, 12).splitlines() == [
        "after 12 optimizer steps; planned: 3 bits after step 5",
        "  3 bits, since step 5: 2 blocks: a, b",
        "  4 bits, not at 3, since step 9: c",
    ]


def test_the_saved_state_has_the_whole_history(tmp_path: Path) -> None:
    trainer = trained(stock(tmp_path))
    trainer.save_state()
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"]["MoQCallback"]["attributes"]["saved"]
    assert [switch[0] for switch in saved["history"]] == [2] * 3 + [4] * 3 + [6] * 3 + [10] * 3
    page = write_report(tmp_path).read_text()
    assert f"<dd>{over_the_model(3, trainer.model):.2f}</dd>" in page and "<dd>6 to 3 bits</dd>" in page
    assert saved["float_size_mb"] == sum(p.numel() for p in trainer.model.parameters()) * 4 / 1e6
