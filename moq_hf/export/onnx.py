"""`export_onnx`: a packed checkpoint as ONNX models with integer weights, and the proof that they answer the same."""

import contextlib
import importlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..config import MoQConfig
from ..errors import MoQError, check_choice, explained, require, write_json
from ..grid import InputGrid, InputScale
from ..model.inventory import Inventory
from ..packed.files import new_path, staged
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
from .onnx_rewrite import (
    INT8_SCALES,
    OPSET,
    TARGETS,
    Flavor,
    Rewritten,
    Rounding,
    Target,
    Traced,
    multiplies_integers,
    rewrite,
    target_here,
    unused_weights,
)

logger = logging.getLogger(__name__)

REPORT_NAME = "moq_export.json"
# A protobuf file may not have 2 GB, and a large one loads faster when its weights are
# mapped.
EXTERNAL_DATA_ABOVE = 10**9


@dataclass(frozen=True)
class Export:
    """The files that `export_onnx` wrote, and how they compare.

    Attributes:
        directory: Where.
        compared: What the models answered: "sentences" or "pictures".
        sentences: How many of them.
        activation_bits: Of the int8 flavor.
        checkpoint_metrics: Of the checkpoint in PyTorch, as it was evaluated.
        checkpoint_inputs: How inputs were rounded there, in words; empty for floats.
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
    checkpoint_inputs: str
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
        evaluated = self.checkpoint_inputs
        lines = [f"checkpoint: activations {evaluated or 'in float'}, as evaluated"]
        lines += [
            f"{flavor}: activations {words}"
            for flavor, words in self.activations.items()
        ]
        if evaluated:
            lines += [
                f"{flavor}: differs by {proof.difference_in_float:.2e} from the checkpoint with activations in float"
                for flavor, proof in self.proofs.items()
                if flavor not in self.activations
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
            weight-only and int8, or with `names="hub"` all that have a name there, but
            none that would multiply floats alone where integers are its purpose.
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
        tolerance: Largest difference that the outputs of float and weight-only may have
            from the checkpoint's with inputs in float.

    Returns:
        Sizes, and the proof of each flavor.

    Raises:
        MoQError: The checkpoint is damaged or of another kind, `out` holds something,
            the differences are too large, the data does not fit, or onnx, onnxscript or
            onnxruntime are not installed.
    """
    check_choice("names", names, NAMED)
    named = tuple(dict.fromkeys(file.flavor for file in NAMED[names].values()))
    is_default = flavors is None
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
    # A folder that cannot be exported is refused before anything is to be installed.
    checkpoint = load_checkpoint(Path(directory))
    require("onnx", "onnxruntime", "onnxscript")
    reference = Reference(checkpoint, data, max_length)
    config = MoQConfig.from_dict(checkpoint.verified.state["config"])
    trained = config.activations.grid
    grid = grid_of("int8", trained, activation_bits, activation_scale)
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
        checkpoint_inputs=config.inputs_in_words if reference.rounds else "",
        bytes={"float checkpoint": checkpoint.verified.float_bytes},
        files={},
        layers={},
        proofs={},
        activations={},
        left_out={},
    )
    graph = traced(checkpoint.model, reference.batches[0])
    with staged(place) as folder:
        folder.mkdir()
        for key, file in progress(files.items(), "export"):
            flavor = file.flavor
            rounding = None
            if flavor in ("int8", "nbits", "qdq"):
                rounding = rounding_of(
                    checkpoint,
                    reference,
                    flavor,
                    file.target or target,
                    activation_bits,
                    activation_scale,
                )
            with quiet():
                rewritten = rewrite(graph, checkpoint, flavor, rounding)
            path = folder / file.path.format(bits=_widest(rewritten))
            name = path.relative_to(folder).as_posix()
            try:
                check_possible(file, name, has_cache)
                if rounding is not None:
                    _check_integers(rewritten, flavor, is_default)
            except MoQError as error:
                found.left_out[name] = str(error)
                continue
            path.parent.mkdir(exist_ok=True)
            found.files[key] = name
            found.layers[key] = rewritten.stored
            found.bytes[key] = _write_model(rewritten.model, path)
            if rounding is not None:
                found.activations[key] = str(rounding)
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
                rounded = 0.0 if rounding is None else 2 * proof.difference_in_float
                batch = reference.batches[0]
                _check_cache(path, checkpoint.model, batch, tolerance + rounded)
            # Without rounded inputs the model computes what the checkpoint does with
            # inputs in float, so that a large difference is a fault. OpenVINO rounds
            # them by itself.
            is_rounded = rounding is not None or is_openvino
            if not is_rounded and not proof.difference_in_float <= tolerance:
                raise MoQError(
                    f"the {flavor} model's outputs differ by {proof.difference_in_float:.3g} from the checkpoint's, "
                    f"more than the tolerance of {tolerance:g}: nothing is written to {out}"
                )
        _write_rest(folder, checkpoint, found, tolerance)
        if names == "hub":
            write_beside(Path(directory), folder, found.readers_table())
    return found


