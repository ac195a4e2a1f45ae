"""What `pip install` gives: everything of the package, in an environment that never saw the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The tools and the dependencies that are here already, since a test has no network.
OFFLINE = ["--no-deps", "--no-index", "--quiet"]
SCRIPT = """
import pathlib, sys
# As where Triton is not installed.
sys.modules["triton"] = None
import torch
import moq_hf
from moq_hf import MoQCallback, quantize_model, triton_quant
assert pathlib.Path(moq_hf.__file__).is_relative_to({site!r}), moq_hf.__file__
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
quantize_model(model, {{"quantizer_kernel": True, "quantize_bits": {{"start_bits": 4, "target_bits": 4}}}})
assert "bits=4" in repr(model) and not triton_quant.available(torch.device("cpu"))
print(MoQCallback("w4").config.bits)
"""


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "moq_hf", source / "moq_hf", ignore=shutil.ignore_patterns("__pycache__", "*ruff*"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--no-build-isolation", *OFFLINE, "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "environment"
    venv.create(home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # A path in a .pth file brings the dependencies, and not the .pth file of this checkout.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, f"--python={home / 'bin' / 'python'}", "install", *OFFLINE, wheel, cwd=tmp_path)
    installed = {path.relative_to(site) for path in (site / "moq_hf").rglob("*") if "__pycache__" not in path.parts}
    assert installed == {path.relative_to(source) for path in (source / "moq_hf").rglob("*")}
    assert run(home / "bin" / "python", "-W", "error", "-c", SCRIPT.format(site=str(site)), cwd=tmp_path) == "4\n"
    assert run(home / "bin" / "moq-hf", "--version", cwd=tmp_path).startswith("moq_hf 0.2")
    assert "every block" in run(home / "bin" / "moq-hf", "plan", "w4", "--max_steps", "345", cwd=tmp_path)
