"""`export_onnx`: a packed checkpoint as ONNX models with integer weights, and the proof that they answer the same."""

import contextlib
import copy
import importlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..config import MoQConfig
from ..errors import MoQError, check_choice, explained, require, write_json
from ..grid import LEAST_INPUT_BLOCK, InputGrid, InputScale
from ..packed.files import new_path, staged
from ..quantizer import Quantized
from ..text import markdown_table, progress, table
from . import decoder
from .compare import (
    SENTENCES,
    TOLERANCE,
    Checkpoint,
    Comparison,
    Data,
    Reference,
    load_checkpoint,
    most_tokens,
)
from .file_names import (
    DATA_SUFFIX,
    NAMED,
    check_possible,
    write_beside,
)
from .onnx_layers import (
    GUARD,
    INT8_SCALES,
    OPSET,
    TARGETS,
    Flavor,
    OnnxConvolution,
    OnnxEmbedding,
    OnnxInt8Linear,
    OnnxLinear,
    OnnxNBitsLinear,
    OnnxQdqLinear,
    OnnxTiedLinear,
    Rounding,
    Target,
    is_exact_signed,
    target_here,
)

logger = logging.getLogger(__name__)

REPORT_NAME = "moq_export.json"
# One file may not have 2 GB; what comes near is loaded faster from a file that is
# mapped.
EXTERNAL_DATA_ABOVE = 10**9

# The layers that multiply integers.
_WITH_INTEGERS = {OnnxInt8Linear, OnnxNBitsLinear, OnnxQdqLinear}
# A zero is added to the answers. It is element 0 of one, or where the sum is wrong
# element 1, which fails.
_GUARD = """<ir_version: 10, opset_import: ["" : 21]>
guard (float[1, 1] answers) => (float[1, 1] checked) {
  activations = Constant <value = uint8[1, 4] {255, 255, 255, 255}> ()
  weights = Constant <value = int8[4, 1] {127, 127, 127, 127}> ()
  expected = Constant <value = int32[1, 1] {129540}> ()
  zero = Constant <value = float[1] {0.0}> ()
  sum = MatMulInteger (activations, weights)
  right = Equal (sum, expected)
  wrong = Not (right)
  index = Cast <to = 7> (wrong)
  nothing = Gather (zero, index)
  checked = Add (answers, nothing)
}"""


@dataclass(frozen=True)
class Export:
    """What `export_onnx` wrote.

    Attributes:
        directory: Where.
        compared: What the models answered: "sentences" or "pictures".
        sentences: How many of them.
        activation_bits: Of the int8 flavor.
        checkpoint_metrics: Of the checkpoint in PyTorch.
        bytes: Of each flavor's files; "float checkpoint" is what the float weights
            take.
        files: The file of each flavor; where a flavor has two, the second one's key
            says more, as "int8 for VNNI".
        layers: How each quantized layer is stored in each flavor: "int4", "int8",
            "uint8", "float".
        proofs: By flavor.
        activations: Of the flavors that round them: how, and for which CPUs.
        left_out: Why a file was not written, by its path.
    """

    directory: Path
    compared: str
    sentences: int
    activation_bits: int
    checkpoint_metrics: Mapping[str, float]
    bytes: dict[str, int]
    files: dict[str, str]
    layers: dict[str, Mapping[str, str]]
    proofs: dict[str, Comparison]
    activations: dict[str, str]
    left_out: dict[str, str]

    def table(self) -> str:
        """A line per flavor, for a terminal."""
        where = f"{self.sentences} {self.compared} compared; {self.directory}"
        return "\n".join([table(self._rows()), "", *self._notes(), where])

    def readers_table(self) -> str:
        """A line per file that others look for, with who they are, in Markdown."""
        readers = ["looked for by", ""]
        readers += [NAMED["hub"][key].readers for key in self.proofs]
        rows = [
            [*row, reader] for row, reader in zip(self._rows(), readers, strict=True)
        ]
        notes = [f"- {note}" for note in self._notes()]
        return "\n".join([markdown_table(rows), "", *notes])

    def _rows(self) -> list[list[str]]:
        metrics = self.checkpoint_metrics
        rows = [
            [
                "flavor",
                "file",
                "bytes",
                "of float",
                "largest difference",
                "agreement",
                *metrics,
            ],
            ["checkpoint", *[""] * 5, *(f"{value:.4f}" for value in metrics.values())],
        ]
        for flavor, proof in self.proofs.items():
            size = self.bytes[flavor]
            share = size / self.bytes["float checkpoint"]
            rows.append(
                [
                    flavor,
                    self.files[flavor],
                    f"{size:,}",
                    f"{share:.3f}",
                    *proof.cells(),
                ]
            )
        return rows

    def _notes(self) -> list[str]:
        lines = [
            f"{flavor}: activations {words}"
            for flavor, words in self.activations.items()
        ]
        lines += [f"{path} is left out: {why}" for path, why in self.left_out.items()]
        if "weight-only" in self.files:
            lines.append(
                "weight-only: activations in float; OpenVINO rounds them, "
                'unless compiled with {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": "f32"}'
            )
        return lines


