"""The shape of the package: examples that run, one place each, everything installed."""

import ast

import pytest
from repo import ROOT

import moq_hf

PACKAGE = ROOT / "moq_hf"
SOURCES = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {path: ast.parse(source) for path, source in SOURCES.items()}


def test_each_public_name_has_an_example() -> None:
    for name in moq_hf.__all__:
        value = getattr(moq_hf, name)
        assert not callable(value) or ">>> " in (value.__doc__ or ""), name


@pytest.mark.parametrize(
    ("what", "module"),
    [
        # What is a metric?
        ("total_flos", "text.py"),
        # What is a block?
        ("nn.ModuleList)", "inventory.py"),
    ],
)
def test_one_place_answers(what: str, module: str) -> None:
    assert {path.name for path, tree in TREES.items() if what in ast.unparse(tree)} == {module}


def test_every_package_is_installed() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders) and (PACKAGE / "py.typed").is_file()
