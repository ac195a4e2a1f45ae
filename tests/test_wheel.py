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
import json, pathlib, sys
# As where Triton is not installed.
sys.modules["triton"] = None
import torch
import moq_hf
from moq_hf import MoQCallback, quantize_model, triton_launch
assert pathlib.Path(moq_hf.__file__).is_relative_to({site!r}), moq_hf.__file__
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
quantize_model(model, {{"quantizer_kernel": True, "quantize_bits": {{"start_bits": 4, "target_bits": 4}}}})
assert "bits=4" in repr(model) and not triton_launch.available(torch.device("cpu"))
from moq_hf.config import PRESETS
for name in PRESETS:
    preset = pathlib.Path(moq_hf.__file__).with_name("presets") / f"{{name}}.json"
    assert (preset.parent / json.loads(preset.read_text())["$schema"]).is_file(), preset
    moq_hf.MoQConfig.load(name)

import transformers as hf
sizes = {{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}}
model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=40, **sizes))
rows = [{{"input_ids": [5 + row, 6, 7, 8], "labels": row % 2}} for row in range(16)]
args = hf.TrainingArguments("runs", max_steps=4, use_cpu=True, disable_tqdm=True, report_to=[], save_strategy="no")
hf.Trainer(model, args, train_dataset=rows, callbacks=[MoQCallback("w4")]).train()
again = hf.AutoModelForSequenceClassification.from_pretrained("runs/quantized")
batch = {{"input_ids": torch.tensor([[5, 6, 7, 8]])}}
print("answers are equal:", torch.equal(again(**batch).logits, model.eval()(**batch).logits))
"""


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Made of the source archive, as `python -m build` does it."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "moq_hf", checkout / "moq_hf", ignore=shutil.ignore_patterns("__pycache__", "*ruff*"))
    (checkout / "tests").mkdir()
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tests/test_wheel.py"):
        shutil.copy(ROOT / name, checkout / name)
    make = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    made = run(sys.executable, "-c", make, cwd=checkout).splitlines()[-1]
    shutil.unpack_archive(checkout / "dist" / made, tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    assert not (source / "tests").exists()
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
    assert installed == {path.relative_to(checkout) for path in (checkout / "moq_hf").rglob("*")}
    # What `twine check` asks for.
    (metadata,) = site.glob("moq_hf-*.dist-info/METADATA")
    head, _, description = metadata.read_text(encoding="utf-8").partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head and description == (ROOT / "README.md").read_text("utf-8")
    told = run(home / "bin" / "python", "-c", SCRIPT.format(site=str(site)), cwd=tmp_path)
    assert told.endswith("answers are equal: True\n")
    assert run(home / "bin" / "moq-hf", "--version", cwd=tmp_path).startswith("moq_hf 0.3")
    told = run(home / "bin" / "moq-hf", "plan", "w4", "--max_steps", "345", cwd=tmp_path)
    assert told == "345 optimizer steps at 4 bits\n"
