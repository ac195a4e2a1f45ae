"""What exported files of a MiniLM are worth on this CPU: GLUE scores of each file over seeds, sizes and speeds.

    python benchmarks/deploy.py scores --model FOLDER --data GLUE --bf16
    python benchmarks/deploy.py speeds --model FOLDER

GLUE is a folder with `mrpc` and `sst2`, each with train.jsonl and validation.jsonl. For each task and seed a float
model is trained, then one at each of `ARMS` that starts from it and has it as its teacher. A run that is in `--runs`
is not trained again, and a line that is in `--out` is not measured again.

Speeds are of weights that were only rounded, on one thread: all engines take turns at each shape, and the medians are
of processor time, which other processes change less than time on the clock. The decoder is a Llama of 30 million random
weights that computes one token after 64 in its cache.
"""

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import elsewhere  # noqa: F401 - scripts/
import torch
from environment import environment, write
from glue_data import TASKS
from lines import Lines
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from moq_hf import MoQTrainer, dequantize_model, quantize_model, save_quantized
from moq_hf.export import decoder
from moq_hf.export.compare import read_data
from moq_hf.export.onnx import export_onnx, onnx_runtime, openvino_runtime
from moq_hf.export.onnx_layers import Flavor

# Epochs of the float model and of what starts from it, and their learning rates: those of glue_plans.py.
EPOCHS = {"mrpc": (2, 0.5), "sst2": (1, 0.25)}
RATES = {"mrpc": 2e-4, "sst2": 2e-4}
# Bits, bits of the tables, columns of a group, and what of the inputs shares a scale.
ARMS: dict[str, tuple[int, int, int | None, str]] = {
    "8 bits": (8, 8, None, "per_block"),
    "4 bits": (4, 4, None, "per_block"),
    "2 bits": (2, 4, 128, "per_block"),
    "8 bits, static": (8, 8, None, "static"),
}
RESULTS = Path(__file__).parent / "results"
WORDS = Path(__file__).parents[1] / "examples" / "demo" / "model"
LLAMA = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def train(args: argparse.Namespace, task: str, seed: int, arm: str | None) -> Path:
    """The folder of a run: of the float model without an arm, else packed."""
    folder: Path = args.runs / f"{task}-{seed}-{arm or 'float'}".replace(", ", "-").replace(" ", "-")
    done = folder if arm is None else folder / "quantized"
    if (done / "config.json").exists():
        return done
    tokenizer = AutoTokenizer.from_pretrained(args.model, model_max_length=128)
    lines = (args.data / task / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: args.rows]]
    texts = ([row[name] for row in rows] for name in TASKS[task].columns)
    encoded = tokenizer(*texts, truncation=True)
    examples = [{**{name: encoded[name][i] for name in encoded}, "labels": row["label"]} for i, row in enumerate(rows)]
    source = args.model if arm is None else train(args, task, seed, None)
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    config: dict[str, Any] | None = None
    if arm is not None:
        bits, tables, group, scale = ARMS[arm]
        config = {
            "quantize_bits": {"target_bits": bits},
            "quantize_embeddings": tables,
            "activation_quantization": {"enabled": True, "scale": scale},
            "distillation": {"teacher": str(source)},
        }
        if group is not None:
            config["quantize_group_size"] = group
    trainer = MoQTrainer(
        model,
        TrainingArguments(
            str(folder),
            seed=seed,
            learning_rate=RATES[task] / (1 if arm is None else 2),
            num_train_epochs=EPOCHS[task][arm is not None],
            max_steps=args.max_steps,
            per_device_train_batch_size=32,
            train_sampling_strategy="group_by_length",
            dataloader_pin_memory=False,
            bf16=args.bf16,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        DataCollatorWithPadding(tokenizer),
        examples,
        processing_class=tokenizer,
        moq_config=config,
    )
    trainer.train()
    if arm is None:
        trainer.save_model()
    return done


def score(args: argparse.Namespace, folder: Path, task: str, arm: str) -> dict[str, Any]:
    """The metrics of the checkpoint and of each file."""
    data = read_data(args.data / task / "validation.jsonl", task)
    # int8 takes no groups, nbits no static ranges.
    flavors: list[Flavor] = ["weight-only"]
    flavors += ["int8"] if ARMS[arm][2] is None else []
    flavors += ["nbits"] if ARMS[arm][3] == "per_block" else []
    out = folder.with_name("onnx")
    shutil.rmtree(out, ignore_errors=True)
    found = export_onnx(folder, out, flavors=flavors, data=data)
    files = {
        flavor: {
            "bytes": found.bytes[flavor],
            "layers": sorted(set(found.layers[flavor].values())),
            "activations": found.activations.get(flavor, "float"),
            **vars(proof),
        }
        for flavor, proof in found.proofs.items()
    }
    return {
        "float_bytes": found.bytes["float checkpoint"],
        "checkpoint": dict(found.checkpoint_metrics),
        "files": files,
    }


def scores(args: argparse.Namespace) -> None:
    """Train and measure what the file of lines lacks."""
    lines = Lines(args.out)
    for task in args.tasks:
        for seed in args.seeds:
            for arm in args.arms:
                key = {"task": task, "seed": seed, "arm": arm}
                if lines.has(**key):
                    continue
                began = time.perf_counter()
                folder = train(args, task, seed, arm)
                measured = score(args, folder, task, arm)
                lines.add(key | measured | {"seconds": round(time.perf_counter() - began)})
                print(json.dumps(lines.lines[-1]), flush=True)


def packed(model: Any, arm: str, folder: Path) -> Path:
    """A checkpoint rounded to an arm's grids, with a tokenizer."""
    bits, tables, group, _ = ARMS[arm]
    config: dict[str, Any] = {"quantize_bits": {"target_bits": bits}, "quantize_embeddings": tables}
    if group is not None:
        config["quantize_group_size"] = group
    quantize_model(model, config)
    return save_quantized(model, folder, processing_class=AutoTokenizer.from_pretrained(WORDS))


def quantize_dynamic(source: Path, target: Path) -> None:
    """ONNX Runtime's own int8 of a float model: weights per channel, activations as they come."""
    import onnx
    from onnxruntime import quantization

    model = onnx.load(source)
    # It transposes weights and leaves their shapes here as they were, which it then calls an error.
    del model.graph.value_info[:]
    signed = quantization.QuantType.QInt8
    quantization.quantize_dynamic(model, target, per_channel=True, weight_type=signed)


def in_turns(engines: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The median processor time of each engine, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in engines.values():
        run()
    began = time.process_time()
    while time.process_time() - began < seconds:
        for name, run in engines.items():
            start = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def speeds(args: argparse.Namespace) -> None:
    """Measure files of an encoder and of a decoder."""
    found: dict[str, Any] = {"bytes": {}, "milliseconds": {}, "clock": "processor time"}
    with tempfile.TemporaryDirectory() as temporary:
        for kind in ("encoder", "decoder"):
            engines: dict[str, Any] = {}
            sizes = found["bytes"][kind] = {}
            for arm in list(ARMS)[:3]:
                set_seed(0)
                if kind == "encoder":
                    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
                else:
                    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
                folder = packed(model.eval(), arm, Path(temporary, kind, arm))
                flavors: list[Flavor] = ["weight-only", "nbits"]
                flavors += ["int8"] if ARMS[arm][2] is None else []
                if arm == "8 bits":
                    flavors += ["float", "qdq"] if kind == "encoder" else ["float"]
                out = Path(temporary, f"{kind} {arm}")
                written = export_onnx(folder, out, flavors=flavors, tolerance=1.0)
                sizes["PyTorch"] = written.bytes["float checkpoint"]
                for flavor, file in written.files.items():
                    name = "ONNX float" if flavor == "float" else f"ONNX {flavor}, {arm}"
                    if flavor != "qdq":
                        engines[name] = onnx_runtime(out / file, 1)
                        sizes[name] = written.bytes[flavor]
                    if kind == "encoder" and arm == "8 bits":
                        name = f"OpenVINO {flavor}"
                        engines[name] = openvino_runtime(out / file, 1)
                        sizes[name] = written.bytes[flavor]
                if kind == "encoder" and arm == "8 bits":
                    path = out / "dynamic.onnx"
                    quantize_dynamic(out / "model_float.onnx", path)
                    engines["ONNX quantize_dynamic"] = onnx_runtime(path, 1)
                    sizes["ONNX quantize_dynamic"] = path.stat().st_size
            engines["PyTorch"] = partial(decoder.answer, dequantize_model(model))
            for batch, tokens in ((1, 16), (1, 128), (8, 128)) if kind == "encoder" else ((1, 64),):
                ids = torch.arange(batch * tokens).view(batch, tokens) % 1000
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                shape = f"{batch} x {tokens}"
                with torch.inference_mode():
                    if kind == "decoder":
                        inputs = decoder.inputs_after(model, inputs, tokens - 1)
                        shape = "one token"
                    else:
                        inputs["token_type_ids"] = torch.zeros_like(ids)
                    runs = {name: partial(run, inputs) for name, run in engines.items()}
                    found["milliseconds"][shape] = in_turns(runs, args.seconds)
                print(shape, json.dumps(found["milliseconds"][shape]), flush=True)
    load = round(os.getloadavg()[0], 1)
    write(found | environment("onnxruntime", "openvino", load=load), args.out)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("scores", "speeds"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/deploy"))
    parser.add_argument("--tasks", nargs="+", default=list(EPOCHS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--rows", type=int, help="of the training set")
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--bf16", action="store_true", help="train under autocast")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring per shape")
    parser.add_argument("--out", type=Path, help="default: deploy_scores.jsonl or deploy_speeds.json in the results")
    args = parser.parse_args()
    default = {"scores": "deploy_scores.jsonl", "speeds": "deploy_speeds.json"}[args.command]
    args.out = args.out or RESULTS / default
    torch.set_num_threads(1)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    scores(args) if args.command == "scores" else speeds(args)


if __name__ == "__main__":
    main()
