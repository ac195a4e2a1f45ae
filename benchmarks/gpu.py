"""One command that tries and measures moq_hf on one GPU, and never stops at the first failure.

    python benchmarks/gpu.py

Needs a checkout, PyTorch, Triton and transformers; no network and no data. What is missing is said up front, and leaves
out the sections that need it. Each section is a process of its own, so that neither a crash nor a hang of one harms the
next. The JSON is written after each of them. What does not fit into `--seconds` is noted as not run.

`--small` is the rehearsal: it runs the same sections at reduced sizes on a CPU, the kernel in Triton's interpreter. It
shows that the script works, and its times mean nothing. `--report` prints the table of the JSON.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ("torch", "triton", "numpy")
TRAINING = (*KERNELS, "transformers", "accelerate", "safetensors", "pydantic", "psutil")
# Names of imports, where they are not those of the packages.
MODULES = {"pytest-xdist": "xdist", "compressed-tensors": "compressed_tensors"}
OPTIONAL = ("pytest", "hypothesis", "pytest-xdist", "compressed-tensors", "scipy")
# A section with less time than this is not begun.
LEAST = 10.0
# Lines of an error that are kept.
LINES = 12


class Report:
    """What a section found, kept in a file at once: what was measured before a crash counts.

    Args:
        path: Of the file.
        small: Whether sizes are reduced.
        limit: Seconds that the section has.
    """

    def __init__(self, path: Path, small: bool = False, limit: float = math.inf) -> None:
        self.path, self.small, self.limit = path, small, limit
        self.began = time.monotonic()
        self.found: dict[str, Any] = {"status": "stopped", "figures": [], "details": {}}

    @property
    def left(self) -> float:
        """Seconds that the section still has."""
        return self.limit - (time.monotonic() - self.began)

    def figure(
        self,
        what: str,
        value: Any,
        unit: str = "",
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        equal: Any = None,
        timed: bool = False,
    ) -> None:
        """A row of the table.

        Args:
            what: Was measured.
            value: What came out.
            unit: Of it.
            at_most: The goal.
            at_least: The goal.
            equal: The goal.
            timed: Whether it depends on the machine's speed: at reduced sizes it reaches nothing.
        """
        goal, reached = "", None
        if at_most is not None:
            goal, reached = f"at most {at_most:g}", value <= at_most
        elif at_least is not None:
            goal, reached = f"at least {at_least:g}", value >= at_least
        elif equal is not None:
            goal, reached = shown(equal), value == equal
        if timed and self.small:
            reached = None
        row = {"what": what, "value": value, "unit": unit, "goal": goal, "reached": reached, "timed": timed}
        self.found["figures"].append(row)
        verdict = "" if reached is None else ", reached" if reached else ", NOT reached"
        print(f"  {what}: {shown(value, unit)}" + (f" (goal: {goal}{verdict})" if goal else ""), flush=True)
        self.save()

    def detail(self, name: str, value: Any) -> None:
        """What is in the JSON only."""
        self.found["details"][name] = value
        self.save()

    def save(self) -> None:
        """Write it all, whole or not at all."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found), encoding="utf-8")
        part.replace(self.path)


class Section(NamedTuple):
    """A part of the run.

    Attributes:
        name: In the JSON and for `--only`.
        needs: Packages without which it is left out.
        limit: Seconds that it may take.
        run: What it does.
    """

    name: str
    needs: Sequence[str]
    limit: float
    run: Callable[[Report], None]


def lazy(module: str, name: str) -> Callable[[Report], None]:
    """A function that is imported when it is called: what it imports may be missing."""
    return lambda report: getattr(importlib.import_module(module), name)(report)


