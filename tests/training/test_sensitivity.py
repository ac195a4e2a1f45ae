import copy
import json
import logging
import math
import pickle
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import CONFIG, arguments, assert_same, callback_of, moq, new_model, rows, stock, trained, weights
from torch import Tensor, nn
from transformers import BertForSequenceClassification, Trainer, TrainerCallback

from moq_hf import MoQCallback, MoQConfig, MoQError, MoQTrainer, PrecisionSchedule
from moq_hf.config_fields import EigenvalueConfig
from moq_hf.eigen import Eigenvalue, block_eigenvalues
from moq_hf.model.inventory import Inventory
from moq_hf.training import measures
from moq_hf.training import sensitivity as module
from moq_hf.training.controller import MoQController
from moq_hf.training.measuring import measuring
from moq_hf.training.samples import Samples
from moq_hf.training.sensitivity import MIN_ROWS, Sensitivity

# Runs of tests are so short that one measurement is more than any sensible share of them.
EIGEN = {**CONFIG, "eigenvalue": {"enabled": True, "max_overhead": 1.0, "num_samples": 12}}


class Blocks(nn.Module):
    """Three blocks of one linear layer each, and a head; the loss has curvature in all of them."""

    def __init__(self, activation: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = self.activation(layer(x))
        return (self.head(x).flatten() - labels).square().mean(), x


def batch(size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 4, generator=generator), "labels": torch.randn(size, generator=generator)}


def config(start: int = 8, target: int = 4, period: int = 2, offset: int = 0, **eigenvalue: Any) -> MoQConfig:
    return MoQConfig(
        start_bits=start,
        bits=target,
        period=period,
        offset=offset,
        eigenvalue=EigenvalueConfig(enabled=True, **eigenvalue),
    )


def controller(**more: Any) -> MoQController:
    made = MoQController(Blocks(), config(**more))
    made.sensitivity.set_run_length(1000, 8)
    return made


def run(made: MoQController, steps: int, size: int = 8) -> list[tuple[int, str, int, int]]:
    for step in range(steps):
        made.sensitivity.samples.add(batch(size, step))
        made.step(made.measure())
    return [(s.step, s.block, s.bits, s.factor) for s in made.history]


# ---- when it measures


tables = st.lists(st.fixed_dictionaries(dict.fromkeys("abc", st.floats(0, 1))), min_size=1, max_size=80)


@given(st.integers(1, 12), st.integers(0, 4), st.integers(1, 9), st.integers(0, 5), tables)
def test_measuring_when_due_is_measuring_at_every_step(
    target: int, more: int, period: int, offset: int, values: list[dict[str, float]]
) -> None:
    plan = config(target + more, target, period, offset)
    lazy, eager = PrecisionSchedule(plan, "abcd"), PrecisionSchedule(plan, "abcd")
    # Without a model: the values of each step are given.
    sensitivity = Sensitivity.__new__(Sensitivity)
    sensitivity.config, sensitivity.blocks, sensitivity.scores = plan.eigenvalue, {name: [] for name in "abc"}, {}
    for step in values:
        is_due = sensitivity.is_due(lazy)
        if is_due:
            sensitivity.scores = step
        switches = lazy.advance(sensitivity.scores)
        assert switches == eager.advance(step)
        assert is_due == any(s.block != "d" and s.before != 32 for s in switches)


# ---- the budget


def test_the_budget_makes_a_value_last_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = []
    for share in (1.0, 0.05):
        made = controller(period=1, target=5, num_samples=8, max_overhead=share)
        made.sensitivity.set_run_length(1000, 400)
        steps = {step for step, *_ in run(made, 40)}
        told.append([r.message for r in caplog.records if "used again" in r.message])
        caplog.clear()
    assert not told[0]
    assert len(told[1]) == len(steps) - 1 >= 3
    assert all(re.fullmatch(r"step \d+: the last eigenvalues are used again, .* max_overhead 0.05", m) for m in told[1])


