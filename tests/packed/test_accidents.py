"""Deliveries that are killed, interrupted, out of room or not alone leave a whole model that says what it is."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import transformers as hf
from repo import ROOT
from small_files import files_of
from tiny_runs import arguments, moq, new_model, rows, stock

from moq_hf import MoQCallback, last_checkpoint, quantize_model, save_quantized, verify_quantized
from moq_hf.packed.load_check import ReferenceOutputs

OLD = {"quantize_bits": {"target_bits": 2}}
NEW = {"quantize_bits": {"target_bits": 4}}
IDS = {"input_ids": torch.arange(5, 26).view(3, 7)}


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an earlier run with a checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("old")
    stock(folder, OLD, **SAVING).train()
    return folder


def bits_in(folder: Path) -> int:
    return verify_quantized(folder).layers["bert.pooler.dense"].bits


def killed_in_its_proof(folder: str) -> None:
    torch.set_num_threads(1)
    ReferenceOutputs.prove = lambda self, path, rounded: os.kill(os.getpid(), signal.SIGKILL)
    stock(Path(folder), NEW, max_steps=2, save_strategy="steps", save_steps=2).train()


@pytest.mark.parametrize("before", [False, True], ids=["new folder", "older delivery"])
def test_a_run_that_is_killed_in_its_proof_has_delivered(before: bool, old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    if before:
        shutil.copytree(old / "quantized", folder)
    process = programs.warm().Process(target=killed_in_its_proof, args=(str(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert bits_in(folder) == 4
    found = verify_quantized(folder)
    assert found.proof is None and found.summary().startswith("Not verified: nothing was compared")
    # Not the older model's, which says that it was verified.
    assert not (folder / "README.md").exists()
    resumed = stock(tmp_path, NEW, max_steps=2)
    loaded = hf.BertForSequenceClassification.from_pretrained(folder).eval()
    resumed.train(resume_from_checkpoint=True)
    with torch.no_grad():
        assert torch.equal(loaded(**IDS).logits, resumed.model.eval()(**IDS).logits)
    assert "Verified" in (folder / "README.md").read_text(encoding="utf-8")
    assert verify_quantized(folder, resumed.model).proof.agrees


def test_an_interrupt_while_delivering_goes_through_and_leaves_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = stock(tmp_path, NEW, max_steps=2)
    folder = tmp_path / "quantized"
    load, generator = ReferenceOutputs._load, torch.get_rng_state()

    def interrupt(self: ReferenceOutputs, path: Path) -> Any:
        load(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(ReferenceOutputs, "_load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not torch.equal(generator, torch.get_rng_state()) and trainer.model.training
    assert bits_in(folder) == 4 and verify_quantized(folder, trainer.model).proof is None
    assert not list(tmp_path.rglob("*.writing"))
    monkeypatch.undo()
    save_quantized(trainer.model, folder, inputs=IDS)
    assert verify_quantized(folder).proof.agrees


def test_a_second_run_in_a_folder_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(ROOT / "examples" / "demo" / "model")
    config = hf.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    callback = MoQCallback(OLD)
    first = hf.Trainer(
        hf.GPT2LMHeadModel(config),
        arguments(tmp_path / "run", max_steps=2),
        train_dataset=texts,
        processing_class=tokenizer,
        callbacks=[callback],
    )
    with files_of("5KB"):
        first.train()
    folder = tmp_path / "run" / "quantized"
    assert {"tokenizer.json", "generation_config.json", "model.safetensors.index.json"} <= set(os.listdir(folder))
    (folder / "notes.txt").write_text("mine")
    (folder / "extra").mkdir()
    for place in ("run", "alone"):
        stock(tmp_path / place, NEW, max_steps=2).train()
    alone = {*os.listdir(tmp_path / "alone" / "quantized"), "notes.txt", "extra"}
    assert set(os.listdir(folder)) == alone
    assert "GPT2" not in (folder / "README.md").read_text(encoding="utf-8")


def save_many_times(folder: str, bits: int, start: Any) -> None:
    torch.set_num_threads(1)
    model = quantize_model(new_model(), {"quantize_bits": {"target_bits": bits}})
    start.wait(60)
    for _ in range(6):
        save_quantized(model, folder, inputs=IDS)
        # Each one's comparison was with its own files.
    (Path(folder).parent / f"{bits}.done").touch()


def test_two_processes_that_save_to_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    context = programs.warm()
    start = context.Barrier(2)
    pair = [
        context.Process(target=save_many_times, args=(str(tmp_path / "out"), bits, start), daemon=True)
        for bits in (2, 4)
    ]
    for process in pair:
        process.start()
    for process in pair:
        process.join(120)
    assert [process.exitcode for process in pair] == [0, 0]
    found = verify_quantized(tmp_path / "out")
    assert found.proof.agrees and found.state["layout"] == "packed"
    assert found.state["reason"] is None
    assert sorted(os.listdir(tmp_path)) == ["2.done", "4.done", "out"]


class Delete(hf.TrainerCallback):
    """Deletes what is best before the last step: all of it, or a file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps - 1:
            gone = Path(state.best_model_checkpoint, self.name)
            assert gone.exists()
            if self.name:
                gone.unlink()
            else:
                shutil.rmtree(gone)


