"""An interpreter of the PTX that Triton compiles `moq_hf.kernels.triton` to: what a GPU would compute, on a CPU.

PTX is the assembly language of NVIDIA's GPUs before registers are assigned. `Program` reads its text, `Machine` runs
it for many blocks at once: the value of a register is an array `[blocks, threads]`, or a number that all threads
share. Numbers are rounded as the PTX ISA says, and not as Triton's own interpreter does it on tensors: one rounding
of a fused multiply-add, the signs of zeros in `min` and `max`, flushed subnormals, shifts beyond the width.

`Fault` is raised for all that a GPU would trap at or leave undefined: an address outside of the tensors of the
launch, or not aligned to the width of its access; a register or shared memory read before it was written; shared
memory that two warps use with no barrier in between; two threads that store different numbers at one address. Where
some threads have written a register, the others may compute with it, as they do with what a load under a predicate
leaves out: what comes of it is known to be undefined, and may not be stored, be an address or decide anything. An
instruction that is not in the tables below is a `Fault` too, as are threads that part at a branch: every branch of the
kernel depends on the length of a row alone.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Value = Any  # An array [blocks, threads], or a numpy number.
WARP = 32
# Lanes that are run at once.
LANES = 1 << 16
TYPES: dict[str, Any] = {
    **{f"{kind}{8 * size}": np.dtype(f"u{size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2")},
    **{"bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4"), "f32x2": np.dtype("u8"), "pred": np.dtype(bool)},
}
REGISTERS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}
NAN = np.uint32(0x7FFFFFFF)
# What lies in a register that was not written: no number that a result could hide.
GARBAGE = 0x4BADBAD14BADBAD1


class Fault(Exception):
    """What a GPU would trap at, or leaves undefined."""


# Text


class Instruction(NamedTuple):
    """One statement.

    Attributes:
        name: The opcode with its modifiers, as "ld.global.v4.b32".
        operands: Their text; a vector in braces is one operand.
        guard: The register of the predicate under which it is done, or "".
        negated: Whether the predicate must be false.
        line: Of the kernel's Python file.
    """

    name: str
    operands: tuple[str, ...]
    guard: str
    negated: bool
    line: int

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.name} {', '.join(self.operands)} (line {self.line})"


class Program:
    """The kernel in a PTX text: its parameters, the threads of a block, instructions and where labels point."""

    def __init__(self, text: str) -> None:
        entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)(.*?)\{(.*)\}", text, re.DOTALL)
        if entry is None:
            raise Fault("there is no kernel in the text")
        parameters, directives, body = entry.groups()
        self.parameters = re.findall(r"(\w+_param_\d+)", parameters)
        threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", directives)
        self.threads = int(threads[1]) if threads else WARP
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        line, statement = 0, ""
        for raw in body.splitlines():
            text = raw.split("//")[0].strip()
            if place := re.match(r"\.loc\s+\d+\s+(\d+)", text):
                line = int(place[1])
                continue
            if label := re.match(r"(\$\w+):", text):
                self.labels[label[1]] = len(self.instructions)
                text = text[label.end() :].strip()
            # Braces alone enclose what was written as assembly.
            if text in ("", "{", "}"):
                continue
            *whole, statement = f"{statement} {text}".split(";")
            for each in whole:
                self._add(each.strip(), line)

    def _add(self, statement: str, line: int) -> None:
        if statement.startswith(".") or not statement:
            return
        parts = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*)", statement, re.DOTALL)
        if parts is None:
            raise Fault(f"not understood: {statement}")
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", parts[4])
        self.instructions.append(Instruction(parts[3], tuple(operands), parts[2] or "", parts[1] == "!", line))


# Numbers


def floats(bits: Value) -> Value:
    """The float32 numbers of 32 bits."""
    return np.asarray(bits, "u4").view("f4")


def bits_of(numbers: Value) -> Value:
    """The 32 bits of float32 numbers; all NaN is one, as arithmetic gives it."""
    numbers = np.asarray(numbers, "f4")
    return np.where(np.isnan(numbers), NAN, numbers.view("u4"))


def fused(a: Value, b: Value, c: Value) -> Value:
    """a * b + c with one rounding.

    float64 holds the product exactly. The sum is rounded to odd in it: with so many digits more than float32 has, the
    second rounding then comes to what one alone would have.
    """
    product, addend = np.multiply(a, b, dtype="f8"), np.asarray(c, "f8")
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    is_even = total.view("i8") & 1 == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even & np.isfinite(total), toward, total).astype("f4")


def extreme(a: Value, b: Value, largest: bool) -> Value:
    """The smaller or larger of two; NaN loses, and -0 is below +0."""
    chosen = np.fmax(a, b) if largest else np.fmin(a, b)
    signs = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
    zero = np.where(signs, np.float32(-0.0), np.float32(0.0))
    return np.where((a == 0) & (b == 0), zero, chosen).astype("f4")


def flushed(numbers: Value) -> Value:
    """Subnormal numbers as zeros of their sign."""
    return np.where(np.abs(numbers) < np.finfo("f4").tiny, np.copysign(np.float32(0), numbers), numbers)


def to_bfloat16(numbers: Value) -> Value:
    """The bits of bfloat16, to nearest even."""
    bits = np.asarray(numbers, "f4").view("u4").astype("u8")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FFF, rounded).astype("u2")


def to_float16(numbers: Value) -> Value:
    """The bits of float16, to nearest even."""
    half = np.asarray(numbers, "f4").astype("f2").view("u2")
    return np.where(np.isnan(numbers), 0x7FFF, half).astype("u2")


def halves(bits: Value) -> tuple[Value, Value]:
    """The low and the high half of a register."""
    bits = np.asarray(bits)
    half = np.dtype(f"u{bits.itemsize // 2}")
    return bits.astype(half), (bits >> bits.dtype.type(4 * bits.itemsize)).astype(half)


def joined(low: Value, high: Value) -> Value:
    """A register of two halves."""
    whole = np.dtype(f"u{2 * np.asarray(low).itemsize}")
    return np.asarray(low).astype(whole) | (np.asarray(high).astype(whole) << whole.type(8 * low.itemsize))


def pairwise(function: Callable[..., Value]) -> Callable[..., Value]:
    """An instruction for float32 as one for two of them in 64 bits."""

    def both(*operands: Value) -> Value:
        lows, highs = zip(*map(halves, operands), strict=True)
        return joined(*(bits_of(function(*map(floats, half))) for half in (lows, highs)))

    return both


def shifted(bits: Value, amount: Value, left: bool) -> Value:
    """A shift; amounts beyond the width leave zeros, or copies of the sign."""
    width = 8 * bits.dtype.itemsize
    is_beyond = amount >= width
    amount = np.minimum(amount, width - 1).astype(bits.dtype)
    found = bits << amount if left else bits >> amount
    rest = bits >> bits.dtype.type(width - 1) if not left and bits.dtype.kind == "i" else bits.dtype.type(0)
    return np.where(is_beyond, rest, found).astype(bits.dtype)


def field(bits: Value, start: Value, length: Value) -> Value:
    """`bfe`: a run of bits, filled up with its sign where the type has one."""
    width = 8 * bits.dtype.itemsize
    start, length = int(start), int(length)
    up = bits.dtype.type(max(0, width - start - length))
    return (bits << up) >> bits.dtype.type(width - length)


def permuted(a: Value, b: Value, selector: Value) -> Value:
    """`prmt`: four bytes chosen out of eight."""
    both = joined(a, b)
    picked = [(both >> np.uint64(8 * (int(selector) >> 4 * k & 7)) & np.uint64(0xFF)) for k in range(4)]
    return sum(byte.astype("u4") << np.uint32(8 * k) for k, byte in enumerate(picked))


def approximate(a: Value, b: Value) -> Value:
    """`div.full`, which may be off by two of the last bits: by one, where a quotient is not exact."""
    quotient = a / b
    return np.where(fused(quotient, b, -a) == 0, quotient, np.nextafter(quotient, np.float32(np.inf)))


# What instructions compute, by their names without the type, which operands and result have, and without "rn".
FLOATS: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fused,
    "div": lambda a, b: a / b,
    "div.ftz": lambda a, b: flushed(flushed(a) / flushed(b)),
    "div.full": approximate,
    "neg": lambda a: -a,
    "abs": np.abs,
    "min": lambda a, b: extreme(a, b, largest=False),
    "max": lambda a, b: extreme(a, b, largest=True),
}
INTEGERS: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "shl": lambda a, b: shifted(a, b, left=True),
    "shr": lambda a, b: shifted(a, b, left=False),
    "bfe": field,
    "prmt": permuted,
}
# Of 16-bit floats, alone or in pairs, only the signs are ever changed.
SIGNS: dict[str, Callable[..., Value]] = {
    "abs": lambda a: a & a.dtype.type(0x7FFF7FFF & (1 << 8 * a.dtype.itemsize) - 1),
    "neg": lambda a: a ^ a.dtype.type(0x80008000 & (1 << 8 * a.dtype.itemsize) - 1),
}
TABLES = {"f32": FLOATS, "f32x2": {name: pairwise(function) for name, function in FLOATS.items()}}
TABLES |= {name: INTEGERS for name in TYPES if name[0] in "us" or name in ("b16", "b32", "b64", "pred")}
TABLES |= dict.fromkeys(("bf16", "bf16x2", "f16", "f16x2"), SIGNS)
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARISONS |= {"ge": np.greater_equal, "neu": np.not_equal, "equ": lambda a, b: (a == b) | (a != a) | (b != b)}
COMPARISONS |= {"ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b)}
COMPARISONS |= {"geu": lambda a, b: ~(a < b), "nan": lambda a, b: (a != a) | (b != b)}
COMPARISONS |= {"num": lambda a, b: (a == a) & (b == b)}
ROUNDINGS = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def converted(value: Value, target: str, source: str, modifiers: Sequence[str]) -> Value:
    """`cvt`, of a value seen as `source`, which is returned as the bits of `target`."""
    if source in ("bf16", "f16"):
        value = floats(value.astype("u4") << 16) if source == "bf16" else value.astype("f4")
    if "ftz" in modifiers:
        value = flushed(value)
    for name in set(modifiers) & set(ROUNDINGS):
        value = ROUNDINGS[name](value)
    if target == "bf16":
        return to_bfloat16(value)
    if target == "f16":
        return to_float16(value)
    return bits_of(value) if target == "f32" else value.astype(TYPES[target])


# Memory


@dataclass
class Region:
    """A tensor of the launch."""

    name: str
    start: int
    size: int

    def __post_init__(self) -> None:
        memory = (ctypes.c_uint8 * self.size).from_address(self.start)
        self.bytes = np.ctypeslib.as_array(memory)


class Shared:
    """The shared memory of blocks, with who used it since the last barrier."""

    def __init__(self, blocks: int, size: int) -> None:
        self.bytes = np.zeros((blocks, size), "u1")
        self.written = np.zeros((blocks, size), bool)
        self.barrier()

    def barrier(self) -> None:
        """Whatever was used before may be used by all."""
        self.writer = np.full(self.bytes.shape, -1)
        self.reader = np.full(self.bytes.shape, -1)

    def check(self, place: tuple[Value, Value], warp: Value, others: Sequence[Value], at: Instruction) -> None:
        """Whether no other warp has used it since the last barrier."""
        for other in others:
            last = other[place]
            if ((last >= 0) & (last != warp)).any():
                raise Fault(f"two warps use one place of shared memory with no barrier in between: {at}")

    def load(self, place: tuple[Value, Value], warp: Value, at: Instruction) -> Value:
        """The bytes at places."""
        if not self.written[place].all():
            raise Fault(f"shared memory is read before it is written: {at}")
        self.check(place, warp, [self.writer], at)
        self.reader[place] = warp
        return self.bytes[place]

    def store(self, place: tuple[Value, Value], warp: Value, values: Value, at: Instruction) -> None:
        """Write bytes at places."""
        self.check(place, warp, [self.writer, self.reader], at)
        self.writer[place] = warp
        self.written[place] = True
        self.bytes[place] = values


# A launch


class Machine:
    """Blocks that run together.

    Args:
        program: What they run.
        blocks: Their numbers.
        arguments: The kernel's, by parameter, as unsigned integers.
        regions: The tensors that it may touch.
        shared: Bytes of a block's shared memory.
    """

    def __init__(
        self, program: Program, blocks: Value, arguments: dict[str, int], regions: Sequence[Region], shared: int
    ) -> None:
        self.program, self.arguments = program, arguments
        self.regions = sorted(regions, key=lambda region: region.start)
        self.shape = (len(blocks), program.threads)
        self.registers: dict[str, Value] = {}
        # In which lanes a register is undefined, where it is in any.
        self.undefined: dict[str, Value] = {}
        # The same of the halves of a register that was joined.
        self.joined: dict[str, list[Value]] = {}
        # In which lanes something is that the instruction has read.
        self.tainted: Value = np.False_
        self.shared = Shared(len(blocks), shared)
        thread = np.broadcast_to(np.arange(program.threads, dtype="u4"), self.shape)
        block = np.broadcast_to(np.asarray(blocks, "u4")[:, None], self.shape)
        self.special = {"%tid.x": thread, "%ctaid.x": block, "%laneid": thread % WARP, "global_smem": np.uint32(0)}
        self.warp = thread.astype("i8") // WARP
        self.everyone = np.ones(self.shape, bool)
        self.active = self.everyone
        self.at = program.instructions[0]
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Until they return."""
        position = 0
        with np.errstate(all="ignore"):
            while position < len(self.program.instructions):
                self.at = self.program.instructions[position]
                self.seen[self.at.name] += 1
                position += 1
                self.active = self.everyone
                self.tainted = np.False_
                if self.at.guard:
                    condition = self.read(self.at.guard, "pred") ^ self.at.negated
                    self.demand_defined()
                    self.active = np.broadcast_to(condition, self.shape)
                root = self.at.name.split(".")[0]
                if root in ("bra", "ret"):
                    if self.active.any() != self.active.all():
                        raise Fault(f"threads part here: {self.at}")
                    if self.active.all():
                        position = self.program.labels[self.at.operands[0]] if root == "bra" else 1 << 60
                elif self.active.any():
                    self.step(root)

    def step(self, root: str) -> None:
        """Run one instruction that is no branch."""
        *words, kind = self.at.name.split(".")
        target, *sources = self.at.operands
        if root == "mul" and kind not in ("f32", "f32x2"):
            root = "mad"
        special = getattr(self, f"do_{root}", None)
        if special is not None:
            special(words[1:], kind, target, *sources)
            return
        function = TABLES.get(kind, {}).get(".".join(word for word in words if word != "rn"))
        if function is None:
            raise self.unknown()
        # The amount of a shift, and the place of a field, are integers of 32 bits.
        counts = root in ("shl", "shr", "bfe")
        bits = kind if kind not in TABLES or TABLES[kind] is not SIGNS else f"b{8 * TYPES[kind].itemsize}"
        values = [self.read(text, "u32" if counts and index else bits) for index, text in enumerate(sources)]
        found = function(*values)
        self.write(target, bits_of(found) if kind == "f32" else found)

    def unknown(self) -> Fault:
        """What is said of an instruction that is not in the tables."""
        return Fault(f"an instruction that is not known: {self.at}")

    # Registers

    def demand_defined(self) -> None:
        """What was read is of use: no active lane may have it undefined.

        Raises:
            Fault: One has.
        """
        if np.any(self.tainted & self.active):
            raise Fault(f"threads use what they have not written: {self.at}")
        self.tainted = np.False_

    def read(self, text: str, kind: str, unwritten: bool = False) -> Value:
        """An operand as a type; what no thread may have written, as it may come to be unused, is GARBAGE there."""
        dtype = TYPES[kind]
        if text in self.special:
            return self.special[text]
        if text.startswith("%"):
            if text not in self.registers and unwritten:
                self.tainted = self.everyone
                return np.uint64(GARBAGE).astype(dtype)
            if text not in self.registers:
                raise Fault(f"{text} is read before it is written: {self.at}")
            self.tainted = self.tainted | self.undefined.get(text, np.False_)
            value = self.registers[text]
            # A register may be wider than what is read of it.
            return value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
        if text.startswith("0f"):
            return np.uint32(int(text[2:], 16)).view(dtype)
        number = int(text, 0) & ((1 << 8 * dtype.itemsize) - 1)
        return np.dtype(f"u{dtype.itemsize}").type(number).view(dtype) if kind != "pred" else np.bool_(number)

    def write(self, target: str, value: Value) -> None:
        """Set a register, for the lanes that are active."""
        if target == "_":
            return
        kind = TYPES[REGISTERS[re.match(r"%[a-z]+", target)[0]]]  # type: ignore[index]
        value = np.asarray(value)
        if value.dtype != kind:
            value = value.view(kind) if value.dtype.itemsize == kind.itemsize else value.astype(kind)
        undefined = self.tainted
        if not self.active.all():
            before = self.registers.get(target, kind.type(GARBAGE & (1 << 8 * kind.itemsize) - 1))
            is_new = target not in self.registers
            undefined = np.where(self.active, undefined, is_new | self.undefined.get(target, np.False_))
            value = np.where(self.active, value, before)
        self.undefined.pop(target, None)
        self.joined.pop(target, None)
        if undefined.any():
            self.undefined[target] = undefined
        self.registers[target] = value

    # Instructions of their own

    def do_mov(self, modifiers: list[str], kind: str, target: str, source: str) -> None:
        """A copy, or the joining or parting of a register's halves."""
        if target.startswith("{"):
            values = halves(self.read(source, kind))
            both = self.joined.get(source, [self.tainted] * 2)
            for each, half, tainted in zip(listed(target), values, both, strict=True):
                self.tainted = tainted
                self.write(each, half)
        elif source.startswith("{"):
            half = f"b{int(kind[1:]) // 2}"
            parts, both = [], []
            for each in listed(source):
                self.tainted = np.False_
                parts.append(np.asarray(self.read(each, half, unwritten=True)))
                both.append(self.tainted)
            self.tainted = np.logical_or(*both)
            self.write(target, joined(*parts))
            if self.active.all():
                self.joined[target] = both
        else:
            self.write(target, self.read(source, kind))

    def do_cvt(self, modifiers: list[str], kind: str, target: str, *sources: str) -> None:
        """A conversion; two numbers become one register of halves, the first the upper one."""
        *modifiers, into = modifiers
        if {*modifiers} - {"rn", "ftz", *ROUNDINGS}:
            raise self.unknown()
        values = [converted(self.read(text, kind), into.removesuffix("x2"), kind, modifiers) for text in sources]
        self.write(target, joined(*reversed(values)) if into.endswith("x2") else values[0])

    def do_mad(self, modifiers: list[str], kind: str, target: str, *sources: str) -> None:
        """A product of integers, `wide` or of their own width, to which another may be added."""
        if modifiers not in (["lo"], ["wide"]):
            raise self.unknown()
        wide = f"{kind[0]}{2 * int(kind[1:])}" if modifiers == ["wide"] else kind
        a, b = (np.asarray(self.read(text, kind)).astype(TYPES[wide]) for text in sources[:2])
        self.write(target, a * b + self.read(sources[2], wide) if len(sources) > 2 else a * b)

    def do_setp(self, modifiers: list[str], kind: str, target: str, a: str, b: str, *more: str) -> None:
        """A comparison, perhaps joined with another predicate."""
        found = COMPARISONS[modifiers[0]](self.read(a, kind), self.read(b, kind))
        if more:
            other = self.read(more[0].lstrip("!"), "pred") ^ more[0].startswith("!")
            found = INTEGERS[modifiers[1]](found, other)
        self.write(target, found)

    def do_selp(self, modifiers: list[str], kind: str, target: str, a: str, b: str, choice: str) -> None:
        """One of two values, bit for bit."""
        bits = f"b{8 * TYPES[kind].itemsize}"
        self.write(target, np.where(self.read(choice, "pred"), self.read(a, bits), self.read(b, bits)))

    def do_shfl(self, modifiers: list[str], kind: str, target: str, source: str, mask: str, *more: str) -> None:
        """The value of the lane whose number differs in the bits of `mask`."""
        if modifiers[:2] != ["sync", "bfly"]:
            raise self.unknown()
        lanes = np.arange(WARP) ^ int(mask, 0)
        values = self.by_warp(self.read(source, kind))[..., lanes]
        self.tainted = self.by_warp(self.tainted)[..., lanes].reshape(self.shape)
        self.write(target, values.reshape(self.shape))

    def do_redux(self, modifiers: list[str], kind: str, target: str, source: str, *more: str) -> None:
        """The largest or least value of a warp."""
        if kind not in ("s32", "u32") or modifiers[1:] not in (["max"], ["min"]):
            raise self.unknown()
        reduce = np.max if modifiers[1] == "max" else np.min
        found = reduce(self.by_warp(self.read(source, kind)), axis=-1, keepdims=True)
        self.demand_defined()
        self.write(target, np.broadcast_to(found, self.by_warp(found).shape).reshape(self.shape))

    def do_bar(self, modifiers: list[str], kind: str, *operands: str) -> None:
        """All threads of a block, which never part, are here."""
        self.shared.barrier()

    def by_warp(self, value: Value) -> Value:
        """An array `[blocks, warps, lanes]`; all lanes must take part."""
        if not self.active.all():
            raise Fault(f"a part of a warp exchanges values: {self.at}")
        blocks, threads = self.shape
        shape = (blocks, threads // WARP, WARP)
        value = np.asarray(value)
        return np.broadcast_to(value, shape) if value.ndim == 3 else np.broadcast_to(value, self.shape).reshape(shape)

    # Memory

    def do_ld(self, modifiers: list[str], kind: str, target: str, source: str) -> None:
        """A load of one value, or of two or four side by side."""
        if modifiers[0] == "param":
            number = self.arguments[source.strip("[] ")]
            self.write(target, np.dtype(f"u{TYPES[kind].itemsize}").type(number))
            return
        targets = listed(target)
        size = TYPES[kind].itemsize * len(targets)
        addresses = self.addresses(source, size)
        if modifiers[0] == "shared":
            raw = self.shared.load(*self.in_shared(addresses, size), self.at)
        else:
            raw = np.empty((len(addresses), size), "u1")
            for region, lanes, place in self.in_regions(addresses, size):
                raw[lanes] = region.bytes[place]
        for each, column in zip(targets, raw.view(f"u{TYPES[kind].itemsize}").T, strict=True):
            value = np.zeros(self.shape, column.dtype)
            value[self.active] = column
            self.write(each, value)

    def do_st(self, modifiers: list[str], kind: str, target: str, source: str) -> None:
        """A store, as `do_ld`."""
        bits = f"b{8 * TYPES[kind].itemsize}"
        values = [np.broadcast_to(self.read(each, bits), self.shape)[self.active] for each in listed(source)]
        raw = np.stack(values, axis=1).view("u1")
        self.demand_defined()
        addresses = self.addresses(target, raw.shape[1])
        if modifiers[0] == "shared":
            self.shared.store(*self.in_shared(addresses, raw.shape[1]), raw, self.at)
            return
        for region, lanes, place in self.in_regions(addresses, raw.shape[1]):
            region.bytes[place] = raw[lanes]
            if (region.bytes[place] != raw[lanes]).any():
                raise Fault(f"two threads store different numbers at one address: {self.at}")

    def do_ldmatrix(self, modifiers: list[str], kind: str, target: str, source: str) -> None:
        """A load of matrices of 8 rows of 16 bytes: of each a lane gets 4 bytes."""
        for each, (place, warp) in zip(listed(target), self.matrices(source, modifiers), strict=True):
            raw = np.ascontiguousarray(self.shared.load(place, warp, self.at))
            self.write(each, raw.view("u4").reshape(self.shape))

    def do_stmatrix(self, modifiers: list[str], kind: str, target: str, source: str) -> None:
        """A store, as `do_ldmatrix`."""
        for each, (place, warp) in zip(listed(source), self.matrices(target, modifiers), strict=True):
            raw = np.broadcast_to(self.read(each, "b32"), self.shape).reshape(-1, 1)
            self.demand_defined()
            self.shared.store(place, warp, np.ascontiguousarray(raw).view("u1"), self.at)

    def matrices(self, text: str, modifiers: list[str]) -> Iterator[tuple[tuple[Value, Value], Value]]:
        """Of each matrix the blocks and bytes that lanes get: of 8 lanes, in turn, each knows where a row begins."""
        if "trans" in modifiers or "m8n8" not in modifiers:
            raise self.unknown()
        rows = self.by_warp(self.addresses(text, 16).reshape(self.shape))
        lane = np.arange(WARP)
        for first in range(0, 8 * int(modifiers[3][1:]), 8):
            addresses = rows[..., first + lane // 4] + 4 * (lane % 4)
            yield self.in_shared(addresses.flatten(), 4)

    def addresses(self, text: str, size: int) -> Value:
        """Where the active lanes load or store so many bytes."""
        base, offset = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text).groups()  # type: ignore[union-attr]
        value = np.asarray(self.read(base, "b64" if base.startswith("%rd") else "b32"))
        self.demand_defined()
        value = np.broadcast_to(value, self.shape)[self.active].astype("i8") + int(offset or "0", 0)
        if (value % size).any():
            raise Fault(f"an address that is not a multiple of {size}: {self.at}")
        return value

    def in_shared(self, addresses: Value, size: int) -> tuple[tuple[Value, Value], Value]:
        """Blocks and bytes of addresses of shared memory, and the warps of the active lanes."""
        if addresses.min() < 0 or addresses.max() + size > self.shared.bytes.shape[1]:
            raise Fault(f"an address beyond the {self.shared.bytes.shape[1]} bytes of shared memory: {self.at}")
        block = np.nonzero(self.active)[0][:, None]
        return (block, addresses[:, None] + np.arange(size)), self.warp[self.active][:, None]

    def in_regions(self, addresses: Value, size: int) -> Iterator[tuple[Region, Value, Value]]:
        """Of each tensor that is used the lanes that use it, and the bytes that each of them uses."""
        starts = np.array([region.start for region in self.regions])
        ends = starts + np.array([region.size for region in self.regions])
        which = np.searchsorted(starts, addresses, side="right") - 1
        is_out = (which < 0) | (addresses + size > ends[which])
        if is_out.any():
            address = int(addresses[is_out][0])
            near = min(self.regions, key=lambda region: abs(address - region.start - region.size // 2))
            raise Fault(
                f"{is_out.sum()} threads are out of bounds, the first at byte {address - near.start} of the "
                f"{near.size} of {near.name}: {self.at}"
            )
        for index in np.unique(which):
            lanes = which == index
            yield self.regions[index], lanes, (addresses[lanes] - starts[index])[:, None] + np.arange(size)


def listed(operand: str) -> list[str]:
    """The registers of a vector in braces, or one alone."""
    return re.findall(r"[%\w]+", operand)


def launch(
    program: Program, blocks: Sequence[int], arguments: Sequence[int], regions: Sequence[Region], shared: int
) -> Counter[str]:
    """Run the blocks with these numbers, in any order.

    Args:
        program: What they run.
        blocks: Their numbers, each once.
        arguments: The kernel's, as unsigned integers; parameters that are left over are zero.
        regions: The tensors that it may touch.
        shared: Bytes of a block's shared memory.

    Returns:
        How often which instruction was run, by its name.

    Raises:
        Fault: A GPU would trap, or what it does is not defined.
    """
    padded = [*arguments, *[0] * (len(program.parameters) - len(arguments))]
    named = dict(zip(program.parameters, padded, strict=True))
    seen: Counter[str] = Counter()
    at_once = max(1, LANES // program.threads)
    for first in range(0, len(blocks), at_once):
        machine = Machine(program, np.asarray(blocks[first : first + at_once]), named, regions, shared)
        machine.run()
        seen += machine.seen
    return seen
