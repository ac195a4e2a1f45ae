"""The runs behind two of the artifacts in tests/golden: `python tests/helpers/golden_runs.py OUT` makes them.

They are what moq_hf 0.1.0 wrote, and no later version makes them anew: tests/test_golden.py shows that it reads them.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from moq_hf import MoQCallback, MoQTrainer

STEPS, SAVED_AT = 12, 7
# The deadline of 10 steps puts a drop before the checkpoint and two after it; all ratios are searched.
RESUMED: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_groups": 4,
    "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.9},
    "quantize_algo": {"scale": "mse", "scale_refresh": 3},
}
# Stopped when one block has dropped further than the other.
PACKED: dict[str, Any] = {
    "quantize_bits": {"start_bits": 5, "target_bits": 3},
    "quantize_group_size": 8,
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 2},
    "quantize_algo": {"q_type": "asymmetric", "scale": "mse", "scale_refresh": 3},
    "quantize_embeddings": 8,
    "eigenvalue": {"enabled": True, "num_samples": 8, "max_overhead": 1.0},
}


def model(hidden: int) -> BertForSequenceClassification:
    """Two layers, of clearly different curvature."""
    set_seed(7)
    shape = {"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * hidden}
    made = BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=16, num_labels=2, **shape))
    with torch.no_grad():
        for layer, factor in zip(made.bert.encoder.layer, (4.0, 1.0), strict=True):
            layer.intermediate.dense.weight.mul_(factor)
            layer.output.dense.weight.mul_(factor)
    return made


def rows() -> list[dict[str, Any]]:
    ids = torch.randint(5, 60, (40, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row[0] > 30)} for row in ids]


def trainer(
    folder: Path,
    config: dict[str, Any],
    *,
    hidden: int = 8,
    stock: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: Any,
) -> Trainer:
    given = {"max_steps": STEPS, "save_strategy": "no", **settings}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, optim="sgd", learning_rate=0.1, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, seed=3, **given,
    )  # fmt: skip
    if stock:
        return Trainer(model(hidden), arguments, train_dataset=rows(), callbacks=[MoQCallback(config), *callbacks])
    return MoQTrainer(model(hidden), arguments, train_dataset=rows(), moq_config=config, callbacks=list(callbacks))


def main(out: Path) -> None:
    """Write `run_0_1`, `packed_0_1` and `packed_0_1.logits.json`."""
    torch.set_num_threads(1)
    work = out / "work"
    trainer(work / "run", RESUMED, save_strategy="steps", save_steps=SAVED_AT).train()
    checkpoint = f"checkpoint-{SAVED_AT}"
    shutil.copytree(work / "run" / checkpoint, out / "run_0_1" / checkpoint)
    # A pickle of classes and paths, which resuming does not read.
    (out / "run_0_1" / checkpoint / "training_args.bin").unlink()

    made = trainer(work / "packed", PACKED, hidden=16, max_steps=15)
    made.train()
    (out / "packed_0_1").mkdir()
    # Without the model card.
    for name in ("config.json", "model.safetensors", "moq_state.json"):
        shutil.copy(work / "packed" / "quantized" / name, out / "packed_0_1" / name)
    ids = torch.stack([row["input_ids"] for row in rows()[:4]])
    with torch.no_grad():
        logits = made.model.eval()(input_ids=ids).logits
    recorded = {"input_ids": ids.tolist(), "logits": logits.tolist()}
    (out / "packed_0_1.logits.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    shutil.rmtree(work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
