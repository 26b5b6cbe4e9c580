"""Results that are computed once for an object, and found by its identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class KeptResults(Generic[_T]):
    """Results by object, and by another key. Thread-safe.

    The objects are kept, so that no other object gets the identity of one of them.
    """

    def __init__(
        self,
        most: int = 1024,  # sum of the sizes of results: then all are dropped
        size: Callable[[_T], int] = lambda _: 1,
    ) -> None:
        self._most, self._size = most, size
        self._results: dict[tuple[int, Hashable], tuple[Any, _T]] = {}
        self._sum = 0  # of the sizes
        self._lock = Lock()  # held while a result is added

    def of(self, known: Any, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Return the result for an object and a key; compute it if it is not kept."""
        which = id(known), key
        found = self._results.get(which)
        if found is None:
            found = known, compute()
            self._keep(which, found)
        return found[1]

    def _keep(self, which: tuple[int, Hashable], found: tuple[Any, _T]) -> None:
        size = self._size(found[1])
        with self._lock:
            if which in self._results:  # by another thread
                return
            if self._sum + size > self._most:
                self._results.clear()
                self._sum = 0
            self._results[which] = found
            self._sum += size
