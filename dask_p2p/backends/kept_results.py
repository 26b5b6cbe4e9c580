"""Results that are computed once for an object, and found by its identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class KeptResults(Generic[_T]):
    """Results by object, and by another key.

    The objects are kept, so that no other object gets the identity of one of them.
    """

    def __init__(self, most: int = 1024) -> None:  # number of results: then all are dropped
        self._most = most
        self._results: dict[tuple[int, Hashable], tuple[Any, _T]] = {}

    def of(self, known: Any, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Return the result for an object and a key; compute it if it is not kept."""
        which = id(known), key
        found = self._results.get(which)
        if found is None:
            if len(self._results) >= self._most:
                self._results.clear()
            found = self._results[which] = known, compute()
        return found[1]
