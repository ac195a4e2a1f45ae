"""What most programs import, for `programs` to fork from: all that a short run on BERT asks for."""
# ruff: noqa: F401 - importing is all that it does

import gc

import accelerate
import compressed_tensors.compressors
import datasets
import evaluate
import matplotlib.backends.backend_agg
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

# Collections in the forked processes would walk over it, and copy its pages by that.
gc.collect()
gc.freeze()
