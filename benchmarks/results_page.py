"""Makes the tables of README.md, docs/results and two more pages anew, from the committed results.

    python benchmarks/results_page.py

A table stands between the marks `<!-- NAME -->` and `<!-- end of NAME -->`, and NAME is a key of `TABLES`. The tests
compare what stands there with what is made of the lines.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import glue_plans
import language_models
import perplexity
from lines import Lines
from report_study import FLOAT, LONG, LONG_RATES, TASKS, Ways, average, interval, paired, scores, spread

from moq_hf.formats.table import LAYOUTS
from moq_hf.text import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    ROOT / "docs" / "guide" / "embeddings.md",
    ROOT / "docs" / "reference" / "formats.md",
    ROOT / "docs" / "reference" / "support.md",
)


def document(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def lines_of(name: str) -> list[dict[str, Any]]:
    """The committed lines."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


MOQ_HF = Ways("basic QAT, float first")
# That model as start and teacher: half as many steps again.
FINISHED_32 = Ways("basic QAT from a finished float model", "groups of 32, full", rates=LONG_RATES)
# Float first with dropout in its float phase alone, and without any.
HALF_DROPOUT = MOQ_HF._replace(dropout=False)
NO_DROPOUT = Ways(glue_plans.no_dropout(2).name, dropout=False)
FLOAT_NO_DROPOUT = LONG._replace(dropout=False)
FINISHED_NO_DROPOUT = Ways(glue_plans.FINISHED_NO_DROPOUT.name, rates=LONG_RATES, dropout=False)
ROUNDED = LONG._replace(arm="after training", groups="per channel, full")
ROUNDED_32 = ROUNDED._replace(groups="groups of 32, full")
BASIC = Ways("basic QAT, all steps", times=2)
BITS = (4, 3, 2)
ALL, TWO, ONE = tuple(TASKS), ("sst2", "cola"), ("sst2",)
SETS = {**{name: (task,) for task, name in TASKS.items()}, "all three": ALL}
FRESH = glue_plans.PLANS["fresh"].seeds
ON_A_GPU = (*glue_plans.TRIED_ON_A_GPU, *FRESH, *glue_plans.PLANS["gpu finished"].seeds)


def mean(values: Mapping[int, float]) -> float:
    """Of numbers by seed."""
    return statistics.fmean(values.values())


def on_a_gpu(tasks: Iterable[str], ways: Ways, bits: int = 32, seeds: Collection[int] = FRESH) -> dict[int, float]:
    """By seed, in bfloat16."""
    found = average(tasks, ways._replace(gpu=True), bits)
    return {seed: value for seed, value in found.items() if seed in seeds}


def ahead(tasks: Iterable[str], ours: Ways, theirs: Ways, bits: tuple[int, int]) -> dict[int, float]:
    """How many points one way is ahead of another, by seed; the bits are those of each."""
    own, other = (average(tasks, *each) for each in zip((ours, theirs), bits, strict=True))
    return {seed: own[seed] - other[seed] for seed in own if seed in other}


def ahead_everywhere(tasks: Iterable[str], ours: Ways, theirs: Ways, bits: tuple[int, int]) -> dict[int, float]:
    """The same of runs that are both on a GPU, or else both on CPUs in float32."""
    on_cpus = ahead(tasks, in_float32(ours), in_float32(theirs), bits)
    on_gpus = ahead(tasks, ours._replace(gpu=True), theirs._replace(gpu=True), bits)
    return on_cpus | {seed: points for seed, points in on_gpus.items() if seed in ON_A_GPU}


def at(ways: Ways, *bits: int) -> dict[int, Ways]:
    """The same ways at each of the bits."""
    return dict.fromkeys(bits, ways)


# What is compared at equal steps. Only basic QAT has dropout.
RECIPES = {
    "rounding": ROUNDED._replace(dropout=False),
    "rounding, groups of 32": ROUNDED_32._replace(dropout=False),
    "basic QAT": BASIC,
    "moq_hf": NO_DROPOUT,
}


def points(name: str, bits: int, tasks: Iterable[str] = ALL) -> dict[int, float]:
    """By seed, against a float model of as many steps, trained on the same machine."""
    reference = on_a_gpu(tasks, FLOAT_NO_DROPOUT)
    return {seed: score - reference[seed] for seed, score in on_a_gpu(tasks, RECIPES[name], bits).items()}


def cells_of(lines: Iterable[str]) -> list[list[Any]]:
    """The cells of a Markdown table, without the line below its head."""
    rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def first_page() -> list[list[Any]]:
    """What page one has: where training gains most, with the scores of all ways, the size and the time."""
    found: list[list[Any]] = [
        ["model", "what is delivered", "MB", "ms", "float", "rounded", "GPTQ", "trained by moq_hf"],
    ]
    times = document("served_inputs")["times"]["ONNX Runtime"]["threads: 1"]["1 x 32"]
    models = document("sizes")["models"]
    encoder, language = models["all-mpnet-base-v2"], models["SmolLM2-135M"]
    for index, (name, (form, of_size, file)) in enumerate(FIRST_PAGE.items()):
        *scores_of, trained = [f"{mean(own):.1f}" if own else "" for own in first_page_scores(form)]
        speed = f"{times[file]['ms']:.0f} of {times['float']['ms']:.0f}" if file else ""
        model = "MPNet on STS-B: Spearman x 100" if index == 0 else ""
        trained = f"{trained}{first_page_training(form)}"
        found.append([model, name, in_megabytes(encoder, of_size), speed, *scores_of, trained])
    found.append(first_page_embeddings(models["all-MiniLM-L6-v2"]["float"]))
    for index, (name, (form, of_size, arm, how)) in enumerate(FIRST_PAGE_LANGUAGE.items()):
        cells = [f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in first_page_perplexities(form, arm)]
        model = "SmolLM2-135M on GSM8K: perplexity" if index == 0 else ""
        cells[-1] = f"{cells[-1]}, {how}"
        found.append([model, name, in_megabytes(language, of_size), "", *cells])
    return found


