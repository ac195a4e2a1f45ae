r"""Fine-tune a sequence classifier on GLUE, or on custom data, with Mixture-of-Quantization.

    python scripts/run_glue_moq.py --model_name_or_path bert-base-cased --task_name mrpc \
        --moq_config configs/moq.json --do_train --do_eval --output_dir out
    python scripts/run_glue_moq.py arguments.json

The arguments are those of Hugging Face's `run_glue.py` in its transformers 5 form. Wrong input ends the run with one
`error:` line and exit status 2.
"""

import copy
import dataclasses
import logging
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glue_arguments import DataTrainingArguments, ModelArguments, find_checkpoint, parse_arguments
from glue_data import TASKS, Labels, Split, Task, in_model_order, load_splits, resolve_labels
from glue_hub import UserError, one_line, set_up_hub, unreachable

# torch, transformers, datasets and evaluate take seconds to import: only after the arguments were found good.
if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, Trainer, TrainingArguments

    from moq_hf import MoQConfig, MoQTrainer

logger = logging.getLogger("run_glue_moq")

METRIC_SCRIPT = Path(__file__).resolve().parent / "glue_metric" / "glue_metric.py"


class _AboveTheBars(logging.Handler):
    """Writes to stdout without tearing progress bars apart."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)


def _set_up(args: "TrainingArguments") -> None:
    import datasets
    import transformers

    level = args.get_process_log_level()
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[_AboveTheBars()],
        force=True,
    )
    # "passive" says nothing about the level: this script and moq_hf speak, the libraries only warn.
    own = level if args.log_level != "passive" else logging.INFO if args.should_log else logging.ERROR
    for name in (logger.name, "moq_hf"):
        logging.getLogger(name).setLevel(own)
    transformers.utils.logging.set_verbosity(level)
    datasets.utils.logging.set_verbosity(level)
    if args.device.type == "cpu":
        # Pinned memory is of use to an accelerator only; without one torch warns at each pass over the data.
        args.dataloader_pin_memory = False
    if args.disable_tqdm:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def load_config(model_args: ModelArguments) -> "PreTrainedConfig":
    """Load the model's configuration.

    Raises:
        UserError: there is none, or transformers does not know its kind.
    """
    from transformers import AutoConfig

    name = model_args.config_name or model_args.model_name_or_path
    return _pretrained(AutoConfig.from_pretrained, "configuration", name, model_args)


def load_tokenizer(model_args: ModelArguments) -> "PreTrainedTokenizerBase":
    """Load the tokenizer: --tokenizer_name, else the model's own.

    Raises:
        UserError: there is none.
    """
    from transformers import AutoTokenizer

    name = model_args.tokenizer_name or model_args.model_name_or_path or model_args.config_name
    tokenizer = _pretrained(AutoTokenizer.from_pretrained, "tokenizer", name, model_args)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # What transformers makes of a folder without a vocabulary.
        raise UserError(f"the tokenizer {name} knows no words: its files are missing; --tokenizer_name names another")
    return tokenizer


def load_model(model_args: ModelArguments, config: "PreTrainedConfig") -> Any:
    """Load the model, or make one with random weights if only a configuration is given.

    A packed model is unpacked, so that it can be trained on.

    Raises:
        UserError: no weights, weights of another shape, or a kind of model that classifies no text.
    """
    from transformers import AutoModelForSequenceClassification

    from moq_hf.model.convert import dequantize_model
    from moq_hf.model.inventory import is_packed

    name = model_args.model_name_or_path
    if name is None:
        try:
            return AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=model_args.trust_remote_code
            )
        except ValueError as err:
            raise UserError(f"cannot make a classifier of {model_args.config_name}: {one_line(err)}") from None
    keywords = {"config": config, "ignore_mismatched_sizes": model_args.ignore_mismatched_sizes}
    model = _pretrained(AutoModelForSequenceClassification.from_pretrained, "model", name, model_args, **keywords)
    return dequantize_model(model) if is_packed(model) else model


def _pretrained(load: Any, what: str, name: str, model_args: ModelArguments, **keywords: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return load(
            name,
            cache_dir=model_args.cache_dir,
            revision=model_args.model_revision,
            token=model_args.token,
            trust_remote_code=model_args.trust_remote_code,
            **keywords,
        )
    # What from_pretrained raises for names and folders that it can do nothing with.
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as err:
        advice = "give a folder with config.json, the weights and the tokenizer's files"
        hint = "" if Path(name).exists() else unreachable(f"{what} {name}", advice)
        if "ignore_mismatched_sizes" in str(err):
            hint = (
                f"the weights of {name} do not fit the configuration or the number of labels; "
                "--ignore_mismatched_sizes starts with new ones where they do not"
            )
        raise UserError(hint or f"cannot load the {what} {name}: {one_line(err)}") from None


def fit_length(data_args: DataTrainingArguments, tokenizer: "PreTrainedTokenizerBase", config: Any, pair: bool) -> int:
    """Give the number of tokens to cut inputs to: --max_seq_length, or what model and tokenizer allow if that is less.

    Raises:
        UserError: that leaves no room for text, or the tokenizer has more tokens than the model.
    """
    if len(tokenizer) > getattr(config, "vocab_size", len(tokenizer)):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocab_size is {config.vocab_size}: "
            "they do not belong together"
        )
    limit = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or sys.maxsize)
    length = data_args.max_seq_length
    if length > limit:
        logger.warning("inputs are cut to %d tokens, all that the model can take, not to %d", limit, length)
        length = limit
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    if length <= special:
        raise UserError(f"--max_seq_length {length} leaves no room: {special} of the tokens are special ones")
    return length


def tokenize(
    splits: Mapping[str, Split], labels: Labels, tokenizer: Any, length: int, data_args: Any, args: Any
) -> dict[str, "Dataset"]:
    """Turn text into input ids and labels into ids (or scores), each set cut to its --max_*_samples."""

    def encode(batch: Mapping[str, list[Any]]) -> Any:
        texts = [batch[name] for name in batch if name != "label"]
        encoded = tokenizer(*texts, padding=padding, max_length=length, truncation=True)
        if "label" in batch:
            convert = float if labels.names is None else labels.ids.__getitem__
            encoded["labels"] = [convert(value) for value in batch["label"]]
        return encoded

    padding = "max_length" if data_args.pad_to_max_length else False
    limits = {
        "train": data_args.max_train_samples,
        "validation": data_args.max_eval_samples,
        "test": data_args.max_predict_samples,
    }
    encoded = {}
    with args.main_process_first(desc="tokenizing"):
        for key, split in splits.items():
            data = split.data
            limit = limits[key.removesuffix("_mm")]
            if limit is not None and limit < len(data):
                data = data.select(range(limit))
            encoded[key] = data.map(
                encode,
                batched=True,
                remove_columns=data.column_names,
                load_from_cache_file=not data_args.overwrite_cache,
                desc=f"Tokenizing {key}",
            )
    return encoded


def load_metric(name: str) -> Any:
    """Load the metric of a GLUE task, or `accuracy` or `mse`, through `evaluate` from the script that lies here."""
    import evaluate

    try:
        return evaluate.load(str(METRIC_SCRIPT), name, keep_in_memory=True)
    except OSError as err:
        # evaluate copies the script into its cache; where that cannot be written, a folder for this process does.
        folder = tempfile.mkdtemp(prefix="evaluate-")
        logger.info("the cache of evaluate cannot be written (%s); using %s", one_line(err), folder)
        evaluate.config.HF_MODULES_CACHE = Path(folder)
        return evaluate.load(str(METRIC_SCRIPT), name, keep_in_memory=True, cache_dir=folder)


def _compute_metrics(metric: Any, labels: Labels, task: Task | None) -> Any:
    import numpy as np

    # F1 is that of the task's label 1, whatever its id in the model.
    order = None if task is None or labels.names is None else np.array([task.labels.index(n) for n in labels.names])

    def compute(prediction: Any) -> dict[str, float]:
        scores = prediction.predictions
        scores = scores[0] if isinstance(scores, tuple) else scores
        predicted = np.squeeze(scores, axis=1) if labels.names is None else np.argmax(scores, axis=1)
        references = prediction.label_ids
        if order is not None:
            predicted, references = order[predicted], order[references]
        result = metric.compute(predictions=predicted, references=references)
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute


def run(model_args: ModelArguments, data_args: DataTrainingArguments, args: "TrainingArguments") -> None:
    """Train, evaluate and predict as the arguments say.

    Raises:
        UserError: something wrong with the user's data, model or output folder.
        moq_hf.MoQError: something wrong with the quantization's configuration, or with it and the model.
    """
    started = time.time()
    _set_up(args)
    moq_config = _quantization(model_args, args)
    task = TASKS.get(data_args.task_name or "")
    splits = _load_data(model_args, data_args, args, moq_config)

    from transformers import set_seed

    from moq_hf import MoQTrainer

    set_seed(args.seed)
    config = load_config(model_args)
    labels = in_model_order(resolve_labels(splits, task, config), config)
    _set_labels(model_args, config, labels)
    tokenizer = load_tokenizer(model_args)
    pair = any(len(set(split.data.column_names) - {"label"}) > 1 for split in splits.values())
    length = fit_length(data_args, tokenizer, config, pair)
    encoded = tokenize(splits, labels, tokenizer, length, data_args, args)
    metric = load_metric(data_args.task_name or ("mse" if labels.names is None else "accuracy"))
    collator = _collator(data_args, tokenizer, config, length)

    def build(arguments: Any, quantization: "MoQConfig | None", kind: Any = MoQTrainer) -> Any:
        # The same first weights and the same order of the data, whatever ran before.
        set_seed(arguments.seed)
        own = _own_arguments(model_args, quantization) if kind is MoQTrainer else {}
        try:
            return kind(
                model=load_model(model_args, config),
                args=arguments,
                train_dataset=encoded.get("train"),
                eval_dataset=encoded.get("validation"),
                compute_metrics=_compute_metrics(metric, labels, task),
                processing_class=tokenizer,
                data_collator=collator,
                **own,
            )
        except OSError as err:
            # The Trainer makes the output folder and, for an upload, the repository.
            raise UserError(f"cannot set up --output_dir {arguments.output_dir}: {one_line(err)}") from None

    trainer = build(args, moq_config)
    baseline = None
    if model_args.float_baseline:
        baseline = train_baseline(build, args, encoded)
        trainer = build(args, moq_config)

    results: dict[str, dict[str, float]] = {}
    if args.do_train:
        train(trainer, encoded["train"], find_checkpoint(args))
    if args.do_eval:
        results = evaluate_all(trainer, encoded)
        trainer.final_metrics = merged(results)
        if trainer.float_metrics is not None:
            # The float phase was evaluated on the set of the Trainer.
            baseline = {"validation": trainer.float_metrics}
        elif baseline is not None:
            trainer.float_metrics = merged(baseline)
    if args.do_predict:
        predict_all(trainer, encoded, labels, data_args.task_name)

    card = _card(data_args)
    if args.do_train or args.push_to_hub:
        trainer.create_model_card(**card)
    if trainer.is_world_process_zero():
        lines = summary(trainer, results, baseline, data_args.task_name or "data", started)
        print("\n".join(lines), flush=True)
    if args.push_to_hub:
        trainer.push_to_hub(**card)
        logger.info("uploaded to %s", trainer.hub_model_id)


def _load_data(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: "TrainingArguments",
    moq_config: "MoQConfig | None",
) -> Mapping[str, Split]:
    """The splits that the run needs; the Hub is set up for what is loaded from it."""
    data_name = data_args.dataset_name or ("nyu-mll/glue" if not data_args.files() else None)
    teacher = None if moq_config is None else moq_config.distillation.teacher
    model_names = (model_args.model_name_or_path, teacher, model_args.config_name, model_args.tokenizer_name)
    set_up_hub([data_name, *model_names], args.push_to_hub, args.hub_token)
    splits = load_splits(model_args, data_args, args)
    for split in splits.values():
        logger.info("%s: %d examples, columns %s", split.source, len(split.data), ", ".join(split.data.column_names))
    return splits


def _set_labels(model_args: ModelArguments, config: "PreTrainedConfig", labels: Labels) -> None:
    """Give the model's config as many labels as the data has, with their names."""
    count = 1 if labels.names is None else len(labels.names)
    _check_head(model_args, config, count)
    config.num_labels = count
    if labels.names is not None:
        config.id2label = dict(enumerate(labels.names))
        config.label2id = {name: index for index, name in enumerate(labels.names)}
        logger.info("%d labels: %s", count, ", ".join(labels.names))


