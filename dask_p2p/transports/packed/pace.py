"""How much to ask of one holder at once, so that answers come well before the deadline."""

from __future__ import annotations

__all__ = ["Pace"]

# Shares of the deadline, after which an answer is late, and before which it is early.
_LATE, _EARLY = 1 / 4, 1 / 16
_SMALLEST_BYTES = 2**16  # of a late answer: less makes nothing quicker
_UNLIMITED_BYTES = 2**62


class Pace:
    """How much to ask of one holder at once.

    Many readers may share a link that carries little. Nobody knows before, so what was asked and
    came late, or not at all, is asked in smaller parts from then on.
    """

    def __init__(self) -> None:
        self.most_bytes = _UNLIMITED_BYTES  # of one answer

    def note(self, asked_bytes: int, took_s: float, limit_s: float) -> None:
        """Note how long an answer took, or that there was none within the limit."""
        share = took_s / limit_s
        if share > _LATE:
            least_bytes = min(self.most_bytes, max(asked_bytes, _SMALLEST_BYTES))
            self.most_bytes = max(_SMALLEST_BYTES, least_bytes // 4)
        elif share < _EARLY:
            self.most_bytes = min(_UNLIMITED_BYTES, max(self.most_bytes, 2 * asked_bytes))
