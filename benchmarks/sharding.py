"""What MoQ adds to FSDP2: memory of a process, and bytes that are gathered in a step.

    python benchmarks/sharding.py

A model of Llama's shape with random weights is trained for some steps with AdamW in 4 processes (gloo, on one machine),
each block and the whole given to `fully_shard`. Arms are the float run, and quantized ones at 8, 4 and 2 bits per
channel whose values or packed codes are gathered. Every arm is a launch of its own.

- resident: the largest resident memory of a process (VmHWM), the mean of all processes
- held: bytes of all tensors that are alive between a backward pass and the optimizer's step: weights, gradients, the
  optimizer's state, and what MoQ adds to them
- gathered: bytes that a process gets in the all-gathers of one step, counted at the collective; of them the quantized
  layers' is the share that the arms differ in
- seconds: the median step

`--label` names the code that is measured, to compare versions: lines of other labels in OUT stay.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from environment import environment, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

VOCABULARY = 512
STEPS, BATCH, TOKENS = 4, 2, 16
ARMS = [("float", 32), *((way, bits) for bits in (8, 4, 2) for way in ("values", "packed"))]


class Gathers(TorchDispatchMode):
    """Counts the bytes of what all-gathers give."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = str(function)
        # FSDP2's own operators copy into and out of what is gathered.
        if ("all_gather" in name or "allgather" in name) and not name.startswith("fsdp."):
            outputs = [args[0]] if "c10d." in name and "functional" not in name else [found]
            for output in outputs:
                self.bytes += sum(tensor.nbytes for tensor in _flat(output))
        return found


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _flat(one)] if isinstance(value, list | tuple) else []


def held() -> int:
    """Bytes of the memory of all tensors alive."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor):
            part = getattr(found, "_local_tensor", found)
            if part.device.type == "cpu":
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def train(way: str, bits: int, bf16: bool, hidden: int, blocks: int) -> dict[str, Any]:
    """One arm in this process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from moq_hf import MoQConfig
    from moq_hf.training.controller import MoQController

    set_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    controller = None
    if way != "float":
        document: dict[str, Any] = {
            "quantize_bits": {"start_bits": bits, "target_bits": bits},
            "quantize_groups": "per_channel",
            "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        }
        if way == "packed":
            document["quantize_gather"] = "packed"
        controller = MoQController(model, MoQConfig.from_dict(document), STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, gathered = [], 0
    for step in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        began = time.perf_counter()
        with Gathers() as counted:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            alive = held() if step == STEPS - 1 else 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if controller is not None:
                controller.step()
        gathered = counted.bytes
        seconds.append(time.perf_counter() - began)
    quantized = 0 if controller is None else sum(layer.float_weight.numel() for layer in controller.layers.values())
    status = Path("/proc/self/status").read_text()
    found = torch.tensor([int(status.split("VmHWM:")[1].split()[0]) * 1024.0, alive], dtype=torch.float64)
    dist.all_reduce(found)
    resident, alive = (found / dist.get_world_size()).tolist()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "quantized": quantized,
        "resident": round(resident),
        "held": round(alive),
        "gathered": gathered,
        "seconds": round(statistics.median(seconds), 3),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """The lines in Markdown; memory in MB above that of the float run of the same dtype."""
    rows = ["| dtype | arm | bits | held, MB | above float | above float, bytes a weight | gathered a step, MB |"]
    rows.append("| --- " * 7 + "|")
    for line in lines:
        same = [o for o in lines if (o["dtype"], o["label"]) == (line["dtype"], line["label"])]
        base = next(o for o in same if o["arm"] == "float")
        more = line["held"] - base["held"]
        each = f"{more / line['quantized']:.2f}" if line["quantized"] else ""
        arm = line["arm"] + (f" ({line['label']})" if line["label"] else "")
        bits = "" if line["arm"] == "float" else line["bits"]
        rows.append(
            f"| {line['dtype']} | {arm} | {bits} | {line['held'] / 1e6:,.0f} | {more / 1e6:,.0f} | {each} "
            f"| {line['gathered'] / 1e6:,.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Launch all arms, or be a process of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharding.json"))
    parser.add_argument("--label", default="")
    parser.add_argument("--arms", nargs="*", help="these alone: values/8, for instance")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        way, bits, dtype = args.arm.split("/")
        found = train(way, int(bits), dtype == "bfloat16", args.hidden, args.blocks)
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    kept = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    lines = [line for line in kept if line["label"] != args.label]
    shape = ["--hidden", str(args.hidden), "--blocks", str(args.blocks)]
    for dtype in args.dtypes:
        for way, bits in ARMS:
            if args.arms and f"{way}/{bits}" not in args.arms:
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "line.json")
                launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
                arm = ["--arm", f"{way}/{bits}/{dtype}", "--out", str(out)]
                done = subprocess.run([sys.executable, *launcher, __file__, *arm, *shape])
                if not out.exists():
                    raise SystemExit(f"{way}/{bits}/{dtype} ended with {done.returncode}")
                line = {"label": args.label, "arm": way, "bits": bits, "dtype": dtype, **json.loads(out.read_text())}
            print(line, flush=True)
            lines.append(line)
    write({**environment(), "processes": args.processes, "results": lines}, args.out)
    print(table(lines))


if __name__ == "__main__":
    main()
