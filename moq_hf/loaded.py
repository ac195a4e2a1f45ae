"""A model that was loaded with a `MoQConfig`: how it trains in a Trainer, and what its `save_pretrained` writes.

After this is imported, each new Trainer checks whether its model is such a model.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .callback import MoQCallback
from .config import MoQConfig
from .errors import MoQError
from .model.convert import FloatSaves, is_quantized, quantized_layers
from .packed.save import save_quantized
from .processes import has_gathered_weights
from .rounding import quantize_model
from .schedule import needs_run
from .seams.sentence_transformers import saves_body
from .seams.transformers import (
    callbacks_of,
    calling_trainer,
    give_to_each_trainer,
    has_adapter,
    saves_checkpoint,
)


class PackedSaves(FloatSaves):
    """The `save_pretrained` of a model that was loaded with a `MoQConfig`: writes the packed model.

    While a Trainer saves a checkpoint, the model's own method gets the arguments as they
    are, since the run continues from the float weights. A stock Trainer has no flag for
    that, but it saves checkpoints only in its method `_save_checkpoint`, which is then on
    the call stack. The same happens for adapters of `add_adapter`, inside a model of
    Sentence Transformers, which packs in other layouts, and once the layers are plain.

    Under FSDP2 and ZeRO-3 a stock Trainer's `save_model` hands over the whole weights
    as `state_dict`, if its settings gather them; without one, sharded weights are an
    error in every process.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.save_pretrained`; see the class."""
        model = self.model
        in_float = saves_checkpoint() or saves_body() or has_adapter(model)
        if in_float or not is_quantized(model):
            return super().__call__(*args, **kwargs)
        return self._pack(*args, **kwargs)

    def _pack(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **hub: Any,
    ) -> None:
        """As `PreTrainedModel.save_pretrained`, but packed files always have the tensor names of the model's files.

        Raises:
            MoQError: A variant or a distributed checkpoint is asked for, the weights are
                sharded, or what `save_quantized` raises.
        """
        model: Any = self.model
        if variant or distributed_checkpoint:
            raise MoQError(
                "save_pretrained writes a model that was loaded with a MoQConfig packed, and knows neither variant nor "
                "distributed_checkpoint there: leave them out, or call moq_hf.dequantize_model(model) first"
            )
        # ZeRO-3 hands over an empty one if it does not gather.
        if not state_dict and has_gathered_weights(model):
            raise MoQError(
                "save_pretrained: the weights are spread over processes (FSDP2, ZeRO-3): MoQTrainer.save_model gathers "
                "them, called in each process, and so does a run at its end; or give the whole weights as state_dict"
            )
        if not model.should_save_on_this_rank(is_main_process):
            return
        save_quantized(
            model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size
        )
        if push_to_hub:
            repository = hub.pop("repo_id", Path(save_directory).name)
            model.push_to_hub(
                repository, token=token, max_shard_size=max_shard_size, **hub
            )


class AttachesCallback(TrainerCallback):
    """Gives a Trainer without a `MoQCallback` one, if its model was loaded with a `MoQConfig`."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add it as the last callback, so that it is still called in this event."""
        config = config_of(model)
        trainer = calling_trainer(state)
        has_one = any(isinstance(c, MoQCallback) for c in callbacks_of(trainer))
        if config is not None and not has_one:
            trainer.add_callback(MoQCallback(config))


def quantize_loaded(model: nn.Module, config: MoQConfig) -> None:
    """Quantize a model that `from_pretrained` has loaded.

    Raises:
        MoQError: What `quantize_model` raises.
    """
    if not config.enabled:
        return
    # A run merges PEFT's adapters, which can only come later.
    quantize_model(model, replace(config, lora=None))
    layers = quantized_layers(model).values()
    followed = replace(next(iter(layers)).moq.config, lora=config.lora)
    for layer in layers:
        layer.moq.config = followed
    for module in model.modules():
        if isinstance(vars(module).get("save_pretrained"), FloatSaves):
            vars(module)["save_pretrained"] = PackedSaves(module)


def config_of(model: nn.Module) -> MoQConfig | None:
    """The config by which a model that was loaded with a `MoQConfig` trains; None for any other model."""
    modules = model.modules()
    if not any(
        isinstance(vars(m).get("save_pretrained"), PackedSaves) for m in modules
    ):
        return None
    configs = {id(x.moq.config): x.moq.config for x in quantized_layers(model).values()}
    # A run with a callback may have left a config with falling bits, which are over.
    constant = [c for c in configs.values() if not any(needs_run(c))]
    return constant[0] if constant else None


give_to_each_trainer(AttachesCallback)
