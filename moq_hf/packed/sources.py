"""The float weights of a run's checkpoint, read one tensor at a time: safetensors, and the shards of FSDP2 and ZeRO."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import MoQError, one_line
from ..reading import checked
from ..seams.engines import checkpoint_chunks
from .files import INDEX, SINGLE, read_document

# What safetensors calls the dtypes of PyTorch.
_DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    "BOOL": torch.bool,
}


class Spec(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: torch.Size
    dtype: torch.dtype


class Weights(Mapping[str, Tensor]):
    """The weights in a checkpoint, by name; each is read when it is asked for, and not kept.

    Attributes:
        specs: Shape and dtype of each.
    """

    specs: Mapping[str, Spec]

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            MoQError: It cannot be read; names the file.
        """
        spec = self.specs[name]
        try:
            tensor = self.read(name)
        except MoQError:
            raise
        # Whatever a file that is not what it was makes a library raise.
        except Exception as error:
            raise MoQError(f"{self.place(name)}: {name} cannot be read: {one_line(error, named=True)}") from error
        if Spec(tensor.shape, tensor.dtype) != spec:
            raise MoQError(f"{self.place(name)}: {name} is not a tensor {list(spec.shape)} of {spec.dtype}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor, whatever goes wrong."""

    @abstractmethod
    def place(self, name: str) -> Path:
        """Where it is, for messages."""


class Renamed(Mapping[str, Tensor]):
    """Tensors under other names; each is looked up when it is asked for.

    Args:
        tensors: Where they are: in a dict, or in shards that are gathered or read at each look.
        names: The name of each as it is to be, to the one that it has there.

    >>> found = Renamed({"model.weight": torch.ones(2)}, {"weight": "model.weight"})
    >>> list(found), found["weight"]
    (['weight'], tensor([1., 1.]))
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class SafetensorsWeights(Weights):
    """`model.safetensors`, or several files with an index.

    Args:
        folder: The checkpoint.

    Raises:
        MoQError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        index = None if (folder / SINGLE).exists() else _index_of(folder / INDEX)
        names = [SINGLE] if index is None else sorted(set(index.values()))
        self.specs = {}
        self._places: dict[str, Path] = {}
        for path in (folder / name for name in names):
            if not path.is_file():
                raise MoQError(f"{path} is missing: {INDEX} names it")
            found = _table_of(path)
            if index is not None and found.keys() != {name for name, file in index.items() if file == path.name}:
                raise MoQError(f"{path}: its tensors are not those that {INDEX} names")
            self.specs |= found
            self._places |= dict.fromkeys(found, path)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own: that of the file is given back."""
        with safe_open(self._places[name], "pt") as file:
            return cast(Tensor, file.get_tensor(name))

    def place(self, name: str) -> Path:
        """The file."""
        return self._places[name]


class DistributedWeights(Weights):
    """What `torch.distributed.checkpoint` wrote of a model: the shards of all processes, each in its own file.

    Args:
        folder: That of the model, in the checkpoint.

    Raises:
        MoQError: A file is missing or cut off, or it is not the checkpoint of a model.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        try:
            metadata = FileSystemReader(folder).read_metadata()
            chunks = checkpoint_chunks(metadata)
        except Exception as error:
            raise MoQError(f"{folder / '.metadata'} cannot be read: {one_line(error, named=True)}") from error
        for name, end in chunks.items():
            if not (folder / name).is_file():
                raise MoQError(f"{folder / name} is missing: the shards of one process")
            if (folder / name).stat().st_size < end:
                raise MoQError(f"{folder / name} is cut off: it should have {end} bytes or more")
        tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        self.specs = {
            name.removeprefix(_MODEL): Spec(torch.Size(tensor.size), tensor.properties.dtype)
            for name, tensor in tensors.items()
            if name.startswith(_MODEL)
        }
        if not self.specs:
            raise MoQError(f"{folder} holds no weights of a model")

    def read(self, name: str) -> Tensor:
        """One tensor, put together of its shards."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype, device="cpu")
        state: dict[str, Any] = {"model": {name: tensor}}
        with warnings.catch_warnings():
            # That there are no other processes, as is said by `no_dist`.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
        return tensor

    def place(self, name: str) -> Path:
        """The folder."""
        return self._folder


# Before the names of weights, where Accelerate saves a model.
_MODEL = "model."


def _index_of(path: Path) -> dict[str, str]:
    """File of each tensor by an index, whose files lie beside it."""
    kind = dict[str, Annotated[str, Field(pattern=r"^[^/\\]+$")]]
    found: dict[str, str] = checked(kind, read_document(path).get("weight_map"), str(path), "weight_map")
    return found


def _table_of(path: Path) -> dict[str, Spec]:
    """The tensors in a file, without their values.

    Raises:
        MoQError: It is damaged.
    """
    try:
        # Opening compares the size of the file with its table of contents.
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: Spec(torch.Size(part.get_shape()), _DTYPES[part.get_dtype()]) for n, part in slices.items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise MoQError(f"{path} is damaged: {one_line(error)}") from error
