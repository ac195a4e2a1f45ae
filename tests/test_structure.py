"""The shape of the package: files and functions that can be read in one sitting, examples that run, one place each."""

import ast
import statistics
from pathlib import Path

import pytest
from repo import ROOT

import moq_hf

PACKAGE = ROOT / "moq_hf"
SOURCES = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {path: ast.parse(source) for path, source in SOURCES.items()}
# Lines of code and text. A kernel is one function on the device; what can be cut off it, is.
MEDIAN, LARGEST, FUNCTION = 200, 500, 60
KERNELS = {"fake_quantize_groups": 70, "fake_quantize_tiles": 75, "packed_matmul": 65}


def lines(source: str) -> int:
    return sum(bool(line.strip()) for line in source.splitlines())


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_files_are_short() -> None:
    sizes = {path: lines(source) for path, source in SOURCES.items() if path.name != "__init__.py"}
    assert statistics.median(sizes.values()) <= MEDIAN
    assert {path: size for path, size in sizes.items() if size > LARGEST} == {}


def test_functions_are_short() -> None:
    found = {
        f"{path}: {node.name}": length
        for path, tree in TREES.items()
        for node in functions(tree)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > KERNELS.get(node.name, FUNCTION)
    }
    assert found == {}


def test_arguments_name_the_thing_before_they_refer() -> None:
    found = [
        f"{path}: {line.strip()}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for line in (ast.get_docstring(node) or "").splitlines()
        if line.partition(":")[2].strip().startswith("As for") or line.strip().startswith("As for")
    ]
    assert found == []


def test_there_are_examples_and_each_public_name_has_one() -> None:
    examples = sum(source.count("\n    >>> ") + source.count("\n        >>> ") for source in SOURCES.values())
    assert examples >= 30
    for name in moq_hf.__all__:
        value = getattr(moq_hf, name)
        assert not callable(value) or ">>> " in (value.__doc__ or ""), name


def uses(what: str) -> set[str]:
    """The modules whose code mentions a text."""
    return {str(path) for path, tree in TREES.items() if what in ast.unparse(tree)}


@pytest.mark.parametrize(
    ("what", "places"),
    [
        # Is the copy stale?
        ("weight._version, pointer", {"moq_hf/model/staleness.py"}),
        ("register_optimizer_step_post_hook(", {"moq_hf/model/staleness.py"}),
        # Who computes?
        ("cpu.applies(", {"moq_hf/kernels/backend.py"}),
        # What is a metric?
        ("total_flos", {"moq_hf/report/metrics.py"}),
        # What is a block?
        ("nn.ModuleList)", {"moq_hf/model/inventory.py"}),
        # The ratios of a saved state.
        ("'ABCDEFGHIJKLMNOPQ'", {"moq_hf/training/ratios.py"}),
    ],
)
def test_one_place_answers(what: str, places: set[str]) -> None:
    assert uses(what) == places


def test_every_package_is_installed() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders) and Path(PACKAGE, "py.typed").is_file()
