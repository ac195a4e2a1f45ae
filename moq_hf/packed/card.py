"""The model card of a packed checkpoint: facts about the folder and its run, for the templates that show them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.training_args import OptimizerNames

from ..config import MoQConfig
from ..errors import read_as, read_json
from ..formats.table import LAYOUTS, Layout
from ..lora import is_merged
from ..names import without_peft
from ..rendering import rendered
from ..schedule import FLOAT_BITS
from ..seams.sentence_transformers import (
    LEAST,
    LIBRARY,
    PIPELINES,
    evaluations_of,
    loads_as,
)
from ..seams.transformers import training_summary
from ..text import evaluation_in, quoted
from ..training.budget import Choice
from ..training.float_first import before_float
from .files import ADAPTER, active_adapter
from .state import STATE_NAME, deploy_command, hub_id
from .verify import Verification, verify_quantized

# setup.cfg has the same.
_LEAST_PEFT = "0.17"
TAGS = ("moq", "quantization-aware-training")
THIS_FOLDER = "path/to/this/folder"
_KINDS = {"embedding": "embedding tables", "conv": "convolutions"}


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run, for the template `body.md`.

    Attributes:
        config: The run's config.
        steps: Optimizer steps taken; None if the model was quantized without training.
        quantized: Metrics of the quantized model by name, without `eval_`.
        in_float: Metrics of the float model for comparison; empty if there are none.
        float_step: The last step of the float phase; None if there was none.
        choice: The bits that were chosen under a budget; None without a budget.
        teacher_given: The Hub id or the class of a teacher that the config does not name;
            None if there was none, or a float phase made it.
        began: The step after which the first weight was quantized, 0 for the start; None if
            none was yet.
    """

    config: MoQConfig
    steps: int | None
    quantized: Mapping[str, float]
    in_float: Mapping[str, float]
    float_step: int | None
    choice: Choice | None
    teacher_given: str | None
    began: int | None

    @property
    def before(self) -> str:
        """A name for the float model, which after a float phase says that it had only a part of the steps."""
        if self.float_step is None or self.steps is None:
            return "float"
        return f"float after {self.float_step:,} of {self.steps:,} steps"

    @property
    def float_first(self) -> float | None:
        """The share of the run that was in float, for `MoQTrainer(float_first=)`; None without a float phase."""
        share = self.config.offset
        return share if self.float_step and isinstance(share, float) else None

    @property
    def while_training(self) -> str:
        """When its weights were quantized, in words; empty without a run."""
        if self.steps is None:
            return ""
        if not self.began:
            return " while it trained,"
        last = self.steps - self.began
        return f" in the last {last:,} of its {self.steps:,} training steps,"

    @property
    def recipe(self) -> dict[str, Any]:
        """The keys of the config that a user would write."""
        if self.float_first is None:
            return self.config.changed()
        return before_float(self.config).changed()


