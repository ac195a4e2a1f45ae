"""A module of moq_hf imports only modules above it in this list, and never the package root."""

import ast
import sys
from pathlib import Path

import pytest
from repo import ROOT

PACKAGE = ROOT / "moq_hf"
ORDER = [
    "version",
    "errors",
    "grid",
    "config_errors",
    "config_document",
    "config_fields",
    "config_budget",
    "config",
    "budget",
    "reading",
    "schedule",
    "plan",
    "serving.description",
    "serving.architectures",
    "serving.rules",
    "serving.servers",
    "transformers_seams",
    "engine_seams",
    "names",
    "processes",
    "rows",
    "quantizer",
    "inputs",
    "kernels.numba",
    "kernels.numba_columns",
    "kernels.cpu",
    "kernels.columns",
    "kernels.triton",
    "triton_quant",
    "kernels.packing",
    "kernels.backend",
    "shards",
    "gathering",
    "model.staleness",
    "model.inventory",
    "layer_state",
    "quant_linear",
    "quant_conv",
    "quant_experts",
    "serving.planned",
    "model.selection",
    "model.refresh",
    "model.convert",
    "model.sizes",
    "model.file_size",
    "spaces",
    "eigen",
    "trace",
    "training.measuring",
    "training.samples",
    "training.checkpoints",
    "training.distillation",
    "training.measurable",
    "training.measures",
    "training.sensitivity",
    "training.choice",
    "training.resume",
    "training.messages",
    "training.ratios",
    "training.controller",
    "training.listening",
    "training.trainer_state",
    "training.float_phase",
    "report.metrics",
    "packed.quiet",
    "packed.question",
    "packed.compare",
    "packed.proof",
    "packed.files",
    "packed.state",
    "packed.state_check",
    "packed.words",
    "packed.tensors",
    "packed.layout",
    "packed.targets",
    "packed.matrices",
    "packed.encoder",
    "packed.verification",
    "packed.verify",
    "packed.served",
    "packed.write",
    "packed.save",
    "packed.card",
    "packed.delivery",
    "packed.sources",
    "packed.zero_files",
    "packed.pack",
    "report.run",
    "report.look",
    "report.figures",
    "report.page",
    "callback",
    "trainer",
    "export.environment",
    "export.loading",
    "export.metrics",
    "export.data",
    "export.proof",
    "export.folder",
    "export.onnx_layers",
    "export.onnx_integers",
    "export.onnx_graph",
    "export.onnx",
    "export.floats",
    "export.gguf_blocks",
    "export.gguf",
    "export.bench_worker",
    "export.bench_engines",
    "export.bench_result",
    "export.bench",
    "cli",
]
CONFIG = {"config_errors", "config_document", "config_fields", "config_budget", "config"}
STANDARD_LIBRARY_ONLY = {"version", "errors", "grid", *CONFIG, "reading", "schedule", "plan"}
STANDARD_LIBRARY_ONLY |= {f"serving.{name}" for name in ("description", "architectures", "rules", "servers")}
# Besides it.
ALLOWED = {module: {"pydantic", "pydantic_core"} for module in CONFIG}
ROOMS = {name.partition(".")[0] for name in ORDER if "." in name}


def path_of(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def imported(module: str, source: str) -> set[str]:
    """Absolute names of everything that the source of a module of moq_hf imports, inside functions too."""
    names = set()
    here = ["moq_hf", *module.split(".")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            # `from . import x` may name a module or an attribute of the package: the latter is what is forbidden.
            is_package = base == "moq_hf" or base.removeprefix("moq_hf.") in ROOMS
            names |= {f"{base}.{alias.name}" for alias in node.names} if is_package else {base}
    return names


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module."""
    above = set(ORDER[: ORDER.index(module)])
    found = []
    for name in sorted(imported(module, source)):
        top, _, inner = name.partition(".")
        if top == "moq_hf":
            if inner not in ORDER:
                found.append(f"{module} imports the package root ({name})")
            elif inner not in above:
                found.append(f"{module} imports {inner}, which is not above it")
        elif module in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names | ALLOWED.get(module, set()):
            found.append(f"{module} imports {top}, which is not in the standard library")
    return found


def test_every_file_has_a_place() -> None:
    files = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    assert {".".join(path.parts) for path in files} == set(ORDER)


def test_rooms_have_no_code_of_their_own() -> None:
    # What a room's __init__ imported would be imported with every module in it.
    for room in ROOMS:
        assert len(ast.parse((PACKAGE / room / "__init__.py").read_text()).body) == 1, room


@pytest.mark.parametrize("module", ORDER)
def test_imports_only_what_is_above(module: str) -> None:
    assert faults(module, path_of(module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("quantizer", "from .training.controller import MoQController"),
        ("quantizer", "from moq_hf.training.controller import MoQController"),
        ("quantizer", "import moq_hf.training.controller as c"),
        ("quantizer", "from .training import controller"),
        ("kernels.cpu", "from ..training.controller import MoQController"),
        ("model.selection", "from .convert import quantize_model"),
        ("model.selection", "from . import convert"),
        ("model.convert", "from . import ConvertError"),
        ("quantizer", "def f():\n    from .trainer import MoQTrainer"),
        ("quantizer", "import moq_hf"),
        ("trainer", "from moq_hf import MoQConfig"),
        ("trainer", "from . import MoQConfig"),
        ("schedule", "import torch"),
        ("schedule", "import pydantic"),
        ("config", "def f():\n    from numpy.random import rand"),
        ("config", "from .config import x"),
    ],
)
def test_catches(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


def test_accepts() -> None:
    source = (
        "import os.path\nimport torch\nfrom .. import quantizer\nfrom ..config import MoQConfig\nimport moq_hf.plan\n"
        "from ..model import sizes\nfrom .resume import changes"
    )
    assert faults("training.controller", source) == []
