"""A kernel in plain PyTorch for vLLM on the CPU, for the widths that it has CUDA kernels for alone.

Config, schemes, fused layers and loading stay vLLM's own: what answers rightly with it is laid out as vLLM reads it.
"""

from typing import Any

import torch
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.platforms.interface import PlatformEnum


def unpacked(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """Codes `[..., length]` of dense words of 32 bits."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    wide = torch.cat([wide, torch.zeros_like(wide[..., :1])], -1)
    start = torch.arange(length) * bits
    both = wide[..., start // 32] | (wide[..., start // 32 + 1] << 32)
    return (both >> (start % 32)) & ((1 << bits) - 1)


class TorchKernel(MPLinearKernel):  # type: ignore[misc]
    """Unpacks the weight once, to float32."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Of no GPU."""
        return -1

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Everything."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpack the weight."""
        config = self.config
        bits, columns = config.weight_type.size_bits, config.partition_weight_shape[0]
        codes = unpacked(getattr(layer, self.w_q_name).data, bits, columns)
        scale = getattr(layer, self.w_s_name).data.float()
        if config.zero_points:
            zero = unpacked(getattr(layer, self.w_zp_name).data.T.contiguous(), bits, len(codes)).T
            codes = codes - zero.repeat_interleave(columns // zero.shape[1], 1)
        else:
            codes = codes - (1 << (bits - 1))
        layer.torch_weight = codes.float() * scale.repeat_interleave(columns // scale.shape[1], 1)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product in float32."""
        exact = torch.nn.functional.linear(x.float(), layer.torch_weight, None if bias is None else bias.float())
        return exact.to(x.dtype)


def install() -> None:
    """Put it before vLLM's own kernels for the CPU."""
    _POSSIBLE_KERNELS[PlatformEnum.CPU].insert(0, TorchKernel)
