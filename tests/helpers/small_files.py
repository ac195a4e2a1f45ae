"""Weight files of a few kilobytes; transformers begins a new one at 50 GB."""

import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from transformers import PreTrainedModel


def files_of(size: str) -> AbstractContextManager[Any]:
    """Models are saved in files of at most that size inside."""
    save = functools.partialmethod(PreTrainedModel.save_pretrained, max_shard_size=size)
    return mock.patch.object(PreTrainedModel, "save_pretrained", save)
