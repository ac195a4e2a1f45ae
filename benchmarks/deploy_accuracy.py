"""What exported files lose: GLUE metrics of each runtime and file against the checkpoint in PyTorch, over seeds.

    pip install 'moq_hf[onnx,openvino]'
    python benchmarks/deploy_accuracy.py --model_name_or_path FOLDER --data GLUE --runs runs/deploy

GLUE is a folder with `mrpc` and `sst2`, each with train.jsonl and validation.jsonl. Every run is 12 to 8 bits, per
channel, embedding tables at 8 bits; "static" trains `activation_quantization` too, "off" does not. A run that is in
`--runs` is not trained again, and a line that is in `--out` is not measured again.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from short_runs import Lines
from transformers.utils import logging as transformers_logging

from moq_hf.export.bench import benchmark
from moq_hf.export.data import read_data

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_glue_moq.py"
# Epochs, and the step from which inputs are rounded.
TASKS = {"mrpc": (3, 90), "sst2": (2, 125)}
ARMS = ("static", "off")
# The lines of the table; the file has every engine's.
SHOWN = ("PyTorch bf16", "ONNX quantize_dynamic", "ONNX int8", "OpenVINO float", "OpenVINO weight-only", "OpenVINO qdq")


def train(args: argparse.Namespace, task: str, arm: str, seed: int) -> Path:
    """The packed checkpoint of a run."""
    epochs, start = TASKS[task]
    folder = args.runs / f"{task}-{arm}-{seed}"
    if (folder / "moq_state.json").exists():
        return Path(folder)
    config: dict[str, Any] = {
        "quantize_bits": {"start_bits": 12, "target_bits": 8},
        "quantize_groups": "per_channel",
        "quantize_embeddings": 8,
        "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 0},
    }
    if arm != "off":
        config["activation_quantization"] = {"enabled": True, "bits": 8, "scale": arm, "start_step": start}
    args.runs.mkdir(parents=True, exist_ok=True)
    path = args.runs / f"{task}-{arm}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    data = args.data / task
    options = {
        "model_name_or_path": args.model_name_or_path,
        "task_name": task,
        "train_file": data / "train.jsonl",
        "validation_file": data / "validation.jsonl",
        "moq_config": path,
        "max_seq_length": 128,
        "per_device_train_batch_size": 32,
        "learning_rate": 5e-5,
        "num_train_epochs": epochs,
        "seed": seed,
        "output_dir": folder,
        "save_strategy": "no",
        "train_sampling_strategy": "group_by_length",
        "bf16": args.bf16,
        "use_cpu": True,
        "report_to": "none",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, str(SCRIPT), *words, "--do_train", "--do_eval"], check=True)
    return Path(folder)


def measure(args: argparse.Namespace, folder: Path, task: str) -> dict[str, Any]:
    """The metrics of the checkpoint and of every engine."""
    data = read_data(args.data / task / "validation.jsonl", task)
    found = benchmark(folder, batches=[1], sequences=[16], threads=args.threads, repeats=1, data=data)
    proofs = {
        name: {"metrics": proof.metrics, "agreement": proof.agreement, "largest_difference": proof.largest_difference}
        for name, proof in found.proofs.items()
    }
    return {"checkpoint": found.checkpoint_metrics, "engines": proofs, "missing": found.missing}


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: the mean metric of each engine over seeds, and of its differences to the checkpoint their spread."""
    names = {"mrpc": "f1", "sst2": "accuracy"}
    rows = ["| task | activations | file | metric | against PyTorch | agreement | seeds |", "|" + " --- |" * 7]
    for task, metric in names.items():
        for arm in ARMS:
            runs = [line for line in lines if (line["task"], line["arm"]) == (task, arm)]
            if not runs:
                continue
            mean = statistics.mean(run["checkpoint"][metric] for run in runs)
            rows.append(f"| {task}, {metric} | {arm} | checkpoint in PyTorch | {mean:.4f} | | | {len(runs)} |")
            for engine in SHOWN:
                each = [run for run in runs if engine in run["engines"]]
                if not each:
                    continue
                values = [run["engines"][engine]["metrics"][metric] for run in each]
                against = [value - run["checkpoint"][metric] for value, run in zip(values, each, strict=True)]
                spread = f" ± {statistics.stdev(against):.4f}" if len(against) > 1 else ""
                agreement = statistics.mean(run["engines"][engine]["agreement"] for run in each)
                rows.append(
                    f"| | | {engine} | {statistics.mean(values):.4f} | {statistics.mean(against):+.4f}{spread} "
                    f"| {agreement:.4f} | {len(each)} |"
                )
    return "\n".join(rows)


def main() -> None:
    """Train and measure what the file of lines lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/deploy_accuracy"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="train under autocast")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/deploy_accuracy.jsonl"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    lines = Lines(args.out)
    for seed in args.seeds:
        for task in TASKS:
            for arm in ARMS:
                key = {"task": task, "arm": arm, "seed": seed}
                if not lines.has(**key):
                    lines.add(key | measure(args, train(args, task, arm, seed), task))
                    print(json.dumps(key), flush=True)
    print(table(lines.lines))


if __name__ == "__main__":
    main()
