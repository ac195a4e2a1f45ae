"""`moq-hf pack`: packs the model of a run's checkpoint, in one process that never holds the whole model."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, TrainerState

from ..errors import MoQError, explained, read_json
from ..formats.table import Layout
from ..model.convert import prepare_model
from ..model.selection import take_inventory
from ..names import plain_name
from ..seams.engines import FSDP_MODEL
from ..seams.sentence_transformers import loads_as
from ..seams.transformers import (
    callback_states,
    never_saved,
    original_format,
    tied_parameters,
)
from ..training.checkpoints import (
    STATE_FILE,
    entry_of_moq,
    fault_of,
    last_metrics,
    state_of_run,
)
from ..training.controller import MoQController
from ..training.float_first import FOLDER, METRICS
from ..training.resume import has_begun
from .checkpoint_weights import (
    Weights,
    distributed_weights,
    safetensors_weights,
    zero_folder,
    zero_weights,
)
from .files import (
    CONFIG,
    INDEX,
    SINGLE,
    copy_tokenizer,
    new_path,
)
from .save import SaveOptions, deliver
from .state import STATE_NAME

_SHARDS = f"{FSDP_MODEL}_0"


def pack_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    layout: Layout | None = None,
) -> str:
    """Write the packed model of a checkpoint, as `MoQTrainer.save_model` would have written it at that step.

    The model is made without memory for its weights, which are read one at a time from
    safetensors, the shards of FSDP2, or the files of DeepSpeed's ZeRO. No outputs are
    compared, since there is no model in memory.

    Args:
        checkpoint: A folder `checkpoint-N` of a run with moq_hf.
        out: The folder to make, or an empty one.
        layout: As for `save_quantized`.

    Returns:
        What was written, in a line.

    Raises:
        MoQError: The checkpoint lacks something, is damaged, or is from before
            quantization began; or the files cannot be written.
    """
    folder = Path(checkpoint)
    target = Path(out)
    new_path(out)
    if (folder / STATE_NAME).is_file():
        raise MoQError(
            f"cannot pack {folder}: it is what a run delivered; give a checkpoint of the run"
        )
    fault = fault_of(folder)
    if fault is not None:
        raise MoQError(f"cannot pack {folder}: it is not a whole checkpoint ({fault})")
    if loads_as(folder) is not None:
        raise MoQError(
            f"cannot pack {folder}: it is a checkpoint of Sentence Transformers; resume the run from it, "
            "which delivers the model at its end"
        )
    state = state_of_run(folder)
    if not has_begun(state):
        raise MoQError(
            f"cannot pack {folder}: nothing was quantized yet after its {state['schedule']['steps']} steps, so its "
            "model is a float one"
        )
    weights = _weights_of(folder)
    if not (folder / CONFIG).is_file():
        raise MoQError(
            f"{folder / CONFIG} is missing: copy the model's, and its tokenizer, into the checkpoint"
        )
    shell = empty_model(read_config(folder), folder)
    _untie(shell, weights)
    config = state["config"]
    if config.train == "scales":
        # The model has them as parameters, as the checkpoint does.
        prepare_model(take_inventory(shell, config), config)
    names = _names_in(shell, weights, folder)
    controller = _controller(shell, state)
    log = TrainerState.load_from_json(str(folder / STATE_FILE))
    with tqdm(desc="pack", total=len(names), leave=False, disable=None) as bar:
        options = SaveOptions(
            processing_class=TokenizerFiles(folder),
            controller=controller,
            metrics=last_metrics(log.log_history),
            float_metrics=_float_metrics(folder),
            teaching=entry_of_moq(callback_states(log))["attributes"].get("teaching"),
            state_dict=weights.renamed(names, bar.update),
        )
        return f"{target}: {deliver(shell, target, options, None, layout).summary}"


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a checkpoint, whose files are copied."""

    folder: Path

    def save_pretrained(self, folder: Path) -> None:
        """Copy them into a folder."""
        copy_tokenizer(self.folder, folder)


def read_config(model: Path | str) -> PreTrainedConfig:
    """The config of a model in a folder or on the Hub.

    Raises:
        MoQError: It cannot be read.
    """
    # The type may be unknown, a file damaged, or the Hub out of reach.
    with explained(f"the config of {model} cannot be read"):
        document, _ = PreTrainedConfig.get_config_dict(model)
        if (
            "auto_map" in document
            and document.get("model_type") not in transformers.CONFIG_MAPPING
        ):
            raise MoQError(
                f"{model} comes with its own code (auto_map in {CONFIG}), which moq-hf does not run; to pack a "
                "checkpoint of it, resume its run from there: the end of training packs the model"
            )
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            model, trust_remote_code=False
        )
    return config


