"""`export_onnx`: a packed checkpoint as ONNX models with integer weights, and the proof that they answer the same."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from ..config import MoQConfig
from ..errors import MoQError
from ..grid import InputGrid, InputScale
from .data import SENTENCES, Data
from .environment import versions
from .folder import Export, staged, target_of, write_rest
from .loading import Checkpoint, load_checkpoint
from .onnx_graph import may_saturate, multiplies_integers, prepare, weights_beside, write_model
from .onnx_integers import TARGETS, OnnxInt8Linear, OnnxQdqLinear, Rounding, Target, target_here
from .onnx_layers import FLAVORS, OPSET, Flavor
from .proof import TOLERANCE, Proof, Reference

logger = logging.getLogger(__name__)

FILE_NAMES: dict[Flavor, str] = {
    "float": "model_float.onnx",
    "weight-only": "model.onnx",
    "dequantize-linear": "model_dequantize_linear.onnx",
    "int8": "model_int8.onnx",
    "qdq": "model_qdq.onnx",
}
ALL_FILES = [*FILE_NAMES.values(), *map(weights_beside, FILE_NAMES.values())]
# Flavors that compute what the checkpoint does, so that a large difference is a fault.
_SAME_ARITHMETIC = ("float", "weight-only")
# One file may not have 2 GB; what comes near is loaded faster from a file that is mapped.
EXTERNAL_DATA_ABOVE = 10**9


class _Written(NamedTuple):
    """One flavor: the bytes of its files, what each layer became, and how it answers."""

    bytes: int
    layers: dict[str, str]
    proof: Proof


def export_onnx(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    flavors: Sequence[Flavor] = ("weight-only", "int8"),
    activation_bits: int | None = None,
    activation_scale: InputScale | None = None,
    cpu: Target | Literal["auto"] = "auto",
    data: Data = SENTENCES,
    max_length: int = 128,
    tolerance: float = TOLERANCE,
    external_data_above: int = EXTERNAL_DATA_ABOVE,
) -> Export:
    """Write a packed checkpoint as ONNX models, after proving that they answer as it does.

    The folder holds a model per flavor, the model's `config.json`, its tokenizer and `moq_export.json`; plain
    onnxruntime and `optimum.onnxruntime` load it. It appears when everything is proven, or not at all.

    Args:
        directory: What `save_quantized` wrote: a classifier of sequences, tokens or images, or a base model.
        out: The folder to make, an empty one, or that of an earlier export, which is replaced.
        flavors: Some of "float", "weight-only", "dequantize-linear", "int8" and "qdq".
        activation_bits: Of the int8 flavor, 2 to 8; None is what the model was trained for, else 8. qdq has 8.
        activation_scale: Of the int8 flavor; None is what the model was trained for, else "per_tensor". qdq has
            "static". Where no range was trained, static takes the largest magnitudes that `data` gives.
        cpu: What int8 is made for: "vnni", "avx2", or "auto", which is what suits this machine. qdq is for "vnni".
        data: Compared on; a model of pictures answers random ones instead.
        max_length: Tokens of an example, at most.
        tolerance: Largest difference of the outputs that float and weight-only may have.
        external_data_above: Bytes above which the weights are put into a file beside the model.

    Returns:
        Sizes, and the proof of each flavor.

    Raises:
        MoQError: The checkpoint is damaged or of another kind, `out` holds something else, the differences are too
            large, the data does not fit, or onnx, onnxscript or onnxruntime are not installed.
    """
    _check_installed()
    for_cpu = _check_options(flavors, activation_bits, activation_scale, cpu)
    target = target_of(Path(directory), out, FLAVORS)
    checkpoint = load_checkpoint(Path(directory))
    reference = Reference(checkpoint, data, max_length)
    trained = _trained(checkpoint.verified.state) or InputGrid(8, "per_tensor")
    asked = InputGrid(activation_bits or trained.bits, activation_scale or trained.scale)
    roundings = _roundings(checkpoint, reference, flavors, asked, for_cpu)
    with staged(target, ALL_FILES) as staging:
        written: dict[str, _Written] = {}
        for flavor in dict.fromkeys(flavors):
            one = _write(staging, checkpoint, reference, flavor, roundings.get(flavor), external_data_above)
            written[flavor], difference = one, one.proof.largest_difference
            if flavor in _SAME_ARITHMETIC and not difference <= tolerance:
                raise MoQError(
                    f"the {flavor} model's outputs differ by {difference:.3g} from the checkpoint's, more than the "
                    f"tolerance of {tolerance:g}: nothing is written to {out}"
                )
        export = _export(Path(out), checkpoint, reference, written, roundings, asked)
        made_by = {"opset": OPSET, "versions": versions("moq_hf", "torch", "onnx", "onnxruntime")}
        write_rest(staging, checkpoint, {**export.report(), **made_by, "tolerance": tolerance})
    return export


def _check_installed() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MoQError(f"{error.name} is not installed: pip install 'moq_hf[onnx]'") from None


def _check_options(
    flavors: Sequence[str], activation_bits: int | None, activation_scale: str | None, cpu: str
) -> Target:
    """The CPUs to write for.

    Raises:
        MoQError: An option is not legal; names it.
    """
    unknown = sorted(set(flavors) - set(FLAVORS))
    if unknown or not flavors:
        raise MoQError(f"flavors: {', '.join(unknown) or 'none'}; legal are {', '.join(FLAVORS)}")
    if activation_bits is not None and not 2 <= activation_bits <= 8:
        raise MoQError(f"activation_bits must be 2 to 8, got {activation_bits}")
    scales = get_args(InputScale)
    if activation_scale is not None and activation_scale not in scales:
        raise MoQError(f"activation_scale must be one of {', '.join(scales)}, got {activation_scale!r}")
    if cpu not in ("auto", *TARGETS):
        raise MoQError(f"cpu must be one of auto, {', '.join(TARGETS)}, got {cpu!r}")
    target = target_here() if cpu == "auto" else cast(Target, cpu)
    if "qdq" in flavors and target != "vnni":
        raise MoQError(
            "qdq multiplies signed integers of 8 bits, which CPUs without VNNI do not do exactly: leave it out"
        )
    return target


def _trained(state: Mapping[str, Any]) -> InputGrid | None:
    """The grid of inputs that the model was trained with."""
    config = state.get("config")
    return None if config is None else MoQConfig.from_dict(config).activation.grid


def _roundings(
    checkpoint: Checkpoint, reference: Reference, flavors: Sequence[Flavor], asked: InputGrid, target: Target
) -> dict[Flavor, Rounding]:
    """How inputs are rounded in the flavors that do."""
    grids: dict[Flavor, InputGrid] = {"int8": asked, "qdq": InputGrid(8, "static")}
    return {
        flavor: _rounding(checkpoint, reference, grid, target) for flavor, grid in grids.items() if flavor in flavors
    }


def _rounding(checkpoint: Checkpoint, reference: Reference, grid: InputGrid, target: Target) -> Rounding:
    """How inputs are rounded: with the ranges of training, where a layer has one."""
    if grid.scale != "static":
        return Rounding(grid, {}, "", target)
    model, saved = checkpoint.model, checkpoint.verified.state.get("input_ranges") or {}
    names = [n for n, weight in checkpoint.weights.items() if multiplies_integers(model.get_submodule(n), weight)]
    trained = {name: saved[name] for name in names if name in saved}
    unknown = [name for name in names if name not in saved]
    if not unknown:
        return Rounding(grid, trained, "trained" if trained else "", target)
    logger.warning(
        "moq_hf: no ranges of the activations were trained%s: they are the largest magnitudes of the %s compared; "
        "train with activation_quantization, or compare on data like that to be served",
        f" in {', '.join(unknown)}" if trained else "",
        reference.compared,
    )
    source = "partly trained" if trained else "measured"
    return Rounding(grid, trained | reference.largest_inputs(unknown), source, target)


def _write(
    folder: Path,
    checkpoint: Checkpoint,
    reference: Reference,
    flavor: Flavor,
    rounding: Rounding | None,
    external_above: int,
) -> _Written:
    """Write one flavor and prove it."""
    path = folder / FILE_NAMES[flavor]
    prepared, stored = prepare(checkpoint, flavor, rounding)
    guarded = rounding is not None and may_saturate(checkpoint, stored, rounding)
    size = write_model(prepared, reference.batches[0], path, stored, external_above, guarded=guarded)
    simulated = None
    if rounding is not None:
        rounded = [n for n in stored if isinstance(prepared.get_submodule(n), OnnxInt8Linear | OnnxQdqLinear)]
        if not rounded:
            logger.warning(
                "moq_hf: the %s model multiplies no integers: all layers have several scales in a row "
                "(quantize_group_size) or more than 8 bits, or are convolutions",
                flavor,
            )
        simulated = reference.rounded(rounded, rounding.grid, rounding.ranges)
    run = onnx_runtime(path)
    return _Written(size, stored, reference.prove([run(batch) for batch in reference.batches], simulated))


def onnx_runtime(path: Path, threads: int = 0) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load a file in ONNX Runtime; gives what runs it on a batch and returns its first output.

    Args:
        path: The file.
        threads: 0 is ONNX Runtime's own number.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if path.name == FILE_NAMES["dequantize-linear"]:
        # Otherwise onnxruntime rounds the activations to 8 bits.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        return torch.from_numpy(outputs[0])

    return run


def _export(
    out: Path,
    checkpoint: Checkpoint,
    reference: Reference,
    written: Mapping[str, _Written],
    roundings: Mapping[Flavor, Rounding],
    asked: InputGrid,
) -> Export:
    return Export(
        directory=out,
        files={flavor: name for flavor, name in FILE_NAMES.items() if flavor in written},
        bytes={"float checkpoint": checkpoint.verified.float_bytes} | {f: one.bytes for f, one in written.items()},
        layers={flavor: one.layers for flavor, one in written.items()},
        sentences=sum(len(next(iter(batch.values()))) for batch in reference.batches),
        checkpoint_metrics=reference.metrics,
        proofs={flavor: one.proof for flavor, one in written.items()},
        activation_bits=asked.bits,
        compared=reference.compared,
        activations={flavor: _in_words(rounding) for flavor, rounding in roundings.items()},
    )


def _in_words(rounding: Rounding) -> str:
    ranges = f", ranges {rounding.source}" if rounding.source else ""
    return f"{rounding.grid.scale}, {rounding.grid.bits} bits{ranges}, for {rounding.target}"
