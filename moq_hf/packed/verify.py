"""What was written, read back: each weight is on the grid that it declares."""

import contextlib
import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError, one_line
from ..model.convert import dequantize_model, quant_embeddings, quant_layers
from ..model.inventory import is_packed
from ..names import adapters, uncompiled, without_peft
from ..reading import Entry
from ..rows import parameter_of
from ..transformers_seams import original_format
from .encoder import groups_of, plain
from .files import CONFIG, digest_of, read_document, size_of, tensors_in, weight_files
from .layout import InFiles
from .load_check import Proof, ReferenceOutputs
from .matrices import Stacked
from .state import MAX_PACKED_BITS, STATE_NAME, Places, StoredLayer, sha256
from .state_check import proof_of, read_layers
from .verification import Verification

_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
# What a module has of its own where it shares the codes of another one.
_OF_GRID = ("weight_scale", "weight_zero_point")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def verify_quantized(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Verification:
    """Read a packed checkpoint back and prove that each weight is on the grid that it declares.

    Every tensor is compared with the digest taken when it was saved, every code with the range of its grid.

    Args:
        directory: What `save_quantized` wrote.
        model: The model that was saved: its weights, as its forward pass uses them, must be those in the files.
        inputs: A batch as the model's forward pass takes it: plain `from_pretrained` loads the folder, and its answers
            must be the model's.

    Returns:
        The layers with their sizes.

    Raises:
        MoQError: Something is damaged, missing or different; names the file and the tensor.

    >>> from pathlib import Path
    >>> verify_quantized(Path("a folder that is not there"))
    Traceback (most recent call last):
    moq_hf.errors.MoQError: a folder that is not there is not a directory
    """
    if inputs is not None and model is None:
        raise MoQError("inputs are for the comparison with a model: give the model too")
    folder = Path(directory)
    state, layers = read_layers(folder)
    weights = _weights_in_files(folder, _config_of(folder, state), layers)
    tied = {module: name for name, layer in layers.items() for module in layer.tied}
    sharing, grids, places = {*tied, *tied.values()}, dict[str, Tensor](), Places(layers, state)
    compared = None if model is None else _named_as_in_files(model, state)
    float_bytes = sum(layer.bytes_before for layer in layers.values())
    others = others_bytes = 0
    with _explained(folder):
        for name, tensor in _tensors_as_saved(folder, state["tensors"]):
            owner, matrix, part = places.of(name)
            if owner in sharing and part in _OF_GRID:
                grids[f"{owner}.{part}"] = tensor
                if owner in tied:
                    continue
            if part == "weight_packed" and owner not in layers:
                raise MoQError(f"{folder / STATE_NAME}: layers.{owner} is missing, whose packed weight there is")
            if owner not in weights or not part.startswith("weight"):
                float_bytes += tensor.nbytes
                if tensor.is_floating_point():
                    others, others_bytes = others + tensor.numel(), others_bytes + tensor.nbytes
                _compare(folder, name, tensor, compared, "tensor ")
                continue
            _parts(weights[owner], matrix)[part] = tensor
            if weights[owner].is_complete:
                _check(folder, parameter_of(owner, layers[owner].kind), weights.pop(owner), compared)
    if weights:
        raise MoQError(f"{folder}: missing from the weights: {', '.join(weights)}")
    _check_tied(folder, tied, grids)
    proof = _proof(folder, state, None if inputs is None or model is None else ReferenceOutputs(model, inputs))
    return Verification(layers, size_of(folder), float_bytes, state, (others, others_bytes), proof)


def _proof(folder: Path, state: Mapping[str, Any], answers: ReferenceOutputs | None) -> Proof | None:
    """How the folder answers beside a model; without one, what was found when it was saved.

    Raises:
        MoQError: It answers otherwise.
    """
    if answers is None:
        saved = Entry(state, str(folder / STATE_NAME)).get("proof")
        return None if saved.is_null else proof_of(saved)
    proof = answers.prove(folder)
    if not proof.agrees:
        raise MoQError(f"{folder}: {proof}")
    return proof


def _check_tied(folder: Path, tied: Mapping[str, str], grids: Mapping[str, Tensor]) -> None:
    """Compare the scales and zero points of modules that share a weight: what is unpacked of it must be the same.

    Raises:
        MoQError: They differ.
    """
    for name, tensor in grids.items():
        module, _, part = name.rpartition(".")
        own = grids.get(f"{tied.get(module, module)}.{part}")
        if own is None or not torch.equal(own, tensor):
            raise MoQError(f"{folder}: {name} differs from {tied[module]}.{part}, to whose weight it is tied")


def _config_of(folder: Path, state: Mapping[str, Any]) -> Entry:
    """The folder's config, as it was saved; empty for a model of a class of its own, which has none.

    Raises:
        MoQError: It is not as it was saved.
    """
    path = folder / CONFIG
    if state["config_json"] is None:
        return Entry({}, str(path))
    config = read_document(path)
    if sha256(path.read_bytes()) != state["config_json"]:
        raise MoQError(f"{path} is not as it was saved")
    return config


def _weights_in_files(folder: Path, config: Entry, layers: Mapping[str, StoredLayer]) -> dict[str, InFiles | Stacked]:
    """The layers, to be filled with their tensors."""
    groups = groups_of(config, layers)
    half = config.get("dtype").value in ("bfloat16", "float16")
    dtype = getattr(torch, config["dtype"].text()) if half else torch.float32
    found: dict[str, InFiles | Stacked] = {}
    for name, layer in layers.items():
        group = groups[layer.group] if layer.group is not None else {}
        whole = InFiles(f"{folder}: {name}", layer, group, dtype)
        found[name] = Stacked.of(whole, layer.matrices) if layer.matrices else whole
    return found


def _parts(weight: InFiles | Stacked, matrix: str) -> dict[str, Tensor]:
    """What there is of a layer's tensors, or of those of one of its matrices."""
    return weight.matrices[matrix].parts if isinstance(weight, Stacked) else weight.parts


def _tensors_as_saved(folder: Path, digests: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name, after it was compared with its digest.

    Raises:
        MoQError: One is damaged, missing or new.
    """
    missing = set(digests)
    for name, tensor in tensors_in(folder):
        if name not in digests:
            raise MoQError(f"{folder}: tensor {name} was not there when it was saved")
        if digest_of(tensor) != digests[name]:
            raise MoQError(f"{folder}: tensor {name} is damaged")
        missing.remove(name)
        yield name, tensor
    if missing:
        raise MoQError(f"{folder}: missing from the weights: {', '.join(sorted(missing))}")


def _check(folder: Path, name: str, weight: InFiles | Stacked, model: Mapping[str, Tensor] | None) -> None:
    """Find a weight on its grid, and compare it with the model's, if there is one.

    Raises:
        MoQError: It is not on the grid, or differs.
    """
    weight.check()
    if model is not None:
        _compare(folder, name, weight.weight(), model)


def _compare(folder: Path, name: str, tensor: Tensor, model: Mapping[str, Tensor] | None, kind: str = "") -> None:
    """Compare a tensor with the model's in the model's dtype, if there is one.

    Raises:
        MoQError: They differ.
    """
    other = None if model is None else model.get(name)
    if other is not None and tensor.dim() == 2 and other.dim() == 3 and tensor.numel() == other.numel():
        # The matrices of experts, one below the other.
        tensor = tensor.view(other.shape)
    if model is not None and (name not in model or not torch.equal(tensor.to(model[name].dtype), model[name])):
        raise MoQError(f"{folder}: {kind}{name} differs from the model's")


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except MoQError:
        raise
    except _ERRORS as error:
        raise MoQError(f"{folder}: the weights cannot be read: {one_line(error)}") from error


def recorded(directory: str | os.PathLike[str]) -> Verification:
    """What `moq_state.json` says of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Returns:
        As `verify_quantized`; both sizes are 0 where there are no weight files.

    Raises:
        MoQError: The state is missing, or it or a weight file is damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    files = [path for path in weight_files(folder) if path.is_file()]
    if not files:
        return Verification(layers, 0, 0, state)
    saved = sum(layer.bytes_before - layer.bytes for layer in layers.values())
    size = sum(path.stat().st_size for path in files)
    found = [_head(path, layers, Places(layers, state)) for path in files]
    others = (sum(count for _, count, _ in found), sum(size for _, _, size in found))
    return Verification(layers, size, size - sum(head for head, _, _ in found) + saved, state, others)


def _head(path: Path, layers: Mapping[str, StoredLayer], places: Places) -> tuple[int, int, int]:
    """What of a weight file is its table of contents, and count and bytes of the numbers beside quantized weights.

    Raises:
        MoQError: The file cannot be read.
    """
    count = size = 0
    quantized = {*layers, *(module for layer in layers.values() for module in layer.tied)}
    try:
        # Opening compares the size of the file with the table.
        with safe_open(path, "pt") as weights, path.open("rb") as file:
            for name in weights.keys():  # noqa: SIM118
                owner, _, part = places.of(name)
                dtype = _FLOATS.get(weights.get_slice(name).get_dtype())
                if dtype is not None and not (owner in quantized and part.startswith("weight")):
                    numbers = math.prod(weights.get_slice(name).get_shape())
                    count, size = count + numbers, size + numbers * dtype.itemsize
            return 8 + int.from_bytes(file.read(8), "little"), count, size
    except (OSError, SafetensorError) as error:
        raise MoQError(f"{path} cannot be read: {one_line(error)}") from error


def _named_as_in_files(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A model's tensors by their names in the files; weights of quantized layers by those of the modules too."""
    tensors = weights_of(model)
    if state.get("names") is None:
        return tensors
    # Layers have their own names here, and so have weights that would be taken apart.
    return tensors | original_format(without_peft(uncompiled(model)), tensors)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    if is_packed(model):
        model = dequantize_model(copy.deepcopy(model))
    model = without_peft(model)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        tensors[parameter_of(name, layer.kind)] = layer.quantized_weight().detach().cpu()
    return plain(tensors, adapters(model))


def stored_weights(directory: str | os.PathLike[str]) -> dict[str, quantizer.Quantized]:
    """The codes, scales and zero points of a packed checkpoint's layers of up to 8 bits, by layer.

    Codes and zero points are signed: asymmetric ones are less by 2^(bits-1) than those of `quantizer`. Those of floats
    on their grid are found again; where a half dtype rounded the floats, the layer is left out.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: Something is damaged or missing; names the file and the tensor.
    """
    folder = Path(directory)
    found = verify_quantized(folder)
    layers = {n: s for n, s in found.layers.items() if s.stored != "float" and s.bits <= MAX_PACKED_BITS}
    weights = _weights_in_files(folder, _config_of(folder, found.state), layers)
    places = Places(layers, found.state)
    for name, tensor in tensors_in(folder):
        owner, matrix, part = places.of(name)
        if owner in weights and (layers[owner].stored != "dense" or tensor.dtype == torch.float32):
            _parts(weights[owner], matrix)[part] = tensor
    complete = {name: weight for name, weight in weights.items() if weight.is_complete}
    return {name: _signed(weight.decode(), weight.layer.bits) for name, weight in complete.items()}


def _signed(values: quantizer.Quantized, bits: int) -> quantizer.Quantized:
    codes, scale, zero = values
    if zero is None:
        return values
    return quantizer.Quantized(codes - 2 ** (bits - 1), scale, zero - 2 ** (bits - 1))
