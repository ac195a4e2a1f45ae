"""Makes the tables of README.md, docs/results and docs/reference/formats.md anew, from the committed results.

    python benchmarks/results_page.py

A table stands between the marks `<!-- NAME -->` and `<!-- end of NAME -->`, and NAME is a key of `TABLES`. The tests
compare what stands there with what is made of the lines.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import perplexity
from glue_plans import PLANS
from lines import Lines
from report_study import TASKS, Row, average, paired, rows

from moq_hf.formats.table import NEEDS
from moq_hf.text import markdown_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "results" / "deployed.md",
    ROOT / "docs" / "reference" / "formats.md",
)
GRID = "per channel, full"


def document(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def lines_of(name: str) -> list[dict[str, Any]]:
    """The committed lines."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def study(plan: str) -> list[Row]:
    """The rows of a plan of the study, with those of the mean over its tasks."""
    found = rows(plan, lines_of("glue_study"))
    return [*found, *average(found, PLANS[plan].tasks)]


def arm(plan: str, task: str, bits: int, name: str, groups: str = GRID) -> Row:
    """One arm of a plan on one task; a grid counts for quantized arms alone."""
    (row,) = (
        row
        for row in study(plan)
        if (row.task, row.arm.bits, row.arm.label(row.arm.learning_rate)) == (task, bits, name)
        and (bits == 32 or row.arm.groups == groups)
    )
    return row


def mean(values: Any) -> float:
    """Of numbers by seed."""
    return statistics.fmean(values.values())


def scored(row: Row) -> str:
    """Its mean score, and the difference to float."""
    return f"{mean(row.scores):.1f} ({paired(row.scores, row.reference)})"


RECIPES = {
    "rounding": ("after training", GRID),
    "rounding, groups of 32": ("after training", "groups of 32, full"),
    "basic QAT": ("basic QAT, all steps", GRID),
    "moq_hf": ("basic QAT, float first", GRID),
}


def first_page() -> list[list[Any]]:
    """What page one has; docs/make_figures.py makes it beside its plot."""
    sys.path.insert(0, str(ROOT / "docs"))
    from make_figures import page_one_table

    return cells_of(page_one_table())


def cells_of(lines: Iterable[str]) -> list[list[Any]]:
    """The cells of a Markdown table, without the line below its head."""
    rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def equal_steps() -> list[list[Any]]:
    """Scores at equal steps, a task and a number of bits a line."""
    found: list[list[Any]] = [["bits", "task", "float of half the steps", *RECIPES]]
    for bits in (4, 3, 2):
        for task in (*PLANS["recipes"].tasks, "mean"):
            cells = [scored(arm("recipes", task, bits, *which)) for which in RECIPES.values()]
            found.append([bits, TASKS[task], f"{mean(arm('recipes', task, 32, 'float').scores):.1f}", *cells])
    return found


def leads() -> list[list[Any]]:
    """What float first leads the others by, and what the schedule does."""

    def lead(plan: str, bits: int, ours: str, theirs: str, groups: str = GRID, other: str | None = None) -> str:
        return paired(
            arm(plan, "mean", bits, ours, groups).scores,
            arm(plan, "mean", bits, theirs, other or groups).scores,
        )

    first, start = "basic QAT, float first", {4: 8, 3: 8, 2: 4}
    head = ["bits", "moq_hf over basic QAT", "over rounding", "over rounding in groups of 32"]
    found: list[list[Any]] = [[*head, "the schedule from the pretrained model", "the schedule after a float phase"]]
    for bits in (4, 3, 2):
        found.append(
            [
                bits,
                lead("recipes", bits, first, "basic QAT, all steps"),
                lead("recipes", bits, first, "after training"),
                lead("recipes", bits, first, "after training", other="groups of 32, full"),
                lead("main", bits, "MoQ", "basic QAT", "per channel"),
                lead("recipes", bits, f"MoQ {start[bits]} by 0.3, float first", first),
            ]
        )
    return found


