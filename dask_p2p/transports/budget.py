"""What a holder may have packed for its readers at a time, for all of them together."""

from __future__ import annotations

import threading

__all__ = ["ByteBudget", "Reservation"]


class ByteBudget:
    """Bytes that several requests may reserve, up to a limit; one for more is let through alone.

    A request reserves all that it needs at once. So none waits that holds something itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[Reservation, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return sum(list(self._reserved.values()))

    def reserve(self, *sizes: int) -> list[Reservation] | None:
        """Reserve memory of these sizes, each released on its own; None: there is no room now."""
        with self._lock:
            reserved_bytes = self.reserved_bytes
            if reserved_bytes and reserved_bytes + sum(sizes) > self.limit_bytes:
                return None
            made = [Reservation(self) for _ in sizes]
            self._reserved.update(zip(made, sizes, strict=True))
            return made


class Reservation:
    """A part of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget

    def close(self) -> None:
        """Release it. Idempotent."""
        # Perhaps called in the middle of a garbage collection: no locks here.
        self._budget._reserved.pop(self, None)
