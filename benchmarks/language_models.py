"""A pretrained language model, fine-tuned on school problems (GSM8K): perplexity rounded, by GPTQ, and trained.

    python benchmarks/language_models.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data_dir gsm8k

`--data_dir` holds `train.jsonl` and `test.jsonl` of GSM8K. Problems follow one
another in blocks of 128 tokens; the perplexity is per token of held-out problems, questions included. All arms of a
seed begin with the pretrained model and take as many steps, half of them in float:

- float: fine-tuned in float, then as many steps again.
- rounded, GPTQ: that float model. GPTQ reads 128 blocks of what was trained on.
- trained: the float model after half of its steps, then quantized from the first step of the other half.
- trained from GPTQ: the same, where training starts from weights that GPTQ has rounded.
- at the end, from GPTQ: the second half stays in float for `LATE` of its steps.
- taught, taught from GPTQ: trained, trained from GPTQ, with the model that they start from as the teacher.
- scales: the codes that GPTQ has found stay, and the scales alone are trained, with that teacher.

Each run appends one line to `--output` and is skipped where its line is there.
"""

import argparse
import copy
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lines import Lines
from perplexity import markdown, train

FLOAT, ROUNDED, GPTQ = "float", "rounded", "GPTQ"
TRAINED, TRAINED_FROM_GPTQ, AT_THE_END = "trained", "trained from GPTQ", "at the end, from GPTQ"
TAUGHT, TAUGHT_FROM_GPTQ, SCALES = "taught", "taught from GPTQ", "scales"
ARMS = (FLOAT, ROUNDED, GPTQ, TRAINED, TRAINED_FROM_GPTQ, AT_THE_END, TAUGHT, TAUGHT_FROM_GPTQ, SCALES)
FROM_GPTQ = (TRAINED_FROM_GPTQ, AT_THE_END, TAUGHT_FROM_GPTQ, SCALES)
LATE = 0.8
CALIBRATION = 128  # Blocks for GPTQ.
FORMS: dict[str, dict[str, Any]] = {
    "4": {"bits": 4, "group_size": 32, "embeddings": None},
    "w4a8": {"bits": 4, "group_size": 32, "embeddings": None, "activations": {"bits": 8, "scale": "per_token"}},
    "w4a4": {
        "bits": 4,
        "group_size": 32,
        "embeddings": None,
        "activations": {"bits": 4, "scale": "per_token", "wide_bits": 8},
    },
    "3": {"bits": 3, "group_size": 32, "embeddings": None},
    "2": {"bits": 2, "group_size": 32, "embeddings": None},
    "4 per channel": {"bits": 4, "embeddings": None},
}
# Chosen before the first run, by what the classifiers of glue_plans.py took; none was searched.
FLOAT_RATE = 1e-4
RATES = {"4": 1e-4, "w4a8": 1e-4, "w4a4": 1e-4, "3": 2e-4, "2": 3e-4}
SCALES_RATE = 1e-3
# What matters most comes first, as a run takes minutes.
PLAN = (
    *((ROUNDED, form) for form in ("4", "2", "3", "w4a8", "w4a4", "4 per channel")),
    *((TAUGHT, form) for form in ("2", "4", "w4a4")),
    *((GPTQ, form) for form in ("2", "4", "3")),
    (SCALES, "2"),
    (TAUGHT, "3"),
    *((TRAINED, form) for form in ("4", "2")),
    (TAUGHT_FROM_GPTQ, "2"),
    (TAUGHT, "w4a8"),
    *((arm, form) for arm in (TRAINED_FROM_GPTQ, AT_THE_END) for form in ("4", "2", "3")),
    *((arm, "w4a4") for arm in (GPTQ, TRAINED)),
    *((arm, form) for form in ("3", "4") for arm in (TAUGHT_FROM_GPTQ, SCALES)),
)