def in_megabytes(size: Mapping[str, Any], form: str) -> str:
    """What a form of a model takes, and the model in float."""
    return f"{size['forms'][form] / 1e6:.0f} of {size['float'] / 1e6:.0f}"


def first_page_scores(form: str) -> list[dict[int, float]]:
    """The scores of float, and of a form rounded, by GPTQ and trained, by the seeds that all of these have.

    Trained is from GPTQ's rounding, where that was tried; one seed alone is not shown.
    """
    rounded, gptq, trained, from_gptq = base_ways(*BASE_FORMS[form])
    ways = [way if len(way) > 1 else {} for way in (base_floats(), rounded, gptq, from_gptq or trained)]
    seeds = set.intersection(*(set(way) for way in ways if way))
    return [{seed: way[seed] for seed in sorted(seeds) if way} for way in ways]


def first_page_training(form: str) -> str:
    """What page one adds to the score of a trained model: where it started, or what one seed alone gave."""
    *_, trained, from_gptq = base_ways(*BASE_FORMS[form])
    if from_gptq:
        return ", from GPTQ"
    if len(trained) != 1:
        return ""
    ((seed, score),) = trained.items()
    return f"{score:.1f} of {base_floats()[seed]:.1f} (one seed)"


def first_page_embeddings(float_bytes: int) -> list[str]:
    """The row of an embedding model at 4 bits: how many of the nearest neighbors stay, in percent."""
    rounded, taught = (
        [line for line in lines_of("embeddings") if (line["bits"], line["how"]) == (4, how)]
        for how in ("rounded", "taught")
    )
    size = f"{taught[0]['ratio'] * float_bytes / 1e6:.0f} of {float_bytes / 1e6:.0f}"
    kept = [f"{100 * statistics.fmean(line['recall'] for line in own):.1f}" for own in (rounded, taught)]
    model = "MiniLM, embeddings: nearest neighbors kept, %"
    return [model, "weights of 4 bits, groups of 16 to 64", size, "", "100", kept[0], "", f"{kept[1]}, taught"]


def first_page_perplexities(form: str, trained: str) -> list[float]:
    """Perplexities in float, rounded, by GPTQ and trained in this way: means over the seeds that all of these have."""
    ways: list[dict[int, float]] = []
    for arm in (language_models.FLOAT, language_models.ROUNDED, language_models.GPTQ, trained):
        own = "" if arm == language_models.FLOAT else form
        lines = [line for line in lines_of("language_models") if (line["arm"], line["form"]) == (arm, own)]
        ways.append({line["seed"]: line["perplexity"] for line in lines})
    seeds = set.intersection(*map(set, ways))
    return [statistics.fmean(way[seed] for seed in seeds) for way in ways]


def equal_steps() -> list[list[Any]]:
    """Points against float of as many steps, a task and a number of bits a line."""
    found: list[list[Any]] = [["bits", "task: float", *RECIPES]]
    for bits in BITS:
        for name, tasks in SETS.items():
            cells = [interval(points(each, bits, tasks)) for each in RECIPES]
            found.append([bits, f"{name}: {mean(on_a_gpu(tasks, FLOAT_NO_DROPOUT)):.1f}", *cells])
    return found


def rates() -> list[list[Any]]:
    """Float models of as many steps by learning rate, with dropout and without, and what half of the steps give."""
    tried = (5e-5, 1e-4, 2e-4)
    found: list[list[Any]] = [["task", *(f"{rate:g}" for rate in tried), "half of the steps, against all"]]
    for task, name in TASKS.items():
        cells = []
        for rate in tried:
            way = LONG._replace(rates={task: rate})
            both = (scores(task, each)[1] for each in (way, way._replace(dropout=False, gpu=True)))
            cells.append("; ".join(f"{score:.1f}" for score in both))
        halves = (on_a_gpu([task], ways) for ways in (FLOAT._replace(dropout=False), FLOAT_NO_DROPOUT))
        found.append([name, *cells, paired(*halves)])
    return found


class Change(NamedTuple):
    """An arm at each of its bits, and what it is held against at the same bits."""

    text: str
    arms: Mapping[int, Ways]
    tasks: tuple[str, ...] = ALL
    against: Ways = MOQ_HF
    ahead: Callable[..., dict[int, float]] = ahead


def taught(name: str = "", groups: str = "per channel, full", **more: Any) -> Ways:
    """A variation of the recipe, by what follows its name."""
    return Ways(MOQ_HF.arm + name, groups, **more)


def old(name: str, groups: str = "per channel", **more: Any) -> Ways:
    """An arm in float32 with narrow ranges."""
    return Ways(name, groups, bf16=False, **more)