def variations() -> list[list[Any]]:
    """What was changed about the recipe, and by how much it moved the mean over the plan's tasks."""
    first = "basic QAT, float first"
    changes = [
        ("half of the steps", "phases", 2, f"{first}, half the steps"),
        ("no teacher", "phases", 2, f"{first}, no teacher"),
        ("a constant learning rate in the float phase", "phases", 2, f"{first} at a constant rate"),
        ("the mean of the last quarter's weights", "recipes", 2, f"{first}, averaged"),
        ("3 bits on average, chosen by divergence", "budgets", 3, "3 bits on average by divergence, float first"),
    ]
    found: list[list[Any]] = [["change", "bits", "points"]]
    for text, plan, bits, name in changes:
        # The mean of a plan of fewer tasks has no row of its own in the tables of the study.
        ours = arm(plan, "mean", bits, name).scores
        found.append([text, bits, paired(ours, arm(plan, "mean", bits, first).scores)])
    return found


def language_model() -> list[list[Any]]:
    """Perplexity against the float model of as many steps, in percent."""
    return cells_of(perplexity.Found(Lines(RESULTS / "perplexity.jsonl").lines, 1e-3).summary().splitlines())


def other_tasks() -> list[list[Any]]:
    """F1 of roles and spans against the float model of half the steps."""
    arms = {"rounding": "rounded", "basic QAT": "basic QAT", "moq_hf": "float first, basic QAT"}
    # The rate is the better of two for the float model, with seed 1.
    lines = [line for line in lines_of("tasks") if line["rate"] == 2e-4]

    def scores(task: str, arm: str, bits: int) -> dict[int, float]:
        wanted = (task, arm, bits)
        own = [line for line in lines if (line["task"], line["arm"], line["bits"]) == wanted]
        return {line["seed"]: 100 * line["metrics"]["f1"] for line in own}

    found: list[list[Any]] = [["task", "bits", "float of half the steps", *arms]]
    for task, name in (("roles", "token classification"), ("spans", "question answering")):
        reference = scores(task, "float", 32)
        for bits in (3, 2):
            of_arms = [scores(task, each, bits) for each in arms.values()]
            cells = [f"{mean(own):.1f} ({paired(own, reference)})" for own in of_arms]
            found.append([name, bits, f"{mean(reference):.1f}", *cells])
    return found


def trl() -> list[list[Any]]:
    """What TRL's trainers deliver, a way of training a line."""
    found: list[list[Any]] = [["way", "loss", "delivered", "plain transformers"]]
    for name, way in document("trl")["variants"].items():
        if "error" in way or "loading_error" in way:
            found.append([name, "", "an error", ""])
            continue
        loss = f"{way['losses'][0]:.2f} to {way['losses'][-1]:.2f}"
        same = "the same answers" if way["logits_are_equal"] else f"up to {way['largest_difference']:.1g} apart"
        found.append([name, loss, way["layout"] + (", adapter" if way["has_adapter"] else ""), same])
    return found


