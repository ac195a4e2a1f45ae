"""What makes quantization-aware training slow, and what each lever brings: the simulator, mixed precision, clipping.

    python benchmarks/levers.py --model_name_or_path FOLDER --data FOLDER --parts simulator,precision,clipping

Each measurement is a line of `--out`; what is there is not measured again. Only `clipping` needs the data, a folder
with train.jsonl and validation.jsonl whose lines have `sentence` and `label`.
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from short_runs import Lines, Task, new_model, train
from step_time import moq

from moq_hf.controller import MoQController

CHANCE = math.log(2)


def clipping(args: argparse.Namespace, lines: Lines) -> None:
    """Short runs at rising learning rates, with and without gradient clipping."""
    task = Task(args.model_name_or_path, args.data)
    for bits in args.bits:
        for lr in args.lrs:
            for seed in args.seeds:
                for clip in (1.0, 0.0):
                    key = {"part": "clipping", "bits": bits, "lr": lr, "clip": clip, "seed": seed}
                    if lines.has(**key, steps=args.steps):
                        continue
                    lines.add({**key, **clipping_run(args, task, bits, lr, clip, seed)})


def clipping_run(
    args: argparse.Namespace, task: Task, bits: int, lr: float, clip: float, seed: int
) -> dict[str, Any]:
    """One run; it has diverged if the loss of its last ten steps is that of guessing, or worse, or not a number."""
    model = new_model(args.model_name_or_path, seed)
    controller = None if bits == 32 else MoQController(model, moq(bits))
    marks = sorted({round(args.steps * quarter / 4) for quarter in (1, 2, 3, 4)})
    accuracy: dict[int, float] = {}

    def evaluate(step: int) -> None:
        if step in marks:
            model.eval()
            state = torch.get_rng_state()
            accuracy[step] = round(task.accuracy(model, args.eval_rows), 4)
            torch.set_rng_state(state)
            model.train()

    run = train(
        model,
        task,
        seed=seed,
        lr=lr,
        steps=args.steps,
        max_grad_norm=clip,
        after_step=controller.step if controller is not None else None,
        each=evaluate,
    )
    last = run["losses"][-10:]
    final = None if None in last else round(statistics.mean(last), 4)
    diverged = final is None or final > CHANCE
    print(f"{bits} bits, lr {lr:g}, clip {clip:g}, seed {seed}: loss {final}, {accuracy}", flush=True)
    return {"steps": args.steps, "eval_rows": args.eval_rows, "final_loss": final, "diverged": diverged, **run} | {
        "accuracy": accuracy
    }


PARTS = {"clipping": clipping}


def main() -> None:
    """Measure what the file of lines lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 32], help="of clipping; 32 is float")
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-5, 2e-4, 5e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=62, help="of a run of clipping")
    parser.add_argument("--eval_rows", type=int, default=436)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/levers.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = Lines(args.out)
    for part in args.parts.split(","):
        PARTS[part](args, lines)


if __name__ == "__main__":
    main()
