"""Where tests of kernels run: on a CUDA device, or in Triton's interpreter, which needs a process of its own."""

import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import programs
import pytest
import torch
from repo import ROOT

from moq_hf import triton_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
on_device = pytest.mark.skipif(False, reason="it runs here") if INTERPRETED else pytest.mark.gpu
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(file: str, least: int) -> None:
    """Run the tests of a file in Triton's interpreter: at least so many."""
    done = programs.run("-m", "pytest", "-q", *programs.NESTED, file, cwd=ROOT, timeout=600, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout


@pytest.fixture(autouse=True)
def silent_numpy() -> Iterator[None]:
    """Where a GPU computes NaN in silence, numpy in the interpreter warns."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module", autouse=INTERPRETED)
def members_are_known() -> Iterator[None]:
    """At each call of a function the interpreter sorts all members of Triton's modules to find what it replaces.

    Half of the time would go into that. What it may replace is found once, while nothing is replaced.
    """
    from triton import language
    from triton.language import core, math
    from triton.runtime import interpreter

    packages = (language, core, math, core.tensor, core.tensor_descriptor_base)
    known = {pkg: [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)] for pkg in packages}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        for name in known[pkg]:
            if core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


def break_part(kernel: str, function: str, wrong: Callable[..., Any], patched: pytest.MonkeyPatch) -> None:
    """Have a part of a kernel, or of the arithmetic that all share, give other numbers.

    Args:
        kernel: The kernel's module.
        function: Name of the part.
        wrong: Computes in its place, given the right function and its arguments.
        patched: Undoes it.
    """
    modules = [triton_launch.kernels(name) for name in ("arithmetic", kernel)]
    if not modules[0].INTERPRETED.value:
        pytest.skip("a compiled kernel has its functions in it")
    for module in modules:
        if hasattr(module, function):
            patched.setattr(module, function, functools.partial(wrong, getattr(module, function)))


TARGETS = [("cuda", 80, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)]


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a kernel compiles for a target, which need not be there; arguments without type and value are None."""
    triton = pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("nothing is compiled there")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiles(kernel: Any, target: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 8) -> bool:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        values = {name: constants.get(name) for name in kernel.arg_names if name not in types}
        source = triton.compiler.ASTSource(kernel, signature, values)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        return bool(triton.compile(source, target=GPUTarget(*target), options=options).kernel)

    return compiles


@pytest.fixture
def untried() -> Iterator[None]:
    """No variant of a kernel was tried out yet, and no word of what a test comes to afterwards."""
    triton_launch._triton.cache_clear()
    with patch.dict(triton_launch.works, clear=True):
        yield