def in_float32(ways: Ways) -> Ways:
    """The same runs, computed in float32."""
    return ways._replace(bf16=False)


NO_DROPOUT_ON_CPU, HALF_DROPOUT_ON_CPU = in_float32(NO_DROPOUT), in_float32(HALF_DROPOUT)


def varied(text: str, more: str, against: Ways, groups: str = "per channel, full") -> Change:
    """A variation at 2 bits of what is trained without dropout, by what follows its name; on GPUs and CPUs."""
    ways = against._replace(arm=against.arm + more, groups=groups)
    return Change(text, at(ways, 2), ALL, against, ahead_everywhere)


def at_2(text: str, ways: Ways, against: Ways, tasks: tuple[str, ...] = TWO) -> Change:
    """An arm at 2 bits alone."""
    return Change(text, at(ways, 2), tasks, against)


CHANGES = {
    "the recipe with dropout in both halves": (
        Change("basic QAT for all steps", at(BASIC, *BITS)),
        Change("rounding alone, after half of the steps", at(Ways("after training"), *BITS)),
        Change("the same in groups of 32", at(Ways("after training", "groups of 32, full"), *BITS)),
        Change(
            "bits that fall from 8, to 2 from 4",
            {bits: Ways(f"MoQ {start} by 0.3, float first") for bits, start in ((4, 8), (3, 8), (2, 4))},
        ),
        Change("bits by layer, chosen by divergence", at(Ways("3 bits on average by divergence, float first"), 3)),
        at_2("no dropout beside the teacher", HALF_DROPOUT_ON_CPU, in_float32(MOQ_HF)),
    ),
    "the recipe with dropout in its float half": (
        at_2(
            "a start from GPTQ's rounding",
            HALF_DROPOUT_ON_CPU._replace(groups=glue_plans.FROM_GPTQ),
            HALF_DROPOUT_ON_CPU,
        ),
        at_2("no teacher", in_float32(taught(", no teacher", dropout=False)), HALF_DROPOUT_ON_CPU),
        at_2("no hidden states", in_float32(taught(", 0 times the hidden states", dropout=False)), HALF_DROPOUT_ON_CPU),
    ),
    "the recipe as it is, without dropout": (
        Change("dropout in the float half", at(HALF_DROPOUT, *BITS), ALL, NO_DROPOUT, ahead_everywhere),
        Change("basic QAT for all steps", at(BASIC._replace(dropout=False), *BITS), ALL, NO_DROPOUT, ahead_everywhere),
        at_2("groups of 32", NO_DROPOUT_ON_CPU._replace(groups="groups of 32, full"), NO_DROPOUT_ON_CPU),
        varied("the teacher's relations too", ", relations", NO_DROPOUT),
    ),
    "a finished float model, rounded in groups of 32": (
        Change("half as many steps, with it as teacher", at(FINISHED_32, 3), against=ROUNDED_32),
    ),
    "half as many steps from a finished float model, which is the teacher, without dropout": (
        varied("the teacher's relations too", ", relations", FINISHED_NO_DROPOUT),
        varied("learned steps (LSQ) at 1e-3, of three rates tried", ", learned steps", FINISHED_NO_DROPOUT),
        varied("narrow ranges: ternary", "", FINISHED_NO_DROPOUT, "per channel"),
        varied("ternary by way of 4 and 3 bits", ", by way of 4 and 3 bits", FINISHED_NO_DROPOUT, "per channel"),
    ),
    "bits that fall from 8, from the pretrained model": (
        Change("sensitive blocks later, by eigenvalue", at(old("MoQ, eigenvalues"), 3, 2), ONE, old("MoQ")),
    ),
}


def arms() -> list[list[Any]]:
    """What was tried, in points against what it was held against."""
    found: list[list[Any]] = [["change", "tasks; seeds", *(f"{bits} bits" for bits in BITS)]]
    for basis, changes in CHANGES.items():
        found.append([f"**{basis}**", *[""] * (len(found[0]) - 1)])
        for change in changes:
            gains = {
                bits: change.ahead(change.tasks, ways, change.against, (bits, bits))
                for bits, ways in change.arms.items()
            }
            seeds = " to ".join(str(count) for count in sorted({len(each) for each in gains.values()}))
            names = "all" if change.tasks == ALL else ", ".join(TASKS[task] for task in change.tasks)
            cells = [interval(gains[bits]) if bits in gains else "" for bits in BITS]
            found.append([change.text, f"{names}; {seeds}", *cells])
    return found


def quantized_at(rate: float) -> Ways:
    """Float first with another learning rate in its quantized half, the same for all tasks."""
    return HALF_DROPOUT._replace(rates=dict.fromkeys(ALL, rate))


# Float first with dropout in its float half, and its variations.
VARIATIONS = {
    "**float first**": HALF_DROPOUT,
    "1e-4 in the quantized half": quantized_at(1e-4),
    "2e-4 there": quantized_at(2e-4),
    "4e-4 there": quantized_at(4e-4),
    "no labels": taught(", no labels", dropout=False),
    "three quarters in float": taught(", 0.75 of the steps in float", times=0.5, dropout=False),
}


