"""What the docs say was measured is what the committed lines say; what moves no line is left to the reader."""

import importlib
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import glue_plans
import perplexity
import programs
import pytest
import report_study
import results_page
import tiny_glue
from glue_plans import FLOAT, OWN, Plan, qat, ramp
from lines import Lines
from repo import ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification

from moq_hf import MoQConfig
from moq_hf.grid import MOST_FULL_BITS

RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_committed_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = "|".join(map(re.escape, results_page.TABLES))
    stale = re.sub(rf"(?s)(?<=-->\n)\|(?:(?!<!-- ).)*(?=<!-- end of (?:{made}) -->)", "| stale |\n", text)
    assert stale != text and results_page.renewed(stale) == text, "renew them with: python benchmarks/results_page.py"


def test_every_table_is_on_a_page_and_every_mark_has_a_table() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in results_page.PAGES)
    # Those of docs/reference/support.md that tests make, of runs and of `moq_hf.serving`.
    others = ("families", "models", "servers")
    found = re.findall(r"^<!-- end of (.+) -->$", pages, re.MULTILINE)
    assert sorted(found) == sorted([*results_page.TABLES, *others])


def test_every_file_of_results_is_used() -> None:
    """By a table, or by name in a page, a test or the code that rests on it."""
    places = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "moq_hf").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in (*places, *(ROOT / "benchmarks").glob("*.py"))]
    names = [path.stem for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")]
    named = re.compile(r"""["(/]({})(?:\.jsonl?|["'])""".format("|".join(names)))
    assert {*names} - {name for text in texts for name in named.findall(text)} == set()


def test_what_was_tried_beside_other_libraries_works() -> None:
    for beside, row in result("neighbors")["neighbors"].items():
        basics = row["uses"]["basics"]
        # What compressed-tensors packs from 0.18 on.
        is_old = row["versions"]["compressed-tensors"].startswith("0.17.")
        failed = {name for name, layout in basics.items() if layout != "packed"}
        assert failed == ({"BERT, 3 bits"} if is_old else set()), beside
        assert [said for name, said in row["uses"].items() if name != "basics" and said.startswith("error")] == []
        assert row["conflicts"] == [], beside
        for library in ("transformers", "compressed-tensors") if row["needs_cuda"] else ():
            assert row["versions"][library] == row["resolved"][library]


def test_the_figures_of_language_models_are_those_of_the_run() -> None:
    text, found = page("examples/sft/README.md"), result("sft")
    assert [size for size in found["bytes"].values() if f"| {size:,} |" not in text] == []
    for server, right in found["right"].items():
        assert f"| {right} of {found['questions']}, {server} |" in text


def results_text(name: str) -> str:
    return " ".join(page(f"docs/results/{name}.md").split())


def test_what_recipes_say_outside_of_their_tables() -> None:
    text = results_text("recipes")
    steps = [2 * glue_plans.STEPS[task] * glue_plans.EPOCHS[task] for task in glue_plans.EPOCHS]
    assert f"{steps[0]:,}, {steps[1]:,} and {steps[2]:,}" in text
    for plan in ("recipes", "main"):
        assert len(glue_plans.PLANS[plan].seeds) == 5
    assert len(glue_plans.PLANS["phases"].seeds) == len(perplexity.SEEDS) == 3
    parameters = sorted({line["parameters"] for line in Lines(RESULTS / "perplexity.jsonl").lines})
    assert "Llamas of {:.2f} and {:.2f} million weights".format(*(count / 1e6 for count in parameters)) in text
    grids = [grid for line in results_page.lines_of("sensitivity") for grid in line["grids"].values()]

    def ranks(measure: str, yardstick: str) -> str:
        found = [of_bits[yardstick][measure] for grid in grids for of_bits in grid["ranks"].values()]
        return f"{min(found):.2f} to {max(found):.2f}"

    told = [ranks(measure, by) for by in ("divergence", "rise") for measure in ("divergence", "eigenvalue")]
    assert (
        "with divergence on other rows by {}, eigenvalues' by {}; with the rise of the loss there by {} and {}."
    ).format(*told) in text
    counts = {len(results_page.points(name, bits)) for name in results_page.RECIPES for bits in results_page.BITS}
    fresh = [line for line in report_study.lines() if line["seed"] in results_page.FRESH]
    assert counts == {5} and {line["machine"]["gpu"] for line in fresh} == {"NVIDIA H100 80GB HBM3"}
    assert "on one H100 in bfloat16:" in text and all(line["bf16"] for line in fresh)
    four, three = (ahead_of(GROUPS_OF_32, bits) for bits in (4, 3))
    assert is_noise(four) and is_noise(three) and f"does not beat groups of 32 ({four} and {three})." in text
    basic, grouped = (ahead_of(name, 2, "sst2") for name in ("basic QAT", GROUPS_OF_32))
    told = f"SST-2 alone shows no lead over basic QAT or groups of 32 ({basic} and {grouped})".replace("+", "")
    assert is_noise(basic) and is_noise(grouped) and told in text
    groups = [
        report_study.paired(results_page.points(GROUPS_OF_32, bits), results_page.points("rounding", bits))
        for bits in (4, 3)
    ]
    assert f"in the first table they differ by {groups[0]} and {groups[1].removeprefix('+')};" in text
    tried = {
        (line["warm"], line["learning_rate"]): report_study.score(line["metrics"])
        for line in report_study.lines()
        if (line["task"], line["seed"], line["arm"]) == ("mrpc", 1, results_page.NO_DROPOUT.arm)
        and not line.get("bf16")
        and line["bits"] == 2
    }
    gains = [f"{each:.1f}" for each in results_page.at_other_rates().values()]
    told = f"and gain {gains[0]} and {gains[1]} on the mean of the tasks with seeds 3 and 4."
    assert told in text and f"the best ones without it gain {max(gains)} on two other seeds." in readme()
    own, slower, second = (tried[rates] for rates in ((2e-4, 2e-4), (1e-4, 1e-4), (2e-4, 1e-4)))
    told = f"with seed 1 moq_hf has {own:.1f} there at 2 bits, {slower:.1f} at 1e-4, and {second:.1f} with 1e-4 in the"
    assert len(tried) == 3 and told in text


def gains_without_dropout(ways: report_study.Ways, *tasks: str) -> str:
    """At 2 bits, in float32."""
    runs = [results_page.in_float32(ways)._replace(dropout=False), results_page.in_float32(ways)]
    return report_study.paired(*(report_study.average(tasks, each, 2) for each in runs)).removesuffix(" (4 of 5)")


def test_what_is_said_of_dropout() -> None:
    ours = results_page.MOQ_HF
    cola, sst2, both = (gains_without_dropout(ours, *tasks) for tasks in (("cola",), ("sst2",), results_page.TWO))
    assert is_win(cola) and is_win(both) and is_noise(sst2)
    assert f"CoLA gains {cola.removeprefix('+')} points, SST-2 nothing ({sst2})." in results_text("recipes")


def gain(
    ours: report_study.Ways,
    theirs: report_study.Ways,
    bits: tuple[int, int] = (32, 32),
    seeds: int = 10,
) -> str:
    """The paired difference of two ways over all tasks; the bits are those of each."""
    found = results_page.ahead_everywhere(results_page.ALL, ours, theirs, bits)
    assert len(found) == seeds
    return report_study.interval(found)


def ends_of_all_seeds() -> list[str]:
    """Against float, at 4, 3 and 2 bits."""
    ours, reference = results_page.NO_DROPOUT, results_page.FLOAT_NO_DROPOUT
    return [gain(ours, reference, (bits, 32), seeds=seeds) for bits, seeds in ((4, 8), (3, 8), (2, 10))]


def on_page_one(ours: report_study.Ways, theirs: report_study.Ways, bits: int, behind: int = 32) -> str:
    found = results_page.ahead_everywhere(results_page.ALL, ours, theirs, (bits, behind))
    return report_study.interval({seed: found[seed] for seed in results_page.FRESH})


def test_what_is_said_of_dropout_in_the_float_phase() -> None:
    text = results_text("recipes")
    ours, half_dropout = results_page.NO_DROPOUT, results_page.HALF_DROPOUT
    reference, long = results_page.FLOAT_NO_DROPOUT, results_page.LONG
    half = gain(results_page.FLOAT._replace(dropout=False), results_page.FLOAT)
    whole, two = gain(reference, long), gain(ours, half_dropout, (2, 2))
    four, three = (gain(ours, half_dropout, (bits, bits), seeds=8) for bits in (4, 3))
    assert all(map(is_win, (half, whole, two))) and is_noise(four) and is_noise(three)
    told = "that half gains {} without it, float for all steps {}, and 2 bits {}; over eight seeds 4 and 3 bits gain"
    told += " {} and {}. So neither phase has it by default."
    assert told.format(*(each.removeprefix("+") for each in (half, whole, two, four, three))) in text
    assert "All of them end at {}, {} and {} at 4, 3 and 2 bits.".format(*ends_of_all_seeds()) in text
    ends = [on_page_one(ours, long, bits) for bits in results_page.BITS]
    lower = on_page_one(long, reference, 32)
    told = f"with dropout, which ends at {lower}, moq_hf has {ends[0]}, {ends[1]} and {ends[2]} at 4, 3 and 2 bits."
    assert told in text and not is_noise(lower)
    basic = on_page_one(results_page.BASIC._replace(dropout=False), reference, 2)
    assert f"Without it 2 bits end at {basic} (the best" in text
    four, three = basic_without_dropout_over_ours()
    assert f"4 and 3 bits show no difference from moq_hf (three other seeds, {four} and {three})." in text
    # What the tables have is the default.
    assert not MoQConfig(bits=2).distillation.dropout and results_page.RECIPES["moq_hf"] == ours


def test_what_tables_at_8_bits_change() -> None:
    changes = results_page.tables_at_8_bits()
    most, mean = max(map(abs, changes)), abs(statistics.fmean(changes))
    told = (
        f"8 bits moved the scores of {len(changes)} rounded models by {mean:.1f} points on average, {most:.1f} at most"
    )
    assert told in readme()


def test_what_is_said_of_other_tasks() -> None:
    text, ours = results_text("recipes"), "float first, no dropout"

    def leads_of(task: str, arm: str) -> list[str]:
        """At 3 and 2 bits; rounding is of a float model, which has 32."""
        found = []
        for bits in (3, 2):
            rounded = f"{bits}, groups of 32, full" if arm == "float, as many steps" else ""
            behind = results_page.f1_of(task, arm, 32 if rounded else bits, rounded)
            found.append(report_study.paired(results_page.f1_of(task, ours, bits), behind))
        return found

    three, two = leads_of("roles", "basic QAT")
    led = leads_of("roles", "float, as many steps")[1].removeprefix("+")
    told = f"does not beat basic QAT ({three} and {two}); at 2 bits it beats rounding there by {led}."
    assert is_noise(three) and is_noise(two) and is_win(led) and told in text
    basic, rounding = (leads_of("spans", arm) for arm in ("basic QAT, no dropout", "float, as many steps"))
    assert all(map(is_noise, [*basic, *rounding, *leads_of("spans", "basic QAT")]))
    found = results_page.f1_of("spans", ours, 2).values()
    told = f"over basic QAT without dropout ({' and '.join(basic)}) or rounding ({' and '.join(rounding)});"
    told += f" its three seeds at 2 bits range from {min(found):.1f} to {max(found):.1f}."
    assert told in text
    told = "on question answering three seeds lie too far apart to tell whether it beats either."
    assert told in readme() and told in which_preset()
    told = f"On token classification it beats rounding in groups of 32 by {led}, but not basic QAT"
    assert f"{told} ({two.removeprefix('+')});" in readme() and "float first did not beat basic QAT." in which_preset()


def test_what_recipes_say_of_grids() -> None:
    text, rounding = results_text("recipes"), results_page.ROUNDED_32
    grid = {name: rounding._replace(groups=name) for name in glue_plans.GROUPS}
    led = [lead(bits, rounding, grid["per channel, full"]) for bits in (4, 3)]
    assert f"Groups of 32 beat a scale per channel by {led[0]} at 4 bits and {led[1]} at 3".replace("+", "") in text
    assert not any(map(is_noise, led))
    assert all(is_noise(lead(3, grid[f"groups of {size}, full"], grid["per channel, full"])) for size in (64, 128))
    assert all(
        is_noise(lead(4, *(grid[f"groups of {size}, {how}"] for how in ("absmax", "full")))) for size in (32, 128)
    )
    coarse, fine = (results_page.rounded_to(f"groups of {size}, absmax", 4) for size in (128, 32))
    assert f"`scale: absmax` gives {coarse} and {fine} at 4 bits in groups of 128 and 32, which is no" in text


def test_what_recipes_say_of_one_bit() -> None:
    tables = (glue_plans.ONE_BIT_RATES, glue_plans.FALLING_RATES)
    once, by_two = (
        report_study.Ways(arm.name, rates=rates, dropout=False)
        for arm, rates in zip(glue_plans.PLANS["one bit"].arms, tables, strict=True)
    )
    seed = glue_plans.PLANS["one bit rates"].seeds[0]
    for ways in (once, by_two):
        for task in results_page.ALL:
            tried = {
                rate: report_study.scores(task, ways._replace(rates={task: rate}, gpu=True), 1)[seed]
                for rate in (5e-5, *glue_plans.THREE_RATES)
            }
            assert max(tried, key=tried.__getitem__) == ways.rates[task]
    at_once, falling = (results_page.on_a_gpu(results_page.ALL, ways, 1) for ways in (once, by_two))
    told = report_study.paired(falling, at_once)
    assert len(falling) == len(at_once) == 5 and is_noise(told)
    lost = report_study.paired(at_once, results_page.on_a_gpu(results_page.ALL, results_page.FLOAT_NO_DROPOUT))
    told = f"1 bit at once ends {lost.removeprefix('-')} below float, and by way of 2 it is no better ({told};"
    assert f"{told} five seeds, rates chosen on another)." in results_text("recipes")


def test_what_recipes_say_of_relations() -> None:
    gained: dict[tuple[str, int], float] = {}
    for basis in (results_page.NO_DROPOUT, results_page.FINISHED_NO_DROPOUT):
        related = basis._replace(arm=f"{basis.arm}, relations")
        found = results_page.ahead_everywhere(results_page.ALL, related, basis, (2, 2))
        assert is_noise(report_study.interval(found))
        gained |= {(basis.arm, seed): points for seed, points in found.items()}
    told = report_study.interval(gained)
    assert is_win(told) and len(gained) == 14
    told = (
        f"gain {told.removeprefix('+')} points over both starts together (14 seeds), and noise over each: no default."
    )
    assert told in results_text("recipes")


def test_what_is_said_of_language_models() -> None:
    lines = Lines(RESULTS / "perplexity.jsonl").lines
    sizes = [perplexity.Found(lines, size) for size in perplexity.SIZES]

    def lead(found: perplexity.Found, bits: int, arm: str, other: str) -> str:
        return report_study.paired(found.shares(other, bits), found.shares(arm, bits))

    def cost(arm: str, bits: int) -> str:
        means = (sum(found.shares(arm, bits).values()) / len(perplexity.SEEDS) for found in sizes)
        return "{:.1f} and {:.1f} %".format(*means)

    basic, gptq, rounded, taught = perplexity.BASIC, perplexity.GPTQ, perplexity.ROUNDED, perplexity.TAUGHT
    for found in sizes:
        assert not any(is_win(lead(found, bits, basic, gptq)) for bits in perplexity.BITS)
        assert [bits for bits in perplexity.BITS if is_win(lead(found, bits, basic, rounded))] == [2]
        assert all(is_win(lead(found, bits, taught, basic)) for bits in perplexity.BITS)
    larger = [lead(sizes[1], bits, taught, gptq) for bits in perplexity.BITS]
    assert all(map(is_win, larger))
    told = "larger model by {}, {} and {} at 4, 3 and 2 bits".format(*larger).replace("+", "")
    assert told in results_text("recipes")
    # What a teacher gives where rounding costs nothing, and what fewer bits cost then.
    eight = perplexity.NEARLY_FLOAT
    assert cost(rounded, eight).replace("-", "") == "0.0 and 0.0 %"
    gains = [report_study.paired(found.shares(taught, eight), dict.fromkeys(perplexity.SEEDS, 0.0)) for found in sizes]
    costs = [report_study.paired(found.shares(taught, 2), found.shares(taught, eight)) for found in sizes]
    costs = [each.removeprefix("+") for each in costs]
    told = "it gives {} and {}, and going from 8 to 2 bits costs {} and {}, no less than GPTQ".format(*gains, *costs)
    assert told in results_text("recipes")
    for found, own in zip(sizes, costs, strict=True):
        assert float(own.split(" ")[0]) >= sum(found.shares(gptq, 2).values()) / len(perplexity.SEEDS)
    guide = " ".join(page("docs/guide/language-models.md").split())
    most = max(float(each) for each in cost(rounded, 4).removesuffix(" %").split(" and "))
    assert f"rounding to 4 bits in groups of 32 cost {most:.1f} % of perplexity at most" in guide
    # The figures are those of the table.
    assert "At 2 bits training leads rounding, and a teacher helps at all bits." in guide


def test_what_recipes_say_of_lora() -> None:
    text, served = results_text("recipes"), result("lora_served")["clients"]
    assert "All that was delivered answered as it was evaluated." in text
    lines = [line for line in results_page.lines_of("lora") if "task" in line]
    assert {line["difference"] for line in lines} == {0.0}
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for line in lines:
        seeds.setdefault((line["task"], line["bits"], line["way"]), set()).add(line["seed"])
    assert "Three seeds;" in text and {frozenset(each - {10}) for each in seeds.values()} == {frozenset({11, 12, 13})}
    told = {}
    for task, bits, _, *others in results_page.merged_lora(("sst2", "sft", "dpo"))[1:]:
        for way, cell in zip(("beside", "rounded", "full"), others, strict=True):
            if not is_noise(cell):
                told[task, bits, way] = cell[0]
    full = {("SFT, perplexity", bits, "full"): "-" for bits in (4, 3, 2)}
    beside = {("SFT, perplexity", bits, "beside"): "-" for bits in (4, 2)}
    rounded = {("SST-2, accuracy", 3, "rounded"): "+", ("SFT, perplexity", 2, "rounded"): "+"}
    assert told == {**full, **beside, **rounded}
    assert served["transformers"]["difference"] == 0.0 and served["llama.cpp"]["of"] == 128
    assert f"llama.cpp chose the same {served['llama.cpp']['equal_tokens']} tokens" in text
    assert f"vLLM {served['vllm']['equal_tokens']}, parting at ties" in text
    assert {*served["vllm"]["gaps_of_the_best_two_where_they_part"]} == {0.0}


def test_what_is_said_of_embeddings() -> None:
    guide = " ".join(page("docs/guide/embeddings.md").split())
    kept = {(row[0], row[1]): float(str(row[3]).split(" ")[0]) for row in results_page.embedding_models()[1:]}
    files = [kept[8, "ONNX Runtime int8"], kept[8, "Sentence Transformers int8"]]
    assert max(files) < 0.9 and "Sentence Transformers lose more than a tenth" in guide
    assert f"8 bits are best rounded: {100 - 100 * kept[8, 'rounded']:.0f} % of neighbors are lost" in guide
    assert kept[8, "taught"] < kept[8, "rounded"]
    assert kept[4, "taught"] > max(files) and "At 4 bits training keeps more than those." in guide


def test_what_is_said_of_gpt_oss_in_llama_cpp() -> None:
    text = " ".join(page("docs/reference/formats.md").split())
    assert "llama.cpp's own converter, on the folder, copies their codes" in text
    tensors = result("gpt_oss_gguf")["tensors"]
    assert len(tensors) == 6
    for tensor in tensors.values():
        assert tensor == {"type": "MXFP4", "largest_difference": 0.0}


def test_what_is_said_of_other_libraries() -> None:
    told = "no difference at 4 bits is more than noise, and at 8 bits one, of 0.3 points"
    rows = [(row[0], row[3]) for row in results_page.other_libraries()[2:] if not is_noise(row[3])]
    assert told in results_text("libraries") and [(name, cell[:4]) for name, cell in rows] == [
        ("moq_hf, 8 bits", "+0.3")
    ]


def test_what_speed_says_outside_of_its_tables() -> None:
    text, proof, pack = results_text("speed"), result("proof"), result("pack_memory")
    share = f"took {100 * proof['median_share']:.1f} % of a run of {proof['steps_of_the_run']} steps"
    assert f"{share}, the median of {len(proof['runs'])} runs" in text
    run = pack["runs"][1]
    assert f"a folder of {run['file_bytes'] / 1e9:.2f} GB" in text and run["table"] == 8
    assert f"for a Llama of {pack['parameters'] / 1e9:.2f} billion weights" in text and pack["processes"] == 4
    assert f"in {run['cpu_seconds']:.0f} seconds of CPU time and {run['peak_bytes'] / 1e9:.2f} GB of memory" in text
    counted = result("host_operations")
    layers, step = counted["quantized_layers"], counted["step"]
    asked = {
        arm: [f"{counts[what] / layers:.0f}" for what in ("launches", "python_calls")] for arm, counts in step.items()
    }
    ahead, one_by_one = asked["weights made ahead"], asked["weights made layer by layer"]
    assert f"for each of BERT-base's {layers} quantized layers a step under bfloat16 autocast asks of the host" in text
    assert (
        f"the host {ahead[0]} launches and {ahead[1]} Python calls; in float {' and '.join(asked['float'])}, " in text
    )
    assert f"with a launch a layer {' and '.join(one_by_one)}." in text
    ratios = [[float(cell) for cell in row[1:]] for row in results_page.step_time()[1:] if row[0].startswith("moq_hf")]
    plain, slower = ([*ratios[:3], ratios[4]], [ratios[3], ratios[5]])
    least, most = min(map(min, plain)), max(map(max, plain))
    assert f"{100 * least - 100:.0f} to {100 * most - 100:.0f} % longer" in text
    assert f"up to {100 * max(map(max, slower)) - 100:.0f} % with stochastic rounding or ternary codes" in text
    few, evaluated = (
        result("step_time")["results"][f"float32, {case}"] for case in ("1 x 1 x 8", "evaluation, 1 x 16")
    )
    ours, theirs = (few[arm]["ratio"] for arm in ("moq_hf, 8 bits", "torchao, 8 bits"))
    assert f"at 1 x 8 tokens 8 bits took {ours:.2f} times as long, torchao {theirs:.2f}" in text
    anew, held = (evaluated[f"moq_hf, 8 bits{how}"]["ratio"] for how in ("", ", held"))
    guide = " ".join((ROOT / "docs" / "guide" / "train.md").read_text(encoding="utf-8").split())
    assert f"takes {anew:.1f} times as long as in float, in place of {held:.2f}" in guide
    seconds: dict[str, dict[Any, float]] = {}
    for line in report_study.lines():
        key = line["task"], line["seed"]
        half = glue_plans.EPOCHS[line["task"]] == line["epochs"] and line["learning_rate"] == glue_plans.RATES[key[0]]
        if half and line.get("dropout") is False and not line.get("bf16") and line["bits"] in (2, 32):
            seconds.setdefault(f"{line['arm']}, {line['groups']}", {})[key] = line["cpu_seconds"]
    floats, taught = seconds["float, 8 blocks"], seconds[f"{results_page.NO_DROPOUT.arm}, per channel, full"]
    both = [taught[key] / floats[key] for key in taught if key in floats and key[1] in (3, 4, 5)]
    told = f"took {min(both):.1f} to {max(both):.1f} times as long as the float half (MiniLM on CPUs, nine runs)"
    assert len(both) == 9 and told in text


def figures(section: str, name: str = "gpu") -> dict[str, Any]:
    """What a GPU measured, by what it was."""
    return {row["what"]: row["value"] for row in result(name)["sections"][section]["figures"]}


def test_what_is_said_of_a_gpu() -> None:
    text, runs = results_text("speed"), [figures("steps", name) for name in results_page.STEPS_ON_A_GPU]
    llama = "Llama-1B, 4 x 1024, 4 bits per channel"
    slower, searching = (
        " to ".join(f"{100 * steps[f'{llama}: {what}'] - 100:.0f}" for steps in runs)
        for what in ("step over plain", "the same with its share of the search for clipping ratios")
    )
    assert f"Llama-1B is {slower} % slower, {searching} % with its share" in text
    compiled = figures("torch.compile")["4 layers of BERT-base, compiled, bf16: step over plain"]
    assert f"Four layers of BERT-base, compiled: {compiled:.2f}." in text
    cases = [f"BERT-base, {case}, 8 bits per channel: step over plain" for case in ("32 x 128", "4 micro-batches")]
    bert = [steps[case] for steps in runs for case in cases]
    assert f"takes {min(bert):.1f} to {max(bert):.1f} times" in readme()
    assert min(float(ratio) for row in results_page.gpu_steps()[1:] for ratio in row[3].split("; ")) > 1.02
    assert float(dict(results_page.gpu_kernels())["moq_hf, 8 bits per channel"]) > 1.5
    numbers = {what: value for what, value in figures("bit equality").items() if "the definition" in what}
    cases = sum(int(what.rsplit(" ", 1)[1]) for what in numbers)
    assert set(numbers.values()) == {0} and f"in {cases} of {cases} random weights" in text
    memory = figures("memory")
    assert memory["held beside it above plain, bytes a quantized weight (predicted: 0)"] <= 0.01
    assert figures("resume")["resumed: weights bit-equal to those of the whole run"]
    assert figures("torch.compile")["graphs compiled afterwards"] == 0
    assert figures("delivery") == {"delivered = evaluated": True}
    tests = figures("tests")
    assert tests["tests failed"] == tests["tests skipped"] == 0 and f"all {tests['tests passed']} GPU tests" in text
    names = (*results_page.STEPS_ON_A_GPU, "gpu_torchao")
    assert {result(name)["device"]["name"] for name in names} == {"NVIDIA H100 80GB HBM3"}


def test_what_is_said_of_a_model_that_was_finished_in_float() -> None:
    """Eight seeds; against float first, which is of as many steps as the float model has, three on CPUs."""
    finished, reference = results_page.FINISHED_NO_DROPOUT, results_page.FLOAT_NO_DROPOUT
    lost = gain(finished, reference, (2, 32), seeds=8).removeprefix("-")
    gained = gain(finished, results_page.NO_DROPOUT, (2, 2), seeds=3)
    told = f"end {lost} points below it at 2 bits (eight seeds, three of them on CPUs; there {gained} against float"
    told += " first)."
    assert told in results_text("recipes") and is_noise(gained)
    assert f"end {lost} points below that model" in which_preset()
    at_once = glue_plans.TERNARY.name
    ternary, falling = (
        finished._replace(arm=name, groups="per channel") for name in (at_once, glue_plans.FALLING_TERNARY.name)
    )
    told = gain(falling, ternary, (2, 2), seeds=5).removeprefix("-")
    assert f"**Lost**: ternary weights by way of 4 and 3 bits end {told} points below ternary at once." in results_text(
        "recipes"
    )


def test_what_is_said_of_learning_rates_at_2_bits() -> None:
    """One seed on a GPU."""
    text, seed = results_text("recipes"), glue_plans.PLANS["gpu rates at 2 bits"].seeds[0]

    def found(ways: report_study.Ways, task: str, rate: float) -> float:
        ways = ways._replace(rates={task: rate}, gpu=True, dropout=False)
        return report_study.scores(task, ways, 2)[seed]

    basic = results_page.BASIC
    own = [found(basic, task, glue_plans.RATES[task]) for task in results_page.ALL]
    best = [max(found(basic, task, rate) for rate in glue_plans.THREE_RATES) for task in results_page.ALL]
    assert f"of three learning rates for each task gained {(sum(best) - sum(own)) / 3:.1f} on one other seed" in text
    for task in ("sst2", "mrpc"):
        learned = {
            line["learned"]: report_study.score(line["metrics"])
            for line in report_study.lines()
            if line["arm"].endswith("learned steps") and (line["task"], line["seed"]) == (task, seed)
        }
        assert learned.keys() == {2.5e-4, 1e-3, 4e-3} and max(learned.values()) - learned[1e-3] < 0.2
    assert "learned steps (LSQ) at 1e-3, of three rates tried" in text


def test_what_is_said_of_variations_on_a_gpu() -> None:
    text, rows = results_text("recipes"), results_page.variations()[1:]
    assert {cell.count(";") for row in rows for cell in row[1:] if cell} == {1} and "two seeds: points" in text
    seeds = glue_plans.TRIED_ON_A_GPU
    ours = results_page.on_a_gpu(results_page.ALL, results_page.HALF_DROPOUT, 2, seeds)
    leads = []
    for name, ways in results_page.VARIATIONS.items():
        other = results_page.on_a_gpu(results_page.ALL, ways, 2, seeds)
        leads.append(min(other[seed] - ours[seed] for seed in ours))
        if "there" in name or "quantized half" in name:
            assert max(abs(other[seed] - ours[seed]) for seed in ours) < 1.5
    assert max(leads) < 1 and "No variation leads twice by more than a point" in text


def losses(name: str, by: str, way: str) -> dict[int, str]:
    """Points of a way against float, of lines that have the scores of several."""
    found = {}
    for value in {line[by] for line in results_page.lines_of(name)}:
        lines = [line for line in results_page.lines_of(name) if line[by] == value]
        found[value] = report_study.paired(*({line["seed"]: line[key] for line in lines} for key in (way, "float")))
    return found


def test_what_deployed_says_of_rerankers() -> None:
    precision = {
        (line["bits"], line["how"], line["seed"]): line["average_precision"]
        for line in results_page.lines_of("reranker")
    }
    seeds = {seed for _, _, seed in precision}

    def against_float(bits: int, way: str) -> str:
        ours, theirs = ({seed: precision[*key, seed] for seed in seeds} for key in ((bits, way), (32, "float")))
        return report_study.paired(ours, theirs)

    lost = against_float(4, "moq_hf")
    assert f"moq_hf's average precision is {lost.removeprefix('-')} points below" in results_text("deployed")
    assert not is_noise(lost)
    assert is_noise(against_float(4, "rounded"))
    low = [precision[32, "float", seed] - precision[2, way, seed] for way in ("rounded", "moq_hf") for seed in seeds]
    assert f"At 2 bits both lose {min(low):.0f} to {max(low):.0f}." in results_text("deployed")


def test_what_deployed_says_outside_of_its_tables() -> None:
    text = results_text("deployed")
    models = result("hub_names")["models"]
    exact = [model["transformers.js"]["fp32"] for model in models.values() if "wasm" in model]
    largest = max(said.get("difference", 0.0) for said in exact)
    assert f"`fp32` has PyTorch's answers to {math.ceil(largest * 1e6)}e-06" in text
    llamas = [said for name in ("generate-4", "generate-2") for said in models[name]["transformers.js"].values()]
    assert {said["equal tokens"] for said in llamas} == {"64 of 64"}

    def speeds(model: str, dtype: str) -> list[float]:
        engines = (models[model][name] for name in ("transformers.js", "wasm"))
        return [engine["fp32"]["milliseconds"] / engine[dtype]["milliseconds"] for engine in engines]

    q8, q8_in_wasm = speeds("classify-4", "q8")
    q4, q4_in_wasm = speeds("classify-4", "q4")
    q2, q2_in_wasm = speeds("classify-2", "q2")
    assert f"q8 was {q8:.1f} times as fast as `fp32` in Node and {q8_in_wasm:.1f} times in WebAssembly" in text
    assert f"q4 and q2 were {q4:.1f} and {q2:.1f} times as fast in Node, and slower" in text
    assert max(q4_in_wasm, q2_in_wasm) < 1
    rate = {name: f"{value:.0f}" for name, value in result("embedding_speeds")["sentences a second"].items()}
    told = [rate[f"moq_hf, {name}"] for name in ("8 bits, int8", "4 bits, nbits", "2 bits, nbits", "ONNX float")]
    assert "answered {} sentences a second, in nbits at 4 bits {} and at 2 bits {}, in float {}.".format(*told) in text
    grids = [case for case in result("llamacpp")["cases"] if case["grid"] != "float"]
    worst = max(way["kl"] for case in grids for name, way in case["ways"].items() if name == "llama-quantize Q4_0")
    assert f"is off by up to {worst:.1e}" in text
    assert max(case["ways"]["float32"]["kl"] for case in grids) < 2e-8 and "below 2e-8" in text
    served = {name: case for name, case in result("served_int8")["cases"].items() if name.endswith("static float32")}
    assert {case["same_tokens"] for case in served.values()} == {16}
    agree = [case["largest_difference"] for name, case in served.items() if not name.startswith("Gemma3")]
    assert f"all but Gemma3 agree to {max(agree):.0e}" in text
    halves = {name: case for name, case in result("served_int8")["cases"].items() if name.endswith("static bfloat16")}
    largest = max(case["largest_difference"] for case in halves.values())
    fewest = halves["Llama static bfloat16"]["same_tokens"]
    told = f"In bfloat16 `static` differs by up to {largest:.0e}, and Llama parts after {fewest} tokens"
    assert told in text and fewest == min(case["same_tokens"] for case in halves.values())
    spans = []
    for of_shapes in result("served_int8")["seconds"].values():
        ratios = [times["float"] / times[scale] for times in of_shapes.values() for scale in ("static", "per_token")]
        spans.append(f"{min(ratios):.1f} to {max(ratios):.1f} times")
        assert max(ratios) == ratios[0]
    assert "{} as fast as its float folder in float32, and {} in bfloat16".format(*spans) in text
    rounded, ours = (losses("outliers", "factor", way) for way in ("quantize_dynamic", "moq_hf"))
    told = f"`quantize_dynamic` loses {rounded[3000]} points at a factor of 3000 ({rounded[300]} at 300), moq_hf"
    assert told.replace("-", "") in text.replace("-", "")
    assert is_noise(rounded[1]) and not is_noise(rounded[3000]) and all(map(is_noise, ours.values()))
    times: dict[str, list[float]] = {}
    for line in result("deploy_minilm_avx2")["timings"]:
        times.setdefault(line["engine"], []).append(line["p50"])
    speeds = [slow / fast for slow, fast in zip(times["ONNX float"], times["ONNX int8"], strict=True)]
    assert f"was {min(speeds):.1f} to {max(speeds):.1f} times as fast as float for an encoder" in text
    token = result("deploy_decoder_avx2")["milliseconds"]["one token"]
    eight, four, two = (token["ONNX float"] / token[f"ONNX nbits, {bits} bits"] for bits in (8, 4, 2))
    assert f"nbits was {eight:.1f}, {four:.1f} and {two:.1f} times as fast at 8, 4 and 2 bits" in text
    assert min(token, key=lambda name: token[name]) == "ONNX nbits, 2 bits"
    assert token["ONNX nbits, 8 bits"] < token["ONNX int8, 8 bits"]


@pytest.mark.parametrize(("preset", "bits"), [("w4", 4), ("w3", 3), ("w2", 2)])
def test_the_presets_for_low_bits_are_what_was_measured(preset: str, bits: int) -> None:
    """But for the embedding tables, which were float: the README says so."""
    (arm,) = (
        arm
        for arm in glue_plans.PLANS["recipes"].arms
        if (arm.name, arm.bits, arm.groups) == ("basic QAT, float first", bits, "per channel, full")
    )
    measured = arm.config() or {}
    wanted = MoQConfig.from_dict({key: value for key, value in measured.items() if key != "distillation"})
    # Full is what "auto" is at these bits, no period counts where bits do not fall, and tables were in float.
    assert wanted.range == "full" and bits <= MOST_FULL_BITS
    assert MoQConfig.load(preset) == replace(wanted, range="auto", period="auto", embeddings="auto")
    assert "scores are with float tables" in readme()


def which_preset() -> str:
    return " ".join(page("docs/start/which-preset.md").split())


def readme() -> str:
    return " ".join(page("README.md").split())


def lead(bits: int, ahead: report_study.Ways, behind: report_study.Ways) -> str:
    """The paired difference of two ways over all tasks."""
    return report_study.paired(*(report_study.average(results_page.ALL, ways, bits) for ways in (ahead, behind)))


def is_noise(difference: str) -> bool:
    points, half = map(float, difference.split(" ± "))
    return abs(points) <= half


def is_win(difference: str) -> bool:
    return float(difference.split(" ± ")[0]) > 0 and not is_noise(difference)


GROUPS_OF_32 = "rounding, groups of 32"


def ahead_of(name: str, bits: int, *tasks: str) -> str:
    """By how many points float first leads another column of the first table."""
    tasks = tasks or results_page.ALL
    return report_study.paired(*(results_page.points(each, bits, tasks) for each in ("moq_hf", name)))


def ahead_of_basic_without_dropout() -> str:
    """Of float first at 2 bits."""
    lead = on_page_one(results_page.NO_DROPOUT, results_page.BASIC._replace(dropout=False), 2, 2)
    assert is_win(lead)
    return lead.removeprefix("+")


def basic_without_dropout_over_ours() -> list[str]:
    """The lead of basic QAT over float first at 4 and 3 bits, neither with dropout."""
    ways = (results_page.BASIC._replace(dropout=False), results_page.NO_DROPOUT)
    return [gain(*ways, (bits, bits), seeds=3) for bits in (4, 3)]


def against_float(name: str, bits: int) -> str:
    return report_study.interval(results_page.points(name, bits))


def test_page_one_says_what_was_measured() -> None:
    text = readme().replace("**", "")
    assert f"moq_hf ends {against_float('moq_hf', 2).removeprefix('-')} points below float." in text
    lower = on_page_one(results_page.LONG, results_page.FLOAT_NO_DROPOUT, 32)
    told = f"Only basic QAT has dropout, which costs float {lower[1:]}; without it 4 and 3 bits show no difference"
    assert f"{told} from moq_hf (three seeds)." in text and all(map(is_noise, basic_without_dropout_over_ours()))
    basic, per_channel, grouped = (ahead_of(name, 2) for name in ("basic QAT", "rounding", GROUPS_OF_32))
    assert is_win(basic) and is_win(per_channel) and is_win(grouped)
    told = f"It beats basic QAT by {basic} ({ahead_of_basic_without_dropout()} when neither has dropout),"
    told += f" rounding per channel by {per_channel}, and rounding in groups of 32 by {grouped}; on SST-2 alone"
    told += " it beats neither basic QAT nor groups of 32."
    assert told.replace("+", "") in text
    alone = [ahead_of(name, 2, "sst2") for name in ("basic QAT", "rounding", GROUPS_OF_32)]
    assert [is_noise(each) for each in alone] == [True, False, True]
    assert all(is_noise(ahead_of(name, bits)) for name in ("rounding", GROUPS_OF_32) for bits in (4, 3))
    assert "At 4 and 3 bits, round a finished model: training did no better." in text
    four = against_float("rounding", 4)
    three, grouped = (against_float(name, 3).removeprefix("-") for name in ("rounding", GROUPS_OF_32))
    told = f"loses nothing that we could measure ({four} points); `w3` loses {three}, or {grouped} in groups of 32,"
    assert told in text and is_noise(four)


def test_what_the_guides_promise_is_what_was_measured() -> None:
    """What "Which preset?" says in words, and the differences to float that recipes have of it."""
    guide, figures = which_preset(), results_text("recipes")
    of = {name: [against_float(name, bits) for bits in (4, 3, 2)] for name in results_page.RECIPES}
    for row, bits in enumerate((4, 3, 2)):
        cells = " | ".join(of[name][row] for name in ("rounding", GROUPS_OF_32, "basic QAT", "moq_hf"))
        assert re.search(rf"\| {bits} \| all three: [\d.]+ \| {re.escape(cells)} \|", figures)
    rounded, whole = (
        results_page.old(name, groups) for name, groups in (("after training", "per channel"), ("float", "8 blocks"))
    )
    eight = report_study.paired(
        report_study.average(results_page.ALL, rounded, 8), report_study.average(results_page.ALL, whole)
    )
    assert is_noise(eight) and f"**8 bits** cost nothing that we could measure ({eight} points)" in guide
    four, three, _ = of["rounding"]
    assert f'`quantize_model(model, "w4")` and `save_quantized`: {four} points.' in guide
    grouped = of[GROUPS_OF_32][1]
    told = f"loses {three} points, and {grouped} with `group_size=32`, which makes the folder as large as at 4 bits."
    assert told.replace("-", "") in guide
    assert "Training with `float_first` is no better; basic QAT with dropout loses more." in guide
    assert is_noise(ahead_of("rounding", 4)) and is_noise(ahead_of(GROUPS_OF_32, 3))
    assert all(is_win(ahead_of("basic QAT", bits)) for bits in (4, 3))
    assert all(is_win(ahead_of(name, 2)) for name in ("basic QAT", "rounding", GROUPS_OF_32))
    assert "`float_first`, which loses less than basic QAT and less than rounding, even in groups of 32." in guide
    (fall,) = (row for row in results_page.arms() if row[0] == "bits that fall from 8" and row[3])
    assert is_win(fall[3]) and is_noise(fall[4])
    assert "they lead basic QAT at 3 bits; at 2 the lead is noise." in guide


def test_every_arm_says_its_range() -> None:
    """The default is another one today than when the first lines were written."""
    configs = [*glue_plans.GROUPS.values(), *(line["moq"] for line in report_study.lines() if line["moq"] is not None)]
    algos = [config["quantize_algo"] for config in configs]
    assert all(algo.get("range") in ("full", "narrow") or algo.get("q_type") == "asymmetric" for algo in algos)


def test_differences_are_paired_by_seed() -> None:
    ours, theirs = {1: 80.0, 2: 70.0, 3: 60.0, 4: 1.0}, {1: 79.0, 2: 68.0, 3: 57.0}
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3, and Student's t of 2 degrees of freedom is 4.303.
    assert report_study.paired(ours, theirs) == "+2.0 ± 2.5 (3 of 4)"
    assert report_study.paired({1: 80.0}, theirs) == "+1.0"
    assert report_study.paired({9: 80.0}, theirs) == ""


def test_a_study_runs_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = importlib.import_module("glue_study")
    taught = {"distillation": {"teacher": OWN}}
    plan = Plan((FLOAT, qat(2), ramp(3, 2, 0.8, "taught", taught)), ("sst2",), (1,))
    monkeypatch.setattr(study, "PLANS", {"small": plan})
    model = tiny_glue.make_model(tmp_path / "model")
    config = AutoConfig.from_pretrained(model, hidden_size=64, intermediate_size=64)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(model)
    (tmp_path / "glue" / "sst2").mkdir(parents=True)
    for split, count in (("train", 160), ("validation", 24)):
        tiny_glue.write_rows(tmp_path / "glue" / "sst2" / f"{split}.jsonl", tiny_glue.make_rows("sst2", count))
    places = {"data_dir": "glue", "model_dir": "models", "output": "lines.jsonl", "model_name_or_path": "model"}
    words = ["--plan", "small", "--tasks", "sst2", *(f"--{name}={tmp_path / place}" for name, place in places.items())]
    programs.warm()
    study.main([*words, "--seeds", "1"])
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = {line["arm"]: line for line in lines if line["arm"] != "after training"}
    assert [line["mean_bits"] for line in trained.values()] == [32.0, 2.0, 2.0]
    assert trained["taught"]["last_drop"] == 4
    kept = [line for line in lines if line["arm"] != "taught"]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    capsys.readouterr()
    study.main([*words, "--seeds", "1", "--list"])
    assert capsys.readouterr().out.splitlines() == ["sst2 1 taught 2 8 blocks 0.0002"]
