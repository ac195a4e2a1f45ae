"""LoRA at few bits: on the grid that is delivered, beside a quantized base, merged and then rounded; and full QAT.

    python benchmarks/lora.py sst2 --model MINILM --data GLUE
    python benchmarks/lora.py sft
    python benchmarks/lora.py dpo
    python benchmarks/lora.py cost

All but `cost` go on where they stopped. "merged" is `lora="merged"`; "beside" is the default; "rounded" trains LoRA in
float, merges it, and rounds with the same grid and search; "full" trains all weights. LoRA has rank 16 on all linear
layers that are quantized. Each way has its own learning rate, the better of two at 2 bits, "rounded" at its bits, with
a seed that is not scored again. `difference` is the largest one between all held-out logits of the model in memory and
of what was delivered, loaded by transformers, and PEFT where the adapter lies beside it.

- sst2: MINILM is all-MiniLM-L6-v2, of which the head is new, and trained in every way; GLUE is a folder with `sst2`,
  which has train.jsonl and validation.jsonl. A scale for each row.
- sft: TRL's SFTTrainer. The Llama of `perplexity.py` learned docstrings and comments; here it learns the ends of
  modules of Python's standard library. Perplexity of modules that are held out. Groups of 32.
- dpo: TRL's DPOTrainer. The same Llama learns to prefer 16 words of its docstrings to the same ones of which two
  neighbors are swapped. Share of pairs of held-out modules where the right one is more probable. Groups of 32.
"""

import argparse
import copy
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import perplexity
import stdlib_text
import torch
import transformers as hf
import trl
from classifiers import classifier
from datasets import Dataset, load_dataset
from lines import Lines
from step_time import Arm, search_seconds
from torch.profiler import ProfilerActivity, profile

from moq_hf import MoQCallback, MoQConfig, quantize_model, save_quantized
from moq_hf.packed.files import ADAPTER

RESULT = Path(__file__).parent / "results" / "lora.jsonl"
TRIED = 10
SEEDS = (11, 12, 13)


def config_of(way: str, bits: int, **grid: Any) -> dict[str, Any]:
    """At its bits from the first step on."""
    lora = "merged" if way == "merged" else None
    return {"quantize_bits": {"target_bits": bits}, "quantize_algo": {"range": "full"}, "lora": lora, **grid}


def rates_of(lora: tuple[float, float], full: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """The two learning rates of each way."""
    return {"merged": lora, "beside": lora, "rounded": lora, "full": full}


def adapted(
    model: Any, kind: str = "SEQ_CLS", targets: str = r".*encoder.*\.(query|key|value|dense)", **more: Any
) -> Any:
    """The model with LoRA in its linear layers."""
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type=kind, r=16, lora_alpha=32, target_modules=targets, **more)
    )


