"""Runs that are killed at a random moment and resumed: do they end as if nothing had happened?

    python tests/helpers/kills.py --kills 50 --out benchmarks/results/kills.jsonl

Each seed draws a trainer (a stock `Trainer` with the callback, `MoQTrainer`, or scripts/run_glue_moq.py), a config, how
often the run saves and how many checkpoints it keeps, a signal (SIGTERM or SIGKILL) and a moment. A process of its own
trains a two-layer BERT for 40 steps and gets the signal at that moment; another one resumes with default arguments,
`train(resume_from_checkpoint=True)` or the script's command line once more. What is in the last checkpoint, float
weights, optimizer and MoQ state, and the packed model where there is one, must equal those of a run that nobody killed.

A stock `Trainer` stops at a checkpoint that was cut off; there the run follows moq_hf's warning and resumes from
`moq_hf.last_checkpoint`. Where no checkpoint was written before the kill there is nothing to resume: it starts afresh.
"""

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import tiny_runs
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from transformers.trainer import DEFAULT_CALLBACKS

from moq_hf import MoQCallback, MoQTrainer, last_checkpoint
from moq_hf.training.checkpoints import checkpoints, fault_of

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

STEPS = 40
TRAINERS = ("Trainer", "MoQTrainer", "script")
BASE: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_groups": 4,
    "quantize_schedule": {"quantize_period": 4, "schedule_offset": 3},
    "quantize_algo": {"scale_refresh": 5},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nearest": BASE,
    "stochastic": BASE | {"quantize_algo": {"scale_refresh": 5, "rounding": "stochastic"}, "quantize_embeddings": 8},
    "blend": BASE | {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.15}},
    "eigenvalues": BASE
    | {
        "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.9},
        "eigenvalue": {"enabled": True, "num_samples": 8, "max_overhead": 0.5},
    },
}


class Case(NamedTuple):
    """One kill: what runs, and when it gets which signal.

    Attributes:
        step: The signal comes `delay` seconds after this step; 0 is the beginning of training.
        limit: `save_total_limit`.
    """

    seed: int
    trainer: str
    config: str
    signal: str
    save_steps: int
    limit: int | None
    step: int
    delay: float

    @classmethod
    def draw(cls, seed: int) -> "Case":
        """The case of a seed: every tenth runs the script, the others take turns."""
        rng = random.Random(seed)
        return cls(
            seed,
            "script" if seed % 10 == 2 else TRAINERS[seed % 2],
            rng.choice(list(CONFIGS)),
            rng.choice(["SIGTERM", "SIGKILL"]),
            rng.choice([1, 1, 2, 3, 7]),
            rng.choice([None, 1, 2]),
            rng.randint(0, 30),
            round(rng.uniform(0.0, 0.05), 4),
        )


