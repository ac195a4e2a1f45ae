"""Short fine-tuning runs for `peers.py`: the same batches for every arm, results as lines."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from classifiers import classifier, config_of
from environment import environment
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import get_length_grouped_indices

Batch = dict[str, Tensor]


class Lines:
    """A file of JSON lines that a stopped benchmark goes on with.

    Args:
        path: Made with its folder if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All of them, those of other processes too."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def has(self, **key: Any) -> bool:
        """Whether there is a line with these values."""
        return any(all(line.get(name) == value for name, value in key.items()) for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, with what it was made by, at once."""
        line = {**line, **environment(load=round(os.getloadavg()[0], 1))}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Task:
    """Sentences and labels of a folder with `train.jsonl` and `validation.jsonl`, tokenized.

    Args:
        model: Folder or Hub name, for the tokenizer.
        data: The folder; each line has `sentence` and `label`.
        max_length: Tokens.
    """

    def __init__(self, model: str, data: Path, max_length: int = 128) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.train, self.validation = (
            self._read(data / f"{name}.jsonl", max_length) for name in ("train", "validation")
        )

    def batches(self, seed: int, size: int = 32) -> Iterator[Batch]:
        """One epoch, sentences of like length together, as with the Trainer's `group_by_length`."""
        lengths = [len(ids) for ids, _ in self.train]
        generator = torch.Generator().manual_seed(seed)
        order = get_length_grouped_indices(lengths, size, generator=generator)
        for start in range(0, len(order), size):
            yield self._batch([self.train[i] for i in order[start : start + size]])

    def accuracy(self, model: Callable[..., Any], limit: int | None = None) -> float:
        """Of the model as it stands, over the first `limit` rows of the validation set."""
        rows = sorted(self.validation[:limit], key=lambda row: len(row[0]))
        right = 0
        with torch.no_grad():
            for start in range(0, len(rows), 64):
                batch = self._batch(rows[start : start + 64])
                labels = batch.pop("labels")
                right += int((model(**batch).logits.argmax(-1) == labels).sum())
        return right / len(rows)

    def _read(self, path: Path, max_length: int) -> list[tuple[list[int], int]]:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        ids = self._tokenizer([row["sentence"] for row in rows], truncation=True, max_length=max_length)["input_ids"]
        return list(zip(ids, (row["label"] for row in rows), strict=True))

    def _batch(self, rows: list[tuple[list[int], int]]) -> Batch:
        padded = self._tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, return_tensors="pt")
        return {**padded, "labels": torch.tensor([label for _, label in rows])}


def fixed_batch(model: str | None, size: int, sequence: int) -> Batch:
    """Random tokens of the model's vocabulary, none of them padding; for timings."""
    vocabulary = config_of(model).vocab_size
    ids = torch.randint(vocabulary // 2, vocabulary, (size, sequence), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(size) % 2}


def new_model(name: str | None, seed: int) -> nn.Module:
    """A classifier with two classes and a new head, ready for training; the same for every arm with this seed.

    Args:
        name: Folder or Hub name; None is random weights.
        seed: Of the head.
    """
    torch.manual_seed(seed)
    model: nn.Module = classifier(name, num_labels=2)
    return model.train()


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The Trainer's default."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0, fused=True)


def train(
    model: nn.Module,
    task: Task,
    *,
    seed: int,
    lr: float,
    steps: int,
    max_grad_norm: float = 1.0,
    after_step: Callable[[], Any] | None = None,
    before_optimizer: Callable[[Batch], Any] | None = None,
    each: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Fine-tune in place, the learning rate falling linearly to 0.

    Args:
        model: In training mode.
        task: The data.
        seed: Of the batches and the dropout.
        lr: The first step's.
        steps: Of the optimizer, at most one epoch.
        max_grad_norm: 0 does not clip.
        after_step: Called after each optimizer step: where a method quantizes.
        before_optimizer: Called with the batch before each optimizer step.
        each: Called with the number of steps done; its time does not count.

    Returns:
        The losses, the gradients' norms, and the seconds of training. A loss that is NaN ends the run and is null.
    """
    optimizer = new_optimizer(model, lr)
    torch.manual_seed(seed)
    losses: list[float | None] = []
    norms: list[float] = []
    seconds = 0.0
    for step, batch in zip(range(steps), task.batches(seed), strict=False):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
        if before_optimizer is not None:
            before_optimizer(batch)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        if not math.isfinite(value) or not math.isfinite(norm):
            losses.append(None)
            break
        if after_step is not None:
            after_step()
        seconds += time.perf_counter() - begin
        losses.append(round(value, 5))
        norms.append(round(norm.item(), 3))
        if each is not None:
            each(step + 1)
    return {"losses": losses, "norms": norms, "train_seconds": round(seconds, 1)}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def digest(batches: Iterator[Batch]) -> str:
    """A short hash of what a run was trained on, to show that two had the same."""
    found = hashlib.sha256()
    for batch in batches:
        found.update(batch["input_ids"].numpy().tobytes())
    return found.hexdigest()[:12]
