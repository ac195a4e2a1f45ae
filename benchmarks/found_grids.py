"""Find the grids on which published and converted models lie, and write `benchmarks/results/found_grids.json`.

`python benchmarks/found_grids.py NAME=PATH ...`, where a path is a folder of floats or a GGUF file.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

from environment import environment, write

from moq_hf.packed.found_grids import found_grids

OUT = Path(__file__).with_name("results") / "found_grids.json"


def summary(path: Path) -> dict[str, object]:
    """The matrices by how they are stored and the grid that was found, and the share of their groups on it."""
    start = time.perf_counter()
    found = found_grids(path)
    kinds = Counter((each.stored, each.in_words) for each in found)
    rows = []
    for (stored, words), count in kinds.items():
        own = [each.grid for each in found if (each.stored, each.in_words) == (stored, words)]
        groups = sum(grid.groups for grid in own)
        rows.append(
            {
                "stored": stored,
                "grid": words,
                "matrices": count,
                "wholly": sum(grid.is_whole for grid in own),
                "share_of_groups": sum(grid.on_grid for grid in own) / groups,
                "taken": sum(grid.scales is not None for grid in own),
            }
        )
    return {"rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Add the models that are named to the results."""
    models = json.loads(OUT.read_text())["models"] if OUT.exists() else {}
    for argument in list(sys.argv[1:]):
        name, _, path = argument.partition("=")
        models[name] = summary(Path(path))
        print(name, json.dumps(models[name], indent=1))
        # The places of files say nothing to others.
        sys.argv = [sys.argv[0], *(word.partition("=")[0] for word in sys.argv[1:])]
        write({"models": models, **environment()}, OUT)


if __name__ == "__main__":
    main()
