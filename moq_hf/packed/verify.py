"""What was written, read back: each weight is on the grid that it declares."""

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import quantizer
from ..errors import MoQError
from ..model.convert import dequantize_model, quant_embeddings, quant_layers
from ..model.inventory import is_packed
from ..model.sizes import covered
from ..names import adapters, without_peft
from ..reading import Entry
from ..schedule import FLOAT_BITS
from .files import CONFIG, digest_of, read_document, tensors_in, text_of, weight_files
from .layout import check_grid, groups_of, is_complete, plain, turned
from .proof import Answers, Proof
from .state import STATE_NAME, StoredLayer, proof_of, read_layers, sha256

_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class Verification:
    """What `verify_quantized` found in a directory without fault.

    Attributes:
        layers: Each quantized layer by name.
        file_bytes: Size of the weight files together.
        float_bytes: Size of the same tensors in float.
        state: The content of `moq_state.json`.
        others: Count and bytes of the floating-point numbers beside the quantized layers' weights.
        proof: How the folder answered beside the model, when it was saved or now, with `inputs`; None: not tried.
    """

    layers: dict[str, StoredLayer]
    file_bytes: int
    float_bytes: int
    state: dict[str, Any]
    others: tuple[int, int] = (0, 0)
    proof: Proof | None = None

    def table(self) -> str:
        """A line per layer and the totals, for a terminal."""
        head = ("module", "bits", "scales", "stored", "bytes", "before", "max error (steps)")
        rows = [
            (
                name,
                "float" if layer.bits == FLOAT_BITS else str(layer.bits),
                str(math.prod(layer.scales) or "-"),
                layer.stored,
                f"{layer.bytes:,}",
                f"{layer.bytes_before:,}",
                f"{layer.max_error:.3f}",
            )
            for name, layer in self.layers.items()
        ]
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 3) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [head, *rows]
        ]
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        lines += [
            "",
            f"{len(self.layers)} quantized layers: {after:,} bytes, {before:,} before ({after / before:.3f}); "
            f"{8 * after / weights:.3f} bits a weight",
            f"all weights: {self.file_bytes:,} bytes, {self.float_bytes:,} before "
            f"({self.file_bytes / self.float_bytes:.3f})",
            f"quantized: {self.coverage()}; mean {self.mean_bits:.2f} bits over the whole model",
        ]
        return "\n".join(lines)

    def coverage(self) -> str:
        """What share of the model's parameters is quantized, in words."""
        return covered(*self.parameters)

    @property
    def parameters(self) -> tuple[int, int]:
        """How many parameters of the model are quantized, and how many there are, each counted once."""
        # Folders of earlier versions do not tell; their tensors do, but for buffers and PEFT's adapters.
        quantized = sum(math.prod(layer.shape) for layer in self.layers.values())
        counted = self.state.get("parameters") or {"quantized": quantized, "total": quantized + self.others[0]}
        return counted["quantized"], counted["total"]

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model; a parameter that is not quantized has those of its dtype."""
        quantized, total = self.parameters
        bits = sum(
            8 * layer.bytes_before if layer.stored == "float" else math.prod(layer.shape) * layer.bits
            for layer in self.layers.values()
        )
        # Without the weight files nothing tells their dtype: float32 then.
        count, size = self.others if self.others[0] else (1, 4)
        return (bits + (total - quantized) * 8 * size / count) / total

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the quantized layers' weights, and what they took in float."""
        return (
            sum(layer.bytes for layer in self.layers.values()),
            sum(layer.bytes_before for layer in self.layers.values()),
        )


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
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    # A model of a class of its own has none.
    path = folder / CONFIG
    config = Entry({}, str(path)) if state["config_json"] is None else read_document(path)
    if state["config_json"] is not None and sha256(path.read_bytes()) != state["config_json"]:
        raise MoQError(f"{path} is not as it was saved")
    expected, found = dict(state["tensors"]), set()
    values: dict[str, dict[str, Tensor]] = {name: {} for name in layers}
    groups = groups_of(config, layers)
    compared = weights_of(model) if model is not None else {}
    float_bytes = sum(layer.bytes_before for layer in layers.values())
    others, others_bytes = 0, 0
    try:
        for name, tensor in tensors_in(folder):
            if name not in expected:
                raise MoQError(f"{folder}: tensor {name} was not there when it was saved")
            if digest_of(tensor) != expected[name]:
                raise MoQError(f"{folder}: tensor {name} is damaged")
            found.add(name)
            owner, _, part = name.rpartition(".")
            if part == "weight_packed" and owner not in layers:
                raise MoQError(f"{folder / STATE_NAME}: layers.{owner} is missing, whose packed weight there is")
            if owner in values and part.startswith("weight"):
                values[owner][part] = tensor
            else:
                float_bytes += tensor.nbytes
                if tensor.is_floating_point():
                    others, others_bytes = others + tensor.numel(), others_bytes + tensor.nbytes
                if model is not None and not same(tensor, compared.get(name)):
                    raise MoQError(f"{folder}: tensor {name} differs from the model's")
            if owner not in values:
                continue
            layer = layers[owner]
            group = groups[layer.group] if layer.group is not None else {}
            if is_complete(layer, values[owner], group.get("weights", {})):
                weight = check_grid(f"{folder}: {owner}", layer, values.pop(owner), group)
                if model is not None and not same(weight, compared.get(f"{owner}.weight")):
                    raise MoQError(f"{folder}: {owner}.weight differs from the model's")
    except MoQError:
        raise
    except _ERRORS as error:
        raise MoQError(f"{folder}: the weights cannot be read: {text_of(error)}") from error
    missing = sorted(set(expected) - found)
    if missing or values:
        raise MoQError(f"{folder}: missing from the weights: {', '.join(missing or values)}")
    size = sum(path.stat().st_size for path in weight_files(folder))
    saved = Entry(state, str(folder / STATE_NAME)).get("proof")
    proof = None if saved.is_null else proof_of(saved)
    if inputs is not None:
        if model is None:
            raise MoQError("inputs are for the comparison with a model: give the model too")
        proof = Answers(model, inputs).prove(folder)
        if not proof.agrees:
            raise MoQError(f"{folder}: {proof}")
    return Verification(layers, size, float_bytes, state, (others, others_bytes), proof)


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
    found = [_head(path, layers) for path in files]
    others = (sum(count for _, count, _ in found), sum(size for _, _, size in found))
    return Verification(layers, size, size - sum(head for head, _, _ in found) + saved, state, others)


