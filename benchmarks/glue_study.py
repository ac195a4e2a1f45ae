"""The study behind docs/evidence/results.md: float, quantized after training, basic QAT and MoQ on GLUE, over seeds.

    python benchmarks/glue_study.py --model_name_or_path FOLDER --data_dir glue --plan main --processes 4

Each run appends one JSON line to `--output` and is skipped where its line is there, so the command can be killed and
given again. Runs go seed by seed, so that lines written so far compare the same seeds. An entry of `PLANS` is a list of
`Arm`s; `benchmarks/report_study.py` makes the tables.

`--data_dir` holds TASK/train.jsonl and TASK/validation.jsonl with the column names and label ids of the Hub's GLUE.
`--model_dir` keeps the float models, which are the teachers and what is quantized after training.

All runs: AdamW, linear decay without warmup, batch 32, batches of alike lengths, at most 128 tokens, float32,
gradients clipped to norm 1, one thread, the metric after each epoch.
"""

import argparse
import concurrent.futures
import copy
import json
import logging
import multiprocessing
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from glue_data import TASKS

LENGTH, BATCH, EVAL_BATCH = 128, 32, 128
EPOCHS = {"sst2": 1, "cola": 2, "mrpc": 2}
STEPS = {"sst2": 250, "cola": 268, "mrpc": 115}  # Of an epoch of all rows.
# On SST-2 and CoLA the best of 5e-5, 1e-4 and 2e-4 for the float model, with seed 1 (docs/evidence/study.md); MRPC had
# no other.
RATES = {"sst2": 2e-4, "cola": 1e-4, "mrpc": 2e-4}
RESTART = "cosine_with_restarts"
OWN = -1.0  # Stands for the task's of `RATES`.
GROUPS: dict[str, dict[str, Any]] = {
    "8 blocks": {"quantize_groups": 8},
    "per channel": {"quantize_groups": "per_channel"},
    "groups of 64": {"quantize_group_size": 64},
}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: What the tables call it.
        moq: Its configuration, or None for float.
        bits: Of its target; the float arm has 32 and also writes a line for each of `after`.
        learning_rate: The largest one.
        times: How many times the task's epochs.
        groups: A key of `GROUPS`.
        after: Bits to which the float model is quantized after training.
        warm: Learning rate of the float run whose model it starts from; 0: from the pretrained one.
        decay: Of the learning rate, as Trainer's `lr_scheduler_type`; the restart of `RESTART` is in the middle.
    """

    name: str
    moq: dict[str, Any] | None = None
    bits: int = 32
    learning_rate: float = OWN
    times: float = 1
    groups: str = "8 blocks"
    after: tuple[int, ...] = ()
    warm: float = 0.0
    decay: str = "linear"

    def on(self, task: str) -> "Arm":
        """Itself with the task's learning rate wherever it has `OWN`, and the task's step for a share of the run."""

        def settled(rate: float) -> float:
            return RATES[task] if rate == OWN else rate

        moq = copy.deepcopy(self.moq)
        if moq is not None and "distillation" in moq:
            moq["distillation"]["teacher"] = settled(moq["distillation"]["teacher"])
        if moq is not None and 0 < moq["quantize_schedule"]["schedule_offset"] < 1:
            moq["quantize_schedule"]["schedule_offset"] = round(
                moq["quantize_schedule"]["schedule_offset"] * STEPS[task] * EPOCHS[task] * self.times
            )
        return replace(self, moq=moq, learning_rate=settled(self.learning_rate), warm=settled(self.warm))

    def plain(self) -> "Arm | None":
        """Basic QAT from the pretrained model and without a teacher."""
        if self.moq is None:
            return None
        return qat(self.bits, learning_rate=self.learning_rate, times=self.times, groups=self.groups, decay=self.decay)

    def basic(self) -> "Arm | None":
        """Basic QAT with everything else the same: what the schedule is measured against."""
        if self.moq is None:
            return None
        scheduling = {"quantize_bits", "quantize_schedule", "eigenvalue", "fp16_mixed_quantize"}
        kept = {name: value for name, value in self.moq.items() if name not in scheduling}
        return qat(
            self.bits,
            moq=kept,
            learning_rate=self.learning_rate,
            times=self.times,
            groups=self.groups,
            warm=self.warm,
            decay=self.decay,
        )

    def label(self, rate: float | None) -> str:
        """Its name, with the learning rate where that is not `rate`."""
        return self.name + (f", learning rate {self.learning_rate:g}" if self.learning_rate not in (OWN, rate) else "")

    def config(self) -> dict[str, Any] | None:
        """The whole configuration."""
        return None if self.moq is None else {**self.moq, **GROUPS[self.groups]}


def qat(
    bits: int, name: str = "basic QAT", moq: Mapping[str, Any] | None = None, offset: float = 0, **more: Any
) -> Arm:
    """Target bits from step `offset` on, or from that share of the run if it is below 1; float until then."""
    config = {
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": offset},
    }
    return Arm(name, {**config, **(moq or {})}, bits, **more)


def ramp(
    start: int, bits: int, deadline: float, name: str = "", moq: Mapping[str, Any] | None = None, **more: Any
) -> Arm:
    """From `start` bits to `bits` within the share `deadline` of the run; basic QAT if these are the same."""
    if start == bits:
        return qat(bits, name or "basic QAT", moq, **more)
    config = {
        "quantize_bits": {"start_bits": start, "target_bits": bits},
        "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 0, "deadline": deadline},
    }
    return Arm(name or f"MoQ {start} by {deadline:g}", {**config, **(moq or {})}, bits, **more)


FLOAT = Arm("float", after=(8, 4, 3, 2))


@dataclass(frozen=True)
class Plan:
    """Arms, the tasks and the seeds to run them on."""

    arms: tuple[Arm, ...]
    tasks: tuple[str, ...] = ("sst2", "cola", "mrpc")
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


CHANNELS: dict[str, Any] = {"groups": "per channel"}
# Taught: from the float model of the same seed, with it as the teacher; its learning rate stands in for its folder.
TAUGHT: dict[str, Any] = {"moq": {"distillation": {"teacher": OWN, "labels": 1.0}}, "warm": OWN, **CHANNELS}
UNLABELLED = {**TAUGHT, "moq": {"distillation": {"teacher": OWN, "labels": 0.0}}}
EIGENVALUES = {"eigenvalue": {"enabled": True}}
ASYMMETRIC = {"quantize_algo": {"q_type": "asymmetric"}}
RAMPS = ((8, 0.3), (8, 0.5), (6, 0.15), (4, 0.1), (4, 0.5), (3, 0.5), (3, 0.7))


def blend(steps: int) -> dict[str, Any]:
    """The float share lasts so many steps after each drop."""
    return {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 1 / steps}}


PLANS = {
    # What the first table of docs/evidence/results.md compares.
    "main": Plan(
        (
            FLOAT,
            qat(2, **CHANNELS),
            qat(2, "basic QAT, taught", **TAUGHT),
            ramp(8, 2, 0.3, "MoQ", **CHANNELS),
            ramp(8, 2, 0.3, "MoQ, taught", **TAUGHT),
            qat(3, **CHANNELS),
            qat(3, "basic QAT, taught", **TAUGHT),
            ramp(8, 3, 0.3, "MoQ", **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, taught", **TAUGHT),
            qat(4, **CHANNELS),
            qat(4, "basic QAT, taught", **TAUGHT),
            ramp(8, 4, 0.3, "MoQ", **CHANNELS),
            ramp(12, 8, 0.3, "MoQ", **CHANNELS),
            qat(8, **CHANNELS),
        )
    ),
    # What of it helps at 2 bits: the float start, the teacher, the labels beside it.
    "teachers": Plan(
        (
            FLOAT,
            qat(2, **CHANNELS),
            qat(2, "basic QAT, taught", **TAUGHT),
            ramp(8, 2, 0.3, "MoQ, taught", **TAUGHT),
            qat(2, "basic QAT, taught without labels", **UNLABELLED),
            ramp(8, 2, 0.3, "MoQ, taught without labels", **UNLABELLED),
            qat(2, "basic QAT, float start alone", warm=OWN, **CHANNELS),
            qat(2, "basic QAT, teacher alone", TAUGHT["moq"], **CHANNELS),
        ),
        seeds=(1, 2, 3),
    ),
    # As many steps as the float start and what follows have together.
    "budget": Plan(
        (
            FLOAT,
            replace(FLOAT, name="float, twice the steps", times=2, after=()),
            qat(2, "basic QAT, float start alone", warm=OWN, **CHANNELS),
            qat(2, "basic QAT, taught", **TAUGHT),
            ramp(8, 2, 0.3, "MoQ, taught", **TAUGHT),
            qat(2, "basic QAT, twice the steps", times=2, **CHANNELS),
            ramp(8, 2, 0.3, "MoQ, twice the steps", times=2, **CHANNELS),
            qat(2, "2 bits from the middle of twice the steps", times=2, offset=0.5, **CHANNELS),
            qat(2, "basic QAT, twice the steps, restart", times=2, decay=RESTART, **CHANNELS),
            qat(
                2,
                "2 bits from the middle of twice the steps, restart",
                times=2,
                offset=0.5,
                decay=RESTART,
                **CHANNELS,
            ),
        ),
    ),
    # Which scales suit which bits.
    "groups": Plan(
        (
            FLOAT,
            *(
                ramp(start, bits, 0.3, "" if start == bits else "MoQ", groups=groups)
                for bits in (4, 3, 2)
                for groups in GROUPS
                for start in (bits, 8)
            ),
            *(
                ramp(start, 2, 0.3, f"{'MoQ' if start == 8 else 'basic QAT'}, asymmetric", ASYMMETRIC, groups=groups)
                for groups in ("8 blocks", "per channel")
                for start in (2, 8)
            ),
        ),
        tasks=("sst2",),
        seeds=(1, 2, 3),
    ),
    # What the schedule should look like at 2 bits, and the learning rate with it.
    "schedules": Plan(
        (
            FLOAT,
            replace(FLOAT, learning_rate=1e-4, after=()),
            qat(2),
            *(ramp(start, 2, deadline) for start, deadline in RAMPS),
            *(qat(2, f"basic QAT from step {step}", offset=step) for step in (75, 125, 175)),
            qat(2, "basic QAT, start from float at 1e-4", warm=1e-4),
            qat(2, learning_rate=1e-4),
            ramp(8, 2, 0.3, learning_rate=1e-4),
            qat(2, learning_rate=5e-4),
            ramp(6, 2, 0.15, learning_rate=5e-4),
            qat(2, "basic QAT, start from float at 2e-4", warm=2e-4, learning_rate=5e-5),
            qat(1),
            ramp(8, 1, 0.3),
        ),
        tasks=("sst2",),
        seeds=(1, 2, 3),
    ),
    # The options of the schedule and of rounding.
    "options": Plan(
        (
            FLOAT,
            qat(3, **CHANNELS),
            ramp(8, 3, 0.3, "MoQ", **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, eigenvalues", EIGENVALUES, **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, blend of 40 steps", blend(40), **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, stochastic", {"quantize_algo": {"rounding": "stochastic"}}, **CHANNELS),
            ramp(8, 3, 0.3, "MoQ, asymmetric", ASYMMETRIC, **CHANNELS),
            qat(2, **CHANNELS),
            ramp(8, 2, 0.3, "MoQ", **CHANNELS),
            ramp(8, 2, 0.3, "MoQ, eigenvalues", EIGENVALUES, **CHANNELS),
            ramp(8, 2, 0.3, "MoQ, blend of 40 steps", blend(40), **CHANNELS),
            qat(2, "2 bits at once, blend of 75 steps", blend(75), **CHANNELS),
            qat(2, "2 bits at once, blend of 125 steps", blend(125), **CHANNELS),
        ),
        tasks=("sst2",),
        seeds=(1, 2, 3),
    ),
    # Learning rates where float learns little, from the pretrained model.
    "rates": Plan(
        (
            FLOAT,
            *(replace(FLOAT, learning_rate=rate) for rate in (5e-5, 2e-4)),
            *(
                ramp(start, bits, 0.3, learning_rate=rate)
                for bits in (3, 2)
                for rate in (5e-5, 1e-4, 2e-4)
                for start in (bits, 8)
            ),
        ),
        tasks=("cola",),
        seeds=(1,),
    ),
}


@dataclass(frozen=True)
class Run:
    """An arm on a task with a seed, on all `rows` of each set or the first ones."""

    arm: Arm
    task: str
    seed: int
    rows: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arm", self.arm.on(self.task))

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return EPOCHS[self.task] * self.arm.times

    def identity(self) -> dict[str, Any]:
        """What decides the outcome, in JSON types."""
        return {
            "task": self.task,
            "seed": self.seed,
            "learning_rate": self.arm.learning_rate,
            "epochs": self.epochs,
            "moq": self.arm.config(),
            "warm": self.arm.warm,
            "decay": self.arm.decay,
            "rows": self.rows,
        }

    def key(self) -> str:
        """The same as text."""
        return json.dumps(self.identity(), sort_keys=True)

    def teacher(self) -> "Run | None":
        """The float run whose model this one needs, if any."""
        rate = (self.arm.moq or {}).get("distillation", {}).get("teacher") or self.arm.warm
        if self.arm.warm and self.arm.warm != rate:
            raise ValueError(
                f"{self.arm.name}: the teacher is a float run at {rate:g}, the start one at {self.arm.warm:g}"
            )
        return replace(self, arm=replace(FLOAT, learning_rate=rate, after=())) if rate else None


@dataclass
class Machine:
    """Where things are; made once in each process."""

    model: str
    data: Path
    models: Path
    tokenizer: Any = None
    encoded: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def rows(self, task: str, split: str) -> list[dict[str, Any]]:
        """Token ids and labels."""
        from transformers import AutoTokenizer

        if (task, split) not in self.encoded:
            self.tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(self.model)
            lines = (self.data / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            examples = [json.loads(line) for line in lines]
            texts = ([example[name] for example in examples] for name in TASKS[task].columns)
            encoded = self.tokenizer(*texts, truncation=True, max_length=LENGTH)
            rows = [
                {**{name: encoded[name][row] for name in encoded}, "labels": example["label"]}
                for row, example in enumerate(examples)
            ]
            # Evaluated in batches of alike lengths, which wastes no time on padding.
            self.encoded[task, split] = (
                rows if split == "train" else sorted(rows, key=lambda row: len(row["input_ids"]))
            )
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
        result = self.metrics[task].compute(predictions=logits.argmax(-1), references=prediction.label_ids)
        return {name: float(value) for name, value in result.items()}


def folder_of(run: Run) -> str:
    """The name of a float model's folder."""
    rows = "" if run.rows is None else f"-{run.rows}"
    return f"{run.task}-{run.seed}-{run.arm.learning_rate:g}-{run.epochs:g}{rows}"


