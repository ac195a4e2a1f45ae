"""What a run delivers: `save_quantized`, and at the end of training a result whatever the model is."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import MoQError, one_line
from ..names import without_peft
from ..training.controller import MoQController
from .card import About, write_card
from .layout import Layout
from .load_check import ReferenceOutputs
from .save import SaveOptions, write_floats, write_packed
from .state import hub_id
from .verification import Verification

logger = logging.getLogger(__name__)


def save_quantized(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    processing_class: Any = None,
    controller: MoQController | None = None,
    metrics: Mapping[str, Any] | None = None,
    float_metrics: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_size: int | str = "50GB",
    inputs: Mapping[str, Any] | ReferenceOutputs | None = None,
    layout: Layout | None = None,
) -> Path:
    """Write `model` as a packed checkpoint that plain `from_pretrained` loads, with the same logits bit for bit.

    The model stays as it is. A directory that is not there appears whole or not at all. One that is there keeps its
    other files; its old model is gone before the first new file comes, and nothing loads before the last one is there.
    A `README.md` that is not moq_hf's own stays.

    Of a `PeftModel` the base model is packed; its adapters are saved by `save_pretrained` into the folder `adapter`.

    With `inputs` the files are loaded by plain `from_pretrained` and compared with the model before they appear; a
    layout that does not agree is given up for the next one, at last for floats on the grid, with a warning.

    Args:
        model: A transformers model with quantized layers, or a `PeftModel` around one.
        directory: Where to; made if missing.
        processing_class: Tokenizer or processor to save along.
        controller: The run's, for its history; without one the state holds the config and the bits alone.
        metrics: Figures to keep in `moq_state.json`.
        float_metrics: Those of a model that was trained in float.
        state_dict: The model's float tensors, where they are not in the model itself: a dict, or a mapping that makes
            each when it is asked for. Then no more than one of them is held at a time.
        max_shard_size: The largest size of a weight file: bytes, or a text such as "5GB".
        inputs: A batch as the model's forward pass takes it, to prove the files on; None: they are not loaded.
        layout: How the weights lie in the files: "packed", "unpacked" (unpacked while loading) or "floats"; None is the
            first of them that transformers can load.

    Returns:
        The directory.

    Raises:
        MoQError: The model is not one of transformers or has no quantized layer, a quantized weight is shared, sharded
            or holds NaN or Inf, transformers cannot make a model of its class, or the files cannot be written.

    >>> import tempfile
    >>> from moq_hf import quantize_model, verify_quantized
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    >>> model = quantize_model(model, {"quantize_bits": {"start_bits": 4, "target_bits": 4}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = verify_quantized(save_quantized(model, folder), model)
    >>> found.layers["bert.pooler.dense"].stored, found.layers["bert.pooler.dense"].bits
    ('packed', 4)
    """
    options = SaveOptions(processing_class, controller, metrics, float_metrics, state_dict, max_shard_size)
    found = write_packed(model, directory, options, inputs=inputs, layout=layout)
    _write_card(Path(directory), model, found, picture=False)
    return Path(directory)


def deliver(
    model: nn.Module,
    directory: str | os.PathLike[str],
    options: SaveOptions,
    answers: ReferenceOutputs | None,
    *,
    picture: bool = True,
) -> str:
    """Write the result of a run: packed if that can be loaded, else floats on the grid, with a warning that says why.

    Args:
        model: With quantized layers.
        directory: Where to.
        options: What goes with the model.
        answers: The model's, to prove the files on; None: they are not loaded.
        picture: Draw the bits for the model card.

    Returns:
        What was written, in a line.

    Raises:
        MoQError: The files cannot be written, or a weight holds NaN or Inf.
    """
    folder = Path(directory)
    try:
        found = write_packed(model, folder, options, inputs=answers)
    # Training is done: whatever a model's own code raises here must not lose its result.
    except Exception as error:
        reason = one_line(error, named=not isinstance(error, MoQError))
        found = write_floats(model, folder, options, reason)
    try:
        _write_card(folder, model, found, picture)
    except Exception as error:
        logger.warning("moq_hf: %s has no model card: %s", folder, one_line(error, named=True))
    return _summary(folder, found)


def base_model_of(model: nn.Module) -> str | None:
    """The Hub id of the model that was fine-tuned, or None."""
    return hub_id(getattr(getattr(model, "config", None), "name_or_path", None))


def _write_card(folder: Path, model: nn.Module, found: Verification, picture: bool) -> None:
    path = folder / "README.md"
    if path.exists() and "Mixture-of-Quantization (moq_hf)" not in path.read_text(encoding="utf-8", errors="replace"):
        logger.info("%s is not moq_hf's: it stays", path)
        return
    write_card(folder, About(base_model=base_model_of(without_peft(model))), found=found, picture=picture)


def _summary(folder: Path, found: Verification) -> str:
    what = {"packed": "packed", "unpacked": "packed, unpacked while loading", "floats": "floats on the grid"}
    proof = "" if found.proof is None else f"; {found.proof}"
    if found.state["by_hand"]:
        proof = "; not proven: only load_state_dict loads it"
    return (
        f"{folder}: {what[found.state['layout']]}, {found.file_bytes / 1e6:,.2f} MB "
        f"({found.float_bytes / 1e6:,.2f} in float){proof}"
    )
