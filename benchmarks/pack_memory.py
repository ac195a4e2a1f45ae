"""Memory and time of `moq-hf pack` on a model of a billion weights, from the shards of four processes.

    python benchmarks/pack_memory.py

The model has the shape of Llama-3.2-1B and random weights, since neither depends on the values. Four processes write a
checkpoint as FSDP2 does, each its own shards: 6 GB on disk, and as much memory in all. Then the command packs it in a
process of its own, which reports the most memory that it held: all that was resident, pages of files too. That is done
with the embedding table in float and at 8 bits.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from environment import environment, write
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState

from moq_hf import MoQCallback, MoQConfig
from moq_hf.packed.verify import recorded
from moq_hf.training.controller import MoQController

SHAPE = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
RECIPE = Path(__file__).parents[1] / "configs" / "moq_lm_w4.json"
STEPS = 100
# The command, and what it held at most; Linux starts that anew with each program.
COMMAND = """
import sys, time
from moq_hf.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("took", int(status["VmHWM"].split()[0]) * 1024, time.process_time())
sys.exit(code)
"""


def new_model(sizes: dict[str, int]) -> LlamaForCausalLM:
    """The model, without memory for its weights."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def write_shards(rank: int, world: int, sizes: dict[str, int], folder: Path) -> None:
    """What one of the processes does: its rows of each weight, at random."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(rank)
    state: dict[str, Any] = {}
    made: dict[int, DTensor] = {}
    for name, weight in new_model(sizes).state_dict(keep_vars=True).items():
        if id(weight) not in made:
            own = torch.empty(weight.chunk(world)[rank].shape).normal_(0.0, 0.02, generator=generator)
            made[id(weight)] = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
            )
        state[name] = made[id(weight)]
    save({"model": state}, storage_writer=FileSystemWriter(folder / "pytorch_model_fsdp_0"))
    dist.destroy_process_group()


def write_state(model: nn.Module, config: MoQConfig, folder: Path) -> None:
    """What the Trainer writes beside the weights, after all drops."""
    callback = MoQCallback(config)
    callback.controller = controller = MoQController(model, config, STEPS)
    for _ in range(STEPS):
        controller.step()
    for layer in controller.layers.values():
        if layer.moq.grid.searches(layer.moq.bits):
            layer.moq.ratio = torch.ones(layer.moq.grid.shape(*layer.matrix_shape))
    state = TrainerState(global_step=STEPS, max_steps=STEPS)
    vars(state)["stateful_callbacks"] = {"MoQCallback": callback.state()}
    state.save_to_json(str(folder / "trainer_state.json"))


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def pack(checkpoint: Path, out: Path, shard: str) -> dict[str, Any]:
    """Run the command; give what it took and what it wrote."""
    began = time.perf_counter()
    words = [sys.executable, "-c", COMMAND, "pack", str(checkpoint), str(out), "--max_shard_size", shard]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr)
    peak, processor = done.stdout.split()[-2:]
    found = recorded(out)
    return {
        "max_shard_size": shard,
        "files": len(list(out.glob("*.safetensors"))),
        "layout": found.state["layout"],
        "file_bytes": found.file_bytes,
        "float_bytes": found.float_bytes,
        "peak_bytes": int(peak),
        "cpu_seconds": round(float(processor), 1),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Write the checkpoint, pack it, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="that write shards")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try it out")
    parser.add_argument("--hidden", type=int, default=SHAPE["hidden_size"], help="less, to try it out")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"], help="fewer words, to try it out")
    parser.add_argument("--tables", type=int, nargs="+", default=[0, 8], help="bits of the table; 0 is float")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--folder", type=Path, help="for checkpoint and results; default: the system's temporary one")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "pack_memory.json")
    args = parser.parse_args()
    sizes = {**SHAPE, "num_hidden_layers": args.layers, "hidden_size": args.hidden, "vocab_size": args.vocabulary}
    sizes["intermediate_size"] = 4 * args.hidden
    document: dict[str, Any] = environment("compressed_tensors")
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        checkpoint = Path(temporary, f"checkpoint-{STEPS}")
        checkpoint.mkdir()
        model = new_model(sizes)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(checkpoint)
        # Nothing here has begun a thread or a group yet.
        start = torch.multiprocessing.start_processes
        start(write_shards, (args.processes, sizes, checkpoint), nprocs=args.processes, start_method="fork")
        document |= {
            "parameters": model.num_parameters(),
            "processes": args.processes,
            "checkpoint_bytes": size_of(checkpoint / "pytorch_model_fsdp_0"),
            "runs": [],
        }
        recipe = MoQConfig.from_file(RECIPE)
        for table in (bits or None for bits in args.tables):
            write_state(new_model(sizes), dataclasses.replace(recipe, quantize_embeddings=table), checkpoint)
            run = {"table": table, **pack(checkpoint, Path(temporary, f"packed-{table}"), args.max_shard_size)}
            document["runs"].append(run)
            print(json.dumps(run), flush=True)
            write(document, args.out)


if __name__ == "__main__":
    main()
