"""What moq_hf 0.1.0 wrote: its checkpoint resumes, its packed model loads. Both are in tests/golden."""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from repo import GOLDEN
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback

from moq_hf import MoQCallback, MoQConfig, dequantize_model, last_checkpoint, verify_quantized

RUN, PACKED = GOLDEN / "run_0_1", GOLDEN / "packed_0_1"
BLOCKS = ["bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler.dense"]


class AtFirstStep(TrainerCallback):
    """Keeps what a resumed run begins with."""

    state: dict[str, Any]
    floats: dict[str, torch.Tensor]
    quantized: dict[str, torch.Tensor]

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not hasattr(self, "state"):
            self.state = saved(self.trainer)
            self.floats = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            self.quantized = dequantize_model(copy.deepcopy(model)).state_dict()

    trainer: Trainer


def saved(trainer: Trainer) -> dict[str, Any]:
    """The callback's part of the checkpoint that the trainer would write now."""
    (callback,) = (found for found in trainer.callback_handler.callbacks if isinstance(found, MoQCallback))
    state: dict[str, Any] = json.loads(json.dumps(callback.state()))["attributes"]
    return state


def in_file() -> dict[str, Any]:
    document = json.loads((RUN / "checkpoint-7" / "trainer_state.json").read_text(encoding="utf-8"))
    state: dict[str, Any] = document["stateful_callbacks"]["MoQCallback"]["attributes"]
    return state


def on_grid(weight: torch.Tensor, letters: str) -> torch.Tensor:
    """A weight at 4 bits, in as many blocks of rows as there are letters: A is the ratio 1, B 0.95, and so on."""
    found = []
    for block, letter in zip(weight.chunk(len(letters)), letters, strict=True):
        scale = block.abs().max() * (1 - (ord(letter) - ord("A")) / 20) / 7
        found.append((block / scale).round().clamp(-7, 7) * scale)
    return torch.cat(found)


@pytest.mark.parametrize("stock", [True, False], ids=["Trainer", "MoQTrainer"])
def test_the_checkpoint_resumes(stock: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = AtFirstStep()
    trainer = first.trainer = golden_runs.trainer(tmp_path, golden_runs.RESUMED, stock=stock, callbacks=[first])
    checkpoint = last_checkpoint(RUN)
    assert checkpoint == str(RUN / "checkpoint-7")
    trainer.train(resume_from_checkpoint=checkpoint)
    assert "the run goes on" not in caplog.text

    before, begun, ended = in_file()["saved"], first.state["saved"], saved(trainer)["saved"]
    assert before["version"] == begun["version"] == ended["version"] == 2
    # Keys that came later have their defaults.
    assert {**begun, "moq_hf": "0.1.0"} == {
        **before,
        "config": MoQConfig.from_dict(before["config"]).to_dict(),
        "input_ranges": {},
    }
    assert begun["ratios"].keys() == {name.removesuffix(".weight") for name in first.quantized if is_quantized(name)}
    for name, letters in begun["ratios"].items():
        expected = on_grid(first.floats[f"{name}.weight"], letters)
        torch.testing.assert_close(first.quantized[f"{name}.weight"], expected, rtol=0, atol=1e-6)

    assert trainer.state.global_step == 12
    assert ended["schedule"] == {"blocks": {block: [3, 16, 10] for block in BLOCKS}, "steps": 12, "total_steps": 12}
    assert ended["history"] == before["history"] + [[10, block, 4, 3, 16, 1, None] for block in BLOCKS]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == list(range(1, 13))
    # 1,088 weights at 4 and then 3 bits, 842 other parameters at 32.
    assert [log["moq/mean_bits"] for log in logs[6:]] == [16.2155, 16.2155, 16.2155, 15.6518, 15.6518, 15.6518]
    assert [log["step"] for log in logs if f"moq/bits/{BLOCKS[0]}" in log] == [2, 4, 6, 10]
    if not stock:
        trainer.save_model(str(tmp_path / "quantized"))
    found = verify_quantized(tmp_path / "quantized", trainer.model)
    assert {layer.bits for layer in found.layers.values()} == {3} and found.layers.keys() == ended["ratios"].keys()


def is_quantized(name: str) -> bool:
    return name.endswith(".weight") and ("dense" in name or "self" in name)


def test_the_packed_model_is_whole() -> None:
    found = verify_quantized(PACKED)
    assert found.state["versions"]["moq_hf"] == "0.1.0" and found.state["format"] == 1
    kinds = Counter((layer.kind, layer.stored, layer.bits, layer.symmetric) for layer in found.layers.values())
    assert kinds == {
        ("linear", "packed", 4, False): 6,
        ("linear", "packed", 3, False): 7,
        ("embedding", "int8", 8, True): 3,
    }
    assert {layer.bits for name, layer in found.layers.items() if name.startswith(BLOCKS[0])} == {4}
    assert found.parameters == (5600, 6034)
    assert found.proof is not None and found.proof.agrees


def test_the_packed_model_answers_as_it_did() -> None:
    recorded = json.loads((GOLDEN / "packed_0_1.logits.json").read_text(encoding="utf-8"))
    ids, expected = torch.tensor(recorded["input_ids"]), torch.tensor(recorded["logits"])
    plain = AutoModelForSequenceClassification.from_pretrained(PACKED).eval()
    with torch.no_grad():
        logits = plain(input_ids=ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
