"""A causal language model's perplexity in float, rounded after training, and trained at 4, 3 and 2 bits.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --report

A small Llama is trained from scratch on the text of Python's standard library (`stdlib_text.py`). That float model of a
seed is what every other arm of the seed begins with, and all of them train for the same further steps:

- float: the model itself, no further step; "float, trained on": further steps in float.
- rounded: the float model at its bits, the same search for scales, no further step.
- GPTQ: the float model rounded by llm-compressor. It wants another version of transformers, so run `--arms GPTQ` in an
  environment that has it, after the others.
- basic QAT: at its bits from the first further step.
- MoQ: from 8 bits down to its bits within 0.3 of the further steps, period "auto".
- taught: basic QAT with the float model as its teacher, also at 8 bits.

Weights of all linear layers but the head have a scale per 32 columns; head and embedding table are float. The other
`GRIDS` are of 4 bits, without MoQ, on the smaller of the `SIZES` alone. Each run appends one line to `--output` and is
skipped where its line is there. Perplexity is per token, over each token of the
held-out modules but the first.
"""

import argparse
import copy
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import stdlib_text
from lines import Lines
from report_study import paired

ROUNDED, ON, BASIC, MOQ, TAUGHT = "rounded", "float, trained on", "basic QAT", "MoQ", "taught"
GPTQ = "GPTQ"
BITS, SEEDS = (4, 3, 2), (1, 2, 3)
NEARLY_FLOAT = 8  # Bits that show what a teacher makes of the float model itself.
# The float model of as many steps of each arm.
REFERENCES = {ROUNDED: "float", GPTQ: "float", BASIC: ON, MOQ: ON, TAUGHT: ON}
CALIBRATION = 512  # Blocks of the text for training, for GPTQ.
GRIDS: dict[str, dict[str, Any]] = {
    "": {"quantize_group_size": 32},
    "MXFP4, groups of 32": {"quantize_format": "mxfp4"},
    "NVFP4, groups of 16": {"quantize_format": "nvfp4"},
    "integers, groups of 16": {"quantize_group_size": 16, "quantize_algo": {"scale_dtype": "bfloat16"}},
}


