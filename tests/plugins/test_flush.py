from __future__ import annotations

import asyncio

import dask.array as da
import numpy as np
import pytest
from distributed import wait
from distributed.batched import BatchedSend

import dask_p2p
from dask_p2p import fft
from dask_p2p.plugins.dask_internals import StreamFlusher
from tests.clock import run_clocked
from tests.support import own_client


class Comm:
    """The other end of a stream: what came there."""

    def __init__(self):
        self.received = []

    def closed(self):
        return False

    async def write(self, messages, **kwargs):
        self.received += messages
        return 1


def test_flush_sends_batched_messages():
    async def main():
        first, second = (BatchedSend(interval=3600) for _ in range(2))
        ends = [Comm(), Comm()]
        for stream, end in zip((first, second), ends, strict=True):
            stream.start(end)
            stream.send("begins")  # the pause begins with it
        flusher = StreamFlusher()

        async def flushed():
            await asyncio.sleep(1)
            return [end.received for end in ends]

        assert await flushed() == [["begins"], ["begins"]]
        first.send("waits")
        second.send("waits")
        assert await flushed() == [["begins"], ["begins"]]
        flusher.flush(first, None)  # a worker that has gone has no stream
        first.send("and what comes after")
        sent = ["begins", "waits", "and what comes after"]
        assert await flushed() == [sent, ["begins"]]
        flusher.flush(second)
        flusher.flush(second)
        assert await flushed() == [sent, ["begins", "waits"]]
        second.send("waits again")
        assert await flushed() == [sent, ["begins", "waits"]]

    run_clocked(main())


_PAUSE_S, _SHORT_S = 120, 0.002


@pytest.mark.parametrize("how", ["transform", "section"])
def test_nobody_waits_for_what_is_next(how):
    """Layers that follow each other: word of each task comes long before a pause has ended."""
    rows = da.from_array(np.arange(32.0 * 16).reshape(32, 16), chunks=(16, 16))
    with own_client() as client:
        dask_p2p.register(client)
        rows = client.persist(rows)  # else Dask fuses these tasks with the next, and renames them

        def compute():
            y = fft.fft2(rows) if how == "transform" else dask_p2p.iterate(_plus_one, rows, 1, 1)
            y = client.persist(y)
            wait(y, timeout=_PAUSE_S / 2)
            return y

        first = compute().compute()
        set_intervals(client, _PAUSE_S)
        second = compute()
        set_intervals(client, _SHORT_S)
        np.testing.assert_array_equal(second.compute(), first)


def set_intervals(client, interval_s):
    def on_scheduler(dask_scheduler):
        streams = *dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()
        for stream in streams:
            stream.interval, stream.next_deadline = interval_s, None
            stream.waker.set()

    client.run(lambda dask_worker: setattr(dask_worker.batched_stream, "interval", interval_s))
    client.run_on_scheduler(on_scheduler)


def _plus_one(u, out):
    out[...] = u[1:-1, 1:-1] + 1
