"""Runs README's first example on the model and the data that it names, without the Hub; JSON of what it prints.

    python benchmarks/first_example.py --model all-MiniLM-L6-v2 --data glue/sst2

The model's folder and the data's, with train.jsonl and validation.jsonl, are linked under their names on the Hub.
"""

import argparse
import contextlib
import io
import os
import re
import tempfile
import time
from pathlib import Path

import yaml
from environment import environment, write

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "first_example.json"
MODEL, DATA = "sentence-transformers/all-MiniLM-L6-v2", "nyu-mll/glue"
SPLITS = ("train", "validation")


def example() -> str:
    """The code of the first example that runs as it stands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?s)<!-- --8<-- \[start:example\] -->\n```python\n(.*?)```", text)
    return block


def link(folder: Path, model: Path, data: Path) -> None:
    """Give a model and data the names in `folder` that they have on the Hub."""
    (folder / MODEL).parent.mkdir(parents=True)
    (folder / MODEL).symlink_to(model.resolve(), target_is_directory=True)
    (folder / DATA).mkdir(parents=True)
    (folder / DATA / "sst2").symlink_to(data.resolve(), target_is_directory=True)
    files = [{"split": split, "path": f"sst2/{split}.jsonl"} for split in SPLITS]
    header = yaml.safe_dump({"configs": [{"config_name": "sst2", "data_files": files}]})
    (folder / DATA / "README.md").write_text(f"---\n{header}---\n", encoding="utf-8")


def printed(code: str) -> list[str]:
    """What the code prints in the current folder, without the log lines of the Trainer."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    return [line for line in output.getvalue().splitlines() if line and not line.startswith(("{", "\r"))]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    out = args.out.resolve()
    code = example()
    with tempfile.TemporaryDirectory() as folder:
        link(Path(folder), args.model, args.data)
        began, cpu = time.perf_counter(), time.process_time()
        with contextlib.chdir(folder):
            os.environ["HF_HUB_OFFLINE"] = "1"
            lines = printed(code)
        timed = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    write({"prints": lines, **timed, **environment()}, out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