def gpu_figures(section: str, ending: str, name: str = "gpu") -> dict[str, float]:
    """What was measured on one GPU, by what stands before the ending of its name."""
    rows = document(name)["sections"][section]["figures"]
    return {row["what"].removesuffix(ending): row["value"] for row in rows if row["what"].endswith(ending)}


def gpu_kernels() -> list[list[Any]]:
    """Time to quantize all weights over that of a copy of as many bytes."""
    names = {
        "eager PyTorch": "eager PyTorch, 8 bits per channel",
        "torch.compile of the same": "the same code by torch.compile",
        "torchao": "torchao, 8 bits per channel",
        "8 bits per channel": "moq_hf, 8 bits per channel",
        "4 bits, groups of 32": "moq_hf, 4 bits, groups of 32",
        "2 bits ternary per channel": "moq_hf, 2 bits, narrow: ternary",
    }
    measured = {
        what.split(", 85 M")[0]: value
        for what, value in gpu_figures("bandwidth", ": time over the floor", "gpu_torchao").items()
    }
    return [["weights of BERT-base", "over a copy"], *([name, f"{measured[what]:.1f}"] for what, name in names.items())]


STEPS_ON_A_GPU = ("gpu_steps", "gpu")  # The second machine has the slower processor.


def gpu_steps() -> list[list[Any]]:
    """Milliseconds of a step in float, and a quantized step over it, on two machines."""
    plain, ratios = (
        [gpu_figures("steps", ending, name) for name in STEPS_ON_A_GPU]
        for ending in (": a plain step", ": step over plain")
    )
    found: list[list[Any]] = [["model, batch x tokens", "quantized", "float, ms", "step over float"]]
    for what in ratios[0]:
        (model,) = (name for name in plain[0] if what.startswith(f"{name}, "))
        # The text has the times of 8 and of 64 rows.
        if model not in ("BERT-base, 8 x 128", "BERT-base, 64 x 128"):
            cells = (
                "; ".join(f"{each[name]:{how}}" for each in both)
                for both, name, how in ((plain, model, ".0f"), (ratios, what, ".2f"))
            )
            found.append([model, what.removeprefix(f"{model}, "), *cells])
    return found


def language_model() -> list[list[Any]]:
    """Perplexity against the float model of as many steps, in percent."""
    return cells_of(perplexity.summary(Lines(RESULTS / "perplexity.jsonl").lines).splitlines())


def small_language_model() -> list[list[Any]]:
    """Perplexity of a pretrained model, fine-tuned on school problems: float, and all ways at few bits."""
    return cells_of(language_models.summary(Lines(RESULTS / "language_models.jsonl").lines).splitlines())


def merged_lora() -> list[list[Any]]:
    """Scores of merged LoRA by task and bits, and what other ways differ from them."""
    measures = {"sst2": ("SST-2, accuracy", "accuracy"), "sft": ("SFT, perplexity", "perplexity")}
    ways = ("beside", "rounded", "full")
    # Learning rates were chosen with seed 10.
    lines = [line for line in lines_of("lora") if line.get("seed", 10) != 10]
    found: list[list[Any]] = [["task", "bits", "merged", *ways]]
    for task, (name, metric) in measures.items():
        for bits in BITS:
            own = [line for line in lines if (line["task"], line["bits"]) == (task, bits)]
            if not own:
                continue
            scores = {
                way: {line["seed"]: line[metric] for line in own if line["way"] == way} for way in ("merged", *ways)
            }
            cells = [paired(scores[way], scores["merged"]) for way in ways]
            found.append([name, bits, f"{mean(scores['merged']):.1f}", *cells])
    return found


def lora_cost() -> list[list[Any]]:
    """CPU time of a step, the search for scales included, over that of PEFT in float, and the most memory."""
    names = {
        "float": "PEFT in float", "beside": "beside a quantized base", "merged": "merged",
        "merged DoRA": "merged, DoRA", "full": "all weights",
    }  # fmt: skip
    own = {line["cost"]: line for line in lines_of("lora") if "cost" in line}
    found: list[list[Any]] = [["what is trained at 4 bits", "step", "MB"]]
    for way, name in names.items():
        share = (own[way]["step_ms"] + own[way]["search_ms"] / 50) / own["float"]["step_ms"]
        found.append([name, f"{share:.2f}", f"{own[way]['peak_mb']:.0f}"])
    return found


def f1_of(task: str, arm: str, bits: int = 32, rounded: str = "") -> dict[int, float]:
    """F1 of roles or of spans by seed, in points; of a float model also that on a grid to which it was rounded."""
    # The rate is the better of two for the float model of half the steps, with seed 1.
    wanted = {"task": task, "arm": arm, "bits": bits, "rate": 2e-4}
    own = [line for line in lines_of("tasks") if wanted.items() <= line.items()]
    return {line["seed"]: 100 * (line["rounded"][rounded] if rounded else line["metrics"]["f1"]) for line in own}


def other_tasks() -> list[list[Any]]:
    """F1 of roles and of spans in float without dropout, and points against it of all else in as many steps."""
    ways = {
        "basic QAT with dropout": "basic QAT",
        "basic QAT": "basic QAT, no dropout",
        "moq_hf": "float first, no dropout",
    }
    found: list[list[Any]] = [["task", "bits", "float", "rounding, groups of 32, with dropout", *ways]]
    for task, name in (("roles", "token classification"), ("spans", "question answering")):
        reference = f1_of(task, "float, as many steps, no dropout")
        for bits in (3, 2):
            rounded = f1_of(task, "float, as many steps", rounded=f"{bits}, groups of 32, full")
            own = [rounded, *(f1_of(task, arm, bits) for arm in ways.values())]
            found.append([name, bits, f"{mean(reference):.1f}", *(paired(each, reference) for each in own)])
    return found