@dataclass(frozen=True)
class Settings:
    """Sizes of a study: `steps` of each half, `batch` blocks of `context` tokens; how many blocks are held out."""

    steps: int = 40
    batch: int = 4
    context: int = 128
    held_out: int = 64
    problems: int = 32
    bf16: bool = False


class Study:
    """Model, tokenizer and blocks of tokens.

    Args:
        model: Folder or name of the pretrained model.
        data_dir: Folder of `train.jsonl` and `test.jsonl`.
        settings: Sizes.
        models: Where the float models of each seed are kept.
    """

    def __init__(self, model: str, data_dir: Path, settings: Settings, models: Path) -> None:
        from transformers import AutoTokenizer

        self.name, self.settings, self.models = model, settings, models
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        rows, self.test = (
            [json.loads(line) for line in (data_dir / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
            for split in ("train", "test")
        )
        self.train = self._blocks(rows)
        self.held_out = self._blocks(self.test)[: settings.held_out]

    def _blocks(self, rows: Sequence[Mapping[str, str]]) -> Any:
        """int64 [count, context]: each begins with the last token of the one before, so each is predicted once."""
        import torch

        texts = [f"{row['question']}\n{row['answer']}" for row in rows]
        end = self.tokenizer.eos_token_id
        tokens = [token for ids in self.tokenizer(texts)["input_ids"] for token in (*ids, end)]
        return torch.tensor(tokens).unfold(0, self.settings.context, self.settings.context - 1)

    def float_model(self, seed: int, halves: int) -> Any:
        """The pretrained model after one or two halves of its steps in float; trained if it is not there."""
        import torch
        from transformers import AutoModelForCausalLM

        if halves == 0:
            return AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32)
        folder = self.models / f"float-{seed}-{halves}"
        if not (folder / "config.json").exists():
            model = self.float_model(seed, halves - 1)
            train(self, model, order(seed, halves), self.settings.steps, FLOAT_RATE)
            model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def losses(self, model: Any) -> list[float]:
        """The mean cross entropy of each held-out block, in nats for each token."""
        import torch

        model.eval()
        found: list[float] = []
        with torch.no_grad():
            for block in self.held_out.split(8):
                logits = model(input_ids=block).logits[:, :-1].transpose(1, 2)
                loss = torch.nn.functional.cross_entropy(logits, block[:, 1:], reduction="none")
                found.extend(loss.double().mean(1).tolist())
        return found

    def solved(self, model: Any) -> int:
        """How many of the first `problems` of the test split end with the right number, by greedy decoding."""
        import torch

        model.eval()
        self.tokenizer.padding_side = "left"
        rows = self.test[: self.settings.problems]
        batch = self.tokenizer([f"{row['question']}\n" for row in rows], return_tensors="pt", padding=True)
        end = self.tokenizer.eos_token_id
        with torch.no_grad():
            tokens = model.generate(**batch, max_new_tokens=160, do_sample=False, eos_token_id=end, pad_token_id=end)
        texts = self.tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(answer(text) == answer(row["answer"]) for text, row in zip(texts, rows, strict=True))


def answer(text: str) -> str | None:
    r"""What GSM8K writes after four hashes, without thousands' commas; None if there is nothing.

    >>> answer("2 * 600 = 1200\n#### 1,200")
    '1200'
    """
    _, mark, found = text.partition("####")
    return found.split("\n")[0].strip().replace(",", "") if mark else None


def order(seed: int, half: int) -> int:
    """The seed of a half's order of blocks: the second half does not repeat the first."""
    return 100 * half + seed


def execute(study: Study, arm: str, form: str, seed: int) -> dict[str, Any]:
    """Train and evaluate; the line to write."""
    from moq_hf import quantize_model

    began, cpu = time.perf_counter(), time.process_time()
    line: dict[str, Any] = {}
    if arm in (FLOAT, ROUNDED, GPTQ):
        model = study.float_model(seed, 2)
        if arm != FLOAT:
            # In small batches, of which the first is enough to check what GPTQ computes from memory.
            batches = study.train[:CALIBRATION].split(study.settings.batch)
            examples = [{"input_ids": batch} for batch in batches] if arm == GPTQ else None
            quantize_model(model, FORMS[form], inputs=examples, gptq=CALIBRATION if arm == GPTQ else 0)
    else:
        model = study.float_model(seed, 1)
        teacher = copy.deepcopy(model) if arm in (TAUGHT, TAUGHT_FROM_GPTQ, SCALES) else None
        config = dict(FORMS[form])
        if arm in FROM_GPTQ:
            config["gptq"] = CALIBRATION
        if arm == AT_THE_END:
            config["offset"] = LATE
        if arm == SCALES:
            config["train"] = "scales"
        line["rate"] = SCALES_RATE if arm == SCALES else RATES[form]
        trainer = train(study, model, order(seed, 2), study.settings.steps, line["rate"], config, teacher)
        line["train_loss"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        model = trainer.model
    losses = study.losses(model)
    return {
        **identity(study, arm, form, seed),
        "perplexity": math.exp(sum(losses) / len(losses)),
        "losses": [round(loss, 4) for loss in losses],
        **({"solved": study.solved(model)} if arm == FLOAT else {}),
        **line,
        "form_config": FORMS.get(form),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def identity(study: Study, arm: str, form: str, seed: int) -> dict[str, Any]:
    """What tells a line from others."""
    settings = asdict(study.settings)
    return {"model": Path(study.name).name, "arm": arm, "form": form, "seed": seed, "settings": settings}


def runs(seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Arm, form and seed; what can be compared first comes first."""
    for seed in seeds:
        yield FLOAT, "", seed
        for arm, form in PLAN:
            yield arm, form, seed


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table: the perplexity of each arm and form, a figure for each seed; float has its own line."""
    quantized = [arm for arm in ARMS[1:] if any(line["arm"] == arm for line in lines)]
    rows = [["weights; inputs", *quantized], ["---"] * (len(quantized) + 1)]
    rows.append([FLOAT, cell(lines, FLOAT, ""), *[""] * (len(quantized) - 1)])
    for form in FORMS:
        cells = [cell(lines, arm, form) for arm in quantized]
        if any(cells):
            rows.append([form_in_words(form), *cells])
    return markdown(rows)


def form_in_words(form: str) -> str:
    """What the table calls a form.

    >>> form_in_words("4 per channel")
    '4 bits per channel'
    """
    bits, _, rest = form.partition(" ")
    return f"{bits} bits {rest}".strip() if bits.isdigit() else f"`{form}`"


def cell(lines: Sequence[Mapping[str, Any]], arm: str, form: str) -> str:
    """The perplexities of an arm at a form, by seed."""
    found = {line["seed"]: line["perplexity"] for line in lines if (line["arm"], line["form"]) == (arm, form)}
    return "; ".join(f"{found[seed]:.2f}" if found[seed] < 100 else f"{found[seed]:.0f}" for seed in sorted(found))


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data_dir", type=Path, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model_dir", type=Path, default=Path("runs/language-models"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "language_models.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of the lines that are there, and stop")
    for name, value in asdict(Settings()).items():
        if name != "bf16":
            parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args(argv)
    lines = Lines(args.output)
    if args.report:
        print(summary(lines.lines))
        return
    if args.data_dir is None:
        parser.error("--data_dir: the folder of GSM8K's train.jsonl and test.jsonl")
    import torch

    torch.set_num_threads(args.threads)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    study = Study(args.model, args.data_dir, settings, args.model_dir)
    for arm, form, seed in runs(args.seeds):
        is_wanted = arm in args.arms and form in ("", *args.forms)
        if is_wanted and not lines.has(**identity(study, arm, form, seed)):
            line = execute(study, arm, form, seed)
            lines.add(line)
            print(arm, form, seed, round(line["perplexity"], 3), line["seconds"], flush=True)


if __name__ == "__main__":
    main()
