"""What was written, read back: each weight is on the grid that it declares."""

import copy
import html
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import MoQError, listed, one_line
from ..formats.stored import MAX_PACKED_BITS, StoredWeight
from ..formats.table import FORMS
from ..grid import Grid
from ..model.convert import dequantize_model, quant_embeddings, quant_layers
from ..model.inventory import is_packed
from ..model.sizes import covered
from ..names import adapters, uncompiled, without_peft
from ..quantizer import Quantized, dequantize
from ..schedule import FLOAT_BITS
from ..seams.transformers import (
    config_for_newer,
    never_saved,
    original_format,
    tied_parameters,
)
from ..text import megabytes, table
from ..weight_matrix import is_experts, parameter_of
from .encode import without_peft_names
from .files import CONFIG, digest_of, read_document, size_of, tensors_in
from .load_check import Proof, ReferenceOutputs
from .state import STATE_NAME, Places, StoredLayer, proof_in, read_layers, sha256

_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)


@dataclass(frozen=True, repr=False)
class Verification:
    """What `verify_quantized` found in a directory without fault; `str` gives its table.

    Attributes:
        layers: Each quantized layer by name.
        file_bytes: Size of the weight files together.
        state: The content of `moq_state.json`.
        proof: How the folder's outputs compared with the model's, when it was saved or,
            given `inputs`, now; None: not tried.
    """

    layers: dict[str, StoredLayer]
    file_bytes: int
    state: dict[str, Any]
    proof: Proof | None = None

    @property
    def float_bytes(self) -> int:
        """Size of the same tensors in float."""
        return cast(int, self.state["float_bytes"])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Verification: {self.summary()}>"

    def table(self) -> str:
        """A line per layer and the totals, for a terminal."""
        rows = [("module", "bits", "scales", "stored", "bytes", "before")]
        for name, layer in self.layers.items():
            bits = "float" if layer.bits == FLOAT_BITS else str(layer.bits)
            scales = str(math.prod(layer.scales) or "-")
            rows.append(
                (
                    name,
                    bits,
                    scales,
                    layer.stored,
                    f"{layer.bytes:,}",
                    f"{layer.bytes_before:,}",
                )
            )
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        lines = [
            table(rows, left=(0, 3)),
            "",
            f"{len(self.layers)} quantized layers: {after:,} bytes, {before:,} before ({after / before:.3f}); "
            f"{8 * after / weights:.3f} bits a weight",
            f"all weights: {self.file_bytes:,} bytes, {self.float_bytes:,} before "
            f"({self.file_bytes / self.float_bytes:.3f})",
            f"quantized: {self.coverage()}; mean {self.mean_bits:.2f} bits over the whole model",
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """What was written, whether it was verified, and its size, in sentences."""
        form = ""
        proof = f"{self.proof or 'Not verified: nothing was compared'}"
        if self.state["layout"] == "floats":
            form = "Floats on the grid, not packed. "
        if self.state["by_hand"]:
            proof = "Not verified: load_state_dict alone loads it"
        elif self.proof is not None and self.proof.agrees is False:
            proof = "NOT what was evaluated, as the warning above says"
        before = megabytes(self.float_bytes).removesuffix(" MB")
        return f"{form}{proof}. {megabytes(self.file_bytes)}, float {before}."

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        layers = f"<details><summary>Layers</summary><pre>{html.escape(self.table())}</pre></details>"
        return f"<p>{html.escape(self.summary())}</p>{layers}"

    def coverage(self) -> str:
        """What share of the model's parameters is quantized, in words."""
        return covered(*self.parameters)

    @property
    def parameters(self) -> tuple[int, int]:
        """How many parameters of the model are quantized, and how many there are, each counted once."""
        counted = self.state["parameters"]
        return counted["quantized"], counted["total"]

    @property
    def mean_bits(self) -> float:
        """Bits per parameter of the whole model; a parameter that is not quantized has those of its dtype."""
        return cast(float, self.state["parameters"]["mean_bits"])

    @property
    def quantized_bytes(self) -> tuple[int, int]:
        """Bytes of the quantized layers' weights, and what they took in float."""
        layers = self.layers.values()
        return sum(layer.bytes for layer in layers), sum(
            layer.bytes_before for layer in layers
        )


def verify_quantized(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Verification:
    """Read a packed checkpoint back and prove that each weight is on the grid that it declares.

    Every tensor is compared with the digest taken when it was saved, every code with
    the range of its grid.

    Args:
        directory: What `save_quantized` wrote.
        model: The model that was saved: its weights, as its forward pass uses them,
            must be those in the files.
        inputs: A batch as the model's forward pass takes it: plain `from_pretrained`
            loads the folder, and its outputs must be the model's.

    Returns:
        The layers with their sizes.

    Raises:
        MoQError: Something is damaged, missing or different; names the file and the
            tensor.

    >>> from pathlib import Path
    >>> verify_quantized(Path("a folder that is not there"))
    Traceback (most recent call last):
    moq_hf.errors.MoQError: a folder that is not there is not a directory
    """
    if inputs is not None and model is None:
        raise MoQError("inputs are for the comparison with a model: give the model too")
    folder = Path(directory)
    state, layers = read_layers(folder)
    expected = None if model is None else _named_as_in_files(model, state)
    try:
        tensors = _tensors_as_saved(folder, state["tensors"])
        compared: set[str] = set()
        for name, stored in _read_weights(folder, state, layers, tensors):
            if isinstance(stored, StoredWeight):
                weight = _checked(stored, layers[name])
                weight_name = parameter_of(name, layers[name].kind)
                _compare(folder, weight_name, weight, expected)
                compared.add(weight_name)
            # In the layout "gemma" a scale of 0 leaves in- or outputs alone.
            elif stored.any() or not name.endswith("put_activation_scale"):
                name = name.replace("put_activation_scale", "put_scale")
                _compare(folder, name, stored, expected, "tensor ")
                compared.add(name)
        if model is not None and expected is not None:
            _check_all_compared(folder, model, expected, compared)
    except MoQError:
        raise
    except _ERRORS as error:
        raise MoQError(
            f"{folder}: the weights cannot be read: {one_line(error)}"
        ) from error
    if inputs is None or model is None:
        proof = proof_in(state)
    else:
        rounded = state.get("rounds_inputs", False)
        proof = ReferenceOutputs(model, inputs).prove(folder, rounded)
        if not proof.agrees:
            raise MoQError(f"{folder}: {proof}")
    return Verification(layers, size_of(folder), state, proof)


def recorded(directory: str | os.PathLike[str]) -> Verification:
    """What `moq_state.json` says of a packed checkpoint; its weights are not looked at.

    Args:
        directory: What `save_quantized` wrote.

    Returns:
        As `verify_quantized`; the size of the files is 0 where there are none.

    Raises:
        MoQError: The state is missing or damaged; names the file and the key.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    return Verification(layers, size_of(folder), state, proof_in(state))


def stored_weights(directory: str | os.PathLike[str]) -> dict[str, Quantized]:
    """The codes, scales and zero points of a packed checkpoint's layers of up to 8 bits, by layer.

    Codes and zero points are signed: asymmetric ones are less by 2^(bits-1) than those
    of `quantizer`. Where the files hold floats on their grid, the codes are computed
    from them; a layer whose floats a half dtype rounded is left out.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: Something is damaged or missing; names the file and the tensor.
    """
    folder = Path(directory)
    verified = verify_quantized(folder)
    layers = {
        name: layer
        for name, layer in verified.layers.items()
        if layer.stored != "float" and layer.bits <= MAX_PACKED_BITS
    }
    weights: dict[str, Quantized] = {}
    tensors = tensors_in(folder)
    for name, stored in _read_weights(folder, verified.state, layers, tensors):
        if not isinstance(stored, StoredWeight):
            continue
        is_float = stored.scheme is None
        if is_float and stored.pieces[name]["weight"].dtype != torch.float32:
            continue
        codes, scale, zero = FORMS[layers[name].stored].read(stored)
        if zero is not None:
            half = 2 ** (stored.bits - 1)
            codes = codes - half
            zero = zero - half
        weights[name] = Quantized(codes, scale, zero)
    return {name: weights[name] for name in layers if name in weights}


def by_matrix(layers: Mapping[str, StoredLayer]) -> dict[str, StoredLayer]:
    """The layers as the files have them: each matrix of packed experts is a layer of its own."""
    split_layers: dict[str, StoredLayer] = {}
    for name, layer in layers.items():
        if not layer.matrices:
            split_layers[name] = layer
            continue
        rows = layer.shape[0] // len(layer.matrices)
        matrix = replace(
            layer,
            kind="linear",
            matrices=None,
            shape=(rows, layer.shape[1]),
            scales=(rows, layer.scales[1]),
        )
        split_layers |= dict.fromkeys(layer.matrices, matrix)
    return split_layers


def split(
    weights: Mapping[str, Quantized], layers: Mapping[str, StoredLayer]
) -> dict[str, Quantized]:
    """What `stored_weights` gives, by the names of `by_matrix`."""
    matrices: dict[str, Quantized] = {}
    for name, values in weights.items():
        names = layers[name].matrices or (name,)
        codes = values.codes.chunk(len(names))
        scales = values.scale.chunk(len(names))
        # Experts with zero points are not packed.
        for index, matrix in enumerate(names):
            matrices[matrix] = Quantized(codes[index], scales[index], values.zero_point)
    return matrices


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    tensors = dict(without_peft(model).state_dict())
    if is_packed(model):
        model = dequantize_model(copy.deepcopy(model))
        # What it rounds inputs with is lost there.
        tensors = {n: t for n, t in tensors.items() if n.endswith(".input_scale")}
    model = without_peft(model)
    tensors |= model.state_dict()
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    for name, layer in {**quant_layers(model), **quant_embeddings(model)}.items():
        tensors[parameter_of(name, layer.kind)] = (
            layer.quantized_weight().detach().cpu()
        )
        inputs = layer.moq.inputs
        if inputs is not None and inputs.scale is not None:
            tensors[f"{name}.input_scale"] = inputs.scale.float().cpu()
    return without_peft_names(tensors, adapters(model))


def _named_as_in_files(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name a model's tensors as the files do; weights of quantized layers also keep the names of their modules."""
    tensors = weights_of(model)
    if state["names"] is None:
        return tensors
    # Layers have their own names here, and so have weights that would be taken apart.
    return tensors | original_format(without_peft(uncompiled(model)), tensors)


def _read_weights(
    folder: Path,
    state: Mapping[str, Any],
    layers: Mapping[str, StoredLayer],
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, StoredWeight | Tensor]]:
    """Yield each layer's weight as soon as its tensors are all there, and every other tensor, by name.

    Raises:
        MoQError: Tensors of a layer are missing, or the config says otherwise than the
            state.
    """
    groups = _groups_of(folder, state, layers)
    places = Places(layers, state)
    tied = {module for layer in layers.values() for module in layer.tied}
    weights: dict[str, StoredWeight] = {}
    for name, layer in layers.items():
        weights[name] = StoredWeight(
            where=f"{folder}: {name}",
            kind=layer.kind,
            bits=layer.bits,
            grid=Grid(symmetric=layer.symmetric, full=layer.full),
            shape=layer.shape,
            scales=layer.scales,
            scheme=None if layer.group is None else groups[layer.group],
            saved_grid=layer.grid,
            pieces={matrix: {} for matrix in layer.matrices or (name,)},
        )
    for name, tensor in tensors:
        owner, matrix, part = places.of(name)
        # The scales of a module that is tied to a table are those of the table.
        if owner in tied:
            continue
        if owner not in weights or not part.startswith("weight"):
            if part == "weight_packed":
                raise MoQError(
                    f"{folder / STATE_NAME}: layers.{owner} is missing, whose packed weight there is"
                )
            yield name, tensor
            continue
        weights[owner].pieces[matrix][part] = tensor
        form = FORMS.get(layers[owner].stored, FORMS["dense"])
        scheme = weights[owner].scheme
        wanted = form.TENSORS
        if scheme is not None and not scheme["weights"]["symmetric"]:
            wanted |= {"weight_zero_point"}
        if all(wanted <= parts.keys() for parts in weights[owner].pieces.values()):
            yield owner, weights.pop(owner)
    if weights:
        raise MoQError(f"{folder}: missing from the weights: {', '.join(weights)}")


def _groups_of(
    folder: Path, state: Mapping[str, Any], layers: Mapping[str, StoredLayer]
) -> Mapping[str, Any]:
    """Return the config groups, after a check that each layer has the bits that its group declares.

    Raises:
        MoQError: The config is not as it was saved, or it says otherwise than the
            state.
    """
    path = folder / CONFIG
    # A model of a custom class has no config.
    if state["config_json"] is None:
        return {}
    config = read_document(path)
    if sha256(path.read_bytes()) != state["config_json"]:
        raise MoQError(f"{path} is not as it was saved")
    beside = config_for_newer(config)
    if beside is not None and read_document(folder / beside[0]) != beside[1]:
        raise MoQError(f"{folder / beside[0]} is not as it was saved")
    quantization = config.get("quantization_config", {})
    groups: Mapping[str, Any] = quantization.get(
        "config_groups", state.get("groups") or {}
    )
    for name, layer in layers.items():
        if layer.group is None:
            continue
        if layer.group not in groups:
            raise MoQError(
                f"{path}: quantization_config.config_groups.{layer.group} is missing"
            )
        width = groups[layer.group]["weights"]["num_bits"]
        # Layers that are unpacked while loading all have codes as wide as the widest
        # one's. So have packed experts in any layout. A code of "gemma" takes the next
        # of its widths.
        shared = (
            quantization.get("dequantize")
            or is_experts(layer.kind)
            or layer.stored == "gemma"
        )
        if layer.bits > width or (layer.bits < width and not shared):
            raise MoQError(
                f"{folder / STATE_NAME}: layers.{name}.bits is {layer.bits}, but its codes have {width} bits"
            )
    return groups


def _checked(stored: StoredWeight, layer: StoredLayer) -> Tensor:
    """Check that a layer's weight is on its grid, and return it.

    Raises:
        MoQError: It is not.
    """
    if layer.stored != "float":
        values = FORMS[layer.stored].read(stored)
        stored.check(values)
        if stored.scheme is not None:
            return dequantize(*values)
    [parts] = stored.pieces.values()
    return parts["weight"]


def _tensors_as_saved(
    folder: Path, digests: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor by its name, after it was compared with its digest.

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
        raise MoQError(
            f"{folder}: missing from the weights: {', '.join(sorted(missing))}"
        )


def _check_all_compared(
    folder: Path, model: nn.Module, expected: Mapping[str, Tensor], compared: set[str]
) -> None:
    """Check that the files hold every tensor of the model, but for those that loading makes or ties.

    Raises:
        MoQError: They lack some; names them.
    """
    base = without_peft(uncompiled(model))
    made = tied_parameters(base).keys() | never_saved(base)
    # A tensor may be there under several names, or in parts.
    stored = {expected[name].untyped_storage().data_ptr() for name in compared}
    lacking = [
        name
        for name in base.state_dict()
        if name not in made
        and name in expected
        and expected[name].untyped_storage().data_ptr() not in stored
    ]
    if lacking:
        raise MoQError(f"{folder} lacks tensors of the model: {listed(lacking)}")


def _compare(
    folder: Path,
    name: str,
    tensor: Tensor,
    model: Mapping[str, Tensor] | None,
    kind: str = "",
) -> None:
    """Compare a tensor with the model's in the model's dtype, if there is one.

    Raises:
        MoQError: They differ.
    """
    if model is None:
        return
    expected = model.get(name)
    if expected is not None and tensor.numel() == expected.numel():
        # The matrices of experts come one below the other.
        tensor = tensor.reshape(expected.shape)
    if expected is None or not torch.equal(tensor.to(expected.dtype), expected):
        raise MoQError(f"{folder}: {kind}{name} differs from the model's")
