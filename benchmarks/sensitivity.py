"""Which measure ranks the layers of a model as the loss does, and what each measure costs.

    python benchmarks/sensitivity.py --model_name_or_path FOLDER --tokenizer FOLDER --data_dir GLUE --task sst2

For a classifier trained in float, and each unit of layers that has bits of its own under a budget: what happens over
many training rows with this unit alone at 2 or 3 bits. Two things tell: the rise of the loss, and the divergence
KL(float, quantized) of the answers, which has less noise. The measures see 64 other rows, as in a run. Eigenvalues see
16 of them: each unit takes products of its own, and a run's share of time allows no more. `--data_dir` holds
TASK/train.jsonl, as for glue_study.py.

For each grid and number of bits: Spearman's rank correlations with the rise and with the divergence, of each measure,
and of one half of the rows with the other half, which says how well the truth itself is known. Then the loss of the
whole model with the bits that each measure chooses under a budget of 3 bits in the mean, before any training. Costs are
times over that of a training step (32 rows, forward, backward, AdamW) in the same process. Appends a JSON line to the
output.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from environment import environment
from scipy.stats import spearmanr
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from moq_hf import MoQConfig, block_eigenvalues
from moq_hf.budget import Option, choose
from moq_hf.model.convert import prepare_model
from moq_hf.model.inventory import Inventory
from moq_hf.model.selection import take_inventory
from moq_hf.trace import block_traces
from moq_hf.training.distillation import logits_in, logits_loss
from moq_hf.training.measures import VECTORS, Costs, Weight, at_bits, loss_rises, predicted, squared_changes
from moq_hf.training.measuring import measuring

CHOICES, MEAN = (2, 3, 4, 8), 3.0
SAMPLES, CHUNK, STEP_ROWS, LENGTH, BATCH = 64, 16, 32, 128, 64
# At which bits the truth is measured.
FIRST = "per channel, full range"
BITS = {FIRST: (2, 3), "groups of 32, full range": (3,)}
GRIDS: dict[str, dict[str, Any]] = {
    FIRST: {"quantize_groups": "per_channel", "quantize_algo": {"range": "full"}},
    "groups of 32, full range": {"quantize_group_size": 32, "quantize_algo": {"range": "full"}},
}
Batch = dict[str, torch.Tensor]


class Study:
    """A model, rows to measure on and rows to know the truth from."""

    def __init__(self, folder: str, tokenizer: str, train_file: Path, rows: int, seed: int) -> None:
        set_seed(seed)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        examples = [json.loads(line) for line in train_file.read_text(encoding="utf-8").splitlines()]
        texts = [name for name, value in examples[0].items() if isinstance(value, str)]
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
        taken = [examples[row] for row in order[: SAMPLES + STEP_ROWS + rows]]
        self.encode = AutoTokenizer.from_pretrained(tokenizer)
        self.texts = texts
        self.samples = self.batches(taken[:SAMPLES], CHUNK)
        (self.step_batch,) = self.batches(taken[SAMPLES : SAMPLES + STEP_ROWS], STEP_ROWS)
        truth = sorted(taken[SAMPLES + STEP_ROWS :], key=lambda example: len(example[texts[0]]))
        self.truth = self.batches(truth, BATCH)

    def batches(self, examples: list[dict[str, Any]], size: int) -> list[Batch]:
        """The examples as the model takes them, so many in a batch."""
        found = []
        for start in range(0, len(examples), size):
            part = examples[start : start + size]
            columns = [[example[name] for example in part] for name in self.texts]
            batch = self.encode(*columns, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
            found.append({**batch, "labels": torch.tensor([example["label"] for example in part])})
        return found

    def losses(self, batches: list[Batch]) -> list[Callable[[], torch.Tensor]]:
        """One for each batch; all batches are of one size."""
        return [lambda batch=batch: self.model(**batch).loss for batch in batches]

    def prepare(self, grid: Mapping[str, Any]) -> tuple[Inventory, dict[str, Weight]]:
        """The layers on a grid, still in float."""
        config = MoQConfig.from_dict({"quantize_bits": {"start_bits": 8, "target_bits": 4}, **grid})
        inventory = take_inventory(self.model, config)
        layers, _ = prepare_model(inventory, config)
        return inventory, {name: Weight.of(layer) for name, layer in layers.items()}

    def step_seconds(self) -> float:
        """Of a training step; the model stays as it is."""
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.model.train()
        times = []
        for _ in range(6):
            began = time.perf_counter()
            self.model(**self.step_batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        self.model.eval()
        self.model.load_state_dict(kept)
        return sorted(times)[len(times) // 2]


def timed(seconds: dict[str, float], name: str, function: Callable[[], Any]) -> Any:
    """The result of `function`, whose time is noted."""
    began = time.perf_counter()
    result = function()
    seconds[name] = time.perf_counter() - began
    return result


def rank(one: list[float], other: list[float]) -> float:
    """Spearman's correlation."""
    return round(float(spearmanr(one, other).statistic), 3)


