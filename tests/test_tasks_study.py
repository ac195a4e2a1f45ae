"""The study of token classification and extractive answers: its rows, its runs on a tiny model, and its tables."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import programs
import pytest
import report_study
import stdlib_tasks
import tasks_study
import tiny_glue
from hypothesis import given
from hypothesis import strategies as st
from repo import ROOT
from stdlib_tasks import ROLES, Part, Question, questions_of, roles_of
from tasks_study import BASIC, FLOAT, LOOKUP, ROUNDED, SETTINGS, TAUGHT, TAUGHT_MOQ, Found, Settings, Spans
from tiny_glue import quiet_logging
from transformers import AutoConfig, AutoModel

__all__ = ["quiet_logging"]
MODULE = '''"""Docstring."""
import os.path as place
from .near import (first,
                   second as other)

@first.wrap(key=1)
class _Big(Exception):
    SIZE: int = 3

    def __method__(self, größe, *rest, flag=place.sep):  # a comment
        """Docstring."""
        for _item in rest: self.total = größe.name.find(_item, start=flag)
        with other() as handle:
            return f"{self.total} {handle}" + "literal"
'''


def test_each_name_has_its_role() -> None:
    assert " ".join(f"{word}:{role}" for word, role in roles_of(MODULE)) == (
        "os:import path:import place:import near:import first:import second:import other:import "
        "first:other wrap:call key:argument big:class exception:other "
        "size:assigned int:other "
        "method:function self:parameter größe:parameter rest:parameter flag:parameter place:other sep:attribute "
        "item:assigned rest:other self:other total:attribute größe:other name:attribute find:call item:other "
        "start:argument flag:other "
        "other:call handle:assigned"
    )


FUNCTIONS = '''
def outer(a, b="ä", *, c=(1, 2), d):
    """Docstring of
    two lines."""
    x = f(a,
          b)
    y = 1
    y = 2
    if a > 3:
        raise ValueError("no")
    def inner(z):
        return z + 1
    for item in range(a): pass
    return x

class A:
    def two(self):
        "Docstring."
        if self.x: return 1
        return 2

    def again(self): raise self.error

    def long(self):
        return "THE LONG ONE"
'''.replace("THE LONG ONE", "long " * 20)


def test_the_questions_have_one_answer_each_in_the_source_without_docstring() -> None:
    asked = {question.question: question for question in questions_of(FUNCTIONS)}
    assert {text: question.answer for text, question in asked.items()} == {
        "what is the default of b in outer?": '"ä"',
        "what is the default of c in outer?": "(1, 2)",
        "what is x set to in outer?": "f(a,\n          b)",
        "which error does outer raise?": "ValueError",
        "when does outer raise an error?": "a > 3",
        "what does outer loop over?": "range(a)",
        "what does outer return?": "x",
        "what does inner return?": "z + 1",
    }
    assert {question.kind for question in asked.values()} == {
        "default",
        "value",
        "error",
        "condition",
        "loop",
        "result",
    }
    assert not any("Docstring" in question.context for question in asked.values())
    context = asked["what does outer return?"].context
    assert context.startswith("def outer(") and context.endswith("    return x")


def test_modules_are_held_out_whole(tmp_path: Path) -> None:
    (tmp_path / "asyncio").mkdir()
    for name in ("asyncio/tasks", "argparse"):
        (tmp_path / f"{name}.py").write_text(FUNCTIONS, encoding="utf-8")
    train, validation = stdlib_tasks.read(tmp_path)
    assert list(train.roles) == list(train.spans) == ["argparse"]
    assert list(validation.roles) == list(validation.spans) == ["asyncio.tasks"]
    assert len(train.spans["argparse"]) == 8


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=8), st.integers(1, 9))
def test_the_best_span_is_that_of_all(logits: list[tuple[float, float]], longest: int) -> None:
    starts, ends = np.array(logits).T
    first, last = tasks_study.best_span(starts, ends, longest)
    every = [(i, j) for i in range(len(logits)) for j in range(i, len(logits)) if j - i < longest]
    assert (first, last) in every
    assert starts[first] + ends[last] == max(starts[i] + ends[j] for i, j in every)


@pytest.mark.parametrize(
    ("right", "answer", "f1"),
    [
        ("self.size", "SELF . size", 1.0),
        ("self.size", "size", 0.5),  # Precision 1, recall 1/3.
        ("f(a, a)", "a", 2 / 7),
        ("f(a)", "g[b]", 0.0),
        ("{}", "", 0.0),
    ],
)
def test_answers_are_compared_by_words_and_marks(right: str, answer: str, f1: float) -> None:
    assert tasks_study.token_f1(right, answer) == pytest.approx(f1)
    assert tasks_study.token_f1(answer, right) == pytest.approx(f1)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of the study of a tiny model on rows of its words, its output in `lines.jsonl`."""
    folder = tiny_glue.make_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(folder, hidden_size=64, intermediate_size=64)
    AutoModel.from_config(config).save_pretrained(folder)
    monkeypatch.setattr(stdlib_tasks, "read", lambda: (part(200), part(30)))
    small = {"roles": Settings(80, 8, 12, 4), "spans": Settings(80, 8, 24, 4)}
    monkeypatch.setattr(tasks_study, "SETTINGS", small)
    monkeypatch.setattr(tasks_study, "BITS", (2,))
    places = {"model_dir": "models", "output": "lines.jsonl", "model_name_or_path": "model"}
    return ["--seeds", "1", *(f"--{name}={tmp_path / place}" for name, place in places.items())]


