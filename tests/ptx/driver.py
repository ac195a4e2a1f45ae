"""A driver of Triton for a GPU that is not there: kernels are compiled for it, and their PTX is run by `machine`.

    with pretending(90):
        triton_quant.fake_quantize(weight, 8)

In it the project's own launcher takes tensors of the CPU, with the signatures and the alignments of a real launch.
"""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import Program, Region, launch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from moq_hf import triton_quant

CACHE = str(Path(__file__).parents[2] / "runs" / "ptx")


@dataclass
class Device:
    """The GPU that is not there, as Triton's runtime asks for it.

    Attributes:
        target: What is compiled for.
        runs: Whether launches are run; otherwise they do nothing.
        blocks: Which blocks of how many are run.
        launches: How many there were.
        opcodes: How often which instruction was run.
        kernels: The compiled kernels that were launched, by their hash: their metadata.
    """

    target: GPUTarget
    runs: bool = True
    blocks: Callable[[int], Sequence[int]] = lambda count: random.Random(count).sample(range(count), count)
    launches: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, Any] = field(default_factory=dict)

    @property
    def utils(self) -> "Device":
        """What loads binaries."""
        return self

    def load_binary(self, name: str, *more: Any) -> tuple[Any, ...]:
        """A module, a function, registers, spills, and the most threads of a block."""
        return name, name, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H100."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """There is one."""
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What is called at each launch."""
        self.kernels[metadata.hash] = metadata
        names = [name for name, kind in source.signature.items() if kind != "constexpr"]
        places = [index for index, kind in enumerate(source.signature.values()) if kind != "constexpr"]

        def run(x: int, y: int, z: int, *more: Any) -> None:
            # The kernel's arguments come last, after what belongs to streams and hooks.
            values = more[-len(source.signature) :]
            self.launches += 1
            if self.runs:
                self.execute(metadata, x * y * z, {name: values[at] for name, at in zip(names, places, strict=True)})

        return run

    def execute(self, metadata: Any, count: int, arguments: dict[str, Any]) -> None:
        """Run the PTX of a launch on the memory of its tensors."""
        regions = [
            Region(name, value.data_ptr(), value.numel() * value.element_size())
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor)
        ]
        numbers = [as_integer(value) for value in arguments.values()]
        self.opcodes += launch(
            program(metadata.hash, metadata.name), self.blocks(count), numbers, regions, metadata.shared
        )


def as_integer(value: Any) -> int:
    """What a parameter of the kernel holds: an address, an integer, or the bits of a float32."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.float32(value).view("u4")) if isinstance(value, float) else int(value)


@functools.cache
def program(kernel: str, name: str) -> Program:
    """The PTX of a compiled kernel, out of Triton's cache."""
    path = get_cache_manager(kernel).get_file(f"{name}.ptx")
    assert path is not None
    return Program(Path(path).read_text(encoding="utf-8"))


@contextlib.contextmanager
def pretending(arch: int | str, warp: int = 32, **how: Any) -> Iterator[Device]:
    """In it a GPU of this architecture is there, as the device "cpu", and no variant of the kernel was tried out yet.

    Args:
        arch: As 90 for sm_90, or "gfx942".
        warp: Lanes of a warp.
        how: Of the `Device`.
    """
    from moq_hf.kernels import triton as kernels

    # Nothing but PTX is needed of what is compiled, and assembling it would take a third of the time.
    folder, assemble = knobs.cache.dir, CUDABackend.make_cubin
    before = vars(driver).get("_active", vars(driver).get("active"))
    device = Device(GPUTarget("hip" if isinstance(arch, str) else "cuda", arch, warp), **how)
    available, works = triton_quant.available, triton_quant._works
    knobs.cache.dir, CUDABackend.make_cubin = CACHE, lambda *arguments: b""
    driver.set_active(device)
    # What was compiled for another device is forgotten.
    kernels.fake_quantize_kernel.device_caches.clear()
    triton_quant.available = lambda place: place.type == "cpu"
    triton_quant._works = {}
    try:
        yield device
    finally:
        triton_quant.available = available
        triton_quant._works = works
        kernels.fake_quantize_kernel.device_caches.clear()
        # Where there was none, it stays for what Triton takes down at the end.
        driver.set_active(before or device)
        knobs.cache.dir, CUDABackend.make_cubin = folder, assemble