@pytest.mark.parametrize("name", ["", "trainer_state.json"])
def test_a_best_checkpoint_that_was_deleted_costs_the_best_not_the_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = stock(tmp_path, NEW, [Delete(name)], **often, max_steps=5, load_best_model_at_end=True, learning_rate=0.3)
    trainer.train()
    assert "is not whole (" in caplog.text and "the model of the last step is delivered" in caplog.text
    assert bits_in(tmp_path / "quantized") == 4
    verify_quantized(tmp_path / "quantized", trainer.model)
    metrics = verify_quantized(tmp_path / "quantized").state["metrics"]
    assert metrics["eval_loss"] == trainer.state.log_history[-2]["eval_loss"] and trainer.state.best_global_step is None


class Killed(BaseException):
    """What no handler of the code under test may catch."""


# In the order in which the Trainer writes a checkpoint, its state last.
@pytest.mark.parametrize("act", ["save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"])
def test_half_a_checkpoint_over_one_of_an_earlier_run_is_noticed(act: str, old: Path, tmp_path: Path) -> None:
    shutil.copytree(old, tmp_path, dirs_exist_ok=True)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    trainer = moq(tmp_path, OLD, learning_rate=0.5, **SAVING)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    setattr(trainer, act, killed)
    with pytest.raises(Killed):
        trainer.train()
    assert last_checkpoint(tmp_path) is None


def test_a_state_without_room_costs_the_report_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Any, path: str) -> None:
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(hf.TrainerState, "save_to_json", full)
    moq(tmp_path, NEW, max_steps=2).train()
    assert bits_in(tmp_path / "quantized") == 4
    assert "moq-hf report will not find this run: [Errno 28] No space left" in caplog.text
    assert "nothing is delivered" not in caplog.text


@pytest.mark.parametrize(
    ("make", "error"),
    [(stock, PermissionError(13, "Permission denied")), (moq, OSError(28, "No space left on device"))],
)
def test_a_folder_that_cannot_be_written_is_one_error_that_says_what_is_left(
    error: OSError,
    make: Any,
    old: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(old, tmp_path, dirs_exist_ok=True)
    before = verify_quantized(tmp_path / "quantized").state
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "moq_state.json" or self.name == ".moq_state.json":
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    caplog.clear()
    make(tmp_path, NEW, max_steps=2).train()
    told = [r.getMessage() for r in caplog.records if "nothing is delivered" in r.getMessage()]
    assert len(told) == 1 and str(error.strerror) in told[0]
    assert "save_quantized(trainer.model, FOLDER)" in told[0] and "moq-hf pack" in told[0]
    assert verify_quantized(tmp_path / "quantized").state == before
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert not list(tmp_path.rglob("*.writing"))
