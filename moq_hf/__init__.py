"""Quantization-aware fine-tuning of Hugging Face models as one Trainer callback.

The public names are imported when they are first asked for, so that `moq-hf --help`
needs neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import import_with
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .arguments import MoQArguments as MoQArguments
    from .callback import MoQCallback as MoQCallback
    from .config import MoQConfig as MoQConfig
    from .eigen import block_eigenvalues as block_eigenvalues
    from .errors import MoQConfigError as MoQConfigError
    from .errors import MoQError as MoQError
    from .forecast import plan as plan
    from .model.convert import dequantize_model as dequantize_model
    from .model.convert import hold_quantized as hold_quantized
    from .packed.save import save_quantized as save_quantized
    from .packed.verify import verify_quantized as verify_quantized
    from .quant_linear import QuantLinear as QuantLinear
    from .rounding import quantize_model as quantize_model
    from .schedule import PrecisionSchedule as PrecisionSchedule
    from .trainer import MoQMixin as MoQMixin
    from .trainer import MoQTrainer as MoQTrainer
    from .training.checkpoints import last_checkpoint as last_checkpoint
    from .training.distillation import MoQDistillation as MoQDistillation

_HOMES = {
    "MoQArguments": "arguments",
    "MoQCallback": "callback",
    "MoQConfig": "config",
    "MoQConfigError": "errors",
    "MoQDistillation": "training.distillation",
    "MoQError": "errors",
    "MoQMixin": "trainer",
    "MoQTrainer": "trainer",
    "PrecisionSchedule": "schedule",
    "QuantLinear": "quant_linear",
    "block_eigenvalues": "eigen",
    "dequantize_model": "model.convert",
    "hold_quantized": "model.convert",
    "last_checkpoint": "training.checkpoints",
    "plan": "forecast",
    "quantize_model": "rounding",
    "save_quantized": "packed.save",
    "verify_quantized": "packed.verify",
}
__all__ = sorted([*_HOMES, "__version__"])


# For `from_pretrained(..., quantization_config=)`.
import_with("transformers.quantizers.auto", f"{__name__}.hf_quantizer")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
