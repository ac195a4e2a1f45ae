"""Wrong command lines, argument files and data: one readable error, exit status 2, nothing loaded or written."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_glue
import torch
from glue_arguments import parse_arguments
from tiny_glue import main, make_rows, quiet_logging, words_of, write_rows
from transformers import BertConfig, BertForSequenceClassification

__all__ = ["quiet_logging"]

# Each row: what is wrong, arguments changed (None: left out), patterns that the error must hold. {d} is the folder of
# the `data` fixture.
CASES = [
    ("unknown task", {"task_name": "mprc"}, ["'mprc'", "cola, sst2, mrpc", r"did you mean mrpc\?"]),
    ("no data", {"task_name": None, "train_file": None}, ["--task_name", "--dataset_name", "--train_file"]),
    ("nothing to do", {"do_train": "false"}, ["nothing to do", "--do_train", "--do_eval", "--do_predict"]),
    ("no model", {"config_name": None}, ["--model_name_or_path", "--config_name"]),
    ("task and data set", {"dataset_name": "glue"}, ["--dataset_name", "--task_name"]),
    ("configuration without data set", {"dataset_config_name": "x"}, ["--dataset_config_name needs --dataset_name"]),
    ("missing file", {"train_file": "{d}/nowhere.csv"}, ["--train_file", "nowhere.csv", "no such file"]),
    ("wrong extension", {"train_file": "{d}/train.tsv"}, [r"train\.tsv", r"\.csv, \.json or \.jsonl"]),
    ("evaluation without its file", {"do_eval": "true"}, ["--do_eval needs --validation_file"]),
    ("prediction without its file", {"do_predict": "true"}, ["--do_predict needs --test_file"]),
    ("mismatched set for another task", {"validation_mismatched_file": "{d}/good.jsonl"}, ["mnli only"]),
    ("unknown argument", {"taks_name": "x"}, ["--taks_name", r"did you mean --task_name\?"]),
    ("argument of transformers 4", {"evaluation_strategy": "epoch"}, ["--evaluation_strategy", "--eval_strategy"]),
    ("word for a number", {"learning_rate": "fast"}, ["--learning_rate", "'fast'", "float"]),
    ("best of no evaluations", {"load_best_model_at_end": "true"}, ["load_best_model_at_end", "--eval_strategy"]),
    ("zero examples", {"max_train_samples": "0"}, ["--max_train_samples is 0", "at least 1"]),
    ("negative learning rate", {"learning_rate": "-1"}, [r"--learning_rate is -1\.0", "negative"]),
    ("no room for text", {"max_seq_length": "3"}, ["--max_seq_length 3", "3 of the tokens are special"]),
    ("unknown best metric", {"metric_for_best_model": "f2"}, ["f2", "loss, accuracy, f1, combined_score"]),
    ("reporter that is not there", {"report_to": "wandbx"}, ["--report_to wandbx", "not installed"]),
    ("output in a file", {"output_dir": "{d}/good.jsonl/out"}, ["--output_dir", r"good\.jsonl is a file"]),
    ("checkpoint that is none", {"resume_from_checkpoint": "{d}/folder.csv"}, ["resume_from_checkpoint", "holds none"]),
    ("no checkpoint yet", {"resume_from_checkpoint": "true"}, ["--output_dir", "holds no checkpoint"]),
    ("missing model folder", {"model_name_or_path": "./no/such"}, ["--model_name_or_path ./no/such", "no such folder"]),
    ("model folder without a model", {"model_name_or_path": "{d}/folder.csv"}, [r"folder\.csv", r"config\.json"]),
    ("file for a model", {"model_name_or_path": "{d}/good.jsonl"}, [r"good\.jsonl", "not a folder"]),
    ("teacher of nothing", {"teacher_name_or_path": "{d}/three"}, ["--teacher_name_or_path needs --moq_config"]),
    ("float phase of nothing", {"float_first": "0.5"}, ["--float_first needs --moq_config and --do_train"]),
    (
        "float phase that is no share",
        {"float_first": "3", "moq_config": "{d}/good.jsonl"},
        ["--float_first is 3; it is a share of the run, above 0 and below 1"],
    ),
    (
        "two baselines",
        {
            "float_first": "0.5",
            "float_baseline": "true",
            "do_eval": "true",
            "validation_file": "{d}/good.jsonl",
            "moq_config": "{d}/good.jsonl",
        },
        ["--float_first excludes --float_baseline"],
    ),
    (
        "two teachers",
        {"float_first": "0.5", "teacher_name_or_path": "{d}/three", "moq_config": "{d}/good.jsonl"},
        ["--float_first excludes --teacher_name_or_path"],
    ),
    (
        "missing teacher",
        {"teacher_name_or_path": "./no/such", "config_name": None, "moq_config": "{d}/good.jsonl"},
        ["--teacher_name_or_path ./no/such", "no such folder"],
    ),
    ("impossible model name", {"model_name_or_path": "bert base"}, ["bert base", "neither a folder nor"]),
    ("unknown kind of model", {"config_name": "{d}/strange"}, ["configuration", "strange", "model_type|model type"]),
    ("model without weights", {"model_name_or_path": "{d}/model"}, ["model", r"safetensors|pytorch_model"]),
    ("damaged weights", {"model_name_or_path": "{d}/damaged"}, ["cannot load the model", "damaged"]),
    ("model without a tokenizer", {"config_name": "{d}/bare"}, ["tokenizer", "bare"]),
    ("tokenizer of another model", {"config_name": "{d}/small"}, ["20 tokens", "vocab_size is 7"]),
    ("model of another size", {"model_name_or_path": "{d}/three"}, ["three do not fit", "--ignore_mismatched_sizes"]),
    (
        "model with another head",
        {"model_name_or_path": "{d}/three", "config_name": None},
        ["has a head of 3 labels", "the data has 2", "--ignore_mismatched_sizes"],
    ),
    (
        "teacher with another head",
        {"teacher_name_or_path": "{d}/three", "config_name": None, "moq_config": "{d}/four.json"},
        ["has a head of 3 labels", "the data has 2; fine-tune a teacher on this task"],
    ),
    (
        "model that is not here, no network",
        {"model_name_or_path": "bert-base-cased"},
        ["bert-base-cased", "HF_HUB_OFF"],
    ),
    ("task that is not here, no network", {"train_file": None}, ["nyu-mll/glue/mrpc", "--train_file", "sentence1"]),
    ("upload without network", {"push_to_hub": "true", "hub_token": "x"}, ["--push_to_hub", "HF_HUB_OFFLINE"]),
    ("upload without token", {"push_to_hub": "true"}, ["--push_to_hub", "hf auth login", "--hub_token"]),
    ("empty file", {"train_file": "{d}/empty.csv"}, [r"empty\.csv holds no examples"]),
    ("broken json", {"train_file": "{d}/broken.jsonl"}, [r"broken\.jsonl is no JSON", "line 2, column 14"]),
    ("numbers for examples", {"train_file": "{d}/numbers.jsonl"}, ["line 1", "must be a JSON object"]),
    ("ragged csv", {"train_file": "{d}/ragged.csv"}, [r"ragged\.csv, line 3", "4 fields", "header has 3"]),
    ("twice the same column", {"train_file": "{d}/twice.csv"}, [r"twice\.csv", "same name"]),
    ("latin-1", {"train_file": "{d}/latin.csv"}, [r"latin\.csv is not UTF-8"]),
    ("columns missing", {"train_file": "{d}/columns.csv"}, ["columns text, label;", "missing: sentence1, sentence2"]),
    ("label column missing", {"train_file": "{d}/unlabeled.csv"}, ["needed: .*label", "missing: label"]),
    (
        "no text",
        {"task_name": None, "train_file": "{d}/no_text.jsonl"},
        ["columns a, label", "none of them holds text"],
    ),
    ("number for text", {"train_file": "{d}/number.jsonl"}, [r"number\.jsonl, line 2", "sentence1", "holds 5"]),
    ("text missing", {"train_file": "{d}/gap.jsonl"}, [r"gap\.jsonl, line 2", "sentence2 is missing"]),
    ("label missing", {"train_file": "{d}/null.jsonl"}, [r"null\.jsonl, line 2", "label is missing"]),
    ("label out of range", {"train_file": "{d}/range.jsonl"}, ["label 2", r"0 \(not_equivalent\), 1 \(equivalent\)"]),
    ("label not published", {"train_file": "{d}/hidden.jsonl"}, ["label -1", "not published"]),
    ("label of no task", {"train_file": "{d}/names.jsonl"}, ["label 'paraphrase'", "not_equivalent"]),
    ("score out of range", {"task_name": "stsb", "train_file": "{d}/scores.jsonl"}, [r"5\.5", "from 0 to 5"]),
    ("score that is none", {"task_name": None, "train_file": "{d}/nan.csv"}, [r"nan\.csv, line 2", "finite"]),
    ("one class", {"task_name": None, "train_file": "{d}/one.jsonl"}, ["every label is 'a'", "at least two"]),
    (
        "labels of validation data that training data lacks",
        {"task_name": None, "train_file": "{d}/ab.jsonl", "do_eval": "true", "validation_file": "{d}/abc.jsonl"},
        [r"abc\.jsonl, line 3: label 'c'", r"labels in \S*ab\.jsonl: a, b"],
    ),
    (
        "labels that the evaluated model lacks",
        {
            "task_name": None,
            "train_file": None,
            "do_train": "false",
            "do_eval": "true",
            "config_name": None,
            "model_name_or_path": "{d}/three",
            "validation_file": "{d}/abc.jsonl",
        },
        [r"abc\.jsonl, line 1: label 'a'", "labels of the model: x, y, z"],
    ),
    (
        "validation data with other columns",
        {"task_name": None, "train_file": "{d}/ab.jsonl", "do_eval": "true", "validation_file": "{d}/columns.csv"},
        [r"columns\.csv has the columns text, label", "missing: sentence1, sentence2"],
    ),
    (
        "data set folder without the split",
        {"task_name": None, "train_file": None, "dataset_name": "{d}/set"},
        ["the splits test; needed: train"],
    ),
    ("missing MoQ configuration", {"moq_config": "{d}/no_moq.json"}, [r"no_moq\.json"]),
    ("broken MoQ configuration", {"moq_config": "{d}/broken.json"}, [r"broken\.json", "column"]),
    ("misspelt MoQ key", {"moq_config": "{d}/moq.json"}, ["quantise_groups", "did you mean quantize_groups"]),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a good file and of every bad one."""
    folder = tmp_path_factory.mktemp("bad")
    good = make_rows("mrpc", 4)
    pair = {"sentence1": "the cat", "sentence2": "a dog"}

    def labeled(name: str, *labels: object) -> None:
        write_rows(folder / name, [pair | {"label": label} for label in labels])

    write_rows(folder / "good.jsonl", good)
    labeled("range.jsonl", 0, 1, 2)
    labeled("hidden.jsonl", 0, 1, -1)
    labeled("names.jsonl", "equivalent", "paraphrase")
    labeled("scores.jsonl", 0.0, 5.5)
    labeled("nan.csv", "nan", 1.5)
    labeled("one.jsonl", "a", "a")
    labeled("ab.jsonl", "a", "b")
    labeled("abc.jsonl", "a", "b", "c")
    labeled("null.jsonl", 1, None)
    write_rows(folder / "number.jsonl", [good[0], good[1] | {"sentence1": 5}])
    write_rows(folder / "gap.jsonl", [good[0], {"sentence1": "the cat", "label": 0}])
    write_rows(folder / "no_text.jsonl", [{"a": 1, "label": 0}])
    write_rows(folder / "unlabeled.csv", [pair])
    write_rows(folder / "columns.csv", [{"text": "the cat", "label": 0}])
    texts = {
        "train.tsv": "sentence1\tsentence2\tlabel\n",
        "empty.csv": "",
        "broken.json": '[{"sentence1": ',
        "broken.jsonl": '{"a": 1}\n{"sentence1" "the cat"}\n',
        "numbers.jsonl": "1\n2\n",
        "ragged.csv": "sentence1,sentence2,label\nthe cat,a dog,1\nthe cat,a,dog,1\n",
        "twice.csv": "sentence1,sentence1,label\nthe cat,a dog,1\n",
        "four.json": json.dumps({"quantize_bits": {"start_bits": 8, "target_bits": 4}}),
        "moq.json": json.dumps({"quantize_bits": {"start_bits": 8, "target_bits": 4}, "quantise_groups": 8}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.csv").write_bytes("sentence1,sentence2,label\ncaf\xe9,a dog,1\n".encode("latin-1"))
    (folder / "folder.csv").mkdir()
    (folder / "set").mkdir()
    write_rows(folder / "set" / "test.jsonl", good)

    model = tiny_glue.make_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    for name, changes in (("strange", {"model_type": "no_model"}), ("small", {"vocab_size": 7}), ("bare", {})):
        tiny_glue.make_model(folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | changes))
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / "bare" / name).unlink()
    tiny_glue.make_model(folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"no weights")
    tiny_glue.make_model(folder / "three")
    three = BertConfig(**config, num_labels=3, id2label={0: "x", 1: "y", 2: "z"}, label2id={"x": 0, "y": 1, "z": 2})
    with torch.random.fork_rng():
        BertForSequenceClassification(three).save_pretrained(folder / "three")
    return folder


