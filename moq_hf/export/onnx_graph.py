"""From a checkpoint to an ONNX file: stand-ins for its layers, torch.onnx.export, integers of 4 bits two to a byte."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MoQError, one_line
from ..quantizer import Quantized
from .loading import Checkpoint
from .onnx_integers import GUARD, OnnxInt8Linear, OnnxQdqLinear, Rounding, is_exact_signed
from .onnx_layers import OPSET, Flavor, OnnxConvolution, OnnxEmbedding, OnnxLinear


def multiplies_integers(module: nn.Module, weight: Quantized) -> bool:
    """Whether a layer can multiply integers: a linear one with one scale in a row."""
    return isinstance(module, nn.Linear) and weight.scale.shape[1] == 1


def prepare(checkpoint: Checkpoint, flavor: Flavor, rounding: Rounding | None = None) -> tuple[Any, dict[str, str]]:
    """The model with layers that emit integers.

    Args:
        checkpoint: Its model is not changed.
        flavor: What the layers compute.
        rounding: Of the int8 and the qdq flavor: how inputs are rounded.

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
        elif rounding is not None and multiplies_integers(module, weight):
            largest = rounding.range_of(name)
            if flavor == "qdq":
                assert largest is not None
                stand_in, signed = OnnxQdqLinear(weight, module.bias, largest), True
            else:
                signed = rounding.signed(weight.codes)
                stand_in = OnnxInt8Linear(weight, module.bias, rounding.grid, largest, signed)
            stored[name] = "int8" if signed else "uint8"
        else:
            stand_in = OnnxLinear(weight, module.bias, flavor != "dequantize-linear")
            stored[name] = "int4" if bits <= 4 else "int8"
        prepared.set_submodule(name, stand_in)
    return prepared.eval(), stored


def may_saturate(checkpoint: Checkpoint, stored: Mapping[str, str], rounding: Rounding) -> bool:
    """Whether signed weights of a prepared model have products that do not fit into 16 bits."""
    return any(
        stored[name] == "int8" and not is_exact_signed(weight.codes, rounding.grid.bits)
        for name, weight in checkpoint.weights.items()
        if multiplies_integers(checkpoint.model.get_submodule(name), weight)
    )


def write_model(
    model: Any,
    example: Mapping[str, Tensor],
    path: Path,
    stored: Mapping[str, str],
    external_above: int,
    *,
    guarded: bool = False,
) -> int:
    """Export a prepared model.

    Args:
        model: From `prepare`, with what it says of each layer in `stored`.
        example: Inputs, int64 `[examples, tokens]`, or float32 `[examples, channels, height, width]`.
        path: The file.
        stored: What each quantized layer becomes.
        external_above: Bytes above which the weights are put into a file beside the model.
        guarded: Refuse to run where two products of 8 bits saturate.

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
        if stored:
            _keep_sums(exported)
        if guarded:
            _guard(exported)
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


def _keep_sums(exported: Any) -> None:
    """Write the sum before a LayerNormalization as Sum.

    ONNX Runtime (1.31) fuses Add with it to SkipLayerNormalization, which takes longer on a CPU than both.
    """
    constants = exported.graph.initializers
    for node in exported.graph:
        if node.op_type == "LayerNormalization":
            before = node.inputs[0].producer()
            if before is not None and before.op_type == "Add" and not any(v.name in constants for v in before.inputs):
                before.op_type = "Sum"


def _guard(exported: Any) -> None:
    """Let the model fail where four products 255 * 127 do not sum to 129,540, which is where pairs saturate.

    ONNX Runtime computes it once, when the model is loaded, with the kernel that multiplies the layers.
    """
    import onnx_ir as ir

    graph, output = exported.graph, exported.graph.outputs[0]

    def constant(name: str, array: Any) -> Any:
        value = ir.val(f"guard.{name}", const_value=ir.tensor(array, name=f"guard.{name}"))
        graph.register_initializer(value)
        return value

    def add(op: str, *inputs: Any, **attributes: Any) -> Any:
        node = ir.node(op, list(inputs), attributes, name=f"{GUARD} ({op})")
        graph.append(node)
        return node.outputs[0]

    codes = constant("activations", np.full((1, 4), 255, np.uint8)), constant("weights", np.full((4, 1), 127, np.int8))
    wrong = add("Not", add("Equal", add("MatMulInteger", *codes), constant("sum", np.array([[129540]], np.int32))))
    index = add("Cast", add("Reshape", wrong, constant("shape", np.array([1]))), to=int(ir.DataType.INT64))
    zero = add("Gather", constant("zero", np.zeros(1, np.float32)), index)
    checked = add("Add", output, zero)
    checked.name, output.name = output.name, f"{output.name}.unguarded"
    checked.shape, checked.type = output.shape, output.type
    graph.outputs[0] = checked


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
