"""`export_floats`: writes a packed checkpoint as rounded floats, for programs that read only ordinary folders."""

import os
from pathlib import Path

from ..packed.files import CONFIG, copy_tokenizer, new_path, staged
from ..packed.load_check import quiet
from ..packed.verify import verify_quantized
from ..seams.transformers import original_format, ties_in_files, untie
from .compare import load_floats


def export_floats(
    directory: str | os.PathLike[str], out: str | os.PathLike[str]
) -> Path:
    """Write the weights of a packed checkpoint as floats with exactly the rounded values.

    Any program that reads folders of transformers, such as llama.cpp's converter, reads
    the result. The tokenizer is copied.

    Args:
        directory: What `save_quantized` wrote.
        out: The folder to make, or an empty one.

    Returns:
        The folder.

    Raises:
        MoQError: The checkpoint is damaged, transformers cannot load it, it has
            adapters beside it, or `out` is not empty.
    """
    folder = Path(directory)
    target = new_path(out)
    verify_quantized(folder)
    write_floats(folder, target)
    return Path(out)


def write_floats(folder: Path, target: Path) -> Path:
    """As `export_floats`, for a checkpoint that was already verified.

    Raises:
        MoQError: As `export_floats`.
    """
    with quiet():
        model = load_floats(folder, dtype="auto")
        with staged(target) as staging:
            # By itself transformers would give unpacked experts the names of packed ones.
            tensors = original_format(model, model.state_dict())
            model.save_pretrained(
                staging, state_dict=tensors, save_original_format=False
            )
            # Some classes, such as T5's, claim in memory that all is tied, whatever the
            # folder says.
            parameters = dict(model.named_parameters(remove_duplicate=False))
            if ties_in_files(model, parameters)[1]:
                untie(staging / CONFIG)
            copy_tokenizer(folder, staging)
    return target