@pytest.fixture
def arguments(data: Path, tmp_path: Path) -> dict[str, object]:
    """A command line that works."""
    return {
        "task_name": "mrpc",
        "train_file": str(data / "good.jsonl"),
        "config_name": str(data / "model"),
        "output_dir": str(tmp_path / "out"),
        "do_train": "true",
        "max_steps": 1,
        "max_seq_length": 16,
        "disable_tqdm": "true",
        "use_cpu": "true",
        "save_strategy": "no",
    }


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """Give the error, after checking that there is exactly one and no traceback."""
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert len(re.findall(r"^error: ", err, re.MULTILINE)) == 1
    return err[re.search(r"^error: ", err, re.MULTILINE).start() :]


def test_the_command_line_that_the_others_spoil_works(
    arguments: dict[str, object], tmp_path: Path, quiet_logging: None
) -> None:
    assert main(words_of(arguments)) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(("changes", "patterns"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_wrong_command_line(
    changes: dict[str, str],
    patterns: list[str],
    arguments: dict[str, object],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet_logging: None,
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    changed = {name: value and value.replace("{d}", str(data)) for name, value in changes.items()}
    assert main(words_of(arguments | changed)) == 2
    error = told(capsys)
    assert len(error.strip().splitlines()) == 1
    for pattern in patterns:
        assert re.search(pattern, error), f"{pattern} is not in {error}"
    assert not (tmp_path / "out").exists()


def test_several_mistakes_are_told_at_once(arguments: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = arguments | {"task_name": "cole", "train_file": "nowhere.csv", "max_train_samples": 0, "config_name": None}
    assert main(words_of(wrong)) == 2
    lines = told(capsys).strip().splitlines()
    assert lines[0] == "error: 4 things are wrong:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 4
    assert main([*words_of(arguments), "--sead", "1", "--do_tran", "--cach_dir=x"]) == 2
    lines = told(capsys).strip().splitlines()
    assert [line.rpartition(" ")[2] for line in lines[1:]] == ["--seed?", "--do_train?", "--cache_dir?"]


JSON_CASES = [
    ("no json", '{"task_name": "mrpc",\n "seed" 1}', ["line 2, column 9"]),
    ("a list", '["task_name"]', ["list", "object"]),
    ("unknown keys", '{"task": 1, "sead": 1}', ["2 things", "task", r"did you mean seed\?"]),
    ("key of transformers 4", '{"evaluation_strategy": "no"}', ["evaluation_strategy", "eval_strategy"]),
    ("key twice", '{"seed": 1, "seed": 2}', ["seed", "more than once"]),
    ("word for a number", '{"max_seq_length": "long"}', ["max_seq_length", "'long'", "int"]),
    ("true for a number", '{"max_seq_length": true}', ["max_seq_length cannot be true"]),
    ("list for a name", '{"task_name": ["mrpc"]}', ["task_name cannot be a JSON list"]),
    ("word for a switch", '{"do_train": "maybe"}', ["do_train", "maybe"]),
]


@pytest.mark.parametrize(("text", "patterns"), [case[1:] for case in JSON_CASES], ids=[case[0] for case in JSON_CASES])
def test_a_wrong_file_of_arguments(
    text: str, patterns: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    error = told(capsys)
    assert "arguments.json" in error
    for pattern in patterns:
        assert re.search(pattern, error), f"{pattern} is not in {error}"


@pytest.mark.parametrize(("value", "share"), [(True, 0.5), (False, None), (0.25, 0.25)])
def test_a_share_may_be_true_in_a_file_of_arguments(
    value: Any, share: float | None, data: Path, arguments: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "arguments.json"
    switches = {"do_train": True, "disable_tqdm": True, "use_cpu": True}
    given = {**arguments, **switches, "moq_config": str(data / "four.json"), "float_first": value}
    path.write_text(json.dumps(given))
    model_args, _, _ = parse_arguments([str(path)])
    assert model_args.float_first == share


def test_bf16_needs_no_other_word_where_there_is_no_accelerator(arguments: dict[str, object]) -> None:
    _, _, args = parse_arguments(words_of({**arguments, "use_cpu": "false", "bf16": "true"}))
    assert args.bf16 and args.use_cpu == (not torch.accelerator.is_available())


def test_a_missing_file_of_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere.json")]) == 2
    assert "nowhere.json" in told(capsys)
    assert main([str(tmp_path / "nowhere.json"), "--do_train"]) == 2
    assert "must be the only argument" in told(capsys)


def test_bugs_keep_their_traceback(
    arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch, quiet_logging: None
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(tiny_glue.run_glue_moq, "load_splits", broken)
    with pytest.raises(ZeroDivisionError):
        main(words_of(arguments))


def test_libraries_that_are_missing_are_named_with_their_extra(
    arguments: dict[str, object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else found(name))
    assert main(words_of(arguments)) == 2
    assert "this script needs datasets: pip install -e '.[glue]'" in told(capsys)


def test_what_replaces_an_argument_exists() -> None:
    from transformers import TrainingArguments

    known = set(TrainingArguments.__dataclass_fields__) | set(tiny_glue.ModelArguments.__dataclass_fields__)
    assert not known & set(tiny_glue.REMOVED)
    advised = {name for advice in tiny_glue.REMOVED.values() for name in re.findall(r"--(\w+)", advice)}
    assert advised <= known
