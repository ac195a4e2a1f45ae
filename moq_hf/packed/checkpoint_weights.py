"""The float weights of a run's checkpoint, read one tensor at a time: safetensors, and the shards of FSDP2 and ZeRO."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import MoQError, one_line
from .files import opened

# Before the names of weights, where Accelerate saves a model.
_MODEL = "model."


class Spec(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class Weights(Mapping[str, Tensor]):
    """The weights in a checkpoint, by name; each is read when it is asked for, and not kept.

    Args:
        place: Where they are, for messages.
        specs: Shape and dtype of each.
        read: Gives one, on the CPU.
    """

    def __init__(self, place: Path, specs: Mapping[str, Spec], read: Callable[[str], Tensor]) -> None:
        self.place = place
        self.specs = specs
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            MoQError: It cannot be read; names the file.
        """
        spec = self.specs[name]
        try:
            tensor = self._read(name)
        # Whatever a file that is not what it was makes a library raise.
        except Exception as error:
            raise MoQError(f"{self.place}: {name} cannot be read: {one_line(error, named=True)}") from error
        if Spec(tensor.shape, tensor.dtype) != spec:
            raise MoQError(f"{self.place}: {name} is not a tensor {list(spec.shape)} of {spec.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def renamed(self, names: Mapping[str, str]) -> "Weights":
        """The same under other names: the name of each as it is to be, to the one that it has there."""
        specs = {name: self.specs[there] for name, there in names.items()}
        return Weights(self.place, specs, lambda name: self._read(names[name]))


def safetensors_weights(folder: Path) -> Weights:
    """`model.safetensors`, or several files with an index.

    Raises:
        MoQError: A file is missing or damaged.
    """
    specs: dict[str, Spec] = {}
    places: dict[str, Path] = {}
    try:
        for path, file in opened(folder):
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                specs[name] = Spec(tensor.shape, tensor.dtype)
                places[name] = path
    except (OSError, SafetensorError) as error:
        raise MoQError(f"{folder} is damaged: {one_line(error)}") from error

    def read(name: str) -> Tensor:
        with safe_open(places[name], "pt") as file:
            return cast(Tensor, file.get_tensor(name))

    return Weights(folder, specs, read)


def distributed_weights(folder: Path) -> Weights:
    """What `torch.distributed.checkpoint` wrote of a model: the shards of all processes, each in its own file.

    Raises:
        MoQError: It is not the checkpoint of a model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise MoQError(f"{folder / '.metadata'} cannot be read: {one_line(error, named=True)}") from error
    specs: dict[str, Spec] = {}
    for name, tensor in metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and name.startswith(_MODEL):
            specs[name.removeprefix(_MODEL)] = Spec(torch.Size(tensor.size), tensor.properties.dtype)
    if not specs:
        raise MoQError(f"{folder} holds no weights of a model")

    def read(name: str) -> Tensor:
        tensor = torch.empty(specs[name].shape, dtype=specs[name].dtype, device="cpu")
        with warnings.catch_warnings():
            # That there are no other processes, as is said by `no_dist`.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                load({"model": {name: tensor}}, storage_reader=FileSystemReader(folder), no_dist=True)
            # It is no Exception.
            except CheckpointException as error:
                raise OSError(str(error)) from error
        return tensor

    return Weights(folder, specs, read)
