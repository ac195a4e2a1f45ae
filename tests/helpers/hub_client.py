"""Run by test_hub.py in a process of its own, whose `HF_ENDPOINT` is a stand-in for the Hub.

    python hub_client.py FOLDER

Each run goes to a repository and a folder of its own name; what the user would read of failures is printed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tiny_runs import CONFIG, moq, stock
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from moq_hf import MoQTrainer, verify_quantized

IDS = torch.arange(5, 26).view(3, 7)
STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def trained(folder: Path, **settings: Any) -> MoQTrainer:
    settings = {"push_to_hub": True, "hub_model_id": f"tester/{folder.name}", "hub_always_push": True} | settings
    trainer = moq(folder, CONFIG, save_steps=5, max_steps=11, **settings)
    trainer.train()
    return trainer


def push(folder: Path, strategy: str) -> None:
    """A MoQTrainer's run with an upload, and its model back from the Hub."""
    trainer = trained(folder, hub_strategy=strategy, save_strategy="steps")
    trainer.push_to_hub(dataset_tags="nyu-mll/glue", dataset="GLUE MRPC", dataset_args="mrpc")
    loaded = AutoModelForSequenceClassification.from_pretrained(f"tester/{folder.name}").eval()
    assert type(loaded) is BertForSequenceClassification
    assert torch.equal(loaded(IDS).logits, trainer.model.eval()(IDS).logits)
    verify_quantized(folder, trainer.model)


def push_stock(folder: Path) -> None:
    """A stock Trainer's run: its float weights, and the packed model in a folder beside them."""
    trainer = stock(folder, CONFIG, max_steps=11, push_to_hub=True, hub_model_id=f"tester/{folder.name}")
    trainer.train()
    trainer.push_to_hub()
    evaluated = trainer.model.eval()(IDS).logits
    loaded = AutoModelForSequenceClassification.from_pretrained(f"tester/{folder.name}", subfolder="quantized").eval()
    assert torch.equal(loaded(IDS).logits, evaluated)
    verify_quantized(folder / "quantized", trainer.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for name in STRATEGIES:
        push(root / name, name)
    push_stock(root / "stock")