def _collator(
    data_args: DataTrainingArguments, tokenizer: "PreTrainedTokenizerBase", config: "PreTrainedConfig", length: int
) -> Callable[[Any], dict[str, Any]]:
    """What makes a batch of rows that were cut to `length` tokens."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if data_args.pad_to_max_length:
        return default_data_collator
    # Padding up to a multiple of 8 must not go beyond the positions that the model has.
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    multiple = 8 if -(-length // 8) * 8 <= positions else None
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)


def _quantization(model_args: ModelArguments, args: "TrainingArguments") -> "MoQConfig | None":
    """The configuration to train with; None for plain float training.

    Raises:
        UserError: --float_first without quantization.
        moq_hf.MoQError: something wrong in the file.
    """
    moq_config = model_args.config()
    if model_args.model_name_or_path is None:
        logger.info("no --model_name_or_path: training from scratch, with random weights of %s", model_args.config_name)
    if moq_config is None:
        logger.info("no --moq_config: plain float training")
    elif not args.do_train:
        logger.warning("--moq_config is for --do_train: without it the model is evaluated as it is")
        moq_config = None
    elif not moq_config.enabled:
        logger.warning("%s says enabled: false: plain float training", model_args.moq_config)
    if moq_config is not None and not moq_config.enabled and model_args.float_first:
        raise UserError(
            "--float_first is the first part of a quantized training, but the --moq_config says enabled: false"
        )
    if moq_config is not None and model_args.teacher_name_or_path:
        return with_teacher(moq_config, model_args.teacher_name_or_path)
    return moq_config


def _card(data_args: DataTrainingArguments) -> dict[str, str]:
    """What the model card says of the task and its data."""
    card = {"tasks": "text-classification"}
    task = TASKS.get(data_args.task_name or "")
    # Files may hold anything: only data that came from the Hub is named.
    if task is not None and not data_args.files():
        card |= {"language": "en", "dataset_tags": "nyu-mll/glue", "dataset_args": data_args.task_name}
        card |= {"dataset": f"GLUE {data_args.task_name.upper()}"}
    elif data_args.dataset_name and not Path(data_args.dataset_name).exists():
        card |= {"dataset_tags": data_args.dataset_name, "dataset": data_args.dataset_name}
        card |= {"dataset_args": data_args.dataset_config_name} if data_args.dataset_config_name else {}
    return card


def with_teacher(config: "MoQConfig", teacher: str) -> "MoQConfig":
    """Give the configuration with `distillation.teacher` set.

    Raises:
        UserError: the configuration is switched off.
    """
    if not config.enabled:
        raise UserError(
            "--teacher_name_or_path teaches a model in quantization, but the --moq_config says enabled: false"
        )
    before = config.distillation.teacher
    if before is not None and before != teacher:
        logger.info("the teacher is %s, not %s as the --moq_config says", teacher, before)
    return dataclasses.replace(config, distillation=dataclasses.replace(config.distillation, teacher=teacher))


def _check_head(model_args: ModelArguments, config: "PreTrainedConfig", count: int) -> None:
    # transformers only finds this out once the weights are loaded.
    trained = any("ForSequenceClassification" in name for name in config.architectures or ())
    loads_head = trained and model_args.model_name_or_path and not model_args.ignore_mismatched_sizes
    if loads_head and config.num_labels != count:
        is_teacher = model_args.model_name_or_path == model_args.teacher_name_or_path
        advice = (
            "fine-tune a teacher on this task" if is_teacher else "--ignore_mismatched_sizes starts with a new head"
        )
        raise UserError(
            f"{model_args.model_name_or_path} has a head of {config.num_labels} labels, but the data has {count}; "
            f"{advice}"
        )


def _own_arguments(model_args: ModelArguments, quantization: "MoQConfig | None") -> dict[str, Any]:
    """What a MoQTrainer takes beyond a Trainer."""
    if quantization is None:
        return {}
    own: dict[str, Any] = {"moq_config": quantization, "float_first": model_args.float_first}
    if quantization.distillation.teacher is not None:
        own["teacher_init_kwargs"] = {"cache_dir": model_args.cache_dir, "token": model_args.token}
    return own


def train_baseline(build: Any, args: "TrainingArguments", encoded: Mapping[str, "Dataset"]) -> dict[str, Any]:
    """Train and evaluate in float with the same seed, in the folder `float` of the output folder; give the figures."""
    from transformers import Trainer

    arguments = copy.copy(args)
    arguments.output_dir = str(Path(args.output_dir, "float"))
    arguments.save_strategy, arguments.load_best_model_at_end, arguments.push_to_hub = "no", False, False
    logger.info("--float_baseline: first the same training without quantization")
    trainer = build(arguments, None, Trainer)
    train(trainer, encoded["train"], None)
    results = evaluate_all(trainer, encoded)
    logger.info("now with quantization")
    return results


def train(trainer: "Trainer", data: "Dataset", checkpoint: str | None) -> None:
    """Train and write the model, its tokenizer, the figures and the Trainer's state to the output folder."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_samples"] = len(data)
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def evaluate_all(trainer: "Trainer", encoded: Mapping[str, "Dataset"]) -> dict[str, dict[str, float]]:
    """Evaluate on each validation set and write eval_results.json; give the figures by set.

    The names of those of mnli's mismatched set end in `_mm`.
    """
    results, combined = {}, {}
    for key, suffix in (("validation", ""), ("validation_mm", "_mm")):
        if key not in encoded:
            continue
        metrics = trainer.evaluate(eval_dataset=encoded[key])
        metrics["eval_samples"] = len(encoded[key])
        results[key] = {f"{name}{suffix}": value for name, value in metrics.items()}
        trainer.log_metrics("eval", results[key])
        combined |= results[key]
    trainer.save_metrics("eval", combined)
    return results


