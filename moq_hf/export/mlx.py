"""`export_mlx`: writes a packed checkpoint's integers into a folder for mlx-lm, which runs models on Macs.

MLX computes a weight as q * s + b: q is a code from 0, packed without gaps into words of
32 bits, and 32, 64 or 128 weights of a row share a scale s and a bias b. A weight on a
grid of moq_hf, (code - zero) * scale, becomes that with

| MLX | here |
| --- | --- |
| bits w | the least of 2, 3, 4, 5, 6 and 8 that holds the codes |
| q | code + 2^(w-1), for a code with a sign |
| s | scale, repeated if more weights share it |
| b | -(zero + 2^(w-1)) * scale |

In float32 the sum is exact if scales have the values of a half dtype. With other scales
many weights differ in the last bit.
"""

import math
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import PreTrainedConfig

from ..config import MoQConfig
from ..errors import MoQError, listed, write_json
from ..packed.files import (
    CONFIG,
    copy_tokenizer,
    digest_of,
    new_path,
    read_document,
    read_tensor,
    size_of,
    staged,
    tensors_in,
)
from ..packed.pack import empty_model, read_config
from ..packed.reading import read_parts
from ..packed.state import check_taken
from ..packed.verify import recorded
from ..quantizer import Quantized, dequantize, per_weight
from ..seams.transformers import original_format
from ..servers import MLX
from ..text import dtype_name, megabytes, progress
from ..weight_matrix import is_experts, parameter_of

_WIDTHS = (2, 3, 4, 5, 6, 8)
_LARGEST_GROUP = 128
# Rows whose codes are taken apart into bits at once.
_ROWS = 1024
_GENERATION = "generation_config.json"
# Keys of a config that are about the folder's own files.
_OF_FILES = ("quantization_config", "configuration_files", "transformers_weights")
# Keys of `rope_parameters`, and what mlx-lm calls them.
_ROPE = (
    ("rope_theta", "rope_theta"),
    ("rope_theta", "rotary_emb_base"),
    ("partial_rotary_factor", "partial_rotary_factor"),
    ("partial_rotary_factor", "rotary_pct"),
)
# A tensor of one expert, or of all experts of a block.
_EXPERT = re.compile(r"(.+\.)experts\.(?:(\d+)\.)?(\w+?)(?:\.(weight|scales|biases))?")
# The names of Mixtral's matrices in mlx-lm.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class MlxExport:
    """A folder that `export_mlx` wrote.

    Attributes:
        path: The folder.
        bytes: Size of its weights.
        layers: Group size and bits of each quantized module, as in the config.
        floats: Layers of the checkpoint without codes, which are floats here too.
        different: The share of weights that differ from the checkpoint's.
        weight_error: The largest difference, in quantization steps.
        scale_dtype: Dtype of scales and biases.
        can_be_exact: Whether `"serve": ["mlx"]` would change the scales of another run.
    """

    path: Path
    bytes: int
    layers: Mapping[str, Mapping[str, int]]
    floats: tuple[str, ...]
    different: float
    weight_error: float
    scale_dtype: torch.dtype
    can_be_exact: bool

    def table(self) -> str:
        """Size, layers and differences, for a terminal."""
        counts = Counter(tuple(scheme.values()) for scheme in self.layers.values())
        kinds = [
            f"{count} with {bits} bits in groups of {size}"
            for (size, bits), count in sorted(counts.items())
        ]
        lines = [
            f"{self.path}: {megabytes(self.bytes)}, for mlx_lm.load or mlx_lm.generate --model",
            f"modules: {', '.join(kinds)}",
        ]
        if self.floats:
            lines.append(f"floats, as in the checkpoint: {listed(self.floats)}")
        is_half = self.scale_dtype != torch.float32
        result = "every weight is that of the checkpoint, bit for bit"
        if self.different:
            why = "scales are float32"
            if self.can_be_exact:
                why += '; "serve": ["mlx"] trains scales that are exact'
            if is_half:
                why = "--half rounds scales and biases"
            result = (
                f"{self.different:.1%} of the weights differ from the checkpoint's, by up to "
                f"{self.weight_error:.2g} steps: {why}"
            )
        lines.append(f"read back, q * s + b in float32: {result}")
        if is_half:
            name = dtype_name(self.scale_dtype)
            lines.append(
                f"scales are {name}: MLX computes in it if a table has codes, or the model's floats are {name} too"
            )
        return "\n".join(lines)


