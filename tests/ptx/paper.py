"""What the kernel costs on paper: registers, spills, resident threads and instructions, counted in what ptxas made.

No GPU is needed, and none of it is a time that a GPU took. An instruction is counted where a thread that meets no
special number comes by: the slow ways of divisions, which ptxas puts aside, are left out.
"""

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moq_hf.kernels.triton import fake_quantize_kernel as kernel

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Threads that fit on a multiprocessor. Its registers are 65,536 everywhere.
MOST_THREADS = {80: 2048, 90: 2048, 100: 2048, 120: 1536}
# Multiprocessors, GHz, and bytes a second of the memory, all nominal: A100 and H100 SXM of 80 GB, B200, RTX 5090.
MACHINES = {80: (108, 1.41, 2.04e12), 90: (132, 1.98, 3.35e12), 100: (148, 1.97, 8e12), 120: (170, 2.41, 1.79e12)}
# Warp instructions that a multiprocessor begins in a cycle.
ISSUED = 4
GROUPS = {"per channel, 768": 768, "per channel, 3072": 3072, "groups of 32": 32, "groups of 128": 128}
# Whatever the bits are: they are read from memory.
GRIDS: dict[str, dict[str, Any]] = {"symmetric": {"SYMMETRIC": True}, "asymmetric": {"SYMMETRIC": False}}


class Cost(NamedTuple):
    """Of a variant on an architecture.

    Attributes:
        registers: Of a thread.
        spills: Loads and stores of registers that did not fit.
        resident: Threads on a multiprocessor.
        instructions: Of a warp, for each weight.
    """

    registers: int
    spills: int
    resident: int
    instructions: float


def compiled(target: GPUTarget, length: int, source: str = "*fp32", result: str = "*bf16", **constants: Any) -> Any:
    """The kernel compiled as `triton_quant` launches it on groups of a length."""
    columns = min(triton.next_power_of_2(length), 256)
    tile = {"BLOCK_COLS": columns, "ONE_TILE": length <= columns}
    tile["BLOCK_ROWS"] = 4096 // columns if tile["ONE_TILE"] else 8
    fixed = {"noise_ptr": None, "BLENDS": False, "SCALE_DTYPE": "float32", "FORMAT": "int", **tile, **constants}
    types = {"X_ptr": source, "Y_ptr": result, "n_rows": "i32", "n_cols": "i32"}
    types |= dict.fromkeys(("scale_ptr", "levels_ptr"), "*fp32")
    names = kernel.arg_names
    divisible = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in fixed else types[name] for name in names},
            constexprs={(names.index(name),): value for name, value in fixed.items()},
            attrs={(names.index(name),): divisible for name in types if name not in fixed},
        ),
        target=target,
        options={"num_warps": 8, "enable_fp_fusion": False} | ({"maxnreg": 64} if target.backend == "cuda" else {}),
    )


def disassembled(cubin: bytes) -> tuple[int, list[tuple[str, str, int | None]]]:
    """Registers of a thread; the predicate, name and target of each instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, text = (
            subprocess.run([BIN / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif step := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            found.append((step[1] or "", step[2], step[3]))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    steps = []
    for predicate, name, operands in found:
        target = re.search(r"`\((\.L_x_\d+)\)", operands) if name.startswith("BRA") else None
        steps.append((predicate, name, labels[target[1]] if target else None))
    return int(registers[1]), steps


def executed(steps: list[tuple[str, str, int | None]], tiles: int) -> int:
    """Instructions of a thread for a row of so many tiles.

    ptxas unrolls the first pass: its parts, by the tiles that they load, are run as long as enough are left. The second
    pass is the loop with the wide stores.
    """
    stores = {at for at, (_, name, _) in enumerate(steps) if name.startswith("STG.E.128")}
    end = next(at for at, (_, name, _) in enumerate(steps) if name == "EXIT" and at > max(stores))
    targets = {target for _, _, target in steps if target is not None}
    cuts = targets | {at + 1 for at, (_, name, _) in enumerate(steps) if name.startswith(("BRA", "EXIT", "CALL"))}
    edges = sorted({0, *(cut for cut in cuts if cut <= end), end + 1})
    parts = [range(*edge) for edge in itertools.pairwise(edges)]
    wide = [sum(steps[at][1].startswith("LDG.E.128") for at in part) for part in parts]
    tile = min(filter(None, wide))
    total, left, skipped = 0, tiles, 0
    for part, loads in zip(parts, wide, strict=True):
        _, _, target = steps[part[-1]]
        is_loop = target is not None and target <= part[-1]
        times = 1
        if stores & set(part):
            times = tiles if is_loop else 1
        elif loads and tiles > 1:
            times = left // (loads // tile) if is_loop else int(left >= loads // tile)
            left -= times * loads // tile
        if part[0] >= skipped:
            total += times * len(part)
        # What is jumped over and calls a division's slow way is not met.
        if target is not None and target > part[-1] and any("CALL" in name for _, name, _ in steps[part[-1] : target]):
            skipped = target
    assert left == 0 or tiles == 1, "the first pass was not understood"
    return total


def cost(arch: int, length: int, **grid: Any) -> Cost:
    """Of groups of a length on an architecture."""
    made = compiled(GPUTarget("cuda", arch, 32), length, **grid)
    registers, steps = disassembled(made.asm["cubin"])
    spills = sum(name.startswith(("LDL", "STL")) for _, name, _ in steps)
    # Registers are handed out by the warp, in 256.
    blocks = min(65536 // (-(-registers // 8) * 8 * 256), MOST_THREADS[arch] // 256)
    weights = 8 * min(length, 256) if length > 256 else 4096
    tiles = -(-length // 256)
    per_weight = 8 * executed(steps, tiles) / (weights * tiles)
    return Cost(registers, spills, 256 * blocks, per_weight)