PEERS = {
    "moq_hf, 8 bits": "8 blocks of rows",
    "torchao, 8 bits": "per channel",
    "optimum-quanto, 8 bits": "per channel",
    "moq_hf, 4 bits, full, per channel": "per channel",
    "moq_hf, 4 bits, full, groups of 32": "groups of 32",
    "torchao, 4 bits": "groups of 32",
    "optimum-quanto, 4 bits": "asymmetric, groups of 128",
}


def other_libraries() -> list[list[Any]]:
    """Accuracy on SST-2 after an epoch, over three seeds."""
    lines = [line for line in lines_of("peers") if line.get("rows") == "all" and "accuracy" in line]

    def accuracies(name: str) -> dict[int, float]:
        return {line["seed"]: 100 * line["accuracy"] for line in lines if line["arm"] == name}

    reference = accuracies("float")
    found: list[list[Any]] = [["library", "grid", "accuracy", "against float of as many steps, points"]]
    found.append(["float", "", f"{mean(reference):.1f}", ""])
    for name, grid in PEERS.items():
        own = accuracies(name)
        label = re.sub(r"(bits).*", r"\1", name)
        found.append([label, grid, f"{mean(own):.1f}", paired(own, reference)])
    return found


def step_time() -> list[list[Any]]:
    """CPU time of a training step over the float model's."""
    cases = {
        "float32, 1 x 16 x 64": "float32",
        "float32, 4 x 16 x 64": "float32, 4 micro-batches",
        "bfloat16, 1 x 16 x 64": "bfloat16",
        "bfloat16, 4 x 16 x 64": "bfloat16, 4 micro-batches",
    }
    results = document("step_time")["results"]
    arms = [name for name in results["float32, 1 x 16 x 64"] if name != "float"]
    body = [[name, *(f"{results[case][name]['ratio']:.2f}" if name in results[case] else "" for case in cases)]
            for name in arms]  # fmt: skip
    return [["arm", *cases.values()], *body]


def sizes() -> list[list[Any]]:
    """Files of two BERTs, and of a language model whose table is its head, in MB."""
    found: list[list[Any]] = [["model", "float", "embedding tables", "8 bits", "4 bits", "3 bits", "2 bits"]]
    for name, of_model in document("sizes")["models"].items():
        if "tables in float" not in of_model:
            # Only its other forms were measured.
            continue
        for tables in ("tables in float", "tables at 8 bits"):
            cells = [f"{count / 1e6:.1f}" for count in of_model[tables].values()]
            found.append([name, f"{of_model['float'] / 1e6:.1f}", tables.removeprefix("tables "), *cells])
    name = "Qwen2.5-0.5B"
    of_model = document("tied_sizes")["models"][name]
    for file in sorted(of_model["files"], key=lambda file: -(file["table"] or 32)):
        grid = f"{name}, bfloat16, groups of {file['group_size']}"
        table = f"at {file['table']} bits" if file["table"] else "in float"
        size = f"{file['file_bytes'] / 1e6:.1f}"
        found.append([grid, f"{of_model['bfloat16_bytes'] / 1e6:.1f}", table, "", size, "", ""])
    return found


def answers() -> list[list[Any]]:
    """How far what other programs compute is from the folder in PyTorch, program by program."""
    onnx = [["ONNX Runtime", file, *cells] for file, *cells in scores_of_files()]
    found = [["program", "file", "what is compared", "difference"], *onnx]
    said = document("hub_names")
    for dtype, bits in (("q8", 4), ("q4", 4), ("q2", 2)):
        model = said["models"][f"classify-{bits}"]
        both = "; ".join(f"{model[engine][dtype]['difference']:.0e}" for engine in ("transformers.js", "wasm"))
        found.append(["transformers.js in Node; WebAssembly", f"{dtype}, {bits} bits", "logits", both])
    clients: dict[str, dict[str, float]] = {}
    for name, difference in said["clients"].items():
        client, file = name.split(", ")
        clients.setdefault(file, {})[client] = difference
    for file, differences in clients.items():
        found.append([", ".join(differences), file, "embeddings of length 1", f"{max(differences.values()):.0e}"])
    cases = document("llamacpp")["cases"]
    grids = len({case["grid"] for case in cases if case["grid"] != "float"})
    kl = max(case["ways"]["moq-hf export"]["kl"] for case in cases if case["grid"] != "float")
    found.append(["llama.cpp", f"GGUF, {grids} grids", "KL divergence of probabilities", f"{kl:.0e}"])
    for scale in ("static", "per_token"):
        served = document("served_int8")["cases"]
        largest = max(case["largest_difference"] for name, case in served.items() if f"{scale} float32" in name)
        found.append(["vLLM on a CPU", f"W8A8, {scale}", "log-probabilities in float32", f"{largest:.0e}"])
    return found