# Those that say most come first: the time may not be enough for all.
SECTIONS = [
    Section("self-test", KERNELS, 90, lazy("gpu_kernels", "self_test")),
    Section("bit equality", KERNELS, 90, lazy("gpu_kernels", "bit_equality")),
    Section("bandwidth", KERNELS, 60, lazy("gpu_kernels", "bandwidth")),
    Section("search", KERNELS, 40, lazy("gpu_inputs", "search")),
    Section("inputs", TRAINING, 40, lazy("gpu_inputs", "inputs")),
    Section("steps", TRAINING, 110, lazy("gpu_steps", "steps")),
    Section("language model", TRAINING, 60, lazy("gpu_steps", "language_model")),
    Section("memory", TRAINING, 40, lazy("gpu_steps", "memory")),
    Section("compiled steps", TRAINING, 150, lazy("gpu_steps", "compiled")),
    Section("tests", (*TRAINING, "pytest", "hypothesis"), 120, lazy("gpu_tests", "run")),
    Section("fp16 overflow", TRAINING, 40, lazy("gpu_training", "overflow")),
    Section("torch.compile", TRAINING, 60, lazy("gpu_training", "compiled")),
    Section("delivery", (*TRAINING, "compressed-tensors"), 40, lazy("gpu_training", "delivery")),
    Section("one rank", TRAINING, 40, lazy("gpu_training", "one_rank")),
    Section("resume", TRAINING, 60, lazy("gpu_training", "resume")),
    Section("eigenvalues", TRAINING, 60, lazy("gpu_training", "eigenvalues")),
    Section("whole compiled", TRAINING, 240, lazy("gpu_steps", "whole")),
]


def libraries() -> dict[str, str | None]:
    """The version of each package that a section may need; None where it is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in dict.fromkeys((*TRAINING, *OPTIONAL)):
        there = importlib.util.find_spec(MODULES.get(name, name)) is not None
        found[name] = None
        if there:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
            found[name] = found[name] or "unknown version"
    return found


def broken() -> dict[str, str]:
    """Why which of the packages for training cannot be imported, as one that is for another Python."""

    def look(report: Report) -> None:
        for name in TRAINING:
            try:
                importlib.import_module(name)
            except Exception as error:
                report.detail(name, f"{type(error).__name__}: {error}")

    return dict(forked(Section("libraries", (), 120, look), 120)["details"])


def told(found: dict[str, str | None], sections: Sequence[Section]) -> list[str]:
    """What is there, what is missing, and which sections that leaves out."""
    lines = ["found: " + ", ".join(f"{name} {version}" for name, version in found.items() if version)]
    for name in (name for name, version in found.items() if version is None):
        without = [section.name for section in sections if name in section.needs]
        lines.append(f"missing: {name}; " + (f"not run: {', '.join(without)}" if without else "no section needs it"))
    if None in found.values():
        lines.append("a folder that has what is missing may be given: PYTHONPATH=FOLDER make gpu")
    return lines


def use_checkout(whole: bool) -> None:
    """Import moq_hf from the checkout.

    Args:
        whole: False where libraries are missing that only configs and training need: its modules can be imported, its
            public names cannot.
    """
    for folder in (str(ROOT / "benchmarks"), str(ROOT)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    # Processes that are started find it too.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if not whole:
        package = types.ModuleType("moq_hf")
        package.__path__ = [str(ROOT / "moq_hf")]
        sys.modules["moq_hf"] = package


def forked(section: Section, limit: float, small: bool = False) -> dict[str, Any]:
    """Run a section in a process of its own, which is ended when its time is over.

    Returns:
        `status` is "ok", "failed" or "not measured", with the error's last lines; `figures`, `details` and `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Report(Path(folder, "found.json"), small, limit)
        report.save()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, those of libraries that wait for work too.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _be(section, report)
        code = _wait(child, limit)
        seconds = time.monotonic() - report.began
        found: dict[str, Any] = json.loads(report.path.read_text(encoding="utf-8"))
    if found["status"] == "stopped":
        why = f"its {limit:.0f} s were over" if code is None else f"the process ended with {code}"
        found = {"status": "not measured" if code is None else "failed", "error": why, **without(found, "status")}
    return {**found, "seconds": round(seconds, 1)}


def without(mapping: dict[str, Any], *names: str) -> dict[str, Any]:
    """A mapping without some of its keys."""
    return {name: value for name, value in mapping.items() if name not in names}