_machine: Machine | None = None


def _start(model: str, data: Path, models: Path) -> None:
    global _machine
    import torch
    import transformers

    torch.set_num_threads(1)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _machine = Machine(model, data, models)


def execute(run: Run) -> list[dict[str, Any]]:
    """Train and evaluate; the lines to write: one, or for a float arm also those of its quantized copies."""
    import torch
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, TrainingArguments, set_seed
    from transformers.trainer_callback import PrinterCallback

    from moq_hf import MoQTrainer

    here = _machine
    assert here is not None
    train, validation = (here.rows(run.task, split)[: run.rows] for split in ("train", "validation"))
    folder = tempfile.mkdtemp(prefix="glue-study-")
    arguments = TrainingArguments(
        folder,
        seed=run.seed,
        learning_rate=run.arm.learning_rate,
        num_train_epochs=run.epochs,
        lr_scheduler_type=run.arm.decay,
        lr_scheduler_kwargs={"num_cycles": 2} if run.arm.decay == RESTART else None,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=EVAL_BATCH,
        train_sampling_strategy="group_by_length",
        dataloader_pin_memory=False,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(run.seed)
    teacher = run.teacher()
    source = here.float_model(teacher) if teacher is not None and run.arm.warm else here.model
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=len(TASKS[run.task].labels))
    config = copy.deepcopy(run.arm.config())
    if config is not None and teacher is not None and "distillation" in config:
        config["distillation"]["teacher"] = str(here.float_model(teacher))
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
    began, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    shutil.rmtree(folder, ignore_errors=True)
    logs = trainer.state.log_history
    names = ("accuracy", "f1", "matthews_correlation", "loss")
    epochs = [
        {name: log[f"eval_{name}"] for name in names if f"eval_{name}" in log} for log in logs if "eval_loss" in log
    ]
    common = {
        **run.identity(),
        # A folder's name says nothing to others, and is nobody's business.
        "model": f"{model.config.model_type}, {model.config.num_hidden_layers} layers of {model.config.hidden_size}",
        "versions": {"torch": torch.__version__, "transformers": __import__("transformers").__version__},
        "machine": f"{platform.machine()}, 1 thread",
    }
    controller = trainer.moq.controller if trainer.moq is not None else None
    line = {
        "arm": run.arm.name,
        "bits": run.arm.bits,
        "groups": run.arm.groups,
        "metrics": epochs[-1],
        "metric_per_epoch": epochs,
        "train_loss": [log["loss"] for log in logs if "loss" in log],
        "steps": trainer.state.global_step,
        "last_drop": controller.history[-1].step if controller is not None and controller.history else None,
        "mean_bits": mean_bits(controller.layers.values()) if controller is not None else 32.0,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
    }
    lines = [{**line, **common}]
    if run.arm.moq is None:
        trainer.model.save_pretrained(here.float_model(run))
        for bits in run.arm.after:
            for groups, grouping in GROUPS.items():
                lines.append({**after_training(trainer, run, bits, groups, grouping), **common, "moq": None})
    return lines


