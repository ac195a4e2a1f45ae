"""Everything private or undocumented that is used of transformers, and of the libraries that it trains and loads with.

A public name is deprecated before it goes; these names are not. Each has its place
here, which says what it relies on and what a user would see break, and a test: of the
same name in `tests/test_seams.py`, or in a file that `ELSEWHERE` names there. What
cannot be called from here, methods that are overridden and what every forward pass
needs, is listed there too. For a new version of a library: raise `CHECKED` there, run
these tests, mend in this module what fails.

Documented, and therefore not here: `base_model_prefix`, `loss_is_scaled_for_ga`,
`step_was_skipped`, `save_original_format`, `Conv1D`, and of DTensor `device_mesh` and
`placements`.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, cast

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import modelcard, trainer_callback, trainer_utils

from ..errors import MoQError, read_json, write_json

# The Trainer.

ExportableState = trainer_callback.ExportableState
"""The base class by which the Trainer knows a callback with a state.

Relies on: The Trainer puts `state()` of its instances into `trainer_state.json`, and
rebuilds one from its "args".
Breaks: The package could not be imported; or checkpoints would hold no schedule, and a resumed run start a new one.
"""

CALLBACKS_KEY: Final = "stateful_callbacks"
"""Where `trainer_state.json` has the states of the callbacks, by class name.

Relies on: `TrainerState.save_to_json`, which writes the fields by their names.
Breaks: `moq-hf report` would find no run with MoQ, and `load_best_model_at_end` not the bits of the best checkpoint.
"""

INCOMPLETE: Final = "checkpoint-is-incomplete.txt"
"""The file that marks a checkpoint while `enable_jit_checkpoint` saves it.

Relies on: `trainer_jit_checkpoint.CheckpointManager`, which names it in its code.
Breaks: `last_checkpoint` might take a checkpoint that was cut off for a whole one.
"""


def callback_states(state: transformers.TrainerState) -> dict[str, Any]:
    """The states of a run's callbacks, by class name; may be written.

    Relies on: `TrainerState.stateful_callbacks`, declared a list of callbacks, is a
    dict once the Trainer has it.
    Breaks: A resumed run would start a new schedule, and saving a checkpoint fail.
    """
    return cast(dict[str, Any], state.stateful_callbacks)


def callbacks_of(trainer: transformers.Trainer) -> list[transformers.TrainerCallback]:
    """The callbacks of a Trainer, of which a restored checkpoint may have made new objects.

    Relies on: `Trainer.callback_handler.callbacks`.
    Breaks: `MoQTrainer` would not find its callback again after
    `restore_callback_states_from_checkpoint`.
    """
    return trainer.callback_handler.callbacks


def callers() -> Iterator[tuple[str, Any]]:
    """The functions on the stack, innermost first: the name of each, and its `self` if it has one.

    Relies on: Frames, as CPython has them.
    Breaks: No Trainer could be built with a `MoQCallback`.
    """
    for frame in frames():
        yield frame.f_code.co_name, frame.f_locals.get("self")


def frames() -> Iterator[FrameType]:
    """This thread's stack, from the caller's frame outwards.

    Relies on: `sys._getframe`, as CPython has it.
    Breaks: Weights read in a forward pass would be the float ones.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_trainer(
    state: transformers.TrainerState,
) -> transformers.Trainer:
    """The Trainer that is calling a callback just now.

    Args:
        state: As the callback got it.

    Raises:
        MoQError: No Trainer is calling it.

    Relies on: The Trainer calls its callbacks from its own methods, whose frames have
    it as `self`; a callback is given no other way to it.
    Breaks: No Trainer could be built with a `MoQCallback`.
    """
    for _, found in callers():
        if isinstance(found, transformers.Trainer) and found.state is state:
            return found
    raise MoQError("a MoQCallback is for a transformers.Trainer, and none calls it")


def call_first(
    trainer: transformers.Trainer, callback: transformers.TrainerCallback
) -> None:
    """Have the Trainer call a callback before all others, which then see what it adds to a log.

    Relies on: `Trainer.log` hands one dict to the callbacks, in the order of
    `callback_handler.callbacks`, in which reporters come before those that a user gave.
    Breaks: TensorBoard, W&B and trackio would get the loss without the bits.
    """
    callbacks = callbacks_of(trainer)
    if callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def give_to_each_trainer(callback: type[transformers.TrainerCallback]) -> None:
    """Have each Trainer that is made from now on begin with a callback; calling it again changes nothing.

    Relies on: `transformers.trainer.DEFAULT_CALLBACKS`, which `Trainer.__init__` reads.
    Breaks: A model loaded with a `MoQConfig` would not train in a stock Trainer as with
    a `MoQCallback`: each micro-batch would count as a step, and nothing be delivered.
    """
    callbacks: list[Any] = transformers.trainer.DEFAULT_CALLBACKS
    if callback not in callbacks:
        callbacks.append(callback)


def is_reporter(callback: transformers.TrainerCallback) -> bool:
    """True if a callback is one that `report_to` names: it draws scalars, where others print them.

    Relies on: `integration_utils.INTEGRATION_TO_CALLBACK`.
    Breaks: TensorBoard, W&B and trackio would have no curves of single blocks.
    """
    known = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    return isinstance(callback, tuple(known.values()))


def add_notebook_column(
    trainer: transformers.Trainer, name: str, value: Callable[[], Any]
) -> None:
    """Add a second column to a notebook's table of a run; calling it again changes nothing.

    Args:
        trainer: In training.
        name: Heading of the column.
        value: Gives the cell of a new line.

    Relies on: `NotebookProgressCallback.training_tracker`, whose `inner_table` begins
    with the headings and whose `write_line` takes the cells by heading.
    Breaks: A notebook would not show the bits.
    """
    for callback in callbacks_of(trainer):
        tracker = getattr(callback, "training_tracker", None)
        if tracker is None or "write_line" in vars(tracker):
            continue
        tracker.inner_table[0].insert(1, name)
        write = tracker.write_line
        tracker.write_line = lambda cells, write=write: write({**cells, name: value()})


