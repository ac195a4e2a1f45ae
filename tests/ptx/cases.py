"""Random cases of the kernel against `quantizer`."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from driver import Device, pretending
from numerics import same_bits

from moq_hf import quantizer, triton_quant
from moq_hf.grid import Grid, Grouping, PerChannel, PerGroup, RowBlocks
from moq_hf.quantizer import RoundingSeed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = ("float32", "bfloat16", "float16")
CONTENTS = ("normal", "bits", "halves", "tiny", "huge", "spread", "zeros", "equal")


class Case(NamedTuple):
    """Arguments of `fake_quantize_with_scale`, and what its weight holds."""

    weight: torch.Tensor
    bits: int
    grid: Grid
    how: dict[str, Any]
    content: str

    def __str__(self) -> str:
        how = {name: value is not None if name == "ratio" else value for name, value in self.how.items()}
        shape = list(self.weight.shape)
        return f"{self.content} {self.weight.dtype} {shape}, {self.bits} bits, {self.grid}, {how}"


def numbers(content: str, count: int, bits: int, random: np.random.Generator) -> torch.Tensor:
    """Weights of one kind, in float32."""
    normal = random.standard_normal(count).astype("f4")
    if content == "bits":
        # Any bits at all: subnormal numbers, infinities and NaN of both signs.
        normal = random.integers(0, 2**32, count, dtype="u4").view("f4")
    elif content == "halves":
        codes = random.integers(-(2**bits), 2**bits + 1, count)
        normal = (codes / 2 * random.choice([1.0, 0.3, 2.0**-40, 1e20])).astype("f4")
    elif content == "tiny":
        normal *= np.float32(10.0 ** random.uniform(-45, -36))
    elif content == "huge":
        normal = np.clip(normal, -1, 1) * np.float32(3.4e38)
    elif content == "spread":
        normal *= (10.0 ** random.uniform(-40, 30, count)).astype("f4")
    elif content == "zeros":
        normal[random.random(count) < 0.9] = random.choice([0.0, -0.0])
    elif content == "equal":
        normal = random.choice([-1.0, 1.0], count).astype("f4") * normal[0]
    return torch.from_numpy(normal)


def displaced(values: torch.Tensor, shape: tuple[int, int], random: np.random.Generator) -> torch.Tensor:
    """A matrix that begins anywhere in other memory, or is transposed."""
    base = torch.empty(values.numel() + 32, dtype=values.dtype)
    start = int(random.choice([0, 0, 1, 2, 8]))
    base[start : start + values.numel()] = values
    found = base[start : start + values.numel()]
    return found.view(shape) if random.random() < 0.8 else found.view(shape[1], shape[0]).t()


def draw(random: np.random.Generator) -> Iterator[Case]:
    """Cases that differ in what their weights hold."""
    symmetric, full = [(True, False), (True, True), (False, False)][random.integers(3)]
    stochastic = bool(random.random() < 0.2)
    bits = int(random.choice([2, 3, 4, 5, 8, 11, 16]))
    if symmetric and not full:
        bits = max(bits, 3)
    grouping: Grouping = PerChannel()
    kind = random.choice(["short", "long", "groups", "blocks"])
    if kind == "short":
        shape = int(random.integers(1, 10)), int(random.integers(1, 130))
    elif kind == "long":
        shape = int(random.integers(1, 12)), int(random.choice([256, 257, 512, 768, 1000, 1023, 2049]))
    elif kind == "groups":
        size = int(random.choice([1, 8, 16, 32, 64, 128, 256]))
        shape = int(random.integers(1, 12)), size * int(random.integers(1, 5))
        grouping = PerGroup(size)
    else:
        count = int(random.integers(1, 4))
        shape = count * int(random.integers(1, 4)), int(random.choice([96, 512, 4099]))
        grouping = RowBlocks(count)
    grid = Grid(grouping, symmetric, stochastic, full=full, scale_dtype=str(random.choice(SCALES)))  # type: ignore[arg-type]
    dtype = FLOATS[random.integers(3)]
    how: dict[str, Any] = {"dtype": FLOATS[random.integers(3)], "blend": float(random.choice([0.0, 0.0, 0.3, 1.0]))}
    how["seed"] = RoundingSeed(*map(int, random.integers(0, 2**31, 3)))
    how["ratio"] = None
    if random.random() < 0.4:
        how["ratio"] = torch.tensor(quantizer.RATIOS)[torch.from_numpy(random.integers(0, 17, grid.shape(*shape)))]
    for content in CONTENTS:
        values = numbers(content, shape[0] * shape[1], bits, random).to(dtype)
        yield Case(displaced(values, shape, random), bits, grid, how, content)


def wrong(case: Case) -> str:
    """What the kernel gives other than `quantizer`; "" if nothing. Groups with NaN or Inf need only say so."""
    found, scale = triton_quant.fake_quantize_with_scale(case.weight, case.bits, case.grid, **case.how)
    expected, right = quantizer.fake_quantize_with_scale(case.weight, case.bits, case.grid, **case.how)
    finite = right.isfinite().flatten()
    if not torch.equal(scale.isfinite().flatten(), finite):
        return "other groups hold NaN or Inf"
    if not same_bits(scale[finite], right[finite]):
        return "other scales"
    rows, rows_expected = (values.reshape(len(finite), -1) for values in (found, expected))
    if not same_bits(rows[finite], rows_expected[finite]):
        return f"{int((rows[finite] != rows_expected[finite]).sum())} other weights"
    return "" if not rows[~finite].isfinite().any() else "a group with NaN or Inf came out finite"


def wrong_cases(seconds: float, seed: int) -> Iterator[tuple[Case, str]]:
    """Draw cases for so many seconds, and yield each with what is wrong with it."""
    random = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for case in draw(random):
            yield case, wrong(case)


def tried(arch: int, seconds: float) -> dict[str, int]:
    """What random cases on an architecture come to; those that are wrong are printed."""
    device: Device
    with pretending(arch) as device:
        found = list(wrong_cases(seconds, seed=arch))
        given_up = list(triton_quant._works.values()).count(False)
    bad = [f"{case}: {what}" for case, what in found if what]
    print(*bad, sep="\n", end="\n" if bad else "")
    return {
        "count": len(found),
        "wrong": len(bad),
        "given_up": given_up,
        "launches": device.launches,
        "kernels": len(device.kernels),
        "instructions": len(device.opcodes),
    }
