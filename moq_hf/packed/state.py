"""`moq_state.json`: its content, how it is written, and how it is read and checked."""

import hashlib
import json
import math
import os
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import torch
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from .. import serving
from ..config import MoQConfig
from ..config_fields import Count, Flag, Positive, Weight, one_of
from ..errors import MoQError, explained, read_as, show, show_key, write_json
from ..formats.stored import by_matrix
from ..formats.table import FORMS, LAYOUTS, installed
from ..grid import Format, Grid, Grouping, PerChannel, PerGroup, RowBlocks
from ..inputs import dtypes_of, ranges_of
from ..quantized_weight import QuantizedWeight, inputs_of
from ..schedule import FLOAT_BITS
from ..servers import SERVERS, Server
from ..training.controller import MoQController
from ..training.resume import Range
from ..version import __version__
from ..weight_matrix import Kind
from ..weight_spec import FLOAT, WeightSpec
from .files import ADAPTER, CONFIG, read_document, tokenizer_files
from .load_check import Proof, has_failed

STATE_NAME = "moq_state.json"
# Format 1 was that of 0.1.0, and is no longer read.
STATE_FORMAT = 2


class StoredLayer(TypedDict):
    """The keys of a layer in `moq_state.json`; `WeightSpec` says what they are."""

    # A file with other keys is damaged.
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    kind: Kind
    bits: Annotated[int, Field(strict=True, ge=1, le=FLOAT_BITS)]
    stored: Annotated[str, one_of([*FORMS, FLOAT])]
    shape: tuple[Positive, Positive]
    scales: tuple[Count, Count]
    symmetric: Flag
    bytes: Count
    bytes_before: Count
    group: NotRequired[str | None]
    grid: NotRequired[tuple[str, str | None] | None]
    full: NotRequired[Flag]
    tied: NotRequired[tuple[str, ...]]
    matrices: NotRequired[tuple[str, ...] | None]
    format: NotRequired[Format]


class Counted(TypedDict):
    """The number of quantized parameters, of all parameters, and the bits that they have on average."""

    quantized: Positive
    total: Positive
    mean_bits: Weight


class Teaching(TypedDict):
    """How a model was taught; see `MoQMixin.teaching`."""

    float_steps: Count | None
    teacher_name: str | None


class State(TypedDict):
    """The keys of `moq_state.json` that are checked when it is read; its digest only guards against accidents."""

    tensors: dict[str, str]
    config_json: str | None
    versions: dict[str, Any]
    config: dict[str, Any]
    step: Count | None
    layers: Annotated[dict[str, StoredLayer], Field(min_length=1)]
    names: dict[str, str] | None
    input_ranges: dict[str, Range | list[Range]]
    metrics: dict[str, Any]
    float_metrics: dict[str, Any]
    # Folders of 0.2 do not have these.
    input_dtypes: NotRequired[dict[str, Literal["bfloat16", "float16", "float64"]]]
    teaching: NotRequired[Teaching | None]
    adapters: NotRequired[dict[str, str]]
    parameters: Counted
    float_bytes: Positive
    files: list[str]
    layout: Annotated[str, one_of(LAYOUTS)]
    needs: dict[str, str]
    groups: dict[str, Any] | None
    rounds_inputs: Flag
    by_hand: Flag
    reason: str | None
    proof: Proof | None


def state_of(
    layers: Mapping[str, QuantizedWeight],
    stored: Mapping[str, WeightSpec],
    controller: MoQController | None,
) -> dict[str, Any]:
    """The part of `moq_state.json` that describes a model and its run."""
    versions = {
        "moq_hf": __version__,
        "torch": str(torch.__version__),
        "transformers": installed("transformers"),
        "compressed_tensors": installed("compressed-tensors"),
        "python": platform.python_version(),
    }
    config = next(iter(layers.values())).moq.config
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
        "config": shareable(config.to_dict()),
        "input_ranges": ranges_of(inputs_of(layers)),
        "input_dtypes": dtypes_of(inputs_of(layers)),
        "step": step,
        "history": history,
        "choice": choice,
        "layers": {name: _in_state(layer) for name, layer in stored.items()},
    }


def _in_state(spec: WeightSpec) -> dict[str, Any]:
    """A weight's entry in `moq_state.json`."""
    same = {key: getattr(spec, key) for key in StoredLayer.__annotations__}
    return {**same, "grid": spec.grid_text}