def began_at(config: MoQConfig, switches: Sequence[int]) -> int | None:
    """The step after which quantization began, from those at which bits changed: 0 for the start, None if it did not.

    >>> began_at(MoQConfig(bits=4, offset=0.9), [18, 18]), began_at(MoQConfig(bits=4), [])
    (18, 0)
    """
    return min(switches, default=None) if config.offset else 0


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
        directory: A folder that `save_quantized` wrote; the card shows its metrics,
            sizes and bits.
        data: Other metadata of the model; `model_name` is a Hub id, by default the
            directory's name.
        dataset: The `dataset_type`, `dataset_name` and `dataset_config` of an
            `EvalResult`; without a type and a `pipeline_tag` the metadata has no
            results.
        training: Hyperparameters, for the section on reproducing the model.
        found: The result of `verify_quantized`; None verifies the folder now.
        model: The model in memory. If evaluators of Sentence Transformers have scored
            it, the metadata has their results.

    Returns:
        The card's path.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    folder = Path(directory)
    data = data or ModelCardData()
    dataset = dataset or {}
    found = found or verify_quantized(folder)
    state = found.state
    metrics = evaluation_in(state["metrics"])
    name = data.model_name or folder.resolve().name
    data.model_name = name.rpartition("/")[2]
    _complete(data, found, loads_as(folder), list(metrics))
    if data.pipeline_tag and dataset.get("dataset_type"):
        data.eval_results = [
            EvalResult(
                task_type=data.pipeline_tag,
                metric_type=metric,
                metric_value=metrics[metric],
                **dataset,  # type: ignore[arg-type]
            )
            for metric in data.metrics or []
        ]
    data.eval_results = evaluations_of(model, metrics) or data.eval_results
    config = MoQConfig.from_dict(state["config"])
    in_float = state["float_metrics"]
    teaching = state.get("teaching")
    if teaching is None:
        # Folders of 0.2 tell of a float phase by the step of its metrics alone; those that
        # the user gave may hold a step of another run.
        step = in_float.get("step")
        is_step = isinstance(step, int) and isinstance(config.offset, float)
        teaching = {"float_steps": step if is_step else None, "teacher_name": None}
    place = name if "/" in name else THIS_FOLDER
    choice = state.get("choice")
    run = RunFacts(
        config,
        state["step"],
        metrics,
        evaluation_in(in_float),
        teaching["float_steps"],
        read_as(Choice | None, choice, str(folder / STATE_NAME), "choice"),
        teaching["teacher_name"],
        began_at(config, [switch["step"] for switch in state["history"]]),
    )
    text = rendered(
        "card.md",
        data=data,
        source=dataset.get("dataset_name") or dataset.get("dataset_type"),
        run=run,
        training=training or {},
        serve_with=deploy_command(folder, THIS_FOLDER),
        **facts_of_folder(found, folder, place, model),
    )
    path = folder / "README.md"
    ModelCard(f"{text}\n").save(path)
    return path


def _complete(
    data: ModelCardData, found: Verification, kind: str | None, metrics: list[str]
) -> None:
    """Fill in the metadata that follows from the folder."""
    data.library_name = "sentence-transformers" if kind else "transformers"
    data.pipeline_tag = data.pipeline_tag or PIPELINES.get(kind)
    # A folder that was saved without a run's controller has no step.
    tags = TAGS[:1] if found.state["step"] is None else TAGS
    data.tags = list(dict.fromkeys([*tags, _method(found), *(data.tags or [])]))
    if data.base_model:
        data["base_model_relation"] = "finetune"
    data.metrics = [metric for metric in metrics if metric != "loss"] or None


def _method(found: Verification) -> str:
    """The quantization method that loads the packed weights; it is also a tag on the Hub."""
    layout: Layout = found.state["layout"]
    return LAYOUTS[layout].method


def facts_of_folder(
    found: Verification, folder: Path, place: str, model: Any = None
) -> dict[str, Any]:
    """Facts about a packed checkpoint, for the templates `card.md` and `body.md`.

    Args:
        found: Its layers and its proof.
        folder: Its path.
        place: Its name in the code that loads it.
        model: The model in memory; None looks for an adapter in the folder.
    """
    layers = found.layers.values()
    kinds = {_KINDS.get(layer.kind, "linear layers") for layer in layers}
    widths = sorted({layer.bits for layer in layers})
    with_codes = [layer for layer in layers if layer.has_codes]
    formats = {layer.format for layer in with_codes}
    facts: dict[str, Any] = {
        "found": found,
        "is_left_packed": LAYOUTS[found.state["layout"]].is_left_packed,
        "kinds": sorted(kinds, reverse=True),
        "widths": ["float" if bits == FLOAT_BITS else bits for bits in widths],
        "codes": sorted("integers" if f == "int" else f.upper() for f in formats),
        "all_have_codes": len(with_codes) == len(layers),
        "method": _method(found),
    }
    if found.loads_by_hand:
        return facts
    needs = dict(found.state["needs"])
    cls, code = how_to_load(found, folder, place, model)
    module = "the_module_that_defines_it"
    if loads_as(folder):
        module = LIBRARY
        needs["sentence-transformers"] = LEAST
    elif hasattr(transformers, cls):
        module = "transformers"
    if _adapter_in(folder, model) is not None:
        needs["peft"] = _LEAST_PEFT
    return facts | {"needs": needs, "module": module, "cls": cls, "code": code}


