"""The quantized embedding tables of a model."""

from torch import nn

from moq_hf.model.convert import quantized_layers
from moq_hf.quantized_weight import QuantizedWeight


def quant_embeddings(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The quantized embedding tables by their names, each once, in model order."""
    return {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer.module, nn.Embedding)}
