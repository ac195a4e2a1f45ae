"""The engines that `moq-hf bench` compares, and the files that each of them loads."""

import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import one_line
from .onnx import FILE_NAMES, export_onnx
from .onnx_graph import weights_beside
from .onnx_integers import target_here
from .onnx_layers import FLAVORS

# What each model but PyTorch's is in, among those of the export; the flavors with the checkpoint's integers.
_FILES = {str(flavor): name for flavor, name in FILE_NAMES.items()}
_FILES["quantize_dynamic"] = "model_quantize_dynamic.onnx"
_OURS = FILE_NAMES.keys() - {"float"}


@dataclass(frozen=True)
class Engine:
    """A runtime and what it loads.

    Attributes:
        runtime: "PyTorch", "ONNX" (Runtime) or "OpenVINO".
        model: "float", "bf16", "packed", "quantize_dynamic", or a flavor of the export.
        kind: What `bench_worker.py` calls it.
    """

    runtime: str
    model: str
    kind: str

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return f"{self.runtime} {self.model}"

    @property
    def ours(self) -> bool:
        """Whether it loads the checkpoint's integers; the others are there to compare with."""
        return self.model in _OURS

    def to_deploy(self, activation_bits: int) -> str:
        """The file, how to make it, and its runtime; of one of ours."""
        bits = f" --activation_bits {activation_bits}" if self.model == "int8" else ""
        runtime = "ONNX Runtime" if self.runtime == "ONNX" else self.runtime
        return f"{_FILES[self.model]} with {runtime} (moq-hf export --to onnx --flavors {self.model}{bits})"


ENGINES = (
    Engine("PyTorch", "float", "torch"),
    Engine("PyTorch", "bf16", "bf16"),
    Engine("ONNX", "float", "onnx"),
    Engine("ONNX", "quantize_dynamic", "onnx"),
    Engine("ONNX", "weight-only", "onnx"),
    Engine("ONNX", "int8", "onnx"),
    Engine("OpenVINO", "float", "openvino"),
    Engine("OpenVINO", "weight-only", "openvino"),
    Engine("OpenVINO", "dequantize-linear", "openvino"),
    Engine("OpenVINO", "int8", "openvino"),
    Engine("OpenVINO", "qdq", "openvino"),
)
NAMED = {engine.name: engine for engine in ENGINES}
# What speeds are divided by.
FLOAT, ONNX_FLOAT = "PyTorch float", "ONNX float"
# Instructions with which PyTorch computes in bf16.
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class Prepared:
    """What the engines load.

    Attributes:
        paths: By the engine's name.
        missing: Why an engine is left out; "OpenVINO" stands for all of it.
        activation_bits: Of the int8 flavor.
    """

    paths: dict[str, Path]
    missing: dict[str, str]
    activation_bits: int


def prepare(directory: Path, model: Any, out: Path, instructions: str, activation_bits: int | None) -> Prepared:
    """Write what the engines load.

    Args:
        directory: The packed checkpoint.
        model: The same with float weights.
        out: The folder to write to.
        instructions: Those of the processor, as `machine` says them.
        activation_bits: Of the int8 flavor; None is the export's default.

    Raises:
        MoQError: The checkpoint cannot be exported.
    """
    missing: dict[str, str] = {}
    if not _BF16.intersection(instructions.split()):
        missing["PyTorch bf16"] = "left out: this processor is not known to have bf16 instructions"
    if target_here() != "vnni":
        missing["OpenVINO qdq"] = "left out: this processor does not multiply signed integers of 8 bits exactly"
    if version_of("openvino") is None:
        missing["OpenVINO"] = "left out: not installed (pip install 'moq_hf[openvino]')"
    engines = [engine for engine in ENGINES if missing.keys().isdisjoint((engine.name, engine.runtime))]
    flavors = [flavor for flavor in FLAVORS if any(engine.model == flavor for engine in engines)]
    model.save_pretrained(out / "float")
    onnx = out / "onnx"
    written = export_onnx(directory, onnx, flavors=flavors, activation_bits=activation_bits, tolerance=math.inf)
    try:
        quantize_dynamic(onnx / _FILES["float"], onnx / _FILES["quantize_dynamic"])
    # A peer's failure, of whatever kind, is a line of the table.
    except Exception as error:
        missing["ONNX quantize_dynamic"] = f"failed: {one_line(error, named=True)}"
    paths = {engine.name: onnx / _FILES[engine.model] for engine in engines if engine.runtime != "PyTorch"}
    paths |= {"PyTorch float": out / "float", "PyTorch bf16": out / "float", "PyTorch packed": directory}
    names = [engine.name for engine in engines if engine.name not in missing]
    return Prepared({name: paths[name] for name in names}, missing, written.activation_bits)


def quantize_dynamic(source: Path, target: Path) -> None:
    """ONNX Runtime's own int8 of a float model: weights in QInt8 per channel, activations as they come."""
    import onnx
    from onnxruntime import quantization

    model = onnx.load(source)
    # It transposes weights and leaves their shapes here as they were, which it then calls an error.
    del model.graph.value_info[:]
    # Otherwise it warns that the model might be prepared first, which changes nothing for a model of ours.
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    quantization.quantize_dynamic(
        model,
        target,
        per_channel=True,
        weight_type=quantization.QuantType.QInt8,
        use_external_data_format=(source.parent / weights_beside(source.name)).exists(),
    )


def bytes_of(path: Path) -> int:
    """Of the weights in a folder, or of an ONNX model and the file beside it."""
    files = path.glob("*.safetensors") if path.is_dir() else (path, path.with_name(weights_beside(path.name)))
    return sum(file.stat().st_size for file in files if file.exists())


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed.

    >>> version_of("a-package-of-nobody")
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