def export_onnx(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    flavors: Sequence[Flavor] | None = None,
    names: Literal["own", "hub"] = "own",
    activation_bits: int | None = None,
    activation_scale: InputScale | None = None,
    cpu: Target | Literal["auto"] = "auto",
    data: Data = SENTENCES,
    max_length: int = 128,
    tolerance: float = TOLERANCE,
) -> Export:
    """Write a packed checkpoint as ONNX models, after proving that they answer as it does.

    The folder holds a model per flavor, the model's `config.json`, its tokenizer and
    `moq_export.json`; plain onnxruntime and `optimum.onnxruntime` load it. It appears
    when everything is proven, or not at all.

    Args:
        directory: What `save_quantized` wrote: a classifier of sequences, tokens or
            images, a decoder, or a base model.
        out: The folder to make, or an empty one.
        flavors: Some of "float", "weight-only", "int8", "nbits" and "qdq"; None is
            weight-only and int8, or with `names="hub"` all that have a name there.
        names: "hub" names the files as transformers.js, Sentence Transformers,
            text-embeddings-inference and fastembed look for them, writes OpenVINO's
            format beside ONNX's where it is installed, and a card that says which file
            is which.
        activation_bits: Of the int8 flavor, 2 to 8; None is what the model was trained
            for, else 8. qdq has 8.
        activation_scale: Of the int8 flavor; None is what the model was trained for,
            else "per_tensor". qdq has "static". Where no range was trained, static
            takes the largest magnitudes that `data` gives.
        cpu: What int8 is made for: "vnni", "avx2", or "auto", which is what suits this
            machine. qdq is for "vnni", and with `names="hub"` there is a file for each.
        data: Compared on; a model of pictures answers random ones instead.
        max_length: Tokens of an example, at most.
        tolerance: Largest difference of the outputs that float and weight-only may
            have.

    Returns:
        Sizes, and the proof of each flavor.

    Raises:
        MoQError: The checkpoint is damaged or of another kind, `out` holds something,
            the differences are too large, the data does not fit, or onnx, onnxscript or
            onnxruntime are not installed.
    """
    require("onnx", "onnxruntime", "onnxscript")
    check_choice("names", names, NAMED)
    named = tuple(dict.fromkeys(file.flavor for file in NAMED[names].values()))
    if flavors is None:
        flavors = named if names == "hub" else ("weight-only", "int8")
    for flavor in flavors or (None,):
        check_choice("flavors", flavor, named)
    check_choice("cpu", cpu, ("auto", *TARGETS))
    target = target_here() if cpu == "auto" else cpu
    if names == "own" and "qdq" in flavors and target != "vnni":
        raise MoQError(
            "qdq multiplies signed integers of 8 bits, which CPUs without VNNI do not do exactly: leave it out"
        )
    place = new_path(out)
    checkpoint = load_checkpoint(Path(directory))
    reference = Reference(checkpoint, data, max_length)
    grid = _grid_of_int8(checkpoint, activation_bits, activation_scale)
    has_cache = decoder.has_cache(checkpoint.model)
    files = {
        key: file
        for flavor in flavors
        for key, file in NAMED[names].items()
        if file.flavor == flavor
    }
    found = Export(
        directory=Path(out),
        compared=reference.compared,
        sentences=reference.size,
        activation_bits=grid.bits,
        checkpoint_metrics=reference.metrics,
        bytes={"float checkpoint": checkpoint.verified.float_bytes},
        files={},
        layers={},
        proofs={},
        activations={},
        left_out={},
    )
    grids: dict[Flavor, InputGrid] = {
        "int8": grid,
        "nbits": InputGrid(8, "per_block"),
        "qdq": InputGrid(8, "static"),
    }
    with staged(place) as folder:
        folder.mkdir()
        for key, file in progress(files.items(), "export"):
            flavor = file.flavor
            rounding = None
            if flavor in grids:
                rounding = _rounding(
                    checkpoint, reference, grids[flavor], file.target or target
                )
            prepared = prepare(checkpoint, flavor, rounding)
            path = folder / file.path.format(bits=_widest(prepared))
            name = path.relative_to(folder).as_posix()
            try:
                check_possible(file, name, has_cache)
            except MoQError as error:
                found.left_out[name] = str(error)
                continue
            path.parent.mkdir(exist_ok=True)
            found.files[key] = name
            found.layers[key] = prepared.stored
            found.bytes[key] = write_model(prepared, reference.batches[0], path)
            if rounding is not None:
                found.activations[key] = str(rounding)
                _check_integers(prepared, flavor)
            is_openvino = path.suffix == ".xml"
            with explained(f"the {flavor} model cannot be run"):
                run = (openvino_runtime if is_openvino else onnx_runtime)(path)
                outputs = [
                    run(decoder.inputs_after(checkpoint.model, batch, 0))
                    for batch in reference.batches
                ]
            proof = reference.prove(outputs)
            found.proofs[key] = proof
            if has_cache:
                # Two answers, each as far as that from those without rounding.
                rounded = 0.0 if rounding is None else 2 * proof.largest_difference
                batch = reference.batches[0]
                _check_cache(path, checkpoint.model, batch, tolerance + rounded)
            # Without rounded inputs the model computes what the checkpoint does, so
            # that a large difference is a fault. OpenVINO rounds them by itself.
            is_rounded = rounding is not None or is_openvino
            if not is_rounded and not proof.largest_difference <= tolerance:
                raise MoQError(
                    f"the {flavor} model's outputs differ by {proof.largest_difference:.3g} from the checkpoint's, "
                    f"more than the tolerance of {tolerance:g}: nothing is written to {out}"
                )
        _write_rest(folder, checkpoint, found, tolerance)
        if names == "hub":
            write_beside(Path(directory), folder, found.readers_table())
    return found


