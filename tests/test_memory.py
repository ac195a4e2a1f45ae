"""What `moq-hf plan` says of memory is what a run holds."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from repo import ROOT
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from moq_hf import MoQCallback, cli
from moq_hf.memory import memory_of

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
CONFIG = {
    "quantize_bits": {"start_bits": 4, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
    "quantize_groups": "per_channel",
    "quantize_embeddings": 8,
    "prove": False,
}
DATA = [{"input_ids": [1, 2, 3, 4], "labels": 0}, {"input_ids": [4, 5, 6, 7], "labels": 1}] * 4


def model() -> Any:
    return BertForSequenceClassification(BertConfig(vocab_size=500, max_position_embeddings=32, **SIZES))


def peak_of(run: Any) -> int:
    """The most bytes of tensors that a run holds at once beyond those that are there when it begins."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_the_plan_is_what_training_and_evaluation_hold(tmp_path: Path) -> None:
    """With accumulation, so that gradients are there while the pass holds its quantized weights."""
    args = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = MoQCallback(CONFIG)
    trainer = Trainer(model(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[callback])
    peak = peak_of(trainer.train)
    assert callback.controller is not None
    planned = memory_of(callback.controller)
    # Activations of four tokens come on top.
    measured = planned["weights"] + peak
    assert planned["training, without activations"] < measured < 1.03 * planned["training, without activations"]
    # One copy is held for all batches.
    evaluated = peak_of(trainer.evaluate)
    assert planned["quantized weights of a pass"] < evaluated < 1.2 * planned["quantized weights of a pass"]


def test_the_command_plans_a_model_that_it_does_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert cli.main(["plan", "configs/moq.json", "--max_steps", "345", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in printed.splitlines() if line.strip()}
    assert rows["weights"] == "2.5" and rows["optimizer (two numbers a weight, as AdamW)"] == "4.9"
    assert "teacher" not in rows
    follows = tmp_path / "moq.json"
    follows.write_text(json.dumps({**CONFIG, "distillation": {"teacher": "somebody/teacher"}}))
    assert cli.main(["plan", str(follows), "--max_steps", "345", "--model", str(tmp_path)]) == 0
    assert "teacher" in capsys.readouterr().out
    assert cli.main(["plan", "configs/moq.json", "--max_steps", "345", "--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_config_without_a_class_is_planned_as_its_base_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = ROOT / "examples" / "demo" / "model"
    assert cli.main(["plan", "w4", "--max_steps", "345", "--model", str(demo)]) == 0
    told = capsys.readouterr().out
    assert "config.json names no architectures: planned as BertModel, without the head of a task\n13 linear" in told
    # A type without a base model.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "trocr"}))
    assert cli.main(["plan", "w4", "--max_steps", "345", "--model", str(tmp_path)]) == 2
    assert "config.json names no architectures: add the model's class" in capsys.readouterr().err
