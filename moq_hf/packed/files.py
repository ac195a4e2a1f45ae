"""The files of a checkpoint folder: their names, tensors and digests."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import MoQError
from ..reading import Entry, read_json

CONFIG = "config.json"
# Holds the adapters of a `PeftModel`, in the folder of its base model.
ADAPTER = "adapter"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_UNITS = ("KB", "MB", "GB", "TB")
_UNFINISHED = "no packed checkpoint, or one whose saving was interrupted"


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, as transformers looks for them."""
    single = folder / SINGLE
    if single.exists() or not (folder / INDEX).exists():
        return [single]
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    files = read_document(folder / INDEX)["weight_map"].mapping()
    for entry in files.values():
        # A name with a path would have files read that are not the model's.
        if not WEIGHTS.fullmatch(entry.text()):
            raise entry.fault("the name of a file of weights in this folder")
    return {name: entry.text() for name, entry in files.items()}


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's weight files by its name.

    Raises:
        MoQError: A file is missing, or holds others than the index says.
    """
    files = weight_files(folder)
    index = _weight_map(folder) if files[0].name != SINGLE else None
    for path in files:
        if not path.is_file():
            raise MoQError(f"{path} is missing: {_UNFINISHED}")
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if index is not None and names != {name for name, place in index.items() if place == path.name}:
                raise MoQError(f"{path}: its tensors are not those that {INDEX} names")
            for name in sorted(names):
                yield name, file.get_tensor(name)


def bytes_in(size: int | str) -> int:
    """The largest size of a file, as users write it.

    Raises:
        MoQError: It is no size.

    >>> bytes_in("5GB"), bytes_in(1000)
    (5000000000, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB|TB)", size.strip().upper()) if isinstance(size, str) else None
    count = int(float(found[1]) * 1000 ** (1 + _UNITS.index(found[2]))) if found else size
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise MoQError(f"max_shard_size: a number of bytes, or one with a unit ({', '.join(_UNITS)}): got {size!r}")
    return count


def size_of(folder: Path) -> int:
    """Bytes of a folder's weight files."""
    return sum(path.stat().st_size for path in weight_files(folder))


def digest_of(tensor: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_document(path: Path) -> Entry:
    """The object in a JSON file of a packed checkpoint.

    Raises:
        MoQError: There is no such file, or it cannot be read.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise MoQError(f"{path} is missing: {_UNFINISHED}") from None
