"""The study behind docs/results/recipes.md: float, quantized after training, basic QAT and MoQ on GLUE, over seeds.

    python benchmarks/glue_study.py --model_name_or_path FOLDER --data_dir glue --plan main --processes 4

Each run appends one JSON line to `--output` and is skipped where its line is there, so the command can be killed and
given again. Runs go seed by seed, so that lines written so far compare the same seeds. An entry of `PLANS` in
`glue_plans.py` is a list of `Arm`s; `benchmarks/report_study.py` reads the lines.

`--data_dir` holds TASK/train.jsonl and TASK/validation.jsonl with the column names and label ids of the Hub's GLUE.
`--model_dir` keeps the float models, which are the teachers and what is quantized after training.

All runs: AdamW, linear decay without warmup, batch 32, batches of alike lengths, at most 128 tokens, float32 (bfloat16
in some plans), gradients clipped to norm 1, the metric after each epoch.
"""

import argparse
import concurrent.futures
import copy
import gc
import itertools
import json
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elsewhere  # noqa: F401 - scripts/
from glue_data import TASKS
from glue_plans import EPOCHS, GROUPS, LATER, PLANS, RESTART, Run

LENGTH, BATCH, EVAL_BATCH = 128, 32, 32
DROPOUT = 0.1  # What BERT has.
METRICS = ("accuracy", "f1", "matthews_correlation", "pearson", "spearmanr", "loss")
CALIBRATION = 8  # Batches of the training set, from which rounding learns ranges of inputs and GPTQ its sums.


