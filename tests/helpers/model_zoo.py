"""Tiny models of many families, each on the tasks that transformers has a class for, and what MoQ makes of them.

`python tests/helpers/model_zoo.py`, at the root of the repository, trains all of them and renews the tables in
docs/reference/support.md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import support
import torch
import transformers
import transformers as hf
from stranger import generated_by, outputs_of, tied_weights
from torch import nn

from moq_hf import MoQCallback, verify_quantized
from moq_hf.model.convert import quant_layers
from moq_hf.model.inventory import LINEARS
from moq_hf.weight_matrix import is_experts

CONFIG: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 4,
}
# Long enough for three drops of precision and three steps at the target.
STEPS, ROWS, LENGTH, WORDS = 6, 4, 8, 60
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
ENDS = {"bos_token_id": 2, "eos_token_id": 1}
SHORT = {"vocab_size": WORDS, "pad_token_id": 0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "BERT": lambda: hf.BertConfig(**TEXT),
    "RoBERTa": lambda: hf.RobertaConfig(**TEXT, **ENDS),
    "DistilBERT": lambda: hf.DistilBertConfig(**SHORT, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "ELECTRA": lambda: hf.ElectraConfig(**TEXT, embedding_size=16),
    "DeBERTa-v2": lambda: hf.DebertaV2Config(
        **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], pooler_hidden_size=32
    ),
    "ALBERT": lambda: hf.AlbertConfig(**TEXT, **ENDS, embedding_size=16),
    "MPNet": lambda: hf.MPNetConfig(**TEXT, **ENDS),
    "XLM-R": lambda: hf.XLMRobertaConfig(**TEXT, **ENDS),
    "ModernBERT": lambda: hf.ModernBertConfig(
        **TEXT, **ENDS, cls_token_id=2, sep_token_id=1, local_attention=4, global_attn_every_n_layers=2
    ),
    "ViT": lambda: hf.ViTConfig(**SIZES, image_size=16, patch_size=8),
    "GPT-2": lambda: hf.GPT2Config(**SHORT, **ENDS, n_positions=32, n_embd=32, n_layer=2, n_head=4),
    "Llama": lambda: hf.LlamaConfig(**TEXT, **ENDS, num_key_value_heads=2, tie_word_embeddings=True),
    "T5": lambda: hf.T5Config(
        **SHORT, d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8, eos_token_id=1, decoder_start_token_id=0
    ),
}
TASKS = {
    "sequence classification": "SequenceClassification",
    "token classification": "TokenClassification",
    "question answering": "QuestionAnswering",
    "multiple choice": "MultipleChoice",
    "masked LM": "MaskedLM",
    "causal LM": "CausalLM",
    "sequence to sequence": "Seq2SeqLM",
    "image classification": "ImageClassification",
}


def class_of(family: str, task: str) -> Any:
    """The class that transformers has for the task, or None."""
    mapping = getattr(transformers, f"AutoModelFor{TASKS[task]}")._model_mapping
    config = type(FAMILIES[family]())
    return mapping.get(config, None)


CASES = [(family, task) for family in FAMILIES for task in TASKS if class_of(family, task) is not None]
# Every task of BERT, and the last one of each other family.
REPRESENTATIVE = {case for case in CASES if case[0] == "BERT"} | {*{case[0]: case for case in CASES}.values()}


def new_model(family: str, task: str) -> Any:
    """A model with random weights, the same at each call."""
    hf.set_seed(0)
    config = FAMILIES[family]()
    if task == "causal LM" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return class_of(family, task)(config)


def rows_of(task: str, count: int = ROWS) -> list[dict[str, Any]]:
    """Random features for the task, with labels."""
    source = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        # The first sentence ends in the token that T5's classifier looks for, the others are padded after it.
        ids = torch.randint(3, WORDS, shape, generator=source)
        ids[..., -1] = 1
        return ids

    if task == "image classification":
        pictures = torch.randn(count, 3, 16, 16, generator=source)
        return [{"pixel_values": picture, "labels": index % 2} for index, picture in enumerate(pictures)]
    ids = words(count, 2, LENGTH) if task == "multiple choice" else words(count, LENGTH)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    for index, row in enumerate(rows):
        if task == "question answering":
            row |= {"start_positions": torch.tensor(index % 3), "end_positions": torch.tensor(index % 3 + 2)}
        elif task in ("sequence classification", "multiple choice"):
            row["labels"] = torch.tensor(index % 2)
        elif task == "token classification":
            row["labels"] = row["input_ids"] % 2
        else:
            row["labels"] = row["input_ids"].clone()
    return rows


def inputs_of(task: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """A batch for `outputs_of`, without labels."""
    rows = rows_of(task)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if torch.is_tensor(rows[0][name])}
    batch = {name: tensor for name, tensor in batch.items() if name in ("input_ids", "attention_mask", "pixel_values")}
    if "input_ids" in batch and getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


class Stranger:
    """A process of its own that never heard of moq_hf, for loading one model after the other.

    Args:
        python: Of another environment.
    """

    def __init__(self, python: str = sys.executable) -> None:
        command = [python, str(Path(__file__).with_name("stranger.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(
        self,
        folder: Path,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        generate: bool = False,
        auto: str | None = None,
    ) -> dict[str, Any]:
        """Whether `from_pretrained(folder)` computes what the model does, and which weights it ties.

        With `generate` also whether it says the same, if it is a model that generates. `auto` is the class that loads
        a model with code of its own.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            text = generated_by(model, inputs) if generate else None
            torch.save((dict(inputs), outputs_of(model, inputs), text), file.name)
            name = auto or type(model).__name__
            request = {"folder": str(folder), "model": name, "tensors": file.name, "generate": generate}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def close(self) -> None:
        self._process.communicate(timeout=60)