@dataclass(frozen=True)
class Settings:
    """What runs on models of one size have in common; `rate` is of the float model, `further_rate` of the others."""

    vocabulary: int = 2048
    hidden: int = 128
    intermediate: int = 352
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 16
    steps: int = 800
    further_steps: int = 100
    rate: float = 3e-3
    further_rate: float = 1e-3
    bf16: bool = False

    def identity(self) -> dict[str, Any]:
        """Those that tell lines apart; bfloat16 only where it is used."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "further_rate" and (name, value) != ("bf16", False)
        }


# By what the tables call them.
SIZES = {
    "1.3M": Settings(),
    "10M": Settings(hidden=384, intermediate=1024, layers=5, heads=6, rate=2e-3, further_rate=5e-4, bf16=True),
}


@dataclass(frozen=True)
class Run:
    """One line of the study: an arm, at its bits on one of `GRIDS`, from a seed; `rate` is of the further steps."""

    arm: str
    bits: int
    seed: int
    rate: float
    grid: str = ""

    def config(self) -> dict[str, Any] | None:
        """What the weights are quantized with, or None for float."""
        if self.bits == 32:
            return None
        falling = self.arm == MOQ
        return {
            "quantize_bits": {"start_bits": 8 if falling else self.bits, "target_bits": self.bits},
            "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 0, "deadline": 0.3}
            if falling
            else {"quantize_period": 1, "schedule_offset": 0},
            **GRIDS[self.grid],
        }


class Study:
    """Corpus, tokenizer and blocks of tokens, made once.

    Args:
        settings: Sizes and steps.
        models: Where the float model of each seed is kept.
        corpus: None reads the standard library.
    """

    def __init__(self, settings: Settings, models: Path, corpus: stdlib_text.Corpus | None = None) -> None:
        self.settings, self.models = settings, models
        self.corpus = corpus or stdlib_text.read()
        self.tokenizer = self._tokenizer()
        self.train, self.validation = (
            self.blocks(part) for part in (self.corpus.train.values(), self.corpus.validation.values())
        )
        self.bytes = sum(len(text.encode()) for text in self.corpus.validation.values())

    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.settings.vocabulary,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(self.corpus.train.values(), trainer)
        return tokenizer

    def blocks(self, texts: Any) -> Any:
        """int64 [count, context]: each begins with the last token of the one before, so each token is predicted once.

        What does not fill a block is left out of training and of validation.
        """
        import torch

        end = self.tokenizer.token_to_id("<end>")
        tokens = torch.tensor([token for text in texts for token in (*self.tokenizer.encode(text).ids, end)])
        return tokens.unfold(0, self.settings.context, self.settings.context - 1)

    def new_model(self, seed: int) -> Any:
        """A Llama of random weights."""
        from transformers import LlamaConfig, LlamaForCausalLM, set_seed

        set_seed(seed)
        end = self.tokenizer.token_to_id("<end>")
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.settings.vocabulary,
                hidden_size=self.settings.hidden,
                intermediate_size=self.settings.intermediate,
                num_hidden_layers=self.settings.layers,
                num_attention_heads=self.settings.heads,
                max_position_embeddings=self.settings.context,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=end,
                pad_token_id=None,
            )
        )

    def float_model(self, seed: int) -> Any:
        """The float model of a seed, trained if it is not there."""
        from transformers import LlamaForCausalLM

        folder = self.models / f"float-{self.settings.hidden}-{seed}"
        if not (folder / "config.json").exists():
            model = self.new_model(seed)
            train(self, model, seed, self.settings.steps, self.settings.rate)
            model.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(folder)

    def perplexity(self, model: Any) -> dict[str, float]:
        """Per token, and the bits for each byte of the held-out text."""
        import torch

        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for block in self.validation.split(64):
                logits = model(input_ids=block).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten(), reduction="none")
                total, count = total + float(loss.double().sum()), count + loss.numel()
        # Blocks leave out a rest of less than a block.
        bits = total / math.log(2) / count * self._tokens_per_byte()
        return {"perplexity": math.exp(total / count), "bits_per_byte": bits}

    def _tokens_per_byte(self) -> float:
        tokens = sum(len(self.tokenizer.encode(text).ids) + 1 for text in self.corpus.validation.values())
        return tokens / self.bytes


def train(
    study: Study,
    model: Any,
    seed: int,
    steps: int,
    rate: float,
    config: Mapping[str, Any] | None = None,
    teacher: Any = None,
) -> Any:
    """AdamW, 5 % of the steps to warm up, cosine decay to 0, gradients clipped to norm 1; the trainer."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from moq_hf import MoQTrainer

    with tempfile.TemporaryDirectory(prefix="perplexity-") as folder:
        arguments = TrainingArguments(
            folder,
            seed=seed,
            max_steps=steps,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            weight_decay=0.1,
            adam_beta2=0.95,
            per_device_train_batch_size=study.settings.batch,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_steps=max(1, steps // 10),
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            bf16=study.settings.bf16,
        )
        rows = [{"input_ids": block, "labels": block} for block in study.train]
        trainer = MoQTrainer(model, arguments, train_dataset=rows, moq_config=config, teacher=teacher)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def execute(study: Study, run: Run) -> dict[str, Any]:
    """Train and evaluate; the line to write."""
    began, cpu = time.perf_counter(), time.process_time()
    model = study.float_model(run.seed)
    # Here, as quantizing may add scales to them.
    line: dict[str, Any] = {"steps": 0, "parameters": sum(parameter.numel() for parameter in model.parameters())}
    if run.arm == ROUNDED:
        from moq_hf import quantize_model

        quantize_model(model, run.config())
    elif run.arm == GPTQ:
        round_by_gptq(study, model, run.bits)
        line["llmcompressor"] = metadata.version("llmcompressor")
    elif run.arm != "float":
        teacher = copy.deepcopy(model) if run.arm == TAUGHT else None
        steps = study.settings.further_steps
        trainer = train(study, model, run.seed, steps, run.rate, run.config(), teacher)
        line["steps"] = trainer.state.global_step
        line["train_loss"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        if trainer.moq is not None:
            controller = trainer.moq.controller
            line["last_drop"] = controller.history[-1].step if controller.history else None
            line["layer_bits"] = sorted({layer.moq.bits for layer in controller.layers.values()})
    return {
        **identity(study, run),
        **study.perplexity(model),
        **line,
        "moq": run.config(),
        "tokens": {"train": study.train.numel(), "validation": study.validation.numel()},
        "validation_bytes": study.bytes,
        "tokenizers": metadata.version("tokenizers"),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def round_by_gptq(study: Study, model: Any, bits: int) -> None:
    """Round the layers by llm-compressor, in place: groups of 32, the full range, clipped by least squares."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import PreTrainedTokenizerFast

    chosen = torch.randperm(len(study.train), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
    blocks = study.train[chosen].tolist()
    weights = QuantizationArgs(num_bits=bits, strategy="group", group_size=32, observer="mse")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast(tokenizer_object=study.tokenizer),
        dataset=Dataset.from_dict({"input_ids": blocks, "attention_mask": [[1] * len(block) for block in blocks]}),
        recipe=GPTQModifier(config_groups={"linear": scheme}, ignore=["lm_head"]),
        max_seq_length=study.settings.context,
        num_calibration_samples=CALIBRATION,
    )


def identity(study: Study, run: Run) -> dict[str, Any]:
    """What tells a line from others."""
    own = {name: value for name, value in asdict(run).items() if value != ""}
    return {**own, "settings": study.settings.identity(), "corpus": study.corpus.digest()}


def runs(size: str, rate: float | None = None, seeds: Sequence[int] = SEEDS) -> Iterator[Run]:
    """Seed by seed, so that lines written so far compare the same seeds; `rate` None is the size's own."""
    rate = SIZES[size].further_rate if rate is None else rate
    is_small = size == next(iter(SIZES))
    for seed in seeds:
        yield from (Run("float", 32, seed, 0.0), Run(ON, 32, seed, rate))
        yield from (Run(ROUNDED, NEARLY_FLOAT, seed, 0.0), Run(TAUGHT, NEARLY_FLOAT, seed, rate))
        for bits in BITS:
            yield from (Run(arm, bits, seed, 0.0) for arm in (ROUNDED, GPTQ))
            yield from (Run(arm, bits, seed, rate) for arm in (BASIC, MOQ, TAUGHT) if is_small or arm != MOQ)
        for grid in filter(None, GRIDS if is_small else ()):
            yield Run(ROUNDED, 4, seed, 0.0, grid)
            yield from (Run(arm, 4, seed, rate, grid) for arm in (BASIC, TAUGHT))


class Found:
    """The values of the lines that count, by arm and bits, then seed.

    Args:
        lines: Those of the output file.
        size: One of `SIZES`; lines of other settings do not count.
        rate: Of the further steps; None is the size's own.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], size: str, rate: float | None = None) -> None:
        counted = [line for line in lines if line["settings"] == SIZES[size].identity() and line["seed"] in SEEDS]
        self.lines: dict[tuple[str, int, str], dict[int, Mapping[str, Any]]] = {}
        for run in runs(size, rate, SEEDS[:1]):
            wanted = (run.arm, run.bits, run.rate, run.grid)
            own = [
                line for line in counted if (line["arm"], line["bits"], line["rate"], line.get("grid", "")) == wanted
            ]
            self.lines[run.arm, run.bits, run.grid] = {line["seed"]: line for line in own}

    def of(self, arm: str, bits: int, grid: str = "") -> dict[int, float]:
        """Perplexity by seed."""
        return {seed: line["perplexity"] for seed, line in self.lines.get((arm, bits, grid), {}).items()}

    def shares(self, arm: str, bits: int, grid: str = "") -> dict[int, float]:
        """Perplexity above that of the float model of as many steps, in percent of it, by seed."""
        reference = self.of(REFERENCES[arm], 32)
        ours = self.of(arm, bits, grid)
        return {seed: 100 * value / reference[seed] - 100 for seed, value in ours.items() if seed in reference}

    def rows(self) -> Iterator[list[str]]:
        """The differences to the float model of as many steps, a grid a line."""
        for bits, grid in dict.fromkeys((bits, grid) for _, bits, grid in self.lines if bits != 32):
            name = grid.replace("groups of ", "") or str(bits)
            shares = [self.shares(arm, bits, grid) for arm in REFERENCES]
            yield [name, *(paired(each, dict.fromkeys(each, 0.0)) for each in shares)]


def summary(lines: Sequence[Mapping[str, Any]], rate: float | None = None) -> str:
    """A Markdown table of the differences to the float model of as many steps."""
    rows = [["weights", "bits", *REFERENCES]]
    rows.append(["---"] * len(rows[0]))
    for size in SIZES:
        rows.extend(["" if index else size, *row] for index, row in enumerate(Found(lines, size, rate).rows()))
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--rate", type=float, help="learning rate of the further steps; default: the size's own")
    arms = ["float", ON, ROUNDED, BASIC, MOQ, TAUGHT]
    parser.add_argument("--arms", nargs="+", choices=[*arms, GPTQ], default=arms)
    parser.add_argument("--bits", nargs="+", type=int, default=[NEARLY_FLOAT, *BITS])
    parser.add_argument("--model_dir", type=Path, default=Path("runs/perplexity"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "perplexity.jsonl")
    parser.add_argument("--report", action="store_true", help="print the table of the lines that are there, and stop")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--further_steps", type=int)
    args = parser.parse_args(argv)
    lines = Lines(args.output)
    if args.report:
        print(summary(lines.lines, args.rate))
        return
    import torch

    torch.set_num_threads(1)
    logging.getLogger("moq_hf").setLevel(logging.ERROR)
    given = {name: getattr(args, name) for name in ("steps", "further_steps") if getattr(args, name) is not None}
    for size in args.sizes:
        study = Study(replace(SIZES[size], **given), args.model_dir)
        for run in runs(size, args.rate, args.seeds):
            is_wanted = run.arm in args.arms and run.bits in (32, *args.bits)
            # A line of no grid's name has none.
            if is_wanted and not lines.has(**{"grid": None, **identity(study, run)}):
                line = execute(study, run)
                lines.add(line)
                print(run, round(line["perplexity"], 3), line["seconds"], flush=True)


if __name__ == "__main__":
    main()
