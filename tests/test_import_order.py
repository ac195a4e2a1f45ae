"""A module of moq_hf imports only modules above it in this list, and never the package root."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moq_hf"
ORDER = [
    "config",
    "reading",
    "schedule",
    "resume",
    "quantizer",
    "numba_kernels",
    "cpu_quant",
    "triton_kernels",
    "triton_quant",
    "packed",
    "processes",
    "selection",
    "quant_linear",
    "eigen",
    "sensitivity",
    "sizes",
    "controller",
    "proof",
    "checkpoint",
    "card",
    "delivery",
    "report",
    "callback",
    "distillation",
    "trainer",
    "onnx_layers",
    "export",
    "bench_worker",
    "bench",
    "cli",
]
STANDARD_LIBRARY_ONLY = {"config", "reading", "schedule"}
# Modules that are there by Python's rules, not in the order: the package root imports everything.
ROOT = {"__init__"}


def imported(source: str) -> set[str]:
    """Absolute names of everything that the source of a module of moq_hf imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` may name a module or an attribute of the root: the latter is what is forbidden.
            base = ".".join(part for part in ("moq_hf" if node.level else "", node.module or "") if part)
            names |= {f"{base}.{alias.name}" for alias in node.names} if base == "moq_hf" else {base}
    return names


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module."""
    above = set(ORDER[: ORDER.index(module)])
    found = []
    for name in sorted(imported(source)):
        top, _, inner = name.partition(".")
        if top == "moq_hf":
            inner = inner.split(".")[0]
            if inner not in ORDER:
                found.append(f"{module} imports the package root ({name})")
            elif inner not in above:
                found.append(f"{module} imports {inner}, which is not above it")
        elif module in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            found.append(f"{module} imports {top}, which is not in the standard library")
    return found


def test_every_file_has_a_place() -> None:
    assert {path.stem for path in PACKAGE.rglob("*.py")} <= set(ORDER) | ROOT


@pytest.mark.parametrize("module", [name for name in ORDER if (PACKAGE / f"{name}.py").exists()])
def test_imports_only_what_is_above(module: str) -> None:
    assert faults(module, (PACKAGE / f"{module}.py").read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quantizer", "from .controller import MoQController"),
        ("quantizer", "from moq_hf.controller import MoQController"),
        ("quantizer", "import moq_hf.controller as c"),
        ("quantizer", "from . import controller"),
        ("quantizer", "def f():\n    from .trainer import MoQTrainer"),
        ("quantizer", "import moq_hf"),
        ("trainer", "from moq_hf import MoQConfig"),
        ("trainer", "from . import MoQConfig"),
        ("schedule", "import torch"),
        ("config", "def f():\n    from numpy.random import rand"),
        ("config", "from .config import x"),
    ],
)
def test_catches(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


def test_accepts() -> None:
    source = (
        "import os.path\nimport torch\nfrom . import quantizer\nfrom .config import MoQConfig\nimport moq_hf.schedule"
    )
    assert faults("controller", source) == []