def test_a_small_budget_takes_fewer_examples() -> None:
    counts = []
    for share in (1.0, 0.4, 0.001):
        made = controller(num_samples=64, max_overhead=share)
        sensitivity = made.sensitivity
        sensitivity.set_run_length(100, 8)
        counts.append(sensitivity._first_rows())
    assert 64 >= counts[0] > counts[1] > counts[2] == MIN_ROWS


def test_the_share_that_was_taken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sensitivity = controller().sensitivity
    sensitivity.seconds = 1.0
    sensitivity.report(100.0)
    sensitivity.report(10.0)
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
    assert "0.100 of the run's time, 1.0 s; max_overhead is 0.05" in caplog.records[1].message


# ---- values


def results(*values: float) -> dict[str, Eigenvalue]:
    return {f"layers.{k}": Eigenvalue(v, "tolerance", 6) for k, v in enumerate(values)}


def test_values_are_those_of_the_mean_loss_at_the_quantized_weights() -> None:
    made = controller(start=3, target=2, period=1, num_samples=20, max_overhead=1.0)
    sensitivity = made.sensitivity
    for seed in (0, 1, 2):
        sensitivity.samples.add(batch(8, seed))
    every = {k: torch.cat([batch(8, seed)[k] for seed in (0, 1, 2)]) for k in ("x", "labels")}
    latest = {k: torch.cat([v[8:], v[:4]]) for k, v in every.items()}
    with measuring(made.model, Inventory.of(made.model).layer_blocks()) as blocks:
        truth = block_eigenvalues(lambda: made.model(**latest)[0], blocks, tol=1e-5)
    values = made.measure()
    assert values is not None and max(values.values()) == 1.0
    for name, value in sensitivity.scores.items():
        assert value == pytest.approx(abs(truth[name].value), rel=1e-2)


def test_what_is_not_finite_is_replaced_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = controller(period=1, max_overhead=1.0)
    answers = iter([results(4.0, math.nan, -1.0), results(4.0, math.nan, 2.0), results(*[math.nan] * 3)])
    monkeypatch.setattr(measures, "block_eigenvalues", lambda *args, **kwargs: next(answers))
    seen = []
    for _ in range(3):
        made.sensitivity.samples.add(batch(4))
        made.sensitivity.update(made.schedule)
        seen.append(list(made.sensitivity.values.values()))
        made.schedule.steps += 400
    assert seen == [[1.0, 1.0, 0.25], [1.0, 1.0, 0.5], [1.0, 1.0, 1.0]]
    told = [r.message for r in caplog.records if "not finite" in r.message]
    assert len(told) == 2 and "eigenvalue of layers.1 is not finite" in told[0]
    assert "of layers.0, layers.1, layers.2 is not finite" in told[1]