def after_training(trainer: Any, run: Run, bits: int, groups: str, grouping: Mapping[str, Any]) -> dict[str, Any]:
    """The float model of `trainer`, quantized now and evaluated."""
    from moq_hf import quantize_model

    schedule = {"quantize_period": 1, "schedule_offset": 0}
    config = {"quantize_bits": {"start_bits": bits, "target_bits": bits}, "quantize_schedule": schedule, **grouping}
    kept = trainer.model
    trainer.model = copy.deepcopy(kept)
    quantize_model(trainer.model, config)
    trainer.model_wrapped = trainer.model
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    trainer.model = trainer.model_wrapped = kept
    return {
        "arm": "after training",
        "bits": bits,
        "groups": groups,
        "metrics": {
            name: metrics[name] for name in ("accuracy", "f1", "matthews_correlation", "loss") if name in metrics
        },
        "mean_bits": float(bits),
    }


def mean_bits(layers: Collection[Any]) -> float:
    """Bits per quantized weight, whatever the rest of the model is."""
    bits = sum(layer.weight.numel() * layer.moq.bits for layer in layers)
    return bits / sum(layer.weight.numel() for layer in layers)


def identity_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """`Run.identity` of the run that wrote a line."""
    return {name: line[name] for name in ("task", "seed", "learning_rate", "epochs", "moq", "warm", "decay", "rows")}


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
        wanted = {(bits, groups) for bits in run.arm.after for groups in GROUPS}
        return run.key() in done and wanted <= quantized.get(run.key(), set())

    asked: set[str] = set()
    for seed in args.seeds:
        for plan in (PLANS[name] for name in args.plan):
            for task in plan.tasks:
                for arm in plan.arms:
                    run = Run(arm, task, seed, args.rows)
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
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--tasks", nargs="+", choices=EPOCHS, default=list(EPOCHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--rows", type=int, help="only the first ones of each set, to try it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--model_dir", type=Path, default=Path("runs/glue_study"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "glue_study.jsonl")
    parser.add_argument("--list", action="store_true", help="tell what is missing and stop")
    args = parser.parse_args(argv)
    text = args.output.read_text(encoding="utf-8") if args.output.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    runs = list(waiting(args, lines))
    if args.list:
        for run in runs:
            print(run.task, run.seed, run.arm.name, run.arm.bits, run.arm.groups, f"{run.arm.learning_rate:g}")
        return
    args.model_dir.mkdir(parents=True, exist_ok=True)
    settings = (args.model_name_or_path, args.data_dir, args.model_dir)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, spawn, _start, settings) as pool:
        pending: dict[concurrent.futures.Future[list[dict[str, Any]]], Run] = {}
        trained = {run.key() for run in runs}
        queue = list(runs)
        while queue or pending:
            ready = [run for run in queue if run.teacher() is None or run.teacher().key() not in trained]
            for run in ready[: args.processes - len(pending)]:
                queue.remove(run)
                pending[pool.submit(execute, run)] = run
            finished, _ = concurrent.futures.wait(pending, return_when="FIRST_COMPLETED")
            for future in finished:
                run = pending.pop(future)
                trained.discard(run.key())
                new = future.result()
                with args.output.open("a", encoding="utf-8") as file:
                    file.writelines(f"{json.dumps(line)}\n" for line in new)
                print(
                    run.task,
                    run.seed,
                    run.arm.name,
                    run.arm.bits,
                    f"{run.arm.learning_rate:g}",
                    new[0]["metrics"],
                    new[0]["seconds"],
                    flush=True,
                )


if __name__ == "__main__":
    main()
