"""Imports of this package's modules at their first use."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType

_lock = RLock()  # held while a thread reads the threshold and sets another


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
    """Pause the collection of garbage by its threshold.

    `gc.disable` would last. `dask.array.slicing` reads at its import whether the collection is on,
    and sets it to that after each slice.
    """
    with _lock:
        threshold, *_ = gc.get_threshold()
        gc.set_threshold(0)
    try:
        yield
    finally:
        with _lock:
            # Zero: off before, or paused by another thread. Other than zero now: set by an import.
            if threshold and not gc.get_threshold()[0]:
                gc.set_threshold(threshold)
