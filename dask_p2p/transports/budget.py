"""What a holder may have packed for its readers at a time, for all of them together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

__all__ = ["ByteBudget", "Release"]

#: Gives back what was reserved. Idempotent; called perhaps in the middle of a garbage collection.
Release: TypeAlias = Callable[[], object]


class ByteBudget:
    """Bytes that several requests may reserve, up to a limit; one for more is let through alone.

    A request reserves all that it needs at once. So none waits that holds something itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[object, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return sum(list(self._reserved.values()))

    def reserve(self, *sizes: int) -> list[Release] | None:
        """Reserve memory of these sizes; return what releases each. None: there is no room now."""
        with self._lock:
            reserved_bytes = self.reserved_bytes
            if reserved_bytes and reserved_bytes + sum(sizes) > self.limit_bytes:
                return None
            made = [object() for _ in sizes]
            self._reserved.update(zip(made, sizes, strict=True))
            return [partial(self._reserved.pop, one, None) for one in made]  # which takes no lock