def grid_of(
    flavor: Flavor,
    trained: InputGrid | None,
    bits: int | None,
    scale: InputScale | None,
) -> InputGrid:
    """How a flavor rounds inputs: for int8 as asked for, else as trained, as far as the flavor can.

    ONNX Runtime's integer product takes one zero point for all tokens, so inputs that were
    trained with one for each are rounded around zero.

    Args:
        flavor: "int8", "nbits" or "qdq".
        trained: The grid in training; None for inputs in float.
        bits: Of int8, or None.
        scale: Of int8, or None.

    Raises:
        MoQError: Bits or a scale that int8 does not have.
    """
    grid = InputGrid(8, "per_block")
    if flavor == "nbits":
        return grid
    trained = trained or grid
    if flavor == "qdq":
        grid = InputGrid(8, "static")
        return replace(trained, bits=8) if trained.scale == "static" else grid
    if trained.scale == "per_token":
        trained = replace(trained, symmetric=True)
    grid = trained if trained.scale in INT8_SCALES else InputGrid(8, "per_tensor")
    if bits is not None:
        grid = replace(grid, bits=bits)
    if scale not in (None, grid.scale):
        grid = InputGrid(grid.bits, scale)
    check_choice("activation_bits", grid.bits, range(2, 9))
    check_choice("activation_scale", grid.scale, INT8_SCALES)
    return grid


def _widest(rewritten: Rewritten) -> int:
    """Bits of the widest layer that multiplies integers; 8 where there is none."""
    kinds = [rewritten.stored[name] for name in rewritten.rounded]
    return max((int(kind[-1]) for kind in kinds), default=8)


def rounding_of(
    checkpoint: Checkpoint,
    reference: Reference,
    flavor: Flavor,
    target: Target,
    bits: int | None = None,
    scale: InputScale | None = None,
) -> Rounding:
    """How a flavor rounds the inputs of each layer; see `grid_of`.

    Raises:
        MoQError: Bits or a scale that int8 does not have.
    """
    verified = checkpoint.verified
    config = MoQConfig.from_dict(verified.state["config"])
    grid = grid_of(flavor, config.activations.grid, bits, scale)
    wide = Inventory.of(checkpoint.model).wide
    saved = verified.state["input_ranges"]
    # Without a run they are from examples given to quantize_model, or from a loop of the user's own.
    source = "as saved" if verified.state["step"] is None else "trained"
    own: dict[str, InputGrid | None] = {}
    unknown: dict[str, InputGrid] = {}
    known = {}
    for name, weight in checkpoint.weights.items():
        if flavor == "nbits" or not multiplies_integers(verified.layers[name], weight):
            continue
        of_layer = config.input_grid_of(name, wide)
        stays_float = config.rounds_inputs and of_layer is None
        found = None if stays_float else grid_of(flavor, of_layer, bits, scale)
        if found != grid:
            own[name] = found
        if found is None or found.scale != "static":
            continue
        if name in saved:
            known[name] = saved[name]
        else:
            unknown[name] = found
    dtypes = {name: checkpoint.input_dtype(name) for name in known}
    if not unknown:
        source = source if known else ""
        return Rounding(grid, known, source, target, own, dtypes)
    logger.warning(
        "moq_hf: no ranges of the activations were trained%s: they are those of the %s compared; train with "
        "activations, or compare on data like that to be served",
        f" in {', '.join(unknown)}" if known else "",
        reference.compared,
    )
    ranges = known | reference.input_ranges(unknown)
    source = f"partly {source}" if known else "measured"
    return Rounding(grid, ranges, source, target, own, dtypes)


