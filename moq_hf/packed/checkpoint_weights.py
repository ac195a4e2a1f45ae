"""The float weights of a run's checkpoint, read one tensor at a time: safetensors, and the shards of FSDP2 and ZeRO.

DeepSpeed's files are read without DeepSpeed. ZeRO-1 and ZeRO-2 save the weights whole.
ZeRO-3 saves a part of each weight for every process: trained ones as float32, one after
the other in a few flat tensors, with padding at the end of a part if the processes do not
divide the weight. The run computed with these values, rounded to its own dtype.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MoQError, explained
from .files import read_tensor, tensors_in

# Accelerate saves a model with this before the names of weights.
_MODEL = "model."
# DeepSpeed's files.
_LATEST = "latest"
_WHOLE = "mp_rank_00_model_states.pt"
_PART = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_TRAINED = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class Weights(Mapping[str, Tensor]):
    """The weights in a checkpoint, by name; each is read when it is asked for, and not kept.

    Attributes:
        place: The file or folder, for messages.
        specs: A tensor on the meta device for each weight.
        read: Reads a weight, to the CPU.
    """

    place: Path
    specs: Mapping[str, Tensor]
    read: Callable[[str], Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            MoQError: It cannot be read; names the file.
        """
        # A damaged file may make a library raise anything.
        with explained(f"{self.place}: {name} cannot be read"):
            return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def renamed(
        self, names: Mapping[str, str], on_read: Callable[[], Any]
    ) -> "Weights":
        """The same weights under other names.

        Args:
            names: New names, each with the name in the checkpoint.
            on_read: Called whenever a weight is read.
        """
        specs = {name: self.specs[there] for name, there in names.items()}

        def read(name: str) -> Tensor:
            on_read()
            return self.read(names[name])

        return Weights(self.place, specs, read)


def safetensors_weights(folder: Path) -> Weights:
    """`model.safetensors`, or several files with an index.

    Raises:
        MoQError: A file is missing or damaged.
    """
    with explained(f"{folder} is damaged"):
        places = tensors_in(folder)
        specs = {n: read_tensor(path, n).to("meta") for n, path in places.items()}
    return Weights(folder, specs, lambda name: read_tensor(places[name], name))


def distributed_weights(folder: Path) -> Weights:
    """The weights that `torch.distributed.checkpoint` wrote: the shards of all processes, each in its own file.

    Raises:
        MoQError: It is not the checkpoint of a model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with explained(f"{folder / '.metadata'} cannot be read"):
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    specs = {
        name.removeprefix(_MODEL): _on_meta(tensor.size, tensor.properties.dtype)
        for name, tensor in metadata.items()
        if isinstance(tensor, TensorStorageMetadata) and name.startswith(_MODEL)
    }
    if not specs:
        raise MoQError(f"{folder} holds no weights of a model")

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(specs[name], device="cpu")
        with warnings.catch_warnings():
            # It warns that there are no other processes, as `no_dist` says already.
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled", UserWarning
            )
            try:
                load(
                    {"model": {name: tensor}},
                    storage_reader=FileSystemReader(folder),
                    no_dist=True,
                )
            # CheckpointException is a BaseException, which callers would not catch.
            except CheckpointException as error:
                raise OSError(str(error)) from error
        return tensor

    return Weights(folder, specs, read)


class _Ignored:
    """Replaces an object of DeepSpeed that is not needed."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def zero_folder(checkpoint: Path) -> Path | None:
    """The folder of a checkpoint with DeepSpeed's own files; None if there are none.

    Raises:
        MoQError: The file that should name it does not name a folder.
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
        MoQError: A file is missing or damaged.
    """
    path = folder / _WHOLE
    if not path.is_file():
        return _parted_weights(folder)
    # ZeRO-1 and ZeRO-2 save the weights whole, in the dtype of the run.
    specs = {
        name: tensor.to("meta")
        for name, tensor in _read(path)["module"].items()
        if isinstance(tensor, Tensor)
    }
    return Weights(path, specs, lambda name: _read(path)["module"][name].clone())


