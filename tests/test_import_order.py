"""Folders are layers: imports lead one way, between folders and between modules, and never to the package root."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter

from repo import ROOT

PACKAGE = ROOT / "moq_hf"
# Run without PyTorch: the schedule is pure Python, and JSON is read with pydantic.
STANDARD_LIBRARY_ONLY = {"version", "grid", "schedule", "forecast", "servers"}
WITH_PYDANTIC = {"arguments", "config", "config_fields", "config_reading", "dialect", "errors"}
# What is known of a weight, a folder and a server stands below the rooms that use it.
BELOW_MODEL = ("weight_spec", "serving", "servers", "formats")
CONFIG_LIBRARIES = {"pydantic", "pydantic_core", "moq_hf"} | sys.stdlib_module_names


def sources() -> dict[str, str]:
    """Dotted name below `moq_hf` to source; a folder's `__init__` goes by the folder's name, the root's by ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path.read_text(encoding="utf-8")
    return found


def imported(module: str, source: str, modules: set[str]) -> set[str]:
    """Absolute names of everything that the source of a module of moq_hf imports, inside functions too."""
    here = ["moq_hf", *module.split(".")]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                # `from . import x` may name a module or an attribute of the package.
                inner = f"{base}.{alias.name}".removeprefix("moq_hf.")
                names.add(f"moq_hf.{inner}" if inner in modules else base)
    return names


def test_imports_lead_one_way() -> None:
    files = sources()
    # None of them was renamed.
    assert files.keys() >= STANDARD_LIBRARY_ONLY | WITH_PYDANTIC
    found = []
    by_module: dict[str, set[str]] = {}
    by_folder: dict[str, set[str]] = {}
    for module, source in files.items():
        if not module:
            continue
        names = imported(module, source, set(files))
        own = {name.removeprefix("moq_hf.") for name in names if name.startswith("moq_hf.")}
        by_module[module] = own
        if folder := module.rpartition(".")[0]:
            others = {name.rpartition(".")[0] for name in own} - {"", folder}
            by_folder.setdefault(folder, set()).update(others)
        if "moq_hf" in names:
            found.append(f"{module} imports the package root")
        top = {name.partition(".")[0] for name in names}
        if module in STANDARD_LIBRARY_ONLY and not top <= {"moq_hf"} | sys.stdlib_module_names:
            found.append(f"{module} needs more than the standard library: {sorted(top)}")
        if module in WITH_PYDANTIC and not top <= CONFIG_LIBRARIES:
            found.append(f"{module} needs more than pydantic: {sorted(top)}")
    for module in filter(lambda name: name.startswith(BELOW_MODEL), by_module):
        above = {name for name in by_module[module] if name.startswith(("model", "packed", "training", "export"))}
        if above:
            found.append(f"{module} is below what it imports: {sorted(above)}")
    for graph in (by_module, by_folder):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append("these import each other: " + ", ".join(error.args[1]))
    assert found == []
