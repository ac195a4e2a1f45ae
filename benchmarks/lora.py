"""LoRA at few bits: on the grid that is delivered, beside a quantized base, merged and then rounded; and full QAT.

    python benchmarks/lora.py scores --model MINILM --data GLUE
    python benchmarks/lora.py cost

`scores` goes on where it stopped. MINILM is all-MiniLM-L6-v2, of which the head is new; GLUE is a folder with `sst2`,
which has train.jsonl and validation.jsonl. LoRA has rank 16 on the encoder's linear layers, and the head is trained in
every way. "merged" is `lora="merged"`; "beside" is the default; "rounded" trains LoRA in float, merges it, and rounds
with the same grid and search; "full" trains all weights. Each has its own learning rate, the better of two at its bits
with a seed that is not scored again. `difference` is the largest one between the logits of all validation rows of the
model in memory and of what was delivered, loaded by transformers, and PEFT where the adapter lies beside it.
"""

import argparse
import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from classifiers import classifier
from datasets import load_dataset
from lines import Lines
from step_time import Arm, search_seconds
from torch.profiler import ProfilerActivity, profile

from moq_hf import MoQCallback, MoQConfig, quantize_model, save_quantized
from moq_hf.packed.files import ADAPTER

RESULT = Path(__file__).parent / "results" / "lora.jsonl"
RATES = dict.fromkeys(("merged", "beside", "rounded"), (5e-4, 1.5e-3)) | {"full": (1e-4, 2e-4)}
TRIED = 10
SEEDS = (11, 12, 13)


def config_of(way: str, bits: int) -> dict[str, Any]:
    """At its bits from the first step on, a scale for each row."""
    lora = "merged" if way == "merged" else None
    return {"quantize_bits": {"target_bits": bits}, "quantize_algo": {"range": "full"}, "lora": lora}


def adapted(model: Any, **more: Any) -> Any:
    """The model with LoRA in its encoder."""
    targets = r".*encoder.*\.(query|key|value|dense)"
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=targets, **more)
    )


class Study:
    """Runs on SST-2.

    Args:
        args: Of the command line.
        place: Folder for what is delivered.
    """

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.args, self.place = args, place
        tokenizer = hf.AutoTokenizer.from_pretrained(args.model)
        self.collate = hf.DataCollatorWithPadding(tokenizer)
        files = {part: str(args.data / "sst2" / f"{part}.jsonl") for part in ("train", "validation")}
        rows = load_dataset("json", data_files=files)
        self.rows = rows.map(lambda row: tokenizer(row["sentence"], truncation=True, max_length=32))
        self.rows = self.rows.select_columns(["input_ids", "attention_mask", "label"])
        self.labels = torch.tensor(self.rows["validation"]["label"])
        # Trained once for all bits, by seed and learning rate.
        self.merged: dict[tuple[int, float], Any] = {}

    def logits(self, model: Any) -> torch.Tensor:
        """The logits of all validation rows."""
        rows = list(self.rows["validation"])
        parts = [self.collate(rows[start : start + 109]) for start in range(0, len(rows), 109)]
        with torch.no_grad():
            return torch.cat([model.eval()(**part).logits for part in parts])

    def trained(self, way: str, seed: int, rate: float, *callbacks: MoQCallback) -> Any:
        """A model after one run of the Trainer."""
        hf.set_seed(seed)
        model = classifier(self.args.model)
        if way != "full":
            model = adapted(model)
        arguments = hf.TrainingArguments(
            str(self.place), max_steps=self.args.steps, per_device_train_batch_size=16, learning_rate=rate, seed=seed,
            warmup_steps=0.1, save_strategy="no", report_to="none", use_cpu=True, bf16=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = hf.Trainer(
            model, arguments, train_dataset=self.rows["train"], data_collator=self.collate, callbacks=list(callbacks)
        )
        trainer.train()
        # It leaves its autocast around the model.
        return trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    def run(self, way: str, bits: int, seed: int, rate: float) -> dict[str, Any]:
        """Train, deliver, load, and score both."""
        config, folder = config_of(way, bits), self.place / "quantized"
        if way == "rounded":
            if (seed, rate) not in self.merged:
                self.merged[seed, rate] = self.trained(way, seed, rate).merge_and_unload()
            model = quantize_model(copy.deepcopy(self.merged[seed, rate]), config)
            save_quantized(model, folder)
        else:
            model = self.trained(way, seed, rate, MoQCallback(config))
        loaded = classifier(str(folder))
        if way == "beside":
            loaded = peft.PeftModel.from_pretrained(loaded, folder / ADAPTER)
        found, delivered = self.logits(model), self.logits(loaded)
        accuracy = (delivered.argmax(-1) == self.labels).double().mean().item()
        difference = (delivered - found).abs().max().item()
        return {"accuracy": round(100 * accuracy, 3), "difference": difference, "steps": self.args.steps}


def scores(args: argparse.Namespace, place: Path) -> None:
    """All runs that have no line yet."""
    lines, study = Lines(args.out, "peft"), Study(args, place)

    def accuracy(way: str, bits: int, seed: int, rate: float) -> float:
        key = {"way": way, "bits": bits, "seed": seed, "rate": rate}
        if not lines.has(**key):
            lines.add({**key, **study.run(**key)})
        return next(line["accuracy"] for line in lines.lines if key.items() <= line.items())

    for seed in SEEDS:
        for bits in (2, 3, 4):
            for way, rates in RATES.items():
                tried = {rate: accuracy(way, bits, TRIED, rate) for rate in rates}
                accuracy(way, bits, seed, max(tried, key=lambda rate: tried[rate]))


def cost(args: argparse.Namespace, place: Path) -> None:
    """CPU time of a training step of 16 rows of 64 tokens, in turn, and the most memory that one holds."""
    torch.manual_seed(0)
    lines, base = Lines(args.out, "peft"), classifier(None)
    ids = torch.randint(1000, base.config.vocab_size, (16, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(16) % 2}
    arms = {}
    for way in ("float", "beside", "merged", "merged DoRA", "full"):
        model = copy.deepcopy(base)
        if way != "full":
            model = adapted(model, use_dora="DoRA" in way)
        config = None if way == "float" else MoQConfig.from_dict(config_of(way.split()[0], 4))
        arms[way] = Arm(model, config, torch.bfloat16)
    times = [{way: arm.step([batch]) for way, arm in arms.items()} for _ in range(args.repeats)]
    for way, arm in arms.items():
        states = [tensor for state in arm.optimizer.state.values() for tensor in state.values()]
        held = sum(tensor.nbytes for tensor in [*arm.model.parameters(), *states])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            arm.step([batch])
        now = peak = 0
        for event in profiled.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        median, search = statistics.median(own[way] for own in times[2:]), search_seconds(arm)
        found = {"step_ms": round(1000 * median, 1), "search_ms": round(1000 * search, 1)}
        lines.add({"cost": way, **found, "peak_mb": round((held + peak) / 1e6, 1)})


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scores", "cost"])
    parser.add_argument("--model", help="a folder or name of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="a folder of GLUE")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        {"scores": scores, "cost": cost}[args.what](args, Path(place))


if __name__ == "__main__":
    main()
