"""Imports of this package's modules at their first use."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def loaded(name: str) -> ModuleType:
    """Return a module, after its first import if it is new in this process.

    An import makes thousands of objects, and all of them stay. Full collections are due after some
    thousand new objects. In a Dask worker one takes 72 ms, twice as long as the import of 100
    modules.
    """
    with _without_collections():
        return importlib.import_module(name)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the collection of garbage, unless it is off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
