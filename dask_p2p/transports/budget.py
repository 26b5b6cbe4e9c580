"""What a holder may have packed for its readers at a time, all of them together."""

from __future__ import annotations

import threading

__all__ = ["Budget", "Room"]


class Budget:
    """Bytes that many may take, up to a limit.

    Whoever has nothing yet comes before those who want more: a quarter of the limit is kept for
    them. So no reader waits for what another one, that waits itself, is slow to take.

    Parameters
    ----------
    limit_bytes
        What all may have taken together. Something larger is taken alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken: dict[Room, int] = {}
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        """What is taken now."""
        return sum(list(self._taken.values()))

    def room(self) -> Room:
        """Return a part of the budget, with nothing in it."""
        return Room(self)


class Room:
    """What one sender has taken."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def take(self, nbytes: int) -> bool:
        """Take so many bytes more, if they are there; return whether they were."""
        budget = self._budget
        with budget._lock:
            mine_bytes, all_bytes = budget._taken.get(self, 0), budget.taken_bytes
            spare_bytes = budget.limit_bytes // 4 if mine_bytes else 0
            if all_bytes and all_bytes + nbytes + spare_bytes > budget.limit_bytes:
                return False
            budget._taken[self] = mine_bytes + nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give back some of it."""
        with self._budget._lock:
            self._budget._taken[self] -= nbytes

    def close(self) -> None:
        """Give back all that is left. Idempotent."""
        # Perhaps called in the middle of a garbage collection: no locks here.
        self._budget._taken.pop(self, None)
