"""Damaged and invented config files: each must give a config or one `MoQConfigError`, and nothing else.

    python tests/helpers/fuzz_config.py --cases 10000 --out benchmarks/results/fuzz_config.json

Each seed takes a file of configs/ or a DeepSpeed config around one and changes it once to four times: bytes, encodings,
keys, types, nesting, numbers beyond every range, keys given twice. What is read as a config must come back equal from
`to_dict`, and its schedule, its plan for 1,000 steps and quantized layers of a small model must be made or refused
with a `MoQError`. For the sake of that part a quarter of the cases draws legal values, mostly from the ends of their
ranges. A case that computes for more than ten seconds counts as a hang.
"""

import argparse
import collections
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from moq_hf import MoQConfig, MoQConfigError, MoQError, PrecisionSchedule, plan, quantize_model

SECONDS = 10.0
CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted({*CONFIGS.glob("*.json")} - {*CONFIGS.glob("*.schema.json")})
AROUND = {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FULL = MoQConfig.from_dict({"quantize_bits": {"start_bits": 8, "target_bits": 3}}).to_dict()
VALUES: list[Any] = [
    None, True, False, 0, -0.0, 1, -1, 2, 3, 8, 8.0, 16, 17, 0.25, 0.999, 1e-300, 5e-324, 1e308, 1.8e308, 2**31, 2**63,
    2**64, 10**18, 10**400, -(10**400), 10**4200, "", " ", "8", "auto", "per_channel", "symmetric", "asymmetric", "mse",
    "stochastic", "power", "nan", "é\ud800\n", "\x00", "\u202e", "a" * 5000, [], [8], [[]], ["*"], ["classifier"],
    [None], {}, {"enabled": True}, {"": {}}, {"x": {"y": [{}]}},
]  # fmt: skip
# As text, since JSON has no such values, or none that Python would write so.
TEXTS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 5000, "0." + "1" * 5000, "0x10", "01", "+1",
    ".5", "1.", "'8'", "True", "None", "undefined", '"\\ud800"', '"\\u0000"', '"\\x"', "[" * 100_000, '{"a":' * 50_000,
    "[" * 900 + "]" * 900, "/* 8 */ 8", "8,", "", '"' + "é" * 99 + '"',
]  # fmt: skip

WHOLE = [1, 2, 3, 8, 10, 100, 999, 1000, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, 10**4295]
SHARES = [1, 1.0, 0.5, 0.25, 0.1, 1e-3, 1 / 3, 0.29, 1e-9, 1e-15, 1e-16, 1e-17, 1e-300, 5e-324]
# Legal by themselves; not all of them together, nor with every model.
LEGAL: dict[str, list[Any]] = {
    "enabled": [True, True, True, False], "quantize_verbose": [True, False], "quantizer_kernel": [None, True, False],
    "quantize_algo.q_type": ["symmetric", "asymmetric"], "quantize_algo.rounding": ["nearest", "stochastic"],
    "quantize_algo.scale": ["auto", "absmax", "mse"], "quantize_algo.scale_refresh": WHOLE,
    "quantize_algo.range": ["auto", "narrow", "full"],
    "quantize_groups": [*WHOLE, "per_channel"], "quantize_group_size": [None, None, None, *WHOLE],
    "quantize_bits.start_bits": list(range(1, 17)), "quantize_bits.target_bits": list(range(1, 17)),
    "quantize_schedule.quantize_period": [*WHOLE, "auto", "auto", "auto"],
    "quantize_schedule.schedule_offset": [0, *WHOLE], "quantize_schedule.deadline": [None, *SHARES],
    "quantize_schedule.allow_unreached": [True, True, False], "fp16_mixed_quantize.enabled": [True, False],
    "fp16_mixed_quantize.quantize_change_ratio": SHARES, "eigenvalue.enabled": [True, False],
    "eigenvalue.max_iter": WHOLE, "eigenvalue.tol": [*SHARES, 1e299], "eigenvalue.stability": [0, *SHARES, 1e299],
    "eigenvalue.gas_boundary_resolution": WHOLE, "eigenvalue.layer_name": [None, "layer", "layer.0", "é"],
    "eigenvalue.layer_num": [None, 0, *WHOLE], "eigenvalue.method": ["lanczos", "power"],
    "eigenvalue.max_overhead": SHARES, "eigenvalue.num_samples": WHOLE,
    "distillation.teacher": [None, None, "nobody/nothing", "é", "\x00"], "distillation.logits": [0, *SHARES, 1e299],
    "distillation.hidden": [0, *SHARES, 1e299], "distillation.labels": [0, *SHARES],
    "activation_quantization.enabled": [True, False], "activation_quantization.bits": [2, 8],
    "activation_quantization.start_step": [0, *WHOLE],
    "modules_to_not_convert": [None, ["classifier"], ["layer.*"], ["*"], ["[", "]"], ["\ud800"]],
    "quantize_embeddings": [None, 2, 8, "auto"], "quantize_heads": [True, False], "seed": [0, 2**63 - 1],
    "overrides": [{"*": {"bits": 8}}, {"layer.0": {"group_size": 4}, "*": {"start_bits": 9}}, {"none": {"bits": 4}}],
}  # fmt: skip


def _corpus() -> list[Any]:
    recipes = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]
    return [*recipes, FULL, *({"quantize_training": recipe, **AROUND} for recipe in (*recipes[:3], FULL))]


CORPUS = _corpus()


