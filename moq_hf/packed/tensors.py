"""The tensors of a model on their way into the files, one at a time: where they come from, and where they wait."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

# Smaller ones stay in memory: a file for each would take longer than it saves.
_SMALL = 2**16


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


class Waiting:
    """Where tensors wait for the others of their file: on the disk, so that memory holds one layer at a time.

    What is kept is mapped from a file, which takes memory only while it is read. The files are gone at the end, and
    with them the tensors.

    Args:
        folder: Where to make a folder for the files, on the disk that the result is written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=".waiting-", dir=folder)
        self._count = 0

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def keep(self, tensor: Tensor) -> Tensor:
        """The same tensor on the CPU, whose memory is a file's.

        Raises:
            OSError: It cannot be written.
        """
        tensor = tensor.detach().cpu().contiguous()
        if tensor.nbytes < _SMALL:
            # Not a view of something larger, which would stay.
            return tensor.clone()
        path = Path(self._folder.name, str(self._count))
        self._count += 1
        tensor.view(-1).view(torch.uint8).numpy().tofile(path)
        return torch.from_file(str(path), shared=False, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
