"""`MoQTrainer`: a `Trainer` with MoQ wired in, and what only a Trainer subclass can do."""

import logging
import os
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from .callback import MoQCallback
from .config import MoQConfig, MoQError
from .quant_linear import quant_layers

logger = logging.getLogger(__name__)


class MoQTrainer(Trainer):
    """A `Trainer` that takes a MoQ config.

    Beyond what `MoQCallback` does for any Trainer:

    - The bits reach every reporter (TensorBoard, W&B) with the loss.
    - A loss that ignores `num_items_in_batch` is not multiplied by accumulation steps and processes, as the stock
      Trainer of transformers 5 does with BERT's and other classifiers'. Measured on the first batch, not guessed.
    - Eigenvalues are measured with `compute_loss`, whatever it is.
    - `save_model` writes the weights as evaluated; the checkpoints of a run keep the float ones.

    Args:
        *args: As for `Trainer`.
        moq_config: A `MoQConfig`, a mapping or the path of a JSON file; None trains in float.
        **kwargs: As for `Trainer`.

    Raises:
        MoQConfigError: The config is wrong.
        MoQError: The config does not fit the model, or `callbacks` holds a MoQCallback too.

    Attributes:
        moq: The `MoQCallback`, or None.
    """

    def __init__(
        self,
        *args: Any,
        moq_config: MoQConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.moq: MoQCallback | None = None
        callbacks = list(kwargs.get("callbacks") or [])
        given = [callback for callback in callbacks if isinstance(callback, MoQCallback)]
        if given and (moq_config is not None or len(given) > 1):
            raise MoQError("two MoQ configs: give moq_config or one MoQCallback, not both")
        if given:
            self.moq = given[0]
        elif moq_config is not None:
            self.moq = MoQCallback(moq_config)
            callbacks.append(self.moq)
        if self.moq is not None:
            self.moq.loss_is_repaired = True
        self._loss_checked = False
        self._saving_checkpoint = False
        super().__init__(*args, **{**kwargs, "callbacks": callbacks})

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, a training loss together with the bits it was made with."""
        moq = self._live_moq()
        if moq is not None and moq.controller is not None and "loss" in logs:
            logs = {**logs, **moq.controller.metrics()}
        super().log(logs, *args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-batch; before the first one of a run, find out how the loss is scaled."""
        if not self._loss_checked:
            self._loss_checked = True
            self._check_loss_scale(model, inputs, num_items_in_batch)
        moq = self._live_moq()
        if moq is not None:
            moq.loss = moq.loss or self._mean_loss
            moq.observe(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _mean_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """`compute_loss` over one batch by itself."""
        prepared = dict(self._prepare_inputs(inputs))
        labels = prepared.get("labels")
        count = None
        if self.compute_loss_func is not None and isinstance(labels, Tensor):
            count = labels.ne(-100).sum()
        return cast(Tensor, self.compute_loss(model, prepared, num_items_in_batch=count))

    def _check_loss_scale(self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None) -> None:
        factor = self.args.gradient_accumulation_steps * self.args.world_size * max(1, self.args.n_gpu)
        if count is None or factor == 1 or self.loss_is_scaled_for_ga is not None or self.compute_loss_func is not None:
            return
        training = [module for module in model.modules() if module.training]
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), self.compute_loss_context_manager():
                prepared = self._prepare_inputs(inputs)
                once, twice = (
                    float(cast(Tensor, self.compute_loss(model, dict(prepared), num_items_in_batch=k * count)))
                    for k in (1, 2)
                )
        finally:
            for module in training:
                module.training = True
        if once == twice != 0.0:
            self.model_accepts_loss_kwargs = False
            logger.info(
                "the loss of %s ignores num_items_in_batch: it is averaged over micro-batches and processes instead",
                type(self.accelerator.unwrap_model(model)).__name__,
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._saving_checkpoint = True
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self._saving_checkpoint = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        unwrapped = self.accelerator.unwrap_model(self.model)
        layers = {} if self._saving_checkpoint else quant_layers(unwrapped)
        if layers:
            state_dict = dict(unwrapped.state_dict() if state_dict is None else state_dict)
            with torch.no_grad():
                for name, layer in layers.items():
                    state_dict[f"{name}.weight"] = layer.quantized_weight(layer.weight.dtype).detach()
        super()._save(output_dir, state_dict)

    def _live_moq(self) -> MoQCallback | None:
        # restore_callback_states_from_checkpoint puts a new object in the place of the one that was passed.
        if self.moq is not None and self.moq not in self.callback_handler.callbacks:
            found = [callback for callback in self.callback_handler.callbacks if isinstance(callback, MoQCallback)]
            self.moq = found[0] if found else None
        return self.moq
