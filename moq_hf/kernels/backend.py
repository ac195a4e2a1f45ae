"""Who computes: the one place that picks a path."""

import torch

from .. import triton_quant
from ..config import MoQConfig


def kernels_wanted(config: MoQConfig, device: torch.device) -> bool:
    """Whether the Triton kernels quantize weights on `device`: unless the config forbids it, where they can run."""
    return config.kernel is not False and triton_quant.available(device)
