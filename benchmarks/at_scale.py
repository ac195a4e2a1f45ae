"""Llama's shapes of 7 and 70 billion weights on 8 to 512 ranks, by simulation: bytes held, gathered and moved.

    python benchmarks/at_scale.py

No GPU and no network take part. Real `fully_shard`, AdamW and moq_hf run on PyTorch's fake tensors, which have shapes
and no memory, in one process that is rank 0 of a fake process group. Models of 3 and of 4 blocks are run; all that is
counted grows by the same amount with each further block. Rank 0 holds the most.

What is counted, all of a step that is neither the first nor one with a switch:

- held: bytes of all tensors between the backward pass and the optimizer's step
- peak: the most bytes of all tensors at any all-gather or reduce-scatter of the step, with 16 tokens, so nearly without
  activations
- gathered, reduced: bytes that all-gathers give and that reduce-scatters take
- all_reduced: bytes of all-reduces; gathers, reduces, all_reduces: how many of them
- reads: how often the host waits for numbers from the device, the optimizer's own left out
- message: bytes that a rank gives in the all-gather of one block
- moved: bytes that operations of moq_hf read and write, an operation at a time: `quantize` before gathering, `unpack`
  after it, `check` for NaN; `launches` is how many operations that are
- search: the same of a search for clipping ratios, where a grid has some, with its all-reduces
- ratios: bytes of clipping ratios
- zero: bytes that ZeRO-3's quantization moves in a forward and a backward pass of all weights, by the same count of the
  one function that it calls; no DeepSpeed runs

What code reads off a fake tensor is answered: weights are finite, processes agree, tensors are those that were
gathered. As on a GPU a search takes all groups at once, one kernel packs codes and one unpacks them, and numba does not
compute.

`check` has the same counts of the 4 processes of benchmarks/sharding.py, which were measured. Times are bytes over
bandwidths that data sheets state, operations times what a launch is assumed to take, and hops of a ring times what NCCL
assumes: no GPU has run any of it. Lines that are in OUT are not simulated again. `--report` prints the tables alone.
"""

import argparse
import functools
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from environment import environment, write
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from moq_hf import MoQConfig, gathering, quantizer
from moq_hf.gathering import Gathering
from moq_hf.kernels.packing import packed_width
from moq_hf.quant_linear import QuantLayer
from moq_hf.shards import Shard
from moq_hf.training.controller import MoQController

