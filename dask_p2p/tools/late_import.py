"""An action on a module: now if it is imported, else when it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `action` with a module, now or after its import; return a function that forgets it."""
    if name in sys.modules:
        action(import_module(name))  # which waits for another thread that imports it
        return lambda: None
    finder = _ImportFinder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _ImportFinder(MetaPathFinder):
    """A finder that lets others find the module, and calls the action after it is loaded."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def forget(self) -> None:
        """Call no action any more."""
        with suppress(ValueError):  # already forgotten
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec that others find for the module, with another loader."""
        if name != self.name:
            return None
        self.forget()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self.action)
        return spec


class _ThenCall(Loader):
    """A loader that calls an action with each module that it has loaded."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the loader creates."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, and call the action."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._action(module)
