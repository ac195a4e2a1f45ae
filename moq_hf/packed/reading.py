"""Reads a packed checkpoint once, and checks that tensors are as they were saved, and weights on their grids."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MoQError, explained, listed
from ..formats.stored import StoredWeight, by_matrix, per_row
from ..formats.table import ENDINGS, FORMS
from ..quantizer import Quantized, dequantize
from ..weight_matrix import parameter_of
from ..weight_spec import MAX_PACKED_BITS, WeightSpec
from .files import (
    ADAPTER,
    CONFIG,
    digest_of,
    digest_of_configs,
    digests_of_adapters,
    read_document,
    read_tensor,
    tensors_in,
)
from .state import read_layers, write_state


class Part(NamedTuple):
    """A tensor of a packed checkpoint.

    Attributes:
        name: The layer's name, or that of a tensor that is not a quantized weight.
        tensor: As the model computes with it.
        layer: How the weight is stored; None for any other tensor.
        codes: The weight's codes of up to 8 bits; see `stored_weights`.
    """

    name: str
    tensor: Tensor
    layer: WeightSpec | None = None
    codes: Quantized | None = None

    @property
    def parameter(self) -> str:
        """The name of the tensor in the model's files, were it not quantized."""
        if self.layer is None:
            return self.name
        return parameter_of(self.name, self.layer.kind)


def read_parts(directory: str | os.PathLike[str]) -> Iterator[Part]:
    """Read a packed checkpoint, each tensor once, and check everything on the way.

    Args:
        directory: What `save_quantized` wrote.

    Yields:
        The weights of the layers, by the names of `by_matrix`, then all other tensors.

    Raises:
        MoQError: Something is damaged or missing, or a weight is not on its grid; names
            the file and the tensor.
    """
    folder = Path(directory)
    state, layers = read_layers(folder)
    _check_adapters(folder, state)
    with explained(f"{folder}: the weights cannot be read"):
        yield from _parts(folder, state, layers)


def _check_adapters(folder: Path, state: Mapping[str, Any]) -> None:
    """Check the files of adapters; those of a merged one may be gone.

    Raises:
        MoQError: One is damaged or missing, or was not saved with the model; names it.
    """
    saved = state.get("adapters")
    # Folders of 0.2 say nothing of them.
    if saved is None:
        return
    there = digests_of_adapters(folder)
    beside = {path for path in {*saved, *there} if path.startswith(f"{ADAPTER}/")}
    for path in sorted(beside | (saved.keys() & there.keys())):
        if path not in saved:
            raise MoQError(f"{folder / path} was not saved with the model")
        if there.get(path) != saved[path]:
            raise MoQError(f"{folder / path} is missing or not as it was saved")


def seal(folder: Path, state: dict[str, Any], layers: Mapping[str, WeightSpec]) -> None:
    """Read and check the files that were just written, and write their state with the digests of what was read.

    Args:
        folder: Holds the weights and the config.
        state: The content of `moq_state.json`, into which the digests are written.
        layers: The layers in the state.

    Raises:
        MoQError: A weight is not on its grid; names the tensor.
    """
    state["tensors"] = dict.fromkeys(tensors_in(folder))
    for _ in _parts(folder, state, layers):
        pass
    state["adapters"] = digests_of_adapters(folder)
    write_state(folder, state)


def stored_weights(directory: str | os.PathLike[str]) -> dict[str, Quantized]:
    """The codes, scales and zero points of a packed checkpoint's layers of up to 8 bits, by the names of `by_matrix`.

    Each row has its own scales. Codes and zero points are signed: asymmetric ones are
    2^(bits-1) less than those of `quantizer`. If the files hold rounded floats, the
    codes are computed from them; a layer whose floats were rounded to a half dtype is
    left out.

    Args:
        directory: What `save_quantized` wrote.

    Raises:
        MoQError: As `read_parts`.
    """
    return {
        part.name: part.codes
        for part in read_parts(directory)
        if part.codes is not None
    }


def _parts(
    folder: Path, state: Mapping[str, Any], layers: Mapping[str, WeightSpec]
) -> Iterator[Part]:
    """Yield the parts of a folder, and fill in digests that are None in the state.

    Raises:
        MoQError: As `read_parts`.
    """
    groups = _groups_of(folder, state)
    digests: dict[str, str | None] = state["tensors"]
    places = tensors_in(folder)
    others = sorted(places.keys() ^ digests.keys())
    if others:
        raise MoQError(
            f"{folder}: missing from the weights, or not saved with them: {listed(others)}"
        )
    unread = dict(places)

    def read(name: str) -> Tensor:
        tensor = read_tensor(places[name], name)
        digest = digest_of(tensor)
        if digests[name] not in (None, digest):
            raise MoQError(f"{folder}: tensor {name} is damaged")
        digests[name] = digest
        unread.pop(name, None)
        return tensor

    weights = _weights_of(places)
    # The names of layers in the files, where they differ from their own.
    renamed = state["names"] or {}
    for name, layer in by_matrix(layers).items():
        place = renamed.get(name, name)
        # Experts that are not packed are one tensor.
        names = weights.get(place, {"weight": place})
        tensors = {part: read(there) for part, there in names.items()}
        scheme = None if layer.group is None else groups[layer.group]
        yield _part(name, StoredWeight(f"{folder}: {name}", layer, scheme, tensors))
        for other in layer.tied:
            # A tied layer has the scales of this one.
            for there in weights.get(renamed.get(other, other), {}).values():
                read(there)
    for name in list(unread):
        tensor = read(name)
        # In the layout "gemma" the scale is a scalar, and 0 leaves in- or outputs
        # alone.
        if name.endswith("put_activation_scale"):
            if not tensor.any():
                continue
            name = name.replace("put_activation_scale", "put_scale")
            tensor = tensor.view(1)
        yield Part(name, tensor)


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
    return quantization.get("config_groups", state["groups"]) or {}


def _weights_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group the tensors of each weight: module -> last part of the name -> name."""
    weights: dict[str, dict[str, str]] = {}
    for name in names:
        owner, _, part = name.rpartition(".")
        for ending, kind in ENDINGS.items():
            if name.endswith(ending):
                owner, part = name.removesuffix(ending), kind
        if part.startswith("weight"):
            weights.setdefault(owner, {})[part] = name
    return weights


def _part(name: str, stored: StoredWeight) -> Part:
    """Check that a layer's weight is on its grid, and return it.

    Raises:
        MoQError: It is not.
    """
    layer = stored.layer
    if layer.stored == "float":
        return Part(name, stored.parts["weight"], layer)
    values = FORMS[layer.stored].read(stored)
    stored.check(values)
    is_exact = True
    if stored.scheme is None:
        weight = stored.parts["weight"]
        is_exact = layer.format != "int" or weight.dtype == torch.float32
    else:
        weight = dequantize(*values)
        if layer.kind == "experts_t":
            # The rows of each expert follow those of the one before.
            experts = len(stored.parts["weight_scale"])
            weight = weight.view(experts, -1, weight.shape[1]).transpose(1, 2)
    has_codes = is_exact and layer.bits <= MAX_PACKED_BITS
    codes = _signed(values, layer.bits) if has_codes else None
    return Part(name, weight, layer, codes)


def _signed(values: Quantized, bits: int) -> Quantized:
    """Give each row its own scales, and asymmetric codes a sign."""
    codes, scale, zero = per_row(values)
    if zero is None:
        return Quantized(codes, scale, None)
    half = 2 ** (bits - 1)
    return Quantized(codes - half, scale, zero - half)
