"""Small seeded runs and digests of all that they give: does a change leave every number as it was?

    python benchmarks/same_numbers.py --out before.json
    python benchmarks/same_numbers.py --compare before.json

Thirteen runs of a two-layer BERT with random weights and data: 16 steps in one process, the last run in two. Each gives
digests of the float weights, the trainer's log without times, the callback's part of `trainer_state.json` (its keys by
themselves too), and of the packed folder: its tensors, the quantization config and `moq_state.json`. With `--compare`
each part that differs is named, and the exit status is 1.

Digests are comparable on one machine with the same versions only: another processor or another PyTorch adds in another
order. Nothing but the public names of `moq_hf` is used, and no network is needed.
"""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import compressed_tensors
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

import moq_hf
from moq_hf import MoQCallback, MoQTrainer, last_checkpoint

STEPS, BATCH = 16, 8
BASE: dict[str, Any] = {
    "quantize_bits": {"start_bits": 6, "target_bits": 3},
    "quantize_groups": 8,
    "quantize_schedule": {"quantize_period": 2, "schedule_offset": 2},
    "quantize_algo": {"scale_refresh": 3},
}
STOCHASTIC = {"scale_refresh": 3, "rounding": "stochastic"}
# Versions and times, and the digest that moq_state.json has of itself with them.
_NOISE = frozenset({"versions", "moq_hf", "seconds", "digest"})
# Keys of a log that tell times.
_TIMES = re.compile(r"runtime|per_second")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "amx_int8")


class Run(NamedTuple):
    """One run.

    Attributes:
        moq: What its config has beside `BASE`, or instead.
        stock: A stock Trainer with MoQCallback; else a MoQTrainer.
        settings: More training arguments.
        resumed: Stopped after step 7, and resumed from its checkpoint of step 5.
        teacher: With distillation.
        processes: How many share it, by FSDP2 if more than one.
    """

    moq: dict[str, Any]
    stock: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012
    resumed: bool = False
    teacher: bool = False
    processes: int = 1


# Group layouts, ways to find scales and trainers are spread over them.
RUNS: dict[str, Run] = {
    "stock": Run({}, stock=True),
    "moq_trainer": Run({}),
    "stochastic": Run(
        {"quantize_groups": "per_channel", "quantize_algo": {**STOCHASTIC, "scale": "absmax"}}, stock=True
    ),
    "asymmetric": Run(
        {
            "quantize_groups": None,
            "quantize_group_size": 16,
            "quantize_algo": {"scale_refresh": 3, "q_type": "asymmetric", "scale": "mse"},
        }
    ),
    "ternary": Run(
        {
            "quantize_bits": {"start_bits": 4, "target_bits": 2},
            "quantize_groups": "per_channel",
            "quantize_algo": {"range": "narrow"},
        },
        stock=True,
        settings={"optim": "sgd", "learning_rate": 0.05},
    ),
    "blend": Run({"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}}),
    "eigenvalues": Run(
        {
            "quantize_groups": "per_channel",
            "quantize_schedule": {"quantize_period": "auto", "schedule_offset": 2, "deadline": 0.9},
            "eigenvalue": {"enabled": True, "num_samples": BATCH, "max_overhead": 1.0},
        },
        stock=True,
    ),
    "embeddings": Run({"quantize_embeddings": 8, "quantize_algo": {"scale": "mse", "scale_refresh": 3}}, stock=True),
    "activations": Run(
        {"quantize_groups": "per_channel", "activation_quantization": {"enabled": True, "bits": 7, "start_step": 4}}
    ),
    "teacher": Run({"quantize_groups": None, "quantize_group_size": 8}, teacher=True),
    "accumulation": Run(
        {"quantize_algo": STOCHASTIC}, settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    ),
    "resume": Run(
        {"quantize_groups": None, "quantize_group_size": 8, "quantize_algo": STOCHASTIC}, stock=True, resumed=True
    ),
    "fsdp2": Run({"quantize_groups": 4, "quantize_algo": STOCHASTIC, "quantize_embeddings": 8}, processes=2),
}


class OnCpu(Trainer):
    """Accelerate obeys `fsdp` on GPUs only. This makes it take gloo's processes for such."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make it, and change what it found out."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.accelerator.device.type == "cpu":
            state = self.accelerator.state
            PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


class MoQOnCpu(OnCpu, MoQTrainer):
    """The same for MoQTrainer."""


class _Stop(TrainerCallback):
    """Ends training early, as a killed run would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 7


def _model(seed: int) -> BertForSequenceClassification:
    """The tiny BERT of the tests."""
    set_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=120, max_position_embeddings=64, num_labels=2, **shape))


