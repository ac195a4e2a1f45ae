"""The model card of a packed checkpoint: metadata for the Hub's model index, metrics, sizes, bits, how to load it."""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..schedule import FLOAT_BITS
from .state import StoredLayer
from .verify import Verification, verify_quantized

logger = logging.getLogger(__name__)

TAGS = ("moq", "quantization-aware-training", "compressed-tensors")
PICTURE = "moq_bits.png"
# What an evaluation logs beside its metrics.
_NO_METRIC = re.compile(r"^(epoch|step|total_flos)$|_(runtime|per_second|samples|time)(_mm)?$")


def write_card(
    directory: str | os.PathLike[str],
    *,
    found: Verification | None = None,
    model_name: str | None = None,
    base_model: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    language: str | Iterable[str] | None = None,
    license: str | None = None,
    tags: Iterable[str] = (),
    training: Mapping[str, Any] | None = None,
    picture: bool = True,
) -> Path:
    """Write `README.md` into a packed checkpoint, and the picture of its bits if matplotlib is installed.

    Args:
        directory: What `save_quantized` wrote; its metrics, sizes and bits are those of the card.
        found: What `verify_quantized` gives for it; None: it is verified now.
        model_name: Where it will be found: a Hub id; None is the directory's name.
        base_model: Hub id of the model that was fine-tuned.
        task: As the Hub spells it, "text-classification" for instance.
        dataset: Hub id of the data.
        dataset_name: Its name for readers.
        dataset_config: Its configuration, "mrpc" for instance.
        language: Language codes.
        license: As the Hub spells it.
        tags: More tags.
        training: Hyperparameters, for the section on reproducing the model.
        picture: Draw the bits too, if matplotlib is installed.

    Returns:
        The card's path.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    folder = Path(directory)
    found = found or verify_quantized(folder)
    name = model_name or folder.resolve().name
    metrics, before = (_metrics(found.state.get(key) or {}) for key in ("metrics", "float_metrics"))
    results = [
        EvalResult(
            task_type=task,
            dataset_type=dataset,
            dataset_name=dataset_name or dataset,
            dataset_config=dataset_config,
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in metrics.items()
        if task and dataset and metric != "loss"
    ]
    data = ModelCardData(
        language=[language] if isinstance(language, str) else list(language) if language else None,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=list(dict.fromkeys([*TAGS, *tags])),
        base_model=base_model,
        base_model_relation="finetune" if base_model else None,
        datasets=[dataset] if dataset else None,
        metrics=[metric for metric in metrics if metric != "loss"] or None,
        model_name=name.rpartition("/")[2],
        eval_results=results or None,
    )
    sections = [
        _head(name, base_model, dataset_name or dataset, found),
        _loading(name, folder, found.state.get("by_hand") or (found.proof is not None and found.proof.agrees is False)),
        _results(metrics, before),
        _sizes(found),
        _proof(found),
        _bits(found.layers, picture and _draw(folder / PICTURE, found.layers)),
        _making(found.state, training),
    ]
    path = folder / "README.md"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in sections if part) + "\n").save(path)
    return path


def _metrics(logged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation, without its times and counts, and without the Trainer's prefix."""
    return {
        name.removeprefix("eval_"): value
        for name, value in logged.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not _NO_METRIC.search(name)
    }


def _head(name: str, base_model: str | None, data: str | None, found: Verification) -> str:
    bits = sorted({layer.bits for layer in found.layers.values() if layer.kind != "embedding"})
    words = [("float" if b == FLOAT_BITS else str(b)) for b in bits]
    low = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    origin = f" from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    trained = f"Fine-tuned{origin}{f' on {data}' if data else ''} with Mixture-of-Quantization"
    stored = "packed integers in the format of compressed-tensors"
    if found.state.get("layout") == "floats":
        stored = "floats on the grid of their integers, since transformers could not load them packed"
    return (
        f"# {name.rpartition('/')[2]}\n\n{trained} (moq_hf): the precision of its linear layers fell step by step "
        f"while it trained, to {low} bits. {found.coverage()} are quantized, which makes {found.mean_bits:.2f} bits "
        f"per parameter over the whole model. The quantized weights are {stored}: {_mb(found.file_bytes)} instead of "
        f"{_mb(found.float_bytes)} in all."
    )


def _proof(found: Verification) -> str:
    reason = found.state.get("reason")
    told = [f"{found.proof}."] if found.proof is not None else []
    told += [f"Why not packed otherwise: {reason}."] if reason else []
    return "\n\n".join(["## Proof", *told]) if told else ""


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
        f"| {metric} | {before[metric]:.4f} | {value:.4f} | {value - before[metric]:+.4f} |"
        if metric in before
        else f"| {metric} |  | {value:.4f} |  |"
        for metric, value in metrics.items()
    ]
    head = ["| metric | float | quantized | difference |", "| --- | --- | --- | --- |"]
    note = "" if before else "\n\nNo float model was trained beside this one."
    return "\n".join(["## Evaluation", "", *head, *rows]) + note


def _sizes(found: Verification) -> str:
    after, before = found.quantized_bytes
    return "\n".join(
        [
            "## Size",
            "",
            "| | float | packed | ratio |",
            "| --- | --- | --- | --- |",
            f"| {len(found.layers)} quantized layers | {_mb(before)} | {_mb(after)} | {after / before:.3f} |",
            f"| all weights | {_mb(found.float_bytes)} | {_mb(found.file_bytes)} "
            f"| {found.file_bytes / found.float_bytes:.3f} |",
            "",
            f"Quantized: {found.coverage()}; mean {found.mean_bits:.2f} bits over the whole model.",
        ]
    )


def _bits(layers: Mapping[str, StoredLayer], picture: bool) -> str:
    rows = [
        f"| {name} | {'float' if layer.bits == FLOAT_BITS else layer.bits} | {layer.stored} | {layer.bytes:,} "
        f"| {layer.bytes_before:,} |"
        for name, layer in layers.items()
    ]
    head = ["| layer | bits | stored | bytes | before |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(
        [
            "## Bits per layer",
            "",
            *([f"![Bits of each layer]({PICTURE})", ""] if picture else []),
            "<details><summary>The table</summary>",
            "",
            *head,
            *rows,
            "",
            "</details>",
        ]
    )


def _making(state: Mapping[str, Any], training: Mapping[str, Any] | None) -> str:
    settings = [f"- {name}: {value}" for name, value in (training or {}).items()]
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
