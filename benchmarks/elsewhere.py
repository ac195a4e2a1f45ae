"""Makes scripts/ and tests/helpers/ importable: a benchmark that needs a module of theirs imports this first."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "helpers")]