def curvatures(study: Study, seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    """The top eigenvalue and the mean of the diagonal of each unit's Hessian, over the samples."""
    inventory, weights = study.prepare(GRIDS[FIRST])
    units, losses = inventory.units(weights), study.losses(study.samples)
    parameters = {name: [layer.weight] for name, layer in inventory.scheduled.items()}
    with measuring(study.model, parameters) as stand_ins:
        blocks = {unit: [p for layer in layers for p in stand_ins[layer]] for unit, layers in units.items()}
        traces = timed(seconds, "trace", lambda: block_traces(losses, blocks, max_iter=VECTORS))
        print("traces", round(seconds["trace"]), {n: (t.value, t.error) for n, t in traces.items()}, flush=True)
        eigenvalues = timed(seconds, "eigenvalue", lambda: block_eigenvalues(losses[:1], blocks))
    return {
        "eigenvalue": {unit: abs(found.value) for unit, found in eigenvalues.items()},
        "trace": {unit: found.value / found.size for unit, found in traces.items()},
        "trace error": {unit: found.error / found.size for unit, found in traces.items()},
    }


class Truth:
    """What the answers of the float model and of quantized ones are, row by row."""

    def __init__(self, study: Study, grid: str) -> None:
        self.study, self.bits = study, BITS[grid]
        self.inventory, self.weights = study.prepare(GRIDS[grid])
        self.units = self.inventory.units(self.weights)
        self.sizes = {u: sum(self.weights[layer].values.numel() for layer in own) for u, own in self.units.items()}
        self.parameters = {name: [layer.weight] for name, layer in self.inventory.scheduled.items()}
        with measuring(study.model, self.parameters), torch.no_grad():
            self.floats = [study.model(**batch).logits.log_softmax(-1) for batch in study.truth]

    def rows(self, bits: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """With these units at these bits: the rise of the loss and the divergence of each row, `[rows]`."""
        rises, divergences = [], []
        with contextlib.ExitStack() as stack:
            stand_ins = stack.enter_context(measuring(self.study.model, self.parameters))
            stack.enter_context(torch.no_grad())
            for unit, width in bits.items():
                stack.enter_context(
                    at_bits(width, {layer: stand_ins[layer] for layer in self.units[unit]}, self.weights)
                )
            for batch, before in zip(self.study.truth, self.floats, strict=True):
                after = self.study.model(**batch).logits.log_softmax(-1)
                rises.append((before - after).gather(1, batch["labels"][:, None])[:, 0])
                divergences.append((before.exp() * (before - after)).sum(-1))
        return torch.cat(rises), torch.cat(divergences)

    def sampled(self, divergence: bool) -> Costs:
        """The measure `loss`, the rise over the samples, or `divergence`, that of the answers."""
        model, losses = self.study.model, self.study.losses(self.study.samples)
        with measuring(model, self.parameters) as stand_ins:
            if divergence:
                with torch.no_grad():
                    before = [logits_in(model(**batch)) for batch in self.study.samples]
                losses = [
                    lambda batch=batch, now=now: logits_loss(logits_in(model(**batch)), now, batch["labels"])
                    for batch, now in zip(self.study.samples, before, strict=True)
                ]
            return loss_rises(
                losses,
                lambda names, bits: at_bits(bits, {name: stand_ins[name] for name in names}, self.weights),
                self.units,
                dict.fromkeys(self.units, CHOICES),
            )


def chosen(costs: Costs, sizes: Mapping[str, int]) -> dict[str, int]:
    """The bits of each unit for a mean of `MEAN`."""
    options = [[Option(sizes[unit] * bits, max(0.0, costs[unit][bits])) for bits in CHOICES] for unit in sizes]
    picked = choose(options, int(MEAN * sum(sizes.values()))) or []
    return {unit: CHOICES[index] for unit, index in zip(sizes, picked, strict=True)}


def _with_error(curvature: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """As `Trace.magnitude`."""
    return {unit: math.hypot(mean, curvature["trace error"][unit]) for unit, mean in curvature["trace"].items()}


def of_grid(study: Study, grid: str, curvature: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Everything on one grid."""
    seconds: dict[str, float] = {}
    truth = Truth(study, grid)
    units, levels = list(truth.units), dict.fromkeys(truth.units, CHOICES)
    changes = timed(seconds, "change", lambda: squared_changes(truth.weights, truth.units, levels))
    measures: dict[str, Costs] = {
        "eigenvalue": {unit: dict.fromkeys(CHOICES, curvature["eigenvalue"][unit]) for unit in units},
        "eigenvalue x change": predicted(curvature["eigenvalue"], changes),
        "trace": {unit: dict.fromkeys(CHOICES, curvature["trace"][unit]) for unit in units},
        "trace x change": predicted(_with_error(curvature), changes),
        "the same without its error": predicted(curvature["trace"], changes),
        "change": changes,
        "loss": timed(seconds, "loss", lambda: truth.sampled(False)),
        "divergence": timed(seconds, "divergence", lambda: truth.sampled(True)),
    }
    ranks, found = {}, {}
    for bits in truth.bits:
        rows = [truth.rows({unit: bits}) for unit in units]
        ranks[bits], found[bits] = {}, {}
        for name, values in zip(("rise", "divergence"), map(torch.stack, zip(*rows, strict=True)), strict=True):
            means = values.mean(1).tolist()
            halves = [values[:, half::2].mean(1).tolist() for half in (0, 1)]
            ranks[bits][name] = {
                **{measure: rank([own[unit][bits] for unit in units], means) for measure, own in measures.items()},
                "halves": rank(*halves),
            }
            errors = (values.std(1) / values.shape[1] ** 0.5).tolist()
            found[bits][name] = {unit: pair for unit, *pair in zip(units, means, errors, strict=True)}
        print(grid, bits, ranks[bits], flush=True)
    choices = {name: chosen(measures[name], truth.sizes) for name in measures if name not in ("eigenvalue", "trace")}
    choices["all 3"] = dict.fromkeys(units, 3)
    wholes = {name: truth.rows(bits) for name, bits in choices.items()}
    result = {
        "ranks": ranks,
        "seconds": seconds,
        "truth": found,
        "change": changes,
        "loss": measures["loss"],
        "choices": choices,
        "rise of choice": {name: float(rise.mean()) for name, (rise, _) in wholes.items()},
        "divergence of choice": {name: float(divergence.mean()) for name, (_, divergence) in wholes.items()},
    }
    print(result["rise of choice"], result["divergence of choice"], flush=True)
    return result


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(path: Path) -> None:
    """The tables of the page, of all lines: means over the models, with the least and the largest."""
    lines = lines_of(path)
    print(f"{len(lines)} models: {', '.join(line['model'] for line in lines)}")

    def spread(values: list[float], digits: int) -> str:
        mean = sum(values) / len(values)
        around = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
        return f"{mean:.{digits}f}{around}"

    names = list(lines[0]["grids"][FIRST]["ranks"]["3"]["rise"])
    for truth in ("rise", "divergence"):
        print(f"\n| {truth}: grid | bits | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 2) + "|")
        for grid, widths in BITS.items():
            for bits in map(str, widths):
                own = [line["grids"][grid]["ranks"][bits][truth] for line in lines]
                found = [spread([ranks[name] for ranks in own], 2) for name in names]
                print(f"| {grid} | {bits} | " + " | ".join(found) + " |")
    print("\n| measure | training steps |\n| --- | --- |")
    for name in lines[0]["steps"]:
        print(f"| {name} | {spread([line['steps'][name] for line in lines], 1)} |")
    choices = list(lines[0]["grids"][FIRST]["rise of choice"])
    print("\n| model | grid | what | " + " | ".join(choices) + " |\n" + "| --- " * (len(choices) + 3) + "|")
    for line in lines:
        for grid, own in line["grids"].items():
            for what in ("rise", "divergence"):
                values = [f"{own[f'{what} of choice'][name]:.3f}" for name in choices]
                print(f"| {line['model']} | {grid} | {what} | " + " | ".join(values) + " |")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="a classifier trained in float")
    parser.add_argument("--tokenizer", help="default: that of the model")
    parser.add_argument("--data_dir", type=Path, help="with TASK/train.jsonl")
    parser.add_argument("--task")
    parser.add_argument("--rows", type=int, default=512, help="to know the truth from")
    parser.add_argument("--seed", type=int, default=1, help="which rows")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sensitivity.jsonl")
    parser.add_argument("--reuse", type=Path, help="an earlier output: curvatures and costs of the same model and seed")
    parser.add_argument("--report", action="store_true", help="show the tables of the output, and measure nothing")
    args = parser.parse_args()
    if args.report:
        report(args.output)
        return
    if None in (args.model_name_or_path, args.data_dir, args.task):
        parser.error("--model_name_or_path, --data_dir and --task say what to measure, or --report shows results")
    torch.set_num_threads(1)
    tokenizer = args.tokenizer or args.model_name_or_path
    study = Study(args.model_name_or_path, tokenizer, args.data_dir / args.task / "train.jsonl", args.rows, args.seed)
    if args.reuse is None:
        step, seconds = study.step_seconds(), dict[str, float]()
        curvature = curvatures(study, seconds)
        steps = {name: value / step for name, value in seconds.items()}
    else:
        (known,) = [line for line in lines_of(args.reuse) if line["model"] == Path(args.model_name_or_path).name]
        curvature, steps, step = known["curvature"], known["steps"], known["step_seconds"]
    grids = {grid: of_grid(study, grid, curvature) for grid in GRIDS}
    if args.reuse is None:
        steps |= {name: value / step for name, value in grids[FIRST]["seconds"].items()}
    line = {
        "task": args.task,
        "model": Path(args.model_name_or_path).name,
        "seed": args.seed,
        "rows": args.rows,
        "step_seconds": step,
        "steps": {name: round(value, 1) for name, value in steps.items()},
        "curvature": curvature,
        "grids": grids,
        **environment("scipy"),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
