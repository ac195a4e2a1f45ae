"""`from_pretrained(..., quantization_config=MoQConfig("w4"))`: moq_hf's quantizer for transformers.

It is imported together with transformers' own quantizers, so it imports no more than
they do.
"""

from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .config import MoQConfig
from .errors import MoQError
from .schedule import needs_run

METHOD = MoQConfig.quant_method
# If this module is imported again, the new classes count.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(METHOD, None)


@register_quantization_config(METHOD)
class MoQQuantizationConfig(QuantizationConfigMixin):
    """Makes a `MoQConfig` from a mapping with `"quant_method": "moq"`.

    A `MoQConfig` itself needs no such class: transformers only asks for its
    `quant_method` and `to_dict`.
    """

    @classmethod
    def from_dict(
        cls,
        config_dict: Mapping[str, Any],
        return_unused_kwargs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Make the config from the other keys of a mapping.

        Raises:
            MoQConfigError: It is wrong.
        """
        keys = {k: v for k, v in config_dict.items() if k != "quant_method"}
        config = MoQConfig.load(keys)
        return (config, kwargs) if return_unused_kwargs else config


@register_quantizer(METHOD)
class MoQHfQuantizer(HfQuantizer):
    """Quantizes a model once it is loaded, as `quantize_model` does, and leaves no trace of itself.

    The result is a float model whose layers round their weights. It has no
    `hf_quantizer`, and its config no `quantization_config`, so it can be trained, cast,
    compiled and adapted, and the checkpoints of a run are those of a float model.
    """

    quantization_config: Any

    @property
    def is_trainable(self) -> bool:
        """True, since PEFT's adapters train beside the weights."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True, since the weights train too."""
        return True

    def is_serializable(self) -> bool:
        """True, since `save_pretrained` writes the packed model."""
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a config that only a run can follow, before anything is loaded.

        Raises:
            MoQError: Names the settings concerned, and `MoQCallback`.
        """
        wanted = [*needs_run(self.quantization_config)]
        if wanted:
            raise MoQError(
                f"quantization_config: a loaded model has its final bits at once, and a run is needed for "
                f"{', '.join(wanted)}: load the model without quantization_config, and give the config to "
                "MoQCallback or MoQTrainer"
            )

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Quantize the loaded model.

        Raises:
            MoQError: What `quantize_model` raises.
        """
        # Imported here, since it needs the Trainer, whose module imports this one's.
        from .loaded import quantize_loaded

        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        quantize_loaded(model, self.quantization_config)
