"""`moq_state.json`: what it holds, how it is written, and how it is read and checked."""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import MoQError, show
from ..inputs import ranges_of
from ..quant_linear import QuantLayer
from ..rows import parameter_of
from ..training.controller import MoQController
from ..version import __version__
from .files import read_document

STATE_NAME = "moq_state.json"
MAX_PACKED_BITS = 8


@dataclass(frozen=True)
class StoredLayer:
    """How one quantized layer lies in a packed checkpoint.

    Attributes:
        kind: What the layer is; see `rows`.
        bits: 1 to 16, or 32 for a layer that was not quantized yet.
        stored: "packed" (bits per weight), "int8" (one byte per weight), "dense" (floats on the grid) or "float".
        shape: Rows and columns of the weight as it is quantized; a conv1d has its transpose in the file.
        scales: Rows and columns of the scale; [0, 0] for float.
        symmetric: Whether the grid is.
        bytes: What the weight takes in the file: codes, scales and zero points.
        bytes_before: What the float weight took.
        max_error: Largest distance of a float weight from its stored value, in quantization steps.
        group: Name in the config groups of compressed-tensors; None if dense or float.
        grid: Scales and zero points of a dense layer, base64 of float32 and int32, else None.
        full: Whether codes reach -2^(bits-1) and scales have a sign.
        tied: Modules that loading ties to this one's weight; the file has at most their scales and zero points.
        matrices: Names of packed experts' matrices in the files, as the rows of `shape` come; None for any other layer.
    """

    kind: str
    bits: int
    stored: str
    shape: tuple[int, int]
    scales: tuple[int, int]
    symmetric: bool
    bytes: int
    bytes_before: int
    max_error: float
    group: str | None = None
    grid: tuple[str, str | None] | None = None
    full: bool = False
    tied: tuple[str, ...] = ()
    matrices: tuple[str, ...] | None = None


def state_of(
    layers: Mapping[str, QuantLayer],
    stored: Mapping[str, StoredLayer],
    controller: MoQController | None,
) -> dict[str, Any]:
    """What `moq_state.json` holds of a model and its run."""
    import compressed_tensors
    import transformers

    versions = {
        "moq_hf": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "compressed_tensors": compressed_tensors.__version__,
        "python": platform.python_version(),
    }
    config = next(iter(layers.values())).moq.config
    return {
        "format": 1,
        "versions": versions,
        "config": None if config is None else shareable(config.to_dict()),
        "input_ranges": ranges_of({n: layer.moq.inputs for n, layer in layers.items() if layer.moq.inputs is not None}),
        "step": None if controller is None else controller.schedule.steps,
        "history": [] if controller is None else [switch._asdict() for switch in controller.history],
        "choice": None if controller is None or controller.choice is None else controller.choice.to_dict(),
        "layers": {name: asdict(layer) for name, layer in stored.items()},
    }