def _grid_of_int8(
    checkpoint: Checkpoint, bits: int | None, scale: InputScale | None
) -> InputGrid:
    """How the int8 flavor rounds inputs: as asked for, else as trained, else by one scale for a tensor."""
    config = MoQConfig.from_dict(checkpoint.verified.state["config"])
    trained = config.activations.grid
    if not trained or trained.scale not in INT8_SCALES:
        trained = InputGrid(8, "per_tensor")
    grid = InputGrid(
        trained.bits if bits is None else bits,
        trained.scale if scale is None else scale,
    )
    check_choice("activation_bits", grid.bits, range(2, 9))
    check_choice("activation_scale", grid.scale, INT8_SCALES)
    return grid


def _widest(prepared: "Prepared") -> int:
    """Bits of the widest layer that MatMulNBits multiplies; 8 where there is none."""
    layers = prepared.model.modules()
    bits = [layer.bits for layer in layers if isinstance(layer, OnnxNBitsLinear)]
    return max(bits, default=8)


def _rounding(
    checkpoint: Checkpoint, reference: Reference, grid: InputGrid, target: Target
) -> Rounding:
    if grid.scale != "static":
        return Rounding(grid, {}, "", target)
    saved = checkpoint.verified.state["input_ranges"]
    layers = [
        name
        for name, weight in checkpoint.weights.items()
        if multiplies_integers(checkpoint.model.get_submodule(name), weight)
    ]
    trained = {name: saved[name] for name in layers if name in saved}
    unknown = [name for name in layers if name not in saved]
    if not unknown:
        return Rounding(grid, trained, "trained" if trained else "", target)
    logger.warning(
        "moq_hf: no ranges of the activations were trained%s: they are the largest magnitudes of the %s compared; "
        "train with activations, or compare on data like that to be served",
        f" in {', '.join(unknown)}" if trained else "",
        reference.compared,
    )
    source = "partly trained" if trained else "measured"
    return Rounding(grid, trained | reference.largest_inputs(unknown), source, target)