def scores_of_files() -> list[list[Any]]:
    """Metrics of ONNX files whose rounding was trained per block, against the folder, in points over three seeds."""
    metrics = {"mrpc": "f1", "sst2": "accuracy"}
    found = []
    for flavor in ("int8", "nbits"):
        for bits in (8, 4, 2):
            cells = []
            for task, metric in metrics.items():
                lines = [line for line in lines_of("deploy_scores") if line["arm"] == f"{bits} bits"]
                own = [line for line in lines if line["task"] == task and flavor in line["files"]]
                files = {line["seed"]: 100 * line["files"][flavor]["metrics"][metric] for line in own}
                cells.append(paired(files, {line["seed"]: 100 * line["checkpoint"][metric] for line in own}))
            if all(cells):
                found.append([f"{flavor}, {bits} bits", "F1 on MRPC; accuracy on SST-2", "; ".join(cells)])
    return found


def embedding_models() -> list[list[Any]]:
    """How vectors of few bits compare with those of float, on held-out texts: means over seeds."""
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines_of("embeddings"):
        kinds.setdefault((line["bits"], line["how"]), []).append(line)
    found: list[list[Any]] = [["bits", "how", "cosine", "recall@10", "Spearman", "folder over float"]]
    for (bits, how), own in sorted(kinds.items(), key=lambda item: (-item[0][0], item[0][1])):
        cells = [spread([line[name] for line in own], 3) for name in ("cosine", "recall", "spearman")]
        size = f"{own[0]['ratio']:.2f}" if "ratio" in own[0] else ""
        found.append([bits, how, *cells, size])
    return found


def speeds() -> list[list[Any]]:
    """Speed of exported models over ONNX float, on one thread: of an encoder, and of one token of a decoder."""
    measured = document("deploy_speeds")
    shapes = measured["milliseconds"]
    found: list[list[Any]] = [["engine", *shapes]]
    # At fewer bits these are as fast as at 8; OpenVINO gains nothing from the last two.
    left_out = ("weight-only, 4", "weight-only, 2", "int8, 4", "OpenVINO int8", "OpenVINO nbits")
    for name in measured["bytes"]["encoder"]:
        if any(part in name for part in left_out):
            continue
        cells = [f"{times['ONNX float'] / times[name]:.2f}" if name in times else "" for times in shapes.values()]
        found.append([name, *cells])
    return found


def rounded_inputs() -> list[list[Any]]:
    """Cosine of embeddings to the float model's, with weights and inputs rounded without training."""
    cosines = document("rounded_inputs")["cosines"].items()
    left_out = re.compile(r"99\.(9|98|995)\b|percentile 100")
    rows = [[name, f"{cosine:.4f}"] for name, cosine in cosines if not left_out.search(name)]
    return [["weights, inputs", "cosine"], *rows]


# An MPNet of BERT-base's size on STS-B: a float model, and half an epoch with it as start and teacher.
BASE_TASK = ("stsb",)
BASE = Ways(
    glue_plans.BASE_FLOAT.name,
    "8 blocks",
    times=0.25,
    rates={"stsb": 5e-5},
    dropout=False,
    model="mpnet, 12 layers of 768",
)
# What weights and inputs are rounded to, by what the page calls it: bits and a key of `glue_plans.GROUPS`.
BASE_FORMS = {
    "8 bits": (8, "per channel, full"),
    "8 bits; 8, static symmetric": (8, "static symmetric"),
    "the same, without the outlier layers": (8, "static symmetric, outlier layers in float"),
    "`w8a8`: 8 bits; 8, static asymmetric": (8, "static asymmetric"),
    "the same, percentile 99.99 and window": (8, "static asymmetric, percentile, window"),
    "8 bits; 8, per token": (8, "per token"),
    "4 bits, groups of 32": (4, "groups of 32, full"),
    "`w4a8`: 4 bits, groups of 32; 8, per token": (4, "w4a8"),
    "4 bits, groups of 32; 4, per token": (4, "w4, 4-bit inputs"),
    "`w4a4`: 4 bits, groups of 32; 4, second products at 8": (4, "w4a4"),
    "`w4a4`, both products at 8": (4, "w4a4, both products at 8"),
    "2 bits, groups of 32": (2, "groups of 32, full"),
}


# Rows of page one: a form, what `sizes.py` calls it, and its file in ONNX Runtime, if that multiplies integers.
FIRST_PAGE = {
    "weights and inputs (activations) of 8 bits, static, symmetric": (
        "8 bits; 8, static symmetric",
        "w8a8, symmetric, tables in float",
        "w8a8, symmetric, int8",
    ),
    "the same with a zero point: `w8a8`": (
        "`w8a8`: 8 bits; 8, static asymmetric",
        "w8a8, tables in float",
        "w8a8, int8",
    ),
    "weights of 2 bits, groups of 32": ("2 bits, groups of 32", "2 bits, groups of 32, tables in float", ""),
}
# Of the language model: form of `language_models`, that of its size, and the way to train that did best.
FIRST_PAGE_LANGUAGE = {
    "weights of 4 bits, groups of 32": (
        "4",
        "4 bits, groups of 32",
        language_models.AT_THE_END,
        "in the last tenth, from GPTQ",
    ),
    "weights of 2 bits, groups of 32": (
        "2",
        "2 bits, groups of 32",
        language_models.SCALES,
        "scales alone, taught, from GPTQ",
    ),
}


