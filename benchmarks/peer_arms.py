"""The arms of `peers.py`: moq_hf and other libraries' quantization-aware training behind the same four calls."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from classifiers import config_of
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from moq_hf import MoQConfig, save_quantized
from moq_hf.training.controller import MoQController

HEAD = "classifier"


class Arm:
    """Plain float training; the base of the others.

    Attributes:
        model: Made ready for training in place, or replaced, by `__init__`.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        """Take the float model; `steps` is the length of the run."""
        self.model = model
        self.steps = steps

    def before_optimizer(self) -> None:
        """Called after gradient clipping."""

    def after_step(self) -> None:
        """Called after the optimizer."""

    def save(self, folder: Path) -> None:
        """Write what is deployed."""
        self.model.save_pretrained(folder)  # type: ignore[operator]

    @staticmethod
    def load(folder: Path, name: str) -> nn.Module:
        """The deployed model; `name` is where training started, for the architecture alone."""
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder)
        return model


def blank(name: str) -> nn.Module:
    """The architecture of a BERT, with weights that are about to be replaced."""
    config = config_of(name, num_labels=2)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    model = model.to_empty(device="cpu")
    # What the constructor of a BERT computes and no state dict holds.
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        elif name.endswith("token_type_ids"):
            buffer.zero_()
        else:
            raise ValueError(f"{name}: only models of BERT's kind are known here")
    return model.eval()


def body_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers but the classifier: what every arm quantizes."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(HEAD)}


class MoQ(Arm):
    """moq_hf, with a config."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        self.controller = MoQController(model, MoQConfig.from_dict(self.config), steps)

    def after_step(self) -> None:
        """As `Arm`."""
        self.controller.step()

    def save(self, folder: Path) -> None:
        """As `Arm`."""
        save_quantized(self.model, folder, controller=self.controller)


class TorchAO(Arm):
    """torchao's QATConfig with a weight configuration, then the weight-only configuration of the same grid."""

    bits = 8
    group_size: int | None = None

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        dtype = {8: torch.int8, 4: torch.int4}[self.bits]
        weight = (
            IntxFakeQuantizeConfig(dtype, group_size=self.group_size)
            if self.group_size
            else IntxFakeQuantizeConfig(dtype, "per_channel")
        )
        body = body_linears(model)
        quantize_(model, QATConfig(weight_config=weight, step="prepare"), filter_fn=lambda module, name: name in body)

    def save(self, folder: Path) -> None:
        """As `Arm`."""
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup
        from torchao.quantization.qat import QATConfig

        quantize_(self.model, QATConfig(step="convert"), filter_fn=lambda m, _: hasattr(m, "weight_fake_quantizer"))
        body = body_linears(self.model)
        granularity = PerGroup(self.group_size) if self.group_size else PerAxis(0)
        config = IntxWeightOnlyConfig(weight_dtype={8: torch.int8, 4: torch.int4}[self.bits], granularity=granularity)
        quantize_(self.model, config, filter_fn=lambda _, name: name in body)
        torch.save(self.model.state_dict(), folder / "model.pt")

    @staticmethod
    def load(folder: Path, name: str) -> nn.Module:
        """As `Arm`."""
        import torchao.quantization  # noqa: F401 - its tensors must be known

        model = blank(name)
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=True)
        return model


class Quanto(Arm):
    """optimum-quanto: quantize, train unfrozen, freeze."""

    bits = 8

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        from optimum.quanto import qint4, qint8, quantize

        quantize(model, weights={8: qint8, 4: qint4}[self.bits], exclude=f"{HEAD}*")
        # Its backward pass takes a view of the gradient, which after attention's transpose is not contiguous.
        for layer in body_linears(model).values():
            layer.register_full_backward_pre_hook(lambda _, grads: tuple(grad.contiguous() for grad in grads))

    def save(self, folder: Path) -> None:
        """As `Arm`."""
        from optimum.quanto import freeze, quantization_map
        from safetensors.torch import save_file

        freeze(self.model)
        save_file(self.model.state_dict(), folder / "model.safetensors")
        (folder / "quanto.json").write_text(json.dumps(quantization_map(self.model)))

    @staticmethod
    def load(folder: Path, name: str) -> nn.Module:
        """As `Arm`."""
        from optimum.quanto import requantize
        from safetensors.torch import load_file

        model = blank(name)
        requantize(model, load_file(folder / "model.safetensors"), json.loads((folder / "quanto.json").read_text()))
        return model.eval()