@dataclass
class Machine:
    """Where things are, and whether delivered folders are kept; made once in each process."""

    model: str
    data: Path
    models: Path
    keeps: bool = False
    threads: int = 1
    tokenizer: Any = None
    encoded: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def rows(self, run: Run, split: str) -> list[dict[str, Any]]:
        """Token ids and labels; for validation in batches of alike lengths, which wastes no time on padding."""
        rows = self._encoded(run.task, split)[: run.rows]
        return rows if split == "train" else sorted(rows, key=lambda row: len(row["input_ids"]))

    def _encoded(self, task: str, split: str) -> list[dict[str, Any]]:
        from transformers import AutoTokenizer

        if (task, split) not in self.encoded:
            self.tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(self.model)
            lines = (self.data / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            examples = [json.loads(line) for line in lines]
            texts = ([example[name] for example in examples] for name in TASKS[task].columns)
            encoded = self.tokenizer(*texts, truncation=True, max_length=LENGTH)
            self.encoded[task, split] = [
                {**{name: encoded[name][row] for name in encoded}, "labels": example["label"]}
                for row, example in enumerate(examples)
            ]
        return self.encoded[task, split]

    def float_model(self, run: Run) -> Path:
        """The folder of a float run's model."""
        return self.models / folder_of(run)

    def score(self, task: str, prediction: Any) -> dict[str, float]:
        """The metrics of a task, by `evaluate`."""
        from run_glue_moq import load_metric

        if task not in self.metrics:
            self.metrics[task] = load_metric(task)
        logits = prediction.predictions
        predicted = logits.argmax(-1) if TASKS[task].labels else logits.squeeze(-1)
        result = self.metrics[task].compute(predictions=predicted, references=prediction.label_ids)
        return {name: float(value) for name, value in result.items()}


def folder_of(run: Run) -> str:
    """The name of a float model's folder."""
    rows = "" if run.rows is None else f"-{run.rows}"
    kind = "" if run.arm.decay == "linear" else f"-{run.arm.decay}"
    kind += "-bf16" * run.bf16 + "-gpu" * run.gpu + "-no-dropout" * (not run.arm.dropout)
    kind += "-again" * bool(run.arm.warm)
    return f"{run.task}-{run.seed}-{run.arm.learning_rate:g}-{run.epochs:g}{rows}{kind}"


_machine: Machine | None = None


def _start(model: str, data: Path, models: Path, keeps: bool, threads: int) -> None:
    global _machine
    import torch
    import transformers

    torch.set_num_threads(threads)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _machine = Machine(model, data, models, keeps, threads)


def execute(run: Run, is_told: bool) -> list[dict[str, Any]]:
    """Train and evaluate; the lines to write: one, or for a float arm also those of its quantized copies.

    Args:
        run: What to do.
        is_told: Whether its own line is there, so that only those of copies are missing.
    """
    import torch
    from environment import machine, versions

    here = _machine
    assert here is not None
    # A run that was killed after it had trained has left its model.
    is_trained = run.arm.moq is None and (here.float_model(run) / "config.json").exists()
    trainer = trainer_of(run, here, is_trained)
    began, cpu = time.perf_counter(), time.process_time()
    if not is_trained:
        trainer.train()
    elif not is_told:
        trainer.evaluate()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    delivered = Path(trainer.args.output_dir, "quantized")
    if here.keeps and delivered.exists():
        name = f"{run.task}-{run.seed}-{run.arm.bits}-{run.arm.groups}".replace(" ", "-").replace(",", "")
        shutil.move(delivered, here.models / name)
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    shape = trainer.model.config
    gpu = {"gpu": torch.cuda.get_device_name()} if run.gpu else {}
    common = {
        **run.identity(),
        # A folder's name says nothing to others, and is nobody's business.
        "model": f"{shape.model_type}, {shape.num_hidden_layers} layers of {shape.hidden_size}",
        "versions": versions("torch", "transformers"),
        "machine": {**machine(), "threads": torch.get_num_threads(), **gpu},
    }
    timed = {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    lines = [] if is_told else [{**line_of(trainer, run), **timed, **common}]
    if run.arm.moq is None:
        trainer.model.save_pretrained(here.float_model(run))
        for bits, groups in run.arm.after:
            lines.append({**after_training(trainer, run, bits, groups, GROUPS[groups]), **common, "moq": None})
    return lines


def trainer_of(run: Run, here: Machine, is_trained: bool = False) -> Any:
    """The trainer of a run, which writes to a folder of its own; with the model that it ended with, if there is one."""
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, TrainingArguments, set_seed
    from transformers.trainer_callback import PrinterCallback

    from moq_hf import MoQTrainer

    train, validation = (here.rows(run, split) for split in ("train", "validation"))
    arguments = TrainingArguments(
        tempfile.mkdtemp(prefix="glue-study-"),
        seed=run.seed,
        learning_rate=run.arm.learning_rate,
        num_train_epochs=run.epochs,
        lr_scheduler_type=run.arm.decay,
        lr_scheduler_kwargs={"num_cycles": 2} if run.arm.decay == RESTART else None,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=EVAL_BATCH,
        train_sampling_strategy="group_by_length",
        dataloader_pin_memory=False,
        bf16=run.bf16,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not run.gpu,
    )
    set_seed(run.seed)
    teacher = run.teacher()
    source = here.float_model(teacher) if teacher is not None and run.arm.warm else here.model
    if is_trained:
        source = here.float_model(run)
    config = copy.deepcopy(run.arm.config())
    is_taught = config is not None and "distillation" in config
    # Beside a teacher the product's own switch turns it off, below.
    share = 0.0 if not is_taught and not run.arm.dropout else DROPOUT
    shares = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), share)
    labels = len(TASKS[run.task].labels) or 1  # Scores are a regression.
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=labels, **shares)
    if is_taught:
        config["distillation"] |= {"teacher": str(here.float_model(teacher)), "dropout": run.arm.dropout}
    trainer = MoQTrainer(
        model,
        arguments,
        DataCollatorWithPadding(here.tokenizer),
        train,
        validation,
        compute_metrics=lambda prediction: here.score(run.task, prediction),
        moq_config=config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def line_of(trainer: Any, run: Run) -> dict[str, Any]:
    """What a run that has trained writes of itself."""
    logs = trainer.state.log_history
    epochs = [
        {name: log[f"eval_{name}"] for name in METRICS if f"eval_{name}" in log} for log in logs if "eval_loss" in log
    ]
    controller = trainer.moq.controller if trainer.moq is not None else None
    return {
        "arm": run.arm.name,
        "bits": run.arm.bits,
        "groups": run.arm.groups,
        "metrics": epochs[-1],
        "metric_per_epoch": epochs,
        "train_loss": [log["loss"] for log in logs if "loss" in log],
        "steps": trainer.state.global_step,
        "last_drop": controller.history[-1].step if controller is not None and controller.history else None,
        "mean_bits": mean_bits(controller.layers.values()) if controller is not None else 32.0,
    }


def after_training(trainer: Any, run: Run, bits: int, groups: str, grouping: Mapping[str, Any]) -> dict[str, Any]:
    """The float model of `trainer`, quantized now and evaluated."""
    from moq_hf import quantize_model

    schedule = {"quantize_period": 1, "schedule_offset": 0}
    config = {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_schedule": schedule, **grouping}
    kept = trainer.model
    # The copy before this one refers to itself, so that it would stay.
    gc.collect()
    trainer.model = copy.deepcopy(kept)
    inputs = itertools.islice(trainer.get_train_dataloader(), CALIBRATION) if needs_examples(grouping) else None
    quantize_model(trainer.model, config, inputs=inputs)
    trainer.model_wrapped = trainer.model
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    trainer.model = trainer.model_wrapped = kept
    return {
        "arm": "after training",
        "bits": bits,
        "groups": groups,
        "metrics": {name: metrics[name] for name in METRICS if name in metrics},
        "mean_bits": float(bits),
    }


def needs_examples(grouping: Mapping[str, Any]) -> bool:
    """Whether rounding learns from examples: for static ranges of inputs, or by GPTQ."""
    inputs = grouping.get("activation_quantization", {"scale": "per_token"})
    return "gptq" in grouping["quantize_algo"] or inputs.get("scale", "static") == "static"


def mean_bits(layers: Collection[Any]) -> float:
    """Bits per quantized weight, whatever the rest of the model is."""
    bits = sum(layer.float_weight.numel() * layer.moq.bits for layer in layers)
    return bits / sum(layer.float_weight.numel() for layer in layers)


def identity_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """`Run.identity` of the run that wrote a line."""
    names = ("task", "seed", "learning_rate", "epochs", "moq", "warm", "decay", "rows")
    return {name: line[name] for name in (*names, *(name for name in LATER if name in line))}


def key_of(line: Mapping[str, Any]) -> str:
    """`Run.key` of the run that wrote a line."""
    return json.dumps(identity_of(line), sort_keys=True)


def waiting(args: argparse.Namespace, lines: list[dict[str, Any]]) -> Iterator[Run]:
    """The runs whose lines are not there, or whose model a run needs: seed by seed, a teacher before its pupils."""
    done = {key_of(line) for line in lines if line["arm"] != "after training"}
    quantized: dict[str, set[tuple[int, str]]] = {}
    for line in lines:
        if line["arm"] == "after training":
            quantized.setdefault(key_of(line), set()).add((line["bits"], line["groups"]))

    def is_done(run: Run) -> bool:
        return run.key() in done and quantized.get(run.key(), set()).issuperset(run.arm.after)

    asked: set[str] = set()
    seeds = args.seeds or sorted({seed for name in args.plan for seed in PLANS[name].seeds})
    for seed in seeds:
        for plan in (PLANS[name] for name in args.plan):
            for task in plan.tasks:
                for arm in plan.arms:
                    run = plan.run(arm, task, seed, args.rows)
                    if task not in args.tasks or seed not in plan.seeds or is_done(run) or run.key() in asked:
                        continue
                    teacher = run.teacher()
                    known = teacher is None or teacher.key() in asked
                    if not known and not (args.model_dir / folder_of(teacher) / "config.json").exists():
                        asked.add(teacher.key())
                        yield teacher
                    asked.add(run.key())
                    yield run


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--plan", nargs="+", choices=PLANS, help="default: all but those for a GPU")
    parser.add_argument("--tasks", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the plans")
    parser.add_argument("--rows", type=int, help="only the first ones of each set, to try it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--model_dir", type=Path, default=Path("runs/glue_study"))
    parser.add_argument("--keep", action="store_true", help="keep delivered folders in --model_dir too")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "glue_study.jsonl")
    parser.add_argument("--list", action="store_true", help="tell what is missing and stop")
    args = parser.parse_args(argv)
    args.plan = args.plan or [name for name, plan in PLANS.items() if not plan.gpu]
    text = args.output.read_text(encoding="utf-8") if args.output.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    runs = list(waiting(args, lines))
    done = {key_of(line) for line in lines if line["arm"] != "after training"}
    import torch

    if any(run.gpu for run in runs) and not args.list and not torch.cuda.is_available():
        parser.error("there is no CUDA device for a plan of a GPU; choose others with --plan")
    if args.list:
        for run in runs:
            print(run.task, run.seed, run.arm.name, run.arm.bits, run.arm.groups, f"{run.arm.learning_rate:g}")
        return
    args.model_dir.mkdir(parents=True, exist_ok=True)
    settings = (args.model_name_or_path, args.data_dir, args.model_dir, args.keep, args.threads)
    server = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(args.processes, server, _start, settings) as pool:
        pending: dict[concurrent.futures.Future[list[dict[str, Any]]], Run] = {}
        trained = {run.key() for run in runs}
        queue = list(runs)
        while queue or pending:
            ready = [run for run in queue if run.teacher() is None or run.teacher().key() not in trained]
            for run in ready[: args.processes - len(pending)]:
                queue.remove(run)
                pending[pool.submit(execute, run, run.key() in done)] = run
            finished, _ = concurrent.futures.wait(pending, return_when="FIRST_COMPLETED")
            for future in finished:
                run = pending.pop(future)
                trained.discard(run.key())
                new = future.result()
                with args.output.open("a", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(line)}\n" for line in new)
                told = (run.task, run.seed, run.arm.name, run.arm.bits, f"{run.arm.learning_rate:g}", new[0]["metrics"])
                print(*told, flush=True)


if __name__ == "__main__":
    main()
