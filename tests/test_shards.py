"""Parts of a weight are quantized, in processes that hold one each, as the whole is in one."""

from pathlib import Path

import programs
from repo import HELPERS, ROOT


def test_parts_are_quantized_as_the_whole_is(tmp_path: Path) -> None:
    """Random weights, kinds, grids and bits in three processes; some hold nothing of a weight."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    words += ["--run-path", "--start-method", "fork", str(HELPERS / "sharded.py"), str(tmp_path / "wrong")]
    done = programs.run(*words, cwd=ROOT, timeout=300, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    *wrong, counted = (tmp_path / "wrong").read_text().splitlines()
    assert wrong == []
    # With as many processes as these, groups lie across borders in many cases, and in many they do not.
    cases, split = map(int, counted.split())
    assert cases / 5 < split < cases * 4 / 5
