"""The weights in a checkpoint that DeepSpeed wrote, read without DeepSpeed.

ZeRO-1 and ZeRO-2 save the weights whole. ZeRO-3 saves a part of each for every process: those that are trained as
float32, one after the other in a few flat tensors, with room at the end of a part where the processes do not divide the
weight. What the run computed with is the same, rounded to its own dtype.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import MoQError, one_line
from .sources import Spec, Weights

_LATEST = "latest"
_WHOLE = "mp_rank_00_model_states.pt"
_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_TRAINED = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


class _Ignored:
    """What stands for an object of DeepSpeed's own, of which nothing is wanted."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def zero_folder(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint that DeepSpeed wrote its own files into; None if it wrote none.

    Raises:
        MoQError: The file that names it names none.
    """
    path = checkpoint / _LATEST
    if not path.is_file():
        return None
    name = path.read_text(encoding="utf-8").strip()
    folder = checkpoint / name
    if Path(name).name != name or not folder.is_dir():
        raise MoQError(f"{path} names {name!r}, which is not a folder beside it")
    return folder


def zero_weights(folder: Path) -> Weights:
    """The weights that DeepSpeed saved in a folder.

    Raises:
        MoQError: A file is missing or damaged, or the model was taken apart in another way too.
    """
    if any(folder.glob("*mp_rank_01*_model_states.pt")):
        raise MoQError(f"{folder}: the weights are taken apart by tensor parallelism, which moq_hf does not train with")
    if (folder / _WHOLE).is_file():
        return WholeWeights(folder / _WHOLE)
    return PartedWeights(folder)


class WholeWeights(Weights):
    """The weights of ZeRO-1 and ZeRO-2, in the dtype of the run.

    Args:
        path: The file.

    Raises:
        MoQError: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        module = _read(path)["module"]
        self.specs = {n: Spec(t.shape, t.dtype) for n, t in module.items() if isinstance(t, Tensor)}

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        return cast(Tensor, _read(self._path)["module"][name].clone())

    def place(self, name: str) -> Path:
        """The file."""
        return self._path


class PartedWeights(Weights):
    """The weights of ZeRO-3, put together of the parts of all processes.

    Args:
        folder: Of the files.

    Raises:
        MoQError: The file of a process is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        parts = _by_rank(folder, _PART)
        if 0 not in parts:
            raise MoQError(f"{folder}: zero_pp_rank_0_mp_rank_00_model_states.pt is missing: no weights of DeepSpeed")
        state = _read(parts[0])
        try:
            self._world = int(state["dp_world_size"])
            module: Mapping[str, Any] = state["module"]
            trained = {n: torch.Size(s) for shapes in state["param_shapes"] for n, s in shapes.items()}
            frozen = {n: torch.Size(s) for n, s in (state.get("frozen_param_shapes") or {}).items()}
            shared: Mapping[str, str] = state["shared_params"]
            self._buffers = [name for name in state["buffer_names"] if name in module]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MoQError(f"{parts[0]}: not as DeepSpeed writes it: {one_line(error, named=True)}") from error
        self._parts = _complete(folder, parts, self._world, parts[0].name)
        masters = _by_rank(folder, _TRAINED)
        prefix = "bf16_" if any(path.name.startswith("bf16_") for path in masters.values()) else ""
        first = f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"
        self._masters = _complete(folder, masters, self._world, first) if trained else []
        self._frozen = set(frozen)
        # Where the part of each begins in what a process has of the weights that are trained.
        self._starts: dict[str, int] = {}
        end = 0
        for name, shape in trained.items():
            self._starts[name] = end
            end += self._length(shape)
        for path in self._masters:
            there = sum(flat.numel() for flat in _flat(path))
            if there < end:
                raise MoQError(f"{path} holds {there} numbers, not the {end} of the weights that are trained")
        found = {name: Spec(shape, module[name].dtype) for name, shape in {**frozen, **trained}.items()}
        found |= {name: Spec(module[name].shape, module[name].dtype) for name in self._buffers}
        self._aliases = {name: other for name, other in shared.items() if other in found and name not in found}
        # In the order of the model.
        every = found | {name: found[other] for name, other in self._aliases.items()}
        self.specs = {name: every[name] for name in [*(n for n in module if n in every), *every]}

    def read(self, name: str) -> Tensor:
        """One tensor, as the run computed with it."""
        name, spec = self._aliases.get(name, name), self.specs[name]
        if name in self._buffers:
            return cast(Tensor, _read(self._parts[0])["module"][name].clone())
        if name in self._frozen:
            found = [_read(path)["frozen_param_fragments"][name].clone() for path in self._parts]
        else:
            part = slice(self._starts[name], self._starts[name] + self._length(spec.shape))
            found = [_cut(_flat(path), part).to(spec.dtype) for path in self._masters]
        return torch.cat(found)[: spec.shape.numel()].view(spec.shape)

    def place(self, name: str) -> Path:
        """The folder."""
        return self._folder

    def _length(self, shape: torch.Size) -> int:
        """Numbers that each process has of a weight."""
        return math.ceil(shape.numel() / self._world)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _complete(folder: Path, files: Mapping[int, Path], world: int, first: str) -> list[Path]:
    """The files of all processes, in their order.

    Raises:
        MoQError: One is missing.
    """
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        name = first.replace("rank_0_", f"rank_{missing[0]}_", 1)
        raise MoQError(f"{folder / name} is missing: the run had {world} processes, each with a file")
    return [files[rank] for rank in range(world)]


def _flat(path: Path) -> list[Tensor]:
    """What a process has of the weights that are trained, float32.

    Raises:
        MoQError: The file is damaged.
    """
    try:
        flat = _read(path)["optimizer_state_dict"]["fp32_flat_groups"]
    except (KeyError, TypeError) as error:
        raise MoQError(f"{path}: not as ZeRO-3 writes it: {one_line(error, named=True)}") from error
    return cast(list[Tensor], flat)


def _cut(flat: Sequence[Tensor], part: slice) -> Tensor:
    """A part of what several flat tensors hold one after the other, in memory of its own."""
    pieces, begin = [], 0
    for tensor in flat:
        low, high = max(part.start - begin, 0), min(part.stop - begin, tensor.numel())
        if low < high:
            pieces.append(tensor[low:high])
        begin += tensor.numel()
    return torch.cat(pieces) if pieces else torch.empty(0, device="cpu")


def _read(path: Path) -> Any:
    """What a file holds; its tensors are read only as they are used. Nothing in it is run.

    Raises:
        MoQError: It is damaged.
    """
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stubs: list[Any] = [(_Ignored, name) for name in foreign]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    # Whatever a damaged file makes torch and pickle raise.
    except Exception as error:
        raise MoQError(f"{path} is damaged: {one_line(error, named=True)}") from error