class Study:
    """Runs on SST-2.

    Args:
        args: Of the command line.
        place: Folder for what is delivered.
    """

    metric, best = "accuracy", max
    rates = rates_of((5e-4, 1.5e-3), (1e-4, 2e-4))
    steps, batch, grid = 100, 16, {}
    load: Callable[[str], Any] = staticmethod(classifier)
    adapted = staticmethod(adapted)

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.place, self.model = place, args.model
        self.steps = args.steps or self.steps
        # Trained once for all bits, by seed and learning rate.
        self.merged: dict[tuple[int, float], Any] = {}
        self.read(args)

    def read(self, args: argparse.Namespace) -> None:
        """The rows."""
        tokenizer = hf.AutoTokenizer.from_pretrained(args.model)
        self.collate = hf.DataCollatorWithPadding(tokenizer)
        files = {part: str(args.data / "sst2" / f"{part}.jsonl") for part in ("train", "validation")}
        rows = load_dataset("json", data_files=files)
        self.rows = rows.map(lambda row: tokenizer(row["sentence"], truncation=True, max_length=32))
        self.rows = self.rows.select_columns(["input_ids", "attention_mask", "label"])
        self.labels = torch.tensor(self.rows["validation"]["label"])

    def logits(self, model: Any) -> torch.Tensor:
        """Those of all validation rows."""
        rows = list(self.rows["validation"])
        parts = [self.collate(rows[start : start + 109]) for start in range(0, len(rows), 109)]
        with torch.no_grad():
            return torch.cat([model.eval()(**part).logits for part in parts])

    def scored(self, logits: torch.Tensor) -> dict[str, float]:
        """In percent."""
        return {"accuracy": round(100 * (logits.argmax(-1) == self.labels).double().mean().item(), 3)}

    def trainer(self, model: Any, arguments: dict[str, Any], callbacks: Sequence[Any]) -> Any:
        """What trains a model."""
        args = hf.TrainingArguments(**arguments)
        return hf.Trainer(
            model, args, train_dataset=self.rows["train"], data_collator=self.collate, callbacks=[*callbacks]
        )

    def trained(self, way: str, seed: int, rate: float, *callbacks: MoQCallback) -> Any:
        """A model after one run of the Trainer."""
        hf.set_seed(seed)
        model = self.load(self.model)
        if way != "full":
            model = self.adapted(model)
        arguments = dict(
            output_dir=str(self.place), max_steps=self.steps, per_device_train_batch_size=self.batch,
            learning_rate=rate, seed=seed, warmup_steps=0.1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = self.trainer(model, arguments, callbacks)
        trainer.train()
        # It leaves its autocast around the model.
        return trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    def run(self, way: str, bits: int, seed: int, rate: float) -> dict[str, Any]:
        """Train, deliver, load, and score what was loaded."""
        config, folder = config_of(way, bits, **self.grid), self.place / "quantized"
        if way == "rounded":
            if (seed, rate) not in self.merged:
                merged = self.trained(way, seed, rate).merge_and_unload()
                # TRL leaves one that would call this model in its copies too.
                vars(merged).pop("forward", None)
                self.merged[seed, rate] = merged
            model = quantize_model(copy.deepcopy(self.merged[seed, rate]), config)
            save_quantized(model, folder)
        else:
            model = self.trained(way, seed, rate, MoQCallback(config))
        loaded = self.load(str(folder))
        if way == "beside":
            loaded = peft.PeftModel.from_pretrained(loaded, folder / ADAPTER)
        found, delivered = self.logits(model), self.logits(loaded)
        difference = (delivered - found).abs().max().item()
        return {**self.scored(delivered), "difference": difference, "steps": self.steps}


class Sft(Study):
    """Runs of TRL's SFTTrainer on sources."""

    metric, best = "perplexity", min
    rates = rates_of((5e-3, 1e-2), (1e-3, 3e-3))
    steps, batch, grid = 40, 8, {"quantize_group_size": 32}
    load = hf.AutoModelForCausalLM.from_pretrained
    adapted = staticmethod(partial(adapted, kind="CAUSAL_LM", targets="all-linear"))

    def read(self, args: argparse.Namespace) -> None:
        """The language model, its tokenizer and the texts."""
        study = perplexity.Study(perplexity.Settings(), args.model_dir)
        study.float_model(1)
        self.model = str(args.model_dir / "float-1")
        self.tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=study.tokenizer, eos_token="<end>", pad_token="<end>"
        )
        self.texts(study)

    def texts(self, study: perplexity.Study) -> None:
        """Rows to train on, and tokens that are held out, with a label for each token that counts."""
        parts: tuple[list[str], list[str]] = ([], [])
        for name, source in stdlib_text.sources():
            parts[stdlib_text.is_held_out(name)].append(source[-2000:])
        train, held_out = (study.blocks(part) for part in parts)
        self.rows = Dataset.from_dict({"input_ids": train.tolist()})
        self.ids = self.labels = held_out[:: len(held_out) // 150]

    def logits(self, model: Any) -> torch.Tensor:
        """Those of all tokens that are held out."""
        with torch.no_grad():
            return torch.cat([model.eval()(input_ids=ids).logits for ids in self.ids.split(50)])

    def losses(self, logits: torch.Tensor) -> torch.Tensor:
        """Of each token in nats, 0 where it does not count."""
        return torch.nn.functional.cross_entropy(logits[:, :-1].mT, self.labels[:, 1:], reduction="none")

    def scored(self, logits: torch.Tensor) -> dict[str, float]:
        """Per token."""
        return {"perplexity": round(self.losses(logits).double().mean().exp().item(), 4)}

    def trainer(self, model: Any, arguments: dict[str, Any], callbacks: Sequence[Any]) -> Any:
        """What trains a model."""
        args = trl.SFTConfig(**arguments, max_length=128, gradient_checkpointing=False)
        return trl.SFTTrainer(
            model, args=args, train_dataset=self.rows, processing_class=self.tokenizer, callbacks=[*callbacks]
        )


class Dpo(Sft):
    """Runs of TRL's DPOTrainer on pairs of docstrings."""

    metric, best = "accuracy", max
    rates = rates_of((5e-4, 1.5e-3), (1e-4, 3e-4))
    steps = 30

    def texts(self, study: perplexity.Study) -> None:
        """Rows to train on, and tokens that are held out, with a label for each token that counts."""
        rows = self.pairs(study.corpus.train.values())
        random.Random(0).shuffle(rows)
        self.rows = Dataset.from_list(rows[:640])
        held_out = self.pairs(study.corpus.validation.values())
        held_out = held_out[:: len(held_out) // 200]
        texts = [row["prompt"] + row[which] for which in ("chosen", "rejected") for row in held_out]
        found = self.tokenizer(texts, padding=True, return_tensors="pt")
        starts = torch.tensor([len(self.tokenizer(row["prompt"]).input_ids) for row in held_out * 2])
        counts = (torch.arange(found.input_ids.shape[1]) >= starts[:, None]) & found.attention_mask.bool()
        self.ids, self.labels = found.input_ids, found.input_ids.where(counts, -100)

    def pairs(self, texts: Any) -> list[dict[str, str]]:
        """16 words, the 16 after them, and these with two neighbors swapped."""
        source, rows = random.Random(0), []
        for text in texts:
            words = text.split()
            for start in range(0, len(words) - 31, 32):
                prompt, right = words[start : start + 16], words[start + 16 : start + 32]
                place, wrong = source.randrange(15), [*right]
                wrong[place : place + 2] = wrong[place : place + 2][::-1]
                # Rulers and tables of characters have long words.
                if wrong != right and len(" ".join(prompt + right)) < 240:
                    chosen, rejected = (" " + " ".join(each) for each in (right, wrong))
                    rows.append({"prompt": " ".join(prompt), "chosen": chosen, "rejected": rejected})
        return rows

    def scored(self, logits: torch.Tensor) -> dict[str, float]:
        """In percent, and by how many nats the right one is more probable."""
        right, wrong = self.losses(logits).double().sum(1).chunk(2)
        margin = round((wrong - right).mean().item(), 4)
        return {"accuracy": round(100 * (right < wrong).double().mean().item(), 3), "margin": margin}

    def trainer(self, model: Any, arguments: dict[str, Any], callbacks: Sequence[Any]) -> Any:
        """What trains a model."""
        args = trl.DPOConfig(**arguments, max_length=128, gradient_checkpointing=False)
        # With LoRA it is the base without adapters.
        reference = None if isinstance(model, peft.PeftModel) else copy.deepcopy(model)
        return trl.DPOTrainer(
            model, reference, args=args, train_dataset=self.rows, processing_class=self.tokenizer,
            callbacks=[*callbacks],
        )  # fmt: skip


STUDIES = {"sst2": Study, "sft": Sft, "dpo": Dpo}


def scores(args: argparse.Namespace, place: Path) -> None:
    """All runs that have no line yet."""
    lines, study = Lines(args.out, "peft", "trl"), STUDIES[args.what](args, place)

    def score(way: str, bits: int, seed: int, rate: float) -> float:
        key = {"task": args.what, "way": way, "bits": bits, "seed": seed, "rate": rate}
        if not lines.has(**key):
            lines.add({**key, **study.run(way, bits, seed, rate)})
        return next(line[study.metric] for line in lines.lines if key.items() <= line.items())

    for seed, bits, way in itertools.product(args.seeds, args.bits, study.rates):
        # Rounding anew is cheap, training is not.
        tried = {rate: score(way, bits if way == "rounded" else 2, TRIED, rate) for rate in study.rates[way]}
        score(way, bits, seed, study.best(tried, key=lambda rate: tried[rate]))


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
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*STUDIES, "cost"])
    parser.add_argument("--model", help="a folder or name of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="a folder of GLUE")
    parser.add_argument("--steps", type=int, help="those of each task if it is left out")
    parser.add_argument("--model_dir", type=Path, default=Path("runs/perplexity"), help="of `perplexity.py`")
    parser.add_argument("--bits", type=int, nargs="+", default=(2, 4, 3))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        (cost if args.what == "cost" else scores)(args, Path(place))


if __name__ == "__main__":
    main()
