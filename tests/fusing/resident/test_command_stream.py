from __future__ import annotations

import asyncio
import threading

import pytest

from dask_p2p.fusing.resident.commands import CommandStream
from tests.transports.loopback import true_later


class Comm:
    """One end of a connection: batches that were written, and whether it is open."""

    def __init__(self):
        self.batches, self.is_open, self.error = [], True, None
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def write(self, batch):
        await self.is_free.wait()
        if self.error is not None:
            raise self.error
        self.batches.append(batch)

    def abort(self):
        self.is_open = False


async def test_messages_of_many_threads_in_few_batches():
    comm = Comm()
    stream = CommandStream(comm)

    def send(thread):
        for number in range(500):
            stream.send((thread, number))

    comm.is_free.clear()
    threads = [threading.Thread(target=send, args=[n]) for n in range(4)]
    for each in threads:
        each.start()
    await asyncio.to_thread(lambda: [each.join() for each in threads])
    comm.is_free.set()
    await true_later(lambda: sum(map(len, comm.batches)) == 2000)
    sent = [message for batch in comm.batches for message in batch]
    for thread in range(4):
        assert [n for t, n in sent if t == thread] == list(range(500))
    assert len(comm.batches) < 50
    stream.close()


@pytest.mark.parametrize("error", [OSError("lost"), TypeError("cannot be sent")])
async def test_a_stream_that_cannot_write_ends(error):
    comm = Comm()
    comm.error = error
    stream = CommandStream(comm)
    stream.send("message")
    await true_later(lambda: not comm.is_open)
    if not isinstance(error, OSError):
        with pytest.raises(TypeError):
            await stream._writing