def wrapped_for_torch_ao(model: nn.Module) -> nn.Module:
    """Each linear layer between stubs, since eager mode quantizes only between them."""
    from torch.ao.quantization import QuantWrapper, get_default_qat_qconfig

    for name, linear in body_linears(model).items():
        linear.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantWrapper(linear))
    return model


class TorchAOEager(Arm):
    """torch.ao's eager mode: prepare_qat and convert, fbgemm, weights and activations 8 bits."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        from torch.ao.quantization import prepare_qat

        super().__init__(prepare_qat(wrapped_for_torch_ao(model), inplace=True), steps)

    def save(self, folder: Path) -> None:
        """As `Arm`."""
        from torch.ao.quantization import convert

        converted = convert(self.model.eval(), inplace=True)
        torch.save(converted.state_dict(), folder / "model.pt")

    @staticmethod
    def load(folder: Path, name: str) -> nn.Module:
        """As `Arm`."""
        from torch.ao.quantization import convert, prepare_qat

        model = prepare_qat(wrapped_for_torch_ao(blank(name).train()), inplace=True)
        with torch.no_grad():
            # Converting looks at the weights that are about to be replaced.
            for parameter in model.parameters():
                parameter.zero_()
        convert(model.eval(), inplace=True)
        # Packed weights are objects of torch's own.
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=False))
        return model


class DeepSpeedForward(Arm):
    """DeepSpeed's compression, quantizing in each forward pass; what it saves is float."""

    bits = 8

    def _config(self) -> dict[str, Any]:
        return {
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {
                        "enabled": True,
                        "quantizer_kernel": False,
                        "schedule_offset": 0,
                        "quantize_groups": 8,
                        "quantize_verbose": False,
                        "quantization_type": "symmetric",
                        "quantize_weight_in_forward": True,
                        "rounding": "nearest",
                        "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.1},
                    },
                    "different_groups": {
                        "wq1": {
                            "params": {"start_bits": self.bits, "target_bits": self.bits, "quantization_period": 0},
                            "modules": [f"{name}$" for name in body_linears(self.model)],
                        }
                    },
                }
            }
        }

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        from deepspeed.compression.compress import init_compression
        from deepspeed.compression.config import get_compression_config
        from deepspeed.compression.scheduler import compression_scheduler

        self._deepspeed = self._config()
        self.model = init_compression(model, self._deepspeed)
        self._scheduler = compression_scheduler(self.model, get_compression_config(self._deepspeed))
        self._scheduler.check_weight_quantization()
        enabled = [m for m in self.model.modules() if getattr(m, "weight_quantization_enabled", False)]
        if not enabled:
            raise RuntimeError("DeepSpeed's scheduler has switched nothing on")

    def after_step(self) -> None:
        """As `Arm`."""
        self._scheduler.step()

    def save(self, folder: Path) -> None:
        """As `Arm`."""
        from deepspeed.compression.compress import redundancy_clean

        redundancy_clean(self.model, self._deepspeed).save_pretrained(folder)


class DeepSpeedStep(Arm):
    """DeepSpeed's `runtime.quantize.Quantizer`, once per optimizer step, as its fp16 optimizer calls it.

    That optimizer needs an engine and a GPU. The float weights that it keeps are kept here instead.
    """

    bits = 8

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__(model, steps)
        from deepspeed.runtime.quantize import Quantizer

        self._weights: list[Any] = [layer.weight for layer in body_linears(model).values()]
        for weight in self._weights:
            weight.start_bits = weight.target_bits = self.bits
            weight.q_period = 0
        self._quantizer = Quantizer(q_groups=8, q_type="symmetric", q_rounding="nearest")
        self.after_step()

    def before_optimizer(self) -> None:
        """As `Arm`."""
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.data = kept

    def after_step(self) -> None:
        """As `Arm`."""
        self._kept: list[Tensor] = [weight.data for weight in self._weights]
        with torch.no_grad():
            self._quantizer.quantize([self._weights], False, False)


def variant(base: type[Arm], **attributes: Any) -> type[Arm]:
    """The arm with other settings."""
    return type(base.__name__, (base,), attributes)


def moq(start: int, target: int, *, algo: dict[str, Any] | None = None, **more: Any) -> type[Arm]:
    """moq_hf from `start` to `target` bits, 8 row blocks unless `more` says otherwise."""
    schedule = {"quantize_period": "auto" if start > target else 1, "schedule_offset": 0}
    config = {
        "quantize_bits": {"start_bits": start, "target_bits": target},
        "quantize_schedule": schedule,
        "quantize_algo": algo or {},
        **({} if "quantize_group_size" in more else {"quantize_groups": 8}),
        **more,
    }
    return variant(MoQ, config=config)
