"""The files of one model: written into a folder of their own, then put into their place."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import one_line
from ..transformers_seams import write_packing_config
from .encoder import Encoder
from .files import ADAPTER, CONFIG, INDEX, SINGLE, WEIGHTS, bytes_in
from .state import hub_id

logger = logging.getLogger(__name__)
# What would make transformers load an older model, or put its adapters, into a new one.
_OF_ANOTHER = ("config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def write_packed_files(
    folder: Path,
    model: Any,
    tensors: dict[str, Tensor],
    encoder: Encoder,
    processing_class: Any,
    max_shard_size: int | str,
) -> None:
    """The tensors, `config.json` with the quantization config, and the tokenizer or processor."""
    # They have the names that the files shall have.
    shards = bytes_in(max_shard_size)
    model.save_pretrained(folder, state_dict=dict(tensors), max_shard_size=shards, save_original_format=False)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    config = encoder.config()
    if config is None:
        return
    write_packing_config(folder, config)
    path = folder / CONFIG
    document = json.loads(path.read_text(encoding="utf-8"))
    document["dtype"] = encoder.dtype
    if encoder.at_load:
        document["quantization_config"]["dequantize"] = True
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if encoder.dtypes - {encoder.dtype}:
        logger.warning(
            "moq_hf: the weights are %s; the packed model is a float32 one, so its results differ by the rounding of "
            "that dtype; with quantize_algo.scale_dtype of the same dtype it would have it",
            ", ".join(sorted(encoder.dtypes)),
        )


def write_by_hand(
    folder: Path, whole_model: nn.Module, model: Any, tensors: Mapping[str, Tensor], processing_class: Any
) -> None:
    """The state dict in a file, whatever the model is: each tensor by itself, as no two may share memory there."""
    apart = _apart(tensors)
    save_file(apart, folder / SINGLE, metadata={"format": "pt"})
    left = [f"{name} (no tensor)" for name in tensors.keys() - apart.keys()]
    if whole_model is not model:
        write_adapter(folder / ADAPTER, whole_model, None)
    for part in (getattr(model, "config", None), processing_class):
        try:
            if part is not None and hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # The weights are what must not be lost.
        except Exception as error:
            left.append(f"{type(part).__name__} ({one_line(error)})")
            if part is not processing_class:
                (folder / CONFIG).unlink(missing_ok=True)
    if left:
        logger.warning("moq_hf: not saved beside the weights: %s", ", ".join(left))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU; of those that share memory each but the first is a copy."""
    found: dict[str, Tensor] = {}
    taken = set[int]()
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            place = tensor.untyped_storage().data_ptr()
            found[name] = tensor.clone() if place in taken else tensor
            taken.add(place)
    return found


def write_adapter(folder: Path, model: Any, state_dict: Mapping[str, Tensor] | None) -> None:
    """PEFT's own files, but for a path on this machine and the card that has it."""
    model.save_pretrained(folder, state_dict=state_dict)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
        document["base_model_name_or_path"] = hub_id(document.get("base_model_name_or_path"))
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def publish(staging: Path, target: Path) -> None:
    """Put what was written into its place, so that at no moment half of it loads."""
    if not target.exists():
        staging.rename(target)
        return
    # Nothing loads without one of these, while a class of transformers makes do without a config. So they go first, and
    # that of the new model comes last.
    entries = (SINGLE, INDEX)
    for name in entries:
        (target / name).unlink(missing_ok=True)
    for path in list(target.iterdir()):
        if path.is_file() and (WEIGHTS.fullmatch(path.name) or path.name in _OF_ANOTHER):
            path.unlink()
    shutil.rmtree(target / ADAPTER, ignore_errors=True)
    for path in sorted(staging.rglob("*"), key=lambda path: path.name in entries):
        if path.is_file():
            place = target / path.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