def _be(section: Section, report: Report) -> None:
    """The section's process, from which there is no return."""
    try:
        # What it starts is ended with it.
        os.setsid()
        section.run(report)
        report.found["status"] = "ok"
    except BaseException:
        lines = traceback.format_exc().strip().splitlines()
        print("\n".join(lines), file=sys.stderr, flush=True)
        report.found |= {"status": "failed", "error": "\n".join(map(without_folders, lines[-LINES:]))}
    finally:
        with contextlib.suppress(BaseException):
            report.save()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait(child: int, limit: float) -> int | None:
    """The exit code of a process, negative for a signal; None if it was ended because its time was over."""
    end = time.monotonic() + limit
    code = None
    try:
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.02)
    finally:
        # After an interrupt too, which reaches no process of another session.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return code


def without_folders(line: str) -> str:
    """Text with the folders of this machine left out of its paths."""
    return re.sub(r"(?<![\w.:/])(?:\.\.)?/(?:[\w.@+-]+/)+", "", line)


class Run:
    """All sections, one after the other, and the document that holds what they found.

    Args:
        sections: What to run.
        found: Versions, as `libraries` gives them.
        out: The JSON.
        seconds: For all of them together.
        small: Whether sizes are reduced.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        found: dict[str, str | None],
        out: Path,
        seconds: float,
        small: bool = False,
    ) -> None:
        self.sections, self.out, self.seconds, self.small = sections, out, seconds, small
        self.end = time.monotonic() + seconds
        self.document: dict[str, Any] = {
            "command": " ".join(["python", "benchmarks/gpu.py", *map(without_folders, sys.argv[1:])]),
            "small": small,
            "times_mean_something": not small,
            "seconds_allowed": seconds,
            "versions": {name: version for name, version in found.items() if version},
            "missing": [name for name, version in found.items() if version is None],
            "device": None,
            "sections": {},
        }

    def __call__(self) -> dict[str, Any]:
        """Run them; the document is written after each."""
        began = time.monotonic()
        for section in self.sections:
            print(f"== {section.name}", flush=True)
            result = self._one(section)
            if "error" in result or "reason" in result:
                print(f"  {result['status']}: {result.get('reason') or result['error'].splitlines()[-1]}", flush=True)
            self.document["sections"][section.name] = result
            self.document["seconds"] = round(time.monotonic() - began, 1)
            self.write()
        return self.document

    def _one(self, section: Section) -> dict[str, Any]:
        lacking = [name for name in section.needs if name in self.document["missing"]]
        left = self.end - time.monotonic()
        if lacking:
            return {"status": "not run", "reason": f"missing: {', '.join(lacking)}"}
        if left < LEAST:
            return {"status": "not run", "reason": "time"}
        return forked(section, min(section.limit, left), self.small)

    def write(self) -> None:
        """The document, whole or as it was."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.out)


