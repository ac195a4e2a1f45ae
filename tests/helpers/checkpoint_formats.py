"""The weights of a checkpoint written in each way that `moq-hf pack` reads."""

import json
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = Mapping[str, Tensor]
FILE = "model.safetensors"


def take_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read the weights that a Trainer wrote, and take their file away."""
    weights = load_file(checkpoint / FILE)
    (checkpoint / FILE).unlink()
    return weights


def one_file(checkpoint: Path, weights: Weights) -> None:
    save_file(dict(weights), checkpoint / FILE, metadata={"format": "pt"})


def files(checkpoint: Path, weights: Weights) -> None:
    """Two files and their index."""
    names, places = list(weights), {}
    for part in (0, 1):
        name = f"model-{part + 1:05}-of-00002.safetensors"
        save_file({n: weights[n] for n in names[part::2]}, checkpoint / name)
        places |= dict.fromkeys(names[part::2], name)
    index = {"metadata": {}, "weight_map": places}
    (checkpoint / f"{FILE}.index.json").write_text(json.dumps(index))


def distributed(checkpoint: Path, weights: Weights) -> None:
    """As Accelerate writes FSDP2's shards, of one process."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = checkpoint / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": dict(weights)}, storage_writer=FileSystemWriter(folder), no_dist=True)


@contextmanager
def deepspeed() -> Iterator[type]:
    """A class by the name of one of DeepSpeed's, whose objects are in its files."""
    path = ["deepspeed", "runtime", "fp16", "loss_scaler"]
    names = [".".join(path[:end]) for end in range(1, len(path) + 1)]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].LossScaler = type("LossScaler", (), {"__module__": names[-1], "scale": 1.0})
    with mock.patch.dict(sys.modules, modules):
        yield modules[names[-1]].LossScaler


def _latest(checkpoint: Path) -> Path:
    folder = checkpoint / "global_step8"
    folder.mkdir()
    (checkpoint / "latest").write_text(folder.name)
    return folder


def zero_1(checkpoint: Path, weights: Weights) -> None:
    """As ZeRO-1 and ZeRO-2 write the weights."""
    with deepspeed() as scaler:
        state = {"module": dict(weights), "loss_scaler": scaler(), "dp_world_size": 2}
        torch.save(state, _latest(checkpoint) / "mp_rank_00_model_states.pt")


def zero_3(checkpoint: Path, weights: Weights, world: int = 3, prefix: str = "") -> None:
    """As ZeRO-3 writes the parts of each process: two thirds of the weights are trained, in two flat tensors."""
    folder = _latest(checkpoint)
    names = list(weights)
    frozen = {n: weights[n] for n in names[::3]}
    groups = [[n for n in names[1::3]], [n for n in names[2::3]]]
    parts = {name: _parts(tensor, world) for name, tensor in weights.items()}
    shapes = [{n: weights[n].shape for n in group} for group in groups]
    with deepspeed() as scaler:
        for rank in range(world):
            state = {
                "module": {n: torch.empty(0, dtype=t.dtype) for n, t in weights.items()},
                "buffer_names": [],
                "param_shapes": shapes,
                "frozen_param_shapes": {n: t.shape for n, t in frozen.items()},
                "frozen_param_fragments": {n: parts[n][rank] for n in frozen},
                "shared_params": {},
                "dp_world_size": world,
            }
            flat = [torch.cat([parts[n][rank].float() for n in group]) for group in groups]
            # A border of its own, not that of a weight.
            flat = [flat[0][:-5], torch.cat([flat[0][-5:], flat[1], torch.zeros(4)])]
            optimizer = {"loss_scaler": scaler(), "fp32_flat_groups": flat}
            torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, folder / name)


def _parts(tensor: Tensor, world: int) -> list[Tensor]:
    """Equal parts, the last one filled up."""
    size = -(-tensor.numel() // world)
    filled = torch.nn.functional.pad(tensor.flatten(), (0, size * world - tensor.numel()))
    return [part.clone() for part in filled.split(size)]


FORMATS: dict[str, Callable[[Path, Weights], None]] = {
    "one file": one_file,
    "files": files,
    "FSDP2": distributed,
    "ZeRO-1": zero_1,
    "ZeRO-3": zero_3,
}
