"""The step gate: what a training step costs with moq_hf and with its peers, over the same step in float.

    python benchmarks/step_time.py --out benchmarks/results/step_time.json

All arms train in one process on the same batches, a step of each in turn, and a ratio is that of the medians. Times are
CPU time, of all threads together. A step is forward and backward of each micro-batch, gradient clipping, the optimizer
and, with moq_hf, the schedule. The search for clipping ratios, due every 50 steps, is measured alone, and its share is
part of the ratio. Random weights of a 6-layer BERT with hidden size 384: 10.6 M weights in linear layers. torchao and
optimum-quanto are measured where they are installed.
"""

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from classifiers import MINILM, classifier
from environment import environment, write
from transformers import BertConfig

from moq_hf import MoQConfig, hold_quantized
from moq_hf.training.controller import MoQController

Batch = dict[str, torch.Tensor]
SEARCH_EVERY = 50


class Arm:
    """A model in training, as it is, with moq_hf or as a peer prepares it, under autocast if a dtype is given."""

    def __init__(
        self,
        model: Any,
        config: MoQConfig | None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
        prepare: Callable[[Any], None] | None = None,
    ) -> None:
        """Starts at the config's bits: with an offset of 0. With a backend of torch.compile it is compiled."""
        self.model = copy.deepcopy(model).train()
        if prepare is not None:
            prepare(self.model)
        self.device = next(self.model.parameters()).device
        self.dtype = dtype
        self.controller = None if config is None else MoQController(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.forward = torch.compile(self.model, backend=backend) if backend else self.model

    def step(self, micro_batches: list[Batch]) -> float:
        """Seconds of one optimizer step: of CPU time, or of a GPU's."""
        torch.manual_seed(0)
        self._wait()
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        start = clock()
        for batch in micro_batches:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                loss = self.forward(**batch).loss
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.controller is not None:
            self.controller.step()
        self.optimizer.zero_grad()
        self._wait()
        return clock() - start

    def evaluate(self, batch: Batch) -> float:
        """Seconds of CPU time of ten passes in evaluation."""
        with torch.no_grad():
            start = time.process_time()
            for _ in range(10):
                self.model(**batch)
        return time.process_time() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Case(NamedTuple):
    """What a step is.

    Attributes:
        dtype: That of autocast; None is float32.
        rows: Of a micro-batch.
        tokens: Of a row.
        micro_batches: Of a step.
    """

    dtype: torch.dtype | None
    rows: int
    tokens: int
    micro_batches: int = 1

    def __str__(self) -> str:
        dtype = "float32" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.micro_batches} x {self.rows} x {self.tokens}"


def moq(bits: int, group_size: int | None = None, **algo: Any) -> MoQConfig:
    """A config that stays at `bits` from the first step on: a scale a channel, or for groups of a size in a row."""
    groups = {"quantize_group_size": group_size} if group_size else {"quantize_groups": "per_channel"}
    document = {
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "quantize_algo": algo,
    }
    return MoQConfig.from_dict({**document, **groups})


def torchao(model: Any, bits: int = 8, group_size: int | None = None, inputs: bool = False) -> None:
    """Torchao's QAT, in place: a scale a channel, or for groups of a size; inputs may be rounded to int8 per token."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    groups: dict[str, Any] = {"group_size": group_size} if group_size else {"granularity": "per_channel"}
    weight = IntxFakeQuantizeConfig(getattr(torch, f"int{bits}"), **groups)
    rounded = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if inputs else None
    # The head stays in float, as with moq_hf.
    quantize_(model.base_model, QATConfig(activation_config=rounded, weight_config=weight, step="prepare"))


def quanto(model: Any) -> None:
    """optimum-quanto's QAT, 8 bits, in place."""
    from optimum.quanto import qint8, quantize

    quantize(model, weights=qint8, exclude="classifier*")
    # Its backward pass takes a view of the gradient, which after attention's transpose is not contiguous.
    for layer in model.bert.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_full_backward_pre_hook(lambda _, grads: tuple(grad.contiguous() for grad in grads))


CONFIGS = {
    "moq_hf, 8 bits": moq(8),
    "moq_hf, 4 bits": moq(4, range="full"),
    "moq_hf, 4 bits, groups of 32": moq(4, 32, range="full"),
    "moq_hf, 8 bits, stochastic": moq(8, rounding="stochastic"),
    "moq_hf, 2 bits": moq(2, range="full"),
    "moq_hf, ternary": moq(2, range="narrow"),
}
PEERS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "torchao, 8 bits": ("torchao", torchao),
    "optimum-quanto, 8 bits": ("optimum.quanto", quanto),
}


