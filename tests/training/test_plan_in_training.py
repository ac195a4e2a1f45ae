"""What a run tells of its schedule: the plan before, bits, sizes and blends during, one closing block after."""

import html
import importlib
import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import (
    CONFIG,
    Stop,
    arguments,
    assert_same,
    callback_of,
    moq,
    new_model,
    over_the_model,
    rows,
    stock,
    trained,
    trainer_state,
    weights,
)
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, integration_utils

from moq_hf import MoQCallback, MoQError, verify_quantized
from moq_hf.cli import main

AUTO = {**CONFIG, "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.75}}
BLEND = {**CONFIG, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.25}}
BLOCKS = ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler.dense"]
PLAN = """\
moq_hf: 13 linear layers in 3 blocks go from 6 to 3 bits; quantized: 72.1 % of the model's 6,034 parameters; left in \
float: classifier, and the embedding tables, which are 20.7 % of the parameters (embeddings=8 quantizes them)
moq_hf plan: 16 optimizer steps, 6 to 3 bits, offset 2, period 2, no deadline
block        6 bits  5 bits  4 bits  3 bits  at target
every block       2       4       6      10         10
"""
# What is printed at the end, beside the Trainer's own figures.
CLOSING = """\
moq_hf: All 3 blocks reached 3 bits at step 10, as planned. Verified: loaded with plain transformers, the saved model \
gives identical outputs (4 examples). 0.0171 MB, float 0.0241.
Load it: BertForSequenceClassification.from_pretrained("{folder}/quantized")
Report: moq-hf report {folder}
"""