def of_both(ways: Ways, bits: int = 32) -> dict[int, float]:
    """Scores by seed, of which some were computed in bfloat16 and others in float32."""
    return average(BASE_TASK, ways, bits) | average(BASE_TASK, in_float32(ways), bits)


def base_floats() -> dict[int, float]:
    """Scores of the float models that plan "base" rounds and that its trained arms start from, by seed."""
    return of_both(BASE)


def base_trained(groups: str, bits: int) -> dict[int, float]:
    """Scores of the models trained to a form of the plan "base", by seed."""
    plans = (*glue_plans.PLANS["base"].arms, *glue_plans.PLANS["base, more"].arms)
    rates = [arm.learning_rate for arm in plans if (arm.groups, arm.bits) == (groups, bits) and arm.moq is not None]
    if not rates:
        return {}
    arm = glue_plans.base(bits, groups)
    return of_both(BASE._replace(arm=arm.name, groups=groups, times=arm.times, rates={"stsb": rates[0]}), bits)


def base_rounded(groups: str, bits: int) -> dict[int, float]:
    """Scores of the float models of the plan "base", rounded, by seed."""
    return of_both(BASE._replace(arm="after training", groups=groups), bits)


def base_ways(bits: int, groups: str) -> tuple[dict[int, float], ...]:
    """Scores by seed of a form of the plan "base": rounded, by GPTQ, trained, and trained from GPTQ's rounding."""
    pairs = ((way(groups, bits), way(f"{groups}, by GPTQ", bits)) for way in (base_rounded, base_trained))
    return tuple(scores for pair in pairs for scores in pair)


def base() -> list[list[Any]]:
    """Spearman's correlation on STS-B of a model of BERT-base's size: points against float."""
    floats = base_floats()
    found: list[list[Any]] = [["weights; inputs", "rounded", "GPTQ", "trained", "trained from GPTQ"]]
    found.append(["float", "; ".join(f"{floats[seed]:.1f}" for seed in sorted(floats)), "", "", ""])
    for name, (bits, groups) in BASE_FORMS.items():
        ways = base_ways(bits, groups)
        if any(ways):
            found.append([name, *(each_against(scores, floats) for scores in ways)])
    return found


# Of a MiniLM on STS-B: the name of an arm, and its groups.
SIMILAR = {
    "rounded": ("after training", "per channel, full"),
    "rounded, groups of 32": ("after training", "groups of 32, full"),
    "GPTQ, groups of 32": ("after training", glue_plans.BY_GPTQ),
    "trained": (glue_plans.no_dropout(2).name, "per channel, full"),
}


def similar(arm: str, bits: int, groups: str) -> dict[int, float]:
    """Spearman's correlation of a MiniLM on STS-B, times 100, by seed; float has as many steps as all else together."""
    wanted = [
        line
        for line in lines_of("glue_base")
        if line["model"].startswith("bert") and (line["arm"], line["bits"], line["groups"]) == (arm, bits, groups)
    ]
    epochs = max((line["epochs"] for line in wanted), default=0)
    return {line["seed"]: 100 * line["metrics"]["spearmanr"] for line in wanted if line["epochs"] == epochs}


def similar_points(name: str, bits: int) -> dict[int, float]:
    """Points of one of `SIMILAR` against float, by seed."""
    floats = similar("float", 32, "8 blocks")
    return {seed: score - floats[seed] for seed, score in similar(SIMILAR[name][0], bits, SIMILAR[name][1]).items()}


def similarity() -> list[list[Any]]:
    """Points of a MiniLM on STS-B against float: an interval over seeds, or each where there are two."""
    found: list[list[Any]] = [["bits", *SIMILAR]]
    for bits in BITS:
        cells = []
        for name in SIMILAR:
            own = similar_points(name, bits)
            each = "; ".join(f"{own[seed]:+.1f}" for seed in sorted(own))
            cells.append(interval(own) if len(own) > 2 else each)
        found.append([bits, *cells])
    return found


def served_inputs() -> list[list[Any]]:
    """Milliseconds in ONNX Runtime for 1 x 32 tokens on one thread, and the speed over float on one thread and two."""
    measured = document("served_inputs")
    times = [measured["times"]["ONNX Runtime"][f"threads: {count}"]["1 x 32"] for count in (1, 2)]
    found: list[list[Any]] = [["file", "MB", "ms", "speed"]]
    for name, size in measured["bytes"].items():
        speeds = "; ".join(f"{each[name]['speed']:.2f}" for each in times)
        found.append([name, f"{size / 1e6:.0f}", f"{times[0][name]['ms']:.0f}", speeds])
    return found


def each_against(ours: Mapping[int, float], floats: Mapping[int, float]) -> str:
    """Points against float, seed by seed, since few make no interval; a dash for a seed without a run."""
    told = (f"{ours[seed] - floats[seed]:+.1f}" if seed in ours else "-" for seed in sorted(floats))
    return "; ".join(told) if ours else ""