class Once(torch.autograd.Function):
    """A tanh whose gradient hides what it depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (1 - ctx.saved_tensors[0].detach().tanh() ** 2) * grad


def test_a_kernel_without_a_second_derivative_stops_the_run_and_kinks_do_not() -> None:
    with pytest.raises(MoQError, match=r"a wrong second derivative.*divergence"):
        run(MoQController(Blocks(activation=Once.apply), config(period=1)), 2)
    assert run(MoQController(Blocks(activation=torch.relu), config(period=1)), 2)


def test_each_measurement_takes_as_many_examples_as_there_are(caplog: pytest.LogCaptureFixture) -> None:
    made = controller(period=1, num_samples=32, max_overhead=1.0, verbose=True)
    caplog.set_level(logging.INFO)
    made.sensitivity.set_run_length(1000, 10_000)
    for step in range(20):
        for part in range(5):
            made.sensitivity.samples.add(batch(1 if step == 0 else 8, 5 * step + part))
        made.step(made.measure())
    found = [
        int(re.search(r"over (\d+) examples: ", r.message)[1]) for r in caplog.records if "examples: " in r.message
    ]
    assert found[0] == 5 and found[-1] == 32


# ---- the examples


def test_the_latest_examples_of_a_step_are_measured() -> None:
    samples = Samples(10)
    for seed in range(5):
        samples.add(batch(4, seed))
    found = samples.batches(10)
    assert [len(b["x"]) for b in found] == [4, 4, 2]
    assert torch.equal(found[0]["x"], batch(4, 4)["x"]) and torch.equal(found[2]["x"], batch(4, 2)["x"][:2])
    big = Samples(100)
    big.add(batch(40))
    assert [len(b["x"]) for b in big.batches(100)] == [16, 16, 8]
    made = controller()
    run(made, 1)
    assert made.sensitivity.samples.batches(1) == []


def test_what_cannot_be_cut_is_measured_whole() -> None:
    samples = Samples(4)
    samples.add({"x": torch.zeros(8, 4), "scale": torch.tensor(2.0)})
    assert [len(b["x"]) for b in samples.batches(2)] == [8]
    samples = Samples(4)
    samples.add({"x": torch.zeros(40, 4), "names": ["a"] * 40})
    assert [len(b["x"]) for b in samples.batches(4)] == [40]


# ---- in training


def factors(trainer: Any) -> list[tuple[Any, ...]]:
    return [tuple(s) for s in callback_of(trainer).controller.history]


def test_sensitive_blocks_drop_later(tmp_path: Path) -> None:
    trainer = trained(stock(tmp_path, EIGEN))
    first = [s for s in callback_of(trainer).controller.history if s.before == 6]
    by_block = {s.block: s for s in first}
    assert by_block["bert.pooler.dense"].factor == 1 and by_block["bert.pooler.dense"].eigenvalue is None
    layers = [by_block[f"bert.encoder.layer.{k}"] for k in range(2)]
    assert max(s.factor for s in layers) == 5 and max(s.eigenvalue for s in layers) == 1.0
    assert all(s.factor == 1 + math.floor(4 * s.eigenvalue) and s.period == 4 * s.factor for s in layers)
    logged = [entry for entry in trainer.state.log_history if "moq/eigenvalue/bert.encoder.layer.0" in entry]
    assert logged and logged[0]["moq/eigenvalue/bert.encoder.layer.1"] == layers[1].eigenvalue


def test_the_callback_measures_what_moq_trainer_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In accumulated steps; in others checkpoints go from one to the other in test_resume.py."""
    # The stock Trainer would multiply the gradients by the accumulation steps.
    monkeypatch.setattr(BertForSequenceClassification, "accepts_loss_kwargs", False, raising=False)
    one, two = (trained(make(tmp_path, EIGEN, gradient_accumulation_steps=3)) for make in (stock, moq))
    assert factors(one) == factors(two)
    assert_same(weights(one), weights(two))


def test_measuring_changes_nothing_but_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(stock(tmp_path, CONFIG))
    monkeypatch.setattr(module, "normalize", lambda values: dict.fromkeys(values, 0.0))
    for make in (stock, moq):
        measured = trained(make(tmp_path, EIGEN))
        assert callback_of(measured).controller.sensitivity.seconds > 0
        assert_same(weights(plain), weights(measured))
        assert plain.optimizer.state_dict()["state"][0]["step"] == measured.optimizer.state_dict()["state"][0]["step"]


def test_a_resumed_run_measures_the_same(tmp_path: Path) -> None:
    """Of a MoQTrainer such a run is in test_resume.py."""
    whole = trained(stock(tmp_path / "whole", EIGEN, save_strategy="steps", save_steps=1))
    for at in (3, 7):
        resumed = stock(tmp_path / f"from{at}", EIGEN)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{at}"))
        assert factors(resumed) == factors(whole)
        assert_same(weights(resumed), weights(whole))


def test_compiled_in_bfloat16(tmp_path: Path) -> None:
    trainer = trained(moq(tmp_path, EIGEN, bf16=True, torch_compile=True, torch_compile_backend="aot_eager"))
    assert max(s.factor for s in callback_of(trainer).controller.history) == 5


def smooth(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.3, reduction="sum")
    return loss / num_items_in_batch


def build(folder: Path, cls: Any, callbacks: Any, compute_loss_func: Any = None, **more: Any) -> Any:
    return cls(
        new_model(),
        arguments(folder, **more),
        train_dataset=rows(),
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
    )


