"""Folders named as models and data on the Hub, with a tiny model and generated rows, for code that names the Hub's."""

import sys
from pathlib import Path

import tiny_glue
from datasets import Dataset
from repo import ROOT
from transformers import AutoConfig, AutoModel, AutoTokenizer

SFT = ROOT / "examples" / "sft"


def make_hub(folder: Path, tasks: tuple[str, ...]) -> None:
    """MiniLM and GLUE, as what runs in the folder finds them."""
    tiny_bert(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    for task in tasks:
        rows = {
            split: Dataset.from_list(tiny_glue.make_rows(task, count))
            for split, count in (("train", 80), ("validation", 32))
        }
        write_config(folder / "nyu-mll" / "glue", task, rows)


def tiny_bert(folder: Path) -> None:
    """A BERT in the place of MiniLM, with dropout as that has it."""
    demo = ROOT / "examples" / "demo" / "model"
    config = AutoConfig.from_pretrained(demo, hidden_dropout_prob=0.1)
    AutoModel.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)


def tiny_llama(folder: Path, problems: Path) -> None:
    """A Llama in the place of SmolLM2, whose head is its embedding table, too; dialogues in the place of GSM8K.

    `problems` has both forms of GSM8K: the configuration "main" of the Hub, and a `.jsonl` of each split. It needs TRL.
    """
    if str(SFT) not in sys.path:
        sys.path.append(str(SFT))
    from dialogues import dialogues
    from train import new_model, new_tokenizer

    rows, _ = dialogues()
    pairs = [[message["content"] for message in row["messages"]] for row in rows]
    tokenizer = new_tokenizer([text for pair in pairs for text in pair])
    model = new_model(tokenizer)
    model.config.tie_word_embeddings = True
    type(model)(model.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    data = Dataset.from_list([{"question": pair[0], "answer": pair[-1]} for pair in pairs])
    splits = {"train": data.select(range(80)), "test": data.select(range(80, 120))}
    write_config(problems, "main", splits)
    for split, of_split in splits.items():
        of_split.to_json(problems / f"{split}.jsonl")


def write_config(folder: Path, name: str, rows: dict[str, Dataset]) -> None:
    """A configuration of a data set, as the Hub has it."""
    for split, data in rows.items():
        data.to_parquet(folder / name / f"{split}.parquet")
    page = folder / "README.md"
    lines = page.read_text().removesuffix("---\n").splitlines() if page.exists() else ["---", "configs:"]
    lines += [f"- config_name: {name}", "  data_files:"]
    lines += [f"  - split: {split}\n    path: {name}/{split}.parquet" for split in rows]
    page.write_text("\n".join([*lines, "---", ""]))
