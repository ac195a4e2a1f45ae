"""The model card of a packed checkpoint: metadata for the Hub's model index, metrics, sizes, bits, how to load it."""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..metrics import metrics_in
from ..schedule import FLOAT_BITS
from ..text import markdown_table
from .state import StoredLayer
from .verify import Verification, verify_quantized

logger = logging.getLogger(__name__)

TAGS = ("moq", "quantization-aware-training", "compressed-tensors")
PICTURE = "moq_bits.png"


@dataclass(frozen=True)
class About:
    """What a packed checkpoint does not say of its model, for the card; all of it may be missing.

    Attributes:
        model_name: Where it will be found: a Hub id; None is the directory's name.
        base_model: Hub id of the model that was fine-tuned.
        task: As the Hub spells it, "text-classification" for instance.
        dataset: Hub id of the data.
        dataset_name: Its name for readers; None is the Hub id.
        dataset_config: Its configuration, "mrpc" for instance.
        language: Language codes.
        license: As the Hub spells it.
        tags: More tags.
        training: Hyperparameters, for the section on reproducing the model.
    """

    model_name: str | None = None
    base_model: str | None = None
    task: str | None = None
    dataset: str | None = None
    dataset_name: str | None = None
    dataset_config: str | None = None
    language: str | Iterable[str] | None = None
    license: str | None = None
    tags: Iterable[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> str | None:
        """What readers call the data."""
        return self.dataset_name or self.dataset


def write_card(
    directory: str | os.PathLike[str],
    about: About = About(),
    *,
    found: Verification | None = None,
    picture: bool = True,
) -> Path:
    """Write `README.md` into a packed checkpoint, and the picture of its bits if matplotlib is installed.

    Args:
        directory: What `save_quantized` wrote; its metrics, sizes and bits are those of the card.
        about: What else is known of the model.
        found: What `verify_quantized` gives for it; None: it is verified now.
        picture: Draw the bits too, if matplotlib is installed.

    Returns:
        The card's path.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    folder = Path(directory)
    found = found or verify_quantized(folder)
    name = about.model_name or folder.resolve().name
    metrics, before = (metrics_in(found.state.get(key) or {}) for key in ("metrics", "float_metrics"))
    by_hand = found.state.get("by_hand") or (found.proof is not None and found.proof.agrees is False)
    sections = [
        _head(name, about, found),
        _loading(name, folder, by_hand),
        _results(metrics, before),
        _sizes(found),
        _proof(found),
        _bits(found.layers, picture and _draw(folder / PICTURE, found.layers)),
        _making(found.state, about.training),
    ]
    header = _metadata(name, about, metrics).to_yaml()
    path = folder / "README.md"
    ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(part for part in sections if part) + "\n").save(path)
    return path


def _metadata(name: str, about: About, metrics: Mapping[str, float]) -> ModelCardData:
    """For the Hub's model index."""
    measured = {metric: value for metric, value in metrics.items() if metric != "loss"}
    results = [
        EvalResult(
            task_type=about.task,
            dataset_type=about.dataset,
            dataset_name=cast(str, about.data),
            dataset_config=about.dataset_config,
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in measured.items()
        if about.task and about.dataset
    ]
    languages = [about.language] if isinstance(about.language, str) else list(about.language or [])
    return ModelCardData(
        language=languages or None,
        license=about.license,
        library_name="transformers",
        pipeline_tag=about.task,
        tags=list(dict.fromkeys([*TAGS, *about.tags])),
        base_model=about.base_model,
        base_model_relation="finetune" if about.base_model else None,
        datasets=[about.dataset] if about.dataset else None,
        metrics=list(measured) or None,
        model_name=name.rpartition("/")[2],
        eval_results=results or None,
    )


def _head(name: str, about: About, found: Verification) -> str:
    every = found.layers.values()
    # A head that is all that is quantized is in the files as the table that it shares.
    bits = sorted({layer.bits for layer in every if layer.kind != "embedding"} or {layer.bits for layer in every})
    words = [("float" if b == FLOAT_BITS else str(b)) for b in bits]
    low = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    base, data = about.base_model, about.data
    origin = f" from [{base}](https://huggingface.co/{base})" if base else ""
    trained = f"Fine-tuned{origin}{f' on {data}' if data else ''} with Mixture-of-Quantization"
    what = "convolutions" if found.has_convolutions else "linear layers"
    if all(layer.kind == "embedding" for layer in every):
        what = "embedding tables"
    if any(layer.kind in ("linear", "conv1d") for layer in every) and found.has_convolutions:
        what = "linear layers and convolutions"
    return (
        f"# {name.rpartition('/')[2]}\n\n{trained} (moq_hf): the weights of its {what} were quantized "
        f"while it trained, to {low} bits. {found.coverage()} are quantized, which makes {found.mean_bits:.2f} bits "
        f"per parameter over the whole model. The quantized weights are {_stored(found)}: {_mb(found.file_bytes)} "
        f"instead of {_mb(found.float_bytes)} in all."
    )


def _stored(found: Verification) -> str:
    """How the quantized weights lie in the files, in words."""
    dense = "floats on the grid of their integers"
    if found.state.get("layout") == "floats":
        why = "transformers could not load them packed"
        if not found.state["reason"]:
            kinds = {layer.kind for layer in found.layers.values()}
            what = "convolutions" if kinds == {"conv"} else "them"
            why = f"the packed format has no place for {what}"
        return f"{dense}, since {why}"
    stored = "packed integers in the format of compressed-tensors"
    return f"{stored}, those of convolutions {dense}, at full size" if found.has_convolutions else stored


def _proof(found: Verification) -> str:
    reason = found.state.get("reason")
    lines = [f"{found.proof}."] if found.proof is not None else []
    lines += [f"Why not packed otherwise: {reason}."] if reason else []
    return "\n\n".join(["## Proof", *lines]) if lines else ""


def _loading(name: str, folder: Path, by_hand: bool) -> str:
    if by_hand:
        return (
            "## Use\n\n`from_pretrained` alone does not make this model: make one as it was made for training, and "
            "load the weights into it.\n\n"
            "```python\nfrom safetensors.torch import load_file\n\n"
            'model.load_state_dict(load_file("model.safetensors"))\n```'
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = (config.get("architectures") or ["AutoModel"])[0]
    head = re.search(r"For\w+$", architecture)
    auto = f"AutoModel{head[0]}" if head else "AutoModel"
    cls = auto if hasattr(transformers, auto) else architecture
    return (
        '## Use\n\n```bash\npip install transformers "compressed-tensors>=0.18"\n```\n\n'
        f"```python\nfrom transformers import {cls}\n\n"
        f'model = {cls}.from_pretrained("{name}")\n```'
    )


def _results(metrics: Mapping[str, float], before: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    rows = [
        [metric, f"{before[metric]:.4f}", f"{value:.4f}", f"{value - before[metric]:+.4f}"]
        if metric in before
        else [metric, "", f"{value:.4f}", ""]
        for metric, value in metrics.items()
    ]
    head = ["metric", "float", "quantized", "difference"]
    note = "" if before else "\n\nNo float model was trained beside this one."
    return "## Evaluation\n\n" + markdown_table([head, *rows]) + note


def _sizes(found: Verification) -> str:
    after, before = found.quantized_bytes
    table = markdown_table(
        [
            ["", "float", "packed", "ratio"],
            [f"{len(found.layers)} quantized layers", _mb(before), _mb(after), f"{after / before:.3f}"],
            [
                "all weights",
                _mb(found.float_bytes),
                _mb(found.file_bytes),
                f"{found.file_bytes / found.float_bytes:.3f}",
            ],
        ]
    )
    coverage = f"Quantized: {found.coverage()}; mean {found.mean_bits:.2f} bits over the whole model."
    return "\n".join(["## Size", "", table, "", coverage, *_shared(found.layers)])


def _shared(layers: Mapping[str, StoredLayer]) -> list[str]:
    lines = [
        f"- {' and '.join(f'`{other}`' for other in layer.tied)}: the weight of `{name}`, which is stored once."
        for name, layer in layers.items()
        if layer.tied
    ]
    return ["", *lines] if lines else []


def _bits(layers: Mapping[str, StoredLayer], picture: bool) -> str:
    rows = [
        [
            name,
            "float" if layer.bits == FLOAT_BITS else layer.bits,
            layer.stored,
            f"{layer.bytes:,}",
            f"{layer.bytes_before:,}",
        ]
        for name, layer in layers.items()
    ]
    head = ["layer", "bits", "stored", "bytes", "before"]
    return "\n".join(
        [
            "## Bits per layer",
            "",
            *([f"![Bits of each layer]({PICTURE})", ""] if picture else []),
            "<details><summary>The table</summary>",
            "",
            markdown_table([head, *rows]),
            "",
            "</details>",
        ]
    )


def _making(state: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    settings = [f"- {name}: {value}" for name, value in training.items()]
    versions = ", ".join(f"{name} {version}" for name, version in state["versions"].items())
    steps = [] if state["step"] is None else [f"- optimizer steps: {state['step']}"]
    return "\n".join(
        [
            "## How it was made",
            "",
            "The quantization's configuration, `moq.json`:",
            "",
            "```json",
            json.dumps(state["config"], indent=2),
            "```",
            "",
            'Train with it: `MoQTrainer(..., moq_config="moq.json")`.',
            "",
            *steps,
            *settings,
            f"- versions: {versions}",
            "",
            "`moq_state.json` holds every switch of precision with its step; `moq-hf inspect` verifies the files.",
        ]
    )


def _draw(path: Path, layers: Mapping[str, StoredLayer]) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture of the bits in the model card: matplotlib is not installed")
        return False
    names = list(layers)
    bits = [min(layer.bits, 16) for layer in layers.values()]
    figure = Figure(figsize=(7, 1 + 0.16 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(names)), bits, color="#4477aa")
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(0, max(8, *bits))
    axes.set_xlabel("bits (16: 16 or float)" if max(bits) == 16 else "bits")
    figure.savefig(path, dpi=100)
    return True


def _mb(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
