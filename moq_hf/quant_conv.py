"""`QuantConv1d` and `QuantConv2d`: convolutions that compute with a quantized weight and train the float one.

A weight is quantized as a matrix with a row for each output channel, `[out_channels, in_channels / groups * kernel]`.
The input stays as it is: `activation_quantization` is of linear layers.
"""

from torch import Tensor, nn

from .quant_linear import CLASSES, QuantLayer, recompute_in_backward
from .seams.transformers import convolve


class QuantConv1d(QuantLayer, nn.Conv1d):
    """`nn.Conv1d` with a quantized weight in its forward pass; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.

    >>> from moq_hf import quantize_model
    >>> bits = {"start_bits": 4, "target_bits": 4}
    >>> model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(6, 2))
    >>> quantize_model(model, {"quantize_bits": bits, "quantize_convolutions": True})
    Sequential(
      (0): QuantConv1d(4, 8, kernel_size=(3,), stride=(1,), bits=4)
      (1): Linear(in_features=6, out_features=2, bias=True)
    )
    """

    kind = "conv"

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[examples, in_channels, length]`, or one example, with the layer's stride and padding."""
        with recompute_in_backward([self]):
            return convolve(self, input, self.quantized_weight())


class QuantConv2d(QuantLayer, nn.Conv2d):
    """`nn.Conv2d` with a quantized weight in its forward pass; not constructed, as `QuantLinear`.

    Attributes:
        moq: The layer's `LayerState`.
    """

    kind = "conv"

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[examples, in_channels, height, width]`, or one example, with the layer's stride and padding."""
        with recompute_in_backward([self]):
            return convolve(self, input, self.quantized_weight())


CLASSES[nn.Conv1d] = QuantConv1d
CLASSES[nn.Conv2d] = QuantConv2d
