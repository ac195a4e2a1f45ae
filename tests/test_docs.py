"""The documentation is true: its commands run, its Python runs and prints what it says, its site builds.

Commands, those of `bash` and `sh` blocks and those between backticks, are run in a folder that has the files of the
repository. A command of scripts/run_glue_moq.py is cut short by arguments added to it, and what it would take from the
Hub is replaced by a tiny model and generated rows; all that it names in the repository must be there. Targets of make
are what CI runs, or have a test here.
"""

import ast
import configparser
import copy
import inspect
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import config_reference
import programs
import pytest
import sentences
import tiny_glue
import tiny_runs
import transformers as hf
import yaml
from accelerate.commands.launch import launch_command_parser as accelerate_parser
from datasets import Dataset, load_dataset
from hub_folders import make_hub
from made_run import make_run
from repo import ROOT
from tiny_glue import quiet_logging
from torch.distributed.run import get_args_parser as torchrun_parser

import moq_hf
from moq_hf import MoQCallback, MoQError, cli, quantize_model, save_quantized, verify_quantized

__all__ = ["quiet_logging"]
pytestmark = pytest.mark.usefixtures("quiet_logging")

PATTERNS = ("*.md", "docs/**/*.md", "configs/README.md", "examples/**/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
INSPECT = "moq-hf inspect runs/mrpc/quantized"
EXPORT = "moq-hf export runs/mrpc/quantized --to onnx runs/mrpc-onnx --task_name mrpc --validation_file data/mrpc.jsonl"
HUB = "moq-hf export runs/mrpc/quantized --to onnx runs/mrpc-hub --names hub"
VERIFY = "moq-hf verify runs/mrpc/quantized"
FILES = "python benchmarks/deployed_files.py runs/mrpc/quantized --task_name mrpc --validation_file data/mrpc.jsonl"
SPEEDS = "python benchmarks/served_inputs.py --model all-mpnet-base-v2 --train_file train.jsonl"
PACK = "moq-hf pack runs/mrpc/checkpoint-345 runs/mrpc-packed"
MIGRATE = "moq-hf migrate ds.json --max_steps 345 --out moq.json"
EMBEDDINGS = (
    "python scripts/quantize_embeddings.py --model sentence-transformers/all-MiniLM-L6-v2 --texts texts.txt --bits 4 "
    "--output_dir runs/embeddings"
)
GGUF = "moq-hf export runs/chat/quantized --to gguf runs/chat.gguf --converter convert_hf_to_gguf.py"
MLX = "moq-hf export runs/chat/quantized --to mlx runs/chat-mlx"
WHEEL = "test_the_wheel_works_in_an_empty_environment in test_wheel.py"
EXAMPLES = "test_an_example_runs in test_examples.py"
# Where the commands are run that need a test of their own.
RUN_BY = {
    "make demo": "test_make_demo",
    "python scripts/run_glue_moq.py examples/demo/demo.json": "test_make_demo",
    "make test": "test_ci_runs_make_test_and_that_checks",
    "make check": "test_ci_runs_make_test_and_that_checks",
    "make bench": "test_make_bench",
    "make gpu": "test_make_gpu",
    "make gpu GPU=--small": "test_make_gpu",
    "make ptx PTX=<folder>": "test_make_ptx",
    "python scripts/config_reference.py": "test_the_schema_and_the_table_of_keys_are_up_to_date",
    "python -m mkdocs serve": "test_the_site",
    "python benchmarks/results_page.py": "test_the_tables_are_those_of_the_committed_results in test_evidence.py",
    VERIFY: "test_python_blocks",
    INSPECT: "test_python_blocks",
    EXPORT: "test_python_blocks",
    HUB: "test_the_names_that_others_look_for in export/test_onnx.py",
    PACK: "test_pack_command",
    GGUF: "test_one_command_runs_the_converter in export/test_gguf.py",
    MLX: "test_every_weight_is_that_of_the_checkpoint in export/test_mlx.py",
    MIGRATE: "test_migrate_command",
    SPEEDS: "test_files_take_turns in scripts/test_served_inputs.py",
    FILES: "test_every_engine_and_its_answers in scripts/test_deployed_files.py",
    "pip install '.[glue]'": "test_the_extras",
    f"pip install 'dist/moq_hf-{moq_hf.__version__}-py3-none-any.whl[glue]'": WHEEL,
    "python -m build": WHEEL,
    "python benchmarks/versions.py neighbors": "test_the_tables_are_those_of_the_committed_results in test_evidence.py",
    "pip install '.[docs]'": "test_the_extras",
    "pip install '.[embeddings]'": "test_the_extras",
    EMBEDDINGS: "test_a_whole_run in scripts/test_quantize_embeddings.py",
    "pip install . trl datasets": "test_the_extras",
    "python examples/trl_sft.py --small": EXAMPLES,
    "python examples/sentence_transformers_w4.py --small": EXAMPLES,
    "python examples/w8a8_onnx.py --small": EXAMPLES,
    "python examples/to_mlx.py --small": EXAMPLES,
    "python examples/sft/train.py --output_dir runs/sft": "test_the_sft_example",
    "python examples/sft/generate.py runs/sft/quantized": "test_the_sft_example",
    "python examples/sft/generate_vllm.py runs/sft/quantized": "test_the_sft_example",
    "python examples/sft/generate_gguf.py runs/sft/model-q4_0.gguf": "test_the_sft_example",
}
# What is added to the command line of a program, so that it ends soon and writes to the test's folder. The last of two
# values of an argument counts.
ADDED = {
    "docs/make_figures.py": ["--out", "img"],
    "benchmarks/step_time.py": shlex.split(
        "--batch 1 --sequence 8 --layers 1 --vocabulary 1100 --repeats 2 --out step_time.json"
    ),
    "benchmarks/host_operations.py": shlex.split("--layers 1 --repeats 2 --out host_operations.json"),
    "benchmarks/glue_study.py": ["--list"],
    "benchmarks/perplexity.py": ["--report"],
    "benchmarks/language_models.py": ["--report"],
    "benchmarks/sizes.py": shlex.split("--models all-MiniLM-L6-v2 --bits 4 --out sizes.json"),
}


class Block(NamedTuple):
    """A fenced block of a page, with the output that stands below it."""

    page: Path
    line: int
    language: str
    text: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, those of tabs too. A `text` block right below another one is its output."""
    source = page.read_text(encoding="utf-8")
    fences = list(re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", source, re.MULTILINE | re.DOTALL))
    found = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        adjacent = following is not None and not source[fence.end() : following.start()].strip()
        output = (
            textwrap.dedent(following[3]) if following is not None and adjacent and following[2] == "text" else None
        )
        line = source.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[2], textwrap.dedent(fence[3]), output))
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, continued lines joined and blanks made single."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SCRIPT = "python scripts/run_glue_moq.py "
LAUNCHERS = ("torchrun ", "accelerate launch ")


def all_commands() -> list[str]:
    """Each command of the pages once."""
    found = [command for block in BLOCKS if block.language in ("bash", "sh") for command in commands_of(block)]
    for page in PAGES:
        found += re.findall(r"`((?:make|pip|python|\.venv/bin/python) [^`\n]+)`", page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))


COMMANDS = all_commands()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the repository's folders as links, where commands may write beside them."""
    for name in ("configs", "docs", "examples", "moq_hf", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_blocks_have_a_known_language() -> None:
    known = ("bash", "sh", "python", "json", "js", "text", "yaml")
    assert [str(block) for block in BLOCKS if block.language not in known] == []


def test_every_command_is_run() -> None:
    assert [
        c
        for c in COMMANDS
        if c not in RUN_BY and not c.startswith(("python ", ".venv/bin/python ", "moq-hf ", *LAUNCHERS))
    ] == []
    for name, _, file in (place.partition(" in ") for place in RUN_BY.values()):
        assert name in globals() or f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_ci_runs_make_test_and_that_checks() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert re.findall(r"^make .*?(?= *<|$)", script.read_text(), re.MULTILINE) == ["make test"]
    assert re.search(r"^test:.*\bcheck\b", (ROOT / "Makefile").read_text(), re.MULTILINE)


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run make with this Python in the place of its virtual environment, without making one."""
    command = ["make", "--old-file=.venv/.installed", f"PY={sys.executable}", *arguments]
    # Inside `make test` these would tell the inner make of the outer one's options.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(command, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_make_demo(checkout: Path) -> None:
    (checkout / "Makefile").symlink_to(ROOT / "Makefile")
    done = make("demo", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    results = json.loads((checkout / "runs" / "demo" / "eval_results.json").read_text())
    assert results["eval_accuracy"] > 0.85
    state = json.loads((checkout / "runs" / "demo" / "trainer_state.json").read_text())
    config = json.loads((ROOT / arguments_of("examples/demo/demo.json")["moq_config"]).read_text())
    bits = {name: value for entry in state["log_history"] for name, value in entry.items() if "moq/bits/" in name}
    assert set(bits.values()) == {config["bits"]}
    # It ends with scores to judge, the size, and what to do with the model.
    last = done.stdout.partition("sst2, validation (800 examples)\n")[2].splitlines()
    assert [line.split()[0] for line in last[:3]] == ["accuracy", "float", "moq_hf,"] and last[2].endswith(" MB")
    assert [line.partition(": ")[0] for line in last[4:]] == ["Verified", "Load it", "Deploy", "Report"]


def made(target: str, scripts: dict[str, str], *words: str, folder: Path) -> str:
    """What make prints of a target where the benchmarks are these scripts."""
    (folder / "Makefile").symlink_to(ROOT / "Makefile")
    (folder / "benchmarks").mkdir()
    for name, text in scripts.items():
        (folder / "benchmarks" / f"{name}.py").write_text(text)
    done = make(target, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_bench(tmp_path: Path) -> None:
    scripts = {name: f"print('ran {name}')" for name in ("first", "second")}
    told = made("bench", scripts, "MEASUREMENTS=first second", folder=tmp_path)
    assert "ran first" in told and "ran second" in told
    (listed,) = re.findall(r"^MEASUREMENTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in listed.split() if not (ROOT / "benchmarks" / f"{name}.py").exists()] == []


def test_make_gpu(tmp_path: Path) -> None:
    """With the Python that is there and the arguments that are given; test_gpu_script.py has what it runs."""
    script = "import os, sys; print(sys.argv[1:], os.environ['PYTHONPATH'])"
    told = made("gpu", {"gpu": script}, f"PYTHON={sys.executable}", "GPU=--small", folder=tmp_path)
    assert "['--small']" in told and str(tmp_path) in told


def test_make_ptx(tmp_path: Path) -> None:
    for given in ((), (f"PTX={tmp_path}",)):
        done = make("ptx", *given, cwd=ROOT)
        assert done.returncode != 0
        assert done.stdout == (
            "make ptx needs an interpreter of PTX, in a folder with its emu_plugin.py: make ptx PTX=<folder>\n"
        )
    plugin = "def pytest_cmdline_main(config):\n    print('asked for', *config.args)\n    return 0\n"
    (tmp_path / "emu_plugin.py").write_text(plugin)
    done = make("ptx", f"PTX={tmp_path}", cwd=ROOT)
    assert done.returncode == 0 and done.stdout == "asked for tests/test_triton_quant.py\n", done.stderr


def test_the_extras() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    installed = set(re.findall(r"\[(\w+)\]'", "\n".join(COMMANDS)))
    assert {"docs", "embeddings", "glue"} <= installed <= set(setup["options.extras_require"])


@pytest.mark.slow
def test_the_sft_example(checkout: Path) -> None:
    """Its last step is the second command, which the first one runs. The others need vLLM and llama.cpp."""
    pytest.importorskip("trl")
    words = ("examples/sft/train.py", "--output_dir", "runs/sft", "--max_steps", "20")
    done = programs.run(*words, cwd=checkout, timeout=900, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "Verified: loaded with plain transformers, the saved model gives identical outputs" in done.stdout
    assert "GGUF: left out" in done.stdout and "of 48 answers are right; moq_hf is imported: False" in done.stdout


def test_migrate_command(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guide" / "deepspeed.md"
    (shown,) = (block.text for block in blocks_of(page) if "quantize_training" in block.text)
    document = next(node for node in ast.walk(ast.parse(shown)) if isinstance(node, ast.Dict))
    with chdir(tmp_path):
        Path("ds.json").write_text(json.dumps(ast.literal_eval(document)))
        assert cli.main(shlex.split(MIGRATE)[1:]) == 0
        assert moq_hf.plan("moq.json", 345).reached


def test_pack_command(tmp_path: Path) -> None:
    """What it packs is compared in test_pack.py."""
    run = tmp_path / "runs" / "mrpc"
    tiny_runs.moq(run, save_strategy="steps", save_steps=12, max_steps=12).train()
    (run / "checkpoint-12").rename(run / "checkpoint-345")
    with chdir(tmp_path):
        assert cli.main(shlex.split(PACK)[1:]) == 0
        verify_quantized("runs/mrpc-packed")


def arguments_of(path: str) -> dict[str, object]:
    return json.loads((ROOT / path).read_text())


def test_the_schema_and_the_table_of_keys_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / config_reference.PAGE).read_text(encoding="utf-8")
    assert page.count("<!-- keys -->\n") == page.count("<!-- end of keys -->\n") == 1
    for path in (config_reference.PAGE, *config_reference.SCHEMAS):
        (tmp_path / path).parent.mkdir(parents=True)
    table = config_reference.key_table()
    (tmp_path / config_reference.PAGE).write_text(page.replace(table, "| stale |"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config_reference.main()
    for path in (config_reference.PAGE, *config_reference.SCHEMAS):
        renew = "renew it, at the root of the repository, with: python scripts/config_reference.py"
        assert (ROOT / path).read_text(encoding="utf-8") == (tmp_path / path).read_text(encoding="utf-8"), renew


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moq-hf ") and c not in RUN_BY])
def test_moq_hf_commands(command: str, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "report" and (ROOT / words[1]).is_dir() and not words[1].startswith("runs/"):
        shutil.copytree(ROOT / words[1], checkout / words[1])
    elif words[0] == "report":
        make_run(checkout / words[1])
    with chdir(checkout):
        assert cli.main(words) == 0
    told = capsys.readouterr().out
    for block in BLOCKS:
        if block.output is not None and block.language == "bash" and commands_of(block) == [command]:
            assert told == block.output, str(block)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in RUN_BY and not c.startswith((SCRIPT, "moq-hf ", *LAUNCHERS))]
)
def test_other_commands(command: str, tmp_path: Path) -> None:
    program, *words = shlex.split(command)
    assert program in ("python", ".venv/bin/python")
    folder = tmp_path
    if words[:2] == ["-m", "pytest"]:
        # The tests that are named must be there; they run with all the others.
        words += ["--collect-only", "--quiet", *programs.NESTED]
        folder = ROOT
    else:
        words += ADDED[words[0]]
        words[0] = str(ROOT / words[0])
    if "--model_name_or_path" in words:
        words[words.index("--model_name_or_path") + 1] = str(tiny_model(tmp_path / "tiny", vocab_size=1100))
    done = programs.run(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def without_launcher(command: str) -> str:
    """The script and its arguments, as the launcher's own parser finds them."""
    parsers = {"torchrun": torchrun_parser, "accelerate": accelerate_parser}
    words = shlex.split(command.replace("accelerate launch", "accelerate"))
    parsed = parsers[words[0]]().parse_args(words[1:])
    return f"python {parsed.training_script} {shlex.join(parsed.training_script_args)}"


SCRIPT_COMMANDS = [c for c in COMMANDS if c.startswith(SCRIPT)]
# Launching is what tests/test_processes.py does; the script takes the same arguments here, in one process.
SCRIPT_COMMANDS += {without_launcher(c) for c in COMMANDS if c.startswith(LAUNCHERS)}
SCRIPT_COMMANDS = sorted({*SCRIPT_COMMANDS} - {*RUN_BY})


@pytest.mark.parametrize("command", SCRIPT_COMMANDS)
def test_script_commands(command: str, checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[2:]
    if len(words) == 1:
        words = tiny_glue.words_of(arguments_of(words[0]))
    # Both `--name value` and `--name=value`; a switch has the next name as its value here, which nothing reads.
    given = {first.removeprefix("--"): second for first, second in itertools.pairwise(words)}
    given |= dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    named = [value for value in given.values() if re.match(r"(configs|examples|scripts|docs)/", value)]
    assert [path for path in named if not (ROOT / path).exists()] == []

    short: dict[str, object] = {"max_train_samples": 16, "max_eval_samples": 8, "max_steps": 3, "use_cpu": "true"}
    short |= {"per_device_train_batch_size": 4, "output_dir": "out", "disable_tqdm": "true"}
    if "moq_config" in given:
        with chdir(checkout):
            # Half of the steps are the float phase's.
            short["max_steps"] = steps_to_reach(given["moq_config"]) * (2 if "float_first" in given else 1)
    source = given.get("model_name_or_path", given.get("teacher_name_or_path", ""))
    if "config_name" not in given and not (ROOT / source).is_dir():
        names = tiny_glue.TASKS[given["task_name"]].labels if given.get("teacher_name_or_path") else ()
        named = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}} if names else {}
        model = tiny_model(checkout / "tiny", **named)
        taken = [name for name in ("model_name_or_path", "teacher_name_or_path") if name in given]
        short |= {**dict.fromkeys(taken, model), "ignore_mismatched_sizes": "true"}
    if "train_file" not in given:
        short |= tiny_files(given["task_name"], checkout)
    with chdir(checkout):
        code = tiny_glue.main([*words, *tiny_glue.words_of(short)])
    assert code == 0, capfd.readouterr().err
    assert (checkout / "out" / "trainer_state.json").is_file()


def steps_to_reach(config: str) -> int:
    """A short run in which every block reaches its target."""
    for steps in (4, 8, 16, 32, 64, 128, 256, 512):
        with suppress(MoQError):
            if moq_hf.plan(config, steps).reached:
                return steps
    raise AssertionError(f"{config} reaches its target in no short run")


def tiny_model(folder: Path, **changed: object) -> Path:
    """A model in the place of one from the Hub."""
    tiny_glue.make_model(folder)
    config = hf.AutoConfig.from_pretrained(folder, **changed)
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def tiny_files(task: str, folder: Path) -> dict[str, str]:
    """Data in the place of a task's from the Hub."""
    names = ["train", "validation", "test"]
    if task == "mnli":
        names.append("validation_mismatched")
    rows = tiny_glue.make_rows(task, 16)
    return {f"{name}_file": tiny_glue.write_rows(folder / f"{name}.jsonl", rows) for name in names}


def a_language_model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tiny one, its tokenizer, and dialogues."""
    pytest.importorskip("trl")
    # It comes with warnings of its own.
    warnings.simplefilter("ignore")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "sft"))
    from dialogues import dialogues
    from train import new_model, new_tokenizer

    rows, _ = dialogues()
    tokenizer = new_tokenizer([message["content"] for row in rows for message in row["messages"]])
    return {"language_model": new_model(tokenizer), "tokenizer": tokenizer, "dialogues": Dataset.from_list(rows)}


def prepared(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a page's Python takes for granted: its reader's model, tokenizer, arguments and data."""
    if page.name == "language-models.md":
        made = a_language_model(monkeypatch)
        return {**made, "model": made["language_model"], "float_model": copy.deepcopy(made["language_model"])}
    if page.name == "embeddings.md":
        pytest.importorskip("sentence_transformers")
        warnings.simplefilter("ignore")
        encoder = sentences.encoder(Path())
        return {"encoder": encoder, "finished": copy.deepcopy(encoder), "texts": sentences.TEXTS * 8}
    tokenizer = hf.AutoTokenizer.from_pretrained("examples/demo/model")
    rows = load_dataset("json", data_files="examples/demo/train.jsonl", split="train[:32]")
    model = hf.AutoModelForSequenceClassification.from_config(hf.AutoConfig.from_pretrained("examples/demo/model"))
    if page.name == "train.md":
        model.save_pretrained("runs/float")
    if page.name == "deploy.md":
        save_quantized(quantize_model(copy.deepcopy(model), "w8"), "runs/mrpc/quantized", processing_class=tokenizer)
        Path("data").mkdir()
        tiny_glue.write_rows(Path("data/mrpc.jsonl"), tiny_glue.make_rows("mrpc", 4))
        assert cli.main(shlex.split(EXPORT)[1:]) == 0
    found = {
        "model": model,
        "tokenizer": tokenizer,
        "args": hf.TrainingArguments("runs", use_cpu=True, max_steps=20, disable_tqdm=True),
        "data": rows.map(lambda row: tokenizer(row["sentence"], truncation=True)),
    }
    if page == FIRST[0]:
        make_hub(Path(), ("sst2",))
        batch = tokenizer(rows["sentence"][:8], padding=True, return_tensors="pt")
        made = a_language_model(monkeypatch)
        for part in ("language_model", "tokenizer"):
            made[part].save_pretrained("Qwen/Qwen3-0.6B")
        from trl import SFTConfig

        sft_args = SFTConfig("runs/chat", max_steps=40, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True)
        of_texts = made["tokenizer"](["a b c d"] * 8, return_tensors="pt")
        found |= {"classifier": copy.deepcopy(model), "encoder": model, "batch": batch, "batches": [of_texts] * 16}
        found |= {name: made[name] for name in ("language_model", "dialogues")}
        found["sft_args"] = sft_args
    if page.name == "resume.md":
        found["trainer"] = tiny_runs.moq(Path("runs/mrpc"), save_strategy="steps", save_steps=6, max_steps=12)
        found["trainer"].train()
    return found


# What a new user sees first; the second learns its task.
FIRST = (ROOT / "README.md", ROOT / "docs" / "start" / "quick-start.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in FIRST))
        for page in dict.fromkeys(b.page for b in BLOCKS if b.language == "python")
    ],
    ids=lambda page: page.name,
)
def test_python_blocks(page: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    with chdir(checkout):
        namespace = prepared(page, monkeypatch)
        for block in blocks_of(page):
            if block.language != "python":
                continue
            printed = io.StringIO()
            # Lines before it keep the line numbers of the page in a traceback.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            with redirect_stdout(printed):
                exec(code, namespace)
            if block.output is not None:
                lines = [line for line in printed.getvalue().splitlines() if not line.startswith(("{", "\r"))]
                told, shown = ("\n".join(lines), block.output.removesuffix("\n"))
                if page == FIRST[0]:
                    # A tiny model stands in the place of the pretrained one.
                    told, shown = (re.sub(r"[\d,.]*\d", "#", re.sub(" +", " ", text)) for text in (told, shown))
                begins_later = shown.startswith("...\n")
                assert told.endswith(shown[4:]) if begins_later else told == shown, str(block)
        if page.name == "deploy.md":
            assert [cli.main(shlex.split(command)[1:]) for command in (VERIFY, INSPECT)] == [0, 0]
        if page == FIRST[1]:
            check_score(namespace["trainer"])


def check_score(trainer: Any) -> None:
    """Whether the run has learned what its delivered model was proven to compute; chance is 0.5."""
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, MoQCallback))
    assert callback.delivered.proof.agrees
    model = hf.AutoModelForSequenceClassification.from_pretrained(callback.delivered.path)
    plain = hf.Trainer(
        model,
        hf.TrainingArguments("plain", use_cpu=True, report_to=[], disable_tqdm=True),
        eval_dataset=trainer.eval_dataset,
        processing_class=trainer.processing_class,
        compute_metrics=trainer.compute_metrics,
    )
    assert plain.evaluate()["eval_accuracy"] > 0.9


