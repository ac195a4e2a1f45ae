"""Mixture-of-Quantization for Hugging Face Trainer: fine-tuning whose weights step down to 8, 4 or 2 bits."""

from .callback import MoQCallback
from .checkpoint import verify_quantized
from .config import MoQConfig, MoQConfigError, MoQError, __version__
from .delivery import save_quantized
from .eigen import block_eigenvalues
from .packed import load_packed
from .quant_linear import QuantLinear, dequantize_model, quantize_model
from .resume import last_checkpoint
from .schedule import PrecisionSchedule, plan
from .trainer import MoQTrainer

__all__ = [
    "MoQCallback",
    "MoQConfig",
    "MoQConfigError",
    "MoQError",
    "MoQTrainer",
    "PrecisionSchedule",
    "QuantLinear",
    "__version__",
    "block_eigenvalues",
    "dequantize_model",
    "last_checkpoint",
    "load_packed",
    "plan",
    "quantize_model",
    "save_quantized",
    "verify_quantized",
]
