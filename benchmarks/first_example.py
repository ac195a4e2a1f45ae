"""Runs README's example on a pretrained model, and keeps what it prints.

    python benchmarks/first_example.py FOLDER

The folder has what the example names on the Hub, `sentence-transformers/all-MiniLM-L6-v2` and `nyu-mll/glue`. Without
it the Hub is asked.
"""

import argparse
import io
import os
import re
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

from environment import environment, write

ROOT = Path(__file__).parents[1]
HUB = ("sentence-transformers", "nyu-mll")


def example() -> str:
    """The Python of README's example."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"start:example\] -->\n```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_example.json")
    args = parser.parse_args()
    code = compile(example(), "README.md", "exec")
    out = args.out.absolute()
    with tempfile.TemporaryDirectory() as work:
        for name in HUB if args.folder else ():
            Path(work, name).symlink_to(args.folder.absolute() / name)
        os.chdir(work)
        printed, began = io.StringIO(), time.perf_counter()
        with redirect_stdout(printed):
            exec(code, {})
        seconds = time.perf_counter() - began
        os.chdir(ROOT)
    # What the Trainer logs has times, which are another every time.
    lines = [line for line in printed.getvalue().splitlines() if line.strip() and not line.startswith(("{", "\r"))]
    write({"printed": lines, "seconds": round(seconds), **environment("datasets")}, out)


if __name__ == "__main__":
    main()
