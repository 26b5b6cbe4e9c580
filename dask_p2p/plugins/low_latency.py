"""Dask's messages wait less long to be sent together.

Dask's client, scheduler and workers collect messages, and send no two batches within 10, 5 and 2 ms
of each other. For a graph of many small tasks that saves work. A worker that has nothing to do but
the task which is to be sent waits in vain: so what concerns this package's tasks goes `AtOnce`
there.

Opt-in ``p2p.low-latency`` makes all these pauses 0.5 ms. That concerns everything that the cluster
does, so a user has to ask for it: the client, the scheduler and each worker read it in their own
configuration.

A worker has several threads in a transfer: one a task, one a reader, the event loop. A thread that
has to wait for Python's lock gets it after 5 ms, or whenever it is released; with low latency that
is 0.5 ms too. Messages of UCX, each of which needs two threads at either end, gain by it.

Neither is a public setting of Dask. They are attributes of the streams, and are set as these come;
whatever else they may be in another release is left alone.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from distributed.batched import BatchedSend

INTERVAL_S = 0.5e-3


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


def shorten(stream: Any) -> None:
    """Let a stream send as often as every `INTERVAL_S`."""
    if isinstance(stream, BatchedSend):
        stream.interval = min(stream.interval, INTERVAL_S)


def shorten_worker(worker: Any) -> None:
    """Shorten the pauses of a worker: of its stream to the scheduler, and of Python's threads."""
    shorten(worker.batched_stream)
    sys.setswitchinterval(min(sys.getswitchinterval(), INTERVAL_S))


def shorten_scheduler(scheduler: Any) -> None:
    """Shorten the pauses of a scheduler towards all clients and workers that are connected."""
    for stream in [*scheduler.stream_comms.values(), *scheduler.client_comms.values()]:
        shorten(stream)
