"""Mixture-of-Quantization for Hugging Face Trainer: fine-tuning whose weights step down to 8, 4 or 2 bits."""

from .callback import MoQCallback
from .config import MoQConfig
from .eigen import block_eigenvalues
from .errors import MoQConfigError, MoQError
from .model.convert import dequantize_model, quantize_model
from .packed.save import save_quantized
from .packed.verify import verify_quantized
from .plan import plan
from .quant_linear import QuantLinear
from .schedule import PrecisionSchedule
from .trainer import MoQTrainer
from .training.checkpoints import last_checkpoint
from .version import __version__

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
    "plan",
    "quantize_model",
    "save_quantized",
    "verify_quantized",
]
