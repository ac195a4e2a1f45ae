import json
import re
from pathlib import Path
from typing import Any

import glue_plans
import glue_study
import programs
import pytest
import report_study
import tiny_glue
from glue_plans import FLOAT, OWN, Plan, Run, qat, ramp
from transformers import AutoConfig, AutoModelForSequenceClassification

TAUGHT = {"distillation": {"teacher": OWN}}
PLAN = Plan((FLOAT, qat(2), ramp(3, 2, 0.8), ramp(3, 2, 0.8, "taught", TAUGHT)), ("sst2", "cola"), (1, 2))


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of the study of a tiny model, its output in `lines.jsonl`."""
    monkeypatch.setattr(glue_study, "PLANS", {"small": PLAN})
    monkeypatch.setattr(report_study, "PLANS", {"small": PLAN})
    model = tiny_glue.make_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(model, hidden_size=64, intermediate_size=64)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    for split, count in (("train", 160), ("validation", 24)):
        (tmp_path / "glue" / "sst2").mkdir(parents=True, exist_ok=True)
        tiny_glue.write_rows(tmp_path / "glue" / "sst2" / f"{split}.jsonl", tiny_glue.make_rows("sst2", count))
    places = {"data_dir": "glue", "model_dir": "models", "output": "lines.jsonl", "model_name_or_path": "model"}
    return ["--plan", "small", "--tasks", "sst2", *(f"--{name}={tmp_path / place}" for name, place in places.items())]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_study_runs_resumes_and_is_reported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.warm()
    glue_study.main([*words, "--seeds", "1"])
    lines = lines_of(tmp_path)
    after = [(line["bits"], line["groups"]) for line in lines if line["arm"] == "after training"]
    assert len(after) == len(set(after)) == 12
    trained = {line["arm"]: line for line in lines if line["arm"] != "after training"}
    assert trained.keys() == {"float", "basic QAT", "MoQ 3 by 0.8", "taught"}
    assert {line["steps"] for line in trained.values()} == {5}
    assert [trained[name]["last_drop"] for name in trained if "float" not in name] == [None, 4, 4]
    assert [line["mean_bits"] for line in trained.values()] == [32.0, 2.0, 2.0, 2.0]
    assert trained["basic QAT"]["train_loss"] != trained["MoQ 3 by 0.8"]["train_loss"]

    # Of a line that is lost only its run is done again, with the same outcome.
    kept = [line for line in lines if line["arm"] != "MoQ 3 by 0.8"]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    capsys.readouterr()
    glue_study.main([*words, "--seeds", "1", "--list"])
    assert capsys.readouterr().out.splitlines() == ["sst2 1 MoQ 3 by 0.8 2 8 blocks 0.0002"]
    glue_study.main([*words, "--seeds", "1"])
    again = lines_of(tmp_path)
    assert len(again) == len(lines)
    timed = ("seconds", "cpu_seconds")
    assert [v for k, v in again[-1].items() if k not in timed] == [
        v for k, v in trained["MoQ 3 by 0.8"].items() if k not in timed
    ]

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- study small -->\nold\n<!-- end of study small -->\nafter\n", encoding="utf-8")
    report_study.main(
        ["--plan", "small", f"--input={tmp_path / 'lines.jsonl'}", f"--page={page}", f"--figure={tmp_path / 'f.png'}"]
    )
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("after training") == 1
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_an_arm_meets_the_basic_qat_that_is_like_it() -> None:
    arm = ramp(8, 2, 0.3, "taught", TAUGHT, learning_rate=2e-4, groups="groups of 64", warm=2e-4)
    assert arm.basic() == qat(2, moq=TAUGHT, learning_rate=2e-4, groups="groups of 64", warm=2e-4)
    assert arm.plain() == qat(2, learning_rate=2e-4, groups="groups of 64")
    assert qat(2).basic() == qat(2)
    assert FLOAT.basic() is None
    blended = qat(2, "blend", {"fp16_mixed_quantize": {"enabled": True}})
    assert blended.basic() == qat(2)
    assert Run(blended, "sst2", 1).key() != Run(qat(2), "sst2", 1).key()
    # A share of the run is a step of the task's, of as many epochs as the arm has.
    late = qat(2, "late", offset=0.5, times=2, decay=glue_plans.RESTART)
    identity = Run(late, "cola", 1).identity()
    assert identity["moq"]["quantize_schedule"]["schedule_offset"] == 536
    assert (identity["epochs"], identity["decay"]) == (4, "cosine_with_restarts")
    assert late.basic() == late.plain() == qat(2, times=2, decay=glue_plans.RESTART)
    # The names of arms do not make other runs of them.
    assert Run(qat(2, "x"), "sst2", 1).key() == Run(qat(2), "sst2", 1).key()


def test_tables_compare_the_same_seeds_with_the_right_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    taught = {"moq": {"distillation": {"teacher": OWN}}, "warm": OWN}
    arms = (FLOAT, qat(2), ramp(8, 2, 0.3, "MoQ"), qat(2, "QAT, taught", **taught), ramp(8, 2, 0.3, "taught", **taught))
    monkeypatch.setattr(report_study, "PLANS", {"small": Plan(arms, seeds=(1, 2, 3))})
    # By task, then arm: the scores of seeds 1, 2, 3. CoLA is without seed 1; MoQ ties with basic QAT on MRPC.
    scores = {
        "sst2": ([90, 91, 92], [80, 81, 82], [82, 82, 82], [85, 86, 87], [88, 88, 88]),
        "cola": ([None, 30, 32], [None, 10, 12], [None, 12, 14], [None, 20, 20], [None, 20, 22]),
        "mrpc": ([80, 81, 82], [75, 75, 75], [75, 75, 75], [77, 78, 79], [78, 79, 80]),
    }
    lines: list[dict[str, Any]] = []
    for task, by_arm in scores.items():
        name = "matthews_correlation" if task == "cola" else "accuracy"
        for arm, values in zip(arms, by_arm, strict=True):
            for seed, value in enumerate(values, 1):
                if value is not None:
                    common = {**Run(arm, task, seed).identity(), "metrics": {name: value / 100}}
                    lines.append({**common, "arm": arm.name, "bits": arm.bits, "groups": arm.groups})
                    if arm is FLOAT:
                        after = {"arm": "after training", "bits": 2, "groups": "8 blocks"}
                        # A seed that the plan has not, a part of the data, and other scales do not count.
                        lines.append({**common, **after, "metrics": {name: (value - 20) / 100}})
                        lines.append({**common, **after, "seed": 4})
                        lines.append({**common, **after, "rows": 7})
                        lines.append({**common, **after, "groups": "per channel"})
    found = report_study.rows("small", lines)
    text = report_study.tables(found, list(scores))
    cells = [[line.split(" | ")[2:] for line in each.splitlines()[2:]] for each in text]
    assert cells[0] == [
        ["float", "91.0 (sd 1.0)", "3", "", "", " |"],
        ["basic QAT", "81.0 (sd 1.0)", "3", "-10.0 ± 0.0", "", " |"],
        ["MoQ", "82.0 (sd 0.0)", "3", "-9.0 ± 2.5", "+1.0 ± 2.5", "+1.0 ± 2.5 |"],
        ["QAT, taught", "86.0 (sd 1.0)", "3", "-5.0 ± 0.0", "+5.0 ± 0.0", " |"],
        ["taught", "88.0 (sd 0.0)", "3", "-3.0 ± 2.5", "+7.0 ± 2.5", "+2.0 ± 2.5 |"],
        ["after training", "71.0 (sd 1.0)", "3", "-20.0 ± 0.0", "", " |"],
    ]
    # A tie is told.
    assert cells[2][2] == ["MoQ", "75.0 (sd 0.0)", "3", "-6.0 ± 2.5", "+0.0 ± 0.0", "+0.0 ± 0.0 |"]
    # Over all three, seeds 2 and 3 alone: (91 + 30 + 81) / 3 and (92 + 32 + 82) / 3.
    assert cells[3][0] == ["float", "68.0 (sd 0.9)", "2", "", "", " |"]
    # (88 + 20 + 79) / 3 and (88 + 22 + 80) / 3, of basic QAT (81 + 10 + 75) / 3 and (82 + 12 + 75) / 3.
    assert cells[3][4][:4] == ["taught", "62.8 (sd 0.7)", "2", "-5.2 ± 2.1"]
    assert cells[3][4][4].startswith("+7.0 ± ") and len(text) == 4
    assert len(report_study.tables(found, ["sst2", "mrpc"])) == 2
    assert len(report_study.others(lines)) == 2
    monkeypatch.setattr(report_study, "PLANS", {"small": Plan(arms[:2], seeds=(1, 2, 3))})
    # The float runs of the taught arms are no runs of their own.
    assert len(report_study.others(lines)) == 2 + 3 * 8


def test_differences_are_paired() -> None:
    ours, theirs = {1: 80.0, 2: 70.0, 3: 60.0, 4: 1.0}, {1: 79.0, 2: 68.0, 3: 57.0}
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, and Student's t of 2 degrees of freedom is 4.303.
    assert report_study.paired(ours, theirs) == "+2.0 ± 2.5 (3 of 4)"
    assert report_study.paired({1: 80.0}, theirs) == "+1.0"
    assert report_study.paired({1: 80.0, 9: 1.0}, theirs) == "+1.0 (1 of 2)"
    assert report_study.paired({9: 80.0}, theirs) == ""
    assert report_study.score({"accuracy": 0.7, "f1": 0.8, "loss": 1.0}) == pytest.approx(75.0)
    assert report_study.score({"matthews_correlation": 0.3, "loss": 1.0}) == pytest.approx(30.0)


@pytest.mark.parametrize("name", ["results", "study", "recipes"])
def test_the_tables_are_those_of_the_committed_lines(name: str, tmp_path: Path) -> None:
    page, copy = tiny_glue.ROOT / "docs" / "evidence" / f"{name}.md", tmp_path / "page.md"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    plans = re.findall(r"<!-- study (\w+) -->", text)
    report_study.main(["--plan", *plans, "--page", str(copy)])
    command = f"python benchmarks/report_study.py --plan {' '.join(plans)} --page docs/evidence/{name}.md"
    assert copy.read_text(encoding="utf-8") == text, f"renew them with: {command}"


def test_every_plan_is_on_a_page() -> None:
    pages = (tiny_glue.ROOT / "docs" / "evidence" / f"{name}.md" for name in ("results", "study", "recipes"))
    shown = [plan for page in pages for plan in re.findall(r"<!-- study (\w+) -->", page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted([*glue_plans.PLANS, "others"])


@pytest.mark.parametrize(
    ("recipe", "plan", "bits", "name"),
    [
        ("moq_8to4", "main", 4, "MoQ"),
        ("moq_w4", "recipes", 4, "basic QAT, float first"),
        ("moq_w3", "recipes", 3, "basic QAT, float first"),
        ("moq_w2", "recipes", 2, "basic QAT, float first"),
    ],
)
def test_the_recipes_for_low_bits_are_what_was_measured(recipe: str, plan: str, bits: int, name: str) -> None:
    # Of the grids that were tried the first one listed.
    arm = next(arm for arm in glue_plans.PLANS[plan].arms if (arm.bits, arm.name) == (bits, name))
    measured = {key: value for key, value in (arm.config() or {}).items() if key != "distillation"}
    text = (tiny_glue.ROOT / "configs" / f"{recipe}.json").read_text(encoding="utf-8")
    written = json.loads(text)
    del written["$schema"]
    assert written == measured


def test_what_the_guides_promise_is_what_was_measured() -> None:
    """The differences on average over all tasks, of each recipe, of basic QAT and of rounding."""
    pages = {
        name: (tiny_glue.ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/evidence/recipes.md", "docs/guide/which-recipe.md", "configs/README.md", "README.md")
    }
    text = pages["docs/evidence/recipes.md"].split("<!-- study recipes -->")[1].split("| all three |")[1]
    lines = [line for line in text.split("<!--")[0].splitlines() if ", full |" in line]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert all(row[4] == "5" for row in rows)
    in_groups = {int(row[0]): row[5] for row in rows if row[1] == "groups of 32, full"}
    rows = [row for row in rows if row[1] == "per channel, full"]
    found = {(int(row[0]), row[2]): row[5] for row in rows}
    for bits in (4, 3, 2):
        rounded, ours = found[bits, "after training"], found[bits, "basic QAT, float first"]
        plain = found[bits, "basic QAT, all steps"]
        cells = f"| {bits} | {rounded} | {in_groups[bits]} | {ours} | {plain} |"
        assert " ".join(cells.split()) in pages["docs/guide/which-recipe.md"]
        cells = f"| {bits} | {ours} | {plain} | {rounded} | {in_groups[bits]} |"
        assert " ".join(cells.split()) in pages["configs/README.md"]
    ahead = {int(row[0]): row[6].removeprefix("+") for row in rows if row[2] == "basic QAT, float first"}
    told = " ".join(pages["docs/evidence/recipes.md"].split())
    assert f"basic QAT of as many steps ends {ahead[4].removeprefix('-')} points above float first" in told
    assert f"At 3 bits float first is ahead by {ahead[3]}" in told
    assert f"the differences, {ahead[4]} and {ahead[3]} points" in pages["docs/guide/which-recipe.md"]
    scheduled = {int(row[0]): row[7] for row in rows if row[2] == "MoQ 8 by 0.3, float first"}
    assert f"gains nothing: {scheduled[3]} and {scheduled[4]} points" in told
    below = found[2, "basic QAT, float first"].removeprefix("-")
    assert f"{below} points below float on average over three tasks and five seeds" in pages["README.md"]
    assert f"is {found[2, 'basic QAT, all steps'].removeprefix('-').split()[0]} below" in pages["README.md"]


def committed(plan: str) -> list[report_study.Row]:
    """The means over the tasks of the committed lines of a plan."""
    text = (tiny_glue.ROOT / "benchmarks" / "results" / "glue_study.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return report_study.average(report_study.rows(plan, lines), glue_plans.PLANS[plan].tasks)


def recipes_page() -> str:
    """The page of the recipes, in one line."""
    return " ".join((tiny_glue.ROOT / "docs" / "evidence" / "recipes.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("groups", "name", "says"),
    [
        ("per channel, full", "after training", "ahead of rounding the float model to the same grid by {}"),
        ("groups of 32, full", "after training", "of rounding it in groups of 32 by {}"),
        ("per channel", "basic QAT, float first", "are ahead of ternary by {}"),
        ("per channel, full", "basic QAT, all steps", "by more than the noise: by {} on average"),
    ],
)
def test_what_2_bits_are_ahead_of_is_what_was_measured(groups: str, name: str, says: str) -> None:
    """On average over the tasks, the recipe against another arm, of which no table shows the difference."""
    means = committed("recipes")
    scores = {(row.arm.groups, row.arm.name): row.scores for row in means if row.arm.bits == 2 and not row.arm.averaged}
    ahead = report_study.paired(scores["per channel, full", "basic QAT, float first"], scores[groups, name])
    assert says.format(ahead.removeprefix("+")) in recipes_page()


def test_the_leads_on_the_results_page_were_measured() -> None:
    page = (tiny_glue.ROOT / "docs" / "evidence" / "results.md").read_text(encoding="utf-8")
    table = page.split("| bits | lead of | over |")[1].split("\n\n")[0].splitlines()[2:]
    text = (tiny_glue.ROOT / "benchmarks" / "results" / "glue_study.jsonl").read_text(encoding="utf-8")
    found = report_study.rows("main", [json.loads(line) for line in text.splitlines()])
    found += report_study.average(found, glue_plans.PLANS["main"].tasks)
    scores = {(row.task, row.arm.bits, row.arm.name): row.scores for row in found}
    assert len(table) == 14
    for line in table:
        bits, ours, theirs, *leads = [cell.strip() for cell in line.split("|")[1:-1]]
        names = ["MoQ" if name == "`moq_8to4.json`" else name for name in (ours, theirs)]
        for task, lead in zip(("mean", "sst2", "cola", "mrpc"), leads, strict=True):
            own, other = (scores[task, int(bits), name] for name in names)
            assert not lead or lead == report_study.paired(own, other).removeprefix("+")
    cost = report_study.paired(scores["mean", 4, "basic QAT"], scores["mean", 32, "float"]).removeprefix("-")
    assert f"Basic QAT costs {cost}." in page
    arms = ("MoQ", "basic QAT", "after training")
    cells = [report_study.paired(scores["mean", 8, arm], scores["mean", 32, "float"]) for arm in arms]
    told = "**8 bits** show no cost: {} with MoQ, {} with basic QAT, {} quantized after training.".format(*cells)
    assert told in " ".join(page.split())
    of_mrpc = [scores["mrpc", 8, "basic QAT"], scores["mrpc", 32, "float"]]
    lost = sorted(of_mrpc[1][seed] - of_mrpc[0][seed] for seed in of_mrpc[0])
    assert len(lost) == 5 and round(lost[-1]) == 5 and max(map(abs, lost[:-1])) < 0.9


def test_what_the_phases_make_was_measured() -> None:
    text = (tiny_glue.ROOT / "benchmarks" / "results" / "glue_study.jsonl").read_text(encoding="utf-8")
    rows = report_study.rows("phases", [json.loads(line) for line in text.splitlines()])
    scores = {task: {row.arm.name: row.scores for row in rows if row.task == task} for task in ("sst2", "cola")}
    scores["mean"] = {row.arm.name: row.scores for row in committed("phases")}
    recipe = "basic QAT, float first"

    def lead(name: str, task: str = "mean") -> str:
        return report_study.paired(scores[task][name], scores[task][recipe]).lstrip("+")

    four = "MoQ 4 by 0.3, float first"
    for says in (
        f"**By way of 4 or 8 bits**: {lead(four)} and {lead('MoQ 8 by 0.3, float first')} points.",
        f"in the quantized phase alone: {lead(f'{recipe} at a constant rate')}.",
        f"float models are worse, {lead(f'{recipe} at a constant rate', 'sst2')}.",
        f"**Without the teacher**: {lead(f'{recipe}, no teacher')}.",
        f"**Half of the steps**: {lead(f'{recipe}, half the steps')}, and by way of 4 bits "
        f"{lead(f'{four}, half the steps')}.",
        f"On SST-2 it is {lead(f'{recipe}, half the steps', 'sst2')}.",
        f"**Twice the steps**, on SST-2 alone and with two seeds: {lead(f'{recipe}, twice the steps', 'sst2')}, "
        f"and by way of 4 bits {lead(f'{four}, twice the steps', 'sst2')}.",
    ):
        assert says in recipes_page()
    assert {len(found) for found in scores["mean"].values()} == {3}
    guide = (tiny_glue.ROOT / "docs" / "guide" / "which-recipe.md").read_text(encoding="utf-8")
    assert f"ended {lead(f'{recipe}, half the steps').removeprefix('-')} points lower" in " ".join(guide.split())
    # Ahead of the recipe beyond the noise is none.
    for task, arms in scores.items():
        for name in arms:
            if name not in (recipe, "float"):
                ahead, interval = (float(part.split()[0]) for part in lead(name, task).split(" ± "))
                assert ahead < interval
    # Half of a float run learns nothing of CoLA: its Matthews correlation is 0.
    lines = map(json.loads, text.splitlines())
    halves = [x for x in lines if (x["task"], x["arm"], x["epochs"], x.get("bf16")) == ("cola", "float", 1, True)]
    assert len(halves) == 3 and all(x["metrics"]["matthews_correlation"] == 0.0 for x in halves)


def test_no_other_grid_is_ahead_at_2_bits() -> None:
    scores = {row.arm.groups: row.scores for row in committed("grids") if row.arm.name == "basic QAT, float first"}
    own = scores.pop("per channel, full")
    behind = {groups: report_study.paired(own, other).split(" ± ") for groups, other in scores.items()}
    assert all(0 < float(mean) < float(interval) for mean, interval in behind.values())
    points = {groups: mean.removeprefix("+") for groups, (mean, _) in behind.items()}
    few = [points[f"groups of 32{grid}"] for grid in ("", ", full", ", asymmetric")]
    says = (
        "asymmetric grids per channel and groups of 64 end {} points behind it, groups of 32 by {} to {}, "
        "ternary per channel {}."
    ).format(points["per channel, asymmetric"], min(few), max(few), points["per channel"])
    assert points["per channel, asymmetric"] == points["groups of 64, full"] and says in recipes_page()


def test_mixed_bits_are_as_far_ahead_of_3_bits_throughout_as_was_measured() -> None:
    scores = {row.arm.name: row.scores for row in committed("budgets") if row.arm.bits == 3}
    divergence, trace = (
        report_study.paired(scores[f"3 bits on average by {measure}, float first"], scores["basic QAT, float first"])
        for measure in ("divergence", "trace")
    )
    says = f"Chosen by divergences they end {divergence} points above it on average, by traces {trace}."
    assert says.replace("+", "") in recipes_page()


def test_every_plan_is_sound() -> None:
    for plan in glue_plans.PLANS.values():
        keys = [Run(arm, task, 1).key() for arm in plan.arms for task in plan.tasks]
        assert len(set(keys)) == len(keys)
        from moq_hf import MoQConfig

        for arm in (arm.on("sst2") for arm in plan.arms):
            if arm.moq is not None:
                config = dict(arm.config() or {})
                if "distillation" in config:
                    config["distillation"] = {**config["distillation"], "teacher": "folder"}
                target = MoQConfig.from_dict(config).target_bits
                assert (target if isinstance(target, int) else target.mean) == arm.bits