def _weights_of(folder: Path) -> Weights:
    """Find the weights of a checkpoint, wherever it has them.

    Raises:
        MoQError: It has none that can be read, or some of them are missing or damaged.
    """
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return safetensors_weights(folder)
    if (folder / _SHARDS).is_dir():
        return distributed_weights(folder / _SHARDS)
    zero = zero_folder(folder)
    if zero is not None:
        return zero_weights(zero)
    if (folder / "adapter_config.json").is_file():
        raise MoQError(
            f"{folder} holds only PEFT's adapters: load them with their base model, and call save_quantized"
        )
    raise MoQError(
        f"{folder} is not a folder checkpoint-N of a run: it holds no weights, neither {SINGLE}, nor {INDEX}, nor "
        f"{_SHARDS}, nor files of DeepSpeed"
    )


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that a config names.

    Raises:
        MoQError: It names none.
    """
    names = config.architectures
    if not names:
        raise MoQError(
            f"{CONFIG} names no architectures: add the model's class, as in "
            '"architectures": ["BertForSequenceClassification"]'
        )
    name = str(names[0] if isinstance(names, list) else names)
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise MoQError(
            f"{CONFIG}: architectures: {name!r} is not a class of transformers: load the checkpoint with its own code, "
            "and call save_quantized"
        )
    return cls


def empty_model(config: PreTrainedConfig, described: Path | str) -> PreTrainedModel:
    """Make the model of a config without memory for its weights, with the generation config if there is one.

    Raises:
        MoQError: Its class is not one of transformers, or cannot be made so.
    """
    cls = model_class(config)
    with explained(f"{CONFIG} does not make a {cls.__name__}"), torch.device("meta"):
        shell: PreTrainedModel = cls(config).eval()
    if shell.can_generate():
        # The file need not exist.
        with contextlib.suppress(OSError):
            shell.generation_config = transformers.GenerationConfig.from_pretrained(
                described
            )
    return shell


def _untie(shell: PreTrainedModel, weights: Weights) -> None:
    """Give tied modules separate parameters if the checkpoint has different values for them."""
    for name, other in tied_parameters(shell).items():
        if not {name, other} <= weights.specs.keys():
            continue
        if not torch.equal(weights[name], weights[other]):
            module, _, attribute = name.rpartition(".")
            own = nn.Parameter(torch.empty_like(shell.get_parameter(other)))
            setattr(shell.get_submodule(module), attribute, own)


def _names_in(shell: PreTrainedModel, weights: Weights, folder: Path) -> dict[str, str]:
    """Find the names of the model's tensors in the checkpoint, and give the model the dtypes of the checkpoint.

    Raises:
        MoQError: The checkpoint lacks tensors, or has others; names them.
    """
    wanted = dict(shell.state_dict(keep_vars=True))
    # transformers writes some weights under names that differ from the modules'.
    written = {id(t): name for name, t in original_format(shell, wanted).items()}
    tied = tied_parameters(shell)
    # A weight that is saved under one of its names is there under all of them.
    saved_names: dict[int, str] = {}
    for name, tensor in wanted.items():
        for candidate in (name, written.get(id(tensor)), tied.get(name)):
            if candidate is not None and candidate in weights.specs:
                saved_names.setdefault(id(tensor), candidate)
    names = {n: saved_names[id(t)] for n, t in wanted.items() if id(t) in saved_names}
    unknown = weights.specs.keys() - set(names.values()) - wanted.keys() - tied.keys()
    if any(plain_name(name, ()) != name for name in unknown):
        raise MoQError(
            f"{folder} holds the weights of a model with PEFT's adapters: load them, and call save_quantized"
        )
    there = {name: wanted[name] for name in never_saved(shell) & wanted.keys()}
    there |= {name: weights.specs[name] for name in unknown}
    there |= {name: weights.specs[saved] for name, saved in names.items()}
    with explained(f"{weights.place}: not the weights that {CONFIG} describes"):
        shell.load_state_dict(there)
        for name in names:
            wanted[name].data = wanted[name].data.to(there[name].dtype)
    return names


def _controller(shell: nn.Module, state: Mapping[str, Any]) -> MoQController:
    """Make the run's controller as it was at the checkpoint."""
    controller = MoQController(
        shell,
        state["config"],
        state["schedule"]["total_steps"],
    )
    controller.load_state_dict(state)
    if state["handed_dtype"]:
        for layer in controller.all_layers.values():
            layer.moq.handed_dtype = getattr(torch, state["handed_dtype"])
    return controller


def _float_metrics(folder: Path) -> dict[str, Any] | None:
    """Read the metrics of the float model, which a run with `float_first` keeps beside its checkpoints."""
    with contextlib.suppress(OSError, MoQError):
        return read_json(folder.parent / FOLDER / METRICS) or None
    return None
