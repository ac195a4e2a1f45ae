"""A tiny random BERT and generated rows in the shapes of the GLUE tasks, and the script under test as a function."""

import csv
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import glue_arguments
import glue_data
import glue_hub  # noqa: F401
import pytest
import run_glue_moq
from repo import ROOT

SCRIPT = ROOT / "scripts" / "run_glue_moq.py"

TASKS = glue_data.TASKS
REMOVED = glue_arguments.REMOVED
ModelArguments = glue_arguments.ModelArguments
main = run_glue_moq.main

WORDS = [
    "the", "a", "cat", "dog", "man", "sees", "likes", "big", "small", "red", "blue", "runs", "sleeps", "and", "who",
]  # fmt: skip


def make_model(folder):
    """Write a BERT configuration with 2 layers of 16 units and its tokenizer: what --config_name needs."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    config = {"model_type": "bert", "vocab_size": len(vocabulary), "hidden_size": 16, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def make_rows(task, count, seed=0):
    """Make rows of random words with the task's columns; labels are ids, or scores from 0 to 5 for stsb."""
    generator = random.Random(f"{task}{seed}")
    columns, labels = TASKS[task].columns, TASKS[task].labels
    return [
        {name: " ".join(generator.choices(WORDS, k=generator.randint(3, 9))) for name in columns}
        | {"label": index % len(labels) if labels else round(generator.uniform(0, 5), 2), "idx": index}
        for index in range(count)
    ]


def write_rows(path, rows):
    """Write rows as csv, json (a list) or jsonl, as the path ends."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        elif path.suffix == ".json":
            json.dump(rows, file)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def words_of(arguments):
    """Give a command line for a dict of arguments; None leaves one out."""
    return [f"--{name}={value}" for name, value in arguments.items() if value is not None]


def read_json(path):
    """Read a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """Put the handlers and levels of the loggers back that the script sets up."""
    names = ("", "moq_hf", "run_glue_moq", "transformers", "datasets")
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level) for name in names}
    yield
    for name, (handlers, level) in before.items():
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).setLevel(level)