def _head(path: Path, layers: Mapping[str, StoredLayer]) -> tuple[int, int, int]:
    """What of a weight file is its table of contents, and count and bytes of the numbers beside quantized weights."""
    count = size = 0
    try:
        # Opening compares the size of the file with the table.
        with safe_open(path, "pt") as weights, path.open("rb") as file:
            for name in weights.keys():  # noqa: SIM118
                owner, _, part = name.rpartition(".")
                dtype = _FLOATS.get(weights.get_slice(name).get_dtype())
                if dtype is not None and not (owner in layers and part.startswith("weight")):
                    numbers = math.prod(weights.get_slice(name).get_shape())
                    count, size = count + numbers, size + numbers * dtype.itemsize
            return 8 + int.from_bytes(file.read(8), "little"), count, size
    except (OSError, SafetensorError) as error:
        raise MoQError(f"{path} cannot be read: {text_of(error)}") from error


_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    if is_packed(model):
        model = dequantize_model(copy.deepcopy(model))
    model = without_peft(model)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        tensors[f"{name}.weight"] = layer.quantized_weight().detach().cpu()
    return plain(tensors, adapters(model))


def same(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are equal in the second one's dtype."""
    return other is not None and torch.equal(one.to(other.dtype), other)


def stored_weights(directory: str | os.PathLike[str]) -> dict[str, quantizer.Quantized]:
    """The codes, scales and zero points of the layers that a packed checkpoint holds as integers, by layer.

    Codes and zero points are signed: asymmetric ones are less by 2^(bits-1) than those of `quantizer`.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: Something is damaged or missing; names the file and the tensor.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    folder = Path(directory)
    layers = verify_quantized(folder).layers
    groups = groups_of(read_document(folder / CONFIG), layers)
    parts: dict[str, dict[str, Tensor]] = {name: {} for name, layer in layers.items() if layer.group is not None}
    for name, tensor in tensors_in(folder):
        owner, _, part = name.rpartition(".")
        if owner in parts:
            parts[owner][part] = tensor
    found = {}
    for name, tensors in parts.items():
        layer, scale = layers[name], tensors["weight_scale"]
        if layer.stored == "int8":
            found[name] = quantizer.Quantized(tensors["weight"].int(), scale, None)
            continue
        width, shape = groups[cast(str, layer.group)]["weights"]["num_bits"], torch.Size(layer.shape)
        in_file = torch.Size(reversed(shape)) if layer.kind == "conv1d" else shape
        codes = turned(unpack_from_int32(tensors["weight_packed"], width, in_file).int(), layer)
        scale = turned(scale, layer)
        zero = tensors.get("weight_zero_point")
        if zero is not None and zero.is_floating_point():
            # Binary: codes -1 and 0 around -1/2.
            codes, scale, zero = 2 * codes + 1, scale / 2, None
        elif zero is not None and zero.dtype == torch.int32:
            zero = unpack_from_int32(zero, width, torch.Size((shape[0], scale.shape[1])), packed_dim=0)
        found[name] = quantizer.Quantized(codes, scale, None if zero is None else turned(zero.int(), layer))
    return found
