"""Imports of this package's modules at their first use, and actions after imports of others."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: Folders of installed packages.
_INSTALLED = {"site-packages", "dist-packages"}
#: Packages that are not the user's, wherever they lie.
_LIBRARIES = {*sys.stdlib_module_names, "dask_p2p", "dask", "distributed"}


def load_module(name: str) -> ModuleType:
    """Return a module, after its first import if it is new in this process.

    An import makes thousands of objects, and all of them stay. During the import no garbage is
    collected: in a Dask worker a full collection takes 72 ms, twice as long as the import of 100
    modules. `gc.disable` would last, since `dask.array.slicing` reads it at its import.
    """
    threshold, *_ = gc.get_threshold()
    gc.set_threshold(0)
    try:
        return importlib.import_module(name)
    finally:
        # Zero: off before, or by another thread's import. Other than zero now: set by the import.
        if threshold and not gc.get_threshold()[0]:
            gc.set_threshold(threshold)


def call_when_imported(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `action` with a module, now or after its import; return a function that forgets it."""
    if name in sys.modules:
        action(importlib.import_module(name))  # which waits for another thread that imports it
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _Finder(MetaPathFinder):
    """Finds one module by the other finders, and calls a function after its import."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def forget(self) -> None:
        with suppress(ValueError):  # already forgotten
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = self._then_call(loader.exec_module)
        return spec

    def _then_call(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def executed(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self.forget()
                self._action(module)

        return executed


def is_library(module_name: str) -> bool:
    """Return whether a module is not the user's: one of Python or Dask, or of an installed package.

    A folder of installed packages has the metadata of one: ``pip install --target`` takes any name.
    """
    root = module_name.partition(".")[0]
    if root in _LIBRARIES:
        return True
    module = sys.modules.get(root)
    path = next(iter(getattr(module, "__path__", ())), getattr(module, "__file__", None))
    with suppress(OSError):  # for example, this process has no free file
        return path is not None and _has_libraries(Path(path).parent)
    return False


@cache
def _has_libraries(folder: Path) -> bool:
    return bool(_INSTALLED & {*folder.parts}) or any(folder.glob("*.dist-info"))