class _Steps(TrainerCallback):
    """Tells the parent where training is."""

    pipe: Connection

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pipe.send(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pipe.send(state.global_step)


def _trainer(case: Case, folder: Path) -> Trainer:
    args = tiny_runs.arguments(
        folder, max_steps=STEPS, save_strategy="steps", save_steps=case.save_steps, save_total_limit=case.limit
    )
    given = {"model": tiny_runs.new_model(), "args": args, "train_dataset": tiny_runs.rows(160)}
    if case.trainer == "MoQTrainer":
        return MoQTrainer(**given, moq_config=CONFIGS[case.config])
    return Trainer(**given, callbacks=[MoQCallback(CONFIGS[case.config])])


def _command_line(case: Case, folder: Path) -> list[str]:
    """Arguments of the script; what they name is made beside the output folder."""
    import tiny_glue

    beside = folder.parent / "script"
    if not beside.exists():
        tiny_glue.make_model(beside)
        tiny_glue.write_rows(beside / "train.jsonl", tiny_glue.make_rows("cola", 160))
    moq = beside / f"{case.config}.json"
    moq.write_text(json.dumps(CONFIGS[case.config]))
    given = {
        "task_name": "cola", "config_name": beside, "train_file": beside / "train.jsonl", "moq_config": moq,
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 3,
        "save_strategy": "steps", "save_steps": case.save_steps, "use_cpu": "true", "disable_tqdm": "true",
        "save_total_limit": case.limit,
    }  # fmt: skip
    return [*tiny_glue.words_of(given), "--do_train"]


def _train(case: Case, folder: Path, resume: bool, pipe: Connection) -> None:
    """In a process of its own: train, telling the steps; at the end tell how it was resumed."""
    torch.set_num_threads(1)
    with open(folder.parent / f"{folder.name}.log", "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    logging.basicConfig()
    _Steps.pipe = pipe
    DEFAULT_CALLBACKS.append(_Steps)
    how = "default" if resume else "afresh"
    if case.trainer == "script":
        from run_glue_moq import main

        if resume and last_checkpoint(folder) is None:
            how = "afresh"
        assert main(_command_line(case, folder)) == 0
    elif not resume:
        _trainer(case, folder).train()
    else:
        try:
            _trainer(case, folder).train(resume_from_checkpoint=True)
        # Of the stock Trainer: no checkpoint, no weights in it, no trainer_state.json; of MoQTrainer: no whole one.
        except (OSError, ValueError, RuntimeError) as error:
            logging.warning("%s: %s", type(error).__name__, error)
            whole = last_checkpoint(folder)
            how = "afresh" if whole is None else "last_checkpoint"
            _trainer(case, folder).train(resume_from_checkpoint=whole)
    pipe.send(how)


def _result(folder: Path) -> dict[str, str]:
    """Digests of what a run left."""
    last = folder / f"checkpoint-{STEPS}"
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
    moq = state["stateful_callbacks"]["MoQCallback"]["attributes"]["saved"]
    found = {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": {f"{k} {n}": v for k, values in optimizer["state"].items() for n, v in values.items()},
        "moq": {key: moq[key] for key in ("schedule", "ratios", "history")},
    }
    for path in (folder / "quantized" / "model.safetensors", folder / "model.safetensors"):
        if path.exists():
            found["packed"] = load_file(path)
    digests = {}
    for name, values in found.items():
        hasher = hashlib.sha256()
        for key in sorted(values):
            value = values[key]
            data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else json.dumps(value).encode()
            hasher.update(key.encode() + data)
        digests[name] = hasher.hexdigest()
    return digests


def _run(case: Case, folder: Path, resume: bool = False, kill: bool = False) -> tuple[int | None, Any]:
    """A process that trains, killed or not: its exit code and the last thing that it said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moq_hf", "transformers", "datasets", "evaluate"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(case, folder, resume, theirs))
    process.start()
    theirs.close()
    said: Any = None
    # It closes the pipe when it ends.
    with suppress(EOFError):
        while True:
            said = ours.recv()
            if kill and isinstance(said, int) and said >= case.step:
                time.sleep(case.delay)
                assert process.pid is not None
                os.kill(process.pid, getattr(signal, case.signal))
                kill = False
    process.join()
    return process.exitcode, said


def kill_and_resume(case: Case, place: Path, expected: dict[tuple[bool, str], dict[str, str]]) -> dict[str, Any]:
    """One kill; `expected` holds what uninterrupted runs left, by config and whether of the script, and is added to.

    `MoQTrainer` has nothing of its own in it, since it ends as a stock `Trainer` does.

    Raises:
        RuntimeError: A run failed for another reason than the signal; the text ends with its last words.
    """
    key = (case.trainer == "script", case.config)
    if key not in expected:
        whole = case._replace(trainer="script" if key[0] else "Trainer")
        folder = place / f"whole-{whole.trainer}-{case.config}"
        code, _ = _run(whole, folder)
        if code != 0:
            raise RuntimeError(_last_words(whole, folder))
        expected[key] = _result(folder)
    folder = place / f"killed-{case.seed}"
    code, step = _run(case, folder, kill=True)
    if code != -getattr(signal, case.signal):
        raise RuntimeError(f"exit code {code}: {_last_words(case, folder)}")
    found = checkpoints(folder)
    half = [path.name for path in found if fault_of(path) is not None]
    whole = [path.name for path in found if fault_of(path) is None]
    code, how = _run(case, folder, resume=True)
    if code != 0:
        raise RuntimeError(f"exit code {code}: {_last_words(case, folder)}")
    result = _result(folder)
    return {
        **case._asdict(),
        "last_step": step,
        "half_written": half,
        "resumed": how,
        "from": None if how == "afresh" else whole[0],
        "equal": result == {name: expected[key][name] for name in result},
    }


def _last_words(case: Case, folder: Path) -> str:
    return f"{case}\n{(folder.parent / f'{folder.name}.log').read_text()[-2000:]}"


def main() -> None:
    """Kill and resume; a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = []
    expected: dict[tuple[bool, str], dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.kills):
            lines.append(kill_and_resume(Case.draw(seed), Path(folder), expected))
            print(json.dumps(lines[-1]), flush=True)
    print(f"{sum(line['equal'] for line in lines)} of {len(lines)} equal; half-written: ", end="")
    print(f"{sum(bool(line['half_written']) for line in lines)}")
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
