"""Where things lie in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
HELPERS = ROOT / "tests" / "helpers"
