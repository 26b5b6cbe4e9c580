"""What concerns this package's tasks does not wait in Dask's streams.

Dask's client, scheduler and workers collect messages, and send no two batches within 10, 5 and 2 ms
of each other. For a graph of many small tasks that saves work. A worker that has nothing to do but
the task which is to be sent waits in vain.

It is no public setting of Dask. These are attributes of the streams; whatever else they may be in
another release is left alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.batched import BatchedSend


class AtOnce:
    """Has streams send what they hold as soon as the event loop has done what it is at."""

    def __init__(self) -> None:
        self._streams: set[BatchedSend] = set()

    def send(self, *streams: Any) -> None:
        """Have streams send what they hold, and what they are given until then."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._send)
        self._streams.update(each for each in streams if isinstance(each, BatchedSend))

    def _send(self) -> None:
        while self._streams:
            stream = self._streams.pop()
            stream.next_deadline = None
            stream.waker.set()