def _drawn(rng: random.Random) -> dict[str, Any]:
    """A document of legal values, most keys left out."""
    start = rng.randint(2, 16)
    document: dict[str, Any] = {"quantize_bits": {"start_bits": start, "target_bits": rng.randint(1, min(start, 15))}}
    for path in rng.sample(list(LEGAL), rng.randint(1, 8)):
        head, _, tail = path.rpartition(".")
        (document.setdefault(head, {}) if head else document)[tail] = rng.choice(LEGAL[path])
    return document


def _objects(document: Any) -> list[dict[str, Any]]:
    """Every object in a document, outermost first."""
    if isinstance(document, list):
        return [found for value in document for found in _objects(value)]
    if not isinstance(document, dict):
        return []
    return [document, *(found for value in document.values() for found in _objects(value))]


def _change(document: Any, rng: random.Random) -> Any:
    """The document with one value, key or level changed, in place where that goes."""
    places = [place for place in _objects(document) if place]
    if not places:
        return rng.choice(VALUES)
    place = rng.choice(places)
    key = rng.choice(list(place))
    match rng.randrange(9):
        case 0 | 1 | 2:
            place[key] = rng.choice(VALUES)
        case 3:
            cut = rng.randrange(len(key) + 1)
            place[key[:cut] + rng.choice("abz_-. é\x00\ud800") + key[cut + rng.randrange(2) :]] = place.pop(key)
        case 4:
            rng.choice(places)[key] = json.loads(json.dumps(place[key]))
        case 5:
            del place[key]
        case 6:
            place[rng.choice([*FULL, "quantize-algo", "quantize_type", "q_type", "", "compression_training"])] = (
                rng.choice(VALUES)
            )
        case 7:
            place[key] = {key: place[key]}
        case 8:
            return rng.choice([[document], {"quantize_training": document}, place[key]])
    return document


def _damage(data: bytes, rng: random.Random) -> bytes:
    """The bytes with something cut, flipped, put in or written twice; or in another encoding."""
    at, to = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    match rng.randrange(10):
        case 0:
            return data[:at] + data[to:]
        case 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 3:
            return data[:to] + data[at:to] + data[to:]
        case 4:
            return data[:at]
        case 5:
            return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\xef\xbb\xbf" * 2, b"#!\n", b"\r\n"]) + data
        case 6:
            text = data.decode("utf-8", "replace")
            return text.encode(rng.choice(["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-7", "cp037"]))
        case _:
            # Another text where a value stood, or a key once more.
            colons = [index for index, byte in enumerate(data) if byte == ord(":")]
            if not colons:
                return rng.choice(TEXTS).encode()
            start = rng.choice(colons) + 1
            end = min((e for e in (data.find(b",", start), data.find(b"}", start)) if e >= 0), default=len(data))
            if rng.randrange(4) == 0:
                key = data.rfind(b"{", 0, start)
                return data[: key + 1] + data[key + 1 : end] + b"," + data[key + 1 :]
            return data[:start] + rng.choice(TEXTS).encode() + data[end:]


def case(seed: int) -> bytes:
    """The file of a seed."""
    rng = random.Random(seed)
    document = json.loads(json.dumps(rng.choice(CORPUS)))
    kind = rng.randrange(4)
    if kind == 0 and rng.randrange(20) == 0:
        return rng.choice([b"", b" ", rng.randbytes(rng.randrange(200)), rng.choice(TEXTS).encode()])
    if kind == 3:
        document = _drawn(rng)
    elif kind != 0:
        for _ in range(rng.randint(1, 3)):
            document = _change(document, rng)
    data = json.dumps(document, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    return _damage(data, rng) if kind in (0, 1) else data


class Hang(BaseException):
    """A case took too long."""


@contextmanager
def limited() -> Iterator[None]:
    """Ends what computes for more than `SECONDS`, in the main thread.

    Raises:
        Hang: It did.
    """

    def stop(*_: Any) -> None:
        raise Hang

    # The processor's time: that of the clock is no property of the code on a busy machine.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


class Block(nn.Module):
    """A small model with a list of blocks, a table and a head, for what a config says of layers."""

    def __init__(self) -> None:
        """16 units."""
        super().__init__()
        self.embeddings = nn.Embedding(12, 16)
        self.layer = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)])
        self.classifier = nn.Linear(16, 2)


def read(path: Path) -> str:
    """What becomes of a file: "config", "refused" with the model or the length of the run, or "error".

    Raises:
        Exception: Whatever should not have happened.
    """
    try:
        config = MoQConfig.from_file(path)
    except MoQConfigError as error:
        assert str(path) in str(error)
        return "error"
    assert MoQConfig.from_dict(config.to_dict()) == config
    if not config.enabled:
        return "config"
    try:
        schedule = PrecisionSchedule(config, ["layer.0", "layer.1"], 1_000)
        for _ in range(5):
            schedule.advance({"layer.0": 1.0})
        schedule.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        str(plan(config, 1_000))
        quantize_model(Block(), config)
    except MoQError as error:
        str(error)
        return "refused"
    return "config"


def fuzz(seeds: range, folder: Path) -> dict[str, Any]:
    """The outcomes of the cases, and what was wrong: seed, kind of exception and its last words."""
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[dict[str, Any]] = []
    path, slowest = folder / "config.json", 0.0
    for seed in seeds:
        path.write_bytes(case(seed))
        start = time.process_time()
        try:
            with limited():
                outcomes[read(path)] += 1
        except (Exception, Hang) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            wrong.append({"seed": seed, "kind": type(error).__name__, "place": place, "text": str(error)[:200]})
        slowest = max(slowest, time.process_time() - start)
    return {"cases": len(seeds), **outcomes, "slowest_seconds": round(slowest, 3), "wrong": wrong}


def main() -> None:
    """Count the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(range(arguments.cases), Path(folder))
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
