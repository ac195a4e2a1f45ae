"""Imports a module together with another one, so that neither is imported before it is needed."""

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _With(MetaPathFinder):
    """Finds nothing itself, but imports a module after the one that is searched for."""

    def __init__(self, other: str, module: str) -> None:
        self.other = other
        self.module = module

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != self.other:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(other: ModuleType) -> None:
            run(other)
            import_module(self.module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign, assignment]
        return spec


def import_with(other: str, module: str) -> None:
    """Import a module together with another one: now if that one is imported already, or right after it.

    Args:
        other: Dotted name of the module to wait for.
        module: Dotted name of the module to import.
    """
    if other in sys.modules:
        import_module(module)
    else:
        sys.meta_path.insert(0, _With(other, module))