def test_a_loss_that_the_trainer_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for more in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": smooth}):
        with pytest.raises(MoQError, match="use MoQTrainer, or give MoQCallback the function"):
            build(tmp_path, Trainer, [MoQCallback(EIGEN)], **more).train()

    def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        raise AssertionError("the labels are not seen by the model")

    own = trained(build(tmp_path, MoQTrainer, [MoQCallback(EIGEN)], compute_loss_func=smooth))
    assert max(f[5] for f in factors(own)) == 5
    trained(build(tmp_path, MoQTrainer, [MoQCallback(EIGEN)], label_smoothing_factor=0.1))
    with pytest.raises(AssertionError, match="labels are not seen"):
        build(tmp_path, Trainer, [MoQCallback(EIGEN, loss=loss)], compute_loss_func=smooth).train()

    def pooled(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        assert "labels" not in inputs and not model.training
        return model(**inputs).logits.square().mean()

    saving = {"save_strategy": "steps", "save_steps": 7}
    given = trained(build(tmp_path, Trainer, [MoQCallback(EIGEN, loss=pooled)], compute_loss_func=smooth, **saving))
    assert max(f[5] for f in factors(given)) == 5
    again = build(tmp_path, Trainer, [MoQCallback(EIGEN, loss=pooled)], restore_callback_states_from_checkpoint=True)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert "sensitivity was measured on MoQCallback(loss=), which is not there now" in caplog.text


def test_an_interrupted_run_does_not_disturb_the_next(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            copies.append(copy.deepcopy(model))
            copies.append(pickle.loads(pickle.dumps(model)))
            if state.global_step == 1:
                raise KeyboardInterrupt

    copies: list[Any] = []
    trainer = build(tmp_path, Trainer, [MoQCallback(EIGEN), Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    seen = list(callback_of(trainer).controller.sensitivity.samples._batches)
    for model in copies:
        model.train()(input_ids=torch.ones(1, 4, dtype=torch.long))
    with torch.no_grad():
        trainer.model.train()(input_ids=torch.ones(1, 4, dtype=torch.long))
    after = callback_of(trainer).controller.sensitivity.samples._batches
    assert [id(b) for b in after] == [id(b) for b in seen]
    trainer.model.train()(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_wrong_layer_names_are_told_before_training(tmp_path: Path) -> None:
    wrong = {**EIGEN, "eigenvalue": {**EIGEN["eigenvalue"], "layer_name": "bert.encoder.layers"}}
    with pytest.raises(MoQError, match=r"has: bert.encoder.layer \(2\)"):
        stock(tmp_path, wrong)


# ---- several processes


def one_rank(rank: int, folder: str, rows_per_step: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    made = controller(period=1, num_samples=32, max_overhead=1.0)
    made.sensitivity.set_run_length(1000, rows_per_step)
    for step in range(4):
        made.sensitivity.samples.add(batch(4 + 4 * rank, 10 * step + rank))
        made.step(made.measure())
    state = made.sensitivity.state_dict()
    Path(folder, f"rank{rank}.json").write_text(json.dumps([made.history, state]))
    dist.destroy_process_group()


# At 110 a step the second measurement fits the budget of the rank with the smaller batch, not that of the other.
@pytest.mark.parametrize("rows_per_step", [8, 110])
def test_ranks_agree_on_the_mean(tmp_path: Path, rows_per_step: float) -> None:
    programs.warm()
    mp.start_processes(one_rank, (str(tmp_path), rows_per_step), nprocs=2, start_method="forkserver")
    (history, state), (other_history, other_state) = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    assert history == other_history and len(history) >= 3
    assert state == other_state
    # By hand: each rank's own value over its own data, at the weights of the first step.
    alone = []
    for rank in (0, 1):
        made = controller(period=1, num_samples=32)
        made.sensitivity.samples.add(batch(4 + 4 * rank, rank))
        made.measure()
        alone.append(made.sensitivity.scores)
    means = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    largest = max(means.values())
    for switch in history[:3]:
        assert switch[6] == pytest.approx(means[switch[1]] / largest, rel=1e-5)