def arguments(folder: Path, kind: type[hf.TrainingArguments] = hf.TrainingArguments, **more: Any) -> Any:
    """Some steps on the CPU."""
    fixed: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return kind(output_dir=str(folder), **{**fixed, **more})


class Outcome(NamedTuple):
    """What became of one model."""

    quantized: list[str]
    in_float: list[str]
    tied: list[list[str]]
    tied_after: list[list[str]]
    bits: set[int]
    losses: list[float]
    unmoved: list[str]
    stored: set[str]
    share: float
    layout: str
    proof: Any
    reply: dict[str, Any]

    def faults(self) -> list[str]:
        """What is not as it must be."""
        checks = {
            f"the loss did not fall: {self.losses}": self.losses[-1] < self.losses[0],
            f"quantized weights that never changed: {self.unmoved}": not self.unmoved,
            f"bits {self.bits} after training": self.bits == {CONFIG["quantize_bits"]["target_bits"]},
            f"tied weights: {self.tied_after}, before {self.tied}": self.tied_after == self.tied,
            f"stored as {self.stored}": self.stored == {"dense" if self.layout == "floats" else "packed"},
            f"loaded: {self.reply}": self.reply == {"equal": True, "tied": self.tied},
        }
        return [fault for fault, is_right in checks.items() if not is_right]

    def cell(self) -> str:
        """For the table: how many of the model's linear layers are quantized."""
        return f"{len(self.quantized)}/{len(self.quantized) + len(self.in_float)}"


def outcome(family: str, task: str, folder: Path, stranger: Stranger) -> Outcome:
    """Train with `MoQCallback` in a stock Trainer, and load what it saved in another process."""
    seq2seq = task == "sequence to sequence"
    trainer = (hf.Seq2SeqTrainer if seq2seq else hf.Trainer)(
        model=new_model(family, task),
        args=arguments(folder, hf.Seq2SeqTrainingArguments if seq2seq else hf.TrainingArguments),
        train_dataset=rows_of(task),
        callbacks=[MoQCallback(CONFIG)],
    )
    return outcome_of(trainer, stranger, inputs_of(task, trainer.model))


def outcome_of(
    trainer: Any, stranger: Stranger, inputs: dict[str, Any], generate: bool = False, classes: Any = LINEARS
) -> Outcome:
    """Train, and load what was delivered in a process without moq_hf; `classes` are those of layers."""
    model = trainer.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    tied = tied_weights(model)
    trainer.train()
    layers = quant_layers(model)
    saved = Path(trainer.args.output_dir, "quantized")
    found = verify_quantized(saved, model)
    names = [name for name, module in model.named_modules() if isinstance(module, classes)]
    # Each parameter of experts is a layer too.
    weights = {name: name if is_experts(layer.kind) else f"{name}.weight" for name, layer in layers.items()}
    return Outcome(
        quantized=list(layers),
        in_float=[name for name in names if name not in layers],
        tied=tied,
        tied_after=tied_weights(model),
        bits={layer.moq.bits for layer in layers.values()},
        losses=[log["loss"] for log in trainer.state.log_history if "loss" in log],
        unmoved=[name for name in layers if torch.equal(before[weights[name]], layers[name].float_weight)],
        stored={layer.stored for layer in found.layers.values()},
        share=found.state["parameters"]["quantized"] / found.state["parameters"]["total"],
        layout=found.state["layout"],
        proof=found.proof,
        reply=stranger.load(saved, model, inputs, generate=generate),
    )


HEAD = ["model", "layers quantized", "left in float", "delivered", *support.COLUMNS]


def served(family: str) -> list[str]:
    """Its cells for the servers."""
    tasks = [task for name, task in CASES if name == family]
    models = {task: new_model(family, task) for task in tasks}
    return [
        support.summary({task: support.answer(model, server) for task, model in models.items()})
        for server in support.COLUMNS.values()
    ]


def rows_of_families(outcomes: Mapping[tuple[str, str], Outcome]) -> list[list[str]]:
    """The first table of docs/reference/support.md."""
    rows = [HEAD]
    for family in FAMILIES:
        of_family = {task: found for (name, task), found in outcomes.items() if name == family}
        cells = ", ".join(f"{task} {found.cell()}" for task, found in of_family.items())
        heads = ", ".join(dict.fromkeys(f"`{head}`" for found in of_family.values() for head in found.in_float))
        layouts = ", ".join(dict.fromkeys(found.layout for found in of_family.values()))
        rows.append([family, cells, heads, layouts, *served(family)])
    return rows


def main() -> int:
    """Train every model on every task; without fault, renew the tables."""
    torch.set_num_threads(1)
    stranger, outcomes, bad = Stranger(), {}, 0
    for family, task in CASES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[family, task] = found = outcome(family, task, Path(folder), stranger)
        for fault in found.faults():
            bad += 1
            print(f"{family}, {task}: {fault}")
    stranger.close()
    if not bad:
        support.renew("models", rows_of_families(outcomes))
    return bad


if __name__ == "__main__":
    sys.exit(main())