def _from_state(name: str, stored: StoredLayer) -> WeightSpec:
    """The weight that an entry of `moq_state.json` describes."""
    given: dict[str, Any] = {**stored, "name": name}
    rows, columns = stored["shape"]
    blocks, groups = given.pop("scales")
    grouping: Grouping = PerChannel()
    if groups > 1:
        grouping = PerGroup(columns // groups)
    elif 0 < blocks < rows:
        grouping = RowBlocks(blocks)
    given["grid_text"] = given.pop("grid", None)
    given["grid"] = Grid(
        grouping,
        symmetric=given.pop("symmetric"),
        full=given.pop("full", False),
        format=given.pop("format", "int"),
    )
    return WeightSpec(**given)


def shareable(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the path of a teacher on this machine; its Hub id stays.

    >>> shareable({"seed": 1, "distillation": {"teacher": "/srv/somebody/teacher", "hidden": 2.0}})
    {'seed': 1, 'distillation': {'teacher': None, 'hidden': 2.0}}
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
    """The Hub id that a model was loaded from; None for a path, which is private.

    >>> hub_id("google-bert/bert-base-cased"), hub_id("/srv/somebody/bert")
    ('google-bert/bert-base-cased', None)
    """
    name = name or ""
    looks_like_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)
    return name if looks_like_id and not Path(name).exists() else None


def record_metrics(
    directory: str | os.PathLike[str],
    metrics: Mapping[str, Any],
    float_metrics: Mapping[str, Any] | None = None,
) -> None:
    """Put figures that came after saving into the `moq_state.json` of a packed checkpoint.

    Args:
        directory: What `save_quantized` wrote.
        metrics: Figures by name, which replace those that are there.
        float_metrics: Figures of a model that was trained in float; None keeps those
            that are there.

    Raises:
        MoQError: There is no such file, or it is damaged or cannot be written.
    """
    folder = Path(directory)
    state = read_state(folder)
    state["metrics"] = clean_metrics(metrics)
    if float_metrics is not None:
        state["float_metrics"] = clean_metrics(float_metrics)
    with explained(f"cannot write {folder / STATE_NAME}"):
        write_state(folder, state)


def clean_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for JSON, sorted: finite numbers as they are, other numbers as null, anything else as text.

    >>> clean_metrics({"f1": torch.tensor(0.5), "odd": float("nan"), "matrix": [1, 2]})
    {'f1': 0.5, 'matrix': '[1, 2]', 'odd': None}
    """
    clean: dict[str, Any] = {}
    # Sorted as in checkpoints, so that a resumed run writes the same.
    for name, value in sorted(metrics.items()):
        if isinstance(value, (bool, int, str)) or value is None:
            clean[name] = value
            continue
        try:
            clean[name] = float(value) if math.isfinite(float(value)) else None
        except (TypeError, ValueError):
            clean[name] = str(value)
    return clean


def _digest(state: Mapping[str, Any]) -> str:
    """Compute a checksum of a state without its digest."""
    rest = {key: value for key, value in state.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `moq_state.json` with its digest, whole or not at all."""
    state["digest"] = _digest(state)
    temporary = folder / f".{STATE_NAME}"
    write_json(temporary, state, indent=1)
    temporary.replace(folder / STATE_NAME)


def read_state(folder: Path) -> dict[str, Any]:
    """The content of `moq_state.json`, with its digest and format checked.

    Raises:
        MoQError: It is missing, damaged, or from another version of moq_hf.
    """
    if not folder.is_dir():
        raise MoQError(f"{folder} is not a directory")
    path = folder / STATE_NAME
    delivered = folder / "quantized"
    if not path.exists() and (delivered / STATE_NAME).is_file():
        raise MoQError(
            f"{folder} is the folder of a run: its packed model is {delivered}"
        )
    config = folder / CONFIG
    if (
        not path.exists()
        and config.is_file()
        and "quantization" in read_document(config)
    ):
        raise MoQError(
            f"{folder} was written for MLX, and was compared with its packed folder then; give that one"
        )
    state = read_document(path)
    if state.get("digest") != _digest(state):
        raise MoQError(f"{path} is damaged: its digest does not fit its content")
    if state.get("format") != STATE_FORMAT:
        versions = state.get("versions")
        writer = versions.get("moq_hf") if isinstance(versions, dict) else None
        raise MoQError(
            f"{path} has format {show(state.get('format'))}, written by moq_hf {show(writer)}, and this is moq_hf "
            f"{__version__}, which reads format {STATE_FORMAT}; plain transformers loads the folder all the same"
        )
    return state


def read_layers(folder: Path) -> tuple[dict[str, Any], dict[str, WeightSpec]]:
    """The state of a packed checkpoint, and its layers.

    Raises:
        MoQError: A value has another type or range than is ever written; names the file
            and the key.
    """
    state = read_state(folder)
    where = str(folder / STATE_NAME)
    layers = {}
    for name, stored in read_as(State, state, where)["layers"].items():
        layer = layers[name] = _from_state(name, stored)
        place = f"{where}: layers.{show_key(name)}.scales"
        with explained(place):
            if layer.scales != stored["scales"]:
                raise MoQError(f"{place} do not fit its shape")
    return state, layers


def proof_in(state: Mapping[str, Any]) -> Proof | None:
    """The proof in a state that was read; None if nothing was compared."""
    return Proof(**state["proof"]) if state["proof"] else None


def check_taken(directory: Path, server: Server) -> None:
    """Check that a packed checkpoint can be exported; `moq-hf inspect` says the same.

    Raises:
        MoQError: The server does not take it; has the reasons.
    """
    for found in served_by(directory):
        if found.server is server and found.reasons:
            raise MoQError(f"{directory}: {'; '.join(found.reasons)}")


def deploy_command(folder: Path, name: str | None = None) -> str | None:
    """The command that serves or exports a packed checkpoint where its class was tried; None if there is none.

    What the config names in `serve` comes first.

    Args:
        folder: What `save_quantized` wrote, with its tokenizer or processor, which
            exports need.
        name: The folder's name in the command; None is its path.

    Raises:
        MoQError: The state or the config is missing or damaged.
    """
    place = shlex.quote(name or str(folder))
    commands = {
        "llama.cpp": f"moq-hf export {place} --to gguf --converter convert_hf_to_gguf.py",
        "vllm": f"vllm serve {place}",
        "onnxruntime": f"moq-hf export {place} --to onnx",
        "mlx": f"moq-hf export {place} --to mlx",
        "executorch": f"python examples/executorch/export.py {place} model.pte",
    }
    model, config = _described(folder)
    plain, *others = [serving.verdict(model, server) for server in SERVERS]
    if plain.reasons or (folder / ADAPTER).exists() or not tokenizer_files(folder):
        return None
    taken = {found.server.key for found in others if found.answer == "yes"}
    if not model.architecture.endswith("ForCausalLM") and "vllm" not in config.serve:
        taken.discard("vllm")
    wanted = [key for key in (*config.serve, *commands) if key in taken]
    return next((commands[key] for key in wanted if key in commands), None)


def served_by(directory: str | os.PathLike[str]) -> list[serving.Verdict]:
    """Decide which servers take a packed checkpoint, without reading its weights.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: The state or the config is missing or damaged; names the file and the
            key.
    """
    model, _ = _described(Path(directory))
    return [serving.verdict(model, server) for server in SERVERS]


def _described(folder: Path) -> tuple[serving.Description, MoQConfig]:
    """A packed checkpoint as a server meets it, and the config that it was made with."""
    state, layers = read_layers(folder)
    config = {} if state["config_json"] is None else read_document(folder / CONFIG)
    classes = read_as(
        list[str] | None,
        config.get("architectures"),
        str(folder / CONFIG),
        "architectures",
    )
    proof = proof_in(state)
    unserved = proof.reason if has_failed(proof) else None
    if state["by_hand"] and (proof is None or not proof.agrees):
        unserved = "no save_pretrained wrote it; load_state_dict takes its weights"
    trained = MoQConfig.from_dict(state["config"])
    quantization = config.get("quantization_config") or {}
    groups = quantization.get("config_groups") or {}
    weights = {}
    # The files hold packed experts matrix by matrix.
    for name, layer in by_matrix(layers).items():
        grid = layer.grid
        if trained.grouping.row_size == layer.shape[1]:
            # One group fills a row.
            grid = replace(grid, grouping=trained.grouping)
        is_rounded = state["rounds_inputs"] and layer.kind == "linear"
        inputs = trained.input_grid_of(name, ())
        scheme = groups.get(layer.group or "", {}).get("input_activations")
        # A layer without a range has floats as its inputs.
        is_rounded &= scheme is not None or not groups
        if inputs is not None and scheme is not None:
            inputs = replace(inputs, bits=scheme["num_bits"])
        weights[name] = replace(
            layer,
            grid=grid,
            inputs=inputs if is_rounded and not layer.tied else None,
            pack_bits=trained.pack_bits or 0,
        )
    floats = {
        name.removesuffix(".weight")
        for name in state["tensors"]
        if name.endswith(".weight") or serving.WHOLE_EXPERTS.search(name)
    }
    model = serving.Description(
        architecture=classes[0] if classes else "",
        weights=weights,
        floats=floats - weights.keys(),
        is_encoder_decoder=config.get("is_encoder_decoder") is True,
        unserved=unserved,
        layout=state["layout"],
        has_adapters=(folder / ADAPTER).exists(),
        scales=trained.grid_of(str(config.get("dtype") or "float32")).scale_dtype,
    )
    return model, trained