def part(count: int) -> Part:
    """Names whose role is their word's, and questions whose answer follows the word "red"."""
    names = [
        (word, ROLES[len(word) % 3]) for row in tiny_glue.make_rows("sst2", count) for word in row["sentence"].split()
    ]
    questions = []
    for row in tiny_glue.make_rows("sst2", count, seed=1):
        context = f"{row['sentence']} red dog"
        questions.append(Question("value", "who", context, len(context) - 3, len(context)))
    return Part({"module": names}, {"module": questions})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.usefixtures("quiet_logging")
def test_the_study_runs_goes_on_and_is_reported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.warm()
    tasks_study.main(words)
    lines = lines_of(tmp_path)
    for task in SETTINGS:
        by_arm = {(line["arm"], line["bits"]): line for line in lines if line["task"] == task}
        low = (ROUNDED, TAUGHT, TAUGHT_MOQ, BASIC)
        assert list(by_arm) == [(LOOKUP, 32), (FLOAT, 32), *((arm, 2) for arm in low)]
        steps = {LOOKUP: 0, FLOAT: 20, ROUNDED: 0, TAUGHT: 20, TAUGHT_MOQ: 20, BASIC: 40}
        for (arm, bits), line in by_arm.items():
            assert line["steps"] == steps[arm]
            assert line.get("layer_bits", [bits]) == [bits]
            assert line["metrics"].keys() == {"f1", {"roles": "accuracy", "spans": "exact"}[task]}
            assert all(0 <= value <= 1 for value in line["metrics"].values())
        # Within 0.3 of the steps.
        assert 0 < by_arm[TAUGHT_MOQ, 2]["last_drop"] <= 6
        losses = [json.dumps(line["train_loss"]) for line in by_arm.values() if "train_loss" in line]
        assert len(set(losses)) == len(losses) == 4

    # What is there is not run again; what is lost comes out the same.
    lost = next(line for line in lines if (line["task"], line["arm"], line["bits"]) == ("spans", TAUGHT, 2))
    kept = [line for line in lines if line != lost]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    capsys.readouterr()
    tasks_study.main([*words, "--list", "--bits", "32"])
    assert capsys.readouterr().out == ""
    tasks_study.main([*words, "--list"])
    assert capsys.readouterr().out.splitlines() == [repr(tasks_study.Run("spans", TAUGHT, 2, 1, lost["rate"]))]
    tasks_study.main(words)
    again = lines_of(tmp_path)
    assert again[:-1] == kept
    assert all(again[-1][name] == lost[name] for name in ("metrics", "train_loss", "data"))

    page = tmp_path / "page.md"
    page.write_text("<!-- tasks spans -->\nold\n<!-- end of tasks spans -->\nafter\n", encoding="utf-8")
    tasks_study.main([*words, "--report", "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "old" not in text and text.endswith("after\n") and text.count(TAUGHT_MOQ) == 1


@pytest.mark.parametrize(
    ("arm", "bits", "start", "schedule"),
    [
        (BASIC, 2, 2, {"quantize_period": 1, "schedule_offset": 0}),
        (TAUGHT, 3, 3, {"quantize_period": 1, "schedule_offset": 0}),
        (TAUGHT_MOQ, 2, 4, {"quantize_period": "auto", "schedule_offset": 0, "deadline": 0.3}),
        (TAUGHT_MOQ, 3, 8, {"quantize_period": "auto", "schedule_offset": 0, "deadline": 0.3}),
    ],
)
def test_what_each_arm_is_quantized_with(arm: str, bits: int, start: int, schedule: dict[str, Any]) -> None:
    config = tasks_study.Run("roles", arm, bits, 1, 1e-4).config()
    delivered = json.loads((ROOT / "configs" / f"moq_w{bits}.json").read_text(encoding="utf-8"))
    grid = {name: delivered[name] for name in ("quantize_groups", "quantize_algo")}
    bit_range = {"start_bits": start, "target_bits": bits}
    assert config == {"quantize_bits": bit_range, "quantize_schedule": schedule, **grid}


def test_without_a_model_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tasks_study.main([])
    assert "--model_name_or_path is needed" in capsys.readouterr().err


def test_the_score_reads_the_answer_in_the_context() -> None:
    # Tokens: [CLS] who [SEP] a red dog [SEP] [PAD]; the best place of all is in the question.
    offsets = {3: (0, 1), 4: (2, 5), 5: (6, 9)}
    rows = [{"question": Question("value", "who", "a red dog", 2, 9), "offsets": offsets, "start_positions": 4}]
    task = SimpleNamespace(validation=rows, longest=30)
    task._metrics = lambda answers: Spans._metrics(task, answers)
    starts, ends = np.full((1, 8), -100.0), np.full((1, 8), -100.0)
    starts[0, [1, 4]], ends[0, [1, 4, 5]] = (9, 5), (9, 1, 3)
    prediction = SimpleNamespace(predictions=(starts, ends), label_ids=(np.array([4]), np.array([5])))
    assert Spans.score(task, prediction) == {"f1": 1.0, "exact": 1.0}
    ends[0, 4] = 4
    assert Spans.score(task, prediction) == {"f1": pytest.approx(2 / 3), "exact": 0.0}
    rows[0]["start_positions"] = 3
    with pytest.raises(ValueError, match="not in the order"):
        Spans.score(task, prediction)


def test_roles_are_scored_as_by_hand() -> None:
    # Two roles of three have something: class 1 precision 1/2, recall 1/1; class 2 recall 0.
    labels, predictions = np.array([0, 1, 2, 0]), np.array([0, 1, 1, 0])
    f1 = {1: 2 / 3, 2: 0.0}
    metrics = tasks_study.Roles._metrics(labels, predictions)
    assert metrics == {"f1": pytest.approx(sum(f1.values()) / (len(ROLES) - 1)), "accuracy": 0.75}


def test_tables_compare_the_same_seeds() -> None:
    def line(arm: str, bits: int, seed: int, f1: float) -> dict[str, Any]:
        run = tasks_study.Run("spans", arm, bits, seed, 0.0 if arm == LOOKUP else tasks_study.RATES["spans"])
        metrics = {"f1": f1 / 100, "exact": f1 / 200}
        return {**asdict(run), "moq": run.config(), "settings": asdict(SETTINGS["spans"]), "metrics": metrics}

    scores = {
        (FLOAT, 32): [60, 62, 64],
        (ROUNDED, 2): [10, 12, 14],
        (TAUGHT, 2): [66, 66, 66],
        (TAUGHT_MOQ, 2): [67, 68, 69],
        (BASIC, 2): [50, 52],
    }
    lines = [line(*key, seed, value) for key, values in scores.items() for seed, value in enumerate(values, 1)]
    lines.append(line(LOOKUP, 32, 0, 20))
    # Another seed, grid, rate or size does not count.
    other = line(BASIC, 2, 3, 90)
    lines += [line(FLOAT, 32, 9, 1), {**other, "rate": 1.0}, {**other, "moq": {}}, {**other, "settings": {}}]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in Found(lines, "spans").table().splitlines()[2:]]
    # Standard error 1 / sqrt 3 times Student's 4.303.
    assert rows == [
        ["", LOOKUP, "", "20.0", "10.0", "", "", ""],
        ["", FLOAT, "3", "62.0 (sd 2.0)", "31.0", "", "", ""],
        ["2", ROUNDED, "3", "12.0 (sd 2.0)", "6.0", "-50.0 ± 0.0", "", ""],
        ["2", TAUGHT, "3", "66.0 (sd 0.0)", "33.0", "+4.0 ± 5.0", "+15.0 ± 12.7 (2 of 3)", ""],
        ["2", TAUGHT_MOQ, "3", "68.0 (sd 1.0)", "34.0", "+6.0 ± 2.5", "+16.5 ± 6.4 (2 of 3)", "+2.0 ± 2.5"],
        ["2", BASIC, "2", "51.0 (sd 1.4)", "25.5", "-10.0 ± 0.0", "", ""],
    ]


def test_the_tables_are_those_of_the_committed_lines(tmp_path: Path) -> None:
    text, copy = (ROOT / "docs" / "evidence" / "tasks.md").read_text(encoding="utf-8"), tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    tasks_study.main(["--report", "--page", str(copy)])
    command = "python benchmarks/tasks_study.py --report --page docs/evidence/tasks.md"
    assert copy.read_text(encoding="utf-8") == text, f"renew them with: {command}"
    assert text.count("| bits | arm |") == len(SETTINGS)


def test_what_the_page_says_is_what_was_measured() -> None:
    text = " ".join((ROOT / "docs" / "evidence" / "tasks.md").read_text(encoding="utf-8").split())
    lines = (ROOT / "benchmarks" / "results" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    roles, spans = (Found([json.loads(line) for line in lines], task) for task in ("roles", "spans"))

    def apart(found: Found, ours: str, theirs: str, bits: int) -> str:
        return report_study.paired(found.scores(ours, bits), found.scores(theirs, 32 if theirs == FLOAT else bits))

    at_3, at_2 = ([apart(found, BASIC, TAUGHT, bits) for found in (roles, spans)] for bits in (3, 2))
    says = f"At 3 bits it ends {at_3[0]} points above float first on roles and {at_3[1]} on spans"
    assert says.replace("+", "") in text
    assert f"at 2 bits {at_2[0]} and {at_2[1]}, within the noise" in text
    above = [apart(found, BASIC, FLOAT, 3) for found in (roles, spans)]
    assert f"ends {above[0]} points above float on roles and {above[1]} on spans".replace("+", "") in text
    # The two levels of spans.
    trained = [
        value
        for arm, bits in spans.metrics
        if arm not in (LOOKUP, ROUNDED)
        for value in spans.scores(arm, bits).values()
    ]
    assert not [value for value in trained if 79 < value < 92] and min(trained) > 73


def test_the_committed_lines_are_of_one_study() -> None:
    text = (ROOT / "benchmarks" / "results" / "tasks.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    for task in SETTINGS:
        assert len({json.dumps([line["data"], line["settings"]]) for line in lines if line["task"] == task}) == 1
    assert {line["layer_bits"] == [line["bits"]] for line in lines if "layer_bits" in line} <= {True}
