"""What a holder may have packed for its readers at a time, for all of them together."""

from __future__ import annotations

import threading

__all__ = ["LIMIT_REACHED", "ByteBudget", "Reservation"]

#: What a reader is told whose regions find no room in time.
LIMIT_REACHED = "its outgoing staging limit (p2p.memory.staging-limit) is reached"


class ByteBudget:
    """Bytes that several senders may reserve, up to a limit.

    A quarter of the limit is kept for senders that have nothing yet. So no reader waits for another
    one that waits itself.

    Parameters
    ----------
    limit_bytes
        What all may reserve together. Something larger is reserved alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[Reservation, int] = {}
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return sum(list(self._reserved.values()))

    def reservation(self) -> Reservation:
        """Return a reservation of no bytes yet."""
        return Reservation(self)


class Reservation:
    """What one sender has reserved."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget

    def reserve(self, nbytes: int) -> bool:
        """Reserve more bytes if they are free; return whether they were."""
        budget = self._budget
        with budget._lock:
            mine_bytes, all_bytes = budget._reserved.get(self, 0), budget.reserved_bytes
            spare_bytes = budget.limit_bytes // 4 if mine_bytes else 0
            if all_bytes and all_bytes + nbytes + spare_bytes > budget.limit_bytes:
                return False
            budget._reserved[self] = mine_bytes + nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Release some of it."""
        with self._budget._lock:
            self._budget._reserved[self] -= nbytes

    def close(self) -> None:
        """Release all that is left. Idempotent."""
        # Perhaps called in the middle of a garbage collection: no locks here.
        self._budget._reserved.pop(self, None)
