"""What most programs import, for `programs` to fork from."""

import accelerate
import datasets
import evaluate
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
    "datasets",
    "evaluate",
    "moq_hf",
    "pytest",
    "torch",
]
