"""Which measure ranks the layers of a model as the loss does, and what each measure costs.

    python benchmarks/sensitivity.py --model_name_or_path FOLDER --tokenizer FOLDER --data_dir GLUE --task sst2

For a classifier trained in float, and each unit of layers that has bits of its own under a budget: the rise of the loss
with this unit alone at 2, 3 and 4 bits, over many training rows, is what the measures ought to know. They see 64 other
rows, as in a run. Eigenvalues see 16 of them: each unit takes products of its own, and a run's share of time allows no
more. `--data_dir` holds TASK/train.jsonl, as for glue_study.py.

For each grid and number of bits: Spearman's rank correlation of each measure with that rise, and of the rise over half
of the rows with that over the other, which no measure can be expected to exceed by much. Then the loss of the whole
model with the bits that each measure chooses under a budget of 3 bits in the mean. Costs are times over that of a
training step (32 rows, forward, backward, AdamW) in the same process. Appends a JSON line to the output.
"""

import argparse
import json
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
from moq_hf.training.measures import VECTORS, Costs, Weight, loss_rises, predicted, squared_changes
from moq_hf.training.measuring import measuring

BITS, CHOICES, MEAN = (2, 3, 4), (2, 3, 4, 8), 3.0
SAMPLES, CHUNK, STEP_ROWS, LENGTH = 64, 16, 32, 128
GRIDS: dict[str, dict[str, Any]] = {
    "per channel": {"quantize_groups": "per_channel"},
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
        # Every other batch of alike lengths: two halves of the same kind.
        batches = self.batches(truth, CHUNK)
        self.halves = (batches[::2], batches[1::2])

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
    inventory, weights = study.prepare(GRIDS["per channel"])
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


def rises(study: Study, batches: list[Batch], prepared: tuple[Inventory, dict[str, Weight]], bits: Any) -> Costs:
    """How much the loss over these batches rises with each unit alone at each of these bits."""
    inventory, weights = prepared
    units = inventory.units(weights)
    parameters = {name: [layer.weight] for name, layer in inventory.scheduled.items()}
    with measuring(study.model, parameters) as stand_ins:
        return loss_rises(study.losses(batches), stand_ins, weights, units, dict.fromkeys(units, bits), clip=False)


def loss_of(study: Study, prepared: tuple[Inventory, dict[str, Weight]], bits: Mapping[str, int]) -> float:
    """The loss with all units quantized."""
    inventory, weights = prepared
    units = inventory.units(weights)
    parameters = {name: [layer.weight] for name, layer in inventory.scheduled.items()}
    batches = [batch for half in study.halves for batch in half]
    with measuring(study.model, parameters) as stand_ins, torch.no_grad():
        for unit, layers in units.items():
            for layer in layers:
                for tensor in stand_ins[layer]:
                    tensor.data = weights[layer].rounded(bits[unit])
        return sum(float(loss()) for loss in study.losses(batches)) / len(batches)


def chosen(costs: Costs, sizes: Mapping[str, int]) -> dict[str, int]:
    """The bits of each unit for a mean of `MEAN`."""
    options = [[Option(sizes[unit] * bits, max(0.0, costs[unit][bits])) for bits in CHOICES] for unit in sizes]
    picked = choose(options, int(MEAN * sum(sizes.values()))) or []
    return {unit: CHOICES[index] for unit, index in zip(sizes, picked, strict=True)}


def of_grid(study: Study, grid: str, curvature: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Everything on one grid."""
    seconds: dict[str, float] = {}
    prepared = study.prepare(GRIDS[grid])
    inventory, weights = prepared
    units = inventory.units(weights)
    changes = timed(seconds, "change", lambda: squared_changes(weights, units, dict.fromkeys(units, CHOICES)))
    sampled = timed(seconds, "loss", lambda: rises(study, study.samples, prepared, CHOICES))
    halves = [rises(study, half, prepared, BITS) for half in study.halves]
    print(grid, "rises measured", flush=True)
    measures: dict[str, Costs] = {
        "eigenvalue": {unit: dict.fromkeys(CHOICES, curvature["eigenvalue"][unit]) for unit in units},
        "eigenvalue x change": predicted(curvature["eigenvalue"], changes),
        "trace": {unit: dict.fromkeys(CHOICES, curvature["trace"][unit]) for unit in units},
        "trace x change": predicted(curvature["trace"], changes),
        "change": changes,
        "loss": sampled,
    }
    truth = {unit: {bits: (halves[0][unit][bits] + halves[1][unit][bits]) / 2 for bits in BITS} for unit in units}
    ranks = {
        bits: {
            **{
                name: rank([own[u][bits] for u in units], [truth[u][bits] for u in units])
                for name, own in measures.items()
            },
            "halves": rank([halves[0][unit][bits] for unit in units], [halves[1][unit][bits] for unit in units]),
        }
        for bits in BITS
    }
    sizes = {unit: sum(weights[layer].values.numel() for layer in layers) for unit, layers in units.items()}
    choices = {name: chosen(measures[name], sizes) for name in measures if name not in ("eigenvalue", "trace")}
    choices["all 3"] = dict.fromkeys(units, 3)
    result = {
        "ranks": ranks,
        "seconds": seconds,
        "rise": truth,
        "change": changes,
        "loss": sampled,
        "choices": choices,
        "loss of choice": {name: loss_of(study, prepared, bits) for name, bits in choices.items()},
        "loss in float": loss_of(study, prepared, dict.fromkeys(units, 16)),
    }
    print(json.dumps({"grid": grid, "ranks": ranks, "loss of choice": result["loss of choice"]}), flush=True)
    return result


def report(path: Path) -> None:
    """The tables of the page, of all lines: means over the models, with the least and the largest."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    print(f"{len(lines)} models: {', '.join(line['model'] for line in lines)}\n")

    def spread(values: list[float], digits: int) -> str:
        mean = sum(values) / len(values)
        return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    names = list(lines[0]["grids"]["per channel"]["ranks"]["3"])
    print("| grid | bits | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 2) + "|")
    for grid in GRIDS:
        for bits in map(str, BITS):
            found = [spread([line["grids"][grid]["ranks"][bits][name] for line in lines], 2) for name in names]
            print(f"| {grid} | {bits} | " + " | ".join(found) + " |")
    print("\n| measure | training steps |\n| --- | --- |")
    for name in lines[0]["steps"]:
        print(f"| {name} | {spread([line['steps'][name] for line in lines], 0)} |")
    choices = list(lines[0]["grids"]["per channel"]["loss of choice"])
    print("\n| model | grid | float | " + " | ".join(choices) + " |\n" + "| --- " * (len(choices) + 3) + "|")
    for line in lines:
        for grid, own in line["grids"].items():
            losses = [f"{own['loss of choice'][name]:.3f}" for name in choices]
            print(f"| {line['model']} | {grid} | {own['loss in float']:.3f} | " + " | ".join(losses) + " |")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="a classifier trained in float")
    parser.add_argument("--tokenizer", help="default: that of the model")
    parser.add_argument("--data_dir", type=Path, help="with TASK/train.jsonl")
    parser.add_argument("--task")
    parser.add_argument("--rows", type=int, default=512, help="to know the rise of the loss from; a multiple of 32")
    parser.add_argument("--seed", type=int, default=1, help="which rows")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sensitivity.jsonl")
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
    step = study.step_seconds()
    print("step", step, flush=True)
    seconds: dict[str, float] = {}
    curvature = curvatures(study, seconds)
    grids = {grid: of_grid(study, grid, curvature) for grid in GRIDS}
    first = grids["per channel"]["seconds"]
    line = {
        "task": args.task,
        "model": Path(args.model_name_or_path).name,
        "seed": args.seed,
        "rows": args.rows,
        "step_seconds": step,
        "steps": {name: round(value / step, 1) for name, value in (seconds | first).items()},
        "curvature": curvature,
        "grids": grids,
        **environment("scipy"),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
