"""A long run of tiny steps: what grows.

    python benchmarks/soak.py --out benchmarks/results/soak.json

20,000 optimizer steps of a two-layer BERT with all that a run can have: logs, an evaluation and a checkpoint now and
then, `save_total_limit`, stochastic rounding, searched clipping ratios, 8-bit embedding tables, and drops with measured
eigenvalues all along the way. Every 1,000 steps, after a garbage collection: the memory of the process, live tensors
and their bytes, live Python objects, and the size of the MoQ state in each checkpoint. One row for a stock `Trainer`
with the callback, one for `MoQTrainer`; each in a process of its own.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import environment, write
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from moq_hf import MoQCallback, MoQTrainer

EVERY = 1_000
CONFIG = {
    "quantize_bits": {"start_bits": 8, "target_bits": 3},
    "quantize_groups": 4,
    "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 10, "deadline": 0.9},
    "quantize_algo": {"rounding": "stochastic"},
    "quantize_embeddings": 8,
    "eigenvalue": {"enabled": True, "num_samples": 16},
}


def memory() -> dict[str, int]:
    """Of this process now: resident and highest kilobytes, Python objects, tensors and their bytes."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    status = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    objects = gc.get_objects()
    # Not isinstance: some objects answer with a property that warns.
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    return {
        "rss_kb": int(status["VmRSS"]),
        "highest_kb": int(status["VmHWM"]),
        "objects": len(objects),
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


class Watch(TrainerCallback):
    """Measures every `EVERY` steps."""

    def __init__(self) -> None:
        """No measurement yet."""
        self.rows: list[dict[str, Any]] = []
        self.states: dict[int, int] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At the start of a step no graph and no gradient is alive."""
        if state.global_step and state.global_step % EVERY == 0:
            self.rows.append({"step": state.global_step, "log_entries": len(state.log_history), **memory()})
            print(self.rows[-1], file=sys.stderr, flush=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The size of what moq_hf writes into a checkpoint's trainer_state.json."""
        self.states[state.global_step] = len(json.dumps(state.stateful_callbacks["MoQCallback"]))


def soak(name: str, steps: int, answer: Any) -> None:
    """Train and put the measurements into the queue `answer`."""
    torch.set_num_threads(1)
    transformers.set_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, **shape))
    ids = torch.randint(5, 100, (4096, 10))
    rows = [{"input_ids": row, "labels": int(row.sum() % 2)} for row in ids]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=50,
            eval_strategy="steps", eval_steps=1_000, save_steps=1_000, save_total_limit=2, report_to="none",
            use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, seed=1,
        )  # fmt: skip
        given: dict[str, Any] = {"model": model, "args": args, "train_dataset": rows, "eval_dataset": rows[:64]}
        if name == "MoQTrainer":
            trainer: Trainer = MoQTrainer(**given, moq_config=CONFIG, callbacks=[watch])
        else:
            trainer = Trainer(**given, callbacks=[MoQCallback(CONFIG), watch])
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    moq = next(c for c in trainer.callback_handler.callbacks if isinstance(c, MoQCallback))
    assert moq.controller is not None
    answer.put(
        {
            "trainer": name,
            "steps": steps,
            "seconds": round(seconds, 1),
            "mean_bits": moq.controller.sizes.mean_bits,
            "drops": sorted({switch.step for switch in moq.controller.history}),
            "checkpoints_kept": kept,
            "moq_state_bytes": watch.states,
            "memory": [*watch.rows, {"step": steps, "log_entries": len(trainer.state.log_history), **memory()}],
        }
    )


def main() -> None:
    """Run both and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    runs = []
    for name in ("Trainer", "MoQTrainer"):
        answer = context.Queue()
        process = context.Process(target=soak, args=(name, arguments.steps, answer))
        process.start()
        runs.append(answer.get())
        process.join()
        first, last = runs[-1]["memory"][0], runs[-1]["memory"][-1]
        print(f"{name}: {runs[-1]['seconds']} s, mean {runs[-1]['mean_bits']:.2f} bits over the model")
        for key in ("rss_kb", "tensors", "tensor_bytes", "objects", "log_entries"):
            print(f"  {key:12} {first[key]:>12,} at step {first['step']:,} {last[key]:>12,} at the end")
    if arguments.out:
        write({**environment(), "runs": runs}, arguments.out)


if __name__ == "__main__":
    main()
