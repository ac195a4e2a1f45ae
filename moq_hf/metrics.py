"""What in a log is a metric: the one definition, for the model card, the report and the script."""

import re
import sys
from collections.abc import Mapping
from typing import Any

# What the Trainer logs beside the metrics of an evaluation; `_mm` is MNLI's second part.
_BESIDE = re.compile(
    r"^(epoch|step|total_flos)(_mm)?$"
    r"|(^|_)(runtime|samples|per_second|model_preparation_time)(_mm)?$"
)


def is_metric(name: str) -> bool:
    """Whether a name in a log is a metric's, not that of a time, a count or a place in training.

    >>> is_metric("eval_f1"), is_metric("lead_time")
    (True, True)
    >>> is_metric("eval_runtime"), is_metric("eval_samples_per_second"), is_metric("epoch")
    (False, False, False)
    """
    return not _BESIDE.search(name)


def metrics_in(logged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation: finite numbers, by their names without `eval_`.

    >>> metrics_in({"eval_f1": 0.91, "eval_runtime": 3.0, "eval_odd": float("nan"), "epoch": 3.0})
    {'f1': 0.91}
    """
    return {
        name.removeprefix("eval_"): value
        for name, value in logged.items()
        if is_metric(name)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        # NaN is not, and a whole number may be too large for a float.
        and abs(value) <= sys.float_info.max
    }