PEERS = {
    "moq_hf, 8 bits": "8 blocks of rows",
    "torchao, 8 bits": "per channel",
    "optimum-quanto, 8 bits": "per channel",
    "torch.ao eager, 8 bits": "activations at 8 bits too",
    "DeepSpeed forward, 8 bits": "8 blocks of rows",
    "moq_hf, 4 bits, per channel": "per channel",
    "moq_hf, 4 bits, groups of 32": "groups of 32",
    "torchao, 4 bits": "groups of 32",
    "optimum-quanto, 4 bits": "asymmetric, groups of 128",
    "DeepSpeed forward, 4 bits": "8 blocks of rows",
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
    """Files of two BERTs, in MB."""
    found: list[list[Any]] = [["model", "float", "embedding tables", "8 bits", "4 bits", "3 bits", "2 bits"]]
    for name, of_model in document("sizes")["models"].items():
        for tables in ("tables in float", "tables at 8 bits"):
            cells = [f"{count / 1e6:.1f}" for count in of_model[tables].values()]
            found.append([name, f"{of_model['float'] / 1e6:.1f}", tables.removeprefix("tables "), *cells])
    return found


def table_sizes() -> list[list[Any]]:
    """Files of two language models whose table is their head, in MB."""
    found: list[list[Any]] = [["model", "bfloat16", "4 bits in groups of", "table in float32", "8 bits", "4 bits"]]
    for name, of_model in document("tied_sizes")["models"].items():
        files = {file["table"]: file for file in of_model["files"]}
        cells = [f"{files[bits]['file_bytes'] / 1e6:.1f}" for bits in (None, 8, 4)]
        found.append([name, f"{of_model['bfloat16_bytes'] / 1e6:.1f}", files[None]["group_size"], *cells])
    return found


def delivered_integers() -> list[list[Any]]:
    """Metrics of files whose rounding was trained per block, against the folder in PyTorch, in points."""
    flavors = ("int8", "nbits")
    found: list[list[Any]] = [["task", "bits", "PyTorch", *flavors, "MB"]]
    lines = lines_of("deploy_scores")
    for task, metric in (("mrpc", "f1"), ("sst2", "accuracy")):
        for arm in ("8 bits", "4 bits", "2 bits"):
            own = [line for line in lines if (line["task"], line["arm"]) == (task, arm)]
            # One seed says nothing of the spread.
            if len(own) < 3:
                continue
            base = {line["seed"]: 100 * line["checkpoint"][metric] for line in own}
            cells = []
            for flavor in flavors:
                files = {line["seed"]: line["files"].get(flavor) for line in own}
                scores = {seed: 100 * file["metrics"][metric] for seed, file in files.items() if file}
                cells.append(paired(scores, base) if scores else "-")
            size = f"{own[0]['files']['nbits']['bytes'] / 1e6:.1f}"
            found.append([f"{TASKS[task]}, {metric}", arm.split()[0], f"{mean(base):.1f}", *cells, size])
    return found


def embedding_models() -> list[list[Any]]:
    """How vectors of few bits compare with those of float, on held-out texts: means over seeds."""
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines_of("embeddings"):
        kinds.setdefault((line["bits"], line["how"]), []).append(line)
    found: list[list[Any]] = [["bits", "how", "runs", "cosine", "recall@10", "Spearman", "folder over float"]]
    for (bits, how), own in sorted(kinds.items(), key=lambda item: (-item[0][0], item[0][1])):
        scores = [statistics.fmean(line[name] for line in own) for name in ("cosine", "recall", "spearman")]
        cells = [f"{score:.3f}" for score in scores]
        size = f"{own[0]['ratio']:.2f}" if "ratio" in own[0] else ""
        found.append([bits, how, len(own) if how == "taught" else "", *cells, size])
    return found


def outliers() -> list[list[Any]]:
    """Accuracy of a small DeBERTa one of whose channels stands out: rounded after training, and trained so."""
    lines = lines_of("outliers")
    ways = ("quantize_dynamic", "moq_hf")
    found: list[list[Any]] = [["channel", "float", *ways]]
    for factor in sorted({line["factor"] for line in lines}):
        scores = {
            way: {line["seed"]: line[way] for line in lines if line["factor"] == factor} for way in ("float", *ways)
        }
        cells = [paired(scores[way], scores["float"]) for way in ways]
        found.append([f"x {factor:g}", f"{mean(scores['float']):.1f}", *cells])
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


def llama_cpp() -> list[list[Any]]:
    """Divergence of llama.cpp's answers from transformers', the largest over the families."""
    found: list[list[Any]] = [["grid", "moq-hf export", "llama-quantize", "the same weights as floats"]]
    by_grid: dict[str, list[Mapping[str, Any]]] = {}
    for case in document("llamacpp")["cases"]:
        by_grid.setdefault(case["grid"], []).append(case["ways"])
    for grid, ways in by_grid.items():
        quantize = [next(way for name, way in each.items() if name.startswith("llama-quantize")) for each in ways]
        ours = [each["moq-hf export"] for each in ways if "moq-hf export" in each]
        columns = (ours, quantize, [each["float32"] for each in ways])
        cells = [f"{max(way['kl'] for way in column):.1e}" if column else "" for column in columns]
        found.append([grid, *cells])
    return found


def w8a8() -> list[list[Any]]:
    """How far vLLM's answers with rounded inputs are from transformers', with equal tokens of 16."""
    measured = document("served_int8")
    found: list[list[Any]] = [
        ["model", "scale of inputs", "float32", "bfloat16", "transformers' bfloat16 from float32"]
    ]
    for kind in ("Llama", "Qwen3", "Gemma3", "sft"):
        for scale in ("static", "per_token"):
            cases = [measured["cases"][f"{kind} {scale} {dtype}"] for dtype in ("float32", "bfloat16")]
            cells = [f"{case['largest_difference']:.0e}, {case['same_tokens']} equal" for case in cases]
            name = "Llama of TRL's SFTTrainer" if kind == "sft" else kind
            found.append([name, scale, *cells, f"{cases[1]['from_float32']:.0e}"])
    return found


def w8a8_speeds() -> list[list[Any]]:
    """Speed of rounded inputs in vLLM over the float folder, on one thread."""
    seconds = document("served_int8")["seconds"]
    found: list[list[Any]] = [
        ["work", *(f"{scale}, {dtype}" for dtype in seconds for scale in ("static", "per_token"))]
    ]
    for shape in seconds["float32"]:
        times = [seconds[dtype][shape] for dtype in seconds]
        found.append([shape, *(f"{one['float'] / one[n]:.1f}" for one in times for n in ("static", "per_token"))])
    return found


def in_javascript() -> list[list[Any]]:
    """Answers of an exported folder in Node, and speed over fp32 there and in WebAssembly."""
    suffixes = {"q8": "_quantized", "q4": "_q4", "q2": "_q2"}
    names = {"classify": "MiniLM", "generate": "Llama"}
    found: list[list[Any]] = [["model", "dtype", "size of float", "against PyTorch", "speed in Node", "in WebAssembly"]]
    for model, measured in document("hub_names")["models"].items():
        task, _, bits = model.partition("-")
        for dtype in ("q8", f"q{bits}") if "wasm" in measured else ():
            said = measured["transformers.js"][dtype]
            share = measured["bytes"][f"onnx/model{suffixes[dtype]}.onnx"] / measured["bytes"]["float"]
            answers = f"{said['difference']:.0e}" if task == "classify" else f"{said['equal tokens']} tokens"
            speeds = [
                f"{engine['fp32']['milliseconds'] / engine[dtype]['milliseconds']:.1f}" if engine else ""
                for engine in (measured["transformers.js"], measured["wasm"])
            ]
            found.append([f"{names[task]}, {bits} bits", dtype, f"{share:.2f}", answers, *speeds])
    return found


def embeddings() -> list[list[Any]]:
    """The largest difference of an embedding of length 1 to PyTorch's, by file and client."""
    said = document("hub_names")["clients"]
    clients = ("Sentence Transformers", "fastembed")
    files = dict.fromkeys(name.partition(", ")[2] for name in said)
    cells = [
        [f"{said[who]:.0e}" if (who := f"{client}, {file}") in said else "" for client in clients] for file in files
    ]
    return [["file", *clients], *([file, *row] for file, row in zip(files, cells, strict=True))]


def eigenvalues() -> list[list[Any]]:
    """How right eigenvalues are, over three starts, and how steady over draws of the data."""
    measured = document("eigen")
    found: list[list[Any]] = [["step", "method", "wrong by more than 1 %", "largest error", "factors changed, rows"]]
    for step in (0, 10, 100):
        for method, name, samples in (("power", "power iteration", 16), ("lanczos", "Lanczos", 64)):
            runs = [run for run in measured["accuracy"]["results"] if (run["step"], run["method"]) == (step, method)]
            errors = [error for run in runs for error in run["errors"]]
            (steady,) = (
                row
                for row in measured["stability"]["results"]
                if (row["step"], row["method"], row["num_samples"]) == (step, method, samples)
            )
            wrong = sum(error > 0.01 for error in errors)
            changed = f"{100 * steady['share_of_factors_changed']:.0f} %, {samples}"
            found.append([step, name, f"{wrong} of {len(errors)}", f"{100 * max(errors):.1f} %", changed])
    return found


def measures() -> list[list[Any]]:
    """Rank correlations of measures with what rounding did to the answers of 256 rows, least and largest."""
    names = ("eigenvalue", "eigenvalue x change", "trace", "change", "loss", "divergence")
    found: list[list[Any]] = [["grid", "bits", *names]]
    lines = lines_of("sensitivity")
    for grid, of_grid in lines[0]["grids"].items():
        for bits in of_grid["ranks"]:
            ranks = [line["grids"][grid]["ranks"][bits]["divergence"] for line in lines]
            found.append([grid, bits, *(span([rank[name] for rank in ranks]) for name in names)])
    return found


def span(values: Sequence[float], digits: int = 2) -> str:
    """The least and the largest of them."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def processes() -> list[list[Any]]:
    """Weights of several processes against those of one, and resumed runs."""
    kinds = {
        "ddp": "DDP", "fsdp2": "FSDP2, MoQTrainer", "stock": "FSDP2, stock Trainer", "hand": "FSDP2 by hand",
        "offload": "FSDP2, shards on the CPU", "hsdp": "FSDP2 with replicas", "reshard": "FSDP2, halves left behind",
        "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    }  # fmt: skip
    found: list[list[Any]] = [["kind", "cases", "largest difference of a weight", "resumed"]]
    for kind, name in kinds.items():
        own = [line for line in document("processes")["results"] if line["kind"] == kind]
        # bf16 differs by its own sums, with moq_hf and without.
        compared = [line for line in own if "weights" in line and "bf16" not in line["case"]]
        resumed = [line["resumed_equal"] for line in own if "resumed_equal" in line]
        equal = f"{sum(resumed)} of {len(resumed)} equal" if resumed else ""
        found.append([name, len(compared), f"{max(line['weights'] for line in compared):.1e}", equal])
    return found


def accidents() -> list[list[Any]]:
    """Killed runs, wrong files, a long run."""
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
    return found


def packing() -> list[list[Any]]:
    """What `moq-hf pack` needs for a model of 1.24 billion weights."""
    found: list[list[Any]] = [["embedding table", "float", "packed", "most memory", "CPU seconds"]]
    for run in document("pack_memory")["runs"]:
        sizes = [f"{run[name] / 1e9:.2f} GB" for name in ("float_bytes", "file_bytes", "peak_bytes")]
        found.append([f"{run['table']} bits" if run["table"] else "float", *sizes, f"{run['cpu_seconds']:.0f}"])
    return found


def ranges() -> list[list[Any]]:
    """Squared error of MiniLM's weights over their squares, before any training, in percent."""
    kinds = {"narrow": ("narrow, mse", "narrow"), "full": ("full, mse",), "asymmetric": ("asymmetric, mse",)}
    found: list[list[Any]] = [["bits", "scales", *kinds]]
    measured = document("ranges")["pretrained"]["ranges"]
    for bits in (4, 3, 2):
        for layout in ("per channel", "groups of 32"):
            own = {row["grid"]: row["error"] for row in measured if (row["bits"], row["layout"]) == (bits, layout)}
            cells = [next(100 * own[name] for name in names if name in own) for names in kinds.values()]
            found.append([bits, layout, *(f"{cell:.2f}" for cell in cells)])
    return found


def versions() -> list[list[Any]]:
    """What versions of transformers make of folders of each layout."""
    folders = document("versions")["folders"]
    found: list[list[Any]] = [["layout", "needs transformers", *folders[0]["answers"]]]
    for layout, needs in NEEDS.items():
        own = [folder["answers"] for folder in folders if folder["layout"] == layout]
        if not own:
            # A form that only stands where it is asked for.
            continue
        # What differs by rounding has the same weights.
        right = [sum(answers[version] in ("equal", "rounding") for answers in own) for version in folders[0]["answers"]]
        found.append([f"`{layout}`", needs["transformers"], *(f"{count} of {len(own)}" for count in right)])
    return found


TABLES: dict[str, Callable[[], list[list[Any]]]] = {
    "first page": first_page,
    "equal steps": equal_steps,
    "leads": leads,
    "variations": variations,
    "language model": language_model,
    "other tasks": other_tasks,
    "trl": trl,
    "other libraries": other_libraries,
    "step time": step_time,
    "sizes": sizes,
    "table sizes": table_sizes,
    "packing": packing,
    "delivered integers": delivered_integers,
    "embedding models": embedding_models,
    "outliers": outliers,
    "speeds": speeds,
    "in JavaScript": in_javascript,
    "embeddings": embeddings,
    "llama.cpp": llama_cpp,
    "w8a8": w8a8,
    "w8a8 speeds": w8a8_speeds,
    "ranges": ranges,
    "measures": measures,
    "eigenvalues": eigenvalues,
    "processes": processes,
    "accidents": accidents,
    "versions": versions,
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
