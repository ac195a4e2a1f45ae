"""The model card of a packed checkpoint: metadata for the Hub's model index, metrics, sizes, bits, how to load it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.training_args import OptimizerNames

from ..config import MoQConfig
from ..errors import read_json
from ..formats.table import LAYOUTS, Layout
from ..lora import is_merged
from ..names import without_peft
from ..schedule import FLOAT_BITS
from ..seams.sentence_transformers import (
    LEAST,
    LIBRARY,
    PIPELINES,
    evaluations_of,
    loads_as,
)
from ..seams.transformers import training_summary
from ..text import (
    float_after,
    markdown_table,
    megabytes,
    metric_rows,
    metrics_in,
    quoted,
)
from ..training.float_first import before_float
from .files import active_adapter
from .state import hub_id
from .verify import Verification, verify_quantized

# setup.cfg has the same.
_LEAST_PEFT = "0.17"
TAGS = ("moq", "quantization-aware-training")

_BY_HAND = """`from_pretrained` alone does not make this model: make one as it was made for training, and load the
weights into it.

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))
```"""
_BY_TRANSFORMERS = """```bash
pip install {needs}
```

```python
{imports}

{code}
```"""
_TO_TRAIN_ON = """

To train on, or to put an adapter on it, call `moq_hf.dequantize_model(model)` after loading. Without that PEFT ends in
`'Linear' object has no attribute 'weight'`, since packed layers have none before the first call."""


def write_card(
    directory: str | os.PathLike[str],
    data: ModelCardData | None = None,
    *,
    dataset: Mapping[str, str | None] | None = None,
    training: Mapping[str, Any] | None = None,
    found: Verification | None = None,
    model: Any = None,
) -> Path:
    """Write `README.md` into a packed checkpoint.

    Args:
        directory: What `save_quantized` wrote; the card shows its metrics, sizes and
            bits.
        data: Other metadata of the model; `model_name` is a Hub id, by default the
            directory's name.
        dataset: The `dataset_type`, `dataset_name` and `dataset_config` of an
            `EvalResult`; without a type and a `pipeline_tag` the metadata has no
            results.
        training: Hyperparameters, for the section on reproducing the model.
        found: What `verify_quantized` gives for it; None: it is verified now.
        model: The model in memory. What evaluators of Sentence Transformers found of it
            are the results then.

    Returns:
        The card's path.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    folder = Path(directory)
    data = data or ModelCardData()
    dataset = dataset or {}
    found = found or verify_quantized(folder)
    name = data.model_name or folder.resolve().name
    place = name if "/" in name else "path/to/this/folder"
    metrics = metrics_in(found.state["metrics"])
    before = metrics_in(found.state["float_metrics"])
    measured = {metric: value for metric, value in metrics.items() if metric != "loss"}
    data.model_name = name.rpartition("/")[2]
    kind = loads_as(folder)
    data.library_name = "sentence-transformers" if kind else "transformers"
    data.pipeline_tag = data.pipeline_tag or PIPELINES.get(kind)
    # Without the controller of a run nothing says that the model was trained.
    is_trained = found.state["step"] is not None
    tags = TAGS if is_trained else TAGS[:1]
    data.tags = list(dict.fromkeys([*tags, _format(found), *(data.tags or [])]))
    if data.base_model:
        data["base_model_relation"] = "finetune"
    data.metrics = list(measured) or None
    if data.pipeline_tag and dataset.get("dataset_type"):
        data.eval_results = [
            EvalResult(
                task_type=data.pipeline_tag,
                metric_type=metric,
                metric_value=value,
                **dataset,  # type: ignore[arg-type]
            )
            for metric, value in measured.items()
        ]
    data.eval_results = evaluations_of(model, metrics) or data.eval_results
    origin = (
        f" from [{data.base_model}](https://huggingface.co/{data.base_model})"
        if data.base_model
        else ""
    )
    source = dataset.get("dataset_name") or dataset.get("dataset_type")
    sections = [
        f"# {data.model_name}",
        f"{'Fine-tuned' if is_trained else 'Quantized'}{origin}{f' on {source}' if source else ''} with "
        f"Mixture-of-Quantization (moq_hf): {_made(found)}",
        f"## Use\n\n{_loading(place, folder, found, model)}",
        _results(metrics, before, found.state),
        f"## Size\n\n{_sizes(found)}",
        _proof(found),
        f"## Bits per layer\n\n<details><summary>The table</summary>\n\n{markdown_table(found.rows())}\n\n</details>",
        f"## How it was made\n\n{_making(found.state, training or {})}",
    ]
    path = folder / "README.md"
    ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"
    ).save(path)
    return path


def write_run_card(
    directory: Path,
    run: Any,
    *args: Any,
    found: Verification | None = None,
    **given: Any,
) -> None:
    """Write the card with what the stock card knows of a run: base model, task, data set, arguments.

    Args:
        directory: The packed checkpoint.
        run: The Trainer, or an object with its `args`, `model`, `state`,
            `train_dataset` and `eval_dataset`.
        *args: What `Trainer.create_model_card` takes.
        found: As for `write_card`.
        **given: What `Trainer.create_model_card` takes.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    known = training_summary(run, *args, **given)
    tag = _first(known.dataset_tags)
    data = ModelCardData(
        # The Trainer adds the user's name to the id in its arguments.
        model_name=getattr(run, "hub_model_id", None)
        or run.args.hub_model_id
        or known.model_name,
        base_model=hub_id(known.finetuned_from),
        pipeline_tag=_first(known.tasks),
        datasets=None if tag is None else [tag],
        language=known.language,
        license=known.license or None,
        tags=[known.tags] if isinstance(known.tags, str) else known.tags,
    )
    dataset = {
        "dataset_type": tag,
        "dataset_name": _first(known.dataset) or tag,
        "dataset_config": _first(known.dataset_args),
    }
    training = known.hyperparameters
    if "optimizer" in training:
        # The stock text names a member of an enumeration.
        training["optimizer"] = OptimizerNames(run.args.optim).value
    write_card(
        directory,
        data,
        dataset=dataset,
        training=training,
        found=found,
        model=run.model,
    )


def _first(value: Any) -> str | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return str(first) if first else None


def _made(saved: Verification) -> str:
    """Say what was quantized, to how many bits, and how that is stored."""
    layers = saved.layers.values()
    names = {"embedding": "embedding tables", "conv": "convolutions"}
    what = sorted(
        {names.get(layer.kind, "linear layers") for layer in layers}, reverse=True
    )
    widths = sorted({layer.bits for layer in layers})
    bits = ["float" if width == FLOAT_BITS else str(width) for width in widths]
    codes = {
        "integers" if layer.format == "int" else layer.format.upper()
        for layer in layers
        if layer.has_codes
    }
    stored = f"packed {' and '.join(sorted(codes))} in the format `{_format(saved)}`"
    if not all(layer.has_codes for layer in layers):
        stored += ", or floats on their grid; see the table"
    now, before = megabytes(saved.file_bytes), megabytes(saved.float_bytes)
    how = "" if saved.state["step"] is None else " while it trained,"
    return (
        f"the weights of its {' and '.join(what)} were quantized{how} to {' and '.join(bits)} bits. "
        f"{saved.coverage()} are quantized, which makes {saved.mean_bits:.2f} bits per parameter over the whole model. "
        f"The quantized weights are {stored}: {now} instead of {before} in all."
        f"{_inputs(saved)}"
    )


def _format(saved: Verification) -> str:
    """What loads the packed weights, which is the name of a tag."""
    layout: Layout = saved.state["layout"]
    return LAYOUTS[layout].method


def _inputs(saved: Verification) -> str:
    """Say what the folder computes with where training rounded the inputs of layers."""
    config = MoQConfig.from_dict(saved.state["config"])
    activations = config.activations
    step = saved.state["step"]
    has_begun = step is None or step >= activations.start_step
    if not activations.enabled or not has_begun:
        return ""
    rounded = f"inputs rounded to {activations.bits} bits ({activations.scale})"
    if saved.state["rounds_inputs"]:
        return f" It computes with {rounded}."
    return f" Training saw {rounded}, for an export; here inputs are floats."


def _loading(name: str, folder: Path, saved: Verification, model: Any) -> str:
    if saved.loads_by_hand:
        return _BY_HAND
    cls, code = how_to_load(saved, folder, name, model)
    module = "the_module_that_defines_it"
    libraries = dict(saved.state["needs"])
    if loads_as(folder):
        module = LIBRARY
        libraries["sentence-transformers"] = LEAST
    elif hasattr(transformers, cls):
        module = "transformers"
    imports = [f"from {module} import {cls}"]
    if _adapter_of(model) is not None:
        imports.insert(0, "from peft import PeftModel")
        libraries["peft"] = _LEAST_PEFT
    if saved.proof is not None and saved.proof.autocast is not None:
        code += (
            f"\n\nwith torch.autocast(model.device.type, dtype=torch.{saved.proof.autocast}):"
            "\n    outputs = model(**inputs)"
        )
    if "torch." in code:
        imports.insert(0, "import torch")
    if "fnmatch(" in code:
        imports.insert(0, "from fnmatch import fnmatch\n")
    needs = " ".join(f'"{library}>={least}"' for library, least in libraries.items())
    text = _BY_TRANSFORMERS.format(
        imports="\n".join(imports), code=code, needs=needs or "transformers"
    )
    if LAYOUTS[saved.state["layout"]].is_left_packed:
        text += _TO_TRAIN_ON
    return text


def _adapter_of(model: Any) -> str | None:
    """Where in its folder a model has the adapter that it answers with; None without one beside it."""
    if model is None or without_peft(model) is model or is_merged(model):
        return None
    return active_adapter(model)


def how_to_load(
    saved: Verification, folder: Path, name: str, model: Any = None
) -> tuple[str, str]:
    """The class that loads a folder, of Sentence Transformers or of transformers, and the code that does.

    The code is what the proof has run.

    Args:
        saved: What is in the folder, and how it was proven.
        folder: With its `config.json`.
        name: The folder's name in the code.
        model: The model in memory, whose adapters lie in the folder.

    Returns:
        The name of the class, and lines that give a variable `model`.
    """
    proof = saved.proof
    attention = None if proof is None else proof.attention
    kind = loads_as(folder)
    if kind is None:
        cls, load = _transformers_line(folder, name, attention)
    elif attention is None:
        cls, load = kind, f"{kind}({quoted(name)})"
    else:
        settings = {"attn_implementation": attention}
        cls, load = kind, f"{kind}({quoted(name)}, model_kwargs={settings})"
    adapter = _adapter_of(model)
    if adapter is not None:
        load = f"PeftModel.from_pretrained({load}, {quoted(name)}, subfolder={quoted(adapter)})"
    if proof is None or proof.dtype is None:
        return cls, f"model = {load}"
    dtype = f"torch.{proof.dtype}"
    is_packed = LAYOUTS[saved.state["layout"]].is_left_packed
    if not proof.kept and not is_packed:
        return cls, f"model = {load}.to({dtype})"
    lines = [f"model = {load}"]
    if is_packed:
        lines.append("model(**inputs)  # the first call unpacks the weights")
    if not proof.kept:
        return cls, "\n".join([*lines, f"model.to({dtype})"])
    lines += [
        f"kept = {list(proof.kept)}",
        "for name, tensor in [*model.named_parameters(), *model.named_buffers()]:",
        "    if tensor.is_floating_point() and not any(fnmatch(name, pattern) for pattern in kept):",
        f"        tensor.data = tensor.data.to({dtype})",
    ]
    return cls, "\n".join(lines)


def _transformers_line(folder: Path, name: str, attention: Any) -> tuple[str, str]:
    """The class of transformers that loads a folder, and the expression that does."""
    arguments = quoted(name)
    if attention is not None:
        arguments += f", attn_implementation={attention!r}"
    config = read_json(folder / "config.json")
    # The class that was proven: that of `AutoModel` may have no head, or another one.
    cls = config["architectures"][0]
    for auto, code in config.get("auto_map", {}).items():
        # The code lies in the folder: nothing can import the class from elsewhere.
        if str(code).endswith(f".{cls}"):
            return auto, f"{auto}.from_pretrained({arguments}, trust_remote_code=True)"
    return cls, f"{cls}.from_pretrained({arguments})"


def _results(
    metrics: Mapping[str, float], before: Mapping[str, float], state: Mapping[str, Any]
) -> str:
    teacher = state["config"]["distillation"]["teacher"]
    rows = metric_rows(metrics, before, float_after(_phase_end(state), state["step"]))
    notes = [markdown_table(rows)] if metrics else []
    if teacher is not None:
        whose = "whose scores are those of float above" if before else "not scored here"
        notes.append(f"It learned from the float model `{teacher}`, {whose}.")
    elif not before and metrics:
        notes.append("No float model was evaluated beside this one.")
    return "\n\n".join(["## Evaluation", *notes]) if notes else ""


def _phase_end(state: Mapping[str, Any]) -> int | None:
    """The last step of the float phase, which its metrics name; None in a run without one."""
    step = state["float_metrics"].get("step")
    # A line of the log of another run has a step too.
    has_phase = isinstance(step, int) and isinstance(
        MoQConfig.from_dict(state["config"]).offset, float
    )
    return step if has_phase else None


def _sizes(saved: Verification) -> str:
    lines = saved.totals()
    for name, layer in saved.layers.items():
        if layer.tied:
            others = " and ".join(f"`{other}`" for other in layer.tied)
            lines.append(f"{others}: the weight of `{name}`, which is stored once.")
    return "\n".join(f"- {line}" for line in lines)


def _proof(saved: Verification) -> str:
    reason = saved.state["reason"]
    lines = [f"{saved.proof}."] if saved.proof is not None else []
    lines += [f"Why not packed otherwise: {reason}."] if reason else []
    return "\n\n".join(["## Proof", *lines]) if lines else ""


def _making(state: Mapping[str, Any], training: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in state["versions"].items()
    )
    steps = {} if state["step"] is None else {"optimizer steps": state["step"]}
    settings = {**steps, **training, "versions": versions}
    listed = "\n".join(f"- {name}: {value}" for name, value in settings.items())
    config = MoQConfig.from_dict(state["config"])
    recipe = 'MoQTrainer(..., moq_config="moq.json")'
    if _phase_end(state):
        recipe = (
            f'MoQTrainer(..., moq_config="moq.json", float_first={config.offset:g})'
        )
        config = before_float(config)
    elif config.distillation.teacher is None:
        recipe = f'Trainer(..., callbacks=[MoQCallback("moq.json")])` or as `{recipe}'
    return (
        "The quantization's configuration, `moq.json`; the other keys have their defaults:\n\n"
        f"```json\n{json.dumps(config.changed(), indent=2)}\n```\n\n"
        f"Train with it: `{recipe}`.\n\n{listed}\n\n"
        "`moq_state.json` holds every switch of precision with its step; `moq-hf inspect` verifies the files."
    )
