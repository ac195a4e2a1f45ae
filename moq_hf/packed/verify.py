"""What was written, read back: each weight is on the grid that it declares."""

import copy
import html
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import MoQError, explained, listed
from ..formats.int_quantized import unsaved_buffers
from ..formats.stored import StoredWeight, by_matrix, per_row
from ..formats.table import ENDINGS, FORMS
from ..lora import is_merged
from ..model.convert import dequantize_model, quantized_layers
from ..model.inventory import is_packed
from ..model.sizes import covered
from ..names import adapters, pretrained
from ..quantizer import Quantized, dequantize
from ..schedule import FLOAT_BITS
from ..seams.transformers import (
    never_saved,
    original_format,
    tied_parameters,
)
from ..text import megabytes, table
from ..weight_matrix import parameter_of
from ..weight_spec import MAX_PACKED_BITS, WeightSpec
from .encode import without_peft_names
from .files import (
    CONFIG,
    digest_of,
    digest_of_configs,
    read_document,
    read_tensor,
    size_of,
    tensors_in,
)
from .load_check import Proof, has_failed, reference_to
from .state import proof_in, read_layers


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

    layers: dict[str, WeightSpec]
    file_bytes: int
    state: dict[str, Any]
    proof: Proof | None = None

    @property
    def float_bytes(self) -> int:
        """Size of the same tensors in float."""
        return cast(int, self.state["float_bytes"])

    @property
    def loads_by_hand(self) -> bool:
        """Whether `from_pretrained` does not make the model that was evaluated."""
        return has_failed(self.proof) or cast(bool, self.state["by_hand"])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Verification: {self.summary()}>"

    def table(self) -> str:
        """A line per layer and the totals, for a terminal."""
        return "\n".join([table(self.rows(), left=(0, 2)), "", *self.totals()])

    def rows(self) -> Sequence[tuple[str, ...]]:
        """A row for each layer, after the head."""
        rows = [("module", "bits", "stored", "scales", "bytes", "before")]
        for name, layer in self.layers.items():
            bits = "float" if layer.bits == FLOAT_BITS else str(layer.bits)
            bits = bits if layer.format == "int" else layer.format
            scales = str(math.prod(layer.scales) or "-")
            sizes = (f"{layer.bytes:,}", f"{layer.bytes_before:,}")
            rows.append((name, bits, layer.stored, scales, *sizes))
        return rows

    def totals(self) -> list[str]:
        """The sizes of the quantized layers and of all weights, and how much of the model is quantized."""
        after, before = self.quantized_bytes
        weights = sum(math.prod(layer.shape) for layer in self.layers.values())
        return [
            f"{len(self.layers)} quantized layers: {after:,} bytes, {before:,} before ({after / before:.3f}); "
            f"{8 * after / weights:.3f} bits a weight",
            f"all weights: {self.file_bytes:,} bytes, {self.float_bytes:,} before "
            f"({self.file_bytes / self.float_bytes:.3f})",
            f"quantized: {self.coverage()}; mean {self.mean_bits:.2f} bits over the whole model",
        ]

    def summary(self) -> str:
        """What was written, whether it was verified, and its size, in sentences."""
        form = ""
        proof = f"{self.proof or 'Not verified: nothing was compared'}"
        if self.state["layout"] == "floats":
            form = "Floats on the grid, not packed. "
        if self.state["by_hand"]:
            proof = "Not verified: load_state_dict alone loads it"
        elif has_failed(self.proof):
            proof = "NOT what was evaluated, as the warning above says"
        before = megabytes(self.float_bytes).removesuffix(" MB")
        return f"{form}{proof}. {megabytes(self.file_bytes)}, float {before}."

    def verdict(self) -> str:
        """That the files are whole, and how they compared when they were saved, in two lines."""
        summary = f"{self.proof}." if has_failed(self.proof) else self.summary()
        version = self.state["versions"].get("transformers")
        return (
            "Intact: every tensor is as it was saved, and every weight is on the grid that it declares.\n"
            f"Saved with transformers {version}. {summary}"
        )

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
        MoQError: Something is damaged, missing or different, and the text names the
            file and the tensor; or the model cannot answer `inputs`.

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
    with explained(f"{folder}: the weights cannot be read"):
        contents = _Contents(folder, state, layers)
        for name, layer in contents.layers.items():
            weight = _checked(contents.weight(name))
            _compare(folder, parameter_of(name, layer.kind), weight, expected)
        compared = {parameter_of(name, layer.kind) for name, layer in layers.items()}
        for name in contents.others:
            tensor = contents.tensor(name)
            # In the layout "gemma" the scale is a scalar, and 0 leaves in- or outputs
            # alone.
            if name.endswith("put_activation_scale"):
                if not tensor.any():
                    continue
                name = name.replace("put_activation_scale", "put_scale")
                tensor = tensor.view(1)
            _compare(folder, name, tensor, expected)
            compared.add(name)
        if model is not None and expected is not None:
            _check_all_compared(folder, model, expected, compared)
    if inputs is None or model is None:
        proof = proof_in(state)
    else:
        reference = reference_to(model, inputs)
        proof = reference.prove(folder, state["rounds_inputs"])
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
    """The codes, scales and zero points of a packed checkpoint's layers of up to 8 bits, by the names of `by_matrix`.

    Each row has scales of its own. Codes and zero points are signed: asymmetric ones
    are less by 2^(bits-1) than those of `quantizer`. Where the files hold floats on
    their grid, the codes are computed from them; a layer whose floats a half dtype
    rounded is left out.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: Something is damaged or missing; names the file and the tensor.
    """
    folder = Path(directory)
    contents = _Contents(folder, *read_layers(folder))
    weights: dict[str, Quantized] = {}
    for name, layer in contents.layers.items():
        if layer.stored == "float" or layer.bits > MAX_PACKED_BITS:
            continue
        stored = contents.weight(name)
        is_rounded = stored.scheme is None and layer.format == "int"
        if is_rounded and stored.parts["weight"].dtype != torch.float32:
            continue
        codes, scale, zero = per_row(FORMS[layer.stored].read(stored))
        if zero is not None:
            half = 2 ** (layer.bits - 1)
            codes = codes - half
            zero = zero - half
        weights[name] = Quantized(codes, scale, zero)
    return weights


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as its forward pass uses them, on the CPU."""
    tensors: dict[str, Tensor] = {}
    if is_packed(model):
        # What it rounds inputs with would be lost by making it a plain model.
        packed = pretrained(model).state_dict().items()
        tensors = {n: t for n, t in packed if n.endswith(".input_scale")}
        model = dequantize_model(copy.deepcopy(model))
    model = pretrained(model)
    tensors |= model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            tensors |= unsaved_buffers(name, module)
    for name, layer in quantized_layers(model).items():
        tensors[parameter_of(name, layer.kind)] = layer.quantized_weight()
        inputs = layer.moq.inputs
        if inputs is not None and inputs.scale is not None:
            tensors[f"{name}.input_scale"] = inputs.scale.float()
    on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return without_peft_names(on_cpu, adapters(model, is_merged(model)))


def _named_as_in_files(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Name a model's tensors as the files do; weights of quantized layers also keep the names of their modules."""
    tensors = weights_of(model)
    if state["names"] is None:
        return tensors
    # Layers have their own names here, and so have weights that would be taken apart.
    return tensors | original_format(pretrained(model), tensors)