def tell_of_saves(trainer: transformers.Trainer, tell: Callable[[Path], None]) -> None:
    """Call `tell` with each folder that `save_model` writes outside of training; calling it again changes nothing.

    Relies on: `Trainer.is_in_train`, and that `push_to_hub` calls `self.save_model`.
    Breaks: Nobody would say that a stock Trainer saves float weights.
    """
    if "save_model" in vars(trainer):
        return
    save = trainer.save_model

    @functools.wraps(save)
    def save_model(output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        save(output_dir, *args, **kwargs)
        if not trainer.is_in_train:
            tell(Path(output_dir or str(trainer.args.output_dir)))

    trainer.save_model = save_model  # type: ignore[method-assign]


def saves_checkpoint() -> bool:
    """True if a Trainer is saving a checkpoint of its run just now.

    Relies on: `Trainer._save_checkpoint`, whose frame has the Trainer as `self`.
    Breaks: Each checkpoint would come with a warning that its weights are floats; those
    of a model that was loaded with a `MoQConfig` would be packed, and no run could
    resume.
    """
    return any(
        name == "_save_checkpoint" and isinstance(owner, transformers.Trainer)
        for name, owner in callers()
    )


def loads_checkpoint() -> bool:
    """True while a Trainer loads the weights of a checkpoint that its run resumes from.

    Relies on: `Trainer._load_from_checkpoint`, whose frame has the Trainer as `self`.
    Breaks: A run that goes on from a checkpoint with `train` set otherwise would end with
    an error of its optimizer.
    """
    return any(
        name == "_load_from_checkpoint" and isinstance(owner, transformers.Trainer)
        for name, owner in callers()
    )


def prepared_inputs(trainer: transformers.Trainer, inputs: Any) -> dict[str, Any]:
    """A batch of the data loader as `compute_loss` takes it: on the device, in the dtype that DeepSpeed wants.

    Relies on: `Trainer._prepare_inputs`.
    Breaks: Eigenvalues and the loss scale could not be measured: `MoQTrainer` fails at
    the first batch.
    """
    return dict(trainer._prepare_inputs(inputs))


def checkpoint_folder(trainer: transformers.Trainer) -> Path:
    """The folder for the checkpoint of this step; a trial of a search has a separate one.

    Relies on: `Trainer._get_output_dir`, `Trainer._trial` once it trains, and
    `PREFIX_CHECKPOINT_DIR` before the step.
    Breaks: What a full disk left of a checkpoint would stay, and be found at the next
    resume; float models of a search's trials would be written over each other.
    """
    return Path(
        trainer._get_output_dir(getattr(trainer, "_trial", None)),
        f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}",
    )


def save_training_args(args: transformers.TrainingArguments, folder: Path) -> None:
    """Write the arguments of a run beside its model, as `Trainer._save` does.

    Relies on: `transformers.trainer.TRAINING_ARGS_NAME`.
    Breaks: A delivered folder would have no `training_args.bin`, or one that nothing
    looks for.
    """
    torch.save(args, folder / transformers.trainer.TRAINING_ARGS_NAME)


def training_summary(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
    """Everything that the stock model card knows about a run: task, data and hyperparameters.

    Relies on: `transformers.modelcard.TrainingSummary.from_trainer` and its attributes.
    Breaks: `push_to_hub` would fail while it writes the model card.
    """
    return cast(Any, modelcard.TrainingSummary).from_trainer(trainer, *args, **kwargs)


def average_loss(trainer: transformers.Trainer) -> None:
    """Make the Trainer divide the loss by the accumulation steps, and not average it over processes itself.

    Relies on: `Trainer.model_accepts_loss_kwargs`, which `training_step` reads.
    Breaks: BERT and other classifiers would train with a loss multiplied by
    accumulation steps and processes.
    """
    trainer.model_accepts_loss_kwargs = False


KNOWS_SCALE: Final = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")
"""Whether the Trainer divides a loss by the accumulation steps where `loss_is_scaled_for_ga` is False: since 5.19.

Relies on: Before, `Trainer.training_step` divides unless it has `num_items_in_batch` or `compute_loss_func`.
Breaks: With a teacher and accumulation, gradients would be multiplied by the accumulation steps.
"""


@contextlib.contextmanager
def metrics_apart(trainer: transformers.Trainer) -> Iterator[None]:
    """Keep losses and logs beside a run out of the Trainer's own metrics, which are empty inside and restored after it.

    Relies on: `_metrics` and `_total_train_tokens` of TRL's Trainers, and
    `accum_loss_components` of Sentence Transformers', which `compute_loss` adds to and
    `log` empties.
    Breaks: The metrics that TRL logs would count the batches that moq_hf measures on.
    """
    names = ("_metrics", "accum_loss_components", "_total_train_tokens")
    kept = {name: vars(trainer)[name] for name in names if name in vars(trainer)}
    for name, value in copy.deepcopy(kept).items():
        if isinstance(value, dict):
            for part in value.values():
                part.clear()
            setattr(trainer, name, value)
    try:
        yield
    finally:
        vars(trainer).update(kept)


FUSED_HEAD: Final = "fused_lm_head"
"""The argument by which TRL's Trainers ask a model for the loss of each token, without logits.

Relies on: `trl.trainer.utils.add_fused_lm_head`, whose forward pass is the model's own if it is not given.
Breaks: A teacher beside SFTTrainer or DPOTrainer would be an error: the model gives no logits to compare.
"""


def is_trl(trainer: transformers.Trainer) -> bool:
    """True if a Trainer is one of TRL's, whose loss cannot be differentiated twice: its head is fused.

    Relies on: The name of the package.
    Breaks: Measuring eigenvalues would end a run of TRL with an error of autograd.
    """
    return any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)


