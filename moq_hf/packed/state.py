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
from typing import Annotated, Any, NotRequired

import torch
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from .. import serving
from ..config import Count, Flag, MoQConfig, Positive, Weight
from ..errors import MoQError, read_as, show
from ..formats.table import FORMS, has_codes
from ..inputs import ranges_of
from ..quant_linear import QuantLayer
from ..training.controller import MoQController
from ..training.resume import Range, SavedBits, Unit
from ..version import __version__
from ..weight_matrix import KINDS, parameter_of
from .files import CONFIG, read_document
from .load_check import Proof

STATE_NAME = "moq_state.json"
# Format 1 was 0.1.0's and is not read.
STATE_FORMAT = 2

# What the layout "gemma" calls the tensors of a table.
_OF_TABLES = {"embedding_quantized": "weight", "embedding_scale": "weight_scale"}

# Types of what the file holds.
Size = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


@dataclass(frozen=True)
class StoredLayer:
    """How one quantized layer lies in a packed checkpoint.

    Attributes:
        kind: What the layer is; see `weight_matrix.Kind`.
        bits: 1 to 16, or 32 for a layer that was not quantized yet.
        stored: "packed" (bits per weight), "int8" (one byte per weight), "gemma" (2, 4
            or 8 bits per weight), "dense" (floats on the grid) or "float".
        shape: Rows and columns of the weight as it is quantized; a conv1d has its
            transpose in the file.
        scales: Rows and columns of the scale; [0, 0] for float.
        symmetric: Whether the grid is.
        bytes: What the weight takes in the file: codes, scales and zero points.
        bytes_before: What the float weight took.
        group: Name in the config groups of compressed-tensors, or in `groups` of
            the state; None if dense or float.
        grid: Scales and zero points of a dense layer, base64 of float32 and int32, else
            None.
        full: Whether codes reach -2^(bits-1) and scales have a sign.
        tied: Modules that loading ties to this one's weight; the file has at most their
            scales and zero points.
        matrices: Names in the files of packed experts' matrices, in the order of the
            rows of `shape`; None for any other layer.
    """

    # A file with other keys is damaged.
    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    bits: SavedBits
    stored: Annotated[str, Field(pattern=f"^({'|'.join(FORMS)}|float)$")]
    shape: tuple[Size, Size]
    scales: tuple[Count, Count]
    symmetric: Flag
    bytes: Count
    bytes_before: Count
    group: str | None = None
    grid: tuple[Base64, Base64 | None] | None = None
    full: Flag = False
    tied: tuple[str, ...] = ()
    matrices: tuple[str, ...] | None = None

    def fault(self) -> tuple[str, str] | None:
        """The name of a value that does not go with the others, and what it must be."""
        if self.stored == "float":
            return None
        most = FORMS[self.stored].MAX_BITS
        has_grid = not has_codes(self.stored)
        if self.bits > most:
            return "bits", f"a whole number from 1 to {most}"
        for size, count in zip(self.shape, self.scales, strict=True):
            if count == 0 or size % count:
                return "scales", f"divisors of the shape {list(self.shape)}"
        if self.matrices is not None and (
            not self.matrices or self.shape[0] % len(self.matrices)
        ):
            return (
                "matrices",
                f"different names, so many that they divide {self.shape[0]} rows",
            )
        if not has_grid and self.group is None:
            return "group", "text"
        # 4 bytes each, as text of 4 letters for 3 bytes.
        length = -(-math.prod(self.scales) * 4 // 3) * 4
        if has_grid and (self.grid is None or len(self.grid[0]) != length):
            return "grid", f"{math.prod(self.scales)} values of 4 bytes in base64"
        return None


class Switched(TypedDict):
    """A block's change of precision."""

    step: Positive
    block: str
    before: SavedBits
    bits: SavedBits
    eigenvalue: Unit | None


class Counted(TypedDict):
    """How many parameters are quantized, how many there are, and how many bits they have on average."""

    quantized: Positive
    total: Positive
    mean_bits: Weight


class State(TypedDict):
    """The keys of `moq_state.json` that are checked when it is read; its digest only guards against accidents."""

    tensors: dict[str, str]
    config_json: str | None
    versions: dict[str, Any]
    config: dict[str, Any] | None
    step: Count | None
    history: list[Switched]
    layers: Annotated[dict[str, StoredLayer], Field(min_length=1)]
    names: NotRequired[dict[str, str] | None]
    input_ranges: NotRequired[dict[str, Range] | None]
    metrics: NotRequired[dict[str, Any] | None]
    float_metrics: NotRequired[dict[str, Any] | None]
    parameters: Counted
    float_bytes: Positive
    files: NotRequired[list[str]]
    needs: NotRequired[dict[str, str]]
    groups: NotRequired[dict[str, Any] | None]
    rounds_inputs: NotRequired[Flag]
    proof: NotRequired[Proof | None]


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
    inputs = {
        name: layer.moq.inputs
        for name, layer in layers.items()
        if layer.moq.inputs is not None
    }
    step = None
    history: list[dict[str, Any]] = []
    choice = None
    if controller is not None:
        step = controller.schedule.steps
        history = [switch._asdict() for switch in controller.history]
        choice = None if controller.choice is None else asdict(controller.choice)
    return {
        "format": STATE_FORMAT,
        "versions": versions,
        "config": None if config is None else shareable(config.to_dict()),
        "input_ranges": ranges_of(inputs),
        "step": step,
        "history": history,
        "choice": choice,
        "layers": {name: asdict(layer) for name, layer in stored.items()},
    }


def shareable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the path of a teacher on this machine; its Hub id stays.

    >>> shareable({"seed": 1, "distillation": {"teacher": "/srv/somebody/teacher", "temperature": 2.0}})
    {'seed': 1, 'distillation': {'teacher': None, 'temperature': 2.0}}
    """
    distillation = config["distillation"]
    teacher = hub_id(distillation["teacher"])
    return {**config, "distillation": {**distillation, "teacher": teacher}}


def without_paths(text: str) -> str:
    """A text without the paths in it.

    >>> without_paths("no such file: '/srv/somebody/model/config.json'")
    "no such file: '...'"
    """
    return re.sub(r"(?<![\w.:/])(/[^\s/'\",;:()]+){2,}/?", "...", text)


def hub_id(name: str | None) -> str | None:
    """The Hub id that a model was loaded from; None for a path, which is nobody else's business.

    >>> hub_id("google-bert/bert-base-cased"), hub_id("/srv/somebody/bert")
    ('google-bert/bert-base-cased', None)
    """
    name = name or ""
    looks_like_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)
    return name if looks_like_id and not Path(name).exists() else None


class Places:
    """Which layer each tensor in the files belongs to.

    Args:
        layers: By name.
        state: The content of `moq_state.json`.
    """

    def __init__(
        self, layers: Mapping[str, StoredLayer], state: Mapping[str, Any]
    ) -> None:
        self._modules = {
            there: name for name, there in (state.get("names") or {}).items()
        }
        self._matrices = {
            matrix: name
            for name, layer in layers.items()
            for matrix in layer.matrices or ()
        }
        self._parameters = {
            name
            for name, layer in layers.items()
            if parameter_of(name, layer.kind) == name
        }

    def of(self, tensor: str) -> tuple[str, str, str]:
        """The names of a tensor's layer and of the matrix in it, and the last part of the tensor's own.

        The matrix is the layer itself, except in packed experts. For a tensor of no
        layer both are its module.
        """
        tensor = self._modules.get(tensor, tensor)
        if tensor in self._parameters:
            return tensor, tensor, "weight"
        owner, _, part = tensor.rpartition(".")
        owner = self._modules.get(owner, owner)
        return self._matrices.get(owner, owner), owner, _OF_TABLES.get(part, part)


def record_metrics(
    directory: str | os.PathLike[str],
    metrics: Mapping[str, Any],
    float_metrics: Mapping[str, Any] | None = None,
) -> None:
    """Put figures that came after saving into the `moq_state.json` of a packed checkpoint.

    Args:
        directory: What `save_quantized` wrote.
        metrics: Figures by name, instead of those that are there.
        float_metrics: Those of a model that was trained in float; None leaves what is
            there.

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
    return json.dumps(
        {key: value for key, value in state.items() if key != "digest"}, sort_keys=True
    ).encode()


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `moq_state.json` with its digest, whole or not at all."""
    state["digest"] = sha256(_canonical(state))
    temporary = folder / f".{STATE_NAME}"
    temporary.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / STATE_NAME)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `moq_state.json`, its digest and format checked.

    Raises:
        MoQError: It is missing, damaged, or of another version of moq_hf.
    """
    if not folder.is_dir():
        raise MoQError(f"{folder} is not a directory")
    path = folder / STATE_NAME
    delivered = folder / "quantized"
    if not path.exists() and (delivered / STATE_NAME).is_file():
        raise MoQError(
            f"{folder} is the folder of a run: its packed model is {delivered}"
        )
    state = read_document(path)
    try:
        digest = sha256(_canonical(state))
    except RecursionError:
        digest = None
    if digest is None or state.get("digest") != digest:
        raise MoQError(f"{path} is damaged: its digest does not fit its content")
    if state.get("format") != STATE_FORMAT:
        versions = state.get("versions")
        writer = versions.get("moq_hf") if isinstance(versions, dict) else None
        raise MoQError(
            f"{path} is of format {show(state.get('format'))}, written by moq_hf {show(writer)}, and this is moq_hf "
            f"{__version__}, which reads format {STATE_FORMAT}; plain transformers loads the folder all the same"
        )
    return state


def read_layers(folder: Path) -> tuple[dict[str, Any], dict[str, StoredLayer]]:
    """The state of a packed checkpoint, and its layers.

    Raises:
        MoQError: A value is not of the type or in the range of what is written; names
            the file and the key.
    """
    state = read_state(folder)
    where = str(folder / STATE_NAME)
    layers: dict[str, StoredLayer] = read_as(State, state, where)["layers"]
    for name, layer in layers.items():
        fault = layer.fault()
        if fault is not None:
            key, legal = fault
            raise MoQError(
                f"{where}: layers.{name}.{key} must be {legal}, not {show(getattr(layer, key))}"
            )
    return state, layers


def proof_in(state: Mapping[str, Any]) -> Proof | None:
    """The proof in a state that was read; None if nothing was tried."""
    return Proof(**state["proof"]) if state.get("proof") else None


def served_by(directory: str | os.PathLike[str]) -> list[serving.Verdict]:
    """What each server makes of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: The state or the config is missing or damaged; names the file and the
            key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    config = {} if state["config_json"] is None else read_document(folder / CONFIG)
    classes = read_as(
        list[str] | None,
        config.get("architectures"),
        str(folder / CONFIG),
        "architectures",
    )
    proof = proof_in(state)
    unserved = proof.reason if proof is not None and proof.agrees is False else None
    if state.get("by_hand") and (proof is None or not proof.agrees):
        unserved = "no save_pretrained wrote it; load_state_dict takes its weights"
    scales = "float32"
    row_size = None
    rounded: str | None = None
    if state["config"] is not None:
        trained = MoQConfig.from_dict(state["config"])
        scales = trained.grid_of(str(config.get("dtype") or "float32")).scale_dtype
        row_size = trained.grouping.row_size
        rounded = trained.activations.scale if state.get("rounds_inputs") else None
    weights: dict[str, serving.Weight] = {}
    for name, layer in layers.items():
        # Packed experts lie in the files matrix by matrix.
        names = layer.matrices or (name,)
        columns = layer.shape[1]
        # One group may fill a row.
        has_groups = layer.scales[1] > 1 or row_size == columns
        weight = serving.Weight(
            kind="linear" if layer.matrices else layer.kind,
            rows=layer.shape[0] // len(names),
            columns=columns,
            bits=layer.bits,
            group_size=columns // layer.scales[1] if has_groups else None,
            symmetric=layer.symmetric,
            packed=has_codes(layer.stored),
            rounded=rounded if layer.kind == "linear" and not layer.tied else None,
        )
        weights |= dict.fromkeys(names, weight)
    floats = [
        name
        for name in state["tensors"]
        if name.endswith(".weight") or serving.WHOLE_EXPERTS.search(name)
    ]
    model = serving.Description(
        architecture=classes[0] if classes else "",
        weights=weights,
        floats={name.removesuffix(".weight") for name in floats} - weights.keys(),
        is_encoder_decoder=config.get("is_encoder_decoder") is True,
        unserved=unserved,
        layout=state["layout"],
        scales=scales,
    )
    return [serving.verdict(model, server) for server in serving.SERVERS]