def _parted_weights(folder: Path) -> Weights:
    """Find the weights of ZeRO-3, which are read by joining the parts of all processes.

    Raises:
        MoQError: The file of a process is missing or damaged.
    """
    first = folder / _PART.format(0)
    if not first.is_file():
        raise MoQError(f"{first} is missing: no weights of DeepSpeed")
    state = _read(first)
    with explained(f"{first}: not as DeepSpeed writes it"):
        world = int(state["dp_world_size"])
        module: Mapping[str, Any] = state["module"]
        frozen = dict(state.get("frozen_param_shapes") or {})
        trained: dict[str, torch.Size] = {}
        for shapes in state["param_shapes"]:
            trained |= shapes
        saved = {
            name: _on_meta(shape, module[name].dtype)
            for name, shape in {**frozen, **trained}.items()
        }
        for name in state["buffer_names"]:
            if name in module:
                saved[name] = module[name].to("meta")
        aliases = {
            name: other
            for name, other in state["shared_params"].items()
            if other in saved and name not in saved
        }
        saved |= {name: saved[other] for name, other in aliases.items()}
    parts = _files_of_ranks(folder, _PART, world)
    masters: list[Path] = []
    if trained:
        prefix = "bf16_" if any(folder.glob(f"bf16_{_TRAINED.format('*')}")) else ""
        masters = _files_of_ranks(folder, f"{prefix}{_TRAINED}", world)
    # The place of each trained weight's part in the flat tensors of a process.
    slices: dict[str, slice] = {}
    end = 0
    for name in trained:
        begin = end
        end += math.ceil(saved[name].numel() / world)
        slices[name] = slice(begin, end)

    def read(name: str) -> Tensor:
        name = aliases.get(name, name)
        if name in slices:
            pieces = [_cut(_flat(path), slices[name]) for path in masters]
        elif name in frozen:
            pieces = [_read(path)["frozen_param_fragments"][name] for path in parts]
        else:
            pieces = [module[name].flatten()]
        # Parts are padded at the end if the processes do not divide the weight.
        spec = saved[name]
        return torch.cat(pieces)[: spec.numel()].view_as(spec).to(spec.dtype)

    # The order is the model's.
    specs = {name: saved[name] for name in module if name in saved} | saved
    return Weights(folder, specs, read)


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _files_of_ranks(folder: Path, name: str, world: int) -> list[Path]:
    """Return the files of all processes, in their order.

    Raises:
        MoQError: One is missing.
    """
    paths = [folder / name.format(rank) for rank in range(world)]
    for path in paths:
        if not path.is_file():
            raise MoQError(
                f"{path} is missing: the run had {world} processes, each with a file"
            )
    return paths


def _flat(path: Path) -> list[Tensor]:
    """Read the flat float32 tensors that hold a process's parts of the trained weights."""
    found: list[Tensor] = _read(path)["optimizer_state_dict"]["fp32_flat_groups"]
    return found


def _cut(flat: Sequence[Tensor], part: slice) -> Tensor:
    """Copy a part of the numbers that several flat tensors hold, one after the other."""
    pieces = []
    begin = 0
    for tensor in flat:
        low = max(part.start - begin, 0)
        high = min(part.stop - begin, tensor.numel())
        if low < high:
            pieces.append(tensor[low:high])
        begin += tensor.numel()
    return torch.cat(pieces) if pieces else torch.empty(0, device="cpu")


def _read(path: Path) -> Any:
    """Map a file into memory, so that a tensor is read when it is used. No code in the file is run.

    Raises:
        MoQError: It is damaged.
    """
    # A damaged file may make torch and pickle raise anything.
    with explained(f"{path} is damaged"):
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stubs: list[Any] = [(_Ignored, name) for name in foreign]
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