def merged(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Put the figures of all sets into one mapping."""
    return {name: value for metrics in results.values() for name, value in metrics.items()}


def predict_all(trainer: "Trainer", encoded: Mapping[str, "Dataset"], labels: Labels, task_name: str | None) -> None:
    """Write `predict_results_TASK.txt` (for mnli also `..._mnli-mm.txt`): index, tab, label name or score."""
    import numpy as np

    combined = {}
    for key, suffix in (("test", ""), ("test_mm", "-mm")):
        if key not in encoded:
            continue
        output = trainer.predict(encoded[key], metric_key_prefix="predict")
        scores = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        metrics = output.metrics | {"predict_samples": len(encoded[key])}
        combined |= {f"{name}{suffix.replace('-', '_')}": value for name, value in metrics.items()}
        if labels.names is None:
            predicted = [f"{score:.3f}" for score in np.squeeze(scores, axis=1)]
        else:
            predicted = [labels.names[index] for index in np.argmax(scores, axis=1)]
        if trainer.is_world_process_zero():
            name = f"predict_results_{task_name}{suffix}.txt" if task_name else "predict_results.txt"
            rows = [f"{index}\t{value}\n" for index, value in enumerate(predicted)]
            Path(trainer.args.output_dir, name).write_text("".join(["index\tprediction\n", *rows]), encoding="utf-8")
    trainer.log_metrics("predict", combined)
    trainer.save_metrics("predict", combined)


def summary(
    trainer: "MoQTrainer",
    results: Mapping[str, Mapping[str, float]],
    baseline: Mapping[str, Mapping[str, float]] | None,
    name: str,
    since: float,
) -> list[str]:
    """Give the lines that end a run: the files written after the time `since`, the scores, and the use of the model."""
    folder = Path(trainer.args.output_dir)
    lines = ["", f"written to {folder}:"]
    for path in sorted(folder.iterdir()):
        inside = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
        # A file system may keep times to the second only.
        if any(inner.stat().st_mtime >= since - 1 for inner in inside):
            size = sum(inner.stat().st_size for inner in inside)
            lines.append(f"  {path.name + '/' * path.is_dir():32} {_size(size):>9}")
    delivered = None if trainer.moq is None else trainer.moq.delivered
    if delivered is not None:
        lines.append("quantized/ holds the same model as the folder itself, without the files of the run")
    for key, metrics in results.items():
        samples = next(value for metric, value in metrics.items() if re.match("eval_samples(_mm)?$", metric))
        lines += ["", f"{name}, {key} ({samples} examples)", _scores(metrics, (baseline or {}).get(key), trainer)]
    if delivered is not None:
        lines += ["", delivered.closing(), f"Report: moq-hf report {folder}"]
    return lines


def _scores(metrics: Mapping[str, float], in_float: Mapping[str, float] | None, trainer: "MoQTrainer") -> str:
    """Give a table of the metrics, with the size of the weights where a quantized model was delivered."""
    from moq_hf.text import megabytes, metrics_in, table

    moq = trainer.moq
    rows = {"this model": [metrics, ""]}
    if moq is not None and moq.controller is not None:
        size = "" if moq.delivered is None else megabytes(moq.delivered.bytes)
        rows = {f"moq_hf, {moq.config.target_in_words}": [metrics, size]}
        if in_float is not None:
            rows = {"float": [in_float, megabytes(round(moq.controller.sizes.float_mb * 1e6))], **rows}
    names = sorted(metrics_in(metrics), key=lambda name: name.startswith("loss"))
    lines = [["", *names, "size" if any(size for _, size in rows.values()) else ""]]
    for what, (figures, size) in rows.items():
        found = metrics_in(figures)
        lines.append([what, *(f"{found[name]:.4f}" if name in found else "" for name in names), size])
    return table(lines)


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    power = min(int(math.log10(count) / 3), 3)
    return f"{count / 1000**power:.1f} {'kMG'[power - 1]}B"


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: those of the process); give the exit status: 0, or 2 for wrong input."""
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    except UserError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2

    from moq_hf.errors import MoQError

    try:
        run(*arguments)
    except (UserError, MoQError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