# The shapes of Llama-2-7B and Llama-3.1-70B.
MODELS = {
    "7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "70B": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
# That of benchmarks/sharding.py.
MEASURED = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
# Replicas and ranks that share one.
MESHES = [(1, 8), (1, 64), (1, 512), (64, 8), (8, 64)]
CHANNEL = "per_channel"
ARMS = [
    ("float", 32, CHANNEL),
    *((way, bits, CHANNEL) for bits in (8, 4, 2) for way in ("values", "packed")),
    *((way, 4, 128) for way in ("values", "packed")),
    *(("values", bits, 1) for bits in (8, 4)),
]
# With replicas.
FEW_ARMS = [arm for arm in ARMS if arm[0] == "float" or arm == ("values", 4, CHANNEL) or arm[0] == "packed"]
BLOCKS = (3, 4)
SUMS = ("peak", "gathered", "reduced", "all_reduced", "gathers", "reduces", "all_reduces", "reads")
PLACES = ("quantize", "unpack", "check")


# Bytes a second that data sheets state: the memory of an H100 SXM, its NVLink in one direction, a link of InfiniBand.
MEMORY, NVLINK, LINK = 3.35e12, 450e9, 50e9
# GPUs of a node, and how many such links it has: one for each of them, or one for all.
NODE, LINKS = 8, (8, 1)
# Bytes of a weight that one kernel would have to move: a float32 one read, a bfloat16 one written.
SHORTEST = 6
# Seconds that a launch takes the host, which is assumed.
LAUNCH = 5e-6
# Seconds that NCCL's own model has for a ring (src/graph/tuning.cc, protocol Simple): once, a hop by NVLink, a hop by
# network.
RING, HOP, NET_HOP = 8.4e-6, 3.4e-6, 9.6e-6

# What is not of moq_hf, or counted elsewhere.
_ELSEWHERE = "elsewhere"


class Account(TorchDispatchMode):
    """Counts what operations do, and answers what is read off tensors.

    Args:
        fake: The mode whose tensors are looked at.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.of: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.place = ""

    def clear(self) -> None:
        """Begin again."""
        for counts in (self.of, self.moved, self.launches):
            counts.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("aten._local_scalar_dense"):
            self.of["reads"] += self.place != _ELSEWHERE
            # Flags that are not asked of other processes are those of what is finite.
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 0
        found = function(*args, **(kwargs or {}))
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._collective(name, args)
        elif not name.startswith("prim."):
            self.move(_moved(function, args, found))
        return found

    def move(self, size: int) -> None:
        """Count an operation that moves so many bytes."""
        if size:
            self.moved[self.place] += size
            self.launches[self.place] += 1

    def _collective(self, name: str, args: Any) -> None:
        if "allgather" in name:
            self.of["gathers"] += 1
            self.of["gathered"] += _bytes(args[0])
        elif "reduce_scatter" in name:
            self.of["reduces"] += 1
            self.of["reduced"] += _bytes(args[1])
        elif "allreduce" in name:
            self.of["all_reduces"] += 1
            self.of["all_reduced"] += _bytes(args[0])
            self.of[f"all_reduces of {self.place}"] += 1
            return
        else:
            raise ValueError(f"{name} is not counted")
        self.of["peak"] = max(self.of["peak"], self.held())

    def held(self) -> int:
        """Bytes of the memory that all tensors alive would have."""
        storages = {}
        for found in gc.get_objects():
            if type(found) is FakeTensor and found.fake_mode is self.fake:
                storage = found.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Count what is moved in it for a place."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(value))


def _moved(function: Any, args: Any, found: Any) -> int:
    """Bytes that an operation reads and writes; none for views and for memory that is merely taken."""
    returns = function._schema.returns
    views = [each.alias_info is not None and not each.alias_info.is_write for each in returns]
    if any(views) or "empty" in str(function) or function.is_view:
        return 0
    # What is the same number many times is read once.
    read = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors(args))
    return read + _bytes(found)


@contextmanager
def _counted(account: Account) -> Iterator[None]:
    """Have the seams of moq_hf counted, and the two things set that a simulation needs."""
    kept = (Gathering.fsdp_pre_all_gather, Gathering.fsdp_post_all_gather, gathering.pack, gathering.unpack)
    search, unpack_all = Shard.least_squares_ratio, gathering._unpack
    part, tolist = quantizer._PART, FakeTensor.tolist

    def placed(function: Any, place: str) -> Any:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            with account.at(place):
                return function(*args, **kwargs)

        return counting

    def pack(codes: Tensor, bits: int) -> Tensor:
        words = codes.new_empty(len(codes), packed_width(codes.shape[1], bits))
        account.move(codes.nbytes + words.nbytes)
        return words

    def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
        codes = words.new_empty(len(words), columns)
        account.move(codes.nbytes + words.nbytes)
        return codes

    def unpack_pieces(outputs: Any, codes: Any, out: Tensor) -> None:
        # As one piece, with the launches of all: what moves bytes in a loop is that of a piece.
        height, at_once = max(1, gathering._AT_ONCE // codes.columns), gathering._AT_ONCE
        before = account.launches[account.place]
        gathering._AT_ONCE = sys.maxsize
        try:
            unpack_all(outputs, codes, out)
        finally:
            gathering._AT_ONCE = at_once
        # But for the scales, which are spread out before.
        of_a_piece = account.launches[account.place] - before - len(outputs[1:])
        account.launches[account.place] += of_a_piece * (-(-out.numel() // codes.columns // height) - 1)

    def read_at_once(tensor: Any) -> Any:
        account.of["reads"] += 1
        with account.at(_ELSEWHERE):
            return tolist(tensor)

    FakeTensor.tolist, gathering._unpack = read_at_once, unpack_pieces
    Gathering.fsdp_pre_all_gather = placed(kept[0], "quantize")  # type: ignore[method-assign]
    Gathering.fsdp_post_all_gather = placed(kept[1], "unpack")  # type: ignore[method-assign]
    Shard.least_squares_ratio = placed(search, "search")  # type: ignore[method-assign]
    gathering.pack, gathering.unpack, quantizer._PART = pack, unpack, sys.maxsize
    try:
        yield
    finally:
        Gathering.fsdp_pre_all_gather, Gathering.fsdp_post_all_gather = kept[:2]  # type: ignore[method-assign]
        gathering.pack, gathering.unpack, quantizer._PART = *kept[2:], part
        Shard.least_squares_ratio = search  # type: ignore[method-assign]
        FakeTensor.tolist, gathering._unpack = tolist, unpack_all


def document(way: str, bits: int, groups: Any) -> dict[str, Any]:
    """The config of an arm; groups are of the whole weight, per channel, or of so many weights of a row."""
    found: dict[str, Any] = {
        "quantize_bits": {"start_bits": bits, "target_bits": bits},
        "quantize_schedule": {"quantize_period": 1, "schedule_offset": 0},
        "quantizer_kernel": False,
    }
    if groups in (CHANNEL, 1):
        found["quantize_groups"] = groups
    else:
        found["quantize_group_size"] = groups
    return {**found, "quantize_gather": "packed"} if way == "packed" else found


def simulate(
    shape: dict[str, int], mesh: tuple[int, int], way: str, bits: int, groups: Any, dtype: torch.dtype | None
) -> dict[str, Any]:
    """One arm of a model in rank 0 of a fake process group, which is there.

    Args:
        shape: Of the model.
        mesh: Replicas, and ranks that share one.
        way: float, values or packed.
        bits: Of a weight.
        groups: See `document`.
        dtype: Of the passes; None is float32.
    """
    fake = FakeTensorMode()
    account = Account(fake)
    names = (("replicas", "shards"), mesh) if mesh[0] > 1 else (("shards",), mesh[1:])
    devices = init_device_mesh("cpu", names[1], mesh_dim_names=names[0])
    with fake, account, _counted(account):
        model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=16))
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for block in model.model.layers:
            fully_shard(block, mesh=devices, mp_policy=policy)
        fully_shard(model, mesh=devices, mp_policy=policy)
        controller = None
        account.clear()
        if way != "float":
            controller = MoQController(model, MoQConfig.from_dict(document(way, bits, groups)), 4)
        search = {"moved": account.moved["search"], "all_reduces": account.of["all_reduces of search"]}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.zeros(1, 16, dtype=torch.long)
        for _ in range(2):
            account.clear()
            if controller is not None:
                controller.check_ranks()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            gc.collect()
            held = account.held()
            with account.at(_ELSEWHERE):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            if controller is not None:
                with account.at("check"):
                    controller.step()
        layers = [] if controller is None else list(controller.layers.values())
        counts = {name: account.of[name] for name in SUMS}
        moved, launches = ({place: of[place] for place in PLACES} for of in (account.moved, account.launches))
        with account.at("zero"):
            for layer in layers:
                _pass_of_zero(layer)
        return {
            "held": held,
            **counts,
            "parameters": sum(p.numel() for p in model.parameters()),
            "quantized": sum(layer.float_weight.numel() for layer in layers),
            "moved": moved,
            "launches": launches,
            "search": search,
            "ratios": sum(layer.moq.ratio.nbytes for layer in layers if layer.moq.ratio is not None),
            # In the forward pass and in the backward pass.
            "zero": 2 * account.moved["zero"],
        }


def _pass_of_zero(layer: QuantLayer) -> None:
    """What ZeRO-3 has a layer do with a weight that it has gathered."""
    state = layer.moq
    weight = torch.empty(layer.matrix_shape, dtype=torch.bfloat16)
    how: dict[str, Any] = {"ratio": state.ratio, "draw": state.draw, "dtype": weight.dtype}
    quantizer.fake_quantize(weight, state.bits, state.grid, **how)


def extended(first: Any, second: Any, blocks: int) -> Any:
    """What grows with each block by as much as from the first count to the second, for so many blocks."""
    if isinstance(first, dict):
        return {name: extended(first[name], second[name], blocks) for name in first}
    return first + (blocks - BLOCKS[0]) * (second - first) // (BLOCKS[1] - BLOCKS[0])


def line_of(shape: dict[str, int], mesh: tuple[int, int], *arm: Any, dtype: torch.dtype | None) -> dict[str, Any]:
    """One arm of the whole model; starts and ends the fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh[0] * mesh[1])
    try:
        few = [simulate({**shape, "num_hidden_layers": blocks}, mesh, *arm, dtype) for blocks in BLOCKS]
    finally:
        dist.destroy_process_group()
    found: dict[str, Any] = extended(*few, shape["num_hidden_layers"])
    # Once in the forward pass, once in the backward pass.
    block = (few[1]["gathered"] - few[0]["gathered"]) // 2
    return {**found, "message": block // mesh[1]}


def check(wanted: list[str]) -> list[dict[str, Any]]:
    """The measured processes, simulated."""
    found = []
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        for way, bits, groups in ARMS[:7]:
            if wanted == ["all"] or f"{way}/{bits}/{name}" in wanted:
                line = line_of(MEASURED, (1, 4), way, bits, groups, dtype=dtype)
                found.append({"dtype": name, "arm": way, "bits": bits} | {k: line[k] for k in ("held", "gathered")})
                print(found[-1], flush=True)
    return found


def seconds_of_bytes(size: float, ranks: int, links: int) -> float:
    """The least time of an all-gather or a reduce-scatter.

    Args:
        size: Bytes of the whole, that all ranks get or give.
        ranks: That take part, of full nodes or of one.
        links: Of a node.
    """
    nodes = max(1, ranks // NODE)
    return max(size * (ranks - 1) / ranks / NVLINK, size * (nodes - 1) / nodes / (links * LINK))


def seconds_of_ring(ranks: int) -> float:
    """What the hops of one all-gather in a ring take, however small it is."""
    nodes = max(1, ranks // NODE)
    return RING + (ranks - nodes) * HOP + (nodes - 1) * NET_HOP


def seconds_of_step(line: dict[str, Any], links: int) -> float:
    """What the collectives of gathering and of gradients take at least, hops left out."""
    replicas = line["replicas"]
    found = seconds_of_bytes(line["gathered"] + line["reduced"], line["shards"], links)
    # Each rank of a node sums up its shard with its own share of the links, twice around.
    return found + 2 * line["all_reduced"] * (replicas - 1) / replicas / (links * LINK / NODE)


class Results:
    """The lines of the simulation.

    Args:
        lines: As they were written.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        keys = ("model", "replicas", "shards", "arm", "bits", "groups")
        self._lines = {tuple(line[key] for key in keys): line for line in lines}
        self.cells = list(dict.fromkeys(key[:3] for key in self._lines))
        # Without replicas.
        self.whole = [cell for cell in self.cells if cell[1] == 1]

    def line(self, cell: tuple[Any, ...], way: str = "float", bits: int = 32, groups: Any = CHANNEL) -> dict[str, Any]:
        """One of them."""
        return self._lines[*cell, way, bits, groups]


PACKED = [("packed", 8, CHANNEL), ("packed", 4, CHANNEL), ("packed", 2, CHANNEL), ("packed", 4, 128)]
_NAMES = ("packed, 8 bits", "4", "2", "4, groups of 128")


def _table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def _ranks(cell: tuple[Any, ...]) -> list[str]:
    return [cell[0], str(cell[2]) if cell[1] == 1 else f"{cell[1]} x {cell[2]}"]


def _ms(seconds: float) -> str:
    found = 1000 * seconds
    return f"{found:,.0f}" if found >= 100 else f"{found:.1f}" if found >= 1 else f"{found:.2f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e10 else f"{size / 1e9:.2f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def measured_table(simulated: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    """What was simulated beside what was measured."""
    known = {(each["dtype"], each["arm"], each["bits"]): each for each in measured if not each["label"]}
    rows = []
    for each in simulated:
        name = (each["dtype"], each["arm"], each["bits"])
        pairs = [(known[name][key], each[key]) for key in ("held", "gathered")]
        rows.append([*name[:2], "" if name[1] == "float" else name[2], *(f"{x:,}" for pair in pairs for x in pair)])
    head = ["dtype", "arm", "bits", "held, measured", "simulated", "gathered, measured", "simulated"]
    return _table(head, rows)


def memory_table(results: Results) -> str:
    """Gigabytes of a rank."""
    rows = []
    for cell in results.cells:
        base = results.line(cell)
        ours = [results.line(cell, *arm) for arm in (("values", 4, CHANNEL), *PACKED)]
        more = [_gb(line["held"] - base["held"]) for line in ours]
        rows.append([*_ranks(cell), _gb(base["held"]), *more, _gb(base["peak"] - base["held"])])
    names = ["values, 4 bits", *_NAMES]
    return _table(["model", "ranks", "float, held", *(f"+ {name}" for name in names), "more in a pass"], rows)


def bytes_table(results: Results) -> str:
    """Gigabytes of a step."""
    rows = []
    for cell in results.cells:
        base, values = results.line(cell), results.line(cell, "values", 4)
        assert base["gathered"] == values["gathered"]
        packed = [_gb(results.line(cell, *arm)["gathered"]) for arm in PACKED]
        more = _gb(base["all_reduced"]) if base["all_reduced"] else ""
        rows.append([*_ranks(cell), _gb(base["gathered"]), *packed, _gb(base["reduced"]), more])
    return _table(["model", "ranks", "float, values", *_NAMES, "gradients", "summed over replicas"], rows)


def refresh_table(results: Results) -> str:
    """Milliseconds of a refresh, by the memory's bandwidth and by launches."""
    rows = []
    for cell in results.whole:
        lines = [results.line(cell, "values", bits) for bits in (8, 4, 2)]
        own = lines[0]["quantized"] / cell[2]
        times = [line["moved"]["quantize"] / MEMORY for line in lines]
        times += [lines[0]["moved"]["check"] / MEMORY, own * SHORTEST / MEMORY]
        launches = [sum(line["launches"].values()) for line in lines]
        rows.append([*_ranks(cell), *map(_ms, times), f"{launches[1]:,}", _ms(launches[1] * LAUNCH)])
    head = ["model", "ranks", "8 bits", "4 bits", "2 bits", "NaN check", "least", "launches at 4 bits", "their ms"]
    return _table(head, rows)


def passes_table(results: Results) -> str:
    """Milliseconds that a forward and a backward pass take more, together."""
    rows = []
    for cell in results.whole:
        values, packed = results.line(cell, "values", 4), results.line(cell, "packed", 4)
        launches = packed["launches"]["unpack"]
        # Those that the ranks share evenly, in two passes.
        unpacked = 2 * sum(r * c for r, c in _matrices(MODELS[cell[0]]) if not r % cell[2])
        least = unpacked * (packed["bits"] / 8 + 2) / MEMORY
        times = [_ms(packed["moved"]["unpack"] / MEMORY), f"{launches:,}", _ms(launches * LAUNCH), _ms(least)]
        rows.append([*_ranks(cell), *times, f"{packed['reads']:,}", _ms(values["zero"] / MEMORY)])
    head = ["model", "ranks", "unpacking", "launches", "their ms", "least", "reads of a step", "ZeRO-3"]
    return _table(head, rows)


def _matrices(shape: dict[str, int]) -> list[tuple[int, int]]:
    """Rows and columns of all quantized weights."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    block = [(hidden, hidden)] * 2 + [(heads, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return block * shape["num_hidden_layers"]


def gather_table(results: Results) -> str:
    """Milliseconds of all gatherings of a step."""
    rows = []
    for cell in results.whole:
        for links in LINKS if cell[2] > NODE else (0,):
            arms = [("values", 4, CHANNEL), *PACKED[:3]]
            times = [seconds_of_bytes(results.line(cell, *arm)["gathered"], cell[2], links or 1) for arm in arms]
            packed = results.line(cell, "packed", 4)
            cost = packed["moved"]["unpack"] / MEMORY
            names = [*_ranks(cell), f"{links} InfiniBand" if links else "NVLink"]
            rows.append([*names, *map(_ms, times), _ms(times[0] - times[2]), _ms(cost)])
    head = ["model", "ranks", "links of a node", "float, values", *_NAMES[:3]]
    return _table([*head, "saved at 4 bits", "unpacking them"], rows)


def limits_table(results: Results) -> str:
    """What does not shrink with the ranks, or grows with them."""
    rows = []
    for cell in results.whole:
        line = results.line
        values, packed, groups = line(cell, "values", 4), line(cell, "packed", 4), line(cell, "values", 4, 128)
        whole = line(cell, "values", 4, 1)
        hops = seconds_of_ring(cell[2])
        sizes = [f"{each['message'] / 1e3:,.0f}" for each in (values, packed)]
        reduces = f"{whole['all_reduces']:,} / {whole['search']['all_reduces']:,}"
        ratios = f"{_gb(groups['ratios'])} / {_gb(line(cell)['held'])}"
        rows.append([*_ranks(cell), *sizes, _ms(hops), _ms(values["gathers"] * hops), reduces, ratios])
    head = ["model", "ranks", "message, kB", "at 4 bits, kB", "hops, ms", "of a step, ms", "all-reduces, one scale"]
    return _table([*head, "ratios of groups / float held, GB"], rows)


def replicas_table(results: Results) -> str:
    """The same ranks with replicas."""
    rows = []
    for cell in sorted(results.cells, key=lambda cell: (len(cell[0]), cell[1])):
        if cell[1] * cell[2] != max(one[1] * one[2] for one in results.cells):
            continue
        base, packed = results.line(cell), results.line(cell, "packed", 4)
        hops = _ms(base["gathers"] * seconds_of_ring(cell[2]))
        times = [_ms(seconds_of_step(line, links)) for links in LINKS for line in (base, packed)]
        rows.append([*_ranks(cell), _gb(base["held"]), _gb(packed["gathered"]), *times, hops])
    head = ["model", "ranks", "float, held, GB", "gathered at 4 bits, GB"]
    times = [f"{arm}, {links} link{'s' * (links > 1)}, ms" for links in LINKS for arm in ("float", "4 bits")]
    return _table([*head, *times, "hops, ms"], rows)


def tables(document: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, str]:
    """All tables in Markdown by their marks in the docs.

    Args:
        document: What was written.
        measured: The lines of benchmarks/sharding.py.
    """
    results = Results(document["results"])
    made = (memory_table, bytes_table, refresh_table, passes_table, gather_table, limits_table, replicas_table)
    found = {function.__name__.removesuffix("_table"): function(results) for function in made}
    return {"measured": measured_table(document["check"], measured), **found}


def main() -> None:
    """Simulate what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/at_scale.json"))
    parser.add_argument("--check", nargs="*", default=["all"], help="of what was measured, these: values/8/float32")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--meshes", nargs="*", default=[f"{a}x{b}" for a, b in MESHES])
    parser.add_argument("--arms", nargs="*", help="these alone: values/8/per_channel, for instance")
    parser.add_argument("--report", action="store_true", help="print the tables of what is there")
    args = parser.parse_args()
    if args.report:
        measured = json.loads((args.out.parent / "sharding.json").read_text())["results"]
        print("\n\n".join(tables(json.loads(args.out.read_text()), measured).values()))
        return
    # A fake tensor has no address, which torch says wherever one is asked for.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    # What the libraries hold need not be looked through again and again.
    gc.collect()
    gc.freeze()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {"check": [], "results": []}
    lines = kept["results"]
    document = {**environment(), "check": kept["check"] or check(args.check), "results": lines}
    for model in args.models:
        for mesh in args.meshes:
            replicas, shards = map(int, mesh.split("x"))
            for way, bits, groups in ARMS if replicas == 1 else FEW_ARMS:
                where = {"model": model, "replicas": replicas, "shards": shards}
                where |= {"arm": way, "bits": bits, "groups": groups}
                asked = not args.arms or f"{way}/{bits}/{groups}" in args.arms
                if asked and not any(where.items() <= line.items() for line in lines):
                    counts = line_of(MODELS[model], (replicas, shards), way, bits, groups, dtype=torch.bfloat16)
                    lines.append({**where, **counts})
                    print(lines[-1], flush=True)
                    write(document, args.out)
    write(document, args.out)
    # Else the libraries' own look for leaks at the end takes what is frozen for leaked.
    gc.unfreeze()


if __name__ == "__main__":
    main()
