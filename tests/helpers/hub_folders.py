"""Folders named as models and data on the Hub, with a tiny model and generated rows, for code that names the Hub's."""

from pathlib import Path

import tiny_glue
from datasets import Dataset
from repo import ROOT
from transformers import AutoConfig, AutoModel, AutoTokenizer


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


def write_config(folder: Path, name: str, rows: dict[str, Dataset]) -> None:
    """A configuration of a data set, as the Hub has it."""
    for split, data in rows.items():
        data.to_parquet(folder / name / f"{split}.parquet")
    page = folder / "README.md"
    lines = page.read_text().removesuffix("---\n").splitlines() if page.exists() else ["---", "configs:"]
    lines += [f"- config_name: {name}", "  data_files:"]
    lines += [f"  - split: {split}\n    path: {name}/{split}.parquet" for split in rows]
    page.write_text("\n".join([*lines, "---", ""]))