def in_evaluation_loop() -> bool:
    """True if this thread is in the loop in which a Trainer evaluates or predicts.

    Relies on: `Trainer.evaluation_loop`, whose frame is on the stack meanwhile.
    Breaks: Each batch of an evaluation quantizes the weights again.
    """
    return any(frame.f_code.co_name == "evaluation_loop" for frame in frames())


# Optimizers and models that Accelerate has prepared.


def loss_scale(optimizer: Any) -> float:
    """The gradient scaler's scale, which falls when it skips a step; 0 without a scaler.

    Relies on: `AcceleratedOptimizer.scaler`.
    Breaks: With fp16 and a fused optimizer the schedule would count steps that were
    skipped.

    Example:
        >>> loss_scale(torch.optim.SGD([torch.zeros(1)]))
        0.0
    """
    scaler = getattr(optimizer, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def undo_mixed_precision(model: nn.Module) -> None:
    """Give a model back the `forward` that `Accelerator.prepare` has wrapped in autocast.

    Relies on: `_original_forward`, an attribute of the instance.
    Breaks: Eigenvalues would be measured in float16 or bfloat16, whose second
    derivatives are mostly rounding.
    """
    if "_original_forward" in vars(model):
        vars(model)["forward"] = vars(model)["_original_forward"]


def mixed_precision() -> torch.dtype | None:
    """The dtype of the autocast that Accelerate puts inside a model's forward pass; None without one.

    Relies on: `AcceleratorState`, and `_shared_state`, which is empty before an
    `Accelerator` was made.
    Breaks: The first pass of a run makes its quantized weights one by one, and a compiled
    model is compiled twice.
    """
    if not AcceleratorState._shared_state:
        return None
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return names.get(AcceleratorState().mixed_precision)


def uses_deepspeed() -> bool:
    """True if Accelerate trains with DeepSpeed, whose hooks of a parameter fail if it has no gradient.

    Relies on: `PartialState._shared_state`, and its `distributed_type`.
    Breaks: With ZeRO-1 or 2, a run ends with an error at the first layer that a pass leaves out.
    """
    distributed_type = PartialState._shared_state.get("distributed_type")
    return bool(distributed_type == DistributedType.DEEPSPEED)


# Models of transformers.


def attention_of(config: Any) -> str | None:
    """The implementation of attention that a model computes with; None where its config names none.

    Relies on: `PreTrainedConfig._attn_implementation`.
    Breaks: The proof would compare two implementations, and report differences that are
    rounding.
    """
    name = getattr(config, "_attn_implementation", None)
    return name if isinstance(name, str) else None


def attention_to_load(config: Any) -> str | dict[str, str | None] | None:
    """The `attn_implementation` for `from_pretrained` with which a model is loaded that computes as this one does.

    Relies on: `from_pretrained` takes a name for all parts of a model, or a mapping with
    a name for each sub-config and `""` for the model itself.
    Breaks: A model whose decoder has another implementation than its encoder, as
    TrOCR's, could not be loaded for the proof.
    """
    parts = {
        name: attention_of(getattr(config, name, None))
        for name in getattr(config, "sub_configs", {})
    }
    own = attention_of(config)
    return own if {*parts.values()} <= {own} else {"": own, **parts}


def set_attention(config: Any, name: str) -> None:
    """Have a model compute with another implementation of attention; nothing is checked, parts keep theirs.

    Relies on: `_attn_implementation_internal`. The setter of `_attn_implementation`
    would change the parts' too.
    Breaks: A model with flash attention could not be measured: PyTorch has no second
    derivative for it.
    """
    config._attn_implementation_internal = name


def initialize_again(model: nn.Module) -> None:
    """Initialize a model's weights as `from_pretrained` initializes those that a file lacks.

    Relies on: `PreTrainedModel.initialize_weights`, which passes over modules with
    `_is_hf_initialized`.
    Breaks: A model whose initialization touches each weight would be saved packed, and
    `from_pretrained` would fail on it.

    Raises:
        AttributeError: The initialization reads a weight that the model does not have.
    """
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    cast(Any, model).initialize_weights()


def experts_transposed(module: nn.Module) -> bool | None:
    """True if a module of experts keeps their matrices as `[experts, columns, rows]`; None for any other module.

    Relies on: `is_transposed`, which `integrations.moe.use_experts_implementation` puts
    on instances.
    Breaks: Experts would stay in float, and every reported share would show it.
    """
    is_transposed = vars(module).get("is_transposed")
    return (
        is_transposed
        if isinstance(is_transposed, bool) and "is_concatenated" in vars(module)
        else None
    )


def original_format(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A model's tensors under the names of its files, which servers know: as `save_pretrained` writes them by default.

    Relies on: `core_model_loading.revert_weight_conversion`, which passes on a tensor
    that is only renamed, and the names of the operations in
    `PreTrainedModel._weight_conversions`.
    Breaks: Saving would fail; or vLLM and SGLang would not find the weights of models
    whose names transformers 5 changed.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # The conversions of a model that was loaded packed are those of packed tensors, and
    # would split its float ones wrongly.
    conversions = getattr(model, "_weight_conversions", None) or ()
    operations = str([getattr(each, "operations", ()) for each in conversions])
    is_own = packed_loader(model) is None and "Dequantize" not in operations
    named: Any = model if is_own else as_constructed(model)
    found: dict[str, Tensor] = revert_weight_conversion(named, dict(tensors))
    return found


def checkpoints_as_modules(trainer: transformers.Trainer, model: nn.Module) -> None:
    """Have a Trainer's checkpoints give tensors the names of the modules, not those of the model's files.

    The Trainer loads checkpoints by `load_state_dict`, which knows no other names:
    without this a run with experts, or of a ViT, would resume, or end with its best
    model, without the weights that it saved.

    Relies on: `Trainer._save_checkpoint`, and `PreTrainedModel._weight_conversions`,
    from which `revert_weight_conversion` takes the names.
    Breaks: Experts, and the layers of a ViT, would lose their training at a resume,
    with a warning of the Trainer alone.
    """
    save = functools.partial(type(trainer)._save_checkpoint, trainer)

    def _save_checkpoint(*args: Any, **kwargs: Any) -> None:
        attributes = vars(model)
        before = attributes.get("_weight_conversions")
        attributes["_weight_conversions"] = []
        try:
            save(*args, **kwargs)
        finally:
            attributes["_weight_conversions"] = before

    trainer._save_checkpoint = _save_checkpoint  # type: ignore[method-assign]


def train_no_more_than_asked(trainer: transformers.Trainer) -> None:
    """Keep a Trainer from taking another step if the resumed run already took its last one.

    Relies on: `Trainer._run_epoch`, which takes at least one step, and that the Trainer
    looks at `should_training_stop` after it.
    Breaks: A run that is killed after its last checkpoint, and resumed, would train one
    more step.
    """
    run = functools.partial(type(trainer)._run_epoch, trainer)

    def _run_epoch(*args: Any, **kwargs: Any) -> None:
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        else:
            run(*args, **kwargs)

    trainer._run_epoch = _run_epoch  # type: ignore[method-assign]


def matrices_in_files(
    model: nn.Module, parameter: str, experts: int, rows: int
) -> dict[str, Tensor]:
    """The names under which a model's files hold the matrices of an experts' parameter, and the place of each row.

    Args:
        model: Of transformers.
        parameter: The name of a parameter `[experts, rows, columns]`.
        experts: How many there are.
        rows: Of each expert's matrix.

    Returns:
        Name to int64 `[rows of the matrix, 1]`: the index of each row in the parameter,
        whose experts are stacked along rows. If transformers does not split the
        parameter, its own name alone.

    Relies on: `core_model_loading.revert_weight_conversion`.
    Breaks: Experts would be saved as rounded floats, at full size; or under names
    that nothing loads, as the proof says.
    """
    from transformers.core_model_loading import revert_weight_conversion

    numbers = torch.arange(experts * rows, device="cpu").view(experts, rows, 1)
    found: dict[str, Tensor] = revert_weight_conversion(
        as_constructed(model), {parameter: numbers}
    )
    return found


def as_constructed(model: nn.Module) -> Any:
    """A copy of a model as if it had not been loaded, from which `revert_weight_conversion` takes names.

    Relies on: `PreTrainedModel._weight_conversions`, without which
    `revert_weight_conversion` looks up those of the model's class.
    Breaks: Experts could not be saved packed, nor a packed model be compared with its
    folder.
    """
    fresh = copy.copy(model)
    vars(fresh).pop("_weight_conversions", None)
    return fresh


def is_scaled_table(cls: type[nn.Module]) -> bool:
    """True if a class is an embedding table whose rows are multiplied by a constant, as Gemma's and BART's are.

    Relies on: The name, and a forward pass that is `nn.Embedding`'s times the constant.
    Breaks: `embeddings` would refuse such a table, or leave it alone.

    Example:
        >>> is_scaled_table(nn.Embedding)
        False
    """
    return issubclass(cls, nn.Embedding) and cls.__name__.endswith(
        "ScaledWordEmbedding"
    )


def only_scales(cls: type[nn.Module]) -> bool:
    """True if the forward pass of a scaled table only looks up rows and multiplies them: T5Gemma 2's does more.

    Relies on: The names that the forward pass mentions.
    Breaks: Each pass would quantize the whole table, and not the rows that it looks up.
    """
    mentioned = {*cls.forward.__code__.co_names, *cls.forward.__code__.co_freevars}
    return mentioned <= {"super", "__class__", "forward", "embed_scale", "to", "weight", "dtype"}  # fmt: skip


def scaled_rows(table: nn.Module, rows: Tensor) -> Tensor:
    """The rows of a scaled table as its own forward pass gives them.

    Relies on: `embed_scale`, a number or a tensor.
    Breaks: Such a model computes with rows of the wrong size.
    """
    scale: Any = table.embed_scale
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """The parameters that `from_pretrained` ties to others if a file lacks them: each name to that of the other.

    Relies on: `PreTrainedModel.get_expanded_tied_weights_keys`, which raises a
    ValueError if it finds no weight with a name.
    Breaks: A table that is the output head too would be stored twice.

    Example:
        >>> tied_parameters(nn.Linear(2, 2))
        {}
    """
    get = getattr(model, "get_expanded_tied_weights_keys", None)
    if not callable(get):
        return {}
    try:
        found: dict[str, str] = get(all_submodels=True)
    except ValueError:
        # PEFT has given other names to weights that it looks for.
        with torch.device("meta"):
            found = tied_parameters(type(model)(copy.deepcopy(cast(Any, model).config)))
    return found


def ties_in_files(
    model: nn.Module, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, str], bool]:
    """The parameters that loading will tie, and whether `untie` must change the config in the folder.

    It must if the config ties two parameters that are separate by now, such as a head
    with a weight of its own: other loaders would read one of them for both. An untied
    config unties all of a model's parameters, unless its class ties them regardless, as
    T5's does.

    Args:
        model: Any module.
        parameters: Its parameters, a shared one under each of its names.

    Returns:
        As `tied_parameters`, but only those that are one in memory.

    Relies on: `tie_word_embeddings`, which decides for all ties of a model, and that
    `from_pretrained` ties no two parameters that differ in the files. Where `forward`
    reads the key itself, as in Switch Transformers, another value would compute
    something else, so the config stays.
    Breaks: Servers would take one of two tables for both; or `from_pretrained` would
    make a table at random, as the proof says.
    """
    pairs = {
        name: other
        for name, other in tied_parameters(model).items()
        if {name, other} <= parameters.keys()
    }
    shared = {n: o for n, o in pairs.items() if parameters[n] is parameters[o]}
    if len(shared) == len(pairs):
        return shared, False
    config: Any = model.config
    untied = type(config).from_dict(_without_ties(config.to_dict()))
    if getattr(untied, "tie_word_embeddings", False):
        return shared, True
    forward = inspect.unwrap(type(model).forward)
    if "tie_word_embeddings" in forward.__code__.co_names:
        return shared, False
    return {}, True


def untie(config: Path) -> None:
    """Make a `config.json`, and the configs of parts in it, say that no weights are tied.

    Relies on: `tie_word_embeddings`, `tie_codebooks_embeddings` and `tie_embedding`.
    Breaks: See `ties_in_files`.
    """
    write_json(config, _without_ties(read_json(config)))


def _without_ties(document: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        # Labels of classes are keys too, and numbers.
        is_tie = re.fullmatch(r"tie_\w*embeddings?", str(key))
        found[key] = False if is_tie else value
        if isinstance(value, dict):
            found[key] = _without_ties(value)
    return found


def never_saved(model: nn.Module) -> set[str]:
    """The names of tensors that `save_pretrained` leaves out, since the model computes them itself.

    Relies on: `PreTrainedModel._keys_to_ignore_on_save`.
    Breaks: `moq-hf pack` would miss them in a checkpoint.

    Example:
        >>> never_saved(nn.Linear(2, 2))
        set()
    """
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


@contextlib.contextmanager
def without_generation_config(model: Any) -> Iterator[None]:
    """Have `save_pretrained` leave out the generation config, which it writes before the weights and may refuse.

    Relies on: `PreTrainedModel.save_pretrained`, which asks `can_generate` first.
    Breaks: A model whose generation config loads, but is not valid, would be saved as
    floats.
    """
    vars(model)["can_generate"] = lambda: False
    try:
        yield
    finally:
        del vars(model)["can_generate"]


def has_adapter(model: nn.Module) -> bool:
    """True if the model was given an adapter by `add_adapter`, so that `save_pretrained` writes that alone.

    Relies on: `_hf_peft_config_loaded`.
    Breaks: `save_quantized` would write a folder without the packed weights.
    """
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def stays_float(model: nn.Module, name: str, module: nn.Module) -> bool:
    """True if `quant_method: "gemma"` leaves a module as it is, or would make it compute something else.

    It drops the constant by which a scaled table multiplies its rows.

    Relies on: `PreTrainedModel._keep_in_fp32_modules` and
    `quantizers_utils.should_convert_module`.
    Breaks: T5 in the layout "gemma" would be loaded with random weights, as the proof
    says.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    return is_scaled_table(type(module)) or not should_convert_module(name, kept)


# Packed models, which transformers loads by compressed-tensors.


def packed_loader(model: nn.Module) -> Any:
    """The quantizer of transformers that loaded a model from a packed checkpoint; None for any other model.

    Relies on: `PreTrainedModel.hf_quantizer`, that the one of compressed-tensors has a
    `compressor`, and the name of the class for `quant_method: "gemma"`.
    Breaks: `dequantize_model` would refuse a packed model, and training on one not be
    refused.
    """
    loader = getattr(model, "hf_quantizer", None)
    is_gemma = type(loader).__name__ == "GemmaQuantizer"
    return loader if is_gemma or hasattr(loader, "compressor") else None


def takes_apart(model: nn.Module, packed: Iterable[str]) -> bool:
    """True if `from_pretrained` fails on packed weights, because it splits a weight in the files into several.

    Args:
        model: Of transformers.
        packed: The layers whose modules hold packed weights after loading.

    Relies on: `get_model_conversion_mapping`, and the patterns of `WeightConverter`,
    which `HfQuantizer.update_weight_conversions` gives the names of packed weights too.
    Breaks: `save_quantized` without inputs, and `moq-hf pack`, would write folders of
    DINOv2 that nothing loads.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    layers = "\n".join(packed)
    for conversion in get_model_conversion_mapping(cast(Any, model)):
        sources, targets = conversion.source_patterns, conversion.target_patterns
        splits = len(targets) > 1 and sources[0].endswith(".weight")
        layer = targets[0].removesuffix(".weight")
        if splits and not re.search(f"{layer}$", layers, re.MULTILINE):
            return True
    return False


def unpack(model: nn.Module, trains: bool = True) -> None:
    """Make a plain model of one that was loaded packed: float weights that can be trained, nothing else.

    Args:
        model: Of transformers.
        trains: Whether its weights are trained; not those under PEFT's adapters.

    Relies on: `decompress_module`, `quantization_scheme`, `quantization_status`,
    `QuantizationMetadata`, `remove_quantization_config`,
    `ModelCompressor.remove_decompression_hook`, and
    `PreTrainedModel._weight_conversions`.
    Breaks: `dequantize_model` would fail on a packed model, or leave one that cannot be
    trained.

    Raises:
        MoQError: The model has the layout "gemma".
    """
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationMetadata, QuantizationStatus

    loader = packed_loader(model)
    if not hasattr(loader, "compressor"):
        raise MoQError(
            "a model in the layout gemma can only answer: to train on it, or to export it, save it in another layout"
        )
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        if module.quantization_status == QuantizationStatus.COMPRESSED:
            decompress_module(module)
        QuantizationMetadata.clear_quantization(module)
        del module.quantization_status
        # What is left of the wrapped forward would hide that of a quantized class.
        module.__dict__.pop("forward", None)
        # compressed-tensors makes parameters of buffers, such as the one of Gemma's
        # tables.
        for name in module._parameters.keys() - {"weight", "bias"}:
            buffer = cast(Tensor, module._parameters.pop(name)).detach()
            module.register_buffer(name, buffer, persistent=False)
        # If a pass in inference mode unpacked it, the tensor itself can never train.
        weight = cast(Tensor, module.weight).detach().clone()
        del module.weight
        module.weight = nn.Parameter(weight)
        module.requires_grad_(trains)
    # Nothing is left for the first forward pass to unpack.
    loader.compressor.remove_decompression_hook(model)
    loader.remove_quantization_config(model)
    # They tell how packed experts were merged; saving would split float ones that way.
    vars(model).pop("_weight_conversions", None)
    # Tied weights were unpacked one by one.
    cast(Any, model).tie_weights()


def compress(
    tensors: Mapping[str, Tensor], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Pack a weight on its grid, given as `weight`, `weight_scale` and `weight_zero_point`, into the tensors of a file.

    Relies on: `BaseCompressor.compress` of the class for the format, and the fields of
    `QuantizationScheme`.
    Breaks: Nothing could be saved packed; or files would hold other codes, which
    `verify_quantized` reports.
    """
    compressor, scheme = _compressor_of(group)
    found: dict[str, Tensor] = compressor.compress(dict(tensors), scheme)
    return found


def decompress(
    tensors: Mapping[str, Tensor], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Unpack the tensors of a file: `weight` as transformers will compute with it, its scales and its zero points.

    Relies on: `BaseCompressor.decompress` of the class for the format, and the fields
    of `QuantizationScheme`.
    Breaks: `verify_quantized` and the exports would fail, or prove something else than
    what is loaded.
    """
    compressor, scheme = _compressor_of(group)
    found: dict[str, Tensor] = compressor.decompress(dict(tensors), scheme)
    return found


def _compressor_of(group: Mapping[str, Any]) -> tuple[Any, Any]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate({**group, "targets": []})
    return BaseCompressor.get_value_from_registry(group["format"]), scheme


def write_packing_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write into the `config.json` of a folder how its layers are packed.

    Relies on: `ModelCompressor.update_config`, which writes `quantization_config` as
    transformers reads it.
    Breaks: `from_pretrained` would not know that the weights are packed.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig

    ModelCompressor(QuantizationConfig.model_validate(config)).update_config(
        str(folder)
    )


def refuse_older(config: Path, version: str) -> None:
    """Make versions of transformers before `version` refuse a model that they would load wrongly.

    The config itself goes into a file beside `config.json`, which this version and
    newer ones read instead. Everything else may go on reading `config.json`.

    Relies on: `configuration_utils.get_configuration_file`, which chooses among the
    files in `configuration_files`, and that `transformers_weights` must name a file.
    Breaks: Older versions would load experts, and the layers of a ViT, with random
    weights and only a warning; or newer ones would refuse them too.
    """
    name = f"config.{version}.json"
    document = read_json(config)
    write_json(config.parent / name, document)
    document["configuration_files"] = [name]
    document["transformers_weights"] = f"this model needs transformers >= {version}"
    write_json(config, document)


# Models that PyTorch has wrapped, compiled or traced.

COMPILED: Final = "_orig_mod"
"""The attribute in which a compiled model has the original.

Relies on: `torch._dynamo.OptimizedModule`.
Breaks: A compiled model would have other names for its layers, which no config and no file knows.
"""

CHECKPOINTED: Final = "_checkpoint_wrapped_module"
"""The attribute in which FSDP's wrapper for activation checkpointing has the block.

Relies on: `torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper`.
Breaks: Layers would have other names than in the state dict: a packed model could not be loaded.
"""


def convolve(layer: nn.Conv1d | nn.Conv2d, input: Tensor, weight: Tensor) -> Tensor:
    """Compute a convolution with another weight, and with its own stride, padding, groups and bias.

    Relies on: `_conv_forward(input, weight, bias)` of `nn.Conv1d` and `nn.Conv2d`,
    which pads by the layer's mode.
    Breaks: Convolutions could not be quantized: the first forward pass fails.
    """
    return layer._conv_forward(input, weight, layer.bias)  # type: ignore[no-any-return]


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if `module.compile()` was called.

    Relies on: `nn.Module._compiled_call_impl`.
    Breaks: Batches would not be taken from a compiled model, or taking them would break
    its graph.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def is_transformed() -> bool:
    """True inside of grad, vjp or vmap of torch.func; False while torch.compile traces, which handles them itself.

    Relies on: `torch._C._are_functorch_transforms_active`, which
    `torch.autograd.Function.apply` asks too.
    Breaks: Gradients of torch.func would fail on quantized layers, and the ranges of
    inputs would be written in them.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._are_functorch_transforms_active()
    )


def has_hooks(weight: Tensor) -> bool:
    """True if a Python hook waits for the gradient of a weight.

    Relies on: `_backward_hooks` and `_post_accumulate_grad_hooks` of a tensor, which are
    None until there is one.
    Breaks: A hook is called with None for a layer that a pass leaves out.
    """
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def pre_hooks(module: nn.Module) -> list[Any]:
    """The forward pre-hooks of a module, and those of all modules.

    Relies on: `_forward_pre_hooks` and `torch.nn.modules.module._global_forward_pre_hooks`.
    Breaks: What a hook writes to a quantized weight is lost without a word.
    """
    everywhere = torch.nn.modules.module._global_forward_pre_hooks
    return [*everywhere.values(), *module._forward_pre_hooks.values()]


def remove_forward_hooks(module: nn.Module, owner: type[Any]) -> None:
    """Remove the forward hooks and pre-hooks of a module that are methods of instances of a class.

    A handle removes a hook only from the module that it was made for, not from copies of that module.

    Relies on: `_forward_pre_hooks` and `_forward_hooks`, and that the ids of removed
    hooks do no harm in the other dictionaries.
    Breaks: After a second quantization two `PassWeights` are told of each pass.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in tuple(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), owner):
                del hooks[number]


def with_gradient_of(input: Tensor, values: Tensor) -> Tensor | None:
    """`values` as the result of an identity on `input`: the gradient passes straight through, without any Python.

    The values must have the shape, the dtype and the device of `input`, and memory of their
    own. None for another dtype, since autograd would cast each gradient before it sums
    them, where a cast of the input sums first; for a leaf, whose gradient would share its
    memory with others; and under tracing, transforms and dispatch modes, which record
    operations and would see only the identity.

    Relies on: `aten::_unsafe_view`, whose result has a gradient and is no view for
    autograd, so that it does not keep its input; and `Tensor.data`, which takes other
    memory and leaves the graph.
    Breaks: Quantized weights and inputs would have no gradient, or keep the tensors that they were made from.
    """
    if (
        type(input) not in (Tensor, nn.Parameter)
        or input.dtype != values.dtype
        or (input.is_leaf and input.requires_grad)
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or is_transformed()
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    found = torch.ops.aten._unsafe_view.default(input, input.shape)
    found.data = values
    return cast(Tensor, found)


def is_exporting() -> bool:
    """True while torch.export traces. Up to PyTorch 2.12 `torch.compiler.is_exporting` is true for torch.compile too.

    Relies on: `torch.compiler._is_exporting_flag`.
    Breaks: With older versions of PyTorch a compiled model would be recompiled at each
    change of bits, in many pieces.
    """
    return torch.compiler._is_exporting_flag


# PEFT's parts of a model.

ADAPTED: Final = "base_layer"
"""The name that an adapter's wrapper gives to the layer that it adapts.

Relies on: `peft.tuners.tuners_utils.BaseTunerLayer` and those derived from it.
Breaks: Adapters would be quantized, and saved as layers of the model.
"""

ORIGINAL: Final = "original_module"
"""The name that PEFT gives to a module of which it trains a copy.

Relies on: `peft.utils.AuxiliaryTrainingWrapper`.
Breaks: The copies would be quantized, and saved as layers of the model.
"""

TRAINED_COPIES: Final = "modules_to_save"
"""The name that PEFT gives to the copies of a module that it trains.

Relies on: `peft.utils.ModulesToSaveWrapper`.
Breaks: The copies would be quantized, and saved as layers of the model.
"""


def called_part(wrapper: Any) -> str:
    """The part that the wrapper of a fully trained module calls: a trained copy, or the original.

    Relies on: `peft.utils.ModulesToSaveWrapper`, which calls the copy of the first of
    `active_adapters`, unless `disable_adapters`.
    Breaks: `"lora": "merged"` would not deliver the copy that was trained.
    """
    for name in () if wrapper.disable_adapters else wrapper.active_adapters[:1]:
        if name in wrapper.modules_to_save:
            return f"{TRAINED_COPIES}.{name}"
    return ORIGINAL


def is_peft(module: nn.Module) -> bool:
    """True if PEFT made this wrapper of a layer, judged by an attribute, since PEFT need not be installed.

    Relies on: `active_adapters`. A whole model of transformers has it too.
    Breaks: Adapters would be quantized, and could be merged into quantized weights.
    """
    return hasattr(module, "active_adapters")


def is_its_own_reference(trainer: Any) -> bool:
    """True if TRL took the reference's log-probabilities from the model itself, when it made the trainer.

    With adapters the reference is the model without them, quantized or not. Under FSDP
    it was a separate model, which is gone by now.

    Relies on: `precompute_ref_log_probs` of TRL's arguments for DPO and KTO, and
    `ref_model` of their trainers; `is_fsdp_enabled`.
    Breaks: The reference would be the quantized model, although without precomputing it
    is the float one.
    """
    asked = getattr(trainer.args, "precompute_ref_log_probs", False)
    is_other = trainer.is_fsdp_enabled or hasattr(trainer.model, "peft_config")
    return asked and not is_other and getattr(trainer, "ref_model", trainer) is None


PROMPTS: Final = "prompt_encoder"
"""The attribute of a PEFT model that makes the virtual tokens before a prompt.

Relies on: `peft.PeftModel.prompt_encoder`.
Breaks: The layers of a prompt encoder would be quantized, and the base saved as floats because of them.
"""


def without_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an adapter without its initialization, which PEFT would apply to the base a second time.

    PEFT's defaults, which leave the base alone, take its place. MiSS stays as it is: the
    same key names the form of its adapters.

    Args:
        config: What `adapter_config.json` holds.

    Relies on: `init_lora_weights` and `init_weights`, the names of the settings for
    LoRA's initializations, and of those for a prompt's, including its tokenizer.
    Breaks: PiSSA and the like would subtract their part from the delivered base again.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    start = re.compile(r"init(_lora)?_weights|prompt_tuning_init\w*|tokenizer_\w+")
    settings = {"corda_config", "eva_config", "loftq_config", "lora_ga_config"}
    found = {key: value for key, value in config.items() if key not in settings}
    if config["peft_type"] != "MISS":
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]]
        for field in dataclasses.fields(kind):
            if start.fullmatch(field.name) and field.name in found:
                found[field.name] = field.default
    return found


def start_in_base(model: Any) -> str | None:
    """The initialization by which an adapter changed the base; None if the base is the user's own.

    Args:
        model: Of PEFT.

    Relies on: `init_lora_weights`.
    Breaks: `"lora": "merged"` would deliver an adapter that is wrong without the base.
    """
    starts = (
        str(getattr(config, "init_lora_weights", None))
        for config in model.peft_config.values()
    )
    taking = ("pissa", "olora", "corda", "loftq", "lora_ga")
    return next((start for start in starts if start.startswith(taking)), None)


def factors_base(wrapper: nn.Module) -> str | None:
    """The tuner of an adapter that uses factors of its layer's weight, which PEFT recomputes when it loads them.

    Relies on: The names of the modules in `peft.tuners`.
    Breaks: Such a run would train to its end before the proof finds that the delivered
    model answers differently.
    """
    path = type(wrapper).__module__.split(".")
    tuners = ("adamss", "frod", "osf", "psoft")
    return next((tuner for tuner in tuners if tuner in path), None)


def has_loss_of_its_own(model: nn.Module) -> bool:
    """True if PEFT adds a term to a model's loss, as AdaLoRA does, which only a model in training can compute.

    Relies on: `peft.AdaLoraModel.trainable_adapter_name`, which a loaded adapter does
    not have.
    Breaks: A run with AdaLoRA would end with floats at full size, since the loaded
    model fails on a batch with labels.
    """
    return hasattr(getattr(model, "base_model", None), "trainable_adapter_name")


def trains_tokens(module: nn.Module) -> bool:
    """True if PEFT trains some rows of this table: `trainable_token_indices`.

    Relies on: `peft.utils.TrainableTokensWrapper`, which has a `token_adapter` beside
    the original.
    Breaks: The base would be delivered without its table.
    """
    return hasattr(module, "token_adapter") and ORIGINAL in module._modules


def has_dora(module: nn.Module) -> bool:
    """True if an adapter's wrapper scales the rows of the weight to learned norms.

    Relies on: `lora_magnitude_vector`.
    Breaks: DoRA on a quantized layer would not be refused, and would compute something
    else after loading.
    """
    return bool(getattr(module, "lora_magnitude_vector", ()))


class Lora(NamedTuple):
    """An adapter of LoRA: the weight becomes W + `scaling` `b` `a`, with rows of the norms in `magnitude`, if any."""

    scaling: float
    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def active_lora(wrapper: Any) -> list[Lora]:
    """The adapters of a layer that are switched on and not merged into its weight.

    Relies on: `LoraLayer` of PEFT: `disable_adapters`, `active_adapters`,
    `merged_adapters`, `scaling`, `lora_A`, `lora_B`, those of embeddings, and
    `lora_magnitude_vector`.
    Breaks: With `"lora": "merged"` the first forward pass fails, or adapters would not
    be in the weight that is delivered.
    """
    found = []
    for name in () if wrapper.disable_adapters else wrapper.active_adapters:
        if name in wrapper.merged_adapters or name not in wrapper.scaling:
            continue
        if name in wrapper.lora_embedding_A:
            a, b = wrapper.lora_embedding_A[name], wrapper.lora_embedding_B[name]
        else:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        vector = wrapper.lora_magnitude_vector._modules.get(name)
        magnitude = getattr(vector, "weight", None)
        found.append(Lora(wrapper.scaling[name], a, b, magnitude))
    return found


def lora_fault(wrapper: Any) -> str | None:
    """Why the adapters of a layer cannot be merged into its weight as a sum of matrices; None if they can.

    Relies on: `LoraLayer` of PEFT: `lora_dropout`, `lora_bias`, and `lora_variant`,
    which has an entry for what is not plain LoRA.
    Breaks: `"lora": "merged"` would train something other than PEFT's LoRA.
    """
    # XLoRA computes in place of LoRA's wrapper.
    owner = getattr(wrapper.forward, "__self__", wrapper)
    if not isinstance(getattr(owner, "lora_A", None), nn.ModuleDict):
        return f"{type(owner).__name__} of PEFT is not LoRA"
    if hasattr(wrapper, "parameter_name"):
        return "target_parameters cannot be merged: adapt layers with target_modules"
    if getattr(wrapper._modules[ADAPTED], "groups", 1) > 1:
        return (
            "a convolution with groups cannot be merged: take it out of target_modules"
        )
    for name in wrapper.scaling:
        share = getattr(wrapper.lora_dropout[name], "p", 0.0)
        if share:
            return (
                f"lora_dropout is {share:g}, and a weight that is merged has no separate path to drop: "
                "set lora_dropout to 0"
            )
        if wrapper.lora_bias.get(name):
            return "lora_bias trains a second bias: set it to False"
        variant = wrapper.lora_variant.get(name)
        if variant and name not in wrapper.lora_magnitude_vector:
            return f"{type(variant).__name__} is neither plain LoRA nor DoRA"
    return None


def at_state_dict(
    module: nn.Module, tell: Callable[[nn.Module, str, bool], None], wanted: bool
) -> None:
    """Call a function whenever `state_dict` of a module is called, or stop calling it.

    Relies on: `_state_dict_pre_hooks`, which copies and pickles of a module have too.
    Breaks: A model with a part that was quantized separately would say twice, or not at all, that it saves floats.
    """
    hooks = module._state_dict_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is tell]:
        del hooks[number]
    if wanted:
        cast(Any, module).register_state_dict_pre_hook(tell)