class Affine(NamedTuple):
    """A weight as MLX holds it.

    Attributes:
        weight: The codes, uint32 `[rows, columns * bits / 32]`.
        scales: `[rows, columns / group_size]`.
        biases: Values of the code 0, in the shape of the scales.
        bits: Bits of a code.
        group_size: Weights of a row that share a scale.
    """

    weight: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group_size: int

    def values(self) -> Tensor:
        """The weight that MLX computes with in float32, `[rows, columns]`."""
        rows, groups = self.scales.shape
        shape = (rows, groups * self.group_size)
        scales = per_weight(self.scales.float(), shape)
        biases = per_weight(self.biases.float(), shape)
        codes = _regrouped(self.weight.view(torch.uint8), 8, self.bits)
        return codes * scales + biases


def affine_of(
    stored: Quantized, bits: int, dtype: torch.dtype = torch.float32
) -> Affine:
    """Put a weight's integers into MLX's form.

    Args:
        stored: The integers, as from `stored_weights`.
        bits: Their bit width, 1 to 8.
        dtype: Dtype for scales and biases.

    >>> import torch
    >>> codes = torch.arange(-4, 4).repeat(1, 4)
    >>> made = affine_of(Quantized(codes, torch.tensor([[0.5]]), None), 3)
    >>> made.bits, made.group_size, made.values()[0, :8].tolist()
    (3, 32, [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5])
    """
    codes, scale, zero = stored
    rows, columns = codes.shape
    width = next(width for width in _WIDTHS if width >= bits)
    size = math.gcd(columns // scale.shape[1], _LARGEST_GROUP)
    half = 2 ** (width - 1)
    shape = (rows, columns // size)
    scales = per_weight(scale, shape).to(dtype)
    lowest = torch.full_like(scales, half, dtype=torch.float32)
    if zero is not None:
        lowest += per_weight(zero, shape)
    biases = (-lowest * scales.float()).to(dtype)
    packed = _regrouped((codes + half).to(torch.uint8), width, 8)
    return Affine(packed.view(torch.uint32), scales, biases, width, size)


def _regrouped(numbers: Tensor, bits: int, into: int) -> Tensor:
    """Write uint8 numbers `[rows, count]` of some bits as numbers of others, each number's lowest bit first."""
    parts = []
    for part in torch.split(numbers, _ROWS):
        each = np.unpackbits(
            part.numpy()[..., None], axis=-1, count=bits, bitorder="little"
        )
        row = np.packbits(each.reshape(len(part), -1, into), axis=-1, bitorder="little")
        parts.append(torch.from_numpy(row[..., 0]))
    return torch.cat(parts)


def export_mlx(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    half: bool = False,
) -> MlxExport:
    """Write a packed checkpoint as a folder that mlx-lm loads, with the checkpoint's own integers.

    Tensors have the names of transformers, which mlx-lm reads, except experts, which it
    has stacked. The tokenizer is copied. The files are read back and compared before the
    folder appears, without MLX.

    Args:
        directory: What `save_quantized` wrote.
        out: The folder to make, or an empty one.
        half: Write scales and biases in half precision, for a smaller folder: in
            bfloat16 if that is the model's dtype, or else in float16.

    Returns:
        Size, layers, and how weights differ.

    Raises:
        MoQError: The checkpoint is damaged, mlx-lm has no such model, a grid does not
            fit, a scale does not fit float16, it has adapters beside it, or `out` is not
            empty.
    """
    target = new_path(out)
    folder = Path(directory)
    check_taken(folder, MLX)
    state = recorded(folder).state
    names = state["names"] or {}
    trained = MoQConfig.from_dict(state["config"])
    model = empty_model(read_config(folder), folder)
    config = _config(folder, model.config)
    own = model.state_dict(keep_vars=True)
    written = original_format(model, own)
    dtype = torch.float32
    if half:
        is_bfloat16 = config.get("dtype") == "bfloat16"
        dtype = torch.bfloat16 if is_bfloat16 else torch.float16
    tensors = _Tensors(_renamed_blocks(own, written))
    layers = {}
    floats = []
    total = different = 0
    error = 0.0
    for part in progress(read_parts(folder), "MLX"):
        name = names.get(part.name, part.name)
        layer = part.layer
        if layer is None:
            # compressed-tensors also writes scales of inputs, and buffers that loading makes.
            if name in own or name in written:
                tensors.add(name, part.tensor)
            continue
        if part.codes is None or layer.kind == "conv":
            floats.append(name)
            tensors.add(parameter_of(name, layer.kind), part.tensor)
            continue
        made = affine_of(part.codes, layer.bits, dtype)
        if not bool(made.biases.isfinite().all()):
            raise MoQError(
                f"{folder}: {name}: a scale is too large for float16; leave out --half"
            )
        exact = dequantize(*part.codes)
        off = (made.values() - exact).abs()
        total += off.numel()
        different += int(off.count_nonzero())
        # A row of zeros may have the scale 0.
        steps = off / per_weight(part.codes.scale.abs(), off.shape)
        error = max(error, float(steps.nan_to_num(0.0).max()))
        scheme = {"group_size": made.group_size, "bits": made.bits}
        for key in ("weight", "scales", "biases"):
            tensor = getattr(made, key)
            if is_experts(layer.kind):
                tensor = tensor.unflatten(0, (len(part.tensor), -1))
            for place in tensors.add(f"{name}.{key}", tensor):
                layers[place.rpartition(".")[0]] = scheme
    if not layers:
        raise MoQError(f"{folder}: no layer has codes, so there are none to write")
    stacked = tensors.stacked()
    config["quantization"] = _quantization(layers)
    # Newer clients look for it under this name.
    config["quantization_config"] = config["quantization"]
    with staged(target) as staging:
        staging.mkdir()
        save_torch_state_dict(stacked, staging, metadata={"format": "mlx"})
        write_json(staging / CONFIG, config)
        copy_tokenizer(folder, staging)
        if (folder / _GENERATION).exists():
            shutil.copyfile(folder / _GENERATION, staging / _GENERATION)
        _prove(staging, stacked)
    return MlxExport(
        path=Path(out),
        bytes=size_of(target),
        layers=layers,
        floats=tuple(floats),
        different=different / total,
        weight_error=error,
        scale_dtype=dtype,
        # Found grids have theirs from the weights.
        can_be_exact=trained.scale_dtype is None and MLX.key not in trained.serve,
    )


class _Tensors:
    """The tensors of the folder, by their names in mlx-lm.

    Args:
        blocks: The blocks of experts that have another name in the files.
    """

    def __init__(self, blocks: Mapping[str, str]) -> None:
        self._blocks = blocks
        self._parts: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def add(self, name: str, tensor: Tensor) -> list[str]:
        """Add a tensor by its name in the checkpoint, and return its names in mlx-lm."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            self._parts[name][0] = tensor
            return [name]
        block, number, matrix, part = found.groups()
        block = self._blocks.get(block, block)
        matrices = [_MATRICES.get(matrix, matrix)]
        pieces: tuple[Tensor, ...] = (tensor,)
        if number is not None:
            pieces = (tensor[None],)
        elif matrix == "gate_up_proj":
            matrices = ["gate_proj", "up_proj"]
            pieces = tensor.chunk(2, 1)
        places = [f"{block}switch_mlp.{each}.{part or 'weight'}" for each in matrices]
        for place, piece in zip(places, pieces, strict=True):
            self._parts[place][int(number or 0)] = piece
        return places

    def stacked(self) -> dict[str, Tensor]:
        """The tensors, with the experts of a block in one."""
        made = {}
        for name, parts in self._parts.items():
            pieces = [parts[number] for number in sorted(parts)]
            made[name] = (
                torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
            )
        return made


def _renamed_blocks(
    own: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> dict[str, str]:
    """The names of blocks of experts in the files, by their own, from the routers in both."""
    places = {id(tensor): name for name, tensor in written.items()}
    router = "gate.weight"
    return {
        name.removesuffix(router): places[id(tensor)].removesuffix(router)
        for name, tensor in own.items()
        if name.endswith(f".{router}") and id(tensor) in places
    }


def _quantization(layers: Mapping[str, dict[str, int]]) -> dict[str, Any]:
    """What mlx-lm's config says of the layers: the scheme of most, and that of each other one."""
    kinds = Counter(tuple(scheme.items()) for scheme in layers.values())
    most = dict(kinds.most_common(1)[0][0])
    others = {name: scheme for name, scheme in layers.items() if scheme != most}
    return {**most, "mode": "affine", **others}


def _config(folder: Path, model: PreTrainedConfig) -> dict[str, Any]:
    """The model's config with the keys that mlx-lm reads where transformers has others now."""
    document = read_document(folder / CONFIG)
    for key in _OF_FILES:
        document.pop(key, None)
    document["tie_word_embeddings"] = model.tie_word_embeddings
    for name, own in model.attribute_map.items():
        if own in document:
            document.setdefault(name, document[own])
    pattern = "sliding_window_pattern"
    if f"_{pattern}" in document:
        document.setdefault(pattern, document[f"_{pattern}"])
    rope = document.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        document.setdefault("rope_local_base_freq", local)
        rope = rope["full_attention"]
    for key, name in _ROPE:
        if key in rope:
            document.setdefault(name, rope[key])
    is_scaled = rope.get("rope_type", "default") != "default"
    document.setdefault("rope_scaling", rope if is_scaled else None)
    return document


def _prove(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Check that a folder holds these tensors.

    Raises:
        MoQError: It does not; names them.
    """
    found = {
        (name, digest_of(read_tensor(path, name)))
        for name, path in tensors_in(folder).items()
    }
    written = {(name, digest_of(tensor)) for name, tensor in expected.items()}
    wrong = {name for name, _ in found ^ written}
    if wrong:
        raise MoQError(
            f"{folder}: {listed(sorted(wrong))} was not read back as it was written"
        )
