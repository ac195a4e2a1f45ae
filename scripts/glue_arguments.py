"""The arguments of run_glue_moq.py, and what can be found wrong with them before anything is loaded."""

import dataclasses
import difflib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints

from glue_data import TASKS, no_json, read_text
from glue_hub import UserError, one_line

from moq_hf import MoQArguments

# transformers takes seconds to import: only after a JSON file of arguments could be read.
if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger("run_glue_moq")

FILE_TYPES = (".csv", ".json", ".jsonl")

# What transformers 5 took away from the arguments that a command line of run_glue.py may hold, and what it has instead.
REMOVED = {
    "overwrite_output_dir": "give another --output_dir, or --resume_from_checkpoint false, to start afresh",
    "evaluation_strategy": "use --eval_strategy",
    "warmup_ratio": "use --warmup_steps with a value below 1",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use --use_cpu",
    "use_fast_tokenizer": "every tokenizer is a fast one now",
    "use_auth_token": "use --token",
    "push_to_hub_token": "use --hub_token",
    "push_to_hub_model_id": "use --hub_model_id",
    "group_by_length": "use --train_sampling_strategy group_by_length",
    "include_inputs_for_metrics": "use --include_for_metrics inputs",
    "per_gpu_train_batch_size": "use --per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "save_safetensors": "weights are always saved as safetensors",
}


def _option(text: str, default: Any = None, **more: Any) -> Any:
    # argparse formats help texts with %.
    return dataclasses.field(default=default, metadata={"help": text.replace("%", "%%"), **more})


@dataclasses.dataclass
class ModelArguments(MoQArguments):
    """Which model to train, and how to quantize it; without `moq_config` and keywords: plain float training."""

    # Here it may be the start, too: --teacher_name_or_path.
    teacher: None = dataclasses.field(default=None, init=False)
    model_name_or_path: str | None = _option("Model folder, or name of a model on the Hub.")
    float_baseline: bool = _option("Before that, train the same in float, and report both.", False)
    teacher_name_or_path: str | None = _option(
        "Model fine-tuned on the task (folder or Hub name) whose outputs are learned too. "
        "Without --model_name_or_path: training starts from it."
    )
    config_name: str | None = _option(
        "Model configuration (folder, JSON file or Hub name), if not the model's own. "
        "Without --model_name_or_path: train it from scratch."
    )
    tokenizer_name: str | None = _option("Tokenizer (folder or Hub name), if not the model's own.")
    cache_dir: str | None = _option("Where to keep what is downloaded from the Hub.")
    model_revision: str = _option("Branch, tag or commit of the model on the Hub.", "main")
    token: str | None = _option("Access token of the Hub; default: the one of `hf auth login`.")
    trust_remote_code: bool = _option("Run model code from the Hub on this machine.", False)
    ignore_mismatched_sizes: bool = _option("Start with a new head if the model's has another number of labels.", False)


@dataclasses.dataclass
class DataTrainingArguments:
    """What to train and evaluate on."""

    task_name: str | None = _option(f"GLUE task: {', '.join(TASKS)}.")
    dataset_name: str | None = _option("Instead of a task: a data set on the Hub, or a folder of one.")
    dataset_config_name: str | None = _option("Configuration of that data set.")
    train_file: str | None = _option(
        "Training data: csv, json or jsonl with a column `label` and the task's columns; without a task sentence1 and "
        "sentence2, else the first two columns that hold text."
    )
    validation_file: str | None = _option("Validation data; for mnli the matched set.")
    validation_mismatched_file: str | None = _option("mnli only: the mismatched validation set.")
    test_file: str | None = _option("Data to predict; a label column is not read.")
    max_seq_length: int = _option("Longer inputs are cut to this many tokens.", 128)
    pad_to_max_length: bool = _option(
        "Pad every input to --max_seq_length. The default, padding each batch to the next multiple of 8 above its "
        "longest input, is faster.",
        False,
    )
    overwrite_cache: bool = _option("Tokenize again data sets of the Hub whose tokens are cached.", False)
    max_train_samples: int | None = _option("Use only the first so many training examples.")
    max_eval_samples: int | None = _option("Use only the first so many examples of each validation set.")
    max_predict_samples: int | None = _option("Use only the first so many examples of each test set.")

    def files(self) -> dict[str, str]:
        """Give the data files there are, by the name of their argument."""
        names = ("train_file", "validation_file", "validation_mismatched_file", "test_file")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def _raise_problems(problems: list[str]) -> None:
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError(f"{len(problems)} things are wrong:" + "".join(f"\n  - {problem}" for problem in problems))