class _Contents:
    """The tensors of a packed checkpoint: each is read when it is asked for, and must be as it was saved.

    Attributes:
        layers: What the state says of each weight.
        others: The names of the tensors that are no quantized weights.

    Raises:
        MoQError: The files hold other tensors than were saved, or the config is another
            one.
    """

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Any],
        layers: Mapping[str, WeightSpec],
    ) -> None:
        self.folder = folder
        self.layers = by_matrix(layers)
        self._digests: Mapping[str, str] = state["tensors"]
        self._groups = _groups_of(folder, state)
        self._places = tensors_in(folder)
        others = sorted(self._places.keys() ^ self._digests.keys())
        if others:
            raise MoQError(
                f"{folder}: missing from the weights, or not saved with them: {listed(others)}"
            )
        # What modules are called in the files, where that is not their own name.
        renamed = state["names"] or {}
        weights: dict[str, dict[str, str]] = {}
        for name in self._places:
            owner, _, part = name.rpartition(".")
            for ending, kind in ENDINGS.items():
                if name.endswith(ending):
                    owner, part = name.removesuffix(ending), kind
            if part.startswith("weight"):
                weights.setdefault(owner, {})[part] = name
        # Of each layer the last part of each tensor's name, with the name.
        self._parts: dict[str, dict[str, str]] = {}
        taken: set[str] = set()
        for name, layer in self.layers.items():
            place = renamed.get(name, name)
            # Experts that are not packed are one tensor.
            self._parts[name] = weights.get(place, {"weight": place})
            taken.update(self._parts[name].values())
            # The scales of a module that is tied to a table are those of the table.
            tied = (weights.get(renamed.get(other, other), {}) for other in layer.tied)
            taken.update(*(parts.values() for parts in tied))
        self.others = [name for name in self._places if name not in taken]

    def tensor(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            MoQError: It is damaged.
        """
        tensor = read_tensor(self._places[name], name)
        if digest_of(tensor) != self._digests[name]:
            raise MoQError(f"{self.folder}: tensor {name} is damaged")
        return tensor

    def weight(self, name: str) -> StoredWeight:
        """The weight of a layer."""
        layer = self.layers[name]
        tensors = {part: self.tensor(name) for part, name in self._parts[name].items()}
        scheme = None if layer.group is None else self._groups[layer.group]
        return StoredWeight(f"{self.folder}: {name}", layer, scheme, tensors)


def _groups_of(folder: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config groups.

    Raises:
        MoQError: The config is not as it was saved.
    """
    # A model of a custom class has no config.
    if state["config_json"] is None:
        return {}
    config = read_document(folder / CONFIG)
    if digest_of_configs(folder) != state["config_json"]:
        raise MoQError(
            f"{folder / CONFIG}, or a config beside it, is not as it was saved"
        )
    quantization = config.get("quantization_config", {})
    groups: Mapping[str, Any] | None
    groups = quantization.get("config_groups", state["groups"])
    return groups or {}


def _checked(stored: StoredWeight) -> Tensor:
    """Check that a layer's weight is on its grid, and return it.

    Raises:
        MoQError: It is not.
    """
    if stored.layer.stored != "float":
        values = FORMS[stored.layer.stored].read(stored)
        stored.check(values)
        if stored.scheme is not None:
            weight = dequantize(*values)
            if stored.layer.kind == "experts_t":
                # Those of the experts stand one below the other.
                experts = len(stored.parts["weight_scale"])
                weight = weight.view(experts, -1, weight.shape[1]).transpose(1, 2)
            return weight
    return stored.parts["weight"]


def _check_all_compared(
    folder: Path, model: nn.Module, expected: Mapping[str, Tensor], compared: set[str]
) -> None:
    """Check that the files hold every tensor of the model, but for those that loading makes or ties.

    Raises:
        MoQError: They lack some; names them.
    """
    base = pretrained(model)
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
) -> None:
    """Compare a tensor with the model's in the model's dtype, if there is one.

    Raises:
        MoQError: They differ.
    """
    if model is None:
        return
    expected = model.get(name)
    if expected is None or not torch.equal(tensor.to(expected.dtype), expected):
        raise MoQError(f"{folder}: {name} differs from the model's")