def shown(value: float | bool, unit: str = "") -> str:
    """A value with its unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"
    return f"{text} {unit}".strip()


def table(document: dict[str, Any]) -> str:
    """What a run found, in Markdown: a row for each figure, and one for each section that failed or was not run."""
    rows = ["| section | what | measured | goal | reached |", "| --- | --- | --- | --- | --- |"]
    for name, section in document["sections"].items():
        for row in section.get("figures", []):
            reached = {True: "yes", False: "**no**", None: ""}[row["reached"]]
            # A time without meaning is not shown.
            value = "(ran)" if document["small"] and row["timed"] else shown(row["value"], row["unit"])
            rows.append(f"| {name} | {row['what']} | {value} | {row['goal']} | {reached} |")
        if section["status"] != "ok":
            why = section.get("reason") or section["error"].splitlines()[-1]
            rows.append(f"| {name} | {section['status']}: {why.replace('|', '/')} |  |  |  |")
    return "\n".join(rows)


def heading(document: dict[str, Any]) -> str:
    """What was run, on what."""
    device = document["device"] or {"name": "no CUDA device"}
    versions = document["versions"]
    words = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions)
    rehearsal = " A rehearsal: reduced sizes on a CPU, the kernel in Triton's interpreter; the times mean nothing."
    note = rehearsal if document["small"] else ""
    return f"{device['name']}; {words}; {document.get('seconds', 0):.0f} s.{note}"


def find_device(report: Report) -> None:
    """The CUDA device; also whether processes can use it that are forked from one with the libraries loaded."""
    preload()

    def look(report: Report) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        torch.zeros(1, device="cuda")
        properties = torch.cuda.get_device_properties(0)
        report.detail("name", properties.name)
        report.detail("memory_gb", round(properties.total_memory / 1e9, 1))
        report.detail("capability", f"{properties.major}.{properties.minor}")
        report.detail("multiprocessors", properties.multi_processor_count)
        report.detail("cuda", torch.version.cuda)
        report.detail("free_gb", round(torch.cuda.mem_get_info()[0] / 1e9, 1))
        report.detail("state", state())

    def look_forked(report: Report) -> None:
        # A library that begins to use the device when it is imported leaves no process forked that could.
        with contextlib.suppress(RuntimeError):
            look(report)

    found = forked(Section("device", (), 60, look_forked), 60)
    report.found["details"] = {**found["details"], "forks": True}
    if "name" not in found["details"]:
        look(report)
        report.detail("forks", False)


def what_compilers_need() -> list[str]:
    """What is missing that Triton compiles its launcher with, each as a line."""
    lines = []
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        lines.append("missing: a C compiler, with which Triton builds its launcher; set CC")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lines.append("missing: Python.h, the headers of this Python, which Triton's launcher includes")
    return lines


def state() -> str:
    """The driver, clocks, power limit and temperature, in the words of nvidia-smi."""
    fields = "driver_version,clocks.sm,clocks.mem,power.limit,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return "nvidia-smi does not answer"


def preload() -> None:
    """Import what takes seconds, and touches no device; what cannot be imported fails where it is needed."""
    for name in ("numpy", "torch", "triton", "transformers", "moq_hf.triton_quant", "moq_hf.trainer", "gpu_steps"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="for all sections together")
    parser.add_argument("--small", action="store_true", help="the rehearsal: reduced sizes on a CPU, without a GPU")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], metavar="SECTION")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: gpu.json, or gpu_small.json, in benchmarks/results; with --only in the temporary folder",
    )
    parser.add_argument("--report", action="store_true", help="print the table of the JSON, run nothing")
    args = parser.parse_args()
    whole = "gpu_small.json" if args.small else "gpu.json"
    # A part must not take the place of the whole.
    args.out = args.out or (Path(tempfile.gettempdir(), "gpu_only.json") if args.only else RESULTS / whole)
    if args.small and args.out.resolve() == RESULTS / "gpu.json":
        parser.error("gpu.json is for what a GPU has run")
    return args


def main() -> int:
    """Run all sections, or print the table; 1 if something failed or a goal was not reached."""
    args = arguments()
    if args.report:
        document = json.loads(args.out.read_text(encoding="utf-8"))
        print(f"{heading(document)}\n\n{table(document)}")
        return 0
    # Read when the libraries are imported. With NVML, asking whether there is a device does not begin to use it.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.small:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    # With several devices the Trainer would wrap the model in DataParallel.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    sections = [section for section in SECTIONS if not args.only or section.name in args.only]
    found = libraries()
    for name, why in broken().items():
        if found[name]:
            print(f"{name} {found[name]} cannot be imported: {without_folders(why)}")
            found[name] = None
    print("\n".join([*told(found, sections), *([] if args.small else what_compilers_need())]), flush=True)
    if found["torch"] is None:
        raise SystemExit("PyTorch is missing: nothing can be run")
    use_checkout(whole=all(found[name] for name in TRAINING))
    run = Run(sections, found, args.out, args.seconds, args.small)
    if not args.small:
        # A process of its own: this one must not begin to use the device, since others are forked from it.
        device = forked(Section("device", (), 120, find_device), 120)
        if "name" not in device["details"]:
            print(device.get("error", ""), file=sys.stderr)
            raise SystemExit("there is no CUDA device; `--small` runs reduced sizes on a CPU, to try the script")
        run.document["device"] = device["details"]
    if args.small or run.document["device"]["forks"]:
        preload()
    document = run()
    print(f"\n{heading(document)}\n\n{table(document)}\n\nwritten to {args.out}")
    rows = [row for section in document["sections"].values() for row in section.get("figures", [])]
    bad = [name for name, section in document["sections"].items() if section["status"] == "failed"]
    return int(bool(bad) or any(row["reached"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
