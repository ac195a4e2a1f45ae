"""The files of a checkpoint folder: their names, tensors and digests."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import MoQError, one_line, read_as, read_json

CONFIG = "config.json"
# It and those beside it for newer versions of transformers; see `refuse_older`.
CONFIGS = re.compile(r"config(\.[\d.]+)?\.json")
# Holds the adapters of a `PeftModel`, in the folder of its base model.
ADAPTER = "adapter"
# Holds adapters that are merged into the model, to go on training with.
MERGED_ADAPTER = "lora"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
)
# The files of a tokenizer or processor, and others that end like them.
_TOKENIZER = (
    ".bpe",
    ".codes",
    ".jinja",
    ".json",
    ".model",
    ".spm",
    ".tiktoken",
    ".tokenizer",
    ".txt",
)
# Folders of chat templates, and of the modules of Sentence Transformers.
_BESIDE = re.compile(r"additional_chat_templates|[1-9]_\w+")
_OTHERS = re.compile(
    rf"{CONFIGS.pattern}|.*\.index\.json|(trainer|moq)_state\.json|(generation|adapter)_config\.json"
)
_UNFINISHED = "no packed checkpoint, or one whose saving was interrupted"


def active_adapter(model: Any) -> str:
    """The subfolder in which PEFT writes the active adapter of a `PeftModel`; all but `default` have their own."""
    name: str = model.active_adapter
    return ADAPTER if name == "default" else f"{ADAPTER}/{name}"


def _index_of(folder: Path) -> dict[str, str] | None:
    """The weight file of each tensor, as the index says; None if there is a single file, which is preferred."""
    path = folder / INDEX
    if (folder / SINGLE).exists() or not path.exists():
        return None
    # A name with a path could point to files outside the folder.
    kind = dict[str, Annotated[str, Field(pattern=f"^{WEIGHTS.pattern}$")]]
    files = read_document(path).get("weight_map")
    found: dict[str, str] = read_as(kind, files, str(path), "weight_map")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, as transformers looks for them."""
    index = _index_of(folder)
    names = [SINGLE] if index is None else sorted(set(index.values()))
    return [folder / name for name in names]


def tensors_in(folder: Path) -> dict[str, Path]:
    """The weight file that holds each of a folder's tensors, by the tensor's name.

    Raises:
        MoQError: A file is missing, or holds others than the index says.
    """
    index = _index_of(folder)
    places: dict[str, Path] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise MoQError(f"{path} is missing: {_UNFINISHED}")
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(sorted(file.keys()), path)
    if index not in (None, {name: path.name for name, path in places.items()}):
        raise MoQError(f"{folder}: its tensors are not those that {INDEX} names")
    return places


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a weight file, on the CPU."""
    with safe_open(path, framework="pt") as file:
        return cast(Tensor, file.get_tensor(name))


def size_of(folder: Path) -> int:
    """Bytes of a folder's weight files; 0 if there are none."""
    return sum(path.stat().st_size for path in weight_files(folder) if path.is_file())


def digest_of(tensor: Tensor) -> str:
    """A checksum of a tensor's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of_adapters(folder: Path) -> dict[str, str]:
    """Checksums of the files of PEFT's adapters in a folder, by their paths in it."""
    digests = {}
    for name in (ADAPTER, MERGED_ADAPTER):
        for path in sorted((folder / name).rglob("adapter_*")):
            # PEFT makes a folder for each adapter but the first.
            if path.is_file():
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                digests[path.relative_to(folder).as_posix()] = digest
    return digests


def digest_of_configs(folder: Path) -> str | None:
    """A checksum of `config.json` and those beside it for newer versions; None if a custom class has no config."""
    paths = sorted(path for path in folder.iterdir() if CONFIGS.fullmatch(path.name))
    text = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(text).hexdigest() if paths else None


def read_document(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a packed checkpoint.

    Raises:
        MoQError: There is no such file, or it cannot be read.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise MoQError(
            f"{path} is missing: {_UNFINISHED}; of a float model quantize_model, then save_quantized, make one"
        ) from None


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer or a processor in a folder."""
    return [
        path
        for path in sorted(folder.iterdir())
        if _BESIDE.fullmatch(path.name)
        or (path.suffix in _TOKENIZER and not _OTHERS.fullmatch(path.name))
    ]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer or a processor."""
    for path in tokenizer_files(source):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def save_beside(folder: Path, save: Callable[[Path], Any]) -> str | None:
    """Write files that a model does not need, all or none of them.

    Args:
        folder: The model's folder.
        save: Writes them into the folder that it is given.

    Returns:
        Why they could not be written; None if they were.
    """
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as place:
        try:
            save(Path(place))
        # A tokenizer's own code may raise anything.
        except Exception as error:
            return one_line(error, named=True)
        move_files(Path(place), folder)
    return None


def move_files(source: Path, target: Path, last: Collection[str] = ()) -> None:
    """Move the files below a folder to the same places below another one, those named in `last` at the end."""
    for path in sorted(source.rglob("*"), key=lambda path: path.name in last):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def new_path(out: str | os.PathLike[str]) -> Path:
    """The absolute path of a file or folder to make.

    Raises:
        MoQError: Something is there, other than an empty folder.
    """
    target = Path(out).resolve()
    if target.is_file():
        raise MoQError(f"{out} exists already: give a new name")
    if target.exists() and any(target.iterdir()):
        raise MoQError(f"{out} is not empty: give a new folder")
    return target


@contextlib.contextmanager
def alone_at(target: Path) -> Iterator[None]:
    """Hold a lock on the folder of a target; if the process is killed, the lock is released.

    On Windows, and on file systems without locks, nothing is locked.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            folder = target.resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staged(
    target: Path, what: str = "", publish: Callable[[Path, Path], None] | None = None
) -> Iterator[Path]:
    """A path beside `target` to write a file or a folder to; if nothing is raised, it becomes `target` at the end.

    Args:
        target: The final path.
        what: Names the contents in an error.
        publish: Moves the files into a folder that exists already. They are then first
            written inside that folder, which may be on another file system.

    Raises:
        MoQError: Something cannot be written.
    """
    is_there = publish is not None and target.is_dir()
    # The Trainer may be uploading the output folder, and leaves out such names.
    staging = (
        target / ".writing" if is_there else target.with_name(f"_{target.name}.writing")
    )
    try:
        remove(staging)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        if is_there and publish is not None:
            publish(staging, target)
            return
        if target.is_dir():
            target.rmdir()
        staging.rename(target)
    except (OSError, SafetensorError) as error:
        raise MoQError(f"cannot write {what}{target}: {one_line(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            remove(staging)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