def _check_integers(rewritten: Rewritten, flavor: Flavor, is_default: bool) -> None:
    """Warn of a model whose layers all multiply floats.

    Raises:
        MoQError: Nobody asked for it by name.
    """
    if rewritten.rounded:
        return
    why = (
        "all layers have more than 8 bits, are convolutions, or have groups (group_size) that it does not take: int8 "
        "and qdq take none, nbits multiples of 32"
    )
    if is_default:
        raise MoQError(f"it would multiply no integers, and be no faster: {why}")
    logger.warning("moq_hf: the %s model multiplies no integers: %s", flavor, why)


def onnx_runtime(
    path: Path, threads: int = 0
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load a file in ONNX Runtime; returns a function from a batch to the first output.

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
    """Check that a decoder gives the same answer for the last token with its cache and without.

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
            f"{path.name}: answers with the key-value cache differ by {difference:.3g} from those without: this class "
            "of models has another cache than the export knows"
        )


def _write_rest(
    folder: Path, checkpoint: Checkpoint, found: Export, tolerance: float
) -> None:
    """Write the config without its quantization, the tokenizer or image processor, and the report."""
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


def _write_model(model: Any, path: Path) -> int:
    """Write a graph; gives the bytes of its files.

    Args:
        model: The graph.
        path: The file; one that ends in .xml is in OpenVINO's format, with another one
            beside it.
    """
    import onnx_ir as ir

    weights = model.graph.initializers.values()
    size = sum(value.const_value.nbytes for value in weights)
    beside = path.with_name(f"{path.name}{DATA_SUFFIX}")
    is_large = size > EXTERNAL_DATA_ABOVE
    ir.save(model, path, external_data=beside.name if is_large else None)
    if path.suffix == ".xml":
        import openvino

        # It knows the format of a file by its content.
        openvino.save_model(openvino.convert_model(path), path, compress_to_fp16=False)
        beside.unlink(missing_ok=True)
        beside = path.with_suffix(".bin")
    return sum(file.stat().st_size for file in (path, beside) if file.exists())


def traced(model: Any, example: Mapping[str, Tensor]) -> Traced:
    """The graph of a model whose examples and tokens may be any number; pictures keep their size.

    Args:
        model: The model.
        example: Inputs, int64 `[examples, tokens]`, or float32 `[examples, channels,
            height, width]`.

    Raises:
        MoQError: torch.onnx.export cannot export the model.
    """
    inputs = {
        name: (tensor[:2] if tensor.dim() > 2 else tensor[:2, :16]).contiguous()
        for name, tensor in example.items()
    }
    given: dict[str, Any] = inputs
    names = list(inputs)
    dynamic: dict[str, Any] = {
        name: {0: "batch"} if tensor.dim() > 2 else {0: "batch", 1: "sequence"}
        for name, tensor in inputs.items()
    }
    called: set[nn.Module] = set()
    cannot = f"torch.onnx.export cannot export {type(model).__name__}"
    with explained(cannot), torch.no_grad(), quiet(), contextlib.ExitStack() as tracing:
        if decoder.has_cache(model):
            given, names, dynamic = decoder.example_of(model, inputs["input_ids"])
            tracing.enter_context(decoder.with_cache(model))
        hook = register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            outputs = list(model(**given))
        finally:
            hook.remove()
        try:
            program: Any = torch.onnx.export(
                model,
                (),
                kwargs=given,
                dynamic_shapes=dynamic,
                input_names=names,
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            # Its own text is advice on how to report the fault.
            raise error.__cause__ or error from None
    layers = [name for name, module in model.named_modules() if module in called]
    return Traced(program.model, unused_weights(program.exported_program), layers)


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
