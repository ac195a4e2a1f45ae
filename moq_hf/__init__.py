"""Mixture-of-Quantization for Hugging Face Trainer: fine-tuning whose weights step down to 8, 4 or 2 bits."""

from .callback import MoQCallback
from .config import MoQConfig, MoQConfigError, MoQError
from .eigen import block_eigenvalues
from .packed import load_packed
from .quant_linear import QuantLinear, dequantize_model, quantize_model
from .schedule import PrecisionSchedule
from .trainer import MoQTrainer

__version__ = "0.1.0"
__all__ = [
    "MoQCallback",
    "MoQConfig",
    "MoQConfigError",
    "MoQError",
    "MoQTrainer",
    "PrecisionSchedule",
    "QuantLinear",
    "block_eigenvalues",
    "dequantize_model",
    "load_packed",
    "quantize_model",
]
