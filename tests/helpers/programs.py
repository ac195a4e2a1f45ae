"""Python programs in processes of their own that start at once: forked from one that has the libraries already.

Importing PyTorch and transformers takes longer than most of the programs that tests run.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import pytest

# For a pytest in such a process: the libraries are there before it can look at how they assert.
NESTED = ("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def warm() -> ForkServerContext:
    """The context whose processes begin with what `warm.py` imports; one server for all tests of a worker."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not take our search path, and leaves out what it does not find.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        # Now, since others would give it another list.
        forkserver.ensure_running()
    return context


def run(*words: str, cwd: Path, timeout: float = 300, **environment: str) -> CompletedProcess[str]:
    """`python WORDS...` in a folder: a file and its arguments, or -m, a module and its arguments.

    What depends on variables that the libraries read when they are imported needs a process that begins with nothing.
    """
    with TemporaryDirectory() as folder:
        process = warm().Process(target=_child, args=(words, cwd, {**os.environ, **environment}, folder))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        said = (Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, *said)


def _child(words: Sequence[str], cwd: Path, environment: dict[str, str], folder: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        file = os.open(Path(folder, stream.name.strip("<>")), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, str(cwd))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
