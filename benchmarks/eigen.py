"""Eigenvalues: how right, how steady and how dear they are.

    python benchmarks/eigen.py --model_name_or_path FOLDER --train_file mrpc/train.jsonl --parts all

Parts, each written to the JSON when it is done:

    golden      a recorded model against its dense float64 Hessian, and matrices of known spectrum
    cost        a training step, a graph and the products of each block, interleaved, medians
    difference  the error of finite differences over their step
    accuracy    published power iteration and ours at steps 0, 10 and 100: products, seconds, memory, true errors
    stability   spread over six disjoint draws of training examples, of the published estimate and ours

The model trains on batches of 16 rows of 64 tokens with AdamW at 5e-5, its weights at 12 bits.
`stability` appends each measurement to a file of JSON lines and skips those that are there.
"""

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import environment, write
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from moq_hf import block_eigenvalues, eigen, quantize_model
from moq_hf.model.inventory import Inventory
from moq_hf.training.measuring import measuring
from moq_hf.training.sensitivity import normalize

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "eigen_h16_init"
STEPS = (0, 10, 100)
BATCH, LENGTH, DRAWS, ROWS_PER_DRAW = 16, 64, 6, 128
PARTS = ("golden", "cost", "difference", "accuracy", "stability")
Rows = dict[str, torch.Tensor]


