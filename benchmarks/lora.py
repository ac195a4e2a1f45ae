"""LoRA at few bits, four ways: the merged grid, beside a quantized base, merged and then rounded, and full QAT.

    python benchmarks/lora.py scores --model MINILM --glue GLUE      # SST-2; goes on where it stopped
    python benchmarks/lora.py cost                                   # step time and memory, arms in turn

Every way takes the same batches. "merged" is `"lora": "merged"`; "beside" is the default, whose folder is the quantized
base with the float adapter; "rounded" trains LoRA in float, merges, and rounds with the same grid and search; "full"
trains all weights. LoRA is of rank 16 on all linear layers of the encoder, and the head is trained in all ways. All
train under autocast to bfloat16. A score is that of the model in memory; `difference` is the largest one of all logits
of the validation set between it and what `from_pretrained` makes of the folder.
"""

import argparse
import copy
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from classifiers import MINILM, classifier
from lines import Lines
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from moq_hf import MoQCallback, MoQConfig, quantize_model
from moq_hf.training.controller import MoQController

RESULTS = Path("benchmarks/results/lora.jsonl")
WAYS = ("float", "merged", "beside", "rounded", "full")
RATES = {"full": 1e-4}
LENGTH = 32


def config_of(bits: int, way: str) -> dict[str, Any]:
    """At the bits from the first step on, one scale per channel."""
    return {"quantize_bits": {"target_bits": bits}, "lora": "merged" if way == "merged" else None}


def adapted(model: Any, **more: Any) -> Any:
    """The model with LoRA on the encoder's linear layers, its head trained as a whole."""
    targets = ["query", "key", "value", "dense"]
    settings = {"task_type": "SEQ_CLS", "target_modules": targets, "exclude_modules": ["pooler.dense"], **more}
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, **settings))


def examples(folder: Path, part: str, tokenizer: Any) -> list[dict[str, Any]]:
    """SST-2."""
    lines = (folder / "sst2" / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    texts = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=LENGTH)
    return [{"input_ids": ids, "labels": row["label"]} for ids, row in zip(texts["input_ids"], rows, strict=True)]


def logits_of(model: Any, rows: list[dict[str, Any]], collate: Any) -> torch.Tensor:
    """As training computes them."""
    found = []
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(rows), 109):
            found.append(model(**collate(rows[start : start + 109])).logits.float())
    return torch.cat(found)


def scores(args: argparse.Namespace) -> None:
    """Train what is not in the lines yet, seed by seed."""
    lines = Lines(args.lines)
    tokenizer = hf.AutoTokenizer.from_pretrained(args.model)
    data = {part: examples(args.glue, part, tokenizer) for part in ("train", "validation")}
    # The machine was shared: half of the set.
    data["validation"] = data["validation"][::2]
    labels = torch.tensor([row["labels"] for row in data["validation"]])
    collate = hf.DataCollatorWithPadding(tokenizer)
    for seed in args.seeds:
        floats: Any = None
        for bits in args.bits:
            for way in WAYS:
                key = {"kind": "scores", "way": way, "bits": 32 if way == "float" else bits, "seed": seed}
                if lines.has(**key) and not (way == "float" and floats is None and _is_due(lines, args, seed)):
                    continue
                begin = time.process_time()
                if way == "rounded":
                    model = copy.deepcopy(floats).merge_and_unload()
                    quantize_model(model, config_of(bits, way))
                    result = {}
                else:
                    model, result = trained(args, way, bits, seed, data["train"], collate)
                    floats = model if way == "float" else floats
                logits = logits_of(model, data["validation"], collate)
                accuracy = (logits.argmax(-1) == labels).double().mean().item()
                if way == "merged":
                    loaded = hf.AutoModelForSequenceClassification.from_pretrained(args.folder / "quantized")
                    found = logits_of(loaded, data["validation"], collate)
                    result["difference"] = (found - logits).abs().max().item()
                shutil.rmtree(args.folder, ignore_errors=True)
                line = {**key, "accuracy": accuracy, "steps": args.steps, **result}
                if not lines.has(**key):
                    lines.add({**line, "cpu_seconds": round(time.process_time() - begin, 1)})
                print(line, flush=True)