@pytest.mark.parametrize("make", [stock, moq])
def test_the_plan_is_told_once_before_the_first_step_and_one_block_closes_the_run(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(capsys.readouterr().out)

    trained(make(tmp_path, callbacks=[Watch()]))
    assert seen[0] == PLAN
    assert "moq_hf" not in "".join(seen[1:])
    lines = [line for line in capsys.readouterr().out.splitlines(keepends=True) if not line.startswith("{")]
    assert "".join(lines) == CLOSING.format(folder=tmp_path)
    # The commands of the block work.
    assert hf.BertForSequenceClassification.from_pretrained(tmp_path / "quantized")
    assert main(["report", str(tmp_path)]) == 0


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A MoQTrainer whose run had a deadline and a checkpoint of each step, and what it said."""
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()) as said:
        trainer = trained(moq(tmp_path_factory.mktemp("auto"), AUTO, save_strategy="steps", save_steps=1))
    return trainer, said.getvalue()


def test_auto_meets_its_deadline(auto: Any) -> None:
    trainer, told = auto
    assert "offset 2, period auto, deadline at step 12" in told
    drops = {log["step"]: log["moq/mean_bits"] for log in trainer.state.log_history if "moq/mean_bits" in log}
    assert drops == {step: over_the_model(bits, trainer.model) for step, bits in {2: 6, 4: 5, 6: 4, 10: 3}.items()}


def test_a_resumed_run_keeps_its_deadline(auto: Any, tmp_path: Path) -> None:
    whole, _ = auto
    checkpoint = f"{whole.args.output_dir}/checkpoint-5"
    resumed = moq(tmp_path / "resumed", AUTO)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same(weights(whole), weights(resumed))

    longer = moq(tmp_path / "longer", AUTO, max_steps=40)
    longer.train(resume_from_checkpoint=checkpoint)
    bits = {log["step"]: log["moq/mean_bits"] for log in longer.state.log_history if "moq/mean_bits" in log}
    assert [bits[6], bits[10]] == [over_the_model(now, longer.model) for now in (4, 3)]


def test_a_schedule_that_is_over_resumes_in_a_run_of_any_length(auto: Any, tmp_path: Path) -> None:
    folder = auto[0].args.output_dir
    # Every block is at 3 bits after step 10. Of 13 steps the deadline would be step 9, of 4 too early for three drops.
    for step, steps in ((12, 13), (15, 40), (9, 10)):
        resumed = moq(tmp_path, AUTO, max_steps=steps)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
        assert resumed.moq.controller.has_arrived and resumed.state.global_step == steps
        assert resumed.moq.controller.history[-1].step == 10
    told = "planned for 16 .* after 6 of them it is not over: .* after step 10, but this run ends after step 9"
    with pytest.raises(MoQError, match=f"{told}. Resume with 10 steps or more"):
        moq(tmp_path, AUTO, max_steps=9).train(resume_from_checkpoint=f"{folder}/checkpoint-6")


def test_a_longer_run_is_told_whose_steps_its_shares_count(
    auto: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = "count the 16 steps that the checkpoint's run had, not the"
    for steps in (16, 40):
        moq(tmp_path, AUTO, max_steps=steps).train(resume_from_checkpoint=f"{auto[0].args.output_dir}/checkpoint-6")
        assert (told in caplog.text) == (steps == 40)
    assert f"{told} 40 of this one" in caplog.text


def test_a_preset_that_falls_and_a_late_offset_are_told_how_nothing_falls() -> None:
    with pytest.raises(MoQError, match="or the offset earlier; with start_bits 3 none fall"):
        MoQCallback("lm-w4", bits=3, offset=0.9)
    assert not MoQCallback("lm-w4", bits=3, start_bits=3, offset=0.9).config.falls


@pytest.mark.parametrize("deadline", [None, 0.5])
def test_an_offset_beyond_the_end_of_a_new_run_is_called_so(deadline: float | None, tmp_path: Path) -> None:
    callback = MoQCallback(bits=4, offset=90, deadline=deadline)
    with pytest.raises(MoQError, match="offset 90 is not before the end of training at 20 optimizer steps"):
        Trainer(new_model(), arguments(tmp_path, max_steps=20), train_dataset=rows(), callbacks=[callback]).train()


def is_loss(log: dict[str, Any]) -> bool:
    return "loss" in log


def is_drop(log: dict[str, Any]) -> bool:
    return "moq/bits" in log and "loss" not in log


class Screen(TrainerCallback):
    """What a callback of the user sees of each log."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})


class Reporter(TensorBoardCallback):
    """Stands where `report_to` puts reporters, before the callbacks that the user gave, and keeps what it gets."""

    made: "Reporter"

    def __init__(self) -> None:
        self.screen = Screen()
        type(self).made = self

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    def on_train_end(self, *args: Any, **kwargs: Any) -> None: ...

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.screen.on_log(*args, **kwargs)


@pytest.mark.parametrize("make", [stock, moq])
def test_every_reporter_and_callback_finds_the_bits_first(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    before, after = Screen(), Screen()
    trainer = make(tmp_path, BLEND, callbacks=[before], logging_steps=5, report_to="tensorboard")
    trainer.add_callback(after)
    trainer.train()
    assert callback_of(trainer) is trainer.callback_handler.callbacks[0]
    shown = ["moq/bits", "moq/mean_bits", "moq/blend"]
    screens = [Reporter.made.screen, before, after]
    losses, drops = ([[log for log in screen.logs if test(log)] for screen in screens] for test in (is_loss, is_drop))
    # With the loss, as often as `logging_steps` says and no more often; at a drop, an entry of its own before it.
    for own in losses:
        assert [log["step"] for log in own] == [5, 10, 15]
        assert all([name for name in log if name.startswith("moq/")] == shown == list(log)[1:4] for log in own)
    for own in drops:
        assert [(log["step"], log["moq/bits"]) for log in own] == [(2, 6), (4, 5), (6, 4), (10, 3)]
    # A reporter has the blocks too, the user's callbacks do not; the state of the Trainer has all.
    of_blocks = {f"moq/{kind}/{block}" for kind in ("bits", "period") for block in BLOCKS}
    assert all(of_blocks <= log.keys() and "moq/quantized_share" in log for log in drops[0])
    assert drops[0][2]["moq/period/bert.encoder.layer.1"] == 8
    assert all(list(log) == ["step", *shown, "epoch"] for own in drops[1:] for log in own)
    history = {log["step"]: log for log in trainer.state.log_history if "loss" in log}
    whole = {*shown, "moq/quantized_share", "moq/size_mb", *(f"moq/blend/{block}" for block in BLOCKS)}
    assert all({name for name in log if name.startswith("moq/")} == whole for log in history.values())
    assert history[5]["moq/blend/bert.pooler.dense"] == 0.75 and history[15]["moq/blend"] == 0


def test_a_drop_leaves_the_mean_of_the_loss_alone(tmp_path: Path) -> None:
    class Losses(hf.Trainer):
        losses: tuple[float, ...] = ()

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.losses += (float(loss),)
            return loss

    trainer = Losses(
        new_model(), arguments(tmp_path, logging_steps=8), train_dataset=rows(), callbacks=[MoQCallback(CONFIG)]
    )
    trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx([sum(trainer.losses[:8]) / 8, sum(trainer.losses[8:]) / 8])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stock Trainer after its run, with its events for TensorBoard and its state in its folder."""
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        trainer = trained(stock(folder, report_to="tensorboard", logging_steps=5))
    trainer.save_state()
    return trainer


def test_tensorboard_has_the_scalars(finished: Any) -> None:
    events = EventAccumulator(f"{finished.args.output_dir}/events").Reload()
    series = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert series["train/moq/bits"] == [(2, 6), (4, 5), (5, 5), (6, 4), (10, 3), (10, 3), (15, 3)]
    assert series["train/moq/bits/bert.pooler.dense"] == [(2, 6), (4, 5), (6, 4), (10, 3)]


def test_a_run_that_begins_quantized_logs_its_blocks_once(tmp_path: Path) -> None:
    config = {"quantize_bits": {"start_bits": 4, "target_bits": 4}, "quantize_schedule": {"schedule_offset": 0}}
    trainer = trained(stock(tmp_path, config))
    entries = [log for log in trainer.state.log_history if "moq/bits" in log]
    assert [(log["step"], log["moq/bits/bert.pooler.dense"]) for log in entries] == [(1, 4)]


def test_the_progress_bar_and_the_console_show_the_bits_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for disable_tqdm in (True, False):
        trained(stock(tmp_path, logging_steps=8, disable_tqdm=disable_tqdm))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'moq/bits'")]
        # What a drop alone logs is for reporters.
        assert len(lines) == 2 and lines[0].startswith("{'moq/bits': '4', 'moq/mean_bits': '11.81', 'loss': '")


def test_a_notebook_has_a_column_of_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display = ModuleType("IPython.display")
    shown: list[str] = []
    display.HTML = str
    display.display = lambda *args, **kwargs: SimpleNamespace(update=shown.append)
    package = ModuleType("IPython")
    package.display = display
    for name, module in (("IPython", package), ("IPython.display", display)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    notebook = importlib.import_module("transformers.utils.notebook")
    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", notebook.NotebookProgressCallback)
    trained(stock(tmp_path, logging_steps=5, eval_strategy="steps", eval_steps=5, disable_tqdm=False, max_steps=10))
    heads = ["Step", "moq/bits", "Training Loss", "Validation Loss", "Score"]
    assert re.findall("<th>(.*?)</th>", shown[-1]) == heads
    assert re.findall("<tr>\\s*<td>(.*?)</td>\\s*<td>(.*?)</td>", shown[-1]) == [("5", "5"), ("10", "3")]


def test_a_stock_trainer_says_that_it_saves_the_floats_of_a_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of transformers say it themselves: model/test_float_saves.py."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = new_model()

        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return self.inner(input_ids, labels=labels)

    settings = arguments(tmp_path, save_strategy="steps", save_steps=8)
    trainer = trained(Trainer(Own(), settings, train_dataset=rows(), callbacks=[MoQCallback(CONFIG)]))
    assert "float weights" not in capsys.readouterr().out
    trainer.train()
    trainer.save_model(str(tmp_path / "mine"))
    told = [line for line in capsys.readouterr().out.splitlines() if "float weights" in line]
    assert told == [
        f"moq_hf: {tmp_path / 'mine'} has the float weights, which training can go on with; the quantized model is in "
        f"{tmp_path / 'quantized'}"
    ]


def test_the_callback_says_where_the_run_is(tmp_path: Path) -> None:
    callback = MoQCallback(CONFIG)
    assert callback.bits == {} and callback.history == ()
    assert callback.mean_bits is callback.plan is callback.delivered is None
    trainer = trained(moq(tmp_path, {**CONFIG, "quantize_embeddings": 8}))
    callback = callback_of(trainer)
    assert callback.bits == dict.fromkeys(BLOCKS, 3) and callback.mean_bits == callback.controller.sizes.mean_bits < 12
    assert callback.plan.total_steps == 16 and [switch.bits for switch in callback.history[::3]] == [6, 5, 4, 3]
    delivered = callback.delivered
    assert delivered.path == tmp_path / "quantized" and delivered.proof.agrees is True
    assert delivered.bytes == (delivered.path / "model.safetensors").stat().st_size
    verify_quantized(delivered.path, trainer.model)


def test_a_run_of_no_step_and_a_removed_callback_are_told(tmp_path: Path) -> None:
    for make in (stock, moq):
        with pytest.raises(MoQError, match="no optimizer step: set num_train_epochs or max_steps"):
            make(tmp_path, max_steps=-1, num_train_epochs=0).train()
    trainer = moq(tmp_path)
    trainer.remove_callback(callback_of(trainer))
    for _ in range(2):
        with pytest.raises(MoQError, match="the MoQCallback of this MoQTrainer was removed"):
            trainer.train()


def test_a_resumed_run_says_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    trained(stock(tmp_path, callbacks=[Stop(5)], **settings))
    capsys.readouterr()
    stock(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    told = capsys.readouterr().out
    assert "moq_hf: the run goes on at step 5 of 16: 3 blocks at 5 bits; still to come: 4 bits at step 6, 3 " in told
    assert "moq_hf plan" not in told and "All 3 blocks reached 3 bits at step 10, as planned." in told


def test_right_words_for_every_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def ends(make: Any = stock, **more: Any) -> str:
        caplog.clear()
        trainer = trained(make(tmp_path, **more))
        assert trainer.state.log_history
        return capsys.readouterr().out

    assert "moq_hf: Verified: " in ends(callbacks=[Stop(5)])
    assert "training ended at step 5, before every block was at 3 bits: 3 blocks at 5 bits" in caplog.text
    assert "Verified" not in ends(callbacks=[Stop(1)])
    assert "before every block was at 3 bits: 3 blocks in float, so nothing is delivered" in caplog.text
    assert "as planned. Not verified: nothing was compared. 0.0171 MB" in ends(config={**CONFIG, "prove": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moq_hf.packed.load_check.ReferenceOutputs._load", lambda *args: new_model())
        told = ends()
    assert "as planned. Rounded floats, not packed. NOT what was evaluated, as the warning above says. 0.0284" in told
    assert "does not compute what was evaluated" in caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moq_hf.packed.save._Saving._check", lambda self: 1 / 0)
        told = ends()
    assert "Rounded floats, not packed. Not verified: load_state_dict alone loads it. 0.02" in told
    assert f'Load it: model.load_state_dict(load_file("{tmp_path}/quantized/model.safetensors"))' in told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moq_hf.callback.write_result", lambda *args, **more: 1 / 0)
        told = ends()
    assert "moq_hf: All 3 blocks reached 3 bits at step 10, as planned. Nothing is delivered.\n" in told
    assert "Load it" not in told
    assert "division by zero" in caplog.text


def test_the_saved_state_has_the_whole_history(finished: Any) -> None:
    folder = Path(finished.args.output_dir)
    state = json.loads((folder / "trainer_state.json").read_text())
    attributes = state["stateful_callbacks"]["MoQCallback"]["attributes"]
    saved = attributes["saved"]
    assert saved == trainer_state(finished) and attributes["saved_at"] == 16
    assert [switch[0] for switch in saved["history"]] == [2] * 3 + [4] * 3 + [6] * 3 + [10] * 3
    assert saved["float_size_mb"] == sum(p.numel() for p in finished.model.parameters()) * 4 / 1e6


def test_a_notebook_shows_config_plan_and_verification(finished: Any) -> None:
    callback = MoQCallback("w4", start_bits=6)
    shown = callback.config._repr_html_()
    assert json.loads(html.unescape(shown[5 : shown.index("</pre>")])) == callback.config.changed()
    assert shown.index("&quot;start_bits&quot;: 6") < shown.index("<summary>All keys") < shown.index("scale_refresh")
    callback = callback_of(finished)
    assert callback.plan._repr_html_() == f"<pre>{callback.plan}</pre>"
    page = verify_quantized(callback.delivered.path)._repr_html_()
    assert page.startswith(f"<p>{callback.delivered.summary}</p><details>") and "bert.pooler.dense" in page