class Study:
    """A sentence-pair classifier in early fine-tuning, and rows to measure on."""

    def __init__(self, folder: str, train_file: Path) -> None:
        """Rows 0 to 1599 are for measuring, training takes the later ones."""
        transformers.set_seed(1)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
        bits = {"quantize_bits": {"start_bits": 12, "target_bits": 12}, "quantize_groups": 8}
        quantize_model(self.model, {**bits, "quantize_schedule": {"schedule_offset": 0, "quantize_period": 1}})
        examples = [json.loads(line) for line in train_file.read_text(encoding="utf-8").splitlines()]
        first, second = (key for key in examples[0] if "entence" in key)
        columns = [[example[key] for example in examples] for key in (first, second)]
        settings = {"truncation": True, "max_length": LENGTH, "padding": "max_length", "return_tensors": "pt"}
        encoded = AutoTokenizer.from_pretrained(folder)(*columns, **settings)
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
        self.rows = {name: tensor[order] for name, tensor in encoded.items()}
        self.rows["labels"] = torch.tensor([example["label"] for example in examples])[order]
        self.blocks = Inventory.of(self.model).layer_blocks()

    def take(self, start: int, count: int = BATCH) -> Rows:
        """`count` rows from `start` on."""
        return {name: tensor[start : start + count] for name, tensor in self.rows.items()}

    def train(self) -> Iterator[int]:
        """Gives each of `STEPS` when that many steps are done."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)
        for step in range(max(STEPS) + 1):
            if step in STEPS:
                yield step
            self.model.train()
            self.model(**self.take(1600 + BATCH * (step % 128))).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, rows: Rows) -> Callable[[], torch.Tensor]:
        """The mean loss over `rows`."""
        return lambda: self.model(**rows).loss


def golden() -> dict[str, Any]:
    """Relative errors per block and method, and of matrices."""
    recorded = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
    model = BertForSequenceClassification(BertConfig(**recorded["config"]))
    model.load_state_dict(load_file(GOLDEN.with_suffix(".model.safetensors")))
    batch = load_file(GOLDEN.with_suffix(".batch.safetensors"))
    truth = [block["lambda_abs_max"] for block in recorded["dense"]["blocks"]]
    found: dict[str, Any] = {}
    for tol in (1e-2, 1e-4):
        for name, more in (
            ("lanczos", {}),
            ("lanczos, finite differences", {"finite_difference": True}),
            ("power", {"method": "power"}),
        ):
            with measuring(model, Inventory.of(model).layer_blocks()) as blocks:
                results = block_eigenvalues(lambda: model(**batch).loss, blocks, tol=tol, **more).values()
            pairs = zip(results, truth, strict=True)
            found[f"{name}, tol {tol:g}"] = {
                "relative_errors": [abs(result.value - true) / true for result, true in pairs],
                "products": [result.num_products for result in results],
            }
    spectra = {
        "1 to 10": [float(k) for k in range(1, 11)],
        "negative dominant": [-7.0, *[float(k) for k in range(-4, 5)]],
        "nearly equal ends": [-9.98, 10.0, *[k / 3 for k in range(8)]],
        "zero": [0.0] * 10,
    }
    for name, spectrum in spectra.items():
        basis = torch.linalg.qr(torch.randn(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
        matrix = (basis @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ basis.T).float()
        x = torch.nn.Parameter(torch.ones(10))
        for method in ("lanczos", "power"):
            result = block_eigenvalues(lambda x=x, matrix=matrix: 0.5 * x @ matrix @ x, {"x": [x]}, method=method)["x"]
            found[f"10 x 10, {name}, {method}"] = {
                "value": result.value,
                "truth": max(spectrum, key=abs),
                "reason": result.reason,
                "products": result.num_products,
            }
    return found


def cost(study: Study) -> dict[str, Any]:
    """Seconds of a training step of 16 rows, of a graph, of a product of each block, and of gradients alone."""
    rows, repeats = study.take(0), 5
    optimizer = torch.optim.AdamW(study.model.parameters(), lr=1e-7, fused=True)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = act()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def train() -> None:
        study.model.train()
        study.model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(repeats):
        timed("training step", train)
        with measuring(study.model, study.blocks) as blocks:
            with timed("graph", lambda: eigen.Graph(study.loss(rows), blocks)) as graph:
                for name, parameters in blocks.items():
                    vector = torch.randn(sum(p.numel() for p in parameters))
                    timed(name, lambda name=name, vector=vector: graph.product(name, vector / vector.norm()))
            name, parameters = next(iter(blocks.items()))
            vector = torch.randn(sum(p.numel() for p in parameters))
            difference = lambda: eigen.difference_product([study.loss(rows)], parameters, vector)  # noqa: E731, B023
            timed(f"{name}, difference", difference)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    step = medians["training step"]
    products = [medians[name] for name in study.blocks]
    return {
        "seconds": medians,
        "graph_over_training_step": medians["graph"] / step,
        "mean_product_over_training_step": statistics.mean(products) / step,
    }


def difference(study: Study, step: int) -> dict[str, Any]:
    """Relative error of a product by differences, over the largest change of a weight."""
    changes = (1e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
    errors: dict[str, list[float]] = {}
    rows = study.take(0)
    with (
        measuring(study.model, study.blocks) as blocks,
        eigen.Graph(study.loss(rows), blocks) as graph,
    ):
        for name in list(blocks)[::2]:
            parameters = blocks[name]
            vector = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(0))
            for kind in ("random", "leading"):
                if kind == "leading":
                    for _ in range(10):
                        vector = graph.product(name, vector / vector.norm())
                vector = vector / vector.norm()
                exact = graph.product(name, vector)
                errors[f"step {step}, {name}, {kind} direction"] = [
                    float(
                        (eigen.difference_product([study.loss(rows)], parameters, vector, h) - exact).norm()
                        / exact.norm()
                    )
                    for h in (change / float(vector.abs().max()) for change in changes)
                ]
    return {"largest_change_of_a_weight": changes, "errors": errors}


def peak_memory() -> int | None:
    """Resident bytes at their highest since the last call, where the system tells."""
    try:
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, TypeError):
        return None
    return peak


def accuracy(study: Study, step: int, seeds: Iterable[int] = (0, 1, 2)) -> list[dict[str, Any]]:
    """Both methods with several start vectors against a converged Lanczos run."""
    rows, lines = study.take(0), []
    with measuring(study.model, study.blocks) as blocks:
        truth = block_eigenvalues(study.loss(rows), blocks, tol=1e-5, max_iter=60, seed=99)
        for seed in seeds:
            for method in ("power", "lanczos"):
                peak_memory()
                start = time.perf_counter()
                found = block_eigenvalues(study.loss(rows), blocks, method=method, tol=1e-2, seed=seed)
                seconds, peak = time.perf_counter() - start, peak_memory()
                errors = [abs(abs(found[name].value) / abs(truth[name].value) - 1) for name in blocks]
                lines.append(
                    {
                        "step": step,
                        "method": method,
                        "seed": seed,
                        "products": [found[name].num_products for name in blocks],
                        "seconds": seconds,
                        "peak_bytes": peak,
                        "errors": errors,
                        "values": [found[name].value for name in blocks],
                        "truth": [truth[name].value for name in blocks],
                    }
                )
                print(
                    f"step {step} {method:8} seed {seed}: {sum(lines[-1]['products']):4} products {seconds:7.1f} s, "
                    f"largest error {max(errors):.4f}",
                    flush=True,
                )
    return lines


def stability(study: Study, step: int, counts: Iterable[int], path: Path) -> None:
    """One line per measurement, appended."""
    done = set()
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            done.add((entry["step"], entry["method"], entry["num_samples"], entry["draw"]))
    # "magnitudes": each batch by itself, its magnitudes averaged.
    cases = [("power", BATCH), *(("lanczos", count) for count in counts), ("magnitudes", 2 * BATCH)]
    for method, count in cases:
        for draw in range(DRAWS):
            if (step, method, count, draw) in done:
                continue
            first = draw * max(ROWS_PER_DRAW, count)
            losses = [study.loss(study.take(first + k)) for k in range(0, count, BATCH)]
            start = time.perf_counter()
            with measuring(study.model, study.blocks) as blocks:
                if method == "magnitudes":
                    each = [block_eigenvalues(loss, blocks).values() for loss in losses]
                else:
                    each = [block_eigenvalues(losses, blocks, method=method).values()]
            values = [[abs(result.value) for result in found] for found in each]
            products = [[result.num_products for result in found] for found in each]
            entry = {
                "step": step,
                "method": method,
                "num_samples": count,
                "draw": draw,
                "values": [statistics.mean(column) for column in zip(*values, strict=True)],
                "products": [statistics.mean(column) for column in zip(*products, strict=True)],
                "seconds": time.perf_counter() - start,
            }
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def spread(path: Path) -> list[dict[str, Any]]:
    """Per step and estimate: the deviation of the normalized values, and how often a factor is not its usual one."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    table = []
    for key in sorted({(line["step"], line["method"], line["num_samples"]) for line in lines}, key=str):
        draws = [line for line in lines if (line["step"], line["method"], line["num_samples"]) == key]
        if len(draws) < DRAWS:
            continue
        columns = list(zip(*(normalize(dict(enumerate(d["values"]))).values() for d in draws), strict=True))
        factors = [[1 + math.floor(4 * value) for value in column] for column in columns]
        changed = sum(f != max(set(column), key=column.count) for column in factors for f in column)
        deviations = [statistics.stdev(column) for column in columns]
        step, method, count = key
        table.append(
            {
                "step": step,
                "method": method,
                "num_samples": count,
                "standard_deviation": deviations,
                "largest_standard_deviation": max(deviations),
                "share_of_factors_changed": changed / (DRAWS * len(columns)),
                "mean_products": statistics.mean(sum(d["products"]) for d in draws),
                "mean_values": [statistics.mean(column) for column in columns],
            }
        )
    return table


