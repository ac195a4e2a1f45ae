"""Several processes train what one does on the same global batch; processes that differ stop."""

import functools
import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import launched
import programs
import pytest
import torch
from filelock import FileLock
from repo import HELPERS, ROOT
from torch import nn
from transformers import AutoModelForSequenceClassification

from moq_hf import MoQError, dequantize_model, quantize_model, verify_quantized
from moq_hf.model.inventory import Inventory
from moq_hf.names import named_modules, plain_name
from moq_hf.packed.pack import pack_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ERRORS = ["config", "bits", "skipped"]
JOBS = [
    "ddp/activations",
    "ddp/eigenvalues_stochastic",
    *(f"ddp/error/{case}" for case in ERRORS),
    "ddp/gptq",
    "fsdp2/error/gptq",
    "ddp/float_first",
    "ddp/lora",
    "ddp/scales",
    "fsdp2/dora",
    "fsdp2/resume/float_first_adamw",
    "fsdp2/budget",
    "fsdp2/nearest",
    "fsdp2/sharded",
    "stock/nearest",
    "loaded/saved/constant",
    "fsdp2/resume/adamw_stochastic",
    "hand/stochastic",
    "offload/stochastic",
]
# Of four processes.
FOUR = ["hsdp/stochastic", "reshard/nearest"]
# What torchrun names as the first failure where a process was killed: a signal, or that the others lost it.
CRASHED = re.compile("Root Cause.*(Signal|closed by peer|reset by peer)", re.DOTALL)


def launched_once(factory: pytest.TempPathFactory, count: int, jobs: list[str]) -> Path:
    """The folder of one launch with all jobs, which xdist's workers share."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"launched-{count}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            launch(folder, count, jobs)
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes have done."""
    return launched_once(tmp_path_factory, 2, JOBS)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what four processes have done."""
    return launched_once(tmp_path_factory, 4, FOUR)


def launch(folder: Path, count: int, jobs: list[str]) -> None:
    """Each process is a fork of torchrun's, which has the libraries already.

    A process has once died without an error of Python's, for a reason not known, so such a launch is tried again.
    """
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words += ["--run-path", "--start-method", "fork", str(HELPERS / "launched.py"), str(folder), *jobs]
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        done = programs.run(*words, cwd=ROOT, timeout=600, **variables)
        if not CRASHED.search(done.stderr):
            break
    assert done.returncode == 0, done.stderr
    (folder / "done").touch()


def result(folder: Path, job: str) -> Any:
    return torch.load(folder / f"{job.replace('/', '-')}.pt", weights_only=False)


@pytest.mark.parametrize("job", [job for job in JOBS if job.count("/") == 1])
def test_two_processes_train_what_one_does(job: str, two_processes: Path) -> None:
    check_against_one(job, two_processes)


@pytest.mark.parametrize("job", FOUR)
def test_four_processes_train_what_one_does(job: str, four_processes: Path) -> None:
    check_against_one(job, four_processes)


@functools.cache
def alone(kind: str, case: str) -> dict[str, Any]:
    """What one process comes to, for all jobs that are compared with it."""
    with TemporaryDirectory() as folder:
        return launched.run(Path(folder), kind, case)


def check_against_one(job: str, folder: Path) -> None:
    """Bits, switches, weights and losses of a job are those that one process comes to."""
    kind, case = job.split("/")
    many, one = result(folder, job), alone("hand" if kind in launched.BY_HAND else "ddp", case)
    assert many["bits"] == one["bits"]
    switches = [[switch[:4] for switch in each["history"]] for each in (many, one)]
    assert switches[0] == switches[1] and bool(switches[1]) == (case != "scales")
    for kind in ("weights", "quantized"):
        for name, expected in one[kind].items():
            torch.testing.assert_close(many[kind][name], expected, rtol=0, atol=1e-6)
    assert many["ranges"] == pytest.approx(one["ranges"], rel=1e-6)
    assert bool(many["ranges"]) == (case == "activations")
    # Losses are written with 4 digits and more.
    assert many["losses"] == pytest.approx(one["losses"], abs=1e-5)


@pytest.mark.parametrize(
    "job, saved", [("fsdp2/nearest", "fsdp2-nearest/packed"), ("stock/nearest", "stock-nearest/quantized")]
)
def test_the_packed_model_of_shards_loads(job: str, saved: str, two_processes: Path) -> None:
    """By `save_model` of a MoQTrainer, and by the callback at the end of a stock Trainer's training."""
    trained = result(two_processes, job)
    model = launched.new_model()
    quantized = {f"{name}.weight": weight for name, weight in trained["quantized"].items()}
    model.load_state_dict({**trained["weights"], **quantized})
    folder = two_processes / saved
    found = verify_quantized(folder)
    assert {layer.bits for layer in found.layers.values()} == {3}
    # As one process does: what proves it loads in one of them alone.
    assert found.state["layout"] == "packed"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.stack([row["input_ids"] for row in launched.rows(8)])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_a_loaded_model_trains_in_shards_and_is_saved_whole_or_not_at_all(two_processes: Path) -> None:
    found = result(two_processes, "loaded/saved/constant")
    assert found["equal"]
    # `Trainer.save_model` gathers the weights, and hands them over.
    files = [
        two_processes / f"{name}/model.safetensors" for name in ("loaded-constant/packed", "stock-constant/quantized")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ["spread over processes (FSDP2, ZeRO-3)" in message for message in found["messages"]] == [True, True]
    assert not (two_processes / "loaded-constant" / "own").exists()


def test_merged_adapters_of_shards_are_delivered(two_processes: Path) -> None:
    """As one process packs them: in a model without PEFT, beside the adapter."""
    folder = two_processes / "fsdp2-dora" / "packed"
    layers = result(two_processes, "fsdp2/dora")["quantized"]
    merged = {plain_name(name, ()).removeprefix("base_model.model."): weight for name, weight in layers.items()}
    found = verify_quantized(folder)
    assert found.proof.agrees and (folder / "lora" / "adapter_model.safetensors").is_file()
    assert set(merged) == set(found.layers)
    dequantized = dequantize_model(AutoModelForSequenceClassification.from_pretrained(folder))
    assert all(torch.equal(dequantized.get_submodule(name).weight, weight) for name, weight in merged.items())


def test_a_checkpoint_of_shards_is_packed_by_one_process(two_processes: Path, tmp_path: Path) -> None:
    """With SHARDED_STATE_DICT each process writes its own shards, and the Trainer nothing that describes the model."""
    folder = two_processes / "fsdp2-sharded"
    assert not list((folder / "checkpoint-14").glob("*.safetensors"))
    pack_checkpoint(folder / "checkpoint-14", tmp_path / "packed")
    found = [(path / "model.safetensors").read_bytes() for path in (tmp_path / "packed", folder / "packed")]
    assert found[0] == found[1]
    assert verify_quantized(folder / "packed").proof.agrees


@pytest.mark.parametrize("case", ["adamw_stochastic", "float_first_adamw"])
def test_a_resumed_run_with_shards_is_an_uninterrupted_one(case: str, two_processes: Path) -> None:
    assert result(two_processes, f"fsdp2/resume/{case}") is True


@pytest.mark.parametrize("case", ERRORS)
def test_processes_that_differ_all_stop_before_the_next_step(case: str, two_processes: Path) -> None:
    step = 0 if case == "config" else 5
    first, second = result(two_processes, f"ddp/error/{case}")
    assert first == second and first.startswith(f"step {step}: the processes disagree: rank 0 has {step} steps")
    assert (", skipped" in first) == (case == "skipped")


def test_every_committed_run_of_several_processes_is_that_of_one() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "processes.json").read_text())["results"]
    assert {row.get(name, True) for row in results for name in ("bits_equal", "switches_equal", "factors_equal")} == {
        True
    }
    assert {row.get("resumed_equal", True) for row in results} == {True}


