"""Times of several functions that take turns."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def seconds(run: Callable[[], Any]) -> float:
    """Of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(
    runs: dict[str, Callable[[], Any]], repeats: int, timed: Callable[[Callable[[], Any]], float] = seconds
) -> dict[str, Any]:
    """Median seconds of each, one run of each in turn; the reason instead for what cannot run."""
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            for _ in range(3):
                run()
        except Exception as error:
            # Others' packages fail in their own ways where they do not fit the machine.
            failed[name] = f"not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    times: dict[str, list[float]] = {name: [] for name in runs if name not in failed}
    for _ in range(repeats):
        for name, measured in times.items():
            measured.append(timed(runs[name]))
    return {name: statistics.median(measured) for name, measured in times.items()} | failed


def encoder_weights(hidden: int, layers: int, device: torch.device) -> list[Tensor]:
    """Random weights shaped as the linear layers of BERT's encoder."""
    shapes = [(hidden, hidden)] * 4 + [(4 * hidden, hidden), (hidden, 4 * hidden)]
    return [torch.randn(shape, device=device) * 0.02 for shape in shapes * layers]