def test_the_api_page_has_every_public_name() -> None:
    source = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: moq_hf\.(?:forecast\.)?(\w+)$", source, re.MULTILINE)
    assert sorted([*shown, "__version__"]) == sorted([*moq_hf.__all__, "Plan"])


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """It builds, a broken link or a page outside of the navigation being an error, and the API has all arguments."""
    pytest.importorskip("mkdocs", reason="the extra docs has it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    places = {name: page.index(f'id="moq_hf.{name}"') for name in moq_hf.__all__ if name != "__version__"}
    for name, place in places.items():
        end = min((other for other in places.values() if other > place), default=len(page))
        # A config's keywords are in docs/reference/config.md; a QuantLinear is not constructed, nor is an error.
        is_shown = name not in ("MoQArguments", "MoQConfig", "QuantLinear", "MoQError", "MoQConfigError")
        arguments = inspect.signature(getattr(moq_hf, name)).parameters if is_shown else ()
        section = page[place:end]
        assert [argument for argument in arguments if not re.search(rf"\b{argument}\b", section)] == [], name


def words_of(*pages: Path) -> int:
    """Of their sources, code and tables too; what has no letter and no digit is no word."""
    tokens = [token for page in pages for token in page.read_text(encoding="utf-8").split()]
    return len([token for token in tokens if re.search(r"\w", token)])


def test_the_docs_can_be_read() -> None:
    docs = ROOT / "docs"
    assert words_of(ROOT / "README.md", *docs.rglob("*.md")) <= 20_000
    assert words_of(*docs.glob("start/*.md"), *docs.glob("guide/*.md")) <= 8_500
    assert words_of(docs / "results.md", *docs.glob("results/*.md")) <= 4_300
    glossary = (docs / "reference" / "glossary.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| (?!word |---)", glossary, re.MULTILINE)) <= 15


def test_neither_pages_nor_messages_have_words_of_the_house() -> None:
    ours = re.compile("floats on (the|their) grid|as wide as\\s+the\\s+widest|takes a byte", re.IGNORECASE)
    pages = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("moq_hf/**/*.py"),
        *ROOT.glob("moq_hf/templates/*"),
    ]
    assert [str(page) for page in pages if ours.search(page.read_text(encoding="utf-8"))] == []


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = f"## [{citation['version']}] - {citation['date-released']}"
    assert citation["version"] == moq_hf.__version__
    assert released in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    source = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"(?:\]\(|\bsrc(?:set)?=\")([^)\s\"]+)", source):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if file.suffix == ".md":
            assert not anchor or anchor in anchors_of(file), target


def test_files_named_in_the_pages_are_there() -> None:
    """Paths in backticks that begin with a folder of the repository; the changelog names what is gone too."""
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:
        for name in re.findall(
            r"`((?:configs|docs|examples|moq_hf|scripts|tests|benchmarks)/[\w./-]*\w)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
