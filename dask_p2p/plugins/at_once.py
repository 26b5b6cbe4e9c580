"""Flushes Dask's batched streams for messages about this package's tasks.

Dask's client, scheduler and workers batch their messages: at least 10, 5 and 2 ms pass between two
batches. Batches save work in graphs of many small tasks. They only delay an idle worker whose next
task is in the batch.

Dask has no public setting for this, so this module sets attributes of the streams. It leaves
streams of any other type alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.batched import BatchedSend


class AtOnce:
    """Flushes batched streams at the next iteration of the event loop."""

    def __init__(self) -> None:
        self._streams: set[BatchedSend] = set()

    def send(self, *streams: Any) -> None:
        """Flush these streams soon, with messages that are added until then."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._send)
        self._streams.update(each for each in streams if isinstance(each, BatchedSend))

    def _send(self) -> None:
        while self._streams:
            stream = self._streams.pop()
            stream.next_deadline = None
            stream.waker.set()
