"""`found_grids`: the grids that the weights of an ordinary folder or a GGUF file already lie on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MoQError, explained, read_json, require, shortened
from ..lattice import FoundGrid, find_grid
from ..text import progress, table
from .checkpoint_weights import safetensors_weights
from .files import CONFIG, INDEX, SINGLE
from .state import STATE_NAME

_GGUF = ".gguf"


@dataclass(frozen=True)
class FoundMatrix:
    """A weight matrix of a folder or file, and the grid on which it lies.

    Attributes:
        name: The tensor's name.
        stored: Its dtype, or its type in a GGUF file.
        numbers: How many weights it has.
        grid: The grid.
        is_transposed: Whether groups run along columns, as in a Conv1D of GPT-2.
    """

    name: str
    stored: str
    numbers: int
    grid: FoundGrid
    is_transposed: bool = False

    @property
    def in_words(self) -> str:
        """The grid, for messages."""
        return f"{self.grid.in_words}{', along columns' * self.is_transposed}"


def has_floats(path: Path) -> bool:
    """True for a GGUF file, a folder with one, and a folder with weights in safetensors that are not quantized.

    Raises:
        MoQError: A folder has no weights, or those that another program quantized.
    """
    if path.suffix == _GGUF:
        return path.is_file()
    states = (path / STATE_NAME, path / "quantized" / STATE_NAME)
    if not path.is_dir() or any(state.is_file() for state in states):
        return False
    config = path / CONFIG
    document = read_json(config) if config.is_file() else {}
    fault = None
    if "quantization" in document:
        fault = "was written for MLX"
    elif "quantization_config" in document:
        fault = f"is quantized, and {STATE_NAME}, which moq_hf writes, is missing"
    elif not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        fault = None if _gguf_in(path) else "holds no weights in safetensors"
    if fault is not None:
        raise MoQError(
            f"{path} {fault}; moq-hf inspect reads packed checkpoints of moq_hf, folders of floats in safetensors, "
            "and GGUF files"
        )
    return True


def found_grids(path: Path) -> list[FoundMatrix]:
    """Find the grid of each weight matrix, with one at a time in memory.

    Args:
        path: A folder with weights in safetensors, a GGUF file, or a folder with one.

    Raises:
        MoQError: It holds no matrix of floats, or cannot be read.
    """
    gguf = path if path.suffix == _GGUF else _gguf_in(path)
    tensors = _matrices(path) if gguf is None else _matrices_of_gguf(gguf)
    found = []
    for name, stored, weight in progress(tensors, "grids"):
        grid, is_transposed = find_grid(weight.flatten(0, -2)), False
        if not grid.is_whole:
            turned = find_grid(weight.transpose(-1, -2).flatten(0, -2))
            if turned.share > grid.share:
                grid, is_transposed = turned, True
        found.append(FoundMatrix(name, stored, weight.numel(), grid, is_transposed))
    if not found:
        raise MoQError(f"{path} holds no matrix of floats")
    return found


def found_table(found: list[FoundMatrix]) -> str:
    """How many matrices lie on which grid, and the names of those that lie on none wholly, for a terminal."""
    rows = [("grid", "stored", "matrices", "weights", "groups on it", "such as")]
    kinds: dict[tuple[str, str], list[FoundMatrix]] = {}
    for each in found:
        kinds.setdefault((each.in_words, each.stored), []).append(each)
    for (words, stored), those in kinds.items():
        groups = sum(each.grid.groups for each in those)
        on_grid = sum(each.grid.on_grid for each in those)
        numbers = f"{sum(each.numbers for each in those):,}"
        share = _percent(on_grid / groups)
        rows.append((words, stored, str(len(those)), numbers, share, those[0].name))
    whole = [each for each in found if each.grid.is_whole]
    lines = [table(rows, left=(0, 1, 5)), ""]
    lines.append(
        f"{len(whole)} of {len(found)} matrices lie wholly on a grid of at most 8 bits."
    )
    usable = [each.name for each in whole if each.grid.scales is not None]
    if usable:
        lines.append(
            'quantize_model(model, grid="found"), or "grid": "found" in a config, keeps these weights as they are.'
        )
    others = [each.name for each in whole if each.grid.scales is None]
    if others:
        lines.append(
            f'A minimum is no multiple of its scale: grid: "found" does not take {shortened(others)}.'
        )
    zeros = [each.name for each in found if each.grid.zeros == each.grid.groups]
    if zeros:
        lines.append(f"Zeros alone, which lie on every grid: {shortened(zeros)}.")
    return "\n".join(lines)


def _percent(share: float) -> str:
    """A share in percent, rounded down so that only a whole is 100 %.

    >>> _percent(1.0), _percent(0.99999), _percent(0.5)
    ('100 %', '99.99 %', '50.00 %')
    """
    return "100 %" if share == 1 else f"{math.floor(share * 1e4) / 100:.2f} %"


def _gguf_in(folder: Path) -> Path | None:
    """The one GGUF file of a folder without weights in safetensors."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return None
    files = sorted(folder.glob(f"*{_GGUF}"))
    return files[0] if len(files) == 1 else None


def _matrices(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    weights = safetensors_weights(folder)
    for name, shape in weights.specs.items():
        if shape.dim() in (2, 3) and shape.is_floating_point() and shape.numel():
            weight = weights[name]
            yield name, str(weight.dtype).removeprefix("torch."), weight


def _matrices_of_gguf(path: Path) -> Iterator[tuple[str, str, Tensor]]:
    require("gguf", "gguf")
    from gguf import GGUFReader
    from gguf.quants import dequantize

    with explained(f"{path} cannot be read as a GGUF file"):
        tensors = GGUFReader(path).tensors
    for tensor in tensors:
        if len(tensor.shape) < 2:
            continue
        with explained(f"{path}: {tensor.name} cannot be read"):
            floats = dequantize(tensor.data, tensor.tensor_type)
        yield tensor.name, tensor.tensor_type.name, torch.from_numpy(floats.copy())
