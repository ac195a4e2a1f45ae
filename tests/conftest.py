"""Fixtures and settings that all tests share.

Libraries are imported where they are needed: the process that hands out the tests needs none of them.
"""

import gc
import os
import sys

# Read by huggingface_hub when it is imported: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Sums depend on how work is split, in fixtures that are made before a test begins too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import BertForSequenceClassification

# Time is no property of the code on a busy machine.
settings.register_profile("moq_hf", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moq_hf")

frozen_modules = 0


def pytest_collection() -> None:
    # It finds nothing among what is being imported, and looks through all of it many times.
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    freeze()


def freeze() -> None:
    """Where modules were imported, they stay: collections need not walk over a million objects again and again."""
    global frozen_modules
    if len(sys.modules) > frozen_modules + 50:
        gc.collect()
        gc.freeze()
        frozen_modules = len(sys.modules)


def pytest_sessionfinish() -> None:
    # The libraries' own look for leaks at the end would take what is frozen for leaked.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """One thread, since sums depend on how work is split, and a known state of every generator."""
    import torch
    from transformers import set_seed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """The functions that operators become, which torch.onnx parses anew at each export: most of its time here."""
    from functools import cache
    from importlib.util import find_spec

    # The least environment has no exporters.
    if find_spec("onnxscript") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


@pytest.fixture(scope="session")
def stranger() -> Iterator[Any]:
    """A `model_zoo.Stranger`; one process for all tests, since it takes seconds to start."""
    from model_zoo import Stranger

    process = Stranger()
    yield process
    process.close()


@pytest.fixture
def tiny_bert() -> "BertForSequenceClassification":
    """Two classes; 12 linear layers in its 2 blocks, then pooler and classifier; dropout 0.1."""
    from transformers import BertConfig, BertForSequenceClassification

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
def tiny_batch() -> "dict[str, torch.Tensor]":
    """8 sentence pairs of 12 tokens, the last ones padded, with labels."""
    import torch

    generator = torch.Generator().manual_seed(0)
    attention_mask = torch.ones(8, 12, dtype=torch.long)
    attention_mask[4:, 9:] = 0
    return {
        "input_ids": torch.randint(5, 120, (8, 12), generator=generator) * attention_mask,
        "token_type_ids": (torch.arange(12) >= 6).long().expand(8, 12).contiguous(),
        "attention_mask": attention_mask,
        "labels": torch.tensor([0, 1] * 4),
    }


@pytest.fixture
def alone(tmp_path: "Path") -> Iterator[None]:
    """A process group of one process, as torchrun makes it too."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