def write_run_card(
    directory: Path,
    run: Any,
    *args: Any,
    found: Verification | None = None,
    **given: Any,
) -> None:
    """Write the card with the facts of the Trainer's own card about a run: base model, task, data set, arguments.

    Args:
        directory: The packed checkpoint.
        run: The Trainer, or an object with its `args`, `model`, `state`,
            `train_dataset` and `eval_dataset`.
        *args: Arguments of `Trainer.create_model_card`.
        found: As for `write_card`.
        **given: Arguments of `Trainer.create_model_card`.

    Raises:
        MoQError: The checkpoint is damaged.
    """
    known = training_summary(run, *args, **given)
    tag = _first(known.dataset_tags)
    data = ModelCardData(
        # The Trainer's own id has the user's name in front.
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
        # The Trainer's own text shows a member of an enumeration.
        training["optimizer"] = OptimizerNames(run.args.optim).value
    if training.get("training_steps") == run.state.global_step:
        # The card has the steps that were taken.
        del training["training_steps"]
    warmup = "lr_scheduler_warmup_steps"
    if warmup in training:
        # A setting below 1 is a share of the steps.
        training[warmup] = run.args.get_warmup_steps(run.state.max_steps)
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


def _adapter_in(folder: Path, model: Any) -> str | None:
    """The subfolder of the active PEFT adapter; None if the folder has none that must be loaded with it."""
    if model is None:
        files = sorted((folder / ADAPTER).rglob("adapter_config.json"))
        places = [path.parent.relative_to(folder).as_posix() for path in files]
        return places[0] if places else None
    if without_peft(model) is model or is_merged(model):
        return None
    return active_adapter(model)


def how_to_load(
    saved: Verification, folder: Path, name: str, model: Any = None
) -> tuple[str, str]:
    """The class of transformers or Sentence Transformers that loads a folder, and the code that does.

    The proof has run this code.

    Args:
        saved: The layers in the folder and their proof.
        folder: The folder, with its `config.json`.
        name: The folder's name in the code.
        model: The model in memory; None looks for an adapter in the folder.

    Returns:
        The name of the class, and lines that define a variable `model`.
    """
    proof = saved.proof
    given = {}
    if proof is not None and proof.attention is not None:
        given["attn_implementation"] = proof.attention
    cls = loads_as(folder)
    if cls is not None:
        load = _call(cls, name, {"model_kwargs": given} if given else {})
    else:
        cls, is_in_folder = _class_of(folder)
        trust = {"trust_remote_code": True} if is_in_folder else {}
        load = _call(f"{cls}.from_pretrained", name, given | trust)
    adapter = _adapter_in(folder, model)
    if adapter is not None:
        load = f"PeftModel.from_pretrained({load}, {quoted(name)}, subfolder={quoted(adapter)})"
    code = rendered(
        "load.txt",
        load=load,
        dtype=proof and proof.dtype,
        kept=list(proof.kept) if proof else [],
        is_packed=LAYOUTS[saved.state["layout"]].is_left_packed,
    )
    return cls, code


def _call(function: str, place: str, given: Mapping[str, Any]) -> str:
    """A call with a path and keyword arguments, as Python code."""
    arguments = [quoted(place), *(f"{key}={value!r}" for key, value in given.items())]
    return f"{function}({', '.join(arguments)})"


def _class_of(folder: Path) -> tuple[str, bool]:
    """The class of transformers that loads a folder, and whether the folder itself defines the model."""
    config = read_json(folder / "config.json")
    # The proof has loaded this class; an auto class may give no head, or another one.
    cls = config["architectures"][0]
    for auto, code in config.get("auto_map", {}).items():
        # A class that is defined in the folder can only be imported by its auto class.
        if str(code).endswith(f".{cls}"):
            return auto, True
    return cls, False
