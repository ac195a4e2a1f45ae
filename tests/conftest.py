"""Fixtures and settings that all tests share."""

import gc
import os
import sys

# Read by huggingface_hub when it is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import BertConfig, BertForSequenceClassification, set_seed

from moq_hf.packed import card

# Time is no property of the code on a busy machine.
settings.register_profile("moq_hf", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moq_hf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    freeze()


def pytest_runtest_logfinish() -> None:
    freeze()


def freeze() -> None:
    """Where modules were imported, they stay: collections need not walk over a million objects again and again."""
    if len(sys.modules) > freeze.__dict__.get("modules", 0) + 50:
        gc.collect()
        gc.freeze()
        freeze.__dict__["modules"] = len(sys.modules)


def pytest_sessionfinish() -> None:
    # The libraries' own look for leaks at the end would take what is frozen for leaked.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """One thread, since sums depend on how work is split, and a known state of every generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[Any]:
    """Half of the time of so small a run would go into the picture in its model card; gives what draws it."""
    with pytest.MonkeyPatch.context() as patch:
        drawing = card._draw
        patch.setattr(card, "_draw", lambda path, layers: False)
        yield drawing


@pytest.fixture
def pictures(no_pictures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model cards have their picture."""
    monkeypatch.setattr(card, "_draw", no_pictures)


@pytest.fixture(scope="session")
def stranger() -> Iterator[Any]:
    """A `model_zoo.Stranger`; one process for all tests, since it takes seconds to start."""
    from model_zoo import Stranger

    process = Stranger()
    yield process
    process.close()


@pytest.fixture
def tiny_bert() -> BertForSequenceClassification:
    """Two classes; 12 linear layers in its 2 blocks, then pooler and classifier; dropout 0.1."""
    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


@pytest.fixture
def tiny_batch() -> dict[str, torch.Tensor]:
    """8 sentence pairs of 12 tokens, the last ones padded, with labels."""
    generator = torch.Generator().manual_seed(0)
    attention_mask = torch.ones(8, 12, dtype=torch.long)
    attention_mask[4:, 9:] = 0
    return {
        "input_ids": torch.randint(5, 120, (8, 12), generator=generator) * attention_mask,
        "token_type_ids": (torch.arange(12) >= 6).long().expand(8, 12).contiguous(),
        "attention_mask": attention_mask,
        "labels": torch.tensor([0, 1] * 4),
    }