def _check_integers(prepared: "Prepared", flavor: Flavor) -> None:
    """Warn of a model whose layers all multiply floats."""
    layers = map(type, prepared.model.modules())
    if not _WITH_INTEGERS.intersection(layers):
        logger.warning(
            "moq_hf: the %s model multiplies no integers: all layers have more than 8 bits, are convolutions, or have "
            "groups (group_size) that it does not take: int8 and qdq take none, nbits multiples of 32",
            flavor,
        )


def onnx_runtime(
    path: Path, threads: int = 0
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load a file in ONNX Runtime; gives what runs it on a batch and returns its first output.

    Args:
        path: The file.
        threads: 0 is ONNX Runtime's own number.
    """
    session = _session(path, threads)

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, decoder.arrays(batch))[0])

    return run


def _session(path: Path, threads: int = 0) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        os.fspath(path), options, providers=["CPUExecutionProvider"]
    )


def openvino_runtime(
    path: Path, threads: int = 0
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load a file in OpenVINO with its defaults, as `onnx_runtime` does; where the CPU has AMX it computes in bf16."""
    import openvino

    options = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    compiled = openvino.Core().compile_model(path, "CPU", options)

    def run(batch: Mapping[str, Tensor]) -> Tensor:
        outputs = compiled(decoder.arrays(batch))
        return torch.from_numpy(outputs[0].copy())

    return run


def _check_cache(
    path: Path, model: Any, batch: Mapping[str, Tensor], tolerance: float
) -> None:
    """Check that a decoder answers the last token from its cache as it does without one.

    Raises:
        MoQError: It does not.
    """
    session = _session(path)
    # All of these tokens are seen, so that the last one is no padding.
    seen = {name: tensor[:1, :8] for name, tensor in batch.items()}
    inputs = decoder.inputs_after(model, seen, 0)
    whole = torch.from_numpy(session.run(None, decoder.arrays(inputs))[0][:, -1])
    cached = decoder.last_with_cache(model, session, seen)
    difference = float((cached - whole).abs().max())
    if not difference <= tolerance:
        raise MoQError(
            f"{path.name}: with its key-value cache the model answers otherwise by {difference:.3g}: this class of "
            "models has another cache than the export knows"
        )


def _write_rest(
    folder: Path, checkpoint: Checkpoint, found: Export, tolerance: float
) -> None:
    """Write the model's config, without its quantization, what prepares its inputs, and the report."""
    config = checkpoint.model.config
    large = {
        path.name.removesuffix(DATA_SUFFIX): 1
        for path in folder.glob(f"onnx/*{DATA_SUFFIX}")
    }
    if large:
        # In a browser transformers.js (4.3) fetches second files that it is told of.
        setattr(config, "transformers.js_config", {"use_external_data_format": large})
    config.save_pretrained(folder)
    if decoder.has_cache(checkpoint.model):
        checkpoint.model.generation_config.save_pretrained(folder)
    if checkpoint.tokenizer is not None:
        # fastembed (0.9) takes no tokenizer without a limit.
        checkpoint.tokenizer.model_max_length = most_tokens(checkpoint)
        checkpoint.tokenizer.save_pretrained(folder)
    elif checkpoint.processor is not None:
        shutil.copy(checkpoint.processor, folder)
    report = asdict(found)
    del report["directory"]
    names = ("moq_hf", "torch", "onnx", "onnxruntime")
    versions = {name: str(importlib.import_module(name).__version__) for name in names}
    report |= {"opset": OPSET, "versions": versions, "tolerance": tolerance}
    write_json(folder / REPORT_NAME, report, indent=1)


@dataclass(frozen=True)
class Prepared:
    """A model whose quantized layers emit integers while torch.onnx.export traces it.

    Attributes:
        model: The model.
        stored: What each quantized layer becomes in the file: "int4", "int8", "uint8"
            or "float".
        guarded: Whether signed weights have products with activations of 8 bits that
            may saturate.
    """

    model: Any
    stored: Mapping[str, str]
    guarded: bool


def multiplies_integers(module: nn.Module, weight: Quantized) -> bool:
    """Whether a layer can multiply integers of 8 bits: a linear one with one scale in a row."""
    return isinstance(module, nn.Linear) and weight.scale.shape[1] == 1


def _in_blocks(
    module: nn.Module, weight: Quantized, bits: int, grid: InputGrid
) -> OnnxNBitsLinear | None:
    """A layer whose weight stays packed in memory; None where its groups are not whole blocks of the kernel."""
    block = grid.beside(weight.codes.shape[1], weight.scale.shape[1]).block
    if not isinstance(module, nn.Linear) or block < LEAST_INPUT_BLOCK:
        return None
    return OnnxNBitsLinear(weight, module.bias, bits, block)


def prepare(
    checkpoint: Checkpoint, flavor: Flavor, rounding: Rounding | None = None
) -> Prepared:
    """Put layers that emit integers into a copy of the model.

    Args:
        checkpoint: Its model is not changed.
        flavor: What the layers compute.
        rounding: How inputs are rounded, for the int8 and the qdq flavor.
    """
    model = checkpoint.model
    weights = checkpoint.weights
    if flavor == "float":
        return Prepared(model, {}, False)
    # The floats that the integers replace are not worth copying.
    replaced = {id(model.get_submodule(name).weight): None for name in weights}
    copied = copy.deepcopy(model, replaced)
    stored = dict.fromkeys(checkpoint.verified.layers, "float")
    guarded = False
    for name, weight in weights.items():
        module = copied.get_submodule(name)
        own = checkpoint.verified.layers[name]
        # Twice the numbers of E2M1 are integers of up to 12.
        bits = own.bits if own.format == "int" else 8
        stored[name] = "int4" if bits <= 4 else "int8"
        if isinstance(module, nn.Embedding):
            # Rows of Gemma's and BART's tables are multiplied with it.
            factor = torch.as_tensor(getattr(module, "embed_scale", 1.0)).item()
            embedding = OnnxEmbedding(weight, bits, factor)
            layer: nn.Module = embedding
            stored[name] = "int4" if embedding.halved else "int8"
            for other in checkpoint.verified.layers[name].tied:
                tied = copied.get_submodule(other)
                same: nn.Module = embedding
                if not isinstance(tied, nn.Embedding):
                    same = OnnxTiedLinear(embedding, tied.bias, flavor == "nbits")
                copied.set_submodule(other, same)
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            layer = OnnxConvolution(weight, module)
        elif rounding is not None and flavor == "nbits":
            packed = _in_blocks(module, weight, bits, rounding.grid)
            layer = packed or OnnxLinear(weight, module.bias)
            if packed is not None:
                stored[name] = f"int{packed.bits}"
        elif rounding is None or not multiplies_integers(module, weight):
            layer = OnnxLinear(weight, module.bias)
        else:
            exact = is_exact_signed(weight.codes, rounding.grid.bits)
            signed = rounding.target == "vnni" or exact
            guarded |= signed and not exact
            stored[name] = "int8" if signed else "uint8"
            if flavor == "int8":
                largest = rounding.ranges.get(name)
                layer = OnnxInt8Linear(
                    weight, module.bias, rounding.grid, largest, signed
                )
            else:
                layer = OnnxQdqLinear(weight, module.bias, rounding.ranges[name])
        copied.set_submodule(name, layer)
    return Prepared(copied.eval(), stored, guarded)


def write_model(prepared: Prepared, example: Mapping[str, Tensor], path: Path) -> int:
    """Export a prepared model.

    Args:
        prepared: The model.
        example: Inputs, int64 `[examples, tokens]`, or float32 `[examples, channels,
            height, width]`.
        path: The file; one that ends in .xml is in OpenVINO's format, with another one
            beside it.

    Returns:
        The bytes of its files.

    Raises:
        MoQError: torch.onnx.export cannot export it.
    """
    import onnx_ir as ir

    with torch.no_grad(), quiet():
        few = {
            name: (tensor[:2] if tensor.dim() > 2 else tensor[:2, :16]).contiguous()
            for name, tensor in example.items()
        }
        exported = _traced(prepared.model, few)
        _pack(exported, prepared)
        _optimize(exported)
        # The float flavor is left as PyTorch exports it.
        if prepared.stored:
            _keep_sums(exported)
        if prepared.guarded:
            _guard(exported)
    size = sum(
        value.const_value.nbytes for value in exported.graph.initializers.values()
    )
    beside = path.with_name(f"{path.name}{DATA_SUFFIX}")
    ir.save(
        exported,
        path,
        external_data=beside.name if size > EXTERNAL_DATA_ABOVE else None,
    )
    if path.suffix == ".xml":
        import openvino

        # It knows the format of a file by its content.
        openvino.save_model(openvino.convert_model(path), path, compress_to_fp16=False)
        beside.unlink(missing_ok=True)
        beside = path.with_suffix(".bin")
    return sum(file.stat().st_size for file in (path, beside) if file.exists())


def _traced(model: Any, inputs: dict[str, Tensor]) -> Any:
    """The graph of a model whose examples and tokens may be any number; pictures keep their size.

    Raises:
        MoQError: The exporter of PyTorch cannot export the model.
    """
    given: dict[str, Any] = inputs
    names = list(inputs)
    dynamic: dict[str, Any] = {
        name: {0: "batch"} if tensor.dim() > 2 else {0: "batch", 1: "sequence"}
        for name, tensor in inputs.items()
    }
    cannot = f"torch.onnx.export cannot export {type(model).__name__}"
    with explained(cannot), contextlib.ExitStack() as tracing:
        if decoder.has_cache(model):
            given, names, dynamic = decoder.example_of(model, inputs["input_ids"])
            tracing.enter_context(decoder.with_cache(model))
        try:
            program = torch.onnx.export(
                model,
                (),
                kwargs=given,
                dynamic_shapes=dynamic,
                input_names=names,
                output_names=list(model(**given)),
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            # Its own text is advice on how to report the fault.
            raise error.__cause__ or error from None
    return cast(Any, program).model


def _pack(exported: Any, prepared: Prepared) -> None:
    """Make the codes of linear layers and convolutions of up to 4 bits INT4."""
    import ml_dtypes
    import onnx_ir as ir

    for name, kind in prepared.stored.items():
        layer = prepared.model.get_submodule(name)
        value = exported.graph.initializers.get(f"{name}.codes")
        if (
            value is not None
            and kind == "int4"
            and isinstance(layer, OnnxLinear | OnnxConvolution)
        ):
            codes = value.const_value.numpy().astype(ml_dtypes.int4)
            value.const_value = ir.Tensor(
                codes, dtype=ir.DataType.INT4, name=value.name
            )
            value.type = ir.TensorType(ir.DataType.INT4)


def _optimize(exported: Any) -> None:
    from onnx_ir.passes.common import (
        ClearMetadataAndDocStringPass,
        CommonSubexpressionEliminationPass,
    )
    from onnxscript.optimizer import optimize_ir

    def should_fold(node: Any) -> bool | None:
        names = [value.name for value in node.inputs if value]
        # The default would fold small integer weights into float ones.
        has_integers = any(n.endswith((".codes", ".zero_point")) for n in names)
        return False if has_integers else None

    optimize_ir(exported, should_fold=should_fold)
    CommonSubexpressionEliminationPass()(exported)
    # Stack traces, with the paths of this machine.
    ClearMetadataAndDocStringPass()(exported)


def _keep_sums(exported: Any) -> None:
    """Write the sum before a LayerNormalization as Sum.

    ONNX Runtime (1.31) fuses Add with it to SkipLayerNormalization, which takes longer
    on a CPU than both.
    """
    constants = exported.graph.initializers
    for node in exported.graph:
        if node.op_type == "LayerNormalization":
            before = node.inputs[0].producer()
            if (
                before is not None
                and before.op_type == "Add"
                and not any(v.name in constants for v in before.inputs)
            ):
                before.op_type = "Sum"


def _guard(exported: Any) -> None:
    """Let the model fail where four products 255 * 127 do not sum to 129,540, which is where pairs saturate.

    ONNX Runtime computes it once, when the model is loaded, with the kernel that
    multiplies the layers.
    """
    import onnx_ir as ir

    guard = ir.from_onnx_text(_GUARD).graph
    output = exported.graph.outputs[0]
    nodes = list(guard)
    guard.outputs.clear()
    guard.remove(nodes)
    for node in nodes:
        node.name = f"{GUARD} ({node.op_type})"
        node.outputs[0].name = f"guard.{node.outputs[0].name}"
    nodes[-1].replace_input_with(0, output)
    exported.graph.extend(nodes)
    checked = nodes[-1].outputs[0]
    checked.name = output.name
    output.name = f"{output.name}.unguarded"
    checked.shape = output.shape
    checked.type = output.type
    exported.graph.outputs[0] = checked


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's progress, and its warnings of what it decides by itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