def main() -> None:
    """Measure the parts that are asked for and merge them into the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="for every part but golden")
    parser.add_argument("--train_file", type=Path, help="JSON lines with two sentences and a label, for the same")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "all"], default=["golden"])
    parser.add_argument("--num_samples", nargs="+", type=int, default=[32, 64], help="multiples of 16, for stability")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/eigen.json"))
    args = parser.parse_args()
    parts = PARTS if "all" in args.parts else args.parts
    if set(parts) - {"golden"} and not (args.model_name_or_path and args.train_file):
        parser.error("parts other than golden need --model_name_or_path and --train_file")
    torch.set_num_threads(args.threads)
    document = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    lines = args.out.with_name(args.out.stem + "_stability.jsonl")
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(part: str, result: Any) -> None:
        document[part] = {**environment(), "results": result}
        write(document, args.out)
        print(f"{part}: written to {args.out}", flush=True)

    if "golden" in parts:
        keep("golden", golden())
    if not set(parts) - {"golden"}:
        return
    study = Study(args.model_name_or_path, args.train_file)
    errors: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    if "cost" in parts:
        before = {name: tensor.clone() for name, tensor in study.model.state_dict().items()}
        with torch.random.fork_rng():
            keep("cost", cost(study))
        study.model.load_state_dict(before)
    for step in study.train():
        if "difference" in parts:
            errors.append(difference(study, step))
            keep("difference", errors)
        if "accuracy" in parts:
            measured += accuracy(study, step)
            keep("accuracy", measured)
        if "stability" in parts:
            stability(study, step, args.num_samples, lines)
            keep("stability", spread(lines))


if __name__ == "__main__":
    main()
