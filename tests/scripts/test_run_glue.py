"""scripts/run_glue_moq.py: tasks, files, metrics, predictions, resuming, and what it does without the Hub."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import evaluate
import glue_hub
import huggingface_hub
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import tiny_glue
import torch
from glue_arguments import parse_arguments
from glue_data import read_file
from run_glue_moq import with_teacher
from safetensors.torch import load_file
from tiny_glue import TASKS, main, make_rows, quiet_logging, read_json, words_of, write_rows
from transformers import AutoModelForSequenceClassification, Trainer

from moq_hf import MoQConfig, verify_quantized

METRIC = str(tiny_glue.ROOT / "scripts" / "glue_metric" / "glue_metric.py")
MOQ = {
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_groups": 2,
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
}

__all__ = ["quiet_logging"]
pytestmark = pytest.mark.usefixtures("quiet_logging")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a configuration and a tokenizer, without weights."""
    return str(tiny_glue.make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def arguments(model: str, tmp_path: Path) -> dict[str, object]:
    """What every short run has in common."""
    return {
        "config_name": model,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "max_seq_length": 32,
        "disable_tqdm": "true",
        "use_cpu": "true",
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The file of the MoQ config."""
    path = tmp_path / "moq.json"
    path.write_text(json.dumps(MOQ))
    return path


def files(task: str, folder: Path, rest: int = 6) -> dict[str, str]:
    """Write train, validation and test data of a task (the test data without labels); give their arguments."""
    given = {"task_name": task}
    for seed, name in enumerate(("train", "validation", "test")):
        rows = make_rows(task, 12 if name == "train" else rest, seed)
        if name == "test":
            rows = [{key: value for key, value in row.items() if key != "label"} for row in rows]
        given[f"{name}_file"] = write_rows(folder / f"{name}.jsonl", rows)
    return given


def run(arguments: dict[str, object], *doing: str) -> Path:
    """Run the script in this process and give its output folder."""
    assert main(words_of(arguments) + [f"--{what}" for what in doing]) == 0
    return Path(str(arguments["output_dir"]))


@pytest.mark.parametrize("task", ["cola", "stsb", "mnli"])
def test_each_task_is_trained_evaluated_and_predicted(
    task: str, arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = files(task, tmp_path)
    names = {*TASKS[task].metrics, *(("combined_score",) if len(TASKS[task].metrics) > 1 else ())}
    if task == "mnli":
        mismatched = write_rows(tmp_path / "mm.jsonl", make_rows(task, 5, 9))
        given["validation_mismatched_file"] = mismatched
        names |= {"accuracy_mm"}
    out = run(arguments | given, "do_train", "do_eval", "do_predict")

    results = read_json(out / "eval_results.json")
    assert {f"eval_{name}" for name in names} <= set(results)
    assert results["eval_samples"] == 6
    assert read_json(out / "train_results.json")["train_samples"] == 12
    predicted = (out / f"predict_results_{task}.txt").read_text().splitlines()
    assert predicted[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in predicted[1:]] == [str(index) for index in range(6)]
    values = {line.split("\t")[1] for line in predicted[1:]}
    if task == "stsb":
        assert all(re.fullmatch(r"-?\d\.\d{3}", value) for value in values)
    else:
        assert values <= set(TASKS[task].labels)
    config = read_json(out / "config.json")
    assert list(config.get("id2label", {}).values()) == (list(TASKS[task].labels) or ["LABEL_0"])
    if task == "mnli":
        assert results["eval_samples_mm"] == 5

    told = capsys.readouterr().out
    assert "no --moq_config: plain float training" in told
    assert re.search(
        rf"{task}, validation \(6 examples\)\n .*{TASKS[task].metrics[0]}.*\nthis model .* -?\d\.\d{{4}}", told
    )
    assert re.search(r"model\.safetensors +[\d.]+ kB", told)


def test_moq_reaches_its_target(
    config: Path, arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments | files("sst2", tmp_path) | {"max_steps": 8, "moq_config": config}
    out = run(given, "do_train", "do_eval")
    told = capsys.readouterr().out
    assert re.search(r"moq_hf: All 3 blocks reached 4 bits at step \d, as planned. Verified: ", told)
    assert f"moq_hf: saved in {out}. Verified: " in told and f"Report: moq-hf report {out}\n" in told
    assert "quantized/ holds the same model as the folder itself" in told
    # A run ends with the scores, the size and what to do with the model.
    last = told.partition("sst2, validation (6 examples)\n")[2].splitlines()
    assert last[0].split() == ["accuracy", "loss", "size"] and re.fullmatch(r"moq_hf, 4 bits( +[\d.]+){3} MB", last[1])
    assert [line.partition(": ")[0] for line in last[3:]] == ["Verified", "Load it", "Deploy", "Report"]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, out / "quantized")]
    assert weights[0] == weights[1]
    assert {layer.bits for layer in verify_quantized(out).layers.values()} == {4}
    # Both copies have the figures of the evaluation that came after them.
    for folder in (out, out / "quantized"):
        metrics = read_json(folder / "moq_state.json")["metrics"]
        assert metrics["eval_accuracy"] == read_json(out / "eval_results.json")["eval_accuracy"]
        assert "| accuracy | " in (folder / "README.md").read_text()

    # What was saved is what was evaluated; the quantization is for training only.
    again = {"config_name": None, "model_name_or_path": out, "output_dir": tmp_path / "again"}
    run(given | again, "do_eval")
    results = [read_json(folder / "eval_results.json") for folder in (out, tmp_path / "again")]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    assert "--moq_config is for --do_train" in capsys.readouterr().out

    # A packed model can be trained on.
    config.write_text(json.dumps(MOQ | {"quantize_bits": {"start_bits": 4, "target_bits": 3}}))
    lower = run(given | again | {"output_dir": tmp_path / "lower", "max_steps": 4}, "do_train")
    assert {layer.bits for layer in verify_quantized(lower).layers.values()} == {3}


def test_a_float_model_teaches_its_quantized_copy(config: Path, arguments: dict[str, object], tmp_path: Path) -> None:
    given = arguments | files("sst2", tmp_path)
    master = run(given | {"output_dir": tmp_path / "float"}, "do_train")
    start = {"config_name": None, "model_name_or_path": master, "moq_config": config, "max_steps": 8}
    taught = {"teacher_name_or_path": master, "output_dir": tmp_path / "taught"}
    states = [run(given | start | more, "do_train") for more in ({}, taught)]
    # The path of the teacher is nobody else's business.
    assert not any(
        str(master) in (out / name).read_text() for out in states for name in ("README.md", "moq_state.json")
    )
    losses = [read_json(out / "train_results.json")["train_loss"] for out in states]
    assert losses[0] < losses[1]


def test_a_teacher_of_the_command_line_counts_more_than_that_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = with_teacher(MoQConfig.from_dict(MOQ | {"distillation": {"teacher": "elsewhere"}}), "here")
    assert found.distillation.teacher == "here" and "the teacher is here, not elsewhere" in caplog.text


def test_float_first_is_one_run_from_float_to_packed(
    config: Path, arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps(MOQ | {"quantize_schedule": {"quantize_period": 1, "schedule_offset": 0}}))
    given = arguments | files("mrpc", tmp_path) | {"moq_config": config, "max_steps": 8}
    saving = {"save_strategy": "steps", "save_steps": 3}
    out = run(given | saving, "do_train", "do_eval", "float_first")
    told = capsys.readouterr().out
    head, floats, ours = told.partition("mrpc, validation (6 examples)\n")[2].splitlines()[:3]
    assert head.split() == ["accuracy", "f1", "combined_score", "loss", "size"] and re.fullmatch(
        r"float( +[\d.]+)+ MB", floats
    )
    assert re.fullmatch(r"moq_hf, 4 bits( +[\d.]+)+ MB", ours)
    found = verify_quantized(out)
    assert {layer.bits for layer in found.layers.values()} == {4}
    before = found.state["float_metrics"]
    assert before["eval_loss"] == read_json(out / "float" / "eval_results.json")["eval_loss"]
    # The float model is one that anybody can load and evaluate.
    again = {"config_name": None, "model_name_or_path": out / "float", "output_dir": tmp_path / "again"}
    run(given | again | {"moq_config": None}, "do_eval")
    assert read_json(tmp_path / "again" / "eval_results.json")["eval_loss"] == before["eval_loss"]

    # A run that was killed in its quantized phase goes on.
    folder = tmp_path / "killed"
    for part in ("checkpoint-6", "float"):
        shutil.copytree(out / part, folder / part)
    run(given | {"output_dir": folder}, "do_train", "do_eval", "float_first")
    assert (folder / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert re.search(r"\nfloat +[\d.]+", capsys.readouterr().out)


def test_a_moq_config_that_is_off_is_told(
    config: Path, arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps(MOQ | {"enabled": False}))
    given = arguments | files("sst2", tmp_path) | {"moq_config": config, "max_steps": 1}
    run(given, "do_train")
    assert "enabled: false: plain float training" in capsys.readouterr().out
    taught = given | {"teacher_name_or_path": arguments["config_name"]}
    for more in (words_of(taught), [*words_of(given), "--float_first"]):
        assert main([*more, "--do_train"]) == 2
        assert "but the --moq_config says enabled: false" in capsys.readouterr().err


def test_every_file_type_gives_the_same_data(tmp_path: Path) -> None:
    made = make_rows("rte", 12)
    paths = [write_rows(tmp_path / f"train{kind}", made) for kind in (".jsonl", ".json", ".csv")]
    jsonl, *others = (read_file(path, TASKS["rte"].columns, labeled=True).data.to_dict() for path in paths)
    assert others == [jsonl] * 2


def test_own_data_with_named_labels(
    arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"number": index, "text": f"the {word} dog", "label": label, "note": "a cat"}
        for index, (word, label) in enumerate([("big", "yes"), ("small", "no"), ("red", "maybe")] * 4)
    ]
    train = write_rows(tmp_path / "train.jsonl", rows)
    given = arguments | {"train_file": train, "validation_file": train, "test_file": train, "max_eval_samples": 5}
    out = run(given, "do_train", "do_eval", "do_predict")
    told = capsys.readouterr().out
    assert "columns text, note, label" in told
    assert "3 labels: maybe, no, yes" in told
    assert read_json(out / "eval_results.json")["eval_samples"] == 5
    assert set(re.findall(r"\t(\w+)\n", (out / "predict_results.txt").read_text())) <= {"yes", "no", "maybe"} | {
        "prediction"
    }
    # The trained model is evaluated by its own names, also where the data does not have all of them.
    some = write_rows(tmp_path / "some.csv", [row for row in rows if row["label"] != "maybe"])
    given = {"model_name_or_path": out, "output_dir": tmp_path / "eval", "use_cpu": "true", "validation_file": some}
    assert "eval_accuracy" in read_json(run(given, "do_eval") / "eval_results.json")


def test_a_model_with_its_labels_in_another_order(arguments: dict[str, object], tmp_path: Path) -> None:
    given = files("mrpc", tmp_path, rest=10)
    out = run(arguments | given | {"max_steps": 1}, "do_train", "do_eval", "do_predict")
    turned = tmp_path / "turned"
    tiny_glue.make_model(turned)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.flip(0)
    model.config.id2label = {0: "Equivalent", 1: "Not_equivalent"}
    model.config.label2id = {"Equivalent": 0, "Not_equivalent": 1}
    model.save_pretrained(turned)

    again = arguments | given | {"config_name": None, "model_name_or_path": turned, "output_dir": tmp_path / "again"}
    run(again, "do_eval", "do_predict")
    first, second = (read_json(folder / "eval_results.json") for folder in (out, tmp_path / "again"))
    assert [second[key] for key in ("eval_accuracy", "eval_f1")] == [first[key] for key in ("eval_accuracy", "eval_f1")]
    predicted = [(folder / "predict_results_mrpc.txt").read_text() for folder in (out, tmp_path / "again")]
    assert predicted[0] == predicted[1]


def test_resumes_from_the_last_whole_checkpoint(
    config: Path, arguments: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments | files("cola", tmp_path) | {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    given |= {"moq_config": config}
    out = run(given | {"output_dir": tmp_path / "cut"}, "do_train")
    straight = load_file(out / "model.safetensors")
    shutil.rmtree(out / "checkpoint-5")
    # As a run leaves it that is killed while it saves.
    (out / "checkpoint-4" / "trainer_state.json").unlink()
    (out / "model.safetensors").unlink()
    capsys.readouterr()

    run(given | {"output_dir": tmp_path / "cut"}, "do_train")
    told = capsys.readouterr().out
    assert "checkpoint-4 is not whole" in told
    assert re.search(r"resuming from \S*checkpoint-2 \(step 2\), found in --output_dir", told)
    resumed = load_file(out / "model.safetensors")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)

    run(given | {"output_dir": out, "resume_from_checkpoint": "false"}, "do_train")
    assert "starting afresh" in capsys.readouterr().out


def test_one_json_file_is_the_command_line(arguments: dict[str, object], tmp_path: Path) -> None:
    words = arguments | files("wnli", tmp_path) | {"seed": 3, "lr_scheduler_type": "cosine_with_min_lr"}
    given = words | {"output_dir": str(tmp_path / "out"), "learning_rate": "1e-3", "report_to": ["none"]}
    given |= {"do_train": True, "do_eval": True, "disable_tqdm": True, "use_cpu": True, "tokenizer_name": None}
    given |= {"lr_scheduler_kwargs": {"min_lr": 1e-4}}
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps(given))
    words |= {"lr_scheduler_kwargs": '{"min_lr": 1e-4}', "report_to": "none"}
    found, expected = parse_arguments([str(path)]), parse_arguments([*words_of(words), "--do_train", "--do_eval"])
    assert found[:2] == expected[:2] and found[2].to_dict() == expected[2].to_dict()
    assert main([str(path)]) == 0 and (tmp_path / "out" / "eval_results.json").is_file()


def test_glue_from_the_hub_has_two_validation_and_test_sets_for_mnli(
    arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(name: str, config: str, **_: object) -> dict[str, datasets.Dataset]:
        asked.append((name, config))
        names = (
            "train",
            *(f"{kind}_{which}" for kind in ("validation", "test") for which in ("matched", "mismatched")),
        )
        features = {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string")}
        features |= {"label": datasets.ClassLabel(names=list(TASKS["mnli"].labels)), "idx": datasets.Value("int32")}
        # The Hub has -1 for the labels of test sets, which are not published.
        return {
            split: datasets.Dataset.from_list(
                [row | ({"label": -1} if "test" in split else {}) for row in make_rows("mnli", 6, seed)],
                features=datasets.Features(features),
            )
            for seed, split in enumerate(names)
        }

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    out = run(arguments | {"task_name": "mnli"}, "do_train", "do_eval", "do_predict")
    assert asked == [("nyu-mll/glue", "mnli")]
    results = read_json(out / "eval_results.json")
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_loss_mm"} <= set(results)
    for name in ("predict_results_mnli.txt", "predict_results_mnli-mm.txt"):
        assert len((out / name).read_text().splitlines()) == 7


def test_uploads_when_told(
    arguments: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads = []

    def push_to_hub(self: Trainer, **card: str) -> None:
        uploads.append((self.hub_model_id, card))

    def init_hf_repo(self: Trainer, **_: object) -> None:
        self.hub_model_id = self.args.hub_model_id

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(glue_hub, "_probe_hub", lambda endpoint: None)
    monkeypatch.setattr(Trainer, "push_to_hub", push_to_hub)
    monkeypatch.setattr(Trainer, "init_hf_repo", init_hf_repo)
    given = arguments | files("wnli", tmp_path) | {"hub_model_id": "someone/tiny", "hub_token": "hf_x"}
    out = run(given, "do_train", "do_eval", "push_to_hub")
    assert uploads[-1] == ("someone/tiny", {"tasks": "text-classification"})
    assert "uploaded to someone/tiny" in capsys.readouterr().out
    assert "Accuracy" in (out / "README.md").read_text()


@pytest.mark.parametrize("task", [*TASKS, "accuracy", "mse"])
def test_the_metric_equals_sklearn_and_scipy(task: str) -> None:
    generator = np.random.default_rng(0)
    if task in ("stsb", "mse"):
        truth, predicted = generator.uniform(0, 5, 100), generator.normal(size=100).astype(np.float32)
        expected = {
            "pearson": scipy.stats.pearsonr(predicted.astype(np.float64), truth).statistic,
            "spearmanr": scipy.stats.spearmanr(predicted, truth).statistic,
        }
        expected = expected if task == "stsb" else {"mse": sklearn.metrics.mean_squared_error(truth, predicted)}
    else:
        truth, predicted = generator.integers(0, 2, (2, 100))
        expected = {"accuracy": sklearn.metrics.accuracy_score(truth, predicted)}
        if task in ("mrpc", "qqp"):
            expected["f1"] = sklearn.metrics.f1_score(truth, predicted)
        elif task == "cola":
            expected = {"matthews_correlation": sklearn.metrics.matthews_corrcoef(truth, predicted)}
    found = evaluate.load(METRIC, task, keep_in_memory=True).compute(predictions=predicted, references=truth)
    assert found == expected
    assert [name for name in found] == list(TASKS[task].metrics if task in TASKS else [task])


def test_as_a_process_without_a_writable_home(arguments: dict[str, object], tmp_path: Path) -> None:
    words = [*words_of(arguments | files("sst2", tmp_path)), "--do_train", "--do_eval"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "HOME": os.devnull}
    variables["HF_HOME"] = str(Path(os.devnull, "huggingface"))
    command = [sys.executable, str(tiny_glue.SCRIPT), *words]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "eval_results.json").exists()


def test_a_hub_that_does_not_answer_is_given_up_at_once(
    arguments: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constants, timeout = huggingface_hub.constants, 0.3
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(glue_hub, "HUB_TIMEOUT", timeout)
    monkeypatch.setattr(glue_hub, "_reason", "")
    # It takes connections and never says a word, as some firewalls do.
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        started = time.monotonic()
        given = arguments | {"task_name": "qqp", "output_dir": tmp_path / "never"}
        assert main([*words_of(given), "--do_train"]) == 2
    # The Hub's own retries take 25 seconds and more.
    assert time.monotonic() - started < 10
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    told = ("nyu-mll/glue/qqp", endpoint, "--train_file", "question1, question2, label")
    assert [words for words in told if words not in line] == []
    assert not (tmp_path / "never").exists()
