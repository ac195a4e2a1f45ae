"""The libraries' progress bars and advice, switched off."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

from transformers.utils import logging as transformers_logging

from ..transformers_seams import modules_with_bars


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' progress bars and advice: what is written is said in one line."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    own = modules_with_bars()
    before = [vars(module)["tqdm"] for module in own]
    for module in own:
        vars(module)["tqdm"] = lambda items, *args, **kwargs: items
    cast(Any, transformers_logging).disable_progress_bar()
    transformers_logging.set_verbosity(max(level, logging.ERROR))
    try:
        yield
    finally:
        for module, bar in zip(own, before, strict=True):
            vars(module)["tqdm"] = bar
        transformers_logging.set_verbosity(level)
        if bars:
            cast(Any, transformers_logging).enable_progress_bar()