def _is_due(lines: Lines, args: argparse.Namespace, seed: int) -> bool:
    """Whether a run that stopped still needs the float model of a seed."""
    return not all(lines.has(kind="scores", way="rounded", bits=bits, seed=seed) for bits in args.bits)


def trained(
    args: argparse.Namespace, way: str, bits: int, seed: int, rows: list[dict[str, Any]], collate: Any
) -> tuple[Any, dict[str, Any]]:
    """One run of a Trainer."""
    hf.set_seed(seed)
    model = hf.AutoModelForSequenceClassification.from_pretrained(args.model)
    if way != "full":
        model = adapted(model)
    callback = MoQCallback(config_of(bits, way)) if way != "float" else None
    arguments = hf.TrainingArguments(
        str(args.folder), max_steps=args.steps, per_device_train_batch_size=16, learning_rate=RATES.get(way, 1e-3),
        warmup_steps=8, save_strategy="no", logging_steps=50, report_to="none", use_cpu=True, bf16=True,
        disable_tqdm=True, seed=seed,
    )  # fmt: skip
    trainer = hf.Trainer(
        model, arguments, train_dataset=rows, data_collator=collate, callbacks=[callback] if callback else []
    )
    trainer.train()
    if callback is None or callback.delivered is None:
        return model, {}
    done = callback.delivered
    proof = None if done.proof is None else done.proof.agrees
    return model, {"proof": proof, "mb": round(done.bytes / 1e6, 2)}


def cost(args: argparse.Namespace) -> None:
    """CPU time of a step and memory at its peak, over LoRA in float; the arms take turns."""
    torch.set_num_threads(1)
    base = classifier(None, MINILM)
    base.bert.encoder.layer = base.bert.encoder.layer[:6]
    ids = torch.randint(1000, base.config.vocab_size, (16, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(16) % 2}
    for dtype in (None, torch.bfloat16):
        arms = {}
        for way in ("float", "beside", "merged", "merged, DoRA", "full", "full, float"):
            model = copy.deepcopy(base)
            if not way.startswith("full"):
                model = adapted(model, use_dora=way.endswith("DoRA"))
            config = MoQConfig.from_dict(config_of(4, way.removesuffix(", DoRA")))
            controller = None if way.endswith("float") else MoQController(model, config)
            trained_parts = [p for p in model.parameters() if p.requires_grad]
            arms[way] = (model.train(), controller, torch.optim.AdamW(trained_parts, lr=1e-5, fused=True))

        def step(way: str, dtype: torch.dtype | None = dtype, arms: dict[str, Any] = arms) -> None:
            model, controller, optimizer = arms[way]
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            if controller is not None:
                controller.step()
            optimizer.zero_grad()

        times: dict[str, list[float]] = {way: [] for way in arms}
        for repeat in range(args.repeats + 2):
            for way in arms if repeat % 2 else reversed(arms):
                begin = time.process_time()
                step(way)
                if repeat > 1:
                    times[way].append(time.process_time() - begin)
        for way, (model, _, optimizer) in arms.items():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step(way)
            now = peak = 0
            for event in profiled.profiler.kineto_results.events():
                if event.name() == "[memory]":
                    now += event.nbytes()
                    peak = max(peak, now)
            states = [s for state in optimizer.state.values() for s in state.values() if torch.is_tensor(s)]
            kept = sum(tensor.nbytes for tensor in [*model.parameters(), *states])
            key = {"kind": "cost", "way": way, "dtype": "float32" if dtype is None else "bfloat16"}
            median = statistics.median(times[way])
            ratios = {
                "step_ms": round(1000 * median, 1),
                "ratio": round(median / statistics.median(times["float"]), 3),
                "peak_mb": round((kept + peak) / 1e6, 1),
            }
            Lines(args.lines).add({**key, **ratios})
            print({**key, **ratios}, flush=True)


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scores", "cost"])
    parser.add_argument("--model", default="MINILM")
    parser.add_argument("--glue", type=Path, default=Path("GLUE"))
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lines", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder) / "run"
        {"scores": scores, "cost": cost}[args.what](args)


if __name__ == "__main__":
    main()
