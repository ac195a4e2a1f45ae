import json
import subprocess
import sys
from pathlib import Path

from repo import ROOT
from transformers import AutoConfig, AutoTokenizer

DEMO = ROOT / "examples" / "demo"


def rows(name: str) -> tuple[list[str], list[int]]:
    read = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == {"sentence", "label"} for row in read)
    return [row["sentence"] for row in read], [row["label"] for row in read]


def test_the_committed_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DEMO / "make_corpus.py", "--out", tmp_path], check=True)
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 5
    for path in written:
        assert (tmp_path / path).read_bytes() == (DEMO / path).read_bytes(), path


def test_labels_are_balanced_and_the_sets_have_nothing_in_common() -> None:
    (train, train_labels), (held_out, labels) = rows("train"), rows("validation")
    assert sum(train_labels) * 2 == len(train) == 5600 and sum(labels) * 2 == len(held_out) == 800
    assert len(set(train)) == len(train) and not set(train) & set(held_out)


def test_model_and_tokenizer_belong_together() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    config = AutoConfig.from_pretrained(DEMO / "model")
    assert len(tokenizer) == config.vocab_size
    held_out, _ = rows("validation")
    encoded = tokenizer(held_out)["input_ids"]
    assert max(map(len, encoded)) <= config.max_position_embeddings
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)
