"""GLUE's metrics of the outputs of a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MoQError

TASKS = {
    "cola": ("matthews_correlation",),
    "mnli": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
    "stsb": ("pearson", "spearmanr"),
    "wnli": ("accuracy",),
}


def metrics_of(outputs: Sequence[Tensor], labels: Sequence[float], task: str | None) -> dict[str, float]:
    """The metrics of a classifier's outputs.

    Args:
        outputs: Logits `[examples, classes]` of each batch, float; one column is a score.
        labels: Class ids, or scores.
        task: GLUE's name; None is accuracy, or correlations for scores.

    Raises:
        MoQError: The labels or the task do not fit the number of outputs; scipy or scikit-learn is missing.

    >>> metrics_of([torch.tensor([[2.0, 1.0], [0.0, 3.0]])], [0, 0], "sst2")
    {'accuracy': 0.5}
    """
    logits = torch.cat(list(outputs)).numpy()
    classes = logits.shape[1]
    wanted = TASKS[task] if task is not None else TASKS["stsb" if classes == 1 else "sst2"]
    _check(labels, classes, wanted, task)
    try:
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
    except ImportError as error:
        raise MoQError(f"{error.name} is not installed: pip install 'moq_hf[glue]'") from None

    predicted = logits[:, 0] if classes == 1 else logits.argmax(1)
    functions: dict[str, Any] = {
        "accuracy": lambda: accuracy_score(labels, predicted),
        "f1": lambda: f1_score(labels, predicted),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predicted),
        "pearson": lambda: pearsonr(labels, predicted)[0],
        "spearmanr": lambda: spearmanr(labels, predicted)[0],
    }
    return {name: float(functions[name]()) for name in wanted}


def _check(labels: Sequence[float], classes: int, wanted: Sequence[str], task: str | None) -> None:
    single = classes == 1
    if not single and any(label != int(label) for label in labels):
        raise MoQError(f"labels must be class ids for a model with {classes} outputs")
    if single != (wanted[0] == "pearson") or (classes > 2 and {"f1", "matthews_correlation"}.intersection(wanted)):
        raise MoQError(f"the task {task} does not fit a model with {classes} outputs")
    if not single and not all(0 <= label < classes for label in labels):
        raise MoQError(f"labels must be 0 to {classes - 1} for a model with {classes} outputs")
