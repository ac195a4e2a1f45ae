"""What the proof at the end of a run costs: its seconds over those of a run of 345 steps, three epochs of MRPC.

    python benchmarks/proof.py --out benchmarks/results/proof.json

A stock Trainer trains a model for some steps and delivers it, several times. The run's length is the median time of its
steps times 345; the proof's time is the one that `moq_state.json` records. Without a model folder: random weights of a
6-layer BERT with hidden size 384.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from classifiers import classifier
from environment import environment, write
from transformers import Trainer, TrainerCallback, TrainingArguments

from moq_hf import MoQCallback

STEPS = 345


class Watch(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """It has ended."""
        self.seconds.append(time.perf_counter() - self._began)


def one_run(folder: Path, model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The times of one run, and what its proof says."""
    ids = torch.randint(1000, model.config.vocab_size, (args.batch, args.sequence))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 2} for i, row in enumerate(ids)]
    moq = {
        "quantize_bits": {"start_bits": 4, "target_bits": 4},
        "quantize_schedule": {"schedule_offset": 0},
        "quantize_groups": "per_channel",
    }
    settings = TrainingArguments(
        str(folder), max_steps=args.steps, per_device_train_batch_size=args.batch, save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    watch = Watch()
    Trainer(model, settings, train_dataset=rows, callbacks=[MoQCallback(moq), watch]).train()
    proof = json.loads((folder / "quantized" / "moq_state.json").read_text(encoding="utf-8"))["proof"]
    step = statistics.median(watch.seconds[1:])
    return {"step_s": step, "proof_s": proof["seconds"], "share": proof["seconds"] / (STEPS * step), "proof": proof}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", help="a folder; none: random weights")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/proof.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs = []
    for seed in range(args.runs):
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(one_run(Path(folder), classifier(args.model_name_or_path), args))
        print(f"step {runs[-1]['step_s']:.3f} s, proof {runs[-1]['proof_s']:.3f} s, {runs[-1]['share']:.2%} of {STEPS}")
    document = {
        **environment(),
        "batch": args.batch,
        "sequence": args.sequence,
        "steps_of_the_run": STEPS,
        "median_share": statistics.median(run["share"] for run in runs),
        "runs": runs,
    }
    write(document, args.out)


if __name__ == "__main__":
    main()
