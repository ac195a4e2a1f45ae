"""What most programs import, for `programs` to fork from: all that a short run on BERT asks for."""

import gc

import accelerate
import compressed_tensors.compressors
import datasets
import evaluate
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure
import pytest
import torch.distributed.run
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import moq_hf

__all__ = [
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "BertForSequenceClassification",
    "Trainer",
    "TrainingArguments",
    "accelerate",
    "compressed_tensors",
    "datasets",
    "evaluate",
    "matplotlib",
    "moq_hf",
    "pytest",
    "torch",
]

# Collections in the forked processes would walk over it, and copy its pages by that.
gc.collect()
gc.freeze()