def shareable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the path of a teacher on this machine; its Hub id stays.

    >>> shareable({"seed": 1, "distillation": {"teacher": "/srv/somebody/teacher", "temperature": 2.0}})
    {'seed': 1, 'distillation': {'teacher': None, 'temperature': 2.0}}
    """
    return {**config, "distillation": {**config["distillation"], "teacher": hub_id(config["distillation"]["teacher"])}}


def without_paths(text: str) -> str:
    """A text without the paths in it.

    >>> without_paths("no such file: '/srv/somebody/model/config.json'")
    "no such file: '...'"
    """
    return re.sub(r"(?<![\w.:/])(/[^\s/'\",;:()]+){2,}/?", "...", text)


def hub_id(name: str | None) -> str | None:
    """The Hub id that a model was loaded from, or None: a path of one's machine is nobody else's business.

    >>> hub_id("google-bert/bert-base-cased"), hub_id("/srv/somebody/bert")
    ('google-bert/bert-base-cased', None)
    """
    name = name or ""
    return name if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) and not Path(name).exists() else None


def owner_of(tensor: str, modules: Mapping[str, str]) -> tuple[str, str]:
    """The module of a tensor in the files, and the last part of its name.

    >>> owner_of("vision.layers.0.weight_packed", {"vision.layers.0": "model.vision.layers.0"})
    ('model.vision.layers.0', 'weight_packed')
    """
    owner, _, part = tensor.rpartition(".")
    return modules.get(owner, owner), part


class Places:
    """Which layer each tensor in the files belongs to.

    Args:
        layers: By name.
        state: The content of `moq_state.json`.
    """

    def __init__(self, layers: Mapping[str, StoredLayer], state: Mapping[str, Any]) -> None:
        self._modules = {there: name for name, there in (state.get("names") or {}).items()}
        self._matrices = {matrix: name for name, layer in layers.items() for matrix in layer.matrices or ()}
        self._parameters = {name for name, layer in layers.items() if parameter_of(name, layer.kind) == name}

    def of(self, tensor: str) -> tuple[str, str, str]:
        """The names of a tensor's layer and of the matrix in it, and the last part of the tensor's own.

        But for packed experts the matrix is the layer itself. For a tensor of no layer both are its module.
        """
        if tensor in self._parameters:
            return tensor, tensor, "weight"
        owner, part = owner_of(tensor, self._modules)
        return self._matrices.get(owner, owner), owner, part


def record_metrics(
    directory: str | os.PathLike[str], metrics: Mapping[str, Any], float_metrics: Mapping[str, Any] | None = None
) -> None:
    """Put figures that came after saving into the `moq_state.json` of a packed checkpoint.

    Args:
        directory: What `save_quantized` wrote.
        metrics: Figures by name, in the place of those that are there.
        float_metrics: Those of a model that was trained in float; None leaves what is there.

    Raises:
        MoQError: There is no such file, or it is damaged or cannot be written.
    """
    folder = Path(directory)
    state = read_state(folder)
    state["metrics"] = clean_metrics(metrics)
    if float_metrics is not None:
        state["float_metrics"] = clean_metrics(float_metrics)
    try:
        write_state(folder, state)
    except OSError as error:
        raise MoQError(f"cannot write {folder / STATE_NAME}: {error}") from error


def clean_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as JSON has them: finite numbers as they are, others as null, anything else as text.

    >>> clean_metrics({"f1": torch.tensor(0.5), "odd": float("nan"), "matrix": [1, 2]})
    {'f1': 0.5, 'odd': None, 'matrix': '[1, 2]'}
    """
    clean: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, (bool, int, str)) or value is None:
            clean[name] = value
            continue
        try:
            clean[name] = float(value) if math.isfinite(float(value)) else None
        except (TypeError, ValueError):
            clean[name] = str(value)
    return clean


def sha256(data: bytes) -> str:
    """A checksum of bytes, as text."""
    return hashlib.sha256(data).hexdigest()


def _canonical(state: Mapping[str, Any]) -> bytes:
    return json.dumps({key: value for key, value in state.items() if key != "digest"}, sort_keys=True).encode()


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `moq_state.json` with its digest, whole or not at all."""
    state["digest"] = sha256(_canonical(state))
    temporary = folder / f".{STATE_NAME}"
    temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / STATE_NAME)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `moq_state.json`, its digest and format checked.

    Raises:
        MoQError: It is missing, damaged, or of another format.
    """
    if not folder.is_dir():
        raise MoQError(f"{folder} is not a directory")
    path = folder / STATE_NAME
    state: dict[str, Any] = read_document(path).value
    try:
        digest = sha256(_canonical(state))
    except RecursionError:
        digest = None
    if digest is None or state.get("digest") != digest:
        raise MoQError(f"{path} is damaged: its digest does not fit its content")
    if state.get("format") != 1:
        versions = state.get("versions")
        writer = versions.get("moq_hf") if isinstance(versions, dict) else None
        raise MoQError(f"{path} is of format {show(state.get('format'))}, written by moq_hf {show(writer)}: update")
    return state