def _rows() -> list[dict[str, Any]]:
    """Sentences of 12 words, every other one padded."""
    ids = torch.randint(5, 120, (96, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1::2, 9:] = 0
    return [
        {"input_ids": row * seen, "attention_mask": seen, "labels": int(row[0] > 60)}
        for row, seen in zip(ids, mask, strict=True)
    ]


def _trainer(name: str, folder: Path, *callbacks: TrainerCallback) -> Trainer:
    run = RUNS[name]
    config = {key: value for key, value in {**BASE, **run.moq}.items() if value is not None}
    settings = {"per_device_train_batch_size": BATCH, "learning_rate": 2e-3, "save_strategy": "no", **run.settings}
    if run.resumed:
        settings |= {"save_strategy": "steps", "save_steps": 5}
    if run.processes > 1:
        settings["per_device_train_batch_size"] //= run.processes
        settings |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"]}}
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, seed=3,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    given: dict[str, Any] = {"model": _model(7), "args": arguments, "train_dataset": _rows()}
    if run.stock:
        return Trainer(**given, callbacks=[MoQCallback(config), *callbacks])
    teacher = _model(8) if run.teacher else None
    kind = MoQOnCpu if run.processes > 1 else MoQTrainer
    return kind(**given, moq_config=config, teacher=teacher, callbacks=list(callbacks))


def train(name: str, folder: Path) -> dict[str, str]:
    """Train one run in this process, with others if there are any, and digest what it gives.

    Args:
        name: Of the run.
        folder: Where it may write.

    Returns:
        Part to digest.
    """
    run = RUNS[name]
    if run.resumed:
        _trainer(name, folder, _Stop()).train()
    trainer = _trainer(name, folder)
    trainer.train(resume_from_checkpoint=last_checkpoint(folder) if run.resumed else None)
    weights = {
        key: _whole(tensor) for key, tensor in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()
    }
    # The callback packs at the end of training, a MoQTrainer when it is told to.
    if not run.stock:
        trainer.save_model(str(folder / "quantized"))
    trainer.save_state()
    if run.processes > 1:
        dist.barrier()
    return digests(folder, weights, trainer.state.log_history)


def digests(folder: Path, weights: Mapping[str, Tensor], log: list[dict[str, Any]]) -> dict[str, str]:
    """Digests of what a run gave.

    Args:
        folder: Holds `trainer_state.json` and the packed model in `quantized`.
        weights: The float weights.
        log: The trainer's `log_history`.

    Returns:
        Part to digest.
    """
    packed = folder / "quantized"
    state = _read(folder / "trainer_state.json")["stateful_callbacks"]["MoQCallback"]
    config = _read(packed / "config.json")["quantization_config"]
    files = sorted(packed.glob("*.safetensors"))
    return {
        "weights": _digest_of_tensors(weights),
        "log": _digest([{key: entry[key] for key in entry if not _TIMES.search(key)} for entry in log]),
        "callback_keys": _digest(_keys(state)),
        "callback": _digest(_quiet(state)),
        "packed_tensors": _digest_of_tensors({key: value for file in files for key, value in load_file(file).items()}),
        "quantization_config": _digest({key: config[key] for key in config if key != "version"}),
        "moq_state": _digest(_quiet(_read(packed / "moq_state.json"))),
    }


def _whole(tensor: Tensor) -> Tensor:
    """With the shards of all processes, in every one."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _quiet(document: Any) -> Any:
    """A document without versions and times; one that counts, `version` of a state, stays."""
    if isinstance(document, dict):
        return {key: _quiet(value) for key, value in document.items() if key not in _NOISE}
    return [_quiet(value) for value in document] if isinstance(document, list) else document


def _keys(document: Any) -> Any:
    """The keys of a document, and those of what they hold."""
    return {key: _keys(value) for key, value in document.items()} if isinstance(document, dict) else None


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _launch(name: str, folder: Path) -> dict[str, str]:
    """A run in processes of its own."""
    count = ["--standalone", "--nproc-per-node", str(RUNS[name].processes)]
    command = [sys.executable, "-m", "torch.distributed.run", *count, __file__, "--worker", str(folder), "--runs", name]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    found: dict[str, str] = _read(folder / "digests.json")
    return found


def _work(name: str, folder: Path) -> None:
    """What one process of `_launch` does; the first one writes the digests."""
    PartialState(cpu=True)
    found = train(name, folder)
    if dist.get_rank() == 0:
        (folder / "digests.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def machine() -> dict[str, Any]:
    """What digests depend on: the platform, the processor and those of its instructions that kernels choose by."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    words = flags[1].split() if flags else []
    return {
        "platform": platform.platform(),
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in words],
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two documents: a line for each part of each run of the second one.

    Args:
        before: As this command wrote it.
        now: The same; it may hold fewer runs.
    """
    lines = []
    for name, run in now["runs"].items():
        if name not in before["runs"]:
            lines.append(f"{name}: not in the file that it is compared with")
            continue
        one, other = before["runs"][name]["digests"], run["digests"]
        lines += [f"{name}: {part} differs" for part in {**one, **other} if one.get(part) != other.get(part)]
    return lines


def main() -> int:
    """Run, write and compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="NAME", help="default: all"
    )
    parser.add_argument("--out", type=Path, help="where to write the digests as JSON")
    parser.add_argument("--compare", type=Path, help="JSON of an earlier call, by the same machine")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    if args.worker is not None:
        _work(args.runs[0], args.worker)
        return 0
    before = None if args.compare is None else _read(args.compare)
    runs: dict[str, Any] = {}
    for name in args.runs:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            found = (train if RUNS[name].processes == 1 else _launch)(name, Path(folder))
        runs[name] = {"digests": found, "seconds": round(time.perf_counter() - began, 2)}
        print(f"{name}: {runs[name]['seconds']:.1f} s", flush=True)
    document = {
        "command": " ".join(["python", "benchmarks/same_numbers.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "compressed_tensors": compressed_tensors.__version__,
            "moq_hf": moq_hf.__version__,
        },
        "seconds": round(sum(run["seconds"] for run in runs.values()), 2),
        "runs": runs,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if before is None:
        return 0
    for part in ("machine", "versions"):
        if before[part] != document[part]:
            print(f"not comparable, {part}: {before[part]} before, {document[part]} now")
    found_lines = differences(before, document)
    print("\n".join(found_lines) or f"{len(runs)} runs: no number differs")
    return 1 if found_lines else 0


if __name__ == "__main__":
    sys.exit(main())
