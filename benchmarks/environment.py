"""What a result was measured with, and the file it is written to."""

import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

# As Linux spells them: what kernels are chosen by, of x86-64 and of ARM.
_X86 = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_ARM = {"asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16"}
_INSTRUCTIONS = {**{name: name for name in _X86}, **_ARM}


def environment(*modules: str, **more: Any) -> dict[str, Any]:
    """The command, the machine and the versions.

    Args:
        modules: Those whose versions count too, beside Python, torch, transformers and moq_hf.
        more: More of the machine.
    """
    # The folders of a machine say nothing to others.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv]
    return {
        "command": " ".join(["python", f"benchmarks/{Path(words[0]).name}", *words[1:]]),
        "machine": {**machine(), "threads": torch.get_num_threads(), **more},
        "versions": versions("python", "torch", "transformers", *modules, "moq_hf"),
    }


def write(document: dict[str, Any], path: Path) -> None:
    """Write JSON, and make its folder if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, str]:
    """The processor, how many cores it has, and those of its instructions that kernels are chosen by.

    >>> list(machine())
    ['processor', 'architecture', 'instructions', 'cores']
    """
    path = Path("/proc/cpuinfo")
    info = path.read_text(encoding="utf-8") if path.exists() else ""
    return {
        "processor": _field(info, "model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "instructions": " ".join(instructions(info)),
        "cores": str(os.cpu_count() or 1),
    }


def instructions(info: str) -> list[str]:
    """Those instructions of a processor that kernels are chosen by, sorted.

    Args:
        info: What Linux says of the processor in /proc/cpuinfo.

    >>> instructions("Features        : fp asimd asimddp i8mm")
    ['dotprod', 'i8mm']
    """
    flags = _field(info, "flags") or _field(info, "Features")
    return sorted(_INSTRUCTIONS[flag] for flag in flags.split() if flag in _INSTRUCTIONS)


def versions(*modules: str) -> dict[str, str]:
    """The version of each module, and Python's for "python".

    >>> versions("python", "torch").keys()
    dict_keys(['python', 'torch'])
    """
    known = {"python": platform.python_version()}
    return {name: known.get(name) or str(importlib.import_module(name).__version__) for name in modules}


def _field(info: str, name: str) -> str:
    """The first value of a field of /proc/cpuinfo; "" where there is none."""
    fields = (line.partition(":") for line in info.splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")