def test_killed_runs_of_several_processes_end_as_if_never_killed() -> None:
    lines = (ROOT / "benchmarks" / "results" / "kills_sharded.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all(line["died"] and line["equal"] and line["kind"] == "fsdp2" for line in found)
    assert {line["processes"] for line in found} == {2, 4}


class FullyShardedDataParallel(nn.Sequential):
    """By its name FSDP1."""


def test_gptq_of_shards_is_refused(two_processes: Path) -> None:
    for message in result(two_processes, "fsdp2/error/gptq"):
        assert message.startswith("step 0: quantize_algo.gptq: FSDP2 and DeepSpeed keep the weights that they train")


def test_fsdp1_is_refused() -> None:
    with pytest.raises(MoQError, match=r"FSDP1.*DDP, FSDP2 and DeepSpeed ZeRO work"):
        quantize_model(FullyShardedDataParallel(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), launched.BASE)


def test_wrappers_of_activation_checkpointing_change_no_name() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = (quantize_model(launched.new_model(), launched.BASE) for _ in range(2))
    layers = wrapped.bert.encoder.layer
    layers[0] = checkpoint_wrapper(layers[0])
    wrapped.bert.pooler.dense = checkpoint_wrapper(wrapped.bert.pooler.dense)
    inventory = Inventory.of(wrapped)
    assert set(inventory.modules) == set(dict(named_modules(wrapped))) == set(dict(plain.named_modules()))
    assert [name for name, _ in inventory.parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(named_modules(wrapped))[-1][1] is wrapped.classifier
