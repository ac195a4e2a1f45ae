"""Run by test_hub.py in a process of its own, whose `HF_ENDPOINT` is a stand-in for the Hub.

    python hub_client.py FOLDER

Each run goes to a repository and a folder of its own name; what the user would read of failures is printed.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_session, snapshot_download
from tiny_runs import CONFIG, arguments, moq, new_model, stock
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, Trainer

from moq_hf import MoQConfig, MoQTrainer, verify_quantized

IDS = torch.arange(5, 26).view(3, 7)
STRATEGIES = ("end", "checkpoint", "all_checkpoints")


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


def push_loaded(folder: Path) -> None:
    """A model that was loaded with a MoQConfig: by itself, by saving it, and by a stock Trainer."""
    new_model().save_pretrained(folder / "base")
    config = {"quantization_config": MoQConfig(bits=4)}
    model: Any = BertForSequenceClassification.from_pretrained(folder / "base", **config)
    evaluated = model(IDS).logits
    model.push_to_hub("tester/loaded")
    model.save_pretrained(folder / "saved", push_to_hub=True, repo_id="tester/saved")
    settings = arguments(folder / "trained", push_to_hub=True, hub_model_id="tester/trained")
    Trainer(model, settings).push_to_hub()
    for name in ("loaded", "saved", "trained"):
        loaded = BertForSequenceClassification.from_pretrained(f"tester/{name}").eval()
        assert torch.equal(loaded(IDS).logits, evaluated), name


def fault(number: int, kind: str) -> dict[str, Any]:
    """Have the request of that number fail from now on; what became of the one before."""
    answer: dict[str, Any] = get_session().post(f"{os.environ['HF_ENDPOINT']}/fault", json=[number, kind]).json()
    return answer


def push_with_faults(folder: Path, kinds: Sequence[str]) -> None:
    """Pushes of one model over another, each with a request that fails: what was raised, and what is here and there."""
    # The library waits for ever, and before it tries again.
    get_session().timeout = 0.3
    time.sleep = lambda seconds: None
    settings: dict[str, Any] = {"max_steps": 1, "push_to_hub": True, "hub_model_id": f"tester/{folder.name}"}
    old, new = (moq(folder, {"quantize_bits": {"target_bits": bits}, "prove": False}, **settings) for bits in (2, 4))
    for trainer in (old, new):
        trainer.train()
    for kind in kinds:
        old.push_to_hub()
        for number in range(1, 10):
            fault(number, kind)
            raised = None
            try:
                new.push_to_hub()
            except Exception as error:
                raised = type(error).__name__
            failed = fault(0, "")["failed"]
            verify_quantized(folder, new.model)
            verify_quantized(folder / "quantized", new.model)
            there = snapshot_download(f"tester/{folder.name}", local_dir=folder.parent / "there" / f"{kind}-{number}")
            bits = verify_quantized(there).layers["bert.pooler.dense"].bits
            print("fault", json.dumps({"kind": kind, "path": failed, "raised": raised, "bits": bits}))
            if not failed:
                break


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for name in STRATEGIES:
        push(root / name, name)
    push_stock(root / "stock")
    push_loaded(root / "loaded")
    push_with_faults(root / "faults", ("500", "dropped"))
