"""The shape of the package: examples that run, one place each, everything installed."""

from repo import ROOT

import moq_hf

PACKAGE = ROOT / "moq_hf"


def test_each_public_name_has_an_example() -> None:
    for name in moq_hf.__all__:
        value = getattr(moq_hf, name)
        assert not callable(value) or ">>> " in (value.__doc__ or ""), name


def test_every_package_is_installed() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders) and (PACKAGE / "py.typed").is_file()
