"""A stream of messages over a connection of Dask, between a client and a rank of a resident gang.

Messages that are sent while another one is on its way go together: a batch costs Dask about as much
as one message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any


class CommandStream:
    """One end of a stream. Made on the event loop."""

    def __init__(self, comm: Any) -> None:  # a connection of Dask
        self._comm, self._loop = comm, asyncio.get_running_loop()
        self._unsent: deque[Any] = deque()
        self._has_unsent = asyncio.Event()
        self._is_awake = False  # whether the event will be set
        self._writing = asyncio.ensure_future(self._write())

    def send(self, *messages: Any) -> None:
        """Send messages soon. Any thread may call this."""
        self._unsent.extend(messages)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._has_unsent.set)

    async def read(self) -> Any:
        """Return the next batch of messages. Raises `OSError` once the stream has ended."""
        return await self._comm.read()

    def close(self) -> None:
        """End the stream, without the messages that were not sent. On the event loop."""
        self._writing.cancel()
        self._comm.abort()

    async def _write(self) -> None:
        try:
            with suppress(OSError):
                while True:
                    await self._has_unsent.wait()
                    self._has_unsent.clear()
                    self._is_awake = False  # first: later messages set the event again
                    if batch := [self._unsent.popleft() for _ in range(len(self._unsent))]:
                        await self._comm.write(batch)
        finally:
            self._comm.abort()  # wakes the reader, also after a message that cannot be sent
