"""The exchange that a rank waits in, for reports of stalls."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from math import inf
from typing import Any

logger = logging.getLogger(__name__)


class CurrentWait:
    """The newest exchange of a rank, and the time since which it waits for it."""

    def __init__(self, timeout_s: float) -> None:  # longest wait without a line in the log
        self._timeout_s = timeout_s
        self.text = b""  # text of the exchange's call
        self.since_s = inf  # when the wait began; infinite while transfers are in the background
        self._number = self._logged = 0  # of the exchange, and of the last one in the log

    def begin(self, text: bytes) -> None:
        """Record that an exchange begins."""
        self.text, self.since_s = text, inf
        self._number += 1

    def log_if_long(self, rank: int, size: int, waits_for: Collection[int]) -> None:
        """Log once that a rank waits for others for long."""
        waited_s = time.perf_counter() - self.since_s
        if waited_s > self._timeout_s and self._logged != self._number:
            self._logged = self._number
            logger.warning(
                "Rank %d of %d has waited %.0f s for ranks %s in %r. dask_p2p.stalled(client) "
                "returns the calls and stacks of all ranks.",
                *(rank, size, waited_s, sorted(waits_for), self.text.decode(errors="replace")),
            )

    def state(self, waits_for: Collection[int]) -> dict[str, Any]:
        """Return the call, and the ranks that this one waits for. Thread-safe."""
        ranks, waited_s = sorted(waits_for), time.perf_counter() - self.since_s
        waits = bool(ranks) and waited_s >= 0.0
        return {
            "call": self.text.decode(errors="replace"),
            "exchanges": self._number,
            "waits_for": tuple(ranks) if waits else (),
            "waited_s": waited_s if waits else 0.0,
        }