def _did_you_mean(word: str, words: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def read_arguments_file(path: str) -> dict[str, Any]:
    """Read a JSON file of arguments: one object, its keys without the dashes, null for the default.

    Raises:
        UserError: there is no such file, it is no JSON, no object, or gives a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"{path} gives a key more than once: {', '.join(twice)}")
        return dict(pairs)

    if not Path(path).is_file():
        raise UserError(f"there is no arguments file {path}")
    try:
        values = json.loads(read_text(path), object_pairs_hook=unique)
    except json.JSONDecodeError as err:
        raise no_json(path, err, err.lineno) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a JSON {type(values).__name__}, not an object of arguments")
    return values


def parse_arguments(argv: Sequence[str]) -> tuple[ModelArguments, DataTrainingArguments, "TrainingArguments"]:
    """Parse and check a command line, or the JSON file that is its only word, before anything is loaded.

    Raises:
        UserError: lists what is wrong: arguments that there are not, values that they cannot have, files that are
            missing, arguments that do not go together.
    """
    if len(argv) > 1 and argv[0].endswith(".json"):
        raise UserError(_unknown_argument(argv[0], (), "--"))
    values = read_arguments_file(argv[0]) if len(argv) == 1 and argv[0].endswith(".json") else None

    import torch
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.utils import is_torch_xla_available

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(message)

    kinds = (ModelArguments, DataTrainingArguments, TrainingArguments)
    parser = Parser(
        kinds,
        prog="run_glue_moq.py",
        description="Fine-tune a sequence classifier on GLUE, or on custom data, with Mixture-of-Quantization.",
        allow_abbrev=False,
    )
    known = {action.dest for action in parser._actions}
    if values is None:
        namespace, unknown = parser.parse_known_args(list(argv))
        _raise_problems([_unknown_argument(word, known, "--") for word in unknown if not _is_value(word, unknown)])
    else:
        _raise_problems([f"{argv[0]}: {_unknown_argument(name, known)}" for name in values if name not in known])
        hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        namespace = _from_json(parser, values, hints, argv[0])
    namespace.output_dir = namespace.output_dir or "trainer_output"
    # Without an accelerator transformers takes --bf16 only beside --use_cpu.
    namespace.use_cpu |= not (torch.accelerator.is_available() or is_torch_xla_available())
    # As TrainingArguments does.
    namespace.do_eval = namespace.do_eval or namespace.eval_strategy != "no"

    def build(kind: Any) -> Any:
        return kind(**{field.name: getattr(namespace, field.name) for field in dataclasses.fields(kind) if field.init})

    if namespace.model_name_or_path is None and namespace.config_name is None:
        namespace.model_name_or_path = namespace.teacher_name_or_path
    model_args, data_args = build(ModelArguments), build(DataTrainingArguments)
    problems = _check_packages() + _check_data(data_args, namespace) + _check_model(model_args, namespace)
    _raise_problems(problems + _check_training(data_args, namespace))
    try:
        # Takes seconds: it imports most of transformers.
        args = build(TrainingArguments)
    except ValueError as err:
        raise UserError(one_line(err)) from None
    _check_reporters(args.report_to)
    return model_args, data_args, args


def _is_value(word: str, unknown: list[str]) -> bool:
    # The words after an unknown argument are its values, not a mistake of their own.
    return not word.startswith("--") and any(other.startswith("--") for other in unknown[: unknown.index(word)])


def _unknown_argument(word: str, known: Iterable[str], prefix: str = "") -> str:
    name = word.removeprefix(prefix).partition("=")[0].replace("-", "_")
    if prefix and not word.startswith(prefix):
        if word.endswith(".json"):
            return f"{word}: a JSON file of arguments must be the only argument"
        return f"{word!r} belongs to no argument"
    if name in REMOVED:
        return f"transformers 5 has no argument {prefix}{name}: {REMOVED[name]}"
    return f"there is no argument {prefix}{name}" + _did_you_mean(name, known, prefix)


def _from_json(parser: Any, values: Mapping[str, Any], hints: Mapping[str, Any], path: str) -> Any:
    """Check JSON values against the types of the arguments, as words of a command line are; null is the default."""

    def accepts(hint: Any, kind: type) -> bool:
        return kind in {get_origin(part) or part for part in (hint, *get_args(hint))}

    words, typed = [], {}
    # What is a number where it is not given alone.
    flags = {action.dest for action in parser._actions if action.const is not None}
    for name, value in values.items():
        if isinstance(value, (list, dict, bool)):
            if not accepts(hints[name], type(value)):
                if isinstance(value, bool) and name in flags:
                    words += [f"--{name}"] * value
                    continue
                shown = str(value).lower() if isinstance(value, bool) else f"a JSON {type(value).__name__}"
                raise UserError(f"{path}: {name} cannot be {shown}")
            typed[name] = value
        elif value is not None:
            words.append(f"--{name}={value}")
    try:
        namespace, _ = parser.parse_known_args(words)
    except UserError as err:
        raise UserError(f"{path}: {err}") from None
    vars(namespace).update(typed)
    return namespace


def _check_packages() -> list[str]:
    needed = ("moq_hf", "datasets", "evaluate", "sklearn", "scipy")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [f"this script needs {', '.join(missing)}: pip install -e '.[glue]' in the root of its repository"]


def _check_reporters(reporters: list[str]) -> None:
    from transformers.integrations import get_available_reporting_integrations

    there = get_available_reporting_integrations()
    missing = [name for name in reporters if name not in there]
    _raise_problems(
        [f"--report_to {name}: not installed here; there are: {', '.join(there) or 'none'}" for name in missing]
    )


def _check_data(data_args: DataTrainingArguments, args: Any) -> list[str]:
    problems = []
    task, files = data_args.task_name, data_args.files()
    if not (args.do_train or args.do_eval or args.do_predict):
        problems.append("nothing to do: give at least one of --do_train, --do_eval, --do_predict")
    if task is not None and task not in TASKS:
        problems.append(f"there is no GLUE task {task!r}; there are: {', '.join(TASKS)}" + _did_you_mean(task, TASKS))
    if task is None and data_args.dataset_name is None and not files:
        problems.append("no data: give --task_name, --dataset_name, or --train_file, --validation_file, --test_file")
    if data_args.dataset_name and (task or files):
        problems.append(f"--dataset_name excludes --{'task_name' if task else next(iter(files))}: give one of them")
    if data_args.dataset_config_name and not data_args.dataset_name:
        problems.append("--dataset_config_name needs --dataset_name")
    if data_args.validation_mismatched_file and task != "mnli":
        problems.append("--validation_mismatched_file is for --task_name mnli only")
    problems += _check_files(files, args)
    for name in ("max_seq_length", "max_train_samples", "max_eval_samples", "max_predict_samples"):
        value = getattr(data_args, name)
        if value is not None and value < 1:
            problems.append(f"--{name} is {value}; it must be at least 1")
    return problems


def _check_files(files: dict[str, str], args: Any) -> list[str]:
    problems = []
    for wanted, name in (("do_train", "train_file"), ("do_eval", "validation_file"), ("do_predict", "test_file")):
        if files and getattr(args, wanted) and name not in files:
            problems.append(f"--{wanted} needs --{name}, since --{next(iter(files))} is given")
    for name, path in files.items():
        if Path(path).suffix.lower() not in FILE_TYPES:
            problems.append(f"--{name} {path}: must end in {', '.join(FILE_TYPES[:-1])} or {FILE_TYPES[-1]}")
        elif not Path(path).is_file():
            problems.append(f"--{name} {path}: there is no such file")
    return problems


def _check_model(model_args: ModelArguments, args: Any) -> list[str]:
    problems = []
    is_quantized = bool(model_args.moq_config or model_args.keywords())
    if model_args.float_baseline and not (is_quantized and args.do_train and args.do_eval):
        problems.append("--float_baseline needs --moq_config, --do_train and --do_eval: it compares two trainings")
    if model_args.float_first is not None:
        problems += _check_float_first(model_args, args, is_quantized)
    if model_args.teacher_name_or_path and not (is_quantized and args.do_train):
        problems.append("--teacher_name_or_path needs --moq_config and --do_train: it teaches a model in quantization")
    if model_args.model_name_or_path is None and model_args.config_name is None:
        problems.append("no model: give --model_name_or_path, or --config_name to train from scratch")
    for name in ("model_name_or_path", "teacher_name_or_path", "config_name", "tokenizer_name"):
        value = getattr(model_args, name)
        # Training that starts from its teacher was given one name.
        if value is None or (name == "model_name_or_path" and value == model_args.teacher_name_or_path):
            continue
        path = Path(value)
        if path.is_dir():
            if name != "tokenizer_name" and not (path / "config.json").is_file():
                problems.append(f"--{name} {value}: the folder holds no config.json")
        elif path.exists() and name != "config_name":
            problems.append(f"--{name} {value}: is a file, not a folder")
        elif not path.exists() and (value.count("/") > 1 or value.startswith((".", "~")) or os.sep * 2 in value):
            problems.append(f"--{name} {value}: there is no such folder")
        elif not path.exists() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value):
            problems.append(f"--{name} {value}: neither a folder nor a name that the Hub could have")
    return problems


def _check_float_first(model_args: ModelArguments, args: Any, is_quantized: bool) -> list[str]:
    problems = []
    if not 0 < model_args.float_first < 1:
        problems.append(f"--float_first is {model_args.float_first:g}; it is a share of the run, above 0 and below 1")
    if not (is_quantized and args.do_train):
        problems.append("--float_first needs --moq_config and --do_train: it is the first part of a quantized training")
    for name in ("float_baseline", "teacher_name_or_path"):
        if getattr(model_args, name):
            problems.append(
                f"--float_first excludes --{name}: the model of its float phase is "
                + ("the baseline" if name == "float_baseline" else "the teacher")
            )
    return problems


def _check_training(data_args: DataTrainingArguments, args: Any) -> list[str]:
    problems = []
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            problems.append(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.learning_rate < 0:
        problems.append(f"--learning_rate is {args.learning_rate}; it must not be negative")
    if args.do_train and args.max_steps <= 0 and args.num_train_epochs <= 0:
        problems.append(f"--num_train_epochs is {args.num_train_epochs}; it must be above 0")

    folder = Path(args.output_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        problems.append(f"--output_dir {args.output_dir}: {existing} is a file, not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"--output_dir {args.output_dir}: no permission to write in {existing}")

    resume = args.resume_from_checkpoint
    if resume and resume.lower() not in ("true", "false") and _last_step(Path(resume)) is None:
        problems.append(
            f"--resume_from_checkpoint {resume}: not a folder with a whole checkpoint" + _checkpoints(folder)
        )
    if resume and resume.lower() == "true" and not _found_checkpoints(folder):
        problems.append(f"--resume_from_checkpoint true: --output_dir {args.output_dir} holds no checkpoint")

    if args.load_best_model_at_end and args.eval_strategy == "no":
        problems.append("--load_best_model_at_end needs --eval_strategy steps or epoch")
    if args.metric_for_best_model:
        task = TASKS.get(data_args.task_name or "")
        names = ("accuracy", "mse") if task is None else task.metrics
        names = ("loss", *names, *(("combined_score",) if len(names) > 1 and task else ()))
        if args.metric_for_best_model.removeprefix("eval_") not in names:
            problems.append(
                f"--metric_for_best_model {args.metric_for_best_model}: the evaluation gives {', '.join(names)}"
            )
    return problems


def _last_step(checkpoint: Path) -> int | None:
    # The Trainer writes trainer_state.json last: a checkpoint without it was cut off.
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def _found_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def _checkpoints(folder: Path) -> str:
    names = [path.name for path in _found_checkpoints(folder)]
    return f"; --output_dir holds {', '.join(names)}" if names else "; --output_dir holds none"


def find_checkpoint(args: "TrainingArguments") -> str | None:
    """Give the checkpoint to go on from: the one asked for, or the last whole one in the output folder."""
    wanted = args.resume_from_checkpoint or "true"
    if wanted.lower() == "false":
        logger.info("starting afresh, as --resume_from_checkpoint is false")
        return None
    if wanted.lower() != "true":
        logger.info("resuming from %s (step %d)", wanted, _last_step(Path(wanted)))
        return wanted
    # torch comes with it: not before the arguments were found good.
    from moq_hf.training.checkpoints import last_checkpoint

    path = last_checkpoint(args.output_dir)
    if path is not None:
        logger.info(
            "resuming from %s (step %d), found in --output_dir; for a fresh start give another --output_dir or "
            "--resume_from_checkpoint false",
            path,
            _last_step(Path(path)),
        )
    return path
