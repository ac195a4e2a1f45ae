"""From a checkpoint to an ONNX file: stand-ins for its layers, torch.onnx.export, integers of 4 bits two to a byte."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import MoQError, one_line
from .loading import Checkpoint
from .onnx_layers import OPSET, Flavor, OnnxConvolution, OnnxEmbedding, OnnxInt8Linear, OnnxLinear, is_exact_signed


def prepare(checkpoint: Checkpoint, flavor: Flavor, activation_bits: int) -> tuple[Any, dict[str, str]]:
    """The model with layers that emit integers.

    Args:
        checkpoint: Its model is not changed.
        flavor: What the layers compute.
        activation_bits: Of the int8 flavor, 2 to 8.

    Returns:
        A copy of the model, and what each quantized layer becomes in the file: "int4", "int8", "uint8" or "float".
    """
    model, weights = checkpoint.model, checkpoint.weights
    if flavor == "float":
        return model, {}
    # The floats that integers take the place of are not worth copying.
    prepared = copy.deepcopy(model, {id(model.get_submodule(name).weight): None for name in weights})
    stored = dict.fromkeys(checkpoint.verified.layers, "float")
    for name, weight in weights.items():
        module, bits = model.get_submodule(name), checkpoint.verified.layers[name].bits
        if isinstance(module, nn.Embedding):
            stand_in: nn.Module = OnnxEmbedding(weight, bits)
            stored[name] = "int4" if cast(OnnxEmbedding, stand_in).halved else "int8"
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            stand_in = OnnxConvolution(weight, prepared.get_submodule(name), flavor != "dequantize-linear")
            stored[name] = "int4" if bits <= 4 else "int8"
        elif flavor == "int8" and weight.scale.shape[1] == 1:
            stand_in = OnnxInt8Linear(weight, module.bias, activation_bits)
            stored[name] = "int8" if is_exact_signed(weight.codes, activation_bits) else "uint8"
        else:
            stand_in = OnnxLinear(weight, module.bias, flavor != "dequantize-linear")
            stored[name] = "int4" if bits <= 4 else "int8"
        prepared.set_submodule(name, stand_in)
    return prepared.eval(), stored


def write_model(
    model: Any, example: Mapping[str, Tensor], path: Path, stored: Mapping[str, str], external_above: int
) -> int:
    """Export a prepared model.

    Args:
        model: From `prepare`, with what it says of each layer in `stored`.
        example: Inputs, int64 `[examples, tokens]`, or float32 `[examples, channels, height, width]`.
        path: The file.
        stored: What each quantized layer becomes.
        external_above: Bytes above which the weights are put into a file beside the model.

    Returns:
        The bytes of its files.

    Raises:
        MoQError: torch.onnx.export cannot export it.
    """
    import onnx_ir as ir

    with torch.no_grad(), quiet():
        few = {name: tensor[:2] if tensor.dim() > 2 else tensor[:2, :16] for name, tensor in example.items()}
        exported = _traced(model, {name: tensor.contiguous() for name, tensor in few.items()})
        _pack(exported, model, stored)
        _optimize(exported, {f"{name}.{part}" for name in stored for part in ("codes", "zero_point")})
    size = sum(value.const_value.nbytes for value in exported.graph.initializers.values())
    beside = path.with_name(weights_beside(path.name))
    ir.save(exported, path, external_data=beside.name if size > external_above else None)
    return sum(file.stat().st_size for file in (path, beside) if file.exists())


def _traced(model: Any, inputs: dict[str, Tensor]) -> Any:
    """The graph of a model whose examples and tokens may be any number; pictures keep their size.

    Raises:
        MoQError: The exporter of PyTorch cannot export the model.
    """
    try:
        program = torch.onnx.export(
            model,
            (),
            kwargs=inputs,
            dynamic_shapes={
                name: {0: "batch"} if tensor.dim() > 2 else {0: "batch", 1: "sequence"}
                for name, tensor in inputs.items()
            },
            input_names=list(inputs),
            output_names=list(model(**inputs)),
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = one_line(error.__cause__ or error)[:300]
        raise MoQError(f"torch.onnx.export cannot export {type(model).__name__}: {reason}") from error
    return cast(Any, program).model


def _pack(exported: Any, model: Any, stored: Mapping[str, str]) -> None:
    """Make the codes of linear layers and convolutions of up to 4 bits, and zero points beside them, INT4."""
    initializers = exported.graph.initializers
    for name, kind in stored.items():
        layer = model.get_submodule(name)
        if kind == "int4" and isinstance(layer, OnnxLinear | OnnxConvolution):
            _narrow(initializers[f"{name}.codes"])
            if not layer.folded and layer.zero_point is not None:
                _narrow(initializers[f"{name}.zero_point"])


def _narrow(value: Any) -> None:
    """Make an int8 initializer one of INT4, two to a byte."""
    import ml_dtypes
    import onnx_ir as ir

    codes = value.const_value.numpy().astype(ml_dtypes.int4)
    value.const_value = ir.Tensor(codes, dtype=ir.DataType.INT4, name=value.name)
    value.type = ir.TensorType(ir.DataType.INT4)


def _optimize(exported: Any, integers: set[str]) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, CommonSubexpressionEliminationPass
    from onnxscript.optimizer import optimize_ir

    # The default would fold small integer weights into float ones.
    optimize_ir(exported, should_fold=lambda node: False if integers & {v.name for v in node.inputs if v} else None)
    CommonSubexpressionEliminationPass()(exported)
    # Stack traces, with the paths of this machine.
    ClearMetadataAndDocStringPass()(exported)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter warns of what it decides by itself, and reports its progress."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def weights_beside(model: str) -> str:
    """The file beside a model that holds its weights, if they are large.

    >>> weights_beside("model.onnx")
    'model.onnx.data'
    """
    return f"{model}.data"