def installed(module: str) -> bool:
    """Whether a module is there."""
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def arms_of(model: Any, dtype: torch.dtype | None) -> dict[str, Arm]:
    """All arms, of copies of one model."""
    arms = {"float": Arm(model, None, dtype)}
    arms |= {name: Arm(model, config, dtype) for name, config in CONFIGS.items()}
    for name, (module, prepare) in PEERS.items():
        # optimum-quanto's product with int8 weights does not run under autocast.
        if installed(module) and (dtype is None or prepare is not quanto):
            arms[name] = Arm(model, None, dtype, prepare=prepare)
    return arms


def in_turn(arms: Sequence[Arm], batches: list[Batch], repeats: int) -> list[list[float]]:
    """Seconds of each arm's steps: one of each in turn, and the other way round every second time."""
    times: list[list[float]] = [[] for _ in arms]
    for repeat in range(repeats):
        for index in sorted(range(len(arms)), reverse=repeat % 2 == 0):
            times[index].append(arms[index].step(batches))
    return times


def searched(controller: MoQController) -> None:
    """Search all clipping ratios once, as is due every `scale_refresh` steps."""
    for layer in controller.layers.values():
        layer.search_ratios()


def search_seconds(arm: Arm) -> float:
    """CPU time of a search, the median of three; nothing is searched without clipping ratios."""
    if arm.controller is None:
        return 0.0
    times = []
    for _ in range(3):
        start = time.process_time()
        searched(arm.controller)
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure(model: Any, case: Case, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step of each arm, and its ratio to that of float, the share of searches included."""
    arms = arms_of(model, case.dtype)
    batches = [batch_of(model, case) for _ in range(case.micro_batches)]
    for arm in arms.values():
        arm.step(batches)
    times = dict(zip(arms, in_turn(list(arms.values()), batches, repeats), strict=True))
    base = statistics.median(times["float"])
    found: dict[str, Any] = {}
    for name, arm in arms.items():
        search, step = search_seconds(arm), statistics.median(times[name])
        found[name] = {
            "step_ms": 1000 * step,
            "search_ms": 1000 * search,
            "ratio": (step + search / SEARCH_EVERY) / base,
            "quartiles_ms": [1000 * value for value in statistics.quantiles(times[name], n=4)[::2]],
        }
    return found


def evaluation(model: Any, repeats: int) -> dict[str, Any]:
    """Milliseconds of a pass of 1 x 16 in evaluation, in a plain loop and in one that holds the weights."""
    batch = batch_of(model, Case(None, 1, 16))
    arms = {name: arm for name, arm in arms_of(model, None).items() if name in ("float", "moq_hf, 8 bits")}
    times: dict[str, list[float]] = {name: [] for name in (*arms, "moq_hf, 8 bits, held")}
    for arm in arms.values():
        arm.model.eval()
        arm.evaluate(batch)
    quantized = arms["moq_hf, 8 bits"]
    for _ in range(repeats):
        for name, arm in arms.items():
            times[name].append(arm.evaluate(batch))
        with hold_quantized(quantized.model):
            quantized.evaluate(batch)
            times["moq_hf, 8 bits, held"].append(quantized.evaluate(batch))
    base = statistics.median(times["float"])
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {name: {"pass_ms": 100 * median, "ratio": median / base} for name, median in medians.items()}


def batch_of(model: Any, case: Case) -> Batch:
    """Random tokens with labels."""
    ids = torch.randint(1000, model.config.vocab_size, (case.rows, case.tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(case.rows) % 2}


def main() -> None:
    """Measure, print a line for each arm, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15, help="steps of each arm; ten times as many of 1 x 8 tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=MINILM.vocab_size)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = classifier(None, BertConfig(**{**MINILM.to_dict(), "vocab_size": args.vocabulary}))
    model.bert.encoder.layer = model.bert.encoder.layer[: args.layers]
    results: dict[str, Any] = {}

    def keep(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        for arm, figures in found.items():
            print(f"{name}: {arm}: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items() if k[0] != "q"), flush=True)

    for dtype in (None, torch.bfloat16):
        for micro_batches in (1, 4):
            case = Case(dtype, args.batch, args.sequence, micro_batches)
            keep(str(case), measure(model, case, args.repeats))
    keep(str(Case(None, 1, 8)), measure(model, Case(None, 1, 8), 10 * args.repeats))
    keep("float32, evaluation, 1 x 16", evaluation(model, 10 * args.repeats))
    packages = [package for package in ("torchao", "optimum.quanto") if installed(package)]
    write(
        {**environment(*packages), "repeats": args.repeats, "layers": args.layers, "seed": 0, "results": results},
        args.out,
    )


if __name__ == "__main__":
    main()
