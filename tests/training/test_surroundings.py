"""What a run does not choose: the optimizer's kind, workers of the data loader, threads, torch.compile."""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
import transformers as hf
from tiny_runs import CONFIG, STOCHASTIC, assert_same, callback_of, moq, no_dropout, rows, stock, trained, weights
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging

from moq_hf import verify_quantized
from moq_hf.packed.load_check import quiet
from moq_hf.training.measuring import measuring, repeatable

OTHER = {**CONFIG, "quantize_bits": {"start_bits": 8, "target_bits": 4}, "quantize_groups": 1}
IDS = torch.arange(5, 26).view(3, 7)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(IDS).logits
    return result


class Averaging(torch.optim.SGD):
    """As the schedule-free optimizers: evaluates the mean of the weights that it trained with."""

    is_training = True

    def step(self, closure: Any = None) -> None:
        self.train()
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.detach().clone())
                mean.lerp_(p.detach(), 0.1)

    def _swap(self) -> None:
        for state, p in ((self.state[p], p) for group in self.param_groups for p in group["params"]):
            p.data, state["mean"] = state["mean"], p.data

    def train(self) -> None:
        if not self.is_training:
            self._swap()
        self.is_training = True

    def eval(self) -> None:
        if self.is_training and self.state:
            self._swap()
        self.is_training = False


def test_a_schedule_free_optimizer_delivers_what_is_evaluated(tmp_path: Path) -> None:
    trainer = stock(tmp_path)
    trainer.optimizer = Averaging(trainer.model.parameters(), lr=0.5)
    trained(trainer)
    trainer.evaluate(rows(8))
    delivered = hf.BertForSequenceClassification.from_pretrained(tmp_path / "quantized")
    assert torch.equal(logits(delivered), logits(trainer.model))


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with weights large enough for states of 8 bits."""

    def make() -> hf.BertForSequenceClassification:
        hf.set_seed(7)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=60, max_position_embeddings=16, **sizes))

    monkeypatch.setattr(tiny_runs, "new_model", make)


def states(trainer: Any) -> set[tuple[str, str, torch.dtype]]:
    """Class and dtype of all that the optimizer keeps, by its name there."""
    optimizer = trainer.optimizer.optimizer
    kept = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    return {(name, type(value).__name__, value.dtype) for name, value in kept if isinstance(value, Tensor)}


# torchao compiles its step, and the compiler has a warning for PyTorch itself.
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("larger")
@pytest.mark.parametrize(
    ("optimizer", "library"),
    [
        ("adamw_torch_8bit", "torchao"),
        ("adamw_8bit", "bitsandbytes"),
        ("schedule_free_adamw", "schedulefree"),
        ("adafactor", "torch"),
    ],
)
def test_optimizers_keep_what_they_keep_without_moq_and_resume(optimizer: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    settings: dict[str, Any] = {"optim": optimizer, "lr_scheduler_type": "constant", "max_steps": 12}
    plain = trained(moq(tmp_path / "plain", None, **settings))
    settings |= {"save_strategy": "steps", "save_steps": 5}
    trainer = trained(moq(tmp_path / "moq", STOCHASTIC, **settings))
    assert states(trainer) == states(plain)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    resumed = moq(tmp_path / "resumed", STOCHASTIC, **settings)
    resumed.train(str(tmp_path / "moq" / "checkpoint-5"))
    assert_same(weights(resumed), weights(trainer))
    found = verify_quantized(tmp_path / "moq" / "quantized", trainer.model)
    assert {layer.bits for layer in found.layers.values()} == {3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stock Trainer after a run that had the process for itself."""
    torch.set_num_threads(1)
    return trained(no_dropout(stock(tmp_path_factory.mktemp("undisturbed"), STOCHASTIC)))


def test_workers_of_the_data_loader_change_nothing(undisturbed: Any, tmp_path: Path) -> None:
    workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    trainer = trained(no_dropout(stock(tmp_path, STOCHASTIC, **workers)))
    assert_same(weights(trainer), weights(undisturbed))
    assert callback_of(trainer).delivered.proof.agrees


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each function gives, in a thread of its own, all at once."""
    results: list[Any] = [None] * len(functions)

    def call(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_two_trainers_in_two_threads_train_and_deliver_as_each_alone(undisturbed: Any, tmp_path: Path) -> None:
    alone = [undisturbed, trained(no_dropout(moq(tmp_path / "alone", OTHER)))]
    ready = [no_dropout(stock(tmp_path / "stock", STOCHASTIC)), no_dropout(moq(tmp_path / "moq", OTHER))]
    both = in_threads(*(trainer.train for trainer in ready))
    assert None not in both
    for one, other in zip(alone, ready, strict=True):
        assert_same(weights(other), weights(one))
        assert callback_of(other).delivered.proof.agrees
        assert callback_of(other).bits == callback_of(one).bits


@pytest.mark.usefixtures("restless")
def test_a_model_may_be_evaluated_in_another_thread_while_it_trains(undisturbed: Any, tmp_path: Path) -> None:
    trainer = no_dropout(stock(tmp_path, STOCHASTIC))
    done = threading.Event()

    def train() -> None:
        try:
            trainer.train()
        finally:
            done.set()

    def evaluate() -> int:
        count = 0
        while not done.is_set():
            logits(trainer.model)
            count += 1
        return count

    assert in_threads(train, evaluate)[1] > 5
    assert_same(weights(trainer), weights(undisturbed))
    assert callback_of(trainer).delivered.proof.agrees


def settings_of_the_process() -> list[Any]:
    has_bars = not tqdm(disable=False, file=io.StringIO()).disable
    sdp = torch.backends.cuda
    kernels = [sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()]
    return [has_bars, logging.get_verbosity(), *kernels]


@pytest.mark.parametrize("context", [quiet, lambda: measuring(nn.Linear(2, 2))])
def test_threads_leave_the_settings_of_the_process_as_they_were(context: Any) -> None:
    before = settings_of_the_process()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with context():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with context():
        thread.start()
        # It must wait for this one: else it finds its settings, and leaves them behind.
        assert not entered.wait(0.2)
    leave.set()
    thread.join(10)
    assert entered.is_set() and settings_of_the_process() == before


def test_a_pytorch_built_for_an_accelerator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with repeatable():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)