def reliability() -> list[list[Any]]:
    """What went wrong on purpose, and what came of it."""
    kills, sharded, fuzz = lines_of("kills"), lines_of("kills_sharded"), document("fuzz_config")
    found: list[list[Any]] = [["what", "outcome"]]
    found.append(
        [
            f"{len(kills)} runs killed by SIGTERM or SIGKILL at a random moment, then resumed",
            f"{sum(line['equal'] for line in kills)} ended with the same weights, bit for bit",
        ]
    )
    found.append(
        [
            f"one process of 2 or 4 killed under FSDP2, {len(sharded)} times",
            f"{sum(line['equal'] for line in sharded)} ended with the same weights",
        ]
    )
    found.append(
        [
            f"{fuzz['cases']:,} damaged or extreme config files",
            f"{fuzz['error']:,} one `MoQConfigError`, {fuzz['config']:,} a config, {fuzz['refused']:,} one `MoQError` "
            f"for a run of 1,000 steps; {len(fuzz['wrong'])} anything else",
        ]
    )
    for run in document("soak")["runs"]:
        memory = {entry["step"]: entry for entry in run["memory"]}
        growth = (memory[19000]["rss_kb"] - memory[1000]["rss_kb"]) / 1000
        found.append([f"{run['steps']:,} steps of a {run['trainer']}", f"{growth:+.0f} MB from step 1,000 to 19,000"])
    found.append(["TRL's SFTTrainer and DPOTrainer with a tiny Llama at 4 bits", trl()])
    return [*found, *processes()]


def trl() -> str:
    """What plain transformers answer with what TRL's trainers delivered."""
    ways = document("trl")["variants"]
    failed = [name for name, way in ways.items() if "error" in way or "loading_error" in way]
    equal = [name for name, way in ways.items() if name not in failed and way["logits_are_equal"]]
    return f"{len(equal)} of {len(ways)} ways of training delivered the same answers; an error: {', '.join(failed)}"


def processes() -> list[list[Any]]:
    """Weights of several processes against those of one, and resumed runs."""
    kinds = {
        "DDP": ("ddp",), "FSDP2": ("fsdp2", "stock"), "FSDP2 by hand": ("hand", "offload", "hsdp", "reshard"),
        "ZeRO-1 and 2": ("zero1", "zero2"), "ZeRO-3": ("zero3",),
    }  # fmt: skip
    found = []
    for name, wanted in kinds.items():
        own = [line for line in document("processes")["results"] if line["kind"] in wanted]
        # bf16 differs by its own sums, with moq_hf and without.
        compared = [line for line in own if "weights" in line and "bf16" not in line["case"]]
        resumed = [line["resumed_equal"] for line in own if "resumed_equal" in line]
        equal = f"; {sum(resumed)} of {len(resumed)} resumed runs equal" if resumed else ""
        largest = max(line["weights"] for line in compared)
        found.append([f"{name} against one process, {len(compared)} cases", f"weights within {largest:.1e}{equal}"])
    return found


def versions() -> list[list[Any]]:
    """What versions of transformers make of folders of each layout."""
    folders = document("versions")["folders"]
    found: list[list[Any]] = [["layout", "needs transformers", *folders[0]["answers"]]]
    for layout, spec in LAYOUTS.items():
        needs = spec.needs
        own = [folder["answers"] for folder in folders if folder["layout"] == layout]
        if not own:
            # A form that only stands where it is asked for.
            continue
        # What differs by rounding has the same weights.
        right = [sum(answers[version] in ("equal", "rounding") for answers in own) for version in folders[0]["answers"]]
        found.append([f"`{layout}`", needs["transformers"], *(f"{count} of {len(own)}" for count in right)])
    return found


def neighbors() -> list[list[Any]]:
    """The wheel beside other libraries, and what the two did together."""
    found: list[list[Any]] = [["beside", "transformers", "compressed-tensors", "trained, delivered, loaded", "and"]]
    for name, row in document("neighbors")["neighbors"].items():
        basics = row["uses"]["basics"]
        bad = [case for case, said in basics.items() if said.startswith("error")]
        all_but = f"all but {', '.join(bad)}" if bad else "all"
        more = [said for use, said in row["uses"].items() if use != "basics"]
        if row["needs_cuda"]:
            more = ["pip installs both; it needs CUDA and was not run, its versions were"]
        versions = row["versions"]
        numbers = [versions["transformers"], versions["compressed-tensors"]]
        found.append([name, *numbers, all_but, "; ".join(more)])
    return found


TABLES: dict[str, Callable[[], list[list[Any]]]] = {
    "first page": first_page,
    "equal steps": equal_steps,
    "rates": rates,
    "arms": arms,
    "language model": language_model,
    "small language model": small_language_model,
    "merged lora": merged_lora,
    "lora cost": lora_cost,
    "other tasks": other_tasks,
    "other libraries": other_libraries,
    "step time": step_time,
    "gpu kernels": gpu_kernels,
    "gpu steps": gpu_steps,
    "sizes": sizes,
    "answers": answers,
    "speeds": speeds,
    "rounded inputs": rounded_inputs,
    "embedding models": embedding_models,
    "base": base,
    "similarity": similarity,
    "served inputs": served_inputs,
    "reliability": reliability,
    "versions": versions,
    "neighbors": neighbors,
}


def renewed(text: str) -> str:
    """A page with its tables made anew."""
    for name, make in TABLES.items():
        marks = rf"(?s)(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end of {re.escape(name)} -->)"
        if re.search(marks, text):
            table = markdown_table(make()) + "\n"
            text = re.sub(marks, lambda _, table=table: table, text)
    return text


def main() -> None:
    """Renew the pages."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
