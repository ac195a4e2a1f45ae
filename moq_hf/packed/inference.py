"""Inference with packed weights: `load_packed` and the layer that it puts into the model."""

import contextlib
import os
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..kernels import packing
from ..kernels.backend import keeps_packed, multiplies_packed
from ..transformers_seams import is_packed_layer, keep_packed, unpack_layer
from ..triton_quant import Unusable


class _Product(torch.autograd.Function):
    """The kernel's product, with the gradients of one with the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        return packing.packed_linear(input, layer.words, layer.bits, layer.scale, layer.zero_point, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input = gradient @ ctx.layer.dequantize(gradient.dtype) if ctx.needs_input_grad[0] else None
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return input, bias, None


class PackedLinear(nn.Module):
    """A linear layer whose weight stays packed in memory, for inference.

    With float16 or bfloat16 activations the kernel of `packing.packed_linear` unpacks it while it multiplies;
    otherwise it is dequantized for each product.

    Args:
        words: int32 `[out_features, words]`, as `packing.pack` gives.
        bits: 2, 4 or 8.
        in_features: Columns of the weight.
        scale: `[r, c]`; r divides out_features and c in_features. Kept in float32 whatever the model's dtype.
        zero_point: Integers of the scale's shape, or None.
        bias: `[out_features]`, or None.
    """

    def __init__(
        self,
        words: Tensor,
        bits: int,
        in_features: int,
        scale: Tensor,
        zero_point: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.in_features = in_features
        self.out_features = words.shape[0]
        repeats = self.out_features // scale.shape[0]
        self.words: Tensor
        self.scale: Tensor
        self.zero_point: Tensor | None
        self.register_buffer("words", words)
        self.register_buffer("scale", scale.to(torch.float32).repeat_interleave(repeats, 0))
        zero = None if zero_point is None else zero_point.to(torch.int32).repeat_interleave(repeats, 0)
        self.register_buffer("zero_point", zero)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[..., in_features]` times the weight, plus the bias."""
        if multiplies_packed(input):
            with contextlib.suppress(Unusable):
                return cast(Tensor, _Product.apply(input, self.bias, self))  # type: ignore[no-untyped-call]
        return F.linear(input, self.dequantize(input.dtype), self.bias)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight `[out_features, in_features]`."""
        codes = packing.unpack(self.words, self.bits, self.in_features)
        return quantizer.dequantize(codes, self.scale, self.zero_point, dtype=dtype)

    def extra_repr(self) -> str:
        """Sizes and bits."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "PackedLinear":
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = scale.to(self.words.device)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise MoQError("a model from load_packed cannot be saved: copy the directory that it was loaded from")


def load_packed(
    directory: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float16,
    **kwargs: Any,
) -> transformers.PreTrainedModel:
    """Load a packed checkpoint for inference, with its weights left packed where the kernels run.

    Layers of 2, 4 and 8 bits become `PackedLinear` on a device where the Triton kernels are available. All others, and
    all layers on other devices, are dequantized once, as plain `from_pretrained` does at the first forward pass.

    Args:
        directory: A folder, or a name on the Hub, in the `pack-quantized` format of compressed-tensors.
        device: Where to; by default the current CUDA device if there is one, else the CPU.
        dtype: Of everything that is not packed: float16, bfloat16 or float32.
        **kwargs: For `from_pretrained`: revision, token and so on.

    Returns:
        The model, of the class that the config names, in eval mode.

    Raises:
        MoQError: The checkpoint is not packed, or names no class of transformers.
        OSError: There is no such checkpoint.
        ImportError: compressed-tensors is not installed.

    >>> import tempfile
    >>> from moq_hf import quantize_model, save_quantized
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    >>> model = quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    ...     loaded = load_packed(save_quantized(model, folder), device="cpu", dtype=torch.float32)
    ...     torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)
    True
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = transformers.AutoConfig.from_pretrained(directory, **kwargs)
    settings = getattr(config, "quantization_config", None)
    if settings is None or settings.get("quant_method") != "compressed-tensors":
        raise MoQError(f"{directory} holds no packed weights: load it with from_pretrained")
    name = (config.architectures or ["none"])[0]
    architecture = getattr(transformers, name, None)
    if architecture is None:
        raise MoQError(f"{directory}: its config names the class {name}, which transformers does not have")
    # Scales may be float32, which a narrower dtype would round.
    model: Any = architecture.from_pretrained(directory, dtype=torch.float32, **kwargs)
    # What compressed-tensors would do at the first forward pass, which wraps every module of the model as well.
    keep_packed(model)
    for path, module in list(model.named_modules()):
        if is_packed_layer(module):
            layer = _packed_layer(module, device)
            if layer is None:
                unpack_layer(module)
            else:
                model.set_submodule(path, layer)
    model.tie_weights()
    return cast(transformers.PreTrainedModel, model.to(device=device, dtype=dtype).eval())


def _packed_layer(module: Any, device: torch.device) -> PackedLinear | None:
    """The layer for a module that transformers has loaded and not yet decompressed; None for what has no kernel."""
    scheme = module.quantization_scheme.weights
    if not hasattr(module, "weight_packed") or not keeps_packed(scheme.num_bits, device):
        return None
    scale = module.weight_scale
    zero = getattr(module, "weight_zero_point", None)
    if zero is not None and zero.is_floating_point():
        return None
    rows, columns = module.weight_shape.tolist()
    if zero is not None and zero.shape != scale.shape:
        # Packed along its rows.
        zero = packing.unpack(zero.T.contiguous(), scheme.num_bits, rows).T
    return PackedLinear(module.weight_packed.detach(), scheme.num_bits, columns, scale.detach(), zero, module.bias)
