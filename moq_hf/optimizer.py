"""The optimizer's memory of gradients, which belong to other weights once the precision has dropped."""

from typing import Any

from torch import Tensor

# Of Adam, AdamW, Adamax, Adafactor, Lion and SGD: at zero they are what they are before the first step. Zeros keep the
# layout that a checkpoint of sharded state needs.
_ZERO_AT_FIRST = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"}
    | {"momentum_buffer"}
)


def reset(optimizer: Any) -> None:
    """Let the next step of an optimizer be as its first one; learning rates and the like stay.

    Args:
        optimizer: A `torch.optim.Optimizer`, or what wraps one and shows its `state`.
    """
    for parameter, state in optimizer.state.items():
        if _ZERO_AT_FIRST.issuperset(state):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif value is not None:
                    state[name] = 0
        else:
            # As every optimizer of torch begins.
            optimizer.state[parameter] = {}
