"""What a measurement was made with: the processor and the versions."""

import importlib
import os
import platform
from pathlib import Path


def machine() -> dict[str, str]:
    """The processor, how many cores it has, and those of its instructions that kernels are chosen by.

    >>> list(machine())
    ['processor', 'architecture', 'instructions', 'cores']
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    fast = sorted(flag for flag in flags if flag == "avx2" or "vnni" in flag or flag.startswith(("avx512f", "amx")))
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "instructions": " ".join(fast),
        "cores": str(os.cpu_count()),
    }


def versions(*modules: str) -> dict[str, str]:
    """The version of each module, and Python's for "python".

    >>> versions("python", "torch").keys()
    dict_keys(['python', 'torch'])
    """
    known = {"python": platform.python_version()}
    return {name: known.get(name) or str(importlib.import_module(name).__version__) for name in modules}
