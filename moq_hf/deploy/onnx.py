"""`export_onnx`: a packed checkpoint as ONNX models with integer weights, and the proof that they answer the same."""

import copy
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import quantizer
from ..config import MoQConfig
from ..errors import MoQError, one_line
from ..packed.state import StoredLayer
from ..packed.verify import stored_weights, verify_quantized
from ..version import __version__
from .data import Data, batches_of, load, metrics_of, name_of, quiet
from .onnx_layers import FLAVOURS, OPSET, Flavour, OnnxEmbedding, OnnxInt8Linear, OnnxLinear, is_exact_signed
from .proof import TOLERANCE, Proof, open_session, prove_model, torch_answers

logger = logging.getLogger(__name__)

REPORT_NAME = "moq_export.json"
FILE_NAMES: dict[Flavour, str] = {
    "float": "model_float.onnx",
    "weight-only": "model.onnx",
    "dequantize-linear": "model_dequantize_linear.onnx",
    "int8": "model_int8.onnx",
}
# One file may not have 2 GB; what comes near is loaded faster from a file that is mapped.
EXTERNAL_DATA_ABOVE = 10**9


@dataclass(frozen=True)
class Export:
    """What `export_onnx` wrote.

    Attributes:
        directory: Where.
        bytes: Of each flavour's files; "float checkpoint" is what the float weights take.
        layers: How each quantized layer lies in each flavour: "int4", "int8", "uint8", "float".
        sentences: How many were compared.
        checkpoint_metrics: Of the checkpoint in PyTorch.
        proofs: By flavour.
        activation_bits: Of the int8 flavour.
    """

    directory: Path
    bytes: dict[str, int]
    layers: dict[Flavour, dict[str, str]]
    sentences: int
    checkpoint_metrics: dict[str, float]
    proofs: dict[Flavour, Proof]
    activation_bits: int

    def table(self) -> str:
        """A line per flavour, for a terminal."""
        before = self.bytes["float checkpoint"]
        names = list(self.checkpoint_metrics)
        rows = [("flavour", "file", "bytes", "of float", "largest difference", "agreement", *names)]
        rows += [("checkpoint", "", "", "", "", "", *(f"{self.checkpoint_metrics[name]:.4f}" for name in names))]
        for flavour, proof in self.proofs.items():
            size = self.bytes[flavour]
            agreement = "-" if proof.agreement is None else f"{proof.agreement:.4f}"
            head = (flavour, FILE_NAMES[flavour], f"{size:,}", f"{size / before:.3f}")
            tail = (f"{proof.metrics[name]:.4f}" for name in names)
            rows += [(*head, f"{proof.largest_difference:.2e}", agreement, *tail)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", f"{self.sentences} sentences compared; {self.directory}"])


def export_onnx(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    flavours: Sequence[Flavour] = ("weight-only", "int8"),
    activation_bits: int | None = None,
    data: Data | None = None,
    max_length: int = 128,
    tolerance: float = TOLERANCE,
    external_data_above: int = EXTERNAL_DATA_ABOVE,
) -> Export:
    """Write a packed checkpoint as ONNX models, after proving that they answer as it does.

    The folder holds a model per flavour, the model's `config.json`, its tokenizer and `moq_export.json`; plain
    onnxruntime and `optimum.onnxruntime` load it. It appears when everything is proven, or not at all; in a folder that
    is there, `moq_export.json` comes last.

    Args:
        directory: What `save_quantized` wrote: a classifier of sequences or tokens, or a base model.
        out: The folder to make, an empty one, or that of an earlier export, which is replaced.
        flavours: Some of "float", "weight-only", "dequantize-linear" and "int8".
        activation_bits: Of the int8 flavour, 2 to 8; None is what the model was trained for, else 8.
        data: Compared on; None: sentences of our own.
        max_length: Tokens of an example, at most.
        tolerance: Largest difference of the outputs that float and weight-only may have.
        external_data_above: Bytes above which the weights lie in a file beside the model.

    Returns:
        Sizes, and the proof of each flavour.

    Raises:
        MoQError: The checkpoint is damaged or of another kind, `out` holds something else, the differences are too
            large, the data does not fit, or onnx, onnxscript or onnxruntime are not installed.
    """
    _check_installed()
    unknown = sorted(set(flavours) - set(FLAVOURS))
    if unknown or not flavours:
        raise MoQError(f"flavours: {', '.join(unknown) or 'none'}; legal are {', '.join(FLAVOURS)}")
    folder, target = Path(directory), Path(out).resolve()
    if target == folder.resolve() or target.is_file():
        raise MoQError(f"{out} must be another folder than the checkpoint's, or a new one")
    _check_target(target)
    state = verify_quantized(folder)
    if activation_bits is None:
        activation_bits = _trained_bits(state.state) or 8
    if not 2 <= activation_bits <= 8:
        raise MoQError(f"activation_bits must be 2 to 8, got {activation_bits}")
    model, tokenizer = load(folder)
    odd = [name for name in state.layers if not isinstance(model.get_submodule(name), nn.Linear | nn.Embedding)]
    if odd:
        raise MoQError(f"{directory}: only nn.Linear and nn.Embedding are exported, not {', '.join(odd)}")
    batches, labels = batches_of(model, tokenizer, data, max_length)
    weights = stored_weights(folder)
    answers = torch_answers(model, batches)
    metrics = metrics_of(answers, labels, data)
    proofs: dict[Flavour, Proof] = {}
    sizes = {"float checkpoint": state.float_bytes}
    layers: dict[Flavour, dict[str, str]] = {}
    staging = target.parent / f".{target.name}.exporting"
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for flavour in dict.fromkeys(flavours):
            path = staging / FILE_NAMES[flavour]
            prepared, stored = _prepare(model, weights, state.layers, flavour, activation_bits)
            layers[flavour] = stored
            _write_model(prepared, batches[0], path, stored, external_data_above)
            files = (path, path.with_name(name_of(path.name)))
            sizes[flavour] = sum(file.stat().st_size for file in files if file.exists())
            session = open_session(path, flavour)
            simulated = None
            if flavour == "int8":
                rounded = [name for name in stored if isinstance(prepared.get_submodule(name), OnnxInt8Linear)]
                if not rounded:
                    logger.warning(
                        "moq_hf: the int8 model multiplies no integers: all layers have several scales in a row "
                        "(quantize_group_size) or more than 8 bits"
                    )
                simulated = torch_answers(model, batches, rounded, activation_bits)
            proofs[flavour] = prove_model(session, batches, answers, simulated, labels, data)
            largest = proofs[flavour].largest_difference
            if flavour in ("float", "weight-only") and not largest <= tolerance:
                raise MoQError(
                    f"the {flavour} model's outputs differ by {largest:.3g} from the checkpoint's, more than the "
                    f"tolerance of {tolerance:g}: nothing is written to {out}"
                )
        export = Export(
            Path(out), sizes, layers, sum(len(b["input_ids"]) for b in batches), metrics, proofs, activation_bits
        )
        _write_rest(staging, model, tokenizer, export, tolerance)
        _publish(staging, target)
    except OSError as error:
        raise MoQError(f"cannot write the export to {target}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return export


# From the checkpoint to a graph.


def _prepare(
    model: Any,
    weights: Mapping[str, quantizer.Quantized],
    layers: Mapping[str, StoredLayer],
    flavour: Flavour,
    activation_bits: int,
) -> tuple[Any, dict[str, str]]:
    """A copy of the model with layers that emit integers, and what each becomes in the file."""
    if flavour == "float":
        return model, {}
    # The floats that integers take the place of are not worth copying.
    prepared = copy.deepcopy(model, {id(model.get_submodule(name).weight): None for name in weights})
    stored = dict.fromkeys(layers, "float")
    for name, weight in weights.items():
        module, bits = model.get_submodule(name), layers[name].bits
        if isinstance(module, nn.Embedding):
            stand_in: nn.Module = OnnxEmbedding(weight, bits)
            stored[name] = "int4" if cast(OnnxEmbedding, stand_in).halved else "int8"
        elif flavour == "int8" and weight.scale.shape[1] == 1:
            stand_in = OnnxInt8Linear(weight, module.bias, activation_bits)
            stored[name] = "int8" if is_exact_signed(weight.codes, activation_bits) else "uint8"
        else:
            stand_in = OnnxLinear(weight, module.bias, flavour != "dequantize-linear")
            stored[name] = "int4" if bits <= 4 else "int8"
        prepared.set_submodule(name, stand_in)
    return prepared.eval(), stored


def _write_model(
    model: Any, example: Mapping[str, Tensor], path: Path, stored: Mapping[str, str], external_above: int
) -> None:
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, CommonSubexpressionEliminationPass
    from onnxscript.optimizer import optimize_ir

    inputs = {name: tensor[:2, :16].contiguous() for name, tensor in example.items()}
    axes = {name: {0: "batch", 1: "sequence"} for name in inputs}
    with torch.no_grad(), quiet():
        outputs = list(model(**inputs))
        try:
            program = torch.onnx.export(
                model,
                (),
                kwargs=inputs,
                dynamic_shapes=axes,
                input_names=list(inputs),
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = one_line(error.__cause__ or error)[:300]
            raise MoQError(f"torch.onnx.export cannot export {type(model).__name__}: {reason}") from error
        exported = cast(Any, program).model
        initializers = exported.graph.initializers
        for name, kind in stored.items():
            layer = model.get_submodule(name)
            if kind == "int4" and isinstance(layer, OnnxLinear):
                _narrow(initializers[f"{name}.codes"])
                if not layer.folded and layer.zero_point is not None:
                    _narrow(initializers[f"{name}.zero_point"])
        integers = {f"{name}.{part}" for name in stored for part in ("codes", "zero_point")}
        # The default would fold small integer weights into float ones.
        optimize_ir(exported, should_fold=lambda node: False if integers & {v.name for v in node.inputs if v} else None)
        CommonSubexpressionEliminationPass()(exported)
        # Stack traces, with the paths of this machine.
        ClearMetadataAndDocStringPass()(exported)
    size = sum(value.const_value.nbytes for value in initializers.values())
    beside = name_of(path.name) if size > external_above else None
    ir.save(exported, path, external_data=beside)


def _narrow(value: Any) -> None:
    """Make an int8 initializer one of INT4, two to a byte."""
    import ml_dtypes
    import onnx_ir as ir

    codes = value.const_value.numpy().astype(ml_dtypes.int4)
    value.const_value = ir.Tensor(codes, dtype=ir.DataType.INT4, name=value.name)
    value.type = ir.TensorType(ir.DataType.INT4)


# What lies beside the models.


def _trained_bits(state: Mapping[str, Any]) -> int | None:
    config = state.get("config")
    activation = None if config is None else MoQConfig.from_dict(config).activation
    return activation.bits if activation is not None and activation.enabled else None


def _write_rest(folder: Path, model: Any, tokenizer: Any, export: Export, tolerance: float) -> None:
    import onnx
    import onnxruntime

    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    versions = {
        "moq_hf": __version__,
        "torch": str(torch.__version__),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
    }
    document = {
        "opset": OPSET,
        "activation_bits": export.activation_bits,
        "tolerance": tolerance,
        "sentences": export.sentences,
        "bytes": export.bytes,
        "checkpoint_metrics": export.checkpoint_metrics,
        "proofs": {flavour: asdict(proof) for flavour, proof in export.proofs.items()},
        "layers": export.layers,
        "versions": versions,
    }
    (folder / REPORT_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _check_target(target: Path) -> None:
    """Whether nobody else's file can be lost by an export into the folder.

    Raises:
        MoQError: There may be one.
    """
    if not target.exists() or not any(target.iterdir()):
        return
    try:
        report = json.loads((target / REPORT_NAME).read_text(encoding="utf-8"))
        flavours = set(report["proofs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        flavours = set()
    if not flavours or flavours - set(FLAVOURS):
        raise MoQError(
            f"{target} is not empty and has no {REPORT_NAME} of a finished export, so what it holds may not be ours to "
            "replace; give a new or an empty folder"
        )
    if any(target.glob("*.safetensors")):
        raise MoQError(f"{target} holds another model, whose config.json would be replaced; give a new folder")


def _publish(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # A folder without the report is one that was left in the middle of this.
    for name in (REPORT_NAME, *FILE_NAMES.values(), *map(name_of, FILE_NAMES.values())):
        (target / name).unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == REPORT_NAME):
        path.replace(target / path.name)


def _check_installed() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MoQError(f"{error.name} is not installed: pip install 'moq_hf[onnx]'") from None
