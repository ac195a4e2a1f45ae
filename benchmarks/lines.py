"""Results as lines of JSON."""

import json
import os
from pathlib import Path
from typing import Any

from environment import environment


class Lines:
    """A file of JSON lines that a stopped benchmark goes on with.

    Args:
        path: Made with its folder if it is not there.
        modules: Those whose versions each line has too.
    """

    def __init__(self, path: Path, *modules: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.modules = path, modules

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All of them, those of other processes too."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def has(self, **key: Any) -> bool:
        """Whether there is a line with these values."""
        return any(all(line.get(name) == value for name, value in key.items()) for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, with what it was made by, at once."""
        line = {**line, **environment(*self.modules, load=round(os.getloadavg()[0], 1))}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
